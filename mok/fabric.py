"""Memory that the ranks of a group see of each other: named regions, one function for a peer's address, signals and bounded waits.

Three implementations of one small interface (`rank`, `size`, `region(name, rank)`):
    VirtualFabric: R virtual ranks in one process, one thread each; memory is simply shared.
    ProcessFabric: R processes of one machine; memory is anonymous shared memory that peers map.
    SymmetricFabric: CUDA, over torch's symmetric memory; signals live in the kernels.

On the CPU every collective step is a `Call`. `begin` makes all ranks agree on it before anything is computed: each posts what it was asked
(a small dict), all read all, and bad input or a disagreement becomes the same exception on every rank. Inside a call a rank announces its
states (`signal`) and waits for its peers' (`wait`), never longer than the time limit. Whoever gives up posts why, and every rank that
waits for it raises too. A failed call ends for all ranks; the next one starts clean.

A rank whose peers gave up a call before it came may be late, or may have skipped that call (it raised elsewhere) and mean the next one;
only what it does then tells. It raises once, and where its peers wait in a newer call they see that it has. A late rank now comes to the
newer call by itself. One that does not within `patience` had skipped a call, and waits for its peers in some other place: they end the
newer call too, naming it, and what it comes to next is the call after that.

Every word of a control block has one writer, its owner, so no atomic operation is needed:
    0 arrived: number of the call it has come to    1 aborted: number of the last call it gave up
    2 told: number of the call its peers waited in when it was told that it was late for an earlier one
    3.. one word per state: the number of the last call in which the state was reached
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import mmap
import os
import socket
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mok.config import _check_int

STATES = ("published", "pushed")
_ARRIVED, _ABORTED, _TOLD, _FIRST_STATE = 0, 1, 2, 3
_WORDS = 64
_NOTE_BYTES = 16 * 1024  # two request slots (calls alternate) and one abort report
_CONTROL_BYTES = _WORDS * 8 + 3 * _NOTE_BYTES
_ALIGNMENT = 256
_AT_EXIT_S = 0.1  # of which a thread that wants the lock needs a moment


def patience(timeout_s: float) -> float:
    """How many seconds ranks that have already failed a call wait for each other to come to the next: a tenth of the limit, or 1."""
    return min(timeout_s, max(1.0, timeout_s / 10))


class FabricError(RuntimeError):
    """A rank of the group did not do its part: it died, raised, or was not there in time.

    ranks: the ranks at fault, as far as this rank can tell.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Region:
    """A named, typed piece of a rank's peer-visible memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def region_offsets(regions: Sequence[Region]) -> tuple[dict[str, int], int]:
    """Byte offset of each region and the bytes of all, each region aligned to 256 bytes."""
    offsets, total = {}, 0
    for region in regions:
        offsets[region.name] = total
        total += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, total


class Fabric(ABC):
    """What every implementation offers."""

    rank: int
    size: int

    @abstractmethod
    def region(self, name: str, rank: int | None = None) -> Tensor:
        """The named region of a rank (default: this one), readable and writable in place."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory; harmless twice, and needs no other rank."""


# ---- CPU: virtual ranks and processes ----


@dataclass
class _Arena:
    """One rank's peer-visible bytes and what a peer needs to map them."""

    bytes: Tensor
    handle: Any


