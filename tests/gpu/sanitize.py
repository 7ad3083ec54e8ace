"""Small forwards and backwards of one rank for a memory checker:

    python tests/gpu/sanitize.py bf16|fp8|hopper RESULTS
    compute-sanitizer --tool memcheck|racecheck python tests/gpu/sanitize.py bf16|fp8|hopper RESULTS

hopper: in bf16, by the kernels that Hopper has of its own. The first line compiles the kernels, compares with fp64 and saves what they
gave; the second must give the same bits. Without RESULTS nothing is saved. PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor an
allocation of its own, whose bounds are then watched.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.dirname(HERE), os.path.dirname(os.path.dirname(HERE))]

import torch
from checks import hopper_launches
from virtual import Problem
from virtual_backward import Fp8Group, Group, assert_near, expected, make_d_y

from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan
from mok.quantize import Recipe

PLANS = dict(plan=BackwardPlan(num_sms=6, ring_tiles=2), forward_plan=ForwardPlan(num_sms=6, minibatch_tiles=1, ring_tiles=2))
SAVED_ROWS = 128  # the others are recomputed


def run(problem: Problem, d_y: torch.Tensor, kernels: str) -> dict[str, torch.Tensor]:
    group, ahead = Fp8Group if kernels == "fp8" else Group, int(kernels == "hopper")
    with hopper_launches(ahead, ahead):
        return group(problem, d_y, 1, saved_rows=SAVED_ROWS, **PLANS).run()


def problems_for(kernels: str) -> list[Problem]:
    """Widths that no tile divides with a shared expert and clamps, then widths of whole tiles; each expert has more rows than the ring."""
    if kernels == "hopper":
        return [Problem(300, 384, 384, 2, 2, masked=0.2, shared_width=384, clamp=8.0, shared_clamp=6.0)]
    return [
        Problem(300, 272, 144, 2, 2, masked=0.2, shared_width=96, clamp=8.0, shared_clamp=6.0),
        Problem(300, 256, 128, 2, 2, masked=0.2),
    ]


def main(kernels: str, results: str | None) -> None:
    problems, precision = problems_for(kernels), "fp8" if kernels == "fp8" else "bf16"
    saved = results is not None and os.path.exists(results)
    known = torch.load(results) if saved else []
    for i, problem in enumerate(problems):
        d_y = make_d_y(problem)
        got = {name: value.cpu() for name, value in run(problem, d_y, kernels).items()}
        if saved:
            assert all(torch.equal(got[name], value) for name, value in known[i].items())
        else:
            want = {name: value.cpu() for name, value in expected(problem, d_y, Recipe(precision)).items()}
            if precision == "fp8":
                del got["out"]  # its definition has no recipe
            assert_near(got, want, 2e-2 if precision == "fp8" else 8e-3)
            known.append(got)
    if results is not None and not saved:
        torch.save(known, results)
    print("the same bits" if saved else "near fp64", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
