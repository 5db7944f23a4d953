"""hoist: which gradient sums may leave the microbatch loop, and that the rest stays."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import (
    AxisRef,
    Block,
    Call,
    Info,
    InputInfo,
    Meta,
    Model,
    ParameterInfo,
    RuntimeOp,
    Value,
    info,
    operands,
    set_info,
    verify,
)
from autopar.passes.hoist import hoist_parameter_sums
from autopar.spmd import I, R, S, Type

META = Meta((4, 4), torch.float32, True)
Uses = list[list[str]]
"""For each use of a parameter, the axes it is converted on, first to last."""


def convert(graph: fx.Graph, x: fx.Node, axis: str, src: Type = I, dst: Type = R) -> fx.Node:
    node = graph.call_function(RuntimeOp("convert"), (x, AxisRef(axis)), {"src": src, "dst": dst})
    return set_info(node, Info((META,)))


def block(*parameters: Uses) -> Block:
    """A block that uses each parameter as told, in one matrix product per use."""
    graph = fx.Graph()
    nodes = []
    for k in range(len(parameters)):
        node = graph.placeholder(f"p{k}")
        nodes.append(set_info(node, Info((META,), role="parameter", name=f"p{k}")))
    x = set_info(graph.placeholder("x"), Info((META,), role="input", name="x"))
    for node, uses in zip(nodes, parameters, strict=True):
        for axes in uses:
            weight = node
            for axis in axes:
                weight = convert(graph, weight, axis)
            x = set_info(graph.call_function(torch.ops.aten.mm.default, (x, weight)), Info((META,)))
    graph.output((x,))
    return Block("block", "glue", graph)


def model(*calls: tuple[Block, tuple[str, ...]]) -> Model:
    """Calls of blocks in a row, each with its parameters by name."""
    blocks = list({id(b): b for b, _ in calls}.values())
    made = [Call(blocks.index(b), "", names, (Value(i - 1, 0),)) for i, (b, names) in enumerate(calls)]
    known = {name: ParameterInfo(name, META) for _, names in calls for name in names}
    return Model("Test", blocks, made, known, [InputInfo("x", "x", META, 0)], Value(len(calls) - 1, 0), 4)


def hoisted(*calls: tuple[Block, tuple[str, ...]]) -> tuple[dict[str, tuple[str, ...]], list[list[str]]]:
    """What ``hoist`` found, and the axes of the converts left in each block."""
    found, reduce = hoist_parameter_sums(model(*calls))
    verify(found, "hoist")
    left = [[str(n.args[1]) for n in b.ops if isinstance(n.target, RuntimeOp)] for b in found.blocks]
    return reduce, left


def test_a_convert_before_every_use_is_hoisted() -> None:
    assert hoisted((block([["dp"], ["dp"]]), ("w",))) == ({"w": ("dp",)}, [[]])


def test_a_use_without_keeps_the_others() -> None:
    assert hoisted((block([["dp"], []]), ("w",))) == ({"w": ()}, [["dp"]])


def test_chains_in_any_order() -> None:
    assert hoisted((block([["dp", "tp"], ["tp", "dp"]]), ("w",))) == ({"w": ("dp", "tp")}, [[]])


def test_one_axis_of_two() -> None:
    assert hoisted((block([["tp", "dp"], ["dp"]]), ("w",))) == ({"w": ("dp",)}, [["tp"]])


def test_a_parameter_that_no_op_reads_is_left_alone() -> None:
    assert hoisted((block([]), ("w",))) == ({"w": ()}, [[]])


def test_tied_weights_must_agree_everywhere() -> None:
    with_sum, without = block([["dp"]]), block([[]])
    assert hoisted((with_sum, ("w",)), (without, ("w",))) == ({"w": ()}, [["dp"], []])
    assert hoisted((with_sum, ("w",)), (without, ("v",))) == ({"w": ("dp",), "v": ()}, [[], []])


def test_all_calls_of_a_block_follow_one_that_can_not() -> None:
    """The block is shared: what is kept for one call's parameter is kept for all."""
    layer, other = block([["dp"]]), block([[]])
    assert hoisted((layer, ("a",)), (layer, ("b",)), (other, ("a",))) == ({"a": (), "b": ()}, [["dp"], []])


def test_other_transitions_stay() -> None:
    graph = fx.Graph()
    weight = set_info(graph.placeholder("p"), Info((META,), role="parameter", name="p"))
    split = convert(graph, weight, "tp", I, S(0))
    graph.output((set_info(graph.call_function(torch.ops.aten.relu.default, (split,)), Info((META,))),))
    found, reduce = hoist_parameter_sums(
        Model("T", [Block("b", "glue", graph)], [Call(0, "", ("w",), ())], {}, [], Value(0, 0), 1)
    )
    assert reduce == {"w": ()}
    assert len(found.blocks[0].ops) == 2


def test_the_given_model_stays_as_it_was() -> None:
    before = model((block([["dp"]]), ("w",)))
    text = str(before)
    after, _ = hoist_parameter_sums(before)
    assert str(before) == text
    (product,) = after.blocks[0].ops
    assert info(operands(product)[1]).role == "parameter"
