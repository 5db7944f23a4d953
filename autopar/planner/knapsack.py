"""Which calls of a pipeline rank recompute what, so that the rank fits: a multiple-choice knapsack, exactly.

Sets
    stages k of the rank; calls i of them, with options p; ``weight_ip`` = inflight_k * bytes_p
Variables
    p(i): the option of each call; t: bytes of the largest recomputation, one of the options' ``transient``
Constraints
    transient_p(i) <= t;  sum_k fixed_k + sum_i weight_ip(i) + t <= budget
Objective
    min sum_i seconds_p(i), then bytes (:func:`choose`); or bytes alone (:func:`least_bytes`)

Where every call's fastest option fits, there is nothing to choose. Else, for each t, the calls are taken one after
another, and of the choices so far (*labels*: bytes and seconds) those are kept that no other beats in both, and that
may still lead to the best: the seconds of what is left are bounded by its linear relaxation, which buys seconds where
they cost the fewest bytes (P. Sinha and A. Zoltners, Operations Research 27(3), 1979) (:func:`_labelled`). The
relaxation rounded down is the choice to beat (:meth:`_Relaxed.rounded`). Of equal calls, the first ones in the stage
take the leanest options.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LABELS = 1 << 14
"""Of more labels, those with the best bounds are kept."""

_EQUAL = 1e-12


class Option(NamedTuple):
    """One way to run a call: bytes it keeps per microbatch, seconds it adds to its backward, bytes of recomputation."""

    saved_bytes: int
    seconds: float = 0.0
    transient_bytes: int = 0


@dataclass(frozen=True)
class StageCalls:
    """A stage's calls by their options; ``fixed_bytes`` is what it holds whatever they do."""

    calls: tuple[tuple[Option, ...], ...]
    inflight: int
    fixed_bytes: int


class _Item(NamedTuple):
    """An option of a call as it counts: bytes of all that is in flight, seconds, its number."""

    bytes_: int
    seconds: float
    number: int


def choose(stages: Sequence[StageCalls], budget_bytes: int) -> list[list[int]] | None:
    """Per stage and call, the option to take: of those within the budget the fastest, then the leanest.

    None where there is none.
    """
    fixed = sum(stage.fixed_bytes for stage in stages)
    fastest = {id(options): _fastest(options) for stage in stages for options in _different(stage)}
    plain = [[fastest[id(options)] for options in stage.calls] for stage in stages]
    if used_bytes(stages, plain) <= budget_bytes:
        return plain
    best: tuple[float, int, list[int]] | None = None
    for transient in _transients(stages):
        items = _items(stages, transient)
        room = budget_bytes - fixed - transient
        if items is None or sum(call[0].bytes_ for call in items) > room:
            continue
        relaxed = _Relaxed(items)
        if best is not None and relaxed.seconds(0, np.array([room]))[0] > best[0] * (1 + _EQUAL):
            continue
        found = _labelled(items, relaxed, room)
        if best is None or (found[0], found[1] + transient) < best[:2]:
            best = found[0], found[1] + transient, found[2]
    return None if best is None else _assigned(stages, best[2])


def least_bytes(stages: Sequence[StageCalls]) -> int:
    """The smallest budget for which :func:`choose` finds anything."""
    fixed = sum(stage.fixed_bytes for stage in stages)
    found = []
    for transient in _transients(stages):
        items = _items(stages, transient)
        if items is not None:
            found.append(fixed + transient + sum(call[0].bytes_ for call in items))
    return min(found)


def used_bytes(stages: Sequence[StageCalls], taken: Sequence[Sequence[int]]) -> int:
    """What the rank needs with these options."""
    chosen = [[c[p] for c, p in zip(s.calls, row, strict=True)] for s, row in zip(stages, taken, strict=True)]
    kept = sum(
        s.fixed_bytes + s.inflight * sum(o.saved_bytes for o in row) for s, row in zip(stages, chosen, strict=True)
    )
    return kept + max((o.transient_bytes for row in chosen for o in row), default=0)


def _fastest(options: Sequence[Option]) -> int:
    """Of the fastest options the leanest."""
    return min(range(len(options)), key=lambda p: (options[p].seconds, options[p].saved_bytes))


def _transients(stages: Sequence[StageCalls]) -> list[int]:
    """What the largest recomputation may take."""
    return sorted({o.transient_bytes for s in stages for options in _different(s) for o in options} or {0})


def _different(stage: StageCalls) -> Iterable[tuple[Option, ...]]:
    """The options of its calls, those that are one object once: equal calls have one, where much is to be done."""
    return {id(options): options for options in stage.calls}.values()


def _items(stages: Sequence[StageCalls], transient: int) -> list[list[_Item]] | None:
    """Per call, in the order of the stages, its options by rising bytes and falling seconds; None where one has none.

    What another option of the call beats in both is left out.
    """
    known: dict[tuple[int, int], list[_Item]] = {}
    found = []
    for stage in stages:
        for options in stage.calls:
            key = stage.inflight, id(options)
            if key not in known:
                known[key] = _useful(options, stage.inflight, transient)
            if not known[key]:
                return None
            found.append(known[key])
    return found


def _useful(options: Sequence[Option], inflight: int, transient: int) -> list[_Item]:
    items = sorted(
        _Item(inflight * o.saved_bytes, o.seconds, p) for p, o in enumerate(options) if o.transient_bytes <= transient
    )
    found: list[_Item] = []
    for item in items:
        if not found or item.seconds < found[-1].seconds:
            found.append(item)
    return found


