"""What a search says of the points that weren't chosen: the next best, and what other memory or GPUs would bring.

A proof needs few points laid out. So that there is something to compare with, what looks best of other kinds is laid
out beside it (:func:`compared`); and where a user asks for whole fronts, the points that look best with less memory
and on other numbers of GPUs (:func:`whole_fronts`) are laid out, without a proof.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.plan import PointPlan, bytes_text, change_text
from autopar.planner.modes import MODES
from autopar.search.outcomes import Found, Outcome
from autopar.search.pins import Pins
from autopar.search.proof import Tried
from autopar.search.sharing import both
from autopar.search.space import Point, Region, promise, stages_of
from autopar.search.work import work_of

if TYPE_CHECKING:
    from autopar.search.search import Search

_RUNNERS_UP = 5
_NEAR = 1.1  # times the best step
_SAME_DEGREES = 2  # of them
_FURTHER = 6  # points that are laid out for them at most
_LOOKS = 500  # of those that are looked at
_OTHERS = 60  # families whose points are bounded for them alone
_MESHES = 60  # of which those are placed that look best
_WORK = 3.5e4  # of one: about two thirds of a second
_ALL_WORK = 6e4  # of all
_PLACING = 2e4  # of placing regions for them
_GPUS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(3, 2), Fraction(2), Fraction(4))
_MEMORY = 3 / 4  # of the peak of the plan before
_MEMORIES = 4
_SEEN = 5e-4  # of the step: a part that differs by less says nothing


def point_plan(search: Search, outcome: Outcome, why: str = "") -> PointPlan:
    point, region = outcome.point, outcome.point.region
    return PointPlan(
        gpus=region.mesh.world,
        mesh_sizes=region.mesh.to_json(),
        microbatches=region.microbatches,
        schedule=point.schedule,
        chunks=point.chunks or 1,
        vocabulary=point.vocabulary,
        options=search.costing.options_of(point),
        step_seconds=outcome.step_seconds,
        peak_bytes=outcome.peak_bytes,
        why=why,
    )


def compared(search: Search) -> Tried:
    """Points that may be among the runners-up of the best of ``search``, laid out where it takes few to tell."""
    known, other = Tried.of(search), search.aside()
    _compare(other)
    return Tried.of(other, known)


def _compare(search: Search) -> None:
    best, *_ = ranked = search.ranked()
    rows, tries = _next(best, ranked), 0
    _place_next(search)
    limit = search.work + _ALL_WORK
    for seconds, point in itertools.islice(_candidates(search), _LOOKS):
        if tries == _FURTHER or search.work > limit or (len(rows) == _RUNNERS_UP and seconds >= rows[-1].step_seconds):
            break
        if work_of(point) > _WORK or not _adds(point, best, rows) or not _may_fit(search, point):
            continue
        tries += 1
        with suppress(AutoparError):
            search.lay_out(point)
            best, *_ = ranked = search.ranked()
            rows = _next(best, ranked)


def _place_next(search: Search) -> None:
    """Place regions, of each mesh the one of the best bound, those first that are likely the fastest, unless enough is
    known that is nearly as good as the best: what looks best of them may be among the next."""
    limit, first = search.work + _PLACING, dict[Mesh, Region]()
    for region in unplaced(search):
        first.setdefault(region.mesh, region)
    some = list(itertools.islice(first.values(), _MESHES))
    for _, number in sorted(zip(search.all_likely(some, ()), range(len(some)), strict=True)):
        region, enough = some[number], _NEAR * search.best_seconds
        near = {known.mesh for known, (estimate, _) in search.promising.items() if estimate < enough}
        if search.work >= limit or len(near) > _RUNNERS_UP:
            return
        profile = search.place(region)
        for family in search.families_of(region) if profile is not None else ():
            assert profile is not None
            points = [point for point in search.stored(family) if work_of(point) <= _WORK]
            for point, estimate in zip(points, search.estimates(points, profile), strict=True):
                if not math.isinf(estimate):
                    search.note(point, estimate * promise(point))


def _candidates(search: Search) -> Iterator[tuple[float, Point]]:
    """What looks best of each region that was placed, with what it is likely to take; then, where there is nothing
    better, what else isn't laid out, by bounds."""
    known = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    promising = (pair for pair in search.promising.values() if pair[1] not in known)
    yield from sorted(promising, key=itemgetter(0))
    yield from ((math.inf, point) for point in others(search) if point not in known)


