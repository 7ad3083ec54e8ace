"""The forward megakernel in blockwise FP8: the tasks, signals and rings of `forward.py`, with E4M3 operands and power-of-two scales.

x has a scale per 128 columns of a row; it was quantized where it was published, and travels so. h is quantized by the up task, whose slice
of 128 columns is one block of it. A weight has a scale per 128 x 128. All scales are E8M0 codes; those of x and h lie in rings of their
own, [rows, columns / 128], where a tile's 128 rows take few enough lines to stay in the L1 cache for all steps of a product.

A step of a product is 128 deep, one block of every operand. The tensor cores add up its 128 products (Hopper's keep about 14 bits while
they do), and each step's sum is multiplied by the product of both scales and added in fp32. The scales are powers of two: nothing else is
rounded, but for numbers below 2^-126; and a product of scales of 2^128 or more is Inf.

A task makes two tiles of 128 columns (gate and up, or two of y) with one reading of x or h, because a single one would read more from the
L2 cache than it delivers. Their sums and one step's take 192 registers of a thread, so what a task needs before and after its loop is kept
in local memory meanwhile; the loop itself has no access to it.

Half tiles are as in `forward.py`. The shared experts, in bf16, have a launch of `forward_kernel` to themselves.

Legend: H hidden, I intermediate, K choices per token, R ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.dispatch import pull_rows, pull_scales
from mok.kernels.experts import find_slots, push_to_slots, rounded_pairs, swiglu, widened_pairs
from mok.kernels.forward import wait_for_inputs
from mok.kernels.quantize import e4m3_rows, e4m3_to_fp32, scale_of
from mok.kernels.signals import INTERPRETING, announce, finish_copy_engine_stores, order_copy_engine
from mok.kernels.tasks import END, PULL, UP, find, of_lane_0, unpack
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end


@triton.jit
def step_sum(a, b):
    """a b^T of E4M3 tiles [M, K] and [N, K], in fp32."""
    if INTERPRETING:  # it would multiply the bits
        total = tl.dot(e4m3_to_fp32(a).to(tl.float64), e4m3_to_fp32(b).to(tl.float64).T).to(tl.float32)
    else:
        total = tl.dot(a, b.T)
    return total


@triton.jit
def multiply_scaled(
    a_desc, first_desc, second_desc, a_scale_ptr, first_scale_ptr, second_scale_ptr, row, first_row, second_row, depth,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a times BLOCK rows of each of two weights, in fp32. a_scale_ptr: of its first row; the others: of their blocks' rows.

    Example, BLOCK 2: a [3, 1 | 2, 0], scales 1 and 4; a row of the weight [1, 2 | 1, 1], scales 1/2 and 1: 5 * 1/2 + 2 * 4 = 10.5.
    """
    first = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    scales = a_scale_ptr + tl.arange(0, BLOCK_M) * tl.cdiv(depth, BLOCK)
    code = tl.load(scales)
    first_code = tl.load(first_scale_ptr)
    second_code = tl.load(second_scale_ptr)
    for k in tl.range(0, depth, BLOCK):
        scale = scale_of(code)
        first_scale = scale * scale_of(first_code)
        second_scale = scale * scale_of(second_code)
        inside = k + BLOCK < depth  # the next step's are on their way during this one's products
        scales += 1
        first_scale_ptr += 1
        second_scale_ptr += 1
        code = tl.load(scales, mask=inside, other=0)
        first_code = tl.load(first_scale_ptr, mask=inside, other=0)
        second_code = tl.load(second_scale_ptr, mask=inside, other=0)
        a = a_desc.load([row, k])
        b = first_desc.load([first_row, k])
        c = second_desc.load([second_row, k])
        first += step_sum(a, b) * first_scale[:, None]
        second += step_sum(a, c) * second_scale[:, None]
    return first, second


