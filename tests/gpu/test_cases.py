"""Kinds of faults that users of such layers reported, each as a small case on a GPU: alone, as virtual ranks, and between processes.

Values are exact where they can be (tests/dense.py), and then equal to the dense loop bit for bit. `ahead` says at which of two sizes: of
the ordinary kernels, or of those that Hopper has of its own, whose launches are then counted (checks.py).

    A  ranks that receive or send nothing, idle experts, empty groups, counts that fill no tile, all to one pair: CASES
       no route at all, compiled too: CASES, test_compiled_for_any_number_of_tokens
    B  an expert chosen twice, masked slots with any weight: CASES
       wrong ids: test_a_wrong_id_is_told_by_this_call_or_the_next; with several ranks test_forward.py
       d_w of zero, negative and tiny weights: test_the_gradient_of_a_router_weight_is_a_dot_product_for_every_weight
       clamps of routed and shared experts apart: test_extremes of test_forward.py and test_backward.py, test_layer.py
    C  any H and I, or a refusal: test_any_hidden_size_and_width_to_the_last_column, test_sizes_that_are_refused, test_shapes.py
       odd strides and addresses: test_strides_change_nothing, test_odd_addresses
       not the current device: test_a_layer_on_a_device_that_is_not_the_current_one; the low-level API in test_functional.py
       20 experts on any number of ranks: CASES, test_six_virtual_ranks_of_which_one_has_no_expert
    D  no factor of the number of ranks: CASES, test_backward.py
       main_grad: test_main_grad_...; of shared experts in test_layer.py
       frozen inputs: test_only_gradients_that_were_asked_for, test_nothing_asked_for_or_no_grad, test_frozen_experts_cost_no_memory
       load counters: test_loads_are_counted_exactly_and_in_training_steps_only
    E  recompute: test_recompute_...; a hundred delayed repetitions: test_bits_do_not_depend_on_time of test_forward.py and test_backward.py
       full tiles with a column of zeros: CASES
       streams and memory freed early: test_calls_on_two_streams_take_turns, test_backward_from_another_stream, test_memory_that_...
       beside NCCL: test_beside_nccl (two GPUs)
       ranks that refuse, stay away, raise or end: test_a_rank_that_fails_..., test_processes_end
       lives of groups, exit without close: test_lives_of_a_group, test_processes_end; memory: test_nothing_grows
       torch.compile: test_compiled_for_any_number_of_tokens; whole layers in test_layer.py; graphs: test_capture_and_replay
       dtypes and autocast: test_gradients_carry_the_dtype_of_their_input, test_a_layer_under_autocast, test_dtypes_that_are_refused

Not here: what has no part in this layer (biases), FP8 (test_fp8.py).
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import torch.distributed as dist
import virtual
from cases import (
    CASES,
    EXPERTS,
    HIDDEN,
    SIZES,
    TUNING,
    WIDTH,
    batch_of,
    build,
    launches,
    on_device,
    ordinary,
    poison,
    ranks_of,
    run_steps,
    step_of_layer,
)
from checks import both_kernels, hopper_launches
from dense import Plan, assert_steps, dense, exact, random_ids
from layers import NAMES, Batch, assert_close, assert_equal
from processes import run_processes
from strides import strided_and_contiguous
from torch.utils.checkpoint import checkpoint
from virtual import DEVICE, Problem
from virtual_backward import Group

import mok
from mok import FabricError
from mok.kernels import autograd
from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan

MATRICES = ("gate", "up", "down")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


# ---- batches and the dense loop ----


@both_kernels
@pytest.mark.parametrize("name", CASES)
def test_alone(name, ahead):
    plan = CASES[name](1, **SIZES[ahead])
    assert_steps([run_steps(None, plan, ahead)], plan)


def virtual_step(batch: Batch, ranks: int, cuts: list[int] | None = None, ahead: bool = False) -> dict[str, torch.Tensor]:
    """Output and gradients of a global batch on virtual ranks that sleep for random times, on the CPU."""
    plans = dict(plan=BackwardPlan(ring_tiles=2), forward_plan=ForwardPlan(minibatch_tiles=1, ring_tiles=2), saved_rows=128)
    with launches(ahead):
        got = Group(Problem.of(batch), batch.d_out.to(DEVICE), ranks, cuts=cuts, **plans).run(delay=True)
    return {f"d_{name}" if name in MATRICES else name: value.cpu() for name, value in got.items()}


RANKS = [(2, False), (3, False), (4, False), (2, True)]
"""Numbers of ranks, and whether sizes are those of the kernels for Hopper."""


@pytest.mark.parametrize("name", [name for name in CASES if name != "receives_nothing_and_wants_no_d_x"])
@pytest.mark.parametrize(("ranks", "ahead"), RANKS)
def test_virtual_ranks(ranks, ahead, name):
    plan = CASES[name](ranks, **SIZES[ahead])
    for i, batch in enumerate(plan.batches):
        assert_equal(virtual_step(batch, ranks, plan.cuts[i] if plan.cuts else None, ahead), dense(batch))


def test_six_virtual_ranks_of_which_one_has_no_expert():
    batch = ordinary(experts=20)
    assert_equal(virtual_step(batch, 6), dense(batch))


def steps_of_every_case(group, ahead: bool) -> dict[str, list[dict[str, torch.Tensor | None]]]:
    """The results of every case, after a second time with the same bits; ranks that send nothing ten times."""
    results = {}
    for name, case in CASES.items():
        plan = case(ranks_of(group)[1], **SIZES[ahead])
        first = run_steps(group, plan, ahead)
        for _ in range(9 if name == "send_nothing" else 1):
            for one, other in zip(first, run_steps(group, plan, ahead), strict=True):
                assert one.keys() == other.keys()
                assert_equal(other, {key: t for key, t in one.items() if t is not None})
        results[name] = first
    return results


@pytest.mark.parametrize(("ranks", "ahead"), RANKS)
def test_processes(ranks, ahead):
    parts = run_processes(steps_of_every_case, ranks, ahead)
    wrong = []
    for name, case in CASES.items():
        try:
            assert_steps([part[name] for part in parts], case(ranks, **SIZES[ahead]))
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)


# ---- ids and router weights ----


@both_kernels
def test_an_expert_chosen_twice_is_one_with_the_sum_of_weights(ahead):
    twice, once, _ = run_steps(None, CASES["one_expert_twice"](1, **SIZES[ahead]), ahead)
    assert_equal(twice, once, ("out",))
    assert torch.equal(twice["d_weights"], once["d_weights"][:, :1].expand(-1, 2))


@pytest.mark.parametrize("wrong, said", [(16, 16), (-7, -7), (2**40, 2**31 - 1), (-(2**40), -(2**31))])
def test_a_wrong_id_is_told_by_this_call_or_the_next(wrong, said):
    """Nothing waits for the device, so it depends on its speed where the host learns of it."""
    batch = ordinary()
    b = on_device(batch)
    ids = b.ids.clone()
    ids[40, 1] = wrong
    for _ in range(2):
        with pytest.raises(ValueError, match=f"slot 81 of rank 0 is {said}: must be -1 or in 0..15"):
            for given in (ids, b.ids):
                mok.moe(b.x, given, b.weights, b.gate, b.up, b.down, tuning=TUNING)
                torch.cuda.synchronize()
        assert_steps([run_steps(None, Plan([batch]))], Plan([batch]))


@pytest.mark.parametrize(("ranks", "ahead"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_the_gradient_of_a_router_weight_is_a_dot_product_for_every_weight(ranks, ahead):
    choices = torch.tensor([0.0, -0.5, 1e-8, 0.7])
    batch = Batch.random(tokens=300, **SIZES[ahead], experts=EXPERTS, top_k=2, dtype=torch.bfloat16, masked=False)
    batch.weights = choices[torch.randint(0, 4, batch.ids.shape)]
    x, gate, up, down, d_out = (t.double() for t in (batch.x, batch.gate, batch.up, batch.down, batch.d_out))
    want = torch.empty(batch.ids.shape, dtype=torch.float64)
    for e in range(EXPERTS):
        token, k = (batch.ids == e).nonzero(as_tuple=True)
        y = (torch.nn.functional.silu(x[token] @ gate[e].T) * (x[token] @ up[e].T)) @ down[e].T
        want[token, k] = (d_out[token] * y).sum(1)
    got = run_steps(None, Plan([batch]), ahead)[0] if ranks == 1 else virtual_step(batch, ranks, ahead=ahead)
    got = got["d_weights"]
    assert got.dtype == torch.float32
    for choice in choices:
        here = batch.weights == choice
        assert here.sum() > 100
        error = (got[here] - want[here]).norm() / want[here].norm()
        assert error < 1e-2, f"w={choice:g}: relative error {error:.1e}"


# ---- sizes, strides, devices ----

ANY_SIZES = [(64, 2880), (256, 768), (2304, 160), (2880, 1408), (5120, 96), (6144, 160), (7168, 96), (8192, 768)]


@pytest.mark.parametrize("hidden, width", ANY_SIZES)
def test_any_hidden_size_and_width_to_the_last_column(hidden, width):
    batch = exact(random_ids(140, (0, 1)), hidden=hidden, width=width, experts=2, weight_choices=(-1.0, 0.5, 1.0))
    plan = Plan([batch])
    got, want = run_steps(None, plan), dense(batch)
    for name, dim in {"out": -1, "d_x": -1, "d_gate": -1, "d_up": -1, "d_down": 1}.items():  # the columns along H, by themselves
        tails = [t[name].narrow(dim, hidden - 8, 8) for t in (got[0], want)]
        assert (tails[1] != 0).any(), f"the last columns of {name} are zero: nothing is tested"
        assert torch.equal(*tails), f"the last columns of {name}"
    assert_steps([got], plan)


def test_sizes_that_are_refused():
    for hidden, width, message in ((1025, 32, "hidden_size=1025"), (72, 32, "hidden_size=72"), (64, 24, "intermediate_size=24")):
        b = on_device(Batch.random(tokens=10, hidden=hidden, width=width, experts=2, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match=f"{message}: must be a multiple of 16 on a GPU"):
            mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down)


@both_kernels
def test_strides_change_nothing(ahead):
    batch = Batch.random(tokens=90, **SIZES[ahead], experts=EXPERTS, dtype=torch.bfloat16)
    with launches(ahead):
        assert strided_and_contiguous(None, batch, DEVICE) == []


@both_kernels
def test_odd_addresses(ahead):
    """Tensors that begin two, four or eight bytes after a place where the copy engine could read them."""
    batch = on_device(ordinary(**SIZES[ahead]))

    def shifted(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)

    odd = replace(batch, **{name: shifted(getattr(batch, name)) for name in ("x", "ids", "weights", "d_out")})
    assert odd.x.data_ptr() % 16 and odd.ids.data_ptr() % 16
    x, weights = odd.x.requires_grad_(), odd.weights.requires_grad_()
    matrices = [w.requires_grad_() for w in (odd.gate, odd.up, odd.down)]
    with launches(ahead):
        out = mok.moe(x, odd.ids, weights, *matrices, tuning=TUNING)
        out.backward(odd.d_out)
    gradients = {f"d_{name}": t.grad.cpu() for name, t in zip(NAMES, (x, weights, *matrices), strict=True)}
    assert_equal({"out": out.detach().cpu(), **gradients}, dense(ordinary(**SIZES[ahead])))


@needs_two_gpus
def test_a_layer_on_a_device_that_is_not_the_current_one():
    layer = build()
    x = torch.randn(300, HIDDEN, device=DEVICE).bfloat16()
    want = {name: t.cpu() for name, t in step_of_layer(layer, x).items()}
    other = torch.device("cuda", 1)
    moved = step_of_layer(build().to(other), x.to(other))
    assert torch.cuda.current_device() == 0
    assert all(t.device == other for t in moved.values())
    assert_equal({name: t.cpu() for name, t in moved.items()}, want)


# ---- main_grad ----


def micro_batches(ids_of_each: torch.Tensor) -> list[Batch]:
    """Batches that share their expert weights."""
    batches = [batch_of(ids, seed=s) for s, ids in enumerate(ids_of_each)]
    return [replace(b, gate=batches[0].gate, up=batches[0].up, down=batches[0].down) for b in batches]


def accumulate(group, ids_of_each: torch.Tensor, prefill: float) -> dict[str, torch.Tensor]:
    """main_grad of this rank's experts after several micro-batches."""
    rank, ranks = ranks_of(group)
    batches = micro_batches(ids_of_each)
    mine = on_device(batches[0].local(rank, ranks))
    weights = [getattr(mine, name).clone().requires_grad_() for name in MATRICES]
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, prefill, device=DEVICE)
    for batch in batches:
        b = on_device(batch.local(rank, ranks)).leaves()
        poison()
        out = mok.moe(b.x, b.ids, b.weights, *weights, num_experts=EXPERTS, group=group, tuning=TUNING)
        poison()
        out.backward(b.d_out)
    assert all(weight.grad is None for weight in weights)
    return {f"d_{name}": weight.main_grad.cpu() for name, weight in zip(MATRICES, weights, strict=True)}


