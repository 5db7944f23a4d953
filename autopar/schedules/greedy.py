"""Cost-aware list scheduling of a training step's compute passes under a memory limit per rank.

Time is simulated. Whenever a rank is free it starts, of the passes whose inputs are there and that memory admits, the
one that a :class:`Rule` puts first (list scheduling: R. L. Graham, SIAM J. Appl. Math. 17(2), 1969). Sends, exchanges
and what ranks keep for backwards are those of :mod:`autopar.schedules.timeline`.

Memory can't run into a corner. A rank admits a pass of microbatch j only if afterwards all microbatches up to j could
still be finished one after another, the oldest first, inside its limit (the banker's algorithm: E. W. Dijkstra,
EWD 623, with microbatches for customers, which ask in the order of their age). So on every rank the oldest unfinished
microbatch is always admitted, and it can always go on.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf
from typing import Final, NamedTuple

from autopar.errors import ArgumentError, ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.exchanges import exchanges, passes
from autopar.schedules.timeline import Costs

Row = tuple[Action, ...]
Plan = tuple[Mapping[Action, float], ...]
"""Per rank, the time at which each pass should start."""


class Done(NamedTuple):
    """How many of its passes a microbatch has run on a rank: forwards, backwards (``B`` or ``I``), ``S`` and ``T``."""

    forwards: int = 0
    backwards: int = 0
    scores: int = 0
    tables: int = 0


@dataclass(frozen=True)
class Job:
    """What is to be scheduled: ``placement[stage]`` is a pipeline rank, ``limit_bytes`` what each rank may keep.

    ``split`` says whether backwards are two passes, ``I`` and ``W``. Raises ArgumentError for another number of costs
    or limits, ScheduleError for limits below what one microbatch alone needs, naming the smallest that works.
    """

    placement: tuple[int, ...]
    microbatches: int
    costs: Costs
    head: str = ""
    embedding: bool = False
    split: bool = False
    limit_bytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        Schedule(
            "greedy", self.stages, self.microbatches, self.placement, ((),) * self.ranks, self.head, self.embedding
        )
        if len(self.costs.forward_seconds) != self.stages or len(self.costs.step_seconds) != self.ranks:
            raise ArgumentError(
                f"costs are of {len(self.costs.forward_seconds)} stages and {len(self.costs.step_seconds)} ranks, "
                f"but {self.stages} stages are placed on {self.ranks} ranks"
            )
        if self.limit_bytes is None:
            return
        if len(self.limit_bytes) != self.ranks:
            raise ArgumentError(f"{len(self.limit_bytes)} limits of memory for {self.ranks} ranks; give one per rank")
        for rank, (limit, least) in enumerate(zip(self.limit_bytes, self.least_bytes, strict=True)):
            if limit < least:
                raise ScheduleError(
                    f"no schedule keeps rank {rank} within {limit:,} bytes: one microbatch alone needs {least:,}; "
                    f"the smallest limits that work are {list(self.least_bytes)}"
                )

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, its stages in the order of the model."""
        return tuple(tuple(s for s, home in enumerate(self.placement) if home == r) for r in range(self.ranks))

    @cached_property
    def least_bytes(self) -> tuple[int, ...]:
        """Per rank, what a microbatch keeps that runs alone: no schedule needs less, one after the other no more."""
        return tuple(self.need_bytes(rank, Done()) for rank in range(self.ranks))

    def ending(self, rank: int, done: Done) -> Iterator[int]:
        """By how much each pass changes what a microbatch keeps on ``rank`` that goes on alone, the last first."""
        stages, costs = self.held[rank], self.costs
        yield from (costs.activation_bytes[stage] for stage in stages[done.forwards :])
        if self.head:
            yield from ((costs.logits_bytes,) if not done.scores else ())
            yield from ((-costs.logits_bytes,) if not done.tables else ())
        for stage in reversed(stages[: len(stages) - done.backwards]):
            kept, later = costs.activation_bytes[stage], costs.later_bytes[stage]
            yield from (later - kept, -later) if self.split else (-kept,)

    def need_bytes(self, rank: int, done: Done) -> int:
        """What a microbatch still adds on ``rank`` at most, if it goes on alone; later ``W`` aside, which only give."""
        return max(accumulate(self.ending(rank, done), initial=0))

    def schedule(self, name: str, lists: tuple[Row, ...]) -> Schedule:
        return Schedule(name, self.stages, self.microbatches, self.placement, lists, self.head, self.embedding)


