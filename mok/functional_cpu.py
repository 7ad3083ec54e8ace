"""The low-level API on a CPU, by the executor. `functional.py` has checked a call's arguments; here all ranks agree on them.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, S width of the
shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mok import executor, ops
from mok.config import Tuning
from mok.executor import Shape, exact
from mok.fabric import HostFabric, Region, host_fabric
from mok.ops import Inputs, Problem
from mok.quantize import WEIGHT_BLOCKS, Precision, Recipe, dequantize, from_tcgen05, scale_shape
from mok.schedule import Schedule

Shared = tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class Layer:
    """What the calls of one layer have in common. matrices: of gate, up and perhaps down one bf16 tensor, or values and scale (and those
    of the transpose), as a forward or a backward takes them."""

    group: dist.ProcessGroup | HostFabric | None
    tuning: Tuning
    ids_TK: Tensor
    num_experts: int
    precision: Precision
    matrices: Sequence[Sequence[Tensor]]
    limit: float | None

    @property
    def problem(self) -> Problem:
        return Problem(host_fabric(self.group), self.tuning, self.num_experts, self.limit, Recipe(self.precision))

    def widened(self, transposed: bool = False) -> list[Tensor]:
        """Gate and up [L, I, H], down [L, H, I] in bf16; transposed: from their forms for products along the other dimension."""
        if self.precision == "bf16":
            return [matrix[0] for matrix in self.matrices]
        if transposed:
            return [widened(self.precision, *matrix[-2:]).mT for matrix in self.matrices]
        return [widened(self.precision, *matrix[:2]) for matrix in self.matrices]


def widened(precision: Precision, values: Tensor, scale: Tensor) -> Tensor:
    """A quantized weight [L, M, N] in bf16, which holds its numbers. scale: E8M0 codes, of MXFP8 in either layout."""
    assert precision != "bf16"
    block = WEIGHT_BLOCKS[precision]
    if scale.dim() == 4:
        scale = from_tcgen05(scale, *scale_shape(values.shape, block)[-2:])
    return dequantize(values, scale, block, torch.bfloat16)


_whole = torch.compiler.disable(reason="the low-level API on a CPU is not for torch.compile(fullgraph=True)")


@_whole
def refuse(operation: str, group: dist.ProcessGroup | HostFabric | None, timeout_s: float, error: Exception) -> NoReturn:
    """Raise the error on every rank of the group."""
    fabric = host_fabric(group)
    if fabric.size > 1:
        fabric.begin(operation, {}, lambda request: [], error=error, timeout_s=timeout_s)
    raise error


def _routes(request: dict[str, Any]) -> list[Region]:
    return [
        Region("counts", (request["num_experts"],), torch.int64),
        Region("order", (request["tokens"] * request["top_k"],), torch.int32),
    ]


@_whole
def build_schedule(
    group: dist.ProcessGroup | HostFabric | None, ids_TK: Tensor, num_experts: int, timeout_s: float
) -> tuple[Schedule, Tensor]:  # fmt: skip
    """This rank's rows, and int64 [E], the group's routes to each expert.

    Raises:
        ValueError: an id out of range on any rank, or ranks that disagree on K or E; the same on every rank.
    """
    error: Exception | None = None
    try:
        ops._check_ids(ids_TK, num_experts)
    except Exception as failure:
        error = failure
    request = dict(tokens=ids_TK.shape[0], top_k=ids_TK.shape[1], num_experts=num_experts)
    call = host_fabric(group).begin("schedule", request, _routes, error=error, same=("top_k", "num_experts"), timeout_s=timeout_s)
    with call, exact():
        shape = Shape(ids_TK.shape[0], 0, ids_TK.shape[1], num_experts, torch.bfloat16)
        schedule, counts_RE = executor.publish(call, shape, ids_TK, {})
        call.signal("pushed")  # nobody reads this rank's routes any more
        for peer in range(call.size):
            call.wait("pushed", peer, task="schedule")
    return schedule, counts_RE.sum(0)


@_whole
def shared_gate_up(x_TH: Tensor, shared_gate: Tensor, shared_up: Tensor) -> tuple[Tensor, Tensor]:
    """[T, S] each, in bf16."""
    gate, up = (executor.row_linear(x_TH, weight).to(x_TH.dtype) for weight in (shared_gate, shared_up))
    return gate, up


@_whole
def forward(layer: Layer, x_TH: Tensor, weights_TK: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
    """The output [T, H], and gate and up [C, I]."""
    try:
        inputs = Inputs(x_TH, layer.ids_TK, weights_TK, *layer.widened())
        first = None if shared is None else executor.row_swiglu(x_TH, *shared, layer.limit)
    except Exception as error:
        refuse("forward", layer.group, layer.tuning.timeout_s, error)
    call = ops.begin("forward", layer.problem, inputs, (True, True, True), shared=first, grad_enabled=False)
    out, gate_CI, up_CI, _ = ops.run_forward(call, layer.problem, inputs, first, save=True)
    return out, gate_CI, up_CI


@_whole
def backward(
    layer: Layer, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, shared: Shared, gate_CI: Tensor, up_CI: Tensor, mains: Sequence[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """d_x, d_weights, and the gradients of gate, up and down, routed and shared; None for what was added into mains."""
    try:
        transposed = layer.widened(transposed=True) if layer.precision == "mxfp8" else None
        if transposed is None:
            weights = layer.widened()
        else:  # of down there is only the transposed form, and no product of a backward reads another
            weights = [*(widened(layer.precision, *matrix[:2]) for matrix in layer.matrices[:2]), transposed[2]]
    except Exception as error:
        refuse("backward", layer.group, layer.tuning.timeout_s, error)
    inputs = Inputs(x_TH, layer.ids_TK, weights_TK, *weights)
    main_grads = (mains[0], mains[1], mains[2]) if mains else ops.NO_MAIN_GRADS
    d_x, d_weights, d_routed = ops.run_backward(
        layer.problem, inputs, gate_CI, up_CI, d_y_TH, (True, True, True), main_grads, transposed=transposed
    )  # fmt: skip
    assert d_x is not None and d_weights is not None
    if shared is None:
        return d_x, d_weights, [*d_routed, None, None, None]
    d_x_shared, sums = executor.row_swiglu_gradients(d_y_TH, x_TH, *shared, layer.limit)
    totals = (sums.gate, sums.up, sums.down)
    for main, total in zip(mains[3:], totals, strict=False):
        main.add_(total)
    d_shared = [None if mains else total.to(x_TH.dtype) for total in totals]
    return (d_x.float() + d_x_shared.float()).to(x_TH.dtype), d_weights, [*d_routed, *d_shared]
