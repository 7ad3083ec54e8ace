"""The definition against arithmetic written out token by token, and its roundings against single products."""

from __future__ import annotations

import math

import pytest
import torch
from layers import Batch

from mok import reference


def silu(v: float) -> float:
    return v / (1 + math.exp(-v))


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_against_scalar_loops(clamp):
    batch = Batch.random(tokens=5, hidden=4, width=3, experts=3, dtype=torch.float64, clamp=clamp)
    shared = torch.randn(5, 4, dtype=torch.float64)
    out = reference.moe(batch.x, batch.ids, batch.weights, batch.gate, batch.up, batch.down, shared=shared, clamp=clamp)
    for t in range(5):
        total = shared[t].tolist()
        for k, e in enumerate(batch.ids[t].tolist()):
            if e < 0:
                continue
            hidden = []
            for i in range(3):
                gate = sum(float(batch.gate[e, i, h] * batch.x[t, h]) for h in range(4))
                up = sum(float(batch.up[e, i, h] * batch.x[t, h]) for h in range(4))
                if clamp is not None:
                    gate, up = min(gate, clamp), max(-clamp, min(up, clamp))
                hidden.append(silu(gate) * up)
            for h in range(4):
                total[h] += float(batch.weights[t, k]) * sum(float(batch.down[e, h, i]) * hidden[i] for i in range(3))
        assert out[t].tolist() == pytest.approx(total, rel=1e-12, abs=1e-12)


def test_bf16_rounds_where_the_definition_says():
    batch = Batch.random(tokens=1, hidden=16, width=16, experts=1, top_k=1, dtype=torch.bfloat16, masked=False)
    x, gate, up, down = (t.float() for t in (batch.x, batch.gate[0], batch.up[0], batch.down[0]))
    g, u = ((x @ w.T).bfloat16().float() for w in (gate, up))
    y = ((g * torch.sigmoid(g) * u).bfloat16().float() @ down.T).bfloat16().float()
    out = reference.moe(batch.x, torch.tensor([[0]]), batch.weights, batch.gate, batch.up, batch.down)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (y * batch.weights).bfloat16())


def test_a_masked_weight_is_never_used():
    batch = Batch.random(dtype=torch.float64)
    batch.weights[batch.ids < 0] = torch.nan
    weights = batch.weights.clone().requires_grad_()
    out = reference.moe(batch.x, batch.ids, weights, batch.gate, batch.up, batch.down)
    out.sum().backward()
    assert out.isfinite().all() and (out[1] == 0).all()
    assert (weights.grad[batch.ids < 0] == 0).all() and weights.grad.isfinite().all()
