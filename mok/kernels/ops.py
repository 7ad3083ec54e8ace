"""The GPU's workspaces and the operators on them: one set for `mok.MoE` (differentiable) and `mok.functional` (plain), kept whole by
torch.compile.

A workspace enters a graph as a number, because its memory outlives the graph and no tensor of it is an operand. What an operator writes
there is read by no other operator, except through tensors that the graph sees. A plan is a list [num_sms, most tiles of a minibatch, tiles
of the ring]; all else is looked up (`plans`).

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, S width of the
shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from mok.config import TILE_M
from mok.kernels import launch, launch_backward, launch_backward_fp8, launch_backward_mxfp8, launch_fp8, launch_mxfp8, memory
from mok.kernels.launch import ForwardPlan, Saved, Workspace
from mok.kernels.launch_backward import BackwardPlan, Needs
from mok.kernels.launch_fp8 import QuantizedExperts
from mok.kernels.launcher import aligned, cdiv, enqueue, on_device
from mok.kernels.schedule import DeviceSchedule, max_tiles, schedule_sizes
from mok.kernels.signals import peer_address
from mok.operators import operator
from mok.quantize import Precision, Quantized
from mok.schedule import local_experts
from mok.tune import Key, tuned

KEPT = 5  # tensors that the forward returns for the backward: gate, up, and the shared experts' gate, up and output

# ---- workspaces ----

_numbers: dict[int, weakref.ref[Workspace]] = {}


def make_workspace(
    group: dist.ProcessGroup | None, device: torch.device, tokens: int, hidden: int, top_k: int, num_experts: int, timeout_s: float,
    num_sms: int, precision: Precision | None = "bf16", quantized_weight_gradients: bool = False,
) -> Workspace:  # fmt: skip
    """Memory for forward and backward of at most `tokens` tokens of any rank (ranks may differ) and up to num_experts experts; collective.
    precision: of the routed experts. None: any of them, by `Workspace.in_format`.

    Raises:
        ValueError: ranks that disagree on H, K or E; the same on every rank.
    """
    everyone = [(tokens, hidden, top_k, num_experts)]
    alone = group is None or dist.get_world_size(group) == 1
    if not alone:
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, everyone[0], group=group)
        for position, name in ((1, "hidden_size"), (2, "top_k"), (3, "num_experts")):
            values = [shape[position] for shape in everyone]
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise ValueError(f"{name} must be equal on all ranks of the group ({listed})")
    most = max(shape[0] for shape in everyone)
    sizes = (most, hidden, num_experts, top_k, len(everyone))
    layout = memory.common_regions(*sizes) if precision is None else memory.layer_regions(precision, *sizes)
    with on_device(device), torch.inference_mode(False):  # it is written to in later calls of any mode
        view = memory.virtual_memory(layout, 1, device)[0] if alone else memory.symmetric_memory(layout, group, device)
        form = dict(precision=precision or "bf16", quantized_weight_gradients=quantized_weight_gradients)
        workspace = Workspace(view, most, hidden, top_k, device, timeout_s, num_sms, **form)  # type: ignore[arg-type]
    workspace.number = len(_numbers)
    _numbers[workspace.number] = weakref.ref(workspace)
    return workspace


def workspace_of(number: int) -> Workspace:
    workspace = _numbers[number]()
    if workspace is None:
        raise RuntimeError(f"workspace={number}: this workspace is gone")
    return workspace


@contextlib.contextmanager
def _turn(inner: Workspace) -> Iterator[None]:
    """Launch on the workspace's device, and after the call before on whichever stream that was: it used the same memory.

    Inside a capture the order of graphs is their user's business.
    """
    with on_device(inner.device):
        if inner.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        stream = torch.cuda.current_stream()
        if inner.last_call is not None and inner.last_stream != stream:
            stream.wait_event(inner.last_call)
        inner.last_stream = stream
        yield
        if inner.last_call is None:
            inner.last_call = torch.cuda.Event()
        inner.last_call.record(stream)


def plan_of(num_sms: int, minibatch: int, macrobatch: int) -> list[int]:
    return [num_sms, minibatch // TILE_M, macrobatch // TILE_M]


def plans(inner: Workspace, plan: list[int], width: int, num_experts: int) -> tuple[ForwardPlan, BackwardPlan]:
    """How to cut a layer of this width: as `mok.tune.tuned` has it for the workspace's shape, within the plan. Files are read once."""
    shape = (inner.max_tokens, inner.hidden, width, num_experts, inner.top_k, inner.memory.size, inner.precision)
    return _plans(inner.device, *shape, inner.num_sms, *plan)


