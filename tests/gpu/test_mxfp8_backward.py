"""Forward and backward in MXFP8 on a GPU, as test_fp8_backward.py has those in blockwise FP8, which tests the layer in both formats.

`Mxfp8Group` is the form that this device multiplies best, on Hopper that with weights in bf16; `ScaledGroup` is that with codes, which
Hopper computes, too.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_fp8_backward import COUNTS, SIZES, SMALL, assert_near, check_counts, equal
from virtual import DEVICE, Problem
from virtual_backward import Mxfp8Group, expected, make_d_y, many_rows

from mok.kernels import launch, launch_backward_mxfp8, launch_mxfp8
from mok.kernels.launch_backward import BackwardPlan, Needs
from mok.kernels.launch_backward_mxfp8 import MxTransposed, transposed_for
from mok.kernels.launch_mxfp8 import MxExperts
from mok.quantize import E4M3, MX_ROW, Recipe, dequantize, from_tcgen05

RECIPE = Recipe("mxfp8")


class ScaledGroup(Mxfp8Group):
    """Virtual ranks with the routed experts in MXFP8 as values and codes, by `forward_mxfp8.py` and `backward_mxfp8.py`."""

    @staticmethod
    def forward(workspace, rows, ids, weights, x, gate, up, down, num_experts, **options):
        return launch_mxfp8.forward(workspace, rows, ids, weights, x, MxExperts.of(gate, up, down), num_experts, **options)

    @staticmethod
    def backward(workspace, rows, saved, ids, d_y, x, weights, gate, up, down, num_experts, **options):
        return launch_backward_mxfp8.backward(
            workspace, rows, saved, ids, d_y, x, weights, gate, up, down, num_experts, transposed=MxTransposed.of(gate, up, down), **options
        )


forms = pytest.mark.parametrize("form", [Mxfp8Group, ScaledGroup])


@pytest.mark.parametrize("name", [name for name in SIZES if name != "tiny"])  # H is at least 64
def test_every_gradient_near_fp64_and_equal_for_every_number_of_ranks(name):
    tokens, hidden, width, experts, top_k, shared_width = SIZES[name]
    problem = Problem(tokens, hidden, width, experts, top_k, masked=0.1, shared_width=shared_width)
    d_y = make_d_y(problem)
    want, first = expected(problem, d_y, RECIPE), None
    for ranks in (1, 2, 3):
        got = Mxfp8Group(problem, d_y, ranks).run()
        assert_near(got, want)
        if ranks > 1:  # each rank's share of the shared experts' gradients: their sum is the user's
            got = {n: v for n, v in got.items() if not n.startswith("shared")}
        first = got if first is None else {n: first[n] for n in got}
        equal(got, first, ranks)


def test_with_codes_every_gradient_is_near_fp64_whatever_was_saved():
    problem = Problem(1024, 1024, 512, 8, 2, masked=0.1)
    d_y = make_d_y(problem)
    got = ScaledGroup(problem, d_y, 2).run()
    assert_near(got, expected(problem, d_y, RECIPE))
    equal(ScaledGroup(problem, d_y, 2, saved_rows=256).run(), got, "most of gate and up computed again")


@pytest.mark.parametrize(
    "form, sizes",
    [(Mxfp8Group, (600, 1024, 512, 4, 2)), (Mxfp8Group, (300, 656, 1424, 3, 2)), (ScaledGroup, (600, 1024, 512, 4, 2))],
    ids=str,
)
def test_stage_by_stage(form, sizes):
    """d_gate, d_up and w h from the kernel's gate and up, their numbers of MXFP8 from them, d_x from these, and the weights' gradients from
    what the rings hold, each as near as its own rounding allows."""
    problem = Problem(*sizes)
    d_y = make_d_y(problem)
    group = form(problem, d_y, 1, BackwardPlan(ring_tiles=64))
    group.run()
    workspace, (x_TH, ids, weights, _), p = group.workspaces[0], group.inputs[0], problem
    rows = launch.schedule(workspace, ids, p.experts)
    experts = (p.gate, p.up, p.down)
    _, saved = group.forward(workspace, rows, ids, weights, x_TH, *experts, p.experts, save=True, saved_rows=64 * 128)
    got = group.backward(workspace, rows, saved, ids, d_y, x_TH, weights, *experts, p.experts, plan=group.plan)
    torch.cuda.synchronize()
    count, ring = int(rows.num_tokens), workspace.scratch["weights_ring"].numel()
    assert count <= ring, "the ring holds all rows"
    live = rows.peer_rank[:count] >= 0
    expert, slot = rows.tile_expert[: count // 128].long().repeat_interleave(128)[live], rows.peer_token_idx[:count].long()[live]
    token, w = slot // p.top_k, weights.reshape(-1)[slot].double()
    x, dy = (RECIPE.rows(t.float())[token] for t in (x_TH, d_y))
    of = lambda name, columns, planes=1: workspace.scratch[name].view(planes, -1, columns)[:, :count][:, live]  # noqa: E731
    assert torch.equal(of("x_ring", p.hidden)[0].float(), x) and torch.equal(of("d_y_ring", p.hidden)[0].float(), dy)
    gate, up = (t[:count][live].double() for t in (saved.gate_CI, saved.up_CI))
    s, d_hidden = torch.sigmoid(gate), torch.empty_like(gate)
    relative = lambda a, b: float(((a.double() - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-6)).max())  # noqa: E731
    gate_w, up_w, down_w = ([RECIPE.weight(matrix.float(), -2).double() for matrix in weight] for weight in experts)
    for e in range(p.experts):
        d_hidden[expert == e] = dy[expert == e].double() @ down_w[e]
    h = (gate * s * up).bfloat16().double()
    assert relative(got.d_weights_TK.reshape(-1)[slot], (d_hidden * h).sum(1)) < 5e-3
    d_hidden *= w[:, None]
    d_gate, d_up = of("d_gate_up_ring", p.width, 2)
    assert relative(d_gate, d_hidden * up * s * (1 + gate * (1 - s))) < 5e-3 and relative(d_up, d_hidden * gate * s) < 5e-3
    assert relative(of("h_ring", p.width)[0], h * w[:, None]) < 5e-3
    numbers = numbers_of_d_x(workspace, p.width)[:, :count][:, live]
    for d, number in zip((d_gate, d_up), numbers, strict=True):
        assert torch.equal(number, RECIPE.rows(d.float()))
    d_x = workspace.memory.own["combine"][slot]
    for e in range(p.experts):
        mine = expert == e
        assert relative(d_x[mine], numbers[0][mine].double() @ gate_w[e] + numbers[1][mine].double() @ up_w[e]) < 5e-3, "d_x"
        for gradient, a, b in zip(got.experts, (d_gate, d_up, dy), (x, x, of("h_ring", p.width)[0]), strict=True):
            assert relative(gradient[e], a[mine].double().T @ b[mine].double()) < 1e-2


def numbers_of_d_x(workspace, width: int) -> torch.Tensor:
    """What d_gate and d_up are when they are multiplied by gate and up, fp32 [2, rows of the ring, I]."""
    scratch = workspace.scratch
    if "snapped_d_gate_up_ring" in scratch:
        return scratch["snapped_d_gate_up_ring"].view(2, -1, width).float()
    values, blocks = scratch["d_gate_up_e4m3_ring"].view(E4M3).view(-1, width), -(-width // 32)
    codes = from_tcgen05(scratch["d_gate_up_scale_ring"].view(-1, -(-blocks // 4), 32, 16), values.shape[0], blocks)[0]
    return dequantize(values, codes, MX_ROW).view(2, -1, width)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@forms
def test_no_block_crosses_an_expert(form, counts, monkeypatch):
    check_counts(form, counts, lambda problem, d_y: expected(problem, d_y, RECIPE), monkeypatch)


@forms
def test_every_scale_counts(form):
    """Blocks of dY by powers of two that the weights' blocks undo: without one of the scales nothing would be near."""
    problem = Problem(512, 1024, 512, 4, 2)
    factors = torch.exp2(torch.arange(32, device=DEVICE) % 8 * 3.0 - 10).repeat_interleave(32).bfloat16()
    d_y = make_d_y(problem) * factors
    problem.down /= factors[:, None]
    problem.down[:, :, 32:64] *= 16.0
    problem.gate[:, 32:64] *= 4.0
    problem.up[:, 64:96] /= 8.0
    assert_near(form(problem, d_y, 2).run(), expected(problem, d_y, RECIPE))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_do_not_depend_on_time(ranks):
    problem, d_y = many_rows()
    first = Mxfp8Group(problem, d_y, 1).run()
    assert_near(first, expected(problem, d_y, RECIPE))
    first = {n: v for n, v in first.items() if not n.startswith("shared")}
    group = Mxfp8Group(problem, d_y, ranks, SMALL, saved_rows=2000)
    for repeat in range(20):
        got = group.run(delay=True)
        equal({n: got[n] for n in first}, first, repeat)


