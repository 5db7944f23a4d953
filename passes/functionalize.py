"""functionalize: in-place ops become their out-of-place forms.

Guarantees: equal values and gradients, and no op of the flat graph writes to a tensor. ``y = x.add_(1)`` becomes
``y = x + 1``, and what reads ``x`` later reads ``y``. A write to a view becomes a new value of the view, then of what
it is a view of, up to the tensor that owns the memory; every other view of that is taken again where it is next read::

    shifted = zeros(…)                        shifted = zeros(…)
    v = shifted[:, 1:]
    v.copy_(ids[:, :-1])                      shifted_1 = slice_scatter(shifted, ids[:, :-1], 1, 1)
    f(shifted)                                f(shifted_1)

Which tensors share memory is read off the capture (``Flat.memory``), not guessed from ops: ``reshape`` may copy.
Writes that can't be followed (to overlapping windows, or past autograd to a tensor with a gradient) are refused.

What the last write to a buffer leaves there is put into it by an op of its own, ``averaged(value, buffer, 1.0)``, on
which nothing depends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import fx

from autopar.capture import Flat, differentiable, gradient_flows
from autopar.errors import CaptureError
from autopar.graph import (
    AVERAGED,
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
from autopar.liveness import is_kept, live, written_operands
from autopar.passes.views import Call, View, view_of

aten = torch.ops.aten


def functionalize(flat: Flat) -> Flat:
    """Rewrite ``flat``. Raises CaptureError naming the line of a write that has no out-of-place form here."""
    if not any(map(is_mutating, flat.nodes)):
        return flat
    program = _Program(flat)
    kept = [n for n in program.tensors if is_kept(n) and info(n).name not in flat.constants]
    buffers = {number: n for n in kept for number in flat.memory[n]}
    last: dict[fx.Node, fx.Node] = {}  # buffer -> the last write to it
    for node in flat.nodes:
        written = {number for operand in written_operands(node) for number in flat.memory[operand]}
        last |= {buffers[number]: node for number in sorted(written & buffers.keys())}
    for node in flat.nodes:
        program.add(node)
        for buffer in (buffer for buffer, write in last.items() if write is node):
            program.keep(buffer, node)
    flat.loss = program.read(program.tensors[flat.loss], flat.nodes[-1])
    flat.nodes = list(live(program.order, flat.loss, {}))
    return flat


_SAME: Final = ("aten.detach.default", "aten.alias.default")
_UNKNOWN: Final = View(None, "an op that isn't known")


@dataclass(eq=False)
class _Tensor:
    """A tensor of the captured program: it owns memory, or is a ``view`` of ``parent``.

    ``value`` is what it held when its memory had been written to ``writes`` times; for an owner, that is now.
    """

    value: fx.Node
    meta: Meta
    parent: _Tensor | None = None
    view: View = _UNKNOWN
    writes: int = 0

    @property
    def owner(self) -> _Tensor:
        return self if self.parent is None else self.parent.owner


class _Program:
    """Goes through the captured ops with values in place of tensors; ``order`` is the program without writes."""

    def __init__(self, flat: Flat) -> None:
        self.graph = flat.graph
        self.memory = flat.memory
        self.order: list[fx.Node] = []
        placeholders = (n for n in flat.graph.nodes if n.op == "placeholder")
        self.tensors = {n: _Tensor(n, info(n).meta) for n in placeholders}
        self.lists: dict[fx.Node, list[tuple[fx.Node, int]]] = {}  # op with several results -> operands, their writes

    def add(self, node: fx.Node) -> None:
        """The next op of the program."""
        if is_getitem(node):
            self._append(node)
            self.tensors[node] = self._element(node)
            return
        given = node.all_input_nodes
        written = [self.tensors[operand] for operand in written_operands(node)]
        self.lists[node] = [(operand, self.tensors[operand].owner.writes) for operand in given]
        for operand in given:
            node.replace_input_with(operand, self.read(self.tensors[operand], node))
        if not written:
            self._append(node)
            self.tensors[node] = self._made(node, given)
        elif torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            self.tensors[node] = self._reinterpreted(node, written[0])
        elif len(written) == 1 and isinstance(node.args[0], fx.Node):
            self.write(written[0], self._left_by(node, written[0].meta), node)
            self.tensors[node] = written[0]
        else:
            raise _refused(node, "it writes to several tensors")

    def keep(self, buffer: fx.Node, node: fx.Node) -> None:
        """What ``node``, the last write to it, leaves in ``buffer`` is put there, where that is made and no op to come
        reads what was there before."""
        value, meta = self.read(self.tensors[buffer], node), replace(info(buffer).meta, needs_grad=False)
        while op_name(value) in _SAME:
            value = value.all_input_nodes[0]
        known = value in self.order  # else it is given
        number, same = self.order.index(value) if known else len(self.order) - 1, {buffer}
        for i, made in enumerate(self.order):
            if same.intersection(made.all_input_nodes):
                same |= {made} if op_name(made) in _SAME else set()
                number = number if made in same else max(number, i)
        for alias in same - {buffer}:
            alias.replace_all_uses_with(buffer)
        last = self.order[number] if self.order else node
        with self.graph.inserting_after(last):
            left = self.graph.call_function(aten.detach.default, (value,))
        with self.graph.inserting_after(left):
            moved = self.graph.call_function(AVERAGED, (left, buffer, 1.0))
        like = last if known else node
        self.order[number + 1 : number + 1] = [
            derive(new, like, outputs=(meta,), random=False) for new in (left, moved)
        ]

    def read(self, tensor: _Tensor, reader: fx.Node) -> fx.Node:
        """The value of ``tensor`` where ``reader`` stands; a view whose memory has changed is taken again."""
        writes = tensor.owner.writes
        if tensor.writes != writes and tensor.parent is not None:
            if tensor.view.take is None:
                raise _refused(reader, f"it reads a view by {tensor.view.name} of a tensor that was changed since")
            tensor.value = self._call(tensor.view.take, tensor.meta, reader, self.read(tensor.parent, reader))
            tensor.writes = writes
        return tensor.value

    def write(self, tensor: _Tensor, value: fx.Node, node: fx.Node) -> None:
        """``node`` puts ``value`` into ``tensor``, and so into all that it is a view of."""
        if tensor.parent is None:
            tensor.writes += 1
        else:
            old = self.read(tensor.parent, node)
            self.write(tensor.parent, self._put_back(tensor, tensor.parent.meta, value, old, node), node)
        tensor.value, tensor.writes = value, tensor.owner.writes

    def _put_back(self, tensor: _Tensor, whole: Meta, value: fx.Node, old: fx.Node, node: fx.Node) -> fx.Node:
        """What ``tensor`` is a view of, ``old`` before, once ``tensor`` is ``value``."""
        view = tensor.view
        if "detach" in view.name and (info(old).meta.needs_grad or info(value).meta.needs_grad):
            raise _refused(node, "autograd doesn't see a write through detach or under no_grad")
        undo, scatter = view.undo(whole, tensor.meta), view.scatter()
        if undo is not None:
            return self._call(undo, whole, node, value)
        if scatter is not None and whole.dtype.is_complex:
            raise _refused(node, f"{view.name} of complex numbers; write to view_as_real(x)")
        if scatter is not None:
            return self._call(scatter, whole, node, old, value)
        raise _refused(node, f"it writes to a view by {view.name}")

    def _made(self, node: fx.Node, given: list[fx.Node]) -> _Tensor:
        """The result of an op: a view of the operand that has its memory, or the owner of new memory."""
        meta = info(node).meta
        sources = [operand for operand in given if self.memory[operand] & self.memory[node]]
        if not sources or op_name(node) == "aten.lift_fresh_copy.default":  # which the capture of a literal may skip
            return _Tensor(node, meta)
        source = self.tensors[sources[0]]
        view = view_of(node) if sources[0] is given[0] else View(None, op_name(node))
        return _Tensor(node, meta, source, view, source.owner.writes)

    def _element(self, node: fx.Node) -> _Tensor:
        """One of several results. If they are views, it is as old as they are."""
        for operand, writes in self.lists[node.all_input_nodes[0]]:
            if self.memory[operand] & self.memory[node]:
                return _Tensor(node, info(node).meta, self.tensors[operand], view_of(node), writes)
        return _Tensor(node, info(node).meta)

    def _reinterpreted(self, node: fx.Node, source: _Tensor) -> _Tensor:
        """``unsqueeze_`` and its like give a tensor another shape; its memory stays as it is."""
        meta = info(node).meta
        value = self._call(_out_of_place(node), meta, node, self.read(source, node))
        view = view_of(value)
        if view.undo(source.meta, meta) is None:
            raise _refused(node, "it changes what a tensor is a view of")
        return _Tensor(value, meta, source, view, source.owner.writes)

    def _left_by(self, node: fx.Node, meta: Meta) -> fx.Node:
        """What the write ``node`` leaves in its first operand, of ``meta``."""
        kind, given = op_name(node).split(".")[1], arguments(node)
        target = node.args[0]
        assert isinstance(target, fx.Node)
        source = given.get("src") if kind == "copy_" else given.get("value") if kind == "fill_" else None
        if isinstance(source, fx.Node):
            return self._fitted(source, meta, node)
        if kind in ("fill_", "zero_"):
            return self._call(Call(aten.full_like.default, (given.get("value", 0),)), meta, node, target)
        call = _out_of_place(node)
        made = self._call(call, replace(meta, dtype=_promoted(call, node, meta.dtype)), node, target)
        return self._fitted(made, meta, node)

    def _fitted(self, value: fx.Node, meta: Meta, node: fx.Node) -> fx.Node:
        """``value`` as a tensor of ``meta``: cast and repeated by ops with a gradient (``aten.copy`` has none)."""
        if info(value).meta.dtype != meta.dtype:
            cast = replace(info(value).meta, dtype=meta.dtype)
            value = self._call(Call(aten.to.dtype, (meta.dtype,)), cast, node, value)
        if info(value).meta.shape != meta.shape:
            value = self._call(Call(aten.expand.default, (list(meta.shape),)), meta, node, value)
        return value

    def _call(self, call: Call, meta: Meta, place: fx.Node, *first: fx.Node) -> fx.Node:
        """A new op before ``place``, with the module and source line of that."""
        with self.graph.inserting_before(place):
            made = call.on(self.graph, *first)
        derive(made, place, outputs=(meta,), random=is_random(made))
        self._append(made)
        return made

    def _append(self, node: fx.Node) -> None:
        flows, data = gradient_flows(node), info(node)
        data.outputs = tuple(replace(m, needs_grad=flows and differentiable(m.dtype)) for m in data.outputs)
        self.order.append(node)


_FORMS: Final = {
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.float_power_.Scalar": "aten.float_power.Tensor_Scalar",
    "aten.float_power_.Tensor": "aten.float_power.Tensor_Tensor",
    "aten.floor_divide_.Tensor": "aten.floor_divide.default",
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.pow_.Scalar": "aten.pow.Tensor_Scalar",
    "aten.pow_.Tensor": "aten.pow.Tensor_Tensor",
    "aten.transpose_.default": "aten.transpose.int",
    **{f"aten.__i{op}__.{k}": f"aten.__{op}__.{k}" for op in ("and", "or", "xor") for k in ("Tensor", "Scalar")},
}
"""Out-of-place forms that aren't named by leaving out the last underscore."""


