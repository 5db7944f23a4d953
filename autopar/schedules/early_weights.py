"""Weights' gradients no later than memory allows.

Schedules that split backwards put off ``W`` to fill time in which a rank would idle, by rules that count microbatches.
What a microbatch keeps differs before and after its ``I``, the more so where layers are recomputed: of a forward only
what its recomputation starts from, for ``W`` all that products need. So where a rank would keep more than it may, what
waits for ``W`` is done first. Other passes keep their order: any list that could run still can.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.timeline import Costs


def with_early_weights(schedule: Schedule, costs: Costs, limit_bytes: Sequence[int]) -> Schedule:
    """``schedule`` (compute actions) with those of its ``W`` earlier without which a rank would keep more than its
    ``limit_bytes`` for backwards. A rank may still keep more: what waits for its ``I`` isn't made to."""
    if not schedule.split:
        return schedule
    rows = zip(schedule.lists, limit_bytes, strict=True)
    return replace(schedule, lists=tuple(_row(row, costs, limit) for row, limit in rows))


def _row(row: Sequence[Action], costs: Costs, limit: int) -> tuple[Action, ...]:
    place = {action: number for number, action in enumerate(row) if action.kind == "W"}
    waiting: list[tuple[int, Action]] = []  # whose I has run, by where they were
    found: dict[Action, None] = {}
    kept = 0
    for action in row:
        if action in found:
            continue
        more = costs.kept_bytes(action)
        while waiting and more > 0 and kept + more > limit:
            _, first = heapq.heappop(waiting)
            if first not in found:
                kept += costs.kept_bytes(first)
                found[first] = None
        kept += more
        found[action] = None
        weights = Action("W", action.microbatch, action.stage) if action.kind == "I" else None
        if weights in place:
            heapq.heappush(waiting, (place[weights], weights))
    return tuple(found)
