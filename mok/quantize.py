"""Number formats: MXFP8 and blockwise FP8. This file is their definition; `kernels/quantize.py` gives the same bits on a GPU.

A quantized tensor is a pair (values, scale): E4M3 values (`torch.float8_e4m3fn`) in the shape of the original, and for every block of
them one power of two as an E8M0 code (uint8). An element is `value * 2^(code - 127)`, exactly.

| block of the last two dimensions | MXFP8 (OCP MX 1.0) | blockwise FP8 |
|---|---|---|
| rows (contraction along the last dimension) | 1 x 32 | 1 x 128 |
| columns (contraction along the last but one) | 32 x 1 | 128 x 1 |
| weights (either) | as rows or columns, two tensors | 128 x 128, one tensor |

Blocks count from the first row and column; the last ones may be short. Four equal scales turn 1 x 128 into 1 x 32, so blockwise FP8 with
powers of two is also valid MXFP8.

Scale: the smallest power of two with which no value of the block exceeds 448, the largest E4M3: 2^ceil(log2(amax / 448)), at least 2^-127.
It is rounded up, so nothing ever saturates (rounded down, a block's largest values would lose up to 12.5 %). Values are rounded to
nearest, ties to even.

What is special:
    NaN: a block with a NaN gets code 255, E8M0's NaN, and only NaN values (0x7F); other blocks do not notice.
    Inf: as NaN, because E4M3 has no Inf and a large finite stand-in could hide an overflow behind a small factor.
    Zero block: code 0 and values 0. A zero keeps its sign.
    Subnormals: kept where E4M3 has them (down to 2^-9 of the scale), and blocks below 448 * 2^-127 too, with code 0.
    fp64: rounded to fp32 first. Every other dtype is exact in fp32.

Example: the block [448, 1, 0.3, -0.001] has amax 448, so code 127 (the factor 1): [448, 1, 0.3125, -0.001953125] (0.001 lies nearer to
E4M3's least value 2^-9 than to 0). With 449 in place of 448 the code is 128 and the values are those of [224.5, 0.5, 0.15, -0.0005]:
[224, 0.5, 0.15625, -0], which stand for [448, 1, 0.3125, -0].

Legend: M rows, N columns of the last two dimensions, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Block = tuple[int, int]
"""Rows and columns that share a scale."""
MX_ROW: Block = (1, 32)
MX_COLUMN: Block = (32, 1)
FP8_ROW: Block = (1, 128)
FP8_COLUMN: Block = (128, 1)
FP8_SQUARE: Block = (128, 128)

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 255
E8M0_BIAS = 127
_MAX_EXPONENT = 8
_MAX_MANTISSA = 0x600000  # 448 = 1.75 * 2^8: the fp32 bits of .75


class Quantized(NamedTuple):
    """values: E4M3 [..., M, N]. scale: E8M0 codes, uint8 [..., ceil(M / block rows), ceil(N / block columns)]."""

    values: Tensor
    scale: Tensor


# ---- one tensor ----


def scale_code(amax: Tensor) -> Tensor:
    """E8M0 code of the smallest scale with which amax (fp32, not negative) does not exceed 448: int32, 255 for NaN and Inf.

    Example: 448 -> 127; 449 and 896 -> 128; 0 -> 0; 3.4e38 -> 247.
    """
    bits = amax.view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    code = exponent - _MAX_EXPONENT + (mantissa > _MAX_MANTISSA).int()
    return torch.where(exponent == 255, E8M0_NAN, code.clamp(min=0))


def quantize(x: Tensor, block: Block) -> Quantized:
    """Quantize x [..., M, N] (any floating-point dtype and strides) in blocks of its last two dimensions. No gradient.

    Raises:
        TypeError: x is not floating-point. ValueError: x has fewer than two dimensions.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"x has dtype {x.dtype}: must be a floating-point dtype")
    if x.dim() < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: must have at least two dimensions")
    rows, columns = x.shape[-2:]
    blocks = _blocked(x.detach().to(torch.float32), block)
    code = scale_code(blocks.abs().amax((-3, -1)))
    per_block = code[..., :, None, :, None]
    inverse = ((2 * E8M0_BIAS - per_block).clamp(min=1) << 23).view(torch.float32)
    values = (blocks * inverse).to(E4M3).view(torch.uint8)
    values = torch.where(per_block == E8M0_NAN, E4M3_NAN, values)
    values = values.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]
    return Quantized(values.contiguous().view(E4M3), code.to(torch.uint8))


