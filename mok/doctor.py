"""What will and will not work on this machine.

`collect` looks, and misses nothing for want of a GPU; `judge` decides by what was found alone, so that a test can bring the facts of any
machine. `python -m mok.doctor --ranks R` is the part that needs a process per GPU: peer-visible memory and a signal between all pairs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from mok.bench import ranks, report
from mok.bench.report import ROOT
from mok.fabric import Region

PROBE_S = 90.0
COPY_BYTES = 256 << 20
MOST_GPUS = 8  # between every two of which copies are timed; of more, between neighbours
MULTICAST = tuple(ranks.WITHOUT_MULTICAST)
NVLINK_GBS = 100.0  # no PCIe of today copies as fast, no NVLink of Hopper's as slowly


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it. capability: (9, 0) for Hopper."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    multiprocessors: int


@dataclass(frozen=True)
class Facts:
    """What was found. Versions are "" where there is none.

    cuda: what torch was built for.
    no_access: ordered pairs of GPUs of which the first cannot address the second one's memory.
    copies: (source, target, GB/s) of copies between two GPUs, by the copy engine; empty where not measured.
    symmetric: "" if torch's symmetric memory and a signal through it worked between all GPUs, else what went wrong; None: not tried.
    multicast: the variables that switch NVLink multicast off, as the environment has them.
    """

    python: str
    cores: int
    torch: str
    cuda: str
    triton: str
    driver: str
    nccl: bool
    matplotlib: bool
    gpus: tuple[Gpu, ...] = ()
    no_access: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int, float], ...] = ()
    symmetric: str | None = None
    multicast: tuple[tuple[str, str], ...] = ()


State = Literal["works", "note", "fails"]


@dataclass(frozen=True)
class Finding:
    """One line of the answer: of what, whether it works, and what that means here."""

    name: str
    state: State
    text: str


# ---- looking ----


def _driver() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, timeout=20)
        if result.returncode == 0 and result.stdout.strip():
            return result.stdout.split()[0]
    with contextlib.suppress(OSError):
        found = re.search(r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else ""
    return ""


def _gpu(index: int) -> Gpu:
    about = torch.cuda.get_device_properties(index)
    return Gpu(about.name, (about.major, about.minor), round(about.total_memory / 2**30, 1), about.multi_processor_count)


def copied(count: int) -> list[tuple[int, int]]:
    """(source, target) of the copies that are timed among so many GPUs."""
    if count > MOST_GPUS:
        return [(i, (i + step) % count) for i in range(count) for step in (1, -1)]
    return [(i, j) for i in range(count) for j in range(count) if i != j]


def _copy_gbs(source: int, target: int) -> float:
    """GB/s of copies from one GPU to another."""
    there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    here = torch.empty_like(there, device=f"cuda:{target}")

    def seconds(copies: int) -> float:
        start = time.perf_counter()
        for _ in range(copies):
            here.copy_(there, non_blocking=True)
        for device in (source, target):
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds(2)
    return round(16 * COPY_BYTES * 1e-9 / seconds(16), 1)


def _probe(size: int) -> str:
    """Run the part with a process per GPU; "" or the last thing it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", "mok.doctor", "--ranks", str(size)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S + 30, env=environment)
    except subprocess.TimeoutExpired:
        return f"no answer after {PROBE_S + 30:g} seconds"
    if result.returncode == 0:
        return ""
    said = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    errors = [line for line in said if re.match(r"\w*(\.\w+)*(Error|Exception)\b", line)]
    return (errors or said or [f"exit code {result.returncode}"])[-1].strip()


