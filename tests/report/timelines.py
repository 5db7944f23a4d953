"""A timeline of any schedule, with costs that make everything take some time."""

from __future__ import annotations

from typing import Any

from autopar.schedules import Costs, Schedule, Timeline, lower, simulate_timeline

PASSES = {"S": 0.004, "T": 0.008, "E": 0.002, "G": 0.002}
EXCHANGES = {"CAST_X": 0.003, "STATS": 0.002, "SUM_X": 0.003, "SUM_E": 0.002, "CAST_E": 0.002}


def timeline_of(schedule: Schedule, **costs: Any) -> Timeline:
    """``schedule`` is of compute actions; ``costs`` as for ``Costs.uniform``, instead of the usual ones."""
    lowered = lower(schedule)
    usual = {"forward_seconds": 0.01, "backward_seconds": 0.02, "send_seconds": 0.003, "reduce_seconds": 0.004}
    usual |= {"step_seconds": 0.006, "activation_bytes": 1000}
    vocabulary = {"vocabulary_seconds": PASSES | EXCHANGES if schedule.head else None}
    return simulate_timeline(lowered, Costs.uniform(lowered, **(usual | vocabulary | costs)))
