"""The host's side of the forward in blockwise FP8, and what it shares with that in MXFP8 (`launch_mxfp8.py`); `launch.py` has the rest.
Nothing here reads the device.

Legend: T tokens of this rank, H hidden, I intermediate, L experts of this rank, K choices per token, R ranks, S width of the shared
experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mok.kernels import launch
from mok.kernels.combine import combine
from mok.kernels.forward_fp8 import forward_fp8_kernel
from mok.kernels.launch import ForwardPlan, Saved, Workspace
from mok.kernels.launcher import cdiv, enqueue, next_power_of_2
from mok.kernels.quantize import quantize, quantize_into
from mok.kernels.schedule import DeviceSchedule
from mok.kernels.tasks import max_tickets
from mok.quantize import E4M3, FP8_ROW, FP8_SQUARE, Block, Quantized, scale_shape

BLOCK = FP8_SQUARE[0]
"""Columns and depth of a tile: one block of a weight."""


class QuantizedExperts(NamedTuple):
    """Values [L, I, H], [L, I, H], [L, H, I] with E8M0 codes [L, ceil(rows / 128), ceil(columns / 128)]."""

    gate: Quantized
    up: Quantized
    down: Quantized

    @staticmethod
    def of(gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor) -> QuantizedExperts:
        return QuantizedExperts(*(quantize(weight, FP8_SQUARE) for weight in (gate_LIH, up_LIH, down_LHI)))

    def check(self) -> None:
        """Raises TypeError or ValueError."""
        for name, (values, scale) in self._asdict().items():
            if values.dtype != E4M3 or scale.dtype != torch.uint8:
                raise TypeError(f"{name} has dtypes {values.dtype} and {scale.dtype}: must be {E4M3} and torch.uint8")
            expected = scale_shape(values.shape, FP8_SQUARE)
            if tuple(scale.shape) != expected:
                raise ValueError(f"{name}: scale has shape {tuple(scale.shape)}: must be {expected} for values {tuple(values.shape)}")
            if not (values.is_contiguous() and scale.is_contiguous()):
                raise ValueError(f"{name}: must be contiguous")


def forward(
    workspace: Workspace,
    rows: DeviceSchedule,
    ids_TK: Tensor,
    weights_TK: Tensor,
    x_TH: Tensor,
    experts: QuantizedExperts,
    num_experts: int,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    clamp: float | None = None,
    shared_clamp: float | None = None,
    shared_scale_T: Tensor | None = None,
    saved_rows: int = 0,
    save: bool = False,
    plan: ForwardPlan | None = None,
    shared_out_TH: Tensor | None = None,
    term_TH: Tensor | None = None,
) -> tuple[Tensor, Saved | None]:
    """`launch.forward` with the routed experts in blockwise FP8. The workspace's memory has `memory.quantized_regions`.

    The shared experts, which need no peer, are computed before the ranks meet.
    """
    experts.check()
    plan = plan or ForwardPlan()
    return run(
        workspace, rows, ids_TK, weights_TK, x_TH, num_experts, FP8_ROW, forward_fp8_kernel,
        lambda: kernel_arguments(workspace, rows, experts, clamp, saved_rows, save, plan),
        shared, shared_clamp, shared_scale_T, save, plan, shared_out_TH, term_TH,
    )  # fmt: skip


def run(
    workspace: Workspace, rows: DeviceSchedule, ids_TK: Tensor, weights_TK: Tensor, x_TH: Tensor, num_experts: int, block: Block,
    kernel: Any, prepare: Callable[[], tuple[dict[str, object], Saved | None]], shared: tuple[Tensor, Tensor, Tensor] | None,
    shared_clamp: float | None, shared_scale_T: Tensor | None, save: bool, plan: ForwardPlan, shared_out_TH: Tensor | None,
    term_TH: Tensor | None,
) -> tuple[Tensor, Saved | None]:  # fmt: skip
    """Publish x in blocks of a row, the shared experts, a kernel of routed experts with E4M3 operands, combine. prepare: its arguments."""
    workspace.check()
    publish(workspace, x_TH, block)
    shared_out = shared_saved = None
    if shared:
        shared_out, shared_saved = launch_shared(workspace, rows, x_TH, shared, shared_clamp, save, plan, shared_out_TH)
    arguments, saved = prepare()
    write_tasks(workspace, arguments, rows, plan)
    workspace.barrier()
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    enqueue(kernel, (programs,), **arguments, num_warps=plan.num_warps, num_stages=plan.num_stages)
    workspace.barrier()
    term = shared_out if term_TH is None else term_TH
    out = combine(workspace.memory.own["combine"], ids_TK, weights_TK, num_experts, term, shared_scale_T)
    if saved:
        shared_gate, shared_up = (x_TH.new_empty(x_TH.shape[0], 8) for _ in range(2))  # as in bf16, where there are none
        if shared_saved:
            shared_gate, shared_up = shared_saved.shared_gate_TS, shared_saved.shared_up_TS
        saved = dataclasses.replace(saved, shared_gate_TS=shared_gate, shared_up_TS=shared_up)
    return out, saved


def publish(workspace: Workspace, x_TH: Tensor, block: Block = FP8_ROW) -> None:
    """Quantize x into where peers see it."""
    own, tokens = workspace.memory.own, x_TH.shape[0]
    quantize_into(x_TH, block, own["x_e4m3"][:tokens], own["x_scale"][:tokens])


def launch_shared(
    workspace: Workspace, rows: DeviceSchedule, x_TH: Tensor, shared: tuple[Tensor, Tensor, Tensor], clamp: float | None, save: bool,
    plan: ForwardPlan, out_TH: Tensor | None = None,
) -> tuple[Tensor | None, Saved | None]:  # fmt: skip
    """The shared experts in bf16, by the bf16 kernel with a list of nothing but their tasks. Needs no peer."""
    arguments, none, saved, out = shared_arguments(workspace, rows, x_TH, shared, clamp, save, plan, out_TH)
    launch.write_tasks(workspace, arguments, none, plan)
    launch.run_kernel(arguments, plan, workspace)
    return out, saved


def shared_arguments(
    workspace: Workspace, rows: DeviceSchedule, x_TH: Tensor, shared: tuple[Tensor, Tensor, Tensor], clamp: float | None, save: bool,
    plan: ForwardPlan, out_TH: Tensor | None = None,
) -> tuple[dict[str, object], DeviceSchedule, Saved | None, Tensor | None]:  # fmt: skip
    """Arguments of the bf16 kernel, a schedule without rows, what is saved, and the output. Of routed experts there is only a shape."""
    none = dataclasses.replace(rows, num_tokens=torch.zeros_like(rows.num_tokens))
    gate, up, down = (weight[None] for weight in shared)
    small = dataclasses.replace(plan, minibatch_tiles=1, ring_tiles=2)
    arguments, saved, out = launch.kernel_arguments(
        workspace, none, x_TH, gate, up, down, shared, None, clamp, 0, save, small, workspace.hidden, gate.shape[1], out_TH
    )
    return arguments, none, saved, out


def write_tasks(workspace: Workspace, arguments: dict[str, object], rows: DeviceSchedule, plan: ForwardPlan) -> None:
    """The kernel's list of tasks, and signals at zero."""
    launch.write_tasks(workspace, {**arguments, "BLOCK_N": BLOCK, "S": 0, "tokens": 0}, rows, plan)


