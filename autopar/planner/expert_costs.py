"""How unevenly a model's experts are used: what the plan reckons with, and where hot experts lie.

A rank waits for the one whose experts got the most slots. So everything that is computed for rows of experts, and sent
or kept of them, counts as many times as that rank has its share: as measured (``load``), with hot experts apart
(:mod:`autopar.planner.expert_places`), else as the options say. Layers that share code have one graph; costs are then
those of the mean of their layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.errors import ArgumentError
from autopar.graph import Model, info, operands
from autopar.mesh import AXES, Mesh
from autopar.passes.expert_roads import exchange_axes, hops_of
from autopar.passes.experts import DISPATCH, reckon_rows
from autopar.passes.routers import RouterCall, router_calls, stacks_of
from autopar.plan import ExpertsPlan
from autopar.planner.expert_places import place
from autopar.rules.base import Op
from autopar.rules.experts import FILTER, node_rows_of
from autopar.spmd import S

Load = Mapping[str, Sequence[float]]
"""Layer -> slots of each expert, in the model's order, of any number of tokens."""


@dataclass(frozen=True)
class Reckoning:
    """What is known of loads: ``imbalance`` where nothing else is, ``load`` that was measured, and the rows of a plan
    whose decisions are taken."""

    imbalance: float = 1.0
    load: Load = field(default_factory=dict)
    pinned: tuple[ExpertsPlan, ...] = ()

    def of_layer(self, router: RouterCall, ranks: int) -> Reckoned:
        """On ``ranks`` that have experts of their own each."""
        for row in self.pinned:
            if row.layer == router.layer:
                return Reckoned(tuple(row.order), row.imbalance, row.bound)
        if ranks == 1 or router.experts % ranks:
            return Reckoned((), 1.0, 1.0)
        load = self.load.get(router.layer)
        if load is None:
            return Reckoned((), self.imbalance, 1.0)
        best = place(load, ranks)
        order = () if best.order == tuple(range(router.experts)) else best.order
        return Reckoned(order, max(1.0, best.worst), max(1.0, best.bound))


@dataclass(frozen=True)
class Reckoned:
    """Of one layer: the order in which its experts are stored (() is the model's); how many times its share the fullest
    rank is reckoned to get, and what no order makes less."""

    order: tuple[int, ...]
    imbalance: float
    bound: float


def reckon(model: Model, mesh: Mesh, reckoning: Reckoning) -> None:
    """Set :attr:`autopar.graph.Info.imbalance` of all that is computed for rows of experts, before axes are solved.

    Raises ArgumentError where the load is of other layers or numbers of experts than the model has.
    """
    routers = list(router_calls(model))
    _check(routers, reckoning.load)
    _mark([(router.node, reckoning.of_layer(router, mesh.experts)) for router in routers])


def _check(routers: Sequence[RouterCall], load: Load) -> None:
    experts = {router.layer: router.experts for router in routers}
    if unknown := sorted(set(load) - set(experts)):
        layers = ", ".join(experts) or "none"
        raise ArgumentError(f"expert_load has loads of {unknown}, but the layers with experts are: {layers}")
    for layer, counts in load.items():
        if len(counts) != experts[layer]:
            raise ArgumentError(f"expert_load has {len(counts)} loads of {layer!r}, which has {experts[layer]} experts")


def _mark(found: Sequence[tuple[fx.Node, Reckoned]]) -> None:
    by_node: dict[fx.Node, list[float]] = {}
    for node, reckoned in found:
        by_node.setdefault(node, []).append(reckoned.imbalance)
    means = {node: math.fsum(each) / len(each) for node, each in by_node.items()}
    reached = {node: _computed_from(node) for node in means}
    for nodes in reached.values():
        for node in nodes:
            info(node).imbalance = max(means[router] for router in reached if node in reached[router])


def _computed_from(node: fx.Node) -> set[fx.Node]:
    """Within the block."""
    found, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and user not in found:
                found.add(user)
                waiting.append(user)
    return found


def experts_plans(model: Model, mesh: Mesh, reckoning: Reckoning) -> list[ExpertsPlan]:
    """What a plan says of each layer with experts, read off the solved, local model; what :func:`reckon` set is set
    again, for the ranks that experts really are on."""
    rows: dict[str, ExpertsPlan] = {}
    found: list[tuple[fx.Node, Reckoned]] = []
    split: dict[fx.Node, list[str]] = {}  # calls of one block have one node for theirs
    for router in router_calls(model):
        if router.node not in split:
            split[router.node] = _axes(stacks_of(router.node))
        axes = split[router.node]
        ranks = math.prod(mesh.size(axis) for axis in axes)
        index, own = operands(router.node)[0], reckoning.of_layer(router, ranks)
        found.append((router.node, own))
        rows[router.layer] = ExpertsPlan(
            layer=router.layer,
            experts=router.experts,
            choices=min(info(index).meta.shape[-1], router.experts),  # unequal ones are routed to one by one
            axes=axes,
            ranks=ranks,
            imbalance=own.imbalance,
            bound=own.bound,
            order=list(own.order),
            whole=[axis for axis in axes if info(router.node).choices[axis].form == FILTER],
            nodes=hops_of(router.node),
            sent_bytes=sum(_sent_bytes(router.node, mesh)),
            across_bytes=_sent_bytes(router.node, mesh)[0] if hops_of(router.node) > 1 else 0,
        )
    _mark(found)
    reckon_rows(model)
    return list(rows.values())


def _axes(stacks: Iterable[fx.Node]) -> list[str]:
    """On which weights are split by experts, as they are used: where they are stored as rows of all, a split of these
    may be one of each expert."""
    types = [info(stack).types() for stack in stacks]
    return [axis for axis in AXES if any(kinds.get(axis) == S(0) for kinds in types)]


def _sent_bytes(route: fx.Node, mesh: Mesh) -> tuple[int, int]:
    """Rows of this rank's tokens that go to the experts of others: across nodes, and within them. Where rows go at once
    these aren't told apart, and the latter are none."""
    ranks, nodes = math.prod(mesh.size(axis) for axis in exchange_axes(route)), hops_of(route)
    metas = [info(user).meta for user in route.users if user.target == DISPATCH]
    if nodes == 1:
        return sum(meta.bytes for meta in metas) * (ranks - 1) // ranks, 0
    rows, width = node_rows_of(Op.of(route)), ranks // nodes
    across = sum(rows.sent * meta.bytes // meta.shape[0] for meta in metas) * (nodes - 1) // nodes
    return across, sum(meta.bytes for meta in metas) * (width - 1) // width
