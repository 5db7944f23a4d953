"""The cheapest placement, with a proof: by elimination where the graph allows it, else as an MILP.

A budget of memory is left out first: the cheapest placement of all usually fits. Where it doesn't, bytes get a price
(Lagrangian relaxation: H. Everett, Operations Research 11(3), 1963). Every price gives a bound and a placement, and the
best price is where the placements on both sides of the budget cost the same; what gap is left the MILP closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from autopar.errors import ShardingError, StateError
from autopar.planner.elimination import LARGEST, eliminate
from autopar.planner.placement import Problem, Solution
from autopar.planner.placement_network import PlacementNetwork, network_of
from autopar.planner.unrolled import merged

_GAP = 1e-4
"""A placement under a budget that is proven to be this close to the best (relative) is taken."""

_PRICES = 20
"""So many prices of bytes are tried; each takes one elimination."""

_LOOP_GAP = 1e-3
"""The same of placements with loops, of which bounds only say what is best if iterations are alike."""

_ONLY_BYTES = 1e3
"""Seconds per byte under which nothing but bytes counts."""


def solve(
    problem: Problem,
    *,
    alike: Iterable[Sequence[int]] = (),
    largest: int = LARGEST,
    time_limit_seconds: float = 60.0,
) -> Solution:
    """The cheapest assignment; ``largest`` bounds the tables of elimination, ``time_limit_seconds`` the MILP.

    Where elimination takes too much, vertices that are ``alike`` (iterations of a loop) have the same choice
    (:mod:`autopar.planner.unrolled`), and the bound is one of assignments in which they do. Raises ShardingError where
    none satisfies the constraints.
    """
    found = _by_elimination(problem, largest) or _with_loops(problem, alike, largest, time_limit_seconds)
    return found or _by_milp(problem, time_limit_seconds)


def _by_elimination(problem: Problem, largest: int) -> Solution | None:
    """None where that takes too much."""
    network = network_of(problem)
    free = None if network is None else _cheapest(problem, network, 0.0, largest)
    if network is None or free is None:
        return None
    if problem.budget_bytes is None or free.bytes <= problem.budget_bytes:
        return Solution(free.choices, free.seconds, min(free.priced_seconds, free.seconds))
    return _within(problem, network, problem.budget_bytes, free, largest)


def _with_loops(
    problem: Problem, alike: Iterable[Sequence[int]], largest: int, time_limit_seconds: float
) -> Solution | None:
    """None where nothing is ``alike``, or nothing is left where it is placed so."""
    smaller = merged(problem, alike)
    if smaller is None:
        return None
    try:
        found = _by_elimination(smaller.problem, largest)
        if found is None:
            smaller = smaller.in_few_ways()
            found = _by_elimination(smaller.problem, largest)
        found = found or _by_milp(smaller.problem, time_limit_seconds, _LOOP_GAP)
    except ShardingError:
        return None
    choices = smaller.choices(found.choices)
    seconds = problem.seconds(choices)
    return Solution(choices, seconds, min(found.bound_seconds, seconds))


def _by_milp(problem: Problem, time_limit_seconds: float, gap: float = 0.0) -> Solution:
    from autopar.planner.onehot import solve_milp  # its solver takes a second to import, and most plans do without

    return solve_milp(problem, time_limit_seconds=time_limit_seconds, gap=gap)


@dataclass(frozen=True)
class _Placed:
    """An assignment: nothing costs less than ``priced_seconds`` under the price of bytes that it was found for."""

    choices: tuple[int, ...]
    seconds: float
    bytes: int
    priced_seconds: float


def _cheapest(problem: Problem, network: PlacementNetwork, price: float, largest: int) -> _Placed | None:
    """None where elimination would take too much."""
    found = eliminate(network.priced(price), largest)
    if found is None:
        return None
    values, total = found
    if total == inf:
        raise ShardingError("no placement satisfies every op: their choices don't go together")
    choices = network.choices(values)
    return _Placed(choices, problem.seconds(choices), problem.bytes(choices), total)


def _within(problem: Problem, network: PlacementNetwork, budget: int, above: _Placed, largest: int) -> Solution | None:
    """An assignment within the budget and a bound, from prices of bytes; None where too much is left between them."""
    below = _cheapest(problem, network, _ONLY_BYTES, largest)
    if below is None:
        return None
    if below.bytes > budget:
        raise StateError(
            f"no placement satisfies the memory budget: parameters, gradients and optimizer take {below.bytes} bytes "
            f"or more, of {budget}",
            below.bytes,
        )
    best, bound = below, above.seconds
    for _ in range(_PRICES):
        price = (below.seconds - above.seconds) / (above.bytes - below.bytes)
        found = _cheapest(problem, network, price, largest)
        if found is None or price <= 0:
            break
        bound = max(bound, found.priced_seconds - price * budget)
        if found.bytes <= budget and found.seconds < best.seconds:
            best = found
        if best.seconds - bound <= _GAP * best.seconds:
            return Solution(best.choices, best.seconds, min(bound, best.seconds))
        if found.bytes in (above.bytes, below.bytes):
            break
        above, below = (above, found) if found.bytes <= budget else (found, below)
    return None