def common_arguments(
    workspace: Workspace, rows: DeviceSchedule, width: int, codes: Callable[[int, int], tuple[int, ...]], clamp: float | None,
    saved_rows: int, save: bool, plan: ForwardPlan,
) -> tuple[dict[str, object], Saved | None]:  # fmt: skip
    """The arguments of both kernels that have nothing to do with weights, by name. codes: the shape of the codes of [rows, columns]."""
    memory, hidden, m = workspace.memory, workspace.hidden, plan.block_m
    tiles = rows.tile_expert.numel()
    ring = launch.ring_tiles(plan, tiles)
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm

    def ring_of(name: str, columns: int) -> tuple[Tensor, Tensor]:
        """Rows of E4M3 values and their codes."""
        shape = (ring * m, columns)
        return workspace.take(f"{name}_e4m3_ring", shape, torch.uint8), workspace.take(f"{name}_scale_ring", codes(*shape), torch.uint8)

    x_ring, x_scale_ring = ring_of("x", hidden)
    h_ring, h_scale_ring = ring_of("h", width)
    saved = None
    if save:
        empty = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=workspace.device)  # noqa: E731
        saved = Saved(empty(saved_rows, width), empty(saved_rows, width), empty(0, 8), empty(0, 8))
    gate_CI, up_CI = (saved.gate_CI, saved.up_CI) if saved else (x_ring.view(torch.bfloat16),) * 2
    signals = workspace.take("signals", (32 + 3 * tiles,), torch.int32)
    most = max_tickets(tiles, 0, plan.parts, cdiv(width, BLOCK), cdiv(hidden, 2 * BLOCK), 0)
    tasks = workspace.take("tasks", (2 + most,), torch.int64)
    arguments: dict[str, object] = dict(
        x_ptr=memory.own["x_e4m3"].view(torch.bfloat16), x_ptrs=memory.addresses["x_e4m3"],
        x_scale_ptr=memory.own["x_scale"], x_scale_ptrs=memory.addresses["x_scale"],
        combine_ptr=memory.own["combine"], combine_ptrs=memory.addresses["combine"], control_ptrs=memory.addresses["control"],
        peer_rank_ptr=rows.peer_rank, peer_token_idx_ptr=rows.peer_token_idx, tasks_ptr=tasks,
        ring_ptr=x_ring.view(torch.bfloat16), ring_x_scale_ptr=x_scale_ring, ring_h_scale_ptr=h_scale_ring,
        ring_x_desc=launch._rows(x_ring.view(E4M3), m, BLOCK), ring_h_desc=launch._rows(h_ring.view(E4M3), m, BLOCK),
        save_gate_desc=launch._rows(gate_CI, m, BLOCK), save_up_desc=launch._rows(up_CI, m, BLOCK),
        signals_ptr=signals, trace_ptr=launch.trace_record(workspace, most + 1, programs) if plan.trace else tasks,
        rank=memory.rank, max_tiles=tiles, ring=ring, saved_rows=saved_rows, limit=float(clamp or 0.0), wait_limit=workspace.limit,
        H=hidden, I=width, K=workspace.top_k, R=memory.size, CLAMP=clamp is not None, SAVE=save, PARTS=plan.parts,
        BLOCK_M=m, BLOCK_H=min(plan.block_h, next_power_of_2(hidden // 2)), THREADS=32 * plan.num_warps, TRACE=plan.trace,
    )  # fmt: skip
    return arguments, saved


def kernel_arguments(
    workspace: Workspace, rows: DeviceSchedule, experts: QuantizedExperts, clamp: float | None, saved_rows: int, save: bool,
    plan: ForwardPlan,
) -> tuple[dict[str, object], Saved | None]:  # fmt: skip
    """Every argument of the kernel by name."""
    width, half = experts.gate.values.shape[1], plan.block_m // 2
    codes = lambda *shape: scale_shape(shape, FP8_ROW)  # noqa: E731
    arguments, saved = common_arguments(workspace, rows, width, codes, clamp, saved_rows, save, plan)
    weights = {f"{name}_desc": launch._rows(weight.values, BLOCK, BLOCK) for name, weight in experts._asdict().items()}
    scales = {f"{name}_scale_ptr": weight.scale for name, weight in experts._asdict().items()}
    halves = {
        f"{half_name}_desc": launch._rows(arguments[f"{name}_desc"].base, half, BLOCK)  # type: ignore[attr-defined]
        for name, half_name in (("ring_x", "half_x"), ("ring_h", "half_h"), ("save_gate", "save_half_gate"), ("save_up", "save_half_up"))
    }
    return {**arguments, **weights, **scales, **halves, "BLOCK": BLOCK}, saved
