"""The backward's kernels without a GPU: under Triton's interpreter (interpreted_backward.py) and compiled (compile_backward.py)."""

from __future__ import annotations

import pytest
from scripts import cases_of, run_script, selected, thorough_but

pytest.importorskip("triton")

CASES = cases_of("interpreted_backward.py")
FIRST_CASES = [case for case in CASES if not case.startswith("more_")]
JOBS = (
    *(f"{case} {arch}" for case in ("plain", "runs", "odd sizes added", "everything") for arch in (90, 100, 103)),
    "mxfp8 90", "mxfp8 everything 90", "mxfp8 odd sizes added 90",
)  # fmt: skip
FIRST_JOBS = ("plain 90", "plain 100", "runs 100", "everything 90", "everything 100", "everything 103", "mxfp8 90")
# Bytes of stack: arguments and addresses that wait there; with a clamp some values of a slice, with cut experts the sum as it is loaded.
STACK = {
    "plain 90": 128, "plain 100": 384, "plain 103": 384, "runs 90": 208, "runs 100": 400, "runs 103": 400,
    "odd sizes added 90": 1152, "odd sizes added 100": 448, "odd sizes added 103": 448,
    "everything 90": 736, "everything 100": 832, "everything 103": 832,
    "mxfp8 90": 128, "mxfp8 everything 90": 1152, "mxfp8 odd sizes added 90": 1152,
}  # fmt: skip
STORES = {"runs 90": 4, "runs 100": 6, "runs 103": 6}  # by the copy engine: the two halves of a tile, again where a loop is taken apart
HOPPER_JOBS = {  # bytes of stack: arguments and addresses that wait there, with a clamp and shared experts some values of a slice
    "hopper 90": 128, "hopper cut 90": 128, "hopper two ranks 90": 128, "hopper clamp 90": 160, "hopper shared 90": 256,
    "hopper everything 90": 320, "hopper added cut shared 90": 256,
}  # fmt: skip
FIRST_HOPPER_JOBS = ("hopper 90", "hopper cut 90", "hopper everything 90", "hopper added cut shared 90")


@pytest.fixture(scope="module")
def results(request) -> dict[str, str]:
    return run_script("interpreted_backward.py", selected(request, "case"), interpret=True)


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, list[dict]]:
    return run_script("compile_backward.py", selected(request, "job"))


@pytest.mark.parametrize("case", thorough_but(FIRST_CASES, CASES))
def test_case(results, case):
    assert not results[case], results[case]


@pytest.mark.parametrize("job", thorough_but(FIRST_JOBS, JOBS))
def test_compiles_for_the_chip(compiled, job):
    backward, *others = compiled[job]
    assert backward["tensor_core"] > 0, "no wgmma or tcgen05"
    assert backward["copy_engine"] > 0, "no bulk tensor loads"
    assert backward["announced"] > 0
    # Only tiles of a weight's gradient, which nobody reads in this kernel, go by the copy engine: nobody waits until they are in memory.
    stores, of_shared = STORES.get(job, 0 if "added" in job else 1), ["shared_"] * ("everything" in job)
    stored = sorted(f"{of}d_{which}_weight_desc" for of in ("", *of_shared) for which in ("gate", "up", "down")) if stores else []
    assert backward["copy_engine_stores"] == stores and backward["stored"] == stored, backward
    assert backward["unfinished"] == 0, "announced before it is in memory"
    assert backward["clocks"] == 0, "timestamps cost something when they are off"
    assert backward["shared"] <= 232448, "more shared memory than the chip has"
    assert backward["serialized"] == 0, "products wait for each other"
    assert backward["exponentials"] == 2 * 4, "the sigmoid of a slice, in whole or in half tiles, is computed twice"
    assert backward["local_in_loop"] == (None if job.endswith(" 103") else 0), "the products' loops spill"
    assert all(kernel["stack"] == 0 for kernel in others)
    assert backward["stack"] <= STACK[job], backward


@pytest.mark.parametrize("job", thorough_but(FIRST_HOPPER_JOBS, HOPPER_JOBS))
def test_hopper_ring_of_loads(compiled, job):
    """Five places begin steps (a first one, three stretches of a task, the next task's loads) for whole and half tiles and for weights'
    gradients, and one each for sums that are carried and for gate and up again. Only a task's last product is waited for in full."""
    (kernel,) = compiled[job]
    forms = 3 * 5 + any(what in job for what in ("cut", "everything")) + any(what in job for what in ("two ranks", "everything"))
    assert kernel["tensor_core"] == 4 * forms and kernel["full_waits"] == 3 + forms - 3 * 5 and kernel["serialized"] == 0, kernel
    assert kernel["shared"] <= 232448 and kernel["stack"] <= HOPPER_JOBS[job], kernel
    assert kernel["local_in_loop"] == 0 and kernel["single_conversions"] == 0 and kernel["unfinished"] == 0, kernel
    assert (kernel["clocks"] > 0) == ("clamp" in job), "timestamps are in the traced form alone"
    stores = 0 if "added" in job else 1 + any(what in job for what in ("cut", "everything"))
    assert kernel["copy_engine_stores"] == 2 * stores, kernel
    assert len(kernel["stored"]) == (stores > 0) * (6 if any(what in job for what in ("shared", "everything")) else 3), kernel
    assert kernel["exponentials"] == 8 + 4 and kernel["announced"] > 0, "a sigmoid is computed twice"
