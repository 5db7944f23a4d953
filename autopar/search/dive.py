"""A first good plan: the regions that look best, by estimates instead of bounds.

What is proven is another matter (:mod:`autopar.search.proof`). An estimate is a bound made likely: with the bubble of a
common schedule, the best ZeRO stage, and what has to be recomputed beside its state.
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
from autopar.mesh import Mesh
from autopar.options import activations_on_host, masters_on_host
from autopar.search.climb import (
    ACTIVATIONS,
    POINT_WORK,
    Around,
    climb,
    may_put_away,
    polish,
    polish_away,
    put_away,
    ways_away,
    worth_away,
)
from autopar.search.learned import SEVERAL, Kind, Learned
from autopar.search.space import (
    TOGETHER,
    Family,
    Point,
    Region,
    chunks_of_head,
    offloads,
    promise,
    splits_head,
    works_of,
)
from autopar.search.squeeze import squeeze
from autopar.search.work import work_of

if TYPE_CHECKING:
    from autopar.search.search import Search

_MASTERS = ("optimizer",)  # on the host: parameters are copied to the device once a step

_CROWDED = 0.25  # of the memory of all devices: parameters and what updates them, if they may go to the host
_TRIES = 4  # points of one region
_ALIKE = 2  # of them with one schedule and ZeRO stage, whose head is split or isn't
_ROWS = 2  # of a microbatch, that the same degrees are placed with at first
_FAILURES = 2  # points with the same pp, tp and schedule that may turn out not to fit
_SEARCHES, _AGAIN, _ELSEWHERE = 0.6, 0.1, 0.3  # of the work of a whole search: at first, then, with what is on the host
_OTHERWISE = 0.1  # the same, with masters there, and what else may be
_WORTH = 0.97  # times the best, that this must look like: estimates say too little
_REST = 0.25  # of the work of a whole search, at most, for what looks better at the end
_DOUBTED = 0.2  # of the work of a whole search, in which what was learned of some is doubted for others
_LONGER = 4  # times as much work as its share, if what waits may still be better by much
_PATIENCE = 0.3  # of the work of a whole search, until anything is laid out with all on the device
_REFUSED = 2  # times that, where nothing of these fitted yet
_NEAR = 1.4  # times the least estimate that waits: less is good enough
_LAST = 2  # points of placed regions, where that was all the work
_LOOKS = 20_000  # at regions and points
_COARSE = 2  # times the rows of a microbatch: those between are next to the best, and looked at then


def dive(search: Search, regions: list[Region]) -> None:
    """Lay out the most promising points, plain ones first, or those that save memory in other ways where nothing else
    is found to fit, and what differs from what lacks the least where nothing is; then those with sequences or experts
    split within a node, and what differs from the best in a few choices. Those with activations on the host come before
    these where that makes the best much faster; all that may be there last, where the best is short of memory. At the
    end, what else looks better."""
    every, learned = _Every.of(search, regions), Learned()
    dives = _look_first(search, every, learned)
    if not search.outcomes:
        squeeze(search)
    if search.outcomes:
        _look_further(search, every, learned, dives)
    _lay_out_likely(search, learned)


@dataclass(frozen=True)
class _Every:
    """All regions: those whose degrees keep to nodes (``near``), those of these that split neither sequences nor
    experts (``plain``) or do (``split``), and those that may have activations on the host (``away``). And what else
    than nothing is worth to be there (``kinds``): masters, where what they take is much of the memory."""

    regions: list[Region]
    near: list[Region]
    plain: list[Region]
    split: list[Region]
    away: list[Region]
    kinds: list[tuple[str, ...]]

    @classmethod
    def of(cls, search: Search, regions: list[Region]) -> _Every:
        node = search.costing.cluster.devices_per_node
        near = [r for r in regions if r.mesh.tp * r.mesh.cp <= node]
        gpus = max((region.mesh.world for region in regions), default=0)
        is_crowded = search.costing.least_gpus(on_host=False) > _CROWDED * gpus
        kinds = offloads(search.costing.cluster, search.pins)[1:]
        return cls(
            regions,
            near,
            plain=[r for r in near if r.mesh.cp == 1 and not r.mesh.borrowed],
            split=[r for r in near if r.mesh.cp > 1 or r.mesh.borrowed],
            away=[region for region in near if may_put_away(search, region)],
            kinds=[kind for kind in kinds if is_crowded or not masters_on_host(kind)],
        )


def _look_first(search: Search, every: _Every, learned: Learned) -> list[_Dive]:
    """Until anything fits, last what saves memory in any other way; gives the dives that this took."""
    masters = [(_MASTERS, every.near, _PATIENCE), ((*_MASTERS, *ACTIVATIONS), every.away, _PATIENCE)]
    firsts = [
        ((), every.plain, _PATIENCE if every.kinds else math.inf),
        *(masters if _MASTERS in every.kinds else ()),
        (ACTIVATIONS, every.away, math.inf),
        ((), every.regions, math.inf),
        (_MASTERS, every.plain, math.inf),
    ]
    dives: list[_Dive] = []
    for state, some, patience in firsts:
        if not search.outcomes:
            dives.append(_Dive(search, state, learned, _SEARCHES, patience))
            dives[-1].run(some)
    for state, chunks in _leaner(search):
        if not search.outcomes and (state, chunks) not in {(each.offload, each.chunks) for each in dives}:
            dives.append(_Dive(search, state, learned, _SEARCHES, _PATIENCE, chunks=chunks))
            dives[-1].run(every.away if activations_on_host(state) else every.near)
    return dives


def _leaner(search: Search) -> Iterator[tuple[tuple[str, ...], int]]:
    """What may be on the host, and in how many chunks the head may be computed: which takes less time."""
    kinds = offloads(search.costing.cluster, search.pins)[1:]
    return itertools.product(((), *kinds), chunks_of_head(search.pins))


def _look_further(search: Search, every: _Every, learned: Learned, dives: list[_Dive]) -> None:
    """At what may be better than the best; first at what the first of the ``dives`` had no patience for."""
    first, *others = dives
    if others:
        first.go_on(_ELSEWHERE)
    looked = {dives[-1].offload}
    put_away(search, learned)  # what else looks good is often beaten by then
    if search.best_seconds < (1 - search.tolerance) * _here_seconds(search) < math.inf:
        dives.append(_Dive(search, ACTIVATIONS, learned, _ELSEWHERE))
        dives[-1].run(every.away)
        looked = {*looked, ACTIVATIONS}
    dives.append(_Dive(search, (), learned, _AGAIN))
    dives[-1].run(every.split)
    around = Around.of(every.regions)
    climb(search, around, learned, ())
    polish(search, learned)
    put_away(search, learned)
    for state in every.kinds:
        best = search.ranked()[0]
        if best.is_tight and state not in looked:
            share = _OTHERWISE if best.point.offload else _ELSEWHERE
            some = every.away if activations_on_host(state) else every.near
            dives.append(_Dive(search, state, learned, share, worth=_WORTH, chunks=best.point.head_chunks))
            dives[-1].run(some)
    _go_on(search, dives)
    if offload := worth_away(search, search.ranked()[0].point):
        polish_away(search, learned)
        climb(search, around, learned, offload)
        polish_away(search, learned)


def _go_on(search: Search, dives: list[_Dive]) -> None:
    """With what waits in any of the ``dives``, what looks best first, where little work was done so far."""
    while search.work < search.most_work and (waiting := [dive for dive in dives if dive.is_promising]):
        min(waiting, key=lambda dive: dive.waiting[0][0]).go_on(_AGAIN)


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


@dataclass
class _Dive:
    """What waits, the best estimate first, with this on the host (``offload``)."""

    search: Search
    offload: tuple[str, ...]
    learned: Learned
    share: float  # of the work of a whole search, where what waits isn't much better
    patience: float = math.inf  # the same, where nothing was laid out
    worth: float = 1.0  # times the best: what is likely to take longer isn't looked at
    chunks: int = 1  # of the head, if there may be several
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
        search = self.search
        first = [(_first_estimate(search, region), number, region) for number, region in enumerate(_coarse(regions))]
        for estimate, _, region in sorted(first):
            self.alike[works_of(region)].append(region)
            self._wait(estimate, region)
        self.go_on(self.share)

    def go_on(self, share: float) -> None:
        """With what waits, for so much of the work of a whole search, where that isn't much better."""
        search, begun = self.search, self.search.work
        for _ in range(_LOOKS):
            if not self.is_promising:
                if search.work - begun > search.most_work * min(_DOUBTED, share) or not self._doubt():
                    return
                continue
            is_near = search.best_seconds < _NEAR * self.waiting[0][0]
            limit = search.most_work * share * (1 if is_near else _LONGER)
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
    def is_promising(self) -> bool:
        """Whether what waits may be better than the best."""
        return bool(self.waiting) and self.waiting[0][0] < self._aim

    @property
    def _aim(self) -> float:
        """Seconds."""
        return self.worth * self.search.best_seconds

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
        if estimate < self._aim:
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
        if self.learned.laid_out(kind, likely) >= self._aim:
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
        if not any(_points(search, family, self.offload, self.chunks) for family in search.families_of(region)):
            return
        if not self._is_new(region) or search.place(region) is None:
            return
        found = list(_estimated(search, region, self.offload, self.chunks))
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
        if self._begins and best[0] < min(self._aim, _NEAR * least):
            self._try(best[1])

    def _doubt(self) -> bool:
        """Place the region that would be the best of those that were left out for what others turned out to take; False
        if none would be better than the best."""
        if not self.doubted or self.doubted[0][0] >= self._aim:
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
        alike = region, point.schedule, splits_head(point.family), point.zero
        degrees = region.mesh.pp, region.mesh.tp, point.schedule
        if self.tried[region] == _TRIES or self.tried[alike] == _ALIKE or self.failed[degrees] == _FAILURES:
            return
        profile = search.profile(region)
        assert profile is not None
        if not self._begins and self._likely(point) >= self._aim:
            return
        if max(search.costing.bound(point, profile), search.costing.memory_bound(point, profile)) < self._aim:
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


def _estimated(
    search: Search, region: Region, offload: tuple[str, ...], chunks: int = 1
) -> Iterator[tuple[float, Point]]:
    """Points of a ``region`` that is placed, with this on the host, that may fit, with what they are likely to take."""
    profile = search.profile(region)
    assert profile is not None
    for family in search.families_of(region):
        points = _points(search, family, offload, chunks)
        for point, seconds in zip(points, search.estimates(points, profile), strict=True):
            if not math.isinf(seconds):
                yield seconds * promise(point), point


def _points(search: Search, family: Family, offload: tuple[str, ...], chunks: int = 1) -> list[Point]:
    """Its points that aren't too much work, with this on the host alone, and the head in so many chunks if there may be
    several; none where that can't be."""
    points = [point for point in search.stored(family) if work_of(point) <= POINT_WORK]
    if chunks > 1:
        points = [point._replace(head_chunks=chunks) for point in points]
    if not offload:
        return points
    return [point._replace(offload=offload) for point in points if offload in ways_away(search, family)]
