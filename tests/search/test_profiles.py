"""Models placed once for many points."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from autopar import Cluster
from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.passes.hoist import unhoisted
from autopar.planner.block_costs import Computed, Machine, block_cost
from autopar.planner.build import Request, moved_seconds
from autopar.planner.wanted import Wanted
from autopar.search import outlook, profiles, space
from autopar.search.costing import laid_on, splits_further
from autopar.search.profiles import Key, Profile
from autopar.search.space import Region, moves_each_time, regions
from autopar.search.ways import beside_each_other, of_weights
from autopar.search.wholesale import Ranks, Stored, folded
from tests.fast_cluster import BUSY, FAST
from tests.search.spaces import every_point, search_of

WAY = Stored(0.0, 0.0, 0.0)


def test_a_head_in_chunks_takes_about_as_long() -> None:
    """Its logits fill a device as well as those of the whole head do."""
    profiler = search_of("gpt2", 8, 1, Cluster.load("h100")).profiler
    heads = []
    for chunks in (1, 2):
        profile = profiler.of(Key(8, 1, 1, 1, chunks=chunks), Mesh(), 1)
        assert profile is not None
        heads.append(profile.units[-1].seconds)
    assert heads[0] / 4 < heads[1] < 4 * heads[0]


def test_profiles_say_the_same_whatever_was_placed_before() -> None:
    """They share what is local to microbatches and dp, and what rules said of ops that are alike."""
    jobs = [(Key(1, 1, 1, tp, several=True, copies=True), Mesh(dp=2, tp=tp), 4) for tp in (2, 4, 1)]
    together = search_of("gpt2", 8, 8, Cluster.load("h100")).profiler
    for job in jobs:
        shared, alone = together.of(*job), search_of("gpt2", 8, 8, Cluster.load("h100")).profiler.of(*job)
        assert shared is not None
        assert alone is not None
        assert shared.units == alone.units
        assert str(shared.model) == str(alone.model)


def test_a_placement_that_moves_rows_over_dp_serves_that_dp_alone() -> None:
    """Where links are so slow that ranks compute all rows rather than sum gradients; shapes depend on dp then."""
    link = replace(FAST.intra_node, bytes_per_second=1e7)
    slow, key = replace(FAST, intra_node=link, inter_node=link), Key(2, 1, 1, 1, several=True, copies=True)
    for cluster, moves in ((slow, True), (FAST, False)):
        together, apart = (search_of("mlp", 16, 4, cluster).profiler for _ in range(2))
        four, two, alone = (
            together.of(key, Mesh(dp=4), 2),
            together.of(key, Mesh(dp=2), 4),
            apart.of(key, Mesh(dp=2), 4),
        )
        assert four is not None
        assert two is not None
        assert alone is not None
        assert four.is_of_its_dp == moves == (two is not four)
        assert str(two.model) == str(alone.model)
        split, narrow = (profiler.of(key._replace(tp=2), Mesh(dp=8, tp=2), 1) for profiler in (together, apart))
        assert split is not None
        assert narrow is not None
        assert str(split.model) == str(narrow.model)  # it starts from what is local to another dp, or to its own


def profile_of(mesh: Mesh, *, streamed: bool) -> Profile:
    """Of GPT-2 on a cluster whose collectives slow passes."""
    key = Key(2, 1, 1, mesh.tp, several=True, copies=mesh.dp > 1, streamed=streamed)
    found = search_of("gpt2", 8, mesh.world, BUSY).profiler.of(key, mesh, 2)
    assert found is not None
    return found


def test_costs_elsewhere_are_those_of_blocks_that_are_looked_at_again() -> None:
    """Though what ops compute is known already."""
    profile = profile_of(Mesh(dp=2, tp=2), streamed=False)
    for mesh in (Mesh(dp=2, tp=2), Mesh(pp=2, dp=2, tp=2)):
        machine = Machine.of(BUSY, mesh)
        found = profile.costs_on(machine)
        stays = unhoisted(profile.model)
        blocks = [(block, Computed.of(block, machine.device, stays)) for block in profile.model.blocks]
        again = [block_cost(block, machine, computed) for block, computed in blocks]
        assert found == again
        assert [(cost.op_seconds, cost.wires, cost.hidden) for cost in found] == [
            (cost.op_seconds, cost.wires, cost.hidden) for cost in again
        ]
        assert any(cost.wires for cost in found)


def test_weights_that_move_with_each_microbatch_are_split_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though passes alone are faster with more of them whole, but for sums of a tied table in each backward: placements
    are made as if all sums were hoisted."""
    monkeypatch.setattr(profiles, "unhoisted", lambda model: frozenset())
    mesh = Mesh(dp=2, tp=2)
    plain, streamed = (profile_of(mesh, streamed=each) for each in (False, True))
    assert plain.whole_share > 2 * streamed.whole_share
    assert plain.seconds < streamed.seconds


