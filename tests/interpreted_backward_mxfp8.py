"""The backward in MXFP8 under the interpreter, against the CPU's executor; the last line printed is JSON.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_backward_mxfp8.py [case ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace

# isort: off
from interpreted_backward import (  # before triton: sets TRITON_INTERPRET
    PLAN as SMALL,
    Problem,
    Result,
    assert_equal,
    assert_near,
    check_main_grads,
    check_needs,
    make_d_y,
    torch_saved,
)
from interpreted_cases import CPU, make_schedules, shared

# isort: on
import interpreted_fp8
import interpreted_mxfp8
import torch
from interpret import run_cases, run_concurrently
from torch import Tensor

from mok import schedule as host_schedule
from mok.config import Tuning
from mok.executor import row_swiglu
from mok.fabric import virtual_ranks
from mok.kernels import launch_backward, memory
from mok.kernels.backward import backward_kernel
from mok.kernels.launch import Saved, Workspace
from mok.kernels.launch_backward import BackwardPlan, Needs, gather
from mok.kernels.launch_backward_mxfp8 import WideTransposed
from mok.kernels.launch_mxfp8 import WideExperts
from mok.ops import Inputs, run_backward
from mok.ops import Problem as HostProblem
from mok.quantize import E4M3_NAN, E8M0_NAN, MX_ROW, Recipe

RECIPE = Recipe("mxfp8")
PLAN = replace(SMALL, block_m=32, block_n=64, block_k=16, slice=32, block_h=64, run=1)
BLOCK = PLAN.block_m
ALL = Needs()


def expected(problem: Problem, d_y: Tensor, clamp: float | None = None, shared_clamp: float | None = None) -> Result:
    """By the executor in the same recipe; the shared experts by its rows, their d_x added as the first term of the sum."""
    host = HostProblem(virtual_ranks(1)[0], Tuning(), problem.experts, clamp, RECIPE)
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


def make_workspaces(problem: Problem, ranks: int) -> list[Workspace]:
    most = max(part.stop - part.start for part in problem.split(ranks))
    layout = memory.layer_regions("mxfp8", most, problem.hidden, problem.experts, problem.top_k, ranks)
    views = memory.virtual_memory(layout, ranks, CPU)
    for view in views:
        for name in ("combine", "x", "weights", "d_weights"):
            view.own[name].fill_(float("nan"))
        for name in ("x", "d_y"):
            view.own[f"{name}_e4m3"].fill_(E4M3_NAN)
            view.own[f"{name}_scale"].fill_(E8M0_NAN)
    return [Workspace(view, most, problem.hidden, problem.top_k, CPU, 120.0, num_sms=2) for view in views]


def share(workspace: Workspace, call: launch_backward.Call) -> None:
    """The programs are processes: what they write must be shared; and it holds NaN."""
    interpreted_fp8.share(workspace, *(call.experts or ()), *(call.shared or ()), call.shared_d_x)


def run(
    problem: Problem, d_y: Tensor, ranks: int = 1, plan: BackwardPlan = PLAN, needs: Needs = ALL, clamp: float | None = None,
    shared_clamp: float | None = None, saved: list[Saved] | None = None, mains: tuple[Tensor, ...] | None = None,
    shared_mains: tuple[Tensor, ...] | None = None, **disturb,
) -> Result:  # fmt: skip
    """The whole backward on R virtual ranks, the programs of all ranks at the same time. `saved`, one per rank, is taken from a forward."""
    workspaces = make_workspaces(problem, ranks)
    schedules = make_schedules(problem, workspaces, plan.block_m)
    calls, alive = [], []  # a descriptor of two planes holds one of its two tensors
    for workspace, rows, part in zip(workspaces, schedules, problem.split(ranks), strict=True):
        local = host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank)
        mine = slice(local.start, local.stop)
        kept = saved[workspace.memory.rank] if saved else torch_saved(problem, rows, local, part, problem.top_k, 0)
        x, dy, weights = (shared(t[part].clone()) for t in (problem.x_TH, d_y, problem.weights_TK))
        workspace.memory.own["weights"][: weights.numel()] = weights.reshape(-1)
        launch_backward.publish(workspace, dy, x, weights, MX_ROW)
        experts = tuple(w[mine].contiguous() for w in (problem.gate_EIH, problem.up_EIH, problem.down_EHI))
        numbers, again = WideTransposed.of(*experts, needs.x), WideExperts.of(*experts)[:2]
        alive += [numbers, again]
        call = launch_backward.prepare(
            workspace, rows, kept, dy, x, weights, *numbers, problem.shared, clamp, shared_clamp, needs=needs, plan=plan,
            main_grads=tuple(m[mine] for m in mains) if mains else None, shared_main_grads=shared_mains, mxfp8=True, gate_up_again=again,
        )  # fmt: skip
        share(workspace, call)
        call.order.write(2)
        calls.append(call)
    run_concurrently(backward_kernel, plan.num_sms, [call.kernel for call in calls], **disturb)
    for workspace in workspaces:
        workspace.check()
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


def saved_by_forward(problem: Problem, rows: int, ranks: int = 1, clamp: float | None = None, **changes) -> list[Saved]:
    """Gate and up of the first rows of every rank, from the forward in MXFP8."""
    _, _, saved = interpreted_mxfp8.run_layer(problem, ranks, "wide", changes, clamp=clamp, saved_rows=rows)
    nothing = [torch_saved(problem, None, range(0), part, problem.top_k, 0) for part in problem.split(ranks)]
    return [replace(none, gate_CI=kept.gate_CI, up_CI=kept.up_CI) for none, kept in zip(nothing, saved, strict=True)]


def case_near_the_executor():
    """One rank, everything in the ring: all gradients near the executor's; zero, negative and tiny router weights, a masked slot."""
    problem = Problem(1, 40, 144, 80, 3, 2, masked=0.0)
    problem.weights_TK[0], problem.weights_TK[1], problem.weights_TK[2] = 0.0, -0.5, 1e-8
    problem.ids_TK[3] = torch.tensor([-1, 1])
    d_y = make_d_y(problem)
    got, want = run(problem, d_y, plan=replace(PLAN, ring_tiles=64)), expected(problem, d_y)
    assert_near(got, want, 1e-3)
    assert got.d_weights[3, 0] == 0 and got.d_weights[0].abs().min() > 0
    for name in ("d_x", "gate", "up", "down"):  # sums are exact here: what differs was rounded the other way
        assert float((getattr(got, name) == getattr(want, name)).float().mean()) > 0.99, name


