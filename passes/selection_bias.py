"""selection_bias: the biases that decide which experts a token goes to, and nothing else.

Guarantees: equal values; each router's selection bias, where it has one, is a buffer of the model, so that nothing
trains it and every rank has it whole. Found by structure: ``[experts]`` values without a gradient, added to scores from
which the router's choice is made, where no floating value that depends on the sum leaves the block: it ends in numbers
of experts and masks. Example: ``topk(sigmoid(logits) + bias)`` gives the experts, ``gather(sigmoid(logits), experts)``
their weights (DeepSeek-V3, arXiv 2412.19437, equation 16).
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.errors import ArgumentError
from autopar.graph import Block, Model, info, is_view, op_name, operands
from autopar.passes.place_casts import cast_dtype
from autopar.passes.routers import RouterCall, router_calls

_ADDITIONS = ("aten.add.Tensor", "aten.sub.Tensor")


def selection_bias(model: Model) -> Model:
    """In place: frozen parameters that are selection biases become buffers.

    Raises ArgumentError where no router has one, or one that an optimizer could change too.
    """
    routers = list(router_calls(model))
    found = {name: router for router in routers if (name := bias_of(model, router))}
    if not found:
        layers = f"none of its {len(routers)} routers has one" if routers else "it has no experts that are routed to"
        raise ArgumentError(
            "expert_bias_rate moves biases that are added to scores for the choice of experts alone, but of this model "
            f"{layers}; leave expert_bias_rate out, or balance by an auxiliary loss"
        )
    for name, router in found.items():
        _make_buffer(model, name, router)
    return model


def bias_of(model: Model, router: RouterCall) -> str:
    """The name of a router's selection bias; "" where it has none."""
    call = model.calls[router.call]
    block = model.block_of(call)
    node = _bias(block, router)
    return call.parameters[block.parameters.index(node)] if node is not None else ""


def _bias(block: Block, router: RouterCall) -> fx.Node | None:
    chosen = _before(router.node)
    outputs = set(block.outputs)
    for node in block.parameters:
        numbers = info(node).meta
        if node not in chosen or numbers.numel != router.experts or not numbers.dtype.is_floating_point:
            continue
        if _is_added(node) and outputs.isdisjoint(_floating_after(node)):
            return node
    return None


def _before(node: fx.Node) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for operand in operands(waiting.pop()):
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    return found


def _floating_after(node: fx.Node) -> set[fx.Node]:
    """``node`` and the floating values that depend on it by floating values alone."""
    found, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and user not in found and _is_floating(user):
                found.add(user)
                waiting.append(user)
    return found


def _is_floating(node: fx.Node) -> bool:
    return any(meta.dtype.is_floating_point for meta in info(node).outputs)


def _is_added(node: fx.Node) -> bool:
    """Whether all that reads ``node``, behind views and casts, adds it to another value."""
    users = [user for user in node.users if user.op == "call_function"]
    return bool(users) and all(
        (op_name(user) in _ADDITIONS and len(operands(user)) == 2) or (_only_changes(user) and _is_added(user))
        for user in users
    )


def _only_changes(node: fx.Node) -> bool:
    return is_view(node) or cast_dtype(node) is not None or "src" in node.kwargs


def _make_buffer(model: Model, name: str, router: RouterCall) -> None:
    known = model.parameters[name]
    if known.trainable and not known.is_buffer:
        raise ArgumentError(
            f"expert_bias_rate would move {name!r}, the selection bias of {router.layer}, which is a parameter that an "
            "optimizer may change too; make it a buffer, or set requires_grad_(False)"
        )
    model.parameters[name] = replace(known, is_buffer=True, trainable=False)
    for call in model.calls:
        for k, given in enumerate(call.parameters):
            if given == name:
                info(model.block_of(call).parameters[k]).role = "buffer"
