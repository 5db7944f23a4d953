"""Which calls have weights that are alike, so that what these take to be held, moved and summed is found once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.graph import Model
from autopar.passes.recompute import own_modules


@dataclass(frozen=True)
class Alike:
    """Says it of the calls of ``model``, most of whose layers are alike."""

    model: Model

    def key(self, calls: Sequence[int]) -> Hashable:
        """A key that is equal for two runs of calls if these are of the same blocks in the same order, and their
        weights are stored alike. Weights that several calls read are alike only if they are the same."""
        return tuple(self._marks[index] for index in calls)

    @cached_property
    def _marks(self) -> dict[int, int]:
        """Call -> a number, the same for those that are alike."""
        model, own, numbers = self.model, own_modules(self.model), dict[Hashable, int]()
        users = Counter(name for call in model.calls for name in dict.fromkeys(call.parameters))
        found = {}
        for index, call in enumerate(model.calls):
            infos = [model.parameters[name] for name in call.parameters]
            stored = tuple((p.trainable, p.is_buffer, p.master, bool(p.stacked)) for p in infos)
            shared = tuple((place, name) for place, name in enumerate(call.parameters) if users[name] > 1)
            twice = len(set(call.parameters)) < len(call.parameters) and call.parameters
            mark = call.block, index in own, stored, shared, twice
            found[index] = numbers.setdefault(mark, len(numbers))
        return found
