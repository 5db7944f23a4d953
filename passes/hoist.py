"""hoist: sums of parameter gradients leave the microbatch loop.

Guarantees: equal values; a parameter stored ``I`` on an axis all of whose uses, in every call that reads it
(tied weights), take it as ``R`` there has no ``convert`` left on that axis. Its gradient is then a pending
sum, which the runtime reduces once a step. Example, every use of w on dp: ``linear(x, convert(w, dp, src=I,
dst=R))`` becomes ``linear(x, w)`` and ``{"w": ("dp",)}``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import fx

from autopar.graph import AxisRef, Block, Model, RuntimeOp, info, set_info
from autopar.mesh import AXES
from autopar.spmd import I, R

Slot = tuple[int, int]
"""(block, position among its parameters)."""


def hoist_parameter_sums(model: Model) -> tuple[Model, dict[str, tuple[str, ...]]]:
    """A copy without the hoisted converts; per parameter the axes over which its gradient is a sum."""
    copied = replace(model, blocks=[_copy(block) for block in model.blocks])
    slots = _slots(copied)
    by_name = _settle(copied, slots)
    for (number, position), axes in slots.items():
        for axis in axes:
            _remove(copied.blocks[number].parameters[position], axis)
    return copied, _in_order(by_name)


def parameter_sums(model: Model) -> dict[str, tuple[str, ...]]:
    """Per parameter the axes over which its gradient is a sum, once converts are hoisted."""
    return _in_order(_settle(model, _slots(model)))


def unhoisted(model: Model) -> frozenset[fx.Node]:
    """The converts of parameters that stay: their gradients are summed in each backward, since another use of the
    parameter takes it as it is."""
    slots = _slots(model)
    _settle(model, slots)
    places = ((model.blocks[number].parameters[position], axes) for (number, position), axes in slots.items())
    return frozenset(convert for node, axes in places for convert in _staying(node, axes))


def _staying(node: fx.Node, axes: Collection[str]) -> Iterator[fx.Node]:
    for user in node.users:
        axis = _convert_axis(user)
        if axis is not None:
            yield from _staying(user, axes)
            if axis not in axes:
                yield user


def _slots(model: Model) -> dict[Slot, set[str]]:
    return {
        (number, position): {a for a in AXES if _only_converted(node, a)}
        for number, block in enumerate(model.blocks)
        for position, node in enumerate(block.parameters)
    }


def _in_order(by_name: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(a for a in AXES if a in axes) for name, axes in by_name.items()}


def _copy(block: Block) -> Block:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in block.graph.nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
        if node.op != "output":
            set_info(made[node], info(node))
    return replace(block, graph=graph)


def _convert_axis(node: fx.Node) -> str | None:
    """The axis of an ``I -> R`` convert."""
    if isinstance(node.target, RuntimeOp) and node.kwargs.get("src") == I and node.kwargs.get("dst") == R:
        axis = node.args[1]
        return axis.name if isinstance(axis, AxisRef) else None
    return None


def _only_converted(node: fx.Node, axis: str) -> bool:
    """Whether every use goes through a convert on ``axis``, possibly behind converts on other axes."""
    found = {user: _convert_axis(user) for user in node.users}
    return bool(found) and all(a == axis or (a and _only_converted(user, axis)) for user, a in found.items())


def _settle(model: Model, slots: dict[Slot, set[str]]) -> dict[str, set[str]]:
    """Shrink until all slots of one parameter, and all parameters of one slot, agree."""
    pairs = [(name, (call.block, p)) for call in model.calls for p, name in enumerate(call.parameters)]
    by_name = {name: set(AXES) for name, _ in pairs}
    before = -1
    while before != (before := sum(map(len, slots.values())) + sum(map(len, by_name.values()))):
        for name, slot in pairs:
            shared = by_name[name] & slots[slot]
            by_name[name], slots[slot] = shared, set(shared)
    return by_name


def _remove(node: fx.Node, axis: str) -> None:
    for user in list(node.users):
        found = _convert_axis(user)
        if found is not None and found != axis:
            _remove(user, axis)
        elif found == axis:
            user.replace_all_uses_with(node)
            user.graph.erase_node(user)
