"""Rows travel while shared experts are computed: where ops stand, and when a dispatch becomes two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.graph import Block, Choice, Info, Meta, Model, RuntimeOp, Value, info, op_name, set_info
from autopar.passes.overlap_dispatch import meanwhile, overlap_dispatch, start_dispatches
from autopar.passes.recompute import Region
from autopar.rules.experts import routing_meta
from autopar.spmd import RAGGED, S

aten = torch.ops.aten
TOKENS, WIDTH = 8, 4


def model(form: str = "exchange", nodes: int = 1, shared: bool = True) -> Model:
    """``combine(dispatch(x)) + shared(x)``, the shared expert written before or after it all the same."""
    graph = fx.Graph()

    def given(name: str, *shape: int) -> fx.Node:
        role = "parameter" if name == "weight" else "input"
        return set_info(graph.placeholder(name), Info((Meta(shape, torch.float64, True),), role=role, name=name))

    def op(name: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.create_node("call_function", target, args, kwargs, name)
        return set_info(node, Info((Meta((TOKENS, WIDTH), torch.float64, True),)))

    weight, x, index, gate = (
        given(*shape) for shape in (("weight", 4, 4), ("x", 8, 4), ("index", 8, 1), ("gate", 8, 1))
    )
    norm = op("norm", aten.tanh.default, x)
    early = op("early", aten.linear.default, norm, weight) if shared else norm
    routing = op("routing", RuntimeOp("route"), index, 8, **({"nodes": nodes} if nodes > 1 else {}))
    set_info(routing, Info((routing_meta(TOKENS),), is_object=True))
    rows = op("rows", RuntimeOp("dispatch"), norm, routing)
    info(rows).choices["ep"] = Choice((S(0), S(1)), S(0, RAGGED), form)
    relu = op("relu", aten.relu.default, rows)
    y = op("y", RuntimeOp("combine"), relu, gate, routing)
    late = op("late", aten.linear.default, early, weight) if shared else norm
    total = op("total", aten.add.Tensor, y, late)
    graph.output((total,))
    return Model("", [Block("layer", "layer", graph)], [], {}, [], Value(0, 0), 1)


def order(made: Model) -> str:
    return " ".join(node.name for node in made.blocks[0].ops)


@pytest.mark.parametrize("nodes", [1, 2])
def test_shared_experts_come_right_after_the_dispatch(nodes: int) -> None:
    made = overlap_dispatch(model(nodes=nodes))
    assert order(made) == "norm routing rows early late relu y total"
    made.blocks[0].graph.lint()
    block = made.blocks[0]
    assert [node.name for node in meanwhile(block, block.ops[2])] == ["early", "late"]
    assert meanwhile(block, block.ops[0]) == ()


@pytest.mark.parametrize("how", [{"form": "filter"}, {"shared": False}], ids=str)
def test_nothing_moves_where_nothing_is_gained(how: dict[str, Any]) -> None:
    before = order(model(**how))
    assert order(overlap_dispatch(model(**how))) == before
    assert order(start_dispatches(overlap_dispatch(model(**how)), {})) == before


def test_a_dispatch_becomes_two() -> None:
    made = start_dispatches(overlap_dispatch(model()), {})
    ops = {node.name: node for node in made.blocks[0].ops}
    assert order(made) == "norm routing rows early late dispatch_end relu y total"
    assert op_name(ops["rows"]) == "dispatch_start"
    assert info(ops["rows"]).is_object
    end = info(ops["dispatch_end"])
    assert (end.is_object, end.meta, str(end.choices["ep"])) == (
        *(False, info(ops["rows"]).meta),
        "S(0,ragged) -> S(0,ragged)",
    )
    assert ops["relu"].args == (ops["dispatch_end"],)


@pytest.mark.parametrize(
    ("first", "last", "splits"),
    [
        ("norm", "total", True),
        ("relu", "total", True),
        ("early", "late", True),
        ("norm", "late", False),
        ("late", "y", False),
    ],
)
def test_both_are_recomputed_or_none(first: str, last: str, splits: bool) -> None:
    made = start_dispatches(overlap_dispatch(model()), {0: (Region(first, last),)})
    assert ("dispatch_end" in order(made)) == splits
