"""Predictions against published measurements: a few rows of the benchmark's, and the formulas that it is made of."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests/data/vocab_parallel_artifact_rows.csv"
MEASUREMENTS = ROOT / "benchmarks/measurements"
METHODS = ("baseline", "vocab-2", "vocab-1", "interlaced")
IN_FLIGHT = {"baseline": 8, "vocab-2": 9, "vocab-1": 10, "interlaced": 12}


@pytest.fixture(scope="module")
def fidelity() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("fidelity")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("method", METHODS)
def test_the_timeline_of_measured_pass_times_is_the_measured_iteration(fidelity: ModuleType, method: str) -> None:
    rows = fidelity.read(ROWS)
    (run,) = fidelity.profiled([row for row in rows if row["method"] == method], fidelity.transfers(rows))
    assert abs(run.error) <= 0.015
    assert run.timeline.peak_in_flight[0] == IN_FLIGHT[method]


def test_the_rows_are_those_of_the_artifact(fidelity: ModuleType) -> None:
    every = fidelity.read(MEASUREMENTS / "vocab_parallel_artifact_onehost_profile.csv")
    assert len(every) == 40
    assert all(row in every for row in fidelity.read(ROWS))


def test_layers_move_off_the_last_stage_as_in_the_artifact(fidelity: ModuleType) -> None:
    """Its sheet says how many layers the last stage keeps, for all sizes."""
    for row in fidelity.read(MEASUREMENTS / "vocab_parallel_artifact_onehost_profile.csv"):
        if row["method"] == "redis":
            gpt = fidelity.Gpt(*(int(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
            assert fidelity.redistributed(gpt, 8)[-1] == int(row["last_stage_layers"])


def test_products_hold_one_share_of_the_peak_rate_in_all_profiled_models(fidelity: ModuleType) -> None:
    """One number stands for four models of another paper: it isn't fitted to each."""
    cluster = fidelity.Cluster.load(fidelity.CLUSTER)
    rows = fidelity.read(MEASUREMENTS / "zero_bubble_profiled_times.csv")
    shares = [fidelity.sustained_fraction([row], cluster) for row in rows]
    assert max(shares) / min(shares) < 1.05
    assert max(shares) < cluster.device.achievable_fraction


@pytest.mark.parametrize("method", ["baseline", "vocab-2"])
def test_memory_from_formulas_is_the_published_peak(fidelity: ModuleType, method: str) -> None:
    cells = fidelity.cells_of(fidelity.read(MEASUREMENTS / "vocab_parallel_paper_tables5_6.csv"))
    predicted = fidelity.predict(cells[0], method, fidelity.machine_of(MEASUREMENTS))
    assert str(cells[0]) == "1F1B 8 GPUs s=2048 V=32k"
    assert abs(predicted.errors[1]) < 0.08


def test_methods_come_in_the_published_order_where_the_vocabulary_is_large(fidelity: ModuleType) -> None:
    cells = fidelity.cells_of(fidelity.read(MEASUREMENTS / "vocab_parallel_paper_tables5_6.csv"))
    machine = fidelity.machine_of(MEASUREMENTS)
    cell = next(cell for cell in cells if str(cell) == "1F1B 8 GPUs s=2048 V=256k")
    baseline, redis, split = (fidelity.predict(cell, method, machine) for method in ("baseline", "redis", "vocab-2"))
    assert baseline.seconds > redis.seconds > split.seconds
    assert fidelity.differ(baseline, redis)
    assert fidelity.same_order(baseline, redis)
