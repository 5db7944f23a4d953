"""Which weights are gathered in one message, and which gradients are scattered in one: as the runtime packs them.

:mod:`autopar.runtime.store` gathers what one unit of a stage uses (:mod:`autopar.runtime.units`: a layer, or the code
between two layers): each large copy by itself, small ones together, once a step those of several units.
:mod:`autopar.runtime.grads` scatters what a backward through one unit makes: each large gradient that needs no padding
by itself, the others in buckets. Weights of several stages are made of their masters one by one, and their gradients
are sent after all others. What is large is said in :mod:`autopar.schedules.weight_moves`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from autopar.graph import Model
from autopar.planner.block_costs import DataLine
from autopar.schedules.weight_moves import MESSAGES, MessageSizes, Travels, joined_units


class Weight(NamedTuple):
    """What a stage computes with: bytes of the copy ``as_used``, ``gathered`` with the padding of its rows, and of its
    gradient as it is ``sent`` (0: ranks have no terms to sum). ``unit`` uses it first; it is ``spanning`` where
    several do, and ``tied`` where several stages do. ``line`` says which ranks gather it, so many ``shards``, ``over``
    which have terms: each one object for all weights that have it in common."""

    name: str
    unit: int
    as_used: int
    gathered: int
    sent: int
    line: DataLine
    shards: int
    over: object
    spanning: bool = False
    tied: bool = False


class Kind(NamedTuple):
    """What gradients have in common that are sent together once a step, beside the ranks that have terms: over how many
    ranks their rows are stored, the dtype of their masters, and how many ranks their terms go around."""

    shards: int
    master: torch.dtype
    ranks: int


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
    for together in small.values():
        yield Message(sum(weight.gathered for weight in together), tuple(together))


def _joined(weights: Iterable[Weight], sizes: MessageSizes) -> dict[str, int]:
    """The unit that each weight travels with."""
    sent = [weight for weight in weights if weight.shards > 1 and not weight.tied]
    travels = [Travels(weight.unit, id(weight.line), weight.shards, weight.gathered) for weight in sent]
    return {weight.name: unit for weight, unit in zip(sent, joined_units(travels, sizes), strict=True)}


def places(messages: Iterable[Message]) -> int:
    """At how many units of a stage its first forward waits for some of them: for those of tied weights at the first."""
    firsts = (message.weights[0] for message in messages)
    return max(1, len({weight.unit for weight in firsts if weight.shards > 1 and not weight.tied}))


def scatters(weights: Sequence[Weight], sizes: MessageSizes = MESSAGES) -> Iterator[Message]:
    """Of the gradients that a backward through a stage makes of ``weights``, which are in the order of their use."""
    buckets: dict[tuple[object, int], list[Weight]] = defaultdict(list)
    for weight in reversed(weights):
        if not weight.sent:
            continue
        if weight.as_used >= sizes.large(weight.shards) and weight.as_used == weight.gathered:
            yield Message(weight.sent, (weight,))
            continue
        key = "tied" if weight.tied else weight.unit, id(weight.over)
        buckets[key].append(weight)
        if sum(each.as_used for each in buckets[key]) >= sizes.of_pass(weight.shards):
            yield _bucket(buckets.pop(key))
    yield from map(_bucket, buckets.values())


def alone(
    weights: Sequence[Weight],
    kinds: Mapping[str, Kind | None],
    scattered: Collection[str],
    sizes: MessageSizes = MESSAGES,
) -> set[str]:
    """Names of the ``weights`` of a stage, in the order of their use, whose gradients are sent as they were made: none
    travels with them, and they need no padding.

    ``kinds`` are by name, None for gradients that are never packed. ``scattered`` are sent in every backward.
    """
    own = [weight for weight in reversed(weights) if not weight.tied]
    passing = groupby((weight for weight in own if weight.name in scattered), lambda weight: weight.unit)
    ended = [weight for weight in own if weight.name not in scattered]
    tied = sorted((weight for weight in weights if weight.tied), key=lambda weight: weight.name)
    total = sum(weight.as_used for weight in weights)
    of_pass, of_step = sizes.of_pass, lambda ranks: sizes.of_step(ranks, total)
    filled = [(list(unit), of_pass) for _, unit in passing] + [(ended, of_step), (tied, of_pass)]
    buckets = (bucket for together, limit in filled for bucket in _filled(together, kinds, limit, sizes))
    return {first.name for first, *more in buckets if not more and first.as_used == first.gathered}


def _filled(
    weights: Iterable[Weight], kinds: Mapping[str, Kind | None], limit: Callable[[int], int], sizes: MessageSizes
) -> Iterator[tuple[Weight, ...]]:
    """Buckets, of gradients in the order in which they are made; ``limit`` is by how many ranks sum them."""
    open_: dict[tuple[Kind, int], list[Weight]] = defaultdict(list)
    for weight in weights:
        kind = kinds[weight.name]
        if kind is None:
            continue
        large = weight.as_used >= sizes.large(kind.ranks)
        if kind.shards > 1 and large and weight.as_used == weight.gathered:
            yield (weight,)
            continue
        key = kind, id(weight.over)
        open_[key].append(weight)
        if sum(each.as_used for each in open_[key]) >= limit(kind.ranks):
            yield tuple(open_.pop(key))
    yield from map(tuple, open_.values())


def _bucket(together: Sequence[Weight]) -> Message:
    return Message(sum(weight.sent for weight in together), tuple(together))
