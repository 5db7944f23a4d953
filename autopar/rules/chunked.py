"""A cross entropy together with the product that makes its logits, computed in chunks of tokens.

The op that :mod:`autopar.passes.chunk_head` puts in, ``autopar.runtime.chunked_cross_entropy(x, weight, target, bias?,
chunks=..., weight_dim=0, logits=..., ...)``. Split by tokens it leaves a pending sum, split by classes it exchanges
statistics once for all chunks. The backward computes the logits again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.graph import AxisRef, Choice, Meta, op_name
from autopar.rules.base import Communication, Local, Op, Rule
from autopar.rules.spec import Spec, product_flops
from autopar.spmd import I, R, S

CHUNKED = "chunked_cross_entropy"


@dataclass(frozen=True)
class Chunked(Spec):
    """Its backward computes the product again; logits come and go inside."""

    @property
    def repeats(self) -> int:
        return 1

    def inner_bytes(self, op: Op) -> int:
        """Of a forward (:mod:`autopar.runtime.chunked_entropy`): the product is written; where it is narrow, read and
        written as float32; the largest of each row is found, subtracted, exponentials are taken and added up."""
        narrow, wide = _item_bytes(op)
        chunks: int = op.kwargs["chunks"]
        again = (chunks - 1) * op.operands[1].bytes  # the table for every chunk but the first
        return _logits(op).numel * (7 * wide + (2 * narrow if narrow < wide else 0)) + again

    def back_bytes(self, op: Op, made: int, taken: Sequence[int]) -> int:
        """A backward takes, beside a forward's, a product with the slope, a cast back, and two products that read its
        gradient; each chunk's part of the table's gradient is written, and added to the sum in float32."""
        narrow, wide = _item_bytes(op)
        part = taken[0] / op.operands[0].bytes * taken[1] / op.operands[1].bytes
        if narrow == wide:
            return round(part * _logits(op).numel * 2 * wide)
        chunks: int = op.kwargs["chunks"]
        added = chunks * taken[1] // narrow * 2 * (narrow + wide) if op.operands[1].needs_grad else 0
        return round(part * _logits(op).numel * (3 * narrow + wide)) + added

    def made(self, op: Op, choice: Choice, size: int) -> int:
        """Logits of one chunk."""
        split = size if any(kind.is_shard for kind in choice.operands) else 1
        chunks: int = op.kwargs["chunks"]
        return _logits(op).numel // (chunks * split)

    def row_bytes(self, op: Op, choice: Choice, size: int) -> int:
        """Of logits, before they are cast."""
        return _logits(op).shape[-1] // (size if choice.form else 1) * _item_bytes(op)[0]


def _item_bytes(op: Op) -> tuple[int, int]:
    """Of an element of the product, and of logits."""
    narrow = op.operands[0].dtype.itemsize
    return narrow, max(4, narrow)


def whole_logits(node: fx.Node) -> Meta | None:
    """Of a chunked cross entropy: this rank's logits, which never exist at once. None for other ops."""
    return _logits(Op.of(node)) if op_name(node) == CHUNKED else None


def chunk_bytes(node: fx.Node) -> int:
    """What the backward of a chunked cross entropy holds beside the gradients of its operands: a sum of the weight's
    in float32 at least, and either a term of it with a chunk's gradient, or a chunk's product, logits and gradients.
    0 for other ops."""
    if op_name(node) != CHUNKED:
        return 0
    op = Op.of(node)
    (x, weight), logits = op.operands[:2], _logits(op)
    wide, narrow = max(4, x.dtype.itemsize), x.dtype.itemsize
    chunk = -(-logits.numel // int(op.kwargs["chunks"]))
    shaped = 2 * wide if op.kwargs.get("logits") is not None else wide
    making = chunk * (2 * narrow + shaped)
    adding = chunk * narrow + (weight.bytes if wide != narrow else 0)
    return (weight.numel * wide if weight.needs_grad else 0) + max(making, adding) - weight.bytes


def _logits(op: Op) -> Meta:
    x, weight = op.operands[:2]
    return Meta((*x.shape[:-1], weight.shape[_weight_dim(op)]), op.result.dtype, op.result.needs_grad)


def _weight_dim(op: Op) -> int:
    return int(op.kwargs.get("weight_dim", 0))


def _line(op: Op) -> str:
    weight = "h! v!" if _weight_dim(op) else "v! h!"
    return f"... h!, {weight}, ..., v! -> {'...' if op.kwargs.get('reduction') == 'none' else ''}"


def _classes_split(op: Op) -> Iterable[Choice]:
    if "axis" not in op.kwargs:
        bias = [S(0)] * (len(op.operands) - 3)
        yield Choice((R, S(_weight_dim(op)), R, *bias), I, CHUNKED)


def _local(op: Op, choice: Choice, size: int, axis: str) -> Local:
    return Local({}, {"axis": AxisRef(axis)}) if choice.form else Local.same()


def _statistics(op: Op, choice: Choice) -> Communication:
    """Per token the largest logit, then the sum, the target's logit and the mean: float32 at least."""
    if not choice.form:
        return []
    one = op.operands[2].numel * max(4, op.result.dtype.itemsize)
    return [("all_reduce", one), ("all_reduce", 3 * one)]


RULES: dict[str, Rule] = {
    CHUNKED: Chunked(
        _line,
        sums=True,
        local=_local,
        forms=_classes_split,
        inside=_statistics,
        flop_count=product_flops,
        terms=(3,),
    ),
}
