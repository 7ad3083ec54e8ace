"""The forward in blockwise FP8 under the interpreter, against the CPU's executor; the last line printed is JSON.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_fp8.py [case ...]
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from typing import NamedTuple

# isort: off
from interpreted_cases import BLOCK, CPU, PLAN as SMALL, Problem, make_schedules, shared  # before triton: sets TRITON_INTERPRET

# isort: on
import torch
from interpret import run_cases, run_concurrently
from torch import Tensor

import mok
from mok import quantize as formats
from mok import reference, trace
from mok import schedule as host_schedule
from mok.kernels import launch, launch_fp8, memory
from mok.kernels.combine import combine
from mok.kernels.forward import forward_kernel
from mok.kernels.forward_fp8 import forward_fp8_kernel
from mok.kernels.launch import ForwardPlan, Workspace
from mok.kernels.launch_fp8 import QuantizedExperts
from mok.quantize import FP8_ROW, FP8_SQUARE, Quantized, Recipe, dequantize

PLAN = dataclasses.replace(SMALL, block_h=64)  # tiles of 16 rows; columns and steps are 128, the block of the format


def make_workspaces(problem: Problem, ranks: int) -> list[Workspace]:
    most = max(part.stop - part.start for part in problem.split(ranks))
    layout = memory.regions(most, problem.hidden, problem.experts, problem.top_k, ranks, bf16=False)
    views = memory.virtual_memory([*layout, *memory.quantized_regions(most, problem.hidden)], ranks, CPU)
    for view in views:
        view.own["combine"].fill_(float("nan"))
        view.own["x_e4m3"].fill_(formats.E4M3_NAN)
        view.own["x_scale"].fill_(formats.E8M0_NAN)
    return [Workspace(view, most, problem.hidden, problem.top_k, CPU, 120.0, num_sms=2) for view in views]


class Filling(NamedTuple):
    """What memory holds before a call: floating-point numbers, E4M3 values, codes."""

    number: float
    value: int
    code: int


NAN = Filling(float("nan"), 0xFF, formats.E8M0_NAN)
LARGE = Filling(1e30, 0x7E, 247)  # where NaN would show it only moves a scale


def share(workspace: Workspace, *tensors: Tensor | None, filling: Filling = NAN) -> None:
    """The programs are processes: what they write must be shared; and it is filled."""
    for name, tensor in [*workspace.scratch.items(), *(("", tensor) for tensor in tensors)]:
        if tensor is not None:
            small = 0 if tensor.dtype != torch.uint8 else filling.code if "scale" in name else filling.value
            tensor.share_memory_().fill_(filling.number if tensor.is_floating_point() else small)


def run_layer(
    problem: Problem, ranks: int, plan: ForwardPlan = PLAN, clamp: float | None = None, shared_clamp: float | None = None,
    saved_rows: int | None = None, rings: list[Tensor] | None = None, kernel=forward_fp8_kernel, **disturb,
) -> tuple[Tensor, list, list]:  # fmt: skip
    """The whole layer on R virtual ranks, the programs of all ranks at the same time. -> (out of all tokens, schedules, saved).

    rings takes every rank's codes of h.
    """
    workspaces = make_workspaces(problem, ranks)
    schedules = make_schedules(problem, workspaces, plan.block_m)
    launches, shared_outs, saved = [], [], []
    for workspace, rows, part in zip(workspaces, schedules, problem.split(ranks), strict=True):
        local = host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank)
        mine = slice(local.start, local.stop)
        x = shared(problem.x_TH[part].clone())
        launch_fp8.publish(workspace, x)
        out = None
        if problem.shared:
            arguments, none, _, out = launch_fp8.shared_arguments(workspace, rows, x, problem.shared, shared_clamp, False, plan)
            share(workspace, out)
            launch.write_tasks(workspace, arguments, none, plan)
            run_concurrently(forward_kernel, plan.num_sms, [arguments])
        experts = QuantizedExperts.of(problem.gate_EIH[mine], problem.up_EIH[mine], problem.down_EHI[mine])
        experts.check()
        arguments, kept = launch_fp8.kernel_arguments(workspace, rows, experts, clamp, saved_rows or 0, saved_rows is not None, plan)
        share(workspace, *(vars(kept).values() if kept else ()))
        launch_fp8.write_tasks(workspace, arguments, rows, plan)
        launches.append(arguments)
        shared_outs.append(out)
        saved.append(kept)
    run_concurrently(kernel, plan.num_sms, launches, **disturb)
    for workspace in workspaces:
        workspace.check()
    if rings is not None:
        rings += [workspace.scratch["h_scale_ring"] for workspace in workspaces]
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
        shared=shared_out, clamp=clamp, precision="fp8",
    )  # fmt: skip


def assert_near(out: Tensor, want: Tensor) -> None:
    """Sums in another order: most elements have the same bits, and a few are further off, where gate, up, h or an E4M3 value rounded the
    other way."""
    assert torch.isfinite(out.float()).all(), "not finite"
    if not out.numel():
        return
    error = (out.float() - want.float()).norm(dim=1) / want.float().norm(dim=1).clamp(min=1e-3)
    assert float(error.max()) < 4e-3, f"relative error {float(error.max()):.2e} in row {int(error.argmax())}"
    same = float((out == want).float().mean())
    assert same > 0.7, f"only {same:.3f} of the elements are equal"


def case_ranks():
    """R = 1, 2, 3; a ring smaller than the rows, masked slots, an expert without tokens, sizes that are no multiple of a block."""
    problem = Problem(1, 60, 144, 160, 5, 3)
    problem.ids_TK[problem.ids_TK == 3] = -1
    problem.weights_TK[problem.ids_TK < 0] = float("nan")
    want, first = expected(problem), None
    for ranks in (1, 2, 3):
        out, schedules, _ = run_layer(problem, ranks)
        assert any(int(s.num_tokens) > PLAN.ring_tiles * BLOCK for s in schedules), "the ring is not smaller than the rows"
        assert_near(out, want)
        first = out if first is None else first
        assert torch.equal(out, first), ranks


def case_delays():
    """Ten seeds of random delays at every atomic operation: the same bits."""
    problem = Problem(2, 20, 32, 144, 2, 2)
    first, _, _ = run_layer(problem, 1)
    assert_near(first, expected(problem))
    plans = [PLAN, dataclasses.replace(PLAN, num_sms=1)]
    for seed in range(10):
        out, _, _ = run_layer(problem, 1 + seed % 3, plans[seed % 2], max_delay_s=0.003, seed=seed)
        assert torch.equal(out, first), seed


def case_knobs():
    """Minibatch, ring, parts and programs move no bit; shared experts in bf16."""
    problem = Problem(3, 50, 272, 48, 3, 2, shared_width=24)
    first, _, _ = run_layer(problem, 1)
    assert_near(first, expected(problem))
    small, large = dict(minibatch_tiles=1, ring_tiles=2), dict(minibatch_tiles=3, ring_tiles=9, parts=1)
    for changes in (small, large, dict(parts=4, num_sms=3), dict(num_sms=1)):
        out, _, _ = run_layer(problem, 2, dataclasses.replace(PLAN, **changes))
        assert torch.equal(out, first), changes


def case_clamp_and_saved():
    """Clamps; gate and up of the first rows saved as they were used, padding as zeros; nothing beyond C is written."""
    problem = Problem(4, 40, 256, 272, 4, 2, masked=0.0, shared_width=80)
    recipe = Recipe("fp8")
    for clamp, shared_clamp in ((None, None), (0.25, 0.5)):
        out, schedules, saved = run_layer(problem, 1, clamp=clamp, shared_clamp=shared_clamp, saved_rows=40)
        assert_near(out, expected(problem, clamp, shared_clamp))
        rows = schedules[0]
        token, live = rows.peer_token_idx[:40].long() // 2, rows.peer_rank[:40, None] >= 0
        assert not live.all()
        x = torch.where(live, recipe.rows(problem.x_TH.float())[token], 0)
        expert = rows.tile_expert[:3].repeat_interleave(BLOCK)[:40].long()
        for kept, weights in ((saved[0].gate_CI, problem.gate_EIH), (saved[0].up_CI, problem.up_EIH)):
            want = torch.einsum("mh,mih->mi", x, recipe.weight(weights.float(), -1)[expert])
            assert kept.shape == (40, 272) and not kept[~live[:, 0]].any()
            assert torch.allclose(kept.float(), want, atol=1e-4, rtol=2**-8)


def case_half_tiles():
    """Last tiles of 1, 63, 64, 65, 127 and 128 rows, and one of 64 after a whole one: the bits of whole tiles, saved ones too.

    Of a half tile's h the second half is not written.
    """
    routes = [1, 63, 64, 65, 0, 127, 128, 192]
    problem = Problem(8, sum(routes) // 2, 32, 48, len(routes), 2)
    ids = torch.repeat_interleave(torch.arange(len(routes)), torch.tensor(routes))
    problem.ids_TK = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(8))].view(-1, 2)
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    want, first = expected(problem, clamp=0.5), None
    for ranks, half_tiles, ring in ((1, True, 8), (1, False, 8), (2, True, 4)):
        plan, rings = dataclasses.replace(PLAN, block_m=128, half_tiles=half_tiles, ring_tiles=ring), []
        out, schedules, saved = run_layer(problem, ranks, plan, clamp=0.5, saved_rows=1024, rings=rings)
        assert_near(out, want)
        kept = [(k.gate_CI[: int(s.num_tokens)], k.up_CI[: int(s.num_tokens)]) for k, s in zip(saved, schedules, strict=True)]
        results = [out, *(torch.cat(part) for part in zip(*kept, strict=True))]
        first = first or results
        assert all(torch.equal(got, want) for got, want in zip(results, first, strict=True)), (ranks, half_tiles)
        padding = torch.cat([s.peer_rank[: int(s.num_tokens)] < 0 for s in schedules])
        assert not results[1][padding].any() and not results[2][padding].any()
        if ring == 8:
            empty = padding.view(-1, 2, 64).all(dim=2)
            untouched = (rings[0][: len(padding)].view(-1, 2, 64) == 0xFF).all(dim=2)
            assert empty.sum() == 4 and torch.equal(untouched, empty & half_tiles)


def case_extremes():
    """All masked, all to one expert, no tokens, K larger than a rank's experts."""
    for ids, tokens in ((-1, 20), (2, 40), (None, 0)):
        problem = Problem(5, tokens, 144, 48, 3, 2, masked=0.0)
        if ids is not None:
            problem.ids_TK.fill_(ids)
            problem.weights_TK = torch.rand(tokens, 2)
        for ranks in (1, 2):
            out, _, _ = run_layer(problem, ranks)
            assert out.shape == problem.x_TH.shape
            if ids == -1:
                assert not out.any()
            else:
                assert_near(out, expected(problem))


