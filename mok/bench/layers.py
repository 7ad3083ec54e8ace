"""The layer as the suites call it: on a GPU by its launches, so that a plan can be given; on the CPU by `mok.moe`.

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, L experts of this rank, K choices per token, S width of the
shared experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mok
from mok.bench.checks import Experts
from mok.bench.shapes import Shape
from mok.config import TILE_M, Tuning
from mok.executor import row_swiglu
from mok.quantize import Precision

Changes = dict[str, Any]  # fields of ForwardPlan and BackwardPlan; either takes those that it has
NAMES = ("d_x", "d_weights", "d_gate", "d_up", "d_down")


class Batch(NamedTuple):
    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    d_y_TH: Tensor


def make_batch(shape: Shape, rank: int, turn: int, device: torch.device) -> Batch:
    """The tokens of a rank, which every rank can make. Where K is more than E, a token's experts repeat."""
    g = torch.Generator(device).manual_seed(1000 * turn + rank)
    normal = lambda *size: torch.randn(*size, generator=g, device=device)  # noqa: E731
    if shape.K <= shape.E:
        scores, ids = normal(shape.T, shape.E).topk(shape.K)
    else:
        scores, ids = normal(shape.T, shape.K), torch.randint(shape.E, (shape.T, shape.K), generator=g, device=device)
    return Batch(normal(shape.T, shape.H).bfloat16(), ids, scores.softmax(-1), normal(shape.T, shape.H).bfloat16())


def make_experts(shape: Shape, device: torch.device) -> Experts:
    """All experts, the same on every rank."""
    g = torch.Generator(device).manual_seed(17)
    normal = lambda *size: torch.randn(*size, generator=g, device=device).mul_(size[-1] ** -0.5).bfloat16()  # noqa: E731
    return normal(shape.E, shape.I, shape.H), normal(shape.E, shape.I, shape.H), normal(shape.E, shape.H, shape.I)


def rows_to_save(tokens: int, top_k: int, local: int, share: float) -> int:
    """Rows whose gate and up are kept for the backward: a share of a balanced load with its padding, in whole tiles."""
    return int((tokens * top_k + TILE_M * local) * share) // TILE_M * TILE_M


def plan_with(kind: Any, changes: Changes | None) -> Any:
    """A ForwardPlan or BackwardPlan with those of the changes that it has a field for."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in (changes or {}).items() if name in names})


def plan_fields() -> list[str]:
    """Fields of ForwardPlan and BackwardPlan; without a GPU, those that the executor follows."""
    if not torch.cuda.is_available():
        return ["minibatch_tiles", "ring_tiles"]
    from mok.kernels.launch import ForwardPlan
    from mok.kernels.launch_backward import BackwardPlan

    return list(dict.fromkeys(field.name for kind in (ForwardPlan, BackwardPlan) for field in dataclasses.fields(kind)))


def _is_object(found: Any, text: str, example: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text}: must be a JSON object, as '{example}'")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _changes(found: dict[str, Any]) -> Changes:
    fields = plan_fields()
    for name, value in found.items():
        if name not in fields:
            raise argparse.ArgumentTypeError(f"{name}: no field of a plan; on this machine there are {', '.join(fields)}")
        if not isinstance(value, int):
            raise argparse.ArgumentTypeError(f"{name}: {json.dumps(value)}: must be a whole number, true or false")
    return found


def plan_option(text: str) -> Changes:
    """An option's plan."""
    return _changes(_is_object(_parsed(text), text, '{"minibatch_tiles": 8}'))


def plans_option(text: str) -> dict[str, Changes]:
    """An option's plans by label."""
    example = '{"small": {"minibatch_tiles": 8}}'
    found = _is_object(_parsed(text), text, example)
    return {label: _changes(_is_object(changes, text, example)) for label, changes in found.items()}


