"""What no point of a region beats: lower bounds of a step, from what is known of a placement.

Three kinds, each of which rests on the costs being concave in the work that an op, a message or a product is: half of
it takes at least half of the time (:mod:`autopar.cost_models`).

* *By scaling*: a rank with 1/k of a microbatch needs at least 1/k of what the whole takes. So one profile bounds all
  regions that split its rows or its axes further (:func:`scaled`).
* *By order*: a stage can't start before those ahead of it have run once, and has all microbatches to run then. For
  ``prefix_s`` the passes of the stages before s, and ``t_s`` its own, a step takes ``max_s prefix_s + m t_s`` at least;
  over all cuts the least of those is found by filling stages in order, for a bisected step (:func:`straight`).
  Where ranks hold several stages, the mean of ``prefix_s + m t_s`` bounds it: no cut changes the sum of ``t_s``
  (:func:`folded`); where these go round the ranks in a fixed order, more is known of what they wait for
  (:mod:`autopar.search.interleaving`).
* *By memory*: where a stage's layers don't fit as they are, recomputing takes at least what the best trade of bytes for
  seconds does, layer by layer (:func:`recomputed`, :func:`shared_out`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from autopar.search.hulls import Array, amounts
from autopar.search.interleaving import Counts
from autopar.search.profiles import Key, Unit

_BISECTIONS = 40


def scaled(known: Key, wanted: Key) -> float | None:
    """Which part of a microbatch of ``known`` one of ``wanted`` is at least; None where it is no part of it, or has
    experts over axes on which the known one hasn't. Experts that ranks share on ``ep`` get tokens of all these ranks:
    of one rank without ``ep`` they are a part if it has as many rows.

    >>> scaled(Key(rows=8, ep=1, cp=1, tp=2), Key(rows=2, ep=1, cp=2, tp=2))
    0.125
    """
    if known.borrowed != wanted.borrowed and (known.borrowed or set(known.axes()) & set(wanted.borrowed)):
        return None
    together = wanted.ep // known.ep
    pairs = ((wanted.rows * together, known.rows), (known.cp, wanted.cp), (known.tp, wanted.tp))
    if known.ep not in (1, wanted.ep) or any(larger % smaller for smaller, larger in pairs):
        return None
    return math.prod(smaller / larger for smaller, larger in pairs) / together


def straight(
    units: Sequence[Unit], stages: int, microbatches: int, *, split: bool, sent: tuple[float, float] = (0.0, 0.0)
) -> float:
    """Of a pipeline with one stage per rank, over all cuts of ``units``: seconds of the passes, where messages to the
    next rank and back take so long (``sent``).

    With backwards that are ``split``, only forwards have to come before a stage's first pass; else a backward has to
    go all the way back after its last one, too.
    """
    seconds = _sums(unit.seconds for unit in units)
    waits = _sums(unit.forward for unit in units) if split else seconds
    later = math.fsum(unit.weights for unit in units) if split else 0.0  # nothing waits for it
    low = max(microbatches * seconds[-1] / stages, seconds[-1] - later + (stages - 1) * sum(sent))
    high, hop = microbatches * seconds[-1] + stages * sum(sent), _waited(sent, split=split)
    return _least(lambda step: _fills(seconds, waits, stages, microbatches, step, hop), low, high)


def _waited(sent: tuple[float, float], *, split: bool) -> float:
    """What a rank waits for messages of each rank ahead of it."""
    return sent[0] + (0.0 if split else sent[1])


def _fills(seconds: Array, waits: Array, stages: int, microbatches: int, step: float, hop: float) -> bool:
    """Whether stages that each take as many units as ``step`` allows hold all of them."""
    first = 0
    for rank in range(stages):
        room = seconds[first] + (step * (1 + 1e-12) - waits[first] - rank * hop) / microbatches
        first = int(np.searchsorted(seconds, room, side="right")) - 1
        if first >= len(seconds) - 1:
            return True
    return False


def folded(
    units: Sequence[Unit], ranks: int, microbatches: int, *, split: bool, sent: tuple[float, float] = (0.0, 0.0)
) -> float:
    """Of a pipeline whose ranks hold several stages each: the slowest rank's passes, and what ranks wait on average.

    Rank r waits for r stages to run and send before its first one, and if backwards aren't ``split`` for as many after
    its last pass; each has one unit at least, and these are the first ones.
    """
    total = math.fsum(unit.seconds for unit in units)
    hop = _waited(sent, split=split)
    waits = list(accumulate(hop + (unit.forward if split else unit.seconds) for unit in units[: ranks - 1]))
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


class Spill(NamedTuple):
    """Of a rank whose activations may go to the host: it would keep ``kept`` microbatches if they didn't. A byte of
    those that it has no room for is copied out before, beside as many microbatches' ``forwards`` and ``backwards`` at
    least, and ``most`` of each, and back beside the rest of the passes; over a step it is copied ``times`` over. A byte
    takes ``seconds`` of a microbatch's time, of which a step has ``microbatches``."""

    kept: float
    forwards: float
    most_forwards: float
    backwards: float
    most_backwards: float
    times: float
    seconds: float
    microbatches: int


