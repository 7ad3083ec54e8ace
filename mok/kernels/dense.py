"""Dense products whose rows do not know of each other: the router's logits on the GPU, a SwiGLU on every token, and their gradients.

c = a b with fp32 accumulation in one fixed order over K, in tiles of a fixed size that depends on N alone; so an element of c depends on
its row of a and its column of b, whatever M is. A library's product may choose another kernel for another M. fp32 times bf16 is three
products of bf16, exact ones: the sum of three bf16 numbers is any fp32 number (but for tiny ones).

A weight's gradient sums over tokens: that is cut into parts, which depend on the number of tokens alone and are added in order.

Legend: M, N, K as in c[M, N] = a[M, K] b[K, N]; T tokens, H hidden, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mok.executor import swiglu, swiglu_backward
from mok.kernels.experts import dot, rounded
from mok.kernels.launcher import cdiv, enqueue, next_power_of_2
from mok.kernels.signals import INTERPRETING


@triton.jit
def split(a):
    """fp32 as the sum of three bf16, the largest first. What rounds to Inf has nothing beside it."""
    high = rounded(a)
    rest = tl.where(tl.abs(high.to(tl.float32)) == float("inf"), 0.0, a - high.to(tl.float32))
    middle = rounded(rest)
    return high, middle, rounded(rest - middle.to(tl.float32))


@triton.jit(do_not_specialize=["M", "N", "K", "part"])  # one compilation for any number of tokens
def dense_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_column, b_row, b_column, part,
    NARROW: tl.constexpr, MIXED: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of c, row-major, or of one of the products that add up to it, c[part of K, M, N]: those of `part` columns of a each.

    NARROW: both operands are bf16 and their products exact in fp32. MIXED: a is fp32 and b bf16. Else they are widened to fp32.

    Example, K = 2: a [1, 2], b columns [3, 4] and [5, 6]: c = [1 * 3 + 2 * 4, 1 * 5 + 2 * 6] = [11, 17].
    """
    K = tl.minimum(K, (tl.program_id(1) + 1) * part)
    c_ptr += tl.program_id(1).to(tl.int64) * M * N
    column_tiles = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % column_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(tl.program_id(1) * part, K, BLOCK_K):
        inside = k + depth < K
        a = tl.load(a_ptr + rows[:, None] * a_row + (k + depth)[None, :] * a_column, mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            b_ptr + (k + depth)[:, None] * b_row + columns[None, :] * b_column, mask=inside[:, None] & (columns < N)[None, :], other=0.0
        )
        if NARROW or INTERPRETING:
            total = dot(a, b, total)
        elif MIXED:
            high, middle, low = split(a)
            total = dot(low, b, total)
            total = dot(middle, b, total)
            total = dot(high, b, total)
        else:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="tf32x3")
    if ROUND:
        total = rounded(total)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["count", "parts"])
def sum_kernel(parts_ptr, out_ptr, count, parts, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = the sum of parts[p, i], p ascending."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts_ptr + at, mask=at < count, other=0.0)
    for _ in range(1, parts):
        parts_ptr += count
        total += tl.load(parts_ptr + at, mask=at < count, other=0.0)
    if ROUND:
        total = rounded(total)
    tl.store(out_ptr + at, total, mask=at < count)


MOST_PARTS, LEAST_DEPTH = 16, 512


def product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32, in_parts: bool = False) -> Tensor:
    """a [M, K] times b [K, N], bf16 or fp32 with any strides, into fp32 or rounded once to bf16. in_parts: many programs share a long K."""
    (rows, depth), columns = a.shape, b.shape[1]
    narrow, mixed = a.dtype == b.dtype == torch.bfloat16, a.dtype == torch.float32 and b.dtype == torch.bfloat16
    block_m, block_k = (128, 64) if narrow or mixed else (64, 32)
    block_n = min(128, max(16, next_power_of_2(columns)))
    parts = min(cdiv(depth, LEAST_DEPTH), MOST_PARTS) if in_parts else 1
    part = cdiv(cdiv(depth, max(parts, 1)), block_k) * block_k
    parts = max(cdiv(depth, max(part, 1)), 1)
    shape, made = (rows, columns), torch.float32 if parts > 1 else dtype
    out = torch.empty((parts, *shape) if parts > 1 else shape, dtype=made, device=a.device)
    if out.numel():
        enqueue(
            dense_kernel, (cdiv(rows, block_m) * cdiv(columns, block_n), parts),
            a, b, out, rows, columns, depth, a.stride(0), a.stride(1), b.stride(0), b.stride(1), part,
            NARROW=narrow, MIXED=mixed, ROUND=made == torch.bfloat16, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=8,
            num_stages=2 if mixed else 3,
        )  # fmt: skip
    if parts == 1:
        return out
    total, count = torch.empty(shape, dtype=dtype, device=a.device), rows * columns
    if count:
        enqueue(sum_kernel, (cdiv(count, 1024),), out, total, count, parts, ROUND=dtype == torch.bfloat16, BLOCK=1024)
    return total


def row_linear(x_TH: Tensor, weight_OH: Tensor) -> Tensor:
    """x W^T in fp32."""
    return product(x_TH, weight_OH.T)


def row_linear_backward(d_out_TO: Tensor, x_TH: Tensor, weight_OH: Tensor) -> tuple[Tensor, Tensor]:
    """d_x in the dtype of x, d_weight in that of the weight."""
    return product(d_out_TO, weight_OH, x_TH.dtype), product(d_out_TO.T, x_TH, weight_OH.dtype, in_parts=True)


def row_swiglu(x_TH: Tensor, gate_SH: Tensor, up_SH: Tensor, down_HS: Tensor, clamp: float | None) -> Tensor:
    """`mok.executor.row_swiglu`: fp32 [T, H] with the values of a rounded result."""
    gate, up = product(x_TH, gate_SH.T, x_TH.dtype), product(x_TH, up_SH.T, x_TH.dtype)
    hidden = swiglu(gate.float(), up.float(), clamp).to(x_TH.dtype)
    return product(hidden, down_HS.T, x_TH.dtype).float()


def row_swiglu_backward(
    d_out_TH: Tensor, x_TH: Tensor, gate_SH: Tensor, up_SH: Tensor, down_HS: Tensor, clamp: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x and the three weights, each in its own dtype."""
    dtype = x_TH.dtype
    d_y = d_out_TH.to(dtype)
    gate, up = (product(x_TH, w.T, dtype).float() for w in (gate_SH, up_SH))
    hidden = swiglu(gate, up, clamp).to(dtype)
    d_gate, d_up = (d.to(dtype) for d in swiglu_backward(gate, up, product(d_y, down_HS), clamp))
    d_x = (product(d_gate, gate_SH) + product(d_up, up_SH)).to(dtype)
    return d_x, product(d_gate.T, x_TH, dtype), product(d_up.T, x_TH, dtype), product(d_y.T, hidden, dtype)
