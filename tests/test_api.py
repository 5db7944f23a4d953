"""The public surface, and what bad input gets: one clear error each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ArgumentError, BatchError, CaptureError, PlanError, ShardingError, StageError
from autopar.runtime.launch import open_job, read_job
from tests.models import MLP, gpt2, llama, make
from tests.pinned import compile_pinned


def compiled(name: str = "mlp", gpus: int = 2, batch: int = 8, **options: Any) -> autopar.ParallelModel:
    case = make(name, batch)
    return compile_pinned(case.model, gpus, sample=case.batch, loss=case.loss, **options)


@pytest.fixture(scope="module")
def job() -> autopar.ParallelModel:
    return compiled(gpus=4, mesh={"pp": 2, "dp": 2}, microbatches=2)


def test_the_model_is_never_modified() -> None:
    case = make("gpt2", 4)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    kind, cache = type(case.model), case.model.config.use_cache
    job = compile_pinned(case.model, 2, sample=case.batch, mesh={"tp": 2})
    job.simulate(case.batch, steps=1)
    assert type(case.model) is kind
    assert case.model.config.use_cache == cache
    assert all(torch.equal(value, case.model.state_dict()[name]) for name, value in before.items())


def test_simulation_reports_every_rank(job: autopar.ParallelModel) -> None:
    result = job.simulate(make("mlp", 8).batch, steps=2)
    assert len(result.losses) == 2
    assert len(result.peak_bytes) == len(result.sent_bytes) == 4
    assert all(sent["dp"] > 0 and sent["pp"] > 0 for sent in result.sent_bytes)
    assert set(result.gradients) == set(result.parameters) == {n for n, _ in make("mlp", 8).model.named_parameters()}


def test_memory_is_counted_unless_it_is_not_asked_for(job: autopar.ParallelModel) -> None:
    batch = make("mlp", 8).batch
    counted, not_counted = job.simulate(batch), job.simulate(batch, track_memory=False)
    assert len(counted.peak_bytes) == 4
    assert not_counted.peak_bytes == []
    assert not_counted.losses == counted.losses


def test_simulation_is_deterministic_with_dropout() -> None:
    torch.manual_seed(0)
    case = gpt2(4, layers=2, dropout=0.1)
    job = compile_pinned(case.model, 4, sample=case.batch, mesh={"dp": 2, "tp": 2}, microbatches=2)
    first, second = job.simulate(case.batch, 2), job.simulate(case.batch, 2)
    assert first.losses == second.losses
    assert all(torch.equal(first.parameters[n], second.parameters[n]) for n in first.parameters)


def test_a_plan_is_the_same_bytes_again_and_reads_back(job: autopar.ParallelModel, tmp_path: Path) -> None:
    again = compiled(gpus=4, mesh={"pp": 2, "dp": 2}, microbatches=2).plan
    assert again.to_json() == job.plan.to_json()
    (tmp_path / "plan.json").write_text(again.to_json())
    assert autopar.load(tmp_path / "plan.json") == again
    assert job.plan.diff(again) == ""


def test_a_loaded_plan_gives_the_same_programs(job: autopar.ParallelModel) -> None:
    pinned = compiled(gpus=4, plan=job.plan)
    assert [pinned.source(rank) for rank in range(4)] == [job.source(rank) for rank in range(4)]
    assert pinned.plan == job.plan


def test_diff_names_what_differs(job: autopar.ParallelModel) -> None:
    other = compiled(gpus=4, mesh={"pp": 2, "dp": 2}, microbatches=4).plan
    assert "microbatches: 2 -> 4" in job.plan.diff(other).splitlines()


def test_explain_has_what_a_user_asks_for(job: autopar.ParallelModel) -> None:
    text = job.plan.explain()
    for words in ("pp 2 x dp 2 x tp 1", "step ", "bubble", "stage 0", "stage 1", "peak", "layers.0"):
        assert words in text
    assert 0 < job.plan.bound_seconds <= job.plan.step_seconds
    assert len(job.plan.peak_bytes) == 4


def test_emitted_module_compiles() -> None:
    case = make("nano_gpt", 4)
    job = compile_pinned(case.model, 1, sample=case.batch)
    (module,), batch = job.modules(0), case.batch
    expected = module(*batch)
    found = torch.compile(module, backend="aot_eager")(*batch)
    torch.testing.assert_close(found, expected)


def test_meta_model_starts_from_its_own_initialisation() -> None:
    with torch.device("meta"):
        case = llama(4, layers=2)
    sample = {"input_ids": torch.ones(4, 16).long(), "labels": torch.ones(4, 16).long()}
    job = compile_pinned(case.model, 2, sample=sample, mesh={"tp": 2})
    batch = {"input_ids": torch.arange(64).view(4, 16) % 48, "labels": torch.arange(64).view(4, 16) % 48}
    result = job.verify(batch, steps=1)
    assert result.ok, str(result)
    assert next(case.model.parameters()).is_meta


def test_written_directory_is_complete_or_absent(job: autopar.ParallelModel, tmp_path: Path) -> None:
    directory = job.write(tmp_path / "plan")
    names = {p.name for p in directory.iterdir()}
    programs = {"stage_0.py", "stage_1.py", "train.py", "actions.txt"}
    assert names == programs | {"README.md", "job.json", "plan.json", "weights.safetensors"}
    assert autopar.load(directory) == job.plan
    assert job.write(tmp_path / "plan") == directory
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ArgumentError, match="holds something else"):
        job.write(tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "plan"]


@pytest.mark.parametrize(
    ("file", "before", "after", "words"),
    [
        ("stage_1.py", 'plan_digest="', 'plan_digest="0', r"plan of stage_1.py is 0\w+, of the others \w+; write it"),
        ("stage_0.py", "microbatches=2", "microbatches=1", "microbatches of stage_0.py is 1, of the others 2"),
        ("actions.txt", " B1@0", "", r"not a complete job \(.*B1@0"),
        ("actions.txt", "microbatches=2", "microbatches=4", r"not a complete job \(.*; write it again"),
        ("job.json", '"dp": 2', '"dp": 4', "mesh of stage_0.py is {.*'dp': 2.*}, of the others {.*'dp': 4"),
        ("job.json", '"seed": 0', '"seed": ', r"not a complete job \("),
    ],
)
def test_a_directory_whose_files_dont_fit_each_other_is_refused(
    job: autopar.ParallelModel, file: str, before: str, after: str, words: str, tmp_path: Path
) -> None:
    """Run as it was, it would train on a part of the batch, or hang."""
    directory = job.write(tmp_path / "plan")
    assert read_job(directory).mesh == job.plan.mesh
    text = (directory / file).read_text()
    assert before in text
    (directory / file).write_text(text.replace(before, after))
    with pytest.raises(PlanError, match=words):
        read_job(directory)


@pytest.mark.slow
def test_files_are_the_same_whatever_the_locale(job: autopar.ParallelModel, tmp_path: Path) -> None:
    """Comments of programs have other letters than ASCII."""
    wanted = job.write(tmp_path / "plan")
    code = (
        "import sys; from pathlib import Path; from tests.test_api import compiled, read_job\n"
        'job = compiled(gpus=4, mesh={"pp": 2, "dp": 2}, microbatches=2)\n'
        "read_job(job.write(Path(sys.argv[1])))\n"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    made = tmp_path / "made"
    subprocess.run(
        [sys.executable, "-c", code, str(made)], env=ascii_only, cwd=Path(__file__).parent.parent, check=True
    )
    texts = [file for file in wanted.iterdir() if file.suffix in (".py", ".txt", ".md")]
    assert not all(file.read_bytes().isascii() for file in texts)
    for file in texts:
        assert (made / file.name).read_bytes() == file.read_bytes()


def test_programs_in_the_place_of_others_are_refused(job: autopar.ParallelModel, tmp_path: Path) -> None:
    directory = job.write(tmp_path / "plan")
    (directory / "stage_1.py").write_text((directory / "stage_0.py").read_text())
    with pytest.raises(PlanError, match=r"stage_1.py is the program of stage 0; write it again"):
        read_job(directory)


def test_a_job_with_an_optimizer_of_its_own_says_that_files_have_none(tmp_path: Path) -> None:
    """Trained with the default, it would be another training, and nobody would notice."""
    case = make("mlp", 4)
    given: dict[str, Any] = {"sample": case.batch, "mesh": {"dp": 1}}
    plain = compile_pinned(case.model, 1, **given).write(tmp_path / "plain")
    own = compile_pinned(case.model, 1, optimizer=torch.optim.SGD, **given).write(tmp_path / "own")
    assert "The optimizer is AdamW" in (plain / "README.md").read_text()
    assert "one of the job's own" in (own / "README.md").read_text()
    with pytest.raises(ArgumentError, match=r"which isn't written; give it here again: optimizer="):
        open_job(own)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gpus": 0}, ArgumentError, "at least 1"),
        ({"gpus": 4, "mesh": {"dp": 3}}, ArgumentError, "3 ranks, which doesn't divide gpus=4; use other"),
        ({"gpus": 4, "mesh": {"dp": 2, "xp": 2}}, ArgumentError, "unknown axes"),
        ({"gpus": 2, "mesh": {"dp": 2}, "microbatches": 3}, ShardingError, r"microbatches may be one of \[1, 2, 4\]"),
        ({"gpus": 8, "mesh": {"pp": 8}}, StageError, "use pp <= 6"),
        ({"gpus": 2, "schedule": "2f1b"}, autopar.AutoparError, "is none of naive, gpipe, 1f1b"),
        ({"gpus": 2, "cluster": "abacus"}, autopar.AutoparError, "abacus"),
        ({"gpus": 2, "microbatches": 0}, ArgumentError, "at least 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        compiled(**options)


def test_heads_that_tp_does_not_divide() -> None:
    case = llama(8, layers=1)
    words = r"(?s)modeling_llama.py:\d+ has 8 and 4 heads.*tp may be one of \[1, 2, 4\]"
    with pytest.raises(ShardingError, match=words):
        compile_pinned(case.model, 8, sample=case.batch, mesh={"tp": 8})


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # depends on data
            return self.linear(x).sum()
        return self.linear(-x).sum()


def test_data_dependent_control_flow_is_refused_by_line() -> None:
    with pytest.raises(CaptureError, match=r"test_api.py:\d+: if x.sum\(\) > 0"):
        compile_pinned(Branches(), 2, sample=torch.ones(2, 4))


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(self.linear(x)).sum()


def test_an_unknown_op_runs_whole_and_is_named() -> None:
    job = compile_pinned(Unknown(), 2, sample=torch.ones(4, 4, 4))
    assert any("matrix_exp" in op and "test_api.py" in op for op in job.plan.replicated_ops)
    assert job.verify(torch.randn(4, 4, 4), steps=1).ok


def test_an_unknown_op_cannot_be_split_into_microbatches() -> None:
    with pytest.raises(ShardingError, match=r"(?s)matrix_exp.*test_api.py:\d+.*no rule.*microbatches=1"):
        compile_pinned(Unknown(), 2, sample=torch.ones(4, 4, 4), microbatches=2)


def test_a_loss_that_is_no_scalar() -> None:
    with pytest.raises(CaptureError, match=r"shape \[2, 4\].*floating-point scalar"):
        compile_pinned(nn.Linear(4, 4), 2, sample=torch.ones(2, 4))


def test_a_model_without_loss() -> None:
    case = gpt2(2, layers=1)
    with pytest.raises(CaptureError, match="no loss"):
        compile_pinned(case.model, 2, sample={"input_ids": case.batch["input_ids"]}, loss=lambda output, batch: None)


def test_a_sample_on_another_device() -> None:
    with pytest.raises(BatchError, match="is on meta, the model on cpu"):
        compile_pinned(MLP(), 2, sample=(torch.ones(4, 8, device="meta"), torch.ones(4, 4)))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(8, 8).double(),), "has no '1'"),
        ((torch.ones(4, 8).double(), torch.ones(4, 4).double()), r"shape \(4, 8\)"),
        ((torch.ones(8, 8), torch.ones(8, 4)), "float32"),
        ([], "no tensor"),
    ],
)
def test_a_batch_of_another_structure(job: autopar.ParallelModel, batch: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        job.simulate(batch)


def test_a_plan_for_another_model(job: autopar.ParallelModel) -> None:
    with pytest.raises(PlanError, match="was made for MLP"):
        compiled("nano_gpt", gpus=4, plan=job.plan)
    with pytest.raises(PlanError, match="is for 4 ranks"):
        compiled(gpus=2, plan=job.plan)
    with pytest.raises(PlanError, match="differ; leave one out"):
        compiled(gpus=4, mesh={"dp": 4}, plan=job.plan)
    with pytest.raises(PlanError, match=r"^zero=3, but the plan has zero=0; leave one of the two out$"):
        compiled(gpus=4, zero=3, plan=job.plan)


def test_damaged_plans(job: autopar.ParallelModel, tmp_path: Path) -> None:
    text = job.plan.to_json()
    path = tmp_path / "plan.json"
    path.write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match="cut short or damaged"):
        autopar.load(path)
    path.write_text(json.dumps(json.loads(text) | {"version": 99}))
    with pytest.raises(PlanError, match="version 99"):
        autopar.load(path)
    path.write_text(json.dumps(json.loads(text) | {"microbatches": 4}))
    with pytest.raises(PlanError, match="changed or damaged"):
        autopar.load(path)
    with pytest.raises(PlanError, match="can't read"):
        autopar.load(tmp_path / "absent.json")


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("named", [False, True])
def test_labels_that_only_the_loss_reads(named: bool, mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(4, (8,))
    batch = {"input": x, "labels": y} if named else (x, y)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch["labels"] if named else batch[1])

    job = compile_pinned(model, 2, sample=batch, loss=loss, mesh=mesh, microbatches=2, optimizer=torch.optim.SGD)
    result = job.verify(batch, steps=2)
    assert result.ok, str(result)
