"""Verification must be able to fail, and then names the op."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import verification
from autopar.divergence import first_divergence
from autopar.runtime.job import Job
from tests.expert_loop_models import ByWhere, looped
from tests.fast_cluster import FAST
from tests.models import Float64, make
from tests.pinned import compile_pinned

GATHER = "all_gather(ln_2, tp, src=S(1), dst=R)"


@pytest.fixture(scope="module")
def job() -> autopar.ParallelModel:
    with Float64():
        case = make("gpt2", 8)
        mesh = {"pp": 2, "tp": 2}
        return compile_pinned(case.model, 4, sample=case.batch, mesh=mesh, microbatches=2, cluster=FAST)


def sabotaged(job: autopar.ParallelModel, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> autopar.Verification:
    """Verify with ``old`` replaced in the emitted text of the stage that has it."""
    texts = tuple(text.replace(old, new, 1) for text in job.job.texts)
    assert texts != job.job.texts
    broken: Job = replace(job.job, texts=texts)
    monkeypatch.setattr(job, "_job", broken)
    with Float64():
        return job.verify(make("gpt2", 8).batch, steps=1)


def test_equal(job: autopar.ParallelModel) -> None:
    with Float64():
        result = job.verify(make("gpt2", 8).batch, steps=1)
    assert result.ok
    assert result.divergence == ""
    assert "are equal" in str(result)


def test_a_wrong_op_is_named_with_its_line(job: autopar.ParallelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    result = sabotaged(job, monkeypatch, "aten.tanh(", "aten.sigmoid(")
    assert not result.ok
    assert "aten.tanh.default" in result.divergence
    assert "activations.py" in result.divergence
    assert "NOT equal" in str(result)


@pytest.mark.parametrize("agrees", [True, False])
def test_what_differs_after_an_update_alone_is_told_from_wrong_gradients(
    agrees: bool, job: autopar.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the gradients of the first step."""
    steps = list[int]()

    def compared(_job: object, _batch: object, count: int, _device: str) -> tuple[autopar.Verification, set[str]]:
        steps.append(count)
        error = 1e-7 if agrees and count == 1 else 1e-4
        return autopar.Verification(False, 2e-5, 1e-8, {"weight": error}, {"weight": 1e-4}), set()

    monkeypatch.setattr(verification, "_compared", compared)
    with Float64():
        result = job.verify(make("gpt2", 8).batch, steps=3)
    assert steps == [3, 1]
    assert result.gradient_errors == {"weight": 1e-4}, "of the last step"
    assert result.divergence.startswith(
        "loss and gradients of the first step agree" if agrees else "all forward values"
    )


def test_a_dropped_collective_is_caught(job: autopar.ParallelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    result = sabotaged(job, monkeypatch, GATHER, "torch.cat([ln_2, ln_2], 1)")
    assert not result.ok
    assert "first different value" in result.divergence


def test_a_dropped_backward_reduction_shows_in_gradients(
    job: autopar.ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = sabotaged(job, monkeypatch, GATHER, f"{GATHER}.detach()")
    assert not result.ok
    assert "all forward values agree" in result.divergence


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}, {"cp": 2}], ids=["dp2", "pp2", "cp2"])
def test_nothing_differs_between_layers_that_communicate_nothing(mesh: dict[str, int]) -> None:
    """Layers of one class are told apart, though they run the same lines and keep no axes."""
    with Float64():
        case = make("gpt2", 8)
        job = compile_pinned(case.model, 2, sample=case.batch, mesh=mesh, microbatches=2, cluster=FAST)
        assert "all forward values agree" in first_divergence(job, case.batch, 1e-9)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=["dp2", "tp2"])
def test_rows_in_the_order_of_experts_are_not_looked_at(mesh: dict[str, int]) -> None:
    """Those of a microbatch lie anywhere in those of the batch, and may be none."""
    with Float64():
        case = looped(ByWhere, 8)
        case.model.double()
        job = compile_pinned(case.model, 2, sample=case.batch, mesh=mesh, microbatches=2, cluster=FAST)
        assert "all forward values agree" in first_divergence(job, case.batch, 1e-9)


