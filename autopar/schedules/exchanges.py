"""What pipeline ranks exchange for vocabulary layers that are split over all of them, as data.

Algorithms: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv 2411.05288, section 4.
Each exchange is one collective of all pipeline ranks for one microbatch: a rank takes part (posts) once its
``source`` is done, and ``target`` waits until all have. An empty ``source_at`` or ``target_at`` means every rank;
``"first"`` and ``"last"`` only the one that holds this stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Exchange:
    """``B`` as source or target is the pass that makes the gradient of a stage's input: ``B`` or ``I``."""

    kind: str
    source: str
    source_at: str
    target: str
    target_at: str


_CAST_X: Final = Exchange("CAST_X", "F", "last", "S", "")

HEAD_EXCHANGES: Final[Mapping[str, tuple[Exchange, ...]]] = {
    "": (),
    "naive": (
        _CAST_X,
        Exchange("MAX", "S", "", "U", ""),
        Exchange("STATS", "U", "", "T", ""),
        Exchange("SUM_X", "T", "", "B", "last"),
    ),
    "vocab-1": (
        _CAST_X,
        Exchange("STATS", "S", "", "T", ""),
        Exchange("SUM_X", "T", "", "B", "last"),
    ),
    "vocab-2": (
        _CAST_X,
        Exchange("STATS", "S", "", "T", ""),
        Exchange("STATS", "S", "", "SUM_X", ""),
        Exchange("SUM_X", "S", "", "B", "last"),
    ),
}
EMBEDDING_EXCHANGES: Final = (
    Exchange("SUM_E", "E", "", "F", "first"),
    Exchange("CAST_E", "B", "first", "G", ""),
)
HEAD_PASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "": (),
    "naive": ("S", "U", "T"),
    "vocab-1": ("S", "T"),
    "vocab-2": ("S", "T"),
}
"""The passes that every rank runs per microbatch, each after the one before."""

EMBEDDING_PASSES: Final = ("E", "G")


def exchanges(head: str, embedding: bool) -> tuple[Exchange, ...]:
    """All exchanges of one microbatch; a kind with two targets is there twice."""
    return (*HEAD_EXCHANGES[head], *(EMBEDDING_EXCHANGES if embedding else ()))


def seconds_ahead(head: str, embedding: bool, seconds: Mapping[str, float]) -> dict[str, float]:
    """By kind of pass that waits for any, how long the exchanges take between it and the pass before, which follow each
    other. ``seconds`` are those of each kind of exchange; none: 0."""
    table = exchanges(head, embedding)
    kinds = {exchange.kind for exchange in table}

    def until_end(kind: str) -> float:
        return seconds.get(kind, 0.0) + max((until_end(e.kind) for e in table if e.target == kind), default=0.0)

    return {e.target: until_end(e.kind) for e in table if e.target not in kinds}


def passes(head: str, embedding: bool) -> tuple[str, ...]:
    """The vocabulary passes that every rank runs for each microbatch."""
    return (*HEAD_PASSES[head], *(EMBEDDING_PASSES if embedding else ()))
