"""The same inputs give the same bytes, in whichever process, and however it hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.plan import Plan

ROOT = Path(__file__).parents[2]

PROGRAM = """
import autopar, torch
from tests.fast_cluster import FAST
from tests.models import make
from tests.pinned import PINNED

torch.set_num_threads(1)
case = make("mlp", 8)
options = {**PINNED, "chunks": 1, "recompute": "full"}  # mesh and microbatches are searched for
print(autopar.plan(case.model, 4, sample=case.batch, loss=case.loss, cluster=FAST, **options).to_json(), end="")
"""


def planned(seed: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fresh_processes_give_the_same_bytes() -> None:
    first, second = planned("1"), planned("2")
    assert first == second
    assert Plan.from_json(first).to_json() == first
