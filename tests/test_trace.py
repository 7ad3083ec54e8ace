"""`mok trace`: from words as the kernels write them to shares, a Chrome trace and a picture; and the kernels' own words, interpreted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mok import cli, executor, fabric, trace
from mok.bench import layers
from mok.bench.shapes import Shape

pytest.importorskip("triton")

CYCLES_PER_NS = 1.5
ORIGIN = 1_790_000_000_000_000_000


def words(programs, tickets) -> torch.Tensor:
    """A record. programs: (multiprocessor, begin, end); tickets: (program, begin, ready, computed, done); ns, None where not noted.

    Every program's clock starts somewhere else.
    """
    offset = [10**12 + 7_777_777 * p for p in range(len(programs))]
    clock = lambda p, ns: 0 if ns is None else offset[p] + round(ns * CYCLES_PER_NS)  # noqa: E731
    record = []
    for p, (sm, begin, end) in enumerate(programs):
        record += [sm, clock(p, begin), ORIGIN + begin, clock(p, end), ORIGIN + end, 0, 0, 0]
    for p, *moments in tickets:
        record += [*(clock(p, ns) for ns in moments), p, ORIGIN + moments[0], 0, 0]
    return torch.tensor([*record, *[0] * 80])  # room for more tickets than there were


def example() -> trace.Timeline:
    """Two programs, microseconds 0 to 100: one pulls, waits and multiplies; the other waits, multiplies, pushes, and is done at 90."""
    us = 1000
    tickets = [
        (0, 2 * us, 2 * us, None, 20 * us),  # pull
        (1, 3 * us, 21 * us, 50 * us, 60 * us),  # up
        (0, 21 * us, 61 * us, 90 * us, 99 * us),  # down
        (1, 62 * us, 62 * us, 80 * us, 88 * us),  # down of another tile
    ]
    made = words([(5, 0, 100 * us), (3, us, 90 * us)], tickets)
    tile, part = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 0])
    return trace.timeline("forward", 0, made, 2, ["pull", "up", "down", "down"], tile, part, tile, kernel_ns=101 * us)


def test_shares_by_hand():
    line = example()
    got = {name: round(ns / 1000, 2) for name, ns in trace.shares(line).items()}
    want = {
        "dispatch": 18, "waiting for x_ready": 18, "up": 29 + 10, "waiting for h_ready": 40, "down": 29 + 18, "combine": 9 + 8,
        "between tasks": 1 + 2, "tail": 3 + 15,
    }  # fmt: skip
    assert got == pytest.approx(want, abs=0.02)
    assert sum(got.values()) == pytest.approx(2 * 100, abs=0.1)


def test_up_tasks_that_gather_wait_for_places():
    made = words([(5, 0, 100_000)], [(0, 0, 20_000, 50_000, 60_000), (0, 60_000, 65_000, 90_000, 100_000)])
    one = torch.tensor([0, 0])
    got = trace.shares(trace.timeline("forward", 0, made, 1, ["up", "down"], one, one, one))
    assert got["waiting for a free place of h"] == pytest.approx(20_000, abs=20) and "waiting for x_ready" not in got
    assert got["waiting for h_ready"] == pytest.approx(5_000, abs=20)


def test_the_summary_adds_up_to_the_kernel():
    about = trace.summary(example())
    assert about["span_us"] == 100 and about["kernel_us"] == 101
    assert about["accounted"] == pytest.approx(0.99, abs=1e-3) and sum(about["shares"].values()) == pytest.approx(0.99, abs=2e-3)
    assert about["kinds"]["down"] == dict(tasks=2, waits_us=20, works_us=23.5, ends_us=8.5)
    assert list(about["shares"])[-2:] == ["between tasks", "tail"]


def test_multiprocessors_of_different_speed_under_a_coarse_wall_clock():
    """All take a task at the same moments; a tick is 1,024 ns, and the fastest clock gains 1 % on the slowest."""
    moments, speeds, tick = [3777 * i + 11 for i in range(1, 200)], (1.5, 1.51, 1.515), 1024
    clock = lambda p, ns: 10**12 * (p + 1) + round(ns * speeds[p])  # noqa: E731
    wall = lambda ns: (ORIGIN + ns) // tick * tick  # noqa: E731
    record = []
    for p in range(3):
        record += [p, clock(p, 0), wall(0), clock(p, 800_000), wall(800_000), 0, 0, 0]
    for ns in moments:
        for p in range(3):
            record += [clock(p, ns), clock(p, ns), 0, clock(p, ns + 9), p, wall(ns), 0, 0]
    count = 3 * len(moments)
    zeros = torch.zeros(count, dtype=torch.int64)
    line = trace.timeline("forward", 0, torch.tensor(record), 3, ["up"] * count, zeros, zeros, zeros)
    want = torch.tensor(moments).repeat_interleave(3)
    assert float((line.begin - want).abs().max()) < 200


def random_timeline(rank: int, direction: str, programs: int = 6, tasks: int = 200) -> trace.Timeline:
    """Tasks one after the other on each program, the kinds at random, as the kernels note them."""
    g = torch.Generator().manual_seed(rank)
    names = list(trace.KINDS[direction])
    free = torch.randint(100, 900, (programs,), generator=g).tolist()
    first, kinds, tickets = list(free), [], []
    for _ in range(tasks):
        p = free.index(min(free))
        lengths = torch.randint(1, 3000, (4,), generator=g).tolist()
        kind = names[int(torch.randint(len(names), (), generator=g))]
        begin = free[p] + lengths[0] % 50
        ready = begin + lengths[1]
        computed = None if kind in ("pull", "gate up", "nothing") else ready + lengths[2]
        free[p] = (computed or ready) + lengths[3]
        tickets.append((p, begin, None if (direction, kind) == ("backward", "pull") else ready, computed, free[p]))
        kinds.append(kind)
    made = words([(p // 2, first[p] - 80, free[p] + 40) for p in range(programs)], tickets)  # two programs on a multiprocessor
    tile, part = torch.arange(tasks) % 7, torch.arange(tasks) % 3
    return trace.timeline(direction, rank, made, programs, kinds, tile, part, tile)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_nothing_is_lost_or_counted_twice(direction):
    line = random_timeline(3, direction)
    of = trace.shares(line)
    assert sum(of.values()) == pytest.approx(len(line.sm) * line.span_ns, rel=1e-9)
    assert all(ns >= 0 for ns in of.values())
    assert {name for name in of if name.startswith("waiting")} >= {"waiting for x_ready", "waiting for h_ready"} or direction == "backward"
    assert trace.summary(line)["accounted"] == pytest.approx(1, abs=1e-3)


def test_the_chrome_trace():
    """JSON; a process per rank, a row per program; slices of a row do not overlap; every flow leaves and enters a slice."""
    lines = [random_timeline(rank, direction) for rank in (0, 1) for direction in ("forward", "backward")]
    made = json.loads(json.dumps(trace.chrome(lines)))
    events = made["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    assert len({(event["pid"], event["tid"]) for event in slices}) == 2 * 6
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert set(names.values()) == {"SM 0", "SM 1", "SM 2"} and len(names) == 12
    for direction in ("forward", "backward"):
        tasks = [event for event in slices if event["cat"] == direction]
        assert len(tasks) == 2 * 200
        for row in names:
            own = sorted((event["ts"], event["ts"] + event["dur"]) for event in tasks if (event["pid"], event["tid"]) == row)
            assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(own))
    flows = {}
    for event in events:
        if event["ph"] in "sf":
            flows.setdefault(event["id"], {})[event["ph"]] = event
            over = [e for e in slices if e["cat"] in trace.KINDS or e["name"] == "wait for the other ranks"]
            tasks = [e for e in over if (e["pid"], e["tid"]) == (event["pid"], event["tid"])]
            assert any(e["ts"] - 2e-3 <= event["ts"] <= e["ts"] + e["dur"] + 2e-3 for e in tasks), event
    assert flows and all(set(pair) == {"s", "f"} for pair in flows.values())
    assert {pair["s"]["name"] for pair in flows.values()} >= {"x_ready", "h_ready", "d_gate_ready", "published", "pushed"}
    assert len(made["otherData"]["summary"]) == 4


def test_links_are_the_last_source_and_the_first_sink():
    line = example()
    assert [link[:3] for link in trace.links(line)] == [(0, 1, "x_ready"), (1, 2, "h_ready")]
    given, taken = zip(*(link[3:] for link in trace.links(line)), strict=True)
    assert given == pytest.approx((20_000, 60_000), abs=5) and taken == pytest.approx((21_000, 61_000), abs=5)


def one_after_the_other(direction, tasks, **columns) -> trace.Timeline:
    """One program; a task is (kind, tile), begins every 100 ns, is ready after 10, has its sums after 60 and is done after 90."""
    count = len(tasks)
    made = words([(0, 0, 100 * count)], [(0, 100 * i, 100 * i + 10, 100 * i + 60, 100 * i + 90) for i in range(count)])
    kind, tile = [name for name, _ in tasks], torch.tensor([at for _, at in tasks])
    zero = torch.zeros(count, dtype=torch.int64)
    return trace.timeline(direction, 0, made, 1, kind, tile, zero, zero, **{name: torch.tensor(of) for name, of in columns.items()})


def test_every_wait_of_a_forward_has_its_arrow():
    """A ring of one tile: tile 1 gets the place of x when tile 0's ups are done, that of h when its down task has its sums."""
    tasks = [("pull", 0), ("shared up", 0), ("up", 0), ("down", 0), ("pull", 1), ("up", 1), ("shared down", 0)]
    line = one_after_the_other("forward", tasks, group=[0] * 7, frees=[-1, -1, -1, -1, 0, 0, -1])
    found = {(link.source, link.sink, link.signal): (link.given, link.taken) for link in trace.links(line)}
    assert set(found) == {
        (0, 2, "x_ready"), (2, 3, "h_ready"), (2, 4, "a free place"), (3, 5, "a free place of h"), (4, 5, "x_ready"), (1, 6, "shared h")
    }  # fmt: skip
    assert found[3, 5, "a free place of h"] == pytest.approx((360, 510), abs=2)
    assert found[2, 4, "a free place"] == pytest.approx((290, 410), abs=2)


