"""The backward for Hopper, whose loads run on over tasks: the ordinary kernel's bits in every gradient, repeated on poisoned memory and
with random delays."""

from __future__ import annotations

import dataclasses
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from virtual import DEVICE, Problem
from virtual_backward import Group, assert_near, expected, make_d_y, many_rows

from mok.kernels import backward_hopper, launch_backward, memory
from mok.kernels.groups import AT, HIDDEN, KIND, PULL, RECORD
from mok.kernels.launch_backward import BackwardPlan, Needs

ORDINARY = BackwardPlan(prefetch=False)
SMALL = BackwardPlan(ring_tiles=8, group_tiles=2)
ALL_SAVED = 1 << 20
SIZES = {  # tokens, hidden, width, experts, K
    "plain": (1024, 1024, 512, 8, 2),
    "ragged": (777, 2944, 1408, 9, 4),
    "fine": (2048, 2048, 768, 16, 8),
    "deep": (700, 7168, 2048, 6, 4),
    "fewest steps": (600, 384, 384, 5, 2),
    "one expert": (1500, 512, 1024, 1, 1),
    "half tiles": (300, 512, 384, 24, 2),
    "one token": (1, 512, 384, 8, 2),
}


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """How often the kernel for Hopper was launched."""
    count, real = [0], backward_hopper.launch

    def launch(*arguments):
        count[0] += 1
        real(*arguments)

    monkeypatch.setattr(backward_hopper, "launch", launch)
    return count


def equal(got, want, what) -> None:
    """What is in want: over several ranks the shared experts' gradients are shares of a sum."""
    for name in want:
        differs = (got[name] != want[name]).flatten(1).any(1).nonzero()
        assert not len(differs), (what, name, len(differs), int(differs[0]))


def without_shared(got):
    return {name: value for name, value in got.items() if not name.startswith("shared")}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_of_the_ordinary_kernel(name, ranks, launches):
    problem = Problem(*SIZES[name], masked=0.1)
    d_y = make_d_y(problem)
    first = Group(problem, d_y, 1, ORDINARY).run()
    assert not launches[0]
    assert_near(first, expected(problem, d_y))
    group = Group(problem, d_y, ranks)
    for repeat in range(20):
        equal(group.run(), first, repeat)
    assert launches[0] >= 20 * ranks


@pytest.mark.parametrize("saved_rows", [0, 1000, ALL_SAVED])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_do_not_depend_on_time(ranks, saved_rows):
    """Rings used again, experts cut by groups, late ranks; gate and up computed again where they were not saved."""
    problem, d_y = many_rows()
    first = without_shared(Group(problem, d_y, 1, ORDINARY).run())
    group = Group(problem, d_y, ranks, SMALL, saved_rows=saved_rows)
    for repeat in range(20):
        equal(group.run(delay=True), first, repeat)


KNOBS = [
    dict(ring_tiles=2), dict(ring_tiles=12, group_tiles=3, parts=1), dict(parts=8, num_sms=1), dict(num_sms=7, ring_tiles=16),
    dict(group_tiles=1000), dict(half_tiles=False), dict(trace=True), dict(run=1),
]  # fmt: skip


@pytest.mark.parametrize("changes", KNOBS, ids=str)
def test_bits_do_not_depend_on_knobs(changes, launches):
    problem, d_y = many_rows()
    first = Group(problem, d_y, 1, ORDINARY).run()
    for saved_rows in (1000, ALL_SAVED):
        equal(Group(problem, d_y, 1, BackwardPlan(**changes), saved_rows=saved_rows).run(), first, saved_rows)
    assert launches[0] >= 2


SHARED_SIZES = {  # tokens, hidden, width, experts, K, width of the shared experts
    "plain": (1024, 1024, 512, 8, 2, 512),
    "ragged": (777, 2944, 1408, 9, 4, 640),
    "deep": (700, 7168, 2048, 6, 4, 2048),
    "fewest steps": (600, 384, 384, 5, 2, 384),
    "one token": (1, 512, 384, 8, 2, 640),
}


