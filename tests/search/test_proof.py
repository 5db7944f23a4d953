"""What a proof finds by itself."""

from __future__ import annotations

import importlib
import math

import pytest

from autopar.search.costing import Outcome
from autopar.search.proof import Proof
from autopar.search.space import Point
from tests.fast_cluster import FAST
from tests.search.spaces import search_of


def test_what_it_lays_out_counts_where_nothing_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor looks likely to fit: then there is nothing to aim at, either."""
    known = search_of("gpt2", 8, 4, FAST, schedule="1f1b").run()
    laid_out, lay_out = list[Outcome](), Proof.lay_out

    def noted(self: Proof, point: Point) -> Outcome:
        laid_out.append(lay_out(self, point))
        return laid_out[-1]

    monkeypatch.setattr(Proof, "lay_out", noted)
    monkeypatch.setattr(Proof, "all_likely", lambda self, some, offload=(): [math.inf] * len(some))
    monkeypatch.setattr(importlib.import_module("autopar.search.search"), "dive", lambda search, regions: None)
    search = search_of("gpt2", 8, 4, FAST, schedule="1f1b")
    found = search.run()
    assert {outcome.point for outcome in laid_out} == {outcome.point for outcome in found.outcomes}
    assert found.outcomes[0].step_seconds <= known.outcomes[0].step_seconds / (1 - search.tolerance)
    assert found.bound_seconds <= known.outcomes[0].step_seconds
