"""The equal bodies of a loop over experts, written once for the rows of all experts.

What a body takes at chosen places becomes rows sorted by expert (``dispatch``), its ops are ops on these rows, and
what experts have of their own becomes one tensor with a first dim for the expert::

    linear(silu(linear(x[token], up_e)), down_e) * weights[token, slot, None]
    ->  rows = grouped_linear(dispatch(x, routing), up, routing)                    up [experts, out, in]
        rows = grouped_linear(silu(rows), down, routing)
        combine(rows, weights, routing)

Factors of a whole row aren't rows but values of slots, ``[tokens, choices]``: ``combine`` multiplies by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from autopar import expert_capture
from autopar.capture import differentiable, gradient_flows
from autopar.graph import Meta, arguments, derive, info, is_aten, is_getitem, op_name, operands, where
from autopar.passes.expert_bodies import Body, Indexed, NotALoopError, Pairs, Picks, indexed
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.spmd import I, R, S

aten = torch.ops.aten

RESHAPES: Final = {
    *("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints"),
    *("aten.squeeze.default", "aten.squeeze.dim", "aten.unsqueeze.default"),
}
_PRODUCTS: Final = {"aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.addmm.default"}
_NORMS: Final = {"aten.layer_norm.default": (2, 3), "aten.rms_norm.default": (2,)}
"""Where the weight, and the bias, of a norm of the last dims are."""


class Writer:
    """Puts ops into a flat graph before ``place``; ``order`` are those put in. Modules of experts lose their number."""

    def __init__(self, graph: fx.Graph, place: fx.Node) -> None:
        self.graph, self.place = graph, place
        self.home = info(place).module
        self.order: list[fx.Node] = []

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        shape: Sequence[int],
        like: fx.Node,
        *,
        dtype: torch.dtype | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """An op whose result is as that of ``like``, but of ``shape``."""
        return self.copy(target, args, (Meta(tuple(shape), dtype or info(like).meta.dtype),), like, kwargs)

    def copy(
        self,
        target: Any,
        args: tuple[Any, ...],
        metas: tuple[Meta, ...],
        like: fx.Node,
        kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """One whose results are of ``metas``; whether they have gradients, what it is given says."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, dict(kwargs or {}))
        flows = gradient_flows(node)
        outputs = tuple(replace(meta, needs_grad=flows and differentiable(meta.dtype)) for meta in metas)
        self.order.append(derive(node, like, outputs=outputs, module=self.module_of(like)))
        return node

    def module_of(self, node: fx.Node) -> str:
        """``moe.experts.*.up`` for ``moe.experts.3.up``; the loop's own module for what lies outside of that.

        A model whose own code is a loop over experts stays in one piece: between its children it would be cut.
        """
        module = info(node).module
        prefix = f"{self.home}."
        if not self.home or not module.startswith(prefix):
            return self.home
        parts = module.removeprefix(prefix).split(".")
        numbered = ["*" if part.isdigit() else part for part in parts]
        return prefix + ".".join(numbered)

    def reshape(self, node: fx.Node, shape: Sequence[int]) -> fx.Node:
        if info(node).meta.shape == tuple(shape):
            return node
        return self.call(aten.reshape.default, (node, list(shape)), shape, node)


@dataclass
class Value:
    """What a value of the bodies is afterwards. ``rest`` is its shape but for rows and ``leading`` dims of size 1.

    ``rows [rows, *rest]``; or, while it isn't needed by row, ``tokens [n, *rest]`` or ``slots [n, k, *rest]``.
    ``factor``: of each slot, still to be multiplied with.
    """

    rest: tuple[int, ...]
    leading: int = 0
    rows: fx.Node | None = None
    tokens: fx.Node | None = None
    slots: fx.Node | None = None
    factor: fx.Node | None = None

    @property
    def is_light(self) -> bool:
        """One number for each row, that isn't needed by row so far."""
        return self.rows is None and math.prod(self.rest) == 1 and len(self.rest) <= 1


