"""What plans say that programs cost is what an evaluator reads off them, and a wrong price is seen."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.audit import Audit
from autopar.audit.run import see
from autopar.audit.step import step_seconds
from autopar.planner import between, block_costs, contention, gradients, op_costs, pass_costs, table_gradients
from autopar.planner import zero as zero_costs
from autopar.planner.activations import Activations
from autopar.planner.contention import Slowed
from autopar.planner.scalars import Scalars
from autopar.planner.vocabulary_passes import HeadPasses
from autopar.runtime import offload
from autopar.schedules import Costs, generate, lower, simulate_timeline
from autopar.schedules.offloads import Away, offload_activations
from autopar.schedules.weight_moves import MESSAGES, WeightMoves
from tests.audit.cases import FAST_PLANS, PINNED, SLOW_PLANS, Plan
from tests.fast_cluster import BUSY, FAST
from tests.models import MLP, Case, prepared
from tests.moe_models import family
from tests.random_models import Recipe, case_of
from tests.ranks import test_uncommon_weights as uncommon
from tests.shared_captures import compile_shared


def check(found: Audit) -> None:
    assert found.ok, f"\n{found}"


@pytest.mark.parametrize("plan", FAST_PLANS, ids=str)
def test_programs_cost_what_plans_say(plan: Plan) -> None:
    check(plan.compile().audit())


@pytest.mark.slow
@pytest.mark.parametrize("plan", SLOW_PLANS, ids=str)
def test_programs_cost_what_more_plans_say(plan: Plan) -> None:
    check(plan.compile().audit())


ONE_IN_HALVES = Recipe(layers=2, twice=1, mlp="experts", parallel=True)
"""Of its layers, one that is called twice has experts of its own, and the other dispatches in halves."""

SPLIT = {"pp": 2, "tp": 2, "ep": 2}


@pytest.mark.parametrize(
    ("recipe", "mesh", "options"),
    [
        (Recipe(positions="bias"), {"dp": 2}, {}),  # masks with gradients, for which a CPU has no fused attention
        (ONE_IN_HALVES, {"cp": 2, "ep": 2}, {"attention": "heads", "cp_order": "contiguous"}),
        (Recipe(mlp="shared"), SPLIT, {"schedule": "zb-h1"}),  # dispatches in halves, of products that are put off
        (Recipe(mixer="convolution"), {"pp": 2, "cp": 2}, {"vocabulary": "vocab-1"}),  # of few positions, in groups
        (Recipe(query_norm=True), {"dp": 2}, {}),  # norms lay queries out anew, and attention its result as those lie
        (Recipe(frozen="body"), {"pp": 2}, {"vocabulary": "vocab-2"}),  # with no gradient of what the head is given
        (Recipe(frozen="first", twice=1), {"pp": 2, "dp": 2}, {"zero": 3}),  # two stages have weights for themselves
        (Recipe(mixer="mean"), {"cp": 2}, {"cp_order": "paired"}),  # sums of pairs of parts
        (Recipe(frozen="norms"), {"pp": 2}, {"zero": 3, "offload": ("parameters",)}),  # untrained, on the device
    ],
    ids=["bias", "halves", "split", "groups", "normed", "body", "first", "paired", "frozen"],
)
def test_programs_of_models_of_other_parts_cost_what_plans_say(
    recipe: Recipe, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    case = case_of(recipe)
    given: dict[str, Any] = {**PINNED, "microbatches": 4 if "pp" in mesh else 2, "cluster": FAST, **options}
    ranks = math.prod(size for axis, size in mesh.items() if axis != "ep")
    check(compile_shared(case.model, ranks, sample=case.batch, loss=case.loss, mesh=mesh, **given).audit())


def _half(function: Callable[..., float]) -> Callable[..., float]:
    return lambda *args, **kwargs: function(*args, **kwargs) / 2


def _changed(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that ``module`` asks of the cost models under ``name`` is half as much."""
    model = module.collective
    wrong = type("Wrong", (), {name: staticmethod(_half(getattr(model, name)))})
    monkeypatch.setattr(module, "collective", wrong)