@dataclass(frozen=True)
class Rule:
    """What a free rank prefers.

    ``order``: kinds of passes, the first first. ``alternate``: after a forward, the stages' backwards go before
    forwards, and the other way round. ``deep``: of several chunks' forwards, the later stage goes first, not the older
    microbatch. ``hold``: the share of a pass's time that a rank waits for a preferred one known to arrive.
    ``ahead``: how many microbatches before its forward in the first stage an embedding is computed. ``reserve``: of how
    many microbatches' logits forwards leave the room free. ``plan``: instead of all that, the pass with the earliest
    planned start. ``lists``: nothing is free; each rank runs its list in order.
    """

    name: str
    order: tuple[str, ...] = ("E", "S", "U", "T", "B", "G", "F", "W")
    alternate: bool = False
    deep: bool = False
    hold: float = 0.0
    ahead: int = 2
    reserve: int = 1
    plan: Plan | None = field(default=None, repr=False)
    lists: tuple[Row, ...] | None = field(default=None, repr=False)


_LATE_T: Final = ("E", "S", "U", "B", "G", "F", "T", "W")
_FORWARD: Final = ("E", "S", "U", "F", "T", "B", "G", "W")
RULES: Final = (
    Rule("backward"),
    Rule("backward, T late", _LATE_T),
    Rule("backward, T late, hold", _LATE_T, hold=0.5),
    Rule("alternate", alternate=True, ahead=4),
    Rule("alternate, T late", _LATE_T, alternate=True),
    Rule("alternate, no reserve", alternate=True, ahead=4, reserve=0),
    Rule("forward", _FORWARD, ahead=4),
    Rule("forward, no reserve", _FORWARD, ahead=4, reserve=0),
    Rule("forward, deep", _FORWARD, deep=True),
    Rule("alternate, deep", alternate=True, deep=True),
)
"""Priorities worth trying; depth matters where a rank has several chunks, a reserve where logits are kept."""


class Ran(NamedTuple):
    """A compute pass in simulated time."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Run:
    """The passes of each rank in the order in which they ran, and when the optimizer's step ends."""

    job: Job
    name: str
    rows: tuple[tuple[Ran, ...], ...]
    makespan_seconds: float

    @property
    def schedule(self) -> Schedule:
        """The compute actions; :func:`autopar.schedules.lower` adds the rest."""
        return self.job.schedule("greedy", tuple(tuple(ran.action for ran in row) for row in self.rows))


def greedy(job: Job, rule: Rule) -> Run:
    """One run of ``job`` by ``rule``. Raises ScheduleError where ``rule.lists`` can't go on, or exceed the limit."""
    engine = _Engine(job, rule)
    engine.run()
    return Run(job, rule.name, tuple(map(tuple, engine.rows)), engine.makespan())


def replay(job: Job, schedule: Schedule) -> Run:
    """A run that keeps the order of a schedule of compute actions. Raises ScheduleError as :func:`greedy`."""
    return greedy(job, Rule(schedule.name, lists=schedule.lists, ahead=job.microbatches))


class _Lane:
    """All microbatches of one kind of pass of one stage (or vocabulary pass) on one rank."""

    __slots__ = ("adds", "coming", "kind", "ready", "seconds", "stage")

    def __init__(self, kind: str, stage: int, seconds: float, adds: int) -> None:
        self.kind, self.stage, self.seconds, self.adds = kind, stage, seconds, adds
        self.coming: list[tuple[float, int]] = []  # when the inputs of which microbatch will be there
        self.ready: list[tuple[float, int]] = []  # priority inside the lane, microbatch


