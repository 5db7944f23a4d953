"""The ``Program`` of a stage, as a value and as the literal that ends its text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, Final

from autopar.codegen.classes import stage_parameters
from autopar.codegen.cuts import Part
from autopar.codegen.function import Function, Var
from autopar.codegen.job import Job
from autopar.codegen.runs import number, runs
from autopar.codegen.text import INDENT, literal, wrap
from autopar.graph import AVERAGED, Call, Info, ParameterInfo, arguments, info, is_aten, operands
from autopar.options import weights_streamed
from autopar.passes.edges import Wire
from autopar.passes.routers import weights_of
from autopar.passes.selection_bias import bias_of
from autopar.passes.vocabulary import Head, vocabulary_dims
from autopar.runtime.program import Input, Parameter, Program, Router, Tensor, Total, VocabularyProgram
from autopar.runtime.units import reader
from autopar.spmd import P


def program_of(job: Job, part: Part, forward: Function) -> Program:
    """The interface of one stage; names are those that ``forward`` has in the text."""
    names = [argument.name for argument in forward.arguments]
    received, read = len(part.receives), len(part.inputs)
    arguments = zip(names, part.receives, strict=False)
    return Program(
        stage=part.index,
        stages=len(job.stages),
        mesh=job.mesh.to_json(),
        microbatches=job.microbatches,
        receives=tuple(_tensor(name, wire) for name, wire in arguments),
        inputs=tuple(_input(job, n, i) for n, i in zip(names[received:], part.inputs, strict=False)),
        totals=tuple(
            Total(n, total.total_axes or ()) for n, total in zip(names[received + read :], part.totals, strict=True)
        ),
        sends=tuple(_tensor(name, wire) for name, wire in zip(_returned(forward), part.sends, strict=False)),
        parameters=tuple(_parameters(job, part)),
        loss_axes=loss_axes(job),
        plan_digest=job.digest,
        returns_loss=job.vocabulary is None or part.index < len(job.stages) - 1,
        spanning=_spanning(job, part) if _streams(job) else (),
        routers=tuple(_routers(job, part)),
        readers=_readers(job, part),
        averages=tuple(dict.fromkeys(_averages(job, part))),
    )


def _routers(job: Job, part: Part) -> Iterator[Router]:
    """Of the stage's calls, each layer once."""
    known: set[str] = set()
    for found in job.routers:
        if found.call in part.calls and found.layer not in known:
            known.add(found.layer)
            choices = info(found.node).choices
            split = tuple(axis for axis in job.axes if axis in choices and choices[axis].operands[0].is_shard)
            bias = bias_of(job.model, found) if job.options.expert_bias_rate else ""
            known_of = job.experts.get(found.layer)
            order, imbalance = (tuple(known_of.order), known_of.imbalance) if known_of is not None else ((), 1.0)
            skips = tuple(n for n in weights_of(job.model, found) if job.model.parameters[n].skips)
            yield Router(found.layer, found.experts, split, bias, order, imbalance, skips)


def _averages(job: Job, part: Part) -> Iterator[str]:
    """Of the stage's calls, the buffers that they move."""
    for call in (job.model.calls[index] for index in part.calls):
        names = dict(zip(job.model.block_of(call).parameters, call.parameters, strict=True))
        yield from (names[operands(node)[1]] for node in job.model.block_of(call).ops if node.target == AVERAGED)


def _streams(job: Job) -> bool:
    """Whether what passes compute with is there only while it is used."""
    return weights_streamed(job.options.zero, job.options.offload, job.mesh.zero_shards(job.options.zero_ranks))


def _spanning(job: Job, part: Part) -> tuple[str, ...]:
    """The parameters that more than one call reads, or is given a view of."""
    readers: dict[str, set[int]] = {}
    for index, position in stage_parameters(job, part):
        call = job.model.calls[index]
        if not job.model.parameters[call.parameters[position]].is_buffer:
            readers.setdefault(call.parameters[position], set()).add(index)
    handed_on = job.model.handed_on()
    return tuple(name for name, calls in readers.items() if len(calls) > 1 or name in handed_on)


def _layers(job: Job, part: Part) -> list[str]:
    """The paths of those that the stage calls."""
    return [job.model.calls[index].path for index in part.calls if index not in job.inlined]


def _readers(job: Job, part: Part) -> dict[str, str]:
    """The parameters that a layer is given, and those of layers that other code reads before: by whom."""
    layers = _layers(job, part)
    first: dict[str, int] = {}
    for index, position in stage_parameters(job, part):
        first.setdefault(job.model.calls[index].parameters[position], index)
    found = {n: "" if index in job.inlined else job.model.calls[index].path for n, index in first.items()}
    return {
        name: path
        for name, path in found.items()
        if path != reader(name, layers, {}) and not job.model.parameters[name].is_buffer
    }


