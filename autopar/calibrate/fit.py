"""The figures with which the cost models come closest to what was measured.

Both models are sums of unknowns times known counts. A product takes operations / (rate * filled) + ramp + launch, with
rate and ramp of its dtype unknown; a collective takes call + messages * latency + bytes / bandwidth, with call, latency
and 1 / bandwidth unknown. The counts are read off :mod:`autopar.cost_models`. Each unknown is 0 or more. What is
minimised is the sum of the relative errors' absolute values (E. J. Schlossmacher, JASA 68(344), 1973: least squares,
reweighted), which a few disturbed measurements don't move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopar.calibrate.samples import Message, Product
from autopar.cluster import Device, Link
from autopar.cost_models import collective, compute

Floats: TypeAlias = NDArray[np.float64]

_CLEARLY: Final = 1.5
_ROUNDS: Final = 50
_SMALLEST_ERROR: Final = 1e-4
"""Relative; smaller ones weigh no more, so that no weight is infinite."""


@dataclass(frozen=True)
class ProductFit:
    """Rates in FLOP/s, and ramps in seconds at those rates, by dtype."""

    flops_per_second: dict[str, float]
    ramp_seconds: dict[str, float]


@dataclass(frozen=True)
class LinkFit:
    """What :class:`autopar.cluster.Link` says of the same names; ``inf`` bytes/s where size didn't matter."""

    latency_seconds: float
    bytes_per_second: float
    call_seconds: float
    peer_bytes_per_second: float
    error: float
    """Mean absolute error of the seconds, relative."""


def fit_products(
    products: Sequence[Product], launch_seconds: float, bytes_per_second: float, multiprocessors: int = 0
) -> ProductFit:
    """Of products that take clearly longer than their operands take to move; the others say nothing of a rate.

    Where all of a dtype's products are such others, the largest counts all the same.
    """
    rates, ramps = {}, {}
    for dtype in dict.fromkeys(product.dtype for product in products):
        kept = _bound_by_rate([product for product in products if product.dtype == dtype], bytes_per_second)
        counts = np.array([_work(product, multiprocessors) for product in kept])
        seconds = np.array([product.seconds for product in kept])
        inverse_rate, ramp = smallest_errors(counts, seconds, launch_seconds)
        reached = max(product.flops / product.seconds for product in kept)
        rates[dtype] = float(1 / inverse_rate) if inverse_rate > 0 else reached
        ramps[dtype] = float(ramp)
    return ProductFit(rates, ramps)


def _work(product: Product, multiprocessors: int) -> tuple[float, float]:
    """How often the model takes the seconds of a FLOP: read off a device of 1 FLOP/s without a ramp; and the ramp."""
    dtype, endless = product.dtype, 1e18
    unit = Device("", "cpu", 10**9, {dtype: 1.0}, endless, 0.0, 1.0, 0.0, multiprocessors=multiprocessors)
    work = compute.seconds(product.flops, 0.0, dtype, unit, float(product.m * product.n))
    return work, 1.0


def _bound_by_rate(products: Sequence[Product], bytes_per_second: float) -> list[Product]:
    """Of one dtype."""
    found = [p for p in products if p.seconds > _CLEARLY * p.moved_bytes / bytes_per_second]
    return found or [max(products, key=lambda product: product.flops)]


def fit_link(messages: Sequence[Message]) -> LinkFit:
    """Of collectives that all cross the same link.

    Each pair of ranks has a wire of its own where that explains the times of groups of several sizes clearly better.
    Left out, where there is more, are those for which libraries choose between a ring and a tree.
    """
    messages = [m for m in messages if not _may_be_tree(m)] or messages
    shared, sizes = _fit_link(messages, 0.0), {message.size for message in messages}
    if sizes == {2} or 2 not in sizes:
        return shared
    pair, most = (_fit_link([m for m in messages if m.size == size], 0.0) for size in (2, max(sizes)))
    share = pair.bytes_per_second / most.bytes_per_second
    if not 0 < share < 1:
        return shared
    own = _fit_link(messages, share)
    return own if own.error * _CLEARLY < shared.error else shared


def _may_be_tree(message: Message) -> bool:
    return message.kind == "all_reduce" and message.link == "inter_node" and message.size > 2


def _fit_link(messages: Sequence[Message], peer_share: float) -> LinkFit:
    """Where the wire of a pair has ``peer_share`` of a rank's bandwidth to all others; 0: all of it."""
    counts = np.array([_counts(message, peer_share) for message in messages])
    seconds = np.array([message.seconds for message in messages])
    found = smallest_errors(counts, seconds)
    call, latency, inverse_rate = map(float, found)
    rate = 1 / inverse_rate if inverse_rate > 0 else float("inf")
    error = float(np.mean(np.abs(counts @ found / seconds - 1)))
    return LinkFit(latency, rate, call, peer_share * rate if peer_share else 0.0, error)


def _counts(message: Message, peer_share: float) -> tuple[float, float, float]:
    """How often the model takes a call, a latency, and the seconds of a byte: read off its linear parts."""
    endless = 1e18
    unit_links = (
        Link("", 0.0, endless, call_seconds=1.0),
        Link("", 1.0, endless),
        Link("", 0.0, 1.0, peer_bytes_per_second=peer_share),
    )
    call, latency, bytes_ = (
        collective.seconds(message.kind, message.bytes_, message.size, link) for link in unit_links
    )
    return round(call, 6), round(latency, 6), bytes_


def smallest_errors(counts: Floats, seconds: Floats, known: float = 0.0) -> Floats:
    """``x >= 0`` with the smallest sum of ``|counts @ x + known - seconds| / seconds``. Columns of zeros get 0."""
    rows, wanted = counts / seconds[:, None], 1 - known / seconds
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        found = _least_squares(rows * weights[:, None], wanted * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ found - wanted), _SMALLEST_ERROR))
    return found


def _least_squares(rows: Floats, wanted: Floats) -> Floats:
    """Non-negative: the best of the solutions in which some unknowns are 0 and the others come out positive."""
    scale = np.linalg.norm(rows, axis=0)
    present = [int(i) for i in np.flatnonzero(scale)]
    best, best_cost = np.zeros(rows.shape[1]), float("inf")
    for count in range(len(present), 0, -1):
        for columns in combinations(present, count):
            taken: Any = list(columns)
            found = np.linalg.lstsq(rows[:, taken] / scale[taken], wanted, rcond=None)[0]
            cost = float(np.sum((rows[:, taken] / scale[taken] @ found - wanted) ** 2))
            if cost < best_cost and (found >= 0).all():
                best, best_cost = np.zeros(rows.shape[1]), cost
                best[taken] = found / scale[taken]
        if count == len(present) and best_cost < float("inf"):
            break  # no fewer come closer
    return best
