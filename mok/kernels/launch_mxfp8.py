"""The host's side of the forward in MXFP8; `launch_fp8.py` and `launch.py` have the rest. Nothing here reads the device.

The form of the weights says what multiplies:
    `MxExperts`, E4M3 values with codes: tensor cores that multiply by scales (Blackwell), by `forward_mxfp8.py`.
    `WideExperts`, the same numbers as bf16: any tensor cores, by `forward.py`.
bf16 holds every number of MXFP8 whose code is from 3 to 246 (scales from 2^-124 to 2^119). Below, bits under 2^-133 are rounded off; above,
what reaches 2^128 becomes Inf. Both forms have the same wire, E4M3 and codes, and the same arithmetic but for the order of sums.

Legend: T tokens of this rank, H hidden, I intermediate, L experts of this rank, K choices per token.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import torch
from torch import Tensor

from mok.kernels import launch, launch_fp8
from mok.kernels.forward_mxfp8 import forward_mxfp8_kernel
from mok.kernels.launch import ForwardPlan, Saved, Workspace
from mok.kernels.launch_fp8 import BLOCK
from mok.kernels.launcher import Descriptor, cdiv
from mok.kernels.quantize import quantize, snap, widen
from mok.kernels.schedule import DeviceSchedule
from mok.quantize import E4M3, MX_ROW, Quantized, from_tcgen05, scale_shape, to_tcgen05

HOPPER_STAGES = 3  # of the kernel for `MxExperts` on Hopper; with more, a register is spilled in every step
LEAST_HIDDEN = 64  # below, slices of h would be narrower than its blocks


class MxExperts(NamedTuple):
    """Values [L, I, H], [L, I, H] and [L, P, I], each with codes along its rows in the layout of tcgen05 (`mok.quantize.to_tcgen05`).

    P is H filled up with rows of zeros to whole tiles of 128, and at least to two.
    """

    gate: Quantized
    up: Quantized
    down: Quantized

    @staticmethod
    def of(gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor) -> MxExperts:
        """Of bf16 weights. Of a down matrix that is not filled up a copy is made."""
        missing = padded_rows(down_LHI.shape[1]) - down_LHI.shape[1]
        down = torch.nn.functional.pad(down_LHI, (0, 0, 0, missing)) if missing else down_LHI
        return MxExperts(*(quantize(weight, MX_ROW, tcgen05=True) for weight in (gate_LIH, up_LIH, down)))

    @staticmethod
    def of_quantized(gate: Quantized, up: Quantized, down: Quantized) -> MxExperts:
        """Of weights quantized beforehand, with codes in either layout. A down matrix that is not filled up is copied."""
        return MxExperts(tiled(gate), tiled(up), tiled(down, padded_rows(down.values.shape[1])))

    def check(self, hidden: int) -> None:
        """Raises TypeError or ValueError."""
        for name, (values, scale) in self._asdict().items():
            if values.dtype != E4M3 or scale.dtype != torch.uint8:
                raise TypeError(f"{name} has dtypes {values.dtype} and {scale.dtype}: must be {E4M3} and torch.uint8")
            experts, rows, columns = values.shape
            expected = (experts * cdiv(rows, 128), *code_tiles(128, columns)[1:])
            if tuple(scale.shape) != expected:
                raise ValueError(f"{name}: scale has shape {tuple(scale.shape)}: must be {expected} for values {tuple(values.shape)}")
            if not (values.is_contiguous() and scale.is_contiguous()):
                raise ValueError(f"{name}: must be contiguous")
        rows, wanted = self.down.values.shape[1], padded_rows(hidden)
        if rows != wanted:
            raise ValueError(f"down has {rows} rows: must be filled up to {wanted} for hidden_size={hidden}")


class WideExperts(NamedTuple):
    """Weights [L, I, H], [L, I, H], [L, H, I] in bf16 whose elements are numbers of MXFP8 along their rows."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def of(gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor) -> WideExperts:
        return WideExperts(*(snap(weight, MX_ROW) for weight in (gate_LIH, up_LIH, down_LHI)))

    @staticmethod
    def of_quantized(gate: Quantized, up: Quantized, down: Quantized) -> WideExperts:
        """Of weights quantized beforehand, with codes in either layout."""
        return WideExperts(*(widen(*plain(pair), MX_ROW) for pair in (gate, up, down)))


def plain(weight: Quantized) -> Quantized:
    """A weight [L, M, N] with codes [L, M, ceil(N / 32)] in place of those in the layout of tcgen05."""
    rows, blocks = scale_shape(weight.values.shape, MX_ROW)[-2:]
    return weight if weight.scale.dim() == 3 else Quantized(weight.values, from_tcgen05(weight.scale, rows, blocks))


def tiled(weight: Quantized, rows: int = 0) -> Quantized:
    """A weight [L, M, N] with codes in the layout of tcgen05 in place of plain ones, and with rows of zeros behind, up to `rows`."""
    missing = rows - weight.values.shape[1]
    if missing > 0:
        values = torch.nn.functional.pad(weight.values.view(torch.uint8), (0, 0, 0, missing)).view(E4M3)
        weight = Quantized(values, torch.nn.functional.pad(plain(weight).scale, (0, 0, 0, missing)))
    return weight if weight.scale.dim() == 4 else Quantized(weight.values, to_tcgen05(weight.scale))