def sums(ids_of_each: torch.Tensor, prefill: float) -> dict[str, torch.Tensor]:
    total = [dense(batch, round_weight_gradients=False) for batch in micro_batches(ids_of_each)]
    return {f"d_{name}": sum((t[f"d_{name}"] for t in total), torch.full((), prefill)) for name in MATRICES}


def three_micro_batches() -> torch.Tensor:
    """Expert 5 has tokens in the second one only, expert 7 in none."""
    return torch.stack([random_ids(60, (0, 1, 2, 3, 4)), random_ids(60, (0, 5, 6)), random_ids(60, (0, 1, 2, 3, 4), seed=1)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_main_grad_is_added_to_and_idle_experts_leave_it_alone(ranks):
    ids = three_micro_batches()
    parts = [accumulate(None, ids, 7.0)] if ranks == 1 else run_processes(accumulate, ranks, ids, 7.0)
    got = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert_equal(got, sums(ids, 7.0))
    for t in got.values():
        assert t.dtype == torch.float32 and (t[7] == 7.0).all() and (t[5] != 7.0).any()


def test_main_grad_of_many_micro_batches_is_a_sum_in_fp32():
    ids = torch.stack([random_ids(40, range(EXPERTS), seed=s) for s in range(64)])
    want = sums(ids, 0.0)
    assert_equal(accumulate(None, ids, 0.0), want)
    in_bf16 = torch.zeros_like(want["d_down"], dtype=torch.bfloat16)
    for batch in micro_batches(ids):
        in_bf16 += dense(batch)["d_down"]
    assert not torch.equal(in_bf16.float(), want["d_down"]), "a sum that bf16 holds tests nothing"


def test_main_grad_of_some_matrices_only_is_refused():
    b = on_device(ordinary()).leaves()
    b.gate.main_grad = torch.zeros(b.gate.shape, device=DEVICE)
    with pytest.raises(ValueError, match="main_grad: on a GPU, the gate, up and down matrices must all have one or none"):
        mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, tuning=TUNING)


# ---- frozen inputs ----

FROZEN = [
    ("x",), ("weights",), MATRICES, ("x", "weights"), ("x", *MATRICES), ("weights", *MATRICES), ("up",), ("x", "gate", "down"),
]  # fmt: skip


@pytest.mark.parametrize("names", FROZEN, ids=str)
def test_only_gradients_that_were_asked_for(names):
    plan = Plan([batch_of(random_ids(100, range(EXPERTS)))] * 2, frozen={0: names})
    assert_steps([run_steps(None, plan)], plan)


def test_nothing_asked_for_or_no_grad():
    batch = ordinary()
    want = dense(batch)["out"]
    for b, grad in ((on_device(batch), True), (on_device(batch).leaves(), False)):
        poison()
        with torch.set_grad_enabled(grad):
            out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, tuning=TUNING)
        assert not out.requires_grad and torch.equal(out.cpu(), want)


