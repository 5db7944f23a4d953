"""Where a step's time goes: parts add up to it, on every rank, and are what the timeline and the costs say."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.cost_models import collective
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.block_costs import Machine, block_cost
from autopar.planner.breakdown import _Moves, _Spent, _walk, model_work, step_parts
from autopar.planner.build import Built, Request, build
from autopar.planner.node_plans import messages
from autopar.planner.wanted import Wanted
from autopar.schedules import Costs, Timeline, generate, lower, simulate_timeline
from autopar.schedules.flow import is_receive
from autopar.schedules.offloads import ALL, Away, offload_activations
from autopar.schedules.weight_moves import WeightMoves
from tests.fast_cluster import BUSY, FAST
from tests.models import llama
from tests.pinned import compile_pinned
from tests.shared_captures import graph_of

SLOW_LINK = replace(FAST.intra_node, bytes_per_second=1e6)
"""So slow that communication can't hide."""


@cache
def prepared(layers: int, splits_sequences: bool = False) -> Model:
    """A small Llama; copies of it are planned."""
    with torch.device("meta"):
        case = llama(16, layers=layers)
    return graph_of(case.model, case.batch, None, splits_sequences=splits_sequences)


def built(mesh: dict[str, int], *, cluster: Cluster = FAST, microbatches: int = 8, **options: Any) -> Built:
    """``schedule``, ``chunks`` and ``vocabulary`` are pinned among the options."""
    names = {"schedule": "1f1b", "vocabulary": "redistributed", "chunks": None}
    wanted = Wanted(**{name: options.pop(name, default) for name, default in names.items()})
    sizes = Mesh.of(mesh, math.prod(mesh.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")))
    model = prepared(4, sizes.cp > 1).copy()
    return build(model, Request(sizes, microbatches, cluster, wanted, Options.of(**options)))


def costs_of(found: Built, cluster: Cluster) -> tuple[Machine, list[Any]]:
    machine = Machine.of(cluster, found.plan.mesh, found.plan.options.zero_ranks)
    return machine, [block_cost(block, machine) for block in found.model.blocks]


def on_its_way(timeline: Timeline, rank: int) -> Counter[str]:
    """Seconds of what is on its way for one rank, by the names of parts, counted from the events alone."""
    kinds = {"REDUCE": "reduction", "REDUCE_V": "reduction", "SCATTER": "scatters", "FETCH": "host copies"}
    kinds |= {"OFFLOAD": "host copies", "GATHER": "gathers", "GATHER_V": "gathers"}
    found: Counter[str] = Counter()
    for event in timeline.events:
        seconds = event.end_seconds - event.start_seconds
        if event.action.kind in ("SEND_F", "SEND_B") and event.action.peer == rank:
            found["messages"] += seconds
        elif event.rank == rank and event.action.kind in kinds:
            found[kinds[event.action.kind]] += seconds
    return found


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pp": 2, "dp": 2}, {}),
    ({"pp": 2, "tp": 2}, {"schedule": "zb-h1", "recompute": "full"}),
    ({"pp": 2, "dp": 2}, {"schedule": "interleaved", "chunks": 2, "zero": 1}),
    ({"pp": 2, "dp": 2}, {"schedule": "v-half", "zero": 3}),
    ({"pp": 4}, {"vocabulary": "vocab-2"}),
    ({"pp": 2, "dp": 2}, {"schedule": "pipedream"}),
    ({"cp": 2, "tp": 2}, {"microbatches": 1, "zero": 2}),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow, id=str(case)) for case in CASES[1:]]