def test_every_wait_of_a_backward_has_its_arrow():
    """Two groups of a tile each and a ring of one; the sum of the second one's weight began in the first."""
    tasks = [
        ("pull", 0), ("shared hidden", 0), ("shared d_x", 0), ("shared d_weight", 0),
        ("hidden", 0), ("hidden", 0), ("d_x", 0), ("d_weight", 0), ("d_weight", 0), ("pull", 1), ("hidden", 1), ("d_weight", 1),
    ]  # fmt: skip
    line = one_after_the_other("backward", tasks, group=[0] * 10 + [1, 1], frees=[-1] * 9 + [0, -1, 0])
    line.ready[9] = torch.nan  # as most backwards' pulls
    found = {link[:3]: link.taken for link in trace.links(line)}
    assert set(found) == {
        (0, 4, "x_ready"), (1, 2, "shared h"), (1, 3, "all of shared h"), (5, 6, "d_gate_ready"), (5, 7, "group_ready"),
        (8, 9, "a free place"), (9, 10, "x_ready"), (10, 11, "group_ready"), (8, 11, "memory for a cut sum"),
    }  # fmt: skip
    assert found[8, 9, "a free place"] == pytest.approx(990, abs=2), "where a pull says when it is done only"


def test_arrows_between_ranks():
    """Both come; the second one's last push is later, and the first one waits for it behind its own end."""
    tasks = [("pull", 0), ("up", 0), ("down", 0)]
    first, second = one_after_the_other("forward", tasks), one_after_the_other("forward", [*tasks, ("down", 0)])
    second = dataclasses.replace(second, rank=1)
    found = [(a.line.rank, a.ns, b.line.rank, b.ns, signal) for a, b, signal in trace.crossings([first, second], [0, 50])]
    assert [(source, sink, signal) for source, _, sink, _, signal in found] == [
        (0, 1, "published"), (1, 0, "published"), (1, 0, "pushed")
    ]  # fmt: skip
    times = [round(ns, -1) for _, a, _, b, _ in found for ns in (a, b)]
    assert times == [0, 90, 0, 90, 390, 440], "the last one by the first rank's clock"
    events = trace.chrome([first, second])["traceEvents"]
    (slice_,) = [event for event in events if event["name"] == "wait for the other ranks"]
    assert slice_["pid"] == 0 and slice_["ts"] == pytest.approx(0.3, abs=2e-3) and slice_["dur"] == pytest.approx(0.09, abs=2e-3)
    assert sorted(e["pid"] for e in events if e["name"] == "pushed") == [0, 1]


