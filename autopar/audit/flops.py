"""Products that a program's ops compute, in floating-point operations: torch's count of the kernels that ran.

Kernels of attention differ by device and dtype, and count what a causal mask hides, those of recurrent layers differ by
device; products of rows by expert aren't run where it isn't known how many rows there are; torch has no count of
bilinear ones. So these are counted by what they are: from shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from autopar.audit.record import Ran
from autopar.graph import AxisRef
from autopar.rules.base import Op


def flops_of(ran: Ran) -> int:
    """Of the forward."""
    count = _BY_SHAPE.get(ran.op.name)
    return count(ran.op) if count else ran.flops


def _attention(op: Op) -> int:
    """Queries with keys, and weights with values: 2 operations for each number of either, for each pair."""
    query, key, value = (meta.shape for meta in op.operands[:3])
    pairs = query[-2] * key[-2]
    for extent in query[:-2]:
        pairs *= extent
    count = 2 * pairs * (query[-1] + value[-1])
    return count // 2 if op.arg(5, "is_causal", False) else count


def _over_positions(op: Op) -> int:
    """Attention whose positions are split: of the rank with the last of them, causal, or with a pair of parts."""
    query, key, value = (meta.shape for meta in op.operands[:3])
    axis = op.args[3]
    assert isinstance(axis, AxisRef)
    keys = key[-2] * (axis.size if op.name == "ring_attention" else 1)
    rows = query[-2]
    seen = rows * keys
    if op.name != "ring_attention" or op.kwargs.get("causal"):
        # all keys before its first row, and half of those of its rows; with a pair, half of all
        seen = rows * keys // 2 if axis.paired else rows * (keys - rows) + rows * rows // 2
    count = 2 * seen * (query[-1] + value[-1])
    for extent in query[:-2]:
        count *= extent
    return count


def _grouped(op: Op) -> int:
    rows, width = op.operands[0].shape
    return 2 * rows * width * op.outputs[0].shape[1]


def _bilinear(op: Op) -> int:
    return 2 * op.operands[2].numel * (op.outputs[0].numel // op.outputs[0].shape[-1])


def _recurrent(op: Op) -> int:
    """Each matrix by all rows; before them are the inputs and a state or two."""
    states = len(op.outputs) - (len(op.outputs[0].shape) == 3)
    matrices = (meta.numel for meta in op.operands[1 + states :] if len(meta.shape) == 2)
    return 2 * (op.outputs[0].numel // op.outputs[0].shape[-1]) * sum(matrices)


_KINDS: Final = ("gru", "lstm", "rnn_tanh", "rnn_relu")

_BY_SHAPE: Final[Mapping[str, Callable[[Op], int]]] = {
    "aten.scaled_dot_product_attention.default": _attention,
    "attention_with_offset": _over_positions,
    "ring_attention": _over_positions,
    "grouped_linear": _grouped,
    "aten.bilinear.default": _bilinear,
    **{f"aten.{kind}.input": _recurrent for kind in _KINDS},
    **{f"aten.{kind}_cell.default": _recurrent for kind in _KINDS},
}


def is_by_shape(ran: Ran) -> bool:
    """Whether its products are counted by shapes, not by kernels."""
    return ran.op.name in _BY_SHAPE
