"""The low-level API on the CPU: the bits of `mok.moe`, with weights in bf16 and quantized beforehand; what it refuses."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from layers import assert_equal
from ranks import KINDS, run_ranks
from test_functional_kernels import NAMES, Problem
from torch import Tensor

import mok
from mok import executor, functional
from mok.functional import MoKConfig
from mok.ops import mxfp8_quantize
from mok.quantize import FP8_SQUARE, Quantized, dequantize, quantize, scale_to_float

CONFIG = MoKConfig(minibatch_size=128, macrobatch_size=256, saved_rows=128)
FORMS = ["bf16", "fp8", "fp8 in fp32", "fp8 in e8m0", "mxfp8 plain", "mxfp8 tcgen05"]


def prequantized(form: str, weights, backward: bool = False) -> list:
    """gate, up and down as a forward or a backward takes them."""
    precision, _, kind = form.partition(" ")
    if precision == "bf16":
        return list(weights)
    if precision == "fp8":
        to = {"in fp32": scale_to_float, "in e8m0": lambda scale: scale.view(torch.float8_e8m0fnu)}.get(kind, lambda scale: scale)
        return [(pair.values, to(pair.scale)) for pair in (quantize(weight, FP8_SQUARE) for weight in weights)]
    four = [mxfp8_quantize(weight, scale_layout=kind) for weight in weights]
    return [*four[:2], four[2][2:]] if backward else [pair[:2] for pair in four]


def run(group, problem: Problem, form: str, config: MoKConfig = CONFIG, part: slice = slice(None), recompute: bool = False, mains=None):  # type: ignore[no-untyped-def]
    """Output and gradients of one rank's tokens and experts; main_grads are filled in place."""
    tokens, topk = problem.ids.shape
    workspace = functional.create_workspace(
        config, group, device="cpu", num_local_tokens=tokens, hidden_size=problem.x.shape[1], topk=topk
    )  # fmt: skip
    mine = mok.schedule.local_experts(problem.experts, workspace.ep_size, workspace.ep_rank)
    routed = [weight[mine.start : mine.stop] for weight in problem.routed]
    x, ids, weights, d_out = (t[part].contiguous() for t in (problem.x, problem.ids, problem.weights, problem.d_out))
    schedule = functional.build_schedule(workspace, config, ids, num_experts=problem.experts)
    head = (config, workspace, schedule)
    forms = prequantized(form, routed)
    out, context = functional.forward(*head, x, weights, *problem.shared, *forms, problem.limit)
    if recompute:
        context = functional.recompute_forward_context(*head, x, *problem.shared[:2], *forms[:2], problem.limit)
    forms = prequantized(form, routed, backward=True)
    values = functional.backward(*head, context, d_out, x, weights, *problem.shared, *forms, problem.limit, main_grads=mains)
    assert schedule.routes_per_expert.sum() <= 2 * problem.ids.numel() and schedule.peer_rank.dtype == torch.int32
    return {"out": out, **{name: value for name, value in zip(NAMES, values, strict=True) if value is not None}}


def by_moe(problem: Problem, precision: str, routed=None) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """The same by autograd; d_x without that of the shared experts."""
    leaves = [t.clone().requires_grad_() for t in (problem.x, problem.weights, *(routed or problem.routed))]
    shared = [t.clone().requires_grad_() for t in problem.shared if t is not None]
    first = executor.row_swiglu(problem.x, *shared, problem.limit) if shared else None
    out = mok.moe(leaves[0], problem.ids, *leaves[1:], shared=first, clamp=problem.limit, precision=precision)
    out.backward(problem.d_out)
    gradients = [leaf.grad for leaf in (*leaves, *shared)]
    return {"out": out.detach(), **dict(zip(NAMES, gradients, strict=False))}


@pytest.mark.parametrize("form", FORMS)
def test_the_bits_of_the_layer(form):
    precision = form.partition(" ")[0]
    for problem in (
        Problem(tokens=40, hidden=160, width=48, experts=3, shared_width=0),
        Problem(tokens=40, hidden=144, width=144, limit=0.5),
    ):
        got, want = run(None, problem, form), by_moe(problem, precision)
        if problem.shared[0] is not None:
            x = problem.x.clone().requires_grad_()
            executor.row_swiglu(x, *problem.shared, problem.limit).backward(problem.d_out.float())
            want["d_x"] = (want["d_x"].float() + x.grad.float()).bfloat16()
        assert_equal(got, want)
        assert got["d_gate"].dtype == torch.bfloat16 and got["d_weights"].dtype == torch.float32
        assert_equal(run(None, problem, form, recompute=True), got)
        other = dataclasses.replace(CONFIG, minibatch_size=256, macrobatch_size=512, saved_rows=0)
        assert_equal(run(None, problem, form, other), got)


