"""Calls that functions of experts are said to issue, beside those that they issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import simulate
from autopar.graph import Meta
from autopar.mesh import Mesh
from autopar.rules.base import Op
from autopar.rules.experts import routing_meta
from autopar.rules.issued import issued
from autopar.runtime import Axes, combine, dispatch, route

TOKENS, WIDTH, EXPERTS = 16, 6, 8
NO_KERNEL: Final = frozenset({"detach", "empty", "new_empty", "empty_like", "promote_types"})

Names = tuple[str, ...]


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = function._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.count += not is_view and function.overloadpacket.__name__ not in NO_KERNEL
        return function(*args, **(kwargs or {}))


def kernels(run: Callable[[], Any]) -> tuple[Any, int]:
    with Kernels() as counted:
        result = run()
    return result, counted.count


def ran(axes: Axes, choices: int, **how: Any) -> list[tuple[int, int]]:
    """Kernels of a route, a dispatch and a combine, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(TOKENS, EXPERTS, generator=generator).topk(choices).indices
    x = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weights = torch.rand(TOKENS, choices, generator=generator, requires_grad=True)
    with axes.routers.counting():
        routing, routed = kernels(lambda: route(index, EXPERTS, axes, layer="layer", **how))
    rows, sent = kernels(lambda: dispatch(x, routing))
    leaf = rows.detach().requires_grad_()
    y, combined = kernels(lambda: combine(leaf, weights, routing))
    grad = torch.ones_like(y), torch.ones_like(rows)
    _, combined_back = kernels(lambda: torch.autograd.grad(y, (leaf, weights), grad[0]))
    _, sent_back = kernels(lambda: torch.autograd.grad(rows, x, grad[1]))
    return [(routed, 0), (sent, sent_back), (combined, combined_back)]


def said(choices: int, exchange: Names, filter: Names, nodes: int) -> list[tuple[int, int]]:
    rows = Meta((TOKENS, WIDTH), torch.float32, needs_grad=True)
    weights = Meta((TOKENS, choices), torch.float32, needs_grad=True)
    how = {"exchange": exchange, "filter": filter} | ({"nodes": nodes} if nodes > 1 else {})
    index, given = Meta((TOKENS, choices), torch.int64), routing_meta(TOKENS)
    routed = Op("route", (), how, (index,), (given,))
    operands = {"route": (index,), "dispatch": (rows, given), "combine": (rows, weights, given)}
    return [issued(name, metas, back=True, route=routed) for name, metas in operands.items()]


PLACES: Sequence[tuple[Mesh, Names, Names, int, Sequence[tuple[int, int]]]] = [
    (Mesh(), (), (), 1, [(0, 0)] * 3),
    (Mesh(ep=4), ("ep",), (), 1, [(1, 0), (1, 1), (1, 1)]),
    (Mesh(tp=4), (), ("tp",), 1, [(0, 0)] * 3),
    (Mesh(ep=2, tp=2, borrowed=("tp",)), ("ep",), ("tp",), 1, [(1, 0), (1, 1), (1, 1)]),
    (Mesh(ep=2, cp=2, borrowed=("cp",)), ("ep", "cp"), (), 1, [(1, 0), (1, 1), (1, 1)]),
    (Mesh(ep=4), ("ep",), (), 2, [(3, 0), (2, 2), (3, 3)]),
]
"""With messages, which no kernel of torch is."""


@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize(("mesh", "exchange", "filter", "nodes", "messages"), PLACES, ids=str)
def test_kernels_are_as_many_as_is_said(
    mesh: Mesh, exchange: Names, filter: Names, nodes: int, messages: Sequence[tuple[int, int]], choices: int
) -> None:
    """By way of nodes their number depends on who chose what: within a quarter."""

    def rank(number: int) -> list[tuple[int, int]]:
        axes = Axes.build(mesh, number, torch.device("cpu"), own=mesh.world == 1)
        names = {"exchange": [axes[n] for n in exchange], "filter": [axes[n] for n in filter]}
        return ran(axes, choices, **names, nodes=nodes)

    results = [rank(0)] if mesh.world == 1 else simulate.run(rank, mesh.world).results
    expected = said(choices, exchange, filter, nodes)
    for found in results:
        counted = [(f + sent, b + back) for (f, b), (sent, back) in zip(found, messages, strict=True)]
        for got, wanted in zip(counted, expected, strict=True):
            assert got == (pytest.approx(wanted, rel=0.25, abs=3) if nodes > 1 else wanted)


def test_an_op_of_the_text_is_one_call_and_its_gradients() -> None:
    trained, plain = Meta((2, 2), torch.float32, needs_grad=True), Meta((2, 2), torch.float32)
    found = [
        issued("aten.mul.Tensor", operands, back=back, route=None)
        for operands, back in [((trained, plain), True), ((trained, trained), True), ((plain, plain), False)]
    ]
    assert found == [(1, 1), (1, 2), (1, 0)]


def test_where_nothing_is_trained_there_is_no_backward() -> None:
    index, rows = Meta((TOKENS, 2), torch.int64), Meta((TOKENS, WIDTH), torch.float32)
    routed = Op("route", (), {}, (index,), (routing_meta(TOKENS),))
    assert issued("dispatch", (rows, routing_meta(TOKENS)), back=False, route=routed) == (2, 0)
