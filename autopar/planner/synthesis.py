"""The best schedule found for given pass times and memory: never worse than any named one, with a proven gap.

Sets
    compute passes (F; B, or I and W; the vocabulary's) of m microbatches on the ranks of a placement
Variables
    the order of the passes on each rank; whether backwards are split
Objective
    min makespan of the lowered lists                            :func:`autopar.schedules.simulate_timeline`
Constraints
    bytes kept on rank r <= limit_r at all times                 :func:`_fits`
    the lists can run                                            :func:`autopar.schedules.check`
Candidates
    named      every schedule of the family on the same placement                                :func:`_named`
    greedy     list scheduling by the rules of :data:`autopar.schedules.greedy.RULES`            :func:`_greedy`
    block      the repeating block that CP-SAT finds (:mod:`autopar.planner.repeating_block`),
               repeated as it is, and as priorities                                             :func:`_blocks`
    justified  the best of them, run again by how late their passes could start, as long as
               that helps                                                                        :func:`_justified`
Bound
    no order of the passes takes less                       :func:`autopar.planner.makespan_bounds.makespan_bound`

All candidates run in the simulation of :mod:`autopar.schedules.greedy` first, which differs from the timeline only by
when exchanges are posted. The best of them, and all named ones, are lowered, checked and timed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from autopar.errors import ScheduleError
from autopar.planner.makespan_bounds import makespan_bound
from autopar.planner.repeating_block import repeating_block
from autopar.schedules.actions import Schedule
from autopar.schedules.greedy import RULES, Job, Rule, Run, greedy, replay
from autopar.schedules.justify import justify
from autopar.schedules.lower import lower
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.registry import SCHEDULES, generate, placement
from autopar.schedules.timeline import Costs, Timeline, simulate_timeline

_HOLDS: Final = (0.0, 0.5, 1.0)
_ROUNDS: Final = 4
_JUSTIFY: Final = 2
"""How many of the best runs are justified."""

_TIMED: Final = 3
"""How many of the candidates without a name are timed exactly, the best ones."""


@dataclass(frozen=True)
class Synthesis:
    """The best schedule, lowered, its timeline, and what it was compared with.

    ``best`` is its name among the ``candidates``, which map to makespans: as timed, or as estimated for those without a
    name that were not among the best. Named schedules that exceed the limit, or don't have the head or the chunks, are
    not there.
    ``bound_seconds``: no schedule of this placement takes less under these costs and limits.
    """

    schedule: Schedule
    timeline: Timeline
    bound_seconds: float
    candidates: Mapping[str, float]
    best: str

    @property
    def gap(self) -> float:
        """By which share of the bound the makespan exceeds it."""
        return self.timeline.makespan_seconds / self.bound_seconds - 1 if self.bound_seconds else 0.0

    def __str__(self) -> str:
        width = max(map(len, self.candidates))
        seconds = self.timeline.makespan_seconds
        rows = sorted(self.candidates.items(), key=lambda item: (item[1], item[0]))
        lines = [f"{name:{width}}  {1e3 * own:12.3f} ms  {_over(own, seconds)}" for name, own in rows]
        bound = f"{'bound':{width}}  {1e3 * self.bound_seconds:12.3f} ms  the best is within {self.gap:.2%} of it"
        return "\n".join([f"{self.best}, of {len(rows)} candidates", *lines, bound])


def _over(seconds: float, best: float) -> str:
    return "best" if seconds <= best else f"+{seconds / best - 1:.2%}"


def synthesize(
    stages: Sequence[int],
    microbatches: int,
    costs: Costs,
    *,
    limit_bytes: int | Sequence[int] | None = None,
    head: str = "",
    embedding: bool = False,
    split: bool = True,
    solver_seconds: float = 0.5,
) -> Synthesis:
    """The best schedule of ``microbatches`` through stages placed on the ranks ``stages``.

    ``limit_bytes`` is what each rank may keep for backwards (as :class:`Costs` counts it), for all ranks or per rank;
    ``split`` allows backwards of two passes. ``solver_seconds`` limits CP-SAT per interval tried, in its own
    deterministic measure; the result is the same on every machine.
    Raises ScheduleError for a limit below what any schedule needs, naming the smallest that works; ArgumentError for
    costs of another number of stages or ranks.
    """
    ranks = max(stages) + 1
    limits = (limit_bytes,) * ranks if isinstance(limit_bytes, int) else limit_bytes
    whole = Job(tuple(stages), microbatches, costs, head, embedding, False, None if limits is None else tuple(limits))
    job = _split(whole) if split else whole
    named = _named(whole, split)
    runs = _runs(job, named, solver_seconds)
    seconds, timelines = _timed([*_Candidate.of(runs), *named], whole)
    if not timelines:
        raise ScheduleError(
            f"none of {len(runs) + len(named)} schedules of {microbatches} microbatches on {ranks} ranks can run"
        )
    best = min(timelines, key=lambda name: (timelines[name].makespan_seconds, name))
    return Synthesis(timelines[best].schedule, timelines[best], makespan_bound(job), seconds, best)


def _split(whole: Job) -> Job:
    """The same job with split backwards, unless these don't fit: more may be kept after ``I`` than before.

    Nothing is lost by splitting all: a whole backward is an ``I`` and a ``W`` in a row that sends its gradient late.
    """
    try:
        return replace(whole, split=True)
    except ScheduleError:
        return whole


@dataclass(frozen=True)
class _Candidate:
    """A list of compute actions, with its run where the simulation of :mod:`autopar.schedules.greedy` takes it."""

    name: str
    schedule: Schedule
    run: Run | None
    is_named: bool = True

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Iterator[_Candidate]:
        for run in runs:
            yield cls(run.name, replace(run.schedule, name="synthesis"), run, False)

    @property
    def estimate(self) -> float:
        return 0.0 if self.run is None else self.run.makespan_seconds


def _named(job: Job, split: bool) -> list[_Candidate]:
    """All named schedules of the job's placement, head and limit."""
    found = []
    for name, row in SCHEDULES.items():
        if row.asynchronous or (row.splits_backward and not split):
            continue
        limit = _most_microbatches(job) if row.limited else None
        chunks = None if row.chunks else job.stages // job.ranks
        try:
            if placement(name, job.ranks, chunks) != job.placement:
                continue
            schedule = generate(
                name,
                job.ranks,
                job.microbatches,
                chunks=chunks,
                limit=limit,
                costs=PassTimes.of(job.costs),
                head=job.head,
                embedding=job.embedding,
            )
            found.append(_Candidate(name, schedule, _replayed(job, schedule)))
        except ScheduleError:  # the family doesn't have this head, or not so few microbatches, or exceeds the limit
            continue
    return found


