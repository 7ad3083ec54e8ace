"""Combine: sum the K results of each token in fp32, k ascending, onto the shared experts' output. One rounding at the end.

Legend: T tokens of this rank, H hidden, K choices per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mok.kernels.experts import rounded
from mok.kernels.launcher import cdiv, enqueue, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["ids_ptr", "weights_ptr", "shared_scale_ptr"])
def combine_kernel(
    y_ptr, ids_ptr, weights_ptr, shared_ptr, shared_scale_ptr, out_ptr,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = shared_scale[t] * shared[t] + sum_k weights[t, k] * y[t * K + k]; a masked slot is not read. Without weights all are 1.

    Example, K = 2: weights [0.5, 2], y [4, 1], shared 3: out = (3 + 0.5 * 4) + 2 * 1 = 7. With ids [5, -1] it is 3 + 0.5 * 4 = 5.
    """
    blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    out = tl.zeros((BLOCK_H,), tl.float32)
    if HAS_SHARED:
        out = tl.load(shared_ptr + token * H + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCALE:
            out = out * tl.load(shared_scale_ptr + token)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + token * K + k)
        live = (expert >= 0) & (expert < E)
        end = tl.where(live, H, 0)
        y = tl.load(y_ptr + (token * K + k) * H + columns, mask=columns < end, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            y = tl.load(weights_ptr + token * K + k, mask=live, other=0.0) * y
        out = out + y
    tl.store(out_ptr + token * H + columns, rounded(out), mask=inside)


def combine(
    y_NH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    num_experts: int,
    shared_TH: Tensor | None = None,
    shared_scale_T: Tensor | None = None,
) -> Tensor:
    """The layer's output; without weights, plain sums. A product and a sum are rounded one by one (no fused multiply-add), as on every
    other backend."""
    tokens, top_k = ids_TK.shape
    hidden = y_NH.shape[-1]
    out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=ids_TK.device)
    block_h = min(1024, next_power_of_2(hidden))
    if tokens:
        enqueue(
            combine_kernel, (tokens * cdiv(hidden, block_h),),
            y_NH, ids_TK, out if weights_TK is None else weights_TK, out if shared_TH is None else shared_TH,
            out if shared_scale_T is None else shared_scale_T, out,
            H=hidden, K=top_k, E=num_experts, HAS_WEIGHTS=weights_TK is not None, HAS_SHARED=shared_TH is not None,
            HAS_SCALE=shared_scale_T is not None, BLOCK_H=block_h, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["ids_ptr"])
def live_slots_kernel(values_ptr, ids_ptr, out_ptr, num_slots, E: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = values[i], 0 where the slot is masked and nothing was written."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    tl.store(out_ptr + slots, tl.load(values_ptr + slots, mask=(ids >= 0) & (ids < E), other=0.0), mask=slots < num_slots)


def live_slots(values_N: Tensor, ids_TK: Tensor, num_experts: int) -> Tensor:
    """What peers wrote into this rank's slots, fp32 [T, K]."""
    out = torch.empty(ids_TK.shape, dtype=torch.float32, device=ids_TK.device)
    if count := ids_TK.numel():
        enqueue(live_slots_kernel, (cdiv(count, 1024),), values_N, ids_TK, out, count, E=num_experts, BLOCK=1024)
    return out
