"""What a dispatch or a combine sends, priced on an axis that is being solved.

Rows travel over several axes as one message, and a rank has the fewer of them the fewer tokens it has. Tokens that go
once to each node are fewer rows still, the more of their experts they may reach there. So a choice on one axis is
priced by the whole journey, over all axes that tokens were found to travel on before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.cluster import Cluster
from autopar.graph import AxisRef, Choice, info, op_name, operands
from autopar.mesh import AXES, Mesh
from autopar.passes.expert_roads import exchange_axes, flat_seconds, hop_seconds, nodes_of
from autopar.planner.dispatch_forms import FLAT, NODE
from autopar.planner.local_ops import in_part
from autopar.rules.base import Op
from autopar.rules.experts import COMBINE, DISPATCH, EXCHANGE, FILTER, hops, node_rows_of


@dataclass(frozen=True)
class Journeys:
    """Of tokens, with ``axis`` as the one being solved; ``dispatch`` is that of :class:`autopar.options.Options`."""

    cluster: Cluster
    mesh: Mesh
    axis: str
    dispatch: str

    def seconds(self, node: fx.Node, op: Op, choice: Choice, flat: Sequence[float]) -> Sequence[float]:
        """Forward and backward seconds, of all axes together; ``flat``, those of this axis alone, where rows travel on
        no other and within a node."""
        if op_name(node) not in (DISPATCH, COMBINE):
            return flat
        routing = next(operand for operand in operands(node) if info(operand).is_object)
        before, axes = exchange_axes(routing), self._axes(exchange_axes(routing), choice)
        if not axes:
            return flat
        way = 1 if self.dispatch == FLAT else nodes_of(axes, self.cluster, self.mesh)
        if way == 1 and not before:
            return flat
        local = in_part(op, choice, self.mesh.size(self.axis))
        some = local.operands[0] if op_name(node) == COMBINE else local.result
        at_once = flat_seconds(some.bytes, axes, self.cluster, self.mesh)
        found: Sequence[float] = (at_once, at_once)
        if way > 1:
            both = hops(local, node_rows_of(self._route(routing, choice), nodes=way))
            by_nodes = [sum(hop_seconds(hop, way, axes, self.cluster, self.mesh)) for hop in both]
            found = by_nodes if self.dispatch == NODE else min(found, by_nodes, key=sum)
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
