"""pad_head: a longer table, that the model stays what it was, how it reads, and where nothing is padded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.batch import flatten
from autopar.graph import Model, op_name, print_block
from autopar.mesh import Mesh
from autopar.passes.chunk_head import chunk_head
from autopar.passes.pad_head import pad_head, table_of
from autopar.rules.loss import PADDED
from autopar.runtime import Axes
from autopar.runtime.load import load_program
from tests import models, vocabulary_models
from tests.codegen.programs import assert_equal, emit_alone, expected, folded, simulated
from tests.fast_cluster import FAST
from tests.models import Case, Float64, llama
from tests.passes.test_split_vocabulary import Headed, Squared, TwoHeads, ZLoss, ids
from tests.pinned import compile_pinned
from tests.planner.test_saved import measured as saved_bytes_of
from tests.planner.test_saved import predicted as kept_bytes
from tests.vocabulary_models import CLASSES, Body

NAMES = ("llama_tied", "nano_gpt", *vocabulary_models.MODELS)
RANKS = 7  # that no number of classes here divides


def made(name: str) -> Case:
    return models.make(name, 4) if name in models.CASES else vocabulary_models.case(name, 4)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_model(name: str, chunks: int) -> None:
    with Float64():
        case = made(name)
        model, wanted = folded(case), expected(case)
    padded = pad_head(chunk_head(model, chunks) if chunks > 1 else model, RANKS)
    table = table_of(model)
    assert table is not None
    assert padded.parameters == model.parameters
    (program,) = emit_alone(padded)
    longer = {p.name: p.padded_shape for p in program.program.parameters if p.padding}
    assert longer
    for name_, shape in longer.items():
        assert table.padded(RANKS) in shape
        assert table.classes in model.parameters[name_].meta.shape
    assert_equal(simulated(case, (program,), Mesh(), 1), wanted, 1e-12)


class Spread(Headed):
    """Labels that are smoothed, of tokens of which some don't count; for each token or all."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x).reshape(-1, CLASSES)
        given: dict[str, Any] = {"ignore_index": 3, "label_smoothing": 0.2, "reduction": self.reduction}
        return (F.cross_entropy(logits, ids.reshape(-1), **given) * 0.7).sum()


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_smoothed_labels_are_spread_over_classes_alone(reduction: str) -> None:
    torch.manual_seed(0)
    case = Case(Spread(reduction).double(), ids())
    padded = pad_head(folded(case), RANKS)
    assert_equal(simulated(case, emit_alone(padded), Mesh(), 1), expected(case), 1e-12)


def test_texts(golden: Callable[[str, str], None]) -> None:
    """The blocks with the loss."""
    torch.manual_seed(0)
    found = [head_text(pad_head(folded(made(name)), RANKS)) for name in NAMES]
    golden("passes/pad_head.txt", "\n\n".join(found))


def head_text(model: Model) -> str:
    (block,) = (b for b in model.blocks if any(op_name(n) == PADDED for n in b.ops))
    return print_block(block)


class Aligned(Headed):
    """As many classes as ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8 * CLASSES)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.entropy(self.head(x), ids)


class Penalised(Headed):
    """The table is read by something else, too."""

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.entropy(self.head(x), ids) + self.head.weight.square().sum()


@pytest.mark.parametrize(
    ("model", "ranks"),
    [(Aligned, 8), (Penalised, RANKS), (Squared, RANKS), (TwoHeads, RANKS), (ZLoss, RANKS)],
)
def test_what_stays_as_it_is(model: Callable[[], Body], ranks: int) -> None:
    given = folded(Case(model(), ids()))
    before = str(given)
    assert pad_head(given, ranks) is given
    assert str(given) == before


def test_what_is_given_stays_as_it_was() -> None:
    """The lookup of a tied table is in a block of its own."""
    model = folded(made("llama_tied"))
    before = str(model)
    assert str(pad_head(model, RANKS)) != before
    assert str(model) == before


def test_rows_of_16_bits_begin_where_kernels_load_many_at_once() -> None:
    case = models.prepared(lambda: llama(4, vocabulary=51), torch.float32)
    for precision, rows in (("model", 51), ("bf16", 56), ("fp16", 56)):
        job = compile_pinned(case.model, 1, sample=case.batch, precision=precision)
        (table,) = (p for p in job.programs.stages[-1].program.parameters if p.name == "lm_head.weight")
        assert (table.full_shape[0], table.padded_shape[0]) == (51, rows)
        assert ("cross_entropy_padded" in job.programs.stages[-1].text) == (rows > 51)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_is_kept_for_the_backward(smoothing: float) -> None:
    """To the byte: the planner's figure is what autograd holds."""

    class Smoothed(Headed):
        def loss(self, x: Tensor, ids: Tensor) -> Tensor:
            logits = self.head(x).reshape(-1, CLASSES)
            return F.cross_entropy(logits, ids.reshape(-1), label_smoothing=smoothing, reduction="sum")

    case = Case(Smoothed(), ids())
    padded = pad_head(folded(case), RANKS)
    (program,) = emit_alone(padded)
    stage = load_program(program.text, filename="stage.py").stage(Axes.build(Mesh(), 0, "cpu"))
    weights = {p.name: torch.zeros(p.padded_shape) for p in program.program.parameters}
    stage.load_state_dict(weights, assign=True)
    batch, _ = flatten(case.batch)
    given = [batch[item.path] for item in program.program.inputs]
    assert kept_bytes(padded) == saved_bytes_of(stage, given)


def test_a_backward_holds_as_much_as_without_padding() -> None:
    """Of eight rows more."""

    def peak(vocabulary: int) -> int:
        case = models.prepared(lambda: llama(4, layers=1, vocabulary=vocabulary), torch.float32)
        return max(compile_pinned(case.model, 1, sample=case.batch, precision="bf16").plan.peak_bytes)

    assert peak(4001) == pytest.approx(peak(4000), rel=0.01)


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"tp": 4}, {"head_chunks": 3}),
    ({"pp": 2, "tp": 2}, {"microbatches": 2, "schedule": "1f1b"}),
]


@pytest.mark.parametrize(("mesh", "options"), MESHES)
@pytest.mark.parametrize("name", ["llama_tied", "soft_capped"])
def test_on_ranks(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Of a vocabulary that tp doesn't divide each rank has a part. Loss, gradients, parameters after steps are those of
    one device, costs those of the programs."""
    with Float64():
        case = made(name)
        given = {"sample": case.batch, "mesh": mesh, "cluster": FAST, **options}
        job = compile_pinned(case.model, math.prod(mesh.values()), **given)
        result = job.verify(case.batch)
    assert result.ok, str(result)
    assert job.audit().largest_difference < 1e-12
