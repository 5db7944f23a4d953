"""Loops that tracing wrote out: which ops are one op of several iterations, and what placing these alike costs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import autopar
from autopar.errors import ShardingError
from autopar.graph import info
from autopar.planner import solve_placement
from autopar.planner.onehot import solve_milp
from autopar.planner.placement import Edge, Problem, Solution, Vertex
from autopar.planner.solve_placement import solve
from autopar.planner.spreading import Spread
from autopar.planner.unrolled import Merged, merged, repeated
from autopar.spmd import P, R, S, Type
from tests.fast_cluster import FAST
from tests.planner.test_onehot import problem_of, vertex


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("xabcabcabcabcy", [[1, 4, 7, 10], [2, 5, 8, 11], [3, 6, 9, 12]]),
        ("xyzuabcabcabcwv", []),  # three times is no loop
        ("abababababab", []),  # nor do two ops make an iteration
        ("xqqqqqy", []),  # parts of what is split
        ("abcabcabcabca", [[0, 3, 6, 9, 12], [1, 4, 7, 10], [2, 5, 8, 11]]),  # it may end in the middle
        ("", []),
    ],
)
def test_what_repeats(kinds: str, found: list[list[int]]) -> None:
    assert repeated(kinds) == found


def test_of_loops_in_each_other_the_one_with_the_most_ops_is_taken() -> None:
    outer = "xyz" + "abc" * 4 + "w"
    found = repeated(outer * 4)
    assert {len(places) for places in found} == {4}
    assert len(found) == len(outer)


def pairs(problem: Problem) -> list[tuple[int, int]]:
    """Vertices that take as many operands."""
    arities = [len(v.operands[0]) for v in problem.vertices]
    return [(v, w) for v, w in itertools.combinations(range(len(arities)), 2) if arities[v] == arities[w]]


def least(problem: Problem, smaller: Merged) -> float:
    """Of all assignments that the merged problem leaves."""
    best = math.inf
    for choices in itertools.product(*(range(len(v.results)) for v in smaller.problem.vertices)):
        found = smaller.choices(choices)
        results = [v.results[c] for v, c in zip(problem.vertices, found, strict=True)]
        if any(results[v] != results[w] for v, w in problem.ties):
            continue
        with suppress(KeyError):  # a change that isn't allowed
            best = min(best, problem.seconds(found))
    return best


def check(problem: Problem, smaller: Merged) -> None:
    """Solved as it is merged, it costs the least of all assignments that are left."""
    best = least(problem, smaller)
    if best == math.inf:
        with pytest.raises(ShardingError):
            solve(smaller.problem)
        return
    found = solve(smaller.problem)
    assert found.seconds == pytest.approx(best, abs=1e-9)
    assert problem.seconds(smaller.choices(found.choices)) == pytest.approx(best, abs=1e-9)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), place=st.integers(0, 20))
def test_merged_vertices_cost_what_all_of_them_do(seed: int, place: int) -> None:
    problem = problem_of(seed, count=6)
    some = pairs(problem)
    smaller = merged(problem, [some[place % len(some)]]) if some else None
    if smaller is None:
        return
    assert len(smaller.problem.vertices) == len(problem.vertices) - 1
    check(problem, smaller)


def loop_of(seed: int, iterations: int = 3) -> tuple[Problem, list[list[int]]]:
    """A table, a first state, and of each iteration what reads both, and what makes the next state of that."""
    draw = random.Random(seed)
    kinds, missing = (R, P, S(0)), draw.choice((0.0, 0.1))
    bodies: dict[str, list[tuple[Type, tuple[Type, ...]]]] = {}

    def op(name: str, arity: int) -> Vertex:
        rows = [(draw.choice(kinds), tuple(draw.choice(kinds) for _ in range(arity))) for _ in range(2)]
        rows = bodies.setdefault(name[:4], rows)  # iterations have the same
        results, operands = zip(*rows, strict=True)
        return Vertex(name, results, operands, tuple(draw.random() for _ in rows), (0,) * len(rows))

    def prices() -> dict[tuple[Type, Type], float]:
        every = ((a, b) for a in kinds for b in kinds)
        return {(a, b): 0.0 if a == b else draw.random() for a, b in every if a == b or draw.random() >= missing}

    vertices, edges, alike = [op("table", 0), op("state", 0)], list[Edge](), [list[int](), list[int]()]
    changes = [prices(), prices()]
    state = 1
    for n in range(iterations):
        read, made = len(vertices), len(vertices) + 1
        vertices += [op(f"read {n}", 2), op(f"made {n}", 2)]
        changes += [prices(), prices()]
        alike[0].append(read)
        alike[1].append(made)
        ends = ((0, read, 0, "all"), (state, read, 1, "one"), (state, made, 0, "one"), (read, made, 1, None))
        for source, target, position, share in ends:
            allowed = {(a, b): price for (a, b), price in changes[source].items() if a == b or draw.random() >= missing}
            edges.append(Edge(source, target, position, allowed, share))
        state = made
    return Problem(tuple(vertices), tuple(edges)), alike


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_merged_loops_cost_what_their_iterations_do(seed: int) -> None:
    problem, alike = loop_of(seed)
    smaller = merged(problem, alike)
    assert smaller is not None
    assert len(smaller.problem.vertices) == 4
    check(problem, smaller)


@pytest.mark.parametrize("seed", range(12))
def test_where_no_table_may_be_made_the_merged_milp_solves(seed: int) -> None:
    problem, alike = loop_of(seed)
    smaller = merged(problem, alike)
    assert smaller is not None
    best = least(problem, smaller.in_few_ways())
    if best < math.inf:
        found = solve(problem, alike=alike, largest=0)
        assert best - 1e-9 <= found.seconds <= best * (1 + 2e-3) + 1e-9
        assert found.bound_seconds <= best + 1e-9
        results = [v.results[c] for v, c in zip(problem.vertices, found.choices, strict=True)]
        assert all(len({results[v] for v in some}) == 1 for some in alike)


def test_what_can_not_be_alike_is_placed_by_itself() -> None:
    """Neighbours that leave each of two ops another choice."""
    ops = [Vertex(name, (R, S(0)), ((R,), (S(0),)), (0.0, 0.0), (0, 0)) for name in ("first", "other")]
    sources = [Vertex(str(kind), (kind,), ((),), (0.0,), (0,)) for kind in (R, S(0))]
    same: dict[tuple[Type, Type], float] = {(kind, kind): 0.0 for kind in (R, S(0))}
    problem = Problem((*ops, *sources), (Edge(2, 0, 0, same), Edge(3, 1, 0, same)))
    assert solve(problem, alike=[(0, 1)], largest=0).choices[:2] == (0, 1)


def test_choices_of_the_same_types_are_told_apart() -> None:
    """As forms of one op are."""
    first, other = (Vertex(name, (R, R), ((), ()), seconds, (0, 0)) for name, seconds in (("a", (1, 5)), ("b", (5, 2))))
    smaller = merged(Problem((first, other), ()), [(0, 1)])
    assert smaller is not None
    assert smaller.problem.vertices[0].seconds == (6, 7)


def test_few_ways_are_those_of_the_largest_pieces() -> None:
    kinds = (S(0, 8), S(0), P, S(0, 4), S(0, 2), R, S(1, 64))
    seconds = (0.0, 3.0, 4.0, 2.0, 1.0, 5.0, 6.0)
    one = Vertex("one", kinds, tuple((kind,) for kind in kinds), seconds, (0,) * len(kinds))
    problem = Problem((one, one), ())
    smaller = merged(problem, [(0, 1)])
    assert smaller is not None
    few = smaller.in_few_ways()
    assert few.problem.vertices[0].results == (S(0), P, S(0, 4), S(0, 2), R, S(1, 64))
    choices = few.choices(solve(few.problem).choices)
    assert [kinds[choice] for choice in choices] == [S(0, 2), S(0, 2)]
    assert problem.seconds(choices) == 2.0
    assert solve(problem, alike=[(0, 1)], largest=0).choices == choices  # where all ways take too much


def test_only_choices_that_all_have_are_left() -> None:
    first = vertex("first", S(0), S(0))
    other = vertex("other", R, R)
    both = Problem((first, other), ())
    assert merged(both, [(0, 1)]) is None  # none in common: they stay by themselves
    assert merged(both, []) is None


class Recurrence(nn.Module):
    """A state that goes from part to part of a sequence, as linear attention's."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).chunk(3, dim=-1)
        decay = torch.sigmoid(k.mean(dim=-1, keepdim=True))
        size, found = x.shape[1] // self.parts, []
        state = torch.zeros(x.shape[0], x.shape[2], x.shape[2], dtype=x.dtype)
        for part in range(self.parts):
            here = slice(part * size, (part + 1) * size)
            found.append(q[:, here] @ state + (q[:, here] @ k[:, here].transpose(1, 2)).tril() @ v[:, here])
            state = state * decay[:, here].mean(dim=1, keepdim=True) + k[:, here].transpose(1, 2) @ v[:, here]
        return x + torch.cat(found, dim=1)


