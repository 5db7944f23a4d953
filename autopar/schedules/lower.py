"""Lowering: from compute actions to complete lists with communication, reductions and the optimizer step."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import COMPUTE, Channel, channel, counterpart, is_receive, needs, sends


def lower(schedule: Schedule) -> Schedule:
    """Add SEND and RECV, REDUCE after each stage's last backward, and STEP at the end, for any placement.

    A send comes right after the action that makes its message, a receive right before the action that needs
    it. Where a rank uses the messages of one channel in another order than they are sent, it receives some of
    them early, in the order of the sends: their sender is past them anyway, so this adds no waiting.
    Raises ScheduleError for actions that aren't compute, lie on the wrong rank, or need what no rank makes.
    """
    _require_compute(schedule)
    messages = _messages(schedule)
    lists = tuple(tuple(_lower_list(schedule, rank, messages)) for rank in range(schedule.ranks))
    return replace(schedule, lists=lists)


def _require_compute(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.lists):
        for action in actions:
            if action.kind not in COMPUTE:
                raise ScheduleError(
                    f"schedule {schedule.name!r}, rank {rank}: {action} is there before lowering; "
                    f"lower() takes lists of {' and '.join(COMPUTE)} only"
                )
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


def _lower_list(schedule: Schedule, rank: int, messages: dict[Channel, deque[Action]]) -> Iterator[Action]:
    received: set[Action] = set()
    backwards_left = Counter(action.stage for action in schedule.lists[rank] if action.kind == "B")
    for action in schedule.lists[rank]:
        for need in needs(schedule, action):
            while is_receive(need) and need not in received:
                receive = _next_message(schedule, rank, messages, action, need)
                received.add(receive)
                yield receive
        yield action
        yield from sends(schedule, action)
        if action.kind == "B":
            backwards_left[action.stage] -= 1
            if not backwards_left[action.stage]:
                yield Action("REDUCE", stage=action.stage)
    yield Action("STEP")


def _next_message(
    schedule: Schedule, rank: int, messages: dict[Channel, deque[Action]], action: Action, need: Action
) -> Action:
    queue = messages[channel(rank, need)]
    if not queue:
        raise ScheduleError(
            f"schedule {schedule.name!r}, rank {rank}: {action} needs {need}, but rank {need.peer} never "
            f"makes what {counterpart(rank, need)} would send"
        )
    return queue.popleft()
