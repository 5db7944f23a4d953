"""What vocabulary layers cost that are split over the pipeline: per rank and microbatch, by pass and exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models import collective, compute
from autopar.graph import Block, Meta, Model, info
from autopar.passes.vocabulary import Head, head_of, vocabulary_calls, vocabulary_dims
from autopar.planner.block_costs import BlockCost, Machine
from autopar.planner.prices import STATE_COPIES
from autopar.schedules.flow import VOCABULARY_KINDS

_STATISTICS = 4  # numbers per token that ranks exchange
_KEPT_NUMBERS = 8  # per token, that a head in chunks keeps: statistics, maximum, correction, slope, the target's row
_WIDE = 4  # bytes of a float32
_CHUNK_COPIES = 2  # of a chunk's logits at once: as made, and in float32


@dataclass(frozen=True)
class VocabularyCost:
    """``seconds`` per pass and exchange, one value per pipeline rank. ``parameters`` and ``parameter_bytes`` are a
    rank's; ``logits_bytes`` are kept from ``S`` to ``T``, ``chunk_bytes`` only while a pass runs."""

    seconds: Mapping[str, tuple[float, ...]]
    logits_bytes: int
    chunk_bytes: int
    parameters: int
    parameter_bytes: int
    has_embedding: bool

    @property
    def pass_seconds(self) -> float:
        """What a rank computes for one microbatch."""
        return sum(self.seconds[kind][0] for kind in VOCABULARY_KINDS if kind in self.seconds)

    @property
    def held_bytes(self) -> int:
        """State of a rank's rows, and the logits of one microbatch."""
        return STATE_COPIES * self.parameter_bytes + self.logits_bytes + self.chunk_bytes


def vocabulary_cost(
    model: Model, head: str, costs: list[BlockCost], machine: Machine, chunks: int = 1
) -> VocabularyCost | None:
    """None where the vocabulary's layers are in stages. ``model`` is local to all axes but ``pp``; logits are made in
    ``chunks`` parts."""
    calls = vocabulary_calls(model)
    if calls is None:
        return None
    ranks, call = machine.sizes["pp"], model.calls[calls.head]
    seconds = _head_seconds(model.block_of(call), head, costs[call.block], machine, chunks)
    used = [calls.head]
    if calls.embedding is not None:
        used.append(calls.embedding)
        seconds |= _embedding_seconds(model.block_of(model.calls[calls.embedding]), machine)
    tables = _tables(model, used)
    found = head_of(model.block_of(call))
    logits_bytes = info(found.logits).meta.numel * _WIDE // ranks
    return VocabularyCost(
        seconds={kind: (value,) * ranks for kind, value in seconds.items()},
        logits_bytes=logits_bytes if chunks == 1 else _kept_of_chunks(found, head),
        chunk_bytes=0 if chunks == 1 else _CHUNK_COPIES * logits_bytes // chunks,
        parameters=sum(meta.numel for meta in tables.values()) // ranks,
        parameter_bytes=sum(meta.bytes for meta in tables.values()) // ranks,
        has_embedding=calls.embedding is not None,
    )


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
    return _KEPT_NUMBERS * _WIDE * tokens + terms


def _head_seconds(block: Block, algorithm: str, cost: BlockCost, machine: Machine, chunks: int) -> dict[str, float]:
    """``S`` and ``T`` share a head's forward and backward; ``vocab-2`` makes the input's gradient in ``S``.

    In chunks, ``T`` makes the logits again.
    """
    ranks, link = machine.sizes["pp"], machine.links["pp"]
    head = head_of(block)
    hidden = info(head.x).meta
    tokens = info(head.targets).meta.numel
    sweep = _sweep(info(head.logits).meta.numel / ranks, machine)
    forward, backward = cost.forward_seconds / ranks + sweep, cost.backward_seconds / ranks + sweep
    early = backward - cost.weight_seconds / ranks - sweep if algorithm == "vocab-2" else 0.0
    again = forward if chunks > 1 else 0.0
    seconds = {
        "S": forward + early,
        "T": backward - early + again,
        "CAST_X": collective.seconds("broadcast", hidden.bytes, ranks, link),
        "STATS": collective.seconds("all_gather", _STATISTICS * _WIDE * tokens * ranks, ranks, link),
        "SUM_X": collective.seconds("reduce", hidden.bytes, ranks, link),
    }
    if algorithm == "naive":
        seconds |= {
            "S": forward - sweep if chunks == 1 else forward,
            "U": sweep if chunks == 1 else 0.0,
            "MAX": collective.seconds("all_reduce", _WIDE * tokens, ranks, link),
        }
    return seconds


def _sweep(numbers: float, machine: Machine) -> float:
    """Read and write so many float32 numbers once."""
    return compute.seconds(0, 2 * _WIDE * numbers, "float32", machine.device)


def _embedding_seconds(block: Block, machine: Machine) -> dict[str, float]:
    """A lookup makes whole rows on every rank: it doesn't get cheaper with more of them. Its gradient is a table, made
    and added to that of the step."""
    ranks, link = machine.sizes["pp"], machine.links["pp"]
    made = info(block.outputs[0]).meta
    table = sum(info(node).meta.bytes for node in vocabulary_dims(block)) / ranks
    return {
        "E": compute.seconds(0, 2 * made.bytes, "float32", machine.device),
        "G": compute.seconds(0, made.bytes + 4 * table, "float32", machine.device),
        "SUM_E": collective.seconds("reduce", made.bytes, ranks, link),
        "CAST_E": collective.seconds("broadcast", made.bytes, ranks, link),
    }
