"""The layer on the CPU against the reference: every routing and activation variant, dtype and preset, forward and all gradients."""

from __future__ import annotations

import pytest
import torch
from layers import TOLERANCE, Batch, assert_close, assert_equal, expected, step
from torch import nn

import mok
from mok import MoEConfig, Tuning, reference
from mok.config import PRESETS
from mok.executor import exact, product_in_steps, row_linear, row_product, row_swiglu, swiglu, swiglu_backward

VARIANTS = {
    "softmax": dict(score="softmax"),
    "softmax, not renormalized": dict(score="softmax", renormalize=False),
    "sigmoid, bias, scale": dict(score="sigmoid", selection_bias=True, scaling_factor=2.5),
    "sigmoid, bias, groups": dict(score="sigmoid", selection_bias=True, num_groups=4, top_groups=2),
    "sqrt softplus, bias, clamp": dict(score="sqrt_softplus", selection_bias=True, scaling_factor=1.5, clamp=0.7),
    "softmax, groups, not renormalized": dict(score="softmax", renormalize=False, num_groups=2, top_groups=1),
    "one shared": dict(num_shared_experts=1),
    "one wider shared": dict(num_shared_experts=1, shared_intermediate_size=56),
    "two shared": dict(num_shared_experts=2, shared_intermediate_size=24),
    "gated shared": dict(num_shared_experts=1, shared_gate=True),
    "gated shared, both clamps": dict(num_shared_experts=2, shared_gate=True, clamp=0.6, shared_clamp=0.4),
    "shared clamp alone": dict(num_shared_experts=1, shared_clamp=0.5),
    "one choice": dict(top_k=1, renormalize=False),  # renormalized, its weight would be 1 and the router without gradient
    "all experts chosen": dict(top_k=8),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def spread_router(layer: nn.Module) -> None:
    """A router whose scores are far apart and a bias that changes choices, so that rounding does not decide who is chosen."""
    with torch.no_grad():
        layer.router.weight.normal_()
        if layer.router.bias is not None:
            layer.router.bias.copy_(torch.linspace(-0.3, 0.3, len(layer.router.bias)))


def compare(config: MoEConfig, dtype: torch.dtype, tokens: int = 150) -> None:
    layer = mok.MoE(config, dtype=dtype, tuning=Tuning(minibatch=128, macrobatch=256, saved_rows=200))
    spread_router(layer)
    x = torch.randn(3, tokens // 3, config.hidden_size).to(dtype).requires_grad_()
    d_out = torch.randn(x.shape).to(dtype)
    out = layer(x)
    assert out.shape == x.shape and out.dtype == dtype
    out.backward(d_out)

    want_x = x.detach().flatten(0, 1).requires_grad_()
    state = {name: tensor.detach().clone().requires_grad_(name != "router.bias") for name, tensor in layer.state_dict().items()}
    want = reference.layer(want_x, config, state)
    want.backward(d_out.flatten(0, 1))
    got = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert_close(
        {"out": out.detach().flatten(0, 1), "d_x": x.grad.flatten(0, 1), **got},
        {"out": want.detach(), "d_x": want_x.grad, **{name: state[name].grad for name in got}},
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant, dtype):
    compare(MoEConfig(**{**dict(hidden_size=64, intermediate_size=40, num_experts=8, top_k=2), **VARIANTS[variant]}), dtype)


DISTINCT = {str(sorted(fields.items())): name for name, fields in PRESETS.items()}.values()


@pytest.mark.parametrize("name", sorted(DISTINCT))
def test_every_preset_at_reduced_size(name):
    full = MoEConfig.preset(name)
    experts = max(full.num_groups * 2, full.num_experts // 8, full.top_k)
    small = dict(hidden_size=full.hidden_size // 64, intermediate_size=full.intermediate_size // 64, num_experts=experts)
    if full.shared_intermediate_size is not None:
        small["shared_intermediate_size"] = full.shared_intermediate_size // 64
    config = MoEConfig.preset(name, **small)
    for dtype in (torch.float64, torch.bfloat16):
        compare(config, dtype, tokens=60)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", [None, 0.8])
def test_given_ids_and_weights(dtype, clamp):
    batch = Batch.random(dtype=dtype, clamp=clamp)
    assert_close(step(None, batch, Tuning(minibatch=128, macrobatch=256, saved_rows=256)), expected(batch), TOLERANCE[dtype])


@pytest.mark.parametrize("saved_rows", [None, 0])
def test_gradcheck(saved_rows):
    batch = Batch.random(tokens=6, hidden=5, width=4, experts=3, dtype=torch.float64, clamp=0.9)
    shared = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    tensors = [t.clone().requires_grad_() for t in (batch.x, batch.weights, batch.gate, batch.up, batch.down)]
    tuning = Tuning(saved_rows=saved_rows)

    def layer(x, weights, gate, up, down, shared):
        return mok.moe(x, batch.ids, weights, gate, up, down, shared=shared, clamp=0.9, tuning=tuning)

    assert torch.autograd.gradcheck(layer, (*tensors, shared))


def test_gradcheck_of_the_whole_layer():
    config = MoEConfig(
        hidden_size=4,
        intermediate_size=3,
        num_experts=4,
        top_k=2,
        score="sigmoid",
        num_shared_experts=1,
        shared_gate=True,
        shared_clamp=0.9,
    )
    layer = mok.MoE(config, dtype=torch.float64)
    spread_router(layer)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


def test_gradcheck_of_dense_rows():
    x, w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(row_linear, (x, w))
    gate, up = (torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    down = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: row_swiglu(*a, 0.7), (x, gate, up, down))


def test_clamp_passes_at_the_boundary_and_not_beyond():
    gate, up = torch.tensor([1.0, 1.0, 2.0, -9.0]), torch.tensor([-1.0, 1.0, 0.5, 1.5])
    h = swiglu(gate, up, 1.0)
    sigmoid = 1 / (1 + torch.exp(-torch.tensor([1.0, 1.0, 1.0, -9.0])))
    assert torch.allclose(h, torch.tensor([-1.0, 1.0, 0.5, -9.0]) * sigmoid)
    d_gate, d_up = swiglu_backward(gate, up, torch.ones(4), 1.0)
    assert (d_gate != 0).tolist() == [True, True, False, True]
    assert (d_up != 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("minibatch, macrobatch", [(128, 256), (128, 768), (256, 256), (256, 768)])
def test_one_expert_larger_than_the_ring(minibatch, macrobatch):
    batch = Batch.random(tokens=1000, hidden=32, width=16, experts=2, top_k=1, dtype=torch.float64)
    batch.ids[:] = 1
    assert_close(step(None, batch, Tuning(minibatch=minibatch, macrobatch=macrobatch)), expected(batch), 1e-10)


# ---- products of rows ----

SIZES = (1, 2, 5, 7, 8, 15, 16, 31, 33, 48, 65, 100, 176, 256)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rows_product_depends_on_neither_place_nor_address(dtype, transposed):
    def one_element_on(matrix):
        return torch.empty(matrix.numel() + 1, dtype=dtype)[1:].view(matrix.shape).copy_(matrix)

    for inner in SIZES:
        for outer in SIZES:
            rows, weight = torch.randn(128, inner, dtype=dtype), torch.randn((outer, inner) if transposed else (inner, outer), dtype=dtype)
            order = torch.randperm(128)
            with exact():
                product = row_product(rows, weight, transposed=transposed)
                moved = row_product(rows[order], weight, transposed=transposed)
                shifted = row_product(one_element_on(rows), one_element_on(weight), transposed=transposed)
            assert_equal({"moved": moved, "shifted": shifted}, {"moved": product[order], "shifted": product})
            want = rows.double() @ (weight.T if transposed else weight).double()
            assert_close({"product": product}, {"product": want}, TOLERANCE[dtype])


def test_padding_with_zeros_keeps_inf_and_nan_where_they_are():
    rows, weight = torch.randn(128, 5), torch.randn(3, 5)
    rows[7, 2], weight[1, 4] = float("nan"), float("inf")
    with exact():
        product = row_product(rows, weight, transposed=True)
    want = torch.ones(128, 3, dtype=torch.bool)
    want[7], want[:, 1] = False, False
    assert torch.equal(product.isfinite(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_in_steps(dtype):
    rows, factor = torch.randn(128, 33, dtype=dtype), torch.randn(7, 33, dtype=dtype).T
    product, order = product_in_steps(rows, factor), torch.randperm(128)
    assert_close({"product": product}, {"product": rows.double() @ factor.double()}, TOLERANCE[dtype])
    assert_equal({"moved": product_in_steps(rows[order], factor)}, {"moved": product[order]})
