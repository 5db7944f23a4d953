"""Which ops of a captured graph count: those that the loss depends on, and those that leave something in a buffer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.graph import AVERAGED, Info, info, is_aten, op_name
from autopar.source_lines import line_of_trace

Memory = Mapping[fx.Node, frozenset[int]]
"""A number for each piece of memory that a node's tensors lie in; tensors of one number share it."""


def memory_of(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """The memory of every node's tensors, as eager execution has it: fake tensors share storage just as real ones."""
    numbers: dict[torch.UntypedStorage, int] = {}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        tensors = [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor)]
        found[node] = frozenset(numbers.setdefault(t.untyped_storage(), len(numbers)) for t in tensors)
    return found


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the op writes to, as its schema says."""
    if not is_aten(node):
        return []
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    marked = [(i, a.name) for i, a in enumerate(schema) if a.alias_info is not None and a.alias_info.is_write]
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in marked]
    found: list[fx.Node] = []
    fx.map_arg(tuple(given), found.append)
    return found


def live_of_loss(graph: fx.Graph, loss: fx.Node, memory: Memory, constants: Collection[str]) -> list[fx.Node]:
    """The ops that the loss depends on, in order (drops logits, caches and metadata asserts).

    A write in place is one of them if something live reads that memory after it. A write to a parameter, a buffer or
    a batch tensor that anything live reads is refused: the next step would see it. Writes to other buffers of numbers
    (averages that the model keeps) are live too; what else nothing reads (a counter of batches) is left as it is.
    ``constants`` are literals in the model's code, of which what is written to is a copy.
    """
    found = live(list(graph.nodes), loss, memory)
    read = {number for n in (loss, *found) for o in n.all_input_nodes for number in memory[o]}
    outside = [n for n in graph.nodes if n.op == "placeholder" and info(n).name not in constants]
    owners = {number: n for n in outside for number in memory[n]}
    for node in graph.nodes:
        for number in (number for o in written_operands(node) for number in memory[o] & read):
            if number in owners:
                raise _refused_write(node, info(owners[number]))
    kept = {number for number, owner in owners.items() if is_kept(owner)}
    return list(live(list(graph.nodes), loss, memory, kept)) if kept else list(found)


def is_kept(node: fx.Node) -> bool:
    """Whether it is a buffer of which writes outlive the step."""
    return info(node).role == "buffer" and info(node).meta.dtype.is_floating_point


def _refused_write(node: fx.Node, owner: Info) -> CaptureError:
    kind = "batch tensor" if owner.role == "input" else owner.role
    made: Any = node.args[1] if op_name(node) == "aten.copy_.default" else node  # what is assigned is copied later
    line = line_of_trace(getattr(made, "meta", {}).get("stack_trace") or "")
    return CaptureError(
        f"{op_name(node)} at {line} changes {kind} {owner.name!r} in place, or a view of it, which outlives the step; "
        "change a copy (x = x.clone()), or write it out of place (x = x + y instead of x += y)"
        + ("; a layer of torch's that does so, as spectral_norm, doesn't in eval()" if owner.role == "buffer" else "")
    )


def live(nodes: Sequence[fx.Node], loss: fx.Node, memory: Memory, kept: Collection[int] = ()) -> dict[fx.Node, None]:
    """The ops among ``nodes`` (in order) that ``loss`` depends on, through operands or through what they write; those
    that leave something in ``kept`` memory, or in a buffer (:data:`autopar.graph.AVERAGED`)."""
    needed: set[fx.Node] = {loss, *(node for node in nodes if node.target is AVERAGED)}
    read = {*memory.get(loss, ()), *kept}
    for node in reversed(nodes):
        if any(memory[operand] & read for operand in written_operands(node)):
            needed.add(node)
        if node in needed:
            needed.update(node.all_input_nodes)
            read.update(number for operand in node.all_input_nodes for number in memory.get(operand, ()))
    return {n: None for n in nodes if n in needed and n.op == "call_function"}
