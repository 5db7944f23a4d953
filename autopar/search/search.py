"""One search: a good plan, what nothing is below, and what that says together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.search.costing import Costing
from autopar.search.dive import dive
from autopar.search.outcomes import Found, Outcome, rank
from autopar.search.pins import Pins
from autopar.search.possible import Possible
from autopar.search.profiles import Key, Profiler
from autopar.search.proof import Proof, Proven, Tried
from autopar.search.reckoning import Reckoning
from autopar.search.sharing import running
from autopar.search.space import Point, Region, regions, simplicity, undominated
from autopar.search.watching import Watcher

WORK = 2e5
"""Units (:mod:`autopar.search.work`) that parts of a search have shares of, together rarely more than two or three
times as many; its proof may take as many, twice as many where it is close by then, and what is left counts with
its bound."""

_WORTH = 5_000  # ops of all regions: of fewer, a proof is over before another process is there


@dataclass
class Search(Reckoning):
    """``watch`` is told of every step. There may be several ``processes``."""

    watch: Watcher | None = None
    processes: int = 1
    quick: bool = False  # without a proof, where anything fits
    most_work: float = WORK
    promising: dict[Region, tuple[float, Point]] = field(default_factory=dict, init=False)
    """By region that was placed, what looks best, with the seconds that it is likely to take."""
    regions: list[Region] = field(default_factory=list, init=False)
    points: int = field(default=0, init=False)
    bound_seconds: float = field(default=0.0, init=False)  # as far as a proof is; 0: it hasn't begun, or isn't here
    waiting: int = field(default=0, init=False)  # for it
    tried: list[Tried] = field(default_factory=list, init=False)
    """What was laid out elsewhere, without layouts."""
    _proven: Proven | None = field(default=None, init=False)

    @property
    def least_gpus(self) -> int:
        """On fewer, ranks can't hold the model in any way."""
        return self.costing.least_gpus(on_host=self.pins.masters_on_host)

    @property
    def work(self) -> float:
        """That it took so far, in units of :data:`WORK`."""
        return self._work

    def glance(self) -> list[Outcome]:
        """What looks best, the best first, without a proof; none where that doesn't fit."""
        self._begin()
        dive(self, self.regions)
        return self.ranked()

    def run(self, meanwhile: Callable[[], None] | None = None) -> Found:
        """Find a good plan, and what nothing is below, in another process if there is one: which may take longer, so do
        something ``meanwhile`` with what was found."""
        self._begin()
        if self.pins.gpus < self.least_gpus:
            return self.found()
        prove = partial(self._prove, self.profiler.aside(), None if self.is_shared else self._hear)
        with running(prove, elsewhere=self.is_shared) as proof:
            dive(self, self.regions)
            if self.quick and self.outcomes:
                return self.found()
            proof.tell(Tried.of(self))
            if self.outcomes and meanwhile is not None:
                meanwhile()
            self._proven = proof.result()
            self.tried.append(self._proven.tried)
        return self.found()

    def found(self) -> Found:
        """All so far."""
        outcomes, refusals = dict[Point, Outcome](), dict[Point, AutoparError]()
        for tried in (*self.tried, Tried(self.outcomes, self.refusals)):  # what has a layout counts
            outcomes |= {outcome.point: outcome for outcome in tried.outcomes}
            refusals |= tried.refusals
        ranked, laid_out = sorted(outcomes.values(), key=rank), len(outcomes) + len(refusals)
        least = min((outcome.step_seconds for outcome in ranked), default=math.inf)
        bound, work, placed = 0.0, self.work, set(self.placed)
        if self._proven is not None:
            bound, work = self._proven.bound_seconds, work + self._proven.work
            placed.update(self._proven.placed)
        return Found(ranked, min(bound, least), self.points, len(placed), laid_out, work, refusals)

    @property
    def is_shared(self) -> bool:
        """Whether there are several processes that it is long enough for."""
        return self.processes > 1 and self._is_long

    @property
    def _is_long(self) -> bool:
        return not self.quick and len(self.regions) * self.ops >= _WORTH

    def aside(self) -> Self:
        """Nobody is told of that one."""
        other = super().aside()
        other.watch, other.promising = None, dict(self.promising)
        other.reckon_with(self.regions)
        return other

    def own(self, outcome: Outcome) -> Outcome:
        """``outcome``, laid out by this search itself, if it was elsewhere."""
        if outcome.layout is None:
            self.place(outcome.point.region)
            return self.lay_out(outcome.point)
        return outcome

    def again(self, spared_bytes: int) -> Search:
        """The same search from the start, with ``spared_bytes`` of a rank's memory left for what no solver counts."""
        costing = Costing(self.costing.cluster, self.costing.options, spared_bytes)
        return replace(self, costing=costing, outcomes=[], refusals={})

    def possible(self, pins: Pins | None = None) -> Possible:
        """What can run as far as numbers tell, under what is pinned or under other ``pins``."""
        return Possible(self.sizes, pins or self.pins, self.heads)

    def under(self, pins: Pins) -> Search:
        """The same search from the start under other ``pins``; nobody is told of it."""
        profiler, costing = self.profiler.under(pins.options), self.costing.aside()
        if pins.options != costing.options:
            costing = costing.under(pins.options)
        return replace(self, pins=pins, profiler=profiler, costing=costing, outcomes=[], refusals={}, watch=None)

    def note(self, point: Point, estimate: float) -> None:
        """``point`` is likely to take as long as that."""
        known = self.promising.get(point.region)
        if known is None or estimate < known[0]:
            self.promising[point.region] = estimate, point

    def _begin(self) -> list[Region]:
        """All regions, of which nothing is placed."""
        self.costing.root = self.profiler.of(Key(self.sizes.batch, 1, 1, 1), Mesh(), 1)  # it bounds everything
        if self.costing.root is None:
            raise next(iter(self.profiler.refused.values()))
        self.costing.logits_seconds = self.profiler.logits_seconds()
        self.regions = sorted(regions(self.sizes, self.pins), key=simplicity)
        self.points = sum(map(self.count, self.regions))
        if any(region.mesh.cp > 1 for region in self.regions) and self.profiler.cuts_rows(self.sizes.batch):
            self.regions = undominated(self.regions)
        self.reckon_with(self.regions)
        return self.regions

    def _prove(
        self, profiler: Profiler, hear: Callable[[str, Proof], None] | None, known: Callable[[], Tried]
    ) -> Proven:
        return self._proof(profiler, hear).run(known)

    def _proof(self, profiler: Profiler, hear: Callable[[str, Proof], None] | None = None) -> Proof:
        """With what ``profiler`` knew when this search began."""
        given = self.pins, self.sizes, profiler, self.costing.aside(), self.heads, self.tolerance
        proof = Proof(
            *given,
            most_work=self.most_work,
            quick=self.quick,
            in_halves=self._is_long,
            elsewhere=self.is_shared,
            hear=hear,
        )
        proof.reckon_with(self.regions)
        return proof

    def _hear(self, phase: str, proof: Proof) -> None:
        """Tell how far a proof is."""
        self.bound_seconds, self.waiting = proof.bound_seconds, proof.waiting
        self.tell(phase)

    def tell(self, phase: str) -> None:
        if self.watch is not None:
            self.watch(phase, self)
