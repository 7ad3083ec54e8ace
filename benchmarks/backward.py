"""The backward of whole layers on one GPU: publish, kernel and combine, against torch's autograd, in one process.

    python benchmarks/backward.py [--shapes fine,qwen3-30b] [--plans '{"ring 128": {"ring_tiles": 128}}'] [--out results.json]

Every shape is checked before it is timed: near torch's gradients, and the same bits twice. Torch's backward is a step minus its forward.
Times are medians over CUDA events, the contestants taking turns.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token, N = T * K.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from layer import SHAPES  # finds the package, too
from torch import Tensor

from mok.bench import report
from mok.bench.baselines import TorchLayer
from mok.bench.timing import medians
from mok.kernels import launch, launch_backward, memory
from mok.kernels.launch import Workspace
from mok.kernels.launch_backward import BackwardPlan, Gradients, Needs

INPUT_SETS = 2


class Layer:
    """Weights, rotating inputs with their forwards' saved values, and a workspace for one shape."""

    def __init__(self, tokens: int, hidden: int, width: int, experts: int, top_k: int, saved: float = 1.0) -> None:
        device = torch.device("cuda")
        normal = lambda *shape: torch.randn(*shape, device=device).mul_(shape[-1] ** -0.5).bfloat16()  # noqa: E731
        self.experts, self.turn = experts, 0
        self.weights = normal(experts, width, hidden), normal(experts, width, hidden), normal(experts, hidden, width)
        view = memory.virtual_memory(memory.backward_regions(tokens, hidden, experts, top_k, 1), 1, device)[0]
        self.workspace = Workspace(view, tokens, hidden, top_k, device)
        rows = int((tokens * top_k + 128 * experts) * saved) // 128 * 128
        self.inputs = []
        for _ in range(INPUT_SETS):
            scores, ids = torch.randn(tokens, experts, device=device).topk(top_k)
            x, d_y = (torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(2))
            weights = scores.softmax(-1)
            schedule = launch.schedule(self.workspace, ids, experts)
            _, kept = launch.forward(self.workspace, schedule, ids, weights, x, *self.weights, experts, save=True, saved_rows=rows)
            self.inputs.append((x, ids, weights, d_y, schedule, kept))

    def next_inputs(self) -> tuple[Any, ...]:
        self.turn += 1
        return self.inputs[self.turn % INPUT_SETS]

    def __call__(self, plan: BackwardPlan | None = None, needs: Needs | None = None, inputs: tuple[Any, ...] | None = None) -> Gradients:
        x, ids, weights, d_y, schedule, kept = inputs or self.next_inputs()
        return launch_backward.backward(
            self.workspace, schedule, kept, ids, d_y, x, weights, *self.weights, self.experts, plan=plan, needs=needs
        )

    def check(self, baseline: TorchLayer, plan: BackwardPlan | None = None) -> float:
        """The largest relative error of a gradient against torch's; two runs must give the same bits."""
        x, ids, weights, d_y, _, _ = self.inputs[0]
        self.workspace.memory.own["combine"].fill_(float("nan"))
        first, again = self(plan, inputs=self.inputs[0]), self(plan, inputs=self.inputs[0])
        torch.cuda.synchronize()
        self.workspace.check()
        d_x, d_weights, d_both, d_down = baseline.step(x, ids, weights, d_y)
        d_gate, d_up = d_both.chunk(2, dim=1)
        pairs = [(first.d_x_TH, again.d_x_TH, d_x), (first.d_weights_TK, again.d_weights_TK, d_weights)]
        pairs += list(zip(first.experts or (), again.experts or (), (d_gate, d_up, d_down), strict=True))
        worst = 0.0
        for got, repeated, want in pairs:
            if not torch.equal(got, repeated):
                raise AssertionError("two runs differ")
            of = range(want.shape[0]) if want.dim() == 3 else [slice(None)]
            difference = sum(float((got[i].float() - want[i].float()).square().sum()) for i in of)
            worst = max(worst, (difference / sum(float(want[i].float().square().sum()) for i in of)) ** 0.5)
        if not worst < 1.5e-2:
            raise AssertionError(f"relative error {worst:.1e}")
        return worst


def measure(name: str, repeats: int, plans: dict[str, dict[str, Any]], with_parts: bool, saved: float) -> dict[str, Any]:
    tokens, hidden, width, experts, top_k = SHAPES[name]
    torch.manual_seed(0)
    layer = Layer(*SHAPES[name], saved=saved)
    baseline = TorchLayer(*layer.weights)
    contestants: dict[str, Any] = {"mok": layer}
    error = layer.check(baseline)
    for label, changes in plans.items():
        try:
            layer.check(baseline, BackwardPlan(**changes))
            contestants[label] = lambda changes=changes: layer(BackwardPlan(**changes))
        except Exception as problem:
            print(f"{name}, {label}: {str(problem)[:200]}", flush=True)
    if with_parts:
        alone = {"d_x": Needs(True, False, False), "d_weights": Needs(False, True, False), "experts": Needs(False, False, True)}
        for label, needs in alone.items():
            contestants[f"only {label}"] = lambda needs=needs: layer(needs=needs)

    def torch_forward() -> Tensor:
        x, ids, weights, *_ = layer.next_inputs()
        return baseline(x, ids, weights)

    contestants |= {"step": lambda: baseline.step(*layer.next_inputs()[:4]), "forward": torch_forward}
    ms = medians(contestants, repeats)
    work = 12 * tokens * top_k * hidden * width * 1e-9
    torch_ms = ms["step"] - ms["forward"]
    row = dict(
        suite="layer", shape=name, T=tokens, H=hidden, I=width, E=experts, K=top_k, ep=1, precision="bf16", direction="bwd", saved=saved,
        ms=round(ms["mok"], 4), tflops=round(work / ms["mok"], 1),
        baselines={baseline.name: dict(ms=round(torch_ms, 4), tflops=round(work / torch_ms, 1))}, ratio=round(torch_ms / ms["mok"], 3),
    )  # fmt: skip
    others = "".join(f"; {k} {v:.3f} ms {work / v:.0f}" for k, v in ms.items() if k not in ("mok", "step", "forward"))
    print(
        f"{name:16} T{tokens} H{hidden} I{width} E{experts} K{top_k}: {ms['mok']:.3f} ms, {row['tflops']} TFLOP/s, {row['ratio']:.2f} x "
        f"torch ({work / torch_ms:.1f}), relative error {error:.1e}{others}", flush=True,
    )  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--plans", default="{}", help="JSON: name -> fields of BackwardPlan")
    parser.add_argument("--parts", action="store_true", help="time each gradient alone, too")
    parser.add_argument("--saved", type=float, default=1.0, help="share of the rows whose gate and up were saved")
    parser.add_argument("--commit", default="", help="the commit measured, where there is no git repository")
    parser.add_argument("--out")
    options = parser.parse_args()
    print(report.headline(), flush=True)
    rows = []
    for name in options.shapes.split(","):
        rows.append(measure(name, options.repeats, json.loads(options.plans), options.parts, options.saved))
        torch.cuda.empty_cache()
    if options.out:
        report.write(options.out, rows, options.commit)


if __name__ == "__main__":
    main()