class HostFabric(Fabric):
    """Calls over control blocks and arenas that the host can address; see the module's text.

    before: called with (task, call) ahead of every signal and every wait: a place for tests to delay a rank or to make it fail.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.before: Callable[[str, int], None] | None = None
        self.closed = False
        self.alone = False  # made by host_fabric(None), for one thread
        self._number = 0
        self._controls: list[memoryview] = []
        self._words: list[memoryview] = []
        self._arena: _Arena | None = None
        self._peers: dict[int, _Arena] = {}
        self._lock = threading.Lock()
        self._call: Call | None = None

    # what differs between threads and processes

    @abstractmethod
    def _allocate(self, nbytes: int) -> _Arena: ...

    @abstractmethod
    def _attach(self, rank: int, handle: Any) -> _Arena: ...

    @abstractmethod
    def _alive(self, rank: int) -> bool: ...

    # control blocks

    def _adopt_controls(self, controls: list[memoryview]) -> None:
        self._controls = controls
        self._words = [control[: _WORDS * 8].cast("q") for control in controls]

    def _fence(self) -> None:
        with self._lock:  # an atomic read-modify-write: orders the stores before it with those after it
            pass

    def _set(self, word: int, value: int) -> None:
        self._fence()
        self._words[self.rank][word] = value

    def _write_note(self, slot: int, note: dict[str, Any]) -> None:
        data = json.dumps(note, default=str).encode()
        if len(data) + 8 > _NOTE_BYTES:
            short = {"operation": note["operation"], "request": {}, "arena": None, "message": "too long to pass on", "ranks": [self.rank]}
            data = json.dumps({**short, "error": ["RuntimeError", "a message too long to pass on"]}).encode()
        start = _WORDS * 8 + slot * _NOTE_BYTES
        self._controls[self.rank][start : start + 8 + len(data)] = len(data).to_bytes(8, "little") + data

    def _read_note(self, rank: int, slot: int) -> dict[str, Any]:
        start = _WORDS * 8 + slot * _NOTE_BYTES
        length = int.from_bytes(self._controls[rank][start : start + 8], "little")
        try:
            return json.loads(bytes(self._controls[rank][start + 8 : start + 8 + length]))
        except ValueError:  # a report that its rank is writing anew, for a later call
            return {"message": "its report is gone", "ranks": [rank]}

    # calls

    def region(self, name: str, rank: int | None = None) -> Tensor:
        if self._call is None:
            raise RuntimeError(f"region {name!r}: regions exist inside a call only")
        return self._call.region(name, rank)

    def begin(
        self,
        operation: str,
        request: dict[str, Any],
        regions: Callable[[dict[str, Any]], list[Region]],
        *,
        error: Exception | None = None,
        same: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> Call:
        """Agree with all ranks on the next call; every rank of the group must come.

        request: what this rank was asked, JSON values. regions: the regions of a rank from its request. error: this rank's own complaint
        about its arguments. same: the request's fields that must be equal on all ranks.

        Raises:
            ValueError, TypeError: the same on every rank, when one rank had an error or the requests disagree.
            FabricError: a rank did not come within timeout_s, or ended.
        """
        if self.closed:
            raise RuntimeError("this fabric is closed")
        number = self._next_number(operation, timeout_s)
        call = Call(self, number, operation, timeout_s)
        own = None
        if error is None:
            try:
                own = self._reserve(region_offsets(regions(request))[1])
            except Exception as failure:  # no memory: tell the others
                error = failure
        note = {
            "operation": operation,
            "request": request,
            "arena": own.handle if own else None,
            "error": None if error is None else [type(error).__name__, str(error)],
        }
        self._write_note(number % 2, note)
        with call:
            self._set(_ARRIVED, number)
            for rank in range(self.size):
                call.wait_word(_ARRIVED, rank, "arrival")
            call.notes = [self._read_note(rank, number % 2) for rank in range(self.size)]
        self._check_agreement(call, same)
        with call:
            for rank, peer in enumerate(call.notes):
                self._map_peer(rank, peer["arena"])
            call.requests = [peer["request"] for peer in call.notes]
            call.layout(regions)
        return call

    def _next_number(self, operation: str, timeout_s: float) -> int:
        """The number of the call that this rank comes to now.

        Raises:
            FabricError: its peers gave that call up before.
        """
        self._number += 1
        given_up = max(words[_ABORTED] for words in self._words)
        if given_up < self._number:
            return self._number
        rank = next(rank for rank, words in enumerate(self._words) if words[_ABORTED] == given_up)
        report = self._read_note(rank, 2)
        told = self._words[self.rank][_TOLD]
        skipped = self._number <= told <= given_up and (told < given_up or self.rank in report["ranks"])  # it did not come when told
        other = given_up == self._number and report.get("operation") != operation
        if skipped or other:  # a call this rank never meant to come to; go on with the one that follows
            self._number = given_up + 1
            return self._number
        self._tell_peers(timeout_s)
        raise FabricError(
            f"rank {self.rank} came to {operation} call {self._number} after rank {rank} had given it up: {report['message']}",
            report["ranks"],
        )

    def _tell_peers(self, timeout_s: float) -> None:
        """Say that this rank is being told of its lateness, once a peer waits in a newer call; peers may be on their way to it."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        end = time.monotonic() + patience(timeout_s)
        while time.monotonic() < end and any(self._alive(rank) for rank in peers):
            newest = max(words[_ARRIVED] for words in self._words)
            if newest > max(words[_ABORTED] for words in self._words):
                self._set(_TOLD, newest)
                return
            time.sleep(0.001)

    def _check_agreement(self, call: Call, same: Sequence[str]) -> None:
        prefix = (lambda rank: f"rank {rank}: ") if self.size > 1 else (lambda rank: "")
        for rank, note in enumerate(call.notes):
            if note["error"] is not None:
                kind, message = note["error"]
                raise {"TypeError": TypeError, "ValueError": ValueError}.get(kind, RuntimeError)(prefix(rank) + message)
        for name in ("operation", *same):
            values = [note["operation"] if name == "operation" else note["request"][name] for note in call.notes]
            if any(value != values[0] for value in values):
                raise ValueError(_disagreement(name, values))

    def _reserve(self, nbytes: int) -> _Arena:
        if self._arena is None or self._arena.bytes.numel() < nbytes:
            self._arena = self._allocate(max(nbytes, mmap.PAGESIZE))
        return self._arena

    def _map_peer(self, rank: int, handle: Any) -> None:
        if rank == self.rank:
            assert self._arena is not None
            self._peers[rank] = self._arena
        elif rank not in self._peers or self._peers[rank].handle != handle:
            self._peers[rank] = self._attach(rank, handle)

    def close(self) -> None:
        self.closed = True
        self._arena, self._call = None, None
        self._peers = {}


