"""What the router's kernels must do, on a GPU and under the interpreter: the definition's choice, numbers to a few units in the last
place."""

from __future__ import annotations

import torch
from torch import Tensor

from mok import router
from mok.config import MoEConfig


def config(experts: int, top_k: int, score: str = "softmax", **more) -> MoEConfig:
    return MoEConfig(hidden_size=8, intermediate_size=8, num_experts=experts, top_k=top_k, score=score, **more)


CONFIGS = {
    "softmax": config(128, 8),
    "softmax as it is, odd": config(129, 5, renormalize=False, scaling_factor=0.75),
    "softmax in groups": config(48, 6, num_groups=3, top_groups=2),
    "sigmoid": config(12, 4, "sigmoid", renormalize=False),
    "sigmoid, bias": config(96, 17, "sigmoid", selection_bias=True, scaling_factor=2.5),
    "sigmoid, bias, groups": config(64, 8, "sigmoid", selection_bias=True, num_groups=8, top_groups=4, scaling_factor=2.5),
    "sigmoid, odd groups": config(35, 9, "sigmoid", selection_bias=True, num_groups=5, top_groups=2),
    "sqrt softplus": config(24, 3, "sqrt_softplus"),
    "sqrt softplus, bias": config(100, 6, "sqrt_softplus", selection_bias=True, scaling_factor=1.5),
    "sqrt softplus, groups of two": config(10, 4, "sqrt_softplus", renormalize=False, num_groups=5, top_groups=3),
    "one expert": config(1, 1, "sigmoid"),
    "all experts": config(20, 20, "sigmoid", selection_bias=True),
    "all experts in groups": config(12, 12, num_groups=2, top_groups=2),
    "one choice": config(33, 1, "sqrt_softplus"),
}


def arguments_of(c: MoEConfig) -> tuple[str, int, bool, float, int, int]:
    return c.score, c.top_k, c.renormalize, c.scaling_factor, c.num_groups, c.top_groups


def make_logits(c: MoEConfig, tokens: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(tokens, c.num_experts, generator=torch.Generator().manual_seed(seed)) * scale


def make_bias(c: MoEConfig) -> Tensor | None:
    return torch.randn(c.num_experts, generator=torch.Generator().manual_seed(7)) * 0.2 if c.selection_bias else None


def special_logits(c: MoEConfig) -> Tensor:
    """Rows with equal values, NaN and Inf in one, some and all places, and values from which exp underflows."""
    rows, g = make_logits(c, 40, seed=1), torch.Generator().manual_seed(2)
    rows[0], rows[1], rows[2] = 0.0, -300.0, 40.0
    rows[3:10] = rows[3:10].round()
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, -100.0, -1e4, 1e4), 10):
        rows[row, 0], rows[row + 6, -1], rows[row + 12] = value, value, value
        rows[row + 18][torch.rand(c.num_experts, generator=g) < 0.4] = value
    rows[34][torch.rand(c.num_experts, generator=g) < 0.3] = torch.nan
    rows[34][torch.rand(c.num_experts, generator=g) < 0.3] = torch.inf
    rows[35], rows[36] = rows[35] * 60 - 150, rows[36] * 20
    return rows


def special_bias(c: MoEConfig, value: float) -> Tensor | None:
    bias = make_bias(c)
    if bias is not None:
        bias[::3] = value
    return bias


# ---- values ----


def within(got: Tensor, want: Tensor, units: float, magnitude: Tensor | None = None) -> None:
    """fp32 against fp64, to so many units in the last place of the value, or of a magnitude; NaN and Inf are to stand where they stand."""
    assert got.dtype == torch.float32 and got.shape == want.shape
    size = (want if magnitude is None else magnitude).abs().float()
    unit = (torch.nextafter(size, size.new_tensor(torch.inf)) - size).double()
    error = (got.double() - want).abs() / unit
    bad = ~((error <= units) | (got.double() == want) | (got.isnan() & want.isnan()))
    assert not bad.any(), (bad.nonzero()[0].tolist(), got[bad][0].item(), want[bad][0].item(), error[bad].max().item(), int(bad.sum()))


