"""The layer: `MoE` (an nn.Module), `moe` (given ids and weights), and their autograd.

Gradients are sums over the tokens of the whole expert-parallel group and nothing is divided: an expert's weight gradient is the same
whether its tokens came from one rank or from eight. Where the loss is a mean over the tokens of R ranks, each rank divides its own sum by
the tokens of all. Under data parallelism that averages gradients over R ranks (DDP, FSDP), the experts' gradients are already sums over
their group: divide them by R as the others are, do not average them over the group a second time.

Legend: T tokens of a rank, H hidden, I intermediate, E experts in all, K choices per token, R ranks, S width of the shared experts.
"""

from __future__ import annotations

import hashlib
import math
import numbers
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mok import ops
from mok.config import MoEConfig, Tuning, _check_int
from mok.executor import final, row_linear, row_swiglu, row_swiglu_gradients, wide_dtype
from mok.fabric import HostFabric, VirtualFabric, host_fabric
from mok.ops import Inputs, MainGrads, Problem
from mok.quantize import UNQUANTIZED, Precision, Recipe
from mok.router import Router, Routing, balance_loss, row_sigmoid, scale_rows
from mok.schedule import local_experts
from mok.seeds import generator_of

Group = dist.ProcessGroup | DeviceMesh | HostFabric | None

COMPILED_MAIN_GRAD = "main_grad: cannot be accumulated into under torch.compile on the CPU; leave the attribute away"


