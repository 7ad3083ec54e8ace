"""The kernels' calls as torch.library operators, so that torch.compile keeps them in its graph.

A workspace enters a graph as a number, because its memory outlives the graph and no tensor of it is an operand. What an operator writes
there is read by no other operator of the graph, except through tensors that the graph sees.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, S width of the
shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from mok.kernels import launch
from mok.kernels.launch import ForwardPlan, Workspace
from mok.kernels.schedule import DeviceSchedule, max_tiles, schedule_sizes
from mok.schedule import local_experts

_numbers: dict[int, weakref.ref[Workspace]] = {}


def number_of(workspace: Workspace) -> int:
    """The number that stands for a workspace in operators."""
    if workspace.number is None:
        workspace.number = len(_numbers)
        _numbers[workspace.number] = weakref.ref(workspace)
    return workspace.number


def workspace_of(number: int) -> Workspace:
    workspace = _numbers[number]()
    if workspace is None:
        raise RuntimeError(f"workspace={number}: this workspace is gone")
    return workspace


@torch.library.custom_op("mok::gpu_schedule", mutates_args=())
def gpu_schedule(top_experts: Tensor, workspace: int, num_experts: int) -> list[Tensor]:
    """The fields of a DeviceSchedule."""
    inner = workspace_of(workspace)
    with torch.cuda.device(inner.device):
        return list(vars(launch.schedule(inner, top_experts, num_experts)).values())


@gpu_schedule.register_fake
def _(top_experts: Tensor, workspace: int, num_experts: int) -> list[Tensor]:
    inner = workspace_of(workspace)
    size = inner.memory.size
    num_local = len(local_experts(num_experts, size, inner.memory.rank))
    sizes = schedule_sizes(max_tiles(inner.max_tokens, inner.top_k, size, num_local), num_local)
    return [top_experts.new_empty(count, dtype=torch.int32) for count in sizes]


@torch.library.custom_op("mok::gpu_forward", mutates_args=())
def gpu_forward(
    workspace: int,
    num_experts: int,
    schedule: list[Tensor],
    top_experts: Tensor,
    weights: Tensor,
    x: Tensor,
    experts: list[Tensor],
    shared: list[Tensor],
    clamp: float | None,
    shared_clamp: float | None,
    shared_scale: Tensor | None,
    saved_rows: int,
    save: bool,
    plan: list[int],
) -> list[Tensor]:
    """-> output; with `save` also gate and up [C, I], shared gate and up [T, S]. plan: num_sms, tiles per minibatch and ring."""
    inner, cut = workspace_of(workspace), ForwardPlan(num_sms=plan[0], minibatch_tiles=plan[1], ring_tiles=plan[2])
    with torch.cuda.device(inner.device):
        out, saved = launch.forward(
            inner, DeviceSchedule(*schedule), top_experts, weights, x, *experts, num_experts,
            shared=(shared[0], shared[1], shared[2]) if shared else None, clamp=clamp, shared_clamp=shared_clamp,
            shared_scale_T=shared_scale, saved_rows=saved_rows, save=save, plan=cut,
        )  # fmt: skip
    return [out, *(vars(saved).values() if saved else ())]


@gpu_forward.register_fake
def _(
    workspace: int, num_experts: int, schedule: list[Tensor], top_experts: Tensor, weights: Tensor, x: Tensor, experts: list[Tensor],
    shared: list[Tensor], clamp: float | None, shared_clamp: float | None, shared_scale: Tensor | None, saved_rows: int, save: bool,
    plan: list[int],
) -> list[Tensor]:  # fmt: skip
    width, shared_width = experts[0].shape[1], shared[0].shape[0] if shared else 0
    shapes = [(saved_rows, width)] * 2 + [(x.shape[0], shared_width)] * 2 if save else []
    return [x.new_empty(x.shape), *(x.new_empty(shape) for shape in shapes)]
