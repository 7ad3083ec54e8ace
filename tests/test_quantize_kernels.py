"""The kernel of the number formats: under the interpreter (this file run as a program) bit for bit `mok.quantize`; what it compiles to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest
import torch

from mok.quantize import FP8_COLUMN, FP8_ROW, FP8_SQUARE, MX_COLUMN, MX_ROW, dequantize, quantize, to_tcgen05

BLOCKS = (MX_ROW, MX_COLUMN, FP8_ROW, FP8_COLUMN, FP8_SQUARE)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_values_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def same(got, want) -> None:  # type: ignore[no-untyped-def]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (a.view(torch.uint8) != b.view(torch.uint8)).sum()


def interpreted() -> None:
    from mok.kernels import quantize as kernels

    def check(x: torch.Tensor, blocks=BLOCKS) -> None:
        for block in blocks:
            same(kernels.quantize(x, block), quantize(x, block))

    torch.manual_seed(0)
    # every bf16 up to 448 with every sign: all roundings; every exponent with mantissas around 1.75 as the largest of a block: all scales
    every = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    beside = torch.full((580 * 2, 32), 448.0).bfloat16()
    beside[:580, :30] = torch.nn.functional.pad(every[:0x43E1], (0, 580 * 30 - 0x43E1)).view(580, 30)
    beside[580:] = -beside[:580]
    check(beside, [MX_ROW])
    steps = every.view(255, 128)[:, [0, 1, 0x5F, 0x60, 0x61, 0x7F]].reshape(-1)
    largest = torch.zeros(len(steps), 32).bfloat16()
    largest[:, 0], largest[:, 1], largest[:, 31] = steps, steps * 0.37, -steps * 1e-3
    check(largest, [MX_ROW])
    # ties in fp32 and their neighbours
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (table[1:] + table[:-1]) / 2
    ties = torch.stack([middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))], 1)
    check(torch.cat([ties, torch.full((126, 1), 448.0)], 1), [MX_ROW])
    # what is special: NaN, Inf, zeros, tiny values
    x = torch.randn(128, 256).bfloat16()
    x[torch.arange(32), torch.arange(32)] = torch.nan
    x[40, 70], x[41, 80], x[64:96, 64:128], x[100], x[101, 3:90] = torch.inf, -torch.inf, 0.0, -0.0, 1e-39
    check(x)
    # shapes, strides, experts
    for shape in ((1, 32), (2, 130, 72), (2, 1, 33, 160), (0, 64), (64, 0)):
        x = (torch.randn(shape) * torch.randn(shape).mul(3).exp()).bfloat16()
        check(x)
        if x.numel():
            check(x.mT, [MX_ROW, FP8_ROW])
    big = torch.full((64, 512), 1e30).bfloat16()
    big[:, 100:228] = torch.randn(64, 128).bfloat16()
    check(big[::2, 100:228])
    # only if there are so many
    x, memory = torch.randn(130, 144).bfloat16(), (torch.full((130, 144), 3, dtype=torch.uint8), torch.full((2, 2), 3, dtype=torch.uint8))
    for count in (4, 5):
        kernels.quantize_into(x, FP8_SQUARE, *memory, count=torch.tensor([count], dtype=torch.int32), least=5)
        assert bool((memory[0] == 3).all() and (memory[1] == 3).all()) == (count < 5)
    same((memory[0].view(torch.float8_e4m3fn), memory[1]), quantize(x, FP8_SQUARE))
    numbers = kernels.snap(x, MX_COLUMN, torch.tensor([5], dtype=torch.int32), 5)
    assert torch.equal(numbers.float(), dequantize(*quantize(x, MX_COLUMN), MX_COLUMN))
    # the layout of tcgen05, padded
    for shape in ((2, 256, 96), (40, 160)):
        x = torch.randn(shape).bfloat16()
        for given in (x, x.mT):
            values, scale = quantize(given, MX_ROW)
            same(kernels.quantize(given, MX_ROW, tcgen05=True), (values, to_tcgen05(scale)))
    with pytest.raises(ValueError, match=r"block=\(1, 128\): must be \(1, 32\)"):
        kernels.quantize(x, FP8_ROW, tcgen05=True)
    # and back: every code with all scales, then shapes that are no multiples
    codes = torch.arange(256, dtype=torch.uint8)
    values, scale = codes.repeat(256, 1).view(torch.float8_e4m3fn), codes[:, None].repeat(1, 8)
    for block in (MX_ROW, FP8_ROW):
        got, want = (t.nan_to_num(nan=-1) for t in (kernels.widen(values, scale[:, : 256 // block[1]].contiguous(), block),
                                                    dequantize(values, scale[:, : 256 // block[1]], block, torch.bfloat16)))  # fmt: skip
        large = want.abs() >= 2**-126  # smaller ones the interpreter rounds otherwise
        assert torch.equal(got[large], want[large])
        for shape in ((3, 130, 80), (1, 16), (2, 0, 32)):
            pair = quantize(torch.randn(shape), block)
            wide = kernels.widen(*pair, block, torch.tensor([5], dtype=torch.int32), 5)
            assert torch.equal(wide, dequantize(*pair, block, torch.bfloat16))


@pytest.mark.parametrize("shape", [(1, 64), (64, 1), (1, 1, 64)])
def test_strides_that_address_nothing_do_not_reach_the_kernel(shape, monkeypatch):
    """It is compiled for strides; a single row or column may have any."""
    pytest.importorskip("triton")
    from mok.kernels import quantize as kernels

    calls = []

    class Recorder:
        def __getitem__(self, grid):  # type: ignore[no-untyped-def]
            return lambda *arguments, **options: calls.append((grid, arguments[4:], options))

    monkeypatch.setattr(kernels, "quantize_kernel", Recorder())
    for x in (torch.zeros(shape), torch.zeros(64).as_strided(shape, [1 if size > 1 else 7 for size in shape])):
        kernels.quantize(x, FP8_ROW)
    assert len(calls) == 2 and calls[0] == calls[1]


CASES = {
    "rows of 32": dict(ROWS=1, COLUMNS=32),
    "rows of 32 for tcgen05": dict(ROWS=1, COLUMNS=32, TCGEN05=True),
    "rows of 32 of the transpose": dict(ROWS=1, COLUMNS=32, TCGEN05=True, ALIGNED=True),
    "columns of 32": dict(ROWS=32, COLUMNS=1),
    "rows of 128": dict(ROWS=1, COLUMNS=128),
    "columns of 128": dict(ROWS=128, COLUMNS=1),
    "squares": dict(ROWS=128, COLUMNS=128),
    "squares, counted": dict(ROWS=128, COLUMNS=128, COUNTED=True),
}


@pytest.mark.parametrize("arch", [90, 100, 103])
@pytest.mark.parametrize("case", CASES)
def test_compiles_to_wide_accesses_without_spills(case, arch):
    triton = pytest.importorskip("triton")
    from compile_kernels import CUOBJDUMP
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mok.kernels.quantize import TILE, quantize_kernel

    constants = {**dict(TCGEN05=False, ALIGNED=False, COUNTED=False, TILE=TILE), **CASES[case]}
    constants["x_row" if constants["ALIGNED"] else "x_column"] = 1
    pointers = dict(x_ptr="*bf16", values_ptr="*u8", scale_ptr="*u8", count_ptr="*i32")
    names = quantize_kernel.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    sixteens = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants and name not in ("M", "least")}
    source = ASTSource(quantize_kernel, signature, constants, sixteens)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=8))
    ptx = compiled.asm["ptx"]
    # 128 * 128 bf16 by 256 threads, 16 bytes at a time
    assert ptx.count("ld.global.v4.b32") == 8 and ptx.count("ld.global") == 8 + constants["COUNTED"]
    assert ptx.count("st.global.v4.b32") == 4 and ptx.count("st.global.v4") == 4  # beside those of the scales
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 32
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([str(CUOBJDUMP), "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    assert "STACK:0 " in usage


@pytest.mark.parametrize("arch", [90, 100, 103])
def test_widening_compiles_without_spills(arch):
    triton = pytest.importorskip("triton")
    from compile_kernels import CUOBJDUMP
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mok.kernels.quantize import TILE, widen_kernel

    constants = dict(COLUMNS=32, COUNTED=False, TILE=TILE)
    pointers = dict(values_ptr="*u8", scale_ptr="*u8", out_ptr="*bf16", count_ptr="*i32")
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in widen_kernel.arg_names}
    sixteens = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name not in (*constants, "M", "least")}
    compiled = triton.compile(
        ASTSource(widen_kernel, signature, constants, sixteens), target=GPUTarget("cuda", arch, 32), options=dict(num_warps=8)
    )
    assert compiled.asm["ptx"].count("ld.global.v4.b32") == 4, "128 * 128 bytes by 256 threads, 16 bytes at a time"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([str(CUOBJDUMP), "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    assert "STACK:0 " in usage


if __name__ == "__main__":
    interpreted()
