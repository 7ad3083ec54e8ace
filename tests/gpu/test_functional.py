"""The low-level API: alone, compiled, between processes over torch's symmetric memory on one GPU; and what it refuses."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import torch.distributed as dist
import torch.multiprocessing as mp
from virtual import DEVICE, Problem, assert_close

from mok import functional
from mok.schedule import local_experts


def call(problem: Problem, config: functional.MoKConfig, workspace, part: slice, ranks: int = 1, rank: int = 0, limit=None):
    mine = local_experts(problem.experts, ranks, rank)
    experts = [w[mine.start : mine.stop] for w in (problem.gate, problem.up, problem.down)]
    shared = problem.shared or (None, None, None)
    x, ids, weights = (t[part].contiguous() for t in (problem.x_TH, problem.ids_TK, problem.weights_TK))
    schedule = functional.build_schedule(workspace, config, ids, num_experts=problem.experts)
    return functional.forward(config, workspace, schedule, x, weights, *shared, *experts, limit)


def test_one_rank():
    problem = Problem(1000, 512, 256, 8, 3, masked=0.1, shared_width=384, clamp=2.0, shared_clamp=2.0)
    config = functional.MoKConfig(minibatch_size=512, macrobatch_size=1024)
    workspace = functional.get_workspace(config, device=DEVICE, num_local_tokens=1000, hidden_size=512, topk=3)
    assert workspace is functional.get_workspace(config, device=DEVICE, num_local_tokens=1000, hidden_size=512, topk=3)
    out, context = call(problem, config, workspace, slice(None), limit=2.0)
    assert_close(out, problem.expected())
    assert context.gate_routed.shape == (1024, 256) and context.gate_shared.shape == (1000, 384)
    again, _ = call(problem, config, workspace, slice(0, 700), limit=2.0)  # fewer tokens than the workspace is for
    torch.cuda.synchronize()
    workspace.check()
    assert torch.equal(again, out[:700])
    functional.clear_workspace_cache()
    assert workspace is not functional.get_workspace(config, device=DEVICE, num_local_tokens=1000, hidden_size=512, topk=3)


def test_compiled_whole_graph():
    problem = Problem(600, 512, 256, 8, 2, shared_width=256)
    config = functional.MoKConfig()
    workspace = functional.get_workspace(config, device=DEVICE, num_local_tokens=600, hidden_size=512, topk=2)

    def layer(x, ids, weights):
        schedule = functional.build_schedule(workspace, config, ids, num_local_experts=8)
        return functional.forward(config, workspace, schedule, x * 1.0, weights, *problem.shared, problem.gate, problem.up, problem.down)[0]

    with torch.no_grad():
        eager = layer(problem.x_TH, problem.ids_TK, problem.weights_TK)
        compiled = torch.compile(layer, fullgraph=True)(problem.x_TH, problem.ids_TK, problem.weights_TK)
    assert torch.equal(eager, compiled)


def test_refusals():
    config = functional.MoKConfig()
    make = lambda **changes: functional.create_workspace(  # noqa: E731
        config, **{**dict(device=DEVICE, num_local_tokens=64, hidden_size=256, topk=2), **changes}
    )
    with pytest.raises(ValueError, match="hidden_size=1025: must be a multiple of 16"):
        make(hidden_size=1025)
    with pytest.raises(ValueError, match="device=cpu: must be a CUDA device"):
        make(device="cpu")
    with pytest.raises(ValueError, match="minibatch_size=100: must be a multiple of 128"):
        functional.MoKConfig(minibatch_size=100)
    with pytest.raises(ValueError, match="macrobatch_size=4097"):
        functional.MoKConfig(macrobatch_size=4097)
    workspace, problem = make(), Problem(64, 256, 128, 4, 2)
    ids, weights = problem.ids_TK, problem.weights_TK
    with pytest.raises(ValueError, match=r"top_experts.dtype=torch.int32: must be torch.int64"):
        functional.build_schedule(workspace, config, ids.int(), 4)
    with pytest.raises(ValueError, match=r"top_experts.shape=\(128, 2\): the workspace is for at most 64 tokens"):
        functional.build_schedule(workspace, config, ids.repeat(2, 1), 4)
    with pytest.raises(ValueError, match="num_local_experts=None, num_experts=None: exactly one"):
        functional.build_schedule(workspace, config, ids)
    schedule = functional.build_schedule(workspace, config, ids, 4)
    routed = (problem.gate, problem.up, problem.down)
    none = (None, None, None)
    for name, arguments in {
        r"x.shape=\(63, 256\)": (problem.x_TH[1:], weights, *none, *routed),
        "router_weights.dtype=torch.bfloat16": (problem.x_TH, weights.bfloat16(), *none, *routed),
        "routed_down.shape": (problem.x_TH, weights, *none, *routed[:2], problem.gate),
        "x: must be contiguous": (problem.x_TH.T.contiguous().T, weights, *none, *routed),
        "must all be given or all be None": (problem.x_TH, weights, problem.gate[0], None, None, *routed),
    }.items():
        with pytest.raises(ValueError, match=name):
            functional.forward(config, workspace, schedule, *arguments)


def process(rank: int, ranks: int, port: int, results) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    problem = Problem(901, 512, 256, 7, 3, masked=0.1, shared_width=256)
    edges = [901 * r // ranks for r in range(ranks)] + [901]
    part = slice(edges[rank], edges[rank + 1])
    config = functional.MoKConfig(minibatch_size=256, macrobatch_size=512, timeout_s=30.0)
    workspace = functional.get_workspace(
        config, dist.group.WORLD, device=DEVICE, num_local_tokens=part.stop - part.start, hidden_size=512, topk=3
    )
    outs = []
    for _ in range(5):
        out, _ = call(problem, config, workspace, part, ranks, rank)
        torch.cuda.synchronize()
        workspace.check()
        outs.append(out.cpu())
    assert all(torch.equal(outs[0], out) for out in outs)
    gathered = [None] * ranks
    dist.all_gather_object(gathered, outs[0])
    if rank == 0:
        torch.save(torch.cat(gathered), results)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_over_symmetric_memory(ranks, tmp_path):
    results = str(tmp_path / "out.pt")
    mp.spawn(process, args=(ranks, 29600 + ranks + os.getpid() % 300, results), nprocs=ranks)
    problem = Problem(901, 512, 256, 7, 3, masked=0.1, shared_width=256)
    out = torch.load(results).to(DEVICE)
    assert_close(out, problem.expected())
    config = functional.MoKConfig()
    workspace = functional.create_workspace(config, device=DEVICE, num_local_tokens=901, hidden_size=512, topk=3)
    alone, _ = call(problem, config, workspace, slice(None))
    assert torch.equal(out, alone)
