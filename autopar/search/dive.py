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
from contextlib import suppress
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.search.space import Family, Point, Region, promise, work_of
from autopar.search.space import savers as saving

if TYPE_CHECKING:
    from autopar.search.loop import Search
    from autopar.search.profiles import Profile

_TRIES = 4  # points of one region
_ALIKE = 2  # of them with one ZeRO stage
_AWAY = ("optimizer",)  # what is on the host first
_REGIONS = 6  # that fit
_FAILURES = 3  # regions with the same pp and tp that may turn out not to fit
_POLISHED = 12  # points like the best
_REGIONS_POLISHED = 2
_SEARCHES = 1.5  # times the work of a whole search, if it takes that to find something good
_WORK = 1e5  # of a point: about two seconds
_LOOKS = 5000  # at regions


def dive(search: Search, regions: list[Region]) -> None:
    """Lay out points of the most promising regions, of other pp and tp each, plain ones first; then what differs from
    the best in a few choices."""
    node = search.costing.cluster.devices_per_node
    plain = [r for r in regions if r.mesh.tp <= node and r.mesh.cp == 1 and not r.mesh.borrowed]
    for some, savers in ((plain, False), (regions, False), (plain, True)):
        if not search.outcomes:
            _dive(search, some, savers=savers)
    if search.outcomes:
        _polish(search)


def _dive(search: Search, regions: list[Region], *, savers: bool) -> None:
    waiting = [(_first_estimate(search, region), number) for number, region in enumerate(regions)]
    heapq.heapify(waiting)
    estimated: set[int] = set()
    tried: Counter[tuple[int, int]] = Counter()
    found = 0
    for _ in range(_LOOKS):
        if not waiting or waiting[0][0] >= search.best_seconds or found == _REGIONS:
            return
        if search.outcomes and search.work > _SEARCHES * search.most_work:
            return
        estimate, number = heapq.heappop(waiting)
        region = regions[number]
        degrees = region.mesh.pp, region.mesh.tp
        if tried[degrees] > _FAILURES:
            continue
        if search.place_reference(region):
            heapq.heappush(waiting, (_first_estimate(search, region), number))
        elif number not in estimated:
            estimated.add(number)
            better = search.costing.estimate(region, search.share(region), away=savers)
            if not math.isinf(better):
                heapq.heappush(waiting, (max(estimate, better), number))
        else:
            laid_out = _lay_out(search, region, savers=savers)
            tried[degrees] += 1 + _FAILURES * bool(laid_out)
            found += bool(laid_out)


def _first_estimate(search: Search, region: Region) -> float:
    """With the bubble of a schedule that splits backwards."""
    root, pp = search.root, region.mesh.pp
    forward = math.fsum(unit.forward for unit in root.units)
    wait = search.share(region) * forward * (pp - 1) / pp
    return search.by_scaling(region) + wait


def _lay_out(search: Search, region: Region, *, savers: bool) -> int:
    """Some of its points, by their bounds; how many fit."""
    profile, before = search.place(region), len(search.outcomes)
    if profile is None:
        return 0
    waiting: list[tuple[float, int, Family | Point]] = []
    numbers = itertools.count()

    def wait(bound: float, item: Family | Point) -> None:
        heapq.heappush(waiting, (bound * promise(item), next(numbers), item))

    for family in search.families_of(region):
        wait(search.costing.family_bound(family, profile, search.best_seconds), family)
    tries: Counter[int] = Counter()
    while waiting and tries.total() < _TRIES:
        bound, _, item = heapq.heappop(waiting)
        if bound >= search.best_seconds or math.isinf(bound):
            break
        if isinstance(item, Family):
            for point in _points(search, item, profile, savers=savers):
                wait(max(search.costing.bound(point, profile), search.costing.memory_bound(point, profile)), point)
        elif tries[item.zero] < _ALIKE:
            tries[item.zero] += 1
            with suppress(AutoparError):
                search.lay_out(item)
    return len(search.outcomes) - before


def _points(search: Search, family: Family, profile: Profile, *, savers: bool) -> list[Point]:
    """Those that may fit; where they may with state on the host alone, these."""
    points = [point for point in search.stored(family) if work_of(point) <= _WORK]
    if savers:
        ways = [offload for offload, _ in saving(family.region, search.costing.cluster, search.pins)]
        points = [point._replace(offload=_AWAY) for point in points if _AWAY in ways]
    return [point for point in points if search.costing.may_fit(point, profile)]


def _polish(search: Search) -> None:
    """Lay out what is done otherwise on the regions of the best: by another schedule, then stored otherwise."""
    limit = max(search.most_work, search.work + search.most_work / 3)
    ranked = {outcome.point.region: outcome.point for outcome in reversed(search.ranked())}
    for region in list(reversed(ranked))[:_REGIONS_POLISHED]:
        profile = search.profile(region)
        assert profile is not None
        for change in (_schedules, _storages):
            best = next(outcome.point for outcome in search.ranked() if outcome.point.region == region)
            others = [point for point in change(search, best) if work_of(point) <= _WORK]
            bounds = [max(search.costing.bound(p, profile), search.costing.memory_bound(p, profile)) for p in others]
            ranked_others = sorted(zip(bounds, range(len(others)), others, strict=True))[:_POLISHED]
            for bound, _, point in ranked_others:
                if bound < search.best_seconds and search.work < limit:
                    with suppress(AutoparError):
                        search.lay_out(point)


def _schedules(search: Search, best: Point) -> list[Point]:
    families = (family for family in search.families_of(best.region) if family != best.family)
    return [best._replace(schedule=f.schedule, chunks=f.chunks, vocabulary=f.vocabulary) for f in families]


def _storages(search: Search, best: Point) -> list[Point]:
    return [point for point in search.stored(best.family) if point != best]
