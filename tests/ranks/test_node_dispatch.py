"""Tokens that go once to each node of their experts: equal to one device in float64, whatever else is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar import simulate
from autopar.errors import ArgumentError, PlanError, ShardingError
from autopar.plan import Plan
from autopar.runtime.job import start
from autopar.simulate.measure import measured_memory
from autopar.simulate.predict import predicted_memory
from tests.fast_cluster import NODES, SLOW_NETWORK
from tests.models import Case, Float64, prepared
from tests.moe_models import family
from tests.ranks.test_expert_parallel import (
    WIDTH,
    Mesh,
    check,
    compiled,
    job_batch,
    mixtral,
    to_the_first_experts,
)
from tests.shared_captures import compile_shared

NODE: dict[str, Any] = {"cluster": NODES, "dispatch": "node"}


def by_nodes(case: Case, mesh: Mesh, nodes: int, per_node: int = 2, **options: Any) -> None:
    """Compare, where tokens really go that way."""
    given = {"cluster": replace(SLOW_NETWORK, devices_per_node=per_node), "dispatch": "node", **options}
    assert f"nodes={nodes}" in compiled(case, mesh, **given).source(0)
    check(case, mesh, **given)


@pytest.mark.parametrize("choices", [1, pytest.param(2, marks=pytest.mark.slow), 4])
def test_tokens_of_several_choices(choices: int) -> None:
    by_nodes(mixtral(4, layers=1, choices=choices), {"dp": 4, "ep": 4}, 2)


def test_one_rank_gets_all_tokens() -> None:
    by_nodes(to_the_first_experts(mixtral(4, layers=1)), {"dp": 4, "ep": 4}, 2)


def test_what_is_sent() -> None:
    """By all ranks: four times (there and back, and again in the backward) a row for each other node of a token, and
    one for each slot that isn't of the rank that passes it on; a number for each slot, and its weight, which has a
    gradient; before them, how many there are."""
    case, experts, choices, nodes, width = mixtral(8, choices=3), 8, 3, 2, 2
    ranks = nodes * width
    with Float64():
        logits = case.model(**case.batch, output_router_logits=True).router_logits
    job = compiled(case, {"dp": ranks, "ep": ranks}, **{**NODE, "cluster": SLOW_NETWORK})
    rows = numbers = 0
    for layer in logits:
        homes = layer.topk(choices).indices.view(ranks, -1, choices) // (experts // ranks)
        for rank, tokens in enumerate(homes):
            others = [[home for home in token if home // width != rank // width] for token in tokens.tolist()]
            rows += sum(len({home // width for home in token}) for token in others)
            rows += int((tokens % width != rank % width).sum())
            numbers += sum(map(len, others))
    told = len(logits) * ranks * ((nodes - 1) * (choices + experts // nodes) + (width - 1) * experts // ranks)

    def program(rank: int) -> None:
        start(job.job, job.job.axes(rank, "cpu")).step(job_batch(case))

    traffic = simulate.run(program, ranks, track_memory=False).traffic
    sent = sum(t.sent_bytes for own in traffic for t in own if (t.group, t.operation) == ("ep", "all_to_all"))
    assert sent == 8 * (4 * WIDTH * rows + 3 * numbers + told)


CHOSEN: list[tuple[int, Mesh, int, int]] = [
    (4, {"dp": 4, "ep": 4}, 2, 2),
    (4, {"dp": 4, "tp": 2, "ep": 8}, 4, 2),  # where tokens are split over tp, fewer go across
    (2, {"dp": 4, "tp": 2, "ep": 8}, 4, 1),
    (1, {"dp": 4, "ep": 4}, 2, 1),
]


@pytest.mark.parametrize(("choices", "mesh", "per_node", "nodes"), CHOSEN, ids=str)
def test_the_cheaper_form_is_taken(choices: int, mesh: Mesh, per_node: int, nodes: int) -> None:
    case = mixtral(16, choices=choices, layers=1)
    given = {"cluster": replace(SLOW_NETWORK, devices_per_node=per_node)}
    plans = {way: compiled(case, mesh, dispatch=way, **given).plan for way in ("flat", "node", "auto")}
    seconds = {way: plan.step_seconds for way, plan in plans.items()}
    assert [row.nodes for row in plans["auto"].experts] == [nodes]
    assert [row.nodes for row in plans["node"].experts] == [2]
    assert (seconds["node"] < seconds["flat"]) == (nodes > 1)
    assert seconds["auto"] == min(seconds.values())


def test_where_the_host_is_slow_tokens_go_at_once() -> None:
    """By way of nodes there is more to issue, and passes wait for that."""
    choices, mesh, per_node, nodes = CHOSEN[0]
    case, cluster = mixtral(16, choices=choices, layers=1), replace(SLOW_NETWORK, devices_per_node=per_node)
    slow = replace(cluster, device=replace(cluster.device, host_call_seconds=1.0))
    plans = {way: compiled(case, mesh, dispatch=way, cluster=slow).plan for way in ("flat", "node", "auto")}
    assert [row.nodes for row in plans["auto"].experts] == [1] != [nodes]
    assert plans["auto"].step_seconds == plans["flat"].step_seconds < plans["node"].step_seconds


ALL_ELSE: list[tuple[Mesh, int, dict[str, Any]]] = [
    ({"dp": 8, "ep": 8}, 4, {"zero": 3}),
    ({"dp": 8, "ep": 8}, 2, {"per_node": 4}),
    ({"dp": 8, "ep": 4}, 2, {"zero": 2, "zero_ranks": 4}),
    ({"dp": 4, "tp": 2, "ep": 4}, 4, {"zero": 1}),  # each rank of ep has a node for itself
    ({"dp": 2, "tp": 2, "ep": 4}, 2, {"recompute": "full"}),  # rows over ep and tp
    ({"dp": 2, "cp": 2, "ep": 4}, 2, {}),
    ({"dp": 4, "tp": 2, "ep": 4}, 2, {"per_node": 4}),
    ({"dp": 4, "ep": 4}, 2, {"microbatches": 2, "recompute": "selective"}),
    ({"pp": 2, "dp": 4, "ep": 4}, 2, {"microbatches": 4, "schedule": "zb-h1", "zero": 2}),
    ({"pp": 2, "dp": 4, "ep": 4}, 2, {"microbatches": 2, "schedule": "1f1b"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "nodes", "options"), ALL_ELSE, ids=str)
def test_with_all_else(mesh: Mesh, nodes: int, options: dict[str, Any]) -> None:
    by_nodes(mixtral(4 * mesh["dp"]), mesh, nodes, **options)


def shared_experts() -> Case:
    with Float64():
        return prepared(lambda: family("qwen2_moe", 4, layers=1, output_router_logits=False))


def test_shared_experts_run_while_tokens_go_across() -> None:
    case = shared_experts()
    source = compiled(case, {"dp": 4, "ep": 4}, **NODE).source(0)
    meanwhile = source[source.index("dispatch_start(") : source.index("dispatch_end(flight)")]
    assert "shared_expert.down_proj.weight" in meanwhile
    by_nodes(case, {"dp": 4, "ep": 4}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_of_other_families(name: str) -> None:
    with Float64():
        case = prepared(lambda: family(name, 8))
    by_nodes(case, {"dp": 4, "ep": 4}, 2, zero=1)


@pytest.mark.slow
def test_bf16_is_as_near_as_flat() -> None:
    """A sum of a node is rounded once more on its way."""
    case = prepared(lambda: family("mixtral", 8, layers=2, output_router_logits=False), torch.float32)
    given = {"precision": "bf16", "cluster": NODES}
    for dispatch in ("flat", "node"):
        job = compile_shared(
            case.model, 4, sample=case.batch, mesh={"dp": 4, "ep": 4}, microbatches=1, dispatch=dispatch, **given
        )
        result = job.verify(case.batch, steps=2)
        assert result.ok, f"{dispatch}\n{result}"


@pytest.mark.slow
def test_memory_of_the_fullest_rank_is_what_was_predicted() -> None:
    case, mesh, given = mixtral(32, choices=4), {"dp": 4, "ep": 4}, {"cluster": SLOW_NETWORK, "dispatch": "node"}
    with Float64():
        load = compiled(case, mesh, **given).simulate(case.batch).expert_load[0]
    job = compiled(case, mesh, expert_load=load, **given)
    assert "nodes=2" in job.source(0)
    predicted = max(m.peak_bytes for m in predicted_memory(job.job, job_batch(case)))
    measured = max(m.peak_bytes for m in measured_memory(job.job, job_batch(case)))
    assert predicted == pytest.approx(measured, rel=0.03)


def test_a_plan_says_how_tokens_go() -> None:
    case = mixtral(4, layers=1)
    flat, node = (compiled(case, {"dp": 4, "ep": 4}, **{**NODE, "dispatch": way}).plan for way in ("flat", "node"))
    assert "once to each of 2 nodes that has a token's experts" in node.explain_experts()
    assert "once to each" not in flat.explain_experts()
    said = "model.layers.0.mlp.experts sends tokens: to all ranks at once -> once to each of 2 nodes"
    assert said in flat.diff(node)
    assert Plan.from_json(node.to_json()) == node
    again = compiled(case, {"dp": 4, "ep": 4}, cluster=NODES, plan=node)
    assert "nodes=2" in again.source(0)


def test_a_plan_of_other_nodes_is_refused() -> None:
    case = mixtral(4, layers=1)
    plan = compiled(case, {"dp": 4, "ep": 4}, **NODE).plan
    rows = [row.model_copy(update={"nodes": 4}) for row in plan.experts]
    other = plan.model_copy(update={"experts": rows}).sealed()
    with pytest.raises(PlanError, match="in the plan tokens go by way of 4 nodes, but there are 2"):
        compiled(case, {"dp": 4, "ep": 4}, cluster=NODES, plan=other)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"dp": 2, "ep": 2}, "the 2 ranks that its experts are split over lie in one node of 2 devices"),
        ({"dp": 6, "ep": 3}, "the 3 ranks that its experts are split over don't lie alike in all nodes of 2 devices"),
    ],
)
def test_where_there_is_only_one_form(mesh: Mesh, words: str) -> None:
    case = mixtral(6, experts=6, layers=1)
    with pytest.raises(ShardingError, match=f"dispatch='node', but {words}; use dispatch='flat' or 'auto'"):
        compiled(case, mesh, **NODE)
    assert "nodes=" not in compiled(case, mesh, cluster=NODES).source(0)


def test_other_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dispatch='nodes': Input should be 'auto', 'flat' or 'node'"):
        compiled(mixtral(4, layers=1), {"dp": 4, "ep": 4}, dispatch="nodes")
