"""A first good plan: the regions that look best, by estimates instead of bounds.

What is proven is another matter (:mod:`autopar.search.proof`). An estimate is a bound made likely: with the bubble of a
common schedule, the best ZeRO stage, and what has to be recomputed beside its state.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.search.learned import SEVERAL, Kind, Learned
from autopar.search.space import TOGETHER, Family, Point, Region, promise, works_of
from autopar.search.space import savers as saving
from autopar.search.work import work_of

if TYPE_CHECKING:
    from autopar.search.costing import Outcome
    from autopar.search.search import Search

Numbers = NDArray[np.int64]

_TRIES = 4  # points of one region
_ALIKE = 2  # of them with one schedule and ZeRO stage
_ROWS = 2  # of a microbatch, that the same degrees are placed with at first
_FAILURES = 2  # points with the same pp, tp and schedule that may turn out not to fit
_AWAY = ("optimizer",)  # what is on the host first
_ACTIVATIONS = ("activations",)
_POLISHED = 4  # points like the best
_REGIONS_POLISHED = 2
_HOPE, _HOPES = 1.05, 0.03  # times the best that may turn out to be better; of the work of a whole search, for these
_AWAY_TRIED = 3  # points with activations on the host
_LOOKED = 4  # regions next to the best that are placed
_FACTORS, _CHANGES = (8, 3, 3, 3, 3), 3  # by which those differ at most in each of their sizes, and in how many
_SEARCHES, _AGAIN, _ELSEWHERE = 0.6, 0.1, 0.3  # of the work of a whole search: at first, then, with what is on the host
_REST = 0.25  # of the work of a whole search, at most, for what looks better at the end
_DOUBTED = 0.2  # of the work of a whole search, in which what was learned of some is doubted for others
_STORED = 0.3  # of the work of a whole search, for other ways to store what is on the host
_LONGER = 4  # times that, if what waits may still be better by much
_PATIENCE = 0.3  # of the work of a whole search, until anything is laid out with all on the device
_REFUSED = 2  # times that, where nothing of these fitted yet
_NEAR = 1.4  # times the least estimate that waits: less is good enough
_LAST = 2  # points of placed regions, where that was all the work
_WORK = 5e4  # of a point: about one second
_LOOKS = 20_000  # at regions and points
_COARSE = 2  # times the rows of a microbatch: those between are next to the best, and looked at then


def dive(search: Search, regions: list[Region]) -> None:
    """Lay out the most promising points, plain ones first; then those with sequences or experts split within a node,
    and what differs from the best in a few choices. Those with activations on the host come before these where that
    makes the best much faster, or where nothing else is found to fit; and last where the best is short of memory. At
    the end, what else looks better."""
    node, learned = search.costing.cluster.devices_per_node, Learned()
    near = [r for r in regions if r.mesh.tp * r.mesh.cp <= node]
    plain = [r for r in near if r.mesh.cp == 1 and not r.mesh.borrowed]
    split = [r for r in near if r.mesh.cp > 1 or r.mesh.borrowed]
    away = [region for region in near if _may_put_away(search, region)]
    patience = _PATIENCE if away else math.inf
    firsts = [((), plain, patience), (_ACTIVATIONS, away, math.inf), ((), regions, math.inf), (_AWAY, plain, math.inf)]
    for state, some, limit in firsts:
        if not search.outcomes:
            _Dive(search, state, learned, _SEARCHES, limit).run(some)
    if search.outcomes:
        _put_away(search, learned)  # what else looks good is often beaten by then
        here = _here_seconds(search)
        gains = search.best_seconds < (1 - search.tolerance) * here
        if gains and not math.isinf(here):
            _Dive(search, _ACTIVATIONS, learned, _ELSEWHERE).run(away)
        _Dive(search, (), learned, _AGAIN).run(split)
        around = _Around.of(regions)
        _climb(search, around, learned, ())
        _polish(search, learned)
        _put_away(search, learned)
        if not gains and _is_short(search):
            _Dive(search, _ACTIVATIONS, learned, _ELSEWHERE).run(away)
        if offload := _worth_away(search, search.ranked()[0]):
            _polish_away(search, learned)
            _climb(search, around, learned, offload)
            _polish_away(search, learned)
    _lay_out_likely(search, learned)


def _lay_out_likely(search: Search, learned: Learned) -> None:
    """Lay out what looks best of the regions that were placed, while it may be better than the best."""
    limit, numbers = search.work + _REST * search.most_work, itertools.count()
    tried = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    waiting: list[tuple[float, int, float, Point]] = []
    for region, (least, _) in sorted(search.promising.items(), key=lambda item: item[1][0]):
        if least >= search.best_seconds or search.work >= limit:
            break
        for estimate, point in _estimated(search, region, ()):
            if point not in tried:
                heapq.heappush(waiting, (learned.likely(point, estimate), next(numbers), estimate, point))
    while waiting and waiting[0][0] < search.best_seconds and search.work < limit:
        seconds, number, estimate, point = heapq.heappop(waiting)
        if (likely := learned.likely(point, estimate)) > seconds:  # by what was learned meanwhile
            heapq.heappush(waiting, (likely, number, estimate, point))
            continue
        if not learned.is_tried(point, estimate):
            with suppress(AutoparError):
                learned.lay_out(search, point, estimate)


def _here_seconds(search: Search) -> float:
    """Of the best of what was laid out with all on the device; inf where nothing was."""
    here = (outcome.step_seconds for outcome in search.outcomes if not outcome.point.offload)
    return min(here, default=math.inf)


def _is_short(search: Search) -> bool:
    """Whether the best may be faster with more memory, and has nothing but activations on the host."""
    best = search.ranked()[0]
    return best.is_tight and best.point.offload in ((), _ACTIVATIONS)


@dataclass
class _Dive:
    """What waits, the best estimate first, with this on the host (``offload``)."""

    search: Search
    offload: tuple[str, ...]
    learned: Learned
    share: float  # of the work of a whole search, where what waits isn't much better
    patience: float = math.inf  # the same, where nothing was laid out
    waiting: list[tuple[float, int, Region | Point]] = field(default_factory=list)
    doubted: list[tuple[float, int, Region]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    full: defaultdict[object, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    tried: Counter[object] = field(default_factory=Counter)
    laid_out: set[Point] = field(default_factory=set)  # or refused
    failed: Counter[object] = field(default_factory=Counter)
    placed: Counter[object] = field(default_factory=Counter)
    estimates: dict[Point, float] = field(default_factory=dict)  # before anything was learned
    alike: defaultdict[object, list[Region]] = field(default_factory=lambda: defaultdict(list))  # the best first
    likely: dict[Region, float] = field(default_factory=dict)  # as if nothing like them was placed

    def run(self, regions: list[Region]) -> None:
        search, begun = self.search, self.search.work
        first = [(_first_estimate(search, region), number, region) for number, region in enumerate(_coarse(regions))]
        for estimate, _, region in sorted(first):
            self.alike[works_of(region)].append(region)
            self._wait(estimate, region)
        for _ in range(_LOOKS):
            if not self.waiting or self.waiting[0][0] >= search.best_seconds:
                if search.work - begun > search.most_work * min(_DOUBTED, self.share) or not self._doubt():
                    return
                continue
            is_near = search.best_seconds < _NEAR * self.waiting[0][0]
            limit = search.most_work * (self.share if is_near else _LONGER * _SEARCHES)
            limit *= _REFUSED if self._only_refused else 1
            if not search.outcomes and search.work - begun > search.most_work * self.patience:
                return
            if search.outcomes and search.work - begun > limit:
                self._try_placed()
                return
            estimate, _, item = heapq.heappop(self.waiting)
            if isinstance(item, Region):
                self._look_at(estimate, item)
            elif (likely := self._likely(item)) > estimate:  # by what was learned meanwhile
                self._wait(likely, item)
            else:
                self._try(item)

    @property
    def _only_refused(self) -> bool:
        """Whether none of these points fits, of those that were tried."""
        return bool(self.laid_out) and self.failed.total() == len(self.laid_out)

    def _try_placed(self) -> None:
        """Of the regions that were placed, the points that look best and better than the best."""
        points = sorted(item for item in self.waiting if isinstance(item[-1], Point))
        for _, _, point in points[:_LAST]:
            assert isinstance(point, Point)
            self._try(point)

    def _wait(self, estimate: float, item: Region | Point) -> None:
        if isinstance(item, Point):
            self.estimates.setdefault(item, estimate)
        if estimate < self.search.best_seconds:
            heapq.heappush(self.waiting, (estimate, next(self.numbers), item))

    def _look_at(self, estimate: float, region: Region) -> None:
        """Estimate it better, by its memory, then by profiles of others; then its points. Where none of these fits,
        neither do as many rows on as few stages."""
        search, mesh = self.search, region.mesh
        full, first = self.full[_axes(region)], max(_first_estimate(search, region), self._unplaced(region))
        if first > estimate:  # by what was learned meanwhile
            self._wait(first, region)
            return
        if any(mesh.pp <= pp and region.rows >= rows for pp, rows in full):
            return
        likely, kind = max(first, search.likely(region, self.offload)), Kind.of(search, region, self.offload)
        better = self.learned.unplaced(kind, likely)
        if self.learned.laid_out(kind, likely) >= search.best_seconds:
            heapq.heappush(self.doubted, (likely, next(self.numbers), region))
        elif better > estimate:
            self._wait(better, region)
        elif search.place_reference(region, likely=True):
            self._wait(estimate, region)
        else:
            self._place(region, likely, kind)

    def _unplaced(self, region: Region) -> float:
        """What it is likely to take as if nothing like it was placed: found for others with it."""
        if region not in self.likely:
            alike = self.alike[works_of(region)]
            others = [other for other in alike[: TOGETHER - 1] if other != region and other not in self.likely]
            del alike[: TOGETHER - 1]
            some = [region, *others]
            self.likely |= zip(some, self.search.all_likely(some, self.offload), strict=True)
        return self.likely[region]

    def _place(self, region: Region, likely: float, kind: Kind) -> None:
        """Let its points wait, which tell how far what was ``likely`` is off."""
        search, mesh = self.search, region.mesh
        if not self._is_new(region) or search.place(region) is None:
            return
        found = list(_estimated(search, region, self.offload))
        for estimate, point in found:
            search.note(point, estimate)
            self._wait(estimate, point)
        if not found:
            self.full[_axes(region)].append((mesh.pp, region.rows))
            self.placed[_axes(region), mesh.pp > 1] -= 1
            return
        best = min(found, key=itemgetter(0))
        self.learned.placed[kind].append(best[0] / likely)
        least = self.waiting[0][0] if self.waiting else math.inf
        if self._begins and best[0] < min(search.best_seconds, _NEAR * least):
            self._try(best[1])

    def _doubt(self) -> bool:
        """Place the region that would be the best of those that were left out for what others turned out to take; False
        if none would be better than the best."""
        if not self.doubted or self.doubted[0][0] >= self.search.best_seconds:
            return False
        likely, _, region = heapq.heappop(self.doubted)
        self._place(region, likely, Kind.of(self.search, region, self.offload))
        return True

    @property
    def _begins(self) -> bool:
        """Whether too few of these points were laid out to say how far estimates of the others are off."""
        return not self.search.outcomes or (bool(self.offload) and len(self.laid_out) < SEVERAL)

    def _is_new(self, region: Region) -> bool:
        """Whether it is placed, or few of its degrees with other rows were, with or without a pipeline as it is: these
        don't differ by much."""
        if self.search.profile(region) is not None:
            return True
        alike = _axes(region), region.mesh.pp > 1
        self.placed[alike] += 1
        return self.placed[alike] <= (1 if self.search.outcomes else _ROWS)

    def _likely(self, point: Point) -> float:
        """What it takes, as far as that is known."""
        estimate = self.estimates[point]
        return estimate if self._begins else self.learned.likely(point, estimate)

    def _try(self, point: Point) -> None:
        """Lay it out, unless points like it were tried often enough, or took too much longer than they were likely
        to."""
        if point in self.laid_out or self.learned.is_tried(point, self.estimates[point]):
            return
        region, search = point.region, self.search
        alike, degrees = (region, point.schedule, point.zero), (region.mesh.pp, region.mesh.tp, point.schedule)
        if self.tried[region] == _TRIES or self.tried[alike] == _ALIKE or self.failed[degrees] == _FAILURES:
            return
        profile = search.profile(region)
        assert profile is not None
        if not self._begins and self._likely(point) >= search.best_seconds:
            return
        if max(search.costing.bound(point, profile), search.costing.memory_bound(point, profile)) < search.best_seconds:
            self.tried.update((region, alike))
            self.laid_out.add(point)
            try:
                self.learned.lay_out(search, point, self.estimates[point])
            except AutoparError:
                self.failed[degrees] += 1