def case_special_values():
    """NaN and Inf make NaN of their own token alone; tokens of zeros, of subnormals and near the largest number are as on the CPU."""
    problem = Problem(6, 30, 256, 144, 3, 2, masked=0.0)
    problem.x_TH[3], problem.x_TH[4] = 0.0, 1e-39
    problem.x_TH[5] *= 2.0**100
    problem.x_TH[6] *= 2.0**-90
    clean, _, _ = run_layer(problem, 2)
    want = expected(problem)
    finite = [t for t in range(30) if t != 5]
    assert_near(clean[finite], want[finite])
    assert torch.equal(clean[5].isfinite(), want[5].isfinite())
    problem.x_TH[11, 5], problem.x_TH[12, 200] = float("nan"), float("inf")
    out, _, _ = run_layer(problem, 2)
    assert out[11:13].isnan().all()
    others = torch.tensor([t not in (5, 11, 12) for t in range(30)])
    assert torch.equal(out[others], clean[others])


def case_every_step_is_scaled():
    """Scales far apart: a row's blocks by 2^(8 b), the weights' blocks by their inverse. Without either scale nothing would be left."""
    problem = Problem(7, 24, 384, 256, 2, 2, masked=0.0)
    factors = torch.tensor([2.0**-20, 1.0, 2.0**20]).repeat_interleave(128)
    problem.x_TH *= factors
    for weight in (problem.gate_EIH, problem.up_EIH):
        weight /= factors
        weight[:, :128] *= 2.0**-3
    problem.down_EHI[:, 128:256] *= 2.0**5
    out, _, _ = run_layer(problem, 2)
    assert_near(out, expected(problem))


