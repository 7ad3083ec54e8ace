"""The backward in blockwise FP8 under the interpreter, against the CPU's executor; the last line printed is JSON.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_backward_fp8.py [case ...]
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from dataclasses import replace

# isort: off
from interpreted_backward import (  # before triton: sets TRITON_INTERPRET
    Problem,
    Result,
    assert_equal,
    assert_near,
    check_main_grads,
    check_needs,
    make_d_y,
)
from interpreted_cases import BLOCK, CPU, make_schedules, shared

# isort: on
import interpreted_fp8
import torch
from interpret import run_cases, run_concurrently
from interpreted_fp8 import LARGE, NAN, Filling
from torch import Tensor

from mok import schedule as host_schedule
from mok import trace
from mok.config import Tuning
from mok.executor import row_swiglu
from mok.fabric import virtual_ranks
from mok.kernels import launch_backward, launch_backward_fp8, memory
from mok.kernels.backward import backward_kernel
from mok.kernels.backward_fp8 import backward_fp8_kernel
from mok.kernels.launch import Saved, Workspace
from mok.kernels.launch_backward import BackwardPlan, Needs, gather
from mok.kernels.launch_backward_fp8 import TransposedExperts
from mok.kernels.launch_fp8 import QuantizedExperts
from mok.ops import Inputs, run_backward
from mok.ops import Problem as HostProblem
from mok.quantize import FP8_ROW, Recipe

PLAN = BackwardPlan(num_sms=2, ring_tiles=4, group_tiles=1, parts=2, run=2, block_m=BLOCK, block_k=BLOCK // 2, block_h=64, num_warps=1)
ALL = Needs()


def expected(
    problem: Problem, d_y: Tensor, clamp: float | None = None, shared_clamp: float | None = None, quantized_weight_gradients: bool = False
) -> Result:
    """By the executor in the same recipe; the shared experts by its rows, their d_x added as the first term of the sum."""
    host = HostProblem(virtual_ranks(1)[0], Tuning(), problem.experts, clamp, Recipe("fp8", quantized_weight_gradients))
    inputs = Inputs(problem.x_TH, problem.ids_TK, problem.weights_TK, problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    nothing = problem.x_TH.new_empty(0, problem.gate_EIH.shape[1])
    d_x, d_weights, experts = run_backward(host, inputs, nothing, nothing, d_y, (True, True, True))
    shared_grads = None
    if problem.shared:
        leaves = [t.clone().requires_grad_() for t in (problem.x_TH, *problem.shared)]
        row_swiglu(*leaves, shared_clamp).backward(d_y.float())
        d_x = (d_x.float() + leaves[0].grad.float()).bfloat16()
        shared_grads = tuple(leaf.grad for leaf in leaves[1:])
    return Result(d_x, d_weights, *experts, shared_grads)


def make_workspaces(problem: Problem, ranks: int, filling: Filling = NAN) -> list[Workspace]:
    most = max(part.stop - part.start for part in problem.split(ranks))
    layout = memory.quantized_backward_regions(most, problem.hidden, problem.experts, problem.top_k, ranks)
    views = memory.virtual_memory(layout, ranks, CPU)
    for view in views:
        for name in ("combine", "x", "weights", "d_weights"):
            view.own[name].fill_(filling.number)
        for name in ("x", "d_y"):
            view.own[f"{name}_e4m3"].fill_(filling.value)
            view.own[f"{name}_scale"].fill_(filling.code)
    return [Workspace(view, most, problem.hidden, problem.top_k, CPU, 120.0, num_sms=2) for view in views]


def nothing_saved(problem: Problem, part: slice) -> Saved:
    """Of the routed rows; and the shared experts' gate and up."""
    empty, x = torch.empty(0, problem.gate_EIH.shape[1]).bfloat16(), problem.x_TH[part].float()
    of_shared = [(x @ w.float().T).bfloat16() for w in problem.shared[:2]] if problem.shared else [torch.empty(len(x), 8).bfloat16()] * 2
    return Saved(empty, empty, *of_shared)