@triton.jit
def store_quantized_hidden(
    gate, up, h_desc, h_scale_ptr, gate_desc, up_desc, ring_row, row, column, saved_rows, limit,
    I: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, CLAMP: tl.constexpr, SAVE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """h, rounded and quantized, into the ring and its scales where h_scale_ptr says; gate and up into the first saved_rows rows.

    HALF: as in `store_hidden`.
    """
    gate = rounded_pairs(gate)
    up = rounded_pairs(up)
    if SAVE:
        if row < saved_rows:
            gate_desc.store([row, column], gate)
            up_desc.store([row, column], up)
            if HALF:
                padding = tl.zeros((BLOCK_M, BLOCK), tl.bfloat16)
                gate_desc.store([row + BLOCK_M, column], padding)
                up_desc.store([row + BLOCK_M, column], padding)
    hidden = widened_pairs(rounded_pairs(swiglu(gate, up, limit, CLAMP)))
    if I % BLOCK != 0:  # columns of the next expert
        hidden = tl.where((column + tl.arange(0, BLOCK) < I)[None, :], hidden, 0.0)
    values, code = e4m3_rows(hidden)
    tl.store(h_scale_ptr + tl.arange(0, BLOCK_M) * ((I + BLOCK - 1) // BLOCK), code.to(tl.uint8))
    h_desc.store([ring_row, column], values)


@triton.jit
def expert_task_fp8(
    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
    ring_x_desc, ring_h_desc, x_scale_ptr, h_scale_ptr, gate_desc, up_desc, down_desc, gate_scale_ptr, up_scale_ptr, down_scale_ptr,
    save_gate_desc, save_up_desc, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    h_ready_ptr, h_free_ptr, trace_ptr, saved_rows, limit,
    H: tl.constexpr, I: tl.constexpr, R: tl.constexpr, CLAMP: tl.constexpr, SAVE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """An up or down task over the first ROWS rows of a tile. -> (the next ticket, its task)."""
    H_BLOCKS: tl.constexpr = (H + BLOCK - 1) // BLOCK
    I_BLOCKS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    row = tile * BLOCK_M
    column = part * (2 * BLOCK)
    if kind == UP:
        a_desc = ring_x_desc
        first_desc = gate_desc
        second_desc = up_desc
        a_scale = x_scale_ptr + ring_row.to(tl.int64) * H_BLOCKS
        first_scale = gate_scale_ptr + (expert * I_BLOCKS + part).to(tl.int64) * H_BLOCKS
        second_scale = up_scale_ptr + (expert * I_BLOCKS + part).to(tl.int64) * H_BLOCKS
        first_row = expert * I + part * BLOCK
        second_row = first_row
        depth = H
    else:
        a_desc = ring_h_desc
        first_desc = down_desc
        second_desc = down_desc
        a_scale = h_scale_ptr + ring_row.to(tl.int64) * I_BLOCKS
        first_scale = down_scale_ptr + (expert * H_BLOCKS + 2 * part).to(tl.int64) * I_BLOCKS
        second_scale = first_scale + tl.where(2 * part + 1 < H_BLOCKS, I_BLOCKS, 0)  # past H nothing is stored
        first_row = expert * H + column
        second_row = first_row + BLOCK
        depth = I
    first, second = multiply_scaled(
        a_desc, first_desc, second_desc, a_scale, first_scale, second_scale, ring_row, first_row, second_row, depth, ROWS, BLOCK
    )
    following = find(tasks_ptr, taken, num_tasks, lanes)
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    if kind == UP:
        store_quantized_hidden(
            first, second, ring_h_desc, h_scale_ptr + ring_row.to(tl.int64) * I_BLOCKS + part, save_gate_desc, save_up_desc,
            ring_row, row, part * BLOCK, saved_rows, limit, I, ROWS, BLOCK, CLAMP, SAVE, ROWS < BLOCK_M,
        )  # fmt: skip
        finish_copy_engine_stores(tile)
        announce(h_ready_ptr + tile)
    else:
        source, slot = find_slots(peer_rank_ptr, peer_token_idx_ptr, row, ROWS)
        ab = rounded_pairs(first)
        ac = rounded_pairs(second)
        announce(h_free_ptr + tile)  # h has been read; and its barrier frees the sums' registers before the addresses need some
        push_to_slots(ab, combine_ptr, combine_ptrs, source, slot, column, H, R, BLOCK)
        push_to_slots(ac, combine_ptr, combine_ptrs, source, slot, column + BLOCK, H, R, BLOCK)
    return following


@triton.jit(do_not_specialize=["rank", "max_tiles", "ring", "saved_rows", "wait_limit"])
def forward_fp8_kernel(
    x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, combine_ptr, combine_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, tasks_ptr,
    ring_ptr, ring_x_scale_ptr, ring_h_scale_ptr, ring_x_desc, ring_h_desc,
    gate_desc, up_desc, down_desc, gate_scale_ptr, up_scale_ptr, down_scale_ptr, save_gate_desc, save_up_desc,
    half_x_desc, half_h_desc, save_half_gate_desc, save_half_up_desc,
    signals_ptr, trace_ptr, rank, max_tiles, ring, saved_rows, limit, wait_limit,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, R: tl.constexpr, CLAMP: tl.constexpr, SAVE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, THREADS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """`forward_kernel` without shared experts. BLOCK: rows, columns and depth of a block of a weight.

    x and its ring are E4M3 rows, of which two bytes each are moved as one bf16.
    """
    UPS: tl.constexpr = (I + BLOCK - 1) // BLOCK
    DOWNS: tl.constexpr = (H + 2 * BLOCK - 1) // (2 * BLOCK)
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
        kind, tile, part, expert, half = unpack(task)
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
                    (H + BLOCK - 1) // BLOCK, K, R, ROWS,
                )  # fmt: skip
                order_copy_engine(tile)
                announce(x_ready_ptr + tile)
                following = find(tasks_ptr, taken, num_tasks, lanes)
            elif half != 0:
                following = expert_task_fp8(
                    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
                    half_x_desc, half_h_desc, ring_x_scale_ptr, ring_h_scale_ptr,
                    gate_desc, up_desc, down_desc, gate_scale_ptr, up_scale_ptr, down_scale_ptr,
                    save_half_gate_desc, save_half_up_desc, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    h_ready_ptr, h_free_ptr, trace_ptr, saved_rows, limit, H, I, R, CLAMP, SAVE, BLOCK_M // 2, BLOCK_M, BLOCK, TRACE,
                )  # fmt: skip
            else:
                following = expert_task_fp8(
                    kind, tile, part, expert, ring_row, ticket, taken, lanes, tasks_ptr, num_tasks,
                    ring_x_desc, ring_h_desc, ring_x_scale_ptr, ring_h_scale_ptr,
                    gate_desc, up_desc, down_desc, gate_scale_ptr, up_scale_ptr, down_scale_ptr,
                    save_gate_desc, save_up_desc, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    h_ready_ptr, h_free_ptr, trace_ptr, saved_rows, limit, H, I, R, CLAMP, SAVE, BLOCK_M, BLOCK_M, BLOCK, TRACE,
                )  # fmt: skip
        if TRACE:
            note(trace_ptr, ticket, DONE)
            ticket = of_lane_0(taken)
        task = of_lane_0(following)
    if TRACE:
        note_end(trace_ptr)
