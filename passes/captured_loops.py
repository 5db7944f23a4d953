"""captured_loops: loops over the experts that some token chose, which were captured for all experts.

Guarantees: where none is refused, the captured graph computes what the model does, whatever the values. Such a loop
(:mod:`autopar.loop_capture`) may stay if a number that ``nonzero`` doesn't find has no rows in its body either, and all
that a body does for the code after it is to add its rows to something. Example::

    for e in (mask.sum(dim=(-1, -2)) > 0).nonzero():  slot, token = torch.where(mask[e]); out.index_add_(0, token, …)

asks one mask twice: where the sum of ``mask[e]`` is zero, ``where`` finds nothing, and ``index_add`` adds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from torch import fx

from autopar.capture import Flat, source_of
from autopar.errors import CaptureError
from autopar.graph import info, op_name
from autopar.loop_capture import MARK

_FINDERS: Final = ("nonzero", "nonzero_numpy", "argwhere", "where")
_ABOVE_ZERO: Final = {(op, 0) for op in ("gt", "greater", "ne", "not_equal")} | {("ge", 1), ("greater_equal", 1)}
_PARTS: Final = ("select", "squeeze", "unsqueeze", "view", "reshape", "flatten", "alias", "detach", "to", "getitem")
"""Ops between a mask and the part of it for one expert, and between the tokens found there and an index."""
_ROW_WRITES: Final = ("index_add", "index_put", "index_copy")


@dataclass
class Loop:
    """A loop over what ``nonzero`` found: the node that found it, and the captured ops of each body in order."""

    found: fx.Node
    bodies: list[list[fx.Node]] = field(default_factory=list)


def loops(graph: fx.Graph) -> list[Loop]:
    """The loops of a captured graph that were captured for every number, in order; a body has those inside of it."""
    made: list[Loop] = []
    running: list[Loop] = []
    for node in graph.nodes:
        if node.target is not MARK:
            for loop in running:
                loop.bodies[-1].append(node)
        elif node.args[1] == -1:
            running.pop()
        else:
            if node.args[1] == 0:
                running.append(Loop(node.args[0]))
                made.append(running[-1])
            running[-1].bodies.append([])
    return made


def check_loops(flat: Flat) -> Flat:
    """Right after writes in place are gone. Raises CaptureError naming the line of a loop that isn't of this form."""
    live = set(flat.nodes)
    for loop in loops(flat.graph):
        mask = _counted(_condition(loop.found))
        for body in loop.bodies:
            if not all(_adds_rows(node, body, mask) for node in _left(body, live, flat.loss)):
                raise _refused(source_of(loop.found))
    return flat


def _left(body: list[fx.Node], live: set[fx.Node], loss: fx.Node) -> list[fx.Node]:
    """What code after the body reads of it."""
    inside = set(body)
    return [
        node
        for node in body
        if node in live and (node is loss or any(user in live and user not in inside for user in node.users))
    ]


def _adds_rows(node: fx.Node, body: list[fx.Node], mask: fx.Node | None) -> bool:
    """Whether the op leaves its first operand as it is where nothing in ``mask`` is selected for this body."""
    if mask is None or _kind(node) not in _ROW_WRITES:
        return False
    index = node.args[1] if _kind(node) == "index_put" else node.args[2]
    given = index if isinstance(index, list | tuple) else [index]
    return any(isinstance(i, fx.Node) and _rows_of(i, set(body)) is mask for i in given)


def _rows_of(index: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
    """Of the tokens that ``where`` or ``nonzero`` finds in a part of a mask, or of that part: the mask."""
    node = index
    while node in inside and node.all_input_nodes and _kind(node) in (*_PARTS, *_FINDERS):
        node = node.all_input_nodes[0]
    return node if node is not index else None


def _refused(line: str) -> CaptureError:
    return CaptureError(
        f"the loop at {line} goes over indices that nonzero() finds, which depend on values, and isn't one over "
        "experts in a form that is known: for e in (mask.sum(dim=(-1, -2)) > 0).nonzero(): rows of the tokens in "
        "torch.where(mask[e]), computed and added back by index_add_. Write it so, or as a loop over all experts"
    )


def _condition(found: fx.Node) -> fx.Node:
    """What ``nonzero`` was called with, before its result was given another shape."""
    node = found
    while _kind(node) not in _FINDERS and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.all_input_nodes[0] if node.all_input_nodes else node


def _counted(condition: fx.Node) -> fx.Node | None:
    """Of ``mask.sum(…) > 0`` over all dims but the first, or of ``mask.any(…)``: the mask."""
    node = condition
    if (_kind(node), *node.args[1:]) in _ABOVE_ZERO:
        node = node.all_input_nodes[0]
    if _kind(node) not in ("sum", "any") or len(node.args) < 2:
        return None
    mask = node.all_input_nodes[0]
    rank = _rank(mask)
    given: Any = node.args[1]
    dims = given if isinstance(given, list | tuple) else [given]
    return mask if {d % rank for d in dims} == set(range(1, rank)) and _rank(node) == 1 else None


def _rank(node: fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.dim()) if value is not None else len(info(node).meta.shape)


def _kind(node: fx.Node) -> str:
    """``where`` of ``aten.where.default``."""
    parts = op_name(node).split(".") if node.op == "call_function" else [""]
    return parts[1] if len(parts) > 1 else parts[0]
