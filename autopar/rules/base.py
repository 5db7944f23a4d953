"""What a rule is: everything the compiler knows about one op.

A rule answers four questions, and nothing else in autopar knows an op by name:

* ``choices``: on an axis of ``size`` ranks, which types may the operands have, and which type results?
* ``localize``: given a choice, which arguments does one rank call the op with?
* ``link``: how do split points of the operands' dims correspond to those of the result's (strided shards)?
* ``flops``, ``communication``: what does it cost?

A choice is right if the local op's own autograd turns a gradient of the result's type into gradients of the
operands' types (the table in :mod:`autopar.spmd`): once one operand is split or pending, whole operands are
``R``, since each rank has a part of their gradient.

The choices in which every rank does all the work (all operands ``R``, or all ``I``) are legal for every op
and added by :func:`legal_choices`, so an op without a rule runs whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import fx

from autopar.graph import Choice, Meta, info, is_elementwise, op_name, operands
from autopar.pieces import lies_apart
from autopar.spmd import I, P, R, Type, divides

Splits = list[set[int]]
"""Per dim of a value: the ``outer`` of every shard worth trying; 1 is a plain contiguous shard."""

Communication = list[tuple[str, int]]
"""Collectives in the order they run: (kind, bytes as ``cost_models.collective`` counts them)."""

ViewBytes = Callable[[int, int], int]
"""What the backward of a view moves, from bytes of the view and of what it is of."""


def nothing_moved(made: int, taken: int) -> int:
    """The gradient of a view is a view of its gradient."""
    return 0


def put_in_place(made: int, taken: int) -> int:
    """A gradient of the whole is cleared, and that of a part of it copied there."""
    return taken + 2 * made


def joined(made: int, taken: int) -> int:
    """Gradients of all parts are copied into one."""
    return 2 * taken


def summed(made: int, taken: int) -> int:
    """Gradients of all copies are added up."""
    return made + taken


@dataclass(frozen=True)
class Op:
    """A node as rules see it: :class:`Meta` in place of nodes, with the shapes before this axis is split."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Meta, ...]
    outputs: tuple[Meta, ...]
    apart: tuple[int, ...] = ()
    """Positions of the operands of an elementwise op that are pieces of larger values (:mod:`autopar.pieces`)."""
    found: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What rules have found out about it, each by a key of its own: an op is asked the same many times."""

    @classmethod
    def of(cls, node: fx.Node) -> Op:
        args, kwargs = cast(Any, fx.map_arg)((node.args, node.kwargs), lambda n: info(n).meta)
        given = operands(node)
        metas = tuple(info(n).meta for n in given)
        return cls(op_name(node), tuple(args), dict(kwargs), metas, info(node).outputs, apart_operands(node))

    @property
    def result(self) -> Meta:
        return self.outputs[0]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Argument ``position`` of the schema, however it was passed."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def without_operand(self, position: int) -> Op:
        """The op as if that operand were no tensor; positions in ``args`` stay."""
        kept = self.operands[:position] + self.operands[position + 1 :]
        return replace(self, operands=kept)


def apart_operands(node: fx.Node) -> tuple[int, ...]:
    """:attr:`Op.apart` of ``node``."""
    return tuple(i for i, n in enumerate(operands(node)) if lies_apart(n)) if is_elementwise(node) else ()


@dataclass(frozen=True)
class Given:
    """In a :class:`Local`: the argument that the whole call has at this position or under this name."""

    position: int
    name: str


@dataclass(frozen=True)
class Local:
    """How one rank calls the op: replacements of arguments by position or name.

    ``target`` names another function: one of ``autopar.runtime``, or an ATen overload
    ("aten.reshape.default"); "" is the op itself. With ``keep``, only so many positional arguments and no
    named ones of the whole call stay; :class:`Given` puts one elsewhere.
    """

    args: dict[int, Any]
    kwargs: dict[str, Any]
    target: str = ""
    keep: int | None = None

    @classmethod
    def same(cls) -> Local:
        return cls({}, {})

    @classmethod
    def replacing(cls, op: Op, position: int, name: str, value: Any) -> Local:
        """One argument replaced, however it was passed."""
        return cls({}, {name: value}) if name in op.kwargs else cls({position: value}, {})

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One rank's arguments from those of the whole call; positions past the end are appended."""
        made = list(args[: self.keep])
        for position, value in sorted(self.args.items()):
            made[position : position + 1] = [value]
        kept = dict(kwargs) if self.keep is None else {}
        named = {
            name: (args[value.position] if value.position < len(args) else kwargs[value.name])
            if isinstance(value, Given)
            else value
            for name, value in self.kwargs.items()
        }
        return tuple(made), kept | named


