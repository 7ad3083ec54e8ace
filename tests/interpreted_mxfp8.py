"""The forward in MXFP8 under the interpreter, against the CPU's executor; the last line printed is JSON.

Both forms of it: "scaled", E4M3 operands with codes in tiles of 128 rows, and "wide", the bf16 kernel on numbers of MXFP8.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_mxfp8.py [case ...]
"""

from __future__ import annotations

import collections
import dataclasses
import sys

# isort: off
from interpreted_cases import CPU, PLAN as SMALL, Problem, make_schedules, shared  # before triton: sets TRITON_INTERPRET
from interpreted_fp8 import assert_near, share

# isort: on
import torch
from interpret import run_cases, run_concurrently
from torch import Tensor

import mok
from mok import quantize as formats
from mok import reference, trace
from mok import schedule as host_schedule
from mok.kernels import launch, launch_fp8, launch_mxfp8, memory
from mok.kernels import quantize as kernels
from mok.kernels.combine import combine
from mok.kernels.forward import forward_kernel
from mok.kernels.forward_mxfp8 import forward_mxfp8_kernel
from mok.kernels.launch import Workspace
from mok.kernels.launch_mxfp8 import MxExperts, WideExperts
from mok.quantize import MX_ROW, Quantized, Recipe, dequantize, from_tcgen05, to_tcgen05

RECIPE = Recipe("mxfp8")
PLANS = {
    "scaled": dataclasses.replace(SMALL, block_m=128, block_h=64, ring_tiles=4),  # of its tiles' sizes none can be changed
    "wide": dataclasses.replace(SMALL, block_n=32, block_k=32, block_h=64),
}


def make_workspaces(problem: Problem, ranks: int) -> list[Workspace]:
    most = max(part.stop - part.start for part in problem.split(ranks))
    layout = memory.regions(most, problem.hidden, problem.experts, problem.top_k, ranks, bf16=False)
    views = memory.virtual_memory([*layout, *memory.quantized_regions(most, problem.hidden, MX_ROW)], ranks, CPU)
    for view in views:
        view.own["combine"].fill_(float("nan"))
        view.own["x_e4m3"].fill_(formats.E4M3_NAN)
        view.own["x_scale"].fill_(formats.E8M0_NAN)
    return [Workspace(view, most, problem.hidden, problem.top_k, CPU, 120.0, num_sms=2) for view in views]


def run_layer(
    problem: Problem, ranks: int, form: str, changes: dict | None = None, clamp: float | None = None, shared_clamp: float | None = None,
    saved_rows: int | None = None, **disturb,
) -> tuple[Tensor, list, list]:  # fmt: skip
    """The whole layer on R virtual ranks, the programs of all ranks at the same time. -> (out of all tokens, schedules, saved)."""
    plan, save, wide = dataclasses.replace(PLANS[form], **(changes or {})), saved_rows is not None, form == "wide"
    workspaces = make_workspaces(problem, ranks)
    schedules = make_schedules(problem, workspaces, plan.block_m)
    launches, shared_outs, saved, alive = [], [], [], []  # a descriptor of a pair holds one of its two tensors
    for workspace, rows, part in zip(workspaces, schedules, problem.split(ranks), strict=True):
        local = host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank)
        weights = [w[local.start : local.stop].contiguous() for w in (problem.gate_EIH, problem.up_EIH, problem.down_EHI)]
        x = shared(problem.x_TH[part].clone())
        launch_fp8.publish(workspace, x, MX_ROW)
        out = None
        experts = (WideExperts if wide else MxExperts).of(*weights)
        alive.append(experts)
        if isinstance(experts, WideExperts):
            arguments, kept, out = launch.kernel_arguments(
                workspace, rows, x, *experts, problem.shared, clamp, shared_clamp, saved_rows or 0, save, plan,
                problem.hidden, problem.gate_EIH.shape[1], mxfp8=True,
            )  # fmt: skip
            share(workspace, out, *(vars(kept).values() if kept else ()))
            launch.write_tasks(workspace, arguments, rows, plan)
        else:
            if problem.shared:
                given, none, _, out = launch_fp8.shared_arguments(workspace, rows, x, problem.shared, shared_clamp, False, plan)
                share(workspace, out)
                launch.write_tasks(workspace, given, none, plan)
                run_concurrently(forward_kernel, plan.num_sms, [given])
            experts.check(problem.hidden)
            arguments, kept = launch_mxfp8.kernel_arguments(workspace, rows, experts, clamp, saved_rows or 0, save, plan)
            share(workspace, *(vars(kept).values() if kept else ()))
            launch_fp8.write_tasks(workspace, arguments, rows, plan)
        launches.append(arguments)
        shared_outs.append(out)
        saved.append(kept)
    run_concurrently(forward_kernel if wide else forward_mxfp8_kernel, plan.num_sms, launches, **disturb)
    for workspace in workspaces:
        workspace.check()
    outs = [
        combine(w.memory.own["combine"], problem.ids_TK[part], problem.weights_TK[part], problem.experts, out)
        for w, part, out in zip(workspaces, problem.split(ranks), shared_outs, strict=True)
    ]
    return torch.cat(outs), schedules, saved


