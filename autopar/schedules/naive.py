"""The naive pipeline: one microbatch goes through all stages and back before the next one starts."""

from __future__ import annotations

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.exchanges import HEAD_PASSES
from autopar.schedules.placements import looped


def naive(ranks: int, microbatches: int, head: str = "", embedding: bool = False) -> Schedule:
    """Compute actions only; stage ``s`` on rank ``s``, which keeps one activation; one rank works at a time.

    Raises ScheduleError for sizes below 1.
    """
    passes = ("F", *HEAD_PASSES[head], "B")
    if embedding:
        passes = ("E", *passes, "G")
    lists = tuple(
        tuple(_action(kind, microbatch, stage) for microbatch in range(microbatches) for kind in passes)
        for stage in range(ranks)
    )
    return Schedule("naive", ranks, microbatches, looped(ranks), lists, head, embedding)


def _action(kind: str, microbatch: int, stage: int) -> Action:
    return Action(kind, microbatch, stage) if kind in ("F", "B") else Action(kind, microbatch)
