"""The backward for Hopper, a Gluon kernel, under the interpreter of `interpret_gluon.py`; the last line printed is JSON.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_backward_hopper.py [case ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

# isort: off
from interpreted_cases import Problem, shared  # before triton: sets TRITON_INTERPRET
from interpreted_backward import assert_equal, check_lost_signals, make_d_y, run, torch_saved

# isort: on
import torch
from interpret import run_cases
from interpret_gluon import Told, expect_found, interpreted

from mok.kernels import backward_hopper, forward_hopper, launch_backward
from mok.kernels.groups import D_WEIGHT, D_X, HIDDEN, SHARED_D_WEIGHT, SHARED_D_X, SHARED_HIDDEN
from mok.kernels.launch import Saved
from mok.kernels.launch_backward import BackwardPlan, Needs

TOLD = Told()
KINDS = tuple(kind.value for kind in (HIDDEN, D_X, D_WEIGHT))
SHARED_KINDS = tuple(kind.value for kind in (SHARED_HIDDEN, SHARED_D_X, SHARED_D_WEIGHT))
PLAN = BackwardPlan(num_sms=2, ring_tiles=64, group_tiles=1, parts=2, run=1)


def note(name: str, arguments: tuple, result: tuple) -> None:
    """Of every task that multiplies: its kind, whether it had been loaded for, and whether it loaded for the next one."""
    if name == "product_task":
        TOLD.add(arguments[0][0], arguments[3], result[2])


KERNEL = interpreted(backward_hopper, forward_hopper, note=note)["backward_hopper_kernel"]


def run_hopper(*arguments, **options):
    with mock.patch.object(launch_backward, "is_hopper", lambda device: True):
        return run(*arguments, kernel=KERNEL, **options)


def make_saved(problem: Problem, ranks: int, tiles: int) -> list[Saved]:
    """Gate and up of so many tiles: any numbers, in place of the forward's."""
    generator, width = torch.Generator().manual_seed(5), problem.gate_EIH.shape[1]
    made = [torch_saved(problem, part) for part in problem.split(ranks)]
    random = lambda: shared(torch.randn(tiles * 128, width, generator=generator).bfloat16())  # noqa: E731
    return [replace(kept, gate_CI=random(), up_CI=random()) for kept in made]


def same_bits(
    problem: Problem, ranks: int, plan: BackwardPlan, saved_tiles: int = 64, clamp: float | None = None, kinds=KINDS, seed: int = 0
) -> None:  # fmt: skip
    """The bits of the ordinary kernel; and loads of some tasks begin before the task, of others not. kinds: with one program, so that
    nobody is late, some of each."""
    d_y = make_d_y(problem)
    options = dict(clamp=clamp, shared_clamp=clamp, saved=make_saved(problem, ranks, saved_tiles), deadline_s=300.0)
    want = run(problem, d_y, ranks, replace(plan, prefetch=False), **options)
    TOLD.take()
    got = run_hopper(problem, d_y, ranks, plan, **options, max_delay_s=0.004, seed=seed)
    assert_equal(got, want, (ranks, plan))
    tasks = TOLD.take()
    loaded = sum(count for (_, loaded, _), count in tasks.items() if loaded)
    assert loaded == sum(count for (*_, loads), count in tasks.items() if loads), tasks
    assert 0 < loaded < tasks.total(), tasks
    for kind in kinds * (plan.num_sms == 1):
        assert any(kind == found and loaded for found, loaded, _ in tasks), (kind, tasks)


def few_rows(problem: Problem) -> Problem:
    """One expert has no rows, another one nine."""
    problem.ids_TK[problem.ids_TK == 1] = 0
    problem.ids_TK[problem.ids_TK == 2] = 0
    problem.ids_TK[:9, 0] = 2
    problem.weights_TK = torch.randn(problem.ids_TK.shape)
    return problem


def case_bits():
    """One rank and two, several programs, whole and half tiles, an expert without rows and one with few, gate and up saved."""
    same_bits(few_rows(Problem(0, 400, 384, 384, 3, 1)), 1, PLAN)
    same_bits(Problem(1, 150, 384, 512, 3, 2), 2, replace(PLAN, num_sms=1), clamp=0.5)
    same_bits(Problem(2, 100, 512, 384, 4, 2), 1, replace(PLAN, num_sms=3, group_tiles=4))


def case_small_ring():
    """Places used again, so that pulls wait, and experts cut by groups, whose sums are carried."""
    problem = Problem(3, 400, 384, 384, 3, 1)
    problem.ids_TK[:300] = 1
    problem.weights_TK = torch.randn(problem.ids_TK.shape)
    same_bits(problem, 1, replace(PLAN, ring_tiles=4))
    same_bits(few_rows(Problem(4, 300, 384, 384, 4, 1)), 2, replace(PLAN, ring_tiles=3), kinds=())


