"""The low-level API: alone, compiled, captured, between processes over torch's symmetric memory; and what it refuses."""

from __future__ import annotations

import copy
import os
import random
import sys
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import torch.distributed as dist
from checks import both_kernels, hopper_launches, nothing_waits
from processes import run_processes
from virtual import DEVICE, Problem, assert_close, poison, poison_workspace
from virtual_backward import assert_near, expected, make_d_y

import mok
from mok import functional
from mok.functional import MoKConfig, MoKForwardContext, MoKSchedule, MoKWorkspace
from mok.kernels import quantize as kernels
from mok.ops import mxfp8_quantize
from mok.quantize import FP8_SQUARE
from mok.schedule import local_experts

NAMES = ("d_x", "d_weights", "gate", "up", "down", "shared gate", "shared up", "shared down")
CONFIG = MoKConfig(minibatch_size=512, macrobatch_size=1024)
NO_SHARED = (None, None, None)


class Calls:
    """The calls of one rank on its part of a problem."""

    def __init__(self, problem: Problem, d_y: torch.Tensor | None = None, group: dist.ProcessGroup | None = None, config=CONFIG) -> None:  # type: ignore[no-untyped-def]
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        tokens = problem.x_TH.shape[0]
        part = slice(tokens * rank // ranks, tokens * (rank + 1) // ranks)
        mine = local_experts(problem.experts, ranks, rank)
        self.config, self.num_experts, self.limit = config, problem.experts, problem.clamp
        self.x, self.ids, self.weights = (t[part].contiguous() for t in (problem.x_TH, problem.ids_TK, problem.weights_TK))
        self.d_y = None if d_y is None else d_y[part].contiguous()
        self.shared = problem.shared or NO_SHARED
        self.routed = tuple(w[mine.start : mine.stop] for w in (problem.gate, problem.up, problem.down))
        self.workspace: MoKWorkspace = functional.create_workspace(
            config, group, device=DEVICE, num_local_tokens=part.stop - part.start, hidden_size=problem.hidden, topk=problem.top_k
        )

    @property
    def layer(self) -> tuple[object, ...]:
        return (self.x, self.weights, *self.shared, *self.routed, self.limit)

    def schedule(self) -> MoKSchedule:
        return functional.build_schedule(self.workspace, self.config, self.ids, num_experts=self.num_experts)

    def forward(self, schedule: MoKSchedule) -> tuple[torch.Tensor, MoKForwardContext]:
        return functional.forward(self.config, self.workspace, schedule, *self.layer)

    def recompute(self, schedule: MoKSchedule) -> MoKForwardContext:
        gates_and_ups = (*self.shared[:2], *self.routed[:2])
        return functional.recompute_forward_context(self.config, self.workspace, schedule, self.x, *gates_and_ups, self.limit)

    def backward(self, schedule: MoKSchedule, context: MoKForwardContext, d_y=None, **options) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
        d_y = self.d_y if d_y is None else d_y
        values = functional.backward(self.config, self.workspace, schedule, context, d_y, *self.layer, **options)
        return {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}

    def run(self) -> dict[str, torch.Tensor]:
        self.poison()
        schedule = self.schedule()
        out, context = self.forward(schedule)
        self.poison()
        results = {"out": out, **self.backward(schedule, context)}
        torch.cuda.synchronize()
        self.workspace.check()
        return results

    def poison(self) -> None:
        """NaN where a call of a rank alone may rely on nothing."""
        if self.workspace.ep_size == 1:
            for buffer in (*self.workspace.inner.memory.own.values(), *self.workspace.inner.scratch.values()):
                if buffer.is_floating_point():
                    buffer.fill_(float("nan"))


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object = "") -> None:
    assert got.keys() == want.keys(), what
    for name, value in got.items():
        assert torch.equal(value, want[name]), (what, name)


def assert_right(got: dict[str, torch.Tensor], problem: Problem, d_y: torch.Tensor) -> None:
    assert_close(got["out"], problem.expected())
    assert_near({name: value for name, value in got.items() if name != "out"}, expected(problem, d_y))


SIZES = {  # tokens, hidden, width, experts, K, shared width
    "shared": (1000, 512, 256, 8, 3, 384),
    "none shared": (1000, 512, 256, 8, 3, 0),
    "odd sizes": (333, 272, 176, 5, 2, 144),
    "large": (2048, 2048, 768, 16, 8, 768),
}


