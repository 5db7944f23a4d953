"""Which actions of ranks' lists take and leave the same bytes: they have the same :class:`Key`.

An action of one kind in one stage takes as much for every microbatch but a few: gradients are new in the first, may
become wider when the second is added, and begin to be summed over ranks with the last backward. Where weights are
gathered for each pass (:mod:`autopar.runtime.streaming`), a pass begins with what is gathered already, and ends with
what the next pass of its stage begins with: both are in the key, as is whether activations go to the host meanwhile.
Where a rank has several stages whose gradients are scattered in every backward, a backward waits for the messages of
those before it, of whichever stage they were (:class:`autopar.runtime.grads.Reducer`). Where a backward is in two
parts, what each takes depends on which part came before it.

Stages have the same name (a number) where their code is the same, on one rank or on several
(:mod:`autopar.simulate.likeness`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from autopar.schedules import Action
from autopar.schedules.actions import ABSENT
from autopar.schedules.flow import BACKWARDS
from autopar.schedules.turns import backwards_before
from autopar.schedules.weight_moves import PASSES, followers, scatters

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

Names = Mapping[int, int]
"""Of the stages of a rank."""

Place = tuple[int, int]
"""A stage and a microbatch."""

_PARTS: Final = ("I", "W")

_OWN: Final = -1  # the stage of an action itself, beside names of others


class Key(NamedTuple):
    """``name``: of its stage, or a negative number where what it takes is said of its rank alone; ``microbatch``: that
    it is like; ``closes``: no backward of its stage follows; ``before``: what is gathered when it begins, of stages
    with these names, and how often; ``follower``: the kind of the next pass, if that is of its stage; ``goes``: which
    stages have what they keep of its microbatch go to the host: its own, or for a pass that is no stage's any of the
    rank's; ``after``: names of the stages whose gradients may be under way when it begins, and whether these were
    reduced since; ``again``: of a part of a backward, whether the one of its stage before it was of the same kind."""

    kind: str
    name: int
    microbatch: int
    closes: bool = False
    before: frozenset[tuple[Gathered, int]] = frozenset()
    follower: str = ""
    goes: tuple[int, ...] = ()
    after: tuple[tuple[int, bool], ...] = ()
    again: bool = False

    @property
    def is_of_rank(self) -> bool:
        """Whether it says nothing of others: what is done once a step, or with the first microbatch, finds what was
        done just before for other stages."""
        return self.name < 0


def keys(
    actions: Sequence[Action], names: Names, microbatches: int, sending: Collection[int] = ()
) -> dict[Action, Key]:
    """Of all ``actions`` of one rank, in order, whose stages have these ``names``; of several stages, those that are
    ``sending`` gradients in every backward."""
    following = followers(actions)
    streams = any(action.kind in _GATHERS for action in actions)
    rests = {action: rest for action, rest in resting(actions) if streams and action.kind in STREAMED}
    last = {action.stage: action for action in actions if action.kind in BACKWARDS}
    away, repeats = _away(actions, names), again(actions)
    sent = after(actions, names, sending)
    place = {stage: ABSENT - 1 - number for number, stage in enumerate(names)}

    def named(stage: int, action: Action) -> int:
        return _OWN if stage == action.stage else names[stage]

    def key(action: Action) -> Key:
        follower = following.get(action) if streams else None
        before = Counter(item._replace(stage=named(item.stage, action)) for item in rests.get(action, ()))
        like = _like(action.microbatch, microbatches)
        return Key(
            action.kind,
            (names if like > 0 else place).get(action.stage, ABSENT),
            like,
            action is last.get(action.stage),
            frozenset(before.items()),
            follower.kind if follower else "",
            away[action.stage, action.microbatch],
            after=sent.get(action, ()),
            again=action in repeats,
        )

    return {action: key(action) for action in actions}


def again(actions: Iterable[Action]) -> set[Action]:
    """:attr:`Key.again` is true of these."""
    return {action for action, other in parts_before(actions) if other is not None and other.kind == action.kind}


def parts_before(actions: Iterable[Action]) -> Iterator[tuple[Action, Action | None]]:
    """Each part of a backward, with the one of its stage before it. An input's leaves gradients of small weights, to
    which those after it add, until one of weights takes them."""
    last: dict[int, Action] = {}
    for action in actions:
        if action.kind in _PARTS:
            yield action, last.get(action.stage)
            last[action.stage] = action


def _away(actions: Iterable[Action], names: Names) -> defaultdict[Place, tuple[int, ...]]:
    """:attr:`Key.goes` by place; passes that are no stage's hold on to what stages of the rank keep."""
    places = [(action.stage, action.microbatch) for action in actions if action.kind == "OFFLOAD"]
    found: defaultdict[Place, tuple[int, ...]] = defaultdict(tuple)
    for stage, microbatch in sorted(places):
        found[stage, microbatch] = (_OWN,)
        found[ABSENT, microbatch] += (names[stage],)
    return found


