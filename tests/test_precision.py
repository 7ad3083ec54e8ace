"""The layer in MXFP8 and blockwise FP8 on the CPU: against the definition and bf16, the promises about bits, and what is never stale."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest
import torch
from layers import NAMES, Batch, assert_close, assert_equal, whole
from ranks import RankFailed, run_ranks
from torch.distributed.tensor import DTensor

import mok
from mok import MoEConfig, Tuning, ops, reference
from mok import quantize as q
from mok.executor import Shape
from mok.fabric import host_fabric
from mok.quantize import Recipe

RECIPES = [Recipe(precision, weights) for precision in ("mxfp8", "fp8") for weights in (False, True)]
recipes = pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda r: r.precision + (", weight gradients" if r.quantized_weight_gradients else "")
)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small products are faster without a second thread, which has to be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


RING = Tuning(minibatch=128, macrobatch=256, saved_rows=128, timeout_s=30)


def step(group, batch: Batch, recipe: Recipe, tuning: Tuning = RING, cuts: list[int] | None = None) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """One forward and backward of this rank's part of a global batch."""
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size, cuts).leaves()
    out = mok.moe(
        b.x, b.ids, b.weights, b.gate, b.up, b.down, clamp=b.clamp, num_experts=batch.experts, group=group, tuning=tuning,
        precision=recipe.precision, quantized_weight_gradients=recipe.quantized_weight_gradients,
    )  # fmt: skip
    out.backward(b.d_out)
    return {"out": out.detach(), **b.gradients()}


def expected(batch: Batch, recipe: Recipe) -> dict[str, torch.Tensor]:
    b = batch.leaves()
    out = reference.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, clamp=b.clamp, recipe=recipe)
    out.backward(b.d_out)
    return {"out": out.detach(), **b.gradients()}


def spread(batch: Batch) -> Batch:
    """Values of many magnitudes: powers of two round alike, so which elements share a scale shows only in what falls below its range."""
    return replace(batch, **{n: getattr(batch, n) * torch.randn(getattr(batch, n).shape).mul(3).exp2() for n in (*NAMES[2:], "x", "d_out")})


# ---- against the definition ----


@recipes
@pytest.mark.parametrize("clamp", [None, 0.8])
def test_is_the_definition_in_fp64(recipe, clamp):
    """In fp64 both sides agree on every rounding to E4M3, so an operand quantized in another place or block would show."""
    batch = spread(Batch.random(tokens=420, hidden=160, width=96, experts=3, dtype=torch.float64, clamp=clamp))
    assert_close(step(None, batch, recipe), expected(batch, recipe), 1e-10)


@recipes
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2**-9), (torch.bfloat16, 2**-7), (torch.float16, 2**-8)])
def test_is_the_definition_in_narrow_dtypes(recipe, dtype, tolerance):
    """Here a last bit may turn a rounding to E4M3, now and then."""
    batch = Batch.random(tokens=300, hidden=160, width=96, dtype=dtype)
    got = step(None, batch, recipe)
    assert all(got[f"d_{name}"].dtype == getattr(batch, name).dtype for name in NAMES)
    assert_close(got, expected(batch, recipe), tolerance)


@recipes
def test_the_table(recipe):
    """One expert, one choice, weight 1/2: every product of `Recipe`'s table by hand."""
    one = spread(Batch.random(tokens=128, hidden=256, width=160, experts=1, top_k=1, dtype=torch.float64, masked=False))
    one.weights[:] = 0.5
    mx = recipe.precision == "mxfp8"
    row, column = (q.MX_ROW, q.MX_COLUMN) if mx else (q.FP8_ROW, q.FP8_COLUMN)
    weight, weight_T = (q.MX_ROW, q.MX_COLUMN) if mx else (q.FP8_SQUARE, q.FP8_SQUARE)

    def Q(t, block):  # type: ignore[no-untyped-def]
        return q.dequantize(*q.quantize(t, block), block, torch.float64)

    gate_w, up_w, down_w = one.gate[0], one.up[0], one.down[0]
    x, d_y = Q(one.x, row), Q(one.d_out, row)
    gate, up = x @ Q(gate_w, weight).T, x @ Q(up_w, weight).T
    s = torch.sigmoid(gate)
    h = gate * s * up
    d_hidden = d_y @ Q(down_w, weight_T)
    d_gate, d_up = d_hidden / 2 * up * s * (1 + gate * (1 - s)), d_hidden / 2 * gate * s
    C = (lambda t: Q(t, column)) if recipe.quantized_weight_gradients else (lambda t: t)
    assert_close(
        step(None, one, recipe),
        {
            "out": 0.5 * (Q(h, row) @ Q(down_w, weight).T),
            "d_weights": (d_hidden * h).sum(1, keepdim=True),
            "d_x": Q(d_gate, row) @ Q(gate_w, weight_T) + Q(d_up, row) @ Q(up_w, weight_T),
            "d_gate": (C(d_gate).T @ C(x))[None], "d_up": (C(d_up).T @ C(x))[None], "d_down": (C(d_y).T @ C(h / 2))[None],
        },
        1e-10,
    )  # fmt: skip


