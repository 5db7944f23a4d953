"""Lower bounds on the length of a training step, which no order of the passes can beat.

Sets
    passes a of one microbatch, on rank r(a), taking d_a; m microbatches
Heads and tails
    h_a = longest path to the start of a,  q_a = longest path from the end of a to the end of the step
                                                                                                 :class:`_Paths`
Bounds
    path      max_a h_a + d_a + q_a                                                              :func:`makespan_bound`
    rank      per rank, the best preemptive sequence of all its m passes each, with heads and tails
              (J. R. Jackson, UCLA Report 43, 1955; J. Carlier, EJOR 11(1), 1982)                :func:`_one_rank`
              The k-th forward of a stage can't start before h + k max F of the stages up to it, as they all let one
              microbatch pass after the other; what follows it is as much later. The same from the end of the step
              holds for backwards. Only one of the two at a time: microbatches may overtake each other.
    memory    per rank, m times the byte-seconds that a microbatch must occupy there, over the limit, between the first
              head and the last tail                                                             :func:`_memory`

The bounds hold for whole and for split backwards alike where the job splits them (a whole one is ``I`` and ``W`` in a
row, which sends later), and for whole ones only where it doesn't.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from typing import NamedTuple

from autopar.planner.repeating_block import Pass, block_passes, pass_seconds
from autopar.schedules import Costs, Schedule
from autopar.schedules.actions import ABSENT, Action
from autopar.schedules.exchanges import Exchange, exchanges
from autopar.schedules.greedy import Job


def order_bound(schedule: Schedule, costs: Costs) -> float:
    """Of the passes of ``schedule``, in any order; 0 for an asynchronous one, which does other work."""
    if schedule.is_asynchronous:
        return 0.0
    job = Job(schedule.placement, schedule.microbatches, costs, schedule.head, schedule.embedding, split=True)
    return makespan_bound(job)


def makespan_bound(job: Job) -> float:
    """Seconds that every schedule of ``job`` takes at least."""
    paths = _Paths(job)
    bounds = [paths.head[a] + paths.seconds[a] + paths.tail[a] for a in paths.order]
    for rank in range(job.ranks):
        own = [a for a in paths.order if a.rank == rank]
        bounds.append(_one_rank(_from_front(paths, rank, own)))
        bounds.append(_one_rank(_from_back(paths, rank, own)))
        if job.limit_bytes is not None:
            bounds.append(_memory(paths, rank, own, job.limit_bytes[rank]))
    return max(bounds)


class _Edge(NamedTuple):
    """What needs what, and the seconds of communication between."""

    before: Pass
    after: Pass
    seconds: float


class _Paths:
    """The passes of one microbatch and the longest paths between them; exchanges are nodes on no rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.before: dict[Pass, list[tuple[Pass, float]]] = {a: [] for a in block_passes(job)}
        self.seconds = {a: pass_seconds(job, a) for a in self.before}
        for e in exchanges(job.head, job.embedding):
            node = Pass(ABSENT, e.kind, ABSENT)
            self.before[node] = []
            self.seconds[node] = min(job.costs.seconds(rank, Action(e.kind, 0)) for rank in range(job.ranks))
        self.after: dict[Pass, list[tuple[Pass, float]]] = {a: [] for a in self.before}
        for before, after, wait in self._edges():
            self.before[after].append((before, wait))
            self.after[before].append((after, wait))
        graph = {a: [b for b, _ in needs] for a, needs in self.before.items()}
        self.order = tuple(TopologicalSorter(graph).static_order())
        self.head: dict[Pass, float] = {}
        for a in self.order:
            self.head[a] = max((self.head[b] + self.seconds[b] + w for b, w in self.before[a]), default=0.0)
        self.tail: dict[Pass, float] = {}
        for a in reversed(self.order):
            users = (w + self.seconds[b] + self.tail[b] for b, w in self.after[a])
            self.tail[a] = max([self._ending(a), *users])

    def forward(self, stage: int) -> Pass:
        return Pass(self.job.placement[stage], "F", stage)

    def backward(self, stage: int) -> Pass:
        return Pass(self.job.placement[stage], "I" if self.job.split else "B", stage)

    def _ending(self, a: Pass) -> float:
        """What a rank does last: reduce the gradients of a stage, update the weights."""
        if a.rank == ABSENT:
            return 0.0
        reduces = a.kind in ("B", "I", "W")
        return self.job.costs.step_seconds[a.rank] + (self.job.costs.reduce_seconds[a.stage] if reduces else 0.0)

    def since(self, first: Pass) -> dict[Pass, float]:
        """Longest path from the start of ``first`` to the start of each pass that needs it."""
        found = {first: 0.0}
        for a in self.order:
            starts = [found[b] + self.seconds[b] + w for b, w in self.before[a] if b in found]
            if starts:
                found[a] = max(starts)
        return found

    def until(self, last: Pass) -> dict[Pass, float]:
        """Longest path from the start of each pass that ``last`` needs to the start of ``last``."""
        found = {last: 0.0}
        for a in reversed(self.order):
            starts = [self.seconds[a] + w + found[b] for b, w in self.after[a] if b in found]
            if starts:
                found[a] = max(starts)
        return found

    def _edges(self) -> Iterator[_Edge]:
        job, costs = self.job, self.job.costs
        for stage, rank in enumerate(job.placement):
            forward, backward = self.forward(stage), self.backward(stage)
            yield _Edge(forward, backward, 0.0)
            if job.split:
                yield _Edge(backward, Pass(rank, "W", stage), 0.0)
            if stage + 1 < job.stages:
                apart = job.placement[stage + 1] != rank
                yield _Edge(forward, self.forward(stage + 1), apart * costs.send_forward_seconds[stage])
                yield _Edge(self.backward(stage + 1), backward, apart * costs.send_backward_seconds[stage + 1])
        for e in exchanges(job.head, job.embedding):
            yield from self._exchange_edges(e)

    def _exchange_edges(self, e: Exchange) -> Iterator[_Edge]:
        node = Pass(ABSENT, e.kind, ABSENT)
        for before in self._ends(e.source, e.source_at):
            yield _Edge(before, node, 0.0)
        for after in self._ends(e.target, e.target_at):
            yield _Edge(node, after, 0.0)

    def _ends(self, kind: str, at: str) -> list[Pass]:
        if at:
            stage = 0 if at == "first" else self.job.stages - 1
            return [self.backward(stage) if kind == "B" else self.forward(stage)]
        return [a for a in self.before if a.kind == kind]