@pytest.mark.parametrize("name", SIZES)
def test_one_rank(name):
    """Near fp32; the same bits from a context used again or recomputed, and whatever the knobs."""
    tokens, hidden, width, experts, top_k, shared_width = SIZES[name]
    problem = Problem(tokens, hidden, width, experts, top_k, masked=0.1, shared_width=shared_width)
    d_y = make_d_y(problem)
    calls = Calls(problem, d_y)
    first = calls.run()
    assert_right(first, problem, d_y)
    gradients = {name: value for name, value in first.items() if name != "out"}
    schedule = calls.schedule()
    _, context = calls.forward(schedule)
    assert context.gate_routed.shape == (min(1024, schedule.peer_rank.numel()), problem.width)
    calls.backward(schedule, context, -d_y)
    calls.poison()
    assert_equal(calls.backward(schedule, context), gradients, "context used again")
    calls.poison()
    again = calls.recompute(schedule)
    if shared_width:
        assert torch.equal(again.gate_shared, context.gate_shared) and torch.equal(again.up_shared, context.up_shared)
    calls.poison()
    assert_equal(calls.backward(schedule, again), gradients, "context recomputed")
    for changes in (dict(saved_rows=0), dict(saved_rows=300, num_sms=17), dict(minibatch_size=128, macrobatch_size=256)):
        assert_equal(Calls(problem, d_y, config=replace(CONFIG, **changes)).run(), first, changes)


def test_limit():
    """Small integers and sixty-fourths: gate and up are exact in any order, so that nobody is clipped on one side only."""
    problem = Problem(900, 512, 256, 8, 2, clamp=1.0, shared_width=256, shared_clamp=1.0)
    problem.x_TH = torch.randint(-3, 4, problem.x_TH.shape, device=DEVICE).bfloat16()
    problem.gate, problem.up = (torch.randint(-3, 4, problem.gate.shape, device=DEVICE).bfloat16() / 64 for _ in range(2))
    problem.shared = (*(torch.randint(-3, 4, w.shape, device=DEVICE).bfloat16() / 64 for w in problem.shared[:2]), problem.shared[2])
    d_y = make_d_y(problem)
    assert_right(Calls(problem, d_y).run(), problem, d_y)


def test_equals_the_layer():
    """The bits of `mok.moe` under autograd."""
    problem = Problem(700, 512, 256, 8, 2, masked=0.1)
    d_y = make_d_y(problem)
    leaves = [t.clone().requires_grad_() for t in (problem.x_TH, problem.weights_TK, problem.gate, problem.up, problem.down)]
    out = mok.moe(leaves[0], problem.ids_TK, *leaves[1:], tuning=mok.Tuning(minibatch=256, macrobatch=256, saved_rows=384))
    out.backward(d_y)
    want = {"out": out.detach(), **dict(zip(NAMES, [leaf.grad for leaf in leaves], strict=False))}
    assert_equal(Calls(problem, d_y).run(), want)


def test_any_strides_of_the_incoming_gradient():
    problem = Problem(300, 256, 128, 4, 2, shared_width=128)
    d_y = make_d_y(problem)
    calls = Calls(problem, d_y)
    schedule = calls.schedule()
    _, context = calls.forward(schedule)
    want = calls.backward(schedule, context)
    assert_equal(calls.backward(schedule, context, d_y.T.contiguous().T), want, "transposed")
    odd = torch.cat([d_y.new_zeros(1), d_y.flatten()])[1:].view(d_y.shape)
    assert odd.data_ptr() % 16
    assert_equal(calls.backward(schedule, context, odd), want, "at an odd address")
    same = d_y[:1, :1].expand(d_y.shape)
    assert_equal(calls.backward(schedule, context, same), calls.backward(schedule, context, same.contiguous()), "stride 0")


def test_fewer_tokens_than_the_workspace_is_for():
    problem = Problem(1000, 512, 256, 8, 3, masked=0.1, shared_width=384)
    d_y = make_d_y(problem)
    calls = Calls(problem, d_y)
    whole = calls.run()
    for count in (700, 1, 0):
        calls.x, calls.ids, calls.weights, calls.d_y = (
            t[:count] for t in (problem.x_TH, problem.ids_TK, problem.weights_TK, d_y)
        )  # fmt: skip
        got = calls.run()
        assert_equal({n: got[n] for n in ("out", "d_x", "d_weights")}, {n: whole[n][:count] for n in ("out", "d_x", "d_weights")}, count)
    assert all(not got[name].any() for name in NAMES)


