"""Where to cut a model whose pipeline ranks have several stages each.

What counts are sums over the stages of a rank, which lie far apart in the chain, and how equal stages are: ranks wait
for each other's longer ones (:func:`paces`). Few cuts are all tried. Of many, those with the most equal stages
(:func:`~autopar.planner.cuts.least_squares`, by seconds and by bytes) are improved: one unit moves from one stage to
another, and what lies between moves with it, as long as the ranks get faster (B. W. Kernighan and S. Lin's kind of
local search, Bell System Technical Journal 49(2), 1970).

One rank alone takes as long however its stages are cut, and its memory comes and goes best by equal ones.

The slowest rank is bounded by what any cut leaves it (:func:`_bound`): a sum of seconds that some choice of units has,
no less than the mean of all ranks; and of n units that take so long or longer, some rank has n / ranks, rounded up.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.planner.cuts import NEVER, CutTable, FoundCut, Numbers, least_largest, least_squares

_ALL = 5_000
"""Up to so many cuts are all tried."""

_PAIRED = 200
"""Of so many cuts, the best without pairs, pairs are looked at."""

_SUMS = 200_000
"""Up to so many choices of units, the sums that they may have are listed."""

_STEPS = 500
"""So many times one unit is moved, at most."""

Key = tuple[int, ...]


def fastest_chunks(table: CutTable, budget_kib: int | None) -> FoundCut | None:
    """The best cut found within the budget of each rank; None where none was."""
    budget = NEVER if budget_kib is None else budget_kib
    search = _Search(table, budget, by_seconds=True)
    key, starts = _best(search)
    if key[0]:
        return None
    slowest = search.slowest(np.array([*starts, table.units]))
    return FoundCut(starts, slowest, min(slowest, _bound(table)))


def leanest_chunks(table: CutTable) -> tuple[tuple[int, ...], int]:
    """The cut found whose largest rank is smallest, and its KiB."""
    key, starts = _best(_Search(table, NEVER, by_seconds=False))
    return starts, key[0]


def paces(seconds: Numbers, placement: Sequence[int], microbatches: int, *, paired: bool = True) -> Numbers:
    """About what a step takes with stages of these ``seconds`` of a microbatch, ``[cut, stage]``, by cut.

    The slowest rank has to run all microbatches (0: so many that nothing else counts); every other rank is a longest
    stage ahead of it or behind. Where stages go round the ranks, each rank runs a forward of one stage and a backward
    of another at a time, and all wait for the longest of these pairs (not ``paired``: that is left out); twice as long
    a backward as a forward is taken for that.
    """
    by_rank = _ByRank.of(placement)
    ranks = len(by_rank.firsts)
    slowest: Numbers = by_rank.sums(seconds).max(axis=1)
    if not microbatches or len(placement) == ranks:
        return slowest * max(1, microbatches)
    step = microbatches * slowest
    if paired and by_rank.ranks:
        step = np.maximum(step, microbatches * _paired(seconds, ranks) // ranks)
    longest: Numbers = seconds.max(axis=1)
    return step + (ranks - 1) * longest


@dataclass(frozen=True)
class _ByRank:
    """Stages in the ``order`` of their ranks, and where there those of each rank begin; ``ranks`` that stages go round,
    if they do (else 0)."""

    order: Numbers
    firsts: Numbers
    ranks: int

    @classmethod
    def of(cls, placement: Sequence[int]) -> _ByRank:
        homes = np.array(placement)
        order = np.argsort(homes, kind="stable")
        firsts = np.flatnonzero(np.diff(homes[order], prepend=-1))
        goes_round = len(homes) % len(firsts) == 0 and (homes == np.arange(len(homes)) % len(firsts)).all()
        return cls(order, firsts, len(firsts) if goes_round else 0)

    def sums(self, values: Numbers) -> Numbers:
        """Of values by [cut, stage], by [cut, rank]."""
        return self._over(np.add, values)

    def largest(self, values: Numbers) -> Numbers:
        return self._over(np.maximum, values)

    def _over(self, function: np.ufunc, values: Numbers) -> Numbers:
        found: Numbers
        if self.ranks:
            cuts, stages = values.shape
            found = function.reduce(values.reshape(cuts, stages // self.ranks, self.ranks), axis=1)
        else:
            found = function.reduceat(values[:, self.order], self.firsts, axis=1)
        return found


def _paired(seconds: Numbers, ranks: int) -> Numbers:
    """Of ``ranks`` microbatches, by cut: in interleaved 1F1B, a rank's backwards are as many pairs ahead of the last
    rank's as it is ranks before it, and its forwards as many again."""
    chunks = seconds.shape[1] // ranks
    rank, pair = np.arange(ranks)[:, None], np.arange(ranks * chunks)[None, :]
    ahead = ranks - 1 - rank
    forward = ((pair + ahead) // ranks + chunks - 1) % chunks * ranks + rank
    backward = (chunks - 1 - (pair - ahead) // ranks) % chunks * ranks + rank
    pairs: Numbers = seconds[:, forward] + 2 * seconds[:, backward]
    longest: Numbers = pairs.max(axis=1).sum(axis=1)
    return longest // 3


@dataclass(frozen=True)
class _Search:
    """Cuts by rising keys: what exceeds the budget, about what a step takes, the slowest rank, the longest stage, the
    largest rank; or, not ``by_seconds``, by the largest rank first."""

    table: CutTable
    budget: int
    by_seconds: bool

    def keys(self, cuts: Numbers, *, paired: bool) -> Numbers:
        """[cut, place in the key] of cuts [cut, stage and the end]."""
        seconds = self._seconds(cuts)
        slowest, longest = self._ranks.sums(seconds).max(axis=1), seconds.max(axis=1)
        largest = self._held_kib(cuts, self._kib(cuts)).max(axis=1)
        if not self.by_seconds:
            return np.stack([largest, slowest, longest], axis=1)
        pace = self._paces(seconds, paired=paired)
        return np.stack([np.maximum(0, largest - self.budget), pace, slowest, longest, largest], axis=1)

    def _paces(self, seconds: Numbers, *, paired: bool) -> Numbers:
        return paces(seconds, self.table.placement, self.table.microbatches, paired=paired)

    def slowest(self, cut: Numbers) -> int:
        """Nanoseconds of the slowest rank."""
        return int(self._ranks.sums(self._seconds(cut[None, :])).max())

    def _seconds(self, cuts: Numbers) -> Numbers:
        """Nanoseconds by [cut, stage]."""
        passed: Numbers = self._after[cuts[:, 1:]] - self._before[cuts[:, :-1]]
        return passed

    def _kib(self, cuts: Numbers) -> Numbers:
        saved, state = self.table.saved_to[cuts], self.table.state_to[cuts]
        kept = saved[:, 1:] - saved[:, :-1] + self.table.shared
        return state[:, 1:] - state[:, :-1] + self._inflight * kept

    @cached_property
    def _after(self) -> Numbers:
        """By a stage's end, nanoseconds up to it, with its send."""
        return self.table.time_to + self.table.send_at

    @cached_property
    def _before(self) -> Numbers:
        return self.table.time_to - self.table.send_at

    def _held_kib(self, cuts: Numbers, kib: Numbers) -> Numbers:
        """By rank, with the largest transient of its units."""
        transient = self.table.largest_transient[cuts[:, :-1], cuts[:, 1:]]
        return self._ranks.sums(kib) + self._ranks.largest(transient)

    @cached_property
    def _inflight(self) -> Numbers:
        return np.array(self.table.inflight, dtype=np.int64)

    @cached_property
    def _ranks(self) -> _ByRank:
        return _ByRank.of(self.table.placement)

    @cached_property
    def _held(self) -> list[list[int]]:
        """The stages of each rank."""
        placement = self.table.placement
        return [[k for k, home in enumerate(placement) if home == rank] for rank in sorted(set(placement))]

    def hot(self, cut: Numbers) -> set[int]:
        """The stages that a better cut takes units from, most likely: of the fullest rank, and the longest stage."""
        seconds = self._seconds(cut[None, :])
        full = self._held_kib(cut[None, :], self._kib(cut[None, :]))[0]
        ranks = self._ranks.sums(seconds)[0] if self.by_seconds else full
        most = full if self.by_seconds and full.max() > self.budget else ranks
        return {*self._held[int(most.argmax())], int(seconds[0].argmax())}

    def least(self, cuts: Numbers, below: Key | None = None) -> tuple[Key, Numbers] | None:
        """The best of ``cuts``; pairs are looked at of those that are the best without. None where it isn't
        ``below``."""
        if len(cuts) > _PAIRED:
            if below is not None and self.by_seconds and not below[0]:  # what takes longer isn't worth a look at bytes
                cuts = cuts[self._paces(self._seconds(cuts), paired=False) <= below[1]]
            keys = self.keys(cuts, paired=False)
            if below is not None:  # pairs make no key smaller
                first, second = keys[:, 0], keys[:, 1]
                may = (first < below[0]) | ((first == below[0]) & (second <= below[1]))
                cuts, keys = cuts[may], keys[may]
            cuts = cuts[np.lexsort(keys.T[::-1])[:_PAIRED]]
        if not len(cuts):
            return None
        keys = self.keys(cuts, paired=True)
        place = np.lexsort(keys.T[::-1])[0]
        key = tuple(int(k) for k in keys[place])
        return (key, cuts[place]) if below is None or key < below else None


def _best(search: _Search) -> tuple[Key, tuple[int, ...]]:
    table = search.table
    inner, ends = table.units - 1, table.stages - 1
    if len(set(table.placement)) == 1:
        cut = np.array([*next(_beginnings(table)), table.units], dtype=np.int64)
        key = tuple(int(k) for k in search.keys(cut[None, :], paired=True)[0])
    elif math.comb(inner, ends) <= _ALL:
        rows = itertools.combinations(range(1, table.units), ends)
        found = search.least(np.array([(0, *row, table.units) for row in rows], dtype=np.int64))
        assert found is not None  # there are units enough
        key, cut = found
    else:
        key, cut = min((_improved(search, starts) for starts in _beginnings(table)), key=lambda item: item[0])
    return key, tuple(int(c) for c in cut[:-1])


def _beginnings(table: CutTable) -> Iterator[tuple[int, ...]]:
    """Cuts of equal stages: of those whose longest stage is shortest, and by bytes."""
    seconds = table.stage_seconds
    longest = least_largest(seconds, seconds < NEVER)
    for costs, allowed in ((seconds, seconds <= longest), (table.stage_kib, table.stage_kib < NEVER)):
        starts = least_squares(costs, allowed)
        assert starts is not None  # cuts exist where there are units enough
        yield starts


def _improved(search: _Search, starts: Sequence[int]) -> tuple[Key, Numbers]:
    """The best that is reached by steps, each the best of all that move one unit."""
    cut = np.array([*starts, search.table.units], dtype=np.int64)
    key = tuple(int(k) for k in search.keys(cut[None, :], paired=True)[0])
    moves, sources = _moves(search.table.stages)
    for _ in range(_STEPS):
        has_more = np.diff(cut)[sources] > 1  # a stage keeps a unit
        likely = has_more & np.isin(sources, list(search.hot(cut)))
        step = search.least(cut + moves[likely], key) or search.least(cut + moves[has_more], key)
        if step is None:
            break
        key, cut = step
    return key, cut


def _moves(stages: int) -> tuple[Numbers, Numbers]:
    """[move, place of a cut]: a unit from stage i to stage j moves the cuts between them; and each move's i."""
    i, j = (v[~np.eye(stages, dtype=np.bool_)] for v in np.indices((stages, stages)))
    places = np.arange(stages + 1)
    between = (places > np.minimum(i, j)[:, None]) & (places <= np.maximum(i, j)[:, None])
    return np.where(between, np.where(i < j, -1, 1)[:, None], 0).astype(np.int64), i


def _bound(table: CutTable) -> int:
    """Nanoseconds that the slowest rank of any cut takes at least."""
    ranks = len(set(table.placement))
    crowded = max(-(-number // ranks) * s for number, s in enumerate(sorted(table.seconds, reverse=True), 1))
    return max(crowded, _least_sum(table, ranks))


def _least_sum(table: CutTable, ranks: int) -> int:
    """The least sum of units and sends of a rank that isn't below the mean."""
    least = min(table.sends[1:], default=0)
    sent = 2 * (table.stages - 1) * least
    mean = -(-(sum(table.seconds) + sent) // ranks)
    if len(set(table.sends[1:])) > 1:
        return mean
    bounds = []
    for rank in set(table.placement):
        mine = [k for k, home in enumerate(table.placement) if home == rank]
        ends = 2 * len(mine) - (0 in mine) - (table.stages - 1 in mine)
        sums = _sums(Counter(table.seconds), len(mine), table.units - table.stages + len(mine))
        if sums is None:
            return mean
        enough = sums[sums + ends * least >= mean]
        if len(enough):
            bounds.append(int(enough.min()) + ends * least)
    return min(bounds, default=mean)


def _sums(counts: Counter[int], fewest: int, most: int) -> Numbers | None:
    """What ``fewest`` to ``most`` units may take together; None where there is too much of it."""
    if math.prod(count + 1 for count in counts.values()) > _SUMS:
        return None
    sums, taken = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for value, count in counts.items():
        more = np.arange(count + 1)
        sums, taken = (sums[:, None] + value * more).ravel(), (taken[:, None] + more).ravel()
    return sums[(taken >= fewest) & (taken <= most)]
