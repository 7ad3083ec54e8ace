"""Forward and backward in MXFP8 on a GPU, as test_fp8_backward.py has those in blockwise FP8, which tests the layer in both formats."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_fp8_backward import SIZES, SMALL, assert_near, equal
from virtual import DEVICE, Problem
from virtual_backward import Mxfp8Group, expected, make_d_y, many_rows

from mok.kernels import launch
from mok.kernels.launch_backward import BackwardPlan, Needs
from mok.kernels.launch_backward_mxfp8 import transposed_for
from mok.quantize import Recipe

RECIPE = Recipe("mxfp8")


@pytest.mark.parametrize("name", [name for name in SIZES if name != "tiny"])  # H is at least 64
def test_every_gradient_near_fp64_and_equal_for_every_number_of_ranks(name):
    tokens, hidden, width, experts, top_k, shared_width = SIZES[name]
    problem = Problem(tokens, hidden, width, experts, top_k, masked=0.1, shared_width=shared_width)
    d_y = make_d_y(problem)
    want, first = expected(problem, d_y, RECIPE), None
    for ranks in (1, 2, 3):
        got = Mxfp8Group(problem, d_y, ranks).run()
        assert_near(got, want)
        if ranks > 1:  # each rank's share of the shared experts' gradients: their sum is the user's
            got = {n: v for n, v in got.items() if not n.startswith("shared")}
        first = got if first is None else {n: first[n] for n in got}
        equal(got, first, ranks)


def test_every_scale_counts():
    """Blocks of dY by powers of two that the weights' blocks undo: without one of the scales nothing would be near."""
    problem = Problem(512, 1024, 512, 4, 2)
    factors = torch.exp2(torch.arange(32, device=DEVICE) % 8 * 3.0 - 10).repeat_interleave(32).bfloat16()
    d_y = make_d_y(problem) * factors
    problem.down /= factors[:, None]
    problem.down[:, :, 32:64] *= 16.0
    problem.gate[:, 32:64] *= 4.0
    problem.up[:, 64:96] /= 8.0
    assert_near(Mxfp8Group(problem, d_y, 2).run(), expected(problem, d_y, RECIPE))


@pytest.mark.parametrize("ranks", [1, 3])
def test_bits_do_not_depend_on_time(ranks):
    problem, d_y = many_rows()
    first = Mxfp8Group(problem, d_y, 1).run()
    assert_near(first, expected(problem, d_y, RECIPE))
    first = {n: v for n, v in first.items() if not n.startswith("shared")}
    group = Mxfp8Group(problem, d_y, ranks, SMALL, saved_rows=2000)
    for repeat in range(20):
        got = group.run(delay=True)
        equal({n: got[n] for n in first}, first, repeat)


def test_bits_do_not_depend_on_knobs_or_what_was_saved():
    problem, d_y = many_rows()
    first = Mxfp8Group(problem, d_y, 1).run()
    for changes in (dict(ring_tiles=2), dict(ring_tiles=12, group_tiles=3, parts=1), dict(num_sms=7, run=4), dict(half_tiles=False)):
        equal(Mxfp8Group(problem, d_y, 1, BackwardPlan(**changes)).run(), first, changes)
    for saved_rows in (0, 1000):
        equal(Mxfp8Group(problem, d_y, 1, saved_rows=saved_rows).run(), first, saved_rows)


def test_only_what_is_asked_for():
    problem = Problem(700, 512, 256, 6, 2, shared_width=256)
    d_y = make_d_y(problem)
    whole = Mxfp8Group(problem, d_y, 1).run()
    for x, weights, experts in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        got = Mxfp8Group(problem, d_y, 1, needs=Needs(bool(x), bool(weights), bool(experts), False)).run()
        names = {"out", *["d_x"] * x, *["d_weights"] * weights, *["gate", "up", "down"] * experts}
        assert got.keys() == names
        equal(got, {n: whole[n] for n in names}, names)


def test_weights_quantized_beforehand():
    """The same bits as with weights that are quantized in the call."""
    problem = Problem(600, 1024, 512, 4, 2)
    d_y, p = make_d_y(problem), problem
    group = Mxfp8Group(problem, d_y, 1)
    first, experts = group.run(), (p.gate, p.up, p.down)
    workspace, (x, ids, weights, _) = group.workspaces[0], group.inputs[0]
    rows = launch.schedule(workspace, ids, p.experts)
    _, saved = group.forward(workspace, rows, ids, weights, x, *experts, p.experts, save=True, saved_rows=128)
    transposed = transposed_for(DEVICE, *experts)
    got = group.backward(workspace, rows, saved, ids, d_y, x, weights, *experts, p.experts, plan=group.plan, transposed=transposed)
    assert torch.equal(got.d_x_TH, first["d_x"]) and torch.equal(got.experts[2], first["down"])
