"""What the programs of a kernel did when: the kernels' timestamps as a table of shares, a Chrome trace and a picture.

    python -m mok trace --shapes qwen3-30b --out trace.json --png trace.png        # then https://ui.perfetto.dev opens trace.json
    python -m mok trace --ranks 2 --direction forward
    python -m mok trace --ranks 2 --shapes 600x64x96x8x2        # without a GPU: the executor's steps

A kernel compiled with TRACE notes for every task when it was begun, had what it waited for, had its sums, and was done
(`mok.kernels.trace`). Here a task's time is cut at these moments: waiting, by the signal; work, by its kind, where the pushes of a down or
d_x task, from its sums on, are the combine; and between two tasks nothing. What a program has before its first task and after its last one
up to the kernel's end is the tail. So the shares add up to the programs' time, and their sum divided by the programs is the kernel's time.
On the CPU a rank is one program, its tasks are the executor's steps (`mok.executor.watch`), and the time is that of the whole call.

A multiprocessor's clock counts cycles from anywhere. A program's first reading of the wall clock, which ticks coarsely, places it, and the
mean rate over all programs makes it nanoseconds. GPUs are laid side by side by the beginnings of their forwards, which follow a barrier;
processes of the CPU by their one clock.

Arrows go from the task that made a signal complete to the first one that had waited for it (`WAITS`). Between ranks they are those of the
two states that a call has: "published", from a rank's first task to the first pull of each other one, and "pushed", from the last rank's
last push to where the others may go on. On GPUs both are barriers outside the kernel, and what a rank waits at the second one is drawn.

Legend: P programs, N tickets.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mok import executor
from mok.bench import ranks, report
from mok.bench.layers import (
    Batch,
    Changes,
    CpuLayer,
    GpuLayer,
    default_device,
    layer_class,
    make_batch,
    make_experts,
    plan_option,
    plan_with,
)
from mok.bench.limit import Limit
from mok.bench.shapes import ONE_GPU, SEVERAL_GPUS, TINY, Shape, choose
from mok.config import TILE_M
from mok.quantize import Precision
from mok.schedule import local_experts


class Kind(NamedTuple):
    """What a task's time is: up to its sums, from them on, and the signal it waited for."""

    work: str
    after: str
    waits_for: str


SHARED = Kind("shared experts", "shared experts", "shared h")
OF_CALLS = {  # the executor's alone; its other steps have the names of the kernels' tasks, and wait for nothing
    "begin": Kind("agreement", "agreement", "nothing"),
    "publish": Kind("publish", "publish", "nothing"),
    "schedule": Kind("schedule", "schedule", "published"),
    "weights": Kind("weights", "weights", "nothing"),
    "push": Kind("combine", "combine", "nothing"),
    "sum": Kind("combine", "combine", "pushed"),
    "end": Kind("end", "end", "nothing"),
}
KINDS = {
    "forward": {
        **OF_CALLS,
        "pull": Kind("dispatch", "dispatch", "a free place"),
        "up": Kind("up", "up", "x_ready"),
        "down": Kind("down", "combine", "h_ready"),
        "shared up": SHARED,
        "shared down": SHARED,
    },
    "backward": {
        **OF_CALLS,
        "pull": Kind("dispatch", "dispatch", "a free place"),
        "gate up": Kind("gate and up again", "gate and up again", "x_ready"),
        "hidden": Kind("hidden", "hidden", "x_ready or gate_ready"),
        "d_x": Kind("d_x", "combine", "d_gate_ready"),
        "d_weight": Kind("d_weight", "d_weight", "group_ready"),
        "shared hidden": SHARED,
        "shared d_x": SHARED,
        "shared d_weight": SHARED,
    },
}


class Wait(NamedTuple):
    """Tasks of the kind `sink` wait for all tasks of the kinds `sources` whose `by` is their own `of` (columns of a Timeline), up to their
    sums if the signal is given there."""

    sources: tuple[str, ...]
    sink: str
    signal: str
    by: str = "tile"
    of: str = "tile"
    at_sums: bool = False