def expected(problem: Problem, clamp: float | None = None, shared_clamp: float | None = None) -> Tensor:
    """What the executor computes on a CPU."""
    shared_out = reference.swiglu(problem.x_TH, *problem.shared, shared_clamp) if problem.shared else None
    return mok.moe(
        problem.x_TH, problem.ids_TK, problem.weights_TK, problem.gate_EIH, problem.up_EIH, problem.down_EHI,
        shared=shared_out, clamp=clamp, precision="mxfp8",
    )  # fmt: skip


def case_ranks():
    """R = 1, 2, 3; a ring smaller than the rows, masked slots, an expert without tokens, sizes that cut a block of 32."""
    problem = Problem(1, 60, 144, 176, 6, 3)
    problem.ids_TK[problem.ids_TK == 3] = -1
    problem.weights_TK[problem.ids_TK < 0] = float("nan")
    want = expected(problem)
    for form, plan in PLANS.items():
        first = None
        for ranks in (1, 2, 3):
            out, schedules, _ = run_layer(problem, ranks, form, dict(minibatch_tiles=1, ring_tiles=2))
            if ranks < 3:
                assert any(int(s.num_tokens) > 2 * plan.block_m for s in schedules), "the ring is not smaller than the rows"
            assert_near(out, want)
            first = out if first is None else first
            assert torch.equal(out, first), (form, ranks)


def case_delays():
    """Random delays at every atomic operation: the same bits."""
    problem = Problem(2, 20, 64, 144, 2, 2)
    for form in PLANS:
        first, _, _ = run_layer(problem, 1, form)
        assert_near(first, expected(problem))
        for seed in range(6):
            out, _, _ = run_layer(problem, 1 + seed % 3, form, dict(num_sms=2 - seed % 2), max_delay_s=0.003, seed=seed)
            assert torch.equal(out, first), (form, seed)


def case_knobs():
    """Minibatch, ring, parts and programs move no bit; shared experts in bf16."""
    problem = Problem(3, 50, 272, 48, 3, 2, shared_width=24)
    for form in PLANS:
        first, _, _ = run_layer(problem, 1, form)
        assert_near(first, expected(problem))
        small, large = dict(minibatch_tiles=1, ring_tiles=2), dict(minibatch_tiles=3, ring_tiles=9, parts=1)
        for changes in (small, large, dict(parts=4, num_sms=3), dict(num_sms=1)):
            out, _, _ = run_layer(problem, 2, form, changes)
            assert torch.equal(out, first), (form, changes)


def case_clamp_and_saved():
    """Clamps; gate and up of the first rows saved as they were used, padding as zeros; nothing beyond C is written."""
    problem = Problem(4, 40, 256, 272, 4, 2, masked=0.0, shared_width=80)
    for form, clamps in (("wide", (None, None)), ("wide", (0.25, 0.5)), ("scaled", (0.25, 0.5))):
        count, height = (200, 128) if form == "scaled" else (40, 16)
        out, schedules, saved = run_layer(problem, 1, form, clamp=clamps[0], shared_clamp=clamps[1], saved_rows=count)
        assert_near(out, expected(problem, *clamps))
        rows = schedules[0]
        token, live = rows.peer_token_idx[:count].long() // 2, rows.peer_rank[:count, None] >= 0
        assert not live.all()
        x = torch.where(live, RECIPE.rows(problem.x_TH.float())[torch.where(live[:, 0], token, 0)], 0)
        expert = rows.tile_expert.repeat_interleave(height)[:count].long()
        for kept, weights in ((saved[0].gate_CI, problem.gate_EIH), (saved[0].up_CI, problem.up_EIH)):
            want = torch.einsum("mh,mih->mi", x, RECIPE.weight(weights.float(), -1)[expert])
            assert kept.shape == (count, 272) and not kept[~live[:, 0]].any()
            assert torch.allclose(kept.float(), want, atol=1e-4, rtol=2**-8)


