"""Ranks that run passes as early as they can: the simulated time in which cost-aware generators decide.

A policy says what a rank does next of its stages' passes; the vocabulary passes go in between by one rule for all
policies. What is simulated are compute passes, the time of a send or an exchange, and which pass waits for which; not
that ranks' exchanges wait for each other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from math import inf
from typing import Final, NamedTuple, Protocol

from autopar.errors import ScheduleError
from autopar.schedules.actions import ABSENT, Action, make
from autopar.schedules.exchanges import HEAD_PASSES, seconds_ahead
from autopar.schedules.pass_times import PassTimes

EMBEDDED_AHEAD: Final = 2
"""How many microbatches before its use in the first stage an embedding is computed at the earliest."""


class Pass(NamedTuple):
    """A pass of a stage: ``kind`` is ``F``, ``B``, ``I`` or ``W``."""

    kind: str
    microbatch: int
    stage: int


Lists = tuple[tuple[Pass, ...], ...]
"""By rank, passes of its stages in order."""


class Policy(Protocol):
    def choose(self, run: Eager, rank: int, now: float) -> Pass | None:
        """What ``rank`` starts at ``now``: a pass whose input is there. None: wait for the next arrival."""


class Eager:
    """One step of ``microbatches`` on the ranks of ``placement``.

    ``arrival[role][stage][microbatch]`` is when the input of that ``F`` or ``B`` is on its rank, infinite while that
    isn't known yet.
    """

    def __init__(
        self, placement: tuple[int, ...], microbatches: int, times: PassTimes, head: str = "", embedding: bool = False
    ) -> None:
        self.placement, self.microbatches, self.head, self.embedding = placement, microbatches, head, embedding
        self.ranks, self.last = max(placement) + 1, len(placement) - 1
        self.lists: list[list[Action]] = [[] for _ in range(self.ranks)]
        self.free = [0.0] * self.ranks
        self.first_start = [inf] * self.ranks
        self.arrival = {role: [[inf] * microbatches for _ in placement] for role in "FB"}
        self._send = times.send
        self._seconds = {
            "F": times.forward,
            "I": times.input_gradient,
            "W": times.weight_gradient,
            "B": tuple(map(sum, zip(times.input_gradient, times.weight_gradient, strict=True))),
        }
        self._wakes: list[tuple[float, int]] = []
        self._upcoming: list[list[float]] = [[] for _ in range(self.ranks)]
        self._vocabulary = _Vocabulary(self, times)
        for rank in range(self.ranks):
            self.wake(rank, 0.0)
        if not embedding:
            self.arrival["F"][0] = [0.0] * microbatches

    def run(self, policy: Policy) -> tuple[tuple[Action, ...], ...]:
        """The lists that come out. Raises ScheduleError where the policy leaves passes undone."""
        while self._wakes:
            now, rank = heapq.heappop(self._wakes)
            if self.free[rank] <= now:
                self._step(policy, rank, now)
        self._require_complete()
        return self.made

    @property
    def made(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank has run, in order."""
        return tuple(map(tuple, self.lists))

    def _require_complete(self) -> None:
        for rank, actions in enumerate(self.lists):
            due = self.microbatches * self.placement.count(rank)
            begun = Counter(action.kind for action in actions)
            for what, count, of in (("F", begun["F"], due), ("B", begun["B"] + begun["I"], due)):
                if count < of:
                    raise ScheduleError(f"rank {rank} begins {count} of {of} {what}: the order it keeps to can't run")
            if begun["W"] < begun["I"]:
                raise ScheduleError(
                    f"rank {rank} begins {begun['W']} of {begun['I']} W: the order it keeps to lacks it"
                )

    def _step(self, policy: Policy, rank: int, now: float) -> None:
        if self._vocabulary.due(rank, now):
            return
        chosen = policy.choose(self, rank, now)
        if chosen is not None:
            self._start(rank, chosen, now)
        else:
            self._vocabulary.fill(rank, now)

    @property
    def makespan(self) -> float:
        return max(self.free)

    @property
    def longest_span(self) -> float:
        """The most time between the start of a rank's first pass and the end of its last."""
        return max(end - start for start, end in zip(self.first_start, self.free, strict=True))

    def seconds(self, chosen: Pass) -> float:
        return self._seconds[chosen.kind][chosen.stage]

    def wake(self, rank: int, time: float) -> None:
        heapq.heappush(self._wakes, (time, rank))
        heapq.heappush(self._upcoming[rank], time)

    def next_event(self, rank: int, now: float) -> float:
        """The earliest time after ``now`` of which it is known that something arrives on ``rank``."""
        upcoming = self._upcoming[rank]
        while upcoming and upcoming[0] <= now:
            heapq.heappop(upcoming)
        return upcoming[0] if upcoming else inf

    def occupy(self, rank: int, action: Action, now: float, seconds: float) -> float:
        """``rank`` runs ``action`` from ``now`` on; returns the end."""
        self.lists[rank].append(action)
        self.first_start[rank] = min(self.first_start[rank], now)
        self.free[rank] = now + seconds
        self.wake(rank, now + seconds)
        return now + seconds

    def deliver(self, role: str, stage: int, microbatch: int, time: float) -> None:
        """The input of a pass will be there at ``time``."""
        self.arrival[role][stage][microbatch] = time
        self.wake(self.placement[stage], time)

    def _start(self, rank: int, chosen: Pass, now: float) -> None:
        kind, microbatch, stage = chosen
        end = self.occupy(rank, make((*chosen, ABSENT)), now, self.seconds(chosen))
        if kind == "F":
            if stage == 0:
                self._vocabulary.first_started(microbatch, now)
            if stage < self.last:
                self._pass_on("F", microbatch, stage, stage + 1, end)
            elif self.head:
                self._vocabulary.offer("S", microbatch, end)
            else:
                self.deliver("B", stage, microbatch, end)
        elif kind in ("B", "I"):
            if stage > 0:
                self._pass_on("B", microbatch, stage, stage - 1, end)
            elif self.embedding:
                self._vocabulary.offer("G", microbatch, end)

    def _pass_on(self, role: str, microbatch: int, source: int, target: int, end: float) -> None:
        local = self.placement[source] == self.placement[target]
        self.deliver(role, target, microbatch, end if local else end + self._send)


