"""chunk_head: the head becomes one op, which computes its logits and their loss in chunks of tokens.

Guarantees: equal loss and gradients; no tensor of tokens x vocabulary is made, forward or backward. The product with
the table, ops on rows behind it (which go before it: they commute), its bias, ops on single elements of the logits and
the cross entropy are one ``chunked_cross_entropy``, whose backward computes a chunk's logits again
(:mod:`autopar.runtime.chunked_entropy`). Example: ``cross_entropy(reshape(5 * tanh(linear(x, w) / 5), [t, v]), y)``
becomes ``chunked_cross_entropy(x, w, y, chunks=8, logits=lambda z: 5 * tanh(z / 5))``. It runs before axes are solved,
so that the solver splits tokens and classes. A head that is split over the pipeline is no op of a graph then: the
runtime computes that one in chunks (:mod:`autopar.runtime.chunked_logits`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from autopar.errors import ArgumentError, StageError
from autopar.graph import ElementOps, Model, RuntimeOp, arguments, derive, info, op_name, operands, set_info, verify
from autopar.passes.find_head import drop_dead, find_head
from autopar.passes.logits import Logits, entropy_options, reshaped, table, tokens
from autopar.rules.chunked import CHUNKED


def chunk_head(model: Model, chunks: int) -> Model:
    """The head of a canonical model in ``chunks`` parts of a microbatch's tokens; the given model stays as it is.

    Raises ArgumentError where it has no head that can be computed so, naming the op.
    """
    try:
        made, index, head = find_head(model)
    except StageError as error:
        raise ArgumentError(
            f"head_chunks={chunks}: the head can't be computed in chunks: {error}; head_chunks=1 computes it whole"
        ) from error
    _replace(head, chunks)
    drop_dead(made.block_of(made.calls[index]))
    verify(made, "chunk_head")
    return made


def _replace(head: Logits, chunks: int) -> None:
    entropy = head.entropy
    graph, given = entropy.graph, arguments(entropy)
    with graph.inserting_before(entropy):
        x = tokens(graph, head)
        if _before(x) is head.x:
            x = head.x  # the op flattens by itself; slices of rows are copied by an op of their own, for all to see
        lead = info(x).meta.shape[:-1]
        target = _before(given["target"])
        target = target if info(target).meta.shape == lead else reshaped(graph, given["target"], lead)
        weight, bias = table(graph, head)
        taken = (x, weight, target) if bias is None else (x, weight, target, bias)
        made = graph.call_function(RuntimeOp(CHUNKED), taken, _options(head, chunks))
        shape = lead if given["reduction"] == 0 else ()
        derive(made, entropy, outputs=(replace(info(entropy).meta, shape=shape),))
        result = reshaped(graph, made, info(entropy).meta.shape)
    entropy.replace_all_uses_with(result)


def _before(node: fx.Node) -> fx.Node:
    """What is only reshaped to ``node``."""
    return operands(node)[0] if op_name(node) == "aten.reshape.default" else node


def _options(head: Logits, chunks: int) -> dict[str, Any]:
    """Named arguments of the op; what is as it is by default is left out."""
    named: dict[str, Any] = {"chunks": chunks}
    if head.transposed:
        named["weight_dim"] = 1
    if head.elements:
        named["logits"] = _element_ops(head.elements)
    return named | entropy_options(head.entropy)


def _element_ops(nodes: tuple[fx.Node, ...]) -> ElementOps:
    """The ops, one after another, as a function of the first one's operand."""
    graph = fx.Graph()
    value = set_info(graph.placeholder("z"), info(operands(nodes[0])[0]))
    for node in nodes:
        args = _with_operand(node, value)
        value = set_info(graph.call_function(node.target, args, node.kwargs), info(node))  # type: ignore[arg-type]
    graph.output(value)
    return ElementOps(graph)


def _with_operand(node: fx.Node, value: fx.Node) -> Any:
    """Its arguments, ``value`` in place of its one operand."""
    return fx.map_arg(node.args, lambda _: value)
