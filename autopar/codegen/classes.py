"""The classes of an emitted module: one per distinct layer, and the stage."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from torch import fx

from autopar.codegen import comments
from autopar.codegen.block import Writer
from autopar.codegen.cuts import Part
from autopar.codegen.function import Atom, Function, identifier
from autopar.codegen.job import Job
from autopar.codegen.names import bases
from autopar.codegen.regions import named, region_code
from autopar.codegen.runs import Run, number, runs
from autopar.codegen.text import STACKED, Line, Row, attribute, human_bytes, is_index, layout, literal, spans
from autopar.errors import StageError
from autopar.graph import INPUT_CALL, Call, Meta, Value, info
from autopar.options import parameters_on_host


@dataclass(frozen=True)
class Declaration:
    """One ``declare`` line: the path, and what comes there."""

    path: str
    what: str

    def line(self, indent: int = 2, path: str = "") -> Line:
        return Line(indent, f"declare(self, {path or literal(self.path)}, {self.what})")


@dataclass
class LayerClasses:
    """The classes of a job's layers. Calls of a block that differ in their names and numbers alone share one, which is
    written once."""

    job: Job
    _written: dict[Hashable, tuple[Line, list[str]]] = field(default_factory=dict, init=False)

    def rows(self, block: int, calls: Sequence[int]) -> list[str]:
        """The class of one block, for the ``calls`` of a stage."""
        job, index = self.job, calls[0]
        first = job.model.calls[index]
        own = [k for k in range(len(first.parameters)) if k not in job.borrowed[block]]
        names = _local_names(job, index, own)
        declarations = [Declaration(names.parameters[k], _tensor(job, first, k)) for k in own]
        key = block, names, tuple(declarations)
        if key not in self._written:
            functions = _layer_methods(job, block, index, own, names)
            head, *body = _layer_class(job, block, declarations, functions)
            self._written[key] = head, layout(body)
        head, rows = self._written[key]
        served = paths_text([job.model.calls[c].path for c in calls]) + _stored(job, first, own)
        return [*layout([replace(head, comment=served)]), *(_of_call(row, index) for row in rows)]


def _of_call(row: str, index: int) -> str:
    """The row, whose op is one of this call."""
    return Row.of(row, replace(row.origin, call=index)) if isinstance(row, Row) else row


@dataclass(frozen=True)
class _LocalNames:
    """What a layer calls its ``parameters`` (those that are its own, as they lie in it), ``inputs`` and ``outputs``."""

    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _local_names(job: Job, index: int, own: Collection[int]) -> _LocalNames:
    call = job.model.calls[index]
    return _LocalNames(
        tuple(
            name.removeprefix(f"{call.path}.") if k in own else identifier("_".join(name.split(".")[-2:]))
            for k, name in enumerate(call.parameters)
        ),
        tuple(_input_name(job, value) for value in call.operands),
        tuple(job.names[Value(index, k)] for k in range(len(job.model.blocks[call.block].outputs))),
    )


def _layer_class(
    job: Job, block: int, declarations: Sequence[Declaration], functions: Sequence[Function]
) -> list[Line]:
    methods = [line for function in functions for line in [*function.lines(job.axes), Line(0, "")]][:-1]
    if job.options.activations == "8bit":
        methods.insert(0, Line(1, "@kept_in_8_bits", "lossy: what the backward needs"))
    return _class(job.class_names[block], "", declarations, [each.line() for each in declarations], methods)


def _stored(job: Job, call: Call, own: Sequence[int]) -> str:
    """What a comment says of weights that are there only while they are used."""
    nodes = [job.parameter(call, k) for k in own if not job.model.parameters[call.parameters[k]].is_buffer]
    size = human_bytes(sum(info(node).meta.bytes for node in nodes))
    if nodes and job.options.zero == 3 and (shards := job.mesh.zero_shards(job.options.zero_ranks)) > 1:
        return f" · weights S(0)@{'_'.join(job.mesh.data_axes())} on {shards} ranks, gathered ahead: {size}"
    if nodes and parameters_on_host(job.options.offload):
        return f" · weights on the host, copied ahead: {size}"
    return ""


def _layer_methods(job: Job, block: int, index: int, own: Collection[int], names: _LocalNames) -> list[Function]:
    """``forward``, and a method for each region that is recomputed."""
    code = job.model.blocks[block]
    function = Function("forward", [], job.reserved)
    given: dict[fx.Node, Atom] = {}
    inputs = dict(zip(code.inputs, names.inputs, strict=True))
    for node, base in inputs.items():
        given[node] = function.argument(base, comments.typed(info(node).meta, info(node).types()))
    for k, node in enumerate(code.parameters):
        given[node] = attribute(names.parameters[k]) if k in own else function.argument(names.parameters[k])
    outputs = dict(zip(code.outputs, names.outputs, strict=True))
    writer = Writer(function, bases(code, inputs, outputs), count(), index)
    taken = {names.parameters[k].split(".")[0] for k in own}
    parts = [region_code(code, region) for region in job.regions.get(block, ())]
    function.results = tuple(writer.write(code, given, set(code.ops), named(parts, taken)))
    return [function, *writer.methods]


def _input_name(job: Job, value: Value) -> str:
    return identifier(job.model.inputs[value.output].name) if value.call == INPUT_CALL else job.names[value]


def stage_class(job: Job, part: Part, methods: list[Line]) -> list[Line]:
    """``class Stage``: the model's own tree, as far as this stage has it."""
    found = runs(job, part)
    layers = {run: _layers(job, run) for run in found if run.calls[0] not in job.inlined}
    modules = tuple(f"{layer.path}." for some in layers.values() for layer in some)
    held = _held(job, part)
    free = [item for item in held if not item[1].path.startswith(modules)]
    lines = [d.line() for call, d in free if call not in part.calls]
    for run in found:
        lines += _layer_lines(run, layers[run]) if run in layers else []
        lines += [d.line() for call, d in free if call in run.calls]
    lines += [item[1].line() for item in held if item not in free]  # a layer comes before what it lends out
    declared = [d for _, d in held] + [layer for some in layers.values() for layer in some]
    return _class("Stage", "", declared, lines, methods)