class GpuLayer:
    """This rank's part of a layer over a group, or, without one, a layer of this rank alone. shared: gate and up [S, H], down [H, S].

    precision: but in "bf16", weights are quantized here, once. Calls of the backward with quantize=True quantize theirs again, as `mok.MoE`
    does.

    compile_for: with so many ranks a layer that only compiles and loads what rank 0 of such a group launches; its barriers do not wait.
    """

    step_for_backward = False

    def __init__(
        self, tokens: int, num_experts: int, top_k: int, experts: Experts, group: dist.ProcessGroup | None, saved: float,
        shared: Experts | None = None, precision: Precision = "bf16", compile_for: int = 1,
    ) -> None:  # fmt: skip
        from mok.kernels import memory
        from mok.kernels.launch import Workspace
        from mok.kernels.launch_backward_fp8 import TransposedExperts
        from mok.kernels.launch_backward_mxfp8 import transposed_for
        from mok.kernels.launch_fp8 import QuantizedExperts
        from mok.kernels.launch_mxfp8 import experts_for

        hidden, device = experts[0].shape[2], experts[0].device
        size = compile_for if group is None else dist.get_world_size(group)
        layout = memory.layer_regions(precision, tokens, hidden, num_experts, top_k, size)
        self.quantized: Any = None
        self.transposed: Any = None
        if precision == "mxfp8":
            self.quantized, self.transposed = experts_for(device, *experts), transposed_for(device, *experts)
        elif precision == "fp8":
            self.quantized, self.transposed = QuantizedExperts.of(*experts), TransposedExperts.of(*experts)
        # All of the views: their owner keeps the peers' memory.
        self.views = [memory.symmetric_memory(layout, group, device)] if group else memory.virtual_memory(layout, size, device)
        self.workspace = Workspace(self.views[0], tokens, hidden, top_k, device, timeout_s=300.0, warming=compile_for > 1)
        self.num_experts, self.experts, self.shared = num_experts, experts, shared
        self.saved_rows = rows_to_save(tokens, top_k, experts[0].shape[0], saved)

    def forward(self, batch: Batch, keep: bool = False, changes: Changes | None = None) -> tuple[Tensor, Any]:
        """The output, and with `keep` what `backward` needs."""
        from mok.kernels import launch, launch_fp8, launch_mxfp8

        schedule = launch.schedule(self.workspace, batch.ids_TK, self.num_experts)
        options: Changes = dict(
            shared=self.shared, save=keep, saved_rows=self.saved_rows if keep else 0, plan=plan_with(launch.ForwardPlan, changes)
        )
        call = (self.workspace, schedule, batch.ids_TK, batch.weights_TK, batch.x_TH)
        if self.quantized is None:
            out, saved = launch.forward(*call, *self.experts, self.num_experts, **options)
        else:
            form = launch_fp8 if isinstance(self.quantized, launch_fp8.QuantizedExperts) else launch_mxfp8
            out, saved = form.forward(*call, self.quantized, self.num_experts, **options)
        return out, (schedule, saved)

    @property
    def kernel(self) -> str:
        """The forward's name."""
        kernels = {"QuantizedExperts": "forward_fp8_kernel", "MxExperts": "forward_mxfp8_kernel"}
        return kernels.get(type(self.quantized).__name__, "forward_kernel")

    @property
    def backward_kernel(self) -> str:
        """The backward's name."""
        kernels = {"TransposedExperts": "backward_fp8_kernel", "MxTransposed": "backward_mxfp8_kernel"}
        return kernels.get(type(self.transposed).__name__, "backward_kernel")

    def backward(self, batch: Batch, kept: Any, changes: Changes | None = None, **options: Any) -> list[Tensor]:
        """The gradients of x, the router weights, gate, up and down, of those that are asked for. options: those of the launch."""
        from mok.kernels import launch_backward, launch_backward_fp8, launch_backward_mxfp8

        schedule, saved = kept
        run: Callable[..., launch_backward.Gradients] = launch_backward.backward
        if self.quantized is not None:
            form = launch_backward_fp8 if isinstance(self.transposed, launch_backward_fp8.TransposedExperts) else launch_backward_mxfp8
            run = form.backward
            options["transposed"] = None if options.pop("quantize", False) else self.transposed
        result = run(
            self.workspace, schedule, saved, batch.ids_TK, batch.d_y_TH, batch.x_TH, batch.weights_TK, *self.experts, self.num_experts,
            plan=plan_with(launch_backward.BackwardPlan, changes), shared=self.shared, **options,
        )  # fmt: skip
        return [gradient for gradient in (result.d_x_TH, result.d_weights_TK, *(result.experts or ())) if gradient is not None]

    def poison(self) -> None:
        """What a slot that nobody writes would show."""
        self.workspace.memory.own["combine"].fill_(float("nan"))

    def finish(self) -> None:
        """Wait for the device and raise what ended a call."""
        torch.cuda.synchronize()
        self.workspace.check()


class CpuLayer:
    """The same on the CPU's executor. Its backward is a step: forward and backward. It saves all rows."""

    step_for_backward = True

    def __init__(
        self, tokens: int, num_experts: int, top_k: int, experts: Experts, group: dist.ProcessGroup | None, saved: float,
        shared: Experts | None = None, precision: Precision = "bf16",
    ) -> None:  # fmt: skip
        self.num_experts, self.experts, self.group, self.shared, self.precision = num_experts, experts, group, shared, precision

    def _call(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Sequence[Tensor], changes: Changes | None) -> Tensor:
        tiles = (changes or {}).get("minibatch_tiles", Tuning().minibatch // TILE_M)
        ring = max(2, (changes or {}).get("ring_tiles", Tuning().macrobatch // TILE_M) // tiles)
        tuning = Tuning(minibatch=tiles * TILE_M, macrobatch=ring * tiles * TILE_M)
        shared = None if self.shared is None else row_swiglu(x_TH, *self.shared).to(x_TH.dtype)
        return mok.moe(
            x_TH, ids_TK, weights_TK, *experts, shared=shared, num_experts=self.num_experts, group=self.group, tuning=tuning,
            precision=self.precision,
        )  # fmt: skip

    def forward(self, batch: Batch, keep: bool = False, changes: Changes | None = None) -> tuple[Tensor, Any]:
        with torch.no_grad():
            return self._call(*batch[:3], self.experts, changes), None

    def differentiable(self, batch: Batch, changes: Changes | None = None) -> Callable[[], list[Tensor]]:
        """A forward, and the call of its backward."""
        x, weights, *experts = (t.detach().requires_grad_() for t in (batch.x_TH, batch.weights_TK, *self.experts))
        with torch.enable_grad():
            out = self._call(x, batch.ids_TK, weights, experts, changes)
        return lambda: list(torch.autograd.grad(out, [x, weights, *experts], batch.d_y_TH))

    def backward(self, batch: Batch, kept: Any, changes: Changes | None = None) -> list[Tensor]:
        return self.differentiable(batch, changes)()

    def poison(self) -> None: ...

    def finish(self) -> None: ...


def layer_class(device: torch.device) -> type[GpuLayer] | type[CpuLayer]:
    return GpuLayer if device.type == "cuda" else CpuLayer


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Turns:
    """Calls with the elements of one input set after the other, shared by all contestants. All ranks take the same turns."""

    def __init__(self, sets: int) -> None:
        self.sets, self.turn = sets, 0

    def of(self, call: Callable[..., object], *sequences: Sequence[Any], **fixed: Any) -> Callable[[], object]:
        def run() -> object:
            self.turn = (self.turn + 1) % self.sets
            return call(*(sequence[self.turn] for sequence in sequences), **fixed)

        return run
