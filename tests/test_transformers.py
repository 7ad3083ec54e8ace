"""Routers and whole MoE blocks of five models against the classes of `transformers`: tiny sizes, random weights, nothing downloaded.

Where the choice is limited to groups, this layer masks the experts of other groups with -inf, as DeepSeek's own code does. The installed
`transformers` does so too; its older releases filled in 0.0 instead, which lets experts of other groups in as soon as a biased score inside
the chosen groups is negative (a token then leaves its groups, and here it does not: `test_router.py` holds that against a loop). The biases
of this file keep every biased score positive, where the two agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Glm4MoeConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import mok
from mok.config import MoEConfig
from mok.router import Router

HIDDEN, WIDTH, EXPERTS = 64, 48, 16


@dataclass(frozen=True)
class Model:
    """A block of transformers, its configuration, and the same layer in ours."""

    block: type
    theirs: Any
    ours: MoEConfig

    def make_block(self) -> torch.nn.Module:
        torch.manual_seed(0)
        block = self.block(self.theirs)
        with torch.no_grad():
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                if name.endswith("e_score_correction_bias"):
                    tensor.uniform_(0.0, 0.3)
                else:
                    tensor.normal_(std=0.4 if name == "gate.weight" else tensor.shape[-1] ** -0.5)
        return block

    def copy_router(self, block: torch.nn.Module, router: Router) -> None:
        with torch.no_grad():
            router.weight.copy_(block.gate.weight)
            if router.bias is not None:
                router.bias.copy_(block.gate.e_score_correction_bias)


def sigmoid_pair(block, make, groups, top_groups, scale, shared, renormalize=True) -> Model:
    theirs = make(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS, num_experts_per_tok=4, n_shared_experts=shared,
        n_group=groups, topk_group=top_groups, routed_scaling_factor=scale, norm_topk_prob=renormalize, hidden_act="silu",
    )  # fmt: skip
    ours = MoEConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, top_k=4, num_shared_experts=shared, score="sigmoid",
        selection_bias=True, renormalize=renormalize, scaling_factor=scale, num_groups=groups, top_groups=top_groups,
    )  # fmt: skip
    return Model(block, theirs, ours)


def softmax_pair(block, make, renormalize, **fields) -> Model:
    theirs = make(hidden_size=HIDDEN, num_experts_per_tok=4, hidden_act="silu", **fields)
    ours = MoEConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, top_k=4, score="softmax", renormalize=renormalize)
    return Model(block, theirs, ours)


QWEN3 = dict(num_experts=EXPERTS, moe_intermediate_size=WIDTH)
MODELS = {
    "deepseek-v3": sigmoid_pair(DeepseekV3MoE, DeepseekV3Config, 4, 2, 2.5, shared=1),
    "deepseek-v3, one of two groups": sigmoid_pair(DeepseekV3MoE, DeepseekV3Config, 2, 1, 1.7, shared=2),
    "deepseek-v3, not renormalized": sigmoid_pair(DeepseekV3MoE, DeepseekV3Config, 8, 3, 2.5, shared=1, renormalize=False),
    "glm-4.5": sigmoid_pair(Glm4MoeMoE, Glm4MoeConfig, 1, 1, 2.5, shared=1),
    "glm-4.5, groups": sigmoid_pair(Glm4MoeMoE, Glm4MoeConfig, 4, 3, 1.0, shared=1),
    "qwen3-moe": softmax_pair(Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, True, norm_topk_prob=True, **QWEN3),
    "qwen3-moe, class default": softmax_pair(Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, False, **QWEN3),
    "mixtral": softmax_pair(MixtralSparseMoeBlock, MixtralConfig, True, num_local_experts=EXPERTS, intermediate_size=WIDTH),
    "olmoe": softmax_pair(OlmoeSparseMoeBlock, OlmoeConfig, False, num_experts=EXPERTS, intermediate_size=WIDTH),
}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def make_x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def by_expert(ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The weights as [T, E], NaN where an expert is not chosen."""
    return torch.full((ids_TK.shape[0], EXPERTS), torch.nan).scatter(1, ids_TK, weights_TK)


@each_model
def test_router(model):
    block, router = model.make_block(), Router(model.ours)
    model.copy_router(block, router)
    x = make_x(500, HIDDEN)
    with torch.no_grad():
        _, weights, ids = block.gate(x)
        ours = router(x)
    assert torch.equal(ours.ids_TK.sort(1).values, ids.sort(1).values)
    assert ours.ids_TK.flatten().bincount(minlength=EXPERTS).min() > 0  # the case is not a trivial one
    torch.testing.assert_close(by_expert(ours.ids_TK, ours.weights_TK), by_expert(ids, weights), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_group_limit_matters_in_these_cases():
    model = MODELS["deepseek-v3"]
    block, free = model.make_block(), Router(replace(model.ours, num_groups=1, top_groups=1))
    model.copy_router(block, free)
    x = make_x(500, HIDDEN)
    ids = block.gate(x)[2]
    moved = (free(x).ids_TK.sort(1).values != ids.sort(1).values).any(1)
    assert 100 < moved.sum() < 500


def test_the_bias_matters_in_these_cases():
    model = MODELS["glm-4.5"]
    block, router = model.make_block(), Router(model.ours)
    model.copy_router(block, router)
    x = make_x(500, HIDDEN)
    ids = router(x).ids_TK
    router.bias.zero_()
    assert (router(x).ids_TK.sort(1).values != ids.sort(1).values).any(1).sum() > 100


def assert_relative(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Every difference at most 1e-5 of the largest value."""
    assert actual.shape == expected.shape and expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@each_model
def test_block(model):
    block, moe = model.make_block(), mok.MoE(model.ours)
    model.copy_router(block, moe.router)
    with torch.no_grad():
        gate_EIH, up_EIH = block.experts.gate_up_proj.split(WIDTH, dim=1)
        moe.gate_EIH.copy_(gate_EIH)
        moe.up_EIH.copy_(up_EIH)
        moe.down_EHI.copy_(block.experts.down_proj)
        if moe.shared is not None:
            moe.shared.gate_SH.copy_(block.shared_experts.gate_proj.weight)
            moe.shared.up_SH.copy_(block.shared_experts.up_proj.weight)
            moe.shared.down_HS.copy_(block.shared_experts.down_proj.weight)
    assert hasattr(block, "shared_experts") == (moe.shared is not None)

    x, d_out = make_x(2, 75, HIDDEN).requires_grad_(), torch.randn(2, 75, HIDDEN)
    expected, actual = block(x), moe(x)
    assert_relative(actual, expected)

    expected.backward(d_out)
    d_x, x.grad = x.grad, None
    actual.backward(d_out)
    assert_relative(x.grad, d_x)
    assert_relative(moe.router.weight.grad, block.gate.weight.grad)
    d_gate_EIH, d_up_EIH = block.experts.gate_up_proj.grad.split(WIDTH, dim=1)
    assert_relative(moe.gate_EIH.grad, d_gate_EIH)
    assert_relative(moe.up_EIH.grad, d_up_EIH)
    assert_relative(moe.down_EHI.grad, block.experts.down_proj.grad)
    if moe.shared is not None:
        assert_relative(moe.shared.gate_SH.grad, block.shared_experts.gate_proj.weight.grad)
        assert_relative(moe.shared.up_SH.grad, block.shared_experts.up_proj.weight.grad)
        assert_relative(moe.shared.down_HS.grad, block.shared_experts.down_proj.weight.grad)
    assert torch.equal(moe.tokens_per_expert, block.gate(x)[2].flatten().bincount(minlength=EXPERTS))
