"""The promise: loss, every gradient and every parameter equal the one-device model's, on simulated ranks."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch

import autopar
from tests.fast_cluster import FAST
from tests.models import CASES, Case, Float64, make
from tests.pinned import compile_pinned

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
    return " ".join(f"{k}{getattr(v, '__name__', v)}" for k, v in value.items()) if isinstance(value, dict) else None


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def tame_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW whose eps lies above float32's rounding.

    With the default eps of 1e-8, AdamW steps by the learning rate for a gradient that is zero but for rounding (the
    bias of keys, say), so any two orders of summation, on one device too, part by that.
    """
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-3)


def verification(
    name: str, mesh: dict[str, int], microbatches: int, *, dtype: torch.dtype = torch.float64, **options: Any
) -> autopar.Verification:
    with Float64() if dtype == torch.float64 else contextlib.nullcontext():
        return verified(make(name, 8, dtype), mesh, microbatches=microbatches, **options)


def verified(case: Case, mesh: dict[str, int], **options: Any) -> autopar.Verification:
    """Three steps of ``case``, compiled for ``mesh``, against one device."""
    job = compile_pinned(
        case.model,
        math.prod(size for axis, size in mesh.items() if axis not in ("ep", "etp")),
        sample=case.batch,
        loss=case.loss,
        mesh=mesh,
        **{"cluster": FAST, "optimizer": optimizer, "clip_norm": 0.5, **options},
    )
    return job.verify(case.batch, steps=3)


@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_float64(name: str, mesh: dict[str, int]) -> None:
    result = verification(name, mesh, microbatches=4)
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("name", "microbatches"), [("gpt2", 4), ("nano_gpt", 1), ("nano_gpt", 8), ("mlp", 1), ("mlp", 4), ("mlp", 8)]
)
def test_microbatches_alone(name: str, microbatches: int) -> None:
    result = verification(name, {"dp": 1}, microbatches)
    assert result.ok, str(result)


FAST_TIER = [("gpt2", {"pp": 2, "dp": 2, "tp": 2}), ("llama", {"tp": 2}), ("encoder", {"dp": 2, "tp": 2})]


@pytest.mark.parametrize(("name", "mesh"), FAST_TIER, ids=name_of)
def test_float64_sample(name: str, mesh: dict[str, int]) -> None:
    """A few of the meshes below, for the fast tier."""
    result = verification(name, mesh, microbatches=2)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_sixteen_ranks(schedule: str) -> None:
    result = verification("llama", {"pp": 4, "dp": 2, "tp": 2}, microbatches=4, schedule=schedule)
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 8])
def test_other_microbatches(microbatches: int) -> None:
    result = verification("nano_gpt", {"pp": 2, "tp": 2}, microbatches)
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_float32(name: str) -> None:
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    result = verification(name, mesh, microbatches=2, dtype=torch.float32, optimizer=tame_optimizer)
    assert result.tolerance == 2e-5
    assert result.ok, str(result)
