"""Discrete-event timeline of a schedule: when each rank does what, what it keeps, and how long it idles.

The semantics are those of :mod:`autopar.schedules.progress`. Compute and STEP occupy a rank; a send occupies
its channel from the end of the action before it; a REDUCE, a SCATTER and gathers occupy the rank's one reduction
stream; an exchange occupies the one stream of exchanges that all ranks share, from when the last of them posts it. An
OFFLOAD occupies the rank's one stream of copies to the host, a FETCH that of copies back, once its OFFLOAD has ended.
So transfers, exchanges and reductions overlap with compute, and cost time only where something waits for them. A pass
whose weights are gathered layer by layer starts when its rank is free, and ends when its compute could have, or the
gathers have, whichever is later.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Final, NamedTuple

from autopar.errors import ArgumentError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.check import check
from autopar.schedules.flow import (
    COMPUTE,
    EXCHANGES,
    STAGE_KINDS,
    VOCABULARY_KINDS,
    Channel,
    channel,
    is_exchange,
    needs,
)
from autopar.schedules.progress import run_order
from autopar.schedules.weight_moves import GATHERS, PASSES, gather_of, moves_of


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs in each stage, its gradient reduction, and each rank's optimizer step.

    All tuples are per stage, but ``step_seconds`` is per pipeline rank. ``send_forward_seconds[s]`` moves
    stage s's output to the next stage, ``send_backward_seconds[s]`` the gradient of stage s's input to the
    stage before; neighbours on one rank need no transfer. ``activation_bytes[s]`` is kept for each microbatch
    from the start of its forward to the end of its backward, or of ``I``. ``weight_seconds[s]`` is the part of
    ``backward_seconds[s]`` that ``W`` takes, and ``later_bytes[s]`` what is kept for it after ``I``; without them, half
    the time and all the bytes. ``vocabulary_seconds`` has, for each vocabulary pass (``S``) and exchange
    (``SUM_X``), the seconds per pipeline rank; absent: none. ``logits_bytes`` are kept on a rank from ``S`` to ``T``.
    ``gather_seconds[s]`` is one gather of all of stage s's weights, ``scatter_seconds[s]`` one SCATTER of its
    gradients, ``gather_vocabulary_seconds`` a gather of the vocabulary tables; none without them. An OFFLOAD or FETCH
    of stage s moves ``offload_bytes[s]`` of its ``activation_bytes`` in ``offload_seconds[s]``; none without them.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    send_forward_seconds: tuple[float, ...]
    send_backward_seconds: tuple[float, ...]
    reduce_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...] = ()
    later_bytes: tuple[int, ...] = ()
    vocabulary_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    logits_bytes: int = 0
    gather_seconds: tuple[float, ...] = ()
    scatter_seconds: tuple[float, ...] = ()
    gather_vocabulary_seconds: float = 0.0
    offload_seconds: tuple[float, ...] = ()
    offload_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("gather_seconds", "scatter_seconds", "offload_seconds", "offload_bytes"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * len(self.forward_seconds))
        if not self.weight_seconds:
            object.__setattr__(self, "weight_seconds", tuple(seconds / 2 for seconds in self.backward_seconds))
        if not self.later_bytes:
            object.__setattr__(self, "later_bytes", self.activation_bytes)

    @classmethod
    def uniform(
        cls,
        schedule: Schedule,
        *,
        forward_seconds: float,
        backward_seconds: float,
        weight_seconds: float | None = None,
        send_seconds: float = 0.0,
        reduce_seconds: float = 0.0,
        step_seconds: float = 0.0,
        activation_bytes: int = 0,
        vocabulary_seconds: Mapping[str, float] | None = None,
    ) -> Costs:
        """The same cost in every stage and on every rank of ``schedule``."""
        stages, ranks = schedule.stages, schedule.ranks
        return cls(
            forward_seconds=(forward_seconds,) * stages,
            backward_seconds=(backward_seconds,) * stages,
            send_forward_seconds=(send_seconds,) * stages,
            send_backward_seconds=(send_seconds,) * stages,
            reduce_seconds=(reduce_seconds,) * stages,
            activation_bytes=(activation_bytes,) * stages,
            step_seconds=(step_seconds,) * ranks,
            weight_seconds=() if weight_seconds is None else (weight_seconds,) * stages,
            vocabulary_seconds={kind: (s,) * ranks for kind, s in (vocabulary_seconds or {}).items()},
        )

    def seconds(self, rank: int, action: Action) -> float:
        """How long ``action`` takes on ``rank``; a receive takes none of its own."""
        if action.kind == "I":
            return self.backward_seconds[action.stage] - self.weight_seconds[action.stage]
        if action.kind in VOCABULARY_KINDS or action.kind in EXCHANGES:
            per_rank = self.vocabulary_seconds.get(action.kind)
            return per_rank[rank] if per_rank else 0.0
        if action.kind == "GATHER_V":
            return self.gather_vocabulary_seconds
        name = _SECONDS.get(action.kind)
        if name is None:
            return 0.0
        values: tuple[float, ...] = getattr(self, name)
        return values[rank if action.kind in ("STEP", "UPDATE") else action.stage]

    def kept_bytes(self, action: Action) -> int:
        """By how much ``action`` changes what its rank keeps for backwards; a backward frees at its end."""
        if action.kind == "S":
            return self.logits_bytes
        if action.kind == "T":
            return -self.logits_bytes
        if action.stage < 0:
            return 0
        kept, later = self.activation_bytes[action.stage], self.later_bytes[action.stage]
        moved = self.offload_bytes[action.stage]
        changes = {"F": kept, "B": -kept, "I": later - kept, "W": -later, "OFFLOAD": -moved, "FETCH": moved}
        return changes.get(action.kind, 0)

    def without_communication(self) -> Costs:
        free = (0.0,) * len(self.forward_seconds)
        passes = {kind: seconds for kind, seconds in self.vocabulary_seconds.items() if kind in VOCABULARY_KINDS}
        return replace(
            self,
            send_forward_seconds=free,
            send_backward_seconds=free,
            reduce_seconds=free,
            gather_seconds=free,
            scatter_seconds=free,
            gather_vocabulary_seconds=0.0,
            offload_seconds=free,
            vocabulary_seconds=passes,
        )


_SECONDS: Final[Mapping[str, str]] = {
    "F": "forward_seconds",
    "B": "backward_seconds",
    "W": "weight_seconds",
    "SEND_F": "send_forward_seconds",
    "SEND_B": "send_backward_seconds",
    "GATHER": "gather_seconds",
    "GATHER_F": "gather_seconds",
    "GATHER_B": "gather_seconds",
    "SCATTER": "scatter_seconds",
    "OFFLOAD": "offload_seconds",
    "FETCH": "offload_seconds",
    "REDUCE": "reduce_seconds",
    "STEP": "step_seconds",
    "UPDATE": "step_seconds",
}
_PER_RANK: Final = ("step_seconds", "gather_vocabulary_seconds")
_OCCUPIES_RANK: Final = (*COMPUTE, "STEP")
_COUNTS: Final[Mapping[str, int]] = {"F": +1, "B": -1, "W": -1}


class Event(NamedTuple):
    """When one pipeline rank runs an action; a receive ends when the rank is ready and the message there."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


