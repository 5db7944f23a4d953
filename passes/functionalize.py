"""functionalize: in-place ops become their out-of-place forms.

Guarantees: equal values and gradients, and no op of the flat graph writes to a tensor. ``y = x.add_(1)`` becomes
``y = x + 1``, and what reads ``x`` later reads ``y``. A write to a view becomes a new value of the view, then of what
it is a view of, up to the tensor that owns the memory; every other view of it is taken again where it is read next::

    shifted = zeros(…)                        shifted = zeros(…)
    v = shifted[:, 1:]
    v.copy_(ids[:, :-1])                      shifted_1 = slice_scatter(shifted, ids[:, :-1], 1, 1)
    f(shifted)                                f(shifted_1)

Who shares memory with whom is read off the capture (``Flat.memory``), not guessed from ops: ``reshape`` may copy.
Writes that can't be followed (through overlapping windows, through ``detach`` into a tensor with a gradient) are
refused by line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.capture import Flat, differentiable, gradient_flows, live, written_operands
from autopar.errors import CaptureError
from autopar.graph import (
    Meta,
    arguments,
    aten_overload,
    derive,
    info,
    is_getitem,
    is_mutating,
    is_random,
    op_name,
    where,
)
from autopar.passes.views import Call, View, view_of

aten = torch.ops.aten


def functionalize(flat: Flat) -> Flat:
    """Rewrite ``flat``. Raises CaptureError naming the line of a write that has no out-of-place form here."""
    if not any(map(is_mutating, flat.nodes)):
        return flat
    program = _Program(flat)
    for node in flat.nodes:
        program.add(node)
    flat.loss = program.read(program.tensors[flat.loss], flat.loss)
    flat.nodes = list(live(program.order, flat.loss, {}))
    for node in flat.nodes:
        flows, data = gradient_flows(node), info(node)
        data.outputs = tuple(replace(m, needs_grad=flows and differentiable(m.dtype)) for m in data.outputs)
    return flat


@dataclass(eq=False)
class _Tensor:
    """A tensor of the captured program, which owns memory or is a ``view`` of ``parent``.

    ``value`` is what it held when its memory had been written to ``writes`` times (for an owner: what it holds now).
    """

    value: fx.Node
    meta: Meta
    parent: _Tensor | None = None
    view: View | None = None
    writes: int = 0

    @property
    def owner(self) -> _Tensor:
        return self if self.parent is None else self.parent.owner


class _Program:
    """Runs the captured ops in order on values in place of tensors; ``order`` is the program without writes."""

    def __init__(self, flat: Flat) -> None:
        self.graph = flat.graph
        self.memory = flat.memory
        self.order: list[fx.Node] = []
        placeholders = (n for n in flat.graph.nodes if n.op == "placeholder")
        self.tensors = {n: _Tensor(n, info(n).meta) for n in placeholders}

    def add(self, node: fx.Node) -> None:
        """The next op of the program."""
        source = self._viewed(node)
        written = [self.tensors[operand] for operand in written_operands(node)]
        for operand in node.all_input_nodes:
            node.replace_input_with(operand, self.read(self.tensors[operand], node))
        if not written:
            self.order.append(node)
            self.tensors[node] = self._tensor(node, source)
        elif torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            self.tensors[node] = self._reinterpreted(node, written[0])
        elif len(written) == 1 and isinstance(node.args[0], fx.Node):
            self.write(written[0], self._written(node, written[0].meta), node)
            self.tensors[node] = written[0]
        else:
            raise _refused(node, "it writes to several tensors")

    def read(self, tensor: _Tensor, reader: fx.Node) -> fx.Node:
        """The value of ``tensor`` where ``reader`` stands; a view whose memory has changed is taken again."""
        writes = tensor.owner.writes
        if tensor.writes != writes and tensor.parent is not None and tensor.view is not None:
            tensor.value = self._call(tensor.view.take, tensor.meta, reader, self.read(tensor.parent, reader))
            tensor.writes = writes
        return tensor.value

    def write(self, tensor: _Tensor, value: fx.Node, node: fx.Node) -> None:
        """``node`` puts ``value`` into ``tensor``, and so into all that it is a view of."""
        old = None if tensor.parent is None else self.read(tensor.parent, node)
        if tensor.parent is None:
            tensor.writes += 1
        else:
            self.write(tensor.parent, self._put_back(tensor, value, old, node), node)
        tensor.value, tensor.writes = value, tensor.owner.writes

    def _put_back(self, tensor: _Tensor, value: fx.Node, old: fx.Node | None, node: fx.Node) -> fx.Node:
        """The value of the parent (``old`` before) once its view ``tensor`` has ``value``."""
        parent, view = tensor.parent, tensor.view
        assert parent is not None
        assert view is not None
        assert old is not None
        if "detach" in view.name and parent.meta.needs_grad:
            raise _refused(node, "autograd doesn't see a write through detach or under no_grad")
        back = view.undo(parent.meta, tensor.meta)
        if back is not None:
            return value if back.op is aten.alias.default else self._call(back, parent.meta, node, value)
        scatter = view.scatter()
        if scatter is None:
            raise _refused(node, f"it writes to a view by {view.name}")
        return self._call(scatter, parent.meta, node, old, value)

    def _viewed(self, node: fx.Node) -> _Tensor | None:
        """What ``node`` is a view of; None where it owns its memory. A literal is copied, whatever the capture says."""
        if op_name(node) == "aten.lift_fresh_copy.default" or not node.all_input_nodes:
            return None
        first = node.all_input_nodes[0]
        if is_getitem(node) and self.tensors[first].parent is None:
            return None  # one of several results, none of which is a view
        return self.tensors[first] if self.memory[node] & self.memory[first] else None

    def _tensor(self, node: fx.Node, source: _Tensor | None) -> _Tensor:
        if source is None:
            return _Tensor(node, info(node).meta)
        view = view_of(node)
        if is_getitem(node):  # of a list of views, which is as old as they are
            return _Tensor(node, info(node).meta, source.parent, view, source.writes)
        return _Tensor(node, info(node).meta, source, view, source.owner.writes)

    def _reinterpreted(self, node: fx.Node, source: _Tensor) -> _Tensor:
        """``unsqueeze_`` and its like give the same memory another shape; nothing is written."""
        call = Call(_out_of_place(node), node.args[1:], tuple(node.kwargs.items()))
        value = self._call(call, info(node).meta, node, self.read(source, node))
        return _Tensor(value, info(node).meta, source, view_of(value), source.owner.writes)

    def _written(self, node: fx.Node, meta: Meta) -> fx.Node:
        """What the write ``node`` leaves in its first operand: a value of its shape and dtype."""
        kind, given = op_name(node).split(".")[1], arguments(node)
        target = node.args[0]
        assert isinstance(target, fx.Node)
        if kind == "copy_" or (kind == "fill_" and isinstance(given["value"], fx.Node)):
            return self._fitted(given["src" if kind == "copy_" else "value"], meta, node)
        if kind in ("zero_", "fill_"):
            return self._call(Call(aten.full_like.default, (given.get("value", 0),)), meta, node, target)
        call = Call(_out_of_place(node), (*node.args[1:], *_spelled(node)), tuple(node.kwargs.items()))
        made = replace(meta, dtype=_promoted(node, meta))
        return self._fitted(self._call(call, made, node, target), meta, node)

    def _fitted(self, value: fx.Node, meta: Meta, node: fx.Node) -> fx.Node:
        """``value`` as a tensor of ``meta``: cast and repeated by ops that gradients pass (``copy`` has none)."""
        if info(value).meta.dtype != meta.dtype:
            cast = replace(info(value).meta, dtype=meta.dtype)
            value = self._call(Call(aten.to.dtype, (meta.dtype,)), cast, node, value)
        if info(value).meta.shape != meta.shape:
            value = self._call(Call(aten.expand.default, (list(meta.shape),)), meta, node, value)
        return value

    def _call(self, call: Call, meta: Meta, place: fx.Node, *first: fx.Node) -> fx.Node:
        """A new op before ``place``, with the module and source line of that."""
        with self.graph.inserting_before(place):
            made = call.of(self.graph, *first)
        derive(made, place, outputs=(meta,), random=is_random(made))
        self.order.append(made)
        return made


_RENAMED = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    **{f"aten.__i{op}__.{kind}": f"aten.__{op}__.{kind}" for op in ("and", "or", "xor") for kind in ("Tensor", "Scalar")},
}
"""Writes whose form isn't named by leaving out the last underscore."""


def _out_of_place(node: fx.Node) -> Any:
    """The op that returns what the write ``node`` leaves in its first operand. Raises CaptureError if there is none."""
    name = op_name(node)
    namespace, packet, overload = name.split(".")
    try:
        form = aten_overload(_RENAMED.get(name, f"{namespace}.{packet.removesuffix('_')}.{overload}"))
    except AttributeError:
        form = None
    if form is None:
        raise _refused(node, "the op has no out-of-place form")
    return form
