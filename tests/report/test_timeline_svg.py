"""The picture: what it shows, that it is to scale, and that it stays small."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from autopar.report import timeline_html, timeline_svg
from autopar.report.lanes import exchange_events
from autopar.report.timeline_svg import MAX_DETAILED, title
from autopar.schedules import Costs, Timeline, generate, lower, simulate_timeline
from autopar.schedules.looks import LOOKS
from autopar.schedules.weight_moves import WeightMoves
from tests.report.timelines import timeline_of

SVG = "{http://www.w3.org/2000/svg}"
WIDTH = 1000.0


def boxes(root: Element) -> dict[str, list[Element]]:
    """The boxes by the action in their title."""
    found: dict[str, list[Element]] = {}
    for rect in root.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text is not None:
            found.setdefault(title.text.split(" ")[0], []).append(rect)
    return found


def test_every_action_that_takes_time_has_its_box_to_scale(timeline: Timeline) -> None:
    found = boxes(ElementTree.fromstring(timeline_svg(timeline, WIDTH)))
    scale = WIDTH / timeline.makespan_seconds
    exchanges = exchange_events(timeline)
    seen = set()
    for event in timeline.events:
        name, start, end = str(event.action), event.start_seconds, event.end_seconds
        if end == start or name.startswith("RECV"):
            continue
        start, end = exchanges.get(event.action, (start, end))
        seen.add(name)
        at = [r for r in found[name] if float(r.get("x", 0)) == pytest.approx(start * scale, abs=0.01)]
        assert at, name
        assert float(at[0].get("width", 0)) == pytest.approx((end - start) * scale, abs=0.51)
    assert set(found) == seen


def test_boxes_of_a_rank_lie_in_its_row(one_f_one_b: Timeline) -> None:
    found = boxes(ElementTree.fromstring(timeline_svg(one_f_one_b)))
    tops = {name: float(rect.get("y", 0)) for name, (rect, *_) in found.items()}
    assert tops["F0@0"] == tops["B2@0"] < tops["SEND_F0@0>1"] < tops["REDUCE@0"] < tops["F0@1"]


def test_titles_and_numbers(one_f_one_b: Timeline) -> None:
    text = timeline_svg(one_f_one_b)
    assert "<title>F1@0 · forward of microbatch 1 in stage 0 · at 10 ms for 10 ms</title>" in text
    numbers = re.findall(r'class="in [FB]-\d-\d"[^>]*>(\d+)<', text)
    assert sorted(numbers) == sorted(str(m) for m in range(3) for _ in range(2 * 2))


def test_header_and_labels_say_the_figures(one_f_one_b: Timeline) -> None:
    text = timeline_svg(one_f_one_b)
    assert "1f1b: 2 pipeline ranks, 3 microbatches" in text
    assert f"idle {100 * one_f_one_b.idle_share:.1f} % of all ranks" in text
    assert "2 in flight, 1.95 KiB" in text
    for name in ("forward", "backward", "step", "activations sent", "gradients sent", "reductions", "bytes kept"):
        assert f">{name}<" in text


def test_gathers_of_weights_are_not_called_reductions() -> None:
    moved = lower(generate("1f1b", 2, 3), moves=WeightMoves("step"))
    costs = Costs.uniform(moved, forward_seconds=0.01, backward_seconds=0.02, reduce_seconds=0.004)
    text = timeline_svg(simulate_timeline(moved, replace(costs, gather_seconds=(0.003,) * 2)))
    assert ">weights gathered, gradients reduced<" in text
    assert ">reductions<" not in text
    assert "isn't drawn" not in text


def test_gathers_within_passes_are_missed() -> None:
    moved = lower(generate("1f1b", 2, 3), moves=WeightMoves("pass", scatters=True))
    costs = Costs.uniform(moved, forward_seconds=0.01, backward_seconds=0.02, reduce_seconds=0.004)
    root = ElementTree.fromstring(timeline_svg(simulate_timeline(moved, costs)))
    text = " ".join(node.text or "" for node in root.iter(f"{SVG}text"))
    assert "those of the others are gathered during passes, which isn't drawn" in text


def test_kinds_that_do_not_occur_are_not_in_the_legend(one_f_one_b: Timeline) -> None:
    text = timeline_svg(one_f_one_b)
    for name in ("logits", "weight gradient", "exchanges"):
        assert f">{name}<" not in text


def test_the_legend_says_what_numbers_and_shades_are(one_f_one_b: Timeline, large: Timeline) -> None:
    assert "numbers are those of microbatches; odd microbatches are lighter" in timeline_svg(one_f_one_b)
    assert "numbers are" not in timeline_svg(large)
    assert "odd microbatches are lighter" in timeline_svg(large)
    assert "lighter" not in timeline_svg(timeline_of(generate("1f1b", 2, 1)))


def test_chunks_have_colours_of_their_own(v_shaped: Timeline) -> None:
    text = timeline_svg(v_shaped)
    assert "forward, chunks 0 to 1" in text
    colours = dict(re.findall(r"\.chart \.(F-0-\d){fill:(#\w+)}", text))
    assert set(colours) == {"F-0-0", "F-0-1"}
    assert len(set(colours.values())) == 2


def test_the_kept_curve_ends_at_the_peak_and_at_zero(one_f_one_b: Timeline) -> None:
    root = ElementTree.fromstring(timeline_svg(one_f_one_b))
    curves = [p.get("d", "") for p in root.iter(f"{SVG}path") if p.get("class") == "count"][1:]  # after the legend's
    assert len(curves) == 2
    for curve, peak in zip(curves, one_f_one_b.peak_in_flight, strict=True):
        bottom, *heights = [float(y) for y in re.findall(r"(?:M0 |V)([\d.]+)", curve)]
        assert bottom - min(heights) == pytest.approx(23 * peak / 2, abs=0.1)
        assert heights[-1] == pytest.approx(bottom, abs=0.1)


def test_every_kind_has_a_name_that_is_its_own() -> None:
    assert len({look.name for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize("made", [timeline_svg, timeline_html], ids=["svg", "html"])
def test_a_picture_needs_nothing_else(timeline: Timeline, made: object) -> None:
    text = made(timeline)  # type: ignore[operator]
    assert not re.search(r"<script|<link|@import|url\(|src=|href=", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}


def test_above_the_limit_only_shapes_are_left(large: Timeline) -> None:
    text = timeline_svg(large)
    boxes = 12 * 440 * 2 + 2 * 11 * 440 + 12  # passes, sends, steps
    assert boxes > MAX_DETAILED
    assert f"{boxes:,} boxes: more than {MAX_DETAILED:,}, so without numbers and titles" in text
    assert "<title>" not in text
    ElementTree.fromstring(text)
    assert len(re.findall(r"M[\d.]+ 0h", text)) == boxes
    assert len(text) / boxes < 60


@pytest.mark.slow
def test_the_largest_job_makes_a_page_of_a_few_megabytes() -> None:
    page = timeline_html(timeline_of(generate("1f1b", 64, 512)))
    assert len(page.encode()) < 15e6


def test_a_step_that_takes_no_time_is_drawn_empty() -> None:
    free = timeline_of(
        generate("gpipe", 2, 2),
        forward_seconds=0, backward_seconds=0, send_seconds=0, reduce_seconds=0, step_seconds=0,
    )  # fmt: skip
    root = ElementTree.fromstring(timeline_svg(free))
    assert boxes(root) == {}
    assert "makespan 0 µs" in timeline_html(free).replace("</dt><dd>", " ")


def test_one_rank_and_one_microbatch_are_singular() -> None:
    assert title(generate("1f1b", 1, 1)) == "1f1b: 1 pipeline rank, 1 microbatch"
    assert title(generate("interleaved", 2, 4, chunks=2)) == "interleaved: 2 pipeline ranks, 4 microbatches, 4 stages"
