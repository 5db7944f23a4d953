"""Vocabulary layers split over the pipeline, put into schedules (Yeung et al., arXiv 2411.05288, section 5).

The loss of a microbatch is complete only after all ranks have run their passes for it, between which the exchanges
are barriers. To hide them, everything from the last stage's backward on runs as many microbatches later as the
algorithm has barriers; every rank keeps that many microbatches more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.eager import Eager, InOrder, Pass
from autopar.schedules.pass_times import PassTimes

BARRIERS: Final[Mapping[str, int]] = {"": 0, "naive": 3, "vocab-1": 2, "vocab-2": 1}
"""By how many microbatches a head algorithm puts off backwards, and so, how many more are in flight."""


def with_vocabulary(schedule: Schedule, head: str, embedding: bool, times: PassTimes) -> Schedule:
    """``schedule`` (compute actions of stages only) with the passes of ``head`` and of the split embedding.

    Each rank keeps its order of forwards, and its order of backwards.
    """
    delay = BARRIERS[head] * schedule.chunks
    lists = tuple(tuple(_delayed(actions, delay)) for actions in schedule.lists)
    run = Eager(schedule.placement, schedule.microbatches, times, head, embedding)
    return replace(schedule, lists=run.run(InOrder(lists)), head=head, embedding=embedding)


def _delayed(actions: tuple[Action, ...], delay: int) -> Iterator[Pass]:
    """Each backward comes after ``delay`` more forwards than it did, while there are any."""
    forwards = iter([_pass(action) for action in actions if action.kind == "F"])
    left = delay
    for action in actions:
        if action.kind == "F":
            yield from _next(forwards)
            continue
        while left:
            yield from _next(forwards)
            left -= 1
        yield _pass(action)
    yield from forwards


def _next(forwards: Iterator[Pass]) -> Iterator[Pass]:
    forward = next(forwards, None)
    if forward is not None:
        yield forward


def _pass(action: Action) -> Pass:
    return Pass(action.kind, action.microbatch, action.stage)
