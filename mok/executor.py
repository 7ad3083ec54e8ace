"""The layer on a CPU: runs a Schedule tile by tile in PyTorch; the CPU path and the kernels' twin.

Every product of rows is made in tiles of full height (128 rows) by one thread, in sizes at which a row gets the same bits wherever it
stands in a tile and whatever the other rows hold (`row_product`). Sums over rows (weight gradients) go tile by tile, in order, into one
accumulator that lives on when a minibatch ends. So no knob, no number of ranks and no other token of the batch can move a bit.

Values are fp32 (fp64 for fp64 inputs), rounded to the dtype of x where `reference.py` rounds; in backward d_gate, d_up, w * h and each
slot's d_x are rounded too, as they pass through memory, and weight gradients once at the end. With a `Recipe` the operands of products
are quantized; x and dY are published and dispatched as E4M3 values with their scales.

Legend: T tokens of a rank, H hidden, I intermediate, L experts of this rank, K choices per token, M padded rows of this rank, N any rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mok.config import TILE_M, Tuning
from mok.fabric import Call, Region
from mok.operators import operator
from mok.quantize import E4M3, UNQUANTIZED, Recipe, dequantize, quantize, scale_shape
from mok.schedule import Schedule, build_schedule, local_experts, sort_routes


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators: fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """One thread for torch's operators of this Python thread, no autocast, no graph: the surroundings in which bits are what they are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_num_threads(threads)


watch: Callable[[int, str, int, int], None] | None = None
"""Told (rank, step, first row, expert) when a step begins, which ends the one before; "ready": the step has what it waited for."""


def _note(call: Call, step: str, row: int = 0, expert: int = 0) -> None:
    """Tell who watches; a comparison where nobody does."""
    if watch is not None:
        watch(call.rank, step, row, expert)


# ---- the product of a tile's rows ----

UNIT = 16
"""Rows and columns of a weight are padded with zeros to multiples of it. At odd sizes, and at sizes of a few vectors, a library's product
adds up a row in another order at the end of a tile than in its middle, or by the address of the row."""

ALIGNMENT = 64
"""Bytes. Vendors promise equal bits for equal products only at addresses that are multiples of it."""


