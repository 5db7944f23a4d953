"""Lowering: from compute actions to complete lists with communication, reductions and the optimizer step."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import (
    BACKWARDS,
    COMPUTE,
    STAGE_KINDS,
    Channel,
    channel,
    counterpart,
    is_receive,
    needs,
    sends,
)
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
    messages = _messages(schedule)
    posts = exchange_posts(schedule, seconds)
    lowerings = (_Lowering(schedule, rank, messages, posts[rank], moves) for rank in range(schedule.ranks))
    return replace(schedule, lists=tuple(tuple(lowering.run()) for lowering in lowerings))


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


def _messages(schedule: Schedule) -> dict[Channel, deque[Action]]:
    """Per channel, the receives of its messages in the order in which they are sent."""
    messages: dict[Channel, deque[Action]] = defaultdict(deque)
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            for send in sends(schedule, action):
                messages[channel(rank, send)].append(counterpart(rank, send))
    return messages


class _Lowering:
    """One rank's list as it grows."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        messages: dict[Channel, deque[Action]],
        posts: dict[int, list[Action]],
        moves: WeightMoves,
    ) -> None:
        self.schedule, self.rank, self.messages, self.posts = schedule, rank, messages, posts
        self.gathers, self.scatters = gather_posts(schedule, rank, moves), moves.scatters
        self.received: set[Action] = set()
        self.left = Counter(key for action in schedule.lists[rank] if (key := _reduction(action)) is not None)

    def run(self) -> Iterator[Action]:
        actions = self.schedule.lists[self.rank]
        yield from self.gathers.pop(0, ())  # before anything that waits
        for index, action in enumerate(actions):
            yield from self.posts.get(index, ())
            for need in needs(self.schedule, action, self.rank):
                if is_receive(need):
                    yield from self._receive(action, need)
            yield from self.gathers.get(index, ())
            yield action
            yield from sends(self.schedule, action)
            if self.scatters and scatters(action):
                yield scatter_of(action)
            yield from self._reduce(action)
        yield from self.posts.get(len(actions), ())
        yield Action("STEP")

    def _receive(self, action: Action, need: Action) -> Iterator[Action]:
        while need not in self.received:
            queue = self.messages[channel(self.rank, need)]
            if not queue:
                raise ScheduleError(
                    f"schedule {self.schedule.name!r}, rank {self.rank}: {action} needs {need}, but rank {need.peer} "
                    f"never makes what {counterpart(self.rank, need)} would send"
                )
            receive = queue.popleft()
            self.received.add(receive)
            yield receive

    def _reduce(self, action: Action) -> Iterator[Action]:
        key = _reduction(action)
        if key is None or self.schedule.is_asynchronous:
            return
        self.left[key] -= 1
        if not self.left[key]:
            yield key


def _reduction(action: Action) -> Action | None:
    """The reduction of the gradients that ``action`` makes."""
    if action.kind in BACKWARDS:
        return Action("REDUCE", stage=action.stage)
    return Action("REDUCE_V") if action.kind in ("T", "G") else None
