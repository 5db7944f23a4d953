"""Llama as published runs trained it with FSDP, in plain PyTorch, without weights.

Values and the weights that are computed with are bf16, masters float32. Norms are one op, as in torchtitan; rotary
positions are applied in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaSizes:
    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    sequence: int


class RmsNorm(nn.Module):
    """Input and output are of the same dtype, under autocast too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(torch.bfloat16))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        width, head = sizes.width, sizes.width // sizes.heads
        self.head = head
        self.norm_1, self.norm_2 = RmsNorm(width), RmsNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, sizes.groups * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (project(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PublishedLlama(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RmsNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        angles = torch.empty(sizes.sequence, sizes.width // sizes.heads, dtype=torch.bfloat16)
        self.register_buffer("cos", angles)
        self.register_buffer("sin", torch.empty_like(angles))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of ``labels`` (both ``[batch, sequence]``, int64)."""
        x = F.embedding(ids, self.token.weight.to(torch.bfloat16))
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def published_llama(sizes: LlamaSizes) -> PublishedLlama:
    """On ``meta``."""
    with torch.device("meta"):
        return PublishedLlama(sizes).train()
