"""The promise for every schedule and every way to compute the vocabulary: equal to one device, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ArgumentError, AutoparError, ScheduleError, StageError
from autopar.schedules.registry import SCHEDULES
from tests import vocabulary_models
from tests.fast_cluster import FAST
from tests.models import Case, Float64, llama, make, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import optimizer, verified

ALGORITHMS = ["redistributed", "vocab-1", "vocab-2"]
SYNCHRONOUS = [name for name, row in SCHEDULES.items() if not row.asynchronous]
ODD = 50  # a vocabulary that no number of ranks here divides


SUPPORTED = [
    (name, vocabulary)
    for name in SYNCHRONOUS
    for vocabulary in ALGORITHMS
    if vocabulary.removeprefix("redistributed") in SCHEDULES[name].heads
]


def check(case: Callable[[], Case], mesh: dict[str, int], **options: Any) -> None:
    with Float64():
        result = verified(prepared(case), mesh, **options)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


def deep(pp: int, schedule: str, batch: int, *, tied: bool) -> Callable[[], Case]:
    """A model with a layer for each stage: Llama for few, one with little to compute for many."""
    stages = pp * (SCHEDULES[schedule].chunks or 2)
    if stages > 4:
        return lambda: vocabulary_models.stack(batch, layers=stages, tied=tied)
    return lambda: llama(batch, layers=4, tied=tied, vocabulary=ODD)


RANKS = [2, 4, 8]  # eight where the vocabulary is whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "vocabulary", "pp"),
    [(*pair, pp) for pair in SUPPORTED for pp in RANKS if pp < 8 or pair[1] == "redistributed"],
)
def test_every_schedule(schedule: str, vocabulary: str, pp: int) -> None:
    batch = 2 * pp if SCHEDULES[schedule].least_per_rank > 1 else max(pp, 4)
    case = deep(pp, schedule, batch, tied=pp == 4)
    check(case, {"pp": pp}, schedule=schedule, vocabulary=vocabulary, microbatches=batch)


TURNS = [[pair for pair in SUPPORTED if pair[0] == name] for name in SYNCHRONOUS]
"""By schedule. With other axes each has one way to compute the vocabulary, another than the schedule before."""


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "vocabulary"), [some[turn % len(some)] for turn, some in enumerate(TURNS)])
def test_with_tp_and_dp(schedule: str, vocabulary: str) -> None:
    case = deep(2, schedule, 8, tied=True)
    check(case, {"pp": 2, "dp": 2, "tp": 2}, schedule=schedule, vocabulary=vocabulary, microbatches=4)


SAMPLE = [
    ("1f1b", "vocab-2", {"pp": 2, "tp": 2}),
    ("v-half", "vocab-1", {"pp": 2}),
    ("zb-v", "redistributed", {"pp": 2, "dp": 2}),
    ("interleaved", "naive", {"pp": 2}),
]


@pytest.mark.parametrize(("schedule", "vocabulary", "mesh"), SAMPLE)
def test_a_sample(schedule: str, vocabulary: str, mesh: dict[str, int]) -> None:
    """A few of those above and below, for the fast tier."""
    check(deep(2, schedule, 4, tied=True), mesh, schedule=schedule, vocabulary=vocabulary, microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["stage", "naive", "interlaced"])
@pytest.mark.parametrize("mesh", [{"pp": 4}, {"pp": 2, "dp": 2, "tp": 2}])
def test_other_ways_to_compute_the_vocabulary(vocabulary: str, mesh: dict[str, int]) -> None:
    check(lambda: llama(8, vocabulary=ODD), mesh, vocabulary=vocabulary, microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["naive", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", vocabulary_models.MODELS)
def test_heads_with_something_of_their_own(name: str, vocabulary: str) -> None:
    """Soft-capped logits, a loss per token with a mask, label smoothing, a bias, a sum."""
    check(lambda: vocabulary_models.case(name, 8), {"pp": 2, "tp": 2}, vocabulary=vocabulary, microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["naive", "vocab-1", "vocab-2"])
def test_a_head_of_rows_where_a_sequence_is_split(vocabulary: str) -> None:
    check(lambda: vocabulary_models.case("classified", 8), {"pp": 2, "cp": 2}, vocabulary=vocabulary, microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_interleaving_takes_any_number_of_microbatches(chunks: int, microbatches: int) -> None:
    check(lambda: make("nano_gpt", 6), {"pp": 2}, schedule="interleaved", chunks=chunks, microbatches=microbatches)


@pytest.mark.parametrize(
    ("mesh", "microbatches", "options"),
    [
        ({"dp": 1}, 1, {}),
        ({"dp": 2}, 2, {"zero": 2}),
        pytest.param({"dp": 4}, 1, {"zero": 2, "zero_ranks": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, 3, {"zero": 3, "chunks": 5}, marks=pytest.mark.slow),
        pytest.param({"dp": 2}, 3, {"zero": 3, "offload": ("parameters",)}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, 2, {"head_chunks": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_stages_without_a_pipeline(
    mesh: dict[str, int], microbatches: int, options: dict[str, Any], tied: bool
) -> None:
    given: dict[str, Any] = {"schedule": "interleaved", "chunks": 4, "microbatches": microbatches, **options}
    check(lambda: llama(12, layers=4, tied=tied), mesh, **given)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4])
def test_the_synthesized_schedule_and_its_plan(batch: int) -> None:
    """The list is in the plan: who loads it runs the same."""
    with Float64():
        case = prepared(lambda: llama(batch, vocabulary=ODD))
        options: dict[str, Any] = {"sample": case.batch, "optimizer": optimizer}
        job = compile_pinned(
            case.model, 2, mesh={"pp": 2}, schedule="synthesized", vocabulary="vocab-2", cluster=FAST, **options
        )
        again = compile_pinned(case.model, 2, plan=autopar.Plan.from_json(job.plan.to_json()), **options)
        assert again.schedule == job.schedule
        assert job.verify(case.batch).ok


# PipeDream: weights change while microbatches are under way.


def stale_training(case: Case, job: autopar.ParallelModel, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One device that trains with the staleness of ``job``'s action lists: losses and final parameters.

    Microbatch m sees, in each stage, the weights after as many updates as the stage had made before its forward.
    """
    model, microbatches = job.reference(), job.plan.microbatches
    stage_of = {p.name: s.stage for s in (e.program for e in job.programs.stages) for p in s.parameters}
    versions = {stage: updates_before_forward(job.schedule, stage) for stage in range(job.schedule.stages)}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = {s: optimizer([p for n, p in named.items() if stage_of[n] == s]) for s in versions}
    losses = []
    for _ in range(steps):
        history = [{n: p.detach().clone() for n, p in named.items()}]
        total = 0.0
        for m in range(microbatches):
            seen = {n: history[versions[stage_of[n]][m]][n].clone().requires_grad_() for n in named}
            share = share_of_microbatch(model, seen, case, m, microbatches)
            gradients = torch.autograd.grad(share, list(seen.values()))
            for parameter, gradient in zip(named.values(), gradients, strict=True):
                parameter.grad = gradient
            for each in update.values():
                each.step()
            history.append({n: p.detach().clone() for n, p in named.items()})
            total += float(share.detach())
        losses.append(total)
    return losses, {n: p.detach() for n, p in named.items()}


