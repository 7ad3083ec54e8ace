"""Whole layers on one device: schedule, publish, kernel and combine, forward, backward and memory, against torch, other libraries and the
same products as dense ones, in one process.

A shape is checked before it is timed: near the definition (`mok.reference`, fp32), near torch's gradients, and the same bits twice. Times
are medians, the contestants taking turns and the inputs rotating. TFLOP/s = 6 T K H I / time, or 12 in the backward. Torch's backward is a
step minus its forward. Memory is the allocator's peak over a forward and a backward, beyond weights, inputs and dY.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token, S width of the shared experts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from mok.bench import checks, report, rivals
from mok.bench.baselines import TorchLayer, dense_products
from mok.bench.layers import NAMES, Batch, Changes, Turns, default_device, layer_class, make_batch, make_experts, plans_option
from mok.bench.report import figure
from mok.bench.shapes import TINY, Shape, choose
from mok.bench.timing import medians
from mok.bench.warm import warm
from mok.config import MoEConfig
from mok.quantize import Precision, Recipe

FORWARD_LIMIT = 1e-2  # three times as much with quantized operands: where gate is off by a rounding, h may be off by one of E4M3
INPUT_SETS = 3
WARM_S = 150.0
Row = dict[str, Any]


class OneDevice:
    """A shape: experts, rotating inputs, the layer."""

    def __init__(
        self, shape: Shape, device: torch.device, saved: float = 1.0, shared_width: int = 0, precision: Precision = "bf16"
    ) -> None:
        self.shape, self.device, self.saved, self.turns, self.precision = shape, device, saved, Turns(INPUT_SETS), precision
        self.experts = make_experts(shape, device)
        shared = None
        if shared_width:
            of_one = make_experts(shape._replace(I=shared_width, E=1), device)
            shared = (of_one[0][0], of_one[1][0], of_one[2][0])
        self.shared = shared
        self.inputs = [make_batch(shape, 0, turn, device) for turn in range(INPUT_SETS)]
        self.layer = self.make_layer(precision)

    def make_layer(self, precision: Precision = "bf16") -> Any:
        sizes = (self.shape.T, self.shape.E, self.shape.K)
        return layer_class(self.device)(*sizes, self.experts, None, self.saved, self.shared, precision)

    def _equal(self, got: Sequence[Tensor], want: Sequence[Tensor], names: Sequence[str], what: str) -> None:
        if difference := checks.first_difference(got, want, names):
            raise AssertionError(f"{what}: {difference}")

    def check_forward(self, plans: dict[str, Changes]) -> float:
        """The largest relative error of a token's output. Every plan must give the same bits, the default one twice.

        Raises:
            AssertionError: it does not, or the error is too large.
        """
        batch = self.inputs[0]
        self.layer.poison()
        first = self.layer.forward(batch)[0]
        for label, changes in {"a second run": {}, **plans}.items():
            self.layer.poison()
            self._equal([self.layer.forward(batch, changes=changes)[0]], [first], ["out"], label)
        self.layer.finish()
        error = checks.forward_error(first, *batch[:3], self.experts, shared=self.shared, recipe=Recipe(self.precision))
        if not error < (FORWARD_LIMIT if self.precision == "bf16" else 3 * FORWARD_LIMIT):
            raise AssertionError(f"relative error {error:.1e}")
        return error

    def check_backward(self, plans: dict[str, Changes], torch_layer: TorchLayer) -> float:
        """The same of gradients, against fp32 for some tokens and one expert, and against torch's for all."""
        batch = self.inputs[0]
        kept = self.layer.forward(batch, True)[1]
        self.layer.poison()
        first = self.layer.backward(batch, kept)
        for label, changes in {"a second run": {}, **plans}.items():
            self.layer.poison()
            self._equal(self.layer.backward(batch, kept, changes), first, NAMES, label)
        self.layer.finish()
        recipe = Recipe(self.precision)
        error = checks.token_gradient_error(first[0], first[1], *batch, self.experts, recipe=recipe)
        error = max(error, checks.expert_gradient_error([grad[0] for grad in first[2:]], 0, *batch, self.experts, recipe))
        if not recipe.quantized:  # torch's is in bf16
            error = max(error, step_error(torch_layer, batch, first))
        if not error < (3 if recipe.quantized else 1) * checks.LIMIT:
            raise AssertionError(f"relative error {error:.1e}")
        return error

    def extra_gib(self, rival: TorchLayer | None = None) -> float | None:
        """GiB that a forward and a backward take beyond weights and inputs, with a layer's own memory; None on the CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        batch = self.inputs[0]
        if rival is not None:
            rival.step(*batch)
        else:
            layer = self.make_layer(self.precision)
            layer.backward(batch, layer.forward(batch, True)[1])
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)


def step_error(rival: TorchLayer, batch: Batch, gradients: Sequence[Tensor]) -> float:
    """The largest relative difference between a rival's gradients and these."""
    d_x, d_weights, d_both, d_down = rival.step(*batch)
    d_gate, d_up = d_both.chunk(2, dim=1)
    return max(checks.relative_error(a, b) for a, b in zip(gradients, (d_x, d_weights, d_gate, d_up, d_down), strict=True))


