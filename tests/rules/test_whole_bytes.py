"""What backwards make of gradients before they are summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.graph import Meta
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.pointwise import INSIDE
from autopar.storages import StorageTracker


def op(name: str, *shapes: tuple[int, ...]) -> Op:
    given = tuple(Meta(shape, torch.float32, needs_grad=True) for shape in shapes)
    result = Meta(torch.broadcast_shapes(*shapes), torch.float32, needs_grad=True)
    return Op(name, given, {}, given, (result,))


def test_a_broadcast_factor_has_a_gradient_as_large_as_the_product_at_first() -> None:
    name = "aten.mul.Tensor"
    assert lookup(name).whole_bytes(op(name, (8, 4), (8, 1))) == 4 * 8 * 4
    assert lookup(name).whole_bytes(op(name, (8, 4), (8, 4))) == 0
    assert lookup("aten.add.Tensor").whole_bytes(op("aten.add.Tensor", (8, 4), (8, 1))) == 0


WIDE, ROWS, COLUMNS = (64, 128, 32), (64, 128, 1), (32,)


def leaf(shape: tuple[int, ...], *, trained: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) + 0.1).clamp(max=0.9).to(dtype).requires_grad_(trained)


def pairs() -> list[tuple[Tensor, Tensor]]:
    return [
        (leaf(WIDE), leaf(WIDE)),
        (leaf(WIDE), leaf(WIDE, trained=False)),
        (leaf(WIDE, trained=False), leaf(WIDE)),
        (leaf(WIDE), leaf(ROWS)),
        (leaf(WIDE), leaf(COLUMNS)),
        (leaf(COLUMNS), leaf(WIDE)),
        (leaf(WIDE, trained=False), leaf(COLUMNS)),
        (leaf(WIDE), leaf(ROWS, trained=False)),
        (leaf(WIDE, dtype=torch.bfloat16), leaf(WIDE)),
        (leaf(WIDE), leaf(ROWS, dtype=torch.bfloat16)),
    ]


def held(made: Tensor, trained: list[Tensor]) -> int:
    """Bytes of the most that live beside all gradients while a backward runs, on a device that does as it is told."""
    slope = torch.ones_like(made)
    with StorageTracker() as tracker:
        gradients = torch.autograd.grad(made, trained, slope)
        own = sum(gradient.nbytes for gradient in gradients)
    return tracker.peak_bytes - own


def given_to(name: str, tensors: tuple[Any, ...], made: Tensor) -> Op:
    metas = tuple(Meta(tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in tensors)
    operands = tuple(meta for meta in metas if isinstance(meta, Meta))
    return Op(name, metas, {}, operands, (Meta(tuple(made.shape), made.dtype, True),))


@pytest.mark.parametrize("case", range(len(pairs())))
@pytest.mark.parametrize("name", ["mul", "div"])
def test_as_much_as_autograd_holds_of_two(name: str, case: int) -> None:
    """Within a tenth of the result: sums of what was broadcast live with what they are of."""
    one, other = pairs()[case]
    made = getattr(torch, name)(one, other)
    found = given_to(f"aten.{name}.Tensor", (one, other), made)
    expected = held(made, [x for x in (one, other) if x.requires_grad])
    assert lookup(found.name).whole_bytes(found) == pytest.approx(expected, abs=0.1 * made.nbytes)


@pytest.mark.parametrize("case", range(len(pairs())))
def test_as_much_as_a_choice_holds(case: int) -> None:
    one, other = pairs()[case]
    mask = torch.rand(WIDE) > 0.5
    made = torch.where(mask, one, other)
    found = given_to("aten.where.self", (mask, one, other), made)
    expected = held(made, [x for x in (one, other) if x.requires_grad])
    assert lookup(found.name).whole_bytes(found) == pytest.approx(expected, abs=0.1 * made.nbytes)


@pytest.mark.parametrize("case", [n for n, (one, other) in enumerate(pairs()) if one.dtype == other.dtype])
@pytest.mark.parametrize(("name", "kept"), [("sub", 0), ("rsub", 1)])
def test_as_much_as_a_difference_holds(name: str, kept: int, case: int) -> None:
    """Where both have gradients, and of what was broadcast, gradients count as the result's own, handed on: all that
    is made is held beside. One that is alone counts by itself."""
    both = pairs()[case]
    made = getattr(torch, name)(*both)
    found = given_to(f"aten.{name}.Tensor", both, made)
    one, other = both[kept], both[1 - kept]
    slope = torch.ones_like(made)
    with StorageTracker() as tracker:
        gradients = torch.autograd.grad(made, [x for x in both if x.requires_grad], slope)
        del gradients
    alone = other.requires_grad and not one.requires_grad and other.shape == made.shape
    expected = tracker.peak_bytes - (other.nbytes if alone else 0)
    assert lookup(found.name).whole_bytes(found) == pytest.approx(expected, abs=0.1 * made.nbytes)


ALONE: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    *((f"aten.{name}.default", getattr(torch, name)) for name in INSIDE),
    *((f"aten.{name}.default", getattr(torch, name)) for name in ("exp", "log", "sigmoid", "tanh", "relu")),
    *((f"aten.{name}.default", getattr(torch.nn.functional, name)) for name in ("gelu", "silu", "softplus", "elu")),
    ("aten.pow.Tensor_Scalar", lambda x: x.pow(3.0)),
    ("aten.mul.Tensor", lambda x: x * 3.0),
    ("aten.div.Tensor", lambda x: x / 3.0),
]


@pytest.mark.parametrize(("name", "function"), ALONE, ids=[name for name, _ in ALONE])
def test_as_much_as_autograd_holds_of_one(name: str, function: Callable[[Tensor], Tensor]) -> None:
    x = leaf(WIDE)
    made = function(x)
    found = given_to(name, (x,), made)
    assert lookup(name).whole_bytes(found) == held(made, [x])