# ---- the executor's steps ----

SIZE = Shape(300, 32, 48, 6, 2)
CPU = torch.device("cpu")


def of_the_executor(directions=("forward", "backward"), **of_layer) -> list[trace.Timeline]:
    layer = layers.CpuLayer(SIZE.T, SIZE.E, SIZE.K, layers.make_experts(SIZE, CPU), None, 1.0, **of_layer)
    return trace.take_on_cpu(layer, layers.make_batch(SIZE, 0, 0, CPU), directions, {"minibatch_tiles": 1, "ring_tiles": 3}, 0)


def test_steps_by_hand():
    steps = [("begin", 1000, 0, 0), ("schedule", 1005, 0, 0), ("ready", 1008, 0, 0), ("up", 1010, 256, 3), ("end", 1030, 0, 0)]
    line = trace.of_steps("forward", 1, steps, 40)
    assert line.kind == ["begin", "schedule", "up"] and line.tile.tolist() == [0, 0, 2] and line.expert.tolist() == [0, 0, 3]
    assert trace.shares(line) == {"agreement": 5, "waiting for published": 3, "schedule": 2, "up": 20, "tail": 0}
    assert trace.summary(line)["accounted"] == 0.75, "of the 40 ns that somebody else measured"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_executors_steps_add_up(precision):
    tiles = layers.make_batch(SIZE, 0, 0, CPU).ids_TK.flatten().bincount().add(127).div(128, rounding_mode="floor").sum()
    forward, backward = of_the_executor(precision=precision)
    for line, per_tile in ((forward, ("up", "down")), (backward, ("hidden", "d_weight", "d_x"))):
        about = trace.summary(line)
        assert 0.98 < about["accounted"] <= 1.0 and sum(trace.shares(line).values()) == pytest.approx(line.span_ns)
        assert {name: about["kinds"][name]["tasks"] for name in (*per_tile, "pull", "push")} == dict.fromkeys(
            (*per_tile, "pull", "push"), int(tiles)
        )  # fmt: skip
        assert (line.begin[1:] == line.done[:-1]).all(), "a step begins where the one before it ends"
        signals = {link.signal for link in trace.links(line)}
        assert signals >= ({"x_ready", "h_ready"} if line is forward else {"x_ready", "d_gate_ready"})
    assert executor.watch is None


