"""What rules say of ops, found out once for ops that are alike: a model's layers have many, and so have its placements.

Ops are alike that are called by one name on the same tensors, which lie alike, with the same arguments. Of those one
:class:`Op` is kept, and on it (:attr:`Op.found`) what rules and prices find out about it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.graph import Choice, info, operands
from autopar.planner.call_keys import key_of
from autopar.planner.placement import Change, NumberedTypes, Ways
from autopar.planner.saved_by_op import SavedByOp
from autopar.rules.base import Op, Rule, Splits, apart_operands, legal_choices
from autopar.spmd import Type, transition

Frozen = tuple[frozenset[int], ...]
"""Split points of a value, which no longer change."""


def frozen(splits: Splits) -> Frozen:
    return tuple(map(frozenset, splits))


@dataclass
class Changes:
    """What may change on an edge: ``ways``, of which 0 is to change nothing, with an example of each of the others. One
    price is that of all changes between types of the same kinds, but for shards of one dim in another order."""

    ways: Ways
    examples: tuple[Change, ...]
    _left: dict[tuple[bool, ...], Ways] = field(default_factory=dict)

    @classmethod
    def of(cls, free: Iterable[Type], changes: Iterable[Change]) -> Changes:
        """``free`` are types that may stay."""
        ways: dict[Change, int] = {(kind, kind): 0 for kind in free}
        numbers: dict[tuple[str, str, bool], int] = {}
        examples: list[Change] = []
        for change in changes:
            way = transition(*change)
            kinds = change[0].kind, change[1].kind, way is not None and way.reorders
            if kinds not in numbers:
                examples.append(change)
            ways[change] = numbers.setdefault(kinds, len(examples))
        return cls(ways, tuple(examples))

    def where(self, possible: tuple[bool, ...]) -> Ways:
        """Without the ways that aren't."""
        if all(possible):
            return self.ways
        if possible not in self._left:
            self._left[possible] = {change: way for change, way in self.ways.items() if not way or possible[way - 1]}
        return self._left[possible]


@dataclass
class Rulings:
    """The ops of some models, each once, and what edges between them have in common; what autograd keeps
    of them. Whoever places several models holds one for all of them."""

    _ops: dict[Hashable, Op] = field(default_factory=dict)
    changes: dict[Hashable, Changes] = field(default_factory=dict)
    numbered: dict[tuple[Type, ...], NumberedTypes] = field(default_factory=dict)
    points: dict[Frozen, Frozen] = field(default_factory=dict)
    saved: SavedByOp = field(default_factory=SavedByOp)

    def op(self, node: fx.Node) -> Op:
        """``node`` as rules see it; the same object for all that are alike."""
        metas = tuple(info(operand).meta for operand in operands(node))
        key = (node.target, key_of(node.args), key_of(node.kwargs), metas, info(node).outputs, apart_operands(node))
        try:
            found = self._ops.get(key)
        except TypeError:  # an argument that can't be compared by value
            return Op.of(node)
        if found is None:
            found = self._ops[key] = Op.of(node)
        return found


def legal(rule: Rule, op: Op, size: int, inputs: Sequence[Frozen], output: Frozen) -> Sequence[Choice]:
    """:func:`~autopar.rules.base.legal_choices`, asked once."""
    key = ("legal", size, (*inputs, output))
    if key not in op.found:
        points = [[set(some) for some in splits] for splits in (*inputs, output)]
        op.found[key] = tuple(legal_choices(rule, op, size, points[:-1], points[-1]))
    choices: Sequence[Choice] = op.found[key]
    return choices
