"""What stages do beside their calls, which is found once for each cut."""

from __future__ import annotations

import pytest

from autopar.mesh import Mesh
from autopar.planner import between as module
from autopar.planner.between import BetweenCalls, between
from tests.fast_cluster import FAST
from tests.search.spaces import search_of


def test_of_a_cut_that_is_placed_alike_it_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of("gpt2", 8, 2, FAST)
    search._begin()
    profile = search.root
    machine = search.costing.machine_of(Mesh(), 0)
    given = profile.model, profile.costs_on(machine), machine
    calls, (first, *others) = BetweenCalls(*given), range(len(profile.units))
    cuts = [((first,), tuple(others)), ((first, others[0]), tuple(others[1:]))]
    expected = [between(*given[:1], stages, *given[1:], placement) for stages in cuts for placement in ((0, 1), (0, 0))]
    found = [calls.of(stages, placement) for stages in cuts for placement in ((0, 1), (0, 0))]
    assert found == expected
    assert found[0] != found[1], "neighbours on one rank send nothing"
    monkeypatch.setattr(module, "between", lambda *_: pytest.fail("it was found again"))
    assert [calls.of(list(stages), [0, 1]) for stages in cuts] == expected[::2]
