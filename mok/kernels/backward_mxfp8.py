"""The backward megakernel in MXFP8 on tensor cores that multiply by scales: tasks, signals and rings of `backward.py`, with E4M3 operands,
without shared experts.

dY, x, d_gate, d_up and the weights have a scale per 32 columns of a row, an E8M0 code; the codes lie in tiles of 128 rows and 4 codes, as
in `forward_mxfp8.py`. A pull stores dY (and x, where gate and up are computed again) as it came, and both widened to bf16 for the weights'
gradients. The hidden task stores d_gate, d_up and w h in bf16 for these, and d_gate and d_up in E4M3 with codes for d_x.

Weights are contracted along H for gate, up and dHid, along I for d_x, and a block-scaled product reads both operands along the
contraction. So the weights of dHid and d_x are given transposed (down [I, H], gate and up [H, I]) and quantized along their rows, which are
filled up with zeros to pairs of tiles: a product makes two neighbouring tiles of columns. Weights' gradients are products of bf16, by the
loops of `gradients.py`. There are no half tiles: a block-scaled product has 128 rows.

Legend: H hidden, I intermediate, K choices per token, R ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.backward import wait_for_group, wait_for_inputs
from mok.kernels.backward_fp8 import hidden_slice, pull_task, weight_task
from mok.kernels.experts import find_slots, push_to_slots, rounded_halves, widened_pairs
from mok.kernels.forward_mxfp8 import CODE_TILE, CODES, rows_of_codes, scaled_dot
from mok.kernels.gradients import push_d_weights, slices, store_slice
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
from mok.kernels.quantize import quantize_tile
from mok.kernels.signals import X_FREE, announce, finish_copy_engine_stores, order_copy_engine
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end


@triton.jit
def multiply_planes(
    a_desc, a_scale_desc, b_desc, b_scale_desc, planes, a_tile, a_next, b_row, b_tile, b_next, depth, BLOCK: tl.constexpr
):  # fmt: skip
    """`multiply_scaled` over one plane of both operands or, in one sum, two: the second ones lie a_next and b_next tiles further on."""
    total = tl.zeros((BLOCK, 2 * BLOCK), tl.float32)
    steps = tl.cdiv(depth, BLOCK)
    for step in tl.range(0, steps * planes):
        plane = tl.where(step >= steps, 1, 0)
        k = step - plane * steps
        tile = a_tile + plane * a_next
        a_codes = rows_of_codes(a_scale_desc.load([0, tile, k, 0, 0]), BLOCK)
        b_codes = rows_of_codes(b_scale_desc.load([0, b_tile + plane * b_next, k, 0, 0]), 2 * BLOCK)
        a = a_desc.load([tile * BLOCK, k * BLOCK])
        b = b_desc.load([0, b_row + plane * b_next * BLOCK, k * BLOCK]).reshape(2 * BLOCK, BLOCK)
        total = scaled_dot(a, a_codes, b, b_codes, total)
    return total


@triton.jit
def store_quantized(value, ring_desc, scale_ptr, row, column, TILES: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr):
    """A bf16 slice of a tile's columns into a ring of E4M3 by the copy engine, its codes into the tile's tiles of codes, of which a row of
    the ring has TILES."""
    values, codes = quantize_tile(widened_pairs(value), 1, 32)
    ring_desc.store([row, column], values.to(tl.float8e4nv, bitcast=True))
    r = tl.arange(0, BLOCK)[:, None]
    to = scale_ptr + (row // BLOCK * TILES + column // BLOCK).to(tl.int64) * CODE_TILE + column % BLOCK // 32
    tl.store(to + r % 32 * 16 + r // 32 * CODES + tl.arange(0, SLICE // 32)[None, :], codes, mask=column + r * 0 < TILES * BLOCK)


@triton.jit
def product_task_mxfp8(
    kind, tile, part, expert, group, number, taken, lanes, list_ptr, total,
    d_y_desc, d_y_scale_desc, d_gate_up_desc, d_gate_up_scale_desc, store_d_gate_up_desc, ring_d_gate_up_scale_ptr, x_desc, x_scale_desc,
    gate_up_desc, gate_up_scale_desc, down_t_desc, down_t_scale_desc, gate_up_t_desc, gate_up_t_scale_desc,
    saved_gate_ptr, saved_up_ptr, d_gate_ptr, d_up_ptr, h_ptr, ring_weights_ptr, partial_ptr,
    d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, trace_ptr, ring, num_local, saved_tiles, limit,
    H: tl.constexpr, I: tl.constexpr, R: tl.constexpr, CLAMP: tl.constexpr, RECOMPUTE: tl.constexpr,
    NEED_X: tl.constexpr, NEED_WEIGHTS: tl.constexpr, NEED_EXPERTS: tl.constexpr, HIDDENS: tl.constexpr,
    BLOCK: tl.constexpr, SLICE: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Two tiles of columns of the hidden gradient or of d_x, or one of gate and of up. -> the next ticket and its task's kind."""
    H_TILES: tl.constexpr = (H + 2 * BLOCK - 1) // (2 * BLOCK) * 2
    I_TILES: tl.constexpr = (I + BLOCK - 1) // BLOCK
    PARTS_OF_D_W: tl.constexpr = 2 * BLOCK // SLICE
    ring_tile = tile % ring
    place = ring_tile * BLOCK
    column = part * (2 * BLOCK)
    b_next = 0
    if kind == D_X:
        a_desc = d_gate_up_desc
        a_scale_desc = d_gate_up_scale_desc
        b_desc = gate_up_t_desc
        b_scale_desc = gate_up_t_scale_desc
        b_tile = expert * H_TILES + 2 * part
        b_row = b_tile * BLOCK
        b_next = num_local * H_TILES
        planes = 2
        depth = I
    else:
        a_desc = d_y_desc
        a_scale_desc = d_y_scale_desc
        b_desc = down_t_desc
        b_scale_desc = down_t_scale_desc
        b_tile = expert * ((I_TILES + 1) // 2 * 2) + 2 * part
        b_row = b_tile * BLOCK
        planes = 1
        depth = H
        if RECOMPUTE:
            if kind == GATE_UP:
                a_desc = x_desc
                a_scale_desc = x_scale_desc
                b_desc = gate_up_desc
                b_scale_desc = gate_up_scale_desc
                b_tile = expert * I_TILES + part
                b_row = expert * I + part * BLOCK
    product = multiply_planes(a_desc, a_scale_desc, b_desc, b_scale_desc, planes, ring_tile, ring, b_row, b_tile, b_next, depth, BLOCK)
    ticket, next_kind = take_ticket(taken, lanes, list_ptr, total)
    if TRACE:
        note(trace_ptr, number, COMPUTED)
    rows = place + tl.arange(0, BLOCK)
    if kind == HIDDEN:
        from_gate_ptr = saved_gate_ptr
        from_up_ptr = saved_up_ptr
        from_place = tile * BLOCK
        if RECOMPUTE:
            if tile >= saved_tiles:
                from_gate_ptr = d_gate_ptr
                from_up_ptr = d_up_ptr
                from_place = place
        from_rows = from_place + tl.arange(0, BLOCK)
        weight = tl.load(ring_weights_ptr + rows)
        ring_rows = ring * BLOCK
        narrow = slices(product, BLOCK, 2 * BLOCK, SLICE)
        for i in tl.static_range(PARTS_OF_D_W):
            at = column + i * SLICE
            d_gate, d_up = hidden_slice(
                narrow[i], from_gate_ptr, from_up_ptr, from_rows, d_gate_ptr, d_up_ptr, h_ptr, rows, at, weight, limit,
                partial_ptr + (part * PARTS_OF_D_W + i) * ring_rows + place,
                I, CLAMP, I % (2 * BLOCK) != 0, NEED_WEIGHTS, NEED_EXPERTS, False, BLOCK, SLICE,
            )  # fmt: skip
            if NEED_X:
                store_quantized(d_gate, store_d_gate_up_desc, ring_d_gate_up_scale_ptr, place, at, I_TILES, BLOCK, SLICE)
                store_quantized(d_up, store_d_gate_up_desc, ring_d_gate_up_scale_ptr, place + ring_rows, at, I_TILES, BLOCK, SLICE)
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
                    partial_ptr, ring_rows, HIDDENS * PARTS_OF_D_W, place, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    tile * BLOCK, R, BLOCK,
                )  # fmt: skip
    elif kind == D_X:
        left, right = rounded_halves(product, BLOCK, BLOCK)
        tl.debug_barrier()  # the sums' registers are free before the addresses need some
        source, slot = find_slots(peer_rank_ptr, peer_token_idx_ptr, tile * BLOCK, BLOCK)
        push_to_slots(left, d_x_ptr, d_x_ptrs, source, slot, column, H, R, BLOCK)
        push_to_slots(right, d_x_ptr, d_x_ptrs, source, slot, column + BLOCK, H, R, BLOCK)
    elif RECOMPUTE:
        gate, up = rounded_halves(product, BLOCK, BLOCK)
        store_slice(d_gate_ptr, gate, rows, part * BLOCK, 0x7FFFFFFF, I, BLOCK, I % BLOCK != 0)
        store_slice(d_up_ptr, up, rows, part * BLOCK, 0x7FFFFFFF, I, BLOCK, I % BLOCK != 0)
        order_copy_engine(tile)
        announce(gate_ready_ptr + tile)
    return ticket, next_kind


