"""How many numbers and bytes compressed tensors are: what the planner counts, the runtime does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

BLOCK: Final = 256
"""Numbers in 8 bits that share one factor."""

LEAST_SHARE: Final = 32
"""What has fewer elements than this part of a layer's input is a statistic (a norm's, a softmax's), kept as it is."""


def eight_bit_bytes(count: int) -> int:
    """``count`` numbers as a byte each, whole blocks of them, and a float32 for every block."""
    return -(-count // BLOCK) * (BLOCK + 4)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """``(dim 0, all the rest)``; a vector or a scalar has one row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def low_rank_pays(shape: Sequence[int], rank: int) -> bool:
    """Whether a gradient of ``shape`` is fewer numbers in ``rank``: a full rank never is."""
    rows, columns = matrix_shape(shape)
    return rank * (rows + columns) < rows * columns


def sent_elements(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int]:
    """How many numbers the sums of gradients of these shapes are over: exact, and in ``rank``."""
    exact = low = 0
    for shape in shapes:
        rows, columns = matrix_shape(shape)
        exact += rows * columns
        low += rank * (rows + columns) if low_rank_pays(shape, rank) else rows * columns
    return exact, low
