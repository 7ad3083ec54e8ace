"""ids -> rows, on the device: no host read, no atomic that decides an order, tables of the worst-case size (a few MB of integers).

Each source sorts its slots by expert, stably: `count` counts a block of slots per expert, `scan` sums the blocks' counts, some experts per
program, `place` writes each slot to its position. After a barrier each destination reads its peers' counts and sorted slots and writes its
rows (`rows`). The rows are those of `mok.schedule.build_schedule`.

Example (tile height 128 replaced by 2): one rank, E=3, K=1, ids = [2, 0, 2, 2]. count: [1, 0, 3]; starts: [0, 1, 1]; order: [1, 0, 2, 3];
rows: [1, pad | 0, 2 | 3, pad]; the tiles belong to experts [0, 2, 2].

Legend: N slots of a source (tokens * K), E experts in all, L experts of this rank, R ranks, M padded rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mok.config import TILE_M
from mok.kernels.launcher import cdiv, enqueue, next_power_of_2
from mok.kernels.memory import PeerMemory
from mok.kernels.signals import EXPERT_ID, peer_address, report, tell_host
from mok.schedule import local_experts

BLOCK_N = 128  # slots of a block
SCANNED_BLOCKS, SCANNED_EXPERTS = 256, 16  # at a time


@triton.jit
def narrow(ids):
    """int64 -> int32, those beyond as the nearest one: no wrong id becomes a right one."""
    return tl.minimum(tl.maximum(ids, -(2**31)), 2**31 - 1).to(tl.int32)


@triton.jit(do_not_specialize=["rank", "num_slots"], do_not_specialize_on_alignment=["ids_ptr"])
def count_kernel(
    ids_ptr, block_counts_ptr, control_ptrs, rank, num_slots,
    E: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """block_counts[block, e] = slots of this block with id e. An id outside -1..E-1 is reported and treated as masked."""
    block = tl.program_id(0)
    slots = block * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = narrow(tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1))
    bins = tl.arange(0, BINS)
    counts = tl.histogram(tl.where((ids >= 0) & (ids < E), ids, E), BINS)
    tl.store(block_counts_ptr + block * E + bins, counts, mask=bins < E)
    wrong = (ids < -1) | (ids >= E)
    if tl.max(wrong.to(tl.int32), axis=0) > 0:
        first = tl.min(tl.where(wrong, slots, num_slots), axis=0)
        found = narrow(tl.load(ids_ptr + first))
        report(control_ptrs, rank, first, EXPERT_ID, E - 1, found, R)
        tell_host(peer_address(control_ptrs, rank, tl.int32))


@triton.jit(do_not_specialize=["num_blocks"])
def scan_kernel(block_counts_ptr, counts_ptr, num_blocks, E: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """block_counts becomes its exclusive sum over blocks, counts the totals. A program does BLOCK_E experts."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for block in range(0, num_blocks, BLOCK_B):
        blocks = block + tl.arange(0, BLOCK_B)
        where = block_counts_ptr + blocks[:, None] * E + experts[None, :]
        inside = (blocks < num_blocks)[:, None] & (experts < E)[None, :]
        counts = tl.load(where, mask=inside, other=0)
        tl.store(where, tl.cumsum(counts, axis=0) - counts + total[None, :], mask=inside)
        total += tl.sum(counts, axis=0)
    tl.store(counts_ptr + experts, total, mask=experts < E)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["ids_ptr"])
def place_kernel(
    ids_ptr, block_counts_ptr, counts_ptr, starts_ptr, order_ptr, num_slots,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """order[start of its expert + equal ids of earlier blocks + equal ids earlier in this block] = slot. starts: counts' exclusive sum."""
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + experts, mask=experts < E, other=0)
    starts = tl.cumsum(counts, axis=0) - counts
    if block == 0:
        tl.store(starts_ptr + experts, starts, mask=experts < E)
    slots = block * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = narrow(tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1))
    live = (ids >= 0) & (ids < E)
    earlier = tl.zeros((BLOCK_N,), tl.int32)
    for chunk in range(0, BLOCK_N, CHUNK):
        others = block * BLOCK_N + chunk + tl.arange(0, CHUNK)
        other_ids = narrow(tl.load(ids_ptr + others, mask=others < num_slots, other=-1))
        same = (other_ids[:, None] == ids[None, :]) & (others[:, None] < slots[None, :])
        earlier += tl.sum(same.to(tl.int32), axis=0)
    start = tl.gather(starts, tl.where(live, ids, 0), 0) + tl.load(block_counts_ptr + block * E + ids, mask=live, other=0)
    tl.store(order_ptr + start + earlier, slots, mask=live)


