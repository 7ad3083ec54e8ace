"""How the kernels cut their work for a shape: measured once, looked up afterwards. No choice moves a bit.

    python -m mok tune --shapes qwen3-30b,glm-5/8         # measures, and writes the choice to the user's cache
    python -m mok tune --ranks 2 --shapes v4-flash        # over two GPUs: rank 0 decides for all
    python -m mok tune --precision fp8                    # experts in FP8, whose weights are quantized before anything is timed

The search goes field by field (FIELDS): the values of a field and the best plan so far take turns, and another value is taken only if it is
faster by more than MARGIN, about what a plan differs from itself. `invalid` says which values are tried. Every candidate is run once before
it is timed: the default plan must be near the definition, all others must have its bits.

`tuned` answers for a shape, first of:
    1. the user's cache ($XDG_CACHE_HOME/mok/tuned.json), then mok/tuned.json: an entry of the same GPU, H, I, E, K, ranks and precision
       whose T is at most a factor of two away, the nearest one;
    2. the heuristic, on every GPU: minibatches of two waves of tasks, a wave being one task for every multiprocessor, but at least 16 tiles
       and at most 32; all else as the plans have it. With less the programs run out of work while a minibatch's last rows are on their way;
       with more the first minibatch is waited for and the rows of one leave the L2 cache. Why at least 16: on an H200 two waves are 3 to
       19 tiles for eight shapes, and of those below 16 (taken as 8 at least) all were slower than the tuner's choice, by 1.5 to 6 %.

What a file holds beside that, say from another version of this module, is ignored with one warning: an entry that is not understood does
not hide the others.

`mok.MoE` and `mok.functional` look there once per shape and process (`mok.kernels.ops.plans`), with the most tokens of a rank that their
group's memory holds as T; what `Tuning` or `MoKConfig` say about num_sms and the ring holds, and their minibatch is the most that is taken.
Ranks may take different plans, as they may hold different shapes.

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, K choices per token, R ranks.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from mok.config import TILE_M
from mok.quantize import Precision, Recipe
from mok.schedule import experts_per_rank

Changes = dict[str, Any]

FORMAT = 1
MARGIN = 0.02
FORWARD_TILE = 128, 256  # columns of an up task (of gate and of up), of a down task
BACKWARD_TILE = 256
LEAST_TILES, MOST_TILES = 16, 32  # of the heuristic's minibatch
DIRECTIONS = ("forward", "backward")
FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {"minibatch_tiles": (8, 12, 16, 20, 24, 32, 48), "parts": (2, 4, 8), "half_tiles": (True, False)},
    "backward": {"group_tiles": (0, "two waves", "eight waves"), "run": (0, 1, 2, 4), "parts": (2, 4, 8)},
}
DEFAULTS: dict[str, Changes] = {
    "forward": {"minibatch_tiles": 16, "parts": 4, "half_tiles": True},
    "backward": {"group_tiles": 0, "run": 0, "parts": 4},
}
SMALLEST = min(FIELDS["forward"]["minibatch_tiles"])
SHIPPED = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True)
class Key:
    """What a choice is for. gpu: the device's name, "cpu" for the executor."""

    gpu: str
    T: int
    H: int
    I: int  # noqa: E741
    E: int
    K: int
    ep: int = 1
    precision: Precision = "bf16"

    @property
    def local_experts(self) -> int:
        return experts_per_rank(self.E, self.ep)

    @property
    def most_tiles(self) -> int:
        """Tiles of a rank under a balanced load."""
        return self.T * self.K // TILE_M + self.local_experts


@dataclass(frozen=True)
class Choice:
    """Fields of ForwardPlan and BackwardPlan, and where they come from: "tuned", "shipped" or "heuristic"."""

    forward: Changes
    backward: Changes
    source: str


# ---- looking up ----


