"""The pipeline of a plan: which calls make up a stage, in which order ranks run them, and how long that takes.

The cut needs to know how many microbatches the schedule keeps, cost-aware schedules need the costs of the cut: so a
schedule is generated twice, first with equal passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import sub

from autopar.errors import ArgumentError, BudgetError, PlanError, ScheduleError, StageError
from autopar.graph import Model
from autopar.options import Options, activations_on_host
from autopar.passes.vocabulary import staged_calls
from autopar.planner import away_parts
from autopar.planner.activations import Activations, Alternative
from autopar.planner.alike import Alike
from autopar.planner.away_parts import Tried
from autopar.planner.between import BetweenCalls
from autopar.planner.block_costs import BlockCost, Machine
from autopar.planner.contention import Slowed
from autopar.planner.fitting import Demand, Fit, Layout, Pins, fit, pinned, spending_slack
from autopar.planner.gradients import Accumulation
from autopar.planner.host import Waited
from autopar.planner.makespan_bounds import order_bound
from autopar.planner.modes import mode_of
from autopar.planner.offload import host_peak_bytes, offloaded, or_host
from autopar.planner.pass_costs import Casts, Priced, Work, priced
from autopar.planner.pass_memory import PassMemory, largest
from autopar.planner.rank_memory import State, Storage, rank_state, vocabulary_state
from autopar.planner.stages import Partition, Unit, check_count
from autopar.planner.synthesis import synthesize
from autopar.planner.units import units_of
from autopar.planner.vocabulary_costs import VocabularyCost, vocabulary_cost
from autopar.planner.wanted import SYNTHESIZED, Wanted, schedule_name
from autopar.planner.zero import weight_moves
from autopar.schedules import Costs, Schedule, Timeline, Timelines, generate, simulate_timeline
from autopar.schedules.early_weights import with_early_weights
from autopar.schedules.flow import COMPUTE
from autopar.schedules.kept import embedded_ahead, kept_stages
from autopar.schedules.offloads import Away, offload_activations
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.registry import SCHEDULES
from autopar.schedules.turns import Turns, turns_of

_ScheduleFor = Callable[[Costs, list[int]], Schedule]
"""From the costs of a cut and the bytes that each rank has left for activations to compute actions."""


@dataclass(frozen=True)
class Pipeline:
    """``stages`` are the calls of each stage; ``inflight[k]`` how many microbatches of stage k its rank keeps when it
    keeps the most. ``bound_seconds`` is a proven bound on the slowest rank's passes of one microbatch. ``layout`` is
    how it fits, ``accumulations`` what stages' backwards take to add up gradients, ``slowed`` what collectives beside
    stages' passes add to them, ``casts`` what copies of masters in another dtype take, ``waiting`` what of stages'
    passes is waiting for the host, ``transient_bytes`` what each pipeline rank holds at most beside what it keeps,
    ``summing_bytes`` gradients on their way once it keeps nothing, ``free_bytes`` what it had left for activations."""

    stages: tuple[tuple[int, ...], ...]
    schedule: Schedule
    timeline: Timeline
    inflight: tuple[int, ...]
    bound_seconds: float
    vocabulary: VocabularyCost | None
    activations: Activations
    layout: Layout
    accumulations: tuple[Accumulation, ...]
    slowed: tuple[Slowed, ...]
    casts: Casts
    waiting: tuple[Waited, ...]
    transient_bytes: tuple[int, ...]
    summing_bytes: tuple[int, ...]
    free_bytes: tuple[int, ...]

    @property
    def chosen(self) -> Mapping[int, Alternative]:
        """What each call recomputes."""
        return self.layout.fit.chosen

    @cached_property
    def order_seconds(self) -> float:
        """A proven bound on the step of these stages, whatever the order of their passes (0: none was looked for)."""
        return order_bound(self.schedule, self.timeline.costs)

    def saved_bytes(self, stage: int) -> int:
        """What the stage keeps of a microbatch from its forward to its backward."""
        return self.activations.stage_bytes(self.stages[stage], self.chosen)

    def host_bytes(self, rank: int) -> int:
        """The most bytes of activations that a pipeline rank has on the host."""
        return host_peak_bytes(self.timeline, rank)

    def recompute_seconds(self, stage: int) -> float:
        """What recomputation adds to the stage's backward of a microbatch."""
        return math.fsum(self.chosen[i].rerun_seconds(split=bool(self.schedule.split)) for i in self.stages[stage])


