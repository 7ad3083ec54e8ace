"""The tests' own definition: a loop over experts on gathered tokens with every gradient written out, in fp64 with the layer's roundings.

It shares nothing with mok.reference or the executor. On the batches of `exact` every sum is an integer multiple of a small power of two
below 2^24, so it is the same in any order and any precision, and results are compared bit for bit.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token, N routes of one expert.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from conftest import poison
from layers import NAMES, Batch, assert_equal
from torch import Tensor

import mok
from mok import Tuning
from mok.fabric import host_fabric

SMALL_RING = Tuning(minibatch=128, macrobatch=256, saved_rows=128, timeout_s=20)
"""Knobs with which even a small batch goes round the ring, and keeps some rows and recomputes others."""


def dense(b: Batch, *, round_weight_gradients: bool = True) -> dict[str, Tensor]:
    """out, d_x, d_weights, d_gate, d_up, d_down of a whole global batch; round_weight_gradients=False gives those of main_grad, fp32."""
    dtype = b.x.dtype

    def rounded(v: Tensor) -> Tensor:
        return v.to(dtype).double()

    x, gate_E, up_E, down_E, d_out = (t.double() for t in (b.x, b.gate, b.up, b.down, b.d_out))
    tokens, top_k = b.ids.shape
    y_slots, d_x_slots = (torch.zeros(tokens, top_k, x.shape[1], dtype=torch.float64) for _ in range(2))
    d_weights = torch.zeros(tokens, top_k, dtype=torch.float64)
    d_gate_E, d_up_E, d_down_E = (torch.zeros_like(t) for t in (gate_E, up_E, down_E))
    limit = float("inf") if b.clamp is None else b.clamp
    for e in range(b.experts):
        token, k = (b.ids == e).nonzero(as_tuple=True)
        x_N, d_y, w = x[token], d_out[token], b.weights[token, k].double()[:, None]
        gate, up = rounded(x_N @ gate_E[e].T), rounded(x_N @ up_E[e].T)
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        s = 1 / (1 + torch.exp(-g))
        hidden = rounded(g * s * u)
        y_slots[token, k] = rounded(hidden @ down_E[e].T)
        d_hidden = d_y @ down_E[e]
        d_weights[token, k] = (d_hidden * hidden).sum(1)
        d_gate = rounded(d_hidden * w * u * (s + g * s * (1 - s)) * (gate <= limit))
        d_up = rounded(d_hidden * w * g * s * (up.abs() <= limit))
        d_x_slots[token, k] = rounded(d_gate @ gate_E[e] + d_up @ up_E[e])
        d_gate_E[e], d_up_E[e], d_down_E[e] = d_gate.T @ x_N, d_up.T @ x_N, d_y.T @ rounded(w * hidden)
    out = torch.zeros_like(x)
    for k in range(top_k):
        here = b.ids[:, k] >= 0
        out[here] += b.weights[here, k].double()[:, None] * y_slots[here, k]
    of_experts = dtype if round_weight_gradients else torch.float32
    return {
        "out": out.to(dtype), "d_x": d_x_slots.sum(1).to(dtype), "d_weights": d_weights.to(b.weights.dtype),
        "d_gate": d_gate_E.to(of_experts), "d_up": d_up_E.to(of_experts), "d_down": d_down_E.to(of_experts),
    }  # fmt: skip


def exact(  # type: ignore[no-untyped-def]
    ids: Tensor, *, hidden=64, width=48, experts=8, dtype=torch.bfloat16, weight_choices=(-1.0, -0.5, 0.0, 0.25, 0.5, 1.0), seed=0
) -> Batch:
    """A batch for given ids whose every sum is exact. Gates are 0, 32 or 64 times 1 or 2, where silu and its slope are exact: 0 and 1/2, or
    x and 1; everything else is a small integer, at most about 64 of a row not zero; the last 8 columns are never all zero."""
    g = torch.Generator().manual_seed(seed)
    tokens = ids.shape[0]

    def integers(*shape: int, high: int = 1) -> Tensor:
        values = torch.randint(-high, high + 1, shape, generator=g)
        return values * (torch.rand(shape, generator=g) < 64 / shape[-1])

    x, d_out = integers(tokens, hidden, high=2), integers(tokens, hidden)
    up, down = integers(experts, width, hidden), integers(experts, hidden, width)
    tail = min(8, hidden)
    x[:, -tail:] = torch.randint(1, 3, (tokens, tail), generator=g)
    x[:, 0] = torch.randint(1, 3, (tokens,), generator=g)
    up[..., -tail:] = torch.randint(0, 2, (experts, width, tail), generator=g) * 2 - 1
    d_out[:, -tail:] = torch.randint(0, 2, (tokens, tail), generator=g) * 2 - 1
    gate = torch.zeros(experts, width, hidden)
    for e in range(experts):  # the gate reads the first column in even experts and the last one in odd ones
        gate[e, :, 0 if e % 2 == 0 else hidden - 1] = torch.tensor([0.0, 32.0, 64.0])[torch.randint(0, 3, (width,), generator=g)]
    weights = torch.tensor(weight_choices)[torch.randint(0, len(weight_choices), ids.shape, generator=g)]
    return Batch(x.to(dtype), ids, weights, gate.to(dtype), up.to(dtype), down.to(dtype), d_out.to(dtype))


def random_ids(tokens: int, experts: Sequence[int], top_k: int = 2, seed: int = 0) -> Tensor:
    """Distinct experts out of the given ones for every token."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, len(experts), generator=g).argsort(1)[:, :top_k]
    return torch.tensor(list(experts))[chosen].clone(memory_format=torch.contiguous_format)  # the usual strides for 0 and 1 tokens too


