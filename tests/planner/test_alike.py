"""Stages that are alike are priced once: each price against that of the stage alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.alike import Alike
from autopar.planner.block_costs import DataLine, Machine
from autopar.planner.gradients import GradientCosts
from autopar.planner.pass_memory import PassMemory
from autopar.planner.rank_memory import Storage, rank_state
from autopar.planner.working import Stretch, Working
from autopar.planner.zero import MoveCosts
from autopar.schedules import generate
from autopar.schedules.turns import Turns, turns_of
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

DEPTH, WIDTH = 6, 8
RANKS = 2  # of dp, that share rows
OPTIONS = ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"offload": ("optimizer",)}, {"reduce_dtype": "bfloat16"})


class Layer(nn.Module):
    """``inside`` is as wide as its input or not."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inside)
        self.down = nn.Linear(inside, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@cache
def layers(*inside: int) -> Model:
    model = nn.Sequential(*map(Layer, inside))
    sample, mesh = torch.randn(4, WIDTH), {"dp": RANKS}
    return compile_pinned(
        model, RANKS, sample=sample, loss=lambda y, _: y.square().mean(), cluster=FAST, mesh=mesh
    ).lowered


@dataclass(frozen=True)
class Change:
    """What one weight is beside the others of its kind: the ``position``-th of a layer's; or the whole layer, whose
    code is then its stage's ("written")."""

    layer: int
    position: int
    kind: str  # "frozen", "wide" (trained in float64), "tied" to that of a layer before, or "written"
    far: int = 1  # so many layers before


def changed(model: Model, changes: Sequence[Change]) -> Model:
    calls, parameters = list(model.calls), dict(model.parameters)
    for change in changes:
        call = calls[change.layer]
        name = call.parameters[change.position]
        if change.kind == "tied":
            lent = calls[max(change.layer - change.far, 0)].parameters[change.position]
            if model.parameters[lent].meta == model.parameters[name].meta:
                tied = tuple(lent if place == change.position else own for place, own in enumerate(call.parameters))
                calls[change.layer] = replace(call, parameters=tied)
        elif change.kind == "frozen":
            parameters[name] = replace(parameters[name], trainable=False)
        elif change.kind == "wide":
            parameters[name] = replace(parameters[name], master=torch.float64)
        else:
            calls[change.layer] = replace(call, path="")
    return replace(model, calls=calls, parameters=parameters)


def machine() -> Machine:
    link, mesh = FAST.link(RANKS, 1, RANKS), Mesh(dp=RANKS)
    line = DataLine(RANKS, RANKS, link, link, link)
    device = replace(Cluster.load("h100").device, host_bytes_per_second=1e10)
    return Machine(device, {}, mesh, dict.fromkeys(mesh.data_lines(), line), FAST)


Stages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Pricing:
    model: Model
    options: Options
    stages: Stages
    placement: tuple[int, ...]

    def fresh(self) -> GradientCosts:
        """One that knows of no stage yet."""
        moves = MoveCosts(self.model, self.options, machine(), self.stages, self.placement)
        return GradientCosts(moves, 3, split=True)

    def prices(self, costs: GradientCosts, stage: Sequence[int]) -> tuple[Any, ...]:
        moves = costs.moves
        summed = moves.scatter_seconds(stage), moves.reduce_seconds(stage)
        return moves.gather_seconds(stage), *summed, *costs.accumulation(stage)

    def state(self, stage: Sequence[int]) -> tuple[Any, ...]:
        storage = Storage(self.options, Mesh(dp=RANKS))
        return (
            rank_state(self.model, stage, storage),
            storage.elements(self.model, stage),
            self.passes(storage).of(stage),
        )

    def passes(self, storage: Storage, *, several: bool = True) -> PassMemory:
        """Of blocks that make all gradients of weights at once."""
        places = [tuple(range(len(block.parameters))) for block in self.model.blocks]
        workings = [Working(0, (Stretch(0, 0, all_, all_), Stretch(0, 0))) for all_ in places]
        return PassMemory(self.model, storage, workings, several, Alike(self.model))


def stages_of(starts: Sequence[int]) -> Stages:
    return tuple(tuple(range(a, b)) for a, b in pairwise((0, *sorted(starts), DEPTH)))


def check(model: Model, options: dict[str, Any], stages: Stages, *, loops: bool) -> None:
    """On two ranks that take turns, or on one for each stage."""
    placement = tuple(number % 2 if loops else number for number in range(len(stages)))
    pricing = Pricing(model, Options.of(**options), stages, placement)
    shared, alike = pricing.fresh(), Alike(model)
    states: dict[Any, Any] = {}
    for stage in stages:
        assert pricing.prices(shared, stage) == pricing.prices(pricing.fresh(), stage)
        assert states.setdefault(alike.key(stage), pricing.state(stage)) == pricing.state(stage)


KINDS = ["frozen", "wide", "tied", "written"]
CHANGES = st.builds(Change, st.integers(0, DEPTH - 1), st.integers(0, 2), st.sampled_from(KINDS), st.integers(1, 2))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(WIDTH,) * DEPTH, (WIDTH, 2 * WIDTH) * (DEPTH // 2)]),
    st.lists(CHANGES, max_size=4),
    st.sets(st.integers(1, DEPTH - 1), max_size=DEPTH - 1),
    st.booleans(),
    st.sampled_from(OPTIONS),
)
def test_shared_prices_are_those_of_each_stage_alone(
    inside: tuple[int, ...], changes: list[Change], starts: set[int], loops: bool, options: dict[str, Any]
) -> None:
    check(changed(layers(*inside), changes), options, stages_of(sorted(starts)), loops=loops)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ([Change(4, 0, "tied")], range(1, DEPTH)),
        ([Change(4, 0, "tied", 2)], range(1, DEPTH)),
        ([Change(1, 0, "written"), Change(2, 0, "written")], (1, 3, 5)),
    ],
)
def test_weights_of_several_stages_and_code_between_layers(
    changes: list[Change], starts: Sequence[int], options: dict[str, Any], loops: bool
) -> None:
    check(changed(layers(*(WIDTH,) * DEPTH), changes), options, stages_of(starts), loops=loops)


