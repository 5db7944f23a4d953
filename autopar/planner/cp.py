"""CP-SAT as the planner runs it: the same answer on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def new_model() -> cp_model.CpModel:
    """One without variables."""
    from ortools.sat.python import cp_model  # takes a second, and most plans do without

    return cp_model.CpModel()


def solve(model: cp_model.CpModel, deterministic_time: float = 20.0, gap: float = 0.0) -> cp_model.CpSolver | None:
    """The solver with its best solution after so much work (about seconds), or one that is proven to be within this
    share of the best; None where nothing satisfies the constraints."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = deterministic_time
    solver.parameters.relative_gap_limit = gap
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
