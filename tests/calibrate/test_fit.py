"""The fit finds the constants that made the times, in spite of noise and of a few disturbed runs."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.calibrate.fit import fit_link, fit_products, smallest_errors
from autopar.calibrate.samples import Message, Product
from autopar.cluster import Cluster, Device, Link
from autopar.cost_models import collective, compute

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
NOISE = 0.02


def disturbed(seconds: float, rng: random.Random) -> float:
    """Two per cent of noise; one run in twenty takes three times as long."""
    return seconds * rng.gauss(1, NOISE) * (3 if rng.random() < 0.05 else 1)


def device(rate: float, ramp: float, multiprocessors: int = 0) -> Device:
    base = dataclasses.replace(Cluster.load("cpu").device, memory_bytes_per_second=1e17, launch_seconds=1e-6)
    rates = {"float32": rate, "bfloat16": 3 * rate}
    return dataclasses.replace(base, flops_per_second=rates, ramp_seconds=ramp, multiprocessors=multiprocessors)


def products(of: Device, seed: int | None = None) -> list[Product]:
    """From far below the ramp to far above it."""
    rng = random.Random(seed)
    side = (of.rate("float32") * of.ramp_seconds / 2) ** (1 / 3)
    sides = [max(2, round(side * 1.3**step)) for step in range(-5, 9)]
    found = [Product(dtype, m, m, m, 4, 1.0) for dtype in of.flops_per_second for m in sides]
    times = [compute.seconds(p.flops, 0.0, p.dtype, of, float(p.m * p.n)) for p in found]
    noisy = times if seed is None else [disturbed(time, rng) for time in times]
    return [dataclasses.replace(p, seconds=time) for p, time in zip(found, noisy, strict=True)]


def messages(of: Link, seed: int | None = None) -> list[Message]:
    rng = random.Random(seed)
    found = []
    for kind in KINDS:
        for size in (2,) if kind == "send" else (2, 4, 8):
            for bytes_ in (1 << shift for shift in range(10, 29, 2)):
                seconds = collective.seconds(kind, bytes_, size, of)
                found.append(
                    Message(kind, "intra_node", size, bytes_, seconds if seed is None else disturbed(seconds, rng))
                )
    return found


@settings(max_examples=20)
@given(rate=st.floats(1e9, 1e14), ramp=st.floats(1e-6, 1e-3), seed=st.integers(0, 10**6))
def test_rates_and_ramps_are_recovered(rate: float, ramp: float, seed: int) -> None:
    fit = fit_products(products(device(rate, ramp), seed), 1e-6, 1e17)
    assert fit.flops_per_second == pytest.approx({"float32": rate, "bfloat16": 3 * rate}, rel=0.05)
    assert fit.ramp_seconds == pytest.approx({"float32": ramp, "bfloat16": ramp}, rel=0.1)


@pytest.mark.parametrize("multiprocessors", [0, 132])
def test_without_noise_they_are_exact(multiprocessors: int) -> None:
    """Products whose results leave multiprocessors idle among them."""
    of = device(1e13, 1e-5, multiprocessors)
    fit = fit_products(products(of), 1e-6, 1e17, multiprocessors)
    assert fit.flops_per_second == pytest.approx(dict(of.flops_per_second), rel=1e-6)
    assert fit.ramp_seconds == pytest.approx(dict.fromkeys(of.flops_per_second, 1e-5), rel=1e-4)


def test_a_few_disturbed_runs_change_nothing() -> None:
    of, link = device(1e13, 1e-5), Link("made up", 2e-6, 4e11, call_seconds=1e-5)
    slowed = [dataclasses.replace(p, seconds=3 * p.seconds) if i % 5 == 2 else p for i, p in enumerate(products(of))]
    assert fit_products(slowed, 1e-6, 1e17).flops_per_second == pytest.approx(dict(of.flops_per_second), rel=1e-3)
    late = [dataclasses.replace(m, seconds=3 * m.seconds) if i % 5 == 2 else m for i, m in enumerate(messages(link))]
    assert fit_link(late).bytes_per_second == pytest.approx(4e11, rel=1e-3)


def test_products_bound_by_memory_say_nothing_of_a_rate() -> None:
    of = device(1e12, 1e-6)
    thin = [Product("float32", 4096, 4096, 1, 4, 1.1 * 4 * 4096 * 4096 / 1e10)] * 20
    fit = fit_products([*products(of), *thin], 1e-6, 1e10)
    assert fit.flops_per_second["float32"] == pytest.approx(1e12, rel=1e-6)
    assert fit_products(thin[:1], 1e-6, 1e10).flops_per_second["float32"] > 0


@settings(max_examples=20)
@given(latency=st.floats(1e-6, 1e-4), rate=st.floats(1e8, 1e12), call=st.floats(1e-5, 1e-3), seed=st.integers(0, 10**6))
def test_links_are_recovered(latency: float, rate: float, call: float, seed: int) -> None:
    """To 5 % of a small message's time what doesn't depend on bytes, where call and latency can't be told apart."""
    of = Link("made up", latency, rate, call_seconds=call)
    fit = fit_link(messages(of, seed))
    found = Link("found", fit.latency_seconds, fit.bytes_per_second, call_seconds=fit.call_seconds)
    for message in messages(of):
        again = collective.seconds(message.kind, message.bytes_, message.size, found)
        assert again == pytest.approx(message.seconds, rel=0.1)


def test_a_link_without_noise_is_exact() -> None:
    fit = fit_link(messages(Link("made up", 2e-6, 4e11, call_seconds=1e-5)))
    assert (fit.latency_seconds, fit.bytes_per_second, fit.call_seconds) == pytest.approx((2e-6, 4e11, 1e-5), rel=1e-5)


def test_pairs_with_a_wire_of_their_own_are_found() -> None:
    of = Link("made up", 2e-6, 4e11, peer_bytes_per_second=6e10, call_seconds=1e-5)
    fit = fit_link(messages(of, seed=1))
    assert fit.peer_bytes_per_second == pytest.approx(6e10, rel=0.05)
    assert fit.bytes_per_second == pytest.approx(4e11, rel=0.05)
    assert fit_link(messages(Link("made up", 2e-6, 4e11), seed=1)).peer_bytes_per_second == 0


def test_where_size_does_not_matter_bandwidth_is_endless() -> None:
    link = fit_link([Message("all_reduce", "intra_node", 2, bytes_, 1e-4) for bytes_ in (64, 1024)])
    assert link.bytes_per_second > 1e8
    assert 2 * link.latency_seconds + link.call_seconds == pytest.approx(1e-4, rel=1e-2)


def test_no_unknown_is_negative() -> None:
    """A line that falls is met best by a constant; its median is that with the smallest errors."""
    counts = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    slope, constant = smallest_errors(counts, np.array([3.0, 2.0, 1.0]))
    assert slope == 0
    assert 1 <= constant <= 2
