"""Rows and signals between two GPUs, or within one: how fast each way of moving rows is, by the number of programs, and what signals cost.

    python -m mok.bench.comm --ranks 2 [--parts pull,push,skew,latency] [--variants tma] [--programs 8,24] [--out results.json]

Without a GPU the ranks are processes of the CPU, the ways of moving rows the executor's two, each by one program, and the signals those of
`mok.fabric`.

Every rank moves T rows of H bf16 values (14 KB at H = 7168) in random order while its peer does the same the other way. A figure is GB/s of
rows that cross the link in one direction, from the slowest rank's median. Every variant is checked (the rows are the peer's) before it is
timed. "skew": not all rows cross the link, or not every rank has as many to move; the figure then is of all rows of the rank that has
most. Some of the rows are the rank's own; or each rank has T / R rows for rank 0's experts ("one rank"), or half of them for one hot
expert of rank 0's and the others for all ranks' alike. Rank 0 then pulls rows from all ranks, or pushes them to all.

A flag is raised in the peer's memory, where the peer polls it (as the layer's signals are), or in one's own, polled over the link.

With one rank (--ranks 1, the default where there is one GPU) the rows lie in its own memory, in the same random order, no routing is
skewed, and the two ends of a flag are two programs of the GPU.

Legend: T rows of a rank, H hidden, R ranks.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.bench import ranks, report
from mok.bench.timing import medians
from mok.fabric import Call, Region, host_fabric

PROGRAMS = (4, 8, 12, 16, 24, 32, 64)
PARTS = ("pull", "push", "skew", "latency")
PUSHES = ("st", "tma push", "push")  # ways whose receiver has no part in it


@dataclass(frozen=True)
class Routing:
    """Whose rows a rank moves: a share of the peer's, the others its own; or of all ranks' rows a part to rank 0, the rest to all alike."""

    share: float = 1.0
    to_rank_0: float | None = None

    @property
    def name(self) -> str:
        if self.to_rank_0 is not None:
            return "one rank" if self.to_rank_0 == 1 else "hot expert"
        return "" if self.share == 1 else f"{self.share:.0%} remote"


ALL_REMOTE = Routing()
SKEWED = (Routing(0.5), Routing(0.9), Routing(to_rank_0=1.0), Routing(to_rank_0=0.5))


@dataclass(frozen=True)
class Variant:
    """One way to move rows: a kernel, its constants, warps; `mixed` ways can take rows of several ranks in one launch."""

    name: str
    way: str
    constants: dict[str, Any]
    warps: int
    mixed: bool


def pull_variants() -> Iterator[Variant]:
    def by_loads(warps: int, rows: int, columns: int, unroll: int = 1, cache: str = "") -> Variant:
        name = f"ld w{warps} {rows}x{columns}" + (f" x{unroll}" if unroll > 1 else "") + (f" {cache[1:]}" if cache else "")
        return Variant(name, "ld", dict(ROWS=rows, BLOCK_H=columns, UNROLL=unroll, CACHE=cache), warps, True)

    for warps, rows, columns in ((8, 32, 512), (8, 16, 512), (8, 64, 512), (8, 128, 512), (8, 32, 256), (16, 32, 512)):
        yield Variant(f"layer w{warps} {rows}x{columns}", "layer", dict(ROWS=rows, BLOCK_H=columns, R=2), warps, True)
    for warps in (8, 16):
        for rows in (8, 16, 32):
            for columns in (512, 1024, 2048):
                yield by_loads(warps, rows, columns)
    yield from (by_loads(8, rows, 8192) for rows in (1, 2, 4))
    yield from (by_loads(warps, 16, 1024, 1, ".cg") for warps in (8, 16))
    yield from (by_loads(8, 8, 1024, 2), by_loads(8, 16, 512, 2), by_loads(8, 16, 1024, 2), by_loads(16, 16, 1024, 2))
    yield from (by_loads(8, 8, 512, 4), by_loads(8, 8, 1024, 4), by_loads(16, 16, 512, 4), by_loads(16, 16, 1024, 4))
    shapes = ((4, 4, 1024, 4), (8, 8, 512, 4), (8, 8, 1024, 4), (8, 8, 1024, 6), (8, 16, 1024, 4), (16, 16, 1024, 6))
    for warps, rows, columns, stages in shapes:
        constants = dict(ROWS=rows, BLOCK_H=columns, STAGES=stages)
        yield Variant(f"async w{warps} {rows}x{columns} s{stages}", "async", constants, warps, True)
    depths = ((8, 128, 2), (8, 128, 3), (8, 128, 4), (4, 128, 4), (8, 128, 6), (8, 128, 9), (4, 32, 5), (4, 32, 9), (4, 16, 9))
    for store in (False, True):
        for warps, lines, stages in depths:
            constants = dict(LINES=lines, STAGES=stages, STORE_BY_COPY_ENGINE=store)
            yield Variant(f"tma w{warps} {lines}x64 s{stages}" + (" tma-store" if store else ""), "tma", constants, warps, False)


def push_variants() -> Iterator[Variant]:
    # 128 x 128 and 128 x 256 are what the epilogue of a product has.
    for warps, rows, columns in ((8, 8, 1024), (8, 16, 1024), (8, 32, 512), (16, 16, 1024), (8, 128, 128), (8, 128, 256)):
        yield Variant(f"st w{warps} {rows}x{columns}", "st", dict(ROWS=rows, BLOCK_H=columns), warps, True)
    for warps, stages in ((4, 3), (8, 3), (8, 4), (8, 6)):
        yield Variant(f"tma push w{warps} 128x64 s{stages}", "tma push", dict(LINES=128, STAGES=stages), warps, False)


@dataclass
class Order:
    """Row i comes from (or goes to) row index[i] of rank other[i]; int32, at most T of them. Every rank can make every rank's."""

    other: Tensor
    index: Tensor


