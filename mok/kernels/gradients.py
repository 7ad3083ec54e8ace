"""The pieces of the backward's tasks: two multiplication loops, the SwiGLU's gradient, and what is stored where.

hidden:   a slice of dHid = dY Wd, unweighted; from it d_gate, d_up (of w dHid), w h, and the slice's part of d_w = sum_i dHid_i h_i.
d_x:      a slice of d_gate Wg + d_up Wu, one sum over both.
d_weight: tiles of d_gate^T x, d_up^T x or dY^T (w h), summed over the rows of an expert in order.

Rounded to bf16, as on every other backend: h, d_gate, d_up, w h, each row's d_x, and a weight's gradient once at its end.

Legend: H hidden, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.experts import dot, rounded, rounded_pairs, sigmoid, widened_pairs
from mok.kernels.quantize import snapped_tile
from mok.kernels.signals import INTERPRETING, peer_address
from mok.kernels.trace import COMPUTED, note


@triton.jit
def gate_and_up(x_desc, gate_desc, up_desc, row, weight_row, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x Wg^T and x Wu^T of one slice, summed in the order of the forward."""
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, depth, BLOCK_K):
        x = x_desc.load([row, k])
        gate = dot(x, gate_desc.load([weight_row, k]).T, gate)
        up = dot(x, up_desc.load([weight_row, k]).T, up)
    return gate, up


