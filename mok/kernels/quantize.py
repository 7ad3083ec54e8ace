"""bf16 to MXFP8 and blockwise FP8 on the GPU, with the bits of `mok.quantize`.

One kernel for every block: a program takes a tile of 128 x 128 elements, which whole blocks fill. Columns are rows of the transpose, so a
transposed copy is made by passing the transpose, whose strides are read as they are.

The functions of one tile serve the layer's kernels as well, in the epilogue of h, d_gate and d_up.

Legend: M rows, N columns, E experts, B blocks along a row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mok.kernels.launcher import cdiv, enqueue
from mok.kernels.signals import INTERPRETING
from mok.quantize import E4M3, MX_ROW, Block, Quantized, scale_shape

TILE = 128


@triton.jit
def e4m3(value):
    """fp32 of at most 448 -> E4M3 bits (uint8), to nearest even; NaN -> 0x7F.

    Example: 0.3 -> 0x2A (0.3125); 2^-10 -> 0, the even one of 0 and 2^-9; -0.0 -> 0x80.
    """
    if INTERPRETING:  # it would round half up, and lose a carry
        bits = value.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0  # whose last bit is 2^-9
        subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # 2^-6
        result = tl.where(value == value, code, 0x7F).to(tl.uint8)
    else:
        result = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return result


@triton.jit
def scale_code(amax_bits):
    """fp32 bits of a block's largest magnitude (int32) -> its E8M0 code (int32), 255 for NaN and Inf: `mok.quantize.scale_code`."""
    exponent = amax_bits >> 23
    code = exponent - 8 + tl.where((amax_bits & 0x7FFFFF) > 0x600000, 1, 0)
    return tl.where(exponent == 255, 255, tl.maximum(code, 0))


@triton.jit
def e4m3_to_fp32(value):
    """E4M3 -> fp32. Example: 0x2A -> 0.3125; 0x01 -> 2^-9."""
    if INTERPRETING:
        bits = value.to(tl.uint8, bitcast=True).to(tl.uint32)
        magnitude = bits & 0x7F
        scaled = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, between the formats' biases
        result = tl.where(magnitude == 0x7F, float("nan"), tl.where(bits >= 0x80, -scaled, scaled))
    else:
        result = value.to(tl.float32)
    return result