def _row(name: str, shape: Shape, direction: str, ms: float, others: dict[str, float], precision: Precision = "bf16", **more: Any) -> Row:
    """others: milliseconds of those that `ratio` is against, the best of them."""
    work = shape.gflop(direction)
    return dict(
        suite="layer", shape=name, **shape._asdict(), ep=1, precision=precision, direction=direction, **report.speed(work, ms),
        baselines={label: report.speed(work, value) for label, value in others.items()}, ratio=report.ratio(ms, others.values()), **more,
    )  # fmt: skip


def _line(row: Row, error: float, others: dict[str, float]) -> str:
    """others: milliseconds of other contestants."""
    work = Shape(*(row[letter] for letter in "THIEK")).gflop(row["direction"])
    shape = " ".join(f"{letter}{row[letter]}" for letter in "THIEK")
    rates = ", ".join(f"{name} {figure(value['tflops'])}" for name, value in row["baselines"].items())
    cublas = f", cuBLAS {figure(row['cublas_tflops'])}" if "cublas_tflops" in row else ""
    extra = "".join(f"; {label} {ms:.3f} ms {figure(report.speed(work, ms)['tflops'])}" for label, ms in others.items())
    return (
        f"{row['shape']:16} {row['direction']} {shape}: {figure(row['ms'], '.3f')} ms, {figure(row['tflops'])} TFLOP/s, "
        f"{report.against(row)} {rates}{cublas}, relative error {error:.1e}{extra}"
    )  # fmt: skip


def forward_row(
    name: str, problem: OneDevice, contestants: Sequence[TorchLayer], products: Mapping[str, Callable[[], object]], repeats: int,
    plans: dict[str, Changes], warmup: int = 8,
) -> tuple[Row, str]:  # fmt: skip
    """Check and time the forward -> the row and a line. plans: others than the default one, by label."""
    shape, turns = problem.shape, problem.turns
    error = problem.check_forward(plans)
    columns = [list(column) for column in zip(*problem.inputs, strict=True)]
    runs: dict[str, Callable[[], object]] = {"mok": turns.of(problem.layer.forward, problem.inputs)}
    runs |= {label: turns.of(problem.layer.forward, problem.inputs, changes=changes) for label, changes in plans.items()}
    runs |= {rival.name: turns.of(rival, *columns[:3]) for rival in contestants}
    runs |= {"cublas": dense_products(shape.T * shape.K, shape.H, shape.I, problem.device), **products}
    with torch.no_grad():
        ms = medians(runs, repeats, warmup)
    problem.layer.finish()
    work = shape.gflop("fwd")
    more: dict[str, Any] = {"cublas_tflops": report.speed(work, ms["cublas"])["tflops"]}
    if products:
        more["products_tflops"] = {label: report.speed(work, ms[label])["tflops"] for label in products}
    row = _row(name, shape, "fwd", ms["mok"], {rival.name: ms[rival.name] for rival in contestants}, problem.precision, **more)
    return row, _line(row, error, {label: ms[label] for label in (*plans, *products)})


