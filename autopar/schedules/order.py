"""The one order in which all ranks post their exchanges: that in which they could at the earliest.

The compute lists run with unit costs; an exchange is ready once the last rank has its part for it.
"""

from __future__ import annotations

from collections import defaultdict, deque

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

_EMBEDDING = ("SUM_E", "CAST_E")  # of exchanges that are ready at the same time, no rank waits for these so soon
_UNITS = {"F": 2, "B": 4, "I": 2, "W": 2, "UPDATE": 0, "S": 1, "U": 1, "T": 1, "E": 0, "G": 0}


def exchange_order(schedule: Schedule) -> tuple[Action, ...]:
    """All exchanges of a list of compute actions. Raises ScheduleError where the lists can't run."""
    if not schedule.head:
        return ()
    ready = _ready_times(schedule)
    rank_of_kind = {kind: index for index, kind in enumerate(EXCHANGES)}
    return tuple(sorted(ready, key=lambda e: (ready[e], e.kind in _EMBEDDING, e.microbatch, rank_of_kind[e.kind])))


def _ready_times(schedule: Schedule) -> dict[Action, int]:
    """When each exchange is complete, in units, if the compute lists run as early as they can."""
    run = _Run(schedule)
    while run.ready:
        rank = run.ready.popleft()
        actions = schedule.lists[rank]
        while run.position[rank] < len(actions) and run.step(rank, actions[run.position[rank]]):
            run.position[rank] += 1
    left = [rank for rank, actions in enumerate(schedule.lists) if run.position[rank] < len(actions)]
    if left:
        stuck = ", ".join(f"rank {rank} in {schedule.lists[rank][run.position[rank]]}" for rank in left[:3])
        raise ScheduleError(f"schedule {schedule.name!r} can't go on: {stuck} need what is never made")
    return run.complete


class _Run:
    """Compute actions at their earliest; communication takes no time."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.position = [0] * schedule.ranks
        self.clock = [0] * schedule.ranks
        self.ready = deque(range(schedule.ranks))
        self.ends: dict[Action, dict[int, int]] = defaultdict(dict)  # a vocabulary pass has one end per rank
        self.complete: dict[Action, int] = {}
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
            there = self.complete.get(source) if is_exchange(source) else self._end(source, rank)
            if there is None:
                self.blocked[source].append(rank)
                return False
            start = max(start, there)
        self.clock[rank] = start + _UNITS[action.kind]
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

    def _end(self, source: Action, rank: int) -> int | None:
        ends = self.ends.get(source, {})
        return ends.get(rank) if source.stage < 0 else next(iter(ends.values()), None)

    def _try(self, exchange: Action) -> None:
        if exchange in self.complete:
            return
        times = []
        for rank, part in self.parts[exchange]:
            time = self.complete.get(part) if is_exchange(part) else self._end(part, rank)
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
