"""What autopar knows about each op: one line per op, in one table (see :mod:`autopar.rules.base`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from autopar.rules import (
    attention,
    chunked,
    contraction,
    creation,
    experts,
    indexing,
    loss,
    matrices,
    pieces,
    pointwise,
    random,
    recurrent,
    reduction,
    routing,
    shape,
    spatial,
    transitions,
)
from autopar.rules.base import Rule, Whole
from autopar.rules.random import RANDOM

_FAMILIES: Final[tuple[dict[str, Rule], ...]] = (
    pointwise.RULES,
    contraction.RULES,
    shape.RULES,
    pieces.RULES,
    reduction.RULES,
    indexing.RULES,
    routing.RULES,
    attention.RULES,
    loss.RULES,
    spatial.RULES,
    recurrent.RULES,
    matrices.RULES,
    chunked.RULES,
    creation.RULES,
    experts.RULES,
    random.RULES,
    transitions.RULES,
)
RULES: Final[Mapping[str, Rule]] = MappingProxyType({n: rule for family in _FAMILIES for n, rule in family.items()})
_WHOLE: Final = Whole()


def lookup(name: str) -> Rule:
    """The rule of an op by its name (:func:`autopar.graph.op_name`); :class:`Whole` where there is none."""
    return RULES.get(name, _WHOLE)


def has_rule(name: str) -> bool:
    return name in RULES


__all__ = ["RANDOM", "RULES", "has_rule", "lookup"]
