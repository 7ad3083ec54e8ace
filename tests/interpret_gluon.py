"""Run a Gluon kernel under Triton's interpreter, which knows none: layouts are left out, shared memory is an array, and what is
asynchronous on the chip is so here.

A load's bytes are in shared memory only once its barrier, or a thread's group of copies, was waited for, and are read from global memory at
any time between; a product reads its operands at any time until it is waited for; a store leaves shared memory, and reaches global memory,
only when that is waited for. Each access that the chip would not order is an error here: a stage overwritten that a product or a store
still reads, operands that have not arrived, a barrier whose bytes or arrivals do not add up, a wait for a phase that nothing ends, a load
that nobody waits for. Accesses of a program's threads to each other's data, and fences, are not watched.
"""

from __future__ import annotations

import collections
import functools
import inspect
import os
import random
import tempfile
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

STORED = {tl.bfloat16: np.uint16, tl.float32: np.float32, tl.int64: np.int64}
GARBAGE = {tl.bfloat16: 0x7FC1, tl.int64: 0}  # a NaN


def plain(value: Any) -> Any:
    """The number that a constexpr or a scalar of the interpreter is."""
    if isinstance(value, tl.tensor):
        return value.handle.data.flat[0].item()
    return value.value if isinstance(value, tl.constexpr) else value


def shape_of(shape: Any) -> tuple[int, ...]:
    return tuple(int(plain(size)) for size in plain(shape))


