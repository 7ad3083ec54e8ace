"""Forward and backward in blockwise FP8 on a GPU: every gradient against fp64 on dequantized operands, and the promises about bits."""

from __future__ import annotations

import functools
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import virtual_backward
from virtual import DEVICE, Problem, poison_workspace
from virtual_backward import Fp8Group, expected, make_d_y, many_rows

import mok
from mok.kernels import launch, launch_backward_fp8
from mok.kernels.launch import ForwardPlan, Workspace
from mok.kernels.launch_backward import BackwardPlan, Needs
from mok.quantize import FP8_ROW, Recipe, dequantize, quantize

RECIPE = Recipe("fp8")
SMALL = BackwardPlan(ring_tiles=8, group_tiles=2)


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float = 2e-2) -> dict[str, float]:
    """The relative error of every gradient, of a token's d_x, of an expert's weights, and of the last 8 columns.

    The tensor cores keep fewer bits than fp32, so gate and up may round to the next bf16, and then a few elements of d_gate and d_up to the
    next E4M3, 6 % further. `test_stage_by_stage` has no such slack.
    """
    errors = {}
    for name, value in got.items():
        assert torch.isfinite(value.float()).all(), f"{name} is not finite"
        if name == "out" or not value.numel():  # test_fp8.py
            continue
        a, b = value.double(), want[name].double()
        errors[name] = float((a - b).norm() / b.norm().clamp(min=1e-3))
        assert errors[name] < limit, f"{name}: relative error {errors[name]:.2e}"
        if name == "d_x" or a.dim() == 3:  # per token, per expert
            parts = (a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1).clamp(min=1e-2)
            assert float(parts.max()) < 4 * limit, f"{name}: relative error {float(parts.max()):.2e} in {int(parts.argmax())}"
        tail = (a[..., -8:] - b[..., -8:]).norm() / b[..., -8:].norm().clamp(min=1e-3)
        assert float(tail) < 2 * limit, f"{name}: relative error {float(tail):.2e} in the last 8 columns"
    return errors


def equal(got, want, what) -> None:
    assert got.keys() == want.keys(), what
    for name in got:
        assert torch.equal(got[name], want[name]), (what, name)


