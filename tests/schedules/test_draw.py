from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from autopar.schedules import Costs, Picture, Schedule, generate, lower, parse_list, render, simulate_timeline
from autopar.schedules.actions import KINDS
from autopar.schedules.flow import COMPUTE
from autopar.schedules.looks import LOOKS, shade


def picture(name: str, stages: int, microbatches: int, width: int = 100, **costs: Any) -> Picture:
    return picture_of(generate(name, stages, microbatches), width, **costs)


def picture_of(schedule: Schedule, width: int = 100, **costs: Any) -> Picture:
    schedule = lower(schedule)
    costs = {"forward_seconds": 0.011, "backward_seconds": 0.022, **costs}
    return render(simulate_timeline(schedule, Costs.uniform(schedule, **costs)), width)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "width"),
    [
        ("1f1b", 4, 8, 100),
        ("gpipe", 4, 8, 100),
        ("1f1b", 4, 64, 100),
        ("1f1b", 12, 24, 100),
        ("1f1b", 2, 4, 60),
    ],
)
def test_pictures(name: str, stages: int, microbatches: int, width: int, golden: Callable[[str, str], None]) -> None:
    text = str(picture(name, stages, microbatches, width))
    golden(f"schedules/{name}_pp{stages}_m{microbatches}_w{width}_picture.txt", text)


def test_picture_with_communication_and_step(golden: Callable[[str, str], None]) -> None:
    drawn = picture("1f1b", 4, 8, send_seconds=0.004, reduce_seconds=0.01, step_seconds=0.02)
    golden("schedules/1f1b_pp4_m8_communication_picture.txt", str(drawn))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 64), (16, 16)])
@pytest.mark.parametrize("width", [20, 33, 80, 100, 250])
def test_every_row_fills_the_width(name: str, stages: int, microbatches: int, width: int) -> None:
    drawn = picture(name, stages, microbatches, width, send_seconds=0.003, step_seconds=0.05)
    rows, legend = drawn.lines[:stages], drawn.lines[stages:]
    for row in rows:
        assert sum(len(span.plain) for span in row) == width
    for line in drawn.lines:
        assert all(len(span.plain) == len(span.coloured) == cell_len(span.coloured) for span in line)
    assert all(sum(len(span.plain) for span in line) <= max(width, 30) for line in legend)


def test_idle_time_is_to_scale() -> None:
    """Rank 0 of GPipe idles a third of the time here: (p - 1) / (m + p - 1) with p = 2, m = 2."""
    row = str(picture("gpipe", 2, 2, width=len("rank 0 ") + 90)).splitlines()[0]
    assert row.count("·") == 30


def printed(drawn: Picture, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=100, **options).print(drawn)
    return out.getvalue()


def test_rich_prints_colours_where_there_are_any() -> None:
    drawn = picture("1f1b", 2, 4)
    coloured = printed(drawn, force_terminal=True, color_system="truecolor")
    assert "\x1b[38;2;255;255;255;48;2;31;95;158m" in coloured  # white on the blue of a forward
    assert "\x1b[38;2;0;0;0;48;2;224;159;62m" in coloured  # black on the amber of a backward
    assert "\x1b[2m·" in coloured  # idle is dim
    assert "=" not in coloured


def test_rich_prints_plain_text_elsewhere() -> None:
    drawn = picture("1f1b", 2, 4)
    lines = printed(drawn, color_system=None).splitlines()
    assert [line.rstrip() for line in lines] == str(drawn).splitlines()


@pytest.mark.parametrize(
    ("unit", "text"),
    [(100.0, "makespan 300 s"), (1.0, "makespan 3 s"), (2e-3, "makespan 6 ms"), (4.1e-6, "makespan 12.3 µs")],
)
def test_legend_chooses_a_readable_unit(unit: float, text: str) -> None:
    assert text in str(picture("gpipe", 1, 1, forward_seconds=unit, backward_seconds=2 * unit))


def test_a_step_that_takes_no_time_draws_nothing() -> None:
    legend = str(picture("gpipe", 2, 2, forward_seconds=0, backward_seconds=0)).splitlines()[-1]
    assert legend == "gpipe  ·· idle 0.0 % of all ranks  in flight 2 2  makespan 0 µs"


