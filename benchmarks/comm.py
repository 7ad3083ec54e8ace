"""Rows and signals between GPUs: python benchmarks/comm.py --ranks 2 [--help]. See mok/bench/comm.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mok.bench.comm import main

if __name__ == "__main__":
    sys.exit(main())
