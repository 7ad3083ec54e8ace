"""The command `mok`."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mok import train as job

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
RUNS = Path("runs")


@app.callback()
def _mok() -> None:
    """Mixture-of-Kittens: a bitwise deterministic Mixture-of-Experts layer."""


@app.command()
def train(
    context: typer.Context,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 350,
    batch: Annotated[int, typer.Option(help="Sequences of the global batch, over all ranks.")] = 16,
    sequence: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 256,
    layers: Annotated[int, typer.Option(help="Blocks; the first one is dense, the others have experts.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 32.")] = 128,
    experts: Annotated[int, typer.Option(help="Routed experts of a block, beside a shared one.")] = 16,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 4,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of the parameters and of the order of the text.")] = 0,
    slices: Annotated[int, typer.Option(help="Parts the global batch is always cut into; --ranks must divide it. Moves bits.")] = 4,
    text: Annotated[
        str | None, typer.Option(help="File or folder to train on. Default: the Python standard library's sources.", metavar="PATH")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run, kept in runs/NAME. Default: date and time.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with a run, with the same bits as if never stopped.", metavar="NAME")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes, expert-parallel. Moves no bits. Default: 2 on two cores or more, else 1.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of each rank. The dense parts' bits may depend on it, not on the ranks.")] = 1,
    minibatch: Annotated[int, typer.Option(help="Rows made ready together. Moves no bits.")] = 4096,
    macrobatch: Annotated[int, typer.Option(help="Rows of the ring of dispatched rows. Moves no bits.")] = 32768,
    saved_rows: Annotated[
        int | None, typer.Option(help="Rows whose gate and up are kept for the backward. Moves no bits. Default: all.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    eval_every: Annotated[int, typer.Option(help="Steps between validations.")] = 100,
    device: Annotated[str, typer.Option(help="Only cpu.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Only float32.")] = "float32",
) -> None:
    """Train a small language model on text.

    Prints validation bits per byte beside the unigram entropy and xz -9 of the same held-out text, and at last a digest of all parameters.
    Ctrl-C stops after the step and leaves a checkpoint.
    """
    values: dict[str, Any] = dict(
        steps=steps, batch=batch, sequence=sequence, layers=layers, hidden=hidden, experts=experts, top_k=top_k, lr=lr, seed=seed,
        slices=slices, dtype=dtype, text=text and str(Path(text).resolve()), threads=threads, minibatch=minibatch,
        macrobatch=macrobatch, saved_rows=saved_rows, device=device, checkpoint_every=checkpoint_every, eval_every=eval_every,
    )  # fmt: skip
    given = {option: value for option, value in values.items() if _is_given(context, option)}

    try:
        world = job.launched()
        if world and ranks not in (None, world[1]):
            raise job.TrainError(f"--ranks={ranks}: the launcher started {world[1]}")
        if ranks is not None or world:
            given["ranks"] = world[1] if world else ranks
        if resume is not None:
            if name is not None:
                raise job.TrainError(f"--name={name}: a run that is resumed keeps its name")
            run = next((path for path in (RUNS / resume, Path(resume)) if path.is_dir()), None)
            if run is None:
                raise job.TrainError(f"--resume={resume}: neither a run in {RUNS}/ nor a folder")
            options = job.resumed_options(run, given)
        else:
            if name is not None and (name in ("", ".", "..") or "/" in name or os.sep in name):
                raise job.TrainError(f"--name={name}: must be a plain name, without folders")
            run = RUNS / (name or datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
            options = job.Options(**{**values, "ranks": job.default_ranks(slices, experts), **given})
        code = job.train(options, run, resume is not None)
    except job.TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def main() -> None:
    app()


if __name__ == "__main__":
    main()