def run(
    problem: Problem, d_y: Tensor, ranks: int = 1, plan: BackwardPlan = PLAN, needs: Needs = ALL, clamp: float | None = None,
    shared_clamp: float | None = None, saved: list[Saved] | None = None, mains: tuple[Tensor, ...] | None = None,
    shared_mains: tuple[Tensor, ...] | None = None, quantized_weight_gradients: bool = False, filling: Filling = NAN, **disturb,
) -> Result:  # fmt: skip
    """The whole backward on R virtual ranks, the programs of all ranks at the same time. `saved`, one per rank, is taken from a forward."""
    workspaces = make_workspaces(problem, ranks, filling)
    schedules = make_schedules(problem, workspaces, plan.block_m)
    calls, of_shared = [], []
    for workspace, rows, part in zip(workspaces, schedules, problem.split(ranks), strict=True):
        local = host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank)
        mine = slice(local.start, local.stop)
        kept = saved[workspace.memory.rank] if saved else nothing_saved(problem, part)
        x, dy, weights = (shared(t[part].clone()) for t in (problem.x_TH, d_y, problem.weights_TK))
        workspace.memory.own["weights"][: weights.numel()] = weights.reshape(-1)
        launch_backward.publish(workspace, dy, x, weights, FP8_ROW)
        if problem.shared:
            call = launch_backward_fp8.prepare_shared(
                workspace, rows, kept, dy, x, weights, problem.shared, shared_clamp, needs, shared_mains, plan
            )  # fmt: skip
            assert call.kernel["PARTS"] > 0, "pull tasks of no rows do not compile"
            share(workspace, call, filling)
            call.order.write(2)
            run_concurrently(backward_kernel, plan.num_sms, [call.kernel])
            of_shared.append(call)
        call = launch_backward_fp8.prepare(
            workspace, rows, kept, weights, problem.gate_EIH[mine], problem.up_EIH[mine], problem.down_EHI[mine], clamp, needs,
            tuple(m[mine] for m in mains) if mains else None, plan, quantized_weight_gradients=quantized_weight_gradients,
        )  # fmt: skip
        share(workspace, call, filling)
        call.order.write(2)
        assert call.kernel["PARTS"] > 0
        calls.append(call)
    run_concurrently(backward_fp8_kernel, plan.num_sms, [call.kernel for call in calls], **disturb)
    for workspace in workspaces:
        workspace.check()
    if of_shared:
        calls = [replace(call, shared=s.shared, shared_d_x=s.shared_d_x) for call, s in zip(calls, of_shared, strict=True)]
    parts = [
        gather(w, call, problem.ids_TK[part], problem.experts, needs)
        for w, call, part in zip(workspaces, calls, problem.split(ranks), strict=True)
    ]
    join = lambda values: None if values[0] is None else torch.cat(values)  # noqa: E731
    experts = [None] * 3
    if parts[0].experts is not None:
        experts = [torch.cat([p.experts[i] for p in parts]) for i in range(3)]
    shared_grads = None
    if parts[0].shared is not None:  # every rank's share of the sum over all tokens
        shared_grads = parts[0].shared if ranks == 1 else tuple(sum(p.shared[i].float() for p in parts) for i in range(3))
    return Result(join([p.d_x_TH for p in parts]), join([p.d_weights_TK for p in parts]), *experts, shared_grads)


def share(workspace: Workspace, call, filling: Filling = NAN) -> None:
    """The programs are processes: what they write must be shared; and it is filled."""
    interpreted_fp8.share(workspace, *(call.experts or ()), *(call.shared or ()), call.shared_d_x, filling=filling)


def saved_by_forward(problem: Problem, rows: int, ranks: int = 1, clamp: float | None = None, plan=interpreted_fp8.PLAN) -> list[Saved]:
    """Gate and up of the first rows of every rank, from the forward in FP8."""
    _, _, saved = interpreted_fp8.run_layer(problem, ranks, plan, clamp=clamp, saved_rows=rows)
    nothing = [nothing_saved(problem, part) for part in problem.split(ranks)]
    return [replace(none, gate_CI=kept.gate_CI, up_CI=kept.up_CI) for none, kept in zip(nothing, saved, strict=True)]


def case_near_the_executor():
    """One rank, everything in the ring: all gradients near the executor's; zero, negative and tiny router weights, a masked slot."""
    problem = Problem(1, 40, 272, 144, 3, 2, masked=0.0)
    problem.weights_TK[0], problem.weights_TK[1], problem.weights_TK[2] = 0.0, -0.5, 1e-8
    problem.ids_TK[3] = torch.tensor([-1, 1])
    d_y = make_d_y(problem)
    got = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(got, expected(problem, d_y), 1e-3)
    assert got.d_weights[3, 0] == 0 and got.d_weights[0].abs().min() > 0


