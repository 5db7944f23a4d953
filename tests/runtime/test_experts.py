"""Mixtures of experts on ranks: values and gradients are those of a plain loop over experts on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autopar import simulate
from autopar.errors import ShardingError
from autopar.graph import Meta
from autopar.mesh import Mesh
from autopar.rules.base import Op
from autopar.rules.experts import routing_meta
from autopar.rules.forms import FORMS
from autopar.runtime import (
    Axes,
    Routing,
    combine,
    dispatch,
    dispatch_end,
    dispatch_start,
    grouped,
    grouped_bias,
    grouped_linear,
    route,
)
from autopar.runtime.later import accumulate
from autopar.simulate.memory import MemoryTracker

TOKENS, WIDTH, INNER, CHOICES = 16, 6, 10, 2


@dataclass
class Layer:
    """A mixture of ``experts`` two-layer experts, its tokens and their choices."""

    x: Tensor
    index: Tensor
    weights: Tensor
    inward: Tensor
    bias: Tensor
    outward: Tensor

    @classmethod
    def of(cls, experts: int, index: Tensor) -> Layer:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=generator)

        tokens, choices = index.shape
        weights = random(tokens, choices).softmax(-1)
        inward, outward = random(experts, INNER, WIDTH), random(experts, INNER, WIDTH)
        return cls(random(tokens, WIDTH), index, weights, inward, random(experts, INNER), outward)

    @property
    def trained(self) -> list[Tensor]:
        return [self.x, self.weights, self.inward, self.bias, self.outward]

    def expected(self) -> list[Tensor]:
        """Output and gradients from a loop in plain torch."""
        x, weights, inward, bias, outward = leaves = [t.clone().requires_grad_() for t in self.trained]
        out = torch.zeros_like(x)
        for expert in range(len(inward)):
            token, slot = torch.where(self.index == expert)
            rows = torch.tanh(x[token] @ inward[expert].t() + bias[expert]) @ outward[expert]
            out = out.index_add(0, token, rows * weights[token, slot, None])
        (out * out.detach().sin()).sum().backward()
        return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]

    def run(self, axes: Axes | None, *, tokens: slice = slice(None), experts: slice = slice(None), **how: object):  # type: ignore[no-untyped-def]
        parts = [t[s] for t, s in zip(self.trained, [tokens, tokens, experts, experts, experts], strict=True)]
        x, weights, inward, bias, outward = leaves = [t.clone().requires_grad_() for t in parts]
        routing = route(self.index[tokens], len(self.inward), axes, **how)  # type: ignore[arg-type]
        rows = grouped_bias(grouped_linear(dispatch(x, routing), inward, routing), bias, routing)
        out = combine(grouped_linear(torch.tanh(rows), outward, routing, transposed=True), weights, routing)
        return routing, out, leaves


ADVERSARIAL: dict[str, Callable[[int], Tensor]] = {
    "random": lambda experts: torch.rand(TOKENS, experts, generator=_seeded()).topk(CHOICES).indices,
    "all tokens to one expert": lambda experts: torch.full((TOKENS, 1), experts - 1),
    "experts without tokens": lambda experts: torch.rand(TOKENS, experts // 2, generator=_seeded()).topk(2).indices,
    "four choices": lambda experts: torch.rand(TOKENS, experts, generator=_seeded()).topk(4).indices,
    "one token per rank": lambda experts: torch.arange(8).view(8, 1) * 3 % experts,
    "dropped slots": lambda experts: torch.randint(-2, experts + 3, (TOKENS, CHOICES), generator=_seeded()),
    "no slot at all": lambda experts: torch.full((TOKENS, CHOICES), experts),
}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def check(layer: Layer, found: list[Tensor]) -> None:
    for got, wanted in zip(found, layer.expected(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("routing", ADVERSARIAL)
def test_one_device(routing: str) -> None:
    layer = Layer.of(8, ADVERSARIAL[routing](8))
    _, out, leaves = layer.run(None)
    (out * out.detach().sin()).sum().backward()
    check(layer, [out.detach(), *(t.grad for t in leaves)])


Names = tuple[str, ...]


def sharded(layer: Layer, mesh: Mesh, exchange: Names, filter: Names, nodes: int = 1) -> list[Tensor]:
    """The layer on all ranks: tokens split over ``exchange`` axes, experts over both; the whole results."""
    names = [name for name in ("ep", "cp", "tp") if name in (*exchange, *filter)]
    tokens = [name for name in names if name in exchange]

    def rank(number: int) -> tuple[list[Tensor], int, int]:
        axes = Axes.build(mesh, number, "cpu")
        place, parts = joint(axes, tokens)
        home, homes = joint(axes, names)
        mine = own(len(layer.x), place, parts)
        how = {"exchange": [axes[n] for n in exchange], "filter": [axes[n] for n in filter], "nodes": nodes}
        routing, out, leaves = layer.run(axes, tokens=mine, experts=own(len(layer.inward), home, homes), **how)
        whole = out.detach().clone()
        for name in filter:
            torch.distributed.all_reduce(whole, group=axes[name].group)
        (out * whole.sin()).sum().backward()
        assert routing.rows == sum(routing.counts)
        return [whole, *(t.grad for t in leaves)], place, home

    results = simulate.run(rank, mesh.world).results
    by_place: dict[int, list[list[Tensor]]] = {}
    for found, place, _ in results:
        by_place.setdefault(place, []).append(found)
    by_home = [found for found, _, home in sorted(results, key=lambda r: r[2])]
    places = [by_place[place] for place in sorted(by_place)]
    out = torch.cat([copies[0][0] for copies in places])
    grads = [torch.cat([torch.stack([c[k] for c in copies]).sum(0) for copies in places]) for k in (1, 2)]
    return [out, *grads, *(torch.cat([found[k] for found in by_home]) for k in (3, 4, 5))]


def joint(axes: Axes, names: list[str]) -> tuple[int, int]:
    index, size = 0, 1
    for name in names:
        index, size = index * axes[name].size + axes[name].index, size * axes[name].size
    return index, size


def own(extent: int, index: int, parts: int) -> slice:
    return slice(extent * index // parts, extent * (index + 1) // parts)


PLACES: list[tuple[Mesh, Names, Names, int]] = [
    (Mesh(ep=4), ("ep",), (), 1),
    (Mesh(ep=8), ("ep",), (), 1),
    (Mesh(ep=8), ("ep",), (), 4),
    (Mesh(ep=4, cp=2, borrowed=("cp",)), ("ep", "cp"), (), 1),
    (Mesh(ep=8), ("ep",), (), 2),
    (Mesh(ep=4), ("ep",), (), 4),
    (Mesh(ep=2, cp=2, borrowed=("cp",)), ("ep", "cp"), (), 2),
    (Mesh(tp=4), (), ("tp",), 1),
    (Mesh(ep=2, tp=2, borrowed=("tp",)), ("ep",), ("tp",), 1),
    (Mesh(ep=4, tp=2, borrowed=("tp",)), ("ep",), ("tp",), 2),
    (Mesh(ep=2, cp=2, tp=2, borrowed=("cp", "tp")), ("ep", "tp"), ("cp",), 1),
]


@pytest.mark.slow
@pytest.mark.parametrize("routing", ADVERSARIAL)
@pytest.mark.parametrize(("mesh", "exchange", "filter", "nodes"), PLACES, ids=str)
def test_on_ranks(routing: str, mesh: Mesh, exchange: Names, filter: Names, nodes: int) -> None:
    layer = Layer.of(8, ADVERSARIAL[routing](8))
    check(layer, sharded(layer, mesh, exchange, filter, nodes))


@pytest.mark.parametrize(("mesh", "exchange", "filter", "nodes"), PLACES[2:], ids=str)
def test_a_sample_of_ranks(mesh: Mesh, exchange: Names, filter: Names, nodes: int) -> None:
    layer = Layer.of(8, ADVERSARIAL["dropped slots"](8))
    check(layer, sharded(layer, mesh, exchange, filter, nodes))


class Layers:
    """Of a step in which weight gradients may be put off: two uses of the same experts."""

    def __init__(self, axes: Axes, dtype: torch.dtype = torch.float64) -> None:
        self.axes, generator = axes, torch.Generator().manual_seed(5)
        self.weight = torch.randn(4, INNER, WIDTH, dtype=dtype, generator=generator).requires_grad_()
        self.x = torch.randn(TOKENS, WIDTH, dtype=dtype, generator=generator).requires_grad_()
        self.index = torch.randint(0, 3, (TOKENS, 1), generator=generator)  # of the last expert there is nothing

    def loss(self) -> Tensor:
        routing = route(self.index, 4, self.axes)
        rows = torch.tanh(grouped_linear(dispatch(self.x, routing), self.weight, routing))
        return grouped_linear(rows, self.weight, routing, transposed=True).square().sum()


@pytest.mark.parametrize("recomputed", [False, True])
def test_weight_gradients_can_be_put_off(recomputed: bool) -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    plain, split = Layers(axes), Layers(axes)
    plain.loss().backward()
    loss = checkpoint(split.loss, use_reentrant=False) if recomputed else split.loss()
    with axes.later.putting_off((0, 0)):
        loss.backward()
    assert split.weight.grad is None
    torch.testing.assert_close(split.x.grad, plain.x.grad)
    assert [id(p) for p in axes.later.parameters((0, 0))] == [id(split.weight)] * 2
    axes.later.run((0, 0), accumulate)
    axes.later.require_done()
    torch.testing.assert_close(split.weight.grad, plain.weight.grad)
    assert not split.weight.grad[3].any()


def test_the_gradient_of_a_cast_weight_is_never_put_off() -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    layers = Layers(axes)
    leaf, layers.weight = layers.weight, layers.weight * 1.0
    with axes.later.putting_off((0, 0)):
        layers.loss().backward()
    assert leaf.grad is not None
    assert axes.later.parameters((0, 0)) == ()


def test_only_what_a_gradient_needs_is_kept() -> None:
    layer = Layer.of(4, torch.randint(0, 4, (TOKENS, CHOICES), generator=_seeded()))
    routing = route(layer.index, 4)
    rows = dispatch(layer.x, routing)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made = grouped_linear(rows, layer.inward.requires_grad_(), routing)
        grouped_bias(made, layer.bias.requires_grad_(), routing)
        combine(rows.requires_grad_(), layer.weights, routing)
    assert [t.data_ptr() for t in saved] == [rows.data_ptr(), layer.weights.data_ptr()]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_dtypes(weights: torch.dtype) -> None:
    """A router in float32 beside rows in bfloat16: the sum has the wider dtype, every gradient that of its value."""
    layer = Layer.of(4, torch.randint(0, 4, (TOKENS, CHOICES), generator=_seeded()))
    x, inward, outward = (t.bfloat16().requires_grad_() for t in (layer.x, layer.inward, layer.outward))
    share = layer.weights.to(weights).requires_grad_()
    routing = route(layer.index, 4)
    rows = grouped_linear(dispatch(x, routing), inward, routing)
    out = combine(grouped_linear(rows, outward, routing, transposed=True), share, routing)
    assert out.dtype == weights
    out.sum().backward()
    assert [t.grad.dtype for t in (x, inward, outward, share)] == [t.dtype for t in (x, inward, outward, share)]


def test_products_of_all_choices_are_never_held_at_once() -> None:
    """Beside the rows as they came back, which are narrow: a few terms of one choice."""
    tokens, choices, width = 64, 8, 1024
    rows = torch.ones(tokens * choices, width, dtype=torch.bfloat16)
    weights = torch.ones(tokens, choices, requires_grad=True)
    routing = route(torch.arange(choices).repeat(tokens, 1), choices)
    with MemoryTracker() as tracker:
        combine(rows, weights, routing).sum().backward()
    term = tokens * width * torch.float32.itemsize
    assert tracker.peak_bytes < (choices / 2 + 4) * term


def test_grouped_product_of_torch_is_the_same() -> None:
    """What runs on CUDA, where this torch has it on a CPU too."""
    if grouped._grouped_mm is None:
        pytest.skip("this torch has no grouped product")
    layer = Layer.of(4, torch.randint(0, 3, (TOKENS, 1), generator=_seeded()))
    routing = route(layer.index, 4)
    rows, weight = (torch.randn(shape).bfloat16() for shape in ((TOKENS, 16), (4, 16, 24)))
    made = grouped.product(rows, weight, routing)
    torch.testing.assert_close(grouped._grouped_mm(rows, weight, offs=routing.ends), made)
    theirs = grouped._grouped_mm(rows.t(), made, offs=routing.ends)
    assert routing.idle.tolist() == [3]
    theirs.index_fill_(0, routing.idle, 0)
    torch.testing.assert_close(theirs, grouped.weight_gradient(rows, made, routing))


def refusal(run: Callable[[], object]) -> str:
    with pytest.raises(ShardingError) as caught:
        run()
    return str(caught.value)


def test_what_does_not_fit() -> None:
    layer = Layer.of(4, torch.zeros(TOKENS, CHOICES, dtype=torch.int64))
    routing = route(layer.index, 4)
    assert "a router must return one row per token" in refusal(lambda: route(layer.index[0], 4))
    assert "as whole numbers [tokens, choices], not torch.float64" in refusal(lambda: route(layer.weights, 4))
    assert "chose experts for 16 tokens, x is (15, 6)" in refusal(lambda: dispatch(layer.x[1:], routing))
    assert "is of 4 experts and 32 rows here" in refusal(lambda: grouped_linear(layer.x, layer.inward, routing))
    assert "is of (16, 2) slots" in refusal(lambda: combine(layer.x, layer.weights, routing))
    axis = Axes.alone(Mesh(ep=3), 0, "cpu")["ep"]
    assert "4 experts don't divide over ep 3; they divide over one of [1, 2, 4] ranks" in refusal(
        lambda: route(layer.index, 4, exchange=[axis])
    )
    assert "3 ranks of 'ep' don't divide into 2 nodes" in refusal(
        lambda: route(layer.index, 3, exchange=[axis], nodes=2)
    )


def test_gradients_travel_while_those_of_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are sent for before the shared expert runs and waited for after it; their gradients, too."""
    said: list[str] = []

    def telling(name: str) -> None:
        known = getattr(Routing, name)
        monkeypatch.setattr(Routing, name, lambda *given: (said.append(name), known(*given))[1])

    for name in ("start_to_experts", "at_experts", "start_to_tokens", "at_tokens"):
        telling(name)
    layer = Layer.of(4, torch.randint(0, 4, (TOKENS, CHOICES), generator=_seeded()))
    x, shared = layer.x.clone().requires_grad_(), torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    shared.register_hook(lambda grad: said.append("gradient of shared"))
    routing = route(layer.index, 4)
    flight = dispatch_start(x, routing)
    said.append("shared")
    y = x @ shared
    rows = dispatch_end(flight)
    (y.sum() + rows.square().sum()).backward()
    assert said == [
        *("start_to_experts", "shared", "at_experts"),
        *("start_to_tokens", "gradient of shared", "at_tokens"),
    ]
    plain = layer.x.clone().requires_grad_()
    ((plain @ shared).sum() + dispatch(plain, routing).square().sum()).backward()
    torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.parametrize(("mesh", "nodes"), [(Mesh(ep=4), 2), (Mesh(ep=8), 2), (Mesh(ep=4), 4)], ids=str)
def test_what_a_routing_by_way_of_nodes_holds_is_stated(mesh: Mesh, nodes: int) -> None:
    """Numbers of rows, slots and places, where ranks get as many as others."""
    axes = replace(Axes.alone(mesh, 0, "cpu"), imbalance=1.0)
    index = torch.zeros(TOKENS, CHOICES, dtype=torch.int64)
    routing = route(index, 16, axes, exchange=[axes["ep"]], nodes=nodes)
    hops = routing.hops
    assert hops is not None
    held = [hops.tokens, hops.slots, hops.order, hops.row, routing.by_expert]
    held += [places for sums in (hops.here, hops.home) for places in (sums.order, sums.targets)]
    rows, x = Meta((routing.rows, WIDTH), torch.float64), Meta((TOKENS, WIDTH), torch.float64)
    op = Op("dispatch", (), {}, (x, routing_meta(TOKENS, len(hops.tokens))), (rows,))
    bytes_ = sum(places.nbytes for places in held if places is not None)
    assert bytes_ <= FORMS["dispatch"](op).extra_bytes <= bytes_ + index.nbytes
