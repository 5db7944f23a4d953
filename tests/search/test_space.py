"""What of a space is left out, because it can't run: by what laying it out says."""

from __future__ import annotations

import pytest

from autopar.errors import StageError
from autopar.mesh import Mesh
from autopar.search.space import Family, Point, Region, meshes, schedules, stages_of, storages
from tests.fast_cluster import FAST
from tests.search.spaces import search_of

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
    alone = search_of("mlp", BATCH, 1, FAST, powersgd=2)
    assert meshes(alone.sizes, alone.pins) == [Mesh()]  # whose error says what is missing