def others(search: Search) -> Iterator[Point]:
    """Points of the regions that were placed (of the first of those), the best bound first."""
    heap: list[tuple[float, int, Region | Point]] = [
        (bound, number, region)
        for number, (bound, region) in enumerate(_by_bound(search))
        if search.profile(region) is not None
    ]  # sorted, so it is one
    numbers, opened = itertools.count(len(search.regions)), 0
    while heap:
        bound, _, what = heapq.heappop(heap)
        if isinstance(what, Point):
            yield what
            continue
        if opened > _OTHERS:
            continue
        profile = search.profile(what)
        assert profile is not None
        for family in search.families_of(what):
            opened += 1
            points = [point for point in search.stored(family) if _is_placed(search, point)]
            for point, least in zip(points, search.bounds(points, profile), strict=True):
                if not math.isinf(least):
                    heapq.heappush(heap, (max(bound, least), next(numbers), point))


def _is_placed(search: Search, point: Point) -> bool:
    return search.key_of(point)._replace(streamed=False) in search.profiler.known


def _by_bound(search: Search) -> list[tuple[float, Region]]:
    """All regions with what is known of them all, the least first."""
    bounds = search.all_at_first(search.regions)
    return [(float(bounds[place]), search.regions[place]) for place in np.argsort(bounds, kind="stable")]


def unplaced(search: Search) -> list[Region]:
    """Regions that aren't placed, the best bound first."""
    return [region for _, region in _by_bound(search) if search.profile(region) is None]


def _may_fit(search: Search, point: Point) -> bool:
    """As far as that can be told without laying it out."""
    profile = search.profile(point.region)
    assert profile is not None
    (estimate,) = search.estimates([point], profile)
    return not (math.isinf(estimate) or math.isinf(search.costing.memory_bound(point, profile)))


def runners_up(search: Search, found: Found, chosen: Outcome) -> list[PointPlan]:
    """The next best: of each other degrees the best, and what else these degrees could do."""
    return [point_plan(search, outcome, why(chosen, outcome)) for outcome in _next(chosen, found.outcomes)]


def _next(chosen: Outcome, ranked: Iterable[Outcome]) -> list[Outcome]:
    rows: list[Outcome] = []
    for outcome in ranked:
        if len(rows) < _RUNNERS_UP and _adds(outcome.point, chosen, rows):
            rows.append(outcome)
    return rows


def _adds(point: Point, chosen: Outcome, rows: Sequence[Outcome]) -> bool:
    """Whether a point is of another kind than ``rows``."""
    mesh, own = point.region.mesh, chosen.point
    if mesh != own.region.mesh:
        return all(row.point.region.mesh != mesh for row in rows)
    same = [own, *(row.point for row in rows if row.point.region.mesh == mesh)]
    return len(same) <= _SAME_DEGREES and all(_kind(other) != _kind(point) for other in same)


def _kind(point: Point) -> tuple[object, ...]:
    """Without a pipeline, schedules do much the same."""
    return point.region, point.schedule if point.region.mesh.pp > 1 else "", point.vocabulary


def why(chosen: Outcome, other: Outcome) -> str:
    """What makes ``other`` worse, in a few words: where its step is longer, and what makes up for the most of that."""
    more = other.step_seconds / chosen.step_seconds - 1
    if more <= -_SEEN:  # by less than what is good enough, or it would have been built
        return f"step {change_text(more)} as it was laid out; building it adds what its ranks really hold"
    names = dict.fromkeys((*chosen.parts, *other.parts))
    changes = {name: other.parts.get(name, 0.0) - chosen.parts.get(name, 0.0) for name in names}
    parts = sorted(((s / chosen.step_seconds, name) for name, s in changes.items()), key=lambda p: (-p[0], p[1]))
    texts = [f"{name} {change_text(share)}" for share, name in parts if share >= _SEEN][:2]
    share, name = parts[-1] if parts else (0.0, "")
    if -share >= max(_SEEN, more):
        texts.append(f"but {name} {change_text(share)}")
    nothing = "no part alone" if change_text(more) != change_text(0.0) else "what is simpler is taken"
    return f"step {change_text(more)}: {', '.join(texts) or nothing}"


