"""Dispatch: pull rows from the ranks that own their tokens into the ring. Padding rows become zero.

Legend: H hidden, K choices per token; a slot is token * K + k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.signals import peer_address


@triton.jit
def pull_rows(
    x_ptr, x_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """ring[ring_row + i] = the token of row + i, for i < ROWS.

    Example, K = 2: row 5 has peer_rank 1 and peer_token_idx 7, so it is token 3 of rank 1.
    """
    lanes = tl.arange(0, ROWS)
    source = tl.load(peer_rank_ptr + row + lanes)
    slot = tl.load(peer_token_idx_ptr + row + lanes)
    offset = (slot // K).to(tl.int64) * H
    if R == 1:
        tokens = x_ptr + offset
    else:
        tokens = peer_address(x_ptrs, tl.maximum(source, 0), tl.bfloat16) + offset
    slots = ring_ptr + (ring_row + lanes).to(tl.int64) * H
    for start in tl.static_range(0, H, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        inside = (columns < H)[None, :]
        x = tl.load(tokens[:, None] + columns[None, :], mask=(source >= 0)[:, None] & inside, other=0.0)
        tl.store(slots[:, None] + columns[None, :], x, mask=inside)
