"""The scheduler: each rank is a thread, and exactly one of them runs, the one that holds the baton.

It passes the baton on only where it would block. A run is therefore deterministic, and the moment in which
no rank can run any more is seen when it comes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from autopar.errors import RankError
from autopar.simulate.generators import Generators

W = TypeVar("W")

_LOOK_SECONDS = 0.2


class Ended(BaseException):
    """Unwinds a rank whose simulation is over because of another one. Not for user code to catch."""


class Baton(Generic[W]):
    """Runs one function on all ranks. ``W`` says what a blocked rank waits for.

    ``diagnose`` names the error when no rank can run, from what each blocked rank waits for; ranks that it
    isn't told of have returned.
    """

    def __init__(self, world_size: int, seed: int, diagnose: Callable[[Mapping[int, W]], RankError]) -> None:
        self.current = -1
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self._diagnose = diagnose
        self._turns = [threading.Lock() for _ in range(world_size)]  # released: it is that rank's turn
        self._threads: list[threading.Thread] = []
        self._begun = threading.Event()
        self._all_ended = threading.Event()
        self._generators = [Generators(seed) for _ in range(world_size)]
        self._ready: deque[int] = deque()
        self._waiting: dict[int, W] = {}

    def run(self, body: Callable[[int], None]) -> None:
        """Call ``body(rank)`` on every rank; returns when all have ended, whatever happened.

        ``failure`` is then the first error or None, ``failed_rank`` the rank whose body raised it or None.
        """
        for rank, turn in enumerate(self._turns):
            turn.acquire()
            arguments = (rank, body)
            self._threads.append(threading.Thread(target=self._live, args=arguments, name=f"rank {rank}", daemon=True))
        started = self._start()
        if started:
            self._wait_for_all()
        for rank in range(started):
            self._turns[rank].release()
            self._threads[rank].join()

    def _start(self) -> int:
        for rank, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads to give
                self.fail(error)
                return rank
            self._ready.append(rank)
        return len(self._threads)

    def _wait_for_all(self) -> None:
        self.current = self._ready.popleft()
        while True:
            try:
                self._begun.set()  # rank 0 goes; from here on, an interrupt must not be lost
                while not self._all_ended.wait(_LOOK_SECONDS):
                    pass  # a signal that came just before the wait is seen after it
                return
            except KeyboardInterrupt as interrupt:  # the running rank ends at its next operation
                self.fail(interrupt)

    def _live(self, rank: int, body: Callable[[int], None]) -> None:
        if rank == 0:
            self._begun.wait()
        else:
            self._turns[rank].acquire()
        self._generators[rank].install()
        try:
            if self.failure is None:
                body(rank)
        except BaseException as error:
            if self.failure is None:
                self.failed_rank = rank
                self.fail(error)
        finally:
            self._pass_on()
            # Threads leave while no other runs: torch frees what DTensor keeps per thread under a lock that a
            # running thread may want too, and needs the interpreter's lock for it, which that one then has.
            self._turns[rank].acquire()

    def fail(self, error: BaseException) -> BaseException:
        """End all ranks with ``error``, unless they already end with another; returns what to raise."""
        if self.failure is None:
            self.failure = error
        return self.failure

    def check(self) -> None:
        """Raise unless the calling thread is the rank that holds the baton, in a simulation that goes on."""
        if self.current < 0:
            raise RankError("a process group was used after its simulation; use it inside of simulate.run")
        if threading.current_thread() is not self._threads[self.current]:
            raise RankError(
                f"torch.distributed was used from thread {threading.current_thread().name!r} while rank "
                f"{self.current} ran; a simulated rank is one thread"
            )
        if self.failure is not None:
            raise Ended

    def block(self, waiting: W) -> None:
        """Hand over until another rank calls :meth:`wake` with what this one waits for."""
        self.check()
        self._waiting[self.current] = waiting
        self._hand_over(self.current)

    def wake(self, rank: int, waiting: W) -> None:
        """``waiting`` has come; nothing happens where ``rank`` doesn't wait for it."""
        if self._waiting.get(rank) is waiting:
            del self._waiting[rank]
            self._ready.append(rank)

    def pause(self) -> None:
        """Let every other rank that can run go first."""
        self.check()
        self._ready.append(self.current)
        self._hand_over(self.current)

    def _hand_over(self, rank: int) -> None:
        self._generators[rank].keep()
        self._pass_on()
        self._turns[rank].acquire()
        self._generators[rank].install()
        self.check()

    def _pass_on(self) -> None:
        if not self._ready and self._waiting and self.failure is None:
            self.fail(self._stuck())
        if self.failure is not None:  # let the blocked ranks unwind, one after another
            self._ready.extend(sorted(self._waiting))
            self._waiting.clear()
        self.current = self._ready.popleft() if self._ready else -1
        if self.current >= 0:
            self._turns[self.current].release()
        else:
            self._all_ended.set()

    def _stuck(self) -> BaseException:
        try:
            return self._diagnose(self._waiting)
        except Exception as error:  # a user's __str__ may raise; the ranks must end all the same
            return error
