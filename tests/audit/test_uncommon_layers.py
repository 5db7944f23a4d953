"""Programs cost what plans say where results lie otherwise than in order, or no gradient comes to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from tests.audit.cases import PINNED
from tests.fast_cluster import BUSY, NODES
from tests.models import Float64, Residual

WIDTH, HEADS = 16, 4


class Base(nn.Module):
    """Layers of one kind, each given what the one before makes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = Residual(WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.out(self.mix(self.into(x)))).square().mean()


class Halves(Base):
    """Of two products of one shape, one is with a piece of a larger value."""

    def mix(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.stack([-second, first], dim=-1).flatten(-2)[..., : WIDTH // 2]
        return torch.cat([first * first.mean(-1, keepdim=True), turned.abs() * turned.mean(-1, keepdim=True)], dim=-1)


class Gate(Base):
    """Half of each head is joined to rows again, which copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 2 * WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        value, gate = x.unflatten(-1, (HEADS, -1)).chunk(2, dim=-1)
        return value.flatten(-2) * gate.flatten(-2).sigmoid()


class Equation(Base):
    """The last product of an einsum has its dims in another order."""

    def mix(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1))
        scores = torch.einsum("...qhd,...khd->...hqk", heads, heads).softmax(-1)
        return torch.einsum("...hqk,...khd->...qhd", scores, heads).flatten(-2)


class OneKey(Base):
    """One head of keys is broadcast: no kernel for all of an attention does that, unless it is told of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH + 2 * WIDTH // HEADS)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in x.split([WIDTH, 4, 4], dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class ShapeAlone(Base):
    """A product of which the shape is read, and weights that get no gradient with it."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.shift = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def mix(self, x: Tensor) -> Tensor:
        return x * 2 + torch.zeros_like(F.linear(x, self.idle) + self.shift)


class Choice(Base):
    """What the choice of some channels is made of gets no gradient, nor does the type that another tensor has."""

    def mix(self, x: Tensor) -> Tensor:
        scores = x.sigmoid() + 0.5
        chosen = scores.topk(4, dim=-1).indices
        mask = torch.zeros_like(x, dtype=torch.long).scatter(-1, chosen, 1)
        return x * mask.type_as(x)


class Folded(Base):
    """Channels are last in what a convolution is given, and so are those of its weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(WIDTH, WIDTH, 2, 2))

    def mix(self, x: Tensor) -> Tensor:
        image = F.layer_norm(x, [WIDTH]).unflatten(1, (2, -1)).permute(0, 3, 1, 2)
        return F.conv2d(image, self.filters).flatten(2).mean(-1).unsqueeze(1) + x


class Written(nn.Module):
    """Attention without a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        scores = (heads @ heads.transpose(-1, -2) * 0.5).exp().softmax(-1)
        return x + self.out((scores @ heads).transpose(1, 2).reshape(x.shape))


class Copies(Base):
    """Products copy what they are given and keep that: selective recomputation stops before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Written() for _ in range(2))

    def mix(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Queries(Base):
    """What is asked for is learned: a product of two parameters, of which ranks hold none between passes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.asks = nn.Parameter(torch.randn(1, 4, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.asks(self.asked.expand(x.shape[0], -1, -1)).mean(1, keepdim=True)


class Decayed(Base):
    """A weight is in the loss itself, where every rank has the whole gradient: so it is summed in each backward."""

    def mix(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.into.weight.square().sum()


class Both(nn.Module):
    """What it makes, and what that is made of, which two of its ops use."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = self.into(x).relu()
        return self.out(inner) + inner, inner


class Looked(Base):
    """Layers behind a cut only look at what several ops ahead of it use, so no gradient of it comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Both()

    def forward(self, x: Tensor) -> Tensor:
        made, inner = self.first(x)
        return (self.last(made) * inner.detach().sigmoid()).square().mean()


PLANS: list[tuple[type[Base], dict[str, int], dict[str, Any]]] = [
    (Halves, {"dp": 2}, {"cluster": BUSY}),
    (Gate, {"dp": 2}, {}),
    (Equation, {"tp": 2}, {}),
    (OneKey, {"dp": 2}, {}),
    (ShapeAlone, {"dp": 2}, {"zero": 0}),
    (ShapeAlone, {"dp": 2}, {"zero": 2}),
    (ShapeAlone, {"pp": 2}, {"schedule": "zb-h1"}),
    (Choice, {"dp": 2}, {}),
    (Folded, {"pp": 2}, {"microbatches": 1}),
    (Copies, {"dp": 2}, {"recompute": "selective", "microbatches": 1}),
    (Decayed, {"pp": 2, "dp": 2}, {"schedule": "zb-h1"}),
    (Looked, {"pp": 2}, {}),
    (Queries, {"pp": 2, "dp": 2}, {"schedule": "zb-h1", "zero": 3}),
]


@pytest.mark.parametrize(("model", "mesh", "options"), PLANS)
def test_programs_cost_what_plans_say(model: type[Base], mesh: dict[str, int], options: dict[str, Any]) -> None:
    ranks = mesh.get("pp", 1) * mesh.get("dp", 1) * mesh.get("tp", 1)
    torch.manual_seed(0)
    with Float64():
        batch = torch.randn(8, 4, WIDTH, dtype=torch.float64)
        given = {**PINNED, "microbatches": 4, "cluster": NODES, **options}
        job = autopar.compile(model().double(), ranks, sample=batch, mesh=mesh, **given)
        result = job.verify(batch, steps=2)
    assert result.ok, str(result)
    found = job.audit()
    assert found.ok, f"\n{found}"


def test_a_search_tells_pieces_from_values_of_their_own() -> None:
    """It finds out once what ops cost that are alike."""
    with Float64():
        batch = torch.randn(8, 4, WIDTH, dtype=torch.float64)
        found = autopar.compile(Halves().double(), 2, sample=batch, mesh={"dp": 2}, cluster=BUSY).audit()
    assert found.ok, f"\n{found}"
