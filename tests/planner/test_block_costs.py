"""What a block costs, by compute and by what it sends."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cluster import Cluster
from autopar.cost_models import collective
from autopar.graph import Choice, Model, RuntimeOp, info, op_name
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.block_costs import BlockCost, Machine, block_cost
from autopar.planner.build import Built, Request, build
from autopar.planner.op_costs import moves_nothing, work_of
from autopar.planner.wanted import Wanted
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.spmd import I, R
from tests.shared_captures import graph_of

H100 = Cluster.load("h100")


@pytest.fixture(scope="module")
def captured() -> Model:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.zeros(8, 1024, dtype=torch.long, device="meta")
    return graph_of(model, {"input_ids": ids, "labels": ids}, splits_sequences=True)


def planned(captured: Model, **sizes: int) -> Built:
    mesh = Mesh.of(sizes, math.prod(sizes.values()))
    return build(captured.copy(), Request(mesh, 1, H100, Wanted("1f1b", "stage"), Options()))


def costs(built: Built) -> dict[str, BlockCost]:
    machine = Machine.of(H100, built.plan.mesh)
    return {block.name: block_cost(block, machine) for block in built.model.blocks}


def test_compute_and_wires_are_the_passes(captured: Model) -> None:
    built = planned(captured, tp=4)
    layer = next(block for block in built.model.blocks if block.kind == "layer")
    cost = costs(built)[layer.name]
    assert cost.wires
    assert {axis for axis, _ in cost.wires} == {"tp"}
    for way, seconds in enumerate((cost.forward_seconds, cost.backward_seconds)):
        sent = math.fsum(both[way] for both in cost.wires.values())
        assert cost.compute_seconds[way] + sent == pytest.approx(seconds, rel=1e-12)
        assert 0 < sent < seconds
    assert math.fsum(cost.op_seconds.values()) == pytest.approx(cost.forward_seconds)
    assert not cost.hidden


def test_wires_are_the_collectives_of_the_graph(captured: Model) -> None:
    built = planned(captured, tp=4)
    machine = Machine.of(H100, built.plan.mesh)
    layer = next(block for block in built.model.blocks if block.kind == "layer")
    gathers = [node for node in layer.ops if op_name(node) == "all_gather"]
    expected = math.fsum(
        collective.seconds("all_gather", info(node).meta.bytes, 4, machine.links["tp"]) for node in gathers
    )
    assert gathers
    assert costs(built)[layer.name].wires["tp", "all_gather"][0] == pytest.approx(expected)


def test_sums_of_gradients_over_two_axes_are_no_part_of_a_pass(captured: Model) -> None:
    """Of a parameter that dp and cp share, either sum comes once per step."""
    built = planned(captured, dp=2, cp=2)
    converts = [
        node
        for block in built.model.blocks
        for node in block.ops
        if isinstance(node.target, RuntimeOp) and (node.kwargs.get("src"), node.kwargs.get("dst")) == (I, R)
    ]
    assert any(node.args[0] in converts for node in converts)  # one behind another
    for cost in costs(built).values():
        assert not {("dp", "all_reduce"), ("cp", "all_reduce")} & set(cost.wires)


def test_what_runs_beside_an_ops_own_work_is_hidden(captured: Model) -> None:
    """A ring's messages: exposed and hidden, they are all that it sends."""
    mesh = Mesh.of({"cp": 4}, 4)
    options = Options(attention="ring", cp_order="contiguous")
    built = build(captured.copy(), Request(mesh, 1, H100, Wanted("1f1b", "stage"), options))
    layer = next(block for block in built.model.blocks if block.kind == "layer")
    cost, machine = costs(built)[layer.name], Machine.of(H100, mesh)
    (ring,) = (node for node in layer.ops if "ring" in op_name(node))
    bytes_ = sum(info(node).meta.bytes for node in ring.all_input_nodes[1:3])
    one = collective.seconds("send", bytes_, 4, machine.links["cp"])
    exposed, hidden = (some.get(("cp", "send"), (0.0, 0.0)) for some in (cost.wires, cost.hidden))
    assert hidden[0] > 0
    assert exposed[0] + hidden[0] == pytest.approx(3 * one)
    assert exposed[1] + hidden[1] == pytest.approx(7 * one)


def test_an_embedding_reads_rows_and_makes_a_table_of_gradients(captured: Model) -> None:
    node = next(n for block in captured.blocks for n in block.ops if op_name(n) == "aten.embedding.default")
    op = Op.of(node)
    work = work_of(op, lookup(op.name), Choice((R,) * len(op.operands), R), 1)
    rows, table = op.result.bytes, op.operands[0].bytes
    assert work.moved_bytes == rows + min(rows, table) + op.operands[1].bytes
    read = rows + min(rows, table) + op.operands[1].bytes
    assert work.back_bytes == read + table + 2 * min(rows, table)  # cleared once; a row is read and written


def test_complex_numbers_and_their_parts_are_views_and_casts_are_none() -> None:
    """Rotary positions of torchtitan's Llama; a cast to another dtype of as many elements reads and writes."""

    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex((x * self.weight).double().unflatten(-1, (-1, 2)))
            return (torch.view_as_real(pairs).flatten(-2) * 2.0).mean()

    with torch.device("meta"):
        model, sample = Turned(), torch.zeros(8, 1024, 64)
    captured = graph_of(model, sample)
    built = build(captured, Request(Mesh.of({"dp": 1}, 1), 1, H100, Wanted("1f1b", "stage"), Options()))
    nodes = [node for block in built.model.blocks for node in block.ops]
    free = {op_name(node): moves_nothing(node, Op.of(node), H100.device) for node in nodes}
    assert free["aten.view_as_complex.default"]
    assert free["aten.view_as_real.default"]
    assert not free["aten.to.dtype"]