def after(
    actions: Iterable[Action], names: Names, sending: Collection[int]
) -> dict[Action, tuple[tuple[int, bool], ...]]:
    """:attr:`Key.after` of each of ``actions`` that may find messages of gradients under way."""
    reduced: set[int] = set()
    found = {}
    for action, backwards in _under_way(actions, sending):
        stages = [backward.stage for backward in backwards]
        found[action] = tuple((_OWN if s == action.stage else names[s], s in reduced) for s in stages)
        if action.kind == "REDUCE":  # none of its backwards follows
            reduced.add(action.stage)
    return found


def senders(actions: Iterable[Action], wanted: Collection[Action], sending: Collection[int]) -> set[Place]:
    """Those whose gradients are under way when one of the ``wanted`` among ``actions`` begins."""
    before = (backwards for action, backwards in _under_way(actions, sending) if action in wanted)
    return {(backward.stage, backward.microbatch) for backwards in before for backward in backwards}


def _under_way(actions: Iterable[Action], sending: Collection[int]) -> Iterator[tuple[Action, tuple[Action, ...]]]:
    """Each that may find messages of gradients under way, with those that sent the last ones, at least one each."""
    for action, backwards in backwards_before(actions if sending else (), sending):
        if scatters(action) or action.kind == "SCATTER" or action.microbatch == ABSENT:
            yield action, backwards


def stand_ins(found: Mapping[Action, Key]) -> dict[Key, Action]:
    """For each key the action that says what others with it take: the first microbatch's, of the first stage."""
    first: dict[Key, Action] = {}
    for action in sorted(found, key=lambda action: (action.microbatch, action.stage)):
        first.setdefault(found[action], action)
    return first


def enough(
    actions: Sequence[Action], wanted: Iterable[Action], also: Collection[Place] = ()
) -> tuple[list[Action], set[int]]:
    """Those of one rank's ``actions`` that say what the ``wanted`` take, and the stages of which they do.

    A stage that is wanted runs its first two microbatches and its last one, too: they make its gradients what they
    are in the others. Another stage runs its first and last one: then it has gradients in the end. Stages that hand
    over to each other on the rank run the same ones. Those ``also`` run.
    """
    least, most = min(_microbatches(actions), default=0), max(_microbatches(actions), default=0)
    groups, asked = _together(actions), list(wanted)
    run, told = set[Place](), set[int]()
    for group in groups:
        its = {action.microbatch for action in asked if action.stage in group}
        chosen = {least, most} | its | ({least + 1} if its else set())
        chosen |= {number for stage, number in also if stage in group}
        run |= {(stage, microbatch) for stage in group for microbatch in chosen}
        told |= group if its else set()
    return [a for a in actions if a.microbatch == ABSENT or (a.stage, a.microbatch) in run], told


def _microbatches(actions: Iterable[Action]) -> set[int]:
    return {action.microbatch for action in actions} - {ABSENT}


def _together(actions: Iterable[Action]) -> list[set[int]]:
    """Stages, neighbours in one set; all in one if the rank has passes that are no stage's."""
    stages = sorted({action.stage for action in actions if action.microbatch != ABSENT})
    if ABSENT in stages:
        return [set(stages)]
    groups: list[set[int]] = []
    for stage in stages:
        if groups and stage - 1 in groups[-1]:
            groups[-1].add(stage)
        else:
            groups.append({stage})
    return groups


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
