"""The backward megakernel: dY and x in, every gradient out, in one launch.

All work is one list of tasks in a fixed order (`mok.kernels.groups`), and every program takes the next ticket until none is left. A task
waits only for tasks of earlier tickets, so the kernel ends however few programs are resident.

Rows live in rings of `ring` tiles (dY, x, router weights, d_gate, d_up, w h, parts of d_w); tile t uses place t mod ring. Gate and up that
were not saved are computed again into the places of d_gate and d_up. A ring that wraps holds two groups, so a tile gets the place of one at
least two groups before, which is free when that group is done. Signals, one counter each:
    x_ready[tile]: parts pulled;  gate_ready[tile]: slices of gate and up there;  d_gate_ready[tile]: slices of d_gate, d_up, w h there;
    group_ready[group]: the same, over all tiles of the group;  group_done[group]: compute tasks done.

With MXFP8, dY and x arrive as E4M3 and codes and are widened by the pull; the weights, and what d_x reads of d_gate and d_up, are numbers
of MXFP8, too, all in bf16 (`launch_mxfp8.py` says how far). Weights' gradients read d_gate and d_up as they are.

Legend: T tokens of this rank, H hidden, I intermediate, S width of the shared experts, L experts of this rank, K choices per token,
R ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels import memory
from mok.kernels.dispatch import pull_rows, pull_widened
from mok.kernels.experts import find_slots, push_to_slots, rounded_pairs, store_rows
from mok.kernels.gradients import (
    d_weight_task,
    gate_and_up,
    hidden_slices,
    multiply_rows,
    push_d_weights,
    slices,
    store_tile,
)
from mok.kernels.groups import (
    AT,
    AT_TILE,
    CARRY_AFTER,
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
    SHARED_D_WEIGHT,
    SHARED_D_X,
    SHARED_HIDDEN,
    TASKS,
    TICKET,
    take_ticket,
)
from mok.kernels.signals import (
    X_FREE,
    X_READY,
    announce,
    order_copy_engine,
    peer_address,
    wait_for,
)
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end

GATE_READY = tl.constexpr(memory.STATES.index("gate_ready"))
D_GATE_READY = tl.constexpr(memory.STATES.index("d_gate_ready"))
GROUP_READY = tl.constexpr(memory.STATES.index("group_ready"))
GROUP_DONE = tl.constexpr(memory.STATES.index("group_done"))


@triton.jit
def pull_weights(
    weights_ptr, weights_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row, R: tl.constexpr, ROWS: tl.constexpr
):
    """The router weights of ROWS rows; zero on padding rows."""
    lanes = tl.arange(0, ROWS)
    source = tl.load(peer_rank_ptr + row + lanes)
    slot = tl.load(peer_token_idx_ptr + row + lanes)
    if R == 1:
        of = weights_ptr + slot
    else:
        of = peer_address(weights_ptrs, tl.maximum(source, 0), tl.float32) + slot
    tl.store(ring_ptr + ring_row + lanes, tl.load(of, mask=source >= 0, other=0.0))


@triton.jit
def pull_task(
    tile, part, saved_tiles, d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs,
    weights_ptr, weights_ptrs, peer_rank_ptr, peer_token_idx_ptr, ring_d_y_ptr, ring_x_ptr, ring_weights_ptr, x_ready_ptr, ring,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, NEED_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr, MXFP8: tl.constexpr,
):  # fmt: skip
    """Pull one part of a tile's rows into the rings; x only where something reads it."""
    ROWS: tl.constexpr = BLOCK_M // PARTS
    row = tile * BLOCK_M + part * ROWS
    ring_row = (tile % ring) * BLOCK_M + part * ROWS
    pull_weights(weights_ptr, weights_ptrs, ring_weights_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row, R, ROWS)
    if MXFP8:
        pull_widened(
            d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, ring_d_y_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
            H, K, R, ROWS, BLOCK_H,
        )  # fmt: skip
        if NEED_EXPERTS | (tile >= saved_tiles):
            pull_widened(
                x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, ring_x_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
                H, K, R, ROWS, BLOCK_H,
            )  # fmt: skip
    elif NEED_EXPERTS:
        pull_rows(
            d_y_ptr, d_y_ptrs, ring_d_y_ptr, x_ptr, x_ptrs, ring_x_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
            H, K, R, True, ROWS, BLOCK_H,
        )  # fmt: skip
    else:
        pull_rows(
            d_y_ptr, d_y_ptrs, ring_d_y_ptr, x_ptr, x_ptrs, ring_x_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
            H, K, R, False, ROWS, BLOCK_H,
        )  # fmt: skip
        if tile >= saved_tiles:
            pull_rows(
                x_ptr, x_ptrs, ring_x_ptr, x_ptr, x_ptrs, ring_x_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
                H, K, R, False, ROWS, BLOCK_H,
            )  # fmt: skip
    order_copy_engine(tile)
    announce(x_ready_ptr + tile)


