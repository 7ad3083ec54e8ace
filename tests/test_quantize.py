"""The number formats against the OCP MX specification, decoded and rounded here by other arithmetic: exhaustively where that is finite."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
import torch

from mok import quantize as q
from mok.quantize import E4M3, FP8_COLUMN, FP8_ROW, FP8_SQUARE, MX_COLUMN, MX_ROW

BLOCKS = (MX_ROW, MX_COLUMN, FP8_ROW, FP8_COLUMN, FP8_SQUARE)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ALL_CODES = torch.arange(256, dtype=torch.uint8)


def e4m3(code: int) -> Fraction | None:
    """An E4M3 code by the specification: S.EEEE.MMM, bias 7, subnormals, no Inf, and one NaN per sign."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    magnitude = Fraction(mantissa, 8) * Fraction(2) ** -6 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -magnitude if sign else magnitude


POSITIVE = [e4m3(code) for code in range(127)]
"""Ascending; index = code."""


def nearest(value: Fraction) -> int:
    """The code of the nearest number from 0 to 448, ties to the even code."""
    code = min(range(127), key=lambda c: (abs(POSITIVE[c] - value), c & 1))
    return code


# ---- decoding ----


def test_every_value_at_every_scale():
    values = ALL_CODES.repeat(256, 1).view(E4M3)  # [256 scales, 256 values]
    scale = ALL_CODES.repeat_interleave(8).view(256, 8)
    got = q.dequantize(values, scale, MX_ROW, torch.float64)
    in_fp32 = q.dequantize(values, scale.view(torch.float8_e8m0fnu), MX_ROW)
    for s in range(256):
        numbers = [None if s == 255 or e4m3(c) is None else e4m3(c) * Fraction(2) ** (s - 127) for c in range(256)]
        want = torch.tensor([math.nan if number is None else float(number) for number in numbers], dtype=torch.float64)
        assert torch.equal(got[s].nan_to_num(-1e300), want.nan_to_num(-1e300)), s
        assert torch.equal(got[s].signbit()[:255], (ALL_CODES >= 128)[:255]) or s == 255
        # fp32 holds all of them but those from 2^128 on
        assert torch.equal(in_fp32[s].nan_to_num(-1.0, posinf=1e300), want.float().nan_to_num(-1.0, posinf=1e300)), s
    finite = (got.abs() < 2.0**128) & got.isfinite()
    assert torch.equal(in_fp32[finite].double(), got[finite])


def test_bf16_holds_every_value_at_scales_from_3_to_246():
    """And at every other scale there are some that it does not hold: below 2^-133, its least number, or from 2^128 on."""
    values, scale = ALL_CODES.repeat(256, 1).view(E4M3), ALL_CODES[:, None].repeat(1, 8)
    exact, narrow = (q.dequantize(values, scale, MX_ROW, dtype).double() for dtype in (torch.float64, torch.bfloat16))
    held = (narrow == exact) | (narrow.isnan() & exact.isnan())
    assert held.all(1).nonzero().flatten().tolist() == [*range(3, 247), 255]


def test_scales_as_numbers():
    assert q.scale_to_float(ALL_CODES)[:255].tolist() == [2.0 ** (s - 127) for s in range(255)]
    assert q.scale_to_float(ALL_CODES)[255].isnan()
    assert torch.equal(q.scale_from_float(q.scale_to_float(ALL_CODES)), ALL_CODES)
    for bad in (0.0, 3.0, -1.0, math.inf, 2.0**-128):
        with pytest.raises(ValueError, match="must be a power of two from 2\\^-127 to 2\\^127"):
            q.scale_from_float(torch.tensor([1.0, bad]))


# ---- encoding ----