class _Memory:
    """What one rank keeps, by microbatch, and the banker's question."""

    def __init__(self, job: Job, rank: int) -> None:
        self.limit = inf if job.limit_bytes is None else job.limit_bytes[rank]
        self.need_of = lru_cache(maxsize=None)(lambda done: job.need_bytes(rank, done))
        self.whole = self.need_of(Done())
        self.total = 0
        self.kept = [0] * job.microbatches
        self.state = [Done()] * job.microbatches
        self.need = [self.whole] * job.microbatches
        self.passes = [len(job.held[rank]) * (3 if job.split else 2) + (2 if job.head else 0)] * job.microbatches
        self.oldest = 0

    def admits(self, microbatch: int, adds: int, reserve: int) -> bool:
        """Whether all microbatches up to this one can still end, one after another, once it keeps ``adds`` more.

        All but the oldest also leave ``reserve`` bytes free.
        """
        if self.total + adds + self.whole + reserve <= self.limit:
            return True
        room = self.limit - self.total
        if adds + (reserve if microbatch > self.oldest else 0) > room:
            return False
        for other in range(self.oldest, microbatch):
            if self.need[other] + adds > room:
                return False
            room += self.kept[other]
        return self.need[microbatch] <= room

    def take(self, kind: str, microbatch: int, adds: int) -> None:
        """``microbatch`` runs a pass that changes what it keeps by ``adds``."""
        field_ = _COUNTED.get(kind)
        if field_ is not None:
            done = self.state[microbatch]
            done = self.state[microbatch] = done._replace(**{field_: getattr(done, field_) + 1})
            self.need[microbatch] = self.need_of(done)
        self.total += adds
        self.kept[microbatch] += adds
        self.passes[microbatch] -= field_ is not None or kind == "W"
        while self.oldest < len(self.passes) and not self.passes[self.oldest]:
            self.oldest += 1


_COUNTED: Final = {"F": "forwards", "B": "backwards", "I": "backwards", "S": "scores", "T": "tables"}


