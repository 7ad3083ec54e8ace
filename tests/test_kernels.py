"""The kernels under Triton's interpreter, one process per program; the cases are in interpreted_cases.py and run in a process of their
own."""

from __future__ import annotations

import pytest
from scripts import cases_of, run_script, selected

pytest.importorskip("triton")

@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    return run_script("interpreted_cases.py", selected(request, "case"), interpret=True)


@pytest.mark.parametrize("case", cases_of("interpreted_cases.py"))
def test_case(results, case):
    assert not results[case], results[case]
