"""From pins to what is built: search, build the best for real, hold it to what its ranks really hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, AutoparError, BudgetError, StageError
from autopar.graph import Model
from autopar.passes.split_vocabulary import split_vocabulary
from autopar.passes.vocabulary import staged_calls
from autopar.plan import SearchPlan, bytes_text
from autopar.planner.block_costs import Machine
from autopar.planner.budget import Exact
from autopar.planner.build import Built, Request, build, finish
from autopar.planner.wanted import Wanted
from autopar.search.advice import no_degrees, nothing_runs
from autopar.search.costing import Costing
from autopar.search.fronts import compared, memory_front, runners_up, whole_fronts
from autopar.search.infeasible import Solved, refusal
from autopar.search.outcomes import Found, Outcome, parts_of
from autopar.search.pins import Pins
from autopar.search.profiles import Models, Profiler
from autopar.search.search import WORK, Search
from autopar.search.sharing import both, processes
from autopar.search.space import SPLIT_HEADS, Point, Region, Sizes, moves_each_time, regions, storages
from autopar.search.watching import Watcher

_ROUNDS = 3
_SLOWER = 0.05
"""By so much may what is built be slower than the best that was found, for what ranks hold beside what was counted:
more is worth another search."""
_BUILT = 3
"""So many of the best are built at most, where what ranks really hold makes the first worse than the second."""


def choose(
    models: Models,
    pins: Pins,
    cluster: Cluster,
    expert_load: Mapping[str, Sequence[float]],
    measured: Exact[Built] | None = None,
    watch: Watcher | None = None,
    *,
    fronts: bool = False,
    effort: float = 1.0,
) -> Built:
    """The best that ``pins`` leave, built; with ``fronts``, its plan says what less memory and other numbers of GPUs
    would bring. A search takes ``effort`` times the work that it usually may. Raises what is wrong with the pins, and
    where nothing fits what would."""
    search = searching(models, pins, cluster, expert_load, watch, effort=effort)
    if (only := _only(search)) is not None:
        built = _build(search, only, measured)
        return _with_fronts(search, built, only) if fronts else built
    built, outcome, search, found = _built(search, measured)
    outcome, found = _as_built(search, found, outcome, built)
    plan = built.plan.model_copy(update={"search": _search_plan(search, found, outcome, fronts=fronts)}).sealed()
    return replace(built, plan=plan)


def _built(search: Search, measured: Exact[Built] | None) -> tuple[Built, Outcome, Search, Found]:
    """The best that was built; searched again with as much memory less as was spared for what its ranks hold beside
    what was counted, where that made it slower, or where the best was still too large."""
    best: tuple[Built, Outcome, Search, Found] | None = None
    error: BudgetError | None = None
    proven = math.inf
    for _ in range(_ROUNDS):
        builder, searched = _Builder(search, measured), search
        found = search.run(meanwhile=builder.begin)
        proven = min(proven, found.bound_seconds)  # with all memory: what is spared is of one plan
        if not found.outcomes:
            break
        hoped = (found := builder.compared(found)).outcomes[0]
        try:
            built, outcome, found = _best(builder, found)
        except BudgetError as larger:
            error, spared = larger, _to_spare(search, larger)
        else:
            if best is None or built.plan.step_seconds < best[0].plan.step_seconds:
                best = built, outcome, search, found
            if built.plan.step_seconds <= hoped.step_seconds * (1 + _SLOWER):
                break
            refused = builder.refusal_of(hoped)
            spared = built.spared_bytes if refused is None else _to_spare(search, refused)
        if spared >= search.costing.whole_budget_bytes:
            break  # nothing would be left
        search = search.again(spared)
    if best is None:
        raise refusal(searched, found, partial(_solved, measured=measured), error)
    built, outcome, search, found = best
    return built, outcome, search, replace(found, bound_seconds=min(proven, built.plan.step_seconds))


def _solved(search: Search, measured: Exact[Built] | None) -> Solved:
    """The first of the best few that fits once it is built; searched again as :func:`_built` says where none does."""
    work = 0.0
    for _ in range(_ROUNDS):
        builder, larger = _Builder(search, measured), None
        try:
            found = search.run()
        except AutoparError:  # nothing can be placed under these pins
            break
        work += found.work
        for outcome in itertools.islice(_distinct(found.outcomes), _BUILT):
            try:
                built = builder.build(outcome)
            except AutoparError as error:  # what its ranks really hold doesn't fit, or can't be cut as was hoped
                larger = error if isinstance(error, BudgetError) else larger
            else:
                return Solved(_as_built(search, found, outcome, built)[0], work)
        if larger is None or (spared := _to_spare(search, larger)) >= search.costing.whole_budget_bytes:
            break
        search = search.again(spared)
    return Solved(None, work)


def _to_spare(search: Search, refusal: BudgetError) -> int:
    """Bytes, so that what was refused isn't found again: what its ranks hold beside what is counted, where that is
    known."""
    spared, whole = search.costing.spared_bytes, search.costing.whole_budget_bytes
    if refusal.uncounted_bytes > spared:
        return refusal.uncounted_bytes
    return spared + max(refusal.needed_bytes - whole, whole // 20)


def _as_built(search: Search, found: Found, outcome: Outcome, built: Built) -> tuple[Outcome, Found]:
    """``outcome``, here and in ``found``, as it is with what its ranks really hold: what others are compared with."""
    point, mesh = outcome.point, outcome.point.region.mesh
    profile, parts = search.profiler.placed(outcome.key or search.key_of(point), mesh), outcome.parts
    if profile is not None:
        machine = Machine.of(search.costing.cluster, profile.mesh(mesh), point.zero_ranks)
        parts = parts_of(built.pipeline, profile.costs_on(machine), built.model)
    seconds, peak = built.plan.step_seconds, max(built.plan.peak_bytes)
    chosen = replace(outcome, step_seconds=seconds, peak_bytes=peak, parts=parts)
    return chosen, replace(found, outcomes=[chosen if each.point == point else each for each in found.outcomes])


def searching(
    models: Models,
    pins: Pins,
    cluster: Cluster,
    expert_load: Mapping[str, Sequence[float]],
    watch: Watcher | None = None,
    *,
    effort: float = 1.0,
) -> Search:
    """A search that hasn't begun. Raises ArgumentError or ShardingError where ``pins`` leave nothing."""
    _check_budget(pins, cluster)
    _check_effort(effort)
    model = models[False]
    split = _split(model)
    sizes = Sizes.of(model, _units(model), _units(split) if split is not None else 0)
    profiler = Profiler(models, cluster, pins.options, expert_load)
    costing = Costing(cluster, pins.options)
    heads = () if split is None else SPLIT_HEADS
    return Search(pins, sizes, profiler, costing, heads, watch=watch, processes=processes(), most_work=effort * WORK)


