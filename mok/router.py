"""x -> ids_TK, weights_TK: which K experts every token goes to, and with which weights.

logits = x weight^T in fp32; score = softmax, sigmoid or sqrt(softplus) of the logits; the K best experts by score + bias; weights = the
scores of the chosen ones without the bias, divided by their sum if renormalized, times the scaling factor.

A token's result has the same bits whichever other tokens are there and however many threads run. Hence three habits of this file: scores
are made of operations whose bits do not depend on an element's place in the tensor (PyTorch's own sigmoid and softplus do depend on it:
on a CPU the last elements of a chunk are computed by other instructions than the rest), sums are taken by halving in an order that depends
on their length alone (a reduction kernel may split a sum according to how many others there are), and experts are chosen by a stable sort
(the order that `torch.topk` gives to equal values is undefined). On a GPU, fp32 logits take one kernel forward and one backward
(`mok.kernels.router`); what their results are is defined here, at the end of the file.

Example: E=4, K=2, sigmoid, logits [0, 2, 2, -1], bias [0.5, 0, 0, 0]. Scores [0.5, 0.881, 0.881, 0.269], biased [1.0, 0.881, 0.881, 0.269]:
expert 0 is chosen first, then, of the equal 1 and 2, expert 1. Weights [0.5, 0.881] / 1.381 = [0.362, 0.638].

Legend: T tokens, H hidden, E experts in all, K choices per token, G groups, C candidates left by the groups, S sequences, N tokens of a
sequence.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mok.config import MoEConfig
from mok.executor import final, row_linear
from mok.operators import operator

SUM_EPS = 1e-20
"""Added to a sum of scores before it divides, so that scores that all underflow to zero give weights of zero and not NaN."""

INIT_STD = 0.02
"""Of the router's weight. For a normalized token (values of order 1) logits then have a deviation of 0.02 * sqrt(H), 0.9 at H=2048 and 1.7
at H=7168: experts differ from the first step on, and no score function is saturated."""

_TAIL = -40.0
"""Below it exp(x) is lost beside 1 in fp32 and fp64 alike, hence softplus(x) = exp(x) and sqrt(softplus(x)) = exp(x / 2)."""


class Routing(NamedTuple):
    """What the router says of T tokens.

    ids_TK: int64, the chosen experts, best biased score first; distinct within a token.
    weights_TK: their weights, in the logits' dtype (fp32, or fp64).
    scores_TE: all scores without bias, for the balance loss.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    scores_TE: Tensor


def choose_experts(logits_TE: Tensor, config: MoEConfig, bias_E: Tensor | None = None) -> Routing:
    """Scores, choice and weights from logits (fp32 or fp64) [T, E] and, for a config with selection_bias, the bias [E] (None: zeros).

    Equal biased scores: the lowest expert id is chosen first; equal groups: the lowest group. A NaN counts as the largest value, so a token
    with NaN logits still gets K distinct experts (and NaN weights). Gradients flow through the weights and scores, never to the bias.
    """
    if logits_TE.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logits_TE.dtype={logits_TE.dtype}: must be torch.float32 or torch.float64")
    if logits_TE.dim() != 2 or logits_TE.shape[1] != config.num_experts:
        raise ValueError(f"logits_TE.shape={tuple(logits_TE.shape)}: must be (tokens, num_experts={config.num_experts})")
    if bias_E is not None and not config.selection_bias:
        raise ValueError("bias_E: must be None for a config with selection_bias=False")
    if bias_E is not None and bias_E.shape != (config.num_experts,):
        raise ValueError(f"bias_E.shape={tuple(bias_E.shape)}: must be (num_experts={config.num_experts},)")

    c = config
    return Routing(*_choose(logits_TE, bias_E, c.score, c.top_k, c.renormalize, float(c.scaling_factor), c.num_groups, c.top_groups))