@triton.jit(do_not_specialize=["rank", "ring", "max_tiles", "num_local", "saved_tiles", "wait_limit"])
def backward_mxfp8_kernel(
    d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, weights_ptr, weights_ptrs,
    d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, expert_tile_ptr, table_ptr, list_ptr,
    ring_d_y_ptr, ring_d_y_scale_ptr, ring_x_ptr, ring_x_scale_ptr, ring_d_gate_up_scale_ptr,
    wide_d_y_ptr, wide_x_ptr, d_gate_ptr, d_up_ptr, h_ptr, ring_weights_ptr, partial_ptr, carry_ptr, saved_gate_ptr, saved_up_ptr,
    ring_d_y_desc, d_y_scale_desc, ring_d_gate_up_desc, d_gate_up_scale_desc, store_d_gate_up_desc, ring_x_desc, x_scale_desc,
    gate_up_desc, gate_up_scale_desc, down_t_desc, down_t_scale_desc, gate_up_t_desc, gate_up_t_scale_desc,
    wide_d_y_t_desc, d_gate_t_desc, d_up_t_desc, wide_x_n_desc, h_n_desc, d_gate_weight_desc, d_up_weight_desc, d_down_weight_desc,
    d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr, signals_ptr, trace_ptr, rank, ring, max_tiles, num_local, saved_tiles,
    limit, wait_limit,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CLAMP: tl.constexpr, RECOMPUTE: tl.constexpr, CARRY: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COPY_ENGINE: tl.constexpr,
    NEED_WEIGHTS: tl.constexpr, NEED_EXPERTS: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr, BLOCK_H: tl.constexpr, THREADS: tl.constexpr,
    GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """`backward_fp8_kernel` with codes per 32 columns. BLOCK_M: 128, rows of a tile, depth of a product's step and half of its columns.
    BLOCK_K: rows of a step of a weight's gradient.

    ring_.. are rings of E4M3 values and their codes; wide_.., d_gate, d_up and h are rings of bf16.
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
                    H, K, R, RECOMPUTE, NEED_EXPERTS, False, BLOCK_M, PARTS, BLOCK_H, 32, True,
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
                            wide_d_y_t_desc, d_gate_t_desc, d_up_t_desc, wide_x_n_desc, h_n_desc,
                            d_gate_weight_desc, d_up_weight_desc, d_down_weight_desc,
                            d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr, carry_ptr, trace_ptr, ring,
                            H, I, CARRY, ACCUMULATE, BY_COPY_ENGINE, RUN, BLOCK_M, 2 * BLOCK_M, BLOCK_K, TRACE,
                        )  # fmt: skip
                else:
                    ticket, next_kind = product_task_mxfp8(
                        kind, tile, part, expert, group, number, taken, lanes, list_ptr, total,
                        ring_d_y_desc, d_y_scale_desc, ring_d_gate_up_desc, d_gate_up_scale_desc, store_d_gate_up_desc,
                        ring_d_gate_up_scale_ptr, ring_x_desc, x_scale_desc, gate_up_desc, gate_up_scale_desc,
                        down_t_desc, down_t_scale_desc, gate_up_t_desc, gate_up_t_scale_desc,
                        saved_gate_ptr, saved_up_ptr, d_gate_ptr, d_up_ptr, h_ptr, ring_weights_ptr, partial_ptr,
                        d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                        gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, trace_ptr, ring, num_local, saved_tiles, limit,
                        H, I, R, CLAMP, RECOMPUTE, D_XS > 0, NEED_WEIGHTS, NEED_EXPERTS, HIDDENS, BLOCK_M, SLICE, TRACE,
                    )  # fmt: skip
                announce(group_done_ptr + group)
        if TRACE:
            note(trace_ptr, number, DONE)
        kind = tl.where(ok == 1, next_kind, END)
    if TRACE:
        note_end(trace_ptr)