@functools.cache
def _plans(
    device: torch.device, tokens: int, hidden: int, width: int, num_experts: int, top_k: int, ranks: int, precision: Precision,
    all_sms: int, num_sms: int, most_tiles: int, ring_tiles: int,
) -> tuple[ForwardPlan, BackwardPlan]:  # fmt: skip
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    choice = tuned(Key(gpu, tokens, hidden, width, num_experts, top_k, ranks, precision), num_sms or all_sms)
    forward = ForwardPlan(**{**choice.forward, "num_sms": num_sms, "ring_tiles": ring_tiles})
    forward = dataclasses.replace(forward, minibatch_tiles=min(forward.minibatch_tiles, most_tiles))
    return forward, BackwardPlan(**{**choice.backward, "num_sms": num_sms, "ring_tiles": ring_tiles})


def _three(gate: Tensor | None, up: Tensor | None, down: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    return None if gate is None or up is None or down is None else (gate, up, down)


# ---- schedule ----


@triton.jit
def sum_counts_kernel(counts_ptrs, total_ptr, E, R: tl.constexpr, BLOCK: tl.constexpr):
    """total[e] = routes of the whole group to expert e, int64."""
    experts = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for rank in range(R):
        total += tl.load(peer_address(counts_ptrs, rank, tl.int32) + experts, mask=experts < E, other=0).to(tl.int64)
    tl.store(total_ptr + experts, total, mask=experts < E)


def make_schedule(inner: Workspace, ids: Tensor, num_experts: int) -> list[Tensor]:
    with _turn(inner):
        rows = launch.schedule(inner, ids, num_experts)
        # Between this schedule's barriers and the next one's, every rank's counts stand where it wrote them.
        total = torch.empty(num_experts, dtype=torch.int64, device=ids.device)
        view = inner.memory
        enqueue(sum_counts_kernel, (cdiv(num_experts, 256),), view.addresses["counts"], total, num_experts, R=view.size, BLOCK=256)
    return [*vars(rows).values(), total]


def fake_schedule(inner: Workspace, ids: Tensor, num_experts: int) -> list[Tensor]:
    ranks = inner.memory.size
    local = len(local_experts(num_experts, ranks, inner.memory.rank))
    sizes = schedule_sizes(max_tiles(inner.max_tokens, inner.top_k, ranks, local), local)
    return [*(ids.new_empty(size, dtype=torch.int32) for size in sizes), ids.new_empty(num_experts, dtype=torch.int64)]


@operator("mok::gpu_schedule")
def gpu_schedule(ids: Tensor, workspace: int, num_experts: int) -> list[Tensor]:
    """The fields of a DeviceSchedule, then int64 [E], the routes of the whole group to each expert. ids: int64 [T, K], contiguous."""
    return make_schedule(workspace_of(workspace), ids, num_experts)


@gpu_schedule.register_fake
def _(ids: Tensor, workspace: int, num_experts: int) -> list[Tensor]:
    return fake_schedule(workspace_of(workspace), ids, num_experts)


# ---- forward ----


@operator("mok::gpu_forward")
def gpu_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    shared_scale: Tensor | None,
    term: Tensor | None,
    main_grads: list[Tensor],
    shared_main_grads: list[Tensor],
    schedule: list[Tensor],
    workspace: int,
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    saved_rows: int,
    plan: list[int],
) -> list[Tensor]:
    """out [T, H]; then gate and up [C, I], the shared experts' gate and up [T, S], and with a shared_scale their output [T, H].

    term: [T, H], bf16 or fp32, what combine adds first in place of shared experts. schedule: the fields of a DeviceSchedule, or nothing;
    then it is made here, by ids, and what `gpu_schedule` returns comes last. saved_rows -1: nothing is kept for a backward, and its tensors
    have no elements. main_grads and shared_main_grads wait for the backward.
    """
    inner = workspace_of(workspace)
    made = [] if schedule else make_schedule(inner, ids, num_experts)
    rows, x = DeviceSchedule(*(schedule or made[:-1])), aligned(x)
    term = None if term is None else term.contiguous()
    cut, _ = plans(inner, plan, gate.shape[1], num_experts)
    shared_out = torch.empty_like(x) if shared_scale is not None and saved_rows >= 0 else None
    with _turn(inner):
        options = dict(
            shared=_three(shared_gate, shared_up, shared_down), clamp=clamp, shared_clamp=shared_clamp, shared_scale_T=shared_scale,
            saved_rows=max(saved_rows, 0), save=saved_rows >= 0, plan=cut, shared_out_TH=shared_out, term_TH=term,
        )  # fmt: skip
        if inner.precision == "fp8":
            experts = QuantizedExperts.of(gate, up, down)
            out, saved = launch_fp8.forward(inner, rows, ids, weights, x, experts, num_experts, **options)
        elif inner.precision == "mxfp8":
            numbers = launch_mxfp8.experts_for(inner.device, gate, up, down)
            out, saved = launch_mxfp8.forward(inner, rows, ids, weights, x, numbers, num_experts, **options)
        else:
            out, saved = launch.forward(inner, rows, ids, weights, x, gate, up, down, num_experts, **options)
    kept = [x.new_empty(0) for _ in range(KEPT - 1)] if saved is None else list(vars(saved).values())
    return [out, *kept, x.new_empty(0) if shared_out is None else shared_out, *made]