V_SHAPED = Schedule(
    "v", 4, 2, (0, 1, 1, 0),
    (
        parse_list("F0@0 F1@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 I0@0 W0@0 I1@0 W1@0"),
        parse_list("F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 I0@1 I1@2 W0@1 W1@2 I1@1 W1@1"),
    ),
)  # fmt: skip
SPLIT = Schedule(
    "split", 2, 2, (0, 1),
    tuple(parse_list(f"E0 F0@{r} E1 F1@{r} S0 U0 S1 U1 T0 T1 B0@{r} G0 B1@{r} G1") for r in range(2)),
    "naive", True,
)  # fmt: skip
STALE = Schedule("stale", 1, 2, (0,), (parse_list("F0@0 B0@0 UPDATE0@0 F1@0 B1@0 UPDATE1@0"),))
VOCABULARY_SECONDS = {"E": 0.006, "G": 0.006, "S": 0.008, "U": 0.004, "T": 0.01, "STATS": 0.005}


def test_picture_of_two_chunks_and_a_split_backward(golden: Callable[[str, str], None]) -> None:
    golden("schedules/v_chunks_picture.txt", str(picture_of(V_SHAPED, step_seconds=0.01)))


def test_picture_of_vocabulary_passes(golden: Callable[[str, str], None]) -> None:
    golden("schedules/vocabulary_picture.txt", str(picture_of(SPLIT, vocabulary_seconds=VOCABULARY_SECONDS)))


def test_picture_of_updates(golden: Callable[[str, str], None]) -> None:
    golden("schedules/updates_picture.txt", str(picture_of(STALE, step_seconds=0.02)))


def test_every_kind_that_occupies_a_rank_has_a_look() -> None:
    assert set(LOOKS) == {*COMPUTE, "STEP"}
    fills = [fill for look in LOOKS.values() for fill in look.fills if look.fills[0] != look.fills[1]]
    assert len(set(fills)) == len(fills)
    assert all(cell_len(fill) == 1 for look in LOOKS.values() for fill in look.fills)
    for kind in COMPUTE:  # kinds of stages tell chunks apart
        has_chunks = KINDS[kind].stage and kind != "UPDATE"
        assert (LOOKS[kind].first != LOOKS[kind].last) == has_chunks


def _contrast(colour: str, other: str) -> float:
    """WCAG 2.1: 1 for equal colours, 21 for black on white."""

    def luminance(text: str) -> float:
        values = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(colour), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_text_can_be_read_on_every_colour(chunks: int) -> None:
    for kind in LOOKS:
        for chunk in range(chunks):
            for microbatch in (0, 1):
                colours = shade(kind, microbatch, chunk, chunks)
                assert _contrast(colours.box, colours.text) >= 4.5


def test_chunks_have_colours_of_their_own() -> None:
    found = {shade("F", microbatch, chunk, 4).box for microbatch in (0, 1) for chunk in range(4)}
    assert len(found) == 8
    assert shade("F", 0, 0, 1) == shade("F", 0, 0, 4)
    coloured = printed(picture_of(V_SHAPED), force_terminal=True, color_system="truecolor")
    for colour in (shade("F", 0, 0, 2).box, shade("F", 0, 1, 2).box):
        channels = ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
        assert f"48;2;{channels}m" in coloured


@pytest.mark.parametrize("width", [20, 33, 60])
@pytest.mark.parametrize("schedule", [V_SHAPED, SPLIT, STALE], ids=lambda schedule: schedule.name)
def test_narrow_pictures_of_every_kind(schedule: Schedule, width: int) -> None:
    drawn = picture_of(schedule, width, step_seconds=0.01, vocabulary_seconds=VOCABULARY_SECONDS)
    rows, legend = drawn.lines[: schedule.ranks], drawn.lines[schedule.ranks :]
    assert all(sum(len(span.plain) for span in row) == width for row in rows)
    assert all(sum(len(span.plain) for span in line) <= max(width, 30) for line in legend)


def test_a_legend_too_wide_for_the_counts_says_the_most() -> None:
    drawn = str(picture("gpipe", 8, 100, 30))
    assert "in flight up to 100" in drawn
    assert "in flight 100 100" in str(picture("gpipe", 8, 100, 60))
