"""What a plan says of itself: everything a user asks for, in print, in JSON, and in a narrow terminal."""

from __future__ import annotations

import json
import math
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import autopar
from autopar import storages
from autopar.options import Options
from autopar.plan import Plan, PointPlan, SearchPlan, bytes_text
from autopar.report import print_explanation
from tests.fast_cluster import FAST
from tests.models import llama
from tests.pinned import PINNED

KINDS = [f"{kind}_bytes" for kind in storages.KINDS]


def planned(mesh: dict[str, int], gpus: int, **options: Any) -> Plan:
    case = llama(8, layers=4)
    pinned = {"mesh": mesh, "cluster": FAST, "chunks": 1, **PINNED, **options}
    return autopar.plan(case.model, gpus, sample=case.batch, **pinned)


def point(gpus: int, seconds: float, **changes: Any) -> PointPlan:
    content: dict[str, Any] = {"gpus": gpus, "mesh_sizes": {"pp": 1, "dp": gpus, "tp": 1}, "microbatches": 2}
    content |= {"schedule": "1f1b", "chunks": 1, "vocabulary": "stage", "options": Options()}
    return PointPlan(**content | {"step_seconds": seconds, "peak_bytes": 2**30} | changes)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """As a search leaves it."""
    found = planned({"pp": 2, "dp": 2, "tp": 2}, 8, microbatches=2, recompute="full", zero=1)
    step = found.step_seconds
    search = SearchPlan(
        free=["mesh", "microbatches"],
        points=1234,
        placed=5,
        laid_out=3,
        bound_seconds=0.99 * step,
        runners_up=[point(8, 1.25 * step, why="gradients of 8 copies take 2 ms longer")],
        memory_front=[point(8, 1.5 * step, peak_bytes=2**20)],
        gpus_front=[point(4, 2 * step), point(16, 0.5 * step)],
    )
    return found.model_copy(update={"search": search}).sealed()


def test_the_summary_is_a_screen(plan: Plan) -> None:
    text = plan.summary()
    assert len(text.splitlines()) < 24
    for words in ("pp 2 x dp 2 x tp 2", "step ", "no plan in the searched space is below", "MFU "):
        assert words in text
    assert "(1.0 % gap)" in text
    first, *_, last = sorted(plan.cost.parts, key=lambda part: -part.exposed_seconds)
    assert f"most time of pipeline rank {plan.cost.rank}: {first.name}" in text
    assert first.exposed_seconds > 2 * last.exposed_seconds
    assert "optimizer state stored S(0)@dp over 2 neighbouring ranks" in text


def test_the_fullest_rank_is_named(plan: Plan) -> None:
    """Whichever it is."""
    for full in (0, 1):
        ranks = [
            rank.model_copy(update={"peak_bytes": 2**30 if number == full else 2**20})
            for number, rank in enumerate(plan.rank_plans)
        ]
        text = plan.model_copy(update={"rank_plans": ranks}).summary()
        assert f"peak memory {bytes_text(2**30)}, " in text
        assert f" on pipeline rank {full}" in text


def test_every_section_is_in_print_and_in_json(plan: Plan) -> None:
    shown, text = plan.explanation().to_json(), plan.explain()
    keys = ["degrees", "time", "stages", "memory", "search", "runners_up", "memory_front", "gpus_front"]
    keys += [f"{what} of LlamaDecoderLayer" for what in ("parameters", "activations")]
    assert set(keys) <= set(shown["sections"])
    assert json.loads(json.dumps(shown)) == shown
    for section in shown["sections"].values():
        assert section["title"] in text
        assert all(line in text for line in section["lines"])
    assert shown["summary"] == plan.summary().splitlines()


def test_json_has_raw_values(plan: Plan) -> None:
    sections = plan.explanation().to_json()["sections"]
    *parts, step = sections["time"]["rows"]
    assert step == {"part": "step", "axis": "", "kind": "", "exposed_seconds": plan.step_seconds, "share": 1.0} | {
        "hidden_seconds": None
    }
    assert math.fsum(row["exposed_seconds"] for row in parts) == pytest.approx(plan.step_seconds)
    memory = sections["memory"]["rows"][0]
    assert sum(bytes_ or 0 for name, bytes_ in memory.items() if name in KINDS) == memory["peak_bytes"]
    (runner_up,) = sections["runners_up"]["rows"]
    assert runner_up["change"] == pytest.approx(0.25)
    assert runner_up["why"] == "gradients of 8 copies take 2 ms longer"
    assert [row["gpus"] for row in sections["gpus_front"]["rows"]] == [4, 16]


def test_runners_up_are_compared_with_the_plan(plan: Plan) -> None:
    text = plan.explain()
    row = next(line for line in text[text.index("runners-up") :].splitlines() if "1f1b" in line)
    assert "+25.0 %" in row
    assert "1. dp 8: gradients of 8 copies take 2 ms longer" in text
    assert "+100.0 %" in text
    assert "-50.0 %" in text


def test_layouts_name_the_collective_at_each_change(plan: Plan) -> None:
    sections = plan.explanation().to_json()["sections"]
    parameters = {row["name"]: row for row in sections["parameters of LlamaDecoderLayer"]["rows"]}
    block = next(block for block in plan.blocks if block.name == "LlamaDecoderLayer")
    for node in block.nodes:
        if node.op == "parameter":
            row = parameters[node.source]
            assert row["bytes"] == math.prod(node.shape) * 4
            assert row["types"] == ("whole" if "S" not in node.choices["tp"] else f"{node.choices['tp'][3:]}@tp")
    sent = [row for row in sections["activations of LlamaDecoderLayer"]["rows"] if row["forward"]]
    kinds = {row["forward"].split("@")[0] for row in sent}
    assert kinds
    assert kinds <= {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    changes = [n for n in block.nodes if n.op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")]
    assert len(changes) == len(sent)


def test_tables_of_a_split_vocabulary_say_whose_rows_they_show() -> None:
    """Nothing else is split over the pipeline; each rank's rows are in the table of memory."""
    found = planned({"pp": 2, "dp": 1, "tp": 1}, 2, microbatches=2, vocabulary="vocab-1").explanation()
    shared = "; each of 2 pipeline ranks has a part of the table's rows"
    titled = {section.key for section in found.sections if shared in section.title}
    assert titled == {f"{what} of {block}" for what in ("parameters", "activations") for block in ("embedding", "head")}
    assert shared not in str(planned({"pp": 2, "dp": 1, "tp": 1}, 2, microbatches=2).explain())


def test_recomputation_is_said_by_stage(plan: Plan) -> None:
    lines = plan.explanation().to_json()["sections"]["stages"]["lines"]
    assert [line.split(":")[0].strip() for line in lines] == ["stage 0", "stage 1"]
    assert all(" recompute" in line and " kept instead of " in line for line in lines)


@pytest.mark.parametrize("width", [80, 160])
def test_no_line_is_wider_than_the_terminal(plan: Plan, width: int) -> None:
    file = StringIO()
    print_explanation(Console(width=width, file=file), plan.explanation())
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    memory = text[text.index("peak memory by pipeline rank") : text.index("activations of")]
    for kind in {kind for rank in plan.rank_plans for kind in rank.kinds}:
        assert kind in memory
    for rank in plan.rank_plans:
        assert bytes_text(rank.peak_bytes) in memory
    assert "self_attn.q_proj.weight" in text
    assert "MiB" in text or "KiB" in text
    layer = text[text.index("activations of LlamaDecoderLayer") : text.index("parameters of glue2")]
    assert ("modeling_llama.py" in layer) == (width == 160)
