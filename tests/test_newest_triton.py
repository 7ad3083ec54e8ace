"""The kernels compile with the newest Triton, too; `make test` installs it beside the one in use, into .venv/newest-triton."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from scripts import run_script

NEWEST = Path(sys.prefix) / "newest-triton"
JOBS = (
    "forward 90", "forward 100", "forward 103", "forward hopper 90", "backward everything 90", "backward everything 100",
    "backward hopper 90", "backward hopper everything 90",
)  # fmt: skip

if not (NEWEST / "triton").is_dir():
    pytest.skip(f"{NEWEST} is not there", allow_module_level=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    return run_script("compile_newest.py", first_path=str(NEWEST))


def test_it_is_another_one(compiled):
    import triton

    assert compiled["triton"] != triton.__version__


@pytest.mark.parametrize("job", JOBS)
def test_uses_the_chip(compiled, job):
    kernel = compiled[job]
    assert kernel["shared"] <= 232448 and kernel["tensor_core"] > 0 and kernel["copy_engine"] > 0 and kernel["announced"] > 0, kernel
    assert kernel["serialized"] == 0, "products wait for each other"
    if job.startswith("backward hopper"):
        assert kernel["local_in_loop"] == 0 and kernel["stack"] <= 384, kernel
    elif job.startswith("backward"):
        assert kernel["spills_between_products"] == 0 and kernel["stack"] <= 1024, kernel
    else:
        assert kernel["unfinished"] == 0, "a store of the copy engine is announced before it is in memory"
        assert kernel["stack"] == 0 and kernel["local_in_loop"] == 0, kernel
