"""Arguments of another kind than the public functions take, and paths that can't be read: each is one clear error."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import Cluster, Plan
from autopar.errors import ArgumentError, AutoparError, ClusterError, PlanError
from autopar.runtime.launch import open_job
from tests.models import make
from tests.pinned import PINNED

OTHERS: list[Any] = [3, 3.5, b"x", [], {}, slice(1)]


@pytest.fixture(scope="module")
def job() -> autopar.ParallelModel:
    case = make("mlp", 4)
    return autopar.compile(case.model, 2, sample=case.batch, mesh={"dp": 2}, **PINNED, microbatches=1)


@pytest.mark.parametrize("other", [None, *OTHERS], ids=repr)
def test_what_is_no_path(job: autopar.ParallelModel, other: Any) -> None:
    for take in (autopar.load, Plan.load, job.write, open_job):
        with pytest.raises(ArgumentError, match="is no path; "):
            take(other)


@pytest.mark.parametrize("other", [None, *OTHERS, "plan.json"], ids=repr)
def test_what_is_no_plan(job: autopar.ParallelModel, other: Any) -> None:
    for take in (job.plan.diff, job.plan.differences):
        with pytest.raises(ArgumentError, match=r"is no plan; give a Plan, such as autopar.load"):
            take(other)


@pytest.mark.parametrize("other", [None, 3, [], {}], ids=repr)
def test_what_is_no_text(other: Any) -> None:
    with pytest.raises(ArgumentError, match="is no text"):
        Plan.from_json(other)


@pytest.mark.parametrize("other", [None, *OTHERS], ids=repr)
def test_what_is_no_model(other: Any) -> None:
    case = make("mlp", 4)
    for take in (autopar.capture, lambda model, sample: autopar.compile(model, 2, sample=sample)):
        with pytest.raises(ArgumentError, match=r"give a torch.nn.Module, or what autopar.capture returned"):
            take(other, sample=case.batch)


@pytest.mark.parametrize("other", [3.5, "x", [], {}, True, -1], ids=repr)
def test_what_is_no_whole_number(job: autopar.ParallelModel, other: Any) -> None:
    case = make("mlp", 4)
    takes: dict[str, Callable[[Any], object]] = {
        "steps": lambda steps: job.simulate(case.batch, steps),
        "steps of verify": lambda steps: job.verify(case.batch, steps),
        "seed": lambda seed: autopar.compile(case.model, 2, sample=case.batch, seed=seed),
        "batch_dim": lambda dim: autopar.capture(case.model, sample=case.batch, batch_dim=dim),
        "batch_dim of compile": lambda dim: autopar.compile(case.model, 2, sample=case.batch, batch_dim=dim),
        "seq_dim": lambda dim: autopar.capture(case.model, sample=case.batch, seq_dim=dim),
        "seq_dim of compile": lambda dim: autopar.compile(case.model, 2, sample=case.batch, seq_dim=dim),
    }
    for name, take in takes.items():
        with pytest.raises(ArgumentError, match=f"{name.partition(' ')[0]}=.*; it must be a whole number of at least"):
            take(other)


@pytest.mark.parametrize("other", [None, 0, -1.0, math.nan, math.inf, True, "2", []], ids=repr)
def test_what_is_no_number_of_times(other: Any) -> None:
    case = make("mlp", 4)
    with pytest.raises(ArgumentError, match=r"effort=.*; it must be more than 0: with 10, a search may take ten times"):
        autopar.plan(case.model, 2, sample=case.batch, effort=other)


@pytest.mark.parametrize("other", [None, 2, -1, "0", 0.0, []], ids=repr)
def test_what_is_no_rank(job: autopar.ParallelModel, other: Any) -> None:
    for take in (job.source, job.modules):
        with pytest.raises(ArgumentError, match="is not in 0 … 1"):
            take(other)


@pytest.mark.parametrize("other", [None, *OTHERS, "gpu", "meta", ""], ids=repr)
def test_what_is_no_device_of_simulated_ranks(job: autopar.ParallelModel, other: Any) -> None:
    case = make("mlp", 4)
    for take in (job.simulate, job.verify):
        with pytest.raises(ArgumentError, match="simulated ranks run on 'cpu' or 'cuda'"):
            take(case.batch, 1, device=other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none(job: autopar.ParallelModel) -> None:
    case = make("mlp", 4)
    for take in (job.simulate, job.verify):
        with pytest.raises(ArgumentError, match="torch finds no GPU here"):
            take(case.batch, 1, device="cuda")


@pytest.mark.parametrize("other", OTHERS, ids=repr)
def test_other_arguments(job: autopar.ParallelModel, other: Any) -> None:
    case = make("mlp", 4)
    for name in ("plan", "mesh", "cluster", "schedule", "vocabulary", "microbatches", "optimizer", "loss", "progress"):
        if (name, other) in (("mesh", {}), ("microbatches", 3)):
            continue
        with pytest.raises(AutoparError):
            autopar.compile(case.model, 2, sample=case.batch, **{name: other})
    with pytest.raises(ArgumentError, match="it may be one of simulate, fake, device"):
        job.memory(case.batch, measure=other)


def test_paths_that_can_t_be_read(tmp_path: Path, job: autopar.ParallelModel) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    os.symlink("loop", tmp_path / "loop")
    names = ("bytes", "empty", "folder", "loop", "missing", "empty/below", "null\0", "long" * 2000)
    for path in (tmp_path / name for name in names):
        with pytest.raises(PlanError):
            autopar.load(path)
        with pytest.raises(ClusterError):
            Cluster.load(path)
        with pytest.raises(PlanError):
            open_job(path)
    for name in ("bytes", "empty", "empty/below", "null\0", "long" * 2000):
        with pytest.raises(ArgumentError):
            job.write(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["bytes", "empty", "folder", "loop"]


def test_a_job_is_loaded_from_its_directory(tmp_path: Path, job: autopar.ParallelModel) -> None:
    written = job.write(str(tmp_path / "job"))
    for path in (written, str(written), written / "plan.json"):
        assert autopar.load(path) == job.plan