class Filled(nn.Module):
    """Writes halves of a result into memory that holds anything at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = x.new_empty(x.shape)
        made[..., :4] = self.inward(x)[..., 4:]
        made[..., 4:] = x[..., :4]
        return made.square().mean()


def test_memory_that_nothing_was_written_to_is_not_looked_at() -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    job = compile_pinned(Filled().double(), 2, sample=x, mesh={"dp": 2}, cluster=FAST)
    assert "all forward values agree" in first_divergence(job, x, 1e-9)


class Norms(nn.Module):
    """Convolutions with biases that the norms behind them take away: their gradients are rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.leave = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norms[0](self.first(x)).relu()
        h = self.norms[1](self.second(h)).relu().mean((2, 3))
        return F.cross_entropy(self.leave(h), y)


def norms(precision: str) -> tuple[autopar.ParallelModel, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, batch = Norms(), (torch.randn(8, 3, 8, 8), torch.randint(5, (8,)))
    given = {"sample": batch, "mesh": {"dp": 2}, "microbatches": 1, "precision": precision, "cluster": FAST}
    return compile_pinned(model, 2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), **given), batch


@pytest.mark.parametrize("precision", ["bf16", "model"])
def test_what_is_nothing_but_rounding_is_no_difference(precision: str) -> None:
    job, batch = norms(precision)
    result = job.verify(batch, steps=2)
    assert result.ok, str(result)
    assert result.gradient_errors["second.bias"] > 1e-2 * result.tolerance


class Strided(nn.Module):
    """Of the first step of AdamW on it, whose size is the same for all gradients, rounding decides some directions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.leave = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3))
        return F.cross_entropy(self.leave(h), y)


@pytest.mark.parametrize("seed", [0, 9])
def test_what_one_device_is_nearly_as_far_off_is_no_difference(seed: int) -> None:
    torch.manual_seed(seed)
    model, batch = Strided(), (torch.randn(8, 3, 8, 8), torch.randint(4, (8,)))
    given = {"sample": batch, "mesh": {"dp": 2}, "microbatches": 1, "precision": "bf16"}
    job = compile_pinned(model, 2, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3), **given)
    result = job.verify(batch, steps=2)
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+ self.leave.bias", "+ self.leave.bias * 1.2 - self.leave.bias.detach() * 0.2"),
        ("+ self.leave.bias", "+ self.leave.bias + 0.1 * (self.first.bias - self.first.bias.detach())"),
    ],
    ids=["of a gradient", "of one that is rounding"],
)
def test_what_is_more_than_rounding_is(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, batch = norms("bf16")
    texts = tuple(text.replace(old, new, 1) for text in job.job.texts)
    assert texts != job.job.texts
    monkeypatch.setattr(job, "_job", replace(job.job, texts=texts))
    assert not job.verify(batch, steps=2).ok


class Attends(nn.Module):
    """A third of its first bias, that of keys, has no gradient but rounding; of what is faint, one has hardly any."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.leave = nn.Linear(16, 48), nn.Linear(16, 5)
        loud = torch.ones(16)
        loud[3] = 1e-5
        self.register_buffer("loud", loud)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.inward(x).chunk(3, -1)
        h = (q @ k.transpose(1, 2) / 4).softmax(-1) @ (v * self.loud)
        return F.cross_entropy(self.leave(h.mean(1)), y)


FAINT = 32 + 3
KEYS = slice(16, 32)
Verified = tuple[autopar.ParallelModel, tuple[Tensor, Tensor]]


def attending(model: nn.Module) -> Verified:
    batch = (torch.randn(8, 6, 16), torch.randint(5, (8,)))
    given = {"sample": batch, "mesh": {"dp": 2}, "cluster": FAST}
    return compile_pinned(model, 2, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-3), **given), batch


