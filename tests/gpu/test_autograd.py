"""Layers on a GPU as autograd may use them: several times before a backward, several on one workspace, with what they save elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

sys.path.insert(0, os.path.dirname(__file__))

import torch.distributed as dist
import virtual
from processes import run_processes
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from virtual import DEVICE

import mok
from mok import MoEConfig, Tuning
from mok.kernels import autograd
from mok.kernels.launch import Workspace

CONFIG = MoEConfig(
    hidden_size=1024, intermediate_size=768, num_experts=12, top_k=4, num_shared_experts=1, shared_intermediate_size=512
)  # fmt: skip
SAVED_ROWS = 896
TUNING = Tuning(minibatch=512, macrobatch=1024, saved_rows=SAVED_ROWS, timeout_s=250, max_tokens=700)
"""Rings whose places are used again, and gate and up that are in part computed again."""
EXPERTS = ("gate_EIH", "up_EIH", "down_EHI")


def layer_of(seed: int, group: dist.ProcessGroup | None = None) -> mok.MoE:
    torch.manual_seed(seed)
    return mok.MoE(CONFIG, group, tuning=TUNING, dtype=torch.bfloat16, device=DEVICE)


def x_of(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def poison() -> None:
    """NaN in free memory and in that of all layers, which no layer may rely on between two of its calls."""
    virtual.poison()
    for workspace in autograd._workspaces.values():
        virtual.poison_workspace(workspace)


def own_workspaces() -> list[Workspace]:
    """Those of layers of CONFIG on one rank."""
    shape = ("", CONFIG.hidden_size, CONFIG.top_k, CONFIG.num_experts)
    return [workspace for key, workspace in autograd._workspaces.items() if (key[0], *key[2:5]) == shape]


def gradients_of(layer: mok.MoE) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {name: grad.to_local() if hasattr(grad, "to_local") else grad for name, grad in grads.items()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], what: object) -> None:
    assert got.keys() == want.keys(), what
    for name, value in want.items():
        assert torch.equal(got[name], value), (what, name)


# ---- several uses before a backward ----


def uses(group: dist.ProcessGroup | None, x: Tensor, *names: str) -> dict[str, Tensor]:
    """Outputs and all gradients of these uses of two layers; every forward comes before the first backward."""
    first, second = layer_of(0, group), layer_of(1, group)
    leaf = x.clone().requires_grad_()
    ways = {"once": lambda: first(leaf * 2), "twice": lambda: second(first(leaf))}
    poison()
    outs = {f"out {name}": ways[name]() for name in names}
    poison()
    sum((out * out.detach()).sum() for out in outs.values()).backward()
    grads = {f"{of} {name}": grad for of, layer in (("first", first), ("second", second)) for name, grad in gradients_of(layer).items()}
    return {**{name: out.detach() for name, out in outs.items()}, "d_x": leaf.grad, **grads}


def several_uses(group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Of this rank's part of a batch: the bits of each use by itself on layers of its own, and sums of two gradients."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    x = x_of(600).tensor_split(ranks)[rank].contiguous()
    together = uses(group, x, "once", "twice")
    alone = [uses(group, x, name) for name in ("once", "twice")]
    assert together.keys() == alone[0].keys() | alone[1].keys()
    both = alone[0].keys() & alone[1].keys()
    assert both == {"d_x", *(name for name in together if name.startswith("first"))} and len(both) == 8, both
    for name, value in together.items():
        one, *other = (found[name] for found in alone if name in found)
        assert one.any(), name
        assert torch.equal(value, one + other[0] if other else one), name
    return {name: value.cpu() for name, value in together.items()}


def test_a_layer_used_several_times_before_backward():
    several_uses(None)


def test_a_layer_used_several_times_before_backward_between_processes():
    parts, alone = run_processes(several_uses, 2), several_uses(None)
    for name in ("out once", "out twice", "d_x", *(f"{of} {name}" for of in ("first", "second") for name in EXPERTS)):
        assert torch.equal(torch.cat([part[name] for part in parts]), alone[name]), name


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_three_layers_on_one_workspace(order):
    """Forwards of all, then backwards in any order: what one leaves in the shared memory is nothing to another one."""
    layers, xs = [layer_of(seed) for seed in range(3)], [x_of(tokens, seed=tokens) for tokens in (500, 300, 600)]

    def backward(i: int, out: Tensor, leaf: Tensor) -> dict[str, Tensor]:
        poison()
        (out * out.detach()).sum().backward()
        return {"out": out.detach(), "d_x": leaf.grad, **gradients_of(layers[i])}

    want = []
    for i, x in enumerate(xs):
        leaf = x.clone().requires_grad_()
        want.append({name: value.clone() for name, value in backward(i, layers[i](leaf), leaf).items()})
        layers[i].zero_grad()
    assert len(own_workspaces()) == 1
    leaves = [x.clone().requires_grad_() for x in xs]
    outs = []
    for layer, leaf in zip(layers, leaves, strict=True):
        poison()
        outs.append(layer(leaf))
    for i in order:
        assert_equal(backward(i, outs[i], leaves[i]), want[i], i)


# ---- what is saved ----


def step(layer: mok.MoE, x: Tensor, context: contextlib.AbstractContextManager[object]) -> dict[str, Tensor]:
    """A forward within the context, and its backward after that."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with context:
        out = layer(leaf)
    poison()
    (out * out.detach()).sum().backward()
    return {"out": out.detach(), "d_x": leaf.grad, **{name: grad.clone() for name, grad in gradients_of(layer).items()}}


