"""The placement problem by hand: what consumers of one value share, and pay."""

from __future__ import annotations

from autopar.planner.onehot import Edge, Problem, Vertex, solve
from autopar.spmd import R, S, Type


def vertex(name: str, result: Type, *operands: Type) -> Vertex:
    return Vertex(name, (result,), (operands,), (0.0,), (0,))


def seconds(*consumers: tuple[Type, float]) -> float:
    """Of one value ``S(0)`` that consumers in one share take changed, each at its price."""
    vertices = (vertex("source", S(0)), *(vertex(f"consumer {kind}", kind, kind) for kind, _ in consumers))
    edges = tuple(Edge(0, n, 0, {(S(0), kind): price}, "share") for n, (kind, price) in enumerate(consumers, 1))
    return solve(Problem(vertices, edges)).seconds


def test_consumers_share_one_changed_copy() -> None:
    assert round(seconds((R, 2.0), (R, 2.0)), 6) == 2.0


def test_every_changed_copy_is_paid_for() -> None:
    """Also where only another consumer than the first can take it."""
    assert round(seconds((R, 2.0), (S(1), 3.0)), 6) == 5.0
    assert round(seconds((S(1), 3.0), (R, 2.0), (R, 2.0)), 6) == 5.0
