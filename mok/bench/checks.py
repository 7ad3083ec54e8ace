"""Nearness to the definition (`mok.reference`, fp32) on a sample; equality of bits is the caller's.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.quantize import UNQUANTIZED, Recipe
from mok.reference import swiglu

LIMIT = 1.5e-2
"""Largest relative error, in the norm of a token's row or of a whole gradient."""

Experts = tuple[Tensor, Tensor, Tensor]  # gate [E, I, H], up [E, I, H], down [E, H, I]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-9))


def first_difference(got: Sequence[Tensor], want: Sequence[Tensor], names: Sequence[str]) -> str | None:
    """Where two lists of tensors do not have the same bits."""
    for name, a, b in zip(names, got, want, strict=True):
        if not torch.equal(a, b):
            where = (a != b).nonzero()
            place = where[0].tolist() if len(where) else "a NaN"
            return f"{name} differs in {len(where)} elements, first at {place}"
    return None


def _sample(tokens: int, count: int) -> list[int]:
    return torch.linspace(0, tokens - 1, min(count, tokens)).long().tolist()


def _expert(x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    """`reference.swiglu` without a rounding, for gradients."""
    return (silu(x_NH @ gate_IH.T) * (x_NH @ up_IH.T)) @ down_HI.T


def _routed(x_NH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, recipe: Recipe) -> Tensor:
    """`reference.swiglu` with the operands quantized by the recipe."""
    if not recipe.quantized:
        return swiglu(x_NH, gate_IH, up_IH, down_HI)
    wide = lambda x: x.to(x_NH.dtype).float()  # noqa: E731
    x, gate, up, down = recipe.rows(x_NH.float()), *(recipe.weight(w.float(), -1) for w in (gate_IH, up_IH, down_HI))
    hidden = wide(silu(wide(x @ gate.T)) * wide(x @ up.T))
    return wide(recipe.rows(hidden) @ down.T)


def forward_error(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: Experts, count: int = 32, shared: Experts | None = None,
    recipe: Recipe = UNQUANTIZED,
) -> float:  # fmt: skip
    """The largest relative error of a token's output, over `count` evenly spaced tokens. shared: gate and up [S, H], down [H, S]."""
    worst = 0.0
    gate_EIH, up_EIH, down_EHI = experts
    for t in _sample(x_TH.shape[0], count):
        want = torch.zeros(x_TH.shape[1], device=x_TH.device)
        if shared is not None:
            want += swiglu(x_TH[t : t + 1], *shared)[0]
        for e, w in zip(ids_TK[t].tolist(), weights_TK[t].tolist(), strict=True):
            want += w * _routed(x_TH[t : t + 1], gate_EIH[e], up_EIH[e], down_EHI[e], recipe)[0]
        worst = max(worst, relative_error(out_TH[t], want))
    return worst


def _gradients(x_NH: Tensor, weights_N: Tensor, d_y_NH: Tensor, expert: Experts, recipe: Recipe) -> list[Tensor]:
    """Gradients of weights * expert(x) in fp32: of x, of the weights, and of gate, up and down. Without a recipe nothing is rounded."""
    if not recipe.quantized:
        leaves = [t.float().requires_grad_() for t in (x_NH, weights_N, *expert)]
        y = _expert(leaves[0], *leaves[2:]) * leaves[1][:, None]
        return list(torch.autograd.grad(y, leaves, d_y_NH.float()))
    wide = lambda x: x.to(x_NH.dtype).float()  # noqa: E731
    x, d_y = recipe.rows(x_NH.float()), recipe.rows(d_y_NH.float())
    gate, up = (wide(x @ recipe.weight(w.float(), -1).T) for w in expert[:2])
    gate_w, up_w, down_w = (recipe.weight(w.float(), -2) for w in expert)
    s = torch.sigmoid(gate)
    hidden, d_hidden = wide(gate * s * up), d_y @ down_w
    d_weights, d_hidden = (d_hidden * hidden).sum(1), d_hidden * weights_N[:, None]
    d_gate, d_up = wide(d_hidden * up * s * (1 + gate * (1 - s))), wide(d_hidden * gate * s)
    d_x = recipe.rows(d_gate) @ gate_w + recipe.rows(d_up) @ up_w
    return [d_x, d_weights, d_gate.T @ x, d_up.T @ x, d_y.T @ wide(hidden * weights_N[:, None])]


def token_gradient_error(
    d_x_TH: Tensor, d_weights_TK: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, d_y_TH: Tensor, experts: Experts,
    count: int = 16, recipe: Recipe = UNQUANTIZED,
) -> float:  # fmt: skip
    """The largest relative error of a token's d_x, and of d_weights, over `count` evenly spaced tokens."""
    tokens = _sample(x_TH.shape[0], count)
    worst, want_weights = 0.0, torch.zeros(len(tokens), ids_TK.shape[1], device=x_TH.device)
    for i, t in enumerate(tokens):
        want = torch.zeros(x_TH.shape[1], device=x_TH.device)
        for k, e in enumerate(ids_TK[t].tolist()):
            expert = (experts[0][e], experts[1][e], experts[2][e])
            d_x, d_weight, *_ = _gradients(x_TH[t : t + 1], weights_TK[t, k : k + 1], d_y_TH[t : t + 1], expert, recipe)
            want += d_x[0]
            want_weights[i, k] = d_weight[0]
        worst = max(worst, relative_error(d_x_TH[t], want))
    return max(worst, relative_error(d_weights_TK[tokens], want_weights))


def expert_gradient_error(
    grads: Sequence[Tensor], expert: int, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, d_y_TH: Tensor, experts: Experts,
    recipe: Recipe = UNQUANTIZED,
) -> float:  # fmt: skip
    """The largest relative error of one expert's three weight gradients `grads`, over all its rows of the batch."""
    token, k = (ids_TK == expert).nonzero(as_tuple=True)
    of_one = (experts[0][expert], experts[1][expert], experts[2][expert])
    _, _, *wants = _gradients(x_TH[token], weights_TK[token, k], d_y_TH[token], of_one, recipe)
    return max(relative_error(got, want) for got, want in zip(grads, wants, strict=True))
