"""What the layer is measured against: the best one can write with torch alone, without atomics and without a host synchronization.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token, N = T * K.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _swiglu(both_N2I: Tensor) -> Tensor:
    gate, up = both_N2I.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class TorchLayer:
    """Stable sort, rows gathered in sorted order, grouped product, compiled SwiGLU, grouped product, combine by inverse permutation."""

    name = "torch gather"

    def __init__(self, gate_EIH: Tensor, up_EIH: Tensor, down_EHI: Tensor) -> None:
        self.both_EH2I = torch.cat([gate_EIH, up_EIH], dim=1).transpose(1, 2)
        self.down_EIH = down_EHI.transpose(1, 2)
        self.experts = torch.arange(gate_EIH.shape[0], device=gate_EIH.device, dtype=torch.int16)
        self.swiglu = torch.compile(_swiglu, dynamic=False)

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        tokens, top_k = ids_TK.shape
        sorted_ids, order = ids_TK.reshape(-1).to(torch.int16).sort(stable=True)
        ends = torch.searchsorted(sorted_ids, self.experts, right=True).to(torch.int32)
        rows_NH = x_TH[order // top_k]
        y_NH = torch._grouped_mm(self.swiglu(torch._grouped_mm(rows_NH, self.both_EH2I, offs=ends)), self.down_EIH, offs=ends)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return torch.bmm(weights_TK.to(x_TH.dtype)[:, None], y_NH[inverse].view(tokens, top_k, -1))[:, 0]


def dense_products(rows: int, hidden: int, width: int, device: torch.device) -> Callable[[], None]:
    """The layer's products as two dense ones of the same size: [N, H] x [H, 2I] and [N, I] x [I, H], by cuBLAS."""
    x, h = (torch.randn(rows, size, device=device).bfloat16() for size in (hidden, width))
    both, down = (torch.randn(*size, device=device).bfloat16() for size in ((2 * width, hidden), (hidden, width)))
    y, z = torch.empty(rows, 2 * width, device=device, dtype=x.dtype), torch.empty(rows, hidden, device=device, dtype=x.dtype)

    def run() -> None:
        torch.mm(x, both.T, out=y)
        torch.mm(h, down.T, out=z)

    return run