def _coarse(regions: Iterable[Region]) -> Iterator[Region]:
    """Without most of those that differ from others by a few rows alone."""
    by_mesh: dict[Mesh, list[Region]] = {}
    for region in regions:
        by_mesh.setdefault(region.mesh, []).append(region)
    for some in by_mesh.values():
        least = 0
        for region in sorted(some, key=lambda region: region.rows):
            if region.rows >= least:
                yield region
                least = _COARSE * region.rows


def _axes(region: Region) -> tuple[object, ...]:
    mesh = region.mesh
    return mesh.ep, mesh.cp, mesh.tp, mesh.borrowed


def _first_estimate(search: Search, region: Region) -> float:
    """With the bubble of a schedule that splits backwards."""
    pp = region.mesh.pp
    return search.by_scaling(region, likely=True) + search.share(region) * search.root.forward_seconds * (pp - 1) / pp


def _estimated(search: Search, region: Region, offload: tuple[str, ...]) -> Iterator[tuple[float, Point]]:
    """Points of a ``region`` that is placed, with this on the host, that may fit, with what they are likely to take."""
    profile = search.profile(region)
    assert profile is not None
    for family in search.families_of(region):
        points = _points(search, family, offload)
        for point, seconds in zip(points, search.estimates(points, profile), strict=True):
            if not math.isinf(seconds):
                yield seconds * promise(point), point


