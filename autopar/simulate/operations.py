"""What each operation of torch.distributed moves between ranks, and how many bytes each of them must send.

What one rank brings to an operation is a :class:`Part`. :data:`KINDS` says for each operation, as data, which
tensors of which ranks flow where (:class:`Flow`), and the bytes that each of ``n`` ranks sends:

==============  ==================================  ========================================================
operation       a rank sends                        algorithm
==============  ==================================  ========================================================
all_reduce      2 (n - 1) / n of its input          ring: reduce-scatter, then all-gather
all_gather      (n - 1) / n of all inputs together  ring
reduce_scatter  (n - 1) / n of its input            ring
broadcast       the tensor; the last rank nothing   chain from ``src`` on, in group order, past the end to 0
reduce          its input; ``dst`` nothing          chain towards ``dst``
gather          its input; ``dst`` nothing          pairwise
scatter         ``src`` all but its own part        pairwise
all_to_all      all but its own part                pairwise
send            the tensor                          pairwise
recv, barrier   nothing
==============  ==================================  ========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Slot = tuple[int, Tensor]
"""A tensor of one rank, the rank counted within the group."""


@dataclass(frozen=True)
class Part:
    """What one rank brings to an operation: one tensor each, or one for every rank of the group. ``peers``: places in
    the group of those that get or give any of it, where these aren't all (of an uneven all-to-all)."""

    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    peers: Sequence[int] = ()


@dataclass(frozen=True)
class Flow:
    """``inputs`` are reduced to one value (or are one), which ``outputs`` become."""

    inputs: Sequence[Slot]
    outputs: Sequence[Slot]

    def slots(self) -> Iterator[Slot]:
        yield from self.inputs
        yield from self.outputs


@dataclass(frozen=True)
class Share:
    """What a rank's traffic depends on: bytes of its inputs, of all ranks', and of what it keeps."""

    ranks: int
    rank: int
    root: int
    own_bytes: int
    total_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class Kind:
    """An operation: where the tensors of all ranks' parts flow, given the root, and what a rank sends."""

    flows: Callable[[Sequence[Part], int], Iterator[Flow]]
    sent_bytes: Callable[[Share], int]


def _inputs(parts: Sequence[Part], at: int = 0) -> list[Slot]:
    return [(rank, part.inputs[at]) for rank, part in enumerate(parts)]


def _outputs(parts: Sequence[Part], at: int = 0) -> list[Slot]:
    return [(rank, part.outputs[at]) for rank, part in enumerate(parts)]


def _all_reduce(parts: Sequence[Part], _: int) -> Iterator[Flow]:
    yield Flow(_inputs(parts), _outputs(parts))


def _all_gather(parts: Sequence[Part], _: int) -> Iterator[Flow]:
    for source, part in enumerate(parts):
        yield Flow([(source, part.inputs[0])], _outputs(parts, source))


def _reduce_scatter(parts: Sequence[Part], _: int) -> Iterator[Flow]:
    for target, part in enumerate(parts):
        yield Flow(_inputs(parts, target), [(target, part.outputs[0])])


def _broadcast(parts: Sequence[Part], root: int) -> Iterator[Flow]:
    yield Flow([(root, parts[root].inputs[0])], _outputs(parts))


def _reduce(parts: Sequence[Part], root: int) -> Iterator[Flow]:
    yield Flow(_inputs(parts), [(root, parts[root].outputs[0])])


def _gather(parts: Sequence[Part], root: int) -> Iterator[Flow]:
    for source, part in enumerate(parts):
        yield Flow([(source, part.inputs[0])], [(root, parts[root].outputs[source])])


def _scatter(parts: Sequence[Part], root: int) -> Iterator[Flow]:
    for target, part in enumerate(parts):
        yield Flow([(root, parts[root].inputs[target])], [(target, part.outputs[0])])


def _all_to_all(parts: Sequence[Part], _: int) -> Iterator[Flow]:
    for source, sender in enumerate(parts):
        for target, receiver in enumerate(parts):
            yield Flow([(source, sender.inputs[target])], [(target, receiver.outputs[source])])


def _barrier(_: Sequence[Part], __: int) -> Iterator[Flow]:
    yield from ()


KINDS: Final[dict[str, Kind]] = {
    "all_reduce": Kind(_all_reduce, lambda s: 2 * (s.ranks - 1) * s.own_bytes // s.ranks),
    "all_gather": Kind(_all_gather, lambda s: (s.ranks - 1) * s.total_bytes // s.ranks),
    "reduce_scatter": Kind(_reduce_scatter, lambda s: (s.ranks - 1) * s.own_bytes // s.ranks),
    "broadcast": Kind(_broadcast, lambda s: 0 if (s.rank + 1) % s.ranks == s.root else s.own_bytes),
    "reduce": Kind(_reduce, lambda s: 0 if s.rank == s.root else s.own_bytes),
    "gather": Kind(_gather, lambda s: 0 if s.rank == s.root else s.own_bytes),
    "scatter": Kind(_scatter, lambda s: s.own_bytes - s.kept_bytes),
    "all_to_all": Kind(_all_to_all, lambda s: s.own_bytes - s.kept_bytes),
    "barrier": Kind(_barrier, lambda _: 0),
}

_COMBINE: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "PRODUCT": Tensor.mul_,
    "MIN": lambda total, value: torch.minimum(total, value, out=total),
    "MAX": lambda total, value: torch.maximum(total, value, out=total),
    "BAND": Tensor.bitwise_and_,
    "BOR": Tensor.bitwise_or_,
    "BXOR": Tensor.bitwise_xor_,
}
REDUCTIONS: Final = tuple(_COMBINE)


def sent_bytes(kind: str, parts: Sequence[Part], root: int) -> list[int]:
    """Bytes that each rank must send, by the table above, rounded down."""
    own = [sum(tensor.nbytes for tensor in part.inputs) for part in parts]
    kept = [part.inputs[rank].nbytes if rank < len(part.inputs) else 0 for rank, part in enumerate(parts)]
    shares = (Share(len(parts), rank, root, own[rank], sum(own), kept[rank]) for rank in range(len(parts)))
    return [KINDS[kind].sent_bytes(share) for share in shares]


def fits(sent: Tensor, expected: Tensor) -> bool:
    """Whether one tensor may arrive in the other: equal, or one flat, or different only in dims of size 1.

    Real backends compare nothing but the number of elements, and scramble ``[2, 3]`` into ``[3, 2]``.
    """
    if sent.dtype != expected.dtype or sent.shape == expected.shape:
        return sent.dtype == expected.dtype
    if sent.numel() != expected.numel():
        return False
    shapes = [[size for size in tensor.shape if size != 1] for tensor in (sent, expected)]
    return shapes[0] == shapes[1] or min(map(len, shapes)) == 1


def move(flow: Flow, reduction: str | None) -> None:
    """Carry out a flow. Values are added in rank order, in their own dtype."""
    value = flow.inputs[0][1] if reduction is None else reduced([t for _, t in flow.inputs], reduction)
    for _, output in flow.outputs:
        if output is not value:
            # .data: as in a real backend, autograd doesn't see the write.
            output.data.copy_(value.reshape(output.shape))


def reduced(values: Sequence[Tensor], reduction: str) -> Tensor:
    """``values`` combined from the first to the last; a mean of whole numbers is rounded towards zero."""
    total = values[0].clone()
    for value in values[1:]:
        _COMBINE[reduction](total, value)
    if reduction != "AVG":
        return total
    return total.div_(len(values), rounding_mode=None if total.is_floating_point() else "trunc")
