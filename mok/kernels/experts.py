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
def dot(a, b, total):
    if INTERPRETING:  # it would multiply bf16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b.T, total)


@triton.jit
def multiply(a_desc, b_desc, row, b_row, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """a b^T in fp32, for BLOCK_M rows of a and both BLOCK_N rows of a pair, as one product. Past the end of a row both read zero."""
    total = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    for k in tl.range(0, depth, BLOCK_K):
        a = a_desc.load([row, k])
        b = b_desc.load([0, b_row, k]).reshape(2 * BLOCK_N, BLOCK_K)
        total = dot(a, b, total)
    halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1))
    return tl.split(halves)


@triton.jit
def swiglu(gate, up, limit, CLAMP: tl.constexpr):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of bf16 values, in fp32. NaN stays NaN.

    Example: gate 0, up 5 -> 0; gate 20, up -9, limit 4 -> silu(4) * -4 = -15.71.
    """
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    if CLAMP:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def store_hidden(
    first, second, gate_first, h_desc, gate_desc, up_desc, ring_row, row, column, saved_rows, limit, CLAMP: tl.constexpr, SAVE: tl.constexpr
):  # fmt: skip
    """h into the ring; gate and up, rounded as the backward will read them, into the first saved_rows rows of what is saved."""
    first = rounded(first)
    second = rounded(second)
    gate = tl.where(gate_first != 0, first, second)
    up = tl.where(gate_first != 0, second, first)
    if SAVE:
        if row < saved_rows:
            gate_desc.store([row, column], gate)
            up_desc.store([row, column], up)
    h_desc.store([ring_row, column], rounded(swiglu(gate, up, limit, CLAMP)))


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
def push_rows(
    y, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr, row, column,
    H: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Round a tile of y, find the slots of its rows, and push it there."""
    source, slot = find_slots(peer_rank_ptr, peer_token_idx_ptr, row, BLOCK_M)
    push_to_slots(rounded(y), combine_ptr, combine_ptrs, source, slot, column, H, R, BLOCK_N)


@triton.jit
def store_rows(y, out_ptr, row, num_rows, column, H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile of y in place: the shared experts' rows are this rank's own tokens."""
    rows = row + tl.arange(0, BLOCK_M)
    columns = column + tl.arange(0, BLOCK_N)
    to = out_ptr + rows.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(to, rounded(y), mask=(rows < num_rows)[:, None] & (columns < H)[None, :])
