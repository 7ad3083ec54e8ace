"""The backward megakernel in blockwise FP8: the list of tasks, signals and rings of `backward.py`, without shared experts.

x and dY have a scale per 128 columns of a row; they were quantized where they were published, and travel so. A pull stores dY as it is, for
the hidden gradient, and both of them widened to bf16, which holds their values exactly, for the weights' gradients. What the hidden task
stores it stores twice: d_gate, d_up and w h in bf16 for the weights' gradients, and d_gate and d_up in blocks of 128 columns for d_x.

Every product with a weight makes two tiles of 128 columns with one reading of the other operand, as in `forward_fp8.py`, and the tensor
cores read both operands along the contraction: H for dHid = dY Wd, I for d_gate Wg + d_up Wu. So the weights are given transposed (gate and
up [H, I], down [I, H]); a block of 128 x 128 is the same block there, with the same scale. Weights' gradients are products of bf16, by the
loops of `gradients.py`. With SNAP_COLUMNS their operands are rounded to E4M3 with a power of two per tile and column before they are
stored, which bf16 holds exactly: the sums are those of FP8 products that are promoted at every step.

Legend: H hidden, I intermediate, K choices per token, R ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.backward import pull_weights, wait_for_group, wait_for_inputs
from mok.kernels.dispatch import find_tokens, store_codes, widened_blocks
from mok.kernels.experts import find_slots, push_to_slots, rounded_pairs, widened_pairs
from mok.kernels.forward_fp8 import step_sum
from mok.kernels.gradients import (
    d_weight_task,
    halves,
    hidden_gradient,
    load_slice,
    push_d_weights,
    store_slice,
    store_tile,
)
from mok.kernels.groups import (
    AT,
    AT_TILE,
    D_WEIGHT,
    D_X,
    DEPTH,
    END,
    EXPECTED,
    GATE_UP,
    HEADER,
    HIDDEN,
    OF_EXPERT,
    OF_GROUP,
    PART,
    PULL,
    RECORD,
    ROW,
    TICKET,
    take_ticket,
)
from mok.kernels.quantize import e4m3, e4m3_to_fp32, inverse_of, scale_code, scale_of, widened
from mok.kernels.signals import X_FREE, announce, finish_copy_engine_stores, order_copy_engine
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end

GROUP = tl.constexpr(32)  # rows of a part of a pull


# ---- pull ----


@triton.jit
def snapped_columns(x):
    """bf16 rows [M, N] of one tile, each column one block -> the numbers that its E4M3 values and code stand for, in bf16.

    Example: the column [448, 1, 0.3, -0.001] -> [448, 1, 0.3125, -0.001953125].
    """
    wide = widened(x)
    code = scale_code(tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    values = e4m3(wide * inverse_of(code)[None, :])
    return (e4m3_to_fp32(values.to(tl.float8e4nv, bitcast=True)) * scale_of(code)[None, :]).to(tl.bfloat16)


@triton.jit
def load_quantized(
    x_ptr, x_ptrs, scale_ptr, scale_ptrs, source, slot, live, start,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns start .. start + BLOCK_H of rows' tokens: E4M3 bits, and the codes of their blocks; zeros where a row is not live."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    values_of = find_tokens(x_ptr, x_ptrs, source, slot, H, K, R)
    codes_of = find_tokens(scale_ptr, scale_ptrs, source, slot, BLOCKS, K, R)
    columns = start + tl.arange(0, BLOCK_H)
    blocks = start // BLOCK + tl.arange(0, BLOCK_H // BLOCK)
    values = tl.load(values_of[:, None] + columns[None, :], mask=live[:, None] & (columns < H)[None, :], other=0)
    codes = tl.load(codes_of[:, None] + blocks[None, :], mask=live[:, None] & (blocks < BLOCKS)[None, :], other=0)
    return values, codes


@triton.jit
def store_pulled(
    values, codes, ring_ptr, scale_ring_ptr, wide_ring_ptr, rows, start,
    KEEP: tl.constexpr, WIDEN: tl.constexpr, SNAP: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """A part into rows of the rings: with KEEP as it came, with WIDEN as bf16, with SNAP by columns of these rows. TILED: codes as in
    `pull_scales`."""
    BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    columns = start + tl.arange(0, BLOCK_H)
    to = rows.to(tl.int64)[:, None] * H + columns[None, :]
    if KEEP:
        blocks = start // BLOCK + tl.arange(0, BLOCK_H // BLOCK)
        tl.store(ring_ptr + to, values, mask=(columns < H)[None, :])
        store_codes(scale_ring_ptr, codes, rows[:, None], blocks[None, :], BLOCKS, TILED)
    if WIDEN:
        wide = widened_blocks(values, codes, BLOCK)
        if SNAP:
            wide = snapped_columns(wide)
        tl.store(wide_ring_ptr + to, wide, mask=(columns < H)[None, :])


@triton.jit
def pull_task(
    tile, part, saved_tiles, d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs,
    weights_ptr, weights_ptrs, peer_rank_ptr, peer_token_idx_ptr, ring_d_y_ptr, ring_d_y_scale_ptr, wide_d_y_ptr,
    ring_x_ptr, ring_x_scale_ptr, wide_x_ptr, ring_weights_ptr, x_ready_ptr, ring,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RECOMPUTE: tl.constexpr, NEED_EXPERTS: tl.constexpr, SNAP: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Pull one part of a tile's rows into the rings; x only where something reads it. SNAP: a part of the columns, of all rows."""
    ROWS: tl.constexpr = BLOCK_M // PARTS
    HIGH: tl.constexpr = BLOCK_M if SNAP else min(GROUP, ROWS)
    HEIGHT: tl.constexpr = BLOCK_M if SNAP else ROWS
    WIDE: tl.constexpr = BLOCK if SNAP else BLOCK_H
    STEP: tl.constexpr = PARTS * WIDE if SNAP else WIDE
    row = tile * BLOCK_M + part * ROWS
    ring_row = (tile % ring) * BLOCK_M + part * ROWS
    pull_weights(weights_ptr, weights_ptrs, ring_weights_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row, R, ROWS)
    first = 0
    if SNAP:
        row = tile * BLOCK_M
        ring_row = (tile % ring) * BLOCK_M
        first = part * WIDE
    for group in range(0, HEIGHT, HIGH):
        rows = group + tl.arange(0, HIGH)
        source = tl.load(peer_rank_ptr + row + rows)
        slot = tl.load(peer_token_idx_ptr + row + rows)
        live = source >= 0
        for start in range(first, H, STEP):
            d_y, d_y_codes = load_quantized(
                d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, source, slot, live, start, H, K, R, WIDE, BLOCK
            )  # fmt: skip
            if NEED_EXPERTS | RECOMPUTE:
                wanted = live if NEED_EXPERTS else live & (tile >= saved_tiles)
                x, x_codes = load_quantized(x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, source, slot, wanted, start, H, K, R, WIDE, BLOCK)
            store_pulled(
                d_y, d_y_codes, ring_d_y_ptr, ring_d_y_scale_ptr, wide_d_y_ptr, ring_row + rows, start,
                True, NEED_EXPERTS, SNAP, H, WIDE, BLOCK, TILED,
            )  # fmt: skip
            if NEED_EXPERTS | RECOMPUTE:
                store_pulled(
                    x, x_codes, ring_x_ptr, ring_x_scale_ptr, wide_x_ptr, ring_row + rows, start,
                    RECOMPUTE, NEED_EXPERTS, SNAP, H, WIDE, BLOCK, TILED,
                )  # fmt: skip
    order_copy_engine(tile)
    announce(x_ready_ptr + tile)


