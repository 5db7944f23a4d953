"""How long passes take relative to each other: what a cost-aware generator orders them by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import ArgumentError
from autopar.schedules.timeline import Costs


@dataclass(frozen=True)
class PassTimes:
    """Relative times; only their ratios matter.

    ``forward``, ``input_gradient`` and ``weight_gradient`` have one value per stage. ``vocabulary`` has, per kind of
    vocabulary pass (``S``), one value per pipeline rank; absent: none. ``send`` is one message between neighbours,
    ``exchanges`` has one value per kind of the vocabulary's exchanges (``SUM_X``).
    Raises ArgumentError for tuples of different lengths, and for times that aren't finite numbers from 0 up.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    vocabulary: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    send: float = 0.0
    exchanges: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.input_gradient) == len(self.weight_gradient):
            raise ArgumentError(
                f"pass times have {len(self.forward)} forward, {len(self.input_gradient)} input_gradient and "
                f"{len(self.weight_gradient)} weight_gradient; give one of each per stage"
            )
        messages = (self.send, *self.exchanges.values())
        every = (self.forward, self.input_gradient, self.weight_gradient, messages, *self.vocabulary.values())
        for value in (value for values in every for value in values):
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"a pass time is {value}; it must be finite, from 0 up")

    @classmethod
    def unit(cls, stages: int, ranks: int) -> PassTimes:
        """Forward and both parts of the backward take 1 in each stage, the head's passes half of that."""
        head = dict.fromkeys(("S", "U", "T"), (0.5,) * ranks)
        return cls((1.0,) * stages, (1.0,) * stages, (1.0,) * stages, head)

    @classmethod
    def of(cls, costs: Costs) -> PassTimes:
        """The pass times of a timeline's costs; of its sends, the slowest counts for all."""
        head = costs.vocabulary_seconds
        parts = zip(costs.backward_seconds, costs.weight_seconds, strict=True)
        return cls(
            forward=costs.forward_seconds,
            input_gradient=tuple(backward - weight for backward, weight in parts),
            weight_gradient=costs.weight_seconds,
            vocabulary={kind: times for kind, times in head.items() if len(kind) == 1},
            send=max((*costs.send_forward_seconds, *costs.send_backward_seconds)),
            exchanges={kind: max(times) for kind, times in head.items() if len(kind) > 1},
        )

    def at_once(self) -> PassTimes:
        """As if messages and exchanges took no time."""
        return replace(self, send=0.0, exchanges={})
