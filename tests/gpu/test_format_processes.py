"""Routed experts in blockwise FP8 and MXFP8 between processes, over torch's symmetric memory: the three promises about bits."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import torch.distributed as dist
from layers import Batch
from processes import run_processes

import mok
from mok import Tuning

CUTS = [0, 97, 300]  # tokens of two ranks
KNOBS = Tuning(minibatch=128, macrobatch=256, saved_rows=128, timeout_s=60)
"""With which a rank goes round its ring, cuts experts, and keeps some rows and computes others again."""


def batch() -> Batch:
    return Batch.random(tokens=CUTS[-1], hidden=256, width=128, experts=8, dtype=torch.bfloat16)


def steps(group: dist.ProcessGroup | None, precision: str, repeats: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Forward and backward of this rank's part of the batch by `mok.moe`, with random delays; each repeat has the bits of the first."""
    rank, part = (0, batch()) if group is None else (dist.get_rank(group), batch().local(dist.get_rank(group), 2, CUTS))
    options = dict(num_experts=batch().experts, group=group, precision=precision, tuning=Tuning() if group is None else KNOBS)
    chance, found = random.Random(rank), []
    tensors = [t.to(device) for t in (part.x, part.weights, part.gate, part.up, part.down)]
    ids, d_out = part.ids.to(device), part.d_out.to(device)
    for _ in range(repeats):
        x, weights, *experts = leaves = [t.clone().requires_grad_() for t in tensors]
        if group is not None:
            torch.cuda._sleep(chance.randrange(1, 4_000_000))
        out = mok.moe(x, ids, weights, *experts, **options)
        if group is not None:
            torch.cuda._sleep(chance.randrange(1, 4_000_000))
        out.backward(d_out)
        found.append([t.detach().cpu() for t in (out, *(leaf.grad for leaf in leaves))])
    for repeat, again in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(again, found[0], strict=True)), (rank, repeat)
    return dict(zip(("out", "d_x", "d_weights", "d_gate", "d_up", "d_down"), found[0], strict=True))


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_two_processes_have_the_bits_of_one_rank(precision):
    """Of one whose rings hold everything and which keeps all rows; and near the CPU's, from which bf16 is further away."""
    alone, parts = steps(None, precision, 1), run_processes(steps, 2, precision, 10)
    near, far = (steps(None, p, 1, "cpu") for p in (precision, "bf16"))
    for name, want in alone.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), want), name
        distance = [float((want.double() - other[name].double()).norm() / want.double().norm()) for other in (near, far)]
        assert distance[0] < 4e-2 < distance[1], (name, distance)