@triton.jit
def scale_of(code):
    """E8M0 codes -> fp32 powers of two: 127 -> 1, 0 -> 2^-127, 255 -> NaN."""
    bits = code.to(tl.int32) << 23
    return tl.where(code == 255, 0x7FC00000, tl.where(code == 0, 0x400000, bits)).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(code):
    """E8M0 codes (int32) -> fp32, what a block is multiplied with: 127 -> 1, 254 -> 0, 255 -> NaN."""
    return tl.where(code == 255, 0x7FC00000, (254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_rows(x):
    """fp32 rows [M, N], each of them one block -> E4M3 values like x, codes (int32) [M]. See `quantize_tile`."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    code = scale_code(tl.max(bits, 1))
    return e4m3(x * inverse_of(code)[:, None]).to(tl.float8e4nv, bitcast=True), code


@triton.jit
def widened(x):
    """bf16 -> fp32; fp32 stays."""
    result = x.to(tl.float32)
    if INTERPRETING and x.dtype == tl.bfloat16:  # it would lose subnormals
        result = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return result


@triton.jit
def quantize_tile(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of bf16 or fp32 in blocks of ROWS x COLUMNS: E4M3 bits (uint8) like x, codes (uint8) [.. / ROWS, .. / COLUMNS].

    The largest magnitude is found among integers, where NaN is the largest of all. What multiplies a block with a NaN or Inf is NaN.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    blocks = tl.reshape(widened(x), (M // ROWS, ROWS, N // COLUMNS, COLUMNS))
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    code = scale_code(tl.max(tl.max(bits, 3), 1))
    scaled = blocks * tl.expand_dims(tl.expand_dims(inverse_of(code), 1), 3)
    return e4m3(tl.reshape(scaled, (M, N))), code.to(tl.uint8)


@triton.jit
def snapped_tile(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of bf16 or fp32 in blocks of ROWS x COLUMNS: the numbers that its E4M3 values and codes stand for, fp32."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    values, codes = quantize_tile(x, ROWS, COLUMNS)
    blocks = tl.reshape(e4m3_to_fp32(values.to(tl.float8e4nv, bitcast=True)), (M // ROWS, ROWS, N // COLUMNS, COLUMNS))
    return tl.reshape(blocks * tl.expand_dims(tl.expand_dims(scale_of(codes), 1), 3), (M, N))


@triton.jit(do_not_specialize=["M", "least"])  # one compilation for any number of tokens
def quantize_kernel(
    x_ptr, values_ptr, scale_ptr, count_ptr, M, N, x_expert, x_row, x_column, least,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TCGEN05: tl.constexpr, ALIGNED: tl.constexpr, COUNTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one expert. TCGEN05: scales in that layout, see `mok.quantize.to_tcgen05`. ALIGNED: M is a multiple of 16. COUNTED: do
    nothing if the number at count_ptr is less than `least`."""
    if COUNTED:
        if tl.load(count_ptr) < least:
            return
    if ALIGNED:
        M = M // 16 * 16
    down, across = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    tile = tl.program_id(0)
    expert, i, j = (tile // (down * across)).to(tl.int64), tile // across % down, tile % across
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    from_row, from_column = rows.to(tl.int64)[:, None] * x_row, columns.to(tl.int64)[None, :] * x_column
    x = tl.load(x_ptr + expert * x_expert + from_row + from_column, mask=inside, other=0.0)
    values, codes = quantize_tile(x, ROWS, COLUMNS)
    tl.store(values_ptr + (expert * M + rows[:, None]) * N + columns[None, :], values, mask=inside)

    if TCGEN05:  # 128 rows of 4 blocks: the tile of the layout is ours
        r, b = tl.arange(0, TILE)[:, None], tl.arange(0, TILE // COLUMNS)[None, :]
        tl.store(scale_ptr + tile.to(tl.int64) * (TILE * TILE // COLUMNS) + r % 32 * 16 + r // 32 * 4 + b, codes)
    else:
        per_column, per_row = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
        r, b = i * (TILE // ROWS) + tl.arange(0, TILE // ROWS), j * (TILE // COLUMNS) + tl.arange(0, TILE // COLUMNS)
        here = scale_ptr + (expert * per_column + r[:, None]) * per_row + b[None, :]
        tl.store(here, codes, mask=(r < per_column)[:, None] & (b < per_row)[None, :])


def quantize(x: Tensor, block: Block, tcgen05: bool = False, count: Tensor | None = None, least: int = 0) -> Quantized:
    """`mok.quantize.quantize` of x [..., M, N], bf16 or fp32 with any strides. tcgen05: the scale as `to_tcgen05` gives it, for MX_ROW.

    A transposed copy in blocks along the contraction is quantize(x.mT, MX_ROW). count: int32 [1], on the device; where it is less than
    `least` nothing is written.
    """
    if tcgen05 and block != MX_ROW:
        raise ValueError(f"block={block}: must be {MX_ROW} for scales in the layout of tcgen05")
    tiles = math.prod(x.shape[:-2]) * cdiv(x.shape[-2], TILE)
    shape = (tiles, cdiv(x.shape[-1], TILE), 32, 16) if tcgen05 else scale_shape(x.shape, block)
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return quantize_into(x, block, values, torch.empty(shape, dtype=torch.uint8, device=x.device), tcgen05, count, least)


def quantize_into(
    x: Tensor, block: Block, values: Tensor, scale: Tensor, tcgen05: bool = False, count: Tensor | None = None, least: int = 0
) -> Quantized:  # fmt: skip
    """The same into given memory, uint8 and contiguous."""
    x_EMN = x.detach()[None] if x.dim() == 2 else x.detach().flatten(0, -3)
    experts, rows, columns = x_EMN.shape
    between = x_EMN.stride(0) if experts > 1 else 0  # which the number of tokens would move beyond 32 bits
    # The kernel is compiled for strides: where there is one row or column, for those of a contiguous tensor, whatever the tensor's are.
    down, across = x_EMN.stride(1) if rows > 1 else columns, x_EMN.stride(2) if columns > 1 else 1
    if values.numel():
        enqueue(
            quantize_kernel, (experts * cdiv(rows, TILE) * cdiv(columns, TILE),),
            x_EMN, values, scale, scale if count is None else count, rows, columns, between, down, across, least,
            ROWS=block[0], COLUMNS=block[1], TCGEN05=tcgen05, ALIGNED=down == 1 and rows % 16 == 0, COUNTED=count is not None,
            TILE=TILE, num_warps=8,
        )  # fmt: skip
    return Quantized(values.view(E4M3), scale)


@triton.jit(do_not_specialize=["M", "least"])
def snap_kernel(
    x_ptr, out_ptr, count_ptr, M, N, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNTED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One tile of one expert's rows, which are M. COUNTED: as `quantize_kernel`."""
    if COUNTED:
        if tl.load(count_ptr) < least:
            return
    down, across = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    tile = tl.program_id(0)
    expert, i, j = (tile // (down * across)).to(tl.int64), tile // across % down, tile % across
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = (expert * M + rows[:, None]) * N + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + at, snapped_tile(x, ROWS, COLUMNS).to(tl.bfloat16), mask=inside)


def snap(x: Tensor, block: Block, count: Tensor | None = None, least: int = 0) -> Tensor:
    """bf16 x [..., M, N] -> the numbers that its quantized form stands for, in bf16 (exact or not: as `widen`). count, least: as
    `quantize`."""
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    rows, columns = x.shape[-2:]
    tiles = math.prod(x.shape[:-2]) * cdiv(rows, TILE) * cdiv(columns, TILE)
    if tiles:
        enqueue(
            snap_kernel, (tiles,),
            x, out, x if count is None else count, rows, columns, least, ROWS=block[0], COLUMNS=block[1], COUNTED=count is not None,
            TILE=TILE, num_warps=8,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M", "least"])
def widen_kernel(
    values_ptr, scale_ptr, out_ptr, count_ptr, M, N, least, COLUMNS: tl.constexpr, COUNTED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One tile of one expert's rows, which are M. COUNTED: as `quantize_kernel`."""
    if COUNTED:
        if tl.load(count_ptr) < least:
            return
    down, across = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    tile = tl.program_id(0)
    expert, i, j = (tile // (down * across)).to(tl.int64), tile // across % down, tile % across
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    blocks, per_row = j * (TILE // COLUMNS) + tl.arange(0, TILE // COLUMNS), tl.cdiv(N, COLUMNS)
    row = expert * M + rows[:, None]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    values = tl.load(values_ptr + row * N + columns[None, :], mask=inside, other=0)
    codes = tl.load(scale_ptr + row * per_row + blocks[None, :], mask=(rows < M)[:, None] & (blocks < per_row)[None, :], other=0)
    split = tl.reshape(e4m3_to_fp32(values.to(tl.float8e4nv, bitcast=True)), (TILE, TILE // COLUMNS, COLUMNS))
    wide = tl.reshape(split * tl.expand_dims(scale_of(codes), 2), (TILE, TILE))
    tl.store(out_ptr + row * N + columns[None, :], wide.to(tl.bfloat16), mask=inside)


def widen(values: Tensor, scale: Tensor, block: Block, count: Tensor | None = None, least: int = 0) -> Tensor:
    """E4M3 values [..., M, N] and plain codes of blocks within rows -> the numbers they stand for in bf16.

    Exact for codes from 3 to 246, and NaN for 255. At codes 0 to 2 numbers below 2^-126 are rounded where they have bits below 2^-133; at
    247 to 254 those from 2^128 on become Inf. count, least: as `quantize`."""
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    rows, columns = values.shape[-2:]
    tiles = math.prod(values.shape[:-2]) * cdiv(rows, TILE) * cdiv(columns, TILE)
    if tiles:
        enqueue(
            widen_kernel, (tiles,),
            values.view(torch.uint8), scale, out, scale if count is None else count, rows, columns, least, COLUMNS=block[1],
            COUNTED=count is not None, TILE=TILE, num_warps=8,
        )  # fmt: skip
    return out
