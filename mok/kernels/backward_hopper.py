"""The backward kernel of `backward.py` for Hopper (sm_90), in Gluon, with a ring of loads that runs on over tasks.

The same list of tasks, signals, rings and bits. How the ring works is told in `forward_hopper.py`: a step's operands lie in one of STAGES
stages, loads run AHEAD steps ahead of the products, and in a task's last AHEAD steps the next task's first loads begin, if one reading of
its signal says that all it reads is there. What is different here:

    A step's A is two boxes of 64 x 64, of which every kind of task can make its operand: rows m .. m + 64 and m + 64 .. m + 128 of 64
    columns of dY or d_gate, d_up, or 64 rows of columns m .. m + 64 and m + 64 .. m + 128, for a weight's gradient. B is 64 rows of 256
    columns. So one code begins the loads of a next task of any kind.
    A weight's gradient has as many steps as its expert has rows. One of at most AHEAD steps is loaded for, but loads for nobody. An expert
    without rows has one step, of rows past the end, which the copy engine reads as zeros.
    A hidden task's gate and up come in halves of slices into the memory through which other tasks store, the first two during the last
    steps.

A task's last stage is free while its results are stored; the next load into it begins in the next task's first step. It takes a hidden
task's sums on their way to another layout, and half of a tile of a weight's gradient on its way to memory.

Legend: H hidden, I intermediate, S width of the shared experts, K choices per token, R ranks.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from mok.kernels.backward import SHARED, wait_for_group, wait_for_inputs
from mok.kernels.experts import in_order, rounded_halves
from mok.kernels.forward_hopper import (
    AHEAD,
    HALF_SUMS,
    LANES,
    PAIR_IN_SHARED,
    PUSHED,
    ROWS_IN_SHARED,
    STAGES,
    STEP,
    THREADS,
    TILE,
    WHOLE_SUMS,
    by_rows,
    copy_in,
    copy_out,
    find_outputs,
    find_slots,
    halves,
    of_lane_0,
    pull_rows,
    push_to_slots,
    read_if,
    reinterpret,
    thread_barrier,
)
from mok.kernels.gradients import around, hidden_gradient, slices
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
    KIND,
    OF_EXPERT,
    OF_GROUP,
    PART,
    PULL,
    RECORD,
    ROW,
    SHARED_D_WEIGHT,
    SHARED_D_X,
    SHARED_HIDDEN,
    TICKET,
)
from mok.kernels.launcher import enqueue
from mok.kernels.signals import X_FREE, announce, finish_copy_engine_stores, order_copy_engine, peer_address
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end

BOX = gl.constexpr(64)
SLICE = gl.constexpr(64)  # columns of a part of d_w
PARTS_OF_D_W = gl.constexpr(4)  # of a tile
NOWHERE = gl.constexpr(0x20000000)  # a row past the end of every matrix
# Forms of a task's products: rows of a whole or of half a tile, a weight's gradient, gate and up again.
WHOLE, HALF, WEIGHT, AGAIN = (gl.constexpr(i) for i in range(4))

# fp32 sums [128, 64] between the tensor cores' layout and that of rows: both sides without conflicts of banks.
SUMS_IN_SHARED = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 8], [0, 16], [0, 32], [0, 12], [1, 16], [2, 32], [4, 0], [8, 0], [16, 0], [32, 0], [64, 0]]
    )
)
SPREAD = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # in which `gradients.hidden_slices` adds up a row


@gluon.jit
def columns_of(place):
    """Two boxes [2, 64 rows, 64 columns] as they stand for a matrix [128 columns, 64 rows]."""
    return reinterpret(place, gl.bfloat16, [STEP, TILE], ROWS_IN_SHARED).permute([1, 0])


@gluon.jit
def pair_in(place):
    """A stage of B as two tiles of 128 rows of 64 columns."""
    return reinterpret(place, gl.bfloat16, [2, TILE, STEP], PAIR_IN_SHARED)


@gluon.jit
def read_task(ticket, list_ptr, total):
    """A ticket's record; END when there is none left."""
    record = list_ptr + ticket * RECORD
    live = ticket < total
    return (
        gl.load(record + KIND, mask=live, other=END), gl.load(record + AT_TILE, mask=live, other=0),
        gl.load(record + PART, mask=live, other=0), gl.load(record + OF_EXPERT, mask=live, other=0),
        gl.load(record + OF_GROUP, mask=live, other=0), gl.load(record + AT, mask=live, other=0),
        gl.load(record + DEPTH, mask=live, other=0), gl.load(record + EXPECTED, mask=live, other=0),
    )  # fmt: skip


