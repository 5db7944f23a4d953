"""Ops that are a function of their own in emitted text. They communicate nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.recomputation import runs_again


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


def averaged(value: Tensor, average: Tensor, momentum: float, *, count: int | None = None) -> Tensor:
    """Move the buffer ``average`` towards ``value`` (as many elements) by a share of ``momentum``, in place.

    ``value`` is a variance of ``count`` elements, of which the unbiased one is averaged; None: it is averaged as it is.
    Returns what the average is then, in the dtype of ``value``. A recomputation moves nothing: its forward did.
    (As ``torch.nn.functional.batch_norm`` moves ``running_mean`` and ``running_var``.)
    """
    with torch.no_grad():
        new = value.reshape(average.shape)
        new = new if count is None else new * (count / max(1, count - 1))
        moved = torch.lerp(average.to(new.dtype), new, momentum)
        if not runs_again():
            average.copy_(moved)
        return moved
