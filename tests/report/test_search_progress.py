"""What a search says of itself while it runs: a live line on a terminal, the last one elsewhere."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from autopar.report import SearchProgress, live_progress

EVENT = SearchProgress("lay out", 12_960, 12_911, 14, 9, best_seconds=4.31, bound_seconds=4.29)


def test_an_event_prints_what_is_known() -> None:
    assert str(SearchProgress("capture")) == "capture"
    assert str(SearchProgress("place", points=500, placed=2)) == "place: 500 points, 2 placed"
    counts = "12,960 points, 12,911 discarded, 14 placed, 9 laid out"
    assert str(EVENT) == f"lay out: {counts}; best 4.31 s, nothing below 4.29 s"


def test_the_gap_is_that_of_the_best() -> None:
    assert SearchProgress("place").gap == 1
    assert EVENT.gap == pytest.approx(0.02 / 4.31)


def test_a_bound_above_the_best_proves_the_best() -> None:
    event = SearchProgress("build", best_seconds=4.0, bound_seconds=4.5)
    assert (event.gap, event.proven) == (0, "best 4.00 s, nothing below 4.00 s")


def test_elsewhere_than_on_a_terminal_the_last_event_alone_is_printed() -> None:
    file = StringIO()
    with live_progress(Console(file=file, width=40)) as progress:
        progress(SearchProgress("capture"))
        assert file.getvalue() == ""
        progress(EVENT)
    assert file.getvalue() == f"{EVENT}\n"


def test_without_events_nothing_is_printed() -> None:
    file = StringIO()
    with live_progress(Console(file=file)):
        pass
    assert file.getvalue() == ""


@pytest.mark.parametrize("width", [60, 120])
def test_a_terminal_sees_the_latest_event_and_is_clean_at_the_end(width: int) -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=width, legacy_windows=False)
    with live_progress(console) as progress:
        progress(SearchProgress("place [1/2]", points=500))
        progress(EVENT)
    text = file.getvalue()
    assert "place [1/2]" in text or "12,960 points" in text
    assert text.endswith("\x1b[2K") or "\x1b[2K" in text