def backward_row(
    name: str, problem: OneDevice, contestants: Sequence[TorchLayer], repeats: int, plans: dict[str, Changes], parts: bool = False,
    warmup: int = 8, others: Mapping[str, Callable[[], object]] | None = None,
) -> tuple[Row, str]:  # fmt: skip
    """The same of the backward. contestants: torch's layer first. parts: time each gradient alone, too (on a GPU). others: more calls."""
    layer, turns = problem.layer, problem.turns
    good, problems = {}, []
    for label, changes in plans.items():
        try:
            problem.check_backward({label: changes}, contestants[0])
            good[label] = changes
        except Exception as reason:  # a plan that does not fit this shape
            problems.append(f"; {label}: {' '.join(str(reason).split())[:200]}")
    error = problem.check_backward({}, contestants[0])
    columns = [list(column) for column in zip(*problem.inputs, strict=True)]
    kept = [layer.forward(batch, True)[1] for batch in problem.inputs]
    step = " step" if layer.step_for_backward else ""
    runs: dict[str, Callable[[], object]] = {f"mok{step}": turns.of(layer.backward, problem.inputs, kept)}
    if step:
        runs["mok"] = turns.of(layer.forward, problem.inputs)
    runs |= {label: turns.of(layer.backward, problem.inputs, kept, changes=changes) for label, changes in good.items()}
    extra = [*good]
    if parts and not step:
        from mok.kernels.launch_backward import Needs

        alone = {"d_x": Needs(True, False, False), "d_weights": Needs(False, True, False), "experts": Needs(False, False, True)}
        for label, needs in alone.items():
            runs[f"only {label}"] = turns.of(layer.backward, problem.inputs, kept, needs=needs)
            extra.append(f"only {label}")
    for rival in contestants:
        runs[rival.name] = turns.of(rival, *columns[:3])
        runs[f"{rival.name} step"] = turns.of(rival.step, *columns)
    runs |= others or {}
    extra += others or {}
    with torch.enable_grad():
        ms = medians(runs, repeats, warmup)
    layer.finish()
    for label in [label for label in ms if label.endswith(" step")]:
        ms[label.removesuffix(" step")] = ms.pop(label) - ms[label.removesuffix(" step")]
    more: dict[str, Any] = dict(saved=problem.saved)
    if others:
        more["others_tflops"] = {label: report.speed(problem.shape.gflop("bwd"), ms[label])["tflops"] for label in others}
    row = _row(name, problem.shape, "bwd", ms["mok"], {rival.name: ms[rival.name] for rival in contestants}, problem.precision, **more)
    return row, _line(row, error, {label: ms[label] for label in extra}) + "".join(problems)


