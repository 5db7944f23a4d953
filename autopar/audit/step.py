"""How long a step of given action lists takes: the longest path through what waits for what.

Written from :mod:`autopar.schedules.progress` and the docstring of :mod:`autopar.schedules.timeline` alone, as plainly
as it can be: each action becomes one event (a pass that gathers its weights itself also one of those gathers), an event
waits for others, and starts when the last of them ends. Nothing is ordered by time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import EXCHANGES, channel, is_exchange, is_receive, is_send, needs

Seconds = Callable[[int, Action], float]
"""What an action takes on a pipeline rank, by itself; or, of SCATTER and REDUCE, what all of their sums do."""

_GATHERS: Final = frozenset({"GATHER", "GATHER_V", "GATHER_F", "GATHER_B"})
_SUMS: Final = ("REDUCE", "REDUCE_V", "SCATTER")
_PASSES: Final = {"F": "GATHER_F", "B": "GATHER_B", "I": "GATHER_B"}
_COPIES: Final = frozenset({"OFFLOAD", "FETCH"})
_BEGIN: Final = "begin"

Key = tuple[int, object]
"""An event: the pipeline rank (-1: all), and the action, or what of it is an event of its own."""


@dataclass
class _Event:
    seconds: float = 0.0
    starts: list[Key] = field(default_factory=list)  # it starts when these have ended
    waits: list[Key] = field(default_factory=list)  # it ends no earlier than these


def step_seconds(schedule: Schedule, seconds: Seconds, sums: Seconds, begins: Sequence[float] = ()) -> float:
    """Of a lowered schedule, until the last action has ended. Ranks start after ``begins`` (0 without them)."""
    events: dict[Key, _Event] = {(rank, _BEGIN): _Event(each) for rank, each in enumerate(begins)}
    _Wiring(schedule, seconds, sums, events).wire()
    ends = _ends(events)
    return max(ends.values(), default=0.0)


def _ends(events: Mapping[Key, _Event]) -> dict[Key, float]:
    """By depth-first search; a program that can't run has a cycle, which :func:`autopar.schedules.check` refuses."""
    ends: dict[Key, float] = {}
    for first in events:
        stack = [first]
        while stack:
            key = stack[-1]
            event = events[key]
            missing = [k for k in (*event.starts, *event.waits) if k not in ends]
            if missing and key not in ends:
                stack += missing
                continue
            stack.pop()
            start = max((ends[k] for k in event.starts), default=0.0)
            ends[key] = max([start + event.seconds, *(ends[k] for k in event.waits)])
    return ends


class _Wiring:
    """Who waits for whom, rank by rank."""

    def __init__(self, schedule: Schedule, seconds: Seconds, sums: Seconds, events: dict[Key, _Event]) -> None:
        self._schedule, self._seconds, self._sums, self._events = schedule, seconds, sums, events
        self._streams = any(a.kind in ("GATHER_F", "GATHER_B") for row in schedule.lists for a in row)
        self._sends: dict[object, list[Key]] = defaultdict(list)
        self._receives: dict[object, list[Key]] = defaultdict(list)
        self._last_exchange: Key | None = None

    def wire(self) -> None:
        for rank, actions in enumerate(self._schedule.lists):
            self._rank(rank, actions)
        for stream, receives in self._receives.items():
            for receive, send in zip(receives, self._sends[stream], strict=True):
                self._events[receive].waits.append(send)

    def _rank(self, rank: int, actions: Sequence[Action]) -> None:
        """``before`` is the event that frees the rank; ``last`` by stream of the rank, the one before on it."""
        before: list[Key] = [(rank, _BEGIN)] if (rank, _BEGIN) in self._events else []
        last: dict[object, list[Key]] = defaultdict(list)
        gathers = {a for a in actions if a.kind in _PASSES.values()}
        for action in actions:
            key: Key = (rank, action)
            event = _Event(self._seconds(rank, action), list(before))
            self._events[key] = event
            if is_exchange(action):
                self._exchange(rank, action, event)
            elif is_send(action):
                sent_on = channel(rank, action)
                event.starts += last[sent_on]
                last[sent_on] = [key]
                self._sends[sent_on].append(key)
            elif is_receive(action):
                self._receives[channel(rank, action)].append(key)
                before = [key]
            elif action.kind == "FREE":
                event.starts.append((rank, Action("OFFLOAD", action.microbatch, action.stage)))
                before = [key]
            elif action.kind in _SUMS:
                whole: Key = (rank, ("all of", action))  # from when the stream is free, beside passes
                self._events[whole] = _Event(self._sums(rank, action), list(last["reductions"]))
                event.waits.append(whole)
                last["reductions"] = [key]
            elif action.kind in _GATHERS or action.kind in _COPIES:
                stream = action.kind if action.kind in _COPIES else "reductions"
                event.starts += last[stream]
                last[stream] = [key]
            elif action.kind == "STEP":
                event.starts += last["reductions"]
                before = [key]
            else:
                self._pass(rank, action, event, last, gathers)
                before = [key]

    def _pass(
        self, rank: int, action: Action, event: _Event, last: dict[object, list[Key]], gathers: set[Action]
    ) -> None:
        if self._schedule.head:
            event.starts += [(-1, need) for need in needs(self._schedule, action, rank) if is_exchange(need)]
        own = Action("GATHER", stage=action.stage) if action.stage >= 0 else Action("GATHER_V")
        fetch = Action("FETCH", action.microbatch, action.stage) if action.kind in ("B", "I") else None
        event.starts += [(rank, a) for a in (own, fetch) if (rank, a) in self._events]
        if not self._streams or action.kind not in _PASSES:
            return
        ahead = Action(_PASSES[action.kind], action.microbatch, action.stage)
        if ahead in gathers:
            event.waits.append((rank, ahead))
            return
        itself: Key = (rank, ("gather of", action))
        self._events[itself] = _Event(self._seconds(rank, ahead), [*event.starts, *last["reductions"]])
        last["reductions"] = [itself]
        event.waits.append(itself)

    def _exchange(self, rank: int, action: Action, event: _Event) -> None:
        """Each rank posts it, which takes no time; then it runs on the one stream that all ranks share."""
        event.starts += [(-1, need) for need in needs(self._schedule, action, rank) if is_exchange(need)]
        together: Key = (-1, action)
        if together not in self._events:
            assert action.kind in EXCHANGES
            before = [self._last_exchange] if self._last_exchange else []
            self._events[together] = _Event(event.seconds, before)
            self._last_exchange = together
        self._events[together].starts.append((rank, action))
        event.seconds = 0.0
