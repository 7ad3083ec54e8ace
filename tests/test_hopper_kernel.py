"""The forward and the backward for Hopper under an interpreter, every case in a process of its own; they are in interpreted_hopper.py and
interpreted_backward_hopper.py."""

from __future__ import annotations

import pytest
from scripts import cases_of, run_script, thorough_but

pytest.importorskip("triton.experimental.gluon")

FIRST = (
    "bits", "shared_bits", "gathered", "gathered_late", "own_rows_are_gathered", "three_ranks", "lost_signal_ends_in_a_report", "faults",
)  # fmt: skip
FIRST_OF_BACKWARD = ("bits", "small_ring", "shared", "lost_signal_ends_in_a_report", "faults")


@pytest.mark.parametrize("case", thorough_but(FIRST, cases_of("interpreted_hopper.py")))
def test_forward_case(case):
    found = run_script("interpreted_hopper.py", [case], interpret=True)
    assert not found[case], found[case]


@pytest.mark.parametrize("case", thorough_but(FIRST_OF_BACKWARD, cases_of("interpreted_backward_hopper.py")))
def test_backward_case(case):
    found = run_script("interpreted_backward_hopper.py", [case], interpret=True)
    assert not found[case], found[case]
