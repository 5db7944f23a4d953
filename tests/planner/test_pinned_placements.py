"""Placements of parameters that a user pins: respected, computed rightly, refused with what would work."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar.command_options import _placements
from autopar.errors import ArgumentError, ShardingError
from autopar.graph import Model, info
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.build import Request, place
from autopar.planner.wanted import Wanted
from tests.fast_cluster import FAST
from tests.models import make
from tests.ranks.test_parity import verification
from tests.shared_captures import graph_of


@cache
def llama() -> Model:
    case = make("llama", 8)
    return graph_of(case.model, case.batch, case.loss)


def stored(placements: dict[str, dict[str, str]], **mesh: int) -> dict[str, dict[str, str]]:
    """By parameter of a layer: its type on each axis."""
    sizes = mesh or {"tp": 2}
    world = Mesh.of(sizes, 2 * len(sizes))
    request = Request(world, 1, FAST, Wanted("1f1b", "redistributed"), Options.of(placements=placements))
    model = place(llama().copy(), request).model
    layer = next(block for block in model.blocks if block.kind == "layer")
    return {info(p).name: {axis: str(kind) for axis, kind in info(p).types().items()} for p in layer.parameters}


def test_a_pinned_type_is_taken_and_the_rest_follows() -> None:
    free = stored({})
    assert free["mlp.down_proj.weight"]["tp"] == "S(1)"
    by_rows = stored({"model.layers.*.mlp.down_proj.weight": {"tp": "S(0)"}})
    assert by_rows["mlp.down_proj.weight"]["tp"] == "S(0)"
    whole = stored({"*.mlp.*.weight": {"tp": "R"}})
    assert {kinds["tp"] for name, kinds in whole.items() if name.startswith("mlp")} == {"I"}
    assert whole["self_attn.q_proj.weight"] == free["self_attn.q_proj.weight"]


def test_only_the_axis_that_is_named() -> None:
    kinds = stored({"*.o_proj.weight": {"tp": "I"}}, dp=2, tp=2)
    assert kinds["self_attn.o_proj.weight"] == {"dp": "I", "tp": "I"}


REFUSED: list[tuple[dict[str, dict[str, str]], type[Exception], str]] = [
    ({"*.down.weight": {"tp": "S(0)"}}, ArgumentError, r"called '\*.down.weight'; there are .*down_proj"),
    ({"*.down_proj.weight": {"pp": "S(0)"}}, ArgumentError, "type on 'pp', .* those are dp, ep, cp, tp"),
    ({"*.down_proj.weight": {"tp": "S0"}}, ArgumentError, "on tp: 'S0' is not an spmd type"),
    ({"*.down_proj.weight": {"tp": "P"}}, ArgumentError, r"pending sum; parameters are I or S\(dim\)"),
    ({"*.down_proj.weight": {"tp": "S(2)"}}, ArgumentError, r"is S\(2\) on tp, but .*down_proj.weight is \[.* 0 to 1"),
    ({"*.down_proj.weight": {"cp": "S(2)"}}, ArgumentError, r"is S\(2\) on cp, but .*down_proj.weight is \[.* 0 to 1"),
    (
        {"*.down_proj.weight": {"dp": "S(0)"}},
        ShardingError,
        r"can't be 'S\(0\)' on dp, of 2 ranks; .* may be 'I'",
    ),
    (
        {"*.mlp.*": {"tp": "I"}, "*.down_proj.weight": {"tp": "S(1)"}},
        ArgumentError,
        r"mlp.down_proj.weight is pinned twice on tp: '\*.mlp.\*' I and '\*.down_proj.weight' S\(1\)",
    ),
    (
        {"model.layers.1.mlp.down_proj.weight": {"tp": "S(0)"}},
        ShardingError,
        r"layers.0.mlp.down_proj.weight free and .*layers.1.mlp.down_proj.weight S\(0\), but both are parameters of",
    ),
]


@pytest.mark.parametrize(("placements", "error", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused(placements: dict[str, dict[str, str]], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        stored(placements, dp=2, tp=2)


def test_options_keep_them_and_the_command_line_reads_them() -> None:
    wanted = {"*.o_proj.weight": {"tp": "S(1)", "dp": "I"}}
    options = Options.of(placements=wanted)
    assert Options.model_validate_json(options.model_dump_json()) == options
    assert _placements(["*.o_proj.weight=tp:S(1)", "*.o_proj.weight=dp:I"]) == wanted
    with pytest.raises(ArgumentError, match="doesn't read as"):
        _placements(["tp:S(1)"])


@pytest.mark.slow
def test_what_is_pinned_computes_the_same() -> None:
    given: dict[str, Any] = {"placements": {"*.mlp.*_proj.weight": {"tp": "S(0)"}, "*.q_proj.weight": {"tp": "I"}}}
    result = verification("llama", {"dp": 2, "tp": 2}, microbatches=2, **given)
    assert result.ok, str(result)
