"""When activations go to the host and come back: ``OFFLOAD3@1`` after ``F3@1``, ``FETCH3@1`` ahead of its backward.

Copies run beside the compute, in streams of their own, one for each direction. A FETCH stands one compute action ahead
of the backward that needs it. Where fewer than two compute actions lie between a forward and its backward, there would
be no time in which the device has the memory: such microbatches stay (the last stage of 1F1B has no others).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from autopar.errors import ScheduleError
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.flow import COMPUTE, is_send

LEAST_BYTES: Final = 64 * 2**10
"""Smaller tensors stay: there are many of them, and a copy takes longer to start than to run."""

LEAST_BETWEEN: Final = 2

COPIES: Final = ("OFFLOAD", "FETCH")


def offloaded(schedule: Schedule, rank: int) -> frozenset[tuple[int, int]]:
    """The (microbatch, stage) whose activations a lowered list sends to the host."""
    return frozenset((a.microbatch, a.stage) for a in schedule.lists[rank] if a.kind == "OFFLOAD")


def offload_activations(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """A lowered schedule in which what ``stages`` keep goes to the host, of all microbatches that are worth it.

    OFFLOAD comes after the forward and its sends, FETCH after the compute action before the last one ahead of the
    backward, so that a wait for a message there is time for the copy too. Raises ScheduleError for an asynchronous
    schedule with any such stage.
    """
    if stages and schedule.is_asynchronous:
        raise ScheduleError(
            f"schedule {schedule.name!r} keeps versions of weights with its activations, which can't go to the host; "
            "use a synchronous schedule (such as 1f1b), or leave offload of activations out"
        )
    return replace(schedule, lists=tuple(tuple(with_offloads(row, stages)) for row in schedule.lists))


def with_offloads(row: Sequence[Action], stages: Collection[int]) -> Iterator[Action]:
    """One rank's ``row`` with copies; where those of a stage are doesn't depend on the other ``stages``."""
    passes = [action for action in row if action.kind in COMPUTE]
    after: dict[Action, list[Action]] = defaultdict(list)
    forwards: dict[tuple[int, int], int] = {}
    for index, action in enumerate(passes):
        place = action.microbatch, action.stage
        if action.kind == "F" and action.stage in stages:
            forwards[place] = index
        elif action.kind in ("B", "I") and index - forwards.get(place, index) > LEAST_BETWEEN:
            after[passes[forwards[place]]].append(Action("OFFLOAD", *place))
            after[passes[index - LEAST_BETWEEN]].append(Action("FETCH", *place))
    waiting: list[Action] = []
    for action in row:
        if waiting and not is_send(action):
            yield from sorted(waiting, key=lambda a: a.kind == "FETCH")  # what goes makes room
            waiting = []
        yield action
        waiting += after.get(action, ())


def offloads_of(schedule: Schedule, rank: int) -> Iterator[Action]:
    """All actions of this module that ``rank`` must have, given those that it offloads."""
    for place in sorted(offloaded(schedule, rank)):
        yield Action("OFFLOAD", *place)
        yield Action("FETCH", *place)


def before_offloads(action: Action, there: Collection[tuple[int, int]]) -> Iterator[Action]:
    """What must come before ``action`` of a rank that offloads ``there``."""
    if (action.microbatch, action.stage) not in there:
        return
    if action.kind == "OFFLOAD":
        yield Action("F", action.microbatch, action.stage)
    elif action.kind == "FETCH":
        yield Action("OFFLOAD", action.microbatch, action.stage)
    elif action.kind in ("B", "I"):
        yield Action("FETCH", action.microbatch, action.stage)
