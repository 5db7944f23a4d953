"""paired_rows: what is written to the places of a mask is told to be of the places' own rows, where it is.

Guarantees: equal values and gradients. ``x.masked_scatter(mask, source)`` fills places in the order of all elements, so
that in general no part of it can be computed without the others. Where each row of ``x`` has as many places, and
``source`` as many values for each row, as features of one image for each sample, it becomes ``masked_scatter_rows``,
which may be split as the batch is; it sees to it that this is so of every batch
(:func:`autopar.runtime.masked_scatter_rows`). The sample says where it is; of one on the meta device, without values,
it is taken to be so.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from autopar.capture import Flat
from autopar.graph import RuntimeOp, info, op_name, operands
from autopar.passes.sample_values import values_of
from autopar.rules.indexing import SCATTER_ROWS

_SCATTER = "aten.masked_scatter.default"


def paired_rows(flat: Flat, sample: Mapping[str, Tensor]) -> Flat:
    """In place. ``sample``: the batch's tensors by path. Last before layers are folded: other passes on the whole graph
    ask torch's own ops what they make."""
    masks = {node: _narrow(operands(node)[1]) for node in flat.nodes if op_name(node) == _SCATTER}
    values = values_of(flat, sample, set(masks.values()))
    for node, mask in masks.items():
        if _is_by_row(node) and (mask not in values or _are_as_many(node, values[mask])):
            node.target = RuntimeOp(SCATTER_ROWS)
    return flat


def _narrow(mask: fx.Node) -> fx.Node:
    """Before it was made as wide as what it is for."""
    while op_name(mask) == "aten.expand.default":
        mask = operands(mask)[0]
    return mask


def _is_by_row(node: fx.Node) -> bool:
    x, mask, source = (info(operand).meta for operand in operands(node))
    return bool(x.shape and source.shape) and mask.shape[:1] == x.shape[:1] and len(mask.shape) == len(x.shape)


def _are_as_many(node: fx.Node, mask: Tensor) -> bool:
    """Places in each row, and values for these."""
    x, _, source = (info(operand).meta for operand in operands(node))
    if mask.dim() < len(x.shape) or mask.shape[0] != x.shape[0]:
        return False
    places = mask.flatten(1).sum(1) * (x.numel // mask.numel())
    return bool((places * x.shape[0] == source.numel).all())