def test_bits_do_not_depend_on_knobs_or_what_was_saved():
    problem, d_y = many_rows()
    first = Mxfp8Group(problem, d_y, 1).run()
    for changes in (dict(ring_tiles=2), dict(ring_tiles=12, group_tiles=3, parts=1), dict(num_sms=7, run=4), dict(half_tiles=False)):
        equal(Mxfp8Group(problem, d_y, 1, BackwardPlan(**changes)).run(), first, changes)
    for saved_rows in (0, 1000):
        equal(Mxfp8Group(problem, d_y, 1, saved_rows=saved_rows).run(), first, saved_rows)


def test_a_token_does_not_depend_on_the_others():
    problem = Problem(600, 512, 256, 6, 2, shared_width=256)
    d_y = make_d_y(problem)
    whole = Mxfp8Group(problem, d_y, 1).run()
    some = slice(100, 350)
    problem.x_TH, problem.ids_TK, problem.weights_TK = problem.x_TH[some], problem.ids_TK[some], problem.weights_TK[some]
    got = Mxfp8Group(problem, d_y[some], 1).run()
    for name in ("out", "d_x", "d_weights"):
        assert torch.equal(got[name], whole[name][some]), name


def test_only_what_is_asked_for():
    problem = Problem(700, 512, 256, 6, 2, shared_width=256)
    d_y = make_d_y(problem)
    whole = Mxfp8Group(problem, d_y, 1).run()
    for x, weights, experts in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        got = Mxfp8Group(problem, d_y, 1, needs=Needs(bool(x), bool(weights), bool(experts), False)).run()
        names = {"out", *["d_x"] * x, *["d_weights"] * weights, *["gate", "up", "down"] * experts}
        assert got.keys() == names
        equal(got, {n: whole[n] for n in names}, names)


def test_weights_quantized_beforehand():
    """The same bits as with weights that are quantized in the call."""
    problem = Problem(600, 1024, 512, 4, 2)
    d_y, p = make_d_y(problem), problem
    group = Mxfp8Group(problem, d_y, 1)
    first, experts = group.run(), (p.gate, p.up, p.down)
    workspace, (x, ids, weights, _) = group.workspaces[0], group.inputs[0]
    rows = launch.schedule(workspace, ids, p.experts)
    _, saved = group.forward(workspace, rows, ids, weights, x, *experts, p.experts, save=True, saved_rows=128)
    transposed = transposed_for(DEVICE, *experts)
    got = group.backward(workspace, rows, saved, ids, d_y, x, weights, *experts, p.experts, plan=group.plan, transposed=transposed)
    assert torch.equal(got.d_x_TH, first["d_x"]) and torch.equal(got.experts[2], first["down"])