@recipes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_point_where_those_of_bf16_point(recipe, dtype):
    batch = Batch.random(tokens=600, hidden=256, width=128, experts=4, dtype=dtype)
    got, plain = step(None, batch, recipe), step(None, batch, Recipe())
    for name, want in plain.items():
        cosine = torch.nn.functional.cosine_similarity(got[name].double().flatten(), want.double().flatten(), dim=0)
        assert 0.996 <= cosine < 1 - 1e-6, f"{name}: {cosine}"


def test_the_whole_layer_and_its_shared_expert():
    """Routers and shared experts are not quantized: with routed experts of zero the layer is the bf16 one bit for bit."""
    config = MoEConfig(hidden_size=64, intermediate_size=96, num_experts=4, top_k=2, num_shared_experts=1, shared_gate=True)
    layer = mok.MoE(config, dtype=torch.float64, precision="mxfp8", quantized_weight_gradients=True)
    assert "precision=mxfp8" in repr(layer)
    x = torch.randn(100, 64, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    state = {name: tensor.detach().clone().requires_grad_() for name, tensor in layer.state_dict().items()}
    want_x = x.detach().requires_grad_()
    reference.layer(want_x, config, state, Recipe("mxfp8", True)).square().sum().backward()
    got = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert_close({"d_x": x.grad, **got}, {"d_x": want_x.grad, **{name: state[name].grad for name in got}}, 1e-10)
    plain = mok.MoE(config, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert not torch.equal(layer(x), plain(x))
        for moe in (layer, plain):
            moe.down_EHI.zero_()
        assert torch.equal(layer(x), plain(x))


# ---- the promises ----


def delayed_step(group, batch, recipe, tunings, cuts=None):  # type: ignore[no-untyped-def]
    fabric = host_fabric(group)
    chance = random.Random(fabric.rank)
    fabric.before = lambda task, call: time.sleep(chance.random() * 0.003)
    results = [step(group, batch, recipe, tuning, cuts) for tuning in tunings]
    for result in results[1:]:
        assert_equal(result, results[0])
    return results[0]


KNOBS = (RING, Tuning(minibatch=128, macrobatch=128, saved_rows=0), Tuning(minibatch=256, macrobatch=512), Tuning(), Tuning())


@recipes
@pytest.mark.parametrize(
    "kind, size, dtype", [("virtual", 2, torch.bfloat16), ("virtual", 3, torch.float32), ("processes", 3, torch.bfloat16)]
)
def test_ranks_knobs_and_runs_move_no_bit(kind, size, recipe, dtype):
    batch = Batch.random(tokens=500, hidden=160, width=96, experts=5, dtype=dtype, clamp=1.5)
    cuts = [0, 1, 1, 500] if size == 3 else None  # ranks with 1, 0 and 499 tokens
    assert_equal(whole(run_ranks(kind, delayed_step, size, batch, recipe, KNOBS, cuts)), step(None, batch, recipe))


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_a_tokens_output_depends_on_the_token_alone(precision):
    config = MoEConfig(hidden_size=72, intermediate_size=40, num_experts=6, top_k=2, num_shared_experts=1)
    layer = mok.MoE(config, dtype=torch.bfloat16, precision=precision)
    x = torch.randn(300, 72).bfloat16().requires_grad_()
    d_out = torch.randn(300, 72).bfloat16()
    out = layer(x)
    out.backward(d_out)
    for rows in ([7], [299, 3], list(range(100, 290))):
        few = x.detach()[rows].requires_grad_()
        again = layer(few)
        again.backward(d_out[rows])
        assert_equal({"out": again.detach(), "d_x": few.grad}, {"out": out.detach()[rows], "d_x": x.grad[rows]})


@recipes
def test_no_block_crosses_an_expert(recipe):
    counts = [44, 1, 31, 33, 32, 0, 95, 20]
    ids = torch.repeat_interleave(torch.arange(8), torch.tensor(counts))[:, None]
    batch = replace(Batch.random(tokens=256, hidden=256, width=64, top_k=1, dtype=torch.float64, masked=False), ids=ids)
    one = step(None, batch, recipe)
    assert_close(one, expected(batch, recipe), 1e-10)
    other = replace(batch, x=batch.x.clone(), d_out=batch.d_out.clone())
    changed = ids[:, 0] == 3
    other.x[changed], other.d_out[changed] = torch.randn(33, 256).double() * 100, torch.randn(33, 256).double() * 1e-3
    two = step(None, other, recipe)
    for name in ("d_gate", "d_up", "d_down"):
        same = [e for e in range(8) if torch.equal(one[name][e], two[name][e])]
        assert same == [0, 1, 2, 4, 5, 6, 7], name
    assert torch.equal(one["out"][~changed], two["out"][~changed]) and torch.equal(one["d_x"][~changed], two["d_x"][~changed])


@recipes
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_stays_with_its_token(recipe, bad):
    batch = Batch.random(tokens=200, hidden=64, width=64, dtype=torch.bfloat16, masked=False)
    clean = step(None, batch, recipe)
    x = batch.x.clone()
    x[17, 40] = bad
    hit = step(None, replace(batch, x=x), recipe)
    others = torch.arange(200) != 17
    assert hit["out"][17].isnan().all()
    for name in ("out", "d_x", "d_weights"):
        assert torch.equal(hit[name][others], clean[name][others]), name
    for e in range(8):
        touched = e in batch.ids[17].tolist()
        assert hit["d_gate"][e].isfinite().all() != touched and (touched or torch.equal(hit["d_gate"][e], clean["d_gate"][e]))


# ---- the wire ----


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_tokens_travel_quantized(precision):
    plain, narrow = (Shape(1000, 4096, 8, 64, torch.bfloat16, Recipe(p)) for p in ("bf16", precision))
    per_block = 32 if precision == "mxfp8" else 128
    for name in ("x", "d_y"):
        full, half = (sum(region.nbytes for region in shape.operand(name)) for shape in (plain, narrow))
        assert full == 1000 * 4096 * 2 and half == 1000 * (4096 + 4096 // per_block)
        published = narrow.published(name, torch.randn(1000, 4096).bfloat16())
        assert [tuple(t.shape) for t in published.values()] == [r.shape for r in narrow.operand(name)]


# ---- never stale ----


def fresh(layer: mok.MoE, x: torch.Tensor) -> torch.Tensor:
    """What a new layer with the same parameters gives."""
    other = mok.MoE(layer.config, dtype=layer.router.weight.dtype, precision=layer.recipe.precision)
    other.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()})
    return other(x)


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_weights_are_never_stale(precision):
    config = MoEConfig(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2)
    layer = mok.MoE(config, dtype=torch.bfloat16, precision=precision)
    x = torch.randn(64, 64).bfloat16()
    seen = [layer(x)]

    def check() -> None:
        seen.append(layer(x))
        assert torch.equal(seen[-1], fresh(layer, x))
        assert not torch.equal(seen[-1], seen[-2]), "the change had no effect"

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(x).square().sum().backward()
    optimizer.step()
    check()
    new = torch.randn_like(layer.down_EHI)
    version = layer.down_EHI._version
    layer.down_EHI.data.copy_(new)
    assert layer.down_EHI._version == version, "nothing but the memory says so"
    check()
    layer.gate_EIH.data = torch.randn_like(layer.gate_EIH)
    check()
    layer.up_EIH.detach().view(torch.int16).numpy()[0, ::3] ^= 0x40  # by other means than torch's
    check()
    memory, addresses = bytearray(4 * 64 * 64 * 2), []
    for _ in range(2):  # a new parameter in a new storage, at the old address
        layer.gate_EIH = None
        new = torch.frombuffer(memory, dtype=torch.bfloat16).view(4, 64, 64)
        layer.gate_EIH = torch.nn.Parameter(new.copy_(torch.randn(4, 64, 64)))
        addresses.append((layer.gate_EIH.data_ptr(), layer.gate_EIH._version))
        check()
    assert addresses[0] == addresses[1]
    # between forward and backward too: the backward reads what the parameters hold then, or autograd refuses
    out = layer(x)
    with torch.no_grad():
        layer.down_EHI.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def shard_changes(group, precision):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    layer = mok.MoE(MoEConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2), group, precision=precision)
    assert isinstance(layer.gate_EIH, DTensor)
    x = torch.randn(50, 32)
    before = layer(x).detach()
    layer.down_EHI.to_local().data.mul_(4)
    larger = layer(x).detach()
    layer.down_EHI.data.copy_(layer.down_EHI.data / 4)
    return before, larger, layer(x).detach()


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_shards_are_never_stale(precision):
    for before, larger, after in run_ranks("processes", shard_changes, 2, precision):
        assert torch.equal(larger, 4 * before) and torch.equal(after, before) and before.any()


