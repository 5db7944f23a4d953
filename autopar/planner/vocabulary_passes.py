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
from collections import Counter
from collections.abc import Callable
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
    """Of a ``head`` that is local on all axes, computed by ``algorithm`` in so many ``chunks`` of tokens. ``returns``:
    anything that is trained comes before it."""

    head: Head
    algorithm: str
    chunks: int
    device: Device
    returns: bool = True

    @property
    def seconds(self) -> dict[str, float]:
        """By kind of pass."""
        once = math.fsum(self._forward(node) for node in closure([self.head.x, self.head.targets]))
        products = self._of_parts(lambda tokens: math.fsum(self._forward(n, tokens) for n in self._product_ops))
        made, again = once + products, products if self.chunks > 1 else 0.0
        into_table, into_input = self._pulled("weight"), self._pulled("x")
        early = self.returns and self.algorithm == "vocab-2"
        count = 2 if early and self._smooths else 1
        found = {
            "S": made + self._swept(self._scores_bytes) + (count * into_input if early else 0.0),
            "T": again + self._swept(self._gradient_bytes) + into_table + (into_input if self._returns_late else 0.0),
        }
        if self.algorithm == "naive":
            found["U"] = self._swept(self._exponential_bytes) if self.chunks == 1 else 0.0
        return found

    @property
    def _returns_late(self) -> bool:
        """Whether the input's gradient is made with the table's."""
        return self.returns and self.algorithm != "vocab-2"

    @cached_property
    def _product_ops(self) -> frozenset[fx.Node]:
        """From the input to logits, with what the table goes through."""
        return closure([self.head.logits], without={self.head.x})

    @cached_property
    def _parts(self) -> Counter[int]:
        """Of how many tokens how many chunks are: neighbouring parts of almost equal length."""
        tokens = info(self.head.product).meta.shape[0]
        chunks = max(1, min(self.chunks, tokens))
        return Counter(tokens * (i + 1) // chunks - tokens * i // chunks for i in range(chunks))

    def _of_parts(self, figure: Callable[[int], float]) -> float:
        """The sum of what a chunk of so many tokens takes."""
        return math.fsum(count * figure(tokens) for tokens, count in self._parts.items())

    def _forward(self, node: fx.Node, tokens: int | None = None) -> float:
        return op_seconds(node, self.device, None if tokens is None else self._op(node, tokens))[0]

    def _op(self, node: fx.Node, tokens: int) -> Op:
        """As it is for a chunk of so many tokens."""
        op = Op.of(node)

        def cut(meta: Meta) -> Meta:
            return replace(meta, shape=(tokens, *meta.shape[1:]))

        if self.chunks == 1 or stored_in(node) is not None:
            return op
        given = [m if stored_in(n) is not None else cut(m) for n, m in zip(operands(node), op.operands, strict=True)]
        return replace(op, operands=tuple(given), outputs=tuple(map(cut, op.outputs)))

    def _work(self, node: fx.Node, tokens: int) -> Work:
        op = self._op(node, tokens)
        return work_of(op, lookup(op.name), _whole(op), 1)

    def _pulled(self, into: str) -> float:
        return self._of_parts(lambda tokens: self._pulled_of(into, tokens))

    def _pulled_of(self, into: str, tokens: int) -> float:
        """Products of the gradient of the product's result with a factor: the gradient of the other one."""
        op, work = self._op(self.head.product, tokens), self._work(self.head.product, tokens)
        position = next(i for i, n in enumerate(operands(self.head.product)) if (stored_in(n) is None) == (into == "x"))
        factor = op.operands[position]
        if not factor.needs_grad:
            return 0.0
        product = work.flops, work.moved_bytes, work.dtype, self.device, factor.numel
        return compute.seconds(*product, is_aligned=work.is_aligned)

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
        early = self._early_bytes if self.returns and self.algorithm == "vocab-2" else 0
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
        shaping = [node for node in self._path if len(operands(node)) == 1]
        return self._of_parts(lambda tokens: math.fsum(self._work(node, tokens).back_bytes for node in shaping))

    @property
    def _path(self) -> tuple[fx.Node, ...]:
        path = self.head.path
        return path[path.index(self.head.product) + 1 :]

    @property
    def _bias_bytes(self) -> int:
        """Of what its gradient is the sum of."""
        bias = self.head.bias
        if bias is None or not info(bias).meta.needs_grad:
            return 0
        return next(info(n).meta.bytes for n in self._path if bias in map(stored_in, operands(n)))

    @property
    def _gradient_bytes(self) -> float:
        table = info(self.head.weight).meta
        made: float = (2 + 2 * self._smooths) * self._wide_bytes + self._bias_bytes
        if table.needs_grad or self._bias_bytes or self._returns_late:  # somebody takes the gradient of the logits
            made += self._copy_bytes + self._path_bytes
        cast = [n for n in conversions(self.head.weight) if _is_op(n)] if table.needs_grad else []
        casts = self._of_parts(lambda tokens: math.fsum(self._work(n, tokens).back_bytes for n in cast))
        if self.chunks == 1:
            return made + casts
        again = self._own_bytes + 4 * self._wide_bytes
        return made + casts + again + self._chunked_bytes(table)

    def _chunked_bytes(self, table: Meta) -> int:
        """The table's gradient added up over chunks; terms of the input's put together."""
        wide = table.numel * max(_WIDE, table.dtype.itemsize)
        cast = wide + table.bytes if wide != table.bytes else 0
        terms = 2 * info(self.head.x).meta.bytes if self._returns_late else 0
        if not table.needs_grad:
            return terms
        return wide + self._parts.total() * (2 * wide + table.bytes) + cast + terms


def _is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and not isinstance(node.target, RuntimeOp)
