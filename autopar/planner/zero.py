"""What ZeRO, offload and masters move in a step, and how long that takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from autopar.cluster import Link
from autopar.cost_models import collective
from autopar.graph import Model, info
from autopar.options import Options
from autopar.planner.block_costs import DataLine, Machine
from autopar.schedules.weight_moves import WeightMoves


def weight_moves(model: Model, options: Options, lines: Iterable[DataLine]) -> WeightMoves:
    """Which GATHER and SCATTER actions a schedule needs."""
    shards = max(line.shards for line in lines) if options.zero else 1
    streamed = (options.zero == 3 and shards > 1) or "parameters" in options.offload
    has_copies = any(known.master is not None for known in model.parameters.values())
    twice = shards > 1 or has_copies or "optimizer" in options.offload
    return WeightMoves("pass" if streamed else "step" if twice else "", options.zero >= 2 and shards > 1)


@dataclass(frozen=True)
class MoveCosts:
    """Seconds that the weights of some calls and their gradients are on their way.

    Masters on the host are copied at the device's ``host_bytes_per_second``: this rank's part, before it is gathered,
    and back once its gradient is summed.
    """

    model: Model
    options: Options
    machine: Machine

    def gather_seconds(self, calls: Sequence[int]) -> float:
        """One gather of all weights of ``calls``: a collective for each call, in the dtype that is computed with."""
        return math.fsum(
            _seconds("all_gather", gathered, self._shards(line), line.shard) + self._host(gathered, line)
            for line, gathered, _ in self._calls(calls)
        )

    def scatter_seconds(self, calls: Sequence[int]) -> float:
        """One SCATTER of their gradients."""
        if self.options.zero < 2:
            return 0.0
        return math.fsum(
            _seconds("reduce_scatter", sent, self._shards(line), line.shard) for line, _, sent in self._calls(calls)
        )

    def reduce_seconds(self, calls: Sequence[int]) -> float:
        """What REDUCE has left to sum, and to copy to the host."""
        sums: Counter[DataLine] = Counter()
        for line, _, sent in self._calls(calls):
            sums[line] += sent
        return math.fsum(self._reduce_seconds(sent, line) for line, sent in sums.items())

    def _reduce_seconds(self, sent: int, line: DataLine) -> float:
        shards = self._shards(line)
        if shards == 1:
            return _seconds("all_reduce", sent, line.size, line.whole) + self._host(sent, line)
        once = _seconds("reduce_scatter", sent, shards, line.shard) if self.options.zero == 1 else 0.0
        rest = _seconds("all_reduce", sent // shards, line.size // shards, line.replicate)
        return once + rest + self._host(sent, line)

    def _shards(self, line: DataLine) -> int:
        return line.shards if self.options.zero else 1

    def _host(self, bytes_: int, line: DataLine) -> float:
        """Of copying this rank's part of so many bytes, where masters lie on the host."""
        rate = self.machine.device.host_bytes_per_second
        on_host = not {"optimizer", "parameters"}.isdisjoint(self.options.offload) and rate
        return bytes_ / self._shards(line) / rate if on_host else 0.0

    def _calls(self, calls: Sequence[int]) -> Iterator[tuple[DataLine, int, int]]:
        """Per call and line, bytes of its weights as they are gathered, and of their gradients as they are sent."""
        for call in (self.model.calls[index] for index in calls):
            gathered: Counter[DataLine] = Counter()
            sent: Counter[DataLine] = Counter()
            for name, node in zip(call.parameters, self.model.block_of(call).parameters, strict=True):
                known, data = self.model.parameters[name], info(node)
                if known.trainable and not known.is_buffer:
                    line, meta = self.machine.line(data.types()), data.meta
                    gathered[line] += meta.bytes
                    sent[line] += meta.numel * self._sent_dtype(known.master or meta.dtype).itemsize
            yield from ((line, gathered[line], sent[line]) for line in gathered)

    def _sent_dtype(self, master: torch.dtype) -> torch.dtype:
        return getattr(torch, self.options.reduce_dtype) if self.options.reduce_dtype else master


def _seconds(kind: str, bytes_: int, size: int, link: Link) -> float:
    return collective.seconds(kind, bytes_, size, link) if bytes_ else 0.0
