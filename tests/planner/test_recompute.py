"""What to recompute: the frontier and the knapsack against all choices there are, and against published figures."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import ArgumentError, BudgetError, PlanError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.plan import BlockPlan, Plan
from autopar.planner.build import Request, build
from autopar.planner.knapsack import Option, StageCalls, _sums_from, choose, least_bytes, used_bytes
from autopar.planner.recompute import Point, Problem, Regions, _Chain, _regions, evaluate, frontier
from autopar.planner.wanted import Wanted
from benchmarks.models import MegatronGPT
from tests.fast_cluster import FAST
from tests.models import Case, tokens
from tests.pinned import compile_pinned
from tests.shared_captures import graph_of

TABLE_4 = Path(__file__).parents[2] / "benchmarks/measurements/korthikanti_table4_layer_times.csv"


def any_problem(size: int, seed: int) -> Problem:
    """A block of ``size`` ops that read earlier results and keep some."""
    draw = random.Random(seed)
    made = (-1, -1, *range(size))  # two inputs, then a result each
    keeps, uses, extra, any_, own = [], [], [], [], []
    for i in range(size):
        before = [m for m, maker in enumerate(made) if maker < i]
        read = draw.sample(before, min(len(before), draw.randint(1, 3)))
        result = [i + 2] if draw.random() < 0.3 else []
        keeps.append(frozenset([m for m in read if draw.random() < 0.5] + result))
        uses.append(frozenset((m, made[m]) for m in read))
        extra.append(draw.choice([0, 0, 5]))
        own.append(bool(result or extra[-1]))
        any_.append(bool(keeps[-1]) or own[-1] or draw.random() < 0.2)
    return Problem(
        seconds=tuple(float(draw.randint(0, 9)) for _ in range(size)),
        keeps=tuple(keeps),
        extra_bytes=tuple(extra),
        uses=tuple(uses),
        keeps_any=tuple(any_),
        keeps_made=tuple(own),
        communicates=tuple(draw.random() < 0.2 for _ in range(size)),
        bytes_=tuple(draw.randint(0, 20) for _ in made),
        made_by=made,
        live=tuple(draw.random() < 0.7 for _ in range(size)) if seed % 2 else (),
    )


def three_ops(**changes: Any) -> Problem:
    """Of 1, 2 and 4 seconds, each of which keeps what it is given."""
    given: dict[str, Any] = {
        "seconds": (1.0, 2.0, 4.0),
        "keeps": tuple(frozenset([i]) for i in range(3)),
        "extra_bytes": (0, 0, 0),
        "uses": tuple(frozenset([(i, i - 1)]) for i in range(3)),
        "keeps_any": (True, True, True),
        "keeps_made": (False, False, False),
        "communicates": (False, False, False),
        "bytes_": (8, 8, 8),
        "made_by": (-1, 0, 1),
    }
    return Problem(**given | changes)


def test_how_far_a_region_runs_again() -> None:
    """Up to the last op that keeps anything, and through it where it runs before it keeps; not at all where no
    backward asks for what was kept."""
    whole: Regions = ((0, 2),)
    assert evaluate(three_ops(), whole).seconds == 3
    assert evaluate(three_ops(keeps_made=(False, False, True)), whole).seconds == 7
    assert evaluate(three_ops(keeps_any=(True, True, False)), whole).seconds == 1
    assert evaluate(three_ops(live=(False, False, True)), whole).seconds == 3
    nobody = evaluate(three_ops(live=(False, False, False)), whole)
    assert (nobody.seconds, nobody.saved_bytes) == (0, 8)
    put_off = evaluate(three_ops(puts_off=(True, True, True)), whole)
    assert (put_off.seconds, put_off.late_seconds) == (3, 4)


def all_regions(size: int, first: int = 0) -> Iterator[Regions]:
    """Every set of runs that don't overlap."""
    yield ()
    for start in range(first, size):
        for end in range(start, size):
            for rest in all_regions(size, end + 1):
                yield ((start, end), *rest)


