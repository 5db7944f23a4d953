"""What can't be planned is refused with one message that says what would work, in Python and on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autopar
from autopar import AutoparError, cli
from autopar.errors import ArgumentError, BudgetError, ClusterError, ScheduleError, ShardingError, StageError
from tests.models import make

CPU = (Path(autopar.__file__).parent / "cost_models/data/cpu.toml").read_text()


def made() -> tuple[nn.Module, Any]:
    """A batch of 4 through six layers, of 4 to 32 wide; what the command line is given."""
    case = make("mlp", 4)
    return case.model, case.batch


def refused(gpus: Any, **given: Any) -> AutoparError:
    case = make("mlp", 4)
    with pytest.raises(AutoparError) as found:
        autopar.compile(case.model, gpus, sample=case.batch, **{"cluster": "cpu", **given})
    return found.value


def refused_by_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int | str | None, str]:
    """The exit code, and what was printed, in one line."""
    common = ["autopar", "plan", "tests.test_bad_input:made", "--cluster", "cpu"]
    monkeypatch.setattr(sys, "argv", [*common, *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    printed = capsys.readouterr()
    assert not printed.out
    return stopped.value.code, " ".join(printed.err.split())


CASES = [
    ({"gpus": 0}, ArgumentError, "gpus=0; it must be a whole number of at least 1"),
    ({"gpus": -8}, ArgumentError, "gpus=-8; it must be a whole number of at least 1"),
    ({"gpus": 7}, ArgumentError, "gpus=7 can't all be used: no degrees ... use gpus=6, or another batch"),
    ({"gpus": 1_000_000}, ArgumentError, "use gpus=768, or another batch"),
    ({"mesh": "dp=3"}, ArgumentError, "doesn't divide gpus=4; use gpus=3, or other degrees"),
    ({"mesh": "dp=2,tp=4"}, ArgumentError, "doesn't divide gpus=4; use gpus=8, or other degrees"),
    ({"mesh": "ep=2"}, ShardingError, "MLP has no product with a weight per expert; leave ep out of the mesh"),
    ({"mesh": "dp=0"}, ArgumentError, "mesh axis 'dp' has size 0"),
    ({"microbatches": 3}, ArgumentError, "microbatches=3 doesn't divide ... microbatches may be one of [1, 2, 4]"),
    ({"microbatch": 8}, ArgumentError, "microbatch may be one of [1, 2, 4]"),
    ({"microbatch": 2, "microbatches": 4}, ArgumentError, "are 8 rows on each rank ... leave one of the two out"),
    ({"mesh": "dp=4", "zero": 1, "zero_ranks": 8}, ArgumentError, "zero_ranks may be one of [1, 2, 4]"),
    ({"zero_ranks": 2, "zero": 0}, ArgumentError, "say zero=1, 2 or 3 with it"),
    ({"schedule": "1f1b", "chunks": 2}, ScheduleError, "it takes exactly 1"),
    ({"chunks": 2, "mesh": "dp=4"}, ArgumentError, "leave chunks out, or use pp of 2 or more"),
    ({"schedule": "2f2b"}, ArgumentError, "schedule='2f2b' is none of naive, gpipe, 1f1b"),
    ({"schedule": "pipedream", "recompute": "full", "mesh": "pp=4"}, ArgumentError, "Use a synchronous schedule, or"),
    ({"vocabulary": "vocab-1", "mesh": "pp=4"}, StageError, "the loss has no cross entropy over classes"),
    ({"clip_norm": -1.0}, ArgumentError, "clip_norm=-1.0; it must be more than 0"),
    ({"cluster": "h101"}, ClusterError, "did you mean 'h100'?"),
]


@pytest.mark.parametrize(("given", "error", "words"), CASES, ids=lambda value: str(value)[:60])
def test_from_python_and_from_the_command_line(
    given: dict[str, Any],
    error: type[AutoparError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"gpus": 4, **given}
    typed = {**given, **({"mesh": cli_mesh(given["mesh"])} if "mesh" in given else {})}
    found = refused(typed.pop("gpus"), **typed)
    assert type(found) is error
    assert all(part in str(found) for part in words.split(" ... "))
    options = [item for name, value in given.items() for item in (f"--{name.replace('_', '-')}", str(value))]
    code, printed = refused_by_command(monkeypatch, capsys, *options)
    assert code == 2
    assert printed == f"{error.__name__}: {' '.join(str(found).split())}"


def cli_mesh(text: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


@pytest.mark.parametrize("gpus", [True, 2.0, "8", None])
def test_gpus_that_are_no_whole_number(gpus: Any) -> None:
    assert str(refused(gpus)) == f"gpus={gpus!r}; it must be a whole number of at least 1"


@pytest.mark.parametrize("mesh", ["dp=2", [2, 2], {"dp": 2.0}, {"dp": True}])
def test_a_mesh_that_is_none(mesh: Any) -> None:
    found = refused(4, mesh=mesh)
    assert isinstance(found, ArgumentError)
    assert "mesh" in str(found)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("memory_bytes_per_second = 17e9\n", "", "device.memory_bytes_per_second is missing"),
        ("17e9", "-17e9", "device.memory_bytes_per_second is -17000000000.0"),
        ("memory_bytes = 4294967296", "memory_bytes = 0", "device.memory_bytes is 0"),
        ("bytes_per_second = 910e6", "bytes_per_second = nan", "intra_node.bytes_per_second is nan"),
        ("devices_per_node = 64", "devices_per_node = 0.5", "devices_per_node"),
        ("[device]", "[device", "is not TOML"),
    ],
)
def test_a_cluster_file_with_missing_or_absurd_figures(
    before: str,
    after: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "mine.toml"
    assert before in CPU
    path.write_text(CPU.replace(before, after, 1))
    found = refused(2, cluster=str(path))
    assert isinstance(found, ClusterError)
    assert str(path) in str(found)
    assert words in str(found)
    code, printed = refused_by_command(monkeypatch, capsys, "--gpus", "2", "--cluster", str(path))
    assert code == 2
    assert words in printed


def test_a_budget_above_the_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = refused(2, budget_bytes=5 << 30)
    assert isinstance(found, ArgumentError)
    assert "has 4 GiB; use budget_bytes=4294967296 or less, or leave it out" in str(found)
    assert refused_by_command(monkeypatch, capsys, "--gpus", "2", "--budget", "5")[1].endswith(str(found))


def test_a_model_that_fits_in_no_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What would is offered; and what is done then fits."""
    found = refused(2, budget_bytes=37_000, offload=())
    text = str(found)
    assert isinstance(found, BudgetError)
    assert text.startswith("nothing fits on 2 GPUs with budget_bytes=37000, offload=(): the leanest way found needs ")
    assert "It fits with the device's 4 GiB (" in text
    assert "; or on " in text
    case = make("mlp", 4)
    plan = autopar.compile(case.model, 2, sample=case.batch, cluster="cpu", budget_bytes=found.needed_bytes).plan
    assert max(plan.peak_bytes) <= found.needed_bytes
    options = ("--gpus", "2", "--budget", str(37_000 / 2**30), "--offload", "none")
    code, printed = refused_by_command(monkeypatch, capsys, *options)
    assert (code, printed) == (2, f"BudgetError: {text}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "2.5"), "Invalid value for '--gpus'"),
        (("--gpus", "many"), "Invalid value for '--gpus'"),
        ((), "Missing option '--gpus'"),
        (("--gpus", "2", "--budget", "nan"), "--budget nan is no number of GiB"),
        (("--gpus", "2", "--budget", "inf"), "--budget inf is no number of GiB"),
        (("--gpus", "2", "--budget", "-1"), "budget_bytes=-1073741824"),
        (("--gpus", "2", "--batch", "0"), "batch=0; it must be a whole number of at least 1"),
        (("--gpus", "2", "--sequence", "-1"), "sequence=-1; it must be a whole number of at least 1"),
    ],
)
def test_what_the_command_line_alone_can_get_wrong(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = refused_by_command(monkeypatch, capsys, *arguments)
    assert code == 2
    assert words in printed
    assert "Traceback" not in printed
