"""The router: values against a loop in plain Python, gradients, ties, independence of tokens, bias, balance loss."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from mok import router as router_module
from mok.config import MoEConfig
from mok.router import Router, balance_loss, choose_experts


def config(**changes) -> MoEConfig:
    return MoEConfig(**{**dict(hidden_size=24, intermediate_size=8, num_experts=8, top_k=2), **changes})


VARIANTS = {
    "softmax": config(),
    "softmax as it is": config(renormalize=False, scaling_factor=0.75),
    "sigmoid": config(score="sigmoid"),
    "sigmoid as it is": config(score="sigmoid", renormalize=False),
    "sigmoid, bias, scale": config(score="sigmoid", selection_bias=True, scaling_factor=2.5, top_k=3),
    "sqrt softplus": config(score="sqrt_softplus", selection_bias=True, scaling_factor=1.5),
    "sqrt softplus as it is": config(score="sqrt_softplus", renormalize=False),
    "groups": config(score="sigmoid", selection_bias=True, num_groups=4, top_groups=2, top_k=3, scaling_factor=2.5),
    "groups of two": config(score="sigmoid", selection_bias=True, num_experts=10, num_groups=5, top_groups=3, top_k=4),
    "all of two groups": config(score="sqrt_softplus", selection_bias=True, num_groups=4, top_groups=2, top_k=4),
    "all groups": config(num_groups=4, top_groups=4, top_k=3),
    "all experts": config(score="sigmoid", top_k=8),
    "one expert": config(num_experts=1, top_k=1),
    "odd sizes": config(score="sigmoid", num_experts=13, top_k=5, selection_bias=True),
}
each_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def make_logits(config, tokens, dtype=torch.float32, seed=0, scale=2.0):
    logits = torch.randn(tokens, config.num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return logits.to(dtype)


def make_bias(config, shift=0.0):
    if not config.selection_bias:
        return None
    return torch.randn(config.num_experts, generator=torch.Generator().manual_seed(7)) * 0.2 + shift


# ---- the choice and the weights ----


def slow_route(logits, bias, config):
    """One token in plain Python: (ids, weights, scores)."""
    experts = range(config.num_experts)
    if config.score == "softmax":
        powers = [math.exp(z - max(logits)) for z in logits]
        scores = [p / math.fsum(powers) for p in powers]
    elif config.score == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    else:
        scores = [math.sqrt(math.log1p(math.exp(z))) for z in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = config.num_experts // config.num_groups
    goodness = []
    for g in range(config.num_groups):
        members = sorted(biased[g * size : (g + 1) * size], reverse=True)
        goodness.append(sum(members[:2]))
    groups = sorted(range(config.num_groups), key=lambda g: (-goodness[g], g))[: config.top_groups]
    allowed = [e for e in experts if e // size in groups]
    ids = sorted(allowed, key=lambda e: (-biased[e], e))[: config.top_k]
    weights = [scores[e] for e in ids]
    if config.renormalize:
        weights = [w / math.fsum(scores[e] for e in ids) for w in weights]
    return ids, [w * config.scaling_factor for w in weights], scores


@each_variant
@pytest.mark.parametrize("shift", [0.0, -3.0], ids=["", "all biased scores negative"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_values_against_a_loop(config, shift, dtype, rtol):
    # The shift sets groups masked with -inf apart from groups masked with 0, which win over every negative score.
    logits, bias = make_logits(config, 50, dtype), make_bias(config, shift)
    ids, weights, scores = choose_experts(logits, config, bias)
    assert (ids.dtype, weights.dtype, scores.dtype) == (torch.int64, dtype, dtype)
    plain_bias = [0.0] * config.num_experts if bias is None else bias.tolist()
    for t in range(50):
        slow_ids, slow_weights, slow_scores = slow_route(logits[t].tolist(), plain_bias, config)
        assert ids[t].tolist() == slow_ids
        np.testing.assert_allclose(weights[t].numpy(), slow_weights, rtol=rtol)
        np.testing.assert_allclose(scores[t].numpy(), slow_scores, rtol=rtol)


def test_four_numbers():
    c = config(num_experts=4, score="sigmoid", selection_bias=True)
    r = choose_experts(torch.tensor([[0.0, 2.0, 2.0, -1.0]]), c, torch.tensor([0.5, 0.0, 0.0, 0.0]))
    assert r.ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(r.weights_TK, torch.tensor([[0.362, 0.638]]), rtol=0, atol=5e-4)
    torch.testing.assert_close(r.scores_TE, torch.tensor([[0.5, 0.881, 0.881, 0.269]]), rtol=0, atol=5e-4)


@each_variant
def test_gradients(config):
    logits = make_logits(config, 3, torch.float64).requires_grad_()
    bias = make_bias(config)
    assert torch.autograd.gradcheck(lambda z: choose_experts(z, config, bias)[1:], (logits,))


def test_the_bias_chooses_and_nothing_else():
    c = config(score="sigmoid", selection_bias=True)
    logits = make_logits(c, 20).requires_grad_()
    bias = torch.zeros(8).index_fill_(0, torch.tensor([5, 6]), 100.0).requires_grad_()
    r = choose_experts(logits, c, bias)
    assert r.ids_TK.sort(1).values.tolist() == [[5, 6]] * 20
    scores = logits.detach().sigmoid()
    expected = scores.gather(1, r.ids_TK) / scores[:, 5:7].sum(1, keepdim=True)
    torch.testing.assert_close(r.weights_TK, expected, rtol=1e-6, atol=0)
    assert torch.equal(r.scores_TE, choose_experts(logits, c).scores_TE)
    (r.weights_TK[:, 0].sum() + r.scores_TE.sum()).backward()
    assert bias.grad is None
    assert logits.grad.count_nonzero() == 20 * 8


@each_variant
def test_ties_go_to_the_lowest_ids(config):
    bias = torch.full((config.num_experts,), 0.25) if config.selection_bias else None
    for logit in (0.0, -3.0, 40.0):
        r = choose_experts(torch.full((70, config.num_experts), logit), config, bias)
        assert torch.equal(r.ids_TK, torch.arange(config.top_k).expand(70, -1))


def test_ties_of_some_and_of_groups():
    c = config(top_k=3)
    assert choose_experts(torch.tensor([[0.0, 1, 5, 1, 1, 0, 1, 0]]), c).ids_TK.tolist() == [[2, 1, 3]]
    c = config(score="sigmoid", num_groups=4, top_groups=2, top_k=3)
    # Groups 1, 2 and 3 are equally good; 1 and 2 are taken.
    assert choose_experts(torch.tensor([[0.0, 0, 1, 2, 2, 1, 2, 1]]), c).ids_TK.tolist() == [[3, 4, 2]]
    # Group 3 is better than group 1, yet of their equal experts 2 and 6 the lower one comes first.
    assert choose_experts(torch.tensor([[0.0, 0, 2, 0, -1, -1, 2, 1]]), c).ids_TK.tolist() == [[2, 6, 7]]


def test_experts_disabled_by_an_infinite_bias_stay_inside_the_chosen_groups():
    c = config(score="sigmoid", selection_bias=True, num_groups=4, top_groups=1, top_k=2)
    bias = torch.zeros(8)
    bias[[0, 2, 4]] = -math.inf
    logits = torch.tensor([[0.0, 9, 0, 9, 0, 9, -5, -5]])
    assert choose_experts(logits, c, bias).ids_TK.tolist() == [[6, 7]]  # the only group without a disabled expert
    bias[6] = -math.inf
    ids = choose_experts(logits, c, bias).ids_TK
    assert ids.tolist() == [[1, 0]]  # all groups are -inf: the lowest, and within it the disabled expert last


def nothing_but_its_own_row(config, tokens, function):
    """function(rows) -> tuple of tensors with one row per row of input: the same bits in every company, at every place."""
    whole = function(torch.arange(tokens))
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(3))
    long = [order, torch.arange(tokens - 1), torch.arange(3, tokens)]
    short = [*torch.arange(tokens).split(37)[::5], *torch.arange(0, tokens, 97).split(1)]
    threads = torch.get_num_threads()
    try:
        for count, pieces in ((1, long + short), (2, long), (3, long), (5, long)):
            torch.set_num_threads(count)
            for rows in pieces:
                for a, b in zip(function(rows), whole, strict=True):
                    assert torch.equal(a, b[rows])
    finally:
        torch.set_num_threads(threads)


@each_variant
def test_a_token_does_not_see_the_others(config):
    # 5,003 rows: large enough for several threads, and no multiple of any vector's width.
    tokens = 5003
    logits, bias, d_weights = make_logits(config, tokens), make_bias(config), make_logits(config, tokens, seed=1)[:, : config.top_k]

    def function(rows):
        z = logits[rows].requires_grad_()
        r = choose_experts(z, config, bias)
        (d_z,) = torch.autograd.grad(r.weights_TK, z, d_weights[rows])
        return *(v.detach() for v in r), d_z

    nothing_but_its_own_row(config, tokens, function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_extreme_logits(score, renormalize, dtype):
    c = config(num_experts=4, score=score, renormalize=renormalize)
    values = [-1e4, -300.0, -200.0, -120.0, -100.0, -88.0, -41.0, -40.0, -39.0, 0.0, 100.0, 1e4]
    for a in values:
        for b in values:
            logits = torch.tensor([[a, b, a, b]], dtype=dtype, requires_grad=True)
            r = choose_experts(logits, c)
            r.weights_TK[:, 0].sum().backward()
            assert r.weights_TK.isfinite().all() and r.scores_TE.isfinite().all() and logits.grad.isfinite().all(), (a, b)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 4e-7), (torch.float64, 1e-15)])
def test_sqrt_softplus_where_softplus_underflows(dtype, rtol):
    c = config(num_experts=1, top_k=1, score="sqrt_softplus", renormalize=False)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # subnormal values are good to this

    def check(logit, value, slope):
        logits = torch.tensor([[logit]], dtype=dtype, requires_grad=True)
        weight = choose_experts(logits, c).weights_TK
        weight.sum().backward()
        assert weight.item() == pytest.approx(value, rel=rtol, abs=2 * smallest)
        assert logits.grad.item() == pytest.approx(slope, rel=rtol, abs=2 * smallest)

    check(-1e4, 0.0, 0.0)
    check(-200.0, math.exp(-100.0), math.exp(-100.0) / 2)
    check(-104.0, math.exp(-52.0), math.exp(-52.0) / 2)  # fp32: exp(-104) is zero
    check(-60.0, math.exp(-30.0), math.exp(-30.0) / 2)
    for logit in (-40.5, -40.0, -39.5, -10.0, -1.0, 0.0, 1.0, 30.0):  # both sides of the change of formula
        root = math.sqrt(math.log1p(math.exp(logit)))
        check(logit, root, math.exp(logit) / (1 + math.exp(logit)) / (2 * root))
    check(1e4, 100.0, 0.005)


@each_variant
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_harm_their_own_token_only(config, bad):
    logits, bias = make_logits(config, 5), make_bias(config)
    good = choose_experts(logits, config, bias)
    logits[1, 0] = bad
    logits[3] = bad
    logits.requires_grad_()
    r = choose_experts(logits, config, bias)
    r.weights_TK.sum().backward()
    assert ((r.ids_TK >= 0) & (r.ids_TK < config.num_experts)).all()
    assert all(len(set(row)) == config.top_k for row in r.ids_TK.tolist())
    for t in (0, 2, 4):
        assert torch.equal(r.ids_TK[t], good.ids_TK[t]) and torch.equal(r.weights_TK[t], good.weights_TK[t])
        assert logits.grad[t].isfinite().all()
    if math.isnan(bad):
        assert r.weights_TK[3].isnan().all() and r.ids_TK[1, 0] == 0


@each_variant
def test_no_tokens(config):
    logits = make_logits(config, 0).requires_grad_()
    r = choose_experts(logits, config, make_bias(config))
    assert [tuple(v.shape) for v in r] == [(0, config.top_k), (0, config.top_k), (0, config.num_experts)]
    r.weights_TK.sum().backward()
    assert logits.grad.shape == logits.shape


def test_a_gradient_that_nobody_has_is_not_made(monkeypatch):
    given, original = [], router_module._choose_backward_in_steps

    def backward(d_weights, d_scores, *rest):
        given.append((d_weights is not None, d_scores is not None))
        return original(d_weights, d_scores, *rest)

    monkeypatch.setattr(router_module, "_choose_backward_in_steps", backward)
    c = VARIANTS["groups"]
    logits, bias, gradients = make_logits(c, 5, torch.float64).requires_grad_(), make_bias(c), []
    for weights, scores in ((1, 0), (0, 1), (1, 1)):
        r = choose_experts(logits, c, bias)
        parts = [part.square().sum() for part, wanted in ((r.weights_TK, weights), (r.scores_TE, scores)) if wanted]
        gradients += torch.autograd.grad(sum(parts), logits)
    assert given == [(True, False), (False, True), (True, True)]
    torch.testing.assert_close(gradients[0] + gradients[1], gradients[2])
    _, _, unused = choose_experts(logits, c, bias)
    assert torch.autograd.grad((unused.detach() * logits).sum(), logits)[0].equal(unused)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_the_operators_are_what_they_say(name, transposed):
    c = VARIANTS[name]
    logits = make_logits(c, 6)
    logits = logits.T.contiguous().T if transposed else logits
    arguments = (c.score, c.top_k, c.renormalize, c.scaling_factor, c.num_groups, c.top_groups)
    static = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth one takes no integer results
    torch.library.opcheck(router_module._choose.operator, (logits.requires_grad_(), make_bias(c), *arguments), test_utils=static)
    ids, weights, scores = (tensor.detach() for tensor in router_module._choose(logits, make_bias(c), *arguments))
    assert scores.is_contiguous()
    for d in ((weights, None), (None, scores.T.contiguous().T), (weights, scores)):
        saved = (logits.detach(), ids, scores, c.score, c.renormalize, c.scaling_factor)
        torch.library.opcheck(router_module._choose_backward.operator, (*d, *saved))


def test_choose_experts_refuses():
    c, biased = config(), config(selection_bias=True)
    with pytest.raises(TypeError, match=r"logits_TE.dtype=torch.bfloat16: must be torch.float32 or torch.float64"):
        choose_experts(torch.zeros(1, 8, dtype=torch.bfloat16), c)
    with pytest.raises(ValueError, match=r"logits_TE.shape=\(1, 7\): must be \(tokens, num_experts=8\)"):
        choose_experts(torch.zeros(1, 7), c)
    with pytest.raises(ValueError, match=r"logits_TE.shape=\(8,\): must be"):
        choose_experts(torch.zeros(8), c)
    with pytest.raises(ValueError, match="bias_E: must be None for a config with selection_bias=False"):
        choose_experts(torch.zeros(1, 8), c, torch.zeros(8))
    with pytest.raises(ValueError, match=r"bias_E.shape=\(7,\): must be \(num_experts=8,\)"):
        choose_experts(torch.zeros(1, 8), biased, torch.zeros(7))


# ---- the balance loss ----


def slow_balance_loss(scores, ids, config, tokens):
    losses = []
    for first in range(0, len(scores), tokens):
        s, chosen = scores[first : first + tokens], ids[first : first + tokens]
        loss = 0.0
        for i in range(config.num_experts):
            f = config.num_experts / (config.top_k * tokens) * sum(list(row).count(i) for row in chosen)
            loss += f * sum(row[i] / math.fsum(row) for row in s) / tokens
        losses.append(loss)
    return sum(losses) / len(losses)


@each_variant
@pytest.mark.parametrize("tokens", [1, 7, 12])
def test_balance_loss_against_a_loop(config, tokens):
    r = choose_experts(make_logits(config, tokens * 3, torch.float64), config, make_bias(config))
    expected = slow_balance_loss(r.scores_TE.tolist(), r.ids_TK.tolist(), config, tokens)
    assert balance_loss(r.scores_TE, r.ids_TK, config, tokens).item() == pytest.approx(expected, rel=1e-12)
    single = balance_loss(r.scores_TE.float(), r.ids_TK.int(), config, tokens)
    assert (single.dtype, single.shape) == (torch.float32, ())
    assert single.item() == pytest.approx(expected, rel=1e-6)


def test_balance_loss_four_numbers():
    c = config(num_experts=4, top_k=1)
    scores = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.5, 0.1, 0.3, 0.1]])
    assert balance_loss(scores, torch.tensor([[0], [0]]), c, 2).item() == pytest.approx(2.4)
    assert balance_loss(scores, torch.tensor([[0], [2]]), c, 2).item() == pytest.approx(1.6)
    assert balance_loss(scores, torch.tensor([[0], [-1]]), c, 2).item() == pytest.approx(1.2)  # f = [2, 0, 0, 0]
    assert balance_loss(scores, torch.tensor([[-1], [-1]]), c, 2).item() == 0
    assert balance_loss(scores, torch.tensor([[0], [2]]), c, 1).item() == pytest.approx(4 * (0.7 + 0.3) / 2)  # two sequences


def test_balance_loss_of_equal_loads_is_one_and_of_a_sure_router_e_over_k():
    c = config(score="sigmoid")
    ids = torch.arange(24).reshape(12, 2) % 8  # every expert three times
    scores = torch.rand(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert balance_loss(scores, ids, c, 12).item() == pytest.approx(1.0, rel=1e-14)  # whatever the scores, as every f is 1
    sure = torch.zeros(12, 8, dtype=torch.float64)
    sure[:, [3, 6]] = 0.9
    assert balance_loss(sure, torch.tensor([[3, 6]] * 12), c, 12).item() == pytest.approx(8 / 2, rel=1e-14)


def test_balance_loss_gradient():
    c = config(score="sigmoid")
    ids = choose_experts(make_logits(c, 12, torch.float64), c).ids_TK
    scores = torch.rand(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: balance_loss(s, ids, c, 4), (scores,))


def test_balance_loss_gradient_pushes_a_crowded_expert_down():
    c = config(score="sigmoid", selection_bias=True)
    logits = make_logits(c, 16).requires_grad_()
    r = choose_experts(logits, c, torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0]))
    balance_loss(r.scores_TE, r.ids_TK, c, 16).backward()
    assert (logits.grad[:, 0] > 0).all()


def test_balance_loss_gradient_of_a_sequence_does_not_see_the_other_sequences():
    c = config(num_experts=10, score="sigmoid", top_k=3)
    tokens, sequences = 97, 8
    r = choose_experts(make_logits(c, tokens * sequences), c)

    def gradient(first, last):
        rows = slice(first * tokens, last * tokens)
        scores = r.scores_TE[rows].clone().requires_grad_()
        (balance_loss(scores, r.ids_TK[rows], c, tokens) * (last - first)).backward()
        return scores.grad

    whole = gradient(0, sequences)
    for step in (1, 2, 4):
        assert torch.equal(torch.cat([gradient(i, i + step) for i in range(0, sequences, step)]), whole)


def test_balance_loss_without_tokens_and_refusals():
    c = config()
    for tokens in (0, 1, 5):
        scores = torch.zeros(0, 8, requires_grad=True)
        loss = balance_loss(scores, torch.zeros(0, 2, dtype=torch.int64), c, tokens)
        loss.backward()
        assert loss.item() == 0 and loss.shape == () and scores.grad.shape == (0, 8)
    for tokens in (0, -1, 5):
        with pytest.raises(ValueError, match=f"tokens_per_sequence={tokens}: must be at least 1 and divide the 12 tokens"):
            balance_loss(torch.ones(12, 8), torch.zeros(12, 2, dtype=torch.int64), c, tokens)
    with pytest.raises(ValueError, match=r"ids_TK.shape=\(12, 3\): must be \(tokens=12, top_k=2\)"):
        balance_loss(torch.ones(12, 8), torch.zeros(12, 3, dtype=torch.int64), c, 4)
    with pytest.raises(ValueError, match=r"scores_TE.shape=\(12, 7\): must be \(tokens, num_experts=8\)"):
        balance_loss(torch.ones(12, 7), torch.zeros(12, 2, dtype=torch.int64), c, 4)


def test_scores_that_underflow_give_a_finite_balance_loss():
    c = config(score="sigmoid")
    logits = torch.full((4, 8), -1e4, requires_grad=True)
    r = choose_experts(logits, c)
    loss = balance_loss(r.scores_TE, r.ids_TK, c, 4)
    loss.backward()
    assert loss.item() == 0 and logits.grad.count_nonzero() == 0


# ---- the module ----


BIASED = config(score="sigmoid", selection_bias=True, num_experts=10, top_k=3)


def make_router(config=BIASED, **where):
    torch.manual_seed(0)
    router = Router(config, **where)
    with torch.no_grad():
        router.weight.normal_()
        if router.bias is not None:
            router.bias.copy_(make_bias(config) / 3)
    return router


def make_x(config, tokens, dtype=torch.float32):
    return torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_forward(config, dtype):
    router, x = make_router(config).to(dtype), make_x(config, 150, dtype)
    r = router(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert r.weights_TK.dtype == r.scores_TE.dtype == wide
    logits = x.double() @ router.weight.detach().double().T
    exact = choose_experts(logits, config, router.bias)
    assert torch.equal(r.ids_TK, exact.ids_TK)
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(r.weights_TK.double(), exact.weights_TK, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_module(dtype):
    router, x = make_router(dtype=dtype), make_x(BIASED, 150, dtype).requires_grad_()
    r = router(x)
    d_weights = torch.randn(150, 3, generator=torch.Generator().manual_seed(2))
    r.weights_TK.backward(d_weights)
    x64, w64 = x.detach().double().requires_grad_(), router.weight.detach().double().requires_grad_()
    choose_experts(x64 @ w64.T, BIASED, router.bias).weights_TK.backward(d_weights.double())
    assert (x.grad.dtype, router.weight.grad.dtype) == (dtype, dtype)
    rtol = 1e-5 if dtype == torch.float32 else 2**-8  # bf16: one rounding of an fp32 value
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(router.weight.grad.double(), w64.grad, rtol=rtol, atol=1e-5)


def test_gradcheck_of_the_module():
    router, x = make_router(dtype=torch.float64), make_x(BIASED, 4, torch.float64).requires_grad_()

    def function(x, weight):
        return torch.func.functional_call(router, {"weight": weight}, (x,))[1:]

    assert torch.autograd.gradcheck(function, (x, router.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [BIASED, VARIANTS["softmax"]], ids=["sigmoid, bias", "softmax"])
def test_a_token_of_the_module_does_not_see_the_others(config, dtype):
    tokens = 700
    router, x = make_router(config, dtype=dtype), make_x(config, tokens, dtype)
    d_weights = make_logits(config, tokens)[:, : config.top_k]

    def function(rows):
        x_rows = x[rows].requires_grad_()
        r = router(x_rows)
        (d_x,) = torch.autograd.grad(r.weights_TK, x_rows, d_weights[rows])
        return *(v.detach() for v in r), d_x

    nothing_but_its_own_row(config, tokens, function)


def test_autocast_changes_nothing():
    router, x = make_router(), make_x(BIASED, 150).requires_grad_()
    plain = router(x)
    plain_gradients = torch.autograd.grad(plain.weights_TK[:, 0].sum(), (x, router.weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = router(x)
        cast_gradients = torch.autograd.grad(cast.weights_TK[:, 0].sum(), (x, router.weight))
    for a, b in zip((*cast, *cast_gradients), (*plain, *plain_gradients), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@each_variant
def test_module_without_tokens(config):
    router = make_router(config)
    x = make_x(config, 0).requires_grad_()
    r = router(x)
    assert [tuple(v.shape) for v in r] == [(0, config.top_k), (0, config.top_k), (0, config.num_experts)]
    r.weights_TK.sum().backward()
    assert x.grad.shape == x.shape and router.weight.grad.count_nonzero() == 0


def test_module_refuses_other_shapes():
    router = make_router()
    for shape in [(4, 23), (24,), (2, 4, 24)]:
        with pytest.raises(ValueError, match=r"x_TH.shape=.*: must be \(tokens, hidden_size=24\)"):
            router(torch.zeros(shape))


def test_parameters_and_state():
    assert {name: (tuple(v.shape), v.dtype) for name, v in Router(BIASED, dtype=torch.bfloat16).state_dict().items()} == {
        "weight": ((10, 24), torch.bfloat16),
        "bias": ((10,), torch.float32),
    }
    plain = Router(config())
    assert list(plain.state_dict()) == ["weight"] and plain.bias is None
    assert [name for name, _ in Router(BIASED).named_parameters()] == ["weight"]
    source, target = make_router(), Router(BIASED)
    assert not torch.equal(source.weight, target.weight)
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.weight, target.weight) and torch.equal(source.bias, target.bias)
    torch.manual_seed(0)
    weight = Router(config(hidden_size=512, num_experts=64)).weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.02) and abs(weight.mean().item()) < 5e-4
    assert Router(BIASED).bias.count_nonzero() == 0


CHANGES = {
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "type": lambda m: m.type(torch.float16),
    "and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "device and dtype": lambda m: m.to("cpu", torch.bfloat16),
    "inside another module": lambda m: torch.nn.Sequential(m).to(torch.bfloat16)[0],
    "a copy": lambda m: copy.deepcopy(m).bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_bias_keeps_its_bits(change):
    router = make_router()
    before = router.bias.clone()
    assert not torch.equal(before, before.bfloat16().float())  # the values need fp32
    changed = change(router)
    assert changed.bias.dtype == torch.float32 and torch.equal(changed.bias, before)
    assert changed.state_dict()["bias"].dtype == torch.float32
    changed.update_bias(torch.arange(10), 1e-3)  # and it is still the registered buffer
    assert not torch.equal(changed.state_dict()["bias"], before)


def test_the_weight_does_change_its_dtype():
    router = make_router().to(torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16
    assert make_router(config()).half().weight.dtype == torch.float16  # without a bias, too


def test_devices():
    router = make_router().to("meta", torch.bfloat16)
    assert (router.bias.device.type, router.bias.dtype, router.weight.dtype) == ("meta", torch.float32, torch.bfloat16)
    router = Router(BIASED, device="meta").to(torch.bfloat16).to_empty(device="cpu")
    router.reset_parameters()
    assert (router.bias.device.type, router.bias.dtype) == ("cpu", torch.float32)
    assert router.bias.count_nonzero() == 0 and router(make_x(BIASED, 5, torch.bfloat16)).weights_TK.isfinite().all()


def test_update_bias_four_numbers():
    router = Router(config(num_experts=4, selection_bias=True))
    router.update_bias(torch.tensor([8, 4, 0, 4]), 0.001)
    assert torch.equal(router.bias, torch.tensor([-0.001, 0.0, 0.001, 0.0]))
    router.update_bias(torch.tensor([3, 3, 5, 4], dtype=torch.int32), 0.001)  # mean 3.75
    assert torch.equal(router.bias, torch.tensor([0.0, 0.001, 0.0, -0.001]))


def test_update_bias_is_exact():
    router = make_router()
    before = router.bias.clone()
    bias = router.bias
    for load in (0, 1, 40_840, 2**40 + 1):  # equal loads, also beyond what fp32 can count
        router.update_bias(torch.full((10,), load), 0.001)
    assert torch.equal(router.bias, before)
    loads = torch.full((10,), 2**40)
    loads[3] += 1  # one token in 2^40 above the mean
    router.update_bias(loads, 0.001)
    expected = before + 0.001
    expected[3] = before[3] - 0.001
    assert torch.equal(router.bias, expected)
    assert router.bias is bias and not router.bias.requires_grad


def test_update_bias_balances():
    c = config(score="sigmoid", selection_bias=True, num_experts=8, top_k=2)
    logits = make_logits(c, 512) + torch.arange(8) * 0.8  # the last experts are the favourites
    router = Router(c)

    def loads():
        return choose_experts(logits, c, router.bias).ids_TK.flatten().bincount(minlength=8)

    first = loads()
    for step in range(200):  # a constant rate would end in swings of a step to and fro
        router.update_bias(loads(), 0.02 * 0.97**step)
    assert first.max() > 2 * 128 and loads().max() < 1.1 * 128  # 128 is the mean


def test_update_bias_names_what_is_no_count_and_no_rate():
    router = Router(MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2, selection_bias=True))
    loads = torch.tensor([8, 4, 0, 4])
    for error, message, arguments in (
        (TypeError, "tokens_per_expert_E: must be an integer tensor .*, not list", ([1, 2, 3, 4], 0.1)),
        (ValueError, "tokens_per_expert_E has values from -1 on: must be counts", (torch.tensor([-1, 4, 4, 4]), 0.1)),
        (ValueError, "tokens_per_expert_E is on meta: must hold values", (loads.to("meta"), 0.1)),
        (TypeError, "rate='1': must be a number, not str", (loads, "1")),
        (TypeError, "rate=True: must be a number, not bool", (loads, True)),
    ):
        with pytest.raises(error, match=message):
            router.update_bias(*arguments)
        assert router.bias.tolist() == [0.0] * 4
    router.update_bias(loads, torch.tensor(0.5))
    assert router.bias.tolist() == [-0.5, 0.0, 0.5, 0.0]


def test_update_bias_refuses():
    router = make_router()
    with pytest.raises(ValueError, match="update_bias: needs a config with selection_bias=True"):
        Router(config()).update_bias(torch.zeros(8, dtype=torch.int64), 0.001)
    with pytest.raises(TypeError, match=r"tokens_per_expert_E.dtype=torch.float32: must be an integer dtype"):
        router.update_bias(torch.zeros(10), 0.001)
    with pytest.raises(ValueError, match=r"tokens_per_expert_E.shape=\(9,\): must be \(num_experts=10,\)"):
        router.update_bias(torch.zeros(9, dtype=torch.int64), 0.001)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_router_repeats_itself(tied, reentrant):
    router, x = make_router(), make_x(BIASED, 200)
    if tied:
        with torch.no_grad():
            router.weight.zero_()
            router.bias.zero_()
    seen = []

    def function(x):
        r = router(x)
        seen.append(r.ids_TK)
        return r.weights_TK * torch.arange(3)

    def gradients(call):
        inputs = x.clone().requires_grad_()
        router.weight.grad = None
        call(inputs).sum().backward()
        return inputs.grad, router.weight.grad

    plain = gradients(function)
    again = gradients(lambda v: torch.utils.checkpoint.checkpoint(function, v, use_reentrant=reentrant))
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
