"""recut: other borders between a model's calls; what is computed stays the same.

:func:`merge_calls` makes one call of the last ones, :func:`split_call` several of one. The given model stays as it is,
its other blocks and calls are kept, and operands are renumbered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.graph import INPUT_CALL, Block, Call, Info, Model, Value, info, set_info


@dataclass(frozen=True)
class Piece:
    """What becomes a call of its own: ops of the block that is split; none: there is no such call.

    An op may be in several pieces, each of which then computes it.
    """

    name: str
    kind: str
    nodes: frozenset[fx.Node]


def merge_calls(model: Model, first: int, name: str) -> Model:
    """Call ``first`` and all after it become one, of "glue". None of them computes tables."""
    merged = model.calls[first:]
    names = list(dict.fromkeys(name for call in merged for name in call.parameters))
    values = list(dict.fromkeys(v for call in merged for v in call.operands if v.call < first))
    graph = fx.Graph()
    parameters = {n: _placeholder(graph, _known(model, merged, n), n) for n in names}
    made = {v: _placeholder(graph, _taken(model, merged, v)) for v in values}
    for index, call in enumerate(merged, first):
        block = model.block_of(call)
        env = dict(zip(block.parameters, (parameters[n] for n in call.parameters), strict=True))
        env |= dict(zip(block.inputs, (made[v] for v in call.operands), strict=True))
        for node in block.ops:
            module = ".".join(filter(None, (call.path, info(node).module)))
            env[node] = _copy(graph, node, env, module)
        made |= {Value(index, k): env[node] for k, node in enumerate(block.outputs)}
    graph.output((made[model.loss],))
    blocks = [*model.blocks, Block(name, "glue", graph)]
    calls = [*model.calls[:first], Call(len(model.blocks), "", tuple(names), tuple(values))]
    return _tidied(replace(model, blocks=blocks, calls=calls, loss=Value(first, 0)))


def split_call(model: Model, index: int, pieces: Sequence[Piece]) -> Model:
    """Call ``index`` becomes a call for each piece, in their order, in which each takes what those before it make."""
    call, block = model.calls[index], model.block_of(model.calls[index])
    origin: dict[fx.Node, Value] = dict(zip(block.inputs, call.operands, strict=True))
    names = dict(zip(block.parameters, call.parameters, strict=True))
    blocks, calls = list(model.blocks), list(model.calls[:index])
    for position, piece in enumerate(pieces):
        if not piece.nodes:
            continue
        outputs = _outputs(block, piece, pieces[position + 1 :], origin)
        made, parameters, inputs = _cut(block, piece, outputs)
        path = call.path if piece.kind == "layer" else ""
        calls.append(Call(len(blocks), path, tuple(names[p] for p in parameters), tuple(origin[i] for i in inputs)))
        blocks.append(made)
        origin |= {node: Value(len(calls) - 1, k) for k, node in enumerate(outputs)}
    grown = len(calls) - 1 - index

    def moved(value: Value) -> Value:
        if value.call == index:
            return origin[block.outputs[value.output]]
        return Value(value.call + grown, value.output) if value.call > index else value

    rest = [replace(c, operands=tuple(map(moved, c.operands))) for c in model.calls[index + 1 :]]
    return _tidied(replace(model, blocks=blocks, calls=[*calls, *rest], loss=moved(model.loss)))


def closure(nodes: Iterable[fx.Node], *, without: Collection[fx.Node] = ()) -> frozenset[fx.Node]:
    """All ops that ``nodes`` depend on, themselves included; nothing in or behind ``without``."""
    found: set[fx.Node] = set()
    waiting = [n for n in nodes if n not in without]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            waiting += [n for n in node.all_input_nodes if n not in without]
    return frozenset(found)


def _cut(block: Block, piece: Piece, outputs: Sequence[fx.Node]) -> tuple[Block, list[fx.Node], list[fx.Node]]:
    """The piece as a block, and what stands for its parameters and inputs in ``block``."""
    nodes = [n for n in block.ops if n in piece.nodes]
    outside = dict.fromkeys(o for n in nodes for o in n.all_input_nodes if o not in piece.nodes)
    parameters = [n for n in outside if info(n).role in ("parameter", "buffer")]
    inputs = [n for n in outside if n not in parameters]
    graph = fx.Graph()
    env = {n: _placeholder(graph, n) for n in (*parameters, *inputs)}
    for node in nodes:
        env[node] = _copy(graph, node, env, info(node).module)
    graph.output(tuple(env[n] for n in outputs))
    return Block(piece.name, piece.kind, graph), parameters, inputs


def _outputs(block: Block, piece: Piece, later: Sequence[Piece], made: Collection[fx.Node]) -> list[fx.Node]:
    """What later pieces or other calls take of this one, and no piece before makes."""
    wanted = set(block.outputs)
    for other in later:
        wanted |= {o for n in other.nodes for o in n.all_input_nodes if o not in other.nodes}
    return [n for n in block.ops if n in piece.nodes and n in wanted and n not in made]


def _placeholder(graph: fx.Graph, like: fx.Node, name: str = "") -> fx.Node:
    """A parameter of ``like``'s kind (full ``name``), or an input for its value."""
    data = info(like)
    role = data.role if data.role in ("parameter", "buffer") else "input"
    named = name or data.name or like.name
    node = graph.placeholder(f"{role[0]}_{named}".replace(".", "_"))
    return set_info(node, Info(data.outputs, role=role, name=named))


def _copy(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node], module: str) -> fx.Node:
    return set_info(graph.node_copy(node, lambda n: env[n]), replace(info(node), module=module, choices={}))


def _known(model: Model, calls: Sequence[Call], name: str) -> fx.Node:
    """A placeholder of the parameter."""
    call = next(c for c in calls if name in c.parameters)
    return model.block_of(call).parameters[call.parameters.index(name)]


def _taken(model: Model, calls: Sequence[Call], value: Value) -> fx.Node:
    """An input that takes the value."""
    call = next(c for c in calls if value in c.operands)
    return model.block_of(call).inputs[call.operands.index(value)]


def _tidied(model: Model) -> Model:
    """Blocks in the order of their first calls, without those that have none."""
    order = list(dict.fromkeys(call.block for call in model.calls))
    place = {old: new for new, old in enumerate(order)}
    calls = [replace(call, block=place[call.block]) for call in model.calls]
    return replace(model, blocks=[model.blocks[old] for old in order], calls=calls)


def is_batch(model: Model, value: Value) -> bool:
    """Whether the value depends on nothing but the batch, buffers and constants."""
    return value.call == INPUT_CALL or model.block_of(model.calls[value.call]).kind == "tables"
