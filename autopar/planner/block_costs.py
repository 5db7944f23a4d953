"""What one call of a block costs a rank, read off its solved, local graph: nothing is derived twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.cluster import Device, Link
from autopar.cost_models import collective
from autopar.graph import AxisRef, Block, Choice, RuntimeOp, info, op_name, operands
from autopar.planner.prices import pass_seconds
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.spmd import R, Type, transition


@dataclass(frozen=True)
class BlockCost:
    """Per call and microbatch: seconds of the passes, bytes and elements of its parameters. ``weight_seconds`` is the
    part of the backward that can be put off, which keeps ``later_bytes``; ``op_seconds`` is each op's forward."""

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    later_bytes: int
    parameter_bytes: int
    parameters: int
    op_seconds: Mapping[fx.Node, float] = field(default_factory=dict, compare=False)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True)
class Machine:
    """What ``block_cost`` needs to know of where the block runs."""

    device: Device
    links: Mapping[str, Link]
    sizes: Mapping[str, int]


def block_cost(block: Block, machine: Machine) -> BlockCost:
    forward: dict[fx.Node, float] = {}
    backward = weights = 0.0
    later: dict[fx.Node, int] = {}
    for node in block.ops:
        forward[node], back = _node_seconds(node, machine)
        backward += back
        if (factor := weight_product(node)) is not None:
            weights += back / max(1, sum(info(o).meta.needs_grad for o in operands(node)))
            later[factor] = info(factor).meta.bytes
            later[node] = info(node).meta.bytes  # the gradient of the result
    metas = [info(p).meta for p in block.placeholders("parameter")]
    held, elements = sum(m.bytes for m in metas), sum(m.numel for m in metas)
    return BlockCost(math.fsum(forward.values()), backward, weights, sum(later.values()), held, elements, forward)


def weight_product(node: fx.Node) -> fx.Node | None:
    """The other factor of a product with a parameter, whose weight gradient can be put off; else None."""
    if not lookup(op_name(node)).flops(Op.of(node)):
        return None
    factors = [operand for operand in operands(node) if not _is_weight(operand)]
    return factors[0] if len(factors) == 1 and len(operands(node)) == 2 else None


def _is_weight(node: fx.Node) -> bool:
    while op_name(node) == "convert":
        node = operands(node)[0]
    return info(node).role == "parameter" and len(info(node).meta.shape) == 2


def _node_seconds(node: fx.Node, machine: Machine) -> tuple[float, float]:
    if isinstance(node.target, RuntimeOp) and "src" in node.kwargs:
        return _transition_seconds(node, machine)
    op = Op.of(node)
    rule = lookup(op.name)
    choice = _whole(node)
    forward, backward = pass_seconds(node, op, rule, choice, 1, machine.device)
    inside = sum(
        collective.seconds(kind, bytes_, machine.sizes[axis], machine.links[axis])
        for axis, taken in info(node).choices.items()
        if axis in machine.sizes and taken.form
        for kind, bytes_ in rule.communication(op, taken, machine.sizes[axis])
    )
    return forward + inside, backward


def _whole(node: fx.Node) -> Choice:
    """The op as its local shapes say it: nothing left to split."""
    return Choice((R,) * len(operands(node)), R)


def _transition_seconds(node: fx.Node, machine: Machine) -> tuple[float, float]:
    axis_ref = node.args[1]
    src, dst = node.kwargs["src"], node.kwargs["dst"]
    assert isinstance(axis_ref, AxisRef)
    assert isinstance(src, Type)
    assert isinstance(dst, Type)
    step = transition(src, dst)
    assert step is not None
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    if info(operand).role == "parameter":
        return 0.0, 0.0  # hoisted: once per step, in the reduction of gradients
    size, link = machine.sizes[axis_ref.name], machine.links[axis_ref.name]
    here, there = info(operand), info(node)
    full = max(here.meta.bytes, there.meta.bytes)
    back = step.backward if there.meta.needs_grad else None
    return _wire(step.forward, full, size, link), _wire(back, full, size, link)


def _wire(kind: str | None, bytes_: int, size: int, link: Link) -> float:
    return collective.seconds(kind, bytes_, size, link) if kind else 0.0
