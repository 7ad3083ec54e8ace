"""The host's side of the backward in blockwise FP8; `launch_backward.py` has the rest. Nothing here reads the device.

Legend: T tokens of this rank, H hidden, I intermediate, L experts of this rank, K choices per token, R ranks, S width of the shared
experts, C rows whose gate and up were saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mok.kernels import launch_backward
from mok.kernels.backward import backward_kernel
from mok.kernels.backward_fp8 import backward_fp8_kernel
from mok.kernels.launch import Saved, Workspace, _rows, trace_record
from mok.kernels.launch_backward import (
    BackwardPlan,
    Call,
    Gradients,
    Needs,
    Weights,
    _planes,
    gather,
    options_of,
    order_tasks,
    publish,
    results,
)
from mok.kernels.launch_fp8 import BLOCK, QuantizedExperts
from mok.kernels.launcher import cdiv, enqueue, next_power_of_2
from mok.kernels.quantize import quantize, quantize_into
from mok.kernels.schedule import DeviceSchedule
from mok.quantize import E4M3, FP8_ROW, FP8_SQUARE, Block, Quantized, scale_shape


class TransposedExperts(NamedTuple):
    """Weights as products along their other dimension read them; a block of 128 x 128 has the same values and code as in
    `QuantizedExperts`.

    gate_up: values [2, L, H, I], gate then up, and codes [L, H / 128, 2 * I / 128], a row's of gate, then of up; d_x alone reads it.
    down: values [L, I, H], codes [L, I / 128, H / 128].
    """

    gate_up: Quantized | None
    down: Quantized

    @staticmethod
    def of(gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, need_x: bool = True) -> TransposedExperts:
        down = quantize(down_LHI.mT, FP8_SQUARE)
        if not need_x:
            return TransposedExperts(None, down)
        local, width, hidden = gate_LIH.shape
        values = torch.empty(2, local, hidden, width, dtype=torch.uint8, device=gate_LIH.device)
        codes = torch.empty(2, *scale_shape((local, hidden, width), FP8_SQUARE), dtype=torch.uint8, device=gate_LIH.device)
        for plane, weight in enumerate((gate_LIH, up_LIH)):
            quantize_into(weight.mT, FP8_SQUARE, values[plane], codes[plane])
        return TransposedExperts(Quantized(values.view(E4M3), torch.cat((codes[0], codes[1]), -1)), down)

    @staticmethod
    def of_quantized(experts: QuantizedExperts) -> TransposedExperts:
        """Of weights quantized beforehand: their bytes the other way round."""
        turned = lambda values: values.view(torch.uint8).mT  # noqa: E731
        gate_up = torch.stack((turned(experts.gate.values), turned(experts.up.values))).view(E4M3)
        codes = torch.cat((experts.gate.scale.mT, experts.up.scale.mT), -1)
        down = Quantized(turned(experts.down.values).contiguous().view(E4M3), experts.down.scale.mT.contiguous())
        return TransposedExperts(Quantized(gate_up, codes), down)


def prepare(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, weights_TK: Tensor, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor,
    clamp: float | None = None, needs: Needs | None = None, main_grads: Weights | None = None, plan: BackwardPlan | None = None,
    transposed: TransposedExperts | None = None, quantized: QuantizedExperts | None = None,
    quantized_weight_gradients: bool = False,
) -> Call:  # fmt: skip
    """`launch_backward.prepare` of the routed experts alone: every argument of `backward_fp8_kernel` by name.

    Weights in bf16. transposed: what was made of them before; else it is made here. Gate and up as the forward reads them, of quantized,
    are made here if there may be rows of which nothing was saved, and on the device only if there are. With both, of the weights only the
    shapes count. quantized_weight_gradients: see `mok.quantize.Recipe`.
    """
    needs = needs or Needs()
    plan = dataclasses.replace(plan or BackwardPlan(), block_n=2 * BLOCK, slice=BLOCK // 2)
    plan = plan.with_run(weights_TK.numel(), gate_LIH.shape[0])
    memory, hidden, width, m, n, k = workspace.memory, workspace.hidden, gate_LIH.shape[1], plan.block_m, plan.block_n, plan.block_k
    num_local, tiles = gate_LIH.shape[0], rows.tile_expert.numel()
    tasks = launch_backward.count_tasks(plan, needs, hidden, width, 0, 0)
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    ring, target, most = launch_backward.ring_and_groups(plan, tiles, tasks, programs)
    saved_tiles = min(saved.gate_CI.shape[0] // m, tiles)
    recompute, cut = saved_tiles < tiles, most < tiles and needs.experts
    order = order_tasks(workspace, rows, plan, tasks, ring, target, most, hidden, width, 0, 0, num_local, saved_tiles)
    take, bf16, fp32 = workspace.take, torch.bfloat16, torch.float32

    def quantized_ring(name: str, wanted: bool) -> tuple[Tensor, Tensor]:
        """Rows of E4M3 values and their codes."""
        shape = (ring * m if wanted else 0, hidden)
        return take(f"{name}_e4m3_ring", shape, torch.uint8), take(f"{name}_scale_ring", scale_shape(shape, FP8_ROW), torch.uint8)

    d_y_ring, d_y_scale_ring = quantized_ring("d_y", True)
    x_ring, x_scale_ring = quantized_ring("x", recompute)
    d_gate_up_ring = take("d_gate_up_e4m3_ring", (2, ring * m if needs.x else 0, width), torch.uint8).view(E4M3)
    d_gate_up_scale_ring = take("d_gate_up_scale_ring", (ring * m, 2 * cdiv(width, BLOCK)), torch.uint8)
    wide_rows = ring * m if needs.experts else 0
    wide_d_y, wide_x = (take(name, (wide_rows, hidden), bf16) for name in ("d_y_ring", "x_ring"))
    d_gate, d_up = take("d_gate_up_ring", (2, ring * m if needs.experts or recompute else 0, width), bf16)
    h_ring = take("h_ring", (wide_rows, width), bf16)
    weights_ring = take("weights_ring", (ring * m,), fp32)
    partial = take("d_weights_parts", (cdiv(width, n) * (n // plan.slice), ring * m), fp32)
    carry = take("carry", (3, width, hidden), fp32) if cut else weights_ring

    square = lambda *planes: _planes(planes, BLOCK, BLOCK)  # noqa: E731
    gate_up_t, down_t = transposed or TransposedExperts.of(gate_LIH, up_LIH, down_LHI, needs.x)
    gate_up_t = gate_up_t or Quantized(down_t.values[None], down_t.scale)
    of_gate_and_up: dict[str, object] = dict.fromkeys(("ring_x_desc", "gate_desc", "up_desc"))
    gate, up = down_t, down_t
    if recompute:
        unsaved = dict(count=rows.num_tokens, least=saved_tiles * m + 1)
        forms = quantized or (quantize(weight, FP8_SQUARE, **unsaved) for weight in (gate_LIH, up_LIH))  # type: ignore[arg-type]
        gate, up, *_ = forms
        of_gate_and_up = dict(ring_x_desc=_planes((x_ring.view(E4M3),), m, BLOCK), gate_desc=square(gate.values), up_desc=square(up.values))
    gradients = results((gate_LIH, up_LIH, down_LHI), main_grads) if needs.experts else None
    accumulate = main_grads is not None
    to = gradients or (weights_ring if accumulate else h_ring,) * 3
    by_copy_engine = not accumulate and all(size % m == 0 for size in (hidden, width))
    a_t = lambda matrix: _rows(matrix, k, m)  # noqa: E731
    b_rows = lambda matrix: _rows(matrix, k, n)  # noqa: E731
    out = lambda matrix: _rows(matrix if by_copy_engine else h_ring, m, plan.weight_store)  # noqa: E731
    saved_gate, saved_up = (saved.gate_CI, saved.up_CI) if saved_tiles else (d_gate, d_up)
    d_y_values = d_y_ring.view(E4M3)
    addresses, own = memory.addresses, memory.own
    kernel: dict[str, object] = dict(
        d_y_ptr=own["d_y_e4m3"], d_y_ptrs=addresses["d_y_e4m3"], d_y_scale_ptr=own["d_y_scale"], d_y_scale_ptrs=addresses["d_y_scale"],
        x_ptr=own["x_e4m3"], x_ptrs=addresses["x_e4m3"], x_scale_ptr=own["x_scale"], x_scale_ptrs=addresses["x_scale"],
        weights_ptr=weights_TK, weights_ptrs=addresses["weights"],
        d_x_ptr=own["combine"], d_x_ptrs=addresses["combine"], d_weights_ptr=own["d_weights"], d_weights_ptrs=addresses["d_weights"],
        control_ptrs=addresses["control"], peer_rank_ptr=rows.peer_rank, peer_token_idx_ptr=rows.peer_token_idx, **order.tables,
        ring_d_y_ptr=d_y_ring, ring_d_y_scale_ptr=d_y_scale_ring, ring_x_ptr=x_ring, ring_x_scale_ptr=x_scale_ring,
        ring_d_gate_up_scale_ptr=d_gate_up_scale_ring, wide_d_y_ptr=wide_d_y, wide_x_ptr=wide_x,
        d_gate_ptr=d_gate, d_up_ptr=d_up, h_ptr=h_ring, ring_weights_ptr=weights_ring, partial_ptr=partial, carry_ptr=carry,
        saved_gate_ptr=saved_gate, saved_up_ptr=saved_up,
        ring_d_y_desc=_planes((d_y_values,), m, BLOCK), half_d_y_desc=_planes((d_y_values,), m // 2, BLOCK),
        ring_d_gate_up_desc=_planes(tuple(d_gate_up_ring), m, BLOCK), half_d_gate_up_desc=_planes(tuple(d_gate_up_ring), m // 2, BLOCK),
        store_d_gate_up_desc=_rows(d_gate_up_ring, m, plan.slice), store_half_d_gate_up_desc=_rows(d_gate_up_ring, m // 2, plan.slice),
        **of_gate_and_up, down_t_desc=square(down_t.values), gate_up_t_desc=square(*gate_up_t.values),
        gate_scale_ptr=gate.scale, up_scale_ptr=up.scale, down_t_scale_ptr=down_t.scale, gate_up_t_scale_ptr=gate_up_t.scale,
        d_y_t_desc=a_t(wide_d_y), d_gate_t_desc=a_t(d_gate), d_up_t_desc=a_t(d_up), x_n_desc=b_rows(wide_x), h_n_desc=b_rows(h_ring),
        d_gate_weight_desc=out(to[0]), d_up_weight_desc=out(to[1]), d_down_weight_desc=out(to[2]),
        d_gate_weight_ptr=to[0], d_up_weight_ptr=to[1], d_down_weight_ptr=to[2], signals_ptr=order.signals,
        trace_ptr=trace_record(workspace, order.most_tasks, programs) if plan.trace else order.signals,
        rank=memory.rank, ring=ring, max_tiles=tiles, saved_tiles=saved_tiles, limit=math.inf if clamp is None else float(clamp),
        wait_limit=workspace.limit,
        H=hidden, I=width, K=workspace.top_k, R=memory.size, CLAMP=clamp is not None, RECOMPUTE=recompute, CARRY=cut,
        ACCUMULATE=accumulate, BY_COPY_ENGINE=by_copy_engine, NEED_WEIGHTS=needs.weights, NEED_EXPERTS=needs.experts,
        SNAP_COLUMNS=quantized_weight_gradients, RUN=plan.run, BLOCK_M=m, BLOCK=BLOCK, BLOCK_K=k,
        BLOCK_H=max(BLOCK, min(2 * plan.block_h, next_power_of_2(hidden))),
        THREADS=32 * plan.num_warps, TRACE=plan.trace, **{name: order.per[name] for name in ("PARTS", "GATE_UPS", "HIDDENS", "D_XS")},
    )  # fmt: skip
    return Call(order, kernel, None if accumulate else gradients, None, None)


def prepare_shared(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, shared: Weights,
    clamp: float | None, needs: Needs, main_grads: Weights | None, plan: BackwardPlan,
) -> Call:  # fmt: skip
    """The shared experts in bf16: `backward_kernel` with a schedule without rows. Of routed experts there is only a shape."""
    zero = torch.zeros_like(rows.num_tokens)
    none = dataclasses.replace(rows, num_tokens=zero, tokens_per_expert=zero, routes_per_expert=zero, tile_expert=rows.tile_expert[:1])
    gate, up, down = (weight[None] for weight in shared)
    all_saved = workspace.take("saved_of_none", (plan.block_m, gate.shape[1]), torch.bfloat16)
    return launch_backward.prepare(
        workspace, none, dataclasses.replace(saved, gate_CI=all_saved, up_CI=all_saved), d_y_TH, x_TH, weights_TK, gate, up, down, shared,
        shared_clamp=clamp, needs=Needs(needs.x, False, False, needs.shared), shared_main_grads=main_grads,
        plan=dataclasses.replace(plan, ring_tiles=2, prefetch=False),
    )  # fmt: skip


def backward(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, ids_TK: Tensor, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor,
    gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, num_experts: int, needs: Needs | None = None, plan: BackwardPlan | None = None,
    shared: Weights | None = None, clamp: float | None = None, shared_clamp: float | None = None, shared_d_y_TH: Tensor | None = None,
    main_grads: Weights | None = None, shared_main_grads: Weights | None = None, transposed: TransposedExperts | None = None,
    quantized: QuantizedExperts | None = None, quantized_weight_gradients: bool = False,
) -> Gradients:  # fmt: skip
    """`launch_backward.backward` with the routed experts in blockwise FP8: quantized here from bf16, or beforehand (see `prepare`). The
    workspace's memory has `memory.quantized_backward_regions`.
    """
    plan, needs = plan or BackwardPlan(), needs or Needs()
    return run(
        workspace, rows, saved, ids_TK, d_y_TH, x_TH, weights_TK, num_experts, needs, plan, FP8_ROW, backward_fp8_kernel,
        lambda: prepare(
            workspace, rows, saved, weights_TK, gate_LIH, up_LIH, down_LHI, clamp, needs, main_grads, plan, transposed, quantized,
            quantized_weight_gradients,
        ),
        shared, shared_clamp, shared_d_y_TH, shared_main_grads,
    )  # fmt: skip


def run(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, ids_TK: Tensor, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor,
    num_experts: int, needs: Needs, plan: BackwardPlan, block: Block, kernel: Any, prepare: Callable[[], Call], shared: Weights | None,
    shared_clamp: float | None, shared_d_y_TH: Tensor | None, shared_main_grads: Weights | None,
) -> Gradients:  # fmt: skip
    """Publish dY and x in blocks of a row, the shared experts, a kernel of routed experts with E4M3 operands, combine. prepare: its
    call.

    The shared experts, which need no peer, are computed before the ranks meet.
    """
    workspace.check()
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    publish(workspace, d_y_TH, x_TH, weights_TK, block)
    of_shared = None
    if shared and (needs.x or needs.shared):
        d_y = d_y_TH if shared_d_y_TH is None else shared_d_y_TH
        of_shared = prepare_shared(workspace, rows, saved, d_y, x_TH, weights_TK, shared, shared_clamp, needs, shared_main_grads, plan)
        of_shared.order.write(workspace.num_sms)
        enqueue(backward_kernel, (programs,), **of_shared.kernel, **options_of(plan, of_shared, workspace.device))
    call = of_shared
    if needs.x or needs.weights or needs.experts or workspace.memory.size > 1:  # peers wait for this rank
        call = prepare()
        call.order.write(workspace.num_sms)
        workspace.barrier()
        enqueue(kernel, (programs,), **call.kernel, **options_of(plan, call, workspace.device))
        workspace.barrier()
        if of_shared:
            call = dataclasses.replace(call, shared=of_shared.shared, shared_d_x=of_shared.shared_d_x)
    return Gradients(None, None, None, None) if call is None else gather(workspace, call, ids_TK, num_experts, needs)
