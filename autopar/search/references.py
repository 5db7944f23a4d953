"""Profiles that say what other regions than their own take: which of those known do, and which are worth making."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from autopar.mesh import Mesh
from autopar.search.profiles import Key, Profile, Profiler
from autopar.search.scaling import alone, thin
from autopar.search.space import Region

Reference: TypeAlias = tuple[Key, Mesh, int]
"""A profile to make: its key, and a mesh and a number of microbatches that it serves."""

_SHARED: Final = 4  # regions that one has to serve which is made for its bound alone


@dataclass(frozen=True)
class References:
    """Of a search, by how many regions have them: rows on all ranks of ep (``rows``), ``axes`` (name and size), and the
    same ``ranks`` (all axes of a key). Its ``batch`` has so many rows."""

    profiler: Profiler
    batch: int
    rows: Mapping[int, int]
    axes: Mapping[tuple[str, int], int]
    ranks: Mapping[Key, int]

    @classmethod
    def of(cls, profiler: Profiler, batch: int, keys: Mapping[Key, int]) -> References:
        """``keys`` are those of all regions, with how many have each."""
        rows, axes, ranks = Counter[int](), Counter[tuple[str, int]](), Counter[Key]()
        for key, count in keys.items():
            rows[key.rows * key.ep] += count
            ranks[_ranks(key)] += count
            for axis in key.axes():
                axes[axis, getattr(key, axis)] += count
        return cls(profiler, batch, rows, axes, ranks)

    def known(self) -> list[Profile]:
        """Those that bound others: placed for the fastest passes, with the head as it is."""
        known = self.profiler.known.items()
        return [p for k, p in known if k == k.plain and (k.tp == 1 or math.isinf(k.counted))]

    def wanted(self, region: Region, *, likely: bool = False) -> Reference | None:
        """One to make that bounds ``region`` and others, or that says what these are ``likely`` to take; None where
        there is none."""
        kinds = (self._alone, self._thin) if likely else (self._plain, self._alone)
        return next(filter(None, (of(region) for of in kinds)), None)

    def fastest(self, region: Region) -> Reference | None:
        """The fastest passes of the region's own rows on its own axes, which bound others with as many or fewer rows;
        None where tp leaves no choice, few others have them, or it is made."""
        key = region.key._replace(copies=False, counted=math.inf)
        if key.tp == 1 or self.ranks.get(_ranks(key), 0) < _SHARED or self._is_known(key):
            return None
        return key, region.mesh, region.microbatches

    def _plain(self, region: Region) -> Reference | None:
        """The rows of this region's ep without any axis."""
        rows = region.rows * region.mesh.ep
        plain = Key(rows, 1, 1, 1, several=rows < self.batch, copies=False)
        if self._is_known(plain) or self.rows.get(rows, 0) < _SHARED:
            return None
        return plain, Mesh(), self.batch // rows

    def _alone(self, region: Region) -> Reference | None:
        """The whole batch with one of its axes alone."""
        for axis in region.key.axes():
            key, size = alone(axis, region.key, self.batch), getattr(region.key, axis)
            is_shared = self.axes.get((axis, size), 0) >= _SHARED and self.batch % key.rows == 0
            if is_shared and not self._is_known(key):
                return key, Mesh(**{axis: size}), 1
        return None

    def _thin(self, region: Region) -> Reference | None:
        """A few rows on the region's tp alone."""
        tp = region.key.tp
        if tp == 1 or self.axes.get(("tp", tp), 0) < _SHARED:
            return None
        key = thin(region.key, self.batch)
        return None if self._is_known(key) else (key, Mesh(tp=tp), self.batch // key.rows)

    def _is_known(self, key: Key) -> bool:
        return key in self.profiler.known or key in self.profiler.refused


def _ranks(key: Key) -> Key:
    """The axes of ``key``, of any rows."""
    return Key(0, key.ep, key.cp, key.tp, key.borrowed)
