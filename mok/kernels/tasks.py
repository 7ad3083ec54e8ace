"""The forward's work as one list of tasks, in the order in which programs take them: plain data, written on the device.

    pull minibatch 0 | up of the shared experts | block 0 | block 1 | ...
    block b: up of minibatch b, then down of minibatch b - 1 (block 0: down of the shared experts); the pulls of minibatch b + 1 are
             spread over the first part of the block.

A task waits only for tasks of earlier tickets, so the kernel ends however few programs are resident. A down task starts when the up tasks
it reads have had the time of a whole minibatch to finish. Within a minibatch the row tile runs fastest, so that programs working at the
same time share the tile of weights in the L2 cache.

Example, 3 tiles, 2 per minibatch, 1 part, 1 up and 1 down task per tile, no shared expert (P pull, U up, D down, - nothing to do):
    P0 P1 | P2 - U0 U1 | U2 D0 D1 | D2

A task is one int64: kind + 8 * (half + 2 * (part + 2^12 * (expert + 2^16 * tile))); half is 1 where at most the first half of a tile's
rows are real (padding rows are an expert's last).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of tasks.
NOTHING = tl.constexpr(0)
PULL = tl.constexpr(1)
UP = tl.constexpr(2)
DOWN = tl.constexpr(3)
SHARED_UP = tl.constexpr(4)
SHARED_DOWN = tl.constexpr(5)
END = tl.constexpr(7)

BLOCK_TICKETS = 256


def max_tickets(tiles: int, shared_tiles: int, minibatch_tiles: int, parts: int, ups: int, downs: int, shared_ups: int) -> int:
    """No schedule of at most `tiles` tiles has more tickets: pulls are counted for whole minibatches."""
    return (tiles + 2 * minibatch_tiles) * parts + tiles * (ups + downs) + shared_tiles * (shared_ups + downs)


@triton.jit
def count_tickets(
    num_tiles, shared_tiles,
    TILES: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr,
):  # fmt: skip
    """How many tickets there are. TILES per minibatch; PARTS, UPS, DOWNS per tile; SHARED_UPS per shared tile."""
    minibatches = tl.cdiv(num_tiles, TILES)
    pulls = tl.where(minibatches > 1, minibatches * TILES, num_tiles) * PARTS  # as if every minibatch were whole
    return pulls + num_tiles * (UPS + DOWNS) + shared_tiles * (SHARED_UPS + DOWNS)


@triton.jit
def decode_tickets(
    ticket, num_tiles, shared_tiles,
    TILES: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr,
):  # fmt: skip
    """A block of tickets -> (kind, tile, part): part of the rows (PULL), slice of I (UP) or pair of slices of H (DOWN)."""
    minibatches = tl.cdiv(num_tiles, TILES)
    head = tl.minimum(num_tiles, TILES) * PARTS
    shared_up = shared_tiles * SHARED_UPS
    size = tl.minimum(num_tiles, TILES) * UPS + shared_tiles * DOWNS + tl.where(minibatches > 1, TILES * PARTS, 0)  # of block 0
    full: tl.constexpr = TILES * (PARTS + UPS + DOWNS)  # tickets of blocks 1 .. minibatches - 2
    last = tl.minimum(TILES, num_tiles - tl.maximum(minibatches - 1, 0) * TILES) * UPS + TILES * DOWNS  # of block minibatches - 1

    q = ticket - head - shared_up - size
    block = tl.where(q < 0, 0, tl.minimum(1 + q // full, tl.maximum(minibatches - 1, 1)))
    q = tl.where(q < 0, q + size, q - (block - 1) * full)
    beyond = (minibatches > 1) & (block == minibatches - 1) & (block > 0) & (q >= last)
    q = tl.where(beyond, q - last, q)
    block = tl.where(beyond, block + 1, block)

    tiles = tl.minimum(TILES, tl.maximum(num_tiles - block * TILES, 0))
    before = tl.where(block == 0, shared_tiles, tl.minimum(TILES, num_tiles - (block - 1) * TILES))
    pulls = tl.where((block + 1) * TILES < num_tiles, TILES * PARTS, 0)
    step = (tiles * UPS + before * DOWNS) * 3 // (4 * tl.maximum(pulls, 1)) + 1
    pull = q // step
    is_pull = (pull < pulls) & (q % step == 0)
    up = q - tl.minimum(pull + 1, pulls)
    is_up = up < tiles * UPS
    down = up - tiles * UPS
    pull_tile = (block + 1) * TILES + pull // PARTS
    kind = tl.where(is_pull, tl.where(pull_tile < num_tiles, PULL, NOTHING), tl.where(is_up, UP, tl.where(block == 0, SHARED_DOWN, DOWN)))
    tiles = tl.maximum(tiles, 1)
    before = tl.maximum(before, 1)
    down_tile = tl.where(block == 0, 0, (block - 1) * TILES) + down % before
    tile = tl.where(is_pull, pull_tile, tl.where(is_up, block * TILES + up % tiles, down_tile))
    part = tl.where(is_pull, pull % PARTS, tl.where(is_up, up // tiles, down // before))

    q = ticket - head
    in_shared = (q >= 0) & (q < shared_up)
    some = tl.maximum(shared_tiles, 1)
    kind = tl.where(q < 0, PULL, tl.where(in_shared, SHARED_UP, kind))
    tile = tl.where(q < 0, ticket // PARTS, tl.where(in_shared, q % some, tile))
    part = tl.where(q < 0, ticket % PARTS, tl.where(in_shared, q // some, part))
    return kind, tile, part


@triton.jit(do_not_specialize=["num_signals", "tokens"])
def tasks_kernel(
    tasks_ptr, signals_ptr, tile_expert_ptr, peer_rank_ptr, num_tokens_ptr, num_signals, tokens,
    TILES: tl.constexpr, PARTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, SHARED_UPS: tl.constexpr,
    BLOCK_M: tl.constexpr, HALF_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the number of tasks, the list, and END; and clear the signals. HALF_TILES: mark half tiles."""
    num_tiles = tl.load(num_tokens_ptr) // BLOCK_M
    shared_tiles = 0
    if SHARED_UPS > 0:
        shared_tiles = tl.cdiv(tokens, BLOCK_M)
    total = count_tickets(num_tiles, shared_tiles, TILES, PARTS, UPS, DOWNS, SHARED_UPS)
    if tl.program_id(0) == 0:
        tl.store(tasks_ptr, total.to(tl.int64))
    for first in range(tl.program_id(0) * BLOCK, total + 1, tl.num_programs(0) * BLOCK):
        ticket = first + tl.arange(0, BLOCK)
        kind, tile, part = decode_tickets(ticket, num_tiles, shared_tiles, TILES, PARTS, UPS, DOWNS, SHARED_UPS)
        kind = tl.where(ticket < total, kind, END)
        routed = (kind == UP) | (kind == DOWN)
        expert = tl.load(tile_expert_ptr + tile, mask=routed, other=0)
        half = tl.zeros((BLOCK,), tl.int64)
        if HALF_TILES:
            half = (tl.load(peer_rank_ptr + tile * BLOCK_M + BLOCK_M // 2, mask=routed, other=0) < 0).to(tl.int64)
        task = kind.to(tl.int64) + 8 * (half + 2 * (part.to(tl.int64) + 4096 * (expert.to(tl.int64) + 65536 * tile.to(tl.int64))))
        tl.store(tasks_ptr + 1 + ticket, task, mask=ticket <= total)
    for first in range(tl.program_id(0) * BLOCK, num_signals, tl.num_programs(0) * BLOCK):
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
