"""Pictures of suites' rows, by matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _bars(axes: Any, names: Sequence[str], series: dict[str, list[float | None]], label: str) -> None:
    width = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        axes.bar([x + i * width for x in range(len(names))], [value or 0.0 for value in values], width, label=name)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(names))], names, rotation=60, ha="right", fontsize=7)
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=8)


def _of_layers(figure: Any, rows: Sequence[Row]) -> None:
    """Forward and backward TFLOP/s, and GiB, a group of bars per shape."""
    panels = figure.subplots(3, 1, squeeze=False)[:, 0]
    for axes, (way, value, label) in zip(
        panels, (("fwd", "tflops", "forward TFLOP/s"), ("bwd", "tflops", "backward TFLOP/s"), ("memory", "gib", "GiB")), strict=True
    ):
        of = [row for row in rows if row["direction"] == way]
        others = list(dict.fromkeys(name for row in of for name in row["baselines"]))
        series = {"mok": [row[value] for row in of]}
        series |= {name: [row["baselines"].get(name, {}).get(value) for row in of] for name in others}
        if way == "fwd":
            series["cuBLAS, dense"] = [row["cublas_tflops"] for row in of]
        _bars(axes, [row["shape"] for row in of], series, label)


def _of_minibatch(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for name in dict.fromkeys(row["shape"] for row in rows):
        of = [row for row in rows if row["shape"] == name]
        (line,) = axes.plot([row["minibatch"] for row in of], [row["ms"] for row in of], marker=".", label=name)
        for mark, shape in (("two_waves", "o"), ("heuristic", "s"), ("knee", "x")):
            marked = [row for row in of if row.get(mark)]
            axes.plot([row["minibatch"] for row in marked], [row["ms"] for row in marked], shape, ms=11, mfc="none", color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows of a minibatch; circle: two waves of tasks, square: the heuristic, cross: the knee")
    axes.set_ylabel("forward, ms")
    axes.legend(frameon=False)


def _of_schedule(figure: Any, rows: Sequence[Row]) -> None:
    panels = figure.subplots(1, 4, sharey=True)
    for axes, vary in zip(panels, "TKER", strict=True):
        of = [row for row in rows if row["vary"] == vary]
        axes.plot([row[vary] for row in of], [row["us"] for row in of], marker=".")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(vary)
    panels[0].set_ylabel("schedule, us")


def _of_scaling(figure: Any, rows: Sequence[Row]) -> None:
    panels = figure.subplots(1, 2)
    for axes, way, label in zip(panels, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        for name in dict.fromkeys(row["shape"] for row in rows):
            of = [row for row in rows if row["direction"] == way and row["shape"] == name]
            axes.plot([row["T"] for row in of], [row["tflops"] for row in of], marker=".", label=f"mok, {name}")
            for other in dict.fromkeys(other for row in of for other in row["baselines"]):
                theirs = [(row["T"], row["baselines"][other]["tflops"]) for row in of if other in row["baselines"]]
                axes.plot(*zip(*theirs, strict=True), marker=".", ls="--", label=f"{other}, {name}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens")
        axes.set_ylabel(f"{label}, TFLOP/s")
        axes.legend(frameon=False)


def _of_overlap(figure: Any, rows: Sequence[Row]) -> None:
    names = [row["shape"] for row in rows]
    series: dict[str, list[float | None]] = {"full": [row["ms"] for row in rows]}
    series |= {label: [row["without"][label] for row in rows] for label in rows[0]["without"]}
    _bars(figure.subplots(), names, series, "ms")


def _of_ep(figure: Any, rows: Sequence[Row]) -> None:
    names = [f"{row['shape']} {row['direction']}" for row in rows]
    series: dict[str, list[float | None]] = {f"mok, EP {rows[0]['ep']}": [row["tflops"] for row in rows]}
    series |= {"mok, one GPU": [row["alone_tflops"] for row in rows]}
    series |= {name: [row["baselines"][name]["tflops"] for row in rows] for name in rows[0]["baselines"]}
    _bars(figure.subplots(), names, series, "TFLOP/s per GPU")


def _of_comm(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for row in rows:
        if isinstance(row.get("gbs"), dict):
            rates = sorted((int(programs), value) for programs, value in row["gbs"].items())
            whose = row.get("routing") or f"{row['share']:.0%} remote"
            axes.plot(*zip(*rates, strict=True), marker=".", label=f"{row['variant']}, {whose}")
    axes.set_xlabel("programs")
    axes.set_ylabel("GB/s")
    axes.legend(frameon=False, fontsize=6, ncols=2)


def _of_curves(figure: Any, rows: Sequence[Row]) -> None:
    """Validation of every format, and its difference from bf16 with the same seed; lines are means over the seeds, bands reach from the
    least to the greatest of them. Gray: how far apart bf16's seeds are, to either side."""
    top, bottom = figure.subplots(2, 1, sharex=True)
    curves = {name: {row["seed"]: row["validation"] for row in rows if row["precision"] == name} for name in (r["precision"] for r in rows)}
    steps, base = rows[0]["steps"], curves.get("bf16", {})

    def band(axes: Any, lines: Sequence[Sequence[float]], label: str) -> None:
        points = list(zip(*lines, strict=True))
        (line,) = axes.plot(steps, [sum(point) / len(point) for point in points], marker=".", label=f"{label}, {len(lines)} seed(s)")
        axes.fill_between(steps, [min(point) for point in points], [max(point) for point in points], color=line.get_color(), alpha=0.2)

    for name, of in curves.items():
        band(top, list(of.values()), name)
        pairs = [[a - b for a, b in zip(of[seed], base[seed], strict=True)] for seed in of if seed in base]
        if pairs:
            band(bottom, pairs, name)
    if len(base) > 1:
        apart = [max(point) - min(point) for point in zip(*base.values(), strict=True)]
        bottom.fill_between(steps, [-value for value in apart], apart, color="gray", alpha=0.2, zorder=0, label="between bf16's seeds")
    top.set_ylabel("validation, bits per byte")
    bottom.set_ylabel("difference from bf16, bits per byte")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.legend(frameon=False)


DRAWN: dict[str, tuple[Callable[[Any, Sequence[Row]], None], tuple[float, float]]] = {
    "layer": (_of_layers, (18, 18)), "minibatch": (_of_minibatch, (9, 6)), "schedule": (_of_schedule, (14, 4)),
    "scaling": (_of_scaling, (12, 5)), "overlap": (_of_overlap, (12, 6)), "ep": (_of_ep, (12, 6)), "comm": (_of_comm, (12, 9)),
    "curves": (_of_curves, (9, 9)),
}  # fmt: skip


def draw(suite: str, rows: Sequence[Row], path: str | Path) -> None:
    """One PNG of a suite's rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    picture, size = DRAWN[suite]
    figure = plt.figure(figsize=size, layout="constrained")
    picture(figure, rows)
    figure.savefig(path, dpi=120)
    plt.close(figure)
