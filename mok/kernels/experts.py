"""The two tasks of an expert, one multiplication loop for both.

up:   gate and up of one slice of the intermediate width, SwiGLU, one tile of h.
down: two neighbouring slices of the hidden width, pushed to the slots of the rows' tokens, on whichever rank they are.

Both multiply rows by a pair of slices as one product. A pair comes through one descriptor of three dimensions, whose first stride leads
from a slice to its companion: from gate to up, two tensors anywhere in memory, or BLOCK_N rows further down.

There is one pipelined loop, because Triton gives every pipelined loop shared memory of its own, even in branches that exclude each other.
The branch chooses the descriptors; a slice that sticks out of its matrix is clipped where it is stored.

Legend: H hidden, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.quantize import snapped_tile
from mok.kernels.signals import INTERPRETING, peer_address


@triton.jit
def rounded(value):
    """fp32 -> bf16, to nearest even; bf16 stays."""
    if value.dtype == tl.bfloat16:
        return value
    result = value.to(tl.bfloat16)
    if INTERPRETING:  # it would cut
        bits = value.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        result = tl.where(value == value, nearest, result)
    return result


@triton.jit
def rounded_pairs(value):
    """`rounded` of fp32 values, two by one instruction; alone, each takes as long as an exponential."""
    if INTERPRETING:
        result = rounded(value)
    else:
        result = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [value], dtype=tl.bfloat16, is_pure=True, pack=2)
    return result


@triton.jit
def widened_pairs(value):
    """bf16 -> fp32, two values from one register."""
    if INTERPRETING:
        result = value.to(tl.float32)
    else:
        result = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [value], dtype=tl.float32, is_pure=True, pack=2
        )
    return result


@triton.jit
def in_order(first, second, straight):
    """bf16 tiles (first, second) if straight is not 0, else (second, first)."""
    if INTERPRETING:
        one = tl.where(straight != 0, first, second)
        other = tl.where(straight != 0, second, first)
    else:  # two values at once; $5 is straight again
        one, other = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; selp.b32 $0, $2, $3, p; selp.b32 $1, $3, $2, p; } // $5",
            "=r,=r,r,r,r,r", [first, second, straight], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return one, other


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of fp32 values, with the bits of `tl.sigmoid`, but 0 where that is below 2^-126: for x < -87.34.

    In four instructions: no exponential too small to count in 1 + exp(-x) is kept, and no result too small to be normal.
    """
    if INTERPRETING:
        result = tl.sigmoid(x)
    else:  # -log2(e), then 1
        result = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return result


@triton.jit
def dot(a, b, total):
    """total + a b, of bf16 tiles."""
    if INTERPRETING:  # it would multiply bf16 as integers, and fp32 by a library whose sums depend on the tile's shape
        total = total + tl.dot(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def multiply(a_desc, b_desc, row, b_row, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """a b^T in fp32, for BLOCK_M rows of a and both BLOCK_N rows of a pair, as one product. Past the end of a row both read zero."""
    total = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for k in tl.range(0, depth, BLOCK_K):
        a = a_desc.load([row, k])
        b = b_desc.load([0, b_row, k]).reshape(2 * BLOCK_N, BLOCK_K)
        total = dot(a, b.T, total)
    return total


@triton.jit
def rounded_halves(total, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A product with a pair -> its two tiles, bf16.

    To be called where a task's kind is known: what the push of a down task needs, another layout, is otherwise made for every task.
    """
    return tl.split(tl.permute(tl.reshape(rounded_pairs(total), (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))


@triton.jit
def swiglu(gate, up, limit, CLAMP: tl.constexpr):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of bf16 values, in fp32. NaN stays NaN.

    Example: gate 0, up 5 -> 0; gate 20, up -9, limit 4 -> silu(4) * -4 = -15.71.
    """
    gate = widened_pairs(gate)
    up = widened_pairs(up)
    if CLAMP:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * sigmoid(gate) * up


@triton.jit
def store_hidden(
    total, gate_first, h_desc, gate_desc, up_desc, ring_row, row, column, saved_rows, limit,
    I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLAMP: tl.constexpr, SAVE: tl.constexpr, HALF: tl.constexpr,
    MXFP8: tl.constexpr,
):  # fmt: skip
    """h into the ring; gate and up, as the backward will read them, into the first saved_rows rows of what is saved.

    HALF: these are the first half of a tile's rows. Gate and up of the other half, padding, are saved as the zeros they are.
    MXFP8: h becomes what its quantized form stands for. I: its columns, past which nothing may touch a scale.
    """
    first, second = rounded_halves(total, BLOCK_M, BLOCK_N)
    gate, up = in_order(first, second, gate_first)
    if SAVE:
        if row < saved_rows:
            gate_desc.store([row, column], gate)
            up_desc.store([row, column], up)
            if HALF:
                padding = tl.zeros((BLOCK_M, BLOCK_N), tl.bfloat16)
                gate_desc.store([row + BLOCK_M, column], padding)
                up_desc.store([row + BLOCK_M, column], padding)
    hidden = rounded_pairs(swiglu(gate, up, limit, CLAMP))
    if MXFP8:
        hidden = widened_pairs(hidden)
        if I % BLOCK_N != 0:
            hidden = tl.where((column + tl.arange(0, BLOCK_N) < I)[None, :], hidden, 0.0)
        hidden = rounded_pairs(snapped_tile(hidden, 1, 32))
    h_desc.store([ring_row, column], hidden)


@triton.jit
def find_slots(peer_rank_ptr, peer_token_idx_ptr, row, BLOCK_M: tl.constexpr):
    """Source rank (-1: padding) and slot of a tile's rows."""
    rows = row + tl.arange(0, BLOCK_M)
    return tl.load(peer_rank_ptr + rows), tl.load(peer_token_idx_ptr + rows)


@triton.jit
def push_to_slots(y, combine_ptr, combine_ptrs, source, slot, column, H: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a bf16 tile row by row into its slots at their sources. Every slot has one writer; padding rows go nowhere."""
    if R == 1:
        slots = combine_ptr + slot.to(tl.int64) * H
    else:
        slots = peer_address(combine_ptrs, tl.maximum(source, 0), tl.bfloat16) + slot.to(tl.int64) * H
    columns = column + tl.arange(0, BLOCK_N)
    tl.store(slots[:, None] + columns[None, :], y, mask=(source >= 0)[:, None] & (columns < H)[None, :])


@triton.jit
def store_rows(y, out_ptr, row, num_rows, column, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile of y in place: the shared experts' rows are this rank's own tokens."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    to = out_ptr + rows.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(to, rounded(y), mask=(rows < num_rows)[:, None] & (columns < H)[None, :])