def test_main_grads():
    for shared_width in (256, 0):
        problem = Problem(900, 512, 256, 6, 2, shared_width=shared_width)
        calls = Calls(problem, make_d_y(problem))
        plain = calls.run()
        schedule = calls.schedule()
        _, context = calls.forward(schedule)
        mains = [torch.zeros(w.shape, device=DEVICE) for w in (*calls.routed, *calls.shared) if w is not None]
        got = calls.backward(schedule, context, main_grads=mains)
        assert_equal(got, {name: plain[name] for name in ("d_x", "d_weights")})
        for main, name in zip(mains, NAMES[2:], strict=False):
            assert torch.equal(main.bfloat16(), plain[name]) and not torch.equal(main, plain[name].float()), name
        once = [main.clone() for main in mains]
        calls.backward(schedule, context, main_grads=mains)
        assert all(torch.equal(main, 2 * first) for main, first in zip(mains, once, strict=True))


def test_cached_workspaces():
    shape = dict(device=DEVICE, num_local_tokens=100, hidden_size=256, topk=3)
    workspace = functional.get_workspace(CONFIG, **shape)
    assert workspace is functional.get_workspace(CONFIG, **{**shape, "device": torch.cuda.current_device()})
    assert workspace is not functional.get_workspace(CONFIG, **{**shape, "topk": 2})
    functional.clear_workspace_cache()
    assert workspace is not functional.get_workspace(CONFIG, **shape)


class Layer(torch.autograd.Function):
    """How a caller makes the API differentiable."""

    @staticmethod
    def forward(ctx, workspace, ids, *layer):  # type: ignore[no-untyped-def]
        schedule = functional.build_schedule(workspace, CONFIG, ids, num_experts=8)
        out, context = functional.forward(CONFIG, workspace, schedule, *layer)
        ctx.rest = (workspace, schedule, context)
        ctx.save_for_backward(*layer)
        return out

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        d_x, d_weights, *d = functional.backward(CONFIG, *ctx.rest, d_out, *ctx.saved_tensors)
        return None, None, d_x, d_weights, *d[3:], *d[:3]


