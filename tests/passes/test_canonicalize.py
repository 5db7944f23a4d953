"""canonicalize: rows that an index counts stay rows; a bias along positions is added apart. Values stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.api import prepare
from autopar.graph import Model, info, op_name

ROWS, LENGTH = 2, 4


class Table(nn.Module):
    """A loss of an index into a table that is no parameter."""

    def __init__(self, indexed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.indexed = indexed

    def forward(self, x: Tensor) -> Tensor:
        return (self.indexed(x) * self.weight).square().sum()


def masks(x: Tensor) -> Tensor:
    """As transformers builds masks: rows, and keys or queries, along dims of their own."""
    rows = torch.arange(ROWS)[:, None, None, None]
    keys, queries = torch.arange(LENGTH)[None, None, None, :], torch.arange(1, LENGTH)[:, None]
    return x[rows, keys] * x[rows, queries]


def pairs(x: Tensor) -> Tensor:
    return x[torch.arange(ROWS)[:, None], torch.tensor([[1, 0], [2, 3]])]


def others(x: Tensor) -> Tensor:
    return x[torch.arange(ROWS) + 0, torch.tensor([1, 3])] + x[torch.arange(1, ROWS + 1) - 1, torch.tensor([1, 3])]


def lasts(x: Tensor) -> Tensor:
    """One position of each row, found by its value or counted from the end, also of what each position has several."""
    several = x[..., None] * torch.tensor([1.0, 2.0], dtype=x.dtype)
    largest = (x * torch.arange(LENGTH)).argmax(-1).int()
    return x[torch.arange(ROWS), torch.tensor([-1, 2])][:, None] * several[torch.arange(0, ROWS), largest]


def single(x: Tensor) -> Tensor:
    """One row, whose number is repeated for each of the others."""
    return x[:1][torch.arange(1), torch.tensor([1, 3])] * x[None, 0][torch.arange(1)[:, None], torch.tensor([[3], [1]])]


def indices(model: Model) -> list[Any]:
    nodes = [n for block in model.blocks for n in block.ops if op_name(n) == "aten.index.Tensor"]
    return [[i if i is None else info(i).meta.shape for i in node.args[1]] for node in nodes]


@pytest.mark.parametrize(
    ("indexed", "found"),
    [
        (masks, [[None, (1, 1, LENGTH)], [None, (1, LENGTH - 1, 1)]]),
        (pairs, []),
        (others, [[(ROWS,), (2,)]]),
        (lasts, []),
        (single, [[(1,), (2,)], [(1, 1), (2, 1)]]),
    ],
)
def test_rows_that_are_counted(indexed: Callable[[Tensor], Tensor], found: list[Any]) -> None:
    x = torch.randn(ROWS, LENGTH, dtype=torch.float64)
    table = Table(indexed)
    model, constants, _ = prepare(table, (x,))
    assert indices(model) == found
    assert torch.equal(value(model, dict(table.named_parameters()) | constants, x), table(x))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=2, groups=4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., :LENGTH].square().sum()


def test_a_bias_along_positions() -> None:
    convolution, x = Convolution(), torch.randn(ROWS, 4, LENGTH, dtype=torch.float64)
    model = prepare(convolution, (x,))[0]
    names = [op_name(n) for block in model.blocks for n in block.ops]
    assert names[:3] == ["aten.conv1d.default", "aten.unsqueeze.default", "aten.add.Tensor"]
    assert torch.allclose(value(model, dict(convolution.named_parameters()), x), convolution(x), rtol=0, atol=1e-12)


def value(model: Model, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the blocks compute."""
    made: list[tuple[Any, ...]] = []
    for call in model.calls:
        block = model.block_of(call)
        given = [parameters[name] for name in call.parameters]
        given += [x if v.call < 0 else made[v.call][v.output] for v in call.operands]
        values: dict[fx.Node, Any] = dict(zip(block.placeholders(), given, strict=True))
        for node in block.ops:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        made.append(tuple(values[node] for node in block.outputs))
    found: Tensor = made[model.loss.call][model.loss.output]
    return found
