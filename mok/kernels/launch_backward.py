"""The host's side of the backward: memory, arguments and launches. Nothing here reads the device.

Legend: T tokens of this rank, H hidden, I intermediate, L experts of this rank, E experts in all, K choices per token, R ranks,
S width of the shared experts, C rows whose gate and up were saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok.config import TILE_M
from mok.kernels.backward import backward_kernel
from mok.kernels.combine import combine, live_slots
from mok.kernels.groups import BLOCK_TICKETS, HEADER, RECORD, ROW, list_kernel, plan_kernel
from mok.kernels.launch import MAX_STRIDE, Saved, Workspace, _flat, _pair, _rows, is_hopper, trace_record
from mok.kernels.launcher import Descriptor, cdiv, enqueue, next_power_of_2
from mok.kernels.quantize import quantize_into
from mok.kernels.schedule import DeviceSchedule
from mok.quantize import MX_ROW, Block

Weights = tuple[Tensor, Tensor, Tensor]  # of gate, up and down
# What the kernel takes only where there are shared experts.
OF_SHARED = (
    *(name for name in backward_kernel.arg_names if "shared_" in name and name.endswith("_desc")),
    "saved_shared_gate_ptr", "saved_shared_up_ptr", "shared_d_gate_ptr", "shared_d_up_ptr", "shared_h_ptr", "shared_up_first",
)  # fmt: skip


@dataclass(frozen=True)
class BackwardPlan:
    """How the backward kernel cuts its work. No field changes a bit.

    num_sms: programs per rank; 0 means one per multiprocessor.
    ring_tiles: tiles of 128 rows in the rings.
    group_tiles: a group of experts is closed when it has this many tiles; 0 means four waves of tiles per phase.
    parts: pull tasks per tile.
    run: tiles of a weight's gradient that one task makes in a row; 0 means 4 for at most 1,024 rows per expert, else 1.
    half_tiles: multiply only the first half of a tile whose other half is padding. Weights' gradients read rows in steps of block_k, which
        must not reach into the half that is not written.
    prefetch: begin a task's loads while the one before it ends, where there is a kernel that does (`runs_ahead`); a task of it makes one
        tile of a weight's gradient, so `run` 0 means 1 there.
    trace: write timestamps of every task.
    block_n: columns of a tile: `slice`, two or four times as many; `slice` itself, the width of a part of d_w, is no knob.
    """

    num_sms: int = 0
    ring_tiles: int = 256
    group_tiles: int = 0
    parts: int = 4
    run: int = 0
    block_m: int = TILE_M
    block_n: int = 256
    block_k: int = 64
    slice: int = 64
    block_h: int = 512
    num_warps: int = 8
    num_stages: int = 4
    programs_per_sm: int = 1
    half_tiles: bool = True
    prefetch: bool = True
    trace: bool = False

    def with_run(self, rows: int, num_local: int) -> BackwardPlan:
        """`run` chosen for so many rows of so many experts, where it is 0."""
        return self if self.run else dataclasses.replace(self, run=4 if rows <= 1024 * num_local else 1)

    @property
    def store(self) -> int:
        """Columns of a tile that are stored at once, and of gate and of up where they are computed again."""
        return max(self.slice, self.block_n // 2)

    @property
    def weight_store(self) -> int:
        """Columns of a weight's gradient that are stored at once: a whole tile, where no other tile's operands are on their way."""
        return self.block_n if self.run == 1 else self.store


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for: by any rank of x or the router weights, of this rank's experts, of the shared ones."""

    x: bool = True
    weights: bool = True
    experts: bool = True
    shared: bool = True


@dataclass
class Gradients:
    """None for what was not asked for or went into fp32 accumulators."""

    d_x_TH: Tensor | None
    d_weights_TK: Tensor | None
    experts: Weights | None
    shared: Weights | None


@dataclass(frozen=True)
class Tasks:
    """How many tasks there are of each kind: per tile, per expert, and of the shared experts per tile and in all."""

    parts: int
    gate_ups: int
    hiddens: int
    d_xs: int
    d_weights: int
    shared_hiddens: int
    shared_d_xs: int
    shared: int