def case_trace():
    """Every task of the list has a record, and the products' end is noted."""
    problem = Problem(9, 12, 32, 144, 3, 2, masked=0.0)
    plan, (workspace,) = dataclasses.replace(PLAN, trace=True), make_workspaces(problem, 1)
    (rows,) = make_schedules(problem, [workspace])
    launch_fp8.publish(workspace, problem.x_TH)
    experts = QuantizedExperts.of(problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    arguments, _ = launch_fp8.kernel_arguments(workspace, rows, experts, None, 0, False, plan)
    share(workspace)
    launch_fp8.write_tasks(workspace, arguments, rows, plan)
    run_concurrently(forward_fp8_kernel, 2, [arguments])
    line, tiles = trace.forward_timeline(workspace, workspace.scratch["trace"], 2), int(rows.num_tokens) // BLOCK
    count = collections.Counter(line.kind)
    assert (count["pull"], count["up"], count["down"]) == (tiles * 2, tiles * 2, tiles), count
    assert set(line.program.tolist()) <= {0, 1} and not line.begin.isnan().any() and not line.ready.isnan().any()
    noted = {name for name, computed in zip(line.kind, line.computed.isnan().tolist(), strict=True) if not computed}
    assert noted == {"up", "down"}


def case_weights_are_checked():
    problem = Problem(8, 4, 144, 48, 2, 1)
    good = QuantizedExperts.of(problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    for kind, bad in (
        (TypeError, good._replace(up=Quantized(problem.up_EIH, good.up.scale))),
        (TypeError, good._replace(up=Quantized(good.up.values, good.up.scale.float()))),
        (ValueError, good._replace(down=Quantized(good.down.values, good.gate.scale))),
        (ValueError, good._replace(gate=Quantized(good.gate.values.mT.contiguous().mT, good.gate.scale))),
    ):
        try:
            bad.check()
            raise AssertionError("no error")
        except kind as error:
            assert str(error).startswith(("gate", "up", "down")), error
    for weight, made in zip((problem.gate_EIH, problem.up_EIH, problem.down_EHI), good, strict=True):
        assert torch.equal(dequantize(*made, FP8_SQUARE), Recipe("fp8").weight(weight.float(), -1))
    assert FP8_ROW == (1, launch_fp8.BLOCK)


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