def _points(search: Search, family: Family, offload: tuple[str, ...]) -> list[Point]:
    """Its points, with this on the host alone; none where that can't be."""
    points = [point for point in search.stored(family) if work_of(point) <= _WORK]
    if not offload:
        return points
    return [point._replace(offload=offload) for point in points if offload in _ways_away(search, family)]


def _ways_away(search: Search, family: Family) -> set[tuple[str, ...]]:
    """What may be on the host."""
    return {offload for offload, _ in saving(family, search.costing.cluster, search.pins)}


def _may_put_away(search: Search, region: Region) -> bool:
    """Whether activations may be on the host under any schedule."""
    return any(_ACTIVATIONS in _ways_away(search, family) for family in search.families_of(region))


def _worth_away(search: Search, best: Outcome) -> tuple[str, ...]:
    """What is on the host of points that may be better than the ``best``: as much as of that, or activations where it
    is short of memory; nothing of these where that can't be."""
    if best.point.offload or not best.is_tight:
        return best.point.offload
    return _ACTIVATIONS if _may_put_away(search, best.point.region) else ()


def _climb(search: Search, around: _Around, learned: Learned, offload: tuple[str, ...]) -> None:
    """Lay out the likely best of regions that differ from the best in a few degrees, while that finds any: of those
    that put as much on the host."""
    seen: set[Region] = set()
    limit = search.work + search.most_work
    while (best := search.ranked()[0].point).region not in seen:
        seen.add(best.region)
        known = seen | {o.point.region for o in search.outcomes if o.point.offload == offload}
        near = [
            (_likely_best(search, region, best._replace(offload=offload), learned), number, region)
            for number, region in enumerate(around.next_to(best.region))
            if region not in known
        ]
        placed, waiting = 0, _by_mesh(sorted(near))  # sorted, so it is a heap
        while waiting and waiting[0][0] < search.best_seconds and search.work < limit:
            seconds, number, region = heapq.heappop(waiting)
            is_new = search.profile(region) is None
            if is_new and placed:  # others with its axes may say more by now
                likely = _likely_best(search, region, best._replace(offload=offload), learned)
                if likely > seconds:
                    heapq.heappush(waiting, (likely, number, region))
                    continue
            placed += is_new
            if (not is_new or placed <= _LOOKED) and search.place(region) is not None:
                families = [list(search.stored(family)) for family in search.families_of(region)]
                if offload:
                    families = _alike(search, region, best._replace(offload=offload))
                _try_likely(search, region, families, limit, learned, tries=1)


