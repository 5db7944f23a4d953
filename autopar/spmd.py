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
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from autopar.errors import ArgumentError


@dataclass(frozen=True, order=True)
class Type:
    """The type of one tensor on one axis. Compare and hash by value; ``str`` and :func:`parse` are inverses."""

    kind: str
    dim: int = -1
    outer: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},{self.outer})"

    __repr__ = __str__

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_whole(self) -> bool:
        """True where every rank of the axis holds the whole, final value."""
        return self.kind in ("R", "I")


I: Final = Type("I")  # noqa: E741 - the field's name for it
R: Final = Type("R")
P: Final = Type("P")


def S(dim: int, outer: int = 1) -> Type:
    """Split dim ``dim`` (seen as ``[outer, size / outer]``: the second part is split)."""
    return Type("S", dim, outer)


_TYPE = re.compile(r"(I|R|P)|S\((\d+)(?:,(\d+))?\)")


def parse(text: str) -> Type:
    """Inverse of ``str(type)``: ``"S(1)"``, ``"S(2,3)"``, ``"R"``. Raises ArgumentError."""
    match = _TYPE.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ArgumentError(f"{text!r} is not an spmd type; write I, R, P, S(dim) or S(dim,outer)")
    if match[1]:
        return Type(match[1])
    return S(int(match[2]), int(match[3] or 1))


@dataclass(frozen=True)
class Transition:
    """One change of type on one axis: the collective each way (``None``: no communication)."""

    function: str  # name in runtime/collectives.py
    forward: str | None
    backward: str | None


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
}


def transition(src: Type, dst: Type) -> Transition | None:
    """How ``src`` becomes ``dst``; None where there is no way (or nothing to do: ``src == dst``)."""
    if src == dst:
        return None
    return _TABLE.get((src.kind, dst.kind))


def can_become(src: Type, dst: Type) -> bool:
    return src == dst or (src.kind, dst.kind) in _TABLE


def local_shape(shape: tuple[int, ...], kind: Type, size: int) -> tuple[int, ...]:
    """The shape one rank of an axis of ``size`` ranks holds of a tensor of ``shape``."""
    if not kind.is_shard:
        return shape
    return (*shape[: kind.dim], shape[kind.dim] // size, *shape[kind.dim + 1 :])


def divides(shape: tuple[int, ...], kind: Type, size: int) -> bool:
    """Whether ``kind`` splits ``shape`` evenly over ``size`` ranks."""
    if not kind.is_shard:
        return True
    extent = shape[kind.dim]
    return extent % kind.outer == 0 and extent > 0 and (extent // kind.outer) % size == 0
