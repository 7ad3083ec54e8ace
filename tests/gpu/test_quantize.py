"""The kernel of the number formats on a GPU: bit for bit `mok.quantize`, for every bf16 and around every rounding step of fp32."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from mok.kernels import quantize as kernels
from mok.quantize import FP8_COLUMN, FP8_ROW, FP8_SQUARE, MX_COLUMN, MX_ROW, dequantize, quantize, to_tcgen05

BLOCKS = (MX_ROW, MX_COLUMN, FP8_ROW, FP8_COLUMN, FP8_SQUARE)


def check(x: torch.Tensor, blocks=BLOCKS) -> None:
    """x lies on the CPU, where the definition is evaluated."""
    for block in blocks:
        got, want = kernels.quantize(x.cuda(), block), quantize(x, block)
        for name, a, b in zip(("values", "scale"), got, want, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            a, b = a.cpu().view(torch.uint8), b.view(torch.uint8)
            assert torch.equal(a, b), f"{block} {name}: {(a != b).sum()} differ, the first at {(a != b).nonzero()[0].tolist()}"


def test_every_bf16_as_the_largest_of_its_block():
    every = torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # NaN and Inf too
    x = torch.zeros(0x8000, 32).bfloat16()
    x[:, 0], x[:, 1], x[:, 31] = every, every * 0.37, -every * 1e-3
    check(x.view(-1, 128))


def test_every_rounding():
    every = torch.arange(0x43E1, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # 0 to 448
    x = torch.full((580 * 2, 32), 448.0).bfloat16()
    x[:580, :30] = torch.nn.functional.pad(every, (0, 580 * 30 - 0x43E1)).view(580, 30)
    x[580:] = -x[:580]
    check(x)
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (table[1:] + table[:-1]) / 2
    ties = torch.stack([middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))], 1)
    check(torch.cat([ties, torch.full((126, 1), 448.0)], 1))


def test_special_values():
    x = torch.randn(512, 1024).bfloat16()
    x[torch.arange(32), torch.arange(32)] = torch.nan
    x[40, 70], x[41, 80], x[64:96, 64:128], x[100], x[101, 3:90] = torch.inf, -torch.inf, 0.0, -0.0, 1e-39
    check(x)
    check(x.float() * 1e-4)


@pytest.mark.parametrize(
    "shape", [(1, 32), (1, 16), (4096, 7168), (1000, 1408), (130, 72), (33, 160), (3, 160, 96), (2, 2, 40, 136), (0, 64)]
)
def test_shapes_and_strides(shape):
    x = (torch.randn(shape) * torch.randn(shape).mul(3).exp()).bfloat16()
    check(x)
    if x.numel():
        check(x.mT, [MX_ROW, FP8_ROW, FP8_SQUARE])
    strided = kernels.quantize(x.cuda()[..., ::2, 5:29], MX_ROW)
    for a, b in zip(strided, quantize(x[..., ::2, 5:29], MX_ROW), strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 128), (4, 256, 512), (300, 160), (2, 40, 640)])
def test_scales_for_tcgen05(shape):
    x = torch.randn(shape).bfloat16()
    for given in (x, x.mT):
        values, scale = quantize(given, MX_ROW)
        device = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cuda").copy_(given)
        got = kernels.quantize(device, MX_ROW, tcgen05=True)
        assert torch.equal(got.values.cpu().view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(got.scale.cpu(), to_tcgen05(scale))


@pytest.mark.parametrize("shape", [(256, 512), (130, 80), (3, 160, 96), (0, 64)])
def test_snapped_weights_are_what_their_quantized_form_stands_for(shape):
    x = (torch.randn(shape) * torch.randn(shape).mul(3).exp()).bfloat16()
    if x.numel():
        x[..., 1, 1], x[..., 2, 2], x[..., 3, :] = torch.nan, torch.inf, 1e-38
    want = dequantize(*quantize(x, MX_ROW), MX_ROW, torch.bfloat16)
    assert torch.equal(kernels.snap(x.cuda(), MX_ROW).cpu().nan_to_num(nan=-77.0), want.nan_to_num(nan=-77.0))


@pytest.mark.parametrize("block", [MX_ROW, FP8_ROW])
def test_widening(block):
    codes = torch.arange(256, dtype=torch.uint8)
    values, scale = codes.repeat(256, 1).view(torch.float8_e4m3fn), codes[:, None].repeat(1, 256 // block[1])
    want = dequantize(values, scale, block, torch.bfloat16)
    assert torch.equal(kernels.widen(values.cuda(), scale.cuda(), block).cpu().nan_to_num(nan=-77.0), want.nan_to_num(nan=-77.0))


@pytest.mark.parametrize("block", [MX_ROW, FP8_ROW])
def test_bf16_holds_every_number_of_the_codes_from_3_to_246(block):
    """Widened it is the number in fp64; and such numbers are what they become when they are snapped."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.clone()
    values[[0x7F, 0xFF]] = 0x7E  # NaN
    values, scale = values.repeat(244, 1).view(torch.float8_e4m3fn), codes[3:247, None].repeat(1, 256 // block[1])
    exact = dequantize(values, scale, block, torch.float64)
    numbers = kernels.widen(values.cuda(), scale.cuda(), block)
    assert torch.equal(numbers.cpu().double(), exact)
    assert torch.equal(kernels.snap(numbers, block), numbers)


def test_the_number_of_rows_does_not_recompile():
    """Nor does the stride of a single one."""
    before = None
    memory = torch.randn(4096 * 256, device="cuda").bfloat16()
    for rows, stride in ((1, 256), (1, 7), (1, 1), (16, 256), (17, 256), (4096, 256)):
        kernels.quantize(memory.as_strided((rows, 256), (stride, 1)), MX_ROW)
        count = sum(len(caches[0]) for caches in kernels.quantize_kernel.device_caches.values())
        assert before in (None, count)
        before = count


if __name__ == "__main__":  # bandwidth
    x = torch.randn(16, 4096, 7168, device="cuda").bfloat16()
    for name, given, block in (("rows", x, MX_ROW), ("transpose", x.mT, MX_ROW), ("1 x 128", x, FP8_ROW), ("128 x 128", x, FP8_SQUARE)):
        times = []
        for _ in range(20):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kernels.quantize(given, block)
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        ms = sorted(times)[10]
        print(f"{name}: {ms:.3f} ms, {x.numel() * 3 / ms / 1e6:.0f} GB/s")
