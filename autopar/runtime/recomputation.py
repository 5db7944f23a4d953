"""Recomputation in emitted code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
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


def runs_again() -> bool:
    """Whether a backward runs the caller: it computes again what a forward did.

    ``torch.utils.checkpoint`` tells one backward from another by the same number. Compiled code is always the forward:
    a compiler leaves writes to buffers out of what it computes again.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
