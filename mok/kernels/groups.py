"""The order of the backward's work: experts in groups, phase by phase within a group, as one list of tickets.

A group is a run of tiles, whole experts where they fit: it is closed when it has `target` tiles, and never has more than `most`. An expert
that does not fit is cut; the sum that is cut lives on in memory, of which there is one copy, so a group that begins with the rest of a cut
expert does not end within another one. `plan_kernel` writes the groups into a table, `list_kernel` every task's record.

    pulls of group 0 | shared experts: hidden, d_x, weight gradients | group 0 | group 1 | ...
    group g: gate and up again (tiles that saved none), hidden, d_x, weight gradients; the pulls of group g + 1 are spread over the first
             three quarters of it.

Example, target 2, most 3, tiles per expert [1, 2, 0, 5]: groups of tiles 0-2 (experts 0, 1), 3-5 (expert 2, which is empty, and the first
part of 3) and 6-7 (the rest of 3).

Legend: L experts of this rank, H hidden, I intermediate.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of tasks.
END = tl.constexpr(0)
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

# A record of the list. For a weight's gradient AT_TILE is the first tile of its rows, PART which weight it is (0 gate, 1 up, 2 down).
RECORD = tl.constexpr(8)
KIND = tl.constexpr(0)
AT_TILE = tl.constexpr(1)
PART = tl.constexpr(2)  # PULL: which part; a tile's task: which slice of columns
OF_EXPERT = tl.constexpr(3)
OF_GROUP = tl.constexpr(4)
AT = tl.constexpr(5)  # weights: row * 65536 + column, in tiles and runs of them; PULL: the group that must be done, or -1
DEPTH = tl.constexpr(6)  # weights: 2 * the rows to sum over + 1 if they are the last ones of their expert; a tile: 1 if it is half padding
EXPECTED = tl.constexpr(7)  # weights: slices of d_gate that must be there, those of the whole group
BLOCK_TICKETS = 256

BLOCK_TILES = tl.constexpr(16)  # about as many rows of tiles are worked on together, so that both operands stay in the L2 cache


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


@triton.jit(do_not_specialize=["num_local", "saved_tiles", "shared_tasks", "target", "most"])
def plan_kernel(
    tokens_per_expert_ptr, table_ptr, expert_tile_ptr, num_local, saved_tiles, shared_tasks, target, most,
    BLOCK_M: tl.constexpr, PARTS: tl.constexpr, GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, D_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Write the table of groups, and expert_tile[e], the first tile of expert e (expert_tile[L]: all tiles). One program, one warp."""
    zero = num_local * 0
    group, ticket, tasks = zero, zero, zero
    tile, start, start_expert = zero, zero, zero  # the tile reached; where the open group begins
    rest, carry_after, cut_in = zero, zero - 1, zero - 1  # the open group begins within an expert; the last group that ended a cut one
    for expert in range(num_local):
        tiles = tl.load(tokens_per_expert_ptr + expert) // BLOCK_M
        tl.store(expert_tile_ptr + expert, tile)
        full = (tile > start) & (tile - start + tiles > most)
        if full & ((tile - start >= target) | (rest == 1)):
            ticket, tasks = write_group(
                table_ptr, group, ticket, tasks, start, tile, start_expert, expert + zero, carry_after, saved_tiles, shared_tasks,
                PARTS, GATE_UPS, HIDDENS, D_XS, D_WEIGHTS,
            )  # fmt: skip
            cut_in = tl.where(rest == 1, group, cut_in)
            group, start, start_expert, rest, carry_after = group + 1, tile, expert + zero, zero, cut_in
        while tile - start + tiles > most:
            taken = most - (tile - start)
            tile += taken
            tiles -= taken
            ticket, tasks = write_group(
                table_ptr, group, ticket, tasks, start, tile, start_expert, expert + 1 + zero, carry_after, saved_tiles, shared_tasks,
                PARTS, GATE_UPS, HIDDENS, D_XS, D_WEIGHTS,
            )  # fmt: skip
            carry_after = group
            group, start, start_expert, rest = group + 1, tile, expert + zero, zero + 1
        tile += tiles
        if tile - start >= target:
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
    """q -> (row, column) of a grid of tasks: equal blocks of about BLOCK_TILES rows, the row running fastest within a block.

    Equal, because a block of a row or two would read all of the other operand for them. Example, 17 rows: one block.
    """
    most = tl.maximum(tl.cdiv(rows, tl.maximum((rows + BLOCK_TILES // 2) // BLOCK_TILES, 1)), 1)
    block = q // (most * columns)
    q -= block * (most * columns)
    height = tl.minimum(most, rows - block * most)
    return block * most + q % height, q // height


@triton.jit
def tiles_of_experts(q, first, end, tile_expert_ptr, expert_tile_ptr, live, PER_TILE: tl.constexpr):
    """The q-th task of a phase over the tiles first .. end with PER_TILE tasks each, expert by expert -> (tile, part, expert)."""
    COLUMNS: tl.constexpr = PER_TILE if PER_TILE > 0 else 1
    expert = tl.load(tile_expert_ptr + first + q // COLUMNS, mask=live, other=0)
    own_first = tl.maximum(tl.load(expert_tile_ptr + expert, mask=live, other=0), first)
    own_end = tl.minimum(tl.load(expert_tile_ptr + expert + 1, mask=live, other=1), end)
    tile, part = swizzle(q - (own_first - first) * COLUMNS, tl.maximum(own_end - own_first, 1), COLUMNS)
    return own_first + tile, part, expert


@triton.jit
def tiles_of_weights(q, width, H: tl.constexpr, BLOCK_M: tl.constexpr, RUN_N: tl.constexpr):
    """The q-th task of one expert's weight gradients -> (which weight, row * 65536 + column), in tiles and in runs of them."""
    tall = tl.cdiv(width, BLOCK_M)
    flat: tl.constexpr = (H + RUN_N - 1) // RUN_N
    which = tl.minimum(q // (tall * flat), 2)
    rows = tl.where(which == 2, (H + BLOCK_M - 1) // BLOCK_M, tall)
    columns = tl.where(which == 2, tl.cdiv(width, RUN_N), flat)
    row, column = swizzle(q - which * (tall * flat), rows, columns)
    return which, row * 65536 + column


@triton.jit(do_not_specialize=["saved_tiles", "shared_tiles", "tokens", "ring"])
def list_kernel(
    list_ptr, table_ptr, tile_expert_ptr, expert_tile_ptr, routes_per_expert_ptr, peer_rank_ptr, saved_tiles, shared_tiles, tokens, ring,
    H: tl.constexpr, I: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, RUN_N: tl.constexpr,
    PARTS: tl.constexpr, GATE_UPS: tl.constexpr, HIDDENS: tl.constexpr, D_XS: tl.constexpr, D_WEIGHTS: tl.constexpr,
    SHARED_HIDDENS: tl.constexpr, SHARED_D_XS: tl.constexpr, HALF_TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the record of every ticket. Any number of programs."""
    PER_TILE: tl.constexpr = PARTS if PARTS > 0 else 1
    PER_EXPERT: tl.constexpr = D_WEIGHTS if D_WEIGHTS > 0 else 1
    groups = tl.load(table_ptr)
    total = tl.load(table_ptr + HEADER + groups * ROW + TICKET)
    for block in range(tl.program_id(0), tl.cdiv(total, BLOCK), tl.num_programs(0)):
        ticket = block * BLOCK + tl.arange(0, BLOCK)
        live = ticket < total
        group = tl.zeros((BLOCK,), tl.int32) - 1
        for g in range(groups):
            group += (ticket >= tl.load(table_ptr + HEADER + g * ROW + TICKET)).to(tl.int32)
        ahead = group < 0  # the pulls of group 0, and the shared experts
        group = tl.maximum(group, 0)
        row = table_ptr + HEADER + group * ROW
        start = tl.load(row + TICKET)
        first = tl.load(row + TILE)
        end = tl.load(row + ROW + TILE)
        tasks = tl.load(row + TASKS)
        following = tl.load(row + ROW + TICKET)

        q = tl.where(ahead, ticket - end * PARTS, ticket - start)
        pulls = following - start - tasks
        step = tasks * 3 // (4 * tl.maximum(pulls, 1)) + 1
        pull = q // step
        is_pull = tl.where(ahead, q < 0, (pull < pulls) & (q % step == 0))
        pull = tl.where(ahead, ticket, pull)
        q -= tl.where(ahead, 0, tl.minimum(pull + 1, pulls))
        pulled = tl.where(ahead, 0, end) + pull // PER_TILE
        owner = tl.zeros((BLOCK,), tl.int32) - 1  # the group of the tile that had the place before
        for g in range(groups):
            owner += (tl.load(table_ptr + HEADER + g * ROW + TILE) <= pulled - ring).to(tl.int32)

        unsaved = tl.maximum(first, saved_tiles)
        again = tl.maximum(end - unsaved, 0) * GATE_UPS
        hidden = again + (end - first) * HIDDENS
        d_x = hidden + (end - first) * D_XS
        routed = live & (ahead == 0) & (is_pull == 0)
        kind = tl.where(q < again, GATE_UP, tl.where(q < hidden, HIDDEN, tl.where(q < d_x, D_X, D_WEIGHT)))
        tile_a, part_a, expert_a = tiles_of_experts(q, unsaved, end, tile_expert_ptr, expert_tile_ptr, routed & (kind == GATE_UP), GATE_UPS)
        tile_h, part_h, expert_h = tiles_of_experts(
            q - again, first, end, tile_expert_ptr, expert_tile_ptr, routed & (kind == HIDDEN), HIDDENS
        )  # fmt: skip
        tile_x, part_x, expert_x = tiles_of_experts(q - hidden, first, end, tile_expert_ptr, expert_tile_ptr, routed & (kind == D_X), D_XS)
        tile = tl.where(kind == GATE_UP, tile_a, tl.where(kind == HIDDEN, tile_h, tile_x))
        part = tl.where(kind == GATE_UP, part_a, tl.where(kind == HIDDEN, part_h, part_x))
        expert = tl.where(kind == GATE_UP, expert_a, tl.where(kind == HIDDEN, expert_h, expert_x))
        is_weight = routed & (kind == D_WEIGHT)
        which, at = tiles_of_weights((q - d_x) % PER_EXPERT, I + q * 0, H, BLOCK_M, RUN_N)
        expert = tl.where(is_weight, tl.load(row + EXPERT) + (q - d_x) // PER_EXPERT, expert)
        begin = tl.load(expert_tile_ptr + expert, mask=is_weight, other=0)
        finish = tl.load(expert_tile_ptr + expert + 1, mask=is_weight, other=0)
        routes = tl.load(routes_per_expert_ptr + expert, mask=is_weight, other=0)
        tile = tl.where(is_weight, tl.maximum(begin, first), tile)
        depth = tl.minimum((end - tile) * BLOCK_M, routes - (tile - begin) * BLOCK_M)
        depth = tl.maximum(depth, 0) * 2 + (finish <= end).to(tl.int32)
        half = tl.zeros((BLOCK,), tl.int32)
        if HALF_TILES:  # padding rows are an expert's last
            of_tile = routed & ((kind == HIDDEN) | (kind == D_X))
            half = (tl.load(peer_rank_ptr + tile * BLOCK_M + BLOCK_M // 2, mask=of_tile, other=0) < 0).to(tl.int32)
        depth = tl.where(is_weight, depth, half)
        expected = (end - first) * HIDDENS
        part = tl.where(is_weight, which, part)

        if S > 0:
            shared = ahead & (is_pull == 0)
            hiddens = shared_tiles * SHARED_HIDDENS
            d_xs = hiddens + shared_tiles * SHARED_D_XS
            HS: tl.constexpr = SHARED_HIDDENS if SHARED_HIDDENS > 0 else 1
            XS: tl.constexpr = SHARED_D_XS if SHARED_D_XS > 0 else 1
            some = tl.maximum(shared_tiles, 1)
            tile_h, part_h = swizzle(q, some, HS)
            tile_x, part_x = swizzle(q - hiddens, some, XS)
            which, shared_at = tiles_of_weights(q - d_xs, S + q * 0, H, BLOCK_M, RUN_N)
            kind = tl.where(shared, tl.where(q < hiddens, SHARED_HIDDEN, tl.where(q < d_xs, SHARED_D_X, SHARED_D_WEIGHT)), kind)
            tile = tl.where(shared, tl.where(q < hiddens, tile_h, tl.where(q < d_xs, tile_x, 0)), tile)
            part = tl.where(shared, tl.where(q < hiddens, part_h, tl.where(q < d_xs, part_x, which)), part)
            expert = tl.where(shared, 0, expert)
            at = tl.where(shared, shared_at, at)
            depth = tl.where(shared, tl.where(q < d_xs, 0, tokens * 2 + 1), depth)
            expected = tl.where(shared, hiddens, expected)

        record = list_ptr + ticket * RECORD
        tl.store(record + KIND, tl.where(is_pull, PULL, kind), mask=live)
        tl.store(record + AT_TILE, tl.where(is_pull, pulled, tile), mask=live)
        tl.store(record + PART, tl.where(is_pull, pull % PER_TILE, part), mask=live)
        tl.store(record + OF_EXPERT, expert, mask=live)
        tl.store(record + OF_GROUP, group, mask=live)
        tl.store(record + AT, tl.where(is_pull, owner, at), mask=live)
        tl.store(record + DEPTH, depth, mask=live)
        tl.store(record + EXPECTED, expected, mask=live)


@triton.jit
def take_ticket(taken, lanes, list_ptr, total):
    """The ticket taken ahead, by lane 0, and its task's kind; END when there is none left."""
    ticket = tl.sum(tl.where(lanes == 0, taken, 0), axis=0)
    return ticket, tl.load(list_ptr + ticket * RECORD + KIND, mask=ticket < total, other=END)
