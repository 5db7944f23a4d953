"""Which action needs which: one table of what flows between actions, and what it means on given ranks.

Lowering, checking and costing all read :data:`FLOWS`, so they can't disagree on what a message is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from autopar.schedules.actions import KINDS, Action, Schedule


@dataclass(frozen=True)
class Flow:
    """What ``source`` makes in stage s, ``target`` uses for the same microbatch in stage s + ``offset``.

    Between ranks ``send`` and ``receive`` carry it; empty where it never leaves the stage.
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
)
COMPUTE: Final = ("F", "B")
_INTO: Final = {kind: [flow for flow in FLOWS if flow.target == kind] for kind in COMPUTE}
_SENT: Final = {kind: [flow for flow in FLOWS if flow.source == kind and flow.send] for kind in COMPUTE}
_CARRIES: Final = {name: flow for flow in FLOWS for name in (flow.send, flow.receive) if name}


class Channel(NamedTuple):
    """An ordered stream of messages from one pipeline rank to another, carried by sends of one kind."""

    source: int
    destination: int
    send: str


def is_send(action: Action) -> bool:
    return KINDS[action.kind].arrow == ">"


def is_receive(action: Action) -> bool:
    return KINDS[action.kind].arrow == "<"


def channel(rank: int, action: Action) -> Channel:
    """The channel of a send or receive on ``rank``'s list."""
    send = _CARRIES[action.kind].send
    return Channel(rank, action.peer, send) if is_send(action) else Channel(action.peer, rank, send)


def counterpart(rank: int, action: Action) -> Action:
    """What the peer of a send or receive on ``rank``'s list does at the other end of the message."""
    flow = _CARRIES[action.kind]
    if is_send(action):
        return Action(flow.receive, action.microbatch, action.stage + flow.offset, rank)
    return Action(flow.send, action.microbatch, action.stage - flow.offset, rank)


def needs(schedule: Schedule, action: Action) -> Iterator[Action]:
    """What must come before a compute action on its rank: what makes its operands there, or receives them."""
    rank = schedule.placement[action.stage]
    for flow in _INTO[action.kind]:
        stage = action.stage - flow.offset
        if not 0 <= stage < schedule.stages:
            continue
        if schedule.placement[stage] == rank:
            yield Action(flow.source, action.microbatch, stage)
        else:
            yield Action(flow.receive, action.microbatch, action.stage, schedule.placement[stage])


def sends(schedule: Schedule, action: Action) -> Iterator[Action]:
    """The sends that carry what a compute action makes to other ranks."""
    rank = schedule.placement[action.stage]
    for flow in _SENT[action.kind]:
        stage = action.stage + flow.offset
        if 0 <= stage < schedule.stages and schedule.placement[stage] != rank:
            yield Action(flow.send, action.microbatch, action.stage, schedule.placement[stage])


def maker(send: Action) -> Action:
    """The compute action whose result ``send`` carries."""
    return Action(_CARRIES[send.kind].source, send.microbatch, send.stage)
