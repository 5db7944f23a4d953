"""When activations go to the host and come back: ``OFFLOAD3@1`` after ``F3@1``, ``FETCH3@1`` ahead of its backward.

Copies run beside the compute, in streams of their own, one for each direction. ``FREE3@1`` waits for the copy to the
host and lets go of the device's memory, which stays until then: so what a rank keeps is said by its list alone, however
fast copies are. A FREE stands where its memory is needed: ahead of the first action that has no room otherwise, at the
latest ahead of the FETCH. That stands one compute action ahead of the backward that needs it, or as far ahead as the
copies take of all that the rank needs of a microbatch from there on, one after the other; but two passes behind the
forward at least.

Where fewer than two compute actions lie between a forward and its backward, there would be no time in which the device
has the memory: such microbatches stay (the last stage of 1F1B has no others). Of a stage's others, a share goes, evenly
spread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from autopar.errors import ScheduleError
from autopar.schedules.actions import ABSENT, Action, Schedule, make
from autopar.schedules.flow import COMPUTE, is_send

if TYPE_CHECKING:
    from autopar.schedules.timeline import Costs

LEAST_BYTES: Final = 64 * 2**10
"""Smaller tensors stay: there are many of them, and a copy takes longer to start than to run."""

LEAST_BETWEEN: Final = 2

COPIES: Final = ("OFFLOAD", "FREE", "FETCH")

ALL: Final = 8
"""A share of a stage's microbatches is so many of this many that follow each other."""

Shares = Mapping[int, int]
"""Of stages, the share of their microbatches whose activations go to the host."""


class Away(NamedTuple):
    """The ``shares`` of stages' activations that go to the host, so that pipeline ranks keep at most ``room`` bytes
    where that is possible (empty: however many)."""

    shares: Shares
    room: Sequence[float] = ()

    @property
    def moves(self) -> bool:
        """Whether anything goes to the host."""
        return any(self.shares.values())


def goes(microbatch: int, share: int) -> bool:
    """Whether it is one of a ``share`` of microbatches.

    >>> [microbatch for microbatch in range(16) if goes(microbatch, 3)]
    [2, 5, 7, 10, 13, 15]
    """
    return (microbatch + 1) * share // ALL > microbatch * share // ALL


