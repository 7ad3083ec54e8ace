"""compute-sanitizer on small forwards and backwards: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import faulthandler
import glob
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from mok.kernels.launch import is_hopper

SCRIPT = Path(__file__).parent / "sanitize.py"
LIMIT_S = 270
TOOL = shutil.which("compute-sanitizer") or next(iter(sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"))), None)


def run(line: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.skipif(TOOL is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("kernels", ["hopper", "bf16", "fp8"])
def test_no_errors(kernels, tool, tmp_path):
    """memcheck must find nothing. Of racecheck errors count; it also warns of accesses that only the copy engine's barriers order."""
    if kernels == "hopper" and not is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    faulthandler.dump_traceback_later(2 * LIMIT_S + 30, exit=True)  # the limits here are longer than the usual watchdog's
    program = [sys.executable, str(SCRIPT), kernels, str(tmp_path / "results.pt")]
    plain = run(program)
    assert plain.returncode == 0 and plain.stdout.endswith("near fp64\n"), plain.stdout + plain.stderr
    options = ["--error-exitcode", "9", "--report-api-errors", "no"] if tool == "memcheck" else []
    checked = run([TOOL, "--tool", tool, *options, *program])
    output = checked.stdout + checked.stderr
    print(output[-8000:])
    assert "the same bits" in output, output[-8000:]
    if tool == "memcheck":
        assert checked.returncode == 0 and "ERROR SUMMARY: 0 errors" in output, output[-8000:]
    else:
        summary = re.search(r"RACECHECK SUMMARY: .*?\((\d+) errors?, (\d+) warnings?\)", output)
        assert summary, output[-8000:]
        assert int(summary[1]) == 0, output[-8000:]
