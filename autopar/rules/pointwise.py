"""Ops that work on each element alone: every dim may be split, operands broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from autopar.graph import Choice, Meta
from autopar.rules.base import Local, Op, Rule
from autopar.rules.lines import dim, line, names, whole
from autopar.rules.spec import Localizer, Passes, Spec, Unread, each, nothing, through, together, unchanged
from autopar.spmd import P, R

_LINE = "..., ..., ... -> ..."


def _no_more(op: Op, made: int, taken: Sequence[int]) -> int:
    return 0


def _none(op: Op) -> int:
    return 0


@dataclass(frozen=True)
class Pointwise(Spec):
    """One kernel forward. ``kernels`` of a backward: what they move beside one that makes all gradients at once.
    ``holds``: bytes that live beside all gradients when the most do, while a backward runs."""

    kernels: Callable[[Op, int, Sequence[int]], int] = _no_more
    holds: Callable[[Op], int] = _none

    def back_bytes(self, op: Op, made: int, taken: Sequence[int]) -> int:
        return self.kernels(op, made, taken)

    def whole_bytes(self, op: Op) -> int:
        return self.holds(op)

    def loose(self, op: Op) -> tuple[int, int]:
        result, backward = op.result, 0
        places = [i for i, meta in enumerate(op.operands) if meta.numel > 1 or meta.shape == result.shape]
        given, apart = [op.operands[i] for i in places], [i in op.apart for i in places]
        if len(given) == 1:
            backward = int(given[0].needs_grad and result.dtype.itemsize < given[0].dtype.itemsize)
            backward += apart[0] and given[0].needs_grad and not self.is_linear(op)
        elif self.kernels is _of_product:
            others = [given[:i] + given[i + 1 :] for i, meta in enumerate(given) if meta.needs_grad]
            backward = sum(_unevenness(some, result) for some in others)
            backward += sum(any(apart[:i] + apart[i + 1 :]) for i, meta in enumerate(given) if meta.needs_grad)
        elif self.kernels is _of_quotient:
            divisor = _unevenness(given[1:], result)
            backward = divisor * given[0].needs_grad + (_unevenness(given, result) + divisor) * given[1].needs_grad
        return _unevenness(given, result) + any(apart), backward


def _unevenness(given: Sequence[Meta], result: Meta) -> int:
    """A kernel loads several elements at once where all have the result's shape, and none is narrower; a cast to fewer
    bytes has a kernel of its own that does, too. One row for all of a batch counts as whole: a batch may be one row."""
    narrow = any(m.dtype.is_floating_point and m.dtype.itemsize < result.dtype.itemsize for m in given)
    return int(any(m.shape != (*m.shape[:1], *result.shape[1:]) for m in given)) + int(narrow)


def _of_product(op: Op, made: int, taken: Sequence[int]) -> int:
    """A kernel for each factor's gradient, of the result's and the other factor, and what makes it as the factor is."""
    if len(op.operands) < 2:
        return 0
    trained = [(meta, bytes_) for meta, bytes_ in zip(op.operands, taken, strict=True) if meta.needs_grad]
    total = sum(made + sum(taken) + _fitted(op, meta, made, bytes_) for meta, bytes_ in trained)
    return total - (made + sum(bytes_ for _, bytes_ in trained) + sum(taken))


def _fitted(op: Op, meta: Meta, made: int, bytes_: int) -> int:
    """Bytes that move because an operand, of ``bytes_``, isn't like the result. Where it was broadcast, its gradient is
    written whole, and read to be summed; where it is narrower, that is made in the result's dtype first."""
    wider = op.result.dtype.itemsize // meta.dtype.itemsize
    return (2 * made if meta.shape != op.result.shape else 0) + (2 * wider * bytes_ if wider > 1 else 0)


