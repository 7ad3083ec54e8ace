"""The low-level API on the GPU: workspace, schedule, forward, backward. Every call is launches only; nothing is read back to the host.

    workspace = get_workspace(config, group, device=device, num_local_tokens=T, hidden_size=H, topk=K)
    schedule = build_schedule(workspace, config, top_experts, num_local_experts=L)
    output, context = forward(config, workspace, schedule, x, router_weights, *shared, *routed)
    gradients = backward(config, workspace, schedule, context, grad_output, x, router_weights, *shared, *routed)

Any group size, any number of tokens per rank (zero and unequal counts too), any H and I that are multiples of 16, no shared expert or one
of any width, ids of -1 for masked slots, and no capacity that could overflow. Nothing here is recorded by autograd: call it from a
`torch.autograd.Function`, or use `mok.MoE`. Triton is imported by the first call, not by this module.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, R ranks,
S width of the shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.config import TILE_M

if TYPE_CHECKING:
    from mok.kernels.launch import Workspace

MAX_EXPERTS = 4096


@dataclass(frozen=True)
class MoKConfig:
    """How the layer is computed. No field changes a bit of a result.

    minibatch_size: rows made ready together, at most; a multiple of 128.
    macrobatch_size: rows of the ring; a multiple of minibatch_size. It bounds memory, never correctness.
    num_sms: programs of the kernel; 0 means one per multiprocessor. What is left serves other kernels.
    saved_rows: rows that keep gate and up for the backward; None means macrobatch_size, or all rows if they are fewer.
    timeout_s: how long a rank waits for another.
    fwd_num_comm_sms, bwd_num_comm_sms, schedule_capacity_multiplier, all_gather_top_experts_chunk_bytes: checked and otherwise not needed:
        communication and products share one list of tasks, and tables have the size of the worst case.
    """

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048
    num_sms: int = 0
    saved_rows: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms", "minibatch_size", "macrobatch_size", "all_gather_top_experts_chunk_bytes"):
            _check_int(name, getattr(self, name), 1)
        _check_int("num_sms", self.num_sms, 0)
        if self.saved_rows is not None:
            _check_int("saved_rows", self.saved_rows, 0)
        if self.minibatch_size % TILE_M:
            raise ValueError(f"minibatch_size={self.minibatch_size}: must be a multiple of {TILE_M}")
        if self.macrobatch_size % self.minibatch_size:
            raise ValueError(f"macrobatch_size={self.macrobatch_size}: must be a multiple of minibatch_size={self.minibatch_size}")
        for name in ("schedule_capacity_multiplier", "timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name}={value!r}: must be a number, not {type(value).__name__}")
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value!r}: must be finite and above 0")


@dataclass(eq=False)
class MoKWorkspace:
    """One rank's memory for layers of one H and K, shared by all layers of that shape; one call at a time."""

    inner: Workspace
    group: dist.ProcessGroup | None
    ep_rank: int
    ep_size: int
    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int

    def check(self) -> None:
        """Raise what ended an earlier call on this rank or a peer. Surely complete after `torch.cuda.synchronize()`."""
        self.inner.check()


