"""What the benchmarks of the planner measure and say, on models small enough to plan at once."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import BudgetError
from autopar.plan import CostPart
from autopar.report.search_progress import SearchProgress

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def planning() -> ModuleType:
    return benchmark("planning")


@pytest.fixture(scope="module")
def choice() -> ModuleType:
    return benchmark("choice")


def benchmark(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_a_part_takes_until_the_next_begins(planning: ModuleType) -> None:
    clock: Iterator[float] = iter([0.0, 1.0, 4.0, 5.0, 7.0])
    laps = planning.Laps("capture", lambda: next(clock))
    laps.begin("passes")
    laps(SearchProgress("place"))
    laps(SearchProgress("lay out"))
    laps(SearchProgress("place"))
    assert dict(laps.seconds) == {"capture": 1.0, "passes": 3.0, "place": 1.0, "lay out": 2.0}


def test_a_search_tells_all_parts(planning: ModuleType) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(0))
    sample = torch.zeros(4, 8, device="meta")
    seconds = planning.timed_compile(Mean(model), 2, sample)[1]
    assert tuple(seconds) == planning.PARTS
    assert all(seconds.values())


class Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean()


def test_refusals_cross_processes() -> None:
    """Each model is planned in a process of its own."""
    refused = pickle.loads(pickle.dumps(BudgetError("nothing fits", 7, 2)))
    assert (str(refused), refused.needed_bytes, refused.uncounted_bytes) == ("nothing fits", 7, 2)


def fake_plan(step: float, **parts: float) -> Any:
    named = [CostPart(name=name, exposed_seconds=seconds) for name, seconds in parts.items()]
    return SimpleNamespace(step_seconds=step, cost=SimpleNamespace(parts=named))


def test_why_names_the_largest_differences_first(choice: ModuleType) -> None:
    experts = fake_plan(10.0, forward=4.0, recomputation=3.0, bubble=1.0, optimizer=0.01)
    chosen = fake_plan(8.0, forward=4.0, bubble=2.0, optimizer=0.02)
    assert choice.why(chosen, experts) == "recomputation 3.00 s less, bubble 1.00 s more"
    assert choice.why(chosen, chosen) == "the same but for details"


def test_cases_are_the_published_rows(choice: ModuleType) -> None:
    found = list(choice.cases())
    assert len(found) == 20
    for case in found:
        mesh = case.pins["mesh"]
        assert mesh["pp"] * mesh["dp"] * mesh["tp"] == case.gpus
        assert case.batch % mesh["dp"] == 0
    assert found[-1].gpus == 16384
    assert found[-1].measured_seconds == pytest.approx(6.5, rel=0.02), "16M tokens, 400 TFLOP/s of each GPU"
