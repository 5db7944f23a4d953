"""composites: an op that has no rule, and that torch itself computes by others which have, is these.

Guarantees: equal values and gradients, as torch's own decomposition is what it runs. So other names of ops
(``multiply``, ``clip``, ``hstack``) and shorthands (``tensordot``, ``linalg.norm``) are split as what they stand for.
Example: ``divide(hstack([a, b]), c)`` -> ``div(cat([a, b], 1), c)``.

What draws random numbers stays, and what comes down to something that has no rule either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture import Flat, differentiable, gradient_flows
from autopar.graph import Meta, derive, info, is_aten, is_getitem, op_name, operands
from autopar.passes.canonicalize import UNDERSTOOD
from autopar.rules import has_rule


def composites(flat: Flat) -> Flat:
    """Changes ``flat``, and returns it."""
    order: list[fx.Node] = []
    for node in flat.nodes:
        parts = None if has_rule(op_name(node)) or op_name(node) in UNDERSTOOD else _parts(node)
        if parts is None:
            order.append(node)
        else:
            made, results = _put(flat.graph, node, parts)
            order += made
            _replace(flat, node, results)
    left = set(flat.graph.nodes)
    flat.nodes = [node for node in order if node in left]
    return flat


def _parts(node: fx.Node) -> fx.Graph | None:
    """The ops that one comes down to, of its tensor operands in order; None where that is no better."""
    if not is_aten(node) or info(node).random or not operands(node):
        return None
    numbers = {operand: i for i, operand in enumerate(dict.fromkeys(operands(node)))}

    def computed(*given: Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given[numbers[n]])
        return node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]

    metas = [info(operand).meta for operand in numbers]
    try:
        given = [torch.empty(m.shape, dtype=m.dtype, device="meta", requires_grad=m.needs_grad) for m in metas]
        graph = make_fx(computed)(*given).graph
    except Exception:  # not one of other ops; or these ask for values
        return None
    graph.eliminate_dead_code()
    ops = [part for part in graph.nodes if part.op not in ("placeholder", "output")]
    fits = all(has_rule(op_name(part)) and "device" not in part.kwargs for part in ops)
    return graph if ops and fits else None


def _put(graph: fx.Graph, node: fx.Node, parts: fx.Graph) -> tuple[list[fx.Node], Any]:
    """New nodes before ``node``, and which of them are its results."""
    placeholders = [part for part in parts.nodes if part.op == "placeholder"]
    twins = dict(zip(placeholders, dict.fromkeys(operands(node)), strict=True))
    made: list[fx.Node] = []
    results: Any = None
    for part in parts.nodes:
        if part.op == "output":
            results = fx.map_arg(part.args[0], lambda n: twins[n])
        elif part.op != "placeholder":
            with graph.inserting_before(node):
                twins[part] = graph.node_copy(part, lambda n: twins[n])
            made.append(_described(twins[part], part.meta["val"], node))
    return made, results


def _described(twin: fx.Node, value: Any, like: fx.Node) -> fx.Node:
    outputs: tuple[Meta, ...]
    if is_getitem(twin):
        outputs = (info(twin.args[0]).outputs[twin.args[1]],)  # type: ignore[arg-type,index]
    else:
        flows = gradient_flows(twin)
        values = value if isinstance(value, list | tuple) else (value,)
        outputs = tuple(Meta(tuple(v.shape), v.dtype, flows and differentiable(v.dtype)) for v in values)
    return derive(twin, like, outputs=outputs)


def _replace(flat: Flat, node: fx.Node, results: Any) -> None:
    if isinstance(results, list | tuple):
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            flat.graph.erase_node(user)
    else:
        node.replace_all_uses_with(results)
        flat.loss = results if flat.loss is node else flat.loss
    flat.graph.erase_node(node)
