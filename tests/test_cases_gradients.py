"""Sums without factors, accumulation in fp32, frozen inputs, load counters, and dtypes under autocast."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import poison
from dense import SMALL_RING, Plan, assert_steps, build, dense, exact, random_ids, run_steps
from layers import NAMES, TOLERANCE, Batch, assert_close, assert_equal
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

import mok
from mok import executor
from mok.fabric import host_fabric

RANKS = [("virtual", 1), ("virtual", 2), ("virtual", 4), ("processes", 1), ("processes", 4)]
SEVERAL = [(kind, size) for kind, size in RANKS if size > 1]
on_ranks = pytest.mark.parametrize("kind, size", RANKS)
on_several_ranks = pytest.mark.parametrize("kind, size", SEVERAL)
EXPERTS = ("gate", "up", "down")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors on busy cores
    yield
    torch.set_num_threads(threads)


def local(tensor):  # type: ignore[no-untyped-def]
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---- sums, with no factor of the group's size ----


def summed_loss(group, config, x):  # type: ignore[no-untyped-def]
    layer = build(config, group)
    layer(x.chunk(layer.fabric.size)[layer.fabric.rank]).sum().backward()
    return {name: local(p.grad) for name, p in layer.named_parameters()}


@on_several_ranks
def test_gradients_carry_no_factor_of_the_group_size(kind, size):
    config = mok.MoEConfig(hidden_size=32, intermediate_size=16, num_experts=8, top_k=2, num_shared_experts=1, score="sigmoid")
    x = torch.randn(160, 32)
    alone = summed_loss(None, config, x)
    parts = run_ranks(kind, summed_loss, size, config, x)
    experts = {name: torch.cat([part[name] for part in parts]) for name in ("gate_EIH", "up_EIH", "down_EHI")}
    assert_equal(experts, {name: alone[name] for name in experts})
    replicated = {name: sum(part[name] for part in parts) for name in alone if name not in experts}
    assert len(replicated) == 4
    assert_close(replicated, {name: alone[name] for name in replicated}, 1e-5)


# ---- accumulation into main_grad ----


def accumulate(group, ids_of_each, dtype, prefill, frozen=()):  # type: ignore[no-untyped-def]
    """main_grad of this rank's experts after several micro-batches; `.grad` stays None."""
    fabric = host_fabric(group)
    batches = micro_batches(ids_of_each, dtype)
    mine = batches[0].local(fabric.rank, fabric.size)
    weights = {name: getattr(mine, name).clone().requires_grad_(name not in frozen) for name in EXPERTS}
    for weight in weights.values():
        weight.main_grad = torch.full(weight.shape, prefill)
    for batch in batches:
        b = batch.local(fabric.rank, fabric.size).leaves()
        poison(1)
        out = mok.moe(b.x, b.ids, b.weights, *weights.values(), num_experts=batch.experts, group=group, tuning=SMALL_RING)
        out.backward(b.d_out)
    assert all(weight.grad is None for weight in weights.values())
    return {f"d_{name}": weight.main_grad for name, weight in weights.items()}


def micro_batches(ids_of_each, dtype):  # type: ignore[no-untyped-def]
    """Batches that share their expert weights."""
    batches = [exact(ids, dtype=dtype, seed=s) for s, ids in enumerate(ids_of_each)]
    return [replace(b, gate=batches[0].gate, up=batches[0].up, down=batches[0].down) for b in batches]


def sums(ids_of_each, dtype, prefill):  # type: ignore[no-untyped-def]
    total = [dense(batch, round_weight_gradients=False) for batch in micro_batches(ids_of_each, dtype)]
    return {f"d_{name}": sum((t[f"d_{name}"] for t in total), torch.full((), prefill)) for name in EXPERTS}


