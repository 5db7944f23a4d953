"""What adding up gradients takes, by hand: what is read and written of a million elements, at 1 GB/s."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar.cluster import Cluster
from autopar.options import Options
from autopar.planner.gradients import summed_as
from tests.fast_cluster import FAST
from tests.pinned import PINNED
from tests.random_models import Recipe, case_of
from tests.shared_captures import compile_shared

DEVICE = dataclasses.replace(Cluster.load("cpu").device, memory_bytes_per_second=1e9)
BF16, F32 = torch.bfloat16, torch.float32


def milliseconds(
    dtype: torch.dtype,
    microbatches: int,
    *,
    shards: int = 1,
    is_summed: bool = True,
    put_off: bool = False,
    zero: int = 0,
) -> tuple[float, float]:
    """Of an update whose masters are float32: as gradients are made, and as they are sent."""
    summed = summed_as(dtype, F32, shards, Options(zero=zero), is_summed=is_summed)
    added = summed.added(10**6, microbatches, DEVICE, put_off=put_off)
    return 1e3 * added, 1e3 * summed.sent(10**6, microbatches, DEVICE)


def test_sums_of_masters_of_their_own() -> None:
    """Three microbatches add twice: 2 bytes read, 4 read and written; the first one becomes float32. One alone is sent
    as float32."""
    assert milliseconds(BF16, 3) == pytest.approx((2 * 10 + 6, 0))
    assert milliseconds(BF16, 3, put_off=True) == pytest.approx((2 * 10 + 6, 0))
    assert milliseconds(BF16, 1) == pytest.approx((0, 6))


def test_sums_in_place() -> None:
    """Two additions of 12 bytes; where ranks sum it, the first one is copied. Products that are put off add by
    themselves."""
    assert milliseconds(F32, 3, is_summed=False) == pytest.approx((24, 0))
    assert milliseconds(F32, 3) == pytest.approx((24 + 8, 0))
    assert milliseconds(F32, 1, is_summed=False) == (0, 0)
    assert milliseconds(F32, 3, put_off=True) == (0, 0)


def test_gradients_that_are_scattered() -> None:
    """Each of three is sent as float32; a rank adds a quarter of two to its rows. With ZeRO 1 it adds whole ones."""
    assert milliseconds(BF16, 3, shards=4, zero=2) == pytest.approx((0, 3 * 6 + 2 * 12 / 4))
    assert milliseconds(F32, 3, shards=4, zero=2) == pytest.approx((0, 2 * 12 / 4))
    assert milliseconds(F32, 3, shards=4, zero=1) == pytest.approx((24, 0))


@pytest.mark.parametrize(("zero", "mesh"), [(0, {"pp": 2, "dp": 2}), (1, {"dp": 4}), (1, {"dp": 2, "tp": 2})])
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_copies_that_are_sent_together_are_reckoned_with(zero: int, mesh: dict[str, int], precision: str) -> None:
    """A tied table, and all else of a small model, in one message: what solvers add up is what programs hold."""
    case = case_of(Recipe(layers=2, tied=True))
    microbatches, model = 2 * mesh.get("pp", 1), case.model.float() if precision == "bf16" else case.model
    given = {**PINNED, "zero": zero, "precision": precision, "microbatches": microbatches, "recompute": "none"}
    job = compile_shared(model, 4, sample=case.batch, mesh=mesh, cluster=FAST, **given)
    held = job.memory().predicted
    for index, rank in enumerate(job.plan.rank_plans):
        assert not rank.action  # it was added up
        assert rank.peak_bytes == pytest.approx(held[job.job.mesh.rank(pp=index)].peak_bytes, rel=0.025)