def test_frozen_experts_cost_no_memory():
    """A backward that needs no weight gradients allocates less, by their size."""
    peaks = []
    for frozen in ((), MATRICES):
        for _ in range(2):  # the second time nothing is made for the first time
            b = on_device(batch_of(random_ids(300, range(EXPERTS)))).leaves()
            for name in frozen:
                getattr(b, name).requires_grad_(False)
            out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, tuning=TUNING)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out.backward(b.d_out)
            peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak)
    gradients = sum(w.numel() * w.element_size() for w in (b.gate, b.up, b.down))
    assert peaks[0] - peaks[1] > 0.9 * gradients


# ---- load counters ----


def squared(function, *arguments):
    """More work after the layer, without which a recompute stops before the layer's end."""
    return function(*arguments).square()


def test_loads_are_counted_exactly_and_in_training_steps_only():
    """40,840 is no bf16 number. Masked slots count for no expert."""
    ids = torch.full((40_840 + 8, 2), -1)
    ids[:, 0] = 3
    ids[::5106] = torch.tensor([-1, 0])
    ids, layer = ids.to(DEVICE), build()
    want = [8, 0, 0, 40_840] + [0] * (EXPERTS - 4)
    x, weights = torch.ones(ids.shape[0], HIDDEN, dtype=torch.bfloat16, device=DEVICE), torch.ones(ids.shape, device=DEVICE)
    other = (x[:3], torch.tensor([[0, 1], [1, 2], [2, -1]], device=DEVICE), weights[:3])

    def step(*arguments) -> None:
        layer.routed(arguments[0].clone().requires_grad_(), *arguments[1:]).sum().backward()

    step(x, ids, weights)
    assert layer.tokens_per_expert.dtype == torch.int64 and layer.tokens_per_expert.tolist() == want
    layer.eval().routed(*other)
    layer.train()
    with torch.no_grad():
        layer.routed(*other)
    assert layer.tokens_per_expert.tolist() == want
    for reentrant in (False, True):
        step(*other)
        assert layer.tokens_per_expert.tolist() == [1, 2, 2] + [0] * (EXPERTS - 3)
        out = checkpoint(squared, layer.routed, x.clone().requires_grad_(), ids, weights, use_reentrant=reentrant)
        if not reentrant:
            assert layer.tokens_per_expert.tolist() == want
            layer.tokens_per_expert.fill_(-77)  # the recompute must leave it alone
        out.sum().backward()
        assert layer.tokens_per_expert.tolist() == ([-77] * EXPERTS if not reentrant else want)