class _Engine:
    """The simulation. Times of arrival are known once the pass before has started."""

    def __init__(self, job: Job, rule: Rule) -> None:
        self.job, self.rule = job, rule
        self.rows: list[list[Ran]] = [[] for _ in range(job.ranks)]
        self.free = [0.0] * job.ranks
        self.turn = ["B"] * job.ranks
        self.wakes: list[tuple[float, int, str, int]] = []
        self.channel: dict[tuple[int, int, str], float] = defaultdict(float)
        self.memory = [_Memory(job, rank) for rank in range(job.ranks)]
        self.lanes = [_lanes(job, rank) for rank in range(job.ranks)]
        self.exchange = _Exchanges(self)
        self.backward = "I" if job.split else "B"
        self.position = {kind: index for index, kind in enumerate(rule.order)}
        self.position["I"] = self.position["B"]
        for rank in range(job.ranks):
            self._wake(rank, 0.0)
        for microbatch in range(min(rule.ahead, job.microbatches) if job.embedding else job.microbatches):
            self._release(microbatch, 0.0)

    def _release(self, microbatch: int, time: float) -> None:
        """A microbatch may enter the pipeline."""
        if not self.job.embedding:
            self.arrive("F", 0, microbatch, time)
        else:
            self.everywhere("E", microbatch, time)

    def run(self) -> None:
        while self.wakes:
            now, rank, kind, microbatch = heapq.heappop(self.wakes)
            if rank < 0:
                self.exchange.start(kind, microbatch, now)
            elif self.free[rank] <= now:
                chosen = self._next_in_list(rank, now) if self.rule.lists else self._choose(rank, now)
                if chosen is not None:
                    self._start(rank, *chosen, now)
        self._require_all()

    def _require_all(self) -> None:
        for rank, row in enumerate(self.rows):
            expected = self.job.microbatches * len(self.lanes[rank])
            if len(row) < expected:
                raise ScheduleError(f"{self.rule.name!r} is stuck on rank {rank} after {len(row)} of {expected} passes")

    def makespan(self) -> float:
        """The end of the last optimizer step; a stage's reduction begins after its last backward."""
        return max(map(self._end, range(self.job.ranks)))

    def _end(self, rank: int) -> float:
        costs = self.job.costs
        last = {r.action.stage: r.end_seconds for r in self.rows[rank] if r.action.kind in ("B", "W")}
        reduced = 0.0
        for stage, end in sorted(last.items(), key=lambda item: item[1]):
            sums = costs.summed_seconds(rank, Action("REDUCE", stage=stage))
            reduced = max(end + costs.reduce_seconds[stage], reduced + sums)
        return max(self.free[rank], reduced) + costs.step_seconds[rank]

    # Choosing.

    def _choose(self, rank: int, now: float) -> tuple[_Lane, int] | None:
        best: tuple[tuple[float, ...], _Lane, int] | None = None
        for lane in self.lanes[rank].values():
            self._take_arrived(rank, lane, now)
            if lane.ready and (microbatch := self._admitted(rank, lane)) is not None:
                key = self._key(rank, lane, microbatch)
                if best is None or key < best[0]:
                    best = (key, lane, microbatch)
        if best is None or (self.rule.hold and self._waits(rank, best[0], now + self.rule.hold * best[1].seconds)):
            return None
        return best[1], best[2]

    def _take_arrived(self, rank: int, lane: _Lane, now: float) -> None:
        plan = self.rule.plan
        while lane.coming and lane.coming[0][0] <= now:
            microbatch = heapq.heappop(lane.coming)[1]
            order = float(microbatch) if plan is None else plan[rank].get(_action(lane, microbatch), inf)
            heapq.heappush(lane.ready, (order, microbatch))

    def _admitted(self, rank: int, lane: _Lane) -> int | None:
        """The first microbatch of a lane that memory admits: the one preferred, or the oldest."""
        microbatch = lane.ready[0][1]
        if self._admits(rank, lane, microbatch):
            return microbatch
        oldest = min(waiting for _, waiting in lane.ready)
        return oldest if oldest != microbatch and self._admits(rank, lane, oldest) else None

    def _admits(self, rank: int, lane: _Lane, microbatch: int) -> bool:
        """Forwards leave room for the logits that the microbatches ahead of them will need."""
        if lane.adds <= 0:
            return True
        reserve = self.rule.reserve * self.job.costs.logits_bytes if self.job.head and lane.kind == "F" else 0
        return self.memory[rank].admits(microbatch, lane.adds, reserve)

    def _key(self, rank: int, lane: _Lane, microbatch: int) -> tuple[float, ...]:
        if self.rule.plan is not None:
            return (self.rule.plan[rank].get(_action(lane, microbatch), inf), microbatch)
        position: float = self.position[lane.kind]
        if self.rule.alternate and lane.kind == "F":
            position = self.position["B"] + (-0.5 if self.turn[rank] == "F" else 0.5)
        if lane.kind == "F" and self.rule.deep:
            return (position, -lane.stage, microbatch)
        return (position, microbatch, -lane.stage)

    def _waits(self, rank: int, key: tuple[float, ...], until: float) -> bool:
        """Whether a preferred pass arrives by then; without a plan, only what others wait for counts."""
        kinds = self.position if self.rule.plan is not None else ("B", "I", "S")
        return any(
            lane.coming[0][0] <= until and self._key(rank, lane, lane.coming[0][1]) < key
            for lane in self.lanes[rank].values()
            if lane.kind in kinds and lane.coming and self._admits(rank, lane, lane.coming[0][1])
        )

    def _next_in_list(self, rank: int, now: float) -> tuple[_Lane, int] | None:
        row = (self.rule.lists or ())[rank]
        done = len(self.rows[rank])
        if done == len(row):
            return None
        action = row[done]
        lane = self.lanes[rank].get((action.kind, action.stage))
        if lane is None:
            raise ScheduleError(f"{self.rule.name!r}, rank {rank}: {action} isn't one of its passes")
        self._take_arrived(rank, lane, now)
        found = next((entry for entry in lane.ready if entry[1] == action.microbatch), None)
        return None if found is None else (lane, action.microbatch)

    # Running.

    def _start(self, rank: int, lane: _Lane, microbatch: int, now: float) -> None:
        lane.ready.remove(next(entry for entry in lane.ready if entry[1] == microbatch))
        heapq.heapify(lane.ready)
        end = now + lane.seconds
        action = _action(lane, microbatch)
        self.rows[rank].append(Ran(action, now, end))
        self.free[rank] = end
        self._wake(rank, end)
        self._account(rank, lane, microbatch)
        if lane.kind in ("F", "B", "I"):
            self.turn[rank] = "B" if lane.kind == "F" else "F"
        self._deliver(rank, lane, microbatch, now, end)

    def _account(self, rank: int, lane: _Lane, microbatch: int) -> None:
        memory = self.memory[rank]
        memory.take(lane.kind, microbatch, lane.adds)
        if memory.total > memory.limit:
            raise ScheduleError(
                f"{self.rule.name!r}, rank {rank}: {_action(lane, microbatch)} would keep {memory.total:,} bytes; "
                f"the limit is {memory.limit:,}"
            )

    def _deliver(self, rank: int, lane: _Lane, microbatch: int, now: float, end: float) -> None:
        kind, stage, last = lane.kind, lane.stage, self.job.stages - 1
        if kind == "F" and stage < last:
            self._send("F", stage, stage + 1, microbatch, end)
        elif kind == "F" and not self.job.head:
            self.arrive(self.backward, last, microbatch, end)
        elif kind in ("B", "I") and stage > 0:
            self._send(self.backward, stage, stage - 1, microbatch, end)
        if kind == "I":
            self.arrive("W", stage, microbatch, end)
        if kind == "F" and stage == 0 and self.job.embedding:
            ahead = microbatch + self.rule.ahead
            if ahead < self.job.microbatches:
                self._release(ahead, now)
        self.exchange.part("B" if kind == "I" else kind, stage, microbatch, end)

    def _send(self, kind: str, source: int, target: int, microbatch: int, end: float) -> None:
        ranks = self.job.placement[source], self.job.placement[target]
        if ranks[0] != ranks[1]:
            costs = self.job.costs
            seconds = (costs.send_forward_seconds if kind == "F" else costs.send_backward_seconds)[source]
            end = self.channel[*ranks, kind] = max(end, self.channel[*ranks, kind]) + seconds
        self.arrive(kind, target, microbatch, end)

    def arrive(self, kind: str, stage: int, microbatch: int, time: float) -> None:
        rank = self.job.placement[stage]
        heapq.heappush(self.lanes[rank][kind, stage].coming, (time, microbatch))
        self._wake(rank, time)

    def everywhere(self, kind: str, microbatch: int, time: float) -> None:
        """Every rank can run this vocabulary pass from ``time`` on."""
        for rank in range(self.job.ranks):
            heapq.heappush(self.lanes[rank][kind, -1].coming, (time, microbatch))
            self._wake(rank, time)

    def _wake(self, rank: int, time: float) -> None:
        heapq.heappush(self.wakes, (time, rank, "", 0))


