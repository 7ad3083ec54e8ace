"""The forward in blockwise FP8 and in MXFP8 under Triton's interpreter; the cases of each format run in a process of their own."""

from __future__ import annotations

import pytest
from scripts import cases_of, run_script, selected, thorough_but

pytest.importorskip("triton")

FIRST = ("fp8 ranks", "fp8 special_values", "mxfp8 clamp_and_saved", "mxfp8 special_values", "mxfp8 every_block_is_scaled")
CASES = [f"{name} {case}" for name in ("fp8", "mxfp8") for case in cases_of(f"interpreted_{name}.py")]


@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("fp8", "mxfp8"):
        if cases := selected(request, "case", f"{name} "):
            found |= {f"{name} {case}": what for case, what in run_script(f"interpreted_{name}.py", cases, interpret=True).items()}
    return found


@pytest.mark.parametrize("case", thorough_but(FIRST, CASES))
def test_case(results, case):
    assert not results[case], results[case]
