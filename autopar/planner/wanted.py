"""What is asked of a pipeline before it is cut, and the named schedule that it starts from."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import ArgumentError
from autopar.plan.parts import SYNTHESIZED
from autopar.planner.modes import mode_of
from autopar.schedules.registry import SCHEDULES

__all__ = ["SYNTHESIZED", "Wanted", "schedule_name"]


@dataclass(frozen=True)
class Wanted:
    """What is pinned of a pipeline: schedule by name, stages per rank, how the vocabulary is computed, in how many
    chunks of tokens its logits; ``spared_bytes`` of a rank's budget are left for what no stage is charged with."""

    schedule: str
    vocabulary: str
    chunks: int | None = None
    head_chunks: int = 1
    spared_bytes: int = 0


def schedule_name(wanted: Wanted, ranks: int) -> str:
    """The named schedule that the request starts from. Raises ArgumentError where it doesn't fit the vocabulary."""
    mode = mode_of(wanted.vocabulary)
    name = "1f1b" if wanted.schedule == SYNTHESIZED else wanted.schedule
    if mode.schedule and wanted.schedule not in ("1f1b", mode.schedule):
        raise ArgumentError(
            f"vocabulary={wanted.vocabulary!r} has a schedule of its own; leave schedule={wanted.schedule!r} out, or "
            "use vocabulary='vocab-1' with it"
        )
    if mode.head and ranks == 1:
        raise ArgumentError(
            f"vocabulary={wanted.vocabulary!r} splits the vocabulary over the pipeline, but pp=1; use pp of 2 or more"
        )
    if not mode.head and name in SCHEDULES and "" not in SCHEDULES[name].heads:
        raise ArgumentError(
            f"schedule={name!r} splits the vocabulary over the pipeline; say vocabulary={name!r} with it, not "
            f"{wanted.vocabulary!r}"
        )
    return mode.schedule or name
