"""Every way to give an optimizer, on every way to store parameters: equal to one device, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, Muon, NAdam, RMSprop, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

import autopar
from autopar import simulate
from autopar.errors import ArgumentError, DeadRankError
from autopar.runtime import Axes
from autopar.runtime.job import RankResult, start
from autopar.runtime.optimizers import Parameters
from autopar.verification import relative_errors
from tests.fast_cluster import FAST
from tests.models import Case, Float64, llama, make, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import name_of

MESHES: list[dict[str, Any]] = [
    {"dp": 2},
    {"tp": 2},
    {"pp": 2, "dp": 2},
]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """What training scripts do: no decay for vectors and embeddings, another learning rate for the head."""
    named = dict(model.named_parameters())
    head = [p for n, p in named.items() if "lm_head" in n]
    plain = [p for n, p in named.items() if p.ndim < 2 or "embed" in n]
    rest = [p for p in named.values() if not any(p is other for other in [*head, *plain])]
    return [
        {"params": rest, "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0},
        {"params": head, "lr": 3e-3},
    ]


def adamw_groups(model: nn.Module) -> Any:
    return AdamW(decay_groups(model), lr=1e-3, betas=(0.9, 0.95))


def muon_and_adamw(model: nn.Module) -> Any:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return Muon(matrices, lr=2e-2), AdamW(rest, lr=1e-3)


def by_name(parameters: Parameters) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for n, p in parameters.named() if "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in parameters.named() if "norm" not in n], "weight_decay": 0.3},
    ]
    return AdamW(groups, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw groups": adamw_groups,
    "adamw by name": lambda model: by_name,
    "sgd momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda model: NAdam(model.parameters(), lr=1e-3),
    "rmsprop": lambda model: lambda parameters: RMSprop(parameters, lr=1e-3, centered=True),
    "adafactor": lambda model: Adafactor(decay_groups(model), lr=1e-2, weight_decay=0.1),
    "adafactor ascending": lambda model: lambda parameters: Adafactor(parameters, eps=(1e-9, 1e-2), maximize=True),
    "muon and adamw": muon_and_adamw,
}


@pytest.fixture(autouse=True)
def float64_scalars() -> Iterator[None]:
    """Optimizers keep scalars in float32 (NAdam: a product), which Float64 makes float64, on one device only."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def compiled(case: Case, mesh: dict[str, int], optimizer: Any, **options: Any) -> autopar.ParallelModel:
    given: dict[str, Any] = {"microbatches": 2, "clip_norm": 0.5, "cluster": FAST, **options}
    gpus = math.prod(mesh.values())
    return compile_pinned(case.model, gpus, sample=case.batch, loss=case.loss, mesh=mesh, optimizer=optimizer, **given)


def check(
    name: str,
    mesh: dict[str, int],
    *,
    batch: int = 8,
    layers: int = 4,
    rows: int = 48,
    tied: bool = False,
    **options: Any,
) -> None:
    with Float64():
        case = prepared(lambda: llama(batch, layers=layers, tied=tied, vocabulary=rows))
        result = compiled(case, mesh, OPTIMIZERS[name](case.model), **options).verify(case.batch, steps=3)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, mesh: dict[str, int]) -> None:
    check(name, mesh)


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    rates = [0.01 * (1 + i) for i in range(len(optimizer.param_groups))]
    return OneCycleLR(optimizer, max_lr=rates, total_steps=4, cycle_momentum="betas" in optimizer.defaults)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: step / 2)  # the first step changes nothing


FAST_TIER = [
    ("adamw groups", {"pp": 2, "dp": 2}, {"scheduler": one_cycle}),
    ("muon and adamw", {"tp": 2}, {"scheduler": warm_up}),
    ("adafactor", {"tp": 2}, {}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), FAST_TIER, ids=name_of)
def test_a_sample(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    check(name, mesh, layers=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [one_cycle, warm_up])
@pytest.mark.parametrize("name", ["adamw groups", "muon and adamw", "adafactor"])
@pytest.mark.parametrize("mesh", [{"pp": 2, "tp": 2}], ids=name_of)
def test_schedulers(name: str, mesh: dict[str, int], scheduler: Any) -> None:
    check(name, mesh, scheduler=scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon and adamw", "adamw groups"])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_the_vocabulary(name: str, tied: bool) -> None:
    """Tables are split over pp and tp, with rows of padding."""
    mesh = {"pp": 2, "tp": 2}
    check(name, mesh, vocabulary="vocab-2", schedule="zb-v", tied=tied, rows=50, microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", ["adafactor", "adafactor ascending", "muon and adamw", "adamw groups", "adagrad"])
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "tp": 2}], ids=name_of)
def test_rows_of_zero(name: str, mesh: dict[str, int], zero: int) -> None:
    """Sizes that dp 3 doesn't divide, matrices split by tp one way and by dp the other, both over rows."""
    check(name, mesh, zero=zero, layers=2, batch=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon and adamw"])
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2, "zero_ranks": 2, "mesh": {"dp": 4}},
        {"zero": 1, "schedule": "zb-v", "vocabulary": "vocab-2", "rows": 50, "tied": True, "mesh": {"pp": 2, "dp": 2}},
        {"zero": 3, "offload": ("optimizer",), "mesh": {"dp": 2}},
    ],
    ids=str,
)
def test_zero_otherwise(name: str, options: dict[str, Any]) -> None:
    """Copies on groups of ranks, tables that pp and dp split, masters on the host."""
    check(name, microbatches=4, **{"batch": 16, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw groups", "muon and adamw"])
def test_narrow_moments(name: str) -> None:
    """Rounded to bfloat16 on one device and on ranks alike."""
    check(name, {"dp": 2, "tp": 2}, state_dtype="bfloat16")
    check(name, {"dp": 2}, state_dtype="bfloat16", zero=2)


# --- gradients that are added up over calls of step --------------------------------------------------

ACCUMULATED: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2, "dp": 2}, {}),
    ({"pp": 2, "dp": 2}, {"schedule": "zb-v", "tied": True}),
    ({"pp": 2}, {"schedule": "v-half", "vocabulary": "vocab-2", "rows": 50}),
    *(({"dp": 2}, {"zero": zero, "rows": 49}) for zero in (1, 2, 3)),
    ({"pp": 2, "dp": 2}, {"zero": 2, "schedule": "zb-v", "tied": True}),
    ({"dp": 4}, {"zero": 3, "zero_ranks": 2}),
]


