"""Weights that are there only while they are used: gathered layer by layer, one ahead, and freed.

The units of a stage in the order of their use are layers and the code between them. A layer says itself when it is
reached: by a forward hook, and in the backward by a hook on the gradients of what it returned (as FSDP2: Zhao et al.,
"PyTorch FSDP", VLDB 2023, section 4.3). Then the units behind it are freed, the next layer's gather starts, and the
layer goes on once its own is complete. Autograd runs what was computed last first, so when a backward reaches a layer,
all that was computed after it is done. Code between layers has no hook: it is ready when the layer before it is
reached. Recomputation inside of a backward runs forward hooks again; by then all that it needs is there.

A pass that follows another of the same stage begins with units that are at the end of that: they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.store import Store, Unit


@dataclass(frozen=True)
class _Walk:
    """The units of one pass in the order in which it reaches them; ``asks``: whether a hook says so."""

    units: Sequence[Unit]
    asks: Sequence[bool]

    def ready_from(self, place: int) -> list[Unit]:
        """The units at ``place`` and after it that no hook asks for."""
        end = place
        while end < len(self.units) and not self.asks[end]:
            end += 1
        return list(self.units[place:end])

    def group(self, place: int) -> list[Unit]:
        """The unit at ``place``, and what has to be ready with it; none behind the last."""
        return [*self.units[place : place + 1], *self.ready_from(place + 1)]


class Streaming:
    """Gathers and frees the copies of one store. All ranks that share its masters run the same passes."""

    def __init__(self, store: Store) -> None:
        self._roots = store.roots
        self._units = [unit for unit, _ in store.sequence]
        self._layers = [layer is not None for _, layer in store.sequence]
        self._constant: set[int] = set()  # layers whose outputs have no gradient
        self._kind = ""
        self._walk = _Walk([], [])
        self._ahead: list[Unit] = []
        for index, (_, layer) in enumerate(store.sequence):
            if layer is not None:
                self._hook(index, layer)

    def prefetch(self, kind: str) -> None:
        """Start what a forward (``F``) or backward (``B``, ``I``) begins with: ``GATHER_F``, ``GATHER_B``."""
        for unit in self._first(kind):
            unit.hold(self)

    def rest(self, kinds: Mapping[str, bool]) -> None:
        """Between passes: what passes of ``kinds`` begin with is there, or (False) on its way; nothing else is."""
        self._ahead = []
        self._release([*self._units, *self._roots])
        for kind, there in kinds.items():
            self.prefetch(kind)
            for unit in self._first(kind) if there else ():
                unit.wait()

    @contextmanager
    def running(self, kind: str, following: str) -> Iterator[None]:
        """Within, a pass of ``kind`` runs; ``following`` is that of the next pass of this rank, if of this stage."""
        self._kind, self._walk = kind, self._walk_of(kind)
        self._ahead = self._first(following) if following else []
        self.prefetch(kind)
        for unit in (*self._roots, *self._walk.ready_from(0)):
            unit.wait()
        yield
        self._kind = ""
        for unit in self._ahead:
            unit.hold(self)
        self._release([*self._units, *self._roots])

    def _hook(self, index: int, layer: nn.Module) -> None:
        """Hooks run as they are where the layer, or all of its stage, is compiled."""
        eager: Callable[..., Any] = torch.compiler.disable  # it has no types
        layer.register_forward_pre_hook(eager(lambda *_: self._reach(index, backward=False)))
        layer.register_forward_hook(eager(lambda _, __, result: self._made(index, result)))

    def _made(self, index: int, result: Any) -> None:
        """A layer's forward is over: its backward begins with the first gradient of what it returned."""
        if self._kind != "F":
            return
        outputs = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]
        outputs = [x for x in outputs if x.requires_grad]
        if not outputs:
            self._constant.add(index)
            return
        torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self._reach(index, backward=True), mode="any")

    def _reach(self, index: int, *, backward: bool) -> None:
        """A layer is next: its weights have to be there."""
        if not self._kind or backward == (self._kind == "F"):
            return  # recomputed inside of a backward, or called outside of a pass
        place = index if self._kind == "F" else len(self._units) - 1 - index
        self._release(self._walk.units[:place])
        needed = self._walk.group(place)
        for unit in needed:
            unit.hold(self)
        for unit in needed:
            unit.wait()  # first, since what travels together needs memory twice until it is there
        for unit in self._walk.group(place + len(needed)) or self._ahead:
            unit.hold(self)

    def _first(self, kind: str) -> list[Unit]:
        """What a pass needs before its first layer, and that layer."""
        walk = self._walk_of(kind)
        start = walk.ready_from(0)
        return [*self._roots, *start, *walk.group(len(start))]

    def _walk_of(self, kind: str) -> _Walk:
        if kind == "F":
            return _Walk(self._units, self._layers)
        asks = [layer and index not in self._constant for index, layer in enumerate(self._layers)]
        return _Walk(self._units[::-1], asks[::-1])

    def _release(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit not in self._ahead:
                unit.release(self)
