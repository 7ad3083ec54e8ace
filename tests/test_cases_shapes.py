"""Widths that no tile divides, strided tensors, and expert counts that no group size divides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import poison
from dense import SMALL_RING, Plan, assert_steps, build, dense, exact, random_ids, run_steps
from layers import NAMES, Batch, assert_equal
from ranks import run_ranks

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



def ramp(out):  # type: ignore[no-untyped-def]
    return torch.linspace(-1, 1, out.shape[0], dtype=out.dtype)


LOSSES = {
    "sum": lambda out: out.sum(),
    "mean of every other column": lambda out: out.mean(0)[::2].sum(),
    "product with the transposed output": lambda out: (out.t() @ ramp(out)[:, None].expand(-1, 3)).sum(),
    "transposed": lambda out: (out.t().contiguous() * ramp(out)).sum(),
    "expanded": lambda out: out[None].expand(3, -1, -1).sum(),
}


def columns(t):  # type: ignore[no-untyped-def]
    return torch.cat([t, torch.full_like(t, 99)], -1)[..., : t.shape[-1]]


def rows(t):  # type: ignore[no-untyped-def]
    return torch.stack([t, torch.full_like(t, 99)], 1).flatten(0, 1)[::2]


def transposed(t):  # type: ignore[no-untyped-def]
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def expanded(t):  # type: ignore[no-untyped-def]
    return t[..., :1].clone().expand(t.shape)


STRIDES = {
    "x, a part of wider rows": {"x": columns}, "x, every other row": {"x": rows},
    "x transposed": {"x": transposed}, "x expanded": {"x": expanded},
    "ids transposed": {"ids": transposed}, "ids, a part of wider rows": {"ids": columns}, "ids, every other row": {"ids": rows},
    "weights expanded": {"weights": expanded}, "weights transposed": {"weights": transposed}, "weights, wider rows": {"weights": columns},
    "experts transposed": {"gate": transposed, "up": transposed, "down": transposed},
    "experts, every other one": {"gate": rows, "up": rows, "down": rows}, "experts expanded": {"gate": expanded, "down": expanded},
    "shared transposed": {"shared": transposed}, "shared expanded": {"shared": expanded},
    "all": {"x": rows, "ids": transposed, "weights": columns, "gate": transposed, "up": columns, "down": rows, "shared": rows},
}  # fmt: skip


def strided_and_contiguous(group, batch):  # type: ignore[no-untyped-def]
    """The names of the cases whose results differ from those of a run on contiguous copies."""
    fabric = host_fabric(group)
    mine = batch.local(fabric.rank, fabric.size)
    base = {name: getattr(mine, name) for name in (*NAMES, "ids")}
    base["shared"] = torch.randn(mine.x.shape, generator=torch.Generator().manual_seed(1)).to(batch.x.dtype)

    def run(tensors, loss):  # type: ignore[no-untyped-def]
        leaves = {name: t if name == "ids" else t.detach().requires_grad_() for name, t in tensors.items()}
        poison(1)
        arguments = [leaves[name] for name in ("x", "ids", "weights", "gate", "up", "down")]
        out = mok.moe(*arguments, shared=leaves["shared"], num_experts=batch.experts, group=group, tuning=SMALL_RING)
        loss(out).backward()
        return {"out": out.detach(), **{name: t.grad for name, t in leaves.items() if name != "ids"}}

    wrong = []
    cases = [(f"loss: {name}", {}, loss) for name, loss in LOSSES.items()]
    cases += [(name, views, LOSSES["transposed"]) for name, views in STRIDES.items()]
    for name, views, loss in cases:
        tensors = {n: views[n](t) if n in views else t for n, t in base.items()}
        contiguous = {n: t.contiguous() for n, t in tensors.items()}
        assert all(not tensors[n].is_contiguous() for n in views), name
        if name.startswith("loss"):  # the reference run gets a dense gradient

            def loss_of_copy(out, loss=loss):  # type: ignore[no-untyped-def]
                (d_out,) = torch.autograd.grad(loss(leaf := out.detach().requires_grad_()), leaf)
                return (out * d_out.contiguous()).sum()

            want = run(contiguous, loss_of_copy)
        else:
            want = run(contiguous, loss)
        try:
            assert_equal(run(tensors, loss), want)
            assert all((t != 0).any() for t in want.values()), "all zero"
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{name}: {error}")
    return wrong


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