def case_gate_and_up_again():
    """Of no tile, or of some, gate and up are saved."""
    for tiles in (0, 2):
        same_bits(Problem(5, 200, 384, 512, 3, 1), 1 + tiles // 2, PLAN, saved_tiles=tiles, clamp=0.5, kinds=())


def case_shared():
    problem = Problem(6, 150, 384, 384, 2, 1, shared_width=512)
    same_bits(problem, 1, replace(PLAN, num_sms=3), kinds=SHARED_KINDS)
    same_bits(problem, 2, replace(PLAN, num_sms=1, ring_tiles=2), 1, 0.5, SHARED_KINDS)


def case_three_ranks():
    """Places used again on every rank, of some of whose tiles gate and up are saved; a rank without tokens."""
    same_bits(Problem(9, 60, 384, 384, 9, 1), 3, replace(PLAN, num_sms=1, ring_tiles=2), 1, kinds=())


def case_delays():
    """The same with one rank and two, with shared experts, and other delays."""
    for seed in range(1, 7):
        ranks = 1 + seed % 3
        problem = Problem(seed, 60, 384, 384, 3 * ranks, 1, shared_width=384 * (seed % 2))
        same_bits(problem, ranks, replace(PLAN, num_sms=2 - seed // 2 % 2, ring_tiles=2), (0, 1, 64)[seed // 2 % 3], kinds=(), seed=seed)


def case_lost_signal_ends_in_a_report():
    lost_signals("d_gate_ready")


def case_more_lost_signals():
    lost_signals("x_ready", "gate_ready", "group_ready", "x_free", "shared_ready", "all shared_ready", "group_done")


def lost_signals(*names: str) -> None:
    problem = Problem(10, 150 if "group_done" in names else 48, 384, 384, 6, 1, shared_width=384)
    check_lost_signals(problem, replace(PLAN, num_sms=1, ring_tiles=2), 1e-3, names, run_hopper, deadline_s=300.0)


def case_needs():
    """What nobody asks for is not computed; nothing else changes."""
    problem = Problem(8, 150, 384, 384, 2, 1, shared_width=384)
    d_y, saved = make_d_y(problem), make_saved(problem, 1, 64)
    whole = dict(run(problem, d_y, 1, replace(PLAN, prefetch=False), saved=saved).items())
    for needs in (Needs(x=False), Needs(weights=False), Needs(experts=False, shared=False), Needs(False, True, False, False)):
        got = dict(run_hopper(problem, d_y, 1, PLAN, saved=saved, needs=needs).items())
        assert all(torch.equal(value, whole[name]) for name, value in got.items()), needs
        count = sum((needs.x, needs.weights, 3 * needs.experts, 3 * needs.shared))
        assert len(got) == count, (needs, list(got))


def case_main_grads():
    """Added to fp32 gradients the bits of the ordinary kernel: an expert without rows, one that is cut, tiles that stick out, shared
    experts, several ranks."""
    cut = Problem(12, 400, 384, 384, 3, 1, shared_width=384)
    cut.ids_TK[:300] = 1
    cut.weights_TK = torch.randn(cut.ids_TK.shape)
    for problem, ranks, plan in ((few_rows(Problem(11, 300, 384, 512, 3, 1)), 2, PLAN), (cut, 1, replace(PLAN, ring_tiles=3))):
        d_y, saved = make_d_y(problem), make_saved(problem, ranks, 64)
        found = []
        for runner, of in ((run, replace(plan, prefetch=False)), (run_hopper, plan)):
            generator = torch.Generator().manual_seed(3)
            random = lambda weight: shared(torch.randn(weight.shape, generator=generator))  # noqa: B023, E731
            mains = tuple(random(weight) for weight in (problem.gate_EIH, problem.up_EIH, problem.down_EHI))
            of_shared = tuple(random(weight) for weight in problem.shared or ())
            before = [main.clone() for main in mains]
            TOLD.take()
            got = runner(problem, d_y, ranks, of, saved=saved, mains=mains, shared_mains=of_shared or None, deadline_s=300.0)
            assert got.gate is None and got.shared is None
            assert sum(TOLD.take().values()) > 0 or runner is run, "the ordinary kernel ran"
            empty = [expert for expert in range(problem.experts) if not (problem.ids_TK == expert).any()]
            for main, old in zip(mains, before, strict=True):
                assert not torch.equal(main, old) and all(torch.equal(main[expert], old[expert]) for expert in empty)
            found.append((got.d_x, got.d_weights, *mains, *of_shared))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), (ranks, plan)


def case_faults():
    """A ring with one stage too few, a store whose place is used too early, and stores that nothing finishes are found."""
    problem, plan = Problem(7, 64, 384, 384, 1, 1), replace(PLAN, num_sms=1)
    d_y, saved = make_d_y(problem), make_saved(problem, 1, 2)
    run_hopper(problem, d_y, 1, plan, saved=saved)
    nothing = SimpleNamespace(store_wait=lambda pending: None)
    changes = (dict(AHEAD=4), dict(tma=nothing), dict(finish_copy_engine_stores=lambda token: None))
    expect_found(backward_hopper, changes, lambda: run_hopper(problem, d_y, 1, plan, saved=saved))


if __name__ == "__main__":
    run_cases(globals(), sys.argv[1:])
