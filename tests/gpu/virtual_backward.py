"""Forward and backward on R virtual ranks of one GPU, and the same gradients in fp64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from virtual import DEVICE, Problem, assert_close, deal, poison, poison_workspace

from mok import schedule as host_schedule
from mok.kernels import launch, launch_backward, launch_backward_fp8, launch_backward_mxfp8, launch_fp8, launch_mxfp8, memory
from mok.kernels.groups import HEADER, RECORD, ROW, TICKET
from mok.kernels.launch import ForwardPlan, Workspace
from mok.kernels.launch_backward import BackwardPlan, Gradients, Needs
from mok.kernels.launch_fp8 import QuantizedExperts
from mok.quantize import MX_ROW, UNQUANTIZED, Recipe

NAMES = ("gate", "up", "down")


def make_d_y(problem: Problem, seed: int = 7) -> Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(problem.x_TH.shape, generator=g, device=DEVICE).bfloat16()


def many_rows() -> tuple[Problem, torch.Tensor]:
    """One expert of at least 12 tiles; zero, negative and tiny router weights."""
    problem = Problem(2500, 1024, 768, 12, 4, masked=0.05, shared_width=512)
    problem.ids_TK[:1500, 0] = 5
    problem.weights_TK = torch.randn_like(problem.weights_TK)
    problem.weights_TK[:20], problem.weights_TK[20:30] = 0.0, 1e-8
    return problem, make_d_y(problem)


def _swiglu_gradients(x, d_y, w, gate_w, up_w, down_w, clamp, recipe=UNQUANTIZED):
    """fp64 gradients of w * expert(x): d_x, d_w, and of the three weights; gate, up, h and d_gate, d_up, w h rounded as the layer does.

    x and d_y as they were published.
    """
    rounded = lambda t: t.bfloat16().double()  # noqa: E731
    weights = (gate_w, up_w, down_w)
    gate, up = (rounded(x @ recipe.weight(weight.float(), -1).double().T) for weight in weights[:2])
    gate_w, up_w, down_w = (recipe.weight(weight.float(), -2).double() for weight in weights)
    g, u = (gate, up) if clamp is None else (gate.clamp(max=clamp), up.clamp(-clamp, clamp))
    s = torch.sigmoid(g)
    h = rounded(g * s * u)
    d_h = d_y @ down_w
    d_w = (d_h * h).sum(1)
    d_h = d_h * w[:, None]
    d_gate, d_up = d_h * u * s * (1 + g * (1 - s)), d_h * g * s
    if clamp is not None:
        d_gate, d_up = torch.where(gate > clamp, 0, d_gate), torch.where(up.abs() > clamp, 0, d_up)
    d_gate, d_up = rounded(d_gate), rounded(d_up)
    of_x = [recipe.rows(d.float()).double() for d in (d_gate, d_up)]
    return of_x[0] @ gate_w + of_x[1] @ up_w, d_w, d_gate.T @ x, d_up.T @ x, d_y.T @ rounded(h * w[:, None])


def expected(problem: Problem, d_y: Tensor, recipe: Recipe = UNQUANTIZED) -> dict[str, Tensor]:
    """The output without any rounding, and the gradients; those of weights kept in fp32, as they are large.

    The output is that without a recipe.
    """
    p, x, dy = problem, problem.x_TH.double(), d_y.double()
    d_x, d_weights = torch.zeros_like(x), torch.zeros(p.ids_TK.shape, dtype=torch.float64, device=DEVICE)
    out = {name: torch.zeros(w.shape, device=DEVICE) for name, w in zip(NAMES, (p.gate, p.up, p.down), strict=True)}
    if p.shared:
        d_x, _, *shared = _swiglu_gradients(x, dy, torch.ones_like(x[:, 0]), *p.shared, p.shared_clamp)
        out |= {f"shared {name}": grad.float() for name, grad in zip(NAMES, shared, strict=True)}
    x, dy = (recipe.rows(published.float()).double() for published in (problem.x_TH, d_y))
    for e in range(p.experts):
        token, k = (p.ids_TK == e).nonzero(as_tuple=True)
        if len(token):
            weights = (p.gate[e], p.up[e], p.down[e])
            dx, dw, *grads = _swiglu_gradients(x[token], dy[token], p.weights_TK[token, k].double(), *weights, p.clamp, recipe)
            d_x.index_add_(0, token, dx)
            d_weights[token, k] = dw
            for name, grad in zip(NAMES, grads, strict=True):
                out[name][e] = grad
    return out | {"out": p.expected(), "d_x": d_x, "d_weights": d_weights}


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], limit: float = 8e-3) -> dict[str, float]:
    """The relative error of everything, of every token and expert, and of the last 8 columns by themselves."""
    errors = {}
    for name, value in got.items():
        if name == "out":
            errors[name] = assert_close(value, want[name])
            continue
        a, b = value.float(), want[name]
        assert torch.isfinite(a).all(), f"{name} is not finite"
        errors[name] = float((a - b).norm() / b.norm().clamp(min=1e-3))
        assert errors[name] < limit, f"{name}: relative error {errors[name]:.2e}"
        if name == "d_x" or a.dim() == 3:  # per token, per expert
            parts = (a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1).clamp(min=1e-2)
            assert float(parts.max()) < 2 * limit, f"{name}: relative error {float(parts.max()):.2e} in {int(parts.argmax())}"
        tail = (a[..., -8:] - b[..., -8:]).norm() / b[..., -8:].norm().clamp(min=1e-3)
        assert float(tail) < 2 * limit, f"{name}: relative error {float(tail):.2e} in the last 8 columns"
    return errors


Results = tuple[Tensor, Gradients]
"""What one rank computed: its output and gradients."""


class Group:
    """R virtual ranks with uneven shares of the tokens; one process, one stream each, so that they really run at the same time."""

    regions = staticmethod(memory.backward_regions)
    forward = staticmethod(launch.forward)
    backward = staticmethod(launch_backward.backward)

    def __init__(
        self, problem: Problem, d_y: Tensor, ranks: int, plan: BackwardPlan | None = None, needs: Needs | None = None,
        saved_rows: int = 1 << 20, mains: dict[str, Tensor] | None = None, timeout_s: float = 20.0,
        forward_plan: ForwardPlan | None = None, cuts: list[int] | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.ranks, self.needs, self.mains = problem, ranks, needs or Needs(), mains
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count // ranks
        plan, forward_plan = plan or BackwardPlan(), forward_plan or ForwardPlan()
        self.plan = replace(plan, num_sms=plan.num_sms or sms)
        self.forward_plan = replace(forward_plan, num_sms=forward_plan.num_sms or sms)
        self.parts = [slice(a, b) for a, b in itertools.pairwise(cuts or deal(problem.x_TH.shape[0], ranks))]
        most = max(p.stop - p.start for p in self.parts)
        self.saved_rows = min(saved_rows, ranks * most * problem.top_k + 128 * problem.experts)
        layout = self.regions(most, problem.hidden, problem.experts, problem.top_k, ranks)
        self.workspaces = [
            Workspace(view, most, problem.hidden, problem.top_k, DEVICE, timeout_s) for view in memory.virtual_memory(layout, ranks, DEVICE)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        self.inputs = [
            tuple(t[p].contiguous() for t in (problem.x_TH, problem.ids_TK, problem.weights_TK, d_y)) for p in self.parts
        ]  # fmt: skip
        self.warm()

    def one_rank(self, rank: int, before: Callable[[], None] = lambda: None) -> Results:
        p, workspace = self.problem, self.workspaces[rank]
        local = host_schedule.local_experts(p.experts, self.ranks, rank)
        mine = slice(local.start, local.stop)
        x, ids, weights, d_y = self.inputs[rank]
        experts = (p.gate[mine], p.up[mine], p.down[mine])
        before()
        rows = launch.schedule(workspace, ids, p.experts)
        before()
        out, saved = self.forward(
            workspace, rows, ids, weights, x, *experts, p.experts, shared=p.shared, clamp=p.clamp, shared_clamp=p.shared_clamp, save=True,
            saved_rows=self.saved_rows, plan=self.forward_plan,
        )  # fmt: skip
        before()
        mains = None
        if self.mains is not None:
            sums = {name: m.clone() if workspace.warming else m for name, m in self.mains.items()}
            mains = [tuple(sums[prefix + name] for name in NAMES) for prefix in ("", "shared ")]
        gradients = self.backward(
            workspace, rows, saved, ids, d_y, x, weights, *experts, p.experts, needs=self.needs, plan=self.plan, shared=p.shared,
            clamp=p.clamp, shared_clamp=p.shared_clamp, main_grads=mains and tuple(m[mine] for m in mains[0]),
            shared_main_grads=mains and mains[1],
        )  # fmt: skip
        return out, gradients

    def warm(self) -> None:
        """Load every module before anything spins."""
        for rank, workspace in enumerate(self.workspaces):
            workspace.warming = True
            self.one_rank(rank)
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            workspace.memory.clear_failure()
            workspace.warming = False

    def named(self, results: list[Results]) -> dict[str, Tensor]:
        """Output and gradients of all tokens and experts; those of the shared experts are the sum of the ranks' shares."""
        outs, gradients = zip(*results, strict=True)
        first = gradients[0]
        named = {"out": torch.cat(outs)}
        if first.d_x_TH is not None:
            named["d_x"] = torch.cat([r.d_x_TH for r in gradients])
        if first.d_weights_TK is not None:
            named["d_weights"] = torch.cat([r.d_weights_TK for r in gradients])
        for i, name in enumerate(NAMES):
            if first.experts is not None:
                named[name] = torch.cat([r.experts[i] for r in gradients])
            if first.shared is not None:
                named[f"shared {name}"] = first.shared[i] if self.ranks == 1 else sum(r.shared[i].float() for r in gradients)
        return named

    def run(self, delay: bool = False) -> dict[str, Tensor]:
        """On poisoned memory; with delay every rank sleeps a random time before its schedule, forward and backward."""
        for workspace, stream in zip(self.workspaces, self.streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                poison_workspace(workspace)
                poison()
        before = (lambda: torch.cuda._sleep(int(torch.randint(1, 4_000_000, (1,))))) if delay else lambda: None
        results = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                results.append(self.one_rank(rank, before))
        torch.cuda.synchronize()
        for workspace in self.workspaces:
            workspace.check()
        return self.named(results)


class Shares(Group):
    """With every rank's share of the shared experts' gradients by itself, too."""

    def named(self, results: list[Results]) -> dict[str, Tensor]:
        shares = {
            f"shared {name} of rank {rank}": gradients.shared[i]
            for rank, (_, gradients) in enumerate(results)
            if gradients.shared is not None
            for i, name in enumerate(NAMES)
        }
        return super().named(results) | shares


def listed(workspace: Workspace) -> Tensor:
    """The records [n, RECORD] of the backward's list of tasks that was written last, in the workspace's memory."""
    table = workspace.scratch["groups"].tolist()
    total = table[HEADER.value + table[0] * ROW.value + TICKET.value]
    return workspace.scratch["tasks_backward"].view(-1, RECORD.value)[:total]


class Fp8Group(Group):
    """Virtual ranks with the routed experts in FP8."""

    regions = staticmethod(memory.quantized_backward_regions)
    backward = staticmethod(launch_backward_fp8.backward)

    @staticmethod
    def forward(workspace, rows, ids, weights, x, gate, up, down, num_experts, **options):
        return launch_fp8.forward(workspace, rows, ids, weights, x, QuantizedExperts.of(gate, up, down), num_experts, **options)


class Mxfp8Group(Group):
    """Virtual ranks with the routed experts in MXFP8, in the form that this device multiplies best."""

    regions = staticmethod(functools.partial(memory.quantized_backward_regions, block=MX_ROW))
    backward = staticmethod(launch_backward_mxfp8.backward)

    @staticmethod
    def forward(workspace, rows, ids, weights, x, gate, up, down, num_experts, **options):
        experts = launch_mxfp8.experts_for(DEVICE, gate, up, down)
        return launch_mxfp8.forward(workspace, rows, ids, weights, x, experts, num_experts, **options)
