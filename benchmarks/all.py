"""Everything that README shows figures of: python benchmarks/all.py [--parts layer,presets,trace] [--out benchmarks/results].

    layer    forward, backward and memory of whole layers on one GPU              -> h200-layer.json
    formats  the same layers in FP8 and MXFP8                                     -> h200-formats.json
    presets  what a rank of 8 and of 64 has of every preset, by `mok bench layer` -> h200-presets.json
    suites   minibatch, schedule, scaling, overlap, comm on one GPU               -> h200-minibatch.json, ...
    ranks    rows, signals and whole layers over all GPUs, if there are several   -> h200x2-comm.json, h200x2-ep.json, h200x2-overlap.json
    trace    what the multiprocessors did when, of kimi-k2-slice                  -> h200-trace.json, h200-trace.png
    train    tokens per second beside torch's layer, and the digests of one and of all GPUs  -> h200-train.json

    curves   training in bf16, MXFP8 and FP8, by benchmarks/curves.py             -> h200-curves.json, h200-curves.png

Where there are several GPUs, the commands of `layer`, `formats`, `presets` and `suites` run beside each other. Names begin with the GPU's.
A file says how many seconds each of its commands took ("seconds"). A command that fails or does not end in time adds no rows, a file
without any stays as it was, and the exit code is 1; what was printed is under --out/logs. There `curves`, which takes about ten minutes of
a GPU, leaves the runs that it has made; called again it goes on from them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from mok.bench import report
from mok.bench.report import ROOT
from mok.bench.shapes import ONE_GPU, SLICE_RANKS, slices

LIMIT_S = 170.0  # of a suite, which then names what it left out
MOST_S = 600.0  # of any command
CURVES_S = 1800.0  # but this one
PARTS = ("layer", "formats", "presets", "suites", "ranks", "trace", "train", "curves")
SUITES = ("comm", "scaling", "overlap", "minibatch", "schedule")
ONE_RANK = {"comm": ("--ranks", "1")}  # where it would take two


class Results:
    """Where they go. `done` is false once something failed."""

    def __init__(self, out: Path, commit: str) -> None:
        self.out, self.logs, self.commit, self.done = out, out / "logs", commit, True
        self.logs.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float] = {}  # by command
        self.gpus = torch.cuda.device_count()
        self.name = report.machine().lower().split()[-1]

    def file(self, suite: str, gpus: int = 1) -> Path:
        return self.out / f"{self.name}{f'x{gpus}' if gpus > 1 else ''}-{suite}.json"

    def run(self, name: str, *command: str, gpu: int | None = None, limit_s: float = MOST_S) -> str | None:
        """What a command printed; None if it failed."""
        start = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        with open(self.logs / f"{name}.log", "w+") as log:
            process = subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                if process.poll() is None:
                    process.terminate()  # it ends what it has started
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(10)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its ranks
                process.wait()
            log.seek(0)
            text = log.read()
        self.done &= code == 0
        self.seconds[name] = round(time.monotonic() - start, 1)
        print(f"{name}: {'done' if code == 0 else f'failed ({code})'} after {self.seconds[name]:g} s", flush=True)
        return text if code == 0 else None

    def measure(self, name: str, path: Path | None, *command: str, gpu: int | None = None) -> dict[str, Any] | None:
        """The document that a command wrote, which is also put in its place, if it has one; of one that failed only if it has rows and says
        what it left out."""
        made = self.logs / f"{name}.json"
        made.unlink(missing_ok=True)
        text = self.run(name, *command, "--out", str(made), *(["--commit", self.commit] if self.commit else []), gpu=gpu)
        if text is None and not made.exists():
            return None
        document: dict[str, Any] = {**json.loads(made.read_text()), "seconds": {name: self.seconds[name]}}
        if text is None and not (document["rows"] and document.get("missing")):
            return None
        if path:
            write(path, document)
        return document


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document of what several commands wrote: all rows, what any of them missed, and the seconds of each."""
    whole: dict[str, Any] = {**documents[0], "rows": [row for document in documents for row in document["rows"]]}
    for name in ("missing", "seconds"):
        if found := {key: value for document in documents for key, value in document.get(name, {}).items()}:
            whole[name] = found
    return whole


