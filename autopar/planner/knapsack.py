"""Which calls of a pipeline rank recompute what, so that the rank fits: a multiple-choice knapsack, by CP-SAT.

Sets
    stages k of the rank; kinds c of calls with equal options, ``count_kc`` of them; options p of a kind
Variables
    n_kcp in 0..count_kc: how many of the calls take p; t: bytes of the largest recomputation      :func:`_counts`
Constraints
    sum_p n_kcp = count_kc                                                                         :func:`_counts`
    t >= transient_p wherever n_kcp > 0                                                            :func:`_bytes`
    sum_k fixed_k + inflight_k * sum bytes_p n_kcp + t <= budget                                   :func:`_bytes`
Objective
    min sum seconds_p n_kcp, then bytes (:func:`choose`); or bytes alone (:func:`least_bytes`)

Both sums are scaled down to 2^30 units, bytes rounded up: what is chosen never exceeds the budget. Of equal calls, the
first ones in the stage take the leanest options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from autopar.planner.cp import solve

_UNITS = 1 << 30


@dataclass(frozen=True)
class Option:
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

    @property
    def kinds(self) -> dict[tuple[Option, ...], list[int]]:
        """Equal options -> the calls that have them."""
        found: dict[tuple[Option, ...], list[int]] = {}
        for position, options in enumerate(self.calls):
            found.setdefault(options, []).append(position)
        return found


Counts = list[dict[tuple[Option, ...], list[cp_model.IntVar]]]


def choose(stages: Sequence[StageCalls], budget_bytes: int) -> list[list[int]] | None:
    """Per stage and call, the option to take: of those within the budget the fastest, then the leanest.

    None where there is none.
    """
    model = cp_model.CpModel()
    counts = _counts(model, stages)
    unit = max(1, -(-budget_bytes // _UNITS))
    bytes_ = _bytes(model, stages, counts, unit)
    model.add(bytes_ <= budget_bytes // unit)
    model.minimize(_seconds(stages, counts))
    solver = solve(model)
    if solver is None:
        return None
    model.add(_seconds(stages, counts) <= round(solver.objective_value))
    model.minimize(bytes_)
    solver = solve(model) or solver
    return [_assigned(solver, stage, mine) for stage, mine in zip(stages, counts, strict=True)]


def least_bytes(stages: Sequence[StageCalls]) -> int:
    """The smallest budget for which :func:`choose` finds anything."""
    model = cp_model.CpModel()
    counts = _counts(model, stages)
    most = sum(s.fixed_bytes + s.inflight * sum(max(o.saved_bytes for o in c) for c in s.calls) for s in stages)
    unit = max(1, -(-most // _UNITS))
    bytes_ = _bytes(model, stages, counts, unit)
    model.minimize(bytes_)
    solver = solve(model)
    assert solver is not None
    return round(solver.objective_value) * unit


def used_bytes(stages: Sequence[StageCalls], taken: Sequence[Sequence[int]]) -> int:
    """What the rank needs with these options."""
    chosen = [[c[p] for c, p in zip(s.calls, row, strict=True)] for s, row in zip(stages, taken, strict=True)]
    kept = sum(
        s.fixed_bytes + s.inflight * sum(o.saved_bytes for o in row) for s, row in zip(stages, chosen, strict=True)
    )
    return kept + max((o.transient_bytes for row in chosen for o in row), default=0)


def _counts(model: cp_model.CpModel, stages: Sequence[StageCalls]) -> Counts:
    counts: Counts = []
    for k, stage in enumerate(stages):
        mine = {}
        for c, (options, calls) in enumerate(stage.kinds.items()):
            mine[options] = [model.new_int_var(0, len(calls), f"n{k}_{c}_{p}") for p in range(len(options))]
            model.add(sum(mine[options]) == len(calls))
        counts.append(mine)
    return counts


def _bytes(model: cp_model.CpModel, stages: Sequence[StageCalls], counts: Counts, unit: int) -> cp_model.LinearExprT:
    largest = max((o.transient_bytes for s in stages for c in s.calls for o in c), default=0)
    transient = model.new_int_var(0, -(-largest // unit), "t")
    fixed = sum(-(-stage.fixed_bytes // unit) for stage in stages)
    terms: list[cp_model.LinearExprT] = [transient, fixed]
    for stage, mine in zip(stages, counts, strict=True):
        for option, number in _numbered(mine):
            terms.append(number * (stage.inflight * -(-option.saved_bytes // unit)))
            if option.transient_bytes:
                used = model.new_bool_var("")
                model.add(number == 0).only_enforce_if(~used)
                model.add(transient >= -(-option.transient_bytes // unit)).only_enforce_if(used)
    return cp_model.LinearExpr.sum(terms)


def _numbered(counts: dict[tuple[Option, ...], list[cp_model.IntVar]]) -> Iterator[tuple[Option, cp_model.IntVar]]:
    for options, numbers in counts.items():
        yield from zip(options, numbers, strict=True)


def _seconds(stages: Sequence[StageCalls], counts: Counts) -> cp_model.LinearExprT:
    most = math.fsum(max(o.seconds for o in c) for s in stages for c in s.calls)
    unit = most / _UNITS or 1.0
    terms: list[cp_model.LinearExprT] = [
        number * round(option.seconds / unit) for mine in counts for option, number in _numbered(mine)
    ]
    return cp_model.LinearExpr.sum(terms)


def _assigned(
    solver: cp_model.CpSolver, stage: StageCalls, counts: dict[tuple[Option, ...], list[cp_model.IntVar]]
) -> list[int]:
    taken = [0] * len(stage.calls)
    for options, calls in stage.kinds.items():
        order = sorted(range(len(options)), key=lambda p: (options[p].saved_bytes, -options[p].seconds))
        row = [p for p in order for _ in range(solver.value(counts[options][p]))]
        for call, option in zip(calls, row, strict=True):
            taken[call] = option
    return taken
