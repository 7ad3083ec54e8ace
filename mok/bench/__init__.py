"""What the layer reaches, and beside what: suites that check before they time and write one object of rows each.

    suites.py     `mok bench`: what every suite is                plot.py    its pictures
    layer.py      whole layers on one device                      overlap.py the forward with a step left out
    ep.py         whole layers over several GPUs                  comm.py    rows and signals between two GPUs
    layers.py     the layer as the suites call it                 shapes.py  the shapes
    baselines.py  the same layer by torch and NCCL                rivals.py  other libraries, where installed
    checks.py     nearness to the definition                      timing.py  contestants take turns
    report.py     the written object: machine, sources, rows      ranks.py   one process per GPU, under a watchdog
    warm.py       compiling in several processes           limit.py   an end for a suite of one process
"""

import os

try:
    from triton import knobs
except ImportError:  # the CPU's layer needs none
    pass
else:
    # torch.compile otherwise gives every process a cache of its own GPU's at its first kernel, and what others compiled is compiled anew.
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
