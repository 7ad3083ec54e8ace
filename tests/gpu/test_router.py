"""The router's kernels on a GPU: the definition's choice, numbers to a few units in the last place, gradients, a row's bits in any company,
whole graphs and captured ones. Run as a program: times of the kernels and of the definition."""

from __future__ import annotations

import functools
import os
import sys
import time

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))

import router_checks as checks
import virtual
from torch import Tensor
from virtual import DEVICE

from mok import router
from mok.config import MoEConfig
from mok.kernels import router as kernels
from mok.router import Router, choose_experts

CONFIGS = {
    **checks.CONFIGS,
    "qwen3": checks.config(128, 8),
    "deepseek-v3": checks.config(256, 8, "sigmoid", selection_bias=True, num_groups=8, top_groups=4, scaling_factor=2.5),
    "deepseek-v4": checks.config(384, 6, "sqrt_softplus", selection_bias=True, scaling_factor=2.5),
    "many": checks.config(1024, 32, "sigmoid", selection_bias=True),
    "many in groups": checks.config(1024, 9, num_groups=32, top_groups=5),
    "many in odd groups": checks.config(1020, 12, "sigmoid", num_groups=60, top_groups=7),
    "most padding": checks.config(999, 7, num_groups=3, top_groups=2, renormalize=False),
    "all of many": checks.config(300, 300, "sqrt_softplus", scaling_factor=0.5),
    "half a tile and one": checks.config(257, 5, "softmax", renormalize=False, scaling_factor=0.75),
    "two": checks.config(2, 2),
}
each_config = pytest.mark.parametrize("c", CONFIGS.values(), ids=CONFIGS.keys())


def bias_of(c: MoEConfig) -> Tensor | None:
    return None if (bias := checks.make_bias(c)) is None else bias.to(DEVICE)


def logits_of(c: MoEConfig, tokens: int, seed: int = 0) -> Tensor:
    return checks.make_logits(c, tokens, seed).to(DEVICE)


def step(logits: Tensor, bias: Tensor | None, c: MoEConfig, d_weights: Tensor, d_scores: Tensor | None = None) -> tuple[Tensor, ...]:
    """ids, weights, scores and the gradient of logits."""
    leaf = logits.detach().requires_grad_()
    r = choose_experts(leaf, c, bias)
    outs, d_outs = [r.weights_TK, r.scores_TE], [d_weights, d_scores]
    (d_logits,) = torch.autograd.grad(outs[: 1 if d_scores is None else 2], leaf, d_outs[: 1 if d_scores is None else 2])
    return r.ids_TK, r.weights_TK.detach(), r.scores_TE.detach(), d_logits


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], rows: object = slice(None)) -> None:
    """The same bits, those of NaN among them."""
    for name, a, b in zip(("ids", "weights", "scores", "d_logits"), got, want, strict=False):
        b = b[rows]
        assert a.shape == b.shape and a.dtype == b.dtype, name
        differ = a.view(torch.int64 if name == "ids" else torch.int32) != b.view(torch.int64 if name == "ids" else torch.int32)
        assert not differ.any(), (name, differ.nonzero()[0].tolist(), int(differ.sum()))


# ---- values ----


@each_config
def test_choice(c):
    for tokens in (1, 3, 1000):
        logits, bias = logits_of(c, tokens), bias_of(c)
        virtual.poison()
        routing = choose_experts(logits, c, bias)
        checks.check_choice(tuple(routing), logits, bias, c)
    clear = checks.clear_rows(logits, bias, c)
    assert clear.sum() > 50
    want = router._choose_in_steps(logits, bias, *checks.arguments_of(c))[0]  # by PyTorch's operators, here too
    assert torch.equal(routing.ids_TK[clear], want[clear])


