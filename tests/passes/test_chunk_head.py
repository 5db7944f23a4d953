"""chunk_head: one op instead of logits, that it computes the same, how it reads, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.batch import flatten
from autopar.errors import ArgumentError
from autopar.graph import Block, Model, info, op_name, print_block
from autopar.passes.chunk_head import chunk_head
from autopar.rules.chunked import CHUNKED, whole_logits
from tests import models, vocabulary_models
from tests.codegen.programs import assert_equal, emit_alone, expected, folded, load, run
from tests.models import Case, Float64
from tests.passes.test_split_vocabulary import (
    Auxiliary,
    Headed,
    LateBias,
    NoProduct,
    Normalised,
    Probabilities,
    Squared,
    TwoHeads,
    Weighted,
    ZLoss,
    ids,
)
from tests.planner.test_saved import measured as saved_bytes_of
from tests.planner.test_saved import predicted as kept_bytes
from tests.vocabulary_models import CLASSES, Body

NAMES = ("llama", "llama_tied", "gpt2", "nano_gpt", "encoder", *vocabulary_models.MODELS)


def made(name: str) -> Case:
    return models.make(name, 4) if name in models.CASES else vocabulary_models.case(name, 4)


def head(model: Model) -> Block:
    """The block with the op."""
    (block,) = (b for b in model.blocks if any(op_name(n) == CHUNKED for n in b.ops))
    return block


@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_model(name: str) -> None:
    """In chunks of uneven length; more than there are tokens too. No value is as large as all logits."""
    with Float64():
        case = made(name)
        model, wanted = folded(case), expected(case)
    for chunks in (3, 1000):
        chunked = chunk_head(model, chunks)
        assert_equal(run(case, emit_alone(chunked)), wanted, 1e-12)
        block = head(chunked)
        (whole,) = (meta for n in block.ops if (meta := whole_logits(n)))
        assert all(info(n).meta.shape[-1:] != whole.shape[-1:] for n in block.ops)


class NarrowHead(Headed):
    """The product in a dtype of its own, the loss in that of the parameters, as mixed precision has it; tied."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.randn(CLASSES))
        self.dtype = dtype

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = F.linear(*(t.to(self.dtype) for t in (x, self.head.weight, self.bias)))
        return self.entropy(logits.to(x.dtype), ids)


def test_casts_of_the_table_and_of_logits() -> None:
    """As near to what float64 computes as the whole head is."""
    torch.manual_seed(0)
    case = Case(NarrowHead(torch.bfloat16), ids())
    exact = NarrowHead(torch.float64).double()
    exact.load_state_dict(case.model.state_dict())
    chunked = chunk_head(folded(case), 4)
    (node,) = (n for n in head(chunked).ops if op_name(n) == CHUNKED)
    assert [info(n).meta.dtype for n in node.args[:2] + node.args[3:]] == [torch.bfloat16] * 3  # type: ignore[union-attr,operator]
    assert info(node).meta.dtype == torch.float32
    assert str(node.kwargs["logits"]) == "aten.to.dtype(z, torch.float32)"
    (_, plain), (_, wanted) = run(case, emit_alone(folded(case))), expected(Case(exact, ids()))
    for name, gradient in run(case, emit_alone(chunked))[1].items():
        assert (gradient - wanted[name]).norm() <= 1.05 * (plain[name] - wanted[name]).norm(), name


def test_texts(golden: Callable[[str, str], None]) -> None:
    """The blocks, and the emitted text of the head with most about it."""
    torch.manual_seed(0)
    blocks = [print_block(head(chunk_head(folded(made(n)), 8))) for n in NAMES]
    golden("passes/chunk_head.txt", "\n\n".join(blocks))
    (program,) = emit_alone(chunk_head(folded(made("soft_capped")), 8))
    forward = program.text[program.text.index("    def forward(self, ids") : program.text.index("PROGRAM")]
    golden("passes/chunk_head.py.txt", forward.rstrip() + "\n")


@pytest.mark.parametrize("name", ["llama", "soft_capped", "masked"])
def test_what_is_kept_for_the_backward(name: str) -> None:
    """To the byte: the planner's figure is what autograd holds."""
    with Float64():
        case = made(name)
        chunked = chunk_head(folded(case), 3)
    (program,) = emit_alone(chunked)
    batch, _ = flatten(case.batch)
    given = [batch[item.path] for item in program.program.inputs]
    assert kept_bytes(chunked) == saved_bytes_of(load(program, case.model), given)


def test_what_is_given_stays_as_it_was() -> None:
    model = folded(made("nano_gpt"))
    before = str(model)
    chunked = chunk_head(model, 8)
    assert str(model) == before
    assert chunked.parameters == model.parameters
    assert chunked.fingerprint == model.fingerprint


def test_values_of_layers_may_come_after_the_loss() -> None:
    """Other than in a head that is split over the pipeline."""
    case = Case(Auxiliary().double(), ids())
    assert_equal(run(case, emit_alone(chunk_head(folded(case), 5))), expected(case), 1e-12)


class Polynomial(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = -((self.head(x) * 2 + 1) ** 2)
        return self.entropy(torch.clamp(logits / 3, -4.0, 4.0), ids)


def test_operators_keep_their_order() -> None:
    case = Case(Polynomial().double(), ids())
    chunked = chunk_head(folded(case), 5)
    (program,) = emit_alone(chunked)
    assert "logits=lambda z: aten.clamp((-(((z * 2) + 1)**2)) / 3, min=-4.0, max=4.0)" in program.text
    assert_equal(run(case, (program,)), expected(case), 1e-12)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Squared, "the loss has no cross entropy over classes"),
        (NoProduct, r"layer_norm.* is between the cross entropy and the product that makes its logits"),
        (TwoHeads, "there are 2 cross entropies"),
        (Weighted, "has class weights"),
        (Probabilities, "has class probabilities as target"),
        (Normalised, r"is between the cross entropy and the product|logits are used otherwise"),
        (LateBias, r"mul.* is between the cross entropy and the product"),
        (ZLoss, r"logits are used otherwise than by the cross entropy, by aten\.logsumexp"),
    ],
)
def test_refusals(model: Callable[[], Body], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        chunk_head(folded(Case(model(), ids())), 8)
    text = str(raised.value)
    assert text.startswith("head_chunks=8: the head can't be computed in chunks: ")
    assert text.endswith("; head_chunks=1 computes it whole")
