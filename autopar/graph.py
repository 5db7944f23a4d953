"""The IR: a model as calls of distinct blocks, each block one small ``torch.fx`` graph with typed metadata.

A real model repeats itself, so it is kept folded: a :class:`Block` is one distinct piece of code (a decoder
layer, the embedding, the head with the loss), a :class:`Call` one occurrence with its own parameters. Passes
rewrite blocks; what depth costs is one ``Call`` per layer.

This file is the only one that knows ``node.meta`` keys: use :func:`info`, :func:`set_info`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from autopar.errors import GraphError
from autopar.spmd import Type

_KEY = "autopar"
INPUT_CALL = -1  # Value.call of a tensor of the batch


@dataclass(frozen=True)
class Meta:
    """A tensor's shape (of one microbatch, local to the axes solved so far), dtype, and whether it has a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class Choice:
    """What an op does on one axis: the type each tensor operand is taken as, the result's type, its form.

    ``form`` names a special implementation registered beside the rule ("" for the op itself).
    """

    operands: tuple[Type, ...]
    result: Type
    form: str = ""

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.operands))} -> {self.result}".lstrip()
        return f"{text} [{self.form}]" if self.form else text


@dataclass(frozen=True)
class Autocast:
    """A region of the model's code under ``torch.autocast``; ``device`` "" means whichever the model runs on."""

    device: str
    dtype: torch.dtype
    enabled: bool


@dataclass
class Info:
    """Metadata of one node. ``outputs`` has one entry, or one per element of a tuple result."""

    outputs: tuple[Meta, ...]
    module: str = ""  # path of the innermost nn.Module, relative to the block
    source: str = ""  # file.py:line of the user's code
    role: str = ""  # placeholders: "parameter", "buffer" or "input"
    name: str = ""  # placeholders: parameter path relative to the block, or a readable name
    random: bool = False
    choices: dict[str, Choice] = field(default_factory=dict)  # axis -> choice
    autocast: tuple[Autocast, ...] = ()  # the regions it is in, outermost first; of the captured graph only
    imbalance: float = 1.0  # how many times its share the rank with the most of a ragged value has
    likely: float = 1.0  # the part of its rows that there likely is, of an expert that is routed to by itself
    is_object: bool = False  # the value is no tensor: ``outputs`` only says how it can be split, and nothing changes it

    @property
    def meta(self) -> Meta:
        return self.outputs[0]

    def types(self) -> dict[str, Type]:
        return {axis: choice.result for axis, choice in self.choices.items()}

    @property
    def row_share(self) -> float:
        """How many times its rows the rank with the most of them likely has."""
        is_uneven = self.imbalance != 1.0 and any(choice.result.is_ragged for choice in self.choices.values())
        return self.likely * (self.imbalance if is_uneven else 1.0)


def info(node: fx.Node) -> Info:
    try:
        found: Info = node.meta[_KEY]
    except KeyError:
        raise GraphError(f"node {node.name} ({node.target}) carries no metadata") from None
    return found


def set_info(node: fx.Node, value: Info) -> fx.Node:
    node.meta = {_KEY: value}
    return node


def derive(node: fx.Node, like: fx.Node, **changes: Any) -> fx.Node:
    """Give ``node`` the metadata of ``like`` with ``changes``; for nodes that a pass puts in."""
    return set_info(node, replace(info(like), **{"choices": {}, **changes}))


@dataclass(frozen=True)
class AxisRef:
    """A mesh axis as an argument of a node; the emitted text names the axis object there.

    Once a graph is local to the axis, with its ``size`` and whether shards are ``paired`` parts.
    """

    name: str
    size: int = 1
    paired: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class ElementOps:
    """Ops on each element of a tensor as an argument of a node; the emitted text has a function there.

    ``graph``: one placeholder, ops that read it or each other (and constants), one result.
    """

    graph: fx.Graph

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "output":
                break
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = x if node.op == "placeholder" else node.target(*args, **kwargs)
        return values[self.result]  # type: ignore[no-any-return]

    @property
    def result(self) -> fx.Node:
        made: fx.Node = next(iter(reversed(self.graph.nodes))).all_input_nodes[0]
        return made

    def __str__(self) -> str:
        """``aten.div.Tensor(z, 5); aten.tanh.default(div)``."""
        return "; ".join(f"{op_name(n)}({_args_text(n)})" for n in self.graph.nodes if n.op == "call_function")


@dataclass(frozen=True)
class RuntimeOp:
    """A function of ``autopar.runtime`` as the target of a node: a collective, or an op's sharded form.

    The compiler never runs it; the emitted text imports it by name.
    """

    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(f"{self.__name__} runs in emitted code only")

    def __str__(self) -> str:
        return self.__name__


_ELEMENTWISE: Final = ("aten.clone.default", "aten.to.dtype", "aten._to_copy.default", "aten.dropout.default")
"""Beside those that torch calls pointwise."""

_UNSET: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

AVERAGED: Final = RuntimeOp("averaged")
"""Moves a buffer, a running average, towards a value; nothing needs to read what it returns."""