@each_config
def test_special_values(c):
    logits = checks.special_logits(c).to(DEVICE)
    for value in (0.0, -torch.inf, torch.inf, torch.nan)[: 4 if c.selection_bias else 1]:
        bias = checks.special_bias(c, value)
        bias = None if bias is None else bias.to(DEVICE)
        virtual.poison()
        routing = choose_experts(logits, c, bias)
        checks.check_choice(tuple(routing), logits, bias, c)
        ids = routing.ids_TK.sort(1).values
        assert bool((ids >= 0).all() and (ids < c.num_experts).all() and (ids.diff(dim=1) > 0).all()), "distinct, even of NaN"


@each_config
def test_ties_go_to_the_lowest_ids(c):
    bias = torch.full((c.num_experts,), 0.25, device=DEVICE) if c.selection_bias else None
    for logit in (0.0, -3.0, 40.0, torch.nan):
        ids = choose_experts(torch.full((70, c.num_experts), logit, device=DEVICE), c, bias).ids_TK
        assert torch.equal(ids, torch.arange(c.top_k, device=DEVICE).expand(70, -1)), logit


@pytest.mark.parametrize(("score", "units"), [("sigmoid", 2.5), ("sqrt_softplus", 2.0)])
def test_scores_over_all_their_range(score, units):
    c = checks.config(1024, 1, score, renormalize=False)
    ranges = [torch.linspace(a, b, 2**20) for a, b in ((-215, 25), (-45, -35), (-4, 4), (-1e-3, 1e-3), (80, 110), (1e3, 1e30))]
    logits = torch.cat(ranges).view(-1, 1024)
    scores = choose_experts(logits.to(DEVICE), c).scores_TE
    checks.within(scores.cpu(), checks.exact_scores(logits, score), units)


def two_to(n: Tensor) -> Tensor:
    return ((n + 127) << 23).view(torch.float32)


def test_every_operation_rounds_as_on_the_cpu():
    """None is fused, none takes subnormals for zero."""
    x = torch.cat([-torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 104, torch.tensor([-0.0, -87.5, -103.9, -104.5])])
    n = (x * 1.4426950408889634 + 1.5 * 2**23) - 1.5 * 2**23
    r = (x - n * 0.693359375) - n * -0.00021219444005469057
    power = 1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))
    power = 1.0 + (r + (r * r) * (1 / 2 + r * (1 / 6 + r * power)))
    half = n.int() >> 1
    e = power * two_to(half) * two_to(n.int() - half)
    want = e / (1.0 + e)
    logits = x.to(DEVICE)[:, None]
    scores = choose_experts(logits, checks.config(1, 1, "sigmoid", renormalize=False)).scores_TE[:, 0].cpu()
    assert torch.equal(scores[x < 0], want[x < 0])


# ---- gradients ----


def plain(logits: Tensor, ids: Tensor, c: MoEConfig) -> tuple[Tensor, Tensor]:
    """Weights and scores by PyTorch's own functions, for autograd."""
    if c.score == "softmax":
        scores = logits.softmax(1)
    else:
        scores = logits.sigmoid() if c.score == "sigmoid" else torch.nn.functional.softplus(logits, threshold=50).sqrt()
    weights = scores.gather(1, ids)
    if c.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * c.scaling_factor, scores


@each_config
@pytest.mark.parametrize("of", ["weights", "scores", "both"])
def test_gradient_against_autograd_in_fp64(c, of):
    logits, bias = logits_of(c, 300), bias_of(c)
    leaf = logits.clone().requires_grad_()
    routing = choose_experts(leaf, c, bias)
    d_weights = torch.randn(300, c.top_k, device=DEVICE) if of != "scores" else None
    d_scores = torch.randn(300, c.num_experts, device=DEVICE) * 0.1 if of != "weights" else None
    gradients = (d_weights, d_scores)
    outs, d_outs = zip(*((out, d) for out, d in zip(routing[1:], gradients, strict=True) if d is not None), strict=True)
    virtual.poison()
    (d_logits,) = torch.autograd.grad(outs, leaf, d_outs)

    wide = logits.double().requires_grad_()
    loss = sum((out * d).sum() for out, d in zip(plain(wide, routing.ids_TK, c), gradients, strict=True) if d is not None)
    (want,) = torch.autograd.grad(loss, wide)
    saved = (logits, routing.ids_TK, routing.scores_TE.detach())
    size = checks.magnitude_of_gradient(*gradients, *saved, c)
    if c.score == "sigmoid":
        size = size / (1 - saved[2].double())  # which is as exact as the score
    checks.within(d_logits, want, 200, size)  # from scores as they were rounded, softmax of rounded differences
    checks.check_gradient(d_logits, *gradients, *saved, c)  # and by the definition from the same scores


