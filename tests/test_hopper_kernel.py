"""The forward for Hopper under an interpreter, in a process of its own; the cases are in interpreted_hopper.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

SCRIPT = Path(__file__).with_name("interpreted_hopper.py")
CASES = re.findall(r"^def case_(\w+)\(", SCRIPT.read_text(), re.MULTILINE)


@pytest.mark.parametrize("case", CASES)
def test_case(case):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, str(SCRIPT), case], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    assert not json.loads(result.stdout.splitlines()[-1])[case], result.stderr[-4000:]
