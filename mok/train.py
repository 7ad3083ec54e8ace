"""`mok train`: trains a language model on text, expert-parallel, with the same bits for any number of ranks.

A run lives in runs/NAME/: config.json (options), metrics.jsonl (a line per step), plot.png, checkpoints/step-XXXXXXXX.safetensors.
A checkpoint holds whole tensors (the experts of all ranks in order), so a run may go on with another number of ranks.

What moves bits: the options in `Options` up to `text`, the machine, and, for the dense parts, --threads. Ranks and tuning do not.

With --dtype=bfloat16, which is what a GPU needs, the model computes with bf16 copies of fp32 parameters: gradients are added up and the
optimizer works in fp32, and what is saved and digested is fp32. On a GPU a step waits for nothing: what steps report is kept on the device
and read (`Trainer.read`) every REPORT_EVERY steps.

Legend: B sequences of the global batch, S positions, H hidden, I intermediate, E experts in all, L experts of this rank, R ranks, G slices
of the global batch, P elements of all replicated parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import lzma
import math
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mok.config import MoEConfig, Tuning
from mok.executor import exact
from mok.model import LAYERS, LanguageModel, ModelConfig, local
from mok.quantize import Precision
from mok.router import balance_loss
from mok.schedule import experts_per_rank, local_experts

CHECKPOINT_FORMAT = "mok-train-1"
INTERRUPTED = 130
BIAS_RATE = 1e-2
BALANCE_WEIGHT = 1e-4
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
EVAL_BATCHES = 16
WARMUP_STEPS = 10
"""Left out of a run's tokens per second: kernels are compiled and memory is found in them."""
REPORT_EVERY = 10
"""Steps between two readings on a GPU; on a CPU every step is read."""
SHARED_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
ROUNDS, ROUND_STEPS = 3, 20
"""Of --against: both layers take turns."""
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
"""Of the standard library: other people's packages, tests, and two folders of tables and generated text."""


class TrainError(Exception):
    """Something about the run, its text or its checkpoint that the user can put right. The message says all; no traceback is needed."""


# --- options ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `mok train` was asked for. The fields down to `text` decide the bits of a run and are fixed when it is resumed.

    Raises:
        TrainError: naming the option, its value and the rule it breaks.
    """

    steps: int = 350
    batch: int = 16
    sequence: int = 256
    layers: int = 4
    dense: int = 1
    hidden: int = 128
    heads: int | None = None
    head_width: int = 32
    width: int | None = None
    experts: int = 16
    top_k: int = 4
    lr: float = 3e-3
    seed: int = 0
    slices: int = 4
    moe: str = "mok"
    device: str = "cpu"
    dtype: str = "float32"
    precision: str = "bf16"
    text: str | None = None
    ranks: int = 1
    threads: int = 1
    minibatch: int = 4096
    macrobatch: int = 32768
    saved_rows: int | None = None
    against: str | None = None
    checkpoint_every: int = 100
    eval_every: int = 100

    def __post_init__(self) -> None:
        least = dict(steps=1, batch=1, sequence=2, dense=0, layers=self.dense + 1, head_width=2, hidden=self.head_width, experts=1)
        least |= dict(heads=1, width=1, top_k=1, slices=1, ranks=1, threads=1, checkpoint_every=0, eval_every=1)
        for name, minimum in least.items():
            if getattr(self, name) is not None and getattr(self, name) < minimum:
                _reject(name, getattr(self, name), f"must be at least {minimum}")
        if not 0 <= self.seed < 2**63:
            _reject("seed", self.seed, "must be from 0 to 2^63 - 1")
        if not (math.isfinite(self.lr) and self.lr > 0):
            _reject("lr", self.lr, "must be finite and above 0")
        if self.head_width % 2:
            _reject("head_width", self.head_width, "must be even")
        if self.heads is None and self.hidden % self.head_width:
            _reject("hidden", self.hidden, f"must be a multiple of {self.head_width}, the width of an attention head, or --heads be given")
        if self.top_k > self.experts:
            _reject("top_k", self.top_k, f"must be at most --experts={self.experts}")
        if self.batch % self.slices:
            _reject("batch", self.batch, f"must be a multiple of --slices={self.slices}")
        if self.slices % self.ranks:
            _reject("ranks", self.ranks, f"must divide --slices={self.slices}")
        if self.ranks > self.experts:
            _reject("ranks", self.ranks, f"must be at most --experts={self.experts}")
        if self.device not in ("cpu", "cuda"):
            _reject("device", self.device, "must be cpu or cuda")
        if self.dtype not in ("float32", "bfloat16"):
            _reject("dtype", self.dtype, "must be float32 or bfloat16")
        if self.device == "cuda":
            if self.dtype != "bfloat16":
                _reject("dtype", self.dtype, "must be bfloat16 with --device=cuda")
            for name, size in (("hidden", self.hidden), ("width", self.expert_width)):
                if size % 16:
                    _reject(name, size, "must be a multiple of 16 with --device=cuda")
            if self.head_width % 8:
                _reject("head_width", self.head_width, "must be a multiple of 8 with --device=cuda")
        if self.precision not in get_args(Precision):
            _reject("precision", self.precision, f"must be one of {', '.join(get_args(Precision))}")
        if self.precision != "bf16" and (self.moe, self.against) != ("mok", None):
            _reject("precision", self.precision, "needs --moe=mok, and nothing to compare --against")
        for name in ("moe", "against"):
            layer = getattr(self, name)
            if layer is None:
                continue
            if layer not in LAYERS:
                _reject(name, layer, f"must be one of {', '.join(LAYERS)}")
            if layer != "mok" and self.ranks > 1:
                _reject(name, layer, f"runs on one rank, not on --ranks={self.ranks}")
            if layer != "mok" and self.dtype != "bfloat16":
                _reject(name, layer, "needs --dtype=bfloat16")
        if self.against == self.moe:
            _reject("against", self.against, "must be another layer than --moe")
        if self.against is not None and self.ranks > 1:
            _reject("against", self.against, f"is timed on one rank, not on --ranks={self.ranks}")
        if self.text is not None and not Path(self.text).exists():
            _reject("text", self.text, "no such file or folder")
        try:
            self.tuning()
            self.model()
        except (TypeError, ValueError) as error:
            raise TrainError(f"--{str(error).replace('_', '-')}") from None

    @property
    def expert_width(self) -> int:
        return self.hidden // 2 if self.width is None else self.width

    def tuning(self) -> Tuning:
        return Tuning(minibatch=self.minibatch, macrobatch=self.macrobatch, saved_rows=self.saved_rows)

    def model(self) -> ModelConfig:
        moe = MoEConfig(
            hidden_size=self.hidden,
            intermediate_size=self.expert_width,
            num_experts=self.experts,
            top_k=self.top_k,
            num_shared_experts=1,
            score="sigmoid",
            selection_bias=True,
            scaling_factor=1.0,
            balance_loss_weight=BALANCE_WEIGHT,
        )
        return ModelConfig(
            moe=moe,
            layers=self.layers,
            sequence=self.sequence,
            heads=self.heads or self.hidden // self.head_width,
            head_width=self.head_width,
            dense=self.dense,
        )

    def fixed(self) -> dict[str, Any]:
        """The options that decide the bits."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names[: names.index("text") + 1]}


SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "400m": dict(
        steps=200, batch=64, sequence=1024, layers=2, dense=0, hidden=2048, heads=4, head_width=64, width=512, experts=64, top_k=8, lr=1e-3,
        dtype="bfloat16", minibatch=2048, checkpoint_every=1000,
    ),
}  # fmt: skip
"""What a size changes in the defaults of `Options`."""


def sized_options(size: str | None, given: dict[str, Any]) -> Options:
    """The defaults of a size (None: the device's) with the options that were given."""
    cuda = given.get("device") == "cuda"
    size = size or ("400m" if cuda else "small")
    if size not in SIZES:
        _reject("size", size, f"must be one of {', '.join(SIZES)}")
    values = {**({"dtype": "bfloat16"} if cuda else {}), **SIZES[size], **given}
    if "ranks" not in values:
        one = cuda or any(values.get(name, "mok") != "mok" for name in ("moe", "against"))
        values["ranks"] = 1 if one else default_ranks(values.get("slices", Options.slices), values.get("experts", Options.experts))
    return Options(**values)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _reject(name: str, value: object, rule: str) -> None:
    raise TrainError(f"{flag(name)}={value}: {rule}")


def resumed_options(run: Path, given: dict[str, Any]) -> Options:
    """The options of a run with those changed that were given anew; only options that do not move bits may be."""
    path = run / "config.json"
    try:
        saved = json.loads(path.read_text())["options"]
        options = Options(**saved)
    except FileNotFoundError:
        raise TrainError(f"--resume={run}: no run there ({path} is missing)") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainError(f"--resume={run}: {path} is not a config of mok train: {error}") from None
    for name, value in given.items():
        if name in options.fixed() and value != getattr(options, name):
            _reject(name, value, f"the run was started with {getattr(options, name)}, and this option cannot change when it is resumed")
    return dataclasses.replace(options, **given)


# --- text ------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """source: what it is, in words. train, held_out: bytes. split: how it was cut, in words. digest: sha256 of both parts."""

    source: str
    train: bytes
    held_out: bytes
    split: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(hashlib.sha256(self.train).digest() + hashlib.sha256(self.held_out).digest()).hexdigest()

    def unigram_bits(self) -> float:
        """Entropy of the held-out bytes, bits per byte: the best that a fixed distribution over bytes could do on them."""
        p = np.bincount(np.frombuffer(self.held_out, np.uint8), minlength=256) / len(self.held_out)
        return float(-(p[p > 0] * np.log2(p[p > 0])).sum())

    def xz_bits(self) -> float:
        """Size of the held-out bytes under xz -9, bits per byte."""
        return 8 * len(lzma.compress(self.held_out, preset=9)) / len(self.held_out)


def read_text(text: str | None, sequence: int) -> Text:
    """Read a file, a folder, or the Python standard library (None), and split it."""
    root = Path(text or sysconfig.get_path("stdlib"))
    files = [(root.name, root.read_bytes())] if root.is_file() else list(_read_folder(root, python_only=text is None))
    train, held_out, split = split_files(files)
    source = f"{len(files)} files of {root}" if root.is_dir() else str(root)
    for name, part in (("training", train), ("held-out", held_out)):
        if len(part) <= sequence + 1:
            raise TrainError(f"--text={root}: {len(part)} bytes of {name} text are too few for --sequence={sequence}")
    return Text(source, train, held_out, split)