class Rule(Protocol):
    """One op's rule; :class:`autopar.rules.spec.Spec` is the usual one."""

    @property
    def repeats(self) -> int:
        """How often the backward computes what the forward did again."""

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        """Carry split points between operands and result, both ways, by adding to the sets."""

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterable[Choice]:
        """The choices that split or sum; those where every rank does all the work are added by the caller."""

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        """The arguments of one rank's call, where they differ."""

    def flops(self, op: Op) -> int:
        """Floating-point operations of the forward call that count (matrix products), else 0."""

    def factors(self, op: Op) -> tuple[int, ...]:
        """Positions of the operands whose gradient is a product as large as the forward's: those that have a gradient,
        but for what is added to products."""

    def inner_bytes(self, op: Op) -> int:
        """Bytes that a pass reads and writes inside of the op, beside operands and result."""

    def back_bytes(self, op: Op, made: int, taken: Sequence[int]) -> int:
        """Bytes that its backward moves beside one kernel that reads what it needs and writes all gradients (less than
        0: as many fewer). ``made`` and ``taken`` are bytes of result and operands on a rank."""

    def view_bytes(self, made: int, taken: int) -> int:
        """Bytes that its backward moves where it is a view, of ``made`` bytes, of ``taken``: a forward moves none."""

    def whole_bytes(self, op: Op) -> int:
        """Bytes of what its backward makes of gradients before they are as they are handed on: as large as the result
        before they are summed or cast, as of what is broadcast; or in another order."""

    def loose(self, op: Op) -> tuple[int, int]:
        """How often forward and backward make an element of the result in a kernel that loads one at a time."""

    def made(self, op: Op, choice: Choice, size: int) -> int:
        """Elements of the result of one of its products on a rank."""

    def row_bytes(self, op: Op, choice: Choice, size: int) -> int:
        """Of a matrix that its products make inside, on a rank; 0 where they make the result alone."""

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        """Collectives inside the op's form, of the forward; shapes are those before the axis is split."""

    def communication_back(self, op: Op, choice: Choice, size: int) -> Communication:
        """The same of the backward, where the op has one."""

    def overlaps(self, op: Op, choice: Choice) -> bool:
        """Whether what it communicates runs beside its own work, not before or after it."""

    def imbalance(self, op: Op, choice: Choice, size: int) -> float:
        """Work of the busiest rank in that of the average one, where ranks hold neighbouring parts of a dim."""

    def pieces(self, op: Op, choice: Choice, size: int) -> int:
        """In how many kernels, one after another, the work of one is done; results are added up."""

    def expert_operands(self, op: Op) -> tuple[int, ...]:
        """Positions of the operands that are a stack of weights, one per expert, along dim 0."""

    def is_linear(self, op: Op) -> bool:
        """Whether gradients of the operands follow from that of the result alone, as those of a sum do."""

    def is_fused(self, op: Op) -> bool:
        """Whether it is several products with what stands between in one kernel, as attention is."""

    def looked_up(self, op: Op) -> tuple[int, ...]:
        """Positions of the operands of which no more is read than the result shows, as of an embedding's table."""


@dataclass(frozen=True)
class Whole:
    """The rule of an op that has none: it runs whole on every rank. Base of the others. ``of_view``: what the backward
    of a view moves."""

    of_view: ViewBytes = field(default=nothing_moved, kw_only=True)

    @property
    def repeats(self) -> int:
        return 0

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        return

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterable[Choice]:
        return ()

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        return Local.same()

    def flops(self, op: Op) -> int:
        return 0

    def factors(self, op: Op) -> tuple[int, ...]:
        return tuple(position for position, meta in enumerate(op.operands) if meta.needs_grad)

    def inner_bytes(self, op: Op) -> int:
        return 0

    def back_bytes(self, op: Op, made: int, taken: Sequence[int]) -> int:
        return 0

    def view_bytes(self, made: int, taken: int) -> int:
        return self.of_view(made, taken)

    def whole_bytes(self, op: Op) -> int:
        return 0

    def loose(self, op: Op) -> tuple[int, int]:
        return 0, 0

    def made(self, op: Op, choice: Choice, size: int) -> int:
        return op.result.numel // (size if choice.result.is_shard else 1)

    def row_bytes(self, op: Op, choice: Choice, size: int) -> int:
        return 0

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        return []

    def communication_back(self, op: Op, choice: Choice, size: int) -> Communication:
        return []

    def overlaps(self, op: Op, choice: Choice) -> bool:
        return False

    def imbalance(self, op: Op, choice: Choice, size: int) -> float:
        return 1.0

    def pieces(self, op: Op, choice: Choice, size: int) -> int:
        return 1

    def expert_operands(self, op: Op) -> tuple[int, ...]:
        return ()

    def is_linear(self, op: Op) -> bool:
        return False

    def is_fused(self, op: Op) -> bool:
        return False

    def looked_up(self, op: Op) -> tuple[int, ...]:
        return ()


def legal_choices(rule: Rule, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> list[Choice]:
    """All legal choices of ``op`` on an axis of ``size`` ranks, the whole ones first, without repeats.

    Values without a gradient know no difference between ``I`` and ``R``: they are always ``R``.
    """
    count = len(op.operands)
    candidates = [Choice((R,) * count, R), Choice((I,) * count, I)]
    candidates += rule.choices(op, size, inputs, output)
    legal: dict[Choice, None] = {}
    for choice in candidates:
        normal = _without_gradient_is_replicate(choice, op)
        if _fits(normal, op, size):
            legal[normal] = None
    return list(legal)


def _without_gradient_is_replicate(choice: Choice, op: Op) -> Choice:
    if choice.result != I and I not in choice.operands:
        return choice
    taken = tuple(
        R if kind == I and not meta.needs_grad else kind
        for kind, meta in zip(choice.operands, op.operands, strict=True)
    )
    result = R if choice.result == I and not op.result.needs_grad else choice.result
    return Choice(taken, result, choice.form)


def _fits(choice: Choice, op: Op, size: int) -> bool:
    """Shards divide evenly, and what is pending can be added up."""
    if not all(_may_be(meta, kind, size) for meta, kind in zip(op.operands, choice.operands, strict=True)):
        return False
    return all(_may_be(meta, choice.result, size) for meta in op.outputs)


def _may_be(meta: Meta, kind: Type, size: int) -> bool:
    if kind.is_shard:
        return kind.dim < len(meta.shape) and divides(meta.shape, kind, size)
    return kind != P or meta.dtype != torch.bool
