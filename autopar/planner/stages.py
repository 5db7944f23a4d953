"""Where to cut a model into contiguous pipeline stages: an ILP over the folded calls, solved by CP-SAT.

Sets
    units i = 0..n-1 (calls in order: embedding, layers, head with loss), stages k = 0..K-1, ranks r = placement[k]
Variables
    c_k in 0..n, c_0 = 0, c_K = n, c_k < c_{k+1}            first unit of stage k           :func:`_cuts`
    T >= seconds of every rank, L >= seconds of every stage, M >= bytes of every rank       :func:`_maximum`
Objective
    min T (the slowest rank sets the pace of a pipeline), then L at that T, then M at both
Constraints
    seconds_k = time[c_{k+1}] - time[c_k] + send[c_k] + send[c_{k+1}]   prefix sums by element  :func:`_stage_seconds`
    bytes_k   = state[c_{k+1}] - state[c_k] + inflight_k * (saved[c_{k+1}] - saved[c_k] + shared)  :func:`_stage_bytes`
    T, M      : sums over the stages of a rank; bytes of a rank <= budget                       :func:`_per_rank`

``inflight_k`` is how many microbatches the schedule keeps between forward and backward of stage k when its rank keeps
the most; ``shared`` is what the units of a stage keep together, once each microbatch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from autopar.errors import BudgetError, StageError
from autopar.plan import bytes_text
from autopar.planner.cp import solve

_NANOSECOND = 1e-9
_KIB = 1024


@dataclass(frozen=True)
class Unit:
    """One call: seconds of forward plus backward per microbatch, bytes of state (parameters, gradients, optimizer),
    bytes saved per microbatch in flight, and seconds to send what crosses a cut before it. Units of one ``kind`` are
    calls of one block."""

    name: str
    seconds: float
    state_bytes: int
    saved_bytes: int
    cut_seconds: float
    kind: int = 0


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
) -> Partition:
    """The best contiguous partition into ``len(inflight)`` stages; ``placement[k]`` is stage k's rank (None: k).

    Raises StageError where there are fewer units than stages, or no partition fits ``budget_bytes`` per rank.
    """
    stages = len(inflight)
    placement = range(stages) if placement is None else placement
    check_count(units, stages, len(set(placement)))
    model = cp_model.CpModel()
    cuts = _cuts(model, len(units), stages)
    seconds = _stage_seconds(model, units, cuts)
    bytes_ = _per_rank(_stage_bytes(model, units, cuts, inflight, shared_bytes), placement)
    if budget_bytes is not None:
        for term in bytes_:
            model.add(term <= budget_bytes // _KIB)
    slowest = _maximum(model, _per_rank(seconds, placement), "slowest")
    longest = _maximum(model, seconds, "longest")
    largest = _maximum(model, bytes_, "largest")
    model.minimize(slowest)
    solver = solve(model)
    if solver is None:
        raise too_large(stages, budget_bytes or 0, _least(units, inflight, placement, shared_bytes))
    bound = solver.best_objective_bound * _NANOSECOND
    for settled, objective in ((slowest, longest), (longest, largest)):
        model.add(settled <= solver.value(settled))
        model.minimize(objective)
        solver = solve(model) or solver
    starts = tuple(solver.value(c) for c in cuts[:-1])
    return Partition(starts, solver.value(slowest) * _NANOSECOND, bound)


def even_partition(units: Sequence[Unit], stages: int, placement: Sequence[int] | None = None) -> Partition:
    """Equal numbers of layers per stage, the rest to the first ones; what is no layer stays with its neighbour.

    Layers are the units of the kind that there is most of. This is how pipelines are cut by hand, and what others are
    compared with. Raises StageError where there are fewer layers than stages.
    """
    placement = range(stages) if placement is None else placement
    kinds = Counter(unit.kind for unit in units)
    most = kinds.most_common(1)[0][0]
    layers = [i for i, unit in enumerate(units) if unit.kind == most]
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


def _maximum(model: cp_model.CpModel, terms: Sequence[cp_model.LinearExprT], name: str) -> cp_model.IntVar:
    bound = model.new_int_var(0, 1 << 60, name)
    for term in terms:
        model.add(bound >= term)
    return bound


def too_large(stages: int, budget_bytes: int, least_bytes: int, how: str = "", hint: str = "") -> BudgetError:
    """The refusal that says what would do; ``how`` is the leanest way, ``hint`` one more way out."""
    return BudgetError(
        f"no cut into {stages} stages fits the {bytes_text(budget_bytes)} that a rank has for them: the leanest needs "
        f"{bytes_text(least_bytes)}{how} ({least_bytes} bytes). Use {hint}a schedule that keeps fewer microbatches "
        "(1f1b instead of gpipe, v-half), more stages, tp, ZeRO, or smaller microbatches",
        least_bytes,
    )


def leanest_partition(
    units: Sequence[Unit], inflight: Sequence[int], placement: Sequence[int], shared_bytes: int = 0
) -> Partition:
    """The partition whose largest rank is smallest."""
    return _leanest(units, inflight, placement, shared_bytes)[0]


def _least(units: Sequence[Unit], inflight: Sequence[int], placement: Sequence[int], shared_bytes: int) -> int:
    return _leanest(units, inflight, placement, shared_bytes)[1]


def _leanest(
    units: Sequence[Unit], inflight: Sequence[int], placement: Sequence[int], shared_bytes: int
) -> tuple[Partition, int]:
    """And what its largest rank needs."""
    model = cp_model.CpModel()
    cuts = _cuts(model, len(units), len(inflight))
    bytes_ = _per_rank(_stage_bytes(model, units, cuts, inflight, shared_bytes), placement)
    model.minimize(_maximum(model, bytes_, "largest"))
    solver = solve(model)
    assert solver is not None  # only the order of the cuts constrains it
    return Partition(tuple(solver.value(c) for c in cuts[:-1]), 0.0, 0.0), round(solver.objective_value) * _KIB


def _cuts(model: cp_model.CpModel, units: int, stages: int) -> list[cp_model.IntVar]:
    cuts = [model.new_int_var(k, units - (stages - k), f"c{k}") for k in range(stages + 1)]
    model.add(cuts[0] == 0)
    model.add(cuts[-1] == units)
    for a, b in itertools.pairwise(cuts):
        model.add(a < b)
    return cuts


def _stage_seconds(
    model: cp_model.CpModel, units: Sequence[Unit], cuts: list[cp_model.IntVar]
) -> Sequence[cp_model.LinearExprT]:
    time = _prefix([_nanoseconds(u.seconds) for u in units])
    send = [0] + [_nanoseconds(u.cut_seconds) for u in units[1:]] + [0]
    at = [_element(model, time, cut, "time") for cut in cuts]
    wire = [_element(model, send, cut, "send") for cut in cuts]
    return [at[k + 1] - at[k] + wire[k] + wire[k + 1] for k in range(len(cuts) - 1)]


def _stage_bytes(
    model: cp_model.CpModel,
    units: Sequence[Unit],
    cuts: list[cp_model.IntVar],
    inflight: Sequence[int],
    shared_bytes: int,
) -> Sequence[cp_model.LinearExprT]:
    state = _prefix([_kib(u.state_bytes) for u in units])
    saved = _prefix([_kib(u.saved_bytes) for u in units])
    held = [_element(model, state, cut, "state") for cut in cuts]
    kept = [_element(model, saved, cut, "saved") for cut in cuts]
    shared = _kib(shared_bytes)
    return [held[k + 1] - held[k] + inflight[k] * (kept[k + 1] - kept[k] + shared) for k in range(len(inflight))]


def _element(model: cp_model.CpModel, table: list[int], index: cp_model.IntVar, name: str) -> cp_model.IntVar:
    value = model.new_int_var(min(table), max(table), f"{name}_{index}")
    model.add_element(index, table, value)
    return value


def _prefix(values: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(values)]


def _nanoseconds(seconds: float) -> int:
    return round(seconds / _NANOSECOND)


def _kib(bytes_: int) -> int:
    return -(-bytes_ // _KIB)