def _most_microbatches(job: Job) -> int | None:
    """How many microbatches' activations fit every rank."""
    if job.limit_bytes is None:
        return None
    whole = [sum(job.costs.activation_bytes[s] for s in held) for held in job.held]
    fits = [limit // share for limit, share in zip(job.limit_bytes, whole, strict=True) if share]
    return min(fits, default=None)


def _replayed(job: Job, schedule: Schedule) -> Run | None:
    """A run in the list's order; None where only some backwards are split, for which it isn't made."""
    split = len(schedule.split)
    if 0 < split < schedule.stages * schedule.microbatches:
        return None
    return replay(replace(job, split=bool(split)), schedule)


def _runs(job: Job, named: Sequence[_Candidate], solver_seconds: float) -> list[Run]:
    """All runs of the job that are no named schedule's."""
    seeds = [c.run for c in named if c.run is not None and c.run.job.split == job.split]
    runs = _greedy(job)
    runs += _blocks(job, min([*seeds, *runs], key=_makespan), solver_seconds)
    for run in sorted([*seeds, *runs], key=_makespan)[:_JUSTIFY]:
        runs += _justified(run)
    return runs


def _makespan(run: Run) -> float:
    return run.makespan_seconds


def _greedy(job: Job) -> list[Run]:
    deep, reserve = job.stages > job.ranks, bool(job.head and job.limit_bytes is not None and job.costs.logits_bytes)
    rules = (rule for rule in RULES if (deep or not rule.deep) and (reserve or rule.reserve))
    return [greedy(job, rule) for rule in rules]


def _blocks(job: Job, hint: Run, solver_seconds: float) -> list[Run]:
    block = repeating_block(job, hint, deterministic_seconds=solver_seconds)
    if block is None:
        return []
    plan = block.plan(job)
    rules = [Rule(f"block, hold {hold:g}", plan=plan, ahead=4, hold=hold) for hold in _HOLDS]
    lists = tuple(tuple(sorted(row, key=lambda action: (row[action], str(action)))) for row in plan)
    runs = [greedy(job, rule) for rule in rules]
    with contextlib.suppress(ScheduleError):  # passes that take no time may come in an order that can't run
        runs.append(greedy(job, Rule("block", lists=lists, ahead=job.microbatches)))
    return runs


def _justified(run: Run) -> list[Run]:
    """Runs by the latest starts of the one before, as long as they get shorter."""
    found: list[Run] = []
    for _ in range(_ROUNDS):
        better = min((greedy(run.job, justify(run, hold)) for hold in _HOLDS), key=_makespan)
        if better.makespan_seconds >= run.makespan_seconds:
            break
        found.append(better)
        run = better
    return found


def _timed(candidates: Sequence[_Candidate], whole: Job) -> tuple[dict[str, float], dict[str, Timeline]]:
    """Makespans by name, and the timelines of all named and the most promising; those that can't run are left out."""
    seconds: dict[str, float] = {}
    timelines: dict[str, Timeline] = {}
    timed = 0
    for candidate in sorted(candidates, key=lambda c: (c.estimate, not c.is_named)):
        if candidate.name in seconds:
            continue
        if timed >= _TIMED and not candidate.is_named:
            seconds[candidate.name] = candidate.estimate
        elif (timeline := _timeline(candidate, whole)) is not None:
            timed += not candidate.is_named
            seconds[candidate.name] = timeline.makespan_seconds
            timelines[candidate.name] = timeline
    return seconds, timelines


def _timeline(candidate: _Candidate, whole: Job) -> Timeline | None:
    """None where the lowered lists can't run (ranks that wait for each other's exchanges) or don't fit."""
    try:
        timeline = simulate_timeline(lower(candidate.schedule, whole.costs.seconds), whole.costs)
    except ScheduleError:
        return None
    return timeline if _fits(timeline, whole) else None


def _fits(timeline: Timeline, whole: Job) -> bool:
    if whole.limit_bytes is None:
        return True
    return all(peak <= limit for peak, limit in zip(timeline.peak_activation_bytes, whole.limit_bytes, strict=True))
