"""The shapes that are measured.

A slice of a preset, `kimi-k2/8`, is what one of 8 ranks computes: ceil(E / 8) experts and T K rows, T tokens of K choices that all fall on
these experts (one may stand twice for a token). Shared experts and routers are left out.

Legend: T tokens of a rank, H hidden, I intermediate, E experts of all ranks, K choices per token, R ranks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from mok.config import PRESETS
from mok.schedule import experts_per_rank


class Shape(NamedTuple):
    T: int
    H: int
    I: int  # noqa: E741
    E: int
    K: int

    def __str__(self) -> str:
        return " ".join(f"{name}{value}" for name, value in self._asdict().items())

    def gflop(self, direction: str) -> float:
        """1e9 floating-point operations of a layer's products, "fwd" or "bwd"; over milliseconds they are TFLOP/s."""
        return (6 if direction == "fwd" else 12) * self.T * self.K * self.H * self.I * 1e-9


ONE_GPU = {
    "kimi-k2-slice": Shape(2048, 7168, 2048, 12, 8),
    "v4-flash-slice": Shape(4096, 4096, 2048, 32, 6),
    "qwen3-30b": Shape(8192, 2048, 768, 128, 8),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "fine": Shape(8192, 4096, 1024, 64, 8),
    "kimi-k2-ep8": Shape(8192, 7168, 2048, 48, 8),
    "glm-5-slice": Shape(8192, 6144, 2048, 4, 2),
    "v4-pro-slice": Shape(3072, 7168, 3072, 6, 4),
}
SEVERAL_GPUS = {
    "qwen3-30b": Shape(8192, 2048, 768, 128, 8),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "kimi-k2-slice": Shape(2048, 7168, 2048, 12, 8),
    "kimi-k2-ep8": Shape(8192, 7168, 2048, 96, 8),
    "v4-flash": Shape(8192, 4096, 2048, 64, 6),
}
TINY = {"tiny": Shape(96, 32, 48, 8, 2)}
SLICE_TOKENS = 4096
SLICE_RANKS = (8, 64)


def slices(ranks: int) -> dict[str, Shape]:
    """One rank's part of every preset with at least as many experts as ranks, each size once, by the name of its first preset."""
    found: dict[Shape, str] = {}
    for name, preset in PRESETS.items():
        hidden, width, experts, top_k = (preset[key] for key in ("hidden_size", "intermediate_size", "num_experts", "top_k"))
        if experts >= ranks:
            found.setdefault(Shape(SLICE_TOKENS, hidden, width, experts_per_rank(experts, ranks), top_k), f"{name}/{ranks}")
    return {name: shape for shape, name in found.items()}


def choose(names: str, known: dict[str, Shape]) -> dict[str, Shape]:
    """Shapes by comma-separated names: known ones, slices of presets (glm-5/64), or sizes TxHxIxExK (8192x2048x768x128x8).

    Raises:
        ValueError: naming the unknown one.
    """
    chosen = {}
    for name in names.split(","):
        preset, _, ranks = name.partition("/")
        if name in known:
            chosen[name] = known[name]
        elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*){4}", name):
            chosen[name] = Shape(*map(int, name.split("x")))
        elif preset in PRESETS and re.fullmatch(r"[1-9]\d*", ranks):
            of = PRESETS[preset]
            local = experts_per_rank(of["num_experts"], int(ranks))
            chosen[name] = Shape(SLICE_TOKENS, of["hidden_size"], of["intermediate_size"], local, of["top_k"])
        else:
            why = "must be"
            if name in {**ONE_GPU, **SEVERAL_GPUS}:
                why = f"{'not for this number of GPUs' if torch.cuda.is_available() else 'needs a GPU'}; here it must be"
            raise ValueError(f"--shapes={name}: {why} some of {','.join(known)}, PRESET/RANKS, or sizes TxHxIxExK")
    return chosen
