"""Rules of what a mixture of experts does around its products (:mod:`autopar.runtime.experts`).

On one axis, the types are those of one of four ways to compute a layer:

=============  ==================  ============================  ===========================  =====
value          tokens              experts, tokens travel        experts, tokens are whole    whole
=============  ==================  ============================  ===========================  =====
index, x       S(0,o)              S(0,o)                        R                            R
routing        S(0,o)              S(1,o)  ``exchange``          P  ``filter``                R
rows           S(0,o)              S(0,ragged)                   S(0,ragged)                  R
weight         R                   S(0)                          S(0)                         R
y              S(0,o)              S(0,o)                        P                            R
=============  ==================  ============================  ===========================  =====

In the last way rows and y may also be split by their width, or pending, and the weight by its width: S(out) makes
S(1) of the rows, and rows S(1) with a weight S(in) a pending sum.

A routing is an object. What the table needs to know of it is how its tokens are split, whether they stay or travel:
its metadata is that of an empty tensor ``[tokens that stay, tokens that travel, 0]``, which weighs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import fx

from autopar.graph import AxisRef, Choice, Meta, info, op_name, operands
from autopar.mesh import AXES
from autopar.node_rows import NodeRows, node_rows
from autopar.rules.base import Communication, Local, Op, Rule, Splits, Whole
from autopar.spmd import RAGGED, P, R, S, Type

EXCHANGE: Final = "exchange"
FILTER: Final = "filter"

OF: Final = "of"
"""Among how many experts a router chooses, of which a routing has some."""

ROUTE: Final = "route"
DISPATCH: Final = "dispatch"
GROUPED_LINEAR: Final = "grouped_linear"
GROUPED_BIAS: Final = "grouped_bias"
COMBINE: Final = "combine"
DISPATCH_START: Final = "dispatch_start"
DISPATCH_END: Final = "dispatch_end"
"""A dispatch in two, as code is written (:mod:`autopar.passes.overlap_dispatch`)."""

ACROSS: Final = "all_to_all across nodes"
WITHIN: Final = "all_to_all within nodes"
"""The hops of tokens that travel by way of nodes, as kinds of collectives."""

_RAGGED: Final = S(0, RAGGED)
_STAY, _TRAVEL = 0, 1
_NUMBER: Final = torch.int64.itemsize


def routing_meta(tokens: int, sent: int | None = None) -> Meta:
    """The metadata of a routing of ``tokens``; the node's ``Info`` has ``is_object`` set. ``sent``: rows that leave, of
    tokens that travel by way of nodes, once that is known."""
    return Meta((tokens, tokens, 0, *(() if sent is None else (sent,))), torch.uint8)


def node_rows_of(route: Op, imbalance: float = 1.0, nodes: int | None = None) -> NodeRows:
    """How many rows tokens are that travel by way of ``nodes`` (None: those that the local ``route`` has);
    ``imbalance`` as in :func:`autopar.node_rows.node_rows`."""
    experts, (tokens, choices) = _experts(route), route.operands[0].shape
    exchanged, filtered = (math.prod(ref.size for ref in route.kwargs.get(form, ())) for form in (EXCHANGE, FILTER))
    among, nodes = int(route.kwargs.get(OF) or experts), nodes or int(route.kwargs["nodes"])
    return node_rows(tokens, choices, among, experts // filtered, nodes, exchanged, imbalance)


def told_bytes(route: Op, nodes: int) -> tuple[tuple[str, int], ...]:
    """What ranks tell each other before tokens travel by way of ``nodes``, by hop: how many tokens have more than j
    slots on a node, and slots of each expert; of these, those of a node's; and which slots they are."""
    filtered = math.prod(ref.size for ref in route.kwargs.get(FILTER, ()))
    kept, slots = _experts(route) // filtered, node_rows_of(route, nodes=nodes).slots
    counts = nodes * route.operands[0].shape[1] + kept
    return (ACROSS, _NUMBER * counts), (WITHIN, _NUMBER * (kept // nodes)), (ACROSS, _NUMBER * slots)


@dataclass(frozen=True)
class Hop:
    """What a dispatch or a combine sends and copies one way, where tokens travel by way of nodes: messages by hop, and
    bytes that are read and written to make a row of each slot, or to put sums in their places."""

    messages: tuple[tuple[str, int], ...]
    copied_bytes: int


def hops(op: Op, rows: NodeRows) -> tuple[Hop, Hop]:
    """Forward and backward of a local ``dispatch`` or ``combine``, as the rank with the most rows has it."""
    gives_back = op.name == COMBINE
    some, tokens = (op.operands[0], op.result) if gives_back else (op.result, op.operands[0])
    row = some.shape[1] * some.dtype.itemsize
    across, within = (ACROSS, rows.got * row), (WITHIN, max(rows.passed, some.shape[0]) * row)
    out, spread = rows.got * row + rows.tokens * tokens.shape[1] * tokens.dtype.itemsize, rows.passed * row
    if not gives_back:
        return Hop((across, within), 2 * spread), Hop((across, within), 2 * out)
    weights = op.operands[1]
    told = (ACROSS, rows.passed * weights.dtype.itemsize)
    back = (across, *((told,) if weights.needs_grad else ()), *((within,) if op.operands[0].needs_grad else ()))
    return Hop((told, within, across), 2 * out), Hop(back, 2 * spread)


def _join(*sets: set[int]) -> None:
    """The same split points in all, ragged ones aside."""
    union = set().union(*sets) - {RAGGED}
    for one in sets:
        one |= union


def _outers(*splits: set[int]) -> list[int]:
    return sorted(set().union(*splits) - {RAGGED})


@dataclass(frozen=True)
class Route(Whole):
    """``route(index, experts)``."""

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        _join(inputs[0][0], output[_STAY], output[_TRAVEL])

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        for outer in _outers(inputs[0][0]):
            yield Choice((S(0, outer),), S(_STAY, outer))
            if _experts(op) % size == 0:
                yield Choice((S(0, outer),), S(_TRAVEL, outer), EXCHANGE)
        if _experts(op) % size == 0:
            yield Choice((R,), P, FILTER)

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        """The axes stand in the order of the mesh, whichever was solved first."""
        if not choice.form:
            return Local.same()
        refs = (*op.kwargs.get(choice.form, ()), AxisRef(axis))
        return Local({}, {choice.form: tuple(sorted(refs, key=lambda ref: AXES.index(ref.name)))})

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        """Counts: a number per expert."""
        return [("all_to_all", 8 * _experts(op))] if choice.form == EXCHANGE else []


def _experts(op: Op) -> int:
    """Of one rank, as far as axes are solved."""
    return int(op.arg(1, "experts"))


@dataclass(frozen=True)
class Dispatch(Whole):
    """``dispatch(x, routing)``."""

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        x, routing = inputs
        _join(x[0], routing[_STAY], routing[_TRAVEL], output[0])
        _join(x[1], output[1])
        output[0].add(RAGGED)

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        x, routing = inputs
        for outer in _outers(x[0], routing[_STAY]):
            yield Choice((S(0, outer), S(_STAY, outer)), S(0, outer))
            yield Choice((S(0, outer), S(_TRAVEL, outer)), _RAGGED, EXCHANGE)
        yield Choice((R, P), _RAGGED, FILTER)
        for outer in _outers(x[1], output[1]):
            yield Choice((S(1, outer), R), S(1, outer))
        yield Choice((P, R), P)

    def inner_bytes(self, op: Op) -> int:
        """The rows in order of departure."""
        return 2 * op.result.bytes

    def whole_bytes(self, op: Op) -> int:
        """The rows' gradients as they came back, and if they travelled also as they left, or in order of slots."""
        x, routing = op.operands
        travels = x.shape[0] < routing.shape[_STAY]
        return (2 if travels else 1) * op.result.bytes

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        return [("all_to_all", op.result.bytes // size)] if choice.form == EXCHANGE else []

    def communication_back(self, op: Op, choice: Choice, size: int) -> Communication:
        return self.communication(op, choice, size)


@dataclass(frozen=True)
class GroupedLinear(Whole):
    """``grouped_linear(rows, weight, routing, transposed=False)``: ``rows [r, in]``, ``weight [experts, out, in]``."""

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        rows, weight, routing = inputs
        width, made = _widths(op)
        _join(rows[0], routing[_STAY], routing[_TRAVEL], output[0])
        _join(rows[1], weight[width])
        _join(weight[made], output[1])
        _pass_ragged(rows[0], output[0])

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        rows, weight, routing = inputs
        width, made = _widths(op)
        yield from _by_rows(R, rows[0], routing)
        for outer in _outers(weight[made], output[1]):
            yield Choice((R, S(made, outer), R), S(1, outer))
        for outer in _outers(rows[1], weight[width]):
            yield Choice((S(1, outer), S(width, outer), R), P)
        yield Choice((P, R, R), P)

    def flops(self, op: Op) -> int:
        return 2 * op.result.numel * op.operands[0].shape[1]

    def expert_operands(self, op: Op) -> tuple[int, ...]:
        return (1,)


def _widths(op: Op) -> tuple[int, int]:
    """The dims of the weight that are summed and made."""
    return (1, 2) if op.arg(3, "transposed", False) else (2, 1)


def _pass_ragged(rows: set[int], made: set[int]) -> None:
    if RAGGED in rows | made:
        rows.add(RAGGED)
        made.add(RAGGED)


def _by_rows(weight: Type, rows: set[int], routing: Splits) -> Iterator[Choice]:
    """A rank has some of the rows: those of its tokens, or those of its experts."""
    for outer in _outers(rows, routing[_STAY]):
        yield Choice((S(0, outer), weight, S(_STAY, outer)), S(0, outer))
        yield Choice((_RAGGED, S(0), S(_TRAVEL, outer)), _RAGGED)
    yield Choice((_RAGGED, S(0), P), _RAGGED)


@dataclass(frozen=True)
class GroupedBias(Whole):
    """``grouped_bias(rows, bias, routing)``: ``bias [experts, out]``."""

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        rows, bias, routing = inputs
        _join(rows[0], routing[_STAY], routing[_TRAVEL], output[0])
        _join(rows[1], bias[1], output[1])
        _pass_ragged(rows[0], output[0])

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        rows, bias, routing = inputs
        yield from _by_rows(R, rows[0], routing)
        for outer in _outers(rows[1], bias[1], output[1]):
            yield Choice((S(1, outer), S(1, outer), R), S(1, outer))

    def expert_operands(self, op: Op) -> tuple[int, ...]:
        return (1,)


def _choices(op: Op) -> int:
    """Of each token, by a combine's weights."""
    return op.operands[1].shape[-1]


@dataclass(frozen=True)
class Combine(Whole):
    """``combine(rows, weights, routing)``: ``weights [n, k]``, linear in rows and in weights."""

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        rows, weights, routing = inputs
        _join(rows[0], weights[0], routing[_STAY], routing[_TRAVEL], output[0])
        _join(rows[1], output[1])
        rows[0].add(RAGGED)

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        rows, weights, routing = inputs
        for outer in _outers(weights[0], routing[_STAY], output[0]):
            yield Choice((S(0, outer), S(0, outer), S(_STAY, outer)), S(0, outer))
            yield Choice((_RAGGED, S(0, outer), S(_TRAVEL, outer)), S(0, outer), EXCHANGE)
        yield Choice((_RAGGED, R, P), P, FILTER)
        for outer in _outers(rows[1], output[1]):
            yield Choice((S(1, outer), R, R), S(1, outer))
        yield Choice((P, R, R), P)
        yield Choice((R, P, R), P)

    def inner_bytes(self, op: Op) -> int:
        """The rows in order of slots; of each token the sum, once for each slot but the first."""
        return 2 * op.operands[0].bytes + 2 * (_choices(op) - 1) * op.result.bytes

    def back_bytes(self, op: Op, made: int, taken: Sequence[int]) -> int:
        """Of rows, gradients by slot, then times the weights; of weights, products with the rows, then summed."""
        slots, rows = _choices(op) * made, taken[0]
        trained = [bytes_ for bytes_, meta in zip(taken, op.operands, strict=True) if meta.needs_grad]
        counted = made + sum(trained) + 2 * rows + 2 * (slots - made) + sum(taken)
        return len(trained) * (3 * slots + rows) - counted

    def loose(self, op: Op) -> tuple[int, int]:
        """Of each slot, products with its weight, which is of all of a row, and of rows in another dtype; two products
        in the backward."""
        mixed = op.operands[0].dtype != op.result.dtype
        return (1 + mixed) * _choices(op), 2 * _choices(op)

    def whole_bytes(self, op: Op) -> int:
        """The rows' gradients in order of departure."""
        return op.operands[0].bytes if op.operands[0].needs_grad else 0

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        return [("all_to_all", op.operands[0].bytes // size)] if choice.form == EXCHANGE else []

    def communication_back(self, op: Op, choice: Choice, size: int) -> Communication:
        return self.communication(op, choice, size)


def absent_bytes(node: fx.Node) -> int:
    """Of the backward of a dispatch: of slots whose rows are those of other ranks, which hold the same tokens. Their
    gradients are zeros here."""
    if op_name(node) not in (DISPATCH, DISPATCH_START):
        return 0
    axes = cast(Sequence[AxisRef], operands(node)[1].kwargs.get(FILTER, ()))
    ranks = math.prod(ref.size for ref in axes)
    return (ranks - 1) * info(node).meta.bytes


RULES: dict[str, Rule] = {
    ROUTE: Route(),
    DISPATCH: Dispatch(),
    DISPATCH_START: Dispatch(),
    GROUPED_LINEAR: GroupedLinear(),
    GROUPED_BIAS: GroupedBias(),
    COMBINE: Combine(),
}
