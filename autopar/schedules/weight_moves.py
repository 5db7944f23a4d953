"""When weights are gathered and gradients scattered, where a rank doesn't store what it computes with.

A *master* is what the optimizer updates: maybe this rank's rows of a weight (ZeRO: Rajbhandari et al., "ZeRO",
SC 2020), in another dtype, or on the host. Passes compute with *working copies* of it. Two ways to make these:

* per step: ``GATHER@k`` once, before everything else; they stay until the next step;
* per pass: layer by layer, one ahead of the compute, each freed after its use. ``GATHER_F3@1`` starts that one
  compute action ahead of ``F3@1``. Between two passes of one stage that follow each other it isn't needed: the last
  layers of a forward are still there for its backward, and a pass goes on to gather the first layers of the next.

All ranks that share masters run one list on one program, so they start the same collectives in the same order.

How much travels in one message (:class:`MessageSizes`). On a ring of n ranks a message takes n - 1 hops, of one n-th
part each, so it takes n - 1 latencies however small it is: what is large depends on the number of ranks, which is all
that programs know of links. So, on n ranks,

* what has n parts of :attr:`MessageSizes.part_bytes`, or more, travels by itself, from its own memory and to it;
* what has less travels with others, at the price of a copy to where it is used: two sweeps over memory, a small part of
  the latency that they save;
* what travels once a step (weights for the first forward, gradients of the last backward) is put together over layers,
  until it has that size (gradients: at least that of ``bucket_bytes``); but a stage has several messages
  (:data:`BUCKETS`), since a layer of the first forward waits for all of the message that it is in, and one of gradients
  begins when its last one is there;
* what travels in each pass (weights under ZeRO 3, gradients under ZeRO 2 and 3) is put together within a layer: there
  is memory for no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from autopar.schedules.actions import Action, Schedule

PASSES: Final = ("F", "B", "I")
"""The passes that compute with weights; ``W`` and ``UPDATE`` don't read them."""

GATHERS: Final = ("GATHER", "GATHER_V", "GATHER_F", "GATHER_B")

BUCKETS: Final = 8
"""So many messages a stage has at least, of what is sent once a step and not large."""


