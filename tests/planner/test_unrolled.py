"""Loops that tracing wrote out: which ops are one op of several iterations, and what placing these alike costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

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
from autopar.planner.placement import Problem, Solution
from autopar.planner.solve_placement import solve
from autopar.planner.spreading import Spread
from autopar.planner.unrolled import Merged, merged, repeated
from autopar.spmd import R, S
from tests.fast_cluster import FAST
from tests.planner.test_onehot import problem_of, vertex


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("xabcabcabcabcy", [[1, 4, 7, 10], [2, 5, 8, 11], [3, 6, 9, 12]]),
        ("abcabcabc", []),  # three times is no loop
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
        try:
            best = min(best, problem.seconds(found))
        except KeyError:
            continue
    return best


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), place=st.integers(0, 20))
def test_merged_vertices_cost_what_all_of_them_do(seed: int, place: int) -> None:
    problem = problem_of(seed, count=6)
    some = pairs(problem)
    smaller = merged(problem, [some[place % len(some)]]) if some else None
    if smaller is None:
        return
    assert len(smaller.problem.vertices) == len(problem.vertices) - 1
    best = least(problem, smaller)
    if best == math.inf:
        with pytest.raises(ShardingError):
            solve(smaller.problem)
        return
    found = solve(smaller.problem)
    assert found.seconds == pytest.approx(best, abs=1e-9)
    assert problem.seconds(smaller.choices(found.choices)) == pytest.approx(best, abs=1e-9)


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
    random = torch.Generator().manual_seed(3)
    x, target = (torch.randn(rows, length, width, generator=random, dtype=torch.float64) / 4 for _ in range(2))
    return x, target


def test_loops_of_a_model_are_found() -> None:
    captured = autopar.capture(Recurrent(parts=6).double(), sample=sample())
    loops = Spread.of(captured.on("cpu")[False]).loops
    assert {len(keys) for keys in loops} <= {5, 6}  # the first state is zeros
    assert sum(map(len, loops)) > 5 * 8
    sources = [{info(key[1]).source for key in keys if isinstance(key[1], fx.Node)} for keys in loops]
    assert all(len(some) == 1 for some in sources)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"cp": 2}])
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
