"""Tests whose cases run, or are compiled, together in a process of their own, which may load Triton as an interpreter.

A script takes the names of what it is to do, and its last line printed is JSON: name -> what was found.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def cases_of(script: str) -> list[str]:
    """The names of a script's functions case_..."""
    return re.findall(r"^def case_(\w+)\(", (HERE / script).read_text(), re.MULTILINE)


def thorough_but(first: Collection[str], names: Collection[str]) -> list[Any]:
    """Parameters of a test: `make test` runs those in `first` alone."""
    assert set(first) <= set(names), set(first) - set(names)
    return [pytest.param(name, marks=[] if name in first else [pytest.mark.thorough]) for name in names]


def selected(request: pytest.FixtureRequest, parameter: str, prefix: str = "") -> list[str]:
    """The values of a parameter in the tests of this module that run in this session, those which begin with `prefix`, without it."""
    found: dict[str, None] = {}
    for item in request.session.items:
        value = getattr(item, "callspec", None) and item.callspec.params.get(parameter)  # type: ignore[attr-defined]
        if item.path == request.path and value and value.startswith(prefix):
            found[value.removeprefix(prefix)] = None
    return list(found)


def run_script(name: str, arguments: Collection[str] = (), interpret: bool = False, first_path: str = "") -> dict[str, Any]:
    """first_path: what stands first in PYTHONPATH."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    if first_path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [first_path, environment.get("PYTHONPATH")]))
    command = [sys.executable, str(HERE / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])