def test_pipeline_ranks_share_no_weights() -> None:
    """So that these move no differently with more of them, and not at all without ranks that have the same ones."""
    wanted, cluster = Wanted("1f1b", "redistributed"), replace(BUSY, devices_per_node=4)

    def seconds(mesh: Mesh) -> float:
        return moved_seconds(Request(mesh, 2, cluster, wanted))

    assert seconds(Mesh(tp=2)) == seconds(Mesh(pp=2, tp=2)) == 0.0
    assert seconds(Mesh(pp=2, dp=2, tp=2)) == seconds(Mesh(dp=2, tp=2)) == seconds(Mesh(cp=2, tp=2)) > 0.0


def test_points_are_laid_out_on_profiles_that_price_what_they_move() -> None:
    search = search_of("gpt2", 8, 4, BUSY, mesh={"dp": 2, "tp": 2}, offload=(), head_chunks=1)
    search.glance()
    region = Region(Mesh(dp=2, tp=2), 2, 2)
    assert search.place(region) is not None
    points = list(search.points_of(region))
    assert {point.zero for point in points} == {0, 1, 2, 3}
    for point in points:
        outcome = search.lay_out(point)
        assert outcome.key is not None
        assert outcome.key.streamed == moves_each_time(point) == (point.zero >= 2)


def test_what_is_laid_out_on_another_placement_is_bounded_as_if_all_were_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by weights that the fastest passes leave whole, which its own placement may split."""
    monkeypatch.setattr(space, "_near", lambda microbatches: microbatches)  # just two have that effect here
    search = search_of("gpt2", 8, 4, BUSY, mesh={"dp": 2, "tp": 2}, offload=(), head_chunks=1)
    search.glance()
    region = Region(Mesh(dp=2, tp=2), 2, 2)
    plain, outlook = search.place(region), search._outlook
    assert plain is not None
    assert outlook is not None
    point = next(point for point in search.points_of(region) if (point.zero, point.zero_ranks) == (3, 0))
    search.lay_out(point)
    own = search.profiler.known[search.key_of(point)]
    way = point.way
    bounded = outlook._of_point(point, plain)
    really, whole = (outlook._of_profile(region.mesh, each, way, 2, split=False) for each in (own, plain))
    assert bounded.gathered <= really.gathered <= whole.gathered
    assert bounded.state <= really.state <= whole.state
    moved, least = (search.costing._moves(point, each)[0] for each in (own, plain))
    assert least <= moved
    assert search.costing.bound(point, plain) == search.costing._pass_seconds(point, plain), "not what it doesn't move"
    assert search.costing.memory_bound(point, plain) == 0.0


def test_activations_on_the_host_say_nothing_of_weights() -> None:
    """So ways to store these that differ in that alone are looked at once."""
    search = search_of("gpt2", 8, 4, BUSY, mesh={"dp": 2, "tp": 2})
    search.glance()
    region = Region(Mesh(dp=2, tp=2), 2, 2)
    placed, outlook = search.place(region), search._outlook
    assert placed is not None
    assert outlook is not None
    split = partial(outlook._split_in, region.mesh)
    own = partial(outlook._of_profile, region.mesh, placed, microbatches=2, split=False)
    ways = search._ways(region, saving=True)
    for way in ways:
        for stored in (split, own):
            assert stored(way) == stored(way.of_weights)
    assert len(of_weights(ways)) == len(ways) / 2


def test_once_that_placement_is_there_it_is_what_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those that are laid out on the plain one."""
    monkeypatch.setattr(profiles, "unhoisted", lambda model: frozenset())  # else passes are no faster with whole ones
    search = search_of("gpt2", 8, 4, BUSY, mesh={"dp": 2, "tp": 2}, recompute="none", microbatch=2)
    search.glance()
    region = Region(Mesh(dp=2, tp=2), 2, 2)
    plain = search.place(region)
    assert plain is not None
    points = [point for point in every_point(search) if point.region == region]
    further = {point for point in points if splits_further(point, plain)}
    assert {point.zero for point in further} == {0, 1, 2, 3}, "what lives on the host moves with each microbatch, too"
    search.profiler.known.pop(plain.key._replace(streamed=True), None)
    before = dict(zip(points, search.bounds(points, plain), strict=True))
    assert search._place_streamed(region, plain)
    assert not search._place_streamed(region, plain)
    after = dict(zip(points, search.bounds(points, plain), strict=True))
    assert {point for point in points if after[point] != before[point]} == further
    for point in points:
        assert before[point] <= after[point] <= search.lay_out(point).step_seconds * (1 + 1e-9)


