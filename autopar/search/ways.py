"""Of several ways to store weights: what each takes at least, and those that no other one is as good as."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.options import activations_on_host
from autopar.search.gradients import Adding
from autopar.search.hulls import Array
from autopar.search.space import Way
from autopar.search.wholesale import Host, Layers, Ranks, Stored, least_seconds, side_by_side

Adds = tuple[Stored, Adding]
"""A way, and what it takes to add up gradients."""


@dataclass(frozen=True)
class BestWays:
    """Of some ways (``pairs``) those that no other one is as good as in everything, however many microbatches there
    are: found when they are asked for."""

    pairs: Sequence[Adds]

    @cached_property
    def proven(self) -> list[Adds]:
        return _best_of(self._proven)

    @cached_property
    def roomy(self) -> list[Adds]:
        """If there was room for everything."""
        none = {"state": 0.0, "gathered_bytes": 0.0, "flying_bytes": 0.0, "hosted": 0.0}
        return _best_of([(stored._replace(**none), adding) for stored, adding in self._proven])

    @cached_property
    def likely(self) -> list[Adds]:
        """With what comes before the passes and after them."""
        return _best_of(self.pairs)

    @property
    def _proven(self) -> list[Adds]:
        return [(stored.proven, adding) for stored, adding in self.pairs]


def with_sums(pairs: Sequence[Adds], microbatches: int) -> list[Stored]:
    """With what it takes to add up gradients, of each of so many ``microbatches``."""
    return [stored._replace(added=adding.each(microbatches)) for stored, adding in pairs]


def beside_each_other(rows: Sequence[tuple[Layers, Sequence[Stored]]]) -> tuple[Layers, list[Stored]]:
    """Of each row all ways, for rows that have in common what layers may keep."""
    layers = side_by_side([(layers, len(ways)) for layers, ways in rows])
    return layers, list(itertools.chain.from_iterable(ways for _, ways in rows))


def least_of_rows(values: Array, rows: Sequence[tuple[Layers, Sequence[Stored]]]) -> Array:
    """Of each row the least, of ``values`` by way of :func:`beside_each_other`."""
    numbers = [len(ways) for _, ways in rows]
    least: Array = np.minimum.reduceat(values, [0, *itertools.accumulate(numbers[:-1])])
    return least


def least_of(
    rows: Sequence[tuple[Layers, Sequence[Stored]]],
    ranks: Ranks,
    microbatches: int,
    budget: float,
    host: Host | None = None,
) -> Array:
    """Of each row the way that takes the least: at once for rows that have in common what layers may keep."""
    alike: dict[int, list[int]] = {}
    for place, (layers, _) in enumerate(rows):
        alike.setdefault(id(layers.saved), []).append(place)
    least = np.empty(len(rows))
    for places in alike.values():
        some = [rows[place] for place in places]
        layers, every = beside_each_other(some)
        least[places] = least_of_rows(least_seconds(layers, every, ranks, microbatches, budget, host), some)
    return least


def bounds_of_each(
    ways: Sequence[Stored],
    layers: Layers,
    kinds: Iterable[Ranks],
    microbatches: int,
    budget: float,
    host: Host | None = None,
) -> Array:
    """By way, what no step of ranks is below that are of all these ``kinds``; found once for ways that are equal."""
    places: dict[Stored, int] = {}
    each = [places.setdefault(way, len(places)) for way in ways]
    found = [least_seconds(layers, list(places), ranks, microbatches, budget, host) for ranks in kinds]
    most: Array = np.max(found, axis=0)[each]
    return most


def _best_of(pairs: Sequence[Adds]) -> list[Adds]:
    """Those that no other one is as good as in everything."""
    return [pairs[place] for place in undominated([(*stored, *adding) for stored, adding in pairs])]


def of_weights(ways: Iterable[Way]) -> tuple[Way, ...]:
    """Those that differ in what they say of weights."""
    return tuple(dict.fromkeys(way.of_weights for way in ways))


def any_away(ways: Iterable[Way]) -> bool:
    return any(activations_on_host(offload) for _, _, offload in ways)


def undominated(rows: Sequence[Sequence[float]]) -> list[int]:
    """Places of those ``rows`` that no other one is as good as in everything, the least first."""
    order = sorted(range(len(rows)), key=lambda place: tuple(rows[place]))
    figures = np.array([rows[place] for place in order])
    is_least = (figures[:, None] <= figures).all(axis=2)  # [one, other]: the first is as good as the other
    is_beaten = np.triu(is_least, 1).any(axis=0)  # only by what is sorted before it
    return [order[place] for place in np.flatnonzero(~is_beaten)]
