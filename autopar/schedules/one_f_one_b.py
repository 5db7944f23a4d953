"""1F1B: one forward, one backward (PipeDream-Flush: Narayanan et al., arXiv 2006.09503, section 3.2)."""

from __future__ import annotations

from itertools import chain

from autopar.schedules.actions import Action, Schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Compute actions only; stage ``s`` on rank ``s``, which keeps at most ``stages - s`` activations.

    With fewer microbatches than stages the first ranks have no steady state left: they run as in GPipe.
    Raises ScheduleError for sizes below 1.
    """
    lists = tuple(_list(stage, stages, microbatches) for stage in range(stages))
    return Schedule("1f1b", stages, microbatches, tuple(range(stages)), lists)


def _list(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action("F", microbatch, stage) for microbatch in range(microbatches)]
    backwards = [Action("B", microbatch, stage) for microbatch in range(microbatches)]
    warm_up = min(stages - stage - 1, microbatches)
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *steady, *backwards[microbatches - warm_up :])
