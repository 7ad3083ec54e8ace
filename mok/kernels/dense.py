"""Dense products whose rows do not know of each other: the router's logits on the GPU, a SwiGLU on every token, and their gradients.

c = a b with fp32 accumulation in one fixed order over K, in tiles of a fixed size that depends on N alone; so an element of c depends on
its row of a and its column of b, whatever M is. A library's product may choose another kernel for another M.

Legend: M, N, K as in c[M, N] = a[M, K] b[K, N]; T tokens, H hidden, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mok.executor import swiglu, swiglu_backward
from mok.kernels.experts import dot, rounded
from mok.kernels.signals import INTERPRETING


@triton.jit(do_not_specialize=["M", "N", "K"])  # one compilation for any number of tokens
def dense_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_column, b_row, b_column,
    NARROW: tl.constexpr, ROUND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of c, row-major. NARROW: both operands are bf16 and their products exact in fp32; else they are widened to fp32.

    Example, K = 2: a [1, 2], b columns [3, 4] and [5, 6]: c = [1 * 3 + 2 * 4, 1 * 5 + 2 * 6] = [11, 17].
    """
    column_tiles = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % column_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        inside = k + depth < K
        a = tl.load(a_ptr + rows[:, None] * a_row + (k + depth)[None, :] * a_column, mask=(rows < M)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            b_ptr + (k + depth)[:, None] * b_row + columns[None, :] * b_column, mask=inside[:, None] & (columns < N)[None, :], other=0.0
        )
        if NARROW or INTERPRETING:
            total = dot(a, b, total)
        else:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="tf32x3")
    if ROUND:
        total = rounded(total)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=(rows < M)[:, None] & (columns < N)[None, :])


def product(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """a [M, K] times b [K, N], bf16 or fp32 with any strides, into fp32 or rounded once to bf16."""
    (rows, depth), columns = a.shape, b.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=a.device)
    block_n = min(128, max(16, triton.next_power_of_2(columns)))
    narrow = a.dtype == b.dtype == torch.bfloat16
    block_m, block_k = (128, 64) if narrow else (64, 32)
    if out.numel():
        grid = (triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n),)
        dense_kernel[grid](
            a, b, out, rows, columns, depth, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
            NARROW=narrow, ROUND=dtype == torch.bfloat16, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def row_linear(x_TH: Tensor, weight_OH: Tensor) -> Tensor:
    """x W^T in fp32."""
    return product(x_TH, weight_OH.T)


def row_linear_backward(d_out_TO: Tensor, x_TH: Tensor, weight_OH: Tensor) -> tuple[Tensor, Tensor]:
    """d_x in the dtype of x, d_weight in that of the weight."""
    return product(d_out_TO, weight_OH, x_TH.dtype), product(d_out_TO.T, x_TH, weight_OH.dtype)


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
