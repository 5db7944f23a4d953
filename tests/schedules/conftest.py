"""Schedules of any shape: valid compute lists over random placements."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from autopar.schedules import Action, Schedule


def _ready(done: set[Action], action: Action, stages: int) -> bool:
    kind, microbatch, stage = action.kind, action.microbatch, action.stage
    if kind == "F":
        return stage == 0 or Action("F", microbatch, stage - 1) in done
    last = stage == stages - 1
    return Action("F", microbatch, stage) in done and (last or Action("B", microbatch, stage + 1) in done)


def _random_schedule(seed: int) -> Schedule:
    draw = random.Random(seed)
    ranks, stages, microbatches = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 5)
    placement = tuple(draw.randrange(ranks) for _ in range(stages))
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    todo = [
        Action(kind, microbatch, stage)
        for kind in "FB"
        for microbatch in range(microbatches)
        for stage in range(stages)
    ]
    done: set[Action] = set()
    while todo:
        action = draw.choice([action for action in todo if _ready(done, action, stages)])
        todo.remove(action)
        done.add(action)
        lists[placement[action.stage]].append(action)
    return Schedule(f"random-{seed}", stages, microbatches, placement, tuple(map(tuple, lists)))


@pytest.fixture(scope="session")
def random_schedule() -> Callable[[int], Schedule]:
    """``random_schedule(seed)``: all forwards and backwards in an order that respects what needs what, dealt
    out to ranks by a random placement; a rank may hold any stages, or none."""
    return _random_schedule