# ---- recompute ----


def recomputed(group, x: torch.Tensor, ids: torch.Tensor | None, repetitions: int, ahead: bool = False) -> dict[str, torch.Tensor]:
    """A plain step of this rank's part, after checkpointed ones of both kinds with its bits. Without ids all logits are tied."""
    rank, ranks = ranks_of(group)
    layer = build(group, ahead=ahead)
    if ids is None:
        with torch.no_grad():
            layer.router.weight.zero_()
    x, ids = (None if t is None else t.tensor_split(ranks)[rank].to(DEVICE) for t in (x, ids))
    want = step_of_layer(layer, x, ids)
    for repetition in range(repetitions):
        poison()
        torch.cuda._sleep(int(torch.randint(1, 2_000_000, (1,), generator=torch.Generator().manual_seed(100 * repetition + rank))))
        reentrant = repetition % 2 == 0
        with launches(ahead):
            assert_equal(step_of_layer(layer, x, ids, lambda f, *args, r=reentrant: checkpoint(f, *args, use_reentrant=r)), want)
    return {name: t.cpu() for name, t in want.items()}


@both_kernels
@pytest.mark.parametrize("tied", [False, True])
def test_recompute_has_the_bits_of_the_forward(tied, ahead):
    x = torch.randn(90, SIZES[ahead]["hidden"]).bfloat16()
    recomputed(None, x, None if tied else random_ids(90, range(EXPERTS)), 100, ahead)


