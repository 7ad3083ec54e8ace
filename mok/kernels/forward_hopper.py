"""The forward kernel of `forward.py` for Hopper (sm_90), in Gluon, with a ring of loads that runs on over tasks.

The same signals, rows and bits, and tasks, but that one rank has no pulls. A step's operands, 64 columns of 128 rows and of 2 x 128 rows of
a pair, lie in one of STAGES stages; loads run AHEAD = STAGES - 1 steps ahead of the products. In a task's last AHEAD steps the stages that
become free receive the next task's first operands, if what it reads is there already by one reading of its signals. So they arrive while
this task's results are stored, and the next task begins with products. What such a task has to announce is announced in the next one's
first steps, when its stores are long complete.

    steps of task n    ..  K-3   K-2   K-1  | results stored, announced |   0     1     2   ..
    loads begun        ..  0'    1'    2'   |                           |   3'    4'    5'  ..

Steps are counted over all tasks of a program: step q uses stage q % STAGES, whose barrier is then in phase q // STAGES. A task that begins
at q puts its step i at q + i, whoever begins the load. So one bit says all about a task's first loads: they are under way, or its begin has
to start them. No load is under way when a program ends: only a task that will be executed is loaded for, and one that has been loaded for
waits for nothing.

One partition of 8 warps issues its own loads: a stage is free when both warpgroups have passed the wait for its product, which the barrier
that every step has anyway says. A warp of its own for the loads would have to learn every task and wait for its signals, too.

Rows of a tile are loaded in two halves, so that one descriptor serves whole and half tiles; a half tile's barrier expects fewer bytes.

With GATHER up tasks read their rows where they are, this rank's in x. The copy engine of Hopper takes no list of rows, so the threads copy
them, 16 bytes each, 128 rows of a half tile, too; the barrier then expects the pair's bytes alone. A step's copies are one group. A step
waits for the group of the next one, before the barrier of all threads that it has anyway, so a row has two steps' time to arrive where the
copy engine's have three. The first step's group is waited for by the task that begins the load: in its own last step, or at once.

Legend: H hidden, I intermediate, S width of the shared experts, K choices per token, R ranks.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from mok.kernels.dispatch import find_tokens
from mok.kernels.experts import in_order, rounded_halves, rounded_pairs, swiglu
from mok.kernels.forward import needs, wait_for_inputs
from mok.kernels.launcher import enqueue
from mok.kernels.signals import announce, finish_copy_engine_stores, order_copy_engine, peer_address
from mok.kernels.tasks import DOWN, END, PULL, SHARED_DOWN, SHARED_UP, UP, find, unpack
from mok.kernels.trace import BEGIN, COMPUTED, DONE, READY, note, note_begin, note_end

# By the names of Triton 3.6, or by later ones.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_shared = gl.shared_memory_descriptor
reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
gather_in = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

TILE = gl.constexpr(128)  # rows of a tile; rows of one matrix of a pair
STEP = gl.constexpr(64)  # columns of a step
STAGES = gl.constexpr(4)
AHEAD = gl.constexpr(3)
EARLY = gl.constexpr(2)  # steps of a task before the one before it is announced
THREADS = gl.constexpr(256)

ROWS_IN_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PAIR_IN_SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
PULLED = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0]))
GATHERED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # 16 bytes of a thread
PUSHED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # 16 lanes: 256 bytes of a row
WHOLE_SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16]))
HALF_SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16]))


@gluon.jit
def of_lane_0(values):
    """`tasks.of_lane_0`, with layouts."""
    return gl.sum(gl.gather(values, gl.zeros([1], gl.int32, LANES), 0), axis=0)


@gluon.jit
def operands(
    kind, tile, part, expert, ring, operand_descs, shared_operand_descs, H: gl.constexpr, I: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """-> (descriptor of rows, of pairs, first row, first row of the pair, steps) of an up or down task."""
    x_desc, h_desc, gate_up_desc, down_desc = operand_descs
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
        half_shared_x_desc, half_shared_h_desc, shared_gate_up_desc, shared_down_desc = shared_operand_descs
        if kind == SHARED_UP:
            a_desc = half_shared_x_desc
            b_desc = shared_gate_up_desc
            a_row = tile * TILE
            b_row = part * TILE
            steps = (H + STEP - 1) // STEP
        elif kind == SHARED_DOWN:
            a_desc = half_shared_h_desc
            b_desc = shared_down_desc
            a_row = tile * TILE
            b_row = column
            steps = (S + STEP - 1) // STEP
    return a_desc, b_desc, a_row, b_row, steps


@gluon.jit
def find_rows(peer_rank_ptr, peer_token_idx_ptr, tile, ring, rank, needed, K: gl.constexpr, R: gl.constexpr):
    """Of which rows a tile is gathered, if needed: those of x, numbered from 0; -1 for padding; and pulled ones, -2 - row of the ring."""
    lanes = gl.arange(0, TILE, gl.SliceLayout(1, GATHERED))
    rows = tile * TILE + lanes
    source = gl.load(peer_rank_ptr + rows, mask=(rows >= 0) & needed, other=-1)
    found = gl.where(source >= 0, gl.load(peer_token_idx_ptr + rows, mask=source >= 0, other=0) // K, -1)
    if R > 1:
        found = gl.where((source < 0) | (source == rank), found, -2 - (tile % ring) * TILE - lanes)
    return found


@gluon.jit
def copy_rows_in(desc, row, i, barrier, a, MORE: gl.constexpr, ROWS: gl.constexpr):
    """Begin the load of ROWS rows of step i by the copy engine; the barrier expects these bytes and MORE."""
    mbarrier.expect(barrier, 2 * ROWS * STEP + MORE)
    copy_in(desc, [row, i * STEP], barrier, a.slice(0, TILE // 2))
    if ROWS == TILE:
        copy_in(desc, [row + TILE // 2, i * STEP], barrier, a.slice(TILE // 2, TILE // 2))


@gluon.jit
def begin_load(
    a_desc, b_desc, a_row, b_row, x, rows, gathers, i, q, a_stages, b_stages, barriers, H: gl.constexpr, R: gl.constexpr,
    GATHER: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Begin the load of a task's step i, of its tile's first ROWS rows, into the stage of step q. GATHER: every step is one group of the
    threads' copies, of the rows of A if the task gathers, else of none, and A comes by the copy engine. x: this rank's rows and the ring of
    pulled ones, rows: of `find_rows`."""
    B_BYTES: gl.constexpr = 4 * TILE * STEP
    stage = q & (STAGES - 1)
    barrier = barriers.index(stage)
    a = a_stages.index(stage)
    if GATHER:
        if gathers:
            x_ptr, ring_ptr = x
            begins = x_ptr + rows.to(gl.int64) * H
            real = rows >= 0
            if R > 1:
                begins = gl.multiple_of(gl.where(real, begins, ring_ptr + (-2 - rows).to(gl.int64) * H), 16)  # bytes
                real = rows != -1
            columns = i * STEP + gl.arange(0, STEP, gl.SliceLayout(0, GATHERED))
            mask = real[:, None]
            if H % STEP != 0:
                mask = mask & (columns < H)[None, :]
            gather_in(a, begins[:, None] + columns[None, :], mask=mask)
            mbarrier.expect(barrier, B_BYTES)
        else:
            copy_rows_in(a_desc, a_row, i, barrier, a, B_BYTES, ROWS)
        async_copy.commit_group()
    else:
        copy_rows_in(a_desc, a_row, i, barrier, a, B_BYTES, ROWS)
    copy_in(b_desc, [0, b_row, i * STEP], barrier, b_stages.index(stage))


