"""Ops that draw random numbers: each element its own, so every dim may be split; a pending sum never passes.

Emitted code seeds them per rank: alike on axes where the result is whole, differently where it is split.
"""

from __future__ import annotations

from typing import Final

from autopar.rules.base import Op, Rule
from autopar.rules.spec import Spec, shape_arg

_DRAWN = Spec("... -> ...")
_MADE = Spec(" -> ...", local=shape_arg(0, "size"))
_DROPPED = {
    "aten.dropout.default": _DRAWN,
    "aten.native_dropout.default": _DRAWN,
    "aten.alpha_dropout.default": _DRAWN,
}
_NOISE = {
    "aten.bernoulli.default": _DRAWN,
    "aten.bernoulli.p": _DRAWN,
    "aten.rand_like.default": _DRAWN,
    "aten.randn_like.default": _DRAWN,
    "aten.randint_like.default": _DRAWN,
    "aten.uniform.default": _DRAWN,
    "aten.normal_functional.default": _DRAWN,
    "aten.exponential.default": _DRAWN,
    "aten.rand.default": _MADE,
    "aten.randn.default": _MADE,
}
_ATTENTION = "aten.scaled_dot_product_attention.default"

RULES: dict[str, Rule] = {**_DROPPED, **_NOISE}

RANDOM: Final[tuple[str, ...]] = (*RULES, _ATTENTION)
"""Ops that may draw random numbers; :func:`is_random` says whether one does."""


def is_random(op: Op) -> bool:
    """Whether the op draws random numbers with the arguments it has (dropout with p = 0 doesn't)."""
    if op.name in _DROPPED:
        return bool(op.arg(1, "p", 0.5)) and bool(op.arg(2, "train", True))
    if op.name == _ATTENTION:
        return bool(op.arg(4, "dropout_p", 0.0))
    return op.name in _NOISE