def test_layers_alike_share_a_price() -> None:
    alike = Alike(layers(*(WIDTH,) * DEPTH))
    assert alike.key((1, 2)) == alike.key((3, 4)) != alike.key((3, 4, 5))
    mixed = Alike(layers(*(WIDTH, 2 * WIDTH) * (DEPTH // 2)))
    assert mixed.key((1, 2)) == mixed.key((3, 4)) != mixed.key((2, 3)), "in order"


@pytest.mark.parametrize("kind", ["frozen", "wide", "tied"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_weight_makes_the_difference(kind: str, position: int) -> None:
    """Layer 3's; where it is tied, the layer that lends it is like this one. The first layer is another block: its
    input has no gradient."""
    alike = Alike(changed(layers(*(WIDTH,) * DEPTH), [Change(3, position, kind)]))
    keys = [alike.key((index,)) for index in range(DEPTH)]
    assert keys[1] == keys[4] == keys[5] != keys[3]
    assert keys[2] == (keys[3] if kind == "tied" else keys[1])


def test_a_weight_that_a_layer_reads_twice_is_none_of_two_alike() -> None:
    model = layers(*(WIDTH,) * DEPTH)
    names = model.calls[3].parameters
    calls = [*model.calls]
    calls[3] = replace(calls[3], parameters=(names[0], names[1], names[0]))
    alike = Alike(replace(model, calls=calls))
    assert alike.key((3,)) != alike.key((2,))


def test_weights_of_another_dtype_or_shape_are_of_another_block() -> None:
    """What a layer's parameters are is part of what makes it a block: so many distinct ones are found."""
    model = nn.Sequential(*(Layer(WIDTH) for _ in range(4)))
    model[1].up.requires_grad_(False)
    job = compile_pinned(model, 1, sample=torch.randn(4, WIDTH), loss=lambda y, _: y.square().mean(), cluster=FAST)
    alike = Alike(job.lowered)
    layer = {call.path: index for index, call in enumerate(job.lowered.calls)}
    assert alike.key((layer["2"],)) == alike.key((layer["3"],)) != alike.key((layer["1"],))


def test_turns_say_what_is_under_way_unless_a_stage_sends_nothing() -> None:
    """There, what others sent stays for longer: the largest is counted. Of layers that are wide, the narrow ones next
    to them hold more than those next to narrow ones."""
    model, stages = layers(WIDTH, WIDTH, WIDTH, WIDTH, 4 * WIDTH, WIDTH), stages_of(range(1, DEPTH))
    turns = turns_of(generate("interleaved", 1, 2, chunks=DEPTH).lists[0])

    def held(model: Model, turns: list[Turns] | None) -> list[list[int]]:
        options = Options.of(zero=2)
        passes = Pricing(model, options, stages, (0,) * DEPTH).passes(Storage(options, Mesh(dp=RANKS)))
        return [list(row) for row in passes.of_rank(stages, turns)]

    known, most = held(model, turns), held(model, None)
    assert known[2] < known[3] <= most[3] == most[2]
    frozen = changed(model, [Change(3, place, "frozen") for place in range(3)])
    assert held(frozen, turns) == held(frozen, None)


@pytest.mark.parametrize("several", [False, True])
def test_a_rank_holds_the_last_messages_of_one_of_its_stages(*, several: bool) -> None:
    """Of one microbatch, of another one than that which runs; a single stage holds its own, if there are several."""
    stages = stages_of((2, 4))
    pricing = Pricing(layers(*(WIDTH,) * DEPTH), Options.of(zero=2), stages, (0,) * len(stages))
    passes = pricing.passes(Storage(pricing.options, Mesh(dp=RANKS)), several=several)
    (first, *_), (alone,) = passes.of_rank(stages), passes.of_rank(stages[:1])
    assert alone == passes.of(stages[0]).beside
    assert all(held >= own for held, own in zip(first, alone, strict=True))
    if not several:
        assert any(held > own for held, own in zip(first, alone, strict=True))