def test_recompute_between_processes():
    x = torch.randn(90, HIDDEN).bfloat16()
    parts = run_processes(recomputed, 2, x, None, 16)
    alone = recomputed(None, x, None, 0)
    for name in ("out", "d_x", "gate_EIH", "up_EIH", "down_EHI"):
        assert torch.equal(torch.cat([part[name] for part in parts]), alone[name]), name
    lowest = [90, 90] + [0] * (EXPERTS - 2)  # equal logits choose the lowest experts
    assert all(part["counts"].tolist() == lowest for part in (*parts, alone))


# ---- streams and the life of memory ----


@both_kernels
def test_calls_on_two_streams_take_turns(ahead):
    """Two layers on two streams share a workspace, and do not disturb each other."""
    layers = [build(ahead=ahead), build(seed=1, ahead=ahead)]
    xs = [torch.randn(tokens, SIZES[ahead]["hidden"], device=DEVICE).bfloat16() for tokens in (700, 300)]
    with launches(ahead):
        want = [step_of_layer(layer, x) for layer, x in zip(layers, xs, strict=True)]
    streams = [torch.cuda.Stream() for _ in layers]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for repeat in range(30):
        got = []
        for layer, x, stream in zip(layers, xs, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(torch.randint(1, 2_000_000, (1,))))
                got.append(step_of_layer(layer, x))
        torch.cuda.synchronize()
        for mine, other in zip(got, want, strict=True):
            try:
                assert_equal(mine, other)
            except AssertionError as error:
                raise AssertionError(f"repeat {repeat}: {error}") from error


@both_kernels
def test_backward_from_another_stream(ahead):
    layer, x = build(ahead=ahead), torch.randn(500, SIZES[ahead]["hidden"], device=DEVICE).bfloat16()
    with launches(ahead):
        want = step_of_layer(layer, x)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    one.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one):
        torch.cuda._sleep(10_000_000)
        out = layer(leaf)
    other.wait_stream(one)
    with torch.cuda.stream(other):
        (out * out.detach()).sum().backward()
    torch.cuda.synchronize()
    assert_equal({"out": out.detach(), "d_x": leaf.grad, "gate_EIH": layer.gate_EIH.grad}, want, ("out", "d_x", "gate_EIH"))


@both_kernels
def test_memory_that_grows_or_is_freed_while_another_stream_works(ahead):
    """A workspace made on one stream, used on a second one and outgrown there: nobody gets its memory before that stream is done."""
    layer = build(experts=17, ahead=ahead)  # a workspace of its own,
    layer.tuning = mok.Tuning()  # as large as its largest call
    small, large = (torch.randn(tokens, SIZES[ahead]["hidden"], device=DEVICE).bfloat16() for tokens in (200, 3000))
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad(), hopper_launches(int(ahead)):
        with torch.cuda.stream(one):
            want = layer(small)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(40_000_000)
            x = small.clone()
            got = layer(x)
            del x
            grown = layer(large)
        with torch.cuda.stream(one):
            virtual.poison()
        virtual.poison()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
        assert torch.equal(layer(large), grown)