@each_config
def test_gradient_of_special_values(c):
    logits, bias = checks.special_logits(c).to(DEVICE), bias_of(c)
    ids, _, scores = kernels.choose(logits, bias, *checks.arguments_of(c))
    form = (c.score, c.renormalize, c.scaling_factor)
    d_weights, d_scores = torch.randn(ids.shape, device=DEVICE), torch.randn(scores.shape, device=DEVICE) * 0.1
    for gradients in ((d_weights, None), (None, d_scores), (d_weights, d_scores)):
        virtual.poison()
        d_logits = kernels.choose_backward(*gradients, logits, ids, scores, *form)
        checks.check_gradient(d_logits, *gradients, logits, ids, scores, c)


@each_config
def test_no_gradient_has_the_bits_of_zeros(c):
    logits = logits_of(c, 100)
    ids, weights, scores = kernels.choose(logits, bias_of(c), *checks.arguments_of(c))
    saved = (logits, ids, scores, c.score, c.renormalize, c.scaling_factor)
    for d_weights, d_scores in ((weights, None), (None, scores)):
        zeros = [torch.zeros_like(of) if d is None else d for of, d in ((weights, d_weights), (scores, d_scores))]
        assert torch.equal(kernels.choose_backward(d_weights, d_scores, *saved), kernels.choose_backward(*zeros, *saved))


def test_gradients_that_are_no_dense_memory():
    c = CONFIGS["sigmoid, bias, groups"]
    leaf, bias = logits_of(c, 50).requires_grad_(), bias_of(c)
    results = []
    for spread in (True, False):
        r = choose_experts(leaf, c, bias)
        d = [torch.ones(1, 1, device=DEVICE).expand(out.shape) for out in r[1:]]
        results.append(torch.autograd.grad(r[1:], leaf, d if spread else [t.contiguous() for t in d])[0])
    assert torch.equal(*results)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        (d_x,) = torch.autograd.grad(choose_experts(leaf, c, bias).weights_TK.square().sum(), leaf, create_graph=True)
        d_x.sum().backward()


# ---- a row's bits ----


@each_config
def test_a_token_does_not_see_the_others(c):
    tokens = 700
    logits, bias = logits_of(c, tokens), bias_of(c)
    logits[::50, 0] = torch.nan
    logits[3::50, -1] = torch.inf
    d_weights, d_scores = torch.randn(tokens, c.top_k, device=DEVICE), torch.randn(tokens, c.num_experts, device=DEVICE)
    whole = step(logits, bias, c, d_weights, d_scores)
    order = torch.randperm(tokens, device=DEVICE)
    one = [torch.tensor([t], device=DEVICE) for t in (0, 1, 3, 353, tokens - 1)]
    for rows in (order, *order.split(37)[:4], torch.arange(3, tokens, device=DEVICE), *one):
        assert_same(step(logits[rows], bias, c, d_weights[rows], d_scores[rows]), whole, rows)
    for rows in (slice(1, tokens), slice(5, 6), slice(0, tokens - 1)):  # where odd rows begin at odd addresses
        assert_same(step(logits[rows], bias, c, d_weights[rows], d_scores[rows]), whole, rows)


