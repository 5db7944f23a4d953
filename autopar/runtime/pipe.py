"""Messages between pipeline stages: activations one way, gradients the other, each on its own communicator.

So neither direction ever waits for the other, as :mod:`autopar.schedules.progress` asks. A message is all
tensors of one boundary for one microbatch, sent one after another in the order of the program; both ends know
their shapes, so nothing else travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime import program
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.collectives import receive_, send, subgroups
from autopar.runtime.modules import dtype_of


@dataclass(frozen=True)
class Message:
    """Tensors on their way here."""

    tensors: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


class Pipe:
    """This rank's end of the pipeline. All ranks of the world must make theirs."""

    def __init__(self, axes: Axes) -> None:
        self._device = axes.device
        self.forward = axes["pp"]
        self.backward: Axis = subgroups(axes, {self.forward.ranks: "mesh_pp"})[self.forward.ranks]
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensors: Sequence[Tensor], axis: Axis, to: int) -> None:
        """Start to send; the tensors are kept until the peer has them, and must not change until then."""
        self._drop_sent()
        for tensor in tensors:
            contiguous = tensor.contiguous()
            self._sending.append((send(contiguous, axis, to), contiguous))

    def receive(self, specs: Sequence[program.Tensor], axis: Axis, source: int) -> Message:
        """Start to receive tensors of the shapes and dtypes in ``specs``."""
        tensors = tuple(torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=self._device) for spec in specs)
        return Message(tensors, tuple(receive_(tensor, axis, source) for tensor in tensors))

    def flush(self) -> None:
        """Until everything that was sent has arrived."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _drop_sent(self) -> None:
        still = []
        for work, tensor in self._sending:
            if work.is_completed():
                work.wait()
            else:
                still.append((work, tensor))
        self._sending = still