class _RoutedExperts(torch.autograd.Function):
    """Forward and backward of a call that all ranks have agreed on. `anchor` makes the output differentiable where nothing else does."""

    @staticmethod
    def forward(ctx, anchor, x, ids, weights, gate, up, down, shared, call, problem, main_grads):  # type: ignore[no-untyped-def]
        inputs = Inputs(x, ids, weights, gate, up, down)
        out, gate_CI, up_CI, counts_RE = ops.run_forward(call, problem, inputs, shared, save=ctx.needs_input_grad[0])
        ctx.save_for_backward(x, ids, weights, gate, up, down, gate_CI, up_CI)
        ctx.rest = (problem, main_grads, None if shared is None else shared.dtype, call.number)
        counts_E = counts_RE.sum(0)
        ctx.mark_non_differentiable(counts_E)
        return out, counts_E

    @staticmethod
    @final
    def backward(ctx, d_out, _):  # type: ignore[no-untyped-def]
        *inputs, gate_CI, up_CI = ctx.saved_tensors
        problem, main_grads, shared_dtype, number = ctx.rest
        _, need_x, _, need_weights, *need_experts, need_shared = ctx.needs_input_grad[:8]
        asked = (need_x, need_weights, any(need_experts))
        d_x, d_weights, d_experts = ops.run_backward(problem, Inputs(*inputs), gate_CI, up_CI, d_out, asked, main_grads, of=number)
        d_experts = [d if need else None for d, need in zip(d_experts, need_experts, strict=True)]
        d_shared = d_out.to(shared_dtype) if need_shared else None
        return None, d_x if need_x else None, None, d_weights if need_weights else None, *d_experts, d_shared, None, None, None


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on."""
    device = tensors[0].device.type
    return tuple(t.to(_computed(t.dtype, device)) for t in tensors)


def _computed(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype that autocast makes of it where it is on."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)  # as torch does: fp64 stays
    return torch.get_autocast_dtype(device) if dtype in narrow and torch.is_autocast_enabled(device) else dtype


def _check_no_transform() -> None:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError("mok: torch.func transforms (vmap, grad, vjp, jvp, ...) are not supported; use torch.autograd")


def _main_grad(parameter: Tensor) -> Tensor | None:
    main = getattr(parameter, "main_grad", None)
    if main is None or not parameter.requires_grad:
        return None
    return _local(main) if isinstance(main, Tensor) else main  # anything else is refused with all ranks


_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


@dataclass(frozen=True)
class _Group:
    """The ranks of a layer: a torch.distributed group, with its mesh if it was given as one, a virtual rank, or this rank alone."""

    given: dist.ProcessGroup | HostFabric | None
    rank: int
    size: int
    mesh: DeviceMesh | None = None

    @staticmethod
    def of(group: Group) -> _Group:
        if isinstance(group, HostFabric):
            return _Group(group, group.rank, group.size)
        if group is None:
            return _Group(None, 0, 1)
        mesh = group if isinstance(group, DeviceMesh) else None
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"group={group!r}: a mesh must have one dimension, mesh['ep'] for instance")
        ranks = mesh.get_group() if mesh is not None else group
        if isinstance(ranks, int) and ranks == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives those who are not in it
            raise ValueError(f"group={group!r}: this process is not one of its ranks")
        if not isinstance(ranks, dist.ProcessGroup):
            raise TypeError(f"group={group!r}: must be a torch.distributed group, a mesh of one dimension, a virtual rank, or None")
        if dist.get_rank(ranks) < 0:
            raise ValueError(f"group={group!r}: this process is not one of its ranks")
        if dist.get_world_size(ranks) == 1:
            return _Group(None, 0, 1, mesh)
        return _Group(ranks, dist.get_rank(ranks), dist.get_world_size(ranks), mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        return self  # a copy of a layer has the same ranks

    def refuse(self, error: Exception, tuning: Tuning) -> NoReturn:
        """Raise the error on every rank (on the CPU, and outside torch.compile; else on this one)."""
        if not torch.compiler.is_compiling():
            self.fabric.begin("forward", {}, lambda request: [], error=error, timeout_s=tuning.timeout_s)
        raise error

    def generator(self) -> torch.Generator | None:
        """Where first weights come from; None is torch's default generator."""
        return generator_of(self.given) if isinstance(self.given, VirtualFabric) and self.size > 1 else None

    def compare_generators(self) -> None:
        """Warn if the processes of a group do not start from the same weights. Collective for the group's first layer."""
        if not isinstance(self.given, dist.ProcessGroup) or self.given in _compared:
            return
        _compared.add(self.given)
        states: list[Any] = [None] * self.size
        dist.all_gather_object(states, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(), group=self.given)
        others = [rank for rank, state in enumerate(states) if state != states[0]]
        if others:
            warnings.warn(
                f"mok.MoE: torch's generator stands elsewhere on ranks {', '.join(map(str, others))} of the group than on rank 0, so "
                "router and shared experts start with other weights there: call torch.manual_seed with the same seed on all ranks before "
                "the layer is built, or load the same weights into all of them",
                stacklevel=3,
            )

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The torch.distributed group, for more than one rank."""
        if isinstance(self.given, HostFabric) and self.size > 1:
            raise ValueError("group: virtual ranks run on the CPU, and not under torch.compile; give a torch.distributed group")
        return self.given if isinstance(self.given, dist.ProcessGroup) else None

    @property
    def fabric(self) -> HostFabric:
        return host_fabric(self.given)


def _routed_cpu(
    inputs: Inputs,
    shared: Tensor | None,
    main_grads: MainGrads,
    num_experts: int,
    clamp: float | None,
    recipe: Recipe,
    group: _Group,
    tuning: Tuning,
) -> tuple[Tensor, Tensor]:
    """out [T, H] and the counts int64 [E] of the group's routes."""
    x, weights = inputs.x, inputs.weights
    if torch.compiler.is_compiling():
        if any(main is not None for main in main_grads):
            raise ValueError(COMPILED_MAIN_GRAD)
        name = "" if group.process_group is None else group.process_group.group_name
        problem_settings = (name, num_experts, clamp, recipe.precision, recipe.quantized_weight_gradients)
        settings = (*problem_settings, tuning.minibatch, tuning.macrobatch, tuning.timeout_s, torch.is_grad_enabled())
        return ops.cpu_forward(x, inputs.ids, weights, inputs.gate, inputs.up, inputs.down, shared, *settings)
    problem = Problem(group.fabric, tuning, num_experts, clamp, recipe)
    asked = (x.requires_grad, weights.requires_grad, any(w.requires_grad for w in (inputs.gate, inputs.up, inputs.down)))
    call = ops.begin("forward", problem, inputs, asked, shared=shared, main_grads=main_grads)
    # A rank from which nothing is asked must still come to backward when another rank needs its experts.
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled() and any(any(request["asked"]) for request in call.requests))
    everything = (x, inputs.ids, weights, inputs.gate, inputs.up, inputs.down)
    return _RoutedExperts.apply(anchor, *everything, shared, call, problem, main_grads)


