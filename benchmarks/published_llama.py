"""Llama and its like as published runs trained them, in plain PyTorch, without weights.

Values and the weights that are computed with are bf16, masters float32. Unless :class:`LlamaSizes` says that ops are
plain, norms are one op, rotary positions are applied in bf16, and attention shares keys and values among heads.

Plain ops are those of torchtitan's ``models/llama/model.py`` and ``models/norms.py`` as of April 2024 (commit
395a52627), which wasn't compiled then: rotary positions are complex products in float32, and keys and values are copied
for each head. A norm was one kernel (``fused_rmsnorm``) or several in float32 (``rmsnorm``), as a configuration said.

Where a run had one kernel for rotary positions and one for SwiGLU (Megatron-Core's, or torch.compile's), which PyTorch
has no ops for, a product that takes and gives tensors of the same sizes stands for each (values don't matter here).
Without a gate, the squared ReLU of Nemotron-4 is a ReLU for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaSizes:
    """Of a model, and its ops: ``plain`` ones, and norms of one kernel or of several. ``fused``: rotary positions and
    SwiGLU are one kernel each; ``gated``: there is a gate in the feed-forward network."""

    layers: int
    width: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    sequence: int
    plain: bool = False
    fused_norms: bool = True
    fused: bool = False
    gated: bool = True

    @property
    def placements(self) -> dict[str, dict[str, str]]:
        """How Megatron splits parameters over tp: columns, then rows (arXiv 1909.08053, section 3)."""
        columns = ["*.q.weight", "*.k.weight", "*.v.weight", "*.up.weight", "token.weight", "head.weight"]
        kinds = dict.fromkeys([*columns, *(["*.gate.weight"] if self.gated else [])], "S(0)")
        return {name: {"tp": kind} for name, kind in {**kinds, "*.out.weight": "S(1)", "*.down.weight": "S(1)"}.items()}


class RmsNorm(nn.Module):
    """Input and output are of the same dtype, under autocast too."""

    def __init__(self, width: int, *, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            weight = self.weight.to(torch.bfloat16)
            if self.fused:
                return F.rms_norm(x, weight.shape, weight)
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Of ``x [batch, heads, sequence, width]``, the first half and the second turned by ``angles``: cosines and sines,
    ``[2, sequence, width]``."""
    first, second = x.chunk(2, -1)
    return x * angles[0] + torch.cat((-second, first), -1) * angles[1]


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Of ``x [batch, heads, sequence, width]``, neighbours turned by ``angles``: complex numbers of float32,
    ``[sequence, width / 2, 2]``."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(angles)).flatten(3).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    """``x [batch, groups, sequence, width]`` with each group so often."""
    return x if times == 1 else x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


class Layer(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        width, head = sizes.width, sizes.width // sizes.heads
        self.head, self.shared, self.plain = head, sizes.heads // sizes.groups, sizes.plain
        self.norm_1, self.norm_2 = (RmsNorm(width, fused=sizes.fused_norms) for _ in range(2))
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, sizes.groups * head, bias=False) for _ in range(2))
        self.fused, self.gated = sizes.fused, sizes.gated
        if sizes.gated:
            self.gate = nn.Linear(width, sizes.inner, bias=False)
        self.up = nn.Linear(width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (project(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.plain:
            q, k, v = turned(q, angles), repeated(turned(k, angles), self.shared), repeated(v, self.shared)
        elif self.fused:
            q, k = q * angles[0], k * angles[0]
        else:
            q, k = rotated(q, angles), rotated(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.plain)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.inner(self.norm_2(x)))

    def inner(self, h: Tensor) -> Tensor:
        """What the feed-forward network makes of ``h [batch, sequence, width]`` before its last product."""
        if not self.gated:
            return F.relu(self.up(h))
        gate = self.gate(h)
        return (gate if self.fused else F.silu(gate)) * self.up(h)


class PublishedLlama(nn.Module):
    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RmsNorm(sizes.width, fused=sizes.fused_norms)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        head = sizes.width // sizes.heads
        if sizes.plain:
            angles = torch.empty(sizes.sequence, head // 2, 2)
        else:
            angles = torch.empty(2, sizes.sequence, head, dtype=torch.bfloat16)
        self.register_buffer("angles", angles)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of ``labels`` (both ``[batch, sequence]``, int64)."""
        x = F.embedding(ids, self.token.weight.to(torch.bfloat16))
        for layer in self.layers:
            x = layer(x, self.angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def published_llama(sizes: LlamaSizes) -> PublishedLlama:
    """On ``meta``."""
    with torch.device("meta"):
        return PublishedLlama(sizes).train()
