"""Where to cut a model into contiguous pipeline stages, so that the slowest rank is as fast as can be.

Sets
    units i = 0..n-1 (calls in order: embedding, layers, head with loss), stages k = 0..K-1, ranks r = placement[k]
Variables
    c_k in 0..n, c_0 = 0, c_K = n, c_k < c_{k+1}            first unit of stage k
Objective
    min P, about what a step takes, then T, then L, the longest stage, then M, the bytes of the largest rank; then the
    later cuts (early stages wait less for the end of a step). P is T (the slowest rank sets the pace of a pipeline);
    where ranks have several stages, what :func:`.paces` makes of T, L and the number of microbatches
Constraints
    seconds_k = time[c_{k+1}] - time[c_k] + send[c_k] + send[c_{k+1}]                              :class:`.CutTable`
    bytes_k   = state[c_{k+1}] - state[c_k] + inflight_k * (saved[c_{k+1}] - saved[c_k] + shared)  :class:`.CutTable`
    T, M      : sums over the stages of a rank, M with the most that a pass of a unit holds beside, when what later
                units of its stage keep of that microbatch isn't there; M <= budget

``inflight_k`` is how many microbatches the schedule keeps between forward and backward of stage k when its rank keeps
the most; ``shared`` is what the units of a stage keep together, once each microbatch. Seconds are counted in whole
nanoseconds, bytes in whole KiB of each unit.

Where every rank has one stage this is exact (:mod:`autopar.planner.cuts`); where ranks have several it is searched for
(:mod:`autopar.planner.chunk_cuts`).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import BudgetError, StageError
from autopar.plan import bytes_text
from autopar.planner.chunk_cuts import fastest_chunks, leanest_chunks
from autopar.planner.cuts import CutTable, fastest, leanest

NANOSECOND = 1e-9
_KIB = 1024


@dataclass(frozen=True)
class Unit:
    """One call: seconds of forward plus backward per microbatch, bytes of state (parameters, gradients, optimizer),
    bytes saved per microbatch in flight, and seconds to send what crosses a cut before it; ``transient_bytes``: what
    its passes hold beside; ``is_layer``: a call of a module in a list, not of code around those."""

    name: str
    seconds: float
    state_bytes: int
    saved_bytes: int
    cut_seconds: float
    is_layer: bool = True
    transient_bytes: int = 0


@dataclass(frozen=True)
class Partition:
    """``starts[k]`` is the first unit of stage k; the bound on the slowest rank is proven (0.0: none was)."""

    starts: tuple[int, ...]
    slowest_seconds: float
    bound_seconds: float


def partition(
    units: Sequence[Unit],
    inflight: Sequence[int],
    budget_bytes: int | None,
    placement: Sequence[int] | None = None,
    shared_bytes: int = 0,
    microbatches: int = 0,
) -> Partition:
    """The best contiguous partition into ``len(inflight)`` stages; ``placement[k]`` is stage k's rank (None: k). With
    so many ``microbatches`` (0: very many) that it is the slowest rank that counts, or how equal stages are.

    Raises StageError where there are fewer units than stages, or no partition fits ``budget_bytes`` per rank.
    """
    placement = range(len(inflight)) if placement is None else placement
    check_count(units, len(inflight), len(set(placement)))
    found = find_partition(units, inflight, budget_bytes, placement, shared_bytes, microbatches)
    if found is None:
        least = leanest_partition(units, inflight, placement, shared_bytes)[1]
        raise too_large(len(inflight), budget_bytes or 0, least)
    return found


def find_partition(
    units: Sequence[Unit],
    inflight: Sequence[int],
    budget_bytes: int | None,
    placement: Sequence[int],
    shared_bytes: int,
    microbatches: int = 0,
) -> Partition | None:
    """:func:`partition` of as many units as there are stages and more; None where none fits."""
    table = replace(_table(units, inflight, placement, shared_bytes), microbatches=microbatches)
    budget = None if budget_bytes is None else budget_bytes // _KIB
    found = (fastest if table.is_straight else fastest_chunks)(table, budget)
    if found is None:
        return None
    return Partition(found.starts, found.slowest * NANOSECOND, found.bound * NANOSECOND)


@dataclass
class FoundCuts:
    """Cuts by all that they depend on, each found once: a model is laid out for many jobs, and often."""

    _fastest: dict[Hashable, Partition | None] = field(default_factory=dict)
    _leanest: dict[Hashable, Partition] = field(default_factory=dict)

    def fastest(
        self,
        units: Sequence[Unit],
        inflight: Sequence[int],
        budget_bytes: int | None,
        placement: Sequence[int],
        shared_bytes: int,
        microbatches: int,
    ) -> Partition | None:
        """:func:`find_partition`."""
        key = tuple(units), tuple(inflight), budget_bytes, tuple(placement), shared_bytes, microbatches
        if key not in self._fastest:
            self._fastest[key] = find_partition(*key)
        return self._fastest[key]

    def leanest(
        self, units: Sequence[Unit], inflight: Sequence[int], placement: Sequence[int], shared_bytes: int
    ) -> Partition:
        """The first of :func:`leanest_partition`."""
        key = tuple(units), tuple(inflight), tuple(placement), shared_bytes
        if key not in self._leanest:
            self._leanest[key] = leanest_partition(*key)[0]
        return self._leanest[key]


def even_partition(units: Sequence[Unit], stages: int, placement: Sequence[int] | None = None) -> Partition:
    """Equal numbers of layers per stage, the rest to the first ones; what is no layer stays with its neighbour.

    Layers may differ (windows in every other one, some with experts). This is how pipelines are cut by hand, and what
    others are compared with. Where there is no layer, all units count. Raises StageError where there are fewer layers
    than stages.
    """
    placement = range(stages) if placement is None else placement
    layers = [i for i, unit in enumerate(units) if unit.is_layer] or range(len(units))
    check_count([units[i] for i in layers], stages, len(set(placement)))
    size, more = divmod(len(layers), stages)
    firsts = list(itertools.accumulate((size + (k < more) for k in range(stages - 1)), initial=0))
    starts = (0, *(layers[first] for first in firsts[1:]))
    ends = (*starts[1:], len(units))
    seconds = [sum(u.seconds for u in units[a:b]) for a, b in zip(starts, ends, strict=True)]
    return Partition(starts, max(_per_rank(seconds, placement)), 0.0)


def check_count(units: Sequence[Unit], stages: int, ranks: int) -> None:
    """Raises StageError where there are fewer units than stages."""
    if len(units) >= stages:
        return
    chunks = stages // ranks
    use = f"use pp <= {len(units)}"
    if chunks > 1:
        use = f"use pp x chunks <= {len(units)}"
    raise StageError(
        f"the model has {len(units)} units to cut between ({', '.join(u.name for u in units)}), "
        f"fewer than pp={ranks}{f' x {chunks} chunks' if chunks > 1 else ''}; {use}"
    )


def _per_rank(terms: Sequence[Any], placement: Sequence[int]) -> list[Any]:
    return [sum(t for t, home in zip(terms, placement, strict=True) if home == rank) for rank in sorted(set(placement))]


def too_large(
    stages: int, budget_bytes: int, least_bytes: int, how: str = "", hint: str = "", uncounted_bytes: int = 0
) -> BudgetError:
    """The refusal that says what would do; ``how`` is the leanest way, ``hint`` one more way out."""
    return BudgetError(
        f"no cut into {stages} stages fits the {bytes_text(budget_bytes)} that a rank has for them: the leanest needs "
        f"{bytes_text(least_bytes)}{how} ({least_bytes} bytes). Use {hint}a schedule that keeps fewer microbatches "
        "(1f1b instead of gpipe, v-half), more stages, tp, ZeRO, or smaller microbatches",
        least_bytes,
        uncounted_bytes,
    )


def leanest_partition(
    units: Sequence[Unit], inflight: Sequence[int], placement: Sequence[int], shared_bytes: int = 0
) -> tuple[Partition, int]:
    """The partition whose largest rank is smallest, and the bytes of that rank."""
    table = _table(units, inflight, placement, shared_bytes)
    starts, kib = (leanest if table.is_straight else leanest_chunks)(table)
    return Partition(starts, 0.0, 0.0), kib * _KIB


def _table(units: Sequence[Unit], inflight: Sequence[int], placement: Sequence[int], shared_bytes: int) -> CutTable:
    return CutTable(
        seconds=tuple(round(u.seconds / NANOSECOND) for u in units),
        sends=tuple(round(u.cut_seconds / NANOSECOND) for u in units),
        state=tuple(_kib(u.state_bytes) for u in units),
        saved=tuple(_kib(u.saved_bytes) for u in units),
        transient=tuple(_kib(u.transient_bytes) for u in units),
        shared=_kib(shared_bytes),
        inflight=tuple(inflight),
        placement=tuple(placement),
    )


def _kib(bytes_: int) -> int:
    return -(-bytes_ // _KIB)
