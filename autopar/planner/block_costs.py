"""What one call of a block costs a rank, read off its solved, local graph: nothing is derived twice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from torch import fx

from autopar.cluster import Cluster, Device, Link
from autopar.cost_models import collective
from autopar.graph import INPUT_CALL, Block, Choice, Meta, Model, info, is_getitem, op_name, operands
from autopar.mesh import AXES, Mesh
from autopar.passes.edges import gradient_paths, results_reached
from autopar.passes.expert_roads import exchange_axes, flat_seconds, hop_seconds, hops_of
from autopar.passes.hoist import unhoisted
from autopar.passes.overlap_dispatch import meanwhile
from autopar.passes.products import PRODUCTS, is_transposition
from autopar.passes.routers import routes
from autopar.planner.gradient_sums import block_sums
from autopar.planner.local_ops import before_split
from autopar.planner.op_costs import fullest, fullest_rows, moves_nothing, own_seconds
from autopar.planner.transitions import changed_axis, is_parameter, is_transition
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.experts import ACROSS, EXCHANGE, ROUTE, WITHIN, Hop, hops, node_rows_of, told_bytes
from autopar.rules.issued import issued
from autopar.spmd import R, Type, transition

Wire: TypeAlias = tuple[str, str]
"""Mesh axis and kind of collective; rows of experts may travel over several axes at once, ``"ep+tp"``."""

Both: TypeAlias = tuple[float, float]
"""Seconds of the forward and of the backward."""

OpOf: TypeAlias = Callable[[fx.Node], Op]
"""A node as rules see it."""


@dataclass(frozen=True)
class BlockCost:
    """Per call and microbatch: seconds of the passes, bytes and elements of its parameters. ``weight_seconds`` is the
    part of the backward that can be put off, which keeps ``later_bytes``; ``op_seconds`` is each op's forward.
    ``wires`` is the communication that the passes contain, ``hidden`` what runs beside their compute. ``calls`` are
    what the host issues in the forward and in the backward, of which ``turned`` each are transpositions of weights that
    the text of a split backward doesn't have; ``reads_counts``: whether it waits there for what routers chose;
    ``idle``: parameters and inputs to which no gradient comes."""

    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    later_bytes: int
    parameter_bytes: int
    parameters: int
    op_seconds: Mapping[fx.Node, float] = field(default_factory=dict, compare=False)
    wires: Mapping[Wire, Both] = field(default_factory=dict, compare=False)
    hidden: Mapping[Wire, Both] = field(default_factory=dict, compare=False)
    calls: tuple[int, int] = (0, 0)
    turned: int = 0
    reads_counts: bool = False
    idle: frozenset[fx.Node] = frozenset()

    def passes(self, *, split: bool) -> tuple[int, int]:
        """``calls`` where backwards are two passes or one."""
        forward, backward = self.calls
        return (forward - self.turned, backward - self.turned) if split else self.calls

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def compute_seconds(self) -> Both:
        """The passes without ``wires``."""
        sent = [math.fsum(both[way] for both in self.wires.values()) for way in (0, 1)]
        return self.forward_seconds - sent[0], self.backward_seconds - sent[1]


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
    """What a cost needs to know of where it arises; ``lines`` by :meth:`autopar.mesh.Mesh.data_axes`. ``nodes``: tokens
    travel by way of so many, whatever blocks say (None: as they say); ``is_even``: and each rank passes on as many."""

    device: Device
    links: Mapping[str, Link]
    mesh: Mesh
    lines: Mapping[tuple[str, ...], DataLine] = field(default_factory=dict)
    cluster: Cluster | None = None
    nodes: int | None = None
    is_even: bool = False

    @classmethod
    def of(cls, cluster: Cluster, mesh: Mesh, zero_ranks: int = 0) -> Machine:
        links = {axis: cluster.link(mesh.size(axis), mesh.stride(axis), mesh.world) for axis in AXES}
        lines = {axes: _line(cluster, mesh, axes, zero_ranks) for axes in mesh.data_lines()}
        return cls(cluster.device, links, mesh, lines, cluster)

    def by_way_of(self, nodes: int) -> Machine:
        """The same, where tokens travel by way of so many ``nodes``; 1: row by row."""
        return replace(self, nodes=nodes)

    def at_least(self, nodes: int) -> Machine:
        """The same of ranks that pass on no more than the mean."""
        return replace(self, nodes=nodes, is_even=True)

    @property
    def sizes(self) -> Mapping[str, int]:
        return {axis: self.mesh.size(axis) for axis in AXES}

    def held_share(self, axes: Sequence[str], kind: str = "") -> float:
        """The share of a device's multiprocessors that a collective of all ranks along ``axes`` holds, or one of this
        ``kind`` of those of a node or across nodes."""
        if self.cluster is None:
            return 0.0
        if kind in (ACROSS, WITHIN):
            near, far = self.cluster.intra_node, self.cluster.link(2, self.cluster.devices_per_node)
            return self.device.held_share(far if kind == ACROSS else near)
        ranks = len(self.mesh.group(0, *axes))
        stride = min((self.mesh.stride(axis) for axis in axes if self.mesh.size(axis) > 1), default=1)
        return self.device.held_share(self.cluster.link(ranks, stride, self.mesh.world))

    def line(self, types: Mapping[str, Type]) -> DataLine:
        """Of a parameter of these types."""
        return self.lines[self.mesh.data_axes([axis for axis, kind in types.items() if kind.is_shard])]


def _line(cluster: Cluster, mesh: Mesh, axes: Sequence[str], zero_ranks: int) -> DataLine:
    """Neighbours along several axes are those along the innermost."""
    size = math.prod(mesh.size(axis) for axis in axes)
    shards = mesh.zero_shards(zero_ranks, axes) if axes else 1
    near, far = (_stride(mesh, axes, apart) for apart in (1, shards))
    whole, shard = (cluster.link(n, near, mesh.world) for n in (size, shards))
    return DataLine(size, shards, whole, shard, cluster.link(size // shards, far, mesh.world))


def _stride(mesh: Mesh, axes: Sequence[str], apart: int) -> int:
    """The distance in ranks between those of a group along ``axes`` that are ``apart`` places apart, at least."""
    steps = apart
    for axis in reversed(axes):
        if steps < mesh.size(axis):
            return steps * mesh.stride(axis)
        if steps % mesh.size(axis):
            return min((b - a for a, b in pairwise(mesh.group(0, *axes)[::apart])), default=1)
        steps //= mesh.size(axis)
    return 1


class OpCost:
    """Seconds of one op, ``[forward, backward]``: what it computes, and what it sends, exposed or hidden."""

    def __init__(self, forward: float, backward: float) -> None:
        self.compute = [forward, backward]
        self.exposed: dict[Wire, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.hidden: dict[Wire, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def seconds(self, way: int) -> float:
        return self.compute[way] + math.fsum(both[way] for both in self.exposed.values())

    def send(self, wire: Wire, way: int, seconds: float) -> None:
        self.exposed[wire][way] += seconds

    def hide(self, wire: Wire, way: int, seconds: float) -> float:
        """Up to so much of what is exposed runs beside compute; returns how much does."""
        part = min(seconds, self.exposed[wire][way])
        self.exposed[wire][way] -= part
        self.hidden[wire][way] += part
        return part


@dataclass(frozen=True)
class Computed:
    """Of the ops of a block that is local on all axes, what doesn't depend on where its ranks are: seconds of what they
    compute, and of the ``sums`` of gradients between them; the other factor of those whose weights' gradients can be
    put off, and how many calls they are (as in :class:`BlockCost`); which transitions of parameters are not hoisted
    (:func:`autopar.passes.hoist.unhoisted`), and to which ops, parameters and inputs no gradient comes."""

    seconds: Mapping[fx.Node, Both]
    factors: Mapping[fx.Node, fx.Node]
    calls: tuple[int, int]
    turned: int
    sums: float
    stays: frozenset[fx.Node] = frozenset()
    unreached: frozenset[fx.Node] = frozenset()

    @classmethod
    def of(
        cls,
        block: Block,
        device: Device,
        stays: frozenset[fx.Node] = frozenset(),
        op_of: OpOf = Op.of,
        results: Collection[int] | None = None,
    ) -> Computed:
        """``op_of`` makes one op of all nodes that are alike, where several blocks have such nodes. ``results``: the
        positions of those to which a gradient comes (:func:`reached_results`; None: all)."""
        results = range(len(block.outputs)) if results is None else results
        reached = gradient_paths(block, results)
        seconds = {node: _computed(node, device, node in reached, op_of) for node in block.ops}
        factors = ((node, weight_product(node, stays, op_of)) for node in block.ops if node in reached)
        kept = {node: factor for node, factor in factors if factor is not None}
        turned = sum(is_transposition(node) and all(user in kept for user in node.users) for node in block.ops)
        calls = calls_of(block.ops, stays, reached=reached)
        sums = block_sums(block, device, reached, {block.outputs[position] for position in results})
        unreached = frozenset((*block.parameters, *block.inputs, *block.ops)) - reached
        return cls(seconds, kept, calls, turned, sums, stays, unreached)


def reached_results(model: Model) -> list[frozenset[int]]:
    """By block, the positions of results to which a gradient comes in any of its calls."""
    found: list[set[int]] = [set() for _ in model.blocks]
    for call, positions in results_reached(model).items():
        if call != INPUT_CALL:
            found[model.calls[call].block] |= positions
    return list(map(frozenset, found))


def block_cost(block: Block, machine: Machine, computed: Computed | None = None) -> BlockCost:
    """What the ops of ``block``, which is local on all axes, take; ``wires`` and compute add up to the passes. What it
    ``computed`` is kept by whoever asks for several machines with one device."""
    computed = computed or Computed.of(block, machine.device)
    found = {node: _op_cost(node, machine, computed, computed.seconds[node]) for node in block.ops}
    weights = 0.0
    later: dict[fx.Node, int] = {}
    for node, cost in found.items():
        if (factor := computed.factors.get(node)) is not None:
            weights += cost.seconds(1) / max(1, sum(info(o).meta.needs_grad for o in operands(node)))
            later[factor] = info(factor).meta.bytes
            later[node] = info(node).meta.bytes  # the gradient of the result
    for node, cost in found.items():
        beside = meanwhile(block, node)  # what is computed while rows travel hides as much of that
        for way in (0, 1) if beside else ():
            for wire in [wire for wire in cost.exposed if wire[1] != WITHIN]:  # that hop waits for the other one
                cost.hide(wire, way, math.fsum(found[other].seconds(way) for other in beside))
    forward = {node: cost.seconds(0) for node, cost in found.items()}
    backward = math.fsum([*(cost.seconds(1) for cost in found.values()), computed.sums])
    metas = [info(p).meta for p in block.placeholders("parameter")]
    held, elements = sum(m.bytes for m in metas), sum(m.numel for m in metas)
    wires, hidden = _sums(cost.exposed for cost in found.values()), _sums(cost.hidden for cost in found.values())
    passes = math.fsum(forward.values()), backward
    kept, reads = sum(later.values()), bool(routes(block))
    idle = computed.unreached.intersection((*block.parameters, *block.inputs))
    calls, turned = computed.calls, computed.turned
    return BlockCost(*passes, weights, kept, held, elements, forward, wires, hidden, calls, turned, reads, idle)


def calls_of(
    nodes: Iterable[fx.Node],
    stays: Container[fx.Node] = (),
    by_way_of: int | None = None,
    reached: Container[fx.Node] | None = None,
) -> tuple[int, int]:
    """What the host issues for some local ops, forward and backward (:mod:`autopar.rules.issued`), where tokens that
    travel do so ``by_way_of`` so many nodes (None: as they say), and gradients ``reached`` these (None: all)."""
    forward = backward = 0
    for node in nodes:
        if _is_call(node) or node in stays:
            given, makes = [info(operand).meta for operand in operands(node)], info(node).meta.needs_grad
            makes = makes and (reached is None or node in reached)
            there, back = issued(op_name(node), given, back=makes, route=_route_of(node, by_way_of))
            forward, backward = forward + there, backward + back
    return forward, backward


def _route_of(node: fx.Node, by_way_of: int | None) -> Op | None:
    """What says where the rows are that an op takes or makes, if they are of experts."""
    every = (node, *(operand for operand in operands(node) if info(operand).is_object))
    route = next((Op.of(each) for each in every if op_name(each) == ROUTE), None)
    if route is None or by_way_of is None or not route.kwargs.get(EXCHANGE):
        return route
    return replace(route, kwargs={**route.kwargs, "nodes": by_way_of})


def _is_call(node: fx.Node) -> bool:
    """Whether the text calls the op: not what takes a result out of several, nor a transition of a parameter, which
    reductions of gradients are."""
    return not (is_getitem(node) or (is_transition(node) and is_parameter(operands(node)[0])))


def sent_by(nodes: Iterable[fx.Node], machine: Machine) -> dict[Wire, Both]:
    """What some ops of a block that is local on all axes send, and doesn't run beside their own work."""
    return _sums(_op_cost(node, machine, None, _computed(node, machine.device)).exposed for node in nodes)


