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

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from autopar.errors import ScheduleError
from autopar.schedules.actions import ABSENT, Action, Schedule, make
from autopar.schedules.flow import COMPUTE, is_send

if TYPE_CHECKING:
    from autopar.schedules.timeline import Costs

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.int64]

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


def goes(microbatches: Places, shares: Places) -> Flags:
    """Whether each is one of a share of microbatches.

    >>> np.flatnonzero(goes(np.arange(16), np.array(3))).tolist()
    [2, 5, 7, 10, 13, 15]
    """
    found: Flags = (microbatches + 1) * shares // ALL > microbatches * shares // ALL
    return found


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
    for copy in passes.copies(shares, room):
        (after if copy.is_after else ahead)[passes.actions[copy.place]].append(passes.made(copy))
    waiting: list[Action] = []
    for action in row:
        if waiting and not is_send(action):
            yield from waiting
            waiting = []
        yield from ahead.get(action, ())
        yield action
        waiting += after.get(action, ())


class Copy(NamedTuple):
    """Where one stands: at which pass, ahead of it or (``is_after``) after; of which kind, of which forward's
    activations. Passes go by number."""

    place: int
    is_after: bool
    kind: str
    forward: int


@dataclass(frozen=True)
class Passes:
    """The compute actions of a rank's list, by how much each changes what it keeps, and when it ``begins`` if nothing
    is waited for. Of each backward (``back``) that leaves time for copies, in order: its ``forward``, the bytes that go
    (``moved``), and ``seconds`` of a copy."""

    actions: list[Action]
    changes: Places
    begins: Array
    back: Places
    forward: Places
    moved: Places
    seconds: Array

    @classmethod
    def of(cls, row: Sequence[Action], rank: int, costs: Costs | None) -> Passes:
        """Without ``costs``, copies take no time, and nothing has bytes."""
        actions = [action for action in row if action.kind in COMPUTE]
        seconds, changes = _by_kind(actions, rank, costs)
        found: list[tuple[int, int, int, float]] = []
        forwards: dict[tuple[int, int], int] = {}
        for index, (kind, microbatch, stage, _) in enumerate(actions):
            if kind == "F":
                forwards[microbatch, stage] = index
            elif kind in ("B", "I") and index - (forward := forwards[microbatch, stage]) > LEAST_BETWEEN:
                copy = (costs.offload_bytes[stage], costs.offload_seconds[stage]) if costs is not None else (0, 0.0)
                found.append((index, forward, *copy))
        back, forth, moved, copies = zip(*found, strict=True) if found else ((),) * 4
        return cls(
            actions,
            changes=np.array(changes, dtype=np.int64),
            begins=np.cumsum([0.0, *seconds]),
            back=np.array(back, dtype=np.int64),
            forward=np.array(forth, dtype=np.int64),
            moved=np.array(moved, dtype=np.int64),
            seconds=np.array(copies, dtype=np.float64),
        )

    def copies(self, shares: Shares, room: float) -> list[Copy]:
        """Those of the ``shares`` of stages, so that the rank keeps at most ``room`` bytes if it can."""
        going = self._going(shares)
        moved = dict(zip(self.forward[going].tolist(), self.moved[going].tolist(), strict=True))
        fetched: dict[int, list[int]] = defaultdict(list)
        for place, forward in zip(self._fetched(going).tolist(), moved, strict=True):
            fetched[place].append(forward)
        found: list[Copy] = []
        under_way: deque[int] = deque()
        kept = 0
        for index, change in enumerate(self.changes.tolist()):
            while under_way and change > 0 and kept + change > room:
                found.append(Copy(index, False, "FREE", under_way[0]))
                kept -= moved[under_way.popleft()]
            kept += change
            if index in moved:
                found.append(Copy(index, True, "OFFLOAD", index))
                under_way.append(index)
            for place in fetched.get(index, ()):
                while place in under_way or (under_way and kept + moved[place] > room):
                    found.append(Copy(index, True, "FREE", under_way[0]))
                    kept -= moved[under_way.popleft()]
                found.append(Copy(index, True, "FETCH", place))
                kept += moved[place]
        return found

    def least_bytes(self, shares: Shares) -> int:
        """The least that the rank keeps at most with :meth:`copies` of these ``shares``: it does in as much room.

        That is if memory is let go of as soon as the forward is over, which a list does where it has to.
        """
        going = self._going(shares)
        away = np.zeros(len(self.changes) + 1, dtype=np.int64)  # before each pass
        np.add.at(away, self.forward[going] + 1, self.moved[going])
        np.subtract.at(away, self._fetched(going) + 1, self.moved[going])
        kept, gone = np.cumsum(self.changes), np.cumsum(away)
        return int(max(np.max(kept - gone[:-1], initial=0), np.max(kept - gone[1:], initial=0)))

    def _fetched(self, going: Flags) -> Places:
        """The passes after which FETCH stands of those ``going``: copies are one after the other, each as late as it
        can be for as many that follow it as a microbatch has on the rank."""
        back, forward, seconds = self.back[going], self.forward[going], self.seconds[going]
        if not len(back):
            return back
        before = np.cumsum([0.0, *seconds])
        ends = self.begins[back] - before[1:]  # when each has to be over, less all up to it
        window = len(np.unique(self._stages[going]))
        tightest = sliding_window_view(np.append(ends, np.full(window - 1, np.inf)), window).min(axis=1)
        begun = np.searchsorted(self.begins, before[:-1] + tightest, side="right") - LEAST_BETWEEN
        found: Places = np.maximum(forward + LEAST_BETWEEN, np.where(seconds > 0, begun, back))
        return np.minimum(back - LEAST_BETWEEN, found)

    def _going(self, shares: Shares) -> Flags:
        """Of backwards, whether what they need is of a microbatch that goes."""
        share = np.array([shares.get(stage, 0) for stage in range(self._stages.max(initial=0) + 1)])
        return goes(self._microbatches, share[self._stages])

    @cached_property
    def _microbatches(self) -> Places:
        return np.array([self.actions[index].microbatch for index in self.back], dtype=np.int64)

    @cached_property
    def _stages(self) -> Places:
        return np.array([self.actions[index].stage for index in self.back], dtype=np.int64)

    def made(self, copy: Copy) -> Action:
        _, microbatch, stage, _ = self.actions[copy.forward]
        action: Action = make((copy.kind, microbatch, stage, ABSENT))
        return action


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
