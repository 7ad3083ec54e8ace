"""A small language model of the DeepSeek-V3 kind, cut so that its bits do not depend on the number of ranks.

Pre-norm blocks of causal attention (rotary positions) and a feed-forward part: one dense SwiGLU in the first block, a `MoE` with one shared
expert in the others. Bytes in, logits over 256 bytes out.

The routed experts are sharded and `MoE.routed` gives the same bits for any number of ranks. Everything else is replicated, and a sum over
tokens (the gradient of a replicated weight) would change with the way the batch is cut. So the global batch is always cut into the same
number of slices, whatever the number of ranks: each slice goes through its own replica of the replicated modules. Replicas share the
memory of their parameters and have gradients of their own, which the training loop adds up in slice order.

Example: four slices on two ranks. Rank 0 runs slices 0 and 1 with two replicas, calls `routed` once on both, and holds the gradients g0
and g1 of each replicated weight; rank 1 holds g2 and g3. Every rank forms ((g0 + g1) + g2) + g3, as one rank alone would.

Legend: B sequences, S positions, H hidden, D head width, V bytes (256), T tokens of a slice (B * S), E experts in all, K choices.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mok.config import MoEConfig, Tuning
from mok.layer import MoE
from mok.router import Routing
from mok.schedule import local_experts

VOCABULARY = 256
HEAD_WIDTH = 32
EXPERT_MATRICES = ("gate_EIH", "up_EIH", "down_EHI")


@dataclass(frozen=True)
class ModelConfig:
    """moe: the layer; its hidden size is the model's. layers: blocks in all, the first one dense. sequence: positions."""

    moe: MoEConfig
    layers: int
    sequence: int

    @property
    def dense_width(self) -> int:
        """As wide as the experts that a token visits together, the shared one included (DeepSeek-V3: 9 * 2048)."""
        return self.moe.top_k * self.moe.intermediate_size + self.moe.shared_width


class Attention(nn.Module):
    """Causal attention with rotary positions: coordinate pairs (d, d + D/2) of q and k turn by position * 10000^(-2d/D)."""

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, hidden: int, sequence: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        frequency_D = 10000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angle_SD = torch.outer(torch.arange(sequence), frequency_D)
        self.register_buffer("cos_SD", angle_SD.cos(), persistent=False)
        self.register_buffer("sin_SD", angle_SD.sin(), persistent=False)

    def _turn(self, x_BNSD: Tensor) -> Tensor:
        a, b = x_BNSD.chunk(2, dim=-1)
        return torch.cat((a * self.cos_SD - b * self.sin_SD, b * self.cos_SD + a * self.sin_SD), dim=-1)

    def forward(self, x_BSH: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSH).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self._turn(q), self._turn(k), v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """The replicated modules of a block: all of a dense one; of a MoE block all but the routed experts."""

    def __init__(self, config: ModelConfig, moe: MoE | None) -> None:
        super().__init__()
        hidden = config.moe.hidden_size
        self.attention_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.attention = Attention(hidden, config.sequence)
        self.ffn_norm = nn.RMSNorm(hidden, eps=1e-6)
        if moe is None:
            self.ffn = SwiGLU(hidden, config.dense_width)
        else:
            assert moe.shared is not None
            self.router, self.shared = moe.router, moe.shared

    def attend(self, x_BSH: Tensor) -> Tensor:
        return x_BSH + self.attention(self.attention_norm(x_BSH))


class Trunk(nn.Module):
    """Every replicated module of the model."""

    def __init__(self, config: ModelConfig, moes: list[MoE]) -> None:
        super().__init__()
        hidden = config.moe.hidden_size
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(Block(config, moe) for moe in [None, *moes])
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)


def _replica(trunk: Trunk) -> Trunk:
    """A copy that shares the memory of parameters and buffers, with gradients of its own."""
    twin = copy.deepcopy(trunk)
    for mine, other in zip((*twin.parameters(), *twin.buffers()), (*trunk.parameters(), *trunk.buffers()), strict=True):
        mine.data = other.data
    return twin


class LanguageModel(nn.Module):
    """The model of one rank, with `replicas` slices of the global batch on it."""

    def __init__(self, config: ModelConfig, replicas: int = 1, group: Any = None, tuning: Tuning | None = None) -> None:
        super().__init__()
        self.config = config
        moes = [MoE(config.moe, group, tuning=tuning or Tuning(), dtype=torch.float32) for _ in range(config.layers - 1)]
        self.moes = nn.ModuleList(moes)
        self.trunk = Trunk(config, moes)
        self.replicas = [self.trunk] + [_replica(self.trunk) for _ in range(replicas - 1)]  # a list: not registered, same parameters

    def train(self, mode: bool = True) -> LanguageModel:
        super().train(mode)
        for trunk in self.replicas:
            trunk.train(mode)
        return self

    def forward(self, slices: list[Tensor]) -> tuple[list[Tensor], list[list[Routing]]]:
        """slices: int64 [B, S] per local slice. Returns logits_BSV per slice, and per MoE block the routing of every slice."""
        xs = [trunk.embedding(tokens_BS) for trunk, tokens_BS in zip(self.replicas, slices, strict=True)]
        routings: list[list[Routing]] = []
        for index in range(self.config.layers):
            blocks = [cast(Block, trunk.blocks[index]) for trunk in self.replicas]
            xs = [block.attend(x) for block, x in zip(blocks, xs, strict=True)]
            normed = [block.ffn_norm(x) for block, x in zip(blocks, xs, strict=True)]
            if index == 0:
                ys = [block.ffn(x) for block, x in zip(blocks, normed, strict=True)]
            else:
                normed = [x.flatten(0, 1) for x in normed]
                shared = [block.shared(x) for block, x in zip(blocks, normed, strict=True)]
                routing = [block.router(x) for block, x in zip(blocks, normed, strict=True)]
                out_TH = self.moe_blocks()[index - 1].routed(
                    torch.cat(normed),
                    torch.cat([r.ids_TK for r in routing]),
                    torch.cat([r.weights_TK for r in routing]),
                    shared=torch.cat(shared),
                )
                ys = [y.view_as(x) for y, x in zip(out_TH.split([len(x) for x in normed]), xs, strict=True)]
                routings.append(routing)
            xs = [x + y for x, y in zip(xs, ys, strict=True)]
        return [trunk.head(trunk.norm(x)) for trunk, x in zip(self.replicas, xs, strict=True)], routings

    def moe_blocks(self) -> list[MoE]:
        return [cast(MoE, moe) for moe in self.moes]

    def experts(self) -> dict[str, nn.Parameter]:
        """The sharded parameters by name."""
        return {
            f"blocks.{index}.experts.{matrix}": getattr(moe, matrix)
            for index, moe in enumerate(self.moe_blocks(), start=1)
            for matrix in EXPERT_MATRICES
        }

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every parameter from (seed, its name), so that neither ranks nor the order of modules matter.

        Matrices are normal with deviation fan_in^-0.5, those that write into the residual stream smaller by (2 * layers)^-0.5.
        """
        for name, parameter in [*self.trunk.named_parameters(), *self.experts().items()]:
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
            deviation = 1.0 if name.startswith("embedding") else parameter.shape[-1] ** -0.5
            if "down" in name or name.endswith("attention.out.weight"):
                deviation /= math.sqrt(2 * self.config.layers)
            full = torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator)
            if isinstance(parameter, DTensor):
                group = parameter.device_mesh.get_group()
                mine = local_experts(self.config.moe.num_experts, group.size(), group.rank())
                parameter.to_local().copy_(full[mine.start : mine.stop])
            else:
                parameter.copy_(full)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
