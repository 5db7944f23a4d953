"""What a timeline's events occupy: ranks, channels, streams of reductions and of copies, and that of exchanges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from autopar.schedules.actions import Action
from autopar.schedules.flow import is_exchange, is_send
from autopar.schedules.looks import LOOKS
from autopar.schedules.timeline import Event, Timeline

LANES: Final = ("activations", "gradients", "reductions", "offloads", "fetches")
"""What runs beside the compute of each rank: what it sends forward and back, gathers of weights and reductions of
gradients, copies to the host and back."""

NOUNS: Final[Mapping[str, str]] = {
    **{kind: look.name for kind, look in LOOKS.items()},
    "SEND_F": "send of activations",
    "SEND_B": "send of gradients",
    "RECV_F": "wait for activations",
    "RECV_B": "wait for gradients",
    "GATHER": "gather of weights",
    "GATHER_F": "gather of weights for the forward",
    "GATHER_B": "gather of weights for the backward",
    "GATHER_V": "gather of the vocabulary tables",
    "SCATTER": "reduce-scatter of gradients",
    "OFFLOAD": "offload of activations",
    "FREE": "wait for the offload of activations",
    "FETCH": "fetch of activations",
    "REDUCE": "gradient reduction",
    "REDUCE_V": "gradient reduction of the vocabulary tables",
    "SUM_E": "sum of the embedding's parts",
    "CAST_E": "broadcast of the embedding's gradient",
    "CAST_X": "broadcast of the last stage's output",
    "MAX": "maximum of the logits",
    "STATS": "exchange of the softmax statistics",
    "SUM_X": "sum of the gradient of the last stage's output",
}
_COPIES: Final[Mapping[str, str]] = {"OFFLOAD": "offloads", "FETCH": "fetches"}
_REDUCTIONS: Final = ("GATHER", "GATHER_F", "GATHER_B", "GATHER_V", "SCATTER", "REDUCE", "REDUCE_V")


def described(action: Action) -> str:
    """An action in words: ``"forward of microbatch 3 in stage 1"``."""
    text = NOUNS[action.kind]
    text += f" of microbatch {action.microbatch}" if action.microbatch >= 0 else ""
    text += f" in stage {action.stage}" if action.stage >= 0 else ""
    return text + (f", peer rank {action.peer}" if action.peer >= 0 else "")


def rank_events(timeline: Timeline) -> list[list[Event]]:
    """The events of each rank, in the order of its list."""
    rows: list[list[Event]] = [[] for _ in range(timeline.schedule.ranks)]
    for event in timeline.events:
        rows[event.rank].append(event)
    return rows


def exchange_events(timeline: Timeline) -> dict[Action, tuple[float, float]]:
    """When the one stream of exchanges works on each: from when all ranks posted and the one before has ended.

    An event of a timeline lasts from a rank's own post to the end, so those of one rank overlap; these don't.
    """
    posts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    for event in timeline.events:
        if is_exchange(event.action):
            posts[event.action] = max(posts.get(event.action, 0.0), event.start_seconds)
            ends[event.action] = event.end_seconds
    found, free = {}, 0.0
    for action, end in sorted(ends.items(), key=lambda item: item[1]):
        found[action] = (max(posts[action], free), end)
        free = end
    return found


def lane_events(timeline: Timeline) -> dict[str, list[list[Event]]]:
    """For each of :data:`LANES` that has anything in it, the events of each rank; those of no duration are left out."""
    lanes: dict[str, list[list[Event]]] = {lane: [[] for _ in range(timeline.schedule.ranks)] for lane in LANES}
    for event in timeline.events:
        lane = lane_of(event.action)
        if lane in lanes and event.end_seconds > event.start_seconds:
            lanes[lane][event.rank].append(event)
    return {lane: rows for lane, rows in lanes.items() if any(rows)}


def lane_of(action: Action) -> str | None:
    """Which of :data:`LANES` an action runs in, or ``"exchanges"``; None for what occupies the rank itself."""
    if is_send(action):
        return "activations" if action.kind == "SEND_F" else "gradients"
    if is_exchange(action):
        return "exchanges"
    return "reductions" if action.kind in _REDUCTIONS else _COPIES.get(action.kind)