def of_rank(group, form):  # type: ignore[no-untyped-def]
    """The first rank has 30 tokens, the second one 10."""
    problem = Problem(tokens=40, hidden=160, width=48, experts=3, limit=0.5)
    rank = group.rank if hasattr(group, "rank") and not callable(group.rank) else group.rank()
    return run(group, problem, form, part=slice(0, 30) if rank == 0 else slice(30, 40))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["fp8", "mxfp8 tcgen05"])
def test_two_ranks_have_the_bits_of_one(kind, form):
    one = run(None, Problem(tokens=40, hidden=160, width=48, experts=3, limit=0.5), form)
    two = run_ranks(kind, of_rank, 2, form)
    for name in ("out", "d_x", "d_weights", "d_gate", "d_up", "d_down"):
        assert torch.equal(torch.cat([rank[name] for rank in two]), one[name]), name


@pytest.mark.parametrize("form", ["bf16", "fp8", "mxfp8 plain"])
def test_main_grads(form):
    problem = Problem(tokens=40, hidden=160, width=48, experts=3)
    plain, mains = run(None, problem, form), [torch.ones(w.shape) for w in (*problem.routed, *problem.shared)]
    got = run(None, problem, form, mains=mains)
    assert set(got) == {"out", "d_x", "d_weights"}
    for main, name in zip(mains, NAMES[2:], strict=True):
        assert torch.allclose(main - 1, plain[name].float(), rtol=2**-7, atol=1e-6) and not torch.equal(main - 1, plain[name].float())


def test_the_numbers_of_a_pair_are_used_whatever_their_scale():
    """Scales that are larger than they need to be: others quantize so."""
    problem = Problem(tokens=40, hidden=160, width=48, experts=3, shared_width=0)
    coarse = [quantize(weight.float() / 4, FP8_SQUARE) for weight in problem.routed]
    coarse = [Quantized((pair.values.float() / 8).to(pair.values.dtype), pair.scale + 5) for pair in coarse]
    weights = [dequantize(*pair, FP8_SQUARE, torch.bfloat16) for pair in coarse]
    workspace = functional.create_workspace(CONFIG, device="cpu", num_local_tokens=40, hidden_size=160, topk=2)
    schedule = functional.build_schedule(workspace, CONFIG, problem.ids, 3)
    head = (problem.x, problem.weights, None, None, None)
    out, context = functional.forward(CONFIG, workspace, schedule, *head, *coarse)
    values = functional.backward(CONFIG, workspace, schedule, context, problem.d_out, *head, *coarse)
    got = {"out": out, **{name: value for name, value in zip(NAMES, values, strict=True) if value is not None}}
    assert_equal(got, by_moe(problem, "fp8", weights))


def test_pairs_are_read_when_a_call_runs():
    problem = Problem(tokens=40, hidden=160, width=48, experts=3, shared_width=0)
    workspace = functional.create_workspace(CONFIG, device="cpu", num_local_tokens=40, hidden_size=160, topk=2)
    schedule = functional.build_schedule(workspace, CONFIG, problem.ids, 3)
    pairs = prequantized("fp8", problem.routed)
    call = lambda: functional.forward(CONFIG, workspace, schedule, problem.x, problem.weights, None, None, None, *pairs)[0]  # noqa: E731
    first = call()
    for _, scale in pairs:
        scale += 1  # twice the weights, at the same address
    assert not torch.equal(call(), first)
    for (values, scale), weight in zip(pairs, problem.routed, strict=True):
        fresh = quantize(weight, FP8_SQUARE)
        values.data.copy_(fresh.values)
        scale.data.copy_(fresh.scale)
    assert torch.equal(call(), first)


def test_ids_out_of_range_are_refused_on_every_rank():
    workspace = functional.create_workspace(CONFIG, device="cpu", num_local_tokens=4, hidden_size=32, topk=1)
    with pytest.raises(ValueError, match="ids has values from 7 to 7"):
        functional.build_schedule(workspace, CONFIG, torch.full((4, 1), 7), 3)
    assert functional.build_schedule(workspace, CONFIG, torch.zeros(4, 1, dtype=torch.int64), 3).num_tokens.tolist() == [128]
    with pytest.raises(ValueError, match="device=meta: must be a CUDA device or the CPU"):
        functional.create_workspace(CONFIG, device="meta", num_local_tokens=4, hidden_size=32, topk=1)