# ---- around the layer ----


@pytest.mark.parametrize("precision", ["mxfp8", "fp8"])
def test_compiled_is_eager(precision):
    config = MoEConfig(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2, num_shared_experts=1)
    layer = mok.MoE(config, precision=precision, quantized_weight_gradients=True)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        x = torch.linspace(-2, 2, 50 * 64).view(50, 64).requires_grad_()
        out = run(x)
        out.square().sum().backward()
        results.append({"out": out.detach(), "d_x": x.grad, "d_gate": layer.gate_EIH.grad.clone(), "d_down": layer.down_EHI.grad.clone()})
    assert_equal(results[1], results[0])


def test_main_grads_are_the_unrounded_gradients():
    config = MoEConfig(hidden_size=64, intermediate_size=64, num_experts=4, top_k=2)
    layer = mok.MoE(config, precision="mxfp8", dtype=torch.bfloat16)
    x = torch.randn(100, 64).bfloat16()
    layer(x).sum().backward()
    want = [parameter.grad.clone() for parameter in (layer.gate_EIH, layer.up_EIH, layer.down_EHI)]
    for parameter in (layer.gate_EIH, layer.up_EIH, layer.down_EHI):
        parameter.grad, parameter.main_grad = None, torch.zeros(parameter.shape)
    layer(x).sum().backward()
    for parameter, gradient in zip((layer.gate_EIH, layer.up_EIH, layer.down_EHI), want, strict=True):
        assert parameter.grad is None and torch.equal(parameter.main_grad.bfloat16(), gradient)


