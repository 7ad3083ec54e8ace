"""The low-level API under Triton's interpreter, programs one after the other; this file as a program runs all cases and prints one JSON
object {case: "" or traceback}.

Run alone: TRITON_INTERPRET=1 python tests/test_functional_kernels.py [case ...]
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from layers import TOLERANCE, assert_close, assert_equal
from torch import Tensor

import mok
from mok import executor, functional, reference
from mok.functional import MoKConfig, MoKForwardContext, MoKSchedule, MoKWorkspace
from mok.ops import mxfp8_quantize
from mok.quantize import FP8_SQUARE, Quantized, quantize

CPU = torch.device("cpu")
CONFIG = MoKConfig(minibatch_size=128, macrobatch_size=512, num_sms=2, saved_rows=128)
NAMES = ("d_x", "d_weights", "d_gate", "d_up", "d_down", "d_shared_gate", "d_shared_up", "d_shared_down")
BF16 = TOLERANCE[torch.bfloat16]


class Problem:
    """Inputs of one rank with masked slots; the last token's weights are negative and 0."""

    def __init__(self, tokens=14, hidden=64, width=32, experts=2, top_k=2, shared_width=48, limit=None, seed=0) -> None:  # type: ignore[no-untyped-def]
        g = torch.Generator().manual_seed(seed)

        def bf16(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=g) * (shape[-1] ** -0.5 if len(shape) > 2 or shape[0] != tokens else 1)).bfloat16()

        self.limit, self.experts = limit, experts
        self.x, self.d_out = bf16(tokens, hidden), bf16(tokens, hidden)
        self.ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].clone(memory_format=torch.contiguous_format)
        self.weights = torch.rand(tokens, top_k, generator=g)
        if tokens:
            self.ids[0], self.ids[1, 0] = -1, -1
            self.weights[-1, 0], self.weights[-1, -1] = -0.5, 0.0
        self.routed = bf16(experts, width, hidden), bf16(experts, width, hidden), bf16(experts, hidden, width)
        self.shared: tuple[Tensor | None, ...] = (None, None, None)
        if shared_width:
            self.shared = bf16(shared_width, hidden), bf16(shared_width, hidden), bf16(hidden, shared_width)

    @property
    def layer(self) -> tuple[object, ...]:
        """The arguments that forward and backward have in common."""
        return (self.x, self.weights, *self.shared, *self.routed, self.limit)

    def workspace(self) -> MoKWorkspace:
        """On the CPU, where `create_workspace` makes none."""
        from mok.kernels import ops

        tokens, hidden = self.x.shape
        top_k = self.ids.shape[1]
        inner = ops.make_workspace(None, CPU, tokens, hidden, top_k, functional.MAX_EXPERTS, 30.0, 2, None)
        return MoKWorkspace(inner, None, 0, 1, CPU, tokens, hidden, top_k)

    def run(self, config: MoKConfig = CONFIG, context: Callable[..., MoKForwardContext] | None = None, **options) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
        """Forward and backward on poisoned memory; context replaces the forward's."""
        workspace = self.workspace()
        poison(workspace)
        schedule = functional.build_schedule(workspace, config, self.ids, self.experts)
        out, made = functional.forward(config, workspace, schedule, *self.layer)
        poison(workspace)
        if context is not None:
            made = context(workspace, schedule)
            poison(workspace)
        return {"out": out, **self.gradients(config, workspace, schedule, made, self.d_out, **options)}

    def gradients(self, config, workspace, schedule, context, d_out, **options) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
        values = functional.backward(config, workspace, schedule, context, d_out, *self.layer, **options)
        workspace.check()
        return {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}

    def recompute(self, workspace: MoKWorkspace, schedule: MoKSchedule) -> MoKForwardContext:
        return functional.recompute_forward_context(
            CONFIG, workspace, schedule, self.x, *self.shared[:2], *self.routed[:2], self.limit
        )  # fmt: skip

    def by(self, moe, swiglu, dtype: torch.dtype) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
        """Output and gradients by autograd of a definition, from leaves of a dtype."""
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (self.x, *self.routed, *self.shared) if t is not None]
        weights = self.weights.to(executor.wide_dtype(dtype), copy=True).requires_grad_()
        x, routed, shared = leaves[0], leaves[1:4], leaves[4:]
        first = swiglu(x, *shared, self.limit) if shared else None
        out = moe(x, self.ids, weights, *routed, shared=first, clamp=self.limit)
        out.backward(self.d_out.to(dtype))
        gradients = [leaf.grad for leaf in leaves]
        return {"out": out.detach(), **dict(zip(NAMES, [gradients[0], weights.grad, *gradients[1:]], strict=False))}


