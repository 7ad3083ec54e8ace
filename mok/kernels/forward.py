"""The forward megakernel: dispatch, experts, and the pushes of combine, in one launch.

All work is one list of tasks in a fixed order, and every program takes the next ticket until none is left. A task waits only for tasks of
earlier tickets, so the kernel ends however few programs are resident, and nobody idles while there is work. The order:

    pull minibatch 0 | up of the shared experts | block 0 | block 1 | ...
    block b: up of minibatch b, then down of minibatch b - 1 (block 0: down of the shared experts); the pulls of minibatch b + 1 are
             spread over the first part of the block.

A down task thus starts when the up tasks it reads have had the time of a whole minibatch to finish. Within a minibatch the row tile runs
fastest, so that programs working at the same time share the tile of weights in the L2 cache.

Rows live in rings of RING tiles (x and h); tile t uses place t mod RING. Signals, one counter per tile:
    x_ready: parts pulled;  h_ready: up tasks done (the place of x is then free);  h_free: down tasks done (the place of h is then free).

Example, 3 tiles, 2 per minibatch, 1 part, 1 up and 1 down task per tile, no shared expert (P pull, U up, D down, - nothing to do):
    P0 P1 | P2 - U0 U1 | U2 D0 D1 | D2

Legend: T tokens of this rank, H hidden, I intermediate, S width of the shared experts, K choices per token, R ranks, M padded rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.dispatch import pull_rows
from mok.kernels.experts import multiply, push_rows, store_hidden, store_rows
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

# Kinds of tasks.
NOTHING = tl.constexpr(0)
PULL = tl.constexpr(1)
UP = tl.constexpr(2)
DOWN = tl.constexpr(3)
SHARED_UP = tl.constexpr(4)
SHARED_DOWN = tl.constexpr(5)


@triton.jit
def count_tickets(num_tiles, shared_tiles, TILES: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr):
    """How many tickets there are; see the order above. TILES per minibatch; PARTS, UPS, DOWNS per tile; SHARED_UPS per shared tile."""
    first = tl.minimum(num_tiles, TILES)
    minibatches = tl.cdiv(num_tiles, TILES)
    last = num_tiles - tl.maximum(minibatches - 1, 0) * TILES
    shared = shared_tiles * (SHARED_UPS + DOWNS)
    one = first * (PARTS + UPS + DOWNS)
    many = TILES * (PARTS + UPS) + TILES * PARTS + (minibatches - 2) * TILES * (PARTS + UPS + DOWNS) + last * (UPS + DOWNS) + TILES * DOWNS
    return shared + tl.where(minibatches > 1, many, one)


@triton.jit
def decode_block(q, num_tiles, shared_tiles, TILES: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr):
    """q, counted from the start of block 0 -> (block, q within it). Blocks 1 .. minibatches - 2 have the same number of tickets."""
    minibatches = tl.cdiv(num_tiles, TILES)
    first = tl.minimum(num_tiles, TILES)
    last = num_tiles - tl.maximum(minibatches - 1, 0) * TILES
    size = first * UPS + shared_tiles * DOWNS + tl.where(minibatches > 1, TILES * PARTS, 0)
    block = 0
    if q >= size:
        q -= size
        full: tl.constexpr = TILES * (PARTS + UPS + DOWNS)
        block = tl.minimum(1 + q // full, tl.maximum(minibatches - 1, 1))
        q -= (block - 1) * full
        size = last * UPS + TILES * DOWNS
        if (minibatches > 1) & (block == minibatches - 1) & (q >= size):
            q -= size
            block += 1
    return block, q


@triton.jit
def decode_ticket(
    ticket, num_tiles, shared_tiles, TILES: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr
):  # fmt: skip
    """ticket -> (kind, tile, part): which tile, and which part (PULL), slice of I (UP) or pair of slices of H (DOWN) of it."""
    kind = NOTHING
    tile = 0
    part = 0
    pulls = tl.minimum(num_tiles, TILES) * PARTS
    q = ticket - pulls
    if q < 0:
        kind = PULL
        tile = ticket // PARTS
        part = ticket % PARTS
    elif q < shared_tiles * SHARED_UPS:
        kind = SHARED_UP
        tile = q % shared_tiles
        part = q // shared_tiles
    else:
        block, q = decode_block(q - shared_tiles * SHARED_UPS, num_tiles, shared_tiles, TILES, PARTS, UPS, DOWNS)
        tiles = tl.minimum(TILES, tl.maximum(num_tiles - block * TILES, 0))
        before = tl.where(block == 0, shared_tiles, tl.minimum(TILES, num_tiles - (block - 1) * TILES))
        pulls = tl.where((block + 1) * TILES < num_tiles, TILES * PARTS, 0)
        step = (tiles * UPS + before * DOWNS) * 3 // (4 * tl.maximum(pulls, 1)) + 1
        pull = q // step
        compute = q - tl.minimum(pull + 1, pulls)
        if (pull < pulls) & (q % step == 0):
            tile = (block + 1) * TILES + pull // PARTS
            part = pull % PARTS
            kind = tl.where(tile < num_tiles, PULL, NOTHING)
        elif compute < tiles * UPS:
            kind = UP
            tile = block * TILES + compute % tiles
            part = compute // tiles
        else:
            compute -= tiles * UPS
            kind = tl.where(block == 0, SHARED_DOWN, DOWN)
            tile = tl.where(block == 0, 0, (block - 1) * TILES) + compute % before
            part = compute // before
    return kind, tile, part


@triton.jit
def pull_task(
    tile, part, x_ptr, x_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, ring_ptr, x_ready_ptr, h_ready_ptr, wait_limit,
    rank, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, RING: tl.constexpr, UPS: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Pull one part of a tile's rows into the ring, once the up tasks of the tile that had its place are done."""
    ok = 1
    if tile >= RING:
        ok = wait_for(h_ready_ptr + tile - RING, UPS, control_ptrs, rank, tile, X_FREE, wait_limit, R).to(tl.int32)
    if ok == 1:
        ROWS: tl.constexpr = BLOCK_M // PARTS
        row = tile * BLOCK_M + part * ROWS
        ring_row = (tile % RING) * BLOCK_M + part * ROWS
        pull_rows(x_ptr, x_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row, H, K, R, ROWS, BLOCK_H)
        order_copy_engine(tile)
        announce(x_ready_ptr + tile)
    return ok