class Kept(NamedTuple):
    """How many microbatches a rank keeps on the device from forward to backward, when these are the most. What waits
    for weights' gradients then needn't (:mod:`autopar.schedules.early_weights`)."""

    most: float
    spills: tuple[Spill, ...] = ()


@dataclass(frozen=True)
class Held:
    """What each unit takes and holds, in order: seconds of its passes and of its forward, bytes of its state, bytes
    that it keeps of a microbatch at least, and whether it is one of the ``layers``: those of the block that is called
    most, each of which may keep ``saved`` bytes (falling) for ``extra`` seconds more (rising, convex). ``working``:
    bytes of each unit's largest op. A rank has passes of so many seconds ``beside`` its units'."""

    seconds: Array
    forward: Array
    state: Array
    least: Array
    layers: Array
    working: Array
    saved: Array
    extra: Array
    beside: float = 0.0

    def inner(self) -> Held:
        """Without the first unit and the last."""
        names = ("seconds", "forward", "state", "least", "layers", "working")
        return replace(self, **{name: getattr(self, name)[1:-1] for name in names})

    def in_chunks(self) -> Held:
        """As if the last unit, if it is no layer, worked in as little memory as it likes."""
        working = self.working.copy()
        working[-1] *= self.layers[-1]
        return replace(self, working=working)

    def scaled(self, share: float) -> Held:
        """Of ranks with ``share`` of the work."""
        names = ("seconds", "forward", "least", "working", "saved", "extra")
        return replace(self, **{name: share * getattr(self, name) for name in names})

    def stage_seconds(self, kept: Kept, budget: float) -> Array:
        """Of a rank that holds units i to j, ``[i, j]``, and keeps microbatches of each: with the least that it has to
        recompute to fit in ``budget`` bytes; inf where nothing does."""
        seconds, state, least, layers = (_between(v) for v in (self.seconds, self.state, self.least, self.layers))
        room = budget - state - self._largest
        found = seconds + self._again(room - kept.most * least, kept.most, layers)
        if kept.spills:
            found = np.maximum(found, self._spilled(room, layers, kept.spills, self.beside))
        return np.where(seconds >= 0, found, np.inf)

    @cached_property
    def _largest(self) -> Array:
        """``[i, j]``: of what units from i to before j work with, when those behind keep nothing of a microbatch; of
        those ahead of a layer nothing counts, since it isn't known how much the layers keep."""
        count = len(self.working)
        found = np.zeros((count + 1, count + 1))
        there = self.working + _sums(self.least)[1:]
        for first in range(count):
            found[first, first + 1 :] = np.maximum.accumulate(there[first:])
        last = np.maximum.accumulate(np.where(self.layers > 0, np.arange(count), -1))  # layer up to each unit
        for end in range(1, count + 1):
            found[: max(0, last[end - 1]), end] = found[max(0, last[end - 1]), end]
        largest: Array = np.maximum(0.0, found - _sums(self.least))
        return largest

    def layer_seconds(self, kept: Kept, budget: float, *, last: bool = False) -> Array:
        """Of a rank that holds n layers and nothing else, or the ``last`` unit, whose passes don't count, ``[n]``."""
        layers = np.arange(self.count + 1.0)
        seconds, room = layers * self._layer("seconds"), budget - layers * self._layer("state")
        working = self._layer("working")
        if last:
            room, working = room - self.state[-1] - self.least[-1], max(working - self.least[-1], self.working[-1])
        room = room - working * (last or layers > 0)
        found = seconds + self._again(room, kept.most, layers)
        if not kept.spills:
            return found
        others = self.beside + float((self.seconds * (self.layers == 0)).sum())
        return np.maximum(found, self._spilled(room, layers, kept.spills, others))

    def _spilled(self, room: Array, layers: Array, spills: Sequence[Spill], others: float) -> Array:
        """Of the layers' passes and of the copies beside these and ``others``, which count elsewhere, for the best of
        what layers may keep: between two values of that, no less is recomputed than with the larger one, and no less
        copied than with the smaller one."""
        saved, extra = amounts(self.saved, self.extra, self._layer("seconds"))
        passes = layers[..., None] * (self._layer("seconds") + extra[:-1])
        forward = layers[..., None] * self._layer("forward")
        best = passes
        for spill in spills:
            copy = spill.seconds * np.maximum(0.0, spill.kept * layers[..., None] * saved[1:] - room[..., None])
            ahead, most = (
                (forwards * forward + backwards * (passes - forward)) / spill.microbatches
                for forwards, backwards in (
                    (spill.forwards, spill.backwards),
                    (spill.most_forwards, spill.most_backwards),
                )
            )
            behind = copy + passes - most - spill.most_forwards / spill.microbatches * others
            whole = np.maximum(copy + np.maximum(ahead, copy), spill.times * copy) - others
            best = np.maximum(best, np.maximum(behind, whole))
        least: Array = best.min(axis=-1)
        return least

    def _again(self, room: Array, kept: float, layers: Array) -> Array:
        """What so many layers recompute at least, of which a rank keeps so many microbatches in ``room`` bytes."""
        if not kept:
            return np.where(room < 0, np.inf, 0.0)
        with np.errstate(all="ignore"):
            each = room / (kept * layers)
            extra = layers * np.interp(-each, -self.saved, self.extra)
            extra = np.where(each < self.saved[-1] * (1 - 1e-9), np.inf, extra)
        return np.where(layers > 0, extra, np.where(room < 0, np.inf, 0.0))

    @property
    def count(self) -> int:
        """Of layers."""
        return round(float(self.layers.sum()))

    def _layer(self, name: str) -> float:
        return float(getattr(self, name)[self.layers > 0].min())


