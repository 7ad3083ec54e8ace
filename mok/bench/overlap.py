"""What of the communication is hidden: the forward with dispatch, experts or combine left out, one after the other.

    python -m mok.bench.overlap [--ranks 2] [--shapes qwen3-30b] [--out results.json]

Nothing of the kernel is compiled anew for this but the one without experts. What is left out is taken from its list of tasks, and the
signals that it would have given are there from the start:
    dispatch   no pull; the rows in the ring are an earlier call's
    combine    down tasks stand at tiles of padding rows, which go nowhere; and the sum over slots is not launched
    experts    width I = 0: rows are pulled, and pushed as zeros; up tasks vanish
Times are of the kernel with its barriers, the copy that publishes x, and the sum: the schedule and the list are made once. With
    full, alone (without dispatch and combine), moving (without experts)
exposed communication is full - alone, and the hidden part of it moving - exposed. On the CPU the executor's steps are replaced by ones
that do nothing.

Of the forward alone: the backward's parts do not come apart so. Without experts a group has neither slices of d_gate nor weights'
gradients, forms that its kernels do not have; d_weights are pushed by the tasks that multiply; and tiles of padding rows in place of
d_x's would be ready before their d_gate is, so that products would no longer wait as they do.

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, L experts of this rank, K choices per token, R ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mok.bench import ranks, report
from mok.bench.checks import Experts
from mok.bench.layers import Batch, CpuLayer, GpuLayer, layer_class, make_batch, make_experts
from mok.bench.shapes import ONE_GPU, SEVERAL_GPUS, TINY, Shape, choose
from mok.bench.timing import medians
from mok.schedule import local_experts

VARIANTS = {
    "full": (), "no dispatch": ("dispatch",), "no combine": ("combine",), "moving": ("experts",), "alone": ("dispatch", "combine"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A forward kernel's arguments by name, and its signals as they stand before a launch."""

    arguments: dict[str, Any]
    signals: Tensor


