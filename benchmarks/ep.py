"""Whole layers over several GPUs: python benchmarks/ep.py --ranks 2 [--help]. See mok/bench/ep.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mok.bench.ep import main

if __name__ == "__main__":
    sys.exit(main())
