"""Waits that end, in both kinds of kernels: a task that is lost on one rank is named on every rank; and what waits needs only tasks of
earlier tickets, so that more programs than fit on the device end, too."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from collections.abc import Callable
from dataclasses import dataclass, replace

from virtual import DEVICE
from virtual_backward import Group, Shares, listed, many_rows

from mok.fabric import FabricError
from mok.kernels import launch, launch_backward
from mok.kernels.groups import AT, AT_TILE, D_WEIGHT, EXPECTED, HIDDEN, KIND, OF_GROUP, PULL
from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_backward import BackwardPlan
from mok.kernels.tasks import END, UP

SAVED_ROWS = 1000  # of some tiles gate and up are computed again
LIMIT_S = 2.0
PATIENT_S = 60.0  # of the rank that only waits for the other one: whose report it is must not depend on who is faster
HOPPER = torch.cuda.get_device_capability() == (9, 0)
KERNELS = ["ordinary", pytest.param("hopper", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"))]


def plans(kernel: str) -> tuple[ForwardPlan, BackwardPlan]:
    """With small rings, whose places are used again."""
    prefetch = kernel == "hopper"
    forward = ForwardPlan(minibatch_tiles=4, ring_tiles=8, prefetch=prefetch)
    return forward, BackwardPlan(ring_tiles=8, group_tiles=2, run=1, prefetch=prefetch)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """How often kernels for Hopper were launched."""
    count = [0]
    if HOPPER:
        from mok.kernels import backward_hopper, forward_hopper

        for module in (backward_hopper, forward_hopper):

            def counted(*arguments, real=module.launch):
                count[0] += 1
                real(*arguments)

            monkeypatch.setattr(module, "launch", counted)
    return count


def equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object) -> None:
    assert got.keys() == want.keys(), what
    for name, value in want.items():
        differs = (got[name] != value).flatten(1).any(1).nonzero()
        assert not len(differs), (what, name, len(differs), int(differs[0]))


# ---- a task that is lost ----


@dataclass
class Lost:
    """A list without one task: what is patched to write it, and what may be reported."""

    target: object
    name: str
    write: Callable[..., None]
    reports: set[str]


def without_one_up(group: Group) -> Lost:
    """Rank 1's list of the forward without one slice of the last tile's h, for which the tile's down tasks wait."""
    tasks = group.workspaces[1].scratch["tasks"].tolist()
    tasks = tasks[1 : 1 + tasks[0]]
    tile = max(task >> 32 for task in tasks if task & 7 == UP.value)  # nobody uses its places again
    ups = [i for i, task in enumerate(tasks) if task & 7 == UP.value and task >> 32 == tile]
    del tasks[ups[1]]
    changed = torch.tensor([len(tasks), *tasks, END.value], device=DEVICE)
    real = launch.write_tasks

    def write(workspace, args, rows, plan):
        real(workspace, args, rows, plan)
        args["tasks_ptr"][: len(changed)].copy_(changed)

    report = f"rank 1, task {tile}: waited for h_ready, expected {len(ups)}, found {len(ups) - 1}"
    return Lost(launch, "write_tasks", write, {report})


def without_one_hidden(group: Group) -> Lost:
    """Rank 1's list of the backward with one slice of the last tile's d_gate replaced by a pull that has been done. The tile's d_x waits
    for it, and so do its group's weight gradients; any of them may be the first to give up."""
    records = listed(group.workspaces[1]).tolist()
    of_kind = lambda kind: [record for record in records if record[KIND.value] == kind.value]  # noqa: E731
    tile = max(record[AT_TILE.value] for record in of_kind(HIDDEN))  # nobody uses its places again
    hiddens = [record for record in of_kind(HIDDEN) if record[AT_TILE.value] == tile]
    idx = hiddens[1][OF_GROUP.value]
    (slices,) = {record[EXPECTED.value] for record in of_kind(D_WEIGHT) if record[OF_GROUP.value] == idx}
    pull = next(record for record in of_kind(PULL) if record[AT_TILE.value] == tile)
    hiddens[1][:] = pull
    hiddens[1][AT.value] = -1  # its place is free
    changed = torch.tensor(records, dtype=torch.int32, device=DEVICE).flatten()
    real = launch_backward.Order.write

    def write(order, programs):
        real(order, programs)
        order.tables["list_ptr"][: len(changed)].copy_(changed)

    of_tile = f"rank 1, task {tile}: waited for d_gate_ready, expected {len(hiddens)}, found {len(hiddens) - 1}"
    of_group = f"rank 1, task {idx}: waited for group_ready, expected {slices}, found {slices - 1}"
    return Lost(launch_backward.Order, "write", write, {of_tile, of_group})


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lose", [without_one_up, without_one_hidden])
def test_a_task_lost_on_one_rank_is_named_on_every_rank(lose, kernel, launches):
    problem, d_y = many_rows()
    forward, backward = plans(kernel)
    group = Shares(problem, d_y, 2, backward, saved_rows=SAVED_ROWS, forward_plan=forward)
    first = group.run()
    assert bool(launches[0]) == (kernel == "hopper")
    lost = lose(group)
    group.workspaces[0].timeout_s, group.workspaces[1].timeout_s = PATIENT_S, LIMIT_S
    torch.cuda.synchronize()
    start = time.monotonic()
    for rank, stream in enumerate(group.streams):
        with torch.cuda.stream(stream), pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(lost.target, lost.name, lost.write)
            group.one_rank(rank)
    torch.cuda.synchronize()
    assert time.monotonic() - start < PATIENT_S / 3
    told = []
    for rank, workspace in enumerate(group.workspaces):
        workspace.timeout_s = PATIENT_S
        with pytest.raises(FabricError) as error:
            workspace.check()
        told.append(str(error.value).split("; ")[0])
        assert error.value.ranks == (1,) and told[-1] in lost.reports, (rank, str(error.value), lost.reports)
        workspace.check()  # it is told once
    assert told[0] == told[1]
    equal(group.run(), first, "after a failure")


# ---- more programs than are resident ----


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_programs_that_are_not_resident_are_not_needed(ranks, kernel, launches):
    """Four programs for every multiprocessor, of which it holds one; or one for every rank, while another rank's are there."""
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    programs = 4 * sms if ranks == 1 else sms
    problem, d_y = many_rows()
    forward, backward = plans(kernel)
    want = Shares(problem, d_y, ranks, backward, saved_rows=SAVED_ROWS, forward_plan=forward).run()
    forward, backward = replace(forward, num_sms=programs), replace(backward, num_sms=programs)
    group = Shares(problem, d_y, ranks, backward, saved_rows=SAVED_ROWS, forward_plan=forward)
    for repeat in range(4):
        equal(group.run(delay=bool(repeat % 2)), want, repeat)
    assert bool(launches[0]) == (kernel == "hopper")
