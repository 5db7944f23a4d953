"""compress_activations: what is replaced, where that pays, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.batch import flatten
from autopar.graph import Model, op_name, verify
from autopar.passes.compress_activations import Compressed, compress_activations
from autopar.planner.compression import KeptBytes
from tests.codegen.programs import assert_equal, emit_alone, folded, load, run
from tests.models import Case

ROWS, WIDTH = 8, 24


class Net(nn.Module):
    """A linear layer, ``act``, whatever comes after, a sum of squares."""

    def __init__(self, act: Callable[[Tensor], Tensor], then: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.act, self.then = act, then
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.act(self.up(x)), self.down).square().sum()


def case(act: Callable[[Tensor], Tensor], then: Callable[[Tensor, nn.Linear], Tensor]) -> Case:
    torch.manual_seed(0)
    return Case(Net(act, then).double().train(), (torch.randn(ROWS, WIDTH, dtype=torch.float64) * 3,))


def multiplied(y: Tensor, down: nn.Linear) -> Tensor:
    return down(y)


def added(y: Tensor, down: nn.Linear) -> Tensor:
    return y + 1


def compressed(model: Model) -> list[Compressed]:
    found = compress_activations(model, KeptBytes(model, "cpu"))
    verify(model, "compress_activations")
    return found


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_kept_as_bits": F.relu,
    "relu6_kept_as_bits": F.relu6,
    "leaky_relu_kept_as_bits": partial(F.leaky_relu, negative_slope=0.2),
    "hardtanh_kept_as_bits": partial(F.hardtanh, min_val=-2.0),
    "threshold_kept_as_bits": partial(F.threshold, threshold=0.5, value=-1.0),
}


@pytest.mark.parametrize("name", ACTS)
def test_bits_where_nobody_else_keeps_it(name: str) -> None:
    one = case(ACTS[name], added)
    exact = run(one, emit_alone(folded(one)))
    model = folded(one)
    (found,) = compressed(model)
    assert found.op == name
    assert found.saved_bytes == ROWS * WIDTH * 8 - ROWS * WIDTH // 8
    emitted = emit_alone(model)
    assert f"= {name}(" in emitted[0].text
    assert_equal(run(one, emitted), exact, 0.0)


def test_not_where_the_next_product_keeps_it() -> None:
    """Its weight gradient needs ReLU's whole result; an op that keeps its operand adds that to it."""
    relu, leaky = folded(case(F.relu, multiplied)), folded(case(F.leaky_relu, multiplied))
    assert compressed(relu) == []
    assert [found.op for found in compressed(leaky)] == ["leaky_relu_kept_as_bits"]


def test_two_that_keep_the_same_are_both_replaced() -> None:
    def both(x: Tensor) -> Tensor:
        return F.leaky_relu(x) + F.hardtanh(x)

    found = compressed(folded(case(both, added)))
    assert [one.op for one in found] == ["leaky_relu_kept_as_bits", "hardtanh_kept_as_bits"]


def test_one_of_two_that_the_other_needs_stays() -> None:
    def both(x: Tensor) -> Tensor:
        y = F.relu(x)
        return y * y.sigmoid()  # keeps y itself

    assert compressed(folded(case(both, added))) == []


def test_dropout_is_replayed_with_its_generator() -> None:
    one = case(partial(F.dropout, p=0.3), added)
    model = folded(one)
    exact = run(one, emit_alone(folded(one)))
    (found,) = compressed(model)
    assert (found.op, found.saved_bytes) == ("dropout_replayed", ROWS * WIDTH * 8)
    emitted = emit_alone(model)
    assert "with rng(self.axes, 0, ()):\n            h = dropout_replayed(h, 0.3, True, self.axes)" in emitted[0].text
    assert_equal(run(one, emitted), exact, 0.0)


def test_dropout_that_does_nothing_stays() -> None:
    assert compressed(folded(case(partial(F.dropout, p=0.0), added))) == []


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.conv(x), 2).square().sum()


def test_max_pooling_keeps_places() -> None:
    torch.manual_seed(0)
    one = Case(Pooled().double(), (torch.randn(2, 3, 10, 12, dtype=torch.float64),))
    model = folded(one)
    exact = run(one, emit_alone(folded(one)))
    assert [found.op for found in compressed(model)] == ["max_pool2d_kept_as_places"]
    assert_equal(run(one, emit_alone(model)), exact, 0.0)


@pytest.mark.parametrize("name", [*ACTS, "dropout_replayed"])
def test_what_it_says_is_what_autograd_keeps(name: str) -> None:
    """Measured on the emitted program: bytes of distinct memory, weights and batch aside."""
    act = ACTS.get(name, partial(F.dropout, p=0.3))
    one = case(act, added)
    model = folded(one)
    before = KeptBytes(model, "cpu")(0)
    (found,) = compressed(model)
    assert before - KeptBytes(model, "cpu")(0) == found.saved_bytes
    (emitted,) = emit_alone(model)
    batch, _ = flatten(one.batch)
    stage = load(emitted, one.model)
    given = [batch[i.path] for i in emitted.program.inputs]
    outside = {id(t.untyped_storage()): t.untyped_storage() for t in (*stage.parameters(), *given)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        if id(x.untyped_storage()) not in outside:
            kept[id(x.untyped_storage())] = x.untyped_storage()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = stage(*given)
    assert sum(storage.nbytes() for storage in kept.values()) == KeptBytes(model, "cpu")(0)
    assert loss.isfinite()


def test_nothing_without_a_gradient() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (F.relu(x) * self.weight).sum()

    model = folded(Case(Frozen(), (torch.randn(ROWS, WIDTH, dtype=torch.float64),)))
    assert compressed(model) == []
    assert "aten.relu.default" in [op_name(node) for block in model.blocks for node in block.ops]
