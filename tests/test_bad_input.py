"""What can't be planned is refused with one message that says what would work, in Python and on the command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import AutoparError, cli
from autopar.errors import (
    ArgumentError,
    BatchError,
    BudgetError,
    CaptureError,
    ClusterError,
    PlanError,
    ScheduleError,
    ShardingError,
    StageError,
)
from autopar.model_names import resolve
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
    ({"gpus": 10**20}, ArgumentError, "gpus=100000000000000000000; it must be at most 16777216"),
    ({"gpus": 1_000_000}, ArgumentError, "use gpus=768, or another batch"),
    ({"mesh": "dp=3"}, ArgumentError, "doesn't divide gpus=4; use other degrees"),
    ({"mesh": "dp=2,tp=4"}, ArgumentError, "doesn't divide gpus=4; use gpus=8, or other degrees"),
    ({"mesh": "ep=2"}, ShardingError, "MLP has no product with a weight per expert; leave ep out of the mesh"),
    ({"mesh": "dp=0"}, ArgumentError, "mesh axis 'dp' has size 0"),
    ({"microbatches": 3}, ArgumentError, "microbatches=3 doesn't divide ... microbatches may be one of [1, 2, 4]"),
    ({"microbatch": 8}, ArgumentError, "microbatch may be one of [1, 2, 4]"),
    ({"microbatch": 2, "microbatches": 4}, ArgumentError, "are 8 rows on each rank ... leave one of the two out"),
    ({"mesh": "dp=4", "zero": 1, "zero_ranks": 8}, ArgumentError, "zero_ranks may be one of [1, 2, 4]"),
    ({"zero_ranks": 2, "zero": 0}, ArgumentError, "say zero=1, 2 or 3 with it"),
    ({"schedule": "1f1b", "chunks": 2}, ScheduleError, "it takes exactly 1"),
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


@pytest.mark.parametrize(
    "option",
    ["mesh", "offload", "schedule", "vocabulary", "cluster", "precision", "recompute", "activations", "attention"],
)
def test_an_option_that_says_nothing(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As from a shell's variable that isn't set."""
    code, printed = refused_by_command(monkeypatch, capsys, "--gpus", "2", f"--{option}", "")
    assert code == 2
    assert re.match(r"(Argument|Cluster)Error: ", printed)


def test_a_dtype_of_no_tensor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = refused_by_command(monkeypatch, capsys, "--gpus", "2", "--dtype", "wide")
    assert (code, printed.partition(";")[0]) == (2, "ArgumentError: 'wide' is not a floating-point dtype")


def test_what_can_t_be_written_is_said_before_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("something else")
    for target, problem in ((tmp_path, "holds something else"), (tmp_path / "notes", "is a file")):
        code, printed = refused_by_command(monkeypatch, capsys, "--gpus", "2", "--write", str(target))
        assert code == 2
        assert printed.startswith(f"ArgumentError: {target} {problem}")  # and nothing of a search before it