def _sums(parts: Iterable[Mapping[Wire, Sequence[float]]]) -> dict[Wire, Both]:
    total: dict[Wire, list[list[float]]] = defaultdict(list)
    for wire, both in (item for part in parts for item in part.items()):
        total[wire].append(list(both))
    sums = {wire: (math.fsum(f for f, _ in some), math.fsum(b for _, b in some)) for wire, some in total.items()}
    return {wire: both for wire, both in sorted(sums.items()) if any(both)}


def weight_product(node: fx.Node, stays: Container[fx.Node] = (), op_of: OpOf = Op.of) -> fx.Node | None:
    """The other factor of a product with a trained parameter, whose gradient can be put off; else None. Through a
    convert that ``stays`` it goes back at once."""
    both = [operand for operand in operands(node) if not info(operand).is_object]
    dims = 2 if len(both) == len(operands(node)) else 3  # a weight for each expert, and the routing to them
    factors = [operand for operand in both if not _is_weight(operand, dims, stays)]
    if len(factors) != 1 or len(both) != 2 or (dims == 2 and (op_name(node) not in PRODUCTS or factors != both[:1])):
        return None
    return factors[0] if lookup(op_name(node)).flops(op_of(node)) else None


def put_off_weights(model: Model) -> frozenset[fx.Node]:
    """The parameters of ``model``'s blocks, local on all axes, whose gradients are made by such products."""
    stays = unhoisted(model)
    return frozenset(weight for block in model.blocks for weight in _put_off_weights(block, stays))


