"""The forward for Hopper, a Gluon kernel, under the interpreter of `interpret_gluon.py`; the last line printed is JSON.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_hopper.py [case ...]
"""

from __future__ import annotations

import dataclasses
import sys
from unittest import mock

# isort: off
from interpreted_cases import Problem, check_lost_signals, run_layer  # before triton: sets TRITON_INTERPRET

# isort: on
import torch
from interpret import run_cases
from interpret_gluon import Told, expect_found, interpreted

from mok.kernels import forward_hopper, launch
from mok.kernels.launch import ForwardPlan
from mok.kernels.tasks import SHARED_DOWN, SHARED_UP, UP

TOLD = Told()


def note(name: str, arguments: tuple, result: tuple) -> None:
    """Of every task that multiplies: its kind, whether it had been loaded for, and whether it loaded for the next one."""
    if name == "expert_task":
        TOLD.add(arguments[0], arguments[5], result[1])


KERNEL = interpreted(forward_hopper, note=note)["forward_hopper_kernel"]


def case_bits():
    """The bits of the ordinary kernel: one rank and two, several programs, whole and half tiles, rings used again, steps that are not full,
    the fewest steps, gate and up saved; and loads of some tasks begin before the task, of others not."""
    sizes = [(150, 264, 320, 2, 2, 2, 1, 100), (160, 320, 264, 3, 2, 1, 3, None)]
    for seed, (tokens, hidden, width, experts, top_k, ranks, programs, saved_rows) in enumerate(sizes):
        same_bits(Problem(seed, tokens, hidden, width, experts, top_k), ranks, programs, saved_rows)


def case_shared_bits():
    """Likewise with shared experts, whose tiles are whole and whose rows lie in order."""
    for ranks, programs, saved_rows in [(1, 3, None), (2, 1, 100)]:
        same_bits(Problem(6, 150, 264, 264, 2, 1, shared_width=280), ranks, programs, saved_rows)


def case_gathered():
    """Likewise where one rank pulls nothing: whole and half tiles, steps that are not full, masked slots, shared experts."""
    same_bits(Problem(8, 330, 264, 320, 3, 2, masked=0.2), 1, 1, 100, gather=1)
    same_bits(Problem(9, 150, 320, 264, 2, 1, shared_width=280), 1, 3, None, gather=1)


def case_own_rows_are_gathered():
    """Likewise where several ranks pull only others' rows: tiles of one rank's rows and of several ranks', places that are used again."""
    same_bits(Problem(8, 330, 264, 320, 3, 2, masked=0.2), 2, 1, 100, gather=2)
    same_bits(Problem(9, 150, 320, 264, 2, 1, shared_width=280), 2, 2, None, gather=2)
    same_bits(Problem(7, 60, 264, 264, 9, 2), 3, 1, 200, ring_tiles=2, gather=3)


def case_three_ranks():
    """Places of the ring used again on every rank; a rank without tokens."""
    same_bits(Problem(7, 60, 264, 264, 9, 2), 3, 1, 200, ring_tiles=2)


