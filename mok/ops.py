"""One collective call of the CPU layer (checks, agreement, forward, backward) and the same as torch.library operators for torch.compile;
and the operator that quantizes a tensor to MXFP8.

The operators `mok::cpu_forward` and `mok::cpu_backward` have shapes that follow from their inputs alone: they keep nothing between forward
and backward but compute gate and up again, which no bit shows.

Legend: T tokens of a rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, C saved rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mok import executor
from mok.config import Tuning
from mok.executor import Needs, Shape, exact, wide_dtype
from mok.fabric import Call, HostFabric, Region, host_fabric
from mok.quantize import E4M3, MX_ROW, UNQUANTIZED, Quantized, Recipe, quantize, scale_shape, to_tcgen05
from mok.schedule import local_experts

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SAME_ON_ALL_RANKS = (  # the first that differs is named: backwards of other forwards may differ in anything
    "of", "hidden", "intermediate", "top_k", "num_experts", "dtype", "clamp", "precision", "quantized_weight_gradients", "grad_enabled",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """What a call is about beside its tensors."""

    fabric: HostFabric
    tuning: Tuning
    num_experts: int
    clamp: float | None
    recipe: Recipe = UNQUANTIZED


@dataclass(frozen=True)
class Inputs:
    """x [T, H], ids and weights [T, K], expert weights gate and up [L, I, H], down [L, H, I]."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    def shape(self, problem: Problem) -> Shape:
        return Shape(self.x.shape[0], self.x.shape[1], self.ids.shape[1], problem.num_experts, self.x.dtype, problem.recipe)


MainGrads = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_MAIN_GRADS: MainGrads = (None, None, None)


def check(
    inputs: Inputs, shared: Tensor | None, main_grads: MainGrads, num_experts: int, clamp: float | None, rank: int, size: int
) -> None:
    """What can be wrong with one rank's arguments on any device, without looking at values."""
    x, ids, weights = inputs.x, inputs.ids, inputs.weights
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: must be [..., H]")
    tokens, hidden = x.shape
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids has dtype {ids.dtype}: must be int64 or int32")
    if ids.dim() != 2 or ids.shape[0] != tokens or ids.shape[1] < 1:
        raise ValueError(f"ids has shape {tuple(ids.shape)}: must be [T, K] with T={tokens} as x and K at least 1")
    if weights.shape != ids.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}: must be that of ids, {tuple(ids.shape)}")
    if not weights.dtype.is_floating_point:
        raise TypeError(f"weights has dtype {weights.dtype}: must be a floating-point dtype")
    experts = {"gate_EIH": inputs.gate, "up_EIH": inputs.up, "down_EHI": inputs.down}
    local = len(local_experts(num_experts, size, rank))
    width = inputs.gate.shape[1] if inputs.gate.dim() == 3 else "I"
    for (name, tensor), main in zip(experts.items(), main_grads, strict=True):
        expected = (local, hidden, width) if name == "down_EHI" else (local, width, hidden)
        here = f"{local} of num_experts={num_experts} experts live on rank {rank} of {size}"
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {expected} ({here}; H is that of x)")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}: must be that of x, {x.dtype}")
        if main is not None and not isinstance(main, Tensor):
            raise TypeError(f"{name}.main_grad is a {type(main).__name__}: must be a tensor")
        if main is not None and (main.shape != tensor.shape or main.dtype not in (torch.float32, torch.float64)):
            raise ValueError(f"{name}.main_grad is {main.dtype} {tuple(main.shape)}: must be torch.float32 {tuple(tensor.shape)}")
    if shared is not None and (shared.shape != x.shape or not shared.dtype.is_floating_point):
        raise ValueError(f"shared is {shared.dtype} {tuple(shared.shape)}: must be floating-point of the shape of x, {tuple(x.shape)}")
    if clamp is not None and not clamp >= 0:
        raise ValueError(f"clamp={clamp!r}: must be None or at least 0")
    for name, other in {"ids": ids, "weights": weights, **experts, "shared": shared}.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device}: must be on the device of x, {x.device}")