def vocabulary_program(job: Job, part: Part, head: Head, methods: Mapping[str, Function]) -> VocabularyProgram:
    """The interface of a vocabulary that is split over the pipeline; names are those that the methods have."""
    (hidden,), embedding = part.receives, part.sends
    _, *given = (argument.name for argument in methods["tail"].arguments)
    read = len(part.inputs)
    _, call = _head_call(job)
    names = dict(zip(job.model.block_of(call).parameters, call.parameters, strict=True))
    weight_dim = vocabulary_dims(job.model.block_of(call))[head.weight]
    known = job.model.parameters[names[head.weight]]
    return VocabularyProgram(
        mesh=job.mesh.to_json(),
        stages=len(job.stages),
        microbatches=job.microbatches,
        inputs=tuple(_input(job, n, i) for n, i in zip(given, part.inputs, strict=False)),
        totals=tuple(Total(n, t.total_axes or ()) for n, t in zip(given[read:], part.totals, strict=True)),
        parameters=tuple(_parameters(job, part)),
        hidden=_tensor(methods["enter"].arguments[0].name, hidden),
        embedding=_tensor(_returned(methods["embed_ids"])[0], embedding[0]) if embedding else None,
        weight=names[head.weight],
        bias=names[head.bias] if head.bias is not None else None,
        weight_dim=weight_dim,
        classes=known.meta.shape[weight_dim],
        rows=info(head.weight).meta.shape[weight_dim],
        loss_axes=loss_axes(job),
        plan_digest=job.digest,
        chunks=job.options.head_chunks,
        **_entropy_options(head),
    )


def _head_call(job: Job) -> tuple[int, Call]:
    assert job.vocabulary is not None
    return job.vocabulary.head, job.model.calls[job.vocabulary.head]


def _entropy_options(head: Head) -> dict[str, Any]:
    """Reduction, ignored index and smoothing of the cross entropy, whole or in the form that is split over tp."""
    node = head.entropy
    if not is_aten(node):
        named = {"reduction": "sum", "ignore_index": -100, "label_smoothing": 0.0}
        return {name: node.kwargs.get(name, default) for name, default in named.items()}
    given = arguments(node)
    return {
        "reduction": "none" if given["reduction"] == 0 else "sum",
        "ignore_index": given["ignore_index"],
        "label_smoothing": given["label_smoothing"],
    }


def _returned(function: Function) -> list[str]:
    return [r.name if isinstance(r, Var) else r for r in function.results]


def loss_axes(job: Job) -> tuple[str, ...]:
    """The axes over which the loss is a pending sum."""
    loss = job.model.loss
    node = job.model.block_of(job.model.calls[loss.call]).outputs[loss.output]
    return tuple(axis for axis in job.axes if info(node).types().get(axis) == P)


def _tensor(name: str, wire: Wire) -> Tensor:
    return Tensor(name, wire.meta.shape, _dtype(wire.meta), wire.meta.needs_grad)


def _input(job: Job, name: str, position: int) -> Input:
    item = job.model.inputs[position]
    return Input(name, item.path, item.meta.shape, _dtype(item.meta), item.batch_dim)


def _dtype(meta: Any) -> str:
    return str(meta.dtype).removeprefix("torch.")


def _parameters(job: Job, part: Part) -> list[Parameter]:
    """In the order of their use; buffers of a layer with its own weights, whatever reads them before."""
    found: dict[str, Parameter] = {}
    for index, position in stage_parameters(job, part):
        call = job.model.calls[index]
        name = call.parameters[position]
        if name not in found:
            found[name] = _parameter(job, call, position, job.holders.get(name, ()))
    paths, weights, places = _layers(job, part), dict[str, int](), dict[str, tuple[int, int]]()
    layer_of = {name: reader(name, paths, {}) for name in found}  # "": none
    for place, name in enumerate(found):
        if not found[name].is_buffer and layer_of[name]:
            weights.setdefault(layer_of[name], place)
    for place, name in enumerate(found):
        has_weights = found[name].is_buffer and layer_of[name] in weights
        places[name] = (weights[layer_of[name]], 0) if has_weights else (place, 1)
    return [found[name] for name in sorted(found, key=places.__getitem__)]


def _parameter(job: Job, call: Call, position: int, holders: tuple[int, ...]) -> Parameter:
    known = job.model.parameters[call.parameters[position]]
    data = info(job.parameter(call, position))
    trains = known.trainable and not known.is_buffer
    return Parameter(
        known.name,
        data.meta.shape,
        known.meta.shape,
        _dtype(data.meta),
        types={axis: str(kind) for axis, kind in data.types().items() if kind.is_shard},
        reduce=tuple(axis for axis in job.reduce.get(known.name, ()) if axis in job.axes) if trains else (),
        trainable=known.trainable,
        is_buffer=known.is_buffer,
        shared_stages=holders if trains and len(holders) > 1 else (),
        aliases=known.aliases,
        padding=_padding(job, call, position),
        master=str(known.master).removeprefix("torch.") if trains and known.master is not None else "",
        zero=_zero(job, known, data),
        stacked=bool(known.stacked),
        order=job.order_of.get(known.name, ()),
    )


