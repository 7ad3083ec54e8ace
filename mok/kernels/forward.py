"""The forward megakernel: dispatch, experts, and the pushes of combine, in one launch.

Every program takes the next task of one list (`tasks.py`) until none is left. Rows live in rings of `ring` tiles (x and h); tile t uses
place t mod ring. Signals, one counter per tile:
    x_ready: parts pulled;  h_ready: up tasks done (the place of x is then free);  h_free: down tasks that have read h (its place is free).

An expert's last tile may be half a tile: at most the first half of its rows are real. Its tasks then multiply and store that half only. The
other half of its h is never written, and never read: the down task reads through a descriptor of half a tile. A row's sums run over the
same steps in the same order, so its bits are those of a whole tile.

Legend: T tokens of this rank, H hidden, I intermediate, S width of the shared experts, K choices per token, R ranks, M padded rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.dispatch import pull_rows, pull_widened
from mok.kernels.experts import find_slots, multiply, push_to_slots, rounded_halves, store_hidden, store_rows
from mok.kernels.signals import (
    H_FREE,
    H_READY,
    X_FREE,
    X_READY,
    announce,
    finish_copy_engine_stores,
    order_copy_engine,
    wait_for,
)
from mok.kernels.tasks import DOWN, END, PULL, SHARED_DOWN, SHARED_UP, UP, find, of_lane_0, unpack
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end


@triton.jit
def needs(
    kind, tile, x_ready_ptr, h_ready_ptr, shared_h_ready_ptr,
    ring, PARTS: tl.constexpr, UPS: tl.constexpr, SHARED_UPS: tl.constexpr,
):  # fmt: skip
    """-> (signal, its least value, its name) of what a task reads, or a pull's place. The shared experts' x is always there."""
    signal = x_ready_ptr + tile
    least = 0
    what = X_READY
    if kind == UP:
        least = PARTS
    elif kind == DOWN:
        signal = h_ready_ptr + tile
        least = UPS
        what = H_READY
    elif kind == SHARED_DOWN:
        signal = shared_h_ready_ptr + tile
        least = SHARED_UPS
        what = H_READY
    elif (kind == PULL) & (tile >= ring):
        signal = h_ready_ptr + tile - ring
        least = UPS
        what = X_FREE
    return signal, least, what


@triton.jit
def wait_for_inputs(
    kind, tile, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, control_ptrs, rank, ring, wait_limit,
    R: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr,
):  # fmt: skip
    """What a task reads is there, and what it overwrites is no longer read. False: gave up."""
    signal, least, what = needs(kind, tile, x_ready_ptr, h_ready_ptr, shared_h_ready_ptr, ring, PARTS, UPS, SHARED_UPS)
    ok = wait_for(signal, least, control_ptrs, rank, tile, what, wait_limit, R)
    if (kind == UP) & (tile >= ring) & ok:  # the place of h, too
        ok = wait_for(h_free_ptr + tile - ring, DOWNS, control_ptrs, rank, tile, H_FREE, wait_limit, R)
    order_copy_engine(tile)
    return ok


@triton.jit
def expert_task(
    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
    x_desc, h_desc, store_h_desc, save_gate_desc, save_up_desc,
    gate_up_desc, down_desc, shared_x_desc, shared_h_desc, store_shared_h_desc, save_shared_gate_desc, save_shared_up_desc,
    shared_gate_up_desc, shared_down_desc, shared_out_ptr, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    h_ready_ptr, h_free_ptr, shared_h_ready_ptr, trace_ptr, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit,
    H: tl.constexpr, I: tl.constexpr, S: tl.constexpr, R: tl.constexpr,
    CLAMP: tl.constexpr, SHARED_CLAMP: tl.constexpr, SAVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MXFP8: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """An up or down task over the first ROWS rows of a tile. -> (the next ticket, its task)."""
    row = tile * BLOCK_M
    a_row = tl.where((kind == UP) | (kind == DOWN), ring_row, row)
    column = tl.minimum(part * (2 * BLOCK_N), H - 2 * BLOCK_N)  # the last pair may overlap its neighbour: the same bits twice
    if kind == UP:
        a_desc = x_desc
        b_desc = gate_up_desc
        b_row = expert * I + part * BLOCK_N
        depth = H
    else:
        a_desc = h_desc
        b_desc = down_desc
        b_row = expert * H + column
        depth = I
    if S > 0:
        if kind == SHARED_UP:
            a_desc = shared_x_desc
            b_desc = shared_gate_up_desc
            b_row = part * BLOCK_N
            depth = H
        elif kind == SHARED_DOWN:
            a_desc = shared_h_desc
            b_desc = shared_down_desc
            b_row = column
            depth = S
    total = multiply(a_desc, b_desc, a_row, b_row, depth, ROWS, BLOCK_N, BLOCK_K)
    following = find(tasks_ptr, taken, num_tasks, lanes)
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    if kind == UP:
        store_hidden(
            total, gate_first, store_h_desc, save_gate_desc, save_up_desc, ring_row, row, part * BLOCK_N, saved_rows,
            limit, I, ROWS, BLOCK_N, CLAMP, SAVE, ROWS < BLOCK_M, MXFP8,
        )  # fmt: skip
        finish_copy_engine_stores(tile)
        announce(h_ready_ptr + tile)
    elif kind == DOWN:
        source, slot = find_slots(peer_rank_ptr, peer_token_idx_ptr, row, ROWS)
        ab, ac = rounded_halves(total, ROWS, BLOCK_N)
        announce(h_free_ptr + tile)  # h has been read; and its barrier frees the accumulators' registers before the addresses need some
        push_to_slots(ab, combine_ptr, combine_ptrs, source, slot, column, H, R, BLOCK_N)
        push_to_slots(ac, combine_ptr, combine_ptrs, source, slot, column + BLOCK_N, H, R, BLOCK_N)
    elif S > 0:
        if kind == SHARED_UP:
            store_hidden(
                total, shared_gate_first, store_shared_h_desc, save_shared_gate_desc, save_shared_up_desc, row, row,
                part * BLOCK_N, tokens, shared_limit, S, ROWS, BLOCK_N, SHARED_CLAMP, SAVE, False, False,
            )  # fmt: skip
            finish_copy_engine_stores(tile)
            announce(shared_h_ready_ptr + tile)
        else:
            ab, ac = rounded_halves(total, ROWS, BLOCK_N)
            tl.debug_barrier()
            store_rows(ab, shared_out_ptr, row, tokens, column, H, ROWS, BLOCK_N)
            store_rows(ac, shared_out_ptr, row, tokens, column + BLOCK_N, H, ROWS, BLOCK_N)
    return following


@triton.jit(do_not_specialize=["rank", "max_tiles", "ring", "tokens", "saved_rows", "gate_first", "shared_gate_first", "wait_limit"])
def forward_kernel(
    x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, combine_ptr, combine_ptrs, control_ptrs,
    peer_rank_ptr, peer_token_idx_ptr, tasks_ptr,
    ring_ptr, ring_x_desc, ring_h_desc, store_h_desc, gate_up_desc, down_desc, save_gate_desc, save_up_desc,
    half_x_desc, half_h_desc, store_half_h_desc, save_half_gate_desc, save_half_up_desc,
    shared_x_desc, shared_h_desc, store_shared_h_desc, shared_gate_up_desc, shared_down_desc,
    save_shared_gate_desc, save_shared_up_desc, shared_out_ptr,
    signals_ptr, trace_ptr, rank, max_tiles, ring, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit, wait_limit,
    H: tl.constexpr, I: tl.constexpr, S: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CLAMP: tl.constexpr, SHARED_CLAMP: tl.constexpr, SAVE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, THREADS: tl.constexpr,
    MXFP8: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Take tasks until none is left. signals: the ticket counter, then the counters per tile (module text); zero at the start.

    MXFP8: x is E4M3 bytes and codes, and routed h is rounded to MXFP8; both rings, and the weights, hold its numbers as bf16.
    """
    UPS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    DOWNS: tl.constexpr = (H + 2 * BLOCK_N - 1) // (2 * BLOCK_N)
    SHARED_UPS: tl.constexpr = (S + BLOCK_N - 1) // BLOCK_N
    x_ready_ptr = signals_ptr + 32
    h_ready_ptr = x_ready_ptr + max_tiles
    h_free_ptr = h_ready_ptr + max_tiles
    shared_h_ready_ptr = h_free_ptr + max_tiles
    lanes = tl.arange(0, THREADS)
    num_tasks = tl.load(tasks_ptr).to(tl.int32)
    taken = tl.atomic_add(signals_ptr + lanes, 1, mask=lanes == 0, sem="relaxed", scope="gpu")
    task = of_lane_0(find(tasks_ptr, taken, num_tasks, lanes))
    ticket = of_lane_0(taken) if TRACE else 0
    if TRACE:
        note_begin(trace_ptr)
    while (task & 7) != END:
        # One lane takes the next ticket now; nobody looks at it before this task's products are there.
        taken = tl.atomic_add(signals_ptr + lanes, 1, mask=lanes == 0, sem="relaxed", scope="gpu")
        if TRACE:
            note(trace_ptr, ticket, BEGIN)
        kind, tile, part, expert, half = unpack(task)
        row = tile * BLOCK_M
        ring_row = (tile % ring) * BLOCK_M
        ok = wait_for_inputs(
            kind, tile, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, control_ptrs, rank, ring, wait_limit,
            R, PARTS, UPS, DOWNS, SHARED_UPS,
        )  # fmt: skip
        following = tl.where(lanes == 0, END, 0).to(tl.int64)
        if TRACE:
            note(trace_ptr, ticket, READY)
        if ok:
            if kind == PULL:
                ROWS: tl.constexpr = BLOCK_M // PARTS
                if MXFP8:
                    pull_widened(
                        x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row + part * ROWS,
                        ring_row + part * ROWS, H, K, R, ROWS, BLOCK_H,
                    )  # fmt: skip
                else:
                    pull_rows(
                        x_ptr, x_ptrs, ring_ptr, x_ptr, x_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row + part * ROWS,
                        ring_row + part * ROWS, H, K, R, False, ROWS, BLOCK_H,
                    )  # fmt: skip
                order_copy_engine(tile)
                announce(x_ready_ptr + tile)
                following = find(tasks_ptr, taken, num_tasks, lanes)
            elif half != 0:
                following = expert_task(
                    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
                    half_x_desc, half_h_desc, store_half_h_desc, save_half_gate_desc, save_half_up_desc,
                    gate_up_desc, down_desc, shared_x_desc, shared_h_desc, store_shared_h_desc, save_shared_gate_desc, save_shared_up_desc,
                    shared_gate_up_desc, shared_down_desc, shared_out_ptr, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    h_ready_ptr, h_free_ptr, shared_h_ready_ptr, trace_ptr, tokens, saved_rows, gate_first, shared_gate_first,
                    limit, shared_limit,
                    H, I, 0, R, CLAMP, SHARED_CLAMP, SAVE, BLOCK_M // 2, BLOCK_M, BLOCK_N, BLOCK_K, MXFP8, TRACE,
                )  # fmt: skip
            else:
                following = expert_task(
                    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
                    ring_x_desc, ring_h_desc, store_h_desc, save_gate_desc, save_up_desc,
                    gate_up_desc, down_desc, shared_x_desc, shared_h_desc, store_shared_h_desc, save_shared_gate_desc, save_shared_up_desc,
                    shared_gate_up_desc, shared_down_desc, shared_out_ptr, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    h_ready_ptr, h_free_ptr, shared_h_ready_ptr, trace_ptr, tokens, saved_rows, gate_first, shared_gate_first,
                    limit, shared_limit,
                    H, I, S, R, CLAMP, SHARED_CLAMP, SAVE, BLOCK_M, BLOCK_M, BLOCK_N, BLOCK_K, MXFP8, TRACE,
                )  # fmt: skip
        if TRACE:
            note(trace_ptr, ticket, DONE)
            ticket = of_lane_0(taken)
        task = of_lane_0(following)
    if TRACE:
        note_end(trace_ptr)
