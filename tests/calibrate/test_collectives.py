"""Which groups are measured, and that all ranks measure the same, on simulated ranks."""

from __future__ import annotations

import pytest
import torch

from autopar.calibrate.clock import Clock
from autopar.calibrate.collectives import groups, measure_collectives
from autopar.calibrate.samples import Effort, Message, cubes
from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.runtime.axes import Axes
from autopar.simulate import run

TINY = Effort(1, 0.0, cubes(8, 16), 1.0, 1 << 12, (64, 4096))


def measured(rank: int, per_node: int = 2) -> tuple[list[Message], list[str]]:
    steps: list[str] = []
    return measure_collectives(Axes.build(Mesh(dp=4), rank, "cpu"), per_node, TINY, steps.append), steps


def test_every_rank_reports_the_same_times() -> None:
    results = run(measured, 4).results
    assert all(result == results[0] for result in results)
    messages, steps = results[0]
    kinds = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    expected = {(kind, link, 2, b) for kind in kinds for link in ("intra_node", "inter_node") for b in (64, 4096)}
    assert {(m.kind, m.link, m.size, m.bytes_) for m in messages} == expected
    assert all(m.seconds > 0 for m in messages)
    assert steps == ["collectives of 2 ranks, intra node", "collectives of 2 ranks, inter node"]


def test_a_rank_without_a_group_does_not_decide_how_often_others_call() -> None:
    """Of 3 ranks one has nobody to talk to in twos: its calls of nothing take no time."""
    clock = Clock(torch.device("cpu"), repeats=1, run_seconds=0.01, agree=lambda seconds: max(seconds, 5e-3))
    assert clock.calls(1e-8) == 2


def test_nodes_must_be_equal() -> None:
    with pytest.raises(ArgumentError, match=r"a world of 4 ranks isn't made of nodes of 3; start as many"):
        measure_collectives(Axes.alone(Mesh(dp=4), 0, "cpu"), 3, TINY, lambda _: None)


@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (6, 6), (12, 4), (12, 3), (5, 1), (16, 8)])
def test_groups_are_of_one_node_or_of_one_place(world: int, per_node: int) -> None:
    by_rank = [list(groups(rank, world, per_node)) for rank in range(world)]
    assert len({tuple((link, size) for link, size, _ in lines) for lines in by_rank}) == 1
    sizes = [(link, size) for link, size, _ in by_rank[0]]
    assert (("intra_node", per_node) in sizes) == (per_node > 1)
    assert (("inter_node", world // per_node) in sizes) == (world > per_node)
    for rank, lines in enumerate(by_rank):
        for position, (link, size, ranks) in enumerate(lines):
            if not ranks:
                continue
            assert rank in ranks
            assert len(ranks) == size
            assert all(by_rank[other][position][2] == ranks for other in ranks)
            assert len({other // per_node for other in ranks}) == (1 if link == "intra_node" else size)
