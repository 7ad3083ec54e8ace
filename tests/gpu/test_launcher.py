"""Launches that do not go Triton's way: after a first step none does, and they have the bits of those that did."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

from triton.runtime.jit import JITFunction

import mok
from mok.kernels import dense, launcher
from mok.kernels.combine import combine

CONFIGS = {
    "ordinary": dict(hidden_size=128, intermediate_size=96, num_experts=6, top_k=3, num_shared_experts=1, shared_gate=True),
    "hopper": dict(hidden_size=512, intermediate_size=384, num_experts=8, top_k=2, num_shared_experts=1, score="sigmoid"),
}


def step(layer: mok.MoE, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    out = layer(leaf)
    out.backward(torch.ones_like(out))
    return [out.detach(), leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.fixture
def ways(monkeypatch):
    """The kernels that went Triton's way since this was last cleared."""
    names: list[str] = []
    real = JITFunction.run

    def run(self, *arguments, **options):
        names.append(self.fn.__name__)
        return real(self, *arguments, **options)

    for kind in {JITFunction, *JITFunction.__subclasses__()}:
        if "run" in vars(kind):
            monkeypatch.setattr(kind, "run", run)
    return names


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_second_step_does_not_go_tritons_way(ways, name, precision, monkeypatch):
    monkeypatch.setattr(launcher, "_kernels", {})
    torch.manual_seed(0)
    layer = mok.MoE(mok.MoEConfig(**CONFIGS[name]), precision=precision, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(640, layer.config.hidden_size, device="cuda").bfloat16()
    first = step(layer, x)
    assert {"count_kernel", "combine_kernel", "dense_kernel"} < set(ways)
    ways.clear()
    second = step(layer, x.clone())
    assert ways == [] and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    step(layer, x[:333])
    assert len(set(ways)) < 6, "few kernels ask more about the number of tokens"
    ways.clear()
    again = step(layer, x)
    assert ways == [] and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_addresses_that_are_no_multiples_of_16_have_kernels_of_their_own(ways):
    """The same values at every offset, right after a launch at an aligned one."""
    g = torch.Generator("cuda").manual_seed(0)
    y, memory = torch.randn(64 * 2, 256, generator=g, device="cuda").bfloat16(), torch.randint(4, (64 * 2 + 8,), generator=g, device="cuda")
    weights = torch.rand(64 * 2 + 8, generator=g, device="cuda")
    for offset in (0, 1, 2, 3, 0):
        ids, w = memory[offset:][: 64 * 2].view(64, 2), weights[offset:][: 64 * 2].view(64, 2)
        want = (y.view(64, 2, 256).float() * w[:, :, None]).sum(1).bfloat16()
        assert torch.equal(combine(y, ids, w, 4), want)
    a, b = torch.randn(33, 65, generator=g, device="cuda"), torch.randn(65, 40, generator=g, device="cuda")
    for x in (a[:, :64], a[:, 1:], a[1:, :64], a[:, :64]):
        assert (dense.product(x, b[:64]).double() - x.double() @ b[:64].double()).abs().max() < 1e-4


def test_the_device_is_part_of_a_kind(ways):
    if torch.cuda.device_count() < 2:
        pytest.skip("between two GPUs")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        with torch.cuda.device(device):
            a = torch.eye(32, device=device)
            assert torch.equal(dense.product(a, a), a)
