"""Empty, uneven and overloaded ranks and experts; ids and router weights that are unusual or wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import poison
from dense import SMALL_RING, Plan, assert_steps, build, dense, exact, ids_of_counts, random_ids, run_steps
from layers import TOLERANCE, Batch, assert_close, assert_equal
from ranks import run_ranks

import mok
from mok.fabric import host_fabric

RANKS = [("virtual", 1), ("virtual", 2), ("virtual", 4), ("processes", 2), ("processes", 4)]
SEVERAL = [(kind, size) for kind, size in RANKS if size > 1]
on_ranks = pytest.mark.parametrize("kind, size", RANKS)
on_several_ranks = pytest.mark.parametrize("kind, size", SEVERAL)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors on busy cores
    yield
    torch.set_num_threads(threads)


def ordinary(seed: int = 100, experts: int = 16, dtype: torch.dtype = torch.bfloat16) -> Batch:
    return exact(random_ids(150, range(experts), seed=seed), experts=experts, dtype=dtype, seed=seed)


# ---- empty ----


@on_several_ranks
@pytest.mark.parametrize("x_frozen", [False, True])
def test_a_rank_that_receives_no_token(kind, size, x_frozen):
    used = range(16 - 16 // size)
    batches = [exact(random_ids(64 * size, used, seed=s), experts=16, seed=s) for s in range(2)]
    plan = Plan([*batches, ordinary()], frozen={size - 1: ("x",)} if x_frozen else {}, delay_s=0.001)
    parts = run_ranks(kind, run_steps, size, plan)
    assert_steps(parts, plan)
    for step in parts[-1][:2]:
        assert step["d_gate"].shape == (16 // size, 48, 64)
        assert all((step[name] == 0).all() for name in ("d_gate", "d_up", "d_down"))


@on_ranks
def test_ranks_that_send_no_token(kind, size):
    cuts = {1: [[0, 1], [0, 0], [0, 307]], 2: [[0, 1, 1], [0, 0, 0], [0, 0, 307]]}
    cuts[4] = [[0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 300, 300, 307]]
    batches = [exact(random_ids(tokens, range(8), seed=tokens), hidden=32, width=16, seed=tokens) for tokens in (1, 0, 307)]
    plan = Plan(batches * 50, cuts[size] * 50, delay_s=0.0001)
    parts = run_ranks(kind, run_steps, size, plan)
    want = [dense(batch) for batch in batches]
    for i in range(len(plan.batches)):  # the dense loop once per batch, not fifty times
        whole = {name: torch.cat([part[i][name] for part in parts]) for name in want[0]}
        assert_equal(whole, want[i % 3])
    assert [part[1]["out"].shape for part in parts] == [(0, 32)] * size
    assert all(part[1]["d_x"].shape == (0, 32) for part in parts)


@on_ranks
def test_idle_experts_get_zero_gradients_every_step(kind, size):
    batches = [exact(random_ids(64, (0, 9), seed=s), experts=16, seed=s) for s in range(3)]
    batches.insert(1, ordinary())  # leaves something in every expert's place
    plan = Plan(batches)

    def idle_are_zero(want, batch):
        idle = [e for e in range(16) if not (batch.ids == e).any()]
        assert len(idle) in (0, 14)
        for name in ("d_gate", "d_up", "d_down"):
            assert (want[name][idle] == 0).all()
            assert (want[name][0] != 0).any()

    assert_steps(run_ranks(kind, run_steps, size, plan), plan, idle_are_zero)


@on_ranks
def test_empty_groups_first_in_the_middle_and_last(kind, size):
    counts = [0, 0, 5, 0, 128, 0, 0, 1]
    plan = Plan([exact(ids_of_counts(c), dtype=torch.float32) for c in (counts, counts[::-1], [0, 0, 0, 0, 0, 0, 0, 130])])
    assert_steps(run_ranks(kind, run_steps, size, plan), plan)


@on_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_that_fill_no_tile(kind, size, dtype):
    plan = Plan([exact(ids_of_counts([1, 7, 33, 127, 0, 129, 16, 15], seed=s), dtype=dtype, seed=s) for s in range(3)])
    assert_steps(run_ranks(kind, run_steps, size, plan), plan)


def test_random_values_with_counts_that_fill_no_tile():
    """Values that are not exact, so that a wrong activation shows however small it is."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        batch = Batch.random(tokens=328, top_k=1, dtype=dtype, clamp=1.5)
        batch.ids = ids_of_counts([1, 7, 33, 127, 0, 129, 16, 15])
        for parts in (run_ranks("virtual", run_steps, size, Plan([batch])) for size in (1, 4)):
            assert_close({n: torch.cat([part[0][n] for part in parts]) for n in parts[0][0]}, dense(batch), TOLERANCE[dtype])