class _Task(NamedTuple):
    release: float
    seconds: float
    tail: float


def _from_front(paths: _Paths, rank: int, own: list[Pass]) -> Iterator[_Task]:
    """All passes of ``rank``; microbatch k is the one whose forward starts k-th in the rank's first stage."""
    stage = paths.job.held[rank][0]
    first = paths.forward(stage)
    gap = max(paths.seconds[paths.forward(s)] for s in range(stage + 1))
    since = paths.since(first)
    for a in own:
        for k in range(paths.job.microbatches):
            after = paths.head[first] + k * gap + since[a] if a in since else 0.0
            yield _Task(max(paths.head[a], after), paths.seconds[a], paths.tail[a])


def _from_back(paths: _Paths, rank: int, own: list[Pass]) -> Iterator[_Task]:
    """All passes of ``rank``; microbatch k is the one whose backward ends k-th to last in the rank's first stage."""
    stage = paths.job.held[rank][0]
    last = paths.backward(stage)
    gap = max(paths.seconds[paths.backward(s)] for s in range(stage + 1))
    until = paths.until(last)
    ending = paths.seconds[last] + paths.tail[last]
    for a in own:
        for k in range(paths.job.microbatches):
            before = until[a] - paths.seconds[a] + ending + k * gap if a in until else 0.0
            yield _Task(paths.head[a], paths.seconds[a], max(paths.tail[a], before))


def _one_rank(tasks: Iterable[_Task]) -> float:
    """The shortest preemptive sequence on one rank: of what is there, always the part with the longest tail."""
    waiting: list[tuple[float, float]] = []  # minus the tail, seconds left
    coming = sorted(tasks, reverse=True)
    now = end = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1].release)
        while coming and coming[-1].release <= now:
            task = coming.pop()
            heapq.heappush(waiting, (-task.tail, task.seconds))
        negative_tail, left = heapq.heappop(waiting)
        until = min(now + left, coming[-1].release) if coming else now + left
        if until < now + left:
            heapq.heappush(waiting, (negative_tail, now + left - until))
        else:
            end = max(end, until - negative_tail)
        now = until
    return end


def _memory(paths: _Paths, rank: int, own: list[Pass], limit: int) -> float:
    """The time in which ``limit`` bytes offer the byte-seconds that all microbatches need on ``rank``."""
    job, costs = paths.job, paths.job.costs
    amounts, needed = [], 0.0
    for stage in job.held[rank]:
        kept, later = costs.activation_bytes[stage], min(costs.later_bytes[stage], costs.activation_bytes[stage])
        backward = paths.backward(stage)
        needed += kept * (paths.since(paths.forward(stage))[backward] + paths.seconds[backward])
        amounts.append(kept)
        if job.split:
            needed += later * paths.seconds[Pass(rank, "W", stage)]
            amounts.append(costs.later_bytes[stage])
    if job.head and costs.logits_bytes:
        scores, table = Pass(rank, "S", ABSENT), Pass(rank, "T", ABSENT)
        needed += costs.logits_bytes * (paths.since(scores)[table] + paths.seconds[table])
        amounts.append(costs.logits_bytes)
    unit = math.gcd(*amounts)
    if not unit:
        return 0.0
    begin = min(paths.head[a] for a in own if a.kind in ("F", "S"))
    after = min(paths.tail[a] for a in own if a.kind in ("B", "I", "W", "T"))
    return begin + job.microbatches * needed / (limit // unit * unit) + after