def vocabulary_class(job: Job, part: Part, methods: list[Line]) -> list[Line]:
    """``class Vocabulary``: the tables, in the model's own tree."""
    held = [declaration for _, declaration in _held(job, part)]
    return _class("Vocabulary", "", held, [declaration.line() for declaration in held], methods)


def _class(
    name: str, comment: str, declared: Iterable[Declaration], declarations: list[Line], methods: list[Line]
) -> list[Line]:
    declared = list(declared)
    keeps_axes = any("self.axes" in line.code for line in methods)
    _check_names(name, declared, methods, ["axes"] if keeps_axes else [])
    numbered = any(is_index(first) or first == STACKED for first in (d.path.split(".")[0] for d in declared))
    head = [
        Line(0, f"class {name}({'Container' if numbered else 'nn.Module'}):", comment),
        Line(1, "def __init__(self, axes: Axes) -> None:"),
        Line(2, "super().__init__()"),
    ]
    axes = [Line(2, "self.axes = axes")] if keeps_axes else []
    return [*head, *axes, *declarations, Line(0, ""), *methods]


def _check_names(name: str, declared: Iterable[Declaration], methods: Iterable[Line], taken: Sequence[str]) -> None:
    """Raises StageError where a module or parameter of the model has the name of what class ``name`` has of its own."""
    own = {*taken, *(line.code.removeprefix("def ").split("(")[0] for line in methods if line.code.startswith("def "))}
    for each in declared:
        if (first := each.path.split(".")[0]) in own:
            raise StageError(
                f"{each.path!r} can't be emitted: class {name} has its own {first!r}; rename that of the model"
            )


def _layers(job: Job, run: Run) -> list[Declaration]:
    names, calls = job.class_names, job.model.calls
    return [Declaration(calls[c].path, f"{names[calls[c].block]}(axes)") for c in run.calls]


def _layer_lines(run: Run, layers: Sequence[Declaration]) -> list[Line]:
    place = number(layers[0].path)
    if not run.is_loop or place is None:
        return [layer.line() for layer in layers]
    prefix, first = place
    path = 'f"' + (f"{prefix}." if prefix else "") + '{i}"'
    return [Line(2, f"for i in range({first}, {first + len(layers)}):"), layers[0].line(3, path)]


def _held(job: Job, part: Part) -> list[tuple[int, Declaration]]:
    """What the stage itself holds: parameters and buffers of inlined calls and tables, borrowed ones."""
    found: dict[str, tuple[int, Declaration]] = {}
    in_layers: set[str] = set()
    for index, position in stage_parameters(job, part):
        call = job.model.calls[index]
        name = call.parameters[position]
        if index in job.inlined or position in job.borrowed[call.block]:
            found.setdefault(name, (index, Declaration(name, _tensor(job, call, position))))
        else:
            in_layers.add(name)
    return [item for name, item in found.items() if name not in in_layers]


def stage_parameters(job: Job, part: Part) -> list[tuple[int, int]]:
    """(call, position) of every parameter or buffer that the stage reads, tables first."""
    needed = {
        index: part.tables.get(index, frozenset()) | part.total_tables.get(index, frozenset())
        for index in sorted({*part.tables, *part.total_tables})
    }
    found = [
        (index, k)
        for index, nodes in needed.items()
        for k, node in enumerate(job.model.block_of(job.model.calls[index]).parameters)
        if node in nodes
    ]
    return found + [(c, k) for c in part.calls for k in range(len(job.model.calls[c].parameters))]


def _tensor(job: Job, call: Call, position: int) -> str:
    meta: Meta = info(job.parameter(call, position)).meta
    known = job.model.parameters[call.parameters[position]]
    flags = ", buffer=True" if known.is_buffer else "" if known.trainable else ", trainable=False"
    return f"{literal(meta.shape)}, {literal(meta.dtype)}{flags}"


def paths_text(paths: Sequence[str]) -> str:
    """``embed, layers.0 … 3, norm``: neighbours of one list joined."""
    found: list[tuple[str | None, list[int], str]] = []
    for path in paths:
        prefix, position = number(path) or (None, 0)
        if found and prefix is not None and found[-1][0] == prefix:
            found[-1][1].append(position)
        else:
            found.append((prefix, [position], path))
    return ", ".join(path if prefix is None else f"{prefix}.{spans(n)}".lstrip(".") for prefix, n, path in found)
