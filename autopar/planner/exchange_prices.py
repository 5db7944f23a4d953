"""What a dispatch or a combine sends where tokens travel once to each node, on an axis that is being solved.

Other axes may come to split tokens or experts further: then it is what they take as far as that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cluster import Cluster
from autopar.graph import Meta, info, op_name, operands
from autopar.node_rows import NodeRows, node_rows
from autopar.passes.expert_roads import across_seconds, within_seconds
from autopar.rules.base import Op
from autopar.rules.experts import ACROSS, COMBINE, DISPATCH, OF, hops


@dataclass(frozen=True)
class ByNodes:
    """An axis of ``ranks`` that fill ``nodes`` alike; ``is_pinned``: tokens have to go that way."""

    cluster: Cluster
    nodes: int
    ranks: int
    is_pinned: bool

    def cheaper(self, node: fx.Node, op: Op, flat: Sequence[float]) -> Sequence[float]:
        """Seconds of forward and backward: of rows that are sent at once, or of tokens by way of nodes."""
        if op_name(node) not in (DISPATCH, COMBINE):
            return flat
        found = [self._seconds(hop.messages, hop.copied_bytes) for hop in hops(*self._local(node, op))]
        found[1] = found[1] if op.result.needs_grad else 0.0
        return found if self.is_pinned or sum(found) < sum(flat) else flat

    def _local(self, node: fx.Node, op: Op) -> tuple[Op, NodeRows]:
        route = Op.of(next(operand for operand in operands(node) if info(operand).is_object))
        experts, (tokens, choices) = int(route.arg(1, "experts")), route.operands[0].shape
        among = int(route.kwargs.get(OF) or experts)
        given = tuple(map(self._part, op.operands))
        rows = node_rows(tokens // self.ranks, choices, among, experts, self.nodes, self.ranks)
        return replace(op, operands=given, outputs=tuple(map(self._part, op.outputs))), rows

    def _part(self, meta: Meta) -> Meta:
        return replace(meta, shape=(meta.shape[0] // self.ranks, *meta.shape[1:]))

    def _seconds(self, messages: Sequence[tuple[str, int]], copied_bytes: int) -> float:
        sent = (
            across_seconds(bytes_, self.nodes, self.cluster)
            if kind == ACROSS
            else within_seconds(bytes_, self.ranks // self.nodes, self.cluster)
            for kind, bytes_ in messages
        )
        return math.fsum(sent) + copied_bytes / self.cluster.device.achievable_memory_bytes_per_second
