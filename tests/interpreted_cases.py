"""The real kernels under the interpreter; one process runs all cases and prints one JSON object {case: "" or traceback}.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_cases.py [case ...]
"""

# ruff: noqa: E402
from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import os
import random
import re
import sys

os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.abspath(__file__))]

import torch
from interpret import run_cases, run_concurrently
from torch import Tensor

from mok import reference
from mok import schedule as host_schedule
from mok.fabric import FabricError
from mok.kernels import launch, memory, signals
from mok.kernels import schedule as device_schedule
from mok.kernels.combine import combine
from mok.kernels.forward import forward_kernel
from mok.kernels.launch import ForwardPlan, Workspace
from mok.kernels.tasks import DOWN, END, UP, max_tickets, most_in_two_minibatches, tasks_kernel

CPU = torch.device("cpu")
BLOCK = 16  # tile height, slice width and depth of a step in these tests
SIZES = dict(block_m=BLOCK, block_n=BLOCK, block_k=BLOCK, block_h=32)
PLAN = ForwardPlan(num_sms=2, minibatch_tiles=2, ring_tiles=4, parts=2, num_warps=1, **SIZES)


def shared(tensor: Tensor) -> Tensor:
    return tensor.contiguous().share_memory_()


class Problem:
    """Random tokens, routes and weights of a whole group; `split` deals them to R ranks."""

    def __init__(self, seed: int, tokens: int, hidden: int, width: int, experts: int, top_k: int, masked=0.1, shared_width=0):
        g = torch.Generator().manual_seed(seed)
        bf16 = lambda *shape, scale=1.0: shared((torch.randn(*shape, generator=g) * scale).bfloat16())  # noqa: E731
        self.experts, self.top_k, self.hidden = experts, top_k, hidden
        self.x_TH = bf16(tokens, hidden)
        chosen = [torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]
        self.ids_TK = torch.stack(chosen) if tokens else torch.zeros(0, top_k).long()
        self.ids_TK[torch.rand(tokens, top_k, generator=g) < masked] = -1
        self.weights_TK = torch.randn(tokens, top_k, generator=g)
        self.weights_TK[self.ids_TK < 0] = float("nan")
        self.gate_EIH, self.up_EIH = (bf16(experts, width, hidden, scale=hidden**-0.5) for _ in range(2))
        self.down_EHI = bf16(experts, hidden, width, scale=width**-0.5)
        self.shared = None
        if shared_width:
            self.shared = (
                bf16(shared_width, hidden, scale=hidden**-0.5), bf16(shared_width, hidden, scale=hidden**-0.5),
                bf16(hidden, shared_width, scale=shared_width**-0.5),
            )  # fmt: skip

    @staticmethod
    def of(batch) -> Problem:
        """A batch of the tests of the layer (`layers.Batch`)."""
        made = Problem.__new__(Problem)
        made.experts, made.top_k, made.hidden = batch.experts, batch.ids.shape[1], batch.x.shape[1]
        made.x_TH, made.ids_TK, made.weights_TK = shared(batch.x), batch.ids, batch.weights
        made.gate_EIH, made.up_EIH, made.down_EHI, made.shared = shared(batch.gate), shared(batch.up), shared(batch.down), None
        return made

    def split(self, ranks: int) -> list[slice]:
        """Uneven parts; with three ranks or more the last but one has no token."""
        tokens = self.x_TH.shape[0]
        if ranks >= 3:
            edges = [tokens * r // (ranks - 1) for r in range(ranks - 1)]
            edges = [*edges, edges[-1], tokens]
        else:
            edges = [0, *[tokens * (2 * r - 1) // (2 * ranks - 1) for r in range(1, ranks)], tokens]
        return [slice(a, b) for a, b in itertools.pairwise(edges)]

    def expected(self, clamp: float | None = None, shared_clamp: float | None = None) -> Tensor:
        shared_out = reference.swiglu(self.x_TH, *self.shared, shared_clamp) if self.shared else None
        return reference.moe(
            self.x_TH, self.ids_TK, self.weights_TK, self.gate_EIH, self.up_EIH, self.down_EHI, shared=shared_out, clamp=clamp
        )  # fmt: skip


def make_workspaces(problem: Problem, ranks: int) -> list[Workspace]:
    most = max(part.stop - part.start for part in problem.split(ranks))
    views = memory.virtual_memory(memory.regions(most, problem.hidden, problem.experts, problem.top_k, ranks), ranks, CPU)
    made = [Workspace(view, most, problem.hidden, problem.top_k, CPU, 120.0, num_sms=2) for view in views]
    for workspace in made:
        workspace.memory.own["combine"].fill_(float("nan"))
        workspace.memory.own["x"].fill_(float("nan"))
    return made


def share_new(workspace: Workspace) -> None:
    """Scratch that no call has used yet: where programs can share it, floats poisoned, numbers zero."""
    for buffer in workspace.scratch.values():
        if not buffer.is_shared():
            buffer.share_memory_().fill_(float("nan") if buffer.is_floating_point() else 0)


class Ended(FabricError):
    """A call gave up. Every rank's report with its own record, and the error that every rank raised."""

    def __init__(self, reports: list, errors: list[FabricError]) -> None:
        super().__init__(str(errors[0]), errors[0].ranks)
        self.reports, self.errors = reports, errors


def end_call(workspaces: list[Workspace], meet: bool) -> None:
    """The barrier behind a kernel, and every rank's look at what ended the call, which clears it."""
    if meet and len(workspaces) > 1:
        views = [w.memory for w in workspaces]
        arguments = [dict(control_ptrs=v.addresses["control"], rank=v.rank, limit=10**6, R=len(views), LANES=4) for v in views]
        run_concurrently(signals.barrier_kernel, 1, arguments)
    reports, errors = [w.memory.failure() for w in workspaces], []
    for workspace in workspaces:
        try:
            workspace.check()
        except FabricError as error:
            errors.append(error)
    if errors:
        assert len(errors) == len(workspaces), f"some ranks heard nothing of {errors}"
        raise Ended(reports, errors)


def make_schedules(problem: Problem, workspaces: list[Workspace], height: int = BLOCK) -> list[device_schedule.DeviceSchedule]:
    ranks, made = len(workspaces), []
    for workspace, part in zip(workspaces, problem.split(ranks), strict=True):
        device_schedule.sort_slots(workspace.memory, problem.ids_TK[part].contiguous(), problem.experts)
    for workspace in workspaces:
        local = len(host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank))
        tiles = device_schedule.max_tiles(workspace.max_tokens, problem.top_k, ranks, local, height)
        rows = device_schedule.empty_schedule(tiles, local, CPU, height)
        device_schedule.write_rows(workspace.memory, rows, problem.experts, 2, height)
        made.append(rows)
    return made


def run_layer(
    problem: Problem, ranks: int, plan: ForwardPlan = PLAN, clamp: float | None = None, shared_clamp: float | None = None,
    saved_rows: int | None = None, lose=None, rings: list[Tensor] | None = None, kernel=forward_kernel,
    workspaces: list[Workspace] | None = None, **disturb,
) -> tuple[Tensor, list, list]:  # fmt: skip
    """The whole layer on R virtual ranks, the programs of all ranks at the same time. -> (out of all tokens, schedules, saved).

    rings takes every rank's h. lose(launches): the address of a signal that gets lost. workspaces: those of earlier calls, with what these
    left in them; the ranks then also meet at the end.
    """
    again, workspaces = workspaces is not None, workspaces or make_workspaces(problem, ranks)
    schedules = make_schedules(problem, workspaces, plan.block_m)
    launches, shared_outs, saved = [], [], []
    for workspace, rows, part in zip(workspaces, schedules, problem.split(ranks), strict=True):
        local = host_schedule.local_experts(problem.experts, ranks, workspace.memory.rank)
        x = shared(problem.x_TH[part].clone())
        workspace.memory.own["x"][: x.shape[0]] = x
        mine = slice(local.start, local.stop)
        arguments, kept, out = launch.kernel_arguments(
            workspace, rows, x, problem.gate_EIH[mine], problem.up_EIH[mine], problem.down_EHI[mine], problem.shared, clamp, shared_clamp,
            saved_rows or 0, saved_rows is not None, plan, problem.hidden, problem.gate_EIH.shape[1],
        )  # fmt: skip
        share_new(workspace)
        for tensor in [out, *(vars(kept).values() if kept else ())]:
            if tensor is not None:
                tensor.share_memory_().fill_(float("nan"))
        launch.write_tasks(workspace, arguments, rows, plan)
        launches.append(arguments)
        shared_outs.append(out)
        saved.append(kept)
    run_concurrently(kernel, plan.num_sms, launches, lost=lose and lose(launches), **disturb)
    end_call(workspaces, meet=again)
    if rings is not None:
        rings += [workspace.scratch["h_ring"].view(-1, problem.gate_EIH.shape[1]) for workspace in workspaces]
    outs = [
        combine(w.memory.own["combine"], problem.ids_TK[part], problem.weights_TK[part], problem.experts, out)
        for w, part, out in zip(workspaces, problem.split(ranks), shared_outs, strict=True)
    ]
    return torch.cat(outs), schedules, saved


def assert_close(out: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(out.float()).all(), "not finite"
    error = (out.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1).clamp(min=1e-3)
    assert float(error.max()) < 8e-3, f"relative error {float(error.max()):.2e} in row {int(error.argmax())}"


def case_schedule():
    """The device's rows are those of mok.schedule: masked slots, experts that R does not divide, a rank without tokens, some blocks, and
    more of them, and of experts, than are scanned at a time."""
    sizes = [(37, 8, 2, 1), (700, 5, 3, 2), (64, 7, 4, 3), (0, 3, 1, 2), (300, 1, 1, 1), (9, 2, 2, 4), (8400, 40, 4, 1)]
    for seed, (tokens, experts, top_k, ranks) in enumerate(sizes):
        problem = Problem(seed, tokens, 16, 16, experts, top_k, masked=0.3)
        workspaces = make_workspaces(problem, ranks)
        got = make_schedules(problem, workspaces)
        routes = [host_schedule.sort_routes(problem.ids_TK[part], experts) for part in problem.split(ranks)]
        counts = torch.stack([r.counts for r in routes])
        for rank in range(ranks):
            local = host_schedule.local_experts(experts, ranks, rank)
            want = host_schedule.build_schedule(counts, [r.order for r in routes], local, BLOCK)
            rows = int(want.num_tokens)
            for name in ("num_tokens", "tokens_per_expert", "routes_per_expert"):
                assert torch.equal(getattr(got[rank], name), getattr(want, name)), (seed, rank, name)
            for name, count in (("peer_rank", rows), ("peer_token_idx", rows), ("tile_expert", rows // BLOCK)):
                assert torch.equal(getattr(got[rank], name)[:count], getattr(want, name)), (seed, rank, name)


def case_schedule_example():
    """The four numbers of the module's text."""
    ids = torch.tensor([[2], [0], [2], [2]])
    view = memory.virtual_memory(memory.regions(4, 8, 3, 1, 1), 1, CPU)[0]
    device_schedule.sort_slots(view, ids, 3)
    rows = device_schedule.empty_schedule(device_schedule.max_tiles(4, 1, 1, 3, 2), 3, CPU, 2)
    device_schedule.write_rows(view, rows, 3, 1, 2)
    assert view.own["counts"].tolist() == [1, 0, 3] and view.own["starts"].tolist() == [0, 1, 1]
    assert view.own["order"].tolist() == [1, 0, 2, 3]
    assert rows.peer_rank[:6].tolist() == [0, -1, 0, 0, 0, -1] and rows.peer_token_idx[:6].tolist() == [1, 0, 0, 2, 3, 0]
    assert rows.tile_expert[:3].tolist() == [0, 2, 2]


def case_expert_id_out_of_range():
    """An id of E or -7 names the slot, is treated as masked, and the next call is an ordinary one."""
    for wrong in (3, -7):
        ids = torch.tensor([[2], [wrong], [0]])
        view = memory.virtual_memory(memory.regions(3, 8, 3, 1, 1), 1, CPU)[0]
        workspace = Workspace(view, 3, 8, 1, CPU, num_sms=1)
        device_schedule.sort_slots(view, ids, 3)
        assert view.own["counts"].tolist() == [1, 0, 1]
        try:
            workspace.check()
            raise AssertionError("no error")
        except ValueError as error:
            assert f"slot 1 of rank 0 is {wrong}" in str(error), error
        workspace.check()


def decode_all(experts, shared_tiles, tiles, parts, ups, downs, shared_ups) -> list[tuple[int, int, int]]:
    """The list as the device writes it, for the expert of every tile; some tiles are half tiles."""
    num_tiles = len(experts)
    most = max_tickets(num_tiles, shared_tiles, parts, ups, downs, shared_ups)
    tasks, signals = torch.full((2 + most,), -1, dtype=torch.int64), torch.ones(300, dtype=torch.int32)
    real = [1 + 5 * t % BLOCK for t in range(max(num_tiles, 1))]  # rows of a tile
    peer_rank = torch.stack([torch.where(torch.arange(BLOCK) < count, 0, -1) for count in real]).int()
    tile_expert = torch.tensor([*experts, 0], dtype=torch.int32)
    tasks_kernel[(2, 2)](
        tasks, signals, tile_expert, peer_rank, torch.tensor([num_tiles * BLOCK], dtype=torch.int32),
        300, shared_tiles * BLOCK, TILES=tiles, PARTS=parts, UPS=ups, DOWNS=downs, SHARED_UPS=shared_ups, BLOCK_M=BLOCK, HALF_TILES=True,
        BLOCK=16,
    )  # fmt: skip
    count, *listed = tasks.tolist()
    assert count == most and listed[count] == END.value and not signals.any()
    split = [(task & 7, task >> 32, task >> 4 & 4095, task >> 16 & 65535, task >> 3 & 1) for task in listed[:count]]
    for kind, tile, _, expert, half in split:
        routed = kind in (UP.value, DOWN.value)
        assert expert == (experts[tile] if routed else 0) and half == (routed and real[tile] <= BLOCK // 2)
    return [task[:3] for task in split]


def starts(experts, tiles) -> list[int]:
    """Where minibatches begin, by the words of `minibatch_start`."""
    begins = [t for t in range(1, len(experts)) if experts[t] != experts[t - 1]] + [len(experts)]
    found = [0]
    for goal in range(tiles, len(experts), tiles):
        near = [t for t in begins if abs(t - goal) <= tiles // 4]
        found.append(min(near, key=lambda t: (abs(t - goal), t), default=goal))
    return [start for start in found if start < len(experts)] + [len(experts)]


def case_ticket_order():
    """Every task once, no task before what it waits for, minibatch by minibatch, for many sizes; and the examples of the module's text."""
    pull, up, down, shared_up, shared_down = range(1, 6)
    got = decode_all([3] * 3, 0, 2, 1, 1, 1, 0)
    assert " ".join(f"{'-PUD'[kind]}{tile}" for kind, tile, _ in got) == "P0 P1 P2 U0 U1 U2 D0 D1 D2", got
    assert starts([0] * 3 + [1] * 6 + [2] * 3, 4) == [0, 3, 9, 12]
    pick = random.Random(5)
    for tiles, parts, ups, downs, shared_ups in [(2, 1, 1, 1, 0), (4, 2, 3, 5, 2), (3, 4, 1, 2, 1), (8, 4, 2, 1, 1), (1, 2, 2, 2, 0)]:
        for num_tiles in (0, 1, tiles - 1, tiles, tiles + 1, 2 * tiles, 3 * tiles - 1, 5 * tiles, 5 * tiles + 1):
            for shared_tiles, chance in ((0, 0.0), (3, 0.2), (1, 0.7)) if shared_ups else ((0, 0.1), (0, 0.5)):
                experts = list(itertools.accumulate(pick.random() < chance for _ in range(num_tiles)))
                order = decode_all(experts, shared_tiles, tiles, parts, ups, downs, shared_ups)
                want = [(kind, t, p) for kind, n in ((pull, parts), (up, ups), (down, downs)) for t in range(num_tiles) for p in range(n)]
                of_shared = ((shared_up, shared_ups), (shared_down, downs))
                want += [(kind, t, p) for kind, n in of_shared for t in range(shared_tiles) for p in range(n)]
                assert sorted(order) == sorted(want), (experts, shared_tiles, tiles)
                place = {task: i for i, task in enumerate(order)}
                ring = most_in_two_minibatches(tiles)  # the smallest ring
                for (kind, t, _), i in place.items():
                    needs = []
                    if kind == pull and t >= ring:
                        needs = [(up, t - ring, p) for p in range(ups)]
                    elif kind == up:
                        needs = [(pull, t, p) for p in range(parts)] + ([(down, t - ring, p) for p in range(downs)] if t >= ring else [])
                    elif kind == down:
                        needs = [(up, t, p) for p in range(ups)]
                    elif kind == shared_down:
                        needs = [(shared_up, t, p) for p in range(shared_ups)]
                    assert all(place[need] < i for need in needs), (kind, t, experts, tiles)
                cuts = starts(experts, tiles)
                for kind in (up, down):
                    found = [(t, p) for k, t, p in order if k == kind]
                    count = ups if kind == up else downs
                    assert found == [(t, p) for a, b in itertools.pairwise(cuts) for p in range(count) for t in range(a, b)]


def case_one_matrix_for_gate_and_up():
    """Gate and up may be one and the same tensor, of routed and of shared experts."""
    problem = Problem(5, tokens=20, hidden=32, width=32, experts=2, top_k=2, shared_width=32)
    problem.up_EIH = problem.gate_EIH
    problem.shared = (problem.shared[0], problem.shared[0], problem.shared[2])
    out, _, _ = run_layer(problem, 1)
    assert_close(out, problem.expected())


def case_gate_and_up_far_apart():
    """A descriptor's stride has fewer bits than an address."""
    map_at = ctypes.CDLL(None).mmap
    map_at.restype, map_at.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    places = [map_at(place, 4096, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
              for place in (0x100000000000, 0x200000000000)]  # fmt: skip
    first, second = (torch.frombuffer((ctypes.c_byte * 2048).from_address(place), dtype=torch.bfloat16).view(32, 32) for place in places)
    assert second.data_ptr() - first.data_ptr() >= launch.MAX_STRIDE
    first.fill_(1)
    second.fill_(2)
    for pair in ((first, second), (second, first)):
        descriptor, first_comes_first = launch._pair(*pair, 16, 16)
        assert descriptor.strides[0] * 2 < launch.MAX_STRIDE
        both = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides)
        assert torch.equal(both, torch.stack(pair if first_comes_first else pair[::-1]))


def case_combine():
    """Only ordered sums: bit for bit; masked slots are not read, NaN weights there do not matter. And the example of the text."""
    g = torch.Generator().manual_seed(3)
    y, shared_out = torch.randn(7 * 3, 40, generator=g).bfloat16(), torch.randn(7, 40, generator=g).bfloat16()
    ids, weights = torch.randint(0, 5, (7, 3), generator=g), torch.randn(7, 3, generator=g)
    ids[2, 1] = ids[4] = -1
    weights[ids < 0] = float("nan")
    y.view(7, 3, 40)[ids < 0] = float("nan")
    for base in (None, shared_out):
        want = torch.zeros(7, 40) if base is None else base.float()
        for k in range(3):
            want = torch.where(ids[:, k : k + 1] >= 0, want + weights[:, k : k + 1] * y.view(7, 3, 40)[:, k].float(), want)
        assert torch.equal(combine(y, ids, weights, 5, base), want.bfloat16())
    y = torch.tensor([[4.0] * 8, [1.0] * 8]).bfloat16()
    w, base = torch.tensor([[0.5, 2.0]]), torch.full((1, 8), 3.0).bfloat16()
    assert combine(y, torch.tensor([[0, 5]]), w, 6, base)[0, 0] == 7 and combine(y, torch.tensor([[5, -1]]), w, 6, base)[0, 0] == 5


def case_barrier():
    """Three ranks, delays, three barriers in a row; then one rank stays away and the others report it."""
    views = memory.virtual_memory(memory.regions(1, 16, 1, 1, 3), 3, CPU)
    launches = [dict(control_ptrs=v.addresses["control"], rank=v.rank, limit=10**6, R=3, LANES=4) for v in views]
    for turn in range(3):
        run_concurrently(signals.barrier_kernel, 1, launches, max_delay_s=0.02, seed=turn)
    assert [v.own["control"][memory.EPOCH].item() for v in views] == [3, 3, 3]
    run_concurrently(signals.barrier_kernel, 1, [dict(a, limit=2000) for a in launches[:2]])
    reports = [v.failure() for v in views]
    assert reports[0][0] == reports[1][0] and reports[0][0]["rank"] in (0, 1) and reports[2] is None, reports
    for rank, (_, own) in enumerate(reports[:2]):
        assert own == dict(rank=rank, task=2, what=0, expected=4, found=3), reports


def case_forward_ranks():
    """R = 1, 2, 3 ranks, ring smaller than the rows, masked slots, uneven tokens: near the reference, and the same bits for every R."""
    problem = Problem(1, 75, 48, 40, 5, 3)
    expected, first = problem.expected(), None
    for ranks in (1, 2, 3):
        out, schedules, _ = run_layer(problem, ranks)
        assert any(int(s.num_tokens) > PLAN.ring_tiles * BLOCK for s in schedules), "the ring is not smaller than the rows"
        assert_close(out, expected)
        first = out if first is None else first
        assert torch.equal(out, first), ranks


def case_forward_delays():
    """Twenty seeds of random delays at every atomic operation, places of the ring used again on every rank, with shared experts and rows
    saved in some: the same bits."""
    plan = dataclasses.replace(PLAN, minibatch_tiles=1, ring_tiles=2, num_sms=3)
    plans = [plan, dataclasses.replace(plan, num_sms=2, parts=1), dataclasses.replace(plan, num_sms=1)]
    for shared_width in (0, 24):
        problem = Problem(0, 56, 32, 32, 3, 2, shared_width=shared_width)
        first, _, (kept,) = run_layer(problem, 1, saved_rows=12 * BLOCK)
        assert_close(first, problem.expected())
        for seed in range(shared_width > 0, 20, 2):
            ranks, saved_rows = 1 + seed // 2 % 3, (None, 40, 12 * BLOCK)[seed // 2 % 4 % 3]
            out, schedules, saved = run_layer(problem, ranks, plans[seed // 2 % 5 % 3], saved_rows=saved_rows, max_delay_s=0.003, seed=seed)
            assert torch.equal(out, first), seed
            assert all(int(s.num_tokens) > 2 * BLOCK for s in schedules), "no place is used again"
            place = 0  # a rank's rows among those of one rank alone
            for rows, mine in zip(schedules, saved, strict=True):
                count = min(int(rows.num_tokens), saved_rows or 0)
                for name in ("gate_CI", "up_CI") if saved_rows else ():
                    assert torch.equal(getattr(mine, name)[:count], getattr(kept, name)[place : place + count]), (seed, name)
                place += int(rows.num_tokens)


def case_forward_knobs():
    """Minibatch, ring, parts and programs move no bit."""
    problem = Problem(3, 60, 32, 48, 3, 2, shared_width=24)
    first, _, _ = run_layer(problem, 1)
    assert_close(first, problem.expected())
    small, large = dict(minibatch_tiles=1, ring_tiles=2), dict(minibatch_tiles=3, ring_tiles=9, parts=1)
    for changes in (small, large, dict(parts=4, num_sms=3), dict(num_sms=1)):
        out, _, _ = run_layer(problem, 2, dataclasses.replace(PLAN, **changes))
        assert torch.equal(out, first), changes


def case_forward_shared_clamp_saved():
    """A wider shared expert, clamps, and gate and up of the first rows saved as they were used; nothing beyond C is written."""
    problem = Problem(4, 50, 32, 48, 4, 2, masked=0.0, shared_width=80)
    for clamp, shared_clamp in ((None, None), (0.25, 0.5)):
        out, schedules, saved = run_layer(problem, 1, clamp=clamp, shared_clamp=shared_clamp, saved_rows=40)
        assert_close(out, problem.expected(clamp, shared_clamp))
        gate, rows = saved[0].gate_CI, schedules[0]
        token = rows.peer_token_idx[:40].long() // 2
        x = torch.where(rows.peer_rank[:40, None] >= 0, problem.x_TH[token].float(), 0)
        expert = rows.tile_expert[:3].repeat_interleave(BLOCK)[:40].long()
        for kept, weights in ((gate, problem.gate_EIH), (saved[0].up_CI, problem.up_EIH)):
            want = torch.einsum("mh,mih->mi", x, weights.float()[expert])
            assert kept.shape == (40, 48) and float((kept.float() - want).abs().max()) < 0.03
        want = problem.x_TH.float() @ problem.shared[1].float().T
        assert float((saved[0].shared_up_TS.float() - want).abs().max()) < 0.05


def case_forward_half_tiles():
    """Last tiles of 1, 63, 64, 65, 127 and 128 rows, and one of 64 after a whole one: the bits of whole tiles, saved ones too.

    Of a half tile's h the second half is neither written nor read.
    """
    height, routes = 128, [1, 63, 64, 65, 0, 127, 128, 192]
    problem = Problem(8, sum(routes) // 2, 32, 24, len(routes), 2)
    ids = torch.repeat_interleave(torch.arange(len(routes)), torch.tensor(routes))
    problem.ids_TK = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(8))].view(-1, 2)
    problem.weights_TK = torch.rand(problem.ids_TK.shape) + 0.5
    expected, first = problem.expected(clamp=0.5), None
    for ranks, half_tiles, ring in ((1, True, 8), (1, False, 8), (2, True, 8), (2, True, 4)):
        plan, rings = dataclasses.replace(PLAN, block_m=height, block_k=32, half_tiles=half_tiles, ring_tiles=ring), []
        out, schedules, saved = run_layer(problem, ranks, plan, clamp=0.5, saved_rows=1024, rings=rings)
        assert_close(out, expected)
        kept = [(k.gate_CI[: int(s.num_tokens)], k.up_CI[: int(s.num_tokens)]) for k, s in zip(saved, schedules, strict=True)]
        results = [out, *(torch.cat(part) for part in zip(*kept, strict=True))]
        first = first or results
        assert all(torch.equal(got, want) for got, want in zip(results, first, strict=True)), (ranks, half_tiles)
        padding = torch.cat([s.peer_rank[: int(s.num_tokens)] < 0 for s in schedules])
        assert not results[1][padding].any() and not results[2][padding].any()
        if ring == 8:
            h = torch.cat([h[: int(s.num_tokens)] for h, s in zip(rings, schedules, strict=True)]).view(-1, 2, height // 2, 24)
            empty = padding.view(-1, 2, height // 2).all(dim=2)
            assert empty.sum() == 4 and torch.equal(h.isnan().all(dim=(2, 3)), empty & half_tiles)


def case_forward_extremes():
    """All masked, all to one expert, no tokens, K larger than a rank's experts, widths that are no multiple of a slice."""
    for ids, tokens in ((-1, 20), (2, 50), (None, 0)):
        problem = Problem(5, tokens, 24, 56, 3, 2, masked=0.0)
        if ids is not None:
            problem.ids_TK.fill_(ids)
            problem.weights_TK = torch.rand(tokens, 2)
        for ranks in (1, 2):
            out, _, _ = run_layer(problem, ranks)
            assert out.shape == problem.x_TH.shape
            if ids == -1:
                assert not out.any()
            elif tokens:
                assert_close(out, problem.expected())


def case_nan_stays_in_its_token():
    problem = Problem(6, 40, 32, 32, 4, 2)
    clean, _, _ = run_layer(problem, 2, clamp=2.0)
    problem.ids_TK[11] = torch.tensor([1, 3])
    problem.weights_TK[11] = 1.0
    clean, _, _ = run_layer(problem, 2, clamp=2.0)
    problem.x_TH[11, 5] = float("nan")
    out, _, _ = run_layer(problem, 2, clamp=2.0)
    assert torch.isnan(out[11].float()).all()
    others = torch.arange(40) != 11
    assert torch.equal(out[others], clean[others])


@dataclasses.dataclass(frozen=True)
class Lost:
    """A signal of a rank that gets lost, counted from the first one of the kernel, and the report of who waits for it."""

    rank: int
    signal: int
    task: int
    what: str
    expected: int


def check_lost_signal(call, workspaces: list[Workspace], lost: Lost, limit_s: float) -> None:
    """call(lose=...) gives up, every rank has the same report and raises it, and call() on the same workspaces, as it left them, gives
    results; a wait's limit is limit_s * 10^6 readings."""
    report = dict(rank=lost.rank, task=lost.task, what=memory.STATES.index(lost.what), expected=lost.expected, found=0)
    for workspace in workspaces:
        workspace.timeout_s = limit_s
    try:
        call(lose=lambda launches: launches[lost.rank]["signals_ptr"].data_ptr() + 4 * (32 + lost.signal))
    except Ended as ended:
        assert [found for found, _ in ended.reports] == [report] * len(workspaces), (lost, ended.reports)
        assert ended.reports[lost.rank][1] == report, (lost, ended.reports)
        text = f"rank {lost.rank}, task {lost.task}: waited for {lost.what}, expected {lost.expected}, found 0"
        for rank, error in enumerate(ended.errors):
            assert error.ranks == (lost.rank,) and str(error).startswith(text), error
            assert rank == lost.rank or re.search(f"; ended with it: rank {rank}, |; rank {rank} lacked nothing", str(error)), error
    else:
        raise AssertionError(f"{lost}: no error")
    for workspace in workspaces:
        workspace.timeout_s = 120.0
        for region in workspace.memory.own.values():
            if region.is_floating_point():
                region.fill_(float("nan"))
    call()


def check_lost_signals(problem: Problem, plan: ForwardPlan, kernel, limit_s: float, only: tuple[str, ...] = (), **options) -> None:
    """Every signal of the forward in turn, on two ranks. problem: shared experts, and places of the ring used again on both ranks.

    With one program per rank: among several, who waits behind the lost signal's first reader may give up before it.
    """
    assert plan.num_sms == 1
    workspaces = make_workspaces(problem, 2)
    options = dict(plan=plan, kernel=kernel, workspaces=workspaces, **options)
    want, schedules, _ = run_layer(problem, 2, **options)

    def call(**lose) -> None:
        out, _, _ = run_layer(problem, 2, **options, **lose)
        assert torch.equal(out, want), "the call after a failure gives something else"

    most, ring = schedules[0].tile_expert.numel(), plan.ring_tiles
    tiles = [int(rows.num_tokens) // plan.block_m for rows in schedules]
    assert min(tiles) > ring, tiles
    ups, downs = -(-problem.gate_EIH.shape[1] // plan.block_n), -(-problem.hidden // (2 * plan.block_n))
    last = tiles[1] - 1  # nobody pulls into its place
    losses = {
        "x_ready": Lost(1, 0, 0, "x_ready", plan.parts),
        "h_ready": Lost(1, most + last, last, "h_ready", ups),
        "x_free": Lost(0, most, ring, "x_free", ups),
        "h_free": Lost(1, 2 * most, ring, "h_free", downs),
        "shared_h_ready": Lost(0, 3 * most, 0, "h_ready", -(-problem.shared[0].shape[0] // plan.block_n)),
    }
    for name in only or losses:
        check_lost_signal(call, workspaces, losses[name], limit_s)


def case_lost_signal_ends_in_a_report():
    """Whichever signal gets lost: a wait gives up, every rank has the report of what was lacking, the kernel ends, and the next call is an
    ordinary one."""
    plan = dataclasses.replace(PLAN, num_sms=1, minibatch_tiles=1, ring_tiles=2)
    check_lost_signals(Problem(7, 30, 32, 32, 6, 2, shared_width=32), plan, forward_kernel, 1e-3, deadline_s=50)


def case_lost_signal_ends_every_program():
    """Three programs per rank, some of which may wait for what another one's end keeps from them: one report, the same on every rank."""
    problem, plan = Problem(7, 40, 32, 32, 4, 2), dataclasses.replace(PLAN, num_sms=3)
    workspaces = make_workspaces(problem, 2)
    for workspace in workspaces:
        workspace.timeout_s = 3e-3
    first_x_ready = lambda launches: launches[1]["signals_ptr"].data_ptr() + 4 * 32  # noqa: E731
    try:
        run_layer(problem, 2, plan, workspaces=workspaces, lose=first_x_ready, deadline_s=50)
        raise AssertionError("no error")
    except Ended as ended:
        assert ended.reports[0][0] == ended.reports[1][0], ended.reports
        assert re.match(r"rank 1, task 0: waited for [xh]_ready, expected \d, found 0", str(ended)), ended


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