MOST_SLICES = 5


def of_presets() -> dict[str, tuple[str, ...]]:
    """`mok bench layer` for a few slices at a time, of which each is measured before the suite's limit, compiling included."""
    jobs: dict[str, tuple[str, ...]] = {}
    for ranks in SLICE_RANKS:
        names = list(slices(ranks))
        for i in range(0, len(names), MOST_SLICES):
            chosen = ",".join(names[i : i + MOST_SLICES])
            name = f"presets-{ranks}-{i // MOST_SLICES}"
            jobs[name] = ("-m", "mok.bench.suites", "layer", "--limit", f"{LIMIT_S:g}", "--shapes", chosen)
    return jobs


FORWARD, BACKWARD = ("benchmarks/layer.py", "--forward"), ("benchmarks/backward.py",)
JOBS: dict[str, dict[str, tuple[str, ...]]] = {
    "formats": {
        f"{way}-{name}": (*command, "--precision", name)
        for way, command in (("backward", BACKWARD), ("forward", FORWARD)) for name in ("fp8", "mxfp8")
    },
    "layer": {"backward": BACKWARD, "forward": FORWARD},
    "presets": of_presets(),
    "suites": {
        suite: ("-m", "mok.bench.suites", suite, "--limit", f"{LIMIT_S:g}", *ONE_RANK.get(suite, ())) for suite in SUITES
    },
}  # fmt: skip
"""What one GPU runs, by part; about the longest first."""
SHARED = ("benchmarks/layer.py", "--shared", "--shapes", "kimi-k2-slice")


