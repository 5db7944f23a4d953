"""What is recomputed under a budget really keeps every simulated rank within it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import autopar
from tests.fast_cluster import FAST
from tests.models import gpt2, llama, prepared

MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pp": 2}, {}),
    ({"pp": 2, "dp": 2}, {"zero": 2}),
    ({"pp": 2}, {"schedule": "zb-1p"}),
    ({"pp": 2, "tp": 2}, {"schedule": "v-half", "vocabulary": "vocab-2"}),
    ({"pp": 4}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), [("gpt2", *MESHES[0]), *(("llama", *m) for m in MESHES)], ids=str)
def test_no_rank_exceeds_its_budget(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    """From what nothing recomputed needs down to the leanest."""
    case = prepared(lambda: {"llama": llama, "gpt2": gpt2}[name](16, layers=2 * mesh["pp"]), torch.float32)

    def compiled(**more: Any) -> autopar.ParallelModel:
        given = {"sample": case.batch, "mesh": mesh, "microbatches": 8, "cluster": FAST, **options, **more}
        return autopar.compile(case.model, math.prod(mesh.values()), **given)

    most, least = (max(r.peak_bytes for r in compiled(recompute=r).memory().predicted) for r in ("none", "full"))
    for share in (0.9, 0.5):
        budget = round(least + share * (most - least))
        job = compiled(budget_bytes=budget)
        measured = job.memory(case.batch, measure="simulate").measured
        assert max(rank.peak_bytes for rank in measured) <= max(job.plan.peak_bytes) <= budget
        assert any(any(stage.recompute) for stage in job.plan.stage_plans)