def _check_budget(pins: Pins, cluster: Cluster) -> None:
    """Raises ArgumentError for more than the device has."""
    budget, has = pins.options.budget_bytes or 0, cluster.device.memory_bytes
    if budget > has:
        raise ArgumentError(
            f"budget_bytes={budget} is {bytes_text(budget)}, but a device of cluster {cluster.name!r} has "
            f"{bytes_text(has)}; use budget_bytes={has} or less, or leave it out"
        )


def _check_effort(effort: float) -> None:
    """Raises ArgumentError for what is no number of times."""
    is_number = isinstance(effort, int | float) and not isinstance(effort, bool)
    if not (is_number and 0 < effort < math.inf):
        raise ArgumentError(f"effort={effort!r}; it must be more than 0: with 10, a search may take ten times as long")


def _units(model: Model) -> int:
    """The calls that stages are cut between."""
    return len(staged_calls(model))


def _split(model: Model) -> Model | None:
    """With the head split over a pipeline; None where it can't be."""
    try:
        return split_vocabulary(model, 2, 1)
    except StageError:
        return None


def _only(search: Search) -> Point | None:
    """The one point that the pins leave; None where there are more. Raises where there is none."""
    found = regions(search.sizes, search.pins)
    if not found:
        if search.pins.mesh_is_whole:
            return _as_pinned(search, Region(search.pins.fixed_mesh, 0, _microbatches(search)))
        raise no_degrees(search)
    if not any(map(search.possible().runs, found)):
        return _as_pinned(search, _said_by(search, found))
    if len(found) > 1 or search.count(found[0]) != 1:
        return None
    return next(search.points_of(found[0]))


def _said_by(search: Search, found: Sequence[Region]) -> Region:
    """The region of ``found``, none of which has anything to search that can run, that can as it was pinned; or whose
    building says why it can't. Raises where other degrees might."""
    possible = search.possible()
    pinned = [possible.as_pinned(region) for region in found]
    if able := next(filter(possible.allows, pinned), None):
        return able.region
    if not search.pins.mesh_is_whole and any(map(possible.suits, pinned)):
        raise nothing_runs(search)
    return next((region for region in found if region.mesh.pp > 1), found[0])


def _as_pinned(search: Search, region: Region) -> Point:
    pins, options = search.pins, search.pins.options
    zero, zero_ranks = next(storages(region, search.costing.cluster, pins))
    return Point(*search.possible().as_pinned(region), zero, zero_ranks, options.offload, options.head_chunks)


def _microbatches(search: Search) -> int:
    """Those that were pinned. Raises ArgumentError for a microbatch that doesn't divide what a rank gets."""
    pins, batch, replicas = search.pins, search.sizes.batch, search.pins.fixed_mesh.replicas
    if pins.microbatch is None or batch % replicas:
        return pins.microbatches or 1
    rows = batch // replicas
    if rows % pins.microbatch:
        fits = [size for size in range(1, rows + 1) if rows % size == 0]
        raise ArgumentError(
            f"microbatch={pins.microbatch} rows, but each of dp {replicas} ranks gets {rows} of a batch of {batch}; "
            f"microbatch may be one of {fits}"
        )
    raise ArgumentError(
        f"microbatch={pins.microbatch} makes {rows // pins.microbatch} microbatches, not microbatches="
        f"{pins.microbatches}; leave one of the two out"
    )


