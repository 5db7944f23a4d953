"""What ranks with several stages wait, whatever these are cut to be: paths that count each stage alike.

A step takes at least what any path of passes and messages that wait for each other does. One leads down to a stage with
the first microbatch, stays on that stage's rank to the stage's last backward, and leads up again: between, the rank
runs all of its passes but those forwards that came before the stage's first one, and the backwards that come after its
last one.
Of interleaved 1F1B the lists say which these are. Of schedules on a V, which are made for the costs at hand, all
forwards of a rank's first stage may come before the first one of its second; and where backwards are split, weights'
gradients may fill the time at the end. A mean of such paths is a bound as well; in the best one it is no use to have a
layer in one stage rather than in another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autopar.schedules.interleaved import groups_of
from autopar.schedules.placements import looped, v_shaped
from autopar.search.hulls import Array, Figure, Flags

_LONGER = 2.0  # times a forward: a backward, where the mean is chosen


@dataclass(frozen=True)
class Counts:
    """By stage, how many of its forwards and backwards the mean of some paths has; and how many ``messages`` it has to
    the next rank, and back."""

    forward: Array
    backward: Array
    messages: tuple[float, float] = (0.0, 0.0)

    def sent(self, seconds: tuple[Figure, Figure]) -> Figure:
        """Of messages that take so long each way."""
        return self.messages[0] * seconds[0] + self.messages[1] * seconds[1]

    def seconds(self, passes: Sequence[tuple[float, float]]) -> float:
        """The least over all cuts of units with these seconds of a forward and of a backward, in order.

        Each unit takes what it does in the stage where that is least, and of each stage one unit at least what it takes
        more there: one of those that can be in that stage if none is empty.
        """
        units, stages = np.array(passes, dtype=np.float64), len(self.forward)
        each = units[:, :1] * self.forward + units[:, 1:] * self.backward  # [unit, stage]
        least = each.min(axis=1, keepdims=True)
        more, spare = each - least, len(units) - stages
        return float(least.sum()) + math.fsum(float(more[s : s + spare + 1, s].min()) for s in range(stages))

    def layer_seconds(self, count: int, passes: Array, ahead: int, behind: int) -> Array:
        """The same of so many equal layers, and of no other calls, of which so many may be at each end: for each row of
        ``passes``, the seconds of a forward and of a backward."""
        each = passes[:, :1] * self.forward + passes[:, 1:] * self.backward
        least = each.min(axis=1, keepdims=True)
        inner = (each - least)[:, ahead : max(ahead, each.shape[1] - behind)]
        found: Array = count * least[:, 0] + inner.sum(axis=1)
        return found


@dataclass
class Interleaving:
    """The best mean of paths, by ranks, stages of each, microbatches and layers; each found once."""

    _known: dict[tuple[int, int, int, int, bool | None], Counts] = field(default_factory=dict)

    def counts(self, ranks: int, chunks: int, microbatches: int, layers: int, *, ends: bool) -> Counts:
        """Of ``layers`` equal layers between one other call at each end. Without ``ends``, paths end where they would
        lead up again: other work may be done meanwhile."""
        key = ranks, chunks, microbatches, layers, ends
        if key not in self._known:
            crossed = messages(looped(ranks, chunks))
            self._known[key] = _best(*paths(ranks, chunks, microbatches, ends=ends), (crossed, ends * crossed), layers)
        return self._known[key]

    def on_v(self, ranks: int, microbatches: int, layers: int) -> Counts:
        """The same of two stages on each rank, as a V, in any order of passes."""
        key = ranks, 2, microbatches, layers, None
        if key not in self._known:
            crossed = messages(v_shaped(ranks))
            self._known[key] = _best(*paths_on_v(ranks, microbatches), (crossed, 0 * crossed), layers)
        return self._known[key]


def paths(ranks: int, chunks: int, microbatches: int, *, ends: bool) -> tuple[Array, Array]:
    """``[path, stage]``: how many forwards and backwards of each stage the path by way of each stage has."""
    groups = groups_of(ranks, microbatches)
    own, before = _own_and_before(looped(ranks, chunks))
    stays = microbatches * own
    forward = stays - len(groups[0]) * (own & before) + before
    backward = stays - ends * (len(groups[-1]) * (own & before) - before * 1)
    return forward.astype(np.float64), backward.astype(np.float64)


def paths_on_v(ranks: int, microbatches: int) -> tuple[Array, Array]:
    """The same on a V; the time at the end isn't in it."""
    own, before = _own_and_before(v_shaped(ranks))
    forward = microbatches * (own & ~before) + before
    return forward.astype(np.float64), (microbatches * own).astype(np.float64)


def messages(placement: Sequence[int]) -> Array:
    """By stage, how many a microbatch takes on its way there: neighbours on one rank send nothing."""
    return np.cumsum([0.0, *(float(here != there) for here, there in pairwise(placement))])


def _own_and_before(placement: Sequence[int]) -> tuple[Flags, Flags]:
    """``[stage, other]``: whether the other is on the same rank, and whether it comes before."""
    ranks, stage = np.array(placement), np.arange(len(placement))
    return ranks[:, None] == ranks, stage < stage[:, None]


def _best(forward: Array, backward: Array, crossed: tuple[Array, Array], layers: int) -> Counts:
    """Of the mean in which all stages count alike, and of each path alone, what bounds equal layers best."""
    paths_, means = forward + _LONGER * backward, np.eye(len(forward))
    if (level := _level(paths_)) is not None:
        means = np.vstack([means, level])
    both = means @ paths_
    least = both.min(axis=1)
    found = layers * least + (both[:, 1:-1] - least[:, None]).sum(axis=1)  # each inner stage has a layer
    best = means[int(found.argmax())]
    return Counts(best @ forward, best @ backward, (float(best @ crossed[0]), float(best @ crossed[1])))


def _level(both: Array) -> Array | None:
    """The mean of rows that is the same in each column, or nearly so; None where there is none."""
    try:
        mean = np.linalg.solve(both.T, np.ones(len(both)))
    except np.linalg.LinAlgError:
        return None
    mean = np.maximum(mean, 0.0)
    total = float(mean.sum())
    return mean / total if total and math.isfinite(total) else None
