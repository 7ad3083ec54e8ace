"""What `mok trace` and `mok bench overlap` read and change of the real kernels, under the interpreter; the last line printed is JSON.

Run alone: TRITON_INTERPRET=1 python tests/interpreted_tools.py [case ...]
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import time

# isort: off
from interpreted_cases import BLOCK, CPU, PLAN, Problem, assert_close, make_schedules, shared  # before triton: sets TRITON_INTERPRET
from interpreted_backward import PLAN as BACKWARD, make_d_y, make_workspaces

# isort: on
import torch
import triton
from interpret import run_cases, run_concurrently

from mok import trace
from mok.bench.overlap import VARIANTS, prepare
from mok.kernels import launch, launch_backward, memory
from mok.kernels.backward import backward_kernel
from mok.kernels.combine import combine
from mok.kernels.forward import forward_kernel
from mok.kernels.signals import tell_host, wait_for_report

FORWARD = dataclasses.replace(PLAN, trace=True)


def share(workspace) -> None:
    """The programs are processes: what they write must be shared."""
    for buffer in workspace.scratch.values():
        buffer.share_memory_().fill_(float("nan") if buffer.is_floating_point() else 0)


def case_forward_trace():
    """Every task of the list has a record, under the names, tiles, parts and experts that the list has in plain order."""
    problem = Problem(1, 12, 32, 40, 3, 2, masked=0.0, shared_width=24)
    (workspace,) = make_workspaces(problem, 1, 60.0)
    (rows,) = make_schedules(problem, [workspace])
    args, _, out = launch.kernel_arguments(
        workspace, rows, problem.x_TH, problem.gate_EIH, problem.up_EIH, problem.down_EHI, problem.shared, None, None, 0, False, FORWARD,
        problem.hidden, 40,
    )  # fmt: skip
    share(workspace)
    out.share_memory_()
    launch.write_tasks(workspace, args, rows, FORWARD)
    run_concurrently(forward_kernel, 2, [args])
    tiles = int(rows.num_tokens) // BLOCK
    line = trace.forward_timeline(workspace, workspace.scratch["trace"], 2, ring=tiles - 1)
    count = collections.Counter(line.kind)
    assert (count["pull"], count["up"], count["down"]) == (tiles * 2, tiles * 3, tiles), count
    assert (count["shared up"], count["shared down"]) == (2, 1), count
    for kind, parts in (("pull", 2), ("up", 3), ("down", 1)):
        mine = torch.tensor([name == kind for name in line.kind])
        places = sorted(zip(line.tile[mine].tolist(), line.part[mine].tolist(), strict=True))
        assert places == [(tile, part) for tile in range(tiles) for part in range(parts)], (kind, places)
        if kind != "pull":
            assert torch.equal(line.expert[mine], rows.tile_expert[line.tile[mine]].long())
    assert set(line.program.tolist()) <= {0, 1} and line.sm.tolist() == [0, 1]
    assert not line.begin.isnan().any() and not line.ready.isnan().any()
    noted = {name for name, computed in zip(line.kind, line.computed.isnan().tolist(), strict=True) if not computed}
    assert noted == {"up", "down", "shared up", "shared down"}
    assert line.frees.tolist() == [0 if tile == tiles - 1 else -1 for tile in line.tile.tolist()]
    assert {link.signal for link in trace.links(line)} == {"x_ready", "h_ready", "shared h", "a free place", "a free place of h"}


def case_backward_trace():
    problem = Problem(2, 20, 32, 40, 2, 2, masked=0.0)
    plan = dataclasses.replace(BACKWARD, trace=True, ring_tiles=2)
    d_y = make_d_y(problem)
    (workspace,) = make_workspaces(problem, 1, 60.0)
    (rows,) = make_schedules(problem, [workspace])
    saved = launch.Saved(*(torch.empty(0, 40).bfloat16() for _ in range(2)), *(torch.empty(20, 8).bfloat16() for _ in range(2)))
    call = launch_backward.prepare(
        workspace, rows, saved, d_y, problem.x_TH, shared(problem.weights_TK), problem.gate_EIH, problem.up_EIH, problem.down_EHI, plan=plan
    )
    share(workspace)
    for gradient in call.experts:
        gradient.share_memory_()
    call.order.write(2)
    run_concurrently(backward_kernel, 2, [call.kernel])
    line = trace.backward_timeline(workspace, workspace.scratch["trace"], 2)
    tiles = int(rows.num_tokens) // BLOCK
    count = collections.Counter(line.kind)
    assert (count["pull"], count["gate up"], count["hidden"], count["d_x"]) == (2 * tiles, 3 * tiles, 2 * tiles, tiles), count
    assert count["d_weight"] >= 3 * problem.experts
    routed = torch.tensor([name in ("gate up", "hidden", "d_x") for name in line.kind])
    assert torch.equal(line.expert[routed], rows.tile_expert[line.tile[routed]].long())
    assert set(line.part[torch.tensor([name == "d_weight" for name in line.kind])].tolist()) == {0, 1, 2}
    assert trace.shares(line)["tail"] == 0  # the interpreter's clock stands still
    assert tiles > 2 and len(set(line.group[routed].tolist())) == tiles, "a ring of two tiles has a tile per group"
    pulls = torch.tensor([name == "pull" for name in line.kind])
    assert torch.equal(line.frees[pulls], (line.tile[pulls] - 2).clamp(min=-1)), "the group of the tile that had the place"
    of_expert = rows.tokens_per_expert.div(BLOCK)[line.expert].tolist()
    cut = torch.tensor([name == "d_weight" and count > 1 for name, count in zip(line.kind, of_expert, strict=True)])
    assert (line.frees[~pulls & ~cut] == -1).all()
    wanted = {"x_ready", "gate_ready", "d_gate_ready", "group_ready", "a free place"}
    assert cut.any() and {link.signal for link in trace.links(line)} - {"memory for a cut sum"} == wanted


def case_overlap():
    """What is left out is not done, everything else is, with a ring smaller than the rows and half tiles; and the kernel ends."""
    problem = Problem(5, 12, 32, 24, 5, 2, masked=0.0)
    plan = dataclasses.replace(PLAN, parts=2, minibatch_tiles=1, ring_tiles=3)
    experts = (problem.gate_EIH, problem.up_EIH, problem.down_EHI)
    outs = {}
    for name, left_out in VARIANTS.items():
        (workspace,) = make_workspaces(problem, 1, 60.0)
        (rows,) = make_schedules(problem, [workspace])
        tiles = int(rows.num_tokens) // BLOCK
        assert tiles > plan.ring_tiles
        made = prepare(workspace, rows, problem.x_TH, experts, plan, left_out)
        share(workspace)
        x_ring, h_ring = (workspace.scratch[ring] for ring in ("x_ring", "h_ring"))
        x_ring.fill_(2.0)
        for value in made.arguments.values():
            if isinstance(value, torch.Tensor):
                value.share_memory_()
        for _ in range(2 if name == "alone" else 1):  # again: what a launch uses up is put back
            made.arguments["signals_ptr"].copy_(made.signals)
            run_concurrently(forward_kernel, 2, [made.arguments])
        workspace.check()
        slots = workspace.memory.own["combine"]
        assert (x_ring == 2.0).all() == ("dispatch" in left_out), name
        assert h_ring.isnan().all() == ("experts" in left_out), name
        assert slots.isnan().all() == ("combine" in left_out), name
        outs[name] = slots.clone()
        taken = int(made.arguments["signals_ptr"][0])
        assert taken >= int(made.arguments["tasks_ptr"][0])
    assert torch.isfinite(outs["full"]).all() and not outs["moving"].any()
    out = combine(outs["full"], problem.ids_TK, problem.weights_TK, problem.experts, None)
    assert_close(out, problem.expected())
    assert not torch.equal(outs["no dispatch"], outs["full"])


@triton.jit
def tell_kernel(control_ptr):
    wait_for_report(control_ptr)
    tell_host(control_ptr)


def case_a_report_that_is_being_written():
    """A barrier that sees the abort flag while a report is still being written waits, and tells the host all of it."""
    (view,) = memory.virtual_memory(memory.regions(4, 16, 2, 1, 1), 1, CPU)
    control, number = view.own["control"], torch.arange(memory.RECORD_WORDS, dtype=torch.int32) + 10
    control[memory.REPORT] = 1

    def write() -> None:
        time.sleep(0.3)
        control[memory.REPORT + 1 : memory.REPORT + memory.RECORD_WORDS] = number[1:]
        control[memory.REPORT] = 2

    writer = threading.Thread(target=write)
    writer.start()
    tell_kernel[(1,)](control)
    writer.join()
    assert view.failure() == (dict(zip(memory.REPORT_FIELDS, number[1:].tolist(), strict=True)), None), view.host
    control[memory.REPORT] = 0
    view.host.zero_()
    tell_kernel[(1,)](control)
    assert view.failure() is None


if __name__ == "__main__":
    assert CPU.type == "cpu"
    run_cases(globals(), sys.argv[1:])
