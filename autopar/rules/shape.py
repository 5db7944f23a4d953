"""Ops that only rearrange elements: a pending sum passes through all of them, and every size is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from autopar.graph import Choice, info, is_elementwise, is_getitem, is_view, op_name, operands
from autopar.rules.base import Local, Op, Rule, ViewBytes, joined, nothing_moved, put_in_place, summed
from autopar.rules.forms import result_of
from autopar.rules.lines import dim, dims, line, names, permuted, whole
from autopar.rules.moves import Moves, reshaped
from autopar.rules.spec import Line, Localizer, Spec, shape_arg, through, together, unchanged
from autopar.spmd import Type, local_shape


def _moved(text: Line, local: Localizer = unchanged, of_view: ViewBytes = nothing_moved) -> Spec:
    return Spec(text, linear=together, local=local, of_view=of_view)


# --- reshapes -------------------------------------------------------------------------------------


def _forward(op: Op, position: int, shard: Type) -> Type | None:
    return reshaped(op.operands[0].shape, op.result.shape, shard) if position == 0 else shard


def _backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
    """A second operand (``view_as``) gives its local shape, so it is split like the result."""
    source = reshaped(op.result.shape, op.operands[0].shape, shard)
    return None if source is None else (source, shard)[: len(op.operands)]


def _reshape(local: Localizer = unchanged) -> Moves:
    return Moves(_forward, _backward, local)


def _as_reshape(op: Op, choice: Choice, size: int, axis: str) -> Local:
    """A local part may have other strides than the whole, so a view becomes a reshape."""
    if not choice.result.is_shard:
        return Local.same()
    shape = list(local_shape(op.result.shape, choice.result, size))
    return Local({1: shape}, {}, target="aten.reshape.default", keep=1)


def _squeezed(op: Op, choice: Choice, size: int, axis: str) -> Local:
    """A dim that is 1 only on one rank must stay."""
    before = op.operands[0].shape
    here = local_shape(before, choice.operands[0], size)
    same = [extent == 1 for extent in before] == [extent == 1 for extent in here]
    return Local.same() if same else _as_reshape(op, choice, size, axis)


def _unflattened(op: Op, choice: Choice, size: int, axis: str) -> Local:
    if not choice.result.is_shard:
        return Local.same()
    count = len(op.result.shape) - len(op.operands[0].shape) + 1
    first = dim(op.arg(1, "dim"), len(op.operands[0].shape))
    return Local({2: list(local_shape(op.result.shape, choice.result, size)[first : first + count])}, {})


# --- the order of dims ----------------------------------------------------------------------------


def _transpose(op: Op, rank: int) -> list[int]:
    order = list(range(rank))
    if rank:
        a, b = dim(op.arg(1, "dim0"), rank), dim(op.arg(2, "dim1"), rank)
        order[a], order[b] = b, a
    return order


def _permute(op: Op, rank: int) -> list[int]:
    return [dim(d, rank) for d in op.arg(1, "dims")]


def _reversed(op: Op, rank: int) -> list[int]:
    return list(reversed(range(rank)))


def _last_swapped(op: Op, rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _movedim(op: Op, rank: int) -> list[int]:
    def as_list(value: int | Sequence[int]) -> list[int]:
        return [dim(d, rank) for d in ([value] if isinstance(value, int) else value)]

    sources, targets = as_list(op.arg(1, "source")), as_list(op.arg(2, "destination"))
    placed = dict(zip(targets, sources, strict=True))
    rest = iter(d for d in range(rank) if d not in sources)
    return [placed[d] if d in placed else next(rest) for d in range(rank)]


# --- one dim gone or kept whole -------------------------------------------------------------------


def _without_dim(op: Op) -> str:
    letters = names(len(op.operands[0].shape))
    gone = dim(op.arg(1, "dim", 0), len(letters))
    return line([whole(letters, [gone])], letters[:gone] + letters[gone + 1 :])


def _kept_whole(marked: Callable[[Op, int], Iterable[int]]) -> Callable[[Op], str]:
    """Same dims before and after; the marked ones are whole, and may change their size."""

    def compute(op: Op) -> str:
        rank = len(op.operands[0].shape)
        changed = set(marked(op, rank))
        before = whole(names(rank), sorted(changed))
        after = [f"{token[:-1]}'!" if d in changed else token for d, token in enumerate(before)]
        return line([before], after)

    return compute


def _unfolded(op: Op) -> str:
    """Windows along one dim, which may overlap: it is whole, and so is the last, inside a window."""
    letters = names(len(op.operands[0].shape))
    d = dim(op.arg(1, "dimension"), len(letters))
    return line([whole(letters, [d])], [*(f"{x}'!" if i == d else x for i, x in enumerate(letters)), "w!"])


def _flipped(op: Op, rank: int) -> list[int]:
    return dims(op.arg(1, "dims"), rank)


def _rolled(op: Op, rank: int) -> list[int]:
    return dims(op.arg(2, "dims"), rank)


def _diagonal(op: Op) -> str:
    """Both dims are whole; the diagonal is last."""
    letters = names(len(op.operands[0].shape))
    marked = [dim(op.arg(2, "dim1", 0), len(letters)), dim(op.arg(3, "dim2", 1), len(letters))]
    rest = [x for i, x in enumerate(letters) if i not in marked]
    return line([whole(letters, marked)], [*rest, "diagonal!"])


def _last_two(op: Op, rank: int) -> list[int]:
    return [rank - 2, rank - 1]


def _padded(op: Op, rank: int) -> list[int]:
    amounts = op.arg(1, "pad")
    return [rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount]


def _pad_is_linear(op: Op) -> Iterable[tuple[int, ...]]:
    constant = op.arg(2, "mode", "constant") == "constant"
    return ((0,),) if not constant or not op.arg(3, "value", None) else ()


def _zero_pad_is_linear(op: Op) -> Iterable[tuple[int, ...]]:
    return ((0,),) if not op.arg(2, "value", 0) else ()


_CONTIGUOUS = "aten.contiguous.default"
_RESHAPES = ("aten.reshape.default", "aten.reshape_as.default", "aten.flatten.using_ints", _CONTIGUOUS)
_EINSUM = "aten.einsum.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"
_DEPTH = 12
""":func:`copies` looks at so many ops before a reshape: heads are split a few ops before they are joined."""


def copies(node: fx.Node, device: str) -> bool:
    """Whether a reshape moves elements on a ``device`` of this kind ("cpu" or "cuda"), as where it merges dims that a
    transpose has brought together.

    It is made of a tensor that lies as :func:`laid_out` says."""
    if op_name(node) not in _RESHAPES:
        return False
    given = laid_out(operands(node)[0], device)
    made = given.contiguous() if op_name(node) == _CONTIGUOUS else given.reshape(info(node).meta.shape)
    return made is not given and made._base is None


def laid_out(node: fx.Node, device: str) -> torch.Tensor:
    """The result of an op without values, as it lies on a ``device`` of this kind ("cpu" or "cuda").

    The ops before it say how: in the order of dims, but for views, for elementwise ops and attention, whose results lie
    as their first operands do, and for what an einsum permutes. What another block made is taken to lie in order.
    """
    return _laid_out(node, device, _DEPTH)


def _laid_out(node: fx.Node, device: str, depth: int) -> torch.Tensor:
    """What is more than ``depth`` ops before doesn't count."""
    shape, dtype = info(node).meta.shape, info(node).meta.dtype
    if depth and op_name(node) == _ATTENTION:
        query = _laid_out(operands(node)[0], device, depth - 1)
        return result_of(Op.of(node), device, query)
    made_by = operands(node)[0] if is_getitem(node) else node  # of several views, one
    if not depth or not _follows(made_by):
        return torch.empty(shape, dtype=dtype, device="meta")
    given = [_laid_out(each, device, depth - 1) for each in operands(made_by)]
    if is_elementwise(node) and all(each.is_contiguous() for each in given) and not _is_ordered(node):
        return torch.empty(shape, dtype=dtype, device="meta")  # as the op would make it, in less time
    left = iter(given)
    args, kwargs = fx.map_arg((made_by.args, dict(made_by.kwargs)), lambda _: next(left))
    made = made_by.target(*args, **kwargs)  # type: ignore[operator]
    result: torch.Tensor = made[node.args[1]] if made_by is not node else made
    return result