SHARED = tl.constexpr(-2)  # among groups, the shared experts


@triton.jit
def wait_for_group(group, table_ptr, group_done_ptr, control_ptrs, rank, task, what, wait_limit, R: tl.constexpr):
    """All compute tasks of a group are done."""
    tasks = tl.load(table_ptr + HEADER + group * ROW + TASKS)
    return wait_for(group_done_ptr + group, tasks, control_ptrs, rank, task, what, wait_limit, R).to(tl.int32)


@triton.jit
def wait_for_inputs(
    kind, tile, expert, group, ready_group, expected, cut, saved_tiles, shared_tiles, table_ptr, control_ptrs,
    x_ready_ptr, gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, group_done_ptr, shared_ready_ptr, wait_limit,
    rank, R: tl.constexpr, PARTS: tl.constexpr, GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, SHARED_HIDDENS: tl.constexpr,
    CARRY: tl.constexpr,
):  # fmt: skip
    """What a compute task reads is there, and what it overwrites is no longer read. The shared experts' dY and x are there from the start.

    ready_group: the group of which this program has seen that all d_gate, d_up, w h are there. cut: a weight's gradient of which this
    group has not all rows.
    """
    ok = 1
    if kind == GATE_UP:
        ok = wait_for(x_ready_ptr + tile, PARTS, control_ptrs, rank, tile, X_READY, wait_limit, R).to(tl.int32)
    elif kind == HIDDEN:
        if (GATE_UPS > 0) & (tile >= saved_tiles):  # and with them dY
            ok = wait_for(gate_ready_ptr + tile, GATE_UPS, control_ptrs, rank, tile, GATE_READY, wait_limit, R).to(tl.int32)
        else:
            ok = wait_for(x_ready_ptr + tile, PARTS, control_ptrs, rank, tile, X_READY, wait_limit, R).to(tl.int32)
    elif kind == D_X:
        ok = wait_for(d_gate_ready_ptr + tile, HIDDENS, control_ptrs, rank, tile, D_GATE_READY, wait_limit, R).to(tl.int32)
    elif kind == D_WEIGHT:
        if group != ready_group:
            ok = wait_for(group_ready_ptr + group, expected, control_ptrs, rank, group, GROUP_READY, wait_limit, R).to(tl.int32)
        if CARRY:
            if cut & (ok == 1):
                after = tl.load(table_ptr + HEADER + group * ROW + CARRY_AFTER)
                if after >= 0:
                    ok = wait_for_group(after, table_ptr, group_done_ptr, control_ptrs, rank, expert, GROUP_DONE, wait_limit, R)
    elif kind == SHARED_D_X:
        ok = wait_for(shared_ready_ptr + tile, SHARED_HIDDENS, control_ptrs, rank, tile, D_GATE_READY, wait_limit, R).to(tl.int32)
    elif kind == SHARED_D_WEIGHT:
        if ready_group != SHARED:
            ok = wait_for(shared_ready_ptr + shared_tiles, expected, control_ptrs, rank, 0, GROUP_READY, wait_limit, R).to(tl.int32)
    order_copy_engine(tile)
    return ok


