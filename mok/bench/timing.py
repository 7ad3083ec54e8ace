"""Milliseconds of contestants that take turns, so that the card's temperature and its neighbours are shared.

A card at its power limit takes tens of milliseconds to find the clock for a load, and runs the first calls after a hungrier contestant up
to an eighth slower. So every turn begins with SETTLE_MS of calls that are not timed. Its clock also drifts as it warms up: every second
round goes through the contestants from the last to the first, so that none has the better place in all of them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

SETTLE_MS = 60.0
MOST_SETTLING = 200  # calls


def _device_times(run: Callable[[], object], count: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def _host_times(run: Callable[[], object], count: int) -> list[float]:
    times = [time.perf_counter()]
    for _ in range(count):
        run()
        times.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


def _settling(contestants: dict[str, Callable[[], object]], least: int, together: bool) -> dict[str, int]:
    """How many calls of each take SETTLE_MS, but `least` to MOST_SETTLING; together: as many on every rank."""
    if not torch.cuda.is_available():
        return dict.fromkeys(contestants, least)
    ms = [statistics.median(_device_times(run, 3)) for run in contestants.values()]
    calls = torch.tensor([min(max(math.ceil(SETTLE_MS / max(each, 1e-3)), least), MOST_SETTLING) for each in ms], device="cuda")
    if together and dist.is_initialized():
        dist.all_reduce(calls, dist.ReduceOp.MAX)
    return dict(zip(contestants, calls.tolist(), strict=True))


def medians(
    contestants: dict[str, Callable[[], object]],
    repeats: int = 60,
    warmup: int = 8,
    round_of: int = 10,
    align: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Milliseconds of each, taken in turns of `round_of`, at most `repeats`: between CUDA events where there is a GPU, else by the host's
    clock. A turn begins with untimed calls (module text).

    align: called before every turn; ranks meet there.
    """
    round_of = max(min(round_of, repeats), 1)
    cuda = torch.cuda.is_available()
    settle = torch.cuda.synchronize if cuda else lambda: None
    for run in contestants.values():
        for _ in range(warmup):
            run()
    settle()
    settling = _settling(contestants, round_of // 2, align is not None)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    turns = list(contestants.items())
    for at in range(-(-repeats // round_of)):
        for name, run in turns if at % 2 == 0 else reversed(turns):
            if align:
                align()
                settle()
            for _ in range(settling[name]):
                run()
            times[name] += (_device_times if cuda else _host_times)(run, round_of)
    return {name: statistics.median(values) for name, values in times.items()}