def case_half_tiles():
    """Only the bf16 kernel has half tiles: last tiles of 1, 63, 64, 65 and 128 rows, the bits of whole tiles."""
    routes = [1, 63, 64, 65, 0, 128, 192, 1]
    problem = Problem(8, sum(routes) // 2, 64, 48, len(routes), 2)
    ids = torch.repeat_interleave(torch.arange(len(routes)), torch.tensor(routes))
    problem.ids_TK = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(8))].view(-1, 2)
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    want, first = expected(problem, clamp=0.5), None
    for ranks, half_tiles in ((1, True), (1, False), (2, True)):
        out, _, _ = run_layer(problem, ranks, "wide", dict(block_m=128, half_tiles=half_tiles), clamp=0.5)
        assert_near(out, want)
        first = out if first is None else first
        assert torch.equal(out, first), (ranks, half_tiles)


def case_extremes():
    """All masked, all to one expert, no tokens."""
    for ids, tokens in ((-1, 20), (2, 40), (None, 0)):
        problem = Problem(5, tokens, 144, 48, 3, 2, masked=0.0)
        if ids is not None:
            problem.ids_TK.fill_(ids)
            problem.weights_TK = torch.rand(tokens, 2)
        for form in PLANS:
            for ranks in (1, 2):
                out, _, _ = run_layer(problem, ranks, form)
                assert out.shape == problem.x_TH.shape
                if ids == -1:
                    assert not out.any()
                else:
                    assert_near(out, expected(problem))


def case_special_values():
    """NaN and Inf make NaN of their own token alone; tokens of zeros, of subnormals and near the largest number are as on the CPU."""
    clean_problem = Problem(6, 30, 256, 144, 3, 2, masked=0.0)
    clean_problem.x_TH[3], clean_problem.x_TH[4] = 0.0, 1e-39
    clean_problem.x_TH[5] *= 2.0**100
    clean_problem.x_TH[6] *= 2.0**-90
    want = expected(clean_problem)
    finite = [t for t in range(30) if t != 5]
    for form in PLANS:
        problem = Problem(6, 30, 256, 144, 3, 2, masked=0.0)
        problem.x_TH.copy_(clean_problem.x_TH)
        clean, _, _ = run_layer(problem, 2, form)
        assert_near(clean[finite], want[finite])
        assert torch.equal(clean[5].isfinite(), want[5].isfinite())
        problem.x_TH[11, 5], problem.x_TH[12, 200] = float("nan"), float("inf")
        out, _, _ = run_layer(problem, 2, form)
        assert out[11:13].isnan().all()
        others = torch.tensor([t not in (5, 11, 12) for t in range(30)])
        assert torch.equal(out[others], clean[others]), form


def case_an_expert_does_not_see_its_neighbour():
    """A slice of the last columns of h reads rows of the next expert's gate and up: huge ones move no scale, and NaN goes no further."""
    problem = Problem(11, 40, 96, 144, 3, 1, masked=0.0)
    first = {form: run_layer(problem, 1, form)[0] for form in PLANS}
    for value in (2.0**60, float("nan")):
        for weight in (problem.gate_EIH, problem.up_EIH):
            weight[1, :8] = value
        others = (problem.ids_TK != 1).all(1)
        for form in PLANS:
            out, _, _ = run_layer(problem, 1, form)
            assert torch.equal(out[others], first[form][others]), (form, value)


def case_every_block_is_scaled():
    """Scales far apart: a row's blocks by powers of two, the weights' blocks by their inverse. Without either nothing would be near."""
    problem = Problem(7, 24, 192, 272, 2, 2, masked=0.0)
    factors = torch.tensor([2.0**-20, 1.0, 2.0**20, 2.0**10, 2.0**-10, 2.0**5]).repeat_interleave(32)
    problem.x_TH *= factors
    for weight in (problem.gate_EIH, problem.up_EIH):
        weight /= factors
        weight[:, :32] *= 2.0**-3
        weight[:, 160:192] *= 2.0
    problem.down_EHI[:, 32:64] *= 2.0**5
    problem.down_EHI[..., 64:96] *= 2.0**-5
    for form in PLANS:
        out, _, _ = run_layer(problem, 2, form)
        assert_near(out, expected(problem))