def _check_ids(ids: Tensor, num_experts: int) -> None:
    if ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < -1 or high >= num_experts:
            raise ValueError(f"ids has values from {low} to {high}: must be -1 (masked) or 0 to {num_experts - 1}")


def _forward_regions(request: dict[str, Any]) -> list[Region]:
    return _shape_of(request).forward_regions()


def _backward_regions(request: dict[str, Any]) -> list[Region]:
    return _shape_of(request).backward_regions()


def _shape_of(request: dict[str, Any]) -> Shape:
    dtype, recipe = getattr(torch, request["dtype"]), Recipe(request["precision"], request["quantized_weight_gradients"])
    return Shape(request["tokens"], request["hidden"], request["top_k"], request["num_experts"], dtype, recipe)


def begin(
    operation: str,
    problem: Problem,
    inputs: Inputs,
    asked: Sequence[bool],
    *,
    shared: Tensor | None = None,
    main_grads: MainGrads = NO_MAIN_GRADS,
    of: int | None = None,
    grad_enabled: bool | None = None,
) -> Call:
    """Check this rank's arguments and agree with all ranks on the call.

    asked: gradients of (x, weights, experts) wanted by this rank. of: the number of the forward call that a backward belongs to.

    Raises:
        ValueError, TypeError: the same on every rank, if any rank's arguments are bad or they disagree.
        FabricError: a rank did not come.
    """
    request: dict[str, Any] = {}
    error: Exception | None = None
    try:
        check(inputs, shared, main_grads, problem.num_experts, problem.clamp, problem.fabric.rank, problem.fabric.size)
        _check_ids(inputs.ids, problem.num_experts)
    except Exception as failure:  # whatever it is, the other ranks must hear of it
        error = failure
    else:
        request = {
            "tokens": inputs.x.shape[0],
            "hidden": inputs.x.shape[1],
            "intermediate": inputs.gate.shape[1],
            "top_k": inputs.ids.shape[1],
            "num_experts": problem.num_experts,
            "dtype": str(inputs.x.dtype).removeprefix("torch."),
            "clamp": problem.clamp,
            "precision": problem.recipe.precision,
            "quantized_weight_gradients": problem.recipe.quantized_weight_gradients,
            "grad_enabled": torch.is_grad_enabled() if grad_enabled is None else grad_enabled,
            "asked": [bool(a) for a in asked],
            "of": of,
        }
    return host_fabric(problem.fabric).begin(  # of this thread, where the group is a single rank
        operation,
        request,
        _forward_regions if operation == "forward" else _backward_regions,
        error=error,
        same=SAME_ON_ALL_RANKS,
        timeout_s=problem.tuning.timeout_s,
    )


