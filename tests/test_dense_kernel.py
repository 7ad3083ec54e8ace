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
    from mok.kernels.dense import row_linear, row_linear_backward

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got.double() - want).norm() / want.norm().clamp(min=1e-30))

    torch.manual_seed(0)
    for x_dtype, w_dtype in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        for tokens, hidden, outputs in ((200, 96, 17), (1, 64, 5), (0, 64, 5), (130, 100, 130)):
            x, w, g = torch.randn(tokens, hidden).to(x_dtype), torch.randn(outputs, hidden).to(w_dtype), torch.randn(tokens, outputs)
            out = row_linear(x, w)
            d_x, d_w = row_linear_backward(g, x, w)
            assert (out.dtype, d_x.dtype, d_w.dtype) == (torch.float32, x_dtype, w_dtype)
            assert error(out, x.double() @ w.double().T) < 1e-6
            assert error(d_x, g.double() @ w.double()) < (3e-3 if x_dtype == torch.bfloat16 else 1e-6)
            assert error(d_w, g.double().T @ x.double()) < (3e-3 if w_dtype == torch.bfloat16 else 1e-6)
            if tokens > 100:
                assert torch.equal(row_linear(x[70:71], w), out[70:71])


@pytest.mark.parametrize("arch, instruction", [(90, "wgmma"), (100, "tcgen05"), (103, "tcgen05")])
def test_compiles_to_tensor_core_instructions(arch, instruction):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mok.kernels.dense import dense_kernel

    pointers = dict(a_ptr="*bf16", b_ptr="*bf16", c_ptr="*fp32")
    numbers = dict.fromkeys(("M", "N", "K"), "i32") | dict(a_row="i64", b_column="i64")
    constants = dict(a_column=1, b_row=1, NARROW=True, ROUND=False, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64)
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    order = {name: signature[name] for name in dense_kernel.arg_names}
    compiled = triton.compile(ASTSource(dense_kernel, order, constants), target=GPUTarget("cuda", arch, 32), options=dict(num_warps=8))
    assert instruction in compiled.asm["ptx"] and compiled.metadata.shared < 228_000


if __name__ == "__main__":
    values()
