"""What runs right before and after the passes of a rank's stages, by hand."""

from __future__ import annotations

from autopar.schedules import generate
from autopar.schedules.actions import parse_action
from autopar.schedules.turns import Turns, turns_of


def test_by_hand() -> None:
    """Stages 1 and 5 are numbers 0 and 1; what isn't a pass doesn't count, and messages are W's."""
    texts = "F0@1 F0@5 RECV_B0@5<1 I0@5 F1@1 W0@5 B0@1 B1@1 F1@5"
    assert turns_of(map(parse_action, texts.split())) == [
        Turns(frozenset({(), (1,), (1, 0)}), frozenset({0, 1})),
        Turns(frozenset({(), (0, 0)}), frozenset({0, 1})),
    ]


def test_stages_of_one_rank_go_forth_and_back() -> None:
    (actions,) = generate("interleaved", 1, 1, chunks=3).lists
    assert turns_of(actions) == [
        Turns(frozenset({(), (2, 1)}), frozenset({1})),
        Turns(frozenset({(), (2,)}), frozenset({0, 2})),
        Turns(frozenset({()}), frozenset({1, 2})),
    ]
