"""Discrete-event timeline of a schedule: when each rank does what, what it keeps, and how long it idles.

The semantics are those of :mod:`autopar.schedules.progress`. Compute and STEP occupy a rank; a send occupies
its channel from the end of the action before it; a REDUCE occupies the rank's one reduction stream. So
transfers and reductions overlap with compute, and cost time only where a receive or the STEP waits for them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

from autopar.errors import ArgumentError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.check import check
from autopar.schedules.flow import Channel, channel
from autopar.schedules.progress import run_order


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs in each stage, its gradient reduction, and each rank's optimizer step.

    All tuples are per stage, but ``step_seconds`` is per pipeline rank. ``send_forward_seconds[s]`` moves
    stage s's output to the next stage, ``send_backward_seconds[s]`` the gradient of stage s's input to the
    stage before; neighbours on one rank need no transfer. ``activation_bytes[s]`` is kept for each microbatch
    from the start of its forward to the end of its backward.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    send_forward_seconds: tuple[float, ...]
    send_backward_seconds: tuple[float, ...]
    reduce_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...]

    @classmethod
    def uniform(
        cls,
        schedule: Schedule,
        *,
        forward_seconds: float,
        backward_seconds: float,
        send_seconds: float = 0.0,
        reduce_seconds: float = 0.0,
        step_seconds: float = 0.0,
        activation_bytes: int = 0,
    ) -> Costs:
        """The same cost in every stage and on every rank of ``schedule``."""
        stages = schedule.stages
        return cls(
            forward_seconds=(forward_seconds,) * stages,
            backward_seconds=(backward_seconds,) * stages,
            send_forward_seconds=(send_seconds,) * stages,
            send_backward_seconds=(send_seconds,) * stages,
            reduce_seconds=(reduce_seconds,) * stages,
            activation_bytes=(activation_bytes,) * stages,
            step_seconds=(step_seconds,) * schedule.ranks,
        )

    def seconds(self, rank: int, action: Action) -> float:
        """How long ``action`` takes on ``rank``; a receive takes none of its own."""
        name = _SECONDS.get(action.kind)
        if name is None:
            return 0.0
        values: tuple[float, ...] = getattr(self, name)
        return values[rank if action.kind == "STEP" else action.stage]

    def without_communication(self) -> Costs:
        free = (0.0,) * len(self.forward_seconds)
        return replace(self, send_forward_seconds=free, send_backward_seconds=free, reduce_seconds=free)


_SECONDS: Final[Mapping[str, str]] = {
    "F": "forward_seconds",
    "B": "backward_seconds",
    "SEND_F": "send_forward_seconds",
    "SEND_B": "send_backward_seconds",
    "REDUCE": "reduce_seconds",
    "STEP": "step_seconds",
}
_OCCUPIES_RANK: Final = ("F", "B", "STEP")
_KEEPS: Final[Mapping[str, int]] = {"F": +1, "B": -1}


class Event(NamedTuple):
    """When one pipeline rank runs an action; a receive ends when the rank is ready and the message there."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """One training step of ``schedule``; ``events`` rank by rank, each in the order of its list.

    Per pipeline rank: ``busy_seconds`` of compute and optimizer; ``peak_in_flight``, the most (microbatch,
    stage) pairs whose activations are kept at once; ``peak_activation_bytes``, the most bytes of them.
    ``exposed_communication_seconds`` is by how much free transfers and reductions would shorten the makespan.
    """

    schedule: Schedule
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
    return Timeline(
        schedule=schedule,
        events=tuple(events),
        makespan_seconds=makespan_seconds,
        busy_seconds=tuple(busy_seconds),
        peak_in_flight=_peaks(schedule, (1,) * schedule.stages),
        peak_activation_bytes=_peaks(schedule, costs.activation_bytes),
        exposed_communication_seconds=makespan_seconds - free_seconds,
    )


def _check_costs(schedule: Schedule, costs: Costs) -> None:
    for field in fields(costs):
        values = getattr(costs, field.name)
        per, count = ("rank", schedule.ranks) if field.name == "step_seconds" else ("stage", schedule.stages)
        if len(values) != count:
            raise ArgumentError(
                f"costs have {len(values)} {field.name}, but schedule {schedule.name!r} needs {count}, one per {per}"
            )
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{field.name} of {per} {index} is {value}; it must be finite, from 0 up")


def _makespan(events: list[Event]) -> float:
    return max(event.end_seconds for event in events)


def _peaks(schedule: Schedule, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Per rank, the largest sum of ``weights[stage]`` over the microbatches between forward and backward.

    The order of the list decides it alone: a rank computes one action at a time.
    """
    return tuple(_peak(actions, weights) for actions in schedule.lists)


def _peak(actions: tuple[Action, ...], weights: tuple[int, ...]) -> int:
    kept = peak = 0
    for action in actions:
        if action.kind in _KEEPS:
            kept += _KEEPS[action.kind] * weights[action.stage]
            peak = max(peak, kept)
    return peak


def _events(schedule: Schedule, costs: Costs) -> list[Event]:
    clocks = _Clocks(schedule.ranks)
    events: list[list[Event]] = [[] for _ in schedule.lists]
    for rank, action in run_order(schedule):
        start, end = _ADVANCE[action.kind](clocks, rank, action, costs.seconds(rank, action))
        events[rank].append(Event(rank, action, start, end))
    return [event for row in events for event in row]


class _Clocks:
    """When each rank, each channel and each rank's reduction stream is free next; all in seconds.

    Each method runs one action as soon as it can run and returns its start and end.
    """

    def __init__(self, ranks: int) -> None:
        self.rank = [0.0] * ranks
        self.reductions = [0.0] * ranks
        self.channel: dict[Channel, float] = defaultdict(float)
        self.arrivals: dict[Channel, deque[float]] = defaultdict(deque)

    def compute(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        start = self.rank[rank]
        self.rank[rank] = start + seconds
        return start, self.rank[rank]

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

    def reduce(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        start = max(self.rank[rank], self.reductions[rank])
        self.reductions[rank] = start + seconds
        return start, self.reductions[rank]

    def step(self, rank: int, action: Action, seconds: float) -> tuple[float, float]:
        self.rank[rank] = max(self.rank[rank], self.reductions[rank])
        return self.compute(rank, action, seconds)


_ADVANCE: Final[Mapping[str, Callable[[_Clocks, int, Action, float], tuple[float, float]]]] = {
    "F": _Clocks.compute,
    "B": _Clocks.compute,
    "SEND_F": _Clocks.send,
    "SEND_B": _Clocks.send,
    "RECV_F": _Clocks.receive,
    "RECV_B": _Clocks.receive,
    "REDUCE": _Clocks.reduce,
    "STEP": _Clocks.step,
}
