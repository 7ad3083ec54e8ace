"""The operators of the whole layer on the GPU, run by the interpreter (this file as a program), against the CPU layer: all gradients."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASES = {  # hidden, width, experts, K, shared width, clamp, gated, a term in place of shared experts, precision
    "gated shared, clamp": (128, 96, 5, 3, 80, 1.0, True, False, "bf16"),
    "shared": (64, 48, 3, 2, 64, None, False, False, "bf16"),
    "term": (64, 32, 4, 2, 0, None, False, True, "bf16"),
    "gated shared, clamp, fp8": (144, 96, 5, 3, 80, 1.0, True, False, "fp8"),
    "shared, fp8": (272, 144, 3, 2, 64, None, False, False, "fp8"),
    "term, fp8": (144, 48, 4, 2, 0, None, False, True, "fp8"),
    "gated shared, clamp, mxfp8": (144, 80, 3, 2, 80, 1.0, True, False, "mxfp8"),
    "term, fp8, quantized weight gradients": (144, 48, 4, 2, 0, None, False, True, "fp8"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * name.startswith(("shared, fp8", "gated shared, clamp, mx"))) for name in CASES],
)
def test_agrees_with_the_cpu_layer(name):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__, name], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
@pytest.mark.parametrize("what", ["refuse", "mxfp8", "stale"])
def test_more_of_the_formats(what):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__, what], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def refuse() -> None:
    """Quantized weight gradients of MXFP8, where there are weight gradients."""
    import torch

    import mok
    from mok.layer import Inputs, _Group, _routed_gpu
    from mok.quantize import Recipe

    bf16 = lambda *shape: torch.randn(*shape).bfloat16()  # noqa: E731
    x, ids, weights = bf16(4, 64), torch.zeros(4, 1, dtype=torch.int64), torch.rand(4, 1)
    routed = (bf16(2, 16, 64), bf16(2, 16, 64), bf16(2, 64, 16))
    rest, tuning = (None, (None, None, None), 2, None), mok.Tuning(num_sms=2, minibatch=128, macrobatch=512)
    x.requires_grad_()
    both = Recipe("mxfp8", quantized_weight_gradients=True)
    out, _ = _routed_gpu(Inputs(x, ids, weights, *routed), *rest, both, _Group.of(None), tuning)
    out.sum().backward()
    assert x.grad.isfinite().all()
    routed[1].requires_grad_()
    with pytest.raises(ValueError, match="quantized_weight_gradients=True: must be False with precision='mxfp8' on a GPU"):
        _routed_gpu(Inputs(x, ids, weights, *routed), *rest, both, _Group.of(None), tuning)


def stale() -> None:
    """After each way of changing weights, the output, and d_x once, have the bits of a call on copies of them in new memory."""
    import torch

    import mok
    from mok.layer import Inputs, _Group, _routed_gpu
    from mok.quantize import Recipe

    torch.manual_seed(0)
    bf16 = lambda *shape: torch.randn(*shape).bfloat16()  # noqa: E731
    x, ids, weights = bf16(8, 64), torch.zeros(8, 1, dtype=torch.int64), torch.rand(8, 1)
    tuning = mok.Tuning(num_sms=1, minibatch=128, macrobatch=512)
    for precision in ("fp8", "mxfp8"):
        routed = [torch.nn.Parameter(bf16(*shape)) for shape in ((1, 16, 64), (1, 16, 64), (1, 64, 16))]
        seen: list[torch.Tensor] = []

        def run(matrices, gradient, precision=precision):  # type: ignore[no-untyped-def]
            leaf = x.clone().requires_grad_(gradient)
            with torch.set_grad_enabled(gradient):
                inputs = Inputs(leaf, ids, weights, *matrices)
                out, _ = _routed_gpu(inputs, None, (None,) * 3, 1, None, Recipe(precision), _Group.of(None), tuning)
            if gradient:
                out.float().square().sum().backward()
            return out.detach(), leaf.grad

        def check(gradient: bool = False, routed=routed, run=run, seen=seen) -> None:
            copies = [matrix.detach().clone().requires_grad_() for matrix in routed]
            (out, d_x), (want, d_want) = run(routed, gradient), run(copies, gradient)
            assert torch.equal(out, want) and (d_x is None or torch.equal(d_x, d_want))
            assert not seen or not torch.equal(out, seen[-1]), "the change had no effect"
            seen.append(out)

        seen.append(run(routed, False)[0])
        for parameter in routed:
            parameter.grad = torch.randn_like(parameter)
        torch.optim.SGD(routed, lr=0.5).step()
        check()
        version = routed[2]._version
        routed[2].data.copy_(bf16(1, 64, 16))
        assert routed[2]._version == version, "nothing but the memory says so"
        check(gradient=True)
        old = routed[1].data
        routed[1].data = bf16(1, 16, 64)
        check()
        old.copy_(bf16(1, 16, 64))
        routed[1] = torch.nn.Parameter(old)  # another parameter at the first one's address
        check()


def compare_mxfp8() -> None:
    """With and without shared experts and a term, in sizes that are no multiple of a block; compiled whole it has the same bits."""
    import torch

    import mok
    from mok import executor
    from mok.kernels import autograd

    tokens, hidden, width, experts, top_k = 40, 144, 48, 4, 2
    g = torch.Generator().manual_seed(0)
    bf16 = lambda *shape: (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).bfloat16()  # noqa: E731
    x, weights, ids = 9 * bf16(tokens, hidden), torch.rand(tokens, top_k, generator=g), torch.rand(tokens, experts, generator=g).argsort(1)
    ids = ids[:, :top_k].contiguous()
    ids[3, 0] = -1
    routed = (bf16(experts, width, hidden), bf16(experts, width, hidden), bf16(experts, hidden, width))
    shared, scale, term = (bf16(32, hidden), bf16(32, hidden), bf16(hidden, 32)), torch.rand(tokens, generator=g), bf16(tokens, hidden)
    tuning = mok.Tuning(num_sms=2, minibatch=128, macrobatch=512)
    for matrices, of_shared, first in ((None, None, None), (shared, scale, None), (None, None, term)):
        arguments = (x, ids, weights, routed, matrices, of_shared, first, [], [], experts, 0.5, None, None, tuning, "mxfp8")
        out, counts = autograd.layer(*arguments)
        want = first
        if matrices:
            want = executor.row_swiglu(x, *shared, None) * scale[:, None]
        want = mok.moe(x, ids, weights, *routed, shared=want, clamp=0.5, precision="mxfp8")
        assert counts.tolist() == torch.bincount(ids[ids >= 0], minlength=experts).tolist()
        error = float((out.float() - want.float()).norm() / want.float().norm())
        assert error < 2**-8, error
        compiled = torch.compile(autograd.layer, fullgraph=True, backend="aot_eager")(*arguments)
        assert torch.equal(compiled[0], out) and torch.equal(compiled[1], counts)


def compare(name: str) -> None:
    import torch

    import mok
    from mok import executor
    from mok.kernels import autograd

    hidden, width, num_experts, top_k, shared_width, clamp, gated, with_term, precision = CASES[name]
    both = "quantized weight gradients" in name
    tokens, tuning = 70, mok.Tuning(num_sms=2, minibatch=128, macrobatch=512, saved_rows=256)
    torch.manual_seed(0)

    def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape) * scale).bfloat16()

    ids = torch.rand(tokens, num_experts).argsort(1)[:, :top_k].contiguous()
    ids[3, 0] = -1
    tensors = {
        "x": bf16(tokens, hidden), "weights": torch.randn(tokens, top_k),
        "gate": bf16(num_experts, width, hidden, scale=hidden**-0.5), "up": bf16(num_experts, width, hidden, scale=hidden**-0.5),
        "down": bf16(num_experts, hidden, width, scale=width**-0.5),
    }  # fmt: skip
    if shared_width:
        tensors["shared_gate"], tensors["shared_up"] = (bf16(shared_width, hidden, scale=hidden**-0.5) for _ in range(2))
        tensors["shared_down"] = bf16(hidden, shared_width, scale=shared_width**-0.5)
    if gated:
        tensors["scale"] = torch.rand(tokens)
    if with_term:
        tensors["term"] = torch.randn(tokens, hidden)
    d_out = bf16(tokens, hidden)
    poison = [torch.full((tokens, hidden), float("nan"), dtype=torch.bfloat16) for _ in range(20)]
    del poison

    def step(leaves, mains):
        experts = tuple(leaves[key] for key in ("gate", "up", "down"))
        shared = tuple(leaves[key] for key in ("shared_gate", "shared_up", "shared_down")) if shared_width else None
        return autograd.layer(
            leaves["x"], ids, leaves["weights"], experts, shared, leaves.get("scale"), leaves.get("term"), mains[:3], mains[3:],
            num_experts, clamp, None, None, tuning, precision, both,
        )  # fmt: skip

    if gated:
        with pytest.raises(Exception, match="call the layer once before it is compiled"):
            torch.compile(step, fullgraph=True, backend="aot_eager")(tensors, [])
        torch.compiler.reset()
    got = {key: value.clone().requires_grad_() for key, value in tensors.items()}
    out, counts = step(got, [])
    assert not out._is_view()
    out.backward(d_out)

    want = {key: value.clone().requires_grad_() for key, value in tensors.items()}
    first = want.get("term")
    if shared_width:
        first = executor.row_swiglu(want["x"], want["shared_gate"], want["shared_up"], want["shared_down"], None)
    if gated:
        first = first * want["scale"][:, None]
    weights = (want["weights"], want["gate"], want["up"], want["down"])
    expected = mok.moe(want["x"], ids, *weights, shared=first, clamp=clamp, precision=precision, quantized_weight_gradients=both)
    expected.backward(d_out)

    assert counts.tolist() == torch.bincount(ids[ids >= 0], minlength=num_experts).tolist()
    pairs = {"out": (out, expected), **{f"d_{key}": (got[key].grad, want[key].grad) for key in tensors}}
    for key, (a, b) in pairs.items():
        error = float((a.double() - b.double()).norm() / b.double().norm())
        assert a.dtype == b.dtype and error < 2**-7, f"{key}: relative error {error}"  # one rounding of bf16 more or less
    if gated:  # compiled whole, into main_grads: the same bits, and nothing in .grad of the matrices
        matrices = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")
        leaves = {key: value.clone().requires_grad_() for key, value in tensors.items()}
        mains = [torch.zeros(tensors[key].shape) for key in matrices]
        again, _ = torch.compile(step, fullgraph=True, backend="aot_eager")(leaves, mains)
        again.backward(d_out)
        assert torch.equal(again, out) and all(torch.equal(leaves[key].grad, got[key].grad) for key in ("x", "weights", "scale"))
        for key, main in zip(matrices, mains, strict=True):
            assert leaves[key].grad is None and torch.equal(main.bfloat16(), got[key].grad), key


if __name__ == "__main__":
    from interpret import patch_once

    patch_once()
    others = {"refuse": refuse, "mxfp8": compare_mxfp8, "stale": stale}
    others[sys.argv[1]]() if sys.argv[1] in others else compare(sys.argv[1])
