"""The router's choice and its gradient, each in one launch: what `mok.router` says of fp32 logits, a warp for a few tokens.

A warp holds whole rows, so sums and maxima over a row stay within it. Experts are chosen in K rounds, each of which takes a row's largest
value and strikes it out. Values are compared as integers in the same order, for which the hardware reduces a warp in one instruction.

A row's bits depend on the row alone. The order of its sums is that in which threads hold it, and this Triton chooses when it compiles: so
whatever may differ from call to call is known only at run time, and every tensor begins at a multiple of 16 bytes.

exp and log1p are made here of additions and multiplications. Triton's exp is the hardware's exp2 of x log2(e), and the rounding of this
product alone can be |x| / 2^24 of the result, 40 units in the last place at -40; the hardware's log2 has no relative accuracy around 1, and
libdevice's functions are built to take subnormal numbers for zero. Largest errors found, in units in the last place, subnormal results
among them: exp 1.1, log1p 2.0, sigmoid 2.4, sqrt(softplus) 1.9. Under the interpreter exp and log1p have the same bits.

Legend: T tokens, E experts in all, K choices per token, G groups, P experts of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mok import router
from mok.kernels.launcher import aligned, cdiv, enqueue, next_power_of_2, on_device

MOST_EXPERTS = 1024
ELEMENTS = 512  # of a warp, 16 of a thread; more than 1024, which only groups of odd sizes fill up to, are shared by several warps

TAIL = tl.constexpr(router._TAIL)
SUM_EPS = tl.constexpr(router.SUM_EPS)
STRUCK_OUT = tl.constexpr(-(2**31))  # below the key of every value
LARGEST = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2_HIGH = tl.constexpr(0.693359375)  # nine bits, so that its product with any exponent is exact
LN_2_LOW = tl.constexpr(-0.00021219444005469057)
ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a small number: its integer part, in the last bits
ROUNDER_BITS = tl.constexpr(0x4B400000)


# ---- arithmetic ----


@triton.jit
def exp(x):
    """e^x for x <= 0 or NaN: 2^n e^r with |r| <= ln(2) / 2, of which e^r is a polynomial; subnormal results, too, are rounded once.

    Example: x = -1: n = -1, r = -1 + 0.693 = -0.307, e^r = 0.736, result 0.368.
    """
    x = tl.where(x < -105.0, -105.0, x)  # zero, as from -104 on
    shifted = x * LOG2_E + ROUNDER
    n = shifted - ROUNDER
    r = (x - n * LN_2_HIGH) - n * LN_2_LOW
    tail = 1 / 24 + r * (1 / 120 + r * (1 / 720 + r * (1 / 5040)))
    power = 1.0 + (r + (r * r) * (1 / 2 + r * (1 / 6 + r * tail)))
    exponent = shifted.to(tl.int32, bitcast=True) - ROUNDER_BITS
    half = exponent >> 1  # 2^n may be too small for fp32
    return power * two_to(half) * two_to(exponent - half)


@triton.jit
def two_to(n):
    """2^n for an integer n from -126 to 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log1p(e):
    """ln(1 + e) for e from 0 to 1: 2 artanh(s) with s = e / (2 + e) <= 1/3, a series of odd powers."""
    s = tl.div_rn(e, 2.0 + e)
    q = s * s
    tail = 1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))
    return 2.0 * (s + s * (q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * tail)))))


@triton.jit
def scores_of(x, SCORE: tl.constexpr):
    """`mok.router._scores`. Softmax: x is -inf in columns that are none."""
    if SCORE == "softmax":
        e = exp(x - tl.max(x, 1, keep_dims=True))
        result = tl.div_rn(e, tl.broadcast_to(tl.sum(e, 1, keep_dims=True), e.shape))
    elif SCORE == "sigmoid":
        e = exp(-tl.abs(x))
        result = tl.div_rn(tl.where(x < 0, e, 1.0), 1.0 + e)
    else:
        in_tail = x < TAIL
        e = exp(tl.where(in_tail, x * 0.5, -tl.abs(x)))
        result = tl.where(in_tail, e, tl.sqrt_rn(tl.where(x > 0, x, 0.0) + log1p(e)))
    return result


# ---- the choice ----


