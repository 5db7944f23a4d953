"""Per-axis types of a distributed tensor, and the one table of transitions between them.

On every mesh axis a tensor has one of four types (names as in DTensor and ``spmd_types``):

======  ===========================================  =======================
type    the value on the axis' ranks                  its gradient
======  ===========================================  =======================
``I``   equal on all                                  equal on all
``R``   equal on all                                  a pending sum
``S``   dim ``dim`` is split                          split the same way
``P``   a pending sum                                 equal on all
======  ===========================================  =======================

A shard may be *strided*: ``S(2,3)`` sees dim 2, of size n, as ``[3, n/3]`` and splits the second part. That
is how one weight holds q, k and v (outer 3) and how ``[batch, seq] -> [batch * seq]`` keeps a split of seq.

A shard may be *ragged*: ``S(0,ragged)`` splits rows that are sorted by groups (the tokens of each expert), and each
rank holds the rows of its own groups, however many those are. Shapes in a graph say how many there are on average.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from autopar.errors import ArgumentError

RAGGED: Final = 0
"""The ``outer`` of a ragged shard."""


@dataclass(frozen=True, order=True)
class Type:
    """The type of one tensor on one axis. Compare and hash by value; ``str`` and :func:`parse` are inverses."""

    kind: str
    dim: int = -1
    outer: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((ord(self.kind), self.dim, self.outer)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]  # kept: types are keys everywhere

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Type):
            return NotImplemented
        return self.kind == other.kind and self.dim == other.dim and self.outer == other.outer

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},{self.outer or 'ragged'})"

    __repr__ = __str__

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_ragged(self) -> bool:
        return self.is_shard and self.outer == RAGGED

    @property
    def is_whole(self) -> bool:
        """True where every rank of the axis holds the whole, final value."""
        return self.kind in ("R", "I")


I: Final = Type("I")  # noqa: E741 - the field's name for it
R: Final = Type("R")
P: Final = Type("P")


def S(dim: int, outer: int = 1) -> Type:
    """Split dim ``dim`` (seen as ``[outer, size / outer]``: the second part is split); ``outer`` RAGGED: by groups."""
    return _PLAIN[dim] if outer == 1 and 0 <= dim < len(_PLAIN) else Type("S", dim, outer)


_PLAIN: Final = tuple(Type("S", dim) for dim in range(8))


_TYPE = re.compile(r"(I|R|P)|S\((\d+)(?:,(\d+|ragged))?\)")


def parse(text: str) -> Type:
    """Inverse of ``str(type)``: ``"S(1)"``, ``"S(2,3)"``, ``"S(0,ragged)"``, ``"R"``. Raises ArgumentError."""
    match = _TYPE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ArgumentError(f"{text!r} is not an spmd type; write I, R, P, S(dim) or S(dim,outer)")
    if match[1]:
        return Type(match[1])
    return S(int(match[2]), RAGGED if match[3] == "ragged" else int(match[3] or 1))


@dataclass(frozen=True)
class Transition:
    """One change of type on one axis: the collective each way (``None``: no communication)."""

    function: str  # name in runtime/collectives.py
    forward: str | None
    backward: str | None
    reorders: bool = False
    """Both types are shards of one dim: all ranks gather the whole."""

    def sent_bytes(self, before: int, after: int, size: int) -> int:
        """What a collective of this transition is about, of a tensor of so many local bytes ``before`` and ``after``
        it, on an axis of ``size`` ranks: the larger of what a rank gives to it and gets."""
        return max(before, after) * (size if self.reorders else 1)


_TABLE: Final[dict[tuple[str, str], Transition]] = {
    ("I", "R"): Transition("convert", None, "all_reduce"),
    ("S", "R"): Transition("all_gather", "all_gather", "reduce_scatter"),
    ("S", "I"): Transition("all_gather", "all_gather", None),
    ("P", "I"): Transition("all_reduce", "all_reduce", None),
    ("P", "R"): Transition("all_reduce", "all_reduce", "all_reduce"),
    ("P", "S"): Transition("reduce_scatter", "reduce_scatter", "all_gather"),
    ("S", "S"): Transition("all_to_all", "all_to_all", "all_to_all"),
    ("I", "S"): Transition("convert", None, "all_gather"),
    ("R", "S"): Transition("convert", None, None),
    ("I", "P"): Transition("convert", None, None),
    ("R", "P"): Transition("convert", None, None),
}


_REORDERED: Final = Transition("all_to_all", "all_gather", "all_gather", reorders=True)


def transition(src: Type, dst: Type) -> Transition | None:
    """How ``src`` becomes ``dst``; None where there is no way (or nothing to do: ``src == dst``).

    Nothing but the ops that make and take them knows how many rows a ragged shard has: it has no way to other types.
    """
    if src.outer == RAGGED or dst.outer == RAGGED:
        return None
    if src == dst:
        return None
    return _REORDERED if src.is_shard and src.dim == dst.dim and dst.is_shard else _TABLE.get((src.kind, dst.kind))


def local_shape(shape: tuple[int, ...], kind: Type, size: int) -> tuple[int, ...]:
    """The shape one rank of an axis of ``size`` ranks holds of a tensor of ``shape``."""
    if not kind.is_shard:
        return shape
    return (*shape[: kind.dim], shape[kind.dim] // size, *shape[kind.dim + 1 :])


def row_dims(shape: Sequence[int], parts: int) -> int:
    """How many leading dims make up the rows of a tensor, of which ``parts`` are equal: more than the first where that
    is shorter than there are parts (a stack of a few experts)."""
    rows = 1
    for dims, extent in enumerate(shape, 1):
        rows *= extent
        if rows >= parts:
            return dims
    return len(shape)


def rows_shape(shape: Sequence[int], parts: int, dims: int = 1) -> tuple[int, ...]:
    """The shape of each of ``parts`` of a tensor's rows (its first ``dims`` dims); the last end with padding."""
    if parts == 1:
        return tuple(shape)
    return (*(1,) * (dims - 1), -(-math.prod(shape[:dims]) // parts), *shape[dims:])


def divides(shape: tuple[int, ...], kind: Type, size: int) -> bool:
    """Whether ``kind`` splits ``shape`` evenly over ``size`` ranks."""
    if not kind.is_shard:
        return True
    extent = shape[kind.dim]
    if kind.is_ragged:
        return extent % size == 0
    return extent % kind.outer == 0 and extent > 0 and (extent // kind.outer) % size == 0