@pytest.mark.parametrize("option", ["html", "svg", "trace"])
def test_a_timeline_goes_to_a_file(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("", str(tmp_path), str(tmp_path / "missing" / "file")):
        monkeypatch.setattr(sys, "argv", ["autopar", "timeline", "1f1b", f"--{option}", target])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        assert (stopped.value.code, printed.out) == (2, "")
        assert printed.err.startswith("ArgumentError: can't write")


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


def test_what_is_no_model_plan_or_function() -> None:
    case = make("mlp", 4)
    wrong = {"plan": "plan.json", "loss": 3, "scheduler": "cosine", "clip_norm": "1", "model": nn.Linear}
    for name, value in wrong.items():
        given: dict[str, Any] = {"model": case.model, "sample": case.batch, "cluster": "cpu", name: value}
        with pytest.raises(ArgumentError, match=re.escape(f"{name}={value!r}")):
            autopar.compile(given.pop("model"), 2, **given)
    with pytest.raises(ArgumentError, match=r"model='gpt2'; give a torch\.nn\.Module"):
        autopar.capture("gpt2", sample=case.batch)  # type: ignore[arg-type]


def test_pins_that_contradict_the_plan_beside_them(tmp_path: Path) -> None:
    case = make("mlp", 4)
    options: dict[str, Any] = {"sample": case.batch, "cluster": "cpu"}
    decided: dict[str, Any] = {"microbatches": 2, "schedule": "1f1b", "chunks": 1, "vocabulary": "stage"}
    plan = autopar.plan(case.model, 4, mesh={"pp": 2, "dp": 2}, **decided, **options)
    assert autopar.plan(case.model, 4, plan=plan, microbatch=1, **decided, **options) == plan
    others = {"microbatches": 1, "microbatch": 2, "schedule": "gpipe", "chunks": 2, "vocabulary": "redistributed"}
    for name, value in others.items():
        with pytest.raises(PlanError, match=rf"{name}={value!r}, but the plan has {name}=.*; leave one of the two out"):
            autopar.plan(case.model, 4, plan=plan, **options, **{name: value})
    mine = tmp_path / "mine.toml"
    mine.write_text(CPU.replace("17e9", "18e9", 1))
    for cluster in ("h100", mine):
        with pytest.raises(PlanError, match=r"cluster .* the one that the plan is for \('cpu'\)"):
            autopar.plan(case.model, 4, plan=plan, sample=case.batch, cluster=cluster)


def test_steps_and_ranks_that_are_none() -> None:
    case = make("mlp", 4)
    job = autopar.compile(case.model, 2, sample=case.batch, cluster="cpu", mesh={"dp": 2}, zero=0)
    for train in (job.simulate, job.verify):
        with pytest.raises(ArgumentError, match="steps=0; it must be a whole number of at least 1"):
            train(case.batch, 0)
    for rank in (-1, 2):
        with pytest.raises(ArgumentError, match=f"rank {rank} is not in 0 … 1"):
            job.source(rank)


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


_TWICE = ("--placement", "*.weight=tp:S(1)", "--placement", "*.weight=tp:S(0)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "2.5"), "Invalid value for '--gpus'"),
        (("--gpus", "many"), "Invalid value for '--gpus'"),
        ((), "Missing option '--gpus'"),
        (("--gpus", "2", "--budget", "nan"), "--budget nan is no number of GiB"),
        (("--gpus", "2", "--budget", "inf"), "--budget inf is no number of GiB"),
        (("--gpus", "2", "--budget", "1e300"), "--budget 1e+300 is no number of GiB"),
        (("--gpus", "2", "--budget", "-1"), "budget_bytes=-1073741824"),
        (("--gpus", "4", "--mesh", "dp=2,tp=2,dp=4"), "'dp=2,tp=2,dp=4' gives dp more than one size"),
        (("--gpus", "2", *_TWICE), "--placement gives '*.weight' more than one type on tp; give each axis one"),
        (("--gpus", "2", "--out", "/nowhere/a.json"), "/nowhere is no folder that you may write to"),
        (("--gpus", "2", "--svg", "/"), "can't write /: it is a folder"),
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


CONFIGS = {
    "list": ("[1, 2]", "has a list at its top"),
    "cut": ('{"model_type":', "can't read the config"),
    "unknown": ('{"model_type": "nosuch"}', "no causal language model of unknown.json (model_type 'nosuch'): Unrec"),
    "other": ('{"model_type": "vit"}', "no causal language model of other.json (model_type 'vit')"),
    "typed": ('{"model_type": "gpt2", "n_embd": "wide"}', "n_embd"),
    "uneven": ('{"model_type": "gpt2", "n_embd": 100, "n_head": 7}', "must be divisible by num_heads"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_makes_no_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, words = CONFIGS[name]
    (tmp_path / f"{name}.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError) as found:
        resolve(f"hf:{name}.json", batch=2, sequence=8, dtype="float32", meta=True)
    assert words in str(found.value)
    assert len(str(found.value).splitlines()) == 1
    assert len(str(found.value)) < 500


def test_more_tokens_than_there_is_memory_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}')
    with pytest.raises(ArgumentError, match="batch=10000000000000 and sequence=1024 are more tokens than this machine"):
        resolve(f"hf:{path}", batch=10**13, sequence=1024, dtype="float32", meta=True)


def needs_a_size(size: int) -> None:
    """A factory that can't be called without arguments."""


def has_a_bug() -> None:
    raise AttributeError("a bug in the factory")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (":made", "':made' names no model"),
        ("..:made", "'..' is a relative name"),
        ("nowhere:made", "can't import 'nowhere': No module named 'nowhere'"),
        (f"{__name__}:CONFIGS", "has no function 'CONFIGS'"),
        (f"{__name__}:nothing", "has no function 'nothing'"),
        (f"{__name__}:needs_a_size", "is called without arguments: missing a required argument: 'size'"),
    ],
)
def test_a_name_that_makes_no_model(name: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)):
        resolve(name, batch=2, sequence=8, dtype="float32", meta=True)


def test_a_bug_of_the_factory_is_not_hidden() -> None:
    with pytest.raises(AttributeError, match="a bug in the factory"):
        resolve(f"{__name__}:has_a_bug", batch=2, sequence=8, dtype="float32", meta=True)


class Classifier(nn.Module):
    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.enter, self.reads = nn.Linear(8, 4), reads

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h: Tensor = self.enter(x)
        h = h * h.max().item() if self.reads else h
        return h if y is None else nn.functional.cross_entropy(h, y)


X, Y = torch.randn(8, 8), torch.randint(4, (8,))


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"x": X, "z": Y}, r"doesn't suit Classifier.forward\(x, y\): got an unexpected keyword argument 'z'; a tuple"),
        ((X, Y, Y), r"doesn't suit Classifier.forward\(x, y\): too many positional arguments; a tuple is given as"),
        ({"y": Y}, "missing a required argument: 'x'"),
        ((X[:0], Y[:0]), r"the batch has no rows: tensor '0' has shape \[0, 8\]"),
        ((X.numpy(), Y), "'0' of the batch is an array of numpy's; give torch.as_tensor of it"),
    ],
)
def test_a_sample_that_the_model_cant_be_called_with(sample: Any, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        autopar.capture(Classifier(), sample=sample).flat.copy()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda output: output.mean(), ArgumentError, "is called with the model's output and the batch: too many"),
        (
            lambda output, batch: None,
            CaptureError,
            "returned NoneType, no loss; it must return a floating-point scalar",
        ),
        (lambda output, batch: output.mean(-1), CaptureError, r"the loss has shape \[8\]"),
    ],
)
def test_a_loss_that_is_none(loss: Any, error: type[AutoparError], words: str) -> None:
    with pytest.raises(error, match=words):
        autopar.compile(Classifier(), 2, sample=(X,), loss=loss, cluster="cpu")


def test_a_tensor_that_nothing_reads() -> None:
    with pytest.raises(BatchError, match=r"'z' of the sample is read by nothing: Classifier\.forward doesn't take it"):
        autopar.capture(Classifier(), sample={"x": X, "z": Y}, loss=lambda output, batch: output.mean())


def test_a_number_that_is_read_from_a_tensor_names_its_line() -> None:
    with pytest.raises(CaptureError, match=r"SymFloat that is read from a tensor at test_bad_input.py:\d+ .*keep it a"):
        autopar.compile(Classifier(reads=True), 2, sample=(X, Y), cluster="cpu")


def test_a_function_that_makes_no_optimizer() -> None:
    with pytest.raises(ArgumentError, match=r"made a NoneType; it must make a torch.optim.Optimizer"):
        autopar.compile(Classifier(), 2, sample=(X, Y), cluster="cpu", optimizer=lambda parameters: None)
