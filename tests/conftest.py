"""Every test starts from poisoned memory, a fixed seed and a running watchdog."""

from __future__ import annotations

import faulthandler
import glob
import os
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))  # helpers of the tests: ranks.py, interpret.py

GPUS = len(glob.glob("/dev/nvidia[0-9]*"))
if GPUS and (worker := os.environ.get("PYTEST_XDIST_WORKER")):  # workers share the GPUs, each with another one first, and the cores
    first = int(worker.removeprefix("gw")) % GPUS
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str((first + i) % GPUS) for i in range(GPUS)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(2)

WATCHDOG_S = float(os.environ.get("MOK_TEST_WATCHDOG_S", "300"))


def poison(mebibytes: int = 8) -> None:
    """Fill memory that is about to be reused with NaN and Inf: blocks of many sizes, as allocators keep them apart."""
    blocks = [torch.full((2**n,), float("nan") if n % 2 else float("inf")) for n in range(4, 18) for _ in range(4)]
    blocks.append(torch.full((mebibytes * 2**18,), float("nan")))
    del blocks


@pytest.fixture(autouse=True)
def _clean_start():
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    torch.manual_seed(0)
    poison()
    yield
    faulthandler.cancel_dump_traceback_later()


# ---- runs of mok train ----

MODULES = ("abc", "argparse", "ast", "bisect", "calendar", "cmd", "copy", "csv", "dis", "enum", "fractions", "glob", "heapq", "inspect")


@pytest.fixture
def restored():
    """In-process runs set signal handlers and the number of threads."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for module in MODULES:
        shutil.copy(Path(sysconfig.get_path("stdlib")) / f"{module}.py", folder)
    return str(folder)