@dataclass(frozen=True)
class MessageSizes:
    """From which size on messages are large, in bytes of the whole message: with ``part_bytes`` for each rank.

    By the preset ``h100``, a hop of a message that is just large takes 1.4 µs on NVLink and 14 µs on a network card,
    beside latencies of 1.9 and 4 µs; copying all of the message, 0.35 µs for each of its ranks. With parts of a quarter
    and of twice the size, steps of Llama-3-70B on 512 of them are longer. ``bucket_bytes``: gradients that travel
    together have as much before they are sent, however few ranks there are (that of PyTorch's DDP: Li et al., VLDB
    2020, section 5.3). ``least_bytes``: nor is anything that could wait for more sent with less, however small the
    stage is.
    """

    part_bytes: int = 2**19
    bucket_bytes: int = 25 * 2**20
    least_bytes: int = 2**20

    def large(self, ranks: int) -> int:
        """A weight, or a gradient, of so many bytes travels by itself around a ring of so many ranks."""
        return ranks * self.part_bytes

    def of_pass(self, ranks: int) -> int:
        """Gradients that travel together are sent in each backward once there are so many bytes of them."""
        return max(self.bucket_bytes, self.large(ranks))

    def of_step(self, ranks: int, stage_bytes: int) -> int:
        """What travels together once a step is sent once there is so much of it, of ``stage_bytes`` in all."""
        return min(self.of_pass(ranks), max(stage_bytes // BUCKETS, self.least_bytes))


MESSAGES: Final = MessageSizes()


class Travels(NamedTuple):
    """A weight that is gathered once a step: the unit of its stage that uses it first (units are counted in the order
    of their use), the ring that it goes around, so many ranks, and its bytes."""

    unit: int
    ring: Hashable
    ranks: int
    bytes_: int


def joined_units(weights: Sequence[Travels], sizes: MessageSizes = MESSAGES) -> list[int]:
    """The unit with which each weight of a stage is gathered: its own if it is large, else the first of its message.

    One message has the small weights of a ring that consecutive units use first, all of each unit.
    """
    total = sum(weight.bytes_ for weight in weights)
    is_small = [weight.bytes_ < sizes.large(weight.ranks) for weight in weights]
    small: Counter[tuple[int, Hashable, int]] = Counter()
    for weight, counts in zip(weights, is_small, strict=True):
        if counts:
            small[weight.unit, weight.ring, weight.ranks] += weight.bytes_
    first: dict[tuple[int, Hashable], int] = {}
    waiting: dict[Hashable, tuple[int, int]] = {}  # by ring, the first unit of its next message, and bytes of that
    for (unit, ring, ranks), bytes_ in sorted(small.items(), key=lambda item: item[0][0]):
        begun, before = waiting.pop(ring, (unit, 0))
        first[unit, ring] = begun
        if before + bytes_ < sizes.of_step(ranks, total):
            waiting[ring] = begun, before + bytes_
    pairs = zip(weights, is_small, strict=True)
    return [first[weight.unit, weight.ring] if counts else weight.unit for weight, counts in pairs]


@dataclass(frozen=True)
class WeightMoves:
    """What moves between masters and working copies.

    ``gathers``: when working copies are made of masters (``""``: never, they are the same). ``scatters``: whether
    gradients are reduce-scattered after each backward (ZeRO 2 and 3), instead of once per step.
    """

    gathers: Literal["", "step", "pass"] = ""
    scatters: bool = False


def moves_of(schedule: Schedule) -> WeightMoves:
    """What a lowered schedule was made for, as its actions say."""
    kinds = {action.kind for row in schedule.lists for action in row}
    per_pass = kinds & {"GATHER_F", "GATHER_B"}
    return WeightMoves("pass" if per_pass else "step" if kinds & {"GATHER", "GATHER_V"} else "", "SCATTER" in kinds)


def followers(row: Sequence[Action]) -> dict[Action, Action | None]:
    """For each pass of one rank's list that computes with weights: the next one, if it is of the same stage."""
    passes = [action for action in row if action.kind in PASSES]
    pairs = zip(passes, [*passes[1:], None], strict=False)  # a rank may have no stage, and so no pass
    return {a: b if b is not None and b.stage == a.stage else None for a, b in pairs}


def gather_of(action: Action) -> Action:
    """The action that starts the gathers of a pass."""
    return Action("GATHER_F" if action.kind == "F" else "GATHER_B", action.microbatch, action.stage)


def gathers_of(schedule: Schedule, rank: int, moves: WeightMoves) -> Iterator[Action]:
    """All gathers that ``rank`` must have."""
    row = schedule.lists[rank]
    if moves.gathers and schedule.head:
        yield Action("GATHER_V")  # its passes wait for all of it, those of stages for one layer at a time
    if moves.gathers == "step":
        yield from (Action("GATHER", stage=stage) for stage, home in enumerate(schedule.placement) if home == rank)
    if moves.gathers == "pass":
        still_there = {follower for follower in followers(row).values() if follower is not None}
        yield from (gather_of(action) for action in row if action.kind in PASSES and action not in still_there)


def gather_posts(schedule: Schedule, rank: int, moves: WeightMoves) -> dict[int, list[Action]]:
    """Index in ``rank``'s list of compute actions -> the gathers right before it."""
    row = schedule.lists[rank]
    index_of = {action: index for index, action in enumerate(row)}
    posts: dict[int, list[Action]] = {}
    for gather in gathers_of(schedule, rank, moves):
        posts.setdefault(max(0, _used_at(gather, index_of) - 1), []).append(gather)
    return posts


def _used_at(gather: Action, index_of: dict[Action, int]) -> int:
    kinds = {"GATHER_F": ("F",), "GATHER_B": ("B", "I")}.get(gather.kind, ())
    passes = (Action(kind, gather.microbatch, gather.stage) for kind in kinds)
    return next((index_of[action] for action in passes if action in index_of), 0)


def scatters(action: Action) -> bool:
    """Whether a SCATTER follows ``action``: it completes gradients of weights."""
    return action.kind in ("B", "W")


def scatter_of(action: Action) -> Action:
    return Action("SCATTER", action.microbatch, action.stage)
