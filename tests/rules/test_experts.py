"""Ways to compute a layer of experts: every consistent choice of types equals the layer on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autopar import runtime
from autopar.graph import AxisRef, Block, Choice, Info, Meta, Model, RuntimeOp, Value, info, op_name, operands, set_info
from autopar.mesh import Mesh
from autopar.passes.localize import localize
from autopar.rules import lookup
from autopar.rules.base import Op, Splits, legal_choices
from autopar.rules.experts import DISPATCH_START, RULES, routing_meta
from autopar.spmd import I, P, R, S, Type
from tests.rules.harness import Step, gather, spread
from tests.rules.values import close, of_gradient
from tests.runtime.ranks import on_ranks

TOKENS, CHOICES, WIDTH, INNER, EXPERTS = 8, 2, 4, 8, 8
SHAPES = {
    "index": (TOKENS, CHOICES),
    "x": (TOKENS, WIDTH),
    "weights": (TOKENS, CHOICES),
    "inward": (EXPERTS, INNER, WIDTH),
    "bias": (EXPERTS, INNER),
    "outward": (EXPERTS, INNER, WIDTH),
}
Typing = dict[str, Choice]
"""By name of the node."""


def layer() -> fx.Graph:
    """Two products with a bias and a tanh between them."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, shape in SHAPES.items():
        dtype = torch.int64 if name == "index" else torch.float64
        meta = Meta(shape, dtype, dtype.is_floating_point)
        nodes[name] = set_info(graph.placeholder(name), Info((meta,), role="input", name=name))

    def op(target: Any, *args: Any, shape: tuple[int, ...] = (), **kwargs: Any) -> fx.Node:
        node = graph.call_function(RuntimeOp(target) if isinstance(target, str) else target, args, kwargs)
        return set_info(node, Info((Meta(shape, torch.float64, True),)))

    rows = TOKENS * CHOICES
    routing = op("route", nodes["index"], EXPERTS)
    set_info(routing, Info((routing_meta(TOKENS),), is_object=True))
    made = op("dispatch", nodes["x"], routing, shape=(rows, WIDTH))
    made = op("grouped_linear", made, nodes["inward"], routing, shape=(rows, INNER))
    made = op("grouped_bias", made, nodes["bias"], routing, shape=(rows, INNER))
    made = op(torch.ops.aten.tanh.default, made, shape=(rows, INNER))
    made = op("grouped_linear", made, nodes["outward"], routing, shape=(rows, WIDTH), transposed=True)
    made = op("combine", made, nodes["weights"], routing, shape=(TOKENS, WIDTH))
    graph.output((made,))
    return graph


def ops(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def legal_of(graph: fx.Graph, size: int) -> dict[fx.Node, list[Choice]]:
    """Of every op, split points carried over ops until nothing changes."""
    splits: dict[fx.Node, Splits] = {
        node: [{outer for outer in (1, 2) if extent % outer == 0} for extent in info(node).meta.shape]
        for node in graph.nodes
        if node.op != "output"
    }
    known = [(node, lookup(op_name(node)), Op.of(node), [splits[o] for o in operands(node)]) for node in ops(graph)]
    before = -1
    while before != (before := sum(len(s) for found in splits.values() for s in found)):
        for node, rule, op, inputs in known:
            rule.link(op, inputs, splits[node])
    return {node: legal_choices(rule, op, size, inputs, splits[node]) for node, rule, op, inputs in known}


def typings(graph: fx.Graph, size: int) -> Iterator[Typing]:
    """All choices of all ops in which every operand has the type that it was made with."""
    legal = legal_of(graph, size)

    def extend(types: Mapping[fx.Node, Type], chosen: Typing, rest: Sequence[fx.Node]) -> Iterator[Typing]:
        if not rest:
            yield chosen | {n.name: Choice((), kind) for n, kind in types.items() if n.op == "placeholder"}
            return
        node = rest[0]
        for choice in legal[node]:
            pairs = list(zip(operands(node), choice.operands, strict=True))
            if all(types.get(operand, kind) == kind for operand, kind in pairs):
                known = {**types, **dict(pairs), node: choice.result}
                yield from extend(known, {**chosen, node.name: choice}, rest[1:])

    yield from extend({}, {}, ops(graph))


def way(typing: Typing) -> str:
    """Of the routing, and what is made."""
    return f"{typing['route']} · {typing['combine'].result}"


def local(graph: fx.Graph, axis: str, size: int, typing: Typing) -> fx.Graph:
    """A copy, for one rank."""
    copy = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        made[node] = copy.node_copy(node, made.__getitem__)
        if node.op != "output":
            data = info(node)
            set_info(made[node], Info(data.outputs, role=data.role, name=data.name, is_object=data.is_object))
            info(made[node]).choices[axis] = typing[node.name]
    localize(Model("", [Block("layer", "layer", copy)], [], {}, [], Value(0, 0), 1), axis, size)
    return copy


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}
    return made | {"index": torch.randint(-1, EXPERTS + 1, SHAPES["index"], generator=generator)}


