"""What travels in one message. tests/audit has that programs do it so."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.planner.packing import Sent, Weight, alone, gathers, places, sums, units_of
from autopar.schedules.weight_moves import MESSAGES

LINE: Any = object()
SMALL = 100


def weight(name: str, unit: int = 1, bytes_: int = SMALL, **changes: Any) -> Weight:
    """Without padding unless ``gathered`` is more."""
    return Weight(name, unit, **{"as_used": bytes_, "gathered": bytes_, "line": LINE, "shards": RANKS} | changes)


def gradient(name: str, *given: Any, like: object = LINE, in_pass: bool = True, **changes: Any) -> Sent:
    """In bf16, sent in float32."""
    made = weight(name, *given, **changes)
    return Sent(made, 2 * made.gathered, made.shards, like, in_pass=in_pass)


def names(messages: Sequence[Any]) -> list[str]:
    return sorted("+".join(sorted(weight.name for weight in message.weights)) for message in messages)


def summed(gradients: Sequence[Sent]) -> list[str]:
    """In the order in which messages start."""
    return ["+".join(each.weight.name for each in message) for message in sums(gradients)]


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
    found = summed([gradient(w.name, bytes_=w.as_used, shards=ranks) for w in weights])
    assert found == [*reversed(large.split("+")), "+".join(reversed(small.split("+")))]


def test_a_step_gathers_layers_together_but_not_all_of_them() -> None:
    """A layer of 16 has a sixteenth of the stage; a message is full with an eighth."""
    layers = [weight(f"{unit}{name}", unit, 2**20, shards=1024) for unit in range(16) for name in "ab"]
    found = list(gathers(layers, once=True))
    assert [len(message.weights) for message in found] == [4] * 8
    assert places(found) == 8
    assert places(gathers(layers)) == 16
    assert places([]) == 1


def test_gradients_of_a_unit_are_scattered_in_buckets() -> None:
    """A large one alone, unless it is padded: then a copy is sent, with others; full buckets are sent at once. Weights
    of several stages go last, by their names."""
    given = [
        gradient("u", tied=True),
        gradient("a"),
        gradient("b"),
        gradient("padded", bytes_=LARGE, gathered=LARGE + 2),
        gradient("c", unit=2, like=object()),
        gradient("d", unit=2),
        gradient("alone", unit=2, bytes_=LARGE),
        gradient("own", unit=2, like=None),
        gradient("t", unit=2, tied=True),
    ]
    assert summed(given) == ["alone", "d", "c", "padded+b+a", "t+u"]
    full = [gradient(f"{i}", bytes_=MESSAGES.bucket_bytes // 2, gathered=MESSAGES.bucket_bytes) for i in range(5)]
    assert summed(full) == ["4+3", "2+1", "0"]


def test_what_is_sent_once_a_step_is_put_together_over_units() -> None:
    """And ends after what is sent in each backward."""
    given = [gradient("a"), *(gradient(f"once {unit}", unit, in_pass=False) for unit in (1, 2)), gradient("b", unit=2)]
    assert summed(given) == ["b", "a", "once 2+once 1"]


def test_sums_of_a_step_are_as_many_as_a_stage_has_at_least() -> None:
    """Each gradient a sixteenth of all; of those that travel alone, or in pairs, none is packed twice."""
    for count, wanted in ((16, 0), (8, 8)):
        once = [gradient(f"{i}", i, 2**24, shards=1024, in_pass=False) for i in range(count)]
        assert len(alone(sums(once))) == wanted
        assert len(sums(once)) == 8
