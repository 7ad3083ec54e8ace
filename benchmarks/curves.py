"""Training curves of the number formats beside each other: python benchmarks/curves.py --out a.json --plot a.png [-- --hidden 64].

Runs `mok train` for every precision and seed, --jobs at a time: on GPUs one per GPU, else one per core. Options after -- go to `mok train`;
they win over those chosen here for the device (`MODELS`), and a --size among them takes the place of all of these. A seed decides the
parameters and the order of the text, so runs of one seed differ in nothing but the format.

--out holds what has been run so far. Called again, the runs in it that had these options, sources and versions are not repeated (runs that
had others stay in a copy, a.json.1); a run that was interrupted starts over. A run that fails is reported with the end of what it printed,
the others go on, and the exit code is 1. Formats that are not within noise are a result, not a failure.

What is compared is the final loss: validation bits per byte, the mean over the last tenth of the steps. The held-out sample is the same for
all runs. For a format, `difference` is the mean over the seeds of (its final loss - that of bf16 with the same seed).

    noise       max - min of bf16's final losses over the seeds, bf16's `spread`
    verdict     "within noise" where |difference| <= noise: the format matters less than the seed
    low, high   Student's 95 % interval of the difference, from the differences of the seeds. To be read beside the verdict, not part of it

With few seeds both are rough. With three of them, and normal losses of deviation s over the seeds: a format without any shift that acts as
a fresh seed would (the worst case) is called "beyond noise" in 15 of 100 experiments, and one that follows bf16 closely hardly ever; a
shift of 2 s is found in 2 of 3 experiments, one of 4 s in 97 of 100. So "within noise" does not say that there is no difference. It bounds
it by about what another seed makes; `low` and `high` say which shifts the runs leave possible, and an interval without 0 is a shift that
the seeds share, however small.

Example: bf16 ends at 2.00, 2.02, 2.04 with seeds 0, 1, 2, and fp8 at 2.01, 2.03, 2.08. Noise 0.04; differences 0.01, 0.01, 0.04: mean 0.02,
deviation 0.0173, interval 0.02 -+ 4.303 * 0.0173 / sqrt(3) = -0.023 to 0.063. Within noise.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from mok.bench import plot, report
from mok.bench.report import ROOT
from mok.cli import RUNS
from mok.quantize import Precision
from mok.train import read_metrics

Row = dict[str, Any]

MODELS = {
    "cpu": "--size small --batch 8 --sequence 128",
    "cuda": "--size small --slices 1 --batch 32 --hidden 512 --head-width 64 --width 256 --lr 1e-3",
}
"""By device. On a GPU launches take most of a step, so its model is larger and its batch is not cut."""
POINTS = 20
"""Validations of a run."""
OURS = ("steps", "seed", "precision", "device", "name", "resume")
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantile of Student's t for 1 to 9 degrees of freedom; of more the last, which is wider than theirs."""
TAIL = 20


