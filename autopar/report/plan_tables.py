"""Tables in a terminal, whatever its width: :meth:`autopar.plan.Plan.explanation` and other sections in rich's."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.plan import Explanation, Section

_FOLDED, _GAP = 12, 2
"""Columns that a text needs at least, and that stand between two."""


def print_explanation(console: Console, explanation: Explanation) -> None:
    """The summary, then a table for each section."""
    console.print(Text(explanation.summary))
    for section in explanation.sections:
        console.print()
        print_section(console, section)


def print_section(console: Console, section: Section) -> None:
    """Title, rows and lines. Texts wrap in narrow terminals, figures don't: what can be spared is left out, and where
    that isn't enough columns become rows."""
    if section.title:
        console.print(Text(section.title, style="bold"))
    if section.rows:
        for table in _fitting(console, section):
            console.print(table)
    for line in section.lines:
        console.print(Text(line))


def section_table(section: Section, *, spare: bool = True) -> Table:
    """Its rows; columns without anything in them are left out, and those that can be spared without ``spare``."""
    columns, cells = section.shown()
    kept = [number for number, column in enumerate(columns) if spare or not column.spare]
    table = _plain()
    for column in (columns[number] for number in kept):
        figure = column.unit != ""
        table.add_column(column.header, justify="right" if figure else "left", no_wrap=figure, overflow="fold")
    for row in cells:
        table.add_row(*(Text(row[number]) for number in kept))
    return table


def _plain() -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def _fitting(console: Console, section: Section) -> list[Table]:
    """The first of the forms of a section that the console is wide enough for."""
    columns, cells = section.shown()
    widths = [max(len(row[i]) for row in [[c.header for c in columns], *cells]) + _GAP for i in range(len(columns))]
    if sum(widths) <= console.width:
        return [section_table(section)]
    pairs = zip(columns, widths, strict=True)
    folded = (width if column.unit else min(width, _FOLDED) for column, width in pairs if not column.spare)
    return [section_table(section, spare=False)] if sum(folded) <= console.width else list(_turned(console, section))


def _turned(console: Console, section: Section) -> Iterator[Table]:
    """Columns as rows, and beside their names as many of the section's rows as the console has room for."""
    columns, cells = section.shown()
    texts = [[column.header for column in columns], *cells]
    widths = [max(map(len, row)) + _GAP for row in texts]
    first = 1
    while first < len(texts):
        last, room = first, console.width - widths[0]
        while last < len(texts) and (last == first or widths[last] <= room):
            room -= widths[last]
            last += 1
        table = _plain()
        head, *others = zip(texts[0], *texts[first:last], strict=True)
        table.add_column(head[0], overflow="fold")
        for name in head[1:]:
            table.add_column(name, justify="right", overflow="fold")
        for row in others:
            table.add_row(*map(Text, row))
        yield table
        first = last
