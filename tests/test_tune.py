"""`mok tune`: what is tried, what is chosen, where it is kept and who finds it."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from mok import cli, tune
from mok.bench.layers import CpuLayer
from mok.bench.shapes import ONE_GPU
from mok.tune import Key, find, heuristic, invalid, misunderstood, read, search, store, tuned, two_waves, values_of

KEY = Key("NVIDIA H200", 8192, 2048, 768, 128, 8)
OTHER = dataclasses.replace(KEY, E=64)  # of which no file knows
ENTRY = {"key": vars(KEY), "forward": {"minibatch_tiles": 24}, "backward": {"run": 2}}
SMS = 132


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_heuristic():
    """Two waves, at least 16 and at most 32 tiles; of the eight measured shapes only qwen3-30b's two waves are more than 16."""
    assert two_waves(2048, 768, SMS) == heuristic(2048, 768, SMS) == 19, "the example"
    assert two_waves(7168, 2048, SMS) == 6 and heuristic(7168, 2048, SMS) == 16, "not less"
    assert two_waves(256, 128, SMS) == 132 and heuristic(256, 128, SMS) == 32, "not more"
    assert {name for name, shape in ONE_GPU.items() if heuristic(shape.H, shape.I, SMS) != 16} == {"qwen3-30b"}


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA B200", "another"])
def test_every_gpu_has_the_heuristic_for_what_was_not_measured(gpu):
    for hidden, width, tiles in ((2048, 768, 19), (7168, 2048, 16), (256, 128, 32)):
        key = dataclasses.replace(OTHER, gpu=gpu, H=hidden, I=width)
        assert tuned(key, SMS) == tune.Choice({"minibatch_tiles": tiles}, {}, "heuristic")


def test_the_fields_and_defaults_are_the_plans():
    pytest.importorskip("triton")
    from mok.kernels.launch import ForwardPlan
    from mok.kernels.launch_backward import BackwardPlan

    for direction, plan in (("forward", ForwardPlan()), ("backward", BackwardPlan())):
        for field, values in tune.FIELDS[direction].items():
            assert getattr(plan, field) == tune.DEFAULTS[direction][field] and getattr(plan, field) in values
    content = json.loads(tune.SHIPPED.read_text())
    assert set(content) == {"format", "entries"} and read(tune.SHIPPED) == content["entries"] != [], "all is understood"
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert tune.SHIPPED.name in project["tool"]["setuptools"]["package-data"]["mok"]


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_layers_take_the_choice_within_what_they_are_told(precision):
    """That of their precision, once per process: a file that is written later is not looked at again."""
    pytest.importorskip("triton")
    from mok.kernels import launch, memory, ops

    tokens, hidden, width, experts, top_k, cpu = 100, 64, 48, 4, 2, torch.device("cpu")
    key = Key("cpu", tokens, hidden, width, experts, top_k, precision=precision)
    store(tune.cache_file(), key, {"forward": {"minibatch_tiles": 24, "parts": 8}, "backward": {"run": 2}, "ms": {}})
    for other in {"bf16", "fp8", "mxfp8"} - {precision}:
        store(tune.cache_file(), dataclasses.replace(key, precision=other), {"forward": {"parts": 2}, "backward": {}, "ms": {}})
    view = memory.virtual_memory(memory.layer_regions(precision, tokens, hidden, experts, top_k, 1), 1, cpu)[0]
    workspace = launch.Workspace(view, tokens, hidden, top_k, cpu, num_sms=2, precision=precision)
    ops._plans.cache_clear()
    forward, backward = ops.plans(workspace, [5, 32, 64], width, experts)
    assert forward == launch.ForwardPlan(num_sms=5, minibatch_tiles=24, ring_tiles=64, parts=8)
    assert (backward.num_sms, backward.ring_tiles, backward.run, backward.parts) == (5, 64, 2, 4)
    assert ops.plans(workspace, [5, 16, 64], width, experts)[0].minibatch_tiles == 16
    tune.cache_file().unlink()
    assert ops.plans(workspace, [5, 32, 64], width, experts)[0] == forward
    other = ops.plans(workspace, [5, 32, 64], width + 16, experts)[0]
    assert other == launch.ForwardPlan(num_sms=5, minibatch_tiles=16, ring_tiles=64)
    ops._plans.cache_clear()