SMALL = Plan("mlp", {"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 2})


@pytest.mark.parametrize(
    ("module", "what"),
    [(block_costs, "forward"), (between, "message forward"), (zero_costs, "reduction of gradients")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrong_price_of_a_collective_is_seen(module: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _changed("seconds", module, monkeypatch)
    found = SMALL.compile().audit()
    assert f"stage 0: {what}" in [row.what for row in found.different]
    assert not found.ok


def test_a_wrong_price_of_an_op_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = op_costs.work_seconds
    monkeypatch.setattr(op_costs, "work_seconds", lambda *given: (1.01 * right(*given)[0], right(*given)[1]))
    found = SMALL.compile().audit()
    assert {row.what for row in found.different} == {"stage 0: forward", "stage 1: forward", "step"}
    assert 0 < found.different[0].difference < 0.01


def test_a_wrong_price_of_adding_up_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gradients.Summed.added
    monkeypatch.setattr(gradients.Summed, "added", lambda *given, **named: 1.01 * right(*given, **named))
    found = SMALL.compile().audit()
    assert {row.what for row in found.different} == {"stage 0: backward", "stage 1: backward", "step"}


class Reads(nn.Module):
    """Takes what all layers share twice, and cuts a part of it; the last one of both has a gradient for each."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.gate = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        first, second = self.own(x).chunk(2, dim=-1)
        return x * self.gate(shared) + torch.cat([second, first], dim=-1) * shared[:, :, :1]


class Shared(nn.Module):
    """Every layer takes what comes before all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layers = nn.Linear(16, 16), nn.ModuleList([Reads() for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shared = self.before(x).relu()
        for layer in self.layers:
            x = layer(x, shared)
        return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 2, "tp": 2}, {"dp": 2}], ids=str)
def test_wrong_prices_of_sums_within_a_backward_are_seen(mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what several ops of a layer use, and of what several layers do, and the next stage."""
    batch, count = (torch.randn(8, 4, 16), torch.randn(8, 4, 16)), math.prod(mesh.values())

    def audit() -> Audit:
        given = {**PINNED, "microbatches": 4, "cluster": FAST}
        return compile_shared(Shared(), count, sample=batch, mesh=mesh, **given).audit()

    check(audit())
    for module, name in ((block_costs, "block_sums"), (between, "_sums")):
        right = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, right=right: 1.01 * right(*given))
        rows = {row.what for row in audit().different}
        assert rows == {*(f"stage {stage}: backward" for stage in range(mesh.get("pp", 1))), "step"}
        monkeypatch.undo()


def test_a_wrong_price_of_what_collectives_slow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = contention.Contention.slowed
    monkeypatch.setattr(contention.Contention, "slowed", lambda *given: Slowed(*(1.01 * s for s in right(*given))))
    found = Plan("mlp", {"pp": 2, "dp": 2}, {"zero": 3}, cluster=BUSY).compile().audit()
    assert {row.what for row in found.different} == {
        *(f"stage {stage}: {way}" for stage in (0, 1) for way in ("forward", "backward")),
        "step",
    }


def test_rows_that_travel_beside_experts_slow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("moe_deepseek_v3", {"dp": 4, "ep": 4}, batch=16, cluster=BUSY)
    check(plan.compile().audit())
    monkeypatch.setattr(contention, "_exchanges", lambda *given: (0.0, 0.0))
    rows = {row.what for row in plan.compile().audit().different}
    assert rows == {"stage 0: forward", "stage 0: backward", "step"}


@pytest.mark.parametrize("price", ["cast_seconds", "unpack_seconds"])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_wrong_price_of_casts_is_seen(zero: int, price: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step, or in each pass; and of copies of what travels together."""
    right = getattr(zero_costs.MoveCosts, price)
    monkeypatch.setattr(zero_costs.MoveCosts, price, lambda *given: 1.01 * right(*given))
    options = {"zero": zero, "precision": "bf16"}
    found = Plan("mlp", {"pp": 2, "dp": 2}, options, torch.float32).compile().audit()
    once = [f"pipeline rank {rank}: totals of the batch and casts" for rank in (0, 1)]
    passes = [f"stage {stage}: {way}" for stage in (0, 1) for way in ("forward", "backward")]
    assert {row.what for row in found.different} == {*(once if zero == 1 else passes), "step"}


class Seen(nn.Module):
    """Products of other kinds than matrices', the first two of the batch; a linear one of rows that were turned."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.steps = nn.GRU(6, 16, batch_first=True)
        self.mixed = nn.Linear(16, 16)
        self.both = nn.Bilinear(16, 16, 5)

    def forward(self, images: Tensor, sounds: Tensor, labels: Tensor) -> Tensor:
        patches = self.mixed(self.patches(images).flatten(2).transpose(1, 2).relu()).mean(1)
        return nn.functional.cross_entropy(self.both(patches, self.steps(sounds)[0].mean(1)), labels)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_of_other_kinds_cost_what_plans_say(recompute: str) -> None:
    batch = torch.randn(8, 3, 8, 8), torch.randn(8, 5, 6), torch.randint(5, (8,))
    given = {**PINNED, "recompute": recompute, "microbatches": 2, "cluster": FAST}
    check(compile_shared(Seen(), 2, sample=batch, mesh={"dp": 2}, **given).audit())


class Masked(nn.Module):
    """Attention with a mask of its own."""

    def __init__(self, shape: tuple[int, ...], trained: bool, dropped: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropped = nn.Linear(16, 48), nn.Linear(16, 5), dropped
        self.mask = nn.Parameter(torch.randn(shape), requires_grad=trained)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, self.mask.tanh(), self.dropped)
        return nn.functional.cross_entropy(self.out(seen.transpose(1, 2).flatten(2).mean(1)), labels)


@pytest.mark.parametrize("cluster", [FAST, autopar.Cluster.load("h100")], ids=["cpu", "cuda"])
@pytest.mark.parametrize(("shape", "trained", "dropped"), [((8, 8), True, 0.0), ((4, 8, 8), False, 0.1)])
def test_attention_lays_its_result_out_as_planned(
    cluster: autopar.Cluster, shape: tuple[int, ...], trained: bool, dropped: float
) -> None:
    """Fused or not, by device, mask and dropout: what joins its heads is a view, or copies."""
    batch = torch.randn(8, 8, 16), torch.randint(5, (8,))
    given = {**PINNED, "microbatches": 2, "cluster": cluster}
    check(compile_shared(Masked(shape, trained, dropped), 2, sample=batch, mesh={"dp": 2}, **given).audit())


class Wide(nn.Module):
    """Layers of a weight that is large on two ranks and small ones; before them one that would be large on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(384, 512)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(4))
        self.last = nn.Linear(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x).square().mean()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_that_travel_alone_and_together_cost_what_plans_say(zero: int) -> None:
    """Four layers' weights travel alone; once a step, small ones of several layers are one message, or two."""
    given = {**PINNED, "microbatches": 2, "zero": zero, "mesh": {"dp": 2}, "cluster": BUSY}
    job = compile_shared(Wide(), 2, sample=torch.randn(8, 384), **given)
    check(job.audit())
    sizes = [math.prod(p.shape) * 4 for p in job.programs.stages[0].program.parameters]
    assert sum(size >= MESSAGES.large(2) for size in sizes) == 4
    batch = {"0": torch.empty(8, 384, device="meta")}
    (seen,) = see(job.job, batch, BUSY.device.kind)
    messages = Counter(m.bytes_ for phase in seen.phases.values() for m in phase.messages if m.kind == "all_gather")
    assert messages[MESSAGES.large(2)] == (4 if zero < 3 else 4 + 3 * 3), (
        "of a pass, what the next one begins with stays"
    )
    assert seen.places[0] == (5 if zero < 3 else 6), "what is behind the layers travels with small ones of layers"


def test_wrong_prices_of_the_host_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates there, and copies of masters and their gradients."""
    plan = Plan("mlp", {"dp": 2}, {"offload": ("optimizer",), "precision": "bf16"}, torch.float32, cluster=BUSY)
    right = zero_costs.MoveCosts._host
    monkeypatch.setattr(zero_costs.MoveCosts, "_host", lambda *given: 9 * right(*given))
    rows = {row.what for row in plan.compile().audit().different}
    sums = {"stage 0: reduction of gradients", "stage 0: all of a reduction"}
    assert {"stage 0: gather of weights", "step", *sums} == rows
    monkeypatch.undo()
    update = pass_costs._step_seconds
    monkeypatch.setattr(pass_costs, "_step_seconds", lambda *given: tuple(1.01 * each for each in update(*given)))
    assert {row.what for row in plan.compile().audit().different} == {"pipeline rank 0: optimizer", "step"}


def test_a_wrong_count_of_calls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("mlp", {"pp": 2}, {"precision": "bf16"}, torch.float32)
    right = block_costs.calls_of
    monkeypatch.setattr(
        block_costs, "calls_of", lambda *given, **named: (right(*given, **named)[0] + 1, right(*given, **named)[1])
    )
    assert {row.what for row in plan.compile().audit().different} == {f"pipeline rank {rank}: host" for rank in (0, 1)}


def test_gradients_that_are_scattered_are_added_up_as_planned() -> None:
    """Some have rows that two ranks can't share evenly."""
    options = {"schedule": "zb-h1", "zero": 2, "precision": "bf16"}
    found = Plan("mlp", {"pp": 2, "dp": 2}, options, torch.float32).compile().audit()
    rows = {row.what: row for row in found.rows}
    for what in ("backward", "weight gradients"):
        assert all(rows[f"stage {stage}: {what}"].is_equal for stage in (0, 1))


def test_wrong_prices_of_a_split_vocabulary_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps over logits, a product of the backward."""
    plan = Plan("gpt2", {"pp": 2}, {"vocabulary": "vocab-2"})
    swept, pulled = HeadPasses._swept, HeadPasses._pulled
    monkeypatch.setattr(HeadPasses, "_swept", lambda *given: 1.01 * swept(*given))
    found = {row.what for row in plan.compile().audit().different}
    assert {"pipeline rank 0: S", "pipeline rank 1: T", "step"} <= found
    assert not any(row.endswith((": E", ": G", "forward")) for row in found)
    monkeypatch.undo()
    monkeypatch.setattr(HeadPasses, "_pulled", lambda self, into: pulled(self, into) * (1.01 if into == "x" else 1))
    found = {row.what for row in plan.compile().audit().different}
    assert found == {"pipeline rank 0: S", "pipeline rank 1: S", "step"}, "vocab-2 makes the input's gradient early"


def test_wrong_prices_beside_the_passes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalars before and after, gradients of split tables."""
    plan = Plan("head_smoothed", {"pp": 2, "dp": 2}, {"vocabulary": "vocab-2"})
    right, tables = pass_costs.scalars, table_gradients.table_seconds
    more: Callable[[Any], Any] = lambda each: tuple(1.01 * seconds for seconds in each)  # noqa: E731
    monkeypatch.setattr(pass_costs, "scalars", lambda *given: Scalars(*map(more, right(*given))))
    names = "totals of the batch and casts", "loads and loss"
    ends = {f"pipeline rank {rank}: {what}" for rank in (0, 1) for what in names}
    assert {row.what for row in plan.compile().audit().different} == {*ends, "step"}
    monkeypatch.undo()
    wrong = lambda *given: {kind: 1.01 * seconds for kind, seconds in tables(*given).items()}  # noqa: E731
    monkeypatch.setattr(table_gradients, "table_seconds", wrong)
    passes = {f"pipeline rank {rank}: {kind}" for rank in (0, 1) for kind in "TG"}
    assert {row.what for row in plan.compile().audit().different} == {*passes, "step"}


@pytest.mark.parametrize("model", [uncommon.Adapters, uncommon.Turned])
def test_what_gradients_are_put_off(model: type[nn.Module]) -> None:
    """None of frozen weights, those of transposed ones."""
    given = prepared(lambda: uncommon.case(model))
    pinned = {**PINNED, "mesh": {"pp": 2}, "microbatches": 4, "schedule": "zb-h1", "cluster": FAST}
    check(compile_shared(given.model, 2, sample=given.batch, **pinned).audit())


@pytest.mark.parametrize(
    "options",
    [{"zero": 1}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"zero": 2}, {"precision": "bf16"}))],
    ids=str,
)
def test_gradients_are_copied_to_be_sent_together(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for large ones, and those that find no others."""
    wide = prepared(lambda: Case(MLP(layers=4, width=512), (torch.randn(8, 8), torch.randn(8, 4))), torch.float32)

    def found() -> Audit:
        pinned = {**PINNED, "mesh": {"dp": 2}, "microbatches": 2, "cluster": FAST, **options}
        return compile_shared(wide.model, 2, sample=wide.batch, **pinned).audit()

    check(found())
    monkeypatch.setattr(gradients, "alone", lambda sums: {each.weight.name for message in sums for each in message})
    assert "stage 0: backward" in {row.what for row in found().different}
    monkeypatch.setattr(gradients, "alone", lambda *_: set())
    assert found().ok != ("zero" in options), "large ones are sent alone under ZeRO"


@pytest.mark.parametrize(
    ("pp", "schedule", "microbatches"), [(2, "gpipe", 4), pytest.param(4, "1f1b", 8, marks=pytest.mark.slow)]
)
def test_what_goes_to_the_host_is_what_is_copied(
    pp: int, schedule: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each memory once; the first and the last microbatch of a stage may stay where others go. Copies to the host take
    longer where some come back meanwhile."""
    found = _offloading(pp, schedule, microbatches).audit()
    check(found)
    assert {f"stage {stage}: copy to the host" for stage in range(pp - 1)} <= {row.what for row in found.rows}
    moved = Activations.movable_bytes
    monkeypatch.setattr(Activations, "movable_bytes", lambda *given, **named: moved(*given, **named) // 2)
    rows = {row.what: row.difference for row in _offloading(pp, schedule, microbatches).audit().rows}
    assert rows["stage 0: copy to the host"] == pytest.approx(-0.5)


class Handing(nn.Module):
    """Layers of which each keeps what it gives, as the next one does; or (not ``both``) the next one alone."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.inward, self.both = nn.Linear(8, 64), both
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inward(x)
        for layer in self.layers:
            h = torch.tanh(layer(h)) if self.both else torch.tanh(layer(h)) + h
        return F.mse_loss(h[:, :4], y)


@pytest.mark.parametrize("both", [False, True])
def test_what_the_stage_before_keeps_too_is_not_copied(*, both: bool) -> None:
    """Of stages on one rank, of which some go: with right gradients, at the costs that were planned."""
    case = prepared(lambda: Case(Handing(both=both), (torch.randn(1024, 8), torch.randn(1024, 4))), torch.float64)
    pinned = {**PINNED, "microbatches": 2, "schedule": "interleaved", "chunks": 6, "cluster": BUSY}
    given = {**pinned, "sample": case.batch, "offload": ("activations",)}
    plan = compile_shared(case.model, 1, mesh={"dp": 1}, **given).plan
    shares = [8 * (number in (2, 3)) for number in range(6)]
    stages = [s.model_copy(update={"offloads": share}) for s, share in zip(plan.stage_plans, shares, strict=True)]
    away = plan.model_copy(update={"stage_plans": stages, "digest": ""}).sealed()
    job = compile_shared(case.model, 1, sample=case.batch, plan=away)
    result = job.verify(case.batch)
    assert result.ok, str(result)
    found = job.audit()
    check(found)
    copied = {row.what: row.planner for row in found.rows if "copy to the host" in row.what}
    assert {what: seconds > 0 for what, seconds in copied.items()} == {
        "stage 2: copy to the host": True,
        "stage 3: copy to the host": True,
    }


def test_a_plan_that_waits_for_copies_adds_up() -> None:
    """Some of a stage's microbatches go, a rank waits for a copy: the audit takes the step to be as long, its parts add
    up to it, and the plan as it was saved is laid out the same."""
    case = prepared(lambda: Case(MLP(layers=8, width=64), (torch.randn(1024, 8), torch.randn(1024, 4))))
    given = {**PINNED, "microbatches": 8, "mesh": {"pp": 4}}
    plain = compile_shared(case.model, 4, sample=case.batch, cluster=FAST, **given)
    budget = max(plain.plan.peak_bytes) * 85 // 100
    given |= {"offload": ("activations",), "budget_bytes": budget}
    job = compile_shared(case.model, 4, sample=case.batch, cluster=FAST, **given)
    assert any(0 < stage.offloads < 8 for stage in job.plan.stage_plans)
    waits = [e for e in job.timeline.events if e.action.kind == "FREE" and e.end_seconds > e.start_seconds]
    assert job.plan.cost.rank in {event.rank for event in waits}
    check(job.audit())
    parts = {part.name: part.exposed_seconds for part in job.plan.cost.parts}
    assert parts["host copies"] > 0
    assert math.fsum(part.exposed_seconds for part in job.plan.cost.parts) == pytest.approx(
        job.plan.step_seconds, rel=1e-12
    )
    again = compile_shared(case.model, 4, sample=case.batch, plan=autopar.Plan.from_json(job.plan.to_json()))
    assert again.schedule.to_text() == job.schedule.to_text()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half"])
@pytest.mark.parametrize("room", [0, 20])
def test_waits_for_copies_take_as_long(name: str, room: int) -> None:
    """Slow ones, which a rank waits for where it has little room."""
    schedule = lower(generate(name, 4, 8))
    costs = Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=2.0, send_seconds=0.1, activation_bytes=10)
    stages = schedule.stages
    costs = replace(costs, offload_bytes=(9,) * stages, offload_seconds=tuple(2.0 + 0.3 * s for s in range(stages)))
    both = offload_activations(schedule, Away(dict.fromkeys(range(stages), 5), [room] * 4), costs)
    timeline = simulate_timeline(both, costs)
    assert any(e.action.kind == "FREE" and e.end_seconds > e.start_seconds for e in timeline.events)
    assert step_seconds(both, costs.seconds, costs.summed_seconds) == pytest.approx(
        timeline.makespan_seconds, rel=1e-12
    )


def _offloading(pp: int, schedule: str, microbatches: int) -> autopar.ParallelModel:
    """An MLP whose microbatches have values of 64 KiB; its stages offload all that a list gives time for."""
    rows = 128 * microbatches
    case = prepared(lambda: Case(MLP(layers=8, width=64), (torch.randn(rows, 8), torch.randn(rows, 4))))
    pinned = {**PINNED, "schedule": schedule, "microbatches": microbatches, "mesh": {"pp": pp}}
    plan = compile_shared(case.model, pp, sample=case.batch, cluster=BUSY, **pinned).plan
    stages = [stage.model_copy(update={"offloads": 8}) for stage in plan.stage_plans]
    options = plan.options.model_copy(update={"offload": ("activations",)})
    away = plan.model_copy(update={"stage_plans": stages, "options": options, "digest": ""}).sealed()
    return compile_shared(case.model, pp, sample=case.batch, plan=away)


def test_a_wrong_program_is_seen() -> None:
    """An op more than was planned, and a collective more."""
    model = SMALL.compile()
    text = model.job.texts[0]
    relu = next(line for line in text.splitlines() if "aten.relu(" in line)
    again = f"{relu}\n{relu.replace('aten.relu(', 'aten.neg(')}"
    assert {"stage 0: forward", "stage 0: backward"} <= _different(model, text.replace(relu, again))
    gather = next(line for line in text.splitlines() if "all_gather(" in line)
    twice = f"{gather}\n{gather.replace(gather.split('=', maxsplit=1)[0].strip(), '_', 1)}"
    assert "stage 0: forward" in _different(model, text.replace(gather, twice, 1))


def _different(model: autopar.ParallelModel, text: str) -> set[str]:
    job = replace(model.job, texts=(text, *model.job.texts[1:]))
    return {row.what for row in autopar.audit.audit(_Planned(model.plan, job, model.timeline)).different}


class _Planned:
    def __init__(self, plan: Any, job: Any, timeline: Any) -> None:
        self.plan, self.job, self.timeline = plan, job, timeline


@pytest.mark.parametrize(
    ("name", "chunks", "head", "moves"),
    [
        ("gpipe", None, "", WeightMoves()),
        ("1f1b", None, "vocab-1", WeightMoves("step")),
        ("interleaved", 2, "", WeightMoves("pass", scatters=True)),
        ("zb-h1", None, "", WeightMoves("pass")),
        ("v-half", None, "", WeightMoves("step", scatters=True)),
        ("dualpipe-v", None, "", WeightMoves()),
    ],
)
def test_the_longest_path_is_the_timeline(name: str, chunks: int | None, head: str, moves: WeightMoves) -> None:
    schedule = generate(name, 4, 8, chunks=chunks, head=head, embedding=bool(head))
    stages, ranks = schedule.stages, schedule.ranks
    costs = Costs(
        forward_seconds=tuple(1.0 + 0.1 * k for k in range(stages)),
        backward_seconds=tuple(2.0 + 0.3 * k for k in range(stages)),
        send_forward_seconds=tuple(0.4 + 0.01 * k for k in range(stages)),
        send_backward_seconds=tuple(0.5 + 0.02 * k for k in range(stages)),
        reduce_seconds=tuple(3.0 + k for k in range(stages)),
        activation_bytes=(1,) * stages,
        step_seconds=tuple(0.7 + k for k in range(ranks)),
        gather_seconds=tuple(1.5 + 0.2 * k for k in range(stages)),
        scatter_seconds=tuple(0.6 + 0.1 * k for k in range(stages)),
        reducing_seconds=tuple(5.0 + k for k in range(stages)),
        scattering_seconds=tuple(2.4 + 0.1 * k for k in range(stages)),
        gather_vocabulary_seconds=0.9,
        reduce_vocabulary_seconds=1.1,
        vocabulary_seconds=dict.fromkeys(("S", "T", "E", "G", "SUM_X", "CAST_X", "STATS", "SUM_E"), (0.3,) * ranks),
    )
    lowered = lower(schedule, costs.seconds, moves) if moves != WeightMoves() else lower(schedule, costs.seconds)
    assert step_seconds(lowered, costs.seconds, costs.summed_seconds) == pytest.approx(
        simulate_timeline(lowered, costs).makespan_seconds, rel=1e-12
    )


def test_the_evaluator_reads_nothing_of_the_planner_but_what_an_op_moves() -> None:
    folder = Path(autopar.audit.__file__).parent
    trees = [ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))]
    imported = {n.module for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert {name for name in imported if name.startswith("autopar.planner")} == {"autopar.planner.op_costs"}
    assert not any(name.startswith(("autopar.passes", "autopar.codegen", "autopar.search")) for name in imported)


def test_a_table_says_what_differs() -> None:
    found = autopar.audit.Audit(
        (autopar.audit.Row("stage 0: forward", 1.0, 1.0), autopar.audit.Row("step", 2.0, 2.5)),
        (autopar.audit.Unpriced("the loss", 1e-6),),
    )
    text = str(found)
    assert not found.ok
    assert "NOT equal" in text
    assert "-20 %" in text
    assert "not priced: the loss" in text
    assert found.largest_difference == pytest.approx(0.2)


def test_what_objects_hold_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The places of experts' rows, which no hook on what autograd saves meets, and the batch."""
    for module in (offload, pass_costs):
        monkeypatch.setattr(module, "LEAST_BYTES", 64)
    case = prepared(lambda: family("deepseek_v3", 8))
    pinned = {**PINNED, "schedule": "gpipe", "microbatches": 4, "mesh": {"pp": 2}, "loss": case.loss}
    plan = compile_shared(case.model, 2, sample=case.batch, cluster=FAST, **pinned).plan
    stages = [stage.model_copy(update={"offloads": 8}) for stage in plan.stage_plans]
    options = plan.options.model_copy(update={"offload": ("activations",)})
    away = plan.model_copy(update={"stage_plans": stages, "options": options, "digest": ""}).sealed()
    found = compile_shared(case.model, 2, sample=case.batch, loss=case.loss, plan=away).audit()
    copies = [row for row in found.rows if row.what.endswith("copy to the host")]
    assert copies
    assert [(row.planner, row.evaluator) for row in copies] == [(row.evaluator, row.evaluator) for row in copies]
