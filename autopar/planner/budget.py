"""Holds a plan to its budget by what ranks really hold.

Solvers add up what is linear in their choices: state, and what is kept per microbatch in flight. Beside that, a rank
has buffers and temporaries, which are known once there are programs. So a plan that comes near its budget is measured
(``exact``); what the solver didn't count is spared, and the pipeline laid out again. Where that leaves no choice, the
leanest one is measured itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

from autopar.errors import BudgetError
from autopar.plan import Plan
from autopar.planner.stages import too_large

_NEAR = 0.5  # of the budget; below, what isn't counted doesn't matter
_MARGIN = 0.002  # of the budget: a round takes longer than that is worth
_ROUNDS = 4


class HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


T = TypeVar("T", bound=HasPlan)


class Exact(Protocol[T]):
    """Gives ``found`` with what its ranks hold: all of them, or until one holds more than ``enough`` bytes."""

    def __call__(self, found: T, enough: float, /) -> T: ...


def within_budget(lay_out: Callable[[int], T], exact: Exact[T], budget_bytes: int, spared: int = 0) -> T:
    """The plan of ``lay_out(spared)``, whose solvers leave ``spared`` bytes of the budget free, that really fits; at
    first as many as are given. Raises BudgetError with a budget that would do."""
    for left in reversed(range(_ROUNDS)):
        try:
            found = lay_out(spared)
        except BudgetError as error:
            return _leanest(lay_out, exact, budget_bytes, error.needed_bytes - spared)
        counted = max(found.plan.peak_bytes)
        if counted <= _NEAR * budget_bytes:
            return found
        found = exact(found, budget_bytes)
        held = max(found.plan.peak_bytes)
        if held <= budget_bytes:
            return found
        # What is hidden may grow with what is recomputed, by a little mostly; at last, the solver is left nothing.
        more = max(held - counted, spared + held - budget_bytes)
        spared = more + int(_MARGIN * budget_bytes) if left > 1 else budget_bytes
    raise _refusal(found.plan, budget_bytes, counted)


def _leanest(lay_out: Callable[[int], T], exact: Exact[T], budget_bytes: int, least_bytes: int) -> T:
    """What the solver can do at least with ``least_bytes``, or with what it asks for then, if that really fits: where
    activations go to the host, what it asks for is a guess."""
    for left in reversed(range(_ROUNDS)):
        try:
            found = lay_out(budget_bytes - least_bytes)
            break
        except BudgetError as error:
            more = error.needed_bytes - budget_bytes
            if not left or more <= 0:
                raise
            least_bytes += more
    counted = max(found.plan.peak_bytes)
    found = exact(found, math.inf)
    if max(found.plan.peak_bytes) > budget_bytes:
        raise _refusal(found.plan, budget_bytes, counted)
    return found


def _refusal(leanest: Plan, budget_bytes: int, counted_bytes: int) -> BudgetError:
    held = max(leanest.peak_bytes)
    how = " with everything recomputed" if leanest.options.recompute == "auto" else ""
    hint = "" if leanest.options.recompute == "auto" else "recompute='auto', "
    return too_large(len(leanest.stage_plans), budget_bytes, held, how, hint, held - counted_bytes)
