"""What nothing is below: what has the best bound is looked at next, until nothing left can be better.

A region is bounded by the profiles that are known, then by its own; so are its points, those of a family at once, which
store state and save memory in other ways alone; then each point, which is laid out. Everything is deterministic: equal
bounds go in the order of the space.

Where memory is what makes a point slow, all that may save some is bounded by how it is laid out with room for
everything: once for many points, whose copies to the host take long to lay out.

A proof goes its own way, so that it can run beside the search for a good plan: until that is over, it goes on to what a
plan may take (``aim``), and lays nothing out in the memory there is. If it is close to the best by the time that all
its work is done, more of that is likely to end it.

A long one ends in two halves, once a plan is known: each has the regions whose placements say the most of each other.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from autopar.errors import AutoparError, BudgetError
from autopar.schedules.registry import SCHEDULES
from autopar.search import work as units
from autopar.search.ahead import Ahead
from autopar.search.costing import laid_on, splits_further
from autopar.search.outcomes import Outcome
from autopar.search.profiles import Key, Profile
from autopar.search.reckoning import Reckoning
from autopar.search.sharing import both
from autopar.search.space import Family, Point, Region, Savers, savers
from autopar.search.waiting import Item, What, axes_of, near, region_of, work_beside

_AIM: Final = 1.04  # times what the best plan is likely to take
_CLOSE: Final = 0.05  # of it: by so much may bounds be below that are worth more work
_MORE: Final = 2  # times as much of that, then
_HOPELESS: Final = 2  # times all work: by then, something that fits isn't looked for any more
_LUCK: Final = 5e-3  # of it: by so much may an order that was made for less memory be shorter
_LIKELY: Final = 128  # regions that say so


class Tried(NamedTuple):
    """What was laid out: what that took, or why it can't run or doesn't fit."""

    outcomes: list[Outcome]
    refusals: dict[Point, AutoparError]

    @classmethod
    def of(cls, one: Reckoning, known: Tried | None = None) -> Tried:
        """What ``one`` laid out, but for what was ``known`` before, as others may be told: without layouts."""
        points = {outcome.point for outcome in known.outcomes} | set(known.refusals) if known is not None else set()
        outcomes = [replace(outcome, layout=None) for outcome in one.outcomes if outcome.point not in points]
        return cls(outcomes, {point: error for point, error in one.refusals.items() if point not in points})


class Proven(NamedTuple):
    """Nothing is below ``bound_seconds`` but what was ``tried`` or known before; what was ``placed`` for that, and how
    much ``work`` it was."""

    bound_seconds: float
    tried: Tried
    placed: list[Key]
    work: float

    def beside(self, other: Proven, before: float) -> Proven:
        """Both, of two halves of a proof that had done so much work ``before``."""
        (outcomes, refusals), (others, further) = self.tried, other.tried
        tried = Tried([*outcomes, *others], refusals | further)
        bound, work = min(self.bound_seconds, other.bound_seconds), self.work + other.work - before
        return Proven(bound, tried, [*self.placed, *other.placed], work)


@dataclass
class Proof(Reckoning):
    """It may take ``most_work``, some times that where nothing that fits is known. ``in_halves``: it is long enough for
    two, one of which may be ``elsewhere``."""

    most_work: float = math.inf
    quick: bool = False  # anything that fits will do
    in_halves: bool = False
    elsewhere: bool = False
    hear: Callable[[str, Proof], None] | None = None  # is told of every step
    aim: float = field(default=math.inf, init=False)
    _waiting: list[Item] = field(default_factory=list, init=False)
    _is_over: bool = field(default=False, init=False)  # there is no work left for what is next
    _saved: set[Point] = field(default_factory=set, init=False)  # what saves memory in other ways waits, too
    _roomy: dict[Point, float] = field(default_factory=dict, init=False)  # seconds, with all the memory that it takes
    _numbers: int = field(default=0, init=False)
    _passed: list[Item] = field(default_factory=list, init=False)  # what was left out
    _raised: int = field(default=0, init=False)  # bounds of regions, by so many profiles
    _regions: Sequence[Region] = field(default=(), init=False)
    _ahead: Ahead = field(init=False)

    def reckon_with(self, regions: Sequence[Region]) -> None:
        super().reckon_with(regions)
        self._regions, self._ahead = regions, Ahead.of(self, regions)

    def run(self, known: Callable[[], Tried]) -> Proven:
        """``known`` waits for what was found elsewhere."""
        bounds = self.all_at_first(self._regions)
        for bound, region in zip(bounds.tolist(), self._regions, strict=True):
            self._push(bound, region)
        if self._regions and not self.quick:
            some = [self._regions[place] for place in np.argsort(bounds, kind="stable")[:_LIKELY]]
            self.aim = _AIM * min(self.all_likely(some))
            self._raise()
        return self._finish(known())

    def _half(self) -> Proof:
        """Leave half of what waits to another, which has as much work left for it."""
        groups = defaultdict[object, list[Item]](list)
        for item in sorted((*self._waiting, *self._passed)):
            groups[self._group_of(item.what)].append(item)
        parts: tuple[list[Item], list[Item]] = [], []
        due = [0, 0]  # of each part, items that have to be looked at
        for items in groups.values():
            place = int(due[1] < due[0])
            parts[place].extend(items)
            due[place] += sum(not self.is_beaten(item.bound) for item in items)
        other = self.aside()
        other._saved, other._roomy, other._before = set(self._saved), dict(self._roomy), len(self.profiler.known)
        other.reckon_with(list(dict.fromkeys(region_of(item.what) for item in parts[1])))
        for proof, items in ((other, parts[1]), (self, parts[0])):
            regions = (item.what for item in items if isinstance(item.what, Region))
            proof._ahead = Ahead.of(proof, regions, self._ahead)
            proof._waiting = [item for item in items if not proof.is_beaten(item.bound)]
            proof._passed = [item for item in items if proof.is_beaten(item.bound)]
            heapq.heapify(proof._waiting)
        return other

    def _group_of(self, what: What) -> object:
        """Points that take as long with room for everything; or of what isn't bounded one by one yet, that with the
        same axes."""
        return self._plain(what) if isinstance(what, Point) else axes_of(what)

    def _raise(self) -> None:
        """Raise bounds up to the aim, for all the work that there is, or until something has to be laid out. Where
        nothing is likely to fit, there is no aim."""
        while self._waiting and self._work < self.most_work and not self._is_over and self.aim < math.inf:
            self._look_at_next()

    def _look_at_next(self) -> None:
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

    def _finish(self, known: Tried) -> Proven:
        """Go on with what is ``known``, instead of the aim."""
        self.aim, self._is_over = math.inf, False
        self.outcomes, self.refusals = list(known.outcomes), dict(known.refusals)
        passed, self._passed = self._passed, []
        for item in passed:
            self._push(item.bound, item.what)
        if not (self.in_halves and self.outcomes):
            return self._go_on(known)
        before, other = self._work, self._half()
        one, half = both(partial(self._go_on, known), partial(other._go_on, known), elsewhere=self.elsewhere)
        return one.beside(half, before)

    def _go_on(self, known: Tried) -> Proven:
        """Until it is over, or has had all the work that it may take."""
        self._look_at_all()
        if self._is_close():
            self.most_work, self._is_over = _MORE * self.most_work, False
            self._look_at_all()
        self._raise_regions()
        return Proven(self.bound_seconds, Tried.of(self, known), self.placed, self._work)

    def _look_at_all(self) -> None:
        while self._waiting and self._goes_on():
            self._look_at_next()

    def _is_close(self) -> bool:
        """Whether more work is likely to end it."""
        if self.quick or not self.outcomes or all(self.is_beaten(item.bound) for item in self._waiting):
            return False
        return self.bound_seconds >= (1 - _CLOSE) * self.best_seconds

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def _good(self) -> float:
        """What nothing has to be below."""
        return min(self.aim, super()._good)

    def _is_worse(self, bound: float) -> bool:
        """Whether it is beaten by what is known, and not just beyond the aim: then it needn't wait."""
        return bound >= super()._good

    def tell(self, phase: str) -> None:
        if self.hear is not None:
            self.hear(phase, self)

    def _learn(self) -> None:
        """What was placed since the last time raises the bounds of others."""
        if self._raised != len(self.profiler.known):
            self._raised = len(self.profiler.known)
            self._raise_regions()

    def _raise_regions(self) -> None:
        """The bounds of all regions that wait, by all that is known: at once."""
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

    def _goes_on(self) -> bool:
        if self._is_over or self._work >= self.most_work:
            return not (self.outcomes or self.quick) and self._work < _HOPELESS * self.most_work
        return not (self.quick and self.outcomes)

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

    def _open(self, bound: float, region: Region) -> None:
        """Place it, if its bound is still the best by then; then its families wait instead of it."""
        profile = self.profile(region)
        if profile is None and self.place_reference(region):  # which bounds many others, too
            self._push(max(bound, self.at_first(region)), region)
            return
        better = self._ahead.bound(region)
        if better > bound:
            self._push(better, region)
        elif profile is None:
            if self._make(self.references.closer(region)) or self.place(region) is not None:
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
            if least > fastest and not self._is_worse(max(bound, fastest)):
                saved[point] = fastest
        self._save(max(bound, min(saved.values(), default=bound)), saved)

    def _open_savers(self, bound: float, some: Savers) -> None:
        profile, points = self.profile(some.region), self.saving(some)
        assert profile is not None
        for least, point in zip(self.bounds(points, profile), points, strict=True):
            self._push(max(bound, least), point)

    def _try(self, bound: float, point: Point) -> None:
        """Lay it out, if what is known of it by itself leaves it the best."""
        if self.has_room(self._plain(point)):
            return
        if self._is_bettered(bound, point) or self._is_slow_with_room(bound, point):
            return
        if self.aim < math.inf or (self.outcomes and not self._can_better(bound)):
            self._is_over = True
            self._push(bound, point)
            return
        try:
            outcome = self.lay_out(point)
        except AutoparError as error:
            if isinstance(error, BudgetError):
                self._save(bound, [point])
                working = self._laid_on(point).activations.working_bytes
                if error.needed_bytes <= self.costing.whole_budget_bytes + max(working):
                    self._pass(bound, point)  # what its largest op needs was an estimate: that proves nothing
            return
        if outcome.is_tight:
            self._save(bound, [point])

    def _is_bettered(self, bound: float, point: Point) -> bool:
        """Whether it waits again with a better bound, by what is known of it by itself."""
        known = self._laid_on(point)
        passes = max(bound, self.costing.bound(point, known))
        kept = passes if self.is_beaten(passes) else self._memory_bound(point, known)
        if kept > passes:
            self._save(passes, [point])
        if max(passes, kept) > bound:
            self._push(max(passes, kept), point)
            return True
        return False

    def _memory_bound(self, point: Point, known: Profile) -> float:
        """By what it is laid out on, if that was placed meanwhile, as by that of its family."""
        kept, profile = self.costing.memory_bound(point, known), self.profile(point.region)
        assert profile is not None
        return max(kept, *self.bounds([point], profile)) if known.key.chunks > 1 else kept

    def _is_slow_with_room(self, bound: float, point: Point) -> bool:
        """Whether it waits again with a better bound: what it takes with all the memory that it lacks."""
        plain = self._plain(point)
        if plain not in self._saved or point.schedule not in SCHEDULES:  # an order is sought for the memory there is
            return False
        if plain not in self._roomy:
            self._roomy[plain] = (1 - _LUCK) * self.roomy_seconds(plain)
        if self._roomy[plain] <= bound:
            return False
        self._push(self._roomy[plain], point)
        return True

    def _laid_on(self, point: Point) -> Profile:
        """What says most of it by itself."""
        profile = self.profile(point.region)
        assert profile is not None
        return laid_on(point, profile, self.profiler)

    def _can_better(self, bound: float) -> bool:
        """Whether the work that is left would do for a better bound than this."""
        if self._has_work(bound):
            return True
        beside = near(self._waiting, bound)
        self._work += units.BETTERED * len(beside)
        self._waiting = [item for item in self._waiting if item.what not in beside]
        heapq.heapify(self._waiting)
        for point, least in beside.items():
            if not (self._is_bettered(least, point) or self._is_slow_with_room(least, point)):
                self._push(least, point)
        return self._has_work(bound)

    def _has_work(self, bound: float) -> bool:
        """For all points that are bounded by nearly as much as that."""
        return work_beside(self._waiting, bound, self._length) <= self.most_work - self._work

    def _save(self, bound: float, points: Iterable[Point]) -> None:
        """Let wait what saves memory in other ways than ``points`` of one family, which only helps where memory was
        tight, and is no faster than they would be with enough."""
        new = tuple(point for point in points if point not in self._saved and point == self._plain(point))
        self._saved.update(new)
        for some in (Savers(new, away) for away in (False, True)):
            if new and self.saving(some):
                self._push(bound, some)

    def _plain(self, point: Point) -> Point:
        """Without what only saves memory."""
        offload, head_chunks = next(savers(point.family, self.costing.cluster, self.pins))
        return point._replace(offload=offload, head_chunks=head_chunks)