def is_aten(node: fx.Node) -> bool:
    """Whether the node calls a registered operator (with a schema), not a Python function."""
    return isinstance(node.target, torch._ops.OpOverload)


def is_view(node: fx.Node) -> bool:
    """Whether the result aliases an operand, as the op's schema says: it costs nothing, and sees writes."""
    if not is_aten(node):
        return is_getitem(node)
    schema = node.target._schema  # type: ignore[union-attr]
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def is_elementwise(node: fx.Node) -> bool:
    """Whether it computes each element alone: torch says so of the op, but of copies and dropout."""
    if not is_aten(node):
        return False
    return torch.Tag.pointwise in node.target.tags or op_name(node) in _ELEMENTWISE  # type: ignore[union-attr]


def is_mutating(node: fx.Node) -> bool:
    """Whether the op writes to an operand."""
    return is_aten(node) and bool(node.target._schema.is_mutable)  # type: ignore[union-attr]


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of an ATen op by their schema names, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def is_unset(node: fx.Node) -> bool:
    """Whether the result is memory that nothing was written to yet."""
    return is_aten(node) and op_name(node).split(".")[1] in _UNSET


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a generator as it is called here (dropout with p = 0 doesn't)."""
    if not is_aten(node) or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    given = arguments(node)
    is_idle = given.get("train", given.get("training")) is False
    return not is_idle and all(given.get(name) != 0 for name in ("p", "dropout_p", "dropout"))


def aten_overload(name: str) -> Any | None:
    """The overload that :func:`op_name` calls ``aten.reshape.default``; None for another kind of name."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten":
        return None
    return getattr(getattr(torch.ops.aten, parts[1]), parts[2])


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands in order of appearance, one entry per use (``mul(x, x)`` has two)."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def op_name(node: fx.Node) -> str:
    """``aten.mm.default`` for an ATen op, else the function's name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target.__name__}"
    return getattr(target, "__name__", str(target))


def where(node: fx.Node) -> str:
    """How an error names a node: op, module and the user's source line."""
    data = info(node)
    place = f" in {data.module}" if data.module else ""
    line = f" at {data.source}" if data.source else ""
    return f"{op_name(node) if node.op == 'call_function' else node.name}{place}{line}"


def short_dtype(dtype: torch.dtype) -> str:
    """``f32``, ``bf16``, ``i64``, ``bool``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


@dataclass(frozen=True)
class Value:
    """Output ``output`` of call ``call``; with ``call == INPUT_CALL``, tensor ``output`` of the batch."""

    call: int
    output: int


@dataclass
class Block:
    """One distinct piece of the model.

    ``graph``: parameter and buffer placeholders first (in order of ``Call.parameters``), then inputs (in order of
    ``Call.operands``), then ops, then ``output`` of a tuple of nodes. ``kind`` is "layer" (a repeatable module),
    "glue" (code between them) or "tables" (computed from the batch alone, so any stage can compute it);
    "vocabulary" and "tail" belong to no stage (:mod:`autopar.passes.split_vocabulary`).
    """

    name: str
    kind: str
    graph: fx.Graph

    def placeholders(self, *roles: str) -> list[fx.Node]:
        nodes = self.graph.find_nodes(op="placeholder")
        return [node for node in nodes if not roles or info(node).role in roles]

    @property
    def parameters(self) -> list[fx.Node]:
        return self.placeholders("parameter", "buffer")

    @property
    def inputs(self) -> list[fx.Node]:
        return self.placeholders("input")

    @property
    def ops(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function"]

    @property
    def outputs(self) -> list[fx.Node]:
        node = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        return list(node.args[0])

    def handed_on(self) -> list[int]:
        """Positions of the parameters that what the block returns shares memory with, as a view of one does."""
        memory = {node: {position} for position, node in enumerate(self.parameters)}
        for node in self.ops:
            if is_view(node) or isinstance(node.target, RuntimeOp):  # changes of type may hand on what they are given
                memory[node] = {position for operand in operands(node) for position in memory.get(operand, ())}
        return sorted({position for output in self.outputs for position in memory.get(output, ())})


@dataclass(frozen=True)
class Call:
    """One occurrence of a block: ``parameters`` are full names, ``operands`` where the inputs come from."""

    block: int
    path: str
    parameters: tuple[str, ...]
    operands: tuple[Value, ...]


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter or buffer of the model under its first name; ``aliases`` are its other names (tied weights).

    ``meta.dtype`` is what is computed with, ``master`` what is trained and stored (None: the same). ``stacked``: the
    model's own names of parameters that are one here, along dim 0; ``skips``: the model's code passes over those of
    experts without tokens, which then have no gradient (else it is zero).
    """

    name: str
    meta: Meta
    aliases: tuple[str, ...] = ()
    trainable: bool = True
    is_buffer: bool = False
    master: torch.dtype | None = None
    stacked: tuple[str, ...] = ()
    skips: bool = False


@dataclass(frozen=True)
class InputInfo:
    """A tensor of the batch: ``path`` in the call (``input_ids``, ``0``), global meta, batch dim or None, and the dim
    along which a sequence lies or None."""

    name: str
    path: str
    meta: Meta
    batch_dim: int | None
    seq_dim: int | None = None


@dataclass
class Model:
    """A captured model: blocks, their calls in order, its parameters by name, the batch, and the loss.

    ``remarks``: what a plan should say of how the model was read. ``packs``: it keeps documents in a row apart by the
    positions that a batch gives its tokens.
    """

    name: str
    blocks: list[Block]
    calls: list[Call]
    parameters: dict[str, ParameterInfo]
    inputs: list[InputInfo]
    loss: Value
    batch_size: int
    fingerprint: str = ""
    remarks: list[str] = field(default_factory=list)
    packs: bool = False

    def block_of(self, call: Call) -> Block:
        return self.blocks[call.block]

    def counts(self) -> list[int]:
        """How often each block is called."""
        counts = [0] * len(self.blocks)
        for call in self.calls:
            counts[call.block] += 1
        return counts

    def edges(self) -> dict[tuple[int, int, int, int], int]:
        """(producer block, output, consumer block, input) -> how often; producer INPUT_CALL is the batch."""
        found: dict[tuple[int, int, int, int], int] = {}
        for call in self.calls:
            for position, value in enumerate(call.operands):
                source = INPUT_CALL if value.call == INPUT_CALL else self.calls[value.call].block
                key = (source, value.output, call.block, position)
                found[key] = found.get(key, 0) + 1
        return found

    def handed_on(self) -> frozenset[str]:
        """Parameters of which a call hands on views to others."""
        positions = {number: self.blocks[number].handed_on() for number in {call.block for call in self.calls}}
        return frozenset(call.parameters[at] for call in self.calls for at in positions[call.block])

    def copy(self) -> Model:
        """Another model with the same content: passes on one leave the other as it is."""
        return replace(
            self,
            blocks=[replace(block, graph=copied(block.graph)[0]) for block in self.blocks],
            calls=list(self.calls),
            parameters=dict(self.parameters),
            inputs=list(self.inputs),
            remarks=list(self.remarks),
        )

    def __str__(self) -> str:
        return "\n".join(_print_model(self))


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The same graph again with metadata of its own, and the new node of each."""
    made = fx.Graph()
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        twin = made.node_copy(node, twins.__getitem__)
        twins[node] = twin
        if _KEY in node.meta:
            set_info(twin, replace(info(node), choices=dict(info(node).choices)))
    return made, twins


def _print_model(model: Model) -> Iterator[str]:
    yield f"{model.name}: {len(model.calls)} calls of {len(model.blocks)} blocks, batch {model.batch_size}"
    for call_index, call in enumerate(model.calls):
        operand_text = ", ".join(_value_text(model, v) for v in call.operands)
        yield f"  %{call_index} = {model.block_of(call).name}[{call.path}]({operand_text})"
    for block in model.blocks:
        yield print_block(block)


def _value_text(model: Model, value: Value) -> str:
    return model.inputs[value.output].name if value.call == INPUT_CALL else f"%{value.call}.{value.output}"


def print_block(block: Block) -> str:
    """One line per node: name, op, operands, shape, types."""
    lines = [f"block {block.name} ({block.kind})"]
    for node in block.graph.nodes:
        if node.op == "output":
            lines.append(f"  return {', '.join(n.name for n in block.outputs)}")
            continue
        data = info(node)
        shapes = ", ".join(map(str, data.outputs))
        types = " ".join(f"{choice}@{axis}" for axis, choice in data.choices.items())
        what = data.role if node.op == "placeholder" else f"{op_name(node)}({_args_text(node)})"
        lines.append(f"  {node.name} = {what}  {shapes}  {types}".rstrip())
    return "\n".join(lines)


def _args_text(node: fx.Node) -> str:
    parts = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    return ", ".join(parts)


def verify(model: Model, after: str) -> None:
    """Check what every pass must keep. Raises GraphError naming the pass, the node and the rule broken."""
    for block in model.blocks:
        _verify_block(block, after)
    counts = [(len(block.inputs), len(block.parameters)) for block in model.blocks]
    for index, call in enumerate(model.calls):
        inputs, parameters = counts[call.block]
        _require(len(call.operands) == inputs, after, call.path, "one operand per block input")
        _require(len(call.parameters) == parameters, after, call.path, "one name per block parameter")
        for value in call.operands:
            _require(value.call < index, after, call.path, "operands come from earlier calls")
        for name in call.parameters:
            _require(name in model.parameters, after, name, "parameters are known to the model")


def _verify_block(block: Block, after: str) -> None:
    seen: set[fx.Node] = set()
    for node in block.graph.nodes:
        for operand in node.all_input_nodes:
            _require(operand in seen, after, node.name, "operands are defined before use")
        seen.add(node)
        if node.op == "output":
            continue
        _require(node.op in ("placeholder", "call_function"), after, node.name, "only placeholders and functions")
        data = info(node)
        for choice in data.choices.values():
            if node.op == "call_function":
                count = len(operands(node))
                _require(len(choice.operands) == count, after, node.name, "one operand type per tensor operand")


def _require(holds: bool, after: str, node: str, rule: str) -> None:
    if not holds:
        raise GraphError(f"after pass {after}: {node}: {rule}")