def _read_folder(root: Path, python_only: bool) -> Iterator[tuple[str, bytes]]:
    """Relative path and content of every text file, by path. Hidden and binary files and repeated contents are left out."""
    seen = set()
    for path in sorted(root.rglob("*.py" if python_only else "*"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") for part in parts) or path.is_symlink() or not path.is_file():
            continue
        if python_only and not SKIPPED_FOLDERS.isdisjoint(parts):
            continue
        content = path.read_bytes()
        key = hashlib.sha256(content).digest()
        if not content or b"\0" in content or key in seen:
            continue
        seen.add(key)
        yield "/".join(parts), content


def split_files(files: list[tuple[str, bytes]]) -> tuple[bytes, bytes, str]:
    """Training bytes, held-out bytes, and how they were cut.

    Whole top-level entries (a file, or a folder with all that is in it) are held out, taken by the hash of their name until they make
    5 % of the text; an entry that would bring them over 10 % is passed over. If that leaves less than 1 % (a single file, say), the last
    5 % of the text are held out instead.
    """
    sizes: dict[str, int] = {}
    for name, content in files:
        entry = name.split("/")[0]
        sizes[entry] = sizes.get(entry, 0) + len(content)
    total = sum(sizes.values())
    held: dict[str, int] = {}
    for entry in sorted(sizes, key=lambda entry: hashlib.sha256(entry.encode()).digest()):
        if sum(held.values()) < total / 20 and sum(held.values()) + sizes[entry] <= total / 10:
            held[entry] = sizes[entry]
    if sum(held.values()) >= total / 100:
        parts = [b"".join(content for name, content in files if (name.split("/")[0] in held) == out) for out in (False, True)]
        return parts[0], parts[1], f"{len(held)} of {len(sizes)} top-level files and folders, chosen by the hash of their name"
    whole = b"".join(content for _, content in files)
    cut = len(whole) - len(whole) // 20
    return whole[:cut], whole[cut:], "the last 5 % of the text"


def _windows(data: Tensor, starts_B: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [B, S], from uint8 bytes."""
    windows = data[starts_B[:, None] + torch.arange(sequence + 1, device=data.device)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# --- digest and checkpoints --------------------------------------------------------------------------------------------------------------


def digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor (in host memory), by name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """After a crash at any moment `path` holds the old content or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass
class Checkpoint:
    """Everything that the next step depends on. model and adam: whole tensors, whatever the number of ranks that wrote them.

    position: sequences drawn from the training text so far. rng: state of the generator that draws them. fixed: `Options.fixed()`.
    """

    step: int
    position: int
    rng: Tensor
    model: dict[str, Tensor]
    adam: dict[str, Tensor]
    fixed: dict[str, Any]
    text_digest: str

    def save(self, folder: Path, keep: int = 2) -> Path:
        tensors = {f"model/{name}": tensor for name, tensor in self.model.items()}
        tensors |= {f"adam/{name}": tensor for name, tensor in self.adam.items()}
        tensors = {name: tensor.detach().contiguous() for name, tensor in {**tensors, "rng": self.rng}.items()}
        about = dict(step=self.step, position=self.position, fixed=self.fixed, text_digest=self.text_digest, checksum=digest(tensors))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{self.step:08d}.safetensors"
        write_atomically(path, save(tensors, metadata={"format": CHECKPOINT_FORMAT, "about": json.dumps(about)}))
        for old in [*folder.glob(".step-*.tmp"), *checkpoints(folder)[:-keep]]:
            old.unlink()
        return path

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError) as error:
            raise TrainError(f"{path}: torn, or not a checkpoint: {error}") from None
        if metadata.get("format") != CHECKPOINT_FORMAT:
            raise TrainError(f"{path}: not a checkpoint of mok train (format {metadata.get('format')!r}, not {CHECKPOINT_FORMAT!r})")
        about = json.loads(metadata["about"])
        if about.pop("checksum") != digest(tensors):
            raise TrainError(f"{path}: damaged: its tensors do not match its checksum")
        parts = {
            prefix: {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in ("model/", "adam/")
        }
        return cls(**about, rng=tensors["rng"], model=parts["model/"], adam=parts["adam/"])


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(folder.glob("step-*.safetensors"))


def find_checkpoint(run: Path, options: Options, text: Text) -> Checkpoint:
    """The newest checkpoint of a run, checked against the run's options and text."""
    found = checkpoints(run / "checkpoints")
    if not found:
        raise TrainError(f"--resume={run}: no checkpoint in {run / 'checkpoints'}; the run stopped before its first one")
    try:
        checkpoint = Checkpoint.load(found[-1])
    except TrainError as error:
        hint = f"; remove it to go on from {found[-2].name}" if len(found) > 1 else ""
        raise TrainError(f"{error}{hint}") from None
    for name, value in options.fixed().items():
        if checkpoint.fixed.get(name) != value:
            raise TrainError(f"{found[-1]}: from another run: it has {flag(name)}={checkpoint.fixed.get(name)}, the run has {value}")
    if checkpoint.text_digest != text.digest:
        raise TrainError(f"{found[-1]}: the text has changed since it was written ({text.source})")
    return checkpoint


# --- ranks -----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. Every method gives the same bits for any number of ranks; group is None for a rank alone."""

    group: Any = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def _carried(self, tensor: Tensor) -> Tensor:
        """The tensor where the group's backend can move it: gloo knows host memory only."""
        return tensor.cpu() if dist.get_backend(self.group) == "gloo" else tensor

    def add(self, parts: Tensor) -> Tensor:
        """Sum over the ranks of numbers of which all ranks but one hold a zero, hence exact. In place."""
        if self.group is not None:
            total = self._carried(parts)
            dist.all_reduce(total, group=self.group)
            if total is not parts:
                parts.copy_(total)
        return parts

    def gather(self, mine: Tensor, rows: int) -> Tensor:
        """Concatenate the ranks' rows; every rank but the last ones has ceil(rows / R), the last ones what is left."""
        if self.group is None:
            return mine
        step = experts_per_rank(rows, self.size)
        padded = mine.new_zeros(step, *mine.shape[1:])
        padded[: len(mine)] = mine
        padded = self._carried(padded)
        whole = padded.new_empty(step * self.size, *mine.shape[1:])
        dist.all_gather(list(whole.chunk(self.size)), padded, group=self.group)
        return whole[:rows].to(mine.device)


# --- trainer ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What a step reports. loss: bits per byte over the global batch. load: most loaded expert over the mean, per MoE block."""

    loss: float
    grad_norm: float
    lr: float
    load: list[float]
    stop: bool


class Trainer:
    """Model, optimizer and data of one rank; `step` and `evaluate` are collective.

    The optimizer works on `replicated` and `experts`, plain fp32 tensors by name: in fp32 they share the memory of the model's parameters,
    in bf16 the model's parameters are rounded copies of them.
    """

    def __init__(self, options: Options, text: Text, ranks: Ranks) -> None:
        self.options, self.text, self.ranks = options, text, ranks
        self.local_slices = options.slices // ranks.size
        self.model = LanguageModel(
            options.model(), self.local_slices, ranks.group, options.tuning(),
            dtype=getattr(torch, options.dtype), device=options.device, layer=options.moe,
            precision=cast(Precision, options.precision),
        )  # fmt: skip
        self.model.initialize(options.seed)
        self.train_bytes = torch.frombuffer(bytearray(text.train), dtype=torch.uint8).to(options.device)
        self.held_out_bytes = torch.frombuffer(bytearray(text.held_out), dtype=torch.uint8).to(options.device)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.steps_done = 0
        self.unread: list[tuple[float, Tensor]] = []

        trunk, experts = dict(self.model.trunk.named_parameters()), self.model.experts()
        self.mixed = options.dtype != "float32"
        self.replicated = {name: nn.Parameter(p.detach().float()) if self.mixed else p for name, p in trunk.items()}
        self.experts = {name: nn.Parameter(local(p.detach()).float()) for name, p in experts.items()}
        self.computed = [local(p.detach()) for p in (*trunk.values(), *experts.values())]
        parameters = {name: p for name, p in {**self.replicated, **self.experts}.items() if p.numel()}
        groups = [
            {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=BETAS, fused=True)

    def num_parameters(self) -> int:
        """Of the model, experts of all ranks included."""
        return sum(p.numel() for p in (*self.replicated.values(), *self.model.experts().values()))

    # One step.

    def step(self, stop: bool = False) -> None:
        """Train on one global batch, without waiting for the device; `read` tells what came of it."""
        options = self.options
        high = len(self.train_bytes) - options.sequence
        inputs, targets = self._local_slices(self.train_bytes, torch.randint(high, (options.batch,), generator=self.generator))
        self.model.train()
        for parameter in self.model.moes.parameters():
            parameter.grad = None
        for trunk in self.model.replicas:
            trunk.zero_grad()
        logits, routings = self.model(inputs)
        losses = [self._loss(*pair) for pair in zip(logits, targets, strict=True)]
        objectives = list(losses)
        for routing in routings:
            for index, r in enumerate(routing):
                balance = balance_loss(r.scores_TE, r.ids_TK, self.model.config.moe, options.sequence)
                objectives[index] = objectives[index] + BALANCE_WEIGHT * balance
        torch.autograd.backward([objective / options.slices for objective in objectives])

        replicated, experts = self._sum_gradients()
        squares_E, losses_G, stops_R = self._exchange(losses, experts, stop)
        norm = (_squares(replicated).sum() + squares_E.sum()).sqrt()
        scale = (CLIP_NORM / norm).clamp(max=1.0).float()[None]  # of one dimension: its product with bf16 is fp32
        for optimized, gradient in zip(self._optimized(), (*replicated, *experts), strict=True):
            optimized.grad = gradient * scale
        lr = learning_rate(self.steps_done, options.steps, options.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with exact():  # with several threads, where a shard is cut among them would move bits
            self.optimizer.step()
        self._round_parameters()
        numbers = [losses_G.sum() / options.slices, norm, stops_R.sum()]
        for moe in self.model.moe_blocks():
            numbers.append(moe.tokens_per_expert.max() / moe.tokens_per_expert.double().mean())
            moe.update_bias(BIAS_RATE)
        self.unread.append((lr, torch.stack(numbers)))
        self.steps_done += 1

    def read(self) -> list[Step]:
        """What the steps since the last reading report, oldest first. Waits for the device.

        Raises:
            TrainError: the loss of one of them is not finite.
        """
        rows = torch.stack([numbers for _, numbers in self.unread]).tolist() if self.unread else []
        steps = []
        for index, (loss, norm, stop, *load) in enumerate(rows):
            if not math.isfinite(loss):
                raise TrainError(f"step {self.steps_done - len(rows) + index + 1}: the loss is {loss}; a smaller --lr may help")
            steps.append(Step(loss / math.log(2), norm, self.unread[index][0], load, stop > 0))
        self.unread = []
        return steps

    @torch.no_grad()
    def evaluate(self) -> float:
        """Bits per byte on a fixed sample: EVAL_BATCHES global batches of sequences, evenly spaced over the held-out text."""
        options = self.options
        self.model.eval()
        count = EVAL_BATCHES * options.batch
        last = len(self.held_out_bytes) - options.sequence - 1
        starts = torch.arange(count) * last // max(1, count - 1)
        total = torch.zeros((), dtype=torch.float64, device=options.device)
        for batch in starts.split(options.batch):
            inputs, targets = self._local_slices(self.held_out_bytes, batch)
            losses = [self._loss(*pair) for pair in zip(self.model(inputs)[0], targets, strict=True)]
            total += self._exchange(losses)[1].sum() / options.slices
        return float(total) / EVAL_BATCHES / math.log(2)

    def _local_slices(self, data: Tensor, starts_B: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and targets of this rank's slices, int64 [B / G, S] each. starts_B: of the whole batch's sequences, in host memory."""
        mine = starts_B.chunk(self.options.slices)[self.ranks.rank * self.local_slices :][: self.local_slices]
        if data.is_cuda:
            mine = tuple(part.pin_memory().to(data.device, non_blocking=True) for part in mine)
        pairs = [_windows(data, part, self.options.sequence) for part in mine]
        return [inputs for inputs, _ in pairs], [targets for _, targets in pairs]

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())

    def _optimized(self) -> list[Tensor]:
        return [*self.replicated.values(), *self.experts.values()]

    def _sum_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of replicated parameters the sum over all slices in order, in fp32; of experts the local shard's as it is."""
        mine_GP = torch.stack([torch.cat([_gradient(p).flatten() for p in trunk.parameters()]) for trunk in self.model.replicas])
        whole_GP = self.ranks.gather(mine_GP, self.options.slices)
        total_P = whole_GP[0].to(torch.float32, copy=True)
        for other_P in whole_GP[1:]:
            total_P += other_P
        parameters = list(self.replicated.values())
        gradients = [g.view_as(p) for p, g in zip(parameters, total_P.split([p.numel() for p in parameters]), strict=True)]
        return gradients, [local(_gradient(parameter)) for parameter in self.model.experts().values()]

    @torch.no_grad()
    def _round_parameters(self) -> None:
        if self.mixed:
            torch._foreach_copy_(self.computed, self._optimized())

    def _exchange(self, losses: list[Tensor], experts: list[Tensor] | tuple[()] = (), stop: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """One small collective: squared norm of every expert's gradients, loss of every slice, stop wish of every rank."""
        rank, count, slices = self.ranks.rank, self.options.experts, self.options.slices
        sizes = [len(experts) * count, slices, self.ranks.size]
        numbers = torch.zeros(sum(sizes), dtype=torch.float64, device=self.options.device)
        squares_E, losses_G, stops_R = numbers.split(sizes)
        mine = local_experts(count, self.ranks.size, rank)
        for index, shard in enumerate(experts):
            if len(mine):
                squares_E[index * count + mine.start : index * count + mine.stop] = _squares(list(shard))
        for index, loss in enumerate(losses):
            losses_G[rank * self.local_slices + index] = loss.detach()
        stops_R[rank].fill_(stop)  # an assignment would copy from the host, and wait
        self.ranks.add(numbers)
        return squares_E, losses_G, stops_R

    # Whole state, in and out, in host memory.

    def _whole(self, mine: Tensor) -> Tensor:
        return self.ranks.gather(mine.detach(), self.options.experts).cpu()

    def state(self) -> dict[str, Tensor]:
        """Parameters and selection biases, experts whole."""
        trunk = {**self.model.trunk.state_dict(), **{name: parameter.detach() for name, parameter in self.replicated.items()}}
        return {
            **{name: tensor.cpu() for name, tensor in trunk.items()},
            **{name: self._whole(parameter) for name, parameter in self.experts.items()},
        }

    def checkpoint(self) -> Checkpoint:
        adam = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            for name, parameter in self.replicated.items():
                adam[f"{moment}/{name}"] = self.optimizer.state[parameter][moment].cpu()
            for name, parameter in self.experts.items():
                mine = self.optimizer.state[parameter][moment] if parameter.numel() else parameter
                adam[f"{moment}/{name}"] = self._whole(mine)
        return Checkpoint(
            step=self.steps_done,
            position=self.steps_done * self.options.batch,
            rng=self.generator.get_state(),
            model=self.state(),
            adam=adam,
            fixed=self.options.fixed(),
            text_digest=self.text.digest,
        )

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        mine = local_experts(self.options.experts, self.ranks.size, self.ranks.rank)
        self.model.trunk.load_state_dict({k: v for k, v in checkpoint.model.items() if k not in self.experts})
        for name, parameter in {**self.replicated, **self.experts}.items():
            whole = checkpoint.model[name]
            parameter.copy_(whole[mine.start : mine.stop] if name in self.experts else whole)
        self._round_parameters()
        for name, parameter in {**self.replicated, **self.experts}.items():
            if not parameter.numel():
                continue
            state: dict[str, Tensor] = {"step": torch.tensor(float(checkpoint.step), device=parameter.device)}
            for moment in ("exp_avg", "exp_avg_sq"):
                whole = checkpoint.adam[f"{moment}/{name}"]
                state[moment] = torch.empty_like(parameter).copy_(whole[mine.start : mine.stop] if name in self.experts else whole)
            self.optimizer.state[parameter] = state
        self.generator.set_state(checkpoint.rng)
        self.steps_done = checkpoint.step


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _squares(tensors: list[Tensor]) -> Tensor:
    """The squared norm of every tensor, fp64; of tensors of one shape it does not matter how many there are."""
    if tensors[0].is_cuda:  # sums of 65,536 elements each, and then of these
        return torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).double().square()
    return torch.stack([tensor.double().square().sum() for tensor in tensors])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps (at most 100), then half a cosine down to a tenth of the peak.

    Example: steps=20, peak=1.0: warm-up of 2 steps, 0.5 and 1.0; step 11 is halfway down the cosine and has 0.55.
    """
    warmup = max(1, min(100, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


# --- a run -------------------------------------------------------------------------------------------------------------------------------


def _run(options: Options, run: Path, text: Text, checkpoint: Path | None, ranks: Ranks, stop: Callable[[], bool]) -> int:
    """One rank's part of a run. Returns the exit code: 0, or 130 after a stop."""
    torch.set_num_threads(options.threads)
    trainer = Trainer(options, text, ranks)
    if checkpoint is not None:
        trainer.restore(Checkpoint.load(checkpoint))
    first = trainer.steps_done
    report = _Report(options, run, text, first, trainer.num_parameters()) if ranks.rank == 0 else None
    read_every = REPORT_EVERY if options.device == "cuda" else 1
    with report.progress if report else contextlib.nullcontext():
        validation = trainer.evaluate() if first == options.steps else math.nan
        began = time.perf_counter()
        while trainer.steps_done < options.steps:
            trainer.step(stop())
            done = trainer.steps_done
            last = done == options.steps
            evaluate_now, save_now = done % options.eval_every == 0, options.checkpoint_every and done % options.checkpoint_every == 0
            if not (done % read_every == 0 or last or evaluate_now or save_now):
                continue
            steps = trainer.read()
            seconds = time.perf_counter() - began
            stopped = any(step.stop for step in steps)
            evaluated = (evaluate_now or last) and not stopped
            if evaluated:
                validation = trainer.evaluate()
            if report:
                report.steps(done, steps, seconds, validation if evaluated else None)
            if options.checkpoint_every and (save_now or last or stopped):
                whole = trainer.checkpoint()
                if report:
                    report.saved(whole.save(run / "checkpoints"))
            if stopped and not last:
                if report:
                    report.stopped(done)
                return INTERRUPTED
            began = time.perf_counter()
    state = trainer.state()
    if report:
        peak_bytes = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
        reached = digest(state)  # before the parameters move on
        others = _take_turns(trainer) if options.against else None
        report.summary(validation, peak_bytes, others)
        print(f"digest {reached}", flush=True)
    return 0


def _take_turns(trainer: Trainer) -> dict[str, float]:
    """Tokens per second of the trainer's layer and of --against, in turns on the same machine, as hot as it is; medians of the rounds."""
    options = trainer.options
    assert options.against is not None
    rival = Trainer(dataclasses.replace(options, moe=options.against, against=None), trainer.text, trainer.ranks)
    rates: dict[str, list[float]] = {options.moe: [], options.against: []}
    for turn in (trainer, rival) * ROUNDS:
        for steps in (WARMUP_STEPS, ROUND_STEPS):
            began = time.perf_counter()
            for _ in range(steps):
                turn.step()
            turn.read()
        rates[turn.options.moe].append(ROUND_STEPS * options.batch * options.sequence / (time.perf_counter() - began))
    return {name: statistics.median(found) for name, found in rates.items()}


class _Report:
    """What rank 0 shows and writes."""

    def __init__(self, options: Options, run: Path, text: Text, first: int, parameters: int) -> None:
        self.options, self.run, self.text, self.first = options, run, text, first
        self.began = time.perf_counter()
        self.seconds: list[float] = []  # of every step; an average where several were read together
        self.last_loss = math.nan
        self.checkpoint: Path | None = None
        self.unigram, self.xz = text.unigram_bits(), text.xz_bits()
        self.console = Console(highlight=False)
        self.console.print(f"text: {text.source}; {len(text.train):,} bytes to train on", soft_wrap=True)
        self.console.print(f"held out: {len(text.held_out):,} bytes, {text.split}", soft_wrap=True)
        self.console.print(f"on them: unigram entropy {self.unigram:.3f}, xz -9 {self.xz:.3f} bits per byte")
        machine = f"of {options.threads} thread(s)" if options.device == "cpu" else f"on {torch.cuda.get_device_name()}"
        experts = f"experts by {options.moe}{f' in {options.precision}' * (options.precision != 'bf16')}"
        self.console.print(f"model: {parameters:,} parameters, {options.dtype}, {experts}")
        self.console.print(f"run: {run}, {options.ranks} rank{'s' * (options.ranks > 1)} {machine}", soft_wrap=True)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal, expand=True)
        self.task = self.progress.add_task("", total=options.steps, completed=first)
        self.metrics = run / "metrics.jsonl"
        kept = [line for line in read_metrics(self.metrics) if line["step"] <= first]
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def steps(self, done: int, steps: list[Step], seconds: float, validation: float | None) -> None:
        """The steps up to `done` that were read together and took `seconds`."""
        self.seconds += [seconds / len(steps)] * len(steps)
        rate = self._rate(self.seconds[-20:])
        with open(self.metrics, "a") as file:
            for number, step in enumerate(steps, start=done - len(steps) + 1):
                line: dict[str, Any] = dict(step=number, loss=step.loss, lr=step.lr, grad_norm=step.grad_norm, load=step.load)
                line["tokens_per_second"] = rate
                if validation is not None and number == done:
                    line["validation"] = validation
                file.write(json.dumps(line) + "\n")
        loss, load = steps[-1].loss, max(steps[-1].load)
        self.last_loss = loss
        self.progress.update(self.task, completed=done, description=f"loss {loss:.3f}  {rate:,.0f} tokens/s  load {load:.2f}")
        if validation is not None:
            self.progress.console.print(
                f"step {done:>6}  train {loss:.3f}  validation {validation:.3f} bits per byte  "
                f"load {load:.2f} of mean  {rate:,.0f} tokens/s",
                soft_wrap=True,
            )

    def _rate(self, seconds: list[float]) -> float:
        return len(seconds) * self.options.batch * self.options.sequence / sum(seconds)

    def saved(self, path: Path) -> None:
        self.checkpoint = path
        if reason := plot(self.run, self.unigram, self.xz):
            self.progress.console.print(reason)

    def stopped(self, done: int) -> None:
        if self.checkpoint is None:
            self.progress.console.print(f"stopped after step {done}; nothing was saved (--checkpoint-every=0)")
            return
        self.progress.console.print(f"stopped after step {done}; {self.checkpoint} is complete", soft_wrap=True)
        self.progress.console.print(f"go on with: python -m mok train --resume {self.run}", soft_wrap=True)

    def summary(self, validation: float, peak_bytes: int, others: dict[str, float] | None) -> None:
        """others: tokens per second by layer, of `_take_turns`."""
        options, seconds = self.options, self.seconds[WARMUP_STEPS:] or self.seconds
        rate = f"{self._rate(seconds):,.0f}" if seconds else "-"
        table = Table("", "bits per byte", title=f"{self.run.name}: step {self.options.steps}")
        table.columns[1].justify = "right"
        table.add_row("train, last step", f"{self.last_loss:.3f}")
        table.add_row("validation", f"{validation:.3f}")
        table.add_row("unigram entropy", f"{self.unigram:.3f}")
        table.add_row("xz -9", f"{self.xz:.3f}", end_section=True)
        table.add_row("tokens/s", rate)
        if options.device == "cuda":
            table.add_row("peak memory", f"{peak_bytes / 2**30:.1f} GiB")
        table.add_row("time", f"{time.perf_counter() - self.began:.0f} s")
        if others:
            table.add_section()
            for layer, tokens in others.items():
                table.add_row(f"tokens/s in turns, {layer}", f"{tokens:,.0f}")
            ours, theirs = others.values()
            table.add_row(f"{options.moe} over {options.against}", f"{ours / theirs:.3f}")
        self.console.print(table)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; one that a crash cut short is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def plot(run: Path, unigram: float, xz: float) -> str | None:
    """Draw plot.png from metrics.jsonl. Returns why not, if matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot.png: matplotlib is missing (pip install 'mixture-of-kittens[plot]')"
    lines = read_metrics(run / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    evaluated = [line for line in lines if "validation" in line]
    figure, (loss_axes, load_axes) = pyplot.subplots(2, 1, figsize=(8, 8), sharex=True, layout="constrained")
    loss_axes.plot(steps, [line["loss"] for line in lines], linewidth=0.8, alpha=0.6, label="train")
    loss_axes.plot([line["step"] for line in evaluated], [line["validation"] for line in evaluated], "o-", markersize=3, label="validation")
    loss_axes.axhline(unigram, color="gray", linestyle=":", label="unigram entropy of the held-out text")
    loss_axes.axhline(xz, color="gray", linestyle="--", label="xz -9 of the held-out text")
    loss_axes.set_ylabel("bits per byte")
    loss_axes.legend()
    for index in range(len(lines[-1]["load"]) if lines else 0):
        load_axes.plot(steps, [line["load"][index] for line in lines], linewidth=0.8, label=f"block {index + 1}")
    load_axes.axhline(1.0, color="gray", linestyle=":", label="balanced")
    load_axes.set_ylabel("most loaded expert / mean")
    load_axes.set_ylim(bottom=0.9)
    load_axes.set_xlabel("step")
    load_axes.legend()
    temporary = run / ".plot.png.tmp"
    figure.savefig(temporary, format="png", dpi=100)
    pyplot.close(figure)
    os.replace(temporary, run / "plot.png")
    return None


# --- processes -------------------------------------------------------------------------------------------------------------------------


class _Stop:
    """SIGINT and SIGTERM: the first one asks for a stop after the step, a later one ends at once. One signal may come twice within 0.3 s
    (from the terminal and from a launcher) and counts once."""

    def __init__(self, ask: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None) -> None:
        self.asked_at: float | None = None
        self.ask, self.end = ask, end
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
            os.write(2, b"\nstopping after this step; once more ends at once\n")
            self.ask()
        elif now - self.asked_at > 0.3:
            self.end()
            os._exit(INTERRUPTED)

    def __call__(self) -> bool:
        return self.asked_at is not None


def launched() -> tuple[int, int] | None:
    """(rank, ranks) if a launcher such as torchrun started this process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def default_ranks(slices: int, experts: int) -> int:
    """On a CPU: two on a machine of at least two cores, if the problem can be cut in two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 2 if cores >= 2 and slices % 2 == 0 and experts >= 2 else 1


def train(options: Options, run: Path, resume: bool) -> int:
    """Train or go on, in as many processes as `options.ranks`. Returns the exit code of the command.

    Raises:
        TrainError: before any process is started, if the text, the run or its checkpoint do not fit, or GPUs are missing.
    """
    if options.device == "cuda":
        _look_for_gpus(options)
    text = read_text(options.text, options.sequence)
    checkpoint = None
    if resume:
        checkpoint = run / "checkpoints" / f"step-{find_checkpoint(run, options, text).step:08d}.safetensors"
    elif (launched() or (0, 1))[0] == 0:
        _create(run, options, text)
    if launched():
        _join(options, int(os.environ.get("LOCAL_RANK", "0")))
        try:
            code = _run(options, run, text, checkpoint, Ranks(dist.group.WORLD), _Stop())
            dist.barrier()
            return code
        finally:
            dist.destroy_process_group()
    if options.ranks == 1:
        return _run(options, run, text, checkpoint, Ranks(), _Stop())
    return _spawn(options, run, text, checkpoint)


def _look_for_gpus(options: Options) -> None:
    """One GPU per rank of this machine, or fewer where torch's symmetric memory was told that ranks share one (slow; for tests)."""
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
    if not gpus:
        _reject("device", options.device, "PyTorch finds no GPU on this machine")
    if here > gpus and os.environ.get(SHARED_GPUS) != "1":
        _reject("ranks", options.ranks, f"{here} ranks on this machine of {gpus} GPU(s); {SHARED_GPUS}=1 lets them share, slowly")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def _join(options: Options, local_rank: int, **how: Any) -> None:
    """Enter the group of all ranks: over NCCL where each has a GPU of its own, else over gloo."""
    backend = "gloo"
    if options.device == "cuda":
        gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", options.ranks))
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
        if here <= gpus:
            backend, how["device_id"] = "nccl", device
    dist.init_process_group(backend, timeout=_timeout(options), **how)


def _create(run: Path, options: Options, text: Text) -> None:
    try:
        run.mkdir(parents=True)
    except FileExistsError:
        raise TrainError(f"--name={run.name}: {run} exists; choose another name, or go on with it: --resume {run.name}") from None
    except OSError as error:
        raise TrainError(f"{run}: cannot be made ({error.strerror}); a run is kept in {run.parent}/ of the working directory") from None
    about = {
        "options": dataclasses.asdict(options),
        "text": {"source": text.source, "split": text.split, "digest": text.digest, "bytes": [len(text.train), len(text.held_out)]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()},
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    write_atomically(run / "config.json", (json.dumps(about, indent=2) + "\n").encode())


def _spawn(options: Options, run: Path, text: Text, checkpoint: Path | None) -> int:
    """Start the ranks and wait for them. They leave signals to this process and look at `stop` after every step."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

    context = multiprocessing.get_context("spawn")
    stop, outcome, end = context.Event(), context.Value("i", 0), context.Barrier(options.ranks)
    with tempfile.TemporaryDirectory(prefix="mok-") as folder:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # inherited
        arguments = (options, run, text.digest, checkpoint, f"file://{folder}/rendezvous", stop, outcome, end, os.getpid())
        ranks = start_processes(_rank, arguments, nprocs=options.ranks, join=False, start_method="spawn")
        assert ranks is not None
        _Stop(stop.set, lambda: _kill(ranks.processes))
        try:
            while not ranks.join(timeout=1.0, grace_period=5.0):
                pass
        except ProcessRaisedException as error:
            _, own, message = str(error).rpartition(f"{__name__}.TrainError: ")
            raise TrainError(message.strip() if own else f"rank {error.error_index} failed: {message.strip()}") from None
        except ProcessExitedException as error:
            raise TrainError(f"rank {error.error_index} died: {str(error).strip()}") from None
    return int(outcome.value)


def _timeout(options: Options) -> datetime.timedelta:
    return datetime.timedelta(seconds=options.tuning().timeout_s)


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()


def _rank(
    rank: int,
    options: Options,
    run: Path,
    text_digest: str,
    checkpoint: Path | None,
    rendezvous: str,
    stop: Any,
    outcome: Any,
    end: Any,
    parent: int,
) -> None:
    def look() -> bool:
        if os.getppid() != parent:
            os._exit(1)
        return stop.is_set()

    text = read_text(options.text, options.sequence)  # again: as an argument it would hold up the start of the next rank
    if text.digest != text_digest:
        raise TrainError(f"the text changed while the ranks started ({text.source})")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    _join(options, rank, init_method=rendezvous, rank=rank, world_size=options.ranks)
    code = _run(options, run, text, checkpoint, Ranks(dist.group.WORLD), look)
    if rank == 0:
        outcome.value = code
    sys.stdout.flush()
    sys.stderr.flush()
    # No rank closes its sockets while another may still read from them, and none runs the teardown of threads that others talk to.
    end.wait(options.tuning().timeout_s)
    os._exit(0)
