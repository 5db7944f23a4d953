"""The placement problem (:mod:`autopar.planner.placement`) as an MILP, for where elimination takes too much.

Sets
    V vertices (ops, parameters, inputs), each with choices C_v; E edges u -> v (v's operand ``position`` is u's result)
Variables
    x_v[c] in {0, 1}        vertex v takes choice c
    e[a, b] >= 0            edge: u's result has type a, v takes it as b           (marginals, not products)
    z_u[a, b] >= 0          the consumers of u that share one changed copy         (only where several do)
Objective
    min  sum_v cost_v[c] x_v[c]  +  sum_edges price[a, b] e[a, b]  (or z[a, b] once per share)   :func:`_objective`
Constraints
    sum_c x_v[c] = 1                                                                :func:`_one_choice`
    sum_b e[a, b] = sum of x_u[c] whose result is a                                 :func:`_marginals`
    sum_a e[a, b] = sum of x_v[c] that takes this operand as b                      :func:`_marginals`
    z_u[a, b] >= e[a, b]  for every edge of the share                               :func:`_shares`
    x_v[c] = x_w[c]         for vertices that are one stored tensor                 :func:`_ties`
    sum_v bytes_v[c] x_v[c] <= budget                                               :func:`_budget`

The marginal form keeps the relaxation tight (compare the linearised product): see DESIGN 4.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ortools.linear_solver.python import model_builder as milp

from autopar.errors import ShardingError
from autopar.planner.placement import Problem, Solution
from autopar.spmd import Type

_MICROSECOND = 1e-6  # the solver sees microseconds: its tolerances are absolute

_SETTINGS = """\
presolving/maxrounds = 1
propagating/probing/maxprerounds = 0
conflict/enable = FALSE
"""
"""Of SCIP: relaxations of these problems are nearly always integral, and what comes before them took most of the
time."""

Variables = list[list[milp.Variable]]
Flow = dict[tuple[Type, Type], milp.Variable]
Flows = list[Flow]
Shares = list[tuple[float, milp.Variable]]


def solve_milp(problem: Problem, *, time_limit_seconds: float = 60.0, gap: float = 0.0) -> Solution:
    """The cheapest assignment, or one within this share (``gap``) of what none is below. Raises ShardingError where
    none satisfies the constraints."""
    model = milp.Model()  # type: ignore[no-untyped-call]
    x: Variables = [
        [model.new_bool_var(f"x{v}_{c}") for c in range(len(vertex.results))]
        for v, vertex in enumerate(problem.vertices)
    ]
    _one_choice(model, x)
    e = _marginals(model, problem, x)
    z = _shares(model, problem, e)
    _ties(model, problem, x)
    _budget(model, problem, x)
    _objective(model, problem, x, e, z)
    solver = milp.Solver("scip")
    solver.set_solver_specific_parameters(f"{_SETTINGS}limits/gap = {gap!r}\n")
    solver.set_time_limit_in_seconds(time_limit_seconds)
    status = solver.solve(model)
    if status not in (milp.SolveStatus.OPTIMAL, milp.SolveStatus.FEASIBLE):
        raise ShardingError(f"no placement satisfies every op and the memory budget ({status.name.lower()})")
    choices = tuple(max(range(len(row)), key=lambda c: solver.value(row[c])) for row in x)
    seconds = problem.seconds(choices)
    return Solution(choices, seconds, min(solver.best_objective_bound * _MICROSECOND, seconds))


def _one_choice(model: milp.Model, x: Variables) -> None:
    for row in x:
        model.add(milp.LinearExpr.sum(row) == 1)


def _marginals(model: milp.Model, problem: Problem, x: Variables) -> Flows:
    flows: Flows = []
    for number, edge in enumerate(problem.edges):
        source, target = problem.vertices[edge.source], problem.vertices[edge.target]
        made = _by_type(source.results, x[edge.source])
        taken = _by_type([row[edge.position] for row in target.operands], x[edge.target])
        flow = {
            (a, b): model.new_num_var(0.0, 1.0, f"e{number}_{a}_{b}")
            for a in made
            for b in taken
            if (a, b) in edge.prices
        }
        for a, producers in made.items():
            outgoing = [variable for (p, _), variable in flow.items() if p == a]
            model.add(milp.LinearExpr.sum(outgoing) == milp.LinearExpr.sum(producers))
        for b, consumers in taken.items():
            incoming = [variable for (_, q), variable in flow.items() if q == b]
            model.add(milp.LinearExpr.sum(incoming) == milp.LinearExpr.sum(consumers))
        flows.append(flow)
    return flows


def _by_type(types: Sequence[Type], row: list[milp.Variable]) -> dict[Type, list[milp.Variable]]:
    found: dict[Type, list[milp.Variable]] = defaultdict(list)
    for kind, variable in zip(types, row, strict=True):
        found[kind].append(variable)
    return found


def _shares(model: milp.Model, problem: Problem, e: Flows) -> Shares:
    """What is changed once for several edges, and at which price."""
    flows = {id(edge): flow for edge, flow in zip(problem.edges, e, strict=True)}
    shared: Shares = []
    for share in problem.parts[1]:
        prices = share.prices
        pairs = sorted({pair for edge in share.edges for pair in flows[id(edge)] if prices[pair] > 0})
        copies = {pair: model.new_num_var(0.0, 1.0, f"z{len(shared)}_{pair}") for pair in pairs}
        for edge in share.edges:
            for pair in pairs:
                if pair in flows[id(edge)]:
                    model.add(copies[pair] >= flows[id(edge)][pair])
        shared += [(prices[pair], copy) for pair, copy in copies.items()]
    return shared


def _ties(model: milp.Model, problem: Problem, x: Variables) -> None:
    for v, w in problem.ties:
        first, second = problem.vertices[v], problem.vertices[w]
        for c, kind in enumerate(first.results):
            same = [x[w][d] for d, other in enumerate(second.results) if other == kind]
            model.add(x[v][c] == (milp.LinearExpr.sum(same) if same else 0))


def _budget(model: milp.Model, problem: Problem, x: Variables) -> None:
    if problem.budget_bytes is None:
        return
    terms = [
        (bytes_ / problem.budget_bytes) * variable
        for vertex, row in zip(problem.vertices, x, strict=True)
        for bytes_, variable in zip(vertex.bytes, row, strict=True)
        if bytes_
    ]
    if terms:
        model.add(milp.LinearExpr.sum(terms) <= 1)


def _objective(model: milp.Model, problem: Problem, x: Variables, e: Flows, z: Shares) -> None:
    terms = []
    for vertex, row in zip(problem.vertices, x, strict=True):
        terms += [s / _MICROSECOND * v for s, v in zip(vertex.seconds, row, strict=True) if s]
    alone = {id(edge) for edge in problem.parts[0]}
    for edge, flow in zip(problem.edges, e, strict=True):
        if id(edge) in alone:
            terms += [edge.prices[pair] / _MICROSECOND * v for pair, v in flow.items() if edge.prices[pair]]
    terms += [price / _MICROSECOND * copy for price, copy in z]
    model.minimize(milp.LinearExpr.sum(terms) if terms else 0)
