"""One process per rank, and an end for all of them: a process that fails or a limit that passes ends every one."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mok.bench.report import ROOT

# The layer does not use NVLink multicast, and neither does what it is compared with.
WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def launched() -> bool:
    """Whether a launcher (torchrun, or `launch`) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(module: str, arguments: Sequence[str], ranks: int, limit_s: float) -> int:
    """`python -m module arguments` as ranks 0 .. ranks-1 of this machine. The first exit code that is not 0; 124 past the limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, **WITHOUT_MULTICAST, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment.setdefault("OMP_NUM_THREADS", "1")
    children: list[subprocess.Popen[bytes]] = []
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    deadline, code = time.monotonic() + limit_s, 0
    try:
        for rank in range(ranks):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(subprocess.Popen([sys.executable, "-m", module, *arguments], env=own))
        while True:
            codes = [child.poll() for child in children]
            code = next((c for c in codes if c), 0)
            if code or all(c == 0 for c in codes):
                return code
            if time.monotonic() > deadline:
                print(f"--limit={limit_s:g}: not done after so many seconds; ended", file=sys.stderr, flush=True)
                return 124
            time.sleep(0.05)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        for child in children:
            child.wait()
        signal.signal(signal.SIGTERM, previous)


def run_to_end(command: Sequence[str], stdout: int | None = None) -> int:
    """The exit code of a command that launches ranks; it ends with them where this process is ended."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    child = subprocess.Popen(command, stdout=stdout)
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()  # killed, it would leave its ranks
            child.wait()
        signal.signal(signal.SIGTERM, previous)


def join(limit_s: float) -> tuple[int, int, torch.device]:
    """Rank, ranks and device of this process, in the default process group; past the limit it prints where it stands and ends."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    os.environ.update(WITHOUT_MULTICAST)
    timeout = timedelta(seconds=limit_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    return dist.get_rank(), dist.get_world_size(), device


def slowest(ms: dict[str, float], device: torch.device) -> dict[str, float]:
    """Of each entry the largest over the ranks."""
    values = torch.tensor(list(ms.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(ms, values.tolist(), strict=True))


def first_problem(problem: str) -> str:
    """What went wrong on the first rank on which something did, or ""; the same answer on all ranks."""
    problems: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
