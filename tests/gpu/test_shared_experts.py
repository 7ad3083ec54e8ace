"""The promises about bits where there are shared experts: every output and gradient of a group, a hundred times with late ranks; and what
does not depend on the number of ranks."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from virtual_backward import Group, Shares, assert_near, expected, many_rows

from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan

PLANS = dict(plan=BackwardPlan(ring_tiles=8, group_tiles=2), forward_plan=ForwardPlan(minibatch_tiles=4, ring_tiles=8))
SAVED_ROWS = (0, 1000, 1 << 20)  # none, some, all
REPETITIONS = {1: 34, 2: 34, 4: 9}  # with each of SAVED_ROWS


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object) -> None:
    assert got.keys() == want.keys(), what
    for name, value in want.items():
        differs = (got[name] != value).flatten(1).any(1).nonzero()
        assert not len(differs), (what, name, len(differs), int(differs[0]))


@pytest.mark.parametrize("ranks", REPETITIONS)
def test_bits_do_not_depend_on_time(ranks):
    """Each rank's share of the shared experts' gradients by itself: their sum could hide a difference."""
    problem, d_y = many_rows()
    alone = Group(problem, d_y, 1).run()
    assert_near(alone, expected(problem, d_y))
    first = None
    for saved_rows in SAVED_ROWS:
        group = Shares(problem, d_y, ranks, saved_rows=saved_rows, **PLANS)
        first = group.run() if first is None else first
        assert sum(name.startswith("shared") for name in first) == 3 + 3 * ranks
        for repeat in range(REPETITIONS[ranks]):
            got = group.run(delay=True)
            equal(got, first, (saved_rows, repeat))
            if ranks == 1:
                got = {name: got[name] for name in alone}
                equal(got, alone, (saved_rows, repeat))
            else:
                routed = [name for name in alone if not name.startswith("shared")]
                equal({name: got[name] for name in routed}, {name: alone[name] for name in routed}, (saved_rows, repeat))
