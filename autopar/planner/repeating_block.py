"""The repeating block of a pipeline schedule: one microbatch's passes modulo an interval, placed by CP-SAT.

In its steady state a pipeline repeats one microbatch's passes every T seconds (the building block of P. Qi et al.,
"Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, section 3), which is a modulo schedule (B. R. Rau,
"Iterative Modulo Scheduling", MICRO 1994). Here passes have the lengths they have, and the interval is as short as the
busiest rank allows, or the next longer one that the limits of memory allow.

Sets
    passes a of one microbatch on all ranks, each on rank r(a), of d_a ticks; exchanges e of d_e ticks
Variables
    o_a = T q_a + x_a, 0 <= x_a < T, q_a >= 0       start of a, in intervals and inside one     :meth:`_Model._starts`
    y_e >= 0                                        start of exchange e                          :meth:`_Model._starts`
    b_ta in {0, 1}, b_ta = 1 iff x_t < x_a          order inside the interval, one rank's passes :func:`_earlier`
    S >= o_a + d_a                                  span of the microbatch
Objective
    min T over a rising list of intervals, then min S: the step takes about (m - 1) T + S        :func:`repeating_block`
Constraints
    [x_a, x_a + d_a) and [x_a + T, x_a + T + d_a), a on r, don't overlap                         :func:`_no_overlap`
    o_b >= o_a + d_a + send_ab ; o_b >= y_e + d_e ; y_e >= o_a + d_a                             :func:`_precedence`
    o_F - o_E <= 2 T where F takes what E embeds                                                 :func:`_precedence`
    sum over a of bytes_a N_a(t) <= limit_r  for each t on r that adds bytes                     :func:`_memory`

``N_a(t) = q_t - q_a - b_ta`` counts the microbatches that have begun a at the time of t, up to a constant that is the
same for all a and cancels: what a microbatch keeps it gives back, so the bytes of its passes add up to none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from autopar.planner import cp
from autopar.schedules.actions import ABSENT, Action
from autopar.schedules.exchanges import exchanges, passes
from autopar.schedules.greedy import Job, Plan, Run

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_TICKS: Final = 400
"""Of the shortest interval: how finely passes are placed. The schedule that comes of it is timed exactly."""

_STRETCHES: Final = (1.0, 1.03, 1.08, 1.15, 1.3, 1.5)
"""Intervals that are tried, over the shortest."""

_GAP: Final = 0.02
"""A block whose span is proven to be this close to the least (relative) is taken."""

_LONGEST: Final = 8
"""A microbatch's span is at most this many forward-and-backward passes through the pipeline."""


class Pass(NamedTuple):
    """A pass of the microbatch; ``stage`` is ABSENT for a vocabulary pass."""

    rank: int
    kind: str
    stage: int


@dataclass(frozen=True)
class Block:
    """Start of each pass of microbatch 0, in seconds; microbatch j runs ``j * interval_seconds`` later."""

    interval_seconds: float
    starts: Mapping[Pass, float]

    def plan(self, job: Job) -> Plan:
        """The planned starts of all microbatches' passes, per rank."""
        plans: tuple[dict[Action, float], ...] = tuple({} for _ in range(job.ranks))
        for (rank, kind, stage), start in self.starts.items():
            for microbatch in range(job.microbatches):
                plans[rank][Action(kind, microbatch, stage)] = start + microbatch * self.interval_seconds
        return plans


def repeating_block(job: Job, hint: Run, *, deterministic_seconds: float = 4.0) -> Block | None:
    """The shortest interval that works, and in it the shortest span found; None where none is found in time.

    ``hint`` is a run of the same job, in whose middle a microbatch shows the solver where to begin.
    ``deterministic_seconds`` limits the solver per interval, in its own measure of work, the same on every machine.
    """
    tick = max(_work_seconds(job)) / _TICKS
    if not tick:
        return None
    ticks = {item: round(pass_seconds(job, item) / tick) for item in block_passes(job)}
    shortest = max(sum(ticks[item] for item in ticks if item.rank == rank) for rank in range(job.ranks))
    for stretch in _STRETCHES:
        model = _Model(job, ticks, tick, round(shortest * stretch))
        if (starts := model.solve(hint, deterministic_seconds)) is not None:
            return Block(model.interval * tick, {item: start * tick for item, start in starts.items()})
    return None


def block_passes(job: Job) -> Iterator[Pass]:
    for rank, stages in enumerate(job.held):
        for kind in ("F", "I", "W") if job.split else ("F", "B"):
            yield from (Pass(rank, kind, stage) for stage in stages)
        yield from (Pass(rank, kind, ABSENT) for kind in passes(job.head, job.embedding))


def pass_seconds(job: Job, item: Pass) -> float:
    return job.costs.seconds(item.rank, Action(item.kind, 0, item.stage))


def _work_seconds(job: Job) -> list[float]:
    work = [0.0] * job.ranks
    for item in block_passes(job):
        work[item.rank] += pass_seconds(job, item)
    return work


