"""The backward in MXFP8 under the interpreter, against the CPU's executor; the last line printed is JSON.

Both forms of it: "wide", the bf16 kernel on numbers of MXFP8, and "scaled", E4M3 operands with codes in tiles of 128 rows.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_backward_mxfp8.py [case ...]
"""

from __future__ import annotations

import collections
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
    make_d_y,
    torch_saved,
)
from interpreted_cases import CPU, make_schedules, shared

# isort: on
import interpreted_fp8
import interpreted_mxfp8
import torch
from interpret import run_cases, run_concurrently
from interpreted_backward_fp8 import COUNTS, MASKED, check_counts
from interpreted_fp8 import NAN, Filling
from torch import Tensor

from mok import schedule as host_schedule
from mok import trace
from mok.config import Tuning
from mok.executor import row_swiglu
from mok.fabric import virtual_ranks
from mok.kernels import launch_backward, launch_backward_fp8, launch_backward_mxfp8, memory
from mok.kernels.backward import backward_kernel
from mok.kernels.backward_mxfp8 import backward_mxfp8_kernel
from mok.kernels.launch import Saved, Workspace
from mok.kernels.launch_backward import BackwardPlan, Needs, gather
from mok.kernels.launch_backward_mxfp8 import MxTransposed, WideTransposed
from mok.kernels.launch_mxfp8 import WideExperts
from mok.ops import Inputs, run_backward
from mok.ops import Problem as HostProblem
from mok.quantize import MX_ROW, Recipe, dequantize, from_tcgen05, quantize

RECIPE = Recipe("mxfp8")
PLAN = replace(SMALL, block_m=32, block_n=64, block_k=16, slice=32, block_h=64, run=1)
BLOCK = PLAN.block_m
TALL = replace(PLAN, block_m=128, block_n=256, block_k=64, slice=64)  # of the scaled form's tiles no size can be changed
PLANS = {"wide": PLAN, "scaled": TALL}
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


def make_workspaces(problem: Problem, ranks: int, filling: Filling = NAN) -> list[Workspace]:
    most = max(part.stop - part.start for part in problem.split(ranks))
    layout = memory.layer_regions("mxfp8", most, problem.hidden, problem.experts, problem.top_k, ranks)
    views = memory.virtual_memory(layout, ranks, CPU)
    for view in views:
        for name in ("combine", "x", "weights", "d_weights"):
            view.own[name].fill_(filling.number)
        for name in ("x", "d_y"):
            view.own[f"{name}_e4m3"].fill_(filling.value)
            view.own[f"{name}_scale"].fill_(filling.code)
    return [Workspace(view, most, problem.hidden, problem.top_k, CPU, 120.0, num_sms=2) for view in views]


def share(workspace: Workspace, call: launch_backward.Call, filling: Filling = NAN) -> None:
    """The programs are processes: what they write must be shared; and it is filled."""
    interpreted_fp8.share(workspace, *(call.experts or ()), *(call.shared or ()), call.shared_d_x, filling=filling)