def collect(measure: bool = True) -> Facts:
    """Look at this machine. measure: also what takes seconds, copies and processes on two GPUs or more."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    no_access = tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))
    triton = report.version("triton") if importlib.util.find_spec("triton") else ""
    several = measure and count > 1
    return Facts(
        python=platform.python_version(), cores=os.cpu_count() or 1, torch=torch.__version__, cuda=torch.version.cuda or "", triton=triton,
        driver=_driver(), nccl=dist.is_available() and dist.is_nccl_available(), matplotlib=bool(importlib.util.find_spec("matplotlib")),
        gpus=tuple(_gpu(index) for index in range(count)), no_access=no_access,
        copies=tuple((*pair, _copy_gbs(*pair)) for pair in copied(count)) if several else (),
        symmetric=_probe(count) if several and triton else None,
        multicast=tuple((name, os.environ[name]) for name in MULTICAST if name in os.environ),
    )  # fmt: skip


# ---- deciding ----


def _at_least(version: str, least: tuple[int, int]) -> bool:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= least


def _of_gpu(gpu: Gpu) -> tuple[State, str]:
    if FAMILIES.get(gpu.capability) == "Hopper":
        return "works", "the kernels run on it; they were measured on an H200"
    if gpu.capability in FAMILIES:
        return "note", "the kernels compile for it, but have never run on one: run tests/gpu first"
    if gpu.capability < (9, 0):
        return "fails", "the kernels read through Hopper's copy engine (TMA), which it does not have; use the CPU"
    return "fails", "its multiprocessors have too little shared memory for the kernels' tiles (197 KB); use the CPU"


FAMILIES = {(9, 0): "Hopper", (10, 0): "Blackwell", (10, 3): "Blackwell"}
FORMATS: dict[str, dict[str, tuple[State, str]]] = {
    "Hopper": {
        "BF16": ("works", "the default, multiplied as it is"),
        "blockwise FP8": ("works", "multiplied in FP8, weight gradients in BF16 or, if asked for, in FP8"),
        "MXFP8": (
            "works",
            "moved in MXFP8, then widened to BF16 and multiplied there, which is exact but for numbers at the ends of BF16's range",
        ),
    },
    "Blackwell": {
        "BF16": ("note", "compiles, has never run"),
        "blockwise FP8": ("note", "compiles, has never run; weight gradients in BF16 or, if asked for, in FP8"),
        "MXFP8": ("note", "compiles to tensor cores that take the scales themselves, has never run; weight gradients in BF16"),
    },
}  # fmt: skip


def _judge_formats(facts: Facts) -> list[Finding]:
    """What the routed experts' products can be in on these GPUs."""
    families = dict.fromkeys(FAMILIES[gpu.capability] for gpu in facts.gpus if gpu.capability in FAMILIES)
    return [Finding(name, state, f"on {family}: {text}") for family in families for name, (state, text) in FORMATS[family].items()]


