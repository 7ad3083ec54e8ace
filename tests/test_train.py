"""mok train: the digest and what must not move it, stops and resumption, the files of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from mok import train
from mok.model import LanguageModel
from mok.train import Checkpoint, Options, Ranks, Trainer, TrainError

STEPS = 20
SMALL = dict(steps=STEPS, hidden=64, layers=3, batch=8, sequence=32, experts=8, top_k=2, checkpoint_every=3, eval_every=10)
TIMEOUT_S = 150
pytestmark = pytest.mark.usefixtures("restored")


def here(run: Path, resume: bool = False, **options) -> int:
    """A run of one rank in this process."""
    return train.train(Options(**{**SMALL, **options}), run, resume)


def digest_of(output: str) -> str:
    match = re.fullmatch(r"digest ([0-9a-f]{64})", output.strip().splitlines()[-1])
    assert match, output
    return match[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text) -> tuple[Path, str]:
    """Folder and digest of a run of one rank that nothing disturbed: what all others are compared with."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert here(run, text=text) == 0
    return run, train.digest(Checkpoint.load(run / "checkpoints" / f"step-{STEPS:08d}.safetensors").model)


def command(*arguments: str, **options) -> list[str]:
    values = [f"{train.flag(name)}={value}" for name, value in {**SMALL, **options}.items()]
    return [*arguments, "-m", "mok", "train", *values]


