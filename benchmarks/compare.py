"""Versions of the sources against each other, in one run: python benchmarks/compare.py --roots old=../before,new=. [--direction bwd]

A root is a folder with a `mok` package. Each runs in a process of its own on the same GPU and they take turns, in random order, so that the
card's temperature and the place after a hotter contestant are shared. Every version's result is checked before it is timed. --plans times
changed plans of every root, too: '{"fine": {"parts": 8}}'. Torch and, in the forward, cuBLAS take turns with them.

Prints milliseconds, the median of each one's turns, of which each is the median of its calls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve()


def work(root: str) -> None:
    """A root's process: a line of JSON in, a line out. {"shape", "direction", "plans", "rivals"} prepares, {"run", "count"} times."""
    sys.path.insert(0, root)
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch

    from mok.bench.baselines import TorchLayer, dense_products
    from mok.bench.layer import OneDevice
    from mok.bench.layers import default_device
    from mok.bench.shapes import ONE_GPU, TINY, choose
    from mok.bench.timing import medians

    runs: dict[str, Any] = {}
    device = default_device()

    def prepare(shape: str, direction: str, plans: dict[str, dict[str, Any]], rivals: bool) -> dict[str, Any]:
        runs.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.set_grad_enabled(direction == "bwd")
        problem = OneDevice(choose(shape, {**ONE_GPU, **TINY})[shape], device)
        baseline, layer, errors = TorchLayer(*problem.experts), problem.layer, {}
        columns = [list(column) for column in zip(*problem.inputs, strict=True)]
        kept = [layer.forward(batch, True)[1] for batch in problem.inputs] if direction == "bwd" else []
        for label, plan in plans.items():
            try:
                if direction == "fwd":
                    problem.check_forward({label: plan})
                    runs[label] = problem.turns.of(layer.forward, problem.inputs, changes=plan)
                else:
                    problem.check_backward({label: plan}, baseline)
                    runs[label] = problem.turns.of(layer.backward, problem.inputs, kept, changes=plan)
            except Exception as error:  # one that does not compile, or is wrong
                errors[label] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if rivals:
            runs["torch"] = problem.turns.of(baseline, *columns[:3])
            if direction == "bwd":
                runs["torch step"] = problem.turns.of(baseline.step, *columns)
            else:
                runs["cublas"] = dense_products(problem.shape.T * problem.shape.K, problem.shape.H, problem.shape.I, problem.device)
        for run in runs.values():
            for _ in range(3):
                run()
        return dict(labels=list(runs), errors=errors)

    def timed(run: str, count: int) -> float:
        return medians({run: runs[run]}, count, warmup=0, round_of=count)[run]

    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(timed(**asked) if "run" in asked else prepare(**asked)), file=answers, flush=True)


class Root:
    def __init__(self, folder: str) -> None:
        command = [sys.executable, str(SCRIPT), "--work", str(Path(folder).resolve())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **asked: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a root's process ended with exit code {self.process.wait()}")
        return json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--roots", default="here=.", help="NAME=FOLDER,...")
    parser.add_argument("--shapes", default="mixtral-8x7b,kimi-k2-ep8,qwen3-30b,kimi-k2-slice,fine,v4-flash-slice")
    parser.add_argument("--direction", choices=("fwd", "bwd"), default="fwd")
    parser.add_argument("--plans", type=json.loads, default={}, help="JSON: name -> changed fields of the plan")
    parser.add_argument("--turns", type=int, default=8, help="of each contestant")
    parser.add_argument("--calls", type=int, default=10, help="of a turn")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no further shape begins")
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    begin, order = time.monotonic(), random.Random(0)
    roots = {name: Root(folder) for name, folder in (pair.split("=", 1) for pair in options.roots.split(","))}
    for shape in options.shapes.split(","):
        if time.monotonic() - begin > options.limit:
            print(f"{shape}: left out, the limit of {options.limit:g} s is over", flush=True)
            continue
        for index, root in enumerate(roots.values()):
            root.send(shape=shape, direction=options.direction, plans={"": {}, **options.plans}, rivals=index == 0)
        runs: list[tuple[str, str]] = []
        for name, root in roots.items():
            prepared = root.answer()
            runs += [(name, label) for label in prepared["labels"]]
            for label, error in prepared["errors"].items():
                print(f"{shape}: {name} {label}: {error}", flush=True)
        times: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
        for _ in range(options.turns):
            order.shuffle(runs)
            for name, label in runs:
                roots[name].send(run=label, count=options.calls)
                times[name, label].append(roots[name].answer())
        medians = {f"{name} {label}".strip(): statistics.median(values) for (name, label), values in sorted(times.items())}
        print(f"{shape:16} {options.direction} " + "  ".join(f"{label} {ms:.3f}" for label, ms in medians.items()), flush=True)
    for root in roots.values():
        assert root.process.stdin
        root.process.stdin.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
