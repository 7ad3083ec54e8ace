"""The torch layer that `mok train` compares with: the same function as `mok.MoE`, to the rounding of bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mok
from mok import MoEConfig
from mok.torch_layer import TorchMoE

CONFIG = MoEConfig(
    hidden_size=64, intermediate_size=48, num_experts=6, top_k=3, num_shared_experts=1, score="sigmoid", selection_bias=True
)  # fmt: skip


def pair() -> tuple[mok.MoE, TorchMoE]:
    ours, theirs = mok.MoE(CONFIG, dtype=torch.bfloat16), TorchMoE(CONFIG, dtype=torch.bfloat16)
    theirs.router, theirs.shared = ours.router, ours.shared
    with torch.no_grad():
        for name in ("gate_EIH", "up_EIH", "down_EHI"):
            getattr(theirs, name).copy_(getattr(ours, name))
    return ours, theirs


def gradients(layer: mok.MoE | TorchMoE, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor, d_out: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    x, weights, shared = (tensor.clone().requires_grad_() for tensor in (x, weights, shared))
    out = layer.routed(x, ids, weights, shared=shared)
    out.backward(d_out)
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad, "shared": shared.grad, "down": layer.down_EHI.grad}
    if isinstance(layer, TorchMoE):
        found |= dict(zip(("gate", "up"), layer.both_E2IH.grad.chunk(2, dim=1), strict=True))
    else:
        found |= {"gate": layer.gate_EIH.grad, "up": layer.up_EIH.grad}
    return found


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_it_computes_what_the_layer_computes(tokens):
    ours, theirs = pair()
    x, shared, d_out = (torch.randn(tokens, CONFIG.hidden_size).bfloat16() for _ in range(3))
    ids = torch.rand(tokens, CONFIG.num_experts - 1).argsort(1)[:, : CONFIG.top_k]  # the last expert gets no token
    weights = torch.randn(tokens, CONFIG.top_k).bfloat16().float()  # which it rounds to bf16
    want, got = (gradients(layer, x, ids, weights, shared, d_out) for layer in (ours, theirs))
    for name, value in want.items():
        error = (got[name].float() - value.float()).norm() / value.float().norm()
        assert error < 2**-6, (name, float(error))
        assert got[name].isfinite().all(), name
    assert torch.equal(theirs.tokens_per_expert, ours.tokens_per_expert)
    assert theirs.tokens_per_expert.sum() == tokens * CONFIG.top_k
    again = gradients(theirs, x, ids, weights, shared, d_out)
    assert all(torch.equal(again[name], got[name]) for name in got)


def test_bias_follows_the_loads():
    ours, theirs = pair()
    theirs.router = mok.router.Router(CONFIG)
    for layer in (ours, theirs):
        layer.tokens_per_expert.copy_(torch.tensor([9, 1, 5, 5, 5, 5]))
        layer.update_bias(0.5)
    assert torch.equal(theirs.router.bias, ours.router.bias)
    assert theirs.router.bias[:3].tolist() == [-0.5, 0.5, 0.0]


def test_a_clamp_is_refused():
    with pytest.raises(ValueError, match=r"clamp=2\.0: must be None"):
        TorchMoE(MoEConfig(hidden_size=64, intermediate_size=48, num_experts=6, top_k=3, clamp=2.0))
