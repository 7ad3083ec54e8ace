"""The layer in the hands of a training loop: copies, meta devices, FSDP, checkpointing, odd calls on one rank."""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
import warnings

import numpy as np
import pytest
import torch
from layers import Batch, assert_equal, step, whole
from ranks import KINDS, run_processes, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import mok
from mok import MoEConfig, Tuning, functional
from mok.fabric import host_fabric, run_virtual, virtual_ranks

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


def test_balance_loss_of_reentrant_checkpointing():
    """Returned from the checkpointed function it has the gradients of a plain step, in any company."""
    layer, x, other = mok.MoE(CONFIG), torch.randn(2, 30, 32, requires_grad=True), torch.randn(2, 20, 32, requires_grad=True)

    def both(x):
        return layer(x), layer.balance_loss

    def gradients(*calls):
        for tensor in (x, other, *layer.parameters()):
            tensor.grad = None
        terms = [(5 * out.square().sum() + scale * loss) for scale, (out, loss) in enumerate((call() for call in calls), 1)]
        sum(terms).backward()
        return {name: tensor.grad for name, tensor in [("x", x), ("other", other), *layer.named_parameters()] if tensor.grad is not None}

    def reentrant(x):
        return lambda: checkpoint(both, x, use_reentrant=True)

    def recomputed(x):
        return lambda: checkpoint(both, x, use_reentrant=False)

    want = gradients(lambda: both(x))
    assert_equal(gradients(recomputed(x)), want)  # before any forward under no_grad
    assert_equal(gradients(reentrant(x)), want)
    assert_equal(gradients(recomputed(x)), want)  # and after
    _, loss = reentrant(x)()
    assert layer.balance_loss is loss and loss.requires_grad
    want = gradients(lambda: both(x), lambda: both(other))
    for first, second in ((reentrant, recomputed), (recomputed, reentrant), (reentrant, reentrant)):
        assert_equal(gradients(first(x), second(other)), want)
    assert_equal(gradients(reentrant(x), lambda: both(other)), want)
    assert_equal(gradients(lambda: both(x), reentrant(other)), want)
    with torch.no_grad():
        layer(x)
        assert torch.equal(layer.balance_loss, loss)
    assert layer.balance_loss is None


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


def test_a_meta_layer_takes_weights_and_counts():
    direct, layer, x = mok.MoE(CONFIG), mok.MoE(CONFIG, device="meta"), torch.randn(9, 32)
    layer.load_state_dict(direct.state_dict(), assign=True)
    assert torch.equal(layer(x), direct(x)) and torch.equal(layer.tokens_per_expert, direct.tokens_per_expert)
    layer.update_bias(1e-3)
    direct.update_bias(1e-3)
    assert_equal(layer.state_dict(), direct.state_dict())


def test_meta_devices_are_named():
    layer, x, ids = mok.MoE(CONFIG, device="meta"), torch.randn(9, 32), torch.zeros(9, 2, dtype=torch.int64)
    message = re.escape("the layer is on meta: load its weights first (to_empty, load_state_dict(assign=True))")
    for call in (lambda: layer(x), lambda: layer(x.to("meta")), lambda: layer.routed(x, ids, ids.float())):
        with pytest.raises(ValueError, match=message):
            call()
    experts = [p.detach() for p in (layer.gate_EIH, layer.up_EIH, layer.down_EHI)]
    with pytest.raises(ValueError, match="x is on meta: must be on the CPU or a GPU"):
        mok.moe(x.to("meta"), ids.to("meta"), ids.float().to("meta"), *experts)
    with pytest.raises(ValueError, match="gate_EIH is on meta: must be on the device of x, cpu"):
        mok.moe(x, ids, ids.float(), *experts)


def meta_layers(group):
    """What ranks hear whose layers are all on meta, then all but one."""
    layer, heard = mok.MoE(CONFIG, group, tuning=QUICK, device="meta"), []
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            layer(torch.randn(3, 32))
        heard.append(str(error.value))
        if host_fabric(group).rank > 0:
            layer.to_empty(device="cpu").reset_parameters()
    return heard


