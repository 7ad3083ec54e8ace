"""The forward kernel of `forward_fp8.py` for Hopper (sm_90), in Gluon, with the ring of loads of `forward_hopper.py`.

A step is 128 columns deep: E4M3 values of 128 rows and of 128 rows of either weight, 48 KB as in bf16. Both products of a step are waited
for within it, because their sums are multiplied by the step's scales; so the step's own stage is free at its end, and loads run all
STAGES steps ahead.

Legend: H hidden, I intermediate, K choices per token, R ranks.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from mok.kernels.dispatch import find_tokens
from mok.kernels.experts import rounded_pairs, swiglu, widened_pairs
from mok.kernels.forward import wait_for_inputs
from mok.kernels.forward_hopper import (
    LANES,
    PUSHED,
    ROWS_IN_SHARED,
    STAGES,
    THREADS,
    TILE,
    answer,
    ask,
    copy_in,
    copy_out,
    find_slots,
    of_lane_0,
    pull_rows,
    push_to_slots,
    reinterpret,
    store_tile,
    thread_barrier,
    with_layouts,
)
from mok.kernels.quantize import e4m3_rows, scale_of
from mok.kernels.signals import announce, finish_copy_engine_stores, order_copy_engine
from mok.kernels.tasks import DOWN, END, NOTHING, PULL, UP, find, unpack
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end

BYTES_IN_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
WHOLE_SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 32]))
HALF_SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 32]))
CODES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))


@gluon.jit
def operands(
    kind, tile, part, expert, ring, x_desc, h_desc, gate_desc, up_desc, down_desc, H: gl.constexpr, I: gl.constexpr
):  # fmt: skip
    """-> (descriptors of rows and of both weights, first row of each, steps) of an up or down task."""
    a_desc = h_desc
    first_desc = down_desc
    second_desc = down_desc
    first_row = expert * H + part * (2 * TILE)
    second_row = first_row + TILE
    steps = (I + TILE - 1) // TILE
    if kind == UP:
        a_desc = x_desc
        first_desc = gate_desc
        second_desc = up_desc
        first_row = expert * I + part * TILE
        second_row = first_row
        steps = (H + TILE - 1) // TILE
    return a_desc, first_desc, second_desc, (tile % ring) * TILE, first_row, second_row, steps


@gluon.jit
def begin_load(
    a_desc, first_desc, second_desc, a_row, first_row, second_row, i, q, a_stages, first_stages, second_stages, barriers, ROWS: gl.constexpr
):  # fmt: skip
    """Begin the load of a task's step i, of its tile's first ROWS rows, into the stage of step q."""
    BYTES: gl.constexpr = (ROWS + 2 * TILE) * TILE
    stage = q & (STAGES - 1)
    barrier = barriers.index(stage)
    a = a_stages.index(stage)
    mbarrier.expect(barrier, BYTES)
    copy_in(a_desc, [a_row, i * TILE], barrier, a.slice(0, TILE // 2))
    if ROWS == TILE:
        copy_in(a_desc, [a_row + TILE // 2, i * TILE], barrier, a.slice(TILE // 2, TILE // 2))
    copy_in(first_desc, [first_row, i * TILE], barrier, first_stages.index(stage))
    copy_in(second_desc, [second_row, i * TILE], barrier, second_stages.index(stage))


@gluon.jit
def step(
    first, second, code, first_code, second_code, scales, first_scale_ptr, second_scale_ptr, i, steps, q,
    a_stages, first_stages, second_stages, barriers, ROWS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Add a task's step i, at step q, with its codes; and load the next step's codes. At its end every warp has read the stage."""
    scale = scale_of(code)
    first_scale = scale * scale_of(first_code)
    second_scale = scale * scale_of(second_code)
    inside = i + 1 < steps
    code = gl.load(scales + (i + 1), mask=(code >= 0) & inside, other=0)
    at = gl.where(inside, i + 1, i)
    first_code = gl.load(first_scale_ptr + at)
    second_code = gl.load(second_scale_ptr + at)
    stage = q & (STAGES - 1)
    mbarrier.wait(barriers.index(stage), (q // STAGES) & 1)
    a = a_stages.index(stage).slice(0, ROWS)
    none = gl.zeros([ROWS, TILE], gl.float32, SUMS)
    one = warpgroup_mma(a, first_stages.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
    one = warpgroup_mma_wait(0, deps=[one])
    # Its sums are added up before the other product is begun, or there are not registers enough: a wait for nothing holds them there.
    first = warpgroup_mma_wait(0, deps=[first + one * first_scale[:, None]])
    other = warpgroup_mma(a, second_stages.index(stage).permute([1, 0]), none, use_acc=False, is_async=True)
    other = warpgroup_mma_wait(0, deps=[other])
    second = warpgroup_mma_wait(0, deps=[second + other * second_scale[:, None]])
    thread_barrier()
    return first, second, code, first_code, second_code


@gluon.jit
def store_quantized_hidden(
    gate, up, h_desc, h_scale_ptr, gate_desc, up_desc, ring_row, row, column, saved_rows, limit, staging,
    I: gl.constexpr, CLAMP: gl.constexpr, SAVE: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """`forward_fp8.store_quantized_hidden`. h's store is not finished."""
    gate = rounded_pairs(gate)
    up = rounded_pairs(up)
    if SAVE:
        if row < saved_rows:
            store_tile(gate, gate_desc, row, column, staging, ROWS)
            tma.store_wait(0)
            store_tile(up, up_desc, row, column, staging, ROWS)
            tma.store_wait(0)
            if ROWS < TILE:
                padding = gl.full([ROWS, TILE], 0, gl.bfloat16, PUSHED)
                store_tile(padding, gate_desc, row + ROWS, column, staging, ROWS)
                copy_out(up_desc, [row + ROWS, column], staging.slice(0, ROWS))
                tma.store_wait(0)
    hidden = widened_pairs(rounded_pairs(swiglu(gate, up, limit, CLAMP)))
    if I % TILE != 0:  # columns of the next expert
        hidden = gl.where((column + gl.arange(0, TILE, gl.SliceLayout(0, SUMS)) < I)[None, :], hidden, 0.0)
    values, code = e4m3_rows(hidden)
    gl.store(h_scale_ptr + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)) * ((I + TILE - 1) // TILE), code.to(gl.uint8))
    store_tile(values, h_desc, ring_row, column, reinterpret(staging, gl.float8e4nv, [2 * TILE, TILE], BYTES_IN_SHARED), ROWS)


@gluon.jit
def by_rows(y, staging, ROWS: gl.constexpr):
    """A bf16 tile in the layout of pushes."""
    place = staging.slice(0, ROWS)
    thread_barrier()
    place.store(y)
    thread_barrier()
    return place.load(PUSHED)


@gluon.jit
def pull_scales(
    scale_ptr, scale_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
    BLOCKS: gl.constexpr, K: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """`dispatch.pull_scales`, with layouts."""
    WIDE: gl.constexpr = triton.next_power_of_2(BLOCKS)
    lanes = gl.arange(0, ROWS, gl.SliceLayout(1, CODES))
    source = gl.load(peer_rank_ptr + row + lanes)
    slot = gl.load(peer_token_idx_ptr + row + lanes)
    tokens = find_tokens(scale_ptr, scale_ptrs, source, slot, BLOCKS, K, R)
    blocks = gl.arange(0, WIDE, gl.SliceLayout(0, CODES))[None, :]
    codes = gl.load(tokens[:, None] + blocks, mask=(source >= 0)[:, None] & (blocks < BLOCKS), other=0)
    to = (ring_row + lanes).to(gl.int64)[:, None] * BLOCKS + blocks
    gl.store(ring_ptr + to, codes, mask=(lanes >= 0)[:, None] & (blocks < BLOCKS))


@gluon.jit
def expert_task_fp8(
    kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, tasks_ptr, num_tasks,
    x_desc, h_desc, gate_desc, up_desc, down_desc, x_scale_ptr, h_scale_ptr, gate_scale_ptr, up_scale_ptr, down_scale_ptr,
    store_h_desc, save_gate_desc, save_up_desc, a_stages, first_stages, second_stages, staging, barriers,
    combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr, x_ready_ptr, h_ready_ptr, h_free_ptr, trace_ptr,
    ring, max_tiles, saved_rows, limit,
    H: gl.constexpr, I: gl.constexpr, R: gl.constexpr, CLAMP: gl.constexpr, SAVE: gl.constexpr, PARTS: gl.constexpr,
    UPS: gl.constexpr, DOWNS: gl.constexpr, ROWS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """`forward_hopper.expert_task`."""
    SUMS: gl.constexpr = WHOLE_SUMS if ROWS == TILE else HALF_SUMS
    H_BLOCKS: gl.constexpr = (H + TILE - 1) // TILE
    I_BLOCKS: gl.constexpr = (I + TILE - 1) // TILE
    row = tile * TILE
    column = part * (2 * TILE)
    a_desc, first_desc, second_desc, a_row, first_row, second_row, steps = operands(
        kind, tile, part, expert, ring, x_desc, h_desc, gate_desc, up_desc, down_desc, H, I
    )
    if loaded == 0:
        for i in gl.static_range(STAGES):
            begin_load(
                a_desc, first_desc, second_desc, a_row, first_row, second_row, i, q + i,
                a_stages, first_stages, second_stages, barriers, ROWS,
            )  # fmt: skip
    if kind == UP:
        a_scale = x_scale_ptr + a_row.to(gl.int64) * H_BLOCKS
        first_scale = gate_scale_ptr + (expert * I_BLOCKS + part).to(gl.int64) * H_BLOCKS
        second_scale = up_scale_ptr + (expert * I_BLOCKS + part).to(gl.int64) * H_BLOCKS
    else:
        a_scale = h_scale_ptr + a_row.to(gl.int64) * I_BLOCKS
        first_scale = down_scale_ptr + (expert * H_BLOCKS + 2 * part).to(gl.int64) * I_BLOCKS
        second_scale = first_scale + gl.where(2 * part + 1 < H_BLOCKS, I_BLOCKS, 0)  # past H nothing is stored
    scales = a_scale + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)) * steps
    code = gl.load(scales)
    first_code = gl.load(first_scale)
    second_code = gl.load(second_scale)
    first = gl.zeros([ROWS, TILE], gl.float32, SUMS)
    second = gl.zeros([ROWS, TILE], gl.float32, SUMS)
    first, second, code, first_code, second_code = step(
        first, second, code, first_code, second_code, scales, first_scale, second_scale, 0, steps, q,
        a_stages, first_stages, second_stages, barriers, ROWS, SUMS,
    )  # fmt: skip
    begin_load(
        a_desc, first_desc, second_desc, a_row, first_row, second_row, STAGES, q + STAGES,
        a_stages, first_stages, second_stages, barriers, ROWS,
    )  # fmt: skip
    finish_copy_engine_stores(tile)
    if unannounced >= 0:
        announce(h_ready_ptr + unannounced)
    last = steps - STAGES
    # The next task is looked up in three moves, each of which has a step's time until the following one looks at what it fetched.
    following = find(tasks_ptr, taken, num_tasks, lanes)
    task = num_tasks.to(gl.int64) * 0
    found = lanes * 0
    found_free = lanes * 0
    load_next = q < 0
    for i in range(1, steps):
        first, second, code, first_code, second_code = step(
            first, second, code, first_code, second_code, scales, first_scale, second_scale, i, steps, q + i,
            a_stages, first_stages, second_stages, barriers, ROWS, SUMS,
        )  # fmt: skip
        if i < last:
            begin_load(
                a_desc, first_desc, second_desc, a_row, first_row, second_row, i + STAGES, q + i + STAGES,
                a_stages, first_stages, second_stages, barriers, ROWS,
            )  # fmt: skip
            if i == gl.maximum(last - 2, 1):
                task = of_lane_0(following)
                next_kind, next_tile, next_part, next_expert, next_half = unpack(task)
                found, found_free = ask(
                    next_kind, next_tile, ring, x_ready_ptr, h_ready_ptr, h_free_ptr, h_ready_ptr, lanes, PARTS, UPS, DOWNS, 0
                )  # fmt: skip
            if i == last - 1:
                next_kind, next_tile, next_part, next_expert, next_half = unpack(task)
                load_next = answer(found, found_free, next_kind, next_tile, ring, h_ready_ptr, PARTS, UPS, DOWNS, 0)
                order_copy_engine(next_tile)
        elif load_next:
            next_kind, next_tile, next_part, next_expert, next_half = unpack(task)
            next_a_desc, next_first_desc, next_second_desc, next_a_row, next_first_row, next_second_row, _ = operands(
                next_kind, next_tile, next_part, next_expert, ring, x_desc, h_desc, gate_desc, up_desc, down_desc, H, I
            )
            to = q + i + STAGES
            if next_half == 0:
                begin_load(
                    next_a_desc, next_first_desc, next_second_desc, next_a_row, next_first_row, next_second_row, i - last, to,
                    a_stages, first_stages, second_stages, barriers, TILE,
                )  # fmt: skip
            else:
                begin_load(
                    next_a_desc, next_first_desc, next_second_desc, next_a_row, next_first_row, next_second_row, i - last, to,
                    a_stages, first_stages, second_stages, barriers, TILE // 2,
                )  # fmt: skip
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    unannounced = q * 0 - 1
    if kind == UP:
        store_quantized_hidden(
            first, second, store_h_desc, h_scale_ptr + a_row.to(gl.int64) * I_BLOCKS + part, save_gate_desc, save_up_desc,
            a_row, row, part * TILE, saved_rows, limit, staging, I, CLAMP, SAVE, ROWS, SUMS,
        )  # fmt: skip
        if load_next:
            unannounced = tile
        else:
            finish_copy_engine_stores(tile)
            announce(h_ready_ptr + tile)
    else:
        ab = rounded_pairs(first)
        ac = rounded_pairs(second)
        if load_next:
            unannounced = tile + max_tiles
        else:
            announce(h_free_ptr + tile)
        slots, source = find_slots(peer_rank_ptr, peer_token_idx_ptr, combine_ptr, combine_ptrs, row, kind == DOWN, H, R, ROWS)
        push_to_slots(by_rows(ab, staging, ROWS), slots, source, column, H)
        push_to_slots(by_rows(ac, staging, ROWS), slots, source, column + TILE, H)
    return task, load_next.to(gl.int32), unannounced, steps


@gluon.jit(do_not_specialize=["rank", "max_tiles", "ring", "saved_rows", "wait_limit"])
def forward_fp8_hopper_kernel(
    x_ptr, x_ptrs, x_scale_ptr, x_scale_ptrs, combine_ptr, combine_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, tasks_ptr,
    ring_ptr, ring_x_scale_ptr, ring_h_scale_ptr, gate_desc, up_desc, down_desc, gate_scale_ptr, up_scale_ptr, down_scale_ptr,
    half_x_desc, half_h_desc, ring_h_desc, save_gate_desc, save_up_desc, save_half_gate_desc, save_half_up_desc,
    signals_ptr, trace_ptr, rank, max_tiles, ring, saved_rows, limit, wait_limit,
    H: gl.constexpr, I: gl.constexpr, K: gl.constexpr, R: gl.constexpr, CLAMP: gl.constexpr, SAVE: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_H: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """`forward_fp8.forward_fp8_kernel`, for H and I of at least STAGES + 2 steps: the next task is looked up before the last STAGES."""
    UPS: gl.constexpr = (I + TILE - 1) // TILE
    DOWNS: gl.constexpr = (H + 2 * TILE - 1) // (2 * TILE)
    x_ready_ptr = signals_ptr + 32
    h_ready_ptr = x_ready_ptr + max_tiles
    h_free_ptr = h_ready_ptr + max_tiles
    a_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, TILE], BYTES_IN_SHARED)
    first_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, TILE], BYTES_IN_SHARED)
    second_stages = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TILE, TILE], BYTES_IN_SHARED)
    staging = gl.allocate_shared_memory(gl.bfloat16, [TILE, TILE], ROWS_IN_SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    lanes = gl.arange(0, THREADS, LANES)
    ones = gl.full([THREADS], 1, gl.int32, LANES)
    num_tasks = gl.load(tasks_ptr).to(gl.int32)
    taken = gl.atomic_add(signals_ptr + lanes, ones, mask=lanes == 0, sem="relaxed", scope="gpu")
    task = of_lane_0(find(tasks_ptr, taken, num_tasks, lanes))
    ticket = of_lane_0(taken) if TRACE else 0
    if TRACE:
        note_begin(trace_ptr)
    q = num_tasks * 0  # as in `forward_hopper_kernel`
    loaded = num_tasks * 0
    unannounced = num_tasks * 0 - 1
    while (task & 7) != END:
        taken = gl.atomic_add(signals_ptr + lanes, ones, mask=lanes == 0, sem="relaxed", scope="gpu")
        if TRACE:
            note(trace_ptr, ticket, BEGIN)
        kind, tile, part, expert, half = unpack(task)
        ok = loaded != 0
        if loaded == 0:
            finish_copy_engine_stores(tile)
            ok = wait_for_inputs(
                kind, tile, x_ready_ptr, h_ready_ptr, h_free_ptr, h_ready_ptr, control_ptrs, rank, ring, wait_limit, R, PARTS, UPS, DOWNS, 0
            )
        if TRACE:
            note(trace_ptr, ticket, READY)
        task = task * 0 + END
        steps = q * 0
        if ok:
            if kind == PULL:
                ROWS: gl.constexpr = TILE // PARTS
                row = tile * TILE + part * ROWS
                ring_row = (tile % ring) * TILE + part * ROWS
                pull_rows(
                    ((x_ptr, x_ptrs, ring_ptr),), peer_rank_ptr, peer_token_idx_ptr, row, ring_row, 1, H // 2, K, R, ROWS, BLOCK_H
                )
                pull_scales(
                    x_scale_ptr, x_scale_ptrs, ring_x_scale_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
                    (H + TILE - 1) // TILE, K, R, ROWS,
                )  # fmt: skip
                following = find(tasks_ptr, taken, num_tasks, lanes)
                finish_copy_engine_stores(tile)
                announce(x_ready_ptr + tile)
                task = of_lane_0(following)
            elif kind == NOTHING:
                task = of_lane_0(find(tasks_ptr, taken, num_tasks, lanes))
            elif half != 0:
                task, loaded, unannounced, steps = expert_task_fp8(
                    kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, tasks_ptr, num_tasks,
                    half_x_desc, half_h_desc, gate_desc, up_desc, down_desc, ring_x_scale_ptr, ring_h_scale_ptr,
                    gate_scale_ptr, up_scale_ptr, down_scale_ptr, half_h_desc, save_half_gate_desc, save_half_up_desc,
                    a_stages, first_stages, second_stages, staging, barriers, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    x_ready_ptr, h_ready_ptr, h_free_ptr, trace_ptr, ring, max_tiles, saved_rows, limit,
                    H, I, R, CLAMP, SAVE, PARTS, UPS, DOWNS, TILE // 2, TRACE,
                )  # fmt: skip
            else:
                task, loaded, unannounced, steps = expert_task_fp8(
                    kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, tasks_ptr, num_tasks,
                    half_x_desc, half_h_desc, gate_desc, up_desc, down_desc, ring_x_scale_ptr, ring_h_scale_ptr,
                    gate_scale_ptr, up_scale_ptr, down_scale_ptr, ring_h_desc, save_gate_desc, save_up_desc,
                    a_stages, first_stages, second_stages, staging, barriers, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    x_ready_ptr, h_ready_ptr, h_free_ptr, trace_ptr, ring, max_tiles, saved_rows, limit,
                    H, I, R, CLAMP, SAVE, PARTS, UPS, DOWNS, TILE, TRACE,
                )  # fmt: skip
        q += steps
        if TRACE:
            note(trace_ptr, ticket, DONE)
            ticket = of_lane_0(taken)
    if TRACE:
        note_end(trace_ptr)


def launch(args: dict[str, Any], programs: int) -> None:
    """Launch the kernel with the arguments of `launch_fp8.kernel_arguments`, whose tiles and warps are those of the default plan."""
    forward_fp8_hopper_kernel[(programs,)](**with_layouts(forward_fp8_hopper_kernel, args), num_warps=8)
