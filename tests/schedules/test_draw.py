from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from autopar.schedules import Costs, Picture, generate, lower, render, simulate_timeline


def picture(name: str, stages: int, microbatches: int, width: int = 100, **costs: Any) -> Picture:
    schedule = lower(generate(name, stages, microbatches))
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
    assert legend == "gpipe  ·· idle  bubble 0.0%  in flight 2 2  makespan 0 µs"
