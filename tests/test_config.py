"""MoEConfig: the published shapes and every rule with its message. Tuning: its rules."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mok.config import PRESETS, TILE_M, MoEConfig, Tuning

# name: H, I, E, K, shared experts, score, selection bias, renormalize, scale, clamp, groups, top groups, shared gate
PUBLISHED = {
    "deepseek-v3": (7168, 2048, 256, 8, 1, "sigmoid", True, True, 2.5, None, 8, 4, False),
    "deepseek-v3.1": (7168, 2048, 256, 8, 1, "sigmoid", True, True, 2.5, None, 8, 4, False),
    "deepseek-v3.2": (7168, 2048, 256, 8, 1, "sigmoid", True, True, 2.5, None, 8, 4, False),
    "deepseek-v4-flash": (4096, 2048, 256, 6, 1, "sqrt_softplus", True, True, 1.5, 10.0, 1, 1, False),
    "deepseek-v4-pro": (7168, 3072, 384, 6, 1, "sqrt_softplus", True, True, 2.5, 10.0, 1, 1, False),
    "kimi-k2": (7168, 2048, 384, 8, 1, "sigmoid", True, True, 2.827, None, 1, 1, False),
    "kimi-k2-thinking": (7168, 2048, 384, 8, 1, "sigmoid", True, True, 2.827, None, 1, 1, False),
    "kimi-k2.5": (7168, 2048, 384, 8, 1, "sigmoid", True, True, 2.827, None, 1, 1, False),
    "kimi-k2.6": (7168, 2048, 384, 8, 1, "sigmoid", True, True, 2.827, None, 1, 1, False),
    "kimi-k2.7-code": (7168, 2048, 384, 8, 1, "sigmoid", True, True, 2.827, None, 1, 1, False),
    "glm-4.5": (5120, 1536, 160, 8, 1, "sigmoid", True, True, 2.5, None, 1, 1, False),
    "glm-4.5-air": (4096, 1408, 128, 8, 1, "sigmoid", True, True, 1.0, None, 1, 1, False),
    "glm-5": (6144, 2048, 256, 8, 1, "sigmoid", True, True, 2.5, None, 1, 1, False),
    "glm-5.2": (6144, 2048, 256, 8, 1, "sigmoid", True, True, 2.5, None, 1, 1, False),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 0, "softmax", False, True, 1.0, None, 1, 1, False),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 0, "softmax", False, True, 1.0, None, 1, 1, False),
    "qwen3-next-80b-a3b": (2048, 512, 512, 10, 1, "softmax", False, True, 1.0, None, 1, 1, True),
    "qwen3.5-397b-a17b": (4096, 1024, 512, 10, 1, "softmax", False, True, 1.0, None, 1, 1, True),
    "minimax-m2": (3072, 1536, 256, 8, 0, "sigmoid", True, True, 1.0, None, 1, 1, False),
    "mixtral-8x7b": (4096, 14336, 8, 2, 0, "softmax", False, True, 1.0, None, 1, 1, False),
    "olmoe-1b-7b": (2048, 1024, 64, 8, 0, "softmax", False, False, 1.0, None, 1, 1, False),
    "moonlight-16b-a3b": (2048, 1408, 64, 6, 2, "sigmoid", True, True, 2.446, None, 1, 1, False),
    "deepseek-v2-lite": (2048, 1408, 64, 6, 2, "softmax", False, False, 1.0, None, 1, 1, False),
}  # fmt: skip

GOOD = dict(hidden_size=64, intermediate_size=32, num_experts=8, top_k=2)
SHARED = dict(GOOD, num_shared_experts=1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_figures(name):
    c = MoEConfig.preset(name)
    figures = (
        c.hidden_size, c.intermediate_size, c.num_experts, c.top_k, c.num_shared_experts, c.score, c.selection_bias, c.renormalize,
        c.scaling_factor, c.clamp, c.num_groups, c.top_groups, c.shared_gate,
    )  # fmt: skip
    assert figures == PUBLISHED[name]
    assert c.shared_width == c.num_shared_experts * c.intermediate_size  # every published shared expert is as wide as a routed one
    assert (c.shared_clamp, c.balance_loss_weight) == (None, 0.0)


def test_there_are_no_other_presets():
    assert set(PRESETS) == set(PUBLISHED)


def test_preset_takes_changes_and_any_case():
    c = MoEConfig.preset("DeepSeek-V3", hidden_size=128, num_groups=1, top_groups=1)
    assert c == dataclasses.replace(MoEConfig.preset("deepseek-v3"), hidden_size=128, num_groups=1, top_groups=1)
    with pytest.raises(ValueError, match=r"top_k=257: must be at most num_experts=256"):
        MoEConfig.preset("deepseek-v3", top_k=257)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "GPT-OSS-20B"])
def test_gpt_oss_says_that_it_is_not_there_yet(name):
    with pytest.raises(ValueError, match=f"name='{name}': not supported yet: .*1.702.*biases"):
        MoEConfig.preset(name)


def test_preset_of_what_is_no_name():
    with pytest.raises(TypeError, match="name=3: must be a str, not int"):
        MoEConfig.preset(3)


def test_unknown_preset_lists_the_names():
    with pytest.raises(ValueError) as error:
        MoEConfig.preset("deepseek-v9")
    assert str(error.value) == f"name='deepseek-v9': must be one of {', '.join(sorted(PUBLISHED))}"


INTEGERS = ["hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "top_groups"]
MOE_RULES = [
    *[(ValueError, {name: 0}, f"{name}=0: must be at least 1") for name in INTEGERS],
    *[(TypeError, {name: 2.0}, f"{name}=2.0: must be an int, not float") for name in INTEGERS],
    *[(TypeError, {name: True}, f"{name}=True: must be an int, not bool") for name in INTEGERS],
    (TypeError, dict(top_k=None), "top_k=None: must be an int, not NoneType"),
    (ValueError, dict(num_shared_experts=-1), "num_shared_experts=-1: must be at least 0"),
    (TypeError, dict(num_shared_experts="1"), "num_shared_experts='1': must be an int, not str"),
    (ValueError, dict(num_shared_experts=1, shared_intermediate_size=0), "shared_intermediate_size=0: must be at least 1"),
    (TypeError, dict(num_shared_experts=1, shared_intermediate_size=1.5), "shared_intermediate_size=1.5: must be an int, not float"),
    (ValueError, dict(shared_intermediate_size=32), "shared_intermediate_size=32: needs num_shared_experts of at least 1"),
    (ValueError, dict(top_k=9), "top_k=9: must be at most num_experts=8"),
    (ValueError, dict(score="tanh"), "score='tanh': must be one of softmax, sigmoid, sqrt_softplus"),
    (ValueError, dict(score=None), "score=None: must be one of softmax, sigmoid, sqrt_softplus"),
    (TypeError, dict(selection_bias=1), "selection_bias=1: must be a bool, not int"),
    (TypeError, dict(renormalize="yes"), "renormalize='yes': must be a bool, not str"),
    (TypeError, dict(num_shared_experts=1, shared_gate=None), "shared_gate=None: must be a bool, not NoneType"),
    (ValueError, dict(scaling_factor=0), "scaling_factor=0: must be finite and above 0"),
    (ValueError, dict(scaling_factor=-1.0), "scaling_factor=-1.0: must be finite and above 0"),
    (ValueError, dict(scaling_factor=math.inf), "scaling_factor=inf: must be finite and above 0"),
    (ValueError, dict(scaling_factor=math.nan), "scaling_factor=nan: must be finite and above 0"),
    (TypeError, dict(scaling_factor="2"), "scaling_factor='2': must be a number, not str"),
    (TypeError, dict(scaling_factor=True), "scaling_factor=True: must be a number, not bool"),
    (ValueError, dict(balance_loss_weight=-1e-4), "balance_loss_weight=-0.0001: must be finite and at least 0"),
    (ValueError, dict(balance_loss_weight=math.nan), "balance_loss_weight=nan: must be finite and at least 0"),
    (TypeError, dict(balance_loss_weight=None), "balance_loss_weight=None: must be a number, not NoneType"),
    (ValueError, dict(clamp=0.0), "clamp=0.0: must be finite and above 0"),
    (ValueError, dict(clamp=math.inf), "clamp=inf: must be finite and above 0"),
    (TypeError, dict(clamp="7"), "clamp='7': must be a number, not str"),
    (ValueError, dict(num_shared_experts=1, shared_clamp=-7.0), "shared_clamp=-7.0: must be finite and above 0"),
    (ValueError, dict(shared_clamp=7.0), "shared_clamp=7.0: needs num_shared_experts of at least 1"),
    (ValueError, dict(shared_gate=True), "shared_gate=True: needs num_shared_experts of at least 1"),
    (ValueError, dict(num_groups=3), "num_groups=3: must divide num_experts=8"),
    (ValueError, dict(top_groups=2), "top_groups=2: must be at most num_groups=1"),
    (ValueError, dict(num_groups=8), "num_groups=8: a group is scored by its two best experts and needs at least 2 of them"),
    (
        ValueError,
        dict(num_groups=4, top_groups=2, top_k=5),
        "top_k=5: must be at most top_groups * experts per group = 4",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "arguments", "message"), MOE_RULES, ids=[m for *_, m in MOE_RULES])
def test_every_rule_names_argument_value_and_rule(error, arguments, message):
    with pytest.raises(error) as caught:
        MoEConfig(**{**GOOD, **arguments})
    assert str(caught.value) == message


def test_values_at_the_edge_of_a_rule_are_taken():
    MoEConfig(hidden_size=1, intermediate_size=1, num_experts=1, top_k=1)
    MoEConfig(**dict(GOOD, top_k=8))
    MoEConfig(**dict(GOOD, num_groups=4, top_groups=2, top_k=4))
    MoEConfig(**dict(GOOD, num_groups=4, top_groups=4, top_k=8))
    MoEConfig(**dict(SHARED, shared_gate=True, shared_clamp=1, clamp=1, scaling_factor=2, balance_loss_weight=0))


def test_fields_are_given_by_name():
    with pytest.raises(TypeError):
        MoEConfig(64, 32, 8, 2)


@pytest.mark.parametrize(("shared", "width", "total"), [(0, None, 0), (1, None, 32), (3, None, 96), (1, 48, 48), (2, 48, 96)])
def test_shared_width(shared, width, total):
    assert MoEConfig(**dict(GOOD, num_shared_experts=shared, shared_intermediate_size=width)).shared_width == total


@pytest.mark.parametrize("made", [MoEConfig(**GOOD), Tuning()], ids=["MoEConfig", "Tuning"])
def test_frozen_and_hashable(made):
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, getattr(made, field.name))
    assert {made: 1}[dataclasses.replace(made)] == 1


TUNING_RULES = [
    (ValueError, dict(minibatch=0), "minibatch=0: must be at least 1"),
    (TypeError, dict(minibatch=128.0), "minibatch=128.0: must be an int, not float"),
    (ValueError, dict(minibatch=192), "minibatch=192: must be a multiple of 128"),
    (ValueError, dict(macrobatch=0), "macrobatch=0: must be at least 1"),
    (TypeError, dict(macrobatch=None), "macrobatch=None: must be an int, not NoneType"),
    (ValueError, dict(minibatch=256, macrobatch=384), "macrobatch=384: must be a multiple of minibatch=256"),
    (ValueError, dict(minibatch=256, macrobatch=128), "macrobatch=128: must be a multiple of minibatch=256"),
    (ValueError, dict(saved_rows=-1), "saved_rows=-1: must be at least 0"),
    (TypeError, dict(saved_rows=0.5), "saved_rows=0.5: must be an int, not float"),
    (ValueError, dict(timeout_s=0), "timeout_s=0: must be finite and above 0"),
    (ValueError, dict(timeout_s=math.inf), "timeout_s=inf: must be finite and above 0"),
    (TypeError, dict(timeout_s="60"), "timeout_s='60': must be a number, not str"),
]


@pytest.mark.parametrize(("error", "arguments", "message"), TUNING_RULES, ids=[m for *_, m in TUNING_RULES])
def test_tuning_rules(error, arguments, message):
    with pytest.raises(error) as caught:
        Tuning(**arguments)
    assert str(caught.value) == message


def test_tuning_replace_checks_again():
    small = Tuning(minibatch=128, macrobatch=128, saved_rows=0)
    assert small.replace(macrobatch=384) == Tuning(minibatch=128, macrobatch=384, saved_rows=0)
    with pytest.raises(ValueError, match="macrobatch=200: must be a multiple of minibatch=128"):
        small.replace(macrobatch=200)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp8"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shared", [{}, dict(num_shared_experts=1, shared_gate=True), dict(num_shared_experts=4)])
@pytest.mark.parametrize("knobs", [{}, dict(minibatch=128, macrobatch=384, saved_rows=256)])
def test_gpu_memory_is_what_the_kernels_take(ranks, shared, knobs, precision, monkeypatch):
    """Allocated here as for a launch, without one. The lists' share is larger than ever in these small shapes."""
    pytest.importorskip("triton")
    from mok import quantize
    from mok.kernels import launch, launch_backward, launch_backward_fp8, launch_backward_mxfp8, launch_fp8, launch_mxfp8, memory, schedule
    from mok.kernels.autograd import rows_to_save
    from mok.kernels.launch import ForwardPlan
    from mok.kernels.launch_backward import BackwardPlan

    made = []

    def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    def quantized(x, block, tcgen05=False, **_) -> quantize.Quantized:
        scale = zeros(*quantize.scale_shape(x.shape, block), dtype=torch.uint8)
        made.append(quantize.Quantized(zeros(*x.shape, dtype=quantize.E4M3), quantize.to_tcgen05(scale) if tcgen05 else scale))
        return made[-1]

    for module in (launch_fp8, launch_mxfp8, launch_backward_fp8, launch_backward_mxfp8):
        monkeypatch.setattr(module, "quantize", quantized)
    for module in (launch_backward_fp8, launch_backward_mxfp8):
        monkeypatch.setattr(module, "quantize_into", lambda x, block, values, scale, *_: made.append((values, scale)))
    tokens, hidden, width, experts, top_k, cpu = 700, 512, 768, 6, 3, torch.device("cpu")
    config = MoEConfig(hidden_size=hidden, intermediate_size=width, num_experts=experts, top_k=top_k, **shared)
    tuning, bf16, mxfp8 = Tuning(**knobs), precision == "bf16", precision == "mxfp8"
    local, shared_width = experts // ranks, config.shared_width
    view = memory.virtual_memory(memory.layer_regions(precision, tokens, hidden, experts, top_k, ranks), ranks, cpu)[0]
    workspace, of_blackwell = (launch.Workspace(view, tokens, hidden, top_k, cpu, num_sms=132) for _ in range(2))
    rows = schedule.empty_schedule(schedule.max_tiles(tokens, top_k, ranks, local), local, cpu)
    x, weights = zeros(tokens, hidden), torch.zeros(tokens, top_k)
    matrices = zeros(local, width, hidden), zeros(local, width, hidden), zeros(local, hidden, width)
    of_shared = (zeros(shared_width, hidden), zeros(shared_width, hidden), zeros(hidden, shared_width)) if shared else None
    saved_rows = rows_to_save(tuning, tokens, top_k, ranks, local)
    tiles, ring = tuning.minibatch // TILE_M, tuning.macrobatch // TILE_M
    plan = ForwardPlan(minibatch_tiles=min(tiles, 16), ring_tiles=ring, parts=8)
    backward_plan = BackwardPlan(ring_tiles=ring, run=1, parts=8)
    size = lambda tensors: sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # noqa: E731
    weights_at_once, needs = 0, launch_backward.Needs()
    if precision == "fp8":
        quantized_experts = launch_fp8.QuantizedExperts.of(*matrices)
        _, saved = launch_fp8.kernel_arguments(workspace, rows, quantized_experts, None, saved_rows, True, plan)
        weights_at_once = size([tensor for pair in quantized_experts for tensor in pair])
        made.clear()
        launch_backward_fp8.prepare(workspace, rows, saved, weights, *matrices, plan=backward_plan)
        joined = made[1][1].numel() * 2  # the codes of gate and up in one
        weights_at_once = max(weights_at_once, size([tensor for pair in made for tensor in pair]) + joined)
        shared_saved = (zeros(tokens, max(shared_width, 8)),) * 2
        if of_shared:
            _, _, shared_saved, _ = launch_fp8.shared_arguments(workspace, rows, x, of_shared, None, True, plan)
            launch_backward_fp8.prepare_shared(workspace, rows, shared_saved, x, x, weights, of_shared, None, needs, None, backward_plan)
            shared_saved = shared_saved.shared_gate_TS, shared_saved.shared_up_TS
        saved = launch.Saved(saved.gate_CI, saved.up_CI, *shared_saved)
    else:
        _, saved, _ = launch.kernel_arguments(
            workspace, rows, x, *matrices, of_shared, None, None, saved_rows, True, plan, hidden, width, mxfp8=mxfp8
        )  # fmt: skip
        again = matrices[:2] if mxfp8 and launch_backward_mxfp8.may_be_unsaved(rows, saved) else None
        launch_backward.prepare(
            workspace, rows, saved, x, x, weights, *matrices, of_shared, plan=backward_plan, mxfp8=mxfp8, gate_up_again=again
        )  # fmt: skip
        if mxfp8:
            weights_at_once = size(matrices) + size(again or ())
            launch_mxfp8.kernel_arguments(
                of_blackwell, rows, launch_mxfp8.MxExperts.of(*matrices), None, saved_rows, True, plan
            )  # fmt: skip
            assert size([tensor for pair in made for tensor in pair]) < weights_at_once
            made.clear()
            numbers = launch_backward_mxfp8.MxTransposed.of(*matrices)
            launch_backward_mxfp8.prepare(of_blackwell, rows, saved, weights, *matrices, numbers, None, needs, None, backward_plan)
            assert size([tensor for pair in made for tensor in pair]) < weights_at_once
            if of_shared:
                launch_fp8.shared_arguments(of_blackwell, rows, x, of_shared, None, True, plan)
                launch_backward_fp8.prepare_shared(of_blackwell, rows, saved, x, x, weights, of_shared, None, needs, None, backward_plan)
    limit = config.gpu_memory(tokens, ranks, tuning, precision)
    taken = size([view.buffer]) + max(size(each.scratch.values()) for each in (workspace, of_blackwell))
    assert 0.9 * limit.workspace < taken <= limit.workspace
    kept = size([*vars(saved).values(), *vars(rows).values()]) + (x.numel() * 2 if config.shared_gate else 0)
    assert 0.9 * limit.kept < kept <= limit.kept
    results = 2 * size([x]) + size([weights]) + (size([x]) if shared else 0)
    assert results + weights_at_once == limit.passing
    assert limit.total == limit.workspace + limit.kept + limit.passing
    if not bf16:
        with pytest.raises(ValueError, match="precision='fp4': must be one of bf16, mxfp8, fp8"):
            config.gpu_memory(tokens, precision="fp4")


def test_gpu_memory_is_sized_by_the_most_tokens_that_may_come():
    config = MoEConfig(hidden_size=512, intermediate_size=768, num_experts=6, top_k=3)
    assert config.gpu_memory(100, 2, Tuning(max_tokens=700)) == config.gpu_memory(700, 2)
    assert config.gpu_memory(700, 2, Tuning(max_tokens=100)) == config.gpu_memory(700, 2)
    with pytest.raises(TypeError, match="tuning=2: must be a Tuning"):
        config.gpu_memory(100, tuning=2)
