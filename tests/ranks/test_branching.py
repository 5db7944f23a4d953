"""The promise for models that are no chain of layers, and the stages of those whose layers differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import StageError
from tests.fast_cluster import FAST
from tests.models import Case, Float64, prepared
from tests.pinned import compile_pinned
from tests.ranks.branching_models import Mixed, probe, reused, siamese, t5, two_streams, u_shaped
from tests.ranks.test_schedules import check

MODELS: dict[str, Callable[[int], Case]] = {
    "t5": t5,
    "t5_untied": lambda batch: t5(batch, tied=False),
    "u_shaped": u_shaped,
    "two_streams": two_streams,
    "reused": reused,
    "siamese": siamese,
}
PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "v-half": {"schedule": "v-half"},
}


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("name", MODELS)
def test_every_pipeline(name: str, schedule: str, pp: int) -> None:
    check(lambda: MODELS[name](8), {"pp": pp}, microbatches=4, **PIPELINES[schedule])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_with_tp_and_dp(name: str) -> None:
    check(lambda: MODELS[name](8), {"pp": 2, "dp": 2, "tp": 2}, microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["vocab-1", "vocab-2"])
def test_an_encoder_and_decoder_with_a_split_vocabulary(vocabulary: str) -> None:
    check(lambda: t5(8, tied=False), {"pp": 2, "tp": 2}, microbatches=4, vocabulary=vocabulary)


SAMPLE = [
    ("t5", {"pp": 2}, PIPELINES["1f1b"]),
    ("u_shaped", {"pp": 2}, PIPELINES["v-half"]),
    ("two_streams", {"pp": 4}, PIPELINES["1f1b"]),
    ("reused", {"pp": 2, "tp": 2}, PIPELINES["interleaved"]),
    ("siamese", {"pp": 2}, PIPELINES["v-half"]),
    ("siamese", {"pp": 2, "dp": 2}, {"schedule": "zb-v", "zero": 2}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), SAMPLE)
def test_a_sample(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """A few of those above, for the fast tier."""
    small = {"t5": lambda batch: t5(batch, layers=2)}
    check(lambda: (MODELS | small)[name](4), mesh, microbatches=2, **options)


@pytest.mark.parametrize("vocabulary", ["naive", "vocab-1", "vocab-2", "interlaced", "redistributed"])
def test_only_the_head_is_trained(vocabulary: str) -> None:
    """Nobody wants the gradient of what the last layer gives it."""
    check(lambda: probe(4), {"pp": 2}, microbatches=2, vocabulary=vocabulary)


def test_a_split_vocabulary_needs_a_head_of_its_own() -> None:
    """T5 embeds twice, with the weight of the head."""
    with Float64():
        case = prepared(lambda: t5(4, layers=2))
        with pytest.raises(StageError) as caught:
            compiled(case, {"pp": 2}, vocabulary="vocab-1")
    assert "'shared.weight' of the head is read by" in str(caught.value)
    assert 'vocabulary="stage" keeps embedding and head whole' in str(caught.value)


# --- what crosses the cuts ------------------------------------------------------------------------


def compiled(case: Case, mesh: dict[str, int], **options: Any) -> autopar.ParallelModel:
    ranks = prod(mesh.values())
    return compile_pinned(case.model, ranks, sample=case.batch, mesh=mesh, cluster=FAST, **options)


def crossing(case: Case, pp: int, **options: Any) -> list[int]:
    """How many values each stage sends to the next; each is a [2, 16] activation."""
    job = compiled(case, {"pp": pp}, microbatches=len(case.batch[0]) // 2, **options)
    programs = [stage.program for stage in job.programs.stages]
    for before, after in itertools.pairwise(programs):
        assert [t.shape for t in before.sends] == [t.shape for t in after.receives]
    assert {t.shape for program in programs for t in program.sends} == {(2, 16)}
    return [len(program.sends) for program in programs[:-1]]


def test_a_value_crosses_the_cuts_up_to_its_last_reader_once() -> None:
    """Of a U of eight layers: each skip from its level down to its level up, and what the next layer reads."""
    one_layer_each = {"chunks": 2, "schedule": "v-half"}
    assert crossing(prepared(lambda: u_shaped(8)), 4, **one_layer_each) == [1, 2, 3, 4, 3, 2, 1]
    assert crossing(prepared(lambda: two_streams(8)), 4) == [2, 2, 2]


def test_what_the_head_reads_again_crosses_from_where_it_is_made() -> None:
    job = compiled(prepared(lambda: reused(8)), {"pp": 4}, microbatches=4)
    made_in = next(k for k, stage in enumerate(job.plan.stages) if "layers.2" in stage)
    wanted = [1 if k < made_in else 2 for k in range(3)]
    assert crossing(prepared(lambda: reused(8)), 4) == wanted
    assert wanted == [1, 2, 2]


# --- layers that differ ---------------------------------------------------------------------------

LONG = (2, 256, 8)
KINDS: dict[str, list[dict[str, int]]] = {
    "a wider layer in the middle": [{}, {}, {}, {"wide": 18}, {}, {}, {}],
    "two kinds of attention": [{"causal": i % 3 == 2} for i in range(7)],
}


def stages_of(kinds: list[dict[str, int]], pp: int) -> autopar.Plan:
    with torch.device("meta"):
        case = Case(Mixed(kinds, width=64), torch.empty(LONG))
    return compiled(case, {"pp": pp}).plan


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_stages_balance_cost_not_layers(name: str, pp: int) -> None:
    """The slowest stage is as fast as that of the best of all contiguous cuts, found by trying them."""
    plan, apart = stages_of(KINDS[name], pp), stages_of(KINDS[name], len(KINDS[name]) + 2)
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in apart.stage_plans]
    slowest = max(stage.forward_seconds + stage.backward_seconds for stage in plan.stage_plans)
    cuts = itertools.combinations(range(1, len(seconds)), pp - 1)
    best = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cut, len(seconds)))) for cut in cuts)
    assert slowest == pytest.approx(best, rel=1e-3)


def test_a_wide_layer_has_a_stage_almost_to_itself() -> None:
    stages = stages_of(KINDS["a wider layer in the middle"], 3).stages
    assert [len([unit for unit in stage if unit.startswith("layers")]) for stage in stages] == [3, 1, 3]
    assert "layers.3" in stages[1]
