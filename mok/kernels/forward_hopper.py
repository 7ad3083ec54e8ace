"""The forward kernel of `forward.py` for Hopper (sm_90), in Gluon, with a ring of loads that runs on over tasks.

The same tasks, signals, rows and bits. A step's operands, 64 columns of 128 rows and of 2 x 128 rows of a pair, lie in one of STAGES
stages; loads run AHEAD = STAGES - 1 steps ahead of the products. In a task's last AHEAD steps the stages that become free receive the
next task's first operands, if what it reads is there already by one reading of its signals. Then the next task begins with products, and
this one's results, rounded, are held in registers: the next one's first EARLY steps, while the tensor cores multiply, also apply the SwiGLU
to them, store or push them, and announce them. A task behind which nothing is loaded finishes its results at once.

    steps of task n    ..  K-3   K-2   K-1  |  0     1     2     3     4   ..
    loads begun        ..  0'    1'    2'   |  3'    4'    5'    6'    7'  ..
    results of n                    rounded |  stored ..         announced

A pull that comes next is put aside, and the task behind it looked up. If that is an up task that has been loaded for, the pull's rows go
by between its products, in chunks, FLYING of them on their way; else the pull is done before it. So a program waits for nothing before all
its pulls of earlier tickets are done.

Steps are counted over all tasks of a program: step q uses stage q % STAGES, whose barrier is then in phase q // STAGES. A task that begins
at q puts its step i at q + i, whoever begins the load. So one bit says all about a task's first loads: they are under way, or its begin has
to start them. No load is under way when a program ends: only a task that will be executed is loaded for, and one that has been loaded for
waits for nothing.

One partition of 8 warps issues its own loads: a stage is free when both warpgroups have passed the wait for its product, which the barrier
that every step has anyway says. A warp of its own for the loads would have to learn every task and wait for its signals, too.

Rows of a tile are loaded in two halves, so that one descriptor serves whole and half tiles; a half tile's barrier expects fewer bytes.

Legend: H hidden, I intermediate, S width of the shared experts, K choices per token, R ranks.
"""

from __future__ import annotations

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mok.kernels.dispatch import find_tokens
from mok.kernels.experts import gated, in_order, packed, rounded_pairs, swiglu, unpacked
from mok.kernels.forward import needs, wait_for_inputs
from mok.kernels.gradients import slices
from mok.kernels.signals import announce, finish_copy_engine_stores, order_copy_engine, peer_address
from mok.kernels.tasks import DOWN, END, PULL, SHARED_DOWN, SHARED_UP, UP, find, unpack
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end

# By the names of Triton 3.6, or by later ones.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_shared = gl.shared_memory_descriptor
reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

TILE = gl.constexpr(128)  # rows of a tile; rows of one matrix of a pair
STEP = gl.constexpr(64)  # columns of a step
STAGES = gl.constexpr(4)
AHEAD = gl.constexpr(3)
EARLY = gl.constexpr(5)  # steps of a task in which the one before it is finished
OUT = gl.constexpr(8)  # added to the kind of a held task whose results are on their way already
FLYING = gl.constexpr(3)  # chunks of a pull on their way between products
CHUNK_ROWS = gl.constexpr(16)
CHUNK = gl.constexpr(256)  # pairs of columns
THREADS = gl.constexpr(256)

ROWS_IN_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PAIRS_IN_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))  # the bytes of ROWS_IN_SHARED
PAIR_IN_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
PULLED = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0]))
PULLED_PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 2], [1, 0]))
PUSHED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # 16 lanes: 256 bytes of a row
WHOLE_SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16]))
HALF_SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16]))


@gluon.jit
def of_lane_0(values):
    """`tasks.of_lane_0`, with layouts."""
    return gl.sum(gl.gather(values, gl.zeros([1], gl.int32, LANES), 0), axis=0)