def case_ranks_and_ring():
    """R = 1, 2, 3, a ring smaller than the rows and than one expert, an expert without tokens, sizes that cut a block of 32: the same bits
    for every R."""
    problem = Problem(2, 80, 80, 48, 4, 2)
    problem.ids_TK[problem.ids_TK == 3] = 1
    problem.weights_TK = torch.randn(80, 2)
    problem.ids_TK[:70, 0] = 2  # at least 70 rows: more than two tiles, the most of a group
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, expected(problem, d_y), 1e-3)
    for grad in (first.gate, first.up, first.down):
        assert not grad[3].any() and not torch.signbit(grad[3]).any()
    for ranks in (1, 2, 3):
        assert_equal(run(problem, d_y, ranks), first, ranks)


def case_knobs():
    """Ring, group, parts, programs, C: none, some, all: no bit moves; shared experts in bf16."""
    problem = Problem(3, 50, 80, 48, 2, 2, shared_width=24)
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, expected(problem, d_y))
    (saved,) = saved_by_forward(problem, 10 * BLOCK)
    for kept in (10 * BLOCK, 3 * BLOCK + 5):
        some = replace(saved, gate_CI=saved.gate_CI[:kept].contiguous(), up_CI=saved.up_CI[:kept].contiguous())
        assert_equal(run(problem, d_y, saved=[some]), first, kept)
    one, two = dict(ring_tiles=7, group_tiles=2, parts=1), dict(parts=4, num_sms=3, run=1)
    for changes in (dict(ring_tiles=2), one, two, dict(num_sms=1, run=3), dict(block_n=32), dict(block_n=128)):
        assert_equal(run(problem, d_y, plan=replace(PLAN, **changes)), first, changes)


def case_delays():
    """Random delays at every atomic operation, one to three ranks: the same bits."""
    problem = Problem(4, 36, 64, 48, 3, 2)
    d_y = make_d_y(problem)
    first = run(problem, d_y)
    assert_near(first, expected(problem, d_y), 1e-3)
    for seed in range(3):
        got = run(problem, d_y, 1 + seed % 3, replace(PLAN, num_sms=1 + seed % 2, ring_tiles=2 + seed % 4), max_delay_s=0.004, seed=seed)
        assert_equal(got, first, seed)


