"""Operators that eager code passes by: the same values and gradients either way, and whoever looks for the operator sees it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mok.executor import final
from mok.operators import operator, watched


@operator("mok_test::scaled")
def scaled(x: Tensor, others: list[Tensor], weight: Tensor | None, factor: float, kept: list[Tensor]) -> list[Tensor]:
    calls.append("scaled")
    return [x * factor + sum(others) + (0 if weight is None else weight), x + 1, *(tensor * 2 for tensor in kept)]


@scaled.register_fake
def _(x, others, weight, factor, kept):  # type: ignore[no-untyped-def]
    return [torch.empty_like(x), torch.empty_like(x), *(torch.empty_like(tensor) for tensor in kept)]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, others, _, ctx.factor, kept = inputs
    ctx.save_for_backward(x, output[1])
    ctx.counts = len(others), len(kept)
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx, d_outs):  # type: ignore[no-untyped-def]
    x, plus_1 = ctx.saved_tensors
    calls.append(f"needs {ctx.needs_input_grad[0]} {ctx.needs_input_grad[2]}")
    d_x = d_outs[0] * ctx.factor * (plus_1 - x).round()
    return d_x, [None] * ctx.counts[0], d_outs[0] if ctx.needs_input_grad[2] else None, None, [None] * ctx.counts[1]


scaled.register_autograd(final(_gradient), _save)


@operator("mok_test::add_to", mutated=("sums",))
def add_to(x: Tensor, sums: list[Tensor]) -> Tensor:
    for total in sums:
        total += x
    return x * 2


add_to.register_fake(lambda x, sums: torch.empty_like(x))


@operator("mok_test::negated")
def negated(x: Tensor) -> Tensor:
    raise NotImplementedError


@negated.register_kernel("cpu")
def _(x: Tensor) -> Tensor:
    return -x


negated.register_fake(torch.empty_like)
negated.register_autograd(lambda ctx, d: negated(d), lambda ctx, inputs, output: None)

calls: list[str] = []


@pytest.fixture(autouse=True)
def forget():
    calls.clear()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def problem() -> tuple[Tensor, list[Tensor], Tensor, float, list[Tensor]]:
    g = torch.Generator().manual_seed(0)
    x, other, weight, kept = (torch.randn(3, 4, generator=g) for _ in range(4))
    return x.requires_grad_(), [other], weight.requires_grad_(), 3.0, [kept]


def step(function, arguments):  # type: ignore[no-untyped-def]
    out, *rest = function(*arguments)
    return out, *rest, *torch.autograd.grad(out, [arguments[0], arguments[2]], torch.ones_like(out))


def test_both_ways_have_the_same_values_and_gradients():
    short, long = step(scaled, problem()), step(scaled.operator, problem())
    assert len(short) == 5 and all(torch.equal(a, b) for a, b in zip(short, long, strict=True))
    assert torch.equal(short[3], torch.full((3, 4), 3.0)) and torch.equal(short[4], torch.ones(3, 4))
    assert calls == ["scaled", "needs True True"] * 2


def test_what_wants_no_gradient_gets_none():
    x, others, weight, factor, kept = problem()
    out, *rest = scaled(x, others, weight.detach(), factor, kept)
    out.sum().backward()
    assert calls[-1] == "needs True False" and torch.equal(x.grad, torch.full((3, 4), 3.0))
    assert out.requires_grad and not any(tensor.requires_grad for tensor in rest)
    assert not scaled(x.detach(), others, None, factor, kept)[0].requires_grad
    with torch.no_grad():
        assert not scaled(x, others, weight, factor, kept)[0].requires_grad


def test_a_second_derivative_is_refused_as_by_the_operator():
    for way in (scaled, scaled.operator):
        x, *rest = problem()
        (d_x,) = torch.autograd.grad(way(x, *rest)[0].sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            d_x.sum().backward()


def test_eager_code_does_not_pass_the_dispatcher(monkeypatch):
    monkeypatch.setattr(scaled, "operator", None)
    step(scaled, problem())


def test_whoever_looks_for_operators_sees_them():
    with Seen() as seen:
        step(scaled, problem())
    assert "mok_test.scaled.default" in seen.names
    with FakeTensorMode() as mode:
        made = scaled(mode.from_tensor(torch.ones(2, 2)), [], None, 1.0, [])
    assert type(made[0]) is not Tensor and calls == ["scaled", "needs True True"]
    assert scaled(made[0], [], None, 1.0, [])[0].shape == (2, 2) and len(calls) == 2, "outside the mode, too"
    assert torch.equal(torch.func.vmap(negated)(torch.ones(2, 3)), -torch.ones(2, 3)), "which it knows how to repeat"
    assert not watched(problem()) and not watched([torch.nn.Parameter(torch.ones(1)), [made[0]]])


def test_compiled_whole():
    graphs = []

    def backend(graph, _):  # type: ignore[no-untyped-def]
        graphs.append(str(graph.code))
        return graph

    compiled = torch.compile(lambda *arguments: scaled(*arguments)[0] * 2, backend=backend, fullgraph=True)
    out = compiled(*problem())
    assert "mok_test.scaled" in graphs[0] and torch.equal(out, scaled(*problem())[0] * 2)


def test_what_is_changed_is_seen_to_be():
    """As by the operator: a tensor that a graph needs and that was changed is not used in its place."""
    for way in (add_to, add_to.operator):
        x, total = torch.ones(2), torch.zeros(2, requires_grad=True)
        leaf = total * 1
        product = leaf * leaf
        assert torch.equal(way(x, [leaf.detach()]), x * 2) and torch.equal(leaf.detach(), x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_numbers_of_other_kinds_become_pythons():
    x, *rest = problem()
    (out, *_), seen = scaled(x, rest[0], rest[1], np.float64(3), rest[3]), []
    assert torch.equal(out, scaled(x, *rest)[0])

    @operator("mok_test::kinds")
    def kinds(x: Tensor, number: int, factor: float) -> Tensor:
        seen.append((type(number), type(factor)))
        return x * number * factor

    kinds.register_fake(lambda x, *_: torch.empty_like(x))
    for way in (kinds, kinds.operator):
        way(torch.ones(2), np.int64(3), np.float32(2))
    assert seen == [(int, float)] * 2


def test_without_a_formula_a_backward_says_so():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="formula"):
        add_to(x, []).sum().backward()


def test_errors_and_profiles_have_the_operators_name():
    assert "mok_test_scaled" in type(scaled(*problem())[0].grad_fn).__name__


def test_tracing_sees_the_operator():
    traced = torch.jit.trace(lambda x: negated(x), torch.ones(2), check_trace=False)
    assert "mok_test::negated" in str(traced.graph)


def test_a_device_has_its_own_function():
    x = torch.ones(3, requires_grad=True)
    for way in (negated, negated.operator):
        (d_x,) = torch.autograd.grad(way(x).sum(), x)
        assert torch.equal(way(x), -torch.ones(3)) and torch.equal(d_x, -torch.ones(3))