@pytest.mark.parametrize("kind", KINDS)
def test_meta_layers_of_a_group_are_the_same_error_everywhere(kind):
    heard = run_ranks(kind, meta_layers, 2)
    assert heard[0] == heard[1] and all("rank 0: the layer is on meta" in message for message in heard[0])


def weights_in_a_group(group):
    """Warnings of two layers built with other seeds, then what a meta layer makes of a state dict, assigned and copied."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(torch.distributed.get_rank())
        mok.MoE(CONFIG, group, tuning=QUICK)
        mok.MoE(CONFIG, group, tuning=QUICK)
        torch.manual_seed(0)
        same = torch.distributed.new_group()
        torch.manual_seed(0)
        layer = mok.MoE(CONFIG, same, tuning=QUICK)
    x, alike = torch.randn(9, 32), []
    for assign in (True, False):
        other = mok.MoE(CONFIG, same, tuning=QUICK, device="meta")
        other = other if assign else other.to_empty(device="cpu")
        other.load_state_dict(layer.state_dict(), assign=assign)
        alike.append(torch.equal(other(x), layer(x)) and torch.equal(other.tokens_per_expert, layer.tokens_per_expert))
    return [str(warning.message) for warning in seen if "mok.MoE" in str(warning.message)], alike


def test_processes_with_other_seeds_are_warned_once_and_meta_layers_take_weights():
    for messages, alike in run_processes(weights_in_a_group, 2):
        assert len(messages) == 1 and "torch's generator stands elsewhere on ranks 1 of the group than on rank 0" in messages[0]
        assert alike == [True, True]


def weights_of(layers):
    return [{name: p.detach().clone() for name, p in layer.named_parameters()} for layer in layers]


def test_virtual_ranks_that_seed_in_their_threads_have_the_weights_of_one_rank():
    small = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=5, top_k=2, num_shared_experts=1)

    def build(group):
        torch.manual_seed(7)
        first = [mok.MoE(small, group, tuning=QUICK) for _ in range(3)]
        first[0](torch.randn(2, 16))  # all ranks are here
        torch.manual_seed(8)
        return weights_of([*first, mok.MoE(small, group, tuning=QUICK)])

    want = build(None)
    assert not torch.equal(want[0]["router.weight"], want[1]["router.weight"])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            parts = run_virtual(build, virtual_ranks(3))
            for layers in zip(want, *parts, strict=True):
                for name, weight in layers[0].items():
                    shares = [layer[name] for layer in layers[1:]]
                    for share in [torch.cat(shares)] if name.endswith(("EIH", "EHI")) else shares:
                        assert torch.equal(share, weight), name
    finally:
        sys.setswitchinterval(interval)


def test_virtual_ranks_built_one_after_the_other_and_seeded_again():
    ranks = virtual_ranks(2)
    torch.manual_seed(3)
    alone = weights_of([mok.MoE(CONFIG)])[0]
    torch.manual_seed(3)
    first = weights_of([mok.MoE(CONFIG, rank) for rank in ranks])  # seeded once for both
    again = []
    for rank in ranks:
        torch.manual_seed(3)
        again += weights_of([mok.MoE(CONFIG, rank)])
    further = weights_of([mok.MoE(CONFIG, rank) for rank in ranks])  # not seeded
    for name in ("router.weight", "shared.gate_SH"):
        for layer in (*first, *again):
            assert torch.equal(layer[name], alone[name])
        assert torch.equal(further[0][name], further[1][name]) and not torch.equal(further[0][name], alone[name])


def sharded_step(group):
    """Experts over 'ep', everything over 'dp' by FSDP2: two layers' worth of ranks, gradients against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(3)
    layer = mok.MoE(CONFIG, mesh["ep"], tuning=QUICK)
    fully_shard(layer, mesh=mesh["dp"])
    x = torch.randn(80, 32, generator=torch.Generator().manual_seed(1)).chunk(4)[torch.distributed.get_rank()]
    out = layer(x[None])
    out += 0.0  # FSDP hangs its backward on the output, which for this must be no view
    out.square().sum().backward()
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
        elif case == "x on meta":
            layer(x[:, :32].to("meta" if odd else "cpu"))
        elif case == "x on meta, given choices":
            mok.moe(x.to("meta" if odd else "cpu"), ids, weights, *experts, num_experts=8, group=group, tuning=QUICK)
        elif case == "x on meta, routed":
            layer.routed(x[:, :32].to("meta" if odd else "cpu"), ids % 6, weights)
        elif case == "layer on meta":
            (layer.to("meta") if odd else layer)(x[:, :32])
        elif case == "layer on meta, routed":
            (layer.to("meta") if odd else layer).routed(x[:, :32], ids % 6, weights)
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


