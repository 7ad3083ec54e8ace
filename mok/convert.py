"""`mok convert`: the expert weights of a safetensors file in another number format. One matrix is in memory at a time.

A safetensors file is the length of a header (8 bytes, little endian), the header (JSON: name -> dtype, shape, offsets), and bytes. The
shapes of what a conversion makes are known before it is made, so the new file's header is written first, and then tensor after tensor.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mok.quantize import WEIGHT_BLOCKS, Conversion, Precision, WeightFormat, compare, dequantize, quantize, scale_shape
from mok.quantize import convert as convert_weight
from mok.quantize import weight_format as format_of

FLOATING = ("BF16", "F16", "F32", "F64")
SCALES = ("U8", "F8_E8M0", "F32")


class Converted(NamedTuple):
    """was: the format it had: mxfp8, fp8, or a dtype."""

    report: Conversion
    was: str


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, as its header has it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Job:
    """One tensor of the old file and what it becomes. was: nothing if its bytes are copied, from `start` on."""

    name: str
    entries: tuple[Entry, ...]
    was: str = ""
    start: int = 0


def convert_file(
    source: Path, target: Path, to: Precision, *, suffix: str = "_scale", patterns: Sequence[str] = (), force: bool = False
) -> tuple[list[Converted], int]:
    """Write to target what source holds, its weights in another format. -> (what became of each weight, how many other tensors).

    Weights are the tensors NAME of E4M3, which have a scale NAME + suffix, and floating-point ones whose names match a pattern (`*` stands
    for anything). In "bf16" a weight has no scale; else scales are E8M0 codes (uint8). All other tensors, and the metadata, are copied.
    What target held stays until all is written.

    Raises:
        ValueError: anything wrong with the arguments or the file. OSError: reading or writing.
    """
    if to not in ("bf16", *WEIGHT_BLOCKS):
        raise ValueError(f"--to={to}: must be one of bf16, {', '.join(WEIGHT_BLOCKS)}")
    if to == "bf16" and patterns:
        raise ValueError("--quantize: there is nothing to quantize with --to=bf16")
    if not source.is_file():
        raise ValueError(f"{source}: {'is a folder' if source.is_dir() else 'no such file'}: must be a safetensors file")
    if target.is_dir():
        raise ValueError(f"{target}: is a folder: must be a file")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target}: is the file that is read")
    if target.exists() and not force:
        raise ValueError(f"{target}: exists already; --force replaces it")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}")
    try:
        with safe_open(source, framework="pt") as checked:
            metadata = checked.metadata()
            old, start = read_header(source)
            jobs = plan(old, to, suffix, patterns, source)
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                with partial.open("wb") as out, source.open("rb") as raw:
                    out.write(header_of([entry for job in jobs for entry in job.entries], metadata))
                    made = [done for job in jobs if (done := write(job, out, raw, start, checked, to, suffix))]
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
    except SafetensorError as error:
        raise ValueError(f"{source}: is no safetensors file that can be read ({error})") from None
    return made, sum(not job.was for job in jobs)


def read_header(source: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Tensors by name, without the metadata, and where their bytes start."""
    with source.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: facts for name, facts in header.items() if name != "__metadata__"}, 8 + length


