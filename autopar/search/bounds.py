"""What no point of a region beats: lower bounds of a step, from what is known of a placement.

Three kinds, each of which rests on the costs being concave in the work that an op, a message or a product is: half of
it takes at least half of the time (:mod:`autopar.cost_models`).

* *By scaling*: a rank with 1/k of a microbatch needs at least 1/k of what the whole takes. So one profile bounds all
  regions that split its rows or its axes further (:func:`scaled`).
* *By order*: a stage can't start before those ahead of it have run once, and has all microbatches to run then. For
  ``prefix_s`` the passes of the stages before s, and ``t_s`` its own, a step takes ``max_s prefix_s + m t_s`` at least;
  over all cuts the least of those is found by filling stages in order, for a bisected step (:func:`straight`).
  Where ranks hold several stages, the mean of ``prefix_s + m t_s`` bounds it: no cut changes the sum of ``t_s``
  (:func:`folded`).
* *By memory*: where a stage's layers don't fit as they are, recomputing takes at least what the best trade of bytes for
  seconds does, layer by layer (:func:`recomputed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from autopar.search.hulls import Array
from autopar.search.profiles import Key, Unit

_BISECTIONS = 40


def scaled(known: Key, wanted: Key) -> float | None:
    """Which part of a microbatch of ``known`` one of ``wanted`` is at least; None where it is no part of it.

    >>> scaled(Key(rows=8, ep=1, cp=1, tp=2), Key(rows=2, ep=1, cp=2, tp=2))
    0.125
    """
    if known.borrowed and known.borrowed != wanted.borrowed:
        return None
    pairs = ((wanted.rows, known.rows), (known.cp, wanted.cp), (known.tp, wanted.tp))
    if any(larger % smaller for smaller, larger in pairs) or known.ep not in (1, wanted.ep):
        return None
    return math.prod(smaller / larger for smaller, larger in pairs)


def straight(units: Sequence[Unit], stages: int, microbatches: int, *, split: bool) -> float:
    """Of a pipeline with one stage per rank, over all cuts of ``units``: seconds of the passes.

    With backwards that are ``split``, only forwards have to come before a stage's first pass; else a backward has to
    go all the way back after its last one, too.
    """
    seconds = _sums(unit.seconds for unit in units)
    waits = _sums(unit.forward for unit in units) if split else seconds
    later = math.fsum(unit.weights for unit in units) if split else 0.0  # nothing waits for it
    low = max(microbatches * seconds[-1] / stages, seconds[-1] - later)
    return _least(lambda step: _fills(seconds, waits, stages, microbatches, step), low, microbatches * seconds[-1])


def _fills(seconds: Array, waits: Array, stages: int, microbatches: int, step: float) -> bool:
    """Whether stages that each take as many units as ``step`` allows hold all of them."""
    first = 0
    for _ in range(stages):
        room = seconds[first] + (step * (1 + 1e-12) - waits[first]) / microbatches
        first = int(np.searchsorted(seconds, room, side="right")) - 1
        if first >= len(seconds) - 1:
            return True
    return False


def folded(units: Sequence[Unit], ranks: int, microbatches: int, *, split: bool) -> float:
    """Of a pipeline whose ranks hold several stages each: the slowest rank's passes, and what ranks wait on average.

    Rank r waits for r stages to run before its first one, and if backwards aren't ``split`` for as many after its last
    pass; each has one unit at least, and these are the first ones.
    """
    total = math.fsum(unit.seconds for unit in units)
    waits = list(accumulate(unit.forward if split else unit.seconds for unit in units[: ranks - 1]))
    slowest = max(total / ranks, *(unit.seconds for unit in units))
    return max(microbatches * slowest, (microbatches * total + math.fsum(waits)) / ranks)


def _sums(values: Iterable[float]) -> Array:
    return np.array([0.0, *accumulate(values)])


def _least(works: Callable[[float], bool], low: float, high: float) -> float:
    """The least number between ``low`` and ``high``, to twelve digits from below, for which something works."""
    if works(low):
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return low


@dataclass(frozen=True)
class Held:
    """What each unit takes and holds, in order: seconds of its passes and of its forward, bytes of its state, bytes
    that it keeps of a microbatch at least, and whether it is one of the ``layers``: those of the block that is called
    most, each of which may keep ``saved`` bytes (falling) for ``extra`` seconds more (rising, convex)."""

    seconds: Array
    forward: Array
    state: Array
    least: Array
    layers: Array
    saved: Array
    extra: Array

    def inner(self) -> Held:
        """Without the first unit and the last."""
        names = ("seconds", "forward", "state", "least", "layers")
        return replace(self, **{name: getattr(self, name)[1:-1] for name in names})

    def scaled(self, share: float) -> Held:
        """Of ranks with ``share`` of the work."""
        names = ("seconds", "forward", "least", "saved", "extra")
        return replace(self, **{name: share * getattr(self, name) for name in names})

    def stage_seconds(self, kept: float, budget: float, host_rate: float = 0.0) -> Array:
        """Of a rank that holds units i to j, ``[i, j]``, and keeps ``kept`` microbatches of each: with the least that
        it has to recompute to fit in ``budget`` bytes; inf where nothing does. What is beyond may be copied to the
        host instead at ``host_rate`` bytes/s (0: it may not), beside the passes."""
        seconds, state, least, layers = (_between(v) for v in (self.seconds, self.state, self.least, self.layers))
        with np.errstate(all="ignore"):
            room = (budget - state - kept * least) / (kept * layers)
        extra = np.interp(-room, -self.saved, self.extra)
        extra = np.where(room < self.saved[-1] * (1 - 1e-9), np.inf, extra)
        if host_rate:
            longest = float(self.seconds[self.layers > 0].max())
            for saved, again in zip(self.saved, self.extra, strict=True):
                copied = (saved - np.maximum(room, 0.0)) / host_rate - longest
                extra = np.minimum(extra, np.maximum(copied, again))
            state = np.minimum(state, budget)  # copies are begun before there is no room
        with np.errstate(all="ignore"):
            extra = np.where(layers > 0, layers * extra, np.where(budget < state + kept * least, np.inf, 0.0))
        return np.where(seconds >= 0, seconds + extra, np.inf)


def _between(values: Array) -> Array:
    """``[i, j]``: the sum from i to before j; negative below the diagonal."""
    sums = _sums(values)
    return sums[None, :] - sums[:, None]


def recomputed(
    held: Held,
    inflight: Sequence[float],
    microbatches: int,
    budget: float,
    *,
    split: bool,
    chunks: int,
    host_rate: float = 0.0,
) -> float:
    """Seconds of the passes where rank r keeps ``inflight[r]`` microbatches of all that it holds; inf where that
    doesn't fit in ``budget`` bytes however units are cut.

    Ranks are filled in order, each with as many units as the step has time for. Those with several stages share all
    memory: what a layer may keep for how many seconds is convex, so that none do better than those that keep as much.
    """
    ranks, count = len(inflight), len(held.seconds)
    if chunks > 1:
        pooled = held.stage_seconds(min(inflight), ranks * budget, host_rate)[0, count]
        return microbatches * float(pooled) / ranks
    tables = {kept: held.stage_seconds(kept, budget, host_rate) for kept in set(inflight)}
    rows = [tables[kept] for kept in inflight]
    ahead = _sums(held.forward if split else held.seconds)

    def works(step: float) -> bool:
        first = 0
        for row in rows:
            room = (step * (1 + 1e-12) - ahead[first]) / microbatches
            last = first + int(np.searchsorted(row[first, first:], room, side="right")) - 1
            if last >= count:
                return True
            first = max(first, last)
        return False

    low = microbatches * float(held.seconds.sum()) / ranks
    high = 2 * ranks * microbatches * (float(held.seconds.sum()) + count * float(held.extra[-1]))
    return _least(works, low, high) if works(high) else math.inf