@pytest.mark.parametrize("slow", [False, True], ids=["fast links", "slow links"])
@pytest.mark.parametrize(("mesh", "options"), [pytest.param(*CASES[0], id="1f1b"), *SLOW])
def test_parts_add_up_to_the_step_on_every_rank(mesh: dict[str, int], options: dict[str, Any], slow: bool) -> None:
    cluster = replace(FAST, intra_node=SLOW_LINK, inter_node=SLOW_LINK) if slow else FAST
    found = built(mesh, cluster=cluster, **options)
    timeline = found.pipeline.timeline
    machine, costs = costs_of(found, cluster)
    for rank in range(timeline.schedule.ranks):
        parts = step_parts(found.model, found.pipeline, costs, machine, found.plan.options, rank)
        assert math.fsum(p.exposed_seconds for p in parts) == pytest.approx(timeline.makespan_seconds, rel=1e-9)
        moved: Counter[str] = Counter()
        for part in parts:
            moved[part.name] += part.exposed_seconds + part.hidden_seconds
        for name, seconds in on_its_way(timeline, rank).items():
            if name != "gathers" or options.get("zero") != 3:  # some of those are begun by passes themselves
                assert moved[name] == pytest.approx(seconds, rel=1e-9, abs=1e-15)
    busiest = max(timeline.busy_seconds)
    assert timeline.busy_seconds[found.plan.cost.rank] == busiest
    assert found.plan.cost.step_seconds == timeline.makespan_seconds


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 3), ("zb-h1", 2), ("1f1b", 1), ("1f1b", 0)])
def test_what_collectives_slow_is_a_part_of_its_own(schedule: str, zero: int) -> None:
    """It is all by which passes differ from those of a device on which collectives hold nothing."""
    held = {name: replace(getattr(BUSY, name), held_multiprocessors=0) for name in ("intra_node", "inter_node")}
    busy, free = (
        built({"pp": 2, "dp": 4}, cluster=cluster, microbatches=4, schedule=schedule, zero=zero)
        for cluster in (BUSY, replace(BUSY, **held))
    )
    slowed, ours, theirs = busy.pipeline.slowed, busy.pipeline.timeline.costs, free.pipeline.timeline.costs
    assert not any(map(any, free.pipeline.slowed))
    for stage, more in enumerate(slowed):
        assert ours.forward_seconds[stage] == pytest.approx(theirs.forward_seconds[stage] + more.forward)
        assert ours.backward_seconds[stage] == pytest.approx(theirs.backward_seconds[stage] + more.backward)
        assert more.backward > 0
        assert (more.forward > 0) == (zero == 3), "of a model this small, what a step gathers is one message"
        if schedule == "zb-h1":
            assert ours.weight_seconds[stage] == pytest.approx(theirs.weight_seconds[stage] + more.weights)
            assert more.weights == more.backward, "weights are gathered once a step"
    for name in ("gather_seconds", "scatter_seconds", "reduce_seconds"):
        assert getattr(ours, name) == getattr(theirs, name)
    machine, costs = costs_of(busy, BUSY)
    timeline = busy.pipeline.timeline
    for rank in range(2):
        parts = step_parts(busy.model, busy.pipeline, costs, machine, busy.plan.options, rank)
        assert math.fsum(p.exposed_seconds for p in parts) == pytest.approx(timeline.makespan_seconds, rel=1e-9)
        stages = [stage for stage, home in enumerate(timeline.schedule.placement) if home == rank]
        expected = 4 * math.fsum(slowed[stage].forward + slowed[stage].backward for stage in stages)
        found = math.fsum(part.exposed_seconds for part in parts if part.name == "contention")
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_casts_of_masters_are_a_part_of_their_own(zero: int) -> None:
    """Once a step before all passes, or with each of 8 forwards and backwards."""
    model = prepared(4).copy()
    wide = {name: replace(known, master=torch.float64) for name, known in model.parameters.items()}
    request = Request(Mesh(pp=2, dp=2), 8, FAST, Wanted("1f1b", "redistributed"), Options(zero=zero))
    found = build(replace(model, parameters=wide), request)
    casts, rank = found.pipeline.casts, found.plan.cost.rank
    once, passes = casts.once[rank], casts.passes[rank]
    assert (once > 0, passes > 0) == (zero < 3, zero == 3)
    assert found.plan.cost.exposed_seconds("casts") == pytest.approx(once + 2 * 8 * passes)
    parts = math.fsum(part.exposed_seconds for part in found.plan.cost.parts)
    assert parts == pytest.approx(found.plan.cost.step_seconds, rel=1e-9)
    begins = found.pipeline.timeline.costs.begin_seconds[rank]
    assert found.plan.cost.exposed_seconds("scalars") >= begins - once >= 0


