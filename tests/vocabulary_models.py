"""Small models whose head or loss has something of its own, with 50 classes, which no number of ranks divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import Case

CLASSES, WIDTH, SEQUENCE = 50, 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.up(self.norm(x)))


class Body(nn.Module):
    """An embedding, two layers and a norm; subclasses have a head and a loss."""

    def __init__(self, *, padding_idx: int | None = None, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH, padding_idx=padding_idx)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Stack(Body):
    """As many layers as are asked for, tied or not: little to compute, for many stages."""

    def __init__(self, *, layers: int, tied: bool) -> None:
        super().__init__(layers=layers)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1), ignore_index=7)


class SoftCapped(Body):
    """A head with a bias, its logits capped and shifted by one token; the mean over tokens."""

    def __init__(self) -> None:
        super().__init__(padding_idx=3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits = 5 * torch.tanh(self.head(self.hidden(ids)) / 5)
        return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), ids[:, 1:].reshape(-1), ignore_index=7)


class Masked(Body):
    """A loss per token, classes in dim 1, weighted by a mask that the batch holds; tied to the embedding."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = F.linear(self.hidden(ids), self.embed.weight)
        each = F.cross_entropy(logits.transpose(1, 2), ids.roll(-1, 1), reduction="none")
        return (each * mask).sum() / mask.sum()


class Smoothed(Body):
    """A head stored ``[width, classes]``, as GPT-2 stores its projections, scaled; label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.empty(WIDTH, CLASSES))
        nn.init.normal_(self.head)

    def forward(self, ids: Tensor) -> Tensor:
        logits = (self.hidden(ids) @ self.head) * 0.5
        return F.cross_entropy(logits.view(-1, CLASSES), ids.roll(-1, 1).view(-1), label_smoothing=0.2)


class Summed(Body):
    """The sum over tokens, and nothing after it; the head's product is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.hidden(ids[:, :-1]) @ self.head.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


class Classified(Body):
    """Rows have one class each, that of their first token's neighbour: logits have no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)[:, 0]), ids[:, 1])


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "soft_capped": SoftCapped,
    "masked": Masked,
    "smoothed": Smoothed,
    "summed": Summed,
    "classified": Classified,
}


def case(name: str, batch: int) -> Case:
    """The model in float64, with the same weights at every call."""
    return made(MODELS[name], batch, masked=name == "masked")


def stack(batch: int, *, layers: int, tied: bool) -> Case:
    return made(lambda: Stack(layers=layers, tied=tied), batch)


def made(model_of: Callable[[], nn.Module], batch: int, *, masked: bool = False) -> Case:
    torch.manual_seed(0)
    model = model_of().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(batch)
    given: dict[str, Any] = {"ids": torch.randint(0, CLASSES, (batch, SEQUENCE), generator=generator)}
    if masked:
        given["mask"] = torch.rand(batch, SEQUENCE, generator=generator, dtype=torch.float64)
    return Case(model, given)
