"""Signals between programs and between ranks, and waits that end.

A signal is an int32 counter. Whoever reaches a state adds to it with release order; whoever needs the state reads it with acquire order
until it is large enough. A wait gives up after `limit` readings: the first to give up writes a report (rank, task, what, expected, found)
to every rank and raises the abort flag of every rank, which all other waits see; they return False and their programs end. The first wait
of each rank that ends so also leaves a record of its own: what this rank lacked tells more than whom the others waited for.

Rows written by ordinary stores are read by the copy engine (TMA), and tiles stored by the copy engine are announced by ordinary atomics.
The two kinds of access are ordered only by the fences below.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from mok.kernels import memory
from mok.kernels.launcher import enqueue, next_power_of_2

INTERPRETING = tl.constexpr(bool(knobs.runtime.interpret))
ABORT = tl.constexpr(memory.ABORT)
EPOCH = tl.constexpr(memory.EPOCH)
HOST = tl.constexpr(memory.HOST)
RECORD_WORDS = tl.constexpr(memory.RECORD_WORDS)
REPORT = tl.constexpr(memory.REPORT)
OWN = tl.constexpr(memory.OWN)
FLAGS = tl.constexpr(memory.FLAGS)
BARRIER = tl.constexpr(memory.STATES.index("barrier"))
X_READY = tl.constexpr(memory.STATES.index("x_ready"))
H_READY = tl.constexpr(memory.STATES.index("h_ready"))
H_FREE = tl.constexpr(memory.STATES.index("h_free"))
X_FREE = tl.constexpr(memory.STATES.index("x_free"))
EXPERT_ID = tl.constexpr(memory.STATES.index("expert id"))
PATIENCE = tl.constexpr(64)  # readings between two looks at the abort flag
FILLING = tl.constexpr(1_000_000)  # readings, about a second, that a report may take to be written


@triton.jit
def peer_address(table_ptr, rank, DTYPE: tl.constexpr):
    """The address of a region on a rank (or on a block of ranks); regions are aligned to 256 bytes, which loads and stores of 16 need."""
    return tl.multiple_of(tl.load(table_ptr + rank).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def order_copy_engine(token):
    """Order this thread's ordinary accesses and the copy engine's. token: any int32 in use."""
    if not INTERPRETING:
        tl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [token], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def finish_copy_engine_stores(token):
    """Wait until the copy engine's stores are in global memory, not merely out of shared memory. token: any int32 in use."""
    if not INTERPRETING:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [token], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def announce(signal_ptr):
    """Everything this program has stored is visible to whoever sees the signal."""
    tl.debug_barrier()
    tl.atomic_add(signal_ptr, 1, sem="release", scope="gpu")


@triton.jit
def read_signal(signal_ptr):
    return tl.atomic_add(signal_ptr, 0, sem="acquire", scope="gpu")


@triton.jit
def record(state, rank, task, what, expected, found):
    """Fill a record of five values, unless it is filled already."""
    if tl.atomic_cas(state, 0, 1, sem="acq_rel", scope="sys") == 0:
        tl.store(state + 1, rank)
        tl.store(state + 2, task)
        tl.store(state + 3, what)
        tl.store(state + 4, expected)
        tl.store(state + 5, found)
        tl.debug_barrier()
        tl.atomic_xchg(state, 2, sem="release", scope="sys")


@triton.jit
def report(control_ptrs, rank, task, what, expected, found, R: tl.constexpr):
    """Write the report to every rank that has none yet and raise every rank's abort flag."""
    for other in range(R):
        control = peer_address(control_ptrs, other, tl.int32)
        record(control + REPORT, rank, task, what, expected, found)
        tl.atomic_xchg(control + ABORT, 1, sem="release", scope="sys")


@triton.jit
def tell_host(control):
    """Copy this rank's records, if complete, to host memory, values first; the host looks there without synchronizing."""
    if tl.atomic_add(control + REPORT, 0, sem="acquire", scope="sys") == 2:
        host = tl.load((control + HOST).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))
        own = tl.atomic_add(control + OWN, 0, sem="acquire", scope="sys")
        if own == 2:
            for word in range(1, RECORD_WORDS):
                tl.store(host + RECORD_WORDS + word, tl.load(control + OWN + word))
            tl.store(host + RECORD_WORDS, own)
        for word in range(1, RECORD_WORDS):
            tl.store(host + word, tl.load(control + REPORT + word))
        tl.debug_barrier()
        tl.atomic_xchg(host, 1, sem="release", scope="sys")


