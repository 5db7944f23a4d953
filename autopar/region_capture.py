"""``no_grad`` and autocast regions of a captured graph become plain ops of it.

What enters a no_grad region is detached. What leaves it as it came in is not: ``x.to(x.dtype)`` is ``x`` itself, so
that tracing takes later uses of ``x`` to be uses of what the region returned, and these have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from autopar.graph import Autocast, is_mutating, op_name

Regions = dict[fx.Node, tuple[Autocast, ...]]
"""The autocast regions that an op is in, outermost first."""


def inline_regions(module: fx.GraphModule, graph: fx.Graph, device: str) -> Regions:
    """Put the ops of all regions of ``graph``, which is ``module``'s, in their places.

    Returns the autocast regions of each op that is in one; those of ``device``, the model's, are of any device.
    """
    regions: Regions = {}
    _inline_each(module, graph, list(graph.nodes), device, regions)
    return regions


def _inline_each(
    module: fx.GraphModule, graph: fx.Graph, nodes: Sequence[fx.Node], device: str, regions: Regions
) -> None:
    for node in nodes:
        kind = op_name(node) if node.op == "call_function" else ""
        around = regions.pop(node, ())
        if kind == "wrap_with_set_grad_enabled":
            enabled, region, *values = node.args
            copied = _inline(module, graph, node, region, values, detach=not enabled)
        elif kind == "wrap_with_autocast":
            name, dtype, on, _cache, region, *values = node.args
            lower = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(str(name))
            around = (*around, Autocast("" if name == device else str(name), lower, bool(on)))
            copied = _inline(module, graph, node, region, values, detach=False)
        else:
            if around:
                regions[node] = around
            continue
        regions |= dict.fromkeys(copied, around) if around else {}
        _inline_each(getattr(module, region.target), graph, copied, device, regions)  # type: ignore[union-attr,arg-type]
        if not region.users:  # type: ignore[union-attr]
            graph.erase_node(region)  # type: ignore[arg-type]


def _inline(
    module: fx.GraphModule, graph: fx.Graph, node: fx.Node, region: Any, values: list[Any], *, detach: bool
) -> list[fx.Node]:
    """Put the ops of a region in the place of ``node``; returns them."""
    inner = getattr(module, region.target)
    env: dict[fx.Node, Any] = {}
    given: dict[fx.Node, Any] = {}
    copied: list[fx.Node] = []
    waiting = iter(values)
    results: Any = ()
    with graph.inserting_before(node):
        for child in inner.graph.nodes:
            if child.op == "placeholder":
                given[child] = next(waiting)
                env[child] = _detached(graph, given[child]) if detach else given[child]
            elif child.op == "output":
                left = fx.map_arg(child.args[0], _as_it_came)
                results = fx.map_arg(left, lambda n: given.get(n, env[n]))
            else:
                env[child] = graph.node_copy(child, lambda n: env[n])
                copied.append(env[child])
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    return copied


def _as_it_came(node: fx.Node) -> fx.Node:
    """The tensor that ``node`` is: ops that have nothing to do return what they are given."""
    while node.op == "call_function" and isinstance(first := next(iter(node.args), None), fx.Node):
        if not _returns_first(node, first):
            break
        node = first
    return node


def _returns_first(node: fx.Node, first: fx.Node) -> bool:
    """Whether it returns its first operand itself, tried on tensors without values where it may."""
    made, given = node.meta.get("val"), first.meta.get("val")
    if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor) or is_mutating(node):
        return False
    if (made.dim(), made.dtype, made.device) != (given.dim(), given.dtype, given.device):
        return False
    if not all(statically_known_true(a == b) for a, b in zip(made.shape, given.shape, strict=True)):
        return False  # of sizes that depend on values, some aren't known
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return node.target(*args, **kwargs) is given  # type: ignore[operator]


def _detached(graph: fx.Graph, value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node
