"""Which calls of a pipeline rank recompute what, so that the rank fits: a multiple-choice knapsack, exactly.

Sets
    stages k of the rank; calls i of them, with options p; ``weight_ip`` = inflight_k * bytes_p
Variables
    p(i): the option of each call; t: the most that a pass holds beside, one of the options' ``transient``
Constraints
    transient_p(i) <= t;  sum_k fixed_k + sum_i weight_ip(i) + t <= budget
Objective
    min sum_i seconds_p(i), then bytes (:func:`choose`); or bytes alone (:func:`least_bytes`)

Where every call's fastest option fits, there is nothing to choose. Else, for a t, the calls are taken one after
another, and of the choices so far (*labels*: bytes and seconds) those are kept that no other beats in both, and that
may still lead to the best: the seconds of what is left are bounded by its linear relaxation, which buys seconds where
they cost the fewest bytes (P. Sinha and A. Zoltners, Operations Research 27(3), 1979) (:func:`_labelled`). The
relaxation rounded down is the choice to beat (:meth:`_Relaxed.rounded`). Several values of t are bounded at once, by
the options of the largest and the room that the smallest leaves; those whose bound is least are halved next. Of calls
that keep as much for as long, the first ones in the stage take the leanest options, if that fits, too.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LABELS = 1 << 14
"""Of more labels, those with the best bounds are kept."""

_EQUAL = 1e-12


class Option(NamedTuple):
    """One way to run a call: bytes it keeps per microbatch, seconds it adds to its backward, bytes that its passes hold
    beside."""

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
    transients = _transients(stages)
    waiting = [(0.0, 0, len(transients))]  # bound, and the first and last of some values of t
    while waiting:
        bound, first, end = heapq.heappop(waiting)
        if best is not None and bound > best[0] * (1 + _EQUAL):
            break
        room = budget_bytes - fixed - transients[first]
        items = _items(stages, transients[end - 1])
        if items is None or sum(call[0].bytes_ for call in items) > room:
            continue
        relaxed = _Relaxed(items)
        bound = max(bound, float(relaxed.seconds(0, np.array([room]))[0]))
        if best is not None and bound > best[0] * (1 + _EQUAL):
            continue
        if end - first > 1:
            middle = (first + end) // 2
            waiting += [(bound, first, middle), (bound, middle, end)]
            heapq.heapify(waiting)
            continue
        found = _labelled(items, relaxed, room)
        if best is None or (found[0], found[1] + transients[first]) < best[:2]:
            best = found[0], found[1] + transients[first], found[2]
    return None if best is None else _assigned(stages, best[2], budget_bytes)


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
    """What passes may hold beside: no less than the options allow that hold the least."""
    rows = [options for stage in stages for options in _different(stage)]
    least = max((min(o.transient_bytes for o in options) for options in rows), default=0)
    return sorted({max(least, o.transient_bytes) for options in rows for o in options} or {0})


def _different(stage: StageCalls) -> Iterable[tuple[Option, ...]]:
    """The options of its calls, those that are one object once: equal calls have one, where much is to be done."""
    return {id(options): options for options in stage.calls}.values()


def _items(stages: Sequence[StageCalls], transient: int) -> list[list[_Item]] | None:
    """Per call, in the order of the stages, its options by rising bytes and falling seconds; None where one has none.

    What another option of the call beats in both is left out.
    """
    known: dict[tuple[int, int], list[_Item]] = {}
    alike: dict[tuple[_Item, ...], list[_Item]] = {}  # of equal calls, one list
    found = []
    for stage in stages:
        for options in stage.calls:
            key = stage.inflight, id(options)
            if key not in known:
                items = _useful(options, stage.inflight, transient)
                known[key] = alike.setdefault(tuple(items), items)
            if not known[key]:
                return None
            found.append(known[key])
    return found


def _by_id(calls: Iterable[Sequence[_Item]]) -> dict[int, Sequence[_Item]]:
    """Those of equal calls once, which have one list."""
    return {id(items): items for items in calls}


def _useful(options: Sequence[Option], inflight: int, transient: int) -> list[_Item]:
    items = sorted(
        _Item(inflight * o.saved_bytes, o.seconds, p) for p, o in enumerate(options) if o.transient_bytes <= transient
    )
    found: list[_Item] = []
    for item in items:
        if not found or item.seconds < found[-1].seconds:
            found.append(item)
    return found


class _Relaxed:
    """The linear relaxation: calls from their leanest options on, then *segments* by rising price: from one option to
    the next on the lower hull of a call, with the bytes that this takes, and the seconds that it saves."""

    def __init__(self, calls: Sequence[Sequence[_Item]]) -> None:
        self.calls = calls
        hulls = {key: _Hull.of(items) for key, items in _by_id(calls).items()}
        own = [hulls[id(items)] for items in calls]
        owners = np.repeat(np.arange(len(own)), [len(hull.price) for hull in own])
        price, bytes_, saved = (np.concatenate(columns) for columns in zip(*own, strict=True))
        order = np.lexsort((owners, price))
        self.owners, self.bytes_, self.saved = owners[order], bytes_[order], saved[order]
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
        for call, bytes_, saved in zip(self.owners.tolist(), self.bytes_.tolist(), self.saved.tolist(), strict=True):
            if call in full:
                continue
            if bytes_ > spare:
                full.add(call)
                continue
            spare -= bytes_
            seconds -= saved
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


class _Hull(NamedTuple):
    """Segments of a call: bytes that save a second, bytes, seconds saved."""

    price: NDArray[np.float64]
    bytes_: NDArray[np.float64]
    saved: NDArray[np.float64]

    @classmethod
    def of(cls, items: Sequence[_Item]) -> _Hull:
        hull: list[_Item] = []
        for item in items:
            while len(hull) > 1 and _is_above(hull[-2], hull[-1], item):
                hull.pop()
            hull.append(item)
        bytes_ = np.array([float(after.bytes_ - before.bytes_) for before, after in itertools.pairwise(hull)])
        saved = np.array([before.seconds - after.seconds for before, after in itertools.pairwise(hull)])
        return cls(bytes_ / saved, bytes_, saved)


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
        key: (
            np.array([item.bytes_ for item in items], dtype=np.int64),
            np.array([item.seconds for item in items]),
        )
        for key, items in _by_id(calls).items()
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


def _assigned(stages: Sequence[StageCalls], taken: Sequence[int], budget_bytes: int) -> list[list[int]]:
    """The options by stage and call; of those that keep as much for as long, the first ones take the leanest, unless
    that holds too much beside."""
    rows, sorted_, begin = [], [], 0
    for stage in stages:
        mine = list(taken[begin : begin + len(stage.calls)])
        begin += len(stage.calls)
        kinds = [tuple((o.saved_bytes, o.seconds) for o in options) for options in stage.calls]
        equal: dict[tuple[tuple[int, float], ...], list[int]] = {}
        for kind, p in zip(kinds, mine, strict=True):
            equal.setdefault(kind, []).append(p)
        for kind, several in equal.items():
            several.sort(key=lambda p, of=kind: (of[p][0], -of[p][1]), reverse=True)  # type: ignore[misc]
        rows.append(mine)
        sorted_.append([equal[kind].pop() for kind in kinds])
    return sorted_ if used_bytes(stages, sorted_) <= budget_bytes else rows
