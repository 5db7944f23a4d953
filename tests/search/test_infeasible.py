"""Where nothing fits, what would is offered, and does."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autopar import Cluster
from autopar.errors import BudgetError, ShardingError, StateError
from autopar.graph import info
from autopar.mesh import Mesh
from autopar.passes.vocabulary import head_of, is_head
from autopar.plan import bytes_text
from autopar.planner.build import Built
from autopar.search import infeasible
from autopar.search import search as searches
from autopar.search.choose import _solved, choose
from autopar.search.infeasible import Relaxation
from autopar.search.infeasible import refusal as refusal_of
from autopar.search.profiles import Key
from autopar.search.search import WORK, Search
from autopar.spmd import R, S
from tests.fast_cluster import FAST, SLOW_NETWORK
from tests.search.spaces import every_point, experts_on, hiding, pins_of, prepared, search_of

CPU = Cluster.load("cpu")
PLAINEST = ("1f1b", None, "redistributed")


def solve(search: Search) -> infeasible.Solved:
    return _solved(search, None)


def relaxations(search: Search) -> list[Relaxation]:
    return infeasible.relaxations(search, solve)


def refusal(gpus: int, **given: Any) -> str:
    with pytest.raises(BudgetError) as refused:
        choose(prepared("mlp", 4), pins_of(gpus, **given), CPU, {})
    return str(refused.value)


def test_offers_work_and_the_cheapest_is_first() -> None:
    """State is 16 bytes an element and 8 of a copy: one stage holds it without ZeRO or offload in no other way (under
    ZeRO 1 and 2, nor while sums of gradients are on their way)."""
    given: dict[str, Any] = {"mesh": {"dp": 2}, "zero": 0, "offload": (), "budget_bytes": 148_500}
    search = search_of("mlp", 4, 2, CPU, **given)
    assert not search.run().outcomes
    offers = relaxations(search)
    assert {"without zero=0", "without offload=()", "with the device's 4 GiB"} <= {offer.change for offer in offers}
    assert all(offer.outcome.layout is None for offer in offers), "which no process could send"
    costs = [offer.outcome.step_seconds * offer.outcome.point.region.mesh.world for offer in offers]
    assert costs == sorted(costs)
    text = refusal(2, **given)
    assert text.startswith("nothing fits on 2 GPUs with mesh={'dp': 2}")
    assert [text.index(str(offer)) for offer in offers] == sorted(text.index(str(offer)) for offer in offers)
    built = choose(prepared("mlp", 4), pins_of(2, **{k: v for k, v in given.items() if k != "zero"}), CPU, {})
    assert max(built.plan.peak_bytes) <= given["budget_bytes"]


def test_nothing_at_all() -> None:
    text = refusal(1, budget_bytes=1000, mesh={"dp": 1}, offload=())
    assert "nothing fits on 1 GPU with mesh={'dp': 1}, budget_bytes=1000, offload=()" in text
    assert "the leanest way found needs" in text
    assert "It fits with the device's 4 GiB" in text
    assert "GPUs with 1000 B each)" in text, "nothing may be on the host"


def fewest(search: Search) -> Mesh:
    """Of the one offer of more GPUs."""
    assert not search.run().outcomes
    (offer,) = (offer for offer in relaxations(search) if offer.change.startswith("on "))
    assert offer.outcome.peak_bytes <= search.costing.whole_budget_bytes
    mesh = offer.outcome.point.region.mesh
    assert offer.change == f"on {mesh.world} GPUs"
    return mesh


@pytest.mark.parametrize(
    ("gpus", "given"),
    [
        (1, {"budget_bytes": 37_000, "offload": (), "head_chunks": 1}),
        (2, {"budget_bytes": 100_000, "offload": (), "mesh": {"dp": 2}, "zero": 3}),
    ],
)
def test_no_fewer_gpus_would_do(gpus: int, given: dict[str, Any]) -> None:
    found = fewest(search_of("mlp", 12, gpus, CPU, **given)).world
    assert found > gpus + 1, "else nothing is shown"
    mesh = {"pp": 1, "cp": 1, "tp": 1} if "mesh" in given else {}
    for fewer in range(gpus + 1, found):
        search = search_of("mlp", 12, fewer, CPU, **(given | {"mesh": mesh}))
        assert not search.run().outcomes, f"{fewer} GPUs would do"


def test_what_only_a_proof_finds_is_offered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"mesh": {"dp": 2}, "zero": 0, "offload": (), "budget_bytes": 148_500}
    search = search_of("mlp", 4, 2, CPU, **given)
    assert not search.run().outcomes
    dived = {offer.change for offer in relaxations(search)}
    monkeypatch.setattr(searches, "dive", lambda search, regions: None)
    assert {offer.change for offer in relaxations(search)} == dived


def test_what_is_placed_for_less_pins_is_not_known_for_more_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be looked for in another process: what is found mustn't depend on that."""
    search, key = search_of("mlp", 4, 2, CPU, mesh={"dp": 2}, offload=(), budget_bytes=100_000), Key(2, 1, 1, 1)
    search.run()
    assert not search.profiler.was_tried(key, Mesh())
    known = list[bool]()

    def freed(other: Search, _: object) -> list[Relaxation]:
        other.profiler.of(key, Mesh(), 1)
        return []

    def more(other: Search, *_: object) -> list[Relaxation]:
        known.append(other.profiler.was_tried(key, Mesh()))
        return []

    monkeypatch.setattr(infeasible, "_freed", freed)
    monkeypatch.setattr(infeasible, "_fewest", more)
    relaxations(search)
    assert search.profiler.was_tried(key, Mesh())
    assert known == [False, True], "without the mesh that was pinned, after both"


