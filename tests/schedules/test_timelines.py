"""Schedules that are looked through once, for several costs."""

from __future__ import annotations

from autopar.schedules import Costs, Timelines, generate, lower, simulate_timeline


def test_each_schedule_and_each_cost_has_its_own_timeline() -> None:
    timelines = Timelines()
    for microbatches in (4, 6, 4):
        schedule = lower(generate("interleaved", 2, microbatches, chunks=2))
        for seconds in (1.0, 3.0):
            costs = Costs.uniform(schedule, forward_seconds=seconds, backward_seconds=2.0, send_seconds=0.1)
            assert timelines.of(schedule, costs) == simulate_timeline(schedule, costs)
