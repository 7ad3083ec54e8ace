"""Operators of PyTorch, and the short way to the functions behind them.

torch.compile leaves an operator whole. In eager mode the way to one that is written in Python takes the host 0.05 to 0.7 ms, by the number
of its tensors, several times what it takes to launch what a layer needs. So eager code calls the function itself, under a
`torch.autograd.Function` where there is a formula; whoever looks at operators (torch.compile, a dispatch mode, torch.func's transforms,
tensors that are no plain ones) is shown the operator. Both compute the same.
"""

from __future__ import annotations

import inspect
import numbers
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
PASSED = frozenset((*PLAIN, int, float, bool, str, list, type(None)))  # as they are


def watched(arguments: Sequence[object]) -> bool:
    """Whether somebody looks at operators."""
    if torch.compiler.is_compiling():  # asked first: torch.compile traces no further
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        return True
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    return any([type(tensor) not in PLAIN or _is_batched(tensor) for tensor in tensors])


def _number(value: Any) -> Any:
    """Other kinds of numbers (NumPy's) as Python's, as the dispatcher makes them."""
    if isinstance(value, numbers.Number) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)  # type: ignore[arg-type]
    return value


_is_batched = torch._C._functorch.is_legacy_batchedtensor  # of autograd.grad(is_grads_batched=True), which is no transform


class Operator:
    """A function and its operator. Called with positional arguments.

    mutated: names of parameters, lists of tensors, that it changes.
    """

    def __init__(self, name: str, function: Callable[..., Any], mutated: Sequence[str] = ()) -> None:
        self.operator = torch.library.custom_op(name, mutates_args=mutated)(function)
        self.name, self.register_fake = name, self.operator.register_fake
        self.function, self.kernels = function, dict[str, Callable[..., Any]]()
        signature = inspect.signature(function)
        self.many = str(signature.return_annotation).startswith("list")  # of results
        self.mutated = [list(signature.parameters).index(name) for name in mutated]
        self.apply: Callable[..., Any] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        if watched(arguments):
            return self.operator(*arguments)
        if not PASSED.issuperset(map(type, arguments)):
            arguments = tuple(map(_number, arguments))
        if self.apply is not None:
            return self.apply(*arguments)
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in arguments):
            return self.operator(*arguments)  # which says in a backward that there is no formula
        with torch.no_grad():
            results = self.run(*arguments)
        for i in self.mutated:
            if arguments[i]:
                torch.autograd.graph.increment_version(arguments[i])
        return results

    def run(self, *arguments: Any) -> Any:
        """The function for the device of the first tensor."""
        function = self.function
        if self.kernels:
            function = self.kernels.get(next(value.device.type for value in arguments if isinstance(value, Tensor)), function)
        return function(*arguments)

    def register_kernel(self, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: what is called in place of the function on this type of device."""

        def registered(function: Callable[..., Any]) -> Callable[..., Any]:
            self.operator.register_kernel(device)(function)
            self.kernels[device] = function
            return function

        return registered

    def register_autograd(self, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """The formula of the gradients, as `torch.library.register_autograd` takes it."""
        self.operator.register_autograd(backward, setup_context=setup_context)
        run, many = self.run, self.many

        def forward(ctx: Any, *arguments: Any) -> Any:  # with a setup_context of its own torch would look at the signature every time
            results = run(*arguments)
            setup_context(ctx, arguments, results)
            return tuple(results) if many else results

        def formula(ctx: Any, *d_outs: Any) -> Any:
            found = backward(ctx, list(d_outs)) if many else backward(ctx, *d_outs)
            if isinstance(found, tuple):  # of an argument that is a list, one for each of its tensors
                return tuple(None if isinstance(gradient, list | tuple) else gradient for gradient in found)
            return found

        body = {"forward": staticmethod(forward), "backward": staticmethod(formula)}
        kind: Any = types.new_class(self.name.replace("::", "_"), (torch.autograd.Function,), exec_body=lambda names: names.update(body))
        self.apply = kind.apply  # errors and profiles show its name


def operator(name: str, mutated: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """A decorator: the function as an operator of this name."""
    return lambda function: Operator(name, function, mutated)
