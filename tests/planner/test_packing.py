"""What travels in one message. tests/audit has that programs do it so."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.planner.packing import Kind, Weight, alone, gathers, places, scatters, units_of
from autopar.schedules.weight_moves import MESSAGES

LINE: Any = object()
SMALL = 100


def weight(name: str, unit: int = 1, bytes_: int = SMALL, **changes: Any) -> Weight:
    """In bf16, its gradient sent in float32; without padding unless ``gathered`` is more."""
    given = {
        "as_used": bytes_,
        "gathered": bytes_,
        "sent": 2 * bytes_,
        "line": LINE,
        "over": LINE,
        "shards": RANKS,
    } | changes
    return Weight(name, unit, **given)


def names(messages: Sequence[Any]) -> list[str]:
    return sorted("+".join(sorted(weight.name for weight in message.weights)) for message in messages)


def test_layers_and_the_code_between_them_are_units() -> None:
    """Code after a layer without weights is that before it."""
    parameters = [["a"], ["b"], [], ["c"], ["d"], ["e"], [], ["f"]]
    model: Any = SimpleNamespace(calls=[SimpleNamespace(parameters=each) for each in parameters])
    assert list(units_of(model, range(8), own={1, 3, 6}).values()) == [1, 2, 2, 3, 4, 4, 4, 4]


RANKS = 4
LARGE = MESSAGES.large(RANKS)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_small_weights_of_a_unit_are_gathered_together(count: int, once: bool) -> None:
    """Once a step, those of several units are: here all of them, since there are few."""
    other: Any = object()
    found = list(
        gathers(
            [
                weight("a"),
                weight("b"),
                weight("c", unit=2),
                weight("d", line=other),
                weight("large", bytes_=LARGE),
                weight("padded", bytes_=LARGE - 2, gathered=LARGE),
                *(weight(f"s{i}", unit=i, spanning=True) for i in range(0 if once else count)),
                weight("t", tied=True),
                weight("u", tied=True),
                weight("whole", shards=1),
            ],
            once=once,
        )
    )
    spanning = "+".join(f"s{i}" for i in range(count))
    apart = ["a+b+c"] if once else ["a+b", "c", spanning]
    assert names(found) == sorted([*apart, "d", "large", "padded", "t", "u", "whole"])
    assert {m.is_packed for m in found if len(m.weights) > 1} == {True}
    assert not any(m.is_packed for m in found if len(m.weights) == 1)
    assert sum(m.bytes_ for m in found) == (7 + count * (not once)) * SMALL + 2 * LARGE


@pytest.mark.parametrize("ranks", [2, 64, 1024])
def test_what_is_large_depends_on_the_ranks(ranks: int) -> None:
    sizes = [MESSAGES.large(ranks) - 1, MESSAGES.large(ranks)]
    weights = [weight(f"{size}-{i}", bytes_=size, shards=ranks) for size in sizes for i in range(2)]
    small, large = (f"{size}-0+{size}-1" for size in sizes)
    assert names(list(gathers(weights))) == sorted([small, *large.split("+")])
    assert {name for m in scatters(weights) for name in names([m])} == {small, *large.split("+")}


def test_a_step_gathers_layers_together_but_not_all_of_them() -> None:
    """A layer of 16 has a sixteenth of the stage; a message is full with an eighth."""
    layers = [weight(f"{unit}{name}", unit, 2**20, shards=1024) for unit in range(16) for name in "ab"]
    found = list(gathers(layers, once=True))
    assert [len(message.weights) for message in found] == [4] * 8
    assert places(found) == 8
    assert places(gathers(layers)) == 16
    assert places([]) == 1


def test_gradients_of_a_unit_are_scattered_in_buckets() -> None:
    """A large one alone, unless it is padded: then a copy is sent, with others; full buckets are sent at once."""
    found = list(
        scatters(
            [
                weight("a"),
                weight("b"),
                weight("padded", bytes_=LARGE, gathered=LARGE + 2),
                weight("c", unit=2, over=object()),
                weight("d", unit=2),
                weight("alone", unit=2, bytes_=LARGE),
                weight("no terms", unit=2, sent=0),
                weight("t", unit=1, tied=True),
                weight("u", unit=2, tied=True),
            ]
        )
    )
    assert names(found) == sorted(["a+b+padded", "c", "d", "alone", "t+u"])
    full = [weight(f"{i}", bytes_=MESSAGES.bucket_bytes // 2, gathered=MESSAGES.bucket_bytes) for i in range(5)]
    assert sorted(len(message.weights) for message in scatters(full)) == [1, 2, 2]


def test_sums_of_a_step_are_as_many_as_a_stage_has_at_least() -> None:
    """Each gradient a sixteenth of all; of those that travel alone, or in pairs, none is packed twice."""
    kind = Kind(shards=1024, master=torch.float32, ranks=1024)
    for count, wanted in ((16, 0), (8, 8)):
        weights = [weight(f"{i}", i, 2**24, shards=1024) for i in range(count)]
        assert len(alone(weights, {w.name: kind for w in weights}, ())) == wanted
