"""Products that sum over a dim: matrix products, linear, einsum, convolutions. Linear in each factor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from autopar.graph import Choice
from autopar.rules.base import Local, Op, Rule
from autopar.rules.lines import names
from autopar.rules.spec import Letters, Line, Spec, each, extents, product_flops


@dataclass(frozen=True)
class Product(Spec):
    """A product that may be many at once, along letters that all have: of a weight for each expert, say."""

    def expert_operands(self, op: Op) -> tuple[int, ...]:
        letters = self.match(op)
        if letters is None:
            return ()
        return tuple(i for i, dims in enumerate(letters.operands) if dims and _is_shared(dims[0], i, letters))


def _is_shared(letter: str, operand: int, letters: Letters) -> bool:
    """Whether another operand and the result have the letter too."""
    others = (dims for i, dims in enumerate(letters.operands) if i != operand)
    return bool(letter) and letter in letters.result and any(letter in dims for dims in others)


def _contraction(line: Line, flop_count: Callable[[Op, Letters], int] = product_flops) -> Spec:
    return Product(line, linear=each, sums=True, flop_count=flop_count)


def _matmul(op: Op) -> str:
    left, right = (len(meta.shape) > 1 for meta in op.operands)
    return {
        (True, True): "... m k, ... k n -> ... m n",
        (True, False): "... m k, k -> ... m",
        (False, True): "k, ... k n -> ... n",
        (False, False): "k, k -> ",
    }[left, right]


def _linear(op: Op) -> str:
    """With a bias the sum over k must be complete on every rank, or the bias is added more than once."""
    columns = "n" if len(op.operands[1].shape) == 2 else ""
    k = "k!" if _biased(op) else "k"
    return f"... {k}, {columns} {k}, {columns} -> ... {columns}"


def _biased(op: Op) -> bool:
    return len(op.operands) > 2


def _unless_biased(op: Op) -> Iterable[tuple[int, ...]]:
    return () if _biased(op) else each(op)


def _added(batch: str) -> Spec:
    """``self + product``: the sum over k must be complete, since ``self`` is added on every rank."""
    dims = f"{batch} m n".split()

    def line(op: Op) -> str:
        rank = len(op.operands[0].shape)
        added = " ".join(dims[len(dims) - rank :])
        return f"{added}, {batch} m k!, {batch} k! n -> {batch} m n"

    return (Product if batch else Spec)(line, flop_count=product_flops, terms=(0,))


_SUBSCRIPTS = re.compile(r"\.\.\.|[a-zA-Z]")


def _einsum(op: Op) -> str:
    """The equation itself; a letter twice in one operand is a diagonal and stays whole."""
    left, arrow, right = op.args[0].replace(" ", "").partition("->")
    operands = [_SUBSCRIPTS.findall(part) for part in left.split(",")]
    result = _SUBSCRIPTS.findall(right) if arrow else _implied(operands)
    whole = {letter for tokens in operands for letter in tokens if tokens.count(letter) > 1}
    marked = [[f"{t}!" if t in whole else t for t in tokens] for tokens in (*operands, result)]
    return f"{', '.join(' '.join(t) for t in marked[:-1])} -> {' '.join(marked[-1])}"


def _implied(operands: list[list[str]]) -> list[str]:
    """Without an arrow the result has the letters that occur once, in order of the alphabet."""
    tokens = [token for one in operands for token in one]
    dots = ["..."] if "..." in tokens else []
    return dots + sorted(t for t in set(tokens) - {"..."} if tokens.count(t) == 1)


def _einsum_flops(op: Op, letters: Letters) -> int:
    """A product only where a letter of several operands is summed that has more than one value; else factors are
    multiplied element by element. What one operand alone has is summed before."""
    sizes = extents(op, letters)
    held = Counter(letter for dims in letters.operands for letter in set(dims))
    summed = [letter for letter in held if letter not in letters.result]
    if not any(held[letter] > 1 and sizes[letter] > 1 for letter in summed if letter):
        return 0
    return 2 * prod(extent for letter, extent in sizes.items() if held[letter] > 1 or letter not in summed)


def _groups(op: Op) -> int:
    return int(op.arg(6, "groups", 1))


def _convolution(op: Op) -> str:
    """Batch, output channels and (without bias) the sum over input channels; with groups, whole groups."""
    spatial = len(op.operands[1].shape) - 2
    batch = "n " if len(op.operands[0].shape) == spatial + 2 else ""
    positions, taps, made = ([f"{s}{kind}!" for s in names(spatial)] for kind in ("x", "w", "y"))
    given, kernel, result = " ".join(positions), " ".join(taps), " ".join(made)
    if _groups(op) > 1:
        return f"{batch}g* {given}, g* c! {kernel}, g* -> {batch}g* {result}"
    c = "c!" if _biased(op) else "c"
    return f"{batch}{c} {given}, o {c} {kernel}, o -> {batch}o {result}"


def _convolution_flops(op: Op, letters: Letters) -> int:
    weight = op.operands[1].shape
    taps = 1
    for extent in weight[1:]:
        taps *= extent
    return 2 * op.result.numel * taps


def _channel_dim(op: Op) -> int:
    return len(op.result.shape) - len(op.operands[1].shape) + 1


def _keeps_groups(op: Op, choice: Choice, size: int) -> bool:
    kind = choice.result
    splits_groups = kind.is_shard and kind.dim == _channel_dim(op) and _groups(op) > 1
    return not splits_groups or _groups(op) % (kind.outer * size) == 0


def _local_groups(op: Op, choice: Choice, size: int, axis: str) -> Local:
    if _groups(op) == 1 or not choice.result.is_shard or choice.result.dim != _channel_dim(op):
        return Local.same()
    return Local.replacing(op, 6, "groups", _groups(op) // size)


def _transposed(op: Op) -> str:
    """Weights ``[in, out / groups, ...]``: a sum over input channels (without bias); several groups stay whole."""
    spatial = len(op.operands[1].shape) - 2
    batch = "n " if len(op.operands[0].shape) == spatial + 2 else ""
    given, kernel, result = (" ".join(f"{s}{kind}!" for s in names(spatial)) for kind in ("x", "w", "y"))
    if _groups(op) > 1:
        return f"{batch}c! {given}, c! o! {kernel}, p! -> {batch}p! {result}"
    c = "c!" if _biased(op) else "c"
    return f"{batch}{c} {given}, {c} o {kernel}, o -> {batch}o {result}"


def _transposed_flops(op: Op, letters: Letters) -> int:
    """Each element of the operand is multiplied by all taps of its channel."""
    weight = op.operands[1]
    return 2 * op.operands[0].numel * (weight.numel // weight.shape[0])


def _bilinear_flops(op: Op, letters: Letters) -> int:
    return 2 * op.operands[2].numel * (op.result.numel // op.result.shape[-1])


_BIAS = (2,)
_TRANSPOSED = Spec(_transposed, linear=_unless_biased, sums=True, flop_count=_transposed_flops, terms=_BIAS)
_CONVOLUTION = Spec(
    _convolution,
    linear=_unless_biased,
    sums=True,
    local=_local_groups,
    allows=_keeps_groups,
    flop_count=_convolution_flops,
    terms=_BIAS,
)

_COPYING = ("aten.matmul.default", "aten.bmm.default", "aten.einsum.default")


def copies_factors(op: Op) -> bool:
    """Whether it is one product, which keeps copies of factors that don't lie in order: made before it runs."""
    return op.name in _COPYING and len(op.operands) == 2  # an einsum of more is several