@triton.jit
def wait_for_inputs(
    kind, tile, control_ptrs, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, wait_limit,
    rank, R: tl.constexpr, RING: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr,
):  # fmt: skip
    """What the multiplication of a task reads is there, and the place it writes is free. The shared experts' x is there from the start."""
    ok = 1
    if kind == UP:
        ok = wait_for(x_ready_ptr + tile, PARTS, control_ptrs, rank, tile, X_READY, wait_limit, R).to(tl.int32)
        if (tile >= RING) & (ok == 1):
            ok = wait_for(h_free_ptr + tile - RING, DOWNS, control_ptrs, rank, tile, H_FREE, wait_limit, R).to(tl.int32)
    elif kind == DOWN:
        ok = wait_for(h_ready_ptr + tile, UPS, control_ptrs, rank, tile, H_READY, wait_limit, R).to(tl.int32)
    elif kind == SHARED_DOWN:
        ok = wait_for(shared_h_ready_ptr + tile, SHARED_UPS, control_ptrs, rank, tile, H_READY, wait_limit, R).to(tl.int32)
    order_copy_engine(tile)
    return ok


@triton.jit(do_not_specialize=["rank", "max_tiles", "tokens", "saved_rows", "wait_limit"])
def forward_kernel(
    x_ptr, x_ptrs, combine_ptr, combine_ptrs, control_ptrs,
    peer_rank_ptr, peer_token_idx_ptr, tile_expert_ptr, num_tokens_ptr,
    ring_ptr, ring_x_desc, ring_h_desc, store_h_desc, gate_desc, up_desc, down_desc, save_gate_desc, save_up_desc,
    shared_x_desc, shared_h_desc, store_shared_h_desc, shared_gate_desc, shared_up_desc, shared_down_desc,
    save_shared_gate_desc, save_shared_up_desc, shared_out_ptr,
    signals_ptr, rank, max_tiles, tokens, saved_rows, limit, shared_limit, wait_limit,
    H: tl.constexpr, I: tl.constexpr, S: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    CLAMP: tl.constexpr, SHARED_CLAMP: tl.constexpr, SAVE: tl.constexpr, RING: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Take tickets until none is left. signals: the ticket counter, then the counters per tile (module text); zero at the start."""
    UPS: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    DOWNS: tl.constexpr = (H + 2 * BLOCK_N - 1) // (2 * BLOCK_N)
    SHARED_UPS: tl.constexpr = (S + BLOCK_N - 1) // BLOCK_N
    x_ready_ptr = signals_ptr + 32
    h_ready_ptr = x_ready_ptr + max_tiles
    h_free_ptr = h_ready_ptr + max_tiles
    shared_h_ready_ptr = h_free_ptr + max_tiles
    num_tiles = tl.load(num_tokens_ptr) // BLOCK_M
    shared_tiles = tl.cdiv(tokens, BLOCK_M) if S > 0 else 0
    total = count_tickets(num_tiles, shared_tiles, TILES, PARTS, UPS, DOWNS, SHARED_UPS)
    lanes = tl.arange(0, THREADS)
    ticket = tl.atomic_add(signals_ptr, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        # One lane takes the next ticket now; nobody looks at it before this task is done.
        taken = tl.atomic_add(signals_ptr + lanes, 1, mask=lanes == 0, sem="relaxed", scope="gpu")
        kind, tile, part = decode_ticket(ticket, num_tiles, shared_tiles, TILES, PARTS, UPS, DOWNS, SHARED_UPS)
        ok = 1
        if kind == PULL:
            ok = pull_task(
                tile, part, x_ptr, x_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, ring_ptr, x_ready_ptr, h_ready_ptr, wait_limit,
                rank, H, K, R, RING, UPS, BLOCK_M, PARTS, BLOCK_H,
            )  # fmt: skip
        elif kind != NOTHING:
            ring_row = (tile % RING) * BLOCK_M
            expert = 0
            if (kind == UP) | (kind == DOWN):
                expert = tl.load(tile_expert_ptr + tile)
            ok = wait_for_inputs(
                kind, tile, control_ptrs, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, wait_limit,
                rank, R, RING, PARTS, UPS, DOWNS, SHARED_UPS,
            )  # fmt: skip
            if ok == 1:
                if kind == UP:
                    a_desc = ring_x_desc
                    b_desc = gate_desc
                    c_desc = up_desc
                    a_row = ring_row
                    b_row = expert * I + part * BLOCK_N
                    c_row = b_row
                    depth = H
                elif kind == DOWN:
                    a_desc = ring_h_desc
                    b_desc = down_desc
                    c_desc = down_desc
                    a_row = ring_row
                    b_row = expert * H + part * (2 * BLOCK_N)
                    c_row = b_row + BLOCK_N
                    depth = I
                elif kind == SHARED_UP:
                    a_desc = shared_x_desc
                    b_desc = shared_gate_desc
                    c_desc = shared_up_desc
                    a_row = tile * BLOCK_M
                    b_row = part * BLOCK_N
                    c_row = b_row
                    depth = H
                else:
                    a_desc = shared_h_desc
                    b_desc = shared_down_desc
                    c_desc = shared_down_desc
                    a_row = tile * BLOCK_M
                    b_row = part * (2 * BLOCK_N)
                    c_row = b_row + BLOCK_N
                    depth = S
                ab, ac = multiply(a_desc, b_desc, c_desc, a_row, b_row, c_row, depth, BLOCK_M, BLOCK_N, BLOCK_K)
                row = tile * BLOCK_M
                column = part * (2 * BLOCK_N)
                if kind == UP:
                    store_hidden(
                        ab, ac, store_h_desc, save_gate_desc, save_up_desc, ring_row, row, part * BLOCK_N, saved_rows, limit, CLAMP, SAVE
                    )
                    finish_copy_engine_stores(tile)
                    announce(h_ready_ptr + tile)
                elif kind == DOWN:
                    push_rows(
                        ab, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr, row, column, H, R, BLOCK_M, BLOCK_N
                    )
                    push_rows(
                        ac, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr, row, column + BLOCK_N, H, R, BLOCK_M, BLOCK_N
                    )
                    announce(h_free_ptr + tile)
                elif kind == SHARED_UP:
                    store_hidden(
                        ab, ac, store_shared_h_desc, save_shared_gate_desc, save_shared_up_desc, row, row, part * BLOCK_N, tokens,
                        shared_limit, SHARED_CLAMP, SAVE,
                    )  # fmt: skip
                    finish_copy_engine_stores(tile)
                    announce(shared_h_ready_ptr + tile)
                else:
                    store_rows(ab, shared_out_ptr, row, tokens, column, H, BLOCK_M, BLOCK_N)
                    store_rows(ac, shared_out_ptr, row, tokens, column + BLOCK_N, H, BLOCK_M, BLOCK_N)
        following = tl.sum(tl.where(lanes == 0, taken, 0), axis=0)
        ticket = tl.where(ok == 1, following, total)