def widened(place: Shared) -> np.ndarray:
    """bf16 as fp64, of two dimensions."""
    assert place.dtype == tl.bfloat16
    return (place.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(-1, place.data.shape[-1])


class Told:
    """What programs, which are processes, tell of their tasks: a few small numbers of each."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def add(self, *numbers: Any) -> None:
        os.write(self.file.fileno(), bytes(plain(number) for number in numbers))

    def take(self, width: int = 3) -> collections.Counter[tuple[int, ...]]:
        """How often each was told since the last time."""
        end = self.file.tell()
        self.file.seek(0)
        data = self.file.read(end)
        self.file.seek(0)
        return collections.Counter(tuple(data[i : i + width]) for i in range(0, len(data), width))


def expect_found(module: ModuleType, changes: Iterable[dict[str, Any]], run: Callable[[], object]) -> None:
    """Every changed version of a kernel's module fails in a program."""
    for changed in changes:
        with mock.patch.multiple(module, **changed):
            try:
                run()
            except RuntimeError as error:
                assert "a program failed" in str(error)
            else:
                raise AssertionError(f"{changed}: not found")


def block(data: np.ndarray, dtype: Any) -> tl.tensor:
    return tl.tensor(TensorHandle(np.ascontiguousarray(data), dtype), tl.block_type(dtype, list(data.shape)))


class Shared:
    """A part of shared memory, as the bits of its elements."""

    def __init__(self, chip: Chip, data: np.ndarray, dtype: Any) -> None:
        self.chip, self.data, self.dtype = chip, data, dtype

    def part(self, data: np.ndarray) -> Shared:
        return Shared(self.chip, data, self.dtype)

    def index(self, index: Any) -> Shared:
        return self.part(self.data[int(plain(index))])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        start, length = int(plain(start)), int(plain(length))
        return self.part(self.data[(slice(None),) * dim + (slice(start, start + length),)])

    def reshape(self, shape: Any) -> Shared:
        data = self.data.reshape(shape_of(shape))
        assert np.shares_memory(data, self.data)
        return self.part(data)

    def permute(self, order: Any) -> Shared:
        return self.part(self.data.transpose(shape_of(order)))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        return Shared(self.chip, self.data.reshape(-1).view(STORED[dtype]), dtype).reshape(shape)

    def load(self, layout: Any) -> tl.tensor:
        self.chip.expect_quiet(self, loads=True)
        return block(self.data.copy(), self.dtype)

    def store(self, value: tl.tensor) -> None:
        self.chip.expect_quiet(self, loads=True, products=True, stores=True)
        assert value.dtype == self.dtype
        self.data[...] = value.handle.data

    def columns(self) -> Shared:
        """Boxes of rows [n, rows, columns] one beside the other, transposed: of three dimensions still, because they share this memory."""
        return self.part(self.data.transpose(0, 2, 1))

    def meets(self, other: Shared) -> bool:
        return np.may_share_memory(self.data, other.data)


class Chip:
    """The asynchronous units of one program's multiprocessor."""

    def __init__(self) -> None:
        self.random = random.Random()
        self.barriers: dict[int, SimpleNamespace] = {}
        self.loads: list[SimpleNamespace] = []
        self.products: list[tuple[Shared, Shared]] = []
        self.stores: list[SimpleNamespace] = []
        self.groups: list[list[SimpleNamespace]] = [[]]  # of copies by threads; the last one is not closed

    def expect_quiet(self, place: Shared, loads: bool = False, products: bool = False, stores: bool = False) -> None:
        if loads:
            copies = [copy for group in self.groups for copy in group]
            assert not any(load.to.meets(place) for load in [*self.loads, *copies]), "a load to this place is under way"
        if products:
            assert not any(place.meets(operand) for pair in self.products for operand in pair), "a product still reads this place"
        if stores:
            assert not any(store.data is None and store.source.meets(place) for store in self.stores), "a store still reads this place"

    # ---- barriers ----

    def barrier(self, place: Shared) -> SimpleNamespace:
        return self.barriers[place.data.__array_interface__["data"][0]]

    def init(self, place: Shared, count: int) -> None:
        key = place.data.__array_interface__["data"][0]
        self.barriers[key] = SimpleNamespace(count=count, missing=count, bytes=0, phase=0)

    def turn(self, barrier: SimpleNamespace) -> None:
        if barrier.missing == 0 and barrier.bytes == 0:
            barrier.phase, barrier.missing = barrier.phase ^ 1, barrier.count

    def expect(self, place: Shared, count: Any, pred: Any = True) -> None:
        if plain(pred):
            barrier = self.barrier(place)
            assert barrier.missing > 0, "an arrival too many in this phase"
            barrier.missing, barrier.bytes = barrier.missing - 1, barrier.bytes + int(plain(count))
            self.turn(barrier)

    def wait(self, place: Shared, phase: Any) -> None:
        barrier = self.barrier(place)
        mine = [load for load in self.loads if load.barrier is barrier]
        while barrier.phase == plain(phase) and mine:
            load = mine.pop(self.random.randrange(len(mine)))
            self.loads.remove(load)
            load.to.data[...] = self.read(load) if load.data is None else load.data
            barrier.bytes -= load.to.data.nbytes
            self.turn(barrier)
        assert barrier.phase != plain(phase), f"a wait that never ends: {barrier}"

    # ---- the copy engine ----

    def read(self, load: SimpleNamespace) -> np.ndarray:
        return load.desc.load(load.at).handle.data

    def begin_load(self, desc: Any, at: Any, place: Shared, to: Shared, pred: Any = True) -> None:
        if plain(pred):
            self.expect_quiet(to, loads=True, products=True, stores=True)
            load = SimpleNamespace(desc=desc, at=[plain(i) for i in at], barrier=self.barrier(place), to=to, data=None)
            to.data[...] = GARBAGE[to.dtype]
            if self.random.random() < 0.5:
                load.data = self.read(load)
            self.loads.append(load)

    def begin_store(self, desc: Any, at: Any, source: Shared) -> None:
        self.expect_quiet(source, loads=True)
        self.stores.append(SimpleNamespace(desc=desc, at=[plain(i) for i in at], source=source, data=None))

    def store_wait(self, pending: Any) -> None:
        assert plain(pending) == 0
        for store in self.stores:
            store.data = store.source.data.copy() if store.data is None else store.data

    def finish_stores(self, token: Any) -> None:
        self.store_wait(0)
        for store in self.stores:
            store.desc.store(store.at, block(store.data, store.source.dtype))
        self.stores.clear()

    # ---- copies by threads ----

    def begin_copy(self, to: Shared, pointer: tl.tensor, mask: tl.tensor) -> None:
        self.expect_quiet(to, loads=True, products=True, stores=True)
        assert tuple(pointer.shape) == to.data.shape
        copy = SimpleNamespace(to=to, read=lambda: tl.load(pointer, mask=mask, other=0).handle.data, data=None)
        to.data[...] = GARBAGE[to.dtype]
        if self.random.random() < 0.5:
            copy.data = copy.read()
        self.groups[-1].append(copy)

    def commit_group(self) -> None:
        self.groups.append([])

    def wait_group(self, pending: Any) -> None:
        """All but the last `pending` closed groups are there."""
        while len(self.groups) > plain(pending) + 1:
            for copy in self.groups.pop(0):
                copy.to.data[...] = copy.read() if copy.data is None else copy.data

    # ---- products ----

    def multiply(self, a: Shared, b: Shared, total: tl.tensor, use_acc: Any = True, is_async: Any = False) -> tl.tensor:
        """With the bits of `experts.dot` under the interpreter."""
        self.expect_quiet(a, loads=True)
        self.expect_quiet(b, loads=True)
        self.products.append((a, b))
        product = (widened(a) @ widened(b)).astype(np.float32)
        return block(total.handle.data + product if plain(use_acc) else product, tl.float32)

    def multiply_wait(self, pending: Any, deps: Any) -> tl.tensor:
        while len(self.products) > plain(pending):
            self.products.pop(0)
        return deps[0]

    def at_end(self) -> None:
        assert not self.loads and not any(self.groups), "a load that nobody waits for"
        assert not self.products and not self.stores

    def allocate(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        return Shared(self, np.full(shape_of(shape), GARBAGE[dtype], STORED[dtype]), dtype)


class Language:
    """What stands for `triton.experimental.gluon.language`: Triton's, with layouts left out."""

    def __init__(self, chip: Chip) -> None:
        self.allocate_shared_memory = chip.allocate

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)  # when it is called: the interpreter changes them

    def arange(self, start: Any, end: Any, layout: Any) -> tl.tensor:
        return tl.arange(plain(start), plain(end))

    def zeros(self, shape: Any, dtype: Any, layout: Any) -> tl.tensor:
        return tl.zeros(shape_of(shape), dtype)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any) -> tl.tensor:
        return tl.full(shape_of(shape), value, dtype)

    def static_range(self, *limits: Any) -> range:
        return range(*(plain(limit) for limit in limits))

    def SliceLayout(self, dim: int, parent: Any) -> None:
        return None

    def thread_barrier(self) -> None:
        pass


