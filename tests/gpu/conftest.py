"""Workers that share a machine leave its cores to each other."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(2)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
