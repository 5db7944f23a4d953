"""Where a layer's experts had better lie when their loads are known: hot experts apart.

Sets: experts e with load l[e], ranks r with n = experts / ranks places each.
Variables: x[e, r], whether e lies on r.
Objective: minimise t, the load of the fullest rank.
Constraints: each expert lies on one rank (:func:`_model`); each rank has n experts; the load of each rank is at most t;
the hottest expert lies on the first rank (ranks are alike).

Longest first into the emptiest rank with a place left (Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J.
Appl. Math. 1969, section 5), then swaps with the fullest rank, mostly reach the bound
``t >= max(mean, max l + the n - 1 smallest)``; where they don't, and the problem is small, CP-SAT looks on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from autopar.planner.cp import new_model, solve

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_NEAR: Final = 1.005  # of the bound: not worth a solver's time
_LARGEST: Final = 2048  # experts times ranks that are given to CP-SAT
_WORK: Final = 1.0
_UNITS: Final = 10**6  # of a layer's whole load, for integers


@dataclass(frozen=True)
class Placement:
    """``order[p]``: the expert at place ``p``, of which rank ``r`` has ``r n`` to ``r n + n - 1``. ``worst`` is how
    many times its share the fullest rank gets, which is no less than ``bound`` in any placement."""

    order: tuple[int, ...]
    worst: float
    bound: float


def place(load: Sequence[float], ranks: int) -> Placement:
    """The best placement found; the model's own order where nothing beats it. ``ranks`` divides the experts."""
    mean = sum(load) / ranks
    given = _in_places([*range(len(load))], ranks)
    bound = _bound(load, ranks)
    best = min(given, _improved(_longest_first(load, ranks), load), key=lambda found: _fullest(found, load))
    if _fullest(best, load) > bound * _NEAR and len(load) * ranks <= _LARGEST:
        best, bound = _solved(best, load, bound)
    order = tuple(expert for experts in sorted(map(sorted, best)) for expert in experts)
    return Placement(order, _fullest(best, load) / mean, min(bound, _fullest(best, load)) / mean)


Ranks = list[list[int]]
"""The experts of each rank."""


def _in_places(order: list[int], ranks: int) -> Ranks:
    each = len(order) // ranks
    return [order[first : first + each] for first in range(0, len(order), each)]


def _fullest(found: Ranks, load: Sequence[float]) -> float:
    return max(_sums(found, load))


def _sums(found: Ranks, load: Sequence[float]) -> list[float]:
    return [sum(load[expert] for expert in experts) for experts in found]


def _bound(load: Sequence[float], ranks: int) -> float:
    each, rising = len(load) // ranks, sorted(load)
    return max(sum(load) / ranks, rising[-1] + sum(rising[: each - 1]))


def _longest_first(load: Sequence[float], ranks: int) -> Ranks:
    each = len(load) // ranks
    found: Ranks = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        rank = min((r for r in range(ranks) if len(found[r]) < each), key=lambda r: (sums[r], r))
        found[rank].append(expert)
        sums[rank] += load[expert]
    return found


def _improved(found: Ranks, load: Sequence[float]) -> Ranks:
    """Swap an expert of the fullest rank with one of another while that makes both less full than it was."""
    while (swap := _best_swap(found, sums := _sums(found, load), load)) is not None:
        full, i, other, j = swap
        found[full][i], found[other][j] = found[other][j], found[full][i]
        if max(_sums(found, load)) >= max(sums):
            break
    return found


def _best_swap(found: Ranks, sums: list[float], load: Sequence[float]) -> tuple[int, int, int, int] | None:
    full = max(range(len(found)), key=lambda r: (sums[r], -r))
    best, chosen = sums[full] * (1 - 1e-12), None
    for i, hot in enumerate(found[full]):
        for other, experts in enumerate(found):
            for j, cold in enumerate(experts):
                moved = load[hot] - load[cold]
                if other != full and moved > 0 and (after := max(sums[full] - moved, sums[other] + moved)) < best:
                    best, chosen = after, (full, i, other, j)
    return chosen


def _solved(found: Ranks, load: Sequence[float], bound: float) -> tuple[Ranks, float]:
    """The best that CP-SAT finds, beginning with ``found``, and what it proves."""
    unit = sum(load) / _UNITS
    model, lies = _model(found, [round(x / unit) for x in load])
    solver = solve(model, _WORK)
    if solver is None:
        return found, bound
    ranks = range(len(found))
    made = [[e for e in range(len(load)) if solver.value(lies[e, r])] for r in ranks]
    proven = (solver.best_objective_bound - len(load)) * unit  # what rounding may have added
    return min(found, made, key=lambda each: _fullest(each, load)), max(bound, proven)


def _model(found: Ranks, load: Sequence[int]) -> tuple[cp_model.CpModel, dict[tuple[int, int], cp_model.IntVar]]:
    model = new_model()
    experts, ranks, each = range(len(load)), range(len(found)), len(found[0])
    lies = {(e, r): model.new_bool_var(f"{e} on {r}") for e in experts for r in ranks}
    fullest = model.new_int_var(0, sum(load), "fullest")
    for e in experts:
        model.add_exactly_one(lies[e, r] for r in ranks)
    for r in ranks:
        model.add(sum(lies[e, r] for e in experts) == each)
        model.add(sum(load[e] * lies[e, r] for e in experts) <= fullest)
    hottest = max(experts, key=lambda e: load[e])
    model.add(lies[hottest, 0] == 1)
    for r, own in enumerate(sorted(found, key=lambda own: hottest not in own)):
        for e in experts:
            model.add_hint(lies[e, r], e in own)
    model.minimize(fullest)
    return model, lies