def _zero(job: Job, known: ParameterInfo, data: Info) -> int:
    """Over how many ranks the rows are stored: of what is trained, under ZeRO 3 of all. Scalars have none."""
    stage = job.options.zero
    if not stage or known.is_buffer or not data.meta.shape or not (known.trainable or stage == 3):
        return 1
    axes = job.mesh.data_axes([axis for axis, kind in data.types().items() if kind.is_shard])
    return job.mesh.zero_shards(job.options.zero_ranks, axes) if axes else 1


def _padding(job: Job, call: Call, position: int) -> tuple[int, int] | None:
    """The rows that the ranks' parts of a table have beside those of the model."""
    data = info(job.parameter(call, position))
    for dim, extent in enumerate(job.model.parameters[call.parameters[position]].meta.shape):
        shards = [job.mesh.size(axis) for axis, kind in data.types().items() if kind.is_shard and kind.dim == dim]
        added = data.meta.shape[dim] * math.prod(shards) - extent
        if added:
            return dim, added
    return None


_UNSAID: Final[Sequence[tuple[str, Any]]] = (
    ("returns_loss", True),
    ("chunks", 1),
    ("spanning", ()),
    ("routers", ()),
    ("readers", {}),
    ("averages", ()),
)


def program_lines(job: Job, part: Part, program: Program | VocabularyProgram) -> list[str]:
    """``PROGRAM = Program(…)``; the rows of equal layers are folded into one comprehension."""
    lines = [f"PROGRAM = {type(program).__name__}("]
    for entry in fields(program):
        value = getattr(program, entry.name)
        if (entry.name, value) in _UNSAID:
            continue
        if entry.name == "parameters":
            lines += [f"{INDENT}parameters=(", *_folded(job, part, program.parameters), f"{INDENT}),"]
        else:
            lines += _entry(entry.name, value)
    return [*lines, ")"]


def _entry(name: str, value: Any) -> list[str]:
    if isinstance(value, Tensor):
        return wrap(f"{INDENT}{name}={_row(value)},")
    if not isinstance(value, tuple) or not value or isinstance(value[0], str):
        return wrap(f"{INDENT}{name}={literal(value)},")
    rows = [row for item in value for row in wrap(f"{INDENT * 2}{_row(item)},")]
    return [f"{INDENT}{name}=(", *rows, f"{INDENT}),"]


def _row(item: Any, path: str = "", pattern: str = "") -> str:
    """A value of program.py as its constructor: required fields by position, others by name unless default.

    With ``path``, the name is written as an f-string that has ``pattern`` in its place.
    """
    written = []
    for entry in fields(item):
        value = getattr(item, entry.name)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if entry.name == "name" and path:
            written.append("f" + literal(pattern + value.removeprefix(path)))
        elif default is MISSING:
            written.append(literal(value))
        elif value != default:
            written.append(f"{entry.name}={literal(value)}")
    return f"{type(item).__name__}({', '.join(written)})"


def _folded(job: Job, part: Part, parameters: Sequence[Parameter]) -> list[str]:
    by_name = {p.name: p for p in parameters}
    rows: list[str] = []
    for run in runs(job, part):
        paths = [job.model.calls[c].path for c in run.calls]
        groups = [[p for n, p in by_name.items() if n.startswith(f"{path}.")] for path in paths]
        if not run.is_loop or not _alike(groups, paths):
            continue
        names, own = list(by_name), [p.name for group in groups for p in group]
        first = names.index(own[0])
        if names[first : first + len(own)] != own:  # others come between: rows are in the order of use
            continue
        rows += [r for n in names[:first] for r in _plain(by_name.pop(n))]
        rows += _comprehension(paths, groups[0])
        for group in groups:
            for p in group:
                del by_name[p.name]
    return rows + [r for p in by_name.values() for r in _plain(p)]


def _plain(parameter: Parameter) -> list[str]:
    return wrap(f"{INDENT * 2}{_row(parameter)},")


def _alike(groups: Sequence[Sequence[Parameter]], paths: Sequence[str]) -> bool:
    """Whether the rows differ in the number of their layer only, and may stand in an f-string."""
    if not groups[0] or any("{" in p.name for p in groups[0]):
        return False
    first = [replace(p, name=p.name.removeprefix(paths[0])) for p in groups[0]]
    return not any(p.aliases for p in groups[0]) and all(
        [replace(p, name=p.name.removeprefix(path)) for p in group] == first
        for group, path in zip(groups, paths, strict=True)
    )


def _comprehension(paths: Sequence[str], group: Sequence[Parameter]) -> list[str]:
    place = number(paths[0])
    assert place is not None
    prefix, first = place
    pattern = f"{prefix}.{{i}}" if prefix else "{i}"
    rows = [r for p in group for r in wrap(f"{INDENT * 4}{_row(p, paths[0], pattern)},")]
    pad, inner = INDENT * 2, INDENT * 3
    head = [
        f"{pad}*(",
        f"{inner}row",
        f"{inner}for i in range({first}, {first + len(paths)})",
        f"{inner}for row in (",
    ]
    return [*head, *rows, f"{inner})", f"{pad}),"]
