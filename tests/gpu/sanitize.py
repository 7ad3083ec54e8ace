"""A small forward for a memory checker: compute-sanitizer --tool memcheck|racecheck python tests/gpu/sanitize.py"""

# ruff: noqa: E402
from __future__ import annotations

import os
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.getcwd()]

import torch
from virtual import Group, Problem, assert_close

from mok.kernels.launch import ForwardPlan

problem = Problem(150, 256, 136, 4, 2, masked=0.2, shared_width=96)
group = Group(problem, 1, ForwardPlan(num_sms=6, minibatch_tiles=1, ring_tiles=2))
print("relative error", assert_close(group.run(), problem.expected()))
torch.cuda.synchronize()
