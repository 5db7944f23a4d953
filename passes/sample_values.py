"""What a captured graph computes of its sample alone, and of numbers in the model's code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx

from autopar.capture import Flat
from autopar.graph import info, is_aten, is_random, is_unset, operands

_MOST: Final = 1 << 24
"""Elements of the largest tensor that is computed here: indices are numbers of rows, not rows."""
_UNSAID: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Tags of ops whose shapes depend on values, of which the captured graph has others."""


def values_of(flat: Flat, sample: Mapping[str, Tensor], wanted: set[fx.Node]) -> dict[fx.Node, Tensor]:
    """Of those that are ``wanted``, and of what they come from, as far as values are known: of what follows from the
    ``sample`` (the batch's tensors by path) and from numbers in the model's code. Capture runs no op; these run here,
    on the CPU. What depends on parameters isn't known before it runs, nor are values of the meta device."""
    paths = {tensor.name: tensor.path for tensor in flat.inputs}
    known = {
        node: sample[paths[info(node).name]]
        for node in flat.graph.nodes
        if node.op == "placeholder" and info(node).role == "input"
    }
    known = {node: value for node, value in known.items() if value.device.type != "meta"}
    computed = dict.fromkeys(known)
    for node in flat.nodes:
        if _is_computable(node) and all(operand in computed for operand in operands(node)):
            computed[node] = None
    needed = set(wanted)
    for node in reversed(flat.nodes):
        if node in needed and node in computed:
            needed.update(operands(node))
    found = {node: value.cpu() for node, value in known.items() if node in needed}
    for node in flat.nodes:
        if node in needed and node in computed:
            found[node] = _run(node, found)
    return found


def _is_computable(node: fx.Node) -> bool:
    if not is_aten(node) or is_unset(node) or is_random(node):
        return False
    tags = node.target.tags  # type: ignore[union-attr]
    outputs = info(node).outputs
    return len(outputs) == 1 and outputs[0].numel <= _MOST and not any(tag in tags for tag in _UNSAID)


def _run(node: fx.Node, found: Mapping[fx.Node, Tensor]) -> Any:
    """On the CPU, wherever the model is."""

    def value(given: Any) -> Any:
        if isinstance(given, fx.Node):
            return found[given]
        return torch.device("cpu") if isinstance(given, torch.device) else given

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)  # type: ignore[operator]
