"""The layers of published models on a GPU: true widths and choices per token, few experts; forward and backward against fp64, and in MXFP8
and blockwise FP8 against bf16.

A shape that several models share is tested once. One half of the rows keeps gate and up for the backward, the other half is recomputed.
"""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from virtual import Problem
from virtual_backward import Fp8Group, Group, Mxfp8Group, assert_near, expected, make_d_y

from mok import MoEConfig
from mok.bench.shapes import ONE_GPU
from mok.config import PRESETS
from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan

TOKENS = 417
Shape = tuple[int, int, int, int, float | None, float | None]  # hidden, width, shared width, K, clamp, clamp of the shared experts


def shape_of(name: str) -> Shape:
    c = MoEConfig.preset(name)
    return c.hidden_size, c.intermediate_size, c.shared_width, c.top_k, c.clamp, c.shared_clamp


SHAPES = {shape_of(name): name for name in reversed(PRESETS)}  # the first model of every shape
SHAPES[2880, 2880, 0, 4, 7.0, None] = "gpt-oss-120b's widths"
SEVERAL_RANKS = ("deepseek-v3", "deepseek-v4-pro", "qwen3-next-80b-a3b", "moonlight-16b-a3b")


@pytest.fixture(autouse=True)
def _memory_is_returned():
    yield
    torch.cuda.empty_cache()  # gigabytes that other processes of this GPU may need


def problem_of(shape: Shape) -> tuple[Problem, torch.Tensor]:
    hidden, width, shared_width, top_k, clamp, shared_clamp = shape
    clamps = dict(clamp=clamp, shared_clamp=shared_clamp)
    problem = Problem(TOKENS, hidden, width, top_k + 2, top_k, masked=0.05, shared_width=shared_width, **clamps)
    return problem, make_d_y(problem)


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.get)
def test_near_fp64(shape):
    problem, d_y = problem_of(shape)
    got = Group(problem, d_y, 1, saved_rows=TOKENS * problem.top_k // 2).run()
    assert_near(got, expected(problem, d_y))


@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_two_ranks_have_the_bits_of_one(name):
    """With rings so small that experts are cut. The shared experts' gradients are sums of the ranks' shares, so only near."""
    problem, d_y = problem_of(shape_of(name))
    plans = dict(plan=BackwardPlan(ring_tiles=2), forward_plan=ForwardPlan(minibatch_tiles=2, ring_tiles=4))
    got = Group(problem, d_y, 2, saved_rows=TOKENS * problem.top_k // 2, **plans).run()
    assert_near(got, expected(problem, d_y))
    alone = Group(problem, d_y, 1, saved_rows=TOKENS * problem.top_k // 2).run()
    for key, value in alone.items():
        assert key.startswith("shared") or torch.equal(got[key], value), key


def widths() -> list[object]:
    """Hidden, width, K, experts and clamp for every pair of hidden and width: K and experts of the shape that is measured, if one is.
    What is not measured is left out as a rule: -m '' runs it, too."""
    measured, found = {}, []
    for name, shape in ONE_GPU.items():
        measured.setdefault((shape.H, shape.I), (name, shape.K, shape.E))
    for hidden, width, _, top_k, clamp, _ in SHAPES:
        name, k, experts = measured.pop((hidden, width), ("", top_k, top_k + 2))
        marks = [] if name else [pytest.mark.thorough]
        found.append(pytest.param((hidden, width, k, experts, clamp), id=name or f"{hidden}x{width}", marks=marks))
    assert not measured, "a measured shape that no model has"
    return found


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """In fp64, part by part."""
    dot = lambda x, y: sum(float((i.double() * j.double()).sum()) for i, j in zip(x.split(8), y.split(8), strict=True))  # noqa: E731
    return dot(a, b) / (dot(a, a) * dot(b, b)) ** 0.5


@pytest.mark.parametrize("quantized", [Fp8Group, Mxfp8Group])
@pytest.mark.parametrize("shape", widths())
def test_quantized_gradients_point_where_those_of_bf16_point(shape, quantized):
    """0.996 is promised. The other side is fp64, rounded where the layer in bf16 rounds, from which that is 0.8 % away at most
    (`test_near_fp64`): an angle that is taken from that of 0.996. Quantized it must be, so the cosine is not 1."""
    hidden, width, top_k, experts, clamp = shape
    problem = Problem(TOKENS, hidden, width, experts, top_k, masked=0.05, clamp=clamp)
    d_y = make_d_y(problem)
    got, want = quantized(problem, d_y, 1).run(), expected(problem, d_y)
    least = math.cos(math.acos(0.996) - 0.008)
    found = {name: cosine(value, want[name]) for name, value in got.items()}
    assert found.keys() == {"out", "d_x", "d_weights", "gate", "up", "down"}
    assert all(least <= value < 1 - 1e-6 for value in found.values()), found