@triton.jit
def tile_task(
    kind, tile, part, expert, group, number, taken, lanes, list_ptr, total, ring_d_y_desc, ring_d_gate_up_desc,
    down_kn_desc, gate_up_kn_desc, shared_d_y_desc, shared_d_gate_up_desc, shared_down_kn_desc, shared_gate_up_kn_desc,
    saved_gate_ptr, saved_up_ptr, ring_d_gate_ptr, ring_d_up_ptr, snapped_d_gate_ptr, snapped_d_up_ptr, ring_h_ptr, ring_weights_ptr,
    partial_ptr,
    saved_shared_gate_ptr, saved_shared_up_ptr, shared_d_gate_ptr, shared_d_up_ptr, shared_h_ptr, shared_d_x_ptr,
    d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    d_gate_ready_ptr, group_ready_ptr, shared_ready_ptr, trace_ptr, up_first, shared_up_first, ring, tokens, saved_tiles,
    shared_tiles, limit, shared_limit, H: tl.constexpr, I: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    CLAMP: tl.constexpr, RECOMPUTE: tl.constexpr, NEED_WEIGHTS: tl.constexpr, HIDDENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICE: tl.constexpr, SNAP: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """A slice of the hidden gradient or of d_x, of the first ROWS rows of a tile. -> the next ticket and its task's kind."""
    STORE: tl.constexpr = BLOCK_N // 2 if BLOCK_N > SLICE else SLICE
    PARTS_OF_D_W: tl.constexpr = BLOCK_N // SLICE
    hidden = (kind == HIDDEN) | (kind == SHARED_HIDDEN)
    routed_rows = (kind == HIDDEN) | (kind == D_X)
    place = tl.where(routed_rows, tile % ring, tile) * BLOCK_M
    column = part * BLOCK_N
    acc = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if hidden:
        inner = H
        planes = 1
        reversed_up = 0
        right_row = expert * H
        left_desc = ring_d_y_desc
        right_desc = down_kn_desc
    else:
        inner = I
        planes = 2
        reversed_up = up_first
        right_row = expert * I
        left_desc = ring_d_gate_up_desc
        right_desc = gate_up_kn_desc
    if S > 0:
        if kind == SHARED_HIDDEN:
            left_desc = shared_d_y_desc
            right_desc = shared_down_kn_desc
        elif kind == SHARED_D_X:
            inner = S
            reversed_up = shared_up_first
            left_desc = shared_d_gate_up_desc
            right_desc = shared_gate_up_kn_desc
    acc = multiply_rows(
        left_desc, right_desc, acc, planes, reversed_up, place, right_row, column, inner, ROWS, BLOCK_N, BLOCK_K
    )  # fmt: skip
    ticket, next_kind = take_ticket(taken, lanes, list_ptr, total)
    if TRACE:
        note(trace_ptr, number, COMPUTED)
    if hidden:
        from_gate_ptr = saved_gate_ptr
        from_up_ptr = saved_up_ptr
        from_place = tile * BLOCK_M
        to_gate_ptr = ring_d_gate_ptr
        to_up_ptr = ring_d_up_ptr
        to_h_ptr = ring_h_ptr
        clip = limit
        if RECOMPUTE:
            if tile >= saved_tiles:
                from_gate_ptr = ring_d_gate_ptr
                from_up_ptr = ring_d_up_ptr
                from_place = place
        width = I
        num_rows = 0x7FFFFFFF
        if S > 0:
            width = tl.where(kind == HIDDEN, I, S)
            if kind == SHARED_HIDDEN:
                from_gate_ptr = saved_shared_gate_ptr
                from_up_ptr = saved_shared_up_ptr
                to_gate_ptr = shared_d_gate_ptr
                to_up_ptr = shared_d_up_ptr
                to_h_ptr = shared_h_ptr
                num_rows = tokens
                clip = shared_limit
        lanes_m = tl.arange(0, ROWS)
        weight = tl.load(ring_weights_ptr + place + lanes_m, mask=routed_rows, other=1.0)
        hidden_slices(
            acc, from_gate_ptr, from_up_ptr, from_place + lanes_m, to_gate_ptr, to_up_ptr, snapped_d_gate_ptr, snapped_d_up_ptr, to_h_ptr,
            place + lanes_m,
            num_rows, column, width, weight, clip,
            partial_ptr + PARTS_OF_D_W * part * (ring * BLOCK_M) + place, ring * BLOCK_M, routed_rows,
            CLAMP, (S > 0) | (I % BLOCK_N != 0), NEED_WEIGHTS, SNAP, ROWS, BLOCK_N, SLICE,
        )  # fmt: skip
        order_copy_engine(tile)
        if kind == HIDDEN:
            tl.debug_barrier()
            tl.atomic_add(group_ready_ptr + group, 1, sem="release", scope="gpu")
            done = tl.atomic_add(d_gate_ready_ptr + tile, 1, sem="acq_rel", scope="gpu")
            if NEED_WEIGHTS:
                if done == HIDDENS - 1:
                    push_d_weights(
                        partial_ptr, ring * BLOCK_M, HIDDENS * PARTS_OF_D_W, place, d_weights_ptr, d_weights_ptrs,
                        peer_rank_ptr, peer_token_idx_ptr, tile * BLOCK_M, R, BLOCK_M,
                    )  # fmt: skip
        elif S > 0:
            announce(shared_ready_ptr + tile)
            tl.atomic_add(shared_ready_ptr + shared_tiles, 1, sem="release", scope="gpu")
    else:
        pieces = slices(rounded_pairs(acc), ROWS, BLOCK_N, STORE)
        if kind == D_X:
            tl.debug_barrier()  # the sums' registers are free before the addresses need some
            source, slot = find_slots(peer_rank_ptr, peer_token_idx_ptr, tile * BLOCK_M, ROWS)
            for i in tl.static_range(BLOCK_N // STORE):
                push_to_slots(pieces[i], d_x_ptr, d_x_ptrs, source, slot, column + i * STORE, H, R, STORE)
        elif S > 0:
            for i in tl.static_range(BLOCK_N // STORE):
                store_rows(pieces[i], shared_d_x_ptr, place, tokens, column + i * STORE, H, ROWS, STORE)
    return ticket, next_kind


@triton.jit(
    do_not_specialize=["up_first", "shared_up_first", "rank", "ring", "max_tiles", "num_local", "tokens", "saved_tiles", "wait_limit"]
)
def backward_kernel(
    d_y_ptr, d_y_ptrs, d_y_scale_ptr, d_y_scale_ptrs, x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, weights_ptr, weights_ptrs,
    d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, expert_tile_ptr, table_ptr, list_ptr,
    ring_d_y_ptr, ring_x_ptr, ring_d_gate_ptr, ring_d_up_ptr, snapped_d_gate_ptr, snapped_d_up_ptr, ring_h_ptr, ring_weights_ptr,
    partial_ptr, carry_ptr,
    saved_gate_ptr, saved_up_ptr, saved_shared_gate_ptr, saved_shared_up_ptr, shared_d_gate_ptr, shared_d_up_ptr, shared_h_ptr,
    ring_x_desc, gate_desc, up_desc,
    ring_d_y_desc, ring_d_gate_up_desc, half_d_y_desc, half_d_gate_up_desc, down_kn_desc, gate_up_kn_desc,
    ring_d_y_t_desc, ring_d_gate_t_desc, ring_d_up_t_desc, ring_x_n_desc, ring_h_n_desc,
    shared_d_y_desc, shared_d_gate_up_desc, shared_down_kn_desc, shared_gate_up_kn_desc,
    shared_d_y_t_desc, shared_d_gate_t_desc, shared_d_up_t_desc, shared_x_n_desc, shared_h_n_desc,
    d_gate_weight_desc, d_up_weight_desc, d_down_weight_desc, shared_d_gate_weight_desc, shared_d_up_weight_desc, shared_d_down_weight_desc,
    d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr, shared_d_gate_weight_ptr, shared_d_up_weight_ptr, shared_d_down_weight_ptr,
    shared_d_x_ptr, signals_ptr, trace_ptr, up_first, shared_up_first, rank, ring, max_tiles, num_local, tokens, saved_tiles,
    limit, shared_limit, wait_limit,
    H: tl.constexpr, I: tl.constexpr, S: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CLAMP: tl.constexpr, RECOMPUTE: tl.constexpr, CARRY: tl.constexpr, ACCUMULATE: tl.constexpr, BY_COPY_ENGINE: tl.constexpr,
    NEED_WEIGHTS: tl.constexpr, NEED_EXPERTS: tl.constexpr, NEED_SHARED: tl.constexpr,
    RUN: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SLICE: tl.constexpr, BLOCK_H: tl.constexpr, THREADS: tl.constexpr,
    GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, D_WEIGHTS: tl.constexpr,
    SHARED_HIDDENS: tl.constexpr, SHARED_D_XS: tl.constexpr, MXFP8: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Take tickets until none is left. signals: the ticket counter, then the counters of the module's text; zero at the start."""
    STORE: tl.constexpr = BLOCK_N // 2 if BLOCK_N > SLICE else SLICE
    x_ready_ptr = signals_ptr + 32
    gate_ready_ptr = x_ready_ptr + max_tiles
    d_gate_ready_ptr = gate_ready_ptr + max_tiles
    group_ready_ptr = d_gate_ready_ptr + max_tiles
    group_done_ptr = group_ready_ptr + max_tiles + 2
    shared_ready_ptr = group_done_ptr + max_tiles + 2
    shared_tiles = tl.cdiv(tokens, BLOCK_M) if S > 0 else 0
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
                    weights_ptr, weights_ptrs, peer_rank_ptr, peer_token_idx_ptr, ring_d_y_ptr, ring_x_ptr, ring_weights_ptr,
                    x_ready_ptr, ring, H, K, R, NEED_EXPERTS, BLOCK_M, PARTS, BLOCK_H, MXFP8,
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
                kind, tile, expert, group, ready_group, tl.load(record + EXPECTED), carried | (last == 0), saved_tiles, shared_tiles,
                table_ptr, control_ptrs, x_ready_ptr, gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, group_done_ptr,
                shared_ready_ptr, wait_limit, rank, R, PARTS, GATE_UPS, HIDDENS, SHARED_HIDDENS, CARRY,
            )  # fmt: skip
            if TRACE:
                note(trace_ptr, number, READY)
            if ok == 1:
                if (kind == D_WEIGHT) | (kind == SHARED_D_WEIGHT):
                    if NEED_EXPERTS | NEED_SHARED:
                        width = I if S == 0 else tl.where(kind == D_WEIGHT, I, S)
                        down = part == 2
                        up = part == 1
                        from_row = (tile % ring) * BLOCK_M
                        wrap = ring * BLOCK_M
                        ready_group = group
                        if down:
                            a_desc = ring_d_y_t_desc
                            b_desc = ring_h_n_desc
                            out_ptr = d_down_weight_ptr
                            out_desc = d_down_weight_desc
                        elif up:
                            a_desc = ring_d_up_t_desc
                            b_desc = ring_x_n_desc
                            out_ptr = d_up_weight_ptr
                            out_desc = d_up_weight_desc
                        else:
                            a_desc = ring_d_gate_t_desc
                            b_desc = ring_x_n_desc
                            out_ptr = d_gate_weight_ptr
                            out_desc = d_gate_weight_desc
                        if S > 0:
                            if kind == SHARED_D_WEIGHT:
                                from_row = 0
                                wrap = 0x40000000
                                ready_group = SHARED
                                if down:
                                    a_desc = shared_d_y_t_desc
                                    b_desc = shared_h_n_desc
                                    out_ptr = shared_d_down_weight_ptr
                                    out_desc = shared_d_down_weight_desc
                                elif up:
                                    a_desc = shared_d_up_t_desc
                                    b_desc = shared_x_n_desc
                                    out_ptr = shared_d_up_weight_ptr
                                    out_desc = shared_d_up_weight_desc
                                else:
                                    a_desc = shared_d_gate_t_desc
                                    b_desc = shared_x_n_desc
                                    out_ptr = shared_d_gate_weight_ptr
                                    out_desc = shared_d_gate_weight_desc
                        rows = tl.where(down, H, width)
                        columns = tl.where(down, width, H)
                        ticket, next_kind = take_ticket(taken, lanes, list_ptr, total)
                        d_weight_task(
                            a_desc, b_desc, out_desc, out_ptr, carry_ptr, expert, part, at, depth, last, carried, from_row, wrap,
                            rows, columns, number, trace_ptr, I * H,
                            CARRY, ACCUMULATE, BY_COPY_ENGINE, RUN, BLOCK_M, BLOCK_N, BLOCK_K, STORE, TRACE,
                        )  # fmt: skip
                elif kind == GATE_UP:
                    if RECOMPUTE:
                        to_row = (tile % ring) * BLOCK_M
                        b_row = expert * I + part * STORE
                        gate, up_value = gate_and_up(ring_x_desc, gate_desc, up_desc, to_row, b_row, H, BLOCK_M, STORE, BLOCK_K)
                        ticket, next_kind = take_ticket(taken, lanes, list_ptr, total)
                        rows_here = to_row + tl.arange(0, BLOCK_M)
                        store_tile(gate, ring_d_gate_ptr, rows_here, part * STORE, I, BLOCK_M, STORE, SLICE, I % STORE != 0)
                        store_tile(up_value, ring_d_up_ptr, rows_here, part * STORE, I, BLOCK_M, STORE, SLICE, I % STORE != 0)
                        order_copy_engine(tile)
                        announce(gate_ready_ptr + tile)
                elif last == 1:  # half a tile
                    ticket, next_kind = tile_task(
                        kind, tile, part, expert, group, number, taken, lanes, list_ptr, total, half_d_y_desc, half_d_gate_up_desc,
                        down_kn_desc, gate_up_kn_desc, shared_d_y_desc, shared_d_gate_up_desc, shared_down_kn_desc, shared_gate_up_kn_desc,
                        saved_gate_ptr, saved_up_ptr, ring_d_gate_ptr, ring_d_up_ptr, snapped_d_gate_ptr, snapped_d_up_ptr, ring_h_ptr,
                        ring_weights_ptr, partial_ptr,
                        saved_shared_gate_ptr, saved_shared_up_ptr, shared_d_gate_ptr, shared_d_up_ptr, shared_h_ptr, shared_d_x_ptr,
                        d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                        d_gate_ready_ptr, group_ready_ptr, shared_ready_ptr, trace_ptr, up_first, shared_up_first, ring, tokens,
                        saved_tiles, shared_tiles, limit, shared_limit, H, I, 0, R, CLAMP, RECOMPUTE, NEED_WEIGHTS, HIDDENS,
                        BLOCK_M // 2, BLOCK_M, BLOCK_N, BLOCK_K, SLICE, MXFP8 & (D_XS > 0), TRACE,
                    )  # fmt: skip
                else:
                    ticket, next_kind = tile_task(
                        kind, tile, part, expert, group, number, taken, lanes, list_ptr, total, ring_d_y_desc, ring_d_gate_up_desc,
                        down_kn_desc, gate_up_kn_desc, shared_d_y_desc, shared_d_gate_up_desc, shared_down_kn_desc, shared_gate_up_kn_desc,
                        saved_gate_ptr, saved_up_ptr, ring_d_gate_ptr, ring_d_up_ptr, snapped_d_gate_ptr, snapped_d_up_ptr, ring_h_ptr,
                        ring_weights_ptr, partial_ptr,
                        saved_shared_gate_ptr, saved_shared_up_ptr, shared_d_gate_ptr, shared_d_up_ptr, shared_h_ptr, shared_d_x_ptr,
                        d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                        d_gate_ready_ptr, group_ready_ptr, shared_ready_ptr, trace_ptr, up_first, shared_up_first, ring, tokens,
                        saved_tiles, shared_tiles, limit, shared_limit, H, I, S, R, CLAMP, RECOMPUTE, NEED_WEIGHTS, HIDDENS,
                        BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K, SLICE, MXFP8 & (D_XS > 0), TRACE,
                    )  # fmt: skip
                if kind <= D_WEIGHT:
                    announce(group_done_ptr + group)
        if TRACE:
            note(trace_ptr, number, DONE)
        kind = tl.where(ok == 1, next_kind, END)
    if TRACE:
        note_end(trace_ptr)
