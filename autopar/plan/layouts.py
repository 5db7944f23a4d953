"""What a plan says of one block: where its parameters and activations are, and what is sent where that changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from autopar.plan.parts import BlockPlan, MessagePlan, NodePlan
from autopar.plan.tables import Column, Section
from autopar.plan.text import bytes_text, units_text

_WIDTHS: Final = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_SHORT: Final = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}
_STORED: Final = ("parameter", "buffer")
_SPLIT: Final = "vocabulary"

PARAMETERS: Final = (
    Column("name", "parameter"),
    Column("kind", "kind"),
    Column("shape", "a rank's part"),
    Column("types", "layout"),
    Column("bytes", "bytes", "bytes"),
)
ACTIVATIONS: Final = (
    Column("name", "activation"),
    Column("shape", "a rank's part"),
    Column("types", "layout"),
    Column("forward", "forward sends"),
    Column("backward", "backward sends"),
    Column("source", "source", spare=True),
)


def of_block(block: BlockPlan, pipeline_ranks: int) -> list[Section]:
    """Two tables: the block's parameters, and its activations in order, those alike that follow each other as one.

    Shapes in a block of a split vocabulary are those of all ``pipeline_ranks`` together.
    """
    where = units_text(block.paths) if any(block.paths) else "code between modules"
    if block.kind == _SPLIT:
        where += f"; each of {pipeline_ranks} pipeline ranks has a part of the table's rows"
    stored = [node for node in block.nodes if node.op in _STORED]
    made = [node for node in block.nodes if node.op not in _STORED and not _is_marker(node)]
    return [
        Section(
            f"parameters of {block.name}",
            f"parameters of {block.name}: {where}",
            PARAMETERS,
            tuple((n.source or n.name, n.op, shape_text(n), layout(n), _bytes(n)) for n in stored),
        ),
        Section(
            f"activations of {block.name}",
            f"activations of {block.name}: {where}",
            ACTIVATIONS,
            tuple(_activation(list(alike)) for _, alike in groupby(made, key=_kind)),
        ),
    ]


def _is_marker(node: NodePlan) -> bool:
    """What moves nothing and changes no value: a parameter that is about to be used, whose gradient is summed once."""
    sides = {side.strip() for choice in node.choices.values() for side in choice.split("->")}
    return node.op == "convert" and not node.messages and sides <= {"I", "R"}


def _kind(node: NodePlan) -> tuple[str, ...]:
    """What nodes that share a row have in common; one that sends has its own."""
    own = (node.name,) if node.messages else ()
    return (shape_text(node), layout(node), "input" if node.op == "input" else "", *own)


def _activation(nodes: Sequence[NodePlan]) -> tuple[str, ...]:
    first, last = nodes[0], nodes[-1]
    names = first.name if len(nodes) == 1 else f"{first.name} … {last.name} ({len(nodes)})"
    messages = [list(_sent(last.messages, backward=way)) for way in (False, True)]
    source = next((node.source for node in nodes if node.source), "")
    return (names, shape_text(last), layout(last), *("; ".join(texts) for texts in messages), source)


def _sent(messages: Sequence[MessagePlan], *, backward: bool) -> Iterator[str]:
    """``all_gather@tp 28 MiB``, ``7 x send@cp 4 MiB``."""
    for message in messages:
        if message.backward == backward:
            times = f"{message.times} x " if message.times > 1 else ""
            yield f"{times}{message.kind}@{message.axis} {bytes_text(message.bytes)}"


def layout(node: NodePlan) -> str:
    """``S(1)@tp P@dp``: the types of what a node makes, axes where it is whole left out; "whole" where it is on all."""
    kinds = {axis: choice.partition("->")[2].split()[0] for axis, choice in node.choices.items() if axis != "mb"}
    return " ".join(f"{kind}@{axis}" for axis, kind in kinds.items() if kind not in ("R", "I")) or "whole"


def shape_text(node: NodePlan) -> str:
    """``bf16[1, 4096, 512]``."""
    short = node.dtype
    for long, letters in _SHORT.items():
        short = letters + short.removeprefix(long) if short.startswith(long) else short
    return f"{short}[{', '.join(map(str, node.shape))}]"


def _bytes(node: NodePlan) -> int:
    count = 1
    for extent in node.shape:
        count *= extent
    digits = "".join(c for c in node.dtype.partition("_")[0] if c.isdigit())
    return count * _WIDTHS.get(digits, 1)
