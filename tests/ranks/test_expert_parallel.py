"""Experts split over ranks: equal to one device in float64, whatever else is split; what is sent, and what is held."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar import Cluster, simulate
from autopar.codegen import emit
from autopar.mesh import Mesh as MeshOfAxes
from autopar.runtime.job import start
from autopar.simulate.measure import measured_memory
from autopar.simulate.predict import predicted_memory
from tests.codegen.programs import assert_equal, cut, expected, folded, place_at_random, simulated
from tests.fast_cluster import FAST, NODES, SLOW_NETWORK
from tests.models import Case, Float64, prepared
from tests.moe_models import SEQUENCE, family
from tests.pinned import compile_pinned
from tests.ranks.test_parity import verified

WIDTH, CHOICES, LAYERS = 32, 2, 2
Mesh = dict[str, int]


def mixtral(batch: int, experts: int = 8, layers: int = LAYERS, choices: int = CHOICES) -> Case:
    def made() -> Case:
        return family("mixtral", batch, experts=experts, top_k=choices, layers=layers, output_router_logits=False)

    with Float64():
        return prepared(made)


def to_the_first_experts(case: Case) -> Case:
    """All tokens choose experts 0 and 1: one feature is large in each, and routers read it alone."""
    with torch.no_grad():
        for name, parameter in case.model.named_parameters():
            if "embed_tokens" in name:
                parameter[:, 0] = 50.0
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()
                parameter[:, 0] = -torch.arange(len(parameter), dtype=parameter.dtype)
    return case


def check(case: Case, mesh: Mesh, **options: Any) -> None:
    with Float64():
        result = verified(case, mesh, **options)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


def compiled(case: Case, mesh: Mesh, **options: Any) -> autopar.ParallelModel:
    gpus = math.prod(size for axis, size in mesh.items() if axis not in ("ep", "etp"))
    with Float64():
        return compile_pinned(case.model, gpus, sample=case.batch, mesh=mesh, **{"cluster": FAST, **options})


def forms(job: autopar.ParallelModel) -> dict[str, str]:
    """Axis -> how rows get to experts there."""
    routes = [node for block in job.plan.blocks for node in block.nodes if node.op == "route"]
    return {axis: text.rpartition(" ")[2].strip("[]") for node in routes for axis, text in node.choices.items()}


COMBINED: list[tuple[Mesh, dict[str, Any]]] = [
    ({"dp": 4, "ep": 2}, {"zero": 3, "zero_ranks": 2}),
    ({"dp": 4, "tp": 2, "ep": 2}, {"microbatches": 2, "zero": 2, "recompute": "full"}),
    ({"dp": 2, "tp": 2, "ep": 4}, {"zero": 3}),
    ({"dp": 2, "cp": 2, "ep": 4}, {"recompute": "full"}),
    ({"pp": 2, "dp": 4, "ep": 2}, {"microbatches": 4, "schedule": "zb-h1", "zero": 2}),
    ({"pp": 2, "dp": 2, "cp": 2, "tp": 2, "ep": 4}, {"microbatches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), COMBINED, ids=str)
def test_with_all_else(mesh: Mesh, options: dict[str, Any]) -> None:
    check(mixtral(4 * mesh["dp"]), mesh, **options)


@pytest.mark.slow
def test_more_ranks_share_experts_than_each_has() -> None:
    """ZeRO splits the rows of two experts over four ranks."""
    check(mixtral(8, experts=4), {"dp": 8, "ep": 2}, zero=3)


def test_one_rank_gets_all_tokens() -> None:
    check(to_the_first_experts(mixtral(4, layers=1)), {"dp": 4, "ep": 4})


def chosen(case: Case) -> list[Tensor]:
    """By layer: the experts of each token of the batch, ``[batch, sequence, choices]``, as one device finds them."""
    with Float64():
        logits = case.model(**case.batch, output_router_logits=True).router_logits
    return [layer.topk(CHOICES).indices.view(-1, SEQUENCE, CHOICES) for layer in logits]


def rows_between(index: Tensor, rank: int, ranks: int, experts: int) -> int:
    """Rows that ``rank`` sends to others, and that others send to it, where each has a part of the batch."""
    home = index // (experts // ranks)
    mine = home.chunk(ranks)[rank]
    theirs = torch.cat([part for other, part in enumerate(home.chunk(ranks)) if other != rank])
    return int((mine != rank).sum() + (theirs == rank).sum())


@pytest.mark.parametrize("shape", [mixtral, lambda batch: to_the_first_experts(mixtral(batch))], ids=["any", "one"])
def test_what_is_sent(shape: Any) -> None:
    """There and back in the forward, and again in the backward: each row that leaves or comes is sent by this rank
    twice as 8 bytes times its width. Beside them, before the rows, how many go to each expert."""
    case, ranks, experts = shape(8), 4, 8
    job = compiled(case, {"dp": ranks, "ep": ranks})
    assert forms(job)["ep"] == "exchange"
    counts = LAYERS * (ranks - 1) * (experts // ranks) * 8

    def program(rank: int) -> None:
        start(job.job, job.job.axes(rank, "cpu")).step(job_batch(case))

    traffic = simulate.run(program, ranks, track_memory=False).traffic
    for rank in range(ranks):
        sent = sum(t.sent_bytes for t in traffic[rank] if t.group == "ep" and t.operation == "all_to_all")
        rows = sum(rows_between(index, rank, ranks, experts) for index in chosen(case))
        assert sent == counts + 2 * rows * WIDTH * 8


def job_batch(case: Case) -> dict[str, Tensor]:
    return dict(case.batch)


def test_no_rank_holds_all_experts() -> None:
    case = mixtral(8)
    own = expert_parameters(compiled(case, {"dp": 4, "ep": 4}))
    whole = sum(p.numel() for name, p in case.model.named_parameters() if ".experts." in name)
    assert {parameter.shape[0] for parameter in own} == {8 // 4}
    assert sum(torch.Size(parameter.shape).numel() for parameter in own) == whole // 4


def expert_parameters(job: autopar.ParallelModel) -> list[Any]:
    return [p for stage in job.programs.stages for p in stage.program.parameters if "experts" in p.name]


@pytest.mark.slow
def test_memory_of_the_fullest_rank_is_what_was_predicted() -> None:
    """Once the load is known: the plan reckons with the rank that gets most rows."""
    case, mesh = mixtral(32), {"dp": 4, "ep": 4}
    with Float64():
        load = compiled(case, mesh).simulate(case.batch).expert_load[0]
    job = compiled(case, mesh, expert_load=load)
    predicted = max(m.peak_bytes for m in predicted_memory(job.job, job_batch(case)))
    measured = max(m.peak_bytes for m in measured_memory(job.job, job_batch(case)))
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
def test_where_messages_are_slow_tokens_come_whole() -> None:
    """An all-gather and a reduce-scatter of tokens are fewer messages than four all-to-alls."""
    case = mixtral(4)
    with Float64():
        job = compiled(case, {"dp": 2, "ep": 2}, cluster=Cluster.load("cpu"))
        assert forms(job)["ep"] == "filter"
        assert "filter=[ep]" in job.source(0)
        result = job.verify(case.batch, steps=1)
    assert result.ok, str(result)


@pytest.mark.slow
def test_sixty_four_ranks_with_an_expert_each() -> None:
    case = mixtral(64, experts=64, layers=1)
    with Float64():
        job = compiled(case, {"dp": 64, "ep": 64})
        assert all(parameter.shape[0] == 1 for parameter in expert_parameters(job))
        result = job.verify(case.batch, steps=1)
    assert result.ok, str(result)


def test_where_the_network_is_slow_a_token_goes_once_to_each_node() -> None:
    case = mixtral(4, layers=1, choices=4)
    with Float64():
        job = compiled(case, {"dp": 4, "ep": 4}, cluster=SLOW_NETWORK)
        assert "exchange=[ep], nodes=2" in job.source(0)
        result = job.verify(case.batch, steps=1)
    assert result.ok, str(result)
    assert "nodes=" not in compiled(case, {"dp": 4, "ep": 4}, cluster=NODES).source(0)
    assert "nodes=" not in compiled(case, {"dp": 4, "ep": 4}, cluster=SLOW_NETWORK, dispatch="flat").source(0)


RANDOM = [
    (MeshOfAxes(ep=2, tp=2, borrowed=("tp",)), 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seed"), RANDOM, ids=str)
def test_random_placements(mesh: MeshOfAxes, seed: int) -> None:
    """Any legal placement: planned under random prices."""
    with Float64():
        case = mixtral(4)
        model = folded(case)
        place_at_random(model, mesh, 1, seed)
        programs = emit(model, cut(model, mesh.pp), mesh, microbatches=1, digest="")
        assert_equal(simulated(case, programs, mesh, 1), expected(case), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full"])
def test_shared_experts_run_while_rows_travel(recompute: str) -> None:
    def shared() -> Case:
        return family("qwen2_moe", 4, layers=1, output_router_logits=False)

    with Float64():
        case = prepared(shared)
        job = compiled(case, {"dp": 4, "ep": 4}, recompute=recompute)
        source = job.source(0)
        meanwhile = source[source.index("dispatch_start(") : source.index("dispatch_end(flight)")]
        assert "shared_expert.down_proj.weight" in meanwhile
        result = job.verify(case.batch, steps=2)
    assert result.ok, str(result)
