"""The memory report: table, figures for machines, picture, command."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autopar import cli
from autopar.plan import spans_text
from autopar.report import MemoryReport, memory_svg, print_section
from autopar.simulate.measure import RankMemory
from autopar.storages import Phase

MIB = 2**20


def memory(forward: int, backward: int) -> RankMemory:
    state = {"parameters": MIB}
    phases = (
        Phase("F0@0", state, {**state, "saved": forward * MIB}, {**state, "saved": forward * MIB}),
        Phase("B0@0", state, {**state, "saved": forward * MIB, "temporaries": backward * MIB}, state),
    )
    return RankMemory(phases, {}, 0)


REPORT = MemoryReport(
    [memory(4, 1), memory(4, 1), memory(2, 1)],
    [memory(4, 1), memory(5, 1), memory(2, 1)],
    "simulated ranks",
    12 * MIB,
    [0, 0, 1],
)


def test_errors_per_rank() -> None:
    assert REPORT.errors == pytest.approx([0.0, 6 / 7 - 1, 0.0])
    assert MemoryReport(REPORT.predicted, [], "", 1, REPORT.pipeline_index).errors == []


def test_table() -> None:
    console = Console(width=140, record=True)
    console.print(REPORT.table())
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines() if "B0@0" in line]
    both, measured, last, _ = rows
    assert both == [*("0-1", "B0@0", "1", "MiB", "4", "MiB", "1", "MiB", "6", "MiB", "50.0", "%")]
    assert measured[:2] == ["simulated", "ranks"]  # of the fuller rank
    assert "7" in measured
    assert last[0] == "2"


def test_a_narrow_terminal_has_every_figure() -> None:
    """Three ranks beside each other don't fit into 40 columns: kinds become rows, then ranks tables."""
    file = StringIO()
    print_section(Console(width=40, file=file), REPORT.section())
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    peaks = [line.removeprefix("peak").split() for line in lines if line.startswith("peak")]
    assert [word for row in peaks for word in row] == ["6", "MiB", "7", "MiB", "4", "MiB", "4", "MiB"]
    assert sum(line.startswith("temporaries") for line in lines) == len(peaks) > 1


def test_for_machines() -> None:
    found = json.loads(json.dumps(REPORT.to_json()))
    assert found["predicted"][2] == {
        "peak_bytes": 4 * MIB,
        "action": "B0@0",
        "kinds": {"parameters": MIB, "saved": 2 * MIB, "temporaries": MIB},
        "host_peak_bytes": 0,
        "phases": [["F0@0", 3 * MIB], ["B0@0", 4 * MIB]],
    }


def test_picture() -> None:
    root = ElementTree.fromstring(memory_svg(REPORT))
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 4  # two panels of two actions
    assert titles[1] == "B0@0: parameters 1 MiB, saved 4 MiB, temporaries 1 MiB"
    lines = list(root.iter("{http://www.w3.org/2000/svg}line"))
    assert len(lines) == 0  # a budget of twice the peak is out of the picture
    assert "budget" not in written(root)
    near = MemoryReport(REPORT.predicted, [], "", 7 * MIB, REPORT.pipeline_index)
    root = ElementTree.fromstring(memory_svg(near))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}line"))) == 2
    assert "budget: 7 MiB" in written(root)
    assert "not to the scale of time" in written(root)


def written(root: ElementTree.Element) -> str:
    """The text that can be seen."""
    return "\n".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))


def test_spans_of_ranks() -> None:
    assert spans_text([0, 1, 2, 8, 9, 11]) == "0-2, 8-9, 11"


def test_command(tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    job = ["memory", "tests.report.small_model:make", "--gpus", "2", "--mesh", "dp=2"]
    arguments = [*job, "--measure", "fake", "--json", "--svg", str(picture)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exception is None, result.output
    found = json.loads(result.output.splitlines()[-1])
    assert found["measured_on"] == "fake tensors"
    assert [rank["peak_bytes"] for rank in found["predicted"]] == [rank["peak_bytes"] for rank in found["measured"]]
    assert "<svg" in picture.read_text()
