"""What is recomputed under a budget really keeps every simulated rank within it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import BudgetError
from autopar.schedules import Schedule, generate
from autopar.simulate.measure import RankMemory
from autopar.simulate.predict import predictor
from tests.fast_cluster import FAST
from tests.models import Float64, gpt2, llama, make, prepared
from tests.pinned import compile_pinned

CASES: list[tuple[str, dict[str, int], dict[str, Any], float]] = [
    ("gpt2", {"pp": 2}, {"schedule": "zb-1p"}, 0.9),
    ("llama", {"pp": 2, "dp": 2}, {"zero": 2}, 0.5),
    ("llama", {"pp": 2, "tp": 2}, {"schedule": "v-half", "vocabulary": "vocab-2"}, 0.5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options", "share"), CASES, ids=str)
def test_no_rank_exceeds_its_budget(name: str, mesh: dict[str, int], options: dict[str, Any], share: float) -> None:
    """``share``: where the budget lies between the leanest and what nothing recomputed needs."""
    case = prepared(lambda: {"llama": llama, "gpt2": gpt2}[name](16, layers=2 * mesh["pp"]), torch.float32)

    def compiled(**more: Any) -> autopar.ParallelModel:
        given = {"sample": case.batch, "mesh": mesh, "microbatches": 4, "cluster": FAST, **options, **more}
        return compile_pinned(case.model, math.prod(mesh.values()), **given)

    most, least = (max(r.peak_bytes for r in compiled(recompute=r).memory().predicted) for r in ("none", "full"))
    budget = round(least + share * (most - least))
    job = compiled(budget_bytes=budget)
    measured = job.memory(case.batch, measure="simulate").measured
    assert max(rank.peak_bytes for rank in measured) <= max(job.plan.peak_bytes) <= budget
    assert any(any(stage.recompute) for stage in job.plan.stage_plans)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"pp": 2}, {"vocabulary": "vocab-2", "offload": ("parameters",)}),
        ({"pp": 2, "dp": 2}, {"vocabulary": "vocab-1", "zero": 3}),
        ({"pp": 2}, {"vocabulary": "redistributed", "offload": ("parameters",)}),
    ],
    ids=str,
)
def test_copies_that_stay_from_step_to_step_are_counted(mesh: dict[str, int], options: dict[str, Any]) -> None:
    case = prepared(lambda: llama(8, layers=4), torch.float32)
    given: dict[str, Any] = {"sample": case.batch, "mesh": mesh, "microbatches": 4, "cluster": FAST}
    job = compile_pinned(case.model, math.prod(mesh.values()), **given, **options)
    measured = job.memory(case.batch, measure="simulate").measured
    for index, counted in enumerate(job.plan.rank_plans):
        assert not counted.action, "this is what solvers added up"
        held = measured[job.plan.mesh.rank(pp=index)].phases[0].start
        assert held.get("working", 0) == counted.kinds.get("working", 0)
        assert bool(held.get("working")) == (options["vocabulary"] != "redistributed"), "rows of tables stay"


def test_ranks_are_measured_until_one_holds_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """That plan is laid out again; of the one that is given, all are."""
    asked: list[list[int]] = []

    def recorded(*given: Any) -> Callable[[int], RankMemory]:
        memory_of, ranks = predictor(*given), list[int]()
        asked.append(ranks)
        return lambda rank: (ranks.append(rank), memory_of(rank))[1]

    case = prepared(lambda: llama(16, layers=8), torch.float32)

    def compiled(**more: Any) -> autopar.Plan:
        given = {"sample": case.batch, "mesh": {"pp": 4}, "microbatches": 8, "cluster": FAST}
        return compile_pinned(case.model, 4, **given, **more).plan

    most, least = (max(compiled(recompute=how).peak_bytes) for how in ("none", "full"))
    monkeypatch.setattr("autopar.api.predictor", recorded)
    plan = compiled(budget_bytes=least + (most - least) // 10)
    first, *_, last = asked
    assert len(first) < len(last) == len(plan.rank_plans)


@pytest.mark.parametrize(
    ("schedule", "offload"), [("v-half", ()), pytest.param("v-half", ("activations",), marks=pytest.mark.slow)]
)
def test_weights_gradients_make_room(schedule: str, offload: tuple[str, ...]) -> None:
    """Where layers recompute, what waits for weights' gradients is more than what waits for a backward."""
    with Float64():
        case = prepared(lambda: llama(8, layers=8))

        def compiled(**more: Any) -> autopar.ParallelModel:
            given = {"sample": case.batch, "mesh": {"pp": 2}, "microbatches": 8, "schedule": schedule, "cluster": FAST}
            return compile_pinned(case.model, 2, **given, **more)

        most, least = (max(compiled(recompute=how).plan.peak_bytes) for how in ("none", "full"))
        budget = round(least + 0.1 * (most - least))
        job = compiled(budget_bytes=budget, offload=offload)
        assert max(job.plan.peak_bytes) <= budget
        assert most_waiting(job.schedule) < most_waiting(generate(schedule, 2, 8))
        again = compile_pinned(case.model, 2, sample=case.batch, plan=job.plan)
        assert again.schedule == job.schedule
        result = job.verify(case.batch)
        assert result.ok, str(result)


def most_waiting(schedule: Schedule) -> int:
    """Of passes of all ranks, the most that wait for weights' gradients."""
    changes = {"I": 1, "W": -1}
    return sum(max(accumulate(changes.get(action.kind, 0) for action in row)) for row in schedule.lists)


@pytest.mark.parametrize(
    "schedule", ["v-half", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zb-v", "zb-h1", "1f1b"))]
)
def test_what_a_refusal_asks_for_does(schedule: str) -> None:
    """Cuts are found in whole KiB, of which such ranks hold a hundred."""
    case = make("mlp", 32)
    given: dict[str, Any] = {"sample": case.batch, "loss": case.loss, "mesh": {"pp": 2}, "microbatches": 4}
    given |= {"schedule": schedule, "recompute": "none", "cluster": FAST}
    with pytest.raises(BudgetError, match="no cut") as refused:
        compile_pinned(case.model, 2, budget_bytes=50_000, **given)
    plan = compile_pinned(case.model, 2, budget_bytes=refused.value.needed_bytes, **given).plan
    assert max(plan.peak_bytes) <= refused.value.needed_bytes
