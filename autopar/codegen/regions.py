"""What of a block is recomputed, as methods of its class."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import fx

from autopar.codegen.names import short
from autopar.graph import Block, info
from autopar.passes.recompute import Region, nodes_of


@dataclass(frozen=True)
class RegionCode:
    """A region to be written: its ops, what it takes from outside in order of use, what others read of it.

    ``name`` is the method's; ``note`` stands behind its call.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    note: str
    name: str = ""


def region_code(block: Block, region: Region) -> RegionCode:
    """Raises GraphError where the block has no such ops."""
    nodes = nodes_of(block, region)
    inside, results = set(nodes), set(block.outputs)
    inputs = dict.fromkeys(o for node in nodes for o in node.all_input_nodes if o not in inside)
    outputs = [n for n in nodes if n in results or any(user not in inside for user in n.users if user.op != "output")]
    note = "recomputed in the backward" + (f": {region.note}" if region.note else "")
    return RegionCode(tuple(nodes), tuple(inputs), tuple(outputs), note)


def named(parts: Sequence[RegionCode], taken: Collection[str]) -> list[RegionCode]:
    """With the name of the module that a region is part of: ``recomputed_attn``; none is in ``taken``."""
    names = set(taken)
    found = []
    for part in parts:
        module = _common_module(part.nodes)
        base = name = f"recomputed_{short(module)}" if module else "recomputed"
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.add(name)
        found.append(replace(part, name=name))
    return found


def _common_module(nodes: Sequence[fx.Node]) -> str:
    """The innermost module that all ops belong to, "" for the layer itself."""
    levels = zip(*(info(node).module.split(".") for node in nodes), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
