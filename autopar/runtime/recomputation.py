"""Recomputation in emitted code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")


def recompute(function: Callable[..., Result], *arguments: object) -> Result:
    """``function(*arguments)``, of which autograd keeps the arguments only; the backward calls it again.

    As ``torch.utils.checkpoint`` without reentrance: it runs again when the backward first needs a tensor of it, up to
    the last op that one is kept of. No generator's state is kept: random ops are seeded by where they stand
    (:mod:`autopar.runtime.random`), so they repeat.
    (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.)
    """
    return cast(Result, checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False))