class _Exchanges:
    """The one stream of exchanges, in the order in which they become ready."""

    def __init__(self, engine: _Engine) -> None:
        self.engine, job = engine, engine.job
        self.free = 0.0
        self.table = exchanges(job.head, job.embedding)
        self.parts = {kind: [count] * job.microbatches for kind, count in _parts(job).items()}
        self.ready = {kind: [0.0] * job.microbatches for kind in self.parts}
        self.seconds = {kind: job.costs.seconds(0, Action(kind, 0)) for kind in self.parts}
        self.into: dict[str, tuple[tuple[str, str], ...]] = defaultdict(tuple)  # source -> (exchange, where)
        for e in self.table:
            if (e.kind, e.source_at) not in self.into[e.source]:
                self.into[e.source] += ((e.kind, e.source_at),)

    def part(self, source: str, stage: int, microbatch: int, time: float) -> None:
        for kind, at in self.into.get(source, ()):
            if not at or stage == (0 if at == "first" else self.engine.job.stages - 1):
                self._add(kind, microbatch, time)

    def _add(self, kind: str, microbatch: int, time: float) -> None:
        ready = self.ready[kind][microbatch] = max(self.ready[kind][microbatch], time)
        self.parts[kind][microbatch] -= 1
        if not self.parts[kind][microbatch]:
            heapq.heappush(self.engine.wakes, (ready, -1, kind, microbatch))

    def start(self, kind: str, microbatch: int, now: float) -> None:
        self.free = end = max(self.free, now) + self.seconds[kind]
        job = self.engine.job
        for e in self.table:
            if e.kind != kind:
                continue
            if e.target in self.parts:
                self._add(e.target, microbatch, end)
            elif e.target_at:
                target = self.engine.backward if e.target == "B" else e.target
                self.engine.arrive(target, 0 if e.target_at == "first" else job.stages - 1, microbatch, end)
            else:
                self.engine.everywhere(e.target, microbatch, end)


def _parts(job: Job) -> dict[str, int]:
    """How many passes and other exchanges each exchange of a microbatch waits for."""
    table = exchanges(job.head, job.embedding)
    sources = {(e.kind, e.source, e.source_at) for e in table}
    counts = {e.kind: 0 for e in table}
    for kind, _, at in sources:
        counts[kind] += 1 if at else job.ranks
    for kind, target in {(e.kind, e.target) for e in table}:
        if target in counts and kind != target:
            counts[target] += 1
    return counts


def _lanes(job: Job, rank: int) -> dict[tuple[str, int], _Lane]:
    kinds = ("F", "I", "W") if job.split else ("F", "B")
    actions = [Action(kind, 0, stage) for stage in job.held[rank] for kind in kinds]
    actions += [Action(kind, 0) for kind in passes(job.head, job.embedding)]
    costs = job.costs
    return {(a.kind, a.stage): _Lane(a.kind, a.stage, costs.seconds(rank, a), costs.kept_bytes(a)) for a in actions}


def _action(lane: _Lane, microbatch: int) -> Action:
    return Action(lane.kind, microbatch, lane.stage)
