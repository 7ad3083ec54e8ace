"""The module: shapes, state, counters, balance loss, sharded parameters and checkpoints across group sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layers import assert_equal
from ranks import KINDS, run_processes, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import mok
from mok import MoEConfig, Tuning
from mok.fabric import host_fabric
from mok.router import balance_loss

CONFIG = MoEConfig(
    hidden_size=64, intermediate_size=48, num_experts=7, top_k=2, num_shared_experts=1, score="sigmoid", selection_bias=True,
    shared_gate=True, balance_loss_weight=0.01,
)  # fmt: skip
QUICK = Tuning(timeout_s=30)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (2, 0, 64), (64,), (0, 64), (2, 1, 3, 64)])
def test_any_leading_shape(shape):
    layer = mok.MoE(CONFIG)
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape and all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    if x.numel():
        assert torch.equal(layer(x.detach().reshape(-1, 64)), out.detach().reshape(-1, 64))


def in_place(function, x):
    """The output and the gradient of x, where x is added to the output in place."""
    x = x.clone().requires_grad_()
    y = function(x)
    assert not y._is_view() and y.shape == x.shape and y.is_contiguous()
    y += x
    y.square().sum().backward()
    return {"out": y.detach(), "d_x": x.grad}


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 0, 64)])
def test_the_output_is_no_view_and_may_be_changed_in_place(shape, shared):
    layer = mok.MoE(MoEConfig(hidden_size=64, intermediate_size=48, num_experts=7, top_k=2, num_shared_experts=shared))

    def given(x):
        ids = torch.arange(2).expand(*x.shape[:-1], 2)
        return mok.moe(x, ids, torch.ones(ids.shape), layer.gate_EIH, layer.up_EIH, layer.down_EHI, shared=x if shared else None)

    x = torch.randn(shape)
    for function in (layer, given, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x_again = x.clone().requires_grad_()
        out = function(x_again) + x_again
        out.square().sum().backward()
        assert_equal(in_place(function, x), {"out": out.detach(), "d_x": x_again.grad})


def test_wrong_width_and_dtype_name_the_argument():
    layer = mok.MoE(CONFIG)
    with pytest.raises(ValueError, match=r"x has shape \(3, 63\).*hidden_size=64"):
        layer(torch.randn(3, 63))
    with pytest.raises(TypeError, match=r"x has dtype torch\.bfloat16"):
        layer(torch.randn(3, 64).bfloat16())
    assert layer(torch.randn(3, 64)).shape == (3, 64)


def train_then_eval(group):
    torch.manual_seed(1)
    layer = mok.MoE(CONFIG, group, tuning=QUICK)
    fabric = host_fabric(group)
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(fabric.rank))
    layer(x).sum().backward()
    ids = layer.router(x).ids_TK
    first = layer.tokens_per_expert.clone()
    layer.eval()
    layer(torch.randn(9, 64))
    layer.train()
    with torch.no_grad():
        layer(torch.randn(9, 64))
    return ids, first, layer.tokens_per_expert.clone()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_per_expert_counts_the_group_in_training_only(kind, size):
    results = run_ranks(kind, train_then_eval, size)
    count = torch.bincount(torch.cat([ids for ids, _, _ in results]).flatten(), minlength=7)
    for _, first, later in results:
        assert first.dtype == torch.int64 and torch.equal(first, count) and torch.equal(later, count)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_counts_once(reentrant):
    layer, other = mok.MoE(CONFIG), torch.randn(11, 64)
    x = torch.randn(30, 64, requires_grad=True)
    plain = layer(x)
    want = layer.tokens_per_expert.clone()
    layer(other)  # something else counted last
    out = checkpoint(layer, x, use_reentrant=reentrant)
    if not reentrant:
        assert torch.equal(layer.tokens_per_expert, want)
        layer.eval()(other)
        layer.train()
    out.sum().backward()
    assert torch.equal(layer.tokens_per_expert, want) and torch.equal(out, plain)


def test_counts_and_bias_keep_their_precision_in_bf16():
    layer = mok.MoE(MoEConfig(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1, selection_bias=True)).to(torch.bfloat16)
    assert layer.gate_EIH.dtype == torch.bfloat16 and layer.router.bias.dtype == torch.float32
    assert layer.tokens_per_expert.dtype == torch.int64
    layer.router.bias.copy_(torch.tensor([100.0, 0.0]))
    layer(torch.randn(40840, 8).bfloat16())
    assert layer.tokens_per_expert.tolist() == [40840, 0]
    layer.update_bias(0.001)
    assert layer.router.bias.tolist() == pytest.approx([99.999, 0.001])


def test_update_bias_needs_a_bias():
    with pytest.raises(ValueError, match="selection_bias"):
        mok.MoE(MoEConfig(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1)).update_bias(0.1)


def test_balance_loss_is_weighted_and_reaches_the_router():
    layer = mok.MoE(CONFIG)
    x = torch.randn(3, 20, 64)
    layer(x)
    routing = layer.router(x.flatten(0, 1))
    want = 0.01 * balance_loss(routing.scores_TE, routing.ids_TK, CONFIG, 20)
    assert torch.equal(layer.balance_loss, want)
    layer.balance_loss.backward()
    assert layer.router.weight.grad.abs().sum() > 0 and layer.gate_EIH.grad is None
    before = layer.balance_loss
    layer.eval()(x)
    assert layer.balance_loss is before


def first_weights(group):
    torch.manual_seed(11)
    return {name: full(tensor) for name, tensor in mok.MoE(CONFIG, group, tuning=QUICK).state_dict().items()}


@pytest.mark.parametrize("size", [2, 3])
def test_first_weights_do_not_depend_on_the_group(size):
    one = first_weights(None)
    for result in run_processes(first_weights, size):
        assert_equal(result, one)


def trained(group):
    torch.manual_seed(3)
    layer = mok.MoE(CONFIG, group, tuning=QUICK)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    layer(torch.randn(10, 64)).square().sum().backward()
    optimizer.step()
    return layer, optimizer


def save(group, folder):
    layer, optimizer = trained(group)
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return everything(layer, optimizer)


def load(group, folder):
    torch.manual_seed(4)
    layer = mok.MoE(CONFIG, group, tuning=QUICK)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(layer, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return everything(layer, optimizer)


def everything(layer, optimizer):
    state = {name: full(tensor).clone() for name, tensor in layer.state_dict().items()}
    moments = {f"{name}.{key}": full(optimizer.state[p][key]) for name, p in layer.named_parameters() for key in ("exp_avg", "exp_avg_sq")}
    return {**state, **moments}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save_size, load_sizes", [(2, (1, 2, 3, 4)), (3, (2,)), (0, (0, 2))])
def test_checkpoints_load_at_another_group_size(tmp_path, save_size, load_sizes):
    """0 means no group at all."""
    saved = run_processes(save, save_size, str(tmp_path))[0] if save_size else save(None, str(tmp_path))
    assert "gate_EIH" in saved and saved["gate_EIH"].shape == (7, 48, 64) and "router.bias" in saved
    for size in load_sizes:
        results = run_processes(load, size, str(tmp_path)) if size else [load(None, str(tmp_path))]
        for result in results:
            assert_equal(result, saved)


def test_several_layers_and_double_use_before_backward():
    first, second = mok.MoE(CONFIG, dtype=torch.float64), mok.MoE(CONFIG, dtype=torch.float64)
    assert first.fabric is second.fabric
    x = torch.randn(20, 64, dtype=torch.float64)

    def gradients(*terms):
        leaf = x.clone().requires_grad_()
        losses = [term(leaf).square().sum() for term in terms]  # every forward comes before the first backward
        return torch.autograd.grad(sum(losses), [leaf, *first.parameters()])

    def once(leaf):
        return first(leaf * 2)

    def twice(leaf):
        return second(first(leaf))

    together = gradients(once, twice)
    for joint, a, b in zip(together, gradients(once), gradients(twice), strict=True):
        assert torch.allclose(joint, a + b, rtol=1e-12, atol=1e-12)


def test_repr_and_parameter_names():
    layer = mok.MoE(CONFIG)
    assert "E=7" in repr(layer)
    assert isinstance(layer, nn.Module)
    assert {name for name, _ in layer.named_parameters()} == {
        "gate_EIH", "up_EIH", "down_EHI", "router.weight", "shared.gate_SH", "shared.up_SH", "shared.down_HS", "shared.output_gate_H"
    }  # fmt: skip


def test_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, mok\n"
        "layer = mok.MoE(mok.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2))\n"
        "layer(torch.randn(3, 8)).sum().backward()\n"
        "assert layer.gate_EIH.grad.isfinite().all() and not any(name.startswith('mok.kernels') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