def _between(values: Array) -> Array:
    """``[i, j]``: the sum from i to before j; negative below the diagonal."""
    sums = _sums(values)
    return sums[None, :] - sums[:, None]


def recomputed(
    held: Held,
    inflight: Sequence[Kept],
    microbatches: int,
    budget: float,
    *,
    split: bool,
    sent: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Seconds of the passes of a pipeline with one stage per rank, where rank r keeps ``inflight[r]`` of all that
    it holds; inf where that doesn't fit in ``budget`` bytes however units are cut.

    Ranks are filled in order, each with as many units as the step has time for.
    """
    ranks, count = len(inflight), len(held.seconds)
    tables = {kept: _at_least(held.stage_seconds(kept, budget)) for kept in set(inflight)}
    rows = [tables[kept] for kept in inflight]
    ahead, hop = _sums(held.forward if split else held.seconds), _waited(sent, split=split)

    def works(step: float) -> bool:
        first = 0
        for rank, row in enumerate(rows):
            room = (step * (1 + 1e-12) - ahead[first] - rank * hop) / microbatches
            last = first + int(np.searchsorted(row[first, first:], room, side="right")) - 1
            if last >= count:
                return True
            first = max(first, last)
        return False

    low = microbatches * float(held.seconds.sum()) / ranks
    high = 2 * ranks * microbatches * (float(held.seconds.sum()) + count * float(held.extra[-1])) + ranks * sum(sent)
    return _least(works, low, high) if works(high) else math.inf


def _at_least(rows: Array) -> Array:
    """Of so many or more: a stage may fit that has more units, of which less is known to be there at once."""
    least: Array = np.minimum.accumulate(rows[:, ::-1], axis=1)[:, ::-1]
    return least


def shared_out(
    held: Held,
    inflight: Sequence[Kept],
    microbatches: int,
    budget: float,
    *,
    split: bool,
    last: int = -1,
    sent: tuple[float, float] = (0.0, 0.0),
) -> float:
    """The same where ranks hold several stages each, which may be any of the layers; rank ``last`` the last unit.

    Rank r waits for r stages as :func:`folded` says, and keeps ``inflight[r]`` of each of its layers at least: memory
    that these share evenly, since what a layer may keep for how many seconds is convex. What a rank takes grows with
    every layer by more, so ranks share layers best by taking the cheapest one next; and some rank takes as many as the
    step allows.
    """
    ranks = len(inflight)
    tables = {kept: held.layer_seconds(kept, budget) for kept in set(inflight)}
    rows = np.array([microbatches * tables[kept] for kept in inflight])
    if not held.layers[-1]:
        rows[last] = microbatches * held.layer_seconds(inflight[last], budget, last=True)
    waits = _sums((held.forward if split else held.seconds)[: ranks - 1] + _waited(sent, split=split))
    with np.errstate(invalid="ignore"):
        more = np.diff(rows, axis=1)[np.isfinite(rows[:, 1:])]
    if len(more) < held.count:
        return math.inf
    others = microbatches * held.seconds * (held.layers == 0)
    mean = (float(np.sort(more)[: held.count].sum()) + float(others.sum()) + float(waits.sum())) / ranks
    rows[last] += others[-1]
    slowest = np.sort((rows + waits[:, None])[:, 1:], axis=None)[held.count - 1]
    return max(float(slowest), mean)


def by_paths(units: Sequence[Unit], counts: Counts, sent: tuple[float, float] = (0.0, 0.0)) -> float:
    """Of several stages on each rank, over all cuts of ``units``, by ``counts`` of paths."""
    return counts.seconds([(unit.forward, unit.backward) for unit in units]) + float(counts.sent(sent))