def updates_before_forward(schedule: Any, stage: int) -> list[int]:
    found, updates = [], 0
    for action in schedule.lists[schedule.placement[stage]]:
        if action.kind == "F" and action.stage == stage:
            found.append(updates)
        updates += action.kind == "UPDATE" and action.stage == stage
    return found


def share_of_microbatch(
    model: torch.nn.Module, parameters: dict[str, torch.Tensor], case: Case, m: int, microbatches: int
) -> torch.Tensor:
    """The part of the batch's mean loss that the rows of microbatch ``m`` make up (all rows count alike)."""
    x, y = case.batch
    rows = slice(m * len(x) // microbatches, (m + 1) * len(x) // microbatches)
    loss: torch.Tensor = torch.func.functional_call(model, parameters, (x[rows], y[rows]))
    return loss / microbatches


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 4}, pytest.param({"pp": 3, "dp": 2}, marks=pytest.mark.slow)])
def test_pipedream_equals_its_staleness_on_one_device(mesh: dict[str, int]) -> None:
    case = make("mlp", 12)
    job = compile_pinned(
        case.model,
        math.prod(mesh.values()),
        sample=case.batch,
        mesh=mesh,
        microbatches=6,
        schedule="pipedream",
        optimizer=optimizer,
        cluster=FAST,
    )
    losses, parameters = stale_training(case, job, 3)
    found = job.simulate(case.batch, 3)
    assert found.losses == pytest.approx(losses, rel=1e-9)
    for name, expected in parameters.items():
        torch.testing.assert_close(found.parameters[name], expected, rtol=1e-9, atol=1e-12)
    synchronous = job.verify(case.batch)
    assert not synchronous.ok  # stale weights do change the result


