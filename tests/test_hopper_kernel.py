"""The forward and the backward for Hopper under an interpreter, every case in a process of its own; they are in interpreted_hopper.py and
interpreted_backward_hopper.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

SCRIPTS = [Path(__file__).with_name(name) for name in ("interpreted_hopper.py", "interpreted_backward_hopper.py")]
CASES = [(script, case) for script in SCRIPTS for case in re.findall(r"^def case_(\w+)\(", script.read_text(), re.MULTILINE)]
THOROUGH = ("fp8_bits", "needs")


@pytest.mark.parametrize(
    ("script", "case"),
    [pytest.param(script, case, marks=[pytest.mark.thorough] * (case in THOROUGH), id=f"{script.stem} {case}") for script, case in CASES],
)
def test_case(script, case):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(script), case], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    assert not json.loads(result.stdout.splitlines()[-1])[case], result.stderr[-4000:]
