"""CP-SAT as the planner runs it: the same answer on every machine."""

from __future__ import annotations

from ortools.sat.python import cp_model


def solve(model: cp_model.CpModel, deterministic_time: float = 20.0) -> cp_model.CpSolver | None:
    """The solver with its best solution after so much work (about seconds); None where nothing satisfies the
    constraints."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = deterministic_time
    return solver if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
