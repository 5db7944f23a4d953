"""How many slots each expert of every layer got in a step: over all microbatches and ranks, equal on all of them.

Counting is :mod:`autopar.runtime.routers`'. The counts of a step are summed by one all-reduce of whole numbers over
the world, from which selection biases are updated too (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
Mixture-of-Experts", arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import ArgumentError
from autopar.runtime.axes import Axes
from autopar.runtime.collectives import reduce_sum_
from autopar.runtime.program import Router

Load = dict[str, list[int]]
"""Module path of the layer -> slots of each expert, in the model's order."""


def distinct(routers: Sequence[Router]) -> tuple[Router, ...]:
    """Each layer once: a layer that several stages call is a router of each."""
    return tuple({router.layer: router for router in routers}.values())


def total_load(routers: Sequence[Router], counts: Mapping[str, Tensor], axes: Axes) -> dict[str, Tensor]:
    """Layer -> ``[experts]``, int64: the sum of all ranks' ``counts`` (layer -> ``[experts]``).

    ``routers`` are those of the whole model, the same on every rank, each layer once. Ranks that hold the same tokens
    are counted once. All ranks must call it.
    """
    sizes = [router.experts for router in routers]
    flat = torch.zeros(sum(sizes), dtype=torch.int64, device=axes.device)
    parts = torch.split(flat, sizes)
    for router, part in zip(routers, parts, strict=True):
        if router.layer in counts and _is_first(router, axes):
            part.copy_(counts[router.layer])
    reduce_sum_(flat, axes.world.meant_for("loads of experts"))
    return {router.layer: part for router, part in zip(routers, parts, strict=True)}


def _is_first(router: Router, axes: Axes) -> bool:
    """Whether this rank is the one that counts, of those that hold the same tokens of the layer."""
    return all(axis.index == 0 for name, axis in axes.items() if name != "pp" and name not in router.split)


@torch.no_grad()
def update_bias_(bias: Tensor, load: Tensor, rate: float) -> None:
    """``bias [experts] += rate * sign(mean(load) - load)``, in place: who had less than its share is chosen sooner."""
    wide = load.to(torch.float64)
    bias.add_((wide.mean() - wide).sign().to(bias.dtype), alpha=rate)


def to_lists(load: Mapping[str, Tensor]) -> Load:
    return {layer: counts.tolist() for layer, counts in load.items()}


def added(loads: Iterable[Mapping[str, Sequence[int]]]) -> Load:
    """The loads of several steps as one."""
    total: Load = {}
    for load in loads:
        for layer, counts in load.items():
            total[layer] = [a + b for a, b in zip(total.get(layer, [0] * len(counts)), counts, strict=True)]
    return total


def save_load(path: Path, load: Mapping[str, Sequence[float]]) -> None:
    """Write ``load`` as JSON, one layer a line; :func:`read_load` reads it. Raises ArgumentError."""
    rows = [f" {json.dumps(layer)}: {json.dumps(list(counts))}" for layer, counts in load.items()]
    try:
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"can't write expert loads to {path}: {error.strerror or error}") from error


def read_load(given: str | Path | Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Layer -> load of each expert, from a file that :func:`save_load` wrote or a mapping.

    Raises ArgumentError where it is none: loads are finite, not negative, and not all zero.
    """
    name = "expert_load" if isinstance(given, Mapping) else f"expert_load={str(given)!r}"
    try:
        found = given if isinstance(given, Mapping) else json.loads(Path(given).read_text(encoding="utf-8"))
        loads = {str(layer): tuple(float(count) for count in counts) for layer, counts in dict(found).items()}
    except (OSError, ValueError, TypeError) as error:
        raise ArgumentError(f"{name} is no table of loads ({error}); give layer -> slots of each expert") from error
    for layer, load in loads.items():
        if not all(0 <= count < math.inf for count in load) or not sum(load):
            raise ArgumentError(f"{name}: the loads of {layer!r} must be finite, not negative, and not all zero")
    return loads
