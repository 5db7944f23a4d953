"""What differs from the best plan so far in a few choices: its degrees, its schedule, what is on the host."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.search.learned import Kind, Learned
from autopar.search.space import Family, Point, Region, promise
from autopar.search.space import savers as saving
from autopar.search.work import work_of

if TYPE_CHECKING:
    from autopar.search.outcomes import Outcome
    from autopar.search.search import Search

Numbers = NDArray[np.int64]

ACTIVATIONS: Final = ("activations",)
"""On the host."""
POINT_WORK: Final = 5e4
"""Of a point that is laid out, at most: about one second."""

_POLISHED = 4  # points like the best
_REGIONS_POLISHED = 2
_HOPE, _HOPES = 1.05, 0.03  # times the best that may turn out to be better; of the work of a whole search, for these
_AWAY_TRIED = 3  # points with activations on the host
_LOOKED = 4  # regions next to the best that are placed, with a pipeline or without one
_ROWS_LOOKED = 3  # those that differ from it in their rows alone
_FACTORS, _CHANGES = (8, 3, 3, 3, 3), 3  # by which those differ at most in each of their sizes, and in how many
_STORED = 0.3  # of the work of a whole search, for other ways to store what is on the host


def ways_away(search: Search, family: Family) -> set[tuple[str, ...]]:
    """What may be on the host."""
    return {offload for offload, _ in saving(family, search.costing.cluster, search.pins)}


def may_put_away(search: Search, region: Region) -> bool:
    """Whether activations may be on the host under any schedule."""
    return any(ACTIVATIONS in ways_away(search, family) for family in search.families_of(region))


def worth_away(search: Search, best: Point) -> tuple[str, ...]:
    """What is on the host of points that may be better than the ``best``: as much as of that, or activations; nothing
    of these where that can't be."""
    return best.offload or (ACTIVATIONS if may_put_away(search, best.region) else ())


def climb(search: Search, around: Around, learned: Learned, offload: tuple[str, ...]) -> None:
    """Lay out the likely best of regions that differ from the best in a few degrees, while that finds any: of those
    that put as much on the host, of which the best's own may have better where it is short of memory; first of those
    that differ in their rows alone, of which most is known."""
    seen: set[Region] = set()
    limit = search.work + search.most_work
    while (outcome := search.ranked()[0]).point.region not in seen:
        best = outcome.point
        seen.add(best.region)
        if offload and outcome.is_tight:
            _step_to(search, best.region, best._replace(offload=offload), limit, learned)
            best = search.ranked()[0].point
        known = seen | {o.point.region for o in search.outcomes if o.point.offload == offload}
        like = best._replace(offload=offload)
        near = sorted(
            (_likely_best(search, region, like, learned), number, region)
            for number, region in enumerate(around.next_to(best.region))
            if region not in known
        )
        rows = [item for item in near if item[-1].mesh == best.region.mesh]
        for seconds, _, region in rows[:_ROWS_LOOKED]:
            if seconds < search.best_seconds and search.work < limit and search.ranked()[0].point == best:
                _step_to(search, region, like, limit, learned)
        if search.ranked()[0].point != best:
            continue
        placed = Counter[bool]()  # with a pipeline and without one: estimates of these are off by other amounts
        waiting = _by_mesh(item for item in near if item not in rows)  # sorted, so it is a heap
        while waiting and waiting[0][0] < search.best_seconds and search.work < limit:
            seconds, number, region = heapq.heappop(waiting)
            is_new, is_cut = search.profile(region) is None, region.mesh.pp > 1
            if is_new and placed:  # others with its axes may say more by now
                likely = _likely_best(search, region, like, learned)
                if likely > seconds:
                    heapq.heappush(waiting, (likely, number, region))
                    continue
            placed[is_cut] += is_new
            if not is_new or placed[is_cut] <= _LOOKED:
                _step_to(search, region, like, limit, learned)


def _step_to(search: Search, region: Region, like: Point, limit: float, learned: Learned) -> None:
    """Lay out the likely best of ``region``, of points with as much on the host as ``like``: if that is anything, with
    its schedule. Where that is refused, the same with the vocabulary elsewhere."""
    if search.place(region) is None:
        return
    families = _near(search, region, like) if like.offload else _stored(search, region, like)
    while families:
        refused = {point.vocabulary for point in _try_likely(search, region, families, limit, learned, tries=1)}
        families = [points for points in families if refused and points[0].vocabulary not in refused]


def _stored(search: Search, region: Region, like: Point) -> list[list[Point]]:
    """Points of ``region`` by family, with the head in as many chunks as ``like`` has."""
    families = (search.stored(family) for family in search.families_of(region))
    return [[point._replace(head_chunks=like.head_chunks) for point in points] for points in families]


def _likely_best(search: Search, region: Region, best: Point, learned: Learned) -> float:
    """What ``region`` is likely to take, with as much on the host as the ``best`` has: where it is placed, its points;
    if there is anything on the host, those of the best's schedule with as many chunks."""
    profile, noted = search.profile(region), search.promising.get(region)
    if noted is not None and noted[1].offload != best.offload:
        noted = None
    if profile is None or (noted is None and not best.offload):
        likely = search.likely(region, best.offload)
        if region.mesh == best.region.mesh:  # the best says how far that is off
            return learned.likely(best._replace(region=region), likely)
        return learned.laid_out(Kind.of(search, region, best.offload), likely)
    if noted is not None and not best.offload:
        found = [noted]
    else:
        alone = 1 in (region.mesh.pp, best.region.mesh.pp)
        families = [points for points in _near(search, region, best) if alone or points[0].chunks == best.chunks]
        estimates = (zip(search.estimates(points, profile), points, strict=True) for points in families)
        found = [(seconds * promise(point), point) for seconds, point in itertools.chain.from_iterable(estimates)]
    return min((learned.likely(point, seconds) for seconds, point in found), default=math.inf)