def test_compiled_whole_graph():
    """build_schedule, forward, recompute and backward in one graph, and under autograd: the bits of the eager calls."""
    problem = Problem(600, 512, 256, 8, 2, shared_width=256)
    d_y = make_d_y(problem)
    calls = Calls(problem, d_y)
    workspace = calls.workspace

    def step(x, ids, weights, d_y):  # type: ignore[no-untyped-def]
        schedule = functional.build_schedule(workspace, CONFIG, ids, num_local_experts=8)
        arguments = (2 * x, weights, *calls.shared, *calls.routed)
        out, context = functional.forward(CONFIG, workspace, schedule, *arguments)
        again = functional.recompute_forward_context(CONFIG, workspace, schedule, 2 * x, *calls.shared[:2], *calls.routed[:2])
        gradients = functional.backward(CONFIG, workspace, schedule, context, 2 * d_y, *arguments)
        return out, *gradients, *functional.backward(CONFIG, workspace, schedule, again, 2 * d_y, *arguments)

    compiled = torch.compile(step, fullgraph=True)
    for ids in (calls.ids, torch.full_like(calls.ids, 5), calls.ids):
        want, got = (function(calls.x, ids, calls.weights, d_y) for function in (step, compiled))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(got[1:9], got[9:], strict=True))

    results = []
    apply = lambda *layer: Layer.apply(workspace, calls.ids, *layer)  # noqa: E731
    for function in (apply, torch.compile(apply, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in calls.layer[:-1]]
        out = function(*leaves)
        out.backward(d_y)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@both_kernels
def test_capture_and_replay_with_changing_routes(ahead):
    width, shared_width = (768, 512) if ahead else (512, 256)
    problem = Problem(1500, 1024, width, 8, 4, shared_width=shared_width)
    d_y = make_d_y(problem)
    calls = Calls(problem, d_y)

    def step() -> dict[str, torch.Tensor]:
        schedule = calls.schedule()
        out, _ = calls.forward(schedule)
        return {"out": out, **calls.backward(schedule, calls.recompute(schedule))}

    routes = [calls.ids.clone(), torch.zeros_like(calls.ids) + 3, torch.zeros_like(calls.ids) - 1, calls.ids.clone()]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        with hopper_launches(2 * ahead, int(ahead)), torch.cuda.graph(graph, stream=stream):  # one recomputes
            captured = step()
    for route in routes:
        calls.ids.copy_(route)
        problem.ids_TK = route
        graph.replay()
        torch.cuda.synchronize()
        calls.workspace.check()
        got = {name: value.clone() for name, value in captured.items()}
        assert_right(got, problem, d_y)
        assert_equal(step(), got)


@both_kernels
def test_nothing_waits_for_the_device(ahead):
    problem = Problem(500, 1024, 768, 8, 4, shared_width=512) if ahead else Problem(500, 512, 256, 8, 2, shared_width=256)
    calls = Calls(problem, make_d_y(problem))
    mains = [torch.zeros(w.shape, device=DEVICE) for w in (*calls.routed, *calls.shared)]

    def step() -> None:
        schedule = calls.schedule()
        _, context = calls.forward(schedule)
        calls.backward(schedule, context)
        calls.backward(schedule, calls.recompute(schedule), main_grads=mains)

    step()
    torch.cuda.synchronize()
    with hopper_launches(2 * ahead, int(ahead)), nothing_waits():
        step()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    problem = Problem(500, 512, 256, 8, 2, shared_width=256)
    d_y = make_d_y(problem)
    want = Calls(problem, d_y).run()
    calls = Calls(problem, d_y)
    other = torch.device("cuda", 1)
    for name in ("x", "ids", "weights", "d_y"):
        setattr(calls, name, getattr(calls, name).to(other))
    calls.shared, calls.routed = (tuple(w.to(other) for w in group) for group in (calls.shared, calls.routed))
    calls.workspace = functional.create_workspace(CONFIG, device=other, num_local_tokens=500, hidden_size=512, topk=2)
    schedule = calls.schedule()
    out, _ = calls.forward(schedule)
    got = {"out": out, **calls.backward(schedule, calls.recompute(schedule))}
    torch.cuda.synchronize(other)
    calls.workspace.check()
    assert torch.cuda.current_device() == 0
    assert_equal({name: value.to(DEVICE) for name, value in got.items()}, want)


@pytest.mark.parametrize("shared_width", [0, 192])
def test_weights_quantized_beforehand(shared_width):
    """FP8, MXFP8 in both layouts and bf16 in turns in one workspace: the bits of `mok.moe`, whose parameters are quantized by each call."""
    problem = Problem(700, 512, 256, 6, 2, shared_width=shared_width)
    calls = Calls(problem, make_d_y(problem))
    routed, first = calls.routed, None
    if shared_width:
        first = calls.run()["out"]
    for form in ("fp8", "plain", "bf16", "tcgen05", "fp8"):
        precision = form if form in ("fp8", "bf16") else "mxfp8"
        forms = list(routed)
        if form == "fp8":
            forms = [tuple(kernels.quantize(weight, FP8_SQUARE)) for weight in routed]
        elif form != "bf16":
            fours = [mxfp8_quantize(weight, scale_layout=form) for weight in routed]
            forms = [four[:2] for four in fours]  # a backward takes all of gate and up, and the last two of down
        calls.routed = tuple(forms)
        calls.poison()
        schedule = calls.schedule()
        out, context = calls.forward(schedule)
        leaves = [t.clone().requires_grad_() for t in (calls.x, calls.weights, *routed)]
        want = mok.moe(leaves[0], calls.ids, *leaves[1:], precision=precision, clamp=calls.limit)
        if not shared_width:
            assert torch.equal(out, want), form
        elif form == "bf16":
            assert torch.equal(out, first)
        contexts = context, calls.recompute(schedule)
        if precision == "mxfp8":
            calls.routed = (*fours[:2], fours[2][2:])
        got, again = (calls.backward(schedule, kept) for kept in contexts)
        assert_equal(again, got, form)
        want.backward(calls.d_y)
        for name, leaf in zip(NAMES[1:5], leaves[1:], strict=True):
            assert torch.equal(got[name], leaf.grad), (form, name)


def test_refusals():
    """What needs a GPU to be refused; tests/test_functional_kernels.py has the others."""
    make = lambda **changes: functional.create_workspace(  # noqa: E731
        CONFIG, **{**dict(device=DEVICE, num_local_tokens=64, hidden_size=256, topk=2), **changes}
    )
    with pytest.raises(ValueError, match="hidden_size=1025: must be a multiple of 16"):
        make(hidden_size=1025)
    with pytest.raises(ValueError, match="device=meta: must be a CUDA device or the CPU"):
        make(device="meta")
    problem = Problem(64, 256, 128, 4, 2)
    calls = Calls(problem, make_d_y(problem))
    schedule = calls.schedule()
    out, context = calls.forward(schedule)
    with pytest.raises(ValueError, match=r"top_experts\.device=cpu: must be cuda:0"):
        functional.build_schedule(calls.workspace, CONFIG, calls.ids.cpu(), 4)
    with pytest.raises(ValueError, match=r"x\.device=cpu: must be cuda:0"):
        functional.forward(CONFIG, calls.workspace, schedule, calls.x.cpu(), *calls.layer[1:])
    with pytest.raises(ValueError, match=r"grad_output\.device=cpu: must be cuda:0"):
        calls.backward(schedule, context, calls.d_y.cpu())
    again, _ = calls.forward(schedule)
    assert torch.equal(again, out)


def steps_of_a_process(group):
    """Five steps with the same inputs, the last two with a recomputed context: their results, on the CPU."""
    problem = Problem(901, 512, 256, 7, 3, masked=0.1, shared_width=256)
    calls = Calls(problem, make_d_y(problem), group, MoKConfig(minibatch_size=256, macrobatch_size=512))
    results = []
    for step in range(5):
        schedule = calls.schedule()
        out, context = calls.forward(schedule)
        if step >= 3:
            context = calls.recompute(schedule)
        results.append({"out": out, **calls.backward(schedule, context)})
        torch.cuda.synchronize()
        calls.workspace.check()
    for result in results[1:]:
        assert_equal(result, results[0])
    counts = schedule.routes_per_expert
    return {"counts": counts.cpu(), **{name: value.cpu() for name, value in results[0].items()}}


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_over_symmetric_memory(ranks):
    """Near fp32, and the bits of one rank alone; gradients of shared experts are each rank's share of their sum."""
    parts = run_processes(steps_of_a_process, ranks)
    problem = Problem(901, 512, 256, 7, 3, masked=0.1, shared_width=256)
    d_y = make_d_y(problem)
    whole = {name: torch.cat([part[name] for part in parts]).to(DEVICE) for name in ("out", *NAMES[:5])}
    shared = {name: sum(part[name].to(DEVICE).float() for part in parts) for name in NAMES[5:]}
    assert_right({**whole, **shared}, problem, d_y)
    alone = Calls(problem, d_y).run()
    assert_equal(whole, {name: alone[name] for name in whole})
    for part in parts:
        assert torch.equal(part["counts"], problem.ids_TK[problem.ids_TK >= 0].bincount(minlength=7).cpu())


REPEATS = 100


def of_late_ranks() -> tuple[Problem, torch.Tensor]:
    problem = Problem(901, 1024, 768, 7, 4, masked=0.1, shared_width=512)
    return problem, make_d_y(problem)


def late_steps_of_a_process(group):
    """Many steps with the same inputs on poisoned memory, by ranks that sleep a random time before each call, by the kernels for Hopper
    where it is one: their results, on the CPU."""
    calls = Calls(*of_late_ranks(), group, MoKConfig(minibatch_size=256, macrobatch_size=512))
    chance, first = random.Random(dist.get_rank(group)), None

    def sleep() -> None:
        torch.cuda._sleep(chance.randrange(1, 4_000_000))

    def poison_and_sleep() -> None:
        """Nobody reads or writes this rank's memory between a call's last barrier and the next call's first."""
        poison()
        poison_workspace(calls.workspace.inner)
        sleep()

    with hopper_launches(REPEATS, REPEATS):
        for repeat in range(REPEATS):
            poison_and_sleep()
            schedule = calls.schedule()
            sleep()
            out, context = calls.forward(schedule)
            poison_and_sleep()
            got = {"out": out, **calls.backward(schedule, context)}
            torch.cuda.synchronize()
            calls.workspace.check()
            first = first or got
            assert_equal(got, first, repeat)
    return {name: value.cpu() for name, value in first.items()}


def test_bits_of_late_processes():
    """Those of one rank alone with the whole batch; of shared experts, those of one rank alone with this rank's tokens."""
    parts = run_processes(late_steps_of_a_process, 2)
    problem, d_y = of_late_ranks()
    alone = Calls(problem, d_y).run()
    assert_right(alone, problem, d_y)
    whole = {name: torch.cat([part[name] for part in parts]).to(DEVICE) for name in ("out", *NAMES[:5])}
    assert_equal(whole, {name: alone[name] for name in whole})
    for rank, part in enumerate(parts):
        tokens = slice(901 * rank // 2, 901 * (rank + 1) // 2)
        mine = copy.copy(problem)
        mine.x_TH, mine.ids_TK, mine.weights_TK = problem.x_TH[tokens], problem.ids_TK[tokens], problem.weights_TK[tokens]
        of_mine = Calls(mine, d_y[tokens]).run()
        assert_equal({name: part[name].to(DEVICE) for name in NAMES[5:]}, {name: of_mine[name] for name in NAMES[5:]}, rank)
