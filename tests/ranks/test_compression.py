"""Compression and offload of activations, PowerSGD: parity where nothing is lost, nearness where something is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import simulate
from autopar.errors import ArgumentError, AutoparError, StageError
from autopar.runtime.axes import Axes
from autopar.runtime.job import start
from autopar.schedules.offloads import ALL
from tests.fast_cluster import FAST
from tests.models import MLP, Case, Float64, gpt2, make, prepared
from tests.pinned import compile_pinned
from tests.ranks.branching_models import readers
from tests.ranks.test_parity import optimizer, verified

MESHES = [
    ({"dp": 2}, "1f1b"),
    ({"pp": 2}, "1f1b"),
    ({"pp": 2}, "v-half"),
    ({"pp": 2}, "zb-v"),
    ({"pp": 2, "dp": 2}, "1f1b"),
]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def compiled(case: Case, mesh: dict[str, int], **options: Any) -> autopar.ParallelModel:
    options = {"optimizer": optimizer, "cluster": FAST, **options}
    return compile_pinned(case.model, math.prod(mesh.values()), sample=case.batch, mesh=mesh, **options)


# Saved activations as bits, seeds, and in 8 bits.


class Leaky(nn.Module):
    """An MLP with residuals whose activation keeps its operand, and dropout."""

    def __init__(self, layers: int = 4, width: int = 16, p: float = 0.0) -> None:
        super().__init__()
        self.inward, self.outward, self.p = nn.Linear(8, width), nn.Linear(width, 4), p
        self.layers = nn.ModuleList([LeakyLayer(width, p) for _ in range(layers)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inward(x)
        for layer in self.layers:
            h = h + layer(h)
        return F.mse_loss(self.outward(h), y)


class LeakyLayer(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.up, self.down, self.p = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.hardtanh(F.leaky_relu(self.up(x)))), self.p)


def leaky(rows: int, p: float = 0.0) -> Case:
    made = make("mlp", rows)
    return prepared(lambda: Case(Leaky(p=p), made.batch))


@pytest.mark.parametrize(("mesh", "schedule"), [MESHES[3], *(slow(*each) for each in MESHES if each != MESHES[3])])
def test_lossless_equals_one_device(mesh: dict[str, int], schedule: str) -> None:
    result = verified(leaky(8), mesh, microbatches=4, schedule=schedule, activations="lossless")
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("mesh", "schedule"), [({"pp": 2}, "v-half"), *(slow({"dp": 2, "tp": 2}, "1f1b"), slow(*MESHES[3]))]
)
def test_dropout_replayed_is_the_same_training(mesh: dict[str, int], schedule: str) -> None:
    """One device draws other numbers, so the exact program on the same ranks is what it is compared with."""
    found = []
    for activations in ("exact", "lossless"):
        job = compiled(leaky(8, 0.3), mesh, microbatches=4, schedule=schedule, activations=activations)
        found.append(job.simulate(leaky(8).batch, 2))
    exact, lossless = found
    assert lossless.losses == exact.losses
    for name, value in exact.parameters.items():
        assert torch.equal(lossless.parameters[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2, "tp": 2}])
def test_dropout_replayed_in_a_transformer(mesh: dict[str, int]) -> None:
    found = []
    for activations in ("exact", "lossless"):
        with Float64():
            case = prepared(lambda: gpt2(8, dropout=0.2))
            job = compiled(case, mesh, microbatches=4, activations=activations)
            found.append(job.simulate(case.batch, 2))
    exact, lossless = found
    assert lossless.losses == exact.losses
    for name, value in exact.parameters.items():
        assert torch.equal(lossless.parameters[name], value)
    assert max(lossless.peak_bytes) < max(exact.peak_bytes)


def test_emitted_text_and_plan_say_what_is_kept() -> None:
    job = compiled(leaky(8, 0.3), {"pp": 2}, activations="8bit", microbatches=2)
    text = job.source(0)
    assert "= leaky_relu_kept_as_bits(" in text
    assert "            down = dropout_replayed(down, 0.3, True, self.axes)" in text
    assert "    @kept_in_8_bits" in text
    assert "3 ops of distinct layers keep bits or a seed" in str(job.plan)
    assert "lossy: each number by up to 1/254" in str(job.plan)
    again = compiled(leaky(8, 0.3), {"pp": 2}, plan=autopar.Plan.from_json(job.plan.to_json()), cluster=None)
    assert again.source(0) == text


def test_8_bits_are_near_and_keep_less() -> None:
    rows, found = 512, []
    for activations in ("exact", "8bit"):
        job = compiled(leaky(rows), {"pp": 2}, activations=activations, microbatches=2)
        assert job.plan.stage_plans[0].saved_bytes > 0
        found.append((job.simulate(leaky(rows).batch, 1), job.plan.stage_plans[0].saved_bytes))
    (exact, exact_bytes), (lossy, lossy_bytes) = found
    assert lossy.losses == exact.losses  # of the first step
    for name, gradient in exact.gradients.items():
        error = float((lossy.gradients[name] - gradient).norm() / gradient.norm())
        assert error < 0.02, name
    assert any(not torch.equal(lossy.gradients[n], g) for n, g in exact.gradients.items())
    assert max(lossy.peak_bytes) < 0.6 * max(exact.peak_bytes)
    assert lossy_bytes < 0.4 * exact_bytes


# Activations on the host.


def wide(rows: int, layers: int = 8) -> Case:
    """Microbatches of 128 rows: values of 64 KiB."""
    random = torch.Generator().manual_seed(rows)
    x, y = (torch.randn(rows, n, generator=random, dtype=torch.float64) for n in (8, 4))
    return prepared(lambda: Case(MLP(layers=layers, width=64), (x, y)))


def sent_away(job: autopar.ParallelModel, share: int) -> autopar.Plan:
    plan = job.plan
    stages = [stage.model_copy(update={"offloads": share}) for stage in plan.stage_plans]
    ranks = [rank.model_copy(update={"saved_bytes": 0}) for rank in plan.rank_plans]  # copies are waited for at once
    options = plan.options.model_copy(update={"offload": ("activations",)})
    update = {"stage_plans": stages, "rank_plans": ranks, "options": options, "digest": ""}
    return plan.model_copy(update=update).sealed()


OFFLOADING = [
    ({"pp": 2}, "gpipe", 4),
    slow({"pp": 4}, "1f1b", 8),
    slow({"pp": 2}, "v-half", 8),
    slow({"pp": 2}, "zb-v", 8),
    slow({"pp": 2, "dp": 2}, "gpipe", 8),
]


@pytest.mark.parametrize("share", [ALL, 5])
@pytest.mark.parametrize(("mesh", "schedule", "microbatches"), OFFLOADING)
def test_activations_on_the_host(mesh: dict[str, int], schedule: str, microbatches: int, share: int) -> None:
    case = wide(128 * microbatches * mesh.get("dp", 1))
    plain = compiled(case, mesh, microbatches=microbatches, schedule=schedule, recompute="none")
    away = compiled(case, mesh, plan=sent_away(plain, share), cluster=None)
    kinds = [action.kind for row in away.schedule.lists for action in row]
    assert kinds.count("OFFLOAD") == kinds.count("FREE") == kinds.count("FETCH") > 0
    result = away.verify(case.batch)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)
    exact, offloaded = plain.simulate(case.batch), away.simulate(case.batch)
    assert max(offloaded.peak_bytes) < (0.9 if share == ALL else 1.0) * max(exact.peak_bytes)
    assert offloaded.losses == exact.losses


ALONE = [({"dp": 1}, 3, {}), ({"dp": 2}, 1, {"zero": 3}), slow({"dp": 2, "tp": 2}, 2, {"zero": 2, "recompute": "full"})]


@pytest.mark.parametrize(("mesh", "microbatches", "options"), ALONE)
def test_without_a_pipeline_activations_go_by_stages(
    mesh: dict[str, int], microbatches: int, options: dict[str, Any]
) -> None:
    case = wide(512 * microbatches * mesh["dp"])
    given = {"recompute": "none", **options, "microbatches": microbatches, "schedule": "interleaved", "chunks": 7}
    plain = compiled(case, mesh, **given)
    away = compiled(case, mesh, plan=sent_away(plain, ALL), cluster=None)
    gone = {action.stage for row in away.schedule.lists for action in row if action.kind == "OFFLOAD"}
    assert gone == set(range(6))  # little lies between the last one's forward and its backward
    result = away.verify(case.batch)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)
    exact, offloaded = plain.simulate(case.batch), away.simulate(case.batch)
    assert max(offloaded.peak_bytes) < 0.9 * max(exact.peak_bytes)
    assert offloaded.losses == exact.losses


READING = [({"pp": 3}, "gpipe", 4), ({"pp": 2}, "zb-v", 8), slow({"pp": 4}, "1f1b", 8), slow({"pp": 2}, "v-half", 8)]


@pytest.mark.parametrize(("mesh", "schedule", "microbatches"), READING)
def test_what_is_received_and_handed_on_stays(mesh: dict[str, int], schedule: str, microbatches: int) -> None:
    """A stage keeps it for its backward, and the next one does so in the same memory, or it is still being sent."""
    case = prepared(lambda: readers(128 * microbatches))
    plain = compiled(case, mesh, microbatches=microbatches, schedule=schedule, recompute="none")
    away = compiled(case, mesh, plan=sent_away(plain, ALL), cluster=None)
    result = away.verify(case.batch)
    assert result.ok, str(result)


@pytest.mark.slow
def test_what_must_go_goes() -> None:
    """Under a budget: the stages that don't fit offload, the step takes no longer, and the plan keeps the choice."""
    case, mesh = wide(128 * 8), {"pp": 4}
    plain = compiled(case, mesh, microbatches=8, recompute="none")
    budget = int(0.95 * plain.memory(case.batch).predicted[0].peak_bytes)
    options: dict[str, Any] = {"microbatches": 8, "recompute": "none", "budget_bytes": budget}
    job = compiled(case, mesh, offload=("activations",), **options)
    shares = [stage.offloads for stage in job.plan.stage_plans]
    assert 0 < shares[0] <= 8
    assert shares[1:] == [0, 0, 0]
    assert max(job.plan.peak_bytes) <= budget
    assert job.plan.rank_plans[0].host_bytes > 0
    assert job.plan.step_seconds == plain.plan.step_seconds
    again = compiled(case, mesh, plan=autopar.Plan.from_json(job.plan.to_json()), cluster=None)
    assert again.schedule == job.schedule
    roomy = compiled(case, mesh, microbatches=8, recompute="none", offload=("activations",))
    assert not any(stage.offloads for stage in roomy.plan.stage_plans)


