"""One rank's share of ops whose local call is another function. They communicate nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_of_whole(
    x: Tensor,
    dim: int | list[int] | None = None,
    keepdim: bool = False,
    *,
    count: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's part of a mean over ``dim`` (None: all) of ``count`` elements, of which ``x`` holds some.

    The parts of all ranks add up to the mean: the result is pending (``P``).
    """
    total = x.sum(dtype=dtype) if dim is None else x.sum(dim, keepdim, dtype=dtype)
    return total / count
