"""Batches of empty, uneven and overloaded ranks and experts whose every sum is exact (tests/dense.py), and steps on them on a GPU.

All have K=2 and (but one) 16 experts, and one of two SIZES, so that their kernels are compiled once for each and a number of ranks.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import fields, replace

import torch
import torch.distributed as dist
import virtual
from checks import hopper_launches
from dense import Plan, exact, ids_of_counts, random_ids
from layers import Batch
from torch import Tensor

import mok
from mok import Tuning
from mok.kernels import autograd
from mok.schedule import local_experts

HIDDEN, WIDTH, EXPERTS = 256, 128, 16
SIZES = [dict(hidden=HIDDEN, width=WIDTH), dict(hidden=384, width=384)]
"""Of the ordinary kernels, and [True] sizes at which Hopper has kernels of its own: those of `checks.hopper_launches`."""
TUNING = Tuning(minibatch=128, macrobatch=256, saved_rows=128, timeout_s=60, max_tokens=4096)
"""Knobs with which even a small batch goes round the rings, cuts experts, and keeps some rows and recomputes others."""


def batch_of(ids: Tensor, **options) -> Batch:  # type: ignore[no-untyped-def]
    return exact(ids, **{"hidden": HIDDEN, "width": WIDTH, "experts": EXPERTS, **options})


def ordinary(seed: int = 100, experts: int = EXPERTS, **size: int) -> Batch:
    return batch_of(random_ids(150, range(experts), seed=seed), experts=experts, seed=seed, **size)


def batch_of_counts(counts: list[int], seed: int = 0, **size: int) -> Batch:
    """Every expert gets its count, in the first or the second slot of its tokens; the other slot is masked."""
    ids = ids_of_counts(counts, seed)
    second = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    none = torch.full_like(ids, -1)
    return batch_of(torch.cat([ids.where(~second, none), ids.where(second, none)], 1), seed=seed, **size)


def receives_nothing(ranks: int, **size: int) -> Plan:
    used = range(max(1, local_experts(EXPERTS, ranks, ranks - 1).start))
    ids = [random_ids(64 * ranks, used, min(2, len(used)), seed=s) for s in range(2)]
    return Plan([*(batch_of(of, seed=s, **size) for s, of in enumerate(ids)), ordinary(**size)])


def receives_nothing_and_wants_no_d_x(ranks: int, **size: int) -> Plan:
    return replace(receives_nothing(ranks, **size), frozen={ranks - 1: ("x",)})


def send_nothing(ranks: int, **size: int) -> Plan:
    cuts = {
        1: [[0, 1], [0, 0], [0, 307]],
        2: [[0, 1, 1], [0, 0, 0], [0, 0, 307]],
        3: [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 300, 307]],
        4: [[0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 300, 300, 307]],
    }
    batches = [batch_of(random_ids(tokens, range(EXPERTS), seed=tokens), seed=tokens, **size) for tokens in (1, 0, 307)]
    return Plan(batches, cuts[ranks])


def idle_experts(ranks: int, **size: int) -> Plan:
    few = [batch_of(random_ids(64, (0, 9), seed=s), seed=s, **size) for s in range(3)]
    return Plan([ordinary(**size), *few])  # the first fills every place


def empty_groups(ranks: int, **size: int) -> Plan:
    counts = [0, 0, 5, 0, 128, 0, 0, 1] + [0] * 8
    return Plan([batch_of_counts(c, **size) for c in (counts, counts[::-1], [0] * 15 + [130])])


def no_tile_filled(ranks: int, **size: int) -> Plan:
    return Plan([batch_of_counts([1, 7, 33, 127, 0, 129, 16, 15] + [0] * 8, seed=s, **size) for s in range(3)])


def full_tiles_and_a_column_of_zeros(ranks: int, **size: int) -> Plan:
    batch = batch_of_counts([256, 128, 128, 256] + [0] * 12, **size)
    batch.x[:, 5] = 0.0
    return Plan([batch])


def all_to_one_pair(ranks: int, **size: int) -> Plan:
    pairs = [torch.tensor(pair).expand(4096 * ranks, 2).contiguous() for pair in ((0, 1), (15, 14))]
    return Plan([*(batch_of(ids, seed=s, **size) for s, ids in enumerate(pairs)), ordinary(**size)])


def nowhere(ranks: int, **size: int) -> Plan:
    return Plan([batch_of(torch.full((70, 2), -1), **size), ordinary(**size)])


def one_expert_twice(ranks: int, **size: int) -> Plan:
    """Weights 0.25 and 0.75 for the same expert, then 1 and a masked slot."""
    twice = batch_of(torch.full((129, 2), 3), **size)
    twice.weights[:] = torch.tensor([0.25, 0.75])
    once = replace(twice, ids=torch.tensor([3, -1]).repeat(129, 1), weights=torch.tensor([1.0, torch.nan]).repeat(129, 1))
    return Plan([twice, once, ordinary(**size)])


def masked(ranks: int, **size: int) -> Plan:
    ids = torch.tensor([[2, -1], [-1, -1], [-1, 7], [0, 7]]).repeat(40, 1)
    batches = []
    for weight in (5.0, torch.nan):
        batches.append(batch_of(ids, **size))
        batches[-1].weights[ids < 0] = weight
    return Plan([*batches, ordinary(**size)])


def twenty_experts(ranks: int, **size: int) -> Plan:
    return Plan([ordinary(seed, experts=20, **size) for seed in range(2)])


CASES: dict[str, Callable[..., Plan]] = {
    function.__name__: function
    for function in (
        receives_nothing, receives_nothing_and_wants_no_d_x, send_nothing, idle_experts, empty_groups, no_tile_filled,
        full_tiles_and_a_column_of_zeros, all_to_one_pair, nowhere, one_expert_twice, masked, twenty_experts,
    )
}  # fmt: skip


def on_device(batch: Batch) -> Batch:
    tensors = {f.name: getattr(batch, f.name).to(virtual.DEVICE) for f in fields(batch) if f.name != "clamp"}
    return replace(batch, **tensors)


def poison() -> None:
    """NaN in free memory and in the memory of all layers; nothing may be on its way in another stream."""
    virtual.poison()
    for workspace in autograd._workspaces.values():
        virtual.poison_workspace(workspace)


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def launches(ahead: bool | None) -> contextlib.AbstractContextManager[None]:
    """Of a forward and a backward, by the kernels for Hopper or not; None: by any."""
    return contextlib.nullcontext() if ahead is None else hopper_launches(int(ahead), int(ahead))


def run_steps(group: dist.ProcessGroup | None, plan: Plan, ahead: bool | None = None) -> list[dict[str, Tensor | None]]:
    """Forward and backward by `mok.moe` of this rank's part of every batch, on poisoned memory; out and gradients, on the CPU.

    With a group every rank sleeps a random time before each call. ahead: see `launches`.
    """
    rank, ranks = ranks_of(group)
    chance = random.Random(rank)
    results: list[dict[str, Tensor | None]] = []
    for i, batch in enumerate(plan.batches):
        b = on_device(batch.local(rank, ranks, plan.cuts[i] if plan.cuts else None)).leaves()
        for name in plan.frozen.get(rank, ()):
            getattr(b, name).requires_grad_(False)
        poison()
        if group is not None:
            torch.cuda._sleep(chance.randrange(1, 4_000_000))
        arguments = (b.x, b.ids, b.weights, b.gate, b.up, b.down)
        with launches(ahead):
            out = mok.moe(*arguments, num_experts=batch.experts, group=group, tuning=TUNING)
            poison()
            if group is not None:
                torch.cuda._sleep(chance.randrange(1, 4_000_000))
            out.backward(b.d_out)
        found = {"out": out.detach(), **b.gradients()}
        results.append({name: None if t is None else t.cpu() for name, t in found.items()})
    return results


def step_of_layer(layer: mok.MoE, x: Tensor, ids: Tensor | None = None, run: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """Output, all gradients and the counts of one training step; given ids go to the experts directly, without the router.

    run(function, *arguments) calls the layer, in a checkpoint for instance.
    """
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    function, arguments = (layer, (leaf,)) if ids is None else (layer.routed, (leaf, ids, torch.full(ids.shape, 0.5, device=ids.device)))
    out = function(*arguments) if run is None else run(function, *arguments)
    (out * out.detach()).sum().backward()
    gradients = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in layer.named_parameters()}
    found = {name: g.clone() for name, g in gradients.items() if g is not None}
    return {"out": out.detach(), "d_x": leaf.grad, "counts": layer.tokens_per_expert.clone(), **found}


def build(group: dist.ProcessGroup | None = None, seed: int = 0, experts: int = EXPERTS, ahead: bool = False) -> mok.MoE:
    torch.manual_seed(seed)
    size = SIZES[ahead]
    config = mok.MoEConfig(hidden_size=size["hidden"], intermediate_size=size["width"], num_experts=experts, top_k=2)
    return mok.MoE(config, group, tuning=TUNING, dtype=torch.bfloat16, device=virtual.DEVICE)
