"""What one call of a block costs a rank, read off its solved, local graph: nothing is derived twice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.cluster import Cluster, Device, Link
from autopar.cost_models import collective
from autopar.graph import AxisRef, Block, Choice, Meta, RuntimeOp, info, op_name, operands
from autopar.mesh import AXES, Mesh
from autopar.passes.expert_roads import exchange_axes, exchange_seconds, hops_of
from autopar.passes.overlap_dispatch import meanwhile
from autopar.planner.op_costs import expert_imbalance, pass_seconds
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.experts import EXCHANGE
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
class DataLine:
    """The ranks whose tokens make up a parameter's gradient, and the parts of them that ZeRO makes: neighbours that
    share one copy, and those that hold the same part of other copies."""

    size: int
    shards: int
    whole: Link
    shard: Link
    replicate: Link


@dataclass(frozen=True)
class Machine:
    """What a cost needs to know of where it arises; ``lines`` by :meth:`autopar.mesh.Mesh.data_axes`."""

    device: Device
    links: Mapping[str, Link]
    mesh: Mesh
    lines: Mapping[tuple[str, ...], DataLine] = field(default_factory=dict)
    cluster: Cluster | None = None

    @classmethod
    def of(cls, cluster: Cluster, mesh: Mesh, zero_ranks: int = 0) -> Machine:
        links = {axis: cluster.link(mesh.size(axis), mesh.stride(axis), mesh.world) for axis in AXES}
        lines = {axes: _line(cluster, mesh, axes, zero_ranks) for axes in mesh.data_lines()}
        return cls(cluster.device, links, mesh, lines, cluster)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {axis: self.mesh.size(axis) for axis in AXES}

    def line(self, types: Mapping[str, Type]) -> DataLine:
        """Of a parameter of these types."""
        return self.lines[self.mesh.data_axes([axis for axis, kind in types.items() if kind.is_shard])]


def _line(cluster: Cluster, mesh: Mesh, axes: Sequence[str], zero_ranks: int) -> DataLine:
    """Neighbours along several axes are those along the innermost."""
    size = math.prod(mesh.size(axis) for axis in axes)
    stride = min((mesh.stride(axis) for axis in axes), default=1)
    shards = mesh.zero_shards(zero_ranks, axes) if axes else 1
    whole, shard = (cluster.link(n, stride, mesh.world) for n in (size, shards))
    return DataLine(size, shards, whole, shard, cluster.link(size // shards, stride * shards, mesh.world))


def block_cost(block: Block, machine: Machine) -> BlockCost:
    forward: dict[fx.Node, float] = {}
    backwards: dict[fx.Node, float] = {}
    weights = 0.0
    later: dict[fx.Node, int] = {}
    for node in block.ops:
        forward[node], backwards[node] = _node_seconds(node, machine)
        back = backwards[node]
        if (factor := weight_product(node)) is not None:
            weights += back / max(1, sum(info(o).meta.needs_grad for o in operands(node)))
            later[factor] = info(factor).meta.bytes
            later[node] = info(node).meta.bytes  # the gradient of the result
    for node in block.ops:
        if (journey := _journey_seconds(node, Op.of(node), machine)) is not None:
            for passes in (forward, backwards):  # what is computed while rows travel hides as much of that
                passes[node] -= min(journey, passes[node], sum(passes[other] for other in meanwhile(block, node)))
    backward = math.fsum(backwards.values())
    metas = [info(p).meta for p in block.placeholders("parameter")]
    held, elements = sum(m.bytes for m in metas), sum(m.numel for m in metas)
    return BlockCost(math.fsum(forward.values()), backward, weights, sum(later.values()), held, elements, forward)


def weight_product(node: fx.Node) -> fx.Node | None:
    """The other factor of a product with a parameter, whose weight gradient can be put off; else None."""
    if not lookup(op_name(node)).flops(Op.of(node)):
        return None
    both = [operand for operand in operands(node) if not info(operand).is_object]
    dims = 2 if len(both) == len(operands(node)) else 3  # a weight for each expert, and the routing to them
    factors = [operand for operand in both if not _is_weight(operand, dims)]
    return factors[0] if len(factors) == 1 and len(both) == 2 else None


def _is_weight(node: fx.Node, dims: int) -> bool:
    while op_name(node) == "convert":
        node = operands(node)[0]
    return info(node).role == "parameter" and len(info(node).meta.shape) == dims


def _node_seconds(node: fx.Node, machine: Machine) -> tuple[float, float]:
    if isinstance(node.target, RuntimeOp) and "src" in node.kwargs:
        return _transition_seconds(node, machine)
    op = Op.of(node)
    rule = lookup(op.name)
    choice = _whole(node)
    forward, backward = pass_seconds(node, op, rule, choice, 1, machine.device)
    one_way = _journey_seconds(node, op, machine)
    if one_way is not None:
        forward, backward = forward + one_way, backward + (one_way if backward else 0.0)
    for axis, taken in info(node).choices.items() if one_way is None else ():
        if axis in machine.sizes and taken.form:
            size, link = machine.sizes[axis], machine.links[axis]
            before = _before_split(op, taken, size)
            there, back = rule.communication(before, taken, size), rule.communication_back(before, taken, size)
            sent = sum(collective.seconds(kind, bytes_, size, link) for kind, bytes_ in there)
            sent_back = sum(collective.seconds(kind, bytes_, size, link) for kind, bytes_ in back if backward)
            if rule.overlaps(op, taken):
                forward, backward = max(forward, sent), max(backward, sent_back)
            else:
                forward, backward = forward + sent, backward + sent_back
    unequal = expert_imbalance(node)
    return forward * unequal, backward * unequal


def _journey_seconds(node: fx.Node, op: Op, machine: Machine) -> float | None:
    """Of rows that travel to experts or back, over several axes at once; None: the op exchanges no rows."""
    routing = next((operand for operand in operands(node) if info(operand).is_object), None)
    exchanged = [choice for choice in info(node).choices.values() if choice.form == EXCHANGE]
    if routing is None or not exchanged or machine.cluster is None:
        return None
    ((_, bytes_),) = lookup(op.name).communication(op, exchanged[0], 1)
    return exchange_seconds(bytes_, exchange_axes(routing), hops_of(routing), machine.cluster, machine.mesh)


def _before_split(op: Op, choice: Choice, size: int) -> Op:
    """A local op as it was before one axis was solved."""

    def whole(meta: Meta, kind: Type) -> Meta:
        shape = tuple(n * size if kind.is_shard and kind.dim == d else n for d, n in enumerate(meta.shape))
        return replace(meta, shape=shape)

    given = tuple(whole(meta, kind) for meta, kind in zip(op.operands, choice.operands, strict=True))
    return replace(op, operands=given, outputs=tuple(whole(meta, choice.result) for meta in op.outputs))


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
