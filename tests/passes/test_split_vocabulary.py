"""split_vocabulary: what is cut out, that it computes the same, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar.batch import flatten
from autopar.errors import StageError
from autopar.graph import INPUT_CALL, Block, Model, Value, info, op_name, print_block, verify
from autopar.passes.logits import CROSS_ENTROPY
from autopar.passes.split_vocabulary import split_vocabulary
from autopar.passes.vocabulary import head_of, localize_vocabulary, vocabulary_calls, vocabulary_dims
from tests import models, vocabulary_models
from tests.codegen.programs import Result, assert_equal, expected, folded, weights
from tests.models import Case, Float64
from tests.vocabulary_models import CLASSES, WIDTH, Body

NAMES = ("llama", "llama_tied", "gpt2", "nano_gpt", *vocabulary_models.MODELS)


def made(name: str) -> Case:
    return models.make(name, 4) if name in models.CASES else vocabulary_models.case(name, 4)


# --- running a graph on one device ------------------------------------------------------------------


def execute(model: Model, case: Case) -> Result:
    """Loss and gradients of the graph itself; tables are padded, and logits of padding left out."""
    full = {name: tensor.clone() for name, tensor in weights(case.model).items()}
    for name, parameter in case.model.named_parameters():
        full[name].requires_grad_(parameter.requires_grad)
    batch, _ = flatten(case.batch)
    values: dict[Value, Tensor] = {Value(INPUT_CALL, k): batch[item.path] for k, item in enumerate(model.inputs)}
    for index, call in enumerate(model.calls):
        block = model.block_of(call)
        stored = [padded(full[n], info(p).meta.shape) for n, p in zip(call.parameters, block.parameters, strict=True)]
        for k, result in enumerate(evaluate(block, [*stored, *(values[v] for v in call.operands)], classes(model))):
            values[Value(index, k)] = result
    loss = values[model.loss]
    loss.backward()
    return float(loss.detach()), {name: t.grad for name, t in full.items() if t.grad is not None}


def padded(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    missing = [wanted - extent for wanted, extent in zip(shape, tensor.shape, strict=True)]
    return F.pad(tensor, [count for extra in reversed(missing) for count in (0, extra)])


def evaluate(block: Block, given: list[Tensor], count: int) -> list[Tensor]:
    """The block's outputs; every result has the shape that its metadata say."""
    env: dict[fx.Node, Any] = dict(zip((*block.parameters, *block.inputs), given, strict=True))
    for node in block.ops:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if op_name(node) == CROSS_ENTROPY:
            args = (args[0][:, :count], *args[1:])
        assert callable(node.target)
        env[node] = node.target(*args, **kwargs)
        if isinstance(env[node], Tensor):
            assert tuple(env[node].shape) == info(node).meta.shape, node
    return [env[node] for node in block.outputs]


def classes(model: Model) -> int:
    """Of the model, without padding."""
    calls = vocabulary_calls(model)
    assert calls is not None
    call = model.calls[calls.head]
    block = model.block_of(call)
    weight = head_of(block).weight
    shape = model.parameters[call.parameters[block.parameters.index(weight)]].meta.shape
    return shape[vocabulary_dims(block)[weight]]


@pytest.mark.parametrize("name", NAMES)
def test_the_cut_graph_is_the_model(name: str) -> None:
    with Float64():
        case = made(name)
        model, wanted = folded(case), expected(case)
    for pp in (1, 7):
        cut = split_vocabulary(model, pp, 1)
        assert (info(head_of(head(cut)).logits).meta.shape[1] == classes(cut)) == (pp == 1)
        assert_equal(execute(cut, case), wanted, 1e-12)