@gluon.jit
def operands(
    kind, tile, part, expert, at, depth, ring, up_first, shared_up_first, descs, shared_descs,
    H: gl.constexpr, I: gl.constexpr, S: gl.constexpr, NEED_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """What a task multiplies -> (descriptors of A and B, first planes, A's first row and column, B's first row and column, steps of a
    plane, steps, rows after which A and B go on at row 0)."""
    d_y_desc, d_gate_up_desc, x_desc, h_desc, down_desc, gate_up_desc = descs
    a_desc = d_y_desc
    b_desc = down_desc
    a_plane = part * 0
    b_plane = part * 0
    a_row = (tile % ring) * TILE
    a_column = part * 0
    b_row = expert * H
    b_column = part * (2 * TILE)
    steps_of_plane = part * 0 + (H + STEP - 1) // STEP
    steps = steps_of_plane
    wrap = ring * TILE
    if kind == D_X:
        a_desc = d_gate_up_desc
        b_desc = gate_up_desc
        b_plane = b_plane + up_first
        b_row = expert * I
        steps_of_plane = part * 0 + (I + STEP - 1) // STEP
        steps = 2 * steps_of_plane
    if NEED_WEIGHTS:
        if kind == D_WEIGHT:
            b_desc = x_desc
            if part == 2:
                b_desc = h_desc
            else:
                a_desc = d_gate_up_desc
    if S > 0:
        shared_d_y_desc, shared_d_gate_up_desc, shared_x_desc, shared_h_desc, shared_down_desc, shared_gate_up_desc = shared_descs
        if kind >= SHARED_HIDDEN:
            a_row = tile * TILE
            b_row = part * 0
            if kind == SHARED_HIDDEN:
                a_desc = shared_d_y_desc
                b_desc = shared_down_desc
            elif kind == SHARED_D_X:
                a_desc = shared_d_gate_up_desc
                b_desc = shared_gate_up_desc
                b_plane = b_plane + shared_up_first
                steps_of_plane = part * 0 + (S + STEP - 1) // STEP
                steps = 2 * steps_of_plane
            elif NEED_WEIGHTS:
                wrap = part * 0 + 0x40000000
                b_desc = shared_x_desc
                a_desc = shared_d_gate_up_desc
                if part == 2:
                    b_desc = shared_h_desc
                    a_desc = shared_d_y_desc
    if NEED_WEIGHTS:
        if (kind == D_WEIGHT) | (kind == SHARED_D_WEIGHT):
            rows = depth >> 1
            steps = gl.maximum((rows + STEP - 1) // STEP, 1)
            a_plane = part & 1  # 1: up
            a_row = gl.where(rows == 0, NOWHERE, a_row)
            a_column = (at >> 16) * TILE
            b_column = (at & 65535) * (2 * TILE)
    return a_desc, b_desc, a_plane, b_plane, a_row, a_column, b_row, b_column, steps_of_plane, steps, wrap


@gluon.jit
def begin_load(
    a_desc, b_desc, a_plane, row, column, other_row, other_column, b_plane, b_row, b_column, q, whole, live, a_stages, b_stages, barriers
):  # fmt: skip
    """Begin the loads of one step, if it is a live one, into the stage of step q; of A's two boxes only the first, if it is not whole."""
    B_BYTES: gl.constexpr = 4 * TILE * STEP
    BOX_BYTES: gl.constexpr = 2 * BOX * STEP
    stage = q & (STAGES - 1)
    barrier = barriers.index(stage)
    a = a_stages.index(stage)
    mbarrier.expect(barrier, B_BYTES + 2 * BOX_BYTES, pred=live & whole)
    mbarrier.expect(barrier, B_BYTES + BOX_BYTES, pred=live & (whole == 0))
    copy_in(a_desc, [a_plane, row, column], barrier, a.slice(0, 1), pred=live)
    copy_in(a_desc, [a_plane, other_row, other_column], barrier, a.slice(1, 1), pred=live & whole)
    copy_in(b_desc, [b_plane, b_row, b_column], barrier, b_stages.index(stage), pred=live)


@gluon.jit
def load_own(task, i, q, live, a_stages, b_stages, barriers, FORM: gl.constexpr):
    """Begin the loads of step i of a task that begins at step q."""
    a_desc, b_desc, a_plane, b_plane, a_row, a_column, b_row, b_column, steps_of_plane, _, wrap = task
    if FORM == WEIGHT:
        row = around(a_row + i * STEP, wrap)
        begin_load(
            a_desc, b_desc, a_plane, row, a_column, row, a_column + BOX, 0, row, b_column, q + i, live, live,
            a_stages, b_stages, barriers,
        )  # fmt: skip
    else:
        plane = (i >= steps_of_plane).to(gl.int32)
        k = (i - plane * steps_of_plane) * STEP
        begin_load(
            a_desc, b_desc, plane, a_row, k, a_row + BOX, k, plane ^ b_plane, b_row + k, b_column, q + i, live & (FORM == WHOLE), live,
            a_stages, b_stages, barriers,
        )  # fmt: skip


@gluon.jit
def load_next(task, kind, half, j, q, live, a_stages, b_stages, barriers):
    """Begin the loads of step j of another task, one of its first AHEAD, into the stage of step q."""
    a_desc, b_desc, a_plane, b_plane, a_row, a_column, b_row, b_column, _, steps, wrap = task
    weight = (kind == D_WEIGHT) | (kind == SHARED_D_WEIGHT)
    k = j * STEP
    row = around(a_row + k, wrap)
    begin_load(
        a_desc, b_desc, a_plane, gl.where(weight, row, a_row), gl.where(weight, a_column, k),
        gl.where(weight, row, a_row + BOX), gl.where(weight, a_column + BOX, k), b_plane, gl.where(weight, row, b_row + k), b_column,
        q, half == 0, live & (j < steps), a_stages, b_stages, barriers,
    )  # fmt: skip


@gluon.jit
def multiply_step(total, q, a_stages, b_stages, barriers, FORM: gl.constexpr, FIRST: gl.constexpr = False, late_tile=-1):
    """Begin the product of step q, and wait for that of the step before it, whose stage every warp has then read.

    FIRST: of a task. Then what the task before has stored by the copy engine has left shared memory, and a hidden task's results, which
    the copy engine will read, are ordered before their announcement.
    """
    stage = q & (STAGES - 1)
    mbarrier.wait(barriers.index(stage), (q // STAGES) & 1)
    a = a_stages.index(stage)
    if FORM == AGAIN:
        b = pair_in(b_stages.index(stage)).reshape([2 * TILE, STEP]).permute([1, 0])
    else:
        b = b_stages.index(stage).reshape([STEP, 2 * TILE])
    if FORM == WEIGHT:
        total = warpgroup_mma(columns_of(a), b, total, use_acc=not FIRST, is_async=True)
    elif FORM == HALF:
        total = warpgroup_mma(a.reshape([TILE, STEP]).slice(0, BOX), b, total, use_acc=not FIRST, is_async=True)
    else:
        total = warpgroup_mma(a.reshape([TILE, STEP]), b, total, use_acc=not FIRST, is_async=True)
    total = warpgroup_mma_wait(1, deps=[total])
    if FIRST:
        tma.store_wait(0)
        if late_tile >= 0:
            order_copy_engine(q)
    thread_barrier()
    return total


@gluon.jit
def needs(
    kind, tile, group, ready_group, expected, saved_tiles, shared_tiles, signals, PARTS: gl.constexpr, GATE_UPS: gl.constexpr,
    HIDDENS: gl.constexpr, SHARED_HIDDENS: gl.constexpr,
):  # fmt: skip
    """The signal that a task which multiplies waits for in `backward.wait_for_inputs`, and its least value; 0 asks for nothing."""
    x_ready_ptr, gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, shared_ready_ptr = signals
    signal = x_ready_ptr + tile
    least = tile * 0
    if kind == HIDDEN:
        least += PARTS
        if GATE_UPS > 0:
            if tile >= saved_tiles:
                signal = gate_ready_ptr + tile
                least = tile * 0 + GATE_UPS
    elif kind == D_X:
        signal = d_gate_ready_ptr + tile
        least += HIDDENS
    elif kind == D_WEIGHT:
        signal = group_ready_ptr + group
        least = gl.where(group == ready_group, 0, expected)
    elif kind == SHARED_D_X:
        signal = shared_ready_ptr + tile
        least += SHARED_HIDDENS
    elif kind == SHARED_D_WEIGHT:
        signal = shared_ready_ptr + shared_tiles
        least = gl.where(ready_group == SHARED, 0, expected)
    return signal, least


@gluon.jit
def finish_weight(total, out_desc, row, column, q, staging, b_stages):
    """Begin to store a tile of a weight's gradient, rounded. Nobody in this kernel reads it, so nobody waits for it. q: after its steps."""
    first, second = rounded_halves(total, TILE, TILE)
    other = reinterpret(b_stages.index((q - 1) & (STAGES - 1)), gl.bfloat16, [TILE, TILE], ROWS_IN_SHARED)
    thread_barrier()  # every warp has waited for the last product
    staging.store(first)
    other.store(second)
    fence_async_shared()
    thread_barrier()
    copy_out(out_desc, [row, column], staging)
    copy_out(out_desc, [row, column + TILE], other)


@gluon.jit
def output_of(part, outs):
    """Where part 0 (gate), 1 (up) or 2 (down) of the weights' gradients goes."""
    gate_out, up_out, down_out = outs
    out = gate_out
    if part == 1:
        out = up_out
    elif part == 2:
        out = down_out
    return out


@gluon.jit
def old_values(to_ptr, i: gl.constexpr, row, column, columns):
    """Addresses of the i-th slice of a tile of an fp32 gradient, which of its columns are real, and what is there."""
    at = column + i * SLICE + gl.arange(0, SLICE, gl.SliceLayout(0, SPREAD))
    rows = row + gl.arange(0, TILE, gl.SliceLayout(1, SPREAD))
    columns = gl.multiple_of(columns + row * 0, 128)
    place = to_ptr + (rows.to(gl.int64) * columns)[:, None] + at[None, :]
    real = (rows >= 0)[:, None] & (at < columns)[None, :]
    return place, real, gl.load(place, mask=real, other=0.0)


@gluon.jit
def add_weight(total, to_ptr, row, column, columns, q, b_stages):
    """Add a tile of a weight's gradient to an fp32 one of so many columns, in slices, whose old values are asked for one ahead. q: after
    its steps."""
    parts = slices(total, TILE, 2 * TILE, SLICE)
    buffer = reinterpret(b_stages.index((q - 1) & (STAGES - 1)), gl.float32, [TILE, SLICE], SUMS_IN_SHARED)
    old = old_values(to_ptr, 0, row, column, columns)
    for i in gl.static_range(2 * TILE // SLICE):
        thread_barrier()  # every warp has waited for the last product, and read the slice before
        buffer.store(parts[i])
        thread_barrier()
        place, real, value = old
        if i + 1 < 2 * TILE // SLICE:
            old = old_values(to_ptr, i + 1, row, column, columns)
        gl.store(place, value + buffer.load(SPREAD), mask=real)
    fence_async_shared()  # the next loads go where sums lay


@gluon.jit
def load_gate_up(desc, gate_plane, row, column, u, live, staging, barriers, FORM: gl.constexpr):
    """Begin the loads of gate and up of unit u, a half of the u // 2-th tile of `in_slices`: 64 rows of 64 columns."""
    boxes = reinterpret(staging, gl.bfloat16, [4, 1, BOX, SLICE], PAIR_IN_SHARED)
    barrier = barriers.index(STAGES + u % 2)
    at_row = row + (u % 2 * BOX if FORM == WHOLE else 0)
    at_column = column + (u // 2 * SLICE if FORM == WHOLE else (u // 2 + u % 2 * 2) * SLICE)
    mbarrier.expect(barrier, 4 * BOX * SLICE, pred=live)
    copy_in(desc, [gate_plane, at_row, at_column], barrier, boxes.index(u % 2), pred=live)
    copy_in(desc, [gate_plane ^ 1, at_row, at_column], barrier, boxes.index(2 + u % 2), pred=live)


@gluon.jit
def in_slices(total, FORM: gl.constexpr):
    """Sums as tiles [128, 64]: slices of a tile; or, of half a tile, the first above the third and the second above the fourth."""
    if FORM == WHOLE:
        return slices(total, TILE, 2 * TILE, SLICE)
    else:
        apart = gl.permute(gl.reshape(total, [BOX, 2, 2, SLICE]), [1, 0, 3, 2])
        first, second = gl.split(apart)
        return gl.reshape(first, [TILE, SLICE]), gl.reshape(second, [TILE, SLICE])


@gluon.jit
def store_slice(ptr, value, rows, column, num_rows, width, CLIP: gl.constexpr):
    """`gradients.store_slice`, with layouts."""
    columns = column + gl.arange(0, SLICE, gl.SliceLayout(0, SPREAD))
    if CLIP:
        width = gl.multiple_of(width + column * 0, 16)
        to = ptr + (rows.to(gl.int64) * width)[:, None] + columns[None, :]
        gl.store(to, value, mask=(rows < num_rows)[:, None] & (columns < width)[None, :])
    else:
        gl.store(ptr + (rows.to(gl.int64) * width)[:, None] + columns[None, :], value)


@gluon.jit
def rows_of_unit(row, u: gl.constexpr, FORM: gl.constexpr):
    return row + (u % 2 * BOX if FORM == WHOLE else 0) + gl.arange(0, BOX, gl.SliceLayout(1, SPREAD))


@gluon.jit
def finish_hidden(
    total, buffer, staging, barriers, gate_up_desc, gate_plane, from_row, to_gate_ptr, to_up_ptr, to_h_ptr, weights, place, num_rows,
    part, width, limit, partial_ptr, partial_stride, keep,
    CLAMP: gl.constexpr, CLIP: gl.constexpr, D_WEIGHTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """`gradients.hidden_slices`, in halves of tiles of `in_slices`. Gate and up of the first two are under way to staging; those of a
    later one begin when the one two before it was read."""
    UNITS: gl.constexpr = 8 if FORM == WHOLE else 4
    column = part * (2 * TILE)
    narrow = in_slices(total, FORM)
    gates_and_ups = reinterpret(staging, gl.bfloat16, [4, BOX, SLICE], ROWS_IN_SHARED)
    thread_barrier()  # every warp has waited for the last product
    for u in gl.static_range(UNITS):
        if u % 2 == 0:
            buffer.store(narrow[u // 2])
            thread_barrier()
        d_hidden = buffer.slice(u % 2 * BOX, BOX).load(SPREAD)
        mbarrier.wait(barriers.index(STAGES + u % 2), u // 2 % 2)
        gate = gates_and_ups.index(u % 2).load(SPREAD)
        up = gates_and_ups.index(2 + u % 2).load(SPREAD)
        if u + 1 == UNITS:
            fence_async_shared()  # the next loads go where sums lay
        thread_barrier()
        if u + 2 < UNITS:
            load_gate_up(gate_up_desc, gate_plane, from_row, column, u + 2, True, staging, barriers, FORM)
        d_gate, d_up, weighted_h, d_weight = hidden_gradient(d_hidden, gate, up, weights[u % 2], limit, CLAMP, True)
        slice_of_part = u // 2 if FORM == WHOLE else u // 2 + u % 2 * 2
        at = column + slice_of_part * SLICE
        rows = rows_of_unit(place, u, FORM)
        store_slice(to_h_ptr, weighted_h, rows, at, num_rows, width, CLIP)
        store_slice(to_up_ptr, d_up, rows, at, num_rows, width, CLIP)
        store_slice(to_gate_ptr, d_gate, rows, at, num_rows, width, CLIP)
        if D_WEIGHTS:
            to = partial_ptr + (part * PARTS_OF_D_W + slice_of_part) * partial_stride + rows
            gl.store(to, d_weight, mask=(rows >= 0) & keep)


@gluon.jit
def push_d_weights(
    partial_ptr, partial_stride, count, ring_row, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr, row, R: gl.constexpr
):  # fmt: skip
    """`gradients.push_d_weights`, with layouts; 8 parts at a time are on their way."""
    lanes = gl.arange(0, TILE, LANES)
    total = gl.zeros([TILE], gl.float32, LANES)
    for part in range(0, count, 8):
        parts = ()
        for i in gl.static_range(8):
            mask = (lanes >= 0) & (part + i < count)
            parts = parts + (gl.load(partial_ptr + (part + i) * partial_stride + ring_row + lanes, mask=mask, other=0.0),)
        for i in gl.static_range(8):
            total += parts[i]
    source = gl.load(peer_rank_ptr + row + lanes)
    slot = gl.load(peer_token_idx_ptr + row + lanes)
    if R == 1:
        to = d_weights_ptr + slot
    else:
        to = peer_address(d_weights_ptrs, gl.maximum(source, 0), gl.float32) + slot
    gl.store(to, total, mask=source >= 0)


@gluon.jit
def announce_hidden(tile_ptr, group_ptr, lanes):
    """Add to the two signals that a hidden task announces, by two lanes; lane 0 then has what its tile's signal was."""
    return gl.atomic_add(gl.where(lanes == 0, tile_ptr, group_ptr), lanes * 0 + 1, mask=lanes < 2, sem="acq_rel", scope="gpu")


@gluon.jit
def finish_d_weights(
    done, tile, ring, partial_ptr, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    HIDDENS: gl.constexpr, R: gl.constexpr, NEED_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """If a hidden task is its tile's last one, push the tile's gradients of router weights. done: of `announce_hidden`."""
    if NEED_WEIGHTS:
        if of_lane_0(done) == HIDDENS - 1:
            push_d_weights(
                partial_ptr, ring * TILE, HIDDENS * PARTS_OF_D_W, (tile % ring) * TILE, d_weights_ptr, d_weights_ptrs,
                peer_rank_ptr, peer_token_idx_ptr, tile * TILE, R,
            )  # fmt: skip


@gluon.jit
def pull_task(
    tile, part, saved_tiles, d_y_ptr, d_y_ptrs, x_ptr, x_ptrs, weights_ptr, weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
    ring_d_y_ptr, ring_x_ptr, ring_weights_ptr, x_ready_ptr, ring,
    H: gl.constexpr, K: gl.constexpr, R: gl.constexpr, NEED_EXPERTS: gl.constexpr, PARTS: gl.constexpr, BLOCK_H: gl.constexpr,
):  # fmt: skip
    """`backward.pull_task`, with layouts."""
    ROWS: gl.constexpr = TILE // PARTS
    row = tile * TILE + part * ROWS
    ring_row = (tile % ring) * TILE + part * ROWS
    lanes = gl.arange(0, ROWS, LANES)
    source = gl.load(peer_rank_ptr + row + lanes)
    slot = gl.load(peer_token_idx_ptr + row + lanes)
    if R == 1:
        of = weights_ptr + slot
    else:
        of = peer_address(weights_ptrs, gl.maximum(source, 0), gl.float32) + slot
    gl.store(ring_weights_ptr + ring_row + lanes, gl.load(of, mask=source >= 0, other=0.0))
    d_y = (d_y_ptr, d_y_ptrs, ring_d_y_ptr)
    x = (x_ptr, x_ptrs, ring_x_ptr)
    if NEED_EXPERTS:
        pull_rows((d_y, x), peer_rank_ptr, peer_token_idx_ptr, row, ring_row, 2, H, K, R, ROWS, BLOCK_H)
    else:
        pull_rows((d_y,), peer_rank_ptr, peer_token_idx_ptr, row, ring_row, 1, H, K, R, ROWS, BLOCK_H)
        if tile >= saved_tiles:
            pull_rows((x,), peer_rank_ptr, peer_token_idx_ptr, row, ring_row, 1, H, K, R, ROWS, BLOCK_H)
    order_copy_engine(tile)
    announce(x_ready_ptr + tile)


@gluon.jit
def product_task(
    task, ticket, q, loaded, late, ready_group, taken, lanes, places, matrices, pointers, numbers,
    H: gl.constexpr, I: gl.constexpr, S: gl.constexpr, R: gl.constexpr, CLAMP: gl.constexpr, RECOMPUTE: gl.constexpr,
    CARRY: gl.constexpr, ACCUMULATE: gl.constexpr, NEED_WEIGHTS: gl.constexpr, ANY_WEIGHT: gl.constexpr,
    PARTS: gl.constexpr, GATE_UPS: gl.constexpr, HIDDENS: gl.constexpr, SHARED_HIDDENS: gl.constexpr, FORM: gl.constexpr,
    TRACE: gl.constexpr,
):  # fmt: skip
    """A task whose loads run on into the next one's, its first step at q -> (the next task, its ticket, whether its first loads are under
    way, steps, what is left to be announced).

    late: of the task before the tile whose hidden slice, and the group of which a task, is still to be announced, or -1. The slice is
    announced behind this task's first product, the task before its last steps; it waits for nothing: only one loaded for gets any.
    """
    kind, tile, part, expert, group, at, depth, _ = task
    a_stages, b_stages, staging, barriers = places
    descs, shared_descs, outs, shared_outs, saved_desc, shared_saved_desc = matrices
    (
        list_ptr, expert_tile_ptr, ring_d_gate_ptr, ring_d_up_ptr, ring_h_ptr, ring_weights_ptr, partial_ptr,
        shared_d_gate_ptr, shared_d_up_ptr, shared_h_ptr, d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, shared_d_x_ptr,
        peer_rank_ptr, peer_token_idx_ptr, group_done_ptr, trace_ptr, signals,
    ) = pointers  # fmt: skip
    (
        total_tasks, up_first, shared_up_first, saved_up_first, shared_saved_up_first, ring, tokens, saved_tiles, shared_tiles,
        limit, shared_limit,
    ) = numbers  # fmt: skip
    OF_SHARED: gl.constexpr = S if FORM != HALF else 0  # of a shared expert every tile is whole
    SUMS: gl.constexpr = HALF_SUMS if FORM == HALF else WHOLE_SUMS
    ROWS: gl.constexpr = BOX if FORM == HALF else TILE
    _, _, d_gate_ready_ptr, group_ready_ptr, shared_ready_ptr = signals
    late_tile, late_group = late
    if loaded == 0:
        own = operands(
            kind, tile, part, expert, at, depth, ring, up_first, shared_up_first, descs, shared_descs, H, I, OF_SHARED, FORM == WEIGHT
        )  # fmt: skip
        for i in gl.static_range(AHEAD):
            load_own(own, i, q, i < own[9], a_stages, b_stages, barriers, FORM)
    total = gl.zeros([ROWS, 2 * TILE], gl.float32, SUMS)
    total = multiply_step(total, q, a_stages, b_stages, barriers, FORM, True, late_tile)
    own = operands(  # only now: one that has been loaded for begins at once
        kind, tile, part, expert, at, depth, ring, up_first, shared_up_first, descs, shared_descs, H, I, OF_SHARED, FORM == WEIGHT
    )  # fmt: skip
    a_row = own[4]
    steps = own[9]
    load_own(own, AHEAD, q, steps > AHEAD, a_stages, b_stages, barriers, FORM)
    done = lanes * 0
    if late_tile >= 0:
        done = announce_hidden(d_gate_ready_ptr + late_tile, group_ready_ptr + late_group, lanes)
    last = gl.maximum(steps - AHEAD, 1)
    look = gl.maximum(last - 4, 1)
    turn = gl.maximum(last - 2, 1)
    # The next task is looked up in three moves, each of which has a few steps' time until the following one looks at what it fetched.
    for i in range(1, look):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, FORM)
        load_own(own, i + AHEAD, q, True, a_stages, b_stages, barriers, FORM)
    if late_tile >= 0:
        finish_d_weights(
            done, late_tile, ring, partial_ptr, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr, HIDDENS, R, NEED_WEIGHTS
        )  # fmt: skip
    if late_group >= 0:
        announce(group_done_ptr + late_group)
    late_tile = q * 0 - 1
    late_group = q * 0 - 1
    next_ticket = of_lane_0(taken)
    following = read_task(next_ticket, list_ptr, total_tasks)
    next_kind, next_tile, next_part, next_expert, next_group, next_at, next_depth, next_expected = following
    for i in range(look, turn):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, FORM)
        load_own(own, i + AHEAD, q, True, a_stages, b_stages, barriers, FORM)
    signal, least = needs(
        next_kind, next_tile, next_group, ready_group, next_expected, saved_tiles, shared_tiles, signals,
        PARTS, GATE_UPS, HIDDENS, SHARED_HIDDENS,
    )  # fmt: skip
    found = read_if(signal, least, lanes)
    whole_sum = next_kind >= HIDDEN
    if CARRY:
        whole_sum = whole_sum & (is_cut(next_kind, next_tile, next_expert, next_depth, expert_tile_ptr) == 0)
    for i in range(turn, last):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, FORM)
        load_own(own, i + AHEAD, q, True, a_stages, b_stages, barriers, FORM)
    there = (least == 0) | (of_lane_0(found) >= least)
    will_load = there & whole_sum & (steps > AHEAD)
    order_copy_engine(next_tile)
    after = operands(
        next_kind, next_tile, next_part, next_expert, next_at, next_depth, ring, up_first, shared_up_first, descs, shared_descs,
        H, I, S, ANY_WEIGHT,
    )  # fmt: skip
    next_half = (next_depth & 1) * ((next_kind == HIDDEN) | (next_kind == D_X)).to(gl.int32)
    if FORM != WEIGHT:
        hidden = (kind == HIDDEN) | (kind == SHARED_HIDDEN)
        from_desc = saved_desc
        from_plane = part * 0 + saved_up_first
        from_row = tile * TILE
        if RECOMPUTE:
            if tile >= saved_tiles:
                from_desc = descs[1]
                from_plane = part * 0
                from_row = a_row
        if OF_SHARED > 0:
            if kind == SHARED_HIDDEN:
                from_desc = shared_saved_desc
                from_plane = part * 0 + shared_saved_up_first
                from_row = tile * TILE
        weights = ()
        for u in gl.static_range(2):
            load_gate_up(from_desc, from_plane, from_row, part * (2 * TILE), u, hidden, staging, barriers, FORM)
            rows = rows_of_unit(a_row, u, FORM)
            weights = weights + (gl.load(ring_weights_ptr + rows, mask=(rows >= 0) & (kind == HIDDEN), other=1.0),)
        slots, source = find_slots(peer_rank_ptr, peer_token_idx_ptr, d_x_ptr, d_x_ptrs, tile * TILE, kind == D_X, H, R, ROWS)
        if OF_SHARED > 0:
            if kind == SHARED_D_X:
                slots, source = find_outputs(shared_d_x_ptr, tile * TILE, tokens, H, ROWS)
    for i in range(last, steps):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, FORM)
        load_next(after, next_kind, next_half, i - last, q + i + AHEAD, will_load, a_stages, b_stages, barriers)
    total = warpgroup_mma_wait(0, deps=[total])
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    if FORM == WEIGHT:
        out = output_of(part, outs)
        width = part * 0 + I
        if S > 0:
            if kind == SHARED_D_WEIGHT:
                out = output_of(part, shared_outs)
                width = part * 0 + S
        to_row = expert * gl.where(part == 2, H, width) + own[5]
        if not ACCUMULATE:
            finish_weight(total, out, to_row, own[7], q + steps, staging, b_stages)
        elif depth > 1:  # of an expert without rows there is nothing to add
            add_weight(total, out, to_row, own[7], gl.where(part == 2, width, H), q + steps, b_stages)
    elif hidden:
        to_gate_ptr = ring_d_gate_ptr
        to_up_ptr = ring_d_up_ptr
        to_h_ptr = ring_h_ptr
        width = I
        num_rows = 0x7FFFFFFF
        clip = limit
        if OF_SHARED > 0:
            width = gl.where(kind == HIDDEN, I, S)
            if kind == SHARED_HIDDEN:
                to_gate_ptr = shared_d_gate_ptr
                to_up_ptr = shared_d_up_ptr
                to_h_ptr = shared_h_ptr
                num_rows = tokens
                clip = shared_limit
        buffer = reinterpret(b_stages.index((q + steps - 1) & (STAGES - 1)), gl.float32, [TILE, SLICE], SUMS_IN_SHARED)
        finish_hidden(
            total, buffer, staging, barriers, from_desc, from_plane, from_row, to_gate_ptr, to_up_ptr, to_h_ptr,
            weights, a_row, num_rows, part, width, clip, partial_ptr, ring * TILE, kind == HIDDEN,
            CLAMP, (OF_SHARED > 0) | (I % (2 * TILE) != 0), NEED_WEIGHTS, FORM,
        )  # fmt: skip
        if kind == HIDDEN:
            if will_load:
                late_tile = tile
            else:
                order_copy_engine(tile)
                thread_barrier()
                done = announce_hidden(d_gate_ready_ptr + tile, group_ready_ptr + group, lanes)
                finish_d_weights(
                    done, tile, ring, partial_ptr, d_weights_ptr, d_weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                    HIDDENS, R, NEED_WEIGHTS,
                )  # fmt: skip
        elif OF_SHARED > 0:
            order_copy_engine(tile)
            announce(shared_ready_ptr + tile)
            gl.atomic_add(shared_ready_ptr + shared_tiles, 1, sem="release", scope="gpu")
    else:
        first, second = halves(total, staging, ROWS)
        column = part * (2 * TILE)
        push_to_slots(by_rows(first, staging, ROWS), slots, source, column, H)
        push_to_slots(by_rows(second, staging, ROWS), slots, source, column + TILE, H)
        fence_async_shared()
    if kind <= D_WEIGHT:
        if will_load:
            late_group = group
        else:
            announce(group_done_ptr + group)
    return following, next_ticket, will_load.to(gl.int32), steps, (late_tile, late_group)


@gluon.jit
def load_again(x_desc, pair_desc, row, b_row, i, q, live, a_stages, b_stages, barriers):
    """Begin the loads of step i of gate and up again, if it is a live one, into the stage of step q."""
    stage = q & (STAGES - 1)
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, 6 * TILE * STEP, pred=live)
    for j in gl.static_range(2):
        copy_in(x_desc, [0, row + j * BOX, i * STEP], barrier, a_stages.index(stage).slice(j, 1), pred=live)
    copy_in(pair_desc, [0, b_row, i * STEP], barrier, pair_in(b_stages.index(stage)), pred=live)


@gluon.jit
def gate_up_task(
    task, ticket, q, taken, places, list_ptr, total_tasks, x_desc, pair_desc, gate_first, ring_d_gate_ptr, ring_d_up_ptr,
    gate_ready_ptr, group_done_ptr, trace_ptr, ring, H: gl.constexpr, I: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """Gate and up of a slice again, into the places of d_gate and d_up -> the next task, its ticket, steps. Nothing runs ahead."""
    _, tile, part, expert, group, _, _, _ = task
    a_stages, b_stages, staging, barriers = places
    STEPS: gl.constexpr = (H + STEP - 1) // STEP
    place = (tile % ring) * TILE
    b_row = expert * I + part * TILE
    tma.store_wait(0)
    total = gl.zeros([TILE, 2 * TILE], gl.float32, WHOLE_SUMS)
    for i in gl.static_range(AHEAD):
        load_again(x_desc, pair_desc, place, b_row, i, q + i, True, a_stages, b_stages, barriers)
    for i in range(0, STEPS):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, AGAIN)
        load_again(x_desc, pair_desc, place, b_row, i + AHEAD, q + i + AHEAD, i + AHEAD < STEPS, a_stages, b_stages, barriers)
    total = warpgroup_mma_wait(0, deps=[total])
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    next_ticket = of_lane_0(taken)
    first, second = halves(total, staging, TILE)
    gate, up = in_order(first, second, gate_first)
    rows = (place + gl.arange(0, TILE, gl.SliceLayout(1, PUSHED))).to(gl.int64) * I
    at = rows[:, None] + (part * TILE + gl.arange(0, TILE, gl.SliceLayout(0, PUSHED)))[None, :]
    gl.store(ring_d_gate_ptr + at, by_rows(gate, staging, TILE))
    gl.store(ring_d_up_ptr + at, by_rows(up, staging, TILE))
    fence_async_shared()
    order_copy_engine(tile)
    announce(gate_ready_ptr + tile)
    announce(group_done_ptr + group)
    return read_task(next_ticket, list_ptr, total_tasks), next_ticket, STEPS


@gluon.jit
def is_cut(kind, tile, expert, depth, expert_tile_ptr):
    """Whether a task's sum began in a group before or goes on in a later one."""
    of_weight = kind == D_WEIGHT
    return of_weight & (((depth & 1) == 0) | (tile > gl.load(expert_tile_ptr + expert, mask=of_weight, other=0)))


@gluon.jit
def cut_task(
    task, ticket, q, taken, places, list_ptr, total_tasks, descs, outs, expert_tile_ptr, carry_ptr, group_done_ptr, trace_ptr, ring,
    H: gl.constexpr, I: gl.constexpr, ACCUMULATE: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """A tile of a weight's gradient whose sum begins with what is carried, or ends unfinished -> the next task, its ticket,
    steps. Nothing runs ahead."""
    kind, tile, part, expert, group, at, depth, _ = task
    a_stages, b_stages, staging, barriers = places
    none: gl.constexpr = None
    own = operands(kind, tile, part, expert, at, depth, ring, 0, 0, descs, none, H, I, 0, True)
    to_row = own[5]
    column = own[7]
    steps = own[9]
    tma.store_wait(0)
    rows = gl.where(part == 2, H, I)
    columns = gl.where(part == 2, I, H)
    r = to_row + gl.arange(0, TILE, gl.SliceLayout(1, WHOLE_SUMS))
    c = column + gl.arange(0, 2 * TILE, gl.SliceLayout(0, WHOLE_SUMS))
    carried = tile > gl.load(expert_tile_ptr + expert)
    place = carry_ptr + part.to(gl.int64) * (I * H) + (r.to(gl.int64) * columns)[:, None] + c[None, :]
    total = gl.load(place, mask=(r < gl.where(carried, rows, 0))[:, None] & (c < columns)[None, :], other=0.0)
    for i in gl.static_range(AHEAD):
        load_own(own, i, q, i < steps, a_stages, b_stages, barriers, WEIGHT)
    for i in range(0, steps):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, WEIGHT)
        load_own(own, i + AHEAD, q, i + AHEAD < steps, a_stages, b_stages, barriers, WEIGHT)
    total = warpgroup_mma_wait(0, deps=[total])
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    next_ticket = of_lane_0(taken)
    if (depth & 1) == 0:
        place = carry_ptr + part.to(gl.int64) * (I * H) + (r.to(gl.int64) * columns)[:, None] + c[None, :]
        gl.store(place, total, mask=(r < rows)[:, None] & (c < columns)[None, :])
    else:
        out = output_of(part, outs)
        if ACCUMULATE:
            add_weight(total, out, expert * rows + to_row, column, columns, q + steps, b_stages)
        else:
            finish_weight(total, out, expert * rows + to_row, column, q + steps, staging, b_stages)
    announce(group_done_ptr + group)
    return read_task(next_ticket, list_ptr, total_tasks), next_ticket, steps


@gluon.jit(
    do_not_specialize=[
        "up_first", "shared_up_first", "saved_up_first", "shared_saved_up_first", "gate_first", "rank", "ring", "max_tiles", "tokens",
        "saved_tiles", "wait_limit",
    ]
)  # fmt: skip
def backward_hopper_kernel(
    d_y_ptr, d_y_ptrs, x_ptr, x_ptrs, weights_ptr, weights_ptrs, d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, control_ptrs,
    peer_rank_ptr, peer_token_idx_ptr, expert_tile_ptr, table_ptr, list_ptr,
    ring_d_y_ptr, ring_x_ptr, ring_d_gate_ptr, ring_d_up_ptr, ring_h_ptr, ring_weights_ptr, partial_ptr, carry_ptr,
    shared_d_gate_ptr, shared_d_up_ptr, shared_h_ptr, shared_d_x_ptr,
    half_x_desc, gate_up_pair_desc,
    half_d_y_desc, half_d_gate_up_desc, x_kn_desc, h_kn_desc, down_kn_desc, gate_up_kn_desc, half_saved_desc,
    half_shared_d_y_desc, half_shared_d_gate_up_desc, shared_x_kn_desc, shared_h_kn_desc, shared_down_kn_desc, shared_gate_up_kn_desc,
    half_shared_saved_desc,
    store_d_gate_desc, store_d_up_desc, store_d_down_desc, store_shared_d_gate_desc, store_shared_d_up_desc, store_shared_d_down_desc,
    d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr, shared_d_gate_weight_ptr, shared_d_up_weight_ptr, shared_d_down_weight_ptr,
    signals_ptr, trace_ptr, up_first, shared_up_first, saved_up_first, shared_saved_up_first, gate_first, rank, ring, max_tiles, tokens,
    saved_tiles, limit, shared_limit, wait_limit,
    H: gl.constexpr, I: gl.constexpr, S: gl.constexpr, K: gl.constexpr, R: gl.constexpr, CLAMP: gl.constexpr, RECOMPUTE: gl.constexpr,
    CARRY: gl.constexpr, ACCUMULATE: gl.constexpr, NEED_WEIGHTS: gl.constexpr, NEED_EXPERTS: gl.constexpr, NEED_SHARED: gl.constexpr,
    PARTS: gl.constexpr, BLOCK_H: gl.constexpr,
    GATE_UPS: gl.constexpr, HIDDENS: gl.constexpr, SHARED_HIDDENS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """`backward.backward_kernel` of bf16 experts; H, I and, if not 0, S multiples of TILE of more than AHEAD steps."""
    ANY_WEIGHT: gl.constexpr = NEED_EXPERTS | NEED_SHARED
    x_ready_ptr = signals_ptr + 32
    gate_ready_ptr = x_ready_ptr + max_tiles
    d_gate_ready_ptr = gate_ready_ptr + max_tiles
    group_ready_ptr = d_gate_ready_ptr + max_tiles
    group_done_ptr = group_ready_ptr + max_tiles + 2
    shared_ready_ptr = group_done_ptr + max_tiles + 2
    signals = (x_ready_ptr, gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, shared_ready_ptr)
    descs = (half_d_y_desc, half_d_gate_up_desc, x_kn_desc, h_kn_desc, down_kn_desc, gate_up_kn_desc)
    shared_descs = (
        half_shared_d_y_desc, half_shared_d_gate_up_desc, shared_x_kn_desc, shared_h_kn_desc, shared_down_kn_desc, shared_gate_up_kn_desc
    )  # fmt: skip
    if ACCUMULATE:
        outs = (d_gate_weight_ptr, d_up_weight_ptr, d_down_weight_ptr)
        shared_outs = (shared_d_gate_weight_ptr, shared_d_up_weight_ptr, shared_d_down_weight_ptr)
    else:
        outs = (store_d_gate_desc, store_d_up_desc, store_d_down_desc)
        shared_outs = (store_shared_d_gate_desc, store_shared_d_up_desc, store_shared_d_down_desc)
    shared_tiles = max_tiles * 0
    if S > 0:
        shared_tiles = (tokens + TILE - 1) // TILE
    total_tasks = gl.load(table_ptr + HEADER + gl.load(table_ptr) * ROW + TICKET)
    a_stages = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, BOX, STEP], PAIR_IN_SHARED)
    b_stages = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, STEP, 2 * TILE], PAIR_IN_SHARED)
    staging = gl.allocate_shared_memory(gl.bfloat16, [TILE, TILE], ROWS_IN_SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES + 2):
        mbarrier.init(barriers.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    lanes = gl.arange(0, THREADS, LANES)
    ones = gl.full([THREADS], 1, gl.int32, LANES)
    taken = gl.atomic_add(signals_ptr + lanes, ones, mask=lanes == 0, sem="relaxed", scope="gpu")
    ticket = of_lane_0(taken)
    task = read_task(ticket, list_ptr, total_tasks)
    if TRACE:
        note_begin(trace_ptr)
    places = (a_stages, b_stages, staging, barriers)
    matrices = (descs, shared_descs, outs, shared_outs, half_saved_desc, half_shared_saved_desc)
    pointers = (
        list_ptr, expert_tile_ptr, ring_d_gate_ptr, ring_d_up_ptr, ring_h_ptr, ring_weights_ptr, partial_ptr,
        shared_d_gate_ptr, shared_d_up_ptr, shared_h_ptr, d_x_ptr, d_x_ptrs, d_weights_ptr, d_weights_ptrs, shared_d_x_ptr,
        peer_rank_ptr, peer_token_idx_ptr, group_done_ptr, trace_ptr, signals,
    )  # fmt: skip
    numbers = (
        total_tasks, up_first, shared_up_first, saved_up_first, shared_saved_up_first, ring, tokens, saved_tiles, shared_tiles,
        limit, shared_limit,
    )  # fmt: skip
    q = max_tiles * 0  # steps begun by this program
    loaded = max_tiles * 0  # whether the task's first loads are under way
    ready_group = max_tiles * 0 - 1
    late = (max_tiles * 0 - 1, max_tiles * 0 - 1)  # what the task before left to be announced
    while task[0] != END:
        kind, tile, part, expert, group, at, depth, expected = task
        taken = gl.atomic_add(signals_ptr + lanes, ones, mask=lanes == 0, sem="relaxed", scope="gpu")
        number = ticket
        if TRACE:
            note(trace_ptr, number, BEGIN)
        cut = kind < 0
        ok = loaded
        if loaded == 0:
            if CARRY:
                cut = is_cut(kind, tile, expert, depth, expert_tile_ptr)
            if kind == PULL:
                ok = ok + 1
                if at >= 0:
                    ok = wait_for_group(at, table_ptr, group_done_ptr, control_ptrs, rank, tile, X_FREE, wait_limit, R)
            else:
                ok = wait_for_inputs(
                    kind, tile, expert, group, ready_group, expected, cut, saved_tiles, shared_tiles, table_ptr, control_ptrs,
                    x_ready_ptr, gate_ready_ptr, d_gate_ready_ptr, group_ready_ptr, group_done_ptr, shared_ready_ptr, wait_limit,
                    rank, R, PARTS, GATE_UPS, HIDDENS, SHARED_HIDDENS, CARRY,
                )  # fmt: skip
        if TRACE:
            note(trace_ptr, number, READY)
        steps = q * 0
        if ok == 0:
            task = (kind * 0 + END, tile, part, expert, group, at, depth, expected)
        elif kind == PULL:
            pull_task(
                tile, part, saved_tiles, d_y_ptr, d_y_ptrs, x_ptr, x_ptrs, weights_ptr, weights_ptrs, peer_rank_ptr, peer_token_idx_ptr,
                ring_d_y_ptr, ring_x_ptr, ring_weights_ptr, x_ready_ptr, ring, H, K, R, NEED_EXPERTS, PARTS, BLOCK_H,
            )  # fmt: skip
            ticket = of_lane_0(taken)
            task = read_task(ticket, list_ptr, total_tasks)
        elif kind == GATE_UP:
            if RECOMPUTE:
                task, ticket, steps = gate_up_task(
                    task, ticket, q, taken, places, list_ptr, total_tasks, half_x_desc, gate_up_pair_desc, gate_first, ring_d_gate_ptr,
                    ring_d_up_ptr, gate_ready_ptr, group_done_ptr, trace_ptr, ring, H, I, TRACE,
                )  # fmt: skip
        elif cut:
            if CARRY:
                ready_group = group
                task, ticket, steps = cut_task(
                    task, ticket, q, taken, places, list_ptr, total_tasks, descs, outs, expert_tile_ptr, carry_ptr, group_done_ptr,
                    trace_ptr, ring, H, I, ACCUMULATE, TRACE,
                )  # fmt: skip
        elif (kind == D_WEIGHT) | (kind == SHARED_D_WEIGHT):
            if ANY_WEIGHT:
                ready_group = group
                if S > 0:
                    if kind == SHARED_D_WEIGHT:
                        ready_group = group * 0 + SHARED
                task, ticket, loaded, steps, late = product_task(
                    task, ticket, q, loaded, late, ready_group, taken, lanes, places, matrices, pointers, numbers, H, I, S, R, CLAMP,
                    RECOMPUTE, CARRY, ACCUMULATE, NEED_WEIGHTS, ANY_WEIGHT, PARTS, GATE_UPS, HIDDENS, SHARED_HIDDENS, WEIGHT, TRACE,
                )  # fmt: skip
        elif (depth & 1) == 1:  # half a tile
            task, ticket, loaded, steps, late = product_task(
                task, ticket, q, loaded, late, ready_group, taken, lanes, places, matrices, pointers, numbers, H, I, S, R, CLAMP, RECOMPUTE,
                CARRY, ACCUMULATE, NEED_WEIGHTS, ANY_WEIGHT, PARTS, GATE_UPS, HIDDENS, SHARED_HIDDENS, HALF, TRACE,
            )  # fmt: skip
        else:
            task, ticket, loaded, steps, late = product_task(
                task, ticket, q, loaded, late, ready_group, taken, lanes, places, matrices, pointers, numbers, H, I, S, R, CLAMP, RECOMPUTE,
                CARRY, ACCUMULATE, NEED_WEIGHTS, ANY_WEIGHT, PARTS, GATE_UPS, HIDDENS, SHARED_HIDDENS, WHOLE, TRACE,
            )  # fmt: skip
        q += steps
        if TRACE:
            note(trace_ptr, number, DONE)
    finish_copy_engine_stores(q)
    if TRACE:
        note_end(trace_ptr)


def launch(args: dict[str, Any], programs: int) -> None:
    """Launch the kernel with the arguments of `launch_backward.prepare`, whose tiles and warps are those of the default plan."""
    own = {name: args[name] for name in backward_hopper_kernel.arg_names}
    enqueue(backward_hopper_kernel, (programs,), **own, num_warps=8, enable_fp_fusion=False)
