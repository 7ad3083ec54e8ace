"""The routed experts with PyTorch alone: what `mok train --moe torch` trains with, and what the layer is timed against.

An ordinary layer, written with care: slots sorted by expert (stable), rows gathered in that order, one grouped product for gate and up
(their weights are stored as one tensor, so nothing is concatenated), SwiGLU, one grouped product down, rows back in the order of slots,
weighted sum by a batched product. Nothing waits for the device, and the gradients of both gathers are gathers (a sum over a token's K rows,
found by the inverse order), not additions by atomics; so it, too, gives the same bits in every run. Autograd does the rest. SwiGLU is
eager, or compiled and then fused into one kernel.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token, N = T * K rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mok.config import MoEConfig
from mok.layer import SharedExperts
from mok.router import Router


class _Sorted(torch.autograd.Function):
    """Rows of x [T, H] in the order of sorted slots [N, H]; a token's gradient is the sum of its K rows'."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order_N: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_TK)
        return x_TH[order_N // inverse_TK.shape[1]]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_rows_NH: Tensor) -> tuple[Tensor, None, None]:
        (inverse_TK,) = ctx.saved_tensors
        return d_rows_NH[inverse_TK].sum(1), None, None


class _Unsorted(torch.autograd.Function):
    """Rows [N, H] back in the order of slots [T, K, H]."""

    @staticmethod
    def forward(ctx: Any, y_NH: Tensor, order_N: Tensor, inverse_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return y_NH[inverse_TK]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_y_TKH: Tensor) -> tuple[Tensor, None, None]:
        (order_N,) = ctx.saved_tensors
        return d_y_TKH.flatten(0, 1)[order_N], None, None


def _swiglu(both_N2I: Tensor) -> Tensor:
    gate, up = both_N2I.chunk(2, dim=-1)
    return F.silu(gate) * up


class TorchMoE(nn.Module):
    """The part of `mok.MoE` that a training loop uses, for one rank, with one tensor for gate and up.

    Parameters: both_E2IH [E, 2I, H] (gate first), down_EHI [E, H, I], and those of `router` and `shared`, which are the layer's own.
    None has values before the caller sets them. tokens_per_expert: int64 [E], as in `mok.MoE`.
    """

    tokens_per_expert: Tensor
    _ids_E: Tensor

    def __init__(
        self,
        config: MoEConfig,
        *,
        compiled: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if config.clamp is not None:
            raise ValueError(f"clamp={config.clamp}: must be None")
        experts, hidden, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.config = config
        self.router = Router(config, dtype=dtype, device=device)
        self.shared = SharedExperts(config, dtype=dtype, device=device) if config.num_shared_experts else None
        self.both_E2IH = nn.Parameter(torch.empty(experts, 2 * width, hidden, dtype=dtype, device=device))
        self.down_EHI = nn.Parameter(torch.empty(experts, hidden, width, dtype=dtype, device=device))
        self.register_buffer("tokens_per_expert", torch.zeros(experts, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("_ids_E", torch.arange(experts, dtype=torch.int16, device=device), persistent=False)
        self._swiglu = torch.compile(_swiglu, dynamic=False) if compiled else _swiglu

    @property
    def gate_EIH(self) -> Tensor:
        return self.both_E2IH[:, : self.config.intermediate_size]

    @property
    def up_EIH(self) -> Tensor:
        return self.both_E2IH[:, self.config.intermediate_size :]

    def routed(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, shared: Tensor | None = None) -> Tensor:
        """shared + sum_k w_k * expert_{ids_k}(x) [T, H], as `mok.MoE.routed` but for where it rounds. ids: int64, none masked."""
        sorted_ids_N, order_N = ids_TK.flatten().to(torch.int16).sort(stable=True)
        ends_E = torch.searchsorted(sorted_ids_N, self._ids_E, right=True).to(torch.int32)
        inverse_TK = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device)).view_as(ids_TK)
        rows_NH = _Sorted.apply(x_TH, order_N, inverse_TK)
        h_NI = self._swiglu(torch._grouped_mm(rows_NH, self.both_E2IH.transpose(1, 2), offs=ends_E))
        y_TKH = _Unsorted.apply(torch._grouped_mm(h_NI, self.down_EHI.transpose(1, 2), offs=ends_E), order_N, inverse_TK)
        out_TH = torch.bmm(weights_TK.to(x_TH.dtype)[:, None], y_TKH)[:, 0]
        if self.training and torch.is_grad_enabled():
            self.tokens_per_expert.copy_(ends_E.diff(prepend=ends_E.new_zeros(1)))
        return out_TH if shared is None else shared + out_TH

    def update_bias(self, rate: float) -> None:
        """As `mok.MoE.update_bias`."""
        self.router.update_bias(self.tokens_per_expert, rate)