def test_what_is_saved_passes_through_hooks():
    """Gate and up among it, routed and shared; none of it lies in the workspace. The backward reads what the hooks give back."""
    layer, x, shared_width = layer_of(0), x_of(500), CONFIG.shared_width
    want = step(layer, x, contextlib.nullcontext())
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> tuple[int, Tensor]:
        packed.append(tensor.detach())
        return len(packed) - 1, tensor.to("cpu", copy=True)

    def unpack(kept: tuple[int, Tensor]) -> Tensor:
        unpacked.append(kept[0])
        return kept[1].to(DEVICE)

    got = step(layer, x, saved_tensors_hooks(pack, unpack))
    assert_equal(got, want, "hooks")
    shapes = [tuple(tensor.shape) for tensor in packed]
    for shape in ((SAVED_ROWS, CONFIG.intermediate_size), (len(x), shared_width)):
        places = [i for i, found in enumerate(shapes) if found == shape]
        assert len(places) == 2 and all(place in unpacked for place in places), (shape, shapes, unpacked)
    (workspace,) = own_workspaces()
    theirs = {buffer.untyped_storage().data_ptr() for buffer in (workspace.memory.buffer, *workspace.scratch.values())}
    assert not theirs & {tensor.untyped_storage().data_ptr() for tensor in packed if tensor.numel()}


@pytest.mark.parametrize("pinned", [False, True])
def test_what_is_saved_may_lie_on_the_cpu(pinned):
    layer, x = layer_of(0), x_of(500)
    want = step(layer, x, contextlib.nullcontext())
    assert_equal(step(layer, x, save_on_cpu(pin_memory=pinned)), want, pinned)


def test_other_numbers_from_the_hooks_give_other_gradients():
    """Gate and up as they come back are what the backward reads."""
    layer, x = layer_of(0), x_of(500)
    want = step(layer, x, contextlib.nullcontext())
    shape = (SAVED_ROWS, CONFIG.intermediate_size)
    got = step(layer, x, saved_tensors_hooks(lambda t: t, lambda t: 2 * t if tuple(t.shape) == shape else t))
    assert torch.equal(got["out"], want["out"]) and not torch.equal(got["gate_EIH"], want["gate_EIH"])
