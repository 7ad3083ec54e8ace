"""R virtual ranks on one GPU: one process, one stream and num_sms = 132 // R programs each, so that they really run at the same time."""

from __future__ import annotations

import itertools

import torch
from layers import Batch
from torch import Tensor

from mok import schedule as host_schedule
from mok.fabric import Region
from mok.kernels import launch, memory
from mok.kernels.launch import ForwardPlan, Workspace

DEVICE = torch.device("cuda")


def poison() -> None:
    """Fill memory that is about to be allocated again with NaN and Inf: blocks of the sizes that the allocator keeps apart."""
    blocks = [torch.full((2**n,), float("nan") if n % 2 else float("inf"), device=DEVICE) for n in range(6, 20) for _ in range(3)]
    del blocks


def poison_workspace(workspace: Workspace) -> None:
    """NaN in everything that a call may not rely on, in the order of the current stream: what peers write, and scratch."""
    for buffer in (*workspace.memory.own.values(), *workspace.scratch.values()):
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
        elif buffer.dtype == torch.uint8:  # E4M3 and E8M0
            buffer.fill_(0xFF)


def deal(tokens: int, ranks: int) -> list[int]:
    """Where a global batch is cut: uneven shares of the ranks."""
    return [0, *[tokens * (2 * r - 1) // (2 * ranks - 1) for r in range(1, ranks)], tokens]


class Problem:
    """Tokens, routes and weights of a whole group."""

    def __init__(self, tokens, hidden, width, experts, top_k, seed=0, masked=0.0, shared_width=0, clamp=None, shared_clamp=None):
        g = torch.Generator(DEVICE).manual_seed(seed)
        normal = lambda *shape, scale=1.0: (torch.randn(*shape, generator=g, device=DEVICE) * scale).bfloat16()  # noqa: E731
        self.experts, self.top_k, self.hidden, self.width = experts, top_k, hidden, width
        self.clamp, self.shared_clamp = clamp, shared_clamp
        self.x_TH = normal(tokens, hidden)
        scores, ids = torch.randn(tokens, experts, generator=g, device=DEVICE).topk(top_k)
        self.weights_TK, self.ids_TK = scores.softmax(-1), ids
        dead = torch.rand(tokens, top_k, generator=g, device=DEVICE) < masked
        self.ids_TK[dead], self.weights_TK[dead] = -1, float("nan")
        self.gate, self.up = (normal(experts, width, hidden, scale=hidden**-0.5) for _ in range(2))
        self.down = normal(experts, hidden, width, scale=width**-0.5)
        self.shared = None
        if shared_width:
            self.shared = tuple(normal(shared_width, hidden, scale=hidden**-0.5) for _ in range(2)) + (
                normal(hidden, shared_width, scale=shared_width**-0.5),
            )

    @classmethod
    def of(cls, batch: Batch) -> Problem:
        """A global batch of the CPU's tests, on the GPU; its d_out is no part of it."""
        self = cls.__new__(cls)
        self.experts, self.top_k, self.hidden, self.width = batch.experts, batch.ids.shape[1], batch.x.shape[1], batch.gate.shape[1]
        self.clamp, self.shared_clamp, self.shared = batch.clamp, None, None
        self.x_TH, self.ids_TK, self.weights_TK = (t.to(DEVICE) for t in (batch.x, batch.ids, batch.weights))
        self.gate, self.up, self.down = (t.to(DEVICE) for t in (batch.gate, batch.up, batch.down))
        return self

    def expert(self, x, gate, up, down, clamp):
        gate, up = x @ gate.double().T, x @ up.double().T
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return (torch.nn.functional.silu(gate) * up) @ down.double().T

    def expected(self) -> Tensor:
        """fp64, expert by expert on gathered tokens."""
        x = self.x_TH.double()
        out = self.expert(x, *self.shared, self.shared_clamp) if self.shared else torch.zeros_like(x)
        for e in range(self.experts):
            token, k = (self.ids_TK == e).nonzero(as_tuple=True)
            if len(token):
                y = self.expert(x[token], self.gate[e], self.up[e], self.down[e], self.clamp)
                out.index_add_(0, token, y * self.weights_TK[token, k, None])
        return out


class Group:
    """The workspaces of R virtual ranks, one stream each, so that they really run at the same time."""

    def __init__(self, problem: Problem, ranks: int, plan: ForwardPlan | None = None, timeout_s: float = 20.0):
        self.problem, self.ranks = problem, ranks
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count // ranks
        self.plan = ForwardPlan(**{**vars(plan or ForwardPlan()), "num_sms": (plan.num_sms if plan and plan.num_sms else sms)})
        self.parts = [slice(a, b) for a, b in itertools.pairwise(deal(problem.x_TH.shape[0], ranks))]
        most = max(p.stop - p.start for p in self.parts)
        layout = self.regions(most)
        self.workspaces = [
            Workspace(view, most, problem.hidden, problem.top_k, DEVICE, timeout_s) for view in memory.virtual_memory(layout, ranks, DEVICE)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        self.inputs = [
            (problem.x_TH[p].contiguous(), problem.ids_TK[p].contiguous(), problem.weights_TK[p].contiguous()) for p in self.parts
        ]
        self.warm()

    def regions(self, most: int) -> list[Region]:
        return memory.regions(most, self.problem.hidden, self.problem.experts, self.problem.top_k, self.ranks)

    def one_rank(self, rank: int, save: bool = False, saved_rows: int = 0, before=None):
        p, workspace = self.problem, self.workspaces[rank]
        local = host_schedule.local_experts(p.experts, self.ranks, rank)
        mine = slice(local.start, local.stop)
        x, ids, weights = self.inputs[rank]
        if before:
            before()
        rows = launch.schedule(workspace, ids, p.experts)
        if before:
            before()
        out, saved = launch.forward(
            workspace, rows, ids, weights, x, p.gate[mine], p.up[mine], p.down[mine], p.experts, shared=p.shared, clamp=p.clamp,
            shared_clamp=p.shared_clamp, save=save, saved_rows=saved_rows, plan=self.plan,
        )  # fmt: skip
        return out, rows, saved

    def warm(self) -> None:
        """Load every module before anything spins."""
        for rank, workspace in enumerate(self.workspaces):
            workspace.warming = True
            self.one_rank(rank)
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            workspace.warming = False

    def run(self, delay: bool = False, **options) -> Tensor:
        """The output of all tokens, on poisoned memory; with delay every rank sleeps a random time before its schedule and its forward."""
        for workspace, stream in zip(self.workspaces, self.streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                poison_workspace(workspace)
                poison()
        outs = []
        before = (lambda: torch.cuda._sleep(int(torch.randint(1, 4_000_000, (1,))))) if delay else None
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                outs.append(self.one_rank(rank, before=before, **options)[0])
        torch.cuda.synchronize()
        for workspace in self.workspaces:
            workspace.check()
        return torch.cat(outs)


def assert_close(out: Tensor, expected: Tensor, limit: float = 8e-3) -> float:
    """The relative error of every row, and of the last 8 columns by themselves."""
    assert torch.isfinite(out.float()).all(), "not finite"
    if not out.numel():
        return 0.0
    error = (out.float() - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-3)
    assert float(error.max()) < limit, f"relative error {float(error.max()):.2e} in row {int(error.argmax())}"
    tail = (out[:, -8:].float() - expected[:, -8:]).norm() / expected[:, -8:].norm().clamp(min=1e-3)
    assert float(tail) < limit, f"relative error {float(tail):.2e} in the last 8 columns"
    return float(error.max())