def run(
    problem: Problem, d_y: Tensor, ranks: int = 1, plan: BackwardPlan | None = None, needs: Needs = ALL, clamp: float | None = None,
    shared_clamp: float | None = None, saved: list[Saved] | None = None, mains: tuple[Tensor, ...] | None = None,
    shared_mains: tuple[Tensor, ...] | None = None, form: str = "wide", beforehand: bool = False, filling: Filling = NAN, **disturb,
) -> Result:  # fmt: skip
    """The whole backward on R virtual ranks, the programs of all ranks at the same time. `saved`, one per rank, is taken from a forward.
    beforehand: in the form "scaled", gate and up for rows of which nothing was saved are given quantized."""
    plan, wide = plan or PLANS[form], form == "wide"
    workspaces = make_workspaces(problem, ranks, filling)
    schedules = make_schedules(problem, workspaces, plan.block_m)
    calls, of_shared, alive = [], [], []  # a descriptor of two planes holds one of its two tensors
    for workspace, rows, part in zip(workspaces, schedules, problem.split(ranks), strict=True):
        local = host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank)
        mine = slice(local.start, local.stop)
        kept = saved[workspace.memory.rank] if saved else torch_saved(problem, part)
        x, dy, weights = (shared(t[part].clone()) for t in (problem.x_TH, d_y, problem.weights_TK))
        workspace.memory.own["weights"][: weights.numel()] = weights.reshape(-1)
        launch_backward.publish(workspace, dy, x, weights, MX_ROW)
        experts = tuple(w[mine].contiguous() for w in (problem.gate_EIH, problem.up_EIH, problem.down_EHI))
        numbers = (WideTransposed if wide else MxTransposed).of(*experts, needs.x)
        of_experts = tuple(m[mine] for m in mains) if mains else None
        if wide:
            again = WideExperts.of(*experts)[:2]
            call = launch_backward.prepare(
                workspace, rows, kept, dy, x, weights, *numbers, problem.shared, clamp, shared_clamp, needs=needs, plan=plan,
                main_grads=of_experts, shared_main_grads=shared_mains, mxfp8=True, gate_up_again=again,
            )  # fmt: skip
            alive += [numbers, again]
        else:
            if problem.shared:
                call = launch_backward_fp8.prepare_shared(
                    workspace, rows, kept, dy, x, weights, problem.shared, shared_clamp, needs, shared_mains, plan
                )  # fmt: skip
                share(workspace, call, filling)
                call.order.write(2)
                run_concurrently(backward_kernel, plan.num_sms, [call.kernel])
                of_shared.append(call)
            pairs = (quantize(experts[0], MX_ROW), quantize(experts[1], MX_ROW)) if beforehand else None
            call = launch_backward_mxfp8.prepare(workspace, rows, kept, weights, *experts, numbers, clamp, needs, of_experts, plan, pairs)
        share(workspace, call, filling)
        call.order.write(2)
        calls.append(call)
    run_concurrently(backward_kernel if wide else backward_mxfp8_kernel, plan.num_sms, [call.kernel for call in calls], **disturb)
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


def saved_by_forward(problem: Problem, rows: int, ranks: int = 1, clamp: float | None = None, form: str = "wide", **changes) -> list[Saved]:
    """Gate and up of the first rows of every rank, from the forward in MXFP8 of the same form."""
    changes = dict(block_m=PLANS[form].block_m) | changes
    _, _, saved = interpreted_mxfp8.run_layer(problem, ranks, form, changes, clamp=clamp, saved_rows=rows)
    nothing = [torch_saved(problem, part) for part in problem.split(ranks)]
    return [replace(none, gate_CI=kept.gate_CI, up_CI=kept.up_CI) for none, kept in zip(nothing, saved, strict=True)]


def case_near_the_executor():
    """One rank, everything in the ring: all gradients near the executor's; zero, negative and tiny router weights, a masked slot."""
    problem = Problem(1, 40, 144, 80, 3, 2, masked=0.0)
    problem.weights_TK[0], problem.weights_TK[1], problem.weights_TK[2] = 0.0, -0.5, 1e-8
    problem.ids_TK[3] = torch.tensor([-1, 1])
    d_y = make_d_y(problem)
    want = expected(problem, d_y)
    for form, plan in PLANS.items():
        got = run(problem, d_y, plan=replace(plan, ring_tiles=64), form=form)
        assert_near(got, want, 1e-3)
        assert got.d_weights[3, 0] == 0 and got.d_weights[0].abs().min() > 0
        for name in ("d_x", "gate", "up", "down"):  # sums are exact here: what differs was rounded the other way
            assert float((getattr(got, name) == getattr(want, name)).float().mean()) > 0.99, (form, name)


