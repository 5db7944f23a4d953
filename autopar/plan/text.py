"""How plans write figures: three digits and a unit that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autopar.plan.parts import EIGHTHS

_SHORT: Final = 32  # characters of units that are named one by one


def seconds_text(seconds: float) -> str:
    """``4.31 s``, ``12.3 ms``; "inf s" where there is no such time."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{_three(seconds / factor)} {unit}"
    return f"{_three(seconds / 1e-9)} ns" if seconds else "0 s"


def _three(value: float) -> str:
    """Three digits, zeros at the end too, and more where a number has more: ``4.00``, ``12.3``, ``1,024``."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def bytes_text(bytes_: float) -> str:
    """``1.5 GiB``."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if bytes_ >= factor:
            value = bytes_ / factor
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:,.0f} {unit}"
    return f"{bytes_:.0f} B"


def flops_text(flops: float) -> str:
    """``989 TFLOP``."""
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def percent_text(share: float) -> str:
    """``12.3 %`` of a share of 0.123; what is there and rounds to nothing is ``< 0.1 %``."""
    return "< 0.1 %" if 0 < share < 5e-4 else f"{100 * share:.1f} %"


def change_text(share: float) -> str:
    """``+12.3 %`` of a share of 0.123 more, ``-5.0 %`` of one of 0.05 less."""
    return f"{'+' if share >= 0 else '-'}{percent_text(abs(share))}" if abs(share) >= 5e-4 else "same"


def offload_text(share: int) -> str:
    """``to the host``, ``3 of 8 to the host``; "" where nothing goes."""
    return (f"{share} of {EIGHTHS} to the host" if share < EIGHTHS else "to the host") if share else ""


def units_text(units: Sequence[str]) -> str:
    """``glue, layers.0``, or ``model.layers.0 … model.layers.3 (4)`` of more; code between modules has no path."""
    named = [unit or "(glue)" for unit in units]
    text = ", ".join(named)
    return text if len(named) < 3 and len(text) <= _SHORT else f"{named[0]} … {named[-1]} ({len(named)})"


def spans_text(numbers: Sequence[int]) -> str:
    """``0-3, 8-11`` of rising numbers."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def dispatch_text(nodes: int) -> str:
    """How tokens travel to experts by way of so many nodes; 1: at once."""
    return "to all ranks at once" if nodes == 1 else f"once to each of {nodes} nodes"
