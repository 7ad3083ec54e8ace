"""Recompute, repetition, failing ranks, life and death of groups and layers, and what stays in memory."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import poison
from dense import SMALL_RING, Plan, assert_steps, build, delay, dense, exact, random_ids, run_steps
from layers import Batch, assert_equal, step
from ranks import RankFailed, run_processes, run_ranks
from torch.utils.checkpoint import checkpoint

import mok
from mok import FabricError, Tuning
from mok.executor import Shape
from mok.fabric import host_fabric, region_offsets, run_virtual, virtual_ranks

CONFIG = mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=8, top_k=2, num_shared_experts=1, score="sigmoid")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors on busy cores
    yield
    torch.set_num_threads(threads)


def layer_step(layer, x, ids=None, run=None):  # type: ignore[no-untyped-def]
    """Output, all gradients and the counts of one training step; given ids go to the experts directly, without the router."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    function, arguments = (layer, (leaf,)) if ids is None else (layer.routed, (leaf, ids, torch.full(ids.shape, 0.5)))
    poison(1)
    out = function(*arguments) if run is None else run(function, *arguments)
    (out * out.detach()).sum().backward()
    gradients = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in layer.named_parameters()}
    found = {name: g.clone() for name, g in gradients.items() if g is not None}
    return {"out": out.detach(), "d_x": leaf.grad, "counts": layer.tokens_per_expert.clone(), **found}


# ---- recompute and repetition ----


def recomputed(group, x, ids, reentrant, repetitions):  # type: ignore[no-untyped-def]
    """A plain step, after checking that checkpointed ones have its bits."""
    layer = build(CONFIG, group, dtype=x.dtype)
    if ids is None:
        with torch.no_grad():
            layer.router.weight.zero_()  # all logits tied
    x, ids = (None if t is None else t.tensor_split(layer.fabric.size)[layer.fabric.rank] for t in (x, ids))
    want = layer_step(layer, x, ids)
    for repetition in range(repetitions):
        delay(group, repetition, 0.0005)
        got = layer_step(layer, x, ids, lambda f, *args: checkpoint(f, *args, use_reentrant=reentrant))
        assert_equal(got, want)
    host_fabric(group).before = None
    return want


