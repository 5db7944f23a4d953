"""What crosses the cuts between pipeline stages (:mod:`autopar.passes.edges`), and what each stage needs beside its
calls.

A vocabulary that is split over all ranks stands at both ends: it makes what the first stage receives, and takes what
the last one sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.codegen.job import Job
from autopar.graph import INPUT_CALL
from autopar.passes.edges import Edge, Wire, edge, needed_tables, wires
from autopar.passes.vocabulary import VocabularyCalls


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
    crossing = wires(job.model, job.mesh, job.places, edges)
    return tuple(
        _part(
            job,
            stage,
            calls,
            edges,
            receives=tuple(w for w in crossing if w.first < stage <= w.last),
            sends=tuple(w for w in crossing if w.first <= stage < w.last),
        )
        for stage, calls in enumerate(job.stages)
    )


def vocabulary_part(job: Job, calls: VocabularyCalls) -> Part:
    """The vocabulary of the job: it receives what the last stage sends, and sends what the first receives."""
    own = tuple(call for call in (calls.embedding, calls.head, calls.tail) if call is not None)
    edges = _edges(job, [*job.places, *own])
    crossing = wires(
        job.model, job.mesh, job.places, {key: into for key, into in edges.items() if key[0] in job.places}
    )
    return _part(
        job,
        len(job.stages),
        own,
        edges,
        receives=tuple(w for w in crossing if w.last == len(job.stages)),
        sends=tuple(w for w in crossing if w.first < 0),
    )


def _edges(job: Job, calls: Iterable[int]) -> dict[tuple[int, int], Edge]:
    return {
        (call, position): edge(job.model, job.mesh, call, position)
        for call in dict.fromkeys(calls)
        for position in range(len(job.model.calls[call].operands))
    }


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
    tables = needed_tables(job.model, direct)
    total_tables = needed_tables(job.model, [into.value for into in totals])
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


def _inputs(job: Job, tables: dict[int, frozenset[fx.Node]]) -> set[int]:
    found: set[int] = set()
    for index, needed in tables.items():
        call = job.model.calls[index]
        nodes = job.model.block_of(call).inputs
        pairs = zip(nodes, call.operands, strict=True)
        found |= {value.output for node, value in pairs if node in needed and value.call == INPUT_CALL}
    return found
