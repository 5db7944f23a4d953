"""Recurrent layers: samples may be split, steps and channels are whole.

``gru``, ``lstm`` and ``rnn`` take ``[t, n, i]`` (:mod:`autopar.passes.canonicalize` puts time first) and states
``[layers, n, h]``, so that samples are dim 1 of all that they take and give.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.graph import Meta
from autopar.rules.base import Op, Rule
from autopar.rules.spec import Letters, Spec


def _weights(metas: tuple[Meta, ...], first: int) -> list[str]:
    """Each whole, with letters of its own."""
    return [" ".join(f"w{i}_{d}!" for d, _ in enumerate(meta.shape)) for i, meta in enumerate(metas[first:])]


def _layers(op: Op) -> str | None:
    states = len(op.outputs) - 1
    if len(op.operands[0].shape) != 3 or op.args[-1]:
        return None  # no samples, or not in front of time
    taken = ["t! n i!", *(f"l{i}! n h{i}!" for i in range(states)), *_weights(op.operands, 1 + states)]
    return f"{', '.join(taken)} -> t! n o!"


def _cell(op: Op) -> str | None:
    states = len(op.outputs)
    if len(op.operands[0].shape) != 2:
        return None
    taken = ["n i!", *(f"n h{i}!" for i in range(states)), *_weights(op.operands, 1 + states)]
    return f"{', '.join(taken)} -> n o!"


def _matrices(op: Op, letters: Letters) -> list[int]:
    """Their positions."""
    return [i for i, dims in enumerate(letters.operands) if len(dims) == 2 and letters.whole.issuperset(dims)]


def _flops(op: Op, letters: Letters) -> int:
    """Each matrix is applied to each row of each step."""
    return 2 * prod(op.result.shape[:-1]) * sum(op.operands[i].numel for i in _matrices(op, letters))


@dataclass(frozen=True)
class _Recurrent(Spec):
    """In the backward, products of all matrices for the gradients of rows, which states have where inputs have none,
    and as many for those of the matrices."""

    def factors(self, op: Op) -> tuple[int, ...]:
        letters = self.match(op)
        trained = [i for i in _matrices(op, letters) if op.operands[i].needs_grad] if letters else []
        return 0, *trained[:1]


_KINDS = ("gru", "lstm", "rnn_tanh", "rnn_relu")

RULES: dict[str, Rule] = {
    **{f"aten.{kind}.input": _Recurrent(_layers, flop_count=_flops) for kind in _KINDS},
    **{f"aten.{kind}_cell.default": _Recurrent(_cell, flop_count=_flops) for kind in _KINDS},
}