def test_nothing_grows():
    layer = build(experts=18)  # a workspace of its own
    x = torch.randn(1000, HIDDEN, device=DEVICE).bfloat16()

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def recomputed_step(tokens: int, reentrant: bool) -> None:
        step_of_layer(layer, x[:tokens], run=lambda f, *args: checkpoint(f, *args, use_reentrant=reentrant))

    for reentrant in (False, True):
        recomputed_step(1000, reentrant)
    step_of_layer(layer, x)
    step_of_layer(build(experts=18), x)
    warm, reserved = held(), torch.cuda.memory_reserved()
    for tokens in torch.randint(0, 1001, (200,)).tolist():
        step_of_layer(layer, x[:tokens])
    assert held() <= warm + 2**20, "many numbers of tokens"
    for _ in range(50):
        step_of_layer(build(experts=18), x[:100])
    assert held() <= warm + 2**20, "layers one after the other"
    for i in range(200):
        recomputed_step(700, i % 2 == 0)
    assert held() <= warm + 2**20, "recomputed steps"
    assert torch.cuda.memory_reserved() <= reserved + 64 * 2**20
    layers = [build(experts=18) for _ in range(60)]
    parameters = sum(p.numel() * p.element_size() for other in layers for p in other.parameters())
    counts = sum(other.tokens_per_expert.numel() * 8 for other in layers)
    with torch.no_grad():
        for other in layers:
            other(x)
    assert held() <= warm + 1.05 * (parameters + counts) + 2**20, "sixty layers have one workspace"


# ---- torch.compile, graphs ----


def step_by(function, batch: Batch) -> dict[str, torch.Tensor]:
    b = on_device(batch).leaves()
    poison()
    out = function(b.x, b.ids, b.weights, b.gate, b.up, b.down, tuning=TUNING)
    out.backward(b.d_out)
    return {name: t.cpu() for name, t in {"out": out.detach(), **b.gradients()}.items()}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_for_any_number_of_tokens(backend):
    """After an eager call with the most tokens: whole graphs, the exact bits, few recompiles; also with no route at all."""
    from torch._dynamo.testing import CompileCounterWithBackend  # here, as every process of the other tests would wait for it

    torch._dynamo.reset()
    step_by(mok.moe, batch_of(random_ids(4096, range(EXPERTS))))
    counter, first = CompileCounterWithBackend(backend), 0
    compiled = torch.compile(mok.moe, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (0, 1, 17, 256, 4096, 100):
        batch = batch_of(random_ids(tokens, range(EXPERTS)), seed=tokens)
        assert_equal(step_by(compiled, batch), dense(batch))
        first = first or counter.frame_count
    assert first >= 1 and counter.frame_count - first <= 2, "0 and 1 may have graphs of their own, all other numbers share one"
    batch = batch_of(torch.full((70, 2), -1))
    assert_equal(step_by(compiled, batch), dense(batch))


def routes(tokens: int) -> list[torch.Tensor]:
    """Balanced, all to one expert, all masked, and balanced again."""
    balanced = random_ids(tokens, range(EXPERTS))
    return [balanced, torch.full((tokens, 2), 9), torch.full((tokens, 2), -1), balanced]


def captured(group, ahead: bool) -> list[dict[str, torch.Tensor]]:
    """Replays of one graph of this rank's forward and backward, for each of the routes."""
    rank, ranks = ranks_of(group)
    batches = [replace(batch_of(routes(300)[0], **SIZES[ahead]), ids=ids).local(rank, ranks) for ids in routes(300)]
    b = on_device(batches[0]).leaves()
    inputs = [getattr(b, name) for name in NAMES]

    def step() -> tuple[torch.Tensor, ...]:
        out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, num_experts=EXPERTS, group=group, tuning=TUNING)
        return out.detach(), *torch.autograd.grad(out, inputs, b.d_out)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with launches(ahead), torch.cuda.graph(graph, stream=stream):
        kept = step()
    results = []
    for batch in batches:
        b.ids.copy_(batch.ids)
        poison()
        graph.replay()
        results.append({name: t.cpu() for name, t in zip(("out", *(f"d_{name}" for name in NAMES)), kept, strict=True)})
    eager = {name: t.cpu() for name, t in zip(results[0], step(), strict=True)}
    assert_equal(eager, results[-1])
    return results


@both_kernels
@pytest.mark.parametrize("ranks", [1, 2])
def test_capture_and_replay(ranks, ahead):
    parts = [captured(None, ahead)] if ranks == 1 else run_processes(captured, ranks, ahead)
    assert_steps(parts, Plan([replace(batch_of(routes(300)[0], **SIZES[ahead]), ids=ids) for ids in routes(300)]))


