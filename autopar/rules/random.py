"""Ops that draw random numbers: each element its own, so every dim may be split; a pending sum never passes.

Emitted code seeds them per rank: alike on axes where the result is whole, differently where it is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from autopar.rules.base import Op, Rule
from autopar.rules.lines import line, names, whole
from autopar.rules.spec import Spec, shape_arg


@dataclass(frozen=True)
class _Dropout(Spec):
    """Its mask is written, and read by the backward, a byte for each element."""

    def inner_bytes(self, op: Op) -> int:
        return op.result.numel


def _channels(op: Op) -> str:
    """Dropout of whole channels: a number for each of each sample."""
    letters = names(len(op.operands[0].shape))
    marked = whole(letters, range(2, len(letters)))
    return line([marked], marked)


_DRAWN = Spec("... -> ...")
_CHANNELS = Spec(_channels)
_MADE = Spec(" -> ...", local=shape_arg(0, "size"))
_BETWEEN = Spec(" -> ...", local=shape_arg(2, "size"))

RULES: dict[str, Rule] = {
    "aten.dropout.default": _Dropout("... -> ..."),
    "aten.native_dropout.default": _Dropout("... -> ..."),
    "aten.alpha_dropout.default": _DRAWN,
    "aten.feature_dropout.default": _CHANNELS,
    "aten.feature_alpha_dropout.default": _CHANNELS,
    "aten.rrelu.default": _DRAWN,
    "aten.normal.Tensor_float": _DRAWN,
    "aten.bernoulli.default": _DRAWN,
    "aten.bernoulli.p": _DRAWN,
    "aten.rand_like.default": _DRAWN,
    "aten.randn_like.default": _DRAWN,
    "aten.randint_like.default": _DRAWN,
    "aten.uniform.default": _DRAWN,
    "aten.normal_functional.default": _DRAWN,
    "aten.exponential.default": _DRAWN,
    "aten.randint_like.low_dtype": _DRAWN,
    "aten.geometric.default": _DRAWN,
    "aten.log_normal.default": _DRAWN,
    "aten.cauchy.default": _DRAWN,
    "aten.random.default": _DRAWN,
    "aten.random.from": _DRAWN,
    "aten.random.to": _DRAWN,
    "aten.poisson.default": _DRAWN,
    "aten.normal.float_Tensor": _DRAWN,
    "aten.normal.Tensor_Tensor": Spec("..., ... -> ..."),
    "aten.binomial.default": Spec("..., ... -> ..."),
    "aten.multinomial.default": Spec("... c! -> ... n!"),
    "aten.rand.default": _MADE,
    "aten.randn.default": _MADE,
    "aten.randint.default": Spec(" -> ...", local=shape_arg(1, "size")),
    "aten.randint.low": _BETWEEN,
    "aten.normal.float_float": _BETWEEN,
}

RANDOM: Final[tuple[str, ...]] = (
    *RULES,
    "aten.scaled_dot_product_attention.default",
    *("aten.gru.input", "aten.lstm.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"),
)
"""Ops that may draw random numbers; dropout, attention and recurrent layers only where their probability isn't 0."""
