"""README shows the figures of the files under benchmarks/results, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["layer", "memory", "fp8", "mxfp8", "ep", "overlap", "scaling", "presets"])
def test_a_table_of_the_readme_is_that_of_the_files(name):
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), name]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert len(table.splitlines()) > 3 and README.count(table) == 1, table


def test_an_unknown_table_is_refused():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "comm"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "comm: must be one of layer, memory" in found.stderr
