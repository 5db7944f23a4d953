"""Lowering: from compute actions to complete lists with communication, reductions and the optimizer step."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import (
    BACKWARDS,
    COMPUTE,
    STAGE_KINDS,
    Channel,
    channel,
    counterpart,
    is_exchange,
    is_receive,
    needs,
    sends,
)
from autopar.schedules.order import exchange_order


def lower(schedule: Schedule) -> Schedule:
    """Add SEND and RECV, exchanges, REDUCE after each stage's last backward, and STEP at the end.

    A send comes right after the action that makes its message, a receive right before the action that needs
    it. Where a rank uses the messages of one channel in another order than they are sent, it receives some of
    them early, in the order of the sends: their sender is past them anyway, so this adds no waiting.
    A rank posts an exchange once it has its part for it and can post those before it in the one order that all
    ranks have (:mod:`.order`); where it has no part, one pass of a stage before it has to.
    Raises ScheduleError for actions that aren't compute, lie on the wrong rank, or need what no rank makes.
    """
    _require_compute(schedule)
    messages = _messages(schedule)
    order = exchange_order(schedule)
    lists = tuple(tuple(_Lowering(schedule, rank, messages, order).run()) for rank in range(schedule.ranks))
    return replace(schedule, lists=lists)


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
        self, schedule: Schedule, rank: int, messages: dict[Channel, deque[Action]], order: tuple[Action, ...]
    ) -> None:
        self.schedule, self.rank, self.messages = schedule, rank, messages
        self.received: set[Action] = set()
        self.posts = deque(order)
        self.posted: set[Action] = set()
        self.done: set[Action] = set()
        self.left = Counter(key for action in schedule.lists[rank] if (key := _reduction(action)) is not None)

    def run(self) -> Iterator[Action]:
        actions = self.schedule.lists[self.rank]
        for index, action in enumerate(actions):
            if action.kind in STAGE_KINDS:
                yield from self._post_ahead(actions, index)
            for need in needs(self.schedule, action, self.rank):
                if is_receive(need):
                    yield from self._receive(action, need)
                elif is_exchange(need):
                    yield from self._post(need)
            yield action
            self.done.add(action)
            yield from sends(self.schedule, action)
            yield from self._post_parts()
            yield from self._reduce(action)
        if self.posts:
            yield from self._post(self.posts[-1])
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

    def _post(self, exchange: Action) -> Iterator[Action]:
        """Post ``exchange`` and all that come before it in the common order."""
        while exchange not in self.posted:
            if not self.posts:
                raise ScheduleError(f"schedule {self.schedule.name!r}, rank {self.rank}: nobody makes {exchange}")
            self.posted.add(self.posts[0])
            yield self.posts.popleft()

    def _post_parts(self) -> Iterator[Action]:
        """Post all that this rank has its part for, as far as the common order lets it."""
        last = None
        for exchange, own in self._postable():
            last = exchange if own else last
        if last is not None:
            yield from self._post(last)

    def _post_ahead(self, actions: tuple[Action, ...], index: int) -> Iterator[Action]:
        """Before a pass of a stage, post what an ``S`` or ``G`` right after it needs.

        All ranks are to run it at about the same time; posted after the pass, it would hold up those that are ready.
        """
        soon = takewhile(lambda action: action.kind not in STAGE_KINDS, islice(actions, index + 1, None))
        wanted = {need for action in soon if action.kind in "SG" for need in needs(self.schedule, action, self.rank)}
        found = [exchange for exchange, _ in self._postable() if exchange in wanted] if wanted else []
        if found:
            yield from self._post(found[-1])

    def _postable(self) -> Iterator[tuple[Action, list[Action]]]:
        """The exchanges that come next and can be posted, each with the passes here that it is made from."""
        for exchange in self.posts:
            own = [need for need in needs(self.schedule, exchange, self.rank) if not is_exchange(need)]
            if not self.done.issuperset(own):
                return
            yield exchange, own

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
