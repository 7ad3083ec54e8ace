"""Launches that cost the host a tenth of Triton's own.

Triton looks at every argument of every launch, joins what it found into a string, and compares all of a kernel's global constants with what
they were when it was compiled: tens of microseconds, of the largest kernels here hundreds. `enqueue` makes a tuple of what compiled code
can depend on: the device, options and constants, and of every other argument its kind. A tuple that has been seen leads to the compiled
kernel; a new one goes Triton's way. Kinds are at least as fine as Triton's: of pointers the dtype and whether they are multiples of 16
bytes, of integers the width and, unless the kernel says otherwise, whether they are 1 or multiples of 16. What Triton reads of its knobs
(debug, instrumentation) counts as it is when a kind is new.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

Grid = tuple[int, ...]


def cdiv(a: int, b: int) -> int:
    """The quotient rounded up. Triton's own is also a kernel's, which costs microseconds; so is its `next_power_of_2`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, for n from 1 on."""
    return 1 << (n - 1).bit_length()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on this device; the interpreter's is the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def aligned(tensor: Tensor) -> Tensor:
    """As the copy engine and wide loads read it: contiguous, from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


class Descriptor(TensorDescriptor):
    """Triton's descriptor of blocks of a row-major tensor, made without its checks, which take ten times as long: `enqueue` makes it anew,
    with them, where an argument's kind is new."""

    def __init__(self, base: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int]) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape  # type: ignore[assignment]

    def checked(self) -> TensorDescriptor:
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape))


@functools.cache
def layout_of(bits: int, rank: int) -> Any:
    """How blocks of a descriptor lie in shared memory, for a Gluon kernel."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


def checked(kernel: Any, value: Any) -> Any:
    """An argument as Triton takes it: descriptors checked, for a Gluon kernel with a layout."""
    if not isinstance(value, TensorDescriptor):
        return value
    if not kernel.is_gluon():
        return value.checked() if isinstance(value, Descriptor) else value
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    layout = layout_of(8 * value.base.element_size(), len(value.block_shape))
    return GluonDescriptor(value.base, list(value.shape), list(value.strides), list(value.block_shape), layout)


def _of_integer(value: int) -> tuple[object, ...]:
    return _of_plain_integer(value), value == 1, value % 16 == 0


def _of_plain_integer(value: int) -> int:
    """Of one that the kernel does not want to know more of: 32 or 64 bits, or beyond what has a sign."""
    return (-(2**31) <= value < 2**31) + 2 * (value >= 2**63)


def _of_tensor(value: Tensor) -> tuple[torch.dtype, bool]:
    return value.dtype, value.data_ptr() % 16 == 0


def _of_descriptor(value: TensorDescriptor) -> tuple[Any, ...]:
    return value.base.dtype, value.base.data_ptr() % 16 == 0, *value.block_shape


class _Kinds(dict[type, Callable[[Any], Any]]):
    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        return _of_tensor  # parameters, for instance


_OTHERS: dict[type, Callable[[Any], Any]] = {Descriptor: _of_descriptor, TensorDescriptor: _of_descriptor, bool: type, float: type}
_KINDS = _Kinds({**_OTHERS, Tensor: _of_tensor, int: _of_integer, type(None): type})
_PLAIN_KINDS = _Kinds({**_KINDS, int: _of_plain_integer})


class _Kernel:
    """What is known of a kernel: its parameters, and what was compiled, by kind."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.names = kernel, [param.name for param in kernel.params]
        self.constants = [param.num for param in kernel.params if param.is_constexpr]
        self.plain = [param.num for param in kernel.params if param.do_not_specialize and not param.is_constexpr]
        self.others = [param.num for param in kernel.params if not param.do_not_specialize and not param.is_constexpr]
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def kinds(self, values: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
        constants = [values[i] for i in self.constants]
        return (
            torch.cuda.current_device(), *options.items(), *constants, *map(type, constants),  # True is 1, and not the same constant
            *[_KINDS[type(value)](value) for value in [values[i] for i in self.others]],
            *[_PLAIN_KINDS[type(value)](value) for value in [values[i] for i in self.plain]],
        )  # fmt: skip


_kernels: dict[int, _Kernel] = {}  # by id: Triton makes a kernel's hash of its source


def enqueue(kernel: Any, grid: Grid, *arguments: Any, **named: Any) -> None:
    """`kernel[grid](*arguments, **named)`. named: parameters, and options of the compiler.

    Interpreted kernels, and whatever else is no compiled kernel, are called as they are.
    """
    if not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, **named)
        return
    known = _kernels.get(id(kernel))
    if known is None:
        known = _kernels[id(kernel)] = _Kernel(kernel)
    values = [*arguments, *[named.pop(name) for name in known.names[len(arguments) :]]]
    kinds = known.kinds(values, named)
    compiled = known.compiled.get(kinds)
    if compiled is None:
        made = kernel[grid](*[checked(kernel, value) for value in values], **named)
        known.compiled[kinds] = made.result() if hasattr(made, "result") else made  # of what is compiled in the background
    else:
        compiled[(*grid, 1, 1)](*values)
