"""Pieces of values whose elements lie apart, which kernels load one at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.api import prepare
from autopar.graph import Meta, op_name
from autopar.pieces import is_apart
from autopar.rules import lookup
from autopar.rules.base import Op

WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x,
    "half of each row": lambda x: x.chunk(2, -1)[1],
    "some rows": lambda x: x.split([1, 3])[1],
    "a piece, turned": lambda x: x[..., 1:].transpose(0, 1),
    "all, turned": lambda x: x.transpose(0, 2),
    "a slice of everything": lambda x: x[:, :, 0:8],
    "one of each row": lambda x: x.select(-1, 3),
    "one row": lambda x: x[2],
    "a piece that a reshape copies": lambda x: x[..., :4].reshape(-1),
    "a piece that a reshape views": lambda x: x[..., :4].reshape(24, 2, 2),
    "a piece in another dtype": lambda x: x[..., :4].to(torch.float64),
}


class Sines(nn.Module):
    """``x [4, 6, 8]``, made by an op, and a sine of it seen in each way: the loss adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([view(x * self.scale).sin().sum() for view in WAYS.values()]).sum()


def test_what_lies_apart() -> None:
    """By the graph as by strides; the rule knows the sines that load one element at a time, and so do their backwards,
    which read the piece again."""
    model, batch = Sines(), torch.randn(4, 6, 8)
    found = prepare(model, batch, device="cpu", splits_sequences=False)[0]
    ops = [node for block in found.blocks for node in block.ops if op_name(node) == "aten.sin.default"]
    apart = {way: is_apart(view(batch)) for way, view in WAYS.items()}
    assert {way for way in apart if apart[way]} == {
        "half of each row",
        "a piece, turned",
        "one of each row",
        "a piece that a reshape views",
    }
    assert [Op.of(node).apart for node in ops] == [(0,) if each else () for each in apart.values()]
    assert [lookup(op_name(node)).loose(Op.of(node)) for node in ops] == [(each, each) for each in apart.values()]


@pytest.mark.parametrize(("apart", "loose"), [((), (0, 0)), ((0,), (1, 1)), ((1,), (1, 1)), ((0, 1), (1, 2))])
def test_products_of_pieces(apart: tuple[int, ...], loose: tuple[int, int]) -> None:
    """The gradient of each factor is made of the other one."""
    metas = (Meta((4, 8), torch.float32, True),) * 2
    op = Op("aten.mul.Tensor", metas, {}, metas, metas[:1], apart)
    assert lookup(op.name).loose(op) == loose


def test_nothing_lies_together() -> None:
    assert not is_apart(torch.empty(0, 4))
    assert not is_apart(torch.empty(4, 1).expand(4, 8))
