"""The norm of the whole gradient, every element counted once, wherever copies and parts of it lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from autopar.runtime.axes import Axes
from autopar.runtime.collectives import reduce_sum_
from autopar.runtime.grads import Reducer
from autopar.runtime.program import Parameter
from autopar.spmd import parse


def global_norm(reducers: Mapping[int, Reducer], axes: Axes) -> Tensor:
    """The 2-norm of the model's gradient: a float64 scalar, equal on all ranks.

    ``reducers`` by stage, their sums complete. Shards count where they lie (ZeRO's too), replicas on the first rank
    of their axis, tied copies on the first stage. One all-reduce of one number. All ranks must call it.
    """
    squares = [norm.double().square().to(axes.device) for norm in _counted_norms(reducers, axes)]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=axes.device)
    reduce_sum_(total, axes.world.meant_for("the norm of the gradient"))
    return total.sqrt()


def clip_(reducers: Mapping[int, Reducer], axes: Axes, max_norm: float) -> Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``; returns what it was.

    The same factor as :func:`torch.nn.utils.clip_grad_norm_`. All ranks must call it.
    """
    norm = global_norm(reducers, axes)
    parameters = [p for reducer in reducers.values() for p in reducer.masters.values()]
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _counted_norms(reducers: Mapping[int, Reducer], axes: Axes) -> Iterator[Tensor]:
    """Norms of the gradients that this rank counts, in float32 at least."""
    for reducer in reducers.values():
        for name, grad in reducer.gradients().items():
            if _counts(reducer.specs[name], reducer.placement, axes):
                wide = torch.promote_types(grad.dtype, torch.float32)
                yield torch.linalg.vector_norm(grad, dtype=wide)


def _counts(parameter: Parameter, placement: Sequence[int], axes: Axes) -> bool:
    """Whether this rank is the one, of those that hold the same elements, that counts them."""
    if parameter.shared_stages and axes["pp"].index != placement[min(parameter.shared_stages)]:
        return False
    kinds = {name: parse(text) for name, text in parameter.types.items()}
    copies = {name: axis for name, axis in axes.items() if name != "pp"}
    if parameter.zero > 1:
        data = axes.mesh.data_axes(tuple(kinds))
        copies = {name: axis for name, axis in copies.items() if name not in data}
        copies["zero"] = axes.line(tuple(kinds)).replicate
    return all(axis.index == 0 or (name in kinds and kinds[name].is_shard) for name, axis in copies.items())
