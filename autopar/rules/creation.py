"""Ops that make tensors: each rank makes its part, where a part looks like the whole."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.graph import Choice
from autopar.rules.base import Op, Rule, Whole
from autopar.rules.spec import Spec, Unread, shape_arg
from autopar.spmd import P, R


def _pending(op: Op) -> Iterable[Choice]:
    """Zeros on every rank add up to zeros."""
    yield Choice((R,) * len(op.operands), P)


_MADE = Spec(" -> ...", local=shape_arg(0, "size"))
_MADE_LIKE = Unread(Spec(" -> ...", local=shape_arg(1, "size")), 0)
_ZEROS = Spec(" -> ...", local=shape_arg(0, "size"), forms=_pending)
_NEW_ZEROS = Unread(Spec(" -> ...", local=shape_arg(1, "size"), forms=_pending), 0)

RULES: dict[str, Rule] = {
    "aten.zeros.default": _ZEROS,
    "aten.ones.default": _MADE,
    "aten.empty.memory_format": _MADE,
    "aten.full.default": _MADE,
    "aten.new_zeros.default": _NEW_ZEROS,
    "aten.new_ones.default": _MADE_LIKE,
    "aten.new_empty.default": _MADE_LIKE,
    "aten.new_full.default": _MADE_LIKE,
    "aten.zeros_like.default": Spec("... -> ...", forms=_pending),
    "aten.ones_like.default": Spec("... -> ..."),
    "aten.empty_like.default": Spec("... -> ..."),
    "aten.full_like.default": Spec("... -> ..."),
    "aten.fill.Scalar": Spec("... -> ..."),
    "aten.scalar_tensor.default": Whole(),
    "aten.arange.default": Whole(),  # a part doesn't begin at 0
    "aten.arange.start": Whole(),
    "aten.arange.start_step": Whole(),
    "aten.linspace.default": Whole(),
    "aten.eye.default": Whole(),
    "aten.eye.m": Whole(),
}
