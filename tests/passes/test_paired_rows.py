"""What is written to the places of a mask is of their own rows where a sample says so, and then the batch is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import DeadRankError, ShardingError
from autopar.graph import info, op_name
from autopar.mesh import Mesh
from autopar.preparation import Captured
from autopar.spmd import S
from tests.codegen.programs import place_at_random
from tests.fast_cluster import FAST
from tests.models import Float64, Residual
from tests.pinned import compile_pinned

IMAGE, WIDTH, ROWS, POSITIONS, PATCHES = 9, 16, 8, 6, 2


class Captions(nn.Module):
    """Features of images go to the places that tokens leave them, as in LLaVA."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.look = nn.Embedding(12, WIDTH), nn.Linear(3, WIDTH)
        self.positions = nn.Parameter(torch.randn(POSITIONS, WIDTH))
        self.layers, self.head = nn.ModuleList(Residual(WIDTH) for _ in range(2)), nn.Linear(WIDTH, 12)

    def features(self, images: Tensor) -> Tensor:
        return torch.cat(self.look(images).unbind(0))

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        features, mask = self.features(images), (ids == IMAGE).unsqueeze(-1)
        x = self.tokens(ids)
        x = x.masked_scatter(mask.expand(-1, -1, WIDTH), features.to(x.dtype)) * self.positions
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), ids)


def batch(places: list[int]) -> dict[str, Tensor]:
    """Rows with so many places for features, and two features for each row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(IMAGE, (len(places), POSITIONS), generator=generator)
    for row, count in enumerate(places):
        ids[row, torch.randperm(POSITIONS, generator=generator)[:count]] = IMAGE
    return {"ids": ids, "images": torch.randn(len(places), PATCHES, 3, generator=generator, dtype=torch.float64)}


EVEN, UNEVEN, FEWER = [2] * ROWS, [4, 4, 2, 2, 1, 1, 2, 0], [1] * ROWS


def model() -> nn.Module:
    torch.manual_seed(0)
    return Captions().double()


def written(sample: Any, made: nn.Module | None = None) -> list[str]:
    prepared = Captured(made or model(), sample).on("cpu")[False]
    return [op_name(node) for block in prepared.blocks for node in block.ops if "scatter" in op_name(node)]


def test_a_sample_says_whether_places_are_of_their_rows() -> None:
    whole, paired = ["aten.masked_scatter.default"], ["masked_scatter_rows"]
    assert written(batch(EVEN)) == paired
    assert written(batch(UNEVEN)) == whole
    assert written(batch(FEWER)) == whole, "features are left over"
    unknown = {name: tensor.to("meta") for name, tensor in batch(EVEN).items()}
    assert written(unknown, model().to("meta")) == paired


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {"microbatches": 2}),
        ({"pp": 2, "dp": 2}, {"microbatches": 2, "zero": 1}),
        ({"dp": 2, "tp": 2}, {"microbatches": 1}),
        ({"dp": 2, "cp": 2}, {"microbatches": 2}),
    ],
    ids=str,
)
def test_rows_of_images_are_split_as_those_of_tokens(mesh: dict[str, int], options: dict[str, Any]) -> None:
    with Float64():
        sample = batch(EVEN)
        ranks = mesh.get("pp", 1) * mesh.get("dp", 1) * mesh.get("tp", 1) * mesh.get("cp", 1)
        job = compile_pinned(model(), ranks, sample=sample, mesh=mesh, cluster=FAST, **options)
        result = job.verify(sample, steps=2)
    assert not job.plan.replicated_ops
    assert result.ok, str(result)


def test_in_mixed_precision() -> None:
    sample = batch(EVEN)
    sample["images"] = sample["images"].float()
    job = compile_pinned(Captions(), 2, sample=sample, mesh={"dp": 2}, microbatches=2, precision="bf16", cluster=FAST)
    assert "masked_scatter_rows(" in job.source(0)
    assert job.verify(sample, steps=1).ok


def test_rows_with_other_numbers_are_computed_together() -> None:
    sample = batch(UNEVEN)
    with Float64():
        assert compile_pinned(model(), 2, sample=sample, mesh={"dp": 2}, cluster=FAST).verify(sample, steps=1).ok
        with pytest.raises(ShardingError, match=r"masked_scatter\S* in \S+ at test_paired_rows|masked_scatter\S* at"):
            compile_pinned(model(), 2, sample=sample, mesh={"dp": 2}, microbatches=2, cluster=FAST)


def test_a_batch_unlike_the_sample_is_refused() -> None:
    with Float64():
        job = compile_pinned(model(), 2, sample=batch(EVEN), mesh={"dp": 2}, cluster=FAST)
        with pytest.raises(
            DeadRankError, match=r"have \d+ places for what their own samples give, 128 values \[8, 16\]"
        ):
            job.simulate(batch(UNEVEN))


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_have_all_rows_have_those_of_any_batch(seed: int) -> None:
    """Whatever things cost, an axis that doesn't split the batch has no rows of its own."""
    placed = Captured(model(), batch(EVEN)).on("cpu")[False].copy()
    place_at_random(placed, Mesh(dp=2, tp=2), 1, seed)
    (node,) = (n for block in placed.blocks for n in block.ops if op_name(n) == "masked_scatter_rows")
    assert info(node).types()["dp"] == S(0)
    assert not info(node).types()["tp"].is_shard


class Backwards(Captions):
    """Features of the last image are first."""

    def features(self, images: Tensor) -> Tensor:
        return torch.cat(self.look(images).unbind(0)[::-1])


def test_pieces_in_another_order_stay_so() -> None:
    torch.manual_seed(0)
    with Float64():
        sample = batch(EVEN)
        result = compile_pinned(Backwards().double(), 1, sample=sample, mesh={}, cluster=FAST).verify(sample, steps=1)
    assert result.ok, str(result)


def test_features_in_pieces_are_put_together() -> None:
    """Of each image one, or some of a whole."""
    job = autopar.compile(model(), 1, sample=batch(EVEN), cluster=FAST)
    assert "unbind" not in job.source(0)
    assert "aten.cat" not in job.source(0)