def walked(timeline: Timeline, rank: int) -> dict[str, float]:
    """What a rank waits for, by name."""
    spent = _Spent()
    machine = Machine.of(FAST, Mesh(pp=timeline.schedule.ranks, dp=2))
    _walk(timeline, rank, _Moves(machine, Options(), timeline, rank), spent)
    return {key[0]: math.fsum(terms) for key, terms in spent.exposed.items()}


def test_waits_of_a_pipeline_by_hand() -> None:
    """Two ranks, GPipe, two microbatches; a forward of 1, a backward of 2, messages of 0.5, a reduction of 1.

    Rank 0: forwards 0-2. Rank 1: 1.5-2.5, 2.5-3.5, backwards 3.5-5.5 and 5.5-7.5. Their gradients arrive at 6 and 8:
    rank 0's backwards are 6-8 and 8-10, its reduction 10-11, its step 11-11.25.
    """
    schedule = lower(generate("gpipe", 2, 2))
    options = {"send_seconds": 0.5, "reduce_seconds": 1.0, "step_seconds": 0.25}
    costs = Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=2.0, **options)
    timeline = simulate_timeline(schedule, costs)
    assert timeline.makespan_seconds == 11.25
    assert walked(timeline, 0) == pytest.approx({"messages": 0.5, "bubble": 3.5, "reduction": 1.0})
    # Rank 1 waits for the first activation, 1 of compute and 0.5 of transfer, and at the end for rank 0's step.
    assert walked(timeline, 1) == pytest.approx({"messages": 0.5, "bubble": 1.0 + 2.5, "reduction": 1.0})


def test_weights_that_stream_are_waited_for_within_passes() -> None:
    """One rank, one microbatch: the gather of 3 s of a forward of 1 s takes 2 s longer than it."""
    schedule = lower(generate("1f1b", 1, 1), moves=WeightMoves("pass"))
    plain = Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=4.0)
    timeline = simulate_timeline(schedule, replace(plain, gather_seconds=(3.0,)))
    spent = walked(timeline, 0)
    assert spent["gathers"] == pytest.approx(timeline.makespan_seconds - 5.0)
    assert spent["gathers"] >= 2.0


def test_a_backward_waits_for_what_comes_back_from_the_host() -> None:
    """Four forwards of 1 s can't hide copies of 3 s each way."""
    schedule = offload_activations(lower(generate("1f1b", 2, 4)), Away({0: ALL}))
    plain = Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=2.0, activation_bytes=100)
    timeline = simulate_timeline(schedule, replace(plain, offload_seconds=(3.0, 3.0), offload_bytes=(50, 50)))
    spent = walked(timeline, 0)
    assert spent["host copies"] > 0
    assert math.fsum(spent.values()) == pytest.approx(timeline.idle_seconds[0])


def test_every_receive_has_its_message() -> None:
    """Messages are those of the events, none twice: a rank's receives and the messages to it are as many."""
    schedule = lower(generate("zb-v", 4, 8))
    timeline = simulate_timeline(
        schedule, Costs.uniform(schedule, forward_seconds=1, backward_seconds=2, send_seconds=0.3)
    )
    machine = Machine.of(FAST, Mesh(pp=4))
    for rank in range(4):
        moves = _Moves(machine, Options(), timeline, rank)
        _walk(timeline, rank, moves, _Spent())
        received = [event for event in timeline.events if event.rank == rank and is_receive(event.action)]
        assert len(moves.messages) == len(received) == len(moves.sent)
        assert len({(move.start, move.end) for move in moves.messages}) > len(received) // 2