def run(graph: fx.Graph, given: Mapping[str, Tensor], axes: Mapping[str, Any], seed: Tensor) -> dict[str, Tensor]:
    """The result and the gradients of what has one."""
    env: dict[fx.Node, Any] = {}
    leaves = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = leaves[node.name]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            args, kwargs = map_aggregate((args, kwargs), lambda a: axes[a.name] if isinstance(a, AxisRef) else a)
            target = getattr(runtime, str(node.target)) if isinstance(node.target, RuntimeOp) else node.target
            if op_name(node) == "route" and axes:
                kwargs = {**kwargs, "axes": axes}
            env[node] = target(*args, **kwargs)
    (result,) = next(n for n in graph.nodes if n.op == "output").args[0]
    assert tuple(env[result].shape) == info(result).meta.shape
    env[result].backward(seed)
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in trained.items()}
    return {"result": env[result].detach(), **gradients}


def prove(graph: fx.Graph, *steps: tuple[str, int, Typing]) -> None:
    whole, given = graph, values()
    seed = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for step in steps:
        graph = local(graph, *step)
    result = ops(graph)[-1].name

    def kinds(name: str) -> list[Type]:
        return [typing[name].result for _, _, typing in steps]

    places = [Step(axis, size, Choice((), R)) for axis, size, _ in steps]
    parts = {name: spread(x, kinds(name), places) for name, x in given.items()}
    seeds = spread(seed, [of_gradient(kind) for kind in kinds(result)], places)
    mesh = Mesh(**{axis: size for axis, size, _ in steps}, borrowed=tuple(a for a, _, _ in steps if a in ("cp", "tp")))
    ranks = on_ranks(mesh, lambda axes: run(graph, {n: p[axes.rank] for n, p in parts.items()}, axes, seeds[axes.rank]))
    for name, wanted in run(whole, given, {}, seed).items():
        types = kinds(result) if name == "result" else [of_gradient(kind) for kind in kinds(name)]
        close(gather([found[name] for found in ranks], types, places), wanted, name, 1e-11)


def test_every_way_on_one_axis() -> None:
    graph, wrong, found = layer(), [], set()
    for typing in typings(graph, 2):
        found.add(way(typing))
        try:
            prove(graph, ("ep", 2, typing))
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{way(typing)}: {error}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert {"R -> R · R", "R -> R · P", "R -> R · S(1)", "S(0) -> S(0) · S(0)", "S(0,2) -> S(0,2) · S(0,2)"} < found
    assert {"R -> P [filter] · P", "S(0) -> S(1) [exchange] · S(0)", "S(0,2) -> S(1,2) [exchange] · S(0,2)"} < found


@pytest.mark.slow
def test_every_two_ways_on_two_axes() -> None:
    """The second axis sees what the first has left; the order of the mesh decides who holds which expert."""
    graph = layer()
    first = [next(group) for _, group in groupby(sorted(typings(graph, 2), key=way), way)]
    wrong, count = [], 0
    for one in first:
        halved = local(graph, "ep", 2, one)
        for _, group in groupby(sorted(typings(halved, 2), key=way), way):
            two, count = next(group), count + 1
            try:
                prove(graph, ("ep", 2, one), ("tp", 2, two))
            except (AssertionError, RuntimeError) as error:
                wrong.append(f"{way(one)} then {way(two)}: {error}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert count > 40


def test_axes_of_a_routing_stand_in_the_order_of_the_mesh() -> None:
    graph = layer()
    exchanged = next(t for t in typings(graph, 2) if t["route"].form == "exchange")
    for axis in ("tp", "ep"):
        graph = local(graph, axis, 2, exchanged)
    assert [str(ref) for ref in ops(graph)[0].kwargs["exchange"]] == ["ep", "tp"]


def test_a_routing_weighs_nothing_and_has_no_way_to_another_type() -> None:
    assert routing_meta(1024).bytes == 0
    for kind in (S(0), S(1), P, R):
        assert lookup("dispatch").communication(Op.of(ops(layer())[1]), Choice((R, kind), R), 2) == []


def test_what_products_and_exchanges_cost() -> None:
    graph = layer()
    exchanged = next(t for t in typings(graph, 4) if t["route"].form == "exchange")
    bytes_ = TOKENS * CHOICES * WIDTH * 8
    costs = {n.name: (lookup(op_name(n)), Op.of(n), exchanged[n.name]) for n in ops(graph)}
    for name in ("dispatch", "combine"):
        rule, op, choice = costs[name]
        assert rule.communication(op, choice, 4) == [("all_to_all", bytes_ // 4)]
        assert rule.communication_back(op, choice, 4) == [("all_to_all", bytes_ // 4)]
    rule, op, _ = costs["grouped_linear"]
    assert rule.flops(op) == 2 * TOKENS * CHOICES * WIDTH * INNER
    assert [n for n, (rule, op, _) in costs.items() if rule.expert_operands(op) == (1,)] == [
        *("grouped_linear", "grouped_bias", "grouped_linear_1")
    ]


def test_experts_that_do_not_divide_stay_whole() -> None:
    graph = layer()
    assert {t["route"].form for t in typings(graph, 3)} == {""}
    assert set(RULES) - {DISPATCH_START} == {op_name(n) for n in ops(graph)} - {"aten.tanh.default"}
    assert I not in {kind for t in typings(graph, 2) for kind in t["route"].operands}
