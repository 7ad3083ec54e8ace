"""The kernels compile with the newest Triton, too; `make test` installs it beside the one in use, into .venv/newest-triton, and asks for
its version here: then it must be there."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest
from scripts import run_script, selected, thorough_but

NEWEST = Path(sys.prefix) / "newest-triton"
ASKED = os.environ.get("MOK_TEST_NEWEST_TRITON", "") if (sys.platform, platform.machine()) == ("linux", "x86_64") else ""
FORWARDS = (
    *(f"forward{size} {arch}" for size in ("", " saved two ranks", " shared saved two ranks") for arch in (90, 100, 103)),
    "forward hopper shared saved two ranks", "forward hopper gathered", "forward hopper gathered two ranks",
)  # fmt: skip
FIRST_FORWARDS = (
    "forward 100", "forward saved two ranks 90", "forward saved two ranks 100", "forward saved two ranks 103",
    "forward hopper shared saved two ranks", "forward hopper gathered", "forward hopper gathered two ranks",
)  # fmt: skip
BACKWARDS = (
    *(f"backward {case} {arch}" for case in ("plain", "runs", "everything") for arch in (90, 100, 103)),
    "backward hopper 90", "backward hopper everything 90",
)  # fmt: skip
FIRST_BACKWARDS = (
    "backward everything 90", "backward everything 100", "backward everything 103", "backward hopper 90", "backward hopper everything 90",
)  # fmt: skip
STACK = {  # bytes; all is read and written outside of the steps
    "backward plain 90": 512, "backward plain 100": 256, "backward plain 103": 256,
    "backward runs 90": 512, "backward runs 100": 256, "backward runs 103": 256,
    "backward everything 90": 512, "backward everything 100": 576, "backward everything 103": 576,
    "backward hopper 90": 384, "backward hopper everything 90": 384,
}  # fmt: skip
SMALL = {"schedule": 4, "tasks": 1, "combine": 1, "live_slots": 1, "barrier": 1, "choice": 2}  # how many kernels; a backward brings its two


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, list[dict]]:
    if not (NEWEST / "triton").is_dir():
        (pytest.fail if ASKED else pytest.skip)(f"{NEWEST} is not there")
    return run_script("compile_newest.py", selected(request, "job"), first_path=str(NEWEST))


def test_it_is_another_one(compiled):
    import triton

    assert compiled["triton"] == (ASKED or compiled["triton"]) != triton.__version__


@pytest.mark.parametrize("job", thorough_but(FIRST_FORWARDS, FORWARDS))
def test_forward(compiled, job):
    (kernel,) = compiled[job]
    uses_the_chip(kernel)
    # The kernel that is not Hopper's alone, with all there is, keeps two values on the stack there; the one that gathers what is the same
    # for every task.
    few = {"forward shared saved two ranks 90": 16, "forward hopper gathered": 72, "forward hopper gathered two ranks": 80}
    assert kernel["stack"] <= few.get(job, 0), kernel
    assert kernel["thread_copies"] == 80 * ("gathered" in job) and kernel["not_shown"] == 0, kernel


@pytest.mark.parametrize("job", thorough_but(FIRST_BACKWARDS, BACKWARDS))
def test_backward(compiled, job):
    kernel, *others = compiled[job]
    uses_the_chip(kernel)
    assert kernel["stored"], kernel
    assert kernel["stack"] <= STACK[job], kernel
    assert [other["name"] for other in others] == ([] if "hopper" in job else ["plan_kernel", "list_kernel"])
    assert all(other["stack"] == 0 for other in others), others


@pytest.mark.parametrize("job", [f"{case} {arch}" for case in SMALL for arch in (90, 100, 103)])
def test_small_kernels(compiled, job):
    assert len(compiled[job]) == SMALL[job.split()[0]]
    for kernel in compiled[job]:
        assert kernel["stack"] == 0 and kernel["local_in_loop"] == 0 and kernel["shared"] <= 232448, kernel
    assert job[:6] != "choice" or not any(kernel["inexact"] for kernel in compiled[job])
    assert job[:7] != "combine" or compiled[job][0]["wide_loads"] == 1 + 8, "rows of shared experts and of eight choices"


def uses_the_chip(kernel: dict) -> None:
    assert kernel["shared"] <= 232448 and kernel["tensor_core"] > 0 and kernel["copy_engine"] > 0 and kernel["announced"] > 0, kernel
    assert kernel["serialized"] == 0, "products wait for each other"
    assert kernel["local_in_loop"] == 0, "spilled registers are read or written for every step"
    assert kernel["unfinished"] == 0, "a store of the copy engine is announced before it is in memory"
