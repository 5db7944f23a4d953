"""Cuts a model into stages and chooses what each call recomputes, so that every pipeline rank fits its memory.

The two depend on each other: a cut says how many microbatches a call is kept for, recomputation makes stages slower. So
the cut is made knowing the leanest bytes, so that a choice exists; then each rank's choice is exact
(:mod:`autopar.planner.knapsack`); then the calls are timed with it and cut again, while that makes the slowest rank
faster. Where nothing has to be recomputed and no cut is faster than the one that fits, nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import StageError
from autopar.graph import Model
from autopar.passes.recompute import own_modules
from autopar.planner.activations import Activations, Alternative
from autopar.planner.knapsack import Option, StageCalls, choose, least_bytes, used_bytes
from autopar.planner.stages import Partition, Unit, check_count, even_partition, leanest_partition, partition, too_large

_ROUNDS = 4  # of cutting and choosing; more have never changed anything


@dataclass(frozen=True)
class Fit:
    """A cut, and for each call (in the model's numbering) what it recomputes."""

    cut: Partition
    chosen: Mapping[int, Alternative]


@dataclass(frozen=True)
class Demand:
    """What is to be fitted: ``units`` are those of ``calls``; ``inflight`` and ``placement`` are per stage; a rank has
    ``budget_bytes``, of which ``reserved_bytes`` are taken. ``even``: equally many layers per stage, whatever they
    cost. ``mode`` is ``options.recompute``."""

    model: Model
    calls: Sequence[int]
    units: Sequence[Unit]
    activations: Activations
    inflight: Sequence[int]
    placement: Sequence[int]
    budget_bytes: int
    reserved_bytes: int
    even: bool
    mode: str

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.reserved_bytes)

    def none(self, index: int) -> Alternative:
        return self.activations.choices[self.model.calls[index].block].none

    def options(self, index: int) -> tuple[Alternative, ...]:
        """What a call may do; only layers, whose code is a class of their own, may recompute."""
        choices = self.activations.choices[self.model.calls[index].block]
        if index not in own_modules(self.model) or self.mode == "none":
            return (choices.none,)
        fixed = {"full": lambda: choices.whole, "selective": lambda: choices.selective}.get(self.mode)
        return choices.frontier if fixed is None else (fixed(),)


def fit(demand: Demand) -> Fit:
    """The fastest that fits. Raises StageError, which says the smallest budget that would do, and for fewer units than
    stages."""
    check_count(demand.units, len(demand.placement), len(set(demand.placement)))
    if demand.mode != "auto":
        return _fitted(demand, {i: demand.options(i) for i in demand.calls})
    plain = {i: (demand.none(i),) for i in demand.calls}
    if demand.even:
        cut = even_partition(demand.units, len(demand.placement), demand.placement)
        found = _chosen(demand, cut, plain) or _chosen(demand, cut, {i: demand.options(i) for i in demand.calls})
        return found or _refuse(demand, cut)
    try:
        found = _fitted(demand, plain)
    except StageError:
        found = None
    if found is not None and found.cut.slowest_seconds <= _unbounded(demand).slowest_seconds:
        return found
    return _with_recomputation(demand, found)


def pinned(demand: Demand, cut: Partition, chosen: Mapping[int, Alternative]) -> Fit:
    """What a plan says, without a choice: timed as it is."""
    return _timed(demand, cut, chosen)


def _fitted(demand: Demand, options: Mapping[int, tuple[Alternative, ...]]) -> Fit:
    """The best cut where every call has one option."""
    chosen = {i: only for i, (only,) in options.items()}
    units = _units(demand, chosen)
    if demand.even:
        cut = even_partition(units, len(demand.placement), demand.placement)
        return _chosen(demand, cut, options) or _refuse(demand, cut)
    transient = max(a.transient_bytes for a in chosen.values())
    shared = demand.activations.shared_bytes
    budget = max(0, demand.free_bytes - transient)
    try:
        cut = partition(units, demand.inflight, budget, demand.placement, shared)
    except StageError:
        return _refuse(demand, leanest_partition(units, demand.inflight, demand.placement, shared))
    return Fit(cut, chosen)


def _unbounded(demand: Demand) -> Partition:
    """The fastest cut if memory didn't matter: no choice is faster."""
    return partition(demand.units, demand.inflight, None, demand.placement)


def _with_recomputation(demand: Demand, without: Fit | None) -> Fit:
    options = {i: demand.options(i) for i in demand.calls}
    bound = _unbounded(demand).bound_seconds
    leanest = {i: min(some, key=lambda a: a.saved_bytes) for i, some in options.items()}
    best = without
    for cut in _cuts_of(demand, leanest):
        best = _better(best, _chosen(demand, cut, options))
    if best is None:
        units = _units(demand, leanest)
        shared = demand.activations.shared_bytes
        return _refuse(demand, leanest_partition(units, demand.inflight, demand.placement, shared))
    for _ in range(_ROUNDS):
        again = _recut(demand, best, options)
        if again is None or _better(best, again) is best:
            break
        best = again
    return replace(best, cut=replace(best.cut, bound_seconds=bound))


