"""Mixtures of experts as Megatron-Core trains them, in plain PyTorch: what Mixtral and Qwen3 compute, from their sizes.

Values and the weights that are computed with are bf16, masters float32. Norms are one op, as in Transformer Engine;
rotary positions are applied in bf16; attention shares keys and values among heads; the router is computed in float32
(``--moe-router-dtype fp32``); gate and up projection of an expert are one product. Rotary positions and SwiGLU, for
which Megatron-Core has a kernel each, are several ops here, because PyTorch has none for either.

Sizes are those of the released configs: mistralai/Mixtral-8x22B-v0.1; Qwen/Qwen3-235B-A22B (arXiv 2505.09388, table 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from published_llama import rotated
from torch import Tensor, nn


@dataclass(frozen=True)
class MoeSizes:
    """Of a model whose layers are alike: a token takes ``chosen`` of the ``experts``, each of width ``inner``."""

    layers: int
    width: int
    heads: int
    groups: int
    head: int
    inner: int
    experts: int
    chosen: int
    vocabulary: int
    head_norms: bool
    """Whether queries and keys are normalised, those of each head alone."""
    epsilon: float
    base: float = 1e6
    """Of rotary positions."""


MIXTRAL_8X22B: Final = MoeSizes(
    layers=56,
    width=6144,
    heads=48,
    groups=8,
    head=128,
    inner=16384,
    experts=8,
    chosen=2,
    vocabulary=32000,
    head_norms=False,
    epsilon=1e-5,
)
QWEN3_235B: Final = MoeSizes(
    layers=94,
    width=4096,
    heads=64,
    groups=4,
    head=128,
    inner=1536,
    experts=128,
    chosen=8,
    vocabulary=151936,
    head_norms=True,
    epsilon=1e-6,
)


class RmsNorm(nn.Module):
    """Input and output are of the same dtype, under autocast too."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.epsilon)


class Attention(nn.Module):
    def __init__(self, sizes: MoeSizes) -> None:
        super().__init__()
        queries, keys = sizes.heads * sizes.head, sizes.groups * sizes.head
        self.head = sizes.head
        self.q = nn.Linear(sizes.width, queries, bias=False)
        self.k, self.v = (nn.Linear(sizes.width, keys, bias=False) for _ in range(2))
        self.out = nn.Linear(queries, sizes.width, bias=False)
        norms = (RmsNorm(sizes.head, sizes.epsilon) if sizes.head_norms else nn.Identity() for _ in range(2))
        self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head)) for project in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(
            rotated(q, angles), rotated(k, angles), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A router, and experts of which each token takes those of the highest probabilities, scaled to a sum of 1."""

    def __init__(self, sizes: MoeSizes) -> None:
        super().__init__()
        self.chosen = sizes.chosen
        self.router = nn.Parameter(torch.empty(sizes.experts, sizes.width))
        self.gate_up = nn.Parameter(torch.empty(sizes.experts, 2 * sizes.inner, sizes.width))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.width, sizes.inner))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities ``[tokens, chosen, 1]``, of the dtype of ``x [tokens, width]``, and numbers ``[tokens,
        chosen]`` of each token's experts."""
        with torch.autocast("cuda", enabled=False):
            probabilities, index = F.linear(x.float(), self.router).softmax(-1).topk(self.chosen, -1)
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
            return probabilities.unsqueeze(-1).to(x.dtype), index

    def forward(self, h: Tensor) -> Tensor:
        x = h.flatten(0, 1)
        probabilities, index = self.routed(x)
        y = torch.zeros_like(x)
        for number, (gate_up, down) in enumerate(zip(self.gate_up.unbind(), self.down.unbind(), strict=True)):
            token, slot = torch.where(index == number)
            gate, up = F.linear(x[token], gate_up).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, down)
            y = y.index_add(0, token, rows * probabilities[token, slot])
        return y.view_as(h)


class Layer(nn.Module):
    def __init__(self, sizes: MoeSizes) -> None:
        super().__init__()
        self.attention, self.experts = Attention(sizes), Experts(sizes)
        self.norm_1, self.norm_2 = (RmsNorm(sizes.width, sizes.epsilon) for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), angles)
        return x + self.experts(self.norm_2(x))


class PublishedMoe(nn.Module):
    """``dtype``: of the values between layers, and of rotary positions."""

    def __init__(self, sizes: MoeSizes, sequence: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RmsNorm(sizes.width, sizes.epsilon)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        turns = sizes.base ** (-torch.arange(0, sizes.head, 2) / sizes.head)
        angles = torch.outer(torch.arange(sequence), turns).repeat(1, 2)
        self.register_buffer("angles", torch.stack((angles.cos(), angles.sin())).to(dtype), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of ``labels`` (both ``[batch, sequence]``, int64)."""
        x = F.embedding(ids, self.token.weight.to(self.dtype))
        for layer in self.layers:
            x = layer(x, self.angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def published_moe(sizes: MoeSizes, sequence: int, *, layers: int | None = None) -> PublishedMoe:
    """On ``meta``, of so many layers (None: all)."""
    with torch.device("meta"):
        return PublishedMoe(replace(sizes, layers=layers or sizes.layers), sequence).train()
