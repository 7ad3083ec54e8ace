"""The benchmarks without a GPU: they run, check what they time, end when they must; and the baselines compute the layer."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mok import executor, quantize, reference, trace, tune
from mok.bench import baselines, checks, comm, ep, layer, layers, limit, overlap, plot, ranks, report, rivals, shapes, suites, timing
from mok.config import PRESETS

ROOT = Path(__file__).resolve().parent.parent


def run(*line: str, timeout: float = 150.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, timeout=timeout, cwd=ROOT, env={**os.environ, **environment}
    )


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_layers_over_two_ranks(tmp_path, capsys):
    """All checks of the suite itself: near the definition, repeated bits, the bits of one rank, and both exchanging baselines."""
    out = tmp_path / "rows.json"
    assert suites.main(["ep", "--ranks", "2", "--repeats", "1", "--limit", "120", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["machine"] == "cpu" and written["sources_sha256"] == report.sources_sha256()
    assert [row["direction"] for row in written["rows"]] == ["fwd", "bwd"]
    for row in written["rows"]:
        assert row["suite"] == "ep" and row["ep"] == 2 and set(row["baselines"]) == {"nccl", "nccl padded"}
        assert row["ms"] or row["direction"] == "bwd", "on a CPU a backward is the difference of two times, here of one call each"
    assert "best other" in capsys.readouterr().out


def test_versions_against_each_other():
    """The same sources twice, and a plan that neither can run."""
    root = Path(__file__).resolve().parents[1]
    plans = json.dumps({"odd": {"minibatch_tiles": 0}})
    options = [f"--roots=a={root},b={root}", "--shapes=tiny", "--turns=1", "--calls=1", f"--plans={plans}"]
    command = [sys.executable, str(root / "benchmarks" / "compare.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[2][:5] for line in lines[:2]] == ["a odd", "b odd"]
    assert len(lines) == 3 and all(f" {label} " in lines[2] for label in ("a", "a torch", "a cublas", "b"))


# ---- all of them ----


@pytest.fixture
def everything(tmp_path, monkeypatch):
    """benchmarks/all.py, and its results, of two GPUs that are not there."""
    specification = importlib.util.spec_from_file_location("everything", ROOT / "benchmarks" / "all.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return module, module.Results(tmp_path, "abc")


def test_all_commands_are_timed_and_end(everything):
    _, results = everything
    assert results.run("short", "-c", "print(7)") == "7\n" and results.done and 0 <= results.seconds["short"] < 60
    assert results.run("wrong", "-c", "print(7); raise SystemExit(3)") is None and not results.done
    results.done = True
    start = time.monotonic()
    assert results.run("long", "-c", "import time; time.sleep(300)", limit_s=1.0) is None and not results.done
    assert 1 <= results.seconds["long"] <= time.monotonic() - start < 60


def test_all_keep_what_a_suite_had_at_its_limit(everything):
    _, results = everything
    for missing, kept in (({"b": "left out"}, True), (None, False)):
        document = json.dumps(report.document([dict(shape="a")], missing=missing))
        made = results.measure("cut", None, "-c", f"import sys; open(sys.argv[2], 'w').write({document!r}); sys.exit(1)")
        assert not results.done and bool(made) == kept
    assert results.measure("nothing", None, "-c", "raise SystemExit(1)") is None


def test_all_files_are_made_of_what_the_commands_wrote(everything, monkeypatch, tmp_path):
    module, results = everything
    commands = {}

    def run(name, *command, gpu=None, limit_s=0.0):
        commands[name], results.seconds[name] = command, 1.5
        if "--out" in command:
            report.write(command[command.index("--out") + 1], [dict(suite="layer", shape=name)], missing={f"{name}/x": "why"})
        for option in ("--png", "--plot"):
            if option in command:
                Path(command[command.index(option) + 1]).write_bytes(b"picture")
        about = [dict(direction=way, kernel_us=500.0, accounted=accounted, shares={"up": 0.9}) for way, accounted in of_trace.items()]
        return "a warning\n" + json.dumps(about, indent=1) + "\nanother [one]\n"

    def made(file):
        return json.loads((tmp_path / file).read_text())

    monkeypatch.setattr(results, "run", run)
    of_trace = {"forward": 0.999, "backward": 1.01}
    module.alone(results, ["presets", "suites"])
    module.trace(results)
    module.curves(results)
    jobs = module.of_presets()
    listed = [name for job in jobs.values() for name in job[-1].split(",")]
    assert listed == [*shapes.slices(8), *shapes.slices(64)] and "170" in jobs["presets-8-0"]
    whole = made("cpu-presets.json")
    assert sorted(row["shape"] for row in whole["rows"]) == sorted(jobs) and set(whole["seconds"]) == set(jobs)
    assert set(whole["missing"]) == {f"{name}/x" for name in jobs}
    scaling = made("cpu-scaling.json")
    assert scaling["seconds"] == {"scaling": 1.5} and [row["shape"] for row in scaling["rows"]] == ["scaling"]
    forward, backward = made("cpu-trace.json")["rows"]
    assert (forward["ms"], forward["direction"], backward["accounted"], backward["ratio"]) == (0.5, "fwd", 1.01, None)
    assert forward["tflops"] == pytest.approx(6 * 2048 * 8 * 7168 * 2048 / 5e-4 * 1e-12, rel=1e-3) and backward["shares"] == {"up": 0.9}
    assert (tmp_path / "cpu-trace.png").read_bytes() == (tmp_path / "cpu-curves.png").read_bytes() == b"picture"
    assert made("cpu-curves.json")["seconds"] == {"curves": 1.5} and results.done
    of_trace["backward"] = 1.03
    module.trace(results)
    assert not results.done, "a trace that does not add up"
    assert module.trace_rows([dict(direction="forward", kernel_us=None, accounted=1.0)])[1], "nor one without the profiler's time"


# ---- mok bench ----


def test_the_suite_layer(one_thread, tmp_path, capsys):
    assert suites.main(["layer", "--repeats", "1", "--json", "--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.json")]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == json.loads((tmp_path / "a.json").read_text()) and (tmp_path / "a.png").stat().st_size > 10_000
    rows = made["rows"]
    assert [row["direction"] for row in rows] == ["fwd", "bwd", "memory"]
    assert all(row["suite"] == "layer" and row["shape"] == "tiny" and "torch gather" in row["baselines"] for row in rows)
    assert all(list(row)[: len(report.FORM)] == list(report.FORM) for row in rows) and rows[1]["cublas_tflops"] is None
    assert set(made["missing"]) == {"liger fused_moe", "sonic-moe", "DeepGEMM products", "DeepEP + torch"}
    assert "not importable" in made["missing"]["sonic-moe"]


def test_small_rates_have_digits(one_thread, capsys):
    assert suites.main(["layer", "--repeats", "1"]) == 0
    said = capsys.readouterr()
    assert " 0.0 " not in said.err and " 0.0 " not in said.out and "torch gather 0," not in said.err
    assert [report.significant(value) for value in (561.234, 98.76, 1.2345, 0.00065432, 0.0)] == [561.2, 98.8, 1.23, 0.000654, 0.0]


@pytest.mark.parametrize("whose", ["torch gather", "mok"])
def test_a_backward_that_took_less_than_nothing_has_no_rate(one_thread, monkeypatch, tmp_path, capsys, whose):
    """A step minus its forward, on a machine that does other things: null in rows, a dash in print."""
    real = layer.medians

    def noisy(contestants, *given, **more):
        ms = dict.fromkeys(real(contestants, *given, **more), 1.0)
        return {label: 0.5 if label == f"{whose} step" else 3.0 if label.endswith(" step") else value for label, value in ms.items()}

    monkeypatch.setattr(layer, "medians", noisy)
    out = tmp_path / "a"
    assert suites.main(["layer", "--repeats", "1", "--out", f"{out}.json", "--plot", f"{out}.png"]) == 0
    row = next(row for row in json.loads((tmp_path / "a.json").read_text())["rows"] if row["direction"] == "bwd")
    of, other = row["baselines"]["torch gather"], row
    if whose == "mok":
        of, other = other, of
    assert (of["ms"], of["tflops"]) == (None, None) and other["ms"] == 2.0 and other["tflops"] > 0 and row["ratio"] is None
    said = capsys.readouterr()
    assert "TFLOP/s, beside torch gather" in said.err and not any(f" -{digit}" in said.err + said.out for digit in range(10))
    assert ("torch gather -," if whose != "mok" else ": - ms, - TFLOP/s") in said.err
    ms = {"mok": 1.0, "alone": -1.0, "nccl": 2.0, "nccl padded": -2.0}
    row = ep.row_of("tiny", shapes.TINY["tiny"], 2, "bwd", ms, ["nccl", "nccl padded"], 1.25)
    assert row["alone_tflops"] is None and row["baselines"]["nccl padded"] == dict(ms=None, tflops=None) and row["ratio"] is None
    assert "one GPU -, of which - are kept" in ep.line_of(row, 0.0) and suites.ep_table([row])[0]["ratio"] == "-"


class Another(baselines.TorchLayer):
    name = "another"


def test_the_suite_layer_in_fp8(one_thread, tmp_path, monkeypatch, capsys):
    """The layer in fp8 beside itself in bf16; other libraries must be near the latter."""
    monkeypatch.setattr(rivals, "one_gpu", lambda experts, ids: ([Another(*experts)], {}, {}))
    assert suites.main(["layer", "--repeats", "1", "--precision", "fp8", "--out", str(tmp_path / "a.json")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["direction"], row["precision"]) for row in rows] == [(way, "fp8") for way in ("fwd", "bwd", "memory")]
    assert set(rows[0]["products_tflops"]) == {"mok in bf16"} and "another" in rows[1]["baselines"]
    assert "not measured" not in capsys.readouterr().out


def test_rows_of_one_form():
    """The example of `report.complete`, what a row has stays, and every recorded file is read as before."""
    made = report.complete({"suite": "schedule", "R": 8, "us": 57.3})
    assert made["ep"] == 8 and made["ms"] == 0.0573 and list(made)[-2:] == ["R", "us"]
    assert {made[name] for name in set(report.FORM) - {"suite", "ep", "ms"}} == {None}
    assert report.complete({"suite": "train", "gpus": 2})["ep"] == 2 and report.complete({"us": 3.0, "ms": 1.0, "ep": 4})["ms"] == 1.0
    (row,) = report.document([dict(ratio=2.0, own=1)])["rows"]
    assert list(row) == [*report.FORM, "own"] and row["ratio"] == 2.0
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for row in json.loads(file.read_text())["rows"]:
            completed = report.complete(row)
            assert list(completed)[: len(report.FORM)] == list(report.FORM)
            assert {name: completed[name] for name in row} == row, file.name


def test_completed_rows_make_the_tables_and_the_pictures(tmp_path):
    """Of every recorded file, but that of two precisions, which no suite writes."""
    pytest.importorskip("matplotlib")
    seen = set()
    for file in sorted((ROOT / "benchmarks" / "results").glob("h200*.json")):
        rows = [report.complete(row) for row in json.loads(file.read_text())["rows"]]
        suite = rows[0]["suite"]
        if file.stem.endswith("-formats") or suite not in plot.DRAWN:
            continue
        seen.add(suite)
        assert suite not in suites.TABLES or len(suites.TABLES[suite](rows)) > 1
        picture = tmp_path / f"{file.stem}.png"
        plot.draw(suite, rows, picture)
        assert picture.stat().st_size > 10_000
    assert seen >= {"layer", "minibatch", "schedule", "scaling", "overlap", "ep", "comm", "curves"}


def test_the_suite_minibatch_without_multiprocessors(one_thread, tmp_path, capsys):
    assert suites.main(["minibatch", "--repeats", "1", "--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.json")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["minibatch_tiles"] for row in rows] == [1, 2, 4, 6, 8, 12, 16], "less than twice all tiles, and the heuristic's"
    assert [row["minibatch_tiles"] for row in rows if row["heuristic"]] == [16] and not any(row["two_waves"] for row in rows)
    assert sum(row["knee"] for row in rows) == 1 and {row["knee_steps"] for row in rows} == {None}
    said = capsys.readouterr()
    assert "two_waves" in said.out and "the heuristic's 16" in said.err and "without multiprocessors there are no waves" in said.err
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_suite_minibatch_marks_waves_and_knee(one_thread, tmp_path, monkeypatch, capsys):
    """On 132 multiprocessors, were there some: sizes that no list has, and the times of a curve."""
    curve = {"6": 1.1, "7": 1.0, "16": 1.2}
    monkeypatch.setattr(tune, "two_waves", lambda hidden, width, sms: 7)
    monkeypatch.setattr(tune, "heuristic", lambda hidden, width, sms: 50)
    monkeypatch.setattr(suites, "medians", lambda runs, repeats, warmup: {label: curve.get(label, 2.0) for label in runs})
    rows = list(suites.minibatch_rows({"tiny": shapes.TINY["tiny"]}, 1, suites.Limit(60), {}))
    assert [row["minibatch_tiles"] for row in rows] == [1, 2, 4, 6, 7, 8, 12, 16, 50]
    marks = {name: [row["minibatch_tiles"] for row in rows if row[name]] for name in ("two_waves", "heuristic", "knee")}
    assert marks == {"two_waves": [7], "heuristic": [50], "knee": [7]} and {row["knee_steps"] for row in rows} == {0}
    assert {row["heuristic_steps"] for row in rows} == {-4}
    said = capsys.readouterr().err
    assert "the knee, at 7 tiles, is within one step of two waves, which are 7 tiles, and 4 steps below the heuristic's 50, 100" in said


def test_the_knee():
    example = {8: 1.20, 12: 1.02, 16: 1.05, 20: 1.00, 32: 1.10}
    assert suites.knee(example) == 12 and suites.knee({**example, 12: 1.04}) == 20
    assert suites.knee({8: 1.029, 12: 1.031, 16: 1.0}) == 8, "one slow size is noise"
    assert suites.knee({4: 1.0, 8: 1.2, 16: 1.3, 32: 1.5}) == 4 and suites.knee({4: 3.0, 8: 2.0, 16: 1.0}) == 16
    assert suites.knee({4: 1.02, 6: 1.2, 8: 1.2, 12: 1.01, 16: 1.0}) == 12, "a lucky size far below is not the knee"
    assert suites.knee({12: 1.0, 16: 1.1, 24: 1.2, 64: 1.02}) == 12, "what is above the fastest does not count"
    for size, steps, words in (
        (16, -2, "2 steps below two waves"), (19, -1, "within one step of"), (20, 0, "within one step of"), (24, 1, "within one step of"),
        (32, 2, "2 steps above two waves"),
    ):  # fmt: skip
        ms = {at: 1.0 if at >= size else 2.0 - at / 100 for at in (8, 16, 19, 20, 24, 32)}
        at, counted, said = suites.minibatch_of({**ms, size: 0.999}, 20, 24)
        assert (at, counted) == (size, dict(knee_steps=steps, heuristic_steps=steps - 1)) and words in said


QWEN3_30B = {
    1: 8.9772, 2: 5.042, 4: 2.8136, 6: 2.0223, 8: 1.7837, 12: 1.5732, 16: 1.4533, 19: 1.4414, 20: 1.4304, 24: 1.4403, 32: 1.4333,
    48: 1.5347, 64: 1.8216,
}  # fmt: skip
KIMI_K2_SLICE = {
    1: 5.8327, 2: 3.788, 4: 3.1961, 6: 2.7389, 8: 2.5454, 12: 2.4606, 16: 2.6621, 20: 2.6078, 24: 2.5578, 32: 2.8428, 48: 2.7042,
    64: 2.6283,
}  # fmt: skip


@pytest.mark.parametrize("name, ms, knee, waves, steps", [("qwen3-30b", QWEN3_30B, 16, 19, -1), ("kimi-k2-slice", KIMI_K2_SLICE, 12, 6, 2)])
def test_the_knee_of_what_an_h200_measured(name, ms, knee, waves, steps):
    """2026-12-01: at qwen3-30b next to two waves; at kimi-k2-slice above them, so the heuristic takes more."""
    shape = shapes.ONE_GPU[name]
    exact, chosen = tune.two_waves(shape.H, shape.I, 132), tune.heuristic(shape.H, shape.I, 132)
    at, counted, _ = suites.minibatch_of(ms, exact, chosen)
    assert exact == waves and (at, counted["knee_steps"]) == (knee, steps) and abs(counted["heuristic_steps"]) <= 1


def test_the_suite_schedule(one_thread, tmp_path):
    assert suites.main(["schedule", "--repeats", "1", "--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.json")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert {row["vary"] for row in rows} == set("TKER") and max(row["R"] for row in rows) == 64
    for row in rows:  # a balanced load, and a tile for every expert at most
        share = row["T"] * row["K"]
        assert 0.7 * share <= row["rows"] <= 1.3 * share + 128 * -(-row["E"] // row["R"]), row


def test_the_suite_scaling(one_thread, tmp_path, capsys):
    assert suites.main(["scaling", "--repeats", "1", "--plot", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.json")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert {(row["suite"], row["T"]) for row in rows} == {("scaling", 32), ("scaling", 256)}
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny")]) == 2


def test_a_suite_ends_at_its_limit(capsys):
    assert suites.main(["scaling", "--limit", "1e-9"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "not measured: tiny, T=32: left out: the limit of 1e-09 seconds was over", "no title of a table without lines"


SLOW = "8192x256x128x16x4"


def test_a_suite_ends_within_a_shape(one_thread, tmp_path, monkeypatch, capsys):
    """What was measured before is shown and written, and the shape that was not is named."""
    real = layer.measure

    def slow(name, *given, **more):
        if name == SLOW:
            time.sleep(100)
        return real(name, *given, **more)

    monkeypatch.setattr(suites, "measure", slow)
    before, start = signal.getsignal(signal.SIGALRM), time.monotonic()
    out = tmp_path / "a.json"
    assert suites.main(["layer", "--shapes", f"tiny,{SLOW}", "--repeats", "1", "--limit", "8", "--out", str(out)]) == 1
    assert time.monotonic() - start < 8 + limit.GRACE_S and signal.getsignal(signal.SIGALRM) is before
    written = json.loads(out.read_text())
    why = "left out: the limit of 8 seconds was over"
    assert {row["shape"] for row in written["rows"]} == {"tiny"} and written["missing"][SLOW] == why
    assert f"not measured: {SLOW}: {why}" in capsys.readouterr().out


def test_a_suite_ends_where_no_alarm_is_heard():
    """As within one long call of a library: the other thread shows what there is, and ends the process."""
    deaf = (
        "import signal, sys, time; from mok.bench import suites, layer\n"
        "def slow(name, *given, **more):\n"
        "    if name == 'tiny': return layer.measure(name, *given, **more)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(100)\n"
        "suites.measure = slow\n"
        f"sys.exit(suites.main(['layer', '--shapes', 'tiny,{SLOW},96x32x48x8x1', '--repeats', '1', '--limit', '8']))"
    )
    start = time.monotonic()
    done = run("-c", deaf, timeout=100, OMP_NUM_THREADS="1")
    assert done.returncode == 1 and time.monotonic() - start < 60, done.stderr
    assert "\ntiny " in done.stdout and "Traceback" not in done.stderr
    assert [line.split(": ")[1] for line in done.stdout.splitlines() if "left out" in line] == [SLOW, "96x32x48x8x1"]


def test_nothing_is_ended_before_the_limit():
    """Nor afterwards; and a limit that is none is none."""
    for seconds in (0.2, float("inf")):
        of = limit.Limit(seconds)
        with of.held(lambda: None):
            assert list(of.each({"a": 1, "b": 2})) == [("a", 1), ("b", 2)]
        time.sleep(0.3)
        assert of.missing() == {}
    of = limit.Limit(0.05)
    with of.held(lambda: None):
        for name, _ in of.each({"a": 1, "b": 2}):
            time.sleep(5 if name == "b" else 0)
    assert set(of.missing()) == {"b"}


def test_a_wrong_layer_has_no_speed(one_thread, monkeypatch, capsys):
    monkeypatch.setattr(layers.CpuLayer, "forward", lambda self, batch, keep=False, changes=None: (batch.x_TH.clone(), None))
    assert suites.main(["layer", "--repeats", "1"]) == 1
    assert "not measured: tiny: AssertionError: relative error" in capsys.readouterr().out


def test_what_a_suite_refuses(capsys, monkeypatch):
    for arguments, message in (
        (["layer", "--shapes", "huge"], "--shapes=huge: must be some of tiny, PRESET/RANKS"),
        (["layer", "--parts", "pull"], "--parts: the suite layer has no such option"),
        (["scaling", "--ranks", "2"], "--ranks=2: the suite scaling runs on one device"),
        (["everything"], "invalid choice: 'everything'"),
        (["scaling", "--precision", "fp8"], "--precision=fp8: of the suites layer and ep; scaling is in bf16"),
        (["layer", "--out", "none/a.json"], "--out=none/a.json: cannot be written (No such file or directory)"),
        (["layer", "--plot", "."], "--plot=.: cannot be written (Is a directory)"),
        (["overlap", "--out", "none/a.json"], "--out=none/a.json: cannot be written"),
        (["layer", "--repeats", "0"], "--repeats: 0: must be at least 1"),
        (["ep", "--ranks", "0"], "--ranks: 0: must be at least 1"),
        (["layer", "--limit", "nan"], "--limit: nan: must be above 0"),
    ):
        with pytest.raises(SystemExit) as error:
            suites.main(arguments)
        assert error.value.code == 2 and message in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        suites.main(["layer", "--plot", "a.png"])
    assert "--plot=a.png: needs matplotlib" in capsys.readouterr().err


def test_the_help_names_shapes_and_options(capsys):
    """Those of the suites that start processes, too, and nothing of the sources."""

    def help_of(main):
        with pytest.raises(SystemExit) as error:
            main(["--help"])
        assert error.value.code == 0
        return capsys.readouterr().out

    said = help_of(suites.main)
    for name in (*shapes.ONE_GPU, *shapes.SEVERAL_GPUS, *shapes.TINY, *PRESETS):
        assert name in said
    for main in (ep.main, comm.main, overlap.main):
        assert {option for option in re.findall(r"--[a-z]+", help_of(main)) if option not in said} == set()
    assert "ONE_GPU" not in said and ".py" not in said


@pytest.mark.parametrize("main", [tune.main, trace.main])
def test_every_option_has_a_text(main, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    options = re.split(r" (?=--[a-z])", said)
    for option in options[1:]:
        assert len(option.split()) > 3, option
        assert re.match(r"--(help|json|png|plan|out OUT the Chrome) ", option) or "Default: " in option, option


def test_a_shape_that_needs_a_gpu_says_so(capsys, monkeypatch):
    for main, *more in ((suites.main, "layer"), (trace.main,), (tune.main,)):
        with pytest.raises(SystemExit) as error:
            main([*more, "--shapes=qwen3-30b"])
        assert error.value.code == 2
        assert "--shapes=qwen3-30b: needs a GPU; here it must be some of tiny, PRESET/RANKS, or sizes TxHxIxExK" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="--shapes=v4-flash: not for this number of GPUs; here it must be some of kimi"):
        shapes.choose("v4-flash", shapes.ONE_GPU)


def test_a_suite_of_ranks_gets_its_options(monkeypatch, capsys):
    """--shapes is no option of comm; others go on as they are; the exit code and what was written come back."""
    lines = []

    def run(command, stdout):
        lines.append(command)
        assert stdout == 2
        if "mok.bench.comm" in command:
            report.write(command[command.index("--out") + 1], [dict(variant="ld", share=1.0, gbs={"4": 100.5, "8": 180.0})])
            return 0
        return 7

    monkeypatch.setattr(ranks, "run_to_end", run)
    monkeypatch.setattr(report, "_git", lambda *_: "")
    assert suites.main(["comm", "--ranks", "2", "--shapes", "x", "--parts", "pull"]) == 0
    assert "180" in capsys.readouterr().out
    assert suites.main(["overlap", "--ranks", "4", "--shapes", "fine", "--limit", "9"]) == 7
    comm_line, overlap_line = ([*line[1:3], *line[5:]] for line in lines)
    assert comm_line == ["-m", "mok.bench.comm", "--parts", "pull", "--ranks", "2"]
    assert overlap_line == ["-m", "mok.bench.overlap", "--ranks", "4", "--shapes", "fine", "--limit", "9.0"]


@pytest.mark.parametrize(
    "suite, argument, message", [("overlap", "--shapes=huge", "must be some of tiny"), ("ep", "--ranks=9", "must divide")]
)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_suite_of_ranks_that_refuses_its_options_prints_no_table(tmp_path, capfd, suite, argument, message, more):
    out = tmp_path / "a.json"
    out.write_text("of an earlier run")
    assert suites.main([suite, *argument.split("="), "--out", str(out), *more]) == 2
    said = capfd.readouterr()
    assert said.out == "" and f"{argument}: {message}" in said.err and "Traceback" not in said.err
    assert out.read_text() == "of an earlier run"


def test_shapes():
    of_8, of_64 = shapes.slices(8), shapes.slices(64)
    assert of_8["deepseek-v3/8"] == shapes.Shape(4096, 7168, 2048, 32, 8) and "deepseek-v3.1/8" not in of_8
    assert of_64["glm-4.5/64"].E == 3 and of_64["olmoe-1b-7b/64"].E == 1
    assert "mixtral-8x7b/8" in of_8 and not any(name.startswith("mixtral") for name in of_64)
    sizes = {preset["hidden_size"]: preset["intermediate_size"] for preset in PRESETS.values()}
    assert {shape.H for shape in of_8.values()} == set(sizes), "every preset has a slice"
    chosen = shapes.choose("fine,kimi-k2/16,64x32x48x8x2", shapes.ONE_GPU)
    assert list(chosen.values()) == [shapes.ONE_GPU["fine"], (4096, 7168, 2048, 24, 8), (64, 32, 48, 8, 2)]
    for name in ("huge", "kimi-k2/0", "gpt/8", "64x32", "0x32x48x8x2"):
        with pytest.raises(ValueError, match=f"--shapes={name}: must be some of fine"):
            shapes.choose(name, {"fine": shapes.ONE_GPU["fine"]})
    batch = layers.make_batch(shapes.Shape(8, 4, 4, 2, 6), 0, 0, torch.device("cpu"))
    assert batch.ids_TK.shape == (8, 6) and set(batch.ids_TK.unique().tolist()) == {0, 1}


def test_the_scripts(one_thread, tmp_path, capsys):
    out = str(tmp_path / "a.json")
    assert layer.forward_main(shapes.TINY, ["--forward", "--shared", "--repeats", "1", "--commit", "abc", "--out", out]) == 0
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["commit"] == "abc" and [row["direction"] for row in written["rows"]] == ["fwd"]
    assert "with one shared expert" in capsys.readouterr().out
    plans = json.dumps({"one": {"minibatch_tiles": 1}, "odd": {"minibatch_tiles": 0}})
    assert layer.backward_main(shapes.TINY, ["--repeats", "1", "--plans", plans, "--out", out]) == 0
    assert [row["direction"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]] == ["bwd"]
    said = capsys.readouterr().out
    assert "; one " in said and "; odd: " in said, "a plan that fails is named, and the others are timed"


def test_overlap_leaves_out_one_step_after_the_other(one_thread, tmp_path, monkeypatch):
    calls = []
    for name in ("dispatch", "push", "combine", "_segments"):
        real = getattr(executor, name)
        monkeypatch.setattr(executor, name, lambda *given, name=name, real=real, **more: (calls.append(name), real(*given, **more))[1])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        row, problem = overlap.measure_shape("tiny", shapes.TINY["tiny"], torch.device("cpu"), 1)
    finally:
        dist.destroy_process_group()
    assert problem == "" and set(row["without"]) == {"no dispatch", "no combine", "moving", "alone"}
    assert row["exposed_ms"] == pytest.approx(row["ms"] - row["without"]["alone"], abs=1e-3)
    assert "experts alone" in overlap.line_of(row)
    batch = layers.make_batch(shapes.TINY["tiny"], 0, 0, torch.device("cpu"))
    variants = overlap.OnCpu(layers.CpuLayer(96, 8, 2, layers.make_experts(shapes.TINY["tiny"], torch.device("cpu")), None, 1.0), batch)
    of = {"dispatch": {"dispatch"}, "combine": {"push", "combine"}, "experts": {"_segments"}}
    for name, left_out in overlap.VARIANTS.items():
        calls.clear()
        variants.run(name)
        assert set(calls) == {"dispatch", "push", "combine", "_segments"} - {step for part in left_out for step in of[part]}, name


def in_place_of(monkeypatch, name: str, **content: object) -> None:
    """A stand-in for a library that is not installed."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        partial = ".".join(parts[:count])
        if partial not in sys.modules:
            monkeypatch.setitem(sys.modules, partial, types.ModuleType(partial))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


