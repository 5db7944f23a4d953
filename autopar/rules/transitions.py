"""Changes of type on another axis, which are ops of the graph by then: any type of this axis goes through.

Gathering a dim on one axis that is split on both makes a strided shard: ``[o, n]`` local becomes
``[o, m, n]`` with the other axis' m ranks between, and a split inside o stays inside o * m.
"""

from __future__ import annotations

from autopar.rules.base import Op, Rule
from autopar.rules.moves import Moves
from autopar.spmd import S, Type


def _ratio(op: Op, d: int) -> tuple[int, int]:
    """How much longer dim ``d`` gets (gathered) and how much shorter (scattered), of which one is 1."""
    before, after = op.operands[0].shape[d], op.result.shape[d]
    return max(1, after // max(1, before)), max(1, before // max(1, after))  # an empty dim stays one


def _outer(op: Op, d: int) -> int:
    """The stride of the other axis' own split of dim ``d``; a pair of parts is one inside of the other."""
    kinds, ref = (op.kwargs["src"], op.kwargs["dst"]), op.args[1]
    parts = 2 if ref.paired else 1
    return max((kind.outer * parts for kind in kinds if kind.is_shard and kind.dim == d), default=1)


def _forward(op: Op, position: int, shard: Type) -> Type | None:
    longer, shorter = _ratio(op, shard.dim)
    if shard.outer % (_outer(op, shard.dim) * shorter):
        return None
    return S(shard.dim, shard.outer * longer // shorter)


def _backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
    longer, shorter = _ratio(op, shard.dim)
    if shard.outer % (_outer(op, shard.dim) * longer):
        return None
    return (S(shard.dim, shard.outer * shorter // longer),)


_TRANSITION = Moves(_forward, _backward)

RULES: dict[str, Rule] = {
    "convert": _TRANSITION,
    "all_gather": _TRANSITION,
    "reduce_scatter": _TRANSITION,
    "all_reduce": _TRANSITION,
    "all_to_all": _TRANSITION,
}
