"""The loop: what has the best bound is looked at next, until nothing left can be better.

A region is bounded by the profiles that are known, then by its own; a point by its region's profile; then it is laid
out. Everything is deterministic: equal bounds go in the order of the space.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.errors import AutoparError, BudgetError
from autopar.mesh import Mesh
from autopar.planner.modes import MODES
from autopar.search.bounds import scaled
from autopar.search.costing import Costing, Outcome
from autopar.search.pins import Pins
from autopar.search.profiles import Key, Profile, Profiler
from autopar.search.space import BEATEN, Point, Region, Sizes, regions, savers, schedules, storages
from autopar.search.watching import Watcher

TOLERANCE = 0.01
"""A plan that is proven to be within this share of the best is good enough."""

_PLACED, _LAID_OUT = 40, 200  # so many at most; what is left then counts with its bound
_SHARED = 4  # regions that a profile made for its bound alone has to serve


@dataclass(frozen=True)
class Found:
    """What a search found: ``outcomes`` that fit, the best first; nothing in a space of ``points`` is below
    ``bound_seconds``. ``refusals`` are of what was tried and can't run or doesn't fit."""

    outcomes: list[Outcome]
    bound_seconds: float
    points: int
    placed: int
    laid_out: int
    refusals: dict[Point, AutoparError]


@dataclass
class Search:
    """One search. ``watch`` is told of every step."""

    pins: Pins
    sizes: Sizes
    profiler: Profiler
    costing: Costing
    heads: tuple[str, ...]
    watch: Watcher | None = None
    tolerance: float = TOLERANCE
    quick: bool = False  # anything that fits will do
    outcomes: list[Outcome] = field(default_factory=list)
    refusals: dict[Point, AutoparError] = field(default_factory=dict)
    built: int = 0
    points: int = field(default=0, init=False)
    bound_seconds: float = field(default=0.0, init=False)
    _infeasible: list[Region] = field(default_factory=list, init=False)
    _waiting: list[tuple[float, int, Region | Point]] = field(default_factory=list, init=False)
    _fitted: set[Point] = field(default_factory=set, init=False)
    _numbers: int = field(default=0, init=False)
    _left: float = field(default=math.inf, init=False)  # the best bound of what was left out
    _unplaced: Counter[tuple[str, int]] = field(default_factory=Counter, init=False)

    @property
    def best_seconds(self) -> float:
        return min((outcome.step_seconds for outcome in self.outcomes), default=math.inf)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def laid_out(self) -> int:
        return len(self.outcomes) + len(self.refusals)

    @property
    def placed(self) -> int:
        return len(self.profiler.known)

    def run(self) -> Found:
        self.costing.root = self._root()
        if self.costing.root is None:
            raise next(iter(self.profiler.refused.values()))
        for region in sorted(regions(self.sizes, self.pins), key=_simplicity):
            self.points += self.count(region)
            self._unplaced.update((axis, getattr(region.key, axis)) for axis in region.key.axes())
            self._push(self._by_scaling(region), region)
        while self._waiting and self._goes_on():
            bound, _, item = heapq.heappop(self._waiting)
            self.bound_seconds = max(self.bound_seconds, min(bound, self.best_seconds))
            if isinstance(item, Region):
                self._open(bound, item)
            else:
                self._try(bound, item)
        bound = min(self._left, self.best_seconds, self._waiting[0][0] if self._waiting else math.inf)
        ranked = sorted(self.outcomes, key=_rank)
        return Found(ranked, bound, self.points, self.placed, self.laid_out, dict(self.refusals))

    def _goes_on(self) -> bool:
        if self.quick and self.outcomes:
            return False
        if self.placed >= _PLACED or self.laid_out >= _LAID_OUT:
            return not self.outcomes and self.laid_out < 2 * _LAID_OUT
        return self._waiting[0][0] < self.best_seconds * (1 - self.tolerance)

    def _root(self) -> Profile | None:
        """The whole batch on one rank, which bounds everything."""
        return self.profiler.of(Key(self.sizes.batch, 1, 1, 1), Mesh(), 1)

    def _push(self, bound: float, item: Region | Point) -> None:
        if bound >= self.best_seconds * (1 - self.tolerance):
            self._left = min(self._left, bound)
            return
        self._numbers += 1
        heapq.heappush(self._waiting, (bound, self._numbers, item))

    def tell(self, phase: str) -> None:
        if self.watch is not None:
            self.watch(phase, self)

    # --- regions

    def _open(self, bound: float, region: Region) -> None:
        """Place it, if its bound is still the best by then; then its points wait instead of it."""
        profile = self.profiler.known.get(region.key)
        if profile is None:
            better = max(self._by_scaling(region), self.costing.region_bound(region, self._share(region)))
            if math.isinf(better):
                self._infeasible.append(region)
                return
            if better > bound:
                self._push(better, region)
            elif (reference := self._reference(region)) is not None:
                self.tell("place")
                self.profiler.of(*reference)
                self._push(bound, region)
            elif region.key not in self.profiler.refused:
                self.tell("place")
                self.profiler.of(region.key, region.mesh, region.microbatches)
                self._push(bound, region)
            return
        for point in self.points_of(region):
            self._push(max(bound, self.costing.bound(point, profile)), point)

    def _share(self, region: Region) -> float:
        """Which part of the root's work a rank of ``region`` does of a microbatch."""
        assert self.costing.root is not None
        return scaled(self.costing.root.key, region.key) or 0.0

    def _by_scaling(self, region: Region) -> float:
        """What the profiles say that are known: the whole batch's on one rank, and what each axis alone adds to it."""
        assert self.costing.root is not None
        root, pp = self.costing.root, region.mesh.pp
        seconds = root.seconds + math.fsum(self._added_seconds(axis, region.key) for axis in region.key.axes())
        forward = math.fsum(unit.forward for unit in root.units)
        # The last rank waits for the first stages of the others, of which there are at most eight a rank.
        ahead = forward * (pp - 1) / (8 * pp)
        streamed = self.costing.least_streamed(region)
        return max(streamed, self._share(region) * (region.microbatches * seconds / pp + ahead))

    def _added_seconds(self, axis: str, key: Key) -> float:
        """What an axis adds to the root's time: its communication, and what it leaves whole."""
        assert self.costing.root is not None
        root, alone = self.costing.root, self._alone(axis, key)
        reference = self.profiler.known.get(alone)
        share = scaled(root.key, alone)
        return max(0.0, reference.seconds / share - root.seconds) if reference is not None and share else 0.0

    def _alone(self, axis: str, key: Key) -> Key:
        """The whole batch on this axis of ``key``."""
        size = getattr(key, axis)
        return Key(self.sizes.batch // (size if axis == "ep" else 1), 1, 1, 1)._replace(**{axis: size})

    def _reference(self, region: Region) -> tuple[Key, Mesh, int] | None:
        """A profile that bounds other regions, too: of the whole batch, with one of this region's axes alone."""
        for axis in region.key.axes():
            alone, size = self._alone(axis, region.key), getattr(region.key, axis)
            known = alone in self.profiler.known or alone in self.profiler.refused
            if not known and self._unplaced[axis, size] >= _SHARED and self.sizes.batch % alone.rows == 0:
                return alone, Mesh(**{axis: size}), 1
        return None

    # --- points

    def points_of(self, region: Region) -> Iterator[Point]:
        """Without what only saves memory: that is tried where it is needed."""
        cluster = self.costing.cluster
        for schedule, chunks, vocabulary in schedules(region, self.sizes, self.pins, self.heads):
            for zero, zero_ranks in storages(region, cluster, self.pins):
                offload, head_chunks = next(savers(cluster, self.pins, vocabulary, zero))
                yield Point(region, schedule, chunks, vocabulary, zero, zero_ranks, offload, head_chunks)

    def count(self, region: Region) -> int:
        """Its points, with those that only save memory."""
        kinds = sum(1 for _ in schedules(region, self.sizes, self.pins, self.heads))
        ways = sum(1 for _ in storages(region, self.costing.cluster, self.pins))
        return kinds * ways * sum(1 for _ in savers(self.costing.cluster, self.pins, "redistributed", 0))

    def _try(self, bound: float, point: Point) -> None:
        if point not in self._fitted:
            self._fitted.add(point)
            better = self.costing.memory_bound(point, self.profiler.known[point.region.key])
            if math.isinf(better):
                self.refusals[point] = BudgetError("its layers don't fit, whatever they recompute", 0)
                self._save(point, True)
                return
            if better > bound:
                self._push(better, point)
                return
        self.tell("lay out")
        profile = self.profiler.of(point.key, point.region.mesh, point.region.microbatches)
        try:
            if profile is None:
                raise self.profiler.refused[point.key]
            outcome = self.costing.laid_out(point, profile)
        except AutoparError as error:
            self.refusals[point] = error
            self._save(point, isinstance(error, BudgetError))
            return
        self.outcomes.append(outcome)
        self._save(point, outcome.recomputes)

    def _save(self, point: Point, needed: bool) -> None:
        """What saves memory in other ways can only help where something was recomputed, or didn't fit."""
        base = next(savers(self.costing.cluster, self.pins, point.vocabulary, point.zero))
        if not needed or (point.offload, point.head_chunks) != base:
            return
        for offload, chunks in savers(self.costing.cluster, self.pins, point.vocabulary, point.zero):
            other = point._replace(offload=offload, head_chunks=chunks)
            if other != point:
                profile = self.profiler.known[point.region.key]
                self._push(self.costing.bound(other, profile), other)


def _simplicity(region: Region) -> tuple[int, ...]:
    mesh = region.mesh
    return mesh.cp, mesh.tp, len(mesh.borrowed), mesh.pp, mesh.experts, -region.rows


def _rank(outcome: Outcome) -> tuple[object, ...]:
    """Shorter steps first; of equal ones what is simpler."""
    point, mesh = outcome.point, outcome.point.region.mesh
    simple = (
        *(mesh.pp, mesh.cp, mesh.tp, mesh.experts, len(point.offload), point.head_chunks, point.zero, point.zero_ranks),
        *(point.chunks or 0, list(MODES).index(point.vocabulary), point.schedule in BEATEN, point.schedule),
    )
    return (float(f"{outcome.step_seconds:.9e}"), *simple, -point.region.rows)