def _planes(planes: tuple[Tensor, ...], block_rows: int, block_columns: int) -> Descriptor:
    """A descriptor of three dimensions: one matrix (leading dimensions joined), or two of the same shape, the one that lies first first.

    Copies both where no stride leads from one to the other, as `_pair` does.
    """
    first, last = sorted((planes[0], planes[-1]), key=lambda matrix: matrix.data_ptr())
    columns = first.shape[-1]
    distance = (last.data_ptr() - first.data_ptr()) // first.element_size()
    if len(planes) == 2 and first.numel() and not 0 < distance * first.element_size() < MAX_STRIDE:
        first, last = torch.stack((first, last))
        distance = first.numel()
    flat = _flat(first)
    if flat.numel() == 0:
        flat, distance = first.new_zeros(1, columns), 0
    shape = (len(planes), flat.shape[0], columns)
    return Descriptor(flat, shape, (distance or columns, columns, 1), (1, block_rows, block_columns))


def _unless(skip: bool, make: Callable[..., Descriptor]) -> Callable[..., Descriptor | None]:
    """How a kernel's descriptors are made, or None for each of a kernel that is not launched: making one takes microseconds."""
    return (lambda *_: None) if skip else make


def count_tasks(plan: BackwardPlan, needs: Needs, hidden: int, width: int, shared_width: int, tokens: int) -> Tasks:
    m, n = plan.block_m, plan.block_n
    wide = n * plan.run
    of_weights = lambda width: 2 * cdiv(width, m) * cdiv(hidden, wide) + cdiv(hidden, m) * cdiv(width, wide)  # noqa: E731
    hiddens = cdiv(width, n) if needs.x or needs.weights or needs.experts else 0
    shared_hiddens = cdiv(shared_width, n) if shared_width and (needs.x or needs.shared) else 0
    shared_d_xs = cdiv(hidden, n) if shared_width and needs.x else 0
    shared_weights = of_weights(shared_width) if shared_width and needs.shared else 0
    return Tasks(
        parts=plan.parts if hiddens else 0, gate_ups=cdiv(width, plan.store) if hiddens else 0, hiddens=hiddens,
        d_xs=cdiv(hidden, n) if needs.x else 0, d_weights=of_weights(width) if needs.experts else 0,
        shared_hiddens=shared_hiddens, shared_d_xs=shared_d_xs, shared=cdiv(tokens, m) * (shared_hiddens + shared_d_xs) + shared_weights,
    )  # fmt: skip


def ring_and_groups(plan: BackwardPlan, tiles: int, tasks: Tasks, programs: int) -> tuple[int, int, int]:
    """Tiles of the rings, tiles at which a group is closed, most tiles of a group. A ring smaller than all tiles holds two groups."""
    ring = max(2, min(plan.ring_tiles, tiles))
    most = max(tiles, 1) if ring >= tiles else ring // 2
    per_tile = max(1, min(count for count in (tasks.hiddens, tasks.d_xs) if count > 0) if tasks.hiddens or tasks.d_xs else 1)
    waves = 4 * programs
    target = plan.group_tiles or max(1, cdiv(waves, per_tile))
    return ring, min(target, most), most


@dataclass
class Order:
    """The list of tasks: the arguments of the two kernels that write it, what the third reads of it, and its signals.

    per: how many tasks there are of a kind, as constants of all three kernels. most_tasks: there are no more tickets.
    """

    plan: dict[str, object]
    tasks: dict[str, object]
    tables: dict[str, Tensor]
    per: dict[str, int]
    signals: Tensor
    most_tasks: int

    def write(self, programs: int) -> None:
        """Write the list, and set the signals to zero."""
        self.signals.zero_()
        enqueue(plan_kernel, (1,), **self.plan, num_warps=1)
        enqueue(list_kernel, (programs,), **self.tasks)


