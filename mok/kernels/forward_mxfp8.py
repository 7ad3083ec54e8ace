"""The forward megakernel in MXFP8 on tensor cores that multiply by scales: tasks, signals and rings of `forward.py`, with E4M3 operands.

x, h and the weights have a scale per 32 columns of a row, an E8M0 code. x was quantized where it was published, and travels so; h is
quantized by the up task. The codes of all of them lie in memory as Blackwell's tensor cores read them (`mok.quantize.to_tcgen05`), in tiles
of 128 rows and 4 codes, so that the copy engine brings both operands and both tiles of codes of a step, and the tensor cores' own memory
takes the codes from there. A ring's tile has its own tiles of codes; so has an expert's weight, which therefore begins at a whole tile.

A step of a product is 128 deep. On Hopper, `tl.dot_scaled` widens both operands to bf16 in registers, for every step: the same sums, slowly
(`launch_mxfp8` says what is used there instead).

There are no half tiles: a block-scaled product has 128 rows. The shared experts, in bf16, have a launch of `forward_kernel` to themselves.

Legend: H hidden, I intermediate, K choices per token, R ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.dispatch import pull_rows, pull_scales
from mok.kernels.experts import find_slots, in_order, push_to_slots, rounded_halves, rounded_pairs, swiglu, widened_pairs
from mok.kernels.forward import wait_for_inputs
from mok.kernels.quantize import e4m3_to_fp32, quantize_tile, scale_of
from mok.kernels.signals import INTERPRETING, announce, finish_copy_engine_stores, order_copy_engine
from mok.kernels.tasks import END, PULL, UP, find, of_lane_0, unpack
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end

CODES = tl.constexpr(4)  # codes of a row in a tile of codes
CODE_TILE = tl.constexpr(512)  # bytes of a tile of codes: 128 rows


@triton.jit
def dequantized(values, codes):
    """E4M3 [M, K] with codes [M, K / 32] -> fp64, for the interpreter."""
    M: tl.constexpr = values.shape[0]
    K: tl.constexpr = values.shape[1]
    blocks = tl.reshape(e4m3_to_fp32(values).to(tl.float64), (M, K // 32, 32))
    return tl.reshape(blocks * tl.expand_dims(scale_of(codes).to(tl.float64), 2), (M, K))


@triton.jit
def scaled_dot(a, a_codes, b, b_codes, total):
    """total + a b^T of E4M3 tiles [M, K] and [N, K] with codes [M, K / 32] and [N, K / 32]."""
    if INTERPRETING:
        total = total + tl.dot(dequantized(a, a_codes), dequantized(b, b_codes).T).to(tl.float32)
    else:
        total = tl.dot_scaled(a, a_codes, "e4m3", b.T, b_codes, "e4m3", total)
    return total


@triton.jit
def rows_of_codes(tiles, ROWS: tl.constexpr):
    """Tiles of codes as they lie in memory -> [ROWS, 4]. Example: byte 22 of a tile is code 2 of row 33.

    In these steps, and the tile 128 bytes twice, Triton sees that the tensor cores' memory may take it as it is.
    """
    return tl.reshape(tl.permute(tl.reshape(tiles, (ROWS // 128, 1, 32, 4, CODES)), (0, 3, 2, 1, 4)), (ROWS, CODES))


@triton.jit
def multiply_scaled(
    a_desc, a_scale_desc, b_desc, b_scale_desc, a_row, b_row, b_tile, depth, BLOCK: tl.constexpr
):  # fmt: skip
    """a b^T in fp32 for the BLOCK rows of a from a_row on and both BLOCK rows of a pair, as one product. b_tile: b_row's tile of codes."""
    total = tl.zeros((BLOCK, 2 * BLOCK), tl.float32)
    for k in tl.range(0, depth, BLOCK):
        a_codes = rows_of_codes(a_scale_desc.load([0, a_row // BLOCK, k // BLOCK, 0, 0]), BLOCK)
        b_codes = rows_of_codes(b_scale_desc.load([0, b_tile, k // BLOCK, 0, 0]), 2 * BLOCK)
        a = a_desc.load([a_row, k])
        b = b_desc.load([0, b_row, k]).reshape(2 * BLOCK, BLOCK)
        total = scaled_dot(a, a_codes, b, b_codes, total)
    return total


@triton.jit
def store_quantized_hidden(
    total, gate_first, h_desc, h_scale_ptr, gate_desc, up_desc, ring_row, row, column, saved_rows, limit,
    I: tl.constexpr, BLOCK: tl.constexpr, CLAMP: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """h, rounded and quantized, into the ring, its codes into the tile at h_scale_ptr; gate and up into the first saved_rows rows."""
    first, second = rounded_halves(total, BLOCK, BLOCK)
    gate, up = in_order(first, second, gate_first)
    if SAVE:
        if row < saved_rows:
            gate_desc.store([row, column], gate)
            up_desc.store([row, column], up)
    hidden = widened_pairs(rounded_pairs(swiglu(gate, up, limit, CLAMP)))
    if I % BLOCK != 0:  # columns of the next expert
        hidden = tl.where((column + tl.arange(0, BLOCK) < I)[None, :], hidden, 0.0)
    values, codes = quantize_tile(hidden, 1, 32)
    r = tl.arange(0, BLOCK)
    tl.store(h_scale_ptr + (r % 32 * 16 + r // 32 * CODES)[:, None] + tl.arange(0, CODES)[None, :], codes)
    h_desc.store([ring_row, column], values.to(tl.float8e4nv, bitcast=True))


@triton.jit
def expert_task_mxfp8(
    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
    ring_x_desc, ring_h_desc, x_scale_desc, h_scale_desc, h_scale_ptr, gate_up_desc, down_desc, gate_up_scale_desc, down_scale_desc,
    save_gate_desc, save_up_desc, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    h_ready_ptr, h_free_ptr, trace_ptr, saved_rows, gate_first, limit,
    H: tl.constexpr, I: tl.constexpr, R: tl.constexpr, CLAMP: tl.constexpr, SAVE: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """An up or down task. -> (the next ticket, its task)."""
    H_TILES: tl.constexpr = max((H + BLOCK - 1) // BLOCK, 2)  # rows of a down matrix are filled up to whole tiles, and to a pair of them
    I_TILES: tl.constexpr = (I + BLOCK - 1) // BLOCK
    row = tile * BLOCK
    down_tile = tl.minimum(2 * part, H_TILES - 2)  # the last pair may overlap its neighbour: the same bits twice
    column = down_tile * BLOCK
    if kind == UP:
        a_desc = ring_x_desc
        a_scale_desc = x_scale_desc
        b_desc = gate_up_desc
        b_scale_desc = gate_up_scale_desc
        b_row = expert * I + part * BLOCK
        b_tile = expert * I_TILES + part
        depth = H
    else:
        a_desc = ring_h_desc
        a_scale_desc = h_scale_desc
        b_desc = down_desc
        b_scale_desc = down_scale_desc
        b_tile = expert * H_TILES + down_tile
        b_row = b_tile * BLOCK
        depth = I
    total = multiply_scaled(a_desc, a_scale_desc, b_desc, b_scale_desc, ring_row, b_row, b_tile, depth, BLOCK)
    following = find(tasks_ptr, taken, num_tasks, lanes)
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    if kind == UP:
        codes_ptr = h_scale_ptr + (ring_row // BLOCK * I_TILES + part).to(tl.int64) * CODE_TILE
        store_quantized_hidden(
            total, gate_first, ring_h_desc, codes_ptr, save_gate_desc, save_up_desc, ring_row, row, part * BLOCK, saved_rows, limit,
            I, BLOCK, CLAMP, SAVE,
        )  # fmt: skip
        finish_copy_engine_stores(tile)
        announce(h_ready_ptr + tile)
    else:
        source, slot = find_slots(peer_rank_ptr, peer_token_idx_ptr, row, BLOCK)
        ab, ac = rounded_halves(total, BLOCK, BLOCK)
        announce(h_free_ptr + tile)  # h has been read; and its barrier frees the sums' registers before the addresses need some
        push_to_slots(ab, combine_ptr, combine_ptrs, source, slot, column, H, R, BLOCK)
        push_to_slots(ac, combine_ptr, combine_ptrs, source, slot, column + BLOCK, H, R, BLOCK)
    return following


@triton.jit(do_not_specialize=["rank", "max_tiles", "ring", "saved_rows", "gate_first", "wait_limit"])
def forward_mxfp8_kernel(
    x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, combine_ptr, combine_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, tasks_ptr,
    ring_ptr, ring_x_scale_ptr, ring_h_scale_ptr, ring_x_desc, ring_h_desc, x_scale_desc, h_scale_desc,
    gate_up_desc, down_desc, gate_up_scale_desc, down_scale_desc, save_gate_desc, save_up_desc,
    signals_ptr, trace_ptr, rank, max_tiles, ring, saved_rows, gate_first, limit, wait_limit,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CLAMP: tl.constexpr, SAVE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, THREADS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """`forward_kernel` without shared experts. BLOCK_M: 128, rows of a tile, columns and depth of its products.

    x and its ring are E4M3 rows, of which two bytes each are moved as one bf16.
    """
    UPS: tl.constexpr = (I + BLOCK_M - 1) // BLOCK_M
    DOWNS: tl.constexpr = (H + 2 * BLOCK_M - 1) // (2 * BLOCK_M)
    x_ready_ptr = signals_ptr + 32
    h_ready_ptr = x_ready_ptr + max_tiles
    h_free_ptr = h_ready_ptr + max_tiles
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
        kind, tile, part, expert, _ = unpack(task)
        ring_row = (tile % ring) * BLOCK_M
        ok = wait_for_inputs(
            kind, tile, x_ready_ptr, h_ready_ptr, h_free_ptr, h_ready_ptr, control_ptrs, rank, ring, wait_limit, R, PARTS, UPS, DOWNS, 0
        )
        following = tl.where(lanes == 0, END, 0).to(tl.int64)
        if TRACE:
            note(trace_ptr, ticket, READY)
        if ok:
            if kind == PULL:
                ROWS: tl.constexpr = BLOCK_M // PARTS
                row = tile * BLOCK_M + part * ROWS
                ring_row += part * ROWS
                pull_rows(
                    x_ptr, x_ptrs, ring_ptr, x_ptr, x_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
                    H // 2, K, R, False, ROWS, BLOCK_H,
                )  # fmt: skip
                pull_scales(
                    x_scale_ptr, x_scale_ptrs, ring_x_scale_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
                    (H + 31) // 32, K, R, ROWS, True,
                )  # fmt: skip
                order_copy_engine(tile)
                announce(x_ready_ptr + tile)
                following = find(tasks_ptr, taken, num_tasks, lanes)
            else:
                following = expert_task_mxfp8(
                    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
                    ring_x_desc, ring_h_desc, x_scale_desc, h_scale_desc, ring_h_scale_ptr,
                    gate_up_desc, down_desc, gate_up_scale_desc, down_scale_desc, save_gate_desc, save_up_desc,
                    combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    h_ready_ptr, h_free_ptr, trace_ptr, saved_rows, gate_first, limit, H, I, R, CLAMP, SAVE, BLOCK_M, TRACE,
                )  # fmt: skip
        if TRACE:
            note(trace_ptr, ticket, DONE)
            ticket = of_lane_0(taken)
        task = of_lane_0(following)
    if TRACE:
        note_end(trace_ptr)
