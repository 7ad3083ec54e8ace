"""The backward in MXFP8 without a GPU: under Triton's interpreter (interpreted_backward_mxfp8.py) and, on tensor cores that multiply by
scales, compiled (compile_backward_mxfp8.py; compile_backward.py has the other form)."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from test_backward_kernels import HERE, run_script

CASES = re.findall(r"^def case_(\w+)\(", (HERE / "interpreted_backward_mxfp8.py").read_text(), re.MULTILINE)
FIRST = ("near_the_executor", "every_block_is_scaled")
OTHERS = tuple(case for case in CASES if case not in FIRST)
JOBS = ("plain 100", "frozen 100", "everything 100", "odd sizes added 103")


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return run_script("interpreted_backward_mxfp8.py", *FIRST, interpret=True)


@pytest.fixture(scope="module")
def other_results() -> dict[str, str]:
    return run_script("interpreted_backward_mxfp8.py", *OTHERS, interpret=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    return run_script("compile_backward_mxfp8.py", interpret=False)


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
    # Every product with a weight is block-scaled. Those without scales are the weights' gradients, in bf16; where experts are frozen there
    # is none.
    assert facts["scaled"] == 8 and (facts["tensor_core"] == 8) == job.startswith("frozen"), facts
    assert facts["unscaled"] == facts["of_bf16"] == facts["tensor_core"] - 8, "a product that is neither"
    assert facts["code_copies"] > 0, "codes go through registers"
    assert facts["copy_engine"] > 0 and facts["announced"] > 0
    if job in ("frozen 100", "odd sizes added 103"):  # in the others a tile of a weight's gradient is stored, and announced to nobody
        assert facts["unfinished"] == 0, "announced before it is in memory"
    assert facts["shared"] <= 232448, "more shared memory than the chip has"
    assert facts["exponentials"] == 4, "the sigmoid of a slice is computed twice"
    assert facts["local_in_loop"] <= 1, "the products' loops spill more than the first row of a weight's gradient"
    assert facts["stack"] <= 1152, facts
