"""Schedules that are looked through once, for several costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from autopar.schedules import Costs, Schedule, Timelines, generate, lower, simulate_timeline
from autopar.schedules.offloads import offload_activations
from autopar.schedules.registry import SCHEDULES
from autopar.schedules.weight_moves import WeightMoves
from tests.schedules.test_sweep import any_costs

MOVES = (WeightMoves(), WeightMoves("step"), WeightMoves("pass", True))


def every_way(name: str) -> Iterator[Schedule]:
    """Two numbers of microbatches, all heads, weights that are gathered or not, activations here or on the host."""
    row = SCHEDULES[name]
    for microbatches in (4, 6):
        for head in row.heads:
            made = generate(name, 2, microbatches, chunks=None if row.chunks else 2, head=head)
            for moves in MOVES[:1] if row.asynchronous else MOVES:
                schedule = lower(made, moves=moves)
                yield schedule
                if not row.asynchronous:
                    yield offload_activations(schedule, {0, schedule.stages - 1})


def check_all(timelines: Timelines, schedule: Schedule) -> None:
    """Two costs, one after the other, and the first again."""
    for seed in (1, 2, 1):
        costs = replace(any_costs(schedule, seed), offload_seconds=(0.1 * seed,) * schedule.stages)
        shared, alone = timelines.of(schedule, costs), simulate_timeline(schedule, costs)
        assert shared == alone
        assert shared.events == alone.events
        assert [shared.kept(rank) for rank in range(schedule.ranks)] == [
            alone.kept(rank) for rank in range(schedule.ranks)
        ]
        assert shared.communication_overhead_seconds == alone.communication_overhead_seconds


def test_each_schedule_and_each_cost_has_its_own_timeline() -> None:
    """Schedules that are equal in name and sizes among them."""
    timelines = Timelines()
    for name in SCHEDULES:
        for schedule in every_way(name):
            check_all(timelines, schedule)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_ranks_do(random_schedule: Callable[[int], Schedule], seed: int) -> None:
    timelines = Timelines()
    for moves in MOVES:
        check_all(timelines, lower(random_schedule(seed), moves=moves))


def test_a_schedule_is_looked_through_once() -> None:
    """Whichever of its copies it comes as."""
    timelines = Timelines()
    first, again = (lower(generate("1f1b", 2, 4)) for _ in range(2))
    costs = Costs.uniform(first, forward_seconds=1.0, backward_seconds=2.0)
    assert timelines.of(first, costs).swept.sweep is timelines.of(again, costs).swept.sweep
