"""expert_roads: tokens that travel to experts on other nodes go there row by row, or once to each node.

Guarantees: equal values but for the order of sums; only ``route`` changes, whose ``nodes`` say that tokens go across
nodes first, each once to a node that has any of its experts, and from there within it (:mod:`autopar.runtime.hops`).
Which form is faster is chosen by what blocks take (:mod:`autopar.planner.dispatch_forms`). Example:
``route(index, 64, exchange=[ep])`` -> ``route(index, 64, exchange=[ep], nodes=8)``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autopar.cluster import Cluster
from autopar.cost_models import collective
from autopar.graph import Block, info, op_name, set_info
from autopar.mesh import Mesh
from autopar.rules.base import Op
from autopar.rules.experts import ACROSS, EXCHANGE, ROUTE, WITHIN, Hop, node_rows_of, routing_meta


def expert_roads(block: Block, nodes: int) -> None:
    """In place, after all axes are solved: tokens of ``block`` go by way of so many nodes."""
    for node in travelling(block) if nodes > 1 else ():
        node.kwargs = {**node.kwargs, "nodes": nodes}
        data, rows = info(node), node_rows_of(Op.of(node))
        set_info(node, replace(data, outputs=(routing_meta(rows.tokens, rows.sent),)))


def travelling(block: Block) -> list[fx.Node]:
    """The routings whose rows travel."""
    return [node for node in block.ops if op_name(node) == ROUTE and exchange_axes(node)]


def exchange_axes(routing: fx.Node) -> tuple[str, ...]:
    """The axes over which rows travel."""
    refs = routing.kwargs.get(EXCHANGE, ())
    assert isinstance(refs, Sequence)
    return tuple(str(ref) for ref in refs)


def hops_of(routing: fx.Node) -> int:
    """The nodes by way of which tokens travel; 1: rows go at once."""
    nodes = routing.kwargs.get("nodes", 1)
    assert isinstance(nodes, int)
    return nodes


def nodes_of(axes: Sequence[str], cluster: Cluster, mesh: Mesh) -> int:
    """How many nodes a group of ranks along ``axes`` spans, as many of its ranks in each and at the same places; 1
    where groups lie otherwise."""
    group, per_node = mesh.group(0, *axes), cluster.devices_per_node
    homes = Counter(rank // per_node for rank in group)
    block = max(mesh.size(axis) * mesh.stride(axis) for axis in axes)
    alike = mesh.world <= per_node or per_node % block == 0 or block % per_node == 0
    return len(homes) if alike and len(set(homes.values())) == 1 else 1


def flat_seconds(bytes_: int, axes: Sequence[str], cluster: Cluster, mesh: Mesh) -> float:
    """Of so many bytes of a rank, one way, to all ranks at once."""
    ranks = math.prod(mesh.size(axis) for axis in axes)
    stride = min((mesh.stride(axis) for axis in axes if mesh.size(axis) > 1), default=1)
    return collective.seconds("all_to_all", bytes_, ranks, cluster.link(ranks, stride, mesh.world))


def across_seconds(bytes_: int, nodes: int, cluster: Cluster) -> float:
    """Of so many bytes of a rank to those at its place in so many ``nodes``."""
    return collective.seconds("all_to_all", bytes_, nodes, cluster.inter_node)


def within_seconds(bytes_: int, ranks: int, cluster: Cluster) -> float:
    """Of so many bytes of a rank to the ``ranks`` of its node."""
    return collective.seconds("all_to_all", bytes_, ranks, cluster.intra_node)


def hop_seconds(hop: Hop, nodes: int, axes: Sequence[str], cluster: Cluster, mesh: Mesh) -> tuple[float, float]:
    """Of a hop by way of ``nodes``, one way: across them, and within them with what is copied."""
    ranks = math.prod(mesh.size(axis) for axis in axes) // nodes
    across = (across_seconds(bytes_, nodes, cluster) for kind, bytes_ in hop.messages if kind == ACROSS)
    within = (within_seconds(bytes_, ranks, cluster) for kind, bytes_ in hop.messages if kind == WITHIN)
    copies = hop.copied_bytes / cluster.device.achievable_memory_bytes_per_second
    return math.fsum(across), math.fsum(within) + copies
