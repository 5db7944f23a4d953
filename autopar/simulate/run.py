"""Run a torch.distributed program on simulated ranks: threads of this process, one at a time, on the CPU or one GPU."""

from __future__ import annotations

import contextvars
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import ArgumentError
from autopar.simulate import diagnosis
from autopar.simulate.backend import SimulatedGroup
from autopar.simulate.generators import callers_generators
from autopar.simulate.memory import MemoryTracker
from autopar.simulate.rendezvous import Rendezvous
from autopar.simulate.store import SharedStore
from autopar.simulate.torch_private import BACKEND, rank_threads

T = TypeVar("T")


@dataclass(frozen=True)
class RankTraffic:
    """What one rank sent in one group by one operation, in so many ``calls``.

    ``group`` is the name of the axis for a group of a DeviceMesh, else the ``group_desc`` that ``new_group``
    got, else ``"world"`` or ``"ranks 0,2"``. (A DeviceMesh uses the world's own group for an axis that covers
    all ranks.) How many bytes an operation must send is defined in :mod:`autopar.simulate.operations`.
    """

    group: str
    operation: str
    calls: int
    sent_bytes: int


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """What a run gave, by rank: what ``fn`` returned, what the rank sent, and its peak of live tensor bytes.

    ``peak_bytes`` is empty where memory was not tracked.
    """

    results: list[T]
    traffic: list[tuple[RankTraffic, ...]]
    peak_bytes: list[int]

    @property
    def sent_bytes(self) -> list[dict[str, int]]:
        """Bytes that each rank sent, by group."""
        totals: list[dict[str, int]] = []
        for rank in self.traffic:
            total: Counter[str] = Counter()
            for sent in rank:
                total[sent.group] += sent.sent_bytes
            totals.append(dict(total))
        return totals


def run(fn: Callable[[int], T], world_size: int, *, seed: int = 0, track_memory: bool = True) -> Simulation[T]:
    """Call ``fn(rank)`` on ``world_size`` simulated ranks, in which torch.distributed is initialised.

    Ranks are threads. One runs at a time, until it has to wait for others; so the same call gives the same
    values. Each rank has default generators of its own (torch's for the CPU, random, numpy), seeded with
    ``seed``. The caller's grad mode, inference mode, CPU autocast and context variables hold. Everything else
    is shared: the environment, the default dtype, all objects that ``fn`` refers to. Ranks must not share
    parameters, nor write to tensors that they share. On a GPU all ranks share its memory and its generator.

    Without ``track_memory``, operations on small tensors take less than half as long, and ``peak_bytes`` stays
    empty. Kernels use as many threads as the caller has set; for small tensors ``torch.set_num_threads(1)`` is the
    fastest.

    Raises:
        MismatchError: ranks called different operations, or the same with other shapes, dtypes or arguments;
            or wrote to a tensor in flight; or returned while an operation had not met its counterpart.
        DeadlockError: no rank could run; says what each waited for, and where.
        DeadRankError: ``fn`` raised on a rank, which ended the others; ``__cause__`` is what it raised.
        ArgumentError: ``world_size`` is not positive, or another simulation is running.
    """
    if world_size < 1:
        raise ArgumentError(f"world_size is {world_size!r}; it must be a whole number of at least 1")
    rendezvous = Rendezvous(world_size, seed)
    baton, modes = rendezvous.baton, _Modes()
    trackers = [MemoryTracker() for _ in range(world_size)] if track_memory else []
    results: dict[int, T] = {}

    def group(name: str, members: tuple[int, ...]) -> SimulatedGroup:
        return SimulatedGroup(rendezvous, baton.current, name, members or tuple(range(world_size)))

    with callers_generators(), rank_threads(group) as enter:
        store = SharedStore(baton)

        def live(rank: int) -> None:
            enter()
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
            try:
                tracked = trackers[rank] if trackers else nullcontext()
                with modes.as_the_callers(), tracked, torch.autograd.set_multithreading_enabled(False):
                    results[rank] = fn(rank)
            finally:
                if dist.is_initialized():  # fn may have destroyed it
                    dist.destroy_process_group()

        baton.run(lambda rank: modes.context.copy().run(live, rank))
    _raise_failure(rendezvous)
    return Simulation(
        [results[rank] for rank in range(world_size)],
        [_traffic(rendezvous, rank) for rank in range(world_size)],
        [tracker.peak_bytes for tracker in trackers],
    )


class _Modes:
    """What torch and Python keep per thread, as the calling thread has it."""

    def __init__(self) -> None:
        self.context = contextvars.copy_context()
        self._has_grad = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._autocasts = torch.is_autocast_enabled("cpu")
        self._autocast_dtype = torch.get_autocast_dtype("cpu")

    @contextmanager
    def as_the_callers(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._autocasts:
                stack.enter_context(torch.autocast("cpu", self._autocast_dtype))
            stack.enter_context(torch.inference_mode(self._is_inference))
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            yield


def _traffic(rendezvous: Rendezvous, rank: int) -> tuple[RankTraffic, ...]:
    calls, sent = rendezvous.calls[rank], rendezvous.sent_bytes[rank]
    return tuple(RankTraffic(*key, calls[key], sent[key]) for key in sorted(calls))


def _raise_failure(rendezvous: Rendezvous) -> None:
    failure, rank = rendezvous.baton.failure, rendezvous.baton.failed_rank
    if failure is not None and rank is not None:
        raise diagnosis.dead(rank, failure) from failure
    if failure is not None:
        raise failure
    unmatched = rendezvous.unmatched()
    if unmatched:
        raise diagnosis.unmatched(unmatched)
