"""What the bf16 model is made of: each part against the plain form of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mok import model
from mok.model import LanguageModel
from mok.train import Options

SMALL = dict(hidden=64, layers=3, sequence=32, experts=8, top_k=2, dtype="bfloat16")


def small(**changes) -> LanguageModel:
    options = Options(**{**SMALL, **changes})
    result = LanguageModel(options.model(), dtype=torch.bfloat16, layer=options.moe)
    result.initialize(options.seed)
    return result


def test_ordered_attention_is_causal_attention():
    inputs = [torch.randn(2, 3, 40, 16).bfloat16().requires_grad_() for _ in range(3)]
    d_out = torch.randn(2, 3, 40, 16).bfloat16()
    out = model._OrderedAttention.apply(*inputs)
    got = (out, *torch.autograd.grad(out, inputs, d_out))
    plain = F.scaled_dot_product_attention(*inputs, is_causal=True)
    for mine, other in zip(got, (plain, *torch.autograd.grad(plain, inputs, d_out)), strict=True):
        assert torch.equal(mine, other)
    assert not torch.are_deterministic_algorithms_enabled(), "the switch is off again"


def test_the_switch_is_on_in_attentions_backward_alone(monkeypatch):
    seen = []
    inputs = [torch.randn(1, 1, 8, 8).bfloat16().requires_grad_() for _ in range(3)]

    def flash(*tensors):
        out = F.scaled_dot_product_attention(*tensors, is_causal=True)
        if out.requires_grad:
            out.register_hook(lambda _: seen.append(torch.are_deterministic_algorithms_enabled()))
        return out

    monkeypatch.setattr(model, "_flash", flash)
    model._OrderedAttention.apply(*inputs).sum().backward()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_logits_and_their_gradients():
    x, weight = (torch.randn(n, 24).bfloat16().requires_grad_() for n in (50, 6))
    d_logits = torch.randn(50, 6).bfloat16().float()
    logits = model._Logits.apply(x, weight)
    logits.backward(d_logits)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.double().mm(weight.double().T).float(), rtol=1e-5, atol=1e-5)
    for got, want in ((x.grad, d_logits.double() @ weight.double()), (weight.grad, d_logits.double().T @ x.double())):
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-7)


def test_embedding_by_a_product_is_a_lookup():
    trunk = small().trunk
    tokens = torch.randint(256, (3, 20))
    embedded = trunk.embed(tokens)
    assert torch.equal(embedded, trunk.embedding.weight[tokens])
    d = torch.randint(-4, 5, embedded.shape).bfloat16()  # sums of few small integers are exact in bf16
    embedded.backward(d)
    want = torch.zeros(256, 64).index_add_(0, tokens.flatten(), d.flatten(0, 1).float())
    assert torch.equal(trunk.embedding.weight.grad.float(), want)


def test_one_call_routes_all_slices_as_each_alone():
    language_model = small()
    xs = [torch.randn(40, 64).bfloat16() for _ in range(3)]
    block = language_model.trunk.blocks[1]
    block.router.bias.normal_()
    together = model._route([block] * 3, xs)
    assert len(together) == 3
    for x, routing in zip(xs, together, strict=True):
        (alone,) = model._route([block], [x])
        assert all(torch.equal(mine, other) for mine, other in zip(routing, alone, strict=True))
        assert torch.equal(routing.ids_TK, block.router(x).ids_TK)


@pytest.mark.parametrize("dense", [0, 1, 2])
def test_dense_blocks_come_first(dense):
    language_model = small(dense=dense)
    assert [hasattr(block, "ffn") for block in language_model.trunk.blocks] == [index < dense for index in range(3)]
    assert len(language_model.moes) == 3 - dense
    assert sorted({name.split(".")[1] for name in language_model.experts()}) == [str(index) for index in range(dense, 3)]
    logits, routings = language_model([torch.randint(256, (2, 32))])
    assert logits[0].shape == (2, 32, 256)
    assert len(routings) == 3 - dense


def test_heads_need_not_fill_the_hidden_size():
    language_model = small(heads=3, head_width=16)
    assert language_model.trunk.blocks[0].attention.qkv.weight.shape == (3 * 48, 64)
    assert language_model([torch.randint(256, (2, 32))])[0][0].isfinite().all()


def test_both_layers_start_from_the_same_values():
    ours, theirs = small(), small(moe="torch")
    for mine, other in zip(ours.moe_blocks(), theirs.moe_blocks(), strict=True):
        for name in model.EXPERT_MATRICES:
            assert torch.equal(getattr(mine, name), getattr(other, name))
    for mine, other in zip(ours.trunk.parameters(), theirs.trunk.parameters(), strict=True):
        assert torch.equal(mine, other)
    tokens = torch.randint(256, (2, 32))
    error = (ours([tokens])[0][0] - theirs([tokens])[0][0]).float().norm() / ours([tokens])[0][0].float().norm()
    assert error < 2**-6
