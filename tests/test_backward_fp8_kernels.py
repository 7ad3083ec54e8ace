"""The backward in blockwise FP8 without a GPU: under Triton's interpreter (interpreted_backward_fp8.py) and compiled
(compile_backward_fp8.py)."""

from __future__ import annotations

import pytest
from scripts import cases_of, run_script, selected, thorough_but

pytest.importorskip("triton")

FIRST = ("near_the_executor", "ranks_and_ring", "quantized_weight_gradients", "special_values", "no_block_crosses_an_expert")
JOBS = (
    "plain 90", "runs 90", "quantized weight gradients 90", "frozen 90", "everything 90", "odd sizes added 90", "runs 100",
    "everything 100", "everything 103",
)  # fmt: skip
# Reads and writes of spilled registers in a step of 400 instructions: on Blackwell a step's products come from tensor memory into
# registers, beside the sums that they are added to with their scales; and the row of a run's gradient.
IN_LOOP = {"everything 100": 25, "runs 100": 27, "everything 103": None}
FIRST_JOBS = ("plain 90", "everything 90", "everything 100", "everything 103")


@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    return run_script("interpreted_backward_fp8.py", selected(request, "case"), interpret=True)


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, dict]:
    return run_script("compile_backward_fp8.py", selected(request, "job"))


@pytest.mark.parametrize("case", thorough_but(FIRST, cases_of("interpreted_backward_fp8.py")))
def test_case(results, case):
    assert not results[case], results[case]


@pytest.mark.parametrize("job", thorough_but(FIRST_JOBS, JOBS))
def test_compiles_for_the_chip(compiled, job):
    facts = compiled[job]
    # Whole and half tiles have a loop each of two products of 128 x 128 x 128, four instructions long; weights' gradients are bf16.
    assert facts["e4m3"] == (16 if job.endswith(" 90") else 0) and facts["tensor_core"] >= facts["e4m3"]
    assert facts["copy_engine"] > 0 and facts["announced"] > 0
    assert facts["unfinished"] == 0, "announced before it is in memory"
    assert facts["shared"] <= 232448, "more shared memory than the chip has"
    assert facts["serialized"] == 0, "products wait for each other"
    assert facts["exponentials"] == 2 * 4, "the sigmoid of a slice, in whole or in half tiles, is computed twice"
    assert facts["local_in_loop"] == IN_LOOP.get(job, 0), "the products' loops spill"
    assert facts["stack"] <= {"plain 90": 352, "runs 90": 352, "frozen 90": 352}.get(job, 1152), facts