def make_order(rows: int, rank: int, size: int, routing: Routing, device: torch.device) -> Order:
    """What a rank moves, in random order; of a rank's rows none twice. Where ranks have different numbers, these are multiples of 32.

    Example, 256 rows, 2 ranks: all to rank 0, it has 128 of each and the other one nothing; half of them, it has 96 of each, the other 32.
    """
    g = torch.Generator().manual_seed(rank)
    if routing.to_rank_0 is None:
        away = torch.rand(rows, generator=g) < routing.share
        other, index = torch.where(away, (rank + 1) % size, rank), torch.randperm(rows, generator=g)
    else:
        each = rows // size  # that a rank has to route
        part = int(each * (1 - routing.to_rank_0)) // size // 32 * 32  # for a rank but the first
        first, count = (0, each - (size - 1) * part) if rank == 0 else (each - rank * part, part)
        shuffled = torch.randperm(size * count, generator=g)
        other = torch.arange(size).repeat_interleave(count)[shuffled]
        chosen = [torch.randperm(each, generator=torch.Generator().manual_seed(1000 + r))[first : first + count] for r in range(size)]
        index = torch.cat(chosen)[shuffled]
    return Order(other.to(torch.int32).to(device), index.to(torch.int32).to(device))


def most_rows(rows: int, size: int, routing: Routing) -> int:
    """Of the rank that has most of them."""
    return max(len(make_order(rows, rank, size, routing, torch.device("cpu")).index) for rank in range(size))


def make_rows(rows: int, hidden: int, rank: int, device: torch.device) -> Tensor:
    g = torch.Generator(device).manual_seed(100 + rank)
    return torch.randn(rows, hidden, generator=g, device=device).bfloat16()


FLAG_WORDS = 64  # from a rank's flag to the second one, which another program has where there is no other rank


