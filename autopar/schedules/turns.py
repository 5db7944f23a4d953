"""Which passes of a rank's other stages come right before and after those of each of its stages.

What a pass finds on its way was left by what ran before it: messages of gradients; and at its end the weights of the
next pass are on their way. The planner reckons with both (:mod:`autopar.planner.pass_memory`), and predicted memory
tells passes apart by what is under way (:mod:`autopar.simulate.alike`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from autopar.schedules.actions import Action
from autopar.schedules.gradient_messages import IN_FLIGHT
from autopar.schedules.weight_moves import PASSES, scatters


class Turns(NamedTuple):
    """Of a stage, with stages numbered among those of its rank. ``before``: whose backwards were the last ones when one
    of its passes began, as many as messages may be under way, the latest last; ``after``: whose pass came next."""

    before: frozenset[tuple[int, ...]]
    after: frozenset[int]


def backwards_before(
    actions: Iterable[Action], sending: Collection[int] | None = None
) -> Iterator[tuple[Action, tuple[Action, ...]]]:
    """Each of ``actions`` with the last ones before it that completed gradients of weights, of the stages ``sending``
    any (None: of all): as many as messages may be under way, the latest last."""
    last: deque[Action] = deque(maxlen=IN_FLIGHT)
    for action in actions:
        yield action, tuple(last)
        if scatters(action) and (sending is None or action.stage in sending):
            last.append(action)


def turns_of(actions: Iterable[Action]) -> list[Turns]:
    """Of each stage of the rank that runs ``actions``."""
    passes = [action for action in actions if action.kind in PASSES or scatters(action)]
    numbers = {stage: number for number, stage in enumerate(sorted({action.stage for action in passes}))}
    before: list[set[tuple[int, ...]]] = [set() for _ in numbers]
    after: list[set[int]] = [set() for _ in numbers]
    for action, last in backwards_before(passes):
        before[numbers[action.stage]].add(tuple(numbers[backward.stage] for backward in last))
    reads = [numbers[action.stage] for action in passes if action.kind in PASSES]
    for one, other in pairwise(reads):
        after[one].add(other)
    return [Turns(frozenset(b), frozenset(a)) for b, a in zip(before, after, strict=True)]
