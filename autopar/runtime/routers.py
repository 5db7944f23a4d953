"""What a rank knows of its routers while it runs: how many slots each expert got, and where experts are stored.

A *slot* is one token's use of one expert; a token has k of them. Counts are in the model's own numbers of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from autopar.runtime.program import Router

Told = Callable[[str, Tensor, int], None]
"""Gets the layer, the experts of its slots, and how many experts there are."""


class Routers:
    """By module path of the layer. Counts only within :meth:`counting`, so that what a backward computes again, or a
    look at the module outside of a step, counts nothing."""

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}
        self._places: dict[str, Tensor] = {}
        self._imbalance: dict[str, float] = {}
        self._counting = False
        self._told: Told | None = None
        self.total: dict[str, Tensor] = {}  # of the step, over all ranks, once that is known

    def declare(self, routers: Iterable[Router], device: torch.device) -> None:
        """Where the experts of ``routers`` are stored, if not in the model's order, and what they are reckoned with."""
        for router in routers:
            self._imbalance[router.layer] = router.imbalance
            if router.order:
                order = torch.tensor(router.order, device=device)
                self._places[router.layer] = torch.argsort(order)

    def imbalance(self, layer: str) -> float:
        """How many times its share the fullest rank is reckoned to get."""
        return self._imbalance.get(layer, 1.0)

    @contextmanager
    def counting(self, told: Told | None = None, *, counts: bool = True) -> Iterator[None]:
        """Within, what :meth:`seen` sees counts: the forward of a microbatch. Or (``counts`` False) it doesn't; or
        ``told`` is told of it instead."""
        before = self._counting, self._told
        self._counting, self._told = counts, told
        try:
            yield
        finally:
            self._counting, self._told = before

    def seen(self, layer: str, index: Tensor, experts: int) -> Tensor:
        """``index`` (of any shape, int64: the experts of tokens' slots; outside of ``0 … experts - 1``: none) as the
        places at which these experts are stored. A slot of no expert becomes ``experts`` where places differ."""
        if self._counting:
            (self._told or self.count)(layer, index, experts)
        places = self._places.get(layer)
        if places is None:
            return index
        return places[index.clamp(0, experts - 1)].masked_fill(~_is_expert(index, experts), experts)

    def take(self) -> dict[str, Tensor]:
        """The counts ``[experts]``, int64, of this rank's tokens by layer since the last call; all begin at zero."""
        counts, self._counts = self._counts, {}
        return counts

    def count(self, layer: str, index: Tensor, experts: int) -> None:
        """Add what :meth:`seen` saw."""
        flat = index.flatten()
        if layer not in self._counts:
            self._counts[layer] = torch.zeros(experts, dtype=torch.int64, device=index.device)
        self._counts[layer].scatter_add_(0, flat.clamp(0, experts - 1), _is_expert(flat, experts).to(torch.int64))


def _is_expert(index: Tensor, experts: int) -> Tensor:
    return (index >= 0) & (index < experts)
