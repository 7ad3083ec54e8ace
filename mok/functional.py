"""The low-level API on the GPU: workspace, build_schedule, forward. Every call is launches only; nothing is read back to the host.

    workspace = get_workspace(config, group, device=device, num_local_tokens=T, hidden_size=H, topk=K)
    schedule = build_schedule(workspace, config, top_experts, num_local_experts=L)
    output, context = forward(config, workspace, schedule, x, router_weights, *shared, *routed)

Any group size, any number of tokens per rank (zero and unequal counts too), any H and I that are multiples of 16, no shared expert or one
of any width, ids of -1 for masked slots, and no capacity that could overflow. Triton is imported by the first call, not by this module.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, R ranks,
S width of the shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.config import TILE_M

if TYPE_CHECKING:
    from mok.kernels.launch import Workspace
    from mok.kernels.schedule import DeviceSchedule

MAX_EXPERTS = 4096
BEST_MINIBATCH_TILES = 16  # measured: larger ones lose the L2 cache


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
    timeout_s: float = 120.0

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
    number: int

    def check(self) -> None:
        """Raise what ended an earlier call on this rank or a peer. Surely complete after `torch.cuda.synchronize()`."""
        self.inner.check()


@dataclass(frozen=True, eq=False)
class MoKSchedule:
    """Where each row of this rank comes from. Tables of the worst-case size; only the first num_tokens rows are written."""

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor
    rows: DeviceSchedule = field(repr=False)
    top_experts: Tensor = field(repr=False)
    num_experts: int = 0
    num_local_experts: int = 0


@dataclass(frozen=True, eq=False)
class MoKForwardContext:
    """What a backward needs again. x and h of the routed rows are not kept: they are pulled and computed anew."""

    x_routed: Tensor | None
    gate_shared: Tensor | None
    gate_routed: Tensor
    up_shared: Tensor | None
    up_routed: Tensor
    hidden_shared: Tensor | None
    hidden_routed: Tensor | None
    saved_rows: int


_workspaces: dict[tuple[Any, ...], MoKWorkspace] = {}


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r}: must be an int, not {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name}={value!r}: must be at least {minimum}")


def _check_tensor(
    name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, aligned: bool = False
) -> None:  # fmt: skip
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}.dtype={tensor.dtype}: must be {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}.shape={tuple(tensor.shape)}: must be {shape}")
    if tensor.device != device:
        raise ValueError(f"{name}.device={tensor.device}: must be {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, its strides are {tensor.stride()}")
    if aligned and not torch.compiler.is_compiling() and tensor.data_ptr() % 16:
        raise ValueError(f"{name}: must begin at a multiple of 16 bytes")


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
    from mok.kernels import memory, ops
    from mok.kernels.launch import Workspace

    if not isinstance(config, MoKConfig):
        raise TypeError(f"config: must be a MoKConfig, not {type(config).__name__}")
    _check_int("num_local_tokens", num_local_tokens, 0)
    _check_int("topk", topk, 1)
    _check_int("hidden_size", hidden_size, 16)
    if hidden_size % 16:
        raise ValueError(f"hidden_size={hidden_size}: must be a multiple of 16")
    where = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    if where.type != "cuda":
        raise ValueError(f"device={where}: must be a CUDA device; on a CPU use mok.MoE")
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    size = 1 if group is None else dist.get_world_size(group)
    most = num_local_tokens
    if size > 1:
        shapes: list[Any] = [None] * size
        dist.all_gather_object(shapes, (num_local_tokens, hidden_size, topk), group=group)
        for name, position, value in (("hidden_size", 1, hidden_size), ("topk", 2, topk)):
            values = [shape[position] for shape in shapes]
            if len(set(values)) > 1:
                raise ValueError(f"{name}={value}: must be the same on every rank of the group, which have {values}")
        most = max(shape[0] for shape in shapes)
    layout = memory.regions(most, hidden_size, MAX_EXPERTS, topk, size)
    with torch.cuda.device(where):
        if size > 1:
            assert group is not None
            view = memory.symmetric_memory(layout, group, where)
        else:
            view = memory.virtual_memory(layout, 1, where)[0]
        inner = Workspace(view, most, hidden_size, topk, where, config.timeout_s, config.num_sms)
    return MoKWorkspace(inner, group, view.rank, size, where, num_local_tokens, hidden_size, topk, ops.number_of(inner))


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
    where = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    key = (name, str(where), num_local_tokens, hidden_size, topk)
    if key not in _workspaces:
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
    from mok.kernels.schedule import DeviceSchedule
    from mok.schedule import local_experts

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
    rows = DeviceSchedule(*ops.gpu_schedule(top_experts, workspace.number, num_experts))
    local = len(local_experts(num_experts, workspace.ep_size, workspace.ep_rank))
    return MoKSchedule(
        rows.peer_rank, rows.peer_token_idx, rows.num_tokens, rows.tokens_per_expert, rows, top_experts, num_experts, local
    )  # fmt: skip


def _check_width(name: str, value: int) -> None:
    if value % 16:
        raise ValueError(f"{name}={value}: must be a multiple of 16")


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

    if not isinstance(schedule, MoKSchedule):
        raise TypeError(f"schedule: must be a MoKSchedule, not {type(schedule).__name__}")
    tokens, hidden, device, bf16 = schedule.top_experts.shape[0], workspace.hidden_size, workspace.device, torch.bfloat16
    local = schedule.num_local_experts
    if not isinstance(routed_gate, Tensor) or routed_gate.dim() != 3:
        raise ValueError("routed_gate: must be a tensor of three dimensions [L, I, H]")
    width = routed_gate.shape[1]
    _check_width("routed_gate.shape[1]", width)
    _check_tensor("x", x, (tokens, hidden), bf16, device, True)
    _check_tensor("router_weights", router_weights, (tokens, workspace.topk), torch.float32, device)
    _check_tensor("routed_gate", routed_gate, (local, width, hidden), bf16, device, True)
    _check_tensor("routed_up", routed_up, (local, width, hidden), bf16, device, True)
    _check_tensor("routed_down", routed_down, (local, hidden, width), bf16, device, True)
    shared: list[Tensor] = []
    if shared_gate is not None and shared_up is not None and shared_down is not None:
        size = shared_gate.shape[0]
        _check_width("shared_gate.shape[0]", size)
        _check_tensor("shared_gate", shared_gate, (size, hidden), bf16, device, True)
        _check_tensor("shared_up", shared_up, (size, hidden), bf16, device, True)
        _check_tensor("shared_down", shared_down, (hidden, size), bf16, device, True)
        shared = [shared_gate, shared_up, shared_down]
    elif not (shared_gate is None and shared_up is None and shared_down is None):
        raise ValueError("shared_gate, shared_up, shared_down: must all be given or all be None")
    if swiglu_limit is not None and not (math.isfinite(swiglu_limit) and swiglu_limit >= 0):
        raise ValueError(f"swiglu_limit={swiglu_limit!r}: must be None or finite and at least 0")
    all_rows = schedule.peer_rank.numel()
    saved_rows = min(all_rows, config.macrobatch_size if config.saved_rows is None else config.saved_rows)
    limit = None if swiglu_limit is None else float(swiglu_limit)
    plan = [config.num_sms, min(config.minibatch_size // TILE_M, BEST_MINIBATCH_TILES), config.macrobatch_size // TILE_M]
    rows = schedule.rows
    fields = [rows.peer_rank, rows.peer_token_idx, rows.num_tokens, rows.tokens_per_expert, rows.routes_per_expert, rows.tile_expert]
    out, gate, up, shared_gates, shared_ups = ops.gpu_forward(
        workspace.number, schedule.num_experts, fields, schedule.top_experts, router_weights, x,
        [routed_gate, routed_up, routed_down], shared, limit, limit, None, saved_rows, True, plan,
    )  # fmt: skip
    kept = (shared_gates, shared_ups) if shared else (None, None)
    return out, MoKForwardContext(None, kept[0], gate, kept[1], up, None, None, saved_rows)
