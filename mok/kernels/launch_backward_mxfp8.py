"""The host's side of the backward in MXFP8; `launch_backward_fp8.py` and `launch_backward.py` have the rest. Nothing here reads the device.

The form of the weights says what multiplies, as in `launch_mxfp8.py`:
    `MxTransposed`, E4M3 values with codes: tensor cores that multiply by scales (Blackwell), by `backward_mxfp8.py`.
    `WideTransposed`, the same numbers as bf16: any tensor cores, by `backward.py`.

Legend: T tokens of this rank, H hidden, I intermediate, L experts of this rank, K choices per token, R ranks, S width of the shared
experts, C rows whose gate and up were saved.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from mok.config import TILE_M
from mok.kernels import launch, launch_backward, launch_backward_fp8, launch_mxfp8
from mok.kernels.backward_mxfp8 import backward_mxfp8_kernel
from mok.kernels.launch import Saved, Workspace, _rows, trace_record
from mok.kernels.launch_backward import BackwardPlan, Call, Gradients, Needs, Weights, order_tasks, results
from mok.kernels.launch_mxfp8 import BLOCK, LEAST_HIDDEN, code_tiles, multiplies_by_scales, plain, tiled
from mok.kernels.launcher import cdiv, next_power_of_2
from mok.kernels.quantize import quantize, quantize_into, snap, widen
from mok.kernels.schedule import DeviceSchedule
from mok.quantize import E4M3, MX_COLUMN, MX_ROW, Quantized

PAIR = 2 * BLOCK
"""Columns of a product, rows of a transposed weight."""


class MxTransposed(NamedTuple):
    """Weights as products along their other dimension read them: values with codes along their rows in the layout of tcgen05
    (`mok.quantize.to_tcgen05`). They are other numbers than those of `launch_mxfp8.MxExperts`.

    gate_up: values [2, L, P, I], gate then up, and their codes one behind the other; P is H filled up with rows of zeros to pairs of tiles.
        d_x alone reads it.
    down: values [L, Q, H]; Q is I filled up likewise.
    """

    gate_up: Quantized | None
    down: Quantized

    @staticmethod
    def of(gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, need_x: bool = True) -> MxTransposed:
        gate_up = stacked(filled(gate_LIH.mT), filled(up_LIH.mT)) if need_x else None
        return MxTransposed(gate_up, quantize(filled(down_LHI.mT), MX_ROW, tcgen05=True))

    @staticmethod
    def of_quantized(gate_LHI: Quantized, up_LHI: Quantized, down_LIH: Quantized) -> MxTransposed:
        """Of transposed weights quantized beforehand, with codes in either layout; copies."""
        whole = lambda pair: tiled(pair, cdiv(pair.values.shape[1], PAIR) * PAIR)  # noqa: E731
        return MxTransposed(joined(whole(gate_LHI), whole(up_LHI)), whole(down_LIH))


class WideTransposed(NamedTuple):
    """Weights [L, I, H], [L, I, H], [L, H, I] in bf16 whose elements are numbers of MXFP8 along their columns, as the products of the
    backward contract them. They are other numbers than those of `launch_mxfp8.WideExperts`.

    gate and up: d_x alone reads them.
    """

    gate: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def of(gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, need_x: bool = True) -> WideTransposed:
        gate, up = (snap(weight, MX_COLUMN) if need_x else weight for weight in (gate_LIH, up_LIH))
        return WideTransposed(gate, up, snap(down_LHI, MX_COLUMN))

    @staticmethod
    def of_quantized(gate_LHI: Quantized, up_LHI: Quantized, down_LIH: Quantized) -> WideTransposed:
        """Of transposed weights quantized beforehand, with codes in either layout."""
        return WideTransposed(*(widen(*plain(pair), MX_ROW).mT.contiguous() for pair in (gate_LHI, up_LHI, down_LIH)))


def transposed_for(
    device: torch.device, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, need_x: bool = True
) -> MxTransposed | WideTransposed:
    """Quantized bf16 weights in the form that this device multiplies best."""
    return form_for(device).of(gate_LIH, up_LIH, down_LHI, need_x)


def form_for(device: torch.device) -> type[MxTransposed] | type[WideTransposed]:
    return MxTransposed if multiplies_by_scales(device) else WideTransposed


def filled(weight: Tensor) -> Tensor:
    """[L, M, N] with rows of zeros behind, up to pairs of tiles; a copy only if there are any."""
    missing = -weight.shape[1] % PAIR
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def stacked(first: Tensor, second: Tensor, count: Tensor | None = None, least: int = 0) -> Quantized:
    """Two weights [L, M, N] along their rows: values [2, L, M, N] and all codes in tiles. count, least: as `quantize`."""
    local, rows, columns = first.shape
    tiles, across, *_ = code_tiles(rows, columns)
    values = torch.empty(2, local, rows, columns, dtype=torch.uint8, device=first.device)
    codes = torch.empty(2, local * tiles, across, 32, 16, dtype=torch.uint8, device=first.device)
    for plane, weight in enumerate((first, second)):
        quantize_into(weight, MX_ROW, values[plane], codes[plane], True, count, least)
    return Quantized(values.view(E4M3), codes.flatten(0, 1))


def joined(first: Quantized, second: Quantized) -> Quantized:
    """`stacked` of two weights quantized beforehand, with codes in tiles."""
    values = torch.stack((first.values.view(torch.uint8), second.values.view(torch.uint8)))
    return Quantized(values.view(E4M3), torch.cat((first.scale, second.scale)))


def backward(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, ids_TK: Tensor, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor,
    gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, num_experts: int, needs: Needs | None = None, plan: BackwardPlan | None = None,
    shared: Weights | None = None, clamp: float | None = None, shared_clamp: float | None = None, shared_d_y_TH: Tensor | None = None,
    main_grads: Weights | None = None, shared_main_grads: Weights | None = None, transposed: MxTransposed | WideTransposed | None = None,
    quantized: tuple[Quantized, Quantized] | None = None,
) -> Gradients:  # fmt: skip
    """`launch_backward.backward` with the routed experts in MXFP8: quantized here from bf16, or beforehand. The workspace's memory has
    `memory.quantized_backward_regions` with MX_ROW.

    transposed: what was made of the weights before; else it is made here. Gate and up as the forward multiplies by them, of quantized
    (codes in either layout), are made here if there may be rows of which nothing was saved, and on the device only if there are. With both,
    of the weights only the shapes count.

    Raises:
        ValueError: H < 64.
    """
    if workspace.hidden < LEAST_HIDDEN:
        raise ValueError(f"hidden_size={workspace.hidden}: must be at least {LEAST_HIDDEN} in MXFP8 on a GPU")
    plan, needs = plan or BackwardPlan(), needs or Needs()
    numbers = transposed or transposed_for(workspace.device, gate_LIH, up_LIH, down_LHI, needs.x)
    if isinstance(numbers, MxTransposed):
        return launch_backward_fp8.run(
            workspace, rows, saved, ids_TK, d_y_TH, x_TH, weights_TK, num_experts, needs, plan, MX_ROW, backward_mxfp8_kernel,
            lambda: prepare(
                workspace, rows, saved, weights_TK, gate_LIH, up_LIH, down_LHI, numbers, clamp, needs, main_grads, plan, quantized
            ),
            shared, shared_clamp, shared_d_y_TH, shared_main_grads,
        )  # fmt: skip
    gate_up_again = None
    if unsaved := may_be_unsaved(rows, saved):
        if quantized:
            gate_up_again = tuple(widen(*plain(pair), MX_ROW, *unsaved) for pair in quantized)
        else:
            gate_up_again = tuple(snap(weight, MX_ROW, *unsaved) for weight in (gate_LIH, up_LIH))
    return launch_backward.backward(
        workspace, rows, saved, ids_TK, d_y_TH, x_TH, weights_TK, *numbers, num_experts, needs, plan, shared=shared, clamp=clamp,
        shared_clamp=shared_clamp, shared_d_y_TH=shared_d_y_TH, main_grads=main_grads, shared_main_grads=shared_main_grads,
        mxfp8=True, gate_up_again=gate_up_again,
    )  # fmt: skip


def may_be_unsaved(rows: DeviceSchedule, saved: Saved) -> tuple[Tensor, int] | None:
    """None if gate and up of all rows were saved for certain; else the number of rows, on the device, and the least for which they were
    not."""
    saved_tiles = saved.gate_CI.shape[0] // TILE_M
    return None if saved_tiles >= rows.tile_expert.numel() else (rows.num_tokens, saved_tiles * TILE_M + 1)


def prepare(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, weights_TK: Tensor, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor,
    transposed: MxTransposed, clamp: float | None, needs: Needs, main_grads: Weights | None, plan: BackwardPlan,
    quantized: tuple[Quantized, Quantized] | None = None,
) -> Call:  # fmt: skip
    """`launch_backward.prepare` of the routed experts alone: every argument of `backward_mxfp8_kernel` by name. quantized: as in
    `backward`."""
    plan = dataclasses.replace(plan, block_m=BLOCK, block_n=PAIR, slice=BLOCK // 2, half_tiles=False)
    plan = plan.with_run(weights_TK.numel(), gate_LIH.shape[0])
    memory, hidden, width, m, n, k = workspace.memory, workspace.hidden, gate_LIH.shape[1], plan.block_m, plan.block_n, plan.block_k
    num_local, tiles = gate_LIH.shape[0], rows.tile_expert.numel()
    tasks = launch_backward.count_tasks(plan, needs, hidden, width, 0, 0)
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    ring, target, most = launch_backward.ring_and_groups(plan, tiles, tasks, programs)
    saved_tiles, unsaved = min(saved.gate_CI.shape[0] // m, tiles), may_be_unsaved(rows, saved)
    recompute, cut = unsaved is not None, most < tiles and needs.experts
    order = order_tasks(workspace, rows, plan, tasks, ring, target, most, hidden, width, 0, 0, num_local, saved_tiles)
    take, bf16, fp32 = workspace.take, torch.bfloat16, torch.float32

    def quantized_ring(name: str, wanted: bool, columns: int, planes: int = 1) -> tuple[Tensor, Tensor]:
        """Rows of E4M3 values and their codes, in tiles."""
        count = planes * ring * m if wanted else 0
        values = take(f"{name}_e4m3_ring", (count, columns), torch.uint8)
        return values.view(E4M3), take(f"{name}_scale_ring", code_tiles(count, columns), torch.uint8)

    d_y_ring, d_y_scale_ring = quantized_ring("d_y", True, hidden)
    x_ring, x_scale_ring = quantized_ring("x", recompute, hidden)
    d_gate_up_ring, d_gate_up_scale_ring = quantized_ring("d_gate_up", needs.x, width, 2)
    wide_rows = ring * m if needs.experts else 0
    wide_d_y, wide_x = (take(name, (wide_rows, hidden), bf16) for name in ("d_y_ring", "x_ring"))
    d_gate, d_up = take("d_gate_up_ring", (2, ring * m if needs.experts or recompute else 0, width), bf16)
    h_ring = take("h_ring", (wide_rows, width), bf16)
    weights_ring = take("weights_ring", (ring * m,), fp32)
    partial = take("d_weights_parts", (cdiv(width, n) * (n // plan.slice), ring * m), fp32)
    carry = take("carry", (3, width, hidden), fp32) if cut else weights_ring

    of_gate_and_up: dict[str, object] = dict.fromkeys(("ring_x_desc", "x_scale_desc", "gate_up_desc", "gate_up_scale_desc"))
    if unsaved:
        values, codes = joined(*map(tiled, quantized)) if quantized else stacked(gate_LIH, up_LIH, *unsaved)
        of_gate_and_up = dict(
            ring_x_desc=_rows(x_ring, m, BLOCK), x_scale_desc=launch_mxfp8._codes(x_scale_ring),
            gate_up_desc=launch._pair(values[0], values[1], BLOCK, BLOCK)[0],
            gate_up_scale_desc=launch_mxfp8._code_pair(*(codes if codes.numel() else codes.new_zeros(2, 1, 32, 16)).chunk(2)),
        )  # fmt: skip
    of_weights: dict[str, object] = {}
    for name, (values, codes) in (("down_t", transposed.down), ("gate_up_t", transposed.gate_up or transposed.down)):
        of_weights[f"{name}_desc"] = launch._next_rows(values, BLOCK, BLOCK)
        of_weights[f"{name}_scale_desc"] = launch_mxfp8._next_codes(codes if codes.numel() else codes.new_zeros(2, 1, 32, 16))
    gradients = results((gate_LIH, up_LIH, down_LHI), main_grads) if needs.experts else None
    accumulate = main_grads is not None
    to = gradients or (weights_ring if accumulate else h_ring,) * 3
    by_copy_engine = not accumulate and all(size % m == 0 for size in (hidden, width))
    a_t = lambda matrix: _rows(matrix, k, m)  # noqa: E731
    b_rows = lambda matrix: _rows(matrix, k, n)  # noqa: E731
    out = lambda matrix: _rows(matrix if by_copy_engine else h_ring, m, plan.weight_store)  # noqa: E731
    saved_gate, saved_up = (saved.gate_CI, saved.up_CI) if saved_tiles else (d_gate, d_up)
    of_d_x = d_gate_up_scale_ring if needs.x else d_y_scale_ring
    addresses, own = memory.addresses, memory.own
    kernel: dict[str, object] = dict(
        d_y_ptr=own["d_y_e4m3"], d_y_ptrs=addresses["d_y_e4m3"], d_y_scale_ptr=own["d_y_scale"], d_y_scale_ptrs=addresses["d_y_scale"],
        x_ptr=own["x_e4m3"], x_ptrs=addresses["x_e4m3"], x_scale_ptr=own["x_scale"], x_scale_ptrs=addresses["x_scale"],
        weights_ptr=weights_TK, weights_ptrs=addresses["weights"],
        d_x_ptr=own["combine"], d_x_ptrs=addresses["combine"], d_weights_ptr=own["d_weights"], d_weights_ptrs=addresses["d_weights"],
        control_ptrs=addresses["control"], peer_rank_ptr=rows.peer_rank, peer_token_idx_ptr=rows.peer_token_idx, **order.tables,
        ring_d_y_ptr=d_y_ring.view(torch.uint8), ring_d_y_scale_ptr=d_y_scale_ring, ring_x_ptr=x_ring.view(torch.uint8),
        ring_x_scale_ptr=x_scale_ring, ring_d_gate_up_scale_ptr=d_gate_up_scale_ring, wide_d_y_ptr=wide_d_y, wide_x_ptr=wide_x,
        d_gate_ptr=d_gate, d_up_ptr=d_up, h_ptr=h_ring, ring_weights_ptr=weights_ring, partial_ptr=partial, carry_ptr=carry,
        saved_gate_ptr=saved_gate, saved_up_ptr=saved_up,
        ring_d_y_desc=_rows(d_y_ring, m, BLOCK), d_y_scale_desc=launch_mxfp8._codes(d_y_scale_ring),
        ring_d_gate_up_desc=_rows(d_gate_up_ring, m, BLOCK), d_gate_up_scale_desc=launch_mxfp8._codes(of_d_x),
        store_d_gate_up_desc=_rows(d_gate_up_ring, m, plan.slice), **of_gate_and_up, **of_weights,
        wide_d_y_t_desc=a_t(wide_d_y), d_gate_t_desc=a_t(d_gate), d_up_t_desc=a_t(d_up), wide_x_n_desc=b_rows(wide_x),
        h_n_desc=b_rows(h_ring),
        d_gate_weight_desc=out(to[0]), d_up_weight_desc=out(to[1]), d_down_weight_desc=out(to[2]),
        d_gate_weight_ptr=to[0], d_up_weight_ptr=to[1], d_down_weight_ptr=to[2], signals_ptr=order.signals,
        trace_ptr=trace_record(workspace, order.most_tasks, programs) if plan.trace else order.signals,
        rank=memory.rank, ring=ring, max_tiles=tiles, num_local=num_local, saved_tiles=saved_tiles,
        limit=math.inf if clamp is None else float(clamp), wait_limit=workspace.limit,
        H=hidden, I=width, K=workspace.top_k, R=memory.size, CLAMP=clamp is not None, RECOMPUTE=recompute, CARRY=cut,
        ACCUMULATE=accumulate, BY_COPY_ENGINE=by_copy_engine, NEED_WEIGHTS=needs.weights, NEED_EXPERTS=needs.experts,
        RUN=plan.run, BLOCK_M=m, BLOCK_K=k, SLICE=plan.slice, BLOCK_H=max(BLOCK, min(2 * plan.block_h, next_power_of_2(hidden))),
        THREADS=32 * plan.num_warps, TRACE=plan.trace, **{name: order.per[name] for name in ("PARTS", "GATE_UPS", "HIDDENS", "D_XS")},
    )  # fmt: skip
    return Call(order, kernel, None if accumulate else gradients, None, None)