def case_ranks_and_ring():
    """R = 1, 2, 3, a ring smaller than the rows and than one expert, an expert without tokens: the same bits for every R."""
    problem = Problem(2, 60, 144, 160, 5, 2)
    problem.ids_TK[problem.ids_TK == 3] = 1
    problem.weights_TK = torch.randn(60, 2, generator=torch.Generator().manual_seed(2))  # whatever ran before
    problem.ids_TK[:50, 0] = 2  # at least 50 rows: more than two tiles, the most of a group
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, expected(problem, d_y), 1e-3)
    for grad in (first.gate, first.up, first.down):
        assert not grad[3].any() and not torch.signbit(grad[3]).any()
    for ranks in (1, 2, 3):
        assert_equal(run(problem, d_y, ranks), first, ranks)


def case_knobs():
    """Ring, group, parts, programs, C: none, some, all: no bit moves; shared experts in bf16."""
    problem = Problem(3, 34, 160, 272, 3, 2, shared_width=24)
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, expected(problem, d_y))
    (saved,) = saved_by_forward(problem, 10 * BLOCK)
    for kept in (10 * BLOCK, 3 * BLOCK + 5):
        some = replace(saved, gate_CI=saved.gate_CI[:kept].contiguous(), up_CI=saved.up_CI[:kept].contiguous())
        assert_equal(run(problem, d_y, saved=[some]), first, kept)
    one, two = dict(ring_tiles=7, group_tiles=2, parts=1), dict(parts=4, num_sms=3, run=1)
    for changes in (dict(ring_tiles=2), one, two, dict(num_sms=1, run=3)):
        assert_equal(run(problem, d_y, plan=replace(PLAN, **changes)), first, changes)


def case_delays():
    """Random delays at every atomic operation, one to three ranks: the same bits."""
    problem = Problem(4, 36, 48, 144, 4, 2)
    d_y = make_d_y(problem)
    first = run(problem, d_y)
    assert_near(first, expected(problem, d_y), 1e-3)
    for seed in range(5):
        got = run(problem, d_y, 1 + seed % 3, replace(PLAN, num_sms=1 + seed % 2, ring_tiles=2 + seed % 4), max_delay_s=0.004, seed=seed)
        assert_equal(got, first, seed)


def case_shared_and_clamp():
    """Shared experts of another width, clamps of their own, two ranks, some rows saved."""
    problem = Problem(5, 40, 144, 48, 4, 2, masked=0.0, shared_width=40)
    d_y = make_d_y(problem)
    for clamp, shared_clamp in ((None, None), (0.25, 0.5), (0.25, None)):
        want = expected(problem, d_y, clamp, shared_clamp)
        assert_near(run(problem, d_y, clamp=clamp, shared_clamp=shared_clamp), want)
    for saved in (None, saved_by_forward(problem, 2 * BLOCK, 2, 0.25)):
        assert_near(run(problem, d_y, 2, clamp=0.25, saved=saved), want)


def case_half_tiles():
    """Last tiles of 1, 63, 64, 65, 127 and 128 rows, and one of 64 after a whole one: the bits of whole tiles, saved and computed again."""
    routes = [1, 63, 64, 65, 0, 127, 128, 192]
    problem = Problem(8, sum(routes) // 2, 48, 144, len(routes), 2)
    ids = torch.repeat_interleave(torch.arange(len(routes)), torch.tensor(routes))
    problem.ids_TK = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(8))].view(-1, 2)
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    d_y, first = make_d_y(problem), None
    tall = replace(PLAN, block_m=128, block_k=64)
    forward = dataclasses.replace(interpreted_fp8.PLAN, block_m=128, ring_tiles=8)
    for ranks, half_tiles, ring, kept in ((1, False, 16, 0), (1, True, 16, 0), (2, True, 4, 0), (1, True, 16, 1024)):
        saved = saved_by_forward(problem, kept, 1, 0.5, forward) if kept else None
        got = run(problem, d_y, ranks, replace(tall, half_tiles=half_tiles, ring_tiles=ring), clamp=0.5, saved=saved)
        if first is None:
            first = got
            assert_near(first, expected(problem, d_y, 0.5))
        assert_equal(got, first, (ranks, half_tiles, ring, kept))