def case_shared_and_clamp():
    """Shared experts of another width, clamps of their own, two ranks, some rows saved."""
    problem = Problem(5, 40, 80, 48, 3, 2, masked=0.0, shared_width=40)
    d_y = make_d_y(problem)
    for clamp, shared_clamp in ((None, None), (0.25, 0.5), (0.25, None)):
        want = expected(problem, d_y, clamp, shared_clamp)
        assert_near(run(problem, d_y, clamp=clamp, shared_clamp=shared_clamp), want)
    for saved in (None, saved_by_forward(problem, 2 * BLOCK, 2, 0.25)):
        assert_near(run(problem, d_y, 2, clamp=0.25, saved=saved), want)


def case_half_tiles():
    """Last tiles of 1, 63, 64, 65, 127 and 128 rows, and one of 64 after a whole one: the bits of whole tiles, saved and computed again."""
    routes = [1, 63, 64, 65, 0, 127, 128, 192]
    problem = Problem(8, sum(routes) // 2, 64, 144, len(routes), 2)
    ids = torch.repeat_interleave(torch.arange(len(routes)), torch.tensor(routes))
    problem.ids_TK = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(8))].view(-1, 2)
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    d_y, first = make_d_y(problem), None
    tall = replace(PLAN, block_m=128, block_k=64)
    for ranks, half_tiles, ring, kept in ((1, False, 16, 0), (1, True, 16, 0), (2, True, 4, 0), (1, True, 16, 1024)):
        saved = saved_by_forward(problem, kept, 1, 0.5, block_m=128, ring_tiles=8) if kept else None
        got = run(problem, d_y, ranks, replace(tall, half_tiles=half_tiles, ring_tiles=ring), clamp=0.5, saved=saved)
        if first is None:
            first = got
            assert_near(first, expected(problem, d_y, 0.5))
        assert_equal(got, first, (ranks, half_tiles, ring, kept))


def case_needs():
    """Only what is asked for, with the same bits; frozen experts among it."""
    check_needs(run, Problem(6, 30, 64, 48, 3, 1, shared_width=24), nothing=True)


def case_main_grads():
    check_main_grads(run, Problem(7, 60, 96, 32, 3, 1, masked=0.0, shared_width=16))


def case_extremes():
    """All masked, all to one expert, no tokens, more ranks than experts."""
    for ids, tokens, experts in ((-1, 20, 3), (2, 50, 3), (None, 0, 3), (None, 30, 2)):
        problem = Problem(8, tokens, 80, 48, experts, 2, masked=0.0)
        if ids is not None:
            problem.ids_TK.fill_(ids)
            problem.weights_TK = torch.rand(tokens, 2)
        d_y = make_d_y(problem)
        for ranks in (1, 3) if experts == 2 else (1, 2):
            assert_near(run(problem, d_y, ranks), expected(problem, d_y), 1e-3)


def case_special_values():
    """NaN in a token's dY stays with its own gradients and its experts'; an expert with NaN does not reach another one's tokens."""
    problem = Problem(9, 30, 64, 48, 3, 1, masked=0.0)
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


def case_every_block_is_scaled():
    """Scales far apart: blocks of dY by powers of two, those of the weights by their inverse, and d_gate's by the rows of gate and up."""
    problem = Problem(10, 24, 96, 96, 2, 2, masked=0.0)
    factors = torch.tensor([2.0**-20, 1.0, 2.0**20]).repeat_interleave(32)
    d_y = make_d_y(problem)
    d_y *= factors
    problem.down_EHI /= factors[:, None]
    small = torch.tensor([2.0**-12, 1.0, 2.0**12]).repeat_interleave(32)
    problem.down_EHI *= small  # and with them dHid, d_gate and d_up
    for weight in (problem.gate_EIH, problem.up_EIH):
        weight[:, :32] *= 2.0**-3
    assert_near(run(problem, d_y, 2), expected(problem, d_y))


def case_numbers():
    """The weights that the backward multiplies by are those of the recipe, and not the forward's."""
    problem = Problem(11, 4, 144, 80, 2, 1)
    weights = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    for weight, number, other in zip(weights, WideTransposed.of(*weights), WideExperts.of(*weights), strict=True):
        assert number.dtype == torch.bfloat16 and torch.equal(number.float(), RECIPE.weight(weight.float(), -2))
        assert not torch.equal(number, other)
    frozen = WideTransposed.of(*weights, need_x=False)
    assert frozen.gate is problem.gate_EIH and frozen.up is problem.up_EIH


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
