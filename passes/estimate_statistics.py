"""estimate_statistics: a sum over the batch, of which a microbatch knows its own part, is that part times their number.

Guarantees: after it no change of type on the axis of microbatches is left but that of totals, which are known before
the step (:mod:`autopar.passes.hoist`). ``P -> R`` (a sum that is used) becomes a product with the number of
microbatches, ``R -> P`` (a term of the loss) a quotient by it. So a loss that is made of means is the mean of those of
microbatches, as accumulating gradients on one device computes it. Example: ``all_reduce(mean, mb, src=P, dst=R)`` ->
``mul(mean, 4)``. A running average (:mod:`autopar.passes.batch_statistics`) is then one of statistics of microbatches.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import fx

from autopar.errors import GraphError
from autopar.graph import AVERAGED, AxisRef, Block, Model, RuntimeOp, where
from autopar.spmd import P, R

aten = torch.ops.aten
_MICROBATCHES = AxisRef("mb")
_SCALED: Final[dict[Any, Any]] = {(P, R): aten.mul.Tensor, (R, P): aten.div.Tensor}


def estimate_statistics(model: Model, microbatches: int) -> Model:
    for block in model.blocks:
        _estimate(block, microbatches)
    return model


def _estimate(block: Block, microbatches: int) -> None:
    for node in block.ops:
        if isinstance(node.target, RuntimeOp) and _MICROBATCHES in node.args and "src" in node.kwargs:
            _scale(node, microbatches)
        elif node.target == AVERAGED and "count" in node.kwargs:
            count: Any = node.kwargs["count"]
            node.kwargs = {"count": count // microbatches}


def _scale(node: fx.Node, microbatches: int) -> None:
    """Metadata stay: the types on the axis are those of the change."""
    change = (node.kwargs["src"], node.kwargs["dst"])
    if change not in _SCALED:
        raise GraphError(f"{where(node)}: {change[0]} can't become {change[1]} between microbatches")
    node.target = _SCALED[change]
    node.args, node.kwargs = (node.args[0], microbatches), {}