def case_quantized_weight_gradients():
    """Blocks of a tile's 128 rows, which half tiles, parts, ranks, ring and saved rows do not move; all else has the bits it has without.

    An expert of two tiles, a value that is large in its column, an empty expert.
    """
    routes = [3, 140, 0]
    problem = Problem(10, sum(routes), 144, 32, len(routes), 1)
    ids = torch.repeat_interleave(torch.arange(len(routes)), torch.tensor(routes))
    problem.ids_TK = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(8))].view(-1, 1)
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    problem.x_TH[:, 17] *= 2.0**-12
    problem.x_TH[5, 17] = 1.0
    d_y = make_d_y(problem)
    tall = replace(PLAN, block_m=128, block_k=64, ring_tiles=16)
    plain = run(problem, d_y, plan=tall)
    first = run(problem, d_y, plan=replace(tall, half_tiles=False, parts=1), quantized_weight_gradients=True)
    assert_near(first, expected(problem, d_y, quantized_weight_gradients=True), 1e-3)
    assert torch.equal(first.d_x, plain.d_x) and torch.equal(first.d_weights, plain.d_weights)
    assert not torch.equal(first.down, plain.down) and not first.down[2].any()
    forward = dataclasses.replace(interpreted_fp8.PLAN, block_m=128, ring_tiles=8)
    saved = saved_by_forward(problem, 1024, 2, None, forward)
    got = run(problem, d_y, 2, replace(tall, ring_tiles=2, parts=4), saved=saved, quantized_weight_gradients=True)
    assert_equal(got, first, "two ranks")


COUNTS = [44, 1, 31, 33, 32, 0, 95, 20]
MASKED = 4  # tokens without an expert, the last ones


def check_counts(run_, problem: Problem, want) -> None:
    """Every expert has its count of tokens. The same bits with large numbers in memory and in masked tokens; of one expert's tokens the
    gradients of no other expert know, nor of NaN in masked tokens. run_(dY, filling), and want(dY)."""
    tokens = sum(COUNTS)
    ids = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    problem.ids_TK.fill_(-1)
    problem.ids_TK[:tokens, 0] = ids[torch.randperm(tokens, generator=torch.Generator().manual_seed(13))]
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    d_y = make_d_y(problem)
    first = run_(d_y, NAN)
    assert_near(first, want(d_y), 1e-3)
    problem.x_TH[-MASKED:], d_y[-MASKED:] = 1e30, 1e30
    assert_equal(run_(d_y, LARGE), first, "large numbers")
    problem.x_TH[-MASKED:], d_y[-MASKED:] = float("nan"), float("nan")
    changed = problem.ids_TK[:, 0] == 3
    problem.x_TH[changed] *= 100
    d_y[changed] *= 1e-3
    got = run_(d_y, NAN)
    for name in ("gate", "up", "down"):
        same = [torch.equal(a, b) for a, b in zip(getattr(got, name), getattr(first, name), strict=True)]
        assert same == [e != 3 for e in range(len(COUNTS))], name
    assert torch.equal(got.d_x[~changed], first.d_x[~changed]) and torch.equal(got.d_weights[~changed], first.d_weights[~changed])


def case_no_block_crosses_an_expert():
    problem = Problem(13, sum(COUNTS) + MASKED, 144, 32, len(COUNTS), 1, masked=0.0)
    tall = replace(PLAN, block_m=128, block_k=64, ring_tiles=16)
    check_counts(
        lambda d_y, filling: run(problem, d_y, plan=tall, quantized_weight_gradients=True, filling=filling), problem,
        lambda d_y: expected(problem, d_y, quantized_weight_gradients=True),
    )  # fmt: skip


def case_needs():
    """Asked for nothing there is no launch."""
    check_needs(run, Problem(6, 30, 16, 144, 3, 1, shared_width=24), nothing=False)


def case_main_grads():
    check_main_grads(run, Problem(7, 60, 144, 32, 3, 1, masked=0.0, shared_width=16))