def balance_loss(scores_TE: Tensor, ids_TK: Tensor, config: MoEConfig, tokens_per_sequence: int) -> Tensor:
    """The sequence-wise balance loss of DeepSeek-V3 (arXiv:2412.19437, equations 17 to 20) without its weight factor, a scalar.

    The T tokens are T / N whole sequences of N = tokens_per_sequence tokens, one after the other. For each of them

        f_i = E / (K N) * (slots of the sequence that chose expert i)
        p_it = scores_TE[t, i] / (sum over j of scores_TE[t, j] + 1e-20),    P_i = 1 / N * (sum of p_it over the sequence)
        loss = sum over i of f_i P_i

    and the result is the mean over the sequences given (0 without tokens). Loads that are equal have every f_i = 1 and a loss of 1; a
    router that always takes the K experts it is sure of has a loss of E / K. The slots are those of ids_TK, hence chosen with bias and
    groups; f carries no gradient. A masked slot (-1) is counted for no expert, while K and N stay as they are.

    Example: E=4, K=1, N=2, scores [[0.7, 0.1, 0.1, 0.1], [0.5, 0.1, 0.3, 0.1]], ids [[0], [0]]: f = [4, 0, 0, 0], P = [0.6, 0.1, 0.2, 0.1],
    loss 2.4; with ids [[0], [2]] f = [2, 0, 2, 0] and the loss is 1.6.
    """
    experts, top_k, tokens = config.num_experts, config.top_k, tokens_per_sequence
    if scores_TE.dim() != 2 or scores_TE.shape[1] != experts:
        raise ValueError(f"scores_TE.shape={tuple(scores_TE.shape)}: must be (tokens, num_experts={experts})")
    if ids_TK.shape != (scores_TE.shape[0], top_k):
        raise ValueError(f"ids_TK.shape={tuple(ids_TK.shape)}: must be (tokens={scores_TE.shape[0]}, top_k={top_k})")
    if scores_TE.shape[0] == 0:
        return scores_TE.sum()  # part of the graph, so that every rank has a backward
    if tokens < 1 or scores_TE.shape[0] % tokens:
        raise ValueError(f"tokens_per_sequence={tokens}: must be at least 1 and divide the {scores_TE.shape[0]} tokens")

    return _balance_loss(scores_TE, ids_TK, tokens)


class Router(nn.Module):
    """The layer's router.

    weight: parameter [E, H].
    bias: buffer [E], zeros at first, only for a config with selection_bias (else None). It is part of the state dict, is learned by
        `update_bias` alone, and stays fp32 with unchanged bits when the module changes its dtype: steps of 0.001 are lost in bf16.
    """

    bias: Tensor | None

    def __init__(
        self, config: MoEConfig, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device))
        bias = torch.empty(config.num_experts, dtype=torch.float32, device=device) if config.selection_bias else None
        self.register_buffer("bias", bias)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weight from a normal distribution of deviation 0.02 (see `INIT_STD`) and set the bias to zero.

        generator: in place of the default one, for a weight on its device; on another one the default generator draws all the same.
        """
        here = generator is not None and generator.device.type == self.weight.device.type
        self.weight.normal_(std=INIT_STD, generator=generator if here else None)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x_TH: Tensor) -> Routing:
        """Route tokens [T, H] of any floating dtype. Computes in fp32, in fp64 for fp64 tokens, autocast or not; a weight of another dtype
        is widened to it first, and its gradient rounded to its own."""
        if x_TH.dim() != 2 or x_TH.shape[1] != self.config.hidden_size:
            raise ValueError(f"x_TH.shape={tuple(x_TH.shape)}: must be (tokens, hidden_size={self.config.hidden_size})")
        with torch.autocast(x_TH.device.type, enabled=False):
            return choose_experts(row_linear(x_TH, self.weight), self.config, self.bias)

    @torch.no_grad()
    def update_bias(self, tokens_per_expert_E: Tensor, rate: float) -> None:
        """Loss-free balancing (arXiv:2408.15664): bias += rate * sign(mean load - load), for the exact integer loads of a whole step.

        Every rank must pass the same loads (summed over all ranks), after the step's backward: a recomputed forward must see the bias that
        the forward saw. Loads are compared as integers, so a load equal to the mean leaves its bias as it is.

        Example: loads [8, 4, 0, 4] have the mean 4; rate 0.001 adds [-0.001, 0, 0.001, 0].
        """
        if self.bias is None:
            raise ValueError("update_bias: needs a config with selection_bias=True")
        load_E = tokens_per_expert_E
        if not isinstance(load_E, Tensor):
            raise TypeError(f"tokens_per_expert_E: must be an integer tensor (num_experts={self.config.num_experts},), not {_kind(load_E)}")
        if load_E.is_floating_point() or load_E.is_complex() or load_E.dtype == torch.bool:
            raise TypeError(f"tokens_per_expert_E.dtype={load_E.dtype}: must be an integer dtype")
        if load_E.shape != self.bias.shape:
            raise ValueError(f"tokens_per_expert_E.shape={tuple(load_E.shape)}: must be (num_experts={self.config.num_experts},)")
        if isinstance(rate, bool) or not isinstance(rate, numbers.Real | Tensor):
            raise TypeError(f"rate={rate!r}: must be a number, not {_kind(rate)}")
        if not math.isfinite(rate):
            raise ValueError(f"rate={rate!r}: must be finite")
        if load_E.is_meta != self.bias.is_meta:
            raise ValueError(f"tokens_per_expert_E is on {load_E.device}: must hold values, as the bias on {self.bias.device} does")
        look = load_E.device.type == "cpu" and not torch.compiler.is_compiling()  # on a GPU the host would wait for it
        if look and bool((load_E < 0).any()):
            raise ValueError(f"tokens_per_expert_E has values from {int(load_E.min())} on: must be counts, at least 0")
        load_E = load_E.to(device=self.bias.device, dtype=torch.int64)
        direction_E = (load_E.sum() - load_E * self.config.num_experts).sign()
        self.bias += direction_E.to(torch.float32) * rate

    def extra_repr(self) -> str:
        c = self.config
        return f"hidden_size={c.hidden_size}, num_experts={c.num_experts}, top_k={c.top_k}, score={c.score!r}, bias={c.selection_bias}"

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        """Let the bias follow the module to another device, but not to another dtype; its bits never pass through a narrower one."""
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype != before.dtype:
            self.bias = before.to(self.bias.device)
        return self


def _kind(value: object) -> str:
    return type(value).__name__


# ---- operators ----
#
# torch.compile leaves operators as they are; its own code for exp or for a sum has other bits. Their gradients are written out.


@operator("mok::choose_experts")
def _choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    score: str,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids [T, K], weights [T, K], scores [T, E]."""
    kernels = _kernels(logits_TE)
    choose = kernels.choose if kernels else _choose_in_steps
    return choose(logits_TE, bias_E, score, top_k, renormalize, scaling_factor, num_groups, top_groups)


