"""The host's side of the backward in MXFP8; `launch_backward.py` has the rest. Nothing here reads the device.

Legend: T tokens of this rank, H hidden, I intermediate, L experts of this rank, K choices per token, R ranks, S width of the shared experts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mok.config import TILE_M
from mok.kernels import launch_backward
from mok.kernels.launch import Saved, Workspace
from mok.kernels.launch_backward import BackwardPlan, Gradients, Needs
from mok.kernels.launch_mxfp8 import LEAST_HIDDEN
from mok.kernels.quantize import snap
from mok.kernels.schedule import DeviceSchedule
from mok.quantize import MX_COLUMN, MX_ROW


class WideTransposed(NamedTuple):
    """Weights [L, I, H], [L, I, H], [L, H, I] in bf16 whose elements are numbers of MXFP8 along their columns, as the products of the
    backward contract them. The forward's are others (`launch_mxfp8.WideExperts`).

    gate and up: d_x alone reads them.
    """

    gate: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def of(gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, need_x: bool = True) -> WideTransposed:
        gate, up = (snap(weight, MX_COLUMN) if need_x else weight for weight in (gate_LIH, up_LIH))
        return WideTransposed(gate, up, snap(down_LHI, MX_COLUMN))


def backward(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, ids_TK: Tensor, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor,
    gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, num_experts: int, needs: Needs | None = None, plan: BackwardPlan | None = None,
    transposed: WideTransposed | None = None, **options: object,
) -> Gradients:  # fmt: skip
    """`launch_backward.backward` with the routed experts in MXFP8, of bf16 weights. The workspace's memory has
    `memory.quantized_backward_regions` with MX_ROW.

    transposed: what was made of the weights before; else it is made here. Gate and up as the forward multiplies by them are made here if
    there may be rows of which nothing was saved, and on the device only if there are.

    Raises:
        ValueError: H < 64.
    """
    if workspace.hidden < LEAST_HIDDEN:
        raise ValueError(f"hidden_size={workspace.hidden}: must be at least {LEAST_HIDDEN} in MXFP8 on a GPU")
    needs = needs or Needs()
    numbers = transposed or WideTransposed.of(gate_LIH, up_LIH, down_LHI, needs.x)
    again = gate_up_again(rows, saved, gate_LIH, up_LIH)
    return launch_backward.backward(
        workspace, rows, saved, ids_TK, d_y_TH, x_TH, weights_TK, *numbers, num_experts, needs, plan, mxfp8=True, gate_up_again=again,
        **options,
    )  # fmt: skip


def gate_up_again(rows: DeviceSchedule, saved: Saved, gate_LIH: Tensor, up_LIH: Tensor) -> tuple[Tensor, Tensor] | None:
    """Gate and up as numbers of MXFP8 along their rows, where they may be needed."""
    saved_tiles = saved.gate_CI.shape[0] // TILE_M
    if saved_tiles >= rows.tile_expert.numel():
        return None
    unsaved = dict(count=rows.num_tokens, least=saved_tiles * TILE_M + 1)
    gate, up = (snap(weight, MX_ROW, **unsaved) for weight in (gate_LIH, up_LIH))  # type: ignore[arg-type]
    return gate, up