def dequantize(values: Tensor, scale: Tensor, block: Block, dtype: torch.dtype = torch.float32) -> Tensor:
    """values * scale in dtype, [..., M, N]. scale: E8M0 codes (uint8 or float8_e8m0fnu), or plain numbers (fp32).

    Exact for E8M0 codes in fp32 below 2^128 and in fp64; in bf16 and fp16 wherever the result is in range.

    Raises:
        TypeError: dtypes. ValueError: the shape of scale is not that of x's blocks.
    """
    if values.dtype != E4M3:
        raise TypeError(f"values has dtype {values.dtype}: must be {E4M3}")
    expected = scale_shape(values.shape, block)
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale has shape {tuple(scale.shape)}: must be {expected} for values {tuple(values.shape)} and block {block}")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (values.to(wide) * _expanded(scale_to_float(scale).to(wide), block, values.shape)).to(dtype)


def scale_shape(shape: tuple[int, ...] | torch.Size, block: Block) -> tuple[int, ...]:
    """The shape of the scale of a tensor [..., M, N]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def scale_to_float(scale: Tensor) -> Tensor:
    """E8M0 codes (uint8 or float8_e8m0fnu) as fp32 powers of two, 255 as NaN; fp32 stays as it is.

    Raises:
        TypeError: any other dtype.
    """
    if scale.dtype == torch.float32:
        return scale
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(f"scale has dtype {scale.dtype}: must be torch.uint8, torch.float8_e8m0fnu or torch.float32")
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def scale_from_float(scale: Tensor) -> Tensor:
    """fp32 powers of two from 2^-127 to 2^127, and NaN, as E8M0 codes (uint8).

    Raises:
        ValueError: another number.
    """
    code = _code_of(scale)
    if bool((code < 0).any()):
        raise ValueError(f"scale={scale[code < 0][0].item()!r}: must be a power of two from 2^-127 to 2^127")
    return code.to(torch.uint8)


def scale_codes(scale: Tensor) -> Tensor:
    """E8M0 codes (uint8) of codes (uint8 or float8_e8m0fnu) or of fp32 powers of two. Nothing waits for a device: there a number that is no
    power of two gets the code of NaN, while on the CPU it is an error.

    Raises:
        ValueError: as `scale_from_float`.
    """
    if scale.dtype != torch.float32:
        return scale.view(torch.uint8)
    if scale.device.type == "cpu" and not torch.compiler.is_compiling():
        return scale_from_float(scale)
    code = _code_of(scale)
    return torch.where(code < 0, E8M0_NAN, code).to(torch.uint8)


def _code_of(scale: Tensor) -> Tensor:
    """E8M0 codes, int32, of fp32 numbers; -1 where there is none."""
    bits = scale.contiguous().view(torch.int32)
    code = torch.where((bits & 0x7FFFFF == 0) & (bits > 0) & (bits < 0x7F800000), bits >> 23, -1)
    return torch.where(bits == 0x400000, 0, torch.where(scale.isnan(), E8M0_NAN, code))


def _blocked(x: Tensor, block: Block) -> Tensor:
    """[..., M, N] as [..., ceil(M / b), b, ceil(N / c), c] for block (b, c), filled up with zeros, which touch no scale."""
    rows, columns = x.shape[-2:]
    down, across = scale_shape(x.shape, block)[-2:]
    x = torch.nn.functional.pad(x, (0, across * block[1] - columns, 0, down * block[0] - rows))
    return x.unflatten(-1, (across, block[1])).unflatten(-3, (down, block[0]))


# ---- what a layer quantizes ----

Precision = Literal["bf16", "mxfp8", "fp8"]


@dataclass(frozen=True)
class Recipe:
    """Which operands of a layer's products are quantized, and how. Sums, and everything that is not in this table, are as without it.

    | product | left operand, by rows | right operand | blocks along |
    |---|---|---|---|
    | gate = x Wg^T, up = x Wu^T | x, once, at its source, when it is published | Wg, Wu | H |
    | y = h Wd^T | h, in the up tile's epilogue | Wd | I |
    | dHid = dY Wd | dY, once, at its source, before any router weight multiplies it | Wd | H |
    | dX = d_gate Wg + d_up Wu | d_gate, d_up, in the dHid tile's epilogue | Wg, Wu | I |

    | weight gradient | as a rule | quantized_weight_gradients, blocks along the rows of an expert |
    |---|---|---|
    | dWg = d_gate^T X, dWu = d_up^T X | d_gate, d_up as they are; X as published | each of them, X from its published values |
    | dWd = dY^T (w h) | dY as published; w h as it is | each of them, dY from its published values |

    What is quantized is the value that the layer without a recipe has at that place: gate, up, h, d_gate, d_up and w h are rounded to the
    layer's dtype first. x and dY travel between ranks quantized. y, dX, the router, its weights' gradient (dHid . h, with h not quantized)
    and the shared experts are not quantized at all. On a GPU the quantized operands of a weight gradient, in "fp8" only, are rounded in
    place and then multiplied in bf16, which holds their numbers (at codes from 3 to 246): the same products, and not sooner.

    Under MXFP8 a weight has two quantized forms, one along each of its dimensions; under blockwise FP8 one serves both. Rows of an expert
    start at a tile and are filled up with zeros, so no block holds rows of two experts and no padding moves a scale; inside an expert they
    are ordered by (source rank, token, choice), so blocks along them do not depend on the number of ranks.

    Weights are quantized whenever they are used, from the parameters as they are then. Nothing is kept, because nothing that a program may
    do to a parameter's memory (an optimizer's step, `.data.copy_`, new memory at an old address, a gathered shard) would have to tell us.
    Who wants to quantize less often holds pairs, which the low-level API (`mok.functional`) takes in place of a weight, and answers for
    their being up to date:

    | | forward | backward |
    |---|---|---|
    | MXFP8, gate and up [E, I, H] | (values, scale) along H | (values, scale, values_T [E, H, I], scale_T) |
    | MXFP8, down [E, H, I] | (values, scale) along I | (values_T [E, I, H], scale_T) |
    | blockwise FP8, each | (values, scale [E, ceil(rows / 128), ceil(columns / 128)]) | the same |

    The four are what `mok.ops.mxfp8_quantize` returns. An MXFP8 scale has 3 dimensions (plain) or 4 (tcgen05); one of blockwise FP8 holds
    E8M0 codes (uint8) or fp32 powers of two.

    Raises:
        ValueError: precision is none of the three, or quantized_weight_gradients without a format. TypeError: it is not a bool.
    """

    precision: Precision = "bf16"
    quantized_weight_gradients: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r}: must be one of {', '.join(get_args(Precision))}")
        if not isinstance(self.quantized_weight_gradients, bool):
            raise TypeError(f"quantized_weight_gradients={self.quantized_weight_gradients!r}: must be a bool")
        if self.quantized_weight_gradients and not self.quantized:
            raise ValueError("quantized_weight_gradients=True: needs precision 'mxfp8' or 'fp8'")

    @property
    def quantized(self) -> bool:
        return self.precision != "bf16"

    @property
    def row(self) -> Block:
        """The block of an activation or gradient, along its row."""
        return MX_ROW if self.precision == "mxfp8" else FP8_ROW

    def weight_block(self, contraction: int) -> Block:
        """The block of a weight that is contracted over its dimension -1 or -2."""
        if self.precision == "fp8":
            return FP8_SQUARE
        return MX_ROW if contraction == -1 else MX_COLUMN

    def rows(self, x: Tensor) -> Tensor:
        """x [M, N] as the values of its quantized rows, in its own dtype."""
        return _snapped(x, self.row) if self.quantized else x

    def columns(self, x: Tensor) -> Tensor:
        """x [M, N], an operand of a weight gradient, M rows of one expert from the start of a tile on."""
        if not self.quantized_weight_gradients:
            return x
        return _snapped(x, MX_COLUMN if self.precision == "mxfp8" else FP8_COLUMN)

    def weight(self, w: Tensor, contraction: int) -> Tensor:
        """w as the values of its quantized form for products that are contracted over its dimension -1 or -2."""
        return _snapped(w, self.weight_block(contraction)) if self.quantized else w


UNQUANTIZED = Recipe()


def _snapped(x: Tensor, block: Block) -> Tensor:
    return dequantize(*quantize(x, block), block, x.dtype)


# ---- the layout of scales that Blackwell's tensor cores read ----


def to_tcgen05(scale: Tensor) -> Tensor:
    """Scales of 1 x 32 blocks, uint8 [M, B] or [E, M, B], in tiles of 128 rows and 4 blocks: [E * ceil(M / 128), ceil(B / 4), 32, 16].

    Byte (r % 32) * 16 + (r / 32) * 4 + b of a tile belongs to its row r and block b. Rows and blocks that fill up a tile have code 0.

    Example: the scale of row 33, block 2 is byte 1 * 16 + 1 * 4 + 2 = 22 of the first tile.
    """
    rows, blocks = scale.shape[-2:]
    experts = math.prod(scale.shape[:-2])
    scale = torch.nn.functional.pad(scale.reshape(experts, rows, blocks), (0, -blocks % 4, 0, -rows % 128))
    tiles, across = scale.shape[1] // 128, scale.shape[2] // 4
    tiled = scale.reshape(experts, tiles, 4, 32, across, 4).permute(0, 1, 4, 3, 2, 5)
    return tiled.reshape(experts * tiles, across, 32, 16)


def from_tcgen05(tiled: Tensor, rows: int, blocks: int) -> Tensor:
    """`to_tcgen05` undone, with rows M and blocks B of one expert: uint8 [E, M, B]."""
    tiles, across = -(-rows // 128), -(-blocks // 4)
    experts = tiled.shape[0] // max(tiles, 1)
    scale = tiled.reshape(experts, tiles, across, 32, 4, 4).permute(0, 1, 4, 3, 2, 5)
    return scale.reshape(experts, tiles * 128, across * 4)[:, :rows, :blocks].contiguous()


# ---- from one format to the other ----

WeightFormat = Literal["mxfp8", "fp8"]
WEIGHT_BLOCKS: dict[WeightFormat, Block] = {"mxfp8": MX_ROW, "fp8": FP8_SQUARE}
"""Blocks of a stored weight [..., outputs, inputs]."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did to one tensor.

    elements, changed: how many there are, and how many stand for another number than before.
    largest_error: of the changed ones, the largest |new - old| / |old|; Inf where a finite number became NaN.
    """

    name: str
    elements: int
    changed: int
    largest_error: float

    @property
    def largest_change(self) -> str:
        """The largest error in percent of the number that was there; 100 % is one that became 0."""
        if self.largest_error == math.inf:
            return "to NaN or Inf"
        return "100 % (became 0)" if self.largest_error == 1 else f"{100 * self.largest_error:.3g} %"

    def __str__(self) -> str:
        if not self.changed:
            return f"{self.name}: all {self.elements} elements kept"
        return f"{self.name}: {self.changed} of {self.elements} elements changed, by up to {self.largest_change}"


def convert(values: Tensor, scale: Tensor, to: WeightFormat, name: str = "weight") -> tuple[Quantized, Conversion]:
    """A weight [..., M, N] in the other format (or the same), with a report of what could not be kept.

    A block of the new format whose elements had one scale, a power of two, keeps its values and its scale: to MXFP8 every block, and back
    again. Any other block is quantized anew, with the smallest scale that holds its largest element; it loses what E4M3 does not have at
    that scale: nothing, often, if its scales were within a few powers of two of each other. Numbers that are no powers of two, as older
    checkpoints have them for scales, lose most.

    Args:
        values: E4M3. scale: E8M0 codes (uint8 or float8_e8m0fnu) or fp32, of 1 x 32 or of 128 x 128 blocks, which its shape tells.

    Raises:
        TypeError: dtypes. ValueError: the shape of scale fits neither format, or `to` is none.
    """
    if to not in WEIGHT_BLOCKS:
        raise ValueError(f"to={to!r}: must be one of {', '.join(WEIGHT_BLOCKS)}")
    block = WEIGHT_BLOCKS[weight_format(values.shape, scale.shape, name)]
    old = dequantize(values, scale, block, torch.float64)
    new = quantize(old, WEIGHT_BLOCKS[to])
    code = _code_of(scale) if scale.dtype == torch.float32 else scale.view(torch.uint8).to(torch.int32)
    code = _expanded(code, block, values.shape)
    most = _blocked(code + 1, WEIGHT_BLOCKS[to]).amax((-3, -1)) - 1
    least = E8M0_NAN - _blocked(E8M0_NAN - code, WEIGHT_BLOCKS[to]).amax((-3, -1))
    kept = (most == least) & (least >= 0)  # one scale for the whole block
    bits = torch.where(_expanded(kept, WEIGHT_BLOCKS[to], values.shape), values.view(torch.uint8), new.values.view(torch.uint8))
    new = Quantized(bits.view(E4M3), torch.where(kept, least, new.scale).to(torch.uint8))
    return new, compare(name, old, dequantize(*new, WEIGHT_BLOCKS[to], torch.float64))


def weight_format(values: Sequence[int], scale: Sequence[int], name: str = "weight") -> WeightFormat:
    """The format of a stored weight, told by the shapes of its values and of its scale.

    Raises:
        ValueError: they fit neither format.
    """
    shapes = {name: scale_shape(tuple(values), block) for name, block in WEIGHT_BLOCKS.items()} if len(values) > 1 else {}
    fitting = [name for name, shape in shapes.items() if shape == tuple(scale)]
    if not fitting:
        wanted = " or ".join(map(str, shapes.values())) or "of a weight with two dimensions or more"
        raise ValueError(f"{name}: scale has shape {tuple(scale)}: must be {wanted} for values {tuple(values)}")
    return fitting[0]


def convert_checkpoint(
    tensors: dict[str, Tensor], to: WeightFormat, *, suffix: str = "_scale"
) -> tuple[dict[str, Tensor], list[Conversion]]:
    """Every E4M3 tensor NAME of a checkpoint with its scale NAME + suffix, converted; other tensors as they are. One report per weight.

    Raises:
        ValueError: a scale is missing, or as `convert`.
    """
    converted, reports = dict(tensors), []
    for name, values in tensors.items():
        if values.dtype != E4M3:
            continue
        if name + suffix not in tensors:
            raise ValueError(f"{name}: its scale {name + suffix} is missing; is suffix={suffix!r} right?")
        (converted[name], converted[name + suffix]), report = convert(values, tensors[name + suffix], to, name)
        reports.append(report)
    return converted, reports


def _expanded(per_block: Tensor, block: Block, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """What every element of a tensor of this shape has from its block."""
    for dim in (-2, -1):
        per_block = per_block.repeat_interleave(block[dim], dim).narrow(dim, 0, shape[dim])
    return per_block


def compare(name: str, old: Tensor, new: Tensor) -> Conversion:
    """What became of the elements of a tensor, both in fp64."""
    changed = (old != new) & ~(old.isnan() & new.isnan())
    error = ((new - old) / old)[changed].abs().nan_to_num(nan=torch.inf)
    return Conversion(name, old.numel(), int(changed.sum()), float(error.max()) if len(error) else 0.0)