def refusal(kind: type[AutoparError], case: Case, gpus: int = 2, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        compile_pinned(case.model, gpus, sample=case.batch, **{"mesh": {"pp": gpus}, "cluster": FAST, **options})
    return str(caught.value)


def test_what_pipedream_can_not_have() -> None:
    clipped = refusal(ArgumentError, make("mlp", 4), schedule="pipedream", clip_norm=1.0)
    assert "leave clip_norm out" in clipped
    tied = refusal(StageError, make("nano_gpt", 4), schedule="pipedream")
    assert "'wte.weight'" in tied
    assert "asynchronous" in tied


def test_bad_requests_say_what_works() -> None:
    mlp, gpt = make("mlp", 4), make("nano_gpt", 4)
    no_head = refusal(StageError, mlp, vocabulary="vocab-1")
    assert "the loss has no cross entropy over classes" in no_head
    assert 'vocabulary="stage" keeps embedding and head whole' in no_head
    assert "pp=1" in refusal(ArgumentError, gpt, gpus=1, vocabulary="vocab-1")
    assert "'vocab-2'" in refusal(ArgumentError, gpt, vocabulary="vocab-3")
    assert "needs at least 4 microbatches" in refusal(ScheduleError, gpt, schedule="dualpipe-v", microbatches=2)
    assert "takes exactly 2" in refusal(ScheduleError, gpt, schedule="v-half", chunks=3)
    assert "pp x chunks <=" in refusal(StageError, gpt, schedule="interleaved", chunks=8)
    assert "microbatch may be one of [1, 2, 4]" in refusal(ArgumentError, gpt, microbatch=3)
    assert "leave one of the two out" in refusal(ArgumentError, gpt, microbatch=2, microbatches=4)
    for other in ("zb-h1", "synthesized"):
        assert "schedule of its own" in refusal(ArgumentError, gpt, schedule=other, vocabulary="interlaced")
    assert "say vocabulary='interlaced'" in refusal(ArgumentError, gpt, schedule="interlaced")


def test_too_little_memory_says_how_much_is_needed() -> None:
    large = prepared(lambda: llama(4, vocabulary=4096))
    small = replace(FAST, device=replace(FAST.device, memory_bytes=1_000_000))
    for schedule in ("1f1b", "v-half", "synthesized"):
        assert "the leanest needs" in refusal(StageError, large, schedule=schedule, cluster=small)


def test_logits_are_never_whole() -> None:
    """With rows over 4 ranks, the rank that held the head needs a fraction of the memory."""

    def peak(vocabulary: str) -> int:
        case = prepared(lambda: llama(64, vocabulary=4096))
        job = compile_pinned(
            case.model, 4, sample=case.batch, mesh={"pp": 4}, microbatches=2, vocabulary=vocabulary, cluster=FAST
        )
        return max(job.simulate(case.batch).peak_bytes)

    whole = peak("redistributed")
    assert peak("vocab-1") < whole / 2
    assert peak("vocab-2") < whole / 2