def _put_off_weights(block: Block, stays: Container[fx.Node]) -> Iterator[fx.Node]:
    for node in block.ops:
        if (factor := weight_product(node, stays)) is not None:
            yield _stored(next(operand for operand in operands(node) if operand is not factor), stays)


def _stored(weight: fx.Node, stays: Container[fx.Node]) -> fx.Node:
    """What is converted, or transposed, to ``weight``."""
    while weight not in stays and (op_name(weight) == "convert" or is_transposition(weight)):
        weight = operands(weight)[0]
    return weight


def _is_weight(node: fx.Node, dims: int, stays: Container[fx.Node]) -> bool:
    node = _stored(node, stays)
    return info(node).role == "parameter" and info(node).meta.needs_grad and len(info(node).meta.shape) == dims


def _computed(node: fx.Node, device: Device, is_reached: bool = True, op_of: OpOf = Op.of) -> Both:
    """``is_reached``: a gradient comes to it."""
    if is_transition(node):
        return 0.0, 0.0
    op = fullest(node, op_of(node))
    is_view = moves_nothing(node, op, device)
    key = "whole", device, is_view
    if key not in op.found:
        op.found[key] = own_seconds(op, lookup(op.name), _whole(node), 1, device, is_view=is_view)
    seconds: Both = op.found[key]
    return seconds if is_reached else (seconds[0], 0.0)