def interpreted(*modules: ModuleType, note: Callable[[str, tuple, Any], None] | None = None) -> dict[str, Any]:
    """The kernels of modules by name, each as `interpret.run_concurrently` takes it. For good: the modules' other Gluon functions become
    interpreted.

    note(name, arguments, result) is told of their calls.
    """
    chip = Chip()

    def followed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        run = InterpretedFunction(fn)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            if note:
                note(name, args, result)
            return result

        return call

    def program(kernel: Callable[..., Any]) -> Any:
        @functools.wraps(kernel)
        def run(**arguments: Any) -> None:
            chip.random.seed(os.getpid())
            kernel(**arguments)
            chip.at_end()

        run.__signature__ = inspect.signature(kernel)  # type: ignore[attr-defined]
        run.__annotations__ = {name: "constexpr" for name, kind in kernel.__annotations__.items() if "constexpr" in str(kind)}
        return SimpleNamespace(fn=run)

    kernels = {}
    for module in modules:
        functions = {name: value.fn for name, value in vars(module).items() if getattr(value, "is_gluon", lambda: False)()}
        kernels |= {name: program(fn) for name, fn in functions.items() if name.endswith("_kernel")}
        vars(module).update(
            {name: followed(name, fn) for name, fn in functions.items()}
            | {name: value.value for name, value in vars(module).items() if isinstance(value, tl.constexpr)},
            gl=Language(chip), fence_async_shared=lambda: None, finish_copy_engine_stores=chip.finish_stores,
            mbarrier=SimpleNamespace(init=chip.init, expect=chip.expect, wait=chip.wait, MBarrierLayout=lambda: None),
            tma=SimpleNamespace(store_wait=chip.store_wait), copy_in=chip.begin_load, copy_out=chip.begin_store,
            gather_in=chip.begin_copy, async_copy=SimpleNamespace(commit_group=chip.commit_group, wait_group=chip.wait_group),
            reinterpret=Shared.reinterpret, columns_of=Shared.columns, thread_barrier=lambda: None,
            warpgroup_mma=chip.multiply, warpgroup_mma_wait=chip.multiply_wait, tl=tl,
        )  # fmt: skip
    return kernels
