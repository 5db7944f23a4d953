"""A first good plan: the regions that look best, by estimates instead of bounds.

What is proven is the loop's (:mod:`autopar.search.loop`); a good step that is known early lets it discard most regions
unplaced. An estimate is a bound made likely: with the bubble of a common schedule, the best ZeRO stage, and what
has to be recomputed beside its state.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.search.space import Family, Point, Region, promise, work_of
from autopar.search.space import savers as saving

if TYPE_CHECKING:
    from autopar.search.costing import Outcome
    from autopar.search.loop import Search
    from autopar.search.profiles import Profile

_TRIES = 4  # points of one region
_ALIKE = 2  # of them with one schedule and ZeRO stage
_FAILURES = 2  # points with the same pp, tp and schedule that may turn out not to fit
_AWAY = ("optimizer",)  # what is on the host first
_ACTIVATIONS = ("activations",)
_POLISHED = 4  # points like the best
_REGIONS_POLISHED = 2
_AWAY_TRIED = 3  # points with activations on the host
_NEXT = 4  # regions next to the best
_FACTOR = 3
_SEARCHES = 0.6  # of the work of a whole search
_LONGER = 4  # times that, if what waits may still be better by much
_NEAR = 1.4  # times the least estimate that waits: less is good enough
_WORK = 1e5  # of a point: about two seconds
_LOOKS = 5000  # at regions and points


def dive(search: Search, regions: list[Region]) -> None:
    """Lay out the most promising points, plain ones first; then what differs from the best in a few choices."""
    node = search.costing.cluster.devices_per_node
    plain = [r for r in regions if r.mesh.tp <= node and r.mesh.cp == 1 and not r.mesh.borrowed]
    for some, savers in ((plain, False), (regions, False), (plain, True)):
        if not search.outcomes:
            _Dive(search, savers).run(some)
    if search.outcomes:
        _climb(search, regions)
        _polish(search)


@dataclass
class _Dive:
    """What waits, the best estimate first; with state on the host alone, if these are ``savers``."""

    search: Search
    savers: bool
    waiting: list[tuple[float, int, Region | Point]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    full: defaultdict[object, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    tried: Counter[object] = field(default_factory=Counter)
    failed: Counter[object] = field(default_factory=Counter)

    def run(self, regions: list[Region]) -> None:
        search = self.search
        for region in regions:
            self._wait(_first_estimate(search, region), region)
        for _ in range(_LOOKS):
            if not self.waiting or self.waiting[0][0] >= search.best_seconds:
                return
            limit = _SEARCHES * search.most_work * (1 if search.best_seconds < _NEAR * self.waiting[0][0] else _LONGER)
            if search.outcomes and search.work > limit:
                return
            estimate, _, item = heapq.heappop(self.waiting)
            if isinstance(item, Point):
                self._try(item)
            else:
                self._look_at(estimate, item)

    def _wait(self, estimate: float, item: Region | Point) -> None:
        if estimate < self.search.best_seconds:
            heapq.heappush(self.waiting, (estimate, next(self.numbers), item))

    def _look_at(self, estimate: float, region: Region) -> None:
        """Estimate it better, by its memory, then by profiles of others; then its points. Where none of these fits,
        neither do as many rows on as few stages."""
        search, mesh = self.search, region.mesh
        full = self.full[mesh.ep, mesh.cp, mesh.tp, mesh.borrowed]
        if any(mesh.pp <= pp and region.rows >= rows for pp, rows in full):
            return
        better = max(_first_estimate(search, region), search.likely(region, away=self.savers))
        if better > estimate:
            self._wait(better, region)
        elif search.place_reference(region):
            self._wait(estimate, region)
        elif (profile := search.place(region)) is not None:
            found = list(self._points(region, profile))
            for item in found:
                self._wait(*item)
            if not found:
                full.append((mesh.pp, region.rows))
            elif not search.outcomes and min(found, key=itemgetter(0))[0] < _NEAR * self.waiting[0][0]:
                self._try(min(found, key=itemgetter(0))[1])

    def _points(self, region: Region, profile: Profile) -> Iterator[tuple[float, Point]]:
        """Its points that may fit, with what they are likely to take."""
        for family in self.search.families_of(region):
            points = _points(self.search, family, savers=self.savers)
            for point, estimate in zip(points, self.search.estimates(points, profile), strict=True):
                if not math.isinf(estimate):
                    yield estimate * promise(point), point

    def _try(self, point: Point) -> None:
        """Lay it out, unless points like it were tried often enough."""
        region, search = point.region, self.search
        alike, degrees = (region, point.schedule, point.zero), (region.mesh.pp, region.mesh.tp, point.schedule)
        if self.tried[region] == _TRIES or self.tried[alike] == _ALIKE or self.failed[degrees] == _FAILURES:
            return
        profile = search.profile(region)
        assert profile is not None
        if max(search.costing.bound(point, profile), search.costing.memory_bound(point, profile)) < search.best_seconds:
            self.tried.update((region, alike))
            try:
                search.lay_out(point)
            except AutoparError:
                self.failed[degrees] += 1


def _first_estimate(search: Search, region: Region) -> float:
    """With the bubble of a schedule that splits backwards."""
    root, pp = search.root, region.mesh.pp
    forward = math.fsum(unit.forward for unit in root.units)
    wait = search.share(region) * forward * (pp - 1) / pp
    return search.by_scaling(region) + wait


def _points(search: Search, family: Family, *, savers: bool) -> list[Point]:
    """Its points; with state on the host alone, if these are ``savers``."""
    points = [point for point in search.stored(family) if work_of(point) <= _WORK]
    if savers:
        ways = [offload for offload, _ in saving(family.region, search.costing.cluster, search.pins)]
        points = [point._replace(offload=_AWAY) for point in points if _AWAY in ways]
    return points


def _climb(search: Search, regions: list[Region]) -> None:
    """Lay out the likely best of regions that differ from the best in one degree or the rows, while that finds any."""
    seen: set[Region] = set()
    limit = search.work + search.most_work
    while (best := search.ranked()[0].point.region) not in seen:
        seen.add(best)
        near = [(search.likely(r), n, r) for n, r in enumerate(regions) if _is_next(r, best) and r not in seen]
        for estimate, _, region in sorted(near)[:_NEXT]:
            if estimate < search.best_seconds and search.work < limit and search.place(region) is not None:
                families = [list(search.stored(family)) for family in search.families_of(region)]
                _try_likely(search, region, families, limit, tries=1)


def _is_next(one: Region, other: Region) -> bool:
    """Whether they differ in one of the degrees (dp aside) or in rows, by a factor of 3 at most."""
    sizes = [(r.mesh.pp, r.mesh.cp, r.mesh.tp, r.mesh.experts, r.rows) for r in (one, other)]
    if one.mesh.borrowed != other.mesh.borrowed:
        return False
    ratios = [max(a, b) / min(a, b) for a, b in zip(*sizes, strict=True) if a != b]
    return len(ratios) == 1 and ratios[0] <= _FACTOR


def _polish(search: Search) -> None:
    """Lay out what is done otherwise on the regions of the best: in other ways on the device; then, of all regions
    where some of it is recomputed, with activations on the host."""
    limit = max(search.most_work, search.work + search.most_work / 3)
    for region in list(_by_region(search))[:_REGIONS_POLISHED]:
        _try_likely(search, region, [list(search.stored(f)) for f in search.families_of(region)], limit)
    away: list[tuple[float, int, Region, Point]] = []
    for number, (region, outcome) in enumerate(_by_region(search).items()):
        ways = [offload for offload, _ in saving(region, search.costing.cluster, search.pins)]
        profile = search.profile(region)
        if outcome.recomputes and _ACTIVATIONS in ways and profile is not None:
            point = outcome.point._replace(offload=_ACTIVATIONS)
            (estimate,) = search.estimates([point], profile)
            away.append((estimate, number, region, point))
    for _, _, region, point in sorted(away)[:_AWAY_TRIED]:
        _try_likely(search, region, [[point]], math.inf)


def _by_region(search: Search) -> dict[Region, Outcome]:
    """The best outcome of each, the best first."""
    found: dict[Region, Outcome] = {}
    for outcome in search.ranked():
        found.setdefault(outcome.point.region, outcome)
    return found


def _try_likely(
    search: Search, region: Region, families: Iterable[list[Point]], limit: float, tries: int = _POLISHED
) -> None:
    """Lay out what is likely to be better than the best, of points of some families of ``region``."""
    profile = search.profile(region)
    assert profile is not None
    waiting = [
        (estimate * promise(point), number, point)
        for number, points in enumerate(families)
        for point, estimate in zip(points, search.estimates(points, profile), strict=True)
        if work_of(point._replace(offload=())) <= _WORK
    ]
    tried = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    for estimate, _, point in [item for item in sorted(waiting) if item[-1] not in tried][:tries]:
        if estimate < search.best_seconds and search.work < limit:
            with suppress(AutoparError):
                search.lay_out(point)
