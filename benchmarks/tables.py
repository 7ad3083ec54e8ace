"""README's tables of figures, from the files under benchmarks/results: python benchmarks/tables.py [layer memory ...]."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mok.bench import report
from mok.bench.report import ROOT

Row = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results"
SIZES = "THIEK"


def read(name: str) -> list[Row]:
    """The rows of a file; says on stderr whether they are of the present sources."""
    document = json.loads((RESULTS / name).read_text())
    state = "present" if document["sources_sha256"] == report.sources_sha256() else "OLDER"
    print(f"{name}: {document['date']}, commit {document['commit'][:7]}, {state} sources", file=sys.stderr)
    rows: list[Row] = document["rows"]
    return rows


def line(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def heads(*cells: str) -> list[str]:
    return [line(*cells), "|" + "---|" * len(cells)]


def by_shape(rows: Iterable[Row], **wanted: object) -> dict[str, Row]:
    return {row["shape"]: row for row in rows if all(row.get(name) == value for name, value in wanted.items())}


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def layer() -> list[str]:
    rows = read("h200-layer.json")
    forward, backward = (by_shape(rows, direction=direction) for direction in ("fwd", "bwd"))
    names = "forward ms", "TFLOP/s", "times torch", "cuBLAS, same products", "backward ms", "TFLOP/s", "times torch"
    out = heads(f"shape ({', '.join(SIZES)})", *names)
    for name, f in forward.items():
        b = backward[name]
        sizes = ", ".join(str(f[letter]) for letter in SIZES)
        cells = ms(f["ms"]), f"{f['tflops']:.0f}", f"{f['ratio']:.2f}", f"{f['cublas_tflops']:.0f}"
        out.append(line(f"{name}: {sizes}", *cells, ms(b["ms"]), f"{b['tflops']:.0f}", f"{b['ratio']:.2f}"))
    return out


def memory() -> list[str]:
    rows = by_shape(read("h200-layer.json"), direction="memory")
    out = heads("", *rows)
    out.append(line("measured", *(f"{row['gib']:.2f}" for row in rows.values())))
    out.append(line("at most, by the formula", *(f"{row['limit_gib']:.2f}" for row in rows.values())))
    out.append(line("torch, measured", *(f"{row['baselines']['torch gather']['gib']:.2f}" for row in rows.values())))
    return out


def presets() -> list[str]:
    rows = read("h200-presets.json")
    forward, backward = (by_shape(rows, direction=direction) for direction in ("fwd", "bwd"))
    out = heads("one rank of", f"{', '.join(SIZES)}", "forward ms", "TFLOP/s", "times torch", "backward ms", "TFLOP/s", "times torch")
    for name in sorted(forward, key=lambda name: (int(name.partition("/")[2]), name)):
        cells = [cell for row in (forward[name], backward[name]) for cell in (ms(row["ms"]), f"{row['tflops']:.0f}", f"{row['ratio']:.2f}")]
        out.append(line(name.replace("/", ", "), ", ".join(str(forward[name][letter]) for letter in SIZES), *cells))
    return out


def of_format(name: str) -> list[str]:
    rows = read("h200-formats.json")
    forward, backward = (by_shape(rows, direction=direction, precision=name) for direction in ("fwd", "bwd"))
    out = heads("shape", "forward ms", "TFLOP/s", "times bf16", "backward ms", "TFLOP/s", "times bf16")
    for shape, f in forward.items():
        cells: list[str] = []
        for row, others in ((f, "products_tflops"), (backward[shape], "others_tflops")):
            cells += [ms(row["ms"]), f"{row['tflops']:.0f}", f"{row['tflops'] / row[others]['mok in bf16']:.2f}"]
        out.append(line(shape, *cells))
    return out


def ep() -> list[str]:
    out = heads("shape (T per rank, H, I, E, K)", "direction", "ms", "TFLOP/s per GPU", "NCCL + torch", "times it", "of one GPU's rate")
    for row in read("h200x2-ep.json"):
        first = row["direction"] == "fwd"
        best = max(baseline["tflops"] for name, baseline in row["baselines"].items() if name.startswith("nccl"))
        out.append(line(
            ", ".join(str(row[letter]) for letter in SIZES) if first else "", "forward" if first else "backward",
            ms(row["ms"]), f"{row['tflops']:.0f}", f"{best:.0f}", f"{row['ratio']:.2f}",
            f"{100 * row['tflops'] / row['alone_tflops']:.0f} %",
        ))  # fmt: skip
    return out


def overlap() -> list[str]:
    names = {"without dispatch": "no dispatch", "without push and combine": "no combine", "experts alone": "alone", "rows alone": "moving"}
    out = heads("shape", "GPUs", "whole", *names)
    for file in ("h200-overlap.json", "h200x2-overlap.json"):
        for row in read(file):
            out.append(line(row["shape"], row["ep"], ms(row["ms"]), *(ms(row["without"][name]) for name in names.values())))
    return out


def scaling() -> list[str]:
    rows = read("h200-scaling.json")
    out = heads("T", *(str(row["T"]) for row in rows if row["direction"] == "fwd"))
    for direction, name in (("fwd", "forward"), ("bwd", "backward")):
        of = [row for row in rows if row["direction"] == direction]
        out.append(line(f"{name} TFLOP/s", *(f"{row['tflops']:.0f}" for row in of)))
        out.append(line("times torch", *(f"{row['ratio']:.2f}" for row in of)))
    return out


TABLES = {
    "layer": layer, "memory": memory, "fp8": lambda: of_format("fp8"), "mxfp8": lambda: of_format("mxfp8"), "ep": ep, "overlap": overlap,
    "scaling": scaling, "presets": presets,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", default=list(TABLES), help=f"some of {', '.join(TABLES)}")
    for name in parser.parse_args().tables:
        if name not in TABLES:
            parser.error(f"{name}: must be one of {', '.join(TABLES)}")
        print("\n".join([*TABLES[name](), ""]))


if __name__ == "__main__":
    main()