class _Model:
    """The CP-SAT model of one interval."""

    def __init__(self, job: Job, ticks: Mapping[Pass, int], tick: float, interval: int) -> None:
        self.job, self.ticks, self.tick, self.interval = job, ticks, tick, interval
        self.model = cp.new_model()
        self.table = exchanges(job.head, job.embedding)
        self.horizon = _LONGEST * (sum(t for item, t in ticks.items() if item.stage >= 0) + 4 * interval)
        self.turn, self.offset = self._starts()
        self.start = {item: interval * self.turn[item] + self.offset[item] for item in ticks}
        self.exchange = {e.kind: self.model.new_int_var(0, self.horizon, e.kind) for e in self.table}
        _no_overlap(self)
        _precedence(self)
        if job.limit_bytes is not None:
            _memory(self)
        self.span = self.model.new_int_var(0, self.horizon, "span")
        for item, start in self.start.items():
            self.model.add(self.span >= start + ticks[item])
        self.model.minimize(self.span)

    def _starts(self) -> tuple[dict[Pass, cp_model.IntVar], dict[Pass, cp_model.IntVar]]:
        turns = self.horizon // self.interval + 1
        turn = {item: self.model.new_int_var(0, turns, f"q {item}") for item in self.ticks}
        return turn, {item: self.model.new_int_var(0, self.interval - 1, f"x {item}") for item in self.ticks}

    def solve(self, hint: Run, deterministic_seconds: float) -> dict[Pass, int] | None:
        for item, start in _steady(hint).items():
            ticks = round(start / self.tick)
            self.model.add_hint(self.turn[item], ticks // self.interval)
            self.model.add_hint(self.offset[item], ticks % self.interval)
        solver = cp.solve(self.model, deterministic_seconds, _GAP)
        if solver is None:
            return None
        return {item: solver.value(start) for item, start in self.start.items()}

    def backward(self, stage: int) -> Pass:
        return Pass(self.job.placement[stage], "I" if self.job.split else "B", stage)


def _no_overlap(m: _Model) -> None:
    for rank in range(m.job.ranks):
        intervals = []
        for item in m.ticks:
            if item.rank == rank and m.ticks[item]:
                x, d = m.offset[item], m.ticks[item]
                intervals += [m.model.new_fixed_size_interval_var(x + k * m.interval, d, "") for k in (0, 1)]
        m.model.add_no_overlap(intervals)


def _precedence(m: _Model) -> None:
    for before, after, wait in _neighbours(m):
        m.model.add(m.start[after] >= m.start[before] + m.ticks[before] + wait)
    for e in m.table:
        length = round(m.job.costs.seconds(0, Action(e.kind, 0)) / m.tick)
        if e.source in m.exchange:
            m.model.add(m.exchange[e.kind] >= m.exchange[e.source])
        for item in _ends(m, e.source, e.source_at):
            m.model.add(m.exchange[e.kind] >= m.start[item] + m.ticks[item])
        if e.target in m.exchange:
            m.model.add(m.exchange[e.target] >= m.exchange[e.kind] + length)
        for item in _ends(m, e.target, e.target_at):
            m.model.add(m.start[item] >= m.exchange[e.kind] + length)
    if m.job.embedding:
        for item in _ends(m, "E", ""):
            m.model.add(m.start[Pass(m.job.placement[0], "F", 0)] - m.start[item] <= 2 * m.interval)


def _neighbours(m: _Model) -> Iterator[tuple[Pass, Pass, int]]:
    """(pass, the one that needs it, ticks between): forwards down the stages, backwards up, and those kept for them."""
    job, costs = m.job, m.job.costs
    for stage, rank in enumerate(job.placement):
        forward, backward = Pass(rank, "F", stage), m.backward(stage)
        yield forward, backward, 0
        if job.split:
            yield backward, Pass(rank, "W", stage), 0
        if stage + 1 < job.stages:
            after = job.placement[stage + 1]
            apart = after != rank
            yield forward, Pass(after, "F", stage + 1), round(apart * costs.send_forward_seconds[stage] / m.tick)
            wait = round(apart * costs.send_backward_seconds[stage + 1] / m.tick)
            yield m.backward(stage + 1), backward, wait


def _ends(m: _Model, kind: str, at: str) -> list[Pass]:
    """The passes at one end of an exchange."""
    if kind in m.exchange:
        return []
    if not at:
        return [item for item in m.ticks if item.kind == kind and item.stage == ABSENT]
    stage = 0 if at == "first" else m.job.stages - 1
    return [m.backward(stage) if kind == "B" else Pass(m.job.placement[stage], kind, stage)]


def _memory(m: _Model) -> None:
    assert m.job.limit_bytes is not None
    for rank, limit in enumerate(m.job.limit_bytes):
        changes = {i: m.job.costs.kept_bytes(Action(i.kind, 0, i.stage)) for i in m.ticks if i.rank == rank}
        changes = {item: change for item, change in changes.items() if change}
        unit = max(1, max(map(abs, changes.values()), default=0) // 10_000)  # small numbers help the solver
        for at in (item for item, change in changes.items() if change > 0):
            begun = []
            for item, change in changes.items():
                count = m.turn[at] - m.turn[item] - (_earlier(m, at, item) if item != at else 0)
                begun.append((-(-change // unit)) * count)  # rounded up
            m.model.add(sum(begun) <= limit // unit)


def _earlier(m: _Model, first: Pass, second: Pass) -> cp_model.IntVar:
    """1 iff ``first`` begins earlier inside the interval than ``second``."""
    earlier = m.model.new_bool_var("")
    m.model.add(m.offset[first] < m.offset[second]).only_enforce_if(earlier)
    m.model.add(m.offset[first] >= m.offset[second]).only_enforce_if(~earlier)
    return earlier


def _steady(run: Run) -> dict[Pass, float]:
    """When the passes of a microbatch in the middle of ``run`` start, from its first one on."""
    middle = run.job.microbatches // 2
    found = {
        Pass(rank, ran.action.kind, ran.action.stage): ran.start_seconds
        for rank, row in enumerate(run.rows)
        for ran in row
        if ran.action.microbatch == middle
    }
    begin = min(found.values())
    return {item: start - begin for item, start in found.items()}