@each_config
def test_where_logits_lie_changes_no_bit(c):
    tokens = 67
    logits, bias = logits_of(c, tokens), bias_of(c)
    d_weights = torch.randn(tokens, c.top_k, device=DEVICE)
    want = step(logits, bias, c, d_weights)
    wider = torch.full((tokens, c.num_experts + 3), torch.nan, device=DEVICE)
    wider[:, 1:-2] = logits
    shifted = torch.empty(tokens * c.num_experts + 1, device=DEVICE)[1:].view(tokens, -1).copy_(logits)
    shifted_d = torch.empty(tokens * c.top_k + 1, device=DEVICE)[1:].view(tokens, -1).copy_(d_weights)
    shifted_bias = None if bias is None else torch.cat([bias[:1], bias])[1:]
    for other in (logits.T.contiguous().T, wider[:, 1:-2], shifted):
        assert_same(step(other, shifted_bias, c, shifted_d), want)
        assert_same(step(other, bias, c, d_weights.T.contiguous().T), want)


@each_config
def test_the_number_of_tokens_does_not_recompile(c):
    bias, before = bias_of(c), None
    for tokens in (1, 2, 16, 17, 4096):
        step(logits_of(c, tokens), bias, c, torch.ones(tokens, c.top_k, device=DEVICE))
        both = (kernels.choose_kernel, kernels.choose_backward_kernel)
        count = [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in both]
        assert before in (None, count)
        before = count


def test_more_than_two_to_the_31_elements():
    c = checks.config(1024, 4, "sigmoid")
    tokens = 2**21 + 5
    if torch.cuda.mem_get_info()[0] < 5 * tokens * 1024 * 4:
        pytest.skip("needs 43 GB")
    logits = torch.randn(tokens, 1024, device=DEVICE)
    d_weights = torch.randn(tokens, 4, device=DEVICE)
    whole = step(logits, None, c, d_weights)
    for rows in (slice(0, 5), slice(2**20, 2**20 + 3), slice(tokens - 9, tokens)):
        assert_same(step(logits[rows], None, c, d_weights[rows]), whole, rows)


# ---- as it is used ----


@each_config
def test_no_tokens(c):
    leaf = logits_of(c, 0).requires_grad_()
    r = choose_experts(leaf, c, bias_of(c))
    assert [tuple(v.shape) for v in r] == [(0, c.top_k), (0, c.top_k), (0, c.num_experts)]
    assert [v.dtype for v in r] == [torch.int64, torch.float32, torch.float32]
    r.weights_TK.sum().backward()
    assert leaf.grad.shape == leaf.shape


def test_what_the_kernels_do_not_take_goes_the_other_way():
    wide = checks.config(2048, 4, "sigmoid")
    logits = logits_of(wide, 20)
    assert_same(tuple(choose_experts(logits, wide)), router._choose_in_steps(logits, None, *checks.arguments_of(wide)))
    c = CONFIGS["sigmoid, bias, groups"]
    logits, bias = logits_of(c, 20).double(), bias_of(c)
    for got, want in zip(choose_experts(logits, c, bias), router._choose_in_steps(logits, bias, *checks.arguments_of(c)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["softmax", "sigmoid, bias, groups", "sqrt softplus, bias", "softmax as it is, odd", "deepseek-v3"])
def test_compiled_whole_graph(name):
    c = CONFIGS[name]
    bias, function = bias_of(c), lambda logits, bias: choose_experts(logits * 1.0, c, bias)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    for tokens in (100, 333, 1):
        logits, d_weights = logits_of(c, tokens, seed=tokens), torch.randn(tokens, c.top_k, device=DEVICE)
        results = []
        for call in (function, compiled):
            leaf = logits.clone().requires_grad_()
            r = call(leaf, bias)
            (r.weights_TK * d_weights).sum().backward()
            results.append((r.ids_TK, r.weights_TK.detach(), r.scores_TE.detach(), leaf.grad))
        assert_same(results[1], results[0])


def test_compiled_weights_alone():
    """A graph that gives the scores to nobody."""
    c = CONFIGS["deepseek-v3"]
    bias, logits = bias_of(c), logits_of(c, 64)
    function = lambda logits: choose_experts(logits, c, bias).weights_TK.square()  # noqa: E731
    torch.compiler.reset()
    gradients = []
    for call in (function, torch.compile(function, fullgraph=True)):
        leaf = logits.clone().requires_grad_()
        call(leaf).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["softmax", "deepseek-v3"])
