"""Another process for what needs not wait: a copy of this one, which has everything that there is without sending it;
it may have a copy of its own.

Results don't depend on whether there is one: what runs elsewhere changes nothing here, is told one thing, and gives one
back. If the copy dies, or doesn't answer, what it did is done here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PicklingError
from typing import Any, Final, Generic, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_PATIENCE: Final = 10.0  # seconds in which a copy that goes on does anything


def processes() -> int:
    """That may run at once: as many as torch may use threads, and as there are cores."""
    if not sys.platform.startswith("linux"):  # elsewhere, copies may not use all that systems keep for threads
        return 1
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))))


class Running(Generic[T, R]):
    """What ``run`` gives, which it is given a way to ask for what it is told: here, when the result is asked for, or
    meanwhile in a copy (``pid``) at the other end of a ``pipe``."""

    def __init__(self, run: Callable[[Callable[[], T]], R], pid: int = 0, pipe: Connection | None = None) -> None:
        self._run = run
        self._pid = pid
        self._pipe = pipe
        self._told: list[T] = []

    def tell(self, what: T) -> None:
        """What it waits for. A copy is no use where that or its result can't be pickled, or if it is gone."""
        self._told = [what]
        try:
            if self._pipe is not None:
                self._pipe.send(what)
        except (OSError, PicklingError, AttributeError, TypeError, RuntimeError):
            self.end()

    def result(self) -> R:
        """Raises what it raises."""
        answer: list[R] = []
        if self._pipe is not None:
            with suppress(EOFError, OSError):
                answer = [self._pipe.recv()] if self._answers(self._pipe) else []
        self.end()
        return answer[0] if answer else self._run(lambda: self._told[0])

    def _answers(self, pipe: Connection) -> bool:
        """Whether it does, however long that takes: not if it waits for what never comes."""
        spent = -1
        while not pipe.poll(_PATIENCE):
            before, spent = spent, _cpu_ticks(self._pid)
            if spent == before:
                return False
        return True

    def end(self) -> None:
        """Of the copy."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            with suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)


@contextmanager
def running(run: Callable[[Callable[[], T]], R], *, elsewhere: bool) -> Iterator[Running[T, R]]:
    """``run``, beside what is done within if there may be another process."""
    found = (_copy(run) if elsewhere else None) or Running(run)
    try:
        yield found
    finally:
        found.end()


def both(one: Callable[[], T], other: Callable[[], R], *, elsewhere: bool) -> tuple[T, R]:
    """What either gives, the ``other`` beside the ``one`` if there may be another process, or else after it."""

    def run(_: Callable[[], None]) -> R:
        return other()

    with running(run, elsewhere=elsewhere) as copy:
        return one(), copy.result()


def _copy(run: Callable[[Callable[[], T]], R]) -> Running[T, R] | None:
    """None where there can't be one."""
    (here, there), parent = Pipe(), os.getpid()
    try:
        pid = _forked()
    except OSError:  # no memory, or too many processes
        return None
    if not pid:
        here.close()
        _answer(run, there, parent)
    there.close()
    return Running(run, pid, here)


def _forked() -> int:
    """0 in a copy of this process, the copy's number here. Raises OSError."""
    with warnings.catch_warnings():
        # Other threads may hold locks. Those that there are here run kernels, or show how far a search is.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _cpu_ticks(pid: int) -> int:
    """That a process and its own copies ran for so far (proc_pid_stat(5)). Raises OSError where there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    with suppress(OSError):  # one may have ended meanwhile
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            ticks += _cpu_ticks(int(child))
    return ticks


def _end_with(parent: int) -> None:
    """Let this process be killed when its ``parent`` ends, however that does (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _answer(run: Callable[[Callable[[], Any]], Any], pipe: Connection, parent: int) -> None:
    """All that a copy of ``parent`` does; whatever goes wrong in it, its end says so."""
    try:
        _end_with(parent)
        torch.set_num_threads(1)  # a copy has none of the others, and would wait for them
        pipe.send(run(pipe.recv))
    finally:
        os._exit(0)