def test_estimates_are_of_what_points_are_laid_out_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that tp leaves whole, and a scatter of all of them for each microbatch, look far worse than they are."""
    monkeypatch.setattr(space, "_near", lambda microbatches: microbatches)  # just two have that effect here
    search = search_of("gpt2", 8, 4, BUSY, mesh={"dp": 2, "tp": 2}, offload=(), head_chunks=1)
    search._begin()
    region = Region(Mesh(dp=2, tp=2), 2, 2)
    plain = search.place(region)
    assert plain is not None
    points = [point for point in search.points_of(region) if splits_further(point.way, plain)]
    assert points
    least = [search.costing._moves(point, plain)[1] for point in points]
    for point, estimate, scattered in zip(points, search.estimates(points, plain), least, strict=True):
        own = search.profiler.known[search.key_of(point)]
        assert own.weights[()].elements < plain.weights[()].elements
        assert [estimate] == search._estimates([point], own)
        assert scattered <= search.costing._moves(point, own)[1]


def test_regions_are_estimated_as_if_weights_were_split_that_others_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "_near", lambda microbatches: microbatches)
    search = search_of("gpt2", 8, 4, BUSY, mesh={"dp": 2, "tp": 2}, offload=(), head_chunks=1)
    search._begin()
    region = Region(Mesh(dp=2, tp=2), 2, 2)
    plain, known = search.place(region), search._outlook
    assert plain is not None
    assert known is not None
    times = search.scaling.likely(region.key)
    way = next(point.way for point in search.points_of(region) if splits_further(point.way, plain))
    found = known.likely(region, [way], times, plain)
    monkeypatch.setattr(outlook, "splits_further", lambda way, profile: False)
    assert found < known.likely(region, [way], times, plain)


def test_a_placement_that_was_refused_takes_no_more_work() -> None:
    search = search_of("gpt2", 8, 4, BUSY, mesh={"dp": 2, "tp": 2}, microbatch=2)
    search._begin()
    region = Region(Mesh(dp=2, tp=2), 2, 2)
    plain = search.place(region)
    assert plain is not None
    own = plain.key._replace(streamed=True)
    search.profiler.known.pop(own, None)
    search.profiler.refused[own], before = ShardingError("refused"), search.work
    assert not search._place_streamed(region, plain)
    assert search.work == before


def test_what_was_placed_within_some_memory_is_placed_again_within_less() -> None:
    """And what wasn't is known, whatever memory there is; under other options nothing is."""
    key, mesh = Key(2, 1, 1, 2, several=True, stages=1), Mesh(tp=2)
    loose = key._replace(stages=0)
    profiler = search_of("gpt2", 8, 2, FAST).profiler
    whole = profiler.of(loose, mesh, 4)
    assert whole is not None
    roomy = profiler.under(profiler.options.model_copy(update={"budget_bytes": 10**9}))
    assert roomy.of(loose, mesh, 4) is whole
    fits = roomy.of(key, mesh, 4)
    tight = roomy.under(profiler.options.model_copy(update={"budget_bytes": 1000}))
    assert tight.of(loose, mesh, 4) is whole
    assert tight.of(key, mesh, 4) is None
    assert roomy.of(key, mesh, 4) is fits is not None
    assert not tight.under(profiler.options.model_copy(update={"zero": 1})).known


