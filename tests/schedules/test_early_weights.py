"""Weights' gradients no later than memory allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest

from autopar.schedules import Costs, Schedule, generate, lower, simulate_timeline
from autopar.schedules.actions import Action
from autopar.schedules.early_weights import with_early_weights
from autopar.schedules.registry import SCHEDULES

SPLIT = ("zb-h1", "zb-h2", "zb-1p", "zb-v", "v-half", "v-min", "dualpipe-v")


def costs_of(schedule: Schedule, saved: int, later: int) -> Costs:
    costs = Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=2.0, activation_bytes=saved)
    return replace(costs, later_bytes=(later,) * schedule.stages)


def most_of(row: tuple[Action, ...], costs: Costs) -> int:
    return max(accumulate(costs.kept_bytes(action) for action in row))


def without_weights(row: tuple[Action, ...]) -> list[Action]:
    return [action for action in row if action.kind != "W"]


def at_once(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """With each W right behind its I."""
    return tuple(
        each
        for action in without_weights(row)
        for each in ((action, Action("W", action.microbatch, action.stage)) if action.kind == "I" else (action,))
    )


@pytest.mark.parametrize(("name", "head"), [(n, h) for n in SPLIT for h in ("", "vocab-1") if h in SCHEDULES[n].heads])
def test_what_fits_with_weights_at_once_fits(name: str, head: str) -> None:
    """Of layers that save a quarter of what their weights' gradients need, as if they recomputed."""
    schedule = generate(name, 4, 12, head=head)
    costs = costs_of(schedule, 2, 8)
    limits = [most_of(at_once(row), costs) for row in schedule.lists]
    assert any(most_of(row, costs) > limit for row, limit in zip(schedule.lists, limits, strict=True))
    found = with_early_weights(schedule, costs, limits)
    for before, row, limit in zip(schedule.lists, found.lists, limits, strict=True):
        assert Counter(row) == Counter(before), "the same passes"
        assert without_weights(row) == without_weights(before), "in the same order"
        assert most_of(row, costs) <= limit
    simulate_timeline(lower(found, costs.seconds), costs)  # it can run


@pytest.mark.parametrize("name", SPLIT)
def test_what_has_room_stays(name: str) -> None:
    schedule = generate(name, 4, 12)
    costs = costs_of(schedule, 2, 8)
    limits = [most_of(row, costs) for row in schedule.lists]
    assert with_early_weights(schedule, costs, limits) == schedule
    fewer = with_early_weights(schedule, costs, [limit - 1 for limit in limits])
    assert with_early_weights(fewer, costs, [limit - 1 for limit in limits]) == fewer, "it is early enough"


def test_no_more_than_has_to_be_is_early() -> None:
    """Room for two that wait: the first one's goes ahead of the third backward."""
    actions = tuple(Action(*each) for each in (("F", k, 0) for k in range(3)))
    backwards = tuple(Action("I", k, 0) for k in range(3))
    weights = tuple(Action("W", k, 0) for k in (1, 0, 2))  # as the schedule would have it
    schedule = Schedule("made", 1, 3, (0,), ((*actions, *backwards, *weights),))
    costs = costs_of(schedule, 1, 4)
    (row,) = with_early_weights(schedule, costs, [10]).lists
    assert row == (*actions, *backwards[:2], weights[0], backwards[2], *weights[1:])


def test_backwards_as_a_whole_are_left_alone() -> None:
    schedule = generate("1f1b", 4, 8)
    assert with_early_weights(schedule, costs_of(schedule, 2, 8), [0] * 4) is schedule