def plain_layer(x, both, down, ids, weights):
    """[E, 2I, H], [E, H, I], differentiable."""
    gate, up = both.chunk(2, 1)
    return reference.moe(x.float(), ids.long(), weights, gate.float(), up.float(), down.float()).to(x.dtype)


def test_other_libraries_layers_are_called_as_they_want(monkeypatch):
    x, ids, w, d_y, experts = problem()

    class Liger:
        @staticmethod
        def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
            assert top_k_index.dtype == torch.int32
            return plain_layer(x, gate_up_proj, down_proj, top_k_index, top_k_weights)

    def sonic(x, scores, tokens, choices, w1, b1, w2, b2, E, stream, activation, is_inference_mode_enabled=False, concat_layout=False):
        assert concat_layout and (tokens.diff() >= 0).all() and activation == "swiglu" and (b1, b2) == (None, None)
        assert w1.shape == (48, 32, 5) and w2.shape == (32, 24, 5) and E == 5
        top_k = len(tokens) // len(x)
        return plain_layer(x, w1.permute(2, 0, 1), w2.permute(2, 0, 1), choices.view(-1, top_k), scores.view(-1, top_k)), None

    in_place_of(monkeypatch, "liger_kernel.ops.fused_moe", LigerFusedMoEFunction=Liger)
    in_place_of(monkeypatch, "sonicmoe", moe_general_routing_inputs=sonic)
    in_place_of(monkeypatch, "sonicmoe.enums", ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
    products = []

    def deepgemm(a, b, d, m_indices):
        assert len(m_indices) % 128 == 0 and a.shape[0] == d.shape[0] == len(m_indices) and b.shape[1:] == (d.shape[1], a.shape[1])
        assert torch.bincount(m_indices, minlength=5).tolist() == [-(-int(count) // 128) * 128 for count in torch.bincount(ids.flatten())]
        products.append(d)

    in_place_of(monkeypatch, "deep_gemm", m_grouped_bf16_gemm_nt_contiguous=deepgemm)
    layers_, more, missing = rivals.one_gpu(experts, ids)
    assert [rival.name for rival in layers_] == ["liger fused_moe", "sonic-moe"] and list(more) == ["DeepGEMM products"]
    assert set(missing) == {"DeepEP + torch"}
    more["DeepGEMM products"]()
    assert len(products) == 2
    baseline = baselines.TorchLayer(*experts)
    want, gradients = baseline(x, ids, w).detach(), baseline.step(x, ids, w, d_y)
    for rival in layers_:
        assert checks.relative_error(rival(x, ids, w).detach(), want) < 2e-2
        for got, expected in zip(rival.step(x, ids, w, d_y), gradients, strict=True):
            assert checks.relative_error(got, expected) < 3e-2


def test_deepep_is_called_as_it_wants(monkeypatch, tmp_path):
    """One rank: every token arrives once, with its choices; slots of other ranks' experts are -1."""
    x, ids, w, d_y, experts = problem()

    class Config:
        def get_nvl_buffer_size_hint(self, row, ranks):
            assert row == 2 * 32 and ranks == 1
            return 1000

    class Buffer:
        get_dispatch_config = get_combine_config = staticmethod(lambda ranks: Config())

        def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
            assert num_nvl_bytes == 1000 and num_rdma_bytes == 0

        def get_dispatch_layout(self, topk_idx, num_experts):
            assert topk_idx.dtype == torch.int64 and num_experts == 5
            return "per rank", None, "per expert", "in rank", None

        def dispatch(self, x, handle=None, **given):
            if handle is not None:
                return x, None, None, None, handle, None
            assert (given["num_tokens_per_rank"], given["num_tokens_per_expert"], given["is_token_in_rank"]) == (
                "per rank", "per expert", "in rank"
            )  # fmt: skip
            chosen = given["topk_idx"]
            counts = torch.bincount(chosen[chosen >= 0].flatten(), minlength=5).tolist()
            return x.clone(), chosen.clone(), given["topk_weights"].clone(), counts, "handle", None

        def combine(self, x, handle, topk_weights=None):
            assert handle == "handle" and x.is_contiguous()
            return x, topk_weights, None

    assert rivals.several_gpus(experts)[1] == {"DeepEP + torch": "not importable (ModuleNotFoundError: No module named 'deep_ep')"}
    in_place_of(monkeypatch, "deep_ep", Buffer=Buffer)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        (rival,), missing = rivals.several_gpus(experts)
        baseline = baselines.TorchLayer(*experts)
        assert not missing and checks.relative_error(rival(x, ids, w).detach(), baseline(x, ids, w).detach()) < 2e-2
        for got, expected in zip(rival.step(x, ids, w, d_y), baseline.step(x, ids, w, d_y), strict=True):
            assert checks.relative_error(got, expected) < 3e-2
        ids[3, 1] = -1  # of another rank
        without = rival(x, ids, w).detach()
        w[3, 1] = 0
        ids[3, 1] = 0
        assert checks.relative_error(without, baseline(x, ids, w).detach()) < 2e-2
    finally:
        dist.destroy_process_group()


# ---- what they are made of ----


def test_ranks_end_at_the_limit(capfd):
    start = time.monotonic()
    assert ranks.launch("this", [], 2, 50.0) == 0
    assert ranks.launch("no_such_module", [], 2, 50.0) == 1
    assert ranks.launch("http.server", ["0"], 2, 2.0) == 124  # it would serve for ever
    assert "--limit=2" in capfd.readouterr().err
    assert time.monotonic() - start < 40


def test_ranks_end_with_whoever_asked_for_them():
    launcher = "from mok.bench import ranks; ranks.launch('http.server', ['0'], 2, 30.0)"
    asker = f"import sys; from mok.bench import ranks; ranks.run_to_end([sys.executable, '-c', {launcher!r}])"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", asker], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        said = ""
        while said.count("Serving") < 2 and (character := process.stdout.read(1)):
            said += character
        process.terminate()
        process.communicate(timeout=20)  # ends when nobody can write any more
        assert process.returncode == 143


def test_a_bad_option_is_named(capsys, monkeypatch):
    for main, argument, message in (
        (ep.main, "--shapes=huge", "--shapes=huge: must be some of tiny"),
        (ep.main, "--shapes=tiny,", "--shapes=: must be some of tiny"),
        (ep.main, "--ranks=9", "--ranks=9: must divide the number of experts, E=8, of tiny"),
        (ep.main, "--shapes=tiny,64x32x48x7x2", "--ranks=2: must divide the number of experts, E=7, of 64x32x48x7x2"),
        (overlap.main, "--shapes=huge", "--shapes=huge: must be some of tiny"),
        (ep.main, "--directions=up", "--directions=up: must be some of fwd,bwd"),
        (comm.main, "--parts=pull,talk", "--parts=talk: must be some of pull"),
        (comm.main, "--hidden=1000", "--hidden=1000: must be a multiple of 1024"),
        (ep.main, "--out=none/a.json", "--out=none/a.json: cannot be written"),
        (ep.main, "--ranks=-1", "--ranks: -1: must be at least 1"),
        (ep.main, "--plans=x", "--plans: x: must be a JSON object, as '{\"small\": {\"minibatch_tiles\": 8}}'"),
        (ep.main, '--plans={"parts": 8}', "must be a JSON object, as"),
        (ep.main, '--plans={"a": {"foo": 8}}', "--plans: foo: no field of a plan; on this machine there are minibatch_tiles, ring_tiles"),
    ):
        with pytest.raises(SystemExit) as error:
            main([argument])
        assert error.value.code == 2 and message in capsys.readouterr().err, argument
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for main in (comm.main, overlap.main, ep.main):
            with pytest.raises(SystemExit) as error:
                main(["--ranks=2"])
            assert error.value.code == 2 and "--ranks=2: there are 1 GPUs" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        ep.main(["--ranks=2"])
    assert "--ranks=3: must divide" in capsys.readouterr().err, "of a launcher's ranks"


def test_every_way_moves_the_right_rows():
    pytest.importorskip("triton")
    result = run("tests/bench_rows.py")
    assert result.returncode == 0, result.stderr[-3000:]
    answer = json.loads(result.stdout.splitlines()[-1])
    assert len(answer["found"]) >= 7
    assert not [name for name, problems in answer["found"].items() if any(problems)], answer["found"]
    assert "rows of rank 1 are wrong" in answer["broken"]
    assert sum(", one rank" in name for name in answer["found"]) >= 5
    both = [3, 3, 0]  # what the two flags were raised to, and the waits that were given up
    assert answer["within"] == [0, 64, 3, 3, 0], "where the flags are, what they were raised to, and no wait given up"
    assert answer["turns"] == {"False [0, 1]": both, "True [0, 1]": both, "False [0]": [0, 3, 3], "True [0]": [3, 0, 3]}


def test_every_row_goes_once_to_whom_it_is_for():
    """The example of `make_order`; and each rank's rows, over all orders."""
    cpu = torch.device("cpu")
    sizes = lambda routing: [comm.make_order(256, rank, 2, routing, cpu).other.bincount(minlength=2).tolist() for rank in (0, 1)]  # noqa: E731
    assert sizes(comm.Routing(to_rank_0=1.0)) == [[128, 128], [0, 0]] and sizes(comm.Routing(to_rank_0=0.5)) == [[96, 96], [32, 32]]
    assert comm.most_rows(256, 2, comm.Routing(to_rank_0=0.5)) == 192 and comm.most_rows(256, 2, comm.Routing(0.5)) == 256
    for size in (1, 2, 4):
        for routing in comm.SKEWED[2:]:
            orders = [comm.make_order(512, rank, size, routing, cpu) for rank in range(size)]
            rows = torch.cat([512 * order.other + order.index for order in orders]).sort()[0]
            assert torch.equal(rows, torch.cat([512 * rank + torch.arange(512 // size) for rank in range(size)]))
            assert all(len(order.index) % 32 == 0 for order in orders)


def test_comm_over_the_cpus_fabric(tmp_path, capsys):
    """Two processes: every part has its rows, of rows that were checked; a table and a picture."""
    files = str(tmp_path / "a.json"), str(tmp_path / "a.png")
    options = ["--rows", "256", "--hidden", "1024", "--limit", "120"]
    assert suites.main(["comm", "--ranks", "2", *options, "--out", files[0], "--plot", files[1]]) == 0
    rows = json.loads(Path(files[0]).read_text())["rows"]
    rates = {(row["variant"], row.get("routing") or row["share"]): row["gbs"] for row in rows if "gbs" in row}
    moved = {(name, how) for name in ("executor's dispatch", "executor's push") for how in (0.5, 0.9, 1.0, "one rank", "hot expert")}
    assert set(rates) == moved | {("copy from the peer", 1.0), ("copy to the peer", 1.0)}
    assert all(rate["1"] > 0 if isinstance(rate, dict) else rate > 0 for rate in rates.values())
    us = {row["variant"]: row["us"] for row in rows if "us" in row}
    assert set(us) == {"barrier", "barrier and a signal", comm.PUSHED, comm.POLLED, "publish 256 tokens"} and min(us.values()) > 0
    assert "hot expert" in capsys.readouterr().out and Path(files[1]).stat().st_size > 10_000


def test_comm_of_one_rank(tmp_path, capfd):
    """Rows in its own memory; there is no link that they cross, and nothing to skew."""
    out = str(tmp_path / "a.json")
    assert suites.main(["comm", "--ranks", "1", "--rows", "256", "--hidden", "1024", "--limit", "120", "--out", out]) == 0
    rows = json.loads(Path(out).read_text())["rows"]
    moved = {row["variant"]: row["share"] for row in rows if "gbs" in row}
    assert moved == dict.fromkeys(("executor's dispatch", "executor's push", "copy"), 0)
    assert {row["variant"] for row in rows if "us" in row} == {"barrier", "barrier and a signal", "publish 256 tokens"}
    assert {row["ep"] for row in rows} == {1} and "none are skewed" in capfd.readouterr().err


def test_comm_times_no_wrong_rows(tmp_path, monkeypatch, capsys):
    """On the CPU, one rank: a mover that loses a row has no figure."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        link = comm.HostLink(64, 1024, torch.device("cpu"))
        for variants in (link.pulls(), link.pushes()):
            assert len(comm.measure_rows(link, variants, [comm.ALL_REMOTE], [1])) == 1
        real = executor.dispatch
        monkeypatch.setattr(executor, "dispatch", lambda *given: (real(*given), given[-1][7].zero_()))
        assert comm.measure_rows(link, link.pulls(), [comm.ALL_REMOTE], [1]) == []
        assert "1 rows of rank 0 are wrong, first row 7" in capsys.readouterr().out
    finally:
        dist.destroy_process_group()


def problem(tokens=40, hidden=32, width=24, experts=5, top_k=2):
    x, d_y = (torch.randn(tokens, hidden).bfloat16() for _ in range(2))
    scores, ids = torch.randn(tokens, experts).topk(top_k)
    sizes = (experts, width, hidden), (experts, width, hidden), (experts, hidden, width)
    weights = tuple(torch.randn(*size).mul(size[-1] ** -0.5).bfloat16() for size in sizes)
    return x, ids, scores.softmax(-1), d_y, weights


def test_the_torch_baseline_computes_the_layer():
    x, ids, w, d_y, experts = problem()
    baseline = baselines.TorchLayer(*experts)
    leaves = [t.float().requires_grad_() for t in (x, w, *experts)]
    want = reference.moe(leaves[0], ids, *leaves[1:])
    assert checks.relative_error(baseline(x, ids, w).detach(), want.detach()) < 1.5e-2
    d_x, d_w, d_both, d_down = baseline.step(x, ids, w, d_y)
    wants = torch.autograd.grad(want, leaves, d_y.float())
    for got, expected in zip((d_x, d_w, *d_both.chunk(2, 1), d_down), wants, strict=True):
        assert checks.relative_error(got, expected) < 2e-2


def test_the_checks_of_a_layer_in_fp8():
    shape = shapes.Shape(60, 144, 80, 6, 2)
    experts, batch = layers.make_experts(shape, torch.device("cpu")), layers.make_batch(shape, 0, 0, torch.device("cpu"))
    d_x, d_w, *of_experts = layers.CpuLayer(60, 6, 2, experts, None, 1.0, precision="fp8").backward(batch, None)
    for recipe, least, most in ((quantize.Recipe("fp8"), 0, 1e-2), (quantize.Recipe(), 3e-2, 0.15)):
        assert least < checks.token_gradient_error(d_x, d_w, *batch, experts, count=60, recipe=recipe) < most
        assert least < checks.expert_gradient_error([d[3] for d in of_experts], 3, *batch, experts, recipe) < most


def test_the_checks_find_one_wrong_token_and_one_wrong_gradient():
    x, ids, w, d_y, experts = problem()
    out = baselines.TorchLayer(*experts)(x, ids, w).detach()
    assert checks.forward_error(out, x, ids, w, experts, count=40) < checks.LIMIT
    wrong = out.clone()
    wrong[7] *= 1.1
    assert checks.forward_error(wrong, x, ids, w, experts, count=40) > 0.05
    d_x, d_w, d_both, d_down = baselines.TorchLayer(*experts).step(x, ids, w, d_y)
    d_gate, d_up = d_both.chunk(2, 1)
    assert checks.token_gradient_error(d_x, d_w, x, ids, w, d_y, experts, count=40) < checks.LIMIT
    assert checks.token_gradient_error(d_x, d_w * 1.1, x, ids, w, d_y, experts, count=40) > 0.05
    assert checks.expert_gradient_error((d_gate[3], d_up[3], d_down[3]), 3, x, ids, w, d_y, experts) < checks.LIMIT
    assert checks.expert_gradient_error((d_gate[3], d_up[2], d_down[3]), 3, x, ids, w, d_y, experts) > 0.05
    assert checks.first_difference([out], [out.clone()], ["out"]) is None
    assert "out differs in" in (checks.first_difference([wrong], [out], ["out"]) or "") and wrong is not out


def test_contestants_take_turns():
    order = []
    contestants = {name: lambda name=name: order.append(name) for name in "ab"}
    ms = timing.medians(contestants, 6, warmup=1, round_of=2, align=lambda: order.append("|"))
    assert "".join(order) == "ab" + "|aaa|bbb|bbb|aaa|aaa|bbb", "every second round the other way"
    assert set(ms) == {"a", "b"} and all(value >= 0 for value in ms.values())


def test_another_projects_commit_is_not_this_ones(tmp_path, monkeypatch):
    """A virtual environment often lies inside some other repository."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for call in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *call], cwd=tmp_path, check=True)
    packages = tmp_path / "packages"
    (packages / "mok").mkdir(parents=True)
    (packages / "mok" / "a.py").write_text("a = 1")
    monkeypatch.setattr(report, "ROOT", packages)
    assert report.commit() == "" and report.sources_sha256() == hashlib.sha256(b"a = 1").hexdigest()
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert len(report.commit()) == 40