def _disagreement(name: str, values: list[Any]) -> str:
    """What ranks are told that disagree on a field of their requests; "of" is the number of the forward call that a backward belongs to."""
    if name == "of":
        forwards = ["a compiled forward" if number is None else f"forward call {number}" for number in values]
        listed = ", ".join(f"rank {rank} {'with' if rank else 'came with'} that of {forward}" for rank, forward in enumerate(forwards))
        return f"all ranks must run backwards in the same order: {listed}"
    listed = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
    return f"{name} must be equal on all ranks of the group ({listed})"


class Call:
    """One collective step of a HostFabric. Used as a context manager: an exception inside it is passed on to every rank that waits."""

    def __init__(self, fabric: HostFabric, number: int, operation: str, timeout_s: float) -> None:
        self.fabric, self.number, self.operation, self.timeout_s = fabric, number, operation, timeout_s
        self.rank, self.size = fabric.rank, fabric.size
        self.notes: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self._regions: list[dict[str, Tensor]] = []

    def layout(self, regions: Callable[[dict[str, Any]], list[Region]]) -> None:
        for rank, request in enumerate(self.requests):
            arena, wanted = self.fabric._peers[rank].bytes, regions(request)
            offsets, _ = region_offsets(wanted)
            self._regions.append({r.name: arena[offsets[r.name] : offsets[r.name] + r.nbytes].view(r.dtype).view(r.shape) for r in wanted})

    def region(self, name: str, rank: int | None = None) -> Tensor:
        return self._regions[self.rank if rank is None else rank][name]

    def signal(self, state: str) -> None:
        """Announce that this rank has reached `state`; all its writes before are visible to whoever sees it."""
        if self.fabric.before is not None:
            self.fabric.before(f"signal {state}", self.number)
        self.fabric._set(_FIRST_STATE + STATES.index(state), self.number)

    def wait(self, state: str, rank: int, task: str) -> None:
        """Wait until `rank` has reached `state` in this call. task: what this rank is at, for the report.

        Raises:
            FabricError: naming rank, task, the number expected and the one found, when it took longer than timeout_s, the rank's process
                has ended, or a rank gave this call up.
        """
        if self.fabric.before is not None:
            self.fabric.before(f"wait {state}", self.number)
        self.wait_word(_FIRST_STATE + STATES.index(state), rank, state, task)

    def wait_word(self, word: int, rank: int, what: str, task: str = "") -> None:
        words = self.fabric._words
        if words[rank][word] >= self.number:  # the quick way
            self.fabric._fence()
            return
        start = time.monotonic()
        look_again = start + 0.05
        call = f"{self.operation} call {self.number}"
        place = f"{task} of {call}" if task else call
        told_at: float | None = None
        while words[rank][word] < self.number:
            now = time.monotonic()
            for peer in range(self.size):
                if words[peer][_ABORTED] >= self.number and peer != self.rank:
                    report = self.fabric._read_note(peer, 2)
                    at = task or self.operation
                    raise FabricError(f"rank {self.rank}, {at}: rank {peer} gave up: {report['message']}", report["ranks"])
            told = [peer for peer in range(self.size) if words[peer][_TOLD] == self.number > words[peer][_ARRIVED]]
            told_at = (told_at or now) if told else None
            if told_at is not None and now - told_at > patience(self.timeout_s):
                raise FabricError(
                    f"rank {told[0]} did not come within {now - told_at:.1f} s after it was told that it was late for an earlier call: "
                    f"rank {self.rank} waited in {place} for the {what} of rank {rank}",
                    told,
                )
            if now > look_again:
                look_again = now + 0.05
                if not self.fabric._alive(rank) and words[rank][word] < self.number:
                    raise FabricError(f"rank {rank} has ended: rank {self.rank} waited in {place} for its {what}", [rank])
            if now - start > self.timeout_s:
                raise FabricError(
                    f"rank {rank} was not there within {self.timeout_s:g} s: rank {self.rank} waited in {place} for its {what} "
                    f"(expected {self.number}, found {words[rank][word]})",
                    [rank],
                )
            time.sleep(20e-6 if now - start < 0.002 else 200e-6)
        self.fabric._fence()

    def __enter__(self) -> Call:
        self.fabric._call = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.fabric._call = None
        if error is not None:
            ranks = error.ranks if isinstance(error, FabricError) else [self.rank]
            message = str(error) if isinstance(error, FabricError) else f"rank {self.rank} raised {type(error).__name__}: {error}"
            self.fabric._write_note(2, {"operation": self.operation, "message": message[:4000], "ranks": list(ranks)})
            self.fabric._set(_ABORTED, self.number)


