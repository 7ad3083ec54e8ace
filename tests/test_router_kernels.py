"""The router's kernels under the interpreter (this file run as a program): the definition's choice, numbers to a few units in the last
place, a row's bits in any company. What they compile to is in test_kernels_compile.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import router_checks as checks
import torch
from torch import Tensor

from mok import router
from mok.config import MoEConfig


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_values_under_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def tokens_of(c: MoEConfig) -> int:
    """Several programs, the last one not full. Of wide rows few, as each takes a program of its own and as long as many narrow ones."""
    return 37 if c.num_experts <= 32 else 9


def special_of(c: MoEConfig) -> Tensor:
    return checks.special_logits(c)[:: max(c.num_experts // 16, 1)]


def choice() -> None:
    from mok.kernels.router import choose

    for c in checks.CONFIGS.values():
        tokens, bias, arguments = tokens_of(c), checks.make_bias(c), checks.arguments_of(c)
        logits = checks.make_logits(c, tokens)
        whole = choose(logits, bias, *arguments)
        checks.check_choice(whole, logits, bias, c)
        clear = checks.clear_rows(logits, bias, c)
        assert clear.float().mean() > 0.5
        assert torch.equal(whole[0][clear], router._choose_in_steps(logits, bias, *arguments)[0][clear])
        for rows in (slice(5, tokens), slice(tokens - 1, tokens))[: 2 if tokens > 9 else 1]:  # in another place, or alone
            for part, all_rows in zip(choose(logits[rows], bias, *arguments), whole, strict=True):
                assert torch.equal(part, all_rows[rows])
        empty = choose(logits[:0], bias, *arguments)
        assert [tuple(v.shape) for v in empty] == [(0, c.top_k), (0, c.top_k), (0, c.num_experts)]

        logits = special_of(c)
        for value in (-torch.inf, torch.nan, torch.inf)[: (3 if len(logits) > 10 else 2) if c.selection_bias else 1]:
            bias = checks.special_bias(c, value)
            checks.check_choice(choose(logits, bias, *arguments), logits, bias, c)

    # exp and log1p over all their range, and where most values lie
    for score, units in (("sigmoid", 2.5), ("sqrt_softplus", 2.0)):
        c = checks.config(1024, 1, score, renormalize=False)
        logits = torch.cat([torch.linspace(-215, 25, 4096), torch.linspace(-4, 4, 8192)]).view(12, 1024)
        checks.within(choose(logits, None, *checks.arguments_of(c))[2], checks.exact_scores(logits, score), units)

    # the docstring's four numbers, and memory of another order, of another start and of another dtype
    c = checks.config(4, 2, "sigmoid", selection_bias=True)
    ids, weights, _ = choose(torch.tensor([[0.0, 2.0, 2.0, -1.0]]), torch.tensor([0.5, 0.0, 0.0, 0.0]), *checks.arguments_of(c))
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.362, 0.638]]), rtol=0, atol=5e-4)
    logits, bias = checks.make_logits(c, 9), checks.make_bias(c)
    want = choose(logits, bias, *checks.arguments_of(c))
    moved = torch.cat([torch.zeros(1), logits.flatten()])[1:].view(9, 4)
    for other, its_bias in ((logits.T.contiguous().T, bias.double()), (moved, bias[:, None].expand(4, 2)[:, 1])):
        assert all(torch.equal(a, b) for a, b in zip(choose(other, its_bias, *checks.arguments_of(c)), want, strict=True))


def gradient() -> None:
    from mok.kernels.router import choose_backward

    for c in checks.CONFIGS.values():
        form, tokens = (c.score, c.renormalize, c.scaling_factor), tokens_of(c)
        for logits in (special_of(c), checks.make_logits(c, tokens)):
            ids, _, scores = router._choose_in_steps(logits, checks.make_bias(c), *checks.arguments_of(c))
            d_weights, d_scores = torch.randn(ids.shape), torch.randn(scores.shape) * 0.1
            for d in ((None, d_scores), (d_weights, None), (d_weights, d_scores))[0 if len(logits) == tokens > 9 else 2 :]:
                d_logits = choose_backward(*d, logits, ids, scores, *form)
                checks.check_gradient(d_logits, *d, logits, ids, scores, c)
        rows = slice(5, tokens)
        part = choose_backward(d_weights[rows], d_scores[rows], logits[rows], ids[rows], scores[rows], *form)
        assert_same(part, d_logits[rows])
        assert choose_backward(d_weights[:0], None, logits[:0], ids[:0], scores[:0], *form).shape == (0, c.num_experts)
    one = torch.ones(1, 1)  # what autograd makes of a sum
    spread = choose_backward(one.expand(ids.shape), one.expand(scores.shape), logits, ids, scores, *form)
    dense = choose_backward(torch.ones(ids.shape), torch.ones(scores.shape), logits, ids, scores, *form)
    assert_same(spread, dense)


def operators() -> None:
    """The operators hand the kernels what they ask for."""
    from mok.kernels import router as kernels

    c = checks.CONFIGS["sigmoid, bias, groups"]
    bias, results = checks.make_bias(c), []
    for choose_kernels in (router._kernels, lambda logits: kernels):
        router._kernels = choose_kernels
        logits = checks.make_logits(c, 9).requires_grad_()
        routing = router.choose_experts(logits, c, bias)
        (d_logits,) = torch.autograd.grad(routing.weights_TK[:, 0].sum() + routing.scores_TE[:, 5].sum(), logits)
        results.append((routing.weights_TK.detach(), d_logits, routing.ids_TK))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert not torch.equal(results[0][1], results[1][1])  # by another arithmetic


def assert_same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.view(torch.int32), b.view(torch.int32))


if __name__ == "__main__":
    from interpret import patch_once

    patch_once()
    torch.manual_seed(0)
    choice()
    gradient()
    operators()