@pytest.mark.parametrize("saved_rows", [0, ALL_SAVED])
@pytest.mark.parametrize(("name", "clamp"), [(name, 1.0 if i % 2 else None) for i, name in enumerate(SHARED_SIZES)])
def test_shared_experts(name, clamp, saved_rows):
    *sizes, shared_width = SHARED_SIZES[name]
    problem = Problem(*sizes, masked=0.1, shared_width=shared_width, clamp=clamp, shared_clamp=clamp)
    d_y = make_d_y(problem)
    first = Group(problem, d_y, 1, ORDINARY).run()
    for plan in (BackwardPlan(), SMALL):
        for ranks in (1, 2):
            group = Group(problem, d_y, ranks, plan, saved_rows=saved_rows)
            for repeat in range(5):
                want = first if ranks == 1 else without_shared(first)
                equal(group.run(delay=bool(repeat % 2)), want, (plan, ranks, repeat))


NEEDS = [Needs(x=False), Needs(weights=False), Needs(experts=False, shared=False), Needs(False, True, False, False)]


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_what_is_asked_for(needs, launches):
    problem, d_y = many_rows()
    first = Group(problem, d_y, 1, ORDINARY).run()
    got = Group(problem, d_y, 1, needs=needs).run()
    equal(got, {name: first[name] for name in got}, needs)
    assert launches[0]


def test_what_it_cannot_compute_the_ordinary_kernel_does(launches):
    """Sizes too small, or no multiples of a tile's; runs of tiles."""
    for options in (dict(width=256), dict(hidden=256), dict(width=320), dict(shared_width=256)):
        sizes = dict(tokens=300, hidden=512, width=384, experts=4, top_k=2) | options
        problem = Problem(**sizes)
        d_y = make_d_y(problem)
        equal(Group(problem, d_y, 1).run(), Group(problem, d_y, 1, ORDINARY).run(), options)
    problem, d_y = many_rows()
    first = Group(problem, d_y, 1, ORDINARY).run()
    equal(Group(problem, d_y, 1, BackwardPlan(run=4)).run(), first, "run")
    assert not launches[0]


@pytest.mark.parametrize("changes", [{}, dict(ring_tiles=8, group_tiles=4)], ids=str)
def test_gradients_that_are_added_to(changes, launches):
    """The bits of the ordinary kernel, twice into the same fp32 gradients; with a small ring sums are cut. An expert without rows adds
    nothing."""
    problem, d_y = many_rows()
    problem.ids_TK[problem.ids_TK == 3] = 4
    weights = dict(zip(("gate", "up", "down"), (problem.gate, problem.up, problem.down), strict=True))
    weights |= dict(zip(("shared gate", "shared up", "shared down"), problem.shared, strict=True))
    found = []
    for plan in (ORDINARY, BackwardPlan()):
        generator = torch.Generator(DEVICE).manual_seed(1)
        mains = {name: torch.randn(weight.shape, device=DEVICE, generator=generator) for name, weight in weights.items()}
        before = {name: main.clone() for name, main in mains.items()}
        group = Group(problem, d_y, 1, dataclasses.replace(plan, **changes), mains=mains)
        results = [group.run() for _ in range(2)]
        for name, main in mains.items():
            assert not torch.equal(main, before[name]), name
            assert name.startswith("shared") or torch.equal(main[3], before[name][3]), name
        found.append((results, mains))
        assert bool(launches[0]) == plan.prefetch
    for one, other in zip(found[0][0], found[1][0], strict=True):
        equal(other, one, changes)
    equal(found[1][1], found[0][1], changes)


def test_a_lost_task_is_reported_on_time():
    """d_x and weights' gradients wait for what no hidden task announces; no load is under way when the programs end, and the next call is
    right."""
    problem = Problem(400, 512, 384, 4, 2)
    d_y = make_d_y(problem)
    group = Group(problem, d_y, 1, timeout_s=2.0)
    first = group.run()
    workspace = group.workspaces[0]
    real = launch_backward.Order.write
    pull = torch.zeros(RECORD.value, dtype=torch.int32, device=DEVICE)  # of what was pulled
    pull[KIND.value], pull[AT.value] = PULL.value, -1

    def without_hidden(order, programs):
        real(order, programs)
        records = order.tables["list_ptr"].view(-1, RECORD.value)
        records[records[:, KIND.value] == HIDDEN.value] = pull

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_backward.Order, "write", without_hidden)
        group.one_rank(0)
    torch.cuda.synchronize()
    failure = workspace.memory.failure()
    assert failure and memory.STATES[failure[0]["what"]] in ("d_gate_ready", "group_ready"), failure
    workspace.memory.clear_failure()
    equal(group.run(), first, "after a failure")