@triton.jit
def wait_for_report(control):
    """Who came too late to write a report may have raised the abort flag while the first one is still writing it."""
    polls = 0
    while (tl.atomic_add(control + REPORT, 0, sem="acquire", scope="sys") == 1) & (polls < FILLING):
        polls += 1


@triton.jit
def wait_for(signal_ptr, expected, control_ptrs, rank, task, what, limit, R: tl.constexpr):
    """Wait until the signal is at least `expected`; 0 asks for nothing. False: gave up, or another wait did."""
    found = expected * 0
    if expected > 0:
        found = read_signal(signal_ptr)
    if found < expected:
        control = peer_address(control_ptrs, rank, tl.int32)
        polls = found * 0
        aborted = 0
        while (found < expected) & (polls < limit) & (aborted == 0):
            found = read_signal(signal_ptr)
            polls += 1
            if polls % PATIENCE == 0:
                aborted = tl.atomic_add(control + ABORT, 0, sem="acquire", scope="sys")
        if found < expected:
            record(control + OWN, rank, task, what, expected, found)
            if aborted == 0:
                report(control_ptrs, rank, task, what, expected, found, R)
            tell_host(control)
    return found >= expected


@triton.jit
def meet(control_ptrs, rank, limit, R: tl.constexpr, LANES: tl.constexpr):
    own = peer_address(control_ptrs, rank, tl.int32)
    epoch = tl.load(own + EPOCH) + 1
    lanes = tl.arange(0, LANES)
    live = lanes < R
    controls = tl.load(control_ptrs + lanes, mask=live, other=0).to(tl.pointer_type(tl.int32))
    value = tl.zeros((LANES,), tl.int32) + epoch
    tl.debug_barrier()
    tl.atomic_xchg(controls + FLAGS + rank, value, mask=live, sem="release", scope="sys")
    zero = tl.zeros((LANES,), tl.int32)
    arrived = tl.where(live, tl.atomic_add(own + FLAGS + lanes, zero, mask=live, sem="acquire", scope="sys"), epoch)
    found = tl.min(arrived, axis=0)
    polls = found * 0
    aborted = 0
    while (found < epoch) & (polls < limit) & (aborted == 0):
        arrived = tl.where(live, tl.atomic_add(own + FLAGS + lanes, zero, mask=live, sem="acquire", scope="sys"), epoch)
        found = tl.min(arrived, axis=0)
        polls += 1
        if polls % PATIENCE == 0:
            aborted = tl.atomic_add(own + ABORT, 0, sem="acquire", scope="sys")
    if found < epoch:
        missing = tl.min(tl.where(arrived < epoch, lanes, LANES), axis=0)
        record(own + OWN, rank, missing, BARRIER, epoch, found)
        if aborted == 0:
            report(control_ptrs, rank, missing, BARRIER, epoch, found, R)
    if tl.atomic_add(own + ABORT, 0, sem="acquire", scope="sys") > 0:  # a peer's failure is this rank's, even if it lacked nothing
        wait_for_report(own)
        tell_host(own)
    tl.debug_barrier()
    tl.store(own + EPOCH, epoch)


@triton.jit(do_not_specialize=["rank", "limit"])
def barrier_kernel(control_ptrs, rank, limit, R: tl.constexpr, LANES: tl.constexpr):
    """All ranks have come here, and everything they stored before is visible. One program of one warp; LANES: a power of two from R on.

    Every rank counts its barriers in its own memory (EPOCH) and tells each peer the count; so nothing changes from launch to launch, and
    a captured graph can be replayed. Example, R = 2: both have EPOCH 6. Each writes 7 to its flag at the other and at itself, and leaves
    when both of its own flags are at least 7. A negative limit does nothing: it only loads the kernel.
    """
    if limit >= 0:
        meet(control_ptrs, rank, limit, R, LANES)


def barrier(control: object, rank: int, ranks: int, limit: int) -> None:
    """Launch the barrier on the current stream."""
    enqueue(barrier_kernel, (1,), control, rank, limit, R=ranks, LANES=next_power_of_2(ranks), num_warps=1)
