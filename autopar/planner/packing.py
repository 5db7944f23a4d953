"""Which weights are gathered in one message, and which gradients are summed in one: as the runtime packs them.

:mod:`autopar.runtime.store` gathers what one unit of a stage uses (:mod:`autopar.runtime.units`: a layer, or the code
between two layers): each large copy by itself, small ones together, once a step those of several units.
Weights of several stages are made of their masters one by one. What is large is said in
:mod:`autopar.schedules.weight_moves`, which gradients travel together in :mod:`autopar.schedules.gradient_messages`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from autopar.graph import Model
from autopar.planner.block_costs import DataLine
from autopar.schedules.gradient_messages import Gradient, together
from autopar.schedules.weight_moves import MESSAGES, MessageSizes, Travels, joined_units


class Weight(NamedTuple):
    """What a stage computes with: bytes of the copy ``as_used``, and ``gathered`` with the padding of its rows.
    ``unit`` uses it first; it is ``spanning`` where others do, too, or are given a view of it, and ``tied`` where
    several stages do. ``line`` says which ranks gather it, so many ``shards``: one object for all weights that have it
    in common."""

    name: str
    unit: int
    as_used: int
    gathered: int
    line: DataLine
    shards: int
    spanning: bool = False
    tied: bool = False


class Sent(NamedTuple):
    """The gradient of ``weight``: so many bytes are ``sent``, padding included, around so many ``ranks``. Those with
    equal ``like`` may travel together (None: nothing is sent of it, nor copied). ``over`` says which ranks have terms;
    ``in_pass``: it is sent in every backward; ``in_place``: as it is added up. It has ``kept`` bytes in the dtype of
    its master."""

    weight: Weight
    sent: int
    ranks: int
    like: Hashable
    over: object = None
    in_pass: bool = False
    in_place: bool = False
    kept: int = 0


class Message(NamedTuple):
    """Bytes, padding included, of all of ``weights``."""

    bytes_: int
    weights: tuple[Weight, ...]

    @property
    def is_packed(self) -> bool:
        """Whether it is copied to where the weights are used."""
        return len(self.weights) > 1


def units_of(model: Model, calls: Sequence[int], own: Collection[int]) -> dict[int, int]:
    """The unit of each call of a stage; ``own`` are the layers (:func:`autopar.passes.recompute.own_modules`)."""
    found: dict[int, int] = {}
    latest, is_code = 0, False
    for call in calls:
        if model.calls[call].parameters:
            latest += call in own or not is_code
            is_code = call not in own
        found[call] = latest
    return found


def gathers(weights: Iterable[Weight], *, once: bool = False, sizes: MessageSizes = MESSAGES) -> Iterator[Message]:
    """Of the copies of a stage, each once; ``once`` a step, or in each pass. Where ranks share no rows, nothing is sent
    of what its messages have."""
    weights = list(weights)
    unit_of = _joined(weights, sizes) if once else {}
    small: dict[tuple[object, int], list[Weight]] = defaultdict(list)
    for weight in weights:
        if weight.gathered >= sizes.large(weight.shards) or weight.tied or weight.shards == 1:
            yield Message(weight.gathered, (weight,))
        else:
            unit = "spanning" if weight.spanning else unit_of.get(weight.name, weight.unit)
            small[unit, id(weight.line)].append(weight)
    for members in small.values():
        yield Message(sum(weight.gathered for weight in members), tuple(members))


def _joined(weights: Iterable[Weight], sizes: MessageSizes) -> dict[str, int]:
    """The unit that each weight travels with."""
    sent = [weight for weight in weights if weight.shards > 1 and not weight.tied]
    travels = [Travels(weight.unit, id(weight.line), weight.shards, weight.gathered) for weight in sent]
    return {weight.name: unit for weight, unit in zip(sent, joined_units(travels, sizes), strict=True)}


def places(messages: Iterable[Message]) -> int:
    """At how many units of a stage its first forward waits for some of them: for those of tied weights at the first."""
    firsts = (message.weights[0] for message in messages)
    return max(1, len({weight.unit for weight in firsts if weight.shards > 1 and not weight.tied}))


def sums(gradients: Sequence[Sent], sizes: MessageSizes = MESSAGES) -> list[list[Sent]]:
    """Those that a stage sends in one message each, in the order in which messages start; ``gradients`` are in the
    order of the use of their weights."""
    asked = [
        Gradient(
            bytes_=each.weight.as_used,
            ranks=each.ranks,
            like=each.like,
            unit=each.weight.unit if each.in_pass else None,
            fits=each.weight.shards > 1 and not _is_padded(each.weight),
            tied=each.weight.name if each.weight.tied else "",
        )
        for each in gradients
    ]
    return [[gradients[place] for place in places] for places in together(asked, sizes)]


def alone(messages: Iterable[Sequence[Sent]]) -> set[str]:
    """Names of the weights whose gradients are sent as they were made: none travels with them, and they need no
    padding."""
    return {first.weight.name for first, *more in messages if not more and not _is_padded(first.weight)}


def _is_padded(weight: Weight) -> bool:
    return weight.as_used != weight.gathered
