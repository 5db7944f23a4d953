"""What of a space is left out, because it can't run: by what laying it out says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import StageError
from autopar.mesh import Mesh
from autopar.planner.block_costs import Machine
from autopar.planner.modes import MODES
from autopar.preparation import Captured
from autopar.search import choose, searching
from autopar.search.profiles import Profile
from autopar.search.search import Search
from autopar.search.space import (
    Family,
    Point,
    Region,
    _with_less_cp,
    meshes,
    regions,
    savers,
    schedules,
    stages_of,
    storages,
    undominated,
)
from tests.fast_cluster import BUSY, FAST, NODES
from tests.search.spaces import experts_on, pins_of, search_of

BATCH = 8
PLAIN = {"zero": 0, "offload": (), "head_chunks": 1}


@pytest.mark.parametrize("pp", [2, 3, 5, 6])
def test_what_is_offered_can_be_cut_into_stages(pp: int) -> None:
    """Of a model with 6 units, one of them a final norm with the head."""
    search = search_of("gpt2", BATCH, pp, FAST, mesh={"pp": pp}, **PLAIN)
    search.glance()
    region = Region(Mesh(pp=pp), 1, BATCH)
    offered = [point for family in search.families_of(region) for point in search.stored(family)]
    assert {point.schedule for point in offered} >= {"1f1b", "zb-h1"}
    for point in offered:
        assert stages_of(point) <= search.sizes.units
        assert search.lay_out(point).step_seconds > 0


@pytest.mark.parametrize(("pp", "chunks"), [(6, None), (3, 2)])
def test_a_split_head_needs_one_unit_fewer(pp: int, chunks: int | None) -> None:
    """Of a model whose last unit is all head, which leaves ranks that have a unit each without one for the last."""
    search = search_of("llama", BATCH, pp, FAST, mesh={"pp": pp}, **PLAIN)
    search.glance()
    region = Region(Mesh(pp=pp), 1, BATCH)
    found = set(schedules(region, search.sizes, search.pins, search.heads))
    name = "interleaved" if chunks else "1f1b"
    assert search.heads == ("vocab-1", "vocab-2")
    assert (name, chunks, "redistributed") in found
    for head in search.heads:
        assert (name, chunks, head) not in found
        with pytest.raises(StageError, match="fewer"):
            search.lay_out(Point(*Family(region, name, chunks, head), 0, 0, (), 1))


@pytest.mark.parametrize("pp", [2, 5])
def test_with_a_unit_to_spare_the_head_is_split(pp: int) -> None:
    search = search_of("llama", BATCH, pp, FAST, mesh={"pp": pp}, **PLAIN)
    found = set(schedules(Region(Mesh(pp=pp), 1, BATCH), search.sizes, search.pins, search.heads))
    assert {("1f1b", None, head) for head in search.heads} <= found


@pytest.mark.parametrize(("model", "inner"), [("gpt2", 6), ("llama", 5)])
def test_a_split_vocabulary_leaves_as_many_units_as_have_anything_else(model: str, inner: int) -> None:
    """All of 6; or not one that is all head."""
    search = search_of(model, BATCH, 2, FAST, mesh={"pp": 2}, **PLAIN)
    assert (search.sizes.units, search.sizes.inner) == (6, inner)


def test_gpt2s_head_is_split_with_as_many_stages_as_units() -> None:
    search = search_of("gpt2", BATCH, 6, FAST, mesh={"pp": 6}, **PLAIN)
    search.glance()
    region = Region(Mesh(pp=6), 1, BATCH)
    for head in search.heads:
        assert ("1f1b", None, head) in set(schedules(region, search.sizes, search.pins, search.heads))
        assert search.lay_out(Point(*Family(region, "1f1b", None, head), 0, 0, (), 1)).step_seconds > 0


def test_a_rank_alone_has_one_stage_or_several() -> None:
    """Of 6 units, 4 of them layers: stages of 1, 2 and 4, where activations may go to the host."""
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e12))
    search = search_of("gpt2", BATCH, 2, host, mesh={"dp": 2}, zero=0)
    search.glance()
    region = Region(Mesh(dp=2), 1, BATCH // 2)
    families = list(search.families_of(region))
    assert [(family.schedule, family.chunks) for family in families] == [
        ("1f1b", None),
        ("interleaved", 4),
        ("interleaved", 2),
    ]
    for family in families:
        ways = {offload for offload, _ in savers(family, host, search.pins)}
        assert (("activations",) in ways) == (family.chunks is not None)
        assert {(), ("optimizer",), ("parameters",)} <= ways
        for point in search.stored(family):
            assert search.lay_out(point).step_seconds > 0
    assert search.count(region) == sum(2 * len({o for o, _ in savers(f, host, search.pins)}) for f in families)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"chunks": 1}, [("1f1b", 1)]),
        ({"chunks": 5}, [("interleaved", 5)]),
        ({"chunks": 7}, []),
        ({"schedule": "1f1b"}, [("1f1b", None)]),
        ({"schedule": "interleaved"}, [("interleaved", 4), ("interleaved", 2)]),
        ({"schedule": "interleaved", "chunks": 1}, [("interleaved", 1)]),
        ({"schedule": "v-half"}, [("v-half", None)]),
        ({"vocabulary": "vocab-1"}, [("1f1b", None)]),
    ],
    ids=str,
)
def test_stages_of_a_rank_alone_are_those_pinned(given: dict[str, object], expected: list[object]) -> None:
    search = search_of("gpt2", BATCH, 1, FAST, mesh={"dp": 1}, **given, **PLAIN)
    found = schedules(Region(Mesh(), 1, BATCH), search.sizes, search.pins, search.heads)
    assert [(name, chunks) for name, chunks, _ in found] == expected


def test_interleaved_stages_are_several_unless_pinned() -> None:
    """One on each rank is 1F1B."""
    for given, expected in (({}, False), ({"schedule": "interleaved"}, True)):
        search = search_of("gpt2", BATCH, 2, FAST, mesh={"pp": 2}, chunks=1, **given, **PLAIN)
        found = {name for name, *_ in schedules(Region(Mesh(pp=2), 1, BATCH), search.sizes, search.pins, search.heads)}
        assert ("interleaved" in found) == expected
        assert ("1f1b" in found) != expected


@pytest.mark.parametrize(
    ("units", "pp", "expected"),
    [
        (82, 2, [2, 3, 4, 5, 6, 7, 8, 10, 20, 40]),
        (82, 4, [2, 3, 4, 5, 6, 7, 8, 10, 20]),
        (128, 8, [2, 3, 4, 5, 6, 7, 8, 16]),
        (128, 16, [2, 3, 4, 5, 6, 7, 8]),
        (6, 2, [2, 3]),
        (6, 4, []),
    ],
)
def test_stages_of_a_pipeline_are_few_or_as_small_as_layers(units: int, pp: int, expected: list[int]) -> None:
    """Of one layer, two, four or eight each, beside any number of them up to eight."""
    search = search_of("gpt2", BATCH, pp, FAST, mesh={"pp": pp}, **PLAIN)
    sizes = replace(search.sizes, units=units)
    found = schedules(Region(Mesh(pp=pp), 1, BATCH), sizes, search.pins, ())
    assert [chunks for name, chunks, _ in found if name == "interleaved"] == expected


def test_what_is_pinned_is_tried_anyway() -> None:
    """So that its error says why it can't run."""
    search = search_of("llama", BATCH, 6, FAST, mesh={"pp": 6}, vocabulary="vocab-1", **PLAIN)
    found = set(schedules(Region(Mesh(pp=6), 1, BATCH), search.sizes, search.pins, search.heads))
    assert ("1f1b", None, "vocab-1") in found