def several_batches(rows: int) -> list[dict[str, torch.Tensor]]:
    """Of which each counts another number of tokens."""
    found = []
    for seed in range(4):
        ids = torch.randint(0, rows, (8, 16), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        labels[:, : 1 + seed] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trained_on_ranks(job: autopar.ParallelModel, batches: list[Any], calls: int) -> tuple[list[float], dict[str, Any]]:
    def rank_program(rank: int) -> RankResult:
        result = RankResult()
        axes = Axes.build(job.job.mesh, rank, "cpu", job.job.seed, job.job.options.zero_ranks)
        executor = start(job.job, axes)
        for i, batch in enumerate(batches):
            result.losses.append(float(executor.step(batch, accumulate=(i + 1) % calls != 0)))
        result.parameters = {n: p.detach() for n, p in executor.named_parameters().items()}
        return result

    results = simulate.run(rank_program, job.plan.mesh.world, track_memory=False).results
    return results[0].losses, job.job.gather(results)[1]


def trained_by_hand(model: nn.Module, optimizer: Any, batches: list[Any], calls: int) -> list[float]:
    losses = []
    for i, batch in enumerate(batches):
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
        if (i + 1) % calls == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def check_accumulation(mesh: dict[str, int], *, rows: int = 48, tied: bool = False, **options: Any) -> None:
    with Float64():
        case = prepared(lambda: llama(8, layers=4, tied=tied, vocabulary=rows))
        job = compiled(case, mesh, adamw_groups(case.model), **options)
        batches = several_batches(rows)
        losses, parameters = trained_on_ranks(job, batches, 2)
        model = job.reference()
        expected = trained_by_hand(model, adamw_groups(model), batches, 2)
    assert losses == pytest.approx(expected, rel=1e-10)
    trained = {n: p.detach() for n, p in model.named_parameters()}
    assert max(relative_errors(parameters, trained).values()) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), ACCUMULATED, ids=name_of)
def test_accumulation(mesh: dict[str, int], options: dict[str, Any]) -> None:
    check_accumulation(mesh, **options)


def test_accumulation_on_a_small_mesh() -> None:
    check_accumulation({"dp": 2})


def test_an_asynchronous_schedule_can_not_accumulate() -> None:
    case = make("mlp", 4)
    job = compiled(case, {"pp": 2}, SGD, schedule="pipedream", clip_norm=None)
    with pytest.raises(DeadRankError, match="accumulate=True, but an asynchronous schedule"):
        trained_on_ranks(job, [dict(zip(("x", "y"), case.batch, strict=True))], 2)


# --- what is refused --------------------------------------------------------------------------------


class RowScaled(SGD):
    """Divides each row of a gradient by its largest entry."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(self.param_groups[0]["lr"] * p.grad / p.grad.abs().amax(-1, keepdim=True))


def test_bad_optimizers_are_refused_before_a_rank_starts() -> None:
    case = make("mlp", 4)

    def refusal(optimizer: Any, mesh: dict[str, int], **options: Any) -> str:
        with pytest.raises(ArgumentError) as caught:
            compiled(case, mesh, optimizer, **options)
        return str(caught.value)

    assert "RowScaled needs whole parameters" in (text := refusal(RowScaled, {"tp": 2}))
    assert "tp=1, zero=0" in text
    compiled(case, {"dp": 2}, RowScaled)  # every rank has whole parameters
    assert "evaluates the model again" in refusal(LBFGS, {"dp": 2})
    assert "sparse gradients" in refusal(SparseAdam, {"dp": 2})
    assert "no parameter of MLP" in refusal(AdamW(make("mlp", 4).model.parameters()), {"dp": 2})
    assert "goes by a loss" in refusal(SGD, {"dp": 2}, scheduler=ReduceLROnPlateau)
    assert "SGD keeps no moments" in refusal(SGD, {"dp": 2}, state_dtype="bfloat16")
    assert "tensors that it wasn't given" in refusal(lambda parameters: AdamW(case.model.parameters()), {"dp": 2})


def test_a_parameter_in_no_group_stays_as_it_is() -> None:
    case = make("mlp", 4)
    named = dict(case.model.named_parameters())
    job = compiled(case, {"dp": 2}, SGD([p for n, p in named.items() if "layers" in n], lr=0.1))
    found = job.simulate(case.batch).parameters
    for name, parameter in named.items():
        assert torch.equal(found[name], parameter) == ("layers" not in name), name
