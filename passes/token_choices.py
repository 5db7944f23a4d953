"""Which tokens a condition on a router's choice holds for, and which tensors are indexed by these tokens.

A router chooses experts as numbers, ``index [n, k]``. Code then asks, for expert e, where that is so::

    index == e                                   one_hot(index, 4).permute(2, 1, 0)[e]
    (index == e).any(-1)                         torch.where(index == e), (index == e).nonzero()

A :class:`Chosen` says that a tensor is true (or not zero) where ``index`` is ``expert``; with ``expert`` None it has a
dim for the number of the expert. Any other condition chooses for itself. A :class:`Position` is one of the index
tensors that ``where`` or ``nonzero`` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import fx

from autopar.graph import arguments, info, is_getitem, op_name

EXPERT: Final = -1
"""In ``Chosen.dims``: the dim for the number of the expert."""

ONE: Final = -2
"""In ``Chosen.dims``: a dim of size 1 beside those of the index."""

_SAME: Final = {
    *("aten.alias.default", "aten.clone.default", "aten.contiguous.default", "aten.detach.default"),
    *("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as.default", "aten._to_copy.default"),
}
"""Ops after which a tensor is zero where it was."""

_IS_TRUE: Final = {
    *(("aten.gt.Scalar", 0), ("aten.ge.Scalar", 1), ("aten.ne.Scalar", 0), ("aten.eq.Scalar", 1)),
}
"""Comparisons of 0 and 1 after which it is true where it was 1."""

_FIRST: Final = {"aten.topk.default", "aten.sort.default", "aten.max.dim"}
"""Ops whose second result are places along a dim, all different."""


@dataclass(frozen=True)
class Chosen:
    """``dims``: for each dim of the tensor, that of ``index`` which it is, or EXPERT.

    Dims of ``index`` that are missing were reduced: true where it is so for any. ``is_mask``: ``index`` is no choice of
    a router but the condition itself.
    """

    index: fx.Node
    dims: tuple[int, ...]
    expert: int | None = None
    is_mask: bool = False

    def without(self, dim: int) -> Chosen:
        return replace(self, dims=(*self.dims[:dim], *self.dims[dim + 1 :]))


@dataclass(frozen=True)
class Position:
    """The coordinates along dim ``dim`` of where ``condition`` holds, one for each such place, in order."""

    condition: fx.Node
    dim: int


def condition(node: fx.Node) -> Chosen:
    """What ``node`` holds for: an expert's choice, or where it is true itself."""
    found = chosen(node)
    if found is not None and found.expert is not None:
        return found
    return Chosen(node, tuple(range(len(info(node).meta.shape))), is_mask=True)


def chosen(node: fx.Node) -> Chosen | None:
    """What ``node`` says about a router's choice."""
    name = op_name(node) if node.op == "call_function" else ""
    if name in _READERS:
        return _READERS[name](node)
    if name in _SAME:
        return _of(node)
    if (name, _second(node)) in _IS_TRUE:
        found = _of(node)
        if found is not None:
            return found
    if name == "aten.eq.Scalar" and _is_choice(operand := _first(node)):
        value = node.args[1]
        if isinstance(value, int) and operand is not None:
            return Chosen(operand, tuple(range(len(info(operand).meta.shape))), value)
    return None


def _is_choice(node: fx.Node | None) -> bool:
    return node is not None and not info(node).meta.dtype.is_floating_point and info(node).meta.dtype.itemsize > 1


def _first(node: fx.Node) -> fx.Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _second(node: fx.Node) -> Any:
    value = node.args[1] if len(node.args) > 1 else None
    return value if isinstance(value, int | float) else None


def _of(node: fx.Node) -> Chosen | None:
    operand = _first(node)
    return chosen(operand) if operand is not None else None


def _one_hot(node: fx.Node) -> Chosen | None:
    index = _first(node)
    if index is None:
        return None
    return Chosen(index, (*range(len(info(index).meta.shape)), EXPERT))


