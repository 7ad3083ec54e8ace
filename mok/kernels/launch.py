"""The host's side: a rank's workspace on the GPU and the launches of one forward. Nothing here reads the device.

Legend: T tokens of this rank, H hidden, I intermediate, L experts of this rank, E experts in all, K choices per token, R ranks,
S width of the shared experts, C rows whose gate and up are saved.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok.config import TILE_M
from mok.fabric import FabricError
from mok.kernels import memory as memory_module
from mok.kernels.combine import combine
from mok.kernels.forward import forward_kernel
from mok.kernels.launcher import Descriptor, cdiv, enqueue, next_power_of_2
from mok.kernels.memory import PeerMemory
from mok.kernels.quantize import quantize_into
from mok.kernels.schedule import DeviceSchedule, empty_schedule, max_tiles, sort_slots, write_rows
from mok.kernels.signals import barrier
from mok.kernels.tasks import BLOCK_TICKETS, PROGRAMS_PER_BLOCK, max_tickets, most_in_two_minibatches, tasks_kernel
from mok.kernels.trace import PROGRAM, WORDS
from mok.quantize import MX_ROW, Precision, Recipe, scale_shape
from mok.schedule import local_experts

POLLS_PER_SECOND = 1_000_000  # a reading of a signal takes about a microsecond
MAX_STRIDE = 2**40  # bytes that the copy engine can step


@dataclass(frozen=True)
class ForwardPlan:
    """How the forward kernel cuts its work. No field changes a bit.

    num_sms: programs; 0 means one per multiprocessor.
    minibatch_tiles, ring_tiles: tiles of 128 rows; the ring holds at least two minibatches, or all tiles. A minibatch may be half as large
        again, or half as large, to begin and end with experts.
    parts: pull tasks per tile.
    half_tiles: multiply only the first half of a tile whose other half is padding.
    gather: up to so many ranks, up tasks read this rank's own rows of x where they are, and only others' are pulled, in the kernel of
        `runs_ahead`.
    prefetch: begin a task's loads while the one before it ends, where there is a kernel that does (`runs_ahead`): in bf16, on Hopper.
    trace: write timestamps of every task.
    """

    num_sms: int = 0
    minibatch_tiles: int = 16
    ring_tiles: int = 256
    parts: int = 4
    block_m: int = TILE_M
    block_n: int = 128
    block_k: int = 64
    block_h: int = 512
    num_warps: int = 8
    num_stages: int = 4
    programs_per_sm: int = 1
    half_tiles: bool = True
    gather: int = 1
    prefetch: bool = True
    trace: bool = False


@dataclass
class Saved:
    """What a backward needs again: gate and up of the first C rows, and of all tokens for the shared experts."""

    gate_CI: Tensor
    up_CI: Tensor
    shared_gate_TS: Tensor
    shared_up_TS: Tensor


def _wait(record: dict[str, int]) -> str:
    what = memory_module.STATES[record["what"]]
    return f"rank {record['rank']}, task {record['task']}: waited for {what}, expected {record['expected']}, found {record['found']}"


@dataclass
class Workspace:
    """One rank's memory for layers of one H and K. `scratch` holds what a call needs and the next one may overwrite."""

    memory: PeerMemory
    max_tokens: int
    hidden: int
    top_k: int
    device: torch.device
    timeout_s: float = 120.0
    num_sms: int = 0
    precision: Precision = "bf16"  # of the routed experts,
    quantized_weight_gradients: bool = False  # and of the operands of their gradients
    warming: bool = False  # barriers do not wait: a call then only compiles and loads what an ordinary call launches

    number: int | None = None  # its name in operators
    last_stream: torch.cuda.Stream | None = None  # where the last call was launched,
    last_call: torch.cuda.Event | None = None  # and its end

    def __post_init__(self) -> None:
        self.scratch: dict[str, Tensor] = {}
        self.views: dict[str, Tensor] = {}  # of scratch, as it was last asked for
        self.formats: dict[Precision, Workspace] = {}  # this memory as layers of another format see it
        if self.device.type == "cuda" and not self.num_sms:
            self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def in_format(self, precision: Precision) -> Workspace:
        """Of a memory with `memory.common_regions`: the same memory and scratch for experts in this format, whose rows have fewer codes."""
        view = self.formats.get(precision)
        if view is None:
            own, shape = dict(self.memory.own), scale_shape((self.max_tokens, self.hidden), Recipe(precision).row)
            for name in ("x_scale", "d_y_scale"):
                own[name] = own[name].flatten()[: shape[0] * shape[1]].view(shape)
            view = dataclasses.replace(self, memory=dataclasses.replace(self.memory, own=own), precision=precision)
            view.scratch, view.views = self.scratch, self.views
            self.formats[precision] = view
        view.last_stream = self.last_stream
        return view

    @property
    def limit(self) -> int:
        return int(min(self.timeout_s * POLLS_PER_SECOND, 2**31 - 1))

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A named buffer of at least this shape, kept between calls."""
        last = self.views.get(name)
        if last is not None and last.shape == shape and last.dtype == dtype:
            return last
        count = math.prod(shape)
        found = self.scratch.get(name)
        if found is None or found.dtype != dtype or found.numel() < count:
            self.retire(found)
            with torch.inference_mode(False):  # it is written to in later calls of any mode
                found = self.scratch[name] = torch.empty(max(count, 1), dtype=dtype, device=self.device)
        with torch.inference_mode(False):
            view = self.views[name] = found[:count].view(shape)
        return view

    def retire(self, *buffers: Tensor | None) -> None:
        """Let go of memory that the last call may still be using, on another stream than the one it was allocated on."""
        for buffer in buffers:
            if buffer is not None and self.last_stream is not None:
                buffer.record_stream(self.last_stream)

    def check(self) -> None:
        """Raise what ended an earlier call, on every rank, and clear it. After a synchronization it is complete."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self.memory.failure() is None:
            return
        if self.device.type == "cuda":  # what was launched behind the failure tells the host of it again
            torch.cuda.current_stream(self.device).record_event().synchronize()
            if self.last_call is not None:
                self.last_call.synchronize()
        failure = self.memory.failure()
        assert failure
        self.memory.clear_failure()
        report, own = failure
        rank = report["rank"]
        if memory_module.STATES[report["what"]] == "expert id":
            raise ValueError(f"ids_TK: slot {report['task']} of rank {rank} is {report['found']}: must be -1 or in 0..{report['expected']}")
        text = _wait(report)
        if rank != self.memory.rank:
            text += f"; ended with it: {_wait(own)}" if own else f"; rank {self.memory.rank} lacked nothing: its launches came late"
        raise FabricError(text, [rank])

    def barrier(self) -> None:
        if self.memory.size > 1:
            barrier(self.memory.addresses["control"], self.memory.rank, self.memory.size, -1 if self.warming else self.limit)