@triton.jit(do_not_specialize=["first", "num_local"])
def rows_kernel(
    counts_ptrs, starts_ptrs, order_ptrs, peer_rank_ptr, peer_token_idx_ptr, num_tokens_ptr, tokens_per_expert_ptr, routes_per_expert_ptr,
    tile_expert_ptr, first, num_local, R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The rows of the rank that owns experts first .. first + L, a tile per program and turn, by (expert, source, token, k)."""
    experts = tl.arange(0, BLOCK_L)
    ranks = tl.arange(0, BLOCK_R)
    owned = (ranks < R)[:, None] & (experts < num_local)[None, :]
    counts_of = tl.load(counts_ptrs + ranks, mask=ranks < R, other=0).to(tl.pointer_type(tl.int32))
    counts_RL = tl.load(counts_of[:, None] + first + experts[None, :], mask=owned, other=0)
    routes_L = tl.sum(counts_RL, axis=0)
    tiles_L = (routes_L + BLOCK_M - 1) // BLOCK_M
    end_L = tl.cumsum(tiles_L, axis=0)
    num_tiles = tl.sum(tiles_L, axis=0)
    if tl.program_id(0) == 0:
        tl.store(num_tokens_ptr, num_tiles * BLOCK_M)
        tl.store(tokens_per_expert_ptr + experts, tiles_L * BLOCK_M, mask=experts < num_local)
        tl.store(routes_per_expert_ptr + experts, routes_L, mask=experts < num_local)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert = tl.sum((end_L <= tile).to(tl.int32), axis=0)
        first_tile = tl.sum(tl.where(experts < expert, tiles_L, 0), axis=0)
        position = (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)  # within the expert, all sources
        source = tl.zeros((BLOCK_M,), tl.int32) - 1
        slot = tl.zeros((BLOCK_M,), tl.int32)
        before = 0
        for rank in range(R):
            count = tl.load(peer_address(counts_ptrs, rank, tl.int32) + first + expert)
            start = tl.load(peer_address(starts_ptrs, rank, tl.int32) + first + expert)
            mine = (position >= before) & (position < before + count)
            order = peer_address(order_ptrs, rank, tl.int32) + start
            slot = tl.where(mine, tl.load(order + position - before, mask=mine, other=0), slot)
            source = tl.where(mine, rank, source)
            before += count
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(peer_rank_ptr + row, source)
        tl.store(peer_token_idx_ptr + row, slot)
        tl.store(tile_expert_ptr + tile, expert)


@dataclass
class DeviceSchedule:
    """`mok.schedule.Schedule` in tables of the worst-case size: only the first num_tokens rows and their tiles are written."""

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor
    routes_per_expert: Tensor
    tile_expert: Tensor


def max_tiles(max_tokens: int, top_k: int, ranks: int, num_local: int, tile_m: int = TILE_M) -> int:
    """Tiles of a rank when every route of every rank goes to it: whole tiles, and one started tile more for each expert."""
    return ranks * max_tokens * top_k // tile_m + num_local


def schedule_sizes(tiles: int, num_local: int, tile_m: int = TILE_M) -> tuple[int, ...]:
    """Elements of each field of a DeviceSchedule."""
    return (tiles * tile_m, tiles * tile_m, 1, num_local, num_local, tiles)


def empty_schedule(tiles: int, num_local: int, device: torch.device, tile_m: int = TILE_M) -> DeviceSchedule:
    fields = [torch.empty(size, dtype=torch.int32, device=device) for size in schedule_sizes(tiles, num_local, tile_m)]
    if device.type == "cpu":
        fields = [field.share_memory_() for field in fields]
    return DeviceSchedule(*fields)


def sort_slots(memory: PeerMemory, ids_TK: Tensor, num_experts: int) -> None:
    """Write this source's counts, starts and order to its peer-visible memory. ids_TK: integers, contiguous."""
    num_slots = ids_TK.numel()
    num_blocks = cdiv(num_slots, BLOCK_N)
    block_counts = torch.empty(max(num_blocks, 1), num_experts, dtype=torch.int32, device=ids_TK.device)
    if num_blocks:
        enqueue(
            count_kernel, (num_blocks,),
            ids_TK, block_counts, memory.addresses["control"], memory.rank, num_slots,
            E=num_experts, R=memory.size, BLOCK_N=BLOCK_N, BINS=next_power_of_2(num_experts + 1),
        )  # fmt: skip
    enqueue(
        scan_kernel, (cdiv(num_experts, SCANNED_EXPERTS),),
        block_counts, memory.own["counts"], num_blocks,
        E=num_experts, BLOCK_B=SCANNED_BLOCKS, BLOCK_E=SCANNED_EXPERTS, num_warps=8,
    )  # fmt: skip
    enqueue(
        place_kernel, (max(num_blocks, 1),),
        ids_TK, block_counts, memory.own["counts"], memory.own["starts"], memory.own["order"], num_slots,
        E=num_experts, BLOCK_E=next_power_of_2(num_experts), BLOCK_N=BLOCK_N, CHUNK=64, num_warps=4,
    )  # fmt: skip


def write_rows(memory: PeerMemory, schedule: DeviceSchedule, num_experts: int, num_programs: int, tile_m: int = TILE_M) -> None:
    """Write this destination's rows; every peer's counts, starts and order must be there (a barrier stands before)."""
    experts = local_experts(num_experts, memory.size, memory.rank)
    enqueue(
        rows_kernel, (num_programs,),
        memory.addresses["counts"], memory.addresses["starts"], memory.addresses["order"],
        schedule.peer_rank, schedule.peer_token_idx, schedule.num_tokens, schedule.tokens_per_expert, schedule.routes_per_expert,
        schedule.tile_expert, first=experts.start, num_local=len(experts), R=memory.size, BLOCK_M=tile_m,
        BLOCK_L=next_power_of_2(max(len(experts), 1)), BLOCK_R=next_power_of_2(memory.size),
    )  # fmt: skip