def test_a_slow_step_is_seen_where_it_is(monkeypatch):
    real = executor.dispatch
    monkeypatch.setattr(executor, "dispatch", lambda *given: (time.sleep(0.02), real(*given))[1])
    (line,) = of_the_executor(("forward",))
    of, pulls = trace.shares(line), line.kind.count("pull")
    assert pulls > 5 and of["dispatch"] > pulls * 20e6 and of["dispatch"] / line.span_ns > 0.8


def test_a_rank_that_waits_is_seen_to():
    """Two virtual ranks, of which the second one publishes late: the first one's trace has the wait, its own has none."""
    fabrics = fabric.virtual_ranks(2)
    fabrics[1].before = lambda task, _: time.sleep(0.05) if task == "signal published" else None
    steps: dict[int, list] = {0: [], 1: []}

    def work(of: fabric.VirtualFabric) -> None:
        experts = tuple(weight[3 * of.rank : 3 * of.rank + 3] for weight in layers.make_experts(SIZE, CPU))
        layers.CpuLayer(SIZE.T, SIZE.E, SIZE.K, experts, of, 1.0).forward(layers.make_batch(SIZE, of.rank, 0, CPU))

    executor.watch = lambda rank, name, row, expert: steps[rank].append((name, time.perf_counter_ns(), row, expert))
    try:
        fabric.run_virtual(work, fabrics)
    finally:
        executor.watch = None
    lines = [trace.of_steps("forward", rank, [*of, ("end", time.perf_counter_ns(), 0, 0)], 1e9) for rank, of in steps.items()]
    waits = [trace.shares(line).get("waiting for published", 0) for line in lines]
    assert waits[0] > 40e6 and waits[1] < 20e6
    origin = min(line.origin_ns for line in lines)
    offsets = [line.origin_ns - origin for line in lines]
    found = {signal: (a.ns + offsets[a.line.rank], b.ns + offsets[b.line.rank]) for a, b, signal in trace.crossings(lines, offsets)
             if a.line.rank == 1 or signal == "pushed"}  # fmt: skip
    assert set(found) == {"published", "pushed"} and all(given <= taken for given, taken in found.values())
    made = trace.chrome(lines)["traceEvents"]
    assert {event["args"]["name"] for event in made if event["name"] == "thread_name"} == {"executor 0"}


