"""The backward's kernels without a GPU: under Triton's interpreter (interpreted_backward.py) and compiled (compile_backward.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
CASES = re.findall(r"^def case_(\w+)\(", (HERE / "interpreted_backward.py").read_text(), re.MULTILINE)
JOBS = (
    "plain 90", "runs 90", "odd sizes added 90", "everything 90", "everything 100", "everything 103",
    "mxfp8 90", "mxfp8 everything 90", "mxfp8 odd sizes added 90",
)  # fmt: skip

HOPPER_JOBS = {  # bytes of stack: arguments and addresses that wait there, with a clamp and shared experts some values of a slice
    "hopper 90": 128, "hopper cut 90": 128, "hopper two ranks 90": 128, "hopper clamp 90": 128, "hopper shared 90": 256,
    "hopper everything 90": 384,
}  # fmt: skip


def run_script(name: str, *arguments: str, interpret: bool) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    result = subprocess.run([sys.executable, str(HERE / name), *arguments], capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    return run_script("interpreted_backward.py", interpret=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict]]:
    return run_script("compile_backward.py", interpret=False)


@pytest.mark.parametrize("case", CASES)
def test_case(results, case):
    assert not results[case], results[case]


@pytest.mark.parametrize("job", JOBS)
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


@pytest.mark.parametrize("job", HOPPER_JOBS)
def test_hopper_ring_of_loads(compiled, job):
    """Five places begin steps (a first one, three stretches of a task, the next task's loads) for whole and half tiles and for weights'
    gradients, and one each for sums that are carried and for gate and up again. Only a task's last product is waited for in full."""
    (kernel,) = compiled[job]
    forms = 3 * 5 + any(what in job for what in ("cut", "everything")) + any(what in job for what in ("two ranks", "everything"))
    assert kernel["tensor_core"] == 4 * forms and kernel["full_waits"] == 3 + forms - 3 * 5 and kernel["serialized"] == 0, kernel
    assert kernel["shared"] <= 232448 and kernel["stack"] <= HOPPER_JOBS[job], kernel
    assert kernel["local_in_loop"] == 0 and kernel["spills_between_products"] == 0 and kernel["single_conversions"] == 0, kernel
    assert kernel["copy_engine_stores"] == 2 * (1 + any(what in job for what in ("cut", "everything"))), kernel
    assert kernel["exponentials"] == 8 + 4 and kernel["announced"] > 0, "a sigmoid is computed twice"