def start(folder: Path, line: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def finish(process: subprocess.Popen, timeout: float = TIMEOUT_S) -> tuple[int, str, str]:
    """Exit code and output; after the timeout the whole job is killed and the test fails."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end within {timeout} s\n{out}\n{err}")
    return process.returncode, out, err


def wait_for(what: str, ready, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            pytest.fail(f"{what} did not come\n" + "\n".join(process.communicate()))
        time.sleep(0.005)


def steps_saved(run: Path) -> list[int]:
    return [int(path.stem.removeprefix("step-")) for path in train.checkpoints(run / "checkpoints")]


# --- what does not move a bit ---


@pytest.mark.parametrize(
    "changes",
    [
        dict(minibatch=128, macrobatch=128, saved_rows=0),
        dict(minibatch=256, macrobatch=512, saved_rows=128),
        dict(checkpoint_every=7, eval_every=4),
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()),
)
def test_digest_is_the_same_for_every_tuning(changes, whole, text, tmp_path, capsys):
    assert here(tmp_path / "run", text=text, **changes) == 0
    assert digest_of(capsys.readouterr().out) == whole[1]


def test_digest_is_the_same_on_two_ranks(whole, text, tmp_path):
    line = command(sys.executable, text=text, ranks=2, name="two", minibatch=128, macrobatch=256, saved_rows=0)
    code, out, err = finish(start(tmp_path, line))
    assert code == 0, err
    assert "Warning" not in err, "for one, of generators: every weight comes from the seed"
    assert digest_of(out) == whole[1]
    losses = [[entry["loss"] for entry in train.read_metrics(run / "metrics.jsonl")] for run in (whole[0], tmp_path / "runs" / "two")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_digest_is_the_same_on_four_ranks_of_torchrun(whole, text, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    code, out, err = finish(start(tmp_path, command(*launcher, text=text, name="four")))
    assert code == 0, err
    assert digest_of(out) == whole[1]


@pytest.mark.parametrize("precision, ranks", [pytest.param("mxfp8", 2, marks=pytest.mark.thorough), ("fp8", 1)])
def test_a_quantized_run_learns_with_the_same_bits_on_other_ranks_or_knobs(precision, ranks, text, tmp_path):
    options = dict(text=text, precision=precision, steps=6)
    assert here(tmp_path / "run", **options) == 0
    options |= dict(minibatch=128, macrobatch=256, saved_rows=0)
    if ranks == 1:
        assert here(tmp_path / "runs" / "other", **options) == 0
    else:
        code, _, err = finish(start(tmp_path, command(sys.executable, ranks=ranks, name="other", **options)))
        assert code == 0, err
    one, other = (train.read_metrics(run / "metrics.jsonl") for run in (tmp_path / "run", tmp_path / "runs" / "other"))
    assert [entry["loss"] for entry in one] == [entry["loss"] for entry in other]
    assert one[-1]["loss"] < one[0]["loss"] - 0.3


def test_what_cannot_be_quantized_is_refused():
    for match, options in {
        "--precision=int8: must be one of bf16, mxfp8, fp8": dict(precision="int8"),
        "--precision=fp8: needs --moe=mok": dict(precision="fp8", dtype="bfloat16", moe="torch"),
        "--precision=mxfp8: needs --moe=mok": dict(precision="mxfp8", dtype="bfloat16", against="torch"),
    }.items():
        with pytest.raises(TrainError, match=match):
            Options(**SMALL, **options)


# --- bf16, as on a GPU ---


@pytest.fixture(scope="module")
def whole_bf16(tmp_path_factory, text) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("runs") / "bf16"
    assert here(run, text=text, dtype="bfloat16") == 0
    return run, train.digest(Checkpoint.load(run / "checkpoints" / f"step-{STEPS:08d}.safetensors").model)


def test_bf16_digest_is_the_same_on_two_ranks_and_for_other_knobs(whole_bf16, text, tmp_path):
    knobs = dict(minibatch=128, macrobatch=256, saved_rows=0)
    code, out, err = finish(start(tmp_path, command(sys.executable, text=text, dtype="bfloat16", ranks=2, name="two", **knobs)))
    assert code == 0, err
    assert digest_of(out) == whole_bf16[1]


def test_bf16_run_is_resumed_with_the_same_bits(whole_bf16, text, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole_bf16[0], run)
    train.checkpoints(run / "checkpoints")[-1].unlink()
    assert steps_saved(run) == [18]
    assert here(run, resume=True, text=text, dtype="bfloat16") == 0
    assert digest_of(capsys.readouterr().out) == whole_bf16[1]


def test_bf16_computes_with_rounded_copies_of_fp32_parameters(text):
    trainer = Trainer(Options(**SMALL, text=text, dtype="bfloat16"), train.read_text(text, 32), Ranks())
    for _ in range(2):
        trainer.step()
    computed = {**dict(trainer.model.trunk.named_parameters()), **trainer.model.experts()}
    for name, parameter in {**trainer.replicated, **trainer.experts}.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.bfloat16(), computed[name]), name
        assert parameter.ndim == 1 or not torch.equal(parameter, computed[name].float()), name
    assert trainer.state().keys() >= computed.keys()
    assert {tensor.dtype for tensor in trainer.state().values()} == {torch.float32}


def losses(text: str, **options) -> list[float]:
    trainer = Trainer(Options(**{**SMALL, **options, "text": text, "dtype": "bfloat16"}), train.read_text(text, 32), Ranks())
    for _ in range(STEPS):
        trainer.step()
    return [step.loss for step in trainer.read()]


def test_the_torch_layer_learns_the_same(text):
    """Other roundings move the loss by some thousandths of a bit, another seed by tenths (mean of the last steps)."""
    ours, theirs, other_seed = losses(text), losses(text, moe="torch"), losses(text, seed=1)
    mean = lambda found: sum(found[-5:]) / 5  # noqa: E731
    assert abs(ours[0] - theirs[0]) < 2e-3
    assert abs(mean(ours) - mean(theirs)) < 0.03
    assert abs(mean(ours) - mean(other_seed)) > 2 * abs(mean(ours) - mean(theirs))


def test_another_layer_is_timed_in_turns(text, tmp_path, capsys, monkeypatch):
    for name in ("ROUNDS", "ROUND_STEPS", "WARMUP_STEPS"):
        monkeypatch.setattr(train, name, 1)
    assert here(tmp_path / "plain", text=text, dtype="bfloat16", steps=3) == 0
    expected = digest_of(capsys.readouterr().out)
    assert here(tmp_path / "turns", text=text, dtype="bfloat16", steps=3, against="torch") == 0
    output = capsys.readouterr().out
    assert digest_of(output) == expected, "it is the run's own, as without the comparison"
    for row in ("tokens/s in turns, mok", "tokens/s in turns, torch", "mok over torch"):
        assert row in output


# --- GPUs that are not there ---


def test_a_gpu_that_is_missing_is_named(text, tmp_path, monkeypatch):
    options = Options(**SMALL, text=text, device="cuda", dtype="bfloat16", ranks=2)
    monkeypatch.delenv(train.SHARED_GPUS, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for gpus, message in {0: "--device=cuda: PyTorch finds no GPU", 1: r"--ranks=2: 2 ranks on this machine of 1 GPU\(s\)"}.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(TrainError, match=message):
            train.train(options, tmp_path / "run", False)
    assert not (tmp_path / "run").exists()
    for variable in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(train.SHARED_GPUS, "1")
    train._look_for_gpus(options)
    assert (os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"], os.environ["NCCL_NVLS_ENABLE"]) == ("1", "0")


def test_digest_moves_with_seed_and_slices(whole, text, tmp_path, capsys):
    for name, changes in {"seed": dict(seed=1), "slices": dict(slices=2)}.items():
        assert here(tmp_path / name, text=text, steps=3, **changes) == 0
    assert here(tmp_path / "three", text=text, steps=3) == 0
    digests = [line for line in capsys.readouterr().out.splitlines() if line.startswith("digest")]
    assert len(set(digests)) == 3


def test_digest_sees_one_bit_a_name_a_shape_and_a_dtype():
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    original = train.digest(tensors)
    assert train.digest(dict(reversed(tensors.items()))) == original
    flipped = tensors["a"].clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    for changed in (
        {**tensors, "a": flipped},
        {"c": tensors["a"], "b": tensors["b"]},
        {**tensors, "a": torch.zeros(3, 2)},
        {**tensors, "a": torch.zeros(2, 3, dtype=torch.int32)},
    ):
        assert train.digest(changed) != original


# --- what is learned ---


def test_loss_falls(whole):
    lines = train.read_metrics(whole[0] / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert 7.0 < lines[0]["loss"] < 10.0
    assert lines[-1]["loss"] < lines[0]["loss"] - 2.0
    assert lines[-1]["validation"] < lines[9]["validation"]


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path):
    with pytest.raises(TrainError, match=r"step \d+: the loss is (nan|inf); a smaller --lr may help"):
        here(tmp_path / "run", text=text, lr=1e30)


def test_gradients_are_those_of_autograd_on_the_whole_batch(text):
    """Four replicas and the ordered sum against one plain backward of the mean loss (balance loss apart, which is small)."""
    options = Options(**SMALL, text=text)
    trainer = Trainer(options, train.read_text(text, options.sequence), Ranks())
    plain = LanguageModel(options.model())
    plain.initialize(options.seed)

    starts = torch.arange(0, 80 * options.batch, 80)
    inputs, targets = trainer._local_slices(trainer.train_bytes, starts)
    logits, _ = trainer.model(inputs)
    losses = [trainer._loss(*pair) / options.slices for pair in zip(logits, targets, strict=True)]
    torch.autograd.backward(losses)
    replicated, experts = trainer._sum_gradients()
    got = dict(zip((*trainer.replicated, *trainer.experts), (*replicated, *experts), strict=True))

    (whole_logits,), _ = plain([torch.cat(inputs)])
    F.cross_entropy(whole_logits.flatten(0, 1), torch.cat(targets).flatten()).backward()
    torch.testing.assert_close(torch.cat(logits), whole_logits, rtol=1e-5, atol=1e-5)
    expected = {**dict(plain.trunk.named_parameters()), **plain.experts()}
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.abs().max() > 0, name


def test_replicas_share_parameters_and_not_gradients(text):
    model = LanguageModel(Options(**SMALL).model(), replicas=3)
    first, _, last = model.replicas
    for mine, other in zip(first.state_dict().values(), last.state_dict().values(), strict=True):
        assert mine.data_ptr() == other.data_ptr()
    with torch.no_grad():
        first.head.weight += 1
    model.moe_blocks()[0].update_bias(0.5)
    model.moe_blocks()[0].router.bias += 1
    assert torch.equal(first.head.weight, last.head.weight)
    assert torch.equal(first.blocks[1].router.bias, last.blocks[1].router.bias)
    last.head.weight.sum().backward()
    assert first.head.weight.grad is None


def test_selection_bias_is_learned_and_kept(whole):
    model = Checkpoint.load(train.checkpoints(whole[0] / "checkpoints")[-1]).model
    assert model["blocks.1.router.bias"].abs().max() > 0


def test_learning_rate_as_documented():
    rates = [train.learning_rate(step, 20, 1.0) for step in (0, 1, 11)]
    assert rates == pytest.approx([0.5, 1.0, 0.55])


# --- text ---


def test_whole_entries_are_held_out():
    files = [(f"{entry}/{part}.py", f"<{entry} {part}>".encode() * 40) for entry in range(60) for part in range(3)]
    kept, held_out, split = train.split_files(files)
    total = sum(len(content) for _, content in files)
    assert len(kept) + len(held_out) == total
    assert total / 100 <= len(held_out) <= total / 10
    assert "of 60" in split
    for entry in range(60):
        assert (f"<{entry} ".encode() in kept) != (f"<{entry} ".encode() in held_out), entry
    assert train.split_files(files) == (kept, held_out, split)


def test_the_tail_of_a_single_file_is_held_out():
    content = bytes(index % 251 for index in range(2000))
    assert train.split_files([("one.txt", content)]) == (content[:1900], content[1900:], "the last 5 % of the text")


def test_standard_library_split_does_not_leak():
    text = train.read_text(None, 256)
    assert len(text.train) > 10 * len(text.held_out) > 1_000_000
    blocks = [text.held_out[start : start + 400] for start in range(0, len(text.held_out) - 400, 20_000)]
    assert not [block for block in blocks if block in text.train]


def test_folders_are_read_in_order_without_hidden_binary_and_repeated_files(tmp_path):
    for name, content in {
        "b.txt": b"bbbb",
        "a/z.txt": b"zzzz",
        ".git/x": b"xxxx",
        "c.bin": b"c\0c",
        "d.txt": b"bbbb",
        "e.txt": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(train._read_folder(tmp_path, python_only=False)) == [("a/z.txt", b"zzzz"), ("b.txt", b"bbbb")]


def test_yardsticks():
    text = train.Text("here", b"", bytes(range(256)) * 64, "by hand")
    assert text.unigram_bits() == pytest.approx(8.0)
    assert 0 < text.xz_bits() < 1


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 100)
    with pytest.raises(TrainError, match=r"--text=.*short.txt: 5 bytes of held-out text are too few for --sequence=32"):
        train.read_text(str(tmp_path / "short.txt"), 32)


# --- stops and resumption ---


def test_killed_and_resumed_at_another_number_of_ranks(whole, text, tmp_path, capsys):
    run = tmp_path / "runs" / "victim"
    process = start(tmp_path, command(sys.executable, text=text, ranks=2, name="victim"))
    wait_for("a checkpoint", lambda: steps_saved(run)[-1:] >= [6], process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert 0 < steps_saved(run)[-1] < STEPS
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 19, "lo')  # a line cut short
    assert here(run, resume=True, text=text) == 0
    assert digest_of(capsys.readouterr().out) == whole[1]
    assert [line["step"] for line in train.read_metrics(run / "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_interrupt_leaves_a_checkpoint_and_130(whole, text, tmp_path, capsys):
    """As from a terminal: the signal goes to all processes of the job."""
    run = tmp_path / "runs" / "victim"
    process = start(tmp_path, command(sys.executable, text=text, ranks=2, name="victim"))
    wait_for("a checkpoint", lambda: steps_saved(run), process)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert code == train.INTERRUPTED, err
    assert "Traceback" not in err
    done = steps_saved(run)[-1]
    assert f"stopped after step {done}" in out
    assert 0 < done < STEPS
    assert here(run, resume=True, text=text) == 0
    assert digest_of(capsys.readouterr().out) == whole[1]


def test_terminate_one_rank_and_resume_on_two(whole, text, tmp_path):
    run = tmp_path / "runs" / "victim"
    process = start(tmp_path, command(sys.executable, text=text, ranks=1, name="victim"))
    wait_for("a checkpoint", lambda: steps_saved(run), process)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == train.INTERRUPTED, err
    line = [sys.executable, "-m", "mok", "train", "--resume=victim", "--ranks=2", "--saved-rows=0"]
    code, out, err = finish(start(tmp_path, line))
    assert code == 0, err
    assert digest_of(out) == whole[1]


def test_second_interrupt_ends_at_once(text, tmp_path):
    process = start(tmp_path, command(sys.executable, text=text, ranks=2, name="victim", batch=512, sequence=512, hidden=128))
    wait_for("the run", lambda: (tmp_path / "runs" / "victim" / "config.json").exists(), process)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, timeout=10)
    assert code == train.INTERRUPTED, err
    assert "once more ends at once" in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for the ranks in /proc")
def test_a_rank_that_dies_ends_the_job(text, tmp_path):
    run = tmp_path / "runs" / "victim"
    process = start(tmp_path, command(sys.executable, text=text, ranks=2, name="victim", steps=10_000))
    wait_for("a checkpoint", lambda: steps_saved(run), process)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    ranks = sorted(child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes())
    os.kill(ranks[1], signal.SIGKILL)
    code, _, err = finish(process, timeout=60)
    assert code == 1
    assert "error: rank 1 died" in err
    assert "SIGKILL" in err
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]


def test_a_finished_run_can_be_resumed(whole, text, tmp_path, capsys):
    run = tmp_path / "whole"
    shutil.copytree(whole[0], run)
    assert here(run, resume=True, text=text) == 0
    assert digest_of(capsys.readouterr().out) == whole[1]


# --- the files of a run ---


def test_files_of_a_run(whole):
    run = whole[0]
    assert {path.name for path in run.iterdir()} == {"config.json", "metrics.jsonl", "plot.png", "checkpoints"}
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert steps_saved(run) == [18, 20], "the last two checkpoints are kept"
    config = json.loads((run / "config.json").read_text())
    assert Options(**config["options"]).hidden == SMALL["hidden"]
    line = train.read_metrics(run / "metrics.jsonl")[-1]
    assert set(line) == {"step", "loss", "lr", "grad_norm", "load", "tokens_per_second", "validation"}
    assert len(line["load"]) == SMALL["layers"] - 1


def test_nothing_is_saved_without_checkpoints(text, tmp_path, capsys):
    assert here(tmp_path / "run", text=text, steps=3, checkpoint_every=0) == 0
    digest_of(capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "metrics.jsonl"}


def test_metrics_have_a_line_per_step_however_often_they_are_read(whole, text, tmp_path, monkeypatch):
    """As on a GPU, where steps are read together."""
    options = Options(**SMALL, text=text)
    trainer = Trainer(options, train.read_text(text, options.sequence), Ranks())
    report = train._Report(options, tmp_path, trainer.text, 0, trainer.num_parameters())
    for done in range(1, 8):
        trainer.step()
        if done in (3, 7):
            report.steps(done, trainer.read(), 2.0, 4.5 if done == 7 else None)
    lines, expected = (train.read_metrics(run / "metrics.jsonl") for run in (tmp_path, whole[0]))
    for name in ("step", "loss", "lr", "grad_norm", "load"):
        assert [line[name] for line in lines] == [line[name] for line in expected[:7]], name
    assert [line.get("validation") for line in lines] == [None] * 6 + [4.5]
    assert report.seconds == pytest.approx([2 / 3] * 3 + [2 / 4] * 4)


def test_without_matplotlib_there_is_no_plot(whole, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reason = train.plot(tmp_path, 4.0, 2.0)
    assert reason is not None
    assert "matplotlib" in reason
    assert not (tmp_path / "plot.png").exists()


def test_a_crash_while_writing_leaves_the_old_checkpoint(whole, tmp_path, monkeypatch):
    checkpoint = Checkpoint.load(train.checkpoints(whole[0] / "checkpoints")[-1])
    path = checkpoint.save(tmp_path)
    old = path.read_bytes()

    def crash(*arguments):
        raise KeyboardInterrupt

    changed = dataclasses.replace(checkpoint, model={name: tensor + 1 for name, tensor in checkpoint.model.items()})
    for moment in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, moment, crash)
            with pytest.raises(KeyboardInterrupt):
                changed.save(tmp_path)
        assert path.read_bytes() == old
        assert train.checkpoints(tmp_path) == [path]
    later = dataclasses.replace(changed, step=checkpoint.step + 1).save(tmp_path)
    assert train.digest(Checkpoint.load(later).model) != train.digest(checkpoint.model)
    assert {file.name for file in tmp_path.iterdir()} == {path.name, later.name}, "what the crash left is cleared away"


def test_checkpoint_round_trip(whole, tmp_path):
    checkpoint = Checkpoint.load(train.checkpoints(whole[0] / "checkpoints")[-1])
    assert (checkpoint.step, checkpoint.position) == (STEPS, STEPS * SMALL["batch"])
    assert checkpoint.model["blocks.1.experts.gate_EIH"].shape == (8, 32, 64)
    assert set(checkpoint.adam) >= {"exp_avg/head.weight", "exp_avg_sq/blocks.2.experts.down_EHI"}
    again = Checkpoint.load(checkpoint.save(tmp_path))
    for field in dataclasses.fields(Checkpoint):
        ours, theirs = getattr(checkpoint, field.name), getattr(again, field.name)
        if isinstance(ours, dict) and field.name != "fixed":
            assert train.digest(ours) == train.digest(theirs)
        else:
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def _broken(run: Path, how: str) -> str:
    """Break the newest checkpoint of a run; returns what the error must say."""
    path = train.checkpoints(run / "checkpoints")[-1]
    content = path.read_bytes()
    if how == "torn":
        path.write_bytes(content[: len(content) // 2])
        return r"step-00000020.*: torn, or not a checkpoint.*remove it to go on from step-00000018"
    if how == "one bit":
        path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        return r"damaged: its tensors do not match its checksum"
    if how == "foreign":
        save_file({"weight": torch.zeros(3)}, path)
        return r"not a checkpoint of mok train"
    for checkpoint in train.checkpoints(run / "checkpoints"):
        checkpoint.unlink()
    return r"no checkpoint in"


@pytest.mark.parametrize("how", ["torn", "one bit", "foreign", "none"])
def test_broken_checkpoints_are_refused(how, whole, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    message = _broken(run, how)
    with pytest.raises(TrainError, match=message):
        here(run, resume=True, text=text)


def test_another_runs_checkpoint_and_a_changed_text_are_refused(whole, text, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    with pytest.raises(TrainError, match=r"from another run: it has --seed=0, the run has 1"):
        here(run, resume=True, text=text, seed=1)
    other = tmp_path / "text"
    shutil.copytree(text, other)
    config = json.loads((run / "config.json").read_text())
    config["options"]["text"] = str(other)
    checkpoint = dataclasses.replace(
        Checkpoint.load(train.checkpoints(run / "checkpoints")[-1]), fixed={**Options(**SMALL).fixed(), "text": str(other)}
    )
    checkpoint.save(run / "checkpoints")
    (other / "abc.py").write_text("changed = True\n" * 100)
    with pytest.raises(TrainError, match="the text has changed"):
        here(run, resume=True, text=str(other))


def test_options_that_move_bits_cannot_change_on_resume(whole):
    run = whole[0]
    assert train.resumed_options(run, {"ranks": 4, "saved_rows": 0, "minibatch": 128}).ranks == 4
    assert train.resumed_options(run, {"steps": STEPS}).steps == STEPS
    for name, value in {"steps": 21, "lr": 1e-4, "slices": 8}.items():
        with pytest.raises(TrainError, match=rf"--{name}={value}: the run was started with"):
            train.resumed_options(run, {name: value})