CASES = {
    "not a tensor": "x=None: must be a tensor",
    "no choices": "ids has shape",
    "num_experts": "num_experts=None: must be given",
    "leading shape": "ids has shape",
    "no weights": "weights_TK: must be a tensor",
    "shared on another device": "shared is on meta: must be on the device of x, cpu",
    "x on meta": "x is on meta: must be on the device of the parameters, cpu",
    "x on meta, given choices": "x is on meta: must be on the CPU or a GPU",
    "x on meta, routed": "x is on meta: must be on the CPU or a GPU",
    "layer on meta": "the layer is on meta: load its weights first",
    "layer on meta, routed": "the layer is on meta: load its weights first",
    "integers": "x has dtype torch.int64",
    "main_grad": "up_EIH.main_grad is a list",
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_one_rank_is_given_all_hear_of_it(kind, case):
    batch = Batch.random()
    results = run_ranks(kind, one_odd_call, 2, case, batch)
    assert results[0][0] == results[1][0] and f"rank 1: {CASES[case]}" in results[0][0][1]
    assert_equal(whole([again for _, again in results]), step(None, batch))


def mixed_up_backward(group, intermediate_size):
    torch.manual_seed(0)
    other = dataclasses.replace(CONFIG, intermediate_size=intermediate_size)
    first, second = mok.MoE(CONFIG, group, tuning=QUICK), mok.MoE(other, group, tuning=QUICK)
    x = torch.randn(5, 32)
    outs = [first(x), second(x)]
    if host_fabric(group).rank == 1:
        outs.reverse()
    try:
        outs[0].sum().backward()
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("intermediate_size", [16, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_backwards_of_different_forwards_do_not_mix(kind, intermediate_size):
    came = "rank 0 came with that of forward call 1, rank 1 with that of forward call 2"
    errors = run_ranks(kind, mixed_up_backward, 2, intermediate_size)
    assert errors == [f"all ranks must run backwards in the same order: {came}"] * 2


def group_of_others(group):
    ranks = torch.distributed.new_group([1])
    calls = {
        "layer": lambda: mok.MoE(CONFIG, ranks),
        "choices": lambda: mok.moe(torch.ones(1, 2), torch.zeros(1, 1), torch.ones(1, 1), *[torch.ones(1, 2, 2)] * 3, group=ranks),
        "functional": lambda: functional.create_workspace(
            functional.MoKConfig(), group=ranks, device="cpu", num_local_tokens=4, hidden_size=16, topk=1
        ),
    }
    if torch.distributed.get_rank() == 1:
        return {}
    return {name: raised_by(call) for name, call in calls.items()}


def raised_by(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)


def test_a_group_of_others_is_named():
    heard = run_processes(group_of_others, 2)[0]
    assert set(heard.values()) == {("ValueError", "group=-100: this process is not one of its ranks")}


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_router_in_fp32(dtype):
    """Of weights that both dtypes hold: the same bits but for the router's own gradient, which is not rounded to the layer's dtype."""
    layer = mok.MoE(CONFIG, dtype=dtype)
    with torch.no_grad():
        layer.router.weight.copy_(layer.router.weight.bfloat16().half())
    other = copy.deepcopy(layer)
    other.router.float()
    assert other.router.weight.dtype == torch.float32
    x, d_out, results = torch.randn(40, 32).to(dtype), torch.randn(40, 32).to(dtype), []
    for each in (layer, other):
        leaf = x.clone().requires_grad_()
        out = each(leaf)
        out.backward(d_out)
        results.append({"out": out.detach(), "x": leaf.grad, **{name: p.grad for name, p in each.named_parameters()}})
    narrow, wide = (result.pop("router.weight") for result in results)
    assert_equal(*results)
    assert wide.dtype == torch.float32 and torch.equal(wide.to(narrow.dtype), narrow.float().to(narrow.dtype))
    assert dtype == torch.float64 or not torch.equal(wide, narrow.float())


def test_dtypes_that_do_not_go_together():
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.int32, "float32"):
        with pytest.raises(TypeError, match=f"dtype={dtype!r}: must be one of torch.float64, torch.float32"):
            mok.MoE(CONFIG, dtype=dtype)
    layer, x = mok.MoE(CONFIG), torch.randn(4, 32)
    for bad in (x.double(), x.half(), x.int(), x.to(torch.complex64)):
        with pytest.raises(TypeError, match=rf"x has dtype {bad.dtype}: must be"):
            layer(bad)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.half()).dtype == torch.bfloat16
        with pytest.raises(TypeError, match=r"x has dtype torch.float64: must be that of the experts, torch.float32 \(fp64 goes with"):
            layer(x.double())
    for change, name in (
        (lambda layer: layer.shared.double(), "shared.gate_SH has dtype torch.float64: must be that of the experts, torch.float32"),
        (lambda layer: layer.router.double(), "router.weight has dtype torch.float64: must be one of torch.float32, torch.bfloat16"),
    ):
        layer = mok.MoE(CONFIG)
        change(layer)
        with pytest.raises(TypeError, match=name):
            layer(x)


def given_choices(x):
    gate = torch.ones(2, 4, 32)
    return mok.moe(x, torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1), gate, gate, gate.mT)


