"""The timeline of a lowered schedule as a program over numbered clocks, made once, run for any costs.

Clocks are when ranks, their reductions and copies, channels and exchanges are free next, and when a message, a gather,
a copy or an exchange is there. All but the ranks' start at 0. A step reads some, takes its seconds, and sets some:

==============  ===================================================  ============================================
step            starts at the latest of                              sets
==============  ===================================================  ============================================
compute         rank, what it waits for                              rank
send            rank, channel                                        channel, message
receive         rank (ends when the message is there)                rank
free            rank (ends when the copy to the host has)            rank
gather          rank, the rank's reductions                          reductions, what it gathers
reduce          rank, the rank's reductions                          reductions
copy            rank, the rank's copies that way                     these copies, itself
step            rank, the rank's reductions                          rank
exchange        rank, exchanges it needs (posts, in no time)         by the last post: exchanges, itself
==============  ===================================================  ============================================

A pass whose weights are gathered layer by layer ends when its compute could have, or the gathers have. What a reduce
sums runs beside the pass before it, as far as reductions are free meanwhile: it ends what is left of it then (its
seconds) after that pass, or all of it after reductions are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from autopar.schedules.actions import ABSENT, Action, Schedule, make
from autopar.schedules.flow import COMPUTE, EXCHANGES, RECEIVES, SENDS, exchanged
from autopar.schedules.offloads import COPIES
from autopar.schedules.progress import run_order
from autopar.schedules.weight_moves import GATHERS, PASSES, gather_of, moves_of

COMPUTES, RECEIVES_, SENDS_, WAITS, STREAMS, POSTS, REDUCES = range(7)
Step = tuple[int, int, int, int, int, "Aside | None"]
"""What it is, the place of its seconds, three clocks (``rank`` first), and what is rarer."""


class Aside(NamedTuple):
    """``reads`` and ``sets`` of a step that has several; the place of the gather that a pass begins itself (-1: it was
    begun ahead)."""

    reads: tuple[int, ...]
    sets: tuple[int, ...] = ()
    gather: int = ABSENT


Lists = Sequence[Sequence[Action]]


class Taken(NamedTuple):
    """An action whose seconds and bytes are those of all of its kind and stage on a rank."""

    rank: int
    action: Action


@dataclass(frozen=True)
class Sweep:
    """``steps`` in an order in which they can run; ``taken`` is what their seconds are of. Of each rank, ``rows`` has
    its steps in order, and ``kinds`` their places in ``taken``. ``posts`` are steps that end when a clock says."""

    steps: tuple[Step, ...]
    taken: tuple[Taken, ...]
    rows: tuple[list[int], ...]
    kinds: tuple[list[int], ...]
    posts: tuple[tuple[int, int], ...]
    clocks: int

    def run(
        self, seconds: Sequence[float], begins: Sequence[float] = (), sums: Sequence[float] | None = None
    ) -> tuple[list[float], list[float]]:
        """When each step starts and ends, with the seconds of each of ``taken``, and of all that it ``sums`` (without
        them, as many). A rank is free from ``begins`` on (0 without them)."""
        whole = seconds if sums is None else sums
        clocks = [*begins, *[0.0] * (self.clocks - len(begins))]
        starts: list[float] = []
        ends: list[float] = []
        for code, place, rank, one, other, aside in self.steps:
            start = clocks[rank]
            if code == COMPUTES:
                end = clocks[rank] = start + seconds[place]
            elif code == RECEIVES_:
                there = clocks[one]
                end = start
                if there > start:
                    end = clocks[rank] = there
            elif code == SENDS_:
                if clocks[one] > start:
                    start = clocks[one]
                end = clocks[one] = clocks[other] = start + seconds[place]
            elif code == REDUCES:
                free = clocks[one]
                end = clocks[one] = max(start + seconds[place], free + whole[place])
                start = max(start, free)
            else:
                start, end = _rare(clocks, code, start, seconds, place, aside)
            starts.append(start)
            ends.append(end)
        for index, clock in self.posts:
            ends[index] = clocks[clock]
        return starts, ends

    def with_copies(self, lists: Lists) -> Sweep:
        """Of ``lists`` that are this sweep's, which has none, with copies to the host and back."""
        copying = _Copying(self)
        instead = [copying.steps_of(rank, row) for rank, row in enumerate(lists)]
        made: list[Step] = []
        rows: tuple[list[int], ...] = tuple([] for _ in self.rows)
        kinds: tuple[list[int], ...] = tuple([] for _ in self.rows)
        moved: list[int] = []
        for index, step in enumerate(self.steps):
            rank = step[2]
            for each in instead[rank].get(index, (step,)):
                rows[rank].append(len(made))
                kinds[rank].append(each[1])
                made.append(each)
            moved.append(len(made) - 1)
        posts = tuple((moved[index], clock) for index, clock in self.posts)
        return Sweep(tuple(made), tuple(copying.taken), rows, kinds, posts, copying.clocks)


