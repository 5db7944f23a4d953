"""What adding up the gradients of vocabulary tables takes that are split over the pipeline, by pass.

A head's table gets its gradient in ``T``, an embedding's in ``G``; one that is both in both, ``T`` first. They are kept
as :mod:`autopar.planner.gradients` says, but sent once a step whatever the ZeRO stage: that counts with ``T``. A head
in chunks adds up its table's gradient itself, and autograd copies it where it is the first
(:mod:`autopar.runtime.chunked_logits`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from autopar.cluster import Device
from autopar.cost_models import step
from autopar.graph import info
from autopar.passes.vocabulary import vocabulary_calls
from autopar.planner.gradients import Summed, summed_as
from autopar.planner.packing import alone
from autopar.planner.rank_memory import rank_shape, table_dims
from autopar.planner.vocabulary_costs import VocabularyCost
from autopar.planner.zero import MoveCosts


@dataclass(frozen=True)
class _Table:
    """A trained parameter: elements on a rank, and of its gradient once that is sent; which passes make it."""

    summed: Summed
    elements: int
    stored: int
    in_head: bool
    in_embedding: bool


def with_gradients(
    vocabulary: VocabularyCost | None, moves: MoveCosts, microbatches: int, chunks: int
) -> dict[str, tuple[float, ...]]:
    """Seconds of passes and exchanges, one value per pipeline rank, with what passes take to add up gradients."""
    added = table_seconds(moves, microbatches, chunks)
    found = vocabulary.seconds.items() if vocabulary else ()
    return {kind: tuple(seconds + added.get(kind, 0.0) for seconds in per_rank) for kind, per_rank in found}


def table_seconds(moves: MoveCosts, microbatches: int, chunks: int) -> dict[str, float]:
    """``T`` and ``G`` -> seconds per microbatch; none where no vocabulary is split."""
    split = vocabulary_calls(moves.model)
    if split is None:
        return {}
    calls = [split.head, *([] if split.embedding is None else [split.embedding])]
    tables = {name: _table(moves, name, node) for name, node in moves.trained(sorted(calls))}
    unpacked = alone(moves.sums(sorted(calls), moves.machine.sizes["pp"]))
    device, seconds = moves.machine.device, {"T": [0.0], "G": [0.0]}
    for name, table in tables.items():
        count, summed = microbatches * (table.in_head + table.in_embedding), table.summed
        before = summed.added(table.elements, microbatches, device)
        made = step.add_seconds(table.elements, summed.dtype.itemsize, summed.master.itemsize, device)
        if table.in_head:
            seconds["T"] += [before, _copied(table, microbatches, device) if chunks > 1 else 0.0]
            seconds["G"].append(microbatches * made if table.in_embedding else 0.0)
        else:
            seconds["G"].append(before)
        packed = name not in unpacked
        seconds["T"].append(summed.sent(table.elements, count, device, table.stored, packed=packed))
    return {kind: math.fsum(terms) / microbatches for kind, terms in seconds.items()}


def _table(moves: MoveCosts, name: str, node: fx.Node) -> _Table:
    model, parts = moves.model, moves.machine.sizes["pp"]
    split = vocabulary_calls(model)
    assert split is not None
    users = {i for i in (split.head, split.embedding) if i is not None and name in model.calls[i].parameters}
    meta, shards = info(node).meta, moves.shards_of(name, node)
    master, is_summed = model.parameters[name].master or meta.dtype, moves.is_summed(name, node)
    return _Table(
        summed_as(meta.dtype, master, shards, moves.options, is_summed=is_summed)._replace(is_scattered=False),
        math.prod(rank_shape(meta.shape, table_dims(model).get(name), parts)),
        moves.whole_elements(name, node, parts) // shards,
        in_head=split.head in users,
        in_embedding=split.embedding in users,
    )


def _copied(table: _Table, microbatches: int, device: Device) -> float:
    """By autograd, of each gradient that is the first where it goes: a gradient of another dtype than its master goes
    on from there."""
    width = table.summed.dtype.itemsize
    times = 1 if table.summed.dtype == table.summed.master else microbatches
    return times * step.copy_seconds(table.elements, width, width, device)
