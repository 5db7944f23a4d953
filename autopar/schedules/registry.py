"""The schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from autopar.errors import ScheduleError
from autopar.schedules.actions import Schedule
from autopar.schedules.gpipe import gpipe
from autopar.schedules.one_f_one_b import one_f_one_b

GENERATORS: Final[Mapping[str, Callable[[int, int], Schedule]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def generate(name: str, stages: int, microbatches: int) -> Schedule:
    """The compute actions of schedule ``name``. Raises ScheduleError for an unknown name or sizes below 1."""
    generator = GENERATORS.get(name)
    if generator is None:
        raise ScheduleError(f"unknown schedule {name!r}; known schedules are {', '.join(GENERATORS)}")
    return generator(stages, microbatches)
