"""Whole layers on one GPU: schedule, publish, kernel and combine, against torch and against cuBLAS on the same products, in one process.

    python benchmarks/layer.py --forward [--shapes fine,qwen3-30b] [--out benchmarks/results/h200-layer.json]

Every shape is checked against the fp32 definition before it is timed. Times are medians over CUDA events, the contestants taking turns so
that the card's temperature is shared; the inputs rotate.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mok.bench import report
from mok.bench.baselines import TorchLayer, dense_products
from mok.bench.timing import medians
from mok.kernels import launch, memory
from mok.kernels.launch import ForwardPlan, Workspace

SHAPES = {  # T, H, I, E, K
    "kimi-k2-slice": (2048, 7168, 2048, 12, 8),
    "v4-flash-slice": (4096, 4096, 2048, 32, 6),
    "qwen3-30b": (8192, 2048, 768, 128, 8),
    "mixtral-8x7b": (8192, 4096, 14336, 8, 2),
    "fine": (8192, 4096, 1024, 64, 8),
    "kimi-k2-ep8": (8192, 7168, 2048, 48, 8),
    "glm-5-slice": (8192, 6144, 2048, 4, 2),
    "v4-pro-slice": (3072, 7168, 3072, 6, 4),
}
INPUT_SETS = 3


class Layer:
    """Weights, rotating inputs, and a workspace for one shape."""

    def __init__(self, tokens: int, hidden: int, width: int, experts: int, top_k: int, shared_width: int = 0) -> None:
        device = torch.device("cuda")
        normal = lambda *shape: torch.randn(*shape, device=device).mul_(shape[-1] ** -0.5).bfloat16()  # noqa: E731
        self.experts, self.top_k, self.turn = experts, top_k, 0
        self.gate, self.up, self.down = normal(experts, width, hidden), normal(experts, width, hidden), normal(experts, hidden, width)
        self.shared = (normal(shared_width, hidden), normal(shared_width, hidden), normal(hidden, shared_width)) if shared_width else None
        self.inputs = []
        for _ in range(INPUT_SETS):
            scores, ids = torch.randn(tokens, experts, device=device).topk(top_k)
            self.inputs.append((torch.randn(tokens, hidden, device=device).bfloat16(), ids, scores.softmax(-1)))
        view = memory.virtual_memory(memory.regions(tokens, hidden, experts, top_k, 1), 1, device)[0]
        self.workspace = Workspace(view, tokens, hidden, top_k, device)

    def next_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        self.turn += 1
        return self.inputs[self.turn % INPUT_SETS]

    def __call__(self, plan: ForwardPlan | None = None, inputs: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        x, ids, weights = inputs or self.next_inputs()
        rows = launch.schedule(self.workspace, ids, self.experts)
        return launch.forward(
            self.workspace, rows, ids, weights, x, self.gate, self.up, self.down, self.experts, shared=self.shared, plan=plan
        )[0]  # fmt: skip

    def check(self, plan: ForwardPlan | None = None, tokens: int = 48) -> float:
        """The largest relative error of a row, over some rows, against fp32; the same call twice must give the same bits."""
        x, ids, weights = self.inputs[0]
        self.workspace.memory.own["combine"].fill_(float("nan"))
        out = self(plan, self.inputs[0])
        again = self(plan, self.inputs[0])
        torch.cuda.synchronize()
        self.workspace.check()
        if not torch.equal(out, again):
            raise AssertionError("two runs differ")
        error = 0.0
        for t in torch.randint(0, x.shape[0], (tokens,)).tolist():
            want = torch.zeros(x.shape[1], device=x.device)
            experts = [(self.gate[e], self.up[e], self.down[e], w) for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True)]
            if self.shared:
                experts.append((*self.shared, 1.0))
            for gate, up, down, w in experts:
                row = x[t].float()
                want += w * (down.float() @ (torch.nn.functional.silu(gate.float() @ row) * (up.float() @ row)))
            error = max(error, float((out[t].float() - want).norm() / want.norm()))
        if not error < 1e-2:
            raise AssertionError(f"relative error {error:.1e}")
        return error


def measure_forward(name: str, repeats: int) -> dict[str, object]:
    tokens, hidden, width, experts, top_k = SHAPES[name]
    torch.manual_seed(0)
    layer = Layer(*SHAPES[name])
    error = layer.check()
    baseline = TorchLayer(layer.gate, layer.up, layer.down)
    dense = dense_products(tokens * top_k, hidden, width, torch.device("cuda"))
    with torch.no_grad():
        ms = medians({"mok": layer, baseline.name: lambda: baseline(*layer.next_inputs()), "cublas": dense}, repeats)
    work = 6 * tokens * top_k * hidden * width * 1e-9
    row = dict(
        suite="layer", shape=name, T=tokens, H=hidden, I=width, E=experts, K=top_k, ep=1, precision="bf16", direction="fwd",
        ms=round(ms["mok"], 4), tflops=round(work / ms["mok"], 1), cublas_tflops=round(work / ms["cublas"], 1),
        baselines={baseline.name: dict(ms=round(ms[baseline.name], 4), tflops=round(work / ms[baseline.name], 1))},
        ratio=round(ms[baseline.name] / ms["mok"], 3),
    )  # fmt: skip
    print(
        f"{name:16} T{tokens} H{hidden} I{width} E{experts} K{top_k}: {ms['mok']:.3f} ms, {row['tflops']} TFLOP/s,",
        f"{row['ratio']:.2f} x torch ({row['baselines'][baseline.name]['tflops']}), cuBLAS {row['cublas_tflops']},",
        f"relative error {error:.1e}", flush=True,
    )  # fmt: skip
    return row


def measure_shared(name: str, repeats: int) -> None:
    """One shared expert of the routed width: what it adds, against its own products at the rate that the routed ones reach."""
    _, _, width, _, top_k = SHAPES[name]
    torch.manual_seed(0)
    with_shared = Layer(*SHAPES[name], shared_width=width)
    error = with_shared.check()
    routed = Layer(*SHAPES[name])
    with torch.no_grad():
        ms = medians({"routed": routed, "with shared": with_shared}, repeats)
    added = (ms["with shared"] - ms["routed"]) / (ms["routed"] / top_k)
    print(
        f"{name:16} routed {ms['routed']:.3f} ms, with one shared expert {ms['with shared']:.3f} ms: "
        f"adds {added:.3f} of its products at the routed rate, relative error {error:.1e}", flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--shared", action="store_true", help="what one shared expert of the routed width adds")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    parser.add_argument("--out")
    options = parser.parse_args()
    print(report.headline(), flush=True)
    rows = []
    for name in options.shapes.split(",") if options.shared else ():
        measure_shared(name, options.repeats)
        torch.cuda.empty_cache()
    for name in options.shapes.split(",") if options.forward else ():
        rows.append(measure_forward(name, options.repeats))
        torch.cuda.empty_cache()
    if options.out:
        report.write(options.out, rows, options.commit)


if __name__ == "__main__":
    main()
