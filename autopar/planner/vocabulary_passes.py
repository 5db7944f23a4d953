"""What the passes of a head compute that is split over the pipeline, as :mod:`autopar.runtime.logits` runs them.

A rank has logits ``y [t, c]`` of d bytes each, made by a product of ``[t, h]`` with its table ``[c, h]``, and takes
exponentials of them in float32 at least, w bytes each. Beside products and the ops that shape them, a pass sweeps over
matrices; numbers per token are none. Sweeps of a pass count as one kernel:

* ``S``: y is copied where d is not w or its memory is needed, and its maximum read. Then, with ``naive`` in ``U``, the
  maximum is taken off, exponentials are taken, and summed. With ``vocab-2``, exponentials are pulled back to the input
  (one product), and the table's rows of targets are looked up.
* ``T``: exponentials become the gradient of the logits, which is pulled back to the table, and to the input where that
  wasn't done.

In chunks of tokens, ``T`` makes logits and exponentials again, and adds up the table's gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.cluster import Device
from autopar.cost_models import compute
from autopar.cost_models.compute import Work
from autopar.graph import Choice, Meta, RuntimeOp, info, operands
from autopar.passes.recut import closure
from autopar.passes.vocabulary import Head, conversions, stored_in
from autopar.planner.op_costs import pass_seconds, work_of
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.spmd import R

_WIDE = 4  # bytes of a float32
_SMOOTHING = 5  # the argument of a cross entropy


def op_seconds(node: fx.Node, device: Device, op: Op | None = None) -> tuple[float, float]:
    """What an op of a local block computes, forward and backward; nothing for a mere change of type."""
    if isinstance(node.target, RuntimeOp) and "src" in node.kwargs:
        return 0.0, 0.0
    found = op or Op.of(node)
    return pass_seconds(node, found, lookup(found.name), _whole(found), 1, device)


def _whole(op: Op) -> Choice:
    return Choice((R,) * len(op.operands), R)


@dataclass(frozen=True)
class HeadPasses:
    """Of a ``head`` that is local on all axes, computed by ``algorithm`` in so many ``chunks`` of tokens."""

    head: Head
    algorithm: str
    chunks: int
    device: Device

    @property
    def seconds(self) -> dict[str, float]:
        """By kind of pass."""
        once = math.fsum(self._forward(node) for node in closure([self.head.x, self.head.targets]))
        made = once + self.chunks * math.fsum(self._forward(node, cut=True) for node in self._product_ops)
        again = made - once if self.chunks > 1 else 0.0
        into_table, into_input = self._pulled("weight"), self._pulled("x")
        early = self.algorithm == "vocab-2"
        count = 2 if early and self._smooths else 1
        found = {
            "S": made + self._swept(self._scores_bytes) + (count * into_input if early else 0.0),
            "T": again + self._swept(self._gradient_bytes) + into_table + (0.0 if early else into_input),
        }
        if self.algorithm == "naive":
            found["U"] = self._swept(self._exponential_bytes) if self.chunks == 1 else 0.0
        return found

    @cached_property
    def _product_ops(self) -> frozenset[fx.Node]:
        """From the input to logits, with what the table goes through."""
        return closure([self.head.logits], without={self.head.x})

    def _forward(self, node: fx.Node, *, cut: bool = False) -> float:
        return op_seconds(node, self.device, self._op(node) if cut else None)[0]

    def _op(self, node: fx.Node) -> Op:
        """As it is for one chunk of the tokens."""
        op, tokens = Op.of(node), info(self.head.product).meta.shape[0]

        def cut(meta: Meta) -> Meta:
            return replace(meta, shape=(tokens // self.chunks, *meta.shape[1:]))

        if self.chunks == 1 or stored_in(node) is not None:
            return op
        given = [m if stored_in(n) is not None else cut(m) for n, m in zip(operands(node), op.operands, strict=True)]
        return replace(op, operands=tuple(given), outputs=tuple(map(cut, op.outputs)))

    def _work(self, node: fx.Node) -> Work:
        op = self._op(node)
        return work_of(op, lookup(op.name), _whole(op), 1)

    def _pulled(self, into: str) -> float:
        """Products of the gradient of the product's result with a factor: the gradient of the other one."""
        op, work = self._op(self.head.product), self._work(self.head.product)
        position = next(i for i, n in enumerate(operands(self.head.product)) if (stored_in(n) is None) == (into == "x"))
        factor = op.operands[position]
        if not factor.needs_grad:
            return 0.0
        product = work.flops, work.moved_bytes, work.dtype, self.device, factor.numel
        return self.chunks * compute.seconds(*product, is_aligned=work.is_aligned)

    def _swept(self, bytes_: float) -> float:
        return compute.seconds(0, bytes_, "float32", self.device) if bytes_ else 0.0

    # --- bytes of matrices

    @property
    def _smooths(self) -> bool:
        return bool(Op.of(self.head.entropy).arg(_SMOOTHING, "label_smoothing", 0.0))

    @cached_property
    def _logits(self) -> Meta:
        return info(self.head.logits).meta

    @cached_property
    def _narrow_bytes(self) -> int:
        return self._logits.bytes

    @cached_property
    def _wide_bytes(self) -> int:
        return self._logits.numel * max(_WIDE, self._logits.dtype.itemsize)

    @property
    def _copy_bytes(self) -> int:
        """Of logits in another dtype."""
        return self._narrow_bytes + self._wide_bytes if self._narrow_bytes != self._wide_bytes else 0

    @property
    def _own_bytes(self) -> int:
        """Logits in memory that may be overwritten, and their maximum."""
        shapes = self.head.logits is not self.head.biased
        return (self._narrow_bytes + self._wide_bytes if shapes else self._copy_bytes) + self._wide_bytes

    @property
    def _exponential_bytes(self) -> int:
        return (5 + self._smooths) * self._wide_bytes

    @property
    def _scores_bytes(self) -> float:
        apart = self.algorithm == "naive" and self.chunks == 1
        early = self._early_bytes if self.algorithm == "vocab-2" else 0
        return self._own_bytes + (0 if apart else self._exponential_bytes) + early

    @property
    def _early_bytes(self) -> float:
        """Of the input's gradient as far as a rank knows it: exponentials, the rows of targets, in chunks put
        together."""
        x, table = info(self.head.x).meta, info(self.head.weight).meta
        looked_up = x.numel * table.dtype.itemsize
        rows = 2 * looked_up + (looked_up + x.bytes if table.dtype != x.dtype else 0) + 4 * x.bytes
        even = self._narrow_bytes + self._path_bytes + 3 * x.bytes if self._smooths else 0
        return self._copy_bytes + self._path_bytes + rows + even + (4 * x.bytes if self.chunks > 1 else 0)

    @property
    def _path_bytes(self) -> float:
        """Of pulling a gradient back from logits to the product."""
        return self.chunks * math.fsum(self._work(node).back_bytes for node in self._path if len(operands(node)) == 1)

    @property
    def _path(self) -> tuple[fx.Node, ...]:
        path = self.head.path
        return path[path.index(self.head.product) + 1 :]

    @property
    def _gradient_bytes(self) -> float:
        table = info(self.head.weight).meta
        bias = info(self.head.biased).meta.bytes if self.head.bias is not None else 0
        made = (2 + 2 * self._smooths) * self._wide_bytes + self._copy_bytes + self._path_bytes + bias
        casts = self.chunks * math.fsum(self._work(n).back_bytes for n in conversions(self.head.weight) if _is_op(n))
        if self.chunks == 1:
            return made + casts
        again = self._own_bytes + 4 * self._wide_bytes
        return made + casts + again + self._chunked_bytes(table)

    def _chunked_bytes(self, table: Meta) -> int:
        """The table's gradient added up over chunks; terms of the input's put together."""
        wide = table.numel * max(_WIDE, table.dtype.itemsize)
        cast = wide + table.bytes if wide != table.bytes else 0
        terms = 2 * info(self.head.x).meta.bytes if self.algorithm != "vocab-2" else 0
        return wide + self.chunks * (2 * wide + table.bytes) + cast + terms


def _is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and not isinstance(node.target, RuntimeOp)
