"""expert_roads: rows that travel to experts on other nodes go there in one hop or in two, whichever is faster.

Guarantees: equal values; only ``route`` changes, whose ``nodes`` say that rows go within a node first, and from there
to each other node from one rank (:mod:`autopar.runtime.exchange`). Two hops send fewer and larger messages, and move
all rows once more. Example: ``route(index, 64, exchange=[ep])`` -> ``route(index, 64, exchange=[ep], nodes=8)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cluster import Cluster
from autopar.cost_models import collective
from autopar.graph import Model, info, op_name
from autopar.mesh import Mesh
from autopar.rules.experts import EXCHANGE, ROUTE


def expert_roads(model: Model, cluster: Cluster, mesh: Mesh) -> Model:
    """In place, after all axes are solved."""
    for block in model.blocks:
        for node in block.ops:
            if op_name(node) == ROUTE and (axes := exchange_axes(node)):
                nodes = _faster(node, axes, cluster, mesh)
                if nodes > 1:
                    node.kwargs = {**node.kwargs, "nodes": nodes}
    return model


def exchange_axes(routing: fx.Node) -> tuple[str, ...]:
    """The axes over which rows travel."""
    refs = routing.kwargs.get(EXCHANGE, ())
    assert isinstance(refs, Sequence)
    return tuple(str(ref) for ref in refs)


def hops_of(routing: fx.Node) -> int:
    """The nodes within and across which rows travel; 1: they go at once."""
    nodes = routing.kwargs.get("nodes", 1)
    assert isinstance(nodes, int)
    return nodes


def _faster(routing: fx.Node, axes: Sequence[str], cluster: Cluster, mesh: Mesh) -> int:
    """For what is brought to the experts: nodes, or 1 for a single hop."""
    nodes = nodes_of(axes, cluster, mesh)
    rows = next((user for user in routing.users if routing in user.args[1:2]), None)
    if nodes == 1 or rows is None:
        return 1
    bytes_ = info(rows).meta.bytes
    return min((1, nodes), key=lambda n: exchange_seconds(bytes_, axes, n, cluster, mesh))


def nodes_of(axes: Sequence[str], cluster: Cluster, mesh: Mesh) -> int:
    """How many nodes a group of ranks along ``axes`` spans, as many of its ranks in each; 1 where there is no use."""
    spread = _spread(axes, cluster, mesh)
    return spread.nodes if spread.neighbours > 1 else 1


def exchange_seconds(
    bytes_: int, axes: Sequence[str], nodes: int, cluster: Cluster, mesh: Mesh, fullest: int | None = None
) -> float:
    """Of rows of a rank, one way, in two hops where ``nodes`` is more than one. ``fullest``: bytes that the rank with
    the most rows gets from others or gives them, where ranks aren't equal; who passes rows on has as many as all."""
    if nodes == 1:
        return counts_seconds(fullest or bytes_, axes, nodes, cluster, mesh)
    ranks = len(mesh.group(0, *axes))
    within = collective.seconds("all_to_all", bytes_, ranks // nodes, cluster.intra_node)
    across = collective.seconds("all_to_all", fullest or bytes_, nodes, cluster.inter_node)
    copies = 2 * 2 * bytes_ / cluster.device.achievable_memory_bytes_per_second  # before each hop, read and written
    return within + across + copies


def counts_seconds(bytes_: int, axes: Sequence[str], nodes: int, cluster: Cluster, mesh: Mesh) -> float:
    """Of so many bytes that tell other ranks how many rows come: as rows travel, but nothing has to be laid out."""
    ranks = len(mesh.group(0, *axes))
    if nodes > 1:
        within = collective.seconds("all_to_all", bytes_, ranks // nodes, cluster.intra_node)
        return within + collective.seconds("all_to_all", bytes_, nodes, cluster.inter_node)
    stride = min((mesh.stride(axis) for axis in axes if mesh.size(axis) > 1), default=1)
    return collective.seconds("all_to_all", bytes_, ranks, cluster.link(ranks, stride, mesh.world))


@dataclass(frozen=True)
class _Spread:
    """Of a group of ranks: over how many nodes, and how many in each; where they aren't equally many, or lie otherwise
    in other groups, as if no two shared a node."""

    nodes: int
    neighbours: int


def _spread(axes: Sequence[str], cluster: Cluster, mesh: Mesh) -> _Spread:
    group, per_node = mesh.group(0, *axes), cluster.devices_per_node
    homes = Counter(rank // per_node for rank in group)
    block = max(mesh.size(axis) * mesh.stride(axis) for axis in axes)
    alike = mesh.world <= per_node or per_node % block == 0 or block % per_node == 0
    if alike and len(set(homes.values())) == 1:
        return _Spread(len(homes), len(group) // len(homes))
    return _Spread(len(group), 1)
