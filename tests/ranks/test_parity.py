"""The promise: loss, every gradient and every parameter equal the one-device model's, on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from tests.models import CASES, make

MESHES = [
    {"dp": 2},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 4},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
]


def name_of(value: Any) -> str | None:
    return " ".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else None


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def verification(
    name: str, mesh: dict[str, int], microbatches: int, *, dtype: torch.dtype = torch.float64, **options: Any
) -> autopar.Verification:
    case = make(name, batch=8, dtype=dtype)
    world = 1
    for size in mesh.values():
        world *= size
    job = autopar.compile(
        case.model,
        world,
        sample=case.batch,
        loss=case.loss,
        mesh=mesh,
        microbatches=microbatches,
        optimizer=optimizer,
        clip_norm=0.5,
        **options,
    )
    return job.verify(case.batch, steps=3)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("name", CASES)
def test_float64(name: str, mesh: dict[str, int]) -> None:
    result = verification(name, mesh, microbatches=4)
    assert result.ok, str(result)


@pytest.mark.parametrize("microbatches", [1, 4, 8])
@pytest.mark.parametrize("name", ["gpt2", "nano_gpt", "mlp"])
def test_microbatches_alone(name: str, microbatches: int) -> None:
    result = verification(name, {"dp": 1}, microbatches)
    assert result.ok, str(result)
