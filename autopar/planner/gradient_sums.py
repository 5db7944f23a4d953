"""Sums of gradients within a pass: what several ops use gets one from each, which autograd adds up as they are made.

Gradients of parameters are not among them: those of several microbatches are added up, too
(:mod:`autopar.planner.gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator

from torch import fx

from autopar.cluster import Device
from autopar.cost_models import compute
from autopar.graph import Block, info, is_getitem, operands
from autopar.planner.op_costs import fullest_rows
from autopar.planner.transitions import is_parameter


def block_sums(block: Block, device: Device, reached: Container[fx.Node], results: Container[fx.Node]) -> float:
    """Seconds of those in the backward of a call of ``block``, which is local on all axes and whose nodes gradients
    ``reached``; one of the ``results`` to which any other call gives one counts as used once beside
    (:func:`autopar.planner.between.between` knows how many do)."""
    values = filter(_has_gradient, (*block.inputs, *block.ops))
    uses = ((node, sum(node in results if u.op == "output" else u in reached for u in _uses(node))) for node in values)
    found = ((info(node), count - 1) for node, count in uses)
    more = ((data, further) for data, further in found if further > 0)
    return math.fsum(
        further * compute.adding_seconds(fullest_rows(data, data.meta).bytes, device) for data, further in more
    )


def added_operands(node: fx.Node) -> tuple[int, ...]:
    """Positions of the operands whose gradients ``node`` adds to others': the first op that uses a value makes its
    first gradient."""
    if not _takes_part(node):
        return ()
    given = operands(node)
    shared = (value for value in given if len(value.users) > 1)
    firsts = {value: next(_uses(value)) for value in shared if _has_gradient(value)}
    return tuple(given.index(value) for value, first in firsts.items() if first is not node)


def _uses(value: fx.Node) -> Iterator[fx.Node]:
    """The ops that give ``value`` a gradient, each once, and the block's result."""
    return (user for user in value.users if user.op == "output" or _takes_part(user))


def _takes_part(node: fx.Node) -> bool:
    """Whether a gradient goes through it."""
    return not is_getitem(node) and any(meta.needs_grad for meta in info(node).outputs)


def _has_gradient(node: fx.Node) -> bool:
    """Whether it is one tensor with a gradient, and no parameter."""
    data = info(node)
    return not data.is_object and len(data.outputs) == 1 and data.meta.needs_grad and not is_parameter(node)
