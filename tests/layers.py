"""Inputs for a whole global batch, their cut over ranks, and the calls of the layer and of the reference on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import mok
from mok import Tuning, reference
from mok.fabric import host_fabric
from mok.schedule import local_experts

NAMES = ("x", "weights", "gate", "up", "down")


@dataclass
class Batch:
    """One global batch with all experts; d_out is the gradient that comes in."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    d_out: Tensor
    clamp: float | None = None

    @staticmethod
    def random(tokens=300, hidden=64, width=48, experts=8, top_k=2, dtype=torch.float32, seed=0, clamp=None, masked=True) -> Batch:  # type: ignore[no-untyped-def]
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=g) * scale).to(dtype)

        ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].contiguous()
        if masked and tokens > 2:
            ids[0, 0], ids[1], ids[2] = -1, -1, experts - 1  # a masked slot, a masked token, duplicates
        weights = torch.randn(tokens, top_k, generator=g).to(torch.float64 if dtype == torch.float64 else torch.float32)
        return Batch(
            normal(tokens, hidden), ids, weights,
            normal(experts, width, hidden, scale=hidden**-0.5), normal(experts, width, hidden, scale=hidden**-0.5),
            normal(experts, hidden, width, scale=width**-0.5), normal(tokens, hidden), clamp,
        )  # fmt: skip

    @property
    def experts(self) -> int:
        return self.gate.shape[0]

    def local(self, rank: int, size: int, cuts: list[int] | None = None) -> Batch:
        """The part of a rank: tokens cuts[rank]..cuts[rank + 1] (default: equal parts) and the rank's experts."""
        tokens = self.x.shape[0]
        cuts = [i * tokens // size for i in range(size + 1)] if cuts is None else cuts
        rows, mine = slice(cuts[rank], cuts[rank + 1]), local_experts(self.experts, size, rank)
        part = slice(mine.start, mine.stop)
        return replace(
            self, x=self.x[rows], ids=self.ids[rows], weights=self.weights[rows], d_out=self.d_out[rows],
            gate=self.gate[part], up=self.up[part], down=self.down[part],
        )  # fmt: skip

    def leaves(self) -> Batch:
        """Copies that record gradients."""
        return replace(self, **{name: getattr(self, name).clone().requires_grad_() for name in NAMES})

    def gradients(self) -> dict[str, Tensor]:
        return {f"d_{name}": getattr(self, name).grad for name in NAMES}


def step(group, batch: Batch, tuning: Tuning | None = None, cuts: list[int] | None = None) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """One forward and backward of this rank's part of a global batch."""
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size, cuts).leaves()
    out = mok.moe(
        b.x,
        b.ids,
        b.weights,
        b.gate,
        b.up,
        b.down,
        clamp=b.clamp,
        num_experts=batch.experts,
        group=group,
        tuning=tuning or Tuning(timeout_s=30),
    )
    out.backward(b.d_out)
    return {"out": out.detach(), **b.gradients()}


def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all ranks returned, put together: tokens and experts in rank order."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def expected(batch: Batch) -> dict[str, Tensor]:
    """Output and gradients by the reference, on values widened to fp64 with roundings to the batch's dtype."""
    b = batch.leaves()
    out = reference.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, clamp=b.clamp)
    out.backward(b.d_out)
    return {"out": out.detach(), **b.gradients()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], names: tuple[str, ...] | None = None) -> None:
    """Bit for bit; names the first element that differs."""
    for name in names or tuple(want):
        a, b = got[name], want[name]
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
        if not torch.equal(a, b):
            where = tuple(int(i) for i in (a != b).nonzero()[0])
            raise AssertionError(f"{name}{list(where)}: {a[where].item()!r} against {b[where].item()!r}, {(a != b).sum()} elements differ")


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Relative error in the Frobenius norm, and finite everywhere."""
    for name, b in want.items():
        a = got[name]
        assert a.shape == b.shape, f"{name}: {tuple(a.shape)} against {tuple(b.shape)}"
        assert a.isfinite().all(), f"{name} is not finite"
        error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)
        assert error <= tolerance, f"{name}: relative error {error:.2e} above {tolerance:.0e}"


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""fp64 and fp32 by the accuracy asked for; bf16 and fp16 by two half-steps of their rounding (8 and 11 bits)."""