WAITS = {
    "forward": (
        Wait(("pull",), "up", "x_ready"),
        Wait(("up",), "down", "h_ready"),
        Wait(("up",), "pull", "a free place", of="frees"),
        Wait(("down",), "up", "a free place of h", of="frees", at_sums=True),
        Wait(("shared up",), "shared down", "shared h"),
    ),
    "backward": (
        Wait(("pull",), "gate up", "x_ready"),
        Wait(("gate up",), "hidden", "gate_ready"),
        Wait(("pull",), "hidden", "x_ready"),
        Wait(("hidden",), "d_x", "d_gate_ready"),
        Wait(("hidden",), "d_weight", "group_ready", by="group", of="group"),
        Wait(("gate up", "hidden", "d_x", "d_weight"), "pull", "a free place", by="group", of="frees"),
        Wait(("gate up", "hidden", "d_x", "d_weight"), "d_weight", "memory for a cut sum", by="group", of="frees"),
        Wait(("shared hidden",), "shared d_x", "shared h"),
        Wait(("shared hidden",), "shared d_weight", "all of shared h", by="group", of="group"),
    ),
}
COLORS = {
    "dispatch": "#1f77b4", "up": "#2ca02c", "down": "#98df8a", "combine": "#ff7f0e", "shared experts": "#9467bd", "hidden": "#2ca02c",
    "d_x": "#98df8a", "d_weight": "#bcbd22", "gate and up again": "#17becf", "waiting": "#d62728",
    "schedule": "#8c564b", "publish": "#e377c2", "weights": "#c5b0d5", "agreement": "#7f7f7f",
}  # fmt: skip


@dataclass(frozen=True)
class Timeline:
    """One kernel on one rank. Times are float64 nanoseconds from the first program's begin; a moment that a task did not note is NaN.

    kernel_ns: the kernel's time as the profiler has it, on the CPU the call's; NaN if it was not measured.
    origin_ns: the wall clock at the first program's begin, int.
    sm, begins, ends: [P], each program's multiprocessor, first and last moment.
    kind: [N] names, keys of KINDS[direction]; tile, part, expert, program: int64 [N].
    begin, ready, computed, done: [N].
    group: [N], of a backward's tasks; 0 in a forward. frees: [N], the tile or, in a backward, the group that a task's place or memory must
        be free of; -1 if none. None where they are not known.
    device: "cuda" or "cpu".
    """

    direction: str
    rank: int
    kernel_ns: float
    origin_ns: int
    sm: Tensor
    begins: Tensor
    ends: Tensor
    kind: list[str]
    tile: Tensor
    part: Tensor
    expert: Tensor
    program: Tensor
    begin: Tensor
    ready: Tensor
    computed: Tensor
    done: Tensor
    group: Tensor | None = None
    frees: Tensor | None = None
    device: str = "cuda"

    @property
    def span_ns(self) -> float:
        return float(self.ends.max())

    def moments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """begin, ready, computed, done with nothing missing: no wait is one of no length, and who notes no sums works until the end."""
        ready = torch.where(self.ready.isnan(), self.begin, self.ready)
        return self.begin, ready, torch.where(self.computed.isnan(), self.done, self.computed), self.done


# ---- from the kernels' words ----