@pytest.mark.parametrize("kind, size", [("virtual", 1), ("virtual", 4), ("processes", 2), ("processes", 4)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_has_the_bits_of_the_forward(kind, size, tied, reentrant):
    x = torch.randn(90, 16).bfloat16()
    ids = None if tied else random_ids(90, range(8))
    parts = run_ranks(kind, recomputed, size, x, ids, reentrant, 50 if kind == "virtual" else 8)
    if tied:  # equal logits choose the lowest experts
        assert all(part["counts"].tolist() == [90, 90] + [0] * 6 for part in parts)
    alone = recomputed(None, x, ids, reentrant, 0)
    for name in ("out", "d_x", "gate_EIH", "up_EIH", "down_EHI"):
        assert_equal({name: torch.cat([part[name] for part in parts])}, alone, (name,))


def repeated(group, x, repetitions):  # type: ignore[no-untyped-def]
    layer = build(CONFIG, group, dtype=x.dtype)
    x = x.tensor_split(layer.fabric.size)[layer.fabric.rank]
    want = layer_step(layer, x)
    for repetition in range(repetitions):
        delay(group, repetition, 0.002 if repetition % 10 == 0 else 0.0002)
        layer.tuning = SMALL_RING if repetition % 2 else Tuning(minibatch=256, macrobatch=256, saved_rows=0)
        assert_equal(layer_step(layer, x), want)
    host_fabric(group).before = None
    return want


@pytest.mark.parametrize("kind, size", [("virtual", 1), ("virtual", 4), ("processes", 2), ("processes", 4)])
def test_a_hundred_repetitions_of_a_layer_have_the_same_bits(kind, size):
    x = torch.randn(512, 16).bfloat16()
    x[:, 3] = 0.0  # a column of zeros
    run_ranks(kind, repeated, size, x, 100 if kind == "virtual" else 15)


def repeat_full_tiles(group, batch):  # type: ignore[no-untyped-def]
    delay(group, 0, 0.001)
    results = [step(group, batch, SMALL_RING) for _ in range(20)]
    host_fabric(group).before = None
    for result in results[1:]:
        assert_equal(result, results[0])
    return [results[0]]


@pytest.mark.parametrize("kind, size", [("virtual", 4), ("processes", 2)])
def test_experts_of_exactly_full_tiles_with_a_column_of_zeros(kind, size):
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([256, 128, 128, 256]))[torch.randperm(768)][:, None]
    batch = exact(ids, experts=4)
    batch.x[:, 5] = 0.0
    assert_steps(run_ranks(kind, repeat_full_tiles, size, batch), Plan([batch]))


def test_threads_of_one_rank_do_not_disturb_each_other():
    """Two layers, and one layer twice, in two threads of a process with a single rank."""
    first, second = build(CONFIG), build(CONFIG, seed=1)
    inputs = [torch.randn(300, 16) for _ in range(3)]
    used = [first, second, second]
    with torch.no_grad():
        want = [layer(x) for layer, x in zip(used, inputs, strict=True)]
        batch = exact(random_ids(200, range(8)))
        wrong: list[int] = []

        def evaluate(i: int) -> None:
            with torch.no_grad():
                wrong.extend(i for _ in range(60) if not torch.equal(used[i](inputs[i]), want[i]))

        def train() -> None:
            gradients = dense(batch)
            for _ in range(30):
                got = step(None, batch, SMALL_RING)
                wrong.extend(9 for name in gradients if not torch.equal(got[name], gradients[name]))

        with torch.enable_grad():
            threads = [threading.Thread(target=evaluate, args=(i,)) for i in range(3)] + [threading.Thread(target=train) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not wrong


# ---- failing ranks ----


def wrong_hidden_size(group, batch):  # type: ignore[no-untyped-def]
    """What this rank says when rank 2 has another H, once with weights to match and once without; and the step after."""
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size)
    seen = []
    for weights_too in (True, False):
        x, gate, up, down = b.x, b.gate, b.up, b.down
        if fabric.rank == 2:
            x = torch.nn.functional.pad(x, (0, 8))
            if weights_too:
                gate, up, down = (t.repeat(1, 2, 2)[:, : t.shape[1] + h, : t.shape[2] + 8 - h] for t, h in ((gate, 0), (up, 0), (down, 8)))
        start = time.monotonic()
        try:
            mok.moe(x, b.ids, b.weights, gate, up, down, num_experts=batch.experts, group=group, tuning=SMALL_RING)
        except Exception as error:
            seen.append((type(error).__name__, str(error), time.monotonic() - start))
    return seen, run_steps(group, Plan([batch]))


@pytest.mark.parametrize("kind, size", [("virtual", 3), ("virtual", 4), ("processes", 4)])
def test_a_wrong_hidden_size_on_one_rank_is_the_same_error_everywhere(kind, size):
    batch = exact(random_ids(90, range(8)))
    results = run_ranks(kind, wrong_hidden_size, size, batch)
    for i in range(2):
        errors = {seen[i][:2] for seen, _ in results}
        assert len(errors) == 1
        name, message = errors.pop()
        assert name == "ValueError" and "rank 2" in message and ("hidden" in message or "has shape" in message)
        assert max(seen[i][2] for seen, _ in results) < 5
    assert_steps([steps for _, steps in results], Plan([batch]))


def layer_with_wrong_x(group):  # type: ignore[no-untyped-def]
    layer = build(CONFIG, group)
    with pytest.raises(ValueError, match=r"rank 2: x has shape \(5, 17\)"):
        layer(torch.ones(5, 17 if layer.fabric.rank == 2 else 16))
    return layer(torch.ones(5, 16)).detach()


@pytest.mark.parametrize("kind, size", [("virtual", 3), ("processes", 3)])
def test_a_layer_with_a_wrong_x_on_one_rank(kind, size):
    outs = run_ranks(kind, layer_with_wrong_x, size)
    assert all(torch.equal(out, outs[0]) for out in outs)


class OwnFaultError(Exception):
    pass


def fails_before_backward(group, batch):  # type: ignore[no-untyped-def]
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size).leaves()
    out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, num_experts=batch.experts, group=group, tuning=Tuning(timeout_s=30))
    if fabric.rank == 2:
        raise OwnFaultError("a fault of its own")
    out.backward(b.d_out)


