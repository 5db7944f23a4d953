"""The lower convex hull of pairs of costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Figure = float | Array


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
