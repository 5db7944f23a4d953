"""Losses. A sum stays pending where elements are split; a mean runs whole (canonicalisation removes means).

Cross entropy may also be split over its classes: three numbers per token are exchanged instead of the logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from autopar.graph import AxisRef, Choice
from autopar.rules.base import Communication, Local, Op, Rule
from autopar.rules.lines import dim, line, names, whole
from autopar.rules.spec import Spec
from autopar.spmd import I, R, S

PADDED: Final = "cross_entropy_padded"
"""Of logits of which some only pad the table: the op that :mod:`autopar.passes.pad_head` puts in."""

_NONE, _MEAN = 0, 1
_SPLIT_SWEEPS: Final = 2.5


def _by_class(op: Op) -> str | None:
    """Logits ``[n, classes, ...]`` or ``[classes]``; a target of indices, or like the logits; a weight."""
    reduction = op.arg(3, "reduction", _MEAN)
    if reduction == _MEAN:
        return None
    rank = len(op.operands[0].shape)
    tokens = names(rank - 1)
    logits = [*tokens[:1], "v!", *tokens[1:]]
    target = tokens if len(op.operands[1].shape) < rank else logits
    return line([logits, target, ["v!"]], tokens if reduction == _NONE else [])


def class_dim(op: Op) -> int:
    return 1 if len(op.operands[0].shape) > 1 else 0


def _classes_split(op: Op) -> Iterable[Choice]:
    indices = not op.operands[1].dtype.is_floating_point
    if indices and len(op.operands) == 2 and op.arg(3, "reduction", _MEAN) != _MEAN:
        yield Choice((S(class_dim(op)), R), I, "cross_entropy_sharded")


def _local_cross_entropy(op: Op, choice: Choice, size: int, axis: str) -> Local:
    if choice.form != "cross_entropy_sharded":
        return Local.same()
    ignored, smoothing = op.arg(4, "ignore_index", -100), op.arg(5, "label_smoothing", 0.0)
    named = {"ignore_index": ignored} if ignored != -100 else {}
    named |= {"label_smoothing": smoothing} if smoothing else {}
    named |= {"reduction": "none"} if op.arg(3, "reduction", _MEAN) == _NONE else {}
    return Local({2: AxisRef(axis)}, named, target="cross_entropy_sharded", keep=2)


def _padded_classes_split(op: Op) -> Iterable[Choice]:
    if "axis" not in op.kwargs:
        yield Choice((S(1), R), I, PADDED)


def _local_padded(op: Op, choice: Choice, size: int, axis: str) -> Local:
    return Local({}, {"axis": AxisRef(axis)}) if choice.form else Local.same()


def _sharded(op: Op) -> str:
    return f"t v! ..., t ... -> {'t ...' if op.kwargs.get('reduction') == 'none' else ''}"


def _statistics(op: Op, choice: Choice) -> Communication:
    """Per token the largest logit, then the sum, the target's logit and the mean: float32 at least."""
    if not choice.form:
        return []
    one = op.operands[1].numel * max(4, op.operands[0].dtype.itemsize)
    return [("all_reduce", one), ("all_reduce", 3 * one)]


@dataclass(frozen=True)
class _CrossEntropy(Spec):
    """``sweeps``: how often a pass goes through the logits, beside reading them once and writing their gradient.

    torch's kernels read rows three times and write them, then clear a gradient and go through it twice; split over
    classes, the maximum, the differences, the exponentials and their sum are kernels of their own in the forward.
    """

    sweeps: float = 0.0

    def inner_bytes(self, op: Op) -> int:
        return round(self.sweeps * op.operands[0].bytes)


class _Padded(_CrossEntropy):
    """Split over classes as ``cross_entropy_sharded`` is, else as torch's."""

    def inner_bytes(self, op: Op) -> int:
        return round(_SPLIT_SWEEPS * op.operands[0].bytes) if "axis" in op.kwargs else super().inner_bytes(op)

    def whole_bytes(self, op: Op) -> int:
        """Of torch's the gradient of what it keeps, logarithms of probabilities."""
        return 0 if "axis" in op.kwargs else op.operands[0].bytes