@pytest.fixture
def attends() -> Verified:
    torch.manual_seed(0)
    return attending(Attends())


def test_an_update_by_what_is_nothing_but_rounding_is_no_difference(attends: Verified) -> None:
    job, batch = attends
    expected = job.reference()
    expected(*batch).backward()
    gradient = expected.inward.bias.grad.abs()
    assert gradient[KEYS].max() < 1e-7 * gradient.max()
    assert job.verify(batch).ok, str(job.verify(batch))


@pytest.mark.parametrize(
    "more",
    [
        "1e-6 * torch.roll(bias - bias.detach(), 16)",
        f"-2 * torch.nn.functional.one_hot(torch.tensor({FAINT}), 48) * (bias - bias.detach())",
    ],
    ids=["of what has none", "sign of one"],
)
def test_a_wrong_gradient_that_only_updates_show_is(
    more: str, attends: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, batch = attends
    text = job.job.texts[0].replace("+ self.bias", f"+ self.bias + {more.replace('bias', 'self.bias')}", 1)
    assert text != job.job.texts[0]
    monkeypatch.setattr(job, "_job", replace(job.job, texts=(text,)))
    result = job.verify(batch)
    assert result.gradient_errors["inward.bias"] < result.tolerance
    assert result.parameter_errors["inward.bias"] > 2 * result.tolerance
    assert not result.ok


@pytest.mark.parametrize("entry", [KEYS.start, FAINT, 0])
def test_a_wrong_update_of_one_entry_is(entry: int, attends: Verified, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a sign; of what has no gradient, by more than any sign would take it."""
    job, batch = attends
    found = job.simulate(batch, 3)
    before, after = job.reference().inward.bias.detach()[entry], found.parameters["inward.bias"]
    after[entry] = before + 2e-3 if entry == KEYS.start else before - (after[entry] - before)
    monkeypatch.setattr(job, "simulate", lambda *_, **__: found)
    assert not job.verify(batch).ok


class NoDoubles(Attends):
    """As kernels are that have none for float64."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("not in float64")
        return super().forward(x, y)


class Ranked(NoDoubles):
    """Its first rows count more."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x / torch.arange(1, 9).view(8, 1, 1), y)


@pytest.mark.parametrize(("kind", "ok"), [(NoDoubles, True), (Ranked, False)])
def test_without_float64_rows_in_another_order_tell_what_is_rounding(kind: type[nn.Module], ok: bool) -> None:
    """Where their order is nothing but that."""
    torch.manual_seed(0)
    job, batch = attending(kind())
    reference, given = job.reference(), (job.loss, job.job.optimizer, None)
    alone = verification.train_one_device(reference, [batch], 1, *given)
    assert verification._in_float64(job, [batch], 1, "cpu") is None
    turned = verification._in_other_order(job, [batch], alone, 2e-5, "cpu")
    assert (turned is not None) == ok
    assert not ok or job.verify(batch).ok


class Diffusion(nn.Module):
    """It draws a step and noise for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.register_buffer("kept", torch.linspace(0.1, 0.9, 10))

    def forward(self, x: Tensor) -> Tensor:
        steps, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        kept = self.kept[steps].unsqueeze(1)
        return (self.enter(kept * x + (1 - kept) * noise) - noise).square().mean()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_draws_random_numbers_is_named(microbatches: int) -> None:
    x = torch.randn(8, 8)
    job = compile_pinned(Diffusion(), 2, sample=x, mesh={"dp": 2}, cluster=FAST, microbatches=microbatches)
    assert not job.plan.replicated_ops
    assert f"randint.low(0, 10, [{8 // 2 // microbatches}]" in job.job.texts[0]
    result = job.verify(x, steps=1)
    assert not result.ok
    assert re.match(r"aten.randint\S* at test_verification\.py:\d+ draws random numbers", result.divergence)