@pytest.mark.parametrize("tokens", [1024, 1025])
def test_a_run_of_0_means_what_the_launch_makes_of_it(tokens):
    pytest.importorskip("triton")
    from mok.kernels import launch, launch_backward, memory, schedule

    hidden, experts, top_k, cpu = 64, 2, 2, torch.device("cpu")
    view = memory.virtual_memory(memory.backward_regions(tokens, hidden, experts, top_k, 1), 1, cpu)[0]
    workspace = launch.Workspace(view, tokens, hidden, top_k, cpu, num_sms=2)
    rows = schedule.empty_schedule(schedule.max_tiles(tokens, top_k, 1, experts), experts, cpu)
    zeros = lambda *size: torch.zeros(*size, dtype=torch.bfloat16)  # noqa: E731
    saved = launch.Saved(zeros(0, 64), zeros(0, 64), zeros(tokens, 8), zeros(tokens, 8))
    x, weights, expert = zeros(tokens, hidden), torch.zeros(tokens, top_k), zeros(experts, 64, hidden)
    call = launch_backward.prepare(workspace, rows, saved, x, x, weights, expert, expert, expert)
    assert call.kernel["RUN"] == tune.automatic_run(tokens * top_k, experts) == (4 if tokens == 1024 else 1)


def test_what_is_tried(monkeypatch):
    for name in ("_loads_run_on", "_gathers"):
        monkeypatch.setattr(tune, name, lambda key: False)  # as on a machine without a Hopper GPU
    assert values_of("forward", "minibatch_tiles", KEY, SMS) == [8, 12, 16, 20, 24, 32, 48]
    assert values_of("forward", "parts", KEY, SMS) == [2, 4, 8]
    assert values_of("backward", "group_tiles", KEY, SMS) == [0, 88, 352], "two and eight waves of 3 tasks a tile"
    assert values_of("backward", "run", KEY, SMS) == [0, 1, 2] and "is what 0 means here" in invalid("backward", "run", 4, KEY, SMS)
    assert values_of("backward", "run", dataclasses.replace(KEY, E=8), SMS) == [0, 2, 4]
    narrow = dataclasses.replace(KEY, H=512, E=8)
    assert narrow.most_tiles == 520 and values_of("backward", "run", narrow, SMS) == [0, 2]
    assert "is wider than H=512" in invalid("backward", "run", 4, narrow, SMS)
    few = dataclasses.replace(KEY, T=128, E=4)
    assert few.most_tiles == 12 and values_of("forward", "minibatch_tiles", few, SMS) == [8, 12]
    assert values_of("backward", "group_tiles", few, SMS) == [0]
    assert "as without a limit" in invalid("backward", "group_tiles", 12, few, SMS)
    monkeypatch.setattr(tune, "_gathers", lambda key: key.ep == 1)
    assert values_of("forward", "parts", KEY, SMS) == [4] and values_of("backward", "parts", KEY, SMS) == [2, 4, 8]
    assert values_of("forward", "parts", dataclasses.replace(KEY, ep=2), SMS) == [2, 4, 8]
    full = dataclasses.replace(KEY, E=4)
    assert values_of("forward", "half_tiles", full, SMS) == [True] and values_of("forward", "half_tiles", KEY, SMS) == [True, False]
    cpu = [field for direction in tune.FIELDS for field in tune.FIELDS[direction] if values_of(direction, field, KEY, 0)]
    assert cpu == ["minibatch_tiles"]


def run_search(times, direction="forward", bad=()):
    """times: the milliseconds of a plan. -> (choice, milliseconds, plans checked, lines)."""
    checked, lines = [], []

    def check(plan):
        checked.append(dict(plan))
        return "wrong bits" if any(plan[field] == value for field, value in bad) else ""

    best, ms = search(direction, KEY, SMS, check, lambda plans: {label: times(plan) for label, plan in plans.items()}, lines.append)
    return best, ms, checked, lines


def test_the_search_takes_what_is_faster_by_more_than_the_margin():
    cost = {8: 1.0, 12: 0.9, 16: 1.0, 20: 0.89, 24: 0.95, 32: 1.0, 48: 1.0}
    best, ms, checked, _ = run_search(lambda plan: cost[plan["minibatch_tiles"]] * {2: 0.985, 4: 1, 8: 1.1}[plan["parts"]])
    assert best == {"minibatch_tiles": 20, "parts": 4, "half_tiles": True} and ms == [1.0, 0.89], "1.5 % for 2 parts is noise"
    assert all(plan["minibatch_tiles"] == 20 for plan in checked if plan["parts"] != 4), "the best so far goes on"
    assert len(checked) == 1 + 6 + 2 + 1
    best, ms, *_ = run_search(lambda plan: 1.0)
    assert best == tune.DEFAULTS["forward"] and ms == [0.0, 0.0]


