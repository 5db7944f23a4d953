"""The promise where the head is computed in chunks: equal to one device in float64, and no rank has all its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import simulate
from autopar.errors import ArgumentError
from autopar.runtime.job import run_rank
from autopar.verification import Verification
from tests import vocabulary_models
from tests.fast_cluster import FAST
from tests.models import Case, Float64, llama, make, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import optimizer, verified
from tests.ranks.test_schedules import check
from tests.storages import Largest
from tests.vocabulary_models import CLASSES, Body

ODD = 50  # a vocabulary that no number of ranks here divides
HEADS: dict[str, Callable[[], Case]] = {
    "llama": lambda: llama(8, vocabulary=ODD),
    "llama_tied": lambda: llama(8, tied=True, vocabulary=ODD),
    **{name: lambda name=name: vocabulary_models.case(name, 8) for name in vocabulary_models.MODELS},
}
"""Tied and untied, soft-capped, smoothed, with ignored targets, a loss per token with weights, a sum."""

WAYS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"schedule": "zb-h1"}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"vocabulary": "vocab-2"}),
    ({"pp": 2}, {"vocabulary": "naive"}),
    ({"pp": 2}, {"vocabulary": "interlaced"}),
    ({"pp": 2}, {"schedule": "v-half", "vocabulary": "vocab-1"}),
    ({"pp": 2}, {"schedule": "v-half", "vocabulary": "vocab-2"}),
]


def way_id(value: Any) -> str:
    mesh, options = value
    return " ".join([*(f"{k}{v}" for k, v in mesh.items()), *options.values()])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=way_id)
@pytest.mark.parametrize("name", HEADS)
def test_every_head_on_every_mesh(name: str, way: tuple[dict[str, int], dict[str, Any]]) -> None:
    mesh, options = way
    if options.get("schedule") == "v-half" and not name.startswith("llama"):
        layers = 4  # two stages on each of two ranks
        check(lambda: deeper(name, layers), mesh, microbatches=4, head_chunks=3, **options)
    else:
        check(HEADS[name], mesh, microbatches=4, head_chunks=3, **options)


def deeper(name: str, layers: int) -> Case:
    """The same head on more layers."""
    case = vocabulary_models.case(name, 8)
    body = case.model
    assert isinstance(body, Body)
    body.layers = nn.ModuleList([vocabulary_models.Layer() for _ in range(layers)]).double()
    return case


SAMPLE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("soft_capped", {"dp": 2, "tp": 2}, {}),
    ("masked", {"tp": 2}, {}),
    ("smoothed", {"pp": 2}, {"schedule": "zb-h1"}),
    ("soft_capped", {"pp": 2}, {"vocabulary": "vocab-2"}),
    ("masked", {"pp": 2}, {"vocabulary": "vocab-1"}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), SAMPLE, ids=str)
def test_a_sample(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """A few of those above, for the fast tier."""
    check(lambda: vocabulary_models.case(name, 4), mesh, microbatches=2, head_chunks=3, **options)


class CustomLoss(nn.Module):
    """Returns logits; the loss is a function of them and of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("chunks", [2, 1000])
def test_a_loss_of_the_users_own(chunks: int) -> None:
    """In more chunks than there are tokens too."""
    batch = {"ids": torch.arange(24).view(4, 6)}

    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(30 * torch.tanh(logits.flatten(0, 1) / 30), batch["ids"].roll(1, 1).flatten())

    with Float64():
        case = prepared(lambda: Case(CustomLoss(), batch, loss))
        found: Verification = verified(case, {"dp": 2}, microbatches=2, head_chunks=chunks)
    assert found.ok, str(found)


def test_a_plan_has_the_chunks() -> None:
    case = make("nano_gpt", 4)
    options: dict[str, Any] = {"sample": case.batch, "optimizer": optimizer}
    job = compile_pinned(case.model, 2, mesh={"tp": 2}, head_chunks=4, cluster=FAST, **options)
    again = compile_pinned(case.model, 2, plan=autopar.Plan.from_json(job.plan.to_json()), **options)
    assert "chunks=4" in again.source(0)
    assert again.source(0) == job.source(0)


def test_a_loss_without_a_head_is_refused() -> None:
    case = make("mlp", 4)
    with pytest.raises(ArgumentError, match=r"head_chunks=4: .*no cross entropy over classes; head_chunks=1"):
        compile_pinned(case.model, 2, sample=case.batch, mesh={"dp": 2}, head_chunks=4, cluster=FAST)


# --- memory -----------------------------------------------------------------------------------------

WIDE = 4096  # classes


def measured(mesh: dict[str, int], **options: Any) -> tuple[int, int]:
    """Of the worst rank of a step in float32: its largest storage, and its peak."""
    case = prepared(lambda: llama(32, layers=2, vocabulary=WIDE), torch.float32)
    world = 1
    for size in mesh.values():
        world *= size
    job = compile_pinned(
        case.model, world, sample=case.batch, mesh=mesh, microbatches=1, cluster=FAST, optimizer=optimizer, **options
    )

    def step(rank: int) -> int:
        with Largest() as largest:
            run_rank(job.job, rank, case.batch, 1)
        return largest.bytes

    found = simulate.run(step, world)
    return max(found.results), max(found.peak_bytes)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"dp": 1}, {}), ({"tp": 2}, {}), ({"pp": 2}, {"vocabulary": "vocab-1"}), ({"pp": 2}, {"vocabulary": "vocab-2"})],
    ids=str,
)
def test_no_rank_ever_has_all_its_logits(mesh: dict[str, int], options: dict[str, Any]) -> None:
    split = 2 if mesh != {"dp": 1} else 1
    logits_bytes = 4 * (32 * 16) * WIDE // split
    table_bytes = 4 * WIDE * 32
    whole, whole_peak = measured(mesh, **options)
    largest, peak = measured(mesh, head_chunks=16, **options)
    assert whole >= logits_bytes
    assert largest < logits_bytes / 2
    assert largest <= max(logits_bytes // 16, 2 * table_bytes)
    assert peak < whole_peak - logits_bytes / 2  # it is elsewhere then


# --- mixed precision --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"tp": 2}, {}), ({"pp": 2}, {"vocabulary": "vocab-1"}), ({"pp": 2}, {"vocabulary": "vocab-2"})],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.slow
def test_bf16_products_lose_nothing_by_chunks(tied: bool, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Gradients are as near to those of float32 as with all logits at once."""

    def gradients(mesh: dict[str, int], **options: Any) -> dict[str, torch.Tensor]:
        case = prepared(lambda: llama(8, layers=2, tied=tied), torch.float32)
        world = max(mesh.values())
        job = compile_pinned(case.model, world, sample=case.batch, mesh=mesh, microbatches=2, cluster=FAST, **options)
        return job.simulate(case.batch).gradients

    def error(found: dict[str, torch.Tensor]) -> float:
        return sum(float((found[name] - g).norm() / g.norm()) for name, g in exact.items()) / len(exact)

    exact = gradients({"dp": 1})
    whole = error(gradients(mesh, precision="bf16", **options))
    chunked = error(gradients(mesh, precision="bf16", head_chunks=5, **options))
    assert 1e-4 < chunked <= 1.1 * whole