def _op_cost(node: fx.Node, machine: Machine, computed: Computed | None, seconds: Both) -> OpCost:
    """``computed``: of its block, if that is known."""
    if is_transition(node):
        return _transition_cost(node, machine, computed)
    cost = OpCost(*seconds)
    if not any(choice.form for choice in info(node).choices.values()):
        return cost  # it sends nothing
    if _travels(node) and machine.cluster is not None:
        _add_journey(cost, node, machine, machine.cluster)
        return cost
    op = fullest(node, Op.of(node))
    for axis, taken in info(node).choices.items():
        if axis in machine.sizes and taken.form:
            add_form(cost, op, axis, taken, machine.sizes[axis], machine.links[axis])
    return cost


def _travels(node: fx.Node) -> bool:
    """Whether it sends rows to experts or back, maybe over several axes at once, or says how many they are."""
    return any(choice.form == EXCHANGE for choice in info(node).choices.values())


def _add_journey(cost: OpCost, node: fx.Node, machine: Machine, cluster: Cluster) -> None:
    routing = _routing(node)
    axes = exchange_axes(routing)
    nodes, wire = machine.nodes or hops_of(routing), "+".join(axes)
    if nodes > 1:
        for way, hop in enumerate(hops_by_way(node, nodes, is_even=machine.is_even)):
            if way == 0 or cost.compute[1]:
                across, within = hop_seconds(hop, nodes, axes, cluster, machine.mesh)
                cost.send((wire, ACROSS), way, across)
                cost.send((wire, WITHIN), way, within)
        return
    exchanged = next(choice for choice in info(node).choices.values() if choice.form == EXCHANGE)
    ((_, bytes_),) = lookup(op_name(node)).communication(fullest(node, Op.of(node)), exchanged, 1)
    one_way = flat_seconds(bytes_, axes, cluster, machine.mesh)
    cost.send((wire, "all_to_all"), 0, one_way)
    cost.send((wire, "all_to_all"), 1, one_way if cost.compute[1] else 0.0)


