"""The forward in blockwise FP8 and MXFP8 on a GPU: against the definition in fp64 on dequantized operands, and the promises about bits."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

from virtual import DEVICE, Group, Problem

import mok
from mok import schedule as host_schedule
from mok.kernels import launch, launch_fp8, launch_mxfp8, memory
from mok.kernels.launch import ForwardPlan
from mok.kernels.launch_fp8 import QuantizedExperts
from mok.kernels.launch_mxfp8 import LEAST_HIDDEN, MxExperts, WideExperts
from mok.quantize import E4M3, Recipe, dequantize, from_tcgen05, quantize

FP8, MXFP8 = Recipe("fp8"), Recipe("mxfp8")
FORMS = {QuantizedExperts: FP8, WideExperts: MXFP8, MxExperts: MXFP8}  # Hopper runs all three
SMALL = ForwardPlan(minibatch_tiles=4, ring_tiles=8)


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def form(request):
    return request.param


class Fp8Group(Group):
    """Virtual ranks whose routed experts were quantized beforehand, in one of the forms."""

    def __init__(self, form, problem: Problem, *arguments, **options):
        self.experts, self.form = [], form
        self.weights = (problem.gate, problem.up, problem.down)
        super().__init__(problem, *arguments, **options)

    def regions(self, most: int):
        p = self.problem
        layout = memory.regions(most, p.hidden, p.experts, p.top_k, self.ranks, bf16=False)
        return [*layout, *memory.quantized_regions(most, p.hidden, FORMS[self.form].row)]

    def quantized(self, rank: int):
        if not self.experts:
            for each in range(self.ranks):
                local = host_schedule.local_experts(self.problem.experts, self.ranks, each)
                self.experts.append(self.form.of(*(weight[local.start : local.stop] for weight in self.weights)))
        return self.experts[rank]

    def one_rank(self, rank: int, save: bool = False, saved_rows: int = 0, before=None):
        p, workspace = self.problem, self.workspaces[rank]
        x, ids, weights = self.inputs[rank]
        experts = self.quantized(rank)
        if before:
            before()
        rows = launch.schedule(workspace, ids, p.experts)
        if before:
            before()
        forward = launch_fp8.forward if self.form is QuantizedExperts else launch_mxfp8.forward
        out, saved = forward(
            workspace, rows, ids, weights, x, experts, p.experts, shared=p.shared, clamp=p.clamp, shared_clamp=p.shared_clamp, save=save,
            saved_rows=saved_rows, plan=self.plan,
        )  # fmt: skip
        return out, rows, saved


def expected(problem: Problem, recipe: Recipe) -> torch.Tensor:
    """fp64, expert by expert on gathered tokens; rounded and quantized where the layer does."""
    wide = lambda t: t.bfloat16().double()  # noqa: E731
    x = recipe.rows(problem.x_TH.float()).double()
    shared = problem.shared and problem.expert(problem.x_TH.double(), *problem.shared, problem.shared_clamp)
    out = torch.zeros_like(x) if shared is None else shared
    for e in range(problem.experts):
        token, k = (problem.ids_TK == e).nonzero(as_tuple=True)
        if len(token):
            gate, up, down = (recipe.weight(w[e].float(), -1).double() for w in (problem.gate, problem.up, problem.down))
            g, u = wide(x[token] @ gate.T), wide(x[token] @ up.T)
            if problem.clamp is not None:
                g, u = g.clamp(max=problem.clamp), u.clamp(-problem.clamp, problem.clamp)
            h = recipe.rows((torch.nn.functional.silu(g) * u).bfloat16().float()).double()
            out.index_add_(0, token, wide(h @ down.T) * problem.weights_TK[token, k, None])
    return out


def relative(got: torch.Tensor, want: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    return (got.double() - want.double()).norm(dim=dim) / want.double().norm(dim=dim).clamp(min=1e-3)


def assert_near(out: torch.Tensor, want: torch.Tensor) -> None:
    """The tensor cores keep fewer bits than fp32, so gate and up may round to the next bf16, and then one element of h in 16 to the next
    E4M3, 6 % further. `test_stage_by_stage` has no such slack."""
    assert torch.isfinite(out.float()).all(), "not finite"
    if out.numel():
        assert relative(out, want) < 2e-2 and relative(out, want, 1).max() < 8e-2, (relative(out, want), relative(out, want, 1).max())
        assert relative(out[:, -8:], want[:, -8:]) < 4e-2, "the last 8 columns"


SIZES = {  # tokens, hidden, width, experts, K, shared width
    "plain": (1024, 1024, 512, 8, 2, 0),
    "shared": (1000, 1024, 512, 8, 2, 768),
    "ragged": (777, 2880, 2880, 9, 4, 0),
    "narrow": (513, 128, 96, 5, 3, 160),
    "tiny": (200, 48, 16, 4, 2, 32),
    "deep": (700, 7168, 2048, 6, 4, 2048),
    "odd slices": (400, 656, 1424, 4, 2, 0),
}


@pytest.mark.parametrize("name", SIZES)
def test_near_the_definition_and_equal_for_every_number_of_ranks(form, name):
    tokens, hidden, width, experts, top_k, shared_width = SIZES[name]
    problem = Problem(tokens, hidden, width, experts, top_k, masked=0.1, shared_width=shared_width)
    if hidden < LEAST_HIDDEN and form is not QuantizedExperts:
        with pytest.raises(ValueError, match="hidden_size=48: must be at least 64 in MXFP8"):
            Fp8Group(form, problem, 1)
        return
    want, first = expected(problem, FORMS[form]), None
    for ranks in (1, 2, 3):
        out = Fp8Group(form, problem, ranks).run()
        assert_near(out, want)
        first = out if first is None else first
        assert torch.equal(out, first), ranks


@pytest.mark.parametrize(
    "sizes", [(600, 1024, 512, 4, 2), (700, 2880, 2880, 5, 2), (300, 7168, 2048, 3, 2), (300, 656, 1424, 3, 2)], ids=str
)
def test_stage_by_stage(form, sizes):
    """Gate and up from x, h from the kernel's gate and up, y from the kernel's h, each as near as its own rounding allows."""
    problem = Problem(*sizes)
    group = Fp8Group(form, problem, 1, ForwardPlan(ring_tiles=64, minibatch_tiles=4))
    group.run()
    _, rows, saved = group.one_rank(0, save=True, saved_rows=64 * 128)
    torch.cuda.synchronize()
    count, workspace, recipe = int(rows.num_tokens), group.workspaces[0], FORMS[form]
    assert count <= 64 * 128, "the ring holds all rows"
    live = rows.peer_rank[:count] >= 0
    expert, slot = rows.tile_expert[: count // 128].long().repeat_interleave(128)[live], rows.peer_token_idx[:count].long()[live]
    x = recipe.rows(problem.x_TH.float())[slot // problem.top_k]
    kept = {"gate": saved.gate_CI[:count][live], "up": saved.up_CI[:count][live]}
    h, y = hidden_of(group, workspace)[:count][live], workspace.memory.own["combine"][slot]
    wanted = recipe.rows(torch.nn.functional.silu(kept["gate"].float()).mul(kept["up"].float()).bfloat16().float())
    assert (h == wanted).float().mean() > 0.995
    for e in range(problem.experts):
        mine = expert == e
        for name, weights in (("gate", problem.gate), ("up", problem.up)):
            want = x[mine].double() @ recipe.weight(weights[e].float(), -1).double().T
            assert relative(kept[name][mine], want, 1).max() < 4e-3, name
        want = h[mine].double() @ recipe.weight(problem.down[e].float(), -1).double().T
        assert relative(y[mine], want, 1).max() < 4e-3, "y"


def hidden_of(group: Fp8Group, workspace) -> torch.Tensor:
    """The numbers that the ring of h holds, fp32."""
    width, block = group.problem.width, FORMS[group.form].row
    if group.form is WideExperts:
        return workspace.scratch["h_ring"].view(-1, width).float()
    values, codes = workspace.scratch["h_e4m3_ring"].view(-1, width).view(E4M3), workspace.scratch["h_scale_ring"]
    blocks = -(-width // block[1])
    if group.form is MxExperts:
        codes = from_tcgen05(codes.view(-1, -(-width // 128), 32, 16), values.shape[0], blocks)[0]
    return dequantize(values, codes.view(-1, blocks), block)


def test_every_scale_counts(form):
    """Blocks of x by powers of two that the weights' blocks undo: without one of the scales nothing would be near."""
    problem = Problem(512, 1024, 512, 4, 2)
    block = FORMS[form].row[1]
    factors = torch.exp2(torch.arange(1024 // block, device=DEVICE) % 8 * 3.0 - 10).repeat_interleave(block).bfloat16()
    problem.x_TH *= factors
    for weight in (problem.gate, problem.up):
        weight /= factors
    problem.up[:, 128:256] *= 16.0
    problem.down[:, :, 128:256] /= 16.0
    problem.down[:, 256:384] *= 8.0
    assert_near(Fp8Group(form, problem, 2).run(), expected(problem, FORMS[form]))


def many_rows() -> Problem:
    return Problem(2500, 1024, 768, 12, 4, masked=0.05, shared_width=512)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bits_do_not_depend_on_time(form, ranks):
    problem = many_rows()
    first = Fp8Group(form, problem, 1).run()
    assert_near(first, expected(problem, FORMS[form]))
    group = Fp8Group(form, problem, ranks, SMALL)
    for repeat in range(50):
        assert torch.equal(group.run(delay=True), first), repeat


PLANS = [
    dict(minibatch_tiles=1, ring_tiles=2), dict(minibatch_tiles=7, ring_tiles=21, parts=1), dict(parts=8), dict(num_sms=1),
    dict(num_sms=7, minibatch_tiles=2, ring_tiles=4), dict(num_stages=3), dict(num_stages=2), dict(block_h=256), dict(trace=True),
    dict(half_tiles=False),
]  # fmt: skip


@pytest.mark.parametrize("changes", PLANS, ids=str)
def test_bits_do_not_depend_on_knobs(form, changes):
    problem = many_rows()
    first = Fp8Group(form, problem, 1).run()
    for ranks in (1, 2):
        assert torch.equal(Fp8Group(form, problem, ranks, ForwardPlan(**changes)).run(), first), ranks


def test_a_token_does_not_depend_on_the_others(form):
    problem = Problem(600, 512, 256, 6, 2)
    whole = Fp8Group(form, problem, 1).run()
    problem.x_TH, problem.ids_TK, problem.weights_TK = problem.x_TH[100:350], problem.ids_TK[100:350], problem.weights_TK[100:350]
    assert torch.equal(Fp8Group(form, problem, 1).run(), whole[100:350])


@pytest.mark.parametrize("ranks", [1, 2])
def test_extremes(form, ranks):
    problem = Problem(900, 512, 256, 8, 2, clamp=1.0, shared_width=256, shared_clamp=0.5)
    for ids in (-1, 0, 7, None):
        if ids is None:
            problem.ids_TK = torch.randint(-1, 8, (900, 2), device=DEVICE)
        else:
            problem.ids_TK = torch.full((900, 2), ids, device=DEVICE)
        problem.weights_TK = torch.randn(900, 2, device=DEVICE)
        assert_near(Fp8Group(form, problem, ranks).run(), expected(problem, FORMS[form]))


def test_no_tokens(form):
    problem = Problem(0, 512, 256, 8, 2, shared_width=256)
    assert Fp8Group(form, problem, 1).run().shape == (0, 512)
    problem = Problem(1, 512, 256, 8, 2)
    assert_near(Fp8Group(form, problem, 3).run(), expected(problem, FORMS[form]))


def test_nan_and_inf_stay_in_their_tokens(form):
    """At every position of a block."""
    problem = Problem(600, 512, 256, 6, 2)
    clean = Fp8Group(form, problem, 1).run()
    block = FORMS[form].row[1]
    first = torch.arange(block, device=DEVICE)
    problem.x_TH[20 + first, block + first], problem.x_TH[200 + first, 2 * block + first] = float("nan"), float("inf")
    problem.x_TH[400] = 0.0
    out = Fp8Group(form, problem, 2).run()
    bad = torch.cat((20 + first, 200 + first))
    assert out[bad].isnan().all() and not out[400].any()
    others = torch.ones(600, dtype=torch.bool, device=DEVICE)
    others[bad] = others[400] = False
    assert torch.equal(out[others], clean[others])


def test_x_is_published_with_the_bits_of_the_definition(form):
    problem = Problem(333, 656, 64, 2, 1)
    group = Fp8Group(form, problem, 1)
    group.run()
    values, scale = quantize(problem.x_TH.cpu(), FORMS[form].row)
    own = group.workspaces[0].memory.own
    assert torch.equal(own["x_e4m3"].cpu(), values.view(torch.uint8)) and torch.equal(own["x_scale"].cpu(), scale)


def test_gate_and_up_of_the_first_rows_are_saved(form):
    problem = Problem(900, 512, 336, 5, 2, shared_width=192)
    group = Fp8Group(form, problem, 1)
    plain = group.run()
    out, rows, saved = group.one_rank(0, save=True, saved_rows=700)
    torch.cuda.synchronize()
    assert torch.equal(out, plain)
    token = rows.peer_token_idx[:700].long() // 2
    x = torch.where(rows.peer_rank[:700, None] >= 0, FORMS[form].rows(problem.x_TH.float())[token], 0)
    expert = rows.tile_expert[:6].repeat_interleave(128)[:700].long()
    for kept, weights in ((saved.gate_CI, problem.gate), (saved.up_CI, problem.up)):
        want = torch.bmm(FORMS[form].weight(weights.float(), -1)[expert], x[:, :, None])[:, :, 0]
        assert torch.allclose(kept.float(), want, atol=2e-2, rtol=1e-2)
    assert torch.allclose(saved.shared_up_TS.float(), problem.x_TH.float() @ problem.shared[1].float().T, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_waits_for_nothing(form, ranks):
    group = Fp8Group(form, Problem(1500, 1024, 512, 8, 4, shared_width=256), ranks)
    group.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rank, stream in enumerate(group.streams):
            with torch.cuda.stream(stream):
                group.one_rank(rank)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for workspace in group.workspaces:
        workspace.check()


def test_both_forms_of_mxfp8_agree():
    """They differ by the order of sums."""
    problem = Problem(700, 1024, 512, 6, 2)
    wide, scaled = (Fp8Group(form, problem, 1).run() for form in (WideExperts, MxExperts))
    assert relative(scaled, wide) < 5e-3


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
@pytest.mark.parametrize("shared", [0, 1])
def test_the_layer_without_gradients(shared, precision):
    """mok.MoE and mok.moe against the CPU's; compiled it has the same bits."""
    config = mok.MoEConfig(hidden_size=272, intermediate_size=144, num_experts=6, top_k=2, num_shared_experts=shared)
    torch.manual_seed(0)
    layer = mok.MoE(config, precision=precision, dtype=torch.bfloat16)
    x = torch.randn(300, 272).bfloat16()
    with torch.no_grad():
        want = layer(x)
        device = mok.MoE(config, precision=precision, dtype=torch.bfloat16, device="cuda")
        device.load_state_dict(layer.state_dict())
        out = device(x.cuda())
        close = (out.float().cpu() - want.float()).norm(dim=1) / want.float().norm(dim=1)
        assert (close < 8e-2).float().mean() > 0.97  # a router's tie may fall the other way
        assert torch.equal(torch.compile(device, fullgraph=True)(x.cuda()), out)