def _is_ordered(node: fx.Node) -> bool:
    """Whether an argument says how the result is to lie."""
    return any(isinstance(argument, torch.memory_format) for argument in (*node.args, *node.kwargs.values()))


def _follows(node: fx.Node) -> bool:
    """Whether how its results lie follows from its operands."""
    if is_getitem(node):
        return False
    if op_name(node) == _EINSUM or (is_view(node) and len(operands(node)) == 1):
        return True
    return is_elementwise(node) and len(info(node).outputs) == 1


RULES: dict[str, Rule] = {
    "aten.view.default": _reshape(_as_reshape),
    "aten._unsafe_view.default": _reshape(_as_reshape),
    "aten.reshape.default": _reshape(shape_arg(1, "shape")),
    "aten.view_as.default": _reshape(),
    "aten.reshape_as.default": _reshape(),
    "aten.flatten.using_ints": _reshape(),
    "aten.unflatten.int": _reshape(_unflattened),
    "aten.unsqueeze.default": _reshape(),
    "aten.squeeze.default": _reshape(_squeezed),
    "aten.squeeze.dim": _reshape(_squeezed),
    "aten.squeeze.dims": _reshape(_squeezed),
    "aten.transpose.int": _moved(permuted(_transpose)),
    "aten.swapaxes.default": _moved(permuted(_transpose)),
    "aten.permute.default": _moved(permuted(_permute)),
    "aten.movedim.int": _moved(permuted(_movedim)),
    "aten.movedim.intlist": _moved(permuted(_movedim)),
    "aten.t.default": _moved(permuted(_reversed)),
    "aten.numpy_T.default": _moved(permuted(_reversed)),
    "aten.mT.default": _moved(permuted(_last_swapped)),
    "aten.expand.default": _moved("... -> ...", shape_arg(1, "size"), summed),
    "aten.expand_as.default": Spec("..., ... -> ...", linear=through(0), of_view=summed),
    "aten.select.int": _moved(_without_dim, of_view=put_in_place),
    "aten.unbind.int": _moved(_without_dim, of_view=joined),
    "aten.diagonal.default": _moved(_diagonal, of_view=put_in_place),
    "aten.flip.default": _moved(_kept_whole(_flipped)),
    "aten.roll.default": _moved(_kept_whole(_rolled)),
    "aten.tril.default": _moved(_kept_whole(_last_two)),
    "aten.triu.default": _moved(_kept_whole(_last_two)),
    "aten.pad.default": Spec(_kept_whole(_padded), linear=_pad_is_linear),
    "aten.constant_pad_nd.default": Spec(_kept_whole(_padded), linear=_zero_pad_is_linear),
    "aten.unfold.default": _moved(_unfolded),
}