SIZES = {  # tokens, hidden, width, experts, K, shared width
    "plain": (1024, 1024, 512, 8, 2, 0),
    "shared": (1000, 1024, 512, 8, 2, 768),
    "ragged": (777, 2880, 1440, 9, 4, 0),
    "narrow": (513, 128, 96, 5, 3, 160),
    "tiny": (200, 48, 16, 4, 2, 32),
    "deep": (700, 7168, 2048, 6, 4, 2048),
    "odd slices": (400, 656, 1424, 4, 2, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_gradient_near_fp64_and_equal_for_every_number_of_ranks(name):
    tokens, hidden, width, experts, top_k, shared_width = SIZES[name]
    problem = Problem(tokens, hidden, width, experts, top_k, masked=0.1, shared_width=shared_width)
    d_y = make_d_y(problem)
    want, first = expected(problem, d_y, RECIPE), None
    for ranks in (1, 2, 3):
        got = Fp8Group(problem, d_y, ranks).run()
        assert_near(got, want)
        if ranks > 1:  # each rank's share of the shared experts' gradients: their sum is the user's
            got = {n: v for n, v in got.items() if not n.startswith("shared")}
        first = got if first is None else {n: first[n] for n in got}
        equal(got, first, ranks)


@pytest.mark.parametrize(
    "sizes", [(600, 1024, 512, 4, 2), (700, 2880, 1440, 5, 2), (300, 7168, 2048, 3, 2), (300, 656, 1424, 3, 2)], ids=str
)
def test_stage_by_stage(sizes):
    """d_gate, d_up and w h from the kernel's gate and up, their E4M3 from them, d_x from that, and the weights' gradients from what the
    rings hold, each as near as its own rounding allows."""
    problem = Problem(*sizes)
    d_y = make_d_y(problem)
    group = Fp8Group(problem, d_y, 1, BackwardPlan(ring_tiles=64))
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
    for e in range(p.experts):
        d_hidden[expert == e] = dy[expert == e].double() @ RECIPE.weight(p.down[e].float(), -1).double()
    h = (gate * s * up).bfloat16().double()
    assert relative(got.d_weights_TK.reshape(-1)[slot], (d_hidden * h).sum(1)) < 5e-3
    d_hidden *= w[:, None]
    d_gate, d_up = of("d_gate_up_ring", p.width, 2)
    assert relative(d_gate, d_hidden * up * s * (1 + gate * (1 - s))) < 5e-3 and relative(d_up, d_hidden * gate * s) < 5e-3
    assert relative(of("h_ring", p.width)[0], h * w[:, None]) < 5e-3
    blocks, dequantized = -(-p.width // 128), []
    values, codes = of("d_gate_up_e4m3_ring", p.width, 2), of("d_gate_up_scale_ring", 2 * blocks)[0]
    for plane, d in enumerate((d_gate, d_up)):
        want_values, want_codes = quantize(d, FP8_ROW)
        own = codes[:, plane * blocks : (plane + 1) * blocks].contiguous()
        assert torch.equal(values[plane], want_values.view(torch.uint8)) and torch.equal(own, want_codes)
        dequantized.append(dequantize(want_values, want_codes, FP8_ROW).double())
    d_x = workspace.memory.own["combine"][slot]
    for e in range(p.experts):
        mine = expert == e
        gate_w, up_w = (RECIPE.weight(weight[e].float(), -1).double() for weight in (p.gate, p.up))
        assert relative(d_x[mine], dequantized[0][mine] @ gate_w + dequantized[1][mine] @ up_w) < 5e-3, "d_x"
        for gradient, a, b in zip(got.experts, (d_gate, d_up, dy), (x, x, of("h_ring", p.width)[0]), strict=True):
            assert relative(gradient[e], a[mine].double().T @ b[mine].double()) < 1e-2


COUNTS = {"no multiples of 32": [44, 1, 31, 33, 32, 0, 95, 20], "multiples of 128": [256, 128, 128, 256, 0, 0, 0, 0]}
MASKED = 16  # tokens without an expert, the last ones


def of_counts(counts: list[int]) -> tuple[Problem, torch.Tensor]:
    """Every expert has its count of tokens, whose second slot is masked. A column of x and one of dY are zeros."""
    tokens = sum(counts)
    problem = Problem(tokens + MASKED, 1024, 512, len(counts), 2)
    ids = torch.arange(len(counts), device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
    problem.ids_TK[:] = -1
    problem.ids_TK[:tokens, 0] = ids[torch.randperm(tokens, device=DEVICE)]
    problem.weights_TK[problem.ids_TK < 0] = float("nan")
    d_y = make_d_y(problem)
    problem.x_TH[:, 5], d_y[:, 9] = 0.0, 0.0
    return problem, d_y


def large_workspace(workspace: Workspace) -> None:
    """In place of NaN, which shows wherever it comes: large numbers, which would only move a scale."""
    for name, buffer in (*workspace.memory.own.items(), *workspace.scratch.items()):
        if buffer.is_floating_point():
            buffer.fill_(1e30)
        elif buffer.dtype == torch.uint8:
            buffer.fill_(247 if "scale" in name else 0x7E)  # the largest finite E4M3, at the largest scale of a finite bf16


def large_memory() -> None:
    blocks = [torch.full((2**n,), 1e30, device=DEVICE) for n in range(6, 20) for _ in range(3)]
    del blocks


def check_counts(group_of, counts: list[int], want, monkeypatch) -> None:
    """Near what is wanted, of (problem, dY), the same again whatever the timing, what memory holds, and masked tokens; and an expert's
    gradients depend on its own tokens alone. Two ranks."""
    problem, d_y = of_counts(counts)
    first = group_of(problem, d_y, 2).run()
    assert_near(first, want(problem, d_y))
    assert not first["gate"][:, :, 5].any() and not first["up"][:, :, 5].any() and not first["down"][:, 9].any()
    for name in ("gate", "up", "down"):
        assert [bool(grad.any()) for grad in first[name]] == [count > 0 for count in counts], name
    group = group_of(problem, d_y, 2)
    for repeat in range(5):
        equal(group.run(delay=True), first, repeat)
    with monkeypatch.context() as patch:
        patch.setattr(virtual_backward, "poison_workspace", large_workspace)
        patch.setattr(virtual_backward, "poison", large_memory)
        equal(group.run(), first, "large numbers in all memory")
    for masked in (1e30, float("nan")):
        problem.x_TH[-MASKED:], d_y[-MASKED:] = masked, masked
        equal(group_of(problem, d_y, 2).run(), first, masked)
    changed = problem.ids_TK[:, 0] == 3
    problem.x_TH[changed] = torch.randn_like(problem.x_TH[changed]) * 100
    d_y[changed] = torch.randn_like(d_y[changed]) * 1e-3
    got = group_of(problem, d_y, 2).run()
    for name in ("gate", "up", "down"):
        assert [torch.equal(a, b) for a, b in zip(got[name], first[name], strict=True)] == [e != 3 for e in range(len(counts))], name
    for name in ("out", "d_x", "d_weights"):
        assert torch.equal(got[name][~changed], first[name][~changed]) and not torch.equal(got[name], first[name]), name


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_no_block_crosses_an_expert(counts, monkeypatch):
    check_counts(Fp8Group, counts, lambda problem, d_y: expected(problem, d_y, RECIPE), monkeypatch)


class QuantizedGradients(Fp8Group):
    """Weights' gradients from quantized operands, in blocks of 128 rows of an expert."""

    backward = staticmethod(functools.partial(launch_backward_fp8.backward, quantized_weight_gradients=True))


def of_the_executor(problem: Problem, d_y: torch.Tensor) -> dict[str, torch.Tensor]:
    """`expected`, with the weights' gradients of the CPU's executor from quantized operands."""
    tensors = (problem.x_TH, problem.weights_TK, problem.gate, problem.up, problem.down)
    x, weights, *experts = (t.to("cpu", copy=True).requires_grad_() for t in tensors)
    mok.moe(x, problem.ids_TK.cpu(), weights, *experts, precision="fp8", quantized_weight_gradients=True).backward(d_y.cpu())
    return expected(problem, d_y, RECIPE) | {n: w.grad.to(DEVICE) for n, w in zip(("gate", "up", "down"), experts, strict=True)}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_no_block_of_quantized_weight_gradients_crosses_an_expert(counts, monkeypatch):
    check_counts(QuantizedGradients, counts, of_the_executor, monkeypatch)


def test_every_scale_counts():
    """Blocks of dY by powers of two that the weights' blocks undo: without one of the scales nothing would be near."""
    problem = Problem(512, 1024, 512, 4, 2)
    factors = torch.exp2(torch.arange(8, device=DEVICE) * 3.0 - 10).repeat_interleave(128).bfloat16()
    d_y = make_d_y(problem) * factors
    problem.down /= factors[:, None]
    problem.down[:, :, 128:256] *= 16.0
    problem.gate[:, 128:256] *= 4.0
    problem.up[:, 256:384] /= 8.0
    assert_near(Fp8Group(problem, d_y, 2).run(), expected(problem, d_y, RECIPE))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_do_not_depend_on_time(ranks):
    problem, d_y = many_rows()
    first = Fp8Group(problem, d_y, 1).run()
    assert_near(first, expected(problem, d_y, RECIPE))
    first = {n: v for n, v in first.items() if not n.startswith("shared")}
    group = Fp8Group(problem, d_y, ranks, SMALL, saved_rows=2000)
    for repeat in range(50):
        got = group.run(delay=True)
        equal({n: got[n] for n in first}, first, repeat)


KNOBS = [
    dict(ring_tiles=2), dict(ring_tiles=12, group_tiles=3, parts=1), dict(parts=8, num_sms=1), dict(num_sms=7, ring_tiles=16),
    dict(num_stages=3, block_h=256, run=4), dict(run=1), dict(run=3), dict(half_tiles=False), dict(trace=True),
]  # fmt: skip


@pytest.mark.parametrize("changes", KNOBS, ids=str)
def test_bits_do_not_depend_on_knobs(changes):
    problem, d_y = many_rows()
    equal(Fp8Group(problem, d_y, 1, BackwardPlan(**changes)).run(), Fp8Group(problem, d_y, 1).run(), changes)


@pytest.mark.parametrize("saved_rows", [0, 1000])
def test_bits_do_not_depend_on_what_was_saved_or_the_minibatch(saved_rows):
    problem, d_y = many_rows()
    first = Fp8Group(problem, d_y, 1).run()
    for tiles in (1, 5):
        plan = ForwardPlan(minibatch_tiles=tiles, ring_tiles=2 * tiles)
        equal(Fp8Group(problem, d_y, 1, saved_rows=saved_rows, forward_plan=plan).run(), first, (saved_rows, tiles))


def test_a_token_does_not_depend_on_the_others():
    problem = Problem(600, 512, 256, 6, 2, shared_width=256)
    d_y = make_d_y(problem)
    whole = Fp8Group(problem, d_y, 1).run()
    some = slice(100, 350)
    problem.x_TH, problem.ids_TK, problem.weights_TK = problem.x_TH[some], problem.ids_TK[some], problem.weights_TK[some]
    got = Fp8Group(problem, d_y[some], 1).run()
    for name in ("out", "d_x", "d_weights"):
        assert torch.equal(got[name], whole[name][some]), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_extremes(ranks):
    problem = Problem(900, 512, 256, 8, 2, clamp=1.0, shared_width=256, shared_clamp=0.5)
    # Small integers and sixty-fourths: exact as E4M3, and gate and up in any order, so that nobody is clipped on one side only.
    problem.x_TH = torch.randint(-3, 4, problem.x_TH.shape, device=DEVICE).bfloat16()
    problem.gate, problem.up = (torch.randint(-3, 4, problem.gate.shape, device=DEVICE).bfloat16() / 64 for _ in range(2))
    problem.shared = (*(torch.randint(-3, 4, w.shape, device=DEVICE).bfloat16() / 64 for w in problem.shared[:2]), problem.shared[2])
    d_y = make_d_y(problem)
    for ids in (-1, 0, 7, None):
        problem.ids_TK = torch.randint(-1, 8, (900, 2), device=DEVICE) if ids is None else torch.full((900, 2), ids, device=DEVICE)
        problem.weights_TK = torch.randn(900, 2, device=DEVICE)
        got = Fp8Group(problem, d_y, ranks, SMALL).run()
        assert_near(got, expected(problem, d_y, RECIPE))
        if ids == 0:
            assert not got["gate"][1:].any() and not got["down"][1:].any()


def test_only_what_is_asked_for():
    problem = Problem(700, 512, 256, 6, 2, shared_width=256)
    d_y = make_d_y(problem)
    whole = Fp8Group(problem, d_y, 1).run()
    for x, weights, experts, shared in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1), (0, 0, 0, 1)):
        got = Fp8Group(problem, d_y, 1, needs=Needs(bool(x), bool(weights), bool(experts), bool(shared))).run()
        names = {"out", *["d_x"] * x, *["d_weights"] * weights, *["gate", "up", "down"] * experts}
        names |= {*["shared gate", "shared up", "shared down"] * shared}
        assert got.keys() == names
        equal(got, {n: whole[n] for n in names}, names)


def test_sums_into_fp32_accumulators():
    problem = Problem(1500, 512, 256, 6, 2, shared_width=256)
    problem.ids_TK[problem.ids_TK == 4] = 1
    d_y = make_d_y(problem)
    plain = Fp8Group(problem, d_y, 1).run()
    mains = {n: torch.full(v.shape, 7.0, device=DEVICE) for n, v in plain.items() if n not in ("out", "d_x", "d_weights")}
    group = Fp8Group(problem, d_y, 1, SMALL, mains=mains)  # warms up without adding
    for _ in range(3):
        group.run()
    for name, main in mains.items():
        assert torch.allclose((main - 7) / 3, plain[name].float(), rtol=6e-3, atol=2e-4), name
    assert (mains["gate"][4] == 7).all() and (mains["down"][4] == 7).all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_forward_and_backward_wait_for_nothing(ranks):
    problem = Problem(1500, 1024, 512, 8, 4, shared_width=256)
    group = Fp8Group(problem, make_d_y(problem), ranks, saved_rows=0)
    group.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rank, stream in enumerate(group.streams):
            with torch.cuda.stream(stream):
                group.one_rank(rank)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for workspace in group.workspaces:
        workspace.check()


def test_capture_and_replay_with_changing_routes():
    problem = Problem(1500, 1024, 512, 8, 4, shared_width=256)
    d_y = make_d_y(problem)
    group = Fp8Group(problem, d_y, 1, saved_rows=0)
    routes = [problem.ids_TK.clone(), torch.zeros_like(problem.ids_TK) + 3, torch.zeros_like(problem.ids_TK) - 1, problem.ids_TK.clone()]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        group.one_rank(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = group.one_rank(0)
    for route in routes:
        problem.ids_TK = route
        group.inputs[0][1].copy_(route)
        poison_workspace(group.workspaces[0])
        graph.replay()
        torch.cuda.synchronize()
        assert_near(group.named([out]), expected(problem, d_y, RECIPE))


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
@pytest.mark.parametrize("shared", [0, 1])
def test_the_layer_trains(shared, precision):
    """mok.MoE forward and backward against the CPU's; compiled it has the same bits; the loss of a few steps falls."""
    config = mok.MoEConfig(hidden_size=272, intermediate_size=144, num_experts=6, top_k=2, num_shared_experts=shared)
    torch.manual_seed(0)
    layer = mok.MoE(config, precision=precision, dtype=torch.bfloat16)
    device = mok.MoE(config, precision=precision, dtype=torch.bfloat16, device="cuda")
    device.load_state_dict(layer.state_dict())
    x, target = torch.randn(300, 272).bfloat16(), torch.randn(300, 272).bfloat16()
    on_cpu, on_gpu = x.clone().requires_grad_(), x.cuda().requires_grad_()
    layer(on_cpu).backward(target)
    device(on_gpu).backward(target.cuda())
    close = (on_gpu.grad.float().cpu() - on_cpu.grad.float()).norm(dim=1) / on_cpu.grad.float().norm(dim=1)
    assert (close < 8e-2).float().mean() > 0.97  # a router's tie may fall the other way
    for (name, a), b in zip(device.named_parameters(), layer.parameters(), strict=True):
        if name.endswith(("_EIH", "_EHI", "_SH", "_HS")):
            assert (a.grad.float().cpu() - b.grad.float()).norm() < 8e-2 * b.grad.float().norm(), name
    again, grads = x.cuda().requires_grad_(), {name: p.grad.clone() for name, p in device.named_parameters()}
    device.zero_grad()
    torch.compile(device, fullgraph=True)(again).backward(target.cuda())
    assert torch.equal(again.grad, on_gpu.grad)
    for name, p in device.named_parameters():
        assert torch.equal(p.grad, grads[name]), name
    optimizer, losses = torch.optim.SGD(device.parameters(), lr=0.05), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (device(x.cuda()).float() - target.cuda().float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_frozen_parts_get_no_gradient(precision):
    problem = Problem(500, 512, 256, 6, 2)
    experts, d_y = (problem.gate, problem.up, problem.down), make_d_y(problem)
    leaves = [t.clone().requires_grad_() for t in (problem.x_TH, problem.weights_TK, *experts)]
    mok.moe(leaves[0], problem.ids_TK, *leaves[1:], precision=precision).backward(d_y)
    for frozen in ({0}, {1}, {2, 3, 4}, {0, 1}):
        some = [t.detach().clone().requires_grad_(i not in frozen) for i, t in enumerate(leaves)]
        mok.moe(some[0], problem.ids_TK, *some[1:], precision=precision).backward(d_y)
        for i, (a, b) in enumerate(zip(some, leaves, strict=True)):
            assert (a.grad is None) == (i in frozen) and (a.grad is None or torch.equal(a.grad, b.grad)), (frozen, i)


def test_quantized_weight_gradients():
    """Those of the CPU's executor; all else has the bits it has without; a cut ring and recomputed rows move none."""
    problem = Problem(700, 512, 256, 6, 2)
    d_y = make_d_y(problem)

    def run(device: str, quantized: bool, tuning: mok.Tuning | None = None) -> list[torch.Tensor]:
        tensors = (problem.x_TH, problem.weights_TK, problem.gate, problem.up, problem.down)
        x, weights, *experts = leaves = [t.to(device, copy=True).requires_grad_() for t in tensors]
        options = dict(precision="fp8", quantized_weight_gradients=quantized, tuning=tuning)
        mok.moe(x, problem.ids_TK.to(device), weights, *experts, **options).backward(d_y.to(device))
        return [leaf.grad.float().cpu() for leaf in leaves]

    plain, first, want = run("cuda", False), run("cuda", True), run("cpu", True)
    assert torch.equal(first[0], plain[0]) and torch.equal(first[1], plain[1])
    for a, b in zip(run("cuda", True, mok.Tuning(minibatch=128, macrobatch=512, saved_rows=0)), first, strict=True):
        assert torch.equal(a, b)
    for got, without, right in zip(first[2:], plain[2:], want[2:], strict=True):
        near, far = ((value - right).norm() / right.norm() for value in (got, without))
        assert near < 2e-2 < far, (near, far)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_weights_are_never_stale(precision, sharded, tmp_path):
    """After each way of changing a parameter the layer has the bits of a copy that never saw the old one."""
    mesh = None
    if sharded:
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.FileStore(f"{tmp_path}/store", 1))
        mesh = torch.distributed.init_device_mesh("cuda", (1,))
    config = mok.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2)
    layer = mok.MoE(config, mesh, dtype=torch.bfloat16, device="cuda", precision=precision)
    x = torch.randn(300, 256, device="cuda").bfloat16()
    local = lambda parameter: parameter.to_local() if sharded else parameter  # noqa: E731
    seen = []

    def check() -> None:
        other = mok.MoE(config, dtype=torch.bfloat16, device="cuda", precision=precision)
        with torch.no_grad():
            for mine, its in zip(layer.parameters(), other.parameters(), strict=True):
                its.copy_(mine.to_local() if isinstance(mine, torch.distributed.tensor.DTensor) else mine)
        results = []
        for each in (layer, other):
            leaf = x.clone().requires_grad_()
            out = each(leaf)
            out.float().square().sum().backward()
            each.zero_grad()
            results.append((out.detach(), leaf.grad))
        (out, d_x), (want, d_want) = results
        assert torch.equal(out, want) and torch.equal(d_x, d_want)
        assert not seen or not torch.equal(out, seen[-1]), "the change had no effect"
        seen.append(out)

    try:
        check()
        optimizer = torch.optim.SGD([layer.gate_EIH, layer.up_EIH, layer.down_EHI], lr=0.5)
        for parameter in (layer.gate_EIH, layer.up_EIH, layer.down_EHI):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        check()
        local(layer.down_EHI).data.copy_(torch.randn_like(local(layer.down_EHI)))
        check()
        local(layer.up_EIH).data.mul_(2)
        check()
        if not sharded:
            memory, addresses = torch.empty(4, 128, 256, dtype=torch.bfloat16, device="cuda"), []
            for _ in range(2):  # a new parameter at the old address
                layer.gate_EIH = None
                layer.gate_EIH = torch.nn.Parameter(memory.normal_().data)
                addresses.append((layer.gate_EIH.data_ptr(), layer.gate_EIH._version))
                check()
            assert addresses[0] == addresses[1]
    finally:
        if sharded:
            torch.distributed.destroy_process_group()
