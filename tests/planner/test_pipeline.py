"""Pipelines of plans: what vocabulary modes cost, what ranks keep, and pins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ArgumentError, BudgetError, PlanError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.plan.parts import EIGHTHS
from autopar.planner import pipeline
from autopar.planner.block_costs import Machine, block_cost
from autopar.planner.budget import within_budget
from autopar.planner.build import Built, Request, activations_of, build, finish, place
from autopar.planner.fitting import Demand, Fit
from autopar.planner.modes import MODES
from autopar.planner.pipeline import kept_stages
from autopar.planner.wanted import Wanted
from autopar.preparation import prepare
from autopar.schedules import Schedule, generate, lower
from autopar.schedules.actions import parse_action
from autopar.schedules.kept import embedded_ahead
from tests.fast_cluster import FAST
from tests.models import llama
from tests.pinned import compile_pinned
from tests.shared_captures import compile_shared
from tests.simulate.test_replay import Layers


def wide(classes: int, **options: Any) -> autopar.Plan:
    """A plan of a small model with a large vocabulary on 4 pipeline ranks; the weights are never made."""
    with torch.device("meta"):
        case = llama(16, layers=8, vocabulary=classes)
    return plan(case.model, case.batch, **options)


def plan(model: nn.Module, batch: Any, **options: Any) -> autopar.Plan:
    chosen = {"mesh": {"pp": 4}, "microbatches": 16, "cluster": "h100", **options}
    return compile_pinned(model, 4, sample=batch, **chosen).plan


def test_ranks_keep_what_their_schedule_says() -> None:
    assert kept_stages(lower(generate("1f1b", 4, 8))) == (4, 3, 2, 1)
    assert kept_stages(lower(generate("gpipe", 2, 3))) == (3, 3)
    in_v = kept_stages(lower(generate("v-half", 4, 16)))
    assert [in_v[k] + in_v[7 - k] for k in range(4)] == [6, 6, 6, 6]  # (4 + 2) // 2 microbatches of two chunks


def test_what_is_looked_up_ahead_of_the_first_stage() -> None:
    """When its rank keeps the most of what it began."""
    texts = ["E0 E1 E2 F0@0 F1@0 E3 E4 B0@0 F2@0 E5 B1@0 F3@0 B2@0 F4@0 B3@0 F5@0 B4@0 B5@0", ""]
    schedule = Schedule("made", 1, 6, (0,), tuple(tuple(map(parse_action, text.split())) for text in texts[:1]))
    assert embedded_ahead(schedule) == 3
    assert embedded_ahead(generate("1f1b", 4, 8)) == 0


def test_what_is_looked_up_ahead_leaves_the_first_rank_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a microbatch of what the first stage is given for each."""
    case = llama(16, layers=8)
    model = prepare(case.model, case.batch)[0]
    request = Request(Mesh(pp=2), 8, FAST, Wanted("1f1b", "vocab-2"), Options.of())
    found = build(model.copy(), request).pipeline
    ahead = embedded_ahead(found.schedule)
    monkeypatch.setattr(pipeline, "embedded_ahead", lambda draft: 0)
    without = build(model.copy(), request).pipeline
    assert ahead > 0
    assert found.vocabulary is not None
    less = [a - b for a, b in zip(without.free_bytes, found.free_bytes, strict=True)]
    assert less == [ahead * found.vocabulary.embedded_bytes, 0]


def test_a_large_vocabulary_is_cheaper_split() -> None:
    plans = {mode: wide(100_000, vocabulary=mode, cluster=FAST) for mode in MODES if mode != "interlaced"}
    steps = {mode: found.step_seconds for mode, found in plans.items()}
    assert steps["redistributed"] <= steps["stage"]
    assert max(steps["vocab-1"], steps["vocab-2"]) < 0.6 * steps["redistributed"]
    assert max(plans["vocab-2"].peak_bytes) < max(plans["naive"].peak_bytes)  # fewer microbatches between barriers
    whole, split = plans["redistributed"], plans["vocab-1"]
    rows = {rank.vocabulary_bytes for rank in split.rank_plans}
    assert len(rows) == 1
    assert rows.pop() * 4 == pytest.approx(2 * 100_000 * 32 * 4, rel=1e-3)  # two tables, in parts
    assert max(split.peak_bytes) < 0.5 * max(whole.peak_bytes)
    assert all(rank.vocabulary_bytes == 0 for rank in whole.rank_plans)


def test_the_stage_mode_counts_layers() -> None:
    found = wide(100_000, vocabulary="stage")
    assert [sum("layers" in unit for unit in stage) for stage in found.stages] == [2, 2, 2, 2]


