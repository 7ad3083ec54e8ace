"""Ways to move rows between ranks: the layer's own (`mok.kernels.dispatch`) and others, for comparison.

Every program takes a run of neighbouring rows. Rows of x lie in peer-visible memory; row i of `out` is token[i] of rank source[i].

Legend: T tokens of a rank, H hidden, a multiple of 64.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.dispatch import pull_rows
from mok.kernels.signals import INTERPRETING, meet, peer_address

LINE = tl.constexpr(64)  # bf16 values of the copy engine's innermost dimension: 128 bytes


@triton.jit
def share(num_rows, ROWS: tl.constexpr):
    """First row and end of this program's rows, whole blocks of ROWS."""
    blocks = tl.cdiv(num_rows, ROWS)
    each = tl.cdiv(blocks, tl.num_programs(0))
    first = tl.program_id(0) * each * ROWS
    return first, tl.minimum(first + each * ROWS, num_rows)


@triton.jit
def peek(ptr, index):
    """A load of an int32 that nobody writes, which the pipeliner takes for arithmetic: it must not run ahead of what it is needed for."""
    if INTERPRETING:
        return tl.load(ptr + index)
    address = (ptr + index).to(tl.int64)
    return tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def peek_long(ptr, index):
    """The same of an int64."""
    if INTERPRETING:
        return tl.load(ptr + index)
    address = (ptr + index).to(tl.int64)
    return tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=True, pack=1)


