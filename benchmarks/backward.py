"""The backward of whole layers on one device: python benchmarks/backward.py [--shapes fine,qwen3-30b] [--plans JSON] [--parts] [--help].

See mok/bench/layer.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mok.bench.layer import backward_main
from mok.bench.shapes import ONE_GPU as SHAPES

if __name__ == "__main__":
    sys.exit(backward_main(SHAPES))
