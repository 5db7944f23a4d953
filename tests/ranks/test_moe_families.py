"""Mixture-of-experts families of transformers, unmodified: on one device, and with experts split over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import pytest

import autopar
from tests.fast_cluster import FAST
from tests.models import Case, Float64, prepared
from tests.moe_models import experts_of, family
from tests.pinned import compile_pinned
from tests.ranks.test_parity import optimizer


@dataclass(frozen=True)
class Split:
    """A family on a mesh of ``pp x dp x tp`` ranks, of which ``ep`` borrows some."""

    name: str
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    gaps: bool = True
    draws: bool = False  # its router draws numbers in training, others on each device

    @property
    def gpus(self) -> int:
        return self.mesh.get("pp", 1) * self.mesh.get("dp", 1) * self.mesh.get("tp", 1)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{axis}{size}" for axis, size in self.mesh.items())])


_PIPELINE: Final = {"pp": 2, "dp": 2, "ep": 2}
_OF_MICROBATCHES: Final = {"microbatches": 2, "statistics": "microbatch"}

SPLITS: Final = [
    Split("mixtral", {"dp": 8, "ep": 8}),
    Split("gpt_oss", {"dp": 4, "ep": 4}),
    Split("olmoe", {"dp": 8, "ep": 8}),
    Split("qwen2_moe", {"dp": 2, "ep": 2, "tp": 2}),
    Split("qwen3_moe", {"pp": 2, "dp": 4, "ep": 4, "tp": 2}, {"microbatches": 1}),
    Split("deepseek_v2", {"dp": 2, "tp": 2, "ep": 4}),
    Split("deepseek_v3", _PIPELINE, {"microbatches": 2}),
    Split("granitemoe", _PIPELINE, _OF_MICROBATCHES, gaps=False),
    Split("glm4_moe", {"dp": 8, "ep": 8}),
    Split("minimax_m2", _PIPELINE, {"microbatches": 1}),
    Split("jamba", {"dp": 4, "ep": 4}),
    Split("llama4_text", {"dp": 2, "ep": 2}),
    Split("nemotron_h", {"dp": 4, "ep": 4}),
    Split("phimoe", {"dp": 2, "ep": 2}, draws=True),
    Split("dbrx", {"dp": 4, "ep": 2}),
]

ALONE: Final = ["ernie4_5_moe", "lfm2_moe", "longcat_flash", "minimax"]
"""On one device only."""


def compiled(case: Case, mesh: dict[str, int], gpus: int, **options: Any) -> autopar.ParallelModel:
    given = {"optimizer": optimizer, "clip_norm": 0.5, **options}
    return compile_pinned(case.model, gpus, sample=case.batch, mesh=mesh, cluster=FAST, **given)


def assert_equal(case: Case, mesh: dict[str, int], gpus: int, *, steps: int, **options: Any) -> None:
    result = compiled(case, mesh, gpus, **options).verify(case.batch, steps=steps)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_experts_over_ranks(split: Split) -> None:
    with Float64():
        case = prepared(lambda: family(split.name, 8, gaps=split.gaps))
        if split.draws:
            case.model.eval()
        assert_equal(case, split.mesh, split.gpus, steps=3, **split.options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_one_device(name: str) -> None:
    with Float64():
        assert_equal(prepared(lambda: family(name, 2, experts=4)), {"dp": 1}, 1, steps=1)


def test_every_expert_is_on_one_of_the_ranks() -> None:
    """The fast tier's sample: experts of Mixtral are split over ep, and nothing else computes them."""
    with Float64():
        case = prepared(lambda: family("mixtral", 4, experts=4))
        job = compiled(case, {"dp": 2, "ep": 2}, 2)
        result = job.verify(case.batch, steps=3)
    assert result.ok, str(result)
    layers = len(experts_of(case.model))
    held = [m.gate_up_proj.shape[0] for module in job.modules(0) for m in _with_experts(module)]
    assert held == [2] * layers


def _with_experts(module: Any) -> list[Any]:
    return [part for part in module.modules() if hasattr(part, "gate_up_proj")]