@on_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_added_to_and_idle_experts_leave_it_alone(kind, size, dtype):
    ids = torch.stack([random_ids(60, (0, 1, 2, 3, 4)), random_ids(60, (0, 5, 6)), random_ids(60, (0, 1, 2, 3, 4), seed=1)])
    parts = run_ranks(kind, accumulate, size, ids, dtype, 7.0)
    got = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert_equal(got, sums(ids, dtype, 7.0))
    for t in got.values():
        assert t.dtype == torch.float32 and (t[7] == 7.0).all() and (t[5] != 7.0).any()


@pytest.mark.parametrize("kind, size", [("virtual", 1), ("virtual", 4), ("processes", 2)])
def test_many_bf16_micro_batches_are_summed_in_fp32(kind, size):
    ids = torch.stack([random_ids(40, range(8), seed=s) for s in range(64)])
    parts = run_ranks(kind, accumulate, size, ids, torch.bfloat16, 0.0)
    want = sums(ids, torch.bfloat16, 0.0)
    assert_equal({name: torch.cat([part[name] for part in parts]) for name in want}, want)
    in_bf16 = torch.zeros_like(want["d_down"], dtype=torch.bfloat16)
    for batch in micro_batches(ids, torch.bfloat16):
        in_bf16 += dense(batch)["d_down"]
    assert not torch.equal(in_bf16.float(), want["d_down"]), "a sum that bf16 holds tests nothing"


@pytest.mark.parametrize("frozen", [("up",), ("gate", "down"), EXPERTS])
@pytest.mark.parametrize("size", [1, 2])
def test_main_grad_of_a_frozen_weight_is_left_alone(size, frozen):
    ids = torch.stack([random_ids(60, range(8), seed=s) for s in range(2)])
    parts = run_ranks("virtual", accumulate, size, ids, torch.bfloat16, 7.0, frozen)
    want = sums(ids, torch.bfloat16, 7.0)
    for name in frozen:
        want[f"d_{name}"] = torch.full_like(want[f"d_{name}"], 7.0)
    assert_equal({name: torch.cat([part[name] for part in parts]) for name in want}, want)


def accumulate_in_layer(group, config, x, autocast):  # type: ignore[no-untyped-def]
    """main_grad of a layer's experts after two backward passes, and the `.grad` of one after the other without main_grad."""
    results = []
    for fused in (True, False):
        layer = build(config, group)
        parameters = [layer.gate_EIH, layer.up_EIH, layer.down_EHI]
        for p in parameters if fused else ():
            p.main_grad = torch.full(local(p).shape, 7.0)
        for step in range(2):
            tokens = x[step].chunk(layer.fabric.size)[layer.fabric.rank]
            with torch.autocast("cpu", enabled=autocast):
                layer(tokens).float().square().sum().backward()
        if fused:
            assert all(p.grad is None for p in parameters), "a gradient that went into main_grad must not stand in .grad as well"
            assert layer.router.weight.grad is not None
        results.append([local(p.main_grad) - 7.0 if fused else local(p.grad) for p in parameters])
    return [dict(zip(EXPERTS, result, strict=True)) for result in results]


@on_ranks
@pytest.mark.parametrize("autocast", [False, True])
def test_main_grad_of_a_layer(kind, size, autocast):
    config = mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=8, top_k=2)
    for fused, plain in run_ranks(kind, accumulate_in_layer, size, config, torch.randn(2, 80, 16), autocast):
        assert_close(fused, plain, 2**-7 if autocast else 1e-5)


