"""How ranks work under schedules, as bounds and estimates of whole families see it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from autopar.mesh import Mesh
from autopar.search.costing import Costing
from autopar.search.keeping import Keeping, Likely, Ratios
from autopar.search.outlook import Outlook
from autopar.search.ranks import kind_of, kinds_of, unevenness
from autopar.search.search import Search
from autopar.search.space import Family, Region, savers
from tests.fast_cluster import BUSY
from tests.search.spaces import search_of

REGION = Region(Mesh(pp=2, tp=2), 1, 8)


@pytest.fixture(scope="module")
def search() -> Search:
    found = search_of("llama", 8, 4, BUSY, mesh={"pp": 2, "tp": 2}, budget_bytes=400_000)
    found._begin()
    return found


def test_families_that_are_bounded_once_are_bounded_as_each_by_itself(search: Search) -> None:
    """By passes and by memory, on the device and on the host, whatever was bounded before."""
    profile, shared = search.place(REGION), search._outlook
    assert profile is not None
    assert shared is not None
    bounded, kinds = 0, set[tuple[object, ...]]()
    for family in search.families_of(REGION):
        for offload, chunks in savers(family, search.costing.cluster, search.pins):
            points = [p._replace(offload=offload, head_chunks=chunks) for p in search.stored(family)]
            alone = Outlook.of(search.costing, search.root)
            assert alone is not None
            for memory in (False, True):
                found, fresh = (each.bounds(points, profile, memory=memory) for each in (shared, alone))
                assert np.array_equal(found, fresh), (family, offload, memory)
            bounded += 1
            kinds.add(kind_of(points))
    assert len(kinds) < bounded / 2, "else nothing is shared"


def test_one_interleaved_stage_on_each_rank_keeps_as_little_as_1f1b(search: Search) -> None:
    profile, outlook = search.place(REGION), search._outlook
    assert profile is not None
    assert outlook is not None
    layers = outlook.scaler.placed(profile)
    four = Region(Mesh(pp=4), 1, 8)

    def kept(chunks: int) -> list[float]:
        ((ranks, _),) = kinds_of(four, layers, [Family(four, "interleaved", chunks, "redistributed")])
        return list(ranks.kept)

    assert kept(1) == [rank.most for rank in Keeping().here("interleaved", 4, 8, 1)] == [4, 3, 2, 1]
    assert kept(3) == [4, 4, 3, 1]


def test_estimates_count_the_messages_that_are_waited_for(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, outlook = search.place(REGION), search._outlook
    assert profile is not None
    assert outlook is not None
    family = next(family for family in search.families_of(REGION) if family.schedule == "1f1b" and not family.chunks)
    points = list(search.stored(family))[:1]

    def estimate(sent: tuple[float, float]) -> float:
        monkeypatch.setattr(Costing, "sent_seconds", lambda *_: sent)
        return float(outlook.estimates(points, profile)[0])

    messages = search.costing.keeping.likely("1f1b", 2, 8, None, "").messages
    assert estimate((1.0, 3.0)) == pytest.approx(estimate((0.0, 0.0)) + messages * (1.0 + 3.0) / 2, rel=0.05)


def test_stages_are_as_uneven_as_their_best_cut() -> None:
    """Between calls of these seconds, beside which each rank has as much of a head."""
    assert unevenness([1.0] * 12, 0.0, 4, 1) == pytest.approx(1.0, abs=1e-3)
    assert unevenness([0.0, *[1.0] * 12], 0.0, 4, 1) == pytest.approx(1.0, abs=1e-3), "an embedding takes no time"
    assert unevenness([*[1.0] * 12, 4.0], 0.0, 4, 1) == pytest.approx(1.0, abs=1e-3), "a head is a stage of its own"
    assert unevenness([1.0] * 13, 0.0, 4, 1) == pytest.approx(1 + 0.2 * (4 * 4 / 13 - 1), abs=1e-3)
    assert unevenness([1.0] * 13, 13.0, 4, 1) == pytest.approx(1 + 0.2 * (4 * 4 - 13) / 26, abs=1e-3)
    assert unevenness([1.0, 1.0], 0.0, 4, 1) == 1.0, "there is no cut"


def test_estimates_say_how_many_stages_ranks_have(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, profile = list[tuple[int, int]](), search.place(REGION)
    monkeypatch.setattr("autopar.search.outlook.unevenness", lambda _, __, *sizes: asked.append(sizes) or 1.0)
    wanted = {None: 1, 2: 2}
    for family in search.families_of(REGION):
        if family.schedule in ("1f1b", "interleaved") and family.chunks in wanted:
            outlook = Outlook.of(search.costing, search.root)
            assert outlook is not None
            outlook.estimates(list(search.stored(family))[:1], profile)
            assert asked[-1] == (2, wanted[family.chunks])
    assert len(set(asked)) == 2


def test_ranks_wait_for_the_longest_of_their_stages_once_in_a_round() -> None:
    """Each has several; of two, for as much of it as of one."""
    long = [*[1.0] * 15, 3.0]
    for chunks, share in ((2, 0.2), (4, 0.5 / 4), (8, 0.5 / 8)):
        longest = max(3.0, 18 / (2 * chunks), math.ceil(15 / (2 * chunks - 1)))
        assert unevenness(long, 0.0, 2, chunks) == pytest.approx(1 + share * (2 * chunks * longest / 18 - 1), abs=1e-2)


def test_estimates_know_how_long_passes_are(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, asked = search.place(REGION), list[Ratios]()
    assert profile is not None
    likely = Keeping.likely

    def seen(*given: Any) -> Likely:
        asked.append(given[-1])
        return likely(*given)

    monkeypatch.setattr(Keeping, "likely", seen)
    search.estimates([next(search.points_of(REGION))], profile)
    units = profile.units
    parts = (sum(getattr(unit, name) for unit in units) for name in ("forward", "backward", "weights"))
    assert set(asked) == {Ratios.of(*parts)}