@dataclass
class Rows:
    """Translates the first of equal ``bodies`` for all; ``pairs`` say what it is in each of the others.

    ``stack`` gives experts' own tensors one first dim (None: it can't); ``by_slot`` the values ``[n, k]`` of what each
    expert has of its own for each token. ``index [n, k]`` is the number of the expert among ``bodies``.
    """

    writer: Writer
    bodies: Sequence[Body]
    pairs: Sequence[Pairs]
    index: fx.Node
    routing: fx.Node
    stack: Callable[[Sequence[fx.Node]], fx.Node | None]
    by_slot: Callable[[Sequence[fx.Node]], fx.Node]
    values: dict[fx.Node, Value] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return info(self.index).meta.shape[0]

    @property
    def choices(self) -> int:
        return info(self.index).meta.shape[1]

    @property
    def picks(self) -> Picks:
        return self.bodies[0].picks

    def combined(self) -> fx.Node:
        """``[n, h]``: for each token the sum of what its experts compute. Raises NotALoopError."""
        for node in self.bodies[0].inside:
            self.values[node] = self._value(node)
        value, like = self.values[self.bodies[0].value], self.bodies[0].value
        if len(value.rest) != 1 or value.is_light:
            raise NotALoopError(f"{where(like)} isn't a row for each token")
        rows = self._plain_rows(value, like)
        factor = value.factor if value.factor is not None else self._ones(rows)
        weights = self.writer.reshape(factor, info(self.index).meta.shape)
        dtype = torch.promote_types(info(rows).meta.dtype, info(weights).meta.dtype)
        shape = (self.tokens, *value.rest)
        args = (rows, weights, self.routing)
        return self.writer.call(expert_capture.combine, args, shape, like, dtype=dtype)

    def _ones(self, rows: fx.Node) -> fx.Node:
        meta = info(rows).meta
        shape, kwargs = info(self.index).meta.shape, {"dtype": meta.dtype}
        call = self.writer.call
        return call(aten.ones_like.default, (self.index,), shape, rows, dtype=meta.dtype, kwargs=kwargs)

    # --- one op of the bodies ---------------------------------------------------------------------

    def _value(self, node: fx.Node) -> Value:
        taken, name = indexed(node), op_name(node)
        if taken is not None:
            return self._taken(node, taken)
        if name in RESHAPES:
            return self._reshaped(node)
        if name in _PRODUCTS:
            return self._product(node)
        if name in _NORMS and any(self._own(operand) for operand in operands(node)):
            return self._norm(node)
        if (is_aten(node) and torch.Tag.pointwise in node.target.tags) or name.startswith("aten.to."):  # type: ignore[union-attr]
            return self._pointwise(node)
        return self._by_row(node)

    def _own(self, node: fx.Node) -> bool:
        """Whether ``node`` is what one expert alone takes from outside."""
        return node not in self.bodies[0].inside and any(pairs.get(node) is not node for pairs in self.pairs)

    def _of_all(self, node: fx.Node) -> list[fx.Node]:
        return [node, *(pairs[node] for pairs in self.pairs)]

    def _stacked(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        found = self.stack(self._of_all(node))
        if found is None:
            data = info(node)
            raise NotALoopError(
                f"{where(reader)} takes {data.name or node.name} of each expert, which are no parameters"
            )
        return found

    def _shape(self, rest: Iterable[int]) -> tuple[int, ...]:
        return (self.tokens * self.choices, *rest)

    def _taken(self, node: fx.Node, taken: Indexed) -> Value:
        picks, shape = self.picks, info(taken.source).meta.shape
        rest = shape[taken.first + len(taken.dims) :]
        value = Value(rest, taken.first)
        if any(extent != 1 for extent in shape[: taken.first]):
            raise NotALoopError(f"{where(node)} takes tokens along a dim that isn't the first")
        own = self._own(taken.source)
        if taken.dims == picks.token_dims:
            if own and value.is_light:
                made = self.by_slot(self._of_all(taken.source))
                value.slots = self.writer.reshape(made, (self.tokens, self.choices, *rest))
            elif not own:
                value.tokens = self.writer.reshape(taken.source, (self.tokens, *rest))
        elif not own and sorted(taken.dims) == sorted((*picks.token_dims, picks.slot_dim or 0)) and picks.by_slot:
            value.slots = self._by_choice(taken, rest)
        if value.slots is None and value.tokens is None:
            raise NotALoopError(f"{where(node)} takes something else for each token than its expert's rows")
        return value

    def _by_choice(self, taken: Indexed, rest: tuple[int, ...]) -> fx.Node:
        """A tensor that is indexed by tokens and slots, in whichever order, as ``[n, k, *rest]``."""
        source, (slot, dims) = taken.source, (self.picks.slot_dim, taken.dims)
        shape = info(source).meta.shape[taken.first :]
        source = self.writer.reshape(source, shape)
        if dims[-1] != slot:
            assert slot is not None
            at = dims.index(slot)
            order = [d for d in range(len(dims)) if d != at] + [at] + list(range(len(dims), len(shape)))
            moved = tuple(shape[d] for d in order)
            source = self.writer.call(aten.permute.default, (source, order), moved, source)
        return self.writer.reshape(source, (self.tokens, self.choices, *rest))

    def _reshaped(self, node: fx.Node) -> Value:
        """Only dims of size 1 come and go."""
        value, shape = self.values[operands(node)[0]], info(node).meta.shape
        leading = next((i for i, extent in enumerate(shape) if extent != 1), len(shape) - 1)
        leading = min(leading, len(shape) - 1)
        rest = shape[leading + 1 :]
        extent = info(operands(node)[0]).meta.shape[value.leading]
        if shape[leading] != extent or [e for e in rest if e != 1] != [e for e in value.rest if e != 1]:
            raise NotALoopError(
                f"{where(node)} gives the rows of an expert another shape, {list(value.rest)} to {list(rest)}"
            )
        made = replace(value, rest=rest, leading=leading)
        if rest == value.rest:
            return made
        if value.rows is not None:
            raise NotALoopError(
                f"{where(node)} gives the rows of an expert another shape, {list(value.rest)} to {list(rest)}"
            )
        if value.tokens is not None:
            made.tokens = self.writer.reshape(value.tokens, (self.tokens, *rest))
        if value.slots is not None:
            made.slots = self.writer.reshape(value.slots, (self.tokens, self.choices, *rest))
        return made

    def _product(self, node: fx.Node) -> Value:
        """A matrix product of rows with an expert's own weight is a grouped one; with a shared one, it stays."""
        x, weight, bias, transposed = _factors(node)
        if x not in self.values or weight in self.values or (bias is not None and bias in self.values):
            raise NotALoopError(f"{where(node)} multiplies rows of an expert with each other")
        value = self.values[x]
        if len(value.rest) != 1:
            raise NotALoopError(f"{where(node)} multiplies more than one row for each token")
        rows, rest = self._rows(value, node), (info(node).meta.shape[-1],)
        if not self._own(weight):
            made = self._plain_product(node, rows, weight, rest, transposed)
        else:
            weights, transposed = self._weights(weight, node, transposed)
            args = (rows, weights, self.routing, *((True,) if transposed else ()))
            made = self.writer.call(expert_capture.grouped_linear, args, self._shape(rest), node)
        if bias is not None:
            made = self._plus(made, bias, node)
        return Value(rest, value.leading, rows=made)

    def _plain_product(
        self, node: fx.Node, rows: fx.Node, weight: fx.Node, rest: tuple[int, ...], transposed: bool
    ) -> fx.Node:
        target = aten.matmul.default if transposed else aten.linear.default
        return self.writer.call(target, (rows, weight), self._shape(rest), node)

    def _weights(self, weight: fx.Node, node: fx.Node, transposed: bool) -> tuple[fx.Node, bool]:
        """The stacked weight, and whether it is ``[experts, in, out]``. A transposition is in the product instead."""
        while op_name(weight) in ("aten.t.default", "aten.numpy_T.default", "aten.mT.default") or _swaps_two(weight):
            weight, transposed = weight.args[0], not transposed  # type: ignore[assignment]
            self._follow(weight)
        return self._stacked(weight, node), transposed

    def _follow(self, weight: fx.Node) -> None:
        """Know what the operand of an expert's own view is in the other bodies."""
        for pairs in self.pairs:
            reader = next(user for user in weight.users if user in pairs)
            pairs[weight] = pairs[reader].args[0]  # type: ignore[assignment]

    def _plus(self, rows: fx.Node, bias: fx.Node, node: fx.Node) -> fx.Node:
        shape = info(rows).meta.shape
        if not self._own(bias):
            return self.writer.call(aten.add.Tensor, (rows, bias), shape, node)
        stacked = self._stacked(bias, node)
        if info(stacked).meta.shape[1:] != shape[1:]:
            stacked = self._widened(stacked, shape[1], node)
        return self.writer.call(expert_capture.grouped_bias, (rows, stacked, self.routing), shape, node)

    def _widened(self, stacked: fx.Node, width: int, node: fx.Node) -> fx.Node:
        """One number of each expert, ``[experts]`` or ``[experts, 1]``, as ``[experts, width]``."""
        count = info(stacked).meta.shape[0]
        if info(stacked).meta.numel != count:
            raise NotALoopError(f"{where(node)} takes a tensor of each expert that doesn't fit its rows")
        column = self.writer.reshape(stacked, (count, 1))
        shape = (count, width)
        return self.writer.call(aten.expand.default, (column, list(shape)), shape, stacked)

    def _norm(self, node: fx.Node) -> Value:
        """A norm, then its experts' own weights and biases."""
        given: list[Any] = list(node.args)
        value = self.values[operands(node)[0]]
        rows = self._rows(value, node)
        taken = [given[at] if at < len(given) else None for at in _NORMS[op_name(node)]]
        for at in _NORMS[op_name(node)]:
            if at < len(given):
                given[at] = None
        shape = info(rows).meta.shape
        made = self.writer.call(node.target, (rows, *given[1:]), shape, node, kwargs=node.kwargs)
        if taken[0] is not None:
            made = self._times(made, taken[0], node)
        if len(taken) > 1 and taken[1] is not None:
            made = self._plus(made, taken[1], node)
        return Value(value.rest, value.leading, rows=made)

    def _times(self, rows: fx.Node, own: fx.Node, node: fx.Node) -> fx.Node:
        """Multiply each row by the vector of its expert, which is a bias added to zeros."""
        shape = info(rows).meta.shape
        if not self._own(own):
            return self.writer.call(aten.mul.Tensor, (rows, own), shape, node)
        zeros = self.writer.call(aten.zeros_like.default, (rows,), shape, node)
        spread = self._plus(zeros, own, node)
        return self.writer.call(aten.mul.Tensor, (rows, spread), shape, node)

    def _pointwise(self, node: fx.Node) -> Value:
        used = [self.values[o] for o in operands(node) if o in self.values]
        others = [o for o in operands(node) if o not in self.values]
        own = [o for o in others if self._own(o)]
        leading = max(value.leading for value in used)
        rest = info(node).meta.shape[leading + 1 :]
        made = Value(rest, leading)
        if all(value.is_light for value in used) and not own:
            made.slots = self._on_slots(node, rest)
            return made
        light = [value for value in used if value.is_light]
        if op_name(node) == "aten.mul.Tensor" and len(used) == 2 and len(light) == 1:
            (heavy,) = (value for value in used if not value.is_light)
            return replace(self._scaled(heavy, light[0], node), rest=rest, leading=leading)
        if op_name(node).startswith("aten.to.") and used[0].factor is not None:
            return replace(used[0], factor=self._widened_factor(used[0].factor, info(node).meta.dtype))
        if own:
            made.rows = self._with_own(node, rest)
            return made
        self._check_broadcast(node, others, rest)
        made.rows = self._on_rows(node, rest)
        return made

    def _on_slots(self, node: fx.Node, rest: tuple[int, ...]) -> fx.Node:
        """An op of numbers for each row, on the numbers of all slots."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._slots(n) if n in self.values else n)
        shape = (self.tokens, self.choices, *rest)
        return self.writer.copy(node.target, args, (replace(info(node).meta, shape=shape),), node, kwargs)

    def _slots(self, node: fx.Node) -> fx.Node:
        value = self.values[node]
        if value.slots is None:
            assert value.tokens is not None
            one, shape = (self.tokens, 1, *value.rest), (self.tokens, self.choices, *value.rest)
            made = self.writer.reshape(value.tokens, one)
            if one != shape:
                made = self.writer.call(aten.expand.default, (made, list(shape)), shape, made)
            value.slots = made
        return value.slots

    def _scaled(self, heavy: Value, light: Value, node: fx.Node) -> Value:
        """Rows times a number each: a factor for :func:`combine` to multiply with."""
        name = next(o for o in operands(node) if self.values.get(o) is light)
        factor = self.writer.reshape(self._slots(name), info(self.index).meta.shape)
        if heavy.factor is not None:
            shape = info(factor).meta.shape
            factor = self.writer.call(aten.mul.Tensor, (heavy.factor, factor), shape, factor)
        return Value(heavy.rest, heavy.leading, rows=self._plain_rows(heavy, node), factor=factor)

    def _widened_factor(self, factor: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The factor of rows that are cast: their sum has its dtype where that is the wider one."""
        shape, before = info(factor).meta.shape, info(factor).meta.dtype
        if torch.promote_types(before, dtype) == before:
            return factor
        return self.writer.call(aten.to.dtype, (factor, dtype), shape, factor, dtype=dtype)

    def _with_own(self, node: fx.Node, rest: tuple[int, ...]) -> fx.Node:
        """A sum or product of rows with an expert's own vector."""
        name, found = op_name(node), operands(node)
        if name not in ("aten.add.Tensor", "aten.mul.Tensor") or len(found) != 2 or len(rest) != 1 or node.kwargs:
            raise NotALoopError(
                f"{where(node)} is neither a sum nor a product of rows with what an expert has of its own"
            )
        rows, own = found if found[0] in self.values else found[::-1]
        made = self._rows(self.values[rows], node)
        return (self._plus if name == "aten.add.Tensor" else self._times)(made, own, node)

    def _check_broadcast(self, node: fx.Node, others: Sequence[fx.Node], rest: tuple[int, ...]) -> None:
        for other in others:
            if len(info(other).meta.shape) > len(rest):
                raise NotALoopError(
                    f"{where(node)} reads a tensor of shape {list(info(other).meta.shape)} for each row"
                )

    def _by_row(self, node: fx.Node) -> Value:
        """Any other op whose rule says that rows don't see each other."""
        used = [o for o in operands(node) if o in self.values]
        if any(self._own(o) for o in operands(node)):
            raise NotALoopError(f"{where(node)} reads what an expert has of its own in a way that isn't grouped")
        if any(self.values[o].leading for o in used) or not _is_row_wise(node, used):
            raise NotALoopError(f"{where(node)} mixes the tokens of an expert")
        return Value(info(node).meta.shape[1:], rows=self._on_rows(node, None))

    def _on_rows(self, node: fx.Node, rest: tuple[int, ...] | None) -> fx.Node:
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda n: self._rows(self.values[n], node) if n in self.values else n
        )
        metas = info(node).outputs
        shapes = [meta.shape[1:] if rest is None else rest for meta in metas]
        made = tuple(replace(m, shape=self._shape(shape)) for m, shape in zip(metas, shapes, strict=True))
        return self.writer.copy(node.target, args, made, node, kwargs)

    # --- values by row ----------------------------------------------------------------------------

    def _rows(self, value: Value, node: fx.Node) -> fx.Node:
        """``value`` by row, its factor in it."""
        rows = self._plain_rows(value, node)
        if value.factor is None:
            return rows
        factor = self._plain_rows(
            Value((1,), slots=self.writer.reshape(value.factor, (self.tokens, self.choices, 1))), node
        )
        return self.writer.call(aten.mul.Tensor, (rows, factor), info(rows).meta.shape, rows)

    def _plain_rows(self, value: Value, node: fx.Node) -> fx.Node:
        if value.rows is None:
            if value.tokens is None and self.choices == 1 and value.slots is not None:
                value.tokens = self.writer.reshape(value.slots, (self.tokens, *value.rest))
            if value.tokens is None and value.is_light and value.slots is not None:
                value.rows = self._rows_of_slots(value.slots, value.rest)
                return value.rows
            if value.tokens is None or len(value.rest) > 1:
                raise NotALoopError(f"{where(node)} needs for each row what a token has for each of its choices")
            wide = self.writer.reshape(value.tokens, (self.tokens, math.prod(value.rest)))
            shape = self._shape(info(wide).meta.shape[1:])
            value.rows = self.writer.call(expert_capture.dispatch, (wide, self.routing), shape, wide)
            if not value.rest:
                value.rows = self.writer.call(aten.squeeze.dim, (value.rows, 1), shape[:1], wide)
        return value.rows

    def _rows_of_slots(self, slots: fx.Node, rest: tuple[int, ...]) -> fx.Node:
        """A number of each slot, by row: rows bring those of all their token's choices, with the experts that these
        are, and take that of their own expert."""
        call, shape = self.writer.call, info(self.index).meta.shape
        wide, kind = self._shape((self.choices,)), info(slots).meta.dtype
        numbers = call(expert_capture.dispatch, (self.writer.reshape(slots, shape), self.routing), wide, slots)
        plain: dict[str, Any] = {"dtype": torch.float32}
        chosen = call(aten.to.dtype, (self.index, torch.float32), shape, slots, **plain)
        chosen = call(expert_capture.dispatch, (chosen, self.routing), wide, slots, **plain)
        count = len(self.bodies)
        experts = call(aten.arange.default, (count,), (count,), slots, dtype=torch.int64)
        experts = call(aten.to.dtype, (experts, torch.float32), (count,), slots, **plain)
        zeros = call(aten.zeros_like.default, (chosen,), wide, slots, **plain)
        biased = zeros, self._widened(experts, self.choices, slots), self.routing
        own = call(expert_capture.grouped_bias, biased, wide, slots, **plain)
        is_own = call(aten.eq.Tensor, (chosen, own), wide, slots, dtype=torch.bool)
        is_own = call(aten.to.dtype, (is_own, kind), wide, slots)
        taken = call(aten.mul.Tensor, (numbers, is_own), wide, slots)
        return call(aten.sum.dim_IntList, (taken, [1], bool(rest)), self._shape(rest), slots)


