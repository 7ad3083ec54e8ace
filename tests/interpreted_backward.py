"""The real backward kernel under the interpreter; one process runs all cases and prints one JSON object {case: "" or traceback}.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_backward.py [case ...]
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, replace

# isort: off
from interpreted_cases import (  # sets TRITON_INTERPRET before it imports triton
    BLOCK,
    CPU,
    Lost,
    PLAN as FORWARD,
    Problem,
    check_lost_signal,
    end_call,
    make_schedules,
    run_layer,
    share_new,
    shared,
)

# isort: on
import torch
import triton
import triton.language as tl
from dense import exact, random_ids
from interpret import run_cases, run_concurrently
from layers import assert_equal as equal_batches
from layers import step
from torch import Tensor

import mok
from mok import schedule as host_schedule
from mok.config import Tuning
from mok.executor import row_swiglu
from mok.fabric import virtual_ranks
from mok.kernels import groups, launch_backward, memory
from mok.kernels.backward import backward_kernel
from mok.kernels.gradients import hidden_gradient
from mok.kernels.launch import Saved, Workspace
from mok.kernels.launch_backward import BackwardPlan, Needs
from mok.kernels.schedule import max_tiles
from mok.ops import Inputs, run_backward
from mok.ops import Problem as HostProblem

PLAN = BackwardPlan(
    num_sms=2, ring_tiles=4, group_tiles=1, parts=2, run=2, block_m=BLOCK, block_n=2 * BLOCK, block_k=BLOCK // 2,
    slice=BLOCK // 2, block_h=32, num_warps=1,
)
ALL = Needs()


@dataclass
class Result:
    """Gradients of all tokens and all experts; None where not asked for."""

    d_x: Tensor | None
    d_weights: Tensor | None
    gate: Tensor | None
    up: Tensor | None
    down: Tensor | None
    shared: tuple[Tensor, ...] | None

    def items(self):
        values = dict(vars(self))
        values.pop("shared")
        for name, value in zip(("shared gate", "shared up", "shared down"), self.shared or (), strict=False):
            values[name] = value
        return {name: value for name, value in values.items() if value is not None}.items()


def make_d_y(problem: Problem, seed: int = 99) -> Tensor:
    return shared(torch.randn(problem.x_TH.shape, generator=torch.Generator().manual_seed(seed)).bfloat16())


def expected(problem: Problem, d_y: Tensor, clamp: float | None = None, shared_clamp: float | None = None) -> Result:
    """By the executor; the shared experts by its rows, their d_x added as the first term of the sum (one rounding more)."""
    host = HostProblem(virtual_ranks(1)[0], Tuning(), problem.experts, clamp)
    inputs = Inputs(problem.x_TH, problem.ids_TK, problem.weights_TK, problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    nothing = problem.x_TH.new_empty(0, problem.gate_EIH.shape[1])
    d_x, d_weights, experts = run_backward(host, inputs, nothing, nothing, d_y, (True, True, True))
    shared_grads = None
    if problem.shared:
        leaves = [t.clone().requires_grad_() for t in (problem.x_TH, *problem.shared)]
        row_swiglu(*leaves, shared_clamp).backward(d_y.float())
        d_x = (d_x.float() + leaves[0].grad.float()).bfloat16()
        shared_grads = tuple(leaf.grad for leaf in leaves[1:])
    return Result(d_x, d_weights, *experts, shared_grads)


def torch_saved(problem: Problem, part: slice) -> Saved:
    """Shared gate and up of a rank, and nothing of the routed rows."""
    width = problem.gate_EIH.shape[1]
    x = problem.x_TH[part].float()
    if problem.shared:
        gate, up = ((x @ w.float().T).bfloat16() for w in problem.shared[:2])
    else:
        gate, up = (torch.empty(len(x), 8).bfloat16() for _ in range(2))
    nothing = torch.empty(0, width).bfloat16()
    return Saved(nothing, nothing, gate, up)


def make_workspaces(problem: Problem, ranks: int, timeout_s: float) -> list[Workspace]:
    most = max(part.stop - part.start for part in problem.split(ranks))
    views = memory.virtual_memory(memory.backward_regions(most, problem.hidden, problem.experts, problem.top_k, ranks), ranks, CPU)
    made = [Workspace(view, most, problem.hidden, problem.top_k, CPU, timeout_s, num_sms=2) for view in views]
    for workspace in made:
        for name in ("combine", "x", "d_y", "weights", "d_weights"):
            workspace.memory.own[name].fill_(float("nan"))
    return made


def run(
    problem: Problem, d_y: Tensor, ranks: int = 1, plan: BackwardPlan = PLAN, needs: Needs = ALL, clamp: float | None = None,
    shared_clamp: float | None = None, saved: list[Saved] | None = None, mains: tuple[Tensor, ...] | None = None,
    shared_mains: tuple[Tensor, ...] | None = None, lose=None, kernel=backward_kernel, workspaces: list[Workspace] | None = None, **disturb,
) -> Result:  # fmt: skip
    """The whole backward on R virtual ranks, the programs of all ranks at the same time. `saved`, one per rank, is taken from a forward.

    lose, workspaces: as in `interpreted_cases.run_layer`.
    """
    again, workspaces = workspaces is not None, workspaces or make_workspaces(problem, ranks, 120.0)
    schedules = make_schedules(problem, workspaces, plan.block_m)
    calls = []
    for workspace, rows, part in zip(workspaces, schedules, problem.split(ranks), strict=True):
        local = host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank)
        mine = slice(local.start, local.stop)
        kept = saved[workspace.memory.rank] if saved else torch_saved(problem, part)
        x, dy, weights = (shared(t[part].clone()) for t in (problem.x_TH, d_y, problem.weights_TK))
        for name, value in (("x", x), ("d_y", dy), ("weights", weights.reshape(-1))):
            workspace.memory.own[name][: value.shape[0]] = value
        call = launch_backward.prepare(
            workspace, rows, kept, dy, x, weights, problem.gate_EIH[mine], problem.up_EIH[mine], problem.down_EHI[mine],
            problem.shared, clamp, shared_clamp, needs=needs, plan=plan,
            main_grads=tuple(m[mine] for m in mains) if mains else None, shared_main_grads=shared_mains,
        )  # fmt: skip
        share_new(workspace)
        for tensor in (*(call.experts or ()), *(call.shared or ()), call.shared_d_x):
            if tensor is not None:
                tensor.share_memory_().fill_(float("nan"))
        assert call.kernel["PARTS"] > 0, "pull tasks of no rows do not compile"
        call.order.write(2)
        calls.append(call)
    launches = [call.kernel for call in calls]
    run_concurrently(kernel, plan.num_sms, launches, lost=lose and lose(launches), **disturb)
    end_call(workspaces, meet=again)
    parts = [
        launch_backward.gather(w, call, problem.ids_TK[part], problem.experts, needs)
        for w, call, part in zip(workspaces, calls, problem.split(ranks), strict=True)
    ]
    join = lambda values: None if values[0] is None else torch.cat(values)  # noqa: E731
    experts = [None] * 3
    if parts[0].experts is not None:
        experts = [torch.cat([p.experts[i] for p in parts]) for i in range(3)]
    shared_grads = None
    if parts[0].shared is not None:  # every rank's share of the sum over all tokens
        shared_grads = parts[0].shared if ranks == 1 else tuple(sum(p.shared[i].float() for p in parts) for i in range(3))
    return Result(join([p.d_x_TH for p in parts]), join([p.d_weights_TK for p in parts]), *experts, shared_grads)


def assert_near(got: Result, want: Result, limit: float = 8e-3) -> None:
    wanted = dict(want.items())
    for name, value in got.items():
        a, b = value.float(), wanted[name].float()
        assert torch.isfinite(a).all(), f"{name} is not finite"
        rows = a.dim() > 1 and name in ("d_x", "d_weights")
        error = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-2) if rows else (a - b).norm() / b.norm().clamp(min=1e-3)
        assert float(error.max() if error.numel() else 0) < limit, f"{name}: relative error {float(error.max()):.2e}"


def assert_equal(got: Result, want: Result, what: object) -> None:
    wanted = dict(want.items())
    assert dict(got.items()).keys() == wanted.keys(), what
    for name, value in got.items():
        differs = (value != wanted[name]).nonzero()
        assert not len(differs), f"{what}: {name} differs first at {differs[0].tolist()}, in {len(differs)} elements"


# ---- the order of work ----


def weight_tiles(hidden: int, width: int) -> list[tuple[int, int]]:
    """(which weight, row * 65536 + column) of all tiles of 2 x 4 of the three."""
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    return [(i, (m << 16) + n) for i, (rows, columns) in enumerate(sizes) for m in range(-(-rows // 2)) for n in range(-(-columns // 4))]


def plan_of(
    tiles_L, target, most, sizes=(4, 2, 0), weights=True, parts=1, gate_ups=0, hiddens=1, d_xs=1, saved_tiles=10**6, shared_tiles=0,
    shared_per_tile=(0, 0),
):  # fmt: skip
    """-> (groups as rows of the table, expert_tile, tasks as records, weight tasks (of an expert, shared)). Tiles: 2 x 4."""
    count, total, (hidden, width, shared_width) = len(tiles_L), sum(tiles_L), sizes
    cdiv = triton.cdiv
    of_weights = lambda width: (2 * cdiv(width, 2) * cdiv(hidden, 4) + cdiv(hidden, 2) * cdiv(width, 4)) if weights else 0  # noqa: E731
    tokens = torch.tensor([t * 2 for t in tiles_L], dtype=torch.int32)
    table = torch.full((groups.HEADER.value + (total + 3) * groups.ROW.value,), -7, dtype=torch.int32)
    expert_tile = torch.zeros(count + 1, dtype=torch.int32)
    tile_expert = torch.repeat_interleave(torch.arange(count), torch.tensor(tiles_L, dtype=torch.int64)).to(torch.int32)
    per = dict(PARTS=parts, GATE_UPS=gate_ups, HIDDENS=hiddens, D_XS=d_xs, D_WEIGHTS=of_weights(width))
    shared_tasks = shared_tiles * sum(shared_per_tile) + of_weights(shared_width)
    groups.plan_kernel[(1,)](tokens, table, expert_tile, count, saved_tiles, shared_tasks, target=target, most=most, BLOCK_M=2, **per)
    rows = table[groups.HEADER.value :].view(-1, groups.ROW.value)[: int(table[0]) + 1].tolist()
    records = torch.zeros(max(rows[-1][0], 1), groups.RECORD.value, dtype=torch.int32)
    peer_rank = torch.zeros(max(total, 1) * 2, dtype=torch.int32)
    for last in torch.tensor(tiles_L, dtype=torch.int64).cumsum(0).tolist():
        peer_rank[max(2 * last - 1, 0)] = -1  # the last row of every expert is padding
    groups.list_kernel[(3,)](
        records, table, tile_expert if total else table, expert_tile, (tokens - 1).clamp(min=0), peer_rank, saved_tiles, shared_tiles,
        2 * shared_tiles - 1, H=hidden, I=width, S=shared_width, ring=2 * most, BLOCK_M=2, RUN_N=4,
        SHARED_HIDDENS=shared_per_tile[0], SHARED_D_XS=shared_per_tile[1], HALF_TILES=True, BLOCK=256, **per,
    )  # fmt: skip
    return rows, expert_tile.tolist(), records[: rows[-1][0]].tolist(), (of_weights(width), of_weights(shared_width))


def case_groups_example():
    """The numbers of the module's text."""
    rows, expert_tile, _, _ = plan_of([1, 2, 0, 5], 2, 3)
    assert expert_tile == [0, 1, 3, 3, 8]
    assert [(row[1], row[2], row[3]) for row in rows[:-1]] == [(0, 0, 2), (3, 2, 4), (6, 3, 4)] and rows[-1][1] == 8
    assert [row[5] for row in rows[:-1]] == [-1, -1, 1]


