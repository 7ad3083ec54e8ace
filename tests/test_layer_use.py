"""The layer in the hands of a training loop: copies, meta devices, FSDP, checkpointing, odd calls on one rank."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from layers import Batch, assert_equal, step, whole
from ranks import KINDS, run_processes, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import mok
from mok import MoEConfig, Tuning
from mok.fabric import host_fabric

CONFIG = MoEConfig(
    hidden_size=32, intermediate_size=16, num_experts=6, top_k=2, num_shared_experts=1, score="sigmoid", selection_bias=True,
    balance_loss_weight=1.0,
)  # fmt: skip
QUICK = Tuning(timeout_s=20)


def test_balance_loss_is_never_a_constant_in_disguise():
    layer, x = mok.MoE(CONFIG), torch.randn(2, 30, 32, requires_grad=True)
    layer(x)
    layer.balance_loss.backward()
    want, layer.router.weight.grad = layer.router.weight.grad, None
    checkpoint(layer, x, use_reentrant=True)
    assert layer.balance_loss is None  # no gradient could flow; None says so
    out, loss = checkpoint(lambda x: (layer(x), layer.balance_loss), x, use_reentrant=False)
    (0 * out.sum() + loss).backward()
    assert layer.balance_loss is loss  # the recompute left it alone
    assert torch.equal(layer.router.weight.grad, want)


def test_copies():
    layer = mok.MoE(CONFIG)
    x = torch.randn(9, 32)
    layer(x)
    twin = copy.deepcopy(layer)
    assert twin.balance_loss is None and torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.gate_EIH.add_(1)
    assert not torch.equal(twin(x), layer(x))
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)


def copies_in_a_group(group):
    torch.manual_seed(0)
    layer = mok.MoE(CONFIG, group, tuning=QUICK)
    x = torch.randn(9, 32)
    return torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_copies_in_a_group():
    assert run_processes(copies_in_a_group, 2) == [True, True]


def test_meta_device_and_first_weights():
    torch.manual_seed(5)
    direct = mok.MoE(CONFIG)
    with torch.device("meta"):
        layer = mok.MoE(CONFIG)
    layer = layer.to_empty(device="cpu")
    layer.tokens_per_expert.fill_(99)
    torch.manual_seed(5)
    layer.reset_parameters()
    assert layer.tokens_per_expert.tolist() == [0] * 6
    assert_equal(layer.state_dict(), direct.state_dict())
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(5)
        assert_equal(mok.MoE(CONFIG, dtype=torch.float32).state_dict(), direct.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)


def sharded_step(group):
    """Experts over 'ep', everything over 'dp' by FSDP2: two layers' worth of ranks, gradients against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(3)
    layer = mok.MoE(CONFIG, mesh["ep"], tuning=QUICK)
    fully_shard(layer, mesh=mesh["dp"])
    x = torch.randn(80, 32, generator=torch.Generator().manual_seed(1)).chunk(4)[torch.distributed.get_rank()]
    layer(x).square().sum().backward()
    gradients = {name: getattr(layer, name).grad.full_tensor() for name in ("gate_EIH", "up_EIH", "down_EHI")}
    experts = [layer.gate_EIH, layer.up_EIH, layer.down_EHI]
    kinds = experts, [p for p in layer.parameters() if all(p is not expert for expert in experts)]
    for parameter in kinds[1]:  # FSDP reduces over its own mesh alone
        torch.distributed.all_reduce(parameter.grad.to_local(), group=mesh["ep"].get_group())
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]).full_tensor() for kind in kinds]
    whole = torch.cat([p.grad.full_tensor().flatten() for p in layer.parameters()]).norm()
    assert torch.allclose(torch.stack(norms).norm(), whole)
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, 1.0, whole)
    clipped = torch.cat([p.grad.full_tensor().flatten() for p in layer.parameters()]).norm()
    assert torch.allclose(clipped, torch.ones(()), rtol=1e-4)
    torch.optim.AdamW(layer.parameters(), foreach=True).step()
    return gradients


