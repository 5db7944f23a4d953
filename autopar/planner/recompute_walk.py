"""Cheapest ways through the states of a chain of ops, under many prices.

A state is what is kept when some op is next (:mod:`autopar.planner.recompute`). Which states there are, and which steps
lead from one to another, depends on no prices. So all are listed once, by where steps lead; under given prices, costs
are found place by place: each state's is the least of its steps', of equal ones the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Walk:
    """Steps by the state that they lead to, of which there are those from ``firsts[place]`` to ``firsts[place + 1]`` at
    a place; those to state t begin at ``into[t]``. Each has the state that it comes from (``sources``), its ``bytes_``,
    ``seconds`` and ``ops``, all in whole units, and its ``origins`` and ``ends``."""

    firsts: list[int]
    into: Numbers
    sources: Numbers
    bytes_: Numbers
    seconds: Numbers
    ops: Numbers
    origins: Numbers
    ends: Numbers

    @classmethod
    def of(cls, counts: Sequence[int], steps: Sequence[Sequence[int]]) -> Walk:
        """``counts``: states by place; ``steps`` as place and number there of a state, the same of the state that they
        lead to, bytes, seconds, ops, origin. The one state of place 0 is where ways begin."""
        firsts = np.concatenate([[0], np.cumsum(counts)])
        columns = np.array(steps, dtype=np.int64).T
        place, number, end, after = columns[:4]
        targets = firsts[end] + after
        order = np.argsort(targets, kind="stable")
        into = np.searchsorted(targets[order], np.arange(firsts[-1] + 1))
        sources = (firsts[place] + number)[order]
        bytes_, seconds, ops, origins = columns[4:, order]
        return cls(firsts.tolist(), into, sources, bytes_, seconds, ops, origins, end[order])

    def best(self, byte_price: int, second_price: int) -> list[tuple[int, int]]:
        """The cheapest way to the one state of the last place, last step first: origin and end of each step.

        A byte and a second have these prices, an op that of 1; sums stay below 2^63.
        """
        prices = byte_price * self.bytes_ + second_price * self.seconds + self.ops
        costs = np.zeros(len(self.into) - 1, dtype=np.int64)
        for first, end in zip(self.firsts[1:-1], self.firsts[2:], strict=True):
            begin = self.into[first]
            here = slice(begin, self.into[end])
            sums = costs[self.sources[here]] + prices[here]
            costs[first:end] = np.minimum.reduceat(sums, self.into[first:end] - begin)
        found, state = [], len(costs) - 1
        while state:
            here = slice(self.into[state], self.into[state + 1])
            step = here.start + int((costs[self.sources[here]] + prices[here]).argmin())
            found.append((int(self.origins[step]), int(self.ends[step])))
            state = int(self.sources[step])
        return found