def test_main_grad_of_shared_experts():
    """The sum that `.grad` rounds to bf16; prefilled it is added to. A frozen one is left alone, a wrong one named."""
    config = mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2, num_shared_experts=1, shared_gate=True)
    x, d_out = torch.randn(2, 300, 16, dtype=torch.bfloat16)
    plain = build(config, dtype=torch.bfloat16)
    plain(x).backward(d_out)
    layer = build(config, dtype=torch.bfloat16)
    names = ("gate_SH", "up_SH", "down_HS")
    mains = {name: torch.zeros(getattr(layer.shared, name).shape) for name in names}
    for name in names:
        getattr(layer.shared, name).main_grad = mains[name]
    layer(x).backward(d_out)
    for name in names:
        assert getattr(layer.shared, name).grad is None
        narrow = mains[name].bfloat16()
        assert torch.equal(narrow, getattr(plain.shared, name).grad) and not torch.equal(narrow.float(), mains[name])
    once = {name: main.clone() for name, main in mains.items()}
    layer.shared.up_SH.requires_grad_(False)
    layer(x).backward(d_out)
    assert_equal(mains, {"gate_SH": 2 * once["gate_SH"], "up_SH": once["up_SH"], "down_HS": 2 * once["down_HS"]})
    assert torch.equal(layer.shared.output_gate_H.grad, 2 * plain.shared.output_gate_H.grad)  # no main_grad, so in .grad
    layer.shared.gate_SH.main_grad = torch.zeros(16, 8)
    with pytest.raises(ValueError, match=r"shared.gate_SH.main_grad is torch.float32 \(16, 8\): must be torch.float32 \(8, 16\)"):
        layer(x)


# ---- frozen inputs ----

CHOICES = [tuple(name for i, part in enumerate((("x",), ("weights",), EXPERTS)) for name in part if n >> i & 1) for n in range(8)]


@on_ranks
def test_only_gradients_that_were_asked_for(kind, size):
    """All eight choices, first the same on all ranks, then another one on every rank, then single expert weights."""
    batch = exact(random_ids(100, range(8)))
    plans = [Plan([batch], frozen=dict.fromkeys(range(size), names)) for names in CHOICES]
    plans += [Plan([batch], frozen={rank: CHOICES[(n + (3 * n + 1) * rank) % 8] for rank in range(size)}) for n in range(8)]
    plans += [Plan([batch], frozen=dict.fromkeys(range(size), names)) for names in (("up",), ("gate", "down"), ("x", "gate"))]
    results = run_ranks(kind, run_plans, size, plans)
    for i, plan in enumerate(plans):
        assert_steps([result[i] for result in results], plan)


def run_plans(group, plans):  # type: ignore[no-untyped-def]
    return [run_steps(group, plan) for plan in plans]


def all_frozen(group, batch):  # type: ignore[no-untyped-def]
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size)
    arguments = (b.x, b.ids, b.weights, b.gate, b.up, b.down)
    outs = [mok.moe(*arguments, num_experts=batch.experts, group=group, tuning=SMALL_RING)]
    with torch.no_grad():
        outs.append(mok.moe(*arguments, num_experts=batch.experts, group=group, tuning=SMALL_RING))
        leaves = batch.local(fabric.rank, fabric.size).leaves()
        arguments = (leaves.x, leaves.ids, leaves.weights, leaves.gate, leaves.up, leaves.down)
        outs.append(mok.moe(*arguments, num_experts=batch.experts, group=group, tuning=SMALL_RING))
    assert not any(out.requires_grad for out in outs)
    return [{"out": out} for out in outs]


@on_ranks
def test_nothing_asked_for_or_no_grad(kind, size):
    batch = exact(random_ids(100, range(8)))
    for outs in zip(*run_ranks(kind, all_frozen, size, batch), strict=True):
        assert_equal({"out": torch.cat([part["out"] for part in outs])}, dense(batch), ("out",))