@triton.jit(do_not_specialize=["num_rows"])
def pull_kernel(
    x_ptrs, out_ptr, source_ptr, token_ptr, num_rows,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, UNROLL: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """By loads and stores, ROWS x BLOCK_H at a time; UNROLL such blocks (1, 2 or 4) are loaded before the first one is stored."""
    lanes = tl.arange(0, ROWS)
    start, end = share(num_rows, ROWS)
    for first in range(start, end, ROWS):
        rows = first + lanes
        live = (rows < end)[:, None]
        token = tl.load(token_ptr + rows, mask=rows < end, other=0).to(tl.int64)
        source = tl.load(source_ptr + rows, mask=rows < end, other=0)
        x = peer_address(x_ptrs, source, tl.bfloat16)[:, None] + token[:, None] * H
        out = out_ptr + rows.to(tl.int64)[:, None] * H
        for column in tl.static_range(0, H, BLOCK_H * UNROLL):
            columns = column + tl.arange(0, BLOCK_H)[None, :]
            a = tl.load(x + columns, mask=live & (columns < H), cache_modifier=CACHE)
            if UNROLL > 1:
                b = tl.load(x + columns + BLOCK_H, mask=live & (columns + BLOCK_H < H), cache_modifier=CACHE)
            if UNROLL > 2:
                c = tl.load(x + columns + 2 * BLOCK_H, mask=live & (columns + 2 * BLOCK_H < H), cache_modifier=CACHE)
                d = tl.load(x + columns + 3 * BLOCK_H, mask=live & (columns + 3 * BLOCK_H < H), cache_modifier=CACHE)
            tl.store(out + columns, a, mask=live & (columns < H))
            if UNROLL > 1:
                tl.store(out + columns + BLOCK_H, b, mask=live & (columns + BLOCK_H < H))
            if UNROLL > 2:
                tl.store(out + columns + 2 * BLOCK_H, c, mask=live & (columns + 2 * BLOCK_H < H))
                tl.store(out + columns + 3 * BLOCK_H, d, mask=live & (columns + 3 * BLOCK_H < H))


@triton.jit(do_not_specialize=["num_rows"])
def pull_as_layer_kernel(
    x_ptrs, out_ptr, source_ptr, token_ptr, num_rows, H: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """By the layer's own function, ROWS (a divisor of num_rows) at a time."""
    start, end = share(num_rows, ROWS)
    for done in range(0, end - start, ROWS):
        row = start + done
        pull_rows(out_ptr, x_ptrs, out_ptr, out_ptr, x_ptrs, out_ptr, source_ptr, token_ptr, row, row, H, 1, R, False, ROWS, BLOCK_H)


@triton.jit(do_not_specialize=["num_rows"])
def pull_async_kernel(
    x_ptrs, out_ptr, source_ptr, token_ptr, num_rows,
    H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """By asynchronous loads into shared memory, STAGES - 1 blocks ahead. BLOCK_H divides H. Example, H = 7168: 7 blocks of 1024 a row."""
    PER_ROW: tl.constexpr = H // BLOCK_H
    lanes = tl.arange(0, ROWS)
    start, end = share(num_rows, ROWS)
    for step in tl.range(0, tl.cdiv(tl.maximum(end - start, 0), ROWS) * PER_ROW, num_stages=STAGES):
        ahead = step // PER_ROW
        rows = start + ahead * ROWS + lanes
        known = tl.minimum(rows, num_rows - 1)
        token = peek(token_ptr, known).to(tl.int64)
        x = peek_long(x_ptrs, peek(source_ptr, known)).to(tl.pointer_type(tl.bfloat16))
        columns = (step - ahead * PER_ROW) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
        offsets = tl.multiple_of(columns + token[:, None] * H, [1, 8])
        values = tl.load(tl.multiple_of(x, 16)[:, None] + offsets)
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * H + columns, values, mask=(rows < end)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def pull_copy_engine_kernel(
    x_desc, out_desc, out_ptr, token_ptr, num_rows,
    H: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, STORE_BY_COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """Loads by the copy engine (TMA), STAGES - 1 blocks ahead, all rows from one rank.

    The descriptors see a row as H / 64 lines of 64 values and a block as LINES of them, a power of two; what lies beyond the row is not
    moved. Example, H = 7168, LINES = 128: one block of 112 lines a row.
    """
    BLOCK: tl.constexpr = LINES * LINE
    PER_ROW: tl.constexpr = (H + BLOCK - 1) // BLOCK
    start, end = share(num_rows, 1)
    for step in tl.range(0, (end - start) * PER_ROW, num_stages=STAGES):
        ahead = step // PER_ROW
        row = start + ahead
        part = step - ahead * PER_ROW
        values = x_desc.load([peek(token_ptr, tl.minimum(row, num_rows - 1)), part * LINES, 0])
        if STORE_BY_COPY_ENGINE:
            out_desc.store([row, part * LINES, 0], values)
        else:
            columns = part * BLOCK + tl.arange(0, LINES)[None, :, None] * LINE + tl.arange(0, LINE)[None, None, :]
            tl.store(out_ptr + row.to(tl.int64) * H + columns, values, mask=columns < H)


@triton.jit(do_not_specialize=["num_rows"])
def push_kernel(
    x_ptr, out_ptrs, target_ptr, slot_ptr, num_rows, H: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Row i of x to slot[i] of rank target[i], by loads and stores."""
    lanes = tl.arange(0, ROWS)
    start, end = share(num_rows, ROWS)
    for first in range(start, end, ROWS):
        rows = first + lanes
        live = (rows < end)[:, None]
        slot = tl.load(slot_ptr + rows, mask=rows < end, other=0).to(tl.int64)
        target = tl.load(target_ptr + rows, mask=rows < end, other=0)
        out = peer_address(out_ptrs, target, tl.bfloat16)[:, None] + slot[:, None] * H
        x = x_ptr + rows.to(tl.int64)[:, None] * H
        for column in tl.static_range(0, H, BLOCK_H):
            columns = column + tl.arange(0, BLOCK_H)[None, :]
            tl.store(out + columns, tl.load(x + columns, mask=live & (columns < H)), mask=live & (columns < H))


@triton.jit(do_not_specialize=["num_rows"])
def push_copy_engine_kernel(x_desc, out_desc, slot_ptr, num_rows, LINES: tl.constexpr, STAGES: tl.constexpr):
    """Row i of x to slot[i] of one rank, by the copy engine."""
    start, end = share(num_rows, 1)
    for row in tl.range(start, end, num_stages=STAGES):
        out_desc.store([peek(slot_ptr, tl.minimum(row, num_rows - 1)), 0, 0], x_desc.load([row, 0, 0]))


@triton.jit(do_not_specialize=["rank", "limit", "count"])
def meet_kernel(control_ptrs, rank, limit, count, R: tl.constexpr, LANES: tl.constexpr):
    """The layer's barrier `count` times in one launch of one program of one warp."""
    for _ in range(count):
        meet(control_ptrs, rank, limit, R, LANES)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "peer", "base", "count", "limit"])
def ping_pong_kernel(flag_ptrs, gave_up_ptr, rank, peer, base, count, limit, REMOTE: tl.constexpr):
    """Ranks 0 and 1 raise flags in turn, from base + 1 to base + count: each other's, and poll their own, or, REMOTE, their own, and poll
    the other's. One program.

    gave_up counts the waits that were given up after `limit` readings.
    """
    own = peer_address(flag_ptrs, rank, tl.int32)
    other = peer_address(flag_ptrs, peer, tl.int32)
    take_turns(own if REMOTE else other, other if REMOTE else own, gave_up_ptr, rank, base, count, limit)


@triton.jit(do_not_specialize=["base", "count", "limit"])
def ping_pong_within_kernel(flag_ptrs, gave_up_ptr, base, count, limit, WORDS: tl.constexpr):
    """The same of two programs of rank 0, whose flags lie WORDS apart."""
    who = tl.program_id(0)
    flags = peer_address(flag_ptrs, 0, tl.int32)
    take_turns(flags + (1 - who) * WORDS, flags + who * WORDS, gave_up_ptr, who, base, count, limit)


@triton.jit
def take_turns(raised, polled, gave_up_ptr, rank, base, count, limit):
    for i in range(base + 1, base + count + 1):
        if rank == 0:
            tl.atomic_xchg(raised, i, sem="release", scope="sys")
        found = tl.atomic_add(polled, 0, sem="acquire", scope="sys")
        polls = found * 0
        while (found < i) & (polls < limit):
            found = tl.atomic_add(polled, 0, sem="acquire", scope="sys")
            polls += 1
        if found < i:
            tl.atomic_add(gave_up_ptr, 1)
        if rank == 1:
            tl.atomic_xchg(raised, i, sem="release", scope="sys")
