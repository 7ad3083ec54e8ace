"""The layer on the GPU for autograd and torch.compile: one operator forward, one backward.

What the backward reads is what the forward returned (the schedule, gate and up of the first C rows, the shared experts' gate, up and
output), so it travels through `save_for_backward`. A workspace enters as a number; it only holds what no later call needs.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, R ranks,
S width of the shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from mok.config import TILE_M, Tuning
from mok.kernels import launch, launch_backward, memory
from mok.kernels.launch import ForwardPlan, Saved, Workspace
from mok.kernels.launch_backward import BackwardPlan, Needs
from mok.kernels.ops import number_of, workspace_of
from mok.kernels.schedule import DeviceSchedule, max_tiles, schedule_sizes
from mok.kernels.signals import peer_address
from mok.schedule import local_experts

# ---- workspaces ----

_workspaces: dict[tuple[str, torch.device, int, int, int], Workspace] = {}


def workspace_for(
    group: dist.ProcessGroup | None, device: torch.device, tokens: int, hidden: int, top_k: int, num_experts: int, tuning: Tuning
) -> Workspace:
    """The workspace that all layers of one group, H, K and E share. Its first use is collective and fixes the tokens that it can hold:
    `Tuning.max_tokens`, or else the most that any rank brings. A rank alone may bring more later; the ranks of a group may not.

    Raises:
        ValueError: more tokens than the group's workspace can hold, or ranks that disagree on H, K or E.
    """
    key = ("" if group is None else group.group_name, device, hidden, top_k, num_experts)
    found = _workspaces.get(key)
    if found is not None and tokens <= found.max_tokens:
        return found
    most = max(tokens, tuning.max_tokens or 0)
    if group is None:
        layout = memory.backward_regions(most, hidden, num_experts, top_k, 1)
        view = memory.virtual_memory(layout, 1, device)[0]
        if found is None:
            found = _workspaces[key] = Workspace(view, most, hidden, top_k, device, tuning.timeout_s, tuning.num_sms)
        else:  # in place: calls that wait for their backward know it by its number
            found.memory, found.max_tokens = view, most
        return found
    if found is not None:
        raise ValueError(f"x has {tokens} tokens: the group's workspace holds {found.max_tokens} per rank; set Tuning.max_tokens")
    everyone: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (most, hidden, top_k, num_experts), group=group)
    for position, name in ((1, "hidden_size"), (2, "top_k"), (3, "num_experts")):
        values = [shape[position] for shape in everyone]
        if len(set(values)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise ValueError(f"{name} must be equal on all ranks of the group ({listed})")
    most = max(shape[0] for shape in everyone)
    layout = memory.backward_regions(most, hidden, num_experts, top_k, len(everyone))
    view = memory.symmetric_memory(layout, group, device)
    found = _workspaces[key] = Workspace(view, most, hidden, top_k, device, tuning.timeout_s, tuning.num_sms)
    return found


@triton.jit
def sum_counts_kernel(counts_ptrs, total_ptr, E, R: tl.constexpr, BLOCK: tl.constexpr):
    """total[e] = routes of the whole group to expert e, int64."""
    experts = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for rank in range(R):
        total += tl.load(peer_address(counts_ptrs, rank, tl.int32) + experts, mask=experts < E, other=0).to(tl.int64)
    tl.store(total_ptr + experts, total, mask=experts < E)


def _sum_counts(workspace: Workspace, num_experts: int) -> Tensor:
    """After the schedule's barriers, before the next call's: every rank's counts stand where it wrote them."""
    total = torch.empty(num_experts, dtype=torch.int64, device=workspace.device)
    view = workspace.memory
    sum_counts_kernel[(triton.cdiv(num_experts, 256),)](view.addresses["counts"], total, num_experts, R=view.size, BLOCK=256)
    return total


# ---- forward ----


