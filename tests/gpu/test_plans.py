"""Every plan that the tuner may choose, on a GPU: the bits of the default plan, which is near fp64."""

from __future__ import annotations

import itertools
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import test_fp8
import virtual
import virtual_backward
from virtual_backward import assert_near, expected, many_rows

from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan
from mok.tune import FIELDS

FORWARD, BACKWARD = FIELDS["forward"], FIELDS["backward"]


def test_all_fields_are_here():
    """A new field of the tuner must come into these tests."""
    assert set(FORWARD) == {"minibatch_tiles", "parts", "half_tiles"} and set(BACKWARD) == {"group_tiles", "run", "parts"}


@pytest.mark.parametrize("half_tiles", FORWARD["half_tiles"])
@pytest.mark.parametrize("parts", FORWARD["parts"])
def test_forward(parts, half_tiles):
    problem, _ = many_rows()
    first = virtual.Group(problem, 1).run()
    virtual.assert_close(first, problem.expected())
    for minibatch_tiles in FORWARD["minibatch_tiles"]:
        plan = ForwardPlan(minibatch_tiles=minibatch_tiles, parts=parts, half_tiles=half_tiles)
        assert torch.equal(virtual.Group(problem, 1, plan).run(), first), plan


@pytest.mark.parametrize("parts", FORWARD["parts"])
def test_forward_with_quantized_experts(parts):
    problem, _ = many_rows()
    for form in test_fp8.FORMS:
        first = test_fp8.Fp8Group(form, problem, 1).run()
        test_fp8.assert_near(first, test_fp8.expected(problem, test_fp8.FORMS[form]))
        for minibatch_tiles, half_tiles in itertools.product(FORWARD["minibatch_tiles"], FORWARD["half_tiles"]):
            plan = ForwardPlan(minibatch_tiles=minibatch_tiles, parts=parts, half_tiles=half_tiles)
            assert torch.equal(test_fp8.Fp8Group(form, problem, 1, plan).run(), first), (form, plan)


@pytest.mark.parametrize("run", BACKWARD["run"])
@pytest.mark.parametrize("parts", BACKWARD["parts"])
@pytest.mark.parametrize("group", [virtual_backward.Group, virtual_backward.Fp8Group], ids=["bf16", "fp8"])
def test_backward(group, parts, run):
    """Groups of any number of tiles; the tuner's are numbers of waves."""
    problem, d_y = many_rows()
    first = group(problem, d_y, 1).run()
    if group is virtual_backward.Group:  # test_fp8_backward.py has the other's values
        assert_near(first, expected(problem, d_y))
    for group_tiles in (0, 1, 7, 30, 1000):
        got = group(problem, d_y, 1, BackwardPlan(group_tiles=group_tiles, run=run, parts=parts)).run()
        for name, value in got.items():
            assert torch.equal(value, first[name]), (group_tiles, name)
