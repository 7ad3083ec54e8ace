"""The forward's work as one list of tasks, in the order in which programs take them: plain data, written on the device.

    block 0: pull minibatch 0 | up of the shared experts | up of minibatch 0, then down of the shared experts
    block b: up of minibatch b, then down of minibatch b - 1
    The pulls of minibatch b + 1 are spread over the first part of block b, of block 0 after the second bar.

A task waits only for tasks of earlier tickets, so the kernel ends however few programs are resident. A down task starts when the up tasks
it reads have had the time of a whole minibatch to finish. Within a minibatch the row tile runs fastest, so that programs working at the
same time share the tile of weights in the L2 cache. Minibatches begin where experts do, if one begins near enough: a minibatch of tiles of
two experts reads the weights of both.

Example, 3 tiles of one expert, 2 per minibatch, 1 part, 1 up and 1 down task per tile, no shared expert (P pull, U up, D down):
    P0 P1 | P2 U0 U1 | U2 D0 D1 | D2

A task is one int64: kind + 8 * (half + 2 * (part + 2^12 * (expert + 2^16 * tile))); half is 1 where at most the first half of a tile's
rows are real (padding rows are an expert's last).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of tasks.
PULL = tl.constexpr(1)
UP = tl.constexpr(2)
DOWN = tl.constexpr(3)
SHARED_UP = tl.constexpr(4)
SHARED_DOWN = tl.constexpr(5)
END = tl.constexpr(7)

BLOCK_TICKETS = 256
PROGRAMS_PER_BLOCK = 4


def max_tickets(tiles: int, shared_tiles: int, parts: int, ups: int, downs: int, shared_ups: int) -> int:
    """A schedule of `tiles` tiles has so many tickets, one of fewer tiles has fewer."""
    return tiles * (parts + ups + downs) + shared_tiles * (shared_ups + downs)


def most_in_two_minibatches(minibatch_tiles: int) -> int:
    """Tiles of two minibatches one after the other, at most (`minibatch_start`)."""
    return 2 * minibatch_tiles + 2 * (minibatch_tiles // 4)


@triton.jit
def minibatch_start(tile_expert_ptr, num_tiles, minibatch, TILES: tl.constexpr):
    """The first tile of a minibatch: where the expert begins that begins nearest to minibatch * TILES, if that is at most TILES // 4 away
    (of two equally near ones the earlier), else minibatch * TILES. num_tiles for minibatches after the last.

    Example: TILES = 4, experts of 3, 6 and 3 tiles: 0, 3 (for 4), 9 (for 8), 12.
    """
    REACH: tl.constexpr = TILES // 4
    LANES: tl.constexpr = 2 * triton.next_power_of_2(REACH + 1)
    goal = minibatch * TILES
    lanes = tl.arange(0, LANES)
    tile = goal - REACH + lanes
    inside = (tile > 0) & (tile < num_tiles)
    expert = tl.load(tile_expert_ptr + tile, mask=inside, other=0)
    before = tl.load(tile_expert_ptr + tile - 1, mask=inside, other=0)
    begins = ((expert != before) | (tile == num_tiles)) & (lanes <= 2 * REACH)
    nearest = tl.min(tl.where(begins, 2 * tl.abs(tile - goal) + (tile > goal).to(tl.int32), 2 * LANES), axis=0)
    start = tl.where(nearest == 2 * LANES, goal, tl.where(nearest % 2 == 1, goal + nearest // 2, goal - nearest // 2))
    return tl.where(minibatch > 0, tl.minimum(start, num_tiles), 0)


@triton.jit
def decode(
    q, block, start, tiles, start_before, before, start_after, after, shared_tiles,
    PARTS: tl.constexpr, UPS: tl.constexpr, SHARED_UPS: tl.constexpr, DOWNS: tl.constexpr,
):  # fmt: skip
    """Places in a block -> (kind, tile, part): part of the rows (PULL), slice of I (UP) or pair of slices of H (DOWN).

    The block works on the tiles from `start` on (up), `start_before` (down) and `start_after` (pull).
    """
    PER_TILE: tl.constexpr = PARTS if PARTS > 0 else 1
    head = tl.where(block == 0, tiles * PARTS, 0)  # pulls of minibatch 0
    shared_up = tl.where(block == 0, shared_tiles * SHARED_UPS, 0)
    some = tl.maximum(shared_tiles, 1)
    is_head = q < head
    in_shared = (q >= head) & (q < head + shared_up)
    shared = q - head

    q -= head + shared_up
    downs = tl.where(block == 0, shared_tiles, before)
    pulls = after * PARTS
    step = (tiles * UPS + downs * DOWNS) * 3 // (4 * tl.maximum(pulls, 1)) + 1
    pull = q // step
    is_pull = (q >= 0) & (pull < pulls) & (q % step == 0)
    up = q - tl.minimum(pull + 1, pulls)
    is_up = up < tiles * UPS
    down = up - tiles * UPS
    down_tile = start_before + down % tl.maximum(downs, 1)
    kind = tl.where(is_pull, PULL, tl.where(is_up, UP, tl.where(block == 0, SHARED_DOWN, DOWN)))
    tile = tl.where(is_pull, start_after + pull // PER_TILE, tl.where(is_up, start + up % tl.maximum(tiles, 1), down_tile))
    part = tl.where(is_pull, pull % PER_TILE, tl.where(is_up, up // tl.maximum(tiles, 1), down // tl.maximum(downs, 1)))

    head_tile = tl.where(is_head, (shared + head) // PER_TILE, shared % some)
    head_part = tl.where(is_head, (shared + head) % PER_TILE, shared // some)
    early = is_head | in_shared
    return (
        tl.where(is_head, PULL, tl.where(in_shared, SHARED_UP, kind)), tl.where(early, head_tile, tile), tl.where(early, head_part, part)
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_signals", "tokens"])
def tasks_kernel(
    tasks_ptr, signals_ptr, tile_expert_ptr, peer_rank_ptr, num_tokens_ptr, num_signals, tokens,
    TILES: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr,
    BLOCK_M: tl.constexpr, HALF_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the number of tasks, the list, and END; and clear the signals. Grid: blocks, and programs of a block. HALF_TILES: mark half
    tiles."""
    num_tiles = tl.load(num_tokens_ptr) // BLOCK_M
    shared_tiles = 0
    if SHARED_UPS > 0:
        shared_tiles = tl.cdiv(tokens, BLOCK_M)
    of_shared = shared_tiles * (SHARED_UPS + DOWNS)
    total = num_tiles * (PARTS + UPS + DOWNS) + of_shared
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(tasks_ptr, total.to(tl.int64))
        tl.store(tasks_ptr + 1 + total, tl.full((), END, tl.int64))
    for block in range(tl.program_id(0), tl.cdiv(num_tiles, TILES) + 1, tl.num_programs(0)):
        start_before = minibatch_start(tile_expert_ptr, num_tiles, block - 1, TILES)
        start = minibatch_start(tile_expert_ptr, num_tiles, block, TILES)
        start_after = minibatch_start(tile_expert_ptr, num_tiles, block + 1, TILES)
        after = minibatch_start(tile_expert_ptr, num_tiles, block + 2, TILES) - start_after
        tiles = start_after - start
        before = start - start_before
        ticket = tl.where(block == 0, 0, start_after * PARTS + start * UPS + start_before * DOWNS + of_shared)  # the block's first
        size = (after + tl.where(block == 0, tiles, 0)) * PARTS + tiles * UPS + before * DOWNS + tl.where(block == 0, of_shared, 0)
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            q = first + tl.arange(0, BLOCK)
            kind, tile, part = decode(
                q, block, start, tiles, start_before, before, start_after, after, shared_tiles, PARTS, UPS, SHARED_UPS, DOWNS
            )
            routed = (q < size) & ((kind == UP) | (kind == DOWN))
            expert = tl.load(tile_expert_ptr + tile, mask=routed, other=0)
            half = tl.zeros((BLOCK,), tl.int64)
            if HALF_TILES:
                half = (tl.load(peer_rank_ptr + tile * BLOCK_M + BLOCK_M // 2, mask=routed, other=0) < 0).to(tl.int64)
            task = kind.to(tl.int64) + 8 * (half + 2 * (part.to(tl.int64) + 4096 * (expert.to(tl.int64) + 65536 * tile.to(tl.int64))))
            tl.store(tasks_ptr + 1 + ticket + q, task, mask=q < size)
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    for first in range(program * BLOCK, num_signals, tl.num_programs(0) * tl.num_programs(1) * BLOCK):
        signal = first + tl.arange(0, BLOCK)
        tl.store(signals_ptr + signal, tl.zeros((BLOCK,), tl.int32), mask=signal < num_signals)


@triton.jit
def unpack(task):
    """int64 -> kind, tile, part, expert, half."""
    kind = (task & 7).to(tl.int32)
    half = ((task >> 3) & 1).to(tl.int32)
    part = ((task >> 4) & 4095).to(tl.int32)
    expert = ((task >> 16) & 65535).to(tl.int32)
    return kind, (task >> 32).to(tl.int32), part, expert, half


@triton.jit
def find(tasks_ptr, tickets, num_tasks, lanes):
    """The task of the ticket that lane 0 holds, END for every ticket past the last; `of_lane_0` tells it to all, and only then waits."""
    return tl.load(tasks_ptr + 1 + tl.minimum(tickets, num_tasks), mask=lanes == 0, other=0)


@triton.jit
def of_lane_0(values):
    """The first of a program's values, one per thread, for all threads: through shared memory, which is faster than a reduction."""
    return tl.sum(tl.gather(values, tl.zeros((1,), tl.int32), 0), axis=0)