def _clocks(program: Tensor, cycles: Tensor, ns: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(program, cycles) -> ns by each program's own straight line, the nearest to its points: multiprocessors differ in speed, and the wall
    clock ticks once in a microsecond or so."""
    count = torch.bincount(program)
    mean_cycles, mean_ns = torch.bincount(program, cycles) / count, torch.bincount(program, ns) / count
    distance = cycles - mean_cycles[program]
    spread = torch.bincount(program, distance * distance)
    slope = torch.bincount(program, distance * (ns - mean_ns[program])) / spread.clamp(min=1.0)
    return lambda which, at: mean_ns[which] + slope[which] * (at.double() - mean_cycles[which])


def timeline(
    direction: str, rank: int, words: Tensor, programs: int, kind: list[str], tile: Tensor, part: Tensor, expert: Tensor,
    kernel_ns: float = float("nan"), group: Tensor | None = None, frees: Tensor | None = None,
) -> Timeline:  # fmt: skip
    """words: int64, as the kernel wrote them: P programs' records, then the tickets', of which the first len(kind) are used.

    Raises:
        ValueError: a ticket that no program took: the kernel did not end, or was not traced.
    """
    from mok.kernels import trace as record

    per_program, per_ticket = record.PROGRAM.value, record.WORDS.value
    of_program = words[: programs * per_program].view(programs, per_program)
    of_ticket = words[programs * per_program :][: len(kind) * per_ticket].view(-1, per_ticket)
    missing = (of_ticket[:, record.DONE.value] == 0).nonzero()
    if len(missing):
        raise ValueError(f"{len(missing)} of {len(kind)} {direction} tasks have no timestamps, the first of them task {int(missing[0])}")
    first_clock, first_wall = of_program[:, record.FIRST_CLOCK.value], of_program[:, record.FIRST_WALL.value]
    last_clock, last_wall = of_program[:, record.LAST_CLOCK.value], of_program[:, record.LAST_WALL.value]
    origin, program = first_wall.min(), of_ticket[:, record.BY.value]
    begin = of_ticket[:, record.BEGIN.value]
    everyone = torch.arange(programs)
    to_ns = _clocks(
        torch.cat([everyone, everyone, program]),
        torch.cat([first_clock - first_clock, last_clock - first_clock, begin - first_clock[program]]).double(),
        (torch.cat([first_wall, last_wall, of_ticket[:, record.WALL.value]]) - origin).double(),
    )
    begins, ends = to_ns(everyone, first_clock - first_clock), to_ns(everyone, last_clock - first_clock)

    def moment(word: int) -> Tensor:
        clock = of_ticket[:, word]
        return torch.where(clock == 0, torch.nan, to_ns(program, clock - first_clock[program]) - begins.min())

    return Timeline(
        direction, rank, kernel_ns, int(origin), of_program[:, record.SM.value], begins - begins.min(),
        ends - begins.min(),
        kind, tile, part, expert, program, moment(record.BEGIN.value), moment(record.READY.value), moment(record.COMPUTED.value),
        moment(record.DONE.value), group, frees,
    )  # fmt: skip


def forward_timeline(workspace: Any, words: Tensor, programs: int, kernel_ns: float = float("nan"), ring: int = 0) -> Timeline:
    """The forward that a workspace ran last; words: its record, kept before anything else was traced there. ring: its tiles, 0: unknown."""
    from mok.kernels import tasks

    names = {
        tasks.PULL.value: "pull", tasks.UP.value: "up", tasks.DOWN.value: "down", tasks.SHARED_UP.value: "shared up",
        tasks.SHARED_DOWN.value: "shared down",
    }  # fmt: skip
    listed = workspace.scratch["tasks"].cpu()
    task = listed[1 : 1 + int(listed[0])]
    kind = [names[number] for number in (task & 7).tolist()]
    tile, part, expert = task >> 32, (task >> 4) & 4095, (task >> 16) & 65535
    frees = (tile - ring).clamp(min=-1) if ring else torch.full_like(tile, -1)
    return timeline(
        "forward", workspace.memory.rank, words.cpu(), programs, kind, tile, part, expert, kernel_ns, torch.zeros_like(tile), frees
    )


def backward_timeline(workspace: Any, words: Tensor, programs: int, kernel_ns: float = float("nan")) -> Timeline:
    """The same of the backward. part of a d_weight task: 0 gate, 1 up, 2 down; its tile is the first one of its rows."""
    from mok.kernels import groups

    names = {
        groups.PULL.value: "pull", groups.GATE_UP.value: "gate up", groups.HIDDEN.value: "hidden", groups.D_X.value: "d_x",
        groups.D_WEIGHT.value: "d_weight", groups.SHARED_HIDDEN.value: "shared hidden", groups.SHARED_D_X.value: "shared d_x",
        groups.SHARED_D_WEIGHT.value: "shared d_weight",
    }  # fmt: skip
    table = workspace.scratch["groups"].cpu()
    count = int(table[groups.HEADER.value + int(table[0]) * groups.ROW.value + groups.TICKET.value])
    size = groups.RECORD.value
    records = workspace.scratch["tasks_backward"][: count * size].view(count, size).cpu().long()
    kind = [names[number] for number in records[:, groups.KIND.value].tolist()]
    columns = (groups.AT_TILE, groups.PART, groups.OF_EXPERT, groups.OF_GROUP, groups.AT, groups.DEPTH)
    tile, part, expert, group, at, depth = (records[:, column.value] for column in columns)
    pulls, weights = (records[:, groups.KIND.value] == which.value for which in (groups.PULL, groups.D_WEIGHT))
    after = table[groups.HEADER.value + group * groups.ROW.value + groups.CARRY_AFTER.value].long()
    first = torch.full((max(expert.tolist(), default=0) + 1,), 1 << 60)
    first = first.scatter_reduce(0, expert[weights], tile[weights], "amin")  # where an expert's rows begin
    cut = weights & ((depth & 1 == 0) | (tile > first[expert]))
    frees = torch.where(pulls, at, torch.where(cut, after, -1))
    return timeline("backward", workspace.memory.rank, words.cpu(), programs, kind, tile, part, expert, kernel_ns, group, frees)


# ---- the summary ----


def shares(line: Timeline) -> dict[str, float]:
    """Nanoseconds of all programs together, by what they went to. The values add up to P times the span.

    Example, two programs over 100 ns: one pulls for 40 and is done, the other waits for 40 and works at an up task for 60:
    dispatch 40, waiting for x_ready 40, up 60, tail 60.
    """
    total: dict[str, float] = collections.defaultdict(float)
    pulls = "pull" in line.kind  # else up tasks gather their rows, and wait for nothing but a place of what they make
    begin, ready, computed, done = line.moments()
    columns = zip(line.kind, (ready - begin).tolist(), (computed - ready).tolist(), (done - computed).tolist(), strict=True)
    for name, waited, worked, after in columns:
        kind = KINDS[line.direction][name]
        if name == "up" and not pulls:
            kind = kind._replace(waits_for="a free place of h")
        total[kind.waits_for if kind.waits_for == "between tasks" else f"waiting for {kind.waits_for}"] += waited
        total[kind.work] += worked
        total[kind.after] += after
    programs, span = len(line.sm), line.span_ns
    for p in range(programs):
        mine = line.program == p
        first, last = (float(begin[mine].min()), float(done[mine].max())) if mine.any() else (float(line.begins[p]),) * 2
        total["between tasks"] += last - first - float((done - begin)[mine].sum())
        total["tail"] += span - (last - first)
    return {name: value for name, value in total.items() if value or name == "tail"}


class OfKind(NamedTuple):
    """Tasks of one kind: how many, and the mean nanoseconds that one waits, works up to its sums, and takes from them on."""

    tasks: int
    waits: float
    works: float
    ends: float


def kinds(line: Timeline) -> dict[str, OfKind]:
    begin, ready, computed, done = line.moments()
    result = {}
    for name in KINDS[line.direction]:
        mine = torch.tensor([kind == name for kind in line.kind], dtype=torch.bool)
        if mine.any():
            means = (float(value[mine].mean()) for value in (ready - begin, computed - ready, done - computed))
            result[name] = OfKind(int(mine.sum()), *means)
    return result


def summary(line: Timeline) -> dict[str, Any]:
    """Plain data: microseconds and shares of the kernel, and per kind of task.

    accounted: what the shares add up to as part of the kernel's time by the profiler, or, without one, of the span of the timestamps.
    """
    of, programs = shares(line), len(line.sm)
    whole = line.span_ns if line.kernel_ns != line.kernel_ns else line.kernel_ns
    order = sorted(of, key=lambda name: (name == "tail", name == "between tasks", name.startswith("waiting"), -of[name]))
    return dict(
        rank=line.rank, direction=line.direction, programs=programs, tasks=len(line.kind), span_us=round(line.span_ns * 1e-3, 1),
        kernel_us=None if line.kernel_ns != line.kernel_ns else round(line.kernel_ns * 1e-3, 1),
        accounted=round(sum(of.values()) / programs / whole, 4),
        shares={name: round(of[name] / programs / whole, 4) for name in order},
        kinds={name: dict(tasks=k.tasks, waits_us=round(k.waits * 1e-3, 2), works_us=round(k.works * 1e-3, 2),
                          ends_us=round(k.ends * 1e-3, 2)) for name, k in kinds(line).items()},
    )  # fmt: skip


# ---- the Chrome trace ----


class Link(NamedTuple):
    """An arrow: a signal of the ticket `source`, given at a time, to the ticket `sink`, which then went on."""

    source: int
    sink: int
    signal: str
    given: float
    taken: float


def links(line: Timeline) -> Iterator[Link]:
    """Of each tile or group, the task that made a signal complete and the first task that had waited for it. A pull that notes nothing but
    its begin and end, as some kernels' do, is reached at its end."""
    columns = dict(tile=line.tile, group=line.group, frees=line.frees)
    tickets: dict[tuple[str, str], dict[int, list[int]]] = {}  # by kind and column, then by value

    def by(kind: str, column: str) -> dict[int, list[int]]:
        if (kind, column) not in tickets:
            found: dict[int, list[int]] = collections.defaultdict(list)
            values = columns[column]
            for ticket, value in enumerate(values.tolist() if values is not None else ()):
                if line.kind[ticket] == kind:
                    found[value].append(ticket)
            tickets[kind, column] = found
        return tickets[kind, column]

    _, _, computed, done = (value.tolist() for value in line.moments())
    ready = torch.where(line.ready.isnan(), line.done, line.ready).tolist()
    for wait in WAITS[line.direction]:
        given = computed if wait.at_sums else done
        for value, sinks in by(wait.sink, wait.of).items():
            sources = [ticket for kind in wait.sources for ticket in by(kind, wait.by).get(value, ())]
            if sources:
                source, sink = max(sources, key=given.__getitem__), min(sinks, key=ready.__getitem__)
                yield Link(source, sink, wait.signal, given[source], ready[sink])


class Point(NamedTuple):
    """A moment of a program, ns from its timeline's begin."""

    line: Timeline
    program: int
    ns: float


def _point(line: Timeline, kinds: Sequence[str], moment: str, last: bool = False) -> Point | None:
    """The first or the last moment of that name in the tasks of these kinds."""
    values = getattr(line, moment).tolist()
    tasks = [ticket for ticket, kind in enumerate(line.kind) if kind in kinds and values[ticket] == values[ticket]]
    if not tasks:
        return None
    ticket = (max if last else min)(tasks, key=values.__getitem__)
    return Point(line, int(line.program[ticket]), values[ticket])


def crossings(lines: Sequence[Timeline], offsets: Sequence[float]) -> Iterator[tuple[Point, Point, str]]:
    """(where a signal was given, where a rank that waited for it went on, the signal) between the ranks of one call, whose timelines these
    are. offsets: ns of each from a common beginning."""
    on_cpu, kinds = lines[0].device == "cpu", KINDS[lines[0].direction]
    pushing = [name for name, kind in kinds.items() if kind.after == "combine" and name != "sum"]
    came = [_point(line, ("publish",), "done") if on_cpu else _point(line, tuple(kinds), "begin") for line in lines]
    began = [_point(line, ("schedule",), "ready") if on_cpu else _point(line, ("pull",), "done") for line in lines]
    for i, source in enumerate(came):
        for j, sink in enumerate(began):
            if i != j and source and sink:
                yield source, sink, "published"
    pushed = [(point.ns + offset, i) for i, (line, offset) in enumerate(zip(lines, offsets, strict=True))
              if (point := _point(line, pushing, "done", True))]  # fmt: skip
    if not pushed:
        return
    at, last = max(pushed)
    source = _point(lines[last], pushing, "done", True)
    for j, line in enumerate(lines):
        sink = _point(line, ("sum",), "ready") if on_cpu else Point(line, int(line.ends.argmax()), at - offsets[j])
        if j != last and source and sink and (on_cpu or sink.ns > line.span_ns):  # else nobody waited
            yield source, sink, "pushed"


def chrome(lines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace event format: a process per rank, a row per multiprocessor, a slice per task with its parts inside, flows for signals."""
    events: list[dict[str, Any]] = []
    origins = {line.rank: line.origin_ns for line in reversed(lines)}
    if any(line.device == "cpu" for line in lines):
        origins = dict.fromkeys(origins, min(origins.values()))
    offsets = {id(line): line.origin_ns - origins[line.rank] for line in lines}
    of_rows: dict[int, list[int]] = {}
    flow = 0

    def us(line: Timeline, ns: float) -> float:
        return round((ns + offsets[id(line)]) * 1e-3, 3)

    def slice_of(line: Timeline, row: int, name: str, cat: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
        dur = max(us(line, end) - us(line, start), 0.0)
        return dict(ph="X", name=name, cat=cat, pid=line.rank, tid=row, ts=us(line, start), dur=dur, args=args)

    def arrow(name: str, *ends: Point) -> None:
        nonlocal flow
        flow += 1
        for phase, (line, program, ns) in zip("sf", ends, strict=True):
            event = dict(ph=phase, id=flow, name=name, cat="signal", pid=line.rank, tid=of_rows[id(line)][program], ts=us(line, ns))
            events.append(event | ({"bp": "e"} if phase == "f" else {}))

    for line in lines:
        seen: collections.Counter[int] = collections.Counter()
        rows = of_rows[id(line)] = []
        for sm in line.sm.tolist():  # two programs of one multiprocessor have rows of their own
            rows.append(sm + 1000 * seen[sm])
            seen[sm] += 1
        events.append(dict(ph="M", name="process_name", pid=line.rank, args=dict(name=f"rank {line.rank}")))
        on = "SM" if line.device == "cuda" else "executor"
        events += [dict(ph="M", name="thread_name", pid=line.rank, tid=row, args=dict(name=f"{on} {row % 1000}")) for row in set(rows)]
        begin, ready, computed, done = (value.tolist() for value in line.moments())
        programs, tiles, parts, experts = (value.tolist() for value in (line.program, line.tile, line.part, line.expert))
        for ticket, name in enumerate(line.kind):
            kind, row = KINDS[line.direction][name], rows[programs[ticket]]
            about = dict(ticket=ticket, tile=tiles[ticket], part=parts[ticket], expert=experts[ticket])
            cuts = [
                (f"{name} {tiles[ticket]}.{parts[ticket]}", line.direction, begin[ticket], done[ticket], about),
                (f"wait for {kind.waits_for}", "wait", begin[ticket], ready[ticket], {}),
                (kind.work, "work", ready[ticket], computed[ticket], {}),
                ("push" if kind.after == "combine" else "store", "work", computed[ticket], done[ticket], {}),
            ]
            events += [
                slice_of(line, row, what, of, start, end, more)
                for what, of, start, end, more in cuts
                if end > start
            ]
        for source, sink, signal, given, taken in links(line):
            arrow(signal, Point(line, programs[source], given - 1), Point(line, programs[sink], taken))
    for direction in dict.fromkeys(line.direction for line in lines):  # where there are several ranks
        call = [line for line in lines if line.direction == direction]
        if len(call) < 2:
            continue
        for start, to, signal in crossings(call, [offsets[id(line)] for line in call]):
            arrow(signal, start, to)
            if to.ns > to.line.span_ns:
                row = of_rows[id(to.line)][to.program]
                events.append(slice_of(to.line, row, "wait for the other ranks", "wait", to.line.span_ns, to.ns, {}))
    return dict(traceEvents=events, displayTimeUnit="ns", otherData=dict(machine=report.machine(), summary=[summary(x) for x in lines]))


# ---- the picture ----


def draw(lines: Sequence[Timeline], path: str | Path) -> None:
    """One panel per kernel: a row per program, coloured by what it does; white is nothing. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    figure, panels = plt.subplots(len(lines), 1, figsize=(16, 5 * len(lines)), squeeze=False, layout="constrained")
    for line, axes in zip(lines, panels[:, 0], strict=True):
        place = torch.empty_like(line.sm)
        place[line.sm.argsort(stable=True)] = torch.arange(len(line.sm))
        boxes: dict[str, list[list[tuple[float, float]]]] = collections.defaultdict(list)
        columns = [value.tolist() for value in (place[line.program], *line.moments())]
        for name, row, begin, ready, computed, done in zip(line.kind, *columns, strict=True):
            kind = KINDS[line.direction][name]
            for what, start, end in (("waiting", begin, ready), (kind.work, ready, computed), (kind.after, computed, done)):
                if end > start and what in COLORS:
                    low, high, left, right = row - 0.45, row + 0.45, start * 1e-3, end * 1e-3
                    boxes[what].append([(left, low), (right, low), (right, high), (left, high)])
        for what, polygons in boxes.items():
            axes.add_collection(PolyCollection(polygons, facecolors=COLORS[what], edgecolors="none"))
        axes.set_xlim(0, line.span_ns * 1e-3)
        axes.set_ylim(-1, len(line.sm))
        axes.set_xlabel("microseconds")
        axes.set_ylabel("programs, by multiprocessor" if line.device == "cuda" else "the executor")
        axes.set_title(f"rank {line.rank}, {line.direction}: {line.span_ns * 1e-3:.0f} us, {len(line.kind)} tasks", loc="left")
        of = [(name, _drawn(name), share) for name, share in summary(line)["shares"].items()]
        patches = [Patch(color=COLORS[what], label=f"{name} {share:.1%}") for name, what, share in of if what]
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _drawn(name: str) -> str:
    """What a share is drawn as; "" if it is white."""
    name = "waiting" if name.startswith("waiting") else name
    return name if name in COLORS else ""


# ---- taking one ----


def _profiled(run: Callable[[], object], kernel: str) -> float:
    """Nanoseconds of the kernel, or of its form for Hopper, during a call, by the profiler; NaN where that does not see it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    names = (kernel, kernel.replace("_kernel", "_hopper_kernel"))
    times = [event.time_range.elapsed_us() for event in found.events() or () if event.name in names]
    return 1e3 * times[0] if times else float("nan")


def take(layer: GpuLayer, batch: Batch, directions: Sequence[str], changes: Changes, calls: int = 6) -> list[Timeline]:
    """Call the layer a few times, and trace the last call. All ranks of its group do this together."""
    from mok.kernels import launch
    from mok.kernels.launch import ForwardPlan
    from mok.kernels.launch_backward import BackwardPlan

    changes = {**changes, "trace": True}
    workspace, lines = layer.workspace, []

    def traced(run: Callable[[], Any], kernel: str) -> tuple[Any, Tensor, float]:
        for _ in range(calls - 1):
            run()
        layer.finish()
        if workspace.memory.size > 1:
            dist.barrier()
        results: list[Any] = []
        kernel_ns = _profiled(lambda: results.append(run()), kernel)
        layer.finish()
        return results[0], workspace.scratch["trace"].clone(), kernel_ns

    def programs(kind: Any) -> int:
        plan = plan_with(kind, changes)
        return (plan.num_sms or workspace.num_sms) * plan.programs_per_sm

    (_, kept), words, kernel_ns = traced(lambda: layer.forward(batch, "backward" in directions, changes), layer.kernel)
    if "forward" in directions:
        ring = launch.ring_tiles(plan_with(ForwardPlan, changes), kept[0].tile_expert.numel())
        lines.append(forward_timeline(workspace, words, programs(ForwardPlan), kernel_ns, ring))
    if "backward" in directions:
        _, words, kernel_ns = traced(lambda: layer.backward(batch, kept, changes), layer.backward_kernel)
        lines.append(backward_timeline(workspace, words, programs(BackwardPlan), kernel_ns))
    return lines


def take_on_cpu(layer: CpuLayer, batch: Batch, directions: Sequence[str], changes: Changes, rank: int, calls: int = 3) -> list[Timeline]:
    """The same of the executor, in the order in which this rank's steps were. A backward is what follows a forward that saved all rows."""
    steps: list[tuple[str, int, int, int]] = []  # name, ns, first row, expert

    def note(of_rank: int, step: str, row: int, expert: int) -> None:
        if of_rank == rank:
            steps.append((step, time.perf_counter_ns(), row, expert))

    def traced(run: Callable[[], object], direction: str) -> Timeline:
        if dist.is_initialized():
            dist.barrier()
        steps.clear()
        with mock.patch.object(executor, "watch", note):
            start = time.perf_counter_ns()
            note(rank, "begin", 0, 0)
            run()
            note(rank, "end", 0, 0)
            return of_steps(direction, rank, steps, time.perf_counter_ns() - start)

    lines = []
    for _ in range(calls):
        lines = [traced(lambda: layer.forward(batch, changes=changes), "forward")] if "forward" in directions else []
        if "backward" in directions:
            differentiate = layer.differentiable(batch, changes)
            lines.append(traced(differentiate, "backward"))
    return lines


def of_steps(direction: str, rank: int, steps: Sequence[tuple[str, int, int, int]], wall_ns: float) -> Timeline:
    """Steps (name, ns, first row, expert), each of which ends where the next one begins; "ready" is none of its own. The last is "end".

    Example: begin at 0, schedule at 5, ready at 8, end at 9: a schedule from 5 to 9 that had what it waited for at 8.
    """
    origin = steps[0][1]
    tasks: list[tuple[str, int, int, float, float, float]] = []  # name, tile, expert, begin, ready, done
    for (name, ns, row, expert), (_, until, _, _) in itertools.pairwise(steps):
        begin, end = float(ns - origin), float(until - origin)
        if name == "ready":
            tasks[-1] = (*tasks[-1][:4], begin, end)
        else:
            tasks.append((name, row // TILE_M, expert, begin, math.nan, end))
    names, tile, expert_of, *moments = zip(*tasks, strict=True)
    begins, ready, done = (torch.tensor(values, dtype=torch.float64) for values in moments)
    none, first = torch.zeros(len(names), dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    return Timeline(
        direction, rank, wall_ns, origin, torch.zeros(1, dtype=torch.int64), first, first + (steps[-1][1] - origin), list(names),
        torch.tensor(tile), none, torch.tensor(expert_of), none, begins, ready, torch.full_like(ready, math.nan), done, device="cpu",
    )  # fmt: skip


def measure(
    shape: Shape, directions: Sequence[str], changes: Changes, device: torch.device, precision: Precision = "bf16"
) -> list[Timeline]:
    """The timelines of this rank, or on rank 0 those of all ranks."""
    several = dist.is_initialized()
    rank, size, group = (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) if several else (0, 1, None)
    mine = local_experts(shape.E, size, rank)
    experts = tuple(weight[mine.start : mine.stop] for weight in make_experts(shape, device))
    kind = layer_class(device)
    layer = kind(shape.T, shape.E, shape.K, experts, group, 1.25 if several else 1.0, precision=precision)  # type: ignore[arg-type]
    wanted = (make_batch(shape, rank, 0, device), directions, changes)
    lines = take(layer, *wanted) if isinstance(layer, GpuLayer) else take_on_cpu(layer, *wanted, rank)
    if not several:
        return lines
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, lines)
    return [line for of_rank in everyone for line in of_rank] if rank == 0 else []


def show(lines: Sequence[Timeline], title: str) -> None:
    for line in lines:
        about = summary(line)
        clock = "the profiler" if line.device == "cuda" else "the host's clock"
        kernel = f"not seen by {clock}" if about["kernel_us"] is None else f"{about['kernel_us']:g} us by {clock}"
        report.print_table(
            f"{title}, rank {line.rank}, {line.direction}: {about['span_us']:g} us by timestamps, {kernel}; the shares add up to "
            f"{about['accounted']:.1%}",
            [{"of the programs' time": name, "share": f"{share:.1%}", "us": round(share * (about["kernel_us"] or about["span_us"]), 1)}
             for name, share in about["shares"].items()],
        )  # fmt: skip
        report.print_table("", [{"one task, us": name, **values} for name, values in about["kinds"].items()])


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="mok trace", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    names = ", ".join({**ONE_GPU, **SEVERAL_GPUS} if cuda else TINY)
    parser.add_argument(
        "--shapes", default="qwen3-30b" if cuda else "tiny", help=f"one of {names}, PRESET/RANKS, or TxHxIxExK. Default: %(default)s"
    )
    parser.add_argument("--direction", default="both", choices=("forward", "backward", "both"), help="what is traced. Default: both")
    parser.add_argument("--precision", default="bf16", choices=get_args(Precision), help="of the experts' products. Default: bf16")
    parser.add_argument(
        "--ranks", type=report.count, default=1, help="processes, one GPU each where there are GPUs; a launcher's wins. Default: 1"
    )
    parser.add_argument("--plan", type=plan_option, default={}, help='JSON: changes to how the work is cut, as {"minibatch_tiles": 8}')
    parser.add_argument("--out", help="the Chrome trace to write")
    parser.add_argument("--png", help="the picture to write; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead of tables")
    parser.add_argument("--limit", type=report.seconds, default=300.0, help="seconds after which it ends. Default: 300")
    options = parser.parse_args(arguments)
    try:
        known = TINY if not cuda else SEVERAL_GPUS if options.ranks > 1 else ONE_GPU
        (name, shape), *others = choose(options.shapes, known).items()
    except ValueError as error:
        parser.error(str(error))
    if others:
        parser.error(f"--shapes={options.shapes}: one shape at a time")
    if options.png and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--png={options.png}: needs matplotlib, which is not installed")
    if cuda and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks={options.ranks}: there are {torch.cuda.device_count()} GPUs")
    report.refuse_unwritable(parser, out=options.out, png=options.png)
    if options.ranks > 1 and not ranks.launched():
        return ranks.launch("mok.trace", arguments, options.ranks, options.limit)
    rank, device = (0, default_device()) if not ranks.launched() else ranks.join(options.limit)[::2]
    directions = ("forward", "backward") if options.direction == "both" else (options.direction,)
    limit = Limit(math.inf if ranks.launched() else options.limit)  # ranks are ended from outside

    def say_missing() -> None:
        for of, why in limit.missing().items():
            print(f"not traced: {of}: {why}", file=sys.stderr, flush=True)

    lines: list[Timeline] = []
    with limit.held(say_missing):
        for _ in limit.each({name: shape}):
            lines = measure(shape, directions, options.plan, device, options.precision)
    if limit.left_out:
        say_missing()
        return 1
    if rank == 0:
        if options.out:
            Path(options.out).write_text(json.dumps(chrome(lines)))
        if options.png:
            draw(lines, options.png)
        if options.json:
            print(json.dumps([summary(line) for line in lines], indent=1))
        else:
            show(lines, f"{name} ({shape})")
    sys.stdout.flush()
    if ranks.launched():
        os._exit(0)  # whatever a library still holds open must not keep a rank alive
    return 0


if __name__ == "__main__":
    sys.exit(main())