def hops_by_way(node: fx.Node, nodes: int, *, is_even: bool = False) -> tuple[Hop, ...]:
    """What a routing, a dispatch or a combine sends of tokens that travel by way of ``nodes``: forward, and backward
    where it has one. ``is_even``: as if ranks passed on as many rows, even where each has a node for itself."""
    routing = _routing(node)
    route = Op.of(routing)
    if routing is node:
        return (Hop(told_bytes(route, nodes), 0),)
    return hops(fullest(node, Op.of(node)), node_rows_of(route, 1.0 if is_even else info(node).imbalance, nodes))


def add_form(cost: OpCost, op: Op, axis: str, taken: Choice, size: int, link: Link) -> None:
    """What the local op's form communicates on one axis, beside the op's own work where it overlaps."""
    rule = lookup(op.name)
    before = before_split(op, taken, size)
    ways = (rule.communication(before, taken, size), rule.communication_back(before, taken, size))
    for way, messages in enumerate(ways):
        if way == 1 and not cost.compute[1]:
            continue
        free = cost.seconds(way) if rule.overlaps(op, taken) else 0.0
        for kind, bytes_ in messages:
            cost.send((axis, kind), way, collective.seconds(kind, bytes_, size, link))
            free -= cost.hide((axis, kind), way, free)


def _routing(node: fx.Node) -> fx.Node:
    """That of rows that ``node`` sends; of a routing, itself."""
    return next((operand for operand in operands(node) if info(operand).is_object), node)


def _whole(node: fx.Node) -> Choice:
    """The op as its local shapes say it: nothing left to split."""
    return Choice((R,) * len(operands(node)), R)


def _transition_cost(node: fx.Node, machine: Machine, computed: Computed | None) -> OpCost:
    cost, axis = OpCost(0.0, 0.0), changed_axis(node)
    if is_parameter(operands(node)[0]) and (computed is None or node not in computed.stays):
        return cost  # hoisted: once per step, in the reduction of gradients
    before, after = (fullest_rows(data, data.meta) for data in (info(operands(node)[0]), info(node)))
    if computed is not None and node in computed.unreached:
        after = replace(after, needs_grad=False)
    add_change(cost, node, before, after, machine.sizes[axis], machine.links[axis])
    return cost


def add_change(cost: OpCost, node: fx.Node, before: Meta, after: Meta, size: int, link: Link) -> None:
    """What a change of type sends, of local tensors like these."""
    change = transition(node.kwargs["src"], node.kwargs["dst"])  # type: ignore[arg-type]
    assert change is not None
    full = change.sent_bytes(before.bytes, after.bytes, size)
    for way, kind in enumerate((change.forward, change.backward if after.needs_grad else None)):
        if kind:
            cost.send((changed_axis(node), kind), way, collective.seconds(kind, full, size, link))
