"""fold: a flat capture -> a Model of distinct blocks and their calls.

Guarantees: executing the calls in order computes the captured loss; two calls of one block run the same ops on
the same shapes with parameters of the same relative names. Example: 32 Llama layers become one block, 32 calls.

Units are cut at the first numbered component of a module path (``model.layers.3``): children of a ModuleList or
Sequential. Code between two units of one list belongs to the first (``x = x + block(x)``). Other code is "glue";
what glue computes from the batch alone (positions, rotary tables, shifted labels) becomes the block "tables",
which any pipeline stage can compute for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.capture import Flat
from autopar.graph import (
    AVERAGED,
    INPUT_CALL,
    Block,
    Call,
    Info,
    Model,
    Value,
    info,
    op_name,
    operands,
    set_info,
)


@dataclass
class _Unit:
    path: str  # "" for glue
    kind: str
    nodes: list[fx.Node]


def fold(flat: Flat) -> Model:
    """Cut the flat graph into units and fold equal ones into blocks."""
    units = _units(flat)
    folder = _Folder(flat)
    live = set(flat.nodes)
    for unit in units:
        folder.add(unit, _outputs(unit, flat.loss, live))
    return folder.model()


def _units(flat: Flat) -> list[_Unit]:
    tables = _tables(flat)
    chosen = set(tables)
    rest = [n for n in flat.nodes if n not in chosen]
    numbered = any(_unit_path(info(n).module) for n in rest)
    units: list[_Unit] = []
    for node in rest:
        module = info(node).module
        path = _unit_path(module) if numbered else module.split(".")[0]
        if not units or units[-1].path != path:
            units.append(_Unit(path, "layer" if path else "glue", []))
        units[-1].nodes.append(node)
    units = _attach_glue(units)
    return ([_Unit("", "tables", tables)] if tables else []) + units


def _unit_path(module: str) -> str:
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def _container(path: str) -> str:
    return path.rsplit(".", 1)[0] if path else ""


def _tables(flat: Flat) -> list[fx.Node]:
    """Glue that depends on nothing but the batch, buffers that stay and constants, and is not random."""
    pure: dict[fx.Node, None] = {}
    moved = {operands(node)[1] for node in flat.nodes if node.target is AVERAGED}
    for node in flat.nodes:
        if info(node).random or _unit_path(info(node).module) or info(node).meta.needs_grad:
            continue
        given = node.all_input_nodes
        if moved.isdisjoint(given) and all(o in pure or info(o).role in ("buffer", "input") for o in given):
            pure[node] = None
    return list(pure)


def _attach_glue(units: list[_Unit]) -> list[_Unit]:
    """Give glue between two units of one list to the first, and the same glue after the last unit to that."""
    merged: list[_Unit] = []
    tail: list[str] = []  # the ops that follow each unit of the current list
    for i, unit in enumerate(units):
        before = merged[-1] if merged else None
        after = units[i + 1] if i + 1 < len(units) else None
        if unit.kind != "glue" or before is None or before.kind != "layer":
            merged.append(unit)
            continue
        if after is not None and _container(after.path) == _container(before.path):
            tail = [op_name(n) for n in unit.nodes]
            before.nodes += unit.nodes
        elif tail and [op_name(n) for n in unit.nodes[: len(tail)]] == tail:
            before.nodes += unit.nodes[: len(tail)]
            unit.nodes = unit.nodes[len(tail) :]
            tail = []
            if unit.nodes:
                merged.append(unit)
        else:
            merged.append(unit)
    return merged


def _outputs(unit: _Unit, loss: fx.Node, live: set[fx.Node]) -> list[fx.Node]:
    inside = set(unit.nodes)
    return [n for n in unit.nodes if n is loss or any(u in live and u not in inside for u in n.users)]


class _Folder:
    """Builds blocks and calls; remembers which call makes which value."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.values: dict[fx.Node, Value] = {}
        self.blocks: dict[Any, int] = {}
        self.made: list[Block] = []
        self.calls: list[Call] = []
        positions = {item.name: i for i, item in enumerate(flat.inputs)}
        for node in flat.graph.nodes:
            if node.op == "placeholder" and info(node).role == "input":
                self.values[node] = Value(INPUT_CALL, positions[info(node).name])

    def add(self, unit: _Unit, outputs: list[fx.Node]) -> None:
        parameters, inputs = _externals(unit)
        names = tuple(info(p).name for p in parameters)
        key = (unit.kind, _key(unit, parameters, inputs, outputs))
        if key not in self.blocks:
            self.blocks[key] = len(self.made)
            self.made.append(self._build(unit, parameters, inputs, outputs))
        call = Call(self.blocks[key], unit.path, names, tuple(self.values[n] for n in inputs))
        for k, node in enumerate(outputs):
            self.values[node] = Value(len(self.calls), k)
        self.calls.append(call)

    def _build(self, unit: _Unit, parameters: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> Block:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in [*parameters, *inputs]:
            data = info(node)
            role = data.role if data.role in ("parameter", "buffer") else "input"
            name = _relative(data.name, unit.path) if role != "input" else data.name or node.name
            env[node] = graph.placeholder(f"{role[0]}_{name}".replace(".", "_"))
            set_info(env[node], Info(data.outputs, role=role, name=name))
        for node in unit.nodes:
            env[node] = graph.node_copy(node, lambda n: env[n])
            data = info(node)
            set_info(env[node], replace(data, module=_relative(data.module, unit.path), choices={}))
        graph.output(tuple(env[n] for n in outputs))
        return Block(self._block_name(unit), unit.kind, graph)

    def _block_name(self, unit: _Unit) -> str:
        base = self.flat.classes.get(unit.path, "Layer") if unit.kind == "layer" else unit.kind
        taken = {block.name for block in self.made}
        number = 2
        name = base
        while name in taken:
            name = f"{base}{number}"
            number += 1
        return name

    def model(self) -> Model:
        used = {name for call in self.calls for name in call.parameters}
        parameters = {n: p for n, p in self.flat.parameters.items() if n in used}
        flat = self.flat
        loss = self.values[flat.loss]
        model = Model(flat.name, self.made, self.calls, parameters, flat.inputs, loss, flat.batch_size)
        model.remarks, model.packs = list(flat.remarks), flat.packs
        model.fingerprint = hashlib.sha256(str(model).encode()).hexdigest()[:16]
        return model


def _externals(unit: _Unit) -> tuple[list[fx.Node], list[fx.Node]]:
    """Parameters/buffers and other outside values that the unit reads, in order of first use."""
    inside = set(unit.nodes)
    seen: dict[fx.Node, None] = {}
    for node in unit.nodes:
        for operand in node.all_input_nodes:
            if operand not in inside:
                seen[operand] = None
    parameters = [n for n in seen if n.op == "placeholder" and info(n).role in ("parameter", "buffer")]
    return parameters, [n for n in seen if n not in set(parameters)]


def _relative(name: str, path: str) -> str:
    if path and name == path:
        return ""
    return name.removeprefix(f"{path}.") if path else name


def _key(unit: _Unit, parameters: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Any:
    """Equal for units that run the same ops; names only where they are part of the meaning."""
    number: dict[fx.Node, Any] = {}
    for i, node in enumerate(parameters):
        number[node] = ("p", i)
    for i, node in enumerate(inputs):
        number[node] = ("i", i)
    for i, node in enumerate(unit.nodes):
        number[node] = ("n", i)
    rows = tuple(
        (
            op_name(n),
            _freeze(n.args, number),
            _freeze(n.kwargs, number),
            info(n).outputs,
            _relative(info(n).module, unit.path),
        )
        for n in unit.nodes
    )
    stored = tuple((_relative(info(p).name, unit.path), info(p).outputs) for p in parameters)
    given = tuple(info(i).outputs for i in inputs)
    return rows, stored, given, tuple(number[n] for n in outputs)


def _freeze(item: Any, number: dict[fx.Node, Any]) -> Any:
    if isinstance(item, fx.Node):
        return number[item]
    if isinstance(item, list | tuple):
        return tuple(_freeze(v, number) for v in item)
    if isinstance(item, dict):
        return tuple((k, _freeze(v, number)) for k, v in item.items())
    return repr(item) if isinstance(item, slice) else (type(item).__name__, item)
