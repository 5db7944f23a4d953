"""What the benchmark of architectures says of some."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import autopar

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def coverage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        made = importlib.import_module("coverage")
    finally:
        sys.path.pop(0)
    monkeypatch.setattr(made, "_quiet", lambda: None)
    yield made
    sys.modules.pop("coverage")


@pytest.mark.slow
def test_an_architecture_is_tried_in_every_way(coverage: ModuleType) -> None:
    outcome = coverage.attempt("causal", "gpt2", 100, {})
    ways = ["capture", "dp 2 x tp 2", "pp 2 x tp 2", "cp 2 x dp 2", "nothing pinned"]
    assert outcome.runs == dict.fromkeys(ways, ("equal", ""))
    assert outcome.verdict == "equal"
    again = coverage.attempt("causal", "gpt2", 100, {outcome.digest: "another"})
    assert again.runs == {"capture": ("equal", "again: another")}


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        return made.sum() if made.sum().item() > 3 else made.mean()


def test_outcomes_are_told_apart(coverage: ModuleType) -> None:
    refused = coverage._run(lambda: autopar.capture(Branches(), sample=torch.ones(4, 4)))
    assert (refused[0], "test_coverage_benchmark.py" in refused[1]) == ("refused", True)
    assert coverage._run(lambda: 1 / 0) == ("crashed", "ZeroDivisionError: division by zero")
    assert coverage._run(lambda: None) == ("equal", "")
    outcome = coverage.Outcome("causal", "gpt2", {"capture": ("equal", ""), "dp 2 x tp 2": refused})
    assert outcome.verdict == "refused"
    assert coverage.Outcome("causal", "gpt2", {"one device": ("left out", "")}).verdict == "left out"


def hangs() -> None:
    """In a way that no exception ends."""
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def test_a_model_that_hangs_or_dies_is_an_outcome(coverage: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert coverage._limited(1, hangs) == ("late", "more than 1 s")
    assert coverage._limited(100, lambda: os.kill(os.getpid(), signal.SIGKILL)) == (
        "crashed",
        "the process died: SIGKILL",
    )
    assert coverage._limited(100, lambda: os._exit(3)) == ("crashed", "the process died: exit code 3")
    assert coverage._limited(100, lambda: ("equal", "whole")) == ("equal", "whole")
    monkeypatch.setattr(coverage, "attempt", lambda *_: os._exit(7))
    assert coverage._tried("causal", "gpt2", 1, []).runs == {"capture": ("crashed", "the process died: exit code 7")}
    monkeypatch.setattr(coverage, "attempt", lambda *_: hangs())
    monkeypatch.setattr(coverage, "MESHES", ())
    assert coverage._tried("causal", "gpt2", 1, []).runs == {"capture": ("late", "more than 2 s")}
