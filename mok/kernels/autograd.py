"""The layer on the GPU for autograd and torch.compile: the operators of `mok.kernels.ops`, one forward and one backward.

What the backward reads is what the forward returned (the schedule, gate and up of the first C rows, the shared experts' gate, up and
output), so it travels through `save_for_backward`.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, R ranks,
S width of the shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from mok.config import TILE_M, Tuning
from mok.executor import final
from mok.kernels.launch import Workspace
from mok.kernels.ops import KEPT, gpu_backward, gpu_forward, make_workspace, plan_of
from mok.quantize import Precision

_workspaces: dict[tuple[str, torch.device, int, int, int, Precision, bool], Workspace] = {}
_groups: dict[str, weakref.ref[dist.ProcessGroup]] = {}


def _meet(group: dist.ProcessGroup) -> None:
    """At the first sight of a group forget the memory of groups that are gone: their names are given again after destroy_process_group."""
    name = group.group_name
    if name in _groups and _groups[name]() is group:
        return
    gone = {known for known, reference in _groups.items() if known == name or reference() is None}
    for key in [key for key in _workspaces if key[0] in gone]:
        del _workspaces[key]
    for known in gone:
        del _groups[known]
    _groups[name] = weakref.ref(group)


def workspace_for(
    group: dist.ProcessGroup | None, device: torch.device, tokens: int, hidden: int, top_k: int, num_experts: int, tuning: Tuning,
    precision: Precision = "bf16", quantized_weight_gradients: bool = False,
) -> Workspace:  # fmt: skip
    """The workspace that all layers of one group, H, K, E and format share. Its first use is collective and fixes the tokens that it can
    hold: `Tuning.max_tokens`, or else the most that any rank brings. A rank alone may bring more later; the ranks of a group may not.

    Raises:
        ValueError: more tokens than the group's workspace can hold, or ranks that disagree on H, K or E.
        RuntimeError: a first use, or one with more tokens, while compiling.
    """
    if group is not None and not torch.compiler.is_compiling():
        _meet(group)
    key = ("" if group is None else group.group_name, device, hidden, top_k, num_experts, precision, quantized_weight_gradients)
    found = _workspaces.get(key)
    if found is not None and tokens <= found.max_tokens:
        return found
    if found is not None and group is not None:
        raise ValueError(f"x has {tokens} tokens: the group's workspace holds {found.max_tokens} per rank; set Tuning.max_tokens")
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile: call the layer once before it is compiled, with as many tokens: that makes the memory of its group"
        )
    most = max(tokens, tuning.max_tokens or 0)
    sizes, form = (most, hidden, top_k, num_experts), (precision, quantized_weight_gradients)
    made = make_workspace(group, device, *sizes, tuning.timeout_s, tuning.num_sms, *form)
    if found is None:
        found = _workspaces[key] = made
    else:  # in place: calls that wait for their backward know it by its number
        found.retire(found.memory.buffer, *found.memory.addresses.values())
        found.memory, found.max_tokens = made.memory, made.max_tokens
    return found


def rows_to_save(tuning: Tuning, tokens: int, top_k: int, ranks: int, local: int) -> int:
    """C: `Tuning.saved_rows`, or else a quarter more rows than a balanced load has (all of them for a rank alone), in whole tiles."""
    everything = ranks * (tokens * top_k // TILE_M * TILE_M) + local * TILE_M
    share = tokens * top_k + (tokens * top_k // 4 if ranks > 1 else 0) + local * TILE_M
    wanted = share if tuning.saved_rows is None else tuning.saved_rows
    return min(everything, wanted) // TILE_M * TILE_M


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors, term, schedule = inputs[:10], inputs[10], inputs[13]
    ctx.present = [tensor is not None for tensor in tensors]
    ctx.main_grads, ctx.term_dtype = inputs[11:13], None if term is None else term.dtype
    ctx.lists = [len(tensors) for tensors in inputs[11:14]]
    workspace, num_experts, clamp, shared_clamp, _, plan = inputs[14:]
    ctx.rest = (workspace, num_experts, clamp, shared_clamp, plan)
    kept, made = output[1 : 1 + KEPT], output[1 + KEPT : -1]
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None), *kept, *(schedule or made))
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros the size of gate and up, for nobody


@final
def _backward(ctx, d_outs):  # type: ignore[no-untyped-def]
    saved = list(ctx.saved_tensors)
    tensors = [saved.pop(0) if present else None for present in ctx.present]
    kept, schedule, d_out = saved[:KEPT], saved[KEPT:], d_outs[0]
    if d_out is None:  # peers wait for this rank all the same
        d_out = torch.zeros_like(tensors[0])
    need = ctx.needs_input_grad[:10]
    asked = [need[0], need[2], any(need[3:6]), any(need[6:9]), need[9]]
    results = gpu_backward(d_out, *tensors, *ctx.main_grads, schedule, kept, asked, *ctx.rest)
    given = zip([results[0], None, *results[1:]], need, tensors, strict=True)
    gradients = [gradient if wanted and gradient.shape == tensor.shape else None for gradient, wanted, tensor in given]
    d_term = d_out.to(ctx.term_dtype) if ctx.needs_input_grad[10] else None
    return (*gradients, d_term, *([None] * count for count in ctx.lists), *(None for _ in range(6)))


gpu_forward.register_autograd(_backward, setup_context=_setup_context)


def layer(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor] | None,
    shared_scale: Tensor | None,
    term: Tensor | None,
    main_grads: list[Tensor],
    shared_main_grads: list[Tensor],
    num_experts: int,
    clamp: float | None,
    shared_clamp: float | None,
    group: dist.ProcessGroup | None,
    tuning: Tuning,
    precision: Precision = "bf16",
    quantized_weight_gradients: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [T, H] and the counts int64 [E] of the group's routes. Everything bf16 but ids (int64), weights and shared_scale (fp32).

    precision: of the routed experts' products. quantized_weight_gradients: in "fp8". term: see `gpu_forward`.
    main_grads, shared_main_grads: none, or 3 fp32 tensors like the routed and the shared experts.
    """
    tokens, top_k = ids.shape
    workspace = workspace_for(group, x.device, tokens, x.shape[1], top_k, num_experts, tuning, precision, quantized_weight_gradients)
    inputs = [x, weights, *experts, *(shared or ()), *([] if shared_scale is None else [shared_scale])]
    several = workspace.memory.size > 1
    save = torch.is_grad_enabled() and (several or any(tensor.requires_grad for tensor in inputs))
    if save and not any(tensor.requires_grad for tensor in inputs):
        x = x.detach().requires_grad_()  # this rank must come to backward when another one needs its experts
    saved_rows = rows_to_save(tuning, workspace.max_tokens, top_k, workspace.memory.size, experts[0].shape[0]) if save else -1
    out, *rest = gpu_forward(
        x, ids, weights, *experts, *(shared or (None, None, None)), shared_scale, term, main_grads, shared_main_grads, [],
        workspace.number, num_experts, clamp, shared_clamp, saved_rows, plan_of(tuning.num_sms, tuning.minibatch, tuning.macrobatch),
    )  # fmt: skip
    return out, rest[-1]