def _likely_best(search: Search, region: Region, best: Point, learned: Learned) -> float:
    """What ``region`` is likely to take, with as much on the host as the ``best`` has: where it is placed, its points;
    if there is anything on the host, those of the best's schedule with as many chunks."""
    profile = search.profile(region)
    if profile is None or not (best.offload or region in search.promising):
        return learned.laid_out(Kind.of(search, region, best.offload), search.likely(region, best.offload))
    if not best.offload:
        found = [search.promising[region]]
    else:
        alone = 1 in (region.mesh.pp, best.region.mesh.pp)
        families = [points for points in _alike(search, region, best) if alone or points[0].chunks == best.chunks]
        estimates = (zip(search.estimates(points, profile), points, strict=True) for points in families)
        found = [(seconds * promise(point), point) for seconds, point in itertools.chain.from_iterable(estimates)]
    return min((learned.likely(point, seconds) for seconds, point in found), default=math.inf)


def _by_mesh(near: Sequence[tuple[float, int, Region]]) -> list[tuple[float, int, Region]]:
    """The first of each mesh, in that order."""
    found: dict[Mesh, tuple[float, int, Region]] = {}
    for item in near:
        found.setdefault(item[-1].mesh, item)
    return list(found.values())


def _alike(search: Search, region: Region, best: Point) -> list[list[Point]]:
    """Points of ``region`` with the schedule of the ``best``, of any number of chunks, and with as much on the host;
    without a pipeline, which has few schedules, with any."""
    families = [
        family
        for family in search.families_of(region)
        if (family.schedule == best.schedule and family.vocabulary == best.vocabulary) or region.mesh.pp == 1
        if best.offload in _ways_away(search, family)
    ]

    def like_best(point: Point) -> Point:
        return point._replace(offload=best.offload, head_chunks=best.head_chunks)

    return [list(map(like_best, search.stored(family))) for family in families]


