"""The lower convex hull of pairs of costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Figure = float | Array

_LITTLE: Final = (*(0.0025 * n for n in range(1, 9)), 0.025, 0.03, 0.04, 0.05, 0.065, 0.085, 0.11, 0.15)
"""Parts of a pass by which it may take longer, that bounds tell apart: plans that are far from the best needn't be told
from each other as closely."""
_EVEN: Final = 12  # more of them, evenly spread
_FEW: Final = 8  # amounts, evenly spread: enough for what is likely


def hull(points: Sequence[tuple[float, float]]) -> tuple[Array, Array]:
    """The lower convex hull of ``(bytes, seconds)``, by falling bytes and rising seconds."""
    kept: list[tuple[float, float]] = []
    for point in sorted(set(points), key=lambda p: (-p[0], p[1])):
        if kept and point[0] == kept[-1][0]:
            continue
        while len(kept) > 1 and _is_above(kept[-2], kept[-1], point):
            kept.pop()
        kept.append(point)
    lowest = min(range(len(kept)), key=lambda i: (kept[i][1], kept[i][0]))
    kept = kept[lowest:]
    return np.array([p[0] for p in kept]), np.array([p[1] for p in kept])


def _is_above(left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]) -> bool:
    """Whether ``middle`` lies on or above the line between the others."""
    return (middle[1] - left[1]) * (left[0] - right[0]) >= (right[1] - left[1]) * (left[0] - middle[0])


def amounts(saved: Array, extra: Array, passes: Figure) -> tuple[Array, Array]:
    """Points of a hull, by falling ``saved`` bytes and rising ``extra`` seconds: both its ends, some between, and the
    more where they are little above the first one, of passes of so many seconds (of each way: ``[value, way]``)."""
    more = extra[0] + np.multiply.outer(np.array(_LITTLE), passes)
    more = np.minimum(more[(more < extra[-1]).reshape(len(more), -1).any(axis=1)], extra[-1])
    even = np.linspace(extra[0], extra[-1], _EVEN + 1).reshape(-1, *(1 for _ in np.shape(passes)))
    taken = np.sort(np.concatenate([np.broadcast_to(even, (len(even), *np.shape(passes))), more]), axis=0)
    return np.interp(taken, extra, saved), taken


def few_amounts(saved: Array, extra: Array) -> tuple[Array, Array]:
    """The same, a few with as many bytes between them."""
    kept = np.linspace(saved[0], saved[-1], _FEW + 1)
    return kept, np.interp(-kept, -saved, extra)
