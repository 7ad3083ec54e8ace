"""Whole layers over several GPUs, forward and backward, against NCCL with torch and against one GPU alone, in the same processes.

    python -m mok.bench.ep --ranks 2 [--shapes qwen3-30b,v4-flash] [--directions fwd,bwd] [--out results.json]
        [--plans '{"fine pulls": {"parts": 8}, "small ring": {"ring_tiles": 64}}']
    torchrun --nproc-per-node 2 -m mok.bench.ep

Before a layer is timed it is checked: near the fp32 definition, the same bits twice, and the bits of one GPU that is given the tokens of
all ranks and all experts. Contestants take turns, and the ranks meet before every turn. A time is the slowest rank's median. Torch's
backward is a step minus its forward.

Without a GPU the CPU's layer runs on a tiny shape, its ranks over gloo.

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, K choices per token, R ranks.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mok.bench import checks, ranks, report, rivals
from mok.bench.baselines import ExchangedLayer, dense_products
from mok.bench.layers import NAMES, Batch, Changes, Turns, layer_class, make_batch, make_experts, plans_option
from mok.bench.report import figure
from mok.bench.shapes import SEVERAL_GPUS as SHAPES
from mok.bench.shapes import TINY, Shape, choose
from mok.bench.timing import medians
from mok.bench.warm import warm
from mok.quantize import Precision, Recipe
from mok.schedule import local_experts

DIRECTIONS = ("fwd", "bwd")
INPUT_SETS = 2


class Problem:
    """A shape on this rank: experts, rotating inputs, the layer over all ranks and its rivals."""

    def __init__(
        self, shape: Shape, device: torch.device, saved: float, padding: float, plans: dict[str, Changes], precision: Precision = "bf16"
    ) -> None:
        self.recipe = Recipe(precision)
        self.shape, self.device, self.plans, self.turns = shape, device, plans, Turns(INPUT_SETS)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        assert shape.E % self.size == 0, (shape, self.size)
        self.all_experts = make_experts(shape, device)
        local = local_experts(shape.E, self.size, self.rank)
        self.mine = slice(local.start, local.stop)
        gate, up, down = (weight[self.mine] for weight in self.all_experts)
        self.inputs = [make_batch(shape, self.rank, turn, device) for turn in range(INPUT_SETS)]
        self.make_layer = functools.partial(layer_class(device), precision=precision)
        self.layer = self.make_layer(shape.T, shape.E, shape.K, (gate, up, down), dist.group.WORLD, saved)
        capacity = math.ceil(padding * shape.T * shape.K / self.size / 128) * 128
        others, self.missing = rivals.several_gpus((gate, up, down)) if device.type == "cuda" else ([], {})
        self.rivals = [ExchangedLayer(gate, up, down), ExchangedLayer(gate, up, down, capacity), *others]

    def alone(self) -> tuple[Any, list[Batch]]:
        """One GPU with this rank's tokens and as many experts as it holds here, which get as many rows as here."""
        local = self.shape.E // self.size
        layer = self.make_layer(self.shape.T, local, self.shape.K, self.layer.experts, None, 1.0)
        return layer, [batch._replace(ids_TK=batch.ids_TK % local) for batch in self.inputs]

    def check(self, directions: Sequence[str]) -> tuple[dict[str, float], list[str]]:
        """Relative errors by direction and rival, and what is wrong on this rank. Every rank makes all the calls, whatever it finds."""
        shape, batch = self.shape, self.inputs[0]
        tokens = slice(self.rank * shape.T, (self.rank + 1) * shape.T)
        parts = [make_batch(shape, rank, 0, self.device) for rank in range(self.size)]
        whole = Batch(*(torch.cat(values) for values in zip(*parts, strict=True)))
        one = self.make_layer(self.size * shape.T, shape.E, shape.K, self.all_experts, None, 1.0)
        backward = "bwd" in directions
        errors: dict[str, float] = {}
        problems: list[str] = []

        def same(got: Sequence[Tensor], want: Sequence[Tensor], names: Sequence[str], what: str) -> None:
            if difference := checks.first_difference(got, want, [f"{name} of {what}" for name in names]):
                problems.append(difference)

        first, kept = self.layer.forward(batch, backward)
        same([self.layer.forward(batch, backward)[0]], [first], ["out"], "a second run")
        for label, changes in self.plans.items():
            same([self.layer.forward(batch, backward, changes)[0]], [first], ["out"], label)
        self.layer.finish()
        want, kept_alone = one.forward(whole, backward)
        one.finish()
        same([first], [want[tokens]], ["out"], "one GPU")
        errors["fwd"] = checks.forward_error(first, *batch[:3], self.all_experts, recipe=self.recipe)

        if backward:
            got = self.layer.backward(batch, kept)
            same(self.layer.backward(batch, kept), got, NAMES, "a second run")
            for label, changes in self.plans.items():
                same(self.layer.backward(batch, kept, changes), got, NAMES, label)
            self.layer.finish()
            wanted = one.backward(whole, kept_alone)
            one.finish()
            own = [tokens, tokens, self.mine, self.mine, self.mine]
            same(got, [value[part] for value, part in zip(wanted, own, strict=True)], NAMES, "one GPU")
            del wanted
            error = checks.token_gradient_error(got[0], got[1], *batch, self.all_experts, recipe=self.recipe)
            of_first = [grad[0] for grad in got[2:]]
            errors["bwd"] = max(error, checks.expert_gradient_error(of_first, self.mine.start, *whole, self.all_experts, self.recipe))

        for rival in self.rivals:
            if backward:
                d_x, d_weights, d_both, d_down = rival.step(*batch)
                d_gate, d_up = d_both.chunk(2, dim=1)
                theirs = [d_x, d_weights, d_gate, d_up, d_down]
                errors[rival.name] = max(checks.relative_error(a, b) for a, b in zip(theirs, got, strict=True))
            else:
                with torch.no_grad():
                    errors[rival.name] = checks.relative_error(rival(*batch[:3]), first)
        of_layer = 3 if self.recipe.quantized else 1  # h may round to another number of E4M3
        of_rivals = 8 if self.recipe.quantized else 2  # theirs is in bf16
        limits = {rival.name: of_rivals * checks.LIMIT for rival in self.rivals}
        problems += [f"{name}: relative error {e:.1e}" for name, e in errors.items() if not e < limits.get(name, of_layer * checks.LIMIT)]
        return errors, problems

    def time(self, direction: str, repeats: int) -> dict[str, float]:
        """Milliseconds on the slowest rank: "mok", "alone" (one GPU), "cublas" (forward only), and the rivals by name."""
        alone, inputs_alone = self.alone()
        columns = [list(column) for column in zip(*self.inputs, strict=True)]  # x, ids, weights, d_y
        contestants: dict[str, Callable[[], object]] = {}
        backward = direction == "bwd"
        if not backward or self.layer.step_for_backward:
            contestants["mok"] = self.turns.of(self.layer.forward, self.inputs)
            contestants["alone"] = self.turns.of(alone.forward, inputs_alone)
        if not backward:
            for label, changes in self.plans.items():
                contestants[label] = self.turns.of(self.layer.forward, self.inputs, changes=changes)
            for rival in self.rivals:
                contestants[rival.name] = self.turns.of(rival, *columns[:3])
            contestants["cublas"] = dense_products(self.shape.T * self.shape.K, self.shape.H, self.shape.I, self.device)
        else:
            suffix = " step" if self.layer.step_for_backward else ""
            kept = [self.layer.forward(batch, True)[1] for batch in self.inputs]
            kept_alone = [alone.forward(batch, True)[1] for batch in inputs_alone]
            contestants[f"mok{suffix}"] = self.turns.of(self.layer.backward, self.inputs, kept)
            contestants[f"alone{suffix}"] = self.turns.of(alone.backward, inputs_alone, kept_alone)
            for label, changes in self.plans.items():
                contestants[label] = self.turns.of(self.layer.backward, self.inputs, kept, changes=changes)
            for rival in self.rivals:
                contestants[rival.name] = self.turns.of(rival, *columns[:3])
                contestants[f"{rival.name} step"] = self.turns.of(rival.step, *columns)
        with torch.set_grad_enabled(backward):
            ms = ranks.slowest(medians(contestants, repeats, align=dist.barrier), self.device)
        self.layer.finish()
        for name in [name for name in ms if name.endswith(" step")]:
            ms[name.removesuffix(" step")] = ms.pop(name) - ms[name.removesuffix(" step")]
        return ms


