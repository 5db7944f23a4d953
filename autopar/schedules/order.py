"""When each rank posts its exchanges: in one order for all, timed by a run of the compute lists with unit costs.

In that run an exchange is complete once the last rank has its part for it. Sorted by that time, exchanges are in an
order that all ranks can keep. A rank posts one as soon as it has what its own passes bring into it; but where it brings
nothing (it receives a broadcast), or needs the result of another exchange first, only when that has come: before the
pass during which it does, lest all others wait until that pass is over.
So what a posted exchange waits for never waits for what comes after it in a list. That holds even where
a rank can't go on before an exchange is over that it has posted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import (
    EXCHANGES,
    counterpart,
    is_exchange,
    is_receive,
    needs,
    pass_of,
    rank_exchanges,
)

Seconds = Callable[[int, Action], float]
_UNITS = {"F": 40, "B": 80, "I": 40, "W": 40, "UPDATE": 1, "S": 20, "U": 20, "T": 20, "E": 1, "G": 1}
_LEAST = 1e-9  # a pass must end after it starts, so that what it makes is posted after it
_EMBEDDING = ("SUM_E", "CAST_E")  # of exchanges that complete at the same time, no rank waits for these so soon


def exchange_posts(schedule: Schedule, seconds: Seconds | None = None) -> tuple[dict[int, list[Action]], ...]:
    """Per rank: index in its list of compute actions -> the exchanges that it posts right before it, in order.

    ``seconds`` says how long a rank takes for a pass; without it, unit costs.
    Raises ScheduleError where the lists can't run.
    """
    if not schedule.head:
        return tuple({} for _ in schedule.lists)
    run = _run(schedule, seconds)
    index_of = {kind: index for index, kind in enumerate(EXCHANGES)}
    order = sorted(run.complete, key=lambda e: (run.complete[e], e.kind in _EMBEDDING, e.microbatch, index_of[e.kind]))
    return tuple(_posts(run, rank, order) for rank in range(schedule.ranks))


def _posts(run: _Run, rank: int, order: list[Action]) -> dict[int, list[Action]]:
    found, index = defaultdict[int, list[Action]](list), 0
    for exchange in order:
        own = list(needs(run.schedule, exchange, rank))
        made = [run.end(need, rank) for need in own if not is_exchange(need)]
        if made:
            index = max(index, bisect_left(run.starts[rank], max(made)))
        if len(made) < len(own) or not own:
            arrival = max((run.complete[need] for need in own if is_exchange(need)), default=run.complete[exchange])
            index = max(index, bisect_right(run.stops[rank], arrival))
        found[index].append(exchange)
    return found


def _run(schedule: Schedule, seconds: Seconds | None) -> _Run:
    """The compute lists as early as they can run."""
    run = _Run(schedule, seconds or (lambda _, action: _UNITS[action.kind]))
    while run.ready:
        rank = run.ready.popleft()
        actions = schedule.lists[rank]
        while run.position[rank] < len(actions) and run.step(rank, actions[run.position[rank]]):
            run.position[rank] += 1
    left = [rank for rank, actions in enumerate(schedule.lists) if run.position[rank] < len(actions)]
    if left:
        stuck = ", ".join(f"rank {rank} in {schedule.lists[rank][run.position[rank]]}" for rank in left[:3])
        raise ScheduleError(f"schedule {schedule.name!r} can't go on: {stuck} need what is never made")
    return run


class _Run:
    """Compute actions at their earliest; communication takes no time."""

    def __init__(self, schedule: Schedule, seconds: Seconds) -> None:
        self.schedule, self.seconds = schedule, seconds
        self.position = [0] * schedule.ranks
        self.clock = [0.0] * schedule.ranks
        self.starts: list[list[float]] = [[] for _ in schedule.lists]
        self.stops: list[list[float]] = [[] for _ in schedule.lists]
        self.ready = deque(range(schedule.ranks))
        self.ends: dict[Action, dict[int, float]] = defaultdict(dict)  # a vocabulary pass has one end per rank
        self.complete: dict[Action, float] = {}
        self.parts: dict[Action, list[tuple[int, Action]]] = {
            exchange: _parts(schedule, exchange) for exchange in rank_exchanges(schedule)
        }
        self.users: dict[Action, list[Action]] = defaultdict(list)
        for exchange, parts in self.parts.items():
            for _, part in parts:
                self.users[part].append(exchange)
        self.blocked: dict[Action, list[int]] = defaultdict(list)

    def step(self, rank: int, action: Action) -> bool:
        """Run ``action`` if what it needs is there; else wait for the first thing that isn't."""
        start = self.clock[rank]
        for need in needs(self.schedule, action, rank):
            source = self._source(need, rank)
            there = self._end(source, rank)
            if there is None:
                self.blocked[source].append(rank)
                return False
            start = max(start, there)
        self.starts[rank].append(start)
        self.clock[rank] = start + max(self.seconds(rank, action), _LEAST)
        self.stops[rank].append(self.clock[rank])
        self.ends[action][rank] = self.clock[rank]
        self.ready.extend(self.blocked.pop(action, ()))
        for exchange in dict.fromkeys(self.users[action]):
            self._try(exchange)
        return True

    def _source(self, need: Action, rank: int) -> Action:
        """What a receive waits for: the pass on the other rank."""
        if not is_receive(need):
            return need
        send = counterpart(rank, need)
        return pass_of(self.schedule, "F" if send.kind == "SEND_F" else "B", send.microbatch, send.stage)

    def end(self, need: Action, rank: int) -> float:
        """When what goes into an exchange on ``rank`` was there."""
        time = self._end(need, rank)
        assert time is not None
        return time

    def _end(self, source: Action, rank: int) -> float | None:
        if is_exchange(source):
            return self.complete.get(source)
        ends = self.ends.get(source, {})
        return ends.get(rank) if source.stage < 0 else next(iter(ends.values()), None)

    def _try(self, exchange: Action) -> None:
        if exchange in self.complete:
            return
        times = []
        for rank, part in self.parts[exchange]:
            time = self._end(part, rank)
            if time is None:
                return
            times.append(time)
        self.complete[exchange] = max(times)
        self.ready.extend(self.blocked.pop(exchange, ()))
        for later in self.users[exchange]:
            self._try(later)


def _parts(schedule: Schedule, exchange: Action) -> list[tuple[int, Action]]:
    """What has to be there before ``exchange`` is complete: (rank, pass or other exchange)."""
    found = ((rank, need) for rank in range(schedule.ranks) for need in needs(schedule, exchange, rank))
    return list(dict.fromkeys(found))