def poison(workspace: MoKWorkspace) -> None:
    """NaN in everything that a call may not rely on: peer-visible memory and scratch; and freed blocks for the next allocations."""
    for buffer in (*workspace.inner.memory.own.values(), *workspace.inner.scratch.values()):
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
    for size in (16, 64, 80, 128, 256, 512):
        del [torch.full((size, size), float("nan"), dtype=torch.bfloat16) for _ in range(8)][:]


# ---- cases ----


def case_near_the_reference() -> None:
    """Against autograd of the definition, in fp64 where no rounding decides who is clipped, and against the CPU layer."""
    for problem, dtype in (
        (Problem(hidden=112, width=48, experts=4), torch.float64),
        (Problem(shared_width=80, limit=1.0), torch.bfloat16),
    ):
        got = problem.run()
        assert_close(got, problem.by(reference.moe, reference.swiglu, dtype), BF16)
        assert_close(got, problem.by(mok.moe, executor.row_swiglu, torch.bfloat16), BF16)
        assert not got["d_weights"][0].any() and got["d_weights"][-1].all()  # masked: none; a weight of 0: the right one
        assert got["d_x"].dtype == torch.bfloat16 and got["d_weights"].dtype == torch.float32


def case_equals_the_layer() -> None:
    """The bits of `mok.MoE`'s operators under autograd, which save other rows."""
    from mok.kernels import autograd

    problem = Problem(limit=1.0)
    leaves = [t.clone().requires_grad_() for t in (problem.x, problem.weights, *problem.routed, *problem.shared) if t is not None]
    x, weights, *matrices = leaves
    tuning = mok.Tuning(num_sms=1, minibatch=256, macrobatch=256)
    out, counts = autograd.layer(
        x, problem.ids, weights, tuple(matrices[:3]), tuple(matrices[3:]), None, None, [], [], problem.experts, 1.0, 1.0, None, tuning
    )  # fmt: skip
    out.backward(problem.d_out)
    assert_equal(problem.run(), {"out": out.detach(), **dict(zip(NAMES, [leaf.grad for leaf in leaves], strict=True))})
    workspace = problem.workspace()
    schedule = functional.build_schedule(workspace, CONFIG, problem.ids, num_experts=problem.experts)
    assert torch.equal(schedule.routes_per_expert, counts)


def case_knobs_and_saved_rows() -> None:
    problem = Problem()
    first = problem.run()
    for changes in (dict(saved_rows=0), dict(saved_rows=None, num_sms=1, minibatch_size=256, macrobatch_size=256)):
        assert_equal(problem.run(dataclasses.replace(CONFIG, **changes)), first)


def case_a_context_serves_many_backwards() -> None:
    problem = Problem()
    workspace = problem.workspace()
    schedule = functional.build_schedule(workspace, CONFIG, problem.ids, problem.experts)
    _, context = functional.forward(CONFIG, workspace, schedule, *problem.layer)
    before = {name: value.clone() for name, value in vars(context).items() if isinstance(value, Tensor)}
    first = problem.gradients(CONFIG, workspace, schedule, context, problem.d_out)
    other = problem.gradients(CONFIG, workspace, schedule, context, problem.x)
    poison(workspace)
    assert_equal(problem.gradients(CONFIG, workspace, schedule, context, problem.d_out), first)
    assert not torch.equal(other["d_gate"], first["d_gate"])
    assert_equal({name: getattr(context, name) for name in before}, before)


