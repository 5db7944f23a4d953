"""split_vocabulary: the layers with the vocabulary's tables become calls of their own.

Every pipeline rank can then run its rows of the tables (Yeung et al., "Balancing Pipeline Parallelism with Vocabulary
Parallelism", MLSys 2025). Guarantees: equal loss and gradients. After it, beside the calls of the layers, there are

* the *head*, of kind "vocabulary": ``x -> rows -> [t, h] -> product (-> bias) -> elements -> [t, classes] ->
  cross_entropy(targets [t])``, where *rows* choose and arrange rows, and *elements* change each logit alone;
* the *embedding*, of kind "vocabulary": one lookup of ids that the batch determines (where that can be split);
* the *tail*, of kind "tail": what comes after the cross entropy (where something does); of the batch alone otherwise.

What is left of their calls stays where it was. Tables get rows of zeros in the graph, up to as many for each rank as
make rows of its logits begin at multiples of 16 bytes, which products need to be fast;
:class:`~autopar.graph.ParameterInfo` keeps the model's shape. It is for the runtime to leave out the logits of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.errors import StageError
from autopar.graph import Block, Model, arguments, info, op_name, operands, verify, where
from autopar.passes.find_head import drop_dead, find_head, free
from autopar.passes.logits import rewrite
from autopar.passes.recut import Piece, closure, is_batch, split_call
from autopar.passes.vocabulary import (
    ALIGNED_BYTES,
    TAIL,
    VOCABULARY,
    conversions,
    head_of,
    is_head,
    lengthen,
    vocabulary_calls,
    vocabulary_dims,
)

_EMBEDDING = "aten.embedding.default"
_WAY_OUT = 'vocabulary="stage" keeps embedding and head whole, on pipeline stages'


def split_vocabulary(model: Model, pp: int, tp: int) -> Model:
    """Cut head, embedding and tail out of a canonical model, for ``pp`` x ``tp`` ranks; the given one stays as it is.

    Raises StageError where the model has no head that can be split, naming what is missing, and where a table is read
    by another call too, naming both.
    """
    try:
        made = _cut_embedding(_cut_head(model))
        _check_readers(made)
    except StageError as error:
        raise StageError(f"the vocabulary can't be split over the pipeline: {error}; {_WAY_OUT}") from error
    made = _padded(made, pp * tp)
    verify(made, "split_vocabulary")
    return made


# --- head and tail ----------------------------------------------------------------------------------


def _cut_head(model: Model) -> Model:
    merged, first, found = find_head(model)
    block = merged.block_of(merged.calls[first])
    entropy = rewrite(found)
    drop_dead(block)
    return split_call(merged, first, _head_pieces(merged, first, block, entropy, found.x))


def _head_pieces(model: Model, index: int, block: Block, head: fx.Node, x: fx.Node) -> list[Piece]:
    """What of the merged call comes before the head (``x`` and all that leads to it), the head, and the tail."""
    of_batch = _batch_values(model, index, block)
    target = operands(head)[1]
    if target not in of_batch:
        raise StageError(f"{where(target)}: the targets of {where(head)} are made from values of layers")
    tail = _dependents(block, head)
    for node in tail:
        for operand in node.all_input_nodes:
            if operand not in tail and operand is not head and operand not in of_batch:
                raise StageError(
                    f"{where(node)} comes after the cross entropy and reads {where(operand)}; there, values of layers "
                    "and trained parameters (of an auxiliary loss, say) can't be read"
                )
    taken = {b.name for b in model.blocks}
    return [
        Piece(block.name, block.kind, closure([x])),
        Piece(free("head", taken), VOCABULARY, closure([head], without={x})),
        Piece(free("tail", taken), TAIL, closure(tail, without={head})),
    ]


def _dependents(block: Block, source: fx.Node) -> list[fx.Node]:
    found = {source}
    for node in block.ops:
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return [node for node in block.ops if node in found and node is not source]


def _batch_values(model: Model, index: int, block: Block) -> set[fx.Node]:
    """What of the block depends on the batch, buffers and constants alone, and is not random."""
    sources = zip(block.inputs, model.calls[index].operands, strict=True)
    found = {node for node, value in sources if is_batch(model, value)} | set(block.placeholders("buffer"))
    for node in block.ops:
        if not info(node).random and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


# --- embedding --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lookup:
    """One lookup in a table: a call, the op in its block, and the table's name."""

    call: int
    node: fx.Node
    table: str