def row_of(
    name: str, shape: Shape, size: int, direction: str, ms: dict[str, float], others: Sequence[str], saved: float,
    precision: Precision = "bf16",
) -> dict[str, Any]:  # fmt: skip
    work = shape.gflop(direction)
    alone = report.speed(work, ms["alone"])
    row: dict[str, Any] = dict(
        suite="ep", shape=name, **shape._asdict(), ep=size, precision=precision, direction=direction,
        **report.speed(work, ms["mok"]), alone_ms=alone["ms"], alone_tflops=alone["tflops"],
        baselines={rival: report.speed(work, ms[rival]) for rival in others},
        ratio=report.ratio(ms["mok"], [ms[rival] for rival in others]),
    )  # fmt: skip
    if direction == "fwd":
        row["cublas_tflops"] = report.speed(work, ms["cublas"])["tflops"]
    else:
        row["saved"] = saved
    return row


def line_of(row: dict[str, Any], error: float) -> str:
    shape = " ".join(f"{letter}{row[letter]}" for letter in "THIEK")
    others = ", ".join(f"{name} {figure(value['tflops'])}" for name, value in row["baselines"].items())
    cublas = f", cuBLAS {figure(row['cublas_tflops'])}" if "cublas_tflops" in row else ""
    kept = figure(row["alone_ms"] / row["ms"] if row["alone_ms"] and row["ms"] else None, ".0%")
    return (
        f"{row['shape']:14} {row['direction']} EP {row['ep']} {shape}: {figure(row['ms'], '.3f')} ms, {figure(row['tflops'])} TFLOP/s "
        f"per GPU, {report.against(row)} {others}; one GPU {figure(row['alone_tflops'])}, of which {kept} are kept"
        f"{cublas}; same bits as one GPU, relative error {error:.1e}"
    )  # fmt: skip