def case_recomputed_context() -> None:
    """Its gate and up of the shared experts have the forward's bits, and so has every gradient; odd sizes, more than one tile."""
    problem = Problem(limit=0.5)
    assert_equal(problem.run(context=problem.recompute), problem.run())
    for problem in (Problem(tokens=140, hidden=272, width=16, experts=1, top_k=1, shared_width=144), Problem(shared_width=0)):
        workspace = problem.workspace()
        schedule = functional.build_schedule(workspace, CONFIG, problem.ids, problem.experts)
        poison(workspace)
        made = problem.recompute(workspace, schedule)
        assert made.saved_rows == 0 and made.gate_routed.shape == (0, problem.routed[0].shape[1])
        if problem.shared[0] is None:
            assert made.gate_shared is None and made.up_shared is None
        else:
            _, want = functional.forward(CONFIG, workspace, schedule, *problem.layer)
            assert torch.equal(made.gate_shared, want.gate_shared) and torch.equal(made.up_shared, want.up_shared)
            assert made.gate_shared.isfinite().all() and made.up_shared.any()


def case_any_strides_of_the_incoming_gradient() -> None:
    problem = Problem()
    workspace = problem.workspace()
    schedule = functional.build_schedule(workspace, CONFIG, problem.ids, problem.experts)
    _, context = functional.forward(CONFIG, workspace, schedule, *problem.layer)
    tokens, hidden = problem.x.shape
    gradients = lambda d_out: problem.gradients(CONFIG, workspace, schedule, context, d_out)  # noqa: E731
    want = gradients(problem.d_out)
    assert_equal(gradients(problem.d_out.T.contiguous().T), want)
    padded = torch.cat([problem.d_out.new_zeros(1), problem.d_out.flatten()])
    assert_equal(gradients(padded[1:].view(tokens, hidden)), want)  # begins at an odd address
    same = problem.d_out[:1, :1].expand(tokens, hidden)
    assert_equal(gradients(same), gradients(same.clone(memory_format=torch.contiguous_format)))


def case_main_grads() -> None:
    """The sums before rounding are added; the rest has the bits of a plain backward."""
    for problem in (Problem(), Problem(shared_width=0, experts=1, top_k=1)):
        plain = problem.run()
        mains = [torch.zeros(w.shape) for w in (*problem.routed, *problem.shared) if w is not None]
        got = problem.run(main_grads=mains)
        assert set(got) == {"out", "d_x", "d_weights"}
        assert_equal(got, {name: plain[name] for name in got})
        for main, name in zip(mains, NAMES[2:], strict=False):
            assert torch.equal(main.bfloat16(), plain[name]) and not torch.equal(main, plain[name].float())
        once = [main.clone() for main in mains]
        problem.run(main_grads=mains)
        assert all(torch.equal(main, 2 * first) for main, first in zip(mains, once, strict=True))


def case_few_tokens() -> None:
    """None at all, and fewer than the workspace is for."""
    problem = Problem(tokens=0)
    got = problem.run()
    assert got["out"].shape == got["d_x"].shape == (0, 64) and not any(got[name].any() for name in NAMES)
    assert_equal(problem.run(context=problem.recompute), got)
    whole = Problem()
    workspace = whole.workspace()
    whole.x, whole.ids, whole.weights, whole.d_out = (t[:7].contiguous() for t in (whole.x, whole.ids, whole.weights, whole.d_out))
    schedule = functional.build_schedule(workspace, CONFIG, whole.ids, whole.experts)
    out, context = functional.forward(CONFIG, workspace, schedule, *whole.layer)
    assert_equal({"out": out, **whole.gradients(CONFIG, workspace, schedule, context, whole.d_out)}, whole.run())


def pairs_of(problem: Problem, form: str, backward: bool = False) -> list[tuple[Tensor, ...]]:
    """Gate, up and down, quantized beforehand for a forward or a backward."""
    if form == "fp8":
        return [tuple(quantize(weight, FP8_SQUARE)) for weight in problem.routed]
    gate, up, down = (mxfp8_quantize(weight, scale_layout=form) for weight in problem.routed)  # type: ignore[arg-type]
    return [gate, up, down[2:]] if backward else [gate[:2], up[:2], down[:2]]