def _scattered(node: fx.Node) -> Chosen | None:
    """Values put into zeros along the last dim, at the places that the router chose."""
    given = arguments(node)
    base, index, rank = given["self"], given["index"], len(info(node).meta.shape)
    if not is_zeros(base) or given["dim"] % rank != rank - 1 or not isinstance(index, fx.Node):
        return None
    if info(index).meta.shape[:-1] != info(node).meta.shape[:-1]:
        return None
    return Chosen(index, (*range(rank - 1), EXPERT))


def _compared(node: fx.Node) -> Chosen | None:
    """``index.unsqueeze(-1) == arange(experts)``."""
    a, b = node.args[:2]
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return None
    for index, numbers in ((a, b), (b, a)):
        while op_name(numbers) in _SAME:
            numbers = numbers.args[0]  # type: ignore[assignment]
        counts = op_name(numbers) == "aten.arange.default" and info(numbers).meta.shape == info(node).meta.shape[-1:]
        if counts and op_name(index) == "aten.unsqueeze.default" and _is_choice(index):
            rank = len(info(index).meta.shape)
            if arguments(index)["dim"] % rank == rank - 1:
                return Chosen(index.args[0], (*range(rank - 1), EXPERT))  # type: ignore[arg-type]
    return None


def _permuted(node: fx.Node) -> Chosen | None:
    found = _of(node)
    if found is None:
        return None
    rank = len(found.dims)
    order = list(range(rank))
    if op_name(node) == "aten.permute.default":
        order = [d % rank for d in arguments(node)["dims"]]
    elif op_name(node) == "aten.transpose.int":
        one, other = (arguments(node)[name] % rank for name in ("dim0", "dim1"))
        order[one], order[other] = other, one
    else:
        order.reverse()
    return replace(found, dims=tuple(found.dims[d] for d in order))


def _selected(node: fx.Node) -> Chosen | None:
    given = arguments(node)
    return _for_expert(_first(node), given["dim"], given["index"])


def _unbound(node: fx.Node) -> Chosen | None:
    made = _first(node)
    if made is None or op_name(made) != "aten.unbind.int":
        return None
    return _for_expert(_first(made), arguments(made)["dim"], node.args[1])


def _for_expert(whole: fx.Node | None, dim: int, number: Any) -> Chosen | None:
    """The part of ``whole`` for one expert, if ``dim`` is that for the number of the expert."""
    found = chosen(whole) if whole is not None else None
    if found is None or whole is None or not isinstance(number, int):
        return None
    dim %= len(found.dims)
    if found.dims[dim] != EXPERT:
        return None
    return replace(found.without(dim), expert=number % info(whole).meta.shape[dim])


def _widened(node: fx.Node) -> Chosen | None:
    found = _of(node)
    if found is None:
        return None
    dim = arguments(node)["dim"] % len(info(node).meta.shape)
    return replace(found, dims=(*found.dims[:dim], ONE, *found.dims[dim:]))


def _narrowed(node: fx.Node) -> Chosen | None:
    found = _of(node)
    if found is None:
        return None
    shape = info(_first(node)).meta.shape  # type: ignore[arg-type]
    given = arguments(node).get("dim", list(range(len(shape))))
    dims = {d % len(shape) for d in (given if isinstance(given, list | tuple) else [given])}
    gone = {d for d in dims if shape[d] == 1}
    if any(found.dims[d] != ONE for d in gone):
        return None
    return replace(found, dims=tuple(kind for d, kind in enumerate(found.dims) if d not in gone))


def _reduced(node: fx.Node) -> Chosen | None:
    """True where any is; the sum of ones isn't zero there either."""
    found, given = _of(node), arguments(node)
    dims = given["dim"] if isinstance(given["dim"], list | tuple) else [given["dim"]]
    if found is None or given["keepdim"] or found.is_mask:
        return None
    for dim in sorted((d % len(found.dims) for d in dims), reverse=True):
        if found.dims[dim] == EXPERT:
            return None
        found = found.without(dim)
    return found