@dataclass(frozen=True)
class _Around:
    """Regions, and ``[region, size]`` of their degrees, dp aside, and rows."""

    regions: Sequence[Region]
    sizes: Numbers

    @classmethod
    def of(cls, regions: Sequence[Region]) -> _Around:
        return cls(regions, np.array([_sizes(region) for region in regions], dtype=np.int64))

    def next_to(self, region: Region) -> list[Region]:
        """Those that differ from it in one to three sizes, not by much each, and borrow the same axes: in stages by
        more, since the best numbers of them may have none between them that is better than either."""
        here = np.array(_sizes(region))
        differ = (self.sizes != here).sum(axis=1)
        factors = np.maximum(self.sizes, here) / np.minimum(self.sizes, here)
        near = (differ >= 1) & (differ <= _CHANGES) & (factors <= _FACTORS).all(axis=1)
        found = (self.regions[int(number)] for number in np.flatnonzero(near))
        return [other for other in found if other.mesh.borrowed == region.mesh.borrowed]


def _sizes(region: Region) -> tuple[int, ...]:
    mesh = region.mesh
    return mesh.pp, mesh.cp, mesh.tp, mesh.experts, region.rows


def _polish(search: Search, learned: Learned) -> None:
    """Lay out what is done otherwise on the regions of the best, on the device; where that takes little work, on the
    best's also what looks a little worse."""
    limit = max(search.most_work, search.work + search.most_work / 3)
    for region in list(_by_region(search))[:_REGIONS_POLISHED]:
        _try_likely(search, region, [list(search.stored(f)) for f in search.families_of(region)], limit, learned)
    limit, region = search.work + _HOPES * search.most_work, next(iter(_by_region(search)))
    families = [list(search.stored(family)) for family in search.families_of(region)]
    _try_likely(search, region, families, limit, learned, hope=_HOPE)