def _routed_gpu(
    inputs: Inputs,
    shared: Tensor | None,
    main_grads: MainGrads,
    num_experts: int,
    clamp: float | None,
    recipe: Recipe,
    group: _Group,
    tuning: Tuning,
    shared_experts: SharedExperts | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [T, H] and the counts int64 [E] of the group's routes. shared_experts: computed inside the kernel, in place of `shared`, and
    multiplied by scale [T]."""
    from mok.kernels import autograd

    ops.check(inputs, shared, main_grads, num_experts, clamp, group.rank, group.size)
    x, width = inputs.x, inputs.gate.shape[1]
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x has dtype {x.dtype}: must be torch.bfloat16 on a GPU")
    for name, size in (("hidden_size", x.shape[1]), ("intermediate_size", width)):
        if size % 16:
            raise ValueError(f"{name}={size}: must be a multiple of 16 on a GPU")
    mains = [main for main in main_grads if main is not None]
    shared_mains: list[Tensor] = []
    matrices = shared_clamp = None
    trained = any(w.requires_grad for w in (inputs.gate, inputs.up, inputs.down))
    if shared_experts is not None:
        gate, up, down = _autocast(*shared_experts.matrices)
        matrices, shared_clamp = (gate, up, down), shared_experts.clamp
        shared_mains = [main for main in shared_experts.main_grads() if main is not None]
        if trained and any(w.requires_grad for w in matrices) and len(shared_mains) != len(mains):
            raise ValueError("main_grad: on a GPU, the routed and the shared experts must all have one or none")
    if len(mains) not in (0, 3) or len(shared_mains) not in (0, 3):
        raise ValueError("main_grad: on a GPU, the gate, up and down matrices must all have one or none")
    if any(main.dtype != torch.float32 or not main.is_contiguous() for main in (*mains, *shared_mains)):
        raise ValueError("main_grad: on a GPU, must be torch.float32 and contiguous")
    experts = (inputs.gate.contiguous(), inputs.up.contiguous(), inputs.down.contiguous())
    arguments = (x.contiguous(), inputs.ids.to(torch.int64).contiguous(), inputs.weights.contiguous(), experts)
    if recipe.precision == "mxfp8" and recipe.quantized_weight_gradients and trained and torch.is_grad_enabled():
        raise ValueError("quantized_weight_gradients=True: must be False with precision='mxfp8' on a GPU")
    return autograd.layer(
        *arguments, matrices, scale, shared, mains, shared_mains, num_experts, clamp, shared_clamp, group.process_group, tuning,
        recipe.precision, recipe.quantized_weight_gradients,
    )  # fmt: skip


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_EIH: Tensor,
    up_EIH: Tensor,
    down_EHI: Tensor,
    *,
    shared: Tensor | None = None,
    clamp: float | None = None,
    precision: Precision = "bf16",
    quantized_weight_gradients: bool = False,
    num_experts: int | None = None,
    group: Group = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Routed SwiGLU experts for given choices: out = shared + sum_k w_k * expert_{ids_k}(x), k ascending in fp32, rounded once.

    With a group of R ranks every rank calls it, with any number of tokens (0 included), and holds the experts that
    `mok.schedule.local_experts` gives it.

    Args:
        x: [..., H], fp64, fp32, bf16 or fp16, on a GPU bf16; under autocast it and the expert weights are cast to autocast's dtype.
        ids: int64 or int32 [..., K], -1 masks a slot; the same expert may stand twice.
        weights: [..., K], any floating-point dtype, used in fp32 (fp64 for fp64 x); a masked slot's weight is never read.
        gate_EIH, up_EIH: [L, I, H] experts of this rank; down_EHI: [L, H, I]; in the dtype of x. Where a parameter has an attribute
            `main_grad` (fp32, same shape) its gradient is added into that and `.grad` stays None.
        shared: [..., H] added first, in fp32; the shared experts' output.
        clamp: L of silu(min(gate, L)) * clamp(up, -L, L); None for none.
        precision: "bf16" multiplies in the dtype of x, whichever that is; "mxfp8" and "fp8" quantize operands as `mok.quantize.Recipe`
            says. quantized_weight_gradients: those of weight gradients too (on a GPU in "fp8" only), which no GPU does faster.
        num_experts: E; needed when the group has more than one rank.
        group: a torch.distributed group or mesh of one dimension, a virtual rank (`mok.fabric.virtual_ranks`), or None for this rank alone.
        tuning: knobs; none moves a bit.

    Returns:
        [..., H] in the dtype of x.

    Raises:
        ValueError, TypeError: bad or disagreeing arguments; on the CPU the same on every rank, before anything is computed. On a GPU
            each rank checks shapes for itself, and an id out of range is reported by a later call, as nothing waits for the device.
            Under torch.compile with fullgraph=True, shapes and dtypes that stop the trace are reported by it, on that rank alone.
        FabricError: a rank of the group did not come, died, or was too slow (`Tuning.timeout_s`); it says which.
    """
    ranks, given = _Group.of(group), tuning
    tuning = given if isinstance(given, Tuning) else Tuning()
    try:
        if given is not None and not isinstance(given, Tuning):
            raise TypeError(f"tuning={given!r}: must be a Tuning")
        _check_no_transform()
        _check_tensors(x=x, ids=ids, weights=weights, gate_EIH=gate_EIH, up_EIH=up_EIH, down_EHI=down_EHI, shared=shared)
        leading = x.shape[:-1]
        for name, other in (("ids", ids), ("weights", weights), ("shared", shared)):
            if other is not None and other.shape[:-1] != leading:
                raise ValueError(f"{name} has shape {tuple(other.shape)}: must be that of x, {tuple(x.shape)}, but for the last dimension")
        if num_experts is None:
            if ranks.size > 1:
                raise ValueError("num_experts=None: must be given when the group has more than one rank")
            num_experts = gate_EIH.shape[0] if gate_EIH.dim() else 1
            if num_experts == 0:
                raise ValueError(f"gate_EIH has shape {tuple(gate_EIH.shape)}: must hold at least 1 expert")
        else:
            _check_int("num_experts", num_experts, 1)
        if clamp is not None and (isinstance(clamp, bool) or not isinstance(clamp, numbers.Real)):
            raise TypeError(f"clamp={clamp!r}: must be None or a number, not {type(clamp).__name__}")
        num_experts, clamp = int(num_experts), None if clamp is None else float(clamp)
        recipe = Recipe(precision, quantized_weight_gradients)
        inputs, main_grads = _inputs(_flat(x), _flat(ids), _flat(weights), gate_EIH, up_EIH, down_EHI)
        flat_shared = None if shared is None else _flat(shared)
    except Exception as error:
        if isinstance(x, Tensor) and x.is_cuda:
            raise
        ranks.refuse(error, tuning)
    run = _routed_gpu if x.is_cuda else _routed_cpu
    out, _ = run(inputs, flat_shared, main_grads, num_experts, clamp, recipe, ranks, tuning)
    return _unflat(out, x.shape)


def _check_tensors(**given: object) -> None:
    """Of these, shared alone may be None."""
    for name, value in given.items():
        if not isinstance(value, Tensor) and not (name == "shared" and value is None):
            raise TypeError(f"{name}: must be a tensor, not {type(value).__name__}")


def _inputs(x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Inputs, MainGrads]:
    """This rank's part of the parameters, everything in the dtypes of the computation, and the parameters' main_grads."""
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"x is on {x.device}: must be on the CPU or a GPU")
    main_grads = (_main_grad(gate), _main_grad(up), _main_grad(down))
    x, gate, up, down = _autocast(x, _local(gate), _local(up), _local(down))
    if weights.dtype.is_floating_point:  # anything else is refused with all ranks
        weights = weights.to(wide_dtype(x.dtype))
    return Inputs(x, ids, weights, gate, up, down), main_grads


