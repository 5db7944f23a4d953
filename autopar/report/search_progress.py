"""What a search says of itself while it runs, and a live line of it on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autopar.plan import seconds_text


@dataclass(frozen=True)
class SearchProgress:
    """Where a search is: ``phase`` says what it does now ("capture", "place", "lay out", …).

    Of ``points`` in the space, ``discarded`` are known to be worse than the best, ``placed`` had their axes solved (or
    share that with others), ``laid_out`` were timed action by action. The best step so far takes ``best_seconds`` (inf:
    none yet), and no plan in the space one below ``bound_seconds`` (0: not known yet).
    """

    phase: str
    points: int = 0
    discarded: int = 0
    placed: int = 0
    laid_out: int = 0
    best_seconds: float = float("inf")
    bound_seconds: float = 0.0

    @property
    def gap(self) -> float:
        """What the best step may still be too long by, as a fraction of it; 1 before there is one."""
        return max(0.0, 1 - self.bound_seconds / self.best_seconds) if 0 < self.best_seconds < float("inf") else 1.0

    @property
    def counts(self) -> str:
        """``12,960 points, 12,911 discarded, 14 placed, 9 laid out``."""
        found = (("points", self.points), ("discarded", self.discarded), ("placed", self.placed))
        return ", ".join(f"{count:,} {name}" for name, count in (*found, ("laid out", self.laid_out)) if count)

    @property
    def proven(self) -> str:
        """``best 4.31 s, nothing below 4.29 s``."""
        best = [f"best {seconds_text(self.best_seconds)}"] if self.best_seconds < float("inf") else []
        least = min(self.bound_seconds, self.best_seconds)  # the bound of what is left may be above the best
        bound = [f"nothing below {seconds_text(least)}"] if least else []
        return ", ".join(best + bound)

    def __str__(self) -> str:
        """``lay out: 12,960 points, 12,911 discarded, 14 placed, 9 laid out; best 4.31 s, nothing below 4.29 s``."""
        known = "; ".join(filter(None, (self.counts, self.proven)))
        return f"{self.phase}: {known}" if known else self.phase


Progress = Callable[[SearchProgress], None]
"""Who is told; it may not change anything of the search."""


@contextmanager
def live_progress(console: Console) -> Iterator[Progress]:
    """Shows the latest event on ``console`` while inside; where that is no terminal, the last one at the end alone."""
    latest: list[SearchProgress] = []
    if not console.is_terminal:
        yield lambda event: latest.__setitem__(slice(None), [event])
        if latest:
            console.print(str(latest[0]), highlight=False, markup=False, soft_wrap=True)
        return
    with Live(console=console, transient=True, refresh_per_second=8) as live:
        yield lambda event: live.update(_panel(event))


def _panel(event: SearchProgress) -> Table:
    """Two short lines, so that 80 columns do."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(Text(event.phase, style="bold"), event.counts)
    if event.proven:
        table.add_row("", event.proven)
    return table