@triton.jit
def key_of(value):
    """fp32 -> int32 in the same order, NaN the largest. Its own inverse (`value_of`). No value here is -0, which is not told from 0."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & LARGEST), LARGEST)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & LARGEST)).to(tl.float32, bitcast=True)


@triton.jit
def best(keys, places, AXIS: tl.constexpr):
    """Where the largest key along an axis stands, of equal ones that at the lowest place: true once."""
    largest = tl.max(keys, AXIS, keep_dims=True)
    first = tl.min(tl.where(keys == largest, places, LARGEST), AXIS, keep_dims=True)
    return places == first


@triton.jit
def strike_out_groups(keys, G: tl.constexpr, TOP_GROUPS: tl.constexpr, T2: tl.constexpr, G2: tl.constexpr, P2: tl.constexpr):
    """Keys [T2, G2 * P2] of experts, all but those of each row's TOP_GROUPS best groups struck out."""
    members, groups = tl.arange(0, P2)[None, None, :], tl.arange(0, G2)[None, :]
    keys = tl.reshape(keys, (T2, G2, P2))
    first = tl.max(keys, 2)
    second = tl.max(tl.where(best(keys, members, 2), STRUCK_OUT, keys), 2)
    goodness = tl.where(groups < G, key_of(value_of(first) + value_of(second)), STRUCK_OUT)
    for _ in range(TOP_GROUPS):
        goodness = tl.where(best(goodness, groups, 1), STRUCK_OUT, goodness)
    keys = tl.where(tl.expand_dims(goodness == STRUCK_OUT, 2), keys, STRUCK_OUT)  # the chosen ones, and those that are none
    return tl.reshape(keys, (T2, G2 * P2))