def _flat(tensor: Tensor) -> Tensor:
    """[..., W] as [N, W]."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _unflat(out_TH: Tensor, shape: torch.Size) -> Tensor:
    """The result of a call in the shape of x, [..., H]: no copy, and no view for autograd either, so that it may be changed in place, under
    FSDP2 too. For that nobody may use out_TH itself afterwards."""
    return out_TH if len(shape) == 2 else torch.ops.aten._unsafe_view(out_TH, shape)


class _FanOut(torch.autograd.Function):
    """x for several users; their gradients are added in order, wide, and rounded once. Autograd would round every partial sum. A sum of two
    has one rounding anyway."""

    @staticmethod
    def forward(ctx, x: Tensor, users: int):  # type: ignore[no-untyped-def]
        ctx.dtype = x.dtype
        return tuple(x.view_as(x) for _ in range(users))

    @staticmethod
    def backward(ctx, *d_xs: Tensor):  # type: ignore[no-untyped-def]
        wide = wide_dtype(ctx.dtype)
        if len(d_xs) == 2:
            return d_xs[0] + d_xs[1], None
        total = d_xs[0].to(wide)
        for d_x in d_xs[1:]:
            total = total + d_x.to(wide)
        return total.to(ctx.dtype), None


class _SwigluIntoMainGrads(torch.autograd.Function):
    """`row_swiglu` on the CPU, with weight gradients added, unrounded, into main_grads where there are some."""

    @staticmethod
    def forward(ctx, x, gate, up, down, clamp, mains):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, gate, up, down)
        ctx.rest = (clamp, mains)
        return row_swiglu(x, gate, up, down, clamp)

    @staticmethod
    @final
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        clamp, mains = ctx.rest
        x, *weights = ctx.saved_tensors
        d_x, sums = row_swiglu_gradients(d_out, x, *weights, clamp)
        gradients = []
        for weight, main, total in zip(weights, mains, (sums.gate, sums.up, sums.down), strict=True):
            gradients.append(total.to(weight.dtype) if main is None else None)
            if main is not None:
                main.add_(total)
        return d_x, *gradients, None, None


class SharedExperts(nn.Module):
    """The shared experts as one SwiGLU of width S, on every token. Parameters gate_SH, up_SH, down_HS and, with a gate, output_gate_H."""

    def __init__(self, config: MoEConfig, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.shared_width
        self.clamp = config.shared_clamp
        self.gate_SH = nn.Parameter(torch.empty(width, hidden, dtype=dtype, device=device))
        self.up_SH = nn.Parameter(torch.empty(width, hidden, dtype=dtype, device=device))
        self.down_HS = nn.Parameter(torch.empty(hidden, width, dtype=dtype, device=device))
        self.output_gate_H = nn.Parameter(torch.empty(hidden, dtype=dtype, device=device)) if config.shared_gate else None

    @property
    def matrices(self) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
        return self.gate_SH, self.up_SH, self.down_HS

    def main_grads(self) -> MainGrads:
        """Of the three matrices.

        Raises:
            ValueError: a `main_grad` of another shape than its parameter, or not fp32 (or fp64).
            TypeError: one that is no tensor.
        """
        mains = [_main_grad(matrix) for matrix in self.matrices]
        for name, matrix, main in zip(("gate_SH", "up_SH", "down_HS"), self.matrices, mains, strict=True):
            if main is not None and not isinstance(main, Tensor):
                raise TypeError(f"shared.{name}.main_grad is a {type(main).__name__}: must be a tensor")
            if main is not None and (main.shape != matrix.shape or main.dtype not in (torch.float32, torch.float64)):
                wanted = f"torch.float32 {tuple(matrix.shape)}"
                raise ValueError(f"shared.{name}.main_grad is {main.dtype} {tuple(main.shape)}: must be {wanted}")
        return mains[0], mains[1], mains[2]

    def forward(self, x_TH: Tensor, gate_x_TH: Tensor | None = None) -> Tensor:
        """[T, H] in fp32 (fp64 for fp64): the term that combine adds first. gate_x_TH: x for the output gate, if its gradient is to come
        by itself."""
        x_TH, gate, up, down = _autocast(x_TH, *self.matrices)
        mains = self.main_grads()
        if x_TH.is_cuda or all(main is None for main in mains):
            out = row_swiglu(x_TH, gate, up, down, self.clamp)
        elif torch.compiler.is_compiling():
            raise ValueError(COMPILED_MAIN_GRAD)
        else:
            out = _SwigluIntoMainGrads.apply(x_TH, gate, up, down, self.clamp, mains)
        scale = self.scale(x_TH if gate_x_TH is None else gate_x_TH)
        return out if scale is None else scale_rows(out, scale)

    def scale(self, x_TH: Tensor) -> Tensor | None:
        """sigmoid(x . g) [T], wide; None without a gate."""
        return None if self.output_gate_H is None else row_sigmoid(row_linear(x_TH, self.output_gate_H[None]))[:, 0]


def _in_backward() -> bool:
    """Whether autograd is running backward in this thread, so that a forward now is a recompute."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class MoE(nn.Module):
    """A Mixture-of-Experts layer over an expert-parallel group.

    Parameters: `gate_EIH`, `up_EIH` [L, I, H] and `down_EHI` [L, H, I], the experts of this rank (DTensors sharded over the group where
    it is a torch.distributed group of several ranks, so that checkpoints load at any group size); `router` and `shared`, replicated:
    their gradients are those of this rank's tokens and are reduced as any data-parallel parameter.

    All ranks of a group build the layer with the same seed: replicated parameters must be equal, and an expert's first weights depend on
    the seed and its index, not on the number of ranks. On the CPU a group of processes warns at its first layer if torch's generators
    differ. Virtual ranks may call `torch.manual_seed` in their threads or before them: each has a generator of its own (`mok.seeds`).

    Where a gate, up or down matrix of the experts, routed or shared, has an attribute `main_grad` (fp32, same shape), its gradient is
    added into that, unrounded, and `.grad` stays None. Those of the router and of the shared experts' output gate stand in `.grad`.

    Args:
        config: the problem.
        group: a torch.distributed group, a mesh of one dimension (`mesh["ep"]`, needed beside FSDP2), a virtual rank, or None for this rank
            alone.
        tuning: the knobs; none moves a bit.
        precision, quantized_weight_gradients: as `moe`; which operands are quantized is the table of `mok.quantize.Recipe`. Parameters and
            their gradients keep their dtype. Weights are quantized anew by every forward and backward.
        dtype, device: of the parameters. `layer.router.float()` keeps the router of a bf16 or fp16 layer in fp32: it computes in fp32
            either way, from a weight that is then not rounded after every step.

    Attributes:
        tokens_per_expert: int64 [E], how many routes each expert got from the whole group in the last training forward.
        balance_loss: see there.
    """

    tokens_per_expert: Tensor
    _draws_weights = True  # False where reset_parameters draws none, so that generators may differ

    def __init__(
        self,
        config: MoEConfig,
        group: Group = None,
        *,
        tuning: Tuning | None = None,
        precision: Precision = "bf16",
        quantized_weight_gradients: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config={config!r}: must be a MoEConfig, from MoEConfig.preset(name) for instance")
        if (torch.get_default_dtype() if dtype is None else dtype) not in ops.DTYPES:
            raise TypeError(f"dtype={dtype!r}: must be one of {', '.join(map(str, ops.DTYPES))}")
        if tuning is not None and not isinstance(tuning, Tuning):
            raise TypeError(f"tuning={tuning!r}: must be a Tuning")
        self.config = config
        self.tuning = Tuning() if tuning is None else tuning
        self.recipe = Recipe(precision, quantized_weight_gradients)
        self.group = _Group.of(group)
        kind = torch.get_default_device().type if device is None else torch.device(device).type
        if kind == "cpu":
            _ = self.fabric  # made here, where all ranks are sure to come
            if self._draws_weights:
                self.group.compare_generators()
        experts = local_experts(config.num_experts, self.group.size, self.group.rank)
        mesh = self.group.mesh
        if mesh is None and isinstance(self.group.given, dist.ProcessGroup):
            gpu = torch.cuda.is_available() and dist.get_backend(self.group.given) != "gloo"  # where a meta layer will go
            mesh = DeviceMesh.from_group(self.group.given, ("cuda" if gpu else "cpu") if kind == "meta" else kind)

        def shard(rows: int, columns: int) -> nn.Parameter:
            local = torch.empty(len(experts), rows, columns, dtype=dtype, device=device)
            if mesh is None:
                return nn.Parameter(local)
            shape, stride = (config.num_experts, rows, columns), (rows * columns, columns, 1)
            return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride))

        # Its first weights come from reset_parameters, as all others do: these are thrown away.
        self.router = Router(config, dtype=dtype, device=device, generator=torch.Generator("cpu"))
        self.gate_EIH = shard(config.intermediate_size, config.hidden_size)
        self.up_EIH = shard(config.intermediate_size, config.hidden_size)
        self.down_EHI = shard(config.hidden_size, config.intermediate_size)
        self.shared = SharedExperts(config, dtype=dtype, device=device) if config.num_shared_experts else None
        self.register_buffer("tokens_per_expert", torch.zeros(config.num_experts, dtype=torch.int64, device=device), persistent=False)
        self._loss: Tensor | None = None
        self._loss_has_graph = True
        self._recomputed_loss: Tensor | None = None
        self._keep_recomputed = False
        self._uncounted = False
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The router's own start; normal weights of deviation 1 / sqrt(fan-in) for all experts, from torch's default generator.

        Call it before the layer is wrapped, by `fully_shard` for instance.
        """
        generator = None if self.router.weight.is_meta else self.group.generator()
        self.router.reset_parameters(generator)
        self.tokens_per_expert.zero_()
        seed = int(torch.randint(2**40, (), device="cpu", generator=generator))
        experts = local_experts(self.config.num_experts, self.group.size, self.group.rank)

        def draw(shape: torch.Size, seed: int) -> Tensor:
            generator = torch.Generator("cpu").manual_seed(seed)
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * shape[-1] ** -0.5

        for parameter in (self.gate_EIH, self.up_EIH, self.down_EHI):
            seed += self.config.num_experts
            local = _local(parameter)
            if local.shape[0] != len(experts):
                raise RuntimeError(f"reset_parameters: {local.shape[0]} of {len(experts)} local experts are left; call it before sharding")
            for index, e in enumerate(experts):
                local[index].copy_(draw(local[index].shape, seed + e))
        for parameter in self.shared.parameters() if self.shared is not None else ():
            seed += self.config.num_experts
            parameter.copy_(draw(parameter.shape, seed))

    @property
    def fabric(self) -> HostFabric:
        """The group's memory on the CPU, shared by all its layers."""
        return self.group.fabric

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] in the experts' dtype (under autocast any of fp32, bf16 and fp16, or fp64 for fp64 experts) -> the same shape.

        Where the balance loss is on, the last dimension but one counts the tokens of a sequence. Raises as `moe`.
        """
        if torch.compiler.is_compiling():
            routed_x, routing, shared, scale = self._prepare(x)
        else:
            try:
                routed_x, routing, shared, scale = self._prepare(x)
            except Exception as error:
                self._refuse(error)
        shared_experts = self.shared if x.is_cuda else None  # there they are computed inside the kernel
        out = self._run(routed_x, routing.ids_TK, routing.weights_TK, shared, shared_experts, scale)
        if self.training and self.config.balance_loss_weight > 0:
            tokens = x.shape[-2] if x.dim() > 1 else 1
            self._keep_loss(self.config.balance_loss_weight * balance_loss(routing.scores_TE, routing.ids_TK, self.config, tokens))
        return _unflat(out, x.shape)

    @property
    def balance_loss(self) -> Tensor | None:
        """The sequence-wise balance loss of the last training forward times its weight, to be added to the loss; None where it is off.

        Where that forward ran under `no_grad`, so did the loss: it is a value as long as gradients are off, and None when they are on, so
        that nobody adds a constant in place of it. The first pass of reentrant checkpointing is such a forward: return the loss from the
        checkpointed function together with the output. The one returned has a gradient, and stands here from then on.
        """
        if self._recomputed_loss is not None and _in_backward():
            return self._recomputed_loss
        if self._loss is None or self._loss_has_graph or self._loss.requires_grad or not torch.is_grad_enabled():
            return self._loss
        return None

    def _keep_loss(self, loss: Tensor) -> None:
        """A recompute computes what the forward did, and leaves the step's loss alone.

        But that of reentrant checkpointing returns its own, which has the graph. As another checkpointed call may come between the two,
        a recompute's loss is kept for its reader from the first forward under no_grad on, and lives until the next forward.
        """
        if _in_backward():
            self._recomputed_loss = loss if self._keep_recomputed else None
            return
        self._loss, self._loss_has_graph, self._recomputed_loss = loss, torch.is_grad_enabled(), None
        if not self._loss_has_graph:
            self._keep_recomputed = True

    def _prepare(self, x: Tensor) -> tuple[Tensor, Routing, Tensor | None, Tensor | None]:
        """What needs no other rank: x [T, H] for the routed experts, the routing, on the CPU the shared experts' output, on a GPU only the
        scale of it."""
        self._check(x)
        separate = self.shared is not None and not x.is_cuda
        gated = self.shared is not None and self.shared.output_gate_H is not None
        router_x, routed_x, *others = _FanOut.apply(x.reshape(-1, x.shape[-1]), 2 + separate + gated)
        shared = scale = None
        if self.shared is not None:
            gate_x = others[-1] if gated else None
            if separate:
                shared = self.shared(others[0], gate_x)
            elif gate_x is not None:
                scale = self.shared.scale(gate_x)
        return routed_x, self.router(router_x), shared, scale

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x={x!r}: must be a tensor")
        _check_no_transform()
        weight = self.router.weight
        if x.dim() == 0 or x.shape[-1] != self.config.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}: must be [..., H] with H=hidden_size={self.config.hidden_size}")
        self._check_loaded()
        if x.device != weight.device:
            raise ValueError(f"x is on {x.device}: must be on the device of the parameters, {weight.device}")
        self._check_dtypes(x)

    def _check_loaded(self) -> None:
        if self.gate_EIH.is_meta or self.router.weight.is_meta:
            raise ValueError("the layer is on meta: load its weights first (to_empty, load_state_dict(assign=True))")

    def _check_dtypes(self, x: Tensor) -> None:
        """x and the products' weights have one dtype (as autocast makes it); the router's and the output gate's are widened as x is."""
        device, experts, shared = x.device.type, self.gate_EIH.dtype, self.shared
        dtype = _computed(x.dtype, device)
        if dtype not in ops.DTYPES:
            raise TypeError(f"x has dtype {x.dtype}: must be one of {', '.join(map(str, ops.DTYPES))}")
        if dtype != _computed(experts, device):
            rule = "fp64 goes with fp64 alone" if torch.is_autocast_enabled(device) else "or autocast must be on"
            raise TypeError(f"x has dtype {x.dtype}: must be that of the experts, {experts} ({rule})")
        matrices = {} if shared is None else {"gate_SH": shared.gate_SH, "up_SH": shared.up_SH, "down_HS": shared.down_HS}
        for name, matrix in matrices.items():
            if _computed(matrix.dtype, device) != dtype:
                raise TypeError(f"shared.{name} has dtype {matrix.dtype}: must be that of the experts, {experts}")
        allowed = [d for d in ops.DTYPES if d != torch.float64 or x.dtype == torch.float64]
        widened = {"router.weight": self.router.weight, "shared.output_gate_H": None if shared is None else shared.output_gate_H}
        for name, weight in widened.items():
            if weight is not None and weight.dtype not in allowed:
                raise TypeError(f"{name} has dtype {weight.dtype}: must be one of {', '.join(map(str, allowed))} for {x.dtype} x")

    def routed(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, shared: Tensor | None = None) -> Tensor:
        """Dispatch, experts and combine for given choices; see `moe`."""
        return self._run(x_TH, ids_TK, weights_TK, shared, None, None)

    def _run(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, shared: Tensor | None, shared_experts: SharedExperts | None,
        scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        try:
            _check_tensors(x_TH=x_TH, ids_TK=ids_TK, weights_TK=weights_TK, shared=shared)
            self._check_loaded()
            inputs, main_grads = _inputs(x_TH, ids_TK, weights_TK, self.gate_EIH, self.up_EIH, self.down_EHI)
        except Exception as error:
            self._refuse(error)
        arguments = (inputs, shared, main_grads, self.config.num_experts, self.config.clamp, self.recipe, self.group, self.tuning)
        on_gpu = self.router.weight.is_cuda  # x anywhere else is refused in either
        out, counts_E = _routed_gpu(*arguments, shared_experts, scale) if on_gpu else _routed_cpu(*arguments)
        if self._counts_now():
            self.tokens_per_expert.copy_(counts_E)
        return out

    def _refuse(self, error: Exception) -> NoReturn:
        """Raise it, whatever it is; on the CPU the other ranks hear of it."""
        weight, gate = self.router.weight, self.gate_EIH
        for_gpu = weight.is_meta and isinstance(gate, DTensor) and gate.device_mesh.device_type != "cpu"
        if weight.is_cuda or for_gpu:
            raise error
        self.group.refuse(error, self.tuning)

    def update_bias(self, rate: float, tokens_per_expert: Tensor | None = None) -> None:
        """Loss-free balancing: raise the selection bias of experts below the mean load by rate and lower that of those above.

        tokens_per_expert: int [E]; default: the last training forward's. With several forwards per step, or several groups, pass the sum.

        Raises:
            ValueError: the config has no selection bias.
        """
        self.router.update_bias(self.tokens_per_expert if tokens_per_expert is None else tokens_per_expert, rate)

    def _counts_now(self) -> bool:
        """Whether this forward is a training step's own: not eval, not no_grad, not a recompute of activation checkpointing.

        Reentrant checkpointing runs the step's forward under no_grad and its recompute with gradients: there the recompute counts.
        """
        if not self.training:
            return False
        if torch.compiler.is_compiling():
            return torch.is_grad_enabled()
        if not torch.is_grad_enabled():
            self._uncounted = self._uncounted or not _in_backward()
            return False
        counts = not _in_backward() or self._uncounted
        self._uncounted = False
        return counts

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the balance loss, which belongs to a graph."""
        return {**self.__dict__, "_loss": None, "_recomputed_loss": None}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Let the counts, which no state dict has, follow parameters that `assign=True` takes from the meta device."""
        super()._load_from_state_dict(*args, **kwargs)
        if self.tokens_per_expert.is_meta and not self.gate_EIH.is_meta:
            self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert, device=self.gate_EIH.device)

    def extra_repr(self) -> str:
        c = self.config
        sizes = f"H={c.hidden_size}, I={c.intermediate_size}, E={c.num_experts}, K={c.top_k}, score={c.score}, ranks={self.group.size}"
        return sizes if self.recipe == UNQUANTIZED else f"{sizes}, precision={self.recipe.precision}"