def row_product(rows: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """rows [128, K] times weight [K, N], or times the transpose of weight [N, K]: contiguous [128, N]. Needs `exact`.

    A row's bits depend on the row and the weight alone. No library promises that, so the first product of each size is preceded by a trial
    of it (`_rows_alike`); where that fails, the product is made by `product_in_steps`.
    """
    columns = weight.shape[0 if transposed else 1]
    rows, weight = _padded(rows), _padded(weight)
    factor = weight.T if transposed else weight
    multiply = torch.matmul if _rows_alike(weight.dtype, weight.shape[0], weight.shape[1], transposed) else product_in_steps
    return multiply(rows, factor)[:, :columns].contiguous()


def product_in_steps(rows: Tensor, factor: Tensor) -> Tensor:
    """rows [M, K] times factor [K, N] by K elementwise multiplications and additions, which round alike at every place of a tensor."""
    total = rows.new_zeros(rows.shape[0], factor.shape[1])
    for column, row in zip(rows.T.contiguous(), factor.contiguous(), strict=True):
        total += column[:, None] * row
    return total


@functools.cache
def _rows_alike(dtype: torch.dtype, height: int, width: int, transposed: bool) -> bool:
    """Whether 128 equal rows have equal products with a weight [height, width]."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(height, width, generator=g, dtype=dtype)
    factor = weight.T if transposed else weight
    product = torch.matmul(torch.randn(factor.shape[0], generator=g, dtype=dtype).repeat(TILE_M, 1), factor)
    return torch.equal(product, product[:1].expand_as(product))


def _padded(matrix: Tensor) -> Tensor:
    """A contiguous matrix with zeros up to multiples of `UNIT`, aligned."""
    below, right = (-n % UNIT for n in matrix.shape)
    return F.pad(matrix, (0, right, 0, below)) if below or right else _aligned(matrix)


def _aligned(matrix: Tensor) -> Tensor:
    """Contiguous, from an address that is a multiple of `ALIGNMENT` on, as all that PyTorch allocates."""
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % ALIGNMENT == 0 else matrix.clone()


# ---- the arithmetic of one tile ----


def swiglu(gate: Tensor, up: Tensor, clamp: float | None) -> Tensor:
    """silu(min(gate, L)) * clamp(up, -L, L) of wide values."""
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(gate) * up


def swiglu_backward(gate: Tensor, up: Tensor, d_hidden: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """d_gate, d_up of `swiglu`. The gradient is zero where a value was clipped and passes at the boundary."""
    gate_in, up_in = gate, up
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    s = torch.sigmoid(gate)
    d_gate = d_hidden * up * (s * (1 + gate * (1 - s)))
    d_up = d_hidden * (gate * s)
    if clamp is not None:
        d_gate = torch.where(gate_in > clamp, 0, d_gate)
        d_up = torch.where(up_in.abs() > clamp, 0, d_up)
    return d_gate, d_up


@dataclass(frozen=True)
class Expert:
    """One expert's weights, wide: gate and up [I, H], down [H, I]. Quantized for products over their last dimension, as the forward has
    them, or over their first, as the gradients of its operands have them."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def of(gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, recipe: Recipe = UNQUANTIZED, contraction: int = -1) -> Expert:
        wide = wide_dtype(gate_IH.dtype)
        return Expert(*(recipe.weight(w.to(wide).contiguous(), contraction) for w in (gate_IH, up_IH, down_HI)))

    def gate_up(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """gate, up of one tile of wide rows, rounded."""
        return row_product(x, self.gate, transposed=True).to(dtype), row_product(x, self.up, transposed=True).to(dtype)


@dataclass
class ExpertGradient:
    """The accumulators of one expert's weight gradients, wide; tiles are added in row order."""

    gate: Tensor
    up: Tensor
    down: Tensor

    @staticmethod
    def zeros(expert: Expert) -> ExpertGradient:
        return ExpertGradient(*(torch.zeros_like(w) for w in (expert.gate, expert.up, expert.down)))

    def add_tile(self, x: Tensor, d_y: Tensor, d_gate: Tensor, d_up: Tensor, hidden: Tensor) -> None:
        self.gate.addmm_(d_gate.T, x)
        self.up.addmm_(d_up.T, x)
        self.down.addmm_(d_y.T, hidden)


class _Final(torch.autograd.Function):
    """Tensors as they are; whoever differentiates them is told that there is nothing to differentiate."""

    @staticmethod
    def forward(ctx, anchor, *tensors):  # type: ignore[no-untyped-def]
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *_):  # type: ignore[no-untyped-def]
        raise RuntimeError("mok: double backward is not supported; a gradient made with create_graph=True was differentiated again")


def final(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward formula whose results cannot be differentiated again and say so."""

    @functools.wraps(backward)
    def formula(ctx, *d_outs):  # type: ignore[no-untyped-def]
        tensors = d_outs[0] if isinstance(d_outs[0], list | tuple) else d_outs
        batched = (torch._C._functorch.is_legacy_batchedtensor, torch._C._functorch.is_batchedtensor)
        if any(isinstance(tensor, Tensor) and any(kind(tensor) for kind in batched) for tensor in tensors):
            raise RuntimeError("mok: is_grads_batched=True (torch.vmap over a backward) is not supported; differentiate in a loop")
        if not torch.is_grad_enabled():
            return backward(ctx, *d_outs)
        with torch.no_grad():
            results = backward(ctx, *d_outs)
        gradients = [results] if isinstance(results, Tensor) else list(results)
        places = [i for i, gradient in enumerate(gradients) if isinstance(gradient, Tensor)]
        marked = _Final.apply(torch.empty(0, requires_grad=True), *(gradients[i] for i in places))
        for i, gradient in zip(places, marked, strict=True):
            gradients[i] = gradient
        return gradients[0] if isinstance(results, Tensor) else tuple(gradients)

    return formula


def _tiles(rows: int) -> range:
    return range(0, rows, TILE_M)


def _full_tile(x_NH: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """Rows start..start + 128 of x, wide, contiguous and aligned, zeros past the end."""
    tile = x_NH[start : start + TILE_M].to(dtype)
    if tile.shape[0] == TILE_M:
        return _aligned(tile)
    return torch.cat([tile, tile.new_zeros(TILE_M - tile.shape[0], tile.shape[1])])


# ---- dense rows: router and shared experts ----


@operator("mok::row_linear")
def row_linear(x_NH: Tensor, weight_OH: Tensor) -> Tensor:
    """x W^T in fp32 (fp64 for fp64): wide [N, O]. A row's bits depend on nothing but the row and W."""
    wide = wide_dtype(x_NH.dtype)
    out = x_NH.new_empty(x_NH.shape[0], weight_OH.shape[0], dtype=wide)
    with exact():
        weight = weight_OH.to(wide).contiguous()
        for start in _tiles(x_NH.shape[0]):
            rows = out[start : start + TILE_M]
            rows.copy_(row_product(_full_tile(x_NH, start, wide), weight, transposed=True)[: rows.shape[0]])
    return out


@operator("mok::row_linear_backward")
def _row_linear_backward(d_out: Tensor, x_NH: Tensor, weight_OH: Tensor) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(x_NH.dtype)
    d_x = torch.empty_like(x_NH, memory_format=torch.contiguous_format)
    with exact():
        weight = weight_OH.to(wide).contiguous()
        d_weight = torch.zeros_like(weight)
        for start in _tiles(x_NH.shape[0]):
            d_tile = _full_tile(d_out, start, wide)
            rows = d_x[start : start + TILE_M]
            rows.copy_(row_product(d_tile, weight)[: rows.shape[0]])
            d_weight.addmm_(d_tile.T, _full_tile(x_NH, start, wide))
        return d_x, d_weight.to(weight_OH.dtype)


@torch.library.custom_op("mok::row_swiglu", mutates_args=())
def row_swiglu(x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, clamp: float | None = None) -> Tensor:
    """The SwiGLU feed-forward of `reference.swiglu` on every row: wide [N, H] with the values of a rounded result, rows independent.

    Gate and up are not kept for backward but computed again.
    """
    dtype, wide = x_NH.dtype, wide_dtype(x_NH.dtype)
    out = torch.empty_like(x_NH, dtype=wide, memory_format=torch.contiguous_format)
    with exact():
        expert = Expert.of(gate_IH, up_IH, down_HI)
        for start in _tiles(x_NH.shape[0]):
            gate, up = expert.gate_up(_full_tile(x_NH, start, wide), dtype)
            hidden = swiglu(gate.to(wide), up.to(wide), clamp).to(dtype).to(wide)
            rows = out[start : start + TILE_M]
            rows.copy_(row_product(hidden, expert.down, transposed=True).to(dtype)[: rows.shape[0]])
    return out


def row_swiglu_gradients(
    d_out: Tensor, x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, clamp: float | None
) -> tuple[Tensor, ExpertGradient]:
    """d_x of `row_swiglu` and the sums of its weight gradients, before they are rounded."""
    dtype, wide = x_NH.dtype, wide_dtype(x_NH.dtype)
    d_x = torch.empty_like(x_NH, memory_format=torch.contiguous_format)
    with exact():
        expert = Expert.of(gate_IH, up_IH, down_HI)
        gradient = ExpertGradient.zeros(expert)
        for start in _tiles(x_NH.shape[0]):
            x = _full_tile(x_NH, start, wide)
            d_y = _full_tile(d_out.to(dtype), start, wide)
            gate, up = (t.to(wide) for t in expert.gate_up(x, dtype))
            hidden = swiglu(gate, up, clamp).to(dtype).to(wide)
            d_gate, d_up = (t.to(dtype).to(wide) for t in swiglu_backward(gate, up, row_product(d_y, expert.down), clamp))
            gradient.add_tile(x, d_y, d_gate, d_up, hidden)
            rows = d_x[start : start + TILE_M]
            rows.copy_((row_product(d_gate, expert.gate) + row_product(d_up, expert.up))[: rows.shape[0]])
    return d_x, gradient


@torch.library.custom_op("mok::row_swiglu_backward", mutates_args=())
def _row_swiglu_backward(
    d_out: Tensor, x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, clamp: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_x, sums = row_swiglu_gradients(d_out, x_NH, gate_IH, up_IH, down_HI, clamp)
    return d_x, sums.gate.to(x_NH.dtype), sums.up.to(x_NH.dtype), sums.down.to(x_NH.dtype)


@row_linear.register_kernel("cuda")
def _(x_NH: Tensor, weight_OH: Tensor) -> Tensor:
    from mok.kernels import dense

    return dense.row_linear(x_NH, weight_OH)


@_row_linear_backward.register_kernel("cuda")
def _(d_out: Tensor, x_NH: Tensor, weight_OH: Tensor) -> tuple[Tensor, Tensor]:
    from mok.kernels import dense

    return dense.row_linear_backward(d_out, x_NH, weight_OH)


@row_swiglu.register_kernel("cuda")
def _(x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, clamp: float | None = None) -> Tensor:
    from mok.kernels import dense

    return dense.row_swiglu(x_NH, gate_IH, up_IH, down_HI, clamp)


@_row_swiglu_backward.register_kernel("cuda")
def _(
    d_out: Tensor, x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, clamp: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from mok.kernels import dense

    return dense.row_swiglu_backward(d_out, x_NH, gate_IH, up_IH, down_HI, clamp)


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)


row_linear.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=wide_dtype(x.dtype)))
_row_linear_backward.register_fake(lambda d_out, x, weight: _contiguous(x, weight))
row_swiglu.register_fake(lambda x, gate, up, down, clamp=None: x.new_empty(x.shape, dtype=wide_dtype(x.dtype)))
_row_swiglu_backward.register_fake(lambda d_out, x, gate, up, down, clamp: _contiguous(x, gate, up, down))


def _save_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)))
    ctx.clamp = inputs[-1]