class Kept(NamedTuple):
    """From ``seconds`` on, a rank keeps ``in_flight`` (microbatch, stage) pairs and ``bytes`` for backwards."""

    seconds: float
    in_flight: int
    bytes: int


_KEEPERS: Final = ("F", "B", "I", "W", "S", "T", "OFFLOAD", "FETCH")
_KEEPS_FROM_START: Final = ("F", "S", "FETCH")


@dataclass(frozen=True)
class Timeline:
    """One training step of ``schedule``; ``events`` rank by rank, each in the order of its list.

    Per pipeline rank: ``busy_seconds`` of compute and optimizer; ``peak_in_flight``, the most (microbatch,
    stage) pairs between forward and the last pass of their backward; ``peak_activation_bytes``, the most bytes kept.
    ``exposed_communication_seconds`` is by how much free transfers and reductions would shorten the makespan.
    """

    schedule: Schedule
    costs: Costs
    events: tuple[Event, ...]
    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_activation_bytes: tuple[int, ...]
    exposed_communication_seconds: float

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Per pipeline rank: the makespan less what it is busy."""
        return tuple(self.makespan_seconds - busy for busy in self.busy_seconds)

    def kept(self, rank: int) -> list[Kept]:
        """What ``rank`` keeps for backwards over time: a point after each action that changes it."""
        changes = [
            (event.start_seconds if event.action.kind in _KEEPS_FROM_START else event.end_seconds, event.action)
            for event in self.events
            if event.rank == rank and event.action.kind in _KEEPERS
        ]
        points, count, bytes_ = [], 0, 0
        for seconds, action in sorted(changes, key=lambda change: change[0]):  # an OFFLOAD may end after the next pass
            count += _COUNTS.get(action.kind, 0)
            bytes_ += self.costs.kept_bytes(action)
            points.append(Kept(seconds, count, bytes_))
        return points

    @property
    def bubble_ratio(self) -> float:
        """The share of all ranks' time that is idle, 0 to 1; waiting for communication counts as idle."""
        total = self.makespan_seconds * self.schedule.ranks
        return sum(self.idle_seconds) / total if total else 0.0