def experts_for(device: torch.device, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor) -> MxExperts | WideExperts:
    """Quantized bf16 weights in the form that this device multiplies best."""
    return form_for(device).of(gate_LIH, up_LIH, down_LHI)


def form_for(device: torch.device) -> type[MxExperts] | type[WideExperts]:
    return MxExperts if multiplies_by_scales(device) else WideExperts


def multiplies_by_scales(device: torch.device) -> bool:
    """Whether its tensor cores take codes: sm_100 and sm_103."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def padded_rows(hidden: int) -> int:
    """Rows of a down matrix. Example: 7168 -> 7168, 2880 -> 2944, 96 -> 256."""
    return max(cdiv(hidden, BLOCK), 2) * BLOCK


def code_tiles(rows: int, columns: int) -> tuple[int, int, int, int]:
    """The shape of the codes of [rows, columns], in tiles."""
    return cdiv(rows, 128), cdiv(columns, 128), 32, 16


def forward(
    workspace: Workspace,
    rows: DeviceSchedule,
    ids_TK: Tensor,
    weights_TK: Tensor,
    x_TH: Tensor,
    experts: MxExperts | WideExperts,
    num_experts: int,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    clamp: float | None = None,
    shared_clamp: float | None = None,
    shared_scale_T: Tensor | None = None,
    saved_rows: int = 0,
    save: bool = False,
    plan: ForwardPlan | None = None,
    shared_out_TH: Tensor | None = None,
    term_TH: Tensor | None = None,
) -> tuple[Tensor, Saved | None]:
    """`launch.forward` with the routed experts in MXFP8. The workspace's memory has `memory.quantized_regions` with MX_ROW.

    Raises:
        ValueError: H < 64, or `MxExperts` that do not fit.
    """
    if workspace.hidden < LEAST_HIDDEN:
        raise ValueError(f"hidden_size={workspace.hidden}: must be at least {LEAST_HIDDEN} in MXFP8 on a GPU")
    if isinstance(experts, WideExperts):
        return launch.forward(
            workspace, rows, ids_TK, weights_TK, x_TH, *experts, num_experts, shared, clamp, shared_clamp, shared_scale_T, saved_rows, save,
            plan, shared_out_TH, term_TH, mxfp8=True,
        )  # fmt: skip
    experts.check(workspace.hidden)
    cut = plan or ForwardPlan()
    if not multiplies_by_scales(workspace.device):
        cut = dataclasses.replace(cut, num_stages=min(cut.num_stages, HOPPER_STAGES))
    return launch_fp8.run(
        workspace, rows, ids_TK, weights_TK, x_TH, num_experts, MX_ROW, forward_mxfp8_kernel,
        lambda: kernel_arguments(workspace, rows, experts, clamp, saved_rows, save, cut),
        shared, shared_clamp, shared_scale_T, save, cut, shared_out_TH, term_TH,
    )  # fmt: skip


def _codes(tiled: Tensor) -> Descriptor:
    """A descriptor of codes, for one tile of them."""
    return Descriptor(tiled, [1, *tiled.shape[:2], 2, 256], [tiled.numel(), *_strides(tiled)], [1, 1, 1, 2, 256])


def _code_pair(first: Tensor, second: Tensor) -> Descriptor:
    """One descriptor of the codes of two matrices of the same shape; the second one lies behind the first."""
    distance = second.data_ptr() - first.data_ptr()
    return Descriptor(first, [2, *first.shape[:2], 2, 256], [distance, *_strides(first)], [2, 1, 1, 2, 256])


def _next_codes(tiled: Tensor) -> Descriptor:
    """A descriptor of codes in which every tile has a companion, that of the next 128 rows."""
    tiles, across = tiled.shape[:2]
    return Descriptor(tiled, [2, tiles - 1, across, 2, 256], [across * 512, *_strides(tiled)], [2, 1, 1, 2, 256])


def _strides(tiled: Tensor) -> list[int]:
    """Of tiles of 2 x 256 bytes: the tensor cores' memory takes them in this shape."""
    return [tiled.shape[1] * 512, 512, 256, 1]


def kernel_arguments(
    workspace: Workspace, rows: DeviceSchedule, experts: MxExperts, clamp: float | None, saved_rows: int, save: bool, plan: ForwardPlan
) -> tuple[dict[str, object], Saved | None]:
    """Every argument of the kernel by name."""
    gate, up, down = (Quantized(values, scale if scale.numel() else scale.new_zeros(2, 1, 32, 16)) for values, scale in experts)
    arguments, saved = launch_fp8.common_arguments(
        workspace, rows, gate.values.shape[1], code_tiles, clamp, saved_rows, save, plan
    )  # fmt: skip
    gate_up, gate_first = launch._pair(gate.values, up.values, BLOCK, BLOCK)
    first, second = (gate.scale, up.scale) if gate_first else (up.scale, gate.scale)
    if first.data_ptr() >= second.data_ptr():  # a descriptor leads forward
        first, second = torch.stack((first, second))
    weights = dict(
        gate_up_desc=gate_up, gate_first=gate_first, gate_up_scale_desc=_code_pair(first, second),
        down_desc=launch._next_rows(down.values, BLOCK, BLOCK), down_scale_desc=_next_codes(down.scale),
        x_scale_desc=_codes(cast(Tensor, arguments["ring_x_scale_ptr"])), h_scale_desc=_codes(cast(Tensor, arguments["ring_h_scale_ptr"])),
    )  # fmt: skip
    return {**arguments, **weights}, saved
