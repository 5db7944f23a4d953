"""What uneven loads of experts cost, and where hot experts are put."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from transformers import MixtralConfig, MixtralForCausalLM

from autopar.cluster import Cluster
from autopar.graph import Model, info, op_name
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.block_costs import BlockCost, Machine, block_cost
from autopar.planner.build import Built, Request, build
from autopar.planner.expert_costs import Reckoning, reckon
from autopar.planner.expert_places import place
from autopar.planner.saved import BlockSaved, saved_tensors
from autopar.planner.wanted import Wanted
from tests.fast_cluster import FAST
from tests.pinned import PINNED
from tests.random_models import Gated, Recipe, case_of
from tests.shared_captures import compile_shared, graph_of

H100 = Cluster.load("h100")
PROPORTIONAL = replace(
    H100,
    device=replace(H100.device, launch_seconds=0.0, ramp_seconds=0.0, ramp_seconds_by_dtype={}, multiprocessors=0),
    intra_node=replace(H100.intra_node, latency_seconds=0.0, call_seconds=0.0),
)
"""Twice as much work takes twice as long."""

LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def mixtral() -> Model:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(4, 16384, dtype=torch.long)
    return graph_of(model, {"input_ids": ids, "labels": ids})


def planned(imbalance: float = 1.0, load: dict[str, Sequence[float]] | None = None) -> Built:
    mesh, wanted = Mesh.of({"dp": 4, "ep": 4}, 4), Wanted("1f1b", "redistributed")
    options = Options(expert_imbalance=imbalance)
    return build(mixtral(), Request(mesh, 1, Cluster.load("h100"), wanted, options, load or {}))


def costs(built: Built) -> tuple[BlockCost, BlockSaved, list[fx.Node]]:
    """Of a layer, as its graph says it now: costs, what it keeps, and the ops about rows of experts."""
    block = next(block for block in built.model.blocks if block.kind == "layer")
    cost = block_cost(block, Machine.of(PROPORTIONAL, built.plan.mesh))
    routed = [
        n for n in block.ops if any(k.is_ragged for c in info(n).choices.values() for k in (*c.operands, c.result))
    ]
    return cost, saved_tensors(block), routed


@pytest.fixture(scope="module")
def built() -> Built:
    """With even loads."""
    return planned()


def test_what_is_done_for_experts_costs_as_on_the_fullest_rank(built: Built) -> None:
    """Twice as many rows of experts take twice the time and memory; tokens that come and go stay as they are."""
    assert {row.ranks for row in built.plan.experts} == {4}
    even, kept, routed = costs(built)
    reckon(built.model, built.plan.mesh, Reckoning(2.0))
    uneven, more, _ = costs(built)
    assert {"dispatch", "grouped_linear", "combine"} <= {op_name(node) for node in routed}
    for node, seconds in even.op_seconds.items():
        longer, is_at_end = uneven.op_seconds[node], op_name(node) in ("dispatch", "combine")
        if node in routed and is_at_end:
            assert 1.5 * seconds < longer < 2 * seconds, node
        else:
            assert longer == pytest.approx(seconds * (2 if node in routed else 1)), node
    assert uneven.backward_seconds > even.backward_seconds
    for node, bytes_ in kept.owned_bytes.items():
        rows = node in routed and op_name(node) != "combine"
        assert more.owned_bytes[node] == bytes_ * (2 if rows else 1), node


def test_a_plan_reckons_with_the_imbalance_that_is_asked_for(built: Built) -> None:
    even, uneven = built.plan, planned(imbalance=2.0).plan
    assert {row.imbalance for row in uneven.experts} == {2.0}
    assert uneven.step_seconds > even.step_seconds
    assert uneven.stage_plans[0].saved_bytes > even.stage_plans[0].saved_bytes


def test_measured_loads_decide_for_each_layer() -> None:
    """An order only where it helps; costs of layers that share code are their mean."""
    built = planned(load={LAYERS[0]: [9, 9, 1, 1, 1, 1, 1, 1], LAYERS[1]: [5, 1, 5, 1, 5, 1, 5, 1]})
    first, second = built.plan.experts
    assert sorted(first.order) == list(range(8))
    assert first.order != second.order == []
    assert first.order.index(0) // 2 != first.order.index(1) // 2
    assert (first.imbalance, first.bound) == pytest.approx((10 / 6, 10 / 6))
    assert second.imbalance == 1.0
    assert built.plan.explain_experts().splitlines() == [
        f"experts of {LAYERS[0]}: 8, of which a token takes 2; 2 on each of 4 ranks of ep, S(0)",
        "  a rank sends tokens of 48 MiB to experts of other ranks, and gets as much back",
        "  the fullest rank is reckoned with 1.67 times its share of tokens (no placement is below 1.67); "
        "hot ones are stored apart",
        f"experts of {LAYERS[1]}: 8, of which a token takes 2; 2 on each of 4 ranks of ep, S(0)",
        "  a rank sends tokens of 48 MiB to experts of other ranks, and gets as much back",
    ]
    block = next(block for block in built.model.blocks if block.kind == "layer")
    product = next(node for node in block.ops if op_name(node) == "grouped_linear")
    assert info(product).imbalance == pytest.approx((10 / 6 + 1) / 2)


def smallest(load: Sequence[float], ranks: int) -> float:
    """The load of the fullest rank, of all placements the best."""
    each = len(load) // ranks

    def after(rest: tuple[int, ...], fullest: float) -> float:
        if not rest:
            return fullest
        first, *others = rest
        found = []
        for more in itertools.combinations(others, each - 1):
            left = tuple(e for e in others if e not in more)
            found.append(after(left, max(fullest, load[first] + sum(load[e] for e in more))))
        return min(found)

    return after(tuple(range(len(load))), 0.0)


@pytest.mark.parametrize(("experts", "ranks"), [(4, 2), (8, 2), (8, 4), (9, 3)])
def test_places_are_the_best(experts: int, ranks: int) -> None:
    draw = random.Random(experts * ranks)
    for _ in range(5):
        load = [draw.paretovariate(1.2) for _ in range(experts)]
        found = place(load, ranks)
        each = experts // ranks
        stored = [load[expert] for expert in found.order]
        fullest = max(sum(stored[first : first + each]) for first in range(0, experts, each))
        mean = sum(load) / ranks
        assert sorted(found.order) == list(range(experts))
        assert found.worst == pytest.approx(fullest / mean)
        assert found.worst <= 1.006 * smallest(load, ranks) / mean
        assert found.bound <= smallest(load, ranks) / mean * (1 + 1e-9)


def test_many_experts_are_placed_near_the_bound() -> None:
    draw = random.Random(0)
    load = [draw.gammavariate(2, 1) for _ in range(256)]
    found = place(load, 32)
    assert found.bound <= found.worst <= 1.01 * found.bound


def test_even_loads_leave_experts_where_they_are() -> None:
    assert place([3.0] * 8, 4).order == tuple(range(8))
    assert place([0.0, 2.0, 0.0, 2.0], 2) == replace(place([1.0] * 4, 2), order=(0, 1, 2, 3))


def test_an_expert_with_a_routing_of_its_own_is_reckoned_to_get_its_share() -> None:
    """Experts of several widths aren't one parameter: each has a routing for itself, and rows of a fourth of the slots,
    not of all."""
    even, uneven = (case_of(Recipe(mlp="experts")) for _ in range(2))
    for layer in uneven.model.layers:
        width = layer.mlp.experts[0].down.in_features
        sizes = (width // 2, width // 2, 3 * width // 2, 3 * width // 2)
        layer.mlp.experts = nn.ModuleList([Gated(Recipe(), size) for size in sizes]).double()
    given = {**PINNED, "recompute": "none", "microbatches": 2, "cluster": FAST, "mesh": {"cp": 2}}
    jobs = [compile_shared(case.model, 2, sample=case.batch, **given) for case in (even, uneven)]
    assert ["of=4" in job.job.texts[0] for job in jobs] == [False, True]
    assert jobs[0].plan.cost.model_flops == jobs[1].plan.cost.model_flops
    assert jobs[1].audit().ok
    assert max(map(abs, jobs[1].memory(uneven.batch, measure="simulate").errors)) < 0.02
