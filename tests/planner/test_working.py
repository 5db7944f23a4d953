"""What passes hold beside what is kept: by hand, and with all else that a rank holds against predicted memory."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.graph import info, op_name
from autopar.planner.build import Built
from autopar.planner.pass_memory import passing_bytes
from autopar.planner.rank_memory import Storage
from autopar.planner.working import working
from autopar.rules.experts import absent_bytes
from autopar.simulate.predict import predicted_memory
from tests.fast_cluster import BUSY, FAST
from tests.models import prepared
from tests.moe_models import family
from tests.pinned import compile_pinned

ROWS, WIDTH, CLASSES = 512, 32, 96


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.gelu(self.up(x)))
        return x + down


class Classifier(nn.Module):
    """An embedding, layers that are alike, and a head whose logits are larger than all that a layer makes."""

    def __init__(self, layers: int = 4, classes: int = CLASSES, tied: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(classes, WIDTH), nn.Linear(WIDTH, classes, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), target)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Built]:
    """What is built for the plans of a test."""
    found: list[Built] = []
    module = importlib.import_module("autopar.search.choose")
    build = module.build

    def recorded(*arguments: Any, **named: Any) -> Built:
        found.append(build(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(module, "build", recorded)
    return found


def compiled(mesh: dict[str, int], microbatches: int = 1, **options: Any) -> Any:
    ids = torch.zeros(ROWS, dtype=torch.int64)
    given: dict[str, Any] = {"sample": {"ids": ids, "target": ids}, "mesh": mesh, "microbatches": microbatches}
    return compile_pinned(Classifier(), math.prod(mesh.values()), cluster=FAST, **given, **options)


def blocks(found: Built) -> dict[str, int]:
    saved = found.pipeline.activations.found
    return {b.name: working(b, s).bytes_ for b, s in zip(found.model.blocks, saved, strict=True)}


def test_blocks_by_hand(built: list[Built]) -> None:
    """Float32. A layer: at its last product, the gradients of both factors and of its result (before gelu's own is
    made, what gelu kept has gone); the head: those of logits and of their logarithms of probabilities; the embedding:
    its table's, beside that of its result."""
    compiled({"dp": 1})
    work = blocks(built[0])
    first, layer, last = work["glue"], work["Layer"], work["glue2"]
    assert layer == 4 * (ROWS * 4 * WIDTH + 4 * WIDTH * WIDTH + ROWS * WIDTH)
    assert 2 * 4 * ROWS * CLASSES <= last <= 2 * 4 * ROWS * CLASSES + 16  # and the gradient of the loss
    assert first == 4 * (ROWS * WIDTH + CLASSES * WIDTH)


def reckoned(found: Built) -> list[int]:
    """Per pipeline rank, what it is planned to hold."""
    return [rank.peak_bytes for rank in found.plan.rank_plans]


