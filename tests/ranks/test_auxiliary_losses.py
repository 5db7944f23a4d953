"""Losses of routers: products of means over the whole batch, on any ranks; of a microbatch where that is asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import ShardingError, StageError
from tests.dense_moe_models import LAYERS
from tests.models import VOCABULARY, Case, Float64, make, prepared, tokens
from tests.ranks.test_dense_experts import case_of, compiled
from tests.ranks.test_parity import name_of, verified


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=name_of)
def test_a_loss_of_the_batch_is_exact(mesh: dict[str, int]) -> None:
    with Float64():
        result = verified(case_of(LAYERS["dense"], batch=4), mesh, microbatches=1)
    assert result.ok, str(result)


def test_microbatches_are_refused_by_line() -> None:
    message = r"mul.Tensor in experts at dense_moe_models.py:\d+ needs the whole batch.*statistics='microbatch'"
    with pytest.raises(ShardingError, match=message):
        compiled(case_of(LAYERS["dense"]), 1, microbatches=2)


def test_a_microbatch_takes_its_own_for_the_batch() -> None:
    """Against gradients that one device accumulates over microbatches."""
    with Float64():
        case = case_of(LAYERS["dense"])
        job = compiled(case, 1, microbatches=2, statistics="microbatch")
        result = job.verify(case.batch)
    assert result.ok, str(result)
    assert re.search(r"= \w+ \* 2\n", job.source(0))
    again = compiled(case, 1, plan=job.plan)
    assert again.plan.options.statistics == "microbatch"
    assert again.source(0) == job.source(0)


@pytest.mark.slow
def test_a_microbatch_takes_its_own_on_all_axes() -> None:
    options: dict[str, Any] = {"microbatches": 2, "statistics": "microbatch", "zero": 1}
    with Float64():
        case = case_of(LAYERS["dense"])
        result = verified(case, {"pp": 2, "dp": 2, "tp": 2}, **options)
    assert result.ok, str(result)


def test_tokens_are_still_counted_over_the_batch() -> None:
    """What the batch alone determines is known before the step, and is no statistic of a microbatch."""
    case = make("nano_gpt", 4)
    found = compiled(case, 1, microbatches=4, statistics="microbatch").simulate(case.batch, 1)
    assert abs(found.losses[0] - case.model(*case.batch)[0].item()) < 1e-12


class _RootOfCount(nn.Module):
    """A loss with a number that is made from the count of the batch's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.embedding(ids)).view(-1, VOCABULARY)
        return F.cross_entropy(logits, targets.view(-1), reduction="sum") / (targets != -100).sum().double().sqrt()


def test_what_is_made_of_a_count_is_not_estimated_unasked() -> None:
    case = prepared(lambda: Case(_RootOfCount(), (tokens(4), tokens(4))))
    with pytest.raises(ShardingError, match=r"sqrt.*test_auxiliary_losses.py:\d+ needs the whole batch"):
        compiled(case, 1, microbatches=2)
    assert compiled(case, 2, mesh={"dp": 2}).verify(case.batch, 1).ok


@pytest.mark.slow
def test_a_head_in_chunks_keeps_the_routers_losses() -> None:
    with Float64():
        result = verified(case_of(LAYERS["dense"], batch=4), {"dp": 2}, head_chunks=2)
    assert result.ok, str(result)


def test_a_head_split_over_the_pipeline_refuses_them() -> None:
    with Float64(), pytest.raises(StageError, match=r"auxiliary loss.*vocabulary=\"stage\""):
        compiled(case_of(LAYERS["dense"], batch=4), 2, mesh={"pp": 2}, vocabulary="vocab-2", microbatches=1)
