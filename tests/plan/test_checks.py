"""A plan that isn't one gets one error, which names the field and what to do."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

import autopar
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.plan.parts import SCHEDULE_NAMES, SYNTHESIZED, VOCABULARY_NAMES
from autopar.planner.modes import MODES
from autopar.schedules.registry import SCHEDULES
from tests.fast_cluster import FAST
from tests.models import make
from tests.pinned import PINNED


@pytest.fixture(scope="module")
def plan() -> Plan:
    case = make("mlp", 8)
    pinned = {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2, "cluster": FAST, "chunks": 1, **PINNED}
    return autopar.plan(case.model, 4, sample=case.batch, loss=case.loss, **pinned)


def changed(plan: Plan, path: str, value: Any) -> str:
    """The plan's JSON with another value at ``path``, and a digest that doesn't give that away."""
    data = json.loads(plan.to_json())
    at: Any = data
    *steps, last = path.split(".")
    for step in steps:
        at = at[int(step) if isinstance(at, list) else step]
    at[int(last) if isinstance(at, list) else last] = value
    content = {name: value for name, value in data.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return json.dumps(content | {"digest": digest})


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("cost.step_seconds", float("nan"), "cost.step_seconds: Input should be a finite number"),
        ("cost.step_seconds", float("inf"), "cost.step_seconds: Input should be a finite number"),
        ("cost.step_seconds", "4.2", r"cost.step_seconds: Input should be a valid number \(it is '4.2'\)"),
        ("cost.step_seconds", 1e3, "cost.parts: what is exposed adds up to .* not to step_seconds, 1000.0"),
        ("cost.parts.0.exposed_seconds", -1.0, "cost.parts.0.exposed_seconds: .* greater than or equal to 0"),
        ("cost.parts.0.name", "coffee", "cost.parts: 'coffee' is unknown; known parts are forward, backward"),
        ("cost.rank", 2, "cost.rank: 2, but there are 2 pipeline ranks"),
        ("cost.bound_seconds", 1e3, "cost.bound_seconds: 1000.0 is above step_seconds"),
        ("mesh_sizes", {"pp": 4, "tp": 1}, "rank_plans: there are 2 for pp 4"),
        ("mesh_sizes", {"pp": 0, "tp": 2}, "mesh axis 'pp' has size 0"),
        ("mesh_sizes", {"pp": 2, "xp": 2}, r"unknown axes \['xp'\]"),
        ("microbatches", 3, "batch_size: 8 doesn't divide into 3 microbatches x dp 1"),
        ("microbatches", True, "microbatches: .* valid integer"),
        ("batch_size", 0, "batch_size: .* greater than or equal to 1"),
        ("chunks", 2, "stage_plans: there are 2 for pp 2 x 2 chunks"),
        ("stage_plans.1.rank", 0, r"rank_plans\[0\].stages: \[0\], but stage_plans put \[0, 1\] there"),
        ("stage_plans.1.rank", 7, r"stage_plans\[1\].rank: 7, but there are 2 pipeline ranks"),
        ("stage_plans.1.last", 0, r"stage_plans\[1\].last: 0 is before its first call"),
        ("stage_plans.0.recompute", [1], r"stage_plans\[0\].recompute: 1 entries for"),
        ("rank_plans.0.peak_bytes", 5, r"rank_plans\[0\].peak_bytes: 5, but its kinds add up to"),
        ("rank_plans.0.kinds", {"saved": -1}, "rank_plans.0.kinds.saved: .* greater than or equal to 0"),
        ("blocks.0.nodes.0.choices", {"xp": "-> R"}, r"blocks\[.*\].nodes\[.*\].choices: axis 'xp' is unknown"),
        ("blocks.0.nodes.0.choices", {"tp": "-> Q"}, r"choices.tp: '-> Q' doesn't read as"),
        ("cluster_toml", "name = 3", "cluster_toml: "),
        ("cluster", "abacus", "cluster: 'abacus', but cluster_toml describes"),
        ("options", {"zero": 7}, "options.zero: .* less than or equal to 3"),
        ("surprise", 1, "surprise: Extra inputs are not permitted"),
        ("schedule", None, "schedule: Input should be a valid string"),
        ("schedule", "bogus", "schedule: 'bogus' is unknown; known names are naive, gpipe, 1f1b"),
        ("vocabulary", "bogus", "vocabulary: 'bogus' is unknown; known names are stage, redistributed"),
    ],
)
def test_a_corrupt_plan_is_refused_by_field(plan: Plan, path: str, value: Any, words: str) -> None:
    with pytest.raises(PlanError, match=rf"^plan is not a valid plan: .*({words}).*; plan again$") as caught:
        Plan.from_json(changed(plan, path, value))
    assert len(str(caught.value).splitlines()) == 1


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^plan is no complete JSON \(.*\); it was cut short or damaged: plan again$"):
        Plan.from_json("[" * 100_000)


def test_an_untouched_plan_reads_back(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(changed(plan, "batch_size", plan.batch_size)) == plan


def test_a_plan_that_is_read_has_the_digest_of_its_content(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    absent = {name: value for name, value in data.items() if name != "digest"}
    for none in (absent, *(data | {"digest": value} for value in ("", None))):
        with pytest.raises(PlanError, match=r"^plan has no digest, so nothing shows whether it was changed"):
            Plan.from_json(json.dumps(none))
    with pytest.raises(PlanError, match=r"it was changed or damaged; plan again$"):
        Plan.from_json(json.dumps(data | {"model_name": "another"}))


def test_names_that_are_known_are_those_there_are() -> None:
    assert set(SCHEDULE_NAMES) == {*SCHEDULES, SYNTHESIZED}
    assert list(VOCABULARY_NAMES) == list(MODES)


def test_recomputation_is_a_choice_that_blocks_offer(plan: Plan) -> None:
    choices = [99] * len(plan.stage_plans[0].units)
    with pytest.raises(PlanError, match=r"stage_plans\[0\].recompute: '.*' takes choice 99 of "):
        Plan.from_json(changed(plan, "stage_plans.0.recompute", choices))


def test_only_units_of_blocks_recompute(plan: Plan) -> None:
    stage = plan.stage_plans[0].model_dump(mode="json")
    units = ["nowhere", *stage["units"][1:]]
    stage |= {"units": units, "recompute": [1] + [0] * (len(units) - 1)}
    with pytest.raises(PlanError, match=r"stage_plans\[0\].recompute: 'nowhere' takes choice 1 of 0"):
        Plan.from_json(changed(plan, "stage_plans.0", stage))


def test_regions_are_of_nodes(plan: Plan) -> None:
    name = plan.blocks[0].nodes[0].name
    way = {"saved": [], "saved_bytes": 0, "seconds": 0.0, "transient_bytes": 0}
    Plan.from_json(changed(plan, "blocks.0.recompute", [{"regions": [[name, name]], **way}]))
    with pytest.raises(PlanError, match=r"blocks\[.*\].recompute\[0\].regions: there is no node 'nowhere'"):
        Plan.from_json(changed(plan, "blocks.0.recompute", [{"regions": [[name, "nowhere"]], **way}]))


def test_messages_go_along_axes(plan: Plan) -> None:
    places = ((b, n) for b, block in enumerate(plan.blocks) for n, node in enumerate(block.nodes) if node.messages)
    block, node = next(places)
    with pytest.raises(PlanError, match=r"messages: axis 'xp' is unknown"):
        Plan.from_json(changed(plan, f"blocks.{block}.nodes.{node}.messages.0.axis", "tp+xp"))


def test_a_search_names_points_of_the_right_size(plan: Plan) -> None:
    point = {"gpus": 8, "mesh_sizes": {"pp": 2, "tp": 2}, "microbatches": 2, "schedule": "1f1b", "chunks": 1}
    point |= {"vocabulary": "stage", "options": {}, "step_seconds": 1.0, "peak_bytes": 1}
    search = {"free": [], "points": 5, "placed": 2, "laid_out": 2, "bound_seconds": 0.0, "runners_up": [point]}
    with pytest.raises(PlanError, match=r"search.runners_up\[0\].mesh_sizes: .* is 4 ranks, but gpus is 8"):
        Plan.from_json(changed(plan, "search", search))
    with pytest.raises(PlanError, match=r"search\.bound_seconds: 1000\.0 is above step_seconds"):
        Plan.from_json(changed(plan, "search", search | {"runners_up": [], "bound_seconds": 1e3}))
    with pytest.raises(PlanError, match=r"search\.runners_up\[0\]\.schedule: 'bogus' is unknown"):
        Plan.from_json(changed(plan, "search", search | {"runners_up": [point | {"schedule": "bogus"}]}))
    with pytest.raises(PlanError, match=r"search\.placed: .* greater than or equal to 0"):
        Plan.from_json(changed(plan, "search", search | {"runners_up": [], "placed": -1}))


def test_experts_are_an_order_of_their_number(plan: Plan) -> None:
    row = {"layer": "moe", "experts": 4, "choices": 2, "axes": ["ep"], "ranks": 2, "imbalance": 1.0, "bound": 1.0}
    row |= {"order": [], "whole": [], "nodes": 1, "sent_bytes": 0, "across_bytes": 0}
    for changes, words in (
        ({"order": [0, 1, 2, 2]}, "order: isn't an order of 4 experts"),
        ({"ranks": 3}, "ranks: 3 don't divide 4 experts"),
        ({"choices": 5}, "choices: a token takes 5 of 4"),
        ({"axes": ["xp"]}, "axes: axis 'xp' is unknown"),
        ({"nodes": 3}, "nodes: 3 don't divide the 2 ranks"),
        ({"across_bytes": 1}, "across_bytes: 1 are more than all of sent_bytes, 0"),
        ({"imbalance": 0.5}, "imbalance: .* greater than or equal to 1"),
    ):
        with pytest.raises(PlanError, match=words):
            Plan.from_json(changed(plan, "experts", [row | changes]))
    assert Plan.from_json(changed(plan, "experts", [row])).experts[0].experts == 4