def test_the_search_never_takes_a_wrong_candidate():
    best, _, _, lines = run_search(lambda plan: 1.0 / plan["parts"], bad=[("parts", 8)])
    assert best["parts"] == 4 and "forward parts=8: wrong bits" in lines
    with pytest.raises(ValueError, match="wrong bits"):
        run_search(lambda plan: 1.0, bad=[("parts", 4)])


def test_the_search_takes_back_what_does_not_add_up():
    turns = iter([1.0, 0.9, 1.0, 1.0, 1.0, 1.0, 1.0] + [1.0] * 5 + [1.0] * 2)  # 8 tiles seem faster, and are not against the default

    best, _, _, _ = run_search(lambda plan: next(turns, 1.0))
    assert best == tune.DEFAULTS["forward"]


def test_the_file(tmp_path):
    path = tmp_path / "folder" / "tuned.json"
    entry = {"forward": {"minibatch_tiles": 24}, "backward": {"run": 2}, "ms": {}}
    store(path, KEY, {**entry, "forward": {}})
    store(path, KEY, entry)
    store(path, dataclasses.replace(KEY, T=2048), entry)
    found = read(path)
    assert len(found) == 2 and find(found, KEY) == {"key": vars(KEY), **entry}
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"], "no part of a file stays"
    for change, T in ((dict(T=9000), 8192), (dict(T=3000), 2048), (dict(T=4096), 2048), (dict(T=1024), 2048)):
        near = find(found, dataclasses.replace(KEY, **change))
        assert near is not None and (near["key"]["T"] == T or change["T"] == 4096)
    for change in (dict(T=1000), dict(T=16385), dict(H=4096), dict(gpu="B200"), dict(ep=2), dict(precision="mxfp8"), dict(K=6), dict(E=64)):
        assert find(found, dataclasses.replace(KEY, **change)) is None


def keep(content: str) -> None:
    tune.cache_file().parent.mkdir(exist_ok=True)
    tune.cache_file().write_text(content)


OTHER_FORMATS = ("", "{", "[]", "3", '{"format": 2, "entries": []}', '{"format": 1, "entries": {}}', "[" * 100_000)


@pytest.mark.parametrize("content", OTHER_FORMATS)
def test_a_file_that_cannot_be_used_is_named_and_harmless(content):
    keep(content)
    with pytest.warns(UserWarning, match=r"tuned\.json is not used"):
        assert tuned(OTHER, SMS).source == "heuristic"
    assert tuned(KEY, SMS).source == "shipped"
    store(tune.cache_file(), KEY, {"forward": {}, "backward": {}})
    assert tuned(KEY, SMS) == tune.Choice({}, {}, "tuned"), "written anew"


def test_no_file_and_no_home_are_no_reason_to_warn(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tune.cache_file()) == [] and tuned(OTHER, SMS).source == "heuristic"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
        assert tuned(OTHER, SMS).source == "heuristic" and tuned(KEY, SMS).source == "shipped"


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in vars(KEY).items() if key != name}


