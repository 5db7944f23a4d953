"""What a plan says of itself, as tables in a terminal: :meth:`autopar.plan.Plan.explanation` in rich's."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.plan import Explanation, Section


def print_explanation(console: Console, explanation: Explanation) -> None:
    """The summary, then a table for each section; texts wrap in narrow terminals, figures don't."""
    console.print(Text(explanation.summary))
    for section in explanation.sections:
        console.print()
        console.print(Text(section.title, style="bold"))
        if section.rows:
            table = section_table(section)
            fits = console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width
            console.print(table if fits else section_table(section, spare=False))
        for line in section.lines:
            console.print(Text(line))


def section_table(section: Section, *, spare: bool = True) -> Table:
    """Its rows; columns without anything in them are left out, and those that can be spared without ``spare``."""
    columns, cells = section.shown()
    kept = [number for number, column in enumerate(columns) if spare or not column.spare]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in (columns[number] for number in kept):
        figure = column.unit != ""
        table.add_column(column.header, justify="right" if figure else "left", no_wrap=figure, overflow="fold")
    for row in cells:
        table.add_row(*(Text(row[number]) for number in kept))
    return table
