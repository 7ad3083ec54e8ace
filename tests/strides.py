"""Losses that send odd gradients and views with odd strides, which must change nothing: for the CPU and for a GPU."""

from __future__ import annotations

import torch
from conftest import poison
from dense import SMALL_RING
from layers import NAMES, assert_equal

import mok
from mok.fabric import host_fabric


def ramp(out):  # type: ignore[no-untyped-def]
    return torch.linspace(-1, 1, out.shape[0], dtype=out.dtype, device=out.device)


LOSSES = {
    "sum": lambda out: out.sum(),
    "mean of every other column": lambda out: out.mean(0)[::2].sum(),
    "product with the transposed output": lambda out: (out.t() @ ramp(out)[:, None].expand(-1, 3)).sum(),
    "transposed": lambda out: (out.t().contiguous() * ramp(out)).sum(),
    "expanded": lambda out: out[None].expand(3, -1, -1).sum(),
}


def columns(t):  # type: ignore[no-untyped-def]
    return torch.cat([t, torch.full_like(t, 99)], -1)[..., : t.shape[-1]]


def rows(t):  # type: ignore[no-untyped-def]
    return torch.stack([t, torch.full_like(t, 99)], 1).flatten(0, 1)[::2]


def transposed(t):  # type: ignore[no-untyped-def]
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def expanded(t):  # type: ignore[no-untyped-def]
    return t[..., :1].clone().expand(t.shape)


STRIDES = {
    "x, a part of wider rows": {"x": columns}, "x, every other row": {"x": rows},
    "x transposed": {"x": transposed}, "x expanded": {"x": expanded},
    "ids transposed": {"ids": transposed}, "ids, a part of wider rows": {"ids": columns}, "ids, every other row": {"ids": rows},
    "weights expanded": {"weights": expanded}, "weights transposed": {"weights": transposed}, "weights, wider rows": {"weights": columns},
    "experts transposed": {"gate": transposed, "up": transposed, "down": transposed},
    "experts, every other one": {"gate": rows, "up": rows, "down": rows}, "experts expanded": {"gate": expanded, "down": expanded},
    "shared transposed": {"shared": transposed}, "shared expanded": {"shared": expanded},
    "all": {"x": rows, "ids": transposed, "weights": columns, "gate": transposed, "up": columns, "down": rows, "shared": rows},
}  # fmt: skip


def strided_and_contiguous(group, batch, device="cpu"):  # type: ignore[no-untyped-def]
    """The names of the cases whose results differ from those of a run on contiguous copies."""
    fabric = host_fabric(group)
    mine = batch.local(fabric.rank, fabric.size)
    base = {name: getattr(mine, name) for name in (*NAMES, "ids")}
    base["shared"] = torch.randn(mine.x.shape, generator=torch.Generator().manual_seed(1)).to(batch.x.dtype)
    base = {name: t.to(device) for name, t in base.items()}

    def run(tensors, loss):  # type: ignore[no-untyped-def]
        leaves = {name: t if name == "ids" else t.detach().requires_grad_() for name, t in tensors.items()}
        poison(1)
        arguments = [leaves[name] for name in ("x", "ids", "weights", "gate", "up", "down")]
        out = mok.moe(*arguments, shared=leaves["shared"], num_experts=batch.experts, group=group, tuning=SMALL_RING)
        loss(out).backward()
        return {"out": out.detach(), **{name: t.grad for name, t in leaves.items() if name != "ids"}}

    wrong = []
    cases = [(f"loss: {name}", {}, loss) for name, loss in LOSSES.items()]
    cases += [(name, views, LOSSES["transposed"]) for name, views in STRIDES.items()]
    for name, views, loss in cases:
        tensors = {n: views[n](t) if n in views else t for n, t in base.items()}
        contiguous = {n: t.contiguous() for n, t in tensors.items()}
        assert all(not tensors[n].is_contiguous() for n in views), name
        if name.startswith("loss"):  # the reference run gets a dense gradient

            def loss_of_copy(out, loss=loss):  # type: ignore[no-untyped-def]
                (d_out,) = torch.autograd.grad(loss(leaf := out.detach().requires_grad_()), leaf)
                return (out * d_out.contiguous()).sum()

            want = run(contiguous, loss_of_copy)
        else:
            want = run(contiguous, loss)
        try:
            assert_equal(run(tensors, loss), want)
            assert all((t != 0).any() for t in want.values()), "all zero"
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{name}: {error}")
    return wrong