def whole_fronts(search: Search, found: Found, chosen: Outcome) -> tuple[list[PointPlan], list[PointPlan]]:
    """What less and less memory costs, and what other numbers of GPUs bring, by searches for either: those for the
    latter in another process if there may be one, which nobody is told of then."""
    other = replace(search, watch=None) if search.is_shared else search

    def less_memory() -> list[PointPlan]:
        return memory_front(search, [*found.outcomes, *_leaner(search, found.outcomes[0])])

    return both(less_memory, partial(gpus_front, other, chosen), elsewhere=search.is_shared)


def memory_front(search: Search, outcomes: Iterable[Outcome]) -> list[PointPlan]:
    """Of what was laid out, what nothing beats in both time and memory, by rising time."""
    front: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda o: o.step_seconds):
        if not front or outcome.peak_bytes < front[-1].peak_bytes:
            front.append(outcome)
    return [point_plan(search, outcome) for outcome in front]


def _leaner(search: Search, best: Outcome) -> Iterator[Outcome]:
    """The best under budgets that fall, until nothing fits."""
    outcome: Outcome | None = best
    for _ in range(_MEMORIES):
        assert outcome is not None
        budget = int(_MEMORY * outcome.peak_bytes)
        pins = search.pins
        options = pins.options.model_copy(update={"budget_bytes": budget + search.costing.spared_bytes})
        outcome = _again(search, replace(pins, options=options), f"search within {bytes_text(budget)}")
        if outcome is None:
            return
        yield outcome


def gpus_front(search: Search, chosen: Outcome) -> list[PointPlan]:
    """The fastest for other numbers of GPUs, by rising numbers: those that the batch can use and in which it fits.

    Of degrees that were pinned as a whole, ``dp`` changes with the GPUs.
    """
    here, rows = search.pins.gpus, [(search.pins.gpus, chosen)]
    for times in _GPUS:
        gpus = here * times
        pins = _on(search.pins, int(gpus)) if gpus.denominator == 1 else None
        outcome = _again(search, pins, f"search on {gpus} GPUs") if pins is not None else None
        if outcome is not None:
            rows.append((int(gpus), outcome))
    return [point_plan(search, outcome, _gained(here, chosen, gpus, outcome)) for gpus, outcome in sorted(rows)]


def _on(pins: Pins, gpus: int) -> Pins | None:
    mesh = {axis: size for axis, size in pins.mesh.items() if axis != "dp"} if pins.mesh_is_whole else pins.mesh
    found = replace(pins, gpus=gpus, mesh=mesh)
    return None if gpus % found.least_gpus else found


def _gained(here: int, chosen: Outcome, gpus: int, other: Outcome) -> str:
    """What so many GPUs do for the step: ``2x the GPUs, 1.92x as fast``."""
    if gpus == here:
        return ""
    return f"{gpus / here:.3g}x the GPUs, {chosen.step_seconds / other.step_seconds:.2f}x as fast"


def _again(search: Search, pins: Pins, phase: str) -> Outcome | None:
    """What looks best under other ``pins``, which may differ in GPUs and memory; None where nothing does."""
    search.tell(phase)
    try:
        return next(iter(search.under(pins).glance()), None)
    except AutoparError:
        return None


def differs(point: Point) -> str:
    """A point as a user would say it: ``pp 2 x dp 4 x tp 8, 16 microbatches, zb-v, ZeRO 1``."""
    count = point.region.microbatches
    parts = [str(point.region.mesh), f"{count} microbatch{'' if count == 1 else 'es'} of {point.region.rows}"]
    if stages_of(point) > 1:
        parts.append(point.schedule + (f" with {point.chunks} chunks" if point.chunks else ""))
        if MODES[point.vocabulary].head:
            parts.append(f"vocabulary split ({point.vocabulary})")
    if point.zero:
        parts.append(f"ZeRO {point.zero}" + (f" over {point.zero_ranks}" if point.zero_ranks else ""))
    if point.offload:
        parts.append(f"{' and '.join(point.offload)} on the host")
    if point.head_chunks > 1:
        parts.append(f"logits in {point.head_chunks} chunks")
    return ", ".join(parts)