def test_a_rank_that_raises_between_forward_and_backward_ends_its_peers():
    batch = exact(random_ids(90, range(8)))
    start = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_processes(fails_before_backward, 4, batch)
    assert time.monotonic() - start < 20, "peers notice the end of a process, they do not wait for the time limit"
    assert failed.value.errors[2][:2] == ("OwnFaultError", "a fault of its own")
    for rank in (0, 1, 3):
        name, message, _ = failed.value.errors[rank]
        assert name == "FabricError" and "rank 2" in message

    seen: dict[int, FabricError] = {}

    def noted(fabric):  # type: ignore[no-untyped-def]
        try:
            fails_before_backward(fabric, batch)
        except FabricError as error:
            seen[fabric.rank] = error

    start = time.monotonic()
    with pytest.raises(OwnFaultError, match="a fault of its own"):
        run_virtual(noted, virtual_ranks(4))
    assert time.monotonic() - start < 10
    assert sorted(seen) == [0, 1, 3] and all(error.ranks == (2,) and "rank 2" in str(error) for error in seen.values())


def goes_on_after_a_fault(group, batch):  # type: ignore[no-untyped-def]
    """Rank 2 loses a backward and comes to the next step; the others wait for it, not longer than the limit."""
    fabric = host_fabric(group)
    tuning = Tuning(timeout_s=1.0)
    b = batch.local(fabric.rank, fabric.size).leaves()
    out = mok.moe(b.x, b.ids, b.weights, b.gate, b.up, b.down, num_experts=batch.experts, group=group, tuning=tuning)
    start = time.monotonic()
    if fabric.rank == 2:
        time.sleep(2.5)
    else:
        with pytest.raises(FabricError, match="rank 2") as error:
            out.backward(b.d_out)
        assert error.value.ranks == (2,) and time.monotonic() - start < 2
    return run_steps(group, Plan([batch] * 2))


@pytest.mark.parametrize("kind", ["virtual", "processes"])
def test_the_group_goes_on_after_a_lost_backward(kind):
    batch = exact(random_ids(90, range(8)))
    assert_steps(run_ranks(kind, goes_on_after_a_fault, 3, batch), Plan([batch] * 2))


SCRIPT = """
import sys, torch, torch.distributed as dist, mok
rank, size, store, fails = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "fails"
dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
config = mok.MoEConfig(hidden_size=16, intermediate_size=8, num_experts=8, top_k=2)
torch.manual_seed(0)
layer = mok.MoE(config, dist.group.WORLD, tuning=mok.Tuning(timeout_s=45))
out = layer(torch.ones(5, 16, requires_grad=True))
if fails and rank == 2:
    raise RuntimeError("a fault of its own")
out.sum().backward()
print("done", flush=True)
"""


