"""What a search tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autopar.report.search_progress import Progress, SearchProgress

if TYPE_CHECKING:
    from autopar.search.search import Search

Watcher = Callable[[str, "Search"], None]
"""Called with what the search does next, and with the search."""


def tell(progress: Progress, phase: str, search: Search) -> None:
    """Pass on where ``search`` is."""
    progress(
        SearchProgress(
            phase=phase,
            points=search.points,
            discarded=max(0, search.points - search.laid_out - search.waiting),
            placed=len(search.placed),
            laid_out=search.laid_out,
            best_seconds=search.best_seconds,
            bound_seconds=search.bound_seconds,
        )
    )