def _of_quotient(op: Op, made: int, taken: Sequence[int]) -> int:
    """A kernel for the dividend's gradient, and four for the divisor's: the quotient is made again and divided once
    more, the result's gradient is negated, and both are multiplied."""
    if len(op.operands) < 2:
        return 0
    (dividend, divisor), (over, under) = op.operands, taken
    total = 0
    if dividend.needs_grad:
        total += made + over + under + _fitted(op, dividend, made, over)
    if divisor.needs_grad:
        total += 7 * made + over + 3 * under + _fitted(op, divisor, made, under)
    gradients = over * dividend.needs_grad + under * divisor.needs_grad
    return total - (made + gradients + over + under)


def _of_power(op: Op, made: int, taken: Sequence[int]) -> int:
    """A power, its product with the exponent, and that with the gradient, one after the other."""
    return 4 * made if len(op.operands) == 1 else 0


def _of_sum(op: Op, made: int, taken: Sequence[int]) -> int:
    """A number that is added has no part in the backward, which hands the gradient on. Where two tensors are added, so
    it does, but gradients of what is used twice are added up, most often where such a sum is."""
    return -(made + 2 * sum(taken)) if len(op.operands) == 1 else 0


def _whole(op: Op) -> int:
    """A gradient as large and as wide as the result, of each operand that isn't: it is summed and cast at the end."""
    result = op.result
    return result.bytes * sum(m.needs_grad and (m.shape, m.dtype) != (result.shape, result.dtype) for m in op.operands)


def _quotient_holds(op: Op) -> int:
    """While the divisor's gradient is made, the first one: the quotient, the quotient divided again, the result's
    gradient negated, and their product. Then what is summed and cast at the end."""
    gradients = sum(meta.bytes for meta in op.operands if meta.needs_grad)
    is_trained = len(op.operands) > 1 and op.operands[1].needs_grad
    return max(4 * op.result.bytes - gradients if is_trained else 0, _whole(op))


def _negated(taken: int, given: int) -> Callable[[Op], int]:
    """Of a difference, whose operand ``given`` hands the gradient on as it is: that of ``taken`` is negated, whole."""

    def holds(op: Op) -> int:
        if len(op.operands) < 2 or not op.operands[taken].needs_grad:
            return 0
        is_whole = op.operands[taken].shape == op.result.shape
        return 0 if is_whole and not op.operands[given].needs_grad else op.result.bytes

    return holds


def _several(count: int) -> Callable[[Op], int]:
    """So many intermediate results, which live until the gradient is made of them."""
    return lambda op: count * op.result.bytes


def _pointwise(
    linear: Passes = nothing,
    kernels: Callable[[Op, int, Sequence[int]], int] = _no_more,
    holds: Callable[[Op], int] = _none,
    forms: Callable[[Op], Iterable[Choice]] = lambda op: (),
    local: Localizer = unchanged,
) -> Spec:
    return Pointwise(_LINE, linear=linear, kernels=kernels, holds=holds, forms=forms, local=local)


def _sum(op: Op) -> Iterable[tuple[int, ...]]:
    """A sum of tensors passes pending sums; a number would be added on every rank."""
    return together(op) if len(op.operands) == 2 else ()


def _shared_terms(op: Op) -> Iterable[Choice]:
    """To a pending sum that is one number, as a loss is, each rank may add its share of what all have: ``2 - x``, or a
    penalty on the weights. Elsewhere that would only move where a sum is reduced."""
    if op.result.shape == () and op.result.dtype.is_floating_point:
        yield Choice((P, R)[: len(op.operands)], P)


def _local_sum(op: Op, choice: Choice, size: int, axis: str) -> Local:
    """``x + y`` with one part in ``size`` of a number y, or of a tensor that isn't pending."""
    if choice.result != P or choice.operands == (P, P):
        return Local.same()
    if len(op.operands) == 2:
        return Local({}, {"alpha": op.kwargs.get("alpha", 1) / size})
    return Local.replacing(op, 1, "other", op.arg(1, "other") / size)