def _out_of_place(node: fx.Node) -> Call:
    """The op that returns what the write ``node`` leaves in its first operand. Raises CaptureError if there is none."""
    name = op_name(node)
    namespace, packet, overload = name.split(".")
    try:
        form = aten_overload(_FORMS.get(name, f"{namespace}.{packet.removesuffix('_')}.{overload}"))
    except AttributeError:
        form = None
    if form is None or not isinstance(form._schema.arguments[0].type, torch.TensorType):
        raise _refused(node, "the op has no out-of-place form")
    given = arguments(node)
    rest = [a for a in form._schema.arguments[len(node.args) :] if not (a.has_default_value() or a.kwarg_only)]
    missing = (given[a.name] for a in rest if a.name not in node.kwargs)
    return Call(form, (*node.args[1:], *missing), tuple(node.kwargs.items()))


def _promoted(call: Call, node: fx.Node, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the out-of-place form, where operands of another may promote it (the write casts it back)."""
    if torch.Tag.pointwise not in call.op.tags:
        return dtype

    def on_meta(operand: fx.Node) -> Any:
        meta = info(operand).meta
        return torch.empty(meta.shape, dtype=meta.dtype, device="meta")

    first, args, kwargs = fx.map_arg((node.args[0], call.args, dict(call.kwargs)), on_meta)
    made: torch.dtype = call.op(first, *args, **kwargs).dtype
    return made


def _refused(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(
        f"{where(node)} changes a tensor in place in a way that has no out-of-place form: {why}; "
        "write it out of place (x = x + y instead of x += y)"
    )