def test_a_task_without_timestamps_is_named():
    made = words([(0, 0, 100)], [(0, 1, 2, 3, 4), (0, 5, 6, 7, 8)])
    made[8 + 8 + 3] = 0
    tile = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 of 2 forward tasks have no timestamps, the first of them task 1"):
        trace.timeline("forward", 0, made, 1, ["up", "up"], tile, tile, tile)


def test_the_command(tmp_path, monkeypatch, capsys):
    """Its files and its table, from two ranks' timelines; and what it refuses."""
    pytest.importorskip("matplotlib")
    lines = [example(), random_timeline(1, "backward")]
    monkeypatch.setattr(trace, "measure", lambda *_: lines)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["trace", "--out", "t.json", "--png", "t.png"])
    assert result.exit_code == 0, result.output
    title = "rank 0, forward: 100 us by timestamps, 101 us by the profiler; the shares add up to 99.0%"
    for text in (title, "waiting for h_ready", "dispatch", "tail", "not seen by"):
        assert text in result.output, result.output
    assert len(json.loads(Path("t.json").read_text())["traceEvents"]) > 500
    picture = __import__("matplotlib.image").image.imread("t.png")
    assert picture.shape[0] > 500 and 0.02 < (picture[..., :3] < 0.9).any(-1).mean() < 0.98, "neither blank nor full"
    result = CliRunner().invoke(cli.app, ["trace", "--json"])
    assert [about["direction"] for about in json.loads(result.output)] == ["forward", "backward"]
    for arguments, text in (
        (["--shapes=huge"], "--shapes=huge: must be some of kimi-k2-slice"),
        (["--shapes=fine,qwen3-30b"], "one shape at a time"),
        (["--ranks=2"], "--ranks=2: there are 1 GPUs"),
        (["--direction=sideways"], "--direction"),
        (["--plan=x"], "--plan: x: must be a JSON object, as '{\"minibatch_tiles\": 8}'"),
        (["--plan=[1]"], "--plan: [1]: must be a JSON object"),
        (['--plan={"foo": 1}'], "--plan: foo: no field of a plan; on this machine there are num_sms, minibatch_tiles, ring_tiles"),
        (['--plan={"parts": "4"}'], '--plan: parts: "4": must be a whole number'),
    ):
        result = CliRunner().invoke(cli.app, ["trace", *arguments])
        assert result.exit_code == 2 and text in result.output, result.output


def test_the_command_ends_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "measure", lambda *_: time.sleep(60))
    start, out = time.monotonic(), tmp_path / "t.json"
    result = CliRunner().invoke(cli.app, ["trace", "--shapes", "tiny", "--limit", "0.2", "--out", str(out)])
    assert result.exit_code == 1 and time.monotonic() - start < 20 and not out.exists()
    assert "not traced: tiny: left out: the limit of 0.2 seconds was over" in result.output


def test_the_command_without_a_gpu(tmp_path):
    """Two processes: a summary of each rank and direction, a trace with arrows between them, a picture."""
    pytest.importorskip("matplotlib")
    files = tmp_path / "t.json", tmp_path / "t.png"
    line = [sys.executable, "-m", "mok", "trace", "--ranks", "2", "--json", "--out", str(files[0]), "--png", str(files[1])]
    result = subprocess.run(
        line, capture_output=True, text=True, timeout=150, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=SCRIPT.parent.parent
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout)
    assert [(about["rank"], about["direction"]) for about in told] == [(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward")]
    assert all(0.98 < about["accounted"] <= 1.0 and {"dispatch", "combine"} < set(about["shares"]) for about in told)
    events = json.loads(files[0].read_text())["traceEvents"]
    flows = {}
    for event in events:
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
    across = [pair for pair in flows.values() if pair[0]["pid"] != pair[1]["pid"]]
    assert {(pair[0]["name"], pair[0]["pid"]) for pair in across if pair[0]["name"] == "published"} == {("published", 0), ("published", 1)}
    assert sum(pair[0]["name"] == "pushed" for pair in across) == 2 and all(start["ts"] <= end["ts"] for start, end in across)
    assert files[1].stat().st_size > 10_000


SCRIPT = Path(__file__).with_name("interpreted_tools.py")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    line = [sys.executable, str(SCRIPT)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ["forward_trace", "backward_trace", "overlap"])  # the last one is `mok bench overlap`'s
def test_the_kernels_own_words(interpreted, case):
    assert not interpreted[case], interpreted[case]
