"""Bodies of a loop over experts: which tokens each takes, and whether all compute the same.

A *body* takes the tokens that chose one expert, computes something for each of them, and gives it back to them. Two
bodies are the same if they are one graph up to what they take from outside of themselves: parameters, and other values
that belong to one expert. :func:`differs` walks two of them in step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from autopar.graph import info, op_name, operands, where
from autopar.passes.token_choices import Chosen, condition, position

MERGES: Final = ("aten.index_add.default", "aten.index_put.default")
"""Ops that give rows back to tokens."""


class NotALoopError(Exception):
    """Why ops aren't bodies of a loop over experts, in words."""


@dataclass(frozen=True)
class Picks:
    """The tokens, or slots of tokens, that one body takes.

    ``chosen`` says which; ``token_dims`` are the dims of its index that are tokens, ``slot_dim`` the one of a token's
    choices (None: there is one).
    """

    chosen: Chosen
    token_dims: tuple[int, ...]
    slot_dim: int | None

    @classmethod
    def of(cls, chosen: Chosen, token_dims: tuple[int, ...]) -> Picks:
        """Raises NotALoopError where the index has further dims than tokens and one of choices."""
        rest = [d for d in range(len(info(chosen.index).meta.shape)) if d not in token_dims]
        if len(rest) > 1 or (rest and chosen.is_mask) or list(token_dims) != sorted(token_dims):
            raise NotALoopError("the router's choice is not one of [tokens, choices]")
        return cls(chosen, token_dims, rest[0] if rest else None)

    @property
    def token_shape(self) -> tuple[int, ...]:
        shape = info(self.chosen.index).meta.shape
        return tuple(shape[d] for d in self.token_dims)

    @property
    def tokens(self) -> int:
        return math.prod(self.token_shape)

    @property
    def choices(self) -> int:
        return 1 if self.slot_dim is None else info(self.chosen.index).meta.shape[self.slot_dim]

    @property
    def rows(self) -> int:
        """At most, as the capture has it."""
        return self.tokens * (self.choices if self.by_slot else 1)

    @property
    def by_slot(self) -> bool:
        """Whether a token is taken once for each of its choices that is the expert."""
        return self.slot_dim in self.chosen.dims


@dataclass(frozen=True)
class Indexed:
    """``source`` taken at places that ``chosen`` holds for: ``dims`` of that index its dims from ``first`` on."""

    source: fx.Node
    chosen: Chosen
    dims: tuple[int, ...]
    first: int


def indexed(node: fx.Node) -> Indexed | None:
    """``node`` as a tensor taken at chosen places; None where it is something else."""
    name = op_name(node) if node.op == "call_function" else ""
    if name == "aten.index.Tensor":
        return taken_at(node.args[0], node.args[1])
    if name == "aten.index_select.default" and node.args[1] == 0:
        return taken_at(node.args[0], [node.args[2]])
    return None


def taken_at(source: Any, entries: Any) -> Indexed | None:
    """``source[entries]``, if all entries are places that one condition holds for."""
    found: set[Chosen] = set()
    dims: list[int] = []
    leading = 0
    for entry in entries:
        if entry is None and not found:
            leading += 1
        elif (of := _places(entry)) is not None:
            found.add(of[0])
            dims += of[1]
        else:
            return None
    return Indexed(source, found.pop(), tuple(dims), leading) if len(found) == 1 else None


def _places(entry: Any) -> tuple[Chosen, Sequence[int]] | None:
    """The condition that ``entry`` has the places of, and which dims of its index they are along."""
    if not isinstance(entry, fx.Node):
        return None
    if info(entry).meta.dtype == torch.bool:
        mask = condition(entry)
        return mask, mask.dims
    place = position(entry)
    if place is None:
        return None
    mask = condition(place.condition)
    return mask, [mask.dims[place.dim]]


Labels = Mapping[fx.Node, Chosen]
"""Of each value with a row for each pick, the picks."""


def labels(nodes: Iterable[fx.Node]) -> Labels:
    """Ops that mix the rows of several picks have none of these labels, and make no body."""
    found: dict[fx.Node, Chosen] = {}
    for node in nodes:
        taken = indexed(node)
        if taken is not None:
            found[node] = taken.chosen
            continue
        below = {found[o] for o in node.all_input_nodes if o in found}
        if len(below) == 1 and op_name(node) not in MERGES:
            found[node] = below.pop()
    return found


@dataclass(frozen=True)
class Body:
    """One expert's part of a loop: ``value`` is what it computes for its ``picks``; ``inside`` what that depends on
    and has a row for each of them, in the graph's order."""

    picks: Picks
    value: fx.Node
    inside: Mapping[fx.Node, int]

    @classmethod
    def of(cls, picks: Picks, value: fx.Node, known: Labels, order: Mapping[fx.Node, int]) -> Body:
        """Raises NotALoopError where ``value`` isn't computed from these picks alone."""
        if known.get(value) != picks.chosen:
            raise NotALoopError(f"{where(value)} isn't computed from the tokens of one expert alone")
        waiting, inside = [value], {value}
        while waiting:
            node = waiting.pop()
            for operand in outside_operands(node):
                if operand in known and operand not in inside:
                    inside.add(operand)
                    waiting.append(operand)
        return cls(picks, value, {node: order[node] for node in sorted(inside, key=order.__getitem__)})


def outside_operands(node: fx.Node) -> list[fx.Node]:
    """The operands, in order; of what is taken at places, the tensor alone."""
    taken = indexed(node)
    return operands(node) if taken is None else [taken.source]


Pairs = dict[fx.Node, fx.Node]
"""Node of one body, or what it takes from outside -> the same of another."""


def differs(one: Body, other: Body) -> Pairs | str:
    """What corresponds to what in two bodies, or their first difference in words."""
    pairs: Pairs = {}
    waiting = [(one.value, other.value)]
    while waiting:
        a, b = waiting.pop()
        if a in pairs:
            if pairs[a] is not b:
                return f"{_text(b)} where the first uses one value twice"
            continue
        pairs[a] = b
        if (a in one.inside) != (b in other.inside) or info(a).outputs != info(b).outputs:
            return f"{_text(b)} where the first has {_text(a)}"
        if a not in one.inside:
            continue
        left, right = outside_operands(a), outside_operands(b)
        if op_name(a) != op_name(b) or len(left) != len(right) or _constants(a) != _constants(b):
            return f"{_text(b)} where the first has {_text(a)}"
        waiting += reversed(list(zip(left, right, strict=True)))
    return pairs


def _constants(node: fx.Node) -> Any:
    taken = indexed(node)
    return (
        (taken.dims, taken.first) if taken is not None else repr(fx.map_arg((node.args, node.kwargs), lambda n: None))
    )


def _text(node: fx.Node) -> str:
    data = info(node)
    if node.op != "call_function":
        return f"{data.name} {data.meta}"
    return f"{where(node)} of {', '.join(str(info(o).meta) for o in outside_operands(node))}"