def alone(results: Results, parts: Sequence[str]) -> None:
    """The jobs of these parts, which the GPUs take from one list, and the files they make."""
    waiting: queue.SimpleQueue[tuple[str, tuple[str, ...]]] = queue.SimpleQueue()
    made: dict[str, dict[str, Any] | None] = {}
    for part, jobs in JOBS.items():
        for job in jobs.items() if part in parts else ():
            waiting.put(job)

    def work(gpu: int) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name, command = waiting.get_nowait()
                made[name] = results.measure(name, None, *command, gpu=gpu)

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in range(results.gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "layer" in parts:
        results.run("shared", *SHARED, gpu=0)
    for part, jobs in JOBS.items():
        files = {suite: [suite] for suite in jobs} if part == "suites" else {part: list(jobs)}
        for file, names in files.items():
            documents = [document for name in names if (document := made.get(name))]
            if documents:
                write(results.file(file), joined(documents))


def ranks(results: Results) -> None:
    count = str(results.gpus)
    for suite in ("ep", "comm", "overlap"):
        results.measure(f"{suite}-x{count}", results.file(suite, results.gpus), "-m", f"mok.bench.{suite}", "--ranks", count)


TRACED = "kimi-k2-slice"
MOST_OFF = 0.02  # of a kernel's time, what a trace's shares may differ from it


def printed_json(text: str) -> Any:
    """What a command printed with --json, an indented list, among other lines."""
    lines = text.splitlines()
    return json.loads("\n".join(lines[lines.index("[") : len(lines) - lines[::-1].index("]")]))


def trace_rows(summaries: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row per kernel, its time that of the profiler; and which of them do not add up to it."""
    rows, problems, shape = [], [], ONE_GPU[TRACED]
    for about in summaries:
        direction, us = "fwd" if about["direction"] == "forward" else "bwd", about["kernel_us"]
        row = dict(suite="trace", shape=TRACED, **shape._asdict(), ep=1, precision="bf16", direction=direction)
        row |= dict(ms=round(1e-3 * us, 4), tflops=round(1e3 * shape.gflop(direction) / us, 1)) if us else {}
        rows.append(row | {name: value for name, value in about.items() if name != "direction"})
        if us is None or not abs(about["accounted"] - 1) <= MOST_OFF:
            problems.append(f"{about['direction']}: the shares add up to {about['accounted']:.1%} of {us} us")
    return rows, problems


def trace(results: Results) -> None:
    picture = results.file("trace").with_suffix(".png")
    text = results.run("trace", "-m", "mok.trace", "--shapes", TRACED, "--direction", "both", "--json", "--png", str(picture), gpu=0)
    if text is None:
        return
    rows, problems = trace_rows(printed_json(text))
    for problem in problems:
        print(f"trace: {problem}", flush=True)
        results.done = False
    write(results.file("trace"), {**report.document(rows, results.commit), "seconds": {"trace": results.seconds["trace"]}})


def curves(results: Results) -> None:
    """What was made before the time was over stays under logs; only all of it is put in its place."""
    made, picture = results.logs / "curves.json", results.logs / "curves.png"
    command = ["benchmarks/curves.py", "--device", "cuda", "--out", str(made), "--plot", str(picture)]
    command += ["--commit", results.commit] if results.commit else []
    if results.run("curves", *command, limit_s=CURVES_S) is None:
        return
    write(results.file("curves"), {**json.loads(made.read_text()), "seconds": {"curves": results.seconds["curves"]}})
    results.file("curves").with_suffix(".png").write_bytes(picture.read_bytes())


def train(results: Results) -> None:
    """Digests of a short run over one and over all GPUs, and the long one beside torch's layer."""
    rows: list[dict[str, Any]] = []

    def run(name: str, *more: str) -> str:
        return results.run(f"train-{name}", "-m", "mok", "train", "--device", "cuda", "--checkpoint-every", "0", *more) or ""

    def digest(text: str) -> str:
        found = re.search(r"digest ([0-9a-f]{64})", text)
        return found[1] if found else ""

    def number(text: str, row: str) -> float | None:
        """The value of a row of the table at the end."""
        found = re.search(rf"│ *{row} *│ *([\d,.]+)", text)
        return float(found[1].replace(",", "")) if found else None

    name = f"all-{os.getpid()}"
    text = run("against-torch", "--against", "torch", "--name", f"{name}-torch")
    if text:
        rates = {f"{key}tokens_per_s": number(text, f"tokens/s in turns, {of}") for key, of in (("", "mok"), ("torch_", "torch"))}
        more = dict(ratio=number(text, "mok over torch"), gib=number(text, "peak memory"))
        rows.append(dict(suite="train", gpus=1, digest=digest(text), **rates, **more))
    if results.gpus > 1:
        digests = {}
        for count in (1, results.gpus):
            text = run(f"on-{count}", "--steps", "40", "--ranks", str(count), "--name", f"{name}-{count}")
            digests[count] = digest(text)
            rows.append(dict(suite="train", gpus=count, steps=40, digest=digests[count], tokens_per_s=number(text, "tokens/s")))
        if len(set(digests.values())) > 1:
            print(f"train: other bits on other numbers of GPUs: {digests}", flush=True)
            results.done = False
    seconds = {name: value for name, value in results.seconds.items() if name.startswith("train-")}
    write(results.file("train"), {**report.document(rows, results.commit), "seconds": seconds})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    options = parser.parse_args()
    parts = options.parts.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--parts={part}: must be some of {','.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    os.chdir(ROOT)
    results = Results(options.out.resolve(), options.commit)
    print(f"{results.gpus} x {report.headline()}", flush=True)
    alone(results, parts)
    if "ranks" in parts and results.gpus > 1:
        ranks(results)
    for name, part in (("trace", trace), ("train", train), ("curves", curves)):
        if name in parts:
            part(results)
    return 0 if results.done else 1


if __name__ == "__main__":
    sys.exit(main())
