"""What ZeRO, offload and masters move in a step, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.cluster import Link
from autopar.cost_models import collective
from autopar.graph import Model, info
from autopar.options import Options
from autopar.schedules.weight_moves import WeightMoves

SHARD, REPLICATE = "dp_shard", "dp_replicate"
"""Parts of the axis dp: ranks that share one copy of what ZeRO splits, and those that hold the same part."""


def weight_moves(model: Model, options: Options, sizes: Mapping[str, int]) -> WeightMoves:
    """Which GATHER and SCATTER actions a schedule needs; ``sizes`` by axis."""
    shards = sizes[SHARD] if options.zero else 1
    streamed = (options.zero == 3 and shards > 1) or "parameters" in options.offload
    has_copies = any(known.master is not None for known in model.parameters.values())
    twice = shards > 1 or has_copies or "optimizer" in options.offload
    return WeightMoves("pass" if streamed else "step" if twice else "", options.zero >= 2 and shards > 1)


@dataclass(frozen=True)
class MoveCosts:
    """Seconds that the weights of some calls and their gradients are on their way, on ``links`` and ``sizes`` by axis.

    Masters on the host are copied at ``host_bytes_per_second``: this rank's part, before it is gathered, and back once
    its gradient is summed.
    """

    model: Model
    options: Options
    links: Mapping[str, Link]
    sizes: Mapping[str, int]
    host_bytes_per_second: float = 0.0

    @property
    def _shards(self) -> int:
        return self.sizes[SHARD] if self.options.zero else 1

    def gather_seconds(self, calls: Sequence[int]) -> float:
        """One gather of all weights of ``calls``: a collective for each call, in the dtype that is computed with."""
        gathered = [bytes_ for bytes_, _ in self._calls(calls)]
        return math.fsum(self._seconds("all_gather", bytes_, SHARD) for bytes_ in gathered) + self._host(sum(gathered))

    def scatter_seconds(self, calls: Sequence[int]) -> float:
        """One SCATTER of their gradients."""
        if self.options.zero < 2:
            return 0.0
        return math.fsum(self._seconds("reduce_scatter", bytes_, SHARD) for _, bytes_ in self._calls(calls))

    def reduce_seconds(self, calls: Sequence[int]) -> float:
        """What REDUCE has left to sum, and to copy to the host."""
        sent = sum(bytes_ for _, bytes_ in self._calls(calls))
        if self._shards == 1:
            return self._seconds("all_reduce", sent, "dp") + self._host(sent)
        once = self._seconds("reduce_scatter", sent, SHARD) if self.options.zero == 1 else 0.0
        return once + self._seconds("all_reduce", sent // self._shards, REPLICATE) + self._host(sent)

    def _seconds(self, kind: str, bytes_: int, axis: str) -> float:
        size = self._shards if axis == SHARD else self.sizes[axis]
        return collective.seconds(kind, bytes_, size, self.links[axis]) if bytes_ else 0.0

    def _host(self, bytes_: int) -> float:
        """Of copying this rank's part of so many bytes, where masters lie on the host."""
        on_host = not {"optimizer", "parameters"}.isdisjoint(self.options.offload) and self.host_bytes_per_second
        return bytes_ / self._shards / self.host_bytes_per_second if on_host else 0.0

    def _calls(self, calls: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Per call, bytes of its weights as they are gathered, and of their gradients as they are sent."""
        for call in (self.model.calls[index] for index in calls):
            gathered = sent = 0
            for name, node in zip(call.parameters, self.model.block_of(call).parameters, strict=True):
                known, meta = self.model.parameters[name], info(node).meta
                if known.trainable and not known.is_buffer:
                    gathered += meta.bytes
                    sent += meta.numel * self._sent_dtype(known.master or meta.dtype).itemsize
            yield gathered, sent

    def _sent_dtype(self, master: torch.dtype) -> torch.dtype:
        return getattr(torch, self.options.reduce_dtype) if self.options.reduce_dtype else master
