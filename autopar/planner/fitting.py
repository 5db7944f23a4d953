"""Cuts a model into stages and chooses what each call recomputes, so that every pipeline rank fits its memory.

The two depend on each other: a cut says how many microbatches a call is kept for, recomputation makes stages slower. So
the cut is made knowing the leanest bytes, so that a choice exists; then each rank's choice is exact
(:mod:`autopar.planner.knapsack`); then the calls are timed with it and cut again, while that makes the slowest rank
faster. Where nothing has to be recomputed and no cut is faster than the one that fits, nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.graph import Model
from autopar.passes.recompute import own_modules
from autopar.planner.activations import Activations, Alternative
from autopar.planner.chunk_cuts import paces
from autopar.planner.knapsack import Option, StageCalls, choose, least_bytes, used_bytes
from autopar.planner.pass_memory import PassMemory
from autopar.planner.stages import (
    NANOSECOND,
    Partition,
    Unit,
    check_count,
    even_partition,
    too_large,
)
from autopar.schedules.offloads import Away
from autopar.schedules.turns import Turns

_ROUNDS = 4  # of cutting and choosing; more have never changed anything
_PARTS = 4  # of more memory, in which ranks need as few as they can
_SLACK = 2e-3  # of the step: more isn't given for that


@dataclass(frozen=True)
class Fit:
    """A cut, and for each call (in the model's numbering) what it recomputes; ``pace``: of such fits, the step that
    takes less is likely the one of less. With as much memory as one likes it would be the same where it isn't
    ``tight``."""

    cut: Partition
    chosen: Mapping[int, Alternative]
    pace: int
    tight: bool = True


@dataclass(frozen=True)
class Layout:
    """How a pipeline fits: its cut with what calls recompute; which activations go to the host, None where none
    may."""

    fit: Fit
    away: Away | None = None


@dataclass(frozen=True)
class Pins:
    """What a plan says: the first unit of each stage, the list of a schedule that has no name, and for each unit the
    names of the first and last op of each region that it recomputes; which activations go to the host."""

    starts: Sequence[int]
    actions: str | None
    recompute: Sequence[Sequence[Sequence[str]]]
    away: Away = field(default_factory=lambda: Away({}))


@dataclass(frozen=True)
class Demand:
    """What is to be fitted: ``units`` are those of ``calls``; ``inflight`` and ``placement`` are per stage; a rank has
    ``budget_bytes``, of which ``reserved_bytes`` are taken; ``passes`` say what it holds beside what it keeps.
    ``microbatches`` are those of a step; ``turns`` of each rank's stages, if these are known. ``even``: equally many
    layers per stage, whatever they cost. ``mode`` is ``options.recompute``.
    """

    model: Model
    calls: Sequence[int]
    units: Sequence[Unit]
    activations: Activations
    passes: PassMemory
    inflight: Sequence[int]
    placement: Sequence[int]
    microbatches: int
    budget_bytes: int
    reserved_bytes: int
    even: bool
    mode: str
    turns: Sequence[Sequence[Turns]] | None = None

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    def none(self, index: int) -> Alternative:
        return self.activations.choices[self.model.calls[index].block].none

    @cached_property
    def options(self) -> dict[int, tuple[Alternative, ...]]:
        """What each call may do; only layers, whose code is a class of their own, may recompute."""
        own = own_modules(self.model) if self.mode != "none" else frozenset()
        return {i: self._choices(i) if i in own else (self.none(i),) for i in self.calls}

    def _choices(self, index: int) -> tuple[Alternative, ...]:
        choices = self.activations.choices[self.model.calls[index].block]
        fixed = {"full": lambda: choices.whole, "selective": lambda: choices.selective}.get(self.mode)
        return choices.frontier if fixed is None else (fixed(),)


def fit(demand: Demand) -> Fit:
    """The fastest that fits. Raises StageError, which says the smallest budget that would do, and for fewer units than
    stages."""
    check_count(demand.units, len(demand.placement), len(set(demand.placement)))
    if demand.mode != "auto":
        asked = _fitted(demand, demand.options) or _refuse(demand, demand.options)
        return replace(asked, tight=_is_constrained(demand, asked))
    plain = {i: (demand.none(i),) for i in demand.calls}
    if demand.even:
        found = _fitted(demand, plain)
        if found is not None:
            return replace(found, tight=False)
        return _fitted(demand, demand.options) or _refuse(demand, demand.options)
    chosen = {i: only for i, (only,) in plain.items()}
    cut = _fastest(demand, _units(demand, chosen), None)
    assert cut is not None  # there are units enough
    fastest = _timed(demand, cut, chosen)
    if _chosen(demand, cut, plain) is not None:
        return replace(fastest, tight=False)
    found = _fitted(demand, plain)
    if found is not None and found.pace <= fastest.pace:
        return found
    return _with_recomputation(demand, found, cut.bound_seconds)


def pinned(demand: Demand, cut: Partition, chosen: Mapping[int, Alternative]) -> Fit:
    """What a plan says, without a choice: timed as it is."""
    return _timed(demand, cut, chosen)


def _fitted(demand: Demand, options: Mapping[int, tuple[Alternative, ...]]) -> Fit | None:
    """The best cut where every call has one option, or layers are counted. Cuts are found in whole KiB: the leanest may
    fit all the same."""
    if demand.even:
        return _chosen(demand, even_partition(demand.units, len(demand.placement), demand.placement), options)
    chosen = {i: only for i, (only,) in options.items()}
    units = _units(demand, chosen)
    cut = _fastest(demand, units, demand.free_bytes)
    return _chosen(demand, _leanest_cut(demand, units), options) if cut is None else _timed(demand, cut, chosen)


def _is_constrained(demand: Demand, found: Fit) -> bool:
    """Whether it is cut otherwise than it would be with as much memory as one likes."""
    free = None if demand.even else _fastest(demand, _units(demand, found.chosen), None)
    return free is not None and free.starts != found.cut.starts


def _fastest(demand: Demand, units: Sequence[Unit], budget_bytes: int | None) -> Partition | None:
    activations = demand.activations
    stages = demand.inflight, budget_bytes, demand.placement, activations.shared_bytes, demand.microbatches
    return activations.cuts.fastest(units, *stages)


def _leanest_cut(demand: Demand, units: Sequence[Unit]) -> Partition:
    activations = demand.activations
    return activations.cuts.leanest(units, demand.inflight, demand.placement, activations.shared_bytes)


def _with_recomputation(demand: Demand, without: Fit | None, bound_seconds: float) -> Fit:
    best = without
    for cut in _cuts_of(demand):
        best = _better(best, _chosen(demand, cut, demand.options))
    if best is None:
        return _refuse(demand, demand.options)
    for _ in range(_ROUNDS):
        again = _recut(demand, best, demand.options)
        if again is None or _better(best, again) is best:
            break
        best = again
    return replace(best, cut=replace(best.cut, bound_seconds=bound_seconds))


def _leanest(options: Mapping[int, tuple[Alternative, ...]]) -> dict[int, Alternative]:
    return {i: min(some, key=lambda a: a.saved_bytes) for i, some in options.items()}


def _cuts_of(demand: Demand) -> Iterator[Partition]:
    """For the leanest bytes: the fastest cut with room for any recomputation of a rank, the fastest without, the
    leanest."""
    leanest = _leanest(demand.options)
    units = _units(demand, leanest)
    timed = [replace(u, seconds=plain.seconds) for u, plain in zip(units, demand.units, strict=True)]
    without = [replace(u, transient_bytes=0) for u in timed]
    found = [cut for each in (timed, without) if (cut := _fastest(demand, each, demand.free_bytes)) is not None]
    found.append(_leanest_cut(demand, units))
    yield from {cut.starts: cut for cut in found}.values()


def _recut(demand: Demand, before: Fit, options: Mapping[int, tuple[Alternative, ...]]) -> Fit | None:
    """Cut for the calls as they were chosen, then choose for that cut."""
    cut = _fastest(demand, _units(demand, before.chosen), demand.free_bytes)
    return None if cut is None or cut.starts == before.cut.starts else _chosen(demand, cut, options)


def _better(one: Fit | None, other: Fit | None) -> Fit | None:
    if one is None or other is None:
        return one or other
    return other if other.pace < one.pace * (1 - 1e-9) else one


def _units(demand: Demand, chosen: Mapping[int, Alternative]) -> list[Unit]:
    """The units under a choice, with what their passes hold as calls of one stage."""
    return [
        replace(
            unit,
            seconds=unit.seconds + chosen[i].seconds,
            saved_bytes=demand.activations.call_bytes(i, chosen[i]),
            transient_bytes=beside + chosen[i].transient_bytes,
        )
        for i, unit, beside in zip(demand.calls, demand.units, demand.passes.of(demand.calls).beside, strict=True)
    ]


def _chosen(demand: Demand, cut: Partition, options: Mapping[int, tuple[Alternative, ...]]) -> Fit | None:
    """The fastest choice within the budget for this cut; None where there is none."""
    chosen: dict[int, Alternative] = {}
    for numbers, stages in _ranks(demand, cut, options):
        taken = _taken(demand, stages)
        if taken is None:
            return None
        chosen |= _named(demand, cut, options, numbers, taken)
    return _timed(demand, cut, chosen)


def _named(
    demand: Demand,
    cut: Partition,
    options: Mapping[int, tuple[Alternative, ...]],
    numbers: Sequence[int],
    taken: Sequence[Sequence[int]],
) -> dict[int, Alternative]:
    """What the calls of these stages do, by which of their options are ``taken``."""
    rows = zip(numbers, taken, strict=True)
    return {i: options[i][p] for n, row in rows for i, p in zip(_calls(demand, cut, n), row, strict=True)}


def _taken(demand: Demand, stages: Sequence[StageCalls]) -> list[list[int]] | None:
    """:func:`~autopar.planner.knapsack.choose`, once for ranks of any cut that hold the same."""
    rows = tuple((stage.inflight, stage.fixed_bytes, tuple(map(id, stage.calls))) for stage in stages)
    key, known = (rows, demand.free_bytes), demand.activations.taken
    if key not in known:
        known[key] = taken = choose(stages, demand.free_bytes)
        assert taken is None or used_bytes(stages, taken) <= demand.free_bytes
    return known[key]


def spending_slack(demand: Demand, found: Fit, more: int) -> Fit:
    """``found``, which was fitted into ``more`` bytes than ``demand`` has, where ranks recompute to need fewer of them:
    as few as they can without taking longer than the slowest one does, and the step longer by much."""
    best, ranks = found, set(demand.placement)
    for part in range(_PARTS):
        level = replace(demand, budget_bytes=demand.budget_bytes + more * part // _PARTS)
        rows = [(rank, mine) for rank, mine in _choices_by_rank(level, found.cut) if rank in ranks]
        for rank, mine in sorted(rows, key=lambda row: _added(row[1], found)):
            again = _timed(demand, found.cut, {**best.chosen, **mine})
            if again.cut.slowest_seconds > found.cut.slowest_seconds or again.pace > found.pace * (1 + _SLACK):
                break
            best = again
            ranks.remove(rank)
    return replace(best, tight=found.tight)


def _choices_by_rank(demand: Demand, cut: Partition) -> Iterator[tuple[int, dict[int, Alternative]]]:
    """Of the ranks that fit with this cut, what their calls do."""
    for numbers, stages in _ranks(demand, cut, demand.options):
        if (taken := _taken(demand, stages)) is not None:
            yield demand.placement[numbers[0]], _named(demand, cut, demand.options, numbers, taken)


def _added(mine: Mapping[int, Alternative], found: Fit) -> float:
    """Seconds by which calls are longer than as they were ``found``."""
    return math.fsum(each.seconds - found.chosen[i].seconds for i, each in mine.items())


def _timed(demand: Demand, cut: Partition, chosen: Mapping[int, Alternative]) -> Fit:
    """The cut with the slowest rank's seconds under the choice."""
    units = _units(demand, chosen)
    ends = (*cut.starts[1:], len(units))
    send = [0.0, *(unit.cut_seconds for unit in units[1:]), 0.0]
    stages = [sum(u.seconds for u in units[a:b]) + send[a] + send[b] for a, b in zip(cut.starts, ends, strict=True)]
    seconds: dict[int, float] = {}
    for rank, stage in zip(demand.placement, stages, strict=True):
        seconds[rank] = seconds.get(rank, 0.0) + stage
    rounded = np.array([[round(stage / NANOSECOND) for stage in stages]])
    pace = int(paces(rounded, demand.placement, demand.microbatches)[0])
    return Fit(replace(cut, slowest_seconds=max(seconds.values())), chosen, pace)


def _ranks(
    demand: Demand, cut: Partition, options: Mapping[int, tuple[Alternative, ...]]
) -> list[tuple[list[int], list[StageCalls]]]:
    """Per pipeline rank, its stages by number and as the knapsack sees them."""
    state = {i: unit.state_bytes for i, unit in zip(demand.calls, demand.units, strict=True)}
    found = []
    for rank in sorted(set(demand.placement)):
        numbers = [number for number, home in enumerate(demand.placement) if home == rank]
        mine = [_calls(demand, cut, number) for number in numbers]
        stages = []
        turns = demand.turns[rank] if demand.turns is not None else None
        for number, calls, beside in zip(numbers, mine, demand.passes.of_rank(mine, turns), strict=True):
            inflight = demand.inflight[number]
            fixed = sum(state[i] for i in calls) + inflight * demand.activations.shared_bytes
            stages.append(StageCalls(tuple(_rows(demand, calls, options, beside)), inflight, fixed))
        found.append((numbers, stages))
    return found


def _rows(
    demand: Demand, calls: Sequence[int], options: Mapping[int, tuple[Alternative, ...]], beside: Sequence[int]
) -> Iterator[tuple[Option, ...]]:
    """The options of the calls of a stage, whose passes hold so much ``beside``, without what later ones keep at
    least."""
    activations = demand.activations
    least = [min(activations.call_bytes(i, a) for a in options[i]) for i in calls]
    later = sum(least)
    for i, own, held in zip(calls, least, beside, strict=True):
        later -= own
        yield activations.row(i, options[i], held - later)


def _calls(demand: Demand, cut: Partition, number: int) -> Sequence[int]:
    ends = (*cut.starts[1:], len(demand.calls))
    return demand.calls[cut.starts[number] : ends[number]]


def _refuse(demand: Demand, options: Mapping[int, tuple[Alternative, ...]]) -> Fit:
    """Raises the StageError, with what the leanest cut needs at least."""
    if demand.even:
        cut = even_partition(demand.units, len(demand.placement), demand.placement)
    else:
        cut = _leanest_cut(demand, _units(demand, _leanest(options)))
    least = max(least_bytes(stages) for _, stages in _ranks(demand, cut, options))
    how = {"auto": " with everything recomputed", "none": "", "full": "", "selective": ""}[demand.mode]
    hint = "" if demand.mode == "auto" else "recompute='auto', "
    needed = least + demand.reserved_bytes
    raise too_large(len(demand.placement), demand.budget_bytes, needed, how, hint)