class Link:
    """This rank's end: peer-visible rows, slots and flags."""

    def __init__(self, rows: int, hidden: int, device: torch.device) -> None:
        from mok.kernels import memory

        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.peer = (self.rank + 1) % self.size
        self.rows, self.hidden = rows, hidden
        layout = [
            Region("control", (memory.FLAGS + self.size,), torch.int32),
            Region("flag", (2 * FLAG_WORDS,), torch.int32),
            Region("x", (rows, hidden), torch.bfloat16),
            Region("slots", (self.size * rows, hidden), torch.bfloat16),  # rank r writes to slots r * T + index
        ]
        assert dist.group.WORLD is not None
        alone = self.size == 1
        self.memory = memory.virtual_memory(layout, 1, device)[0] if alone else memory.symmetric_memory(layout, dist.group.WORLD, device)
        self.x, self.slots = self.memory.own["x"], self.memory.own["slots"]
        self.peer_x, self.peer_slots = (
            self.memory.own[name] if alone else self.memory.handle.region(name, self.peer) for name in ("x", "slots")
        )
        self.x.copy_(make_rows(rows, hidden, self.rank, device))
        self.out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        self.flag = 0
        self.gave_up = torch.zeros(1, dtype=torch.int32, device=device)
        self.meet()

    def pulls(self) -> list[Variant]:
        return list(pull_variants())

    def pushes(self) -> list[Variant]:
        return list(push_variants())

    def meet(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def runs(self, variant: Variant, routing: Routing, programs: Sequence[int]) -> dict[str, Callable[[], object]]:
        """A launch for each number of programs, by that number."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from mok.bench import comm_kernels as kernels

        order = make_order(self.rows, self.rank, self.size, routing, self.device)
        of_lines = lambda matrix: TensorDescriptor.from_tensor(  # noqa: E731
            matrix.view(matrix.shape[0], self.hidden // 64, 64), [1, variant.constants["LINES"], 64]
        )
        index = order.index
        if variant.way in PUSHES:
            index = index + self.rank * self.rows
        kernel, arguments = {
            "ld": lambda: (kernels.pull_kernel, [self.memory.addresses["x"], self.out, order.other, index]),
            "layer": lambda: (kernels.pull_as_layer_kernel, [self.memory.addresses["x"], self.out, order.other, index]),
            "async": lambda: (kernels.pull_async_kernel, [self.memory.addresses["x"], self.out, order.other, index]),
            "tma": lambda: (kernels.pull_copy_engine_kernel, [of_lines(self.peer_x), of_lines(self.out), self.out, index]),
            "st": lambda: (kernels.push_kernel, [self.x, self.memory.addresses["slots"], order.other, index]),
            "tma push": lambda: (kernels.push_copy_engine_kernel, [of_lines(self.x), of_lines(self.peer_slots), index]),
        }[variant.way]()
        constants = {**variant.constants, **({} if variant.way == "tma push" else dict(H=self.hidden))}
        return {
            str(count): functools.partial(kernel[(count,)], *arguments, len(index), **constants, num_warps=variant.warps)
            for count in programs
        }

    def problem(self, variant: Variant, routing: Routing, run: Callable[[], object]) -> str:
        """What is wrong with the rows after a run; "" if nothing is."""
        self.out.fill_(float("nan"))
        self.slots.fill_(float("nan"))
        self.meet()
        run()
        self.meet()
        for source in range(self.size):
            if variant.way in PUSHES:  # rows of `source` that were for this rank
                order = make_order(self.rows, source, self.size, routing, self.device)
                mine = (order.other == self.rank).nonzero()[:, 0]
                got = self.slots[source * self.rows + order.index[mine].long()]
                want = make_rows(self.rows, self.hidden, source, self.device)[mine]
            else:
                order = make_order(self.rows, self.rank, self.size, routing, self.device)
                mine = (order.other == source).nonzero()[:, 0]
                got = self.out[mine]
                want = make_rows(self.rows, self.hidden, source, self.device)[order.index[mine].long()]
            if not torch.equal(got, want):
                wrong = (got != want).any(1).nonzero()[:, 0]
                return f"{len(wrong)} rows of rank {source} are wrong, first row {int(mine[wrong[0]])}"
        return ""

    def time(self, runs: dict[str, Callable[[], object]], repeats: int = 12) -> dict[str, float]:
        """Milliseconds on the slowest rank."""
        return ranks.slowest(medians(runs, repeats, warmup=2, round_of=6, align=self.meet), self.device)


HOST_VARIANTS = (Variant("executor's dispatch", "pull", {}, 1, True), Variant("executor's push", "push", {}, 1, True))
PATIENCE_S = 20.0  # of a flag


class HostLink(Link):
    """The same end on the CPU, over the host's fabric: one call's regions."""

    def __init__(self, rows: int, hidden: int, device: torch.device) -> None:
        assert dist.group.WORLD is not None
        self.fabric = host_fabric(dist.group.WORLD)
        self.rank, self.size, self.device = self.fabric.rank, self.fabric.size, device
        self.peer = (self.rank + 1) % self.size
        self.rows, self.hidden, self.flag = rows, hidden, 0
        self.call = self.begin()
        self.x, self.slots = self.call.region("x"), self.call.region("slots")
        self.peer_x, self.peer_slots = (self.call.region(name, self.peer) for name in ("x", "slots"))
        self.x.copy_(make_rows(rows, hidden, self.rank, device))
        self.out = torch.empty(rows, hidden, dtype=torch.bfloat16)
        self.call.region("flag").zero_()
        self.meet()

    def begin(self) -> Call:
        """Another call with the same regions in the same memory, once all ranks have come."""
        layout = [
            Region("flag", (1,), torch.int64),
            Region("x", (self.rows, self.hidden), torch.bfloat16),
            Region("slots", (self.size * self.rows, self.hidden), torch.bfloat16),
        ]
        return self.fabric.begin("comm", {}, lambda _: layout)

    def pulls(self) -> list[Variant]:
        return [HOST_VARIANTS[0]]

    def pushes(self) -> list[Variant]:
        return [HOST_VARIANTS[1]]

    def meet(self) -> None:
        dist.barrier()

    def runs(self, variant: Variant, routing: Routing, programs: Sequence[int]) -> dict[str, Callable[[], object]]:
        from mok import executor

        order = make_order(self.rows, self.rank, self.size, routing, self.device)
        rows = slice(0, len(order.index))
        if variant.way == "pull":
            schedule: Any = SimpleNamespace(peer_rank=order.other, peer_token_idx=order.index)
            return {str(programs[0]): lambda: executor.dispatch(self.call, schedule, "x", rows, 1, self.out[rows])}
        schedule = SimpleNamespace(peer_rank=order.other, peer_token_idx=order.index + self.rank * self.rows)
        return {str(programs[0]): lambda: executor.push(self.call, schedule, "slots", rows, self.x[rows])}


def measure_rows(link: Link, variants: Sequence[Variant], routings: Sequence[Routing], programs: Sequence[int]) -> list[dict[str, Any]]:
    """A line and a row per variant and routing. A variant that does not compile or moves rows wrongly is said to."""
    rows = []
    for variant in variants:
        for routing in routings:
            gigabytes = most_rows(link.rows, link.size, routing) * link.hidden * 2 * 1e-9
            problem = ""
            try:
                runs = link.runs(variant, routing, programs)
                problem = link.problem(variant, routing, runs[str(programs[0])])
            except Exception as error:
                problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            problem = ranks.first_problem(problem)
            name = ", ".join(filter(None, (variant.name, routing.name)))
            if problem:
                say(f"{name:34} {problem}")
                continue
            ms = link.time(runs)
            rate = {int(count): round(gigabytes / (value * 1e-3), 1) for count, value in ms.items()}
            say(f"{name:34} " + "  ".join(f"{count}: {value:5.1f}" for count, value in rate.items()))
            share = routing.share if routing.to_rank_0 is None and link.size > 1 else (link.size - 1) / link.size
            row = dict(suite="comm", variant=variant.name, share=share, gbs=rate, T=link.rows, H=link.hidden, ep=link.size)
            rows.append(row | ({"routing": routing.name} if routing.to_rank_0 is not None else {}))
    return rows


def measure_copies(link: Link) -> list[dict[str, Any]]:
    """What does not go through a program: the copy engine of the device, and NCCL; on the CPU plain copies."""
    sent = [0] * link.size
    sent[link.peer] = link.rows
    received = [0] * link.size
    received[(link.rank - 1) % link.size] = link.rows
    part = link.peer_slots[link.rank * link.rows : (link.rank + 1) * link.rows]
    alone = link.size == 1
    runs: dict[str, Callable[[], object]] = {"copy" if alone else "copy from the peer": lambda: link.out.copy_(link.peer_x)}
    if not alone:
        runs["copy to the peer"] = lambda: part.copy_(link.x)
    if link.device.type == "cuda" and not alone:
        runs["NCCL all-to-all"] = lambda: dist.all_to_all_single(link.out, link.x, received, sent)
    ms = link.time(runs)
    gbs = {name: round(link.rows * link.hidden * 2 * 1e-6 / value, 1) for name, value in ms.items()}
    for name, value in gbs.items():
        say(f"{name:34} {value:5.1f}")
    share = float(not alone)
    return [
        dict(suite="comm", variant=name, share=share, gbs=value, T=link.rows, H=link.hidden, ep=link.size) for name, value in gbs.items()
    ]


PUSHED, POLLED, WITHIN = "flag, one way", "flag polled in the peer's memory, one way", "flag between two programs, one way"


def measure_latency(link: Link) -> list[dict[str, Any]]:
    """Microseconds of signals, and of the copy that publishes."""
    us, problem = latencies_on_cpu(link) if isinstance(link, HostLink) else latencies(link)
    if problem := ranks.first_problem(problem):
        say(problem)
        return []
    for name, value in us.items():
        say(f"{name:34} {value:8.2f} us")
    return [dict(suite="comm", variant=name, us=round(value, 3), H=link.hidden, ep=link.size) for name, value in us.items()]


def publishing(link: Link) -> dict[str, Callable[[], object]]:
    """Copies of some tokens to where peers see them."""
    copy = lambda count: link.x[:count].copy_(link.out[:count])  # noqa: E731
    return {f"publish {count} tokens": functools.partial(copy, count) for count in (256, 2048, 8192) if count <= link.rows}


def latencies(link: Link) -> tuple[dict[str, float], str]:
    """Microseconds, and what went wrong."""
    import triton

    from mok.bench import comm_kernels as kernels
    from mok.kernels.signals import barrier

    control, count, limit = link.memory.addresses["control"], 200, 20_000_000
    lanes = triton.next_power_of_2(link.size)

    def ping_pong(remote: bool) -> None:
        kernels.ping_pong_kernel[(1,)](
            link.memory.addresses["flag"], link.gave_up, link.rank, link.peer, link.flag, count, limit, REMOTE=remote, num_warps=1
        )
        link.flag += count

    def two_programs() -> None:
        kernels.ping_pong_within_kernel[(2,)](
            link.memory.addresses["flag"], link.gave_up, link.flag, count, limit, WORDS=FLAG_WORDS, num_warps=1
        )
        link.flag += count

    runs: dict[str, Callable[[], object]] = {
        "barrier, launched": lambda: barrier(control, link.rank, link.size, limit),
        "barrier, in a kernel": lambda: kernels.meet_kernel[(1,)](control, link.rank, limit, count, R=link.size, LANES=lanes, num_warps=1),
    }
    flags: dict[str, Callable[[], object]] = {}
    if link.size == 2:
        flags = {PUSHED: lambda: ping_pong(False), POLLED: lambda: ping_pong(True)}
    elif link.size == 1:
        flags = {WITHIN: two_programs}
    runs |= {**flags, **publishing(link)}
    link.meet()
    us = {name: 1e3 * value for name, value in link.time(runs, 20).items()}
    us["barrier, in a kernel"] /= count
    for name in flags:
        us[name] /= 2 * count
    problem = f"{int(link.gave_up)} waits for a flag were given up" if int(link.gave_up) else ""
    if failure := link.memory.failure():
        problem = f"a barrier was given up: {failure}"
    return us, problem


def latencies_on_cpu(link: HostLink) -> tuple[dict[str, float], str]:
    """The same of the host's fabric: agreeing on a call, which all ranks come to; that and one state of it; and flags in shared memory."""
    count = 50
    own, other = (link.call.region("flag", rank).numpy() for rank in (link.rank, link.peer))
    given_up = 0

    def ping_pong(remote: bool) -> None:
        nonlocal given_up
        raised, polled = (own, other) if remote else (other, own)
        for i in range(link.flag + 1, link.flag + count + 1):
            if link.rank == 0:
                raised[0] = i
            start = time.monotonic()
            while polled[0] < i and (waited := time.monotonic() - start) < PATIENCE_S:
                time.sleep(0 if waited < 1e-3 else 50e-6)  # ranks may be more than cores
            given_up += int(polled[0] < i)
            if link.rank == 1:
                raised[0] = i
        link.flag += count

    def signal() -> None:
        with link.begin() as call:
            call.signal("published")
            for peer in range(link.size):
                call.wait("published", peer, "comm")

    runs: dict[str, Callable[[], object]] = {"barrier": link.begin, "barrier and a signal": signal}
    if link.size == 2:
        runs |= {PUSHED: lambda: ping_pong(False), POLLED: lambda: ping_pong(True)}
    us = {name: 1e3 * value for name, value in link.time({**runs, **publishing(link)}, 6).items()}
    for name in (PUSHED, POLLED) if link.size == 2 else ():
        us[name] /= 2 * count
    return us, f"{given_up} waits for a flag were given up" if given_up else ""


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def measure(options: argparse.Namespace, device: torch.device) -> int:
    link = (Link if device.type == "cuda" else HostLink)(options.rows, options.hidden, device)
    programs = [int(count) for count in options.programs.split(",")] if device.type == "cuda" else [1]
    chosen = lambda variants: [v for v in variants if re.search(options.variants, v.name)]  # noqa: E731
    rows: list[dict[str, Any]] = []
    say(f"GB/s per direction by number of programs, {link.rows} rows of {2 * link.hidden} bytes per rank")
    for part in options.parts.split(","):
        say(f"-- {part}")
        if part == "latency":
            rows += measure_latency(link)
        elif part == "skew" and link.size == 1:
            say("one rank has all rows: none are skewed")
        elif part == "skew":
            both = [v for v in (*link.pulls(), *link.pushes()) if v.mixed]
            rows += measure_rows(link, chosen(both) if options.variants else [v for v in both if v.name in SKEW], SKEWED, programs)
        else:
            if part == "pull":
                rows += measure_copies(link)
            rows += measure_rows(link, chosen(link.pulls() if part == "pull" else link.pushes()), [ALL_REMOTE], programs)
        if link.rank == 0 and options.out:
            report.write(options.out, rows, options.commit)
    return 0


SKEW = ("layer w8 32x512", "ld w16 16x1024", "async w8 8x1024 s4", "st w8 16x1024", *(v.name for v in HOST_VARIANTS))
"""The first one is what the layer does, the last two what the executor does."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="mok.bench.comm", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    rows, hidden = (16384, 7168) if cuda else (1024, 1024)
    several = 2 if not cuda else min(torch.cuda.device_count(), 2)
    parser.add_argument(
        "--ranks", type=report.count, default=several, help="processes, one GPU each where there are GPUs; a launcher's wins"
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--variants", default="", help="a regular expression that names must contain")
    parser.add_argument("--programs", default=",".join(map(str, PROGRAMS)), help="on GPUs")
    parser.add_argument("--rows", type=int, default=rows, help="of a rank, a multiple of 128")
    parser.add_argument("--hidden", type=int, default=hidden, help="a multiple of 1024")
    parser.add_argument("--limit", type=report.seconds, default=570.0, help="seconds after which all processes are ended")
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    parser.add_argument("--out")
    options = parser.parse_args(arguments)
    for part in options.parts.split(","):
        if part not in PARTS:
            parser.error(f"--parts={part}: must be some of {','.join(PARTS)}")
    if options.hidden % 1024:
        parser.error(f"--hidden={options.hidden}: must be a multiple of 1024")
    if options.rows % 128:
        parser.error(f"--rows={options.rows}: must be a multiple of 128")
    if cuda and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks={options.ranks}: there are {torch.cuda.device_count()} GPUs")
    report.refuse_unwritable(parser, out=options.out)
    if not ranks.launched():
        return ranks.launch("mok.bench.comm", arguments, options.ranks, options.limit)
    rank, size, device = ranks.join(options.limit)
    if rank == 0:
        print(f"{size} ranks, {report.headline()}", flush=True)
    code = measure(options, device)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever a library still holds open must not keep a rank alive


if __name__ == "__main__":
    sys.exit(main())