def schedule(workspace: Workspace, ids_TK: Tensor, num_experts: int) -> DeviceSchedule:
    """Sort, meet, write rows: launches only."""
    workspace.check()
    memory = workspace.memory
    num_local = len(local_experts(num_experts, memory.size, memory.rank))
    tiles = max_tiles(workspace.max_tokens, workspace.top_k, memory.size, num_local)
    result = empty_schedule(tiles, num_local, workspace.device)
    workspace.barrier()  # nobody still reads what is written now
    sort_slots(memory, ids_TK, num_experts)
    workspace.barrier()
    write_rows(memory, result, num_experts, 2 * workspace.num_sms)
    return result


def _flat(matrix: Tensor) -> Tensor:
    return matrix if matrix.dim() == 2 else matrix.reshape(-1, matrix.shape[-1])


def _rows(matrix: Tensor, block_rows: int, block_columns: int) -> Descriptor:
    """A descriptor of a row-major matrix (leading dimensions joined) for blocks of this size; an empty one stands for a row of zeros."""
    flat = _flat(matrix)
    if flat.numel() == 0:
        flat = matrix.new_zeros(1, max(matrix.shape[-1], 8))
    return Descriptor(flat, flat.shape, flat.stride(), (block_rows, block_columns))


def _pair(first: Tensor, second: Tensor, block_rows: int, block_columns: int) -> tuple[Descriptor, int]:
    """One descriptor of two matrices of the same shape, and 1 if the first one comes first; the other way round if it lies behind.

    Copies both where no stride leads from one to the other: if they are the same memory, or too far apart.
    """
    columns = first.shape[-1]
    if first.numel() == 0:
        first, second = first.new_zeros(2, 1, columns)
    distance = (second.data_ptr() - first.data_ptr()) // first.element_size()
    if not 0 < abs(distance) * first.element_size() < MAX_STRIDE:
        first, second = torch.stack((first, second))
        distance = first.numel()
    base, rows = (first if distance >= 0 else second), first.numel() // columns
    return Descriptor(_flat(base), (2, rows, columns), (abs(distance), columns, 1), (2, block_rows, block_columns)), int(distance >= 0)


