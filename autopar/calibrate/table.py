"""What was measured beside what the cost models say of it with the fitted figures, for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from rich.table import Table

from autopar.calibrate.run import Calibration
from autopar.calibrate.samples import KIB, MIB, Message, Product
from autopar.cost_models import collective, compute


def tables(calibration: Calibration) -> list[Table]:
    """Products by dtype and size, then the collectives of each link by ranks, bytes and kind."""
    links = {message.link: None for message in calibration.messages}
    return [
        _products(calibration),
        *(_collectives(calibration, [m for m in calibration.messages if m.link == link]) for link in links),
    ]


def measurements(calibration: Calibration) -> list[dict[str, Any]]:
    """Every measurement, with the ``fitted_seconds`` that the cost models say of it, for machines."""
    products = (asdict(p) | {"fitted_seconds": _of_product(calibration, p)} for p in _used(calibration))
    messages = (asdict(m) | {"fitted_seconds": _of_message(calibration, m)} for m in calibration.messages)
    return [*products, *messages]


def _used(calibration: Calibration) -> list[Product]:
    """Those of dtypes of which there is a rate."""
    return [p for p in calibration.products if p.dtype in calibration.cluster.device.flops_per_second]


def _of_product(calibration: Calibration, product: Product) -> float:
    """Of a short run, as it was measured: what is left of the rate without a pause is another figure."""
    device = replace(calibration.cluster.device, sustained_fraction=1.0)
    return compute.seconds(product.flops, product.moved_bytes, product.dtype, device, float(product.m * product.n))


def _of_message(calibration: Calibration, message: Message) -> float:
    return collective.seconds(message.kind, message.bytes_, message.size, getattr(calibration.cluster, message.link))


def _products(calibration: Calibration) -> Table:
    rates = calibration.cluster.device.flops_per_second
    rows = _used(calibration)
    errors = [_of_product(calibration, p) / p.seconds - 1 for p in rows]
    table = Table("m x k x n", *rates, title=f"products: GFLOP/s (error of the fit, {_typical(errors)})")
    cells = {
        ((p.m, p.k, p.n), p.dtype): f"{p.flops / p.seconds / 1e9:,.1f} ({error:+.0%})"
        for p, error in zip(rows, errors, strict=True)
    }
    for shape in dict.fromkeys((p.m, p.k, p.n) for p in rows):
        table.add_row(" x ".join(map(str, shape)), *(cells.get((shape, dtype), "") for dtype in rates))
    return table


def _collectives(calibration: Calibration, messages: Sequence[Message]) -> Table:
    link = messages[0].link
    errors = [_of_message(calibration, m) / m.seconds - 1 for m in messages]
    kinds = list(dict.fromkeys(m.kind for m in messages))
    title = f"{link.replace('_', ' ')}: microseconds (error of the fit, {_typical(errors)})"
    table = Table("ranks", "bytes", *kinds, title=title)
    cells = {
        (m.size, _nominal(m.bytes_), m.kind): f"{m.seconds * 1e6:,.0f} ({error:+.0%})"
        for m, error in zip(messages, errors, strict=True)
    }
    for ranks, size in sorted({(ranks, size) for ranks, size, _ in cells}):
        table.add_row(str(ranks), _bytes(size), *(cells.get((ranks, size, kind), "") for kind in kinds))
    return table


def _typical(errors: Iterable[float]) -> str:
    return f"median {median(map(abs, errors)):.0%}"


def _nominal(bytes_: int) -> int:
    """Groups that don't divide a message send a few bytes less: the power of two that was meant."""
    return 1 << (bytes_ - 1).bit_length()


def _bytes(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count / KIB:g} KiB"
