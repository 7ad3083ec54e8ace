"""`mok trace`: from words as the kernels write them to shares, a Chrome trace and a picture; and the kernels' own words, interpreted."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mok import cli, trace

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
            tasks = [e for e in slices if e["cat"] in trace.KINDS and (e["pid"], e["tid"]) == (event["pid"], event["tid"])]
            assert any(e["ts"] - 2e-3 <= event["ts"] <= e["ts"] + e["dur"] + 2e-3 for e in tasks), event
    assert flows and all(set(pair) == {"s", "f"} for pair in flows.values())
    assert {pair["s"]["name"] for pair in flows.values()} >= {"x_ready", "h_ready", "d_gate_ready"}
    assert len(made["otherData"]["summary"]) == 4


def test_links_are_the_last_source_and_the_first_sink():
    line = example()
    assert list(trace.links(line)) == [(0, 1, "x_ready"), (1, 2, "h_ready")]


def test_a_task_without_timestamps_is_named():
    made = words([(0, 0, 100)], [(0, 1, 2, 3, 4), (0, 5, 6, 7, 8)])
    made[8 + 8 + 3] = 0
    tile = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 of 2 forward tasks have no timestamps, the first of them task 1"):
        trace.timeline("forward", 0, made, 1, ["up", "up"], tile, tile, tile)


def test_the_command(tmp_path, monkeypatch, capsys):
    """Its files and its table, from two ranks' timelines; and what it refuses."""
    pytest.importorskip("matplotlib")
    if not torch.cuda.is_available():
        result = CliRunner().invoke(cli.app, ["trace"])
        assert result.exit_code == 2 and "a GPU is needed" in result.output
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
    ):
        result = CliRunner().invoke(cli.app, ["trace", *arguments])
        assert result.exit_code == 2 and text in result.output, result.output


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