def _judge_gpus(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        if not facts.cuda:
            why = "this build of torch has no CUDA"
        elif facts.driver:
            why = f"driver {facts.driver} is here: is it too old for CUDA {facts.cuda}, or does CUDA_VISIBLE_DEVICES hide the GPUs?"
        else:
            why = "no NVIDIA driver was found"
        return [Finding("GPU", "note", f"torch sees none ({why}): everything runs on the CPU, and the kernels only under the interpreter")]
    found = []
    for gpu in dict.fromkeys(facts.gpus):
        state, text = _of_gpu(gpu)
        size = f"{facts.gpus.count(gpu)} x {gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}, {gpu.memory_gib:g} GiB"
        found.append(Finding("GPU", state, f"{size}, {gpu.multiprocessors} multiprocessors: {text}"))
    if len(set(facts.gpus)) > 1:
        found.append(Finding("GPU", "note", "they are not alike: bits are promised only on one kind of GPU"))
    return found


def _listed(pairs: Sequence[str]) -> str:
    return ", ".join(pairs[:6]) + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")


def _judge_peers(facts: Facts) -> list[Finding]:
    count = len(facts.gpus)
    if count < 2:
        alone = "only one GPU: nothing to check"
        subjects = [Finding(name, "note", alone) for name in ("peer access", "symmetric memory", "NVLink", "multicast")]
        text = "expert parallelism needs two GPUs or more; a layer without a group needs none of what follows"
        return [Finding("several ranks", "note", text), *subjects]
    found = []
    if facts.no_access:
        pairs = _listed([f"{i}-{j}" for i, j in facts.no_access])
        found.append(Finding("peer access", "fails", f"missing between GPUs {pairs}: these cannot be in one expert-parallel group"))
    else:
        found.append(Finding("peer access", "works", f"all {count} GPUs address each other's memory"))
    if not facts.nccl:
        found.append(Finding("NCCL", "fails", "this build of torch has none: ranks on GPUs cannot meet"))
    if facts.symmetric is None:
        found.append(Finding("symmetric memory", "note", "not tried"))
    elif facts.symmetric:
        found.append(Finding("symmetric memory", "fails", f"the layer's ranks cannot see each other's memory: {facts.symmetric}"))
    else:
        found.append(Finding("symmetric memory", "works", f"rows and signals went between all {count} GPUs, with multicast off"))
    return [*found, _judge_link(facts.copies, count), _judge_multicast(facts)]


def _judge_link(copies: Sequence[tuple[int, int, float]], count: int) -> Finding:
    if not copies:
        return Finding("NVLink", "note", "not tried")
    rates = [rate for *_, rate in copies]
    slow, fast = min(rates), max(rates)
    rate = f"{slow:g} GB/s" if slow == fast else f"{slow:g} to {fast:g} GB/s"
    between = f"between every two of {count} GPUs" if count <= MOST_GPUS else f"between neighbours of {count} GPUs"
    short = [f"{source}-{target}" for source, target, rate_of in copies if rate_of < NVLINK_GBS]
    if not short:
        return Finding("NVLink", "works", f"{rate} {between}, in each direction, by the copy engine")
    where = "all of them" if len(short) == len(copies) else _listed(short)
    text = f"{rate} {between}, less than NVLink's ({where}): dispatch and combine will not hide behind the experts"
    return Finding("NVLink", "note", text)


def _judge_multicast(facts: Facts) -> Finding:
    given = dict(facts.multicast)
    missing = [f"{name}={value}" for name, value in ranks.WITHOUT_MULTICAST.items() if given.get(name) != value]
    if not missing:
        return Finding("multicast", "works", "switched off; the layer does without")
    text = f"the layer does without, and where a machine's is broken it must be off: {' '.join(missing)}"
    return Finding("multicast", "note", f"{text}; mok bench sets them itself, mok train the first two, your own program must")


def judge(facts: Facts) -> list[Finding]:
    """What the facts mean, one finding per subject."""
    cpu = f"Python {facts.python}, torch {facts.torch}, {facts.cores} cores"
    text = "the layer, forward and backward, and mok train run here, experts also in blockwise FP8 and MXFP8; ranks are processes over gloo"
    found = [
        Finding("CPU", "works", f"{cpu}: {text}"),
        *_judge_gpus(facts),
        *_judge_formats(facts),
    ]
    if not _at_least(facts.torch, (2, 11)):
        found.append(Finding("torch", "fails", f"{facts.torch}: 2.11 or newer is needed"))
    if facts.gpus and facts.driver:
        found.append(Finding("driver", "works", f"{facts.driver}, CUDA {facts.cuda} in torch"))
    if not facts.triton:
        text = "not installed: the layer runs on the CPU only"
        found.append(Finding("Triton", "fails" if facts.gpus else "note", text))
    elif not _at_least(facts.triton, (3, 6)):
        found.append(Finding("Triton", "fails", f"{facts.triton}: the kernels need 3.6 or newer"))
    else:
        text = "compiles the kernels" if facts.gpus else "compiles the kernels for a GPU elsewhere and interprets them here"
        found.append(Finding("Triton", "works", f"{facts.triton} {text}"))
    if facts.gpus:
        found += _judge_peers(facts)
    if not facts.matplotlib:
        found.append(Finding("plots", "note", "matplotlib is not installed: --plot and --png are refused; pip install matplotlib"))
    return found


# ---- the part with a process per GPU ----


def probe(device: torch.device, limit: int = 20_000_000) -> str:
    """Write to all peers' memory, meet through their signals, read what they wrote. "" or what is wrong; collective."""
    from mok.kernels import memory
    from mok.kernels.signals import barrier

    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = [Region("control", (memory.FLAGS + size,), torch.int32), Region("from", (size,), torch.int32)]
    view = memory.symmetric_memory(layout, group, device)
    barrier(view.addresses["control"], rank, size, -1)  # compiled and loaded before anybody waits in it
    torch.cuda.synchronize()
    dist.barrier()
    for peer in range(size):
        view.handle.region("from", peer)[rank] = rank + 1
    barrier(view.addresses["control"], rank, size, limit)
    torch.cuda.synchronize()
    if failure := view.failure():
        return f"a signal was lost: {failure}"
    got = view.own["from"].tolist()
    return "" if got == [peer + 1 for peer in range(size)] else f"wrong values were read: {got}"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="mok.doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, required=True)
    options = parser.parse_args(arguments)
    if not ranks.launched():
        return ranks.launch("mok.doctor", arguments, options.ranks, PROBE_S)
    _, _, device = ranks.join(PROBE_S)
    if problem := ranks.first_problem(probe(device)):
        print(f"RuntimeError: {problem}", flush=True)
    sys.stdout.flush()
    os._exit(1 if problem else 0)  # whatever a library still holds open must not keep a rank alive


if __name__ == "__main__":
    sys.exit(main())