def _elementwise(reduction_position: int) -> Spec:
    def compute(op: Op) -> str | None:
        reduction = op.arg(reduction_position, "reduction", _MEAN)
        if reduction == _MEAN:
            return None
        return "..., ..., ..., ... -> " + ("..." if reduction == _NONE else "")

    return Spec(compute, sums=True)


def _of_rows(reduction_position: int) -> Spec:
    """One loss for each row, which is whole. Operands of fewer dims have a number for each."""

    def compute(op: Op) -> str | None:
        reduction = op.arg(reduction_position, "reduction", _MEAN)
        if reduction == _MEAN:
            return None
        rank = len(op.operands[0].shape)
        rows = names(rank - 1)
        taken = [[*rows, "c!"] if len(meta.shape) == rank else rows for meta in op.operands]
        return line(taken, rows if reduction == _NONE else [])

    return Spec(compute, sums=True)


def _multi_margin(op: Op) -> str | None:
    """Scores ``[n, c]`` or ``[c]``, the right classes, and a weight by class."""
    reduction = op.arg(5, "reduction", _MEAN)
    if reduction == _MEAN:
        return None
    rows = names(len(op.operands[0].shape) - 1)
    return line([[*rows, "c!"], rows, ["c!"]], rows if reduction == _NONE else [])


def _distance(op: Op) -> str:
    """Of vectors along the last dim, which stays as 1 with ``keepdim``."""
    return "... d!, ... d! -> ... 1" if op.arg(4, "keepdim", False) else "... d!, ... d! -> ..."


def _cosine(op: Op) -> str:
    """Along one dim of two tensors that are broadcast to one another."""
    rank = max(len(meta.shape) for meta in op.operands)
    letters = whole(names(rank), [dim(op.arg(2, "dim", 1), rank)])
    operands = [letters[rank - len(meta.shape) :] for meta in op.operands]
    return line(operands, [letter for letter in letters if not letter.endswith("!")])


RULES: dict[str, Rule] = {
    "aten.cross_entropy_loss.default": _CrossEntropy(
        _by_class, sums=True, forms=_classes_split, local=_local_cross_entropy, inside=_statistics, sweeps=3.0
    ),
    "cross_entropy_sharded": _CrossEntropy(_sharded, sums=True, inside=_statistics, sweeps=_SPLIT_SWEEPS),
    PADDED: _Padded(
        _sharded, sums=True, forms=_padded_classes_split, local=_local_padded, inside=_statistics, sweeps=3.0
    ),
    "aten.nll_loss_nd.default": Spec(_by_class, sums=True),
    "aten.nll_loss.default": Spec(_by_class, sums=True),
    "aten.mse_loss.default": _elementwise(2),
    "aten.l1_loss.default": _elementwise(2),
    "aten.smooth_l1_loss.default": _elementwise(2),
    "aten.huber_loss.default": _elementwise(2),
    "aten.kl_div.default": _elementwise(2),
    "aten.soft_margin_loss.default": _elementwise(2),
    "aten.poisson_nll_loss.default": _elementwise(5),
    "aten.hinge_embedding_loss.default": _elementwise(3),
    "aten.margin_ranking_loss.default": _elementwise(4),
    "aten.cosine_embedding_loss.default": _of_rows(4),
    "aten.triplet_margin_loss.default": _of_rows(7),
    "aten.multilabel_margin_loss.default": _of_rows(2),
    "aten.multi_margin_loss.default": Spec(_multi_margin, sums=True),
    "aten.pairwise_distance.default": Spec(_distance),
    "aten.cosine_similarity.default": Spec(_cosine),
    "aten.cdist.default": Spec("... p d!, ... q d! -> ... p q"),
    "aten.binary_cross_entropy.default": _elementwise(3),
    "aten.binary_cross_entropy_with_logits.default": _elementwise(4),
}
