"""What the layer is measured against: the best one can write with torch and NCCL, dropless, without atomics.

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, R ranks, N = T * K,
S rows sent, M rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _swiglu(both_N2I: Tensor) -> Tensor:
    gate, up = both_N2I.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _compiled_swiglu(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Compiled for a GPU. Shapes of one process share a cache, which must not run over: what does not fit would run uncompiled."""
    if device.type != "cuda":
        return _swiglu
    torch._dynamo.config.recompile_limit = max(256, torch._dynamo.config.recompile_limit)
    return torch.compile(_swiglu, dynamic=False)


class _Gather(torch.autograd.Function):
    """Row i is the token of slot_S[i]; the backward sums a token's K rows, found by place_N."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, slot_S: Tensor, place_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.shape = (x_TH.shape[0], top_k, x_TH.shape[1])
        return x_TH[slot_S // top_k]

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return d_rows[ctx.saved_tensors[0]].view(ctx.shape).sum(1), None, None, None


class _Reorder(torch.autograd.Function):
    """rows[index]; the backward gathers, too, by the order that leads back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[index]

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return d_rows[ctx.saved_tensors[0]], None, None


def _all_to_all(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class _Exchange(torch.autograd.Function):
    """Rows to their ranks; the backward exchanges the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.received, ctx.sent = received, sent
        return _all_to_all(rows, received, sent)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _all_to_all(d_rows, ctx.sent, ctx.received), None, None


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class TorchLayer:
    """One GPU: stable sort, rows gathered in that order, grouped product, compiled SwiGLU, grouped product, combine by inverse permutation.

    The backward gathers, too. No atomics, no host synchronization.
    """

    name = "torch gather"

    def __init__(self, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor) -> None:
        self.device = gate_LIH.device
        self.num_local = gate_LIH.shape[0]
        self.leaves = [torch.cat([gate_LIH, up_LIH], dim=1).requires_grad_(), down_LHI.detach().requires_grad_()]
        self.swiglu = _compiled_swiglu(self.device)
        self.ids_E = torch.arange(self.num_local, device=self.device, dtype=torch.int16)

    def experts(self, rows_MH: Tensor, ends_L: Tensor) -> Tensor:
        """Rows in the order of experts, expert l's ending before row ends_L[l]; int32."""
        both, down = (leaf.transpose(1, 2) for leaf in self.leaves)
        both_M2I = torch._grouped_mm(rows_MH, both, offs=ends_L)
        return torch._grouped_mm(self.swiglu(both_M2I), down, offs=ends_L)

    def combine(self, y_NH: Tensor, weights_TK: Tensor) -> Tensor:
        tokens, top_k = weights_TK.shape
        return torch.bmm(weights_TK.to(y_NH.dtype)[:, None], y_NH.view(tokens, top_k, -1))[:, 0]

    def sort(self, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Slots sorted by expert, and where each expert's end; int64, int32."""
        sorted_ids, order = ids_TK.reshape(-1).to(torch.int16).sort(stable=True)
        return order, torch.searchsorted(sorted_ids, self.ids_E, right=True, out_int32=True)

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order, ends_E = self.sort(ids_TK)
        inverse = _inverse(order)
        y = self.experts(_Gather.apply(x_TH, order, inverse, ids_TK.shape[1]), ends_E)
        return self.combine(_Reorder.apply(y, inverse, order), weights_TK)

    def step(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, d_y_TH: Tensor) -> list[Tensor]:
        """Forward and backward -> d_x, d_weights, d of gate and up joined [L, 2I, H], d_down."""
        x, weights = x_TH.detach().requires_grad_(), weights_TK.detach().requires_grad_()
        return list(torch.autograd.grad(self(x, ids_TK, weights), [x, weights, *self.leaves], d_y_TH))


@dataclass
class Routes:
    """One exchange of rows.

    slot_S: the slot whose token is each row sent; place_N: the row sent of each slot.
    order_M: received rows in the order of (expert, source, token, k); inverse_M: back.
    ends_L: int32, where each expert's rows end in that order.
    sent, received: rows to and from each rank.
    """

    slot_S: Tensor
    place_N: Tensor
    order_M: Tensor
    inverse_M: Tensor
    ends_L: Tensor
    sent: list[int]
    received: list[int]


class ExchangedLayer(TorchLayer):
    """Expert parallelism over the default process group by all_to_all_single, R of one size dividing E.

    Counts are exchanged on the device. Without a capacity the host reads them once, to know how many rows to send and receive. With one
    (rows of a pair of ranks) nothing is read: every pair exchanges that many rows, and what does not fit would be lost.
    """

    def __init__(self, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, capacity: int | None = None) -> None:
        super().__init__(gate_LIH, up_LIH, down_LHI)
        self.capacity, self.ranks = capacity, dist.get_world_size()
        self.name = "nccl padded" if capacity else "nccl"
        self.ids_E = torch.arange(self.ranks * self.num_local, device=self.device, dtype=torch.int16)
        self.expert_of_RL = self.ids_E[: self.num_local].repeat(self.ranks)
        self.within_RC = torch.arange(capacity or 0, device=self.device).repeat(self.ranks, 1)

    def experts(self, rows_MH: Tensor, ends_L: Tensor) -> Tensor:
        both, down = (leaf.transpose(1, 2) for leaf in self.leaves)
        both_M2I = torch._grouped_mm(rows_MH, both, offs=ends_L)
        if not self.capacity and self.device.type == "cuda":
            torch._dynamo.maybe_mark_dynamic(both_M2I, 0)  # another number of rows in every call must not compile again
        return torch._grouped_mm(self.swiglu(both_M2I), down, offs=ends_L)

    def routes(self, ids_TK: Tensor) -> Routes:
        ranks, local = self.ranks, self.num_local
        order, ends_E = self.sort(ids_TK)
        counts_RL = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).view(ranks, local)
        theirs_RL = torch.empty_like(counts_RL)
        dist.all_to_all_single(theirs_RL, counts_RL)
        ends_L = theirs_RL.sum(0).cumsum(0).to(torch.int32)
        position = _inverse(order)
        if self.capacity is None:
            sent, received = torch.stack([counts_RL.sum(1), theirs_RL.sum(1)]).tolist()  # the one wait for the device
            expert_M = torch.repeat_interleave(self.expert_of_RL, theirs_RL.flatten(), output_size=sum(received))
            slot_S, place_N = order, position
        else:
            capacity = self.capacity
            sent = received = [capacity] * ranks
            start_R = ends_E.view(ranks, local)[:, -1] - counts_RL.sum(1)
            slot_S = order[(start_R[:, None] + self.within_RC).clamp(max=order.numel() - 1)].flatten()
            to = ids_TK.flatten() // local
            place_N = to * capacity + position - start_R[to]
            # Rows past what a source sent belong to expert L, behind all others.
            expert_M = torch.searchsorted(theirs_RL.cumsum(1), self.within_RC, right=True).flatten().to(torch.int16)
        order_M = expert_M.sort(stable=True)[1]
        return Routes(slot_S, place_N, order_M, _inverse(order_M), ends_L, sent, received)

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        r = self.routes(ids_TK)
        rows = _Exchange.apply(_Gather.apply(x_TH, r.slot_S, r.place_N, ids_TK.shape[1]), r.received, r.sent)
        y = self.experts(_Reorder.apply(rows, r.order_M, r.inverse_M), r.ends_L)
        y = _Exchange.apply(_Reorder.apply(y, r.inverse_M, r.order_M), r.sent, r.received)
        return self.combine(_Reorder.apply(y, r.place_N, r.slot_S), weights_TK)


def dense_products(rows: int, hidden: int, width: int, device: torch.device) -> Callable[[], None]:
    """The layer's products as two dense ones of the same size: [N, H] x [H, 2I] and [N, I] x [I, H], by cuBLAS on a GPU."""
    x, h = (torch.randn(rows, size, device=device).bfloat16() for size in (hidden, width))
    both, down = (torch.randn(*size, device=device).bfloat16() for size in ((2 * width, hidden), (hidden, width)))
    y, z = torch.empty(rows, 2 * width, device=device, dtype=x.dtype), torch.empty(rows, hidden, device=device, dtype=x.dtype)

    def run() -> None:
        torch.mm(x, both.T, out=y)
        torch.mm(h, down.T, out=z)

    return run
