"""The schedule: four numbers by hand, then every row against a slow loop."""

from __future__ import annotations

import pytest
import torch

from mok.schedule import build_schedule, experts_per_rank, local_experts, sort_routes


def test_four_numbers():
    routes = sort_routes(torch.tensor([[2], [0], [2], [2]]), 3)
    assert routes.order.tolist() == [1, 0, 2, 3]
    assert routes.counts.tolist() == [1, 0, 3]
    schedule = build_schedule(routes.counts[None], [routes.order], range(3), tile_m=2)
    assert schedule.peer_rank.tolist() == [0, -1, 0, 0, 0, -1]
    assert schedule.peer_token_idx.tolist() == [1, 0, 0, 2, 3, 0]
    assert schedule.num_tokens.tolist() == [6]
    assert schedule.tokens_per_expert.tolist() == [2, 0, 4]
    assert schedule.routes_per_expert.tolist() == [1, 0, 3]
    assert schedule.tile_expert.tolist() == [0, 2, 2]


def slow_rows(ids_per_rank, experts, tile_m):
    """[(rank, slot)] by four loops; (-1, 0) pads."""
    rows, tiles = [], []
    for local, expert in enumerate(experts):
        mine = [
            (rank, token * ids.shape[1] + k)
            for rank, ids in enumerate(ids_per_rank)
            for token in range(ids.shape[0])
            for k in range(ids.shape[1])
            if ids[token, k] == expert
        ]
        mine += [(-1, 0)] * (-len(mine) % tile_m)
        rows += mine
        tiles += [local] * (len(mine) // tile_m)
    return rows, tiles


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_experts", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_against_loops(size, num_experts, dtype):
    tokens = [3 * rank % 7 for rank in range(size)]  # rank 0 has none
    ids = [torch.randint(-1, num_experts, (t, 3), dtype=dtype) for t in tokens]
    routes = [sort_routes(i, num_experts) for i in ids]
    counts = torch.stack([r.counts for r in routes])
    assert int(counts.sum()) == sum(int((i >= 0).sum()) for i in ids)
    seen = []
    for rank in range(size):
        experts = local_experts(num_experts, size, rank)
        schedule = build_schedule(counts, [r.order for r in routes], experts, tile_m=4)
        rows, tiles = slow_rows(ids, experts, 4)
        assert list(zip(schedule.peer_rank.tolist(), schedule.peer_token_idx.tolist(), strict=True)) == rows
        assert schedule.tile_expert.tolist() == tiles
        assert int(schedule.num_tokens) == len(rows) == int(schedule.tokens_per_expert.sum())
        seen += [row for row in rows if row[0] >= 0]
    assert len(set(seen)) == len(seen) == int(counts.sum())  # every route is computed once


@pytest.mark.parametrize(
    "num_experts, size, expected", [(8, 4, [2, 2, 2, 2]), (20, 6, [4, 4, 4, 4, 4, 0]), (20, 8, [3] * 6 + [2, 0]), (3, 4, [1, 1, 1, 0])]
)
def test_experts_are_placed_as_torch_shards_them(num_experts, size, expected):
    ranges = [local_experts(num_experts, size, rank) for rank in range(size)]
    assert [len(r) for r in ranges] == expected
    assert [e for r in ranges for e in r] == list(range(num_experts))
    chunks = torch.arange(num_experts).chunk(size)
    assert [list(r) for r in ranges if len(r)] == [chunk.tolist() for chunk in chunks]
    assert all(e // experts_per_rank(num_experts, size) == rank for rank, r in enumerate(ranges) for e in r)
