"""Models placed once for many points."""

from __future__ import annotations

from autopar import Cluster
from autopar.mesh import Mesh
from autopar.search.profiles import Key
from tests.search.spaces import search_of


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
