"""The problem (`MoEConfig`) and the knobs (`Tuning`).

`MoEConfig` says what is computed; changing a field changes the result. `Tuning` says how; no field of it changes a bit of any output
or gradient. Both are frozen and check themselves on construction with messages that name the argument, its value and the rule.

Legend: H hidden, I intermediate, E experts in all, K choices per token, R ranks of the expert-parallel group.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mok.quantize import Precision

ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus"]

TILE_M = 128
"""Rows of a tile. Every expert's rows are padded to whole tiles; padding rows are zero. A property of the schedule, not a knob."""


def _reject(name: str, value: object, rule: str) -> None:
    raise ValueError(f"{name}={value!r}: {rule}")


def plain(owner: object) -> None:
    """Replace other kinds of numbers (NumPy's, fractions) by Python's, which every rank can pass on."""
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        value = getattr(owner, field.name)
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            object.__setattr__(owner, field.name, int(value))
        elif isinstance(value, numbers.Real) and not isinstance(value, bool | numbers.Integral) and type(value) is not float:
            object.__setattr__(owner, field.name, float(value))


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r}: must be an int, not {type(value).__name__}")
    if value < minimum:
        _reject(name, value, f"must be at least {minimum}")


def _check_float(name: str, value: object, minimum: float, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r}: must be a number, not {type(value).__name__}")
    if not math.isfinite(value) or value < minimum or (above and value == minimum):
        _reject(name, value, f"must be finite and {'above' if above else 'at least'} {minimum:g}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be a bool, not {type(value).__name__}")


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a rank. workspace: once for all layers of a group with the same H, K and E; kept: of every forward until its backward;
    passing: for as long as a call or its results live."""

    workspace: int
    kept: int
    passing: int

    @property
    def total(self) -> int:
        """Of one layer's forward and backward."""
        return self.workspace + self.kept + self.passing


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A Mixture-of-Experts layer: router, routed SwiGLU experts, shared experts.

    Sizes
        hidden_size: H, width of a token.
        intermediate_size: I, width of one routed expert.
        num_experts: E, routed experts in all.
        top_k: K, experts chosen per token.
        num_shared_experts: 0, 1 or n; n shared experts are one SwiGLU of width n * shared_intermediate_size.
        shared_intermediate_size: width of one shared expert; None means intermediate_size.

    Router (scores in fp32, whatever the layer's dtype)
        score: "softmax" over the E logits, "sigmoid", or "sqrt_softplus" (sqrt(softplus(logit))).
        selection_bias: a bias per expert that takes part in the choice only and carries no gradient (loss-free balancing,
            arXiv:2408.15664).
        renormalize: divide the K chosen scores by their sum.
        scaling_factor: multiplies the weights, after renormalization.
        num_groups, top_groups: the experts form num_groups equal groups and only those of the top_groups best groups may be chosen; a
            group is as good as the sum of its two best biased scores (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        balance_loss_weight: weight of the sequence-wise balance loss (same paper); 0 means none.

    Activation
        clamp, shared_clamp: L in silu(min(gate, L)) * clamp(up, -L, L), for routed and shared experts separately; None means no clamp.
        shared_gate: multiply the shared experts' output by sigmoid(x . g) with a learned vector g of H values.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule it breaks.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    score: ScoreFunction = "softmax"
    selection_bias: bool = False
    renormalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    balance_loss_weight: float = 0.0
    clamp: float | None = None
    shared_clamp: float | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_groups", "top_groups"):
            _check_int(name, getattr(self, name), 1)
        _check_int("num_shared_experts", self.num_shared_experts, 0)
        if self.shared_intermediate_size is not None:
            _check_int("shared_intermediate_size", self.shared_intermediate_size, 1)
            if self.num_shared_experts == 0:
                _reject("shared_intermediate_size", self.shared_intermediate_size, "needs num_shared_experts of at least 1")
        if self.top_k > self.num_experts:
            _reject("top_k", self.top_k, f"must be at most num_experts={self.num_experts}")
        if self.score not in get_args(ScoreFunction):
            _reject("score", self.score, f"must be one of {', '.join(get_args(ScoreFunction))}")
        for name in ("selection_bias", "renormalize", "shared_gate"):
            _check_bool(name, getattr(self, name))
        _check_float("scaling_factor", self.scaling_factor, 0.0, above=True)
        _check_float("balance_loss_weight", self.balance_loss_weight, 0.0)
        for name in ("clamp", "shared_clamp"):
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), 0.0, above=True)
        if self.num_experts % self.num_groups:
            _reject("num_groups", self.num_groups, f"must divide num_experts={self.num_experts}")
        if self.top_groups > self.num_groups:
            _reject("top_groups", self.top_groups, f"must be at most num_groups={self.num_groups}")
        per_group = self.num_experts // self.num_groups
        if self.num_groups > 1 and per_group < 2:
            _reject("num_groups", self.num_groups, "a group is scored by its two best experts and needs at least 2 of them")
        if self.top_k > self.top_groups * per_group:
            _reject("top_k", self.top_k, f"must be at most top_groups * experts per group = {self.top_groups * per_group}")
        for name in ("shared_gate", "shared_clamp"):
            if getattr(self, name) and self.num_shared_experts == 0:
                _reject(name, getattr(self, name), "needs num_shared_experts of at least 1")
        plain(self)

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together; 0 without shared experts."""
        return self.num_shared_experts * (self.shared_intermediate_size or self.intermediate_size)

    def gpu_memory(self, tokens: int, ranks: int = 1, tuning: Tuning | None = None, precision: Precision = "bf16") -> GpuMemory:
        """The most that a layer takes on a GPU beside parameters, their gradients, x and dY, for `tokens` tokens of a rank,
        or `tuning.max_tokens`, by which memory is sized, if these are more.

        With T tokens, L = ceil(E / R) experts of this rank, P = R T K + 128 L rows at most, M = min(P, macrobatch) rows of the rings (two
        and a half minibatches, if that is more), C saved rows, S = `shared_width`, and h = ceil(H / 128) and i = ceil(I / 128) scales of a
        row, in bytes:

            workspace  bf16   2 T H (K + 2) + 12 T K + M (4 H + 6 I + I / 16 + 4) + 6 T S
                       fp8    2 T (H K + H + h) + 12 T K + M (6 H + 9 I + 2 h + 3 i + I / 16 + 4) + 6 T S
                       mxfp8  2 T (H K + H + 4 h) + 12 T K + M (max(4 H + 10 I, 6 H + 9 I + 8 h + 12 i) + I / 16 + 4) + 6 T S
                       12 H I more where P > M; and the lists of tasks
            kept       4 C I + 8 P + 4 T S, and 2 T H more for a gated shared expert
            passing    4 T H + 4 T K, and 2 T H more with shared experts; of quantized weights
                       fp8    3 L H I, 5 where C < P
                       mxfp8  6 L H I, 10 where C < P: in bf16, which Hopper multiplies; less on Blackwell, but where H or I is
                              no multiple of 256

        In mxfp8 the maximum is of Hopper's rings and Blackwell's.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        _check_int("tokens", tokens, 0)
        _check_int("ranks", ranks, 1)
        if precision not in get_args(Precision):
            _reject("precision", precision, f"must be one of {', '.join(get_args(Precision))}")
        if tuning is not None and not isinstance(tuning, Tuning):
            raise TypeError(f"tuning={tuning!r}: must be a Tuning")
        knobs, ceil, local = tuning or Tuning(), lambda a, b: -(-a // b), -(-self.num_experts // ranks)
        t = max(tokens, knobs.max_tokens or 0)
        h, i, k, s = self.hidden_size, self.intermediate_size, self.top_k, self.shared_width
        tiles = ranks * t * k // TILE_M + local
        rows = tiles * TILE_M
        ring = max(min(rows, max(knobs.macrobatch, 5 * knobs.minibatch // 2)), 2 * TILE_M)
        saved = rows if ranks == 1 else t * k + t * k // 4 + local * TILE_M
        saved = min(rows, saved if knobs.saved_rows is None else knobs.saved_rows)
        cut, recompute = rows > ring, saved < rows
        scales_h, scales_i = ceil(h, TILE_M), ceil(i, TILE_M)  # of 128 columns
        of_h, of_parts = ring * i, 16 * ring * ceil(i, 256)
        if precision != "bf16" and s:  # the shared experts have launches of their own, with rings of two tiles
            of_h, of_parts = max(of_h, 2 * TILE_M * s), max(of_parts, 32 * TILE_M * ceil(s, 256))
        backward = ring * 4 + of_parts + (12 * h * i if cut else 0) + 4 * t * s
        if precision == "bf16":
            peers = 2 * t * h * (k + 2) + 12 * t * k
            rings = 4 * ring * h + 6 * of_h + backward + 2 * t * s
            weights = 0
        elif precision == "fp8":
            peers = 2 * t * (h * k + h + scales_h) + 12 * t * k
            rings = ring * (6 * h + 3 * i + 2 * scales_h + 3 * scales_i) + 6 * of_h + backward + 2 * t * s + 2 * TILE_M * s
            weights = local * ((5 if recompute else 3) * h * i + (7 if recompute else 5) * scales_h * scales_i)
        else:
            peers = 2 * t * (h * k + h + 4 * scales_h) + 12 * t * k
            scaled = ring * (6 * h + 3 * i + 8 * scales_h + 12 * scales_i) + 6 * of_h + 2 * TILE_M * s
            rings = max(ring * (4 * h + 10 * i), scaled) + backward + 2 * t * s
            weights = (10 if recompute else 6) * local * h * i
        shared_tiles = ceil(t, TILE_M) if s else 0
        tasks = tiles * (8 + ceil(i, 128) + ceil(h, 256)) + shared_tiles * (ceil(s, 128) + ceil(h, 256))  # 8: of pulls
        of_weights = lambda width: 2 * ceil(width, 128) * ceil(h, 256) + ceil(h, 128) * ceil(width, 256)  # noqa: E731
        grads = tiles * (8 + 2 * ceil(i, 128) + ceil(h, 256)) + shared_tiles * (ceil(s, 256) + ceil(h, 256))
        grads += (local + (tiles // max(1, ring // (2 * TILE_M)) if cut else 0)) * of_weights(i) + (of_weights(s) if s else 0)
        lists = 8 * tasks + 32 * grads + 64 * (tiles + shared_tiles) + 4096
        return GpuMemory(
            workspace=peers + 8 * self.num_experts + rings + lists,
            kept=4 * saved * i + 8 * rows + 4 * t * max(s, 8) + (2 * t * h if self.shared_gate else 0) + 16 * (tiles + self.num_experts),
            passing=4 * t * h + 4 * t * k + (2 * t * h if s else 0) + weights,
        )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> MoEConfig:
        """The layer of a published model, e.g. `MoEConfig.preset("deepseek-v3")`; `changes` replace single fields.

        Raises:
            TypeError: a name that is no string.
            ValueError: unknown name (the message lists the known ones), or a model whose layer is not supported yet.
        """
        if not isinstance(name, str):
            raise TypeError(f"name={name!r}: must be a str, not {type(name).__name__}")
        key = name.lower()
        if key.startswith("gpt-oss"):
            raise ValueError(
                f"name={name!r}: not supported yet: its experts use (up + 1) * gate * sigmoid(1.702 * gate) and biases on both "
                "projections, and this layer computes bias-free SwiGLU"
            )
        if key not in PRESETS:
            raise ValueError(f"name={name!r}: must be one of {', '.join(sorted(PRESETS))}")
        return cls(**{**PRESETS[key], **changes})


def _sigmoid_bias(hidden: int, width: int, experts: int, k: int, scale: float, **more: Any) -> dict[str, Any]:
    """The DeepSeek-V3 manner: sigmoid scores, selection bias, renormalized, one shared expert of the routed width."""
    return dict(
        hidden_size=hidden, intermediate_size=width, num_experts=experts, top_k=k, num_shared_experts=1, score="sigmoid",
        selection_bias=True, scaling_factor=scale, **more,
    )  # fmt: skip


def _softmax(hidden: int, width: int, experts: int, k: int, **more: Any) -> dict[str, Any]:
    return dict(hidden_size=hidden, intermediate_size=width, num_experts=experts, top_k=k, score="softmax", **more)


_DEEPSEEK_V3 = _sigmoid_bias(7168, 2048, 256, 8, 2.5, num_groups=8, top_groups=4)
_V4 = dict(score="sqrt_softplus", selection_bias=True, num_shared_experts=1, clamp=10.0)
_KIMI_K2 = _sigmoid_bias(7168, 2048, 384, 8, 2.827)
_GLM_5 = _sigmoid_bias(6144, 2048, 256, 8, 2.5)

PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-v3.1": _DEEPSEEK_V3,
    "deepseek-v3.2": _DEEPSEEK_V3,
    # Published codes for V4 differ on clamping the shared expert; here only the routed ones are clamped. shared_clamp=10.0 does both.
    "deepseek-v4-flash": dict(hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=6, scaling_factor=1.5, **_V4),
    "deepseek-v4-pro": dict(hidden_size=7168, intermediate_size=3072, num_experts=384, top_k=6, scaling_factor=2.5, **_V4),
    "kimi-k2": _KIMI_K2,
    "kimi-k2-thinking": _KIMI_K2,
    "kimi-k2.5": _KIMI_K2,
    "kimi-k2.6": _KIMI_K2,
    "kimi-k2.7-code": _KIMI_K2,
    "glm-4.5": _sigmoid_bias(5120, 1536, 160, 8, 2.5),
    "glm-4.5-air": _sigmoid_bias(4096, 1408, 128, 8, 1.0),
    "glm-5": _GLM_5,
    "glm-5.2": _GLM_5,
    "qwen3-30b-a3b": _softmax(2048, 768, 128, 8),
    "qwen3-235b-a22b": _softmax(4096, 1536, 128, 8),
    "qwen3-next-80b-a3b": _softmax(2048, 512, 512, 10, num_shared_experts=1, shared_gate=True),
    "qwen3.5-397b-a17b": _softmax(4096, 1024, 512, 10, num_shared_experts=1, shared_gate=True),
    "minimax-m2": {**_sigmoid_bias(3072, 1536, 256, 8, 1.0), "num_shared_experts": 0},
    "mixtral-8x7b": _softmax(4096, 14336, 8, 2),
    "olmoe-1b-7b": _softmax(2048, 1024, 64, 8, renormalize=False),
    "moonlight-16b-a3b": {**_sigmoid_bias(2048, 1408, 64, 6, 2.446), "num_shared_experts": 2},
    "deepseek-v2-lite": _softmax(2048, 1408, 64, 6, renormalize=False, num_shared_experts=2),
}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the layer is computed. No field changes a bit of any output or gradient.

    minibatch: rows that are made ready together; a multiple of 128. On a GPU at most so many: `mok.tune` says how many are best.
    macrobatch: rows of the ring that holds dispatched rows; a multiple of minibatch. It bounds memory, never correctness.
    saved_rows: how many of a rank's rows keep gate and up (2 * I values each) from forward to backward; the rest are recomputed in
        backward. None keeps all (in a group of GPUs, a quarter more than under a balanced load), 0 none.
    timeout_s: about how many seconds a rank waits for another one before it raises `FabricError`. In its first call a rank may wait for
        another one's compiler.
    num_sms: on a GPU, programs of a kernel; 0 means one per multiprocessor. What is left serves other kernels, NCCL's for instance.
    max_tokens: on a GPU, the most tokens that a rank of a group will bring; None means as many as the first call brings. Memory for
        dispatch and combine is sized by it once, since later calls never wait for the host. A rank without a group needs no limit.

    Raises:
        TypeError, ValueError: naming the argument, its value and the rule it breaks.
    """

    minibatch: int = 4096
    macrobatch: int = 32768
    saved_rows: int | None = None
    timeout_s: float = 600.0
    num_sms: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_int("minibatch", self.minibatch, 1)
        if self.minibatch % TILE_M:
            _reject("minibatch", self.minibatch, f"must be a multiple of {TILE_M}")
        _check_int("macrobatch", self.macrobatch, 1)
        if self.macrobatch % self.minibatch:
            _reject("macrobatch", self.macrobatch, f"must be a multiple of minibatch={self.minibatch}")
        if self.saved_rows is not None:
            _check_int("saved_rows", self.saved_rows, 0)
        _check_float("timeout_s", self.timeout_s, 0.0, above=True)
        _check_int("num_sms", self.num_sms, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        plain(self)

    def replace(self, **changes: Any) -> Tuning:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)
