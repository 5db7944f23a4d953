"""What the events of a timeline occupy."""

from __future__ import annotations

from itertools import pairwise

from autopar.report.lanes import described, exchange_events, lane_events
from autopar.schedules import Timeline, parse_action


def test_exchanges_follow_one_another_for_as_long_as_they_take(vocabulary: Timeline) -> None:
    found = exchange_events(vocabulary)
    spans = sorted(found.values())
    assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(spans))
    for action, (start, end) in found.items():
        assert abs(end - start - vocabulary.costs.seconds(0, action)) < 1e-12
        posts = [e.start_seconds for e in vocabulary.events if e.action == action]
        assert start >= max(posts)
    assert len(found) == 5 * vocabulary.schedule.microbatches


def test_without_a_split_vocabulary_nothing_is_exchanged(one_f_one_b: Timeline) -> None:
    assert exchange_events(one_f_one_b) == {}


def test_lanes_hold_what_runs_beside_the_passes(one_f_one_b: Timeline) -> None:
    lanes = lane_events(one_f_one_b)
    found = {lane: [[str(e.action) for e in row] for row in rows] for lane, rows in lanes.items()}
    assert found == {
        "activations": [["SEND_F0@0>1", "SEND_F1@0>1", "SEND_F2@0>1"], []],
        "gradients": [[], ["SEND_B0@1>0", "SEND_B1@1>0", "SEND_B2@1>0"]],
        "reductions": [["REDUCE@0"], ["REDUCE@1"]],
    }


def test_actions_in_words() -> None:
    assert described(parse_action("F3@1")) == "forward of microbatch 3 in stage 1"
    assert described(parse_action("SEND_B2@1>0")) == "send of gradients of microbatch 2 in stage 1, peer rank 0"
    assert described(parse_action("STEP")) == "step"