def case_extremes():
    """All masked, all to one expert, no tokens, more ranks than experts."""
    for ids, tokens, experts in ((-1, 20, 3), (2, 50, 3), (None, 0, 3), (None, 30, 2)):
        problem = Problem(8, tokens, 144, 16, experts, 2, masked=0.0)
        if ids is not None:
            problem.ids_TK.fill_(ids)
            problem.weights_TK = torch.rand(tokens, 2)
        d_y = make_d_y(problem)
        for ranks in (1, 3) if experts == 2 else (1, 2):
            assert_near(run(problem, d_y, ranks), expected(problem, d_y), 1e-3)


def case_special_values():
    """NaN in a token's dY stays with its own gradients and its experts'; an expert with NaN does not reach another one's tokens."""
    problem = Problem(9, 30, 144, 48, 3, 1, masked=0.0)
    d_y = make_d_y(problem)
    clean = run(problem, d_y)
    problem.down_EHI[1, 3, 5], d_y[4, 7] = float("nan"), float("inf")
    problem.ids_TK[4] = 2
    got, fine = run(problem, d_y), (problem.ids_TK[:, 0] != 1)
    fine[4] = False
    want = expected(problem, d_y)
    for name in ("d_x", "d_weights"):
        mine, theirs = getattr(got, name), getattr(want, name)
        assert torch.equal(mine.isfinite(), theirs.isfinite()), name
        assert mine[fine].isfinite().all() and mine[4].isnan().all()
    assert got.gate[0].isfinite().all() and torch.equal(got.gate[0], clean.gate[0]) == bool((problem.ids_TK[4] != 0).all())


def case_every_step_is_scaled():
    """Scales far apart: blocks of dY by 2^20 b, those of the weights by their inverse, and d_gate's by the rows of gate and up."""
    problem = Problem(10, 24, 384, 384, 2, 2, masked=0.0)
    factors = torch.tensor([2.0**-20, 1.0, 2.0**20]).repeat_interleave(128)
    d_y = make_d_y(problem)
    d_y *= factors
    problem.down_EHI /= factors[:, None]
    small = torch.tensor([2.0**-12, 1.0, 2.0**12]).repeat_interleave(128)
    problem.down_EHI *= small  # and with them dHid, d_gate and d_up
    for weight in (problem.gate_EIH, problem.up_EIH):
        weight[:, :128] *= 2.0**-3
    assert_near(run(problem, d_y, 2), expected(problem, d_y))


def case_trace():
    """Every task of the list has a record, and the products' end is noted."""
    problem = Problem(12, 10, 32, 144, 2, 2, masked=0.0)
    plan, d_y = replace(PLAN, trace=True), make_d_y(problem)
    (workspace,) = make_workspaces(problem, 1)
    (rows,) = make_schedules(problem, [workspace])
    launch_backward.publish(workspace, d_y, problem.x_TH, problem.weights_TK, FP8_ROW)
    experts = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    saved, weights = nothing_saved(problem, slice(0, 10)), shared(problem.weights_TK)
    call = launch_backward_fp8.prepare(workspace, rows, saved, weights, *experts, plan=plan)
    share(workspace, call)
    call.order.write(2)
    run_concurrently(backward_fp8_kernel, 2, [call.kernel])
    line = trace.backward_timeline(workspace, workspace.scratch["trace"], 2)
    tiles = int(rows.num_tokens) // BLOCK
    count = collections.Counter(line.kind)
    assert (count["pull"], count["gate up"], count["hidden"], count["d_x"]) == (2 * tiles, 2 * tiles, tiles, tiles), count
    assert count["d_weight"] >= 3 * problem.experts and not line.begin.isnan().any()
    noted = {name for name, computed in zip(line.kind, line.computed.isnan().tolist(), strict=True) if not computed}
    assert noted >= {"gate up", "hidden", "d_x"}


def case_transposed_weights():
    """The blocks of the forward's weights, the other way round."""
    problem = Problem(11, 20, 272, 144, 3, 2)
    experts = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    forward, backward = QuantizedExperts.of(*experts), TransposedExperts.of(*experts)
    for plane, weight in enumerate(forward[:2]):
        assert torch.equal(backward.gate_up.values[plane].view(torch.uint8), weight.values.mT.view(torch.uint8))
        assert torch.equal(backward.gate_up.scale[..., 2 * plane : 2 * plane + 2], weight.scale.mT)
    assert torch.equal(backward.down.values.view(torch.uint8), forward.down.values.mT.view(torch.uint8))
    assert torch.equal(backward.down.scale, forward.down.scale.mT)


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
