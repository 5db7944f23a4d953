"""Where nothing fits, what would is offered, and does."""

from __future__ import annotations

from typing import Any

import pytest

from autopar import Cluster
from autopar.errors import BudgetError
from autopar.search import choose
from autopar.search.infeasible import relaxations
from tests.search.spaces import pins_of, prepared, search_of

CPU = Cluster.load("cpu")


def refusal(gpus: int, **given: Any) -> str:
    with pytest.raises(BudgetError) as refused:
        choose(prepared("mlp", 4), pins_of(gpus, **given), CPU, {})
    return str(refused.value)


def test_the_first_offer_works() -> None:
    """State is 16 bytes an element and 8 of a copy: one stage holds it without ZeRO or offload in no other way."""
    given: dict[str, Any] = {"mesh": {"dp": 2}, "zero": 0, "offload": (), "budget_bytes": 120_000}
    search = search_of("mlp", 4, 2, CPU, **given)
    assert not search.run().outcomes
    offers = relaxations(search)
    assert offers[0].change in ("without zero=0", "without offload=()")
    text = refusal(2, **given)
    assert text.startswith("nothing fits on 2 GPUs with mesh={'dp': 2}")
    assert str(offers[0]) in text
    name = offers[0].change.split()[1].split("=")[0]
    built = choose(prepared("mlp", 4), pins_of(2, **{k: v for k, v in given.items() if k != name}), CPU, {})
    assert max(built.plan.peak_bytes) <= given["budget_bytes"]


def test_nothing_at_all() -> None:
    text = refusal(1, budget_bytes=1000, mesh={"dp": 1}, offload=())
    assert "nothing fits on 1 GPU with mesh={'dp': 1}, budget_bytes=1000, offload=()" in text
    assert "the leanest way found needs" in text
    assert "It fits with the device's 4 GiB" in text