def _next_rows(matrix: Tensor, block_rows: int, block_columns: int) -> Descriptor:
    """A descriptor of a matrix (leading dimensions joined) in which every block has a companion, the same number of rows further down."""
    columns = matrix.shape[-1]
    if matrix.numel() == 0:
        matrix = matrix.new_zeros(2 * block_rows, columns)
    flat = _flat(matrix)
    shape = (2, flat.shape[0] - block_rows, columns)
    return Descriptor(flat, shape, (block_rows * columns, columns, 1), (2, block_rows, block_columns))


def trace_record(workspace: Workspace, tickets: int, programs: int) -> Tensor:
    """Where a kernel writes its timestamps (`mok.kernels.trace`), all zero."""
    return workspace.take("trace", (programs * PROGRAM.value + tickets * WORDS.value,), torch.int64).zero_()


def ring_tiles(plan: ForwardPlan, tiles: int) -> int:
    """Tiles of the ring: no more than there are, and at least any two minibatches, if any place is used again."""
    return max(min(max(plan.ring_tiles, most_in_two_minibatches(plan.minibatch_tiles)), tiles), 1)


def forward(
    workspace: Workspace,
    rows: DeviceSchedule,
    ids_TK: Tensor,
    weights_TK: Tensor,
    x_TH: Tensor,
    gate_LIH: Tensor,
    up_LIH: Tensor,
    down_LHI: Tensor,
    num_experts: int,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    clamp: float | None = None,
    shared_clamp: float | None = None,
    shared_scale_T: Tensor | None = None,
    saved_rows: int = 0,
    save: bool = False,
    plan: ForwardPlan | None = None,
    shared_out_TH: Tensor | None = None,
    term_TH: Tensor | None = None,
    mxfp8: bool = False,
) -> tuple[Tensor, Saved | None]:
    """Publish, one kernel, combine. shared: gate [S, H], up [S, H], down [H, S]. shared_out_TH takes their output, for who wants to keep
    it.

    term_TH: what combine adds first, in place of shared experts. mxfp8: the routed experts' weights are numbers of MXFP8, and x and h
    become such (`launch_mxfp8.py`).
    """
    workspace.check()
    plan = plan or ForwardPlan()
    memory, hidden, width = workspace.memory, workspace.hidden, gate_LIH.shape[1]
    tokens = x_TH.shape[0]
    if mxfp8:
        quantize_into(x_TH, MX_ROW, memory.own["x_e4m3"][:tokens], memory.own["x_scale"][:tokens])
    elif memory.size > 1:
        memory.own["x"][:tokens].copy_(x_TH)
    shared_out, saved = launch_kernel(
        workspace, rows, x_TH, gate_LIH, up_LIH, down_LHI, shared, clamp, shared_clamp, saved_rows, save, plan, hidden, width,
        shared_out_TH, mxfp8,
    )  # fmt: skip
    workspace.barrier()
    out = combine(memory.own["combine"], ids_TK, weights_TK, num_experts, shared_out if term_TH is None else term_TH, shared_scale_T)
    return out, saved


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU of compute capability 9.0, and this Triton's Gluon has what the kernel for it needs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from mok.kernels import backward_hopper, forward_hopper  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


OF_HOPPER = dict(block_m=128, block_n=128, block_k=64, num_warps=8, programs_per_sm=1)
MORE_THAN = 256  # columns: no product of fewer


def runs_ahead(plan: ForwardPlan, device: torch.device, sizes: Sequence[int], mxfp8: bool) -> bool:
    """Whether a forward is the kernel whose loads run on over tasks: a plan that allows it, on Hopper, and every product long enough;
    sizes: H, I and, if there are shared experts, S."""
    fits = all(getattr(plan, name) == value for name, value in OF_HOPPER.items()) and not mxfp8
    return plan.prefetch and fits and min(sizes) > MORE_THAN and is_hopper(device)