class _Vocabulary:
    """The vocabulary passes of all ranks: each runs as soon as it can, between two passes of stages.

    The exception is ``T`` of Vocab-2, which nothing waits for: it runs right before the next ``S``, or where the
    rank would wait at least as long as it takes.
    """

    def __init__(self, run: Eager, times: PassTimes) -> None:
        self.run = run
        self.head = HEAD_PASSES[run.head]
        kinds = (*self.head, *(("E", "G") if run.embedding else ()))
        self.seconds = {kind: times.vocabulary.get(kind, (0.0,) * run.ranks) for kind in kinds}
        self.ready = {kind: [inf] * run.microbatches for kind in kinds}
        self.next = {kind: [0] * run.ranks for kind in kinds}
        self.parts = {kind: [0] * run.microbatches for kind in kinds}
        self.ends = {kind: [0.0] * run.microbatches for kind in kinds}
        self.makes_x = {"": "", "vocab-2": "S"}.get(run.head, "T")
        self.defers = run.head == "vocab-2"
        self.order = (*reversed(self.head), *(("E", "G") if run.embedding else ()))
        self.ahead = seconds_ahead(run.head, run.embedding, times.exchanges)
        for microbatch in range(min(EMBEDDED_AHEAD, run.microbatches) if run.embedding else 0):
            self.offer("E", microbatch, 0.0)

    def offer(self, kind: str, microbatch: int, time: float) -> None:
        """Every rank can run this pass once what it needs, which is made at ``time``, was exchanged."""
        time += self.ahead.get(kind, 0.0)
        self.ready[kind][microbatch] = time
        for rank in range(self.run.ranks):
            self.run.wake(rank, time)

    def first_started(self, microbatch: int, now: float) -> None:
        ahead = microbatch + EMBEDDED_AHEAD
        if self.run.embedding and ahead < self.run.microbatches:
            self.offer("E", ahead, now)

    def due(self, rank: int, now: float) -> bool:
        """Start the vocabulary pass that is next on ``rank``, if one is."""
        for kind in self.order:
            if self._is_ready(kind, rank, now) and not (kind == "T" and self.defers and not self._slot(rank, now)):
                self._start(kind, rank, now)
                return True
        return False

    def _is_ready(self, kind: str, rank: int, now: float) -> bool:
        microbatch = self.next[kind][rank]
        return microbatch < self.run.microbatches and self.ready[kind][microbatch] <= now

    def _slot(self, rank: int, now: float) -> bool:
        """Whether the ``S`` that follows a deferred ``T`` is there too, or none is left."""
        return self.next["S"][rank] == self.run.microbatches or self._is_ready("S", rank, now)

    def fill(self, rank: int, now: float) -> None:
        """Use the time in which ``rank`` waits."""
        if not self.defers or not self._is_ready("T", rank, now):
            return
        if now + self.seconds["T"][rank] <= self.run.next_event(rank, now):
            self._start("T", rank, now)

    def _start(self, kind: str, rank: int, now: float) -> None:
        microbatch = self.next[kind][rank]
        self.next[kind][rank] += 1
        end = self.run.occupy(rank, Action(kind, microbatch), now, self.seconds[kind][rank])
        self.ends[kind][microbatch] = max(self.ends[kind][microbatch], end)
        self.parts[kind][microbatch] += 1
        if self.parts[kind][microbatch] == self.run.ranks:
            self._complete(kind, microbatch, self.ends[kind][microbatch])

    def _complete(self, kind: str, microbatch: int, time: float) -> None:
        """All ranks have their part."""
        if kind == "E":
            self.run.deliver("F", 0, microbatch, time + self.ahead["F"])
        if kind == self.makes_x:
            self.run.deliver("B", self.run.last, microbatch, time + self.ahead["B"])
        if kind in self.head[:-1]:
            self.offer(self.head[self.head.index(kind) + 1], microbatch, time)


class InOrder:
    """The policy that keeps the order of given lists; each pass waits for its turn and its input."""

    def __init__(self, lists: Lists) -> None:
        self.lists = lists
        self.position = [0] * len(lists)

    def choose(self, run: Eager, rank: int, now: float) -> Pass | None:
        if self.position[rank] == len(self.lists[rank]):
            return None
        chosen = self.lists[rank][self.position[rank]]
        if chosen.kind != "W":
            role = "F" if chosen.kind == "F" else "B"
            if run.arrival[role][chosen.stage][chosen.microbatch] > now:
                return None
        self.position[rank] += 1
        return chosen
