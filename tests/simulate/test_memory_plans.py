"""The plans of ``benchmarks/memory.py``: predicted peaks are within 3 % of what simulated ranks hold."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def plans() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("memory")
    finally:
        sys.path.pop(0)


def test_twenty_different_plans_of_four_models(plans: ModuleType) -> None:
    assert len({case.name for case in plans.CASES}) >= 20
    assert len({case.model for case in plans.CASES}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_predicted_as_measured(plans: ModuleType, number: int) -> None:
    report = plans.report_of(plans.CASES[number])
    errors = [round(100 * error, 2) for error in report.errors]
    assert max(map(abs, report.errors)) <= TOLERANCE, f"{plans.CASES[number].name}: {errors} %"
