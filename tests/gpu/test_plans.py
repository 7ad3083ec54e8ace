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
from checks import hopper_launches
from virtual_backward import assert_near, expected, many_rows

from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan
from mok.tune import FIELDS, Key, values_of

FORWARD, BACKWARD = FIELDS["forward"], FIELDS["backward"]
KEY = Key("any", 2500, 1024, 768, 12, 4)  # of many_rows
PROGRAMS = 20  # so few that even eight waves are no more tiles than there are


def groups_of_waves() -> list[int]:
    """The tuner's values of group_tiles: no limit, two waves and eight waves of so few programs."""
    return values_of("backward", "group_tiles", KEY, PROGRAMS)


def test_all_fields_are_here():
    """A new field of the tuner must come into these tests."""
    assert len(groups_of_waves()) == len(BACKWARD["group_tiles"])
    assert set(FORWARD) == {"minibatch_tiles", "parts", "half_tiles"} and set(BACKWARD) == {"group_tiles", "run", "parts"}


@pytest.mark.parametrize("half_tiles", FORWARD["half_tiles"])
@pytest.mark.parametrize("parts", FORWARD["parts"])
def test_forward(parts, half_tiles):
    problem, _ = many_rows()
    first = virtual.Group(problem, 1).run()
    virtual.assert_close(first, problem.expected())
    for minibatch_tiles in FORWARD["minibatch_tiles"]:
        plan = ForwardPlan(minibatch_tiles=minibatch_tiles, parts=parts, half_tiles=half_tiles)
        for ranks in (1, 2) if minibatch_tiles in (8, 20) else (1,):
            with hopper_launches(ranks):
                assert torch.equal(virtual.Group(problem, ranks, plan).run(), first), (ranks, plan)


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
    """Groups of any number of tiles, and of the tuner's numbers of waves, of all programs and of few."""
    problem, d_y = many_rows()
    first = group(problem, d_y, 1).run()
    if group is virtual_backward.Group:  # test_fp8_backward.py has the other's values
        assert_near(first, expected(problem, d_y))
    sms = torch.cuda.get_device_properties(virtual.DEVICE).multi_processor_count
    of_all = {0, 1, 7, 30, 1000, *values_of("backward", "group_tiles", KEY, sms)}
    cuts = [(group_tiles, 0) for group_tiles in sorted(of_all)] + [(group_tiles, PROGRAMS) for group_tiles in groups_of_waves()]
    ahead = group is virtual_backward.Group and run in (0, 1)
    for group_tiles, num_sms in cuts:
        plan = BackwardPlan(num_sms=num_sms, group_tiles=group_tiles, run=run, parts=parts)
        with hopper_launches(1, int(ahead)):  # FP8 has that forward for its shared experts
            got = group(problem, d_y, 1, plan).run()
        for name, value in got.items():
            assert torch.equal(value, first[name]), (plan, name)


@pytest.mark.parametrize("parts", (4, 8))
def test_backward_of_two_ranks(parts):
    problem, d_y = many_rows()
    first = virtual_backward.Group(problem, d_y, 1).run()
    first = {name: value for name, value in first.items() if not name.startswith("shared")}  # shares of a sum
    cuts = [(group_tiles, 0) for group_tiles in (0, 7)] + [(group_tiles, PROGRAMS) for group_tiles in groups_of_waves()[1:]]
    for group_tiles, num_sms in cuts:
        plan = BackwardPlan(num_sms=num_sms, group_tiles=group_tiles, parts=parts)
        with hopper_launches(2, 2):
            got = virtual_backward.Group(problem, d_y, 2, plan).run()
        for name, value in first.items():
            assert torch.equal(got[name], value), (plan, name)