_ROOMS = 5  # tries to make room for what a schedule keeps
_ROOM = 512  # of the budget, that much at least: a cut rounds what its layers keep
BOUNDLESS = 1 << 60  # bytes


@dataclass(frozen=True)
class _Shared:
    """What several cuts of one model have in common."""

    alike: Alike
    timelines: Timelines
    passes: PassMemory
    between: BetweenCalls
    states: dict[Hashable, State] = field(default_factory=dict)  # of a stage's parameters


@dataclass(frozen=True)
class _Parts:
    """What a pipeline is made of."""

    model: Model
    calls: list[int]
    units: list[Unit]
    costs: list[BlockCost]
    machine: Machine
    microbatches: int
    wanted: Wanted
    options: Options
    vocabulary: VocabularyCost | None
    activations: Activations
    shared: _Shared
    turns: list[list[Turns]] | None = None
    embedded_bytes: int = 0  # of what waits for the first stage

    @property
    def budget_bytes(self) -> int:
        return self.options.budget_bytes or self.machine.device.memory_bytes

    def embedding(self, draft: Schedule) -> _Parts:
        """With what waits for the first stage under this schedule, if the embedding is split."""
        bytes_ = embedded_ahead(draft) * self.vocabulary.embedded_bytes if self.vocabulary else 0
        first, *others = self.units
        units = [replace(first, state_bytes=first.state_bytes + bytes_), *others]
        return replace(self, units=units, embedded_bytes=bytes_)

    def sparing(self, bytes_: int) -> _Parts:
        """With so much less memory on each rank."""
        return replace(self, wanted=replace(self.wanted, spared_bytes=self.wanted.spared_bytes + bytes_))

    @property
    def storage(self) -> Storage:
        return Storage(self.options, self.machine.mesh)

    @property
    def vocabulary_state(self) -> State:
        return vocabulary_state(self.model, self.storage, self.machine.sizes["pp"])

    @property
    def reserved_bytes(self) -> int:
        """What every rank holds beside its stages: of a split vocabulary, state and logits of one microbatch, which
        its passes write anew."""
        kept = self.vocabulary.logits_bytes + self.vocabulary.transient_bytes if self.vocabulary else 0
        return self.vocabulary_state.device_bytes + kept + self.wanted.spared_bytes


def lay_out(
    model: Model,
    costs: list[BlockCost],
    machine: Machine,
    microbatches: int,
    wanted: Wanted,
    options: Options,
    activations: Activations,
    pins: Pins | None = None,
    known: Layout | None = None,
    timelines: Timelines | None = None,
) -> Pipeline:
    """Cut ``model`` (local on all axes), choose what it recomputes, and schedule it; or take that from ``pins``.
    ``known`` is what was chosen before, for these very arguments; ``timelines`` are kept by whoever lays out several.

    Raises StageError, ScheduleError, ArgumentError or PlanError.
    """
    calls = staged_calls(model)
    storage = Storage(options, machine.mesh)
    units = units_of(model, calls, costs, machine, storage)
    vocabulary = vocabulary_cost(model, mode_of(wanted.vocabulary).head, costs, machine, wanted.head_chunks)
    alike = Alike(model)
    passes = PassMemory(model, storage, activations.workings, microbatches > 1, alike)
    shared = _Shared(alike, timelines or Timelines(), passes, BetweenCalls(model, costs, machine))
    parts = _Parts(model, calls, units, costs, machine, microbatches, wanted, options, vocabulary, activations, shared)
    if pins is not None and pins.actions is not None:
        written = Schedule.from_text(pins.actions)
        return _pipeline(parts.embedding(written), written, pins, lambda costs, free_bytes: written)
    check_count(units, machine.sizes["pp"] * (wanted.chunks or 1), machine.sizes["pp"])  # before lists are as long
    if wanted.schedule != SYNTHESIZED:
        draft = _draft(parts, name := schedule_name(wanted, machine.sizes["pp"]))
        parts = parts.embedding(draft)
        if _is_fixed(name, draft):
            parts = replace(parts, turns=list(map(turns_of, draft.lists)))
        schedule_for = partial(_named, parts, name, draft)
        if known is not None:
            made = _made(parts, draft, known.fit, schedule_for, offloads=known.away is not None and known.away.moves)
            return _run(parts, made, known.away)
        return _pipeline(parts, draft, pins, schedule_for)
    return _best_synthesized(parts, pins)