row_linear.register_autograd(final(lambda ctx, d_out: _row_linear_backward(d_out, *ctx.saved_tensors)), setup_context=_save_inputs)
row_swiglu.register_autograd(
    final(lambda ctx, d_out: (*_row_swiglu_backward(d_out, *ctx.saved_tensors, ctx.clamp), None)), setup_context=_save_inputs
)


# ---- the regions that peers see ----


@dataclass(frozen=True)
class Shape:
    """What one rank brings to a call; equal on all ranks but for `tokens`."""

    tokens: int
    hidden: int
    top_k: int
    num_experts: int
    dtype: torch.dtype
    recipe: Recipe = UNQUANTIZED

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    def operand(self, name: str) -> list[Region]:
        """The regions of a [T, H] operand: itself, or its E4M3 values and their scales."""
        shape = (self.tokens, self.hidden)
        if not self.recipe.quantized:
            return [Region(name, shape, self.dtype)]
        return [Region(name, shape, E4M3), Region(f"{name}_scale", scale_shape(shape, self.recipe.row), torch.uint8)]

    def published(self, name: str, value_TH: Tensor) -> dict[str, Tensor]:
        """What goes into these regions."""
        values = quantize(value_TH, self.recipe.row) if self.recipe.quantized else (value_TH,)
        return {region.name: value for region, value in zip(self.operand(name), values, strict=True)}

    def _published(self) -> list[Region]:
        return [
            Region("counts", (self.num_experts,), torch.int64),
            Region("order", (self.slots,), torch.int32),
            *self.operand("x"),
        ]

    def forward_regions(self) -> list[Region]:
        """x is read by peers; y has one slot per (token, k), each written by the one owner of its expert."""
        return [*self._published(), Region("y", (self.slots, self.hidden), self.dtype)]

    def backward_regions(self) -> list[Region]:
        wide = wide_dtype(self.dtype)
        return [
            *self._published(),
            *self.operand("d_y"),
            Region("weights", (self.slots,), wide),
            Region("d_weights", (self.slots,), wide),
            Region("d_x", (self.slots, self.hidden), self.dtype),
        ]


