"""A model captured once and planned many times: the same bytes as planned anew, and nothing said twice."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar import preparation
from autopar.errors import ArgumentError, CaptureError, PlanError
from autopar.graph import info
from tests.models import llama, make
from tests.pinned import PINNED

PLANS: list[tuple[int, dict[str, Any]]] = [
    (4, {"mesh": {"pp": 2, "cp": 2}, **PINNED, "microbatches": 2}),
    (2, {"mesh": {"tp": 2}, **PINNED, "microbatches": 1}),
    (2, {"mesh": {"cp": 2}, **PINNED, "microbatches": 1, "cluster": "h100"}),
    (4, {"mesh": {"pp": 2, "cp": 2}, **PINNED, "microbatches": 2}),
]
"""Other GPUs, clusters and pins, and the first again."""


def shifted(output: Any, batch: Any) -> Tensor:
    """A loss for which ranks that share sequences need a graph of their own."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def content(captured: autopar.Captured) -> list[Any]:
    """Of the captured graph, what passes might change."""
    return [(str(node), str(node.args), info(node).outputs) for node in captured.flat.nodes]


def test_plans_and_programs_are_those_of_planning_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    case, tracing = llama(4, layers=2), Mock(wraps=preparation.capture)
    monkeypatch.setattr(preparation, "capture", tracing)
    captured = autopar.capture(case.model, sample=case.batch, loss=shifted, precision="bf16")
    before = content(captured)
    jobs = [autopar.compile(captured, gpus, **pins) for gpus, pins in PLANS]
    assert tracing.call_count == 1
    assert content(captured) == before
    for job, (gpus, pins) in zip(jobs, PLANS, strict=True):
        anew = autopar.compile(case.model, gpus, sample=case.batch, loss=shifted, precision="bf16", **pins)
        assert job.plan.to_json() == anew.plan.to_json()
        assert [job.source(rank) for rank in range(gpus)] == [anew.source(rank) for rank in range(gpus)]


def test_weights_are_those_of_the_model_when_a_job_is_compiled() -> None:
    case = make("mlp", 8)
    captured = autopar.capture(case.model, sample=case.batch, loss=case.loss)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.mul_(2)
    job = autopar.compile(captured, 2, mesh={"dp": 2}, **PINNED, microbatches=1)
    assert job.verify(case.batch, steps=1).ok


def test_what_cannot_be_traced_is_refused_when_it_is_captured() -> None:
    with pytest.raises(CaptureError, match="it must be a floating-point scalar"):
        autopar.capture(torch.nn.Linear(2, 2), sample=torch.ones(2, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sample": torch.ones(8, 2)}, "sample: the model was captured with its own"),
        ({"loss": max, "batch_dim": 0}, "loss and batch_dim: the model was captured"),
        ({"precision": "fp16"}, r"captured in 'bf16'; capture it again with autopar.capture\(..., precision='fp16'\)"),
    ],
)
def test_what_was_captured_is_not_said_again(given: dict[str, Any], words: str) -> None:
    case = make("mlp", 8)
    captured = autopar.capture(case.model, sample=case.batch, loss=case.loss, precision="bf16")
    with pytest.raises(ArgumentError, match=words):
        autopar.plan(captured, 2, **given)
    assert autopar.plan(captured, 2, mesh={"dp": 2}, **PINNED, precision="bf16").options.precision == "bf16"


def test_a_plan_of_another_precision() -> None:
    case = make("mlp", 8)
    plan = autopar.plan(case.model, 2, sample=case.batch, loss=case.loss, mesh={"dp": 2}, **PINNED, microbatches=1)
    captured = autopar.capture(case.model, sample=case.batch, loss=case.loss, precision="bf16")
    with pytest.raises((ArgumentError, PlanError), match="captured in 'bf16'"):
        autopar.compile(captured, 2, plan=plan)


def test_an_autocast_around_the_capture() -> None:
    case = make("mlp", 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError, match="an autocast to torch"):
        autopar.capture(case.model, sample=case.batch, loss=case.loss)


def test_what_is_there_is_left_alone_while_planning() -> None:
    """And not after it, whatever happens; what somebody else left alone stays so. Collections are rarer within."""
    before = gc.get_threshold()
    with preparation.settled():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > 10 * before[0] > 0
        made: list[Any] = [[] for _ in range(10)]
    with pytest.raises(RuntimeError), preparation.settled():
        raise RuntimeError
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    old = {id(each) for each in gc.get_objects(generation=2)}
    assert all(id(each) in old for each in made)
    gc.freeze()
    try:
        with preparation.settled():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("step", ["capture", "fold", "experts"])
def test_what_is_there_is_left_alone_from_the_trace_on(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    known = getattr(preparation, step)

    def counted(*given: Any, **named: Any) -> Any:
        counts.append(gc.get_freeze_count())
        return known(*given, **named)

    monkeypatch.setattr(preparation, step, counted)
    case = make("mlp", 8)
    autopar.compile(case.model, 2, sample=case.batch, loss=case.loss, mesh={"dp": 2}, **PINNED, microbatches=1)
    assert all(counts)
    assert len(counts) == 1


def test_a_collector_that_is_off_stays_off_while_planning() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with preparation.settled():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
