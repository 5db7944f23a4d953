"""Timelines to report on: made by hand, so that they hold whatever the generators do."""

from __future__ import annotations

import pytest

from autopar.schedules import Schedule, Timeline, generate, parse_list
from tests.report.timelines import timeline_of


@pytest.fixture(scope="session")
def one_f_one_b() -> Timeline:
    """Two ranks, three microbatches; one stage per rank."""
    return timeline_of(generate("1f1b", 2, 3))


@pytest.fixture(scope="session")
def v_shaped() -> Timeline:
    """Two ranks with two chunks each, in V placement, the backward split."""
    first = parse_list("F0@0 F1@0 F0@3 I0@3 W0@3 F1@3 I1@3 W1@3 I0@0 W0@0 I1@0 W1@0")
    second = parse_list("F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 I0@1 I1@2 W0@1 W1@2 I1@1 W1@1")
    return timeline_of(Schedule("v", 4, 2, (0, 1, 1, 0), (first, second)))


@pytest.fixture(scope="session")
def vocabulary() -> Timeline:
    """Two ranks, the output layer split by Algorithm 1, the embedding too."""

    def actions(rank: int) -> str:
        forwards = " ".join(f"E{m} F{m}@{rank}" for m in range(2))
        return f"{forwards} S0 T0 S1 T1 " + " ".join(f"B{m}@{rank} G{m}" for m in range(2))

    lists = tuple(parse_list(actions(rank)) for rank in range(2))
    return timeline_of(Schedule("split", 2, 2, (0, 1), lists, "vocab-1", True))


@pytest.fixture(params=["one_f_one_b", "v_shaped", "vocabulary"])
def timeline(request: pytest.FixtureRequest) -> Timeline:
    found: Timeline = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def large() -> Timeline:
    """More boxes than a picture gives details for."""
    return timeline_of(generate("1f1b", 12, 440), reduce_seconds=0)