def one_odd_rank(group):  # type: ignore[no-untyped-def]
    """What this rank says to each call in which rank 1 is given something else, and the ordinary run after all of them."""
    config = dataclasses.replace(CONFIG, timeout_s=20.0)
    problem = Problem(tokens=40, hidden=160, width=48, experts=4)
    workspace = functional.create_workspace(config, group, device="cpu", num_local_tokens=40, hidden_size=160, topk=2)
    odd = workspace.ep_rank == 1
    routed = [weight[2 * workspace.ep_rank :][:2] for weight in problem.routed]
    pairs = prequantized("fp8 in fp32", routed)
    wrong_scale = [(values, torch.full_like(scale, 3.0)) for values, scale in pairs]
    x, weights, d_out, none = problem.x, problem.weights, problem.d_out, (None, None, None)
    schedule = functional.build_schedule(workspace, config, problem.ids, 2)
    _, context = functional.forward(config, workspace, schedule, x, weights, *none, *routed)
    calls = [
        lambda: functional.build_schedule(workspace, config, problem.ids.int() if odd else problem.ids, 2),
        lambda: functional.build_schedule(workspace, config, None if odd else problem.ids, 2),
        lambda: functional.forward(config, workspace, schedule, x.float() if odd else x, weights, *none, *routed),
        lambda: functional.forward(None if odd else config, workspace, schedule, x, weights, *none, *routed),
        lambda: functional.forward(config, workspace, schedule, x, weights, *none, *(wrong_scale if odd else pairs)),
        lambda: functional.backward(config, workspace, schedule, context, d_out.float() if odd else d_out, x, weights, *none, *routed),
        lambda: functional.backward(config, workspace, schedule, context, d_out, x, weights, *none, *(wrong_scale if odd else pairs)),
    ]
    said = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        said.append((type(error.value).__name__, str(error.value)))
    part = slice(20 * workspace.ep_rank, 20 * workspace.ep_rank + 20)
    return said, run(group, problem, "bf16", config, part)


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_rank_is_given_all_hear_of(kind):
    results = run_ranks(kind, one_odd_rank, 2)
    assert results[0][0] == results[1][0]
    assert [name for name, _ in results[0][0]] == ["ValueError", "TypeError", "ValueError", "TypeError", *["ValueError"] * 3]
    beginnings = ["top_experts.dtype=torch.int32", "top_experts: must be a tensor", "x.dtype=torch.float32", "config: must be a MoKConfig"]
    beginnings += ["scale=3.0", "grad_output.dtype=torch.float32", "scale=3.0"]
    for (_, message), beginning in zip(results[0][0], beginnings, strict=True):
        assert message.startswith(f"rank 1: {beginning}"), message
    one = run(None, Problem(tokens=40, hidden=160, width=48, experts=4), "bf16")
    for name in ("out", "d_x", "d_weights", "d_gate", "d_up", "d_down"):
        assert torch.equal(torch.cat([rank[name] for _, rank in results]), one[name]), name


