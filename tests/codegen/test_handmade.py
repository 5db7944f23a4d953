"""Collectives, totals, hoisted sums and cuts in the text of a placement written down by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.codegen import EmittedStage, emit
from autopar.mesh import Mesh
from autopar.runtime import Total
from autopar.runtime.load import load_program
from autopar.spmd import R, Type
from tests.codegen.handmade import SEQUENCE_SPLIT, model


def programs(
    stages: Sequence[Sequence[int]] = ((1, 2, 3, 4, 5),), takes: Type = SEQUENCE_SPLIT
) -> tuple[EmittedStage, ...]:
    return emit(model(3, takes), stages, Mesh(pp=len(stages), dp=2, tp=2), microbatches=2, digest="3f9a")


def body(one: EmittedStage, name: str = "Stage") -> list[str]:
    """The lines of a class, without comments."""
    text = one.text[one.text.index(f"class {name}(") :].split("\n\n\n")[0]
    return [line.split("  # ")[0].strip() for line in text.splitlines()]


def test_golden(golden: Callable[[str, str], None]) -> None:
    first, last = programs(((1, 2), (3, 4, 5)))
    golden("codegen/megatron_stage_0_of_2.py.txt", first.text)
    golden("codegen/megatron_stage_1_of_2.py.txt", last.text)


def test_the_text_loads() -> None:
    for one in programs(((1, 2), (3, 4), (5,))):
        assert load_program(one.text, filename="stage.py").program == one.program


def test_sums_of_parameter_gradients_are_left_to_the_step() -> None:
    (one,) = programs()
    assert {p.name: p.reduce for p in one.program.parameters} == {
        "embed.weight": ("dp",),
        **{f"layers.{i}.norm.weight": ("dp", "tp") for i in range(3)},
        **{f"layers.{i}.{n}.weight": ("dp",) for i in range(3) for n in ("up", "down")},
        "head.weight": ("dp",),
    }
    assert {p.name: p.types for p in one.program.parameters if p.types}["layers.1.down.weight"] == {"tp": "S(1)"}
    assert "convert" not in one.text


def test_the_count_of_tokens_is_a_total() -> None:
    (one,) = programs()
    assert one.program.totals == (Total("count", ("dp",)),)
    assert "def totals(self, ids, labels):" in body(one)
    assert "def forward(self, ids, labels, count):" in body(one)
    assert body(one)[body(one).index("def forward(self, ids, labels, count):") :].count("count = ") == 0
    assert one.program.loss_axes == ("dp",)


def test_layers_of_the_same_type_are_a_loop() -> None:
    lines = body(programs()[0])
    at = lines.index("for i in range(0, 3):", lines.index("def forward(self, ids, labels, count):"))
    assert lines[at - 1 : at + 2] == [
        "h = reduce_scatter(h, tp, src=P, dst=S(1))",
        "for i in range(0, 3):",
        "h = self.layers[i](h)",
    ]


def test_a_transition_between_layers_is_inside_of_the_loop() -> None:
    """The first layer takes another transition, so it stands before the loop."""
    lines = body(programs(takes=R)[0])
    at = lines.index("for i in range(1, 3):", lines.index("def forward(self, ids, labels, count):"))
    assert lines[at - 2 : at + 3] == [
        "h = all_reduce(h, tp, src=P, dst=R)",
        "h = self.layers[0](h)",
        "for i in range(1, 3):",
        "h = all_gather(h, tp, src=S(1), dst=R)",
        "h = self.layers[i](h)",
    ]


def test_a_smaller_type_is_made_before_the_cut() -> None:
    first, last = programs(((1,), (2, 3, 4, 5)))
    assert body(first)[-2:] == ["h = reduce_scatter(h, tp, src=P, dst=S(1))", "return (h,)"]
    assert first.program.sends == last.program.receives
    assert first.program.sends[0].shape == (2, 8, 32)
    assert "reduce_scatter" not in "\n".join(body(last))


def test_a_larger_type_is_made_behind_the_cut() -> None:
    first, last = programs(((1, 2), (3, 4, 5)), takes=R)
    assert first.program.sends[0].shape == last.program.receives[0].shape == (2, 8, 32)
    lines = body(last)
    at = lines.index("for i in range(1, 3):", lines.index("def forward(self, h, labels, count):"))
    assert lines[at : at + 3] == [
        "for i in range(1, 3):",
        "h = all_gather(h, tp, src=S(1), dst=R)",
        "h = self.layers[i](h)",
    ]


def test_random_ops_draw_apart_where_their_value_is_split() -> None:
    assert 'with rng(self.axes, 0, ("dp", "tp")):' in body(programs()[0], "Layer")


def test_collectives_say_what_they_move() -> None:
    (one,) = programs()
    assert "# 4.0 KiB · backward: reduce-scatter" in one.text
    assert "f32[2, 16, 32] S(0)@dp S(2)@tp   model.py:11" in one.text