def test_every_plan_says_how_good_its_order_is() -> None:
    for schedule in ("1f1b", "v-half"):
        found = wide(1000, schedule=schedule)
        assert 0 < found.cost.order_seconds <= found.step_seconds
        assert "no order of these stages' passes is below" in str(found)


def test_a_synthesized_schedule_is_no_worse_than_named_ones() -> None:
    best = min(wide(1000, schedule=name).step_seconds for name in ("zb-h1", "interleaved"))
    assert wide(1000, schedule="synthesized").step_seconds <= best * (1 + 1e-9)


def test_a_plan_whose_cut_makes_no_stages_is_refused() -> None:
    with torch.device("meta"):
        case = llama(16, layers=8)
    good = plan(case.model, case.batch)
    empty = [s.model_copy(update={"units": []}) if k == 1 else s for k, s in enumerate(good.stage_plans)]
    bad = good.model_copy(update={"stage_plans": empty, "digest": ""}).sealed()
    with pytest.raises(PlanError, match="which makes no stages"):
        autopar.plan(case.model, 4, sample=case.batch, plan=bad)


def laid_out_beside(
    host_bytes: int, budget_kib: int, offload: tuple[str, ...] = ("activations",), schedule: str = "interleaved"
) -> Built:
    """Layers on two ranks with four stages each, and so much host memory."""
    cluster = replace(FAST, device=replace(FAST.device, host_memory_bytes=host_bytes))
    model = prepare(Layers(24, 128), {"x": torch.randn(1024, 128)})[0]
    options = Options.of(offload=offload, budget_bytes=budget_kib << 10)
    return build(model, Request(Mesh(pp=2), 8, cluster, Wanted(schedule, "redistributed", 4), options))


@pytest.mark.parametrize(
    ("budget_kib", "host_bytes", "offload"),
    [(4600, 10**6, ("activations",)), (3600, 5_000_000, ("optimizer", "activations"))],
)
def test_no_more_goes_to_the_host_than_it_has_room_for(
    budget_kib: int, host_bytes: int, offload: tuple[str, ...]
) -> None:
    """Beside what of the state is there; the rest is recomputed."""
    roomy, tight = (laid_out_beside(bytes_, budget_kib, offload) for bytes_ in (10**12, host_bytes))
    assert max(rank.host_bytes for rank in roomy.plan.rank_plans) > host_bytes
    assert max(rank.host_bytes for rank in tight.plan.rank_plans) <= host_bytes
    assert max(tight.plan.peak_bytes) <= budget_kib << 10
    assert all(map(tight.pipeline.host_bytes, range(2)))
    again = [sum(stage.saved_bytes for stage in built.plan.stage_plans) for built in (roomy, tight)]
    assert again[1] < again[0], "recomputed instead"
    assert roomy.plan.step_seconds < tight.plan.step_seconds


def test_ranks_that_have_time_recompute_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others than the slowest rank keep needn't go to the host, where copies would hold up their passes."""
    model = prepare(Layers(16, 256), {"x": torch.randn(16384, 256)})[0]
    options = Options.of(offload=("activations",), budget_bytes=18_000 << 10)
    request = Request(Mesh(pp=4), 16, FAST, Wanted("1f1b", "redistributed"), options)
    found = build(model.copy(), request).plan
    recomputing = [sum(number > 0 for number in stage.recompute) for stage in found.stage_plans]
    assert [stage.offloads for stage in found.stage_plans] == [EIGHTHS, EIGHTHS, 0, 0]
    assert recomputing[0] > recomputing[2] > 0
    assert max(found.peak_bytes) <= 18_000 << 10
    monkeypatch.setattr(pipeline, "spending_slack", lambda demand, found, more: found)
    assert found.step_seconds < 0.95 * build(model.copy(), request).plan.step_seconds


