"""`mok bench`: a suite's rows as a table, as JSON, as a picture.

    layer      forward, backward and memory of whole layers: every shape of one GPU, and what a rank of 8 and of 64 has of every preset
    minibatch  time against the rows of a minibatch; marks two waves of tasks, what the heuristic takes, and where the curve becomes flat
    schedule   time of the schedule against T, K, E, R, the other ranks of R being simulated on this device
    scaling    forward and backward against T, from 256 to 131072
    overlap    the forward with dispatch, experts or combine left out, on one GPU or several
    ep         whole layers over several GPUs
    comm       rows and signals between two GPUs, or within one

The first four run in this process; the others start one per rank. A suite that comes to its limit ends there, and says what it left out;
the exit code is then 1, of several ranks 124. Without a GPU they run on the CPU's executor, on tiny shapes.

Further options of ep:
    --directions fwd,bwd    some of these                            --saved 1.25    rows whose gate and up are saved, times a balanced load
    --plans JSON            plans to be timed besides, by label      --padding 1.25  capacity of the padded baseline, times a balanced load
Further options of comm:
    --parts pull,push,...   some of pull, push, latency, skew        --variants RE   only those whose names contain this
    --programs 4,8,...      numbers of programs, on GPUs             --rows, --hidden   of a rank, and of a row; multiples of 128 and 1024

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, K choices per token, R ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from mok import tune
from mok.bench import plot, ranks, report
from mok.bench.baselines import TorchLayer
from mok.bench.layer import OneDevice, Row, measure
from mok.bench.layers import default_device
from mok.bench.limit import Limit
from mok.bench.report import figure
from mok.bench.shapes import ONE_GPU, SEVERAL_GPUS, SLICE_RANKS, TINY, Shape, choose, slices
from mok.bench.timing import medians
from mok.bench.warm import warm
from mok.config import PRESETS, TILE_M
from mok.quantize import Precision
from mok.schedule import Schedule, build_schedule, local_experts, sort_routes

IN_PROCESS = ("layer", "minibatch", "schedule", "scaling")
OF_RANKS = ("overlap", "ep", "comm")
LIMIT_S = 170.0
FLAT = 0.03  # what sizes beyond the knee differ by at most
MINIBATCHES = (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64)
TOKENS = tuple(2**n for n in range(8, 18))
SIMULATED = dict(T=TOKENS, K=(1, 2, 4, 6, 8, 10), E=(8, 32, 64, 128, 256, 512), R=(1, 2, 4, 8, 16, 32, 64))
POINT = dict(T=8192, K=8, E=128, R=8)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- layer ----


def every_shape() -> dict[str, Shape]:
    return {**ONE_GPU, **{name: shape for ranks in SLICE_RANKS for name, shape in slices(ranks).items()}}


def layer_rows(
    shapes: dict[str, Shape], repeats: int, limit: Limit, missing: dict[str, str], precision: Precision = "bf16"
) -> Iterator[Row]:  # fmt: skip
    points = limit.each(shapes)
    warm(shapes.values(), 0.5 * limit.seconds, precision=precision)
    for name, shape in points:
        try:
            found, lines, why = measure(name, shape, default_device(), repeats, precision=precision)
        except Exception as error:  # no speed of what is wrong
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            _say(f"{name}: {missing[name]}")
            continue
        finally:
            _free()
        yield from found
        missing |= why
        for line in lines:
            _say(line)


# ---- minibatch ----


def knee(ms: dict[int, float]) -> int:
    """The minibatch from which on a larger one is not faster. ms: milliseconds by tiles.

    Walk down from the fastest size as long as sizes are within FLAT of it; one slower size between two that are within is passed over as
    noise, two in a row are not. Sizes above the fastest are not looked at: what they lose is the ring's, which then holds few minibatches,
    and the first one's, which is waited for.

    Example, 8: 1.20, 12: 1.02, 16: 1.05, 20: 1.00, 32: 1.10 -> 12; with 12: 1.04 -> 20.
    """
    sizes = sorted(ms)
    fastest = min(sizes, key=lambda size: ms[size])
    found, slower = fastest, 0
    for size in reversed(sizes[: sizes.index(fastest)]):
        if ms[size] <= ms[fastest] * (1 + FLAT):
            found, slower = size, 0
        elif slower:
            break
        else:
            slower = 1
    return found


def minibatch_of(ms: dict[int, float], two_waves: int, chosen: int) -> tuple[int, dict[str, int | None], str]:
    """The knee, how many sizes it is above two waves (None without multiprocessors: two_waves 0) and above what the heuristic takes, and
    both in words."""
    found, sizes = knee(ms), sorted(ms)

    def where(steps: int) -> str:
        return "within one step of" if abs(steps) <= 1 else f"{abs(steps)} steps {'above' if steps > 0 else 'below'}"

    of_chosen = sizes.index(found) - sizes.index(chosen)
    heuristic = f"{where(of_chosen)} the heuristic's {chosen}, {ms[chosen] / min(ms.values()) - 1:.1%} slower than the fastest"
    if not two_waves:
        words = f"the knee, at {found} tiles, is {heuristic}; without multiprocessors there are no waves"
        return found, dict(knee_steps=None, heuristic_steps=of_chosen), words
    steps = sizes.index(found) - sizes.index(two_waves)
    words = f"the knee, at {found} tiles, is {where(steps)} two waves, which are {two_waves} tiles, and {heuristic}"
    return found, dict(knee_steps=steps, heuristic_steps=of_chosen), words


def minibatch_rows(shapes: dict[str, Shape], repeats: int, limit: Limit, missing: dict[str, str]) -> Iterator[Row]:
    """Every size has the default's bits before it is timed. `two_waves` marks these exactly, `heuristic` what a layer takes that was not
    tuned, `knee` where the curve becomes flat; `knee_steps` and `heuristic_steps` are the numbers of sizes from these two to it."""
    device = default_device()
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    for name, shape in limit.each(shapes):
        problem = OneDevice(shape, device)
        exact, chosen = tune.two_waves(shape.H, shape.I, sms), tune.heuristic(shape.H, shape.I, sms)
        tiles = shape.T * shape.K // TILE_M + shape.E
        sizes = sorted({*(size for size in MINIBATCHES if size < 2 * tiles), chosen, exact} - {0})
        plans = {str(size): dict(minibatch_tiles=size) for size in sizes}
        problem.check_forward(plans)
        runs = {label: problem.turns.of(problem.layer.forward, problem.inputs, changes=changes) for label, changes in plans.items()}
        with torch.no_grad():
            took = medians(runs, repeats, warmup=3)
        ms = {size: took[str(size)] for size in sizes}
        at, steps, words = minibatch_of(ms, exact, chosen)
        for size in sizes:
            waves = round(size * tune.tasks_of_tile(shape.H, shape.I) / sms, 2) if sms else None
            yield dict(
                suite="minibatch", shape=name, **shape._asdict(), ep=1, precision="bf16", direction="fwd", minibatch_tiles=size,
                minibatch=size * TILE_M, waves=waves,
                **report.speed(shape.gflop("fwd"), ms[size]), two_waves=size == exact,
                heuristic=size == chosen, knee=size == at, **steps,
            )  # fmt: skip
        _say(f"{name}: " + ", ".join(f"{size} tiles {ms[size]:.3f} ms" for size in sizes))
        _say(f"{name}: {words}")
        del problem, runs
        _free()


# ---- schedule ----


def _ids(tokens: int, top_k: int, experts: int, rank: int, device: torch.device) -> Tensor:
    g = torch.Generator(device).manual_seed(rank)
    if top_k <= experts:
        return torch.rand(tokens, experts, generator=g, device=device).topk(top_k)[1]
    return torch.randint(experts, (tokens, top_k), generator=g, device=device)


def on_cpu(tokens: int, top_k: int, experts: int, ranks: int) -> tuple[Callable[[], object], int]:
    """Rank 0's schedule, the other ranks' routes being there -> (the call, its rows)."""
    ids = [_ids(tokens, top_k, experts, rank, torch.device("cpu")) for rank in range(min(ranks, 4))]
    routes = [sort_routes(ids[rank % len(ids)], experts) for rank in range(ranks)]
    counts = torch.stack([of.counts for of in routes])

    orders, local = [of.order for of in routes[1:]], local_experts(experts, ranks, 0)

    def run() -> Schedule:
        return build_schedule(counts, [sort_routes(ids[0], experts).order, *orders], local)

    return run, int(run().num_tokens)


def on_gpu(tokens: int, top_k: int, experts: int, ranks: int, device: torch.device) -> tuple[Callable[[], object], int]:
    """The same by the kernels: all ranks' memory is in this process, and only rank 0's kernels are called. No barrier is in the time."""
    from mok.kernels import memory, schedule

    views = memory.virtual_memory(memory.regions(tokens, 8, experts, top_k, ranks), ranks, device)
    ids = [_ids(tokens, top_k, experts, rank, device) for rank in range(min(ranks, 4))]
    for rank, view in enumerate(views):
        schedule.sort_slots(view, ids[rank % len(ids)], experts)
    local = len(local_experts(experts, ranks, 0))
    rows = schedule.empty_schedule(schedule.max_tiles(tokens, top_k, ranks, local), local, device)
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2

    def run() -> None:
        schedule.sort_slots(views[0], ids[0], experts)
        schedule.write_rows(views[0], rows, experts, programs)

    run()
    return run, int(rows.num_tokens)


def schedule_points(device: torch.device) -> Iterator[tuple[str, dict[str, int]]]:
    """Around one point, each of T, K, E, R alone; on the CPU fewer and smaller."""
    for vary, values in SIMULATED.items():
        for value in values:
            point = {**POINT, vary: value}
            if device.type == "cuda":
                yield vary, point
            elif value in (values[0], values[2]) or (vary != "T" and value == values[-1]):
                yield vary, {**point, "T": min(point["T"], 1024)}


def schedule_rows(shapes: dict[str, Shape], repeats: int, limit: Limit, missing: dict[str, str]) -> Iterator[Row]:
    device = default_device()
    points = {f"{vary}={point[vary]}": (vary, point) for vary, point in schedule_points(device)}
    for label, (vary, point) in limit.each(points):
        tokens, top_k, experts, ranks = (point[name] for name in "TKER")
        on_cuda = device.type == "cuda"
        run, count = on_gpu(tokens, top_k, experts, ranks, device) if on_cuda else on_cpu(tokens, top_k, experts, ranks)
        us = 1e3 * medians({label: run}, repeats, warmup=2)[label]
        yield dict(suite="schedule", vary=vary, **point, rows=count, us=round(us, 2))
        _say(f"{label}: {us:.1f} us for {count} rows")


# ---- scaling ----


def scaling_rows(shapes: dict[str, Shape], repeats: int, limit: Limit, missing: dict[str, str]) -> Iterator[Row]:
    device = default_device()
    tokens = TOKENS if device.type == "cuda" else (32, 256)
    named = {f"{name}, T={count}": (name, shape._replace(T=count)) for name, shape in shapes.items() for count in tokens}
    points = limit.each(named)
    warm([shape for _, shape in named.values()], 0.4 * limit.seconds)
    for label, (name, shape) in points:
        try:
            found, lines, why = measure(name, shape, device, repeats)
        except Exception as error:
            missing[label] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        finally:
            _free()
        yield from ({**row, "suite": "scaling"} for row in found)
        missing |= why
        for line in lines:
            _say(line)


# ---- tables ----


def _best(row: Row) -> str:
    return max(row["baselines"], key=lambda name: row["baselines"][name]["tflops"] or 0.0)


def _of_best(row: Row) -> str:
    return f"{figure(row['baselines'][_best(row)]['tflops'])} {_best(row)}"


def _known(value: float | None) -> float | str:
    return "-" if value is None else value


def layer_table(rows: Sequence[Row]) -> list[Row]:
    """A line per shape and T."""
    lines: dict[tuple[str, int], Row] = {}
    for row in rows:
        line = lines.setdefault((row["shape"], row["T"]), {"shape": row["shape"], **{letter: row[letter] for letter in "THIEK"}})
        way = row["direction"]
        if way == "memory":
            line |= {"GiB": row["gib"], "at most": row["limit_gib"], "torch's": row["baselines"][TorchLayer.name]["gib"]}
        else:
            line |= {f"{way} ms": _known(row["ms"]), f"{way} TFLOP/s": _known(row["tflops"]), f"{way} best other": _of_best(row)}
            line |= {f"{way} ratio": _known(row["ratio"])}
    return list(lines.values())


def overlap_table(rows: Sequence[Row]) -> list[Row]:
    return [
        {"shape": row["shape"], "EP": row["ep"], "full ms": row["ms"], **row["without"], "exposed": row["exposed_ms"],
         "hidden": row["hidden_ms"]} for row in rows
    ]  # fmt: skip


def ep_table(rows: Sequence[Row]) -> list[Row]:
    return [
        {"shape": row["shape"], "EP": row["ep"], "": row["direction"], "ms": _known(row["ms"]), "TFLOP/s per GPU": _known(row["tflops"]),
         "one GPU": _known(row["alone_tflops"]), "best other": _of_best(row), "ratio": _known(row["ratio"])}
        for row in rows
    ]  # fmt: skip


def comm_table(rows: Sequence[Row]) -> list[Row]:
    """GB/s by number of programs, or microseconds."""
    lines = []
    for row in rows:
        gbs = row.get("gbs", {})
        rates = gbs if isinstance(gbs, dict) else {"": gbs}
        programs = max(rates, key=lambda count: rates[count]) if rates else ""
        best = {"best GB/s": rates.get(programs), "programs": programs, "us": row.get("us")}
        remote = row.get("share", float(row.get("ep") != 1))
        lines.append({"": ", ".join(filter(None, (row["variant"], row.get("routing")))), "remote": remote, **best})
    return lines


def _plain(*names: str) -> Callable[[Sequence[Row]], list[Row]]:
    return lambda rows: [{name: row.get(name, "") for name in names} for row in rows]  # an older file may lack some


TABLES: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "layer": layer_table, "scaling": layer_table, "overlap": overlap_table, "ep": ep_table, "comm": comm_table,
    "minibatch": _plain("shape", "minibatch_tiles", "minibatch", "waves", "ms", "tflops", "two_waves", "heuristic", "knee"),
    "schedule": _plain("vary", "T", "K", "E", "R", "rows", "us"),
}  # fmt: skip
REPEATS = dict(minibatch=60)  # sizes differ by less than a card's drift within a few rounds
ROWS = dict(layer=layer_rows, minibatch=minibatch_rows, schedule=schedule_rows, scaling=scaling_rows)
SHAPES = f"""Shapes of one GPU: {", ".join(ONE_GPU)}
Shapes of several: {", ".join(SEVERAL_GPUS)}
Shapes that a CPU has, too: {", ".join(TINY)}; PRESET/RANKS, one rank's part of a preset; sizes TxHxIxExK
{textwrap.fill("Presets: " + ", ".join(PRESETS), 140, break_on_hyphens=False)}
"""
DEFAULT_SHAPES = dict(minibatch="qwen3-30b,kimi-k2-slice", scaling="qwen3-30b", schedule="qwen3-30b")


# ---- the command ----


def _of_ranks(options: argparse.Namespace, more: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run a suite that starts its own processes -> (exit code, what it wrote). Its lines go to stderr."""
    with tempfile.TemporaryDirectory(prefix="mok-") as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"mok.bench.{options.suite}", "--out", str(out), *more]
        for name in ("ranks", "shapes", "repeats", "limit", "precision"):
            value = getattr(options, name)
            if value is not None and not (options.suite == "comm" and name in ("shapes", "repeats")):
                command += [f"--{name}", str(value)]
        if options.commit:
            command += ["--commit", options.commit]
        code = ranks.run_to_end(command, stdout=2)
        return code, json.loads(out.read_text()) if out.exists() else report.document([])


