"""The router's product on the GPU: values under the interpreter (this file run as a program), and what it compiles to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_values_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def values() -> None:
    from mok.kernels.dense import product, row_linear, row_linear_backward

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))

    torch.manual_seed(0)
    for x_dtype, w_dtype in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        for tokens, hidden, outputs in ((200, 96, 17), (1, 64, 5), (0, 64, 5), (130, 100, 130), (1100, 40, 6)):
            x, w, g = torch.randn(tokens, hidden).to(x_dtype), torch.randn(outputs, hidden).to(w_dtype), torch.randn(tokens, outputs)
            out = row_linear(x, w)
            d_x, d_w = row_linear_backward(g, x, w)
            assert (out.dtype, d_x.dtype, d_w.dtype) == (torch.float32, x_dtype, w_dtype)
            assert error(out, x.double() @ w.double().T) < 1e-6
            assert x_dtype == torch.float32 or torch.equal(row_linear_backward(g[70:71], x[70:71], w)[0], d_x[70:71])
            assert error(d_x, g.double() @ w.double()) < (3e-3 if x_dtype == torch.bfloat16 else 1e-6)
            assert error(d_w, g.double().T @ x.double()) < (3e-3 if w_dtype == torch.bfloat16 else 1e-6)
            if tokens > 100:
                assert torch.equal(row_linear(x[70:71], w), out[70:71])


    # parts of the sum over tokens: 1,100 of them are 3 parts of 384, each a sum of its own, added in order
    a, b = torch.randn(7, 1100), torch.randn(1100, 9).bfloat16()
    parts = [product(a[:, i : i + 384], b[i : i + 384]) for i in (0, 384, 768)]
    assert torch.equal(product(a, b, in_parts=True), parts[0] + parts[1] + parts[2])
    assert torch.equal(product(a[:, :512], b[:512], in_parts=True), product(a[:, :512], b[:512]))
    # fp32 times bf16 as exactly as by fp64, but for the sum's own rounding; Inf stays Inf
    a = torch.cat([torch.randn(40, 1) * 2.0 ** torch.arange(-60, 60, 3).float()[:, None], torch.tensor([[torch.inf], [-torch.inf], [0.0]])])
    b = torch.tensor([[1.0, -3.0]]).bfloat16()
    assert torch.equal(product(a, b), (a.double() @ b.double()).float())


@pytest.mark.parametrize("arch, instruction", [(90, "wgmma"), (100, "tcgen05"), (103, "tcgen05")])
@pytest.mark.parametrize("mixed", [False, True])
def test_compiles_to_tensor_core_instructions(arch, instruction, mixed):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mok.kernels.dense import dense_kernel

    pointers = dict(a_ptr="*fp32" if mixed else "*bf16", b_ptr="*bf16", c_ptr="*fp32")
    numbers = dict.fromkeys(("M", "N", "K", "part"), "i32") | dict(a_row="i64", b_column="i64")
    constants = dict(a_column=1, b_row=1, NARROW=not mixed, MIXED=mixed, ROUND=False, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64)
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    order = {name: signature[name] for name in dense_kernel.arg_names}
    options, target = dict(num_warps=8, num_stages=2), GPUTarget("cuda", arch, 32)
    compiled = triton.compile(ASTSource(dense_kernel, order, constants), target=target, options=options)
    assert instruction in compiled.asm["ptx"] and compiled.metadata.shared < 228_000


if __name__ == "__main__":
    values()
