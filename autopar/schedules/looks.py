"""How all pictures of timelines name and colour each kind of action, and how they write durations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from autopar.schedules.actions import Action, Schedule

_Pair = tuple[str, str]


@dataclass(frozen=True)
class Look:
    """How one kind is drawn.

    ``fills``: characters without colour, for the first and the second chunk of a rank, and so on in turn.
    ``first`` and ``last``: two colours each, which neighbouring microbatches take in turn, for the first and the
    last chunk of a rank; chunks between lie between.
    """

    name: str
    fills: _Pair
    first: _Pair
    last: _Pair

    @classmethod
    def plain(cls, name: str, fill: str, *colours: str) -> Look:
        """The look of a kind that belongs to no stage, or never to several chunks at once."""
        pair = (colours[0], colours[-1])
        return cls(name, (fill, fill), pair, pair)


LOOKS: Final[Mapping[str, Look]] = {
    "F": Look("forward", ("-", "_"), ("#1f5f9e", "#3478b8"), ("#4fb0a5", "#79c7be")),
    "B": Look("backward", ("=", "≡"), ("#e09f3e", "#f2c46d"), ("#bb4d3a", "#cf6e5d")),
    "I": Look("input gradient", ("~", "≈"), ("#d2742b", "#e39a62"), ("#a8324f", "#bf5872")),
    "W": Look("weight gradient", ("+", "*"), ("#4f8a3c", "#6ba257"), ("#a3b545", "#b9c96b")),
    "S": Look.plain("logits", "s", "#9b3a70", "#b5588b"),
    "U": Look.plain("exponentials", "u", "#d08fb4", "#dca9c6"),
    "T": Look.plain("softmax and its gradient", "t", "#5f4690", "#7b63ab"),
    "E": Look.plain("embedding", "e", "#8a6d3b", "#a1854f"),
    "G": Look.plain("embedding gradient", "g", "#5f4a25", "#78613a"),
    "UPDATE": Look.plain("update", "^", "#555555", "#707070"),
    "STEP": Look.plain("step", "#", "#555555"),
}
"""What occupies a rank, in the order of a legend."""


class Shade(NamedTuple):
    """Colours of a box and of the text on it, ``#rrggbb``."""

    box: str
    text: str


def shade(kind: str, microbatch: int, chunk: int, chunks: int) -> Shade:
    """The colours of a box of chunk ``chunk`` (from 0) of the ``chunks`` that a rank holds."""
    look, parity = LOOKS[kind], microbatch % 2
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    box = _mix(look.first[parity], look.last[parity], part)
    return Shade(box, "#000000" if _luminance(box) > _DARK else "#ffffff")


def chunk_of(schedule: Schedule, action: Action) -> int:
    """The place of the action's stage among the stages of its rank; 0 for an action without a stage."""
    if action.stage < 0:
        return 0
    return schedule.placement[: action.stage].count(schedule.placement[action.stage])


_DARK: Final = 0.179
"""Relative luminance below which white text has more contrast than black: WCAG 2.1, contrast ratio."""


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _mix(first: str, last: str, part: float) -> str:
    mixed = (round(a + (b - a) * part) for a, b in zip(_channels(first), _channels(last), strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _luminance(colour: str) -> float:
    """Relative luminance, 0 to 1: WCAG 2.1."""
    scaled = [value / 255 for value in _channels(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in scaled]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def duration_text(seconds: float) -> str:
    """Three significant digits in the largest unit that leaves at least one before the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
