"""``autopar timeline``, and the pictures of ``autopar plan``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from autopar import cli
from autopar.schedules import Schedule, generate, lower
from autopar.schedules.flow import COMPUTE
from autopar.schedules.registry import SCHEDULES
from tests.report.trace_format import check_format


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["timeline", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_picture_by_name() -> None:
    text = run("1f1b", "--ranks", "2", "--microbatches", "4")
    assert text.splitlines()[1].startswith("rank 1 ")
    assert "makespan 15 ms" in text  # (4 + 1) microbatches of 3 ms


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"pipedream"}))
def test_every_schedule_can_be_drawn(name: str) -> None:
    """With two chunks, each has half the work: all schedules do the same, so none is faster than the work of a rank."""
    head = SCHEDULES[name].heads[0]
    options = ("--ranks", "2", "--microbatches", "6", "--head", head, "--passes", "S=0")
    figures = json.loads(run(name, *options, "--json"))
    assert figures["busy_seconds"] == pytest.approx([0.018, 0.018])
    assert figures["makespan_seconds"] >= 0.018
    assert figures["schedule"]["name"] == name


def test_costs_of_a_rank_are_shared_by_its_chunks() -> None:
    options = ("--ranks", "2", "--microbatches", "4", "--chunks", "4", "--reduce", "8", "--activation", "1", "--json")
    figures = json.loads(run("interleaved", *options))
    assert figures["busy_seconds"] == pytest.approx([0.012, 0.012])
    assert figures["peak_activation_bytes"][0] == figures["peak_in_flight"][0] * 2**20 // 4


def test_pass_times() -> None:
    options = (
        "--ranks",
        "1",
        "--microbatches",
        "2",
        "--forward",
        "3",
        "--backward",
        "5",
        "--weight",
        "1",
        "--step",
        "7",
    )
    assert json.loads(run("zb-h1", *options, "--json"))["makespan_seconds"] == pytest.approx(0.023)
    split = ("1f1b", "--ranks", "2", "--head", "vocab-2", "--embedding", "--passes", "S=2,T=3,E=1,G=1", "--json")
    assert json.loads(run(*split))["busy_seconds"] == pytest.approx([4 * 0.01, 4 * 0.01])


def test_exchanges_are_posted_by_what_passes_take(tmp_path: Path) -> None:
    """A short head's: no microbatch waits for them, of lists of its own or from a file."""
    passes = "S=.06,T=.12,CAST_X=.1,STATS=.01,SUM_X=.1"
    times = ("--backward", "2.6", "--weight", ".9", "--send", ".02", "--passes", passes, "--json")
    figures = [
        json.loads(run("zb-v", "--ranks", "4", "--microbatches", str(count), "--head", "vocab-1", *times))
        for count in (16, 48)
    ]
    few, many = (figure["makespan_seconds"] for figure in figures)
    assert many - few == pytest.approx(32 * (1 + 2.6 + 0.06 + 0.12) / 1000, rel=0.01)
    schedule = Schedule.from_json(figures[1]["schedule"])
    lists = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in schedule.lists)
    written = tmp_path / "actions.txt"
    written.write_text(replace(schedule, lists=lists).to_text(), encoding="utf-8")
    assert json.loads(run("--actions", str(written), *times))["makespan_seconds"] == many


def test_files(tmp_path: Path) -> None:
    html, svg, trace = (tmp_path / name for name in ("a.html", "a.svg", "a.json"))
    run("gpipe", "--send", "0.5", "--html", str(html), "--svg", str(svg), "--trace", str(trace))
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    ElementTree.parse(svg)
    check_format(json.loads(trace.read_text(encoding="utf-8")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.json", "a.svg"]


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_list_from_a_file(is_complete: bool, tmp_path: Path) -> None:
    schedule = generate("gpipe", 2, 3)
    path = tmp_path / "lists.txt"
    path.write_text((lower(schedule) if is_complete else schedule).to_text())
    assert run("--actions", str(path)) == run("gpipe", "--ranks", "2", "--microbatches", "3")


def test_the_table_of_schedules() -> None:
    text = run("--list")
    for name in SCHEDULES:
        assert f" {name} " in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name one schedule to draw"),
        (["1f1b", "--actions", "lists.txt"], "name one schedule to draw"),
        (["nope"], "unknown schedule 'nope'; known schedules are naive"),
        (["1f1b", "--ranks", "0"], "--ranks 0; it must be a whole number of at least 1"),
        (["1f1b", "--microbatches", "-3"], "--microbatches -3; it must be"),
        (["interleaved", "--chunks", "0"], "--chunks 0; it must be"),
        (["1f1b", "--ranks", "100000000000000000000"], "are too many to draw"),
        (["interleaved", "--microbatches", "70000", "--chunks", "4"], "1120000 forwards are too many to draw"),
        (["synthesized"], "autopar plan MODEL --schedule synthesized draws it"),
        (["1f1b", "--chunks", "3"], "can't have 3 chunks per rank; it takes exactly 1"),
        (["1f1b", "--limit", "3"], "takes no memory limit"),
        (["pipedream", "--head", "vocab-1"], "can't have head 'vocab-1'"),
        (["1f1b", "--head", "vocab-9"], "can't have head 'vocab-9'"),
        (["1f1b", "--embedding"], "the embedding is split with a head only"),
        (["1f1b", "--weight", "3"], "--weight 3.0 is part of --backward 2.0"),
        (["1f1b", "--forward", "-1"], "--forward is -1.0 ms; it must be finite, from 0 up"),
        (["1f1b", "--reduce", "nan"], "--reduce is nan ms; it must be finite"),
        (["1f1b", "--head", "vocab-1", "--passes", "S=inf"], "--passes S is inf ms; it must be finite"),
        (["1f1b", "--activation", "-1"], "--activation is -1.0; it must be finite"),
        (["1f1b", "--passes", "S:1"], "doesn't read as S=0.5,T=0.5"),
        (["1f1b", "--passes", "F=1"], "names other passes than E, G, S, U, T"),
        (["--actions", "absent.txt"], "can't read the action lists absent.txt"),
        (["1f1b", "--html", "absent/folder/a.html"], "can't write absent/folder/a.html"),
    ],
)
def test_a_refusal_is_one_message_and_exit_2(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autopar", "timeline", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert words in printed
    assert "Traceback" not in printed


def test_plan_writes_its_timeline(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    arguments = ["plan", "tests.report.small_model:make", "--gpus", "2", "--mesh", "pp=2", "--microbatches", "2"]
    arguments += ["--schedule", "1f1b"]
    result = CliRunner().invoke(cli.app, [*arguments, "--trace", str(trace), "--html", str(page)])
    assert result.exit_code == 0, result.output
    value = json.loads(trace.read_text(encoding="utf-8"))
    check_format(value)
    assert {e["name"] for e in value["traceEvents"] if e["ph"] == "X"} >= {"F0@0", "B1@1", "STEP"}
    assert "2 pipeline ranks, 2 microbatches" in page.read_text(encoding="utf-8")
