"""Which backwards of a schedule are whole (B), and which are two passes (I and W), by its lists alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from autopar.schedules.actions import Action, Schedule


class Order(NamedTuple):
    """Of the passes of a stage that make some gradients, one for each microbatch: whether the first of a step is a
    whole backward, and whether the second is."""

    first: bool
    second: bool

    @classmethod
    def of(cls, whole: Sequence[bool]) -> Order:
        return cls(whole[0], whole[min(1, len(whole) - 1)])


class Terms(NamedTuple):
    """How gradients that can't be put off are sent where each backward ends with that: W, and B, send what there is of
    them, of no microbatch, of one or of several. How many times that is one at least, and ``several``; of passes that
    are split and of whole ones, how many are ``added`` to one that waits, and of how many of these it is the
    ``second``."""

    sent: int
    several: int
    added: tuple[int, int]
    second: tuple[int, int]

    @classmethod
    def each(cls, microbatches: int) -> Terms:
        """One at a time."""
        return cls(microbatches, 0, (0, 0), (0, 0))

    @classmethod
    def of(cls, situations: Iterable[Situation]) -> Terms:
        found = Counter(situations)
        added = [sum(found[kind, waiting] for waiting in (1, _SEVERAL)) for kind in ("I", "B")]
        sent = found["W", 1] + found["W", _SEVERAL] + sum(found["B", waiting] for waiting in range(_SEVERAL + 1))
        return cls(sent, found["W", _SEVERAL] + added[1], (added[0], added[1]), (found["I", 1], found["B", 1]))


class Backwards(NamedTuple):
    """Of one stage: how many are ``whole``, and how many ``split``. ``made`` is the order of passes (B and I) that make
    gradients that can't be put off, ``late`` of those (B and W) that make the others; ``ends_split``: the last is W.
    ``terms``: of those that are made, where each backward sends gradients; here of one after another."""

    whole: int
    split: int
    made: Order
    late: Order
    ends_split: bool
    terms: Terms

    @classmethod
    def alike(cls, microbatches: int, *, split: bool) -> Backwards:
        """All of one kind."""
        order = Order(not split, not split)
        whole, late = (0, microbatches) if split else (microbatches, 0)
        return cls(whole, late, order, order, split, Terms.each(microbatches))


_SEVERAL = 2

Situation = tuple[str, int]
"""A pass of a stage, I, W or B, and of how many microbatches before it there are gradients that no W or B has sent:
none, one, or several (:data:`_SEVERAL`)."""


def situations(row: Iterable[Action], stage: int) -> Iterator[tuple[Action, Situation]]:
    """Of the passes of a stage in the list of its rank."""
    waiting = 0
    for action in row:
        if action.stage == stage and action.kind in ("I", "W", "B"):
            yield action, (action.kind, waiting)
            waiting = min(waiting + 1, _SEVERAL) if action.kind == "I" else 0


def sent_terms(schedule: Schedule, stage: int) -> Terms:
    return Terms.of(situation for _, situation in situations(schedule.lists[schedule.placement[stage]], stage))


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
            counts = sum(now), len(now) - sum(now)
            found[stage] = Backwards(*counts, Order.of(now), Order.of(then), not then[-1], Terms.each(len(now)))
    return found


def telling(schedule: Schedule, rank: int) -> set[int]:
    """Microbatches that stand for all of a step on a pipeline rank, as far as gradients are added up: the first and the
    last; where a stage has backwards of both kinds, also the first two of its passes, and one more of each kind; where
    split ones end with sending gradients, so many of the first that what waits for that is like in the whole step."""
    found = {0, schedule.microbatches - 1}
    mixed = {stage for stage in mixed_backwards(schedule) if schedule.placement[stage] == rank}
    for stage in sorted(mixed):
        own = [action for action in schedule.lists[rank] if action.stage == stage and action.kind in ("B", "I", "W")]
        for kinds in (("B", "I"), ("B", "W")):
            found.update([action.microbatch for action in own if action.kind in kinds][:2])
        for kind in ("B", "W"):
            found.update([a.microbatch for a in own if a.kind == kind and a.microbatch not in found][:1])
    for stage in sorted(
        {a.stage for a in schedule.lists[rank] if a.kind == "SCATTER"} & {s for _, s in schedule.split}
    ):
        wanted, more = _kinds(schedule, stage, range(schedule.microbatches)), iter(range(schedule.microbatches))
        while wanted - _kinds(schedule, stage, found):
            found.add(next(more))
    return found


def _kinds(schedule: Schedule, stage: int, microbatches: Collection[int]) -> set[Situation]:
    """The situations of a stage's passes in a step of so many of its microbatches."""
    row = (action for action in schedule.lists[schedule.placement[stage]] if action.microbatch in microbatches)
    return {situation for _, situation in situations(row, stage)}
