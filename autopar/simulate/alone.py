"""One rank of a world without the others: whatever it asks of them is done at once, and no data comes.

Enough for all that doesn't depend on values: which tensors a rank makes, how large, and when they go. On tensors
without values (:mod:`autopar.shapes`) that takes neither memory nor arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import torch.distributed as dist
from torch import Tensor

from autopar.errors import RankError
from autopar.simulate import diagnosis
from autopar.simulate.backend import SimulatedGroup
from autopar.simulate.calls import Call, Waiting
from autopar.simulate.generators import callers_generators
from autopar.simulate.rendezvous import Rendezvous
from autopar.simulate.sites import Site
from autopar.simulate.store import SharedStore
from autopar.simulate.torch_private import BACKEND, rank_threads

T = TypeVar("T")
_NOWHERE: Final = Site("<alone>", 0, "<alone>")


def run_alone(fn: Callable[[], T], rank: int, world_size: int, on_call: Callable[[Call], None] | None = None) -> T:
    """Call ``fn()`` as ``rank`` of ``world_size``, in which torch.distributed is initialised. Values that would come
    from other ranks are those that the memory had before. ``on_call`` gets each operation that the rank asks for.

    Raises what ``fn`` raises, ArgumentError inside another simulation.
    """
    peers = _Answering(1, seed=0)
    peers.on_call = on_call
    results: list[T] = []

    def group(name: str, members: tuple[int, ...]) -> SimulatedGroup:
        return _Lonely(peers, rank, name, members or tuple(range(world_size)))

    with callers_generators(), rank_threads(group) as enter:
        store = SharedStore(peers.baton)

        def live(_: int) -> None:
            enter()
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
            try:
                results.append(fn())
            finally:
                dist.destroy_process_group()

        peers.baton.run(live)
    if peers.baton.failure is not None:
        raise peers.baton.failure
    return results[0]


class _Lonely(SimulatedGroup):
    """Nobody takes a part of a tensor: it is left in one piece. Nobody is waited for, so nobody asks where that is."""

    def _cut(self, tensor: Tensor, rows: list[int]) -> list[Tensor]:
        return [tensor]

    def _site(self) -> Site:
        return _NOWHERE


class _Answering(Rendezvous):
    """Every call is done when it is made."""

    on_call: Callable[[Call], None] | None = None

    def collective(self, call: Call) -> None:
        if self.on_call is not None:
            self.on_call(call)
        call.finish()

    send = receive = collective

    def _stuck(self, waiting: Mapping[int, Waiting]) -> RankError:
        return diagnosis.stuck(waiting, self.world_size)