def _by_mesh(near: Iterable[tuple[float, int, Region]]) -> list[tuple[float, int, Region]]:
    """The first of each mesh, in that order."""
    found: dict[Mesh, tuple[float, int, Region]] = {}
    for item in near:
        found.setdefault(item[-1].mesh, item)
    return list(found.values())


def _near(search: Search, region: Region, best: Point) -> list[list[Point]]:
    """Points of ``region`` like the ``best``: whose rows are others alone, with the vocabulary anywhere."""
    return _alike(search, region, best, any_head=region.mesh == best.region.mesh)


def _alike(search: Search, region: Region, best: Point, *, any_head: bool = False) -> list[list[Point]]:
    """Points of ``region`` with the schedule of the ``best``, of any number of chunks, and with as much on the host;
    with its vocabulary, or with ``any_head``. Without a pipeline, which has few schedules, with any."""
    families = [
        family
        for family in search.families_of(region)
        if region.mesh.pp == 1
        or (family.schedule == best.schedule and (any_head or family.vocabulary == best.vocabulary))
        if best.offload in ways_away(search, family)
    ]

    def like_best(point: Point) -> Point:
        return point._replace(offload=best.offload, head_chunks=best.head_chunks)

    return [list(map(like_best, search.stored(family))) for family in families]


@dataclass(frozen=True)
class Around:
    """Regions, and ``[region, size]`` of their degrees, dp aside, and rows."""

    regions: Sequence[Region]
    sizes: Numbers

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Around:
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


def polish(search: Search, learned: Learned) -> None:
    """Lay out what is done otherwise on the regions of the best, on the device; where that takes little work, on the
    best's also what looks a little worse."""
    limit = max(search.most_work, search.work + search.most_work / 3)
    for region in list(_by_region(search))[:_REGIONS_POLISHED]:
        _try_likely(search, region, _stored(search, region, search.ranked()[0].point), limit, learned)
    limit, best = search.work + _HOPES * search.most_work, search.ranked()[0].point
    _try_likely(search, best.region, _stored(search, best.region, best), limit, learned, hope=_HOPE)


def polish_away(search: Search, learned: Learned) -> None:
    """Lay out the best with its activations on the host, and weights stored otherwise: each way what is likely the
    best, of the regions of the best."""
    limit = search.work + _STORED * search.most_work
    away = [(region, outcome) for region, outcome in _by_region(search).items() if outcome.point.offload]
    for region, outcome in away[:_REGIONS_POLISHED]:
        families = _alike(search, region, outcome.point)
        for way in sorted({point.way for points in families for point in points} - {outcome.point.way}):
            some = [[point for point in points if point.way == way] for points in families]
            _try_likely(search, region, some, limit, learned, tries=1)


def put_away(search: Search, learned: Learned) -> None:
    """Lay out each region where some of it is recomputed with activations on the host instead: what is likely the best
    under a schedule that was laid out, here or elsewhere."""
    away: list[tuple[float, int, Region, Point]] = []
    for number, (region, outcome) in enumerate(_by_region(search).items()):
        profile = search.profile(region)
        if outcome.recomputes and profile is not None:
            points = _as_laid_out(search, outcome.point._replace(offload=ACTIVATIONS))
            found = [(search.estimates([point], profile)[0], point) for point in points]
            if not found:
                continue
            estimate, point = min(found, key=lambda pair: learned.likely(pair[1], pair[0]))
            away.append((estimate, number, region, point))
    for _, _, region, point in sorted(away)[:_AWAY_TRIED]:
        _try_likely(search, region, [[point]], math.inf, learned, hope=promise(point))  # one try is worth the doubt


def _as_laid_out(search: Search, point: Point) -> list[Point]:
    """``point``, with as much on the host under each schedule that was laid out in any region with its vocabulary, if
    it may be in this one; without a pipeline, which has few schedules, under each."""
    known = {o.point.family[1:] for o in search.outcomes if o.point.vocabulary == point.vocabulary}
    return [
        point._replace(schedule=family.schedule, chunks=family.chunks)
        for family in search.families_of(point.region)
        if family[1:] in known or point.region.mesh.pp == 1
        if point.offload in ways_away(search, family)
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
) -> list[Point]:
    """Lay out what is likely to take less than ``hope`` times as long as the best, of points of some families of
    ``region``; gives those that were refused."""
    profile = search.profile(region)
    assert profile is not None
    waiting = [
        (estimate * promise(point), number, point)
        for number, points in enumerate(families)
        for point, estimate in zip(points, search.estimates(points, profile), strict=True)
        if work_of(point._replace(offload=())) <= POINT_WORK
    ]
    for estimate, _, point in waiting:
        if not math.isinf(estimate):
            search.note(point, estimate)
    tried, refused = {outcome.point for outcome in search.outcomes} | set(search.refusals), list[Point]()
    for estimate, _, point in sorted(waiting):
        if not tries or search.work >= limit:
            break
        is_new = point not in tried and not learned.is_tried(point, estimate)
        if not is_new or search.has_room(point._replace(offload=())):
            continue
        if learned.likely(point, estimate) < hope * search.best_seconds:
            tries -= 1
            try:
                learned.lay_out(search, point, estimate)
            except AutoparError:
                refused.append(point)
    return refused