@triton.jit(do_not_specialize=["T", "has_bias"])  # one compilation for any number of tokens
def choose_kernel(
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, scores_ptr, T, has_bias, factor,
    E: tl.constexpr, K: tl.constexpr, G: tl.constexpr, TOP_GROUPS: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    T2: tl.constexpr, G2: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    """T2 tokens, in a tile of G2 groups of P2 experts: powers of two, G and P or more. has_bias: 1 or 0.

    Each round writes its number beside the expert it takes, so that at the end every chosen one knows its slot.

    Example, K = 2: biased scores [1, 0.881, 0.881, 0.269]: slots [0, 1, -1, -1]; expert 0 stores to place 0, and expert 1 to place 1.
    """
    P: tl.constexpr = E // G
    rows = (tl.program_id(0).to(tl.int64) * T2 + tl.arange(0, T2))[:, None]
    columns = tl.arange(0, G2 * P2)[None, :]
    if G == 1:
        experts, real = columns, columns < E
    else:
        experts, real = columns // P2 * P + columns % P2, (columns % P2 < P) & (columns < G * P2)
    inside = (rows < T) & real
    scores = scores_of(tl.load(logits_ptr + rows * E + experts, mask=inside, other=float("-inf")), SCORE)
    tl.store(scores_ptr + rows * E + experts, scores, mask=inside)

    bias = tl.load(bias_ptr + experts, mask=real & (has_bias > 0), other=0.0)
    keys = tl.where(real, key_of(scores + bias), STRUCK_OUT)
    if G > 1:
        keys = strike_out_groups(keys, G, TOP_GROUPS, T2, G2, P2)
    slots = tl.full((T2, G2 * P2), -1, tl.int32)
    for k in range(K):
        taken = best(keys, columns, 1)
        slots = tl.where(taken, k, slots)
        keys = tl.where(taken, STRUCK_OUT, keys)

    chosen = slots >= 0
    weights = scores
    if RENORMALIZE:
        total = tl.sum(tl.where(chosen, scores, 0.0), 1, keep_dims=True) + SUM_EPS
        weights = tl.div_rn(scores, tl.broadcast_to(total, scores.shape))
    chosen = chosen & inside
    tl.store(ids_ptr + rows * K + slots, tl.broadcast_to(experts, slots.shape).to(tl.int64), mask=chosen)
    tl.store(weights_ptr + rows * K + slots, weights * factor, mask=chosen)


def choose(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    score: str,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids int64 [T, K], weights [T, K] and scores [T, E] of fp32 logits with at most `MOST_EXPERTS` experts: `mok.router.choose_experts`.

    No product is fused with a sum.
    """
    logits = aligned(logits_TE)
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights, scores = torch.empty(tokens, top_k, device=logits.device), torch.empty_like(logits)
    padded_groups, padded = (next_power_of_2(n) for n in (num_groups, experts // num_groups))
    rows, warps = _tile(padded_groups * padded)
    if tokens:
        with on_device(logits.device):
            enqueue(
                choose_kernel, (cdiv(tokens, rows),),
                logits, logits if bias_E is None else aligned(bias_E.to(torch.float32)), ids, weights, scores, tokens,
                int(bias_E is not None), scaling_factor, E=experts, K=top_k, G=num_groups, TOP_GROUPS=top_groups, SCORE=score,
                RENORMALIZE=renormalize, T2=rows, G2=padded_groups, P2=padded, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return ids, weights, scores


# ---- its gradient ----


@triton.jit(do_not_specialize=["T", "num_weights", "num_scores"])
def choose_backward_kernel(
    d_weights_ptr, d_scores_ptr, logits_ptr, ids_ptr, scores_ptr, d_logits_ptr, T, num_weights, num_scores, factor,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, UNROLL: tl.constexpr, T2: tl.constexpr,
    E2: tl.constexpr,
):  # fmt: skip
    """T2 tokens. Every expert looks for itself among the ids and takes the gradient of the weight that stands there.

    num_weights, num_scores: T, or 0 where there is no such gradient; not known when the kernel is compiled, so that zeros and no gradient
    have the same bits.
    """
    row = tl.program_id(0).to(tl.int64) * T2 + tl.arange(0, T2)
    rows, experts = row[:, None], tl.arange(0, E2)[None, :]
    inside = (rows < T) & (experts < E)
    at = rows * E + experts
    scores = tl.load(scores_ptr + at, mask=inside, other=0.0)
    d = tl.load(d_scores_ptr + at, mask=inside & (rows < num_scores), other=0.0)
    chosen = tl.zeros((T2, E2), tl.int1)
    d_chosen = tl.zeros((T2, E2), tl.float32)
    for k in tl.range(0, K, loop_unroll_factor=UNROLL):  # so that some loads are on their way at a time
        expert = tl.load(ids_ptr + row * K + k, mask=row < T, other=-1).to(tl.int32)
        d_weight = tl.load(d_weights_ptr + row * K + k, mask=row < num_weights, other=0.0) * factor
        here = experts == expert[:, None]
        d_chosen = tl.where(here, d_weight[:, None], d_chosen)
        chosen = chosen | here
    if RENORMALIZE:
        shares = tl.where(chosen, scores, 0.0)
        total = tl.broadcast_to(tl.sum(shares, 1, keep_dims=True) + SUM_EPS, scores.shape)
        along = tl.sum(d_chosen * tl.div_rn(shares, total), 1, keep_dims=True)
        d_chosen = tl.where(chosen, tl.div_rn(d_chosen - along, total), 0.0)
    d += d_chosen
    if SCORE == "softmax":
        d = scores * (d - tl.sum(d * scores, 1, keep_dims=True))
    elif SCORE == "sigmoid":
        d = d * (scores * (1.0 - scores))
    else:
        x = tl.load(logits_ptr + at, mask=inside, other=0.0)
        e = exp(-tl.abs(x))
        d = d * tl.where(x < TAIL, scores * 0.5, tl.div_rn(tl.where(x < 0, e, 1.0), (1.0 + e) * (2.0 * scores)))
    tl.store(d_logits_ptr + at, d, mask=inside)


def choose_backward(
    d_weights_TK: Tensor | None,
    d_scores_TE: Tensor | None,
    logits_TE: Tensor,
    ids_TK: Tensor,
    scores_TE: Tensor,
    score: str,
    renormalize: bool,
    scaling_factor: float,
) -> Tensor:
    """d_logits [T, E] of what `choose` returned; a gradient that is None is one of zeros."""
    logits, ids, scores = aligned(logits_TE), aligned(ids_TK), aligned(scores_TE)
    (tokens, experts), top_k = logits.shape, ids.shape[1]
    d_logits = torch.empty_like(logits)
    padded = next_power_of_2(experts)
    rows, warps = _tile(padded)
    if tokens:
        with on_device(logits.device):
            enqueue(
                choose_backward_kernel, (cdiv(tokens, rows),),
                *(logits if d is None else aligned(d) for d in (d_weights_TK, d_scores_TE)), logits, ids, scores, d_logits, tokens,
                *(0 if d is None else tokens for d in (d_weights_TK, d_scores_TE)), scaling_factor, E=experts, K=top_k, SCORE=score,
                RENORMALIZE=renormalize, UNROLL=min(top_k, 8), T2=rows, E2=padded, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return d_logits


# ---- launches ----


def _tile(columns: int) -> tuple[int, int]:
    """Rows of a program, and its warps."""
    return max(ELEMENTS // columns, 1), max(columns // (2 * ELEMENTS), 1)