def case_forms_agree():
    """Both forms multiply the same numbers: they differ by the order of sums only, and here not at all."""
    problem = Problem(10, 40, 160, 96, 3, 2)
    scaled, wide = (run_layer(problem, 1, form)[0] for form in PLANS)
    assert float((scaled == wide).float().mean()) > 0.95


def case_trace():
    """Every task of the list has a record, and the products' end is noted."""
    problem = Problem(9, 12, 64, 144, 3, 2, masked=0.0)
    plan, (workspace,) = dataclasses.replace(PLANS["scaled"], trace=True), make_workspaces(problem, 1)
    (rows,) = make_schedules(problem, [workspace], 128)
    launch_fp8.publish(workspace, problem.x_TH, MX_ROW)
    experts = MxExperts.of(problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    arguments, _ = launch_mxfp8.kernel_arguments(workspace, rows, experts, None, 0, False, plan)
    share(workspace)
    launch_fp8.write_tasks(workspace, arguments, rows, plan)
    run_concurrently(forward_mxfp8_kernel, 2, [arguments])
    line, tiles = trace.forward_timeline(workspace, workspace.scratch["trace"], 2), int(rows.num_tokens) // 128
    count = collections.Counter(line.kind)
    assert (count["pull"], count["up"], count["down"]) == (tiles * 2, tiles * 2, tiles), count
    noted = {name for name, computed in zip(line.kind, line.computed.isnan().tolist(), strict=True) if not computed}
    assert noted == {"up", "down"}


def case_weights():
    """Both forms hold what the recipe says; the checks find what does not fit; gate and up may lie in any order."""
    problem = Problem(8, 4, 144, 48, 2, 1)
    weights = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    good, wide = MxExperts.of(*weights), WideExperts.of(*weights)
    for weight, (values, scale), snapped in zip(weights, good, wide, strict=True):
        rows = values.shape[1]
        want = RECIPE.weight(weight.float(), -1)
        plain = from_tcgen05(scale, rows, -(-values.shape[2] // 32))
        assert torch.equal(to_tcgen05(plain), scale)
        assert torch.equal(dequantize(values, plain, MX_ROW)[:, : weight.shape[1]], want)
        assert snapped.dtype == torch.bfloat16 and torch.equal(snapped.float(), want)
        assert torch.equal(kernels.snap(snapped, MX_ROW), snapped)
    assert good.down.values.shape == (2, 256, 48) and not good.down.values[:, 144:].float().any()
    for kind, bad in (
        (TypeError, good._replace(up=Quantized(problem.up_EIH, good.up.scale))),
        (TypeError, good._replace(up=Quantized(good.up.values, good.up.scale.float()))),
        (ValueError, good._replace(down=Quantized(good.down.values, good.gate.scale))),
        (ValueError, good._replace(gate=Quantized(good.gate.values.mT.contiguous().mT, good.gate.scale))),
        (ValueError, good._replace(down=good.gate)),
    ):
        try:
            bad.check(144)
            raise AssertionError("no error")
        except kind as error:
            assert str(error).startswith(("gate", "up", "down")), error

    first, _, _ = run_layer(problem, 1, "scaled")
    plan = PLANS["scaled"]
    for order in (("gate", "up"), ("up", "gate")):  # of the scales; the values lie as they were made
        (workspace,) = make_workspaces(problem, 1)
        (rows,) = make_schedules(problem, [workspace], 128)
        launch_fp8.publish(workspace, problem.x_TH, MX_ROW)
        both = torch.stack([good._asdict()[name].scale for name in order])
        moved = good._replace(**{name: Quantized(good._asdict()[name].values, both[i]) for i, name in enumerate(order)})
        arguments, _ = launch_mxfp8.kernel_arguments(workspace, rows, moved, None, 0, False, plan)
        assert arguments["gate_up_scale_desc"].strides[0] > 0
        share(workspace)
        launch_fp8.write_tasks(workspace, arguments, rows, plan)
        run_concurrently(forward_mxfp8_kernel, 2, [arguments])
        out = combine(workspace.memory.own["combine"], problem.ids_TK, problem.weights_TK, problem.experts, None)
        assert torch.equal(out, first), order


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
