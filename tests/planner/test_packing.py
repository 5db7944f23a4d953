"""What travels in one message. tests/audit has that programs do it so."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.planner.packing import Weight, gathers, scatters, units_of
from autopar.schedules.weight_moves import BUCKET_BYTES, LARGE_BYTES

LINE: Any = object()
SMALL = 100


def weight(name: str, unit: int = 1, bytes_: int = SMALL, **changes: Any) -> Weight:
    """In bf16, its gradient sent in float32; without padding unless ``gathered`` is more."""
    given = {"as_used": bytes_, "gathered": bytes_, "sent": 2 * bytes_, "line": LINE, "over": LINE} | changes
    return Weight(name, unit, **given)


def names(messages: Sequence[Any]) -> list[str]:
    return sorted("+".join(sorted(weight.name for weight in message.weights)) for message in messages)


def test_layers_and_the_code_between_them_are_units() -> None:
    """Code after a layer without weights is that before it."""
    parameters = [["a"], ["b"], [], ["c"], ["d"], ["e"], [], ["f"]]
    model: Any = SimpleNamespace(calls=[SimpleNamespace(parameters=each) for each in parameters])
    assert list(units_of(model, range(8), own={1, 3, 6}).values()) == [1, 2, 2, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("count", [1, 2])
def test_small_weights_of_a_unit_are_gathered_together(count: int) -> None:
    other: Any = object()
    found = list(
        gathers(
            [
                weight("a"),
                weight("b"),
                weight("c", unit=2),
                weight("d", line=other),
                weight("large", bytes_=LARGE_BYTES),
                weight("padded", bytes_=LARGE_BYTES - 2, gathered=LARGE_BYTES),
                *(weight(f"s{i}", unit=i, spanning=True) for i in range(count)),
                weight("t", tied=True),
                weight("u", tied=True),
            ]
        )
    )
    spanning = "+".join(f"s{i}" for i in range(count))
    assert names(found) == sorted(["a+b", "c", "d", "large", "padded", spanning, "t", "u"])
    assert sum(message.bytes_ for message in found) == (6 + count) * SMALL + 2 * LARGE_BYTES


def test_gradients_of_a_unit_are_scattered_in_buckets() -> None:
    """A large one alone, unless it is padded: then a copy is sent, with others; full buckets are sent at once."""
    found = list(
        scatters(
            [
                weight("a"),
                weight("b"),
                weight("padded", bytes_=LARGE_BYTES, gathered=LARGE_BYTES + 2),
                weight("c", unit=2, over=object()),
                weight("d", unit=2),
                weight("alone", unit=2, bytes_=LARGE_BYTES),
                weight("no terms", unit=2, sent=0),
                weight("t", unit=1, tied=True),
                weight("u", unit=2, tied=True),
            ]
        )
    )
    assert names(found) == sorted(["a+b+padded", "c", "d", "alone", "t+u"])
    full = [weight(f"{i}", bytes_=BUCKET_BYTES // 2, gathered=BUCKET_BYTES) for i in range(5)]
    assert sorted(len(message.weights) for message in scatters(full)) == [1, 2, 2]
