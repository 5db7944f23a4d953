"""Discrete-event timeline of a schedule: when each rank does what, what it keeps, and how long it idles.

The semantics are those of :mod:`autopar.schedules.progress`. Compute and STEP occupy a rank; a send occupies
its channel from the end of the action before it; a REDUCE, a SCATTER and gathers occupy the rank's one reduction
stream; the sums of the first two begin beside the pass that completes their terms, if the stream is free; an exchange
occupies the one stream of exchanges that all ranks share, from when the last of them posts it. An OFFLOAD occupies the
rank's one stream of copies to the host, a FREE waits for its end; a FETCH occupies that of copies back.
So transfers, exchanges and reductions overlap with compute, and cost time only where something waits for them. A pass
whose weights are gathered layer by layer starts when its rank is free, and ends when its compute could have, or the
gathers have, whichever is later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from autopar.errors import ArgumentError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.check import check
from autopar.schedules.flow import COMPUTE, EXCHANGES, VOCABULARY_KINDS
from autopar.schedules.lower import lower
from autopar.schedules.offloads import Away, offload_activations
from autopar.schedules.sweep import Sweep, sweep_of
from autopar.schedules.weight_moves import WeightMoves


@dataclass(frozen=True)
class Costs:
    """What one microbatch costs in each stage, its gradient reduction, and each rank's optimizer step.

    All tuples are per stage, but ``step_seconds`` is per pipeline rank. ``send_forward_seconds[s]`` moves stage s's
    output to the next stage, ``send_backward_seconds[s]`` the gradient of stage s's input to the stage before;
    neighbours on one rank need no transfer. ``activation_bytes[s]`` is kept for each microbatch from the start of its
    forward to the end of its backward, or of ``I``. ``weight_seconds[s]`` is the part of ``backward_seconds[s]`` that
    ``W`` takes, and ``later_bytes[s]`` what is kept for it after ``I``; without them, half the time and all the bytes.
    ``whole_seconds[s]`` is a backward in one pass, ``B``: it takes ``joined_seconds[s]`` longer than
    ``backward_seconds[s]`` (below 0: less); without them, as long. ``vocabulary_seconds`` has, for each vocabulary pass
    (``S``) and exchange (``SUM_X``), the seconds per pipeline rank; absent: none. ``logits_bytes`` are kept on a rank
    from ``S`` to ``T``. ``gather_seconds[s]`` is one gather of all of stage s's weights, ``scatter_seconds[s]`` one
    SCATTER of its gradients, ``gather_vocabulary_seconds`` a gather of the vocabulary tables,
    ``reduce_vocabulary_seconds`` the reduction of their gradients; none without them. ``reduce_seconds[s]`` and
    ``scatter_seconds[s]`` are what is left when the pass ends that completes the gradients, where nothing else is on
    the rank's stream; ``reducing_seconds[s]`` and ``scattering_seconds[s]`` all that is summed, for which the stream is
    busy (without them: no more). An OFFLOAD or FETCH of stage s moves ``offload_bytes[s]`` of its ``activation_bytes``
    in ``offload_seconds[s]``; none without them. Per pipeline rank, ``begin_seconds`` pass before its first action, and
    its STEP ends with ``end_seconds``: sums of scalars over ranks; none without them. Its host issues all of that in
    ``host_seconds``, ahead of the device: no event waits for it, but a step is no shorter.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    send_forward_seconds: tuple[float, ...]
    send_backward_seconds: tuple[float, ...]
    reduce_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...] = ()
    joined_seconds: tuple[float, ...] = ()
    later_bytes: tuple[int, ...] = ()
    vocabulary_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    logits_bytes: int = 0
    gather_seconds: tuple[float, ...] = ()
    scatter_seconds: tuple[float, ...] = ()
    reducing_seconds: tuple[float, ...] = ()
    scattering_seconds: tuple[float, ...] = ()
    gather_vocabulary_seconds: float = 0.0
    reduce_vocabulary_seconds: float = 0.0
    offload_seconds: tuple[float, ...] = ()
    offload_bytes: tuple[int, ...] = ()
    begin_seconds: tuple[float, ...] = ()
    end_seconds: tuple[float, ...] = ()
    host_seconds: tuple[float, ...] = ()
    whole_seconds: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("gather_seconds", "scatter_seconds", "offload_seconds", "offload_bytes"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * len(self.forward_seconds))
        for name in ("begin_seconds", "end_seconds", "host_seconds"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * len(self.step_seconds))
        if not self.weight_seconds:
            object.__setattr__(self, "weight_seconds", tuple(seconds / 2 for seconds in self.backward_seconds))
        if not self.joined_seconds:
            object.__setattr__(self, "joined_seconds", (0.0,) * len(self.backward_seconds))
        whole = tuple(b + more for b, more in zip(self.backward_seconds, self.joined_seconds, strict=True))
        object.__setattr__(self, "whole_seconds", whole)
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
        if action.kind == "REDUCE_V":
            return self.reduce_vocabulary_seconds
        name = _SECONDS.get(action.kind)
        if name is None:
            return 0.0
        if action.kind == "STEP":
            return self.step_seconds[rank] + self.end_seconds[rank]
        values: tuple[float, ...] = getattr(self, name)
        return values[rank if action.kind == "UPDATE" else action.stage]

    def summed_seconds(self, rank: int, action: Action) -> float:
        """For how long what ``action`` sums occupies the rank's stream."""
        whole = {"SCATTER": self.scattering_seconds, "REDUCE": self.reducing_seconds}.get(action.kind)
        return whole[action.stage] if whole else self.seconds(rank, action)

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
        changes = {"F": kept, "B": -kept, "I": later - kept, "W": -later, "FREE": -moved, "FETCH": moved}
        return changes.get(action.kind, 0)

    def without_communication(self) -> Costs:
        free, none = (0.0,) * len(self.forward_seconds), (0.0,) * len(self.step_seconds)
        passes = {kind: seconds for kind, seconds in self.vocabulary_seconds.items() if kind in VOCABULARY_KINDS}
        return replace(
            self,
            send_forward_seconds=free,
            send_backward_seconds=free,
            reduce_seconds=free,
            gather_seconds=free,
            scatter_seconds=free,
            reducing_seconds=free,
            scattering_seconds=free,
            gather_vocabulary_seconds=0.0,
            reduce_vocabulary_seconds=0.0,
            offload_seconds=free,
            vocabulary_seconds=passes,
            begin_seconds=none,
            end_seconds=none,
        )