def train_options(device: str, steps: int, given: list[str]) -> list[str]:
    """Options of `mok train` that all runs share."""
    sized = any(option.split("=")[0] == "--size" for option in given)
    shared = ["--steps", str(steps), "--device", device, "--eval-every", str(max(1, steps // POINTS)), "--checkpoint-every", "0"]
    return [*shared, "--ranks", "1", *([] if sized else MODELS[device].split()), *given]


@dataclass
class Run:
    """One `mok train`; its folder is runs/NAME."""

    precision: str
    seed: int
    options: list[str]
    environment: dict[str, str]
    log: TextIO = field(default_factory=lambda: tempfile.TemporaryFile("w+"))  # noqa: SIM115 (closed in `end`)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = RUNS / f"curves-{os.getpid()}-{self.precision}-{self.seed}"
        of_run = ["--precision", self.precision, "--seed", str(self.seed), "--name", self.folder.name]
        command = [sys.executable, "-m", "mok", "train", *self.options, *of_run]
        self.process = subprocess.Popen(command, env={**os.environ, **self.environment}, stdout=self.log, stderr=self.log)

    def __str__(self) -> str:
        return f"{self.precision}, seed {self.seed}"

    def row(self, printed: str) -> Row:
        """What came of it. steps: those with a validation. train: bits per byte, the mean of the steps since the point before."""
        lines = read_metrics(self.folder / "metrics.jsonl")
        points: list[tuple[int, float, float]] = []
        losses: list[float] = []
        for line in lines:
            losses.append(line["loss"])
            if "validation" in line:
                points.append((line["step"], round(statistics.fmean(losses), 5), round(line["validation"], 5)))
                losses = []
        steps, train, validation = (list(column) for column in zip(*points, strict=True))
        digest = re.search(r"digest ([0-9a-f]{64})", printed)
        text = json.loads((self.folder / "config.json").read_text())["text"]["digest"]
        return dict(
            suite="curves", precision=self.precision, seed=self.seed, options=shlex.join(self.options), text=text, steps=steps, train=train,
            validation=validation, seconds=round(time.monotonic() - self.began, 1), digest=digest[1] if digest else "",
        )  # fmt: skip

    def end(self) -> str:
        """Ends it if it still runs; returns what it printed."""
        self.process.kill()
        self.process.wait()
        with self.log:
            self.log.seek(0)
            return self.log.read()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Results:
    """The rows in --out, which is whole at any moment. missing: the runs that failed, and how."""

    def __init__(self, out: Path, commit: str, options: list[str]) -> None:
        self.out, self.commit, self.missing = out, commit, dict[str, str]()
        self.rows: list[Row] = []
        if out.exists():
            found, now = json.loads(out.read_text()), report.document([])
            if all(found[key] == now[key] for key in ("machine", "torch", "triton", "sources_sha256")):
                self.rows = [row for row in found["rows"] if row["options"] == shlex.join(options)]
            if len(self.rows) < len(found["rows"]):
                aside = next(path for n in itertools.count(1) if not (path := out.with_name(f"{out.name}.{n}")).exists())
                shutil.copy2(out, aside)
                others = len(found["rows"]) - len(self.rows)
                print(f"{out} holds {others} runs of other options, sources or versions; they are kept in {aside}", flush=True)

    def has(self, precision: str, seed: int) -> bool:
        return any((row["precision"], row["seed"]) == (precision, seed) for row in self.rows)

    def write(self) -> None:
        names = get_args(Precision)
        self.rows.sort(key=lambda row: (names.index(row["precision"]), row["seed"]))
        partial = self.out.with_name(f".{self.out.name}.tmp")
        report.write(partial, self.rows, self.commit, self.missing)
        os.replace(partial, self.out)


def run_all(wanted: list[tuple[str, int]], results: Results, options: list[str], gpus: list[str], jobs: int, limit: float) -> None:
    """Runs (precision, seed) pairs, `jobs` at a time, job after job on the next GPU. limit: seconds of a run."""
    waiting, free, running = deque(wanted), list(range(jobs)), dict[int, Run]()
    environment = {"PYTHONPATH": str(ROOT)}
    try:
        while waiting or running:
            while waiting and free:
                slot = free.pop(0)
                of_gpu = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
                running[slot] = Run(*waiting.popleft(), options, {**environment, **of_gpu})
            time.sleep(0.1)
            for slot, run in list(running.items()):
                code, late = run.process.poll(), time.monotonic() - run.began > limit
                if code is None and not late:
                    continue
                del running[slot]
                free.append(slot)
                finish(run, code, results, limit)
    finally:
        for run in running.values():
            run.end()
            run.remove()
        with contextlib.suppress(OSError):  # not empty, or not there
            RUNS.rmdir()


def finish(run: Run, code: int | None, results: Results, limit: float) -> None:
    """Takes over what a run wrote, or says why there is nothing. code: None if it still runs, past the limit."""
    printed = run.end()
    try:
        if code == 0:
            row = run.row(printed)
            results.rows.append(row)
            print(f"{run}: {row['validation'][-1]:.4f} bits per byte, {row['seconds']:g} s, digest {row['digest'][:12]}", flush=True)
        else:
            lines = [line for line in printed.splitlines() if line.strip()]
            why = f"--limit={limit:g} seconds were over" if code is None else f"exit code {code}"
            results.missing[str(run)] = f"{why}: {lines[-1] if lines else 'nothing printed'}"
            print(f"{run}: failed, {why}; the end of what it printed:", *lines[-TAIL:], sep="\n  ", flush=True)
    finally:
        run.remove()
    results.write()


def final(row: Row) -> float:
    """Validation bits per byte, the mean over the last tenth of the steps."""
    last = row["steps"][-1]
    return statistics.fmean(value for step, value in zip(row["steps"], row["validation"], strict=True) if step > 0.9 * last)


def compare(rows: list[Row]) -> list[Row]:
    """A row per precision, as the module says. None where there are not two seeds, or nothing to compare with."""
    finals: dict[str, dict[int, float]] = {}
    for row in rows:
        finals.setdefault(row["precision"], {})[row["seed"]] = final(row)
    base = finals.get("bf16", {})
    noise = max(base.values()) - min(base.values()) if len(base) > 1 else None
    table = []
    for precision, of in finals.items():
        pairs = [of[seed] - base[seed] for seed in of if seed in base] if precision != "bf16" else []
        difference = statistics.fmean(pairs) if pairs else None
        low = high = verdict = None
        if difference is not None and len(pairs) > 1 and noise is not None:
            half = T_975[min(len(pairs) - 1, len(T_975)) - 1] * statistics.stdev(pairs) / math.sqrt(len(pairs))
            low, high = difference - half, difference + half
            verdict = "within noise" if abs(difference) <= noise else "beyond noise"
        spread = max(of.values()) - min(of.values())
        table.append(
            dict(precision=precision, seeds=len(of), final=statistics.fmean(of.values()), spread=spread)
            | dict(difference=difference, low=low, high=high, verdict=verdict)
        )
    return table


def print_comparison(table: list[Row]) -> None:
    shown = [{key: f"{value:.4f}" if isinstance(value, float) else value for key, value in row.items()} for row in table]
    report.print_table("final validation, bits per byte: mean of the seeds, max - min of them, and the difference from bf16", shown)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default="bf16,mxfp8,fp8")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", choices=tuple(MODELS), default="cpu")
    parser.add_argument("--jobs", type=int, help="runs at a time; default: as many as there are GPUs, or cores")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which a run is ended and has failed; default: none")
    parser.add_argument("--out", type=Path, required=True, help="rows as JSON; what it already holds is not run again")
    parser.add_argument("--plot", type=Path, help="a PNG")
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    parser.add_argument("train", nargs="*", metavar="-- OPTIONS", help="of mok train")
    asked = parser.parse_args(arguments)

    precisions, seeds = asked.precisions.split(","), asked.seeds.split(",")
    for name in precisions:
        if name not in get_args(Precision) or precisions.count(name) > 1:
            parser.error(f"--precisions={asked.precisions}: {name!r}: must be some of {','.join(get_args(Precision))}, each once")
    if "bf16" not in precisions:
        parser.error(f"--precisions={asked.precisions}: must contain bf16, which the others are compared with")
    for seed in seeds:
        if not (seed.isascii() and seed.isdecimal()) or seeds.count(seed) > 1:
            parser.error(f"--seeds={asked.seeds}: {seed!r}: must be whole numbers of at least 0, each once")
    for name in ("steps", "jobs", "limit"):
        value = getattr(asked, name)
        if value is not None and not value >= 1:
            parser.error(f"--{name}={value}: must be at least 1")
    for option in asked.train:
        if option.split("=")[0].removeprefix("--") in OURS and option.startswith("--"):
            parser.error(f"{option} after --: is decided by this script's own options")
    for path in (asked.out, asked.plot):
        if path and not path.parent.is_dir():
            parser.error(f"{path}: no folder {path.parent}")
    report.refuse_unwritable(parser, out=asked.out, plot=asked.plot)
    if asked.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--plot={asked.plot}: needs matplotlib")
    gpus: list[str] = []
    if asked.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device=cuda: PyTorch finds no GPU on this machine")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    options = train_options(asked.device, asked.steps, asked.train)
    try:
        results = Results(asked.out, asked.commit, options)
    except (ValueError, KeyError, TypeError) as error:
        parser.error(f"--out={asked.out}: is there, and not a file of this script ({error!r})")
    wanted = [(precision, int(seed)) for seed in seeds for precision in precisions]
    for precision, seed in wanted:
        if results.has(precision, seed):
            print(f"{precision}, seed {seed}: kept from {asked.out}")
    wanted = [pair for pair in wanted if not results.has(*pair)]
    jobs = min(asked.jobs or len(gpus) or cores, len(wanted))
    print(f"{report.headline()}: {len(wanted)} runs, {jobs} at a time: mok train {shlex.join(options)}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs end with this process
    try:
        run_all(wanted, results, options, gpus, jobs, asked.limit)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with the runs that are not in {asked.out}", file=sys.stderr)
        return 130
    if results.rows:
        print_comparison(compare(results.rows))
        if asked.plot:
            plot.draw("curves", results.rows, asked.plot)
    return 1 if results.missing else 0


if __name__ == "__main__":
    sys.exit(main())
