"""Tables that people and machines read: raw values, columns that know their units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from autopar.plan.text import bytes_text, change_text, flops_text, percent_text, seconds_text

UNITS: Final[Mapping[str, Callable[[Any], str]]] = {
    "": str,
    "count": lambda value: f"{value:,}",
    "seconds": seconds_text,
    "bytes": bytes_text,
    "share": percent_text,
    "change": change_text,
    "flops": flops_text,
}
"""What a column's values are -> how people read them."""


@dataclass(frozen=True)
class Column:
    """``key`` names it in JSON, ``header`` in print ("": it isn't printed). Text goes left, figures right; what is
    ``spare`` is left out where there is no room."""

    key: str
    header: str
    unit: str = ""
    spare: bool = False

    def text(self, value: Any) -> str:
        """A value for people; None and an empty one are nothing."""
        return "" if value in (None, "") else UNITS[self.unit](value)


@dataclass(frozen=True)
class Section:
    """``lines`` of text and a table, of which either may be missing."""

    key: str
    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    lines: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows or self.lines)

    def shown(self) -> tuple[list[Column], list[list[str]]]:
        """Columns with anything in them, and the texts of their cells."""
        some = [any(column.text(row[i]) for row in self.rows) for i, column in enumerate(self.columns)]
        kept = [i for i, column in enumerate(self.columns) if some[i] and column.header]
        cells = [[self.columns[i].text(row[i]) for i in kept] for row in self.rows]
        return [self.columns[i] for i in kept], cells

    def to_json(self) -> dict[str, Any]:
        """``{"title", "lines", "rows"}``, each row by the keys of its columns."""
        keys = [column.key for column in self.columns]
        rows = [dict(zip(keys, row, strict=True)) for row in self.rows]
        return {"title": self.title, "lines": list(self.lines), "rows": rows}

    def __str__(self) -> str:
        columns, cells = self.shown()
        return "\n".join([self.title, *_aligned(columns, cells), *self.lines])


def _aligned(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> list[str]:
    if not cells:
        return []
    table = [[column.header for column in columns], *cells]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    sides = ["<" if column.unit == "" else ">" for column in columns]
    return [
        "  " + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in table
    ]