RULES: dict[str, Rule] = {
    "aten.mm.default": _contraction("m k, k n -> m n"),
    "aten.bmm.default": _contraction("b m k, b k n -> b m n"),
    "aten.mv.default": _contraction("m k, k -> m"),
    "aten.dot.default": _contraction("k, k -> "),
    "aten.outer.default": _contraction("m, n -> m n"),
    "aten.matmul.default": _contraction(_matmul),
    "aten.einsum.default": _contraction(_einsum, _einsum_flops),
    "aten.linear.default": Spec(_linear, linear=_unless_biased, sums=True, flop_count=product_flops, terms=_BIAS),
    "aten.addmm.default": _added(""),
    "aten.baddbmm.default": _added("b"),
    "aten.conv1d.default": _CONVOLUTION,
    "aten.conv2d.default": _CONVOLUTION,
    "aten.conv3d.default": _CONVOLUTION,
    "aten.conv1d.padding": _CONVOLUTION,
    "aten.conv2d.padding": _CONVOLUTION,
    "aten.conv3d.padding": _CONVOLUTION,
    "aten.conv_transpose1d.default": _TRANSPOSED,
    "aten.conv_transpose2d.input": _TRANSPOSED,
    "aten.conv_transpose3d.input": _TRANSPOSED,
    "aten.bilinear.default": Spec("... i!, ... j!, o i! j!, o -> ... o", flop_count=_bilinear_flops, terms=(3,)),
}
