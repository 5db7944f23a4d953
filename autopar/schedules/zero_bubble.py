"""Zero-bubble schedules: the backward split in two (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241).

``I`` (the paper's B) is what the stage before waits for; ``W`` waits for nothing but it, and fills time that would be
idle. ZB-H1 and ZB-H2 (section 2) have a fixed order; ZB-1p, ZB-2p and ``zb`` (section 3) are searched for given pass
times under a limit on the microbatches in flight. ZB-V (section 6) is in :mod:`autopar.schedules.v_shaped`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.eager import Eager, InOrder, Lists, Pass
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.placements import looped
from autopar.schedules.trials import Line, shortest


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose rank ``r`` puts off each ``W`` by ``r`` microbatches: ``ranks`` in flight everywhere.

    Compute actions only; stage ``s`` on rank ``s``. Raises ScheduleError for sizes below 1.
    """
    return _straight("zb-h1", microbatches, _fixed(ranks, microbatches, ranks, 1.0))


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """As :func:`zb_h1` with almost twice the warm-up: ``2 ranks - 1`` in flight everywhere, and no bubble inside.

    Raises ScheduleError for sizes below 1.
    """
    if microbatches <= ranks:  # a longer warm-up has nothing to warm up with
        return replace(zb_h1(ranks, microbatches), name="zb-h2")
    return _straight("zb-h2", microbatches, _fixed(ranks, microbatches, 2 * ranks - 1, 2.0))


def zero_bubble(
    ranks: int, microbatches: int, limit: int, times: PassTimes, head: str = "", embedding: bool = False
) -> Schedule:
    """The best order found for ``times`` with at most ``limit`` microbatches between F and W on any rank.

    A few fixed orders and a greedy search under several :class:`Rule` s compete; the shortest makespan wins, then the
    shortest time that the busiest rank takes from its first to its last pass.
    Compute actions only; stage ``s`` on rank ``s``.
    """
    placement = looped(ranks)
    line = Line(placement, times, head, embedding)
    slopes = dict.fromkeys((1.0, 2.0, (limit - 1) / max(ranks - 1, 1)))
    anywhere, short = _warm_ups(ranks, limit, 0.0), _warm_ups(ranks, limit, 1.0)
    rules = [Rule(anywhere, fills, first, True) for fills, first in product((False, True), (False, True))]
    rules.append(Rule(short, True, False, True))

    def fixed(slope: float, count: int) -> Eager:
        return line.run(InOrder(_fixed(ranks, count, limit, slope)), count)

    def greedy(rule: Rule, count: int) -> Eager:
        return line.run(Greedy(placement, count, limit, rule), count)

    trials = [*(partial(fixed, slope) for slope in slopes), *(partial(greedy, rule) for rule in rules)]
    lists = shortest(trials, microbatches, 2 * limit + ranks)
    return Schedule("zb", ranks, microbatches, placement, lists, head, embedding)


def _straight(name: str, microbatches: int, lists: Lists) -> Schedule:
    actions = tuple(tuple(Action(*step) for step in steps) for steps in lists)
    return Schedule(name, len(lists), microbatches, looped(len(lists)), actions)


def _warm_ups(ranks: int, limit: int, slope: float) -> tuple[int, ...]:
    """Per rank, the forwards before its first backward: ``slope`` fewer from one rank to the next."""
    return tuple(max(1, limit - int(slope * rank)) for rank in range(ranks))


def _fixed(ranks: int, microbatches: int, limit: int, slope: float) -> Lists:
    """Each rank puts off ``W`` so long that ``limit`` microbatches are in flight on it."""
    warm_ups = _warm_ups(ranks, limit, slope)
    return tuple(tuple(_row(rank, microbatches, warm_up, limit - warm_up)) for rank, warm_up in enumerate(warm_ups))