def _pipeline(
    parts: _Parts,
    draft: Schedule,
    pins: Pins | None,
    schedule_for: _ScheduleFor,
) -> Pipeline:
    """The faster of two ways to fit: with all activations on the device, and with some of them on the host."""
    offloads = activations_on_host(parts.options.offload)
    if offloads and draft.is_asynchronous:
        raise ArgumentError(
            f"offload of activations, but schedule {parts.wanted.schedule!r} is asynchronous: it keeps versions of "
            "weights with them, which can't go to the host. Use a synchronous schedule, or leave offload out"
        )
    if pins is not None:
        fitted = _fit(parts, draft, pins, kept_stages(draft))
        made = _made(parts, draft, fitted, schedule_for, offloads=pins.away.moves)
        return _run(parts, made, pins.away, trusted=pins.actions is None)
    if not offloads:
        return _roomy(parts, draft, schedule_for)
    try:
        without = _roomy(parts, draft, schedule_for)
    except BudgetError as error:
        return _offloading(parts, draft, schedule_for, error)
    return _offloading(parts, draft, schedule_for, without)


def _roomy(parts: _Parts, draft: Schedule, schedule_for: _ScheduleFor) -> Pipeline:
    """Laid out again with so much less memory as a rank keeps more than the cut reckoned with: with the costs of the
    cut, schedules may keep more, and what waits for weights' gradients is none of what layers save."""
    inflight, spared = kept_stages(draft), 0
    first = found = _run(parts, _made(parts, draft, _fit(parts, draft, None, inflight), schedule_for))
    for _ in range(_ROOMS):
        if (lacks := _lacking(found)) <= 0:
            return found
        spared += max(lacks, parts.budget_bytes // _ROOM)
        try:
            fitted = _fit(parts.sparing(spared), draft, None, inflight)
            found = _run(parts, _made(parts, draft, fitted, schedule_for))
        except BudgetError:
            return first
    return found if _lacking(found) <= 0 else first


def _lacking(found: Pipeline) -> int:
    """Bytes by which a rank keeps more than it has room for, at most; 0 or less where all have room."""
    return max(p - f for p, f in zip(found.timeline.peak_activation_bytes, found.free_bytes, strict=True))


def _offloading(
    parts: _Parts,
    draft: Schedule,
    schedule_for: _ScheduleFor,
    without: Pipeline | BudgetError,
) -> Pipeline:
    """With activations on the host: the fastest of some tries.

    The cut is for ranks with as much more memory as copies make room for, which shows when they run beside the passes:
    :mod:`autopar.planner.away_parts` of what there is no room for if nothing is recomputed are tried, or of what the
    host has room for. ``without`` is the best that keeps all on the device (it may keep more than there is room for),
    or why there is none. What needs more of the host than there is, is given if there is nothing else. Raises the
    BudgetError that asks least.
    """
    inflight = kept_stages(draft)
    plain = _fit(parts.sparing(-BOUNDLESS), draft, None, inflight)
    lacks = _lacks(parts, draft, plain, inflight)
    if not isinstance(without, BudgetError):
        lacks = max(lacks, _lacking(without))
    best, overfull, refusals, tried = None, None, [], dict[float, Tried]()
    goes = min(lacks, *_host_room(parts, _stages(parts.calls, plain.cut), draft))
    if isinstance(without, BudgetError):
        refusals.append(without)
    elif goes <= 0:
        return without
    elif _lacking(without) <= 0:
        best = without
        tried[0.0] = Tried(best.timeline.makespan_seconds, best.timeline.makespan_seconds)
    for part in away_parts.parts(tried):
        tried[part] = Tried(math.inf, math.inf)
        is_all = part == 1.0 and goes == lacks
        cut = plain if is_all else _roomier(parts, draft, inflight, round(part * goes))
        if cut is None:
            continue
        made = _made(parts, draft, cut, schedule_for, offloads=True)
        seconds = parts.shared.timelines.of(made.schedule, made.costs).makespan_seconds
        if best is not None and seconds >= best.timeline.makespan_seconds:
            tried[part] = Tried(seconds, seconds)
            continue  # copies make no step shorter
        tried[part] = Tried(seconds, math.inf)
        try:
            away = offloaded(made.schedule, made.costs, made.free_bytes, parts.budget_bytes)
            found = _run(parts, made if away.moves else _made(parts, draft, cut, schedule_for), away)
        except BudgetError as error:
            refusals.append(error)
            continue
        if (excess := _excess(parts, draft, found)) > 0:
            overfull, goes = overfull or found, max(goes - excess, goes // 2)
            del tried[part]  # as much as that is another part by now
            continue
        tried[part] = Tried(seconds, found.timeline.makespan_seconds)
        if best is None or tried[part].seconds < best.timeline.makespan_seconds:
            best = found
    if best is None:
        best = overfull if isinstance(without, BudgetError) else without
    if best is None:
        least = min(refusals, key=lambda refusal: refusal.needed_bytes)  # of the device
        raise least if goes == lacks else or_host(least, parts.machine.device.host_memory_bytes)
    return best


def _excess(parts: _Parts, draft: Schedule, found: Pipeline) -> int:
    """Bytes by which a rank has more on its host than there is room for, at most; 0 or less where all have room."""
    room = _host_room(parts, found.stages, draft)
    return max(found.host_bytes(rank) - room[rank] for rank in range(draft.ranks))


def _roomier(parts: _Parts, draft: Schedule, inflight: tuple[int, ...], more: int) -> Fit | None:
    """Fitted into so many bytes more on each rank that needs them, if it can be: what that takes is no budget that
    would do."""
    try:
        found = _fit(parts.sparing(-more), draft, None, inflight)
    except BudgetError:
        return None
    return spending_slack(_demand(parts, draft, inflight), found, more)


def _lacks(parts: _Parts, draft: Schedule, found: Fit, inflight: Sequence[int]) -> int:
    """Bytes that the fullest rank has no room for, of what it keeps with this cut."""
    stages = _stages(parts.calls, found.cut)
    room = list(_free_bytes(parts, stages, draft, _transients(parts, stages, draft, found.chosen)))
    for home, stage, count in zip(draft.placement, stages, inflight, strict=True):
        room[home] -= count * parts.activations.stage_bytes(stage, found.chosen)
    return max(0, -min(room))


@dataclass(frozen=True)
class _Made:
    """A cut with its prices and its lowered schedule, before anything goes to the host: with ``transient_bytes`` and
    ``free_bytes`` as of :class:`Pipeline`."""

    fit: Fit
    stages: tuple[tuple[int, ...], ...]
    schedule: Schedule
    priced: Priced
    transient_bytes: tuple[int, ...]
    free_bytes: tuple[int, ...]

    @property
    def costs(self) -> Costs:
        return self.priced.costs


def _made(parts: _Parts, draft: Schedule, found: Fit, schedule_for: _ScheduleFor, *, offloads: bool = False) -> _Made:
    """Scheduled by the costs of a cut and the bytes left for activations, of which with ``offloads`` those don't count
    that may go to the host."""
    stages = _stages(parts.calls, found.cut)
    if draft.is_asynchronous:
        _refuse_ties(parts, stages)
    priced = _priced(parts, stages, draft, found.chosen)
    transients = _transients(parts, stages, draft, found.chosen)
    free = _free_bytes(parts, stages, draft, transients)
    costs = priced.costs
    if offloads:  # a schedule that is made for the memory would be one for the memory without the host's
        stays = tuple(map(sub, costs.activation_bytes, costs.offload_bytes))
        costs = replace(costs, activation_bytes=stays, offload_bytes=())
    posts = weight_moves(parts.model, parts.options, parts.machine.lines.values())
    schedule = parts.shared.timelines.lowered(schedule_for(costs, [max(0, room) for room in free]), priced.costs, posts)
    if posts.scatters and schedule.split:  # by the order of its passes, gradients wait for each other to be sent
        priced = _priced(parts, stages, schedule, found.chosen)
        schedule = parts.shared.timelines.lowered(_passes(schedule), priced.costs, posts)
    return _Made(found, stages, schedule, priced, transients, free)


def _run(parts: _Parts, made: _Made, away: Away | None = None, *, trusted: bool = True) -> Pipeline:
    """With what goes to the host (None: nothing may). Actions may be ``trusted`` to be an order."""
    schedule, costs, moved = made.schedule, made.costs, away or Away({})
    if trusted:
        timeline = parts.shared.timelines.offloading(schedule, moved, costs)
    else:
        timeline = simulate_timeline(offload_activations(schedule, moved, costs), costs)
    return Pipeline(
        stages=made.stages,
        schedule=timeline.schedule,
        timeline=timeline,
        inflight=kept_stages(schedule),
        bound_seconds=made.fit.cut.bound_seconds,
        vocabulary=parts.vocabulary,
        activations=parts.activations,
        layout=Layout(made.fit, away),
        accumulations=made.priced.accumulations,
        slowed=made.priced.slowed,
        casts=made.priced.casts,
        waiting=made.priced.waiting,
        transient_bytes=made.transient_bytes,
        summing_bytes=made.priced.summing_bytes,
        free_bytes=made.free_bytes,
    )


def _priced(
    parts: _Parts, stages: Sequence[Sequence[int]], draft: Schedule, chosen: Mapping[int, Alternative]
) -> Priced:
    return priced(
        Work(
            model=parts.model,
            blocks=parts.costs,
            machine=parts.machine,
            options=parts.options,
            microbatches=parts.microbatches,
            vocabulary=parts.vocabulary,
            head_chunks=parts.wanted.head_chunks,
            activations=parts.activations,
            between=parts.shared.between,
            # Whether weight gradients are a pass of their own.
            split=bool(draft.split) or parts.wanted.schedule == SYNTHESIZED,
        ),
        draft,
        stages,
        chosen,
    )


def _draft(parts: _Parts, name: str) -> Schedule:
    """The schedule for equal passes, which says what ranks keep. Where the passes' costs change it, it is made again;
    ranks keep the most long before 4 microbatches each."""
    row, ranks = SCHEDULES.get(name), parts.machine.sizes["pp"]
    few = min(parts.microbatches, 4 * ranks) if row is not None and row.cost_aware else parts.microbatches
    return _generate(replace(parts, microbatches=few), name, parts.wanted.chunks, None)


def _is_fixed(name: str, draft: Schedule) -> bool:
    """Whether passes are in the same order, whatever they take."""
    return not (draft.head or SCHEDULES[name].cost_aware or draft.split)


def _named(parts: _Parts, name: str, draft: Schedule, costs: Costs, free_bytes: list[int]) -> Schedule:
    found = draft
    if draft.head or SCHEDULES[name].cost_aware:
        found = _generate(parts, name, parts.wanted.chunks, PassTimes.of(costs))
    return with_early_weights(found, costs, free_bytes)


def _best_synthesized(parts: _Parts, pins: Pins | None) -> Pipeline:
    """The fastest over the placements that the pinned number of chunks allows."""
    ranks, chunks = parts.machine.sizes["pp"], parts.wanted.chunks
    name = schedule_name(parts.wanted, ranks)
    bases: dict[int, list[tuple[str, int | None]]] = {1: [(name, None)], 2: [("interleaved", 2), ("v-half", None)]}
    if chunks is not None:
        wanted = bases.get(chunks, [("interleaved", chunks)])
    else:
        wanted = [*bases[1], *(bases[2] if len(parts.units) >= 2 * ranks else [])]
    drafts = [_generate(parts, base, count, None) for base, count in wanted]
    found, refusals = [], []
    for draft in drafts:
        try:
            found.append(_pipeline(parts.embedding(draft), draft, pins, partial(_synthesized, draft)))
        except (StageError, ScheduleError) as error:
            refusals.append(error)  # another placement may fit into the memory
    if not found:
        raise refusals[0]
    return min(found, key=lambda pipeline: (pipeline.timeline.step_seconds, pipeline.timeline.makespan_seconds))


def _synthesized(draft: Schedule, costs: Costs, free_bytes: list[int]) -> Schedule:
    """The best order of ``draft``'s passes for these costs."""
    found = synthesize(
        draft.placement,
        draft.microbatches,
        costs,
        limit_bytes=free_bytes,
        head=draft.head,
        embedding=draft.embedding,
    )
    return _passes(found.schedule)


def _transients(
    parts: _Parts, stages: Sequence[Sequence[int]], draft: Schedule, chosen: Mapping[int, Alternative]
) -> tuple[int, ...]:
    """What each pipeline rank holds at most beside what it keeps: in passes, and ahead of the first stage."""
    found = [parts.vocabulary.transient_bytes if parts.vocabulary else 0] * draft.ranks
    for rank in range(draft.ranks):
        mine = [stage for home, stage in zip(draft.placement, stages, strict=True) if home == rank]
        beside_of = parts.shared.passes.of_rank(mine, parts.turns[rank] if parts.turns else None)
        for stage, beside in zip(mine, beside_of, strict=True):
            held = [each + chosen[i].transient_bytes for i, each in zip(stage, beside, strict=True)]
            kept = [parts.activations.call_bytes(i, chosen[i]) for i in stage]
            found[rank] = max(found[rank], largest(held, kept))
    found[draft.placement[0]] += parts.embedded_bytes
    return tuple(found)


def _free_bytes(
    parts: _Parts, stages: Sequence[Sequence[int]], draft: Schedule, transients: Sequence[int]
) -> tuple[int, ...]:
    """Per pipeline rank, what it has left for activations: beside parameters, gradients and optimizer, and what passes
    hold beside; less than nothing where these have no room."""
    held = [parts.vocabulary_state.device_bytes + bytes_ for bytes_ in transients]
    for home, stage in zip(draft.placement, stages, strict=True):
        held[home] += _state(parts, stage).device_bytes
    return tuple(parts.budget_bytes - parts.wanted.spared_bytes - bytes_ for bytes_ in held)


def _host_room(parts: _Parts, stages: Sequence[Sequence[int]], draft: Schedule) -> list[int]:
    """Per pipeline rank, what it has left for activations on the host: beside what of its state is there."""
    room = [parts.machine.device.host_memory_bytes - parts.vocabulary_state.host.total()] * draft.ranks
    for home, stage in zip(draft.placement, stages, strict=True):
        room[home] -= _state(parts, stage).host.total()
    return room


def _state(parts: _Parts, stage: Sequence[int]) -> State:
    key, states = parts.shared.alike.key(stage), parts.shared.states
    if key not in states:
        states[key] = rank_state(parts.model, stage, parts.storage)
    return states[key]


def compute_only(schedule: Schedule) -> str:
    """The text of a lowered schedule without what lowering adds; :func:`lay_out` takes it as ``actions``."""
    return _passes(schedule).to_text()


def _passes(schedule: Schedule) -> Schedule:
    """The compute actions of a lowered schedule."""
    return replace(schedule, lists=tuple(tuple(a for a in row if a.kind in COMPUTE) for row in schedule.lists))


def _refuse_ties(parts: _Parts, stages: tuple[tuple[int, ...], ...]) -> None:
    """Copies of a weight that are updated at different times are no longer one weight."""
    owner: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in (name for call in stage for name in parts.model.calls[call].parameters):
            if owner.setdefault(name, number) != number:
                raise StageError(
                    f"schedule {parts.wanted.schedule!r} is asynchronous: each stage updates its weights by itself, "
                    f"but {name!r} is in stages {owner[name]} and {number}. Use a synchronous schedule, or untie it"
                )


def _generate(parts: _Parts, name: str, chunks: int | None, times: PassTimes | None) -> Schedule:
    head = mode_of(parts.wanted.vocabulary).head
    embedding = bool(head) and parts.vocabulary is not None and parts.vocabulary.has_embedding
    ranks = parts.machine.sizes["pp"]
    return generate(name, ranks, parts.microbatches, chunks=chunks, costs=times, head=head, embedding=embedding)


def _fit(parts: _Parts, draft: Schedule, pins: Pins | None, inflight: tuple[int, ...]) -> Fit:
    """The cut, and what each call recomputes."""
    if draft.is_asynchronous and parts.options.recompute in ("full", "selective"):
        raise ArgumentError(
            f"recompute={parts.options.recompute!r}, but schedule {parts.wanted.schedule!r} is asynchronous: by its "
            "backward the weights are others than those to recompute with. Use a synchronous schedule, or "
            "recompute='none'"
        )
    demand = _demand(parts, draft, inflight)
    if pins is None:
        return fit(demand)
    choices = [parts.activations.choices[parts.model.calls[i].block] for i in parts.calls]
    named = [choice.named(ends) for choice, ends in zip(choices, pins.recompute, strict=True)]
    return pinned(demand, _pinned_cut(parts, draft.placement, pins.starts), dict(zip(parts.calls, named, strict=True)))


def _demand(parts: _Parts, draft: Schedule, inflight: tuple[int, ...]) -> Demand:
    return Demand(
        model=parts.model,
        calls=parts.calls,
        units=parts.units,
        activations=parts.activations,
        passes=parts.shared.passes,
        inflight=inflight,
        placement=draft.placement,
        microbatches=parts.microbatches,
        budget_bytes=parts.budget_bytes,
        reserved_bytes=parts.reserved_bytes,
        turns=parts.turns,
        even=not mode_of(parts.wanted.vocabulary).balanced,
        mode="none" if draft.is_asynchronous else parts.options.recompute,
    )


def _pinned_cut(parts: _Parts, placement: Sequence[int], starts: Sequence[int]) -> Partition:
    ends = [*starts[1:], len(parts.units)]
    fits = len(starts) == len(placement) and all(a < b for a, b in zip(starts, ends, strict=True))
    if not fits:
        raise PlanError(f"the plan cuts {len(parts.units)} units at {list(starts)}, which makes no stages: plan again")
    return Partition(tuple(starts), 0.0, 0.0)


def _stages(calls: list[int], cut: Partition) -> tuple[tuple[int, ...], ...]:
    ends = [*cut.starts[1:], len(calls)]
    return tuple(tuple(calls[a:b]) for a, b in zip(cut.starts, ends, strict=True))
