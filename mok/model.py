"""A small language model of the DeepSeek-V3 kind, cut so that its bits do not depend on the number of ranks.

Pre-norm blocks of causal attention (rotary positions) and a feed-forward part: one dense SwiGLU in the first block, a `MoE` with one shared
expert in the others. Bytes in, logits over 256 bytes out.

The routed experts are sharded and `MoE.routed` gives the same bits for any number of ranks. Everything else is replicated, and a sum over
tokens (the gradient of a replicated weight) would change with the way the batch is cut. So the global batch is always cut into the same
number of slices, whatever the number of ranks: each slice goes through its own replica of the replicated modules. Replicas share the
memory of their parameters and have gradients of their own, which the training loop adds up in slice order.

Example: four slices on two ranks. Rank 0 runs slices 0 and 1 with two replicas, calls `routed` once on both, and holds the gradients g0
and g1 of each replicated weight; rank 1 holds g2 and g3. Every rank forms ((g0 + g1) + g2) + g3, as one rank alone would.

In bf16, which is what a GPU computes in, the same model is made of other operations: products and attention are the library's, each
chosen so that it adds in the same order every time (`_embed`, `_OrderedAttention`, `_Logits`).

Legend: B sequences, S positions, H hidden, N heads, D head width, V bytes (256), T tokens of a slice (B * S), E experts in all, K choices.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mok.config import MoEConfig, Tuning
from mok.layer import MoE
from mok.quantize import Precision
from mok.router import Routing, choose_experts
from mok.schedule import local_experts
from mok.torch_layer import TorchMoE

VOCABULARY = 256
LAYERS = ("mok", "torch", "torch-compiled")
"""Which layer computes the routed experts: `mok.MoE`, or `TorchMoE` as it is, or with its SwiGLU compiled."""

EXPERT_MATRICES = ("gate_EIH", "up_EIH", "down_EHI")


@dataclass(frozen=True)
class ModelConfig:
    """moe: the layer; its hidden size is the model's. layers: blocks in all, the first `dense` of them without experts. sequence:
    positions. heads, head_width: of attention."""

    moe: MoEConfig
    layers: int
    sequence: int
    heads: int
    head_width: int
    dense: int = 1

    @property
    def dense_width(self) -> int:
        """As wide as the experts that a token visits together, the shared one included (DeepSeek-V3: 9 * 2048)."""
        return self.moe.top_k * self.moe.intermediate_size + self.moe.shared_width


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _flash(q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)


class _OrderedAttention(torch.autograd.Function):
    """Causal flash attention with the backward that adds in a fixed order, which on a GPU is not the usual one.

    PyTorch offers it by a switch for all operations, many of which it makes slower; so the switch is on for this backward alone, and the
    forward, a small part of the model, runs again to come to it.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return _flash(q, k, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = _flash(*inputs)
        with _deterministic():
            return torch.autograd.grad(out, inputs, d_out)


def _attend(q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor) -> Tensor:
    """Causal attention; each dtype has its own form."""
    if q_BNSD.dtype == torch.bfloat16:
        return _OrderedAttention.apply(q_BNSD, k_BNSD, v_BNSD)
    return F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True)