@gluon.jit
def operands(
    kind, tile, part, expert, ring, descs, H: gl.constexpr, I: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """-> (descriptor of rows, of pairs, first row, first row of the pair, steps) of an up or down task."""
    x_desc, h_desc, gate_up_desc, down_desc, shared_x_desc, shared_h_desc, shared_gate_up_desc, shared_down_desc = descs
    a_desc = h_desc
    b_desc = down_desc
    a_row = (tile % ring) * TILE
    column = gl.minimum(part * (2 * TILE), H - 2 * TILE)
    b_row = expert * H + column
    steps = (I + STEP - 1) // STEP
    if kind == UP:
        a_desc = x_desc
        b_desc = gate_up_desc
        b_row = expert * I + part * TILE
        steps = (H + STEP - 1) // STEP
    if S > 0:
        if kind == SHARED_UP:
            a_desc = shared_x_desc
            b_desc = shared_gate_up_desc
            a_row = tile * TILE
            b_row = part * TILE
            steps = (H + STEP - 1) // STEP
        elif kind == SHARED_DOWN:
            a_desc = shared_h_desc
            b_desc = shared_down_desc
            a_row = tile * TILE
            b_row = column
            steps = (S + STEP - 1) // STEP
    return a_desc, b_desc, a_row, b_row, steps


@gluon.jit
def begin_load(a_desc, b_desc, a_row, b_row, i, q, a_stages, b_stages, barriers, ROWS: gl.constexpr):
    """Begin the load of a task's step i, of its tile's first ROWS rows, into the stage of step q."""
    BYTES: gl.constexpr = 2 * (ROWS + 2 * TILE) * STEP
    stage = q & (STAGES - 1)
    barrier = barriers.index(stage)
    a = a_stages.index(stage)
    mbarrier.expect(barrier, BYTES)
    copy_in(a_desc, [a_row, i * STEP], barrier, a.slice(0, TILE // 2))
    if ROWS == TILE:
        copy_in(a_desc, [a_row + TILE // 2, i * STEP], barrier, a.slice(TILE // 2, TILE // 2))
    copy_in(b_desc, [0, b_row, i * STEP], barrier, b_stages.index(stage))


@gluon.jit
def multiply_step(total, q, a_stages, b_stages, barriers, ROWS: gl.constexpr, FIRST: gl.constexpr = False):
    """Begin the product of step q, and wait for that of the step before it, whose stage every warp has then read. FIRST: of a task."""
    stage = q & (STAGES - 1)
    mbarrier.wait(barriers.index(stage), (q // STAGES) & 1)
    a = a_stages.index(stage).slice(0, ROWS)
    b = b_stages.index(stage).reshape([2 * TILE, STEP]).permute([1, 0])
    total = warpgroup_mma(a, b, total, use_acc=not FIRST, is_async=True)
    total = warpgroup_mma_wait(1, deps=[total])
    thread_barrier()
    return total


@gluon.jit
def halves(total, staging):
    """`experts.rounded_halves` of half a tile, in the layout of pushes: its warpgroups hold one tile of the pair each, so that they
    exchange them through staging."""
    place = reinterpret(staging, gl.bfloat16, [TILE // 2, 2 * TILE], ROWS_IN_SHARED)
    place.store(rounded_pairs(total))
    thread_barrier()
    return place.slice(0, TILE, dim=1).load(PUSHED), place.slice(TILE, TILE, dim=1).load(PUSHED)


@gluon.jit
def store_half_tile(value, desc, row, column, staging):
    """Begin the store of half a bf16 tile from staging, which no store reads."""
    thread_barrier()
    place = staging.slice(0, TILE // 2)
    place.store(value)
    fence_async_shared()
    thread_barrier()
    copy_out(desc, [row, column], place)


@gluon.jit
def store_half_hidden(
    total, gate_first, h_desc, gate_desc, up_desc, ring_row, row, column, saved_rows, limit, staging,
    CLAMP: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """`experts.store_hidden` of half a tile, whose other half is padding. h's store is not finished."""
    ROWS: gl.constexpr = TILE // 2
    first, second = halves(total, staging)
    gate, up = in_order(first, second, gate_first)
    if SAVE:
        if row < saved_rows:
            store_half_tile(gate, gate_desc, row, column, staging)
            tma.store_wait(0)
            store_half_tile(up, up_desc, row, column, staging)
            tma.store_wait(0)
            store_half_tile(gl.full([ROWS, TILE], 0, gl.bfloat16, PUSHED), gate_desc, row + ROWS, column, staging)
            copy_out(up_desc, [row + ROWS, column], staging.slice(0, ROWS))
            tma.store_wait(0)
    hidden = rounded_pairs(swiglu(gate, up, limit, CLAMP))
    store_half_tile(hidden, h_desc, ring_row, column, staging)


@gluon.jit
def finish_stores(i: gl.constexpr, first, second, first_desc, second_desc, first_at, second_at, staging):
    """Step i of the stores of two whole tiles, of `in_pairs`, one after the other, in an order of three steps with a barrier before each.
    The second one's is not finished."""
    pairs = reinterpret(staging, gl.int32, [TILE, TILE // 2], PAIRS_IN_SHARED)
    if i == 0:
        pairs.store(first)
        fence_async_shared()
    elif i == 1:
        copy_out(first_desc, first_at, staging)
        tma.store_wait(0)
        thread_barrier()
        pairs.store(second)
        fence_async_shared()
    elif i == 2:
        copy_out(second_desc, second_at, staging)


@gluon.jit
def finish_hidden(
    i: gl.constexpr, first, second, gate_first, h_desc, gate_desc, up_desc, ring_row, row, column, saved_rows, limit, staging,
    CLAMP: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """Step i of `experts.store_hidden` for a whole tile, of `in_pairs`, in an order of four steps with a barrier before each. h's store is
    not finished."""
    FIRST: gl.constexpr = 2 if SAVE else 0
    gate = gl.where(gate_first != 0, first, second)
    up = gl.where(gate_first != 0, second, first)
    pairs = reinterpret(staging, gl.int32, [TILE, TILE // 2], PAIRS_IN_SHARED)
    if SAVE:
        if row < saved_rows:
            finish_stores(i, gate, up, gate_desc, up_desc, [row, column], [row, column], staging)
            if i == 2:
                tma.store_wait(0)
                thread_barrier()
    if (i == FIRST) | (i == FIRST + 1):
        gates = slices(gate, TILE, TILE // 2, TILE // 4)
        ups = slices(up, TILE, TILE // 2, TILE // 4)
        gate_low, gate_high = unpacked(gates[i - FIRST])
        up_low, up_high = unpacked(ups[i - FIRST])
        hidden = packed(gated(gate_low, up_low, limit, CLAMP), gated(gate_high, up_high, limit, CLAMP))
        pairs.slice((i - FIRST) * (TILE // 4), TILE // 4, dim=1).store(hidden)
        if i == FIRST + 1:
            fence_async_shared()
            thread_barrier()
            copy_out(h_desc, [ring_row, column], staging)


@gluon.jit
def nowhere():
    none = gl.full([TILE], -1, gl.int32, gl.SliceLayout(1, PUSHED))
    return none, none


@gluon.jit
def find_rows(tile, routed, shared, tokens, peer_rank_ptr, peer_token_idx_ptr, S: gl.constexpr):
    """Where a tile's rows go: the slot of each, -1 for padding, and the rank it is on, if routed; in order, if shared; else nowhere."""
    rows = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, PUSHED))
    routed = (rows >= 0) & routed
    source = gl.load(peer_rank_ptr + rows, mask=routed, other=-1)
    slot = gl.where(source >= 0, gl.load(peer_token_idx_ptr + rows, mask=routed, other=0), -1)
    if S > 0:
        slot = gl.where(shared & (rows < tokens), rows, slot)
    return slot, source


@gluon.jit
def push_rows(
    y, slot, source, shared, column, out_ptr, out_ptrs, shared_out_ptr, H: gl.constexpr, R: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Store a bf16 tile row by row to where `find_rows` says."""
    if R == 1:
        to = out_ptr + slot.to(gl.int64) * H
    else:
        to = peer_address(out_ptrs, gl.maximum(source, 0), gl.bfloat16) + slot.to(gl.int64) * H
    if S > 0:
        if shared:
            to = shared_out_ptr + slot.to(gl.int64) * H
    columns = column + gl.arange(0, TILE, gl.SliceLayout(0, PUSHED))
    gl.store(to[:, None] + columns[None, :], y, mask=(slot >= 0)[:, None] & (columns < H)[None, :])


@gluon.jit
def finish_pushes(
    i: gl.constexpr, first, second, slot, source, shared, column, staging, out_ptr, out_ptrs, shared_out_ptr,
    H: gl.constexpr, R: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Step i of the push of a whole tile's two slices, of `in_pairs`, in an order of three steps with a barrier before each."""
    pairs = reinterpret(staging, gl.int32, [TILE, TILE // 2], PAIRS_IN_SHARED)
    if i == 0:
        pairs.store(first)
    elif i == 1:
        push_rows(staging.load(PUSHED), slot, source, shared, column, out_ptr, out_ptrs, shared_out_ptr, H, R, S)
        thread_barrier()
        pairs.store(second)
    elif i == 2:
        push_rows(staging.load(PUSHED), slot, source, shared, column + TILE, out_ptr, out_ptrs, shared_out_ptr, H, R, S)


@gluon.jit
def finish_step(
    i: gl.constexpr, held, slot, source, hidden_descs, shared_descs, staging, shared_out_ptr, combine_ptr, combine_ptrs,
    h_ready_ptr, h_free_ptr, shared_h_ready_ptr, ring, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit,
    H: gl.constexpr, R: gl.constexpr, S: gl.constexpr, CLAMP: gl.constexpr, SHARED_CLAMP: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """Step i of EARLY of what a held task has left to be done. A barrier stands before each."""
    state, tile, part, results = held
    first, second = slices(results, TILE, TILE, TILE // 2)
    kind = state & (OUT - 1)
    row = tile * TILE
    if i == EARLY - 1:
        finish_copy_engine_stores(tile)
    if S > 0:
        if kind == SHARED_UP:
            h_desc, gate_desc, up_desc = shared_descs
            finish_hidden(
                i, first, second, shared_gate_first, h_desc, gate_desc, up_desc, row, row, part * TILE, tokens, shared_limit, staging,
                SHARED_CLAMP, SAVE,
            )  # fmt: skip
            if i == EARLY - 1:
                announce(shared_h_ready_ptr + tile)
    if kind == UP:
        if state == UP:
            h_desc, gate_desc, up_desc = hidden_descs
            finish_hidden(
                i, first, second, gate_first, h_desc, gate_desc, up_desc, (tile % ring) * TILE, row, part * TILE, saved_rows, limit,
                staging, CLAMP, SAVE,
            )  # fmt: skip
        if i == EARLY - 1:
            announce(h_ready_ptr + tile)
    if kind == DOWN:
        if i == 0:  # h was read; a signal behind the pushes would wait for them
            finish_copy_engine_stores(tile)
            announce(h_free_ptr + tile)
    if (state == DOWN) | (state == SHARED_DOWN):
        column = gl.minimum(part * (2 * TILE), H - 2 * TILE)
        finish_pushes(
            i, first, second, slot, source, kind == SHARED_DOWN, column, staging, combine_ptr, combine_ptrs, shared_out_ptr, H, R, S
        )  # fmt: skip


@gluon.jit
def in_pairs(total):
    """Sums [128, 256], rounded to bf16, as int32 [128, 128] of two neighbours each: 16-bit values that are carried from task to task are
    taken apart and put together again."""
    low, high = gl.split(gl.reshape(total, [TILE, TILE, 2]))
    return packed(low, high)


@gluon.jit
def nothing_held(zero):
    return zero, zero, zero, in_pairs(gl.zeros([TILE, 2 * TILE], gl.float32, WHOLE_SUMS))


@gluon.jit
def find_slots(
    peer_rank_ptr, peer_token_idx_ptr, combine_ptr, combine_ptrs, row, needed, H: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Addresses of the slots of a tile's rows, and whether a row is real, if needed."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, PUSHED))
    mask = (rows >= 0) & needed
    source = gl.load(peer_rank_ptr + rows, mask=mask, other=-1)
    slot = gl.load(peer_token_idx_ptr + rows, mask=mask, other=0)
    if R == 1:
        slots = combine_ptr + slot.to(gl.int64) * H
    else:
        slots = peer_address(combine_ptrs, gl.maximum(source, 0), gl.bfloat16) + slot.to(gl.int64) * H
    return slots, source


@gluon.jit
def push_to_slots(y, slots, source, column, H: gl.constexpr):
    """`experts.push_to_slots`, with layouts."""
    columns = column + gl.arange(0, TILE, gl.SliceLayout(0, PUSHED))
    gl.store(slots[:, None] + columns[None, :], y, mask=(source >= 0)[:, None] & (columns < H)[None, :])


@gluon.jit
def pull_rows(
    matrices, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
    COUNT: gl.constexpr, H: gl.constexpr, K: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, BLOCK_H: gl.constexpr,
):  # fmt: skip
    """`dispatch.pull_rows`, with layouts: parts of 16 rows and BLOCK_H columns, six on their way. matrices: for each of COUNT its own rows,
    the addresses of all ranks' rows, and the ring that takes them."""
    HIGH: gl.constexpr = min(16, ROWS)
    FLYING: gl.constexpr = 5
    WIDE: gl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    PARTS: gl.constexpr = ROWS // HIGH * COUNT * WIDE
    lanes = gl.arange(0, HIGH, gl.SliceLayout(1, PULLED))
    lane_columns = gl.arange(0, BLOCK_H, gl.SliceLayout(0, PULLED))
    tokens = ()
    slots = ()
    live = ()
    for group in gl.static_range(ROWS // HIGH):
        source = gl.load(peer_rank_ptr + row + group * HIGH + lanes)
        slot = gl.load(peer_token_idx_ptr + row + group * HIGH + lanes)
        for j in gl.static_range(COUNT):
            x_ptr, x_ptrs, ring_ptr = matrices[j]
            tokens = tokens + (find_tokens(x_ptr, x_ptrs, source, slot, H, K, R),)
            slots = slots + (ring_ptr + (ring_row + group * HIGH + lanes).to(gl.int64) * H,)
            live = live + (source >= 0,)
    ahead = ()
    for i in gl.static_range(PARTS + FLYING):
        if i < PARTS:
            columns = i % WIDE * BLOCK_H + lane_columns
            mask = live[i // WIDE][:, None]
            if H % BLOCK_H != 0:
                mask = mask & (columns < H)[None, :]
            ahead = ahead + (gl.load(tokens[i // WIDE][:, None] + columns[None, :], mask=mask, other=0),)
        if i >= FLYING:
            columns = (i - FLYING) % WIDE * BLOCK_H + lane_columns
            to = slots[(i - FLYING) // WIDE][:, None] + columns[None, :]
            if H % BLOCK_H != 0:
                gl.store(to, ahead[0], mask=(columns < H)[None, :])
            else:
                gl.store(to, ahead[0])
            ahead = ahead[1:]


@gluon.jit
def load_chunk(
    x_ptr, x_ptrs, peer_rank_ptr, peer_token_idx_ptr, row, i, live, H: gl.constexpr, K: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """Begin to load chunk i of the pull of the rows from `row` on, if it is a live one: pairs of CHUNK_ROWS rows; zeros for padding."""
    WIDE: gl.constexpr = (H // 2 + CHUNK - 1) // CHUNK
    lanes = gl.arange(0, CHUNK_ROWS, gl.SliceLayout(1, PULLED_PAIRS))
    rows = row + i // WIDE * CHUNK_ROWS + lanes
    source = gl.load(peer_rank_ptr + rows, mask=(lanes >= 0) & live, other=-1)
    slot = gl.load(peer_token_idx_ptr + rows, mask=(lanes >= 0) & live, other=0)
    tokens = find_tokens(x_ptr, x_ptrs, source, slot, H, K, R).to(gl.pointer_type(gl.int32))
    columns = i % WIDE * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, PULLED_PAIRS))
    mask = (source >= 0)[:, None]
    if H % (2 * CHUNK) != 0:
        mask = mask & (columns < H // 2)[None, :]
    return gl.load(tokens[:, None] + columns[None, :], mask=mask, other=0)


@gluon.jit
def store_chunk(ring_ptr, pairs, ring_row, i, live, H: gl.constexpr):
    """Store chunk i of a pull into the ring, if it is a live one."""
    WIDE: gl.constexpr = (H // 2 + CHUNK - 1) // CHUNK
    rows = ring_row + i // WIDE * CHUNK_ROWS + gl.arange(0, CHUNK_ROWS, gl.SliceLayout(1, PULLED_PAIRS))
    columns = i % WIDE * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, PULLED_PAIRS))
    to = ring_ptr.to(gl.pointer_type(gl.int32)) + (rows.to(gl.int64) * (H // 2))[:, None] + columns[None, :]
    gl.store(to, pairs, mask=((rows >= 0) & live)[:, None] & (columns < H // 2)[None, :])


@gluon.jit
def pull_between(
    total, q, a_desc, b_desc, a_row, b_row, a_stages, b_stages, barriers, x_ptr, x_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr,
    row, ring_row, H: gl.constexpr, K: gl.constexpr, R: gl.constexpr, CHUNKS: gl.constexpr, ROUNDS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Steps EARLY .. EARLY + ROUNDS * FLYING of a task, and between them the CHUNKS chunks of a pull."""
    flying = ()
    for _ in gl.static_range(FLYING):
        flying = flying + (gl.zeros([CHUNK_ROWS, CHUNK], gl.int32, PULLED_PAIRS),)
    for a_round in range(0, ROUNDS):
        begun = ()
        for j in gl.static_range(FLYING):
            chunk = a_round * FLYING + j
            i = EARLY + chunk
            total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
            begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
            before = chunk - FLYING
            store_chunk(ring_ptr, flying[j], ring_row, before, (before >= 0) & (before < CHUNKS), H)
            begun = begun + (load_chunk(x_ptr, x_ptrs, peer_rank_ptr, peer_token_idx_ptr, row, chunk, chunk < CHUNKS, H, K, R),)
        flying = begun
    return total


@gluon.jit
def read_if(signal_ptr, least, lanes):
    """Begin to read a signal without waiting, by lane 0, if something is asked of it; no other value of the result means anything."""
    return gl.atomic_add(signal_ptr + lanes, lanes * 0, mask=(lanes == 0) & (least > 0), sem="acquire", scope="gpu")


@gluon.jit
def multiplies(kind, SHARED_UPS: gl.constexpr):
    found = (kind == UP) | (kind == DOWN)
    if SHARED_UPS > 0:
        found = found | (kind == SHARED_UP) | (kind == SHARED_DOWN)
    return found


@gluon.jit
def least_values(
    kind, tile, ring, h_ready_ptr, PARTS: gl.constexpr, UPS: gl.constexpr, DOWNS: gl.constexpr, SHARED_UPS: gl.constexpr
):  # fmt: skip
    """What a task that multiplies needs its two signals to be: that of its rows, and that of its place of h, where 0 asks for nothing."""
    _, least, _ = needs(kind, tile, h_ready_ptr, h_ready_ptr, h_ready_ptr, ring, PARTS, UPS, SHARED_UPS)
    return gl.where(multiplies(kind, SHARED_UPS), least, 0), gl.where((kind == UP) & (tile >= ring), DOWNS, 0)


@gluon.jit
def ask(
    kind, tile, ring, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, lanes,
    PARTS: gl.constexpr, UPS: gl.constexpr, DOWNS: gl.constexpr, SHARED_UPS: gl.constexpr,
):  # fmt: skip
    """Begin to read the two signals of a task that multiplies; for `answer`."""
    signal, _, _ = needs(kind, tile, x_ready_ptr, h_ready_ptr, shared_h_ready_ptr, ring, PARTS, UPS, SHARED_UPS)
    least, least_free = least_values(kind, tile, ring, h_ready_ptr, PARTS, UPS, DOWNS, SHARED_UPS)
    found = read_if(signal, least, lanes)
    return found, read_if(gl.where(least_free > 0, h_free_ptr + tile - ring, signal), least_free, lanes)


@gluon.jit
def answer(
    found, found_free, kind, tile, ring, h_ready_ptr, PARTS: gl.constexpr, UPS: gl.constexpr, DOWNS: gl.constexpr, SHARED_UPS: gl.constexpr
):  # fmt: skip
    """Whether a task multiplies, and all that it waits for is there."""
    least, least_free = least_values(kind, tile, ring, h_ready_ptr, PARTS, UPS, DOWNS, SHARED_UPS)
    there = ((least == 0) | (found >= least)) & ((least_free == 0) | (found_free >= least_free))
    return multiplies(kind, SHARED_UPS) & (of_lane_0(there.to(gl.int32)) != 0)


@gluon.jit
def expert_task(
    kind, tile, part, expert, q, loaded, held, aside, ticket, taken, lanes, places, descs, out_descs, pointers, numbers,
    H: gl.constexpr, I: gl.constexpr, S: gl.constexpr, K: gl.constexpr, R: gl.constexpr, CLAMP: gl.constexpr, SHARED_CLAMP: gl.constexpr,
    SAVE: gl.constexpr, PARTS: gl.constexpr, UPS: gl.constexpr, DOWNS: gl.constexpr, SHARED_UPS: gl.constexpr, ROWS: gl.constexpr,
    CHUNKS: gl.constexpr, ROUNDS: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """An up or down task over the first ROWS rows of a tile, its first step at q. held: what the task before it has left to be finished
    (state, tile, part, `in_pairs`). aside: the pull that was put aside (its tile or -1, part, ticket); nothing is, if ROUNDS is 0. -> (the
    next task, whether its first loads are under way, what this one holds, steps, the next task's ticket in lane 0, what is put aside)."""
    aside_tile, aside_part, aside_ticket = aside
    a_stages, b_stages, staging, barriers = places
    hidden_descs, half_hidden_descs, shared_descs = out_descs
    (
        tasks_ptr, x_ptr, x_ptrs, ring_ptr, shared_out_ptr, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
        signals_ptr, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, trace_ptr,
    ) = pointers  # fmt: skip
    num_tasks, ring, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit = numbers
    SUMS: gl.constexpr = WHOLE_SUMS if ROWS == TILE else HALF_SUMS
    row = tile * TILE
    SHARED: gl.constexpr = (S > 0) & (ROWS == TILE)  # of a shared expert every tile is whole
    a_desc, b_desc, a_row, b_row, steps = operands(kind, tile, part, expert, ring, descs, H, I, S if SHARED else 0)
    if loaded == 0:
        for i in gl.static_range(AHEAD):
            begin_load(a_desc, b_desc, a_row, b_row, i, q + i, a_stages, b_stages, barriers, ROWS)
    total = gl.zeros([ROWS, 2 * TILE], gl.float32, SUMS)
    slot, source = nowhere()
    begun = q * 0 + EARLY
    free = lanes * 0
    PULLS: gl.constexpr = (ROUNDS > 0) & (ROWS == TILE)
    if PULLS:
        place = h_ready_ptr + gl.maximum(aside_tile - ring, 0)  # whose rows the pull replaces
        free = read_if(place, gl.where(aside_tile >= ring, UPS, 0), lanes)
    for i in gl.static_range(EARLY):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS, i == 0)
        begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
        if i == 0:
            slot, source = find_rows(
                held[1], held[0] == DOWN, held[0] == SHARED_DOWN, tokens, peer_rank_ptr, peer_token_idx_ptr, S
            )  # fmt: skip
        finish_step(
            i, held, slot, source, hidden_descs, shared_descs, staging, shared_out_ptr, combine_ptr, combine_ptrs,
            h_ready_ptr, h_free_ptr, shared_h_ready_ptr, ring, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit,
            H, R, S, CLAMP, SHARED_CLAMP, SAVE,
        )  # fmt: skip
    if PULLS:
        if (aside_tile >= 0) & (kind == UP):
            if (aside_tile < ring) | (of_lane_0(free) >= UPS):
                order_copy_engine(aside_tile)
                PULL_ROWS: gl.constexpr = TILE // PARTS
                total = pull_between(
                    total, q, a_desc, b_desc, a_row, b_row, a_stages, b_stages, barriers, x_ptr, x_ptrs, ring_ptr,
                    peer_rank_ptr, peer_token_idx_ptr, aside_tile * TILE + aside_part * PULL_ROWS,
                    (aside_tile % ring) * TILE + aside_part * PULL_ROWS, H, K, R, CHUNKS, ROUNDS, ROWS,
                )  # fmt: skip
                begun = begun + ROUNDS * FLYING
    last = steps - AHEAD
    look = gl.maximum(last - (8 if ROUNDS > 0 else 4), begun)
    turn = gl.maximum(last - 2, begun)
    # The next task is looked up in a few moves, each of which has a few steps' time until the following one looks at what it fetched.
    if PULLS:
        soon = gl.minimum(begun + FLYING, look)
        for i in range(begun, soon):
            total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
            begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
        if begun > EARLY:  # the stores had some steps' time
            finish_copy_engine_stores(aside_tile)
            announce(x_ready_ptr + aside_tile)
            if TRACE:  # it took no time of its own
                note(trace_ptr, aside_ticket, BEGIN)
                note(trace_ptr, aside_ticket, READY)
                note(trace_ptr, aside_ticket, DONE)
            aside_tile = aside_tile * 0 - 1
        begun = soon
    for i in range(begun, look):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
        begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
    following = find(tasks_ptr, taken, num_tasks, lanes)
    next_is_pull = q < 0
    if ROUNDS > 0:
        second = gl.maximum(last - 6, begun)
        third = gl.maximum(last - 4, begun)
        for i in range(look, second):
            total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
            begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
        next_task = of_lane_0(following)
        next_is_pull = ((next_task & 7) == PULL) & (aside_tile < 0)
        behind = gl.atomic_add(signals_ptr + lanes, lanes * 0 + 1, mask=(lanes == 0) & next_is_pull, sem="relaxed", scope="gpu")
        for i in range(second, third):
            total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
            begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
        following = find(tasks_ptr, gl.where(next_is_pull, behind, 0), num_tasks, lanes)
        for i in range(third, turn):
            total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
            begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
        if next_is_pull:
            _, aside_tile, aside_part, _, _ = unpack(next_task)
            if TRACE:
                aside_ticket = of_lane_0(taken)
            next_task = of_lane_0(following)
            taken = behind
        task = next_task
    else:
        for i in range(look, turn):
            total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
            begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
        task = of_lane_0(following)
    next_kind, next_tile, next_part, next_expert, next_half = unpack(task)
    found, found_free = ask(
        next_kind, next_tile, ring, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, lanes, PARTS, UPS, DOWNS, SHARED_UPS
    )
    for i in range(turn, last):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
        begin_load(a_desc, b_desc, a_row, b_row, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, ROWS)
    load_next = answer(found, found_free, next_kind, next_tile, ring, h_ready_ptr, PARTS, UPS, DOWNS, SHARED_UPS)
    load_next = load_next & ((aside_tile < 0) | (next_is_pull & (next_kind == UP) & (next_half == 0)))  # else what is aside is pulled first
    order_copy_engine(next_tile)
    next_a_desc, next_b_desc, next_a_row, next_b_row, _ = operands(
        next_kind, next_tile, next_part, next_expert, ring, descs, H, I, S
    )  # fmt: skip
    if ROWS < TILE:
        slots, sources = find_slots(peer_rank_ptr, peer_token_idx_ptr, combine_ptr, combine_ptrs, row, kind == DOWN, H, R, ROWS)
    for i in range(last, steps):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, ROWS)
        if load_next:
            to = q + i + AHEAD
            if next_half == 0:
                begin_load(next_a_desc, next_b_desc, next_a_row, next_b_row, i - last, to, a_stages, b_stages, barriers, TILE)
            else:
                begin_load(next_a_desc, next_b_desc, next_a_row, next_b_row, i - last, to, a_stages, b_stages, barriers, TILE // 2)
    total = warpgroup_mma_wait(0, deps=[total])
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    if ROWS == TILE:
        results = in_pairs(total)
        state = kind
    else:
        _, _, _, results = nothing_held(q * 0)
        if kind == UP:
            h_desc, gate_desc, up_desc = half_hidden_descs
            store_half_hidden(
                total, gate_first, h_desc, gate_desc, up_desc, a_row, row, part * TILE, saved_rows, limit, staging,
                CLAMP, SAVE,
            )  # fmt: skip
        else:
            column = gl.minimum(part * (2 * TILE), H - 2 * TILE)
            ab, ac = halves(total, staging)
            push_to_slots(ab, slots, sources, column, H)
            push_to_slots(ac, slots, sources, column + TILE, H)
        state = kind + OUT
    if load_next == 0:
        slot, source = find_rows(tile, state == DOWN, state == SHARED_DOWN, tokens, peer_rank_ptr, peer_token_idx_ptr, S)
        for j in gl.static_range(EARLY):
            thread_barrier()
            finish_step(
                j, (state, tile, part, results), slot, source, hidden_descs, shared_descs, staging, shared_out_ptr,
                combine_ptr, combine_ptrs, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, ring, tokens, saved_rows, gate_first,
                shared_gate_first, limit, shared_limit, H, R, S, CLAMP, SHARED_CLAMP, SAVE,
            )  # fmt: skip
        state = state * 0
    return task, load_next.to(gl.int32), (state, tile, part, results), steps, taken, (aside_tile, aside_part, aside_ticket)


@gluon.jit(do_not_specialize=["rank", "max_tiles", "ring", "tokens", "saved_rows", "gate_first", "shared_gate_first", "wait_limit"])
def forward_hopper_kernel(
    x_ptr, x_ptrs, combine_ptr, combine_ptrs, control_ptrs, peer_rank_ptr, peer_token_idx_ptr, tasks_ptr, ring_ptr,
    half_x_desc, half_h_desc, gate_up_desc, down_desc, store_h_desc, save_gate_desc, save_up_desc,
    store_half_h_desc, save_half_gate_desc, save_half_up_desc,
    half_shared_x_desc, half_shared_h_desc, store_shared_h_desc, shared_gate_up_desc, shared_down_desc,
    save_shared_gate_desc, save_shared_up_desc,
    shared_out_ptr, signals_ptr, trace_ptr,
    rank, max_tiles, ring, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit, wait_limit,
    H: gl.constexpr, I: gl.constexpr, S: gl.constexpr, K: gl.constexpr, R: gl.constexpr, CLAMP: gl.constexpr, SHARED_CLAMP: gl.constexpr,
    SAVE: gl.constexpr, PARTS: gl.constexpr, BLOCK_H: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """`forward.forward_kernel` without MXFP8; H, I and, if not 0, S of at least AHEAD + EARLY steps."""
    UPS: gl.constexpr = (I + TILE - 1) // TILE
    DOWNS: gl.constexpr = (H + 2 * TILE - 1) // (2 * TILE)
    SHARED_UPS: gl.constexpr = (S + TILE - 1) // TILE
    x_ready_ptr = signals_ptr + 32
    h_ready_ptr = x_ready_ptr + max_tiles
    h_free_ptr = h_ready_ptr + max_tiles
    shared_h_ready_ptr = h_free_ptr + max_tiles
    PULL_ROWS: gl.constexpr = TILE // PARTS
    CHUNKS: gl.constexpr = PULL_ROWS // CHUNK_ROWS * ((H // 2 + CHUNK - 1) // CHUNK)
    MOST_ROUNDS: gl.constexpr = (CHUNKS + FLYING - 1) // FLYING + 1
    # Rounds of chunks between the products of an up task, if it has enough steps.
    ROUNDS: gl.constexpr = MOST_ROUNDS if CHUNKS > 0 and EARLY + AHEAD + MOST_ROUNDS * FLYING <= (H + STEP - 1) // STEP else 0
    a_stages = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, STEP], ROWS_IN_SHARED)
    b_stages = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, TILE, STEP], PAIR_IN_SHARED)
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
    q = num_tasks * 0  # steps begun by this program
    loaded = num_tasks * 0  # whether the task's first loads are under way,
    held = nothing_held(num_tasks * 0)  # and what the task before it has left to be finished
    places = (a_stages, b_stages, staging, barriers)
    descs = (
        half_x_desc, half_h_desc, gate_up_desc, down_desc, half_shared_x_desc, half_shared_h_desc, shared_gate_up_desc, shared_down_desc
    )  # fmt: skip
    out_descs = (
        (store_h_desc, save_gate_desc, save_up_desc), (store_half_h_desc, save_half_gate_desc, save_half_up_desc),
        (store_shared_h_desc, save_shared_gate_desc, save_shared_up_desc),
    )  # fmt: skip
    pointers = (
        tasks_ptr, x_ptr, x_ptrs, ring_ptr, shared_out_ptr, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr,
        signals_ptr, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, trace_ptr,
    )  # fmt: skip
    numbers = (num_tasks, ring, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit)
    aside = (num_tasks * 0 - 1, num_tasks * 0, num_tasks * 0)  # a pull that was put aside
    while ((task & 7) != END) | (aside[0] >= 0):
        kind, tile, part, expert, half = unpack(task)
        was_aside = (aside[0] >= 0) & (loaded == 0)  # a pull before this task
        number = ticket
        if ROUNDS > 0:
            kind = gl.where(was_aside, PULL, kind)
            tile = gl.where(was_aside, aside[0], tile)
            part = gl.where(was_aside, aside[1], part)
            if TRACE:
                number = gl.where(was_aside, aside[2], ticket)
            aside = (gl.where(was_aside, -1, aside[0]), aside[1], aside[2])
        taken = gl.atomic_add(signals_ptr + lanes, ones, mask=(lanes == 0) & (was_aside == 0), sem="relaxed", scope="gpu")
        if TRACE:
            note(trace_ptr, number, BEGIN)
        ok = loaded != 0
        if loaded == 0:
            ok = wait_for_inputs(
                kind, tile, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, control_ptrs, rank, ring, wait_limit,
                R, PARTS, UPS, DOWNS, SHARED_UPS,
            )  # fmt: skip
        if TRACE:
            note(trace_ptr, number, READY)
        this = task
        task = task * 0 + END
        steps = q * 0
        if ok:
            if kind == PULL:
                pull_rows(
                    ((x_ptr, x_ptrs, ring_ptr),), peer_rank_ptr, peer_token_idx_ptr, tile * TILE + part * PULL_ROWS,
                    (tile % ring) * TILE + part * PULL_ROWS, 1, H, K, R, PULL_ROWS, BLOCK_H,
                )  # fmt: skip
                following = find(tasks_ptr, gl.where(was_aside, 0, taken), num_tasks, lanes)
                finish_copy_engine_stores(tile)
                announce(x_ready_ptr + tile)
                task = gl.where(was_aside, this, of_lane_0(following))
                held = nothing_held(q * 0)
            elif half != 0:
                task, loaded, held, steps, taken, aside = expert_task(
                    kind, tile, part, expert, q, loaded, held, aside, ticket, taken, lanes, places, descs, out_descs, pointers, numbers,
                    H, I, S, K, R, CLAMP, SHARED_CLAMP, SAVE, PARTS, UPS, DOWNS, SHARED_UPS, TILE // 2, CHUNKS, ROUNDS, TRACE,
                )  # fmt: skip
            else:
                task, loaded, held, steps, taken, aside = expert_task(
                    kind, tile, part, expert, q, loaded, held, aside, ticket, taken, lanes, places, descs, out_descs, pointers, numbers,
                    H, I, S, K, R, CLAMP, SHARED_CLAMP, SAVE, PARTS, UPS, DOWNS, SHARED_UPS, TILE, CHUNKS, ROUNDS, TRACE,
                )  # fmt: skip
        q += steps
        if TRACE:
            note(trace_ptr, number, DONE)
            ticket = gl.where(was_aside, ticket, of_lane_0(taken))
    if TRACE:
        note_end(trace_ptr)


@functools.cache
def layout_of(bits: int, rank: int) -> Any:
    """How blocks of a descriptor lie in shared memory. Making one takes as long as making a descriptor."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


def with_layouts(kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """A Gluon kernel's own arguments, of those of the ordinary kernel; descriptors know how their blocks lie in shared memory."""
    own = {name: args[name] for name in kernel.arg_names}
    for name, value in own.items():
        if name.endswith("_desc") and value is not None:
            layout = layout_of(8 * value.base.element_size(), len(value.block_shape))
            own[name] = TensorDescriptor(value.base, value.shape, value.strides, value.block_shape, layout)
    return own


def launch(args: dict[str, Any], programs: int) -> None:
    """Launch the kernel with the arguments of `launch.kernel_arguments`, whose tiles and warps are those of the default plan."""
    forward_hopper_kernel[(programs,)](**with_layouts(forward_hopper_kernel, args), num_warps=8)
