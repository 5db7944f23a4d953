"""The arithmetic of a cross entropy of which a rank has some classes: statistics of tokens, gradient by logits.

For t tokens, of logits ``y [t, c]`` in float32 at least; no communication here. With m the maximum of a token's logits
and s the sum of ``exp(y - m)``, both over all classes, q the gradient of the loss by the token's entropy, and
smoothing ε over C classes,

    entropy = log s + m - (1 - ε) y[target] - ε/C sum y          dy = q (exp(y - m) / s - (1 - ε) [target] - ε/C)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """The targets of some tokens, as ``rows [t]`` of the local table where they are ``here [t]``; 0 elsewhere.

    ``counts [t]``: whether the token has a target. One that is no class is a row that no table has: gather refuses it.
    """

    rows: Tensor
    here: Tensor
    counts: Tensor

    @classmethod
    def of(cls, target: Tensor, first: int, rows: int, classes: int, ignore_index: int) -> Targets:
        """From ``target [t]`` of ``classes``, of which ``rows`` from ``first`` on are here."""
        counts = target != ignore_index
        here = counts & (target >= first) & (target < first + rows)
        no_class = counts & ((target < 0) | (target >= classes))
        return cls((target - first).masked_fill(~here, 0).masked_fill(no_class, -1), here, counts)

    def __getitem__(self, chunk: slice) -> Targets:
        return Targets(self.rows[chunk], self.here[chunk], self.counts[chunk])


def slices(tokens: int, chunks: int) -> Iterator[slice]:
    """``chunks`` neighbouring parts of almost equal length; no more than there are tokens, at least one."""
    chunks = max(1, min(chunks, tokens))
    for i in range(chunks):
        yield slice(tokens * i // chunks, tokens * (i + 1) // chunks)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def statistics_(wide: Tensor, top: Tensor, targets: Targets, *, smooth: bool, valid: int | None = None) -> Tensor:
    """``[4, t]``: ``top``, sum of exponentials under it, the target's logit, the sum of logits (0 unless ``smooth``).

    ``top [t]`` is the maximum of a token's logits here, or on all ranks. ``wide [t, c]``, of whose classes ``valid``
    are no padding, becomes the exponentials.
    """
    hit = wide.gather(1, targets.rows.unsqueeze(1)).squeeze(1).masked_fill(~targets.here, 0)
    total = wide[:, :valid].sum(1) if smooth else torch.zeros_like(top)
    return torch.stack([top, wide.sub_(top.unsqueeze(1)).exp_().sum(1), hit, total])


def gradient_(
    wide: Tensor, targets: Targets, slope: Tensor, smoothing: float, classes: int, valid: int | None = None
) -> Tensor:
    """dy, in the memory of ``wide [t, c]``, which is the probabilities times ``slope [t]``, the q above.

    ``classes`` are those of all ranks, without padding; ``valid`` as in :func:`statistics_`.
    """
    wide.scatter_add_(1, targets.rows.unsqueeze(1), (slope * targets.here * (smoothing - 1)).unsqueeze(1))
    if smoothing:
        wide[:, :valid].sub_((smoothing / classes * slope).unsqueeze(1))  # -= would copy the result onto itself
    return wide