class VirtualFabric(HostFabric):
    """One of R virtual ranks of one process; make them with `virtual_ranks`, and run each in a thread of its own."""

    def __init__(self, rank: int, board: list[VirtualFabric], controls: list[memoryview]) -> None:
        super().__init__(rank, len(controls))
        self.ended = False  # its thread is done: nobody need wait for it
        self._board = board
        self._adopt_controls(controls)

    def _allocate(self, nbytes: int) -> _Arena:
        previous = self._arena.handle if self._arena else 0
        return _Arena(torch.empty(nbytes, dtype=torch.uint8), previous + 1)

    def _attach(self, rank: int, handle: Any) -> _Arena:
        arena = self._board[rank]._arena
        assert arena is not None
        return arena

    def _alive(self, rank: int) -> bool:
        return not (self._board[rank].closed or self._board[rank].ended)


def virtual_ranks(size: int) -> list[VirtualFabric]:
    """R virtual ranks of this process.

    Raises:
        TypeError: size is no int.
        ValueError: size is below 1.
    """
    _check_int("size", size, 1)
    controls = [memoryview(bytearray(_CONTROL_BYTES)) for _ in range(size)]
    board: list[VirtualFabric] = []
    board.extend(VirtualFabric(rank, board, controls) for rank in range(size))
    return board


Result = TypeVar("Result")


def run_virtual(function: Callable[[VirtualFabric], Result], fabrics: list[VirtualFabric]) -> list[Result]:
    """Run function(fabric) for every virtual rank, each in its own thread, and return the results in rank order.

    Raises:
        The exception of the lowest rank that failed by itself, else the first FabricError.
    """
    results: list[Any] = [None] * len(fabrics)
    errors: list[BaseException | None] = [None] * len(fabrics)

    def work(rank: int) -> None:
        try:
            results[rank] = function(fabrics[rank])
        except BaseException as error:
            errors[rank] = error
        finally:
            fabrics[rank].ended = True

    for fabric in fabrics:
        fabric.ended = False
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(fabrics))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [error for error in errors if error is not None]
    if failed:
        raise next((error for error in failed if not isinstance(error, FabricError)), failed[0])
    return results


