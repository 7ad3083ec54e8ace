"""`mok.MoE` and `mok.moe` on a GPU against the CPU layer, forward and all gradients, in bf16."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import mok
from mok import MoEConfig, Tuning

CONFIGS = {
    "plain": MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2),
    "deepseek-like": MoEConfig(
        hidden_size=256, intermediate_size=192, num_experts=16, top_k=4, num_shared_experts=1, score="sigmoid", selection_bias=True,
        scaling_factor=2.5, clamp=2.0, balance_loss_weight=0.01,
    ),
    "gated shared": MoEConfig(
        hidden_size=128, intermediate_size=96, num_experts=6, top_k=3, num_shared_experts=2, shared_intermediate_size=80, shared_gate=True
    ),
}  # fmt: skip


def pair(config: MoEConfig, tuning: Tuning | None = None) -> tuple[mok.MoE, mok.MoE]:
    torch.manual_seed(0)
    host = mok.MoE(config, dtype=torch.bfloat16)
    with torch.no_grad():
        host.router.weight.normal_()  # scores far apart, so that rounding does not choose
    device = mok.MoE(config, dtype=torch.bfloat16, device="cuda", tuning=tuning)
    device.load_state_dict(host.state_dict())
    return host, device


def run(layer: mok.MoE, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    leaf = x.detach().clone().to(layer.gate_EIH.device).requires_grad_()
    out = layer(leaf)
    loss = (out * d_out.to(out.device)).sum()
    if layer.balance_loss is not None:
        loss = loss + layer.balance_loss
    loss.backward()
    results = {"out": out.detach(), "d_x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    return {name: value.cpu() for name, value in results.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layer_agrees_with_the_cpu(name):
    config = CONFIGS[name]
    host, device = pair(config)
    x, d_out = (torch.randn(3, 200, config.hidden_size).bfloat16() for _ in range(2))
    want, got = run(host, x, d_out), run(device, x, d_out)
    for key, value in want.items():
        error = (got[key].double() - value.double()).norm() / value.double().norm()
        assert got[key].isfinite().all() and error < 2**-6, (key, float(error))
    assert torch.equal(device.tokens_per_expert.cpu(), host.tokens_per_expert)
    again = run(device, x, d_out)
    assert all(torch.equal(again[key], got[key]) for key in got)


def test_knobs_and_more_tokens_move_no_bit():
    config = CONFIGS["deepseek-like"]
    x, d_out = (torch.randn(1500, config.hidden_size).bfloat16() for _ in range(2))
    first = run(pair(config)[1], x, d_out)
    for tuning in (Tuning(minibatch=256, macrobatch=512, saved_rows=0), Tuning(minibatch=128, macrobatch=256, saved_rows=1000, num_sms=20)):
        layer = pair(config, tuning)[1]
        run(layer, x[:10], d_out[:10])  # a small workspace first
        got = run(layer, x, d_out)
        assert all(torch.equal(got[key], first[key]) for key in first)


def test_main_grad_and_frozen_parameters():
    config = CONFIGS["plain"]
    layer = pair(config)[1]
    x, d_out = (torch.randn(300, config.hidden_size).bfloat16() for _ in range(2))
    plain = run(layer, x, d_out)
    experts = ("gate_EIH", "up_EIH", "down_EHI")
    for name in experts:
        parameter = getattr(layer, name)
        parameter.main_grad = torch.full(parameter.shape, 7.0, device="cuda")
        parameter.grad = None
    layer(x.cuda()).backward(d_out.cuda())
    for name in experts:
        parameter = getattr(layer, name)
        assert parameter.grad is None
        assert ((parameter.main_grad - 7).cpu() - plain[name].float()).norm() < 0.01 * plain[name].float().norm()
        del parameter.main_grad
        parameter.requires_grad_(False)
    got = run_frozen(layer, x, d_out)
    assert torch.equal(got, plain["d_x"]) and layer.gate_EIH.grad is None


def run_frozen(layer, x, d_out):
    leaf = x.detach().cuda().requires_grad_()
    layer(leaf).backward(d_out.cuda())
    return leaf.grad.cpu()


def test_bad_input_is_named_and_the_next_call_works():
    layer = pair(CONFIGS["plain"])[1]
    with pytest.raises(ValueError, match="x has shape"):
        layer(torch.randn(3, 255, device="cuda").bfloat16())
    with pytest.raises(TypeError, match="x has dtype"):
        layer(torch.randn(3, 256, device="cuda"))
    with torch.no_grad():
        assert layer(torch.randn(3, 256, device="cuda").bfloat16()).isfinite().all()
        assert layer(torch.randn(0, 256, device="cuda").bfloat16()).shape == (0, 256)


def test_nothing_waits_for_the_device():
    layer = pair(CONFIGS["deepseek-like"])[1]
    x = torch.randn(400, 256, device="cuda").bfloat16().requires_grad_()
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()
