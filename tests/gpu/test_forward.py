"""The forward on a GPU: against fp64, the promises about bits, extremes, capture, synchronization, failure."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

from checks import both_kernels, hopper_launches, nothing_waits
from virtual import DEVICE, Group, Problem, assert_close, poison_workspace

from mok import schedule as host_schedule
from mok.fabric import FabricError
from mok.kernels import launch, schedule
from mok.kernels.launch import ForwardPlan

SMALL = ForwardPlan(minibatch_tiles=4, ring_tiles=8)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_schedule_equals_the_host_schedule(ranks):
    problem = Problem(3001, 64, 64, 13, 5, masked=0.2)
    group = Group(problem, ranks)
    results = []
    for rank, stream in enumerate(group.streams):
        with torch.cuda.stream(stream):
            results.append(launch.schedule(group.workspaces[rank], group.inputs[rank][1], problem.experts))
    torch.cuda.synchronize()
    routes = [host_schedule.sort_routes(ids.cpu(), problem.experts) for _, ids, _ in group.inputs]
    counts = torch.stack([r.counts for r in routes])
    for rank, got in enumerate(results):
        want = host_schedule.build_schedule(counts, [r.order for r in routes], host_schedule.local_experts(problem.experts, ranks, rank))
        rows = int(want.num_tokens)
        for name in ("num_tokens", "tokens_per_expert", "routes_per_expert"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
        assert torch.equal(got.peer_rank[:rows].cpu(), want.peer_rank)
        assert torch.equal(got.peer_token_idx[:rows].cpu(), want.peer_token_idx)
        assert torch.equal(got.tile_expert[: rows // 128].cpu(), want.tile_expert)


SIZES = {  # tokens, hidden, width, experts, K, shared width
    "plain": (1024, 1024, 512, 8, 2, 0),
    "shared": (1000, 1024, 512, 8, 2, 768),
    "ragged": (777, 2880, 2880, 9, 4, 0),
    "narrow": (513, 128, 96, 5, 3, 160),
    "fine": (2048, 4096, 1024, 16, 8, 1024),
    "deep": (700, 7168, 2048, 6, 4, 2048),
    "odd slices": (400, 640, 1408, 4, 2, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_forward_near_fp64_and_equal_for_every_number_of_ranks(name):
    tokens, hidden, width, experts, top_k, shared_width = SIZES[name]
    problem = Problem(tokens, hidden, width, experts, top_k, masked=0.1, shared_width=shared_width)
    expected, first = problem.expected(), None
    for ranks in (1, 2, 3, 4):
        out = Group(problem, ranks).run()
        assert_close(out, expected)
        first = out if first is None else first
        assert torch.equal(out, first), ranks


def many_rows() -> Problem:
    return Problem(2500, 1024, 768, 12, 4, masked=0.05, shared_width=512)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bits_do_not_depend_on_time(ranks):
    problem = many_rows()
    with hopper_launches(100 * ranks):
        first = Group(problem, 1).run()
        assert_close(first, problem.expected())
        group = Group(problem, ranks, SMALL)
        for repeat in range(100):
            assert torch.equal(group.run(delay=True), first), repeat


PLANS = [
    dict(minibatch_tiles=1, ring_tiles=2), dict(minibatch_tiles=7, ring_tiles=21, parts=1), dict(parts=8), dict(num_sms=1),
    dict(num_sms=7, minibatch_tiles=2, ring_tiles=4), dict(num_stages=3), dict(block_h=256),
    dict(block_n=64, num_warps=4, num_stages=3, programs_per_sm=2), dict(block_k=128, num_stages=2), dict(half_tiles=False),
]  # fmt: skip


@pytest.mark.parametrize("changes", PLANS, ids=str)
def test_bits_do_not_depend_on_knobs(changes):
    problem = many_rows()
    first = Group(problem, 1).run()
    for ranks in (1, 2):
        assert torch.equal(Group(problem, ranks, ForwardPlan(**changes)).run(), first), ranks


def test_a_token_does_not_depend_on_the_others():
    problem = Problem(600, 512, 256, 6, 2)
    whole = Group(problem, 1).run()
    problem.x_TH, problem.ids_TK, problem.weights_TK = problem.x_TH[100:350], problem.ids_TK[100:350], problem.weights_TK[100:350]
    assert torch.equal(Group(problem, 1).run(), whole[100:350])


@pytest.mark.parametrize(("ranks", "ahead"), [(1, False), (2, False), (4, False), (1, True), (2, True)])
def test_extremes(ranks, ahead):
    hidden, width = (384, 384) if ahead else (512, 256)
    problem = Problem(900, hidden, width, 8, 2, clamp=1.0, shared_width=width, shared_clamp=0.5)
    for ids in (-1, 0, 7, None):
        if ids is None:
            problem.ids_TK = torch.randint(-1, 8, (900, 2), device=DEVICE)
        else:
            problem.ids_TK = torch.full((900, 2), ids, device=DEVICE)
        problem.weights_TK = torch.randn(900, 2, device=DEVICE)
        with hopper_launches(ranks * ahead):
            assert_close(Group(problem, ranks).run(), problem.expected())


def test_no_tokens():
    problem = Problem(0, 512, 256, 8, 2, shared_width=256)
    assert Group(problem, 1).run().shape == (0, 512)
    problem = Problem(1, 512, 256, 8, 2)
    assert_close(Group(problem, 3).run(), problem.expected())


def test_gate_and_up_of_the_first_rows_are_saved():
    problem = Problem(900, 512, 320, 5, 2, shared_width=192)
    group = Group(problem, 1)
    plain = group.run()
    out, rows, saved = group.one_rank(0, save=True, saved_rows=700)
    torch.cuda.synchronize()
    assert torch.equal(out, plain)
    token = rows.peer_token_idx[:700].long() // 2
    x = torch.where(rows.peer_rank[:700, None] >= 0, problem.x_TH[token].float(), 0)
    expert = rows.tile_expert[:6].repeat_interleave(128)[:700].long()
    for kept, weights in ((saved.gate_CI, problem.gate), (saved.up_CI, problem.up)):
        want = torch.bmm(weights.float()[expert], x[:, :, None])[:, :, 0]
        assert torch.allclose(kept.float(), want, atol=2e-2, rtol=1e-2)
    assert torch.allclose(saved.shared_up_TS.float(), problem.x_TH.float() @ problem.shared[1].float().T, atol=2e-2, rtol=1e-2)


def of_size(ahead: bool) -> Problem:
    """At sizes of other tests' kernels, `many_rows`' among them."""
    width, shared_width = (768, 512) if ahead else (512, 256)
    return Problem(1500, 1024, width, 8, 4, shared_width=shared_width)


@both_kernels
@pytest.mark.parametrize("ranks", [1, 2])
def test_schedule_and_forward_wait_for_nothing(ranks, ahead):
    group = Group(of_size(ahead), ranks)
    group.run()
    with hopper_launches(ranks * ahead), nothing_waits():
        for rank, stream in enumerate(group.streams):
            with torch.cuda.stream(stream):
                group.one_rank(rank)
    torch.cuda.synchronize()
    for workspace in group.workspaces:
        workspace.check()


@both_kernels
def test_graph_replay_with_changing_routes(ahead):
    problem = of_size(ahead)
    group = Group(problem, 1)
    routes = [problem.ids_TK.clone(), torch.zeros_like(problem.ids_TK) + 3, torch.zeros_like(problem.ids_TK) - 1, problem.ids_TK.clone()]
    _, ids, _ = group.inputs[0]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        group.one_rank(0)
        torch.cuda.synchronize()
        with hopper_launches(int(ahead)), torch.cuda.graph(graph, stream=stream):
            out = group.one_rank(0)[0]
    for route in routes:
        problem.ids_TK = route
        ids.copy_(route)
        poison_workspace(group.workspaces[0])
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, problem.expected())


def test_wrong_expert_id_is_reported_and_the_next_call_works():
    problem = Problem(300, 256, 128, 4, 2)
    group = Group(problem, 1)
    first = group.run()
    ids = group.inputs[0][1]
    kept = ids[17, 1].clone()
    ids[17, 1] = 4
    with pytest.raises(ValueError, match="slot 35 of rank 0 is 4"):
        group.run()
    ids[17, 1] = kept
    assert torch.equal(group.run(), first)


@pytest.mark.parametrize("wrong, said", [(4, 4), (-7, -7), (2**40, 2**31 - 1)])
def test_wrong_expert_id_of_one_rank_is_reported_to_all(wrong, said):
    problem = Problem(300, 256, 128, 4, 2)
    group = Group(problem, 2)
    first = group.run()
    ids = group.inputs[1][1]
    kept = ids[3, 0].clone()
    ids[3, 0] = wrong
    told = {}
    for rank, stream in enumerate(group.streams):
        try:  # where the host learns of it depends on the device's speed
            with torch.cuda.stream(stream):
                group.one_rank(rank)
        except ValueError as error:
            told[rank] = str(error)
    torch.cuda.synchronize()
    for rank, workspace in enumerate(group.workspaces):
        if rank not in told:
            with pytest.raises(ValueError, match="ids_TK") as error:
                workspace.check()
            told[rank] = str(error.value)
    torch.cuda.synchronize()
    assert set(told.values()) == {f"ids_TK: slot 6 of rank 1 is {said}: must be -1 or in 0..3"}
    ids[3, 0] = kept
    assert torch.equal(group.run(), first)


def test_a_failure_is_raised_once_though_kernels_behind_it_tell_of_it_later():
    problem = Problem(300, 256, 128, 4, 2)
    group = Group(problem, 2)
    first = group.run()
    ids = group.inputs[1][1]
    kept = ids[3, 0].clone()
    ids[3, 0] = 4
    torch.cuda.synchronize()
    workspace = group.workspaces[1]
    with torch.cuda.stream(group.streams[1]):
        schedule.sort_slots(workspace.memory, ids, problem.experts)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        workspace.barrier()
        with pytest.raises(ValueError, match="slot 6 of rank 1 is 4"):
            workspace.check()
        torch.cuda.synchronize()
        workspace.check()
    with torch.cuda.stream(group.streams[0]):
        group.workspaces[0].barrier()
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="slot 6 of rank 1 is 4"):
            group.workspaces[0].check()
    ids[3, 0] = kept
    assert torch.equal(group.run(), first)


def test_a_rank_that_stays_away_is_reported_on_time():
    problem = Problem(400, 256, 128, 4, 2)
    group = Group(problem, 2, timeout_s=3.0)
    first = group.run()
    with torch.cuda.stream(group.streams[0]):
        group.one_rank(0)
    torch.cuda.synchronize()
    with pytest.raises(FabricError, match="rank 0, task 1: waited for barrier"):
        group.workspaces[0].check()
    with pytest.raises(FabricError, match="rank 0, task 1: waited for barrier"):  # the late rank comes after all: it learns of it, too
        with torch.cuda.stream(group.streams[1]):
            group.one_rank(1)
        torch.cuda.synchronize()
        group.workspaces[1].check()
    torch.cuda.synchronize()
    assert torch.equal(group.run(), first)
