"""Factors, inverses and functions of square matrices: the last two dims are whole, those before may be split."""

from __future__ import annotations

from autopar.rules.base import Op, Rule
from autopar.rules.spec import Spec


def _solved(op: Op) -> str | None:
    """``A x = b`` for columns of b, as many as dims say."""
    return "... a! b!, ... c! d! -> ... e! f!" if len(op.operands[0].shape) == len(op.operands[1].shape) else None


_MATRIX = Spec("... a! b! -> ... c! d!")
_NUMBER = Spec("... a! b! -> ...")
_VECTOR = Spec("... a! b! -> ... c!")

RULES: dict[str, Rule] = {
    "aten.linalg_inv.default": _MATRIX,
    "aten.linalg_cholesky.default": _MATRIX,
    "aten.linalg_qr.default": _MATRIX,
    "aten.matrix_exp.default": _MATRIX,
    "aten.mH.default": Spec("... a b -> ... b a", linear=lambda op: ((0,),)),
    "aten.linalg_solve.default": Spec(_solved),
    "aten.linalg_det.default": _NUMBER,
    "aten.logdet.default": _NUMBER,
    "aten.linalg_slogdet.default": _NUMBER,
    "aten.linalg_svdvals.default": _VECTOR,
    "aten.linalg_eigvalsh.default": _VECTOR,
    "aten.linalg_eigh.default": _VECTOR,
}
