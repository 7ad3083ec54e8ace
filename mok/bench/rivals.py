"""Other libraries' layers and products, where they are installed; what is not is listed with the reason.

    liger fused_moe      a layer, forward and backward, in Triton (liger-kernel)
    sonic-moe            a layer, forward and backward (sonic-moe)
    DeepGEMM products    the layer's two grouped products alone, as cuBLAS has them dense
    DeepEP + torch       expert parallelism: rows moved by DeepEP, once per rank and not per expert, products by torch

Legend: T tokens of this rank, H hidden, I intermediate, E experts in all, L experts of this rank, K choices per token, R ranks, N = T * K,
M rows received.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok.bench.baselines import ExchangedLayer, TorchLayer
from mok.bench.checks import Experts
from mok.config import TILE_M

DEEPEP = "DeepEP + torch"
DEEPGEMM = "DeepGEMM products"


class LigerLayer(TorchLayer):
    name = "liger fused_moe"

    def __init__(self, gate_EIH: Tensor, up_EIH: Tensor, down_EHI: Tensor) -> None:
        self.function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
        super().__init__(gate_EIH, up_EIH, down_EHI)

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.function.apply(x_TH, *self.leaves, ids_TK.to(torch.int32), weights_TK)


class SonicLayer(TorchLayer):
    name = "sonic-moe"

    def __init__(self, gate_EIH: Tensor, up_EIH: Tensor, down_EHI: Tensor) -> None:
        self.function = importlib.import_module("sonicmoe").moe_general_routing_inputs
        self.activation = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
        super().__init__(gate_EIH, up_EIH, down_EHI)

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        both, down = (leaf.permute(1, 2, 0) for leaf in self.leaves)
        tokens, top_k = ids_TK.shape
        token_N = torch.arange(tokens, dtype=torch.int32, device=x_TH.device).repeat_interleave(top_k, output_size=tokens * top_k)
        stream = torch.cuda.current_stream().cuda_stream if x_TH.is_cuda else 0
        expert_N, weight_N = ids_TK.to(torch.int32).flatten(), weights_TK.flatten()
        return self.function(
            x_TH, weight_N, token_N, expert_N, both, None, down, None, down.shape[-1], stream, self.activation, concat_layout=True
        )[0]  # fmt: skip


def deepgemm_products(experts: Experts, ids_TK: Tensor) -> Callable[[], None]:
    """Rows x gate and up, and h x down, by expert; an expert's rows are padded to whole tiles, the padding multiplied like the rest."""
    deep_gemm = importlib.import_module("deep_gemm")
    gate_EIH, _, down_EHI = experts
    height = TILE_M
    if hasattr(deep_gemm, "get_mk_alignment_for_contiguous_layout"):
        height = max(height, int(deep_gemm.get_mk_alignment_for_contiguous_layout()))
    counts = torch.bincount(ids_TK.flatten(), minlength=gate_EIH.shape[0])
    padded = (counts + height - 1) // height * height
    expert_M = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), padded).to(torch.int32)
    width, hidden = gate_EIH.shape[1:]
    both = torch.cat(experts[:2], dim=1)
    x, h = (torch.randn(len(expert_M), size, device=both.device).bfloat16() for size in (hidden, width))
    y, z = (torch.empty(len(expert_M), size, device=both.device, dtype=x.dtype) for size in (2 * width, hidden))

    def run() -> None:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, both, y, expert_M)
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(h, down_EHI, z, expert_M)

    return run


class _Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts, once each; the backward is the combine."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor, buffer: Any, num_experts: int) -> tuple[Any, ...]:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids_TK, num_experts)
        x, ids, weights, counts, handle, _ = buffer.dispatch(
            x_TH, topk_idx=ids_TK, topk_weights=weights_TK, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(ids)
        return x, weights, ids, (handle, counts)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor, d_weights: Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        d_x, d_weights, _ = ctx.buffer.combine(d_x.contiguous(), ctx.handle, topk_weights=d_weights.float())
        return d_x, d_weights, None, None, None


class _Combine(torch.autograd.Function):
    """Each token's sums from the ranks that had it; the backward is the dispatch."""

    @staticmethod
    def forward(ctx: Any, y_MH: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y_MH, handle)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return ctx.buffer.dispatch(d_out.contiguous(), handle=ctx.handle)[0], None, None


class DeepEpLayer(ExchangedLayer):
    """Expert parallelism over the default process group, R dividing E. The host waits once per forward, for the numbers of rows."""

    def __init__(self, gate_LIH: Tensor, up_LIH: Tensor, down_LHI: Tensor) -> None:
        deep_ep = importlib.import_module("deep_ep")
        super().__init__(gate_LIH, up_LIH, down_LHI)
        self.name, row = DEEPEP, 2 * gate_LIH.shape[2]
        configs = (deep_ep.Buffer.get_dispatch_config(self.ranks), deep_ep.Buffer.get_combine_config(self.ranks))
        size = max(config.get_nvl_buffer_size_hint(row, self.ranks) for config in configs)
        self.buffer = deep_ep.Buffer(dist.group.WORLD, size, 0)
        self.num_experts = self.ranks * self.num_local

    def __call__(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        x_MH, weights_MK, ids_MK, (handle, counts) = _Dispatch.apply(x_TH, weights_TK, ids_TK, self.buffer, self.num_experts)
        key = torch.where(ids_MK < 0, self.num_local, ids_MK).flatten()
        slot_S = key.sort(stable=True)[1][: sum(counts)]  # slots of other ranks' experts stand last
        ends_L = torch.tensor(counts, device=self.device).cumsum(0).to(torch.int32)
        token_S = slot_S // ids_MK.shape[1]
        y = self.experts(x_MH.index_select(0, token_S), ends_L) * weights_MK.flatten()[slot_S, None].to(x_MH.dtype)
        return _Combine.apply(torch.zeros_like(x_MH).index_add(0, token_S, y), self.buffer, handle)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def build(makers: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """What could be made, and why the others could not."""
    made, missing = {}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except ImportError as error:
            missing[name] = f"not importable ({_why(error)})"
        except Exception as error:
            missing[name] = f"did not start ({_why(error)})"
    return made, missing


def one_gpu(experts: Experts, ids_TK: Tensor) -> tuple[list[TorchLayer], dict[str, Callable[[], None]], dict[str, str]]:
    """Layers, products alone, and what is missing and why."""
    layers, missing = build({kind.name: lambda kind=kind: kind(*experts) for kind in (LigerLayer, SonicLayer)})  # type: ignore[misc]
    products, more = build({DEEPGEMM: lambda: deepgemm_products(experts, ids_TK)})
    missing |= more | {DEEPEP: "moves rows between GPUs: see the suite ep"}
    return list(layers.values()), products, missing


def several_gpus(experts: Experts) -> tuple[list[TorchLayer], dict[str, str]]:
    """The same over the default process group."""
    layers, missing = build({DEEPEP: lambda: DeepEpLayer(*experts)})
    return list(layers.values()), missing
