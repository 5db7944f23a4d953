"""What is pinned stays, what contradicts itself is refused with what would work."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar import Cluster
from autopar.errors import ArgumentError, AutoparError
from autopar.planner.build import Built
from autopar.search import choose
from autopar.search.space import regions
from tests.pinned import PINNED
from tests.search.spaces import pins_of, prepared, search_of

CPU = Cluster.load("cpu")


def chosen(gpus: int, **given: Any) -> Built:
    return choose(prepared("mlp", 4), pins_of(gpus, **given), CPU, {})


def test_a_part_of_a_mesh_stays() -> None:
    found = regions(search_of("mlp", 4, 4, CPU, mesh={"pp": 2}).sizes, pins_of(4, mesh={"pp": 2}))
    assert {region.mesh.pp for region in found} == {2}
    assert {(region.mesh.replicas, region.mesh.tp) for region in found} >= {(2, 1), (1, 2)}
    plan = chosen(4, mesh={"pp": 2}, microbatch=1, zero=1).plan
    assert (plan.mesh.pp, plan.mesh.world, plan.options.zero) == (2, 4, 1)
    assert plan.batch_size == plan.microbatches * plan.mesh.replicas
    assert plan.search is not None
    assert {"pp", "zero", "microbatch"}.isdisjoint(plan.search.free)
    assert {"dp", "tp", "schedule"} <= set(plan.search.free)


def test_everything_pinned_is_built_without_a_search() -> None:
    plan = chosen(2, mesh={"pp": 2}, microbatches=2, chunks=1, **PINNED).plan
    assert plan.search is None
    assert (plan.mesh.pp, plan.microbatches, plan.schedule) == (2, 2, "1f1b")


@pytest.mark.parametrize(
    ("gpus", "given", "words"),
    [
        (4, {"mesh": {"pp": 3}}, "use gpus=3"),
        (4, {"mesh": {"xx": 2}}, "unknown axes"),
        (4, {"mesh": {"tp": 0}}, "'tp' has size 0"),
        (4, {"mesh": {"tp": -2}}, "'tp' has size -2"),
        (4, {"mesh": {"tp": True}}, "'tp' has size True"),
        (4, {"microbatches": 0}, "microbatches=0"),
        (4, {"microbatch": True}, "microbatch=True"),
        (4, {"chunks": -1}, "chunks=-1"),
        (4, {"microbatch": 3}, "divide"),
        (2, {"mesh": {"dp": 2}, "microbatch": 3}, r"microbatch may be one of \[1, 2\]"),
        (2, {"mesh": {"dp": 2}, "microbatches": 3}, r"microbatches may be one of \[1, 2\]"),
        (2, {"mesh": {"dp": 2}, "microbatches": 2, "microbatch": 2}, "leave one of the two out"),
        (2, {"schedule": "nope"}, "nope"),
        (2, {"vocabulary": "nope"}, "nope"),
        (2, {"mesh": {"pp": 2}, "vocabulary": "interlaced"}, "can't be split over the pipeline"),
        (2, {"budget_bytes": 1 << 60}, "use budget_bytes="),
        (2, {"mesh": {"pp": 2}, "chunks": 4}, "use pp x chunks <= "),
        (2, {"mesh": {"pp": 2}, "chunks": 4, "schedule": "interleaved"}, "use pp x chunks <= "),
        (4, {"chunks": 10**17}, "pp x chunks <= 6; go without chunks="),
        (4, {"chunks": 10**17, "schedule": "interleaved"}, "pp x chunks <= 6; go without chunks="),
        (
            20,
            {"mesh": {"dp": 4, "tp": 1}, "vocabulary": "stage"},
            "takes pp <= 4; use gpus=16, or go without vocabulary=",
        ),
        (1, {"powersgd": 2, "zero_ranks": 3}, "; go without what is pinned"),
        (3, {"mesh": {"dp": 8}}, "doesn't divide gpus=3; use other degrees"),
        (4, {"mesh": {"tp": 2}, "schedule": "zb-v", "chunks": 3}, "it takes exactly 2"),
    ],
)
def test_pins_that_cant_be(gpus: int, given: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        chosen(gpus, **given)


WIDE = {"*inward.weight": {"tp": "S(0)"}}


def test_an_axis_that_parameters_are_split_over_has_several_ranks() -> None:
    found = regions(search_of("mlp", 4, 4, CPU).sizes, pins_of(4, placements=WIDE))
    assert {region.mesh.tp for region in found} == {2, 4}
    whole = pins_of(4, placements={"*inward.weight": {"tp": "R"}})
    assert {region.mesh.tp for region in regions(search_of("mlp", 4, 4, CPU).sizes, whole)} == {1, 2, 4}
    assert chosen(2, placements=WIDE).plan.mesh.tp == 2


@pytest.mark.parametrize(
    ("gpus", "mesh", "words"),
    [
        (4, {"dp": 4}, "^placements.* is split over tp, which is 1 with mesh={'dp': 4}"),
        (4, {"tp": 1}, "^placements.* is split over tp, which is 1 with mesh={'tp': 1}"),
        (4, {"pp": 2, "dp": 2}, "^placements.* is split over tp, which is 1 with"),
        (1, {}, "^no degrees of gpus=1 .* tp >= 2, which .*; use gpus=2, or go without placements="),
    ],
)
def test_an_axis_that_parameters_are_split_over_is_not_one_rank(gpus: int, mesh: dict[str, int], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        chosen(gpus, mesh=mesh, placements=WIDE)


@pytest.mark.parametrize("mesh", [pytest.param({}, marks=pytest.mark.slow), {"pp": 2}])
def test_a_synthesized_schedule_is_searched_for(mesh: dict[str, int]) -> None:
    """Of which no bound knows how its ranks work."""
    plan = choose(prepared("gpt2", 4), pins_of(2, mesh=mesh, schedule="synthesized"), CPU, {}).plan
    assert plan.schedule == "synthesized" or plan.mesh.pp == 1
    assert plan.search is not None
    assert plan.search.bound_seconds <= plan.step_seconds


def test_a_prime_number_of_gpus_names_one_that_works() -> None:
    """Seven divide neither the heads nor the sequence, and there are six layers and more."""
    with pytest.raises(ArgumentError, match="gpus=7 can't all be used") as refused:
        choose(prepared("gpt2", 2), pins_of(7), CPU, {})
    works = int(str(refused.value).split("use gpus=")[1].split(",")[0])
    assert works == 6
    assert regions(search_of("gpt2", 2, works, CPU).sizes, pins_of(works))


@pytest.mark.parametrize(
    ("name", "batch", "gpus", "given", "works"),
    [
        ("mlp", 7, 3, {"powersgd": 2}, 7),
        ("mlp", 1, 7, {"mesh": {"pp": 2}}, 4),
        ("gpt2", 1, 31, {"mesh": {"pp": 5}}, 20),
        ("gpt2", 8, 40, {"schedule": "zb-v", "mesh": {"tp": 1, "cp": 1}}, 24),
        ("llama", 8, 1000, {"microbatches": 8, "vocabulary": "stage"}, 256),
        ("llama", 8, 1, {"vocabulary": "vocab-1"}, 2),
    ],
)
def test_a_number_of_gpus_that_is_named_works(
    name: str, batch: int, gpus: int, given: dict[str, Any], works: int
) -> None:
    with pytest.raises(ArgumentError, match=f"use gpus={works}, or "):
        choose(prepared(name, batch), pins_of(gpus, **given), CPU, {})
    search = search_of(name, batch, works, CPU, offload=(), head_chunks=1, **given)
    assert search.glance()


def test_what_cant_run_is_named_as_it_was_pinned() -> None:
    with pytest.raises(ArgumentError) as refused:
        chosen(40, schedule="zb-v", zero=1)
    text = "no degrees of gpus=40 with schedule='zb-v', zero=1 can run, which takes pp x chunks <= 6; use gpus=32, or "
    assert str(refused.value) == text + "go without schedule='zb-v'"


def test_microbatches_of_no_batch_are_named_beside_gpus() -> None:
    """Without them there are degrees of fewer GPUs."""
    with pytest.raises(
        ArgumentError, match="nor does microbatches=3 divide the batch; use gpus=768 without"
    ) as refused:
        choose(prepared("gpt2", 8), pins_of(1000, microbatches=3), CPU, {})
    fits = re.search(r"microbatches may be one of \[(.*?)\]", str(refused.value))
    assert fits is not None
    search = search_of("gpt2", 8, 768, CPU, microbatches=int(fits[1].split(", ")[-1]), offload=(), head_chunks=1)
    assert search.glance()


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_vocabulary_with_its_own_schedule_is_told_so_on_any_degrees(gpus: int) -> None:
    with pytest.raises(ArgumentError, match="has a schedule of its own; leave schedule='zb-1p' out"):
        choose(prepared("gpt2", 1), pins_of(gpus, schedule="zb-1p", vocabulary="interlaced"), CPU, {})
