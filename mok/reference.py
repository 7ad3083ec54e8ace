"""The definition of right: the layer in plain PyTorch, no schedule, any dtype, gradients by autograd.

Values are computed in fp32 (fp64 for fp64 inputs) and rounded to the dtype of x where the layer rounds: gate and up, h, each y_k, and the
output once. Rounding passes gradients through unchanged, so the gradients are those of the definition without roundings of their own.

With a quantized format an expert's products are those of `mok.quantize.Recipe`, and so are their gradients: they are written out, with the
roundings of d_gate, d_up and w * h, because a quantized gradient is no derivative.

Legend: T tokens, H hidden, I intermediate, E experts, K choices per token, S width of the shared experts,
N rows of one expert, ordered by (token, k).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from mok.config import MoEConfig
from mok.quantize import UNQUANTIZED, Recipe


def wide(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """value rounded to dtype and widened again; the gradient passes unchanged."""
    return value + (value.to(dtype).to(value.dtype) - value).detach()


def swiglu(x_TH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor, clamp: float | None = None) -> Tensor:
    """One expert on every token: silu(min(x Wg^T, L)) * clamp(x Wu^T, -L, L) times Wd^T; wide, with the values of a rounded result."""
    dtype = x_TH.dtype
    gate = rounded(wide(x_TH) @ wide(gate_IH).T, dtype)
    up = rounded(wide(x_TH) @ wide(up_IH).T, dtype)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    hidden = rounded(silu(gate) * up, dtype)
    return rounded(hidden @ wide(down_HI).T, dtype)


class _GateUp(torch.autograd.Function):
    """x W^T with quantized operands."""

    @staticmethod
    def forward(ctx, x_NH, w_IH, recipe, dtype):  # type: ignore[no-untyped-def]
        x = recipe.rows(x_NH)
        ctx.save_for_backward(x, w_IH)
        ctx.rest = recipe, dtype
        return x @ recipe.weight(w_IH, -1).T

    @staticmethod
    def backward(ctx, d_NI):  # type: ignore[no-untyped-def]
        (x, w_IH), (recipe, dtype) = ctx.saved_tensors, ctx.rest
        d = d_NI.to(dtype).to(d_NI.dtype)
        return recipe.rows(d) @ recipe.weight(w_IH, -2), recipe.columns(d).T @ recipe.columns(x), None, None


class _WeightedDown(torch.autograd.Function):
    """w * (h W^T rounded) with quantized operands; the gradient that comes in is quantized before w multiplies it."""

    @staticmethod
    def forward(ctx, h_NI, w_N1, down_HI, recipe, dtype):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(h_NI, w_N1, down_HI)
        ctx.rest = recipe, dtype
        return w_N1 * rounded(recipe.rows(h_NI) @ recipe.weight(down_HI, -1).T, dtype)

    @staticmethod
    def backward(ctx, d_NH):  # type: ignore[no-untyped-def]
        (h, w, down_HI), (recipe, dtype) = ctx.saved_tensors, ctx.rest
        d_y = recipe.rows(d_NH)
        d_hidden = d_y @ recipe.weight(down_HI, -2)
        d_down = recipe.columns(d_y).T @ recipe.columns((w * h).to(dtype).to(h.dtype))
        return w * d_hidden, (d_hidden * h).sum(1, keepdim=True), d_down, None, None


def _quantized_terms(x_TH, ids_TK, weights_TK, gate_EIH, up_EIH, down_EHI, clamp, recipe):  # type: ignore[no-untyped-def]
    """w_k * expert_{ids_k}(x) [T, K, H], wide, zero where masked."""
    terms, dtype = wide(x_TH).new_zeros(*ids_TK.shape, x_TH.shape[1]), x_TH.dtype
    for e in range(gate_EIH.shape[0]):
        token, k = (ids_TK == e).nonzero(as_tuple=True)
        x = wide(x_TH)[token]
        gate, up = (rounded(_GateUp.apply(x, wide(w[e]), recipe, dtype), dtype) for w in (gate_EIH, up_EIH))
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        hidden = rounded(silu(gate) * up, dtype)
        term = _WeightedDown.apply(hidden, wide(weights_TK)[token, k][:, None], wide(down_EHI[e]), recipe, dtype)
        terms = terms.index_put((token, k), term)
    return terms


def moe(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_EIH: Tensor,
    up_EIH: Tensor,
    down_EHI: Tensor,
    *,
    shared: Tensor | None = None,
    clamp: float | None = None,
    recipe: Recipe = UNQUANTIZED,
) -> Tensor:
    """out = shared + sum_k w_k * expert_{ids_k}(x), k ascending; a slot with id -1 adds nothing."""
    out = torch.zeros_like(wide(x_TH)) if shared is None else wide(shared)
    if recipe.quantized:
        for term in _quantized_terms(x_TH, ids_TK, weights_TK, gate_EIH, up_EIH, down_EHI, clamp, recipe).unbind(1):
            out = out + term
        return rounded(out, x_TH.dtype).to(x_TH.dtype)
    y_ETH = torch.stack([swiglu(x_TH, gate_EIH[e], up_EIH[e], down_EHI[e], clamp) for e in range(gate_EIH.shape[0])])
    token = torch.arange(x_TH.shape[0])
    for k in range(ids_TK.shape[1]):
        present = ids_TK[:, k] >= 0
        weight = torch.where(present, wide(weights_TK)[:, k], 0)
        out = out + torch.where(present[:, None], weight[:, None] * y_ETH[ids_TK[:, k].clamp(min=0), token], 0)
    return rounded(out, x_TH.dtype).to(x_TH.dtype)


def route(x_TH: Tensor, router_EH: Tensor, bias_E: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """ids_TK, weights_TK of every score function, group limit, renormalization and scaling."""
    logits = wide(x_TH) @ wide(router_EH).T
    scores = {
        "softmax": lambda: logits.softmax(-1),
        "sigmoid": lambda: logits.sigmoid(),
        "sqrt_softplus": lambda: torch.logaddexp(logits, torch.zeros_like(logits)).sqrt(),  # torch softplus is linear above 20
    }[config.score]()
    choice = scores.detach() if bias_E is None else scores.detach() + bias_E
    if config.num_groups > 1:
        groups = choice.view(len(choice), config.num_groups, -1)
        best = groups.topk(2).values.sum(-1).topk(config.top_groups).indices
        allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
        choice = torch.where(allowed[..., None], groups, -torch.inf).flatten(1)
    ids = choice.topk(config.top_k).indices
    weights = scores.gather(1, ids)
    if config.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights * config.scaling_factor


def layer(x_TH: Tensor, config: MoEConfig, parameters: dict[str, Tensor], recipe: Recipe = UNQUANTIZED) -> Tensor:
    """The whole layer from the parameters of `mok.MoE` under their state-dict names (all experts, not a shard)."""
    p = parameters
    ids, weights = route(x_TH, p["router.weight"], p.get("router.bias"), config)
    shared = None
    if config.num_shared_experts:
        shared = swiglu(x_TH, p["shared.gate_SH"], p["shared.up_SH"], p["shared.down_HS"], config.shared_clamp)
        if config.shared_gate:
            shared = shared * torch.sigmoid(wide(x_TH) @ wide(p["shared.output_gate_H"]))[:, None]
    return moe(x_TH, ids, weights, p["gate_EIH"], p["up_EIH"], p["down_EHI"], shared=shared, clamp=config.clamp, recipe=recipe)
