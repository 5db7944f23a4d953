"""Which action needs which: the tables of what flows between actions, and what they mean on given ranks.

Lowering, checking, running and costing all read :data:`FLOWS` and :mod:`autopar.schedules.exchanges`, so they
can't disagree on what a message is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple

from autopar.schedules.actions import ABSENT, KINDS, Action, Schedule, make
from autopar.schedules.exchanges import HEAD_PASSES, exchanges, passes


@dataclass(frozen=True)
class Flow:
    """What ``source`` makes in stage s, ``target`` uses for the same microbatch in stage s + ``offset``.

    Between ranks ``send`` and ``receive`` carry it; empty where it never leaves the stage. ``B`` is the pass that
    makes the gradient of a stage's input: ``I`` where the backward is split.
    """

    source: str
    target: str
    offset: int
    send: str = ""
    receive: str = ""


FLOWS: Final = (
    Flow("F", "F", +1, "SEND_F", "RECV_F"),  # activations to the next stage
    Flow("F", "B", 0),  # activations kept for the backward
    Flow("B", "B", -1, "SEND_B", "RECV_B"),  # gradients to the stage before
    Flow("B", "W", 0),  # what the gradients of weights are made from
    Flow("B", "UPDATE", 0),
)
STAGE_KINDS: Final = ("F", "B", "I", "W", "UPDATE")
VOCABULARY_KINDS: Final = ("E", "G", "S", "U", "T")
COMPUTE: Final = (*STAGE_KINDS, *VOCABULARY_KINDS)
"""What a generator writes; everything else comes from :func:`autopar.schedules.lower`."""

EXCHANGES: Final = ("SUM_E", "CAST_E", "CAST_X", "MAX", "STATS", "SUM_X")
BACKWARDS: Final = ("B", "I", "W")
_ROLE: Final = {"I": "B"}
_INTO: Final = {kind: [flow for flow in FLOWS if flow.target == kind] for kind in STAGE_KINDS}
_SENT: Final = {kind: [flow for flow in FLOWS if flow.source == kind and flow.send] for kind in STAGE_KINDS}
_CARRIES: Final = {name: flow for flow in FLOWS for name in (flow.send, flow.receive) if name}


SENDS: Final = tuple(flow.send for flow in FLOWS if flow.send)
RECEIVES: Final = tuple(flow.receive for flow in FLOWS if flow.receive)


class Channel(NamedTuple):
    """An ordered stream of messages from one pipeline rank to another, carried by sends of one kind."""

    source: int
    destination: int
    send: str


def is_send(action: Action) -> bool:
    return KINDS[action.kind].arrow == ">"


def is_receive(action: Action) -> bool:
    return KINDS[action.kind].arrow == "<"


def is_exchange(action: Action) -> bool:
    return action.kind in EXCHANGES


def channel(rank: int, action: Action) -> Channel:
    """The channel of a send or receive on ``rank``'s list."""
    send = _CARRIES[action.kind].send
    return Channel(rank, action.peer, send) if is_send(action) else Channel(action.peer, rank, send)


def counterpart(rank: int, action: Action) -> Action:
    """What the peer of a send or receive on ``rank``'s list does at the other end of the message."""
    flow = _CARRIES[action.kind]
    if is_send(action):
        return make((flow.receive, action.microbatch, action.stage + flow.offset, rank))
    return make((flow.send, action.microbatch, action.stage - flow.offset, rank))


def pass_of(schedule: Schedule, role: str, microbatch: int, stage: int) -> Action:
    """The action that plays ``role`` there: ``B`` is ``I`` where the backward is split."""
    split = role == "B" and (microbatch, stage) in schedule.split
    return make(("I" if split else role, microbatch, stage, ABSENT))


def needs(schedule: Schedule, action: Action, rank: int) -> Iterator[Action]:
    """What must come before a compute action or exchange on ``rank``: passes, receives and exchanges.

    An exchange among them has to be complete: every rank must have posted it.
    """
    if action.kind in STAGE_KINDS:
        yield from _flows_into(schedule, action, rank)
    if not schedule.head:
        return
    if action.kind in HEAD_PASSES[schedule.head]:
        for before, after in pairwise(HEAD_PASSES[schedule.head]):
            if after == action.kind:
                yield Action(before, action.microbatch)
    yield from exchanged(schedule, action)
    if is_exchange(action):
        yield from _contributes(schedule, action, rank)


