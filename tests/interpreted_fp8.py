"""The forward in blockwise FP8 under the interpreter, against the CPU's executor; the last line printed is JSON.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_fp8.py [case ...]
"""

from __future__ import annotations

import dataclasses
import sys

# isort: off
from interpreted_cases import BLOCK, CPU, PLAN as SMALL, Problem, make_schedules, shared  # before triton: sets TRITON_INTERPRET

# isort: on
import torch
from interpret import run_cases, run_concurrently
from torch import Tensor

import mok
from mok import quantize as formats
from mok import reference
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
    layout = memory.regions(most, problem.hidden, problem.experts, problem.top_k, ranks)
    views = memory.virtual_memory([*layout, *memory.quantized_regions(most, problem.hidden)], ranks, CPU)
    for view in views:
        view.own["combine"].fill_(float("nan"))
        view.own["x"].fill_(float("nan"))
        view.own["x_e4m3"].fill_(formats.E4M3_NAN)
        view.own["x_scale"].fill_(formats.E8M0_NAN)
    return [Workspace(view, most, problem.hidden, problem.top_k, CPU, 120.0, num_sms=2) for view in views]


def share(workspace: Workspace, *tensors: Tensor | None) -> None:
    """The programs are processes: what they write must be shared; and it holds NaN."""
    for tensor in [*workspace.scratch.values(), *tensors]:
        if tensor is not None:
            tensor.share_memory_().fill_(float("nan") if tensor.is_floating_point() else 0xFF if tensor.dtype == torch.uint8 else 0)


def run_layer(
    problem: Problem, ranks: int, plan: ForwardPlan = PLAN, clamp: float | None = None, shared_clamp: float | None = None,
    saved_rows: int | None = None, **disturb,
) -> tuple[Tensor, list, list]:  # fmt: skip
    """The whole layer on R virtual ranks, the programs of all ranks at the same time. -> (out of all tokens, schedules, saved)."""
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
    run_concurrently(forward_fp8_kernel, plan.num_sms, launches, **disturb)
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


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
