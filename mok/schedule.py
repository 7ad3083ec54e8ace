"""ids -> Schedule: which row of which rank is computed where, in integers only.

Every source sorts its routes by expert, stably, once. A destination needs the R x E counts and the sorted lists of its peers, so the cost
does not grow with R. Inside an expert rows are ordered by (source rank, token, k), never by arrival: the same global batch gives the same
rows in the same order for any number of ranks.

Example (tile height 128 replaced by 2): one rank, E=3, K=1, ids = [2, 0, 2, 2] give the order [1, 0, 2, 3] and the counts [1, 0, 3];
the rows are [1, pad | 0, 2 | 3, pad], the tiles belong to experts [0, 2, 2], and expert 1 takes no row.

Legend: T tokens of a rank, K choices per token, E experts in all, L experts of this rank, R ranks, M padded rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mok.config import TILE_M


@dataclass(frozen=True)
class Routes:
    """One source's routes, sorted.

    order: int32 [T * K], the slots (token * K + k) sorted by (expert, token, k), masked slots last.
    counts: int64 [E], routes per expert; their sum is the number of slots that are not masked.
    """

    order: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Schedule:
    """One destination's rows. M is a multiple of the tile height; the first four fields carry the names of the original system.

    peer_rank: int32 [M], source rank of each row, -1 on padding rows.
    peer_token_idx: int32 [M], slot of each row at its source (token * K + k), 0 on padding rows.
    num_tokens: int32 [1], M.
    tokens_per_expert: int32 [L], rows per local expert with their padding.
    routes_per_expert: int32 [L], rows per local expert without padding.
    tile_expert: int32 [M / tile height], local expert of each tile.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor
    routes_per_expert: Tensor
    tile_expert: Tensor


def experts_per_rank(num_experts: int, ranks: int) -> int:
    """Experts of every rank but the last ones: ceil(E / R). Expert e lives on rank e // experts_per_rank, as torch's Shard(0) places it."""
    return -(-num_experts // ranks)


def local_experts(num_experts: int, ranks: int, rank: int) -> range:
    """The global ids of a rank's experts; empty on the last ranks when R does not divide E."""
    step = experts_per_rank(num_experts, ranks)
    return range(min(rank * step, num_experts), min((rank + 1) * step, num_experts))


def sort_routes(ids_TK: Tensor, num_experts: int) -> Routes:
    """Sort a source's routes by expert, stably. ids_TK: int [T, K] in -1..E-1, -1 masks a slot."""
    flat = ids_TK.reshape(-1).to(torch.int64)
    key = torch.where(flat < 0, num_experts, flat)
    order = torch.argsort(key, stable=True).to(torch.int32)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    return Routes(order, counts)


def build_schedule(counts_RE: Tensor, orders: list[Tensor], experts: range, tile_m: int = TILE_M) -> Schedule:
    """The rows of the rank that owns `experts`, from every source's counts (int64 [R, E]) and sorted slots (R tensors of int32)."""
    counts_RL = counts_RE[:, experts.start : experts.stop]
    starts_RL = counts_RE.cumsum(1)[:, experts.start : experts.stop] - counts_RL
    routes_L = counts_RL.sum(0)
    padded_L = (routes_L + tile_m - 1) // tile_m * tile_m
    first_row_L = padded_L.cumsum(0) - padded_L
    first_row_RL = first_row_L + counts_RL.cumsum(0) - counts_RL  # of a source's rows within each expert

    rows = int(padded_L.sum())
    peer_rank = torch.full((rows,), -1, dtype=torch.int32)
    peer_token_idx = torch.zeros(rows, dtype=torch.int32)
    for source, order in enumerate(orders):
        counts_L, starts_L, rows_L = counts_RL[source], starts_RL[source], first_row_RL[source]
        total = int(counts_L.sum())
        if total == 0:
            continue
        within = torch.arange(total) - torch.repeat_interleave(counts_L.cumsum(0) - counts_L, counts_L)
        row = torch.repeat_interleave(rows_L, counts_L) + within
        peer_rank[row] = source
        peer_token_idx[row] = order[torch.repeat_interleave(starts_L, counts_L) + within]
    tile_expert = torch.repeat_interleave(torch.arange(len(experts)), padded_L // tile_m)
    return Schedule(
        peer_rank=peer_rank,
        peer_token_idx=peer_token_idx,
        num_tokens=torch.tensor([rows], dtype=torch.int32),
        tokens_per_expert=padded_L.to(torch.int32),
        routes_per_expert=routes_L.to(torch.int32),
        tile_expert=tile_expert.to(torch.int32),
    )
