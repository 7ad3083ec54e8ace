"""The forward of whole layers on one device: python benchmarks/layer.py --forward [--precision mxfp8] [--shapes fine] [--out FILE].

See mok/bench/layer.py; `mok bench layer` measures the backward and memory, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mok.bench.layer import forward_main
from mok.bench.shapes import ONE_GPU as SHAPES

if __name__ == "__main__":
    sys.exit(forward_main(SHAPES))
