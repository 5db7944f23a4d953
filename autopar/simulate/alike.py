"""Which actions of one rank's list take and leave the same bytes: they have the same :class:`Key`.

An action of one kind in one stage takes as much for every microbatch but a few: gradients are new in the first, may
become wider when the second is added, and begin to be summed over ranks with the last backward. (A stage that sends
a single message of gradients in each backward, as of a tiny model, has that much more on the way in its third.) Where
weights are gathered for each pass (:mod:`autopar.runtime.streaming`), a pass begins with what is gathered already, and
ends with what the next pass of its stage begins with: both are in the key, as is whether activations go to the host
meanwhile. A send takes nothing, but lets go of the message before it, whichever that was
(:meth:`autopar.runtime.pipe.Pipe.send`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from autopar.schedules import Action
from autopar.schedules.actions import ABSENT
from autopar.schedules.flow import BACKWARDS, is_send
from autopar.schedules.weight_moves import PASSES, followers

_GATHERS: Final = {"GATHER_F": "F", "GATHER_B": "B"}
STREAMED: Final = frozenset({*PASSES, *_GATHERS})
"""Kinds of actions that gather weights, and free them, where that is done for each pass."""


class Gathered(NamedTuple):
    """What a pass of ``stage`` begins with (``pass_kind``: F or B): left there by the pass before, or on its way."""

    stage: int
    pass_kind: str
    there: bool


Rest = frozenset[Gathered]
"""What is gathered between two actions."""


class Key(NamedTuple):
    """``place``: of its stage among those of its rank; ``microbatch``: that it is like; ``closes``: no backward of its
    stage follows; ``before``: what is gathered when it begins, with places for stages; ``follower``: the kind of the
    next pass, if that is of its stage; ``goes``: what its microbatch keeps in its stage goes to the host; ``drops``: of
    a send, kind and place of the pass that made the message before it."""

    kind: str
    place: int
    microbatch: int
    closes: bool = False
    before: Rest = frozenset()
    follower: str = ""
    goes: bool = False
    drops: tuple[str, int] | None = None


def keys(actions: Sequence[Action], stages: Sequence[int], microbatches: int) -> dict[Action, Key]:
    """Of all ``actions`` of one rank, in order; ``stages`` are its own."""
    following = followers(actions)
    streams = any(action.kind in _GATHERS for action in actions)
    rests = {action: rest for action, rest in resting(actions) if streams and action.kind in STREAMED}
    last = {action.stage: action for action in actions if action.kind in BACKWARDS}
    away = {(action.stage, action.microbatch) for action in actions if action.kind == "OFFLOAD"}
    place = {stage: number for number, stage in enumerate(stages)}
    sends = dropped(actions, stages)

    def key(action: Action) -> Key:
        if action in sends:
            return Key(action.kind, place[action.stage], 0, drops=sends[action])
        follower = following.get(action) if streams else None
        return Key(
            action.kind,
            place.get(action.stage, ABSENT),
            _like(action.microbatch, microbatches),
            action is last.get(action.stage),
            frozenset(item._replace(stage=place[item.stage]) for item in rests.get(action, ())),
            follower.kind if follower else "",
            (action.stage, action.microbatch) in away,
        )

    return {action: key(action) for action in actions}


def dropped(actions: Iterable[Action], stages: Sequence[int]) -> dict[Action, tuple[str, int]]:
    """:attr:`Key.drops` of each send among ``actions``; of the first, there is none before."""
    made = {(a.stage, a.microbatch, "SEND_B"): a.kind for a in actions if a.kind in ("B", "I")}
    found: dict[Action, tuple[str, int]] = {}
    before = "", ABSENT
    for action in filter(is_send, actions):
        found[action] = before
        before = made.get((action.stage, action.microbatch, action.kind), "F"), stages.index(action.stage)
    return found


def stand_ins(actions: Sequence[Action], stages: Sequence[int], microbatches: int) -> dict[Action, Action]:
    """Of each action, in order, the one that takes and leaves as much: of those with its key, the first microbatch's.

    Microbatches 0, 1 and the last stand for themselves."""
    found = keys(actions, stages, microbatches)
    first: dict[Key, Action] = {}
    for action in sorted(actions, key=lambda action: action.microbatch):
        first.setdefault(found[action], action)
    return {action: first[key] for action, key in found.items()}


def resting(actions: Sequence[Action]) -> Iterator[tuple[Action, Rest]]:
    """Each of ``actions``, with what is gathered when it begins."""
    following = followers(actions)
    rest: Rest = frozenset()
    for action in actions:
        yield action, rest
        rest = left(rest, action, following)


def left(rest: Rest, action: Action, following: Mapping[Action, Action | None]) -> Rest:
    """What is gathered after ``action``, which began with ``rest``."""
    if action.kind in _GATHERS:
        return rest | {Gathered(action.stage, _GATHERS[action.kind], there=False)}
    if action.kind not in PASSES:
        return rest
    rest = frozenset(item for item in rest if item.stage != action.stage)
    follower = following[action]
    if follower is None:
        return rest
    return rest | {Gathered(action.stage, "F" if follower.kind == "F" else "B", there=True)}


def _like(microbatch: int, microbatches: int) -> int:
    return microbatch if microbatch == microbatches - 1 else min(microbatch, 2)