# ---- overloaded ----


@on_ranks
def test_all_tokens_to_one_expert(kind, size):
    tokens = 4096 * size
    small = dict(hidden=16, width=16, experts=16)
    batches = [exact(torch.tensor(pair).expand(tokens, 2).contiguous(), **small, seed=s) for s, pair in enumerate([(0, 1), (15, 14)])]
    plan = Plan([*batches, ordinary()], tuning=SMALL_RING.replace(minibatch=1024, macrobatch=4096))
    assert_steps(run_ranks(kind, run_steps, size, plan), plan)


# ---- ids ----


@on_ranks
def test_an_expert_chosen_twice_by_a_token(kind, size):
    ids = torch.full((129, 2), 3)
    twice = exact(ids)
    twice.weights[:] = torch.tensor([0.25, 0.75])
    once = dataclasses.replace(twice, ids=ids[:, :1], weights=torch.ones(129, 1))
    plan = Plan([twice, once, ordinary()])
    parts = run_ranks(kind, run_steps, size, plan)
    assert_steps(parts, plan)
    for two, one, _ in parts:
        assert_equal(two, one, ("out",))
        assert_equal({"d_weights": two["d_weights"]}, {"d_weights": one["d_weights"].expand(-1, 2)})


@on_ranks
@pytest.mark.parametrize("masked_weight", [5.0, float("nan")])
def test_masked_slots_add_nothing_and_get_no_gradient(kind, size, masked_weight):
    ids = torch.tensor([[2, -1], [-1, -1], [-1, 7], [0, 7]]).repeat(40, 1)
    masked = exact(ids)
    masked.weights[ids < 0] = masked_weight
    plan = Plan([masked, ordinary(), masked])

    def masked_are_zero(want, batch):
        none = (batch.ids < 0).all(1)
        assert (want["out"][none] == 0).all() and (want["d_x"][none] == 0).all() and (want["d_weights"][batch.ids < 0] == 0).all()
        assert (want["d_weights"][batch.ids >= 0] != 0).any()

    assert_steps(run_ranks(kind, run_steps, size, plan), plan, masked_are_zero)


def count_routes(group, config, ids):  # type: ignore[no-untyped-def]
    layer = build(config, group)
    ids = ids.chunk(layer.fabric.size)[layer.fabric.rank]
    layer.routed(torch.ones(ids.shape[0], config.hidden_size), ids, torch.ones(ids.shape))
    return layer.tokens_per_expert


@on_ranks
def test_masked_slots_are_counted_for_no_expert(kind, size):
    config = mok.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=8, top_k=2)
    ids = torch.tensor([[2, -1], [-1, -1], [-1, 7], [0, 7]]).repeat(40, 1)
    for counts in run_ranks(kind, count_routes, size, config, ids):
        assert counts.tolist() == [40, 0, 40, 0, 0, 0, 0, 80]


def bad_then_good(group, batch, bad_id):  # type: ignore[no-untyped-def]
    """The error of a call in which the last rank alone has a bad id, then an ordinary step."""
    fabric = host_fabric(group)
    wrong = batch.local(fabric.rank, fabric.size)
    if fabric.rank == fabric.size - 1:
        wrong = dataclasses.replace(wrong, ids=wrong.ids.clone())
        wrong.ids[-1, 0] = bad_id
    seen = []
    for _ in range(2):
        try:
            arguments = (wrong.x, wrong.ids, wrong.weights, wrong.gate, wrong.up, wrong.down)
            mok.moe(*arguments, num_experts=batch.experts, group=group, tuning=SMALL_RING)
        except ValueError as error:
            seen.append(str(error))
        seen.append(run_steps(group, Plan([batch]))[0])
    return seen


