"""Ops on positions in space: pools, changes of resolution, moves between space and channels, sampling at points.

What they work along is whole; samples, and channels where each is alone, may be split. Shapes are those of
``torch.nn.functional``: samples (which may be missing), channels, then positions.
"""

from __future__ import annotations

from typing import Final

from autopar.graph import Choice
from autopar.rules.base import Local, Op, Rule
from autopar.rules.lines import names
from autopar.rules.spec import Line, Spec, through, together


def _positions(count: int) -> str:
    """Each of the last ``count`` dims whole, and of another size in the result."""
    before, after = (" ".join(f"{letter}{mark}!" for letter in names(count)) for mark in ("", "'"))
    return f"... {before} -> ... {after}"


def _each(count: int) -> Spec:
    return Spec(_positions(count))


def _linear(line: Line) -> Spec:
    return Spec(line, linear=together)


def _channels(op: Op) -> str:
    """Channels and positions of an image are whole, before and after."""
    return _positions(3)


def _unfolded(op: Op) -> str:
    """``[n, c, h, w]`` to patches ``[n, k, l]``; n may be missing."""
    return "... c! h! w! -> ... k! l!"


def _folded(op: Op) -> str:
    return "... k! l! -> ... c! h! w!"


def _sampled(op: Op) -> str:
    """Each point of the grid takes from all positions of its sample."""
    count = len(op.operands[0].shape) - 2
    given = " ".join(f"{letter}!" for letter in names(count))
    points = " ".join(f"{letter}'" for letter in names(count))
    return f"N C {given}, N {points} xy! -> N C {points}"


def _grid(op: Op) -> str:
    """A matrix for each sample; where its points lie depends on the whole size."""
    points = " ".join(f"{letter}!" for letter in names(len(op.result.shape) - 2))
    return f"N rows! columns! -> N {points} xy!"


def _local_grid(op: Op, choice: Choice, size: int, axis: str) -> Local:
    if not choice.result.is_shard:
        return Local.same()
    shape = list(op.arg(1, "size"))
    return Local.replacing(op, 1, "size", [shape[0] // size, *shape[1:]])


def _instances(op: Op) -> str | None:
    """Each channel of a sample has statistics of its own; running ones would be those of all samples."""
    if op.arg(3, "running_mean") is not None or op.arg(4, "running_var") is not None:
        return None
    positions = " ".join(f"{letter}!" for letter in names(len(op.operands[0].shape) - 2))
    return f"N C {positions}, C, C -> N C {positions}"


_DIMS: Final = (1, 2, 3)

RULES: dict[str, Rule] = {
    **{f"aten.avg_pool{d}d.default": _linear(_positions(d)) for d in _DIMS},
    **{f"aten.max_pool{d}d.default": _each(d) for d in _DIMS},
    **{f"aten.max_pool{d}d_with_indices.default": _each(d) for d in _DIMS},
    **{f"aten.adaptive_avg_pool{d}d.default": _linear(_positions(d)) for d in _DIMS},
    **{f"aten.adaptive_max_pool{d}d.default": _each(d) for d in _DIMS},
    **{f"aten.upsample_nearest{d}d.vec": _linear(_positions(d)) for d in _DIMS},
    **{f"aten._upsample_nearest_exact{d}d.vec": _linear(_positions(d)) for d in _DIMS},
    "aten.upsample_linear1d.vec": _linear(_positions(1)),
    "aten.upsample_bilinear2d.vec": _linear(_positions(2)),
    "aten.upsample_bicubic2d.vec": _linear(_positions(2)),
    "aten.upsample_trilinear3d.vec": _linear(_positions(3)),
    "aten._upsample_bilinear2d_aa.vec": _linear(_positions(2)),
    "aten._upsample_bicubic2d_aa.vec": _linear(_positions(2)),
    "aten.pixel_shuffle.default": _linear(_channels),
    "aten.pixel_unshuffle.default": _linear(_channels),
    "aten.channel_shuffle.default": _linear("N C! ... -> N D! ..."),
    "aten.im2col.default": _linear(_unfolded),
    "aten.col2im.default": _linear(_folded),
    "aten.grid_sampler.default": Spec(_sampled, linear=through(0)),
    "aten.affine_grid_generator.default": Spec(_grid, linear=together, local=_local_grid),
    "aten.instance_norm.default": Spec(_instances),
}