def order_tasks(
    workspace: Workspace, rows: DeviceSchedule, plan: BackwardPlan, tasks: Tasks, ring: int, target: int, most: int,
    hidden: int, width: int, shared_width: int, tokens: int, num_local: int, saved_tiles: int,
) -> Order:  # fmt: skip
    """ring, target, most: of `ring_and_groups`."""
    take, m, tiles = workspace.take, plan.block_m, rows.tile_expert.numel()
    table = take("groups", (HEADER.value + (tiles + 3) * ROW.value,), torch.int32)
    per_tile = tasks.parts + tasks.gate_ups + tasks.hiddens + tasks.d_xs
    most_tasks = max(tiles * per_tile + (num_local + tiles // most) * tasks.d_weights + tasks.shared, 1)
    tables = dict(
        expert_tile_ptr=take("expert_tile", (num_local + 1,), torch.int32), table_ptr=table,
        list_ptr=take("tasks_backward", (most_tasks * RECORD.value,), torch.int32),
    )  # fmt: skip
    signals = take("signals", (32 + 5 * tiles + 4 + cdiv(tokens, m) + 1,), torch.int32)
    per = dict(
        PARTS=tasks.parts, GATE_UPS=tasks.gate_ups if saved_tiles < tiles else 0, HIDDENS=tasks.hiddens, D_XS=tasks.d_xs,
        D_WEIGHTS=tasks.d_weights,
    )  # fmt: skip
    groups = dict(
        tokens_per_expert_ptr=rows.tokens_per_expert, table_ptr=table, expert_tile_ptr=tables["expert_tile_ptr"], num_local=num_local,
        saved_tiles=saved_tiles, shared_tasks=tasks.shared, target=target, most=most, BLOCK_M=m, **per,
    )  # fmt: skip
    listing = dict(
        **tables, tile_expert_ptr=rows.tile_expert, routes_per_expert_ptr=rows.routes_per_expert, peer_rank_ptr=rows.peer_rank,
        saved_tiles=saved_tiles, HALF_TILES=plan.half_tiles and plan.block_k <= m // 2,
        shared_tiles=cdiv(tokens, m) if shared_width else 0, tokens=tokens, H=hidden, I=width, S=shared_width, ring=ring,
        BLOCK_M=m, RUN_N=plan.block_n * plan.run, SHARED_HIDDENS=tasks.shared_hiddens, SHARED_D_XS=tasks.shared_d_xs,
        BLOCK=BLOCK_TICKETS, **per,
    )  # fmt: skip
    return Order(groups, listing, tables, per, signals, most_tasks)


OF_HOPPER = dict(block_m=128, block_n=256, block_k=64, slice=64, num_warps=8, programs_per_sm=1)
LEAST = 256  # columns that every product there has more of


def runs_ahead(plan: BackwardPlan, device: torch.device, sizes: Sequence[int], mxfp8: bool) -> bool:
    """Whether a backward is the kernel of `backward_hopper.py`: a plan that allows it, on Hopper, bf16 experts of whole tiles; sizes: H, I
    and, if there are shared experts, S."""
    fits = all(getattr(plan, name) == value for name, value in OF_HOPPER.items()) and plan.run in (0, 1)
    fits = fits and not mxfp8 and all(size > LEAST and size % plan.block_m == 0 for size in sizes)
    return plan.prefetch and fits and is_hopper(device)


def loads_in_flight(plan: BackwardPlan, run: int, device_major: int) -> int:
    """`num_stages`, but for a run of tiles on Blackwell, where both halves of a tile that is stored lie in shared memory beside the loads:
    a fourth stage would be more than the chip has."""
    return min(plan.num_stages, 3) if run > 1 and device_major == 10 else plan.num_stages


def options_of(plan: BackwardPlan, call: Call, device: torch.device) -> dict[str, object]:
    """How a kernel that Triton pipelines is compiled."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    return dict(num_warps=plan.num_warps, num_stages=loads_in_flight(plan, call.kernel["RUN"], major), enable_fp_fusion=False)


@dataclass
class Call:
    """One backward, prepared: its list of tasks, the kernel's arguments by name, and where the results will be.

    ahead: by the kernel whose loads run on over tasks.
    """

    order: Order
    kernel: dict[str, object]
    experts: Weights | None
    shared: Weights | None
    shared_d_x: Tensor | None
    ahead: bool = False


def results(weights: Weights, main: Weights | None) -> Weights:
    """Where gradients go: what is accumulated into, or new memory."""
    if main is not None:
        return main
    gate, up, down = (torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device) for weight in weights)
    return gate, up, down


def prepare(
    workspace: Workspace,
    rows: DeviceSchedule,
    saved: Saved,
    d_y_TH: Tensor,
    x_TH: Tensor,
    weights_TK: Tensor,
    gate_LIH: Tensor,
    up_LIH: Tensor,
    down_LHI: Tensor,
    shared: Weights | None = None,
    clamp: float | None = None,
    shared_clamp: float | None = None,
    shared_d_y_TH: Tensor | None = None,
    needs: Needs | None = None,
    main_grads: Weights | None = None,
    shared_main_grads: Weights | None = None,
    plan: BackwardPlan | None = None,
    mxfp8: bool = False,
    gate_up_again: tuple[Tensor, Tensor] | None = None,
) -> Call:
    """shared_d_y_TH: the gradient of the shared experts' output where it is not dY. main_grads: fp32, shaped like the weights, added to.

    mxfp8: the routed experts' weights are numbers of MXFP8, and dY, x, d_gate and d_up become such (`launch_backward_mxfp8.py`).
    gate_up_again: gate and up as the forward multiplied by them, where those are others.
    """
    plan, needs = plan or BackwardPlan(), needs or Needs()
    memory, tokens, hidden, width = workspace.memory, x_TH.shape[0], workspace.hidden, gate_LIH.shape[1]
    m, n, k, s = plan.block_m, plan.block_n, plan.block_k, plan.slice
    num_local, tiles = gate_LIH.shape[0], rows.tile_expert.numel()
    shared_width = shared[0].shape[0] if shared else 0
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    accumulate = main_grads is not None or shared_main_grads is not None
    sizes = (hidden, width, *[shared_width] * bool(shared))
    ahead = runs_ahead(plan, workspace.device, sizes, mxfp8)
    plan = dataclasses.replace(plan, run=1) if ahead else plan.with_run(tokens * workspace.top_k, num_local)
    tasks = count_tasks(plan, needs, hidden, width, shared_width, tokens)
    ring, target, most = ring_and_groups(plan, tiles, tasks, programs)
    saved_tiles = min(saved.gate_CI.shape[0] // m, tiles)
    recompute = saved_tiles < tiles
    cut = most < tiles and needs.experts
    bf16, fp32, device = torch.bfloat16, torch.float32, workspace.device

    take = workspace.take
    d_y_ring, x_ring = (take(name, (ring * m, hidden), bf16) for name in ("d_y_ring", "x_ring"))
    d_gate_ring, d_up_ring = take("d_gate_up_ring", (2, ring * m, width), bf16)
    of_d_x = take("snapped_d_gate_up_ring", (2, ring * m, width), bf16) if mxfp8 and needs.x else (d_gate_ring, d_up_ring)
    h_ring = take("h_ring", (ring * m, width), bf16)
    weights_ring = take("weights_ring", (ring * m,), fp32)
    partial = take("d_weights_parts", (cdiv(width, n) * (n // s), ring * m), fp32)
    carry = take("carry", (3, width, hidden), fp32) if cut else weights_ring
    order = order_tasks(workspace, rows, plan, tasks, ring, target, most, hidden, width, shared_width, tokens, num_local, saved_tiles)
    expert_grads = results((gate_LIH, up_LIH, down_LHI), main_grads) if needs.experts else None
    shared_grads = results(shared, shared_main_grads) if shared and needs.shared else None
    if accumulate and ((needs.experts and main_grads is None) or (shared and needs.shared and shared_main_grads is None)):
        raise ValueError("main_grads and shared_main_grads: both or neither, where both gradients are asked for")
    nowhere = weights_ring if accumulate else d_y_ring
    to_experts = expert_grads or (nowhere,) * 3
    shared_d_x = torch.empty(tokens, hidden, dtype=bf16, device=device) if shared and needs.x else None
    to_shared = shared_grads or (nowhere,) * 3
    a = _unless(ahead, lambda *planes: _planes(planes, m, k))
    half = _unless(ahead, lambda *planes: _planes(planes, m // 2, k))
    a_rows = _unless(ahead, lambda matrix: _rows(matrix, m, k))
    a_t = _unless(ahead, lambda matrix: _rows(matrix, k, m))
    b = lambda *planes: _planes(planes, k, n)  # noqa: E731
    b_rows = _unless(ahead, lambda matrix: _rows(matrix, k, n))
    # A tile of a weight that sticks out of its expert must not reach the next one's.
    by_copy_engine = not accumulate and all(size % m == 0 for size in (hidden, width, shared_width))
    out = _unless(ahead, lambda matrix: _rows(matrix if by_copy_engine else d_y_ring, m, plan.weight_store))
    saved_gate, saved_up = (saved.gate_CI, saved.up_CI) if saved_tiles else (d_gate_ring, d_up_ring)
    addresses, own = memory.addresses, memory.own

    def pulled(name: str, value: Tensor) -> dict[str, Tensor]:
        """Where the kernel pulls an operand from: this rank's and all ranks' rows and, if there are any, codes."""
        first, scale = (f"{name}_e4m3", f"{name}_scale") if mxfp8 else (name, name)
        return {
            f"{name}_ptr": own[first] if mxfp8 else value, f"{name}_ptrs": addresses[first],
            f"{name}_scale_ptr": own[scale], f"{name}_scale_ptrs": addresses[scale],
        }  # fmt: skip

    kernel: dict[str, object] = dict(
        **pulled("d_y", d_y_TH), **pulled("x", x_TH),
        weights_ptr=weights_TK, weights_ptrs=addresses["weights"],
        d_x_ptr=own["combine"], d_x_ptrs=addresses["combine"], d_weights_ptr=own["d_weights"], d_weights_ptrs=addresses["d_weights"],
        control_ptrs=addresses["control"], peer_rank_ptr=rows.peer_rank, peer_token_idx_ptr=rows.peer_token_idx,
        **order.tables,
        ring_d_y_ptr=d_y_ring, ring_x_ptr=x_ring, ring_weights_ptr=weights_ring, partial_ptr=partial, carry_ptr=carry,
        half_d_y_desc=half(d_y_ring), half_d_gate_up_desc=half(*of_d_x),
        ring_d_y_desc=a(d_y_ring), ring_d_gate_up_desc=a(*of_d_x), down_kn_desc=b(down_LHI),
        gate_up_kn_desc=b(gate_LIH, up_LIH), up_first=int(up_LIH.data_ptr() < gate_LIH.data_ptr()),
        ring_d_y_t_desc=a_t(d_y_ring), ring_d_gate_t_desc=a_t(d_gate_ring), ring_d_up_t_desc=a_t(d_up_ring),
        ring_x_n_desc=b_rows(x_ring), ring_h_n_desc=b_rows(h_ring),
        ring_d_gate_ptr=d_gate_ring, ring_d_up_ptr=d_up_ring, snapped_d_gate_ptr=of_d_x[0], snapped_d_up_ptr=of_d_x[1], ring_h_ptr=h_ring,
        saved_gate_ptr=saved_gate, saved_up_ptr=saved_up,
        d_gate_weight_desc=out(to_experts[0]), d_up_weight_desc=out(to_experts[1]), d_down_weight_desc=out(to_experts[2]),
        d_gate_weight_ptr=to_experts[0], d_up_weight_ptr=to_experts[1], d_down_weight_ptr=to_experts[2],
        shared_d_gate_weight_ptr=to_shared[0], shared_d_up_weight_ptr=to_shared[1], shared_d_down_weight_ptr=to_shared[2],
        shared_d_x_ptr=x_ring if shared_d_x is None else shared_d_x, signals_ptr=order.signals,
        trace_ptr=trace_record(workspace, order.most_tasks, programs) if plan.trace else order.signals,
        rank=memory.rank, max_tiles=tiles, num_local=num_local, tokens=tokens, saved_tiles=saved_tiles,
        limit=math.inf if clamp is None else float(clamp), shared_limit=math.inf if shared_clamp is None else float(shared_clamp),
        wait_limit=workspace.limit,
        H=hidden, I=width, S=shared_width, K=workspace.top_k, R=memory.size, CLAMP=clamp is not None or shared_clamp is not None,
        RECOMPUTE=recompute, CARRY=cut, ACCUMULATE=accumulate, BY_COPY_ENGINE=by_copy_engine,
        NEED_WEIGHTS=needs.weights, NEED_EXPERTS=needs.experts, NEED_SHARED=needs.shared and bool(shared),
        RUN=plan.run, ring=ring, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, SLICE=s,
        BLOCK_H=max(min(plan.block_h, next_power_of_2(hidden)), 32), THREADS=32 * plan.num_warps,
        SHARED_HIDDENS=tasks.shared_hiddens, SHARED_D_XS=tasks.shared_d_xs,
        MXFP8=mxfp8, TRACE=plan.trace, **{**order.per, "PARTS": max(tasks.parts, 1)},  # without pulls their code is compiled all the same
    )  # fmt: skip
    of_gate_and_up = dict.fromkeys(("ring_x_desc", "gate_desc", "up_desc"))
    if recompute:
        gate, up = (_rows(weight, plan.store, k) for weight in gate_up_again or (gate_LIH, up_LIH))
        of_gate_and_up = dict(ring_x_desc=a_rows(x_ring), gate_desc=gate, up_desc=up)
    of_shared: dict[str, object] = dict.fromkeys(OF_SHARED)
    if shared:
        shared_gate, shared_up, shared_down = shared
        shared_d_y = d_y_TH if shared_d_y_TH is None else shared_d_y_TH
        d_gate, d_up = take("shared_d_gate_up", (2, tokens, shared_width), bf16)
        h = take("shared_h", (tokens, shared_width), bf16)
        of_shared = dict(
            shared_d_y_desc=a(shared_d_y), shared_d_gate_up_desc=a(d_gate, d_up), shared_down_kn_desc=b(shared_down),
            shared_gate_up_kn_desc=b(shared_gate, shared_up), shared_up_first=int(shared_up.data_ptr() < shared_gate.data_ptr()),
            shared_d_y_t_desc=a_t(shared_d_y), shared_d_gate_t_desc=a_t(d_gate), shared_d_up_t_desc=a_t(d_up),
            shared_x_n_desc=b_rows(x_TH), shared_h_n_desc=b_rows(h),
            saved_shared_gate_ptr=saved.shared_gate_TS, saved_shared_up_ptr=saved.shared_up_TS,
            shared_d_gate_ptr=d_gate, shared_d_up_ptr=d_up, shared_h_ptr=h,
            shared_d_gate_weight_desc=out(to_shared[0]), shared_d_up_weight_desc=out(to_shared[1]),
            shared_d_down_weight_desc=out(to_shared[2]),
        )  # fmt: skip
    kernel |= {**of_gate_and_up, **of_shared}
    if ahead:
        kernel |= of_hopper(
            (d_y_ring, x_ring, d_gate_ring, d_up_ring, h_ring), (saved_gate, saved_up), to_experts,
            (shared_d_y, x_TH, d_gate, d_up, h) if shared else None, (saved.shared_gate_TS, saved.shared_up_TS), to_shared, accumulate,
        )  # fmt: skip
        pair, gate_first = _pair(*(gate_up_again or (gate_LIH, up_LIH)), 128, 64) if recompute else (None, 1)
        kernel |= dict(half_x_desc=_planes((x_ring,), 64, 64) if recompute else None, gate_up_pair_desc=pair, gate_first=gate_first)
    return Call(
        order, kernel, None if main_grads else expert_grads, None if shared_main_grads else shared_grads, shared_d_x, ahead
    )  # fmt: skip


def of_hopper(
    rings: Sequence[Tensor], saved: Sequence[Tensor], outs: Weights, of_shared: Sequence[Tensor] | None, shared_saved: Sequence[Tensor],
    shared_outs: Weights, accumulate: bool,
) -> dict[str, object]:  # fmt: skip
    """Arguments of `backward_hopper.py` alone. rings, and of_shared likewise: dY, x, d_gate, d_up, w h. accumulate: outs are added to, and
    not stored by the copy engine."""
    box = lambda *planes: _planes(planes, 64, 64)  # noqa: E731
    wide = lambda matrix: _planes((matrix,), 64, 256)  # noqa: E731
    made: dict[str, object] = {}
    for of, matrices, (gate, up), stored in (("", rings, saved, outs), ("shared_", of_shared, shared_saved, shared_outs)):
        names = [f"half_{of}d_y_desc", f"half_{of}d_gate_up_desc", f"half_{of}saved_desc", f"{of}x_kn_desc", f"{of}h_kn_desc"]
        stores = [f"store_{of}d_{name}_desc" for name in ("gate", "up", "down")]
        made |= dict.fromkeys([*names, *stores])
        made[f"{of}saved_up_first"] = int(up.data_ptr() < gate.data_ptr())
        if matrices is not None:
            d_y, x, d_gate, d_up, h = matrices
            descs = (box(d_y), box(d_gate, d_up), box(gate, up), wide(x), wide(h))
            made |= dict(zip(names, descs, strict=True))
            if not accumulate:
                made |= {name: _rows(out, 128, 128) for name, out in zip(stores, stored, strict=True)}
    return made


def publish(workspace: Workspace, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, block: Block | None = None) -> None:
    """Copy what peers pull to where they see it; with a block, dY and x quantized in such blocks of their rows."""
    own, tokens, several = workspace.memory.own, x_TH.shape[0], workspace.memory.size > 1
    for name, value in (("d_y", d_y_TH), ("x", x_TH)):
        if block is not None:
            quantize_into(value, block, own[f"{name}_e4m3"][:tokens], own[f"{name}_scale"][:tokens])
        elif several:
            own[name][:tokens].copy_(value)
    if several:
        own["weights"][: weights_TK.numel()].copy_(weights_TK.reshape(-1))


def gather(workspace: Workspace, call: Call, ids_TK: Tensor, num_experts: int, needs: Needs) -> Gradients:
    """After the last barrier: d_x is the sum over the slots, k ascending, on the shared experts' d_x; masked slots have no gradient."""
    own = workspace.memory.own
    d_x = d_weights = None
    if needs.x:
        d_x = combine(own["combine"], ids_TK, None, num_experts, call.shared_d_x)
    if needs.weights:
        d_weights = live_slots(own["d_weights"], ids_TK, num_experts)
    return Gradients(d_x, d_weights, call.experts, call.shared)


def backward(
    workspace: Workspace, rows: DeviceSchedule, saved: Saved, ids_TK: Tensor, d_y_TH: Tensor, x_TH: Tensor, weights_TK: Tensor,
    gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor, num_experts: int, needs: Needs | None = None, plan: BackwardPlan | None = None,
    **options: object,
) -> Gradients:  # fmt: skip
    """Publish, one kernel, combine. d_y, x: bf16, weights: fp32, all contiguous; `options` are those of `prepare`."""
    workspace.check()
    plan, needs = plan or BackwardPlan(), needs or Needs()
    publish(workspace, d_y_TH, x_TH, weights_TK, MX_ROW if options.get("mxfp8") else None)
    call = prepare(
        workspace, rows, saved, d_y_TH, x_TH, weights_TK, gate_LIH, up_LIH, down_LHI, needs=needs, plan=plan, **options
    )  # fmt: skip
    call.order.write(workspace.num_sms)
    workspace.barrier()
    programs = (plan.num_sms or workspace.num_sms) * plan.programs_per_sm
    if call.ahead:
        from mok.kernels import backward_hopper

        backward_hopper.launch(call.kernel, programs)
    else:
        enqueue(backward_kernel, (programs,), **call.kernel, **options_of(plan, call, workspace.device))
    workspace.barrier()
    return gather(workspace, call, ids_TK, num_experts, needs)
