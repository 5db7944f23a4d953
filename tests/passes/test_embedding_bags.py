"""Bags of one size: as on one device, and split over ranks and microbatches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.graph import op_name
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

ROWS, SIZE, WORDS, WIDTH = 8, 4, 12, 8


class Bags(nn.Module):
    """Means of bags; ``weighted``: of rows times what is made of the batch."""

    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.table, self.enter = nn.EmbeddingBag(WORDS, WIDTH, **options), nn.Linear(SIZE, SIZE)
        self.leave, self.weighted = nn.Linear(WIDTH, 4), weighted

    def forward(self, words: Tensor, x: Tensor) -> Tensor:
        weights = self.enter(x)
        bags = self.table(words, per_sample_weights=weights if self.weighted else None)
        return self.leave(bags).square().mean() + weights.square().mean()


OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {},
    "max": {"mode": "max"},
    "weighted": {"mode": "sum", "weighted": True},
    "weighted_padded": {"mode": "sum", "weighted": True, "padding_idx": -9},
    "sum_padded": {"mode": "sum", "padding_idx": 3},
    "mean_padded": {"padding_idx": 3},
}


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    words = torch.randint(WORDS, (ROWS, SIZE))
    words[0], words[1, :2] = 3, 3  # a bag of nothing else than padding, and one row twice
    return words, torch.randn(ROWS, SIZE, dtype=torch.float64)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_bags_are_split(options: str, mesh: dict[str, int]) -> None:
    sample = batch()
    given: dict[str, Any] = {"mesh": mesh, "microbatches": 2, "optimizer": torch.optim.SGD}
    job = compile_pinned(Bags(**OPTIONS[options]).double(), 4, sample=sample, cluster=FAST, **given)
    assert not job.plan.replicated_ops
    result = job.verify(sample, steps=2)
    assert result.ok, str(result)
    (loss,) = re.findall(r"loss_axes=(.*),\n", job.job.texts[-1])
    assert '"dp"' in loss, "every rank computes all samples"


def test_what_is_left_of_a_bag() -> None:
    flat = autopar.capture(Bags(mode="sum").double(), sample=batch()).flat
    names = [op_name(node).split(".")[1] for node in flat.nodes]
    assert names == ["linear", "embedding", "sum", "linear", "square", "mean", "square", "mean", "add"]


class OtherBags(Bags):
    def forward(self, words: Tensor, x: Tensor) -> Tensor:
        begins = torch.tensor([0, 3, 4, 8, 9, 12, 20, 30])
        return F.embedding_bag(words.flatten(), self.table.weight, begins).square().mean() + self.enter(x).mean()


@pytest.mark.parametrize("model", [OtherBags(), Bags(mode="max", padding_idx=3)], ids=["offsets", "max_padded"])
def test_other_bags_stay(model: nn.Module) -> None:
    sample = batch()
    job = compile_pinned(model.double(), 2, sample=sample, cluster=FAST, mesh={"dp": 2}, optimizer=torch.optim.SGD)
    assert "aten.embedding_bag" in job.plan.replicated_ops[0]
    result = job.verify(sample, steps=2)
    assert result.ok, str(result)


def test_a_row_that_the_table_hasnt_is_refused() -> None:
    words, x = batch()
    words[2, 2] = WORDS
    with pytest.raises(autopar.AutoparError, match=f"{WORDS}"):
        autopar.capture(Bags().double(), sample=(words, x))
