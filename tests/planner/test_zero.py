"""What ZeRO moves in a step, in seconds, and the actions that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.cost_models import collective
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.block_costs import DataLine, Machine
from autopar.planner.zero import MoveCosts, weight_moves
from autopar.schedules.weight_moves import MessageSizes, WeightMoves
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

DEPTH, WIDTH = 3, 8
UNIT = 4 * WIDTH * WIDTH
CALLS = range(DEPTH)
LINK = FAST.link(2, 1, 2)


@pytest.fixture(scope="module")
def model() -> Model:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    job = compile_pinned(
        layers, 1, sample=torch.randn(4, WIDTH), loss=lambda y, _: y.square().mean(), cluster=FAST, mesh={"dp": 1}
    )
    return job.lowered


def machine(shard: int, replicate: int = 1, rate: float = 0.0) -> Machine:
    line = DataLine(shard * replicate, shard, LINK, LINK, LINK)
    device, mesh = replace(Cluster.load("h100").device, host_bytes_per_second=rate), Mesh(dp=shard * replicate)
    return Machine(device, {}, mesh, dict.fromkeys(mesh.data_lines(), line))


def costs(model: Any, shard: int, replicate: int = 1, rate: float = 0.0, **options: Any) -> MoveCosts:
    return MoveCosts(model, Options.of(**options), machine(shard, replicate, rate))


def seconds(kind: str, bytes_: int, size: int) -> float:
    return collective.seconds(kind, bytes_, size, LINK)


@pytest.mark.parametrize(
    ("options", "dp", "expected"),
    [
        ({}, 4, WeightMoves()),
        ({"zero": 1}, 4, WeightMoves("step")),
        ({"zero": 2}, 4, WeightMoves("step", True)),
        ({"zero": 3}, 4, WeightMoves("pass", True)),
        ({"zero": 3}, 1, WeightMoves()),
        ({"offload": ("optimizer",)}, 1, WeightMoves("step")),
        ({"offload": ("parameters",)}, 1, WeightMoves("pass")),
        ({"zero": 2, "offload": ("parameters",)}, 4, WeightMoves("pass", True)),
    ],
)
def test_actions(model: Any, options: dict[str, Any], dp: int, expected: WeightMoves) -> None:
    assert weight_moves(model, Options.of(**options), machine(dp).lines.values()) == expected


def test_narrow_copies_of_wide_masters_are_made_once_a_step(model: Any) -> None:
    narrow = {name: replace(known, master=torch.float64) for name, known in model.parameters.items()}
    assert weight_moves(replace(model, parameters=narrow), Options(), machine(1).lines.values()) == WeightMoves("step")


def test_each_level_moves_what_it_splits(model: Any) -> None:
    plain, one, two, three = (costs(model, 4, zero=zero) for zero in range(4))
    assert plain.reduce_seconds(CALLS) == seconds("all_reduce", DEPTH * UNIT, 4)
    assert plain.gather_seconds(CALLS) == plain.scatter_seconds(CALLS) == one.scatter_seconds(CALLS) == 0
    assert one.reduce_seconds(CALLS) == seconds("reduce_scatter", DEPTH * UNIT, 4)
    assert one.gather_seconds(CALLS) == two.gather_seconds(CALLS) == seconds("all_gather", DEPTH * UNIT, 4)
    assert three.gather_seconds(CALLS) == pytest.approx(DEPTH * seconds("all_gather", UNIT, 4))
    for costs_ in (two, three):
        assert costs_.scatter_seconds(CALLS) == pytest.approx(DEPTH * seconds("reduce_scatter", UNIT, 4))
        assert costs_.reduce_seconds(CALLS) == 0


def test_copies_are_summed_once_a_step(model: Any) -> None:
    """Each layer's, where they were scattered so."""
    assert costs(model, 2, 3, zero=3).reduce_seconds(CALLS) == DEPTH * seconds("all_reduce", UNIT // 2, 3)
    assert costs(model, 2, 3, zero=1).reduce_seconds(CALLS) == pytest.approx(
        seconds("reduce_scatter", DEPTH * UNIT, 2) + seconds("all_reduce", DEPTH * UNIT // 2, 3)
    )


@pytest.mark.parametrize("zero", [0, 1])
def test_each_message_of_a_step_has_its_latencies(model: Any, zero: int) -> None:
    """What has a layer's bytes is sent."""
    known = replace(costs(model, 4, zero=zero), sizes=MessageSizes(least_bytes=UNIT))
    kind = "reduce_scatter" if zero else "all_reduce"
    assert known.reduce_seconds(CALLS) == pytest.approx(DEPTH * seconds(kind, UNIT, 4))
    assert known.reduce_seconds(CALLS) > 1.01 * seconds(kind, DEPTH * UNIT, 4)


def test_gradients_travel_in_the_dtype_that_is_asked_for(model: Any) -> None:
    narrow = costs(model, 4, zero=1, reduce_dtype="bfloat16").reduce_seconds(CALLS)
    assert narrow == seconds("reduce_scatter", DEPTH * UNIT // 2, 4)


def test_the_host_gets_and_gives_this_ranks_part(model: Any) -> None:
    there = costs(model, 4, rate=1e6, zero=1, offload=("optimizer",))
    here = costs(model, 4, rate=1e6, zero=1)
    part = DEPTH * UNIT / 4 / 1e6
    assert there.gather_seconds(CALLS) - here.gather_seconds(CALLS) == pytest.approx(part)
    assert there.reduce_seconds(CALLS) - here.reduce_seconds(CALLS) == pytest.approx(part)


def test_casts_of_masters_by_hand(model: Any) -> None:
    """Of the rows that are stored: 8 bytes of a master read, and 4 written; the host casts what lies there."""
    wide = {name: replace(known, master=torch.float64) for name, known in model.parameters.items()}
    rate = Cluster.load("h100").device.achievable_memory_bytes_per_second
    for shards, zero in ((1, 0), (4, 1), (4, 3), (3, 3)):
        rows = -(-WIDTH // shards)
        found = costs(replace(model, parameters=wide), shards, zero=zero).cast_seconds(CALLS)
        assert found == pytest.approx(DEPTH * rows * WIDTH * 12 / rate)
        assert costs(model, shards, zero=zero).cast_seconds(CALLS) == 0.0, "nothing is cast to its own dtype"
    away = costs(replace(model, parameters=wide), 1, rate=1e9, offload=("optimizer",))
    assert away.cast_seconds(CALLS) == 0.0


def test_copies_of_what_travels_together_by_hand(model: Any) -> None:
    """Read and written: a quarter of it where it is sent from, all of it where it arrives; once a step, of all layers
    here, which are small. A layer has one weight, which travels by itself in each pass."""
    rate = Cluster.load("h100").device.achievable_memory_bytes_per_second
    copied = 2 * (DEPTH * UNIT + DEPTH * UNIT // 4) / rate
    for zero, wanted in ((0, 0.0), (1, copied), (2, copied), (3, 0.0)):
        assert costs(model, 4, zero=zero).unpack_seconds(CALLS) == pytest.approx(wanted)
    assert costs(model, 4, zero=1).unpack_seconds(CALLS[:1]) == 0.0
    assert costs(model, 4, zero=1).places(CALLS) == 1
    assert costs(model, 4, zero=3).places(CALLS) == DEPTH


@pytest.mark.parametrize("slow", [False, True])
def test_the_host_casts_beside_its_copies(model: Any, slow: bool) -> None:
    """Masters of 8 bytes: 12 of an element in the host's memory, 4 on the way to the device; the slower one counts."""
    wide = {name: replace(known, master=torch.float64) for name, known in model.parameters.items()}
    here = costs(replace(model, parameters=wide), 4, rate=1e6, zero=1, offload=("optimizer",))
    device = replace(here.machine.device, host_memory_bytes_per_second=2e6 if slow else 9e6)
    there = replace(here, machine=replace(here.machine, device=device))
    part = DEPTH * WIDTH * WIDTH / 4
    sent = costs(model, 4, zero=1).gather_seconds(CALLS)
    assert here.gather_seconds(CALLS) - sent == pytest.approx(4 * part / 1e6)
    assert there.gather_seconds(CALLS) - sent == pytest.approx(12 * part / 2e6 if slow else 4 * part / 1e6)
    assert there.gathering(CALLS).seconds == sent


class _Fixed(MoveCosts):
    """Gathers of ``calls`` take a second for each."""

    def gather_seconds(self, calls: Sequence[int], parts: int = 1) -> float:
        return float(len(calls))

    def places(self, calls: Sequence[int]) -> int:
        return len(calls)


@pytest.mark.parametrize("layer_seconds", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("free_at", [0.0, 2.2])
def test_what_is_left_of_a_gather_is_what_layers_wait_for(model: Model, layer_seconds: float, free_at: float) -> None:
    """Two stages of a rank, layer by layer: a forward's layer starts after the one before and its own weights."""
    stages, forward = ((0, 1, 2), (3, 4)), [3 * layer_seconds, 2 * layer_seconds]
    moves = _Fixed(model, Options(zero=1), machine(2), stages, (0, 0))
    gathered, clock, ends = 0.0, free_at, []
    for stage in stages:
        for _ in stage:
            gathered += 1.0
            clock = max(clock, gathered) + layer_seconds
        ends.append(clock)
    reductions, clock, found = 0.0, free_at, []
    for left, seconds in zip(moves.arrivals(forward), forward, strict=True):
        reductions += left
        clock = max(clock, reductions) + seconds
        found.append(clock)
    assert found == pytest.approx(ends)


@pytest.mark.parametrize("options", [Options(zero=3), Options(zero=1, offload=("optimizer",))])
def test_all_is_left_of_what_no_layer_waits_for_alone(model: Model, options: Options) -> None:
    moves = _Fixed(model, options, machine(2), ((0, 1), (2,)), (0, 1))
    assert moves.arrivals([9.0, 9.0]) == (2.0, 1.0)
