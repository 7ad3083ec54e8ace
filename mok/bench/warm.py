"""Compile what a suite will launch, in several processes at a time: a shape alone takes half a minute, nearly all of it on one core.

Compiled kernels go to Triton's and torch's caches on disk, where the suite finds them. Where a process fails, the suite compiles for
itself, or fails with a message of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Any

import torch

from mok.bench.baselines import TorchLayer
from mok.bench.layers import GpuLayer, make_batch, make_experts
from mok.bench.report import ROOT
from mok.bench.shapes import Shape
from mok.quantize import Precision
from mok.tune import automatic_run

MOST_PROCESSES = 16  # each keeps a few GB of the GPU
BF16: Precision = "bf16"
Job = tuple[Shape, int, Precision]
"""A layer of rank 0 of so many ranks, in a number format."""


def jobs_of(shapes: Collection[Shape], ranks: int, precision: Precision) -> list[Job]:
    """What is to be compiled: in bf16 and `precision`, a layer of one GPU, and, of several, a rank's and one GPU's with all tokens."""
    jobs: list[Job] = []
    for name in dict.fromkeys((BF16, precision)):
        for shape in shapes:
            jobs.append((shape, 1, name))
            if ranks > 1:
                jobs += [(shape, ranks, name), (shape._replace(T=shape.T * ranks), 1, name)]
    return jobs


def warm(shapes: Collection[Shape], limit_s: float, ranks: int = 1, precision: Precision = BF16) -> None:
    """Run and compile forward, backward and, in bf16, torch's layer once for every job; on the CPU, and for fewer than three shapes, do
    nothing."""
    if not torch.cuda.is_available() or len(shapes) < 3:
        return
    alike: dict[tuple[Any, ...], list[Job]] = {}  # what a job compiles depends on E only in small kernels
    for job in jobs_of(shapes, ranks, precision):
        shape, *rest = job
        alike.setdefault((shape.T, shape.H, shape.I, shape.K, *rest), []).append(job)
    count = min(MOST_PROCESSES, max((os.cpu_count() or 1) - 1, 1), len(alike))
    shares: list[list[Job]] = [[] for _ in range(count)]
    for jobs in sorted(alike.values(), key=len, reverse=True):
        min(shares, key=len).extend(jobs)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mok.bench.warm"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = [subprocess.Popen([*command, json.dumps(share)], env=environment, **quiet) for share in shares]  # type: ignore[call-overload]
    deadline = time.monotonic() + limit_s
    try:
        for child in children:
            child.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def compile_for(shape: Shape, device: torch.device, ranks: int = 1, precision: Precision = BF16) -> None:
    """Launch everything once, with a few experts' weights standing for all of a rank. Small kernels that depend on E are launched for E, in
    bf16 alone, as torch's layer."""
    from mok.kernels import launch
    from mok.kernels.combine import combine, live_slots
    from mok.kernels.launch_backward import BackwardPlan, runs_ahead

    few = shape._replace(E=min(shape.E // ranks, 4))
    experts, batch = make_experts(few, device), make_batch(few, 0, 0, device)
    layer = GpuLayer(shape.T, few.E * ranks, shape.K, experts, None, 1.0, precision=precision, compile_for=ranks)
    layer.forward(batch)
    ahead = precision == BF16 and runs_ahead(BackwardPlan(), device, (shape.H, shape.I), False)  # which makes no runs
    run = 0 if ahead else automatic_run(shape.T * shape.K, shape.E // ranks)
    layer.backward(batch, layer.forward(batch, True)[1], dict(run=run))
    if precision != "bf16":
        return torch.cuda.synchronize()
    whole = GpuLayer(shape.T, shape.E, shape.K, experts, None, 1.0, compile_for=ranks)
    launch.schedule(whole.workspace, batch.ids_TK, shape.E)
    own = whole.workspace.memory.own
    for weights in (batch.weights_TK, None):  # of the forward, of the backward
        combine(own["combine"], batch.ids_TK, weights, shape.E)
    live_slots(own["d_weights"], batch.ids_TK, shape.E)
    if ranks == 1:
        TorchLayer(*experts).step(*batch)
    torch.cuda.synchronize()


def main() -> None:
    for sizes, ranks, precision in json.loads(sys.argv[1]):
        compile_for(Shape(*sizes), torch.device("cuda"), ranks, precision)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