def _polish_away(search: Search, learned: Learned) -> None:
    """Lay out the best with its activations on the host, and weights stored otherwise: each way what is likely the
    best, of the regions of the best."""
    limit = search.work + _STORED * search.most_work
    away = [(region, outcome) for region, outcome in _by_region(search).items() if outcome.point.offload]
    for region, outcome in away[:_REGIONS_POLISHED]:
        families = _alike(search, region, outcome.point)
        for zero in sorted({point.zero for points in families for point in points} - {outcome.point.zero}):
            some = [[point for point in points if point.zero == zero] for points in families]
            _try_likely(search, region, some, limit, learned, tries=1)


def _put_away(search: Search, learned: Learned) -> None:
    """Lay out each region where some of it is recomputed with activations on the host instead: what is likely the best
    under a schedule that was laid out, here or elsewhere."""
    away: list[tuple[float, int, Region, Point]] = []
    for number, (region, outcome) in enumerate(_by_region(search).items()):
        profile = search.profile(region)
        if outcome.recomputes and profile is not None:
            points = _as_laid_out(search, outcome.point._replace(offload=_ACTIVATIONS))
            found = [(search.estimates([point], profile)[0], point) for point in points]
            if not found:
                continue
            estimate, point = min(found, key=lambda pair: learned.likely(pair[1], pair[0]))
            away.append((estimate, number, region, point))
    for _, _, region, point in sorted(away)[:_AWAY_TRIED]:
        _try_likely(search, region, [[point]], math.inf, learned)


def _as_laid_out(search: Search, point: Point) -> list[Point]:
    """``point``, with as much on the host under each schedule that was laid out in any region with its vocabulary, if
    it may be in this one; without a pipeline, which has few schedules, under each."""
    known = {o.point.family[1:] for o in search.outcomes if o.point.vocabulary == point.vocabulary}
    return [
        point._replace(schedule=family.schedule, chunks=family.chunks)
        for family in search.families_of(point.region)
        if family[1:] in known or point.region.mesh.pp == 1
        if point.offload in _ways_away(search, family)
    ]


def _by_region(search: Search) -> dict[Region, Outcome]:
    """The best outcome of each, the best first."""
    found: dict[Region, Outcome] = {}
    for outcome in search.ranked():
        found.setdefault(outcome.point.region, outcome)
    return found


def _try_likely(
    search: Search,
    region: Region,
    families: Iterable[list[Point]],
    limit: float,
    learned: Learned,
    tries: int = _POLISHED,
    hope: float = 1.0,
) -> None:
    """Lay out what is likely to take less than ``hope`` times as long as the best, of points of some families of
    ``region``."""
    profile = search.profile(region)
    assert profile is not None
    waiting = [
        (estimate * promise(point), number, point)
        for number, points in enumerate(families)
        for point, estimate in zip(points, search.estimates(points, profile), strict=True)
        if work_of(point._replace(offload=())) <= _WORK
    ]
    for estimate, _, point in waiting:
        if not math.isinf(estimate):
            search.note(point, estimate)
    tried = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    for estimate, _, point in sorted(waiting):
        if not tries or search.work >= limit:
            return
        is_new = point not in tried and not learned.is_tried(point, estimate)
        if is_new and learned.likely(point, estimate) < hope * search.best_seconds:
            tries -= 1
            with suppress(AutoparError):
                learned.lay_out(search, point, estimate)