def tasks_of_tile(hidden: int, width: int) -> int:
    """Up and down tasks of the forward."""
    return -(-width // FORWARD_TILE[0]) + -(-hidden // FORWARD_TILE[1])


def two_waves(hidden: int, width: int, num_sms: int) -> int:
    """Tiles whose tasks are two for every multiprocessor.

    Example, H = 2048, I = 768, 132 multiprocessors: 6 up and 8 down tasks per tile, so 264 tasks are 19 tiles.
    """
    return -(-2 * num_sms // tasks_of_tile(hidden, width))


def heuristic(hidden: int, width: int, num_sms: int) -> int:
    """Tiles per minibatch of a shape that was not measured: two waves, within LEAST_TILES .. MOST_TILES."""
    return min(max(two_waves(hidden, width, num_sms), LEAST_TILES), MOST_TILES)


def cache_file() -> Path:
    """The user's choices: mok/tuned.json in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mok" / "tuned.json"


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _fits(field: str, value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a plan takes this value. Tiles may be any number; of the rest only what the tuner tries, and was seen to move no bit."""
    if field == "minibatch_tiles":
        return _is_count(value)
    if field == "group_tiles":
        return _is_count(value, 0)
    return type(value) is type(values[0]) and value in values


def misunderstood(entry: Any) -> str:
    """Why an entry of a file cannot be used; "" if it can."""
    if not isinstance(entry, dict):
        return f"{entry!r:.80} is no entry"
    for name in ("key", *DIRECTIONS):
        if not isinstance(entry.get(name), dict):
            return f"{name} is missing"
    key, names = entry["key"], Key.__dataclass_fields__
    if set(key) != set(names):
        return f"key has {', '.join(map(str, key)) or 'nothing'} in place of {', '.join(names)}"
    good = {"gpu": isinstance(key["gpu"], str), "precision": key["precision"] in get_args(Precision)}
    for name, value in key.items():
        if not good.get(name, _is_count(value)):
            return f"key {name}={value!r}"
    for direction in DIRECTIONS:
        for field, value in entry[direction].items():
            values = FIELDS[direction].get(field)
            if values is None or not _fits(field, value, values):
                return f"{direction} {field}={value!r}"
    return ""


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def read(path: Path) -> list[dict[str, Any]]:
    """The file's entries that this version understands; what it does not, or a file that it cannot read, is named in a warning, once."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("entries"), list):
            raise ValueError(f"not of format {FORMAT}")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        _warn_once(f"{path} is not used ({type(error).__name__}: {error}); mok tune writes it anew")
        return []
    problems = [misunderstood(entry) for entry in found["entries"]]
    if any(problems):
        first = next(filter(None, problems))
        count = f"{sum(map(bool, problems))} of {len(problems)}"
        _warn_once(f"{path}: entries that are not understood are not used, {count} (the first: {first}); mok tune writes it without them")
    return [entry for entry, problem in zip(found["entries"], problems, strict=True) if not problem]


def find(entries: Sequence[dict[str, Any]], key: Key) -> dict[str, Any] | None:
    """The entry that fits, with the nearest T, at most a factor of two away."""
    wanted = vars(key)
    fitting = []
    for entry in entries:
        of = entry["key"]
        ratio = max(of["T"], key.T) / max(min(of["T"], key.T), 1)
        if ratio <= 2 and all(of[name] == value for name, value in wanted.items() if name != "T"):
            fitting.append((ratio, entry))
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else None


def tuned(key: Key, num_sms: int) -> Choice:
    """How to cut the work of this shape on this GPU of `num_sms` multiprocessors. Reads at most two small files; never measures."""
    try:
        own = [cache_file()]
    except RuntimeError:  # no home
        own = []
    for path in (*own, SHIPPED):
        if entry := find(read(path), key):
            return Choice(entry["forward"], entry["backward"], "shipped" if path == SHIPPED else "tuned")
    return Choice({"minibatch_tiles": heuristic(key.H, key.I, num_sms)}, {}, "heuristic")


def store(path: Path, key: Key, choice: dict[str, Any]) -> None:
    """Put a choice into the file in place of an older one for the same key; readers see the old file or the new one, never a part."""
    others = [entry for entry in read(path) if entry["key"] != vars(key)]
    entries = sorted([*others, {"key": vars(key), **choice}], key=lambda entry: json.dumps(entry["key"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        written.write_text(json.dumps(dict(format=FORMAT, entries=entries), indent=1) + "\n")
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


# ---- candidates ----


def automatic_run(rows: int, local_experts: int) -> int:
    """What BackwardPlan makes of run 0, for so many rows of all of a rank's experts."""
    return 4 if rows / local_experts <= 1024 else 1


def _loads_run_on(key: Key) -> bool:
    """Whether this machine's backward is the one of `backward_hopper.py`."""
    if key.precision != "bf16" or not torch.cuda.is_available():
        return False
    from mok.kernels.launch_backward import BackwardPlan, runs_ahead

    return runs_ahead(BackwardPlan(), torch.device("cuda"), (key.H, key.I), False)


def _gathers(key: Key) -> bool:
    """Whether this machine's forward is the one that pulls nothing."""
    if key.ep > 1 or key.precision != "bf16" or not torch.cuda.is_available():
        return False
    from mok.kernels.launch import ForwardPlan, runs_ahead

    return runs_ahead(ForwardPlan(), torch.device("cuda"), (key.H, key.I), False)


def waves(name: str, key: Key, num_sms: int) -> int:
    """Tiles of a group of so many waves of tasks in the backward's shortest phase."""
    per_tile = min(-(-key.I // BACKWARD_TILE), -(-key.H // BACKWARD_TILE))
    return max(1, -(-{"two waves": 2, "eight waves": 8}[name] * num_sms // per_tile))


def invalid(direction: str, field: str, value: Any, key: Key, num_sms: int) -> str:
    """Why a value is not tried for this shape; "" if it is. num_sms 0: the CPU's executor."""
    if num_sms == 0 and field != "minibatch_tiles":
        return f"the executor has no {field}"
    if field == "minibatch_tiles" and value > max(key.most_tiles, SMALLEST):
        return f"a minibatch of {value} tiles is more than all {key.most_tiles}"
    if (direction, field) == ("forward", "parts") and value != DEFAULTS[direction][field] and num_sms and _gathers(key):
        return "the forward whose up tasks gather pulls nothing"
    if field == "group_tiles" and value >= key.most_tiles:
        return f"a group of {value} tiles is all {key.most_tiles}, as without a limit"
    if field == "run" and value and num_sms and _loads_run_on(key):
        return "the backward whose loads run on over tasks makes one tile at a time"
    if field == "run" and value == automatic_run(key.T * key.K, key.local_experts):
        return f"a run of {value} tiles is what 0 means here"
    if field == "run" and value * BACKWARD_TILE > key.H:
        return f"a run of {value} tiles is wider than H={key.H}"
    if field == "half_tiles" and value is False and key.T * key.K >= key.E * 64 * TILE_M:
        return "half tiles are a hundredth of all at most"
    return ""


def values_of(direction: str, field: str, key: Key, num_sms: int) -> list[Any]:
    """The values of a field that are tried."""
    values = FIELDS[direction][field]
    if field == "group_tiles" and num_sms:
        values = tuple(waves(value, key, num_sms) if isinstance(value, str) else value for value in values)
    return [value for value in dict.fromkeys(values) if not (isinstance(value, str) or invalid(direction, field, value, key, num_sms))]


def search(
    direction: str, key: Key, num_sms: int, check: Callable[[Changes], str], time: Callable[[dict[str, Changes]], dict[str, float]],
    say: Callable[[str], None],
) -> tuple[Changes, list[float]]:  # fmt: skip
    """The best plan found, and [milliseconds of the default plan, of the best], measured in turns with each other.

    check: "" if a plan may be chosen, else why not. time: milliseconds of plans by label.
    """
    default = {field: value for field, value in DEFAULTS[direction].items() if values_of(direction, field, key, num_sms)}
    if problem := check(default):
        raise ValueError(f"{direction} of {key}: {problem}")
    best = default
    for field in default:
        contestants = {"best so far": best}
        for value in values_of(direction, field, key, num_sms):
            candidate = {**best, field: value}
            if candidate == best:
                continue
            if problem := check(candidate):
                say(f"{direction} {field}={value}: {problem}")
            else:
                contestants[f"{field}={value}"] = candidate
        if len(contestants) == 1:
            continue
        ms = time(contestants)
        fastest = min(ms, key=lambda label: ms[label])
        say(f"{direction} " + ", ".join(f"{label} {value:.4f} ms" for label, value in ms.items()))
        if ms[fastest] < ms["best so far"] * (1 - MARGIN):
            best = contestants[fastest]
    ms = time({"default": default, "best": best}) if best != default else {"default": 0.0, "best": 0.0}
    if best != default and ms["best"] > ms["default"] * (1 - MARGIN):
        best = default  # what single fields seemed to bring
    return best, [round(ms["default"], 4), round(ms["best"], 4)]


# ---- measuring ----


class Measured:
    """A shape on this rank: checks and times plans of its layer. All ranks make the same calls."""

    def __init__(self, key: Key, device: torch.device, repeats: int) -> None:
        from mok.bench.layers import Turns, layer_class, make_batch, make_experts
        from mok.bench.shapes import Shape
        from mok.schedule import local_experts

        several = key.ep > 1
        rank, group = (dist.get_rank(), dist.group.WORLD) if several else (0, None)
        shape = Shape(key.T, key.H, key.I, key.E, key.K)
        self.all_experts = make_experts(shape, device)
        mine = local_experts(key.E, key.ep, rank)
        gate, up, down = (weight[mine.start : mine.stop] for weight in self.all_experts)
        self.several, self.device, self.repeats, self.turns, self.recipe = several, device, repeats, Turns(2), Recipe(key.precision)
        self.inputs = [make_batch(shape, rank, turn, device) for turn in range(2)]
        saved = 1.25 if several else 1.0
        self.layer = layer_class(device)(key.T, key.E, key.K, (gate, up, down), group, saved, precision=key.precision)
        self.first: dict[str, list[torch.Tensor]] = {}

    @functools.cached_property
    def kept(self) -> list[Any]:
        """What the backward of each batch needs."""
        return [self.layer.forward(batch, True)[1] for batch in self.inputs]

    def _call(self, direction: str, turn: int, changes: Changes) -> list[torch.Tensor]:
        batch = self.inputs[turn]
        if direction == "forward":
            return [self.layer.forward(batch, changes=changes)[0]]
        return self.layer.backward(batch, self.kept[turn], changes)

    def _problem(self, direction: str, changes: Changes) -> str:
        from mok.bench import checks
        from mok.bench.layers import NAMES

        self.layer.poison()
        got = self._call(direction, 0, changes)
        self.layer.finish()
        if direction in self.first:
            difference = checks.first_difference(got, self.first[direction], NAMES if direction == "backward" else ("out",))
            return f"not the bits of the default plan: {difference}" if difference else ""
        self.first[direction] = [tensor.clone() for tensor in got]
        batch = self.inputs[0]
        if direction == "forward":
            error = checks.forward_error(got[0], *batch[:3], self.all_experts, recipe=self.recipe)
        else:
            error = checks.token_gradient_error(got[0], got[1], *batch, self.all_experts, recipe=self.recipe)
        return "" if error < (3 if self.recipe.quantized else 1) * checks.LIMIT else f"relative error {error:.1e} against the definition"

    def check(self, direction: str, changes: Changes) -> str:
        """ "" if a plan computes the layer, on every rank, else what is wrong."""
        from mok.bench import ranks

        try:
            problem = self._problem(direction, changes)
        except Exception as error:  # one that does not compile, for instance
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return ranks.first_problem(problem) if self.several else problem

    def time(self, direction: str, plans: dict[str, Changes]) -> dict[str, float]:
        """Milliseconds of the slowest rank."""
        from mok.bench import ranks
        from mok.bench.timing import medians

        runs = {label: self.turns.of(self._call_of(direction, changes), range(2)) for label, changes in plans.items()}
        ms = medians(runs, self.repeats, warmup=2, round_of=5, align=dist.barrier if self.several else None)
        self.layer.finish()
        return ranks.slowest(ms, self.device) if self.several else ms

    def _call_of(self, direction: str, changes: Changes) -> Callable[[int], object]:
        return lambda turn: self._call(direction, turn, changes)


def tune(key: Key, device: torch.device, num_sms: int, repeats: int, directions: Sequence[str], say: Callable[[str], None]) -> Changes:
    """The entry of this key: plans, milliseconds of [default, chosen], and when and on what. Collective: rank 0 decides."""
    measured = Measured(key, device, repeats)

    def decided(direction: str) -> tuple[Changes, list[float]]:
        def time(plans: dict[str, Changes]) -> dict[str, float]:
            ms: list[Any] = [measured.time(direction, plans)]
            if key.ep > 1:
                dist.broadcast_object_list(ms, 0)
            return ms[0]

        return search(direction, key, num_sms, lambda changes: measured.check(direction, changes), time, say)

    entry: dict[str, Any] = {direction: {} for direction in DIRECTIONS} | {"ms": {}}
    for direction in directions:
        if any(values_of(direction, field, key, num_sms) for field in FIELDS[direction]):
            entry[direction], entry["ms"][direction] = decided(direction)
    from mok.bench import report

    about = dict(torch=torch.__version__, triton=report.version("triton"), date=datetime.date.today().isoformat())
    return {**entry, **about}


def main(arguments: Sequence[str] | None = None) -> int:
    from mok.bench import ranks, report
    from mok.bench.layers import default_device
    from mok.bench.limit import Limit
    from mok.bench.shapes import ONE_GPU, SEVERAL_GPUS, TINY, choose

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="mok tune", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    names = ", ".join({**ONE_GPU, **SEVERAL_GPUS, **TINY} if cuda else TINY)
    all_of_them = "all for this number of GPUs" if cuda else "tiny"
    parser.add_argument(
        "--shapes", default="", help=f"some of {names}, PRESET/RANKS, or TxHxIxExK, with commas between them. Default: {all_of_them}"
    )
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16", help="of the experts' products. Default: bf16")
    parser.add_argument("--directions", default=",".join(DIRECTIONS), help="what is tuned, forward or backward. Default: %(default)s")
    parser.add_argument("--ranks", type=report.count, default=1, help="processes, one GPU each; a launcher's number wins. Default: 1")
    parser.add_argument("--repeats", type=report.count, default=20, help="timed calls of each candidate. Default: 20")
    parser.add_argument("--out", type=Path, default=None, help="the file to write. Default: mok/tuned.json in $XDG_CACHE_HOME or ~/.cache")
    parser.add_argument("--json", action="store_true", help="print the entries as JSON instead of a table")
    parser.add_argument(
        "--limit", type=report.seconds, default=3000.0, help="seconds after which it ends; shapes tuned by then are kept. Default: 3000"
    )
    options = parser.parse_args(arguments)
    known = TINY if not cuda else SEVERAL_GPUS if options.ranks > 1 else ONE_GPU
    directions = options.directions.split(",")
    try:
        shapes = choose(options.shapes or ",".join(known), {**known, **TINY})
    except ValueError as error:
        parser.error(str(error))
    for direction in directions:
        if direction not in DIRECTIONS:
            parser.error(f"--directions={direction}: must be some of {','.join(DIRECTIONS)}")
    if cuda and torch.cuda.device_count() < options.ranks:
        parser.error(f"--ranks={options.ranks}: there are {torch.cuda.device_count()} GPUs")
    path = options.out or cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out={path}: cannot be written ({error.strerror})")
    report.refuse_unwritable(parser, out=path)
    if options.ranks > 1 and not ranks.launched():
        return ranks.launch("mok.tune", arguments, options.ranks, options.limit)
    rank, size, device = ranks.join(options.limit) if ranks.launched() else (0, 1, default_device())
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    say = (lambda line: print(line, file=sys.stderr, flush=True)) if rank == 0 else (lambda line: None)
    entries: list[dict[str, Any]] = []
    limit = Limit(math.inf if ranks.launched() else options.limit)  # ranks are ended from outside

    def show() -> None:
        if options.json:
            print(json.dumps(entries, indent=1))
        elif entries:
            headline = f"{report.headline()}, {size} ranks, {options.precision}; written to {path}"
            report.print_table(headline, [_line(entry) for entry in entries])
        sys.stdout.flush()
        for name, why in limit.missing().items():
            say(f"not tuned: {name}: {why}")

    with limit.held(show):
        for name, shape in limit.each(shapes):
            key = Key(report.machine(), *shape, ep=size, precision=options.precision)
            say(f"{name}: {shape}, {options.precision}")
            entry = tune(key, device, num_sms, options.repeats, directions, say)
            if rank == 0:
                store(path, key, entry)
            entries.append({"key": vars(key), **entry})
    if rank == 0:
        show()
    if ranks.launched():
        os._exit(0)  # whatever a library still holds open must not keep a rank alive
    return int(bool(limit.left_out))


def _line(entry: dict[str, Any]) -> dict[str, Any]:
    key = entry["key"]
    row: dict[str, Any] = {"shape": " ".join(f"{letter}{key[letter]}" for letter in "THIEK")}
    for direction in DIRECTIONS:
        default, best = entry["ms"].get(direction, (0.0, 0.0))
        row[direction] = ", ".join(f"{field} {value}" for field, value in entry[direction].items()) or "not tuned"
        row["gain" + " " * len(row)] = f"{default / best - 1:.1%}" if best else "0.0%"
    return row


if __name__ == "__main__":
    sys.exit(main())
