"""The command line: what it prints, what machines read, how it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar import cli
from autopar.command_options import _PANELS, JobOptions
from autopar.errors import ArgumentError
from autopar.model_names import resolve
from autopar.plan import Plan

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 32,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return f"hf:{path}"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_plan_show_and_diff(model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    sizes = ("--batch", "4", "--sequence", "16")
    code, text = run("plan", model, "--gpus", "4", "--mesh", "pp=2,tp=2", *sizes, "-o", path)
    assert code == 0
    assert "pp 2 x dp 1 x tp 2" in text
    assert "peak memory" in text
    assert "pp 2 x dp 1 x tp 2" in run("show", path)[1]
    shown = json.loads(run("show", path, "--json")[1])
    assert shown["digest"] == Plan.load(path).digest
    assert shown["sections"]["time"]["rows"][-1]["exposed_seconds"] == Plan.load(path).step_seconds
    assert "plans are equal" in run("show", path, "--diff", path)[1]
    other = str(tmp_path / "other.json")
    code, text = run("plan", model, "--gpus", "4", "--mesh", "pp=2,dp=2", *sizes, "-o", other, "--json")
    assert Plan.from_json(text) == Plan.load(other)
    assert "tp: 2 -> 1" in run("show", path, "--diff", other)[1].splitlines()
    found = json.loads(run("show", path, "--diff", other, "--json")[1])
    assert {"group": "degrees", "path": "mesh_sizes.tp", "before": 2, "after": 1} in found


def test_effort_goes_to_the_search(model: str) -> None:
    sizes = ("--batch", "8", "--sequence", "16", "--cluster", "h100")
    plans = [
        Plan.from_json(run("plan", model, "--gpus", "8", *sizes, "--effort", e, "--json")[1]) for e in ("0.001", "0.1")
    ]
    tried = [plan.search.laid_out for plan in plans if plan.search is not None]
    assert tried[0] < tried[1]
    with pytest.raises(ArgumentError, match=r"effort=0.0; it must be more than 0"):
        run("plan", model, "--gpus", "8", *sizes, "--effort", "0")


def test_a_model_of_a_config_names_its_loss(model: str) -> None:
    """Or transformers warns that the class of a GPT-2 doesn't."""
    made: Any = resolve(model, batch=2, sequence=8, dtype="float32", meta=True).model
    assert made.loss_type == "ForCausalLM"


def test_formulas(tmp_path: Path) -> None:
    assert "all_reduce_seconds" in run("show", "--formula")[1]
    assert "matmul_seconds" in json.loads(run("show", "--formula", "--json")[1])


def test_simulate(model: str) -> None:
    arguments = ("simulate", model, "--gpus", "2", "--mesh", "pp=2", "--batch", "4", "--sequence", "16", "--steps", "2")
    assert "simulated peak" in run(*arguments)[1]
    result = json.loads(run(*arguments, "--json")[1])
    assert len(result["losses"]) == 2
    assert len(result["peak_bytes"]) == 2


def test_verify(model: str) -> None:
    sizes = ("--batch", "4", "--sequence", "16", "--steps", "1")
    code, text = run("verify", model, "--gpus", "2", "--mesh", "dp=2", *sizes)
    assert code == 0, text
    assert "are equal" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "llama", "--gpus", "2"], "names no model"),
        (["plan", "hf:absent.json", "--gpus", "2"], "can't read the config"),
        (["plan", "tests.models:nothing", "--gpus", "2"], "has no function 'nothing'"),
        (["plan", "MODEL", "--gpus", "2", "--mesh", "tp:2"], "doesn't read as pp=2,dp=2,tp=2"),
        (["show", "absent.json"], "can't read the plan"),
    ],
)
def test_a_refusal_is_one_message_and_exit_2(
    arguments: list[str], words: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autopar", *(model if a == "MODEL" else a for a in arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert words in printed
    assert "Traceback" not in printed


def test_help_groups_every_option_of_a_job() -> None:
    grouped = [name for names in _PANELS.values() for name in names]
    assert sorted(grouped) == sorted({field.name for field in fields(JobOptions)} - {"model"})
    text = CliRunner().invoke(cli.app, ["memory", "--help"]).output
    assert all(panel in text for panel in _PANELS)
