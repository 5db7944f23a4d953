"""Where nothing that looked good fits: from what lacked the least memory to what needs less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from autopar.errors import AutoparError, BudgetError
from autopar.search.climb import POINT_WORK
from autopar.search.space import Point, Region, savers, storages
from autopar.search.work import work_of

if TYPE_CHECKING:
    from autopar.search.search import Search

_SHARE: Final = 1.0  # of the work of a whole search


def squeeze(search: Search) -> None:
    """Lay out, on the regions where ranks were refused the least, what differs from that in one kind of choice after
    the other, and goes on from what needs the least, until anything fits."""
    limit, seen = search.work + _SHARE * search.most_work, set[Region]()
    while not search.outcomes and search.work < limit:
        refused = {point: error for point, error in search.refusals.items() if isinstance(error, BudgetError)}
        lacking = {point: error.needed_bytes for point, error in refused.items() if point.region not in seen}
        if not lacking:
            return
        point = min(lacking, key=lambda each: lacking[each])
        seen.add(point.region)
        for others in (_saved, _ordered, _stored):
            point = _leanest(search, point, others, limit)


def _leanest(search: Search, point: Point, others: Callable[[Search, Point], Iterator[Point]], limit: float) -> Point:
    """Of ``point``, which is laid out, and ``others`` than it."""
    least = needed_bytes(search, point)
    for other in others(search, point):
        if search.outcomes or search.work >= limit:
            break
        if work_of(other) <= POINT_WORK and (needed := needed_bytes(search, other)) < least:
            point, least = other, needed
    return point


def needed_bytes(search: Search, point: Point) -> float:
    """What a rank that has no room for ``point`` needs; 0 where it fits, inf where it can't run at all."""
    try:
        search.lay_out(point)
    except BudgetError as error:
        return error.needed_bytes
    except AutoparError:
        return math.inf
    return 0.0


def _saved(search: Search, point: Point) -> Iterator[Point]:
    for offload, chunks in savers(point.family, search.costing.cluster, search.pins):
        yield point._replace(offload=offload, head_chunks=chunks)


def _ordered(search: Search, point: Point) -> Iterator[Point]:
    """In the orders that may save memory in the same ways."""
    for family in search.families_of(point.region):
        if (point.offload, point.head_chunks) in savers(family, search.costing.cluster, search.pins):
            yield point._replace(schedule=family.schedule, chunks=family.chunks, vocabulary=family.vocabulary)


def _stored(search: Search, point: Point) -> Iterator[Point]:
    for zero, ranks in storages(point.region, search.costing.cluster, search.pins):
        yield point._replace(zero=zero, zero_ranks=ranks)
