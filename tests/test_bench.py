"""The benchmarks without a GPU: they run, check what they time, end when they must; and the baselines compute the layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mok import reference
from mok.bench import baselines, checks, comm, ep, ranks, report, timing

ROOT = Path(__file__).resolve().parent.parent


def run(*line: str, timeout: float = 150.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, timeout=timeout, cwd=ROOT, env={**os.environ, **environment}
    )


def test_layers_over_two_ranks(tmp_path):
    """All checks of the suite itself: near the definition, repeated bits, the bits of one rank, and both exchanging baselines."""
    out = tmp_path / "rows.json"
    result = run("benchmarks/ep.py", "--ranks", "2", "--repeats", "1", "--limit", "120", "--out", str(out))
    assert result.returncode == 0, result.stderr[-3000:]
    written = json.loads(out.read_text())
    assert written["machine"] == "cpu" and written["sources_sha256"] == report.sources_sha256()
    assert [row["direction"] for row in written["rows"]] == ["fwd", "bwd"]
    for row in written["rows"]:
        assert row["suite"] == "ep" and row["ep"] == 2 and row["ms"] > 0 and set(row["baselines"]) == {"nccl", "nccl padded"}


def test_ranks_end_at_the_limit(capfd):
    start = time.monotonic()
    assert ranks.launch("this", [], 2, 50.0) == 0
    assert ranks.launch("no_such_module", [], 2, 50.0) == 1
    assert ranks.launch("http.server", ["0"], 2, 2.0) == 124  # it would serve for ever
    assert "--limit=2" in capfd.readouterr().err
    assert time.monotonic() - start < 40


def test_a_bad_option_is_named(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for main, argument, message in (
        (ep.main, "--shapes=huge", "--shapes=huge: must be some of tiny"),
        (ep.main, "--directions=up", "--directions=up: must be some of fwd,bwd"),
        (comm.main, "--parts=pull,talk", "--parts=talk: must be some of pull"),
        (comm.main, "--hidden=1000", "--hidden=1000: must be a multiple of 1024"),
        (comm.main, "--ranks=2", "--ranks=2: there are 0 GPUs"),
    ):
        with pytest.raises(SystemExit) as error:
            main([argument])
        assert error.value.code == 2 and message in capsys.readouterr().err


def test_every_way_moves_the_right_rows():
    pytest.importorskip("triton")
    result = run("tests/bench_rows.py")
    assert result.returncode == 0, result.stderr[-3000:]
    answer = json.loads(result.stdout.splitlines()[-1])
    assert len(answer["found"]) >= 7
    assert not [name for name, problems in answer["found"].items() if any(problems)], answer["found"]
    assert "rows of rank 1 are wrong" in answer["broken"]


def problem(tokens=40, hidden=32, width=24, experts=5, top_k=2):
    x, d_y = (torch.randn(tokens, hidden).bfloat16() for _ in range(2))
    scores, ids = torch.randn(tokens, experts).topk(top_k)
    sizes = (experts, width, hidden), (experts, width, hidden), (experts, hidden, width)
    weights = tuple(torch.randn(*size).mul(size[-1] ** -0.5).bfloat16() for size in sizes)
    return x, ids, scores.softmax(-1), d_y, weights


def test_the_torch_baseline_computes_the_layer():
    x, ids, w, d_y, experts = problem()
    baseline = baselines.TorchLayer(*experts)
    leaves = [t.float().requires_grad_() for t in (x, w, *experts)]
    want = reference.moe(leaves[0], ids, *leaves[1:])
    assert checks.relative_error(baseline(x, ids, w).detach(), want.detach()) < 1.5e-2
    d_x, d_w, d_both, d_down = baseline.step(x, ids, w, d_y)
    wants = torch.autograd.grad(want, leaves, d_y.float())
    for got, expected in zip((d_x, d_w, *d_both.chunk(2, 1), d_down), wants, strict=True):
        assert checks.relative_error(got, expected) < 2e-2


def test_the_checks_find_one_wrong_token_and_one_wrong_gradient():
    x, ids, w, d_y, experts = problem()
    out = baselines.TorchLayer(*experts)(x, ids, w).detach()
    assert checks.forward_error(out, x, ids, w, experts, count=40) < checks.LIMIT
    wrong = out.clone()
    wrong[7] *= 1.1
    assert checks.forward_error(wrong, x, ids, w, experts, count=40) > 0.05
    d_x, d_w, d_both, d_down = baselines.TorchLayer(*experts).step(x, ids, w, d_y)
    d_gate, d_up = d_both.chunk(2, 1)
    assert checks.token_gradient_error(d_x, d_w, x, ids, w, d_y, experts, count=40) < checks.LIMIT
    assert checks.token_gradient_error(d_x, d_w * 1.1, x, ids, w, d_y, experts, count=40) > 0.05
    assert checks.expert_gradient_error((d_gate[3], d_up[3], d_down[3]), 3, x, ids, w, d_y, experts) < checks.LIMIT
    assert checks.expert_gradient_error((d_gate[3], d_up[2], d_down[3]), 3, x, ids, w, d_y, experts) > 0.05
    assert checks.first_difference([out], [out.clone()], ["out"]) is None
    assert "out differs in" in (checks.first_difference([wrong], [out], ["out"]) or "") and wrong is not out


def test_contestants_take_turns():
    order = []
    contestants = {name: lambda name=name: order.append(name) for name in "ab"}
    ms = timing.medians(contestants, 4, warmup=1, round_of=2, align=lambda: order.append("|"))
    assert "".join(order) == "ab" + "|aaa|bbb" * 2
    assert set(ms) == {"a", "b"} and all(value >= 0 for value in ms.values())
