"""recompute: calls that recompute other parts of themselves become calls of other blocks.

Guarantees: equal values and gradients (nothing is rewritten); all calls of a block recompute the same regions, so that
each choice of regions is one class of the emitted text. Example: layers 0 to 3 of 8 recompute their attention:
``Layer`` serves layers 4 to 7, and ``LayerRecomputed`` the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.errors import GraphError
from autopar.graph import Block, Model, is_getitem, operands


@dataclass(frozen=True)
class Region:
    """A run of ops, by the names of its first and last one, that is dropped after the forward and computed again in the
    backward; ``note`` is what the emitted text says of it."""

    first: str
    last: str
    note: str = ""


Regions = tuple[Region, ...]


def own_modules(model: Model) -> frozenset[int]:
    """Calls that are a module each, and so can have code of their own; other calls are written into their stage."""
    paths = [call.path for call in model.calls]
    return frozenset(
        index
        for index, call in enumerate(model.calls)
        if model.block_of(call).kind == "layer" and call.path and paths.count(call.path) == 1
    )


def split_blocks(model: Model, recompute: Mapping[int, Regions]) -> tuple[Model, dict[int, Regions]]:
    """The model with a block for each choice of regions (by call; absent: none), and the regions of each block."""
    choices: dict[int, list[Regions]] = {}
    for index, call in enumerate(model.calls):
        known = choices.setdefault(call.block, [])
        if recompute.get(index, ()) not in known:
            known.append(recompute.get(index, ()))
    blocks, places = list(model.blocks), {}
    for number, several in choices.items():
        names = _names(model.blocks[number].name, several)
        for k, (regions, name) in enumerate(zip(several, names, strict=True)):
            places[number, regions] = number if k == 0 else len(blocks)
            made = replace(model.blocks[number], name=name)
            blocks[places[number, regions] : places[number, regions] + 1] = [made]
    calls = [replace(call, block=places[call.block, recompute.get(i, ())]) for i, call in enumerate(model.calls)]
    return replace(model, blocks=blocks, calls=calls), {place: r for (_, r), place in places.items() if r}


def _names(base: str, several: Sequence[Regions]) -> list[str]:
    """``Layer``, ``LayerRecomputed``, ``LayerRecomputed2`` …; of a single choice, ``Layer``."""
    if len(several) == 1:
        return [base]
    numbers = itertools.count(1)
    numbered = [next(numbers) if regions else 0 for regions in several]
    return [f"{base}{'Recomputed' if n else ''}{n if n > 1 else ''}" for n in numbered]


def groups(block: Block) -> list[tuple[fx.Node, ...]]:
    """The ops in order, each with the getitem nodes that take its results: what a region has whole or not at all."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in block.ops:
        if is_getitem(node):
            found[_maker(node)].append(node)
        else:
            found[node] = [node]
    return [tuple(group) for group in found.values()]


def _maker(node: fx.Node) -> fx.Node:
    while is_getitem(node):
        node = operands(node)[0]
    return node


def nodes_of(block: Block, region: Region) -> list[fx.Node]:
    """The ops of a region, in order. Raises GraphError where the block has no such ops."""
    order = groups(block)
    place = {group[0].name: i for i, group in enumerate(order)}
    if region.first not in place or region.last not in place:
        raise GraphError(
            f"block {block.name} has no run of ops from {region.first!r} to {region.last!r} to recompute; "
            "the plan is of another model: plan again"
        )
    return [node for group in order[place[region.first] : place[region.last] + 1] for node in group]
