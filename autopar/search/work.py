"""What parts of a search take, in units of some 20 microseconds: counted, not measured, so that searches are
deterministic."""

from __future__ import annotations

from typing import Final

from autopar.options import activations_on_host
from autopar.search.space import Point, splits_head, stages_of

OP: Final = 25
"""Of placing one op: less than it takes (29 to 41 were measured), so that first plans of models with many ops come
from enough placements."""

FAMILY: Final = 90
"""Of bounds of a family's points."""

PASSES: Final = 45
"""Of those by their passes alone."""

BETTERED: Final = 50
"""Of what is known of a point by itself."""

LIKELY: Final = 60
"""Of estimates of them."""

REGION: Final = 50
"""Of a region's bound by itself, where those of several are found at once."""

RAISED: Final = 1 / 8
"""Of that by all that is placed, where those of all regions are found at once."""

AT_ONCE: Final = 3 / 4
"""Of the work of a point that fits without a choice of what to recompute, which isn't made then."""

_LAYING, _ACTION = 2000, 2  # of a point, and of each of its passes
_HEADS = 3  # times that, where ranks have passes of a head's parts, too
_AWAY = 12_000  # of the ways to put activations of a pipeline on the host that are tried
_AWAY_ALONE = 6_000  # of those of a rank alone
_CALLS, _BLOCKS = 32, 150  # calls of a model, and ops of its blocks: with fewer, laying out takes less


def length_of(calls: int, ops: int) -> float:
    """Of a model, in those that units of work were counted for: what is laid out has as many ``calls``, whose blocks
    have as many ``ops``."""
    return max(calls / _CALLS, ops / _BLOCKS)


def work_of(point: Point, length: float = 1.0) -> float:
    """Of laying it out, of a model that is so many times as long as those that units of work were counted for."""
    away = 0.0
    if activations_on_host(point.offload):
        away = length * (_AWAY if point.region.mesh.pp > 1 else _AWAY_ALONE)
    passes = stages_of(point) * point.region.microbatches * (_HEADS if splits_head(point.family) else 1)
    return away + length * _LAYING + _ACTION * passes
