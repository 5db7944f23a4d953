"""Ops that are a function of their own in emitted text. They communicate nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.errors import BatchError
from autopar.runtime.recomputation import runs_again

aten = torch.ops.aten


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


def masked_scatter_rows(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``x.masked_scatter(mask, source)`` of this rank's rows ``[b, ...]`` of all three, as an image's features go to
    the places that its row's tokens leave.

    Raises BatchError where these rows have other places than what is to go there: then it is of other rows. A GPU is
    not waited for; there, a kernel stops that says so.
    """
    places = mask.expand(x.shape).sum()
    if type(places) is Tensor:  # else it has no value
        _check_places(places, source)
    return x.masked_scatter(mask, source)


def _check_places(places: Tensor, source: Tensor) -> None:
    if places.device.type != "cpu":
        aten._assert_async.msg(places == source.numel(), "rows have more or fewer places than values to fill them")
    elif int(places) != source.numel():
        raise BatchError(
            f"some rows of the batch, of one rank or microbatch, have {int(places)} places for what their own samples "
            f"give, {source.numel()} values {list(source.shape)}: a batch is split by rows, so that each row's images "
            "(or what else goes there) must be in the same row of their tensor, as many in each, as in the sample that "
            "the job was compiled with; compile it with such a batch if others are meant"
        )