class _Copying:
    """Steps of copies as they are added to those of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.taken, self.clocks = sweep, list(sweep.taken), sweep.clocks
        self.places: dict[tuple[int, str, int], int] = {}
        self.there: dict[Action, int] = {}

    def steps_of(self, rank: int, row: Sequence[Action]) -> dict[int, list[Step]]:
        """What stands in the place of some of the rank's steps: copies ahead of it, and backwards that wait for one."""
        found: dict[int, list[Step]] = {}
        own = iter(self.sweep.rows[rank])
        copies: list[Step] = []
        for action in row:
            kind, microbatch, stage, _ = action
            if kind in COPIES:
                copies.append(self._copy(rank, action))
                continue
            index = next(own)
            fetched = self.there.get(make(("FETCH", microbatch, stage, ABSENT))) if kind in ("B", "I") else None
            if copies or fetched is not None:
                step = self.sweep.steps[index]
                found[index] = [*copies, step if fetched is None else _waiting(step, fetched)]
                copies = []
        return found

    def _copy(self, rank: int, action: Action) -> Step:
        place = self.places.setdefault((rank, action.kind, action.stage), len(self.taken))
        if place == len(self.taken):
            self.taken.append(Taken(rank, action))
        if action.kind == "FREE":
            return RECEIVES_, place, rank, self.there[make(("OFFLOAD", *action[1:]))], 0, None
        self.there[action], stream = self.clocks, (2 if action.kind == "OFFLOAD" else 3) * len(self.sweep.rows) + rank
        self.clocks += 1
        return WAITS, place, rank, 0, 0, Aside((stream,), (stream, self.there[action]))


def _waiting(step: Step, clock: int) -> Step:
    """A compute step that waits for one clock more."""
    _, place, rank, _, _, aside = step
    if aside is None:
        return WAITS, place, rank, 0, 0, Aside((clock,), (rank,))
    return (*step[:5], aside._replace(reads=(*aside.reads, clock)))


def _rare(
    clocks: list[float], code: int, start: float, seconds: Sequence[float], place: int, aside: Aside | None
) -> tuple[float, float]:
    assert aside is not None
    for clock in aside.reads:
        start = max(start, clocks[clock])
    if code == WAITS:
        end = start + seconds[place]
        for clock in aside.sets:
            clocks[clock] = end
        return start, end
    if code == STREAMS:
        rank, reductions, gathered = aside.sets
        if aside.gather >= 0:
            clocks[reductions] = clocks[gathered] = max(start, clocks[reductions]) + seconds[aside.gather]
        clocks[rank] = max(start + seconds[place], clocks[gathered])
        return start, clocks[rank]
    posted, *complete = aside.sets
    clocks[posted] = max(clocks[posted], start)
    if complete:
        stream, itself = complete
        clocks[stream] = clocks[itself] = max(clocks[stream], clocks[posted]) + seconds[place]
    return start, start


def sweep_of(schedule: Schedule) -> Sweep:
    """The program of a schedule. Raises ScheduleError where its ranks wait for each other."""
    lists = tuple(tuple(action for action in row if action.kind not in COPIES) for row in schedule.lists)
    bare = replace(schedule, lists=lists)  # no rank waits for another's copies
    making = _Making(bare)
    for rank, action in run_order(bare):
        making.add(rank, action)
    made = making.made()
    return made if lists == schedule.lists else made.with_copies(schedule.lists)


