"""PipeDream: each backward updates the weights at once (Narayanan et al., SOSP 2019, sections 3.2 and 3.3)."""

from __future__ import annotations

from dataclasses import replace

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.one_f_one_b import one_f_one_b


def pipedream(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose weights change after every backward; stage ``s`` on rank ``s``. Compute actions only.

    Stage ``s`` has ``ranks - s`` microbatches under way, each with the weights that its forward saw, so the result is
    another than that of one device. Raises ScheduleError for sizes below 1.
    """
    schedule = one_f_one_b(ranks, microbatches)
    lists = tuple(tuple(step for action in actions for step in _updated(action)) for actions in schedule.lists)
    return replace(schedule, name="pipedream", lists=lists)


def _updated(action: Action) -> tuple[Action, ...]:
    if action.kind != "B":
        return (action,)
    return (action, Action("UPDATE", action.microbatch, action.stage))
