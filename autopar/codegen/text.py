"""Small pieces of Python source: literals, wrapped lines, comments in one column."""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import GraphError
from autopar.graph import AxisRef
from autopar.spmd import Type

WIDTH = 120
INDENT = "    "
_MARK = "  # "
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')  # literals are written with double quotes only


STACKED = "*"
"""In the path of a parameter, for the numbers of those that it is made of."""


def literal(value: Any) -> str:
    """The Python source of a constant argument. Raises GraphError for one that has no source form."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, Type):
        return repr(value).replace(",", ", ")
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format | AxisRef):
        return str(value)
    if isinstance(value, torch.device):
        return "self.axes.device"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    raise GraphError(f"an argument of type {type(value).__name__} can't be written as source: {value!r}")


def attribute(path: str) -> str:
    """``self.model.layers[3].weight`` for ``model.layers.3.weight``, ``self`` for ""; ``experts["*"]`` for what is
    stacked of all experts."""
    text = "self"
    for part in filter(None, path.split(".")):
        if is_index(part):
            text += f"[{part}]"
        elif part == STACKED:
            text += f"[{literal(part)}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            text += f".{part}"
        else:
            text = f"getattr({text}, {literal(part)})"
    return text


def is_index(part: str) -> bool:
    """Whether a child of this name is reached by ``container[part]``."""
    return part.isdecimal() and part == str(int(part))


def human_bytes(count: int) -> str:
    """``512 B``, ``28.0 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def spans(numbers: Iterable[int]) -> str:
    """``0 … 3, 6`` for 0, 1, 2, 3, 6."""
    if isinstance(numbers, range) and numbers.step == 1 and len(numbers) > 1:  # may be of all ranks
        return f"{numbers[0]} … {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} … {r[-1]}" for r in runs)


@dataclass(frozen=True)
class Origin:
    """Which op of the model a line computes: a call of its block, the node, the variable it gives a value."""

    call: int
    node: str
    variable: str


@dataclass(frozen=True)
class Line:
    """A line of source before it is wrapped: its indent in levels, code, comment, and what it computes."""

    indent: int
    code: str
    comment: str = ""
    origin: Origin | None = None

    @property
    def opens(self) -> bool:
        """Whether it opens a class or function; such comments stay beside the code."""
        return self.code.startswith(("class ", "def "))


class Row(str):
    """A row of the finished text that ends a line with an origin."""

    __slots__ = ("origin",)
    origin: Origin

    @classmethod
    def of(cls, text: str, origin: Origin) -> Row:
        row = cls(text)
        row.origin = origin
        return row


def layout(lines: Sequence[Line]) -> list[str]:
    """Wrap what is too long, and put the comments into one column, as far as they fit there."""
    wrapped = [(wrap(INDENT * line.indent + line.code), line) for line in lines]
    aligned = [(len(rows[-1]), line.comment) for rows, line in wrapped if line.comment and not line.opens]
    column = max(sorted({code for code, _ in aligned}), key=lambda c: _fitting(aligned, c), default=0)
    return [
        row
        for rows, line in wrapped
        for row in _marked(_with_comment(rows, line.comment, 0 if line.opens else column), line.origin)
    ]


def _marked(rows: list[str], origin: Origin | None) -> list[str]:
    return rows if origin is None else [*rows[:-1], Row.of(rows[-1], origin)]


def _fitting(aligned: Sequence[tuple[int, str]], column: int) -> int:
    """How many comments can begin at ``column``."""
    room = WIDTH - len(_MARK) - column
    return sum(code <= column and len(comment) <= room for code, comment in aligned)


def _with_comment(rows: list[str], comment: str, column: int) -> list[str]:
    """In the column, else right behind the code, else above it."""
    if not comment:
        return rows
    for joined in (f"{rows[-1]:<{column}}{_MARK}{comment}", f"{rows[-1]}{_MARK}{comment}"):
        if len(joined) <= WIDTH:
            return [*rows[:-1], joined]
    indent = rows[0][: len(rows[0]) - len(rows[0].lstrip())]
    above = f"{indent}# {comment}"
    return [above if len(above) <= WIDTH else above[: WIDTH - 1] + "…", *rows]


def wrap(line: str, width: int = WIDTH) -> list[str]:
    """Break a line that is too long inside its last outermost bracket, as few times as will do."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    start, end = _outer_brackets(line)
    if start < 0:
        return [line]
    items = [item + "," for item in _split_commas(line[start + 1 : end])]
    if line[end - 1] != "," and len(f"{indent}{INDENT}{' '.join(items)}") <= width + 1:
        items[-1] = items[-1].removesuffix(",")
    return [line[: start + 1], *_fill(items, indent + INDENT, width), indent + line[end:]]


def _fill(items: Sequence[str], indent: str, width: int) -> list[str]:
    """Items one after another, a new row where the next doesn't fit."""
    rows: list[str] = []
    for item in items:
        if rows and len(rows[-1]) + 1 + len(item) <= width:
            rows[-1] += f" {item}"
        else:
            rows.append(indent + item)
    return [part for row in rows for part in (wrap(row, width) if len(row) > width else [row])]


def _outer_brackets(line: str) -> tuple[int, int]:
    """Where the last bracket that is opened at depth 0 begins and ends; (-1, -1) where there is none."""
    depth, start, found = 0, -1, (-1, -1)
    for i, c in enumerate(_without_strings(line)):
        if c in "([{":
            start = i if depth == 0 else start
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth == 0 and i > start + 1:
                found = (start, i)
    return found


def _split_commas(text: str) -> list[str]:
    items, depth, begin = [], 0, 0
    for i, c in enumerate(_without_strings(text)):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            items.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return [*items, last] if last else items


def _without_strings(text: str) -> str:
    """The same length, with nothing in it that a string says."""
    return _STRING.sub(lambda match: "_" * len(match[0]), text)
