"""The table of benchmarks that train several sides in the same processes, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

MIB = 2**20
COLUMNS = ("tokens/s", "ratio min", "median", "max", "peak MiB", "CPU ms a step", "loss error")


def side_table(
    title: str, caption: str, figures: Mapping[str, Any], ratios: Mapping[str, Sequence[float]], tokens: int
) -> Table:
    """A row for each side of ``ratios``, which has its ratio to what it is compared with in each round. ``figures`` by
    side: ``seconds`` of a step in each round, ``peak_bytes``, ``cpu_seconds`` of a step by process, ``loss_errors``;
    a step is of ``tokens``."""
    shown = Table(title=title, caption=caption)
    shown.add_column("side")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    for side, found in ratios.items():
        shown.add_row(side, *_cells(side, figures, found, tokens))
    return shown


def _cells(side: str, figures: Mapping[str, Any], ratios: Sequence[float], tokens: int) -> Iterator[str]:
    yield f"{tokens / statistics.median(figures['seconds'][side]):,.0f}"
    yield from (f"{ratio:.2f}" for ratio in (min(ratios), statistics.median(ratios), max(ratios)))
    yield f"{figures['peak_bytes'][side] / MIB:.1f}"
    yield f"{1e3 * sum(figures['cpu_seconds'][side].values()):.0f}"
    yield f"{figures['loss_errors'][side]:.0e}"