def knobs_of(tuning: Tuning) -> list[int]:
    """num_sms, and minibatch and macrobatch in tiles: as operators take them."""
    return [tuning.num_sms, tuning.minibatch // TILE_M, tuning.macrobatch // TILE_M]


def rows_to_save(tuning: Tuning, tokens: int, top_k: int, ranks: int, local: int) -> int:
    """C: `Tuning.saved_rows`, or else a quarter more rows than a balanced load has (all of them for a rank alone), in whole tiles."""
    everything = ranks * (tokens * top_k // TILE_M * TILE_M) + local * TILE_M
    share = tokens * top_k + (tokens * top_k // 4 if ranks > 1 else 0) + local * TILE_M
    wanted = share if tuning.saved_rows is None else tuning.saved_rows
    return min(everything, wanted) // TILE_M * TILE_M


@torch.library.custom_op("mok::gpu_layer", mutates_args=())
def gpu_layer(
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
    workspace: int,
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    saved_rows: int,
    knobs: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out [T, H]; counts int64 [E]; then what is kept: the 6 fields of the schedule, gate and up [C, I], the shared experts' gate and up
    [T, S] and output [T, H].

    term: [T, H], bf16 or fp32, what combine adds first in place of shared experts. saved_rows -1: nothing is kept for a backward, and its
    tensors have no elements. main_grads wait for the backward.
    """
    inner = workspace_of(workspace)
    rows = launch.schedule(inner, ids, num_experts)
    counts = _sum_counts(inner, num_experts)
    shared = None
    if shared_gate is not None and shared_up is not None and shared_down is not None:
        shared = (shared_gate, shared_up, shared_down)
    plan = ForwardPlan(num_sms=knobs[0], minibatch_tiles=knobs[1], ring_tiles=knobs[2])
    shared_out = torch.empty_like(x) if shared_scale is not None and saved_rows >= 0 else None
    out, saved = launch.forward(
        inner, rows, ids, weights, x, gate, up, down, num_experts, shared=shared, clamp=clamp, shared_clamp=shared_clamp,
        shared_scale_T=shared_scale, saved_rows=max(saved_rows, 0), save=saved_rows >= 0, plan=plan, shared_out_TH=shared_out, term_TH=term,
    )  # fmt: skip
    kept = [x.new_empty(0) for _ in range(4)] if saved is None else list(vars(saved).values())
    shared_out = x.new_empty(0) if shared_out is None else shared_out
    return (out, counts, *vars(rows).values(), *kept, shared_out)  # type: ignore[return-value]


@gpu_layer.register_fake
def _(x, ids, weights, gate, up, down, shared_gate, shared_up, shared_down, shared_scale, term, main_grads, workspace, num_experts, *rest):  # type: ignore[no-untyped-def]
    saved_rows = rest[2]
    inner = workspace_of(workspace)
    local = len(local_experts(num_experts, inner.memory.size, inner.memory.rank))
    sizes = schedule_sizes(max_tiles(inner.max_tokens, inner.top_k, inner.memory.size, local), local)
    width, shared_width = gate.shape[1], 0 if shared_gate is None else shared_gate.shape[0]
    kept = [(0,)] * 4
    if saved_rows >= 0:
        kept = [(saved_rows, width)] * 2 + [(x.shape[0], max(shared_width, 8))] * 2
    shared_out = x.shape if saved_rows >= 0 and shared_scale is not None else (0,)
    return (
        x.new_empty(x.shape), ids.new_empty(num_experts), *(ids.new_empty(size, dtype=torch.int32) for size in sizes),
        *(x.new_empty(shape) for shape in kept), x.new_empty(shared_out),
    )  # fmt: skip


# ---- backward ----


@torch.library.custom_op("mok::gpu_layer_backward", mutates_args=("main_grads",))
def gpu_layer_backward(
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
    kept: list[Tensor],
    asked: list[bool],
    workspace: int,
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    knobs: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_x, d_weights, d_gate, d_up, d_down, the same of the shared experts, d_shared_scale; without elements where not asked for.

    kept: what `gpu_layer` returned from its third value on. asked: (x, weights, experts, shared experts, shared scale). main_grads: none,
    or 3 (routed) or 6 (and shared) fp32 tensors to add to instead.
    """
    inner = workspace_of(workspace)
    rows, saved, shared_out = DeviceSchedule(*kept[:6]), Saved(*kept[6:10]), kept[10]
    shared = shared_d_y = None
    d_out = d_out.contiguous()
    if shared_gate is not None and shared_up is not None and shared_down is not None:
        shared = (shared_gate, shared_up, shared_down)
        shared_d_y = d_out if shared_scale is None else (d_out.float() * shared_scale[:, None]).to(d_out.dtype)
    everyone = inner.memory.size > 1  # a peer may want what this rank does not
    needs = Needs(x=asked[0] or everyone, weights=asked[1] or everyone, experts=asked[2], shared=asked[3])
    got = launch_backward.backward(
        inner, rows, saved, ids, d_out, x, weights, gate, up, down, num_experts, needs,
        BackwardPlan(num_sms=knobs[0], ring_tiles=knobs[2]), shared=shared, clamp=clamp, shared_clamp=shared_clamp,
        shared_d_y_TH=shared_d_y, main_grads=tuple(main_grads[:3]) or None, shared_main_grads=tuple(main_grads[3:]) or None,
    )  # fmt: skip
    d_scale = (d_out.float() * shared_out.float()).sum(-1) if asked[4] else None
    results = (got.d_x_TH, got.d_weights_TK, *(got.experts or (None,) * 3), *(got.shared or (None,) * 3), d_scale)
    return tuple(x.new_empty(0) if result is None else result for result in results)  # type: ignore[return-value]


@gpu_layer_backward.register_fake
def _(d_out, x, ids, weights, gate, up, down, shared_gate, shared_up, shared_down, shared_scale, main_grads, kept, asked, *rest):  # type: ignore[no-untyped-def]
    everyone = workspace_of(rest[0]).memory.size > 1
    experts = [w if asked[2] and not main_grads else None for w in (gate, up, down)]
    shared = [w if asked[3] and len(main_grads) < 6 else None for w in (shared_gate, shared_up, shared_down)]
    first = [x if asked[0] or everyone else None, weights if asked[1] or everyone else None]
    like = [*first, *experts, *shared, shared_scale if asked[4] else None]
    return tuple(x.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in like)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors, term, main_grads, rest = inputs[:10], inputs[10], inputs[11], inputs[12:]
    ctx.present = [tensor is not None for tensor in tensors]
    ctx.main_grads, ctx.term_dtype = main_grads, None if term is None else term.dtype
    ctx.rest = (*rest[:4], rest[5])  # workspace, num_experts, the two clamps, knobs
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None), *output[2:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, d_out, *_):  # type: ignore[no-untyped-def]
    saved = list(ctx.saved_tensors)
    tensors = [saved.pop(0) if present else None for present in ctx.present]
    need = ctx.needs_input_grad[:10]
    asked = [need[0], need[2], any(need[3:6]), any(need[6:9]), need[9]]
    results = gpu_layer_backward(d_out, *tensors, ctx.main_grads, saved, asked, *ctx.rest)
    given = zip([results[0], None, *results[1:]], need, tensors, strict=True)
    gradients = [gradient if wanted and gradient.shape == tensor.shape else None for gradient, wanted, tensor in given]
    d_term = d_out.to(ctx.term_dtype) if ctx.needs_input_grad[10] else None
    return (*gradients, d_term, [None] * len(ctx.main_grads), *(None for _ in range(6)))


def layer(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor] | None,
    shared_scale: Tensor | None,
    term: Tensor | None,
    main_grads: list[Tensor],
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    group: dist.ProcessGroup | None,
    tuning: Tuning,
) -> tuple[Tensor, Tensor]:
    """out [T, H] and the counts int64 [E] of the group's routes. Everything bf16 but ids (int64), weights and shared_scale (fp32).

    term: see `gpu_layer`. main_grads: none, or 3 fp32 tensors like the experts, or 6 with those like the shared experts.
    """
    tokens, top_k = ids.shape
    with torch.cuda.device(x.device):
        workspace = workspace_for(group, x.device, tokens, x.shape[1], top_k, num_experts, tuning)
        inputs = [x, weights, *experts, *(shared or ()), *([] if shared_scale is None else [shared_scale])]
        save = torch.is_grad_enabled() and (workspace.memory.size > 1 or any(tensor.requires_grad for tensor in inputs))
        if save and not any(tensor.requires_grad for tensor in inputs):
            x = x.detach().requires_grad_()  # this rank must come to backward when another one needs its experts
        saved_rows = rows_to_save(tuning, workspace.max_tokens, top_k, workspace.memory.size, experts[0].shape[0]) if save else -1
        out, counts, *_ = gpu_layer(
            x, ids, weights, *experts, *(shared or (None, None, None)), shared_scale, term, main_grads,
            number_of(workspace), num_experts, clamp, shared_clamp, saved_rows, knobs_of(tuning),
        )  # fmt: skip
    return out, counts


gpu_layer.register_autograd(_backward, setup_context=_setup_context)