def _build(search: Search, point: Point, measured: Exact[Built] | None, outcome: Outcome | None = None) -> Built:
    """``outcome`` is how the search laid it out."""
    region, profiler = point.region, search.profiler
    options = search.costing.options_of(point)
    wanted = Wanted(point.schedule, point.vocabulary, point.chunks)
    layout = outcome.layout if outcome is not None else None
    key = outcome.key if outcome is not None and outcome.key is not None else search.key_of(point)
    profile = profiler.placed(key, region.mesh)
    state = profile.placed.request.state_bytes if profile is not None else None
    load = dict(profiler.expert_load)
    streamed = key.streamed or (profile is None and moves_each_time(point.way))
    request = Request(region.mesh, region.microbatches, profiler.cluster, wanted, options, load, state, streamed)
    if profile is None or layout is None:
        return build(profiler.models[region.mesh.cp > 1].copy(), request, None, measured)
    machine = Machine.of(profiler.cluster, profile.mesh(region.mesh), point.zero_ranks)
    placed = replace(profile.placed, request=replace(request, mesh=machine.mesh))
    known = {search.costing.spared_bytes: layout}
    timelines = search.costing.timelines
    return finish(placed, profile.costs_on(machine), profile.activations, None, measured, known, timelines)


@dataclass
class _Builder:
    """Builds what a ``search`` found, each once."""

    search: Search
    measured: Exact[Built] | None
    _known: dict[Point, Built | AutoparError] = field(default_factory=dict)

    def begin(self) -> None:
        """With the best that the search itself laid out so far; and see what that is compared with."""
        search = self.search

        def build_best() -> None:
            with suppress(AutoparError):
                self.build(search.ranked()[0])

        _, others = both(build_best, partial(compared, search), elsewhere=search.is_shared)
        search.tried.append(others)

    def compared(self, found: Found) -> Found:
        """``found`` with what that is compared with."""
        if not self._known:  # it was nothing that the search itself laid out
            self.search.own(found.outcomes[0])
            self.begin()
        return self.search.found()

    def build(self, outcome: Outcome) -> Built:
        """Raises AutoparError where it doesn't fit."""
        point = outcome.point
        if point not in self._known:
            self.search.tell("build")
            try:
                self._known[point] = _build(self.search, point, self.measured, self.search.own(outcome))
            except AutoparError as error:
                self._known[point] = error
        known = self._known[point]
        if isinstance(known, AutoparError):
            raise known
        return known

    def refusal_of(self, outcome: Outcome) -> BudgetError | None:
        """Why it wasn't built, if its ranks hold too much."""
        known = self._known.get(outcome.point)
        return known if isinstance(known, BudgetError) else None


def _best(builder: _Builder, found: Found) -> tuple[Built, Outcome, Found]:
    """The shortest of those that were built, each of which could have been the shortest by what was known before; and
    what was ``found`` without those that turned out not to fit."""
    best: tuple[Built, Outcome] | None = None
    last: AutoparError | None = None
    refused, count = set[tuple[object, ...]](), 0
    for outcome in _distinct(found.outcomes):
        seconds = best[0].plan.step_seconds if best else math.inf
        if outcome.step_seconds >= seconds * (1 - builder.search.tolerance) or count == _BUILT:
            break
        try:
            built = builder.build(outcome)
        except AutoparError as error:  # what its ranks really hold doesn't fit
            last = error
            refused.add(_alike(outcome))
            continue
        count += 1
        if built.plan.step_seconds < seconds:
            best = built, outcome
    if best is None:
        assert last is not None
        raise last
    return *best, replace(found, outcomes=[each for each in found.outcomes if _alike(each) not in refused])


def _alike(outcome: Outcome) -> tuple[object, ...]:
    """What outcomes have in common that are one again: what may be on the host doesn't have to be."""
    point = outcome.point
    return point.family, point.zero, point.zero_ranks, point.head_chunks, outcome.step_seconds


def _distinct(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    """Without those that are another one again."""
    seen: set[tuple[object, ...]] = set()
    for outcome in outcomes:
        if _alike(outcome) not in seen:
            seen.add(_alike(outcome))
            yield outcome


def _with_fronts(search: Search, built: Built, only: Point) -> Built:
    """Of a job that was pinned as a whole."""
    plan = built.plan
    outcome = Outcome(only, plan.step_seconds, max(rank.peak_bytes for rank in plan.rank_plans), recomputes=False)
    found = Found([outcome], plan.cost.bound_seconds, 1, 0, 1, 0.0, {})
    return replace(
        built, plan=plan.model_copy(update={"search": _search_plan(search, found, outcome, fronts=True)}).sealed()
    )


def _search_plan(search: Search, found: Found, chosen: Outcome, *, fronts: bool) -> SearchPlan:
    memory, gpus = whole_fronts(search, found, chosen) if fronts else (memory_front(search, found.outcomes), [])
    return SearchPlan(
        free=search.pins.free,
        points=found.points,
        placed=found.placed,
        laid_out=found.laid_out,
        bound_seconds=found.bound_seconds,
        runners_up=runners_up(search, found, chosen),
        memory_front=memory,
        gpus_front=gpus,
    )
