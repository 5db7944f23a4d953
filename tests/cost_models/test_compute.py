"""The roofline of one op, against hand computation and for its shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Device, presets
from autopar.cost_models import compute
from autopar.errors import ClusterError

DEVICE = Device(
    name="round numbers",
    kind="cuda",
    memory_bytes=10**9,
    flops_per_second={"bfloat16": 1e12},
    memory_bytes_per_second=1e9,
    launch_seconds=1e-3,
    achievable_fraction=0.5,
    ramp_seconds=1.0,
)


@pytest.mark.parametrize(
    ("flops", "moved_bytes", "seconds"),
    [
        (1e12, 0, 4.001),  # as much work as the ramp: a quarter of the peak
        (9e12, 0, 20.001),  # nine times as much: 0.45 of it
        (1e12, 8e9, 8.001),  # memory takes longer
        (0, 3e9, 3.001),
        (0, 0, 0.001),
    ],
)
def test_by_hand(flops: float, moved_bytes: float, seconds: float) -> None:
    assert compute.seconds(flops, moved_bytes, "bfloat16", DEVICE) == pytest.approx(seconds, rel=1e-12)


def test_only_matrix_products_need_a_rate() -> None:
    assert compute.seconds(0, 1e9, "int64", DEVICE) == 1.001
    with pytest.raises(ClusterError, match="no flops_per_second for int64"):
        compute.seconds(1, 1e9, "int64", DEVICE)


sizes = st.floats(1, 1e18)


@given(sizes, sizes, st.floats(1, 1e18), st.sampled_from(presets()))
def test_more_work_never_takes_less_time(flops: float, more: float, moved: float, preset: str) -> None:
    device = Cluster.load(preset).device
    low, high = sorted((flops, more))
    assert compute.seconds(low, moved, "float32", device) <= compute.seconds(high, moved, "float32", device)
    assert compute.seconds(moved, low, "float32", device) <= compute.seconds(moved, high, "float32", device)


@given(sizes, sizes, st.sampled_from(presets()))
def test_large_products_are_more_efficient_up_to_what_is_achievable(a: float, b: float, preset: str) -> None:
    device = Cluster.load(preset).device

    def efficiency(flops: float) -> float:
        return compute.EFFICIENCY(
            flops=flops,
            flops_per_second=device.rate("float32"),
            achievable_fraction=device.achievable_fraction,
            ramp_seconds=device.ramp_seconds,
        )

    assert 0 < efficiency(min(a, b)) <= efficiency(max(a, b)) <= device.achievable_fraction


@given(st.integers(1, 64), st.floats(1e6, 1e15))
def test_splitting_a_product_gains_at_most_the_number_of_ranks(ranks: int, flops: float) -> None:
    device = Cluster.load("h100").device
    whole = compute.seconds(flops, 0, "bfloat16", device)
    part = compute.seconds(flops / ranks, 0, "bfloat16", device)
    assert part <= whole * (1 + 1e-12)
    assert part * ranks >= whole * (1 - 1e-12)


def test_a_huge_product_on_an_h100_runs_at_the_published_rate() -> None:
    """794.5 TFLOP/s: the largest measured for this device, stas00/ml-engineering."""
    rate = 1e18 / compute.seconds(1e18, 0, "bfloat16", Cluster.load("h100").device)
    assert rate == pytest.approx(794.5e12, rel=1e-3)
