"""compress_activations: what a backward needs of an op, kept in fewer bytes that say the same.

Guarantees: equal values and gradients, bit by bit. An op like ReLU becomes one that keeps a bit per element, dropout
one that draws its mask again, max-pooling one that keeps places in 8 bits (Jain et al., "Gist", ISCA 2018, section 4.1;
:mod:`autopar.runtime.gist`). Runs on local graphs. Example: ``aten.relu(x)`` becomes ``relu_kept_as_bits(x)``.

Only where that pays: what an op keeps is free where another keeps it too. ReLU's result is also the operand of the
product behind it, whose weight gradient needs it whole; ReLU then adds nothing as it is, and bits would add an eighth
of a byte for each element. So the model is asked what all of its calls keep, with each candidate replaced and not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from autopar.graph import Block, Model, RuntimeOp, arguments, info, op_name

KeptBytes = Callable[[int], int]
"""Bytes that all calls of the model keep, after the block of this number was rewritten
(:class:`autopar.planner.compression.KeptBytes`)."""

_ALIKE: Final = {
    "aten.relu.default": "relu_kept_as_bits",
    "aten.relu6.default": "relu6_kept_as_bits",
    "aten.leaky_relu.default": "leaky_relu_kept_as_bits",
    "aten.hardtanh.default": "hardtanh_kept_as_bits",
    "aten.threshold.default": "threshold_kept_as_bits",
    "aten.dropout.default": "dropout_replayed",
    "aten.max_pool2d.default": "max_pool2d_kept_as_places",
}


@dataclass(frozen=True)
class Compressed:
    """One op that was replaced: all calls together keep ``saved_bytes`` less of a microbatch."""

    block: str
    node: str
    op: str
    saved_bytes: int


def compress_activations(model: Model, kept_bytes: KeptBytes) -> list[Compressed]:
    """In place, after all axes are solved. Returns what was replaced; what doesn't pay stays as it is."""
    return [found for number, block in enumerate(model.blocks) for found in _compress(block, number, kept_bytes)]


def _compress(block: Block, number: int, kept_bytes: KeptBytes) -> list[Compressed]:
    """Replace all, then take back, in order, what keeps no more as it was: two ops may keep the same memory."""
    candidates = [node for node in block.ops if _is_candidate(node)]
    exact = {node: (node.target, node.args, node.kwargs) for node in candidates}
    for node in candidates:
        _replace(node)
    now, found = kept_bytes(number) if candidates else 0, []
    for node in candidates:
        replaced = node.target, node.args, node.kwargs
        node.target, node.args, node.kwargs = exact[node]
        before = kept_bytes(number)
        if before <= now:
            now = before
        else:
            node.target, node.args, node.kwargs = replaced
            found.append(Compressed(block.name, node.name, str(node.target), before - now))
    return found


def _is_candidate(node: fx.Node) -> bool:
    if op_name(node) not in _ALIKE or not info(node).meta.needs_grad:
        return False
    return op_name(node) != "aten.dropout.default" or info(node).random


def _replace(node: fx.Node) -> None:
    """All arguments by position: the two functions have the same ones."""
    given: list[Any] = list(arguments(node).values())
    node.target, node.args, node.kwargs = RuntimeOp(_ALIKE[op_name(node)]), tuple(given), {}