_SECONDS: Final[Mapping[str, str]] = {
    "F": "forward_seconds",
    "B": "whole_seconds",
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
_OF_TABLES: Final = ("gather_vocabulary_seconds", "reduce_vocabulary_seconds")
_PER_RANK: Final = ("step_seconds", "begin_seconds", "end_seconds", "host_seconds", *_OF_TABLES)
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


class Swept(NamedTuple):
    """A sweep, and when each of its steps starts and ends."""

    sweep: Sweep
    starts: list[float]
    ends: list[float]


_KEEPERS: Final = ("F", "B", "I", "W", "S", "T", "FREE", "FETCH")
_KEEPS_FROM_START: Final = ("F", "S", "FETCH")


@dataclass(frozen=True)
class Timeline:
    """One training step of ``schedule``; ``events`` rank by rank, each in the order of its list, from ``swept``.

    Per pipeline rank: ``busy_seconds`` of compute and optimizer; ``peak_in_flight``, the most (microbatch,
    stage) pairs between forward and the last pass of their backward; ``peak_activation_bytes``, the most bytes kept.
    ``communication_overhead_seconds`` is by how much free transfers and reductions would shorten the makespan; what one
    rank waits for is the exposed communication of a plan's parts.
    """

    schedule: Schedule
    costs: Costs
    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_activation_bytes: tuple[int, ...]
    swept: Swept = field(repr=False, compare=False)

    @property
    def step_seconds(self) -> float:
        """One step after the other, of which hosts issue the next while devices run one: the makespan, or what the
        slowest host takes."""
        return max(self.makespan_seconds, *self.costs.host_seconds)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        starts, ends = self.swept.starts, self.swept.ends
        return tuple(
            Event(rank, action, starts[index], ends[index])
            for rank, (row, places) in enumerate(zip(self.schedule.lists, self.swept.sweep.rows, strict=True))
            for action, index in zip(row, places, strict=True)
        )

    @cached_property
    def communication_overhead_seconds(self) -> float:
        free = self.costs.without_communication()
        _, ends = _run(self.schedule, free, self.swept.sweep)
        return self.makespan_seconds - max(ends)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Per pipeline rank: the makespan less what it is busy."""
        return tuple(self.makespan_seconds - busy for busy in self.busy_seconds)

    def kept(self, rank: int) -> list[Kept]:
        """What ``rank`` keeps for backwards over time: a point after each action that changes it."""
        starts, ends = self.swept.starts, self.swept.ends
        changes = [
            (starts[index] if action.kind in _KEEPS_FROM_START else ends[index], action)
            for action, index in zip(self.schedule.lists[rank], self.swept.sweep.rows[rank], strict=True)
            if action.kind in _KEEPERS
        ]
        points, count, bytes_ = [], 0, 0
        for seconds, action in sorted(changes, key=lambda change: change[0]):  # a FETCH may begin after the next pass
            count += _COUNTS.get(action.kind, 0)
            bytes_ += self.costs.kept_bytes(action)
            points.append(Kept(seconds, count, bytes_))
        return points

    @property
    def idle_share(self) -> float:
        """Of all ranks' time, 0 to 1. Waiting for communication counts as idle; a plan's bubble is one rank's time, and
        leaves it out."""
        total = self.makespan_seconds * self.schedule.ranks
        return sum(self.idle_seconds) / total if total else 0.0


_RECENT: Final = 6
"""Schedules that are remembered: of the largest, a sweep takes tens of megabytes."""


@dataclass(frozen=True)
class _Known:
    """A lowered schedule and its sweep."""

    schedule: Schedule
    sweep: Sweep


@dataclass
class Timelines:
    """Timelines of schedules that a generator and ``lower`` made; each is looked through once for all costs, and for
    any stages whose activations go to the host. The last few are remembered."""

    _known: list[_Known] = field(default_factory=list)
    _lowered: list[tuple[Schedule, WeightMoves, Schedule]] = field(default_factory=list)

    def lowered(self, schedule: Schedule, costs: Costs, moves: WeightMoves) -> Schedule:
        """:func:`autopar.schedules.lower`, which only exchanges make depend on costs."""
        if schedule.head:
            return lower(schedule, costs.seconds, moves)
        for made, moved, found in self._lowered:
            if moved == moves and made == schedule:
                return found
        found = lower(schedule, None, moves)
        self._lowered = [*self._lowered[1 - _RECENT :], (schedule, moves, found)]
        return found

    def of(self, schedule: Schedule, costs: Costs) -> Timeline:
        """:func:`simulate_timeline` of trusted lists."""
        _check_costs(schedule, costs)
        return _timeline(schedule, costs, self._of(schedule).sweep)

    def offloading(self, schedule: Schedule, away: Away, costs: Costs) -> Timeline:
        """The same where activations go to the host (:func:`autopar.schedules.offloads.offload_activations`, which says
        what it raises)."""
        _check_costs(schedule, costs)
        if not any(away.shares.values()):
            return self.of(schedule, costs)
        found = offload_activations(schedule, away, costs)
        return _timeline(found, costs, self._of(schedule).sweep.with_copies(found.lists))

    def _of(self, schedule: Schedule) -> _Known:
        known = self._known
        place = next((n for n, one in enumerate(known) if one.schedule is schedule), None)
        if place is None:
            place = next((n for n, one in enumerate(known) if one.schedule == schedule), None)
        found = _Known(schedule, sweep_of(schedule)) if place is None else known.pop(place)
        known.append(found)
        del known[:-_RECENT]
        return found


def simulate_timeline(schedule: Schedule, costs: Costs, *, trusted: bool = False) -> Timeline:
    """Run a lowered schedule in simulated time. ``trusted``: its lists are as a generator and ``lower`` made them.

    Raises ScheduleError where :func:`autopar.schedules.check` does (of trusted lists, only where ranks wait for each
    other), ArgumentError for costs of another number of stages or ranks, or costs that aren't finite numbers from 0 up.
    """
    if not trusted:
        check(schedule)
    _check_costs(schedule, costs)
    return _timeline(schedule, costs, sweep_of(schedule))


def _timeline(schedule: Schedule, costs: Costs, sweep: Sweep) -> Timeline:
    starts, ends = _run(schedule, costs, sweep)
    changes = [costs.kept_bytes(action) for _, action in sweep.taken]
    counts = [_COUNTS.get(action.kind, 0) for _, action in sweep.taken]
    return Timeline(
        schedule=schedule,
        costs=costs,
        makespan_seconds=max(ends),
        busy_seconds=tuple(_busy(sweep, rank, starts, ends) for rank in range(schedule.ranks)),
        peak_in_flight=_peaks(sweep, counts),
        peak_activation_bytes=_peaks(sweep, changes),
        swept=Swept(sweep, starts, ends),
    )


def _run(schedule: Schedule, costs: Costs, sweep: Sweep) -> tuple[list[float], list[float]]:
    """When each step of its sweep starts and ends."""
    sums = [costs.summed_seconds(rank, action) for rank, action in sweep.taken]
    return sweep.run(_seconds(schedule, sweep, costs), costs.begin_seconds, sums)


def _seconds(schedule: Schedule, sweep: Sweep, costs: Costs) -> list[float]:
    """Of each of the sweep's kinds of action; in an asynchronous schedule, every UPDATE updated what STEP would."""
    updated = schedule.is_asynchronous
    return [
        costs.end_seconds[rank] if updated and action.kind == "STEP" else costs.seconds(rank, action)
        for rank, action in sweep.taken
    ]


def _busy(sweep: Sweep, rank: int, starts: Sequence[float], ends: Sequence[float]) -> float:
    occupies = [action.kind in _OCCUPIES_RANK for _, action in sweep.taken]
    total = 0.0
    for index, place in zip(sweep.rows[rank], sweep.kinds[rank], strict=True):
        if occupies[place]:
            total += ends[index] - starts[index]
    return total


def _check_costs(schedule: Schedule, costs: Costs) -> None:
    named = {item.name: getattr(costs, item.name) for item in fields(costs)}
    del named["logits_bytes"], named["vocabulary_seconds"], named["joined_seconds"]  # which may be below 0
    for name in ("reducing_seconds", "scattering_seconds"):
        if not named[name]:
            del named[name]
    named |= {name: (named[name],) * schedule.ranks for name in _OF_TABLES}
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


def _peaks(sweep: Sweep, changes: Sequence[int]) -> tuple[int, ...]:
    """Per rank, the largest sum of the changes so far, which each of the sweep's kinds of action makes.

    The order of the list decides it alone: a rank computes one action at a time.
    """
    return tuple(max(accumulate(map(changes.__getitem__, places), initial=0)) for places in sweep.kinds)