class Products(nn.Module):
    """Two products of ``[64, 32]`` and nothing else that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 128, bias=False)
        self.second = nn.Linear(128, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


def test_mfu_of_products_by_hand() -> None:
    """The first product has one more in the backward, for its weight (the input has no gradient), the second two."""
    products = [2 * 64 * 32 * 128 * 2, 2 * 64 * 128 * 16 * 3]
    for mesh, gpus in (({"dp": 1}, 1), ({"dp": 2}, 2), ({"tp": 2}, 2)):
        plan = compile_pinned(Products(), gpus, sample=torch.ones(64, 32), mesh=mesh, cluster="a100").plan
        assert plan.cost.model_flops == sum(products)
        assert (plan.cost.dtype, plan.cost.peak_flops_per_second) == (
            "float32",
            Cluster.load("a100").device.rate("float32"),
        )
        assert plan.mfu == pytest.approx(sum(products) / (plan.step_seconds * gpus * plan.cost.peak_flops_per_second))
        assert 0 < plan.mfu < 1


def test_what_is_computed_again_is_no_work_of_the_model() -> None:
    plain, again = (built({"pp": 2}, recompute=mode).plan for mode in ("none", "full"))
    assert plain.cost.model_flops == again.cost.model_flops
    assert plain.cost.exposed_seconds("recomputation") == 0 < again.cost.exposed_seconds("recomputation")
    assert again.mfu < plain.mfu


def test_attention_and_layers_count_as_by_hand() -> None:
    """A layer of this Llama, of 16 rows of 16 tokens: 6 FLOPs per weight and token, and causal attention."""
    with torch.device("meta"):
        model = llama(16, layers=1).model
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    attention = model.config.hidden_size * 16 * 16 * 16 * 2  # two products over half of all pairs, 2 FLOPs each
    found = {layers: model_work(prepared(layers)).flops for layers in (1, 4)}
    assert found[4] - found[1] == 3 * 3 * (2 * weights * 16 * 16 + attention)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "tp": 4}], ids=str)
def test_messages_of_nodes_are_those_that_costs_count(mesh: dict[str, int]) -> None:
    found = built(mesh, microbatches=1)
    machine, costs = costs_of(found, FAST)
    for block, cost in zip(found.model.blocks, costs, strict=True):
        seconds: Counter[tuple[str, str]] = Counter()
        for message in (m for node in block.ops for m in messages(node, machine)):
            axis, kind = message.axis, message.kind
            one = collective.seconds(kind, message.bytes, machine.sizes[axis], machine.links[axis])
            seconds[axis, kind] += message.times * one
        counted = {wire: sum(both) for wire, both in cost.wires.items()}
        for wire, both in cost.hidden.items():
            counted[wire] = counted.get(wire, 0.0) + sum(both)
        assert dict(seconds) == pytest.approx(counted, rel=1e-9)


def test_backwards_add_up_gradients() -> None:
    """Eight microbatches; products that are put off add to the sum by themselves."""
    plain, later = (built({"pp": 2}, schedule=schedule, recompute="none") for schedule in ("1f1b", "zb-h1"))
    for found in (plain, later):
        rank, placement = found.plan.cost.rank, found.pipeline.timeline.schedule.placement
        stages = [stage for stage, home in enumerate(placement) if home == rank]
        accumulated = 8 * sum(found.pipeline.accumulations[stage].seconds for stage in stages)
        assert found.plan.cost.exposed_seconds("accumulation") == pytest.approx(accumulated)
    pairs = zip(plain.pipeline.accumulations, later.pipeline.accumulations, strict=True)
    assert all(0 < b.seconds < a.seconds / 2 for a, b in pairs)


def test_one_microbatch_adds_nothing() -> None:
    assert built({"dp": 1}, microbatches=1).plan.cost.exposed_seconds("accumulation") == 0.0
