"""The forward in blockwise FP8 and in MXFP8 under Triton's interpreter; the cases of each format run in a process of their own."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPTS = {name: Path(__file__).with_name(f"interpreted_{name}.py") for name in ("fp8", "mxfp8")}
CASES = [(name, case) for name, script in SCRIPTS.items() for case in re.findall(r"^def case_(\w+)\(", script.read_text(), re.MULTILINE)]
FIRST = {"fp8": ("ranks", "special_values"), "mxfp8": ("clamp_and_saved", "special_values", "every_block_is_scaled")}


@functools.cache
def results(name: str, first: bool) -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    cases = [case for of, case in CASES if of == name and (case in FIRST[name]) == first]
    result = subprocess.run([sys.executable, str(SCRIPTS[name]), *cases], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(*case, marks=[pytest.mark.thorough] * (case[1] not in FIRST[case[0]])) for case in CASES]
)
def test_case(name, case):
    found = results(name, case in FIRST[name])[case]
    assert not found, found
