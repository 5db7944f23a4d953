"""The page around the picture."""

from __future__ import annotations

from html.parser import HTMLParser

from autopar.report import timeline_html
from autopar.schedules import Timeline, generate
from autopar.schedules.looks import duration_text
from tests.report.timelines import timeline_of

_VOID = {"meta"}


class Page(HTMLParser):
    """Text by tag, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)


def test_facts_and_table(timeline: Timeline) -> None:
    page = Page(timeline_html(timeline))
    assert page.open == []
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts["makespan"] == duration_text(timeline.makespan_seconds)
    assert facts["idle, of all ranks"] == f"{100 * timeline.idle_share:.1f} %"
    assert facts["communication overhead"] == duration_text(timeline.communication_overhead_seconds)
    assert facts["peak in flight"] == str(max(timeline.peak_in_flight))
    ranks, columns = timeline.schedule.ranks, len(page.texts["th"])
    cells = page.texts["td"]
    assert len(cells) == ranks * columns
    for rank in range(ranks):
        row = dict(zip(page.texts["th"], cells[rank * columns :], strict=False))
        assert row["busy"] == duration_text(timeline.busy_seconds[rank])
        assert row["idle"] == duration_text(timeline.idle_seconds[rank])
        assert row["peak in flight"] == str(timeline.peak_in_flight[rank])


def test_bytes_kept_are_a_column_where_they_are_known(one_f_one_b: Timeline) -> None:
    assert "peak kept" in Page(timeline_html(one_f_one_b)).texts["th"]
    page = Page(timeline_html(timeline_of(generate("1f1b", 2, 3), activation_bytes=0)))
    assert "peak kept" not in page.texts["th"]
    assert len(page.texts["td"]) == 2 * len(page.texts["th"])


def test_stages_of_a_rank(v_shaped: Timeline) -> None:
    assert "<td>0, 3</td>" in timeline_html(v_shaped)


def test_the_page_is_right_for_paper(one_f_one_b: Timeline) -> None:
    text = timeline_html(one_f_one_b)
    assert "@media print" in text
    assert "background:#fff" in text


def test_a_note_says_what_is_left_out(large: Timeline, one_f_one_b: Timeline) -> None:
    assert "without numbers and titles" in "".join(Page(timeline_html(large)).texts["p"])
    assert "p" not in Page(timeline_html(one_f_one_b)).texts