def case_ticket_order():
    """Every task once, nothing before what it waits for, for many loads of experts and sizes of rings."""
    g = torch.Generator().manual_seed(0)
    loads = [[], [0], [3], [0, 0, 0], [5, 0, 1], [1] * 4, [0, 9, 0, 1, 14, 2], torch.randint(0, 6, (6,), generator=g).tolist()]
    names = ("PULL", "GATE_UP", "HIDDEN", "D_X", "D_WEIGHT", "SHARED_HIDDEN", "SHARED_D_X", "SHARED_D_WEIGHT")
    kinds = {getattr(groups, name).value: name for name in names}
    for turn, tiles_L in enumerate(loads):
        total = sum(tiles_L)
        for target, most, sizes, with_weights, parts, ups, hiddens, d_xs, saved_tiles, shared_tiles, per_shared in [
            (2, 3, (4, 2, 0), True, 1, 0, 1, 1, 10**6, 0, (0, 0)), (4, 8, (10, 6, 7), True, 2, 3, 2, 3, 0, 3, (2, 1)),
            (1, 1, (4, 4, 0), True, 2, 1, 2, 1, 4, 0, (0, 0)), (40, 100, (8, 4, 4), True, 1, 2, 3, 0, 3, 2, (2, 0)),
            (3, 6, (4, 2, 0), False, 4, 0, 1, 2, 10**6, 0, (0, 0)), (2, 5, (4, 2, 2), False, 0, 0, 0, 0, 0, 2, (1, 1)),
            (2, 4, (20, 36, 0), True, 1, 0, 9, 1, 10**6, 0, (0, 0)),
        ][turn % 2 :: 2]:  # fmt: skip
            rows, expert_tile, records, (weights, shared_weights) = plan_of(
                tiles_L, target, most, sizes, with_weights, parts, ups, hiddens, d_xs, saved_tiles, shared_tiles, per_shared
            )  # fmt: skip
            order = [(r[4], r[0], r[1], (r[2], r[5]) if "WEIGHT" in kinds[r[0]] else r[2], r[3]) for r in records]
            place = {(kinds[kind], *(task[:2] if kinds[kind] == "PULL" else task)): i for i, (group, kind, *task) in enumerate(order)}
            cut = [(g, row) for g, row in enumerate(rows[:-1])]
            of_expert, of_shared = (weight_tiles(sizes[0], width) if with_weights else [] for width in sizes[1:])
            assert len(of_expert) == weights and len(of_shared) == shared_weights
            wanted = [("PULL", t, p, -1) for t in range(total) for p in range(parts)]
            got = []
            for group, kind, t, p, e in order:
                k = kinds[kind]
                got.append((k, -1, p, (group, e)) if k == "D_WEIGHT" else (k, t, p, -1 if k.startswith(("PULL", "SHARED")) else e))
            expert_of = [e for e, n in enumerate(tiles_L) for _ in range(n)]
            for kind, per in (("GATE_UP", ups), ("HIDDEN", hiddens), ("D_X", d_xs)):
                wanted += [(kind, t, p, expert_of[t]) for t in range(saved_tiles if kind == "GATE_UP" else 0, total) for p in range(per)]
            wanted += [("D_WEIGHT", -1, p, (g, e)) for g, row in cut for e in range(row[2], row[3]) for p in of_expert]
            for k, per in zip(("SHARED_HIDDEN", "SHARED_D_X"), per_shared, strict=True):
                wanted += [(k, t, p, -1) for t in range(shared_tiles) for p in range(per)]
            wanted += [("SHARED_D_WEIGHT", 0, p, -1) for p in of_shared]
            assert sorted(map(str, got)) == sorted(map(str, wanted)), (tiles_L, target, most)
            # every expert's tiles are covered by the groups it is in, in order; an empty one is in exactly one group
            for e, n in enumerate(tiles_L):
                inside = [(max(row[1], expert_tile[e]), min(rows[g + 1][1], expert_tile[e + 1])) for g, row in cut if row[2] <= e < row[3]]
                assert sum(b - a for a, b in inside) == n and (n > 0 or len(inside) == 1), (tiles_L, e, inside)
                assert all(b > a for a, b in inside) or n == 0
            ends = [rows[g + 1][1] for g in range(len(cut))]
            ends_within = [g for g, end in enumerate(ends) if 0 < end < total and expert_of[end] == expert_of[end - 1]]
            begins_within = [g + 1 for g in ends_within]
            for g in set(ends_within) & set(begins_within):  # then it is one expert all along
                assert len({expert_of[t] for t in range(rows[g][1], rows[g + 1][1])}) == 1, (tiles_L, target, most, g)
            assert all(rows[g + 1][1] - rows[g][1] <= most for g in range(len(cut)))
            ring, group_of = 2 * most, [g for g in range(len(cut)) for _ in range(rows[g + 1][1] - rows[g][1])]
            compute = [[i for i, task in enumerate(order) if task[0] == g and 2 <= task[1] <= 5] for g in range(len(cut))]
            assert [len(c) for c in compute] == [row[4] for row in rows[:-1]]
            for i, (group, kind, tile, _, expert) in enumerate(order):
                name, needs, record = kinds[kind], [], records[i]
                if name == "PULL":
                    assert record[5] == (group_of[tile - ring] if tile >= ring else -1)
                    needs = compute[record[5]] if tile >= ring else []
                elif name in ("GATE_UP", "HIDDEN"):
                    needs = [place["PULL", tile, p] for p in range(parts)]
                    if name == "HIDDEN" and tile >= saved_tiles:
                        needs += [place["GATE_UP", tile, p, expert] for p in range(ups)]
                elif name == "D_X":
                    needs = [place["HIDDEN", tile, p, expert] for p in range(hiddens)]
                elif name == "D_WEIGHT":
                    end = min(expert_tile[expert + 1], rows[group + 1][1])
                    needs = [i for i, task in enumerate(order) if task[0] == group and kinds[task[1]] == "HIDDEN"]
                    assert record[7] == len(needs) and tile == max(expert_tile[expert], rows[group][1])
                    is_last = expert_tile[expert + 1] <= rows[group + 1][1]
                    missing = 1 if is_last and tiles_L[expert] else 0  # the last row of every expert is padding here
                    assert record[6] == 2 * (2 * (end - tile) - missing) + is_last, (record, end)
                    if rows[group][5] >= 0:
                        needs = needs + compute[rows[group][5]]
                elif name == "SHARED_D_WEIGHT":
                    assert record[7] == shared_tiles * per_shared[0] and record[6] == 2 * (2 * shared_tiles - 1) + 1
                if name in ("HIDDEN", "D_X"):
                    assert record[6] == (tile + 1 == expert_tile[expert + 1])  # half of an expert's last tile is padding
                elif name.startswith("SHARED") and "WEIGHT" not in name:
                    assert record[6] == 0
                assert all(j < i for j in needs), (tiles_L, target, most, name, tile)