class _Making:
    """Steps as they are added; the first clocks are those of the ranks' streams."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, ranks = schedule, schedule.ranks
        self.streams = moves_of(schedule).gathers == "pass"
        self.steps: list[Step] = []
        self.taken: dict[tuple[int, str, int], int] = {}
        self.of: list[Taken] = []
        self.rows: tuple[list[int], ...] = tuple([] for _ in range(ranks))
        self.kinds: tuple[list[int], ...] = tuple([] for _ in range(ranks))
        self.exchanges = 4 * ranks
        self.clocks = 4 * ranks + 1
        self.there: dict[Action, int] = {}  # gather, copy or exchange -> when it is complete
        self.channels: dict[tuple[int, int, str], int] = {}
        self.messages: dict[int, deque[int]] = {}
        self.posted: dict[Action, list[int]] = {}
        self.begun: dict[Action, int] = {}

    def made(self) -> Sweep:
        posts = tuple((index, self.there[exchange]) for exchange, all_ in self.posted.items() for index in all_)
        return Sweep(tuple(self.steps), tuple(self.of), self.rows, self.kinds, posts, self.clocks)

    def add(self, rank: int, action: Action) -> None:
        kind, peer = action.kind, action.peer
        place = self._place(rank, action)
        if kind in RECEIVES:
            message = self.messages[self._channel(peer, rank, "SEND" + kind[4:])].popleft()
            step: Step = (RECEIVES_, place, rank, message, 0, None)
        elif kind in SENDS:
            stream, message = self._channel(rank, peer, kind), self._clock()
            self.messages[stream].append(message)
            step = (SENDS_, place, rank, stream, message, None)
        elif kind in COMPUTE:
            step = self._compute(rank, action, place)
        else:
            step = self._other(rank, action, place)
        self.rows[rank].append(len(self.steps))
        self.kinds[rank].append(place)
        self.steps.append(step)

    def _place(self, rank: int, action: Action) -> int:
        key = rank, action.kind, action.stage
        place = self.taken.get(key)
        if place is None:
            place = self.taken[key] = len(self.of)
            self.of.append(Taken(rank, action))
        return place

    def _clock(self) -> int:
        self.clocks += 1
        return self.clocks - 1

    def _channel(self, source: int, destination: int, send: str) -> int:
        key = source, destination, send
        if key not in self.channels:
            self.channels[key] = self._clock()
            self.messages[self.channels[key]] = deque()
        return self.channels[key]

    def _compute(self, rank: int, action: Action, place: int) -> Step:
        kind, _, stage, _ = action
        reads: list[int] = []
        if self.there:
            reads = self._known((_GATHER_V if stage < 0 else make(("GATHER", ABSENT, stage, ABSENT)),))
            reads += self._known(exchanged(self.schedule, action))
        if self.streams and kind in PASSES:
            return self._streamed(rank, action, place, tuple(reads))
        if reads:
            return WAITS, place, rank, 0, 0, Aside(tuple(reads), (rank,))
        return COMPUTES, place, rank, 0, 0, None

    def _known(self, actions: Iterable[Action]) -> list[int]:
        return [self.there[action] for action in actions if action in self.there]

    def _streamed(self, rank: int, action: Action, place: int, reads: tuple[int, ...]) -> Step:
        gather = gather_of(action)
        begins = ABSENT
        if gather not in self.there:
            self.there[gather] = self._clock()
            begins = self._place(rank, gather)
        aside = Aside(reads, (rank, self.schedule.ranks + rank, self.there[gather]), begins)
        return STREAMS, place, rank, 0, 0, aside

    def _other(self, rank: int, action: Action, place: int) -> Step:
        kind = action.kind
        reductions = self.schedule.ranks + rank
        if kind in EXCHANGES:
            return self._exchange(rank, action, place)
        if kind == "STEP":
            return WAITS, place, rank, 0, 0, Aside((reductions,), (rank,))
        if kind in GATHERS:
            return WAITS, place, rank, 0, 0, Aside((reductions,), (reductions, self._set(action)))
        return REDUCES, place, rank, reductions, 0, None

    def _set(self, action: Action) -> int:
        self.there[action] = self._clock()
        return self.there[action]

    def _exchange(self, rank: int, action: Action, place: int) -> Step:
        """A post; the last one completes the exchange, in the seconds of its rank."""
        reads = tuple(self._known(exchanged(self.schedule, action)))
        if action not in self.posted:
            self.posted[action] = []
            self.begun[action] = self._clock()
        posts = self.posted[action]
        posts.append(len(self.steps))
        sets: tuple[int, ...] = (self.begun[action],)
        if len(posts) == self.schedule.ranks:
            sets = (*sets, self.exchanges, self._set(action))
        return POSTS, place, rank, 0, 0, Aside(reads, sets)


_GATHER_V: Final = Action("GATHER_V")
