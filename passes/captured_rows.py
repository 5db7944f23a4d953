"""captured_rows: code that asks whether any token chose an expert, which was captured as if some did.

Guarantees: where it isn't refused, what was captured is what the model computes, whether tokens chose an expert or not.
Two things are looked at. What code asks of, before a body of a loop over experts, must be the choice of that body's
expert (the marks of :mod:`autopar.row_capture`). And the model captured as if no token ever chose an expert must be the
same but for the bodies::

    if len(token) == 0: continue                             no body: nothing is added
    if len(token) == 0: out = out + 1                        refused: something else is computed where there is none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import fx

from autopar.capture import Flat, source_of
from autopar.errors import CaptureError
from autopar.graph import info, op_name
from autopar.passes.captured_loops import loops
from autopar.passes.expert_bodies import Labels
from autopar.passes.expert_rows import RESHAPES
from autopar.passes.token_choices import Chosen, condition, position
from autopar.row_capture import ASKED

_SHOWN: Final = 4

Merges = Mapping[fx.Node, tuple[fx.Node, Chosen]]
"""Of each op that ends a body: what it adds to, and which tokens' choice it is for."""


def check_rows(flat: Flat, merges: Merges, known: Labels, others: Sequence[tuple[Flat, Merges]]) -> None:
    """Raises CaptureError naming the line of a condition on which more depends than one body.

    ``others`` are captures of the same model under other answers to what it asked; the last under which nothing has
    any rows.
    """
    _check_marks(flat, merges, known)
    *counted, empty = others
    for other, _ in counted:
        if _skeleton(flat, {}) != _skeleton(other, {}):
            raise _refused(_marked_lines(flat), "the number of these tokens is computed with")
    if _skeleton(flat, merges) != _skeleton(*empty):
        raise _refused(_marked_lines(flat), "something else is computed where it doesn't")


def passed_over(flat: Flat, merges: Merges, others: Sequence[tuple[Flat, Merges]]) -> set[fx.Node]:
    """The ends of bodies that don't run where their expert has no tokens: those of loops over experts that have some,
    and those that aren't there if none has."""
    found = {node for loop in loops(flat.graph) for body in loop.bodies for node in body if node in merges}
    if others:
        always = {_place(node) for node in others[-1][1]}
        found |= {node for node in merges if _place(node) not in always}
    return found


def _place(node: fx.Node) -> tuple[str, str]:
    return info(node).module, info(node).source


def _refused(line: str, why: str) -> CaptureError:
    return CaptureError(
        f"code at {line} depends on whether a condition holds anywhere, and {why}. It may leave out the body of an "
        "expert that no token chose (if token.numel() == 0: continue, before out.index_add_(0, token, …)), and nothing "
        "else; elsewhere, compute both and take one by torch.where"
    )


def _marked_lines(flat: Flat) -> str:
    lines = dict.fromkeys(source_of(node) for node in flat.graph.nodes if node.target is ASKED)
    return ", ".join(list(lines)[:_SHOWN]) + (" …" if len(lines) > _SHOWN else "")


def _check_marks(flat: Flat, merges: Merges, known: Labels) -> None:
    waiting: list[fx.Node] = []
    for node in flat.graph.nodes:
        if node.target is ASKED:
            waiting.append(node)
        elif node in merges:
            for mark in waiting:
                if not _is_for(mark.args[0], merges[node][1], known):  # type: ignore[arg-type]
                    raise _refused(source_of(mark), "it isn't the choice of the expert whose body follows")
            waiting = []


def _is_for(asked: fx.Node, body: Chosen, known: Labels) -> bool:
    """Whether ``asked`` has any if and only if some token chose what ``body`` is for."""
    found = known.get(asked)
    place = position(asked)
    if found is None and place is not None:
        found = condition(place.condition)
    if found is None and op_name(asked) in ("aten.nonzero.default", "aten.argwhere.default"):
        found = condition(asked.all_input_nodes[0])
    if found is None:
        found = condition(asked)
    if (found.is_mask, found.expert) != (body.is_mask, body.expert):
        return False
    return same_value(_behind_views(found.index), _behind_views(body.index))


def _behind_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and op_name(node) in RESHAPES:
        node = node.all_input_nodes[0]
    return node


def same_value(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two nodes are the same ops of the same."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return bool(a == b) if not isinstance(a, list | tuple) else _all_same(a, b, depth)
    if a is b:
        return True
    if depth == 0 or a.op != "call_function" or a.target is not b.target or info(a).random:
        return False
    return _all_same([*a.args, *a.kwargs.values()], [*b.args, *b.kwargs.values()], depth - 1)


def _all_same(a: Sequence[Any], b: Any, depth: int) -> bool:
    return isinstance(b, list | tuple) and len(a) == len(b) and all(map(lambda x, y: same_value(x, y, depth), a, b))


def _skeleton(flat: Flat, merges: Merges) -> list[str]:
    """The live ops, without the bodies that end in ``merges``, as text."""

    def behind(node: fx.Node) -> fx.Node:
        while node in merges:
            node = merges[node][0]
        return node

    waiting, found = [behind(flat.loss)], {behind(flat.loss)}
    while waiting:
        for operand in map(behind, waiting.pop().all_input_nodes):
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    numbers = {node: i for i, node in enumerate(n for n in flat.nodes if n in found)}

    def text(node: fx.Node) -> str:
        node = behind(node)
        return f"%{numbers[node]}" if node in numbers else info(node).name

    return [
        f"{op_name(node)} {fx.map_arg((node.args, node.kwargs), lambda n: _Name(text(n)))!r}" for node in numbers
    ] + [text(flat.loss)]


class _Name(str):
    """A name among arguments, which prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