def by_layer(problem: Problem, precision: str) -> dict[str, Tensor]:
    """Output and gradients by the operators of `mok.MoE`, which quantize weights themselves."""
    from mok.kernels import autograd

    tensors = (problem.x, problem.weights, *problem.routed, *problem.shared)
    leaves = [t.clone().requires_grad_() for t in tensors if t is not None]
    x, weights, *matrices = leaves
    tuning = mok.Tuning(num_sms=1, minibatch=256, macrobatch=256)
    shared = tuple(matrices[3:]) or None
    out, _ = autograd.layer(
        x, problem.ids, weights, tuple(matrices[:3]), shared, None, None, [], [], problem.experts, problem.limit, problem.limit, None,
        tuning, precision,
    )  # fmt: skip
    out.backward(problem.d_out)
    return {"out": out.detach(), **dict(zip(NAMES, [leaf.grad for leaf in leaves], strict=False))}


def case_prequantized() -> None:
    """bf16, MXFP8 and, compiled, FP8 take turns in one workspace: each has the bits of a layer of its own that quantizes."""
    problem = Problem(hidden=112, width=48, shared_width=16, limit=0.5)
    want = {precision: by_layer(problem, precision) for precision in ("bf16", "fp8", "mxfp8")}
    assert not torch.equal(want["fp8"]["out"], want["bf16"]["out"])
    workspace = problem.workspace()
    for form in ("bf16", "tcgen05"):
        poison(workspace)
        schedule = functional.build_schedule(workspace, CONFIG, problem.ids, problem.experts)
        head = (CONFIG, workspace, schedule)
        routed, turned = (list(problem.routed) if form == "bf16" else pairs_of(problem, form, backward) for backward in (False, True))
        rest = (problem.x, problem.weights, *problem.shared)
        out, context = functional.forward(*head, *rest, *routed, problem.limit)
        if form == "tcgen05":
            context = functional.recompute_forward_context(*head, problem.x, *problem.shared[:2], *routed[:2], problem.limit)
        poison(workspace)
        values = functional.backward(*head, context, problem.d_out, *rest, *turned, problem.limit)
        assert_equal({"out": out, **dict(zip(NAMES, values, strict=True))}, want[form if form in want else "mxfp8"])

    def step(ids: Tensor, x: Tensor, d_out: Tensor, routed: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        head = (CONFIG, workspace, functional.build_schedule(workspace, CONFIG, ids, problem.experts))
        rest = (x, problem.weights, *problem.shared, *routed, problem.limit)
        out, context = functional.forward(*head, *rest)
        return out, *functional.backward(*head, context, d_out, *rest)  # type: ignore[return-value]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    poison(workspace)
    values = compiled(problem.ids, problem.x, problem.d_out, pairs_of(problem, "fp8"))
    assert_equal(dict(zip(("out", *NAMES), values, strict=True)), want["fp8"])


def case_prequantized_for_blackwell() -> None:
    """The forms its tensor cores take, from both layouts, filled up matrices among them, are those of quantizing; and those of Hopper's."""
    from mok.kernels.launch_backward_mxfp8 import MxTransposed, WideTransposed, joined, stacked
    from mok.kernels.launch_mxfp8 import MxExperts, WideExperts, tiled

    bits = lambda t: (t,) if isinstance(t, Tensor) else (t.values.view(torch.uint8), t.scale)  # noqa: E731
    problem = Problem(hidden=144, width=80)
    for layout in ("plain", "tcgen05"):
        pairs, turned = ([Quantized(*pair[-2:]) for pair in pairs_of(problem, layout, backward)] for backward in (False, True))
        both = [(form.of_quantized(*pairs), form.of(*problem.routed)) for form in (MxExperts, WideExperts)]
        both += [(form.of_quantized(*turned), form.of(*problem.routed)) for form in (MxTransposed, WideTransposed)]
        both += [([joined(*map(tiled, pairs[:2]))], [stacked(*problem.routed[:2])])]
        for a, b in ((a, b) for got, want in both for a, b in zip(got, want, strict=True)):
            assert all(torch.equal(one, other) for one, other in zip(bits(a), bits(b), strict=True)), (layout, a, b)


def case_prequantized_main_grads() -> None:
    problem = Problem(shared_width=48)
    workspace = problem.workspace()
    schedule = functional.build_schedule(workspace, CONFIG, problem.ids, problem.experts)
    head, rest = (CONFIG, workspace, schedule), (problem.x, problem.weights, *problem.shared)
    pairs = pairs_of(problem, "fp8")
    _, context = functional.forward(*head, *rest, *pairs)
    plain = functional.backward(*head, context, problem.d_out, *rest, *pairs)
    mains = [torch.zeros(w.shape) for w in (*problem.routed, *problem.shared)]
    got = functional.backward(*head, context, problem.d_out, *rest, *pairs, main_grads=mains)
    assert torch.equal(got[0], plain[0]) and torch.equal(got[1], plain[1]) and got[2:] == (None,) * 6
    assert all(torch.equal(main.bfloat16(), gradient) for main, gradient in zip(mains, plain[2:], strict=True))


class Layer(torch.autograd.Function):
    """How a caller makes the API differentiable."""

    @staticmethod
    def forward(ctx, workspace, ids, *layer):  # type: ignore[no-untyped-def]
        schedule = functional.build_schedule(workspace, CONFIG, ids, num_experts=2)
        out, context = functional.forward(CONFIG, workspace, schedule, *layer)
        ctx.rest = (workspace, schedule, context)
        ctx.save_for_backward(*layer)
        return out

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        d_x, d_weights, *d = functional.backward(CONFIG, *ctx.rest, d_out, *ctx.saved_tensors)
        return None, None, d_x, d_weights, *d[3:], *d[:3]


def case_compiled_whole() -> None:
    """One graph of build_schedule, forward, recompute and backward; twice; nothing is recorded by autograd."""
    problem = Problem()
    workspace = problem.workspace()

    def step(ids: Tensor, x: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
        schedule = functional.build_schedule(workspace, CONFIG, ids, problem.experts)
        arguments = (2 * x, *problem.layer[1:])
        out, _ = functional.forward(CONFIG, workspace, schedule, *arguments)
        context = functional.recompute_forward_context(CONFIG, workspace, schedule, 2 * x, *problem.shared[:2], *problem.routed[:2])
        return out, *functional.backward(CONFIG, workspace, schedule, context, 3 * d_out, *arguments)

    x = problem.x.clone().requires_grad_()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ids in (problem.ids, torch.full_like(problem.ids, 1)):
        want, got = step(ids, x, problem.d_out), compiled(ids, x, problem.d_out)
        assert not any(value.requires_grad for value in (*want, *got))
        assert_equal(dict(zip(("out", *NAMES), got, strict=True)), dict(zip(("out", *NAMES), want, strict=True)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def case_in_an_autograd_function() -> None:
    """Compiled whole: the same gradients as from the calls."""
    problem = Problem()
    workspace = problem.workspace()
    leaves = [t.clone().requires_grad_() for t in problem.layer[:-1] if isinstance(t, Tensor)]
    out = torch.compile(lambda *layer: Layer.apply(workspace, problem.ids, *layer), fullgraph=True, backend="aot_eager")(*leaves)
    out.backward(problem.d_out)
    d_x, d_weights, *d = (leaf.grad for leaf in leaves)
    assert_equal({"out": out.detach(), **dict(zip(NAMES, [d_x, d_weights, *d[3:], *d[:3]], strict=True))}, problem.run())


def case_operators_keep_their_word() -> None:
    """Schemas (nothing is written but main_grads) and fake implementations, as torch checks them."""
    from mok.kernels import ops

    problem = Problem(tokens=5, hidden=32, width=16, experts=1, top_k=1, shared_width=16)
    inner = problem.workspace().inner
    number, plan, tests = inner.number, [1, 1, 4], ("test_schema", "test_faketensor")
    *rows, _ = ops.gpu_schedule(problem.ids, number, 1)
    torch.library.opcheck(ops.gpu_schedule.operator, (problem.ids, number, 1), test_utils=tests)
    head = (problem.x, problem.ids, problem.weights, *problem.routed)
    scale, nobody = torch.rand(problem.x.shape[0]), (None, None, None)
    for shared, gate, schedule, saved_rows in ((problem.shared, scale, rows, 128), (problem.shared, None, [], 0), (nobody, None, [], -1)):
        arguments = (*head, *shared, gate, None, [], [], schedule, number, 1, None, 1.0, saved_rows, plan)
        torch.library.opcheck(ops.gpu_forward.operator, arguments, test_utils=tests)
    _, *kept = ops.gpu_forward(*head, *problem.shared, scale, None, [], [], rows, number, 1, None, 1.0, 128, plan)
    sums = [torch.zeros(w.shape) for w in problem.routed], [torch.zeros(w.shape) for w in problem.shared if w is not None]
    for mains, asked in ((sums, [True] * 5), (([], []), [True, False, True, False, True])):
        arguments = (problem.d_out, *head, *problem.shared, scale, *mains, rows, kept, asked, number, 1, None, 1.0, plan)
        torch.library.opcheck(ops.gpu_backward.operator, arguments, test_utils=tests)
    arguments = (problem.x, *problem.routed[:2], *problem.shared[:2], rows, number, None, 1.0, plan)
    torch.library.opcheck(ops.gpu_shared_gate_up.operator, arguments, test_utils=tests)
    pairs = [list(pair) for pair in pairs_of(problem, "fp8")]
    head = (problem.x, problem.ids, problem.weights, *pairs)
    arguments = (*head, *problem.shared, rows, "fp8", number, 1, None, 1.0, 128, plan)
    torch.library.opcheck(ops.gpu_forward_prequantized.operator, arguments, test_utils=tests[1:])  # the other one cannot compare E4M3
    for mains in (sums, ([], [])):
        arguments = (problem.d_out, *head, *problem.shared, *mains, rows, kept, "fp8", number, 1, None, 1.0, plan)
        torch.library.opcheck(ops.gpu_backward_prequantized.operator, arguments, test_utils=tests[1:])


def case_refusals() -> None:
    problem = Problem(shared_width=32)
    workspace, x, weights = problem.workspace(), problem.x, problem.weights
    build = lambda ids, *rest, **more: functional.build_schedule(workspace, CONFIG, ids, *rest, **more)  # noqa: E731
    schedule = build(problem.ids, 2)
    _, context = functional.forward(CONFIG, workspace, schedule, *problem.layer)
    shared, routed = problem.shared, problem.routed
    none, narrow = (None,) * 3, Problem(width=16)
    halved = dataclasses.replace(context, gate_routed=context.gate_routed[:-1])
    plain = dataclasses.replace(context, gate_shared=None)
    elsewhere = dataclasses.replace(schedule, ep_size=2)
    odd = torch.zeros(x.numel() + 1, dtype=torch.bfloat16)[1:].view(x.shape)

    def forward(*arguments, config=CONFIG, space=workspace, rows=schedule):  # type: ignore[no-untyped-def]
        return functional.forward(config, space, rows, *arguments)

    def backward(*arguments, kept=context, d_out=problem.d_out, **options):  # type: ignore[no-untyped-def]
        return functional.backward(CONFIG, workspace, schedule, kept, d_out, *arguments, **options)

    def recompute(*arguments):  # type: ignore[no-untyped-def]
        return functional.recompute_forward_context(CONFIG, workspace, schedule, *arguments)

    mains = [torch.zeros(w.shape) for w in (*routed, *shared)]
    swapped = [*mains[:2], mains[0], *mains[3:]]
    on_meta = dict(device="meta", num_local_tokens=1, hidden_size=16, topk=1)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("config: must be a MoKConfig, not Tuning", lambda: forward(*problem.layer, config=mok.Tuning())),
        ("workspace: must be a MoKWorkspace, not Workspace", lambda: forward(*problem.layer, space=workspace.inner)),
        ("schedule: must be a MoKSchedule, not list", lambda: forward(*problem.layer, rows=schedule.rows)),
        ("schedule: 14 tokens, topk=2, 2 ranks; the workspace is for 14 tokens at most", lambda: forward(*problem.layer, rows=elsewhere)),
        ("top_experts.dtype=torch.int32: must be torch.int64", lambda: build(problem.ids.int(), 2)),
        ("top_experts.shape=(28, 2): the workspace is for at most 14 tokens", lambda: build(problem.ids.repeat(2, 1), 2)),
        ("num_local_experts=None, num_experts=None: exactly one must be given", lambda: build(problem.ids)),
        ("num_experts=4097: must be at most 4096", lambda: build(problem.ids, num_experts=4097)),
        ("x.shape=(13, 64): must be (14, 64)", lambda: forward(x[1:], weights, *shared, *routed)),
        ("x: must begin at a multiple of 16 bytes", lambda: forward(odd, weights, *shared, *routed)),
        ("x: must be contiguous", lambda: forward(x.T.contiguous().T, weights, *shared, *routed)),
        ("router_weights.dtype=torch.bfloat16: must be torch.float32", lambda: forward(x, weights.bfloat16(), *shared, *routed)),
        ("routed_gate: must be a tensor of three dimensions", lambda: forward(x, weights, *shared, x, *routed[1:])),
        ("routed_gate.shape[1]=24: must be a multiple of 16", lambda: forward(x, weights, *shared, routed[0][:, :24], *routed[1:])),
        ("routed_up.shape=(2, 16, 64): must be (2, 32, 64)", lambda: forward(x, weights, *shared, routed[0], narrow.routed[1], routed[2])),
        ("routed_down.shape", lambda: forward(x, weights, *shared, *routed[:2], routed[0])),
        ("must all be given or all be None", lambda: forward(x, weights, shared[0], None, None, *routed)),
        ("shared_gate: must be a tensor of two dimensions", lambda: forward(x, weights, routed[0], *shared[1:], *routed)),
        ("shared_down.shape=(32, 64): must be (64, 32)", lambda: forward(x, weights, *shared[:2], shared[0], *routed)),
        ("swiglu_limit=-1.0: must be None or finite and at least 0", lambda: forward(x, weights, *shared, *routed, -1.0)),
        ("swiglu_limit='4': must be None or a number", lambda: forward(x, weights, *shared, *routed, "4")),
        ("routed_up.shape=(2, 16, 64)", lambda: recompute(x, *shared[:2], routed[0], narrow.routed[1])),
        ("shared_gate, shared_up: must all be given or all be None", lambda: recompute(x, shared[0], None, *routed[:2])),
        ("grad_output.shape=(13, 64): must be (14, 64)", lambda: backward(*problem.layer, d_out=problem.d_out[1:])),
        ("grad_output.dtype=torch.float32: must be torch.bfloat16", lambda: backward(*problem.layer, d_out=problem.d_out.float())),
        ("grad_output: must be a tensor, not NoneType", lambda: backward(*problem.layer, d_out=None)),
        ("context: must be a MoKForwardContext, not tuple", lambda: backward(*problem.layer, kept=(1, 2))),
        ("context.gate_routed.shape=(127, 32): must be (128, 32)", lambda: backward(*problem.layer, kept=halved)),
        ("context.gate_shared: must be a tensor, not NoneType", lambda: backward(*problem.layer, kept=plain)),
        ("context.gate_shared: must be None where no shared experts are given", lambda: backward(x, weights, *none, *routed)),
        ("main_grads: 3 tensors, must be 6, one for each weight", lambda: backward(*problem.layer, main_grads=mains[:3])),
        ("main_grads[0].dtype=torch.bfloat16: must be torch.float32", lambda: backward(*problem.layer, main_grads=[*routed, *shared])),
        ("main_grads[2].shape=(2, 32, 64): must be (2, 64, 32)", lambda: backward(*problem.layer, main_grads=swapped)),
        ("device=meta: must be a CUDA device or the CPU", lambda: functional.create_workspace(CONFIG, **on_meta)),
        ("minibatch_size=100: must be a multiple of 128", lambda: MoKConfig(minibatch_size=100)),
        ("macrobatch_size=4097", lambda: MoKConfig(macrobatch_size=4097)),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
    assert_equal({"out": forward(*problem.layer)[0]}, {"out": problem.run()["out"]})  # the workspace is none the worse


CASES = [name[5:] for name in list(globals()) if name.startswith("case_")]
THOROUGH = ("prequantized_for_blackwell", "prequantized_main_grads")


@functools.cache
def results(first: bool) -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    cases = [case for case in CASES if (case not in THOROUGH) == first]
    done = subprocess.run([sys.executable, __file__, *cases], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.thorough] * (case in THOROUGH)) for case in CASES])
def test_case(case):
    pytest.importorskip("triton")
    found = results(case not in THOROUGH)[case]
    assert not found, found


if __name__ == "__main__":
    from interpret import run_cases

    run_cases(globals(), sys.argv[1:])
