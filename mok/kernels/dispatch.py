"""Dispatch: pull rows from the ranks that own their tokens into the ring. Padding rows become zero.

Legend: H hidden, K choices per token; a slot is token * K + k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mok.kernels.experts import rounded_pairs
from mok.kernels.quantize import e4m3_to_fp32, scale_of
from mok.kernels.signals import peer_address

GROUP = tl.constexpr(16)  # rows of a part
AHEAD = tl.constexpr(5)  # parts on their way while one is stored


@triton.jit
def find_tokens(x_ptr, x_ptrs, source, slot, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    """The addresses of rows' tokens. Example, K = 2: a row with source 1 and slot 7 is token 3 of rank 1."""
    offset = (slot // K).to(tl.int64) * H
    if R == 1:
        tokens = x_ptr + offset
    else:
        tokens = peer_address(x_ptrs, tl.maximum(source, 0), x_ptr.dtype.element_ty) + offset
    return tokens


@triton.jit
def load_part(tokens, live, start, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """Columns start .. start + BLOCK_H of rows; zeros where a row is not live."""
    columns = start + tl.arange(0, BLOCK_H)
    mask = live[:, None]
    if H % BLOCK_H != 0:
        mask = mask & (columns < H)[None, :]
    return tl.load(tokens[:, None] + columns[None, :], mask=mask, other=0)


@triton.jit
def store_part(slots, part, start, H: tl.constexpr, BLOCK_H: tl.constexpr):
    columns = start + tl.arange(0, BLOCK_H)
    to = slots[:, None] + columns[None, :]
    if H % BLOCK_H != 0:
        tl.store(to, part, mask=(columns < H)[None, :])
    else:
        tl.store(to, part)


@triton.jit
def pull_rows(
    x_ptr, x_ptrs, ring_ptr, other_ptr, other_ptrs, other_ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, OTHER: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """ring[ring_row + i] = the token of row + i, for i < ROWS; with OTHER the same of another matrix, too.

    In parts of GROUP rows and BLOCK_H columns, several of them on their way at any time.
    """
    MATRICES: tl.constexpr = 2 if OTHER else 1
    WIDE: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    HIGH: tl.constexpr = min(GROUP, ROWS)
    PARTS: tl.constexpr = ROWS // HIGH * MATRICES * WIDE
    lanes = tl.arange(0, HIGH)
    tokens = ()
    slots = ()
    live = ()
    for group in tl.static_range(ROWS // HIGH):
        source = tl.load(peer_rank_ptr + row + group * HIGH + lanes)
        slot = tl.load(peer_token_idx_ptr + row + group * HIGH + lanes)
        at = (ring_row + group * HIGH + lanes).to(tl.int64) * H
        tokens = tokens + (find_tokens(x_ptr, x_ptrs, source, slot, H, K, R),)
        slots = slots + (ring_ptr + at,)
        live = live + (source >= 0,)
        if OTHER:
            tokens = tokens + (find_tokens(other_ptr, other_ptrs, source, slot, H, K, R),)
            slots = slots + (other_ring_ptr + at,)
            live = live + (source >= 0,)
    ahead = ()
    for i in tl.static_range(PARTS + AHEAD):
        if i < PARTS:
            ahead = ahead + (load_part(tokens[i // WIDE], live[i // WIDE], i % WIDE * BLOCK_H, H, BLOCK_H),)
        if i >= AHEAD:
            store_part(slots[(i - AHEAD) // WIDE], ahead[0], (i - AHEAD) % WIDE * BLOCK_H, H, BLOCK_H)
            ahead = ahead[1:]


@triton.jit
def store_codes(ring_ptr, codes, rows, blocks, BLOCKS: tl.constexpr, TILED: tl.constexpr):
    """Codes [M, N] into rows [M, 1] and blocks [1, N] of a ring; see `pull_scales`."""
    STORED: tl.constexpr = (BLOCKS + 3) // 4 * 4 if TILED else BLOCKS
    if TILED:
        to = rows.to(tl.int64) // 128 * (128 * STORED) + rows % 32 * 16 + rows % 128 // 32 * 4 + blocks // 4 * 512 + blocks % 4
    else:
        to = rows.to(tl.int64) * BLOCKS + blocks
    tl.store(ring_ptr + to, codes, mask=blocks < STORED)


@triton.jit
def pull_scales(
    scale_ptr, scale_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
    BLOCKS: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, TILED: tl.constexpr = False,
):  # fmt: skip
    """ring[ring_row + i] = the codes (bytes) of the scales of row + i's token, for i < ROWS; 0 where a row is padding.

    TILED: the ring's codes lie as `mok.quantize.to_tcgen05` has them; those that fill up a tile become 0.
    """
    WIDE: tl.constexpr = triton.next_power_of_2((BLOCKS + 3) // 4 * 4 if TILED else BLOCKS)
    lanes = tl.arange(0, ROWS)
    source = tl.load(peer_rank_ptr + row + lanes)
    slot = tl.load(peer_token_idx_ptr + row + lanes)
    tokens = find_tokens(scale_ptr, scale_ptrs, source, slot, BLOCKS, K, R)
    blocks = tl.arange(0, WIDE)[None, :]
    codes = tl.load(tokens[:, None] + blocks, mask=(source >= 0)[:, None] & (blocks < BLOCKS), other=0)
    store_codes(ring_ptr, codes, (ring_row + lanes)[:, None], blocks, BLOCKS, TILED)


@triton.jit
def widened_blocks(values, codes, BLOCK: tl.constexpr):
    """E4M3 bits [M, N] and codes [M, N / BLOCK] -> bf16 [M, N], exactly, down to bf16's least number.

    Example: 0x2A (0.3125) with code 129 -> 1.25.
    """
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    blocks = tl.reshape(e4m3_to_fp32(values.to(tl.float8e4nv, bitcast=True)), (M, N // BLOCK, BLOCK))
    return rounded_pairs(tl.reshape(blocks * tl.expand_dims(scale_of(codes), 2), (M, N)))


@triton.jit
def pull_widened(
    x_ptr, x_ptrs, scale_ptr, scale_ptrs, ring_ptr, peer_rank_ptr, peer_token_idx_ptr, row, ring_row,
    H: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`pull_rows` of MXFP8, E4M3 bytes and codes, into a ring of bf16."""
    BLOCKS: tl.constexpr = (H + 31) // 32
    WIDE: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    HIGH: tl.constexpr = min(GROUP, ROWS)
    PARTS: tl.constexpr = ROWS // HIGH * WIDE
    lanes = tl.arange(0, HIGH)
    tokens = ()
    scales = ()
    slots = ()
    live = ()
    for group in tl.static_range(ROWS // HIGH):
        source = tl.load(peer_rank_ptr + row + group * HIGH + lanes)
        slot = tl.load(peer_token_idx_ptr + row + group * HIGH + lanes)
        tokens = tokens + (find_tokens(x_ptr, x_ptrs, source, slot, H, K, R),)
        scales = scales + (find_tokens(scale_ptr, scale_ptrs, source, slot, BLOCKS, K, R),)
        slots = slots + (ring_ptr + (ring_row + group * HIGH + lanes).to(tl.int64) * H,)
        live = live + (source >= 0,)
    ahead = ()
    codes = ()
    for i in tl.static_range(PARTS + AHEAD):
        if i < PARTS:
            ahead = ahead + (load_part(tokens[i // WIDE], live[i // WIDE], i % WIDE * BLOCK_H, H, BLOCK_H),)
            codes = codes + (load_part(scales[i // WIDE], live[i // WIDE], i % WIDE * (BLOCK_H // 32), BLOCKS, BLOCK_H // 32),)
        if i >= AHEAD:
            part = widened_blocks(ahead[0], codes[0], 32)
            store_part(slots[(i - AHEAD) // WIDE], part, (i - AHEAD) % WIDE * BLOCK_H, H, BLOCK_H)
            ahead = ahead[1:]
            codes = codes[1:]