@on_ranks
@pytest.mark.parametrize("bad_id", [16, -7, 2**40])
def test_an_id_out_of_range_is_the_same_error_on_every_rank(kind, size, bad_id):
    batch = ordinary()
    results = run_ranks(kind, bad_then_good, size, batch, bad_id)
    assert [len(seen) for seen in results] == [4] * size
    assert len({seen[i] for seen in results for i in (0, 2)}) == 1, "the ranks say different things"
    assert str(bad_id) in results[0][0] and "ids" in results[0][0]
    assert size == 1 or f"rank {size - 1}" in results[0][0]
    for i in (1, 3):
        assert_steps([[seen[i]] for seen in results], Plan([batch]))


# ---- router weights ----


@on_ranks
def test_the_gradient_of_a_router_weight_is_a_dot_product_for_every_weight(kind, size):
    choices = torch.tensor([0.0, -0.5, 1e-8, 0.7])
    batch = Batch.random(tokens=200, experts=16, top_k=4, dtype=torch.bfloat16, masked=False)
    batch.ids = torch.stack([torch.randperm(4) * 4 + torch.randint(0, 4, (4,)) for _ in range(200)])  # one expert of every rank
    batch.weights = choices[torch.randint(0, 4, (200, 4))]
    x, gate, up, down, d_out = (t.float() for t in (batch.x, batch.gate, batch.up, batch.down, batch.d_out))
    want = torch.empty(200, 4)
    for t in range(200):
        for k, e in enumerate(batch.ids[t].tolist()):
            g = gate[e] @ x[t]
            want[t, k] = d_out[t] @ (down[e] @ (g / (1 + torch.exp(-g)) * (up[e] @ x[t])))
    parts = run_ranks(kind, run_steps, size, Plan([batch, ordinary()]))
    got = torch.cat([part[0]["d_weights"] for part in parts])
    assert got.dtype == torch.float32
    for choice in choices:
        here = batch.weights == choice
        assert here.sum() > 100
        error = (got[here] - want[here]).norm() / want[here].norm()
        assert error < 1e-2, f"w={choice:g}: relative error {error:.1e}"
    assert_steps([part[1:] for part in parts], Plan([ordinary()]))


# ---- clamps of routed and shared experts ----


def test_routed_and_shared_experts_are_clamped_separately():
    sizes = dict(hidden_size=32, intermediate_size=16, num_experts=4, top_k=2, num_shared_experts=1)
    assert mok.MoEConfig(**sizes).clamp is None and mok.MoEConfig(**sizes).shared_clamp is None
    v4 = mok.MoEConfig.preset("deepseek-v4-pro")
    assert (v4.clamp, v4.shared_clamp) == (10.0, None)
    x, d_out = torch.randn(200, 32) * 3, torch.randn(200, 32)
    outputs = []
    for clamp, shared_clamp in [(None, None), (0.5, None), (None, 0.5), (0.5, 2.0)]:
        layer = build(mok.MoEConfig(**sizes, clamp=clamp, shared_clamp=shared_clamp))
        with torch.no_grad():
            routing = layer.router(x)
        poison()
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.backward(d_out)
        experts = (layer.gate_EIH, layer.up_EIH, layer.down_EHI)
        routed = dense(Batch(x, routing.ids_TK, routing.weights_TK, *(p.detach() for p in experts), d_out, clamp))
        shared = [p.detach()[None] for p in (layer.shared.gate_SH, layer.shared.up_SH, layer.shared.down_HS)]
        everyone = Batch(x, torch.zeros(200, 1, dtype=torch.int64), torch.ones(200, 1), *shared, d_out, shared_clamp)
        beside = dense(everyone)
        got = {"out": out.detach(), "d_gate": layer.gate_EIH.grad, "d_up": layer.up_EIH.grad, "d_shared": layer.shared.up_SH.grad}
        want = {"out": routed["out"] + beside["out"], "d_gate": routed["d_gate"], "d_up": routed["d_up"], "d_shared": beside["d_up"][0]}
        assert_close(got, want, TOLERANCE[torch.float32])
        outputs.append(want["out"])
    for i in range(len(outputs)):
        for j in range(i):
            assert (outputs[i] - outputs[j]).norm() > 0.05 * outputs[i].norm(), "a clamp that clips nothing tests nothing"
