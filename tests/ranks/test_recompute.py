"""Recomputation changes what is kept and nothing else: equal to one device, and lean as predicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import autopar
from autopar import simulate
from autopar.batch import flatten
from autopar.runtime import Axes, batches
from autopar.runtime.job import build_modules
from autopar.simulate.memory import MemoryTracker
from benchmarks.models import MegatronGPT
from tests.fast_cluster import FAST
from tests.models import Case, Float64, gpt2, llama, make, prepared, tokens
from tests.pinned import compile_pinned
from tests.ranks.test_parity import verified

SCHEDULES = [
    {"schedule": "1f1b"},
    {"schedule": "zb-v"},
    {"schedule": "v-half", "vocabulary": "vocab-2"},
]


def compiled(case: Case, mesh: dict[str, int], **options: Any) -> autopar.ParallelModel:
    return compile_pinned(
        case.model, math.prod(mesh.values()), sample=case.batch, mesh=mesh, **{"cluster": FAST, **options}
    )


def between(case: Case, mesh: dict[str, int], share: float, **options: Any) -> int:
    """A budget: ``share`` of the way from what everything recomputed needs to what nothing recomputed does."""
    jobs = [compiled(case, mesh, recompute=r, **options) for r in ("full", "none")]
    least, most = (max(rank.peak_bytes for rank in job.memory().predicted) for job in jobs)
    return round(least + share * (most - least))


def check(case_of: Callable[[], Case], mesh: dict[str, int], recompute: str, **options: Any) -> None:
    with Float64():
        case = prepared(case_of)
        if recompute == "small":
            options["budget_bytes"] = between(case, mesh, 0.5, **options)
        result = verified(case, mesh, recompute="auto" if recompute == "small" else recompute, **options)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "tied"), [("full", False), ("selective", True), ("small", False)])
@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o["schedule"])
@pytest.mark.parametrize("mesh", [{"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_parity(mesh: dict[str, int], options: dict[str, str], recompute: str, tied: bool) -> None:
    check(lambda: llama(8, layers=4, tied=tied, vocabulary=50), mesh, recompute, microbatches=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("name", ["gpt2", "nano_gpt", "encoder", "mlp"])
def test_parity_of_other_models(name: str, mesh: dict[str, int], recompute: str) -> None:
    with Float64():
        result = verified(make(name, 8), mesh, microbatches=2, recompute=recompute)
    assert result.ok, str(result)


@pytest.mark.parametrize(("recompute", "options"), [("full", SCHEDULES[1]), ("selective", SCHEDULES[2])])
def test_parity_sample(recompute: str, options: dict[str, str]) -> None:
    check(lambda: llama(4, layers=4, tied=True, vocabulary=50), {"pp": 2}, recompute, microbatches=2, **options)


@pytest.mark.parametrize(("mesh", "recompute"), [({"tp": 2}, "full"), ({"pp": 2, "dp": 2}, "selective")])
def test_dropout_repeats_exactly(mesh: dict[str, int], recompute: str) -> None:
    """Bitwise: the same masks, drawn again in the backward."""
    case = prepared(lambda: gpt2(4, layers=2, dropout=0.2))
    found = [compiled(case, mesh, microbatches=2, recompute=r).simulate(case.batch, 2) for r in ("none", recompute)]
    assert found[0].losses == found[1].losses
    for name, gradient in found[0].gradients.items():
        assert torch.equal(gradient, found[1].gradients[name]), name


@pytest.mark.parametrize(
    ("name", "recompute"), [("llama", "none"), ("llama", "selective"), ("llama", "full"), ("gpt2", "selective")]
)
def test_a_forward_leaves_what_the_plan_says_to_the_byte(name: str, recompute: str) -> None:
    with Float64():
        job = compiled(make(name, 8), {"pp": 2, "tp": 2}, microbatches=4, recompute=recompute)
    tensors = flatten(make(name, 8).batch)[0]

    def program(rank: int) -> int:
        axes = Axes.build(job.plan.mesh, rank, "cpu")
        (module,) = build_modules(job.job, axes).all
        emitted = job.programs.stages[job.job.stages(rank)[0]].program
        given = batches.parts(tensors, emitted, 0, axes)
        totals = [torch.ones((), dtype=torch.int64) for _ in emitted.totals]
        with MemoryTracker() as tracker:
            received = [torch.zeros(t.shape, dtype=torch.float64).requires_grad_() for t in emitted.receives]
            made = module(*received, *given, *totals)
            edges = [get_gradient_edge(tensor) for tensor in (made if isinstance(made, tuple) else (made,))]
            del made, received
            kept = tracker.live_bytes
            del edges
        return kept

    found = simulate.run(program, 4, track_memory=False).results
    assert found == [job.plan.stage_plans[job.job.stages(rank)[0]].saved_bytes for rank in range(4)]


def test_the_peak_of_ranks_falls_as_predicted() -> None:
    """1F1B keeps 4 microbatches on the first of 4 ranks. What the plan says is saved is saved, less what a backward
    takes for itself: the tensors of one layer, again."""
    model = MegatronGPT(layers=8, width=32, heads=4, vocabulary=48, dropout=0.0)
    case = prepared(lambda: Case(model, (tokens(32), tokens(32).roll(-1, 1))), torch.float32)
    jobs = {r: compiled(case, {"pp": 4}, microbatches=8, recompute=r) for r in ("none", "selective", "full")}
    peaks = {r: job.simulate(case.batch).peak_bytes[0] for r, job in jobs.items()}
    for recompute in ("selective", "full"):
        kept = [jobs[r].plan.stage_plans[0] for r in ("none", recompute)]
        predicted = kept[0].inflight * (kept[0].saved_bytes - kept[1].saved_bytes)
        (again,) = {p.transient_bytes for b in jobs[recompute].plan.blocks for p in b.recompute}
        assert predicted - 2 * again <= peaks["none"] - peaks[recompute] <= predicted * 1.02


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("mesh", "schedule"), [({"dp": 2}, "1f1b"), ({"pp": 2, "dp": 2}, "zb-v")])
def test_parity_with_zero(mesh: dict[str, int], schedule: str, zero: int, recompute: str) -> None:
    check(lambda: llama(8, vocabulary=50), mesh, recompute, microbatches=4, zero=zero, schedule=schedule)
