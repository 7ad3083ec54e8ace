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
HOPPER_JOBS = {  # bytes of stack: arguments and addresses that wait there, with a clamp and shared experts some values of a slice
    "hopper 90": 128, "hopper cut 90": 128, "hopper two ranks 90": 128, "hopper clamp 90": 160, "hopper shared 90": 256,
    "hopper everything 90": 320,
}  # fmt: skip
FIRST_HOPPER_JOBS = ("hopper 90", "hopper cut 90", "hopper everything 90")


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


@pytest.mark.parametrize("job", thorough_but(FIRST_HOPPER_JOBS, HOPPER_JOBS))
def test_hopper_ring_of_loads(compiled, job):
    """Five places begin steps (a first one, three stretches of a task, the next task's loads) for whole and half tiles and for weights'
    gradients, and one each for sums that are carried and for gate and up again. Only a task's last product is waited for in full."""
    (kernel,) = compiled[job]
    forms = 3 * 5 + any(what in job for what in ("cut", "everything")) + any(what in job for what in ("two ranks", "everything"))
    assert kernel["tensor_core"] == 4 * forms and kernel["full_waits"] == 3 + forms - 3 * 5 and kernel["serialized"] == 0, kernel
    assert kernel["shared"] <= 232448 and kernel["stack"] <= HOPPER_JOBS[job], kernel
    assert kernel["local_in_loop"] == 0 and kernel["single_conversions"] == 0, kernel
    assert kernel["copy_engine_stores"] == 2 * (1 + any(what in job for what in ("cut", "everything"))), kernel
    assert kernel["exponentials"] == 8 + 4 and kernel["announced"] > 0, "a sigmoid is computed twice"