def _in_process(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run a suite in this process, and show what it makes until its limit."""
    if options.ranks not in (None, 1):
        parser.error(f"--ranks={options.ranks}: the suite {options.suite} runs on one device; overlap, ep and comm take ranks")
    known = every_shape() if torch.cuda.is_available() else TINY
    default = DEFAULT_SHAPES.get(options.suite, ",".join(known)) if known is not TINY else ",".join(TINY)
    try:
        shapes = choose(options.shapes or default, {**known, **TINY})
    except ValueError as error:
        parser.error(str(error))
    limit = Limit(options.limit or LIMIT_S)
    rows: list[Row] = []
    missing: dict[str, str] = {}

    def show() -> int:
        return _show(options, report.document(rows, options.commit, {**missing, **limit.missing()})) or int(bool(limit.left_out))

    _say(report.headline())
    of_suite: dict[str, Any] = {"precision": options.precision or "bf16"} if options.suite == "layer" else {}
    with limit.held(show):
        repeats = options.repeats or REPEATS.get(options.suite, 20)
        for row in ROWS[options.suite](shapes, repeats, limit, missing, **of_suite):
            rows.append(row)
    return show()


def _show(options: argparse.Namespace, document: dict[str, Any], code: int = 0) -> int:
    """Write, print and draw what a suite made -> the exit code. code: the suite's own."""
    rows = document["rows"]
    if code and not rows:
        return code  # it has said why; what --out holds stays
    if options.out:
        Path(options.out).write_text(json.dumps(document, indent=1) + "\n")
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        if rows:
            report.print_table(f"{options.suite}: {report.headline()}", TABLES[options.suite](rows))
        for name, why in document.get("missing", {}).items():
            print(f"not measured: {name}: {why}")
    sys.stdout.flush()
    if options.plot and rows:
        plot.draw(options.suite, rows, options.plot)
    return code or int(not rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mok bench", description=f"{__doc__}\n{SHAPES}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("suite", choices=(*IN_PROCESS, *OF_RANKS))
    parser.add_argument("--shapes", help="some of those above, with commas between them. Default: a suite's own, without a GPU tiny")
    parser.add_argument("--repeats", type=report.count, help="timed calls of each contestant. Default: 20 to 60")
    parser.add_argument("--ranks", type=report.count, help="of overlap, ep and comm: processes, one GPU each. Default: 1, 2, and 2 or 1")
    parser.add_argument("--precision", choices=get_args(Precision), help="of layer and ep: of the experts' products. Default: bf16")
    parser.add_argument("--limit", type=report.seconds, help=f"seconds after which it ends. Default: {LIMIT_S:g}, 570 of ep and comm")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object instead of a table")
    parser.add_argument("--plot", metavar="PNG", help="the picture to write; needs matplotlib")
    parser.add_argument("--out", metavar="JSON", help="write the rows to a file, too")
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    options, more = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if options.precision and options.suite not in ("layer", "ep"):
        parser.error(f"--precision={options.precision}: of the suites layer and ep; {options.suite} is in bf16")
    if more and options.suite in IN_PROCESS:
        parser.error(f"{more[0]}: the suite {options.suite} has no such option")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error(f"--plot={options.plot}: needs matplotlib, which is not installed")
    report.refuse_unwritable(parser, out=options.out, plot=options.plot)
    if options.suite in IN_PROCESS:
        return _in_process(parser, options)
    code, document = _of_ranks(options, more)
    return _show(options, document, code)


if __name__ == "__main__":
    sys.exit(main())