@pytest.mark.parametrize(("schedule", "budget_kib"), [("1f1b", 18_000), ("1f1b", 19_000), ("v-half", 16_500)])
def test_ranks_take_no_longer_than_the_slowest(schedule: str, budget_kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a step much longer, where others' passes are waited for, too."""
    model = prepare(Layers(16, 256), {"x": torch.randn(16384, 256)})[0]
    options = Options.of(offload=("activations",), budget_bytes=budget_kib << 10)
    spending, both = pipeline.spending_slack, list[tuple[Fit, Fit]]()

    def recorded(demand: Demand, before: Fit, more: int) -> Fit:
        both.append((before, spending(demand, before, more)))
        return both[-1][1]

    monkeypatch.setattr(pipeline, "spending_slack", recorded)
    build(model, Request(Mesh(pp=4), 16, FAST, Wanted(schedule, "redistributed"), options))
    assert any(after.chosen != before.chosen for before, after in both)
    assert all(after.cut.slowest_seconds <= before.cut.slowest_seconds for before, after in both)
    assert all(after.pace <= 1.002 * before.pace for before, after in both)
    assert any(after.pace > before.pace for before, after in both) == (schedule == "v-half")


def test_where_the_host_has_too_little_it_is_named() -> None:
    """Where it would have to be larger, and where more of the device would do, too."""
    with pytest.raises(ArgumentError, match=r"needs 0.00122 GiB of host memory for each rank, but .* has 0.000559 GiB"):
        laid_out_beside(600_000, 4600)
    with pytest.raises(BudgetError, match=r"4.71 MiB with everything .*; or, .* memory above each rank's 9.31e-05 GiB"):
        laid_out_beside(100_000, 4600)
    with pytest.raises(ArgumentError, match=r"needs 0.00301 GiB of host memory for each rank, but .* has 0.00279 GiB"):
        laid_out_beside(3_000_000, 4600, ("optimizer", "activations"))


@pytest.mark.parametrize(("budget_kib", "offloads", "recomputes"), [(9216, [0], False), (7680, [1], True)])
def test_a_known_layout_is_laid_out_again(budget_kib: int, offloads: list[int], recomputes: bool) -> None:
    model = prepare(Layers(8, 512), {"x": torch.randn(1024, 512)})[0]
    options = Options.of(offload=("activations",), budget_bytes=budget_kib << 10)
    placed = place(model, Request(Mesh(pp=2), 8, FAST, Wanted("interleaved", "redistributed", 2), options))
    machine = Machine.of(FAST, placed.request.mesh)
    costs = [block_cost(block, machine) for block in placed.model.blocks]
    activations = activations_of(placed.model, costs, machine, options)
    found = finish(placed, costs, activations)
    layout = found.pipeline.layout
    assert layout.away is not None
    assert sorted(layout.away.shares) == offloads
    assert any(chosen.regions for chosen in layout.fit.chosen.values()) == recomputes
    again = finish(placed, costs, activations, known={0: layout})
    assert again.plan.to_json() == found.plan.to_json()
    assert again.pipeline.schedule == found.pipeline.schedule


def test_shares_that_a_search_found_are_run_again_as_they_were_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the solvers were left less than the budget, a list with copies is that of what ranks keep, not of the
    budget."""
    spared: list[int] = []

    def recorded(lay_out: Any, *given: Any) -> Any:
        return within_budget(lambda bytes_: (spared.append(bytes_), lay_out(bytes_))[1], *given)

    monkeypatch.setattr("autopar.planner.build.within_budget", recorded)
    model, sample = Layers(8, 256), {"x": torch.randn(1024, 256)}
    pinned: dict[str, Any] = {"mesh": {"pp": 2}, "microbatches": 8, "budget_bytes": 4_400_000, "recompute": "none"}
    job = compile_shared(model, 2, sample=sample, cluster=FAST, offload=("activations",), **pinned)
    assert any(0 < stage.offloads < EIGHTHS for stage in job.plan.stage_plans)
    assert any(spared)
    again = compile_shared(model, 2, sample=sample, plan=autopar.Plan.from_json(job.plan.to_json()))
    assert again.job.schedule == job.job.schedule
    measured = again.memory(sample, measure="simulate").measured
    assert max(rank.peak_bytes for rank in measured) <= 4_400_000


@dataclass(frozen=True)
class Lacking:
    """A pipeline with one byte too many, until so many bytes are spared that a cut is another one."""

    spared: int = 0
    budget_bytes: int = 512 * 100
    least: int = 150

    def sparing(self, bytes_: int) -> Lacking:
        return replace(self, spared=bytes_)

    @property
    def timeline(self) -> SimpleNamespace:
        return SimpleNamespace(peak_activation_bytes=[self.free_bytes[0] + (self.spared < self.least)])

    @property
    def free_bytes(self) -> list[int]:
        return [1000]


@pytest.mark.parametrize(("least", "spared"), [(0, 0), (1, 100), (150, 200), (500, 500), (501, 0)])
def test_room_is_made_until_what_is_kept_fits(monkeypatch: pytest.MonkeyPatch, least: int, spared: int) -> None:
    """In steps of a 512th of the budget, though a byte is all that is lacking; for nothing after five of them."""
    monkeypatch.setattr(pipeline, "_fit", lambda parts, *_: parts)
    monkeypatch.setattr(pipeline, "_made", lambda parts, draft, found, schedule_for: found)
    monkeypatch.setattr(pipeline, "_run", lambda parts, made: made)
    draft = lower(generate("1f1b", 1, 1))
    found = pipeline._roomy(cast(Any, Lacking(least=least)), draft, cast(Any, None))
    assert cast(Any, found).spared == spared