def test_expert_parallel_beside_fsdp():
    torch.manual_seed(3)
    layer = mok.MoE(CONFIG)
    layer(torch.randn(80, 32, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    for result in run_processes(sharded_step, 4):
        assert set(result) == {"gate_EIH", "up_EIH", "down_EHI"}
        for name, gradient in result.items():
            want = getattr(layer, name).grad / 2  # FSDP averages over its two ranks
            assert torch.allclose(gradient, want, rtol=1e-4, atol=1e-5 * want.abs().max())


def one_odd_call(group, case, batch):
    fabric = host_fabric(group)
    layer = mok.MoE(CONFIG, group, tuning=QUICK)
    b = batch.local(fabric.rank, fabric.size)
    x, ids, weights, experts = b.x, b.ids, b.weights, (b.gate, b.up, b.down)
    odd = fabric.rank == 1
    try:
        if case == "not a tensor":
            layer(None if odd else x[:, :32])
        elif case == "no choices":
            mok.moe(x, ids[:, :0] if odd else ids, weights[:, :0] if odd else weights, *experts, num_experts=8, group=group, tuning=QUICK)
        elif case == "num_experts":
            mok.moe(x, ids, weights, *experts, num_experts=None if odd else 8, group=group, tuning=QUICK)
        elif case == "leading shape":
            mok.moe(x, ids.view(2, -1, 2) if odd else ids, weights, *experts, num_experts=8, group=group, tuning=QUICK)
        elif case == "no weights":
            layer.routed(x[:, :32], ids % 6, None if odd else weights)
        elif case == "shared on another device":
            shared = torch.zeros(x.shape, device="meta" if odd else "cpu")
            mok.moe(x, ids, weights, *experts, shared=shared, num_experts=8, group=group, tuning=QUICK)
        elif case == "integers":
            layer(torch.ones(3, 32, dtype=torch.int64) if odd else x[:, :32])
        elif case == "main_grad":
            if odd:
                layer.up_EIH.main_grad = [0.0]
            layer(x[:, :32])
        raise AssertionError("accepted")
    except (ValueError, TypeError) as error:
        first = (type(error).__name__, str(error))
    return first, step(group, batch)


CASES = ["not a tensor", "no choices", "num_experts", "leading shape", "no weights", "shared on another device", "integers", "main_grad"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_one_rank_is_given_all_hear_of_it(kind, case):
    batch = Batch.random()
    results = run_ranks(kind, one_odd_call, 2, case, batch)
    assert results[0][0] == results[1][0] and "rank 1: " in results[0][0][1]
    assert_equal(whole([again for _, again in results]), step(None, batch))


def mixed_up_backward(group):
    torch.manual_seed(0)
    first, second = mok.MoE(CONFIG, group, tuning=QUICK), mok.MoE(CONFIG, group, tuning=QUICK)
    x = torch.randn(5, 32)
    outs = [first(x), second(x)]
    if host_fabric(group).rank == 1:
        outs.reverse()
    try:
        outs[0].sum().backward()
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("kind", KINDS)
def test_backwards_of_different_forwards_do_not_mix(kind):
    errors = set(run_ranks(kind, mixed_up_backward, 2))
    assert len(errors) == 1 and "must be equal on all ranks" in errors.pop()


def other_numbers(group):
    clamp = np.float32(3) if host_fabric(group).rank == 0 else 3.0
    config = MoEConfig(hidden_size=np.int64(16), intermediate_size=8, num_experts=np.int32(4), top_k=2, clamp=clamp)
    torch.manual_seed(0)
    return mok.MoE(config, group, tuning=QUICK)(torch.randn(4, 16)).detach()


@pytest.mark.parametrize("kind", KINDS)
def test_numpys_numbers(kind):
    for out in run_ranks(kind, other_numbers, 2):
        assert out.isfinite().all()
    assert type(MoEConfig(hidden_size=np.int64(16), intermediate_size=8, num_experts=4, top_k=2).hidden_size) is int


def test_memory_follows_the_rows_not_the_knobs():
    batch = Batch.random(tokens=10)
    assert_equal(step(None, batch, Tuning(minibatch=128 * 2**30, macrobatch=128 * 2**30)), step(None, batch))


def test_one_dimension_less_and_bad_arguments():
    batch = Batch.random(tokens=1, masked=False)
    out = mok.moe(batch.x[0], batch.ids[0], batch.weights[0], batch.gate, batch.up, batch.down)
    assert torch.equal(out, mok.moe(batch.x, batch.ids, batch.weights, batch.gate, batch.up, batch.down)[0])
    with pytest.raises(TypeError, match="config='deepseek-v3': must be a MoEConfig"):
        mok.MoE("deepseek-v3")
    with pytest.raises(TypeError, match="tuning=4096: must be a Tuning"):
        mok.MoE(CONFIG, tuning=4096)
    with pytest.raises(TypeError, match="group='world'"):
        mok.MoE(CONFIG, "world")
    with pytest.raises(ValueError, match="rate=nan: must be finite"):
        mok.MoE(CONFIG).update_bias(float("nan"))


@pytest.mark.parametrize("name", ["x", "ids", "weights", "gate_EIH", "up_EIH", "down_EHI", "shared"])
def test_what_is_no_tensor_is_named(name):
    x, ids, gate = torch.zeros(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(2, 4, 8)
    given = dict(x=x, ids=ids, weights=torch.ones(3, 1), gate_EIH=gate, up_EIH=gate, down_EHI=gate.mT, shared=x)
    assert mok.moe(**given).shape == x.shape
    with pytest.raises(TypeError, match=f"{name}: must be a tensor, not list"):
        mok.moe(**{**given, name: [1.0]})
    with pytest.raises(TypeError, match=r"tuning=\{\}: must be a Tuning"):
        mok.moe(**given, tuning={})


def test_a_compiled_bf16_layer_has_eagers_input_gradient():
    torch._dynamo.reset()
    layer = mok.MoE(CONFIG, dtype=torch.bfloat16)
    x, d_out = (torch.randn(40, 32).bfloat16() for _ in range(2))
    grads = []
    for function in (layer, torch.compile(layer, fullgraph=True, dynamic=True)):
        leaf = x.clone().requires_grad_()
        function(leaf).backward(d_out)
        grads.append(leaf.grad)
    torch._dynamo.reset()
    assert torch.equal(*grads)


NO_NUMBERS = [
    (dict(num_experts=2.7), TypeError, "num_experts=2.7: must be an int, not float"),
    (dict(num_experts="2"), TypeError, "num_experts='2': must be an int, not str"),
    (dict(num_experts=True), TypeError, "num_experts=True: must be an int, not bool"),
    (dict(num_experts=0), ValueError, "num_experts=0: must be at least 1"),
    (dict(clamp="1"), TypeError, "clamp='1': must be None or a number, not str"),
    (dict(clamp=True), TypeError, "clamp=True: must be None or a number, not bool"),
    (dict(clamp=-1), ValueError, "clamp=-1.0: must be None or at least 0"),
]


@pytest.mark.parametrize("wrong, kind, message", NO_NUMBERS)
def test_what_is_no_number_is_named(wrong, kind, message):
    x, ids, gate = torch.ones(3, 8), torch.ones(3, 1, dtype=torch.int64), torch.ones(2, 4, 8)
    given = (x, ids, torch.ones(3, 1), gate, gate, gate.mT)
    with pytest.raises(kind, match=re.escape(message)):
        mok.moe(*given, **wrong)
    assert torch.equal(mok.moe(*given, num_experts=np.int32(2), clamp=np.float32(1)), mok.moe(*given, num_experts=2, clamp=1))