@gluon.jit
def gathers_are_in(GROUPS: gl.constexpr):
    """Every thread's copies but those of the last GROUPS groups are in shared memory, for the products that follow. A barrier of the
    threads: directly behind the wait, or Triton adds one."""
    async_copy.wait_group(GROUPS)
    thread_barrier()
    fence_async_shared()


@gluon.jit
def multiply_step(total, q, a_stages, b_stages, barriers, GATHER: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr = False):
    """Begin the product of step q, and wait for that of the step before it, whose stage every warp has then read. FIRST: of a task.

    GATHER: what was gathered for step q + 1 is there, too: of the loads that have begun only step q + 2's is behind it."""
    stage = q & (STAGES - 1)
    mbarrier.wait(barriers.index(stage), (q // STAGES) & 1)
    a = a_stages.index(stage).slice(0, ROWS)
    b = b_stages.index(stage).reshape([2 * TILE, STEP]).permute([1, 0])
    total = warpgroup_mma(a, b, total, use_acc=not FIRST, is_async=True)
    total = warpgroup_mma_wait(1, deps=[total])
    if GATHER:
        gathers_are_in(AHEAD - 2)
    else:
        thread_barrier()
    return total


@gluon.jit
def halves(total, staging, ROWS: gl.constexpr):
    """`experts.rounded_halves`. A half tile's warpgroups hold one tile of the pair each, so that they exchange them through staging."""
    if ROWS == TILE:
        first, second = rounded_halves(total, ROWS, TILE)
    else:
        place = reinterpret(staging, gl.bfloat16, [ROWS, 2 * TILE], ROWS_IN_SHARED)
        place.store(rounded_pairs(total))
        thread_barrier()
        first = place.slice(0, TILE, dim=1).load(PUSHED)
        second = place.slice(TILE, TILE, dim=1).load(PUSHED)
    return first, second


@gluon.jit
def by_rows(y, staging, ROWS: gl.constexpr):
    """A tile of `halves` in the layout of pushes."""
    rows = y
    if ROWS == TILE:
        thread_barrier()
        staging.store(y)
        thread_barrier()
        rows = staging.load(PUSHED)
    return rows


@gluon.jit
def store_tile(value, desc, row, column, staging, ROWS: gl.constexpr):
    """Begin the store of a bf16 tile from staging, which no store reads."""
    thread_barrier()
    place = staging.slice(0, ROWS)
    place.store(value)
    fence_async_shared()
    thread_barrier()
    copy_out(desc, [row, column], place)


@gluon.jit
def store_hidden(
    total, gate_first, stores, ring_row, row, column, saved_rows, limit, staging,
    CLAMP: gl.constexpr, SAVE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """`experts.store_hidden`: h, and gate and up of the first saved_rows rows. h's store is not finished."""
    h_desc, gate_desc, up_desc = stores
    first, second = halves(total, staging, ROWS)
    gate, up = in_order(first, second, gate_first)
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
    hidden = rounded_pairs(swiglu(gate, up, limit, CLAMP))
    store_tile(hidden, h_desc, ring_row, column, staging, ROWS)


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
def find_outputs(out_ptr, row, tokens, H: gl.constexpr, ROWS: gl.constexpr):
    """`find_slots` of the shared experts' output, in which a tile's rows lie in order."""
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, PUSHED))
    return out_ptr + rows.to(gl.int64) * H, gl.where(rows < tokens, 0, -1)


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
def of_others(peer_rank_ptr, row, rank, ROWS: gl.constexpr):
    """Whether any of ROWS rows comes from another rank."""
    source = gl.load(peer_rank_ptr + row + gl.arange(0, ROWS, LANES))
    return gl.max(((source >= 0) & (source != rank)).to(gl.int32), axis=0) != 0


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
    kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, descs, stores, places, pointers, signals, numbers,
    H: gl.constexpr, I: gl.constexpr, S: gl.constexpr, K: gl.constexpr, R: gl.constexpr, CLAMP: gl.constexpr, SHARED_CLAMP: gl.constexpr,
    SAVE: gl.constexpr, PARTS: gl.constexpr, GATHER_NEXT: gl.constexpr, ROWS: gl.constexpr, GATHER: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """An up or down task over the first ROWS rows of a tile, its first step at q. GATHER_NEXT: up tasks gather, GATHER: this is one.
    unannounced: from h_ready on, what the task before it has left to be announced, or -1. -> (the next task, whether its first loads are
    under way, what is left to be announced, steps)."""
    operand_descs, shared_operand_descs, shared_stores = descs
    a_stages, b_stages, staging, barriers = places
    tasks_ptr, x, shared_out_ptr, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr, trace_ptr = pointers
    x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr = signals
    num_tasks, rank, ring, max_tiles, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit = numbers
    UPS: gl.constexpr = (I + TILE - 1) // TILE
    DOWNS: gl.constexpr = (H + 2 * TILE - 1) // (2 * TILE)
    SHARED_UPS: gl.constexpr = (S + TILE - 1) // TILE
    SUMS: gl.constexpr = WHOLE_SUMS if ROWS == TILE else HALF_SUMS
    SHARED: gl.constexpr = (S > 0) & (ROWS == TILE) & (not GATHER)  # of a shared expert every tile is whole
    if GATHER:
        kind = UP
    row = tile * TILE
    a_desc, b_desc, a_row, b_row, steps = operands(
        kind, tile, part, expert, ring, operand_descs, shared_operand_descs, H, I, S if SHARED else 0
    )  # fmt: skip
    rows = 0
    if GATHER:
        rows = find_rows(peer_rank_ptr, peer_token_idx_ptr, tile, ring, rank, True, K, R)
    if loaded == 0:
        for i in gl.static_range(AHEAD):
            begin_load(a_desc, b_desc, a_row, b_row, x, rows, True, i, q + i, a_stages, b_stages, barriers, H, R, GATHER, ROWS)
        if GATHER:
            gathers_are_in(AHEAD - 1)
    total = gl.zeros([ROWS, 2 * TILE], gl.float32, SUMS)
    for i in gl.static_range(EARLY):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, GATHER, ROWS, i == 0)
        begin_load(a_desc, b_desc, a_row, b_row, x, rows, True, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, H, R, GATHER, ROWS)
    finish_copy_engine_stores(tile)
    if unannounced >= 0:
        announce(h_ready_ptr + unannounced)
    last = steps - AHEAD
    look = gl.maximum(last - 4, EARLY)
    turn = gl.maximum(last - 2, EARLY)
    # The next task is looked up in three moves, each of which has a few steps' time until the following one looks at what it fetched.
    for i in range(EARLY, look):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, GATHER, ROWS)
        begin_load(a_desc, b_desc, a_row, b_row, x, rows, True, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, H, R, GATHER, ROWS)
    following = find(tasks_ptr, taken, num_tasks, lanes)
    for i in range(look, turn):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, GATHER, ROWS)
        begin_load(a_desc, b_desc, a_row, b_row, x, rows, True, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, H, R, GATHER, ROWS)
    task = of_lane_0(following)
    next_kind, next_tile, next_part, next_expert, next_half = unpack(task)
    found, found_free = ask(
        next_kind, next_tile, ring, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, lanes, PARTS, UPS, DOWNS, SHARED_UPS
    )
    next_gathers = next_kind == UP
    next_rows = 0
    if GATHER_NEXT:
        next_rows = find_rows(peer_rank_ptr, peer_token_idx_ptr, next_tile, ring, rank, next_gathers, K, R)
    for i in range(turn, last):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, GATHER, ROWS)
        begin_load(a_desc, b_desc, a_row, b_row, x, rows, True, i + AHEAD, q + i + AHEAD, a_stages, b_stages, barriers, H, R, GATHER, ROWS)
    load_next = answer(found, found_free, next_kind, next_tile, ring, h_ready_ptr, PARTS, UPS, DOWNS, SHARED_UPS)
    order_copy_engine(next_tile)
    next_a_desc, next_b_desc, next_a_row, next_b_row, _ = operands(
        next_kind, next_tile, next_part, next_expert, ring, operand_descs, shared_operand_descs, H, I, S
    )
    if not GATHER:
        slots, source = find_slots(peer_rank_ptr, peer_token_idx_ptr, combine_ptr, combine_ptrs, row, kind == DOWN, H, R, ROWS)
    if SHARED:
        if kind == SHARED_DOWN:
            slots, source = find_outputs(shared_out_ptr, row, tokens, H, ROWS)
    for i in range(last, steps):
        total = multiply_step(total, q + i, a_stages, b_stages, barriers, GATHER_NEXT, ROWS)
        if load_next:
            to = q + i + AHEAD
            if next_half == 0:
                begin_load(
                    next_a_desc, next_b_desc, next_a_row, next_b_row, x, next_rows, next_gathers, i - last, to, a_stages, b_stages,
                    barriers, H, R, GATHER_NEXT, TILE,
                )  # fmt: skip
            else:
                begin_load(
                    next_a_desc, next_b_desc, next_a_row, next_b_row, x, next_rows, next_gathers, i - last, to, a_stages, b_stages,
                    barriers, H, R, GATHER_NEXT, TILE // 2,
                )  # fmt: skip
        elif GATHER_NEXT:
            async_copy.commit_group()  # so that all groups but one are those up to the next step, here, too
    total = warpgroup_mma_wait(0, deps=[total])
    if TRACE:
        note(trace_ptr, ticket, COMPUTED)
    unannounced = q * 0 - 1
    if SHARED:
        if kind == SHARED_UP:
            store_hidden(
                total, shared_gate_first, shared_stores, row, row, part * TILE, tokens, shared_limit, staging, SHARED_CLAMP, SAVE, ROWS
            )
            if load_next:
                unannounced = tile + 2 * max_tiles
            else:
                finish_copy_engine_stores(tile)
                announce(shared_h_ready_ptr + tile)
    if GATHER or (not GATHER_NEXT and kind == UP):
        store_hidden(total, gate_first, stores, a_row, row, part * TILE, saved_rows, limit, staging, CLAMP, SAVE, ROWS)
        if load_next:
            unannounced = tile
        else:
            finish_copy_engine_stores(tile)
            announce(h_ready_ptr + tile)
    elif kind != SHARED_UP:
        column = gl.minimum(part * (2 * TILE), H - 2 * TILE)
        ab, ac = halves(total, staging, ROWS)
        if kind == DOWN:
            if load_next:
                unannounced = tile + max_tiles
            else:
                announce(h_free_ptr + tile)
        push_to_slots(by_rows(ab, staging, ROWS), slots, source, column, H)
        push_to_slots(by_rows(ac, staging, ROWS), slots, source, column + TILE, H)
    return task, load_next.to(gl.int32), unannounced, steps


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
    SAVE: gl.constexpr, PARTS: gl.constexpr, GATHER: gl.constexpr, BLOCK_H: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """`forward.forward_kernel` without MXFP8; H, I and, if not 0, S of at least AHEAD + EARLY steps. GATHER: up tasks gather rows, this
    rank's from where they are; only others' are pulled, and PARTS is 0 if there are none."""
    UPS: gl.constexpr = (I + TILE - 1) // TILE
    DOWNS: gl.constexpr = (H + 2 * TILE - 1) // (2 * TILE)
    SHARED_UPS: gl.constexpr = (S + TILE - 1) // TILE
    x_ready_ptr = signals_ptr + 32
    h_ready_ptr = x_ready_ptr + max_tiles
    h_free_ptr = h_ready_ptr + max_tiles
    shared_h_ready_ptr = h_free_ptr + max_tiles
    a_stages = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, STEP], ROWS_IN_SHARED)
    b_stages = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, TILE, STEP], PAIR_IN_SHARED)
    staging = gl.allocate_shared_memory(gl.bfloat16, [TILE, TILE], ROWS_IN_SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    fence_async_shared()
    thread_barrier()
    operand_descs = (half_x_desc, half_h_desc, gate_up_desc, down_desc)
    shared_operand_descs = (half_shared_x_desc, half_shared_h_desc, shared_gate_up_desc, shared_down_desc)
    shared_stores = (store_shared_h_desc, save_shared_gate_desc, save_shared_up_desc)
    descs = (operand_descs, shared_operand_descs, shared_stores)
    stores = (store_h_desc, save_gate_desc, save_up_desc)
    half_stores = (store_half_h_desc, save_half_gate_desc, save_half_up_desc)
    places = (a_stages, b_stages, staging, barriers)
    lanes = gl.arange(0, THREADS, LANES)
    ones = gl.full([THREADS], 1, gl.int32, LANES)
    num_tasks = gl.load(tasks_ptr).to(gl.int32)
    taken = gl.atomic_add(signals_ptr + lanes, ones, mask=lanes == 0, sem="relaxed", scope="gpu")
    task = of_lane_0(find(tasks_ptr, taken, num_tasks, lanes))
    ticket = of_lane_0(taken) if TRACE else 0
    pointers = (tasks_ptr, (x_ptr, ring_ptr), shared_out_ptr, combine_ptr, combine_ptrs, peer_rank_ptr, peer_token_idx_ptr, trace_ptr)
    signals = (x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr)
    numbers = (num_tasks, rank, ring, max_tiles, tokens, saved_rows, gate_first, shared_gate_first, limit, shared_limit)
    if TRACE:
        note_begin(trace_ptr)
    q = num_tasks * 0  # steps begun by this program
    loaded = num_tasks * 0  # whether the task's first loads are under way,
    unannounced = num_tasks * 0 - 1  # and the signal, counted from h_ready, that the task before it left to be announced, or -1
    while (task & 7) != END:
        taken = gl.atomic_add(signals_ptr + lanes, ones, mask=lanes == 0, sem="relaxed", scope="gpu")
        if TRACE:
            note(trace_ptr, ticket, BEGIN)
        kind, tile, part, expert, half = unpack(task)
        ok = loaded != 0
        if loaded == 0:
            finish_copy_engine_stores(tile)
            ok = wait_for_inputs(
                kind, tile, x_ready_ptr, h_ready_ptr, h_free_ptr, shared_h_ready_ptr, control_ptrs, rank, ring, wait_limit,
                R, PARTS, UPS, DOWNS, SHARED_UPS,
            )  # fmt: skip
        if TRACE:
            note(trace_ptr, ticket, READY)
        task = task * 0 + END
        steps = q * 0
        if ok:
            if kind == PULL:
                if PARTS > 0:
                    ROWS: gl.constexpr = TILE // PARTS
                    row = tile * TILE + part * ROWS
                    if not GATHER or of_others(peer_rank_ptr, row, rank, ROWS):
                        pull_rows(
                            ((x_ptr, x_ptrs, ring_ptr),), peer_rank_ptr, peer_token_idx_ptr, row, (tile % ring) * TILE + part * ROWS,
                            1, H, K, R, ROWS, BLOCK_H,
                        )  # fmt: skip
                    following = find(tasks_ptr, taken, num_tasks, lanes)
                    finish_copy_engine_stores(tile)
                    announce(x_ready_ptr + tile)
                    task = of_lane_0(following)
            elif half != 0:
                if GATHER and kind == UP:
                    task, loaded, unannounced, steps = expert_task(
                        kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, descs, half_stores, places, pointers,
                        signals, numbers, H, I, S, K, R, CLAMP, SHARED_CLAMP, SAVE, PARTS, GATHER, TILE // 2, True, TRACE,
                    )  # fmt: skip
                else:
                    task, loaded, unannounced, steps = expert_task(
                        kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, descs, half_stores, places, pointers,
                        signals, numbers, H, I, S, K, R, CLAMP, SHARED_CLAMP, SAVE, PARTS, GATHER, TILE // 2, False, TRACE,
                    )  # fmt: skip
            elif GATHER and kind == UP:
                task, loaded, unannounced, steps = expert_task(
                    kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, descs, stores, places, pointers,
                    signals, numbers, H, I, S, K, R, CLAMP, SHARED_CLAMP, SAVE, PARTS, GATHER, TILE, True, TRACE,
                )  # fmt: skip
            else:
                task, loaded, unannounced, steps = expert_task(
                    kind, tile, part, expert, q, loaded, unannounced, ticket, taken, lanes, descs, stores, places, pointers,
                    signals, numbers, H, I, S, K, R, CLAMP, SHARED_CLAMP, SAVE, PARTS, GATHER, TILE, False, TRACE,
                )  # fmt: skip
        q += steps
        if TRACE:
            note(trace_ptr, ticket, DONE)
            ticket = of_lane_0(taken)
    if TRACE:
        note_end(trace_ptr)


def launch(args: dict[str, Any], programs: int) -> None:
    """Launch the kernel with the arguments of `launch.kernel_arguments`, whose tiles and warps are those of the default plan."""
    own = {name: args[name] for name in forward_hopper_kernel.arg_names}
    enqueue(forward_hopper_kernel, (programs,), **own, num_warps=8)