_READERS: Final[dict[str, Callable[[fx.Node], Chosen | None]]] = {
    "aten.one_hot.default": _one_hot,
    "aten.scatter.src": _scattered,
    "aten.eq.Tensor": _compared,
    "aten.permute.default": _permuted,
    "aten.transpose.int": _permuted,
    "aten.t.default": _permuted,
    "aten.numpy_T.default": _permuted,
    "aten.select.int": _selected,
    "getitem": _unbound,
    "aten.unsqueeze.default": _widened,
    "aten.squeeze.default": _narrowed,
    "aten.squeeze.dim": _narrowed,
    "aten.squeeze.dims": _narrowed,
    "aten.any.dim": _reduced,
    "aten.sum.dim_IntList": _reduced,
}


def is_zeros(node: Any) -> bool:
    """Whether a tensor is made of zeros."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    name = op_name(node)
    if name in ("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"):
        return True
    value = {"aten.full.default": 1, "aten.full_like.default": 1, "aten.new_full.default": 2}.get(name)
    return value is not None and len(node.args) > value and bool(node.args[value] == 0)


def is_empty(node: Any) -> bool:
    """Whether a tensor is made without values."""
    names = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")
    return isinstance(node, fx.Node) and node.op == "call_function" and op_name(node) in names


def places(index: fx.Node) -> int | None:
    """If ``index`` holds different places along one dim of a tensor, the last dim of both: how many there are."""
    while op_name(index) in _SAME:
        index = index.args[0]  # type: ignore[assignment]
    if op_name(index) in ("aten.argmax.default", "aten.argsort.default"):
        return _extent(index, arguments(index).get("dim"))
    if op_name(index) == "aten.slice.Tensor" and arguments(index)["step"] == 1:
        return places(index.args[0])  # type: ignore[arg-type]
    if is_getitem(index) and index.args[1] == 1 and op_name(index.args[0]) in _FIRST:  # type: ignore[arg-type]
        made: Any = index.args[0]
        return _extent(made, arguments(made).get("dim", -1))
    return None


def _extent(node: fx.Node, dim: Any) -> int | None:
    operand = _first(node)
    shape = info(operand).meta.shape if operand is not None else ()
    if not isinstance(dim, int) or dim % len(shape) != len(shape) - 1:
        return None
    return shape[-1]


def position(node: Any) -> Position | None:
    """The coordinates that ``node`` holds."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    name = op_name(node)
    if name in _SAME:
        return position(node.args[0])
    if is_getitem(node):
        return _element(node.args[0], node.args[1])
    if name == "aten.select.int":
        made, dim, at = node.args[:3]
        return _column(made, at) if dim in (1, -1) else None
    if name in ("aten.squeeze.dim", "aten.squeeze.default", "aten.view.default", "aten.reshape.default"):
        made = node.args[0]
        return _column(made, 0) if len(info(node).meta.shape) == 1 and _columns(made) == 1 else None
    if name in ("aten.flatten.using_ints",):
        return _column(node.args[0], 0) if _columns(node.args[0]) == 1 else None
    return None


def _element(made: Any, number: Any) -> Position | None:
    name = op_name(made)
    if name in ("aten.where.default", "aten.nonzero_numpy.default"):
        return Position(made.args[0], number)
    if name == "aten.unbind.int" and arguments(made)["dim"] in (1, -1):
        return _column(made.args[0], number)
    return None


def _columns(made: Any) -> int:
    """How many coordinates a matrix of coordinates has."""
    if isinstance(made, fx.Node) and op_name(made) in ("aten.nonzero.default", "aten.argwhere.default"):
        return info(made).meta.shape[1]
    return 0


def _column(made: Any, number: Any) -> Position | None:
    if isinstance(number, int) and 0 <= number < _columns(made):
        return Position(made.args[0], number)
    return None


def is_data_dependent(node: fx.Node) -> bool:
    """Whether the op makes a tensor whose size depends on values, or a number that does."""
    name = op_name(node)
    if name in ("aten.where.default", "aten.nonzero.default", "aten.nonzero_numpy.default", "aten.argwhere.default"):
        return True
    if name in ("aten.index.Tensor", "aten.index_put.default"):
        given = node.args[1]
        masks = [i for i in given if isinstance(i, fx.Node)] if isinstance(given, list | tuple) else []
        return name == "aten.index.Tensor" and any(str(info(i).meta.dtype) == "torch.bool" for i in masks)
    return name in ("aten.masked_select.default", "aten.item.default", "aten._local_scalar_dense.default")
