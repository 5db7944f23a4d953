"""The examples' answers, on models small enough to plan at once."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, MixtralConfig
from typer import Typer
from typer.testing import CliRunner

from autopar.plan import Plan

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}


def example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    model: nn.Module = example("published").without_weights(LlamaConfig(**TINY))
    return model


def test_the_cheapest_of_those_that_are_fast_enough(llama: nn.Module) -> None:
    cheapest, published = example("cheapest_llama"), example("published")
    (only,) = cheapest.offers(llama, published.batch_of(8, 64), ["h100"], [1, 2], 1e-12, {"h100": 2.5})
    assert only.plan.mesh.world == 2, "one GPU couldn't be fast enough"
    cost = only.plan.cost.model_copy(update={"step_seconds": 1.8 * only.plan.step_seconds})
    one = cheapest.Offer(only.plan.model_copy(update={"cost": cost, "mesh_sizes": {}}), 2.5)
    found, fastest = [only, one], only.plan.step_seconds
    assert one.plan.mesh.world == 1
    assert cheapest.cheapest(found, 2 * fastest) is one
    assert cheapest.cheapest(found, 1.5 * fastest) is only
    assert cheapest.cheapest(found, fastest / 2) is None
    assert cheapest.answer(found, 1.5 * fastest, 512).startswith("2 x h100")
    assert "None of these is that fast" in cheapest.answer(found, fastest / 2, 512)
    assert cheapest.table(found, 1.0, 512).row_count == 2
    for offer, money in ((one, True), (cheapest.Offer(one.plan), False)):
        headers = [str(column.header) for column in cheapest.table([offer], 1.0, 512).columns]
        assert any("$" in header for header in headers) == money, "where there are prices"


def test_prices() -> None:
    cheapest = example("cheapest_llama")
    assert cheapest.prices_of(["h100=2.5", "a100=1"]) == {"h100": 2.5, "a100": 1.0}
    with pytest.raises(cheapest.typer.BadParameter, match="CLUSTER=DOLLARS"):
        cheapest.prices_of(["h100"])


def test_it_fits_or_says_why_not() -> None:
    fits, published = example("will_it_fit"), example("published")
    model = published.without_weights(MixtralConfig(**TINY, num_local_experts=4))
    batch = published.batch_of(8, 64)
    plan = fits.fitting_plan(model, 2, batch, "h100")
    assert isinstance(plan, Plan)
    assert fits.answer(plan, 2, "h100").startswith("Yes, on 2 x h100")
    assert fits.table(plan).row_count >= 3
    refused = fits.fitting_plan(model, 2, batch, "h100", mesh={"pp": 7})
    assert fits.answer(refused, 2, "h100").startswith("No, not on 2 x h100: ")


@pytest.mark.slow
def test_what_fewer_gpus_cost(llama: nn.Module) -> None:
    fewer = example("twenty_four_not_32")
    assert fewer.nearest_batch(128, 24) == 120
    assert fewer.nearest_batch(8, 24) == 24
    cases = fewer.compared(llama, 2, 4, 8, 64, "h100")
    assert [(case.gpus, case.batch) for case in cases] == [(4, 8), (2, 8)]
    assert fewer.loss(cases[1], cases[0]) == pytest.approx(1 - cases[0].plan.step_seconds / cases[1].plan.step_seconds)
    assert fewer.table(cases).row_count == 2
    assert fewer.answer(cases).startswith("With 2 GPUs instead of 4 you lose ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("cheapest_llama", ["--gpus", "2", "--batch", "4", "--price", "h100=2.5"], "2 x h100: "),
        ("will_it_fit", ["--gpus", "2", "--batch", "4"], "Yes, on 2 x h100: "),
        ("will_it_fit", ["--gpus", "2", "--batch", "4", "--budget-gb", "1e-6"], "No, not on 2 x h100: "),
        ("twenty_four_not_32", ["--have", "2", "--wanted", "4", "--batch", "4"], "With 2 GPUs instead of 4 you lose "),
    ],
)
def test_what_a_user_sees(name: str, arguments: list[str], answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts as they are run, of small models."""
    module, batch_of = example(name), example("published").batch_of
    monkeypatch.setattr(module, "batch_of", lambda sequences, positions: batch_of(sequences, 64))
    small = {"llama_3_8b": LlamaConfig(**TINY), "mixtral_8x22b": MixtralConfig(**TINY, num_local_experts=4)}
    for model, config in small.items():
        monkeypatch.setattr(module, model, lambda config=config: config, raising=False)
    app = Typer()
    app.command()(module.main)
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert any(line.startswith(answer) for line in shown.stdout.splitlines()), shown.stdout