# ---- the two row movers ----


def dispatch(call: Call, schedule: Schedule, region: str, rows: slice, top_k: int, out: Tensor) -> None:
    """Pull rows of a peer-visible [T, ...] region into out; padding rows become zero."""
    source, token = schedule.peer_rank[rows], schedule.peer_token_idx[rows] // top_k
    out.zero_()
    for rank in range(call.size):
        here = (source == rank).nonzero()[:, 0]
        if len(here):
            out[here] = call.region(region, rank)[token[here]]


def push(call: Call, schedule: Schedule, region: str, rows: slice, values: Tensor) -> None:
    """Write each row to its slot of a peer-visible [T * K, ...] region of its source; padding rows go nowhere."""
    source, slot = schedule.peer_rank[rows], schedule.peer_token_idx[rows]
    for rank in range(call.size):
        here = (source == rank).nonzero()[:, 0]
        if len(here):
            call.region(region, rank)[slot[here]] = values[here]


def _minibatches(rows: int, tuning: Tuning) -> list[slice]:
    return [slice(start, min(start + tuning.minibatch, rows)) for start in range(0, rows, tuning.minibatch)]


class Ring:
    """M rows of a destination: row r lives in slot r mod M. Dispatch runs ahead until it is full; a done minibatch frees its slots.

    regions: names, widths and dtypes of its buffers.
    """

    def __init__(self, rows: int, tuning: Tuning, regions: list[Region]) -> None:
        self.size = min(tuning.macrobatch, rows)  # without a second round nothing needs to be a multiple of the minibatch
        self.buffers = {region.name: torch.empty(self.size, *region.shape[1:], dtype=region.dtype) for region in regions}

    def slots(self, name: str, rows: slice) -> Tensor:
        first = rows.start % self.size
        return self.buffers[name][first : first + rows.stop - rows.start]

    def operand(self, name: str, rows: slice, shape: Shape) -> Tensor:
        """Dispatched rows of a `Shape.operand`, wide."""
        wide, first, *scale = wide_dtype(shape.dtype), *(self.slots(region.name, rows) for region in shape.operand(name))
        return dequantize(first, scale[0], shape.recipe.row, wide) if scale else first.to(wide)