class _Logits(torch.autograd.Function):
    """x [T, H] times W^T of W [E, H], both bf16: fp32 [T, E]."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        if x_TH.is_cuda:
            return torch.mm(x_TH, weight_EH.T, out_dtype=torch.float32)
        return x_TH.float() @ weight_EH.float().T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        x_TH, weight_EH = ctx.saved_tensors
        d_TE = d_logits_TE.to(x_TH.dtype)
        return d_TE @ weight_EH, d_TE.T @ x_TH


class Attention(nn.Module):
    """Causal attention with rotary positions: coordinate pairs (d, d + D/2) of q and k turn by position * 10000^(-2d/D)."""

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        hidden, self.head_width = config.moe.hidden_size, config.head_width
        self.qkv = nn.Linear(hidden, 3 * config.heads * self.head_width, bias=False, **factory)
        self.out = nn.Linear(config.heads * self.head_width, hidden, bias=False, **factory)
        frequency_D = 10000.0 ** (-torch.arange(0, self.head_width, 2) / self.head_width)
        angle_SD = torch.outer(torch.arange(config.sequence), frequency_D)
        self.register_buffer("cos_SD", angle_SD.cos().to(self.qkv.weight.device), persistent=False)
        self.register_buffer("sin_SD", angle_SD.sin().to(self.qkv.weight.device), persistent=False)

    def _turn(self, x_BNSD: Tensor) -> Tensor:
        a, b = x_BNSD.chunk(2, dim=-1)
        turned = torch.cat((a * self.cos_SD - b * self.sin_SD, b * self.cos_SD + a * self.sin_SD), dim=-1)
        return turned.to(x_BNSD.dtype)

    def forward(self, x_BSH: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSH).unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        q, k = self._turn(q), self._turn(k)
        return self.out(_attend(q, k, v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False, **factory)
        self.up = nn.Linear(hidden, width, bias=False, **factory)
        self.down = nn.Linear(width, hidden, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """The replicated modules of a block: all of a dense one; of a MoE block all but the routed experts."""

    def __init__(self, config: ModelConfig, moe: MoE | TorchMoE | None, **factory: Any) -> None:
        super().__init__()
        hidden = config.moe.hidden_size
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-6, **factory)
        self.attention = Attention(config, **factory)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-6, **factory)
        if moe is None:
            self.ffn = SwiGLU(hidden, config.dense_width, **factory)
        else:
            assert moe.shared is not None
            self.router, self.shared = moe.router, moe.shared

    def attend(self, x_BSH: Tensor) -> Tensor:
        return x_BSH + self.attention(self.attention_norm(x_BSH))

    def share(self, x_TH: Tensor) -> Tensor:
        """The shared expert's output."""
        shared = self.shared
        if x_TH.dtype != torch.bfloat16:
            return shared(x_TH)
        return F.linear(F.silu(F.linear(x_TH, shared.gate_SH)) * F.linear(x_TH, shared.up_SH), shared.down_HS)


class Trunk(nn.Module):
    """Every replicated module of the model."""

    def __init__(self, config: ModelConfig, moes: list[MoE | TorchMoE], **factory: Any) -> None:
        super().__init__()
        hidden = config.moe.hidden_size
        self.embedding = nn.Embedding(VOCABULARY, hidden, **factory)
        self.blocks = nn.ModuleList(Block(config, moe, **factory) for moe in [*[None] * config.dense, *moes])
        self.norm = nn.RMSNorm(hidden, eps=1e-6, **factory)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, **factory)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        weight_VH = self.embedding.weight
        if weight_VH.dtype != torch.bfloat16:
            return self.embedding(tokens_BS)
        # As a product with ones and zeros, so that the gradient is one, too.
        one_hot_BSV = tokens_BS[..., None] == torch.arange(VOCABULARY, device=tokens_BS.device)
        return one_hot_BSV.to(weight_VH.dtype) @ weight_VH


def _route(blocks: list[Block], xs_TH: list[Tensor]) -> list[Routing]:
    """The routing of every slice by its own replica of the router."""
    if xs_TH[0].dtype != torch.bfloat16:
        return [block.router(x) for block, x in zip(blocks, xs_TH, strict=True)]
    # A token's choice does not depend on other tokens: one call for all slices.
    router = blocks[0].router
    logits_TE = torch.cat([_Logits.apply(x, block.router.weight) for block, x in zip(blocks, xs_TH, strict=True)])
    parts = [tensor.split(len(xs_TH[0])) for tensor in choose_experts(logits_TE, router.config, router.bias)]
    return [Routing(*part) for part in zip(*parts, strict=True)]


def _replica(trunk: Trunk) -> Trunk:
    """A copy that shares the memory of parameters and buffers, with gradients of its own."""
    twin = copy.deepcopy(trunk)
    for mine, other in zip((*twin.parameters(), *twin.buffers()), (*trunk.parameters(), *trunk.buffers()), strict=True):
        mine.data = other.data
    return twin


class _MoE(MoE):
    _draws_weights = False

    def reset_parameters(self) -> None:
        """Nothing: `LanguageModel.initialize` sets every parameter."""