# ---- dtypes and autocast ----


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_carry_the_dtype_of_their_input(dtype, weight_dtype):
    batch = batch_of(random_ids(40, range(EXPERTS)), dtype=dtype, weight_choices=(-0.5, 0.25, 0.5))
    batch.weights = batch.weights.to(weight_dtype)
    b = on_device(batch).leaves()
    poison()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, tuning=TUNING)
    assert out.dtype == torch.bfloat16
    out.backward(b.d_out.to(out.dtype))
    got = {name: t.cpu() for name, t in {"out": out.detach(), **b.gradients()}.items()}
    want = dense(replace(batch, **{name: getattr(batch, name).bfloat16() for name in ("x", "d_out", *MATRICES)}))
    assert_equal(got, {"out": want["out"], **{f"d_{name}": want[f"d_{name}"].to(getattr(batch, name).dtype) for name in NAMES}})


def test_a_layer_under_autocast():
    """fp32 parameters and x against the same layer on the CPU."""
    torch.manual_seed(0)
    config = mok.MoEConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, top_k=2)
    host, layer = mok.MoE(config), mok.MoE(config, device=DEVICE, tuning=TUNING)
    with torch.no_grad():
        host.router.weight.normal_()  # scores far apart, so that rounding does not choose
    layer.load_state_dict(host.state_dict())
    x, results = torch.randn(200, HIDDEN), []
    for of, device in ((host, torch.device("cpu")), (layer, DEVICE)):
        leaf = x.to(device, copy=True).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            out = of(leaf)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        assert leaf.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in of.parameters())
        grads = {name: p.grad.cpu() for name, p in of.named_parameters()}
        results.append({"out": out.detach().float().cpu(), "d_x": leaf.grad.cpu(), **grads})
    assert_close(results[1], results[0], 3e-2)


def test_dtypes_that_are_refused():
    b = on_device(Batch.random(tokens=10, hidden=64, width=32, experts=2))
    with pytest.raises(TypeError, match=r"x has dtype torch\.float32: must be torch\.bfloat16 on a GPU"):
        mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down)
    with (
        torch.autocast(DEVICE.type, torch.float16),
        pytest.raises(TypeError, match=r"x has dtype torch\.float16: must be torch\.bfloat16 on a GPU"),
    ):
        mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down)
    with pytest.raises(TypeError, match="gate_EIH has dtype"):
        mok.moe(b.x.bfloat16(), b.ids, b.weights, b.gate, b.up, b.down)
    with pytest.raises(TypeError, match="weights has dtype"):
        mok.moe(b.x, b.ids, b.weights.long(), b.gate, b.up, b.down)


# ---- groups that live, fail and end ----


def lives(group, folder: str) -> list[list[dict[str, torch.Tensor | None]]]:
    """A step in each of several lives of the default group, whose name is always the same, and of groups with names of their own."""
    rank, ranks = ranks_of(group)
    del group
    dist.destroy_process_group()
    results = []
    for life in range(4):
        dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(f"{folder}/{life}", ranks))
        results.append(run_steps(dist.group.WORLD, Plan([ordinary()])))
        if life < 3:
            dist.destroy_process_group()
        gc.collect()
    for _ in range(4):
        other = dist.new_group(backend="gloo")
        results.append(run_steps(other, Plan([ordinary()])))
        dist.destroy_process_group(other)
        del other
        gc.collect()
    assert len(autograd._workspaces) <= 2, "of the default group and the last one"
    return results


def test_lives_of_a_group():
    with tempfile.TemporaryDirectory() as folder:
        parts = run_processes(lives, 2, folder)
    for life in range(8):
        assert_steps([part[life] for part in parts], Plan([ordinary()]))


