"""Lowering: from compute actions to complete lists with communication, reductions and the optimizer step."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import replace
from typing import Final

from autopar.errors import ScheduleError
from autopar.schedules.actions import ABSENT, Action, Schedule, make
from autopar.schedules.flow import BACKWARDS, COMPUTE, STAGE_KINDS, Wire, Wires, counterpart, wires
from autopar.schedules.order import Seconds, exchange_posts
from autopar.schedules.weight_moves import WeightMoves, gather_posts, scatter_of, scatters


def lower(schedule: Schedule, seconds: Seconds | None = None, moves: WeightMoves | None = None) -> Schedule:
    """Add SEND and RECV, exchanges, REDUCE after each stage's last backward, and STEP at the end.

    A send comes right after the action that makes its message, a receive right before the action that needs
    it. Where a rank uses the messages of one channel in another order than they are sent, it receives some of
    them early, in the order of the sends: their sender is past them anyway, so this adds no waiting.
    Exchanges are posted when their time has come, in one order for all ranks (:mod:`.order`); ``seconds``, such as
    ``Costs.seconds``, says how long a rank takes for a pass (None: unit costs). GATHER and SCATTER come where
    ``moves`` asks for them (None: weights are stored as they are used).
    Raises ScheduleError for actions that aren't compute, lie on the wrong rank, or need what no rank makes, and for an
    asynchronous schedule whose ``moves`` has gathers.
    """
    _require_compute(schedule)
    moves = moves or WeightMoves()
    _require_steps(schedule, moves)
    into, out = wires(schedule)
    messages = _messages(schedule, out)
    posts = exchange_posts(schedule, seconds)
    rows = (_Lowering(schedule, rank, messages, posts[rank], moves, into, out) for rank in range(schedule.ranks))
    return replace(schedule, lists=tuple(tuple(row.run()) for row in rows))


def _require_steps(schedule: Schedule, moves: WeightMoves) -> None:
    if schedule.is_asynchronous and moves != WeightMoves():
        raise ScheduleError(
            f"schedule {schedule.name!r} updates each stage's weights while microbatches are under way, so copies that "
            "are gathered from masters would be stale; use a synchronous schedule (such as 1f1b), or leave out ZeRO, "
            "offload of optimizer or parameters, and mixed precision"
        )


def _require_compute(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            if action.kind not in COMPUTE:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, rank {rank}: {action} is there before lowering; "
                    f"lower() takes lists of {', '.join(COMPUTE)} only"
                )
            if action.kind not in STAGE_KINDS:
                continue
            if action.stage >= schedule.stages or schedule.placement[action.stage] != rank:
                stages = [stage for stage, home in enumerate(schedule.placement) if home == rank]
                raise ScheduleError(
                    f"schedule {schedule.name!r}, rank {rank}: {action} is on the wrong rank; "
                    f"the stages of rank {rank} are {stages}"
                )


Messages = dict[tuple[int, int, str], deque[Action]]
"""By sender, receiver and kind of send: the receives of a channel's messages in the order in which they are sent."""


def _messages(schedule: Schedule, out: Wires) -> Messages:
    messages: Messages = defaultdict(deque)
    for rank, actions in enumerate(schedule.lists):
        for kind, microbatch, stage, _ in actions:
            wire = out.get((kind, stage))
            if wire is not None:
                receive = make((wire.receive, microbatch, wire.stage, rank))
                messages[rank, wire.rank, wire.send].append(receive)
    return messages


class _Lowering:
    """One rank's list as it grows."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        messages: Messages,
        posts: dict[int, list[Action]],
        moves: WeightMoves,
        into: Wires,
        out: Wires,
    ) -> None:
        self.schedule, self.rank, self.messages, self.posts = schedule, rank, messages, posts
        self.gathers, self.scatters = gather_posts(schedule, rank, moves), moves.scatters
        self.into, self.out = into, out
        self.early: set[Action] = set()
        self.left: Counter[Action] = Counter()
        if not schedule.is_asynchronous:
            counts = Counter((kind, stage) for kind, _, stage, _ in schedule.lists[rank])
            for (kind, stage), count in counts.items():
                if (reduction := _reduction(kind, stage)) is not None:
                    self.left[reduction] += count

    def run(self) -> list[Action]:
        actions = self.schedule.lists[self.rank]
        row = self.gathers.pop(0, [])  # before anything that waits
        for index, action in enumerate(actions):
            kind, microbatch, stage, _ = action
            if self.posts:
                row += self.posts.get(index, ())
            wire = self.into.get((kind, stage))
            if wire is not None:
                self._receive(row, action, make((wire.receive, microbatch, stage, wire.rank)), wire)
            if self.gathers:
                row += self.gathers.get(index, ())
            row.append(action)
            wire = self.out.get((kind, stage))
            if wire is not None:
                row.append(make((wire.send, microbatch, stage, wire.rank)))
            if self.scatters and scatters(action):
                row.append(scatter_of(action))
            if self.left and (reduction := _reduction(kind, stage)) is not None:
                self._reduce(row, reduction)
        row += self.posts.get(len(actions), ())
        row.append(Action("STEP"))
        return row

    def _receive(self, row: list[Action], action: Action, need: Action, wire: Wire) -> None:
        if need in self.early:
            return
        queue = self.messages[wire.rank, self.rank, wire.send]
        while queue:
            receive = queue.popleft()
            row.append(receive)
            if receive == need:
                return
            self.early.add(receive)
        raise ScheduleError(
            f"schedule {self.schedule.name!r}, rank {self.rank}: {action} needs {need}, but rank {need.peer} "
            f"never makes what {counterpart(self.rank, need)} would send"
        )

    def _reduce(self, row: list[Action], reduction: Action) -> None:
        self.left[reduction] -= 1
        if not self.left[reduction]:
            row.append(reduction)


_OF_VOCABULARY: Final = Action("REDUCE_V")


def _reduction(kind: str, stage: int) -> Action | None:
    """The reduction of the gradients that a pass makes."""
    if kind in BACKWARDS:
        return make(("REDUCE", ABSENT, stage, ABSENT))
    return _OF_VOCABULARY if kind in ("T", "G") else None