def case_hidden_gradient_example():
    """The numbers of the function's text."""
    got = {}
    for limit in (float("inf"), 0.5):
        out = torch.zeros(4, 2)
        example_kernel[(1,)](out, limit, CLAMP=limit < 1)
        got[limit] = [round(float(value), digits) for value, digits in zip(out[:, 1], (3, 3, 3, 2), strict=True)]
    plain, clipped = got[float("inf")], got[0.5]
    for value, wanted, error in zip(plain, (-2.78, -1.10, -0.731, 4.39), (0.01, 0.01, 0.003, 0.03), strict=True):
        assert abs(value - wanted) < error, plain
    assert clipped[0] == 0 and clipped[1] == 0, clipped


@triton.jit
def example_kernel(out_ptr, limit, CLAMP: tl.constexpr):
    gate = tl.full((2, 8), 1.0, tl.float32).to(tl.bfloat16)
    up = tl.full((2, 8), 2.0, tl.float32).to(tl.bfloat16)
    d_hidden = tl.full((2, 8), 3.0, tl.float32)
    weight = tl.full((2,), -0.5, tl.float32)
    d_gate, d_up, weighted_h, d_weight = hidden_gradient(d_hidden, gate, up, weight, limit, CLAMP)
    rows = tl.arange(0, 2)
    tl.store(out_ptr + rows, tl.max(d_gate.to(tl.float32), axis=1))
    tl.store(out_ptr + 2 + rows, tl.max(d_up.to(tl.float32), axis=1))
    tl.store(out_ptr + 4 + rows, tl.max(weighted_h.to(tl.float32), axis=1))
    tl.store(out_ptr + 6 + rows, d_weight / 8)


