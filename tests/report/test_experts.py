"""The table of loads, and the command that prints and writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autopar import cli
from autopar.plan import ExpertsPlan
from autopar.report import load_table

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "max_position_embeddings": 32,
}
LAYER = "model.layers.0.mlp.experts"


def plan_of(layer: str, order: list[int]) -> ExpertsPlan:
    sizes = {"experts": 4, "choices": 2, "axes": ["ep"], "ranks": 2, "imbalance": 1.0, "bound": 1.0}
    return ExpertsPlan(layer=layer, order=order, whole=[], sent_bytes=0, nodes=1, across_bytes=0, **sizes)


def rows(load: dict[str, list[int]], plans: list[ExpertsPlan], shown: int = 12) -> list[list[str]]:
    console = Console(width=110, force_terminal=False)
    with console.capture() as capture:
        console.print(load_table(load, plans, shown))
    return [line.split() for line in capture.get().splitlines()[3:] if line.strip()]


def test_a_row_says_who_is_busiest() -> None:
    """Of an expert, and of a rank with the experts that are stored on it."""
    load = {"a": [6, 2, 0, 0], "b": [6, 2, 0, 0], "c": [6, 2, 0, 0]}
    found = rows(load, [plan_of("a", []), plan_of("b", [0, 2, 1, 3])])
    assert found == [
        ["a", "4", "8", "3.00", "2", "2.00"],
        ["b", "4", "8", "3.00", "2", "1.50"],
        ["c", "4", "8", "3.00", "2", "1.00"],
    ]


def test_of_many_layers_the_worst_are_shown_in_order() -> None:
    load = {"a": [1, 1], "b": [4, 0], "c": [2, 1], "d": [3, 1]}
    assert [row[0] for row in rows(load, [], 2)] == ["b", "d", "…"]
    assert rows(load, [], 2)[-1] == ["…", "2", "more,", "none", "above", "1.33"]


@pytest.mark.slow
def test_the_command_writes_loads_and_takes_them(tmp_path: Path) -> None:
    config, file = tmp_path / "config.json", tmp_path / "loads.json"
    config.write_text(json.dumps(CONFIG))
    job = [f"hf:{config}", "--gpus", "2", "--mesh", "dp=2,ep=2", "--sequence", "8"]
    result = CliRunner().invoke(cli.app, ["simulate", *job, "--steps", "2", "--loads", str(file), "--json"])
    assert result.exit_code == 0, result.output
    steps = json.loads(result.output)["expert_load"]
    assert json.loads(file.read_text()) == {LAYER: [a + b for a, b in zip(*(s[LAYER] for s in steps), strict=True)]}
    result = CliRunner().invoke(cli.app, ["memory", *job, "--expert-load", str(file)])
    assert "4, of which a token takes 2; 2 on each of 2 ranks of ep, S(0)" in result.output
    result = CliRunner().invoke(cli.app, ["simulate", *job, "--steps", "1"])
    assert f"{LAYER}        4    128" in result.output
