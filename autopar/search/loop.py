"""The loop: what has the best bound is looked at next, until nothing left can be better.

A region is bounded by the profiles that are known, then by its own; so are its points, those of a family at once, which
store state and save memory in other ways alone; then each point, which is laid out. Everything is deterministic: equal
bounds go in the order of the space.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from autopar.errors import AutoparError, BudgetError
from autopar.mesh import Mesh
from autopar.search import work as units
from autopar.search.ahead import Ahead
from autopar.search.bounds import scaled
from autopar.search.costing import Costing, Found, Outcome, laid_on, on_own, rank, splits_further
from autopar.search.dive import dive, lay_out_likely
from autopar.search.hulls import Array
from autopar.search.outlook import Outlook, View
from autopar.search.pins import Pins
from autopar.search.profiles import Key, Profile, Profiler
from autopar.search.references import Reference, References
from autopar.search.scaling import Scaling
from autopar.search.space import (
    Family,
    Point,
    Region,
    Savers,
    Sizes,
    Way,
    offloads,
    regions,
    savers,
    schedules,
    simplicity,
    storages,
    together,
    undominated,
)
from autopar.search.waiting import Item, What, work_beside
from autopar.search.watching import Watcher

TOLERANCE = 0.01
"""A plan that is proven to be within this share of the best is good enough."""

WORK = 2e5
"""Units (:mod:`autopar.search.work`) that a search may take; what is left then counts with its bound."""

_PROOF = 0.5  # of the work, for bounds at least


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
    most_work: float = WORK
    outcomes: list[Outcome] = field(default_factory=list)
    refusals: dict[Point, AutoparError] = field(default_factory=dict)
    built: int = 0
    promising: dict[Region, tuple[float, Point]] = field(default_factory=dict, init=False)
    """By region that was placed, what looks best, with the seconds that it is likely to take."""
    points: int = field(default=0, init=False)
    _waiting: list[Item] = field(default_factory=list, init=False)
    _work: float = field(default=0.0, init=False)
    _limit: float = field(default=0.0, init=False)  # that it may take
    _spared: float = field(default=0.0, init=False)  # of that, since it wouldn't better the bound
    _keys: dict[Region, Key] = field(default_factory=dict, init=False)  # of regions that are placed in a tight budget
    _saved: set[Point] = field(default_factory=set, init=False)  # what saves memory in other ways waits, too
    _roomy: set[Point] = field(default_factory=set, init=False)  # what was laid out, and fits as it is
    _numbers: int = field(default=0, init=False)
    _passed: list[Item] = field(default_factory=list, init=False)  # what was left out
    _before: int = field(default=0, init=False)  # profiles that others made
    _references: References | None = field(default=None, init=False)
    _counted: dict[object, int] = field(default_factory=dict, init=False)
    _scaling: Scaling | None = field(default=None, init=False)
    _raised: int = field(default=0, init=False)  # bounds of regions, by so many profiles
    _learned: int = field(default=0, init=False)  # from so many profiles
    _outlook: Outlook | None = field(default=None, init=False)  # None: there are no layers
    _ahead: Ahead | None = field(default=None, init=False)  # of a search with a proof

    @property
    def best_seconds(self) -> float:
        return min((outcome.step_seconds for outcome in self.outcomes), default=math.inf)

    @cached_property
    def ops(self) -> int:
        """Of all blocks of the model."""
        return sum(len(block.ops) for block in self.profiler.models[False].blocks)

    @property
    def _length(self) -> float:
        return units.length_of(self.sizes.units, self.ops)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def least_gpus(self) -> int:
        """On fewer, ranks can't hold the model in any way."""
        host, options = self.costing.cluster.device.host_memory_bytes, self.pins.options
        return self.costing.least_gpus(on_host=bool(options.offload if self.pins.fixes("offload") else host))

    @property
    def work(self) -> float:
        """That it took so far, in units of :data:`WORK`."""
        return self._work

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
        self._outlook = Outlook.of(self.costing, self.costing.root)
        found = sorted(regions(self.sizes, self.pins), key=simplicity)
        self.points = sum(map(self.count, found))
        if any(region.mesh.cp > 1 for region in found) and self.profiler.cuts_rows(self.sizes.batch):
            found = undominated(found)
        keys = Counter(region.key for region in found)
        self._references = References.of(self.profiler, self.sizes.batch, keys)
        self._scaling = Scaling(keys, self.costing.root)
        return found

    def run(self) -> Found:
        found = self._begin()
        if self.pins.gpus < self.least_gpus:
            return Found([], math.inf, self.points, self.placed, 0, {})
        learned = dive(self, found)
        self._limit = max(self.most_work, self._work + _PROOF * self.most_work)
        self._ahead = Ahead.of(self, found)
        for bound, region in zip(self.all_at_first(found).tolist(), found, strict=True):
            self._push(bound, region)
        while self._waiting and self._goes_on():
            self._learn()
            item = heapq.heappop(self._waiting)
            if self.is_beaten(item.bound):
                self._passed.append(item)
            elif isinstance(item.what, Region):
                self._open(item.bound, item.what)
            elif isinstance(item.what, Family):
                self._open_family(item.bound, item.what)
            elif isinstance(item.what, Savers):
                self._open_savers(item.bound, item.what)
            else:
                self._try(item.bound, item.what)
        self._raise_regions()
        lay_out_likely(self, learned, self._spared)
        proven = min(self.bound_seconds, self.best_seconds)
        return Found(self.ranked(), proven, self.points, self.placed, self.laid_out, dict(self.refusals))

    def _learn(self) -> None:
        """What was placed since the last time raises the bounds of others."""
        if self._raised != len(self.profiler.known):
            self._raised = len(self.profiler.known)
            self._raise_regions()

    def _raise_regions(self) -> None:
        """The bounds of all regions that wait, by all that is known: at once."""
        assert self._ahead is not None
        found = [(place, item.what) for place, item in enumerate(self._waiting) if isinstance(item.what, Region)]
        self._work += units.RAISED * len(found)
        bounds = self.all_at_first([region for _, region in found]).tolist()
        for (place, region), bound in zip(found, bounds, strict=True):
            item, better = self._waiting[place], max(bound, self._ahead.known_bound(region))
            if better > item.bound:
                self._waiting[place] = item._replace(bound=better)
        heapq.heapify(self._waiting)

    @property
    def bound_seconds(self) -> float:
        """Nothing that isn't laid out yet is below, nor what is."""
        return min((item.bound for item in (*self._waiting, *self._passed)), default=self.best_seconds)

    @property
    def _good(self) -> float:
        """What nothing has to be below."""
        return self.best_seconds * (1 - self.tolerance)

    def is_beaten(self, bound: float) -> bool:
        """Whether nothing that isn't below ``bound`` is better than the best by as much as counts."""
        return bound >= self._good

    def again(self, spared_bytes: int) -> Search:
        """The same search from the start, with ``spared_bytes`` of a rank's memory left for what no solver counts."""
        costing = Costing(self.costing.cluster, self.costing.options, spared_bytes)
        return replace(self, costing=costing, outcomes=[], refusals={}, built=0)

    def ranked(self) -> list[Outcome]:
        """All outcomes, the best first."""
        return sorted(self.outcomes, key=rank)

    def left(self) -> list[Item]:
        """What neither was laid out nor is all laid out, the best bound first."""
        return sorted((*self._waiting, *self._passed))

    def is_placed(self, what: What) -> bool:
        if isinstance(what, Point):
            return self.key_of(what)._replace(streamed=False) in self.profiler.known
        return self.profile(what if isinstance(what, Region) else what.region) is not None

    def _goes_on(self) -> bool:
        if self._work >= self._limit:
            return not (self.outcomes or self.quick)
        return not (self.quick and self.outcomes)

    def _root(self) -> Profile | None:
        """The whole batch on one rank, which bounds everything."""
        return self.profiler.of(Key(self.sizes.batch, 1, 1, 1), Mesh(), 1)

    def _push(self, bound: float, what: What) -> None:
        if math.isinf(bound):
            return
        if self.is_beaten(bound):
            self._pass(bound, what)
        else:
            self._numbers += 1
            heapq.heappush(self._waiting, Item(bound, self._numbers, what))

    def _pass(self, bound: float, what: What) -> None:
        """Leave it out; what is proven counts with its bound."""
        self._numbers += 1
        self._passed.append(Item(bound, self._numbers, what))

    def tell(self, phase: str) -> None:
        if self.watch is not None:
            self.watch(phase, self)

    # --- regions

    def _open(self, bound: float, region: Region) -> None:
        """Place it, if its bound is still the best by then; then its families wait instead of it."""
        profile = self.profile(region)
        if profile is None and self.place_reference(region):  # which bounds many others, too
            self._push(max(bound, self.at_first(region)), region)
            return
        assert self._ahead is not None
        better = self._ahead.bound(region)
        if better > bound:
            self._push(better, region)
        elif profile is None:
            if self._make(self.references.fastest(region)) or self.place(region) is not None:
                self._push(max(bound, self.at_first(region)), region)
        else:
            self._ahead.open(region)
            for family in self.families_of(region):
                points = list(self.stored(family))
                self._push(max(bound, min(self.bounds(points, profile, memory=False))), family)

    def _open_family(self, bound: float, family: Family) -> None:
        """Let its points wait, and where memory is what makes them slow, what saves it in other ways."""
        points, profile = list(self.stored(family)), self.profile(family.region)
        assert profile is not None
        further = [point for point in points if splits_further(point.way, laid_on(point, profile, self.profiler))]
        if further and not self.is_beaten(max(bound, min(self.bounds(further, profile, memory=False)))):
            self._place_streamed(family.region, profile)
        passes, kept = (self.bounds(points, profile, memory=memory) for memory in (False, True))
        saved = dict[Point, float]()
        for point, fastest, least in zip(points, passes, kept, strict=True):
            self._push(max(bound, least), point)
            if least > fastest and not self.is_beaten(max(bound, fastest)):
                saved[point] = fastest
        self._save(max(bound, min(saved.values(), default=bound)), saved)

    def _place_streamed(self, region: Region, profile: Profile) -> bool:
        """What those points of ``region`` are laid out on that split weights further than its ``profile``; whether it
        wasn't tried before."""
        own = profile.key._replace(streamed=True)
        return not self.profiler.was_tried(own, region.mesh) and self._make((own, region.mesh, region.microbatches))

    def bounds(self, points: Sequence[Point], profile: Profile, *, memory: bool = True) -> list[float]:
        """What each of ``points`` of one family is not below, found for all at once; inf where they can't fit."""
        return on_own(points, profile, self.profiler, partial(self._bounds, memory=memory))

    def _bounds(self, points: Sequence[Point], profile: Profile, *, memory: bool) -> list[float]:
        generated = self.costing.keeping.generated
        some = [point for point in points if not memory or self.costing.may_fit(point, profile)]
        if not some:
            return [math.inf] * len(points)
        if self._outlook is None:
            found = {point: self.costing.bound(point, profile) for point in some}
        else:
            pairs = zip(some, self._outlook.bounds(some, profile, memory=memory).tolist(), strict=True)
            found = {point: bound + self.costing.after_seconds(point, profile) for point, bound in pairs}
        self._work += (units.FAMILY if memory else units.PASSES) + self.costing.keeping.generated - generated
        return [found.get(point, math.inf) for point in points]

    def region_bound(self, region: Region) -> float:
        """What no point of ``region`` is below, by the profiles that are known; inf where none fits."""
        return self.region_bounds([region])[0]

    def region_bounds(self, regions_: Sequence[Region]) -> list[float]:
        """The same of each of ``regions_``, found at once for those with as many pipeline ranks and microbatches."""
        found = {region: self.at_first(region) for region in regions_}
        left = [region for region, bound in found.items() if not self.is_beaten(bound)]
        for some in together(left) if self._outlook is not None else ():
            assert self._outlook is not None
            views = [
                View(r, self._ways(r, saving=True), self.scaling.layers(r.key), self.profile(r), found[r]) for r in some
            ]
            bounds = self._outlook.region_bounds(views, list(self.families_of(some[0])), self._good)
            self._work += units.REGION * len(some)
            found |= zip(some, bounds.tolist(), strict=True)
        return [found[region] for region in regions_]

    def likely(self, region: Region, offload: tuple[str, ...] = ()) -> float:
        """Seconds of a likely step of ``region``, with this on the host; inf where none leaves room for activations."""
        issued = self._issued(region)
        if self._outlook is None:
            return issued
        times = self.scaling.likely(region.key)
        found = self._outlook.likely(region, self._likely_ways(region, offload), times, self.like(region.key))
        return max(found, issued)

    def all_likely(self, regions: Sequence[Region], offload: tuple[str, ...] = ()) -> list[float]:
        """The same of ``regions``, as if none like them was placed."""
        found = dict.fromkeys(regions, 0.0)
        for some in together(regions) if self._outlook is not None else ():
            assert self._outlook is not None
            times = [self.scaling.likely(region.key) for region in some]
            ways = [self._likely_ways(region, offload) for region in some]
            found |= zip(some, map(float, self._outlook.all_likely(some, ways, times)), strict=True)
        return [max(seconds, self._issued(region)) for region, seconds in found.items()]

    def _issued(self, region: Region) -> float:
        """Seconds that a host takes to issue a rank's passes, if they have as many calls as without axes."""
        return self.costing.passes_issued(region, self.root.issued_calls)

    def _likely_ways(self, region: Region, offload: tuple[str, ...]) -> list[Way]:
        ways = self._ways(region, saving=False)
        return [way._replace(offload=offload) for way in ways] if offload else ways

    def like(self, key: Key) -> Profile | None:
        """A profile with the axes of ``key``, of as many rows as any."""
        axes = key.ep, key.cp, key.tp, key.borrowed
        known = (p for k, p in self.profiler.known.items() if (k.ep, k.cp, k.tp, k.borrowed) == axes and k.copies)
        return max(known, key=lambda profile: profile.key.rows, default=None)

    def estimates(self, points: Sequence[Point], profile: Profile) -> list[float]:
        """Seconds of likely steps of ``points`` of one family, by passes or by their host; inf where they can't fit."""
        found = on_own(points, profile, self.profiler, self._estimates)
        better = (point for point, seconds in zip(points, found, strict=True) if seconds < self.best_seconds)
        further = any(splits_further(point.way, profile) for point in better)
        if further and self._place_streamed(points[0].region, profile):
            return on_own(points, profile, self.profiler, self._estimates)
        return found

    def _estimates(self, points: Sequence[Point], profile: Profile) -> list[float]:
        if self._outlook is None:
            return [self.costing.bound(point, profile) for point in points]
        costing, generated = self.costing, self.costing.keeping.generated
        found = self._outlook.estimates(points, profile)
        if found.min() < self.best_seconds:
            found = np.maximum(found, self._outlook.estimates(points, profile, kept=True))
        self._work += units.LIKELY + costing.keeping.generated - generated
        pairs = zip(points, found.tolist(), strict=True)
        return [costing.likely(s, p, profile) if costing.may_fit(p, profile) else math.inf for p, s in pairs]

    def _ways(self, region: Region, *, saving: bool) -> list[Way]:
        """To store weights, those that only save memory too if it is about ``saving``."""
        cluster = self.costing.cluster
        kinds = offloads(cluster, self.pins)[: None if saving else 1]
        return [Way(*storage, offload) for storage in storages(region, cluster, self.pins) for offload in kinds]

    def place_reference(self, region: Region, *, likely: bool = False) -> bool:
        """Make one of the profiles that bound ``region`` and others, or of those that say what these are ``likely`` to
        take, if there is one to make."""
        return self._make(self.references.wanted(region, likely=likely))

    def _make(self, reference: Reference | None) -> bool:
        """Whether there is one to make."""
        if reference is not None:
            self._work += units.OP * self.ops
            self.tell("place")
            self.profiler.of(*reference)
        return reference is not None

    def note(self, point: Point, estimate: float) -> None:
        """``point`` is likely to take as long as that."""
        known = self.promising.get(point.region)
        if known is None or estimate < known[0]:
            self.promising[point.region] = estimate, point

    def place(self, region: Region) -> Profile | None:
        """The region's own profile; None where it can't be placed.

        Where its state doesn't fit in any way, it is placed again so that parameters are split as far as that takes.
        """
        if self.profile(region) is None:
            self.tell("place")
            self._work += units.OP * self.ops
        found = self.profiler.of(self._keys.get(region, region.key), region.mesh, region.microbatches)
        if found is None or found.key.stages or self._may_fit(region, found):
            return found
        tight = region.key._replace(stages=region.mesh.pp)
        smaller = self.profiler.of(tight, region.mesh, region.microbatches)
        if smaller is not None:
            self._keys[region] = tight
        return smaller or found

    def _may_fit(self, region: Region, profile: Profile) -> bool:
        """Whether state does in any way to store it; where there is no schedule it doesn't matter."""
        family = next(self.families_of(region), None)  # all store alike
        return family is None or any(self.costing.may_fit(point, profile) for point in self.stored(family))

    def profile(self, region: Region) -> Profile | None:
        """The region's, where it is placed."""
        return self.profiler.placed(self._keys.get(region, region.key), region.mesh)

    def key_of(self, point: Point) -> Key:
        """Of the profile that ``point`` is laid out on: where its weights move with each microbatch and the fastest
        passes would leave some of them whole, of one that says what that costs."""
        key = self._keys.get(point.region, point.region.key)._replace(head=point.head, chunks=point.head_chunks)
        profile = self.profile(point.region)
        return key._replace(streamed=profile is not None and splits_further(point.way, profile))

    def share(self, region: Region) -> float:
        """Which part of the root's work a rank of ``region`` does of a microbatch."""
        return scaled(self.root.key, region.key) or 0.0

    @property
    def root(self) -> Profile:
        """The profile of the whole batch on one rank."""
        assert self.costing.root is not None
        return self.costing.root

    def by_scaling(self, region: Region, *, likely: bool = False) -> float:
        """What the profiles say that are known, if pipeline ranks shared it evenly: at least, or as is ``likely``."""
        return region.microbatches * self.scaling.seconds(region.key, likely=likely) / region.mesh.pp

    def at_first(self, region: Region) -> float:
        """That, or one microbatch through all layers and back, if that is longer."""
        found = self.by_scaling(region)
        if self._outlook is None:
            return found
        forward, inputs, *_ = self.scaling.layers(region.key)
        return max(found, float(self._outlook.scaler.layers.count * (forward + inputs)))

    def all_at_first(self, regions_: Sequence[Region]) -> Array:
        """:meth:`at_first` of all regions."""
        figures = self.scaling.all([region.key for region in regions_])
        cut = np.array([(region.microbatches, region.mesh.pp) for region in regions_], dtype=np.float64).reshape(-1, 2)
        found: Array = figures[:, -1] * cut[:, 0] / cut[:, 1]
        if self._outlook is not None:
            found = np.maximum(found, self._outlook.scaler.layers.count * (figures[:, 0] + figures[:, 1]))
        return found

    @property
    def references(self) -> References:
        """Of all regions."""
        assert self._references is not None
        return self._references

    @property
    def scaling(self) -> Scaling:
        """With all that is known."""
        assert self._scaling is not None
        if self._learned != len(self.profiler.known):
            self._learned = len(self.profiler.known)
            self._scaling.learn(self.references.known())
        return self._scaling

    # --- points

    def families_of(self, region: Region) -> Iterator[Family]:
        for schedule, chunks, vocabulary in schedules(region, self.sizes, self.pins, self.heads):
            yield Family(region, schedule, chunks, vocabulary)

    def stored(self, family: Family) -> Iterator[Point]:
        """Without what only saves memory: that is tried where it is needed."""
        cluster, region = self.costing.cluster, family.region
        offload, head_chunks = next(savers(family, cluster, self.pins))
        for zero, zero_ranks in storages(region, cluster, self.pins):
            yield Point(*family, zero, zero_ranks, offload, head_chunks)

    def saving(self, some: Savers) -> list[Point]:
        return some.all(self.costing.cluster, self.pins)

    def _plain(self, point: Point) -> Point:
        """Without what only saves memory."""
        offload, head_chunks = next(savers(point.family, self.costing.cluster, self.pins))
        return point._replace(offload=offload, head_chunks=head_chunks)

    def points_of(self, region: Region) -> Iterator[Point]:
        """All of :meth:`stored`."""
        return itertools.chain.from_iterable(map(self.stored, self.families_of(region)))

    def count(self, region: Region) -> int:
        """Its points, with those that only save memory."""
        cluster, mesh = self.costing.cluster, region.mesh
        families, ways = ("families", mesh.pp, region.microbatches), ("ways", mesh.zero_shards(0), mesh.tp)
        if families not in self._counted:
            saving = (savers(family, cluster, self.pins) for family in self.families_of(region))
            self._counted[families] = sum(sum(1 for _ in some) for some in saving)
        if ways not in self._counted:
            self._counted[ways] = sum(1 for _ in storages(region, cluster, self.pins))
        return self._counted[families] * self._counted[ways]

    def _try(self, bound: float, point: Point) -> None:
        """Lay it out, if what is known of it by itself leaves it the best."""
        if self._plain(point) in self._roomy:
            return  # to save memory is no use where there is enough
        profile = self.profile(point.region)
        assert profile is not None
        known = laid_on(point, profile, self.profiler)
        passes = max(bound, self.costing.bound(point, known))
        kept = passes if self.is_beaten(passes) else self.costing.memory_bound(point, known)
        if kept > passes:
            self._save(passes, [point])
        if max(passes, kept) > bound:
            self._push(max(passes, kept), point)
            return
        if self.outcomes and not self._can_better(bound):
            self._limit, self._spared = self._work, self._limit - self._work
            self._push(bound, point)
            return
        try:
            outcome = self.lay_out(point)
        except AutoparError as error:
            if isinstance(error, BudgetError):
                self._save(bound, [point])
                if error.needed_bytes <= self.costing.whole_budget_bytes + max(known.activations.working_bytes):
                    self._pass(bound, point)  # what its largest op needs was an estimate: that proves nothing
            return
        if outcome.is_tight:
            self._save(bound, [point])

    def _can_better(self, bound: float) -> bool:
        """Whether the work that is left would do for a better bound than this."""
        return work_beside(self._waiting, bound, self._length) <= self._limit - self._work

    def lay_out(self, point: Point) -> Outcome:
        """What a point takes, known once it was laid out. Raises AutoparError where it can't run or doesn't fit."""
        if point in self.refusals:
            raise self.refusals[point]
        known = next((outcome for outcome in self.outcomes if outcome.point == point), None)
        if known is not None:
            return known
        self.tell("lay out")
        self._work += units.work_of(point, self._length)
        key = self.profiler.key_for(self.key_of(point), point.region.mesh)
        profile = self.profiler.of(key, point.region.mesh, point.region.microbatches)
        try:
            if profile is None:
                raise self.profiler.refused[key]
            outcome = self.costing.laid_out(point, profile)
        except AutoparError as error:
            self.refusals[point] = error
            raise
        self._work -= 0.0 if outcome.recomputes else units.AT_ONCE * units.work_of(point, self._length)
        if not outcome.is_tight:
            self._roomy.add(point)
        self.outcomes.append(outcome)
        return outcome

    def _save(self, bound: float, points: Iterable[Point]) -> None:
        """Let wait what saves memory in other ways than ``points`` of one family, which only helps where memory was
        tight, and is no faster than they would be with enough."""
        new = tuple(point for point in points if point not in self._saved and point == self._plain(point))
        self._saved.update(new)
        for some in (Savers(new, away) for away in (False, True)):
            if new and self.saving(some):
                self._push(bound, some)

    def _open_savers(self, bound: float, some: Savers) -> None:
        profile, points = self.profile(some.region), self.saving(some)
        assert profile is not None
        for least, point in zip(self.bounds(points, profile), points, strict=True):
            self._push(max(bound, least), point)
