"""Launches that do not go Triton's way: which ones may share a compiled kernel, and what is passed to it."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")

from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from mok.kernels import launcher  # noqa: E402
from mok.kernels.combine import combine_kernel  # noqa: E402
from mok.kernels.launcher import Descriptor, cdiv, enqueue, next_power_of_2  # noqa: E402


@triton.jit(do_not_specialize=["plain"])
def kernel(x_ptr, desc, number, plain, SIZE: triton.language.constexpr): ...


class Compiled:
    """What a launch by Triton returns; it says what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getitem__(self, grid):  # type: ignore[no-untyped-def]
        return lambda *arguments: self.calls.append((grid, *arguments))


@pytest.fixture
def slow(monkeypatch):
    """The launches that went Triton's way, each with what it returned."""
    launches: list[tuple[dict[str, object], Compiled]] = []

    def run(*arguments, grid, warmup, **options):  # type: ignore[no-untyped-def]
        launches.append((dict(arguments=arguments, grid=grid, **options), Compiled()))
        return launches[-1][1]

    monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "_kernels", {})
    return launches


X = torch.zeros(64, 64, dtype=torch.bfloat16)
BLOCKS = Descriptor(X, (64, 64), (64, 1), (16, 32))
GIVEN = dict(x_ptr=X, desc=BLOCKS, number=7, plain=7, SIZE=4)


def test_the_second_launch_of_a_kind_goes_to_what_the_first_one_compiled(slow):
    enqueue(kernel, (3,), X, BLOCKS, number=7, plain=7, SIZE=4, num_warps=8)
    (first, compiled), other = slow[0], Descriptor(X[2:], (62, 64), (64, 1), (16, 32))
    x, desc, *rest = first["arguments"]
    assert x is X and rest == [7, 7, 4] and (first["grid"], first["num_warps"]) == ((3,), 8)
    assert type(desc) is TensorDescriptor and desc == TensorDescriptor(X, [64, 64], [64, 1], [16, 32]), "checked"
    later = torch.ones(8, dtype=torch.bfloat16)
    enqueue(kernel, (5, 2), num_warps=8, SIZE=4, plain=2**20, number=9, desc=other, x_ptr=later)
    assert len(slow) == 1 and [call[0] for call in compiled.calls] == [(5, 2, 1, 1)]
    _, *arguments = compiled.calls[0]
    assert arguments[0] is later and arguments[1] is other and arguments[2:] == [9, 2**20, 4]


@pytest.mark.parametrize(
    "change",
    [
        dict(x_ptr=X.float()), dict(x_ptr=X.view(-1)[1:]), dict(x_ptr=None), dict(number=1), dict(number=16), dict(number=2**31),
        dict(number=1.0), dict(number=True), dict(plain=2**31), dict(plain=-(2**31) - 1), dict(SIZE=8), dict(SIZE=4.0), dict(desc=None),
        dict(desc=Descriptor(X, (64, 64), (64, 1), (32, 32))), dict(desc=Descriptor(X, (1, 64, 64), (64, 64, 1), (1, 16, 32))),
        dict(desc=Descriptor(X.half(), (64, 64), (64, 1), (16, 32))), dict(num_warps=4), dict(num_stages=8),
    ],
)  # fmt: skip
def test_another_kind_is_another_launch(slow, change):
    enqueue(kernel, (1,), **GIVEN, num_warps=8)
    enqueue(kernel, (1,), **{**GIVEN, "num_warps": 8, **change})
    enqueue(kernel, (1,), **{**GIVEN, "num_warps": 8, **change})
    assert len(slow) == 2 and [len(compiled.calls) for _, compiled in slow] == [0, 1]


def test_what_a_kernel_does_not_ask_about_an_integer_makes_no_kind(slow):
    for plain in (7, 1, 16, 0, -5, 2**31 - 1):
        enqueue(kernel, (1,), **{**GIVEN, "plain": plain})
    assert len(slow) == 1 and len(slow[0][1].calls) == 5


