"""The forward's tiles on a GPU: rounding, widening, order and sigmoid, instruction by instruction; and tiles of half a height."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

import triton
import triton.language as tl
from virtual import Group, Problem, assert_close

from mok.kernels.experts import in_order, rounded_pairs, sigmoid, widened_pairs
from mok.kernels.launch import ForwardPlan

BLOCK = 1024


@triton.jit
def arithmetic_kernel(x_ptr, nearest_ptr, wide_ptr, sigmoid_ptr, usual_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    nearest = rounded_pairs(x)
    tl.store(nearest_ptr + at, nearest)
    tl.store(wide_ptr + at, widened_pairs(nearest))
    tl.store(sigmoid_ptr + at, sigmoid(x))
    tl.store(usual_ptr + at, tl.sigmoid(x))


@triton.jit
def order_kernel(a_ptr, b_ptr, first_ptr, second_ptr, straight, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first, second = in_order(tl.load(a_ptr + at), tl.load(b_ptr + at), straight)
    tl.store(first_ptr + at, first)
    tl.store(second_ptr + at, second)


def numbers() -> torch.Tensor:
    """Every bf16, and a million other fp32 values, NaN, Inf and ties among them; fp32 [N]."""
    every = torch.arange(-0x8000, 0x8000, dtype=torch.int32) << 16
    some = torch.randint(-(2**31), 2**31, (2**20,), dtype=torch.int64).to(torch.int32)
    some[: 2**16] = some[: 2**16] & ~0xFFFF | 0x8000  # ties
    return torch.cat([every, some]).view(torch.float32).cuda()


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal, signs of zeros included; any NaN equals any other."""
    assert torch.equal(got.isnan(), want.isnan())
    integers = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
    there = ~want.isnan()
    assert torch.equal(got.view(integers)[there], want.view(integers)[there])


def test_rounding_widening_and_sigmoid():
    x = numbers()
    nearest, (wide, got, usual) = torch.empty_like(x, dtype=torch.bfloat16), (torch.empty_like(x) for _ in range(3))
    arithmetic_kernel[(x.numel() // BLOCK,)](x, nearest, wide, got, usual, BLOCK=BLOCK)
    same_bits(nearest, x.bfloat16())
    same_bits(wide, nearest.float())
    tiny = usual < 2.0**-126 * 1.0001
    assert not got[usual < 2.0**-126].any()
    assert ((got == 0) | (got >= 2.0**-126))[tiny].all()
    same_bits(got[~tiny], usual[~tiny])
    exact = torch.sigmoid(x.double())
    near = (x > -4) & (x < 88)  # further down the rounding of x log2(e) counts
    assert ((got.double() - exact).abs() <= 16 * 2.0**-24 * exact)[near].all()


@pytest.mark.parametrize("straight", [0, 1])
def test_order(straight):
    a, b = torch.randn(2, BLOCK, device="cuda").bfloat16()
    first, second = torch.empty_like(a), torch.empty_like(a)
    order_kernel[(1,)](a, b, first, second, straight, BLOCK=BLOCK)
    assert torch.equal(first, a if straight else b) and torch.equal(second, b if straight else a)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_half_tiles_move_no_bit(ranks):
    """Last tiles of 1, 63, 64, 65, 127 and 128 rows, and one of 64 after a whole one; scratch memory is NaN."""
    routes = torch.tensor([1, 63, 64, 65, 0, 127, 128, 192], device="cuda")
    tokens = int(routes.sum()) // 2
    problem = Problem(tokens, 512, 320, len(routes), 2, clamp=1.0)
    ids = torch.repeat_interleave(torch.arange(len(routes), device="cuda"), routes)
    problem.ids_TK = ids[torch.randperm(2 * tokens, device="cuda")].view(tokens, 2)
    problem.weights_TK = torch.rand(tokens, 2, device="cuda") + 0.5
    half, whole = (Group(problem, ranks, ForwardPlan(half_tiles=flag)) for flag in (True, False))
    out = half.run()
    assert_close(out, problem.expected())
    assert torch.equal(out, whole.run())
    if ranks == 1:
        _, rows, got = half.one_rank(0, save=True, saved_rows=1024)
        _, _, want = whole.one_rank(0, save=True, saved_rows=1024)
        count = int(rows.num_tokens)
        padding = rows.peer_rank[:count] < 0
        for a, b in ((got.gate_CI, want.gate_CI), (got.up_CI, want.up_CI)):
            assert torch.equal(a[:count], b[:count]) and not a[:count][padding].any()
