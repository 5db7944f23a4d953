"""What vocabulary layers cost that are split over the pipeline: per rank and microbatch, by pass and exchange.

Hidden states cross the pipeline as the emitted program sends them (:func:`autopar.passes.edges.wires`), in parts where
``tp`` splits them. What makes them whole, or looks up a table's rows over ``tp``, are collectives of the passes around:
of ``E`` and ``S`` forward, of ``G`` and ``SUM_X`` backward. A cross entropy's own sums are the exchanges, of all ranks
that hold classes: the pipeline's and ``tp``'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import Link
from autopar.cost_models import collective
from autopar.graph import Block, Meta, Model, info
from autopar.passes.edges import Edge, edge, wires
from autopar.passes.recut import closure
from autopar.passes.vocabulary import (
    Head,
    VocabularyCalls,
    head_of,
    localize_vocabulary,
    staged_calls,
    vocabulary_calls,
    vocabulary_dims,
)
from autopar.planner.between import changes_sent, table_edges, tables_of, tables_seconds
from autopar.planner.block_costs import BlockCost, Both, Machine, sent_by
from autopar.planner.vocabulary_passes import HeadPasses, op_seconds
from autopar.schedules.flow import VOCABULARY_KINDS

_STATISTICS = 4  # numbers per token that ranks exchange
_KEPT_NUMBERS = 8  # per token, that a head in chunks keeps: statistics, maximum, correction, slope, the target's row
_WIDE = 4  # bytes of a float32
_CHUNK_COPIES = 2  # of a chunk's logits at once: as made, and in float32


@dataclass(frozen=True)
class VocabularyCost:
    """``seconds`` per pass and exchange, one value per pipeline rank. ``parameter_bytes`` are a rank's;
    ``logits_bytes`` are kept from ``S`` to ``T``, ``chunk_bytes`` only while a pass runs; ``embedded_bytes`` from ``E``
    to the first stage's forward, on its rank."""

    seconds: Mapping[str, tuple[float, ...]]
    logits_bytes: int
    chunk_bytes: int
    parameter_bytes: int
    has_embedding: bool
    embedded_bytes: int

    @property
    def pass_seconds(self) -> float:
        """What a rank computes for one microbatch."""
        return sum(self.seconds[kind][0] for kind in VOCABULARY_KINDS if kind in self.seconds)

    @property
    def transient_bytes(self) -> int:
        """What a pass holds beside what is kept: as many logits anew, or those of a chunk."""
        return self.chunk_bytes or self.logits_bytes


def vocabulary_cost(
    model: Model, head: str, costs: list[BlockCost], machine: Machine, chunks: int = 1
) -> VocabularyCost | None:
    """None where the vocabulary's layers are in stages. ``model`` is local to all axes but ``pp``; logits are made in
    ``chunks`` parts."""
    calls = vocabulary_calls(model)
    if calls is None:
        return None
    ranks, call = machine.sizes["pp"], model.calls[calls.head]
    journeys = _journeys(model, calls, machine, costs)
    local = localize_vocabulary(model, ranks)
    seconds = _head_seconds(head_of(local.block_of(call)), head, machine, chunks, journeys)
    used = [calls.head]
    if calls.embedding is not None:
        used.append(calls.embedding)
        seconds |= _embedding_seconds(local.block_of(model.calls[calls.embedding]), machine, journeys)
    tables = _tables(model, used)
    found = head_of(model.block_of(call))
    logits_bytes = info(found.logits).meta.numel * _width(found) // ranks
    return VocabularyCost(
        seconds={kind: (value,) * ranks for kind, value in seconds.items()},
        logits_bytes=logits_bytes if chunks == 1 else _kept_of_chunks(found, head),
        chunk_bytes=0 if chunks == 1 else _CHUNK_COPIES * logits_bytes // chunks,
        parameter_bytes=sum(meta.bytes for meta in tables.values()) // ranks,
        has_embedding=calls.embedding is not None,
        embedded_bytes=journeys.embedded_bytes,
    )


@dataclass(frozen=True)
class _Journeys:
    """Bytes of what the last stage gives to the head, of the gradient of that (0: nothing before it is trained), of
    what the first gets from the embedding (0: it is in that stage), and of the gradient that it gives back (0: there is
    none), as they cross the pipeline; seconds of the changes of type around these and of what they need of the batch,
    forward and backward, and of those between each token's entropy and the loss."""

    hidden_bytes: int
    summed_bytes: int
    entering: Both
    ending: Both
    embedded_bytes: int = 0
    returned_bytes: int = 0
    leaving: Both = (0.0, 0.0)