def run_scripts(size: int, mode: str) -> list[tuple[int, str, str]]:
    """Exit code, standard output and errors of every rank."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(Path(mok.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        arguments = [[sys.executable, "-c", SCRIPT, str(rank), str(size), f"{folder}/store", mode] for rank in range(size)]
        ranks = [subprocess.Popen(a, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for a in arguments]
        try:
            outputs = [rank.communicate(timeout=60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_a_process_ends_by_itself_without_close():
    start = time.monotonic()
    for code, output, errors in run_scripts(2, "ends"):
        assert code == 0 and output == "done\n", errors
    assert time.monotonic() - start < 30


def test_processes_end_with_a_code_when_one_raises():
    start = time.monotonic()
    results = run_scripts(3, "fails")
    assert time.monotonic() - start < 40, "the end of a process is seen before the time limit"
    assert all(code != 0 and output == "" for code, output, _ in results)
    assert "a fault of its own" in results[2][2]
    for _, _, errors in results[:2]:
        assert re.search(r"FabricError: .*rank 2", errors), errors


# ---- life and death ----


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> int:
    """Mapped bytes of the fabric's anonymous files."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:mok" in line:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            total += last - first
    return total


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def lives(group, folder, x, count):  # type: ignore[no-untyped-def]
    """Several lives of a group and its layer; files, shared memory and outputs after each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    del group
    states = []
    for life in range(count):
        dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(f"{folder}/{life}", size))
        layer = build(CONFIG, dist.group.WORLD)
        result = layer_step(layer, x.chunk(size)[rank])
        layer.fabric.close()
        layer.fabric.close()
        assert shared_memory() < 2 * 56 * 1024 * size, "closed: only control blocks are left, the first group's may be too"
        dist.destroy_process_group()
        del layer
        gc.collect()
        states.append((open_files(), shared_memory(), result))
    return states


@pytest.mark.parametrize("size, count", [(2, 20), (4, 6)])
def test_many_lives_of_a_group(size, count):
    with tempfile.TemporaryDirectory() as folder:
        parts = run_processes(lives, size, folder, torch.randn(600, 16), count)
    for states in parts:
        for _, shared, result in states:
            assert_equal(result, states[0][2])
            assert shared == states[0][1]
        files = [state[0] for state in states]  # gloo closes its sockets a little later
        assert max(files[count // 2 :]) <= max(files[: count // 2]) + (1 if count < 20 else 0)


def test_a_single_rank_lives_on_after_close():
    layer = build(CONFIG)
    x = torch.randn(20, 16)
    want = layer_step(layer, x)
    other = build(CONFIG)
    for _ in range(2):
        layer.fabric.close()
        layer.fabric.close()
        assert_equal(layer_step(other, x), want)
        assert_equal(layer_step(layer, x), want)
        assert_equal(layer_step(build(CONFIG), x), want)


def what_stays(group, effort):  # type: ignore[no-untyped-def]
    """Files, shared and resident bytes after warm-up, many numbers of tokens, many layers, recomputed steps, and 60 layers at once."""
    fabric = host_fabric(group)
    g = torch.Generator().manual_seed(fabric.rank)
    layer = build(CONFIG, group)

    def state():  # type: ignore[no-untyped-def]
        gc.collect()
        return open_files(), shared_memory(), resident()

    def some(count: int, most: int) -> None:
        for tokens in torch.randint(0, most + 1, (count,), generator=g).tolist():
            layer_step(layer, torch.ones(tokens, 16))

    layer_step(layer, torch.ones(400, 16))
    some(40, 400)
    build(CONFIG, group)
    layer_step(layer, torch.ones(400, 16), run=lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    states = {"warm": state()}
    some(int(200 * effort), 400)
    states["numbers of tokens"] = state()
    for _ in range(int(50 * effort)):
        layer_step(build(CONFIG, group), torch.ones(100, 16))
    states["layers one after the other"] = state()
    for i in range(int(100 * effort)):
        layer_step(layer, torch.ones(300, 16), run=lambda f, *args, i=i: checkpoint(f, *args, use_reentrant=i % 2 == 0))
    states["recomputed steps"] = state()
    layers = [build(CONFIG, group) for _ in range(60)]
    assert all(other.fabric is layer.fabric for other in layers)
    x = torch.ones(400, 16)
    for other in layers:
        x = other(x)
    x.sum().backward()
    states["sixty layers"] = state()
    return states


@pytest.mark.parametrize("kind, size", [("virtual", 1), ("processes", 2), ("processes", 4)])
def test_nothing_grows(kind, size):
    for states in run_ranks(kind, what_stays, size, 0.1 if size == 4 else 1.0):
        files, shared, memory = states["warm"]
        for after, (files_now, shared_now, memory_now) in states.items():
            assert files_now <= files, after  # gloo may close some of its own
            assert shared_now <= shared, after
            assert memory_now - memory < 16 * 2**20 or after == "sixty layers", after
        if kind == "processes" and size > 1:  # one arena per rank, as large as the largest call, and the control blocks
            shape = Shape(tokens=400, hidden=16, top_k=2, num_experts=8, dtype=torch.float32)
            arena = max(region_offsets(regions)[1] for regions in (shape.forward_regions(), shape.backward_regions()))
            assert size * arena <= shared < size * (arena + 80 * 1024)


def grows_and_shrinks(group, tokens):  # type: ignore[no-untyped-def]
    fabric = host_fabric(group)
    files = []
    for number in tokens:
        batch = Batch.random(tokens=number * fabric.size, hidden=16, width=8, experts=4)
        step(group, batch, SMALL_RING)
        files.append((open_files(), shared_memory()))
    return files


def test_a_growing_batch_leaves_no_smaller_memory_behind():
    for states in run_processes(grows_and_shrinks, 2, list(range(1, 400, 20))):
        assert len({files for files, _ in states}) == 1
        shape = Shape(tokens=381, hidden=16, top_k=2, num_experts=4, dtype=torch.float32)
        assert states[-1][1] < 2 * (region_offsets(shape.backward_regions())[1] + 80 * 1024)
