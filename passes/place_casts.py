"""place_casts: one cast for each value and dtype, where the tensor that moves is the narrow one.

Guarantees: equal values; in each block a value is cast to a dtype once. A cast to fewer bytes stands right behind what
makes the value, before views of it and the dispatch of its rows to experts: whatever is exchanged, sent or kept behind
it is narrow. A cast to more bytes stands before its first use, behind views. Casts of parameters stand before their
first use, too. Gradients of several uses of a narrow value are added up in the narrow dtype. Example::

    v = reshape(norm, …)                               narrow = to(norm, bf16)
    q = linear(to(v, bf16), …)                         v = reshape(narrow, …)
    k = linear(to(v, bf16), …)                         q = linear(v, …); k = linear(v, …)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.graph import Block, Model, derive, info, is_getitem, is_view, op_name, operands
from autopar.passes.experts import rearranges

aten = torch.ops.aten


def place_casts(model: Model) -> Model:
    """In place, on a folded graph in which every op has casts of its own."""
    for block in model.blocks:
        _Placer(block).run()
    return model


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """What ``node`` casts its operand to; None where it is no plain cast between floating-point dtypes."""
    if op_name(node) != "aten.to.dtype" or len(node.args) != 2 or node.kwargs:
        return None
    before, after = info(operands(node)[0]).meta.dtype, info(node).meta.dtype
    return after if before.is_floating_point and after.is_floating_point else None


@dataclass
class _Placer:
    block: Block
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        for node in self.block.ops:
            dtype = cast_dtype(node)
            if dtype is None or not node.users:
                continue
            value = operands(node)[0]
            narrows = dtype.itemsize < info(value).meta.dtype.itemsize
            found = self._narrow(value, dtype) if narrows else self.made.setdefault((value, dtype), node)
            if found is not node:
                node.replace_all_uses_with(found)
        for node in reversed(self.block.ops):
            if cast_dtype(node) is not None and not node.users:
                self.block.graph.erase_node(node)

    def _narrow(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """``value`` in ``dtype``, made as early as it can be."""
        if (value, dtype) in self.made:
            return self.made[value, dtype]
        if not (_moves_only(value) and _is_taken_in(value, dtype)):
            self.made[value, dtype] = self._cast(value, dtype)
            return self.made[value, dtype]
        source = operands(value)[0]
        narrow = self._narrow(source, dtype)
        if (value, dtype) not in self.made:
            arguments: Any = fx.map_arg((value.args, value.kwargs), lambda n: narrow if n is source else n)
            value.args, value.kwargs = arguments
            self._retype(value, dtype)
        return value

    def _retype(self, view: fx.Node, dtype: torch.dtype) -> None:
        """A view, and the views of it, of what is narrow now."""
        info(view).outputs = (replace(info(view).meta, dtype=dtype),)
        self.made[view, dtype] = view
        for user in view.users:
            if cast_dtype(user) is None:
                self._retype(user, dtype)

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A cast right behind ``value``; of a placeholder, before what is the first to read it."""
        graph, place = self.block.graph, value.next
        if value.op == "placeholder":
            place = next(node for node in self.block.ops if node in value.users)
        like = place if value.op == "placeholder" else value
        with graph.inserting_before(place):
            made = graph.call_function(aten.to.dtype, (value, dtype))
        return derive(made, like, outputs=(replace(info(value).meta, dtype=dtype),), random=False)


def _is_taken_in(value: fx.Node, dtype: torch.dtype) -> bool:
    """Whether all who read ``value``, behind views, cast it to ``dtype``."""
    return all(cast_dtype(u) == dtype or (_moves_only(u) and _is_taken_in(u, dtype)) for u in value.users)


def _moves_only(node: fx.Node) -> bool:
    """Whether it has all elements of its first operand, in another shape or order, or more than once."""
    if node.op != "call_function":
        return False
    given = operands(node)
    is_plain_view = is_view(node) and not is_getitem(node) and len(given) == 1 and len(info(node).outputs) == 1
    if not (is_plain_view or rearranges(node)):
        return False
    before, after = info(given[0]).meta, info(node).meta
    return before.dtype == after.dtype and before.numel <= after.numel
