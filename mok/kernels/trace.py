"""Timestamps of tasks, written by the kernels where their compile-time switch TRACE is on; no instruction of it where it is off.

The record, int64: first PROGRAM words per program, then WORDS words per ticket. Clocks are cycles of the program's multiprocessor; the wall
clock (ns, the same on all of them, but it ticks coarsely) at the begin of a program and of its tasks and at its end ties them together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.signals import INTERPRETING

# Words of a program's record.
PROGRAM = tl.constexpr(8)
SM, FIRST_CLOCK, FIRST_WALL, LAST_CLOCK, LAST_WALL = (tl.constexpr(i) for i in range(5))
# Words of a ticket's record: when it was taken up, had what it waited for, had its sums, was announced; by whom; BEGIN by the wall clock.
WORDS = tl.constexpr(8)
BEGIN, READY, COMPUTED, DONE, BY, WALL = (tl.constexpr(i) for i in range(6))


@triton.jit
def cycles():
    if INTERPRETING:
        return tl.full((), 1, tl.int64)
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def wall_clock():
    if INTERPRETING:
        return tl.full((), 1, tl.int64)
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def multiprocessor():
    if INTERPRETING:
        return tl.program_id(0)
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def note_begin(trace_ptr):
    record = trace_ptr + tl.program_id(0) * PROGRAM
    tl.store(record + SM, multiprocessor().to(tl.int64))
    tl.store(record + FIRST_CLOCK, cycles())
    tl.store(record + FIRST_WALL, wall_clock())


@triton.jit
def note_end(trace_ptr):
    record = trace_ptr + tl.program_id(0) * PROGRAM
    tl.store(record + LAST_CLOCK, cycles())
    tl.store(record + LAST_WALL, wall_clock())


@triton.jit
def note(trace_ptr, ticket, word: tl.constexpr):
    record = trace_ptr + tl.num_programs(0) * PROGRAM + ticket.to(tl.int64) * WORDS
    tl.store(record + word, cycles())
    if word == BEGIN:
        tl.store(record + BY, tl.program_id(0).to(tl.int64))
        tl.store(record + WALL, wall_clock())
