"""Compiling with everything pinned: tests of what a plan does say which plan, and don't search for one."""

from __future__ import annotations

import math
from typing import Any, Final

from torch import nn

import autopar
from autopar.batch import flatten
from benchmarks.plain import PLAIN
from tests.shared_captures import compile_shared

PINNED: Final = PLAIN


def compile_pinned(model: nn.Module, gpus: int, **given: Any) -> autopar.ParallelModel:
    """:func:`autopar.compile` with :data:`PINNED`, all ranks on dp, and up to four microbatches per stage, unless
    something else is ``given``."""
    if given.get("plan") is not None:
        return compile_shared(model, gpus, **given)
    mesh = given.get("mesh") or {"dp": gpus}
    more = {**PINNED, "mesh": mesh, **{name: value for name, value in given.items() if value is not None}}
    if "microbatch" not in more and "microbatches" not in more:
        more["microbatches"] = _microbatches(given["sample"], mesh, given.get("batch_dim", 0))
    return compile_shared(model, gpus, **more)


def _microbatches(sample: Any, mesh: dict[str, int], batch_dim: int) -> int:
    stages = mesh.get("pp", 1)
    if stages == 1:
        return 1
    tensors = [tensor for tensor in flatten(sample)[0].values() if tensor.dim() > batch_dim]
    rows = math.gcd(*(tensor.shape[batch_dim] for tensor in tensors)) // mesh.get("dp", 1)
    return max((count for count in range(1, 4 * stages + 1) if rows % count == 0), default=1)
