"""Named mesh axes: rank <-> coordinates, and the groups of ranks along each axis.

Axes are ordered outermost to innermost (``pp, dp, cp, tp``), names as in torchtitan; the last varies fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from autopar.errors import ArgumentError

AXES: Final = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes of a job; every axis of :data:`AXES` is present, absent ones have size 1."""

    pp: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = self.size(axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ArgumentError(f"mesh axis {axis!r} has size {size!r}; it must be a whole number of at least 1")

    @classmethod
    def of(cls, sizes: Mapping[str, int] | None, gpus: int) -> Mesh:
        """The mesh a user pinned. Raises ArgumentError where it names another axis or misses ``gpus``."""
        sizes = dict(sizes or {"dp": gpus})
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise ArgumentError(f"mesh has unknown axes {unknown}; known axes are {list(AXES)}")
        mesh = cls(**sizes)
        if mesh.world != gpus:
            product = " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES)
            raise ArgumentError(f"mesh {product} is {mesh.world} ranks, but gpus={gpus}; make the product equal")
        return mesh

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES)

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.size(axis) for axis in AXES)

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along ``axis``."""
        return math.prod(self.shape[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.stride(axis) % self.size(axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.world:
            raise ArgumentError(f"rank {rank} is not in 0 … {self.world - 1}")
        return {axis: self.coordinate(rank, axis) for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at the given coordinates; an axis left out is 0."""
        return sum(coordinates.get(axis, 0) * self.stride(axis) for axis in AXES)

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only along ``axis``, in order."""
        base = rank - self.coordinate(rank, axis) * self.stride(axis)
        return tuple(base + i * self.stride(axis) for i in range(self.size(axis)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups along ``axis``, by their first rank."""
        return sorted({self.group(rank, axis) for rank in range(self.world)})

    def dp_shards(self, zero_ranks: int) -> int:
        """How many neighbours on dp share one copy of what ZeRO splits (0: all). Raises ArgumentError."""
        size = zero_ranks or self.dp
        if self.dp % size:
            fits = [n for n in range(1, self.dp + 1) if self.dp % n == 0]
            raise ArgumentError(f"zero_ranks={zero_ranks} doesn't divide dp {self.dp}; zero_ranks may be one of {fits}")
        return size

    def to_json(self) -> dict[str, int]:
        return {axis: self.size(axis) for axis in AXES}
