"""Which weights are gathered in one message, and which gradients are scattered in one: as the runtime packs them.

:mod:`autopar.runtime.store` gathers what one unit of a stage uses (:mod:`autopar.runtime.units`: a layer, or the code
between two layers): each large copy by itself, small ones together. :mod:`autopar.runtime.grads` scatters what a
backward through one unit makes: each large gradient that needs no padding by itself, the others in buckets. Weights of
several stages are made of their masters one by one, and their gradients are sent after all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from autopar.graph import Model
from autopar.planner.block_costs import DataLine
from autopar.schedules.weight_moves import BUCKET_BYTES, BUCKETS, LARGE_BYTES


class Weight(NamedTuple):
    """What a stage computes with: bytes of the copy ``as_used``, ``gathered`` with the padding of its rows, and of its
    gradient as it is ``sent`` (0: ranks have no terms to sum). ``unit`` uses it first; it is ``spanning`` where
    several do, and ``tied`` where several stages do. ``line`` says which ranks gather it, ``over`` which have terms:
    each one object for all weights that have it in common."""

    name: str
    unit: int
    as_used: int
    gathered: int
    sent: int
    line: DataLine
    over: object
    spanning: bool = False
    tied: bool = False


class Kind(NamedTuple):
    """What gradients have in common that are sent together once a step, beside the ranks that have terms: over how many
    ranks their rows are stored, and the dtype of their masters."""

    shards: int
    master: torch.dtype


class Message(NamedTuple):
    """Bytes, padding included, of all of ``weights``."""

    bytes_: int
    weights: tuple[Weight, ...]


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


def gathers(weights: Iterable[Weight]) -> Iterator[Message]:
    """Of the copies of a stage, each once."""
    small: dict[tuple[object, int], list[Weight]] = defaultdict(list)
    for weight in weights:
        if weight.gathered >= LARGE_BYTES or weight.tied:
            yield Message(weight.gathered, (weight,))
        else:
            small["spanning" if weight.spanning else weight.unit, id(weight.line)].append(weight)
    for together in small.values():
        yield Message(sum(weight.gathered for weight in together), tuple(together))


def scatters(weights: Sequence[Weight]) -> Iterator[Message]:
    """Of the gradients that a backward through a stage makes of ``weights``, which are in the order of their use."""
    buckets: dict[tuple[object, int], list[Weight]] = defaultdict(list)
    for weight in reversed(weights):
        if not weight.sent:
            continue
        if weight.as_used >= LARGE_BYTES and weight.as_used == weight.gathered:
            yield Message(weight.sent, (weight,))
            continue
        key = "tied" if weight.tied else weight.unit, id(weight.over)
        buckets[key].append(weight)
        if sum(each.as_used for each in buckets[key]) >= BUCKET_BYTES:
            yield _bucket(buckets.pop(key))
    yield from map(_bucket, buckets.values())


def alone(weights: Sequence[Weight], kinds: Mapping[str, Kind | None], scattered: Collection[str]) -> set[str]:
    """Names of the ``weights`` of a stage, in the order of their use, whose gradients are sent as they were made: none
    travels with them, and they need no padding.

    ``kinds`` are by name, None for gradients that are never packed. ``scattered`` are sent in every backward.
    """
    own = [weight for weight in reversed(weights) if not weight.tied]
    passing = groupby((weight for weight in own if weight.name in scattered), lambda weight: weight.unit)
    ended = [weight for weight in own if weight.name not in scattered]
    tied = sorted((weight for weight in weights if weight.tied), key=lambda weight: weight.name)
    small = min(BUCKET_BYTES, max(sum(weight.as_used for weight in weights) // BUCKETS, LARGE_BYTES))
    filled = [(list(unit), BUCKET_BYTES) for _, unit in passing] + [(ended, small), (tied, BUCKET_BYTES)]
    buckets = (bucket for together, limit in filled for bucket in _filled(together, kinds, limit))
    return {first.name for first, *more in buckets if not more and first.as_used == first.gathered}


def _filled(weights: Iterable[Weight], kinds: Mapping[str, Kind | None], limit: int) -> Iterator[tuple[Weight, ...]]:
    """Buckets, of gradients in the order in which they are made."""
    open_: dict[tuple[Kind, int], list[Weight]] = defaultdict(list)
    for weight in weights:
        kind = kinds[weight.name]
        if kind is None:
            continue
        if kind.shards > 1 and weight.as_used >= LARGE_BYTES and weight.as_used == weight.gathered:
            yield (weight,)
            continue
        key = kind, id(weight.over)
        open_[key].append(weight)
        if sum(each.as_used for each in open_[key]) >= limit:
            yield tuple(open_.pop(key))
    yield from map(tuple, open_.values())


def _bucket(together: Sequence[Weight]) -> Message:
    return Message(sum(weight.sent for weight in together), tuple(together))