# ---- products with weights ----


@triton.jit
def multiply_planes(
    a_desc, first_desc, second_desc, a_scale_ptr, first_scale_ptr, second_scale_ptr, planes, a_row, first_row, second_row, depth,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`multiply_scaled` over one plane of all operands or, in one sum, two. A row's codes of both planes lie one after the other.

    Example, BLOCK 2, two planes: a [3, 1] and [2, 0], scales 1 and 4; a row of the weights [1, 2] and [1, 1], scales 1/2 and 1: 10.5.
    """
    first = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    steps = tl.cdiv(depth, BLOCK)
    scales = a_scale_ptr + tl.arange(0, BLOCK_M) * (steps * planes)
    code = tl.load(scales)
    first_code = tl.load(first_scale_ptr)
    second_code = tl.load(second_scale_ptr)
    for step in tl.range(0, steps * planes):
        plane = tl.where(step >= steps, 1, 0)
        k = (step - plane * steps) * BLOCK
        scale = scale_of(code)
        first_scale = scale * scale_of(first_code)
        second_scale = scale * scale_of(second_code)
        inside = step + 1 < steps * planes  # the next step's are on their way during this one's products
        scales += 1
        first_scale_ptr += 1
        second_scale_ptr += 1
        code = tl.load(scales, mask=inside, other=0)
        first_code = tl.load(first_scale_ptr, mask=inside, other=0)
        second_code = tl.load(second_scale_ptr, mask=inside, other=0)
        a = a_desc.load([plane, a_row, k]).reshape(BLOCK_M, BLOCK)
        b = first_desc.load([plane, first_row, k]).reshape(BLOCK, BLOCK)
        c = second_desc.load([plane, second_row, k]).reshape(BLOCK, BLOCK)
        first = tl.fma(step_sum(a, b), tl.broadcast_to(first_scale[:, None], (BLOCK_M, BLOCK)), first)
        second = tl.fma(step_sum(a, c), tl.broadcast_to(second_scale[:, None], (BLOCK_M, BLOCK)), second)
    return first, second


@triton.jit
def store_quantized(left, right, ring_desc, scale_ptr, row, column, SLICE: tl.constexpr):
    """Two bf16 slices, the halves of one block of 128 columns per row, into a ring of E4M3; their codes where scale_ptr says.

    By the copy engine, which takes them in any layout; an ordinary store of bytes would have one of its own, and the gradients with it.
    """
    left = widened_pairs(left)
    right = widened_pairs(right)
    largest = tl.maximum(tl.max(left.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), tl.max(right.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    code = scale_code(largest)
    inverse = inverse_of(code)
    ring_desc.store([row, column], e4m3(left * inverse[:, None]).to(tl.float8e4nv, bitcast=True))
    ring_desc.store([row, column + SLICE], e4m3(right * inverse[:, None]).to(tl.float8e4nv, bitcast=True))
    tl.store(scale_ptr, code.to(tl.uint8))


@triton.jit
def hidden_slice(
    d_hidden, gate_ptr, up_ptr, from_rows, d_gate_ptr, d_up_ptr, weighted_h_ptr, rows, column, weight, limit, partial_ptr,
    I: tl.constexpr, CLAMP: tl.constexpr, CLIP: tl.constexpr, D_WEIGHTS: tl.constexpr, NEED_EXPERTS: tl.constexpr, SNAP: tl.constexpr,
    BLOCK_M: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """d_gate and d_up of a slice of dHid, in bf16; stored, with w h, where a weight's gradient needs them; and the slice's part of d_w."""
    gate = load_slice(gate_ptr, from_rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
    up = load_slice(up_ptr, from_rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
    if CLIP:  # columns of the next expert
        d_hidden = tl.where((column + tl.arange(0, SLICE) < I)[None, :], d_hidden, 0.0)
    d_gate, d_up, weighted_h, d_weight = hidden_gradient(d_hidden, gate, up, weight, limit, CLAMP)
    if NEED_EXPERTS & SNAP:
        store_slice(weighted_h_ptr, snapped_columns(weighted_h), rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
        store_slice(d_up_ptr, snapped_columns(d_up), rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
        store_slice(d_gate_ptr, snapped_columns(d_gate), rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
    elif NEED_EXPERTS:
        store_slice(weighted_h_ptr, weighted_h, rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
        store_slice(d_up_ptr, d_up, rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
        store_slice(d_gate_ptr, d_gate, rows, column, 0x7FFFFFFF, I, SLICE, CLIP)
    if D_WEIGHTS:
        tl.store(partial_ptr + tl.arange(0, BLOCK_M), d_weight)
    return d_gate, d_up


@triton.jit
def hidden_block(
    d_hidden, gate_ptr, up_ptr, from_rows, d_gate_ptr, d_up_ptr, weighted_h_ptr, quantized_desc, scale_ptr, rows, place, column, ring_rows,
    weight, limit, partial_ptr,
    I: tl.constexpr, CLAMP: tl.constexpr, CLIP: tl.constexpr, D_WEIGHTS: tl.constexpr, NEED_X: tl.constexpr, NEED_EXPERTS: tl.constexpr,
    SNAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What follows from one block of columns of dHid, in two slices. The codes of d_gate come first in a row, then those of d_up."""
    SLICE: tl.constexpr = BLOCK // 2
    I_BLOCKS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    left, right = halves(d_hidden, BLOCK_M, SLICE)
    d_gate_left, d_up_left = hidden_slice(
        left, gate_ptr, up_ptr, from_rows, d_gate_ptr, d_up_ptr, weighted_h_ptr, rows, column, weight, limit, partial_ptr,
        I, CLAMP, CLIP, D_WEIGHTS, NEED_EXPERTS, SNAP, BLOCK_M, SLICE,
    )  # fmt: skip
    d_gate_right, d_up_right = hidden_slice(
        right, gate_ptr, up_ptr, from_rows, d_gate_ptr, d_up_ptr, weighted_h_ptr, rows, column + SLICE, weight, limit,
        partial_ptr + ring_rows, I, CLAMP, CLIP, D_WEIGHTS, NEED_EXPERTS, SNAP, BLOCK_M, SLICE,
    )  # fmt: skip
    if NEED_X:
        codes = scale_ptr + rows.to(tl.int64) * (2 * I_BLOCKS) + column // BLOCK
        store_quantized(d_gate_left, d_gate_right, quantized_desc, codes, place, column, SLICE)
        store_quantized(d_up_left, d_up_right, quantized_desc, codes + I_BLOCKS, place + ring_rows, column, SLICE)


@triton.jit
def product_task(
    kind, tile, part, expert, group, number, taken, lanes, list_ptr, total,
    d_y_desc, d_gate_up_desc, store_d_gate_up_desc, x_desc, gate_desc, up_desc, down_t_desc, gate_up_t_desc,
    ring_d_y_scale_ptr, ring_d_gate_up_scale_ptr, ring_x_scale_ptr, gate_scale_ptr, up_scale_ptr, down_t_scale_ptr, gate_up_t_scale_ptr,
    saved_gate_ptr, saved_up_ptr, d_gate_ptr, d_up_ptr, h_ptr, ring_weights_ptr, partial_ptr,
    d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, trace_ptr, ring, saved_tiles, limit,
    H: tl.constexpr, I: tl.constexpr, R: tl.constexpr, CLAMP: tl.constexpr, RECOMPUTE: tl.constexpr, GATES: tl.constexpr,
    NEED_X: tl.constexpr, NEED_WEIGHTS: tl.constexpr, NEED_EXPERTS: tl.constexpr, SNAP: tl.constexpr, HIDDENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Two blocks of columns of the hidden gradient or of d_x, or one of gate and of up, of the first ROWS rows of a tile.

    GATES: it may be gate and up. -> the next ticket and its task's kind.
    """
    H_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    I_BLOCKS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    CLIP: tl.constexpr = I % (2 * BLOCK) != 0
    place = (tile % ring) * BLOCK_M
    column = part * (2 * BLOCK)
    if kind == D_X:
        a_desc = d_gate_up_desc
        first_desc = gate_up_t_desc
        second_desc = gate_up_t_desc
        a_scale = ring_d_gate_up_scale_ptr + place.to(tl.int64) * (2 * I_BLOCKS)
        first_scale = gate_up_t_scale_ptr + (expert * H_BLOCKS + 2 * part).to(tl.int64) * (2 * I_BLOCKS)
        second_scale = first_scale + tl.where(2 * part + 1 < H_BLOCKS, 2 * I_BLOCKS, 0)  # past H nothing is stored
        first_row = expert * H + column
        second_row = first_row + BLOCK
        planes = 2
        depth = I
    else:
        a_desc = d_y_desc
        first_desc = down_t_desc
        second_desc = down_t_desc
        a_scale = ring_d_y_scale_ptr + place.to(tl.int64) * H_BLOCKS
        first_scale = down_t_scale_ptr + (expert * I_BLOCKS + 2 * part).to(tl.int64) * H_BLOCKS
        second_scale = first_scale + tl.where(2 * part + 1 < I_BLOCKS, H_BLOCKS, 0)
        first_row = expert * I + column
        second_row = first_row + BLOCK
        planes = 1
        depth = H
        if GATES:
            if kind == GATE_UP:
                a_desc = x_desc
                first_desc = gate_desc
                second_desc = up_desc
                a_scale = ring_x_scale_ptr + place.to(tl.int64) * H_BLOCKS
                first_scale = gate_scale_ptr + (expert * I_BLOCKS + part).to(tl.int64) * H_BLOCKS
                second_scale = up_scale_ptr + (expert * I_BLOCKS + part).to(tl.int64) * H_BLOCKS
                first_row = expert * I + part * BLOCK
                second_row = first_row
    first, second = multiply_planes(
        a_desc, first_desc, second_desc, a_scale, first_scale, second_scale, planes, place, first_row, second_row, depth, ROWS, BLOCK
    )
    ticket, next_kind = take_ticket(taken, lanes, list_ptr, total)
    if TRACE:
        note(trace_ptr, number, COMPUTED)
    rows = place + tl.arange(0, ROWS)
    if kind == HIDDEN:
        from_gate_ptr = saved_gate_ptr
        from_up_ptr = saved_up_ptr
        from_place = tile * BLOCK_M
        if RECOMPUTE:
            if tile >= saved_tiles:
                from_gate_ptr = d_gate_ptr
                from_up_ptr = d_up_ptr
                from_place = place
        from_rows = from_place + tl.arange(0, ROWS)
        weight = tl.load(ring_weights_ptr + rows)
        ring_rows = ring * BLOCK_M
        partial = partial_ptr + part * 4 * ring_rows + place
        hidden_block(
            first, from_gate_ptr, from_up_ptr, from_rows, d_gate_ptr, d_up_ptr, h_ptr, store_d_gate_up_desc, ring_d_gate_up_scale_ptr,
            rows, place, column, ring_rows, weight, limit, partial, I, CLAMP, CLIP, NEED_WEIGHTS, NEED_X, NEED_EXPERTS, SNAP, ROWS, BLOCK,
        )  # fmt: skip
        if column + BLOCK < I:
            hidden_block(
                second, from_gate_ptr, from_up_ptr, from_rows, d_gate_ptr, d_up_ptr, h_ptr, store_d_gate_up_desc, ring_d_gate_up_scale_ptr,
                rows, place, column + BLOCK, ring_rows, weight, limit, partial + 2 * ring_rows,
                I, CLAMP, CLIP, NEED_WEIGHTS, NEED_X, NEED_EXPERTS, SNAP, ROWS, BLOCK,
            )  # fmt: skip
        if NEED_X:
            finish_copy_engine_stores(tile)
        else:
            order_copy_engine(tile)
        tl.debug_barrier()
        tl.atomic_add(group_ready_ptr + group, 1, sem="release", scope="gpu")
        done = tl.atomic_add(d_gate_ready_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if NEED_WEIGHTS:
            if done == HIDDENS - 1:
                push_d_weights(
                    partial_ptr, ring_rows, 2 * I_BLOCKS, place, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    tile * BLOCK_M, R, BLOCK_M,
                )  # fmt: skip
    elif kind == D_X:
        left = rounded_pairs(first)
        right = rounded_pairs(second)
        tl.debug_barrier()  # the sums' registers are free before the addresses need some
        source, slot = find_slots(peer_rank_ptr, peer_token_idx_ptr, tile * BLOCK_M, ROWS)
        push_to_slots(left, d_x_ptr, d_x_ptrs, source, slot, column, H, R, BLOCK)
        push_to_slots(right, d_x_ptr, d_x_ptrs, source, slot, column + BLOCK, H, R, BLOCK)
    elif GATES:
        store_tile(first, d_gate_ptr, rows, part * BLOCK, I, ROWS, BLOCK, BLOCK // 2, I % BLOCK != 0)
        store_tile(second, d_up_ptr, rows, part * BLOCK, I, ROWS, BLOCK, BLOCK // 2, I % BLOCK != 0)
        order_copy_engine(tile)
        announce(gate_ready_ptr + tile)
    return ticket, next_kind


# ---- weights' gradients ----


@triton.jit
def weight_task(
    tile, part, expert, at, depth, last, carried, number, taken, lanes, list_ptr, total,
    d_y_t_desc, d_gate_t_desc, d_up_t_desc, x_n_desc, h_n_desc, d_gate_weight_desc, d_up_weight_desc, d_down_weight_desc,
    d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr, carry_ptr, trace_ptr, ring,
    H: tl.constexpr, I: tl.constexpr, CARRY: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COPY_ENGINE: tl.constexpr, RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """A run of tiles of one weight's gradient: part 0 gate, 1 up, 2 down. -> the next ticket and its task's kind."""
    STORE: tl.constexpr = BLOCK_N // 2
    down = part == 2
    up = part == 1
    if down:
        a_desc = d_y_t_desc
        b_desc = h_n_desc
        out_ptr = d_down_weight_ptr
        out_desc = d_down_weight_desc
    elif up:
        a_desc = d_up_t_desc
        b_desc = x_n_desc
        out_ptr = d_up_weight_ptr
        out_desc = d_up_weight_desc
    else:
        a_desc = d_gate_t_desc
        b_desc = x_n_desc
        out_ptr = d_gate_weight_ptr
        out_desc = d_gate_weight_desc
    from_row = (tile % ring) * BLOCK_M
    wrap = ring * BLOCK_M
    rows = tl.where(down, H, I)
    columns = tl.where(down, I, H)
    ticket, next_kind = take_ticket(taken, lanes, list_ptr, total)
    d_weight_task(
        a_desc, b_desc, out_desc, out_ptr, carry_ptr, expert, part, at, depth, last, carried, from_row, wrap,
        rows, columns, number, trace_ptr, I * H, CARRY, ACCUMULATE, BY_COPY_ENGINE, RUN, BLOCK_M, BLOCK_N, BLOCK_K, STORE, TRACE,
    )  # fmt: skip
    return ticket, next_kind


# ---- the kernel ----


@triton.jit(do_not_specialize=["rank", "ring", "max_tiles", "saved_tiles", "wait_limit"])
def backward_fp8_kernel(
    d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, weights_ptr, weights_ptrs,
    d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, expert_tile_ptr, table_ptr, list_ptr,
    ring_d_y_ptr, ring_d_y_scale_ptr, ring_x_ptr, ring_x_scale_ptr, ring_d_gate_up_scale_ptr,
    wide_d_y_ptr, wide_x_ptr, d_gate_ptr, d_up_ptr, h_ptr, ring_weights_ptr, partial_ptr, carry_ptr, saved_gate_ptr, saved_up_ptr,
    ring_d_y_desc, ring_d_gate_up_desc, store_d_gate_up_desc, half_d_y_desc, half_d_gate_up_desc, store_half_d_gate_up_desc,
    ring_x_desc, gate_desc, up_desc, down_t_desc, gate_up_t_desc,
    gate_scale_ptr, up_scale_ptr, down_t_scale_ptr, gate_up_t_scale_ptr,
    d_y_t_desc, d_gate_t_desc, d_up_t_desc, x_n_desc, h_n_desc, d_gate_weight_desc, d_up_weight_desc, d_down_weight_desc,
    d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr, signals_ptr, trace_ptr, rank, ring, max_tiles, saved_tiles, limit, wait_limit,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CLAMP: tl.constexpr, RECOMPUTE: tl.constexpr, CARRY: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COPY_ENGINE: tl.constexpr,
    NEED_WEIGHTS: tl.constexpr, NEED_EXPERTS: tl.constexpr, SNAP_COLUMNS: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, THREADS: tl.constexpr,
    GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """`backward_kernel` without shared experts. BLOCK: rows, columns and depth of a block of a weight. BLOCK_K: rows of a step of a
    weight's gradient.

    ring_.. are rings of E4M3 values and their codes; wide_.., d_gate, d_up and h are rings of bf16. SNAP_COLUMNS: the weights' gradients
    are products of quantized operands (`mok.quantize.Recipe`).
    """
    x_ready_ptr = signals_ptr + 32
    gate_ready_ptr = x_ready_ptr + max_tiles
    d_gate_ready_ptr = gate_ready_ptr + max_tiles
    group_ready_ptr = d_gate_ready_ptr + max_tiles
    group_done_ptr = group_ready_ptr + max_tiles + 2
    total = tl.load(table_ptr + HEADER + tl.load(table_ptr) * ROW + TICKET)
    lanes = tl.arange(0, THREADS)
    ticket, kind = take_ticket(tl.atomic_add(signals_ptr + lanes, 1, mask=lanes == 0, sem="relaxed", scope="gpu"), lanes, list_ptr, total)
    ready_group = ticket * 0 - 1
    if TRACE:
        note_begin(trace_ptr)
    while kind != END:
        # One lane takes the next ticket now; nobody looks at it before this task's sums are there.
        taken = tl.atomic_add(signals_ptr + lanes, 1, mask=lanes == 0, sem="relaxed", scope="gpu")
        number = ticket
        if TRACE:
            note(trace_ptr, number, BEGIN)
        record = list_ptr + ticket * RECORD
        tile = tl.load(record + AT_TILE)
        part = tl.load(record + PART)
        expert = tl.load(record + OF_EXPERT)
        group = tl.load(record + OF_GROUP)
        at = tl.load(record + AT)
        next_kind = kind
        ok = 1
        if kind == PULL:
            if at >= 0:
                ok = wait_for_group(at, table_ptr, group_done_ptr, control_ptrs, rank, tile, X_FREE, wait_limit, R)
            if ok == 1:
                pull_task(
                    tile, part, saved_tiles, d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs,
                    weights_ptr, weights_ptrs, peer_rank_ptr, peer_token_idx_ptr, ring_d_y_ptr, ring_d_y_scale_ptr, wide_d_y_ptr,
                    ring_x_ptr, ring_x_scale_ptr, wide_x_ptr, ring_weights_ptr, x_ready_ptr, ring,
                    H, K, R, RECOMPUTE, NEED_EXPERTS, SNAP_COLUMNS, BLOCK_M, PARTS, BLOCK_H, BLOCK, False,
                )  # fmt: skip
            ticket, next_kind = take_ticket(taken, lanes, list_ptr, total)
        else:
            depth = tl.load(record + DEPTH)
            last = depth & 1
            depth = depth >> 1
            carried = False
            if CARRY:
                carried = (kind == D_WEIGHT) & (tile > tl.load(expert_tile_ptr + expert))
            ok = wait_for_inputs(
                kind, tile, expert, group, ready_group, tl.load(record + EXPECTED), carried | (last == 0), saved_tiles, 0,
                table_ptr, control_ptrs, x_ready_ptr, gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, group_done_ptr,
                x_ready_ptr, wait_limit, rank, R, PARTS, GATE_UPS, HIDDENS, 0, CARRY,
            )  # fmt: skip
            if TRACE:
                note(trace_ptr, number, READY)
            if ok == 1:
                if kind == D_WEIGHT:
                    if NEED_EXPERTS:
                        ready_group = group
                        ticket, next_kind = weight_task(
                            tile, part, expert, at, depth, last, carried, number, taken, lanes, list_ptr, total,
                            d_y_t_desc, d_gate_t_desc, d_up_t_desc, x_n_desc, h_n_desc,
                            d_gate_weight_desc, d_up_weight_desc, d_down_weight_desc,
                            d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr, carry_ptr, trace_ptr, ring,
                            H, I, CARRY, ACCUMULATE, BY_COPY_ENGINE, RUN, BLOCK_M, 2 * BLOCK, BLOCK_K, TRACE,
                        )  # fmt: skip
                elif (last == 1) & (kind != GATE_UP):  # half a tile
                    ticket, next_kind = product_task(
                        kind, tile, part, expert, group, number, taken, lanes, list_ptr, total,
                        half_d_y_desc, half_d_gate_up_desc, store_half_d_gate_up_desc, half_d_y_desc, down_t_desc, down_t_desc,
                        down_t_desc, gate_up_t_desc,
                        ring_d_y_scale_ptr, ring_d_gate_up_scale_ptr, ring_x_scale_ptr,
                        gate_scale_ptr, up_scale_ptr, down_t_scale_ptr, gate_up_t_scale_ptr,
                        saved_gate_ptr, saved_up_ptr, d_gate_ptr, d_up_ptr, h_ptr, ring_weights_ptr, partial_ptr,
                        d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                        gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, trace_ptr, ring, saved_tiles, limit,
                        H, I, R, CLAMP, RECOMPUTE, False, D_XS > 0, NEED_WEIGHTS, NEED_EXPERTS, SNAP_COLUMNS, HIDDENS,
                        BLOCK_M // 2, BLOCK_M, BLOCK, TRACE,
                    )  # fmt: skip
                else:
                    ticket, next_kind = product_task(
                        kind, tile, part, expert, group, number, taken, lanes, list_ptr, total,
                        ring_d_y_desc, ring_d_gate_up_desc, store_d_gate_up_desc, ring_x_desc, gate_desc, up_desc,
                        down_t_desc, gate_up_t_desc,
                        ring_d_y_scale_ptr, ring_d_gate_up_scale_ptr, ring_x_scale_ptr,
                        gate_scale_ptr, up_scale_ptr, down_t_scale_ptr, gate_up_t_scale_ptr,
                        saved_gate_ptr, saved_up_ptr, d_gate_ptr, d_up_ptr, h_ptr, ring_weights_ptr, partial_ptr,
                        d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                        gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, trace_ptr, ring, saved_tiles, limit,
                        H, I, R, CLAMP, RECOMPUTE, RECOMPUTE, D_XS > 0, NEED_WEIGHTS, NEED_EXPERTS, SNAP_COLUMNS, HIDDENS,
                        BLOCK_M, BLOCK_M, BLOCK, TRACE,
                    )  # fmt: skip
                announce(group_done_ptr + group)
        if TRACE:
            note(trace_ptr, number, DONE)
        kind = tl.where(ok == 1, next_kind, END)
    if TRACE:
        note_end(trace_ptr)
