"""Where a model's head is: the product with the vocabulary's table, and the cross entropy of its logits."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autopar.errors import StageError
from autopar.graph import Block, Model, op_name, where
from autopar.passes.logits import CROSS_ENTROPY, Logits, trace
from autopar.passes.recut import is_batch, merge_calls


def find_head(model: Model) -> tuple[Model, int, Logits]:
    """A copy in which the head and all after it is one call, that call, and the head in its block.

    Raises StageError where the loss has no cross entropy or several, or one whose logits are no product with a table.
    """
    first = _entropy_call(model)
    while True:
        merged = merge_calls(model, first, _glue_name(model, first))
        block = merged.block_of(merged.calls[first])
        found = trace(next(n for n in block.ops if op_name(n) == CROSS_ENTROPY))
        if not isinstance(found, fx.Node):
            return merged, first, found
        source = merged.calls[first].operands[block.inputs.index(found)] if found in block.inputs else None
        if source is None or is_batch(merged, source):
            raise StageError(f"{where(found)}: the logits are no product with a parameter")
        first = source.call


def drop_dead(block: Block) -> None:
    """Ops that nobody reads go."""
    for node in reversed(block.ops):
        if not node.users:
            block.graph.erase_node(node)


def free(name: str, taken: Collection[str]) -> str:
    """``name``, made longer until nobody has it."""
    while name in taken:
        name += "_"
    return name


def _entropy_call(model: Model) -> int:
    """The call with the one cross entropy."""
    found = [
        (index, node)
        for index, call in enumerate(model.calls)
        for node in model.block_of(call).ops
        if op_name(node) == CROSS_ENTROPY
    ]
    if not found:
        raise StageError("the loss has no cross entropy over classes")
    if len(found) > 1:
        raise StageError(f"there are {len(found)} cross entropies, {' and '.join(where(n) for _, n in found)}")
    return found[0][0]


def _glue_name(model: Model, first: int) -> str:
    """The name of the call that the head is cut from; that of the block where it is glue already."""
    block = model.block_of(model.calls[first])
    return block.name if block.kind == "glue" else free("glue", {b.name for b in model.blocks})