def test_wrong_pairs():
    problem = Problem(shared_width=0)
    workspace = functional.get_workspace(CONFIG, device="cpu", num_local_tokens=14, hidden_size=64, topk=2)
    schedule = functional.build_schedule(workspace, CONFIG, problem.ids, 2)
    plain, tiled, fp8 = (prequantized(form, problem.routed) for form in ("mxfp8 plain", "mxfp8 tcgen05", "fp8"))
    both = prequantized("mxfp8 plain", problem.routed, backward=True)
    gate, up, down = fp8
    _, context = functional.forward(CONFIG, workspace, schedule, problem.x, problem.weights, None, None, None, *fp8)

    def forward(*routed):  # type: ignore[no-untyped-def]
        return functional.forward(CONFIG, workspace, schedule, problem.x, problem.weights, None, None, None, *routed)

    def backward(*routed):  # type: ignore[no-untyped-def]
        head = (problem.d_out, problem.x, problem.weights, None, None, None)
        return functional.backward(CONFIG, workspace, schedule, context, *head, *routed)

    def recompute(*routed):  # type: ignore[no-untyped-def]
        return functional.recompute_forward_context(CONFIG, workspace, schedule, problem.x, None, None, *routed)

    one = lambda pair, i, value: tuple(value if j == i else t for j, t in enumerate(pair))  # noqa: E731
    cases = [
        ("must all be tensors, or all be quantized", lambda: forward(gate, up, problem.routed[2])),
        ("routed_gate: must begin with values, a tensor of three dimensions [L, I, H], and their", lambda: forward(gate[:1], up, down)),
        ("routed_up: 1 tensors, must be 2 in a forward in fp8: (values, scale)", lambda: forward(gate, up[:1], down)),
        ("routed_gate: 4 tensors, must be 2 in a forward in mxfp8", lambda: forward(*both)),
        ("routed_gate: 2 tensors, must be 4 in a backward in mxfp8: (values, scale, values_T, scale_T)", lambda: backward(*plain)),
        ("routed_down: 4 tensors, must be 2 in a backward in mxfp8: (values_T, scale_T)", lambda: backward(*both[:2], both[0])),
        ("routed_down[0].shape=(2, 64, 32): must be (2, 32, 64)", lambda: backward(*both[:2], plain[2])),
        ("routed_gate[2].shape=(2, 32, 64): must be (2, 64, 32)", lambda: backward((*plain[0], *plain[0]), *both[1:])),
        ("routed_gate[0].dtype=torch.uint8: must be torch.float8_e4m3fn",
         lambda: forward(one(gate, 0, gate[0].view(torch.uint8)), up, down)),
        ("routed_up[1].dtype=torch.int32: must be torch.uint8 or torch.float8_e8m0fnu or torch.float32 in fp8",
         lambda: recompute(gate, one(up, 1, up[1].int()))),
        ("routed_gate[1].dtype=torch.float32: must be torch.uint8 or torch.float8_e8m0fnu in mxfp8",
         lambda: forward(one(plain[0], 1, plain[0][1].float()), *plain[1:])),
        ("routed_up[1].shape=(2, 1, 1): must be (2, 32, 2) (plain) or (2, 1, 32, 16) (tcgen05) in mxfp8",
         lambda: forward(plain[0], up, plain[2])),
        ("routed_up[1].shape=(2, 1, 32, 16): must be (2, 1, 1) (plain) in fp8", lambda: forward(gate, tiled[1], down)),
        ("routed_down[1].shape=(2, 1, 2): must be (2, 1, 1)", lambda: forward(gate, up, one(down, 1, down[1].repeat(1, 1, 2)))),
        ("routed_down[1]: must be a tensor, the scale of routed_down[0], not NoneType", lambda: forward(gate, up, one(down, 1, None))),
        ("routed_gate[0]: must be contiguous", lambda: forward(one(gate, 0, problem.routed[2].to(gate[0].dtype).mT), up, down)),
        ("routed_up[0].shape=(2, 64, 32): must be (2, 32, 64)", lambda: forward(gate, down, down)),
        ("scale=3.0: must be a power of two", lambda: forward(one(gate, 1, torch.full(gate[1].shape, 3.0)), up, down)),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
    functional.clear_workspace_cache()


def test_a_limit_of_zero():
    """Nothing passes."""
    problem = Problem(shared_width=0, limit=0.0)
    got = run(None, problem, "bf16")
    assert not got["out"].any() and not got["d_x"].any() and not got["d_down"].any()


def test_wrong_groups_and_devices(monkeypatch):
    sizes = dict(num_local_tokens=14, hidden_size=64, topk=2)
    problem = Problem(shared_width=0)
    workspace = functional.get_workspace(CONFIG, device="cpu:0", **sizes)
    assert workspace is functional.get_workspace(CONFIG, device="cpu", **sizes)
    assert functional.build_schedule(workspace, CONFIG, problem.ids, 2).num_tokens.item() > 0
    with pytest.raises(TypeError, match=r"group: must be a torch\.distributed group, a virtual rank or None, not int"):
        functional.create_workspace(CONFIG, 2, device="cpu", **sizes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in (None, "cuda", "cuda:1"):
        with pytest.raises(ValueError, match=f"device={device}: PyTorch finds no GPU on this machine; device='cpu' runs"):
            functional.get_workspace(CONFIG, device=device, **sizes)
    functional.clear_workspace_cache()


def test_compiled_around_the_calls():
    problem = Problem(shared_width=0)
    workspace = functional.create_workspace(CONFIG, device="cpu", num_local_tokens=14, hidden_size=64, topk=2)

    def call(x):  # type: ignore[no-untyped-def]
        schedule = functional.build_schedule(workspace, CONFIG, problem.ids, 2)
        return functional.forward(CONFIG, workspace, schedule, x, problem.weights, None, None, None, *problem.routed)[0]

    assert torch.equal(torch.compile(call, backend="eager")(problem.x), call(problem.x))
    torch.compiler.reset()  # another compilation of the same code
    with pytest.raises(RuntimeError, match=r"the low-level API on a CPU is not for torch\.compile\(fullgraph=True\)"):
        torch.compile(call, fullgraph=True, backend="eager")(problem.x)
