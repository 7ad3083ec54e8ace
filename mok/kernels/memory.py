"""The peer-visible bytes of a rank on the GPU: one buffer, cut into named regions, and the table of every region's address on every rank.

Three ways to get the buffer, one map: one rank alone (or several virtual ranks of one process, for tests), and torch's symmetric memory.

Legend: T tokens of a rank (its largest value over the ranks), H hidden, E experts in all, K choices per token, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.fabric import Region, SymmetricFabric, region_offsets
from mok.quantize import FP8_ROW, MX_ROW, Block, Precision, scale_shape

# Words of the control region (int32). HOST: the address (two words) of host memory for two records that the kernels can write: the report,
# which is the same on every rank, and this rank's own. A record: a state (0 none, 1 being written, 2 complete) followed by five values.
ABORT, EPOCH, HOST, REPORT, OWN, FLAGS = 0, 1, 2, 8, 16, 32
RECORD_WORDS = 6
GENERATION = 1 << 20
REPORT_FIELDS = ("rank", "task", "what", "expected", "found")

# What a wait was waiting for; an index into these names is what a report carries.
STATES = ("barrier", "x_ready", "h_ready", "h_free", "x_free", "expert id", "gate_ready", "d_gate_ready", "group_ready", "group_done")


def regions(max_tokens: int, hidden: int, num_experts: int, top_k: int, ranks: int, bf16: bool = True) -> list[Region]:
    """The map. `counts` and `starts` are a source's routes per expert and their exclusive sum; `order` its slots sorted by expert.

    bf16: whether x is published so; else it has no rows here (`quantized_regions`).
    """
    slots = max_tokens * top_k
    return [
        Region("control", (FLAGS + ranks,), torch.int32),
        Region("counts", (num_experts,), torch.int32),
        Region("starts", (num_experts,), torch.int32),
        Region("order", (slots,), torch.int32),
        Region("x", (max_tokens if bf16 else 0, hidden), torch.bfloat16),
        Region("combine", (slots, hidden), torch.bfloat16),
    ]


def backward_regions(max_tokens: int, hidden: int, num_experts: int, top_k: int, ranks: int) -> list[Region]:
    """What forward and backward need: `combine` also receives d_x; `weights` and `d_weights` are the router's, one per slot."""
    slots = max_tokens * top_k
    return [
        *regions(max_tokens, hidden, num_experts, top_k, ranks),
        Region("d_y", (max_tokens, hidden), torch.bfloat16),
        Region("weights", (slots,), torch.float32),
        Region("d_weights", (slots,), torch.float32),
    ]


def quantized_regions(max_tokens: int, hidden: int, block: Block = FP8_ROW) -> list[Region]:
    """x as E4M3 values and E8M0 codes, beside `regions` without bf16. block: MX_ROW or FP8_ROW."""
    return [
        Region("x_e4m3", (max_tokens, hidden), torch.uint8),
        Region("x_scale", scale_shape((max_tokens, hidden), block), torch.uint8),
    ]


def quantized_backward_regions(
    max_tokens: int, hidden: int, num_experts: int, top_k: int, ranks: int, block: Block = FP8_ROW
) -> list[Region]:
    """`backward_regions` with x and dY as E4M3 values and E8M0 codes. Those of `backward_regions` have no rows."""
    slots = max_tokens * top_k
    return [
        *regions(max_tokens, hidden, num_experts, top_k, ranks, bf16=False),
        *quantized_regions(max_tokens, hidden, block),
        Region("d_y_e4m3", (max_tokens, hidden), torch.uint8),
        Region("d_y_scale", scale_shape((max_tokens, hidden), block), torch.uint8),
        Region("weights", (slots,), torch.float32),
        Region("d_weights", (slots,), torch.float32),
        Region("d_y", (0, hidden), torch.bfloat16),
    ]


