"""A first good plan: the regions that look best, by estimates instead of bounds.

What is proven is the loop's (:mod:`autopar.search.loop`); a good step that is known early lets it discard most regions
unplaced. An estimate is a bound made likely: with the bubble of a common schedule, the state of the leanest ZeRO stage
that is needed, and what has to be recomputed beside it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.search.space import Point, Region, work_of

if TYPE_CHECKING:
    from autopar.search.loop import Search

_TRIES = 3  # points of one region
_REGIONS = 6  # that fit
_FAILURES = 2  # regions with the same pp and tp that may turn out not to fit
_WORK = 1e5  # of a point: about two seconds
_LOOKS = 5000  # at regions


def dive(search: Search, regions: list[Region]) -> None:
    """Lay out points of the most promising regions, of other pp and tp each, plain ones first."""
    node = search.costing.cluster.devices_per_node
    plain = [r for r in regions if r.mesh.tp <= node and r.mesh.cp == 1 and not r.mesh.borrowed]
    _dive(search, plain)
    if not search.outcomes:
        _dive(search, regions)


def _dive(search: Search, regions: list[Region]) -> None:
    waiting = [(_first_estimate(search, region), number) for number, region in enumerate(regions)]
    heapq.heapify(waiting)
    estimated: set[int] = set()
    tried: Counter[tuple[int, int]] = Counter()
    found = 0
    for _ in range(_LOOKS):
        if not waiting or waiting[0][0] >= search.best_seconds or found == _REGIONS:
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
            heapq.heappush(waiting, (max(estimate, search.costing.estimate(region, search.share(region))), number))
        else:
            fits = _lay_out(search, region)
            tried[degrees] += 1 + _FAILURES * fits
            found += fits


def _first_estimate(search: Search, region: Region) -> float:
    """With the bubble of a schedule that splits backwards."""
    root, pp = search.root, region.mesh.pp
    forward = math.fsum(unit.forward for unit in root.units)
    wait = search.share(region) * forward * (pp - 1) / pp
    return search.by_scaling(region) + wait


def _lay_out(search: Search, region: Region) -> bool:
    """The first of its points that fit, by their bounds."""
    profile = search.place(region)
    if profile is None:
        return False
    costing = search.costing
    points = (point for point in search.points_of(region) if work_of(point) <= _WORK)
    fitting = [point for point in points if costing.may_fit(point, profile)]
    bounded = [(costing.bound(point, profile), number) for number, point in enumerate(fitting)]
    heapq.heapify(bounded)
    tries, bounds = 0, set[Point]()
    while bounded and tries < _TRIES:
        bound, number = heapq.heappop(bounded)
        point = fitting[number]
        if bound >= search.best_seconds or math.isinf(bound):
            return True
        if point not in bounds:
            bounds.add(point)
            heapq.heappush(bounded, (max(bound, costing.memory_bound(point, profile)), number))
            continue
        tries += 1
        try:
            search.lay_out(point)
        except AutoparError:
            continue
    return bool(search.outcomes)