class Recurrent(nn.Module):
    def __init__(self, width: int = 16, parts: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recurrence(width, parts) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - target) ** 2).mean()


def sample(rows: int = 8, length: int = 24, width: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(rows, length, width, generator=generator, dtype=torch.float64) / 4 for _ in range(2))
    return x, target


def test_loops_of_a_model_are_found() -> None:
    captured = autopar.capture(Recurrent(parts=6).double(), sample=sample())
    loops = Spread.of(captured.on("cpu")[False]).loops
    assert {len(keys) for keys in loops} <= {5, 6}  # the first state is zeros
    assert sum(map(len, loops)) > 5 * 8
    sources = [{info(key[1]).source for key in keys if isinstance(key[1], fx.Node)} for keys in loops]
    assert all(len(some) == 1 for some in sources)


@pytest.mark.parametrize("mesh", [{"dp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow), {"cp": 2}])
def test_iterations_that_are_alike_are_as_good(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the best of all placements, which takes the MILP; and what is compiled so is the model."""
    asked: list[tuple[float, float]] = []
    with_loops = solve_placement._with_loops

    def beside(problem: Problem, alike: Iterable[Sequence[int]], largest: int, limit: float) -> Solution | None:
        found = with_loops(problem, alike, largest, limit)
        if found is not None:
            asked.append((found.seconds, solve_milp(problem).seconds))
        return found

    monkeypatch.setattr(solve_placement, "_with_loops", beside)
    batch = sample()
    job = autopar.compile(Recurrent().double(), gpus=2, sample=batch, mesh=mesh, cluster=FAST)
    assert asked
    assert all(found == pytest.approx(best, rel=2e-3, abs=1e-12) for found, best in asked)
    assert job.verify(batch).ok