def case_delays():
    """The same with one to three ranks, that gather or do not, with shared experts or gate and up saved, and other delays."""
    for seed in range(12):
        problem = Problem(seed, 70, 264, 264, 9, 2, shared_width=264 * (seed % 2))
        same_bits(problem, 3 - seed % 3, 1 + seed // 3 % 2, None if seed % 2 else 200, ring_tiles=2, seed=seed, gather=seed % 4)


def case_gathered_late():
    """One rank that gathers: behind an up task the loads of the next one begin, or do not, so that groups of copies are empty."""
    for seed in range(2):
        same_bits(Problem(seed, 70, 264, 264, 9, 2, shared_width=264 * seed), 1, 3, None, ring_tiles=2, seed=seed, gather=1)


def case_lost_signal_ends_in_a_report():
    lost_signals("x_ready", "x_free")


def case_more_lost_signals():
    lost_signals("h_ready", "h_free", "shared_h_ready")


def lost_signals(*names: str) -> None:
    problem = Problem(8, 60, 264, 264, 6, 1, shared_width=264)
    check_lost_signals(problem, ForwardPlan(num_sms=1, minibatch_tiles=1, ring_tiles=2), KERNEL, 1e-3, names, deadline_s=300.0)


def same_bits(
    problem: Problem, ranks: int, programs: int, saved_rows: int | None, ring_tiles: int = 4, seed: int = 0, gather: int = 0
) -> None:
    width, hidden = problem.gate_EIH.shape[1:]
    plan = ForwardPlan(num_sms=programs, minibatch_tiles=ring_tiles // 2, ring_tiles=ring_tiles, gather=gather)
    clamp = 1.0 if saved_rows else None
    options = dict(plan=plan, saved_rows=saved_rows, clamp=clamp, shared_clamp=clamp, deadline_s=300.0)
    want, schedules, kept = run_layer(problem, ranks, **options)
    TOLD.take()
    with mock.patch.object(launch, "is_hopper", lambda device: True):
        got, _, kept_too = run_layer(problem, ranks, **options, kernel=KERNEL, max_delay_s=0.004, seed=seed)
    assert torch.equal(got, want), (got != want).nonzero()[0].tolist()
    for one, other in zip(kept_too, kept, strict=True):
        if saved_rows:
            assert torch.equal(one.gate_CI, other.gate_CI) and torch.equal(one.up_CI, other.up_CI)
            if problem.shared:
                assert torch.equal(one.shared_gate_TS, other.shared_gate_TS) and torch.equal(one.shared_up_TS, other.shared_up_TS)
    if ring_tiles == 2:
        assert all(int(rows.num_tokens) > 2 * 128 for rows in schedules), "no place is used again"
    tiles = sum(int(rows.num_tokens) for rows in schedules) // 128
    ups, downs, shared_ups, shared_tiles = -(-width // 128), -(-hidden // 256), 0, 0
    if problem.shared:
        shared_ups = -(-problem.shared[0].shape[0] // 128)
        shared_tiles = sum(-(-(part.stop - part.start) // 128) for part in problem.split(ranks))
    tasks = TOLD.take()
    for kind, count in {UP: tiles * ups, SHARED_UP: shared_tiles * shared_ups, SHARED_DOWN: shared_tiles * downs}.items():
        assert sum(n for (found, *_), n in tasks.items() if found == kind.value) == count, tasks
    assert tasks.total() == tiles * (ups + downs) + shared_tiles * (shared_ups + downs), tasks
    loaded = sum(count for (_, loaded, _), count in tasks.items() if loaded)
    assert loaded == sum(count for (*_, loads), count in tasks.items() if loads)
    assert 0 < loaded < tasks.total(), tasks
    if problem.shared and programs == 1:  # nobody is late
        assert any(kind == SHARED_UP.value and loaded for kind, loaded, _ in tasks), tasks
        assert any(kind == SHARED_DOWN.value and loaded for kind, loaded, _ in tasks), tasks


def case_faults():
    """A ring with one stage too few, a store that nothing finishes, and gathered rows that nobody waits for are found."""
    problem = Problem(4, 64, 264, 264, 1, 1)
    plan = ForwardPlan(num_sms=1, minibatch_tiles=2, ring_tiles=4)
    run_layer(problem, 1, plan, kernel=KERNEL)
    changes = (dict(AHEAD=4), dict(finish_copy_engine_stores=lambda token: None))
    expect_found(forward_hopper, changes, lambda: run_layer(problem, 1, plan, kernel=KERNEL))
    with mock.patch.object(launch, "is_hopper", lambda device: True):
        plan = dataclasses.replace(plan, gather=1)
        expect_found(forward_hopper, [dict(gathers_are_in=lambda groups: None)], lambda: run_layer(problem, 1, plan, kernel=KERNEL))


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