def disagree(group):  # type: ignore[no-untyped-def]
    fabric = host_fabric(group)
    batch = Batch.random(tokens=8, hidden=32, width=32, experts=4)
    return step(group, batch, Recipe("mxfp8" if fabric.rank else "fp8"))


def test_refusals():
    config = MoEConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="precision='int8': must be one of bf16, mxfp8, fp8"):
        mok.MoE(config, precision="int8")
    with pytest.raises(ValueError, match="quantized_weight_gradients=True: needs precision 'mxfp8' or 'fp8'"):
        mok.MoE(config, quantized_weight_gradients=True)
    with pytest.raises(TypeError, match="quantized_weight_gradients='yes': must be a bool"):
        mok.MoE(config, precision="fp8", quantized_weight_gradients="yes")
    with pytest.raises((RankFailed, ValueError), match="precision"):
        run_ranks("virtual", disagree, 2)


# ---- the operator ----


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (3, 128, 384), (2, 40, 160)])
def test_mxfp8_quantize(shape):
    x = torch.randn(shape).bfloat16()
    values, scale, values_T, scale_T = ops.mxfp8_quantize(x, scale_layout="plain")
    for got, want in (((values, scale), q.quantize(x, q.MX_ROW)), ((values_T, scale_T), q.quantize(x.mT, q.MX_ROW))):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
    experts, tiles, across = math.prod(shape[:-2]), -(-shape[-2] // 128), -(-shape[-1] // 128)
    assert not any(part.requires_grad for part in ops.mxfp8_quantize(x.clone().requires_grad_())), "of a parameter"
    tiled = ops.mxfp8_quantize(x)
    assert tiled[1].shape == (experts * tiles, across, 32, 16) and tiled[3].shape == (experts * across, tiles, 32, 16)
    assert torch.equal(tiled[1], q.to_tcgen05(scale)) and torch.equal(tiled[3], q.to_tcgen05(scale_T))
    assert ops.mxfp8_quantize(x, return_normal=False)[:2] == (None, None) and ops.mxfp8_quantize(x, True, False)[2:] == (None, None)
    compiled = torch.compile(ops.mxfp8_quantize, fullgraph=True, backend="aot_eager")(x)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(compiled, tiled, strict=True))


def test_mxfp8_quantize_refuses():
    x = torch.zeros(128, 128)
    for match, error, call in (
        ("x: must be a tensor, not list", TypeError, lambda: ops.mxfp8_quantize([1.0])),
        ("x has dtype torch.float16", TypeError, lambda: ops.mxfp8_quantize(x.half())),
        (r"x has shape \(128,\): must be \[M, N\] or \[E, M, N\]", ValueError, lambda: ops.mxfp8_quantize(x[0])),
        ("return_normal=False, return_transposed=False: at least one", ValueError, lambda: ops.mxfp8_quantize(x, False, False)),
        ("scale_layout='row': must be one of tcgen05, plain", ValueError, lambda: ops.mxfp8_quantize(x, scale_layout="row")),
    ):
        with pytest.raises(error, match=match):
            call()
