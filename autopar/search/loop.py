"""The loop: what has the best bound is looked at next, until nothing left can be better.

A region is bounded by the profiles that are known, then by its own; a point by its region's profile; then it is laid
out. Everything is deterministic: equal bounds go in the order of the space.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autopar.errors import AutoparError, BudgetError
from autopar.mesh import Mesh
from autopar.planner.modes import MODES
from autopar.schedules.registry import SCHEDULES
from autopar.search.bounds import scaled
from autopar.search.costing import Costing, Outcome
from autopar.search.dive import dive
from autopar.search.pins import Pins
from autopar.search.profiles import Key, Profile, Profiler
from autopar.search.space import BEATEN, Point, Region, Sizes, regions, savers, schedules, storages, work_of
from autopar.search.watching import Watcher

TOLERANCE = 0.01
"""A plan that is proven to be within this share of the best is good enough."""

WORK = 6e5
"""Units of some 20 microseconds (:func:`autopar.search.space.work_of`) that a search may take; what is left then counts
with its bound. Counted, not measured: searches are deterministic."""

_OPS = 100  # units of work of placing one op
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


class _Item(NamedTuple):
    """What waits: by ``order``, which is its bound made likely."""

    order: float
    number: int
    what: Region | Point
    bound: float


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
    _waiting: list[_Item] = field(default_factory=list, init=False)
    _work: float = field(default=0.0, init=False)
    _keys: dict[Region, Key] = field(default_factory=dict, init=False)  # of regions that are placed in a tight budget
    _fitted: set[Point] = field(default_factory=set, init=False)
    _numbers: int = field(default=0, init=False)
    _passed: list[_Item] = field(default_factory=list, init=False)  # what was left out
    _before: int = field(default=0, init=False)  # profiles that others made
    _unplaced: Counter[tuple[str, int]] = field(default_factory=Counter, init=False)

    @property
    def best_seconds(self) -> float:
        return min((outcome.step_seconds for outcome in self.outcomes), default=math.inf)

    @cached_property
    def ops(self) -> int:
        """Of all blocks of the model."""
        return sum(len(block.ops) for block in self.profiler.models[False].blocks)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def laid_out(self) -> int:
        return len(self.outcomes) + len(self.refusals)

    @property
    def placed(self) -> int:
        return len(self.profiler.known) - self._before

    def glance(self) -> list[Outcome]:
        """What looks best, the best first, without a proof; none where that doesn't fit."""
        dive(self, self._begin())
        return self.ranked()

    def _begin(self) -> list[Region]:
        self._before = len(self.profiler.known)
        self.costing.root = self._root()
        if self.costing.root is None:
            raise next(iter(self.profiler.refused.values()))
        found = sorted(regions(self.sizes, self.pins), key=_simplicity)
        self._unplaced.update((axis, getattr(region.key, axis)) for region in found for axis in region.key.axes())
        return found

    def run(self) -> Found:
        found = self._begin()
        dive(self, found)
        for region in found:
            self.points += self.count(region)
            self._push(self.by_scaling(region), region)
        while self._waiting and self._goes_on():
            item = heapq.heappop(self._waiting)
            if self._is_beaten(item.bound):
                self._passed.append(item)
            elif isinstance(item.what, Region):
                self._open(item.bound, item.what)
            else:
                self._try(item.bound, item.what)
        proven = min(self.bound_seconds, self.best_seconds)
        return Found(self.ranked(), proven, self.points, self.placed, self.laid_out, dict(self.refusals))

    @property
    def bound_seconds(self) -> float:
        """Nothing that isn't laid out yet is below, nor what is."""
        return min((item.bound for item in (*self._waiting, *self._passed)), default=self.best_seconds)

    def _is_beaten(self, bound: float) -> bool:
        return bound >= self.best_seconds * (1 - self.tolerance)

    def again(self, spared_bytes: int) -> Search:
        """The same search from the start, with ``spared_bytes`` of a rank's memory left for what no solver counts."""
        costing = Costing(
            self.costing.cluster, self.costing.options, spared_bytes, expert_share=self.costing.expert_share
        )
        return replace(self, costing=costing, outcomes=[], refusals={}, built=0)

    def ranked(self) -> list[Outcome]:
        """All outcomes, the best first."""
        return sorted(self.outcomes, key=_rank)

    def others(self) -> Iterator[tuple[float, Point]]:
        """What wasn't laid out of the regions that were placed, with its bounds, the best first."""
        heap = [(i.bound, i.number, i.what) for i in (*self._waiting, *self._passed) if self._is_placed(i.what)]
        heapq.heapify(heap)
        numbers = itertools.count(self._numbers + 1)
        while heap:
            bound, _, item = heapq.heappop(heap)
            if isinstance(item, Point):
                yield bound, item
                continue
            profile = self.profile(item)
            assert profile is not None
            for point in self.points_of(item):
                if self._is_placed(point) and self.costing.may_fit(point, profile):
                    heapq.heappush(heap, (max(bound, self.costing.bound(point, profile)), next(numbers), point))

    def _is_placed(self, item: Region | Point) -> bool:
        if isinstance(item, Region):
            return self.profile(item) is not None
        return self.key_of(item) in self.profiler.known

    def _goes_on(self) -> bool:
        if self.quick and self.outcomes:
            return False
        if self._work >= WORK:
            return not self.outcomes
        return True

    def _root(self) -> Profile | None:
        """The whole batch on one rank, which bounds everything."""
        return self.profiler.of(Key(self.sizes.batch, 1, 1, 1), Mesh(), 1)

    def _push(self, bound: float, what: Region | Point) -> None:
        if math.isinf(bound):
            return
        if self._is_beaten(bound):
            self._pass(bound, what)
        else:
            self._numbers += 1
            heapq.heappush(self._waiting, _Item(bound * promise(what), self._numbers, what, bound))

    def _pass(self, bound: float, what: Region | Point) -> None:
        """Leave it out; what is proven counts with its bound."""
        self._numbers += 1
        self._passed.append(_Item(bound, self._numbers, what, bound))

    def tell(self, phase: str) -> None:
        if self.watch is not None:
            self.watch(phase, self)

    # --- regions

    def _open(self, bound: float, region: Region) -> None:
        """Place it, if its bound is still the best by then; then its points wait instead of it."""
        profile = self.profile(region)
        if profile is None:
            better = max(self.by_scaling(region), self.costing.region_bound(region, self.share(region)))
            if better > bound:
                self._push(better, region)
            elif self.place_reference(region) or self.place(region) is not None:
                self._push(bound, region)
            return
        for point in self.points_of(region):
            self._offer(bound, point, profile)

    def place_reference(self, region: Region) -> bool:
        """Make one of the profiles that bound ``region`` and others, if there is one to make."""
        reference = self._reference(region)
        if reference is not None:
            self._work += _OPS * self.ops
            self.tell("place")
            self.profiler.of(*reference)
        return reference is not None

    def place(self, region: Region) -> Profile | None:
        """The region's own profile; None where it can't be placed.

        Where its state doesn't fit in any way, it is placed again so that parameters are split as far as that takes.
        """
        if self.profile(region) is None:
            self.tell("place")
            self._work += _OPS * self.ops
        found = self.profiler.of(self._keys.get(region, region.key), region.mesh, region.microbatches)
        if found is None or found.key.stages or any(self.costing.may_fit(p, found) for p in self.points_of(region)):
            return found
        tight = region.key._replace(stages=region.mesh.pp)
        smaller = self.profiler.of(tight, region.mesh, region.microbatches)
        if smaller is not None:
            self._keys[region] = tight
        return smaller or found

    def profile(self, region: Region) -> Profile | None:
        """The region's, where it is placed."""
        return self.profiler.known.get(self._keys.get(region, region.key))

    def key_of(self, point: Point) -> Key:
        """Of the profile that ``point`` is laid out on."""
        return self._keys.get(point.region, point.region.key)._replace(head=point.head, chunks=point.head_chunks)

    def _offer(self, bound: float, point: Point, profile: Profile) -> None:
        """Let a point wait, if what stays from step to step may fit; else what stores it elsewhere."""
        if self.costing.may_fit(point, profile):
            self._push(max(bound, self.costing.bound(point, profile)), point)
        else:
            self._save(point, profile)

    def share(self, region: Region) -> float:
        """Which part of the root's work a rank of ``region`` does of a microbatch."""
        return scaled(self.root.key, region.key) or 0.0

    @property
    def root(self) -> Profile:
        """The profile of the whole batch on one rank."""
        assert self.costing.root is not None
        return self.costing.root

    def by_scaling(self, region: Region) -> float:
        """What the profiles say that are known: the whole batch's on one rank, and what each axis alone adds to it."""
        root, pp = self.root, region.mesh.pp
        seconds = root.seconds + math.fsum(self._added_seconds(axis, region.key) for axis in region.key.axes())
        forward = math.fsum(unit.forward for unit in root.units)
        # The last rank waits for the first stages of the others, of which there are at most eight a rank.
        ahead = forward * (pp - 1) / (8 * pp)
        streamed = self.costing.least_streamed(region)
        fixed, share = root.fixed_seconds, self.share(region)
        microbatch = share * (seconds - fixed) + fixed  # launches don't get shorter with what they do
        return max(streamed, region.microbatches * microbatch / pp + share * ahead)

    def _added_seconds(self, axis: str, key: Key) -> float:
        """What an axis adds to the root's time: its communication, and what it leaves whole."""
        root, alone = self.root, self._alone(axis, key)
        reference = self.profiler.known.get(alone)
        share = scaled(root.key, alone)
        if reference is None or not share:
            return 0.0
        fixed = root.fixed_seconds
        return max(0.0, (reference.seconds - fixed) / share - (root.seconds - fixed))

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
                offload, head_chunks = next(savers(cluster, self.pins))
                yield Point(region, schedule, chunks, vocabulary, zero, zero_ranks, offload, head_chunks)

    def count(self, region: Region) -> int:
        """Its points, with those that only save memory."""
        kinds = sum(1 for _ in schedules(region, self.sizes, self.pins, self.heads))
        ways = sum(1 for _ in storages(region, self.costing.cluster, self.pins))
        return kinds * ways * sum(1 for _ in savers(self.costing.cluster, self.pins))

    def _try(self, bound: float, point: Point) -> None:
        known = self.profile(point.region)
        assert known is not None
        if point not in self._fitted:
            self._fitted.add(point)
            better = self.costing.memory_bound(point, known)
            if math.isinf(better):
                self._save(point, known)
            if better > bound:
                self._push(better, point)
                return
        try:
            outcome = self.lay_out(point)
        except AutoparError as error:
            if isinstance(error, BudgetError):
                self._save(point, known)
                if error.needed_bytes <= self.costing.whole_budget_bytes + known.working_bytes:
                    self._pass(bound, point)  # what its largest op needs was an estimate: that proves nothing
            return
        if outcome.recomputes:
            self._save(point, known)

    def lay_out(self, point: Point) -> Outcome:
        """What a point takes, known once it was laid out. Raises AutoparError where it can't run or doesn't fit."""
        if point in self.refusals:
            raise self.refusals[point]
        known = next((outcome for outcome in self.outcomes if outcome.point == point), None)
        if known is not None:
            return known
        self.tell("lay out")
        self._work += work_of(point)
        key = self.key_of(point)
        profile = self.profiler.of(key, point.region.mesh, point.region.microbatches)
        try:
            if profile is None:
                raise self.profiler.refused[key]
            outcome = self.costing.laid_out(point, profile)
        except AutoparError as error:
            self.refusals[point] = error
            raise
        self.outcomes.append(outcome)
        return outcome

    def _save(self, point: Point, profile: Profile) -> None:
        """What saves memory in other ways, which only helps where something was recomputed, or didn't fit."""
        ways = list(savers(self.costing.cluster, self.pins))
        if (point.offload, point.head_chunks) != ways[0]:
            return
        for offload, chunks in ways[1:]:
            other = point._replace(offload=offload, head_chunks=chunks)
            if self.costing.may_fit(other, profile):
                self._push(self.costing.bound(other, profile), other)


def promise(what: Region | Point) -> float:
    """How many times its bound a step is likely to take: what is done in more complicated ways is bounded worse."""
    if isinstance(what, Region):
        return 1.0 + 0.01 * (what.mesh.cp > 1) + 0.005 * (what.mesh.tp > 1)
    row = SCHEDULES.get(what.schedule)
    doubts = [
        (0.02, bool(MODES[what.vocabulary].head)),
        (0.01, (what.chunks or (row.chunks if row else 0) or 1) > 1),
        (0.01, row is not None and row.cost_aware),
        (0.03, bool(what.offload)),
        (0.02, what.head_chunks > 1),
        (0.01, what.region.mesh.cp > 1),
    ]
    return 1.0 + sum(share for share, holds in doubts if holds)


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
