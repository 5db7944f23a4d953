"""How many rows tokens are that go once to each node, against counting every choice there is."""

from __future__ import annotations

from itertools import combinations

import pytest

from autopar.node_rows import node_rows


@pytest.mark.parametrize(("experts", "choices", "nodes"), [(8, 1, 2), (8, 2, 4), (8, 3, 2), (12, 4, 3), (6, 5, 6)])
def test_over_all_choices_it_is_the_mean(experts: int, choices: int, nodes: int) -> None:
    every = list(combinations(range(experts), choices))
    reached = sum(len({expert // (experts // nodes) for expert in taken}) for taken in every)
    found = node_rows(len(every), choices, experts, experts, nodes, nodes)
    assert found.sent == found.got == reached
    assert found.slots == found.passed == choices * len(every)


def test_of_some_of_the_experts() -> None:
    """Ranks that have the same tokens take those of a half of the experts each."""
    every = list(combinations(range(8), 2))
    reached = sum(len({expert // 2 for expert in taken if expert < 4}) for taken in every)
    found = node_rows(len(every), 2, 8, 4, 2, 4)
    assert found.sent == reached
    assert found.slots == sum(expert < 4 for taken in every for expert in taken)


def test_a_rank_that_is_a_node_has_more_rows_to_pass_on_if_its_experts_have() -> None:
    alone, among = (node_rows(1000, 2, 8, 8, 4, ranks, imbalance=1.5) for ranks in (4, 8))
    assert (alone.got, alone.passed) == (-(-3 * alone.sent // 2), 3000)
    assert (among.got, among.passed) == (among.sent, among.slots)


def test_never_more_than_slots() -> None:
    assert node_rows(3, 1, 12, 12, 4, 8).sent == 3
    assert node_rows(2, 8, 4, 4, 2, 2).sent == 4  # of four experts a token can't take eight