def _row(stage: int, microbatches: int, warm_up: int, delay: int) -> Iterator[Pass]:
    """``warm_up`` forwards, then I, W and F in turn, each W ``delay`` microbatches late."""
    for step in range(min(warm_up, microbatches)):
        yield Pass("F", step, stage)
    for step in range(microbatches + delay):
        if step < microbatches:
            yield Pass("I", step, stage)
        if delay <= step:
            yield Pass("W", step - delay, stage)
        if step + warm_up < microbatches:
            yield Pass("F", step + warm_up, stage)


@dataclass(frozen=True)
class Rule:
    """What the search tries: ``warm_ups``, per rank, the most forwards that are ahead of their backwards; ``W`` in gaps
    shorter than it; backwards before every forward, or in turn with it; which stage of a rank turns back first."""

    warm_ups: tuple[int, ...]
    fill_any_gap: bool
    backward_first: bool
    late_stage_first: bool


_HELD: Final = {"F": 1, "I": 0, "W": -1}
_AHEAD: Final = {"F": 1, "I": -1, "W": 0}


class Greedy:
    """F and I in turn as they arrive, forwards of late stages first; W in the gaps, or where memory is full.

    ``limit`` is in stages. A forward leaves room for the rank's later stages, so that the microbatch can turn back.
    """

    def __init__(self, placement: tuple[int, ...], microbatches: int, limit: int, rule: Rule) -> None:
        ranks = len(rule.warm_ups)
        self.microbatches, self.limit, self.rule = microbatches, limit, rule
        self.stages = [[stage for stage, home in enumerate(placement) if home == rank] for rank in range(ranks)]
        self.late_first = [stages[::-1] for stages in self.stages]
        self.done = {kind: [0] * len(placement) for kind in "FIW"}
        self.held = [0] * ranks
        self.ahead = [0] * ranks
        self.last = ["F"] * ranks

    def choose(self, run: Eager, rank: int, now: float) -> Pass | None:
        forward = self._forward(run, rank, now)
        backward = self._backward(run, rank, now)
        if backward is not None and (self.rule.backward_first or self.last[rank] == "F" or forward is None):
            return self._take(rank, "I", backward)
        if forward is not None:
            return self._take(rank, "F", forward)
        weight = self._weight(run, rank, now)
        return None if weight is None else self._take(rank, "W", weight)

    def _forward(self, run: Eager, rank: int, now: float) -> int | None:
        if self.ahead[rank] >= self.rule.warm_ups[rank]:
            return None
        arrival, done, held = run.arrival["F"], self.done["F"], self.held[rank]
        for stage in self.late_first[rank]:
            if held >= self.limit:
                return None
            if done[stage] < self.microbatches and arrival[stage][done[stage]] <= now:
                return stage
            held += 1
        return None

    def _backward(self, run: Eager, rank: int, now: float) -> int | None:
        arrival, done = run.arrival["B"], self.done["I"]
        for stage in (self.late_first if self.rule.late_stage_first else self.stages)[rank]:
            if done[stage] < self.microbatches and arrival[stage][done[stage]] <= now:
                return stage
        return None

    def _weight(self, run: Eager, rank: int, now: float) -> int | None:
        """The stage whose W runs now, if it is in nobody's way."""
        pending = [stage for stage in self.late_first[rank] if self.done["W"][stage] < self.done["I"][stage]]
        if not pending:
            return None
        held_up = any(self._arrived(run, "F", stage, now) for stage in self.stages[rank])
        gap = run.next_event(rank, now) - now
        fits = gap >= run.seconds(Pass("W", self.done["W"][pending[0]], pending[0]))
        return pending[0] if held_up or fits or self.rule.fill_any_gap else None

    def _arrived(self, run: Eager, kind: str, stage: int, now: float) -> bool:
        microbatch = self.done[kind][stage]
        return microbatch < self.microbatches and run.arrival["F" if kind == "F" else "B"][stage][microbatch] <= now

    def _take(self, rank: int, kind: str, stage: int) -> Pass:
        self.held[rank] += _HELD[kind]
        self.ahead[rank] += _AHEAD[kind]
        if kind != "W":
            self.last[rank] = kind
        microbatch = self.done[kind][stage]
        self.done[kind][stage] += 1
        return Pass(kind, microbatch, stage)
