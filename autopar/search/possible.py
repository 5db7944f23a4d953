"""What can run, as far as numbers tell, whatever it takes and holds: what is suggested where pins leave nothing."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.errors import ArgumentError
from autopar.mesh import EXPERTS, MOST_RANKS, Mesh
from autopar.planner.modes import MODES
from autopar.schedules.registry import SCHEDULES
from autopar.search.pins import SIZES, Pins
from autopar.search.space import Family, Region, Sizes, cut, divides, divisors, lacks, regions, schedules


@dataclass(frozen=True)
class Possible:
    """Of the space that ``pins`` leave of a model; ``heads`` are the split heads that it has."""

    sizes: Sizes
    pins: Pins
    heads: tuple[str, ...]

    def under(self, pins: Pins) -> Possible:
        return replace(self, pins=pins)

    def regions(self) -> list[Region]:
        return [region for region in regions(self.sizes, self.pins) if self.runs(region)]

    def runs(self, region: Region) -> bool:
        """Whether any of its families does."""
        return not any(lacks(region.mesh, self.pins.options)) and self._has_family(region)

    def _has_family(self, region: Region) -> bool:
        """Whether there is one of so many stages and microbatches."""
        every = (Family(region, *names) for names in schedules(region, self.sizes, self.pins, self.heads))
        return any(self.suits(family) and not any(self._needs(family)) for family in every)

    def allows(self, family: Family) -> bool:
        return self.suits(family) and not any(self.needs(family))

    def suits(self, family: Family) -> bool:
        """Whether schedule, chunks and vocabulary go with each other and the model, whatever the degrees."""
        row, mode = SCHEDULES.get(family.schedule), MODES[family.vocabulary]
        if mode.schedule and family.schedule not in ("1f1b", mode.schedule):
            return False
        if mode.head and not self.heads:
            return False
        if row is None:  # synthesized
            return True
        return mode.head in row.heads and (not row.chunks or family.chunks in (None, row.chunks))

    def needs(self, family: Family) -> Iterator[str]:
        """What its numbers have to be, and aren't."""
        return itertools.chain(self._needs(family), lacks(family.region.mesh, self.pins.options))

    def _needs(self, family: Family) -> Iterator[str]:
        mesh, row, mode = family.region.mesh, SCHEDULES.get(family.schedule), MODES[family.vocabulary]
        most = self.sizes.most_stages(mesh.tp, self.pins.options.head_chunks, mode)
        chunks = family.chunks or (row.chunks or 2 if row is not None else 1)
        if mesh.pp * chunks > most:
            yield f"pp x chunks <= {most}" if chunks > 1 else f"pp <= {most}"
        if row is not None and family.region.microbatches < row.least_per_rank * mesh.pp:
            yield f"microbatches >= {row.least_per_rank} x pp"
        if mode.head and mesh.pp == 1:
            yield "pp >= 2"

    def as_pinned(self, region: Region) -> Family:
        """With what was asked for, whether it can run or not."""
        pins = self.pins
        schedule = pins.schedule or ("1f1b" if pins.chunks in (None, 1) else "interleaved")
        return Family(region, schedule, pins.chunks, pins.vocabulary or "redistributed")

    def nearest_gpus(self) -> int | None:
        """The most GPUs below those of the pins on which anything can run, or else the fewest above; None where there
        are none."""
        every = sorted(itertools.product(*map(self._degrees, SIZES)), key=math.prod)
        fewer = (some for some in reversed(every) if math.prod(some) < self.pins.gpus)
        more = (some for some in every if math.prod(some) > self.pins.gpus)
        cuts = functools.cache(self._cuts)
        tried = (dict(zip(SIZES, some, strict=True)) for some in itertools.chain(fewer, more))
        return next((math.prod(some.values()) for some in tried if self._run(some, cuts)), None)

    def _degrees(self, axis: str) -> list[int]:
        sizes = self.sizes
        most = {"pp": sizes.units, "dp": sizes.batch, "cp": max(sizes.lengths, default=1)}
        most["tp"] = max((*sizes.heads, *sizes.widths), default=1)
        tried = divisors(sizes.batch) if axis == "dp" else range(1, most[axis] + 1)
        pinned = self.pins.mesh.get(axis)
        return [size for size in tried if pinned in (None, size) and (axis == "dp" or divides(axis, size, sizes))]

    def _run(self, degrees: Mapping[str, int], cuts: Callable[[Mesh], bool]) -> bool:
        """Whether anything does on these, with the experts that were pinned."""
        pp, dp, tp = (degrees[axis] for axis in ("pp", "dp", "tp"))
        if math.prod(degrees.values()) > MOST_RANKS or not cuts(Mesh(pp=pp, dp=dp, tp=tp)):
            return False
        experts = {name: self.pins.mesh[name] for name in EXPERTS if name in self.pins.mesh}
        if not divides("ep", experts.get("ep", 1), self.sizes):
            return False
        try:
            mesh = Mesh.of({**degrees, **experts}, math.prod(degrees.values()))
        except ArgumentError:  # ep can't be borrowed from these
            return False
        return not any(lacks(mesh, self.pins.options))

    def _cuts(self, mesh: Mesh) -> bool:
        """Whether there are stages and microbatches for as many ranks, over however many sequences are split."""
        return any(map(self._has_family, cut(mesh, self.sizes, self.pins)))