def prepare(workspace: Any, rows: Any, x_TH: Tensor, experts: Experts, plan: Any, left_out: Sequence[str]) -> Prepared:
    """left_out: some of dispatch, experts, combine. rows: this batch's DeviceSchedule. Rows are pulled, whatever the plan says: else there
    is no dispatch to leave out."""
    from mok.kernels import launch
    from mok.kernels.tasks import DOWN, END, PULL

    plan = dataclasses.replace(plan, gather=0)
    gate_LIH = experts[0]
    args: dict[str, Any] = launch.kernel_arguments(
        workspace, rows, x_TH, *experts, None, None, None, 0, False, plan, workspace.hidden, gate_LIH.shape[1]
    )[0]  # fmt: skip
    tiles, ring, height = args["max_tiles"], args["ring"], args["BLOCK_M"]
    args["tasks_ptr"] = torch.zeros_like(args["tasks_ptr"])
    if "experts" in left_out:
        args["I"] = 0
    ups, downs = -(-args["I"] // args["BLOCK_N"]), -(-workspace.hidden // (2 * args["BLOCK_N"]))
    shift = 0
    if "combine" in left_out:  # by whole rings: tile + shift has the place of tile
        shift = -(-tiles // ring) * ring
        missing = torch.full((shift * height,), -1, dtype=torch.int32, device=x_TH.device)
        args["peer_rank_ptr"] = torch.cat([rows.peer_rank, missing])
        args["peer_token_idx_ptr"] = torch.cat([rows.peer_token_idx, torch.zeros_like(missing)])
        args["max_tiles"] = tiles + shift
    stride = tiles + shift
    args["signals_ptr"] = torch.zeros(32 + 3 * stride, dtype=torch.int32, device=x_TH.device)
    launch.write_tasks(workspace, args, rows, plan)
    template, tasks = torch.zeros_like(args["signals_ptr"]), args["tasks_ptr"]
    listed = tasks[1:]
    if "dispatch" in left_out:
        kept = listed[: int(tasks[0])]
        kept = kept[(kept & 7) != PULL.value]
        tasks[0], listed[: len(kept)], listed[len(kept)] = len(kept), kept, END.value
        template[32 : 32 + stride] = args["PARTS"]
    if "combine" in left_out:
        listed.copy_(torch.where((listed & 7) == DOWN.value, listed + (shift << 32), listed))
        template[32 + stride + tiles : 32 + 2 * stride] = ups  # h of the tiles that stand for others
        template[32 + 2 * stride :] = downs  # places of h are free: those who free them name other tiles
    return Prepared(args, template)


class OnGpu:
    """All variants of a forward on this rank."""

    def __init__(self, layer: GpuLayer, batch: Batch, plan: Any) -> None:
        from mok.kernels import launch

        self.layer, self.batch, self.plan, self.workspace = layer, batch, plan, layer.workspace
        rows = launch.schedule(self.workspace, batch.ids_TK, layer.num_experts)
        self.prepared = {
            name: prepare(self.workspace, rows, batch.x_TH, layer.experts, plan, left_out) for name, left_out in VARIANTS.items()
        }  # fmt: skip

    def run(self, name: str) -> Tensor | None:
        from mok.kernels import launch
        from mok.kernels.combine import combine

        memory, batch, left_out = self.workspace.memory, self.batch, VARIANTS[name]
        if memory.size > 1 and "dispatch" not in left_out:
            memory.own["x"][: batch.x_TH.shape[0]].copy_(batch.x_TH)
        prepared = self.prepared[name]
        prepared.arguments["signals_ptr"].copy_(prepared.signals)
        self.workspace.barrier()
        launch.run_kernel(prepared.arguments, self.plan, self.workspace)
        self.workspace.barrier()
        if "combine" in left_out:
            return None
        return combine(memory.own["combine"], batch.ids_TK, batch.weights_TK, self.layer.num_experts, None, None)


@contextlib.contextmanager
def _without(left_out: Sequence[str]) -> Iterator[None]:
    """The executor with some of its steps doing nothing."""
    from mok import executor

    def no_sum(slots: Tensor, ids_TK: Tensor, weights_TK: Any, shared: Any, wide: torch.dtype) -> Tensor:
        return slots.new_zeros(ids_TK.shape[0], slots.shape[-1], dtype=wide)

    nothing = lambda *_: None  # noqa: E731
    instead: dict[str, Any] = {}
    if "dispatch" in left_out:
        instead["dispatch"] = nothing
    if "experts" in left_out:
        instead["_segments"] = lambda *_: iter(())
    if "combine" in left_out:
        instead |= dict(push=nothing, combine=no_sum)
    with mock.patch.multiple(executor, **instead) if instead else contextlib.nullcontext():
        yield


class OnCpu:
    """The same of the executor."""

    def __init__(self, layer: CpuLayer, batch: Batch) -> None:
        self.layer, self.batch = layer, batch

    def run(self, name: str) -> Tensor | None:
        with _without(VARIANTS[name]):
            out = self.layer.forward(self.batch)[0]
        return None if "combine" in VARIANTS[name] else out


def measure_shape(name: str, shape: Shape, device: torch.device, repeats: int) -> tuple[dict[str, Any], str]:
    """A row, and what is wrong on this rank; collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    local, group = local_experts(shape.E, size, rank), dist.group.WORLD if size > 1 else None
    gate, up, down = (weight[local.start : local.stop] for weight in make_experts(shape, device))
    layer = layer_class(device)(shape.T, shape.E, shape.K, (gate, up, down), group, 1.0)
    batch = make_batch(shape, rank, 0, device)
    variants: OnGpu | OnCpu
    if isinstance(layer, GpuLayer):
        from mok.kernels.launch import ForwardPlan

        variants = OnGpu(layer, batch, ForwardPlan())
    else:
        variants = OnCpu(layer, batch)
    want = layer.forward(batch)[0].clone()
    got = variants.run("full")
    layer.finish()
    problem = "" if got is not None and torch.equal(got, want) else "the full variant is not the layer"
    runs: dict[str, Callable[[], object]] = {label: lambda label=label: variants.run(label) for label in VARIANTS}  # type: ignore[misc]
    ms = ranks.slowest(medians(runs, repeats, warmup=3, align=dist.barrier), device)
    layer.finish()
    exposed = ms["full"] - ms["alone"]
    work = shape.gflop("fwd")
    row = dict(
        suite="overlap", shape=name, **shape._asdict(), ep=size, precision="bf16", direction="fwd",
        **report.speed(work, ms["full"]), without={label: round(ms[label], 4) for label in VARIANTS if label != "full"},
        exposed_dispatch_ms=round(ms["full"] - ms["no dispatch"], 4), exposed_combine_ms=round(ms["full"] - ms["no combine"], 4),
        exposed_ms=round(exposed, 4), hidden_ms=round(ms["moving"] - exposed, 4),
    )  # fmt: skip
    return row, problem


def line_of(row: dict[str, Any]) -> str:
    without = row["without"]
    return (
        f"{row['shape']:14} EP {row['ep']}: full {row['ms']:.3f} ms; without dispatch {without['no dispatch']:.3f}, without combine "
        f"{without['no combine']:.3f}, experts alone {without['alone']:.3f}, rows moving alone {without['moving']:.3f}; of the moving "
        f"{row['exposed_ms']:.3f} ms are exposed, {row['hidden_ms']:.3f} hidden"
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="mok.bench.overlap", description=(__doc__ or "").partition("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--ranks", type=report.count, default=1, help="processes, one GPU each; a launcher's number wins")
    parser.add_argument("--shapes", default="", help="all of `mok bench`'s by default")
    parser.add_argument("--repeats", type=report.count, default=60)
    parser.add_argument("--limit", type=report.seconds, default=170.0, help="seconds after which all processes are ended")
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    parser.add_argument("--out")
    options = parser.parse_args(arguments)
    known = TINY if not cuda else SEVERAL_GPUS if options.ranks > 1 else ONE_GPU
    try:
        shapes = choose(options.shapes or ",".join(known), {**known, **TINY})
    except ValueError as error:
        parser.error(str(error))
    report.refuse_unwritable(parser, out=options.out)
    if not ranks.launched():
        if cuda and torch.cuda.device_count() < options.ranks:
            parser.error(f"--ranks={options.ranks}: there are {torch.cuda.device_count()} GPUs")
        return ranks.launch("mok.bench.overlap", arguments, options.ranks, options.limit)
    rank, size, device = ranks.join(options.limit)
    if rank == 0:
        print(f"{size} ranks, {report.headline()}", flush=True)
    rows, code = [], 0
    for name, shape in shapes.items():
        row, problem = measure_shape(name, shape, device, options.repeats)
        wrong = ranks.first_problem(problem)
        if wrong:  # no speed of what is wrong
            code = 1
        else:
            rows.append(row)
        if rank == 0:
            print(f"{name}: {wrong}" if wrong else line_of(row), flush=True)
            if options.out:
                report.write(options.out, rows, options.commit)
        if cuda:
            torch.cuda.empty_cache()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever a library still holds open must not keep a rank alive


if __name__ == "__main__":
    sys.exit(main())
