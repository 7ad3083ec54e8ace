"""The backward in blockwise FP8 without a GPU: under Triton's interpreter (interpreted_backward_fp8.py) and compiled
(compile_backward_fp8.py)."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from test_backward_kernels import HERE, run_script

CASES = re.findall(r"^def case_(\w+)\(", (HERE / "interpreted_backward_fp8.py").read_text(), re.MULTILINE)
FIRST = ("near_the_executor", "ranks_and_ring", "quantized_weight_gradients", "special_values")
OTHERS = tuple(case for case in CASES if case not in FIRST)
JOBS = (
    "plain 90", "runs 90", "quantized weight gradients 90", "frozen 90", "everything 90", "odd sizes added 90", "everything 100",
    "everything 103",
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return run_script("interpreted_backward_fp8.py", *FIRST, interpret=True)


@pytest.fixture(scope="module")
def other_results() -> dict[str, str]:
    return run_script("interpreted_backward_fp8.py", *OTHERS, interpret=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    return run_script("compile_backward_fp8.py", interpret=False)


@pytest.mark.parametrize("case", FIRST)
def test_case(results, case):
    assert not results[case], results[case]


@pytest.mark.thorough
@pytest.mark.parametrize("case", OTHERS)
def test_other_case(other_results, case):
    assert not other_results[case], other_results[case]


@pytest.mark.parametrize("job", JOBS)
def test_compiles_for_the_chip(compiled, job):
    facts = compiled[job]
    # Whole and half tiles have a loop each of two products of 128 x 128 x 128, four instructions long; weights' gradients are bf16.
    assert facts["e4m3"] == (16 if job.endswith(" 90") else 0) and facts["tensor_core"] >= facts["e4m3"]
    assert facts["copy_engine"] > 0 and facts["announced"] > 0
    if job in ("frozen 90", "odd sizes added 90"):  # in the others a tile of a weight's gradient is stored, and announced to nobody
        assert facts["unfinished"] == 0, "announced before it is in memory"
    assert facts["shared"] <= 232448, "more shared memory than the chip has"
    assert facts["serialized"] == 0, "products wait for each other"
    assert facts["exponentials"] == 2 * 4, "the sigmoid of a slice, in whole or in half tiles, is computed twice"
    assert facts["local_in_loop"] == 0 and facts["spills_between_products"] == 0, "the products' loops spill"
    assert facts["stack"] <= {"plain 90": 352, "runs 90": 352, "frozen 90": 352}.get(job, 1152), facts