def _cuts_of(demand: Demand, leanest: Mapping[int, Alternative]) -> list[Partition]:
    """For the leanest bytes: the fastest cut with room for any recomputation, the fastest without, the leanest."""
    units, shared = _units(demand, leanest), demand.activations.shared_bytes
    timed = [replace(u, seconds=plain.seconds) for u, plain in zip(units, demand.units, strict=True)]
    transient = max(a.transient_bytes for a in leanest.values())
    found = [leanest_partition(units, demand.inflight, demand.placement, shared)]
    for budget in (demand.free_bytes - transient, demand.free_bytes):
        try:
            found.append(partition(timed, demand.inflight, max(0, budget), demand.placement, shared))
        except StageError:
            continue
    return found


def _recut(demand: Demand, before: Fit, options: Mapping[int, tuple[Alternative, ...]]) -> Fit | None:
    """Cut for the calls as they were chosen, then choose for that cut."""
    units = _units(demand, before.chosen)
    transient = max(a.transient_bytes for a in before.chosen.values())
    budget = max(0, demand.free_bytes - transient)
    try:
        cut = partition(units, demand.inflight, budget, demand.placement, demand.activations.shared_bytes)
    except StageError:
        return None
    return _chosen(demand, cut, options)


def _better(one: Fit | None, other: Fit | None) -> Fit | None:
    if one is None or other is None:
        return one or other
    return other if other.cut.slowest_seconds < one.cut.slowest_seconds * (1 - 1e-9) else one


def _units(demand: Demand, chosen: Mapping[int, Alternative]) -> list[Unit]:
    """The units under a choice."""
    return [
        replace(
            unit,
            seconds=unit.seconds + chosen[i].seconds,
            saved_bytes=demand.activations.call_bytes(i, chosen[i]),
        )
        for i, unit in zip(demand.calls, demand.units, strict=True)
    ]


def _chosen(demand: Demand, cut: Partition, options: Mapping[int, tuple[Alternative, ...]]) -> Fit | None:
    """The fastest choice within the budget for this cut; None where there is none."""
    chosen: dict[int, Alternative] = {}
    for numbers, stages in _ranks(demand, cut, options):
        taken = choose(stages, demand.free_bytes)
        if taken is None:
            return None
        assert used_bytes(stages, taken) <= demand.free_bytes
        for number, row in zip(numbers, taken, strict=True):
            calls = _calls(demand, cut, number)
            chosen |= {i: options[i][p] for i, p in zip(calls, row, strict=True)}
    return _timed(demand, cut, chosen)


def _timed(demand: Demand, cut: Partition, chosen: Mapping[int, Alternative]) -> Fit:
    """The cut with the slowest rank's seconds under the choice."""
    units = _units(demand, chosen)
    ends = (*cut.starts[1:], len(units))
    send = [0.0, *(unit.cut_seconds for unit in units[1:]), 0.0]
    seconds: dict[int, float] = {}
    for rank, a, b in zip(demand.placement, cut.starts, ends, strict=True):
        seconds[rank] = seconds.get(rank, 0.0) + sum(u.seconds for u in units[a:b]) + send[a] + send[b]
    return Fit(replace(cut, slowest_seconds=max(seconds.values())), chosen)


def _ranks(
    demand: Demand, cut: Partition, options: Mapping[int, tuple[Alternative, ...]]
) -> list[tuple[list[int], list[StageCalls]]]:
    """Per pipeline rank, its stages by number and as the knapsack sees them."""
    state = {i: unit.state_bytes for i, unit in zip(demand.calls, demand.units, strict=True)}
    bytes_: Callable[[int, Alternative], int] = demand.activations.call_bytes
    found: dict[int, tuple[list[int], list[StageCalls]]] = {}
    for number, rank in enumerate(demand.placement):
        calls, inflight = _calls(demand, cut, number), demand.inflight[number]
        rows = tuple(tuple(Option(bytes_(i, a), a.seconds, a.transient_bytes) for a in options[i]) for i in calls)
        fixed = sum(state[i] for i in calls) + inflight * demand.activations.shared_bytes
        numbers, stages = found.setdefault(rank, ([], []))
        numbers.append(number)
        stages.append(StageCalls(rows, inflight, fixed))
    return [found[rank] for rank in sorted(found)]


def _calls(demand: Demand, cut: Partition, number: int) -> Sequence[int]:
    ends = (*cut.starts[1:], len(demand.calls))
    return demand.calls[cut.starts[number] : ends[number]]


def _refuse(demand: Demand, cut: Partition) -> Fit:
    """Raises the StageError, with what this cut needs at least."""
    options = {i: demand.options(i) for i in demand.calls}
    least = max(least_bytes(stages) for _, stages in _ranks(demand, cut, options))
    how = {"auto": " with everything recomputed", "none": "", "full": "", "selective": ""}[demand.mode]
    hint = "" if demand.mode == "auto" else "recompute='auto', "
    needed = least + demand.reserved_bytes
    raise too_large(len(demand.placement), demand.budget_bytes, needed, how, hint)
