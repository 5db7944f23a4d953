"""How plans differ: in groups for people, by path for machines, and never nothing where something is other."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import autopar
from autopar.plan import Plan
from tests.fast_cluster import FAST
from tests.models import make
from tests.pinned import PINNED


def planned(**options: Any) -> Plan:
    case = make("mlp", 8)
    pinned = {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2, "cluster": FAST, "chunks": 1, **PINNED, **options}
    return autopar.plan(case.model, 4, sample=case.batch, loss=case.loss, **pinned)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def group(text: str, name: str) -> list[str]:
    """The lines of one group."""
    (found,) = (part.splitlines()[1:] for part in text.split("\n\n") if part.startswith(f"[{name}]"))
    return found


def test_groups_say_what_a_person_asks_first(plan: Plan) -> None:
    text = plan.diff(planned(mesh={"pp": 2, "dp": 2}, microbatches=4, schedule="gpipe", recompute="full", zero=1))
    assert group(text, "degrees") == ["dp: 1 -> 2", "tp: 2 -> 1", "microbatches: 2 -> 4"]
    assert "schedule: 1f1b -> gpipe" in group(text, "schedule")
    assert group(text, "options") == ["zero: 0 -> 1", "recompute: auto -> full"]
    assert any(line.startswith("stage 0 recomputes in: 0 of ") for line in group(text, "recomputation"))
    assert "layers.0 … layers.3 (4) up.weight: S(0)@tp -> whole" in group(text, "placements")
    sent = next(line for line in group(text, "placements") if line.startswith("layers.0 … layers.3 (4) sends forward"))
    assert "@tp" in sent.partition(" -> ")[0]
    assert "@dp" in sent.partition(" -> ")[2]
    step = next(line for line in group(text, "predicted") if line.startswith("step: "))
    assert step.endswith(" %)")
    assert any(line.startswith("peak memory of pipeline rank 0: ") for line in group(text, "predicted"))
    assert any(line.startswith("backward: ") and line.endswith(" %)") for line in group(text, "predicted"))
    assert "collectives dp all_gather: 0 s -> " in text, "a part that only one has"


def test_what_lives_on_the_host_is_said_before_what_it_takes(plan: Plan) -> None:
    first, second = plan.stage_plans
    stages = [first.model_copy(update={"offloads": 3}), second.model_copy(update={"offloads": 8})]
    ranks = [rank.model_copy(update={"host_bytes": 2**20}) for rank in plan.rank_plans]
    text = plan.diff(plan.model_copy(update={"stage_plans": stages, "rank_plans": ranks}))
    assert text.startswith("[the host]")
    assert group(text, "the host") == [
        "stage 0 has its activations: on the device -> 3 of 8 to the host",
        "stage 1 has its activations: on the device -> to the host",
    ]
    assert group(text, "predicted") == [f"host memory of pipeline rank {rank}: 0 B -> 1 MiB" for rank in range(2)]


def test_a_long_rest_is_cut_short(plan: Plan) -> None:
    """All of it is in the JSON."""
    other = plan.model_copy(
        update={
            "blocks": [
                block.model_copy(update={"nodes": [n.model_copy(update={"source": "x.py:1"}) for n in block.nodes]})
                for block in plan.blocks
            ]
        }
    )
    found = plan.differences(other)
    lines = group(str(found), "everything else")
    assert len(lines) == 24 + 1
    assert lines[-1] == f"… and {len(found.to_json()) - 24} more values (--json has them by path)"


def test_equal_plans_differ_in_nothing(plan: Plan) -> None:
    assert plan.diff(planned()) == ""
    assert not plan.differences(planned())


@pytest.mark.parametrize(
    ("part", "changes", "line"),
    [
        ("stage_plans", {"parameter_bytes": 1}, "stage_plans[0].parameter_bytes: {parameter_bytes} -> 1"),
        ("rank_plans", {"vocabulary_bytes": 7}, "rank_plans[0].vocabulary_bytes: 0 -> 7"),
        ("stage_plans", {"forward_seconds": 0.5}, "stage_plans[0].forward_seconds: {forward_seconds} -> 0.5"),
    ],
)
def test_whatever_else_differs_is_named_by_its_path(plan: Plan, part: str, changes: dict[str, Any], line: str) -> None:
    first, *rest = getattr(plan, part)
    other = plan.model_copy(update={part: [first.model_copy(update=changes), *rest]})
    assert group(plan.diff(other), "everything else") == [line.format(**first.model_dump())]
    (found,) = plan.differences(other).to_json()
    assert json.loads(json.dumps(found))["after"] == next(iter(changes.values()))


def test_figures_of_a_cluster_that_changed_are_named(plan: Plan) -> None:
    slower = dataclasses.replace(FAST.inter_node, bytes_per_second=FAST.inter_node.bytes_per_second / 2)
    other = plan.model_copy(update={"cluster_toml": str(dataclasses.replace(FAST, inter_node=slower))})
    (line,) = group(plan.diff(other), "model and cluster")
    assert line.startswith("inter_node.bytes_per_second: ")
    assert plan.diff(other) == f"[model and cluster]\n{line}"


def test_what_no_plan_recomputes_is_no_difference(plan: Plan) -> None:
    text = plan.diff(planned(mesh={"tp": 4}, recompute="none"))
    assert "[recomputation]" not in text
    assert "[degrees]" in text