def test_capture_and_replay(name):
    c = CONFIGS[name]
    bias, logits, d_weights = bias_of(c), logits_of(c, 500), torch.randn(500, c.top_k, device=DEVICE)
    others = [logits_of(c, 500, seed) for seed in (1, 2)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(logits, bias, c, d_weights)  # which compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = step(logits, bias, c, d_weights)
    for other in (*others, others[0]):
        logits.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(tuple(value.clone() for value in captured), step(other, bias, c, d_weights))


def test_nothing_waits_for_the_device():
    c = CONFIGS["deepseek-v3"]
    bias, logits, d_weights = bias_of(c), logits_of(c, 500), torch.randn(500, c.top_k, device=DEVICE)
    step(logits, bias, c, d_weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(logits, bias, c, d_weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_module_takes_the_kernels(monkeypatch):
    calls, originals = [], {name: getattr(kernels, name) for name in ("choose", "choose_backward")}

    def recorded(name, *arguments):
        calls.append((name, arguments))
        return originals[name](*arguments)

    for name in originals:
        monkeypatch.setattr(kernels, name, functools.partial(recorded, name))
    c = CONFIGS["deepseek-v3"]
    module = Router(c, device=DEVICE)
    module(torch.randn(40, c.hidden_size, device=DEVICE)).weights_TK.square().sum().backward()
    assert [name for name, _ in calls] == ["choose", "choose_backward"]
    assert calls[1][1][1] is None, "a gradient of scores, which nobody has"
    assert module.weight.grad.isfinite().all() and module.weight.grad.any()


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    c = CONFIGS["deepseek-v3"]
    bias, logits, d_weights = bias_of(c), logits_of(c, 50), torch.randn(50, c.top_k, device=DEVICE)
    there = step(logits.to("cuda:1"), bias.to("cuda:1"), c, d_weights.to("cuda:1"))
    assert_same(tuple(value.to(DEVICE) for value in there), step(logits, bias, c, d_weights))


# ---- times ----


def microseconds(call, repeats: int = 50) -> tuple[float, float]:
    """Of the device, and of the host alone; medians."""
    for _ in range(3):
        call()
    device, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # so that the host is ahead
        start.record()
        began = time.perf_counter()
        call()
        host.append((time.perf_counter() - began) * 1e6)
        stop.record()
        stop.synchronize()
        device.append(start.elapsed_time(stop) * 1e3)
    return sorted(device)[repeats // 2], sorted(host)[repeats // 2]


if __name__ == "__main__":
    for name in ("qwen3", "deepseek-v3", "deepseek-v4", "many"):
        c = CONFIGS[name]
        for tokens in (512, 4096, 16384):
            choice = (logits_of(c, tokens), bias_of(c), *checks.arguments_of(c))
            ids, weights, scores = kernels.choose(*choice)
            gradient = (weights, None, choice[0], ids, scores, c.score, c.renormalize, c.scaling_factor)
            for arguments, calls in (
                (choice, (kernels.choose, router._choose_in_steps)),
                (gradient, (kernels.choose_backward, router._choose_backward_in_steps)),
            ):
                for call in calls:
                    device, host = microseconds(functools.partial(call, *arguments))
                    print(f"{name} T={tokens} {call.__module__}.{call.__name__}: device {device:.1f} us, host {host:.0f} us")
