"""Named mesh axes: rank <-> coordinates, and the groups of ranks along each axis.

Axes are ordered outermost to innermost (``pp, dp, cp, tp``), names as in torchtitan; the last varies fastest. Experts
are split over ``ep`` ranks borrowed from the others: a part of dp, which becomes an axis of its own between dp and cp,
and maybe all of cp and tp. :class:`Mesh` has the sizes of these *elementary* axes, whose product is the world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from autopar.errors import ArgumentError

AXES: Final = ("pp", "dp", "ep", "cp", "tp")
DATA: Final = ("dp", "ep", "cp")
"""The axes that split tokens: parameters are whole on them (experts aside), and gradients are pending sums."""

MOST_RANKS: Final = 2**24
"""Of a mesh; no cluster has as many devices, and what goes through all ranks or divisors would not end."""

EXPERTS: Final = ("ep", "etp", "ecp")
"""What of a mesh that a user pins is about experts."""

_GIVEN: Final = ("pp", "dp", "cp", "tp", *EXPERTS, "paired")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the elementary axes of a job; every axis of :data:`AXES` is present, absent ones have size 1.

    ``dp`` times ``ep`` ranks split the rows of a batch. ``borrowed`` are axes beside ``ep`` over which experts are
    split too. ``paired``: of a sequence in 2 cp parts, rank i holds parts i and 2 cp - 1 - i, so that causal attention
    is as much work on each; else it holds neighbours.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    borrowed: tuple[str, ...] = ()
    paired: bool = False

    def __post_init__(self) -> None:
        for axis in AXES:
            check_ranks(f"mesh axis {axis!r} has size ", self.size(axis))
        check_ranks("the number of ranks of a mesh is ", self.world)

    @classmethod
    def of(cls, sizes: Mapping[str, int] | None, gpus: int) -> Mesh:
        """The mesh a user pinned: ``dp`` is all of it, ``ep`` its part (or more) that experts are split over.

        ``etp`` (as in torchtitan) says how many ranks of tp may split one expert: all, or 1, so that ``ep`` borrows
        tp; without it, tp is borrowed where the rest doesn't do. So does ``ecp`` of the ranks of cp that have an
        expert: all, or 1. Raises ArgumentError where the mesh names another axis, misses ``gpus``, or ``ep`` can't be
        borrowed.
        """
        sizes = dict(sizes or {"dp": gpus})
        unknown = sorted(set(sizes) - set(_GIVEN))
        if unknown:
            raise ArgumentError(f"mesh has unknown axes {unknown}; known axes are {list(_GIVEN[:-1])}")
        for axis, size in sizes.items():
            if axis != "paired":
                check_ranks(f"mesh axis {axis!r} has size ", size)
        pp, dp, cp, tp, ep = (sizes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp", "ep"))
        plain = cls(pp=pp, dp=dp, cp=cp, tp=tp, paired=bool(sizes.get("paired", 0)))
        if plain.world != gpus:
            raise ArgumentError(f"mesh {plain} is {plain.world} ranks, but gpus={gpus}; make the product equal")
        return plain._with_experts(ep, {"tp": sizes.get("etp"), "cp": sizes.get("ecp")})

    def _with_experts(self, ep: int, whole: Mapping[str, int | None]) -> Mesh:
        """Borrow ``ep`` ranks: from dp alone if that divides, else with all of cp, of tp, or of both; ``whole`` says
        over how many ranks of these each expert has to be (None: either)."""
        for axis, size in whole.items():
            if size not in (None, 1, self.size(axis)):
                name = f"e{axis}"
                raise ArgumentError(
                    f"mesh axis {name!r} has size {size}; it may be 1 or that of {axis}, {self.size(axis)}"
                )
        inners = []
        for borrowed in ((), ("cp",), ("tp",), ("cp", "tp")):
            wanted = {axis: 1 if axis in borrowed else self.size(axis) for axis in whole if self.size(axis) > 1}
            if ep > 1 and any(whole[axis] not in (None, size) for axis, size in wanted.items()):
                continue
            inner = math.prod(self.size(axis) for axis in borrowed)
            inners.append(inner)
            if ep % inner == 0 and self.dp % (ep // inner) == 0:
                part = ep // inner
                kept = tuple(axis for axis in borrowed if self.size(axis) > 1)
                return Mesh(self.pp, self.dp // part, part, self.cp, self.tp, kept, self.paired)
        fits = {part * inner for part in range(1, self.dp + 1) if self.dp % part == 0 for inner in inners}
        raise ArgumentError(
            f"mesh axis 'ep' has size {ep}, which can't be borrowed from {self}: it must be a part of dp, that times "
            f"cp, that times tp, or that times both; ep may be one of {sorted(fits)}"
        )

    def __str__(self) -> str:
        names = [axis for axis in ("pp", "dp", "cp", "tp") if axis != "cp" or self.cp > 1]
        sizes = {axis: self.size(axis) for axis in names} | {"dp": self.replicas}
        experts = f", ep {self.experts}" if self.experts > 1 else ""
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) + experts

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    @property
    def replicas(self) -> int:
        """How many parts the rows of a batch are split in."""
        return self.dp * self.ep

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which experts are split, outermost first."""
        return (*(("ep",) if self.ep > 1 else ()), *self.borrowed)

    @cached_property
    def experts(self) -> int:
        """How many ranks share one copy of all experts."""
        return math.prod(self.size(axis) for axis in self.expert_axes)

    @cached_property
    def _tokens(self) -> int:
        """How many ranks split tokens."""
        return math.prod(self.size(axis) for axis in DATA)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.pp, self.dp, self.ep, self.cp, self.tp)

    @cached_property
    def world(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def _strides(self) -> dict[str, int]:
        return {axis: math.prod(self.shape[place + 1 :]) for place, axis in enumerate(AXES)}

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along ``axis``."""
        return self._strides[axis]

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.stride(axis) % self.size(axis)

    def places(self, axis: str) -> list[int]:
        """The coordinate of every rank along ``axis``."""
        along = [place for place in range(self.size(axis)) for _ in range(self.stride(axis))]
        return along * (self.world // len(along))

    def coordinates(self, rank: int) -> dict[str, int]:
        if not isinstance(rank, int) or not 0 <= rank < self.world:
            raise ArgumentError(f"rank {rank!r} is not in 0 … {self.world - 1}")
        return {axis: self.coordinate(rank, axis) for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates; an axis left out is 0."""
        return sum(coordinates.get(axis, 0) * self.stride(axis) for axis in AXES)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axes``, in order."""
        line = [rank - sum(self.coordinate(rank, axis) * self.stride(axis) for axis in axes)]
        for axis in axes:
            line = [first + i * self.stride(axis) for first in line for i in range(self.size(axis))]
        return tuple(sorted(line))

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups along ``axes``, by their first rank."""
        return sorted({self.group(rank, *axes) for rank in range(self.world)})

    def data_axes(self, split: Sequence[str] = ()) -> tuple[str, ...]:
        """The axes on which a parameter is whole that is split on ``split``, and its gradient a pending sum."""
        return tuple(axis for axis in DATA if self.size(axis) > 1 and axis not in split)

    def data_lines(self) -> tuple[tuple[str, ...], ...]:
        """What :meth:`data_axes` can be: of most parameters, and of experts, which may be on cp or ep alone, too."""
        splits = [(), self.expert_axes, *((("cp",), ("ep", "cp"), ("ep",)) if self.experts > 1 else ())]
        return tuple(dict.fromkeys(map(self.data_axes, splits)))

    def zero_shards(self, zero_ranks: int, axes: Sequence[str] = ()) -> int:
        """How many neighbours along the joint group of ``axes`` share one copy of what ZeRO splits (``zero_ranks`` 0:
        all); ``axes`` () are those of most parameters.

        Raises ArgumentError where ``zero_ranks`` doesn't divide the ranks that split tokens.
        """
        everyone = self._tokens
        if zero_ranks and everyone % zero_ranks:
            fits = [n for n in range(1, everyone + 1) if everyone % n == 0]
            raise ArgumentError(
                f"zero_ranks={zero_ranks} doesn't divide the {everyone} ranks of dp x cp; "
                f"zero_ranks may be one of {fits}"
            )
        line = math.prod(self.size(axis) for axis in axes) if axes else everyone
        return math.gcd(zero_ranks, line) if zero_ranks else line

    def to_json(self) -> dict[str, int]:
        """The sizes as a user gives them; :meth:`of` is the inverse."""
        sizes = {"pp": self.pp, "dp": self.replicas, "cp": self.cp, "tp": self.tp, "ep": self.experts}
        sizes |= {"etp": 1 if "tp" in self.borrowed else self.tp, "paired": int(self.paired)}
        left_out = {"cp": 1, "ep": 1, "paired": 0} | ({"etp": sizes["etp"]} if 1 in (self.experts, self.tp) else {})
        kept = {axis: size for axis, size in sizes.items() if left_out.get(axis) != size}
        if Mesh.of(kept, self.world) != self:
            kept["ecp"] = 1 if "cp" in self.borrowed else self.cp
        return kept

    @classmethod
    def from_json(cls, sizes: Mapping[str, int]) -> Mesh:
        """Inverse of :meth:`to_json`. Raises ArgumentError."""
        return cls.of(sizes, math.prod(sizes.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")))


def check_count(name: str, count: object, least: int = 1) -> int:
    """``count``. Raises ArgumentError, which begins with ``name``, where that is no whole number from ``least`` up."""
    if not isinstance(count, int) or isinstance(count, bool) or count < least:
        raise ArgumentError(f"{name}{count!r}; it must be a whole number of at least {least}")
    return count


def check_ranks(name: str, count: object) -> None:
    """Raises ArgumentError, which begins with ``name``, where that can't be a number of ranks."""
    if check_count(name, count) > MOST_RANKS:
        raise ArgumentError(f"{name}{count}; it must be at most {MOST_RANKS}, more than any cluster has devices")
