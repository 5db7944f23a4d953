"""Bounds of regions by themselves: found when one of them is next, for others that wait along with it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.search.space import TOGETHER, Region, works_of

if TYPE_CHECKING:
    from autopar.search.proof import Proof


@dataclass
class Ahead:
    """Of regions that wait in ``proof``, by how these work (``alike``); ``known`` are bounds, with what was known when
    they were found."""

    proof: Proof
    alike: dict[object, list[Region]] = field(default_factory=dict)
    opened: set[Region] = field(default_factory=set)
    known: dict[Region, tuple[object, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, proof: Proof, regions: Iterable[Region], known: Ahead | None = None) -> Ahead:
        """``known``: of another proof that these waited in."""
        found = cls(proof, known=dict(known.known) if known is not None else {})
        for region in regions:
            found.alike.setdefault(works_of(region), []).append(region)
        return found

    def open(self, region: Region) -> None:
        """Its points wait instead of it."""
        self.opened.add(region)

    def known_bound(self, region: Region) -> float:
        """By what was known when it was found; 0 if it wasn't."""
        return self.known[region][1] if region in self.known else 0.0

    def bound(self, region: Region) -> float:
        """By all that is known. Where that is new, others' are found with it that wait."""
        if self._is_new(region):
            some = [region, *self._next_like(region)]
            pairs = zip(map(self._knowledge, some), self.proof.region_bounds(some), strict=True)
            self.known |= zip(some, pairs, strict=True)
        return self.known[region][1]

    def _next_like(self, region: Region) -> list[Region]:
        """The best by what others say, of those with as many pipeline ranks and microbatches."""
        proof = self.proof
        waiting = [other for other in self.alike[works_of(region)] if other not in self.opened and other != region]
        bounds = zip(proof.all_at_first(waiting).tolist(), range(len(waiting)), strict=True)
        new = ((bound, n) for bound, n in bounds if not proof.is_beaten(bound) and self._is_new(waiting[n]))
        return [waiting[n] for _, n in heapq.nsmallest(TOGETHER - 1, new)]

    def _is_new(self, region: Region) -> bool:
        return region not in self.known or self.known[region][0] != self._knowledge(region)

    def _knowledge(self, region: Region) -> object:
        """What its bound depends on."""
        profile = self.proof.profile(region)
        return self.proof.scaling.layers(region.key).tobytes() if profile is None else profile.key
