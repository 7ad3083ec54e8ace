"""The low-level API: workspace, schedule, forward, backward. On a GPU every call is launches only; nothing is read back to the host.

    workspace = get_workspace(config, group, device=device, num_local_tokens=T, hidden_size=H, topk=K)
    schedule = build_schedule(workspace, config, top_experts, num_local_experts=L)
    output, context = forward(config, workspace, schedule, x, router_weights, *shared, *routed)
    gradients = backward(config, workspace, schedule, context, grad_output, x, router_weights, *shared, *routed)

Any group size, any number of tokens per rank (zero and unequal counts too), any H and I that are multiples of 16, no shared expert or one
of any width, ids of -1 for masked slots, and no capacity that could overflow. Nothing here is recorded by autograd: call it from a
`torch.autograd.Function`, or use `mok.MoE`. Triton is imported by the first call, not by this module. On a CPU (device="cpu") the same
calls run in the executor, and not under torch.compile(fullgraph=True).

build_schedule, forward and backward are collective. On a CPU bad arguments of one rank raise the same error on every rank, before anything
is computed, and the next call works. On a GPU that rank alone raises: its peers wait for it until their time limit or its next call.

Routed weights are bf16 tensors or, all of them, quantized beforehand, as pairs of E4M3 values and their scale; then x, dY, h, d_gate and
d_up are quantized in the same format, as the table of `mok.quantize.Recipe` says:

| | forward, recompute | backward |
|---|---|---|
| MXFP8, gate and up | (values [L, I, H], scale) | (values, scale, values_T [L, H, I], scale_T) |
| MXFP8, down | (values [L, H, I], scale) | (values_T [L, I, H], scale_T) |
| blockwise FP8, each | (values, scale [L, ceil(rows / 128), ceil(columns / 128)]) | the same |

The four are those of `mok.ops.mxfp8_quantize`: a scale of MXFP8, E8M0 codes in uint8 or float8_e8m0fnu, has the layout "tcgen05" or
"plain". One of blockwise FP8 may be fp32, too, and is then made of powers of two: another number makes its block NaN on a GPU and is an
error on the CPU. The pairs are read when a call runs: whoever made them answers for their being up to date.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, R ranks,
S width of the shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from mok.config import TILE_M, plain
from mok.fabric import HostFabric, host_fabric
from mok.quantize import E4M3, WEIGHT_BLOCKS, Precision, WeightFormat, scale_codes, scale_shape

if TYPE_CHECKING:
    from mok.functional_cpu import Layer
    from mok.kernels.launch import Workspace

Group = dist.ProcessGroup | HostFabric | None
"""Virtual ranks (`mok.fabric.virtual_ranks`) run on a CPU."""
Weight = Tensor | Sequence[Tensor]
"""Of routed experts: bf16, or values and scale (and those of the transpose)."""

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
        plain(self)


@dataclass(eq=False)
class MoKWorkspace:
    """One rank's memory for layers of one H and K, of any format, shared by all layers of that shape; one call at a time.

    inner: the memory on a GPU; None on a CPU, where every call brings its own.
    """

    inner: Workspace | None
    group: Group
    ep_rank: int
    ep_size: int
    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int

    def check(self) -> None:
        """Raise what ended an earlier call on this rank or a peer. Surely complete after `torch.cuda.synchronize()`."""
        if self.inner is not None:
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


@dataclass(frozen=True)
class _Routed:
    """Checked weights of routed experts: of gate, up and perhaps down the one tensor, or values and scale by turns, scales as codes."""

    precision: Precision
    matrices: list[list[Tensor]]
    width: int


def _check_routed(routed: Sequence[object], local: int, hidden: int, device: torch.device, backward: bool) -> _Routed:
    """routed: (gate, up) or (gate, up, down), as a forward or as a backward takes them."""
    names = [f"routed_{name}" for name in ("gate", "up", "down")[: len(routed)]]
    pairs = [isinstance(matrix, tuple | list) for matrix in routed]
    if any(pairs) and not all(pairs):
        raise ValueError(f"{', '.join(names)}: must all be tensors, or all be quantized: tuples of values and scale")
    if not any(pairs):
        gate = routed[0]
        if not isinstance(gate, Tensor) or gate.dim() != 3:
            raise ValueError("routed_gate: must be a tensor of three dimensions [L, I, H], or a tuple of values and scale")
        _check_matrices("routed", (local, gate.shape[1], hidden), device, routed)
        return _Routed("bf16", [[matrix] for matrix in routed if isinstance(matrix, Tensor)], gate.shape[1])
    matrices = [list(matrix) for matrix in routed if isinstance(matrix, tuple | list)]
    values, scale = (*matrices[0], None, None)[:2]
    if not isinstance(values, Tensor) or values.dim() != 3 or not isinstance(scale, Tensor):
        raise ValueError("routed_gate: must begin with values, a tensor of three dimensions [L, I, H], and their scale")
    width = values.shape[1]
    if width % 16:
        raise ValueError(f"routed_gate[0].shape[1]={width}: must be a multiple of 16")
    form: WeightFormat = "mxfp8" if scale.dim() == 4 or scale.shape[1:2] == values.shape[1:2] else "fp8"
    both = backward and form == "mxfp8"
    for name, matrix in zip(names, matrices, strict=True):
        shape, transposed = (local, width, hidden), (local, hidden, width)
        if name == "routed_down":
            shape, transposed = transposed, shape
        shapes, parts = [shape], "(values, scale)"
        if both:
            shapes, parts = [shape, transposed], "(values, scale, values_T, scale_T)"
            if name == "routed_down":
                shapes, parts = [transposed], "(values_T, scale_T)"
        if len(matrix) != 2 * len(shapes):
            where = f"{'a backward' if backward else 'a forward'} in {form}"
            raise ValueError(f"{name}: {len(matrix)} tensors, must be {2 * len(shapes)} in {where}: {parts}")
        for i, wanted in enumerate(shapes):
            _check_pair(name, 2 * i, matrix[2 * i], matrix[2 * i + 1], wanted, form, device)
    return _Routed(form, [[scale_codes(t) if i % 2 else t for i, t in enumerate(matrix)] for matrix in matrices], width)


def _check_pair(
    name: str, at: int, values: object, scale: object, shape: tuple[int, ...], form: WeightFormat, device: torch.device
) -> None:
    """The values at `at` of a weight, and the scale behind them."""
    _check_tensor(f"{name}[{at}]", values, shape, E4M3, device, True)
    here = f"{name}[{at + 1}]"
    if not isinstance(scale, Tensor):
        raise TypeError(f"{here}: must be a tensor, the scale of {name}[{at}], not {type(scale).__name__}")
    dtypes = (torch.uint8, torch.float8_e8m0fnu) if form == "mxfp8" else (torch.uint8, torch.float8_e8m0fnu, torch.float32)
    if scale.dtype not in dtypes:
        raise ValueError(f"{here}.dtype={scale.dtype}: must be {' or '.join(map(str, dtypes))} in {form}")
    shapes = {"plain": scale_shape(shape, WEIGHT_BLOCKS[form])}
    if form == "mxfp8":
        shapes["tcgen05"] = (shape[0] * -(-shape[1] // 128), -(-shape[2] // 128), 32, 16)
    if tuple(scale.shape) not in shapes.values():
        wanted = " or ".join(f"{wanted} ({layout})" for layout, wanted in shapes.items())
        raise ValueError(f"{here}.shape={tuple(scale.shape)}: must be {wanted} in {form}, for values {shape}")
    _check_tensor(here, scale, tuple(scale.shape), scale.dtype, device)


def _check_layer(
    config: object, workspace: object, schedule: object, x: object, shared: Sequence[object], routed: Sequence[object],
    swiglu_limit: float | None, backward: bool = False,
) -> _Routed:  # fmt: skip
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
    found = _check_routed(routed, schedule.num_local_experts, hidden, device, backward)
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
    return found


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


def _check_choices(
    workspace: object, config: object, top_experts: object, num_local_experts: int | None, num_experts: int | None
) -> tuple[int, int]:  # fmt: skip
    """E and L."""
    from mok.schedule import local_experts

    _check_kind("workspace", workspace, MoKWorkspace)
    _check_kind("config", config, MoKConfig)
    assert isinstance(workspace, MoKWorkspace)
    if (num_local_experts is None) == (num_experts is None):
        raise ValueError(f"num_local_experts={num_local_experts}, num_experts={num_experts}: exactly one must be given")
    if num_experts is None:
        _check_int("num_local_experts", num_local_experts, 1)
        assert num_local_experts is not None
        num_experts = num_local_experts * workspace.ep_size
    _check_int("num_experts", num_experts, 1)
    num_experts = int(num_experts)
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"num_experts={num_experts}: must be at most {MAX_EXPERTS}")
    if not isinstance(top_experts, Tensor):
        raise TypeError(f"top_experts: must be a tensor, not {type(top_experts).__name__}")
    tokens = top_experts.shape[0] if top_experts.dim() == 2 else workspace.num_local_tokens
    if tokens > workspace.num_local_tokens:
        raise ValueError(f"top_experts.shape={tuple(top_experts.shape)}: the workspace is for at most {workspace.num_local_tokens} tokens")
    _check_tensor("top_experts", top_experts, (tokens, workspace.topk), torch.int64, workspace.device)
    return num_experts, len(local_experts(num_experts, workspace.ep_size, workspace.ep_rank))


def _refuse(operation: str, config: object, workspace: object, error: Exception) -> NoReturn:
    """Raise what is wrong with this rank's arguments; on a CPU on every rank of the group."""
    if isinstance(workspace, MoKWorkspace) and workspace.inner is None and not torch.compiler.is_compiling():
        from mok import functional_cpu

        functional_cpu.refuse(operation, workspace.group, config.timeout_s if isinstance(config, MoKConfig) else MoKConfig.timeout_s, error)
    raise error