@pytest.mark.slow
def test_the_fewest_gpus_of_experts() -> None:
    """With degrees of experts pinned, these stay, and copies are added; without, others are found."""
    given: dict[str, Any] = {
        "budget_bytes": 800_000,
        "offload": (),
        "microbatch": 1,
        "schedule": "1f1b",
        "vocabulary": "redistributed",
    }
    given |= {"zero": 3, "head_chunks": 1, "chunks": 1}
    pinned = fewest(experts_on(CPU, 2, mesh={"dp": 2, "ep": 2}, **given))
    assert (pinned.pp, pinned.tp, pinned.experts) == (1, 1, 2)
    free = fewest(experts_on(CPU, 2, **given)).world
    assert 2 < free <= pinned.world
    for fewer in range(3, free):
        assert not experts_on(CPU, fewer, **given).run().outcomes, f"{fewer} GPUs would do"


def test_what_was_not_proven_is_not_claimed() -> None:
    """Nothing fits where nothing is left to try, or where even state doesn't; else nothing was found to."""
    search = search_of("mlp", 4, 2, CPU, mesh={"dp": 2}, offload=(), budget_bytes=100_000)
    found = search.run()
    assert math.isinf(found.bound_seconds)
    assert str(refusal_of(search, found, solve)).startswith("nothing fits on 2 GPUs with mesh=")
    search.most_work = 1.5 * WORK
    said = str(refusal_of(search, replace(found, bound_seconds=1.0), solve))
    assert said.startswith("nothing was found to fit on 2 GPUs with mesh=")
    assert f"of {found.points} ways, {found.laid_out} were tried; effort=3 may try more)" in said
    few = search_of("mlp", 4, 1, CPU, budget_bytes=30_000, offload=())
    assert str(refusal_of(few, few.run(), solve)).startswith("nothing fits on 1 GPU with")