def test_what_is_compiled_in_the_background_is_waited_for(slow, monkeypatch):
    class Future:
        def result(self):  # type: ignore[no-untyped-def]
            return Compiled()

    monkeypatch.setattr(kernel, "run", lambda *arguments, **options: Future())
    for _ in range(2):
        enqueue(kernel, (1,), **GIVEN)
    ((compiled,),) = [known.compiled.values() for known in launcher._kernels.values()]
    assert len(compiled.calls) == 1


def test_tritons_own_descriptors_are_taken(slow):
    for _ in range(2):
        enqueue(kernel, (1,), **{**GIVEN, "desc": TensorDescriptor(X, [64, 64], [64, 1], [16, 32])})
    assert len(slow) == 1 and len(slow[0][1].calls) == 1


def test_another_device_is_another_kind(slow, monkeypatch):
    enqueue(kernel, (1,), **GIVEN)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    enqueue(kernel, (1,), **GIVEN)
    assert len(slow) == 2


def test_kinds_are_as_fine_as_tritons():
    """Two values of one kind are compiled alike: by what Triton itself says of them for an H200."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    memory = torch.zeros(256, dtype=torch.uint8)
    tensors = [memory[i:].view(dtype) for i in (0, 16, 8) for dtype in (torch.uint8, torch.bfloat16, torch.int64)]
    tensors += [memory[4:], memory[1:]]
    integers = [0, 1, 2, 15, 16, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, 2**62, 2**63, -(2**31), -(2**31) - 1, 2**40, 2**40 + 1]
    blocks = [Descriptor(x, (64, 64), (64, 1), shape) for x in (X, X.float()) for shape in ((16, 32), (32, 16))]
    values = [*tensors, torch.nn.Parameter(X), *integers, *blocks, None, True, False, 1.0, 2.5]
    about = launcher._Kernel(kernel)
    for position, specialize in ((2, True), (3, False)):
        kind = lambda value: about.kinds([X, BLOCKS, *[value if i == position else 7 for i in (2, 3)], 4], {})  # noqa: B023, E731
        found = [(kind(value), native_specialize_impl(CUDABackend, value, False, specialize, True)) for value in values]
        assert not [(a, b) for a, b in itertools.combinations(found, 2) if a[0] == b[0] and a[1] != b[1]]
        assert len({a[0] for a in found}) >= 15


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_a_descriptor_is_checked_where_its_kind_is_new(slow):
    with pytest.raises(AssertionError, match="16-byte aligned"):
        enqueue(kernel, (1,), **{**GIVEN, "desc": Descriptor(X.view(-1)[1:], (8, 64), (64, 1), (16, 32))})
    assert not slow


def test_of_gluon_kernels_descriptors_get_layouts():
    gluon = pytest.importorskip("mok.kernels.forward_hopper").forward_hopper_kernel
    made = launcher.checked(gluon, Descriptor(X, (64, 64), (64, 1), (16, 64)))
    assert type(made).__module__.endswith("hopper") and (made.base is X) and made.layout is launcher.layout_of(16, 2)
    assert launcher.checked(gluon, 5) == 5 and type(launcher.checked(combine_kernel, BLOCKS)) is TensorDescriptor


def test_the_hosts_integers():
    for n in (*range(1, 70), 2**20, 2**20 + 1):
        assert next_power_of_2(n) == triton.next_power_of_2(n) and cdiv(n, 7) == triton.cdiv(n, 7)
    assert cdiv(0, 5) == 0


def test_memory_made_in_inference_mode_is_ordinary():
    """An evaluation before training makes the memory that training writes to in place."""
    from mok.kernels import ops

    with torch.inference_mode():
        workspace = ops.make_workspace(None, torch.device("cpu"), 8, 64, 2, 4, 1.0, 2)
        taken = workspace.take("x_ring", (4, 64), torch.bfloat16)
    made = [taken, workspace.memory.buffer, workspace.memory.host, *workspace.memory.own.values(), *workspace.memory.addresses.values()]
    assert not any(tensor.is_inference() for tensor in made)
    taken.zero_()
    workspace.memory.clear_failure()
