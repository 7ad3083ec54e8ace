"""The order of the backward's work: experts in groups, phase by phase within a group, as one list of tickets.

A group is a run of tiles, whole experts where they fit: it is closed when it has TARGET tiles, and never has more than MOST. An expert that does
not fit is cut; the sum that is cut lives on in memory, of which there is one copy, so a group that begins with the rest of a cut expert does
not end within another one. `plan_kernel` writes the groups into a table once per backward; every program finds its task by arithmetic from it.

    pulls of group 0 | shared experts: hidden, d_x, weight gradients | group 0 | group 1 | ...
    group g: gate and up again (tiles that saved none), hidden, d_x, weight gradients; the pulls of group g + 1 are spread over its first part.

Example, TARGET 2, MOST 3, tiles per expert [1, 2, 0, 5]: groups of tiles 0-2 (experts 0, 1), 3-5 (expert 2, which is empty, and the first part
of 3) and 6-7 (the rest of 3).

Legend: L experts of this rank, H hidden, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of tasks.
PULL = tl.constexpr(1)  # a part of a tile's dY, x and router weights
GATE_UP = tl.constexpr(2)  # gate and up of a slice of I again
HIDDEN = tl.constexpr(3)  # dY Wd of a slice of I, and the SwiGLU's gradient
D_X = tl.constexpr(4)  # a slice of d_gate Wg + d_up Wu
D_WEIGHT = tl.constexpr(5)  # a tile of one weight's gradient
SHARED_HIDDEN = tl.constexpr(6)
SHARED_D_X = tl.constexpr(7)
SHARED_D_WEIGHT = tl.constexpr(8)

# The table: the number of groups, then a row per group and one more that says where the last one ends.
HEADER = tl.constexpr(8)
ROW = tl.constexpr(8)
TICKET = tl.constexpr(0)
TILE = tl.constexpr(1)
EXPERT = tl.constexpr(2)
EXPERT_END = tl.constexpr(3)
TASKS = tl.constexpr(4)  # compute tasks
CARRY_AFTER = tl.constexpr(5)  # the group whose end makes the memory for cut sums usable, or -1

BLOCK_TILES = tl.constexpr(16)  # rows of tiles worked on together, so that both operands stay in the L2 cache


@triton.jit
def write_group(
    table_ptr, group, ticket, tasks, tile, tile_end, expert, expert_end, carry_after, saved_tiles, shared_tasks,
    PARTS: tl.constexpr, GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, D_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """ticket, tasks: where the group before begins and its compute tasks. -> the same of this one."""
    tiles = tile_end - tile
    before = tl.where(group == 0, shared_tasks, ticket + tasks)
    ticket = before + tiles * PARTS
    unsaved = tl.maximum(tile_end - tl.maximum(tile, saved_tiles), 0)
    tasks = unsaved * GATE_UPS + tiles * (HIDDENS + D_XS) + (expert_end - expert) * D_WEIGHTS
    row = table_ptr + HEADER + group * ROW
    tl.store(row + TICKET, ticket)
    tl.store(row + TILE, tile)
    tl.store(row + EXPERT, expert)
    tl.store(row + EXPERT_END, expert_end)
    tl.store(row + TASKS, tasks)
    tl.store(row + CARRY_AFTER, carry_after)
    return ticket, tasks


@triton.jit(do_not_specialize=["num_local", "saved_tiles", "shared_tasks"])
def plan_kernel(
    tokens_per_expert_ptr, table_ptr, expert_tile_ptr, num_local, saved_tiles, shared_tasks,
    TARGET: tl.constexpr, MOST: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, D_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Write the table of groups, and expert_tile[e], the first tile of expert e (and of none: the number of tiles). One program, one warp."""
    zero = num_local * 0
    group, ticket, tasks = zero, zero, zero
    tile, start, start_expert = zero, zero, zero  # the tile reached; where the open group begins
    rest, carry_after, cut_in = zero, zero - 1, zero - 1  # the open group begins within an expert; the last group that ended a cut one
    for expert in range(num_local):
        tiles = tl.load(tokens_per_expert_ptr + expert) // BLOCK_M
        tl.store(expert_tile_ptr + expert, tile)
        full = (tile > start) & (tile - start + tiles > MOST)
        if full & ((tile - start >= TARGET) | (rest == 1)):
            ticket, tasks = write_group(
                table_ptr, group, ticket, tasks, start, tile, start_expert, expert + zero, carry_after, saved_tiles, shared_tasks,
                PARTS, GATE_UPS, HIDDENS, D_XS, D_WEIGHTS,
            )  # fmt: skip
            cut_in = tl.where(rest == 1, group, cut_in)
            group, start, start_expert, rest, carry_after = group + 1, tile, expert + zero, zero, cut_in
        while tile - start + tiles > MOST:
            taken = MOST - (tile - start)
            tile += taken
            tiles -= taken
            ticket, tasks = write_group(
                table_ptr, group, ticket, tasks, start, tile, start_expert, expert + 1 + zero, carry_after, saved_tiles, shared_tasks,
                PARTS, GATE_UPS, HIDDENS, D_XS, D_WEIGHTS,
            )  # fmt: skip
            carry_after = group
            group, start, start_expert, rest = group + 1, tile, expert + zero, zero + 1
        tile += tiles
        if tile - start >= TARGET:
            ticket, tasks = write_group(
                table_ptr, group, ticket, tasks, start, tile, start_expert, expert + 1 + zero, carry_after, saved_tiles, shared_tasks,
                PARTS, GATE_UPS, HIDDENS, D_XS, D_WEIGHTS,
            )  # fmt: skip
            cut_in = tl.where(rest == 1, group, cut_in)
            group, start, start_expert, rest, carry_after = group + 1, tile, expert + 1 + zero, zero, cut_in
    if (start_expert < num_local) | (group == 0):
        ticket, tasks = write_group(
            table_ptr, group, ticket, tasks, start, tile, start_expert, num_local + zero, carry_after, saved_tiles, shared_tasks,
            PARTS, GATE_UPS, HIDDENS, D_XS, D_WEIGHTS,
        )  # fmt: skip
        group += 1
    tl.store(expert_tile_ptr + num_local, tile)
    end = table_ptr + HEADER + group * ROW
    tl.store(end + TICKET, ticket + tasks)
    tl.store(end + TILE, tile)
    tl.store(table_ptr, group)


