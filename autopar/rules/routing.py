"""Ops that give tokens their places: cumulative sums, counts. Along a split dim they know what other ranks have.

A cumulative sum over tokens is how masks of experts' slots are filled; a count of tokens is a statistic of a router.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from autopar.graph import AxisRef, Choice
from autopar.rules.base import Communication, Local, Op, Rule, Splits
from autopar.rules.lines import along, dim
from autopar.rules.spec import Spec, together
from autopar.spmd import RAGGED, S

_SHARDED: Final = "cumsum_sharded"


@dataclass(frozen=True)
class _CumulativeSum(Spec):
    """Split along its own dim too: the sums of all parts are gathered.

    A strided split after another of the same dim must keep that one's blocks; one of pairs of parts comes last.
    """

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        super().link(op, inputs, output)
        d = _dim(op)
        inputs[0][d] |= output[d]
        output[d] |= inputs[0][d]

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        yield from super().choices(op, size, inputs, output)
        d, axes = _dim(op), op.kwargs.get("axes", ())
        kept = prod(_outers(op))
        for outer in sorted(inputs[0][d] | output[d]):
            if outer != RAGGED and outer % kept == 0 and not any(axis.paired for axis in axes):
                yield Choice((S(d, outer),), S(d, outer), _SHARDED)

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        if choice.form != _SHARDED:
            return Local.same()
        outers = (*_outers(op), choice.result.outer)
        named: dict[str, Any] = {"axes": (*op.kwargs.get("axes", ()), AxisRef(axis))}
        named |= {"outers": outers} if set(outers) != {1} else {}
        named |= {"dtype": op.kwargs["dtype"]} if op.kwargs.get("dtype") is not None else {}
        return Local({}, named, target=_SHARDED, keep=2)

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        """An all-gather of one sum per part; that of an op which is local already is of the last axis, and then says
        whether ranks have pairs of parts."""
        if choice.form != _SHARDED:
            return []
        extent = op.result.shape[_dim(op)]
        axes = op.kwargs.get("axes", ())
        parts = choice.result.outer * size * (2 if axes and axes[-1].paired else 1)
        return [("all_gather", op.result.bytes // extent * parts)]

    def communication_back(self, op: Op, choice: Choice, size: int) -> Communication:
        return [("reduce_scatter", bytes_) for _, bytes_ in self.communication(op, choice, size)]


def _dim(op: Op) -> int:
    return dim(op.arg(1, "dim"), len(op.result.shape))


def _outers(op: Op) -> tuple[int, ...]:
    """Of the axes that split the dim before."""
    axes = op.kwargs.get("axes", ())
    return tuple(op.kwargs.get("outers") or (1,) * len(axes))


def _histogram(op: Op) -> str | None:
    """Counts between bounds that are given: those of parts add up."""
    low, high = op.arg(2, "min", 0), op.arg(3, "max", 0)
    return "... -> v!" if low != high else None


RULES: dict[str, Rule] = {
    "aten.cumsum.default": _CumulativeSum(along(1), linear=together),
    _SHARDED: _CumulativeSum(along(1), linear=together),
    "aten.histc.default": Spec(_histogram, sums=True),
}