def run_forward(call: Call, problem: Problem, inputs: Inputs, shared: Tensor | None, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [T, H], gate and up of the saved rows [C, I], and the counts [R, E] of every rank's routes."""
    with call, exact():
        return executor.forward(
            call, inputs.shape(problem), problem.tuning, inputs.x, inputs.ids, inputs.weights, inputs.gate, inputs.up, inputs.down,
            shared=shared, clamp=problem.clamp, save=save,
        )  # fmt: skip


def run_backward(
    problem: Problem,
    inputs: Inputs,
    gate_CI: Tensor,
    up_CI: Tensor,
    d_out: Tensor,
    asked: Sequence[bool],
    main_grads: MainGrads = NO_MAIN_GRADS,
    of: int | None = None,
    transposed: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """d_x, d_weights and the three expert-weight gradients; None for what is not asked for or was added into main_grads. transposed: see
    `executor.backward`."""
    call = begin("backward", problem, inputs, asked, of=of, grad_enabled=False)
    anyone = [any(request["asked"][i] for request in call.requests) for i in range(2)]
    with call, exact():
        return executor.backward(
            call, inputs.shape(problem), problem.tuning, gate_CI, up_CI, d_out,
            inputs.x, inputs.ids, inputs.weights, inputs.gate, inputs.up, inputs.down,
            clamp=problem.clamp, needs=Needs(experts=asked[2], x=anyone[0], weights=anyone[1]), main_grads=main_grads,
            transposed_LIH=transposed,
        )  # fmt: skip


# ---- operators for torch.compile ----


def _problem(
    group_name: str, num_experts: int, clamp: float | None, recipe: Recipe, minibatch: int, macrobatch: int, timeout_s: float
) -> Problem:
    group = dist.distributed_c10d._resolve_process_group(group_name) if group_name else None  # type: ignore[arg-type]
    tuning = Tuning(minibatch=minibatch, macrobatch=macrobatch, saved_rows=0, timeout_s=timeout_s)
    return Problem(host_fabric(group), tuning, num_experts, clamp, recipe)


@torch.library.custom_op("mok::cpu_forward", mutates_args=())
def cpu_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shared: Tensor | None,
    group_name: str,
    num_experts: int,
    clamp: float | None,
    precision: str,
    quantized_weight_gradients: bool,
    minibatch: int,
    macrobatch: int,
    timeout_s: float,
    grad_enabled: bool,
) -> tuple[Tensor, Tensor]:
    """out [T, H] and the counts int64 [E] of the group's routes; group_name "" is a group of one."""
    recipe = Recipe(precision, quantized_weight_gradients)  # type: ignore[arg-type]
    problem = _problem(group_name, num_experts, clamp, recipe, minibatch, macrobatch, timeout_s)
    inputs = Inputs(x, ids, weights, gate, up, down)
    call = begin("forward", problem, inputs, (False, False, False), shared=shared, grad_enabled=grad_enabled)
    out, _, _, counts_RE = run_forward(call, problem, inputs, shared, save=False)
    return out, counts_RE.sum(0)


@cpu_forward.register_fake
def _(x, ids, weights, gate, up, down, shared, group_name, num_experts, *rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format), ids.new_empty(num_experts, dtype=torch.int64)


@torch.library.custom_op("mok::cpu_backward", mutates_args=())
def cpu_backward(
    d_out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    asked: Sequence[bool],
    group_name: str,
    num_experts: int,
    clamp: float | None,
    precision: str,
    quantized_weight_gradients: bool,
    minibatch: int,
    macrobatch: int,
    timeout_s: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_x, d_weights, d_gate, d_up, d_down; empty tensors of shape [0] for what is not asked for."""
    recipe = Recipe(precision, quantized_weight_gradients)  # type: ignore[arg-type]
    problem = _problem(group_name, num_experts, clamp, recipe, minibatch, macrobatch, timeout_s)
    inputs = Inputs(x, ids, weights, gate, up, down)
    nothing = x.new_empty(0, gate.shape[1])
    d_x, d_weights, d_experts = run_backward(problem, inputs, nothing, nothing, d_out, asked)
    wide = wide_dtype(x.dtype)
    d_x = d_x if asked[0] and d_x is not None else x.new_empty(0)
    d_weights = d_weights if asked[1] and d_weights is not None else x.new_empty(0, dtype=wide)
    d_gate, d_up, d_down = (x.new_empty(0) if d is None else d for d in d_experts)
    return d_x, d_weights, d_gate, d_up, d_down


@cpu_backward.register_fake
def _(d_out, x, ids, weights, gate, up, down, asked, *rest):  # type: ignore[no-untyped-def]
    def like(tensor: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor:
        return tensor.new_empty(tensor.shape if wanted else (0,), dtype=dtype)

    experts = (like(w, asked[2], w.dtype) for w in (gate, up, down))
    return (like(x, asked[0], x.dtype), like(weights, asked[1], wide_dtype(x.dtype)), *experts)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, ids, weights, gate, up, down, shared, *rest = inputs
    ctx.save_for_backward(x, ids, weights, gate, up, down)
    ctx.shared_dtype = None if shared is None else shared.dtype
    ctx.rest = rest
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, d_out, _):  # type: ignore[no-untyped-def]
    x, ids, weights, gate, up, down = ctx.saved_tensors
    need = ctx.needs_input_grad
    asked = [need[0], need[2], any(need[3:6])]
    d_x, d_weights, *d_experts = cpu_backward(d_out, x, ids, weights, gate, up, down, asked, *ctx.rest[:-1])
    d_gate, d_up, d_down = (d if wanted else None for d, wanted in zip(d_experts, need[3:6], strict=True))
    d_shared = d_out.to(ctx.shared_dtype) if need[6] else None
    return d_x if need[0] else None, None, d_weights if need[2] else None, d_gate, d_up, d_down, d_shared, *(None for _ in ctx.rest)


cpu_forward.register_autograd(_backward, setup_context=_setup_context)


# ---- MXFP8 ----

ScaleLayout = Literal["tcgen05", "plain"]


@torch.library.custom_op("mok::mxfp8_quantize", mutates_args=())
def _mxfp8_quantize(x: Tensor, normal: bool, transposed: bool, tcgen05: bool) -> list[Tensor]:
    forms = [form for form, wanted in ((x, normal), (x.mT, transposed)) if wanted]
    results: list[Tensor] = []
    for form in forms:
        if x.is_cuda:
            from mok.kernels import quantize as kernels

            results += kernels.quantize(form, MX_ROW, tcgen05)
        else:
            values, scale = quantize(form, MX_ROW)
            results += Quantized(values, to_tcgen05(scale) if tcgen05 else scale)
    return results


@_mxfp8_quantize.register_fake
def _(x, normal, transposed, tcgen05):  # type: ignore[no-untyped-def]
    results = []
    for shape, wanted in ((x.shape, normal), (x.mT.shape, transposed)):
        if wanted:
            experts = x.shape[0] if x.dim() == 3 else 1
            tiled = (experts * -(-shape[-2] // 128), -(-shape[-1] // 128), 32, 16)
            scale = tiled if tcgen05 else scale_shape(shape, MX_ROW)
            results += [x.new_empty(shape, dtype=E4M3), x.new_empty(scale, dtype=torch.uint8)]
    return results


def mxfp8_quantize(
    x: Tensor, return_normal: bool = True, return_transposed: bool = True, *, scale_layout: ScaleLayout = "tcgen05"
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """MXFP8 forms of x along its last dimension and along its last but one, each quantized from x (`mok.quantize`). No gradient.

    Args:
        x: bf16 or fp32 [M, N] or [E, M, N], any M and N.
        return_normal, return_transposed: which forms; at least one.
        scale_layout: "tcgen05" as Blackwell's tensor cores read scales (`mok.quantize.to_tcgen05`), "plain" with the dimensions of values.

    Returns:
        (values, scale, values_T, scale_T), None for what was not asked. values: E4M3 [.., M, N]; values_T: E4M3 [.., N, M], blocks of 32
        along M. scale: uint8 E8M0 codes, [E * ceil(M / 128), ceil(N / 128), 32, 16] or plain [.., M, ceil(N / 32)]; scale_T: the same with
        M and N exchanged.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x: must be a tensor, not {type(x).__name__}")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x has dtype {x.dtype}: must be torch.bfloat16 or torch.float32")
    if x.dim() not in (2, 3):
        raise ValueError(f"x has shape {tuple(x.shape)}: must be [M, N] or [E, M, N]")
    if not return_normal and not return_transposed:
        raise ValueError("return_normal=False, return_transposed=False: at least one must be True")
    if scale_layout not in get_args(ScaleLayout):
        raise ValueError(f"scale_layout={scale_layout!r}: must be one of {', '.join(get_args(ScaleLayout))}")
    results: list[Tensor | None] = list(_mxfp8_quantize(x.detach(), return_normal, return_transposed, scale_layout == "tcgen05"))
    nothing: list[Tensor | None] = [None, None]
    normal, transposed = (results[:2] if return_normal else nothing), (results[-2:] if return_transposed else nothing)
    return normal[0], normal[1], transposed[0], transposed[1]
