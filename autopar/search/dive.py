"""A first good plan: the regions that look best, by estimates instead of bounds.

What is proven is the loop's (:mod:`autopar.search.loop`); a good step that is known early lets it discard most regions
unplaced. An estimate is a bound made likely: with the bubble of a common schedule, the best ZeRO stage, and what
has to be recomputed beside its state.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.search.space import Family, Point, Region, promise, work_of
from autopar.search.space import savers as saving

if TYPE_CHECKING:
    from autopar.search.loop import Search

_TRIES = 4  # points of one region
_ALIKE = 2  # of them with one schedule and ZeRO stage
_FAILURES = 2  # points with the same pp, tp and schedule that may turn out not to fit
_AWAY = ("optimizer",)  # what is on the host first
_ACTIVATIONS = ("activations",)
_POLISHED = 4  # points like the best
_REGIONS_POLISHED = 2
_SEARCHES = 0.6  # of the work of a whole search
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
        _polish(search)


@dataclass
class _Dive:
    """What waits, the best estimate first; with state on the host alone, if these are ``savers``."""

    search: Search
    savers: bool
    waiting: list[tuple[float, int, Region | Point]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    estimated: set[Region] = field(default_factory=set)
    tried: Counter[object] = field(default_factory=Counter)
    failed: Counter[object] = field(default_factory=Counter)

    def run(self, regions: list[Region]) -> None:
        search = self.search
        for region in regions:
            self._wait(_first_estimate(search, region), region)
        for _ in range(_LOOKS):
            if not self.waiting or self.waiting[0][0] >= search.best_seconds:
                return
            if search.outcomes and search.work > _SEARCHES * search.most_work:
                return
            _, _, item = heapq.heappop(self.waiting)
            if isinstance(item, Point):
                self._try(item)
            else:
                self._look_at(item)

    def _wait(self, estimate: float, item: Region | Point) -> None:
        if estimate < self.search.best_seconds:
            heapq.heappush(self.waiting, (estimate, next(self.numbers), item))

    def _look_at(self, region: Region) -> None:
        """Estimate it better, or its points."""
        search = self.search
        if search.place_reference(region):
            self._wait(_first_estimate(search, region), region)
        elif region not in self.estimated:
            self.estimated.add(region)
            self._wait(max(_first_estimate(search, region), search.likely(region, away=self.savers)), region)
        elif (profile := search.place(region)) is not None:
            for family in search.families_of(region):
                points = _points(search, family, savers=self.savers)
                for point, estimate in zip(points, search.estimates(points, profile), strict=True):
                    self._wait(estimate * promise(point), point)

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


def _polish(search: Search) -> None:
    """Lay out what is done otherwise on the regions of the best: with activations on the host where some of it is
    recomputed, then in other ways without."""
    ranked = {outcome.point.region: outcome for outcome in reversed(search.ranked())}
    regions = list(reversed(ranked))[:_REGIONS_POLISHED]
    limit = max(search.most_work, search.work + search.most_work / 3)
    for region in regions:
        bests = [outcome.point for outcome in search.ranked() if outcome.point.region == region and outcome.recomputes]
        ways = [offload for offload, _ in saving(region, search.costing.cluster, search.pins)]
        if bests and _ACTIVATIONS in ways:
            away = [[point._replace(offload=_ACTIVATIONS)] for point in bests[:_ALIKE]]
            _try_likely(search, region, away, limit)

    for region in regions:
        _try_likely(search, region, [list(search.stored(f)) for f in search.families_of(region)], limit)


def _try_likely(search: Search, region: Region, families: Iterable[list[Point]], limit: float) -> None:
    """Lay out what is likely to be better than the best, of points of some families of ``region``."""
    profile = search.profile(region)
    assert profile is not None
    waiting = [
        (estimate * promise(point), number, point)
        for number, points in enumerate(families)
        for point, estimate in zip(points, search.estimates(points, profile), strict=True)
        if work_of(point) <= _WORK
    ]
    tried = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    for estimate, _, point in [item for item in sorted(waiting) if item[-1] not in tried][:_POLISHED]:
        if estimate < search.best_seconds and search.work < limit:
            with suppress(AutoparError):
                search.lay_out(point)
