"""The roofline of one op, against hand computation and for its shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Device, presets
from autopar.cost_models import compute
from autopar.cost_models.compute import Work
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
            filled=1,
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
    """794.5 TFLOP/s for a moment: the largest measured for this device, stas00/ml-engineering; less without a pause."""
    device = Cluster.load("h100").device
    rate = 1e18 / compute.seconds(1e18, 0, "bfloat16", device)
    assert rate == pytest.approx(794.5e12 * device.sustained_fraction, rel=1e-3)


def test_the_last_round_of_tiles_takes_as_long_as_a_full_one() -> None:
    """A result of 108 tiles of 256 x 128 is one round on an A100; 162 are two, or three of half the size."""

    def filled(tiles: int) -> float:
        return compute.FILLED(made=tiles * 256 * 128, multiprocessors=108, flops=1.0, slice=compute.SLICE)

    assert filled(108) == 1.0
    assert filled(162) == pytest.approx(max(162 / 216, 0.9))
    assert filled(109) < 0.7


def test_a_small_result_of_long_sums_is_made_in_slices() -> None:
    """The gradient of a 64 x 64 convolution, over 401,408 places: 392 slices nearly fill an A100 with tiles of
    128 x 128."""
    made, places = 64 * 64, 401408

    def filled(places: int) -> float:
        return compute.FILLED(made=made, multiprocessors=108, flops=2 * made * places, slice=compute.SLICE)

    assert filled(places) == pytest.approx(compute.SLICED * 0.9 * 392 * made / (128 * 128 * 108))
    assert filled(compute.SLICE) == pytest.approx(0.75 * made / (64 * 128 * 108))


def test_a_backward_by_hand() -> None:
    """A product of two factors takes two more; one of its two is made half as often where only one has a gradient."""
    both = Work(1e12, 0, "bfloat16", made=10, factors=(10, 10))
    one = Work(1e12, 0, "bfloat16", made=10, factors=(10,))
    assert compute.forward_seconds(both, DEVICE) == pytest.approx(4.001)
    assert compute.backward_seconds(both, DEVICE) == pytest.approx(2 * 4.001)
    assert compute.backward_seconds(one, DEVICE) == pytest.approx(4.001)
    again = Work(1e12, 0, "bfloat16", made=10, factors=(10, 10), repeats=1)
    assert compute.backward_seconds(again, DEVICE) == pytest.approx(3 * 4.001)
    pointwise = Work(0, 2e9, "bfloat16", back_bytes=3e9)
    assert compute.forward_seconds(pointwise, DEVICE) == pytest.approx(2.001)
    assert compute.backward_seconds(pointwise, DEVICE) == pytest.approx(3.001)


def test_attention_has_shares_of_its_own() -> None:
    work = Work(1e18, 0, "bfloat16", made=1e9, factors=(1e9, 1e9, 1e9), fused=True)
    there, back = compute.forward_seconds(work, DEVICE), compute.backward_seconds(work, DEVICE)
    assert there == pytest.approx(1e18 / (compute.ATTENTION[0] * 1e12), rel=1e-3)
    assert back == pytest.approx(compute.ATTENTION_BACKWARD * 1e18 / (compute.ATTENTION[1] * 1e12), rel=1e-3)


@given(
    st.integers(1, 64),
    st.floats(1e6, 1e16),
    st.floats(1, 1e11),
    st.floats(1, 1e11),
    st.booleans(),
    st.sampled_from(presets()),
)
def test_a_part_of_the_work_takes_at_least_that_part_of_the_time(
    parts: int, flops: float, moved: float, made: float, fused: bool, preset: str
) -> None:
    """The search's bounds divide times by ranks."""
    device = Cluster.load(preset).device

    def work(share: float) -> Work:
        factors = (made * share, moved * share / 2)
        return Work(flops * share, moved * share, "bfloat16", made * share, factors, fused=fused)

    for seconds in (compute.forward_seconds, compute.backward_seconds):
        whole, part = seconds(work(1.0), device), seconds(work(1 / parts), device)
        assert part <= whole * (1 + 1e-9)
        assert part * parts >= whole * (1 - 1e-9)


def test_elements_that_are_made_one_by_one() -> None:
    device = replace(DEVICE, element_seconds=1e-9)
    work = Work(0, 1e9, "float32", back_bytes=2e9, loose=5e8, back_loose=1e9)
    assert compute.forward_seconds(work, device) == pytest.approx(1.501, rel=1e-12)
    assert compute.backward_seconds(work, device) == pytest.approx(3.001, rel=1e-12)
    assert compute.forward_seconds(work, DEVICE) == pytest.approx(1.001, rel=1e-12)


def test_rows_of_any_length_slow_products_down() -> None:
    large = Work(1e18, 0, "bfloat16")
    slow = replace(large, is_aligned=False)
    for way in (compute.forward_seconds, compute.backward_seconds):
        assert way(slow, DEVICE) == pytest.approx(way(large, DEVICE) / compute.UNALIGNED, rel=1e-4)


def test_what_is_swept_beside_a_product_is_not_hidden_by_it() -> None:
    product = Work(1e12, 0, "bfloat16")
    swept = replace(product, swept_bytes=3e9, back_swept_bytes=5e9)
    assert compute.forward_seconds(swept, DEVICE) - compute.forward_seconds(product, DEVICE) == pytest.approx(3)
    assert compute.backward_seconds(swept, DEVICE) - compute.backward_seconds(product, DEVICE) == pytest.approx(5)
