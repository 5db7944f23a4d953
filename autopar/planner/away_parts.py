"""How much goes to the host: the part of what ranks have no room for at which a step is shortest.

The more goes there, the less is recomputed, and the shorter passes are (``plain``), until they wait for the copies: a
step is shortest about where copies no longer keep up. That is searched for by bisection, and where parts beyond lie on
a line, by where it crosses that of the passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

_TRIES: Final = 5
_WORTH: Final = 2e-3  # of the step: less isn't worth another try
_WAITED: Final = 1e-3  # of it: less isn't called waiting
_NEAR: Final = 1 / 8  # of what lies between two parts: so far from both is the next one at least


class Tried(NamedTuple):
    """Seconds of a step, if copies took no time (``plain``), and with them; inf where it doesn't fit."""

    plain: float
    seconds: float

    @property
    def waits(self) -> bool:
        """Whether copies are waited for, or can't make room enough."""
        return self.seconds > self.plain * (1 + _WAITED)


def parts(tried: Mapping[float, Tried]) -> Iterator[float]:
    """The parts to try: all of it, then what is likely better by what was ``tried`` so far, where the caller says how
    long each took before it asks for the next one; and a step with nothing on the host (0), if that fits. What it
    doesn't say that of is asked for again."""
    for _ in range(_TRIES):
        part = _next(tried) if 1.0 in tried else 1.0
        if part is None:
            return
        yield part


def _next(tried: Mapping[float, Tried]) -> float | None:
    """Between the best part so far and its next: the larger one if copies keep up with it, else the one that is further
    away. None where nothing between can be worth it."""
    best = min(tried, key=lambda part: (tried[part].seconds, part))
    low, high = max((part for part in tried if part < best), default=0.0), best
    above = min((part for part in tried if part > best), default=best)
    if not tried[best].waits or above - best > best - low:
        low, high = best, above
    middle, room = (low + high) / 2, _NEAR * (high - low)
    part, least = _crossing(tried, low, high) or (middle, tried[high].plain)
    if not low + room <= part <= high - room:  # too far to follow a line, or known already
        part, least = middle, tried[high].plain
    return part if least < tried[best].seconds * (1 - _WORTH) else None


def _crossing(tried: Mapping[float, Tried], low: float, high: float) -> tuple[float, float] | None:
    """Where steps that fall on as they do from beyond ``high`` to it would be as short as the passes between: the part,
    and seconds."""
    beyond = min((part for part in tried if part > high), default=None)
    if beyond is None or low not in tried or not all(map(math.isfinite, (*tried[high], tried[beyond].seconds))):
        return None
    rise = (tried[beyond].seconds - tried[high].seconds) / (beyond - high)
    fall = (tried[low].plain - tried[high].plain) / (high - low)
    if not (rise > 0 and 0 < fall < math.inf):
        return None
    back = (tried[high].seconds - tried[high].plain) / (rise + fall)
    return high - back, tried[high].plain + back * fall