def _cut_embedding(model: Model) -> Model:
    """The lookup of the batch's ids in the table that the head has too, or else in the largest."""
    calls = vocabulary_calls(model)
    assert calls is not None
    tied, classes = _head_table(model, calls.head)
    found = max(
        _lookups(model),
        key=lambda lookup: (lookup.table == tied, _rows(lookup) == classes, _rows(lookup)),
        default=None,
    )
    if found is None or _readers(model, found.table) != {found.call} | ({calls.head} if found.table == tied else set()):
        return model
    block = model.block_of(model.calls[found.call])
    if len(next(p for p in operands(found.node) if info(p).role == "parameter").users) > 1:
        return model
    rest = closure(block.outputs, without={found.node})
    name = free("embedding", {b.name for b in model.blocks})
    pieces = [Piece(name, VOCABULARY, closure([found.node])), Piece(block.name, block.kind, rest)]
    return split_call(model, found.call, pieces)


def _head_table(model: Model, index: int) -> tuple[str, int]:
    """The name of the head's weight, and how many classes it has."""
    call, block = model.calls[index], model.block_of(model.calls[index])
    weight = head_of(block).weight
    return call.parameters[block.parameters.index(weight)], info(weight).meta.shape[vocabulary_dims(block)[weight]]


def _rows(lookup: _Lookup) -> int:
    return info(operands(lookup.node)[0]).meta.shape[0]


def _lookups(model: Model) -> Iterator[_Lookup]:
    """All lookups of ids of the batch that can be split by rows."""
    for index, call in enumerate(model.calls):
        block = model.block_of(call)
        names = dict(zip(block.parameters, call.parameters, strict=True))
        for node in block.ops:
            if op_name(node) == _EMBEDDING and _has_plain_gradient(node):
                table, ids = operands(node)
                if table in block.placeholders("parameter") and ids in _batch_values(model, index, block):
                    yield _Lookup(index, node, names[table])


def _has_plain_gradient(node: fx.Node) -> bool:
    given = arguments(node)
    return not given["scale_grad_by_freq"] and not given["sparse"]


def _readers(model: Model, name: str) -> set[int]:
    return {index for index, call in enumerate(model.calls) if name in call.parameters}


# --- what must hold, and padding --------------------------------------------------------------------


def _check_readers(model: Model) -> None:
    """Nobody else reads what is split."""
    calls = vocabulary_calls(model)
    assert calls is not None
    for own in [i for i in (calls.embedding, calls.head) if i is not None]:
        for name in model.calls[own].parameters:
            others = _readers(model, name) - {calls.embedding, calls.head}
            for other in sorted(others):
                call = model.calls[other]
                raise StageError(
                    f"parameter {name!r} of the head is read by {call.path or model.block_of(call).name} too"
                )


def _padded(model: Model, ranks: int) -> Model:
    """Tables, and the logits, become longer, up to a multiple of so many rows for each of ``ranks``."""
    tables = [block for block in model.blocks if block.kind == VOCABULARY]
    multiple = ranks * max(_aligned_rows(block, ranks) for block in tables)
    for block in tables:
        for node, dim in vocabulary_dims(block).items():
            for same in conversions(node):
                lengthen(same, dim, multiple)
        for node in head_of(block).path if is_head(block) else ():
            lengthen(node, 1, multiple)
    return model


def _aligned_rows(block: Block, ranks: int) -> int:
    """Of how many rows each rank's part of the logits is a multiple: two where there are so few classes that the last
    rank would have none."""
    if not is_head(block):
        return 2
    logits = info(head_of(block).product).meta
    rows, classes = ALIGNED_BYTES // logits.dtype.itemsize, logits.shape[1]
    each = -(-classes // (ranks * rows)) * rows
    return rows if (ranks - 1) * each < classes else 2
