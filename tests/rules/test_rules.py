"""Every rule proves itself: each legal choice of each example equals the whole op, value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from autopar import rules
from autopar.graph import Meta, aten_overload, op_name
from autopar.rules import RANDOM, RULES, has_rule, lookup
from autopar.rules.base import Op, Whole
from autopar.rules.moves import Moves
from autopar.rules.transitions import RULES as TRANSITIONS
from autopar.spmd import S, Type, divides
from tests.rules import examples, examples_layers, examples_more
from tests.rules.harness import Example, Step, choices_of, prove

Family = Callable[[], Iterator[Example]]

FAMILIES: tuple[Family, ...] = (
    *(examples.unary, examples.binary, examples.arithmetic, examples.casts),
    *(examples.products, examples.einsums, examples.convolutions),
    *(examples.reshapes, examples.orders, examples.cuts, examples.reductions, examples.norms),
    *(examples_more.lookups, examples_more.places, examples_more.attentions, examples_more.losses),
    *(examples_layers.pools, examples_layers.resolutions, examples_layers.shuffles, examples_layers.samples),
    *(examples_layers.instances, examples_layers.transposed, examples_layers.recurrent, examples_layers.row_losses),
    *(examples_layers.distances, examples_layers.along_dims, examples_layers.matrices, examples_layers.further),
    examples_layers.batches,
    *(examples_more.padded_losses, examples_more.chunked_losses, examples_more.made, examples_more.drawn),
)
ELSEWHERE = {
    *(*TRANSITIONS, "getitem", "embedding_sharded", "cross_entropy_sharded", "mean_of_whole"),
    *("attention_with_offset", "ring_attention", "cumsum_sharded", "averaged", "masked_scatter_rows"),
    *("route", "dispatch", "dispatch_start", "grouped_linear", "grouped_bias", "combine"),
}
"""Ops of solved graphs (tests/rules/test_axes.py and test_outputs.py), of experts (test_experts.py), and of rows that
have their own (tests/passes/test_paired_rows.py)."""

WHOLE = {
    *("aten.any.default", "aten.all.default", "aten.max.default", "aten.min.default"),
    *("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.linspace.default"),
    *("aten.eye.default", "aten.eye.m", "aten.scalar_tensor.default"),
}


def every_example() -> Iterator[Example]:
    for family in FAMILIES:
        yield from family()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize("size", [2, 4])
def test_every_choice_equals_the_whole_op(family: Family, size: int) -> None:
    wrong = []
    for example in family():
        for choice in choices_of(example.node, size):
            try:
                prove(example, Step("tp", size, choice))
            except (AssertionError, RuntimeError, IndexError) as error:
                wrong.append(f"{example} {choice}: {error}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def test_every_rule_has_an_example() -> None:
    assert set(RULES) - {op_name(example.node) for example in every_example()} == ELSEWHERE


def test_no_op_is_in_two_families() -> None:
    modules = [import_module(f"autopar.rules.{path.stem}") for path in Path(rules.__path__[0]).glob("[a-z]*.py")]
    families = {id(m.RULES): m.RULES for m in modules if "RULES" in vars(m)}.values()
    assert sum(map(len, families)) == len(RULES)


def test_every_rule_splits_something() -> None:
    """A line that fits nothing would pass every other test."""
    splitting = {
        op_name(example.node)
        for example in every_example()
        for choice in choices_of(example.node, 2)
        if any(kind.kind in "SP" for kind in (*choice.operands, choice.result))
    }
    assert set(RULES) - splitting - ELSEWHERE == WHOLE


def test_names_are_those_of_overloads() -> None:
    missing = [name for name in RULES if name.startswith("aten.") and aten_overload(name) is None]
    assert missing == []


def test_an_op_without_a_rule_runs_whole() -> None:
    assert not has_rule("aten.item.default")
    assert lookup("aten.item.default") == Whole()
    assert has_rule("aten.mm.default")


def test_random_ops_are_those_torch_marks() -> None:
    marked = {
        name
        for name in RULES
        if name.startswith("aten.")
        if torch.Tag.nondeterministic_seeded in aten_overload(name).tags  # type: ignore[union-attr]
    }
    assert set(RANDOM) == marked


def test_moves_go_back_where_they_came_from() -> None:
    for example in every_example():
        op, rule = Op.of(example.node), lookup(op_name(example.node))
        if not isinstance(rule, Moves):
            continue
        for shard in shards_of(op.operands[0]):
            target = rule.forward(op, 0, shard)
            if target is not None and divides(op.result.shape, target, 2):
                assert (rule.backward(op, target) or (shard,))[0] == shard, str(example)


def shards_of(meta: Meta) -> list[Type]:
    kinds = [S(d, outer) for d in range(len(meta.shape)) for outer in (1, 2, 3, 4)]
    return [kind for kind in kinds if divides(meta.shape, kind, 2)]
