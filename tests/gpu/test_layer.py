"""`mok.MoE` and `mok.moe` on a GPU against the CPU layer, forward and all gradients, in bf16; compiled, and between processes."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import torch.distributed as dist
from checks import hopper_launches, nothing_waits
from processes import run_processes

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
    "hopper": MoEConfig(  # which has kernels of its own for it
        hidden_size=384, intermediate_size=384, num_experts=8, top_k=2, num_shared_experts=1, clamp=8.0, shared_clamp=8.0
    ),
}  # fmt: skip


def launches(name: str, count: int = 1):
    """Of a forward and a backward, `count` each, in the kernels for this config."""
    return hopper_launches(count * (name == "hopper"), count * (name == "hopper"))


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
    with launches(name):
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


def test_main_grad_with_shared_experts():
    """All matrices have one, or those of the routed or of the shared experts are frozen; `.grad` holds the rest."""
    config = CONFIGS["gated shared"]
    x, d_out = (torch.randn(300, config.hidden_size).bfloat16() for _ in range(2))
    plain = run(pair(config)[1], x, d_out)
    routed, shared = ("gate_EIH", "up_EIH", "down_EHI"), ("shared.gate_SH", "shared.up_SH", "shared.down_HS")
    for frozen in ((), routed, shared):
        layer = pair(config)[1]
        parameters = dict(layer.named_parameters())
        for name in (*routed, *shared):
            parameters[name].main_grad = torch.zeros(parameters[name].shape, device="cuda")
            parameters[name].requires_grad_(name not in frozen)
        leaf = x.cuda().requires_grad_()
        layer(leaf).backward(d_out.cuda())
        assert torch.equal(leaf.grad.cpu(), plain["d_x"])
        for name, parameter in parameters.items():
            if name not in (*routed, *shared):
                assert torch.equal(parameter.grad.cpu(), plain[name]), name
                continue
            assert parameter.grad is None, name
            if name in frozen:
                assert not parameter.main_grad.any(), name
            else:
                assert torch.equal(parameter.main_grad.bfloat16().cpu(), plain[name]), name
    layer = pair(config)[1]
    for name, parameter in layer.named_parameters():
        if name in routed:
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    with pytest.raises(ValueError, match="the routed and the shared experts must all have one or none"):
        layer(x.cuda())
    layer.shared.gate_SH.main_grad = torch.zeros(3, device="cuda")
    with pytest.raises(ValueError, match=r"shared\.gate_SH\.main_grad is torch\.float32 \(3,\)"):
        layer(x.cuda())


@pytest.mark.parametrize("name", ["deepseek-like", "gated shared"])
def test_compiled_whole(name):
    """After one eager call: one graph, and the bits of the eager layer."""
    config = CONFIGS[name]
    x, d_out = (torch.randn(2, 150, config.hidden_size).bfloat16() for _ in range(2))
    layer = pair(config)[1]
    want = run(layer, x, d_out)
    compiled = torch.compile(layer, fullgraph=True)
    for _ in range(2):
        layer.zero_grad()
        leaf = x.cuda().requires_grad_()
        out = compiled(leaf)
        loss = (out * d_out.cuda()).sum()
        (loss if layer.balance_loss is None else loss + layer.balance_loss).backward()
        got = {"out": out.detach(), "d_x": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}
        different = {key: int((got[key].cpu() != value).sum()) for key, value in want.items()}
        assert not any(different.values()), different


def test_a_gradient_that_never_comes():
    """The output of a function whose backward says nothing: zeros, as every rank must come to backward."""
    layer = pair(CONFIGS["plain"])[1]
    leaf = torch.randn(50, 256, device="cuda").bfloat16().requires_grad_()
    Silent.apply(layer(leaf)).sum().backward()
    assert leaf.grad is not None and not leaf.grad.any() and not layer.gate_EIH.grad.any()


class Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        return None


def global_batch(config: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return tuple(torch.randn(701, config.hidden_size, generator=g).bfloat16().cuda() for _ in range(2))


def steps_of_a_rank(group, name: str) -> dict[str, torch.Tensor]:
    """This rank's part of a global batch, twice; the experts' gradients are of the whole group's tokens."""
    config = CONFIGS[name]
    torch.manual_seed(3)
    layer = mok.MoE(config, group, dtype=torch.bfloat16, device="cuda", tuning=Tuning(minibatch=256, macrobatch=512, saved_rows=256))
    x, d_out = (t[part(group)] for t in global_batch(config))
    results = []
    for _ in range(2):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with launches(name):
            out = layer(leaf)
            out.backward(d_out)
        grads = {name: getattr(layer, name).grad for name in ("gate_EIH", "up_EIH", "down_EHI")}
        local = {name: grad if group is None else grad.to_local() for name, grad in grads.items()}
        results.append({"out": out.detach(), "d_x": leaf.grad, **local, "router": layer.router.weight.grad})
    assert all(torch.equal(value, results[1][key]) for key, value in results[0].items())
    return {"counts": layer.tokens_per_expert.cpu(), **{key: value.cpu() for key, value in results[0].items()}}


def part(group) -> slice:
    if group is None:
        return slice(None)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return slice(701 * rank // ranks, 701 * (rank + 1) // ranks)


@pytest.mark.parametrize("name, ranks", [("deepseek-like", 2), ("gated shared", 3), ("hopper", 2)])
def test_processes_over_symmetric_memory(name, ranks):
    """The bits of one rank alone; the router's gradient is each rank's share of the sum."""
    parts = run_processes(steps_of_a_rank, ranks, name)
    alone = steps_of_a_rank(None, name)
    for key in ("out", "d_x", "gate_EIH", "up_EIH", "down_EHI"):
        assert torch.equal(torch.cat([p[key] for p in parts]), alone[key]), key
    router = sum(p["router"].double() for p in parts)
    assert (router - alone["router"].double()).norm() < 2**-7 * alone["router"].double().norm()
    assert all(torch.equal(p["counts"], alone["counts"]) for p in parts)


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


def step_that_waits_for_nothing(group, name: str) -> torch.Tensor:
    """The third step of this rank; its gradient of x."""
    config = CONFIGS[name]
    layer = mok.MoE(config, group, dtype=torch.bfloat16, device="cuda", tuning=Tuning(minibatch=256, macrobatch=512, saved_rows=256))
    x = torch.randn(400, config.hidden_size, device="cuda").bfloat16().requires_grad_()
    for _ in range(2):
        layer(x).sum().backward()
    torch.cuda.synchronize()
    with launches(name), nothing_waits():
        layer(x).sum().backward()
    return x.grad.cpu()


@pytest.mark.parametrize("name", ["deepseek-like", "hopper"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_waits_for_the_device(name, ranks):
    parts = [step_that_waits_for_nothing(None, name)] if ranks == 1 else run_processes(step_that_waits_for_nothing, ranks, name)
    assert all(part.isfinite().all() for part in parts)