def _flows_into(schedule: Schedule, action: Action, rank: int) -> Iterator[Action]:
    for flow in _INTO[_ROLE.get(action.kind, action.kind)]:
        stage = action.stage - flow.offset
        if not 0 <= stage < schedule.stages:
            continue
        if schedule.placement[stage] == rank:
            yield pass_of(schedule, flow.source, action.microbatch, stage)
        else:
            yield make((flow.receive, action.microbatch, action.stage, schedule.placement[stage]))


def exchanged(schedule: Schedule, action: Action) -> Iterator[Action]:
    """The exchanges whose result ``action`` uses."""
    if not schedule.head:
        return
    for kind, at in _into(schedule.head, schedule.embedding).get(_ROLE.get(action.kind, action.kind), ()):
        if not at or action.stage == _stage(schedule, at):
            yield Action(kind, action.microbatch)


@cache
def _into(head: str, embedding: bool) -> dict[str, tuple[tuple[str, str], ...]]:
    """Target of exchanges -> (kind, where the target is) of each."""
    found = exchanges(head, embedding)
    return {
        e.target: tuple((other.kind, other.target_at) for other in found if other.target == e.target) for e in found
    }


def _contributes(schedule: Schedule, action: Action, rank: int) -> Iterator[Action]:
    """The pass whose result ``rank`` brings into an exchange."""
    for source, at in _out_of(schedule.head, schedule.embedding)[action.kind]:
        if not at:
            yield Action(source, action.microbatch)
        elif schedule.placement[_stage(schedule, at)] == rank:
            yield pass_of(schedule, source, action.microbatch, _stage(schedule, at))


@cache
def _out_of(head: str, embedding: bool) -> dict[str, list[tuple[str, str]]]:
    """Kind of exchange -> (source, where the source is) of each of its parts."""
    found = exchanges(head, embedding)
    return {e.kind: sorted({(other.source, other.source_at) for other in found if other.kind == e.kind}) for e in found}


def _stage(schedule: Schedule, at: str) -> int:
    return 0 if at == "first" else schedule.stages - 1


def sends(schedule: Schedule, action: Action) -> Iterator[Action]:
    """The sends that carry what a compute action makes to other ranks."""
    if action.kind not in STAGE_KINDS:
        return
    rank = schedule.placement[action.stage]
    for flow in _SENT[_ROLE.get(action.kind, action.kind)]:
        stage = action.stage + flow.offset
        if 0 <= stage < schedule.stages and schedule.placement[stage] != rank:
            yield make((flow.send, action.microbatch, action.stage, schedule.placement[stage]))


class Wire(NamedTuple):
    """How a pass is tied to another rank: by which kinds of action, and the other pass's stage and rank."""

    send: str
    receive: str
    stage: int
    rank: int


Wires = dict[tuple[str, int], Wire]


def wires(schedule: Schedule) -> tuple[Wires, Wires]:
    """By kind and stage of a pass: what it receives, and what it sends. Passes without have no entry."""
    into, out = Wires(), Wires()
    for stage, rank in enumerate(schedule.placement):
        for kind in STAGE_KINDS:
            for table, flows, way in ((into, _INTO, -1), (out, _SENT, 1)):
                for flow in flows[_ROLE.get(kind, kind)]:
                    other = stage + way * flow.offset
                    if 0 <= other < schedule.stages and schedule.placement[other] != rank:
                        table[kind, stage] = Wire(flow.send, flow.receive, other, schedule.placement[other])
    return into, out


def maker(schedule: Schedule, send: Action) -> Action:
    """The compute action whose result ``send`` carries."""
    return pass_of(schedule, _CARRIES[send.kind].source, send.microbatch, send.stage)


def rank_passes(schedule: Schedule, rank: int) -> Iterator[Action]:
    """All compute actions that ``rank`` must have, as the stages placed there and the split of backwards ask."""
    for stage, home in enumerate(schedule.placement):
        if home != rank:
            continue
        for microbatch in range(schedule.microbatches):
            yield make(("F", microbatch, stage, ABSENT))
            backward = pass_of(schedule, "B", microbatch, stage)
            yield backward
            if backward.kind == "I":
                yield make(("W", microbatch, stage, ABSENT))
            if schedule.is_asynchronous:
                yield make(("UPDATE", microbatch, stage, ABSENT))
    for kind in passes(schedule.head, schedule.embedding):
        for microbatch in range(schedule.microbatches):
            yield Action(kind, microbatch)


def rank_exchanges(schedule: Schedule) -> Iterator[Action]:
    """All exchanges of a step; every rank posts each."""
    kinds: dict[str, None] = dict.fromkeys(e.kind for e in exchanges(schedule.head, schedule.embedding))
    for kind in kinds:
        for microbatch in range(schedule.microbatches):
            yield Action(kind, microbatch)
