"""overlap_dispatch: what doesn't need the rows of experts is computed while they travel.

Guarantees: equal values and gradients. :func:`overlap_dispatch` only reorders, after all axes are solved: ops that
neither lead to a dispatch nor need it (shared experts) come right after it. :func:`start_dispatches` makes two of a
dispatch with products between it and its first use, when code is written: the first begins to send, the second waits.
Of tokens that travel by way of nodes, it is the hop across nodes that is started.
Both keep a dispatch in one piece with what is recomputed around it. Example, with a shared expert::

    flight = dispatch_start(x, routing)
    y = linear(x, shared)
    rows = dispatch_end(flight)

The gradients travel in the same way: autograd runs what came later first, so the gradient of ``shared`` is made while
those of ``rows`` are on their way.
(Rajbhandari et al., "DeepSpeed-MoE", ICML 2022, section 4.1; DeepSeek-V3, arXiv 2412.19437, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.graph import Block, Model, RuntimeOp, info, op_name, set_info
from autopar.passes.recompute import Region, Regions, nodes_of
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.experts import DISPATCH, DISPATCH_END, DISPATCH_START, EXCHANGE


def overlap_dispatch(model: Model) -> Model:
    """In place, by order alone."""
    for block in model.blocks:
        for node in [n for n in block.ops if _travels(n)]:
            free = _independent(block, node)
            if any(_is_product(other) for other in free):
                place = node
                for other in free:
                    place.append(other)
                    place = other
    return model


def start_dispatches(model: Model, regions: Mapping[int, Regions]) -> Model:
    """In place; ``regions`` are what blocks recompute, by number."""
    for number, block in enumerate(model.blocks):
        for node in [n for n in block.ops if _travels(n)]:
            first = _first_use(block, node)
            if (
                first is not None
                and meanwhile(block, node)
                and _in_one_piece(block, node, first, regions.get(number, ()))
            ):
                _start(node, first)
    return model


def meanwhile(block: Block, dispatch: fx.Node) -> Sequence[fx.Node]:
    """The ops between a dispatch of rows that travel at once and its first use, if there is a product among them; of
    any other op, none."""
    first = _first_use(block, dispatch) if _travels(dispatch) else None
    if first is None:
        return ()
    ops = block.ops
    between = ops[ops.index(dispatch) + 1 : ops.index(first)]
    return between if any(map(_is_product, between)) else ()


def _travels(node: fx.Node) -> bool:
    forms = {choice.form for choice in info(node).choices.values()}
    return op_name(node) == DISPATCH and EXCHANGE in forms


def _first_use(block: Block, node: fx.Node) -> fx.Node | None:
    return next((other for other in block.ops if node in other.all_input_nodes), None)


def _is_product(node: fx.Node) -> bool:
    return bool(lookup(op_name(node)).flops(Op.of(node)))


def _independent(block: Block, node: fx.Node) -> list[fx.Node]:
    bound = _reached(node, lambda n: n.users) | _reached(node, lambda n: n.all_input_nodes)
    return [other for other in block.ops if other not in bound]


def _reached(node: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for other in step(waiting.pop()):
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


def _in_one_piece(block: Block, node: fx.Node, first: fx.Node, regions: Collection[Region]) -> bool:
    """Whether all of it is in the same region, or outside of all: a first use that begins one is outside too."""
    for region in regions:
        inside = nodes_of(block, region)
        if (node in inside) != (first in inside and first is not inside[0]):
            return False
    return True


def _start(node: fx.Node, first: fx.Node) -> None:
    data = info(node)
    with node.graph.inserting_before(first):
        end = node.graph.call_function(RuntimeOp(DISPATCH_END), (node,))
    choices = {axis: replace(choice, operands=(choice.result,), form="") for axis, choice in data.choices.items()}
    node.replace_all_uses_with(end, delete_user_cb=lambda user: user is not end)
    set_info(end, replace(data, choices=choices))
    set_info(node, replace(data, is_object=True))
    node.target = RuntimeOp(DISPATCH_START)