def _factors(node: fx.Node) -> tuple[Any, Any, Any, bool]:
    """Rows, weight, bias or None, and whether the weight is ``[in, out]``."""
    name = op_name(node)
    if name == "aten.linear.default":
        return node.args[0], node.args[1], (*node.args, None)[2], False
    if name == "aten.addmm.default":
        if node.kwargs:
            raise NotALoopError(f"{where(node)} scales its operands")
        return node.args[1], node.args[2], node.args[0], True
    return node.args[0], node.args[1], None, True


def _swaps_two(node: fx.Node) -> bool:
    """Whether it transposes a matrix."""
    if op_name(node) not in ("aten.transpose.int", "aten.permute.default") or len(info(node).meta.shape) != 2:
        return False
    given = arguments(node)
    order = given["dims"] if "dims" in given else [given["dim0"], given["dim1"]]
    return [d % 2 for d in order] in ([0, 1], [1, 0]) and ("dims" not in given or [d % 2 for d in order] == [1, 0])


def _is_row_wise(node: fx.Node, used: Sequence[fx.Node]) -> bool:
    """Whether rows may be split: each row of the result depends on the same row of ``used`` alone."""
    op, found = Op.of(node), operands(node)
    size = info(used[0]).meta.shape[0]
    inputs = [[{1} for _ in meta.shape] for meta in op.operands]
    wanted = [{S(0)} if operand in used else {R, I} for operand in found]
    for choice in lookup(op.name).choices(op, size, inputs, [{1} for _ in op.result.shape]):
        split = all(kind in allowed for kind, allowed in zip(choice.operands, wanted, strict=True))
        if split and choice.result == S(0) and not choice.form:
            return True
    return is_getitem(node)