def simulate_timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a lowered schedule in simulated time.

    Raises ScheduleError where :func:`autopar.schedules.check` does, ArgumentError for costs of another number
    of stages or ranks, or costs that aren't finite numbers from 0 up.
    """
    check(schedule)
    _check_costs(schedule, costs)
    events = _events(schedule, costs)
    makespan_seconds = _makespan(events)
    free_seconds = _makespan(_events(schedule, costs.without_communication()))
    busy_seconds = [0.0] * schedule.ranks
    for rank, action, start, end in events:
        if action.kind in _OCCUPIES_RANK:
            busy_seconds[rank] += end - start
    timeline = Timeline(
        schedule=schedule,
        costs=costs,
        events=tuple(events),
        makespan_seconds=makespan_seconds,
        busy_seconds=tuple(busy_seconds),
        peak_in_flight=_peaks(schedule, lambda action: _COUNTS.get(action.kind, 0)),
        peak_activation_bytes=_peaks(schedule, costs.kept_bytes),
        exposed_communication_seconds=makespan_seconds - free_seconds,
    )
    return _with_copies_on_their_way(timeline)


def _with_copies_on_their_way(timeline: Timeline) -> Timeline:
    """The peaks where activations are offloaded: what a copy still reads isn't free yet when the next pass begins."""
    ranks = [any(action.kind == "OFFLOAD" for action in row) for row in timeline.schedule.lists]
    peaks = tuple(
        max(point.bytes for point in timeline.kept(rank)) if offloads else peak
        for rank, (offloads, peak) in enumerate(zip(ranks, timeline.peak_activation_bytes, strict=True))
    )
    return replace(timeline, peak_activation_bytes=peaks)


def _check_costs(schedule: Schedule, costs: Costs) -> None:
    named = {item.name: getattr(costs, item.name) for item in fields(costs)}
    del named["logits_bytes"], named["vocabulary_seconds"]
    named["gather_vocabulary_seconds"] = (costs.gather_vocabulary_seconds,) * schedule.ranks
    for name, values in named.items():
        _check_values(schedule, name, values, "rank" if name in _PER_RANK else "stage")
    for kind, values in costs.vocabulary_seconds.items():
        _check_values(schedule, f"vocabulary_seconds[{kind!r}]", values, "rank")


def _check_values(schedule: Schedule, name: str, values: tuple[float, ...], per: str) -> None:
    count = schedule.ranks if per == "rank" else schedule.stages
    if len(values) != count:
        raise ArgumentError(
            f"costs have {len(values)} {name}, but schedule {schedule.name!r} needs {count}, one per {per}"
        )
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ArgumentError(f"{name} of {per} {index} is {value}; it must be finite, from 0 up")


def _makespan(events: list[Event]) -> float:
    return max(event.end_seconds for event in events)


def _peaks(schedule: Schedule, change: Callable[[Action], int]) -> tuple[int, ...]:
    """Per rank, the largest sum of the changes so far.

    The order of the list decides it alone: a rank computes one action at a time.
    """
    return tuple(max(accumulate(map(change, actions), initial=0)) for actions in schedule.lists)


def _events(schedule: Schedule, costs: Costs) -> list[Event]:
    clocks = _Clocks(schedule, costs)
    events: list[list[Event]] = [[] for _ in schedule.lists]
    for rank, action in run_order(schedule):
        updated = schedule.is_asynchronous and action.kind == "STEP"  # every UPDATE was one
        start, end = _ADVANCE[action.kind](clocks, rank, action, 0.0 if updated else costs.seconds(rank, action))
        events[rank].append(Event(rank, action, start, end))
    return [clocks.completed(event) for row in events for event in row]