def _cast(op: Op) -> Iterable[tuple[int, ...]]:
    """Rounding to an integer or a truth value is not linear."""
    before, after = op.operands[0].dtype, op.result.dtype
    kept = after.is_floating_point or after.is_complex
    whole_numbers = not (before.is_floating_point or before.is_complex) and after != torch.bool
    return ((0,),) if kept or whole_numbers else ()


def _quotient(op: Op) -> Iterable[tuple[int, ...]]:
    return () if op.kwargs.get("rounding_mode") else ((0,),)


def _zero_at(position: int, name: str, operand: int) -> Passes:
    """Linear in ``operand`` where the number put in the other places is 0."""
    return lambda op: ((operand,),) if op.arg(position, name) == 0 else ()


def _filled(op: Op) -> Iterable[tuple[int, ...]]:
    """masked_fill with a tensor: linear in both; the mask between them is whole."""
    return ((0, 2),) if isinstance(op.args[2], Meta) else ()


def _element(op: Op) -> str | None:
    """One of several results, of which the first is the operand here: pieces of a tensor differ where it was cut."""
    first, taken = op.operands[0].shape, op.result.shape
    if len(first) != len(taken):
        return None
    cut = ["" if a == b else "!" for a, b in zip(first, taken, strict=True)]
    left = [f"d{i}{mark}" for i, mark in enumerate(cut)]
    right = [f"e{i}!" if mark else f"d{i}" for i, mark in enumerate(cut)]
    return f"{' '.join(left)} -> {' '.join(right)}"


def _slopes(op: Op) -> str:
    """prelu: one slope, or one for each channel (dim 1)."""
    letters = names(len(op.operands[0].shape))
    return line([letters, letters[1:2] if op.operands[1].numel > 1 else ["1"] * len(op.operands[1].shape)], letters)


def _gated(op: Op) -> str:
    """glu: the halves of one dim."""
    letters = names(len(op.operands[0].shape))
    d = dim(op.arg(1, "dim", -1), len(letters))
    made = [f"{letter}'!" if i == d else letter for i, letter in enumerate(letters)]
    return line([whole(letters, [d])], made)


UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "erfc", "exp"),
    *("exp2", "expm1", "floor", "frac", "lgamma", "log", "log10", "log1p", "log2", "logit", "reciprocal"),
    *("round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "trunc"),
    *("celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log_sigmoid", "mish"),
    *("relu", "relu6", "selu", "silu", "softplus", "softshrink", "hardshrink", "threshold"),
    *("clamp", "clamp_max", "clamp_min", "nan_to_num"),
    *("digamma", "erfinv", "sinc", "special_i0"),
    *("bitwise_not", "isfinite", "isinf", "isnan", "logical_not"),
)
BINARY = (
    *("add.Scalar", "sub.Scalar", "rsub.Scalar", "rsub.Tensor"),
    *("atan2.default", "floor_divide.default", "floor_divide.Scalar", "fmod.Scalar", "fmod.Tensor"),
    *("remainder.Scalar", "remainder.Tensor", "maximum.default", "minimum.default", "max.other", "min.other"),
    *("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "polar.default"),
    *("clamp.Tensor", "clamp_max.Tensor", "clamp_min.Tensor"),
    *("eq.Scalar", "eq.Tensor", "ge.Scalar", "ge.Tensor", "gt.Scalar", "gt.Tensor", "le.Scalar", "le.Tensor"),
    *("lt.Scalar", "lt.Tensor", "ne.Scalar", "ne.Tensor"),
    *("bitwise_and.Scalar", "bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"),
    *("__and__.Scalar", "__and__.Tensor", "__or__.Tensor", "__xor__.Tensor"),
    *("logical_and.default", "logical_or.default", "logical_xor.default"),
    *("copysign.Tensor", "float_power.Tensor_Scalar", "hypot.default", "ldexp.Tensor", "logaddexp.default"),
    *("logaddexp2.default", "xlogy.Tensor"),
    *("addcmul.default", "addcdiv.default", "lerp.Scalar", "lerp.Tensor", "where.Scalar"),
)

INSIDE = {
    **dict.fromkeys(("abs", "exp2", "expm1", "log1p", "log10", "log2", "sin", "sqrt"), 1),
    **dict.fromkeys(("atan", "cos", "reciprocal", "rsqrt", "square", "tan"), 2),
    **dict.fromkeys(("asin", "erf", "erfc"), 4),
    "acos": 5,
}
"""Results of kernels that live beside the gradient of the operand, as autograd's formulas make them
(``tools/autograd/derivatives.yaml`` of PyTorch); of others there are none, or masks."""

RULES: dict[str, Rule] = {
    **{f"aten.{name}.default": _pointwise(holds=_several(INSIDE.get(name, 0))) for name in UNARY},
    **{f"aten.{name}": _pointwise() for name in BINARY},
    "aten.add.Scalar": _pointwise(kernels=_of_sum, forms=_shared_terms, local=_local_sum),
    "aten.sub.Scalar": _pointwise(kernels=_of_sum, forms=_shared_terms, local=_local_sum),
    "aten.rsub.Scalar": _pointwise(forms=_shared_terms, local=_local_sum),
    "aten.pow.Tensor_Scalar": _pointwise(kernels=_of_power, holds=_several(2)),
    "aten.add.Tensor": _pointwise(_sum, _of_sum, _none, _shared_terms, _local_sum),
    "aten.sub.Tensor": _pointwise(_sum, _of_sum, _negated(1, 0), _shared_terms, _local_sum),
    "aten.rsub.Tensor": _pointwise(holds=_negated(0, 1)),
    "aten.mul.Tensor": _pointwise(each, _of_product, _whole),
    "aten.mul.Scalar": _pointwise(each),
    "aten.div.Tensor": _pointwise(through(0), _of_quotient, _quotient_holds),
    "aten.div.Scalar": _pointwise(through(0)),
    "aten.div.Tensor_mode": _pointwise(_quotient),
    "aten.div.Scalar_mode": _pointwise(_quotient),
    "aten.neg.default": _pointwise(each),
    "aten.where.self": _pointwise(through(1, 2), holds=_whole),
    "aten.where.ScalarOther": _pointwise(_zero_at(2, "other", 1)),
    "aten.where.ScalarSelf": _pointwise(_zero_at(1, "self", 1)),
    "aten.masked_fill.Scalar": _pointwise(_zero_at(2, "value", 0)),
    "aten.masked_fill.Tensor": _pointwise(_filled),
    "aten.copy.default": _pointwise(through(1)),
    "aten.to.dtype": _pointwise(_cast),
    "aten.to.dtype_layout": _pointwise(_cast),
    "aten.to.device": _pointwise(_cast),
    "aten._to_copy.default": _pointwise(_cast),
    "aten.to.other": Unread(_pointwise(_cast), 1),
    "aten.type_as.default": Unread(_pointwise(_cast), 1),
    "aten.alias.default": _pointwise(each),
    "aten.clone.default": _pointwise(each),
    "aten.contiguous.default": _pointwise(each),
    "aten.detach.default": _pointwise(each),
    "aten.lift_fresh_copy.default": _pointwise(each),
    "aten.view_as_complex.default": Spec("... c! ->  ..."),
    "aten.view_as_real.default": Spec("... -> ... c!"),
    "aten.real.default": Spec("... -> ...", linear=together),
    "aten.imag.default": Spec("... -> ...", linear=together),
    "aten.complex.default": Spec("..., ... -> ..."),
    "aten.prelu.default": Spec(_slopes),
    "aten.glu.default": Spec(_gated),
    "aten.bucketize.Tensor": Spec("..., k! -> ..."),
    "getitem": Spec(_element, linear=together),
}
