"""What crosses the cuts between pipeline stages, and what each stage needs beside its calls.

A value that later stages take is sent on from stage to stage, once. It travels as it was made, unless all
that take it want the same other type and that is smaller: then the transition comes before the cut. A vocabulary that
is split over all ranks stands at both ends: it makes what the first stage receives, and takes what the last one sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.codegen.block import backward_slice
from autopar.codegen.edges import Change, Edge, changed_meta, edge
from autopar.codegen.job import Job
from autopar.graph import INPUT_CALL, Meta, Value
from autopar.passes.vocabulary import VocabularyCalls


@dataclass(frozen=True)
class Wire:
    """A value that crosses at least one cut: made at place ``first``, last taken at ``last`` (:attr:`Job.places`)."""

    value: Value
    first: int
    last: int
    changes: tuple[Change, ...]
    meta: Meta


@dataclass(frozen=True)
class Part:
    """One stage, or the vocabulary: its calls, the edges into them, and what comes from outside."""

    index: int
    calls: tuple[int, ...]
    edges: dict[tuple[int, int], Edge]  # (call, input position)
    receives: tuple[Wire, ...]
    sends: tuple[Wire, ...]
    totals: tuple[Edge, ...]
    tables: dict[int, frozenset[fx.Node]]  # tables call -> the ops that forward needs
    total_tables: dict[int, frozenset[fx.Node]]  # … that totals needs
    inputs: tuple[int, ...]


def parts(job: Job) -> tuple[Part, ...]:
    """All stages of the job, with what they send each other."""
    edges = _edges(job, job.places)
    wires = _wires(job, edges)
    return tuple(
        _part(
            job,
            stage,
            calls,
            edges,
            receives=tuple(w for w in wires if w.first < stage <= w.last),
            sends=tuple(w for w in wires if w.first <= stage < w.last),
        )
        for stage, calls in enumerate(job.stages)
    )


def vocabulary_part(job: Job, calls: VocabularyCalls) -> Part:
    """The vocabulary of the job: it receives what the last stage sends, and sends what the first receives."""
    own = tuple(call for call in (calls.embedding, calls.head, calls.tail) if call is not None)
    edges = _edges(job, [*job.places, *own])
    wires = _wires(job, {key: into for key, into in edges.items() if key[0] in job.places})
    return _part(
        job,
        len(job.stages),
        own,
        edges,
        receives=tuple(w for w in wires if w.last == len(job.stages)),
        sends=tuple(w for w in wires if w.first < 0),
    )


def _edges(job: Job, calls: Iterable[int]) -> dict[tuple[int, int], Edge]:
    return {
        (call, position): edge(job.model, job.mesh, call, position)
        for call in dict.fromkeys(calls)
        for position in range(len(job.model.calls[call].operands))
    }


def _wires(job: Job, edges: dict[tuple[int, int], Edge]) -> list[Wire]:
    takers: dict[Value, list[tuple[int, Edge]]] = {}
    for (call, _), into in edges.items():
        if into.value.call in job.places and job.places[into.value.call] < job.places[call]:
            takers.setdefault(into.value, []).append((job.places[call], into))
    ordered = sorted(takers.items(), key=lambda item: (item[0].call, item[0].output))
    return [_wire(job, value, found) for value, found in ordered]


def _wire(job: Job, value: Value, takers: list[tuple[int, Edge]]) -> Wire:
    made = job.meta(value)
    changes = takers[0][1].changes
    after = made
    for change in changes:
        after = changed_meta(after, change, job.mesh)
    early = after.bytes < made.bytes and all(into.changes == changes for _, into in takers)
    last = max(stage for stage, _ in takers)
    return Wire(value, job.places[value.call], last, changes if early else (), after if early else made)


def _part(
    job: Job,
    index: int,
    calls: tuple[int, ...],
    all_edges: Mapping[tuple[int, int], Edge],
    *,
    receives: tuple[Wire, ...],
    sends: tuple[Wire, ...],
) -> Part:
    edges = {key: into for key, into in all_edges.items() if key[0] in calls}
    totals = dict.fromkeys(into for into in edges.values() if into.total_axes is not None)
    direct = [into.value for into in edges.values() if into.total_axes is None]
    tables = needed_tables(job, direct)
    total_tables = needed_tables(job, [into.value for into in totals])
    read = {value.output for value in direct if value.call == INPUT_CALL}
    read |= _inputs(job, tables) | _inputs(job, total_tables)
    return Part(
        index,
        calls,
        edges,
        receives=receives,
        sends=sends,
        totals=tuple(totals),
        tables=tables,
        total_tables=total_tables,
        inputs=tuple(sorted(read)),
    )


def needed_tables(job: Job, values: Iterable[Value]) -> dict[int, frozenset[fx.Node]]:
    """The ops of tables calls that ``values`` depend on, by call, in order."""
    needed: dict[int, set[fx.Node]] = {}
    waiting = [v for v in values if v.call != INPUT_CALL and job.is_table(v.call)]
    while waiting:
        value = waiting.pop()
        call = job.model.calls[value.call]
        block = job.model.block_of(call)
        found = backward_slice([block.outputs[value.output]])
        needed.setdefault(value.call, set()).update(found)
        reads = [v for node, v in zip(block.inputs, call.operands, strict=True) if node in found]
        waiting += [v for v in reads if v.call != INPUT_CALL]
    return {call: frozenset(needed[call]) for call in sorted(needed)}


def _inputs(job: Job, tables: dict[int, frozenset[fx.Node]]) -> set[int]:
    found: set[int] = set()
    for index, needed in tables.items():
        call = job.model.calls[index]
        nodes = job.model.block_of(call).inputs
        pairs = zip(nodes, call.operands, strict=True)
        found |= {value.output for node, value in pairs if node in needed and value.call == INPUT_CALL}
    return found
