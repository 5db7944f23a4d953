"""The placement problem: what consumers of one value share, and that both ways to solve it find the same minimum."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ShardingError
from autopar.planner import elimination
from autopar.planner.onehot import solve_milp
from autopar.planner.placement import Edge, Problem, Vertex
from autopar.planner.solve_placement import solve
from autopar.spmd import I, P, R, S, Type

TYPES = (R, I, P, S(0), S(1))


def vertex(name: str, result: Type, *operands: Type) -> Vertex:
    return Vertex(name, (result,), (operands,), (0.0,), (0,))


def seconds(*consumers: tuple[Type, float]) -> float:
    """Of one value ``S(0)`` that consumers in one share take changed, each at its price."""
    vertices = (vertex("source", S(0)), *(vertex(f"consumer {kind}", kind, kind) for kind, _ in consumers))
    edges = tuple(Edge(0, n, 0, {(S(0), kind): price}, "share") for n, (kind, price) in enumerate(consumers, 1))
    problem = Problem(vertices, edges)
    found, milp = solve(problem), solve_milp(problem)
    assert found.seconds == pytest.approx(milp.seconds, rel=1e-9)
    return found.seconds


def test_consumers_share_one_changed_copy() -> None:
    assert round(seconds((R, 2.0), (R, 2.0)), 6) == 2.0


def test_every_changed_copy_is_paid_for() -> None:
    """Also where only another consumer than the first can take it."""
    assert round(seconds((R, 2.0), (S(1), 3.0)), 6) == 5.0
    assert round(seconds((S(1), 3.0), (R, 2.0), (R, 2.0)), 6) == 5.0


def problem_of(seed: int, *, count: int = 5, budget: bool = False) -> Problem:
    """A random graph with what complicates it: shares, a vertex that takes one value twice, loops and ties."""
    draw = random.Random(seed)
    vertices, edges = [], []
    for v in range(count):
        arity = draw.randint(0, min(3, v + 1))
        choices = draw.randint(1, 4)
        sources = [draw.randrange(v + 1) for _ in range(arity)]  # its own result too: a layer that repeats
        results = tuple(draw.choice(TYPES) for _ in range(choices))
        operands = tuple(tuple(draw.choice(TYPES) for _ in sources) for _ in range(choices))
        costs = tuple(draw.choice((0.0, 1.0, draw.random())) for _ in range(choices))
        vertices.append(Vertex(f"v{v}", results, operands, costs, tuple(draw.randint(0, 9) for _ in range(choices))))
        for position, source in enumerate(sources):
            share = draw.choice((None, "share", "share"))
            edges.append(Edge(source, v, position, {}, share))
    prices = {
        (v, pair): draw.choice((0.0, draw.random()))
        for v in range(count)
        for pair in itertools.product(TYPES, TYPES)
        if pair[0] == pair[1] or draw.random() < 0.7
    }
    priced = [
        Edge(e.source, e.target, e.position, {p: c for (v, p), c in prices.items() if v == e.source}, e.share)
        for e in edges
    ]
    ties = ((0, 1),) if draw.random() < 0.3 else ()
    return Problem(tuple(vertices), tuple(priced), ties, draw.randint(3, 6 * count) if budget else None)


def brute_force(problem: Problem) -> float:
    best = math.inf
    for choices in itertools.product(*(range(len(v.results)) for v in problem.vertices)):
        if any(
            problem.vertices[v].results[choices[v]] != problem.vertices[w].results[choices[w]] for v, w in problem.ties
        ):
            continue
        if problem.budget_bytes is not None and problem.bytes(choices) > problem.budget_bytes:
            continue
        try:
            best = min(best, problem.seconds(choices))
        except KeyError:
            continue
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), budget=st.booleans())
def test_the_minimum_is_that_of_all_assignments(seed: int, budget: bool) -> None:
    problem = problem_of(seed, budget=budget)
    best = brute_force(problem)
    if best == math.inf:
        with pytest.raises(ShardingError):
            solve(problem)
        return
    found = solve(problem)
    gap = 1e-4 * best if budget else 0.0
    assert best - 1e-9 <= found.seconds <= best + gap + 1e-9
    assert found.bound_seconds <= best + 1e-9
    assert found.seconds - gap - 1e-9 <= found.bound_seconds
    assert problem.seconds(found.choices) == pytest.approx(found.seconds)
    assert problem.budget_bytes is None or problem.bytes(found.choices) <= problem.budget_bytes


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_elimination_and_the_milp_agree(seed: int) -> None:
    """Larger ones, and where no table may be made at all the MILP is what solves."""
    problem = problem_of(seed, count=14)
    try:
        milp = solve(problem, largest=0)
    except ShardingError:
        with pytest.raises(ShardingError):
            solve(problem)
        return
    assert solve(problem).seconds == pytest.approx(milp.seconds, rel=1e-6, abs=1e-9)


def test_tables_made_value_by_value_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8):
        problem = problem_of(seed, count=10)
        try:
            found = solve(problem)
        except ShardingError:
            continue
        with monkeypatch.context() as patched:
            patched.setattr(elimination, "_CACHED", 1)
            assert solve(problem) == found


def test_of_equal_choices_parts_are_taken() -> None:
    """Whatever the order in which choices are listed."""
    for results in itertools.permutations((R, I, S(0), S(0, 2), P)):
        source = Vertex("source", results, ((),) * len(results), (1.0,) * len(results), (0,) * len(results))
        (choice,) = solve(Problem((source,), ())).choices
        assert results[choice] == S(0)


def test_a_budget_that_nothing_fits_is_refused_with_what_it_takes() -> None:
    source = Vertex("weight", (I, S(0)), ((), ()), (0.0, 1.0), (800, 100))
    assert solve(Problem((source,), (), budget_bytes=100)).choices == (1,)
    with pytest.raises(ShardingError, match="100 bytes or more, of 99"):
        solve(Problem((source,), (), budget_bytes=99))


def test_consumers_of_a_share_take_what_their_own_edges_allow() -> None:
    """Not what another one's does."""
    vertices = (vertex("source", S(0)), vertex("one", R, R), vertex("other", R, R))
    edges = (Edge(0, 1, 0, {(S(0), R): 1.0}, "share"), Edge(0, 2, 0, {}, "share"))
    with pytest.raises(KeyError):
        Problem(vertices, edges).seconds((0, 0, 0))