def measure(options: argparse.Namespace, shapes: dict[str, Shape], device: torch.device) -> int:
    """These shapes on this rank; rank 0 prints and writes. 1 if a check failed."""
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    failed = 0
    directions = options.directions.split(",")
    for name, shape in shapes.items():
        problem = Problem(shape, device, options.saved, options.padding, options.plans, options.precision)
        errors, problems = problem.check(directions)
        wrong = ranks.first_problem("; ".join(problems))
        if wrong:  # no speed of what is wrong
            failed = 1
            if problem.rank == 0:
                print(f"{name}: {wrong}", flush=True)
            continue
        for direction in directions:
            ms = problem.time(direction, options.repeats)
            names = [rival.name for rival in problem.rivals]
            row = row_of(name, problem.shape, problem.size, direction, ms, names, options.saved, options.precision)
            rows.append(row)
            if problem.rank == 0:
                others = "".join(f"; {label} {ms[label]:.3f} ms" for label in options.plans)
                print(line_of(row, errors[direction]) + others, flush=True)
                if options.out:
                    report.write(options.out, rows, options.commit, problem.missing)
        missing |= problem.missing
        del problem
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        for name, why in missing.items():
            print(f"not measured: {name}: {why}", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="mok.bench.ep", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    known = SHAPES if cuda else TINY
    parser.add_argument("--ranks", type=report.count, default=2, help="processes, one GPU each; a launcher's number wins")
    parser.add_argument("--shapes", default="", help=f"some of {','.join(known)}, PRESET/RANKS, or TxHxIxExK; all known ones by default")
    parser.add_argument("--directions", default="fwd,bwd")
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16", help="of the experts' products")
    parser.add_argument("--repeats", type=report.count, default=50)
    parser.add_argument("--saved", type=float, default=1.25, help="rows whose gate and up are saved, as a multiple of a balanced load")
    parser.add_argument("--padding", type=float, default=1.25, help="capacity of the padded baseline, likewise")
    parser.add_argument("--plans", type=plans_option, default={}, help="JSON: name -> changed fields of ForwardPlan and BackwardPlan")
    parser.add_argument("--limit", type=report.seconds, default=570.0, help="seconds after which all processes are ended")
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    parser.add_argument("--out")
    options = parser.parse_args(arguments)
    try:
        shapes = choose(options.shapes or ",".join(known), known)
    except ValueError as error:
        parser.error(str(error))
    size = int(os.environ["WORLD_SIZE"]) if ranks.launched() else options.ranks
    for name, shape in shapes.items():
        if shape.E % size:
            parser.error(f"--ranks={size}: must divide the number of experts, E={shape.E}, of {name}")
    for direction in options.directions.split(","):
        if direction not in DIRECTIONS:
            parser.error(f"--directions={direction}: must be some of {','.join(DIRECTIONS)}")
    report.refuse_unwritable(parser, out=options.out)
    if not ranks.launched():
        if cuda and torch.cuda.device_count() < options.ranks:
            parser.error(f"--ranks={options.ranks}: there are {torch.cuda.device_count()} GPUs")
        warm(shapes.values(), 0.4 * options.limit, options.ranks, options.precision)
        return ranks.launch("mok.bench.ep", arguments, options.ranks, options.limit)
    rank, size, device = ranks.join(options.limit)
    if rank == 0:
        print(f"{size} ranks, {report.headline()}", flush=True)
    code = measure(options, shapes, device)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever a library still holds open must not keep a rank alive


if __name__ == "__main__":
    sys.exit(main())