def _journeys(model: Model, calls: VocabularyCalls, machine: Machine, costs: Sequence[BlockCost]) -> _Journeys:
    """All stages are one place here: what comes before the first and after the last is the same for any cut."""
    places = dict.fromkeys(staged_calls(model), 1)
    places[calls.head] = 2
    if calls.embedding is not None:
        places[calls.embedding] = 0
    edges = {
        (call, position): edge(model, machine.mesh, call, position)
        for call in places
        for position in range(len(model.calls[call].operands))
    }
    crossing = wires(model, machine.mesh, places, edges)
    (hidden,) = (wire for wire in crossing if wire.last == 2)
    block = model.block_of(model.calls[calls.head])
    found = head_of(block)
    taken = [into for (call, _), into in edges.items() if call == calls.head]
    needed = tables_of(model, taken)
    entering = _added(
        changes_sent(
            model, [*table_edges(model, machine, needed), *taken], {Edge(hidden.value, hidden.changes)}, machine
        ).values(),
        sent_by(closure([found.x, found.targets]), machine).values(),
        [(tables_seconds(model, needed, costs), 0.0)],
    )
    ending = _ending(model, calls, machine)
    given = hidden.meta.bytes, hidden.meta.bytes if hidden.meta.needs_grad else 0, entering, ending
    if calls.embedding is None:
        return _Journeys(*given)
    (embedded,) = (wire for wire in crossing if wire.first == 0)
    looked_up = [into for (call, _), into in edges.items() if call == calls.embedding]
    leaving = _added(
        [(tables_seconds(model, tables_of(model, looked_up), costs), 0.0)],
        changes_sent(model, [Edge(embedded.value, embedded.changes)], set(), machine).values(),
        sent_by(model.block_of(model.calls[calls.embedding]).ops, machine).values(),
    )
    returned_bytes = embedded.meta.bytes if embedded.meta.needs_grad else 0
    return _Journeys(*given, embedded.meta.bytes, returned_bytes, leaving)


def _ending(model: Model, calls: VocabularyCalls, machine: Machine) -> Both:
    """Between each token's entropy and the loss."""
    if calls.tail is None:
        return 0.0, 0.0
    call = model.calls[calls.tail]
    taken = [edge(model, machine.mesh, calls.tail, position) for position in range(len(call.operands))]
    sent = changes_sent(model, [*table_edges(model, machine, tables_of(model, taken)), *taken], set(), machine)
    return _added(sent.values(), sent_by(model.block_of(call).ops, machine).values())


def _added(*parts: Iterable[Both]) -> Both:
    both = [one for part in parts for one in part]
    return math.fsum(forward for forward, _ in both), math.fsum(backward for _, backward in both)


def _tables(model: Model, calls: list[int]) -> dict[str, Meta]:
    """The tables by name: a tied one counts once."""
    return {
        name: info(node).meta
        for index in calls
        for name, node in zip(model.calls[index].parameters, model.block_of(model.calls[index]).parameters, strict=True)
        if node in vocabulary_dims(model.block_of(model.calls[index]))
    }


def _kept_of_chunks(head: Head, algorithm: str) -> int:
    """Numbers per token; for ``vocab-2``, the two terms of the input's gradient. The input is kept anyway."""
    tokens = info(head.targets).meta.numel
    terms = 2 * info(head.x).meta.bytes if algorithm == "vocab-2" else 0
    return _KEPT_NUMBERS * _width(head) * tokens + terms


def _width(head: Head) -> int:
    """Bytes of a number that is summed over classes: a float32's at least."""
    return max(_WIDE, info(head.logits).meta.dtype.itemsize)


def _head_seconds(head: Head, algorithm: str, machine: Machine, chunks: int, journeys: _Journeys) -> dict[str, float]:
    """Of a head that is local to all axes, pp too."""
    ranks, link = machine.sizes["pp"], machine.links["pp"]
    tokens, width = info(head.targets).meta.numel, _width(head)
    holders, plane = _plane(machine)
    enters, returns = journeys.entering
    summed = journeys.summed_bytes
    seconds = HeadPasses(head, algorithm, chunks, machine.device, returns=bool(summed)).seconds
    seconds |= {
        "S": seconds["S"] + enters,
        "CAST_X": collective.seconds("broadcast", journeys.hidden_bytes, ranks, link),
        "STATS": collective.seconds("all_gather", _STATISTICS * width * tokens * holders, holders, plane),
        "SUM_X": returns + (collective.seconds("reduce", summed, ranks, link) if summed else 0.0),
    }
    seconds["SUM_X" if algorithm == "vocab-2" else "T"] += sum(journeys.ending)
    if algorithm == "naive":
        seconds["MAX"] = collective.seconds("all_reduce", width * tokens, holders, plane)
    return seconds


def _plane(machine: Machine) -> tuple[int, Link]:
    """The ranks that hold classes, of the pipeline and ``tp``: how many, and the link between them."""
    mesh = machine.mesh
    if mesh.tp == 1 or machine.cluster is None:
        return mesh.pp, machine.links["pp"]
    size = mesh.pp * mesh.tp
    return size, machine.cluster.link(size, mesh.stride("tp"), mesh.world)


def _embedding_seconds(block: Block, machine: Machine, journeys: _Journeys) -> dict[str, float]:
    """Of a lookup that is local to all axes. It makes whole rows on every rank: it doesn't get cheaper with more."""
    ranks, link = machine.sizes["pp"], machine.links["pp"]
    passes = [op_seconds(node, machine.device) for node in block.ops]
    leaves, returns = journeys.leaving
    returned = journeys.returned_bytes
    return {
        "E": leaves + math.fsum(forward for forward, _ in passes),
        "G": returns + math.fsum(backward for _, backward in passes),
        "SUM_E": collective.seconds("reduce", journeys.embedded_bytes, ranks, link),
        "CAST_E": collective.seconds("broadcast", returned, ranks, link) if returned else 0.0,
    }
