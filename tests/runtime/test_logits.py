"""A head split by classes, part by part in one process: entropy and gradients of the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.runtime.chunked_logits import ChunkedHead
from autopar.runtime.logits import ShardedHead
from autopar.runtime.program import Tensor as Wire
from autopar.runtime.program import VocabularyProgram
from tests.storages import Largest

TOKENS, WIDTH, CLASSES = 7, 5, 10
CAP = 3.0


class Rows(nn.Module):
    """Some rows of a head with a bias, whose logits are capped where ``capped``."""

    def __init__(self, weight: Tensor, bias: Tensor, *, capped: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        if capped:
            self.shape = lambda z: CAP * torch.tanh(z / CAP)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def make_program(rows: int, *, smoothing: float = 0.0, reduction: str = "sum", chunks: int = 1) -> VocabularyProgram:
    return VocabularyProgram(
        mesh={"pp": 1, "dp": 1, "tp": 1},
        stages=1,
        microbatches=1,
        inputs=(),
        totals=(),
        parameters=(),
        hidden=Wire("h", (TOKENS, WIDTH), "float64"),
        embedding=None,
        weight="weight",
        bias="bias",
        weight_dim=0,
        classes=CLASSES,
        rows=rows,
        reduction=reduction,
        label_smoothing=smoothing,
        chunks=chunks,
    )


def make_head(module: Rows, program: VocabularyProgram, start: int, *, early: bool) -> Any:
    """As :class:`autopar.runtime.vocabulary.VocabularyPasses` makes it."""
    if program.chunks > 1:
        return ChunkedHead(module, program, start, early=early)
    return ShardedHead(module, program, start)


def whole_model() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in ((TOKENS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    targets = torch.randint(CLASSES, (TOKENS,), generator=random)
    targets[2] = -100
    return x, weight, bias, targets


def padded(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


@pytest.mark.parametrize("early", [False, True], ids=["vocab-1", "vocab-2"])
@pytest.mark.parametrize("capped", [False, True], ids=["plain", "capped"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("parts", [1, 3, 6], ids=lambda n: f"{n} parts")
@pytest.mark.parametrize("chunks", [1, 3, 50], ids=lambda n: f"{n} chunks")
def test_parts_make_up_the_whole(chunks: int, parts: int, smoothing: float, capped: bool, early: bool) -> None:
    """With 6 parts of 4 rows, some hold padding alone."""
    x, weight, bias, targets = whole_model()
    rows = 4 if parts > 1 else CLASSES
    inputs = [t.clone().requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*inputs)
    logits = CAP * torch.tanh(logits / CAP) if capped else logits
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    scale = 0.25
    gradients = torch.autograd.grad(scale * expected, inputs)

    total = rows * parts
    heads = []
    for part in range(parts):
        mine = slice(part * rows, (part + 1) * rows)
        module = Rows(padded(weight, total)[mine].clone(), padded(bias, total)[mine].clone(), capped=capped)
        program = make_program(rows, smoothing=smoothing, chunks=chunks)
        heads.append((module, make_head(module, program, part * rows, early=early)))
    states = [head.logits(x, targets) for _, head in heads]
    gathered = torch.stack([head.statistics(state) for (_, head), state in zip(heads, states, strict=True)])
    input_gradient = torch.zeros_like(x)
    for (_, head), state in zip(heads, states, strict=True):
        if early:
            head.input_gradient_terms(state)
        torch.testing.assert_close(head.entropy(state, gathered), expected.detach(), rtol=1e-12, atol=1e-12)
        state.scale = scale * state.counts.to(x.dtype)
        if early:
            input_gradient += head.corrected(state)
            assert head.backward(state, with_input=False) is None
        else:
            term = head.backward(state, with_input=True)
            assert term is not None
            input_gradient += term
    found = [input_gradient]
    found += [torch.cat([m.get_parameter(name).grad for m, _ in heads])[:CLASSES] for name in ("weight", "bias")]
    for have, want in zip(found, gradients, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-12)
    padding = torch.cat([m.weight.grad for m, _ in heads])[CLASSES:]
    assert padding.abs().sum() == 0


def test_one_number_per_token_without_a_sum() -> None:
    x, weight, bias, targets = whole_model()
    head = ShardedHead(Rows(weight, bias, capped=False), make_program(CLASSES, reduction="none"), 0)
    state = head.logits(x, targets)
    entropy = head.entropy(state, head.statistics(state).unsqueeze(0))
    expected = F.cross_entropy(F.linear(x, weight, bias), targets, reduction="none")
    torch.testing.assert_close(entropy, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_target_that_is_no_class_is_refused(wrong: int) -> None:
    x, weight, bias, targets = whole_model()
    targets[0] = wrong
    module = Rows(padded(weight, CLASSES + 2), padded(bias, CLASSES + 2), capped=False)
    head = ShardedHead(module, make_program(CLASSES + 2), 0)
    with pytest.raises((IndexError, RuntimeError)):
        head.statistics(head.logits(x, targets))


def test_low_precision_logits_are_summed_in_float32() -> None:
    x, weight, bias, targets = (t.bfloat16() if t.is_floating_point() else t for t in whole_model())
    head = ShardedHead(Rows(weight, bias, capped=False), make_program(CLASSES), 0)
    state = head.logits(x, targets)
    statistics = head.statistics(state)
    assert statistics.dtype == torch.float32
    assert head.entropy(state, statistics.unsqueeze(0)).dtype == torch.bfloat16


def test_a_maximum_of_all_ranks_may_come_between() -> None:
    """As "naive" exchanges it: the statistics are then under that."""
    x, weight, bias, targets = whole_model()
    for chunks in (1, 3):
        module = Rows(weight.clone(), bias.clone(), capped=False)
        head = make_head(module, make_program(CLASSES, chunks=chunks), 0, early=False)
        state = head.logits(x, targets)
        state.top += 2.0
        statistics = head.statistics(state)
        logits = F.linear(x, weight, bias)
        torch.testing.assert_close(statistics[0], logits.amax(1) + 2.0)
        torch.testing.assert_close(statistics[1], (logits - statistics[0].unsqueeze(1)).exp().sum(1))


@pytest.mark.parametrize("early", [False, True], ids=["vocab-1", "vocab-2"])
def test_a_chunk_of_logits_is_the_largest_tensor(early: bool) -> None:
    tokens, classes, width, chunks = 256, 4096, 8, 8
    x, table = torch.randn(tokens, width), torch.randn(classes, width)
    module = Rows(table, torch.zeros(classes), capped=True)
    program = replace(make_program(classes, chunks=chunks), classes=classes)
    head = make_head(module, program, 0, early=early)
    with Largest() as largest:
        state = head.logits(x, torch.arange(tokens))
        if early:
            head.input_gradient_terms(state)
        head.entropy(state, head.statistics(state).unsqueeze(0))
        state.scale = state.counts.to(x.dtype)
        head.backward(state, with_input=not early)
    assert largest.bytes == 4 * tokens * classes // chunks
