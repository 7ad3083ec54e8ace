"""The backward's kernels without a GPU: under Triton's interpreter (interpreted_backward.py) and compiled (compile_backward.py)."""

from __future__ import annotations

import pytest
from scripts import cases_of, run_script, selected, thorough_but

pytest.importorskip("triton")

JOBS = (
    "plain 90", "runs 90", "odd sizes added 90", "everything 90", "everything 100", "everything 103",
    "mxfp8 90", "mxfp8 everything 90", "mxfp8 odd sizes added 90",
)  # fmt: skip
FIRST_JOBS = ("plain 90", "everything 90", "everything 100", "everything 103", "mxfp8 90")


@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    return run_script("interpreted_backward.py", selected(request, "case"), interpret=True)


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, list[dict]]:
    return run_script("compile_backward.py", selected(request, "job"))


@pytest.mark.parametrize("case", cases_of("interpreted_backward.py"))
def test_case(results, case):
    assert not results[case], results[case]


@pytest.mark.parametrize("job", thorough_but(FIRST_JOBS, JOBS))
def test_compiles_for_the_chip(compiled, job):
    backward, *others = compiled[job]
    assert backward["tensor_core"] > 0, "no wgmma or tcgen05"
    assert backward["copy_engine"] > 0, "no bulk tensor loads"
    assert backward["announced"] > 0
    # Only tiles of a weight's gradient, which nobody reads in this kernel, go by the copy engine: nobody waits until they are in memory.
    assert backward["copy_engine_stores"] <= 4, "something else than a tile of a weight's gradient is stored by the copy engine"
    assert backward["shared"] <= 232448, "more shared memory than the chip has"
    assert backward["serialized"] == 0, "products wait for each other"
    assert backward["exponentials"] == 2 * 4, "the sigmoid of a slice, in whole or in half tiles, is computed twice"
    assert backward["spills_between_products"] == 0, "the products' loops spill"
    assert all(kernel["stack"] == 0 for kernel in others)
    # What is left are arguments and addresses that wait on the stack; with a clamp some values of a slice, with cut experts the sum as it
    # is loaded.
    assert backward["stack"] <= {"plain 90": 128, "runs 90": 224, "mxfp8 90": 128}.get(job, 1152), backward
