"""Layers that play their tapes take what they take when they run, at every moment."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.job import Job
from autopar.schedules.offloads import ALL, Away, offload_activations
from autopar.shapes import Shapes
from autopar.simulate import predict, replay
from autopar.simulate.call_sites import unshared_operands
from autopar.simulate.measure import RankMemory, measure, on_shapes, without_values
from autopar.simulate.predict import predicted_memory
from tests.fast_cluster import FAST
from tests.models import Case, make, prepared
from tests.moe_models import family
from tests.pinned import compile_pinned


def job_of(case: Case, mesh: dict[str, int], **options: Any) -> tuple[Job, dict[str, Tensor]]:
    given = {"sample": case.batch, "loss": case.loss, "mesh": mesh, "cluster": FAST, **options}
    compiled = compile_pinned(case.model, math.prod(mesh.values()), **given)
    values = case.batch.values() if isinstance(case.batch, dict) else case.batch
    return compiled.job, {item.path: value for item, value in zip(compiled.plan.inputs, values, strict=True)}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that were recorded, and those that played, by class."""
    seen: list[str] = []
    record, output = replay.record, replay._Pass.output

    def recording(layer: nn.Module, *rest: Any, **options: Any) -> Any:
        seen.append(f"recorded {type(layer).__name__}")
        return record(layer, *rest, **options)

    def playing(self: Any, operands: Any) -> Any:
        seen.append(f"played {type(self._player.layer).__name__}")
        return output(self, operands)

    monkeypatch.setattr(replay, "record", recording)
    monkeypatch.setattr(replay._Pass, "output", playing)
    return seen


def as_they_run(job: Job, batch: dict[str, Tensor], device: str = "cpu") -> list[RankMemory]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "replay_layers", lambda *_: None)
        return predicted_memory(job, batch, device=device)


def check(job: Job, batch: dict[str, Tensor], device: str = "cpu") -> None:
    """All phases: what lives when they begin, at the peak and at the end, by kind."""
    found, expected = predicted_memory(job, batch, device=device), as_they_run(job, batch, device)
    assert [memory.host_peak_bytes for memory in found] == [memory.host_peak_bytes for memory in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for phase, other in zip(ours.phases, theirs.phases, strict=True):
            assert phase == other


PLANS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt2", {"dp": 2}, {"microbatches": 4, "zero": 3}),
    ("llama", {"pp": 2, "dp": 2}, {"microbatches": 4, "zero": 2, "recompute": "full", "precision": "bf16"}),
]
SLOW: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt2", {"pp": 2}, {"microbatches": 4, "precision": "bf16"}),
    ("gpt2", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "interleaved", "chunks": 2, "recompute": "selective"}),
    ("gpt2", {"pp": 2, "dp": 2}, {"microbatches": 4, "offload": ("optimizer",), "zero": 1, "precision": "bf16"}),
    ("llama", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
    ("llama", {"pp": 2, "dp": 2}, {"microbatches": 4, "schedule": "1f1b", "zero": 3}),
    ("llama", {"dp": 2, "cp": 2}, {"microbatches": 2, "zero": 3, "reduce_dtype": "bfloat16", "precision": "bf16"}),
    ("llama", {"pp": 2}, {"microbatches": 4, "vocabulary": "vocab-1"}),
    ("encoder", {"dp": 2, "tp": 2}, {"microbatches": 2, "clip_norm": 1.0}),
    ("nano_gpt", {"dp": 2}, {"microbatches": 2, "powersgd": 2}),
    ("nano_gpt", {"pp": 2}, {"microbatches": 4, "activations": "8bit"}),
    ("nano_gpt", {"pp": 2}, {"microbatches": 4, "activations": "lossless"}),
]


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [*PLANS, *(pytest.param(*plan, marks=pytest.mark.slow) for plan in SLOW)],
    ids=str,
)
def test_played_as_run(name: str, mesh: dict[str, int], options: dict[str, Any], recorded: list[str]) -> None:
    check(*job_of(make(name, 16, torch.float32), mesh, **options), "cuda")
    runs = options.get("activations") == "8bit" or options.get("schedule") == "zb-h1"
    assert any(one.startswith("played") for one in recorded) != runs


@pytest.mark.slow
def test_experts_count_as_they_do(recorded: list[str]) -> None:
    case = prepared(lambda: family("deepseek_v3", 8, layers=3), torch.float32)
    check(*job_of(case, {"dp": 2, "ep": 2}, microbatches=2))
    assert any(one.startswith("played") for one in recorded)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return y