@triton.jit
def swizzle(q, rows, columns):
    """q -> (row, column) of a grid of tasks: blocks of BLOCK_TILES rows, the row running fastest within a block."""
    block = q // (BLOCK_TILES * columns)
    q -= block * (BLOCK_TILES * columns)
    height = tl.minimum(BLOCK_TILES, rows - block * BLOCK_TILES)
    return block * BLOCK_TILES + q % height, q // height


@triton.jit
def decode_tile(q, first, end, tile_expert_ptr, expert_tile_ptr, PER_TILE: tl.constexpr):
    """The q-th task of a phase over the tiles first .. end with PER_TILE tasks each, expert by expert -> (tile, part, expert)."""
    COLUMNS: tl.constexpr = PER_TILE if PER_TILE > 0 else 1
    expert = tl.load(tile_expert_ptr + first + q // COLUMNS)
    own_first = tl.maximum(tl.load(expert_tile_ptr + expert), first)
    own_end = tl.minimum(tl.load(expert_tile_ptr + expert + 1), end)
    tile, part = swizzle(q - (own_first - first) * COLUMNS, own_end - own_first, COLUMNS)
    return own_first + tile, part, expert


@triton.jit
def find_group(ticket, group, table_ptr):
    """The group of a ticket, which is `group` or a later one. Tickets ahead of group 0 give 0."""
    while ticket >= tl.load(table_ptr + HEADER + (group + 1) * ROW + TICKET):
        group += 1
    return group


@triton.jit
def decode_ticket(
    ticket, group, table_ptr, tile_expert_ptr, expert_tile_ptr, saved_tiles, shared_tiles,
    PARTS: tl.constexpr, GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, D_WEIGHTS: tl.constexpr,
    SHARED_HIDDENS: tl.constexpr, SHARED_D_XS: tl.constexpr,
):  # fmt: skip
    """ticket -> (kind, tile, part, expert). For weight gradients part is the task within the expert, and tile means nothing."""
    PER_TILE: tl.constexpr = PARTS if PARTS > 0 else 1
    row = table_ptr + HEADER + group * ROW
    start = tl.load(row + TICKET)
    kind = PULL
    tile = start * 0
    part = start * 0
    expert = start * 0
    first = tl.load(row + TILE)
    end = tl.load(row + ROW + TILE)
    if ticket < start:  # group is 0
        q = ticket - end * PARTS
        shared = shared_tiles * SHARED_HIDDENS
        if q < 0:
            tile = ticket // PER_TILE
            part = ticket % PER_TILE
        elif q < shared:
            kind = SHARED_HIDDEN
            tile, part = swizzle(q, shared_tiles, SHARED_HIDDENS)
        elif q < shared + shared_tiles * SHARED_D_XS:
            kind = SHARED_D_X
            tile, part = swizzle(q - shared, shared_tiles, SHARED_D_XS)
        else:
            kind = SHARED_D_WEIGHT
            part = q - shared - shared_tiles * SHARED_D_XS
    else:
        tasks = tl.load(row + TASKS)
        q = ticket - start
        pulls = tl.load(row + ROW + TICKET) - start - tasks
        step = tasks * 3 // (4 * tl.maximum(pulls, 1)) + 1
        pull = q // step
        if (pull < pulls) & (q % step == 0):
            tile = end + pull // PER_TILE
            part = pull % PER_TILE
        else:
            q -= tl.minimum(pull + 1, pulls)
            unsaved = tl.maximum(first, saved_tiles)
            again = tl.maximum(end - unsaved, 0) * GATE_UPS
            hidden = again + (end - first) * HIDDENS
            d_x = hidden + (end - first) * D_XS
            if q < again:
                kind = GATE_UP
                tile, part, expert = decode_tile(q, unsaved, end, tile_expert_ptr, expert_tile_ptr, GATE_UPS)
            elif q < hidden:
                kind = HIDDEN
                tile, part, expert = decode_tile(q - again, first, end, tile_expert_ptr, expert_tile_ptr, HIDDENS)
            elif q < d_x:
                kind = D_X
                tile, part, expert = decode_tile(q - hidden, first, end, tile_expert_ptr, expert_tile_ptr, D_XS)
            else:
                PER_EXPERT: tl.constexpr = D_WEIGHTS if D_WEIGHTS > 0 else 1
                kind = D_WEIGHT
                expert = tl.load(row + EXPERT) + (q - d_x) // PER_EXPERT
                part = (q - d_x) % PER_EXPERT
    return kind, tile, part, expert