# ---- the kernel ----


def case_near_the_executor():
    """One rank, everything in the ring: all gradients near the executor's; zero, negative and tiny router weights, a masked slot."""
    problem = Problem(1, 40, 48, 40, 3, 2)
    problem.weights_TK[0], problem.weights_TK[1], problem.weights_TK[2] = 0.0, -0.5, 1e-8
    problem.ids_TK[3] = torch.tensor([-1, 1])
    d_y = make_d_y(problem)
    got = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(got, expected(problem, d_y))
    assert got.d_weights[3, 0] == 0 and got.d_weights[0].abs().min() > 0


def case_ranks_and_ring():
    """R = 1, 2, 3, a ring smaller than the rows and than one expert, an expert without tokens: the same bits for every R."""
    problem = Problem(2, 60, 32, 24, 5, 2)
    problem.ids_TK[problem.ids_TK == 3] = 1
    problem.weights_TK = torch.randn(60, 2)
    problem.ids_TK[:50, 0] = 2  # at least 50 rows: more than two tiles, the most of a group
    d_y = make_d_y(problem)
    want = expected(problem, d_y)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, want)
    for grad in (first.gate, first.up, first.down):
        assert not grad[3].any() and not torch.signbit(grad[3]).any()
    for ranks in (1, 2, 3):
        got = run(problem, d_y, ranks)
        assert_equal(got, first, ranks)