class _Clocks:
    """When each rank, each channel, each rank's reductions and the exchanges are free next; all in seconds.

    Each method runs one action as soon as it can run and returns its start and end.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        self.streams = moves_of(schedule).gathers == "pass"
        self.gathered: dict[Action, float] = {}  # gather -> when it is complete
        self.rank = [0.0] * schedule.ranks
        self.reductions = [0.0] * schedule.ranks
        self.to_host = [0.0] * schedule.ranks
        self.from_host = [0.0] * schedule.ranks
        self.fetched: dict[Action | None, float] = {}  # OFFLOAD or FETCH -> when it is complete
        self.channel: dict[Channel, float] = defaultdict(float)
        self.arrivals: dict[Channel, deque[float]] = defaultdict(deque)
        self.exchanges = 0.0
        self.posts: dict[Action, list[float]] = defaultdict(list)
        self.complete: dict[Action, float] = {}

    def compute(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        start = self.rank[rank]
        if self.schedule.head:
            start = max([start, *self._exchanged(rank, action)])
        start = max(start, self.gathered.get(_at_start(action), 0.0), self.fetched.get(_fetch_of(action), 0.0))
        self.rank[rank] = start + seconds
        if self.streams and action.kind in PASSES:
            self.rank[rank] = max(self.rank[rank], self._streamed(rank, action, start))
        return start, self.rank[rank]

    def _streamed(self, rank: int, action: Action, start: float) -> float:
        """When the gathers of a pass are complete: begun ahead, or by the pass itself."""
        gather = gather_of(action)
        if gather not in self.gathered:
            begin = max(start, self.reductions[rank])
            self.reductions[rank] = self.gathered[gather] = begin + self.costs.seconds(rank, gather)
        return self.gathered[gather]

    def gather(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        start, end = self.reduce(rank, action, seconds)
        self.gathered[action] = end
        return start, end

    def _exchanged(self, rank: int, action: Action) -> list[float]:
        return [self.complete[need] for need in needs(self.schedule, action, rank) if is_exchange(need)]

    def send(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        stream = channel(rank, action)
        start = max(self.rank[rank], self.channel[stream])
        self.channel[stream] = start + seconds
        self.arrivals[stream].append(start + seconds)
        return start, start + seconds

    def receive(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        start = self.rank[rank]
        self.rank[rank] = max(start, self.arrivals[channel(rank, action)].popleft())
        return start, self.rank[rank]

    def exchange(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        """Posting takes no time; the end is known once the last rank has posted."""
        posts = self.posts[action]
        posts.append(max([self.rank[rank], *self._exchanged(rank, action)]))
        if len(posts) == self.schedule.ranks:
            self.exchanges = max(self.exchanges, *posts) + seconds
            self.complete[action] = self.exchanges
        return posts[-1], posts[-1]

    def completed(self, event: Event) -> Event:
        end = self.complete.get(event.action)
        return event if end is None else event._replace(end_seconds=end)

    def reduce(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        start = max(self.rank[rank], self.reductions[rank])
        self.reductions[rank] = start + seconds
        return start, self.reductions[rank]

    def copy(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        stream = self.to_host if action.kind == "OFFLOAD" else self.from_host
        there = self.fetched.get(Action("OFFLOAD", action.microbatch, action.stage), 0.0)
        start = max(self.rank[rank], stream[rank], there)
        stream[rank] = self.fetched[action] = start + seconds
        return start, stream[rank]

    def step(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        start = max(self.rank[rank], self.reductions[rank])
        self.rank[rank] = start + seconds
        return start, self.rank[rank]


_OF_VOCABULARY: Final = Action("GATHER_V")


def _at_start(action: Action) -> Action:
    """The gather of the step that ``action`` needs, if there is one."""
    return Action("GATHER", stage=action.stage) if action.stage >= 0 else _OF_VOCABULARY


def _fetch_of(action: Action) -> Action | None:
    """The FETCH that a backward waits for, if there is one."""
    return Action("FETCH", action.microbatch, action.stage) if action.kind in ("B", "I") else None


_ADVANCE: Final[Mapping[str, Callable[[_Clocks, int, Action, float], tuple[float, float]]]] = {
    **dict.fromkeys((*STAGE_KINDS, *VOCABULARY_KINDS), _Clocks.compute),
    **dict.fromkeys(EXCHANGES, _Clocks.exchange),
    "SEND_F": _Clocks.send,
    "SEND_B": _Clocks.send,
    "RECV_F": _Clocks.receive,
    "RECV_B": _Clocks.receive,
    **dict.fromkeys(GATHERS, _Clocks.gather),
    "SCATTER": _Clocks.reduce,
    "OFFLOAD": _Clocks.copy,
    "FETCH": _Clocks.copy,
    "REDUCE": _Clocks.reduce,
    "REDUCE_V": _Clocks.reduce,
    "STEP": _Clocks.step,
}
