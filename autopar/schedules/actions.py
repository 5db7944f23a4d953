"""The instruction set of a pipeline: what one rank does, one action after another, and its text.

=================  =========================================================================================
``F3@1``           forward of microbatch 3 in stage 1
``B0@2``           backward of microbatch 0 in stage 2
``I0@2``           the part of that backward that others wait for: the gradient of the stage's input
``W0@2``           the rest of it: the gradients of the stage's weights
``SEND_F3@1>2``    send stage 1's output of microbatch 3 to pipeline rank 2
``RECV_F3@2<1``    receive stage 2's input of microbatch 3 from pipeline rank 1
``SEND_B3@2>1``    send the gradient of stage 2's input to pipeline rank 1
``RECV_B3@1<2``    receive the gradient of stage 1's output from pipeline rank 2
``GATHER@1``       make the weights that stage 1 computes with of those that the optimizer updates (masters)
``GATHER_F3@1``    start to gather stage 1's weights for its forward of microbatch 3, layer by layer
``GATHER_B3@1``    the same for its backward
``SCATTER3@1``     reduce-scatter the gradients that stage 1 has made up to microbatch 3
``OFFLOAD3@1``     start to copy what stage 1 keeps of microbatch 3 to the host
``FREE3@1``        wait until it is there, and free it
``FETCH3@1``       start to copy it back
``REDUCE@1``       reduce stage 1's gradients over its data and replica axes
``STEP``           run the optimizer
``UPDATE3@1``      asynchronous schedules: update stage 1's weights by microbatch 3's gradient alone
=================  =========================================================================================

With the vocabulary layers split over the pipeline (:mod:`autopar.schedules.exchanges`), every rank has a part
of them, and passes of its own for each microbatch:

=================  =========================================================================================
``E3`` ``G3``      input embedding of microbatch 3, and the gradient of its table
``S3``             this rank's part of the logits of microbatch 3, and their statistics
``U3``             exponentials under the global maximum (three-barrier form only)
``T3``             softmax and the gradient of this rank's part of the output table
``SUM_E3``         sum the embedding's parts for the first stage
``CAST_E3``        broadcast the gradient of the embedding from the first stage
``CAST_X3``        broadcast the last stage's output
``MAX3``           maximum of the logits (three-barrier form only)
``STATS3``         exchange the softmax statistics
``SUM_X3``         sum the parts of the gradient of the last stage's output
``GATHER_V``       make the vocabulary tables that passes compute with of the masters
``REDUCE_V``       reduce the gradients of the vocabulary tables over data and replica axes
=================  =========================================================================================

All tensors of one (microbatch, stage boundary, direction) travel as one message. What runs asynchronously and
what blocks is defined in :mod:`autopar.schedules.progress`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

from autopar.errors import ScheduleError

ABSENT: Final = -1


@dataclass(frozen=True)
class Kind:
    """Which fields an action of one kind has; ``arrow`` is ``>`` towards, ``<`` from a peer, or empty."""

    microbatch: bool = False
    stage: bool = False
    arrow: str = ""


KINDS: Final[Mapping[str, Kind]] = {
    "F": Kind(microbatch=True, stage=True),
    "B": Kind(microbatch=True, stage=True),
    "I": Kind(microbatch=True, stage=True),
    "W": Kind(microbatch=True, stage=True),
    "SEND_F": Kind(microbatch=True, stage=True, arrow=">"),
    "RECV_F": Kind(microbatch=True, stage=True, arrow="<"),
    "SEND_B": Kind(microbatch=True, stage=True, arrow=">"),
    "RECV_B": Kind(microbatch=True, stage=True, arrow="<"),
    "GATHER": Kind(stage=True),
    "GATHER_F": Kind(microbatch=True, stage=True),
    "GATHER_B": Kind(microbatch=True, stage=True),
    "SCATTER": Kind(microbatch=True, stage=True),
    "OFFLOAD": Kind(microbatch=True, stage=True),
    "FREE": Kind(microbatch=True, stage=True),
    "FETCH": Kind(microbatch=True, stage=True),
    "REDUCE": Kind(stage=True),
    "STEP": Kind(),
    "UPDATE": Kind(microbatch=True, stage=True),
    "E": Kind(microbatch=True),
    "G": Kind(microbatch=True),
    "S": Kind(microbatch=True),
    "U": Kind(microbatch=True),
    "T": Kind(microbatch=True),
    "SUM_E": Kind(microbatch=True),
    "CAST_E": Kind(microbatch=True),
    "CAST_X": Kind(microbatch=True),
    "MAX": Kind(microbatch=True),
    "STATS": Kind(microbatch=True),
    "SUM_X": Kind(microbatch=True),
    "GATHER_V": Kind(),
    "REDUCE_V": Kind(),
}
_FIELDS: Final = {name: (kind.microbatch, kind.stage, bool(kind.arrow)) for name, kind in KINDS.items()}


class _Fields(NamedTuple):
    kind: str
    microbatch: int = ABSENT
    stage: int = ABSENT
    peer: int = ABSENT


class Action(_Fields):
    """One instruction of one pipeline rank. ``str`` and :func:`parse_action` are inverses.

    ``stage`` counts all stages (chunks) of the model; ``peer`` is a pipeline rank. A field that the kind
    doesn't have is :data:`ABSENT`. Raises ScheduleError for an unknown kind, or a field missing or too many.
    """

    __slots__ = ()

    def __new__(cls, kind: str, microbatch: int = ABSENT, stage: int = ABSENT, peer: int = ABSENT) -> Action:
        fields = _FIELDS.get(kind)
        if fields is None:
            raise ScheduleError(f"unknown kind of action {kind!r}; known kinds are {', '.join(KINDS)}")
        given = (microbatch >= 0, stage >= 0, peer >= 0)
        if given != fields or microbatch < ABSENT or stage < ABSENT or peer < ABSENT:
            values = f"microbatch {microbatch}, stage {stage}, peer {peer}"
            raise ScheduleError(f"{kind} can't have {values}; it is written like {example(kind)}")
        return tuple.__new__(cls, (kind, microbatch, stage, peer))

    def __str__(self) -> str:
        has_microbatch, has_stage, has_peer = _FIELDS[self.kind]
        microbatch = str(self.microbatch) if has_microbatch else ""
        stage = f"@{self.stage}" if has_stage else ""
        peer = f"{KINDS[self.kind].arrow}{self.peer}" if has_peer else ""
        return self.kind + microbatch + stage + peer

    __repr__ = __str__


make: Final = partial(tuple.__new__, Action)
"""``make((kind, microbatch, stage, peer))``: an action whose fields are known to be right, several times as fast."""


def example(kind: str) -> str:
    """How an action of ``kind`` is written: ``"SEND_F3@1>2"``."""
    fields = zip(_FIELDS[kind], (3, 1, 2), strict=True)
    return str(Action(kind, *(value if used else ABSENT for used, value in fields)))


_ACTION: Final = re.compile(r"([A-Z_]+)(\d{1,18})?(?:@(\d{1,18}))?(?:[<>](\d{1,18}))?")


def parse_action(text: str) -> Action:
    """Inverse of ``str(action)``. Raises ScheduleError."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text!r} is not an action; write one like {', '.join(map(example, KINDS))}")
    action = Action(match[1], *(ABSENT if number is None else int(number) for number in match.groups()[1:]))
    if str(action) != text:  # the wrong arrow, or a number with leading zeros
        raise ScheduleError(f"{text!r} is not an action; did you mean {action}?")
    return action