def test_where_weights_move_for_less_another_head_may_leave_more_of_them_whole() -> None:
    search = search_of("gpt2", 16, 8, BUSY, mesh={"tp": 2}, microbatch=1)
    search.glance()
    near, far = Region(Mesh(pp=4, tp=2), 1, 16), Region(Mesh(dp=4, tp=2), 1, 4)
    plain = search.place(far)
    assert plain is not None
    made = search.profiler.of(plain.key._replace(streamed=True), far.mesh, far.microbatches)
    assert made is not None
    point = next(point for point in search.points_of(far) if splits_further(point, plain))
    whole = point._replace(region=near, zero=3)
    assert laid_on(point, plain, search.profiler) is made
    assert laid_on(whole, plain, search.profiler) is made, "which it is laid out on"
    assert laid_on(point._replace(head_chunks=8), plain, search.profiler) is made
    assert laid_on(whole._replace(head_chunks=8), plain, search.profiler) is plain
    chunked = point._replace(head_chunks=8)
    own = search._own_profile(chunked)
    assert own.key.chunks == 8
    assert laid_on(chunked, plain, search.profiler) is own, "once it is placed"
    assert laid_on(point, plain, search.profiler) is made


def test_interleaved_regions_are_bounded_by_their_best_number_of_stages() -> None:
    search = search_of("llama", 8, 2, BUSY, mesh={"pp": 2})
    search._begin()
    region, outlook = Region(Mesh(pp=2), 1, 8), search._outlook
    assert outlook is not None
    layers = outlook.scaler.scaled(region.key, search.scaling.layers(region.key))
    ranks = folded(layers, 2, np.ones(2), ends=True, stages=3, hops=5)

    def by_paths(chunks: list[int], ranks: Ranks, way: Stored = WAY) -> float:
        both = beside_each_other([(layers, [way]), (layers, [way])])
        found, again = outlook._by_paths(*both, ranks, chunks, region.microbatches)
        assert found == again
        return float(found)

    two, three, both = (by_paths(some, ranks) for some in ([2], [3], [2, 3]))
    assert two != three
    assert both == min(two, three) > 0.0
    counts = search.costing.interleaving.counts(2, 2, 8, layers.count, ends=True)
    each = np.array([[layers.forward, layers.inputs + layers.weights + WAY.added]])
    (inner,) = counts.layer_seconds(layers.count, each, layers.ahead, layers.behind)
    assert inner < two <= inner + region.microbatches * sum(layers.beside), "the other calls are on some rank"
    head = replace(ranks, spreads_head=True)
    least = by_paths([2], head)
    assert inner <= least < inner + region.microbatches * sum(layers.beside) / 2, "it may run while others end"
    assert by_paths([], ranks) > 0.0, "on a V"
    sent = WAY._replace(scattered=100 * layers.forward)
    two, three, both = (by_paths(some, ranks, sent) for some in ([2], [3], [2, 3]))
    assert two < three, "nothing runs beside the scatter of each stage's first layer"
    assert both == two


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 800_000, 400_000])
def test_regions_are_bounded_together_as_alone(budget: int | None) -> None:
    """But for how ranks count in the mean: all as those of the first region. Some are placed, and keep what their own
    layers do."""
    search = search_of("llama", 8, 4, BUSY, budget_bytes=budget)
    search._begin()
    found = regions(search.sizes, search.pins)
    for region in found[::3]:
        search.place(region)
    each = [search.region_bound(region) for region in found]
    assert len(set(each)) > len(found) // 2
    assert search.region_bounds(found) == pytest.approx(each, rel=0.05)