def offloaded(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """The (microbatch, stage) whose activations a lowered list sends to the host."""
    return frozenset((a.microbatch, a.stage) for a in schedule.lists[rank] if a.kind == "OFFLOAD")


def offload_activations(schedule: Schedule, away: Away, costs: Costs | None = None) -> Schedule:
    """A lowered schedule in which the activations go to the host that ``away`` says.

    OFFLOAD comes after the forward and its sends, FETCH after the compute action before the last one ahead of the
    backward, or as far ahead as the passes between take that long, so that a wait for a message there is time for the
    copy too. Raises ScheduleError for an asynchronous schedule with any such stage.
    """
    if any(away.shares.values()) and schedule.is_asynchronous:
        raise ScheduleError(
            f"schedule {schedule.name!r} keeps versions of weights with its activations, which can't go to the host; "
            "use a synchronous schedule (such as 1f1b), or leave offload of activations out"
        )
    rows = zip(schedule.lists, away.room or [inf] * schedule.ranks, strict=True)
    made = (with_offloads(row, away.shares, rank, room, costs) for rank, (row, room) in enumerate(rows))
    return replace(schedule, lists=tuple(map(tuple, made)))


def with_offloads(
    row: Sequence[Action], shares: Shares, rank: int = 0, room: float = inf, costs: Costs | None = None
) -> Iterator[Action]:
    """The ``row`` of one ``rank`` with copies."""
    passes = Passes.of(row, rank, costs)
    ahead: dict[Action, list[Action]] = defaultdict(list)
    after: dict[Action, list[Action]] = defaultdict(list)
    for index, where, kind, forward in passes.copies(shares, room).copies:
        (after if where else ahead)[passes.actions[index]].append(passes.copy(kind, forward))
    waiting: list[Action] = []
    for action in row:
        if waiting and not is_send(action):
            yield from waiting
            waiting = []
        yield from ahead.get(action, ())
        yield action
        waiting += after.get(action, ())


class Copies(NamedTuple):
    """What a rank keeps at most, and its copies: at which pass, whether ahead of it (0) or after (1), of which kind, of
    which forward's activations; passes by number."""

    peak_bytes: int
    copies: list[tuple[int, int, str, int]]


@dataclass(frozen=True)
class Passes:
    """The compute actions of a rank's list, by how much each changes what it keeps, when it ``begins`` if nothing is
    waited for, and what copies there may be: by forward that leaves time for any, the bytes that go; in order, the
    backwards that need these back, with their forwards and the seconds of a copy."""

    actions: list[Action]
    changes: list[int]
    begins: list[float]
    moved: dict[int, int]
    needed: list[tuple[int, int, float]]

    @classmethod
    def of(cls, row: Sequence[Action], rank: int, costs: Costs | None) -> Passes:
        """Without ``costs``, copies take no time, and nothing has bytes."""
        actions = [action for action in row if action.kind in COMPUTE]
        seconds, bytes_ = _by_kind(actions, rank, costs)
        ends = [0.0, *accumulate(seconds)]
        moved, needed = dict[int, int](), list[tuple[int, int, float]]()
        forwards: dict[tuple[int, int], int] = {}
        for index, (kind, microbatch, stage, _) in enumerate(actions):
            if kind == "F":
                forwards[microbatch, stage] = index
            elif kind in ("B", "I") and index - (forward := forwards[microbatch, stage]) > LEAST_BETWEEN:
                moved[forward] = costs.offload_bytes[stage] if costs is not None else 0
                needed.append((index, forward, costs.offload_seconds[stage] if costs is not None else 0.0))
        return cls(actions, bytes_, ends, moved, needed)

    def copies(self, shares: Shares, room: float) -> Copies:
        """Where copies stand of the ``shares`` of stages, so that the rank keeps at most ``room`` bytes if it can."""
        moved, going = self.moved, {place for place in self.moved if self._goes(place, shares)}
        fetched = self._fetched(going)
        found: list[tuple[int, int, str, int]] = []
        under_way: deque[int] = deque()
        kept = peak = 0
        for index, change in enumerate(self.changes):
            while under_way and change > 0 and kept + change > room:
                found.append((index, 0, "FREE", under_way[0]))
                kept -= moved[under_way.popleft()]
            kept += change
            peak = max(peak, kept)
            if index in going:
                found.append((index, 1, "OFFLOAD", index))
                under_way.append(index)
            for place in fetched.get(index, ()):
                while place in under_way or (under_way and kept + moved[place] > room):
                    found.append((index, 1, "FREE", under_way[0]))
                    kept -= moved[under_way.popleft()]
                found.append((index, 1, "FETCH", place))
                kept += moved[place]
                peak = max(peak, kept)
        return Copies(peak, found)

    def _fetched(self, going: Collection[int]) -> dict[int, list[int]]:
        """By pass, the forwards of those ``going`` whose FETCH stands after it: copies are one after the other, each as
        late as it can be for as many that follow it as a microbatch has on the rank."""
        found: dict[int, list[int]] = defaultdict(list)
        needed = [each for each in self.needed if each[1] in going]
        window = len({self.actions[forward].stage for _, forward, _ in needed})
        before = list(accumulate((seconds for *_, seconds in needed), initial=0.0))
        # Of those that follow, which may be the tightest, the tightest last: when it has to be over, less all up to it.
        least = deque[tuple[float, int]]()
        for place in reversed(range(len(needed))):
            index, forward, seconds = needed[place]
            end = self.begins[index] - before[place + 1]
            while least and least[0][0] >= end:
                least.popleft()
            least.appendleft((end, place))
            if least[-1][1] >= place + window:
                least.pop()
            start = bisect_right(self.begins, before[place] + least[-1][0]) - LEAST_BETWEEN if seconds else index
            found[min(index - LEAST_BETWEEN, max(forward + LEAST_BETWEEN, start))].append(forward)
        return {start: places[::-1] for start, places in found.items()}

    def _goes(self, forward: int, shares: Shares) -> bool:
        _, microbatch, stage, _ = self.actions[forward]
        return goes(microbatch, shares.get(stage, 0))

    def copy(self, kind: str, forward: int) -> Action:
        """The one of this ``kind`` of a forward's activations."""
        _, microbatch, stage, _ = self.actions[forward]
        copy: Action = make((kind, microbatch, stage, ABSENT))
        return copy


def _by_kind(actions: Sequence[Action], rank: int, costs: Costs | None) -> tuple[list[float], list[int]]:
    """Seconds of each, and by how many bytes it changes what is kept."""
    if costs is None:
        return [0.0] * len(actions), [0] * len(actions)
    known: dict[tuple[str, int], tuple[float, int]] = {}
    for action in actions:
        if (action.kind, action.stage) not in known:
            known[action.kind, action.stage] = costs.seconds(rank, action), costs.kept_bytes(action)
    both = [known[action.kind, action.stage] for action in actions]
    return [seconds for seconds, _ in both], [bytes_ for _, bytes_ in both]


def offloads_of(schedule: Schedule, rank: int) -> Iterator[Action]:
    """All actions of this module that ``rank`` must have, given those that it offloads."""
    for place in sorted(offloaded(schedule, rank)):
        yield from (Action(kind, *place) for kind in COPIES)


def before_offloads(action: Action, there: Collection[tuple[int, int]]) -> Iterator[Action]:
    """What must come before ``action`` of a rank that offloads ``there``."""
    before = {"OFFLOAD": "F", "FREE": "OFFLOAD", "FETCH": "FREE", "B": "FETCH", "I": "FETCH"}.get(action.kind)
    if before is not None and (action.microbatch, action.stage) in there:
        yield Action(before, action.microbatch, action.stage)
