"""One contestant at a time, long enough for the card to find its clock: python benchmarks/power.py [--direction bwd] [--shapes fine].

Prints milliseconds of a whole layer, watts and megahertz (medians of NVML's samples; needs nvidia-ml-py), for the default plan, changed
plans (--plans, JSON: name -> changed fields), torch and, in the forward, the same products by cuBLAS. Every contestant runs --rounds times,
in random order. Of a card at its power limit, less energy per call is what makes a call faster; watts times milliseconds is that energy.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from mok.bench import report
from mok.bench.baselines import TorchLayer, dense_products
from mok.bench.layer import OneDevice
from mok.bench.layers import Changes
from mok.bench.shapes import ONE_GPU, choose

SAMPLE_S = 0.02


def calls_in(run: Callable[[], object], seconds: float) -> int:
    """How many calls take so long."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    return max(5, int(5 * seconds / (time.perf_counter() - begin)))


def sustained(run: Callable[[], object], seconds: float) -> tuple[float, float, float]:
    """Milliseconds, watts and megahertz, after a third of that time of calls that do not count."""
    count = calls_in(run, seconds)
    for _ in range(count // 3):
        run()
    samples: list[tuple[float, float]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            samples.append((torch.cuda.power_draw() / 1e3, torch.cuda.clock_rate()))

    thread = threading.Thread(target=sample)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    thread.start()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    done.set()
    thread.join()
    watts, clocks = zip(*(samples or [(float("nan"), float("nan"))]), strict=True)
    return begin.elapsed_time(end) / count, statistics.median(watts), statistics.median(clocks)


def contestants(shape: str, direction: str, plans: dict[str, Changes]) -> dict[str, Callable[[], object]]:
    torch.set_grad_enabled(direction == "bwd")
    problem = OneDevice(choose(shape, ONE_GPU)[shape], torch.device("cuda"))
    rival, columns = TorchLayer(*problem.experts), [list(column) for column in zip(*problem.inputs, strict=True)]
    runs: dict[str, Callable[[], object]] = {}
    if direction == "fwd":
        problem.check_forward(plans)
        for label, plan in plans.items():
            runs[label] = problem.turns.of(problem.layer.forward, problem.inputs, changes=plan)
        runs["torch"] = problem.turns.of(rival, *columns[:3])
        runs["cuBLAS"] = dense_products(problem.shape.T * problem.shape.K, problem.shape.H, problem.shape.I, problem.device)
    else:
        problem.check_backward(plans, rival)
        kept = [problem.layer.forward(batch, True)[1] for batch in problem.inputs]
        for label, plan in plans.items():
            runs[label] = problem.turns.of(problem.layer.backward, problem.inputs, kept, changes=plan)
        runs["torch step"] = problem.turns.of(rival.step, *columns)
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="kimi-k2-ep8,mixtral-8x7b,kimi-k2-slice", help=f"some of {','.join(ONE_GPU)}")
    parser.add_argument("--direction", choices=("fwd", "bwd"), default="fwd")
    plans = {"ordinary": {"prefetch": False}}
    parser.add_argument("--plans", type=json.loads, default=plans, help="JSON: name -> changed fields of the plan")
    parser.add_argument("--seconds", type=report.seconds, default=1.2, help="of a contestant's round")
    parser.add_argument("--rounds", type=report.count, default=2)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    print(report.headline(), flush=True)
    order = random.Random(0)
    for shape in options.shapes.split(","):
        torch.cuda.empty_cache()
        runs = contestants(shape, options.direction, {"": {}, **options.plans})
        found: dict[str, list[tuple[float, float, float]]] = {label: [] for label in runs}
        for _ in range(options.rounds):
            for label in order.sample(list(runs), len(runs)):
                found[label].append(sustained(runs[label], options.seconds))
        for label, values in found.items():
            text = "   ".join(f"{ms:7.3f} ms {watts:4.0f} W {mhz:5.0f} MHz" for ms, watts, mhz in values)
            print(f"{shape:16} {options.direction} {label or 'default':12} {text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
