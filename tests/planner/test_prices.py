"""Axes are solved by prices that are those of the plan: what a solver minimizes is what blocks cost then."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from autopar.cluster import Cluster
from autopar.graph import AxisRef, Choice, Model, info, op_name
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.hoist import unhoisted
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.localize import localize
from autopar.planner.block_costs import Computed, Machine, block_cost
from autopar.planner.build import Placed, Request, begin, place_inner, split_rows
from autopar.planner.earlier_axes import EarlierAxes
from autopar.planner.local_ops import before_split, local_op
from autopar.planner.prices import RankPrices
from autopar.planner.sharding import AxisProblem, solve_axis
from autopar.planner.spreading import Spread
from autopar.planner.wanted import Wanted
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.spmd import I, S
from tests.shared_captures import graph_of


def llama() -> Model:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    return prepared(LlamaForCausalLM, config, 4096)


def mixtral() -> Model:
    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    return prepared(MixtralForCausalLM, config, 2048)


def prepared(family: Callable[[Any], nn.Module], config: Any, sequence: int) -> Model:
    """In bf16, with a batch of eight."""
    with torch.device("meta"):
        model = family(config).to(torch.bfloat16)
    ids = torch.zeros(8, sequence, dtype=torch.long)
    return graph_of(model, {"input_ids": ids, "labels": ids})


def placed(model: Model, sizes: dict[str, int], attention: str) -> Placed:
    """As if what a step does once cost nothing: endless microbatches share it."""
    mesh = Mesh.of(sizes, math.prod(size for axis, size in sizes.items() if axis != "ep"))
    wanted, options = Wanted("1f1b", "redistributed"), Options.of(attention=attention)
    request = Request(mesh, 1, Cluster.load("h100"), wanted, options, counted=math.inf)
    return place_inner(split_rows(begin(model, request, None), request), request)


def pass_seconds(found: Placed) -> float:
    """Of all calls, as the plan will have it."""
    machine, stays = Machine.of(found.request.cluster, found.request.mesh), unhoisted(found.model)
    costs = [block_cost(b, machine, Computed.of(b, machine.device, stays)) for b in found.model.blocks]
    return math.fsum(costs[call.block].seconds for call in found.model.calls)


@pytest.mark.parametrize(
    ("make", "sizes", "attention", "apart"),
    [
        (llama, {"tp": 8}, "auto", 0.005),
        (llama, {"cp": 8}, "auto", 0.005),
        (llama, {"cp": 8}, "ring", 0.005),
        (llama, {"cp": 4}, "all_gather", 0.005),
        (llama, {"cp": 2, "tp": 4}, "auto", 0.005),
        (llama, {"cp": 2, "tp": 4}, "ring", 0.01),
        (llama, {"dp": 2, "tp": 4}, "auto", 0.005),
        (llama, {"dp": 2, "cp": 2, "tp": 2}, "auto", 0.005),
        (mixtral, {"cp": 2, "tp": 4}, "auto", 0.02),
        (mixtral, {"dp": 2, "tp": 4}, "auto", 0.02),
        (mixtral, {"dp": 4, "ep": 4, "tp": 2}, "auto", 0.02),
        (mixtral, {"dp": 4, "cp": 2, "ep": 4}, "auto", 0.02),
    ],
)
def test_what_the_last_axis_minimizes_is_what_passes_cost(
    make: Callable[[], Model], sizes: dict[str, int], attention: str, apart: float
) -> None:
    """But for what only neighbours know: whether a reshape copies, and slices of what is whole."""
    found = placed(make(), sizes, attention)
    assert found.solutions[-1].seconds == pytest.approx(pass_seconds(found), rel=apart)


def test_an_op_without_its_graph_becomes_what_localize_makes_of_it() -> None:
    """On cp, then on tp: arguments, and what operands and results are like."""
    model, request = llama(), Request(Mesh(cp=2, tp=4), 1, Cluster.load("h100"), Wanted("1f1b", "redistributed"))
    options = Options(attention="ring")
    forms = set[str]()
    for axis, size, kind in (("cp", 2, "sequence"), ("tp", 4, "model")):
        link = request.cluster.link(size, request.mesh.stride(axis))
        prices = RankPrices(size, request.cluster.device, link, 1, axis=axis)
        attention = options.attention if axis == "cp" else "auto"
        solve_axis(model, AxisProblem(axis, size, prices, kind, attention=attention))
        insert_collectives(model, axis)
        wanted: dict[fx.Node, Op] = {}
        for node in (node for block in model.blocks for node in block.ops):
            choice, op = info(node).choices[axis], Op.of(node)
            wanted[node] = local_op(op, lookup(op.name), choice, AxisRef(axis, size))
            forms.add(choice.form)
        localize(model, axis, size)
        for node, op in wanted.items():
            made = Op.of(node)
            assert op == made
            assert before_split(op, info(node).choices[axis], size).result.numel >= op.result.numel
    assert {"ring_attention", "cross_entropy_sharded"} <= forms


def test_a_whole_weight_is_added_up_with_each_microbatch_but_no_part_of_a_pass() -> None:
    """Where dp was solved before: a part of it for a part of the seconds; none in the fastest passes."""
    cluster, model = Cluster.load("h100"), llama()
    link = cluster.link(8, 8)
    solve_axis(model, AxisProblem("dp", 8, RankPrices(8, cluster.device, link, 1, axis="dp"), "batch"))
    insert_collectives(model, "dp")
    localize(model, "dp", 8)
    spread = Spread.of(model)
    layer = next(number for number, block in enumerate(model.blocks) if block.kind == "layer")
    sums = [n for n in model.blocks[layer].ops if op_name(n) == "convert" and len(info(n).meta.shape) == 2]
    assert sums
    for node in sums:
        op, choices = spread.ops[layer, node].op, [Choice((I,), I), Choice((S(0),), S(0))]
        for microbatches in (16, math.inf):
            given = (4, cluster.device, cluster.link(4, 1), microbatches)
            prices = RankPrices(*given, axis="tp", earlier=EarlierAxes({"dp": (8, link)}))
            whole, split = prices.ops(node, op, lookup(op.name), choices)
            assert whole > split > 0 if microbatches == 16 else whole == split == 0