@triton.jit
def multiply_rows(
    a_desc, b_desc, total, planes, b_reversed, a_row, b_row, column, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total + a b: rows of a from a_row, all of its columns; rows b_row .. b_row + depth of b, a slice of columns. Over one plane of a and
    b or, in one sum, two; b_reversed: b's second plane belongs to a's first.
    """
    steps = tl.cdiv(depth, BLOCK_K)
    for step in tl.range(0, steps * planes):
        plane = tl.where(step >= steps, 1, 0)
        k = (step - plane * steps) * BLOCK_K
        a = a_desc.load([plane, a_row, k]).reshape(BLOCK_M, BLOCK_K)
        b = b_desc.load([plane ^ b_reversed, b_row + k, column]).reshape(BLOCK_K, BLOCK_N)
        total = dot(a, b, total)
    return total


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right WIDTH columns of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))


@triton.jit
def slices(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr):
    """A tile as one, two or four slices of SLICE columns; they are worked on one after the other, which takes fewer registers."""
    if BLOCK_N == SLICE:
        return (tile,)
    elif BLOCK_N == 2 * SLICE:
        left, right = halves(tile, BLOCK_M, SLICE)
        return (left, right)
    else:
        tl.static_assert(BLOCK_N == 4 * SLICE)
        left, right = halves(tile, BLOCK_M, 2 * SLICE)
        first, second = halves(left, BLOCK_M, SLICE)
        third, fourth = halves(right, BLOCK_M, SLICE)
        return (first, second, third, fourth)


@triton.jit
def laid_out_as(value, tile):
    """value, in the layout of tile: else what follows from it is computed twice, in the layout it is loaded in and in that of tile."""
    if not INTERPRETING:
        value = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,f", [value, tile], dtype=tl.float32, is_pure=True, pack=1)
    return value


@triton.jit
def hidden_gradient(d_hidden, gate, up, weight, limit, CLAMP: tl.constexpr, PAIRS: tl.constexpr = False):
    """d_hidden: dHid, unweighted. -> d_gate, d_up and w h, in bf16, and each row's sum_i dHid_i h_i.

    Example: gate 1, up 2, w -0.5, dHid 3: silu(1) = 0.73106, so h = 1.46 and d_w = 4.39; w dHid = -1.5, so d_up = -1.5 * 0.73106 = -1.10
    and d_gate = -1.5 * 2 * 0.92767 = -2.78; w h = -0.731. With limit 0.5 both are clipped and d_gate = d_up = 0.
    PAIRS: h is rounded two values at a time, which takes registers.
    """
    gate = laid_out_as(gate.to(tl.float32), d_hidden)
    up = laid_out_as(up.to(tl.float32), d_hidden)
    clipped = gate > limit
    if CLAMP:
        gate = tl.where(clipped, limit, gate)  # NaN stays NaN
    s = sigmoid(gate)
    silu = gate * s
    slope = s * (1 + gate * (1 - s))
    if CLAMP:
        slope = tl.where(clipped, 0.0, slope)
    clipped = (up > limit) | (up < -limit)
    if CLAMP:
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if PAIRS:
        h = widened_pairs(rounded_pairs(silu * up))
    else:
        h = rounded(silu * up).to(tl.float32)
    if CLAMP:
        silu = tl.where(clipped, 0.0, silu)
    d_weight = tl.sum(d_hidden * h, axis=1)
    weighted_h = rounded(h * weight[:, None])
    d_hidden = d_hidden * weight[:, None]
    d_up = d_hidden * silu
    d_gate = d_hidden * up * slope
    if CLAMP:  # a zero slope stays zero whatever it is multiplied with; and no mask is kept that long
        d_up = tl.where(silu == 0, 0.0, d_up)
        d_gate = tl.where(slope == 0, 0.0, d_gate)
    return rounded(d_gate), rounded(d_up), weighted_h, d_weight


@triton.jit
def addresses(ptr, rows, column, width, SLICE: tl.constexpr):
    """A slice of columns of rows of a row-major matrix."""
    return ptr + rows.to(tl.int64)[:, None] * width + (column + tl.arange(0, SLICE))[None, :]


@triton.jit
def are_inside(rows, column, num_rows, width, SLICE: tl.constexpr):
    return (rows < num_rows)[:, None] & (column + tl.arange(0, SLICE) < width)[None, :]


@triton.jit
def load_slice(ptr, rows, column, num_rows, width, SLICE: tl.constexpr, CLIP: tl.constexpr):
    """A slice of columns of rows of a matrix [num_rows, width]; zeros outside. CLIP: a part of it may be outside."""
    if CLIP:
        width = tl.multiple_of(width + column * 0, 16)
        at = addresses(ptr, rows, column, width, SLICE)
        return tl.load(at, mask=are_inside(rows, column, num_rows, width, SLICE), other=0.0)
    else:
        return tl.load(addresses(ptr, rows, column, width, SLICE))


@triton.jit
def store_slice(ptr, value, rows, column, num_rows, width, SLICE: tl.constexpr, CLIP: tl.constexpr):
    if CLIP:
        width = tl.multiple_of(width + column * 0, 16)
        tl.store(addresses(ptr, rows, column, width, SLICE), value, mask=are_inside(rows, column, num_rows, width, SLICE))
    else:
        tl.store(addresses(ptr, rows, column, width, SLICE), value)


@triton.jit
def store_tile(tile, ptr, rows, column, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr, CLIP: tl.constexpr):
    """Store a tile, rounded, into rows of a matrix, slice by slice."""
    parts = slices(tile, BLOCK_M, BLOCK_N, SLICE)
    for i in tl.static_range(BLOCK_N // SLICE):
        store_slice(ptr, rounded_pairs(parts[i]), rows, column + i * SLICE, 0x7FFFFFFF, width, SLICE, CLIP)


@triton.jit
def snapped(tile):
    """A bf16 tile as the numbers of MXFP8 that its rows become."""
    return rounded_pairs(snapped_tile(widened_pairs(tile), 1, 32))


@triton.jit
def hidden_slices(
    d_hidden, gate_ptr, up_ptr, from_rows, d_gate_ptr, d_up_ptr, snapped_d_gate_ptr, snapped_d_up_ptr, weighted_h_ptr, to_rows,
    num_rows, column, width, weight, limit, partial_ptr, partial_stride, keep,
    CLAMP: tl.constexpr, CLIP: tl.constexpr, D_WEIGHTS: tl.constexpr, SNAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """d_hidden: a tile of dHid. Stores d_gate, d_up, w h, and (where `keep`) each slice's part of d_w and, with SNAP, the numbers of MXFP8
    that d_gate and d_up become.

    A slice's gate and up are on their way while the slice before it is stored.
    """
    COUNT: tl.constexpr = BLOCK_N // SLICE
    narrow = slices(d_hidden, BLOCK_M, BLOCK_N, SLICE)
    for i in tl.static_range(COUNT):
        gate = load_slice(gate_ptr, from_rows, column + i * SLICE, num_rows, width, SLICE, CLIP)
        up = load_slice(up_ptr, from_rows, column + i * SLICE, num_rows, width, SLICE, CLIP)
        d_gate, d_up, weighted_h, d_weight = hidden_gradient(narrow[i], gate, up, weight, limit, CLAMP)
        store_slice(weighted_h_ptr, weighted_h, to_rows, column + i * SLICE, num_rows, width, SLICE, CLIP)
        store_slice(d_up_ptr, d_up, to_rows, column + i * SLICE, num_rows, width, SLICE, CLIP)
        store_slice(d_gate_ptr, d_gate, to_rows, column + i * SLICE, num_rows, width, SLICE, CLIP)
        if SNAP:
            if keep:
                store_slice(snapped_d_up_ptr, snapped(d_up), to_rows, column + i * SLICE, num_rows, width, SLICE, CLIP)
                store_slice(snapped_d_gate_ptr, snapped(d_gate), to_rows, column + i * SLICE, num_rows, width, SLICE, CLIP)
        if D_WEIGHTS:
            tl.store(partial_ptr + i * partial_stride + tl.arange(0, BLOCK_M), d_weight, mask=keep)


@triton.jit
def push_d_weights(
    partial_ptr, partial_stride, slices, ring_row, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr, row,
    R: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sum a tile's parts of d_w, slice by slice, and store each row's into its slot at its source."""
    lanes = tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for part in range(slices):
        total += tl.load(partial_ptr + part * partial_stride + ring_row + lanes)
    source = tl.load(peer_rank_ptr + row + lanes)
    slot = tl.load(peer_token_idx_ptr + row + lanes)
    if R == 1:
        to = d_weights_ptr + slot
    else:
        to = peer_address(d_weights_ptrs, tl.maximum(source, 0), tl.float32) + slot
    tl.store(to, total, mask=source >= 0)


@triton.jit
def load_sum(carry_ptr, offset, row, column, rows, columns, carried, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sum so far of a tile of a weight's gradient; zeros where there is none.

    A mask and no branch: where a sum begins as one of two values, ptxas lets no product of the whole kernel run ahead.
    """
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, BLOCK_N)
    inside = (r < tl.where(carried, rows, 0))[:, None] & (c < columns)[None, :]
    return tl.load(carry_ptr + offset + r.to(tl.int64)[:, None] * columns + c[None, :], mask=inside, other=0.0)


@triton.jit
def store_sum(total, to_ptr, offset, row, column, rows, columns, ADD: tl.constexpr, BLOCK_M: tl.constexpr, SLICE: tl.constexpr):
    """Store a tile of a sum in the dtype of its place, or add it to what is there."""
    r = row + tl.arange(0, BLOCK_M)
    c = column + tl.arange(0, SLICE)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    to = to_ptr + offset + r.to(tl.int64)[:, None] * columns + c[None, :]
    if ADD:
        total = tl.load(to, mask=inside, other=0.0) + total
    if to.dtype.element_ty == tl.bfloat16:
        total = rounded(total)
    tl.store(to, total, mask=inside)


@triton.jit
def around(row, wrap):
    """A row of a ring of `wrap` rows; row is less than twice that."""
    return tl.where(row >= wrap, row - wrap, row)


@triton.jit
def fresh_zeros(token, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros that the compiler takes for a computed value, so that a branch which sets a sum to them stays a branch.

    As a constant they would be selected into the sum at every step, and a product whose sum is touched does not run ahead.
    """
    zero = 0.0
    if not INTERPRETING:
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0; // $1", "=f,r", [token], dtype=tl.float32, is_pure=False, pack=1)
    return tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + zero


@triton.jit
def store_by_copy_engine(total, to_desc, row, column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE: tl.constexpr):
    """Store a tile of a sum, rounded. Nobody in this kernel reads it, so nobody waits for it."""
    parts = slices(rounded_pairs(total), BLOCK_M, BLOCK_N, SLICE)
    for i in tl.static_range(BLOCK_N // SLICE):
        to_desc.store([row, column + i * SLICE], parts[i])


@triton.jit
def d_weight_run(
    a_desc, b_desc, to_desc, row, wrap, depth, a_column, b_column, tiles, to_row, trace_ptr, ticket, TRACE: tl.constexpr,
    RUN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """`tiles` neighbouring tiles of a^T b, each over `depth` rows from `row` on, stored at row to_row and column b_column of a gradient.

    A run of more than one is one loop over all steps of all tiles: while a tile is stored, the next one's operands are on their way.
    """
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if RUN == 1:
        total = multiply_columns(a_desc, b_desc, total, row, wrap, depth, a_column, b_column, BLOCK_K)
        if TRACE:
            note(trace_ptr, ticket, COMPUTED)
        store_by_copy_engine(total, to_desc, to_row, b_column, BLOCK_M, BLOCK_N, SLICE)
        return
    steps = tl.cdiv(depth, BLOCK_K)
    step = depth * 0
    column = b_column
    for i in tl.range(0, steps * tiles):
        from_row = around(row + step * BLOCK_K, wrap)
        a = a_desc.load([from_row, a_column])
        b = b_desc.load([from_row, column])
        total = dot(a.T, b, total)
        done = step == steps - 1
        if done:
            store_by_copy_engine(total, to_desc, to_row, column, BLOCK_M, BLOCK_N, SLICE)
            total = fresh_zeros(i, BLOCK_M, BLOCK_N)
        step = tl.where(done, 0, step + 1)  # no branch: what the next loads need must not wait for the one above
        column = tl.where(done, column + BLOCK_N, column)
    if depth == 0:  # an expert without rows
        for i in range(tiles):
            store_by_copy_engine(total, to_desc, to_row, b_column + i * BLOCK_N, BLOCK_M, BLOCK_N, SLICE)


@triton.jit
def multiply_columns(a_desc, b_desc, total, row, wrap, depth, a_column, b_column, BLOCK_K: tl.constexpr):
    """total + a^T b over `depth` rows from `row` on, in order; after row wrap - 1 comes row 0."""
    for k in tl.range(0, depth, BLOCK_K):
        from_row = around(row + k, wrap)
        a = a_desc.load([from_row, a_column])
        b = b_desc.load([from_row, b_column])
        total = dot(a.T, b, total)
    return total


@triton.jit
def d_weight_tile(
    a_desc, b_desc, to_ptr, carry_ptr, offset, carry_offset, row, wrap, depth, a_column, b_column, rows, columns, carried, last,
    ADD: tl.constexpr, CARRY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """A tile of a^T b where the sum begins with what is carried, ends unfinished, is added to an fp32 gradient, or sticks out."""
    if CARRY:
        total = load_sum(carry_ptr, carry_offset, a_column, b_column, rows, columns, carried, BLOCK_M, BLOCK_N)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total = multiply_columns(a_desc, b_desc, total, row, wrap, depth, a_column, b_column, BLOCK_K)
    parts = slices(total, BLOCK_M, BLOCK_N, SLICE)
    if CARRY:
        if last == 0:
            for i in tl.static_range(BLOCK_N // SLICE):
                store_sum(parts[i], carry_ptr, carry_offset, a_column, b_column + i * SLICE, rows, columns, False, BLOCK_M, SLICE)
    if (last == 1) & ((not ADD) | (depth > 0)):
        for i in tl.static_range(BLOCK_N // SLICE):
            store_sum(parts[i], to_ptr, offset, a_column, b_column + i * SLICE, rows, columns, ADD, BLOCK_M, SLICE)


@triton.jit
def d_weight_task(
    a_desc, b_desc, out_desc, out_ptr, carry_ptr, expert, which, at, depth, last, carried, from_row, wrap, rows, columns, number, trace_ptr,
    elements, CARRY: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COPY_ENGINE: tl.constexpr, RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STORE: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """A run of tiles of an expert's gradient [rows, columns], of `elements`; which: 0 gate, 1 up, 2 down; at: where the run begins."""
    m = (at >> 16) * BLOCK_M
    n = (at & 65535) * (RUN * BLOCK_N)
    tiles = tl.minimum(RUN, tl.cdiv(columns - n, BLOCK_N))
    cut = 0
    if CARRY:
        cut = (carried | (last == 0)).to(tl.int32)
    if BY_COPY_ENGINE:
        if cut == 0:
            d_weight_run(
                a_desc, b_desc, out_desc, from_row, wrap, depth, m, n, tiles, expert * rows + m, trace_ptr, number,
                TRACE, RUN, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_N if RUN == 1 else STORE,
            )  # fmt: skip
    if CARRY | (not BY_COPY_ENGINE):
        if (cut == 1) | (not BY_COPY_ENGINE):
            for i in range(tiles):
                d_weight_tile(
                    a_desc, b_desc, out_ptr, carry_ptr, expert.to(tl.int64) * elements, which.to(tl.int64) * elements, from_row, wrap,
                    depth, m, n + i * BLOCK_N, rows, columns, carried, last, ACCUMULATE, CARRY, BLOCK_M, BLOCK_N, BLOCK_K, STORE,
                )  # fmt: skip