class Layers(nn.Module):
    def __init__(self, count: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Kept(Layers):
    """What goes into the second layer is read at the end, too."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return (x * first).mean()


class Summed(Layers):
    """The last layer's gradient is one number, wherever it is."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def one(model: nn.Module) -> tuple[Job, dict[str, Tensor]]:
    return job_of(Case(model, {"x": torch.randn(8, 16)}), {"dp": 2}, microbatches=2)


def test_equal_layers_are_recorded_once(recorded: list[str]) -> None:
    """The first runs: what goes into it has no gradient."""
    predicted_memory(*one(Layers(6)))
    assert recorded == ["recorded Layer2", *["played Layer2"] * (5 * 2)]


def test_a_layer_whose_operand_others_read_runs(recorded: list[str]) -> None:
    """Its gradient has several parts, whose order only autograd knows."""
    check(*one(Kept(4)))
    assert recorded == ["recorded Layer2", *["played Layer2"] * (2 * 2)]


def test_a_gradient_of_another_layout_than_was_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything runs instead."""
    tried = Mock(wraps=predict.on_shapes)
    monkeypatch.setattr(predict, "on_shapes", tried)
    job, batch = one(Summed(3))
    check(job, batch)
    assert tried.call_count == 2 + 1  # played, run; and run to compare


@pytest.mark.parametrize("options", [{"zero": 1, "precision": "bf16"}, {"zero": 1}], ids=str)
def test_gradients_are_held_as_long_as_by_autograd(options: dict[str, Any]) -> None:
    """Most of what there is are weights."""
    case = Case(Layers(3, 512), {"x": torch.randn(8, 512)})
    check(*job_of(case, {"dp": 2}, microbatches=4, **options))


OFFLOADS: list[dict[str, Any]] = [
    {"recompute": "full"},
    {"schedule": "interleaved", "chunks": 2, "zero": 1, "precision": "bf16"},
]


@pytest.mark.parametrize("options", OFFLOADS, ids=str)
def test_what_goes_to_the_host(options: dict[str, Any], recorded: list[str]) -> None:
    """Of all stages but the last; what a layer makes is kept by the next one, too."""
    case = Case(Layers(8, 512), {"x": torch.randn(1024, 512)})
    job, batch = job_of(case, {"pp": 2, "dp": 2}, microbatches=4, offload=("activations",), **options)
    schedule = offload_activations(job.schedule, Away(dict.fromkeys(range(job.schedule.stages - 1), ALL)))
    check(job.like(schedule=schedule), batch)
    assert any(one.startswith("played") for one in recorded)


class Square(nn.Module):
    """One weight, whose gradient is the last that the backward makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.weight
        return y


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.layers = nn.Parameter(torch.ones(())), nn.ModuleList([Square(width)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gate
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_gradient_that_was_cast_to_be_sent_is_held_no_longer(recorded: list[str]) -> None:
    """The peak: the terms that are sent, and this rank's part of their sum; the gradient is gone by then."""
    case = Case(Gated(1024), {"x": torch.randn(8, 1024)})
    check(*job_of(case, {"dp": 2}, microbatches=1, zero=1, precision="bf16"))
    assert "played Square" in recorded


def test_operands_that_nothing_else_reads() -> None:
    text = """
class Stage:
    def forward(self, h, cos):
        for i in range(0, 3):
            h = self.model.layers[i](h, cos)
        g = self.model.layers[3](h, 2)
        k = self.head(g, g)
        m, n = k, h
        for i in range(4, 6):
            m = self.model.layers[i](m, n)
        return (m, k)
"""
    assert unshared_operands(text) == {
        "model.layers.0": {0},
        "model.layers.1": {0},
        "model.layers.2": {0},
        "model.layers.3": set(),
        "head": set(),
        "model.layers.4": set(),
        "model.layers.5": {0},
    }


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("dualpipe-v", None), pytest.param("interleaved", 2, marks=pytest.mark.slow)]
)
def test_messages_are_let_go_of_as_what_they_were_made(schedule: str, chunks: int | None) -> None:
    """By the next send, which may be of another pass, or stage, than in the microbatches that were run."""
    model, batch = Layers(4, 64), {"x": torch.randn(64, 64)}
    given: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": 8, "schedule": schedule, "chunks": chunks}
    job = compile_pinned(model, 2, sample=batch, cluster=FAST, recompute="none", **given).job
    for rank, found in enumerate(predicted_memory(job, batch)):
        measured = on_shapes(without_values(job), batch, rank, measure, Shapes(), "cpu")
        pairs = list(zip(found.phases, measured.phases, strict=True))
        assert [+Counter(a.peak) for a, _ in pairs] == [+Counter(b.peak) for _, b in pairs]
        assert min(min(phase.peak.values()) for phase in found.phases) >= 0
