"""What happens when a rank dies, raises, is late, or is asked for something else than its peers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from layers import Batch, assert_equal, step, whole
from ranks import KINDS, RankFailed, run_processes, run_ranks

import mok
from mok import FabricError, Tuning
from mok.fabric import Region, host_fabric, region_offsets, run_virtual, virtual_ranks

FAST = Tuning(timeout_s=1.5)


def outcome(group, batch, tuning=FAST):
    """("ok", result) or (type, message, ranks, seconds)."""
    start = time.monotonic()
    try:
        return ("ok", step(group, batch, tuning))
    except (FabricError, ValueError, TypeError) as error:
        return (type(error).__name__, str(error), getattr(error, "ranks", None), time.monotonic() - start)


def dies(group, batch, when):
    fabric = host_fabric(group)
    step(group, batch)
    if fabric.rank == 1:
        if when == "inside":
            fabric.before = lambda task, call: os._exit(7)
        else:
            os._exit(7)
    return outcome(group, batch, Tuning(timeout_s=30))


@pytest.mark.parametrize("when", ["between", "inside"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_dead_rank_is_named_at_once(size, when):
    results = run_processes(dies, size, Batch.random(), when, allow_exit=True)
    assert results[1] == ("exit", 7)
    for rank in range(size):
        if rank != 1:
            kind, message, ranks, seconds = results[rank]
            assert kind == "FabricError" and "rank 1" in message and ranks == (1,)
            assert seconds < 10  # well before the limit of 30 s


def test_a_report_names_the_call_once():
    batch = Batch.random()
    heard, _ = run_virtual(lambda fabric: outcome(fabric, batch) if fabric.rank == 0 else None, virtual_ranks(2))
    assert heard[:2] == ("FabricError", "rank 1 has ended: rank 0 waited in forward call 1 for its arrival")


def is_late(group, batch):
    fabric = host_fabric(group)
    step(group, batch)
    if fabric.rank == 1:
        time.sleep(7)
    first = outcome(group, batch)
    return first, outcome(group, batch, Tuning(timeout_s=20))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_late_rank_is_named_and_the_next_call_works(kind, size):
    batch = Batch.random()
    results = run_ranks(kind, is_late, size, batch)
    for rank, (first, _) in enumerate(results):
        assert first[0] == "FabricError" and "rank 1" in first[1] and first[2] == (1,)
        if rank != 1:
            assert 1.0 < first[3] < 6
    assert_equal(whole([second[1] for _, second in results]), step(None, batch))


# ---- ranks that meet outside the layer after every step, as an all-reduce of gradients makes them ----


def meeting_of(kind, size):
    """For virtual ranks; processes meet in a barrier of their group."""
    return threading.Barrier(size) if kind == "virtual" else None


def meet(group, meeting):
    if meeting is None:
        dist.barrier(group)
    else:
        meeting.wait(30)


ENOUGH = Tuning(timeout_s=10)  # a tenth of it is 1 s
SHORT = Tuning(timeout_s=0.8)


def skips(group, batch, meeting):
    """Rank 1 skips step 1, and steps 4 and 5; what it comes to then, sooner than its peers or later, is their next step."""
    rank, seen = host_fabric(group).rank, []
    for i in range(9):
        meet(group, meeting)
        if rank == 1 and i in (1, 4, 5):
            seen.append(("skipped",))
            continue
        if (rank == 1 and i == 6) or (rank != 1 and i == 2):
            time.sleep(0.3)
        seen.append(outcome(group, batch, SHORT if i in (1, 4, 5) else ENOUGH))
    return seen


@pytest.mark.parametrize("kind, size", [("virtual", 3), ("processes", 2)])
def test_a_rank_that_skipped_a_call_is_back_after_one_more_step(kind, size):
    batch = Batch.random()
    results = run_ranks(kind, skips, size, batch, meeting_of(kind, size))
    for rank, seen in enumerate(results):
        kinds = ["ok"] * 9
        for i in (1, 2, 4, 5, 6):
            kinds[i] = "skipped" if rank == 1 and i in (1, 4, 5) else "FabricError"
        assert [one[0] for one in seen] == kinds, seen
        for i in (2, 6):
            _, message, ranks, seconds = seen[i]
            assert ranks == (1,) and "rank 1" in message and seconds < 5, "nobody waits as long as the limit"
            assert ("had given it up" if rank == 1 else "was late for an earlier call") in message or (rank != 1 and "gave up" in message)
    for i in (0, 3, 7, 8):
        assert_equal(whole([seen[i][1] for seen in results]), step(None, batch))


def skips_a_backward(group, batch, meeting):
    fabric = host_fabric(group)
    b, errors = batch.local(fabric.rank, fabric.size).leaves(), []
    call = lambda tuning: mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, num_experts=batch.experts, group=group, tuning=tuning)  # noqa: E731
    first, second = call(ENOUGH), call(SHORT)
    for out in (second, first):
        meet(group, meeting)
        if out is second and fabric.rank == 1:
            continue
        start = time.monotonic()
        with pytest.raises(FabricError, match="rank 1") as error:
            out.backward(b.d_out)
        assert time.monotonic() - start < 5
        errors.append(error.value.ranks)
    meet(group, meeting)
    return errors, outcome(group, batch)


def test_a_rank_that_skipped_a_backward_and_comes_to_another():
    batch = Batch.random()
    results = run_ranks("virtual", skips_a_backward, 2, batch, meeting_of("virtual", 2))
    assert [errors for errors, _ in results] == [[(1,)] * 2, [(1,)]]
    assert_equal(whole([last[1] for _, last in results]), step(None, batch))


def is_late_twice(group, batch, meeting):
    """Rank 1 is told that it was late while nobody waits for it; the next time it is late, but within the limit."""
    rank, seen = host_fabric(group).rank, []
    for late, tuning in ((1.2, SHORT), (1.6, ENOUGH)):
        meet(group, meeting)
        time.sleep(late if rank == 1 else 0)
        seen.append(outcome(group, batch, tuning))
    return seen


def test_a_rank_that_was_late_may_be_late_again_within_the_limit():
    batch = Batch.random()
    results = run_ranks("virtual", is_late_twice, 3, batch, meeting_of("virtual", 3))
    assert all(seen[0][0] == "FabricError" and seen[0][2] == (1,) for seen in results)
    assert_equal(whole([seen[1][1] for seen in results]), step(None, batch))


# ---- ranks that raise ----


def raises_between(group, batch):
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size).leaves()
    out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, num_experts=batch.experts, group=group, tuning=FAST)
    error = None
    try:
        if fabric.rank == 1:
            raise ArithmeticError("between forward and backward")
        out.backward(b.d_out)
    except (FabricError, ArithmeticError) as caught:
        error = (type(caught).__name__, str(caught))
    if fabric.rank == 1:
        time.sleep(3)  # the others find out by themselves
    return error, outcome(group, batch, Tuning(timeout_s=20))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_raises_between_forward_and_backward(kind, size):
    batch = Batch.random()
    results = run_ranks(kind, raises_between, size, batch)
    for rank, (error, _) in enumerate(results):
        assert error[0] == ("ArithmeticError" if rank == 1 else "FabricError") and (rank == 1 or "rank 1" in error[1])
    assert_equal(whole([second[1] for _, second in results]), step(None, batch))


def raises_inside(group, batch, task):
    fabric = host_fabric(group)

    def fail(now, call):
        if now == task:
            fabric.before = None
            raise MemoryError("no room")

    if fabric.rank == 0:
        fabric.before = fail
    try:
        first = outcome(group, batch, Tuning(timeout_s=10))
    except MemoryError as error:
        first = ("MemoryError", str(error))
    return first, outcome(group, batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["signal published", "wait published", "signal pushed"])
def test_a_rank_that_raises_inside_a_call(kind, task):
    batch = Batch.random()
    results = run_ranks(kind, raises_inside, 3, batch, task)
    assert results[0][0] == ("MemoryError", "no room")
    for first, _ in results[1:]:
        assert first[0] == "FabricError" and "rank 0" in first[1] and "MemoryError" in first[1] and first[3] < 5
    assert_equal(whole([second[1] for _, second in results]), step(None, batch))


def disagree(group, batch, field):
    fabric = host_fabric(group)
    bad = Batch.random(**{"tokens": 300, field: 32}) if fabric.rank == 1 else batch
    return outcome(group, bad), outcome(group, batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["hidden", "width", "experts"])
def test_disagreement_is_the_same_error_everywhere(kind, field):
    batch = Batch.random()
    results = run_ranks(kind, disagree, 2, batch, field)
    errors = {first[:2] for first, _ in results}
    assert len(errors) == 1 and next(iter(errors))[0] == "ValueError"
    assert "32" in next(iter(errors))[1]
    assert_equal(whole([second[1] for _, second in results]), step(None, batch))


def bad_argument(group, batch):
    fabric = host_fabric(group)
    bad = Batch.random()
    if fabric.rank == 1:
        bad.ids[150, 1] = batch.experts
    return outcome(group, bad), outcome(group, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_one_ranks_bad_argument_is_the_same_error_everywhere(kind):
    batch = Batch.random()
    results = run_ranks(kind, bad_argument, 3, batch)
    assert len({first[:2] for first, _ in results}) == 1
    assert results[0][0][0] == "ValueError" and "rank 1: ids has values" in results[0][0][1]
    assert_equal(whole([second[1] for _, second in results]), step(None, batch))


def loses_a_signal(fabric, batch):
    def lose(task, call):
        if task == "signal pushed" and fabric.rank == 1:
            time.sleep(6)

    fabric.before = lose
    return outcome(fabric, batch)


def test_a_lost_signal_ends_in_a_report():
    results = run_virtual(lambda fabric: loses_a_signal(fabric, Batch.random()), virtual_ranks(2))
    kind, message, ranks, seconds = results[0]
    assert kind == "FabricError" and ranks == (1,) and seconds < 4
    for words in ("rank 0", "rank 1", "combine", "pushed", "expected 1", "found 0"):
        assert words in message


def grows(group):
    fabric = host_fabric(group)
    seen = []
    for tokens in (10, 400, 30, 900):
        batch = Batch.random(tokens=tokens)
        one, mine = step(None, batch), step(group, batch)
        rows = slice(fabric.rank * tokens // fabric.size, (fabric.rank + 1) * tokens // fabric.size)
        assert_equal({"out": mine["out"]}, {"out": one["out"][rows]})
        seen.append(fabric._arena.bytes.numel())
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_to_the_largest_call_and_stays(kind):
    for seen in run_ranks(kind, grows, 2):
        assert seen == sorted(seen) and seen[1] == seen[2] < seen[3]


def test_regions_do_not_overlap():
    regions = [Region("a", (3, 5), torch.bfloat16), Region("b", (0, 4), torch.float32), Region("c", (7,), torch.int64)]
    offsets, total = region_offsets(regions)
    assert offsets == {"a": 0, "b": 256, "c": 256} and total == 512


def test_a_wrong_number_of_virtual_ranks():
    for wrong, kind, message in (("a", TypeError, "size='a': must be an int, not str"), (0, ValueError, "size=0: must be at least 1")):
        with pytest.raises(kind, match=message):
            virtual_ranks(wrong)


def test_closing_twice_and_using_after():
    fabric = virtual_ranks(1)[0]
    step(fabric, Batch.random())
    fabric.close()
    fabric.close()
    with pytest.raises(RuntimeError, match="closed"):
        step(fabric, Batch.random())


def test_region_outside_a_call():
    with pytest.raises(RuntimeError, match="inside a call"):
        virtual_ranks(1)[0].region("x")


def fails(group):
    if host_fabric(group).rank == 1:
        raise KeyError("mine")
    step(group, Batch.random(), Tuning(timeout_s=20))


def test_an_uncaught_error_ends_every_process_with_its_own_message():
    with pytest.raises(RankFailed) as caught:
        run_processes(fails, 3)
    kinds = {rank: kind for rank, (kind, _, _) in caught.value.errors.items()}
    assert kinds == {0: "FabricError", 1: "KeyError", 2: "FabricError"}


LIVES = """
import sys, torch, torch.distributed as dist
from mok.fabric import host_fabric
from torch.distributed.device_mesh import DeviceMesh
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(folder + "/meet", 2), rank=rank, world_size=2)
mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
host_fabric(dist.group.WORLD)
x = torch.ones(1000)
for _ in range(10):
    dist.all_reduce(x)
dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_processes_end_in_peace(tmp_path):
    """Collectives shortly before the end, and a mesh that outlives its group: without `_wait_at_exit` every fourth run died of it."""
    for turn in range(12):
        (tmp_path / str(turn)).mkdir()
        commands = [[sys.executable, "-c", LIVES, str(rank), str(tmp_path / str(turn))] for rank in range(2)]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
        for process in processes:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said
