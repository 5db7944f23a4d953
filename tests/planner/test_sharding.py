"""What the solvers find, and that they prove it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cluster import Cluster
from autopar.graph import Choice, Meta, Model, info, op_name
from autopar.mesh import Mesh
from autopar.planner import sharding
from autopar.planner.build import Built, Request, build
from autopar.planner.onehot import solve_milp
from autopar.planner.placement import Problem, Solution
from autopar.planner.prices import MicrobatchPrices, RankPrices
from autopar.planner.sharding import AxisProblem, choose, solve_axis
from autopar.planner.solve_placement import solve
from autopar.planner.spreading import Spread
from autopar.planner.wanted import Wanted
from autopar.rules.base import Op, Rule
from autopar.spmd import I, P, R, S
from tests.fast_cluster import NODES
from tests.pinned import compile_pinned
from tests.shared_captures import graph_of


def llama(layers: int) -> Model:
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(1, 4096, dtype=torch.long)
    return graph_of(model, {"input_ids": ids, "labels": ids})


def batch_of(rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What 2 divides, 4 does too, and 3 nothing but the batch."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8
    )
    ids = torch.zeros(rows, 16, dtype=torch.long)
    with torch.device("meta"):
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def planned(layers: int, **mesh: int) -> Built:
    gpus = 1
    for size in mesh.values():
        gpus *= size
    return build(llama(layers), Request(Mesh.of(mesh, gpus), 1, Cluster.load("h100"), Wanted("1f1b", "redistributed")))


def stored(model: Model) -> dict[str, str]:
    layer = next(block for block in model.blocks if block.kind == "layer")
    return {info(p).name: str(info(p).choices["tp"].result) for p in layer.parameters}


def test_llama_becomes_megatron_with_sequence_parallelism() -> None:
    built = planned(2, tp=8)
    weights = stored(built.model)
    column = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name, kind in weights.items():
        if "norm" in name:
            assert kind == "I", name
        else:
            assert kind == ("S(0)" if any(c in name for c in column) else "S(1)"), name
    layer = next(block for block in built.model.blocks if block.kind == "layer")
    moves = [str(node.target) for node in layer.ops if "src" in node.kwargs and str(node.target) != "convert"]
    assert moves == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    assert str(info(layer.inputs[0]).choices["tp"].result) == "S(1)"


def test_problems_that_are_equal_but_for_their_size_are_solved_once() -> None:
    """Of several axes on one model; each as on a model of its own."""
    model, cluster, prices = graph_of(*batch_of(24)), Cluster.load("h100"), MicrobatchPrices()
    known = Spread.of(model)
    problems = [AxisProblem("mb", size, prices, "batch") for size in (2, 4, 3)]
    problems += [
        AxisProblem("dp", size, RankPrices(size, cluster.device, cluster.link(size, 1), 1), "batch") for size in (2, 4)
    ]
    for problem in problems:
        found, alone = choose(known, problem), choose(Spread.of(model), problem)
        assert found.solution == alone.solution
        assert found.rows == alone.rows
    assert [solved.problem.size for solved in known.solved] == [2, 3, 2, 4]


def test_the_head_is_split_by_vocabulary_and_logits_stay_split() -> None:
    built = planned(1, tp=8)
    head = built.model.blocks[-1]
    forms = {choice.form for node in head.ops for choice in info(node).choices.values()}
    assert "cross_entropy_sharded" in forms
    extents = {extent for node in head.ops for meta in info(node).outputs for extent in meta.shape}
    assert 32000 // 8 in extents
    assert 32000 not in extents


def test_depth_costs_nothing_in_the_problem() -> None:
    shallow, deep = llama(2), llama(6)
    assert len(shallow.blocks) == len(deep.blocks)
    assert len(deep.calls) == len(shallow.calls) + 4


def test_the_optimum_is_proven_and_a_budget_holds() -> None:
    cluster = Cluster.load("h100")
    prices = RankPrices(8, cluster.device, cluster.link(8, 1), microbatches=64)
    free = solve_axis(llama(1), AxisProblem("tp", 8, prices, "model"))
    total = 4 * sum(p.meta.bytes for p in llama(1).parameters.values())
    tight = solve_axis(llama(1), AxisProblem("tp", 8, prices, "model", budget_bytes=total // 4))
    for solution in (free, tight):
        assert solution.bound_seconds <= solution.seconds * (1 + 1e-6)
        assert solution.seconds <= solution.bound_seconds * (1 + 1e-4)
    assert free.seconds <= tight.seconds


@pytest.mark.slow
def test_elimination_finds_what_the_milp_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every axis of a model, with and without a budget that cuts."""
    solved: list[Problem] = []

    def both(problem: Problem, **_: Iterable[Sequence[int]]) -> Solution:
        solved.append(problem)
        found, milp = solve(problem), solve_milp(problem)
        assert found.seconds == pytest.approx(milp.seconds, rel=1e-4 if problem.budget_bytes else 1e-9)
        assert found.bound_seconds <= milp.seconds * (1 + 1e-9)
        return found

    monkeypatch.setattr(sharding, "solve", both)
    cluster = Cluster.load("h100")
    prices = RankPrices(8, cluster.device, cluster.link(8, 1), microbatches=64)
    total = 4 * sum(p.meta.bytes for p in llama(1).parameters.values())
    solve_axis(llama(1), AxisProblem("tp", 8, prices, "model", budget_bytes=total // 4))
    planned(2, dp=1, cp=2, tp=4)
    assert len(solved) >= 3


@dataclass(frozen=True)
class Separately(RankPrices):
    """Prices of all choices, each asked for by itself."""

    def ops(self, node: fx.Node, op: Op, rule: Rule, choices: Sequence[Choice]) -> list[float]:
        apart = [super(Separately, self).ops(node, op, rule, [choice])[0] for choice in choices]
        assert apart == super().ops(node, op, rule, choices)
        return apart


def test_what_choices_have_in_common_is_priced_once_and_rightly() -> None:
    cluster = Cluster.load("h100")
    link = cluster.link(4, 1)
    solve_axis(llama(1), AxisProblem("cp", 4, Separately(4, cluster.device, link, 8), "sequence"))


def test_what_changes_cost_depends_on_kinds_and_whether_a_dim_is_laid_out_anew() -> None:
    """Which is why one of each is priced for an edge."""
    cluster = Cluster.load("h100")
    kinds = [I, R, P, S(0), S(1), S(1, 2), S(2, 4)]
    pairs = tuple((a, b) for a in kinds for b in kinds if a != b)
    scalar, tensor = Meta((), torch.float32, needs_grad=True), Meta((4, 8, 16), torch.bfloat16)
    for prices in (RankPrices(4, cluster.device, cluster.link(4, 1), 8), MicrobatchPrices(), MicrobatchPrices(True)):
        for meta, per_step, from_tables in itertools.product((scalar, tensor), (False, True), (False, True)):
            found = prices.changes(meta, pairs, per_step=per_step, from_tables=from_tables)
            by_kinds: dict[tuple[str, str, bool], set[float | None]] = defaultdict(set)
            for (a, b), price in zip(pairs, found, strict=True):
                assert price == prices.change(meta, a, b, per_step=per_step, from_tables=from_tables)
                by_kinds[a.kind, b.kind, a.is_shard and a.dim == b.dim].add(price)
            assert all(len(some) == 1 for some in by_kinds.values())
            assert len({price for some in by_kinds.values() for price in some}) > 1


def test_what_depends_on_the_batch_alone_is_computed_where_a_message_takes_longer() -> None:
    """Rotary tables, in each of many microbatches; of the labels' count, a rank's part is summed once a step."""
    model, sample = batch_of(64)
    found = compile_pinned(model, 4, sample=sample, cluster=NODES, mesh={"dp": 4}, microbatches=16)
    (tables,) = (block for block in found.lowered.blocks if block.kind == "tables")
    assert {info(node).types()["dp"] for node in tables.outputs} == {R, P, S(0)}  # S(0): labels, shifted
    assert not [node for node in tables.ops if op_name(node) in ("all_gather", "convert")]
