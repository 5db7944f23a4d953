"""Readable names for the values of a block, from the model's own module names and what a value is used for.

In order of preference: what a consumer says of it (``q``, ``k``, ``v`` of attention, ``logits`` of a loss),
the module whose parameters made it (``q_proj``: ``q``), the value that the op merely changes (``reshape(q)``:
``q``), the op. The stream that runs through the layers is ``h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import fx

from autopar.codegen.aten import packet
from autopar.codegen.function import identifier
from autopar.graph import Block, Model, RuntimeOp, Value, info, is_getitem, is_view, operands
from autopar.passes.vocabulary import vocabulary_calls

STREAM: Final = "h"

_ROLES: Final[dict[str, tuple[str, ...]]] = {
    "scaled_dot_product_attention": ("q", "k", "v", "mask"),
    "attention_with_offset": ("q", "k", "v"),
    "ring_attention": ("q", "k", "v", "mask"),
    "cross_entropy_loss": ("logits", "target"),
    "cross_entropy_sharded": ("logits", "target"),
    "cross_entropy_padded": ("logits", "target"),
    "chunked_cross_entropy": ("h", "weight", "target"),
}
"""What an op's operands are called."""

_SHORT: Final = {
    "scaled_dot_product_attention": "attn",
    "attention_with_offset": "attn",
    "ring_attention": "attn",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "linear": "y",
    "matmul": "y",
    "mm": "y",
    "bmm": "y",
    "pow": "power",
    "sum": "total",
    "max": "top",
    "min": "low",
    "split": "part",
    "split_with_sizes": "part",
    "chunk": "part",
    "unbind": "part",
    "slice": "part",
    "select": "part",
    "cross_entropy_loss": "loss",
    "cross_entropy_sharded": "loss",
    "cross_entropy_padded": "loss",
    "chunked_cross_entropy": "loss",
    "embedding": "embed",
    "embedding_sharded": "embed",
    "embedding_rows": "embed",
    "mean_of_whole": "mean",
    "averaged": "average",
    "masked_scatter_rows": "masked_scatter",
    "arange": "position",
    "dispatch": "rows",
    "dispatch_start": "flight",
    "grouped_linear": "rows",
    "grouped_bias": "rows",
    "combine": "y",
}
"""Names for results of ops that are long, or taken by Python."""

_POWERS: Final = {2: "square", 3: "cube"}
"""Names for results of ``pow``, by a constant exponent."""

_NEW_VALUES: Final = {
    "relu_kept_as_bits": "relu",
    "relu6_kept_as_bits": "relu6",
    "leaky_relu_kept_as_bits": "leaky_relu",
    "hardtanh_kept_as_bits": "hardtanh",
    "threshold_kept_as_bits": "threshold",
    "max_pool2d_kept_as_places": "max_pool2d",
    "route": "routing",
    "dispatch_end": "rows",
}
"""Runtime functions of one tensor that do more than change it, and the names of their results."""

_CHANGES: Final = {"pad", "clone", "dropout", "masked_fill"}
"""Ops, beside views, whose result is still called what it was."""


def short(module: str) -> str:
    """``q`` for ``self_attn.q_proj``, ``fc`` for ``mlp.c_fc``, ``norm`` for ``input_layernorm``."""
    last = module.rsplit(".", 1)[-1]
    last = last.removeprefix("c_").removesuffix("_proj")
    return "norm" if "norm" in last.lower() else identifier(last.lower())


def carried(node: fx.Node) -> fx.Node | None:
    """The operand that ``node`` only changes: by a view, a collective, a cast, dropout, an added bias."""
    found = operands(node)
    if node.op != "call_function" or not found:
        return None
    if isinstance(node.target, RuntimeOp):
        return found[0] if len(found) == 1 and str(node.target) not in _NEW_VALUES else None
    if is_getitem(node) or len(info(node).outputs) > 1:
        return None
    if is_view(node) or packet(node) in _CHANGES:
        part = info(node).meta.numel < info(found[0]).meta.numel
        return None if part and len(found[0].users) > 1 else found[0]
    if packet(node) == "add" and len(found) == 2:
        return _without_bias(found[0], found[1]) or _without_bias(found[1], found[0])
    return None


def _without_bias(bias: fx.Node, other: fx.Node) -> fx.Node | None:
    return other if info(source(bias)).role == "parameter" and info(source(other)).role != "parameter" else None


