"""The three promises about bits: same run twice, any number of ranks, no knob. And a token's output depends on that token alone."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch
from layers import NAMES, Batch, assert_equal, step, whole
from ranks import KINDS, run_ranks

import mok
from mok import Tuning, executor
from mok.fabric import host_fabric

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
OTHER_KNOBS = (
    Tuning(minibatch=128, macrobatch=128, saved_rows=0),
    Tuning(minibatch=128, macrobatch=384, saved_rows=256),
    Tuning(minibatch=256, macrobatch=512),
    Tuning(minibatch=1024, macrobatch=4096, saved_rows=1000),
)


def delayed_step(group, batch, tunings, cuts=None):  # type: ignore[no-untyped-def]
    """Steps with random waits before every signal and wait, different on every rank; the last one's result after checking all agree."""
    fabric = host_fabric(group)
    chance = random.Random(fabric.rank)
    fabric.before = lambda task, call: time.sleep(chance.random() * 0.003)
    results = [step(group, batch, tuning, cuts) for tuning in tunings]
    for result in results[1:]:
        assert_equal(result, results[0])
    return results[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_and_knobs_move_no_bit(kind, size, dtype):
    batch = Batch.random(tokens=700, dtype=dtype, clamp=1.5)
    one = step(None, batch)
    cuts = [0, 1, 1, 500, 700][: size + 1] if size == 4 else None  # ranks with 1, 0, 499 and 200 tokens
    assert_equal(whole(run_ranks(kind, delayed_step, size, batch, OTHER_KNOBS, cuts)), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_knobs_move_no_bit_on_one_rank(dtype):
    batch = Batch.random(tokens=700, dtype=dtype, experts=3)
    one = step(None, batch)
    for tuning in OTHER_KNOBS:
        assert_equal(step(None, batch, tuning), one)


@pytest.mark.parametrize("size", [1, 4])
def test_a_hundred_repetitions_with_delays(size):
    batch = Batch.random(tokens=96, hidden=32, width=16, dtype=torch.bfloat16)
    one = step(None, batch)
    assert_equal(whole(run_ranks("virtual", delayed_step, size, batch, [Tuning(minibatch=128, macrobatch=256)] * 100)), one)


def test_threads_move_no_bit():
    batch = Batch.random(tokens=200, hidden=2048, width=256, experts=2)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(step(None, batch))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(2)
    assert_equal(results[1], results[0])


def check_that_a_tokens_output_depends_on_the_token_alone(hidden, width, dtype):  # type: ignore[no-untyped-def]
    config = mok.MoEConfig(
        hidden_size=hidden, intermediate_size=width, num_experts=6, top_k=2, score="sigmoid", num_shared_experts=1, shared_gate=True
    )
    layer = mok.MoE(config, dtype=dtype)
    x = torch.randn(300, hidden).to(dtype).requires_grad_()
    d_out = torch.randn(300, hidden).to(dtype)
    out = layer(x)
    out.backward(d_out)
    for rows in ([7], [299, 3], list(range(100, 290))):
        few = x.detach()[rows].requires_grad_()
        again = layer(few)
        again.backward(d_out[rows])
        assert_equal({"out": again.detach(), "d_x": few.grad}, {"out": out.detach()[rows], "d_x": x.grad[rows]})


@pytest.mark.parametrize("hidden, width", [(64, 48), (72, 40), (33, 7), (65, 17), (1024, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_output_depends_on_the_token_alone(hidden, width, dtype):
    check_that_a_tokens_output_depends_on_the_token_alone(hidden, width, dtype)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_library_that_adds_up_the_last_rows_in_another_order(monkeypatch, noticed):
    def product(rows, factor, multiply=torch.matmul):  # type: ignore[no-untyped-def]
        return torch.cat([multiply(rows[:-8], factor), multiply(rows[-8:].flip(1), factor.flip(0))])

    monkeypatch.setattr(torch, "matmul", product)
    monkeypatch.setattr(executor, "_rows_alike", executor._rows_alike.__wrapped__ if noticed else lambda *_: True)
    with contextlib.nullcontext() if noticed else pytest.raises(AssertionError, match="elements differ"):
        check_that_a_tokens_output_depends_on_the_token_alone(64, 48, torch.float32)


def test_a_moved_bit_would_be_seen():
    batch = Batch.random()
    one = step(None, batch)
    batch.x[5, 5] = torch.nextafter(batch.x[5, 5], torch.tensor(9.0))
    moved = step(None, batch)
    assert any(not torch.equal(one[name], moved[name]) for name in ("out", *(f"d_{n}" for n in NAMES)))
