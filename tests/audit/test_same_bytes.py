"""Plans don't depend on what a process planned before: caches carry the mesh, the cluster and the dtype."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.audit.cases import Plan
from tests.fast_cluster import FAST

_SLOWER = replace(FAST, intra_node=replace(FAST.intra_node, bytes_per_second=1e8))
_SEVERAL = (
    (Plan("mlp", {"pp": 2, "dp": 2}, {"zero": 1}), FAST),
    (Plan("mlp", {"dp": 2, "tp": 2}), FAST),
    (Plan("mlp", {"dp": 2, "tp": 2}), _SLOWER),
    (Plan("mlp", {"dp": 2, "tp": 2}, dtype=torch.float32), FAST),
)


def planned(order: Sequence[int]) -> dict[int, str]:
    """The text of each plan, made in this order."""
    return {number: _SEVERAL[number][0].compile(cluster=_SEVERAL[number][1]).plan.to_json() for number in order}


def test_plans_are_the_same_in_any_order() -> None:
    forth = planned((0, 1, 2, 3))
    assert planned((3, 2, 0, 1)) == forth
    assert len({*forth.values()}) == len(_SEVERAL)


@pytest.mark.slow
def test_plans_are_the_same_in_fresh_processes() -> None:
    here = planned((2, 0, 3, 1))
    for seed, order in (("1", "0,1,2,3"), ("2", "3,1,0,2")):
        assert _elsewhere(seed, order) == "".join(here[number] for number in range(len(_SEVERAL)))


def _elsewhere(seed: str, order: str) -> str:
    """What a process with other hashes plans, in this order; printed in that of the plans."""
    code = (
        "import sys\nfrom tests.audit.test_same_bytes import planned\n"
        "found = planned(tuple(map(int, sys.argv[1].split(','))))\n"
        "sys.stdout.write(''.join(found[number] for number in sorted(found)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, order], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
