"""Reductions, normalisations and scans: what they work along is whole, except where a sum stays pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.graph import Choice
from autopar.rules.base import Local, Op, Rule, Whole
from autopar.rules.lines import along, dim, line, names, reduced, whole
from autopar.rules.spec import Line, Spec, together


def _sum(text: Line) -> Spec:
    return Spec(text, linear=together, sums=True)


def _mean(text: Line) -> Spec:
    return Spec(text, linear=together, sums=True, sum_form="mean_of_whole", local=_local_mean)


def _local_mean(op: Op, choice: Choice, size: int, axis: str) -> Local:
    """A part's share of the mean is its sum over the count of the whole (perhaps set on an earlier axis)."""
    if choice.form != "mean_of_whole" or "count" in op.kwargs:
        return Local.same()
    return Local({}, {"count": op.operands[0].numel // op.result.numel}, target="mean_of_whole")


def _topk(op: Op) -> str:
    rank = len(op.operands[0].shape)
    letters = names(rank)
    d = dim(op.arg(2, "dim", -1), rank)
    return line([whole(letters, [d])], ["k!" if i == d else letter for i, letter in enumerate(letters)])


def _differences(op: Op) -> str:
    """``self``, and what it is taken to be before and after; all shrink or grow along one dim, and are whole there."""
    rank = len(op.operands[0].shape)
    d = dim(op.arg(2, "dim", -1), rank)
    rows = [[f"{letter}{i}!" if k == d else letter for k, letter in enumerate(names(rank))] for i in range(4)]
    return line(rows[: len(op.operands)], rows[-1])


def _trailing(op: Op) -> str:
    """layer_norm and rms_norm: the dims of ``normalized_shape`` are whole, in weight and bias too."""
    own = " ".join(f"h{i}!" for i, _ in enumerate(op.arg(1, "normalized_shape")))
    return f"... {own}, {own}, {own} -> ... {own}"


def _grouped(op: Op) -> str:
    spatial = " ".join(f"{s}!" for s in names(len(op.operands[0].shape) - 2))
    return f"n z! {spatial}, z!, z! -> n z! {spatial}"


def _of_channels(op: Op) -> str:
    """A batch norm: by given statistics each element on its own, else of all samples and places of a channel."""
    mark = "!" if op.arg(5, "training", False) else ""
    own = " ".join(f"{s}{mark}" for s in names(len(op.operands[0].shape) - 2))
    return f"n{mark} z {own}, z, z, z, z -> n{mark} z {own}"


def _transformed(op: Op) -> str:
    """A Fourier transform along one dim, which may change its size."""
    letters = names(len(op.operands[0].shape))
    d = dim(op.arg(2, "dim", -1), len(letters))
    return line([whole(letters, [d])], [f"{letter}'!" if i == d else letter for i, letter in enumerate(letters)])


def _transformed_all(last: int) -> Callable[[Op], str]:
    """A Fourier transform along the dims that are named, else the ``last`` ones (0: all, or as many as have sizes)."""

    def compute(op: Op) -> str:
        rank = len(op.operands[0].shape)
        named, sizes = op.arg(2, "dim"), op.arg(1, "s")
        count = last or (rank if sizes is None else len(sizes))
        ends = {dim(d, rank) for d in (range(-count, 0) if named is None else named)}
        letters = names(rank)
        return line([whole(letters, sorted(ends))], [f"{n}'!" if i in ends else n for i, n in enumerate(letters)])

    return compute


def _ranked(dim_position: int) -> Callable[[Op], str]:
    """One of the elements along a dim, by default the last."""

    def compute(op: Op) -> str:
        letters = names(len(op.operands[0].shape))
        d, keep = dim(op.arg(dim_position, "dim", -1), len(letters)), op.arg(dim_position + 1, "keepdim", False)
        result = ["1" if i == d else letter for i, letter in enumerate(letters) if keep or i != d]
        return line([whole(letters, [d])], result)

    return compute


def _crossed(op: Op) -> str | None:
    """The cross product of vectors along one dim."""
    ranks = {len(meta.shape) for meta in op.operands}
    letters = names(min(ranks))
    marked = whole(letters, [dim(op.arg(2, "dim", -1), len(letters))])
    return line([marked, marked], marked) if len(ranks) == 1 else None


def _along(position: int, name: str = "dim", default: int = -1) -> Spec:
    return Spec(along(position, name, default))


def _kept(dim_position: int, keep_position: int | None) -> Spec:
    return Spec(reduced(dim_position, keep_position, whole_dims=True))


_ALL_WHOLE = Spec(reduced(None, None, whole_dims=True))


@dataclass(frozen=True)
class _Norm(Spec):
    """The gradient of its weight is another kernel, which reads the operand and the result's gradient again."""

    def back_bytes(self, op: Op, made: int, taken: Sequence[int]) -> int:
        return made + taken[0] if any(meta.needs_grad for meta in op.operands[1:]) else 0


RULES: dict[str, Rule] = {
    "aten.sum.default": _sum(reduced(None, None, whole_dims=False)),
    "aten.sum.dim_IntList": _sum(reduced(1, 2, whole_dims=False)),
    "aten.mean.default": _mean(reduced(None, None, whole_dims=False)),
    "aten.mean.dim": _mean(reduced(1, 2, whole_dims=False)),
    "mean_of_whole": _mean(reduced(1, 2, whole_dims=False)),
    "aten.amax.default": _kept(1, 2),
    "aten.amin.default": _kept(1, 2),
    "aten.max.default": _ALL_WHOLE,
    "aten.min.default": _ALL_WHOLE,
    "aten.max.dim": _kept(1, 2),
    "aten.min.dim": _kept(1, 2),
    "aten.argmax.default": _kept(1, 2),
    "aten.argmin.default": _kept(1, 2),
    "aten.any.dim": _kept(1, 2),
    "aten.all.dim": _kept(1, 2),
    "aten.any.default": _ALL_WHOLE,
    "aten.all.default": _ALL_WHOLE,
    "aten.prod.dim_int": _kept(1, 2),
    "aten.var.dim": _kept(1, 3),
    "aten.var.correction": _kept(1, None),
    "aten.std.dim": _kept(1, 3),
    "aten.std.correction": _kept(1, None),
    "aten.logsumexp.default": _kept(1, 2),
    "aten.linalg_vector_norm.default": _kept(2, 3),
    "aten.softmax.int": _along(1),
    "aten.log_softmax.int": _along(1),
    "aten.cumprod.default": _along(1),
    "aten.logcumsumexp.default": _along(1),
    "aten.cummax.default": _along(1),
    "aten.cummin.default": _along(1),
    **{f"aten.fft_{kind}.default": Spec(_transformed) for kind in ("fft", "ifft", "rfft", "irfft")},
    **{f"aten.fft_{kind}n.default": Spec(_transformed_all(0)) for kind in ("fft", "ifft", "rfft", "irfft")},
    **{f"aten.fft_{kind}2.default": Spec(_transformed_all(2)) for kind in ("fft", "ifft", "rfft", "irfft")},
    "aten.median.dim": _kept(1, 2),
    "aten.nanmedian.dim": _kept(1, 2),
    "aten.mode.default": Spec(_ranked(1)),
    "aten.kthvalue.default": Spec(_ranked(2)),
    "aten.quantile.scalar": _kept(2, 3),
    "aten.aminmax.default": _kept(1, 2),
    "aten.nansum.default": _kept(1, 2),
    "aten.var_mean.dim": _kept(1, 3),
    "aten.var_mean.correction": _kept(1, None),
    "aten.std_mean.dim": _kept(1, 3),
    "aten.std_mean.correction": _kept(1, None),
    "aten.linalg_cross.default": Spec(_crossed),
    "aten.diff.default": Spec(_differences, linear=together),
    "aten.sort.default": _along(1),
    "aten.sort.stable": _along(2),
    "aten.argsort.default": _along(1),
    "aten.topk.default": Spec(_topk),
    "aten.layer_norm.default": _Norm(_trailing),
    "aten.rms_norm.default": _Norm(_trailing),
    "aten.group_norm.default": Spec(_grouped),
    "aten.batch_norm.default": Spec(_of_channels),
    "averaged": Whole(),  # a buffer is whole, and so is what it is moved by
}
