"""The forward for Hopper, whose loads run on over tasks: the ordinary kernel's bits, repeated on poisoned memory and with random delays."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from checks import hopper_launches
from virtual import Group, Problem, assert_close

from mok.kernels import launch, memory
from mok.kernels.launch import ForwardPlan
from mok.kernels.tasks import END, UP

ORDINARY = ForwardPlan(prefetch=False)
SMALL = ForwardPlan(minibatch_tiles=4, ring_tiles=8)
SIZES = {  # tokens, hidden, width, experts, K
    "plain": (1024, 1024, 512, 8, 2),
    "ragged": (777, 2880, 2880, 9, 4),
    "fine": (2048, 4096, 1024, 16, 8),
    "deep": (700, 7168, 2048, 6, 4),
    "odd slices": (400, 640, 1408, 4, 2),
    "fewest steps": (600, 264, 264, 5, 2),
    "many rows": (2500, 1024, 768, 12, 4),
    "half tiles": (300, 512, 384, 24, 2),
    "one token": (1, 512, 320, 8, 2),
}


@pytest.fixture(autouse=True)
def launches(request):
    """Every test but one launches the kernel for Hopper, and that one never."""
    with hopper_launches(int(request.function is not test_a_layer_it_cannot_run_runs_the_ordinary_kernel)):
        yield


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_of_the_ordinary_kernel(name, ranks):
    problem = Problem(*SIZES[name], masked=0.1)
    first = Group(problem, 1, ORDINARY).run()
    assert_close(first, problem.expected())
    group = Group(problem, ranks)
    for repeat in range(20):
        assert torch.equal(group.run(), first), repeat


@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_do_not_depend_on_time(ranks):
    """Rings used again, so that tasks wait for places, and late ranks: loads are begun early for some tasks and not for others."""
    problem = Problem(2500, 1024, 768, 12, 4, masked=0.05)
    first = Group(problem, 1, ORDINARY).run()
    group = Group(problem, ranks, SMALL)
    for repeat in range(20):
        assert torch.equal(group.run(delay=True), first), repeat


@pytest.mark.parametrize("name", SIZES)
def test_rows_that_are_gathered(name):
    """One rank pulls nothing: whole and half tiles, steps that are not full, places of h used again."""
    problem = Problem(*SIZES[name], masked=0.1)
    first = Group(problem, 1, ORDINARY).run()
    for plan in (ForwardPlan(gather=1), ForwardPlan(gather=1, minibatch_tiles=4, ring_tiles=8, num_sms=20)):
        group = Group(problem, 1, plan)
        for repeat in range(20):
            assert torch.equal(group.run(delay=bool(repeat % 2)), first), (plan, repeat)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SIZES)
def test_own_rows_that_are_gathered(name, ranks):
    """Several ranks pull only each other's rows, into places that are used again, too."""
    problem = Problem(*SIZES[name], masked=0.1)
    first = Group(problem, 1, ORDINARY).run()
    for plan in (ForwardPlan(gather=4), ForwardPlan(gather=4, minibatch_tiles=4, ring_tiles=8, num_sms=20)):
        group = Group(problem, ranks, plan)
        for repeat in range(20):
            assert torch.equal(group.run(delay=bool(repeat % 2)), first), (plan, repeat)


CHANGES = [dict(num_sms=1), dict(num_sms=7, minibatch_tiles=2, ring_tiles=4), dict(parts=8), dict(half_tiles=False), dict(trace=True)]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_bits_do_not_depend_on_knobs(changes):
    problem = Problem(1200, 1024, 768, 12, 4, masked=0.05)
    first = Group(problem, 1, ORDINARY).run()
    for ranks in (1, 2):
        assert torch.equal(Group(problem, ranks, ForwardPlan(**changes)).run(), first), ranks


SHARED_SIZES = {  # tokens, hidden, width, experts, K, width of the shared experts
    "plain": (1024, 1024, 512, 8, 2, 512),
    "ragged": (777, 2880, 2880, 9, 4, 1416),
    "deep": (700, 7168, 2048, 6, 4, 2048),
    "fewest steps": (600, 264, 264, 5, 2, 264),
    "one token": (1, 512, 320, 8, 2, 640),
    "half tiles": (300, 512, 384, 24, 2, 768),
}


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("name", SHARED_SIZES)
def test_shared_experts(name, clamp):
    *sizes, shared_width = SHARED_SIZES[name]
    problem = Problem(*sizes, masked=0.1, shared_width=shared_width, clamp=clamp, shared_clamp=clamp)
    first = Group(problem, 1, ORDINARY).run()
    assert_close(first, problem.expected())
    for plan in (ForwardPlan(), SMALL):
        for ranks in (1, 2):
            group = Group(problem, ranks, plan)
            for repeat in range(10):
                assert torch.equal(group.run(delay=bool(repeat % 2)), first), (plan, ranks, repeat)


@pytest.mark.parametrize("clamp", [None, 1.0])
def test_saved_gate_and_up(clamp):
    problem = Problem(900, 512, 320, 5, 2, shared_width=328, clamp=clamp, shared_clamp=clamp)
    found = []
    for plan in (ORDINARY, ForwardPlan(), ForwardPlan(gather=1)):
        out, rows, saved = Group(problem, 1, plan).one_rank(0, save=True, saved_rows=700)
        torch.cuda.synchronize()
        real = rows.peer_rank[:700] >= 0
        found.append((out, saved.gate_CI[real], saved.up_CI[real], saved.shared_gate_TS, saved.shared_up_TS))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_a_layer_it_cannot_run_runs_the_ordinary_kernel():
    for options in (dict(shared_width=256), dict(width=256), dict(hidden=256)):
        sizes = dict(tokens=300, hidden=512, width=320, experts=4, top_k=2) | options
        problem = Problem(**sizes)
        assert torch.equal(Group(problem, 2).run(), Group(problem, 1, ORDINARY).run())


def test_a_lost_task_is_reported_on_time():
    """Down tasks wait for h that no up task announces; no load is under way when the programs end, and the next call is right."""
    problem = Problem(400, 512, 320, 4, 2)
    group = Group(problem, 1, timeout_s=2.0)
    first = group.run()
    workspace = group.workspaces[0]
    real = launch.write_tasks

    def without_ups(workspace, args, rows, plan):
        real(workspace, args, rows, plan)
        tasks = args["tasks_ptr"]
        kept = tasks[1 : 1 + int(tasks[0])]
        kept = kept[kept & 7 != UP.value]
        tasks[0], tasks[1 : 1 + len(kept)], tasks[1 + len(kept)] = len(kept), kept, END.value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "write_tasks", without_ups)
        group.one_rank(0)
    torch.cuda.synchronize()
    failure = workspace.memory.failure()
    assert failure and memory.STATES[failure[0]["what"]] == "h_ready"
    workspace.memory.clear_failure()
    assert torch.equal(group.run(), first)