class LanguageModel(nn.Module):
    """The model of one rank, with `replicas` slices of the global batch on it; without values until `initialize`.

    dtype: float32, or bfloat16 on any device. layer: one of `LAYERS`. precision: of the routed experts' products, as in `mok.MoE`.
    """

    def __init__(
        self,
        config: ModelConfig,
        replicas: int = 1,
        group: Any = None,
        tuning: Tuning | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        layer: str = "mok",
        precision: Precision = "bf16",
    ) -> None:
        super().__init__()
        self.config = config
        factory: dict[str, Any] = dict(dtype=dtype, device=device)
        moes: list[MoE | TorchMoE] = []
        for _ in range(config.layers - config.dense):
            if layer == "mok":
                moes.append(_MoE(config.moe, group, tuning=tuning or Tuning(), precision=precision, **factory))
            else:
                moes.append(TorchMoE(config.moe, compiled=layer == "torch-compiled", **factory))
        self.moes = nn.ModuleList(moes)
        self.trunk = Trunk(config, moes, **factory)
        self.replicas = [self.trunk] + [_replica(self.trunk) for _ in range(replicas - 1)]  # a list: not registered, same parameters

    def train(self, mode: bool = True) -> LanguageModel:
        super().train(mode)
        for trunk in self.replicas:
            trunk.train(mode)
        return self

    def forward(self, slices: list[Tensor]) -> tuple[list[Tensor], list[list[Routing]]]:
        """slices: int64 [B, S] per local slice. Returns logits_BSV per slice, and per MoE block the routing of every slice."""
        xs = [trunk.embed(tokens_BS) for trunk, tokens_BS in zip(self.replicas, slices, strict=True)]
        routings: list[list[Routing]] = []
        for index in range(self.config.layers):
            blocks = [cast(Block, trunk.blocks[index]) for trunk in self.replicas]
            xs = [block.attend(x) for block, x in zip(blocks, xs, strict=True)]
            normed = [block.ffn_norm(x) for block, x in zip(blocks, xs, strict=True)]
            if index < self.config.dense:
                ys = [block.ffn(x) for block, x in zip(blocks, normed, strict=True)]
            else:
                normed = [x.flatten(0, 1) for x in normed]
                shared = [block.share(x) for block, x in zip(blocks, normed, strict=True)]
                routing = _route(blocks, normed)
                out_TH = self.moe_blocks()[index - self.config.dense].routed(
                    torch.cat(normed),
                    torch.cat([r.ids_TK for r in routing]),
                    torch.cat([r.weights_TK for r in routing]),
                    shared=torch.cat(shared),
                )
                ys = [y.view_as(x) for y, x in zip(out_TH.split([len(x) for x in normed]), xs, strict=True)]
                routings.append(routing)
            xs = [x + y for x, y in zip(xs, ys, strict=True)]
        return [trunk.head(trunk.norm(x)) for trunk, x in zip(self.replicas, xs, strict=True)], routings

    def moe_blocks(self) -> list[MoE | TorchMoE]:
        return [cast("MoE | TorchMoE", moe) for moe in self.moes]

    def experts(self) -> dict[str, nn.Parameter]:
        """The sharded parameters by name."""
        return {
            f"blocks.{index}.experts.{name}": parameter
            for index, moe in enumerate(self.moe_blocks(), start=self.config.dense)
            for name, parameter in moe.named_parameters(recurse=False)
        }

    def _expert_matrices(self) -> dict[str, Tensor]:
        """As `experts`, under the same names and in the same shapes whichever layer it is."""
        return {
            f"blocks.{index}.experts.{matrix}": getattr(moe, matrix)
            for index, moe in enumerate(self.moe_blocks(), start=self.config.dense)
            for matrix in EXPERT_MATRICES
        }

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter from (seed, its name), so that neither ranks nor the order of modules matter; a GPU draws other values.

        Matrices are normal with deviation fan_in^-0.5, those that write into the residual stream smaller by (2 * layers)^-0.5.
        """
        for name, parameter in [*self.trunk.named_parameters(), *self._expert_matrices().items()]:
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(parameter.device)
            generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
            deviation = 1.0 if name.startswith("embedding") else parameter.shape[-1] ** -0.5
            if "down" in name or name.endswith("attention.out.weight"):
                deviation /= math.sqrt(2 * self.config.layers)
            full = torch.empty(parameter.shape, device=parameter.device).normal_(0.0, deviation, generator=generator)
            if isinstance(parameter, DTensor):
                group = parameter.device_mesh.get_group()
                mine = local_experts(self.config.moe.num_experts, group.size(), group.rank())
                parameter.to_local().copy_(full[mine.start : mine.stop])
            else:
                parameter.copy_(full)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
