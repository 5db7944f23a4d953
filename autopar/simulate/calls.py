"""One rank's call of an operation: all that its peers, the scheduler and an error need to know of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from autopar.simulate.operations import Part
from autopar.simulate.sites import Site
from autopar.simulate.torch_private import version
from autopar.storages import is_data, unobserved


@dataclass(frozen=True)
class Group:
    """A process group: torch's name for it, its global ranks in group order, and what people call it."""

    name: str
    ranks: tuple[int, ...]
    label: str


@dataclass(frozen=True)
class Terms:
    """What all ranks of a collective must agree on; None: it has none, or ranks may differ in it."""

    operation: str
    tensors: int = 0
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[torch.Size, ...] | None = None
    reduction: str | None = None
    root: int | None = None


class Waiting(Protocol):
    """What a blocked rank waits for; ``str`` names the operation."""

    @property
    def site(self) -> Site: ...

    def needs(self) -> list[int]:
        """The ranks that must come before it can go on; empty: unknown."""
        ...


class Watch:
    """Notices that a tensor's values were changed by anybody but its operation."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.renew()

    def renew(self) -> None:
        """The values of now are right."""
        self._version = version(self.tensor)
        self._bytes = _bytes(self.tensor).clone()

    def is_changed(self) -> bool:
        # All views of a buffer share one version: a write beside this tensor is no change.
        if version(self.tensor) == self._version and not self.tensor.is_inference():
            return False
        return not torch.equal(_bytes(self.tensor), self._bytes)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass(eq=False)
class Meeting:
    """The calls that make up one collective: the ``number``-th of its group, counted from 1."""

    group: Group
    number: int
    calls: dict[int, Call] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """A collective, send or receive that ``rank`` (global) called at ``site``.

    ``shown`` are the tensors as the user gave them. ``peer`` is the other side of a send or receive as a rank
    of the group, None for a receive from anyone. Inputs of an ``is_async`` call are watched for writes.
    """

    terms: Terms
    group: Group
    rank: int
    parts: Sequence[Part]
    shown: Sequence[Tensor]
    site: Site
    is_async: bool
    peer: int | None = None
    tag: int = 0
    is_done: bool = False
    meeting: Meeting | None = None
    _watches: list[Watch] = field(default_factory=list)

    @property
    def index(self) -> int:
        """The rank within the group."""
        return self.group.ranks.index(self.rank)

    @property
    def receiver(self) -> int:
        """Of a send or receive: the rank within the group that receives."""
        return self.index if self.terms.operation == "recv" or self.peer is None else self.peer

    def launch(self, meeting: Meeting | None = None) -> None:
        """From here to :meth:`release`, the user must not write to the inputs."""
        self.meeting = meeting
        if self.is_async:
            with unobserved():
                inputs = [tensor for part in self.parts for tensor in part.inputs if is_data(tensor)]
                self._watches = [Watch(tensor) for tensor in inputs]

    def finish(self) -> None:
        """The data has moved; an input that is also an output has new values."""
        self.is_done = True
        self.meeting = None  # which refers to all its calls: their tensors would stay until the cycle is collected
        outputs = {id(tensor) for part in self.parts for tensor in part.outputs}
        for watch in self._watches:
            if id(watch.tensor) in outputs:
                with unobserved():
                    watch.renew()

    def release(self) -> None:
        """The user knows that it is done, and may write to the inputs."""
        self._watches = []

    def inputs_changed(self) -> bool:
        if not self._watches:
            return False
        with unobserved():
            return any(watch.is_changed() for watch in self._watches)

    def needs(self) -> list[int]:
        if self.meeting is not None:
            return [rank for rank in self.group.ranks if rank not in self.meeting.calls]
        if self.peer is not None:
            return [self.group.ranks[self.peer]]
        return [rank for rank in self.group.ranks if rank != self.rank]

    def __str__(self) -> str:
        operation = self.terms.operation
        towards = "dst" if operation in ("reduce", "gather", "send") else "src"
        words = _counted(described(tensor) for tensor in self.shown)
        if self.terms.reduction is not None:
            words.append(f"op={self.terms.reduction}")
        if self.terms.root is not None:
            words.append(f"{towards}={self.group.ranks[self.terms.root]}")
        if operation in ("send", "recv"):
            words.append(f"{towards}={'any' if self.peer is None else self.group.ranks[self.peer]}")
        if self.tag:
            words.append(f"tag={self.tag}")
        return f"{operation}({', '.join(words)}) on {self.group.label}"


def described(tensor: Tensor) -> str:
    """``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _counted(words: Iterable[str]) -> list[str]:
    """Equal neighbours as one: ``3 x float32[2]``."""
    counts = [(word, len(list(same))) for word, same in groupby(words)]
    return [word if count == 1 else f"{count} x {word}" for word, count in counts]