class _Segment(NamedTuple):
    """From one option to the next on the lower hull of a call: bytes that save a second, the call, bytes, seconds
    saved, the number of the option after it."""

    price: float
    call: int
    bytes_: int
    saved: float
    number: int


class _Relaxed:
    """The linear relaxation: calls from their leanest options on, then segments by rising price."""

    def __init__(self, calls: Sequence[Sequence[_Item]]) -> None:
        self.calls = calls
        hulls = {id(items): _hull(items) for items in calls}  # equal calls have one list
        self.segments = sorted(s for i, items in enumerate(calls) for s in _segments(i, hulls[id(items)]))
        self.owners = np.array([s.call for s in self.segments], dtype=np.int64)
        self.bytes_ = np.array([float(s.bytes_) for s in self.segments])
        self.saved = np.array([s.saved for s in self.segments])
        self.least = _sums_from([float(items[0].bytes_) for items in calls])
        self.most = _sums_from([items[0].seconds for items in calls])

    def seconds(self, first: int, room: NDArray[np.int64]) -> NDArray[np.float64]:
        """The least seconds of calls from ``first`` on, for each amount of bytes that is left; infinite below the
        leanest."""
        mine = self.owners >= first
        bytes_ = np.concatenate([[0.0], np.cumsum(self.bytes_[mine])])
        saved = np.concatenate([[0.0], np.cumsum(self.saved[mine])])
        spare = room - self.least[first]
        return np.where(spare < 0, np.inf, self.most[first] - np.interp(spare, bytes_, saved))

    def rounded(self, room: int) -> float:
        """Seconds of a choice: segments by rising price, each call's as long as they fit."""
        spare, seconds = room - self.least[0], self.most[0]
        full: set[int] = set()
        for segment in self.segments:
            if segment.call in full:
                continue
            if segment.bytes_ > spare:
                full.add(segment.call)
                continue
            spare -= segment.bytes_
            seconds -= segment.saved
        return seconds


def _sums_from(values: Sequence[float]) -> list[float]:
    """``math.fsum`` of the values from each place on: of those behind a place, partial sums are kept that lose nothing
    (J. R. Shewchuk, Discrete & Computational Geometry 18, 1997)."""
    found, partials = [0.0], list[float]()
    for value in reversed(values):
        kept = []
        for partial in partials:
            large, small = (partial, value) if abs(partial) > abs(value) else (value, partial)
            value = large + small
            if lost := small - (value - large):
                kept.append(lost)
        partials = [*kept, value]
        found.append(math.fsum(partials))
    return found[::-1]


def _hull(items: Sequence[_Item]) -> list[_Item]:
    hull: list[_Item] = []
    for item in items:
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], item):
            hull.pop()
        hull.append(item)
    return hull


def _segments(call: int, hull: Sequence[_Item]) -> Iterator[_Segment]:
    for before, after in itertools.pairwise(hull):
        bytes_, saved = after.bytes_ - before.bytes_, before.seconds - after.seconds
        yield _Segment(bytes_ / saved, call, bytes_, saved, after.number)


def _is_above(left: _Item, middle: _Item, right: _Item) -> bool:
    """Whether ``middle`` lies on or above the line between the others."""
    return (left.seconds - middle.seconds) * (right.bytes_ - left.bytes_) <= (left.seconds - right.seconds) * (
        middle.bytes_ - left.bytes_
    )


def _labelled(calls: Sequence[Sequence[_Item]], relaxed: _Relaxed, room: int) -> tuple[float, int, list[int]]:
    """Seconds, bytes and the option of each call of the best choice within ``room``, which some choice is."""
    limit = relaxed.rounded(room)
    limit += _EQUAL * (abs(limit) + relaxed.most[0])
    bytes_, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    columns = {
        id(items): (
            np.array([item.bytes_ for item in items], dtype=np.int64),
            np.array([item.seconds for item in items]),
        )
        for items in calls
    }
    for i, items in enumerate(calls):
        own_bytes, own_seconds = columns[id(items)]
        more = (bytes_[:, None] + own_bytes).ravel()
        later = (seconds[:, None] + own_seconds).ravel()
        bounds = later + relaxed.seconds(i + 1, room - more)
        kept = np.flatnonzero(bounds <= limit)
        if len(kept) > _LABELS:
            kept = kept[np.argsort(bounds[kept], kind="stable")[:_LABELS]]
        kept = kept[np.lexsort((later[kept], more[kept]))]
        before = np.minimum.accumulate(np.concatenate([[np.inf], later[kept][:-1]]))
        kept = kept[later[kept] < before]
        steps.append((kept // len(items), kept % len(items)))
        bytes_, seconds = more[kept], later[kept]
    place = len(seconds) - 1  # seconds fall as bytes rise
    result = float(seconds[place]), int(bytes_[place])
    taken = []
    for (parents, options), items in zip(reversed(steps), reversed(calls), strict=True):
        taken.append(items[int(options[place])].number)
        place = int(parents[place])
    return *result, taken[::-1]


def _assigned(stages: Sequence[StageCalls], taken: Sequence[int]) -> list[list[int]]:
    """The options by stage and call; of equal calls, the first ones take the leanest."""
    rows, begin = [], 0
    for stage in stages:
        mine = taken[begin : begin + len(stage.calls)]
        begin += len(stage.calls)
        equal: dict[tuple[Option, ...], list[int]] = {}
        for options, p in zip(stage.calls, mine, strict=True):
            equal.setdefault(options, []).append(p)
        for options, several in equal.items():
            several.sort(key=lambda p, of=options: (of[p].saved_bytes, -of[p].seconds), reverse=True)  # type: ignore[misc]
        rows.append([equal[options].pop() for options in stage.calls])
    return rows
