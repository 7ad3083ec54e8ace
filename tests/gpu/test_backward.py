"""Forward and backward on a GPU: output and every gradient against fp64, the promises about bits, extremes, accumulation, capture."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from dataclasses import replace

from checks import both_kernels, hopper_launches, nothing_waits
from virtual import DEVICE, Problem, poison, poison_workspace
from virtual_backward import Group, assert_near, expected, make_d_y, many_rows

import mok
from mok import Tuning
from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan, Needs

SIZES = {  # tokens, hidden, width, experts, K, shared width
    "plain": (1024, 1024, 512, 8, 2, 0),
    "shared": (1000, 1024, 512, 8, 2, 768),
    "ragged": (777, 2880, 1440, 9, 4, 0),
    "narrow": (513, 128, 96, 5, 3, 160),
    "fine": (2048, 2048, 768, 16, 8, 768),
}
"""Deeper ones are those of models, in test_shapes.py."""
SMALL = BackwardPlan(ring_tiles=8, group_tiles=2)


def equal(got, want, what) -> None:
    assert got.keys() == want.keys(), what
    for name in got:
        assert torch.equal(got[name], want[name]), (what, name)


@pytest.mark.parametrize("name", SIZES)
def test_every_gradient_near_fp64_and_equal_for_every_number_of_ranks(name):
    tokens, hidden, width, experts, top_k, shared_width = SIZES[name]
    problem = Problem(tokens, hidden, width, experts, top_k, masked=0.1, shared_width=shared_width)
    d_y = make_d_y(problem)
    want, first = expected(problem, d_y), None
    for ranks in (1, 2, 3, 4):
        got = Group(problem, d_y, ranks).run()
        assert_near(got, want)
        if ranks > 1:  # each rank's share of the shared experts' gradients: their sum is the user's
            got = {n: v for n, v in got.items() if not n.startswith("shared")}
        first = got if first is None else {n: first[n] for n in got}
        equal(got, first, ranks)


def test_a_hundred_runs_have_the_same_bits():
    problem, d_y = many_rows()
    with hopper_launches(100, 100):
        group = Group(problem, d_y, 1)
        first = group.run()
        assert_near(first, expected(problem, d_y))
        for repeat in range(100):
            equal(group.run(), first, repeat)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bits_do_not_depend_on_time(ranks):
    problem, d_y = many_rows()
    with hopper_launches(100 * ranks, 100 * ranks):
        first = Group(problem, d_y, 1).run()
        first = {n: v for n, v in first.items() if not n.startswith("shared")}
        group = Group(problem, d_y, ranks, SMALL, saved_rows=2000)
        for repeat in range(100):
            got = group.run(delay=True)
            equal({n: got[n] for n in first}, first, repeat)


KNOBS = [
    dict(ring_tiles=2), dict(ring_tiles=12, group_tiles=3, parts=1), dict(parts=8, num_sms=1), dict(num_sms=7, ring_tiles=16),
    dict(num_stages=3, block_h=512, run=4), dict(run=1), dict(run=3), dict(block_n=128, num_stages=3),
    dict(block_n=128, num_warps=4, num_stages=3, programs_per_sm=2), dict(half_tiles=False),
]  # fmt: skip


@pytest.mark.parametrize("changes", KNOBS, ids=str)
def test_bits_do_not_depend_on_knobs(changes):
    problem, d_y = many_rows()
    equal(Group(problem, d_y, 1, BackwardPlan(**changes)).run(), Group(problem, d_y, 1).run(), changes)


@pytest.mark.parametrize("saved_rows", [0, 1000])
def test_bits_do_not_depend_on_what_was_saved_or_the_minibatch(saved_rows):
    problem, d_y = many_rows()
    first = Group(problem, d_y, 1).run()
    for tiles in (1, 5):
        plan = ForwardPlan(minibatch_tiles=tiles, ring_tiles=2 * tiles)
        equal(Group(problem, d_y, 1, saved_rows=saved_rows, forward_plan=plan).run(), first, (saved_rows, tiles))


TUNINGS = [
    Tuning(minibatch=minibatch, macrobatch=minibatch * minibatches, num_sms=num_sms, saved_rows=saved_rows)
    for minibatch in (128, 384, 1024, 2048, 4096)
    for minibatches in (1, 2, 7)
    for num_sms in (0, 20, 1)
    for saved_rows in (None, 0, 640)
]


@pytest.mark.parametrize("ahead, sizes", [(False, (1500, 512, 256, 12, 4)), (True, (3000, 384, 384, 12, 2))], ids=["ordinary", "hopper"])
def test_every_tuning(ahead, sizes):
    """One problem through `mok.moe` with every combination of knobs: near fp64 once, then the same bits."""
    problem = Problem(*sizes, masked=0.05)
    d_y = make_d_y(problem)
    names, first = ("d_x", "d_weights", "gate", "up", "down"), None
    for tuning in TUNINGS:
        leaves = [t.clone().requires_grad_() for t in (problem.x_TH, problem.weights_TK, problem.gate, problem.up, problem.down)]
        poison()
        with hopper_launches(int(ahead), int(ahead)):
            out = mok.moe(leaves[0], problem.ids_TK, *leaves[1:], tuning=tuning)
            poison()
            out.backward(d_y)
        got = {"out": out.detach(), **dict(zip(names, (leaf.grad for leaf in leaves), strict=True))}
        if first is None:
            first = got
            assert_near(got, expected(problem, d_y))
        equal(got, first, tuning)


def test_a_token_does_not_depend_on_the_others():
    problem = Problem(600, 512, 256, 6, 2, shared_width=256)
    d_y = make_d_y(problem)
    whole = Group(problem, d_y, 1).run()
    some = slice(100, 350)
    problem.x_TH, problem.ids_TK, problem.weights_TK = problem.x_TH[some], problem.ids_TK[some], problem.weights_TK[some]
    got = Group(problem, d_y[some], 1).run()
    for name in ("out", "d_x", "d_weights"):
        assert torch.equal(got[name], whole[name][some]), name


@pytest.mark.parametrize(("ranks", "ahead"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_extremes(ranks, ahead):
    hidden, width = (384, 384) if ahead else (512, 256)
    problem = Problem(900, hidden, width, 8, 2, clamp=1.0, shared_width=width, shared_clamp=0.5)
    # Small integers and sixty-fourths: gate and up are exact in any order, so that nobody is clipped on one side only.
    problem.x_TH = torch.randint(-3, 4, problem.x_TH.shape, device=DEVICE).bfloat16()
    problem.gate, problem.up = (torch.randint(-3, 4, problem.gate.shape, device=DEVICE).bfloat16() / 64 for _ in range(2))
    problem.shared = (*(torch.randint(-3, 4, w.shape, device=DEVICE).bfloat16() / 64 for w in problem.shared[:2]), problem.shared[2])
    d_y = make_d_y(problem)
    for ids in (-1, 0, 7, None):
        problem.ids_TK = torch.randint(-1, 8, (900, 2), device=DEVICE) if ids is None else torch.full((900, 2), ids, device=DEVICE)
        problem.weights_TK = torch.randn(900, 2, device=DEVICE)
        with hopper_launches(ranks * ahead, ranks * ahead):
            got = Group(problem, d_y, ranks, SMALL).run()
        assert_near(got, expected(problem, d_y))
        if ids == 0:
            assert not got["gate"][1:].any() and not got["down"][1:].any()


def test_only_what_is_asked_for():
    problem = Problem(700, 512, 256, 6, 2, shared_width=256)
    d_y = make_d_y(problem)
    whole = Group(problem, d_y, 1).run()
    for x, weights, experts in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        needs = Needs(bool(x), bool(weights), bool(experts), bool(experts))
        got = Group(problem, d_y, 1, needs=needs).run()
        names = {"out", *["d_x"] * x, *["d_weights"] * weights}
        names |= {*["gate", "up", "down", "shared gate", "shared up", "shared down"] * experts}
        assert got.keys() == names
        equal(got, {n: whole[n] for n in names}, needs)


def test_sums_into_fp32_accumulators():
    problem = Problem(1500, 512, 256, 6, 2, shared_width=256)
    problem.ids_TK[problem.ids_TK == 4] = 1
    d_y = make_d_y(problem)
    plain = Group(problem, d_y, 1).run()
    mains = {n: torch.full(v.shape, 7.0, device=DEVICE) for n, v in plain.items() if n not in ("out", "d_x", "d_weights")}
    group = Group(problem, d_y, 1, replace(SMALL), mains=mains)  # warms up without adding
    for _ in range(3):
        group.run()
    for name, main in mains.items():
        assert torch.allclose((main - 7) / 3, plain[name].float(), rtol=6e-3, atol=2e-4), name
    assert (mains["gate"][4] == 7).all() and (mains["down"][4] == 7).all()


def of_size(ahead: bool) -> Problem:
    """At sizes of other tests' kernels, `many_rows`' among them."""
    width, shared_width = (768, 512) if ahead else (512, 256)
    return Problem(1500, 1024, width, 8, 4, shared_width=shared_width)


@both_kernels
@pytest.mark.parametrize("ranks", [1, 2])
def test_forward_and_backward_wait_for_nothing(ranks, ahead):
    problem = of_size(ahead)
    group = Group(problem, make_d_y(problem), ranks, saved_rows=0)
    group.run()
    with hopper_launches(ranks * ahead, ranks * ahead), nothing_waits():
        for rank, stream in enumerate(group.streams):
            with torch.cuda.stream(stream):
                group.one_rank(rank)
    torch.cuda.synchronize()
    for workspace in group.workspaces:
        workspace.check()


@both_kernels
def test_capture_and_replay_with_changing_routes(ahead):
    problem = of_size(ahead)
    d_y = make_d_y(problem)
    group = Group(problem, d_y, 1, saved_rows=0)
    routes = [problem.ids_TK.clone(), torch.zeros_like(problem.ids_TK) + 3, torch.zeros_like(problem.ids_TK) - 1, problem.ids_TK.clone()]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        group.one_rank(0)
        torch.cuda.synchronize()
        with hopper_launches(int(ahead), int(ahead)), torch.cuda.graph(graph, stream=stream):
            out = group.one_rank(0)
    for route in routes:
        problem.ids_TK = route
        group.inputs[0][1].copy_(route)
        poison_workspace(group.workspaces[0])
        graph.replay()
        torch.cuda.synchronize()
        assert_near(group.named([out]), expected(problem, d_y))
