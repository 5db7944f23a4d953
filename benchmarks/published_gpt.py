"""The GPT of Megatron-LM as published runs trained it, in plain PyTorch, without weights.

Values and the weights that are computed with are bf16 and masters float32, as in Megatron: tables give bf16, and norms
take and give it. Where Megatron has one kernel for several steps there is one op: the bias and GELU of the
feed-forward network are a ``linear`` and a ``gelu``, scale and causal mask are part of the softmax (they are left out:
values don't matter here). ``fused`` attention is ``scaled_dot_product_attention``; else scores are kept, as before
FlashAttention. Dropout is what costs memory and time as a mask: runs with it name their share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GptSizes:
    """Of a model: ``tied`` says whether the head's weight is the embedding's."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    fused: bool = True
    dropout: float = 0.0
    tied: bool = True

    @property
    def layer_parameters(self) -> int:
        """Products' weights of one layer."""
        return 12 * self.width**2

    @property
    def placements(self) -> dict[str, dict[str, str]]:
        """How Megatron splits parameters over tp: columns, then rows (arXiv 1909.08053, section 3)."""
        columns = {"*.qkv.*": "S(0,3)", "*.up.*": "S(0)", "token.weight": "S(0)"} | (
            {} if self.tied else {"head.weight": "S(0)"}
        )
        return {
            name: {"tp": kind} for name, kind in {**columns, "*.out.weight": "S(1)", "*.down.weight": "S(1)"}.items()
        }


class Norm(nn.Module):
    """LayerNorm whose input and output are of the same dtype, under autocast too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return F.layer_norm(x, self.weight.shape, *(p.to(torch.bfloat16) for p in (self.weight, self.bias)))


def narrow_rows(table: nn.Embedding, ids: Tensor) -> Tensor:
    """Rows of a table that is kept in bf16."""
    return F.embedding(ids, table.weight.to(torch.bfloat16))


class Core(nn.Module):
    """Scores, softmax, dropout and the weighted sum."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.fused, self.dropout = sizes.fused, sizes.dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        with torch.autocast("cuda", enabled=False):
            weights = (q @ k.transpose(-1, -2)).softmax(-1)
            return F.dropout(weights, self.dropout) @ v if self.dropout else weights @ v


class Layer(nn.Module):
    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.norm_1, self.norm_2 = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.core = Core(sizes)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.dropped(self.out(self.core(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.dropped(self.down(F.gelu(self.up(self.norm_2(x)))))

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


class PublishedGPT(nn.Module):
    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.sequence, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.token.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of ``labels`` (both ``[batch, sequence]``, int64)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = narrow_rows(self.token, ids) + narrow_rows(self.position, positions)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def published_gpt(sizes: GptSizes) -> PublishedGPT:
    """On ``meta``."""
    with torch.device("meta"):
        return PublishedGPT(sizes).train()


def gpt_tokens(batch: int, sequence: int) -> dict[str, Tensor]:
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    return {"ids": tokens, "labels": tokens}
