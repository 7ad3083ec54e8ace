"""What nobody asks for is not done: the backward's list of tasks, counted on the GPU, has none for what is frozen; and what is asked for
has the same bits."""

from __future__ import annotations

import collections
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from virtual import DEVICE, Problem
from virtual_backward import Group, listed, make_d_y, many_rows

import mok
from mok.kernels import groups, launch, launch_backward
from mok.kernels.launch import Saved
from mok.kernels.launch_backward import BackwardPlan, Needs

PLAN = BackwardPlan(group_tiles=1000, run=1)  # one group, so that no expert is cut
NEEDS = [
    Needs(), Needs(x=False), Needs(weights=False), Needs(experts=False), Needs(shared=False), Needs(experts=False, shared=False),
    Needs(False, True, False, False), Needs(False, False, False, True),
]  # fmt: skip
NAMES = {
    getattr(groups, name).value: name
    for name in ("PULL", "GATE_UP", "HIDDEN", "D_X", "D_WEIGHT", "SHARED_HIDDEN", "SHARED_D_X", "SHARED_D_WEIGHT")
}


def counted(workspace) -> dict[str, int]:
    """How many tasks of each kind the list has that was written last."""
    return dict(collections.Counter(NAMES[kind] for kind in listed(workspace)[:, groups.KIND.value].tolist()))


def wanted(problem: Problem, tiles: int, needs: Needs, saved: bool) -> dict[str, int]:
    """Tiles have 128 rows and 256 columns, of gate and of up 128."""
    cdiv = lambda a, b: -(-a // b)  # noqa: E731
    of_weights = lambda width: 2 * cdiv(width, 128) * cdiv(hidden, 256) + cdiv(hidden, 128) * cdiv(width, 256)  # noqa: E731
    hidden, width, shared_width = problem.hidden, problem.width, problem.shared[0].shape[0] if problem.shared else 0
    shared_tiles = cdiv(problem.x_TH.shape[0], 128) if shared_width else 0
    routed = needs.x or needs.weights or needs.experts
    counts = dict(
        PULL=4 * tiles * routed, GATE_UP=tiles * cdiv(width, 128) * (routed and not saved), HIDDEN=tiles * cdiv(width, 256) * routed,
        D_X=tiles * cdiv(hidden, 256) * needs.x, D_WEIGHT=problem.experts * of_weights(width) * needs.experts,
        SHARED_HIDDEN=shared_tiles * cdiv(shared_width, 256) * (needs.x or needs.shared),
        SHARED_D_X=shared_tiles * cdiv(hidden, 256) * needs.x, SHARED_D_WEIGHT=of_weights(shared_width) * needs.shared,
    )  # fmt: skip
    return {kind: count for kind, count in counts.items() if count}


def tiles_of(problem: Problem) -> int:
    counts = torch.bincount(problem.ids_TK[problem.ids_TK >= 0], minlength=problem.experts)
    return int(((counts + 127) // 128).sum())


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_no_task_for_what_is_frozen(needs):
    problem, d_y = many_rows()
    whole = Group(problem, d_y, 1, PLAN)
    want, tiles = whole.run(), tiles_of(problem)
    assert counted(whole.workspaces[0]) == wanted(problem, tiles, Needs(), saved=True)
    group = Group(problem, d_y, 1, PLAN, needs)
    got = group.run()
    assert counted(group.workspaces[0]) == wanted(problem, tiles, needs, saved=True)
    names = {"out", *["d_x"] * needs.x, *["d_weights"] * needs.weights, *["gate", "up", "down"] * needs.experts}
    assert got.keys() == names | {f"shared {name}" for name in ("gate", "up", "down") if needs.shared}
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


def test_gate_and_up_are_computed_again_only_where_something_reads_them():
    """The lists alone, of a backward for which nothing was saved."""
    problem, d_y = many_rows()
    (workspace,) = Group(problem, d_y, 1, PLAN).workspaces
    tokens, tiles, bf16 = problem.x_TH.shape[0], tiles_of(problem), torch.bfloat16
    rows = launch.schedule(workspace, problem.ids_TK, problem.experts)
    gate, up = (torch.empty(0, problem.width, dtype=bf16, device=DEVICE) for _ in range(2))
    saved = Saved(gate, up, *(torch.empty(tokens, problem.shared[0].shape[0], dtype=bf16, device=DEVICE) for _ in range(2)))
    for needs in NEEDS:
        call = launch_backward.prepare(
            workspace, rows, saved, d_y, problem.x_TH, problem.weights_TK, problem.gate, problem.up, problem.down, shared=problem.shared,
            needs=needs, plan=PLAN,
        )  # fmt: skip
        call.order.write(workspace.num_sms)
        assert counted(workspace) == wanted(problem, tiles, needs, saved=False), needs


FROZEN = [(), ("x",), ("weights",), ("gate", "up", "down"), ("x", "gate", "up", "down")]


@pytest.mark.parametrize("names", FROZEN, ids=str)
def test_no_task_for_what_a_layer_has_frozen(names, monkeypatch):
    problem = Problem(300, 512, 384, 8, 2, masked=0.1)
    d_y, counts, real = make_d_y(problem), [], launch_backward.backward

    def backward(workspace, *arguments, **options):
        gradients = real(workspace, *arguments, **options)
        counts.append(counted(workspace))
        return gradients

    monkeypatch.setattr(launch_backward, "backward", backward)
    tensors = dict(x=problem.x_TH, weights=problem.weights_TK, gate=problem.gate, up=problem.up, down=problem.down)
    found = []
    for frozen in ((), names):
        leaves = {name: t.clone().requires_grad_(name not in frozen) for name, t in tensors.items()}
        out = mok.moe(leaves["x"], problem.ids_TK, *(leaves[name] for name in ("weights", "gate", "up", "down")))
        out.backward(d_y)
        found.append({"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}})
    assert found[1].keys() == {"out", *tensors} - set(names)
    for name, value in found[1].items():
        assert torch.equal(value, found[0][name]), name
    needs = Needs("x" not in names, "weights" not in names, "gate" not in names, False)
    for count, asked in zip(counts, (Needs(shared=False), needs), strict=True):
        assert count.keys() == wanted(problem, tiles_of(problem), asked, saved=True).keys()
