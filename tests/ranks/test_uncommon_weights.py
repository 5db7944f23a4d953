"""The promise for weights that models seldom have: read without a gradient, by others, never, or in lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.passes.fold import fold
from tests.models import Case, Residual
from tests.ranks.test_schedules import check

CLASSES, WIDTH = 24, 16


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Residual(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for number in range(4):
            x = self.layer(number, x)
        return F.cross_entropy(self.score(x).view(-1, CLASSES), labels.view(-1))

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def layer(self, number: int, x: Tensor) -> Tensor:
        return x + self.layers[number](x)

    def score(self, x: Tensor) -> Tensor:
        return self.head(x)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class TiedToAConstantTable(Tied):
    """What the first stage reads gets its gradient from the last stage alone."""

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding.weight.detach())


class TiedToAConstantHead(Tied):
    def score(self, x: Tensor) -> Tensor:
        return F.linear(x, self.head.weight.detach())


class TiedConstants(TiedToAConstantTable, TiedToAConstantHead):
    """Of a weight that several stages read, none makes a gradient: an optimizer must not decay it."""


class Adapters(Plain):
    """Frozen layers beside weights in lists, which are given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 2) / 4) for _ in range(4))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(2, WIDTH)) for _ in range(4))

    def layer(self, number: int, x: Tensor) -> Tensor:
        return super().layer(number, x) + x @ self.down[number] @ self.up[number]


class Turned(Plain):
    """A product with a weight as a model stores it, the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) @ self.weight.t()


class Early(Plain):
    """A weight of a later layer is read before the first one."""

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.layers[2].norm.weight


class Idle(Plain):
    """Parameters that nothing reads, and layers behind which no gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)

    def layer(self, number: int, x: Tensor) -> Tensor:
        made = super().layer(number, x)
        return made.detach() if number == 1 else made


class Empty(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, WIDTH))

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) + self.none.sum()


class Picks(nn.Module):
    """Literals in its code, which are others in each layer: torch makes tensors of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number = Residual(WIDTH), number

    def forward(self, x: Tensor) -> Tensor:
        turned = [(self.number + k) % WIDTH for k in range(WIDTH)]
        return self.inner(x)[..., turned] * torch.tensor([1.0 + self.number], dtype=x.dtype)


class Literal(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Picks, range(4)))


def case(model: type[nn.Module]) -> Case:
    random = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, CLASSES, (8, 4), generator=random) for _ in range(2))
    return Case(model(), (ids, labels))


PLANS: list[tuple[type[nn.Module], dict[str, int], dict[str, Any]]] = [
    (TiedToAConstantTable, {"pp": 2}, {}),
    (TiedToAConstantHead, {"pp": 2, "dp": 2}, {"zero": 1}),
    (TiedConstants, {"pp": 2}, {}),
    (TiedConstants, {"pp": 2, "dp": 2}, {"zero": 1}),
    (TiedConstants, {"pp": 2, "dp": 2}, {"zero": 3, "schedule": "zb-h1"}),
    (Adapters, {"dp": 2}, {"zero": 3}),
    (Adapters, {"pp": 2}, {"vocabulary": "vocab-1"}),  # no gradient goes back to the embedding
    (Early, {"dp": 2}, {"zero": 1}),
    (Early, {"dp": 2}, {"zero": 3}),
    (Idle, {"pp": 2}, {}),
    (Idle, {"pp": 2}, {"schedule": "interleaved", "chunks": 2}),  # what stops gradients isn't in the stage before it
    (Empty, {"dp": 2, "tp": 2}, {"zero": 1}),
    (Literal, {"pp": 2, "tp": 2}, {"zero": 1}),
]


@pytest.mark.parametrize(("model", "mesh", "options"), PLANS)
def test_parity(model: type[nn.Module], mesh: dict[str, int], options: dict[str, Any]) -> None:
    check(lambda: case(model), mesh, microbatches=2, **options)


def test_layers_with_literals_are_equal() -> None:
    """However many there are before theirs, and whatever these are."""
    made = case(Literal)
    model = fold(autopar.capture(made.model, sample=made.batch).flat)
    blocks = [call.block for call in model.calls if call.path.startswith("layers.")]
    assert len(blocks) == 4
    assert len(set(blocks)) == 1