def _run_through_ring(minibatches: list[slice], ring: Ring) -> Iterator[tuple[str, slice]]:
    """The order of work: ("dispatch", rows) as far ahead as the ring allows, then ("compute", rows) of the oldest minibatch."""
    dispatched = 0
    for rows in minibatches:
        while dispatched < len(minibatches) and minibatches[dispatched].stop - rows.start <= ring.size:
            yield "dispatch", minibatches[dispatched]
            dispatched += 1
        yield "compute", rows


def _segments(schedule: Schedule, rows: slice) -> Iterator[tuple[int, range]]:
    """(expert, first rows of its tiles) for the runs of tiles of one expert within rows."""
    tiles = schedule.tile_expert[rows.start // TILE_M : rows.stop // TILE_M].tolist()
    start = 0
    for i in range(1, len(tiles) + 1):
        if i == len(tiles) or tiles[i] != tiles[start]:
            yield tiles[start], range(rows.start + start * TILE_M, rows.start + i * TILE_M, TILE_M)
            start = i


# ---- forward ----


def publish(call: Call, shape: Shape, ids_TK: Tensor, values: dict[str, Tensor]) -> tuple[Schedule, Tensor]:
    """Copy this rank's routes and values to where peers see them, wait for theirs, and build this rank's schedule.

    Returns the schedule and the int64 counts [R, E] of every rank's routes.
    """
    _note(call, "publish")
    routes = sort_routes(ids_TK, shape.num_experts)
    for name, value in {"counts": routes.counts, "order": routes.order, **values}.items():
        call.region(name).copy_(value)
    call.signal("published")
    _note(call, "schedule")
    for peer in range(call.size):
        call.wait("published", peer, task="schedule")
    _note(call, "ready")
    counts_RE = torch.stack([call.region("counts", peer) for peer in range(call.size)])
    orders = [call.region("order", peer) for peer in range(call.size)]
    return build_schedule(counts_RE, orders, local_experts(shape.num_experts, call.size, call.rank)), counts_RE


def forward(
    call: Call,
    shape: Shape,
    tuning: Tuning,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_LIH: Tensor,
    up_LIH: Tensor,
    down_LHI: Tensor,
    *,
    shared: Tensor | None = None,
    clamp: float | None = None,
    save: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """publish, schedule, then minibatch by minibatch dispatch, up, down and push, then combine.

    Returns out [T, H], gate and up [C, I] of the first C rows (kept for backward), and the int64 counts [R, E] of every rank's routes.
    """
    dtype, wide, recipe = shape.dtype, wide_dtype(shape.dtype), shape.recipe
    schedule, counts_RE = publish(call, shape, ids_TK, shape.published("x", x_TH))

    rows_M, width = int(schedule.num_tokens), gate_LIH.shape[1]
    saved = 0 if not save else rows_M if tuning.saved_rows is None else min(rows_M, tuning.saved_rows // TILE_M * TILE_M)
    gate_CI, up_CI = (torch.empty(saved, width, dtype=dtype) for _ in range(2))
    ring = Ring(rows_M, tuning, [*shape.operand("x"), Region("y", (rows_M, shape.hidden), dtype)])
    for task, rows in _run_through_ring(_minibatches(rows_M, tuning), ring):
        if task == "dispatch":
            _note(call, "pull", rows.start)
            for region in shape.operand("x"):
                dispatch(call, schedule, region.name, rows, shape.top_k, ring.slots(region.name, rows))
            continue
        y = ring.slots("y", rows)
        for e, tiles in _segments(schedule, rows):
            _note(call, "weights", tiles.start, e)
            expert = Expert.of(gate_LIH[e], up_LIH[e], down_LHI[e], recipe)
            for row in tiles:
                tile = slice(row, row + TILE_M)
                _note(call, "up", row, e)
                gate, up = expert.gate_up(ring.operand("x", tile, shape), dtype)
                if row < saved:
                    gate_CI[tile], up_CI[tile] = gate, up
                hidden = swiglu(gate.to(wide), up.to(wide), clamp).to(dtype).to(wide)
                _note(call, "down", row, e)
                ring.slots("y", tile)[:] = row_product(recipe.rows(hidden), expert.down, transposed=True)
        _note(call, "push", rows.start)
        push(call, schedule, "y", rows, y)
    call.signal("pushed")
    _note(call, "sum")
    for peer in range(call.size):
        call.wait("pushed", peer, task="combine")
    _note(call, "ready")
    out = combine(call.region("y"), ids_TK, weights_TK, shared, wide).to(dtype)
    return out, gate_CI, up_CI, counts_RE


def combine(slots: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, shared: Tensor | None, wide: torch.dtype) -> Tensor:
    """shared + sum_k w_k * slot[t, k], k ascending, wide; w = 1 when weights are None; masked slots are never looked at."""
    tokens, top_k = ids_TK.shape
    slots = slots.view(tokens, top_k, slots.shape[-1])
    total = torch.zeros(tokens, slots.shape[2], dtype=wide) if shared is None else shared.to(wide, copy=True)
    for k in range(top_k):
        term = slots[:, k].to(wide)
        if weights_TK is not None:
            term = term * weights_TK[:, k, None]
        total = torch.where(ids_TK[:, k, None] >= 0, total + term, total)
    return total


# ---- backward ----


@dataclass(frozen=True)
class Needs:
    """Which gradients are asked for: of this rank's experts, and by any rank of its x or its router weights."""

    experts: bool
    x: bool
    weights: bool


def backward(
    call: Call,
    shape: Shape,
    tuning: Tuning,
    gate_CI: Tensor,
    up_CI: Tensor,
    d_out_TH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_LIH: Tensor,
    up_LIH: Tensor,
    down_LHI: Tensor,
    *,
    clamp: float | None,
    needs: Needs,
    main_grads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    transposed_LIH: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """publish dY, x and weights, then minibatch by minibatch dHid with the SwiGLU gradient, dX pushed home, weight gradients.

    main_grads: fp32 accumulators [L, ...] to add to instead of returning a gradient. transposed_LIH: gate, up and down for the products
    along their first dimension, where they were quantized beforehand. Returns d_x [T, H], d_weights [T, K] wide, and the
    gradients of gate, up and down in their own dtype; None for what is not asked for or went into main_grads.
    """
    dtype, wide, recipe = shape.dtype, wide_dtype(shape.dtype), shape.recipe
    published = {**shape.published("x", x_TH), **shape.published("d_y", d_out_TH), "weights": weights_TK.reshape(-1)}
    schedule, _ = publish(call, shape, ids_TK, published)

    weights_LIH = (gate_LIH, up_LIH, down_LHI)
    gradients = [
        torch.zeros_like(w, memory_format=torch.contiguous_format) if needs.experts and main is None else None
        for w, main in zip(weights_LIH, main_grads, strict=True)
    ]

    def retire(done: tuple[int, Expert, Expert, ExpertGradient | None] | None) -> None:
        e, _, _, gradient = done or (0, None, None, None)
        if gradient is None:
            return
        for total, out, main in zip((gradient.gate, gradient.up, gradient.down), gradients, main_grads, strict=True):
            if main is not None:
                main[e] += total
            elif out is not None:
                out[e] = total

    rows_M, saved = int(schedule.num_tokens), gate_CI.shape[0]
    operands = [*shape.operand("x"), *shape.operand("d_y"), Region("weights", (rows_M, 1), wide)]
    results = [Region("d_x", (rows_M, shape.hidden), dtype), Region("d_weights", (rows_M, 1), wide)]
    ring = Ring(rows_M, tuning, [*operands, *results])
    current: tuple[int, Expert, Expert, ExpertGradient | None] | None = None  # carried from minibatch to minibatch
    for task, rows in _run_through_ring(_minibatches(rows_M, tuning), ring):
        if task == "dispatch":
            _note(call, "pull", rows.start)
            wanted = operands if needs.experts or rows.stop > saved else operands[len(shape.operand("x")) :]
            for region in wanted:
                out = ring.slots(region.name, rows)
                if region.name == "weights":  # a region of [T * K] is read slot by slot
                    dispatch(call, schedule, region.name, rows, 1, out[:, 0])
                else:
                    dispatch(call, schedule, region.name, rows, shape.top_k, out)
            continue
        for e, tiles in _segments(schedule, rows):
            if current is None or current[0] != e:
                _note(call, "weights", tiles.start, e)
                retire(current)
                expert = Expert.of(gate_LIH[e], up_LIH[e], down_LHI[e], recipe)
                gate_IH, up_IH, down_HI = (weight[e] for weight in transposed_LIH or weights_LIH)
                transposed = Expert.of(gate_IH, up_IH, down_HI, recipe, -2) if recipe.quantized else expert
                current = (e, expert, transposed, ExpertGradient.zeros(expert) if needs.experts else None)
            _, expert, transposed, gradient = current
            for row in tiles:
                tile = slice(row, row + TILE_M)
                _note(call, "hidden" if row < saved else "gate up", row, e)
                x, d_y, w = ring.operand("x", tile, shape), ring.operand("d_y", tile, shape), ring.slots("weights", tile)
                gate, up = (gate_CI[tile], up_CI[tile]) if row < saved else expert.gate_up(x, dtype)
                if row >= saved:
                    _note(call, "hidden", row, e)
                gate, up = gate.to(wide), up.to(wide)
                hidden = swiglu(gate, up, clamp).to(dtype).to(wide)
                d_hidden = row_product(d_y, transposed.down)
                if needs.weights:
                    ring.slots("d_weights", tile)[:] = (d_hidden * hidden).sum(1, keepdim=True)
                if needs.experts or needs.x:
                    d_gate, d_up = (t.to(dtype).to(wide) for t in swiglu_backward(gate, up, d_hidden * w, clamp))
                if gradient is not None:
                    _note(call, "d_weight", row, e)
                    weighted = (hidden * w).to(dtype).to(wide)
                    gradient.add_tile(*(recipe.columns(operand) for operand in (x, d_y, d_gate, d_up, weighted)))
                if needs.x:
                    _note(call, "d_x", row, e)
                    from_gate, from_up = row_product(recipe.rows(d_gate), transposed.gate), row_product(recipe.rows(d_up), transposed.up)
                    ring.slots("d_x", tile)[:] = from_gate + from_up
        _note(call, "push", rows.start)
        if needs.x:
            push(call, schedule, "d_x", rows, ring.slots("d_x", rows))
        if needs.weights:
            push(call, schedule, "d_weights", rows, ring.slots("d_weights", rows)[:, 0])
    _note(call, "weights")
    retire(current)
    call.signal("pushed")
    _note(call, "sum")
    for peer in range(call.size):
        call.wait("pushed", peer, task="backward combine")
    _note(call, "ready")

    d_x_TH = combine(call.region("d_x"), ids_TK, None, None, wide).to(dtype) if needs.x else None
    d_weights_TK = torch.where(ids_TK >= 0, call.region("d_weights").view(ids_TK.shape), 0) if needs.weights else None
    return d_x_TH, d_weights_TK, gradients