def case_ranks_and_ring():
    """R = 1 and 3, a ring smaller than the rows and than one expert, an expert without tokens, sizes that cut a block of 32: the same
    bits."""
    problem = Problem(2, 80, 80, 48, 4, 1)
    problem.ids_TK[problem.ids_TK == 3] = 1
    problem.ids_TK[:70, 0] = 2  # more than two tiles, the most of a group
    problem.weights_TK = torch.randn(80, 1)
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, expected(problem, d_y), 1e-3)
    for grad in (first.gate, first.up, first.down):
        assert not grad[3].any() and not torch.signbit(grad[3]).any()
    assert_equal(run(problem, d_y, 3), first, 3)


def case_scaled_ranks_and_ring():
    """The same of the other form, with one expert of three tiles and a ring of two."""
    problem = Problem(2, 290, 80, 80, 3, 1, masked=0.05)
    problem.ids_TK[problem.ids_TK == 1] = 2
    problem.ids_TK[:20] = 0
    problem.weights_TK = torch.randn(290, 1)
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(TALL, ring_tiles=64), form="scaled")
    assert_near(first, expected(problem, d_y), 1e-3)
    assert not any(grad[1].any() for grad in (first.gate, first.up, first.down))
    assert_equal(run(problem, d_y, 3, replace(TALL, ring_tiles=2), form="scaled"), first, 3)


def case_knobs():
    """Ring, group, parts, programs, width of a tile, C: none, some: no bit moves; shared experts in bf16."""
    problem = Problem(3, 50, 64, 48, 3, 1, shared_width=24)
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, expected(problem, d_y))
    some = saved_by_forward(problem, BLOCK + 5)
    one, two = dict(ring_tiles=2, parts=4, num_sms=3, run=2, block_n=32), dict(ring_tiles=7, group_tiles=2, parts=1, num_sms=1, block_n=128)
    for changes, saved in ((one, None), (two, some)):
        assert_equal(run(problem, d_y, plan=replace(PLAN, **changes), saved=saved), first, changes)


def case_scaled_knobs():
    """The same of the other form, without shared experts: two pairs of tiles of columns, the second one's second tile without a column; of
    two tiles of rows one saved."""
    problem = Problem(3, 140, 272, 336, 1, 1)
    d_y = make_d_y(problem)
    first = run(problem, d_y, plan=replace(TALL, ring_tiles=64), form="scaled")
    assert_near(first, expected(problem, d_y))
    saved = saved_by_forward(problem, 128 + 5, form="scaled")
    plan = replace(TALL, ring_tiles=2, parts=1, num_sms=3, run=2)
    assert_equal(run(problem, d_y, plan=plan, saved=saved, form="scaled"), first, plan)


def case_delays():
    """Random delays at every atomic operation, one to three ranks: the same bits."""
    problem = Problem(4, 24, 64, 48, 3, 2)
    d_y = make_d_y(problem)
    for form, seeds in (("wide", (0, 1)), ("scaled", (0,))):
        first = run(problem, d_y, form=form)
        assert_near(first, expected(problem, d_y), 1e-3)
        for seed in seeds:
            plan = replace(PLANS[form], num_sms=2 - seed, ring_tiles=2 + seed)
            assert_equal(run(problem, d_y, 2 + seed, plan, form=form, max_delay_s=0.004, seed=seed), first, (form, seed))


def case_shared_and_clamp():
    """Shared experts of another width, clamps of their own, two ranks, some rows saved; gate and up quantized beforehand."""
    problem = Problem(5, 40, 80, 48, 2, 1, masked=0.0, shared_width=40)
    d_y = make_d_y(problem)
    want = expected(problem, d_y, 0.25, 0.5)
    for form in PLANS:
        assert_near(run(problem, d_y, clamp=0.25, shared_clamp=0.5, form=form, beforehand=True), want)
    saved = saved_by_forward(problem, 2 * BLOCK, 2, 0.25)
    assert_near(run(problem, d_y, 2, clamp=0.25, saved=saved), expected(problem, d_y, 0.25))