def test_work_that_nobody_asked_for_is_not_done(monkeypatch):
    """Frozen experts accumulate no weight gradient, frozen x moves no d_x, and without a backward no activations are kept."""
    batch = exact(random_ids(100, range(8)))
    accumulators, pushed, saved = [], [], []
    zeros, push, forward = executor.ExpertGradient.zeros, executor.push, executor.forward

    def noted_push(call, schedule, region, *rest):  # type: ignore[no-untyped-def]
        pushed.append(region)
        return push(call, schedule, region, *rest)

    def noted_forward(*args, **named):  # type: ignore[no-untyped-def]
        result = forward(*args, **named)
        saved.append(result[1].numel())
        return result

    monkeypatch.setattr(executor.ExpertGradient, "zeros", staticmethod(lambda expert: accumulators.append(1) or zeros(expert)))
    monkeypatch.setattr(executor, "push", noted_push)
    monkeypatch.setattr(executor, "forward", noted_forward)
    run_ranks("virtual", run_steps, 2, Plan([batch]))
    assert accumulators and set(pushed) == {"y", "d_x", "d_weights"} and all(saved)
    for frozen, regions in [(EXPERTS, {"d_x", "d_weights"}), (("x", *EXPERTS), {"d_weights"}), (("weights", *EXPERTS), {"d_x"})]:
        accumulators.clear(), pushed.clear()
        run_ranks("virtual", run_steps, 2, Plan([batch], frozen=dict.fromkeys(range(2), frozen)))
        assert not accumulators and set(pushed) == {"y", *regions}
    saved.clear()
    run_ranks("virtual", all_frozen, 2, batch)
    assert len(saved) == 6 and not any(saved)


# ---- load counters ----


def squared(function, *arguments):  # type: ignore[no-untyped-def]
    """More work after the layer, without which a recompute stops before the layer's end."""
    return function(*arguments).square()


def counted(group, ids):  # type: ignore[no-untyped-def]
    """Counters after: a training step, an evaluation, a step under no_grad, and steps with recompute of both kinds."""
    config = mok.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=1)
    layer = build(config, group).to(torch.bfloat16)
    ids = ids.chunk(layer.fabric.size)[layer.fabric.rank]
    x, weights = torch.ones(ids.shape[0], 4, dtype=torch.bfloat16), torch.ones(ids.shape)
    other = (torch.ones(3, 4, dtype=torch.bfloat16), torch.tensor([[0], [1], [2]]), torch.ones(3, 1))
    counts = {}

    layer.routed(x, ids, weights).sum().backward()
    counts["step"] = layer.tokens_per_expert.clone()
    layer.eval().routed(*other)
    counts["after eval"] = layer.tokens_per_expert.clone()
    layer.train()
    with torch.no_grad():
        layer.routed(*other)
    counts["after no_grad"] = layer.tokens_per_expert.clone()
    for reentrant in (False, True):
        layer.routed(*other).sum().backward()  # a step with other counts
        small = layer.tokens_per_expert.clone()
        assert small.tolist() == [layer.fabric.size] * 3 + [0]
        for _ in range(2):
            x_leaf = x.clone().requires_grad_()
            out = checkpoint(squared, layer.routed, x_leaf, ids, weights, use_reentrant=reentrant)
            if not reentrant:
                counts[f"forward, reentrant={reentrant}"] = layer.tokens_per_expert.clone()
                layer.tokens_per_expert.fill_(-77)  # the recompute must leave it alone
            out.sum().backward()
            if not reentrant:
                assert (layer.tokens_per_expert == -77).all()
            else:
                counts[f"step, reentrant={reentrant}"] = layer.tokens_per_expert.clone()
    return counts


@on_ranks
def test_loads_are_counted_exactly_and_in_training_steps_only(kind, size):
    ids = torch.full((40_840 + 8, 1), 3)
    ids[::5106] = 0
    assert (ids == 3).sum() == 40_840
    for counts in run_ranks(kind, counted, size, ids):
        assert len(counts) == 5
        for when, count in counts.items():
            assert count.dtype == torch.int64 and count.tolist() == [8, 0, 0, 40_840], when