def _ended(pid: int) -> bool:
    """Whether a process is gone or a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    return False


class _SharedFile:
    """Anonymous shared memory with a path that processes of the same user can open; it vanishes with the last process that maps it."""

    def __init__(self, nbytes: int) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("mok")
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:  # no such memory here: a file, removed when its owner lets go of it
            self._fd, self.path = tempfile.mkstemp(prefix="mok-")
            atexit.register(weakref.finalize(self, _remove, self.path))
        os.ftruncate(self._fd, nbytes)
        self.map = mmap.mmap(self._fd, nbytes)
        weakref.finalize(self, os.close, self._fd)


@functools.cache
def _wait_at_exit() -> None:
    """Let gloo's threads have Python's lock for a moment before the interpreter ends.

    They let go of a collective's tensors some time after it is done. One that asks for the lock when the interpreter has begun to end is
    stopped by Python, inside a destructor, and the process dies ("terminate called without an active exception"; torch 2.13, a DeviceMesh
    that is still there when the group is destroyed, an all-reduce shortly before the end: every third run).
    """
    atexit.register(time.sleep, _AT_EXIT_S)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


class ProcessFabric(HostFabric):
    """One of R processes of one machine, over a torch.distributed group that can gather Python objects (gloo).

    Raises:
        ValueError: the group's ranks are on different machines.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        if self.rank < 0:
            raise ValueError(f"group={group!r}: this process is not one of its ranks")
        _wait_at_exit()
        control = _SharedFile(_CONTROL_BYTES)
        self._own_files = [control]
        mine = (socket.gethostname(), _boot_id(), os.getpid(), control.path)
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=group)
        hosts = {(host, boot) for host, boot, _, _ in everyone}
        if len(hosts) > 1:
            raise ValueError(
                f"group={group!r}: on the CPU all ranks of an expert-parallel group must be on one machine, found {len(hosts)}"
            )
        self._pids = [pid for _, _, pid, _ in everyone]
        controls = [memoryview(control.map) if r == self.rank else memoryview(_map(path)) for r, (_, _, _, path) in enumerate(everyone)]
        self._adopt_controls(controls)
        dist.barrier(group=group)  # nobody goes on before all have mapped all

    def _allocate(self, nbytes: int) -> _Arena:
        file = _SharedFile(nbytes)
        self._own_files = [self._own_files[0], file]
        return _Arena(torch.frombuffer(file.map, dtype=torch.uint8), [file.path, nbytes])

    def _attach(self, rank: int, handle: Any) -> _Arena:
        return _Arena(torch.frombuffer(_map(handle[0]), dtype=torch.uint8), handle)

    def _alive(self, rank: int) -> bool:
        return not _ended(self._pids[rank])

    def close(self) -> None:
        super().close()
        del self._own_files[1:]  # the control block stays: peers may still look at it


def _map(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


_fabrics: weakref.WeakKeyDictionary[dist.ProcessGroup, HostFabric] = weakref.WeakKeyDictionary()
_alone = threading.local()


def host_fabric(group: dist.ProcessGroup | HostFabric | None) -> HostFabric:
    """The CPU fabric of a group, made at its first use (then collectively) and shared by all layers; None means a group of one.

    A group of one has a fabric per thread, so that threads may use layers at the same time. The ranks of a larger group must come to its
    calls in one order, hence from one thread at a time.
    """
    if isinstance(group, HostFabric) and not group.alone:
        return group
    if group is None or isinstance(group, HostFabric) or dist.get_world_size(group) == 1:
        if not hasattr(_alone, "fabric") or _alone.fabric.closed:
            _alone.fabric = virtual_ranks(1)[0]
            _alone.fabric.alone = True
        return _alone.fabric
    if group not in _fabrics or _fabrics[group].closed:
        _fabrics[group] = ProcessFabric(group)
    return _fabrics[group]


# ---- CUDA ----


class SymmetricFabric(Fabric):
    """Named regions in torch's symmetric memory: every rank allocates the same regions, and kernels address those of their peers.

    Collective. NVLink multicast is neither needed nor used.
    """

    def __init__(self, group: dist.ProcessGroup, regions: Sequence[Region], device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._offsets, nbytes = region_offsets(regions)
        self._regions = {region.name: region for region in regions}
        self.bytes: Tensor = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self.bytes, group)
        self.bytes.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes into a peer's memory before it is zero

    @property
    def bases(self) -> list[int]:
        """The device address of every rank's bytes."""
        return list(self._handle.buffer_ptrs)

    def region(self, name: str, rank: int | None = None) -> Tensor:
        region = self._regions[name]
        offset = self._offsets[name] // region.dtype.itemsize
        return self._handle.get_buffer(self.rank if rank is None else rank, region.shape, region.dtype, offset)

    def close(self) -> None:
        self.bytes, self._handle = self.bytes.new_empty(0), None