def test_double_backward_and_transforms_say_that_they_are_not_supported():
    layer, x = mok.MoE(dataclasses.replace(CONFIG, shared_gate=True)), torch.randn(6, 32, requires_grad=True)
    twice = "mok: double backward is not supported"
    for function, inputs in ((layer, [x, *layer.parameters()]), (given_choices, [x])):
        for tensor in inputs:
            (gradient,) = torch.autograd.grad(function(x).square().sum(), tensor, create_graph=True)
            with pytest.raises(RuntimeError, match=twice):
                gradient.square().sum().backward()
        out = function(x)
        with pytest.raises(RuntimeError, match="mok: is_grads_batched=True"):
            torch.autograd.grad(out, x, torch.stack([out.detach()] * 2), is_grads_batched=True)
        transforms = {
            "vmap": lambda function=function: torch.func.vmap(function)(x[None]),
            "grad": lambda function=function: torch.func.grad(lambda x: function(x).sum())(x),
            "jvp": lambda function=function: torch.func.jvp(function, (x,), (x,)),
        }
        for transform in transforms.values():
            with pytest.raises(RuntimeError, match=r"mok: torch\.func transforms .* are not supported"):
                transform()
    layer(x)
    (gradient,) = torch.autograd.grad(layer.balance_loss, layer.router.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=twice):
        gradient.sum().backward()
    layer.zero_grad()
    layer(x).sum().backward(create_graph=True)  # by itself it has the gradients of any other
    want = [p.grad.detach().clone() for p in layer.parameters()]
    layer.zero_grad()
    layer(x).sum().backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(layer.parameters(), want, strict=True))


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
    with pytest.raises(ValueError, match=re.escape("gate_EIH has shape (0, 4, 8): must hold at least 1 expert")):
        mok.moe(*given[:3], gate[:0], gate[:0], gate.mT[:0])
    with pytest.raises(ValueError, match=re.escape("gate_EIH has shape (): must be (1, 'I', 8)")):
        mok.moe(*given[:3], torch.ones(()), gate, gate.mT)
    assert torch.equal(mok.moe(*given, num_experts=np.int32(2), clamp=np.float32(1)), mok.moe(*given, num_experts=2, clamp=1))
