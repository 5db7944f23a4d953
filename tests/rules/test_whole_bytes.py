"""What backwards make of gradients before they are summed."""

from __future__ import annotations

import torch

from autopar.graph import Meta
from autopar.rules import lookup
from autopar.rules.base import Op


def op(name: str, *shapes: tuple[int, ...]) -> Op:
    given = tuple(Meta(shape, torch.float32, needs_grad=True) for shape in shapes)
    result = Meta(torch.broadcast_shapes(*shapes), torch.float32, needs_grad=True)
    return Op(name, given, {}, given, (result,))


def test_a_broadcast_factor_has_a_gradient_as_large_as_the_product_at_first() -> None:
    name = "aten.mul.Tensor"
    assert lookup(name).whole_bytes(op(name, (8, 4), (8, 1))) == 4 * 8 * 4
    assert lookup(name).whole_bytes(op(name, (8, 4), (8, 4))) == 0
    assert lookup("aten.add.Tensor").whole_bytes(op("aten.add.Tensor", (8, 4), (8, 1))) == 0