@gpu_forward.register_fake
def _(x, ids, weights, gate, up, down, shared_gate, shared_up, shared_down, shared_scale, term, mains, shared_mains, schedule, *rest):  # type: ignore[no-untyped-def]
    workspace, num_experts, _, _, saved_rows, _ = rest
    kept = [(0,)] * KEPT
    if saved_rows >= 0:
        shared_width = max(0 if shared_gate is None else shared_gate.shape[0], 8)
        kept = [(saved_rows, gate.shape[1])] * 2 + [(x.shape[0], shared_width)] * 2 + [(0,) if shared_scale is None else x.shape]
    made = [] if schedule else fake_schedule(workspace_of(workspace), ids, num_experts)
    return [x.new_empty(x.shape), *(x.new_empty(shape) for shape in kept), *made]


@operator("mok::gpu_shared_gate_up")
def gpu_shared_gate_up(
    x: Tensor, gate: Tensor, up: Tensor, shared_gate: Tensor, shared_up: Tensor, schedule: list[Tensor], workspace: int,
    clamp: float | None, shared_clamp: float | None, plan: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The shared experts' gate and up [T, S] again, with the forward's bits: its own kernel, given nothing but these tasks. Not collective.

    Routed rows and down tasks are left out of the list, so of the routed experts and the down matrices only the shapes count.
    """
    inner, hidden = workspace_of(workspace), x.shape[1]
    cut, _ = plans(inner, plan, gate.shape[1], gate.shape[0] * inner.memory.size)
    inner.check()
    rows, x = DeviceSchedule(*schedule), aligned(x)
    none = dataclasses.replace(rows, num_tokens=torch.zeros_like(rows.num_tokens))
    down, shared_down = gate.view(gate.shape[0], hidden, gate.shape[1]), shared_gate.view(hidden, shared_gate.shape[0])
    with _turn(inner):
        arguments, saved, _ = launch.kernel_arguments(
            inner, rows, x, gate, up, down, (shared_gate, shared_up, shared_down), clamp, shared_clamp, 0, True, cut, hidden, gate.shape[1],
            shared_out_TH=x,
        )  # fmt: skip
        launch.write_tasks(inner, {**arguments, "H": 0}, none, cut)  # no slices of H: no down tasks
        launch.run_kernel(arguments, cut, inner)
    return saved.shared_gate_TS, saved.shared_up_TS


@gpu_shared_gate_up.register_fake
def _(x, gate, up, shared_gate, shared_up, *rest):  # type: ignore[no-untyped-def]
    shape = (x.shape[0], shared_gate.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


# ---- backward ----


@operator("mok::gpu_backward", mutated=("main_grads", "shared_main_grads"))
def gpu_backward(
    d_out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    shared_scale: Tensor | None,
    main_grads: list[Tensor],
    shared_main_grads: list[Tensor],
    schedule: list[Tensor],
    kept: list[Tensor],
    asked: list[bool],
    workspace: int,
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    plan: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_x, d_weights, d_gate, d_up, d_down, the same three of the shared experts, d_shared_scale; without elements where not asked for.

    d_out: [T, H], any strides. schedule: the fields of a DeviceSchedule. kept: the KEPT tensors of the forward, which are only read.
    asked: (x, weights, experts, shared experts, shared scale). main_grads, shared_main_grads: none, or 3 fp32 tensors to add to instead.
    """
    inner = workspace_of(workspace)
    d_out, x = aligned(d_out), aligned(x)
    shared = _three(shared_gate, shared_up, shared_down)
    everyone = inner.memory.size > 1  # a peer may want what this rank does not
    needs = Needs(x=asked[0] or everyone, weights=asked[1] or everyone, experts=asked[2], shared=asked[3])
    with _turn(inner):
        shared_d_y = None
        if shared is not None:
            shared_d_y = d_out if shared_scale is None else (d_out.float() * shared_scale[:, None]).to(d_out.dtype)
        forms: dict[str, Any] = dict(bf16=launch_backward, mxfp8=launch_backward_mxfp8, fp8=launch_backward_fp8)
        more = dict(quantized_weight_gradients=inner.quantized_weight_gradients) if inner.precision == "fp8" else {}
        got = forms[inner.precision].backward(
            inner, DeviceSchedule(*schedule), Saved(*kept[: KEPT - 1]), ids, d_out, x, weights, gate, up, down, num_experts, needs,
            plans(inner, plan, gate.shape[1], num_experts)[1], shared=shared, clamp=clamp, shared_clamp=shared_clamp,
            shared_d_y_TH=shared_d_y, main_grads=tuple(main_grads) or None, shared_main_grads=tuple(shared_main_grads) or None, **more,
        )  # fmt: skip
        d_scale = (d_out.float() * kept[-1].float()).sum(-1) if asked[4] else None
    results = (got.d_x_TH, got.d_weights_TK, *(got.experts or (None,) * 3), *(got.shared or (None,) * 3), d_scale)
    return tuple(x.new_empty(0) if result is None else result for result in results)  # type: ignore[return-value]


@gpu_backward.register_fake
def _(d_out, x, ids, weights, gate, up, down, shared_gate, shared_up, shared_down, shared_scale, mains, shared_mains, *rest):  # type: ignore[no-untyped-def]
    _, _, asked, workspace, *_ = rest
    everyone = workspace_of(workspace).memory.size > 1
    experts = [w if asked[2] and not mains else None for w in (gate, up, down)]
    shared = [w if asked[3] and not shared_mains else None for w in (shared_gate, shared_up, shared_down)]
    first = [x if asked[0] or everyone else None, weights if asked[1] or everyone else None]
    like = [*first, *experts, *shared, shared_scale if asked[4] else None]
    return tuple(x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in like)


# ---- with weights quantized beforehand ----


@operator("mok::gpu_forward_prequantized")
def gpu_forward_prequantized(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    schedule: list[Tensor],
    precision: str,
    workspace: int,
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    saved_rows: int,
    plan: list[int],
) -> list[Tensor]:
    """`gpu_forward` with gate, up and down as E4M3 values and their codes, in a workspace of any format: out [T, H], gate and up [C, I],
    the shared experts' gate and up [T, S]."""
    inner = workspace_of(workspace)
    rows, x = DeviceSchedule(*schedule), aligned(x)
    pairs = [Quantized(*pair) for pair in (gate, up, down)]
    with _turn(inner):
        view = inner.in_format(precision)  # type: ignore[arg-type]
        cut, _ = plans(view, plan, gate[0].shape[1], num_experts)
        options = dict(
            shared=_three(shared_gate, shared_up, shared_down), clamp=clamp, shared_clamp=shared_clamp, saved_rows=saved_rows, save=True,
            plan=cut,
        )  # fmt: skip
        call = (view, rows, ids, weights, x)
        if precision == "fp8":
            out, saved = launch_fp8.forward(*call, QuantizedExperts(*pairs), num_experts, **options)
        else:
            numbers = launch_mxfp8.form_for(inner.device).of_quantized(*pairs)
            out, saved = launch_mxfp8.forward(*call, numbers, num_experts, **options)
    return [out, *vars(saved).values()]


@gpu_forward_prequantized.register_fake
def _(x, ids, weights, gate, up, down, shared_gate, *rest):  # type: ignore[no-untyped-def]
    *_, saved_rows, _ = rest
    shared = (x.shape[0], max(0 if shared_gate is None else shared_gate.shape[0], 8))
    return [x.new_empty(shape) for shape in (x.shape, *[(saved_rows, gate[0].shape[1])] * 2, shared, shared)]


def backward_from_pairs(
    view: Workspace, rows: DeviceSchedule, saved: Saved, ids: Tensor, d_out: Tensor, x: Tensor, weights: Tensor,
    matrices: list[list[Tensor]], num_experts: int, plan: BackwardPlan, **options: object,
) -> launch_backward.Gradients:  # fmt: skip
    """The backward's launch, by the workspace's format. matrices: of gate, up and down what `mok.functional.backward` takes."""
    call = (view, rows, saved, ids, d_out, x, weights)
    if view.precision == "mxfp8":
        gate, up = (Quantized(*matrix[:2]) for matrix in matrices[:2])
        turned = [Quantized(*matrix[-2:]) for matrix in matrices]
        return launch_backward_mxfp8.backward(
            *call, gate.values, up.values, turned[2].values.mT, num_experts, plan=plan,
            transposed=launch_backward_mxfp8.form_for(view.device).of_quantized(*turned), quantized=(gate, up), **options,
        )  # fmt: skip
    experts = QuantizedExperts(*(Quantized(*pair) for pair in matrices))
    return launch_backward_fp8.backward(
        *call, *(pair.values for pair in experts), num_experts, plan=plan,
        transposed=launch_backward_fp8.TransposedExperts.of_quantized(experts), quantized=experts, **options,
    )  # fmt: skip


@operator("mok::gpu_backward_prequantized", mutated=("main_grads", "shared_main_grads"))
def gpu_backward_prequantized(
    d_out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    shared_gate: Tensor | None,
    shared_up: Tensor | None,
    shared_down: Tensor | None,
    main_grads: list[Tensor],
    shared_main_grads: list[Tensor],
    schedule: list[Tensor],
    kept: list[Tensor],
    precision: str,
    workspace: int,
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    plan: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`gpu_backward` of all gradients: d_x, d_weights, d_gate, d_up, d_down, the same three of the shared experts; without elements where
    there is none."""
    inner = workspace_of(workspace)
    d_out, x = aligned(d_out), aligned(x)
    with _turn(inner):
        view = inner.in_format(precision)  # type: ignore[arg-type]
        got = backward_from_pairs(
            view, DeviceSchedule(*schedule), Saved(*kept[: KEPT - 1]), ids, d_out, x, weights, [gate, up, down], num_experts,
            plans(view, plan, gate[0].shape[1], num_experts)[1], shared=_three(shared_gate, shared_up, shared_down), clamp=clamp,
            shared_clamp=shared_clamp, main_grads=tuple(main_grads) or None, shared_main_grads=tuple(shared_main_grads) or None,
        )  # fmt: skip
    results = (got.d_x_TH, got.d_weights_TK, *(got.experts or (None,) * 3), *(got.shared or (None,) * 3))
    return tuple(x.new_empty(0) if result is None else result for result in results)  # type: ignore[return-value]


@gpu_backward_prequantized.register_fake
def _(d_out, x, ids, weights, gate, up, down, shared_gate, shared_up, shared_down, mains, shared_mains, *rest):  # type: ignore[no-untyped-def]
    local, width, hidden = gate[0].shape
    experts = [(local, width, hidden), (local, width, hidden), (local, hidden, width)] if not mains else [(0,)] * 3
    shared = [(0,) if matrix is None or shared_mains else matrix.shape for matrix in (shared_gate, shared_up, shared_down)]
    return (x.new_empty(x.shape), weights.new_empty(weights.shape), *(x.new_empty(shape) for shape in (*experts, *shared)))
