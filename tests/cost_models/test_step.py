"""The optimizer's share of a step."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from autopar.cluster import Cluster
from autopar.cost_models.step import (
    Collectives,
    add_seconds,
    copy_seconds,
    hidden,
    host_cast_seconds,
    left_seconds,
    optimizer_seconds,
    slowed_seconds,
)

DEVICE = dataclasses.replace(Cluster.load("cpu").device, memory_bytes_per_second=1e9)


def test_by_hand() -> None:
    """Seven passes over 4 bytes of a million elements at 1 GB/s; clipping adds three over the gradient."""
    assert optimizer_seconds(10**6, DEVICE) == pytest.approx(28e-3)
    assert optimizer_seconds(10**6, DEVICE, clip=True) == pytest.approx(40e-3)


def test_updates_on_the_host_are_as_fast_as_its_memory() -> None:
    """Seven passes over 4 bytes of a million elements at 0.1 GB/s; where that isn't known, as on the device."""
    known = dataclasses.replace(DEVICE, host_memory_bytes_per_second=1e8)
    assert optimizer_seconds(10**6, known, on_host=True) == pytest.approx(280e-3)
    assert optimizer_seconds(10**6, known) == optimizer_seconds(10**6, DEVICE, on_host=True) == pytest.approx(28e-3)
    assert host_cast_seconds(1e6, known) == pytest.approx(10e-3)
    assert host_cast_seconds(1e6, DEVICE) == 0.0


def test_itemsizes_by_hand() -> None:
    """Parameter twice, gradient once, and each of two moments twice."""
    update = partial(optimizer_seconds, 10**6, DEVICE, parameter_itemsize=1, gradient_itemsize=10, moment_itemsize=100)
    assert update() == pytest.approx(412e-3)
    assert update(clip=True) == pytest.approx(442e-3)


def test_adding_up_gradients_by_hand() -> None:
    """A gradient of 2 bytes an element read, its sum of 4 read and written; a copy is written once."""
    assert add_seconds(10**6, 2, 4, DEVICE) == pytest.approx(10e-3)
    assert copy_seconds(10**6, 2, 4, DEVICE) == pytest.approx(6e-3)


def test_elements_that_are_loaded_alone() -> None:
    """Where what is made is wider, a nanosecond for each of a million elements beside its bytes; and in updates."""
    device = dataclasses.replace(DEVICE, element_seconds=1e-9, host_memory_bytes_per_second=1e8)
    assert add_seconds(10**6, 2, 4, device) == pytest.approx(11e-3)
    assert copy_seconds(10**6, 2, 4, device) == pytest.approx(7e-3)
    assert copy_seconds(10**6, 4, 2, device) == copy_seconds(10**6, 3, 3, device) == pytest.approx(6e-3)
    assert add_seconds(10**6, 4, 4, device) == pytest.approx(12e-3)
    assert optimizer_seconds(10**6, device) == pytest.approx(29e-3)
    assert optimizer_seconds(10**6, device, on_host=True) == pytest.approx(280e-3)


def test_sums_of_gradients_run_beside_the_backward() -> None:
    """Of ten layers, nine sums may be hidden; those that take longer than the backward are left."""
    assert left_seconds(10.0, 10, 100.0) == pytest.approx(1.0)
    assert left_seconds(100.0, 10, 50.0) == pytest.approx(55.0)
    assert left_seconds(7.0, 1, 50.0) == 7.0
    assert left_seconds(0.0, 0, 1.0) == 0.0


def test_collectives_slow_what_runs_beside_them_by_hand() -> None:
    """A quarter of the device is held for 4 s, in which 3 s of a pass are computed; or until the pass ends."""
    assert slowed_seconds([Collectives(4.0, 1.0)], 10.0) == pytest.approx(1.0)
    assert slowed_seconds([Collectives(400.0, 100.0)], 9.0) == pytest.approx(3.0)
    assert slowed_seconds([Collectives(2.0, 1.0), Collectives(2.0, 0.0)], 10.0) == pytest.approx(1.0)
    assert slowed_seconds([Collectives(4.0, 0.0)], 10.0) == slowed_seconds([], 10.0) == 0.0


def test_only_what_is_hidden_runs_beside_a_pass() -> None:
    """Of 10 s with copies among them, of which 2 s are left, four fifths; of nothing, all."""
    assert hidden(Collectives(6.0, 3.0), 10.0, 2.0) == pytest.approx((4.8, 2.4))
    assert hidden(Collectives(0.0, 0.0), 0.0, 0.0) == (0.0, 0.0)