def memory_limit(shape: Shape, precision: Precision = "bf16") -> float | None:
    """GiB of `MoEConfig.gpu_memory` and of the experts' gradients; None for a slice of a layer, of fewer experts than choices.

    A layer of a suite holds its quantized weights, of the backward and of the forward.
    """
    if shape.K > shape.E:
        return None
    config = MoEConfig(hidden_size=shape.H, intermediate_size=shape.I, num_experts=shape.E, top_k=shape.K)
    weights = 3 * shape.E * shape.H * shape.I
    held = {"bf16": 0, "fp8": weights + weights // 128, "mxfp8": 2 * weights}[precision]  # and their codes, or in bf16
    return round((config.gpu_memory(shape.T, precision=precision).total + held + 2 * weights) / 2**30, 2)


def memory_row(name: str, problem: OneDevice, contestants: Sequence[TorchLayer]) -> Row:
    others = {rival.name: dict(gib=problem.extra_gib(rival)) for rival in contestants}
    return dict(
        suite="layer", shape=name, **problem.shape._asdict(), ep=1, precision=problem.precision, direction="memory",
        gib=problem.extra_gib(), limit_gib=memory_limit(problem.shape, problem.precision), baselines=others,
        saved=problem.saved,
    )  # fmt: skip


def right_rivals(problem: OneDevice, layers: Sequence[TorchLayer], ours: Any) -> tuple[list[TorchLayer], dict[str, str]]:
    """Those that run and are near a layer of ours in output and gradients, and what is wrong with the others."""
    if not layers:
        return [], {}
    good, wrong = [], {}
    batch = problem.inputs[0]
    gradients = ours.backward(batch, ours.forward(batch, True)[1])
    with torch.no_grad():
        out = ours.forward(batch)[0]
    for rival in layers:
        try:
            error = max(checks.relative_error(rival(*batch[:3]).detach(), out), step_error(rival, batch, gradients))
            if error < 2 * checks.LIMIT:
                good.append(rival)
            else:
                wrong[rival.name] = f"relative error {error:.1e} at {problem.shape}"
        except Exception as reason:
            wrong[rival.name] = f"{type(reason).__name__} at {problem.shape}: {' '.join(str(reason).split())[:160]}"
    return good, wrong


def measure(
    name: str, shape: Shape, device: torch.device, repeats: int, warmup: int = 3, precision: Precision = "bf16"
) -> tuple[list[Row], list[str], dict[str, str]]:  # fmt: skip
    """Rows for forward, backward and memory, their lines, and what was not measured. In another precision than bf16 weights are quantized
    beforehand, and the same layer in bf16 is timed, too; other contestants remain in bf16, and must be near that layer."""
    problem = OneDevice(shape, device, precision=precision)
    baseline = TorchLayer(*problem.experts)
    products: dict[str, Callable[[], object]] = {}
    layers, found, missing = rivals.one_gpu(problem.experts, problem.inputs[0].ids_TK)
    products |= found
    in_bf16 = problem.layer if precision == "bf16" else problem.make_layer()
    others, wrong = right_rivals(problem, layers, in_bf16)
    contestants = [baseline, *others]
    backwards: dict[str, Callable[[], object]] = {}
    if precision != "bf16":
        products["mok in bf16"] = problem.turns.of(in_bf16.forward, problem.inputs)
        if device.type == "cuda":
            backwards = other_backwards(problem, in_bf16)
    forward, forward_line = forward_row(name, problem, contestants, products, repeats, {}, warmup)
    backward, backward_line = backward_row(name, problem, contestants, repeats, {}, warmup=warmup, others=backwards)
    del in_bf16, products  # and what they keep
    backwards.clear()
    memory = memory_row(name, problem, contestants)
    if memory["gib"] is not None:
        backward_line += f"; memory {memory['gib']} GiB, torch {memory['baselines'][baseline.name]['gib']}"
    return [forward, backward, memory], [forward_line, backward_line], missing | wrong


# ---- the scripts benchmarks/layer.py and benchmarks/backward.py ----


def _parser(name: str, default_shapes: dict[str, Shape], repeats: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default=",".join(default_shapes))
    parser.add_argument("--repeats", type=report.count, default=repeats)
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    parser.add_argument("--out")
    return parser


def _shapes(parser: argparse.ArgumentParser, names: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    try:
        return choose(names, {**shapes, **TINY})
    except ValueError as error:
        parser.error(str(error))


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shared_line(name: str, shape: Shape, device: torch.device, repeats: int) -> str:
    """One shared expert of the routed width: what it adds, against its own products at the rate that the routed ones reach."""
    with_shared, routed = OneDevice(shape, device, shared_width=shape.I), OneDevice(shape, device)
    error = with_shared.check_forward({})
    runs = {label: p.turns.of(p.layer.forward, p.inputs) for label, p in (("routed", routed), ("with shared", with_shared))}
    with torch.no_grad():
        ms = medians(runs, repeats)
    added = (ms["with shared"] - ms["routed"]) / (ms["routed"] / shape.K)
    return (
        f"{name:16} routed {ms['routed']:.3f} ms, with one shared expert {ms['with shared']:.3f} ms: "
        f"adds {added:.3f} of its products at the routed rate, relative error {error:.1e}"
    )  # fmt: skip


def forward_main(shapes: dict[str, Shape], arguments: Sequence[str] | None = None) -> int:
    parser = _parser("benchmarks/layer.py", shapes, 60)
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--shared", action="store_true", help="what one shared expert of the routed width adds")
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="bf16",
        help="but bf16: weights are quantized beforehand; beside the same layer in bf16 and torch's in bf16",
    )  # fmt: skip
    parser.add_argument("--plans", type=plans_option, default={}, help="JSON: name -> fields of ForwardPlan, timed besides")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    report.refuse_unwritable(parser, out=options.out)
    chosen, device, rows = _shapes(parser, options.shapes, shapes), default_device(), []
    print(report.headline(), flush=True)
    warm(chosen.values(), WARM_S, precision=options.precision)
    for name, shape in chosen.items() if options.shared else ():
        print(shared_line(name, shape, device, options.repeats), flush=True)
        _free()
    for name, shape in chosen.items() if options.forward else ():
        problem = OneDevice(shape, device, precision=options.precision)
        others: dict[str, Callable[[], object]] = {}
        if options.precision != "bf16":
            others["mok in bf16"] = problem.turns.of(problem.make_layer().forward, problem.inputs)
        if options.precision == "mxfp8" and device.type == "cuda":
            others |= mxfp8_others(problem)
        row, line = forward_row(name, problem, [TorchLayer(*problem.experts)], others, options.repeats, options.plans)
        print(line, flush=True)
        rows.append(row)
        if options.out:  # what there is, should time run out
            report.write(options.out, rows, options.commit)
        del problem
        _free()
    return 0


def mxfp8_others(problem: OneDevice) -> dict[str, Callable[[], object]]:
    """What quantizing all weights takes, and the kernel that multiplies by scales where the layer's own does not (on Hopper)."""
    from mok.kernels.launch_mxfp8 import MxExperts, experts_for

    others: dict[str, Callable[[], object]] = {"quantizing the weights": lambda: experts_for(problem.device, *problem.experts)}
    if not isinstance(problem.layer.quantized, MxExperts):
        layer = problem.make_layer("mxfp8")
        layer.quantized = MxExperts.of(*problem.experts)
        others["mok, E4M3 widened in every step"] = problem.turns.of(layer.forward, problem.inputs)
    return others


def other_backwards(problem: OneDevice, in_bf16: Any = None) -> dict[str, Callable[[], object]]:
    """The backward that quantizes its weights itself, and the one in bf16, of this layer or one of its own."""
    calls = {}
    in_bf16 = in_bf16 or problem.make_layer()
    for label, layer, options in (("quantizing", problem.layer, dict(quantize=True)), ("mok in bf16", in_bf16, {})):
        kept = [layer.forward(batch, True)[1] for batch in problem.inputs]
        calls[label] = problem.turns.of(layer.backward, problem.inputs, kept, **options)
    return calls


def backward_main(shapes: dict[str, Shape], arguments: Sequence[str] | None = None) -> int:
    parser = _parser("benchmarks/backward.py", shapes, 50)
    parser.add_argument("--plans", type=plans_option, default={}, help="JSON: name -> fields of BackwardPlan")
    parser.add_argument("--parts", action="store_true", help="time each gradient alone, too")
    parser.add_argument("--saved", type=float, default=1.0, help="share of the rows whose gate and up were saved")
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="bf16",
        help="mxfp8, fp8: experts in that format, weights quantized beforehand; on a GPU beside the same with quantizing them, and in bf16",
    )  # fmt: skip
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    report.refuse_unwritable(parser, out=options.out)
    chosen, device, rows = _shapes(parser, options.shapes, shapes), default_device(), []
    print(report.headline(), flush=True)
    warm(chosen.values(), WARM_S, precision=options.precision)
    for name, shape in chosen.items():
        problem = OneDevice(shape, device, options.saved, precision=options.precision)
        baseline = TorchLayer(*problem.experts)
        others = {}
        if options.precision != "bf16" and device.type == "cuda":
            others = other_backwards(problem)
        row, line = backward_row(name, problem, [baseline], options.repeats, options.plans, options.parts, others=others)
        others.clear()
        rows.append(row)
        if device.type == "cuda":
            memory = memory_row(name, problem, [baseline])
            rows.append(memory)
            limit = "" if memory["limit_gib"] is None else f" of at most {memory['limit_gib']}"
            line += f"; memory {memory['gib']} GiB{limit}, torch {memory['baselines'][baseline.name]['gib']}"
        print(line, flush=True)
        if options.out:
            report.write(options.out, rows, options.commit)
        del problem
        _free()
    return 0
