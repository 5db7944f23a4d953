"""Small models that are no chain of layers, and some whose layers differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Attention, Case, NanoGPT, Residual, labels_with_gaps, mlp, tokens


def t5(batch: int, *, tied: bool = True, layers: int = 3) -> Case:
    """An encoder and a decoder, every layer of which reads the encoder's output.

    Both embed with one weight, which transformers makes that of the head, too, whatever the configuration says.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return Case(model, {"input_ids": tokens(batch), "labels": labels_with_gaps(batch)})


class UShaped(nn.Module):
    """Down and up again; each level's output is added to the mirrored level's input."""

    def __init__(self, *, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.down = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.up = nn.ModuleList([Residual(width) for _ in range(depth)])
        self.outward = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, skips = self.inward(x), []
        for layer in self.down:
            h = h + layer(h)
            skips.append(h)
        for layer in self.up:
            h = layer(h + skips.pop())
        return F.mse_loss(self.outward(h), y)


def u_shaped(batch: int) -> Case:
    return Case(UShaped(), mlp(batch).batch)


class Reading(nn.Module):
    """A layer that reads what all others read, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.read = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        return h + torch.tanh(self.own(h) + self.read(memory))


class Readers(nn.Module):
    """Like a decoder, every layer of which keeps the encoder's output for its backward."""

    def __init__(self, *, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.layers = nn.ModuleList([Reading(width) for _ in range(depth)])
        self.outward = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = memory = self.inward(x).sigmoid()
        for layer in self.layers:
            h = layer(h, memory)
        return F.mse_loss(self.outward(h), y)


def readers(batch: int) -> Case:
    return Case(Readers(), mlp(batch).batch)


class Exchange(nn.Module):
    """A layer of two streams; every other one of them mixes the two."""

    def __init__(self, width: int, *, mixes: bool) -> None:
        super().__init__()
        self.left, self.right = Residual(width), Residual(width)
        self.mixes = mixes

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        if self.mixes:
            return a + self.left(b), b + self.right(a)
        return a + self.left(a), b + self.right(b)


class TwoStreams(nn.Module):
    """Two inputs, two streams that exchange in the middle, two outputs, one loss."""

    def __init__(self, *, layers: int = 8, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(4, width)
        self.layers = nn.ModuleList([Exchange(width, mixes=i == layers // 2) for i in range(layers)])
        self.outward = nn.ModuleDict({"a": nn.Linear(width, 4), "b": nn.Linear(width, 8)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.first(x), self.second(y)
        for layer in self.layers:
            a, b = layer(a, b)
        return F.mse_loss(self.outward["a"](a), y) + F.mse_loss(self.outward["b"](b), x)


def two_streams(batch: int) -> Case:
    return Case(TwoStreams(), mlp(batch).batch)


class Reused(nn.Module):
    """The head reads the last layer's value and that of a layer in the middle."""

    def __init__(self, *, layers: int = 8, width: int = 16) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.layers = nn.ModuleList([Residual(width) for _ in range(layers)])
        self.outward = nn.Linear(2 * width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inward(x)
        for i, layer in enumerate(self.layers):
            h = h + layer(h)
            if i == 2:
                early = h
        return F.mse_loss(self.outward(torch.cat([h, early.tanh()], -1)), y)


def reused(batch: int) -> Case:
    return Case(Reused(), mlp(batch).batch)


class Siamese(nn.Module):
    """Both inputs go through the same layers, one after the other."""

    def __init__(self, *, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(width) for _ in range(layers)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.embedded(x), self.embedded(F.pad(y, (0, 4))) * 0.5)

    def embedded(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return h


def siamese(batch: int) -> Case:
    return Case(Siamese(), mlp(batch).batch)


class Probe(NanoGPT):
    """Only its head is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.lm_head = nn.Linear(self.lm_head.in_features, self.lm_head.out_features)


def probe(batch: int) -> Case:
    ids = tokens(batch)
    return Case(Probe(), (ids, ids.roll(-1, 1)))


class Kind(nn.Module):
    """A layer whose attention is causal or not, with an MLP ``wide`` times as wide as usual."""

    def __init__(self, width: int, *, causal: bool, wide: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 4) if causal else Bidirectional(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * wide * width), nn.GELU(), nn.Linear(4 * wide * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Bidirectional(Attention):
    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).chunk(3, dim=2)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in parts)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """Layers of several kinds, one after the other."""

    def __init__(self, kinds: list[dict[str, int]], *, width: int = 16) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.layers = nn.ModuleList([Kind(width, **{"causal": True, **kind}) for kind in kinds])
        self.outward = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inward(x)
        for layer in self.layers:
            h = layer(h)
        return self.outward(h).square().mean()