def case_knobs():
    """Ring, group, parts, slices per tile, programs, C: none, some, all: no bit moves."""
    problem = Problem(3, 34, 32, 24, 3, 2, shared_width=16)
    d_y = make_d_y(problem)
    _, _, saved = run_layer(problem, 1, saved_rows=10 * BLOCK)
    first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
    assert_near(first, expected(problem, d_y))
    for kept in (10 * BLOCK, 3 * BLOCK + 5):
        some = replace(saved[0], gate_CI=saved[0].gate_CI[:kept].contiguous(), up_CI=saved[0].up_CI[:kept].contiguous())
        assert_equal(run(problem, d_y, saved=[some]), first, kept)
    one, two = dict(ring_tiles=7, group_tiles=2, parts=1), dict(parts=4, num_sms=3, run=1)
    for changes in (dict(ring_tiles=2), one, two, dict(block_n=BLOCK, run=3)):
        got = run(problem, d_y, plan=replace(PLAN, **changes))
        assert_equal(got, first, changes)


def check_delays(seeds: range) -> None:
    """Random delays at every atomic operation, one to three ranks, places of the ring used again on every rank, cut experts; shared experts
    in every other seed; no rows, some, or all saved: the same bits."""
    for shared_width in (0, 16):
        problem = Problem(0, 56, 32, 16, 3, 2, shared_width=shared_width)
        d_y = make_d_y(problem)
        saved = {ranks: run_layer(problem, ranks, saved_rows=12 * BLOCK) for ranks in (1, 2, 3)}
        first = run(problem, d_y, plan=replace(PLAN, ring_tiles=64))
        assert_near(first, expected(problem, d_y))
        for seed in seeds:
            if seed % 2 == (shared_width > 0):
                ranks, rows = 1 + seed % 3, (0, 12, 2, 1)[seed // 2 % 4] * BLOCK
                _, schedules, kept = saved[ranks]
                plan = replace(PLAN, num_sms=3 - seed // 3 % 3, ring_tiles=4 if ranks == 1 else 2)
                assert all(int(s.num_tokens) > plan.ring_tiles * BLOCK for s in schedules), "no place is used again"
                cut = [replace(k, gate_CI=k.gate_CI[:rows].contiguous(), up_CI=k.up_CI[:rows].contiguous()) for k in kept]
                got = run(problem, d_y, ranks, plan, saved=cut, max_delay_s=0.004, seed=seed)
                if shared_width and ranks > 1:  # the sum of what the ranks have of the shared experts' gradients is no part of the kernel
                    assert_near(got, first)
                    got.shared, rest = None, replace(first, shared=None)
                    assert_equal(got, rest, seed)
                else:
                    assert_equal(got, first, seed)


def case_delays():
    check_delays(range(6))


def case_more_delays():
    check_delays(range(6, 20))


def case_shared_and_clamp():
    """Shared experts wider than the routed ones, clamps of their own, two ranks."""
    problem = Problem(5, 40, 32, 24, 4, 2, masked=0.0, shared_width=40)
    d_y = make_d_y(problem)
    for clamp, shared_clamp in ((None, None), (0.25, 0.5), (0.25, None)):
        want = expected(problem, d_y, clamp, shared_clamp)
        assert_near(run(problem, d_y, clamp=clamp, shared_clamp=shared_clamp), want)
    assert_near(run(problem, d_y, 2, clamp=0.25), want)


def case_one_matrix_for_gate_and_up():
    """Gate and up may be one and the same tensor, of routed and of shared experts; each has a gradient of its own."""
    problem = Problem(6, 40, 32, 32, 3, 2, masked=0.0, shared_width=32)
    d_y, (gate, _, down) = make_d_y(problem), problem.shared
    problem.up_EIH, problem.shared = problem.gate_EIH.clone(), (gate, gate.clone(), down)
    want = expected(problem, d_y)
    problem.up_EIH, problem.shared = problem.gate_EIH, (gate, gate, down)
    assert_near(run(problem, d_y), want)


def check_needs(run, problem, nothing: bool) -> None:
    """run(problem, d_y, ranks=1, ...) makes only what is asked for, with the same bits. nothing: asking for nothing is a call, too."""
    d_y = make_d_y(problem)
    whole = dict(run(problem, d_y).items())
    for x, weights, experts in itertools.product((False, True), repeat=3):
        if not (nothing or x or weights or experts):
            continue
        needs = Needs(x, weights, experts, shared=experts)
        got = dict(run(problem, d_y, needs=needs).items())
        of_weights = ["gate", "up", "down", "shared gate", "shared up", "shared down"]
        names = [*["d_x"] * x, *["d_weights"] * weights, *of_weights * experts]
        assert sorted(got) == sorted(names), (needs, list(got))
        assert all(torch.equal(value, whole[name]) for name, value in got.items()), needs


def check_main_grads(run, problem) -> None:
    """Sums are added into fp32 accumulators, cut experts once; an idle expert's stays as it was. problem: 60 tokens, 3 experts, K = 1."""
    problem.ids_TK[:] = 0
    problem.ids_TK[:9] = 2
    problem.weights_TK = torch.randn(60, 1)
    d_y = make_d_y(problem)
    plain = run(problem, d_y)
    mains = tuple(shared(torch.full(w.shape, 7.0)) for w in (problem.gate_EIH, problem.up_EIH, problem.down_EHI))
    shared_mains = tuple(shared(torch.full(w.shape, -3.0)) for w in problem.shared)
    for _ in range(2):
        got = run(problem, d_y, mains=mains, shared_mains=shared_mains)
        assert got.gate is None and got.shared is None and torch.equal(got.d_x, plain.d_x)
    for main, grad in zip((*mains, *shared_mains), (plain.gate, plain.up, plain.down, *plain.shared), strict=True):
        start = 7.0 if main.dim() == 3 else -3.0
        assert torch.allclose((main - start) / 2, grad.float(), rtol=6e-3, atol=1e-5)
    assert all((main[1] == 7).all() for main in mains)


def case_needs():
    check_needs(run, Problem(6, 30, 16, 24, 3, 1, shared_width=24), nothing=True)


def case_main_grads():
    check_main_grads(run, Problem(7, 60, 32, 24, 3, 1, masked=0.0, shared_width=16))


def case_extremes():
    """All masked, all to one expert, no tokens, more ranks than experts."""
    for ids, tokens, experts in ((-1, 20, 3), (2, 50, 3), (None, 0, 3), (None, 30, 2)):
        problem = Problem(8, tokens, 24, 16, experts, 2, masked=0.0)
        if ids is not None:
            problem.ids_TK.fill_(ids)
            problem.weights_TK = torch.rand(tokens, 2)
        d_y = make_d_y(problem)
        for ranks in (1, 3) if experts == 2 else (1, 2):
            assert_near(run(problem, d_y, ranks), expected(problem, d_y))


def check_lost_signals(problem: Problem, plan: BackwardPlan, limit_s: float, only: tuple[str, ...] = (), run=run, **options) -> None:
    """Every signal of the backward in turn, on two ranks. problem: shared experts, three experts on each rank with one tile each; plan: a
    ring of two tiles, so that a group is one tile, and one program, as for the forward. No gate and up are saved but those of the shared
    experts."""
    assert plan.num_sms == 1
    workspaces, d_y = make_workspaces(problem, 2, 120.0), make_d_y(problem)
    most = max_tiles(workspaces[0].max_tokens, problem.top_k, 2, 3, plan.block_m)
    width, shared_width = problem.gate_EIH.shape[1], problem.shared[0].shape[0]
    hiddens, shared_hiddens = -(-width // plan.block_n), -(-shared_width // plan.block_n)
    shared_tiles = [-(-(part.stop - part.start) // plan.block_m) for part in problem.split(2)]

    def tasks_of_first_group() -> list[int]:
        return [int(w.scratch["groups"][groups.HEADER.value + groups.TASKS.value]) for w in workspaces]

    def calls():
        kept = [torch_saved(problem, part) for part in problem.split(2)]
        call = lambda **lose: run(problem, d_y, 2, plan, saved=kept, workspaces=workspaces, **options, **lose)  # noqa: E731
        want = call()
        return lambda **lose: assert_equal(call(**lose), want, "the call after a failure")

    call = calls()
    tasks = tasks_of_first_group()
    losses = {
        "x_ready": Lost(1, 0, 0, "x_ready", plan.parts),
        "gate_ready": Lost(0, most, 0, "gate_ready", -(-width // plan.store)),
        "d_gate_ready": Lost(1, 2 * most + 2, 2, "d_gate_ready", hiddens),
        "group_ready": Lost(0, 3 * most, 0, "group_ready", hiddens),
        "x_free": Lost(1, 4 * most + 2, 2, "x_free", tasks[1]),
        "shared_ready": Lost(0, 5 * most + 4, 0, "d_gate_ready", shared_hiddens),
        "all shared_ready": Lost(1, 5 * most + 4 + shared_tiles[1], 0, "group_ready", shared_tiles[1] * shared_hiddens),
    }
    for name in only or losses:
        if name in losses:
            check_lost_signal(call, workspaces, losses[name], limit_s)
    if not only or "group_done" in only:  # a sum of two tiles goes on when the first one's group is done
        problem.ids_TK[:] = -1
        problem.ids_TK[: 2 * plan.block_m, 0] = 3
        assert (problem.ids_TK == 3).sum() > plan.block_m
        problem.weights_TK = torch.ones(problem.ids_TK.shape)
        call = calls()
        check_lost_signal(call, workspaces, Lost(1, 4 * most + 2, 0, "group_done", tasks_of_first_group()[1]), limit_s)


def lost_signals(*names: str) -> None:
    problem, plan = Problem(9, 30, 32, 40, 6, 2, shared_width=40), replace(PLAN, num_sms=1, ring_tiles=2)
    check_lost_signals(problem, plan, 1e-3, names, deadline_s=50)


def case_lost_signal_ends_in_a_report():
    """Whichever signal gets lost: a wait gives up, every rank has the report of what was lacking, the kernel ends, and the next call is an
    ordinary one."""
    lost_signals("x_ready", "d_gate_ready", "group_ready", "x_free")


def case_more_lost_signals():
    lost_signals("gate_ready", "shared_ready", "all shared_ready", "group_done")


# ---- the executor ----


def case_equals_the_executor():
    """Where every sum is exact, the executor's bits: output and all gradients, of one rank to three, gate and up of all rows saved, of some
    and of none, in a ring smaller than the rows; then with shared experts."""
    ids = random_ids(40, range(5))
    ids[3], ids[4, 0] = -1, -1
    batch, of_shared = exact(ids, width=40, experts=5), exact(torch.zeros(40, 1).long(), experts=1, seed=1)
    want = step(None, batch)
    assert all(value.count_nonzero() > value.numel() // 8 for value in want.values())
    problem, d_y = Problem.of(batch), shared(batch.d_out)
    for ranks, rows in ((1, 64), (2, 1), (3, 0)):
        out, schedules, saved = run_layer(problem, ranks, replace(FORWARD, minibatch_tiles=1, ring_tiles=2), saved_rows=rows * BLOCK)
        assert any(int(s.num_tokens) > 2 * BLOCK for s in schedules)
        got = run(problem, d_y, ranks, replace(PLAN, ring_tiles=2), saved=saved)
        found = {"out": out, "d_x": got.d_x, "d_weights": got.d_weights, "d_gate": got.gate, "d_up": got.up, "d_down": got.down}
        equal_batches(found, want)
    problem.shared = tuple(shared(weight[0]) for weight in (of_shared.gate, of_shared.up, of_shared.down))
    leaves, shared_leaves = batch.leaves(), [weight.clone().requires_grad_() for weight in problem.shared]
    arguments = (leaves.x, leaves.ids, leaves.weights, leaves.gate, leaves.up, leaves.down)
    want_out = mok.moe(*arguments, shared=row_swiglu(leaves.x, *shared_leaves))
    want_out.backward(d_y)
    out, _, saved = run_layer(problem, 1, saved_rows=BLOCK)
    assert torch.equal(out, want_out)
    got = run(problem, d_y, saved=saved)  # its d_x is rounded once, autograd's sum of two of them three times
    for one, leaf in zip((got.d_weights, got.gate, got.up, got.down, *got.shared), (*arguments[2:], *shared_leaves), strict=True):
        assert torch.equal(one, leaf.grad)


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
