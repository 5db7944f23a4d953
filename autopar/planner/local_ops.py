"""Ops as one rank runs them, and as they were before an axis was solved: by their shapes alone, without a graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.fx.node import map_aggregate

from autopar.graph import AxisRef, Choice, Meta
from autopar.rules.base import Op, Rule
from autopar.spmd import Type, local_shape


def in_part(op: Op, choice: Choice, size: int) -> Op:
    """``op`` with the shapes that a rank has of its operands and results, called as before."""
    given = tuple(_part(meta, kind, size) for meta, kind in zip(op.operands, choice.operands, strict=True))
    return replace(op, operands=given, outputs=tuple(_part(meta, choice.result, size) for meta in op.outputs))


def local_op(op: Op, rule: Rule, choice: Choice, axis: AxisRef) -> Op:
    """``op`` as a rank calls it once ``choice`` has split it over ``axis``, as :mod:`autopar.passes.localize` leaves
    it."""
    part, local = in_part(op, choice, axis.size), rule.localize(op, choice, axis.size, axis.name)
    operands = iter(part.operands)
    given = _map_metas((op.args, op.kwargs), operands)
    told: Any = lambda argument: axis if argument == AxisRef(axis.name) else argument  # noqa: E731
    args, kwargs = map_aggregate(local.call(*given), told)
    return Op(local.target or op.name, args, dict(kwargs), tuple(_metas((args, kwargs))), part.outputs, op.apart)


def before_split(op: Op, choice: Choice, size: int) -> Op:
    """A local op as it was before one axis was solved."""
    given = tuple(_whole(meta, kind, size) for meta, kind in zip(op.operands, choice.operands, strict=True))
    return replace(op, operands=given, outputs=tuple(_whole(meta, choice.result, size) for meta in op.outputs))


def _part(meta: Meta, kind: Type, size: int) -> Meta:
    return replace(meta, shape=local_shape(meta.shape, kind, size)) if kind.is_shard else meta


def _whole(meta: Meta, kind: Type, size: int) -> Meta:
    shape = tuple(n * size if kind.is_shard and kind.dim == d else n for d, n in enumerate(meta.shape))
    return replace(meta, shape=shape)


def _map_metas(argument: Any, operands: Iterator[Meta]) -> Any:
    """With the next of ``operands`` in the place of each tensor."""
    return map_aggregate(argument, lambda each: next(operands) if isinstance(each, Meta) else each)


def _metas(argument: Any) -> Iterator[Meta]:
    found: list[Meta] = []
    map_aggregate(argument, lambda each: found.append(each) if isinstance(each, Meta) else None)
    yield from found