@dataclass(frozen=True, eq=False)
class MoKSchedule:
    """Where each row of this rank comes from.

    peer_rank, peer_token_idx: int32, of each row the source's rank (-1: padding) and its slot, token * K + k. Tables of the worst-case
        size; only the first num_tokens rows are written.
    num_tokens, tokens_per_expert: int32 [1] and [L], rows of this rank, with padding.
    routes_per_expert: int64 [E], the whole group's routes to each expert, as load balancing needs them.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor
    routes_per_expert: Tensor
    rows: list[Tensor] = field(repr=False)
    top_experts: Tensor = field(repr=False)
    num_experts: int
    num_local_experts: int
    ep_size: int


@dataclass(frozen=True, eq=False)
class MoKForwardContext:
    """What a backward needs again; it is only read, so any number of backwards may follow.

    x and h of the routed rows are not kept: they are pulled and computed anew, as are gate and up of the rows beyond C.

    gate_routed, up_routed: bf16 [C, I]. gate_shared, up_shared: bf16 [T, S], None without shared experts. The others are always None.
    """

    x_routed: Tensor | None
    gate_shared: Tensor | None
    gate_routed: Tensor
    up_shared: Tensor | None
    up_routed: Tensor
    hidden_shared: Tensor | None
    hidden_routed: Tensor | None
    saved_rows: int


Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

_workspaces: dict[tuple[Any, ...], MoKWorkspace] = {}


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r}: must be an int, not {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name}={value!r}: must be at least {minimum}")


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: must be a {kind.__name__}, not {type(value).__name__}")


def _check_tensor(
    name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, aligned: bool = False,
    any_strides: bool = False,
) -> None:  # fmt: skip
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}.dtype={tensor.dtype}: must be {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}.shape={tuple(tensor.shape)}: must be {shape}")
    if tensor.device != device:
        raise ValueError(f"{name}.device={tensor.device}: must be {device}")
    if not any_strides and not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, its strides are {tensor.stride()}")
    if aligned and not torch.compiler.is_compiling() and tensor.data_ptr() % 16:
        raise ValueError(f"{name}: must begin at a multiple of 16 bytes")


def _check_matrices(prefix: str, shape: tuple[int, ...], device: torch.device, matrices: Sequence[object]) -> None:
    """gate, up and perhaps down; shape is that of the gate, [..., width, H]."""
    *leading, width, hidden = shape
    if width % 16:
        raise ValueError(f"{prefix}_gate.shape[{len(leading)}]={width}: must be a multiple of 16")
    for name, matrix in zip(("gate", "up", "down"), matrices, strict=False):
        wanted = (*leading, hidden, width) if name == "down" else (*leading, width, hidden)
        _check_tensor(f"{prefix}_{name}", matrix, wanted, torch.bfloat16, device, True)


def _check_layer(
    config: object, workspace: object, schedule: object, x: object, shared: Sequence[object], routed: Sequence[object],
    swiglu_limit: float | None,
) -> None:  # fmt: skip
    """What forward, backward and recompute have in common; shared and routed are (gate, up) or (gate, up, down)."""
    _check_kind("config", config, MoKConfig)
    _check_kind("workspace", workspace, MoKWorkspace)
    _check_kind("schedule", schedule, MoKSchedule)
    assert isinstance(workspace, MoKWorkspace) and isinstance(schedule, MoKSchedule)
    tokens, topk = schedule.top_experts.shape
    hidden, device = workspace.hidden_size, workspace.device
    if topk != workspace.topk or tokens > workspace.num_local_tokens or schedule.ep_size != workspace.ep_size:
        raise ValueError(
            f"schedule: {tokens} tokens, topk={topk}, {schedule.ep_size} ranks; the workspace is for {workspace.num_local_tokens} tokens "
            f"at most, topk={workspace.topk}, {workspace.ep_size} ranks"
        )
    _check_tensor("x", x, (tokens, hidden), torch.bfloat16, device, True)
    gate = routed[0]
    if not isinstance(gate, Tensor) or gate.dim() != 3:
        raise ValueError("routed_gate: must be a tensor of three dimensions [L, I, H]")
    _check_matrices("routed", (schedule.num_local_experts, gate.shape[1], hidden), device, routed)
    names = ", ".join(("shared_gate", "shared_up", "shared_down")[: len(shared)])
    if any(matrix is None for matrix in shared) != all(matrix is None for matrix in shared):
        raise ValueError(f"{names}: must all be given or all be None")
    if shared[0] is not None:
        if not isinstance(shared[0], Tensor) or shared[0].dim() != 2:
            raise ValueError("shared_gate: must be a tensor of two dimensions [S, H]")
        _check_matrices("shared", (shared[0].shape[0], hidden), device, shared)
    if swiglu_limit is not None:
        if isinstance(swiglu_limit, bool) or not isinstance(swiglu_limit, numbers.Real):
            raise TypeError(f"swiglu_limit={swiglu_limit!r}: must be None or a number, not {type(swiglu_limit).__name__}")
        if not (math.isfinite(swiglu_limit) and swiglu_limit >= 0):
            raise ValueError(f"swiglu_limit={swiglu_limit!r}: must be None or finite and at least 0")


def _check_context(context: object, tokens: int, width: int, shared_width: int | None, device: torch.device) -> None:
    """The context is of a forward with these sizes."""
    _check_kind("context", context, MoKForwardContext)
    assert isinstance(context, MoKForwardContext)
    rows = (context.saved_rows, width)
    for name, routed, shared in (("gate", context.gate_routed, context.gate_shared), ("up", context.up_routed, context.up_shared)):
        _check_tensor(f"context.{name}_routed", routed, rows, torch.bfloat16, device, True)
        if shared_width is not None:
            _check_tensor(f"context.{name}_shared", shared, (tokens, shared_width), torch.bfloat16, device, True)
        elif shared is not None:
            raise ValueError(f"context.{name}_shared: must be None where no shared experts are given")


def _device(device: torch.device | str | int | None) -> torch.device:
    where = torch.device("cuda") if device is None else torch.device(device)
    if where.type != "cuda":
        raise ValueError(f"device={where}: must be a CUDA device; on a CPU use mok.MoE")
    return torch.device("cuda", torch.cuda.current_device()) if where.index is None else where


def create_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
) -> MoKWorkspace:
    """A new workspace; collective over the group (None: this rank alone). Ranks may have different num_local_tokens, 0 included.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule; the same on every rank where ranks disagree on H or K.
    """
    from mok.kernels import ops

    _check_kind("config", config, MoKConfig)
    _check_int("num_local_tokens", num_local_tokens, 0)
    _check_int("topk", topk, 1)
    _check_int("hidden_size", hidden_size, 16)
    if hidden_size % 16:
        raise ValueError(f"hidden_size={hidden_size}: must be a multiple of 16")
    where = _device(device)
    inner = ops.make_workspace(group, where, num_local_tokens, hidden_size, topk, MAX_EXPERTS, config.timeout_s, config.num_sms)
    return MoKWorkspace(inner, group, inner.memory.rank, inner.memory.size, where, num_local_tokens, hidden_size, topk)


def get_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
) -> MoKWorkspace:
    """`create_workspace`, once for each (group, device, T, H, K)."""
    name = None if group is None else group.group_name
    key = (name, _device(device), num_local_tokens, hidden_size, topk)
    found = _workspaces.get(key)
    if found is None or found.group is not group:  # a destroyed group's name is given again
        _workspaces[key] = create_workspace(
            config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk
        )  # fmt: skip
    return _workspaces[key]


def clear_workspace_cache() -> None:
    """Let go of all cached workspaces, once the device has finished with them."""
    for workspace in _workspaces.values():
        torch.cuda.synchronize(workspace.device)
    _workspaces.clear()


def build_schedule(
    workspace: MoKWorkspace,
    config: MoKConfig,
    top_experts: Tensor,
    num_local_experts: int | None = None,
    *,
    num_experts: int | None = None,
) -> MoKSchedule:
    """The rows of this rank, from every rank's top_experts (int64 [T, K], -1 masks a slot); collective.

    num_local_experts is L where every rank has as many; num_experts gives E where the group's size does not divide it: rank r then owns
    ceil(E / R) experts from r * ceil(E / R) on, the last ranks fewer.
    """
    from mok.kernels import ops
    from mok.schedule import local_experts

    _check_kind("workspace", workspace, MoKWorkspace)
    _check_kind("config", config, MoKConfig)
    if (num_local_experts is None) == (num_experts is None):
        raise ValueError(f"num_local_experts={num_local_experts}, num_experts={num_experts}: exactly one must be given")
    if num_experts is None:
        _check_int("num_local_experts", num_local_experts, 1)
        assert num_local_experts is not None
        num_experts = num_local_experts * workspace.ep_size
    _check_int("num_experts", num_experts, 1)
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"num_experts={num_experts}: must be at most {MAX_EXPERTS}")
    if not isinstance(top_experts, Tensor):
        raise TypeError(f"top_experts: must be a tensor, not {type(top_experts).__name__}")
    tokens = top_experts.shape[0] if top_experts.dim() == 2 else workspace.num_local_tokens
    if tokens > workspace.num_local_tokens:
        raise ValueError(f"top_experts.shape={tuple(top_experts.shape)}: the workspace is for at most {workspace.num_local_tokens} tokens")
    _check_tensor("top_experts", top_experts, (tokens, workspace.topk), torch.int64, workspace.device)
    with torch.no_grad():
        *rows, routes_per_expert = ops.gpu_schedule(top_experts, workspace.inner.number, num_experts)
    local = len(local_experts(num_experts, workspace.ep_size, workspace.ep_rank))
    return MoKSchedule(
        rows[0], rows[1], rows[2], rows[3], routes_per_expert, rows, top_experts, num_experts, local, workspace.ep_size
    )  # fmt: skip


def _plan(config: MoKConfig) -> list[int]:
    from mok.kernels import ops

    return ops.plan_of(config.num_sms, config.minibatch_size, config.macrobatch_size)


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    routed_gate: Tensor,
    routed_up: Tensor,
    routed_down: Tensor,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    """output bf16 [T, H] = shared(x) + sum_k router_weights[:, k] * expert_k(x), and what a backward needs; collective.

    x bf16 [T, H]; router_weights fp32 [T, K]; shared gate and up [S, H], down [H, S], or three times None; routed gate and up [L, I, H],
    down [L, H, I]. swiglu_limit clips the gate from above and up on both sides, in shared and routed experts.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule.
        FabricError: an earlier call was ended because some rank waited in vain; the report says rank, task, expected and found.
    """
    from mok.kernels import ops

    shared, routed = (shared_gate, shared_up, shared_down), (routed_gate, routed_up, routed_down)
    _check_layer(config, workspace, schedule, x, shared, routed, swiglu_limit)
    _check_tensor("router_weights", router_weights, tuple(schedule.top_experts.shape), torch.float32, workspace.device)
    all_rows = schedule.peer_rank.numel()
    saved_rows = min(all_rows, config.macrobatch_size if config.saved_rows is None else config.saved_rows)
    limit = None if swiglu_limit is None else float(swiglu_limit)
    with torch.no_grad():
        out, gate, up, shared_gates, shared_ups, _ = ops.gpu_forward(
            x, schedule.top_experts, router_weights, *routed, *shared, None, None, [], [], schedule.rows,
            workspace.inner.number, schedule.num_experts, limit, limit, saved_rows, _plan(config),
        )  # fmt: skip
    kept = (None, None) if shared_gate is None else (shared_gates, shared_ups)
    return out, MoKForwardContext(None, kept[0], gate, kept[1], up, None, None, saved_rows)


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    routed_gate: Tensor,
    routed_up: Tensor,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """The context of a `forward` whose own was thrown away, for activation checkpointing by hand; not collective.

    A backward computes gate and up of routed rows that were not saved by itself, so none are made here (C = 0) and no token is moved. The
    shared experts' gate and up are, by the forward's own kernel with its tasks for them alone, so that they have its bits: every gradient
    has the bits that it has with the context of `forward`.

    Args and errors: as `forward`.
    """
    from mok.kernels import ops

    shared, routed = (shared_gate, shared_up), (routed_gate, routed_up)
    _check_layer(config, workspace, schedule, x, shared, routed, swiglu_limit)
    limit = None if swiglu_limit is None else float(swiglu_limit)
    gate, up = (x.new_empty(0, routed_gate.shape[1]) for _ in range(2))
    kept: tuple[Tensor | None, Tensor | None] = (None, None)
    if shared_gate is not None and shared_up is not None:
        with torch.no_grad():
            kept = ops.gpu_shared_gate_up(
                x, *routed, shared_gate, shared_up, schedule.rows, workspace.inner.number, limit, limit, _plan(config)
            )  # fmt: skip
    return MoKForwardContext(None, kept[0], gate, kept[1], up, None, None, 0)


def backward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    context: MoKForwardContext,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    routed_gate: Tensor,
    routed_up: Tensor,
    routed_down: Tensor,
    swiglu_limit: float | None = None,
    *,
    main_grads: Sequence[Tensor] | None = None,
) -> Gradients:
    """The gradients of `forward`, whose arguments these are again; collective.

    grad_output: bf16 [T, H], any strides, those of an expanded tensor included.
    main_grads: fp32 accumulators for the gradients of routed gate, up and down and, with shared experts, of shared gate, up and down (3 or
        6 tensors, shaped like the weights): these gradients are added there, unrounded, and are None in the result.

    Returns:
        d_x bf16 [T, H]; d_router_weights fp32 [T, K], zero at masked slots; d_routed_gate, d_routed_up, d_routed_down; d_shared_gate,
        d_shared_up, d_shared_down, bf16 like the weights, or three times None without shared experts. The gradients of routed experts are
        sums over the tokens of the whole group, those of shared experts over this rank's.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule.
        FabricError: an earlier call was ended because some rank waited in vain; the report says rank, task, expected and found.
    """
    from mok.kernels import ops

    shared, routed = (shared_gate, shared_up, shared_down), (routed_gate, routed_up, routed_down)
    _check_layer(config, workspace, schedule, x, shared, routed, swiglu_limit)
    tokens, device = x.shape[0], workspace.device
    _check_tensor("router_weights", router_weights, tuple(schedule.top_experts.shape), torch.float32, device)
    _check_tensor("grad_output", grad_output, tuple(x.shape), torch.bfloat16, device, any_strides=True)
    _check_context(context, tokens, routed_gate.shape[1], None if shared_gate is None else shared_gate.shape[0], device)
    weights = [*routed, *(matrix for matrix in shared if matrix is not None)]
    mains = [] if main_grads is None else list(main_grads)
    if main_grads is not None and len(mains) != len(weights):
        raise ValueError(f"main_grads: {len(mains)} tensors, must be {len(weights)}, one for each weight")
    for i, (main, weight) in enumerate(zip(mains, weights, strict=False)):
        _check_tensor(f"main_grads[{i}]", main, tuple(weight.shape), torch.float32, device)
    limit = None if swiglu_limit is None else float(swiglu_limit)
    gates = context.gate_shared, context.up_shared
    nothing = x.new_empty(0)
    kept = [context.gate_routed, context.up_routed, *(nothing if kept is None else kept for kept in gates), nothing]
    has_shared = shared_gate is not None
    with torch.no_grad():
        d_x, d_weights, *of_weights, _ = ops.gpu_backward(
            grad_output, x, schedule.top_experts, router_weights, *routed, *shared, None, mains[:3], mains[3:], schedule.rows, kept,
            [True, True, True, has_shared, False], workspace.inner.number, schedule.num_experts, limit, limit, _plan(config),
        )  # fmt: skip
    d: list[Tensor | None] = [None] * 6 if mains else [*of_weights[:3], *(of_weights[3:] if has_shared else (None,) * 3)]
    return d_x, d_weights, d[0], d[1], d[2], d[3], d[4], d[5]