@pytest.mark.parametrize(
    ("mesh", "microbatches", "options"),
    [
        ({"dp": 1}, 2, {}),
        ({"dp": 2}, 2, {"zero": 1}),
        ({"tp": 2}, 2, {}),
        ({"pp": 2}, 8, {"recompute": "full"}),
        ({"pp": 4}, 8, {}),
        ({"dp": 2}, 2, {"head_chunks": 4}),
        ({"dp": 2}, 4, {"precision": "bf16"}),
        ({"dp": 2}, 2, {"zero": 2}),
        ({"dp": 2}, 2, {"zero": 3}),
        ({"dp": 4}, 2, {"zero": 3, "precision": "bf16"}),
        ({"pp": 2, "dp": 2}, 4, {"zero": 3}),
    ],
    ids=str,
)
def test_a_rank_holds_what_is_reckoned(
    built: list[Built], mesh: dict[str, int], microbatches: int, options: dict[str, Any]
) -> None:
    """Within 3 %: messages that wait, and what packs small tensors, aren't counted."""
    job = compiled(mesh, microbatches, **options).job
    ids = torch.zeros(ROWS, dtype=torch.int64)
    predicted = predicted_memory(job, {"ids": ids, "target": ids})[:: job.mesh.world // job.mesh.pp]
    for rank, (found, expected) in enumerate(zip(reckoned(built[-1]), predicted, strict=True)):
        assert found == pytest.approx(expected.peak_bytes, rel=0.03), rank


@pytest.mark.parametrize(
    ("mesh", "microbatches", "options"),
    [
        ({"dp": 2}, 1, {"zero": 3}),
        ({"pp": 2, "dp": 2}, 4, {"zero": 2, "schedule": "interleaved", "chunks": 2}),
        ({"pp": 2, "dp": 2}, 4, {"zero": 3, "schedule": "interleaved", "chunks": 2}),
        ({"dp": 2}, 1, {"zero": 2, "schedule": "interleaved", "chunks": 5}),
        ({"dp": 2}, 1, {"zero": 3, "schedule": "interleaved", "chunks": 5}),
        ({"dp": 2}, 4, {"zero": 3, "schedule": "interleaved", "chunks": 3}),
    ],
    ids=str,
)
def test_a_rank_holds_no_more_than_is_reckoned(
    built: list[Built], mesh: dict[str, int], microbatches: int, options: dict[str, Any]
) -> None:
    """Sums of gradients are reckoned before the first is made, and what a pass of one stage begins with, and messages
    of the others, at the peak of each."""
    job = compiled(mesh, microbatches, **options).job
    ids = torch.zeros(ROWS, dtype=torch.int64)
    predicted = predicted_memory(job, {"ids": ids, "target": ids})[:: job.mesh.world // job.mesh.pp]
    for rank, (found, expected) in enumerate(zip(reckoned(built[-1]), predicted, strict=True)):
        assert expected.peak_bytes <= found <= 1.15 * expected.peak_bytes, rank


@pytest.mark.parametrize("chunks", [10, 20])
def test_a_rank_holds_what_the_stages_next_to_each_other_have_under_way(built: list[Built], chunks: int) -> None:
    """Not what any two have: in the backward of the head, no gradient of the table is being sent, nor its weights
    gathered. Sums of gradients are reckoned before the first is made."""
    ids = torch.zeros(64, dtype=torch.int64)
    batch = {"ids": ids, "target": ids}
    given: dict[str, Any] = {"microbatches": 1, "zero": 3, "schedule": "interleaved", "chunks": chunks}
    model = Classifier(20, 512)
    job = compile_pinned(model, 2, sample=batch, mesh={"dp": 2}, cluster=FAST, **given).job
    (rank, *_), (expected, *_) = built[-1].plan.rank_plans, predicted_memory(job, batch)
    assert expected.peak.label == f"B0@{chunks - 1}"
    assert expected.peak_bytes <= rank.peak_bytes - rank.kinds["gradients"] <= 1.08 * expected.peak_bytes
    again = compile_pinned(model, 2, sample=batch, mesh={"dp": 2}, cluster=FAST, budget_bytes=rank.peak_bytes, **given)
    assert not any(number > 0 for stage in again.plan.stage_plans for number in stage.recompute)


@pytest.mark.parametrize("zero", [2, 3])
def test_the_gradient_of_a_table_of_both_ends_waits_for_both(built: list[Built], zero: int) -> None:
    """It is 15 % of what a rank holds, from the head's backward until the embedding's is over."""
    ids = torch.zeros(64, dtype=torch.int64)
    given: dict[str, Any] = {"sample": {"ids": ids, "target": ids}, "mesh": {"dp": 2}, "microbatches": 2}
    job = compile_pinned(Classifier(classes=2048, tied=True), 2, cluster=FAST, zero=zero, **given).job
    (expected, _) = predicted_memory(job, {"ids": ids, "target": ids})
    assert reckoned(built[-1]) == pytest.approx([expected.peak_bytes], rel=0.03)


@pytest.mark.parametrize(
    "mesh", [{"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"tp": 2, "ep": 2}], ids=str
)
def test_what_layers_with_experts_hold(built: list[Built], mesh: dict[str, int]) -> None:
    """Under ZeRO 3, with weights of two layers and rows that travel, or (over tp, where messages take long) zeros for
    those of other ranks."""
    case, cluster = prepared(lambda: family("deepseek_v3", 8)), FAST if "dp" in mesh else BUSY
    ranks = math.prod(size for axis, size in mesh.items() if axis != "ep")
    given: dict[str, Any] = {"sample": case.batch, "loss": case.loss, "mesh": mesh, "microbatches": 2, "zero": 3}
    job = compile_pinned(case.model, ranks, cluster=cluster, **given).job
    (expected, *_) = predicted_memory(job, case.batch)
    assert reckoned(built[-1]) == pytest.approx([expected.peak_bytes], rel=0.05)
    ops = [node for block in built[-1].model.blocks for node in block.ops if op_name(node).startswith("dispatch")]
    assert ops
    assert {absent_bytes(node) / info(node).meta.bytes for node in ops} == {float("dp" not in mesh)}


class Quotients(nn.Module):
    """Layers whose widest op is a quotient: of rows and their norms, of a weight and what is made, or the other way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(4 * WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        if self.kind == "norm":
            made = made / (made.square().sum(-1, keepdim=True) + 1)
        else:
            made = made / self.weight if self.kind == "weight" else self.weight / (1 + torch.exp(made))
        down: Tensor = self.down(made)
        return x + down


@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize("kind", ["norm", "weight", "turned"])
def test_what_backwards_of_quotients_hold(built: list[Built], kind: str, precision: str) -> None:
    """Several results beside the gradients: without them, a fifth or more of the peak would be missing."""
    sample = {"input": torch.randn(ROWS, WIDTH)}
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Quotients(kind), Quotients(kind))
    job = compile_pinned(
        model, 1, sample=sample, loss=lambda y, _: y.square().mean(), cluster=FAST, precision=precision
    ).job
    (expected,) = predicted_memory(job, sample)
    assert reckoned(built[-1]) == pytest.approx([expected.peak_bytes], rel=0.05)


class Adapted(nn.Module):
    """A frozen layer beside a product of two small weights, which is all that is trained: little of it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.first, self.second = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return x + down + x @ self.first @ self.second


def test_forwards_hold_what_has_a_name(built: list[Built]) -> None:
    """Until the layer's function returns: of layers that keep little, that is more than their backwards hold."""
    sample = {"input": torch.randn(ROWS, WIDTH)}
    model = nn.Sequential(*(Adapted() for _ in range(4)))
    job = compile_pinned(model, 1, sample=sample, loss=lambda y, _: y.square().mean(), cluster=FAST).job
    (expected,) = predicted_memory(job, sample)
    assert max(expected.phases, key=lambda phase: phase.peak_bytes).label[0] == "F"
    assert reckoned(built[-1]) == pytest.approx([expected.peak_bytes], rel=0.03)


def test_weights_that_come_and_go(built: list[Built]) -> None:
    """ZeRO 3: of a layer, what is gathered and what is sent of its gradients; nothing of that where weights stay."""
    compiled({"dp": 2}, 2, zero=3)
    compiled({"dp": 2}, 2, zero=1)
    layer = 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)
    found = []
    for one in built[-2:]:
        model, storage = one.model, Storage(one.plan.options, one.plan.mesh)
        call = next(i for i, call in enumerate(model.calls) if model.block_of(call).name == "Layer")
        found.append(passing_bytes(model, call, storage))
    assert found == [(layer, layer), (0, 0)]