def source(node: fx.Node) -> fx.Node:
    """``node`` before collectives: the parameter behind ``all_gather(parameter)``."""
    while isinstance(node.target, RuntimeOp) and len(operands(node)) == 1:
        node = operands(node)[0]
    return node


def bases(block: Block, inputs: Mapping[fx.Node, str], outputs: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """The name that each input and op result would like, given those of some inputs and outputs."""
    wanted = _wanted(block, outputs)
    found: dict[fx.Node, str] = {}
    for node in block.inputs:
        found[node] = inputs.get(node) or wanted.get(node) or identifier(info(node).name)
    for node in block.ops:
        found[node] = wanted.get(node) or _forward(node, found)
    return found


def roles(block: Block) -> dict[fx.Node, str]:
    """Names that consumers inside the block have for its inputs."""
    wanted = _wanted(block, {})
    return {node: wanted[node] for node in block.inputs if node in wanted}


def _forward(node: fx.Node, found: Mapping[fx.Node, str]) -> str:
    before = carried(node)
    if before is not None:
        return found.get(before) or short(info(source(before)).name or "value")
    if is_getitem(node):
        return found[operands(node)[0]]
    if packet(node) in ("add", "sub"):
        shape = info(node).meta.shape
        if any(found.get(o) == STREAM and info(o).meta.shape == shape for o in operands(node)):
            return STREAM
    if packet(node) == "sum" and info(operands(node)[0]).meta.dtype == torch.bool:
        return "count"
    if packet(node) == "pow" and node.args[1] in _POWERS:
        return _POWERS[node.args[1]]  # type: ignore[index]
    return (_SHORT | _NEW_VALUES).get(packet(node)) or identifier(packet(node))


def _wanted(block: Block, outputs: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Names from behind: outputs, roles, modules; each passed on to the value that was only changed."""
    wanted = dict(outputs)
    modules = _module_results(block)
    for node in reversed(block.ops):
        for operand, role in zip(_role_operands(node), _ROLES.get(packet(node), ()), strict=False):
            if operand is not None:
                wanted.setdefault(operand, role)
        parts = {wanted.get(user, "") for user in node.users if is_view(user)}
        if len(parts) == len(node.users) > 1 and parts <= {"q", "k", "v"}:
            wanted[node] = "".join(sorted(parts, key="qkv".index))
        if node in modules:
            wanted.setdefault(node, modules[node])
        before = operands(node)[0] if node in wanted and len(info(node).outputs) > 1 else carried(node)
        if before is not None and node in wanted and _only_for(before, node):
            wanted.setdefault(before, wanted[node])
    return wanted


def _only_for(value: fx.Node, user: fx.Node) -> bool:
    return list(value.users) == [user] and (value.op != "placeholder" or info(value).role == "input")


def _role_operands(node: fx.Node) -> list[fx.Node | None]:
    return [a if isinstance(a, fx.Node) else None for a in node.args]


def _module_results(block: Block) -> dict[fx.Node, str]:
    """The last op of every module that has parameters of its own -> the module's short name."""
    owners = {info(node).module for node in block.ops if reads_parameter(node)} - {""}
    last = {info(node).module: node for node in block.ops if source(node) is node}
    return {node: short(module) for module, node in last.items() if module in owners}


def reads_parameter(node: fx.Node) -> bool:
    return any(info(source(o)).role == "parameter" for o in operands(node))


def value_names(model: Model) -> dict[Value, str]:
    """The names of values that pass between calls, the same on both sides."""
    names: dict[Value, str] = {model.loss: "loss"}
    if (split := vocabulary_calls(model)) is not None:
        names.setdefault(Value(split.head, 0), "entropy")
    tables: dict[int, dict[fx.Node, str]] = {}
    said = {number: roles(block) for number, block in enumerate(model.blocks)}
    for call in model.calls:
        block = model.block_of(call)
        for node, value in zip(block.inputs, call.operands, strict=True):
            if node in said[call.block] and not info(node).meta.needs_grad:
                names.setdefault(value, said[call.block][node])
    for index, call in enumerate(model.calls):
        block = model.block_of(call)
        given = tables.setdefault(call.block, {})
        if not given:
            fixed = {n: names[Value(index, k)] for k, n in enumerate(block.outputs) if Value(index, k) in names}
            given.update(bases(block, {}, fixed))
        for k, node in enumerate(block.outputs):
            plain = STREAM if info(node).meta.needs_grad else given.get(node, "x")
            names.setdefault(Value(index, k), plain)
    return names
