"""Compile kernels without a GPU with another Triton, whose folder stands first in PYTHONPATH; the last line printed is JSON:
{"triton": its version, "case arch": [facts of each kernel]}.

Run alone: python tests/compile_newest.py ["case arch" ...]; a backward's cases are those of compile_backward.py, after "backward ".
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import compile_backward
import compile_kernels
import triton


def one(job: str) -> list[dict[str, object]]:
    if job.startswith("backward "):
        case, _, arch = job.removeprefix("backward ").rpartition(" ")
        return compile_backward.one(case, int(arch))[1]
    return compile_kernels.one(job)


def main() -> None:
    with ProcessPoolExecutor(2) as pool:
        facts = dict(zip(sys.argv[1:], pool.map(one, sys.argv[1:]), strict=True))
    print(json.dumps({"triton": triton.__version__, **facts}))


if __name__ == "__main__":
    main()