def case_half_tiles():
    """Only the bf16 kernel has half tiles: last tiles of 64 and 65 rows, and one of 64 after a whole one, have the bits of whole tiles,
    saved and computed again."""
    routes = [64, 0, 65, 192]
    problem = Problem(8, sum(routes), 64, 48, len(routes), 1)
    ids = torch.repeat_interleave(torch.arange(len(routes)), torch.tensor(routes))
    problem.ids_TK = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(8))].view(-1, 1)
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    d_y, first = make_d_y(problem), None
    tall = replace(PLAN, block_m=128, block_k=64)
    for ranks, half_tiles, ring, kept in ((1, False, 16, 0), (2, True, 3, 0), (1, True, 16, 1024)):
        saved = saved_by_forward(problem, kept, 1, 0.5, block_m=128, ring_tiles=8) if kept else None
        got = run(problem, d_y, ranks, replace(tall, half_tiles=half_tiles, ring_tiles=ring), clamp=0.5, saved=saved)
        if first is None:
            first = got
            assert_near(first, expected(problem, d_y, 0.5))
        assert_equal(got, first, (ranks, half_tiles, ring, kept))


def case_no_block_crosses_an_expert():
    problem = Problem(13, sum(COUNTS) + MASKED, 80, 48, len(COUNTS), 1, masked=0.0)
    tall = replace(PLAN, block_m=128, block_k=64, ring_tiles=16)
    check_counts(lambda d_y, filling: run(problem, d_y, plan=tall, filling=filling), problem, lambda d_y: expected(problem, d_y))


def case_scaled_no_block_crosses_an_expert():
    problem = Problem(13, sum(COUNTS) + MASKED, 80, 80, len(COUNTS), 1, masked=0.0)
    tall = replace(TALL, ring_tiles=16)
    check_counts(
        lambda d_y, filling: run(problem, d_y, plan=tall, form="scaled", filling=filling), problem, lambda d_y: expected(problem, d_y)
    )


def case_needs():
    """Only what is asked for, with the same bits; frozen experts among it."""
    problem = Problem(6, 30, 64, 48, 2, 1, shared_width=24)
    d_y = make_d_y(problem)
    of_weights = ["gate", "up", "down", "shared gate", "shared up", "shared down"]
    for form in PLANS:
        whole = dict(run(problem, d_y, form=form).items())
        for x, weights, experts in ((True, True, False), (False, False, True), (False, True, False))[: 3 if form == "wide" else 2]:
            got = dict(run(problem, d_y, needs=Needs(x, weights, experts, shared=experts), form=form).items())
            assert sorted(got) == sorted([*["d_x"] * x, *["d_weights"] * weights, *of_weights * experts]), (form, x, weights, experts)
            assert all(torch.equal(value, whole[name]) for name, value in got.items()), (form, x, weights, experts)


def case_main_grads():
    check_main_grads(run, Problem(7, 60, 96, 32, 3, 1, masked=0.0, shared_width=16))


def case_extremes():
    """All masked, all to one expert, no tokens, more ranks than experts."""
    for ids, tokens, experts in ((-1, 20, 3), (2, 20, 3), (None, 0, 3), (None, 20, 2)):
        problem = Problem(8, tokens, 80, 48, experts, 2, masked=0.0)
        if ids is not None:
            problem.ids_TK.fill_(ids)
            problem.weights_TK = torch.rand(tokens, 2)
        d_y = make_d_y(problem)
        for form in PLANS if ids is None else ("wide",):
            assert_near(run(problem, d_y, 3 if experts == 2 else 2, form=form), expected(problem, d_y), 1e-3)


def case_special_values():
    """NaN in a token's dY stays with its own gradients and its experts'; an expert with NaN does not reach another one's tokens."""
    for form in PLANS:
        problem = Problem(9, 20, 64, 48, 3, 1, masked=0.0)
        problem.ids_TK[4] = 2
        d_y = make_d_y(problem)
        clean = run(problem, d_y) if form == "wide" else None
        problem.down_EHI[1, 3, 5], d_y[4, 7] = float("nan"), float("inf")
        got, fine = run(problem, d_y, form=form), (problem.ids_TK[:, 0] != 1)
        fine[4] = False
        want = expected(problem, d_y)
        for name in ("d_x", "d_weights"):
            mine, theirs = getattr(got, name), getattr(want, name)
            assert torch.equal(mine.isfinite(), theirs.isfinite()), (form, name)
            assert mine[fine].isfinite().all() and mine[4].isnan().all()
        assert got.gate[0].isfinite().all() and (clean is None or torch.equal(got.gate[0], clean.gate[0])), form