def format_list(actions: Iterable[Action]) -> str:
    """One rank's actions on one line, separated by spaces."""
    return " ".join(map(str, actions))


def parse_list(text: str) -> tuple[Action, ...]:
    """Inverse of :func:`format_list`. Raises ScheduleError."""
    return tuple(map(parse_action, text.split()))


_NAME: Final = re.compile(r"[\w.+-]+")
_HEADER: Final = re.compile(
    r"schedule (\S+) stages=(\d{1,18}) microbatches=(\d{1,18}) placement=(\d{1,18}(?:,\d{1,18})*)"
    r"(?: head=([\w-]+))?( embedding=split)?"
)
_KEYS: Final = ("name", "stages", "microbatches", "placement", "lists", "head", "embedding")

HEADS: Final = ("", "naive", "vocab-1", "vocab-2")
"""How the output layer is split over the pipeline: not at all, or by an algorithm of Yeung et al. (2411.05288)."""


@dataclass(frozen=True)
class Schedule:
    """The action lists of all pipeline ranks of one training step.

    ``placement[stage]`` is the pipeline rank that holds the stage, ``lists[rank]`` what that rank does.
    ``head`` is one of :data:`HEADS`; ``embedding`` says whether the input embedding is split too.
    The constructor refuses sizes that don't fit together (ScheduleError); whether the lists are right is for
    :func:`autopar.schedules.check` to say.
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    lists: tuple[tuple[Action, ...], ...]
    head: str = ""
    embedding: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ScheduleError(f"{self.name!r} can't name a schedule; use letters, digits, _ . + and -")
        for what, count in (("stages", self.stages), ("microbatches", self.microbatches)):
            if not _is_whole(count) or count < 1:
                raise ScheduleError(f"schedule {self.name!r} has {count!r} {what}; it needs at least 1, whole")
        if self.head not in HEADS or not isinstance(self.embedding, bool) or (self.embedding and not self.head):
            raise ScheduleError(
                f"schedule {self.name!r} has head {self.head!r} and embedding {self.embedding!r}; head is one of "
                f"{', '.join(map(repr, HEADS))}, and an embedding is split with a head only"
            )
        if len(self.placement) != self.stages:
            raise ScheduleError(
                f"schedule {self.name!r} places {len(self.placement)} stages, but has {self.stages}; "
                "give one pipeline rank per stage"
            )
        for stage, rank in enumerate(self.placement):
            if not _is_whole(rank) or not 0 <= rank < self.ranks:
                raise ScheduleError(
                    f"schedule {self.name!r} places stage {stage} on rank {rank!r}, "
                    f"but has {self.ranks} action lists, one for each rank from 0 up"
                )

    @property
    def ranks(self) -> int:
        return len(self.lists)

    @property
    def chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(self.placement.count(rank) for rank in range(self.ranks))

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (microbatch, stage) whose backward is two passes, ``I`` and ``W``."""
        return frozenset((a.microbatch, a.stage) for row in self.lists for a in row if a.kind == "I")

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether weights are updated while microbatches are under way."""
        return any(action.kind == "UPDATE" for row in self.lists for action in row)

    def to_text(self) -> str:
        """A header line and one line per rank; :meth:`from_text` is the inverse."""
        placement = ",".join(map(str, self.placement))
        sizes = f"stages={self.stages} microbatches={self.microbatches} placement={placement}"
        sizes += f" head={self.head}" if self.head else ""
        sizes += " embedding=split" if self.embedding else ""
        rows = (f"{rank}: {format_list(actions)}".rstrip() for rank, actions in enumerate(self.lists))
        return "\n".join([f"schedule {self.name} {sizes}", *rows]) + "\n"

    __str__ = to_text

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Inverse of :meth:`to_text`. Raises ScheduleError naming the line."""
        header, *rows = text.strip().splitlines() or [""]
        match = _HEADER.fullmatch(header.strip())
        if match is None:
            raise ScheduleError(
                f"line 1 is {header!r}; a schedule begins like 'schedule 1f1b stages=2 microbatches=4 placement=0,1'"
            )
        placement = tuple(map(int, match[4].split(",")))
        lists = tuple(_parse_row(rank, row) for rank, row in enumerate(rows))
        return cls(match[1], int(match[2]), int(match[3]), placement, lists, match[5] or "", bool(match[6]))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values, the lists as text; :meth:`from_json` is the inverse."""
        return {
            "name": self.name,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "placement": list(self.placement),
            "lists": [format_list(actions) for actions in self.lists],
            "head": self.head,
            "embedding": self.embedding,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Schedule:
        """Inverse of :meth:`to_json`. Raises ScheduleError."""
        if set(value) != set(_KEYS):
            given = ", ".join(map(str, value)) or "none"
            raise ScheduleError(f"a schedule has the keys {', '.join(_KEYS)}, not {given}")
        if not isinstance(value["name"], str):
            raise ScheduleError("key 'name' of a schedule must be text")
        if not isinstance(value["placement"], list):
            raise ScheduleError("key 'placement' of a schedule must be a list with one rank per stage")
        lists = value["lists"]
        if not isinstance(lists, list) or not all(isinstance(row, str) for row in lists):
            raise ScheduleError("key 'lists' of a schedule must be a list with one text per rank")
        return cls(
            name=value["name"],
            stages=value["stages"],
            microbatches=value["microbatches"],
            placement=tuple(value["placement"]),
            lists=tuple(map(parse_list, lists)),
            head=value["head"],
            embedding=value["embedding"],
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_row(rank: int, row: str) -> tuple[Action, ...]:
    label, colon, actions = row.partition(":")
    if not colon or label.strip() != str(rank):
        raise ScheduleError(f"line {rank + 2} must begin with '{rank}:', the rank whose list it is: {row!r}")
    try:
        return parse_list(actions)
    except ScheduleError as error:
        raise ScheduleError(f"line {rank + 2}: {error}") from None
