"""A sweep is made once for a schedule and run for any costs; a timeline is one run of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.errors import ScheduleError
from autopar.schedules import Action, Costs, Schedule, lower, simulate_timeline
from autopar.schedules.sweep import sweep_of
from autopar.schedules.weight_moves import WeightMoves


def any_costs(schedule: Schedule, seed: int) -> Costs:
    draw = random.Random(seed)

    def some(count: int) -> tuple[float, ...]:
        return tuple(draw.choice((0.0, draw.random())) for _ in range(count))

    stages, ranks = schedule.stages, schedule.ranks
    return Costs(
        forward_seconds=some(stages),
        backward_seconds=some(stages),
        send_forward_seconds=some(stages),
        send_backward_seconds=some(stages),
        reduce_seconds=some(stages),
        activation_bytes=tuple(draw.randrange(100) for _ in range(stages)),
        step_seconds=some(ranks),
        gather_seconds=some(stages),
        scatter_seconds=some(stages),
        weight_seconds=(0.0,) * stages,
        vocabulary_seconds={kind: some(ranks) for kind in ("S", "T", "SUM_X", "STATS")},
    )


@pytest.mark.parametrize("moves", [WeightMoves(), WeightMoves("step"), WeightMoves("pass", True)])
@pytest.mark.parametrize("seed", range(4))
def test_one_sweep_times_any_costs(random_schedule: Callable[[int], Schedule], seed: int, moves: WeightMoves) -> None:
    """Ends are after starts, ranks run one pass after another, and equal a sweep of free sends plus what they wait."""
    schedule = lower(random_schedule(seed), moves=moves)
    sweep = sweep_of(schedule)
    for number in range(3):
        costs = any_costs(schedule, number)
        starts, ends = sweep.run([costs.seconds(rank, action) for rank, action in sweep.taken])
        timeline = simulate_timeline(schedule, costs)
        assert [(e.start_seconds, e.end_seconds) for e in timeline.events] == [
            (starts[index], ends[index]) for row in sweep.rows for index in row
        ]
        assert simulate_timeline(schedule, costs, trusted=True) == timeline
        free = simulate_timeline(schedule, costs.without_communication())
        assert timeline.communication_overhead_seconds == timeline.makespan_seconds - free.makespan_seconds


def test_steps_know_the_kinds_of_their_ranks(random_schedule: Callable[[int], Schedule]) -> None:
    schedule = lower(random_schedule(1))
    sweep = sweep_of(schedule)
    for rank, row in enumerate(schedule.lists):
        taken = [sweep.taken[place] for place in sweep.kinds[rank]]
        assert [(t.rank, t.action.kind, t.action.stage) for t in taken] == [(rank, a.kind, a.stage) for a in row]


def test_trusted_lists_that_wait_for_each_other_are_refused() -> None:
    lists = (
        (Action("RECV_B", 0, 0, 1), Action("F", 0, 0), Action("SEND_F", 0, 0, 1), Action("B", 0, 0)),
        (Action("RECV_F", 0, 1, 0), Action("F", 0, 1), Action("B", 0, 1), Action("SEND_B", 0, 1, 0)),
    )
    schedule = Schedule("stuck", 2, 1, (0, 1), lists)
    with pytest.raises(ScheduleError, match="rank 0 waits for rank 1"):
        simulate_timeline(schedule, any_costs(replace(schedule), 0), trusted=True)