def common_regions(max_tokens: int, hidden: int, num_experts: int, top_k: int, ranks: int) -> list[Region]:
    """What layers of any format need, one after the other: x and dY in bf16 and as E4M3, with the most codes, those of MX_ROW."""
    codes = scale_shape((max_tokens, hidden), MX_ROW)
    return [
        *backward_regions(max_tokens, hidden, num_experts, top_k, ranks),
        *quantized_regions(max_tokens, hidden, MX_ROW),
        Region("d_y_e4m3", (max_tokens, hidden), torch.uint8),
        Region("d_y_scale", codes, torch.uint8),
    ]


def layer_regions(precision: Precision, max_tokens: int, hidden: int, num_experts: int, top_k: int, ranks: int) -> list[Region]:
    """What a layer with experts in this format needs."""
    sizes = (max_tokens, hidden, num_experts, top_k, ranks)
    if precision == "bf16":
        return backward_regions(*sizes)
    return quantized_backward_regions(*sizes, MX_ROW if precision == "mxfp8" else FP8_ROW)


@dataclass
class PeerMemory:
    """One rank's view: its own regions as tensors, and `addresses[name]`, int64 [R] on the device, the region's address on every rank."""

    rank: int
    size: int
    buffer: Tensor
    own: dict[str, Tensor]
    addresses: dict[str, Tensor]
    host: Tensor
    words: Any  # the same memory, which is looked at several times in every call
    handle: Any = None

    def failure(self) -> tuple[dict[str, int], dict[str, int] | None] | None:
        """The report that ended a call of this rank, if one did, and what this rank itself lacked then. Reads host memory only: no
        synchronization."""
        if not self.words[0]:
            return None
        report, own = (dict(zip(REPORT_FIELDS, record[1:], strict=True)) for record in self.host.view(2, RECORD_WORDS).tolist())
        return report, own if int(self.host[RECORD_WORDS]) else None

    def clear_failure(self) -> None:
        """Make the next call an ordinary one, on every rank that does this once for the failure.

        Ranks may have come to different numbers of barriers in the failed call, so all begin a new generation of a million of them.
        """
        self.host.zero_()
        epoch = self.own["control"][EPOCH]
        epoch.copy_((epoch // GENERATION + 1) * GENERATION)
        self.own["control"][ABORT].zero_()
        self.own["control"][REPORT:FLAGS].zero_()


def _view(buffer: Tensor, layout: Sequence[Region], rank: int, bases: Sequence[int], handle: Any = None) -> PeerMemory:
    offsets, _ = region_offsets(layout)
    own = {r.name: buffer[offsets[r.name] : offsets[r.name] + r.nbytes].view(r.dtype).view(r.shape) for r in layout}
    table = torch.tensor([[base + offsets[r.name] for base in bases] for r in layout], dtype=torch.int64, device=buffer.device)
    cuda = buffer.device.type == "cuda"
    host = torch.zeros(2 * RECORD_WORDS, dtype=torch.int32, pin_memory=cuda)
    if not cuda:
        host.share_memory_()
    own["control"][HOST : HOST + 2].copy_(torch.tensor([host.data_ptr()], dtype=torch.int64).view(torch.int32))
    return PeerMemory(rank, len(bases), buffer, own, {r.name: table[i] for i, r in enumerate(layout)}, host, host.numpy(), handle)


def virtual_memory(layout: Sequence[Region], ranks: int, device: torch.device) -> list[PeerMemory]:
    """The views of all ranks of one process; with one rank, plain local memory."""
    _, total = region_offsets(layout)
    buffers = [torch.zeros(total, dtype=torch.uint8, device=device) for _ in range(ranks)]
    if device.type == "cpu":  # the interpreter runs every program as a process of its own
        buffers = [buffer.share_memory_() for buffer in buffers]
    bases = [buffer.data_ptr() for buffer in buffers]
    return [_view(buffer, layout, rank, bases) for rank, buffer in enumerate(buffers)]


def symmetric_memory(layout: Sequence[Region], group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    """This process's view over torch's symmetric memory; collective over the group, and every rank passes the same layout."""
    fabric = SymmetricFabric(group, layout, device)
    return _view(fabric.bytes, layout, fabric.rank, fabric.bases, fabric)