NOT_UNDERSTOOD = [
    (None, "None is no entry"),
    ({}, "key is missing"),
    ({**ENTRY, "key": 3}, "key is missing"),
    ({"key": vars(KEY), "forward": {}}, "backward is missing"),
    ({**ENTRY, "forward": [["parts", 4]]}, "forward is missing"),
    ({**ENTRY, "key": without("T")}, "key has gpu, H, I, E, K, ep, precision in place of gpu, T, H"),
    ({**ENTRY, "key": {**vars(KEY), "layers": 2}}, "key has gpu, T, H, I, E, K, ep, precision, layers in place of"),
    ({**ENTRY, "key": {**vars(KEY), "T": "8192"}}, "key T='8192'"),
    ({**ENTRY, "key": {**vars(KEY), "T": 0}}, "key T=0"),
    ({**ENTRY, "key": {**vars(KEY), "H": 2048.0}}, "key H=2048.0"),
    ({**ENTRY, "key": {**vars(KEY), "gpu": None}}, "key gpu=None"),
    ({**ENTRY, "key": {**vars(KEY), "precision": "fp4"}}, "key precision='fp4'"),
    ({**ENTRY, "forward": {"minibatch_tile": 16}}, "forward minibatch_tile=16"),
    ({**ENTRY, "forward": {"run": 2}}, "forward run=2"),
    ({**ENTRY, "forward": {"num_sms": 2}}, "forward num_sms=2"),
    ({**ENTRY, "forward": {"minibatch_tiles": "16"}}, "forward minibatch_tiles='16'"),
    ({**ENTRY, "forward": {"minibatch_tiles": 0}}, "forward minibatch_tiles=0"),
    ({**ENTRY, "forward": {"minibatch_tiles": True}}, "forward minibatch_tiles=True"),
    ({**ENTRY, "forward": {"parts": 3}}, "forward parts=3"),
    ({**ENTRY, "forward": {"parts": 4.0}}, "forward parts=4.0"),
    ({**ENTRY, "forward": {"half_tiles": 1}}, "forward half_tiles=1"),
    ({**ENTRY, "backward": {"group_tiles": -1}}, "backward group_tiles=-1"),
    ({**ENTRY, "backward": {"group_tiles": "two waves"}}, "backward group_tiles='two waves'"),
    ({**ENTRY, "backward": {"run": None}}, "backward run=None"),
]


@pytest.mark.parametrize("entry, why", NOT_UNDERSTOOD)
def test_an_entry_that_is_not_understood_hides_no_other(entry, why):
    good = [{**ENTRY, "key": {**vars(KEY), "T": tokens}} for tokens in (8192, 16384)]
    assert misunderstood(entry).startswith(why) and not any(misunderstood(one) for one in good)
    keep(json.dumps({"format": 1, "entries": [good[0], entry, good[1]]}))
    with pytest.warns(UserWarning) as warned:
        assert read(tune.cache_file()) == good
        assert tuned(KEY, SMS) == tune.Choice(ENTRY["forward"], ENTRY["backward"], "tuned")
        assert tuned(OTHER, SMS).source == "heuristic"
    (one,) = warned  # however often the file is read
    assert f"tuned.json: entries that are not understood are not used, 1 of 3 (the first: {why}" in str(one.message)
    store(tune.cache_file(), OTHER, {"forward": {}, "backward": {}})
    assert len(json.loads(tune.cache_file().read_text())["entries"]) == 3, "written without it"


def test_what_the_tuner_may_choose_is_understood():
    for direction, fields in tune.FIELDS.items():
        for field in fields:
            for sms in (SMS, 148):
                for value in values_of(direction, field, dataclasses.replace(KEY, E=8), sms):
                    assert misunderstood({**ENTRY, direction: {field: value}}) == ""
    assert misunderstood({**ENTRY, "forward": {"minibatch_tiles": 19}}) == "", "any number of tiles is a minibatch"


def test_layers_work_beside_a_stale_file():
    pytest.importorskip("triton")
    from mok.kernels import launch, memory, ops

    tokens, hidden, width, experts, top_k, cpu = 100, 64, 48, 4, 2, torch.device("cpu")
    key = vars(Key("cpu", tokens, hidden, width, experts, top_k))
    stale = [entry for entry, _ in NOT_UNDERSTOOD] + [{**ENTRY, "key": key, "forward": {"minibatch_tile": 24}}]
    keep(json.dumps({"format": 1, "defaults": {}, "entries": [*stale, {**ENTRY, "key": {**key, "K": 3}}]}))
    view = memory.virtual_memory(memory.layer_regions("bf16", tokens, hidden, experts, top_k, 1), 1, cpu)[0]
    workspace = launch.Workspace(view, tokens, hidden, top_k, cpu, num_sms=2)
    ops._plans.cache_clear()
    with pytest.warns(UserWarning, match=rf"not used, {len(stale)} of {len(stale) + 1} "):
        forward, backward = ops.plans(workspace, [5, 32, 64], width, experts)
    ops._plans.cache_clear()
    assert forward == launch.ForwardPlan(num_sms=5, minibatch_tiles=16, ring_tiles=64) and backward.run == 0


