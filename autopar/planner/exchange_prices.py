"""What a dispatch or a combine sends where tokens may travel once to each node, on an axis that is being solved.

Where rows travel at once, an axis sends its part whatever others do. Tokens that go once to each node are fewer rows
the fewer tokens a rank has and the more of their experts it may reach: so a choice on one axis is priced by the whole
journey, over all axes that tokens were found to travel on before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cluster import Cluster
from autopar.graph import AxisRef, Choice, Meta, info, op_name, operands
from autopar.mesh import AXES, Mesh
from autopar.passes.expert_roads import exchange_axes, flat_seconds, hop_seconds, nodes_of
from autopar.rules.base import Op
from autopar.rules.experts import COMBINE, DISPATCH, EXCHANGE, FILTER, hops, node_rows_of


@dataclass(frozen=True)
class Journeys:
    """Of tokens, with ``axis`` as the one being solved; ``is_pinned``: where there are several nodes, tokens have to go
    by way of them."""

    cluster: Cluster
    mesh: Mesh
    axis: str
    is_pinned: bool

    def seconds(self, node: fx.Node, op: Op, choice: Choice, flat: Sequence[float]) -> Sequence[float]:
        """Forward and backward seconds, of all axes together; ``flat``, those of this axis alone, where there are no
        several nodes."""
        if op_name(node) not in (DISPATCH, COMBINE):
            return flat
        routing = next(operand for operand in operands(node) if info(operand).is_object)
        before, axes = exchange_axes(routing), self._axes(exchange_axes(routing), choice)
        nodes = [nodes_of(some, self.cluster, self.mesh) if some else 1 for some in (before, axes)]
        if max(nodes) == 1:
            return flat
        local, way = self._local(node, op, choice), nodes[1]
        some = local.operands[0] if op_name(node) == COMBINE else local.result
        at_once = flat_seconds(some.bytes, axes, self.cluster, self.mesh)
        found: Sequence[float] = (at_once, at_once)
        if way > 1:
            both = hops(local, node_rows_of(self._route(routing, choice), nodes=way))
            by_nodes = [sum(hop_seconds(hop, way, axes, self.cluster, self.mesh)) for hop in both]
            found = by_nodes if self.is_pinned else min(found, by_nodes, key=sum)
        return found[0], found[1] if op.result.needs_grad else 0.0

    def _axes(self, before: Sequence[str], choice: Choice) -> tuple[str, ...]:
        mine = (self.axis,) if choice.form == EXCHANGE else ()
        return tuple(sorted((*before, *mine), key=AXES.index))

    def _route(self, routing: fx.Node, choice: Choice) -> Op:
        """As it would be, local to this axis."""
        op, ref = Op.of(routing), AxisRef(self.axis, self.mesh.size(self.axis))
        refs = {
            form: (*op.kwargs.get(form, ()), *((ref,) if choice.form == form else ())) for form in (EXCHANGE, FILTER)
        }
        (index,) = op.operands
        tokens = index.shape[0] // (ref.size if self._splits_tokens(choice) else 1)
        return replace(op, kwargs={**op.kwargs, **refs}, operands=(replace(index, shape=(tokens, index.shape[1])),))

    def _splits_tokens(self, choice: Choice) -> bool:
        """By the type of the tokens, of their weights, or of a routing whose tokens are split."""
        return any(kind.is_shard and not kind.is_ragged and kind.dim == 0 for kind in choice.operands[:2])

    def _local(self, node: fx.Node, op: Op, choice: Choice) -> Op:
        size = self.mesh.size(self.axis)

        def part(meta: Meta, dim: int) -> Meta:
            return replace(meta, shape=tuple(n // size if d == dim else n for d, n in enumerate(meta.shape)))

        given = [part(m, k.dim) if k.is_shard else m for m, k in zip(op.operands, choice.operands, strict=True)]
        made = [part(m, choice.result.dim) if choice.result.is_shard else m for m in op.outputs]
        return replace(op, operands=tuple(given), outputs=tuple(made))
