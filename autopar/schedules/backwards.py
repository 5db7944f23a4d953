"""Which backwards of a schedule are whole (B), and which are two passes (I and W), by its lists alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.schedules.actions import Schedule


class Order(NamedTuple):
    """Of the passes of a stage that make some gradients, one for each microbatch: whether the first of a step is a
    whole backward, and whether the second is."""

    first: bool
    second: bool

    @classmethod
    def of(cls, whole: Sequence[bool]) -> Order:
        return cls(whole[0], whole[min(1, len(whole) - 1)])


class Backwards(NamedTuple):
    """Of one stage: how many are ``whole``, and how many ``split``. ``made`` is the order of passes (B and I) that make
    gradients that can't be put off, ``late`` of those (B and W) that make the others; ``ends_split``: the last is W."""

    whole: int
    split: int
    made: Order
    late: Order
    ends_split: bool

    @classmethod
    def alike(cls, microbatches: int, *, split: bool) -> Backwards:
        """All of one kind."""
        order = Order(not split, not split)
        return cls(0 if split else microbatches, microbatches if split else 0, order, order, split)


def mixed_backwards(schedule: Schedule) -> dict[int, Backwards]:
    """Of the stages that have both kinds."""
    made: list[list[bool]] = [[] for _ in range(schedule.stages)]
    late: list[list[bool]] = [[] for _ in range(schedule.stages)]
    for row in schedule.lists:
        for kind, _, stage, _ in row:
            if kind in ("B", "I"):
                made[stage].append(kind == "B")
            if kind in ("B", "W"):
                late[stage].append(kind == "B")
    found = {}
    for stage, (now, then) in enumerate(zip(made, late, strict=True)):
        if any(now) and not all(now):
            found[stage] = Backwards(sum(now), len(now) - sum(now), Order.of(now), Order.of(then), not then[-1])
    return found


def telling(schedule: Schedule, rank: int) -> set[int]:
    """Microbatches that stand for all of a step on a pipeline rank, as far as gradients are added up: the first and the
    last; where a stage has backwards of both kinds, also the first two of its passes, and one more of each kind."""
    found = {0, schedule.microbatches - 1}
    mixed = {stage for stage in mixed_backwards(schedule) if schedule.placement[stage] == rank}
    for stage in sorted(mixed):
        own = [action for action in schedule.lists[rank] if action.stage == stage and action.kind in ("B", "I", "W")]
        for kinds in (("B", "I"), ("B", "W")):
            found.update([action.microbatch for action in own if action.kind in kinds][:2])
        for kind in ("B", "W"):
            found.update([a.microbatch for a in own if a.kind == kind and a.microbatch not in found][:1])
    return found
