"""torch.compile: whole graphs, the bits of eager, few recompiles, the same graph on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import poison
from dense import SMALL_RING, build, dense, exact, random_ids
from layers import Batch, assert_equal
from ranks import run_processes
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import mok
from mok.fabric import host_fabric

TOKENS = (0, 1, 17, 256, 4096)
CONFIG = mok.MoEConfig(
    hidden_size=16, intermediate_size=8, num_experts=4, top_k=2, num_shared_experts=1, shared_gate=True, score="sigmoid",
    selection_bias=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors on busy cores
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def moe_step(function, batch: Batch, group=None) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """`function` is mok.moe or a compiled one."""
    fabric = host_fabric(group)
    b = batch.local(fabric.rank, fabric.size).leaves()
    ids = b.ids.clone(memory_format=torch.contiguous_format)  # a view, or odd strides of no or one token, would be a case of its own
    poison(1)
    out = function(b.x, ids, b.weights, b.gate, b.up, b.down, num_experts=batch.experts, group=group, tuning=SMALL_RING)
    out.backward(b.d_out)
    return {"out": out.detach(), **b.gradients()}


def layer_step(layer, function, x):  # type: ignore[no-untyped-def]
    """`function` is the layer or a compiled call of it."""
    layer.zero_grad()
    layer.tokens_per_expert.zero_()
    leaf = x.clone().requires_grad_()
    poison(1)
    out = function(leaf)
    (out * out.detach()).sum().backward()
    gradients = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in layer.named_parameters()}
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    return {"out": out.detach(), "d_x": leaf.grad, "counts": layer.tokens_per_expert.clone(), **gradients}


def check_numbers_of_tokens(counter: CompileCounterWithBackend, check) -> None:  # type: ignore[no-untyped-def]
    first = 0
    for tokens in TOKENS:
        check(tokens)
        first = first or counter.frame_count
    assert first >= 1 and counter.frame_count - first <= 2, "0 and 1 may have graphs of their own, all other numbers share one"
    check(100)
    assert counter.frame_count - first <= 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_experts_have_the_bits_of_eager(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(mok.moe, fullgraph=True, dynamic=True, backend=counter)

    def check(tokens: int) -> None:
        batch = exact(random_ids(tokens, range(4)), hidden=16, width=8, experts=4, seed=tokens)
        got = moe_step(compiled, batch)
        assert_equal(got, dense(batch))
        batch = Batch.random(tokens=tokens, hidden=16, width=8, experts=4, seed=tokens, dtype=torch.bfloat16)
        assert_equal(moe_step(compiled, batch), moe_step(mok.moe, batch))

    check_numbers_of_tokens(counter, check)




@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_has_the_bits_of_eager(backend):
    layer = build(CONFIG)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)

    def check(tokens: int) -> None:
        x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))
        want = layer_step(layer, layer, x)
        assert_equal(layer_step(layer, compiled, x), want)
        assert want["counts"].sum() == 2 * tokens

    check_numbers_of_tokens(counter, check)


def test_a_compiled_layer_in_bf16_rounds_where_eager_does():
    """x has several users; Inductor would keep sums of some of its gradients in fp32, eager would round them."""
    layer = build(CONFIG).bfloat16()
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_equal(layer_step(layer, torch.compile(layer, fullgraph=True), x), layer_step(layer, layer, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_compiled_inside_recompute_and_recompute_inside_compiled(reentrant):
    layer = build(CONFIG)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (17, 300):
        x = torch.randn(tokens, 16)
        want = layer_step(layer, layer, x)
        assert_equal(layer_step(layer, lambda leaf: checkpoint(compiled, leaf, use_reentrant=reentrant), x), want)
        if not reentrant:
            recomputed = lambda leaf: checkpoint(layer, leaf, use_reentrant=False)  # noqa: E731
            whole = torch.compile(recomputed, fullgraph=True, dynamic=True, backend="aot_eager")
            assert_equal(layer_step(layer, whole, x), want)


def test_compiled_with_frozen_inputs_and_under_no_grad():
    batch = exact(random_ids(60, range(8)))
    want = dense(batch)
    for frozen in (("gate", "up", "down"), ("x",), ("weights", "up"), ("x", "weights")):
        torch._dynamo.reset()
        compiled = torch.compile(mok.moe, fullgraph=True, dynamic=True, backend="aot_eager")
        b = batch.leaves()
        for name in frozen:
            getattr(b, name).requires_grad_(False)
        out = compiled(b.x, b.ids, b.weights, b.gate, b.up, b.down)
        out.backward(b.d_out)
        for name, gradient in b.gradients().items():
            if name.removeprefix("d_") in frozen:
                assert gradient is None
            else:
                assert_equal({name: gradient}, want, (name,))
    with torch.no_grad():
        out = compiled(batch.x, batch.ids, batch.weights, batch.gate, batch.up, batch.down)
    assert not out.requires_grad
    assert_equal({"out": out}, want, ("out",))


def test_compiled_with_main_grad_is_refused():
    batch = exact(random_ids(20, range(8))).leaves()
    batch.up.main_grad = torch.zeros(batch.up.shape)
    compiled = torch.compile(mok.moe, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(Exception, match="main_grad"):
        compiled(batch.x, batch.ids, batch.weights, batch.gate, batch.up, batch.down)


def test_compiled_with_no_route_at_all():
    batch = exact(torch.full((70, 2), -1))
    compiled = torch.compile(mok.moe, fullgraph=True, dynamic=True, backend="aot_eager")
    got = moe_step(compiled, batch)
    assert all((t == 0).all() for t in got.values())
    assert_equal(got, dense(batch))
    with_routes = exact(random_ids(70, range(8)))
    assert_equal(moe_step(compiled, with_routes), dense(with_routes))
    assert_equal(moe_step(compiled, batch), dense(batch))


class Graphs:
    """A backend that notes the text of every graph and runs it by aot_eager."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, graph, inputs):  # type: ignore[no-untyped-def]
        self.texts.append(graph.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def compiled_ranks(group, batches, x):  # type: ignore[no-untyped-def]
    """Steps of compiled experts and of a compiled layer on a group, equal to eager; the graphs."""
    graphs = Graphs()
    compiled = torch.compile(mok.moe, fullgraph=True, dynamic=True, backend=graphs)
    steps = [moe_step(compiled, batch, group) for batch in batches]
    layer = build(replace(CONFIG, num_experts=8), group)
    call = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    tokens = x.chunk(layer.fabric.size)[layer.fabric.rank]
    assert_equal(layer_step(layer, call, tokens), layer_step(layer, layer, tokens))
    return steps, graphs.texts


def test_compiled_over_a_group_where_one_rank_has_no_route():
    batches = [exact(random_ids(64, range(4), seed=1)), exact(random_ids(90, range(8))), exact(random_ids(64, range(4, 8)))]
    results = run_processes(compiled_ranks, 2, batches, torch.randn(100, 16))
    for i, batch in enumerate(batches):
        got = {name: torch.cat([steps[i][name] for steps, _ in results]) for name in results[0][0][i]}
        assert_equal(got, dense(batch))
    assert results[0][1] == results[1][1], "the graphs of the ranks differ"
