"""The command `mok`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mok import train as job

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
RUNS = Path("runs")


@app.callback()
def _mok() -> None:
    """Mixture-of-Kittens: a bitwise deterministic Mixture-of-Experts layer."""


def _defaults(name: str) -> str:
    """The defaults of an option, by size where sizes differ."""
    default = getattr(job.Options(), name)
    others = [f"{values[name]} for {size}" for size, values in job.SIZES.items() if values.get(name, default) != default]
    return f"Default: {', '.join([str(default), *others])}."


def _option(name: str, text: str) -> Any:
    return typer.Option(help=f"{text} {_defaults(name)}")


@app.command()
def train(
    size: Annotated[
        str | None,
        typer.Option(
            help="Decides the other options' defaults: small (1.7 million parameters) or 400m (414 million, 64 experts, for a GPU). "
            "Default: small, 400m with --device=cuda."
        ),
    ] = None,
    steps: Annotated[int | None, _option("steps", "Optimizer steps.")] = None,
    batch: Annotated[int | None, _option("batch", "Sequences of the global batch, over all ranks.")] = None,
    sequence: Annotated[int | None, _option("sequence", "Bytes of a sequence.")] = None,
    layers: Annotated[int | None, _option("layers", "Blocks in all.")] = None,
    dense: Annotated[int | None, _option("dense", "The first blocks, which have no experts.")] = None,
    hidden: Annotated[int | None, _option("hidden", "Width of the model.")] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads. Default: as many as the hidden size holds, 4 for 400m.", show_default=False)
    ] = None,
    head_width: Annotated[int | None, _option("head_width", "Width of an attention head.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of an expert. Default: half of the hidden size, 512 for 400m.")] = None,
    experts: Annotated[int | None, _option("experts", "Routed experts of a block, beside a shared one.")] = None,
    top_k: Annotated[int | None, _option("top_k", "Experts per token.")] = None,
    lr: Annotated[float | None, _option("lr", "Peak learning rate.")] = None,
    seed: Annotated[int | None, _option("seed", "Of the parameters and of the order of the text.")] = None,
    slices: Annotated[
        int | None, _option("slices", "Parts the global batch is always cut into; --ranks must divide it. Moves bits.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="File or folder to train on. Default: the Python standard library's sources.", metavar="PATH")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run, kept in runs/NAME. Default: date and time.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with a run, with the same bits as if never stopped.", metavar="NAME")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes, expert-parallel; on GPUs one for each. Moves no bits. Default: 2 on a CPU of two cores or more, else 1."
        ),
    ] = None,
    threads: Annotated[
        int | None, _option("threads", "Threads of each rank. The dense parts' bits may depend on it, not on the ranks.")
    ] = None,
    minibatch: Annotated[int | None, _option("minibatch", "Rows made ready together. Moves no bits.")] = None,
    macrobatch: Annotated[int | None, _option("macrobatch", "Rows of the ring of dispatched rows. Moves no bits.")] = None,
    saved_rows: Annotated[
        int | None, typer.Option(help="Rows whose gate and up are kept for the backward. Moves no bits. Default: all.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, _option("checkpoint_every", "Steps between checkpoints; there is one at the end, too. 0: none at all.")
    ] = None,
    eval_every: Annotated[int | None, _option("eval_every", "Steps between validations.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cpu.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, or bfloat16 with fp32 copies for the optimizer. Default: float32 on a CPU.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Of the experts' products: bf16 (whatever --dtype is), mxfp8, or fp8 (in blocks). Default: bf16."),
    ] = None,
    moe: Annotated[
        str | None,
        typer.Option(help="The layer: mok; or, to compare, torch (sort, gather, grouped products, eager) or torch-compiled (its SwiGLU)."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="At the end also time another layer, in turns with --moe's on the same model: torch, for instance.")
    ] = None,
) -> None:
    """Train a language model on text.

    Prints validation bits per byte beside the unigram entropy and xz -9 of the same held-out text, tokens per second, and at last a digest
    of all parameters. Ctrl-C stops after the step and leaves a checkpoint.
    """
    values: dict[str, Any] = dict(
        steps=steps, batch=batch, sequence=sequence, layers=layers, dense=dense, hidden=hidden, heads=heads, head_width=head_width,
        width=width, experts=experts, top_k=top_k, lr=lr, seed=seed, slices=slices, moe=moe, device=device, dtype=dtype,
        precision=precision, text=text and str(Path(text).resolve()), threads=threads, minibatch=minibatch, macrobatch=macrobatch,
        saved_rows=saved_rows, against=against, checkpoint_every=checkpoint_every, eval_every=eval_every,
    )  # fmt: skip
    given = {option: value for option, value in values.items() if value is not None}

    try:
        world = job.launched()
        if world and ranks not in (None, world[1]):
            raise job.TrainError(f"--ranks={ranks}: the launcher started {world[1]}")
        if ranks is not None or world:
            given["ranks"] = world[1] if world else ranks
        if resume is not None:
            for option, value in (("name", name), ("size", size)):
                if value is not None:
                    raise job.TrainError(f"--{option}={value}: a run that is resumed keeps its {option}")
            run = next((path for path in (RUNS / resume, Path(resume)) if path.is_dir()), None)
            if run is None:
                raise job.TrainError(f"--resume={resume}: neither a run in {RUNS}/ nor a folder")
            options = job.resumed_options(run, given)
        else:
            if name is not None and (name in ("", ".", "..") or "/" in name or os.sep in name):
                raise job.TrainError(f"--name={name}: must be a plain name, without folders")
            run = RUNS / (name or datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
            options = job.sized_options(size, given)
        code = job.train(options, run, resume is not None)
    except job.TrainError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(code)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command()
def doctor(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option(help="Skip what takes seconds: copies and processes on several GPUs.")] = False,
) -> None:
    """Say what will and will not work on this machine. Exit code 1 if something it has cannot be used."""
    from mok import doctor as checks
    from mok.bench import report

    facts = checks.collect(measure=not quick)
    findings = checks.judge(facts)
    if as_json:
        print(json.dumps(dict(facts=dataclasses.asdict(facts), findings=[dataclasses.asdict(finding) for finding in findings]), indent=1))
    else:
        report.print_table("", [{"": finding.state, "of": finding.name, "here": finding.text} for finding in findings])
    raise typer.Exit(int(any(finding.state == "fails" for finding in findings)))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A safetensors file.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    to: Annotated[str, typer.Option(help="The weights' new format: mxfp8 (1 x 32), fp8 (128 x 128), or bf16.")],
    suffix: Annotated[str, typer.Option(help="The scale of a weight NAME is called NAME and this.")] = "_scale",
    quantize: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Also quantize floating-point tensors with such names, as *_EIH; may be given repeatedly."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a checkpoint's quantized weights in another format, and say what could not be kept. All else is copied."""
    from mok import convert as files
    from mok.bench import report

    try:
        made, others = files.convert_file(source, target, cast(Any, to), suffix=suffix, patterns=quantize or (), force=force)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    report.print_table("", files.table(made, cast(Any, to)))
    kept = sum(not one.report.changed for one in made)
    print(f"{target}: {len(made)} weights in {to}, {kept} of them without any loss; {others} other tensors copied")


# These read their own options: their ranks are processes that are started with the same ones.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure layers, their parts and what they are compared with. `mok bench --help` lists suites and options."""
    from mok.bench import suites

    raise typer.Exit(suites.main(context.args))


@app.command(context_settings=PASS_ON)
def tune(context: typer.Context) -> None:
    """Choose how the kernels cut their work for a shape, and keep it. `mok tune --help` lists the options."""
    from mok import tune as choices

    raise typer.Exit(choices.main(context.args))


@app.command(context_settings=PASS_ON)
def trace(context: typer.Context) -> None:
    """Show what every multiprocessor did when, during a forward and a backward. `mok trace --help` lists the options."""
    from mok import trace as timelines

    raise typer.Exit(timelines.main(context.args))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