def exact_scores(logits: Tensor, score: str) -> Tensor:
    """fp64; softmax of differences rounded to fp32."""
    if score == "softmax":
        logits = logits - logits.amax(1, keepdim=True)
    return router._scores(logits.double(), score)


def check_choice(routing: tuple[Tensor, Tensor, Tensor], logits: Tensor, bias: Tensor | None, c: MoEConfig) -> None:
    """Scores and weights are right, and the choice is the definition's for these very scores."""
    ids, weights, scores = routing
    assert ids.dtype == torch.int64 and ids.shape == weights.shape == (len(logits), c.top_k) and scores.shape == logits.shape
    assert all(tensor.is_contiguous() for tensor in routing)
    within(scores, exact_scores(logits, c.score), 6 if c.score == "softmax" else 3)
    want = router._choice(scores if bias is None else scores + bias, c.top_k, c.num_groups, c.top_groups)
    assert torch.equal(ids, want), ((ids != want).nonzero()[0].tolist(), int((ids != want).sum()))
    exact = scores.double().gather(1, want)
    if c.renormalize:
        exact = exact / (exact.sum(1, keepdim=True) + router.SUM_EPS)
    within(weights, exact * c.scaling_factor, 6)


def clear_rows(logits: Tensor, bias: Tensor | None, c: MoEConfig) -> Tensor:
    """Rows whose choice no rounding can change: the best values next to each other in order are one and the same, or farther apart."""

    def clear(values: Tensor, errors: Tensor, best: int) -> Tensor:
        values, order = values.sort(1, descending=True)
        gaps = -values.diff(dim=1)[:, :best]
        return ((gaps == 0) | (gaps > errors.gather(1, order[:, :-1])[:, :best])).all(1)

    scores = router._scores(logits.double(), c.score)
    biased = scores if bias is None else scores + bias.double()
    errors = 4e-6 * scores + 4e-7 * biased.abs()
    best_two, places = biased.unflatten(1, (c.num_groups, -1)).topk(2 if c.num_groups > 1 else 1, dim=2)
    errors_of_two = errors.unflatten(1, (c.num_groups, -1)).gather(2, places)
    all_matter = c.num_groups > 1  # the best may stand in other groups
    return clear(biased, errors, c.num_experts if all_matter else c.top_k) & clear(best_two.sum(2), errors_of_two.sum(2), c.top_groups)


# ---- gradients ----


def magnitude_of_gradient(
    d_weights: Tensor | None, d_scores: Tensor | None, logits: Tensor, ids: Tensor, scores: Tensor, c: MoEConfig
) -> Tensor:  # fmt: skip
    """The gradient with sums in place of differences, fp64: what rounding errors are to be compared with."""
    logits, scores = logits.double(), scores.double()
    d = torch.zeros_like(scores) if d_scores is None else d_scores.double().abs()
    if d_weights is not None:
        d_chosen = d_weights.double().abs() * c.scaling_factor
        if c.renormalize:
            chosen = scores.gather(1, ids)
            total = chosen.sum(1, keepdim=True) + router.SUM_EPS
            d_chosen = (d_chosen + (d_chosen * chosen / total).sum(1, keepdim=True)) / total
        d = d.scatter_add(1, ids, d_chosen)
    if c.score == "softmax":
        return scores * (d + (d * scores).sum(1, keepdim=True))
    if c.score == "sigmoid":
        return d * (scores * (1 - scores))
    return d * torch.where(logits < router._TAIL, scores / 2, logits.sigmoid() / (2 * scores))


def check_gradient(
    d_logits: Tensor, d_weights: Tensor | None, d_scores: Tensor | None, logits: Tensor, ids: Tensor, scores: Tensor, c: MoEConfig
) -> None:  # fmt: skip
    wide = (None if d is None else d.double() for d in (d_weights, d_scores))
    want = router._choose_backward_in_steps(*wide, logits.double(), ids, scores.double(), c.score, c.renormalize, c.scaling_factor)
    assert d_logits.is_contiguous()
    within(d_logits, want, 10, magnitude_of_gradient(d_weights, d_scores, logits, ids, scores, c))