def test_every_value_at_every_scale_comes_back():
    """Blocks that hold 448: the scale that was there is the smallest one, so values and scale return bit for bit."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F] + [126, 126], dtype=torch.uint8).view(1, 256)
    codes = torch.cat([codes.view(8, 32)[:, :31], torch.full((8, 1), 126, dtype=torch.uint8)], 1).view(1, 256)
    for s in range(247):  # 448 * 2^(247 - 127) is above fp32
        values, scale = codes.view(E4M3), torch.full((1, 8), s, dtype=torch.uint8)
        again = q.quantize(q.dequantize(values, scale, MX_ROW), MX_ROW)
        assert torch.equal(again.values.view(torch.uint8), codes) and torch.equal(again.scale, scale), s
    left_out = [c for c in range(254) if c & 0x7F != 0x7F and not bool((codes == c).any())]
    assert len(left_out) <= 8  # the last of every 32 gave way to 448; they come here
    values = torch.tensor([left_out + [126]], dtype=torch.uint8).view(E4M3)
    again = q.quantize(values.float(), MX_ROW)
    assert torch.equal(again.values.view(torch.uint8), values.view(torch.uint8)) and again.scale.item() == 127


def test_every_bf16_is_rounded_to_the_nearest_even():
    every = torch.arange(0x43E1, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # 0 to 448, all of them
    assert every[-1] == 448
    table = torch.tensor([float(p) for p in POSITIVE], dtype=torch.float64)
    middle = (table[1:] + table[:-1]) / 2  # exact
    below = torch.searchsorted(middle, every.double(), right=False)  # a tie goes to the lower one ...
    above = torch.searchsorted(middle, every.double(), right=True)  # ... or to the upper one
    want = torch.where(below % 2 == 0, below, above)
    rows = torch.stack([every, torch.full_like(every, 448)], 1)
    got = q.quantize(rows, MX_ROW)
    assert (got.scale == 127).all()
    assert torch.equal(got.values.view(torch.uint8)[:, 0].long(), want)
    negative = q.quantize(-rows, MX_ROW)
    assert torch.equal(negative.values.view(torch.uint8), got.values.view(torch.uint8) | 0x80)
    for i in range(0, len(every), 997):
        assert nearest(Fraction(float(every[i]))) == want[i]


def test_ties_and_their_neighbours_in_fp32():
    for low, high in itertools.pairwise(POSITIVE):
        middle = torch.tensor(float((low + high) / 2))
        for value in (middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))):
            got = q.quantize(torch.stack([value, torch.tensor(448.0)])[None], MX_ROW).values.view(torch.uint8)[0, 0]
            assert got == nearest(Fraction(float(value)))


def smallest_scale(amax: torch.Tensor) -> torch.Tensor:
    """By search: how many of the scales 2^-127, 2^-126, ... are too small."""
    bounds = torch.tensor([448 * 2.0**k for k in range(-127, 127)], dtype=torch.float64)
    return torch.searchsorted(bounds, amax.double(), right=False)


def test_the_scale_of_every_bf16():
    every = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # all that are finite and not negative
    got = q.quantize(every[:, None], MX_ROW)
    assert torch.equal(got.scale[:, 0].long(), smallest_scale(every))
    restored = q.dequantize(*got, MX_ROW, torch.float64)[:, 0]
    error = (restored - every.double()).abs() / every.double().clamp(min=1e-300)
    normal = every.double() >= 2.0**-133  # 2^-6 of the least scale
    assert error[normal].max() <= 1 / 16, "rounding up never saturates"
    assert got.values.view(torch.uint8).max() == 126, "448 is used, NaN is not"


def test_the_scale_next_to_its_steps_in_fp32():
    steps = torch.tensor([448 * 2.0**k for k in range(-126, 120)])
    for amax in (steps, torch.nextafter(steps, torch.tensor(0.0)), torch.nextafter(steps, torch.tensor(math.inf))):
        assert torch.equal(q.scale_code(amax).long(), smallest_scale(amax))
    tiny = torch.tensor([0.0, 1e-45, 1e-40, 2.0**-126, 448 * 2.0**-127])
    assert q.scale_code(tiny).tolist() == [0] * 5
    assert q.scale_code(torch.tensor([3.4028234e38, math.inf, math.nan])).tolist() == [247, 255, 255]


def test_worked_example():
    got = q.quantize(torch.tensor([[448, 1, 0.3, -0.001]]), MX_ROW)
    assert got.scale.item() == 127 and q.dequantize(*got, MX_ROW).tolist() == [[448, 1, 0.3125, -0.001953125]]
    got = q.quantize(torch.tensor([[449, 1, 0.3, -0.0005]]), MX_ROW)
    assert got.scale.item() == 128 and got.values.float().tolist() == [[224, 0.5, 0.15625, -0.0]]
    assert got.values.view(torch.uint8)[0, 3] == 0x80


# ---- what is special ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block", [MX_ROW, MX_COLUMN])
def test_a_bad_value_stays_in_its_block(block, bad, dtype):
    clean = torch.randn(96, 96).to(dtype)
    want = q.quantize(clean, block)
    for position in range(32):
        x = clean.clone()
        x[32 + (position if block == MX_COLUMN else 5), 32 + (position if block == MX_ROW else 5)] = bad
        got = q.quantize(x, block)
        hit = q.dequantize(*got, block).isnan()
        assert hit.sum() == 32
        assert (got.values.view(torch.uint8)[hit] == q.E4M3_NAN).all() and (got.scale == q.E8M0_NAN).sum() == 1
        assert torch.equal(got.values.view(torch.uint8)[~hit], want.values.view(torch.uint8)[~hit])
        assert torch.equal(got.scale[got.scale != 255], want.scale[got.scale != 255])


def test_zero_and_tiny_blocks():
    x = torch.zeros(6, 32)
    x[1] = -0.0
    x[2] = 1e-38
    x[3] = 1e-40
    x[4, 31] = 1e-38
    x[5], x[5, 7] = 1e-40, 1.0
    got = q.quantize(x, MX_ROW)
    back = q.dequantize(*got, MX_ROW)
    assert back.isfinite().all() and got.scale[:5].eq(0).all()
    assert (got.values.view(torch.uint8)[0] == 0).all() and (got.values.view(torch.uint8)[1] == 0x80).all()
    for row, value in ((2, 1e-38), (4, 1e-38)):
        assert back[row, 31].item() == pytest.approx(value, rel=1 / 16)
    assert (back[3] - 1e-40).abs().max() <= 2.0**-137  # half of the least value, 2^-9 * 2^-127
    assert (back[4, :31] == 0).all() and back[5].tolist() == [0.0] * 7 + [1.0] + [0.0] * 24
    huge = torch.tensor([[3.3895314e38, -1.0]], dtype=torch.bfloat16)
    assert q.dequantize(*q.quantize(huge, MX_ROW), MX_ROW, torch.float64)[0, 0] == 2.0**128 and q.quantize(huge, MX_ROW).scale.item() == 247


def test_fp64_is_rounded_to_fp32_first():
    x = torch.randn(40, 70, dtype=torch.float64) * torch.logspace(-60, 60, 70, dtype=torch.float64)
    for a, b in zip(q.quantize(x, MX_ROW), q.quantize(x.float(), MX_ROW), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- blocks ----


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(64, 256), (1, 1), (130, 72), (33, 160), (0, 64), (64, 0), (2, 2, 35, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_against_a_loop(shape, block, dtype):
    x = (torch.randn(shape) * torch.randn(shape).mul(3).exp()).to(dtype)
    got = q.quantize(x, block)
    assert got.values.shape == x.shape and got.values.is_contiguous()
    assert tuple(got.scale.shape) == q.scale_shape(x.shape, block) and got.scale.dtype == torch.uint8
    back = q.dequantize(*got, block)
    leading = x.numel() // max(1, x.shape[-1] * x.shape[-2])
    views = (t.reshape(leading, *t.shape[-2:]) for t in (x.double(), got.values.double(), got.scale, back))
    for part, values, scale, restored in zip(*views, strict=True):
        for i in range(0, part.shape[0], block[0]):
            for j in range(0, part.shape[1], block[1]):
                tile = (slice(i, i + block[0]), slice(j, j + block[1]))
                code = int(smallest_scale(part[tile].abs().max()))
                assert scale[i // block[0], j // block[1]] == code
                scaled = part[tile] * 2.0 ** (127 - code)
                step = torch.clamp(2.0 ** (torch.floor(torch.log2(scaled.abs())) - 3), min=2.0**-9)
                assert torch.equal(values[tile], torch.round(scaled / step) * step)
                assert torch.equal(restored[tile].double(), values[tile] * 2.0 ** (code - 127))


def test_columns_are_rows_of_the_transpose():
    x = torch.randn(2, 70, 200).bfloat16()
    for column, row in ((MX_COLUMN, MX_ROW), (FP8_COLUMN, FP8_ROW)):
        a, b = q.quantize(x, column), q.quantize(x.mT, row)
        assert torch.equal(a.values.mT.contiguous().view(torch.uint8), b.values.view(torch.uint8))
        assert torch.equal(a.scale.mT, b.scale)
    a, b = q.quantize(x, FP8_SQUARE), q.quantize(x.mT, FP8_SQUARE)
    assert torch.equal(a.values.mT.contiguous().view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scale.mT, b.scale)


def test_strides_and_padding_do_not_matter():
    big = torch.full((64, 512), 1e30).bfloat16()
    big[:, 100:228] = torch.randn(64, 128).bfloat16()
    for block in BLOCKS:
        a, b = q.quantize(big[::2, 100:228], block), q.quantize(big[::2, 100:228].clone(), block)
        assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scale, b.scale)
        long = torch.zeros(128, 128).bfloat16()
        long[:50, :100] = big[:50, 100:200]
        a, b = q.quantize(big[:50, 100:200], block), q.quantize(long, block)
        assert torch.equal(a.scale, b.scale[: a.scale.shape[0], : a.scale.shape[1]])
        assert torch.equal(a.values.view(torch.uint8), b.values[:50, :100].view(torch.uint8))


@pytest.mark.parametrize("filling", [1e30, math.nan])
def test_what_fills_other_blocks_moves_nothing(filling):
    """Rows beside those of a block along rows, columns beside those of a block along columns, and whole blocks of every kind."""
    x = torch.randn(256, 384).bfloat16()
    for block in BLOCKS:
        filled = x.clone()
        filled[128:] = filled[:, 256:] = filling
        if block[0] == 1:
            filled[1::2] = filling
        if block[1] == 1:
            filled[:, 1::2] = filling
        valid = filled == x
        want, got = q.quantize(x, block), q.quantize(filled, block)
        assert torch.equal(got.values.view(torch.uint8)[valid], want.values.view(torch.uint8)[valid]), block
        whole = valid[:: block[0], :: block[1]]
        assert torch.equal(got.scale[whole], want.scale[whole]) and whole.sum() >= 2, block


def test_a_row_of_blockwise_fp8_is_mxfp8():
    x = torch.randn(3, 256).bfloat16()
    values, scale = q.quantize(x, FP8_ROW)
    assert torch.equal(q.dequantize(values, scale, FP8_ROW), q.dequantize(values, scale.repeat_interleave(4, 1), MX_ROW))


def test_dequantize_into_narrow_dtypes_is_exact_in_range():
    x = torch.randn(64, 256)
    wide = q.dequantize(*q.quantize(x, MX_ROW), MX_ROW)
    for dtype in (torch.bfloat16, torch.float16):
        narrow = q.dequantize(*q.quantize(x, MX_ROW), MX_ROW, dtype)
        assert narrow.dtype == dtype and torch.equal(narrow.float(), wide)


def test_refusals():
    with pytest.raises(TypeError, match=r"x has dtype torch.int64: must be a floating-point dtype"):
        q.quantize(torch.zeros(4, 4, dtype=torch.int64), MX_ROW)
    with pytest.raises(ValueError, match=r"x has shape \(4,\): must have at least two dimensions"):
        q.quantize(torch.zeros(4), MX_ROW)
    values, scale = q.quantize(torch.zeros(4, 64), MX_ROW)
    with pytest.raises(TypeError, match=r"values has dtype torch.float32: must be torch.float8_e4m3fn"):
        q.dequantize(values.float(), scale, MX_ROW)
    with pytest.raises(ValueError, match=r"scale has shape \(4, 2\): must be \(4, 1\) for values \(4, 64\) and block \(1, 128\)"):
        q.dequantize(values, scale, FP8_ROW)
    with pytest.raises(TypeError, match=r"scale has dtype torch.int32: must be torch.uint8"):
        q.dequantize(values, scale.int(), MX_ROW)
    with pytest.raises(ValueError, match=r"to='nvfp4': must be one of mxfp8, fp8"):
        q.convert(values, scale, "nvfp4")
    with pytest.raises(ValueError, match=r"weight: scale has shape \(1, 4\): must be \(4, 2\) or \(1, 1\) for values \(4, 64\)"):
        q.convert(values, scale.new_zeros(1, 4), "fp8")
    with pytest.raises(ValueError, match=r"w: its scale w_scale is missing; is suffix='_scale' right\?"):
        q.convert_checkpoint({"w": values}, "fp8")


# ---- the layout of scales for tcgen05 ----


@pytest.mark.parametrize("experts, rows, blocks", [(1, 128, 4), (3, 256, 12), (2, 130, 5), (1, 1, 1), (0, 128, 4), (2, 0, 4)])
def test_tcgen05_layout(experts, rows, blocks):
    scale = torch.randint(0, 256, (experts, rows, blocks), dtype=torch.uint8)
    tiled = q.to_tcgen05(scale)
    per_expert, across = -(-rows // 128), -(-blocks // 4)
    want = torch.zeros(experts * per_expert, across, 512, dtype=torch.uint8)
    for e in range(experts):
        for r in range(rows):
            for b in range(blocks):
                want[e * per_expert + r // 128, b // 4, r % 32 * 16 + r % 128 // 32 * 4 + b % 4] = scale[e, r, b]
    assert torch.equal(tiled, want.view(-1, across, 32, 16))
    if rows:
        assert torch.equal(q.from_tcgen05(tiled, rows, blocks), scale)
    if experts == 1:
        assert torch.equal(q.to_tcgen05(scale[0]), tiled)


# ---- between the formats ----


def weight(rows=256, columns=384, spread=0.5):  # type: ignore[no-untyped-def]
    return torch.randn(rows, columns) * torch.randn(rows, columns).mul(spread).exp() / 32


def test_fp8_to_mxfp8_keeps_every_bit():
    values, scale = q.quantize(weight(300, 200), FP8_SQUARE)
    for given in (scale, q.scale_to_float(scale), scale.view(torch.float8_e8m0fnu)):
        new, report = q.convert(values, given, "mxfp8")
        assert report.changed == 0 and report.largest_error == 0 and str(report) == "weight: all 60000 elements kept"
        assert torch.equal(new.values.view(torch.uint8), values.view(torch.uint8)) and new.scale.shape == (300, 7)
        assert torch.equal(q.dequantize(*new, MX_ROW), q.dequantize(values, scale, FP8_SQUARE))
        back, report = q.convert(*new, "fp8")
        assert report.changed == 0 and torch.equal(back.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(back.scale, scale)


def test_mxfp8_to_fp8_keeps_what_scales_allow():
    values, scale = q.quantize(weight(), MX_ROW)
    old = q.dequantize(values, scale, MX_ROW, torch.float64)
    new, report = q.convert(values, scale, "fp8", "gate")
    got = q.dequantize(*new, FP8_SQUARE, torch.float64)
    assert report.elements == 256 * 384 and report.changed == (old != got).sum() > 0
    # what is kept is exactly what E4M3 has at the scale of the 128 x 128 block
    for i in range(0, 256, 128):
        for j in range(0, 384, 128):
            tile = (slice(i, i + 128), slice(j, j + 128))
            scaled = old[tile] / 2.0 ** (int(smallest_scale(old[tile].abs().max())) - 127)
            step = torch.clamp(2.0 ** (torch.floor(torch.log2(scaled.abs())) - 3), min=2.0**-9)
            assert torch.equal(got[tile] == old[tile], scaled / step == torch.round(scaled / step))
    worst = ((got - old) / old)[old != got].abs().max().item()
    assert report.largest_error == worst
    of = {error: dataclasses.replace(report, largest_error=error).largest_change for error in (1.0, 0.123456, 4.1e-5, math.inf)}
    assert list(of.values()) == ["100 % (became 0)", "12.3 %", "0.0041 %", "to NaN or Inf"]
    assert str(report) == f"gate: {report.changed} of {report.elements} elements changed, by up to {of.get(worst, f'{100 * worst:.3g} %')}"
    near = q.quantize(weight().clamp(-1, 1).sign() * torch.rand(256, 384).add(1), MX_ROW)  # 1 to 2 everywhere: scales differ by one step
    assert q.convert(*near, "fp8")[1].changed == 0


def test_scales_that_are_no_powers_of_two_are_reported():
    values, scale = q.quantize(weight(), FP8_SQUARE)
    numbers = q.scale_to_float(scale) * torch.tensor([[1.0, 1.3, 1.0], [1.0, 1.0, 1.7]])
    new, report = q.convert(values, numbers, "mxfp8")
    old, got = q.dequantize(values, numbers, FP8_SQUARE, torch.float64), q.dequantize(*new, MX_ROW, torch.float64)
    moved = old != got
    outside = torch.ones_like(moved)
    outside[:128, 128:256] = outside[128:, 256:] = False
    assert not moved[outside].any() and report.changed == moved.sum() > 0 and 0 < report.largest_error <= 1.0
    same = new.values.view(torch.uint8) == values.view(torch.uint8)
    assert same[outside].all()
    assert ((got - old).norm() / old.norm()) < 0.03


def test_not_a_number_in_conversions():
    x = weight(128, 128)
    x[3, 40] = math.nan
    values, scale = q.quantize(x, MX_ROW)
    new, report = q.convert(values, scale, "fp8")
    assert (new.scale == 255).all() and report.changed == 128 * 128 - 32 and report.largest_error == math.inf
    assert q.convert(values, scale, "mxfp8")[1].changed == 0


def test_a_checkpoint_there_and_back():
    tensors = {"norm": torch.randn(8)}
    for name, shape in (("gate", (4, 96, 256)), ("down", (4, 256, 96))):
        tensors[name], tensors[f"{name}.s"] = q.quantize(torch.randn(shape), FP8_SQUARE)
    there, reports = q.convert_checkpoint(tensors, "mxfp8", suffix=".s")
    assert [r.name for r in reports] == ["gate", "down"] and all(r.changed == 0 for r in reports)
    assert there["norm"] is tensors["norm"] and there["gate.s"].shape == (4, 96, 8) and set(there) == set(tensors)
    back, reports = q.convert_checkpoint(there, "fp8", suffix=".s")
    assert all(r.changed == 0 for r in reports)
    for name, tensor in tensors.items():
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8))


# ---- an independent implementation ----


def test_same_bits_as_torchao():
    """Rounding the scale up is its mode RCEIL. It differs on purpose for Inf (a finite stand-in there) and below 448 * 2^-127 (zeros)."""
    from torchao.prototype.mx_formats import mx_tensor as formats
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.utils import to_blocked as blocked

    up = ScaleCalculationMode.RCEIL
    x = torch.cat([torch.randn(512, 256), torch.randn(512, 256) * torch.randn(512, 256).mul(20).exp(), weight(512, 256)]).bfloat16()
    every = torch.arange(0x7F80, dtype=torch.int32)[:, None].repeat(1, 32).to(torch.int16).view(torch.bfloat16)
    every = every[every[:, 0].double() > 448 * 2.0**-127]
    steps = torch.tensor([448 * 2.0**k for k in range(-100, 100)])[:, None].repeat(1, 32).bfloat16()
    steps[:, 3:] /= 7
    bad = torch.randn(32, 32).bfloat16()
    bad[torch.arange(32), torch.arange(32)] = math.nan
    for part in (x, every, steps, torch.zeros(2, 64).bfloat16(), bad, x.float()[:512]):
        scale, values = formats.to_mx(part.contiguous(), E4M3, 32, up)
        got = q.quantize(part, MX_ROW)
        assert torch.equal(got.scale, scale.view(torch.uint8).view(got.scale.shape))
        there = got.scale.repeat_interleave(32, 1) != 255  # of a block that is not a number the scale says all
        assert torch.equal(got.values.view(torch.uint8)[there], values.view(torch.uint8).view(got.values.shape)[there])
        columns = q.quantize(part.T, MX_COLUMN)
        assert torch.equal(columns.scale.T, got.scale)
    scale = torch.randint(0, 256, (300, 20), dtype=torch.uint8)
    assert torch.equal(q.to_tcgen05(scale).flatten(), blocked(scale).flatten())
