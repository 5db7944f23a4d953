"""What each unit's backward takes to add up gradients, as :mod:`autopar.planner.gradients` prices it, for bounds.

Left out is what ranks that sum a gradient copy of it, since units don't know which ranks do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx

from autopar.cluster import Device
from autopar.graph import Model, info
from autopar.options import Options
from autopar.planner.block_costs import put_off_weights
from autopar.planner.gradients import summed_as


class Kind(NamedTuple):
    """Parameters that are split on the same axes, computed with in one dtype and trained in one; ``put_off``: their
    gradients are made by products that can be."""

    split: tuple[str, ...]
    dtype: torch.dtype
    master: torch.dtype
    put_off: bool

    @classmethod
    def of(cls, node: fx.Node, put_off: bool) -> Kind:
        """Of a block's parameter, as if it was trained in the dtype that it is computed with in."""
        data = info(node)
        split = tuple(axis for axis, kind in data.types().items() if kind.is_shard)
        return cls(split, data.meta.dtype, data.meta.dtype, put_off)


def kinds_by_call(model: Model) -> dict[int, Counter[Kind]]:
    """Call -> elements of the trained parameters that it is the first to use."""
    put_off = put_off_weights(model)
    seen: set[str] = set()
    found: dict[int, Counter[Kind]] = {}
    of_blocks = [[(Kind.of(node, node in put_off), info(node)) for node in block.parameters] for block in model.blocks]
    for index, call in enumerate(model.calls):
        found[index] = Counter()
        for name, (kind, data) in zip(call.parameters, of_blocks[call.block], strict=True):
            known = model.parameters[name]
            if known.trainable and not known.is_buffer and name not in seen:
                seen.add(name)
                found[index][kind._replace(master=known.master or data.meta.dtype)] += data.meta.numel
    return found


class Sums(NamedTuple):
    """What adding up gradients depends on: over how many ranks the rows of parameters are stored, by the axes that they
    are split on; microbatches of an update; whether backwards are two passes."""

    shards: tuple[tuple[tuple[str, ...], int], ...]
    zero: int
    offload: tuple[str, ...]
    microbatches: int
    split: bool

    def seconds(self, kinds: Mapping[Kind, float], options: Options, device: Device) -> float:
        """Per microbatch at least, under ``options`` with this ZeRO stage and offload."""
        shards, seconds = dict(self.shards), []
        for kind, elements in kinds.items():
            summed = summed_as(kind.dtype, kind.master, shards[kind.split], options, is_summed=False)
            put_off = self.split and kind.put_off
            seconds.append(summed.added(elements, self.microbatches, device, put_off=put_off))
            seconds.append(summed.sent(elements, self.microbatches, device))
        return math.fsum(seconds) / self.microbatches


class Adding(NamedTuple):
    """Seconds of adding up gradients in an update of one microbatch, of two, and of each more."""

    one: float
    two: float
    more: float

    def each(self, microbatches: int) -> float:
        """Per microbatch."""
        total = self.one if microbatches == 1 else self.two + (microbatches - 2) * self.more
        return total / microbatches


def adding(sums: Sums, kinds: Mapping[Kind, float], options: Options, device: Device) -> Adding:
    """Of any number of microbatches, whatever ``sums`` says."""
    one, two, three = (n * sums._replace(microbatches=n).seconds(kinds, options, device) for n in (1, 2, 3))
    return Adding(one, two, three - two)