def header_of(entries: Sequence[Entry], metadata: dict[str, str] | None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for entry in entries:
        header[entry.name] = dict(dtype=entry.dtype, shape=entry.shape, data_offsets=[at, at + entry.nbytes])
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def plan(old: dict[str, dict[str, Any]], to: Precision, suffix: str, patterns: Sequence[str], source: Path) -> list[Job]:
    """In the order of the new file: wide elements first, so that none lies across a boundary of its size."""
    unused, jobs = set(patterns), []
    scales = {name + suffix for name, facts in old.items() if facts["dtype"] == "F8_E4M3"}
    for name, facts in old.items():
        if name in scales:
            continue
        dtype, shape, (start, end) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
        matching = [pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)]
        unused -= set(matching)
        if dtype == "F8_E4M3":
            if name + suffix not in old:
                raise ValueError(f"{name}: its scale {name + suffix} is missing; is --suffix={suffix} right?")
            scale = old[name + suffix]
            if scale["dtype"] not in SCALES:
                raise ValueError(f"{name + suffix}: has dtype {scale['dtype']}: must be one of {', '.join(SCALES)}")
            was = format_of(shape, scale["shape"], name)
            jobs.append(Job(name, entries_of(name, shape, to, suffix), was))
        elif matching:
            if dtype not in FLOATING:
                raise ValueError(f"{name}: has dtype {dtype}: must be one of {', '.join(FLOATING)} to be quantized")
            if len(shape) < 2:
                raise ValueError(f"{name}: has shape {shape}: must have at least two dimensions to be quantized")
            if name + suffix in old:
                raise ValueError(f"{name}: there is a tensor {name + suffix} already")
            jobs.append(Job(name, entries_of(name, shape, to, suffix), dtype))
        else:
            jobs.append(Job(name, (Entry(name, dtype, shape, end - start),), start=start))
    if unused:
        raise ValueError(f"--quantize={min(unused)}: no tensor has such a name")
    if not any(job.was for job in jobs):
        raise ValueError(f"{source}: has no tensor of E4M3; --quantize=PATTERN names those to quantize")
    width = {job.name: job.entries[0].nbytes // max(1, math.prod(job.entries[0].shape)) for job in jobs}
    return sorted(jobs, key=lambda job: -width[job.name])


def entries_of(name: str, shape: tuple[int, ...], to: Precision, suffix: str) -> tuple[Entry, ...]:
    """What a weight becomes."""
    count = math.prod(shape)
    if to == "bf16":
        return (Entry(name, "BF16", shape, 2 * count),)
    codes = scale_shape(shape, WEIGHT_BLOCKS[to])
    return Entry(name, "F8_E4M3", shape, count), Entry(name + suffix, "U8", codes, math.prod(codes))


def write(job: Job, out: BinaryIO, raw: BinaryIO, start: int, old: Any, to: Precision, suffix: str) -> Converted | None:
    """One tensor of the old file, as the new one has it; values first, then their scale."""
    if not job.was:
        raw.seek(start + job.start)
        left = job.entries[0].nbytes
        while left:
            piece = raw.read(min(left, 1 << 24))
            if not piece:
                raise ValueError(f"{job.name}: the file ends within it")
            out.write(piece)
            left -= len(piece)
        return None
    codes, reports = [], [Conversion(job.name, 0, 0, 0.0)]
    for weight, scale in matrices(job, old, suffix):
        (values, *scales), report = one(weight, scale, cast(Any, job.was), to, job.name)
        out.write(bytes_of(values))
        codes += scales
        reports.append(report)
    for scale in codes:
        out.write(bytes_of(scale))
    total = Conversion(
        job.name, sum(r.elements for r in reports), sum(r.changed for r in reports), max(r.largest_error for r in reports)
    )  # fmt: skip
    return Converted(total, job.was)


def matrices(job: Job, old: Any, suffix: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """A weight, one index of its first dimension at a time where there are three or more, with its scale."""
    has_scale, shape = job.was in WEIGHT_BLOCKS, job.entries[0].shape
    if len(shape) < 3:
        yield old.get_tensor(job.name), old.get_tensor(job.name + suffix) if has_scale else None
        return
    values, scale = old.get_slice(job.name), old.get_slice(job.name + suffix) if has_scale else None
    for i in range(shape[0]):
        yield values[i], scale[i] if scale is not None else None


def one(weight: Tensor, scale: Tensor | None, was: WeightFormat, to: Precision, name: str) -> tuple[tuple[Tensor, ...], Conversion]:
    """A weight in the new format: values and, if it has one, scale."""
    if scale is None:
        assert to != "bf16"
        pair = quantize(weight, WEIGHT_BLOCKS[to])
        return pair, compare(name, weight.double(), dequantize(*pair, WEIGHT_BLOCKS[to], torch.float64))
    if to != "bf16":
        return convert_weight(weight, scale, to, name)
    block = WEIGHT_BLOCKS[was]
    wide = dequantize(weight, scale, block, torch.bfloat16)
    return (wide,), compare(name, dequantize(weight, scale, block, torch.float64), wide.double())


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def table(made: Sequence[Converted], to: Precision) -> list[dict[str, Any]]:
    """A row for the weights whose names differ in numbers alone.

    Example: `layers.0.gate` and `layers.1.gate` are `layers.*.gate`.
    """
    groups: dict[tuple[str, str], list[Conversion]] = {}
    for report, was in made:
        groups.setdefault((re.sub(r"\d+", "*", report.name), was), []).append(report)
    rows = []
    for (name, was), reports in groups.items():
        worst = max(reports, key=lambda report: report.largest_error)
        changed = sum(report.changed for report in reports)
        rows.append({
            "weight": name if len(reports) > 1 else reports[0].name, "tensors": len(reports), "from": was, "to": to,
            "elements": sum(report.elements for report in reports), "changed": changed,
            "in tensors": sum(report.changed > 0 for report in reports),
            "by up to": worst.largest_change if changed else "", "most in": worst.name if changed else "",
        })  # fmt: skip
    return rows