def test_who_is_asked_first(monkeypatch, tmp_path):
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(tune, "SHIPPED", shipped)
    assert tuned(KEY, SMS) == tune.Choice({"minibatch_tiles": 19}, {}, "heuristic")
    store(shipped, KEY, {"forward": {"parts": 2}, "backward": {}})
    assert tuned(KEY, SMS) == tune.Choice({"parts": 2}, {}, "shipped")
    store(tune.cache_file(), KEY, {"forward": {"parts": 8}, "backward": {"run": 4}})
    assert tuned(KEY, SMS) == tune.Choice({"parts": 8}, {"run": 4}, "tuned")
    assert set(json.loads(shipped.read_text())) == {"format", "entries"}


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
def test_the_command_on_this_machine(tmp_path, precision):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = CliRunner().invoke(cli.app, ["tune", "--repeats", "1", "--shapes", "tiny,128x32x48x4x4", "--precision", precision])
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "mok" / "tuned.json").read_text())
    assert [entry["key"]["T"] for entry in written["entries"]] == [128, 96]
    for entry in written["entries"]:
        assert entry["key"]["gpu"] == "cpu" and entry["key"]["precision"] == precision
        assert set(entry["forward"]) == {"minibatch_tiles"} and entry["backward"] == {}
        assert tuned(Key(**entry["key"]), 0).forward == entry["forward"]
    assert "written to" in result.output and "T96 H32 I48 E8 K2" in result.output


def test_a_shape_that_is_cut_off_is_not_stored(tmp_path, monkeypatch):
    real = tune.tune

    def slow(key, *given):
        entry = real(key, *given)
        if key.T == 128:
            time.sleep(60)
        return entry

    monkeypatch.setattr(tune, "tune", slow)
    start = time.monotonic()
    result = CliRunner().invoke(cli.app, ["tune", "--repeats", "1", "--shapes", "tiny,128x32x48x4x4", "--limit", "6"])
    assert result.exit_code == 1 and time.monotonic() - start < 20, result.output
    assert "not tuned: 128x32x48x4x4: left out: the limit of 6 seconds was over" in result.output and "T96 H32" in result.output
    assert [entry["key"]["T"] for entry in json.loads((tmp_path / "mok" / "tuned.json").read_text())["entries"]] == [96]


def test_a_candidate_with_other_bits_is_refused(monkeypatch):
    real = CpuLayer.forward

    def forward(self, batch, keep=False, changes=None):
        out, kept = real(self, batch, keep, changes)
        return (out + 1 if (changes or {}).get("minibatch_tiles") == 8 else out), kept

    monkeypatch.setattr(CpuLayer, "forward", forward)
    lines = []
    entry = tune.tune(Key("cpu", 96, 32, 48, 8, 2), torch.device("cpu"), 0, 1, ["forward"], lines.append)
    assert entry["forward"] == {"minibatch_tiles": 16}
    assert any("minibatch_tiles=8: not the bits of the default plan: out differs" in line for line in lines)


def test_rank_0_decides(monkeypatch):
    """Two ranks whose clocks disagree come to the same plan, that of rank 0."""
    of_rank = threading.local()
    box, meet = {}, threading.Barrier(2, timeout=20)

    class Stub:
        def __init__(self, *_):
            pass

        def check(self, *_):
            return ""

        def time(self, direction, plans):
            fastest = {0: 20, 1: 32}[of_rank.number]
            return {label: 0.5 if plan.get("minibatch_tiles") == fastest else 1.0 for label, plan in plans.items()}

    def broadcast(values, source):
        if of_rank.number == source:
            box["values"] = list(values)
        meet.wait()
        values[:] = box["values"]
        meet.wait()

    monkeypatch.setattr(tune, "Measured", Stub)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    chosen = {}

    def work(number):
        of_rank.number = number
        key = dataclasses.replace(KEY, ep=2)
        chosen[number] = tune.tune(key, torch.device("cpu"), SMS, 1, ["forward"], lambda line: None)["forward"]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert chosen[0] == chosen[1] and chosen[0]["minibatch_tiles"] == 20


def test_what_the_command_refuses(tmp_path):
    (tmp_path / "file").touch()
    for argument, message in (
        (f"--out={tmp_path}", "cannot be written (Is a directory)"),
        (f"--out={tmp_path}/file/a.json", "cannot be written (File exists)"),
        ("--repeats=0", "must be at least 1"),
        ("--ranks=0", "must be at least 1"),
        ("--shapes=huge", "--shapes=huge: must be some of"),
        ("--directions=up", "--directions=up: must be some of forward,backward"),
        ("--precision=fp4", "invalid choice: 'fp4'"),
    ):
        result = CliRunner().invoke(cli.app, ["tune", *argument.split()])
        assert result.exit_code == 2 and message in result.output
