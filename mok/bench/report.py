"""The object that a suite writes: where, of what sources, when, and its rows."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def _git(*arguments: str) -> str:
    """What git says; nothing where ROOT is not the top of a repository, as of a package installed inside another project's."""
    try:
        top, said = (
            subprocess.run(["git", *call], cwd=ROOT, capture_output=True, text=True).stdout
            for call in (("rev-parse", "--show-toplevel"), arguments)
        )
    except FileNotFoundError:
        return ""
    return said if top.strip() and Path(top.strip()).resolve() == ROOT else ""


def commit() -> str:
    """The commit that is checked out; empty outside a repository."""
    return _git("rev-parse", "HEAD").strip()


def sources_sha256() -> str:
    """sha256 over the package's Python files (in a repository: but ignored ones), in the C order of their names, concatenated."""
    known = _git("ls-files", "--cached", "--others", "--exclude-standard", "mok").split()
    files = {Path(name) for name in known} or {path.relative_to(ROOT) for path in (ROOT / "mok").rglob("*.py")}
    digest = hashlib.sha256()
    present = (name for name in files if name.suffix == ".py" and (ROOT / name).is_file())  # the index may know deleted ones
    for name in sorted(present, key=lambda name: name.as_posix().encode()):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def version(package: str) -> str:
    """Of an installed package; empty if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


FORM = (
    "suite", "shape", "T", "H", "I", "E", "K", "ep", "precision", "direction", "ms", "tflops", "cublas_tflops", "baselines", "ratio",
)  # fmt: skip
"""What every row of every suite has, in this order, before what is its suite's own."""


def complete(row: dict[str, Any]) -> dict[str, Any]:
    """A row in the form of all: None for what does not apply to it or was not measured. ms, if not there, is that of `us`; ep that of the
    ranks R or of `gpus`.

    Example: {"suite": "schedule", "R": 8, "us": 57.3} gets ep 8, ms 0.0573, and None for all else.
    """
    found = {name: row.get(name) for name in FORM}
    if found["ms"] is None and row.get("us") is not None:
        found["ms"] = round(1e-3 * row["us"], 6)
    if found["ep"] is None:
        found["ep"] = row.get("R", row.get("gpus"))
    return {**found, **{name: value for name, value in row.items() if name not in found}}


def document(rows: Sequence[dict[str, Any]], of_commit: str = "", missing: dict[str, str] | None = None) -> dict[str, Any]:
    """rows: completed here. missing: what was not measured, and why."""
    return dict(
        machine=machine(), torch=torch.__version__, triton=version("triton"), commit=of_commit or commit(),
        sources_sha256=sources_sha256(), date=datetime.date.today().isoformat(), rows=[complete(row) for row in rows],
        **({"missing": missing} if missing else {}),
    )  # fmt: skip


def write(path: str | Path, rows: Sequence[dict[str, Any]], of_commit: str = "", missing: dict[str, str] | None = None) -> None:
    Path(path).write_text(json.dumps(document(rows, of_commit, missing), indent=1) + "\n")


def significant(value: float) -> float:
    """To one decimal, but at least three digits.

    Example: 561.234 is 561.2, 0.00065432 is 0.000654.
    """
    return round(value, 1) if abs(value) >= 100 else float(f"{value:.3g}")


def speed(work: float, ms: float) -> dict[str, float | None]:
    """Milliseconds and the rate of so much work, in 1e9. None for a time that is not above 0, as a difference of two may be."""
    return dict(ms=round(ms, 4), tflops=significant(work / ms)) if ms > 0 else dict(ms=None, tflops=None)


def ratio(ms: float, others: Collection[float]) -> float | None:
    """The best of the others to this one; None if any time is not above 0."""
    return round(min(others) / ms, 3) if min(ms, *others) > 0 else None


def figure(value: float | None, form: str = "g") -> str:
    """A number to be printed; "-" for one that is not known."""
    return "-" if value is None else format(value, form)


def against(row: dict[str, Any]) -> str:
    """What a row's line says before the others' rates."""
    return "beside" if row["ratio"] is None else f"{row['ratio']:.2f} x the best of"


def unwritable(path: str | Path) -> str:
    """Why a file cannot be written, to be asked before anything is measured; "" if it can. What it holds stays."""
    path = Path(path)
    try:
        new = not path.exists()
        with path.open("ab"):
            pass
        if new:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"cannot be written ({error.strerror or error})"
    return ""


def refuse_unwritable(parser: argparse.ArgumentParser, **paths: str | Path | None) -> None:
    """End with a message if an option names a file that cannot be written."""
    for name, path in paths.items():
        if path is not None and (why := unwritable(path)):
            parser.error(f"--{name}={path}: {why}")


def count(text: str) -> int:
    """An option's whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def seconds(text: str) -> float:
    """An option's time."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return value


def headline() -> str:
    return f"{machine()}, torch {torch.__version__}, triton {version('triton') or 'none'}"


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Rows with the same keys, which head the columns; numbers and percentages stand right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, value in rows[0].items() if rows else ():
        right = isinstance(value, int | float) or (isinstance(value, str) and value.endswith("%"))
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in row.values()))
    if title:
        print(title)
    Console(width=None if sys.stdout.isatty() else 180, highlight=False, markup=False).print(table)
    sys.stdout.flush()
