"""Compile some kernels without a GPU with another Triton, whose folder stands first in PYTHONPATH; the last line printed is JSON:
{"triton": its version, "case arch": facts}."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import compile_backward
import compile_kernels
import triton

JOBS = (
    ("forward", 90), ("forward", 100), ("forward", 103), ("forward hopper", 90),
    ("backward everything", 90), ("backward everything", 100), ("backward hopper", 90), ("backward hopper everything", 90),
)  # fmt: skip


def one(case: str, arch: int) -> tuple[str, dict[str, object]]:
    if case.startswith("backward "):
        return f"{case} {arch}", compile_backward.one(case.removeprefix("backward "), arch)[1][0]
    if case == "forward hopper":
        return f"{case} {arch}", compile_kernels.forward_hopper(shared=2048, ranks=2, save=True)[0]
    return f"{case} {arch}", compile_kernels.forward(arch, ranks=2, save=True)[0]


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        facts = dict(pool.map(one, *zip(*JOBS, strict=True)))
    print(json.dumps({"triton": triton.__version__, **facts}))


if __name__ == "__main__":
    main()