def test_compressed_sums_are_of_whole_gradients_over_dp() -> None:
    """Ranks of ZeRO 2 and 3 have no whole gradients, those without dp nothing to sum."""
    search = search_of("mlp", BATCH, 4, FAST, powersgd=2)
    found = meshes(search.sizes, search.pins)
    assert {mesh.dp for mesh in found} == {2, 4}
    for mesh in found:
        region = Region(mesh, 1, BATCH // mesh.dp)
        assert {zero for zero, _ in storages(region, search.costing.cluster, search.pins)} == {0, 1}
    odd = search_of("mlp", 7, 3, FAST, powersgd=2)
    assert {region.mesh.pp for region in regions(odd.sizes, odd.pins)} == {3}, "dp doesn't divide the batch"
    alone = search_of("mlp", BATCH, 1, FAST, powersgd=2)
    assert meshes(alone.sizes, alone.pins) == [Mesh()]  # whose error says what is missing


def test_ranks_that_share_state_are_of_any_zero_on_degrees_that_they_divide() -> None:
    search = search_of("mlp", BATCH, 4, FAST, zero_ranks=2)
    found = meshes(search.sizes, search.pins)
    assert {mesh.dp for mesh in found} == {2, 4}
    for mesh in found:
        ways = set(storages(Region(mesh, 1, BATCH // mesh.dp), search.costing.cluster, search.pins))
        assert ways == {(1, 2), (2, 2), (3, 2)}


def test_a_head_that_is_padded_or_in_chunks_is_one_unit_with_what_is_around() -> None:
    """Its table is padded where tp doesn't divide its 5 classes."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))
    batch = torch.randn(4, 8), torch.randint(0, 5, (4,))
    captured = Captured(layers, batch, lambda out, batch: functional.cross_entropy(out, batch[1])).on("cpu")
    for tp, given, most in ((1, {}, 4), (5, {}, 4), (2, {}, 3), (1, {"head_chunks": 2}, 3)):
        pins = [pins_of(pp * tp, mesh={"pp": pp, "tp": tp}, **{**PLAIN, **given}) for pp in (most, most + 1)]
        search = searching(captured, pins[0], FAST, {})
        assert search.sizes.most_stages(tp, search.pins.options.head_chunks, MODES["redistributed"]) == most
        assert search.glance()
        with pytest.raises(StageError, match=f"fewer than pp={most + 1}"):
            choose(captured, pins[1], FAST, {})


@pytest.mark.parametrize(
    ("search", "off"),
    [
        pytest.param(lambda: search_of("llama", BATCH, 8, BUSY), 0.01, id="llama"),
        pytest.param(lambda: search_of("gpt2", BATCH, 8, NODES), 0.01, id="gpt2", marks=pytest.mark.slow),
        pytest.param(lambda: experts_on(NODES, 8), 0.04, id="experts", marks=pytest.mark.slow),
    ],
)
def test_parts_of_several_rows_are_beaten_by_whole_ones(search: Callable[[], Search], off: float) -> None:
    """By whole rows on ranks of their own: in passes, in what layers keep, and in who shares weights. Solvers' prices
    are ``off`` by a percent: whether a reshape copies (and keeps the copy) isn't in them, which counts in layers of
    experts as small as these."""
    begun = search()
    begun.glance()
    found = regions(begun.sizes, begun.pins)
    kept = set(undominated(found))
    left_out = [region for region in found if region not in kept]
    assert len(left_out) > 10
    for region in left_out[:: 1 + len(left_out) // 20]:  # about twenty of them
        times = math.gcd(region.rows, region.mesh.cp)
        whole = Region(_with_less_cp(region.mesh, times), region.rows // times, region.microbatches)
        assert whole in found
        assert whole.mesh.world == region.mesh.world
        assert math.gcd(whole.rows, whole.mesh.cp) == 1
        assert whole.mesh.zero_shards(0) == region.mesh.zero_shards(0)
        assert whole.mesh.experts == region.mesh.experts
        parts, best = begun.place(region), begun.place(whole)
        assert best is not None
        if parts is not None:
            assert _seconds(best, whole) <= _seconds(parts, region) * (1 + off)
            if whole.mesh.cp * whole.mesh.tp == 1 and off <= 0.01:  # the fastest on other axes may keep more
                assert _kept(best) <= _kept(parts)


def _seconds(profile: Profile, region: Region) -> float:
    """Of a microbatch's passes of all calls, on the ranks of ``region``."""
    costs = profile.costs_on(Machine.of(profile.placed.request.cluster, profile.mesh(region.mesh)))
    return math.fsum(costs[unit.block].seconds for unit in profile.units)


def _kept(profile: Profile) -> int:
    """Bytes of a microbatch, of all calls that recompute nothing."""
    activations = profile.activations
    calls = enumerate(profile.model.calls)
    return sum(activations.call_bytes(i, activations.choices[call.block].none) for i, call in calls)


def test_pinned_degrees_and_rows_leave_parts_of_several_rows_in() -> None:
    """What would beat them isn't searched."""
    for pins in ({"mesh": {"cp": 2}}, {"mesh": {"dp": 2}}, {"microbatch": 4}):
        search = search_of("llama", BATCH, 8, FAST, **pins)
        found = regions(search.sizes, search.pins)
        assert any(math.gcd(region.rows, region.mesh.cp) > 1 for region in found)
        assert undominated(found) == found


class _Centered(nn.Module):
    """What each row is depends on all others."""

    def __init__(self, is_centered: bool) -> None:
        super().__init__()
        self.is_centered = is_centered
        self.embed, self.mix, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        if self.is_centered:
            embedded = embedded * embedded.mean(0, keepdim=True)
        return functional.cross_entropy(self.head(self.mix(embedded)).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("is_centered", [False, True])
def test_rows_that_depend_on_others_leave_all_in(is_centered: bool) -> None:
    captured = Captured(_Centered(is_centered), {"tokens": torch.randint(0, 32, (4, 8))}, None).on("cpu")
    search = searching(captured, pins_of(2), FAST, {})
    every = regions(search.sizes, search.pins)
    assert len(undominated(every)) < len(every)
    assert set(search._begin()) == set(every if is_centered else undominated(every))


def test_microbatches_with_statistics_of_their_own_leave_all_in() -> None:
    """They are no cuts of one batch: other rows together are another result."""
    captured = Captured(_Centered(False), {"tokens": torch.randint(0, 32, (4, 8))}, None).on("cpu")
    search = searching(captured, pins_of(2, statistics="microbatch"), FAST, {})
    assert set(search._begin()) == set(regions(search.sizes, search.pins))
