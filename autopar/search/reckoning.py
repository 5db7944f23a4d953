"""What a search reckons with: profiles, and what they say of regions and points, proven or likely.

Bounds are of whole regions by all profiles that are known, of a region by its own, and of points, those of a family at
once. Of a point, there is no more to know than what laying it out says.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Self

import numpy as np

from autopar.errors import AutoparError
from autopar.search import work as units
from autopar.search.bounds import scaled
from autopar.search.costing import Costing, on_own, splits_further
from autopar.search.hulls import Array
from autopar.search.outcomes import Outcome, rank
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
    savers,
    schedules,
    storages,
    together,
)

TOLERANCE = 0.01
"""A plan that is proven to be within this share of the best is good enough."""


@dataclass
class Reckoning:
    """Of the space that ``pins`` leave. What was laid out so far are ``outcomes``, of which the best has to be beaten
    by ``tolerance`` to count."""

    pins: Pins
    sizes: Sizes
    profiler: Profiler
    costing: Costing
    heads: tuple[str, ...]
    tolerance: float = TOLERANCE
    outcomes: list[Outcome] = field(default_factory=list)
    refusals: dict[Point, AutoparError] = field(default_factory=dict)
    _work: float = field(default=0.0, init=False)
    _keys: dict[Region, Key] = field(default_factory=dict, init=False)  # of regions that are placed in a tight budget
    _references: References | None = field(default=None, init=False)
    _counted: dict[object, int] = field(default_factory=dict, init=False)
    _scaling: Scaling | None = field(default=None, init=False)
    _learned: int = field(default=0, init=False)  # from so many profiles
    _outlook: Outlook | None = field(default=None, init=False)  # None: there are no layers
    _before: int = field(init=False)  # profiles that others made

    def __post_init__(self) -> None:
        self._before = len(self.profiler.known)

    def reckon_with(self, regions: Sequence[Region]) -> None:
        """They are the space. The root is placed."""
        keys = Counter(region.key for region in regions)
        self._references = References.of(self.profiler, self.sizes.batch, keys)
        self._scaling, self._learned = Scaling(keys, self.root), 0
        self._outlook = Outlook.of(self.costing, self.root)

    def aside(self) -> Self:
        """This one as it is now, to go on with beside it: neither learns anything of the other. What that one reckons
        with has to be said again."""
        other = copy(self)
        other.profiler, other.costing = self.profiler.aside(), self.costing.aside()
        other.outcomes, other.refusals, other._keys = list(self.outcomes), dict(self.refusals), dict(self._keys)
        return other

    @property
    def placed(self) -> list[Key]:
        """What was, since this began."""
        return list(self.profiler.known)[self._before :]

    @property
    def laid_out(self) -> int:
        return len(self.outcomes) + len(self.refusals)

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
    def _good(self) -> float:
        """What nothing has to be below."""
        return self.best_seconds * (1 - self.tolerance)

    def is_beaten(self, bound: float) -> bool:
        """Whether nothing that isn't below ``bound`` is better than the best by as much as counts."""
        return bound >= self._good

    @property
    def root(self) -> Profile:
        """The profile of the whole batch on one rank."""
        assert self.costing.root is not None
        return self.costing.root

    def tell(self, phase: str) -> None:
        """What is done next."""

    @property
    def scaling(self) -> Scaling:
        """With all that is known."""
        assert self._scaling is not None
        if self._learned != len(self.profiler.known):
            self._learned = len(self.profiler.known)
            self._scaling.learn(self.references.known())
        return self._scaling

    @property
    def references(self) -> References:
        """Of all regions."""
        assert self._references is not None
        return self._references

    def _place_streamed(self, region: Region, profile: Profile) -> bool:
        """What those points of ``region`` are laid out on that split weights further than its ``profile``; whether it
        wasn't tried before."""
        own = profile.key._replace(streamed=True)
        return not self.profiler.was_tried(own, region.mesh) and self._make((own, region.mesh, region.microbatches))

    def bounds(self, points: Sequence[Point], profile: Profile, *, memory: bool = True) -> list[float]:
        """What each of ``points`` of one family is not below, found for all at once; inf where they can't fit."""
        return on_own(points, profile, self.profiler, partial(self._bounds, memory=memory))

    def _bounds(self, points: Sequence[Point], profile: Profile, *, memory: bool) -> list[float]:
        read = self.costing.keeping.read
        some = [point for point in points if not memory or self.costing.may_fit(point, profile)]
        if not some:
            return [math.inf] * len(points)
        if self._outlook is None:
            found = {point: self.costing.bound(point, profile) for point in some}
        else:
            costing, passes = self.costing, self._outlook.bounds(some, profile, memory=memory).tolist()
            found = {
                point: max(seconds + costing.after_seconds(point, profile), costing.least_issued(point, profile))
                for point, seconds in zip(some, passes, strict=True)
            }
        self._work += (units.FAMILY if memory else units.PASSES) + self.costing.keeping.read - read
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
        costing, read = self.costing, self.costing.keeping.read
        found = self._outlook.estimates(points, profile)
        if found.min() < self.best_seconds:
            found = np.maximum(found, self._outlook.estimates(points, profile, kept=True))
        self._work += units.LIKELY + costing.keeping.read - read
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
        references = self.references
        return self._make(references.likely(region) if likely else references.wanted(region))

    def _make(self, reference: Reference | None) -> bool:
        """Whether there is one to make."""
        if reference is not None:
            self._work += units.OP * self.ops
            self.tell("place")
            self.profiler.of(*reference)
        return reference is not None

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

    def lay_out(self, point: Point) -> Outcome:
        """What a point takes, known once it was laid out. Raises AutoparError where it can't run or doesn't fit."""
        if point in self.refusals:
            raise self.refusals[point]
        known = next((outcome for outcome in self.outcomes if outcome.point == point), None)
        if known is not None:
            return known
        self.tell("lay out")
        self._work += units.work_of(point, self._length)
        try:
            outcome = self.costing.laid_out(point, self._own_profile(point))
        except AutoparError as error:
            self.refusals[point] = error
            raise
        self._work -= 0.0 if outcome.recomputes else units.AT_ONCE * units.work_of(point, self._length)
        self.outcomes.append(outcome)
        return outcome

    def roomy_seconds(self, point: Point) -> float:
        """What ``point`` would take if ranks had all the memory that it takes; 0 where it can't run."""
        self._work += units.work_of(point, self._length)
        try:
            return self.costing.roomy_seconds(point, self._own_profile(point))
        except AutoparError:
            return 0.0

    def _own_profile(self, point: Point) -> Profile:
        """What ``point`` is laid out on. Raises AutoparError where that can't be placed."""
        key = self.profiler.key_for(self.key_of(point), point.region.mesh)
        profile = self.profiler.of(key, point.region.mesh, point.region.microbatches)
        if profile is None:
            raise self.profiler.refused[key]
        return profile

    def has_room(self, point: Point) -> bool:
        """Whether it was laid out, and fits as it is: to save memory is no use then."""
        return any(outcome.point == point and not outcome.is_tight for outcome in self.outcomes)

    def ranked(self) -> list[Outcome]:
        """All outcomes, the best first."""
        return sorted(self.outcomes, key=rank)