# PowerSGD.


def test_weights_gradients_come_early_before_anything_goes() -> None:
    """Where backwards are split, ranks keep more than a cut was made for, but needn't. What is too much then goes."""
    case, mesh = wide(128 * 8), {"pp": 2}
    options: dict[str, Any] = {"microbatches": 8, "recompute": "none", "schedule": "v-half"}
    most = max(compiled(case, mesh, **options).plan.peak_bytes)
    for share, goes in ((95, False), (85, True)):
        job = compiled(case, mesh, offload=("activations",), budget_bytes=most * share // 100, **options)
        assert any(stage.offloads for stage in job.plan.stage_plans) == goes
        assert max(job.plan.peak_bytes) <= most * share // 100
    with pytest.raises(StageError, match="no cut"):
        compiled(case, mesh, budget_bytes=most * 85 // 100, **options)


def test_the_budget_that_a_refusal_asks_for_will_do() -> None:
    case, mesh = wide(128 * 8), {"pp": 4}
    options: dict[str, Any] = {"microbatches": 8, "recompute": "none", "offload": ("activations",)}
    budget = max(compiled(case, mesh, **options).plan.peak_bytes) * 6 // 10
    with pytest.raises(StageError) as refused:
        compiled(case, mesh, budget_bytes=budget, **options)
    job = compiled(case, mesh, budget_bytes=refused.value.needed_bytes, **options)
    assert max(job.plan.peak_bytes) <= refused.value.needed_bytes


def regression(batch: int = 64) -> Case:
    """Targets that a linear map of rank 3 makes."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 24, generator=random, dtype=torch.float64)
    left, right = (torch.randn(*s, generator=random, dtype=torch.float64) for s in ((24, 3), (3, 16)))
    return prepared(lambda: Case(Regression(), (x, x @ left @ right / 8)))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2, "dp": 2}])
@pytest.mark.parametrize("zero", [0, 1])
def test_full_rank_is_exact(mesh: dict[str, int], zero: int) -> None:
    result = verified(regression(), mesh, microbatches=2, powersgd=64, zero=zero)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.parametrize("zero", [0, slow(1)])
def test_low_rank_converges(zero: int) -> None:
    """60 steps of a regression: the exact curve's end, in far fewer bytes."""
    case, steps = regression(), 60
    exact = compiled(case, {"dp": 2}, optimizer=momentum).simulate(case.batch, steps)
    job = compiled(case, {"dp": 2}, optimizer=momentum, powersgd=2, zero=zero)
    low = job.simulate(case.batch, steps)
    assert exact.losses[-1] < 0.02 * exact.losses[0]
    assert low.losses[-1] < 1.1 * exact.losses[-1]
    assert low.losses[1:3] != exact.losses[1:3]
    assert "PowerSGD, lossy" in str(job.plan)
    if not zero:
        assert sum(low.sent_bytes[0].values()) < 0.35 * sum(exact.sent_bytes[0].values())


def test_what_a_step_loses_is_known() -> None:
    case = regression()
    job = compiled(case, {"dp": 2}, optimizer=momentum, powersgd=2)

    def program(rank: int) -> list[float]:
        executor = start(job.job, Axes.build(job.plan.mesh, rank, "cpu"))
        x, y = case.batch
        shares = [executor.lost_share()]
        for _ in range(3):
            executor.step({"0": x, "1": y})
            shares.append(executor.lost_share())
        return shares

    for shares in simulate.run(program, 2).results:
        assert shares[0] == 0
        assert all(0.01 < share < 1 for share in shares[1:])


def test_bfloat16_masters() -> None:
    """Where the optimizer updates float32 masters, the sum goes into them."""
    case = regression()
    case = Case(case.model.float(), tuple(t.float() for t in case.batch))
    job = compiled(case, {"dp": 2}, optimizer=momentum, powersgd=2, precision="bf16")
    losses = job.simulate(case.batch, 40, track_memory=False).losses
    assert losses[-1] < 0.1 * losses[0]


def refusal(kind: type[AutoparError], case: Case, mesh: dict[str, int], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        compiled(case, mesh, **options)
    return str(caught.value)


def test_bad_requests_say_what_works() -> None:
    mlp = make("mlp", 4)
    assert "dp is 1" in refusal(ArgumentError, mlp, {"pp": 2}, powersgd=2)
    assert "use zero=0 or 1" in refusal(ArgumentError, mlp, {"dp": 2}, powersgd=2, zero=2)
    tied = refusal(ArgumentError, make("nano_gpt", 4), {"pp": 2, "dp": 2}, powersgd=2)
    assert "'wte.weight' is tied between pipeline stages" in tied
    stale = refusal(ArgumentError, mlp, {"pp": 2, "dp": 2}, powersgd=2, schedule="pipedream", microbatches=2)
    assert "use a synchronous one" in stale
    both = refusal(ArgumentError, mlp, {"pp": 2}, activations="8bit", offload=("activations",))
    assert "leave the offload out" in both
    stale = refusal(ArgumentError, mlp, {"pp": 2}, offload=("activations",), schedule="pipedream", microbatches=2)
    assert "keeps versions of weights" in stale


def test_offload_without_host_memory() -> None:
    nowhere = replace(FAST, device=replace(FAST.device, host_memory_bytes=0))
    text = refusal(ArgumentError, make("mlp", 4), {"pp": 2}, offload=("activations",), cluster=nowhere)
    assert "no host memory belongs to it" in text


@pytest.mark.slow
def test_a_budget_that_no_offload_meets() -> None:
    text = refusal(
        StageError,
        wide(128 * 8),
        {"pp": 4},
        microbatches=8,
        recompute="none",
        offload=("activations",),
        budget_bytes=1_500_000,
    )
    assert "needs" in text or "give it" in text


def test_the_plan_says_what_is_lossy() -> None:
    case = make("mlp", 16, torch.float32)
    pinned = {"sample": case.batch, "loss": case.loss, "mesh": {"dp": 2}, "precision": "bf16", "cluster": "h100"}
    plain = autopar.plan(case.model, 2, **pinned)
    narrow = autopar.plan(case.model, 2, float8=True, reduce_dtype="bfloat16", state_dtype="float16", **pinned)
    assert "lossy" not in str(plain)
    for line in ("in float8 (lossy", "gradients travel in bfloat16 (lossy", "moments are kept in float16 (lossy"):
        assert line in str(narrow)