def test_too_few_gpus_for_the_state_are_told_from_others_at_once() -> None:
    """Each element takes 8 bytes of a parameter, a gradient and two moments; of narrow moments, fewer."""
    search = search_of("mlp", 4, 1, CPU, budget_bytes=30_000, offload=())
    assert search.run().laid_out == 0
    elements = sum(weights.elements for weights in search.root.weights.values())
    assert search.least_gpus == -(-elements * 32 // 30_000)
    narrow = search_of("mlp", 4, 1, CPU, budget_bytes=30_000, offload=(), state_dtype="bfloat16")
    narrow.run()
    assert narrow.least_gpus == -(-elements * 20 // 30_000)
    host = search_of("mlp", 4, 1, CPU, budget_bytes=30_000)
    host.run()
    assert host.least_gpus == -(-elements * 8 // 30_000)
    small = replace(CPU, device=replace(CPU.device, host_memory_bytes=9_000))
    with pytest.raises(BudgetError) as refused:
        choose(prepared("mlp", 4), pins_of(1, budget_bytes=30_000), small, {})
    least = min(-(-elements * 32 // 30_000), -(-elements * 32 // 9_000))
    assert f"alone fill {least} GPUs with 29.3 KiB each and 8.79 KiB of its host)" in str(refused.value)
    with pytest.raises(BudgetError) as refused:
        choose(prepared("mlp", 4), pins_of(2, budget_bytes=30_000, offload=("optimizer",)), small, {})
    lacks = "it is memory of the host that lacks, 8.79 KiB for each GPU: parameters, gradients and moments alone fill"
    assert f"; {lacks} that of {-(-elements * 32 // 9_000)} GPUs)" in str(refused.value)


def test_the_leanest_way_needs_as_little_as_any_of_its_plan() -> None:
    """Whatever a rank has on the host, and in how many chunks it computes the head."""
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e12))
    search, needed = search_of("gpt2", 4, 2, host, mesh={"pp": 2}, budget_bytes=20_000), list[int]()
    search._begin()
    least = infeasible._leanest_bytes(search)
    plain = [point for point in every_point(search) if point.region.rows == 1 and point.family[1:] == PLAINEST]
    for point in plain:
        with pytest.raises(BudgetError) as refused:
            search.lay_out(point)
        needed.append(refused.value.needed_bytes)
    assert len(needed) >= 6
    assert least == min(needed)


def test_the_leanest_way_of_experts_splits_them() -> None:
    """And stores weights on all ranks, though there could be more stages, or longer sequences on each."""
    search, needed = experts_on(FAST, 4, mesh={"tp": 1}, offload=(), head_chunks=1, budget_bytes=20_000), list[int]()
    search._begin()
    least = infeasible._leanest_bytes(search)
    for point in every_point(search):
        if point.region.rows == 1 and point.family[1:] == PLAINEST:
            with pytest.raises(BudgetError) as refused:
                search.lay_out(point)
            needed.append(refused.value.needed_bytes)
    assert len(needed) >= 40
    assert least <= 1.1 * min(needed)
    assert max(needed) > 2 * least, "else nothing is shown"


def test_the_leanest_way_counts_beside_what_was_laid_out() -> None:
    """Which are few, and need not be lean."""
    search = search_of("mlp", 4, 2, CPU, mesh={"dp": 2}, offload=(), budget_bytes=100_000)
    found = search.run()
    assert not found.outcomes
    whole = {point: BudgetError("too much", 10**9) for point in found.refusals}
    assert whole
    said = str(refusal_of(search, replace(found, refusals=whole), solve))
    assert f"the leanest way found needs {bytes_text(infeasible._leanest_bytes(search))} on a rank" in said


@pytest.mark.slow
def test_what_has_no_points_of_the_pinned_chunks_is_no_way_to_save_memory() -> None:
    """Regions without a pipeline, which would hold the least otherwise."""
    pins = pins_of(8, schedule="v-half", chunks=2, recompute="none", budget_bytes=10_000)
    with pytest.raises(BudgetError, match=r"nothing fits on 8 GPUs with schedule='v-half', chunks=2.*pp 2"):
        choose(prepared("llama", 8), pins, CPU, {})


def test_a_head_of_whole_sequences_is_split_over_all_other_ranks() -> None:
    """Where cp splits sequences it leaves the head alone: classes are for pp and tp."""
    mesh = Mesh(pp=5, cp=2, tp=4)
    search = search_of("encoder", 8, 40, SLOW_NETWORK, mesh=mesh.to_json(), vocabulary="vocab-1")
    key = Key(rows=1, ep=1, cp=2, tp=4, head=5, several=True, streamed=True, counted=16)
    found = search.profiler.of(key, mesh, 8)
    assert found is not None
    (head,) = (block for block in found.placed.model.blocks if is_head(block))
    kinds = {axis: {info(node).types()[axis] for node in head_of(head).path} for axis in ("cp", "tp")}
    assert kinds["tp"] == {S(1)}
    assert kinds["cp"] <= {R, S(0)}


def test_what_is_too_large_once_it_is_built_is_neither_planned_nor_offered() -> None:
    """As if ranks that have nothing on the host held as much as their budget that nothing counts."""
    budget = 148_500

    def measured(built: Built, enough: float, hidden: int = budget) -> Built:
        return built if built.plan.options.offload else hiding(hidden)(built, enough)

    pins = pins_of(2, mesh={"dp": 2}, zero=0, budget_bytes=budget)
    assert choose(prepared("mlp", 4), pins, CPU, {}, measured).plan.options.offload
    search = search_of("mlp", 4, 2, CPU, mesh={"dp": 2}, zero=0, budget_bytes=budget, offload=())
    assert not search.run().outcomes
    offered = infeasible.relaxations(search, partial(_solved, measured=measured))
    offers = {offer.change: offer.outcome.point for offer in offered}
    assert "without zero=0" not in offers
    assert offers["without offload=()"].offload
    pins, fits = pins_of(2, mesh={"dp": 2}, budget_bytes=budget, offload=()), r"nothing fits on 2 GPUs with mesh="
    with pytest.raises(BudgetError, match=fits) as refused:
        choose(prepared("mlp", 4), pins, CPU, {}, partial(measured, hidden=budget // 2))
    assert "a rank, which has 145 KiB" in str(refused.value), "all that was given, though some was spared"
    assert "It fits with the device's 4 GiB" in str(refused.value)


def test_where_no_placement_holds_the_state_something_is_offered() -> None:
    """What can't be placed in any memory is another matter."""
    search = search_of("mlp", 4, 4, CPU, mesh={"dp": 2, "tp": 2}, zero=0, offload=(), budget_bytes=40_000)
    found, key = search.run(), Key(rows=1, ep=1, cp=1, tp=2, stages=1)
    assert not found.outcomes
    search.profiler.refused = {key: ShardingError("no placement satisfies every op")}
    assert refusal_of(search, found, solve) is search.profiler.refused[key]
    search.profiler.refused = {key: StateError("no placement satisfies the memory budget", 50_000)}
    said = str(refusal_of(search, found, solve))
    assert said.startswith("nothing fits on 4 GPUs with mesh={'dp': 2, 'tp': 2}, budget_bytes=40000")
    assert "It fits with the device's 4 GiB" in said
