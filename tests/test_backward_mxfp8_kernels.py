"""The backward in MXFP8 without a GPU: under Triton's interpreter (interpreted_backward_mxfp8.py) and, on tensor cores that multiply by
scales, compiled (compile_backward_mxfp8.py; compile_backward.py has the other form)."""

from __future__ import annotations

import pytest
from scripts import cases_of, run_script, selected, thorough_but

pytest.importorskip("triton")

FIRST = ("near_the_executor", "every_block_is_scaled", "no_block_crosses_an_expert")
JOBS = ("plain 100", "runs 100", "frozen 100", "everything 100", "odd sizes added 103")
FIRST_JOBS = ("plain 100", "odd sizes added 103")


@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    return run_script("interpreted_backward_mxfp8.py", selected(request, "case"), interpret=True)


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, dict]:
    return run_script("compile_backward_mxfp8.py", selected(request, "job"))


@pytest.mark.parametrize("case", thorough_but(FIRST, cases_of("interpreted_backward_mxfp8.py")))
def test_case(results, case):
    assert not results[case], results[case]


@pytest.mark.parametrize("job", thorough_but(FIRST_JOBS, JOBS))
def test_compiles_for_the_chip(compiled, job):
    facts = compiled[job]
    # Every product with a weight is block-scaled. Those without scales are the weights' gradients, in bf16; where experts are frozen there
    # is none.
    assert facts["scaled"] == 8 and (facts["tensor_core"] == 8) == job.startswith("frozen"), facts
    assert facts["unscaled"] == facts["of_bf16"] == facts["tensor_core"] - 8, "a product that is neither"
    assert facts["code_copies"] > 0, "codes go through registers"
    assert facts["copy_engine"] > 0 and facts["announced"] > 0
    assert facts["unfinished"] == 0, "announced before it is in memory"
    assert facts["shared"] <= 232448, "more shared memory than the chip has"
    assert facts["exponentials"] == 4, "the sigmoid of a slice is computed twice"
    if not job.endswith(" 103"):  # of a run, what its stores need stands in the loop
        assert facts["local_in_loop"] <= (4 if job == "runs 100" else 1), "the products' loops spill more than where a gradient is stored"
    assert facts["stack"] <= 1152, facts
