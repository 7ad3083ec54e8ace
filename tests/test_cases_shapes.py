"""Widths that no tile divides, strided tensors, and expert counts that no group size divides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense import SMALL_RING, Plan, assert_steps, build, dense, exact, random_ids, run_steps
from layers import Batch, assert_equal
from ranks import run_ranks
from strides import strided_and_contiguous

import mok
from mok.fabric import host_fabric


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors on busy cores
    yield
    torch.set_num_threads(threads)


SHAPES = [
    (64, 2880), (72, 1408), (256, 768), (2304, 160), (2880, 2880), (5120, 96), (6144, 160), (7168, 96), (8192, 768),
    (1025, 33), (1, 1), (7, 9),
]  # fmt: skip


@pytest.mark.parametrize("hidden, width", SHAPES)
def test_any_hidden_size_and_width_to_the_last_column(hidden, width):
    ids = torch.tensor([[0, 1], [1, -1], [1, 0], [0, 0], [1, 0]])
    batch = exact(ids, hidden=hidden, width=width, experts=2, weight_choices=(-1.0, 0.5, 1.0))
    plan = Plan([batch])
    parts = run_ranks("virtual", run_steps, 1, plan)
    want, got = dense(batch), parts[0][0]
    last = {"out": -1, "d_x": -1, "d_gate": -1, "d_up": -1, "d_down": 1}
    for name, dim in last.items():  # the columns along H, by themselves
        tails = [t[name].narrow(dim, max(0, hidden - 8), min(8, hidden)) for t in (got, want)]
        assert hidden < 8 or (tails[1] != 0).any(), f"the last columns of {name} are zero: nothing is tested"
        assert torch.equal(*tails), f"the last columns of {name}"
    assert_steps(parts, plan)


@pytest.mark.parametrize("kind, size", [("virtual", 2), ("virtual", 4), ("processes", 2), ("processes", 4)])
def test_odd_sizes_over_ranks(kind, size):
    sizes = [dict(hidden=1025, width=33), dict(hidden=72, width=96), dict(hidden=7, width=9)]
    plan = Plan([exact(random_ids(45, range(5), 3), experts=5, **size) for size in sizes])
    assert_steps(run_ranks(kind, run_steps, size, plan), plan)


def test_a_layer_of_odd_sizes():
    config = mok.MoEConfig(hidden_size=1025, intermediate_size=33, num_experts=3, top_k=2, num_shared_experts=1, shared_gate=True)
    x = torch.randn(2, 5, 1025, requires_grad=True)
    out = build(config)(x)
    out.square().sum().backward()
    assert out.shape == x.shape and x.grad.isfinite().all() and (out[..., -8:] != 0).all() and (x.grad[..., -8:] != 0).all()


# ---- strides ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, size", [("virtual", 1), ("virtual", 2), ("processes", 2)])
def test_strides_change_nothing(kind, size, dtype):
    batch = Batch.random(tokens=90, hidden=24, width=20, experts=6, dtype=dtype)
    assert run_ranks(kind, strided_and_contiguous, size, batch) == [[]] * size


# ---- group sizes ----


@pytest.mark.parametrize("kind, size", [("virtual", 8), ("virtual", 3), ("virtual", 6), ("processes", 3), ("processes", 6)])
def test_twenty_experts_on_any_number_of_ranks(kind, size):
    plan = Plan([exact(random_ids(80, range(20), 3, seed=s), hidden=32, width=16, experts=20, seed=s) for s in range(2)])
    parts = run_ranks(kind, run_steps, size, plan)
    assert_steps(parts, plan)
    assert sum(part[0]["d_gate"].shape[0] for part in parts) == 20


def layer_step(group, config, x):  # type: ignore[no-untyped-def]
    layer = build(config, group)
    fabric = layer.fabric
    tokens = x.chunk(fabric.size)[fabric.rank].clone().requires_grad_()
    out = layer(tokens)
    out.square().sum().backward()
    experts = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in (layer.gate_EIH, layer.up_EIH, layer.down_EHI)]
    return dict(zip(("out", "d_x", "d_gate", "d_up", "d_down"), [out.detach(), tokens.grad, *experts], strict=True))


@pytest.mark.parametrize("kind, size", [("virtual", 8), ("virtual", 3), ("processes", 3)])
def test_a_layer_of_twenty_experts_on_any_number_of_ranks(kind, size):
    config = mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=20, top_k=3, num_shared_experts=1)
    x = torch.randn(72, 16)
    parts = run_ranks(kind, layer_step, size, config, x)
    assert_equal({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, layer_step(None, config, x))


def wrong_experts(group, batch):  # type: ignore[no-untyped-def]
    """What a rank says when the first one brings an expert too many, and the step after."""
    fabric = host_fabric(group)
    mine = batch.local(fabric.rank, fabric.size)
    if fabric.rank == 0:
        mine = replace(mine, **{name: getattr(mine, name)[:-1] for name in ("gate", "up", "down")})
    with pytest.raises(ValueError, match="gate_EIH has shape") as error:
        mok.moe(mine.x, mine.ids, mine.weights, mine.gate, mine.up, mine.down, num_experts=20, group=group, tuning=SMALL_RING)
    return str(error.value), run_steps(group, Plan([batch]))


@pytest.mark.parametrize("kind, size", [("virtual", 3), ("processes", 3)])
def test_a_wrong_number_of_experts_is_the_same_error_on_every_rank(kind, size):
    batch = exact(random_ids(80, range(20), 3), experts=20)
    results = run_ranks(kind, wrong_experts, size, batch)
    assert len({message for message, _ in results}) == 1 and "rank 0" in results[0][0]
    assert_steps([steps for _, steps in results], Plan([batch]))