@operator("mok::choose_experts_backward")
def _choose_backward(
    d_weights_TK: Tensor | None,
    d_scores_TE: Tensor | None,
    logits_TE: Tensor,
    ids_TK: Tensor,
    scores_TE: Tensor,
    score: str,
    renormalize: bool,
    scaling_factor: float,
) -> Tensor:
    """d_logits [T, E]; a gradient that is None is one of zeros."""
    kernels = _kernels(logits_TE)
    backward = kernels.choose_backward if kernels else _choose_backward_in_steps
    return backward(d_weights_TK, d_scores_TE, logits_TE, ids_TK, scores_TE, score, renormalize, scaling_factor)


def _kernels(logits_TE: Tensor) -> Any:
    """The module whose `choose` and `choose_backward` take such logits in one launch, or None."""
    if not logits_TE.is_cuda or logits_TE.dtype != torch.float32:
        return None
    from mok.kernels import router as kernels

    return kernels if logits_TE.shape[1] <= kernels.MOST_EXPERTS else None


@_choose.register_fake
def _(logits, bias, score, top_k, *rest):  # type: ignore[no-untyped-def]
    tokens = logits.shape[0]
    return logits.new_empty(tokens, top_k, dtype=torch.int64), logits.new_empty(tokens, top_k), logits.new_empty(logits.shape)


_choose_backward.register_fake(lambda d_weights, d_scores, logits, *rest: logits.new_empty(logits.shape))


def _choose_setup(ctx: Any, inputs: Any, output: Any) -> None:
    logits, _, score, _, renormalize, scaling_factor, _, _ = inputs
    ids, _, scores = output
    ctx.save_for_backward(logits, ids, scores)
    ctx.rest = (score, renormalize, scaling_factor)
    ctx.mark_non_differentiable(ids)
    ctx.set_materialize_grads(False)  # scores are for the balance loss alone; nobody needs zeros in their size


