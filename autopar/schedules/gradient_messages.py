"""Which gradients of a stage travel together, and in which order messages start: one decision for all who need it.

The runtime sends them so (:mod:`autopar.runtime.grads`), the planner prices what is sent
(:mod:`autopar.planner.packing`) and what is held until it is (:mod:`autopar.planner.pass_memory`). What is large is
said in :mod:`autopar.schedules.weight_moves`.

A stage's weights are listed in the order of their use, and its backward goes the other way. First come gradients that
are sent in every backward, one unit of the stage after the other (a layer, or the code between two); then those that
are sent once a step, in messages over all units; last those of weights of several stages, in the order of their names,
since the stages differ otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from autopar.schedules.weight_moves import MESSAGES, MessageSizes

IN_FLIGHT: Final = 2
"""Messages of one stage's gradients that may be under way in a backward when another one is made: what they are sent
from can't be freed before they end."""


class Gradient(NamedTuple):
    """Of a trained weight. ``bytes_`` of all of it, in the dtype that is computed with; ``ranks`` that its terms go
    around: those that share its rows, or else all that have terms. Gradients may travel together if ``like`` is equal
    (None: nothing is sent of it, nor copied). ``unit`` of the stage uses the weight first, where its gradient is sent
    in every backward (None: once a step). ``fits``: ranks share its rows, and need no padding. ``tied``: its name,
    where it is a weight of several stages."""

    bytes_: int
    ranks: int
    like: Hashable
    unit: int | None = None
    fits: bool = False
    tied: str = ""


def together(gradients: Sequence[Gradient], sizes: MessageSizes = MESSAGES) -> Iterator[list[int]]:
    """The places in ``gradients`` of those of each message, in the order in which messages start."""
    total = sum(each.bytes_ for each in gradients)
    backward = [place for place in reversed(range(len(gradients))) if not gradients[place].tied]
    tied = sorted((p for p, each in enumerate(gradients) if each.tied), key=lambda place: gradients[place].tied)
    passing = [place for place in backward if gradients[place].unit is not None]
    for _, unit in groupby(passing, lambda place: gradients[place].unit):
        yield from _filled(gradients, unit, sizes, sizes.of_pass)
    ended = [place for place in backward if gradients[place].unit is None]
    yield from _filled(gradients, ended, sizes, lambda ranks: sizes.of_step(ranks, total))
    yield from _filled(gradients, tied, sizes, sizes.of_pass)


def _filled(
    gradients: Sequence[Gradient], places: Iterable[int], sizes: MessageSizes, limit: Callable[[int], int]
) -> Iterator[list[int]]:
    """``limit``: bytes of a message that is full, by how many ranks it goes around."""
    open_: dict[Hashable, list[int]] = {}
    for place in places:
        each = gradients[place]
        if each.like is None:
            continue
        if each.fits and each.bytes_ >= sizes.large(each.ranks):
            yield [place]  # from its own memory
            continue
        message = open_.setdefault(each.like, [])
        message.append(place)
        if sum(gradients[other].bytes_ for other in message) >= limit(each.ranks):
            yield open_.pop(each.like)
    yield from open_.values()
