"""The forward in blockwise FP8 under Triton's interpreter; the cases are in interpreted_fp8.py and run in a process of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpreted_fp8.py")
CASES = re.findall(r"^def case_(\w+)\(", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_case(results, case):
    assert not results[case], results[case]
