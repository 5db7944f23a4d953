"""Times of collectives, by kind, size of the group and of the message, as the runtime calls them.

Inside nodes all groups of neighbours communicate at the same time, across nodes all groups of equal places, as those
of a mesh do: they share links and network cards as they will in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from autopar.calibrate.clock import Clock
from autopar.calibrate.samples import Effort, LinkName, Message, Progress
from autopar.errors import ArgumentError
from autopar.runtime import collectives
from autopar.runtime.axes import Axes, Axis

Call = Callable[[], object]

_ITEM_BYTES: Final = 4  # float32


def measure_collectives(axes: Axes, per_node: int, effort: Effort, progress: Progress) -> list[Message]:
    """Of a world whose nodes have ``per_node`` ranks each, in the order of their ranks; every rank must call it.

    Times are those of the slowest rank. Raises ArgumentError where the world isn't made of such nodes.
    """
    world = axes.world.size
    if world % per_node:
        raise ArgumentError(
            f"a world of {world} ranks isn't made of nodes of {per_node}; start as many processes on each node"
        )
    lines = list(groups(axes.rank, world, per_node))
    joined = collectives.subgroups(axes, {ranks: f"{link} {size}" for link, size, ranks in lines if ranks})
    slowest = partial(_slowest, axes)
    clock = Clock(axes.device, effort.repeats, effort.run_seconds, slowest)
    found: list[Message] = []
    for link, size, ranks in lines:
        progress(f"collectives of {size} ranks, {link.replace('_', ' ')}")
        axis = joined.get(ranks)
        for kind in _KINDS if size > 2 else (*_KINDS, "send"):
            for bytes_ in effort.message_bytes:
                sent, call = _call(kind, axis, size, bytes_, axes.device)
                seconds = slowest(clock.seconds(call)) / (2 if kind == "send" else 1)
                found.append(Message(kind, link, size, sent, seconds))
                if seconds > effort.longest_seconds:
                    break
    return found


def groups(rank: int, world: int, per_node: int) -> Iterator[tuple[LinkName, int, tuple[int, ...]]]:
    """``(link, size, ranks)`` of the groups to measure, the same for all ranks but for ``ranks``: those of this one's
    group, or none, where groups of that size leave it over."""
    for size in _sizes(per_node):
        first, place = rank // per_node * per_node, rank % per_node
        start = first + place // size * size
        ranks = tuple(range(start, start + size)) if start + size <= first + per_node else ()
        yield "intra_node", size, ranks
    for size in _sizes(world // per_node):
        node, place = divmod(rank, per_node)
        first = node // size * size
        ranks = tuple((first + i) * per_node + place for i in range(size))
        yield "inter_node", size, ranks if ranks[-1] < world else ()


def _sizes(most: int) -> list[int]:
    """2, 4, 8, … and all."""
    return sorted({most, *(1 << i for i in range(1, most.bit_length()) if 1 << i <= most)} - {0, 1})


def _slowest(axes: Axes, value: float) -> float:
    """The largest ``value`` of all ranks, on every rank."""
    box = torch.tensor([value], device=axes.device, dtype=torch.float64)
    collectives.reduce_max_(box, axes.world)
    return float(box)


def _call(kind: str, axis: Axis | None, size: int, bytes_: int, device: torch.device) -> tuple[int, Call]:
    """The bytes that are really sent (each rank has as many), and the call; without an axis, nothing."""
    count = max(1, bytes_ // _ITEM_BYTES // size)
    if axis is None:
        return count * size * _ITEM_BYTES, lambda: None
    part, whole = (torch.zeros(n, device=device) for n in (count, count * size))
    return whole.nbytes, partial(_CALLS[kind], part, whole, axis)


def _all_reduce(_: Tensor, whole: Tensor, axis: Axis) -> None:
    collectives.reduce_sum_(whole, axis)


def _all_gather(part: Tensor, whole: Tensor, axis: Axis) -> None:
    if work := collectives.gather_into(whole, part, axis):
        work.wait()


def _reduce_scatter(part: Tensor, whole: Tensor, axis: Axis) -> None:
    if work := collectives.scatter_sum_into(part, whole, axis):
        work.wait()


def _all_to_all(part: Tensor, whole: Tensor, axis: Axis) -> None:
    counts = [part.numel()] * axis.size
    collectives.exchange_uneven(whole, counts, counts, axis)


def _there_and_back(_: Tensor, whole: Tensor, axis: Axis) -> None:
    """Of two ranks; the second answers the first."""
    steps = [collectives.send, collectives.receive_]
    for step in steps if axis.index == 0 else reversed(steps):
        step(whole, axis, 1 - axis.index).wait()


_CALLS: Final = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _there_and_back,
}
_KINDS: Final = tuple(kind for kind in _CALLS if kind != "send")