def _choose_gradient(ctx: Any, _: Any, d_weights: Tensor | None, d_scores: Tensor | None) -> Any:
    nothing = d_weights is None and d_scores is None
    d_logits = None if nothing else _choose_backward(d_weights, d_scores, *ctx.saved_tensors, *ctx.rest)
    return d_logits, *(None for _ in range(7))


_choose.register_autograd(final(_choose_gradient), setup_context=_choose_setup)


@operator("mok::balance_loss")
def _balance_loss(scores_TE: Tensor, ids_TK: Tensor, tokens: int) -> Tensor:
    sequences, experts = scores_TE.shape[0] // tokens, scores_TE.shape[1]
    P_SE = (scores_TE / _total(scores_TE)).reshape(sequences, tokens, experts).mean(1)
    return (_loads(scores_TE, ids_TK, tokens) * P_SE).sum(1).mean()


@operator("mok::balance_loss_backward")
def _balance_loss_backward(d_loss: Tensor, scores_TE: Tensor, ids_TK: Tensor, tokens: int) -> Tensor:
    """d_p = f / (N S), of which a token's part along p itself is lost in the division by the sum."""
    d_p_TE = (_loads(scores_TE, ids_TK, tokens) * (d_loss / scores_TE.shape[0])).repeat_interleave(tokens, 0)
    total_T1 = _total(scores_TE)
    return (d_p_TE - _sum_by_halving(d_p_TE * (scores_TE / total_T1), 1).unsqueeze(1)) / total_T1


def _loads(scores_TE: Tensor, ids_TK: Tensor, tokens: int) -> Tensor:
    """f [S, E]."""
    sequences, experts, top_k = scores_TE.shape[0] // tokens, scores_TE.shape[1], ids_TK.shape[1]
    slots_SF = ids_TK.reshape(sequences, tokens * top_k).to(torch.int64)
    slots_SF = torch.where(slots_SF < 0, experts, slots_SF)
    counts_SE = slots_SF.new_zeros(sequences, experts + 1).scatter_add_(1, slots_SF, torch.ones_like(slots_SF))[:, :experts]
    return (counts_SE * experts).to(scores_TE.dtype) / (top_k * tokens)


def _balance_setup(ctx: Any, inputs: Any, output: Any) -> None:
    scores, ids, ctx.tokens = inputs
    ctx.save_for_backward(scores, ids)


_balance_loss.register_fake(lambda scores, ids, tokens: scores.new_empty(()))
_balance_loss_backward.register_fake(lambda d_loss, scores, ids, tokens: torch.empty_like(scores))
_balance_loss.register_autograd(
    final(lambda ctx, d_loss: (_balance_loss_backward(d_loss, *ctx.saved_tensors, ctx.tokens), None, None)), setup_context=_balance_setup
)


@operator("mok::row_sigmoid")
def row_sigmoid(x: Tensor) -> Tensor:
    """sigmoid(x), with the same bits at every place of a tensor."""
    return _sigmoid(x)


@operator("mok::row_sigmoid_backward")
def _row_sigmoid_backward(d_y: Tensor, y: Tensor) -> Tensor:
    return d_y * (y * (1.0 - y))