def case_every_block_is_scaled():
    """Scales far apart: blocks of dY by powers of two, those of the weights by their inverse, and d_gate's by the rows of gate and up."""
    problem = Problem(10, 24, 160, 160, 2, 2, masked=0.0)
    factors = torch.tensor([2.0**-20, 1.0, 2.0**20, 2.0**-10, 2.0**10]).repeat_interleave(32)
    d_y = make_d_y(problem)
    d_y *= factors
    problem.down_EHI /= factors[:, None]
    small = torch.tensor([2.0**-12, 1.0, 2.0**12, 2.0**-6, 2.0**6]).repeat_interleave(32)
    problem.down_EHI *= small  # and with them dHid, d_gate and d_up
    for weight in (problem.gate_EIH, problem.up_EIH):
        weight[:, :32] *= 2.0**-3
    for form in PLANS:
        assert_near(run(problem, d_y, form=form), expected(problem, d_y))


def case_trace():
    """Every task of the list has a record, and the products' end is noted."""
    problem = Problem(12, 10, 64, 144, 2, 2, masked=0.0)
    (workspace,) = make_workspaces(problem, 1)
    (rows,) = make_schedules(problem, [workspace], 128)
    d_y = make_d_y(problem)
    launch_backward.publish(workspace, d_y, problem.x_TH, problem.weights_TK, MX_ROW)
    experts = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    saved, weights = torch_saved(problem, slice(0, 10)), shared(problem.weights_TK)
    plan = replace(TALL, trace=True)
    call = launch_backward_mxfp8.prepare(workspace, rows, saved, weights, *experts, MxTransposed.of(*experts), None, ALL, None, plan)
    share(workspace, call)
    call.order.write(2)
    run_concurrently(backward_mxfp8_kernel, 2, [call.kernel])
    line = trace.backward_timeline(workspace, workspace.scratch["trace"], 2)
    tiles = int(rows.num_tokens) // 128
    count = collections.Counter(line.kind)
    assert (count["pull"], count["gate up"], count["hidden"], count["d_x"]) == (2 * tiles, 2 * tiles, tiles, tiles), count
    noted = {name for name, computed in zip(line.kind, line.computed.isnan().tolist(), strict=True) if not computed}
    assert noted >= {"gate up", "hidden", "d_x"}


def case_weights():
    """What the backward multiplies by is what the recipe says, and not what the forward has."""
    problem = Problem(11, 4, 144, 80, 2, 1)
    weights = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    for weight in weights:
        weight[:, 0, 0] = 2.0**12  # its row has another block than its column
    wide, scaled = WideTransposed.of(*weights), MxTransposed.of(*weights)
    wants = [RECIPE.weight(weight.float(), -2) for weight in weights]
    for number, other, want in zip(wide, WideExperts.of(*weights), wants, strict=True):
        assert number.dtype == torch.bfloat16 and torch.equal(number.float(), want) and not torch.equal(number, other)
    pairs = [*zip(scaled.gate_up.values, scaled.gate_up.scale.chunk(2), strict=True), scaled.down]
    for (values, codes), want in zip(pairs, wants, strict=True):
        assert values.shape[1] == 256
        got = dequantize(values, from_tcgen05(codes, 256, -(-values.shape[2] // 32)), MX_ROW)
        assert torch.equal(got[:, : want.shape[2]], want.mT) and not got[:, want.shape[2] :].any()
    frozen = WideTransposed.of(*weights, need_x=False)
    assert frozen.gate is problem.gate_EIH and frozen.up is problem.up_EIH
    assert MxTransposed.of(*weights, need_x=False).gate_up is None


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