def ids_of_counts(counts: Sequence[int], seed: int = 0) -> Tensor:
    """ids [T, 1] that give every expert its count, shuffled."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))][:, None]


def delay(group: object, seed: int, most_s: float) -> None:
    """Random waits, different on every rank, before every signal and wait of the layer."""
    fabric = host_fabric(group)  # type: ignore[arg-type]
    chance = random.Random(1000 * seed + fabric.rank)
    fabric.before = lambda task, call: time.sleep(chance.random() * most_s)


@dataclass
class Plan:
    """Steps of one call of `run_steps`: per step a global batch and how its tokens are cut over the ranks."""

    batches: list[Batch]
    cuts: list[list[int] | None] = field(default_factory=list)
    frozen: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Per rank, the inputs that ask for no gradient."""
    delay_s: float = 0.0
    tuning: Tuning = SMALL_RING


def run_steps(group, plan: Plan) -> list[dict[str, Tensor | None]]:  # type: ignore[no-untyped-def]
    """Forward and backward of this rank's part of every batch, each on poisoned memory: out and gradients of every step."""
    fabric = host_fabric(group)
    delay(group, 0, plan.delay_s)
    results: list[dict[str, Tensor | None]] = []
    for i, batch in enumerate(plan.batches):
        b = batch.local(fabric.rank, fabric.size, plan.cuts[i] if plan.cuts else None).leaves()
        for name in plan.frozen.get(fabric.rank, ()):
            getattr(b, name).requires_grad_(False)
        poison()
        arguments = (b.x, b.ids, b.weights, b.gate, b.up, b.down)
        out = mok.moe(*arguments, clamp=b.clamp, num_experts=batch.experts, group=group, tuning=plan.tuning)
        if out.requires_grad:
            poison()
            out.backward(b.d_out)
        results.append({"out": out.detach(), **b.gradients()})
    fabric.before = None
    return results


Check = Callable[[dict[str, Tensor], Batch], None]


def assert_steps(parts: list[list[dict[str, Tensor | None]]], plan: Plan, check: Check | None = None) -> None:
    """Every step of every rank against the dense loop, bit for bit; a gradient that a rank did not ask for is None."""
    for i, batch in enumerate(plan.batches):
        want = dense(batch)
        if check is not None:
            check(want, batch)
        size = len(parts)
        for rank in range(size):
            got = parts[rank][i]
            first = sum(parts[r][i]["out"].shape[0] for r in range(rank))
            rows = slice(first, first + got["out"].shape[0])
            mine = batch.local(rank, size).gate.shape[0]
            before = sum(batch.local(r, size).gate.shape[0] for r in range(rank))
            part = {n: t[rows] if n in ("out", "d_x", "d_weights") else t[before : before + mine] for n, t in want.items()}
            for name in NAMES:
                if name in plan.frozen.get(rank, ()):
                    assert got[f"d_{name}"] is None, f"rank {rank}, step {i}: d_{name} was not asked for"
                    part.pop(f"d_{name}")
                else:
                    assert got[f"d_{name}"] is not None, f"rank {rank}, step {i}: d_{name} is missing"
            try:
                assert all(got[name].isfinite().all() for name in part), "not finite"
                assert_equal(got, part)
            except AssertionError as error:
                raise AssertionError(f"rank {rank}, step {i}: {error}") from error


_building = threading.Lock()


def build(config: mok.MoEConfig, group=None, *, seed: int = 0, tuning: Tuning = SMALL_RING, dtype=None) -> mok.MoE:  # type: ignore[no-untyped-def]
    """A layer with the same parameters on every rank: virtual ranks share torch's generator, so they take turns."""
    if isinstance(group, torch.distributed.ProcessGroup):  # may be collective
        torch.manual_seed(seed)
        return mok.MoE(config, group, tuning=tuning, dtype=dtype)
    with _building:
        torch.manual_seed(seed)
        return mok.MoE(config, group, tuning=tuning, dtype=dtype)