class Classes(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(classes, WIDTH), nn.Linear(WIDTH, classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("dtype", "classes", "each"),
    [
        (torch.float64, 50, 18),
        (torch.float32, 50, 20),
        (torch.bfloat16, 50, 24),
        (torch.bfloat16, 34, 16),
        (torch.bfloat16, 32, 12),  # 16 each would be none for the last
    ],
)
def test_rows_of_logits_are_aligned(dtype: torch.dtype, classes: int, each: int) -> None:
    """On three ranks each has a multiple of 16 bytes of them, or else of two numbers."""
    case = Case(Classes(classes).to(dtype), {"ids": torch.zeros(2, 4, dtype=torch.int64)})
    cut = split_vocabulary(folded(case), 3, 1)
    assert info(head_of(head(cut)).logits).meta.shape[1] == 3 * each
    calls = vocabulary_calls(cut)
    assert calls is not None
    assert calls.embedding is not None
    for index in (calls.embedding, calls.head):
        block = cut.block_of(cut.calls[index])
        assert [info(node).meta.shape[dim] for node, dim in vocabulary_dims(block).items()] == [3 * each]


def head(model: Model) -> Block:
    calls = vocabulary_calls(model)
    assert calls is not None
    return model.block_of(model.calls[calls.head])


# --- text -------------------------------------------------------------------------------------------


def shown(model: Model) -> str:
    """The calls, and the blocks that no stage has."""
    calls = str(model).partition("\nblock ")[0]
    return "\n".join([calls, *(print_block(b) for b in model.blocks if b.kind in ("vocabulary", "tail"))])


def test_texts(golden: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    golden("passes/split_vocabulary.txt", "\n\n".join(shown(split_vocabulary(folded(made(n)), 2, 2)) for n in NAMES))


def test_what_is_not_cut_stays_as_it_was() -> None:
    model = folded(made("nano_gpt"))
    before = str(model)
    cut = split_vocabulary(model, 2, 1)
    assert str(model) == before
    assert [b for b in cut.blocks if b.kind == "layer"] == [b for b in model.blocks if b.kind == "layer"]
    assert cut.parameters == model.parameters
    assert cut.fingerprint == model.fingerprint


def test_a_table_that_is_read_elsewhere_stays_on_its_stage() -> None:
    """The head alone is split then."""
    calls = vocabulary_calls(split_vocabulary(folded(Case(TwoLookups(), ids())), 2, 1))
    assert calls is not None
    assert calls.embedding is None


def test_layers_without_numbers() -> None:
    """The head's product and the cross entropy are in different calls, as are embedding and norm."""
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)).double()
    batch = (torch.arange(6),)
    case = Case(model, batch, lambda output, batch: F.cross_entropy(output, batch[0]))
    cut = split_vocabulary(folded(case), 3, 1)
    assert [cut.block_of(call).kind for call in cut.calls][-2:] == ["vocabulary", "tail"]
    assert_equal(execute(cut, case), expected(case), 1e-12)


def test_one_rank_of_the_pipeline() -> None:
    model = split_vocabulary(folded(made("soft_capped")), 2, 2)
    local = localize_vocabulary(model, 2)
    verify(local, "localize_vocabulary")
    parts = head_of(head(local))
    assert info(parts.weight).meta.shape == (28, WIDTH)
    assert info(parts.logits).meta.shape[1] == 28
    assert str(info(parts.product).choices["pp"]) == "R, S(0) -> S(1)"
    assert info(head_of(head(model)).weight).meta.shape == (56, WIDTH)


# --- refusals ---------------------------------------------------------------------------------------


def ids() -> dict[str, Tensor]:
    return {"ids": torch.arange(12).view(2, 6)}


class Headed(Body):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def entropy(self, logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.hidden(ids), ids)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.entropy(self.head(x), ids)


class TwoLookups(Headed):
    def forward(self, ids: Tensor) -> Tensor:
        return self.loss(self.hidden(ids) + self.embed(ids.flip(1)), ids)


class TiedTwoLookups(TwoLookups):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Auxiliary(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().loss(x, ids) + 0.1 * x.square().mean()


class ZLoss(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(x)
        return self.entropy(logits, ids) + logits.logsumexp(-1).square().mean()


class TwoHeads(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().loss(x, ids) + super().loss(x * 2, ids)


class Weighted(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.entropy(self.head(x), ids, weight=torch.ones(CLASSES))


class Probabilities(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.entropy(self.head(x), F.one_hot(ids, CLASSES).float().flatten(0, 1).unsqueeze(0))

    def entropy(self, logits: Tensor, ids: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten(0, 1))


class Normalised(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.entropy(F.normalize(self.head(x), dim=-1), ids)


class LateBias(Headed):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.entropy(2 * self.head(x) + self.bias, ids)


class Squared(Headed):
    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(x).square().mean()


class NoProduct(Body):
    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.hidden(ids).flatten(0, 1), ids.flatten() % WIDTH)


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
        (Auxiliary, r"comes after the cross entropy and reads .*; there, values of layers"),
        (TiedTwoLookups, r"parameter 'embed\.weight' of the head is read by \w+ too"),
    ],
)
def test_refusals(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(StageError, match=message) as raised:
        split_vocabulary(folded(Case(model(), ids())), 2, 1)
    assert str(raised.value).endswith('vocabulary="stage" keeps embedding and head whole, on pipeline stages')