def hull(points: Sequence[tuple[float, int]]) -> set[tuple[float, int]]:
    """The corners of the lower convex hull, from the fewest seconds to the fewest bytes."""
    found: list[tuple[float, int]] = []
    for seconds, bytes_ in sorted(points):
        if found and bytes_ >= found[-1][1]:
            continue
        while len(found) > 1 and turns_up(found[-2], found[-1], (seconds, bytes_)):
            found.pop()
        found.append((seconds, bytes_))
    return set(found)


def turns_up(a: tuple[float, int], b: tuple[float, int], c: tuple[float, int]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def costs(points: Sequence[Point]) -> list[tuple[float, int]]:
    return [(p.seconds, p.saved_bytes) for p in points]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_frontier_is_that_of_all_choices(seed: int, silent: bool) -> None:
    problem = any_problem(8, seed)
    every = [evaluate(problem, regions) for regions in all_regions(8) if allowed(problem, regions, silent)]
    found = frontier(problem, points=99, silent=silent)
    none, *rest = costs(found)
    assert none == (0.0, evaluate(problem, ()).saved_bytes)
    assert hull(costs(every)) - {none} == set(rest) - {none}
    assert all(evaluate(problem, p.regions) == p for p in found)


def allowed(problem: Problem, regions: Regions, silent: bool) -> bool:
    return not silent or not any(problem.communicates[i] for a, b in regions for i in range(a, b + 1))


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_all_states_at_once_or_the_cheapest_one_by_one(seed: int, silent: bool) -> None:
    """The same regions under any prices, of ways that cost the same too."""
    chain = _Chain(any_problem(12, seed), silent)
    assert chain.walk is not None
    found = set()
    for prices in itertools.product((0, 1, 2, 3, 1 << 30), repeat=2):
        ways = chain.walk.best(*prices)
        assert _regions(ways) == chain._of_cheapest(*prices)
        found.add(_regions(ways))
    assert len(found) > 1


def test_a_thinned_frontier_is_part_of_the_whole() -> None:
    problem = any_problem(12, 5)
    thin, full = frontier(problem, 3), frontier(problem, 99)
    assert len(thin) <= 4 < len(full)
    assert set(costs(thin)) <= set(costs(full))
    assert thin[-1] == full[-1]


def test_an_evaluation_by_hand() -> None:
    """x -> a = f(x) keeps x; b = g(a) keeps b; c = h(b) keeps b and 3 bytes inside."""
    problem = Problem(
        seconds=(1.0, 2.0, 4.0),
        keeps=(frozenset({0}), frozenset({2}), frozenset({2})),
        extra_bytes=(0, 0, 3),
        uses=(frozenset({(0, -1)}), frozenset({(1, 0)}), frozenset({(2, 1)})),
        keeps_any=(True, True, True),
        keeps_made=(False, True, True),
        communicates=(False,) * 3,
        bytes_=(10, 20, 40, 80),
        made_by=(-1, 0, 1, 2),
    )
    assert costs([evaluate(problem, r) for r in ((), ((0, 2),), ((1, 2),), ((0, 0),))]) == [
        (0.0, 10 + 40 + 3),
        (7.0, 10),  # all of it runs again: the last op keeps something made inside
        (6.0, 10 + 20),  # a is an input of the region, which nobody kept before
        (0.0, 10 + 40 + 3),  # f keeps an operand only: torch stops before it runs
    ]
    assert evaluate(problem, ((1, 2),)).transient_bytes == 40 + 3


def any_stage(draw: random.Random) -> StageCalls:
    kinds = [
        tuple(Option(draw.randint(0, 30), float(draw.randint(0, 9)), draw.randint(0, 20)) for _ in range(3))
        for _ in range(2)
    ]
    return StageCalls(tuple(draw.choice(kinds) for _ in range(3)), draw.randint(1, 3), draw.randint(0, 10))


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_of_calls_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    stages = [any_stage(draw), any_stage(draw)]
    every = []
    for numbers in itertools.product(range(3), repeat=6):
        taken = [list(numbers[:3]), list(numbers[3:])]
        seconds = sum(
            c[p].seconds for s, row in zip(stages, taken, strict=True) for c, p in zip(s.calls, row, strict=True)
        )
        every.append((used_bytes(stages, taken), seconds))
    least = min(bytes_ for bytes_, _ in every)
    assert least_bytes(stages) == least
    assert choose(stages, least - 1) is None
    for budget in (least, least + 20, least + 100):
        found = choose(stages, budget)
        assert found is not None
        assert used_bytes(stages, found) <= budget
        seconds = sum(
            c[p].seconds for s, row in zip(stages, found, strict=True) for c, p in zip(s.calls, row, strict=True)
        )
        assert seconds == min(seconds for bytes_, seconds in every if bytes_ <= budget)


def seconds_of(stages: Sequence[StageCalls], taken: Sequence[Sequence[int]]) -> float:
    rows = zip(stages, taken, strict=True)
    return sum(call[p].seconds for stage, row in rows for call, p in zip(stage.calls, row, strict=True))


def test_equal_calls_recompute_side_by_side() -> None:
    calls = ((Option(10), Option(2, 1.0)),) * 4
    assert choose([StageCalls(calls, 1, 0)], 24) == [[1, 1, 0, 0]]


def published() -> dict[str, float]:
    """Milliseconds of a layer's forward and backward by what is recomputed (22B model, tp 8, A100)."""
    rows = [line for line in TABLE_4.read_text().splitlines() if not line.startswith("#")]
    return {row["experiment"]: float(row["combined_ms"]) for row in csv.DictReader(rows)}


def megatron_plan(recompute: str, layers: int = 2) -> Plan:
    with torch.device("meta"):
        model = MegatronGPT(layers=layers, width=6144, heads=64, vocabulary=51200).half().train()
        ids = torch.zeros(4, 2048, dtype=torch.int64)
    return compile_pinned(model, 8, sample=(ids, ids), mesh={"tp": 8}, cluster="a100", recompute=recompute).plan


def test_selective_recomputation_of_a_22b_layer_as_published() -> None:
    """Korthikanti et al., table 4: the choice is attention's core, and costs what they measured."""
    two, one = (pass_seconds(megatron_plan("none", layers)) for layers in (2, 1))
    layers = {mode: layer_of(megatron_plan(mode)) for mode in ("selective", "full")}
    overhead = {mode: 100 * layer.recompute[0].seconds / (two - one) for mode, layer in layers.items()}
    measured = published()
    baseline, sequence = measured["baseline no recompute"], measured["sequence parallelism"]
    assert overhead["full"] == pytest.approx(100 * (measured["baseline full recompute"] / baseline - 1), abs=3)
    assert overhead["selective"] == pytest.approx(100 * (measured["selective + sequence"] / sequence - 1), abs=3)

    (core,) = (ops for ops in region_ops(layers["selective"]) if "aten.softmax.int" in ops)
    assert "aten.dropout.default" in core
    assert core.count("aten.matmul.default") == 2
    assert layers["selective"].recompute[0].saved_bytes < layers["selective"].saved_bytes / 3


def pass_seconds(plan: Plan) -> float:
    (stage,) = plan.stage_plans
    return stage.forward_seconds + stage.backward_seconds


def layer_of(plan: Plan) -> BlockPlan:
    return next(block for block in plan.blocks if block.kind == "layer")


def region_ops(block: BlockPlan) -> list[list[str]]:
    ops, names = [node.op for node in block.nodes], [node.name for node in block.nodes]
    return [ops[names.index(first) : names.index(last) + 1] for first, last in block.recompute[0].regions]


def gpt(layers: int = 8) -> Case:
    model = MegatronGPT(layers=layers, width=32, heads=4, vocabulary=48, dropout=0.0)
    return Case(model, (tokens(16), tokens(16).roll(-1, 1)))


def planned(
    case: Case, *, pp: int = 4, vocabulary: str = "redistributed", schedule: str = "1f1b", **options: Any
) -> Plan:
    """The plan by what solvers count, which buffers and temporaries aren't part of."""
    model = graph_of(case.model, case.batch, case.loss)
    return build(model, Request(Mesh(pp=pp), 8, FAST, Wanted(schedule, vocabulary), Options.of(**options))).plan


def a_tight_budget(case: Case) -> int:
    """With which two of four ranks are too large as they are."""
    return sorted(planned(case, recompute="none").peak_bytes)[1]


def test_nothing_is_recomputed_where_there_is_room() -> None:
    plan = planned(gpt())
    assert not any(block.recompute for block in plan.blocks)
    assert [sum(stage.recompute) for stage in plan.stage_plans] == [0] * 4


def test_early_stages_recompute_more_and_no_rank_exceeds_the_budget() -> None:
    """1F1B keeps 4 microbatches on the first rank, 1 on the last."""
    case = gpt()
    budget = a_tight_budget(case)
    plan = planned(case, budget_bytes=budget)
    recomputed = [recompute_share(plan, k) for k in range(4)]
    assert recomputed[0] > recomputed[-1] == 0
    assert recomputed == sorted(recomputed, reverse=True)
    assert max(plan.peak_bytes) <= budget
    assert plan.bound_seconds <= plan.step_seconds
    assert "recompute" in str(plan)


def recompute_share(plan: Plan, stage: int) -> float:
    """Seconds of recomputation over seconds of the forward."""
    layer, found = layer_of(plan), plan.stage_plans[stage]
    return sum(layer.recompute[p - 1].seconds for p in found.recompute if p) / found.forward_seconds


@pytest.mark.parametrize("vocabulary", ["redistributed", "stage", "vocab-1"])
def test_a_budget_that_is_too_small_says_what_would_do(vocabulary: str) -> None:
    case = gpt(4)
    with pytest.raises(BudgetError, match=r"the leanest needs .* with everything recomputed") as caught:
        planned(case, pp=2, vocabulary=vocabulary, budget_bytes=100_000)
    least = caught.value.needed_bytes
    assert f"({least} bytes)" in str(caught.value)
    made = planned(case, pp=2, vocabulary=vocabulary, budget_bytes=least)
    assert max(made.peak_bytes) <= least
    with pytest.raises(BudgetError, match="recompute='auto'"):
        planned(case, pp=2, vocabulary=vocabulary, budget_bytes=least, recompute="none")


def test_a_plan_is_taken_as_it_is() -> None:
    case = gpt()
    plan = Plan.from_json(planned(case, budget_bytes=a_tight_budget(case)).to_json())
    job = compile_pinned(case.model, 4, sample=case.batch, plan=plan)
    assert "recompute(self." in job.source(0)
    assert "recompute(self." not in job.source(3)
    block = layer_of(plan)
    wrong = [point.model_copy(update={"regions": [["nothing", "here"]]}) for point in block.recompute]
    blocks = [b.model_copy(update={"recompute": wrong}) if b is block else b for b in plan.blocks]
    bad = plan.model_copy(update={"blocks": blocks, "digest": ""}).sealed()
    with pytest.raises(PlanError, match="which MegatronLayer hasn't"):
        compile_pinned(case.model, 4, sample=case.batch, plan=bad)


def test_asynchronous_schedules_can_not_recompute() -> None:
    with pytest.raises(ArgumentError, match="asynchronous"):
        planned(gpt(), schedule="pipedream", recompute="full")


def test_sums_from_each_place_lose_nothing() -> None:
    draw = random.Random(0)
    for count in (0, 1, 2, 40):
        values = [draw.choice((-1, 1)) * draw.random() * 10.0 ** draw.randint(-20, 20) for _ in range(count)]
        assert _sums_from(values) == [math.fsum(values[first:]) for first in range(count + 1)]