def run_kernel(args: dict[str, Any], plan: ForwardPlan, workspace: Workspace) -> None:
    """The forward kernel, in the form for this plan and device."""
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    if runs_ahead(plan, workspace.device, (args["H"], args["I"], *[args["S"]] * bool(args["S"])), args["MXFP8"]):
        from mok.kernels import forward_hopper

        forward_hopper.launch(args, programs)
    else:
        own = {name: args[name] for name in forward_kernel.arg_names}
        enqueue(forward_kernel, (programs,), **own, num_warps=plan.num_warps, num_stages=plan.num_stages)


def launch_kernel(
    workspace: Workspace, rows: DeviceSchedule, x_TH: Tensor, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None, clamp: float | None, shared_clamp: float | None, saved_rows: int, save: bool,
    plan: ForwardPlan, hidden: int, width: int, shared_out_TH: Tensor | None = None, mxfp8: bool = False,
) -> tuple[Tensor | None, Saved | None]:  # fmt: skip
    """The megakernel, between a barrier (all x are there) and another one (all results are)."""
    args, saved, shared_out = kernel_arguments(
        workspace, rows, x_TH, gate_LIH, up_LIH, down_LHI, shared, clamp, shared_clamp, saved_rows, save, plan, hidden, width,
        shared_out_TH, mxfp8,
    )  # fmt: skip
    write_tasks(workspace, args, rows, plan)
    workspace.barrier()
    run_kernel(args, plan, workspace)
    return shared_out, saved


def write_tasks(workspace: Workspace, args: dict[str, object], rows: DeviceSchedule, plan: ForwardPlan) -> None:
    """The kernel's list of tasks, and signals at zero."""
    tasks, signals, n = args["tasks_ptr"], args["signals_ptr"], args["BLOCK_N"]
    blocks = min(cdiv(rows.tile_expert.numel(), plan.minibatch_tiles) + 1, workspace.num_sms)
    enqueue(
        tasks_kernel, (blocks, PROGRAMS_PER_BLOCK),
        tasks, signals, rows.tile_expert, rows.peer_rank, rows.num_tokens, signals.numel(), args["tokens"],
        TILES=plan.minibatch_tiles, PARTS=args["PARTS"], UPS=cdiv(args["I"], n), DOWNS=cdiv(args["H"], 2 * n),
        SHARED_UPS=cdiv(args["S"], n), BLOCK_M=args["BLOCK_M"], HALF_TILES=plan.half_tiles, BLOCK=BLOCK_TICKETS,
    )  # fmt: skip


OF_SHARED = (
    "shared_x_desc", "shared_h_desc", "half_shared_x_desc", "half_shared_h_desc", "store_shared_h_desc", "shared_gate_up_desc",
    "shared_down_desc", "save_shared_gate_desc", "save_shared_up_desc",
)  # fmt: skip


