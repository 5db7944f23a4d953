"""What one op takes on one device, forward and backward, in seconds of a microbatch."""

from __future__ import annotations

import torch
from torch import fx

from autopar.cluster import Device
from autopar.cost_models import compute
from autopar.graph import Choice, Meta, info, is_view
from autopar.rules.base import Op, Rule
from autopar.spmd import Type

_SUM_COPIES = 5
"""Adding a piece of a result to those before reads it, and reads and writes their sum, which is twice as wide."""


def pass_seconds(
    node: fx.Node, op: Op, rule: Rule, choice: Choice, size: int, device: Device, unequal: float = 1.0
) -> tuple[float, float]:
    """Roofline seconds of forward and backward of the part one rank computes, ``unequal`` times the average one.

    A product has one more in the backward for each factor with a gradient.
    """
    if is_view(node):
        return 0.0, 0.0
    split = choice.result.is_shard or any(kind.is_shard for kind in choice.operands)
    flops = unequal * rule.flops(op) / (size if split else 1)
    moved = sum(_local_bytes(m, k, size) for m, k in zip(op.operands, choice.operands, strict=True))
    moved += sum(_local_bytes(m, choice.result, size) for m in op.outputs)
    moved += rule.inner_bytes(op) // (size if split else 1)
    factor = op.operands[0] if flops else op.result  # a loss of bf16 products is float32
    pieces = rule.pieces(op, choice, size)
    forward = pieces * compute.seconds(flops / pieces, moved / pieces, dtype_name(factor.dtype), device)
    if pieces > 1:
        added = _SUM_COPIES * sum(_local_bytes(m, choice.result, size) for m in op.outputs)
        forward += (pieces - 1) * compute.seconds(0, added, dtype_name(factor.dtype), device)
    if not op.result.needs_grad:
        return forward, 0.0
    factors = max(1, sum(m.needs_grad for m in op.operands)) if flops else 1
    return forward, (factors + rule.repeats) * forward


def expert_imbalance(node: fx.Node, *further: Choice) -> float:
    """How many times the mean the rank with the most rows of experts has to do, where ``node`` is about such rows on an
    axis that is solved, or by a ``further`` choice."""
    kinds = [kind for c in (*info(node).choices.values(), *further) for kind in (*c.operands, c.result)]
    return info(node).imbalance if any(kind.is_ragged for kind in kinds) else 1.0


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _local_bytes(meta: Meta, kind: Type, size: int) -> int:
    return meta.bytes // size if kind.is_shard else meta.bytes