def faults(group) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Rank 1 first refuses its arguments, then leaves out a backward. The other one is told in time, and so is rank 1; both go on."""
    rank, ranks = ranks_of(group)
    b = on_device(ordinary().local(rank, ranks)).leaves()
    run_steps(group, Plan([ordinary()]))  # compiles, which may take longer than the limit
    for workspace in autograd._workspaces.values():
        workspace.timeout_s = 4.0

    def call(x: torch.Tensor) -> torch.Tensor:
        out = mok.moe(x, b.ids, b.weights, b.gate, b.up, b.down, num_experts=EXPERTS, group=group, tuning=TUNING)
        torch.cuda.synchronize()
        return out

    def refuse() -> None:
        if rank == 1:
            with pytest.raises(ValueError, match="gate_EIH has shape"):
                call(torch.nn.functional.pad(b.x, (0, 16)))
        else:
            call(b.x)

    def leave_out() -> None:
        out = call(b.x)
        if rank == 0:
            out.backward(b.d_out)
            torch.cuda.synchronize()

    times, first = [], call(b.x)
    for fault in (refuse, leave_out):
        start = time.monotonic()
        fault()
        if rank == 0:
            with pytest.raises(FabricError, match="rank 0, task 1: waited for barrier"):
                call(b.x)
        times.append(time.monotonic() - start)
        dist.barrier(group)
        if rank == 1:  # its memory holds the report
            with pytest.raises(FabricError, match="rank 0, task 1: waited for barrier"):
                call(b.x)
                call(b.x)
        dist.barrier(group)
        again = call(b.x)
        assert torch.equal(again, first)
    for name in NAMES:
        getattr(b, name).grad = None  # a lost backward leaves anything there
    again.backward(b.d_out)
    return times, first.detach().cpu(), b.gate.grad.cpu()


def test_a_rank_that_fails_is_told_of_in_time_and_the_next_call_works():
    parts = run_processes(faults, 2)
    assert max(parts[0][0]) < 60, "the limit is 4 s; ranks that share a GPU take turns"
    want = dense(ordinary())
    assert torch.equal(torch.cat([out for _, out, _ in parts]), want["out"])
    assert torch.equal(torch.cat([gate for _, _, gate in parts]), want["d_gate"])


SCRIPT = """
import os, sys, torch, torch.distributed as dist, mok
rank, size, store, fails = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "fails"
gpus = torch.cuda.device_count()
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
if gpus < size:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
torch.cuda.set_device(rank % gpus)
dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
config = mok.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=16, top_k=2)
tuning = mok.Tuning(minibatch=128, macrobatch=256, saved_rows=128, timeout_s=20)
torch.manual_seed(0)
layer = mok.MoE(config, dist.group.WORLD, dtype=torch.bfloat16, device="cuda", tuning=tuning)
out = layer(torch.ones(5, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True))
torch.cuda.synchronize()
if fails and rank == 1:
    raise RuntimeError("a fault of its own")
out.sum().backward()
torch.cuda.synchronize()
layer(torch.ones(5, 256, dtype=torch.bfloat16, device="cuda"))  # raises what ended the backward
torch.cuda.synchronize()
print("done", flush=True)
"""


@pytest.mark.parametrize("mode", ["ends", "fails"])
def test_processes_end(mode):
    """By themselves, without closing anything, and with a code when one of them raises between forward and backward."""
    environment = {**os.environ, "PYTHONPATH": str(Path(mok.__file__).parents[1])}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [[sys.executable, "-c", SCRIPT, str(rank), "2", f"{folder}/store", mode] for rank in range(2)]
        ranks = [subprocess.Popen(a, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in arguments]
        try:
            outputs = [rank.communicate(timeout=150) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (output, errors) in zip(ranks, outputs, strict=True):
        if mode == "ends":
            assert rank.returncode == 0 and output == "done\n", errors
        else:
            assert rank.returncode != 0 and output == "", errors
    if mode == "fails":
        assert re.search(r"FabricError: rank 0, task 1: waited for barrier", outputs[0][1]), outputs[0][1]
        assert "a fault of its own" in outputs[1][1]


def beside_nccl(group, ahead: bool) -> list[dict[str, torch.Tensor | None]]:
    """A hundred steps beside all-gathers on another stream, which rank 0 launches before its step and rank 1 after it."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    rank, ranks = ranks_of(group)
    nccl, side = dist.new_group(backend="nccl"), torch.cuda.Stream()
    numbers = torch.full((2**22,), float(rank), device=DEVICE)
    gathered = torch.empty(ranks * 2**22, device=DEVICE)
    b = on_device(ordinary(**SIZES[ahead]).local(rank, ranks))

    def gather() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_gather_into_tensor(gathered, numbers, group=nccl)

    def step() -> dict[str, torch.Tensor]:
        leaves = b.leaves()
        out = mok.moe(
            leaves.x, leaves.ids, leaves.weights, leaves.gate, leaves.up, leaves.down, num_experts=EXPERTS, group=group, tuning=TUNING
        )  # fmt: skip
        out.backward(leaves.d_out)
        return {"out": out.detach(), **leaves.gradients()}

    with launches(ahead):
        first = step()
    gather()
    torch.cuda.synchronize()
    for _ in range(100):
        if rank == 0:
            gather()
        got = step()
        if rank == 1:
            gather()
        torch.cuda.current_stream().wait_stream(side)
        assert_equal(got, first)
        assert torch.equal(gathered.view(ranks, -1)[:, 0], torch.arange(float(ranks), device=DEVICE))
        gathered.zero_()
    return [{name: t.cpu() for name, t in first.items()}]


@needs_two_gpus
@both_kernels
def test_beside_nccl(ahead):
    assert_steps(run_processes(beside_nccl, 2, ahead), Plan([ordinary(**SIZES[ahead])]))
