"""GPipe: all forwards, then all backwards (Huang et al., "GPipe", 2019, section 2.3)."""

from __future__ import annotations

from autopar.schedules.actions import Action, Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Compute actions only; stage ``s`` on rank ``s``. Every rank keeps the activations of all microbatches.

    Backwards run in the order of the forwards, so gradients add up in the order of 1F1B and of one device.
    Raises ScheduleError for sizes below 1.
    """
    lists = tuple(
        tuple(Action(kind, microbatch, stage) for kind in ("F", "B") for microbatch in range(microbatches))
        for stage in range(stages)
    )
    return Schedule("gpipe", stages, microbatches, tuple(range(stages)), lists)
