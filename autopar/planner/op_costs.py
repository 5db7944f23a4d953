"""What one op takes on one device, forward and backward, in seconds of a microbatch: gathered for the cost models."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from autopar.cluster import Device
from autopar.cost_models import compute
from autopar.cost_models.compute import Work
from autopar.graph import Choice, Info, Meta, info, is_getitem, is_view, operands
from autopar.passes.vocabulary import ALIGNED_BYTES
from autopar.rules.base import Op, Rule
from autopar.rules.shape import copies
from autopar.spmd import Type

_ROW_COPIES = 2
"""A row of a table's gradient, which is cleared first, is read and written for each use of the row."""

_SUM_COPIES = 5
"""Adding a piece of a result to those before reads it, and reads and writes their sum, which is twice as wide."""


def pass_seconds(
    node: fx.Node, op: Op, rule: Rule, choice: Choice, size: int, device: Device, unequal: float = 1.0
) -> tuple[float, float]:
    """Roofline seconds of forward and backward of the part one rank computes, ``unequal`` times the average one."""
    return own_seconds(op, rule, choice, size, device, unequal, is_view=moves_nothing(node, op, device))


def own_seconds(
    op: Op, rule: Rule, choice: Choice, size: int, device: Device, unequal: float = 1.0, *, is_view: bool
) -> tuple[float, float]:
    """:func:`pass_seconds`, where it is known whether it is a view."""
    if is_view:
        return view_seconds(op, rule, choice, size, device)
    return work_seconds(op, rule, choice, size, device, unequal)


def moves_nothing(node: fx.Node, op: Op, device: Device) -> bool:
    """Whether it is a view, which no kernel runs for. By its schema a cast may be one as well: it has another dtype and
    as many elements, where complex numbers and their parts, which lie where they lay, differ in both."""
    if is_getitem(node):
        return True
    if not is_view(node):
        return False
    made, given = op.result, op.operands[0]
    return not copies(node, device.kind) if made.dtype == given.dtype else made.numel != given.numel


def view_seconds(op: Op, rule: Rule, choice: Choice, size: int, device: Device) -> tuple[float, float]:
    """:func:`pass_seconds` of a view, which no kernel runs for; its backward may need one."""
    if not op.result.needs_grad:
        return 0.0, 0.0
    made = sum(local_bytes(m, choice.result, size) for m in op.outputs)
    bytes_ = rule.view_bytes(made, local_bytes(op.operands[0], choice.operands[0], size))
    return 0.0, compute.seconds(0, bytes_, "", device) if bytes_ else 0.0


def work_seconds(
    op: Op, rule: Rule, choice: Choice, size: int, device: Device, unequal: float = 1.0
) -> tuple[float, float]:
    """:func:`pass_seconds` of an op that is no view."""
    work = work_of(op, rule, choice, size, unequal)
    backward = compute.backward_seconds(work, device) if op.result.needs_grad else 0.0
    return compute.forward_seconds(work, device), backward


def work_of(op: Op, rule: Rule, choice: Choice, size: int, unequal: float = 1.0) -> Work:
    """What a rank does of ``op``, of ``size`` ranks that compute it by ``choice``.

    A backward reads the gradients of results and, unless the op is linear, its operands, and writes gradients.
    """
    split = size if choice.result.is_shard or any(kind.is_shard for kind in choice.operands) else 1
    flops = unequal * rule.flops(op) / split
    taken = [local_bytes(m, k, size) for m, k in zip(op.operands, choice.operands, strict=True)]
    made = sum(local_bytes(m, choice.result, size) for m in op.outputs)
    inner = rule.inner_bytes(op) // split
    gradients = sum(b for b, m in zip(taken, op.operands, strict=True) if m.needs_grad)
    for position in rule.looked_up(op):
        gradients += _ROW_COPIES * min(taken[position], made) if op.operands[position].needs_grad else 0
        taken[position] = min(taken[position], made)
    factors = rule.factors(op) if flops else ()
    factor = op.operands[0] if flops else op.result  # a loss of bf16 products is float32
    beside = rule.back_bytes(op, made, taken)
    back = made + gradients + inner + (0 if rule.is_linear(op) else sum(taken)) + beside
    elements, (loose, back_loose) = _elements(op.result, choice.result, size), rule.loose(op)
    return Work(
        flops=flops,
        moved_bytes=sum(taken) + made + (0 if flops else inner),
        dtype=dtype_name(factor.dtype),
        made=rule.made(op, choice, size) if flops else 0,
        factors=tuple(_elements(op.operands[i], choice.operands[i], size) for i in factors),
        back_bytes=back,
        repeats=rule.repeats,
        pieces=rule.pieces(op, choice, size),
        added_bytes=_SUM_COPIES * made,
        fused=rule.is_fused(op),
        keys=op.operands[1].shape[-2] if rule.is_fused(op) else 0,
        loose=loose * elements,
        back_loose=back_loose * elements,
        swept_bytes=inner if flops else 0,
        back_swept_bytes=beside if flops else 0,
        is_aligned=not flops or rule.is_fused(op) or _is_aligned(op, rule, choice, size),
    )


def _is_aligned(op: Op, rule: Rule, choice: Choice, size: int) -> bool:
    """Whether rows of all matrices of a product in 16 bits begin where kernels can load many elements at once."""
    both = zip((*op.operands, op.result), (*choice.operands, choice.result), strict=True)
    rows = [
        meta.shape[-1] // (size if kind.is_shard and kind.dim == len(meta.shape) - 1 else 1) * meta.dtype.itemsize
        for meta, kind in both
        if len(meta.shape) > 1 and meta.dtype.itemsize == 2
    ]
    if op.operands[0].dtype.itemsize == 2:
        rows.append(rule.row_bytes(op, choice, size))
    return all(row % ALIGNED_BYTES == 0 for row in rows)


def expert_imbalance(node: fx.Node, *further: Choice) -> float:
    """How many times the mean the rank with the most rows of experts has to do, where ``node`` is about such rows on an
    axis that is solved, or by a ``further`` choice; and the part of rows that there likely is."""
    data = info(node)
    if data.imbalance == 1.0:
        return data.likely
    kinds = [kind for c in (*data.choices.values(), *further) for kind in (*c.operands, c.result)]
    return data.likely * (data.imbalance if any(kind.is_ragged for kind in kinds) else 1.0)


def fullest(node: fx.Node, op: Op) -> Op:
    """The local ``op`` of ``node``, solved on all axes, as the rank has it that has the most rows of experts."""
    if info(node).imbalance == 1.0 and all(info(each).likely == 1.0 for each in (node, *operands(node))):
        return op
    taken = tuple(fullest_rows(info(o), m) for o, m in zip(operands(node), op.operands, strict=True))
    return replace(op, operands=taken, outputs=tuple(fullest_rows(info(node), meta) for meta in op.outputs))


def fullest_rows(data: Info, meta: Meta) -> Meta:
    """Of what ``data`` is about, as that rank has it, and as many as there likely are."""
    times = data.row_share
    return meta if times == 1.0 else replace(meta, shape=(math.ceil(meta.shape[0] * times), *meta.shape[1:]))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def local_bytes(meta: Meta, kind: Type, size: int) -> int:
    """Of a tensor's part on one of ``size`` ranks."""
    return meta.bytes // size if kind.is_shard else meta.bytes


def _elements(meta: Meta, kind: Type, size: int) -> int:
    return meta.numel // size if kind.is_shard else meta.numel