row_sigmoid.register_fake(torch.empty_like)
_row_sigmoid_backward.register_fake(lambda d_y, y: d_y.new_empty(d_y.shape))
row_sigmoid.register_autograd(
    final(lambda ctx, d_y: _row_sigmoid_backward(d_y, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@operator("mok::scale_rows")
def scale_rows(y_TH: Tensor, scale_T: Tensor) -> Tensor:
    """Every row of y times its scale."""
    return y_TH * scale_T[:, None]


@operator("mok::scale_rows_backward")
def _scale_rows_backward(d_out: Tensor, y_TH: Tensor, scale_T: Tensor) -> tuple[Tensor, Tensor]:
    return d_out * scale_T[:, None], (d_out * y_TH).sum(1)


scale_rows.register_fake(lambda y, scale: y.new_empty(y.shape))
_scale_rows_backward.register_fake(lambda d_out, y, scale: (y.new_empty(y.shape), scale.new_empty(scale.shape)))
scale_rows.register_autograd(
    final(lambda ctx, d_out: _scale_rows_backward(d_out, *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# ---- their arithmetic ----


def _choose_in_steps(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    score: str,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of `_choose`, on any device."""
    scores_TE = _scores(logits_TE.contiguous(), score)
    biased_TE = scores_TE if bias_E is None else scores_TE + bias_E.to(scores_TE.dtype)
    ids_TK = _choice(biased_TE, top_k, num_groups, top_groups)
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / _total(weights_TK)
    return ids_TK.contiguous(), weights_TK * scaling_factor, scores_TE


def _choose_backward_in_steps(
    d_weights_TK: Tensor | None,
    d_scores_TE: Tensor | None,
    logits_TE: Tensor,
    ids_TK: Tensor,
    scores_TE: Tensor,
    score: str,
    renormalize: bool,
    scaling_factor: float,
) -> Tensor:
    """The definition of `_choose_backward`, on any device: with w_k = c s_k / (s_1 + ... + s_K),
    d_s_k = c (d_w_k - sum_j d_w_j s_j / sum) / sum; then through the score."""
    d_weights_TK = torch.zeros_like(ids_TK, dtype=scores_TE.dtype) if d_weights_TK is None else d_weights_TK
    d_scores_TE = torch.zeros_like(scores_TE) if d_scores_TE is None else d_scores_TE.contiguous()
    logits_TE = logits_TE.contiguous()
    d_TK = d_weights_TK * scaling_factor
    if renormalize:
        chosen_TK = scores_TE.gather(1, ids_TK)
        total_T1 = _total(chosen_TK)
        d_TK = (d_TK - _sum_by_halving(d_TK * (chosen_TK / total_T1), 1).unsqueeze(1)) / total_T1
    d_TE = d_scores_TE + torch.zeros_like(scores_TE).scatter(1, ids_TK, d_TK)  # the ids of a token are distinct
    if score == "softmax":
        return scores_TE * (d_TE - _sum_by_halving(d_TE * scores_TE, 1).unsqueeze(1))
    if score == "sigmoid":
        return d_TE * (scores_TE * (1.0 - scores_TE))
    # sqrt(softplus(x)): sigmoid(x) / (2 y), which is 0 / 0 where softplus underflows, although y = exp(x / 2) is good down to twice as far
    return d_TE * torch.where(logits_TE < _TAIL, scores_TE / 2, _sigmoid(logits_TE) / (2 * scores_TE))


def _scores(logits_TE: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits_TE.softmax(-1)
    if score == "sigmoid":
        return _sigmoid(logits_TE)
    softplus = logits_TE.clamp(min=0) + torch.log1p(torch.exp(-logits_TE.abs()))
    return torch.where(logits_TE < _TAIL, torch.exp(logits_TE / 2), softplus.sqrt())


def _sigmoid(x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return torch.where(x < 0, e, 1.0) / (1.0 + e)


def _best(values_TC: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values of each row, largest first, of equal ones the lowest index first."""
    return values_TC.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _choice(biased_TE: Tensor, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """The ids [T, K] of the best experts."""
    if num_groups == 1:
        return _best(biased_TE, top_k)
    candidates_TC = _group_candidates(biased_TE, num_groups, top_groups)
    return candidates_TC.gather(1, _best(biased_TE.gather(1, candidates_TC), top_k))


def _group_candidates(biased_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """The ids [T, C], ascending, of all experts in each token's top_groups best groups; the others are as good as masked with -inf."""
    per_group = biased_TE.shape[1] // num_groups
    best_two = biased_TE.unflatten(1, (num_groups, per_group)).topk(2, dim=2).values
    groups = _best(best_two[:, :, 0] + best_two[:, :, 1], top_groups).sort(dim=1).values
    return (groups.unsqueeze(2) * per_group + torch.arange(per_group, device=groups.device)).flatten(1)


def _total(x_TN: Tensor) -> Tensor:
    """Sum of each row [T, 1], never zero."""
    return _sum_by_halving(x_TN, 1).unsqueeze(1) + SUM_EPS


def _sum_by_halving(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` (at least one element) by elementwise additions, in an order that depends on its length alone."""
    while (length := x.shape[dim]) > 1:
        low, high, odd = x.split([length // 2, length // 2, length % 2], dim)
        x = torch.cat([low + high, odd], dim) if length % 2 else low + high
    return x.squeeze(dim)
