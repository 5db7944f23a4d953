"""What the benchmark of plans by chance says of some."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autopar
from autopar.planner import block_costs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def plans() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        made = importlib.import_module("random_plans")
    finally:
        sys.path.pop(0)
    yield made
    sys.modules.pop("random_plans")


def test_plans_are_of_a_seed_and_use_all_ranks(plans: ModuleType) -> None:
    task = plans.TASKS["causal"]
    found = [plans.drawn(random.Random(seed), task, has_experts=True) for seed in range(40)]
    assert found == [plans.drawn(random.Random(seed), task, has_experts=True) for seed in range(40)]
    full = [(ranks, pins["mesh"]) for ranks, pins in found if "zero" in pins]
    assert len(full) > 10
    for ranks, mesh in full:
        used = 1
        for axis, size in mesh.items():
            used *= 1 if axis == "ep" else size
        assert used == ranks


@pytest.mark.slow
def test_outcomes(plans: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal, refused, of other costs, another result, and crashed."""
    coverage_models = importlib.import_module("coverage_models")
    with plans.Float64():
        model, batch = coverage_models.tiny(plans.TASKS["causal"], "gpt2")
        captured = autopar.capture(model, sample=batch)

        def tried(**pins: Any) -> str:
            verdict: str = plans.tried(captured, 2, {"mesh": {"dp": 2}, "cluster": "fast", **pins}, batch)[0]
            return verdict

        assert tried() == plans.EQUAL
        assert tried(mesh={"dp": 3}) == plans.REFUSED
        monkeypatch.setattr(block_costs, "block_sums", lambda *_: 0.0)
        assert tried() == plans.COSTS
        monkeypatch.setattr(plans, "TOLERANCE", 0.0)
        assert tried() == plans.DIFFERS
        monkeypatch.setattr(autopar, "compile", lambda *_, **__: 1 / 0)
        assert tried() == plans.CRASHED