def kernel_arguments(
    workspace: Workspace, rows: DeviceSchedule, x_TH: Tensor, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor,
    shared: tuple[Tensor, Tensor, Tensor] | None, clamp: float | None, shared_clamp: float | None, saved_rows: int, save: bool,
    plan: ForwardPlan, hidden: int, width: int, shared_out_TH: Tensor | None = None, mxfp8: bool = False,
) -> tuple[dict[str, object], Saved | None, Tensor | None]:  # fmt: skip
    """Every argument, by name, of the kernel in any form (`run_kernel`)."""
    memory, tokens = workspace.memory, x_TH.shape[0]
    if hidden < 2 * plan.block_n:  # a pair of slices of H must fit
        plan = dataclasses.replace(plan, block_n=1 << (hidden // 2).bit_length() - 1)
    m, n, k = plan.block_m, plan.block_n, plan.block_k
    tiles = rows.tile_expert.numel()
    ring = ring_tiles(plan, tiles)
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    shared_width = shared[0].shape[0] if shared else 0
    bf16 = torch.bfloat16
    sizes = (hidden, width, *[shared_width] * bool(shared))
    gathers = memory.size <= plan.gather and runs_ahead(plan, workspace.device, sizes, mxfp8)
    alone = gathers and memory.size == 1  # no pulls
    parts = 0 if alone else plan.parts
    x_ring = x_TH if alone else workspace.take("x_ring", (ring * m, hidden), bf16)
    h_ring = workspace.take("h_ring", (ring * m, width), bf16)
    shared_h = workspace.take("shared_h", (tokens, shared_width), bf16) if shared_width else h_ring
    shared_out = shared_out_TH
    if shared_width and shared_out is None:
        shared_out = torch.empty(tokens, hidden, dtype=bf16, device=workspace.device)
    saved = None
    if save:
        empty = lambda count, columns: torch.empty(count, columns, dtype=bf16, device=workspace.device)  # noqa: E731
        saved = Saved(*(empty(saved_rows, width) for _ in range(2)), *(empty(tokens, max(shared_width, 8)) for _ in range(2)))
    gate_up, gate_first = _pair(gate_LIH, up_LIH, n, k)
    of_shared: dict[str, object] = dict.fromkeys(OF_SHARED) | dict(shared_gate_first=0)
    if shared:
        shared_gate_up, shared_gate_first = _pair(shared[0], shared[1], n, k)
        of_shared = dict(
            shared_x_desc=_rows(x_TH, m, k), shared_h_desc=_rows(shared_h, m, k), half_shared_x_desc=_rows(x_TH, m // 2, k),
            half_shared_h_desc=_rows(shared_h, m // 2, k), store_shared_h_desc=_rows(shared_h, m, n), shared_gate_up_desc=shared_gate_up,
            shared_down_desc=_next_rows(shared[2], n, k), save_shared_gate_desc=_rows(saved.shared_gate_TS if saved else h_ring, m, n),
            save_shared_up_desc=_rows(saved.shared_up_TS if saved else h_ring, m, n), shared_gate_first=shared_gate_first,
        )  # fmt: skip
    shared_tiles = cdiv(tokens, m) if shared_width else 0
    signals = workspace.take("signals", (32 + 3 * tiles + shared_tiles,), torch.int32)
    ups, downs, shared_ups = cdiv(width, n), cdiv(hidden, 2 * n), cdiv(shared_width, n)
    most = max_tickets(tiles, shared_tiles, parts, ups, downs, shared_ups)
    tasks = workspace.take("tasks", (2 + most,), torch.int64)
    x = ("x_e4m3", "x_scale") if mxfp8 else ("x", "x")
    args: dict[str, object] = dict(
        x_ptr=memory.own[x[0]] if mxfp8 else x_TH, x_ptrs=memory.addresses[x[0]],
        x_scale_ptr=memory.own[x[1]], x_scale_ptrs=memory.addresses[x[1]],
        combine_ptr=memory.own["combine"], combine_ptrs=memory.addresses["combine"],
        control_ptrs=memory.addresses["control"],
        peer_rank_ptr=rows.peer_rank, peer_token_idx_ptr=rows.peer_token_idx, tasks_ptr=tasks,
        ring_ptr=x_ring, ring_x_desc=_rows(x_ring, m, k), ring_h_desc=_rows(h_ring, m, k), store_h_desc=_rows(h_ring, m, n),
        gate_up_desc=gate_up, down_desc=_next_rows(down_LHI, n, k),
        save_gate_desc=_rows(saved.gate_CI if saved else h_ring, m, n), save_up_desc=_rows(saved.up_CI if saved else h_ring, m, n),
        half_x_desc=_rows(x_ring, m // 2, k), half_h_desc=_rows(h_ring, m // 2, k), store_half_h_desc=_rows(h_ring, m // 2, n),
        save_half_gate_desc=_rows(saved.gate_CI if saved else h_ring, m // 2, n),
        save_half_up_desc=_rows(saved.up_CI if saved else h_ring, m // 2, n),
        shared_out_ptr=shared_out if shared_width else x_ring, **of_shared,
        signals_ptr=signals, max_tiles=tiles, ring=ring, tokens=tokens, gate_first=gate_first,
        saved_rows=saved_rows,
        trace_ptr=trace_record(workspace, most + 1, programs) if plan.trace else tasks,
        limit=float(clamp or 0.0), shared_limit=float(shared_clamp or 0.0), wait_limit=workspace.limit,
        rank=memory.rank, H=hidden, I=width, S=shared_width, K=workspace.top_k, R=memory.size,
        CLAMP=clamp is not None, SHARED_CLAMP=shared_clamp is not None, SAVE=save, PARTS=parts, GATHER=gathers,
        BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, BLOCK_H=max(min(plan.block_h, next_power_of_2(hidden)), 32),
        THREADS=32 * plan.num_warps, MXFP8=mxfp8, TRACE=plan.trace,
    )  # fmt: skip
    return args, saved, shared_out
