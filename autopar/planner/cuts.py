"""Cuts of a chain into contiguous stages, exact where every rank has one: a dynamic program over (stage, end).

The least largest cost of a stage is found for seconds, then for bytes of the cuts that are as fast; of those, the cut
whose last stages begin last. Each stage has a unit at least, so of n units stage k of K begins with unit k or one of
the n - K behind it: tables are by [stage, begin, end], counted from there. O(K (n - K + 1)^2).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]

NEVER = 1 << 62
"""The cost of a stage without units."""


@dataclass(frozen=True)
class CutTable:
    """Units in whole nanoseconds and KiB: ``seconds``, ``sends`` (of a cut before it), ``state``, ``saved`` and
    ``transient`` (of a rank the most at once counts) of each; ``shared`` by each stage; ``inflight`` and ``placement``
    (a rank) of each stage; ``microbatches`` of a step (0: so many that only the slowest rank counts)."""

    seconds: tuple[int, ...]
    sends: tuple[int, ...]
    state: tuple[int, ...]
    saved: tuple[int, ...]
    transient: tuple[int, ...]
    shared: int
    inflight: tuple[int, ...]
    placement: tuple[int, ...]
    microbatches: int = 0

    @property
    def units(self) -> int:
        return len(self.seconds)

    @property
    def stages(self) -> int:
        return len(self.inflight)

    @property
    def is_straight(self) -> bool:
        """Whether every rank has one stage."""
        return len(set(self.placement)) == len(self.placement)

    @cached_property
    def send_at(self) -> Numbers:
        """Nanoseconds by the place of a cut; none at the ends."""
        return np.array([0, *self.sends[1:], 0], dtype=np.int64)

    @cached_property
    def time_to(self) -> Numbers:
        return _prefix(self.seconds)

    @cached_property
    def state_to(self) -> Numbers:
        return _prefix(self.state)

    @cached_property
    def saved_to(self) -> Numbers:
        return _prefix(self.saved)

    @cached_property
    def stage_seconds(self) -> Numbers:
        """[stage, begin, end]."""
        begins, ends = self._places
        before, after = self.time_to - self.send_at, self.time_to + self.send_at
        return np.where(self._has_units, after[ends] - before[begins], NEVER)

    @cached_property
    def stage_kib(self) -> Numbers:
        """[stage, begin, end], with what the passes of a unit hold beside at most."""
        begins, ends = self._places
        state, saved = (v[ends] - v[begins] for v in (self.state_to, self.saved_to))
        inflight = np.array(self.inflight, dtype=np.int64)[:, None, None]
        held = state + inflight * (saved + self.shared) + self.largest_transient[begins, ends]
        return np.where(self._has_units, held, NEVER)

    @cached_property
    def largest_transient(self) -> Numbers:
        """[first, end]: of the units between, each without what those behind it keep of a microbatch."""
        found = np.zeros((self.units + 1, self.units + 1), dtype=np.int64)
        there = np.array(self.transient, dtype=np.int64) + self.saved_to[1:]
        for first in range(self.units):
            found[first, first + 1 :] = np.maximum.accumulate(there[first:])
        largest: Numbers = np.maximum(0, found - self.saved_to)
        return largest

    @cached_property
    def _places(self) -> tuple[Numbers, Numbers]:
        """Units, by [stage, begin, end]: where a stage begins and ends."""
        spare = np.arange(self.units - self.stages + 1)
        stage = np.arange(self.stages)[:, None, None]
        return stage + spare[:, None], stage + 1 + spare

    @cached_property
    def _has_units(self) -> Flags:
        begins, ends = self._places
        return begins < ends


def _prefix(values: Sequence[int]) -> Numbers:
    return np.array([0, *itertools.accumulate(values)], dtype=np.int64)


class FoundCut(NamedTuple):
    """First units; nanoseconds of the slowest rank, and a proven bound on them."""

    starts: tuple[int, ...]
    slowest: int
    bound: int


def fastest(table: CutTable, budget_kib: int | None) -> FoundCut | None:
    """The best cut, proven, where every rank has one stage; None where none fits."""
    seconds = table.stage_seconds
    allowed = (seconds < NEVER) if budget_kib is None else (table.stage_kib <= budget_kib)
    slowest = least_largest(seconds, allowed)
    if slowest >= NEVER:
        return None
    allowed = allowed & (seconds <= slowest)
    largest = least_largest(table.stage_kib, allowed)
    return FoundCut(latest(allowed & (table.stage_kib <= largest)), slowest, slowest)


def leanest(table: CutTable) -> tuple[tuple[int, ...], int]:
    """The cut whose largest stage is smallest, and its KiB."""
    largest = least_largest(table.stage_kib, table.stage_kib < NEVER)
    return latest(table.stage_kib <= largest), largest


def least_largest(costs: Numbers, allowed: Flags) -> int:
    """The least largest cost of a stage, given by [stage, begin, end], over the cuts that are allowed."""
    ends = np.full(costs.shape[1], NEVER, dtype=np.int64)
    ends[0] = 0
    for cost, is_allowed in zip(costs, allowed, strict=True):
        ends = np.where(is_allowed, np.maximum(ends[:, None], cost), NEVER).min(axis=0)
    return int(ends[-1])


def latest(allowed: Flags) -> tuple[int, ...]:
    """Of the cuts that are allowed, by [stage, begin, end], the one whose last stage begins last, and so on: where
    stages begin."""
    ends = np.zeros(allowed.shape[1], dtype=np.bool_)
    ends[0] = True
    reached = [ends]
    for is_allowed in allowed[:-1]:
        ends = (ends[:, None] & is_allowed).any(axis=0)
        reached.append(ends)
    starts, end = [], allowed.shape[1] - 1
    for ends, is_allowed in zip(reversed(reached), reversed(allowed), strict=True):
        end = int(np.flatnonzero(ends & is_allowed[:, end])[-1])
        starts.append(end)
    return _units(reversed(starts))


def least_squares(costs: Numbers, allowed: Flags) -> tuple[int, ...] | None:
    """The allowed cut whose stages are the most equal: the least sum of squared costs; None where none is allowed."""
    unit = max(1.0, float(costs[allowed].max(initial=1)))
    ends = np.full(costs.shape[1], np.inf)
    ends[0] = 0.0
    firsts = []
    for cost, is_allowed in zip(costs, allowed, strict=True):
        sums = np.where(is_allowed, ends[:, None] + (cost / unit) ** 2, np.inf)
        firsts.append(sums.argmin(axis=0))
        ends = sums.min(axis=0)
    if not np.isfinite(ends[-1]):
        return None
    starts = [costs.shape[1] - 1]
    for first in reversed(firsts):
        starts.append(int(first[starts[-1]]))
    return _units(reversed(starts[1:]))


def _units(begins: Iterable[int]) -> tuple[int, ...]:
    """Of stages that begin there: their first units."""
    return tuple(stage + begin for stage, begin in enumerate(begins))