def _device(device: torch.device | str | int | None) -> torch.device:
    where = torch.device("cuda") if device is None else torch.device(device)
    if where.type == "cpu":
        return torch.device("cpu")  # that of tensors has no number
    if where.type != "cuda":
        raise ValueError(f"device={where}: must be a CUDA device or the CPU")
    if not torch.cuda.is_available():
        raise ValueError(f"device={device}: PyTorch finds no GPU on this machine; device='cpu' runs the same calls without one")
    return torch.device("cuda", torch.cuda.current_device()) if where.index is None else where


def create_workspace(
    config: MoKConfig,
    group: Group = None,
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
    _check_kind("config", config, MoKConfig)
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives those who are not in it
        raise ValueError(f"group={group!r}: this process is not one of its ranks")
    if group is not None and not isinstance(group, dist.ProcessGroup | HostFabric):
        raise TypeError(f"group: must be a torch.distributed group, a virtual rank or None, not {type(group).__name__}")
    _check_int("num_local_tokens", num_local_tokens, 0)
    _check_int("topk", topk, 1)
    _check_int("hidden_size", hidden_size, 16)
    if hidden_size % 16:
        raise ValueError(f"hidden_size={hidden_size}: must be a multiple of 16")
    where = _device(device)
    if where.type == "cpu":
        fabric = host_fabric(group)
        return MoKWorkspace(None, group, fabric.rank, fabric.size, where, num_local_tokens, hidden_size, topk)
    from mok.kernels import ops

    if isinstance(group, HostFabric):
        raise ValueError("group: virtual ranks run on a CPU; give a torch.distributed group")
    inner = ops.make_workspace(group, where, num_local_tokens, hidden_size, topk, MAX_EXPERTS, config.timeout_s, config.num_sms, None)
    return MoKWorkspace(inner, group, inner.memory.rank, inner.memory.size, where, num_local_tokens, hidden_size, topk)


def get_workspace(
    config: MoKConfig,
    group: Group = None,
    *,
    device: torch.device | str | int | None = None,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
) -> MoKWorkspace:
    """`create_workspace`, once for each (group, device, T, H, K)."""
    name = group.group_name if isinstance(group, dist.ProcessGroup) else group
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
        if workspace.inner is not None:
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
    """The rows of this rank, from every rank's top_experts (int64 [T, K], -1 masks a slot); collective. The schedule keeps
    top_experts, which must stay as it is until the last backward.

    num_local_experts is L where every rank has as many; num_experts gives E where the group's size does not divide it: rank r then owns
    ceil(E / R) experts from r * ceil(E / R) on, the last ranks fewer.
    """
    try:
        num_experts, local = _check_choices(workspace, config, top_experts, num_local_experts, num_experts)
    except Exception as error:
        _refuse("schedule", config, workspace, error)
    if workspace.inner is None:
        from mok import functional_cpu

        made, routes = functional_cpu.build_schedule(workspace.group, top_experts, num_experts, config.timeout_s)
        found = (made.peer_rank, made.peer_token_idx, made.num_tokens, made.tokens_per_expert, routes)
        return MoKSchedule(*found, [], top_experts, num_experts, local, workspace.ep_size)
    from mok.kernels import ops

    with torch.no_grad():
        *rows, routes_per_expert = ops.gpu_schedule(top_experts, workspace.inner.number, num_experts)
    return MoKSchedule(
        rows[0], rows[1], rows[2], rows[3], routes_per_expert, rows, top_experts, num_experts, local, workspace.ep_size
    )  # fmt: skip


def _plan(config: MoKConfig) -> list[int]:
    from mok.kernels import ops

    return ops.plan_of(config.num_sms, config.minibatch_size, config.macrobatch_size)


def _on_cpu(config: MoKConfig, workspace: MoKWorkspace, schedule: MoKSchedule, routed: _Routed, limit: float | None) -> Layer:
    """A layer of the executor."""
    from mok.config import Tuning
    from mok.functional_cpu import Layer

    saved = config.macrobatch_size if config.saved_rows is None else config.saved_rows
    tuning = Tuning(
        minibatch=config.minibatch_size, macrobatch=config.macrobatch_size, saved_rows=saved, timeout_s=float(config.timeout_s)
    )  # fmt: skip
    return Layer(workspace.group, tuning, schedule.top_experts, schedule.num_experts, routed.precision, routed.matrices, limit)


def _three(first: Tensor | None, second: Tensor | None, third: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    return None if first is None or second is None or third is None else (first, second, third)


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    routed_gate: Weight,
    routed_up: Weight,
    routed_down: Weight,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, MoKForwardContext]:
    """output bf16 [T, H] = shared(x) + sum_k router_weights[:, k] * expert_k(x), and what a backward needs; collective.

    x bf16 [T, H]; router_weights fp32 [T, K]; shared gate and up [S, H], down [H, S], or three times None; routed gate and up [L, I, H],
    down [L, H, I], or each of them quantized: (values, scale), see above. swiglu_limit clips the gate from above and up on both sides, in
    shared and routed experts.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule.
        FabricError: an earlier call was ended because some rank waited in vain; the report says rank, task, expected and found.
    """
    shared = (shared_gate, shared_up, shared_down)
    try:
        routed = _check_layer(config, workspace, schedule, x, shared, (routed_gate, routed_up, routed_down), swiglu_limit)
        _check_tensor("router_weights", router_weights, tuple(schedule.top_experts.shape), torch.float32, workspace.device)
    except Exception as error:
        _refuse("forward", config, workspace, error)
    limit = None if swiglu_limit is None else float(swiglu_limit)
    if workspace.inner is None:
        from mok import functional_cpu

        with torch.no_grad():
            layer = _on_cpu(config, workspace, schedule, routed, limit)
            out, gate, up = functional_cpu.forward(layer, x, router_weights, _three(*shared))
            on_cpu: tuple[Tensor | None, Tensor | None] = (None, None)
            if shared_gate is not None and shared_up is not None:
                on_cpu = functional_cpu.shared_gate_up(x, shared_gate, shared_up)
        return out, MoKForwardContext(None, on_cpu[0], gate, on_cpu[1], up, None, None, gate.shape[0])
    from mok.kernels import ops

    all_rows = schedule.peer_rank.numel()
    saved_rows = min(all_rows, config.macrobatch_size if config.saved_rows is None else config.saved_rows)
    rest = (workspace.inner.number, schedule.num_experts, limit, limit, saved_rows, _plan(config))
    head = (x, schedule.top_experts, router_weights)
    with torch.no_grad():
        if routed.precision == "bf16":
            weights = (matrix[0] for matrix in routed.matrices)
            made = ops.gpu_forward(*head, *weights, *shared, None, None, [], [], schedule.rows, *rest)
        else:
            made = ops.gpu_forward_prequantized(*head, *routed.matrices, *shared, schedule.rows, routed.precision, *rest)
    out, gate, up, shared_gates, shared_ups, *_ = made
    kept = (None, None) if shared_gate is None else (shared_gates, shared_ups)
    return out, MoKForwardContext(None, kept[0], gate, kept[1], up, None, None, saved_rows)


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: MoKSchedule,
    x: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    routed_gate: Weight,
    routed_up: Weight,
    swiglu_limit: float | None = None,
) -> MoKForwardContext:
    """The context of a `forward` whose own was thrown away, for activation checkpointing by hand; not collective.

    A backward computes gate and up of routed rows that were not saved by itself, so none are made here (C = 0) and no token is moved. The
    shared experts' gate and up are, by the forward's own kernel with its tasks for them alone, so that they have its bits: every gradient
    has the bits that it has with the context of `forward`.

    Args and errors: as `forward`.
    """
    routed = _check_layer(config, workspace, schedule, x, (shared_gate, shared_up), (routed_gate, routed_up), swiglu_limit)
    limit = None if swiglu_limit is None else float(swiglu_limit)
    gate, up = (x.new_empty(0, routed.width) for _ in range(2))
    kept: tuple[Tensor | None, Tensor | None] = (None, None)
    if shared_gate is not None and shared_up is not None:
        with torch.no_grad():
            if workspace.inner is None:
                from mok import functional_cpu

                kept = functional_cpu.shared_gate_up(x, shared_gate, shared_up)
            else:
                from mok.kernels import ops

                shapes = (shared_gate[None], shared_up[None])  # of routed experts no more counts
                if routed.precision == "bf16":
                    shapes = (routed.matrices[0][0], routed.matrices[1][0])
                kept = ops.gpu_shared_gate_up(
                    x, *shapes, shared_gate, shared_up, schedule.rows, workspace.inner.number, limit, limit, _plan(config)
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
    routed_gate: Weight,
    routed_up: Weight,
    routed_down: Weight,
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
    shared = (shared_gate, shared_up, shared_down)
    try:
        routed = _check_layer(config, workspace, schedule, x, shared, (routed_gate, routed_up, routed_down), swiglu_limit, backward=True)
        tokens, device = x.shape[0], workspace.device
        _check_tensor("router_weights", router_weights, tuple(schedule.top_experts.shape), torch.float32, device)
        _check_tensor("grad_output", grad_output, tuple(x.shape), torch.bfloat16, device, any_strides=True)
        _check_context(context, tokens, routed.width, None if shared_gate is None else shared_gate.shape[0], device)
        local, hidden = schedule.num_local_experts, workspace.hidden_size
        gate_shape, down_shape = (local, routed.width, hidden), (local, hidden, routed.width)
        shapes = [gate_shape, gate_shape, down_shape, *(tuple(matrix.shape) for matrix in shared if matrix is not None)]
        mains = [] if main_grads is None else list(main_grads)
        if main_grads is not None and len(mains) != len(shapes):
            raise ValueError(f"main_grads: {len(mains)} tensors, must be {len(shapes)}, one for each weight")
        for i, (main, shape) in enumerate(zip(mains, shapes, strict=False)):
            _check_tensor(f"main_grads[{i}]", main, shape, torch.float32, device)
    except Exception as error:
        _refuse("backward", config, workspace, error)
    limit = None if swiglu_limit is None else float(swiglu_limit)
    if workspace.inner is None:
        from mok import functional_cpu

        with torch.no_grad():
            layer = _on_cpu(config, workspace, schedule, routed, limit)
            saved = (context.gate_routed, context.up_routed)
            d_x, d_weights, d = functional_cpu.backward(layer, grad_output, x, router_weights, _three(*shared), *saved, mains)
        return d_x, d_weights, d[0], d[1], d[2], d[3], d[4], d[5]
    from mok.kernels import ops

    gates = context.gate_shared, context.up_shared
    nothing = x.new_empty(0)
    kept = [context.gate_routed, context.up_routed, *(nothing if kept is None else kept for kept in gates), nothing]
    has_shared = shared_gate is not None
    head = (grad_output, x, schedule.top_experts, router_weights)
    tail = (workspace.inner.number, schedule.num_experts, limit, limit, _plan(config))
    with torch.no_grad():
        if routed.precision == "bf16":
            asked = [True, True, True, has_shared, False]
            weights = (matrix[0] for matrix in routed.matrices)
            made = ops.gpu_backward(*head, *weights, *shared, None, mains[:3], mains[3:], schedule.rows, kept, asked, *tail)
        else:
            made = ops.gpu_backward_prequantized(
                *head, *routed.matrices, *shared, mains[:3], mains[3:], schedule.rows, kept, routed.precision, *tail
            )  # fmt: skip
    d_x, d_weights, *of_weights = made
    d = [None] * 6 if mains else [*of_weights[:3], *(of_weights[3:6] if has_shared else (None,) * 3)]
    return d_x, d_weights, d[0], d[1], d[2], d[3], d[4], d[5]
