"""check_indices: refuse a sample that reads rows which a table doesn't have, as positions past the last learned one.

Guarantees: no index that follows from the sample's values and from numbers in the model's code lies outside of what it
indexes. Capture runs no op, so that it takes 2048 positions of a model that has learned 1024. What depends on
parameters (the experts that a router chooses) isn't known before it runs, nor are values of the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, fx

from autopar.capture import Flat
from autopar.errors import BatchError
from autopar.graph import arguments, info, op_name, operands, where
from autopar.passes.sample_values import values_of


def _along(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    given = arguments(node)
    yield given["dim"], given["index"]


def _by_several(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Each index is of a dim; a mask is of as many as it has, and lies outside of none."""
    indices = arguments(node)["indices"]
    if not any(index is not None and info(index).meta.dtype in (torch.bool, torch.uint8) for index in indices):
        yield from ((dim, index) for dim, index in enumerate(indices) if index is not None)


_INDICES: Final[dict[str, Callable[[fx.Node], Iterator[tuple[int, fx.Node]]]]] = {
    "aten.embedding.default": lambda node: iter([(0, arguments(node)["indices"])]),
    "aten.gather.default": _along,
    "aten.index.Tensor": _by_several,
    "aten.index_select.default": _along,
}
"""Of an op that reads rows of its first operand: a dim of that, and the indices along it."""
_FROM_THE_END: Final = ("aten.index.Tensor",)
"""Ops of which -1 is the last row."""


def check_indices(flat: Flat, sample: Mapping[str, Tensor]) -> Flat:
    """``sample``: the batch's tensors by path. Right after writes in place are gone.

    Raises BatchError naming the line, the table and the longest sequence, or the indices, that would do.
    """
    indices = [(node, *each) for node in flat.nodes for each in _INDICES.get(op_name(node), _none)(node)]
    values = values_of(flat, sample, {index for _, _, index in indices})
    for node, dim, index in indices:
        found = values.get(index)
        if found is None or not found.numel():
            continue
        rows = (info(operands(node)[0]).meta.shape or (1,))[dim]
        least, most = int(found.min()), int(found.max())
        if most >= rows or least < (-rows if op_name(node) in _FROM_THE_END else 0):
            raise BatchError(_refusal(flat, node, rows, least, most))
    return flat


def _none(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    return iter(())


def _refusal(flat: Flat, node: fx.Node, rows: int, least: int, most: int) -> str:
    table = info(operands(node)[0])
    name = f"{table.name!r}" if table.name else f"a tensor of shape {list(table.meta.shape)}"
    problem = f"{where(node)}: {name} has {rows} rows, and the sample reads row {most if most >= rows else least}"
    length = next((tensor.meta.shape[tensor.seq_dim] for tensor in flat.inputs if tensor.seq_dim is not None), 0)
    fits = length - (most - rows + 1)
    if least >= 0 and most - least + 1 == length and fits > 0:  # it counts positions: one less is one row less
        return (
            f"{problem}; its sequences of {length} positions are too long for the model: use at most {fits} "
            f"(on the command line, --sequence {fits}), or a model with more positions"
        )
    return f"{problem}; use a sample whose indices are from 0 to {rows - 1}, or a model with more rows"
