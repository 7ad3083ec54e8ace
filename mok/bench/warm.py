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

import torch

from mok.bench.baselines import TorchLayer
from mok.bench.layers import GpuLayer, make_batch, make_experts
from mok.bench.report import ROOT
from mok.bench.shapes import Shape
from mok.tune import automatic_run

MOST_PROCESSES = 16  # each keeps a few GB of the GPU


def warm(shapes: Collection[Shape], limit_s: float, ranks: int = 1) -> None:
    """Run and compile forward, backward and torch's layer once for each, of a GPU alone and of rank 0 of so many; on the CPU, and for fewer
    than three shapes, do nothing."""
    if not torch.cuda.is_available() or len(shapes) < 3:
        return
    kernels: dict[tuple[int, ...], list[Shape]] = {}  # what a shape compiles depends on T, H, I, K; E only in small kernels
    for shape in shapes:
        kernels.setdefault((shape.T, shape.H, shape.I, shape.K), []).append(shape)
    count = min(MOST_PROCESSES, max((os.cpu_count() or 1) - 1, 1), len(kernels))
    shares: list[list[Shape]] = [[] for _ in range(count)]
    for alike in sorted(kernels.values(), key=len, reverse=True):
        min(shares, key=len).extend(alike)
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mok.bench.warm"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = [subprocess.Popen([*command, json.dumps([ranks, share])], env=environment, **quiet) for share in shares]  # type: ignore[call-overload]
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


def compile_for(shape: Shape, device: torch.device, ranks: int = 1) -> None:
    """Launch everything once, with a few experts' weights standing for all of a rank. Small kernels that depend on E are launched for E."""
    from mok.kernels import launch
    from mok.kernels.combine import combine

    few = shape._replace(E=min(shape.E // ranks, 4))
    experts, batch = make_experts(few, device), make_batch(few, 0, 0, device)
    layer = GpuLayer(shape.T, few.E * ranks, shape.K, experts, None, 1.0, compile_for=ranks)
    layer.forward(batch)
    layer.backward(batch, layer.forward(batch, True)[1], dict(run=automatic_run(shape.T * shape.K, shape.E // ranks)))
    whole = GpuLayer(shape.T, shape.E, shape.K, experts, None, 1.0, compile_for=ranks)
    launch.schedule(whole.workspace, batch.ids_TK, shape.E)
    combine(whole.workspace.memory.own["combine"], batch.ids_TK, batch.weights_TK, shape.E, None, None)
    if ranks == 1:
        TorchLayer(*experts).step(*batch)
    torch.cuda.synchronize()


def main() -> None:
    ranks, shapes = json.loads(sys.argv[1])
    for sizes in shapes:
        for size in sorted({1, ranks}):
            compile_for(Shape(*sizes), torch.device("cuda"), size)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