# ---- dtypes and autocast ----

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_carry_the_dtype_of_their_input(size, dtype, autocast, weight_dtype):
    batch = exact(random_ids(40, range(8)), hidden=24, width=16, dtype=dtype, weight_choices=(-0.5, 0.25, 0.5))
    for t in (batch.d_out, batch.down):
        t *= torch.rand(t.shape) < 0.5  # fp16 ends at 65504
    batch.weights = batch.weights.to(weight_dtype)
    parts = run_ranks("virtual", autocast_step, size, batch, autocast)
    got = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    inside = autocast or dtype
    cast = replace(batch, **{name: getattr(batch, name).to(inside) for name in ("x", "d_out", *EXPERTS)})
    want = dense(cast)
    assert got["out"].dtype == inside
    for name in NAMES:
        assert got[f"d_{name}"].dtype == getattr(batch, name).dtype
        assert got[f"d_{name}"].isfinite().all()
        want[f"d_{name}"] = want[f"d_{name}"].to(getattr(batch, name).dtype)
    assert_equal(got, want)


def autocast_step(group, batch, autocast):  # type: ignore[no-untyped-def]
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size).leaves()
    poison(1)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, num_experts=batch.experts, group=group, tuning=SMALL_RING)
    out.backward(b.d_out.to(out.dtype))
    return {"out": out.detach(), **b.gradients()}


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_a_layer_under_autocast(x_dtype, dtype, autocast):
    config = mok.MoEConfig(hidden_size=32, intermediate_size=16, num_experts=4, top_k=2, num_shared_experts=1, shared_gate=True)
    layer, like = build(config, dtype=dtype), build(config)
    x = torch.randn(60, 32, dtype=x_dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=autocast):
        out = layer(x)
    assert out.dtype == autocast
    out.float().square().sum().backward()
    like.load_state_dict({name: t.float() for name, t in layer.state_dict().items()})
    x_like = x.detach().float().requires_grad_()
    wide = like(x_like)
    wide.square().sum().backward()
    assert x.grad.dtype == x_dtype
    got, want = {"out": out.detach(), "d_x": x.grad}, {"out": wide.detach(), "d_x": x_like.grad}
    for (name, p), q in zip(layer.named_parameters(), like.parameters(), strict=True):
        assert p.grad.dtype == dtype, name
        got[name], want[name] = p.grad, q.grad
    assert_close({n: t.float() for n, t in got.items()}, want, 3e-2)  # bf16 activations against fp32 ones


def test_a_dtype_that_does_not_fit_is_refused_at_the_call():
    layer = build(mok.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2))
    with pytest.raises(TypeError, match=r"x has dtype torch\.bfloat16"):
        layer(torch.ones(3, 8, dtype=torch.bfloat16))
    b = Batch.random(tokens=10)
    with pytest.raises(TypeError, match="gate_EIH has dtype"):
        mok.moe(b.x.half(), b.ids, b.weights, b.gate, b.up, b.down)
    with pytest.raises(TypeError, match="weights has dtype"):
        mok.moe(b.x, b.ids, b.weights.long(), b.gate, b.up, b.down)


def test_scaled_fp16_training():
    config = mok.MoEConfig(hidden_size=32, intermediate_size=16, num_experts=4, top_k=2, num_shared_experts=1)
    layer = build(config)
    x, target = torch.randn(60, 32), torch.randn(60, 32)

    def gradients(scale):  # type: ignore[no-untyped-def]
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (layer(x).float() - target).square().sum()
        (loss * scale).backward()
        return {name: p.grad / scale for name, p in layer.named_parameters()}

    assert_close(gradients(2.0**4), gradients(1.0), TOLERANCE[torch.float16])
    assert not gradients(2.0**40)["gate_EIH"].isfinite().all(), "an overflow must be seen by the scaler"

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    losses, moved = [], []
    for _ in range(60):
        before = layer.gate_EIH.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (layer(x).float() - target).square().mean() * 32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        moved.append(not torch.equal(before, layer.gate_EIH))
    assert not moved[0] and moved[-1] and losses[-1] < losses[0] and all(p.isfinite().all() for p in layer.parameters())
