"""Profiles that say what other regions than their own take: which of those known do, and which are worth making."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from autopar.mesh import Mesh
from autopar.search.profiles import Key, Profile, Profiler
from autopar.search.scaling import alone, thin
from autopar.search.space import Region

Reference: TypeAlias = tuple[Key, Mesh, int]
"""A profile to make: its key, and a mesh and a number of microbatches that it serves."""

_Axis: TypeAlias = tuple[str, int, bool]
"""Its name and size, and whether experts are split over it beside ep."""

_SHARED: Final = 4  # regions that one has to serve which is made for its bound alone


@dataclass(frozen=True)
class References:
    """Of a search, by how many regions they serve: those with so many rows on all ranks of ep (``rows``), as many ranks
    on an axis (``axes``) or a multiple of that, with experts over it or not (``parts``), and the same ``ranks`` (all
    axes of a key). Its ``batch`` has so many rows, of which each rank of ep has as many."""

    profiler: Profiler
    batch: int
    rows: Mapping[int, int]
    axes: Mapping[tuple[str, int], int]
    parts: Mapping[_Axis, int]
    ranks: Mapping[Key, int]

    @classmethod
    def of(cls, profiler: Profiler, batch: int, keys: Mapping[Key, int]) -> References:
        """``keys`` are those of all regions, with how many have each."""
        rows, axes, parts, ranks = Counter[int](), Counter[tuple[str, int]](), Counter[_Axis](), Counter[Key]()
        for key, count in keys.items():
            rows[key.rows * key.ep] += count
            ranks[_ranks(key)] += count
            for name, size, borrowed in _axes(key):
                axes[name, size] += count
                for part in _parts(size):
                    parts[name, part, borrowed] += count
        return cls(profiler, batch, rows, axes, parts, ranks)

    def known(self) -> list[Profile]:
        """Those that bound others: placed for the fastest passes, with the head as it is."""
        known = self.profiler.known.items()
        return [p for k, p in known if k == k.plain and (k.tp == 1 or math.isinf(k.counted))]

    def wanted(self, region: Region) -> Reference | None:
        """One to make that bounds ``region`` and many others: the whole batch on a part of one of its axes, the
        shortest first, which bounds the most; None where there is none."""
        parts = ((part, name, borrowed) for name, size, borrowed in _axes(region.key) for part in _parts(size))
        served = sorted(each for each in parts if self.parts[each[1], each[0], each[2]] >= _SHARED)
        return next(filter(None, itertools.starmap(self._on, served)), None)

    def closer(self, region: Region) -> Reference | None:
        """One that bounds it better and fewer others; None where there is none."""
        return self._plain(region) or self._on_all(region)

    def likely(self, region: Region) -> Reference | None:
        """One to make that says what ``region`` and others are likely to take; None where there is none."""
        return self._alone(region) or self._thin(region)

    def _plain(self, region: Region) -> Reference | None:
        """The rows of this region's ep without any axis."""
        rows = region.rows * region.mesh.ep
        plain = Key(rows, 1, 1, 1, several=rows < self.batch, copies=False)
        if self._is_known(plain) or self.rows.get(rows, 0) < _SHARED:
            return None
        return plain, Mesh(), self.batch // rows

    def _on_all(self, region: Region) -> Reference | None:
        """The whole batch on all of its axes."""
        key = region.key
        if self.ranks.get(_ranks(key), 0) < _SHARED:
            return None
        counted = math.inf if key.tp > 1 else 0
        return self._whole(Key(self.batch // key.ep, key.ep, key.cp, key.tp, key.borrowed, counted=counted))

    def _on(self, ranks: int, name: str, borrowed: bool = False) -> Reference | None:
        """The whole batch on so many ranks of one axis; with experts over it, where that is ``borrowed``."""
        sizes: dict[str, Any] = {name: ranks}
        key = alone(name, Key(0, 1, 1, 1)._replace(**sizes), self.batch)
        return self._whole(key._replace(borrowed=(name,) if borrowed else ()))

    def _whole(self, key: Key) -> Reference | None:
        """Of the whole batch, if it isn't made."""
        return None if self._is_known(key) else (key, Mesh(ep=key.ep, cp=key.cp, tp=key.tp, borrowed=key.borrowed), 1)

    def _alone(self, region: Region) -> Reference | None:
        """The whole batch with one of its axes alone, over which experts are not split."""
        for name, size, _ in _axes(region.key):
            if self.axes.get((name, size), 0) >= _SHARED and (found := self._on(size, name)) is not None:
                return found
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


def _axes(key: Key) -> Iterator[_Axis]:
    for name in key.axes():
        yield name, getattr(key, name), name in key.borrowed


def _parts(size: int) -> list[int]:
    return [part for part in range(2, size + 1) if size % part == 0]
