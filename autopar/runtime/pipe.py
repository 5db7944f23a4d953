"""Messages between pipeline stages: activations one way, gradients the other.

Each direction between ranks, of each of the two, has a communicator of its own: so none ever waits for another, as
:mod:`autopar.schedules.progress` asks. A message is all tensors of one boundary for one microbatch, sent one after
another in the order of the program; both ends know their shapes, so nothing else travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from autopar.runtime import program
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.collectives import receive_, send, subgroups
from autopar.runtime.modules import dtype_of

Lane = tuple[str, bool]
"""``"F"`` or ``"B"``, and whether the message goes to a higher index on ``pp``."""


@dataclass(frozen=True)
class Message:
    """Tensors on their way here."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> tuple[Tensor, ...]:
        wait_all(self.works)
        return self.tensors


def wait_all(works: Sequence[dist.Work | None]) -> None:
    """Until all are done; a profiler sees the time as ``WAIT``, not as that of the pass which needs them."""
    if any(work is not None for work in works):
        with record_function("WAIT"):
            for work in works:
                if work is not None:
                    work.wait()


def lanes(placement: Sequence[int]) -> tuple[Lane, ...]:
    """The lanes that messages between neighbouring stages take, in a fixed order."""
    used: set[Lane] = set()
    for here, there in pairwise(placement):
        if here != there:
            used |= {("F", there > here), ("B", here > there)}
    return tuple(sorted(used, key=lambda lane: (lane[0] == "B", not lane[1])))


class Outbox:
    """Tensors on their way to others, each kept until it is theirs."""

    def __init__(self) -> None:
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        """Keep one more, and let go of those that have arrived. Raises what went wrong with one of these."""
        still = []
        for other, kept in [*self._sending, (work, tensor)]:
            if other.is_completed():
                other.wait()
            else:
                still.append((other, kept))
        self._sending = still

    def flush(self) -> None:
        """Until all have arrived."""
        wait_all([work for work, _ in self._sending])
        self._sending.clear()


class Pipe:
    """This rank's end of the pipeline, which sends by way of ``outbox``. All ranks of the world must make theirs, with
    the same ``placement``."""

    def __init__(self, axes: Axes, placement: Sequence[int], outbox: Outbox) -> None:
        self._outbox = outbox
        self._device = axes.device
        self._index = axes["pp"].index
        self._lanes: dict[Lane, Axis] = {}
        for number, lane in enumerate(lanes(placement)):
            line = axes["pp"]
            self._lanes[lane] = line if number == 0 else subgroups(axes, {line.ranks: "mesh_pp"})[line.ranks]

    def send(self, tensors: Sequence[Tensor], what: str, to: int) -> None:
        """Start to send; the tensors must not change until the peer has them."""
        axis = self._lanes[what, to > self._index]
        for tensor in tensors:
            contiguous = tensor.contiguous()
            self._outbox.add(send(contiguous, axis, to), contiguous)

    def receive(self, specs: Sequence[program.Tensor], what: str, source: int) -> Message:
        """Start to receive tensors of the shapes and dtypes in ``specs``."""
        axis = self._lanes[what, self._index > source]
        tensors = tuple(torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=self._device) for spec in specs)
        return Message(tensors, tuple(receive_(tensor, axis, source) for tensor in tensors))
